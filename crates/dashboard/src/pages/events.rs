//! The events page: sinks, sources, inboxes, and events that a sink rejected.

use askama::Template;
use axum::{extract::Path, response::Response};
use faena_domain::Timestamp;
use serde::Deserialize;
use serde_json::json;

use crate::{
    action::show_result,
    error::Failure,
    layout::Page,
    markup::{Markup, StateStyle, badge},
    query::segment,
    reasons::english,
    table::{Cell, Row, Table, escaped, extra_column, extra_number_column, number_column, text_column},
    texts::Texts,
    viewer::Viewer,
};

#[derive(Deserialize)]
struct Outbox {
    sinks: Vec<Sink>,
    sources: Vec<Input>,
    inboxes: Vec<Input>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sink {
    name: String,
    types: Vec<String>,
    pending: u64,
    oldest_pending_at: Option<Timestamp>,
    dead: u64,
    sent: u64,
    down_since: Option<Timestamp>,
    down_reason: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Input {
    name: String,
    node_name: String,
    state: String,
    down_reason: Option<String>,
    #[serde(default)]
    pending: Option<u64>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct DeadList {
    #[serde(alias = "events", alias = "messages", alias = "entries")]
    data: Vec<DeadEvent>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct DeadEvent {
    id: serde_json::Value,
    #[serde(default)]
    sink: String,
    #[serde(rename = "type", default)]
    kind: String,
    #[serde(default, alias = "lastError")]
    error: Option<String>,
}

impl DeadEvent {
    fn id(&self) -> String {
        self.id.as_str().map_or_else(|| self.id.to_string(), str::to_owned)
    }
}

struct DeadLine {
    id: String,
    kind: String,
    sink: String,
    error: String,
}

#[derive(Template)]
#[template(path = "events.html")]
struct EventsPage<'a> {
    t: &'static Texts,
    base: &'a str,
    sinks: String,
    inputs: String,
    dead: Vec<DeadLine>,
}

pub async fn show(viewer: Viewer) -> Result<Page, Failure> {
    let outbox: Outbox = viewer.get("/api/v1/outbox?limit=100").await?;
    let dead: DeadList = viewer.get("/api/v1/outbox/dead-letter?limit=50").await.unwrap_or_default();
    let t = viewer.texts();
    let line = |event: &DeadEvent| DeadLine {
        id: event.id(),
        kind: event.kind.clone(),
        sink: event.sink.clone(),
        error: event.error.clone().unwrap_or_default(),
    };
    let page = EventsPage {
        t,
        base: viewer.base(),
        sinks: sink_table(&viewer, &outbox.sinks).render().map_err(Failure::internal)?,
        inputs: input_table(&viewer, &outbox).render().map_err(Failure::internal)?,
        dead: dead.data.iter().map(line).collect(),
    };
    Page::new(t.events, "/events", &page)
}

fn sink_table(viewer: &Viewer, sinks: &[Sink]) -> Table {
    let (t, formats) = (viewer.texts(), viewer.formats());
    let details = |sink: &Sink| match (&sink.down_reason, sink.types.as_slice()) {
        (Some(reason), _) => english(viewer, reason, &[]),
        (None, [all]) if all == "*" => escaped(t.all_events),
        (None, types) => escaped(&types.join(", ")),
    };
    let row = |sink: &Sink| {
        let state = match sink.down_since {
            Some(_) => badge(StateStyle::Problem, t.down),
            None => badge(StateStyle::On, t.up),
        };
        let oldest = sink.oldest_pending_at.map_or_else(Markup::default, |at| formats.age(at));
        Row {
            key: sink.name.clone(),
            cells: vec![
                Cell::text(&sink.name),
                Cell::markup(state),
                Cell::number(&formats.count(sink.pending)),
                Cell::markup(oldest).right().extra(),
                Cell::number(&formats.count(sink.sent)).extra(),
                Cell::number(&formats.count(sink.dead)).extra(),
                Cell::markup(details(sink)).long().extra(),
            ],
        }
    };
    Table {
        columns: vec![
            text_column(t.sink),
            text_column(t.state),
            number_column(t.waiting),
            extra_number_column(t.oldest_title),
            extra_number_column(t.sent),
            extra_number_column(t.rejected),
            extra_column(t.details),
        ],
        rows: sinks.iter().map(row).collect(),
        empty: escaped(t.no_sinks),
        select_label: None,
    }
}

fn input_table(viewer: &Viewer, outbox: &Outbox) -> Table {
    let (t, formats) = (viewer.texts(), viewer.formats());
    let row = |kind: &'static str, input: &Input| {
        let style = if input.down_reason.is_some() { StateStyle::Problem } else { StateStyle::On };
        Row {
            key: format!("{kind}:{}:{}", input.name, input.node_name),
            cells: vec![
                Cell::text(&input.name),
                Cell::text(kind),
                Cell::markup(badge(style, t.word(&input.state))),
                Cell::number(&input.pending.map(|n| formats.count(n)).unwrap_or_default()),
                Cell::text(input.down_reason.as_deref().unwrap_or(&input.node_name)).long().extra(),
            ],
        }
    };
    let sources = outbox.sources.iter().map(|input| row(t.source_kind, input));
    let inboxes = outbox.inboxes.iter().map(|input| row(t.inbox_kind, input));
    Table {
        columns: vec![
            text_column(t.name),
            text_column(t.kind_of_worker),
            text_column(t.state),
            number_column(t.waiting),
            extra_column(t.details),
        ],
        rows: sources.chain(inboxes).collect(),
        empty: escaped(t.no_inputs),
        select_label: None,
    }
}

pub async fn act(viewer: Viewer, Path((id, action)): Path<(String, String)>) -> Result<Response, Failure> {
    let t = viewer.texts();
    let done = match action.as_str() {
        "replay" => t.event_was_replayed,
        "resolve" => t.event_was_resolved,
        _ => return Err(Failure::not_found(t.no_such_action)),
    };
    let path = format!("/api/v1/outbox/dead-letter/{}/{action}", segment(&id));
    let result = viewer.post_json(&path, &json!({})).await;
    show_result(&viewer, "/events", result, done)
}
