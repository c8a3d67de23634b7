//! What belongs to a job besides its runs: the jobs it waits for, its webhooks, and its events.

use faena_domain::Timestamp;
use serde::Deserialize;

use crate::{
    error::Failure,
    format::short_id,
    markup::{Look, badge, job_state},
    query::segment,
    table::{Cell, Row, Table, extra_number_column, number_column, text_column},
    viewer::Viewer,
};

/// Parents, webhooks and events that the page lists.
const MAX_PARENTS: usize = 10;
const MAX_EVENTS: usize = 20;

#[derive(Deserialize)]
struct Parent {
    id: String,
    name: String,
    queue: String,
    status: String,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct WebhookList {
    webhooks: Vec<Webhook>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Webhook {
    id: String,
    url: String,
    event: String,
    state: String,
    attempts: u64,
    created_at: Timestamp,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Trace {
    timeline: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Entry {
    at: Timestamp,
    kind: String,
    what: String,
    #[serde(default)]
    details: String,
    #[serde(default)]
    job_id: Option<String>,
}

/// Tables as HTML; empty if there is nothing to show.
#[derive(Default)]
pub struct Related {
    pub parents: String,
    pub webhooks: String,
    pub events: String,
}

/// Reads what belongs to a job. Parts that the viewer may not see are left out.
pub async fn read(viewer: &Viewer, id: &str, correlation: &str, parents: &[String]) -> Result<Related, Failure> {
    let mut found = Vec::new();
    for parent in parents.iter().take(MAX_PARENTS) {
        found.extend(viewer.get::<Parent>(&format!("/api/v1/jobs/{}", segment(parent))).await);
    }
    let webhooks_path = format!("/api/v1/webhooks?jobId={}&limit=20", segment(id));
    let trace_path = format!("/api/v1/trace/{}", segment(correlation));
    let (webhooks, trace) = tokio::join!(viewer.get::<WebhookList>(&webhooks_path), viewer.get::<Trace>(&trace_path));
    let events = trace.unwrap_or_default().timeline.into_iter();
    let events = events.filter(|entry| entry.kind == "event" && entry.job_id.as_deref() == Some(id));
    let events: Vec<Entry> = events.take(MAX_EVENTS).collect();
    Ok(Related {
        parents: render(&parent_table(viewer, &found))?,
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

fn parent_table(viewer: &Viewer, parents: &[Parent]) -> Table {
    let t = viewer.texts();
    let row = |parent: &Parent| Row {
        key: parent.id.clone(),
        cells: vec![
            Cell::link(&format!("{}/jobs/{}", viewer.base(), parent.id), &parent.name),
            Cell::markup(job_state(t, &parent.status)),
            Cell::text(&parent.queue),
            Cell::text(short_id(&parent.id)).extra(),
        ],
    };
    Table {
        columns: vec![text_column(t.job), text_column(t.state), text_column(t.queue), crate::table::extra_column(t.id)],
        rows: parents.iter().map(row).collect(),
        ..Table::default()
    }
}

fn webhook_table(viewer: &Viewer, webhooks: &[Webhook]) -> Table {
    let (t, formats) = (viewer.texts(), viewer.formats());
    let row = |webhook: &Webhook| Row {
        key: webhook.id.clone(),
        cells: vec![
            Cell::link(&format!("{}/webhooks/{}", viewer.base(), webhook.id), &webhook.url),
            Cell::markup(badge(Look::of(&webhook.state), t.word(&webhook.state))),
            Cell::text(&webhook.event),
            Cell::number(&webhook.attempts.to_string()).extra(),
            Cell::markup(formats.age(webhook.created_at)).right(),
        ],
    };
    Table {
        columns: vec![
            text_column(t.receiver),
            text_column(t.state),
            text_column(t.events),
            extra_number_column(t.attempts),
            number_column(t.age),
        ],
        rows: webhooks.iter().map(row).collect(),
        ..Table::default()
    }
}

fn event_table(viewer: &Viewer, events: &[Entry]) -> Table {
    let (t, formats) = (viewer.texts(), viewer.formats());
    let row = |(index, entry): (usize, &Entry)| Row {
        key: format!("event-{index}"),
        cells: vec![Cell::markup(formats.clock(entry.at)), Cell::text(&entry.what), Cell::text(&entry.details).long()],
    };
    Table {
        columns: vec![text_column(t.time), text_column(t.event), text_column(t.details)],
        rows: events.iter().enumerate().map(row).collect(),
        ..Table::default()
    }
}
