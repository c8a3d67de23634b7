//! What belongs to a job besides its runs: its webhooks and its events.

use super::{
    trace::{Entry, Trace},
    webhooks::{Webhook, WebhookList},
};
use crate::{
    details::event_details,
    error::Failure,
    query::segment,
    table::{Cell, Row, Table, escaped, extra_column, extra_number_column, number_column, text_column},
    viewer::Viewer,
};

/// Maximum number of events that the page lists.
const MAX_EVENTS: usize = 20;

/// Tables as HTML; empty if there is nothing to show.
#[derive(Default)]
pub struct Related {
    pub webhooks: String,
    pub events: String,
}

/// Reads what belongs to a job. Parts that the viewer may not see are left out.
pub async fn read(viewer: &Viewer, id: &str, correlation: &str) -> Result<Related, Failure> {
    let webhooks_path = format!("/api/v1/webhooks?jobId={}&limit=20", segment(id));
    let trace_path = format!("/api/v1/trace/{}", segment(correlation));
    let (webhooks, trace) = tokio::join!(viewer.get::<WebhookList>(&webhooks_path), viewer.get::<Trace>(&trace_path));
    let events = trace.unwrap_or_default().timeline.into_iter();
    let events = events.filter(|entry| entry.kind == "event" && entry.job_id.as_deref() == Some(id));
    let events: Vec<Entry> = events.take(MAX_EVENTS).collect();
    Ok(Related {
        webhooks: render(&webhook_table(viewer, &webhooks.unwrap_or_default().webhooks))?,
        events: render(&event_table(viewer, &events))?,
    })
}

fn render(table: &Table) -> Result<String, Failure> {
    use askama::Template;
    match table.rows.is_empty() {
        true => Ok(String::new()),
        false => table.render().map_err(Failure::internal),
    }
}

fn webhook_table(viewer: &Viewer, webhooks: &[Webhook]) -> Table {
    let (t, formats) = (viewer.texts(), viewer.formats());
    let row = |webhook: &Webhook| Row {
        key: webhook.id.clone(),
        cells: vec![
            Cell::link(&format!("{}/webhooks/{}", viewer.base(), webhook.id), &webhook.url).note(&webhook.badge(t)),
            Cell::markup(webhook.badge(t)).extra(),
            Cell::text(&webhook.event).extra(),
            Cell::number(&webhook.attempts.to_string()).extra(),
            Cell::markup(formats.age(webhook.created_at)).right(),
        ],
    };
    Table {
        columns: vec![
            text_column(t.receiver),
            extra_column(t.state),
            extra_column(t.event),
            extra_number_column(t.attempts),
            number_column(t.age),
        ],
        rows: webhooks.iter().map(row).collect(),
        ..Table::default()
    }
}

fn event_table(viewer: &Viewer, events: &[Entry]) -> Table {
    let (t, formats) = (viewer.texts(), viewer.formats());
    let row = |(index, entry): (usize, &Entry)| {
        let details = event_details(t, &entry.details);
        Row {
            key: format!("event-{index}"),
            cells: vec![
                Cell::markup(formats.clock(entry.at)),
                Cell::text(&entry.what).with("main").note(&escaped(&details)),
                Cell::text(&details).long().extra(),
            ],
        }
    };
    Table {
        columns: vec![text_column(t.time), text_column(t.event), extra_column(t.details)],
        rows: events.iter().enumerate().map(row).collect(),
        ..Table::default()
    }
}
