//! The trace page: everything with one correlation id, on one time axis.

use askama::Template;
use axum::extract::RawQuery;
use faena_domain::Timestamp;
use serde::Deserialize;

use crate::{
    error::Failure,
    format::{Formats, short_id},
    layout::Page,
    markup::Markup,
    query::{Pairs, segment},
    table::{anchor, escaped},
    texts::Texts,
    viewer::Viewer,
};

/// Maximum number of entries that the page shows.
const MAX_ENTRIES: usize = 500;

#[derive(Deserialize, Default)]
pub struct Trace {
    #[serde(default)]
    pub timeline: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    pub at: Timestamp,
    pub kind: String,
    pub what: String,
    #[serde(default)]
    pub details: String,
    #[serde(default)]
    pub job_id: Option<String>,
    #[serde(default)]
    task_id: Option<String>,
    #[serde(default)]
    actor: Option<String>,
}

struct Line {
    at: Markup,
    /// Position of the mark on the axis, from 0 to 97; the mark is 3 wide.
    x: f64,
    kind: String,
    what: String,
    subject: Markup,
    details: String,
}

#[derive(Template)]
#[template(path = "trace.html")]
struct TracePage<'a> {
    t: &'static Texts,
    base: &'a str,
    id: &'a str,
    lines: Vec<Line>,
    span: String,
    is_truncated: bool,
}

pub async fn show(viewer: Viewer, RawQuery(query): RawQuery) -> Result<Page, Failure> {
    let query = Pairs::parse(query.as_deref());
    let id = query.get("id").unwrap_or_default();
    let mut entries = match id {
        "" => Vec::new(),
        id => match viewer.get::<Trace>(&format!("/api/v1/trace/{}", segment(id))).await {
            Ok(trace) => trace.timeline,
            Err(failure) if failure.status == axum::http::StatusCode::NOT_FOUND => Vec::new(),
            Err(failure) => return Err(failure),
        },
    };
    let is_truncated = entries.len() > MAX_ENTRIES;
    entries.truncate(MAX_ENTRIES);
    let (t, formats) = (viewer.texts(), viewer.formats());
    let (lines, span) = lines(&viewer, formats, &entries);
    let page = TracePage { t, base: viewer.base(), id, lines, span, is_truncated };
    Page::new(t.trace, "/trace", &page)
}

fn lines(viewer: &Viewer, formats: Formats, entries: &[Entry]) -> (Vec<Line>, String) {
    let (Some(from), Some(until)) = (entries.iter().map(|e| e.at).min(), entries.iter().map(|e| e.at).max()) else {
        return (Vec::new(), String::new());
    };
    let (t, span) = (viewer.texts(), until.ms_since(from));
    let line = |entry: &Entry| Line {
        at: formats.clock(entry.at),
        x: entry.at.ms_since(from) as f64 / span.max(1) as f64 * 97.0,
        kind: t.word(&entry.kind).to_owned(),
        what: t.word(&entry.what).to_owned(),
        subject: subject(viewer, entry),
        details: entry.details.clone(),
    };
    (entries.iter().map(line).collect(), formats.duration(span))
}

fn subject(viewer: &Viewer, entry: &Entry) -> Markup {
    match (&entry.job_id, &entry.task_id, &entry.actor) {
        (Some(job), _, _) => anchor(&format!("{}/jobs/{job}", viewer.base()), &short_id(job)),
        (None, Some(task), _) => anchor(&format!("{}/tasks/{task}", viewer.base()), &short_id(task)),
        (None, None, Some(actor)) => escaped(actor),
        _ => Markup::default(),
    }
}
