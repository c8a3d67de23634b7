//! The trace page: everything with one correlation id, on one time axis.

use std::collections::HashMap;

use askama::Template;
use axum::extract::RawQuery;
use faena_domain::Timestamp;
use serde::Deserialize;

use super::timeline::{self, End, Run};
use crate::{
    details::{event_details, log_details, trace_details},
    error::Failure,
    format::short_id,
    layout::Page,
    markup::Markup,
    query::{Pairs, segment},
    table::{anchor, escaped},
    texts::Texts,
    viewer::Viewer,
};

/// Maximum number of entries that the page shows.
const MAX_ENTRIES: usize = 500;
/// An event is published with the change that the log records, so their times differ by little.
const SAME_TIME_MS: i64 = 1_000;
/// The entries of a job's log that record the same change as an event.
const LOGGED: [(&str, &[&str]); 11] = [
    ("job.created", &["created"]),
    ("job.completed", &["completed"]),
    ("job.failed", &["failed", "timeout", "orphaned", "expired"]),
    ("job.cancelled", &["cancelled"]),
    ("QUEUED", &["queued", "released", "retried"]),
    ("ASSIGNED", &["assigned"]),
    ("PROCESSING", &["started"]),
    ("RETRYING", &["retry_scheduled", "failed", "timeout", "orphaned"]),
    ("FAILED", &["failed", "timeout", "orphaned", "expired"]),
    ("CANCELLED", &["cancelled"]),
    ("COMPLETED", &["completed"]),
];

#[derive(Deserialize, Default)]
#[serde(default)]
pub struct Trace {
    pub timeline: Vec<Entry>,
    jobs: Vec<Job>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Job {
    id: String,
    name: String,
    created_at: Timestamp,
    #[serde(default)]
    runs: Vec<JobRun>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct JobRun {
    run: u64,
    status: String,
    started_at: Option<Timestamp>,
    finished_at: Option<Timestamp>,
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

impl Entry {
    /// Returns whether this entry records the change that the event publishes.
    fn records(&self, event: &Entry) -> bool {
        let is_same_subject = self.job_id == event.job_id && self.task_id == event.task_id;
        if !is_same_subject || self.at.ms_since(event.at).abs() > SAME_TIME_MS {
            return false;
        }
        match self.kind.as_str() {
            "task" => {
                self.what == event.what || (!event.details.is_empty() && self.details.starts_with(&event.details))
            }
            "job" => {
                let state = event.details.rsplit(" to ").next().unwrap_or_default();
                let key = if event.what == "job.status.changed" { state } else { &event.what };
                LOGGED.iter().any(|(known, entries)| *known == key && entries.contains(&self.what.as_str()))
            }
            _ => false,
        }
    }
}

struct Line {
    at: Markup,
    /// Position of the mark on the axis, from 0 to 97; the mark is 3 wide.
    x: f64,
    kind: String,
    what: String,
    subject: Markup,
    details: Markup,
}

#[derive(Template)]
#[template(path = "trace.html")]
struct TracePage<'a> {
    t: &'static Texts,
    base: &'a str,
    id: &'a str,
    /// Drawing of the runs; empty if there are none.
    runs: Markup,
    has_runs: bool,
    lines: Vec<Line>,
    /// Labels of the axis: its start, middle and end.
    axis: [String; 3],
    span: String,
    is_truncated: bool,
}

pub async fn show(viewer: Viewer, RawQuery(query): RawQuery) -> Result<Page, Failure> {
    let query = Pairs::parse(query.as_deref());
    let id = query.get("id").unwrap_or_default();
    let trace = match id {
        "" => Trace::default(),
        id => match viewer.get::<Trace>(&format!("/api/v1/trace/{}", segment(id))).await {
            Ok(trace) => trace,
            Err(failure) if failure.status == axum::http::StatusCode::NOT_FOUND => Trace::default(),
            Err(failure) => return Err(failure),
        },
    };
    let mut entries = without_repeated_events(&trace.timeline);
    let is_truncated = entries.len() > MAX_ENTRIES;
    entries.truncate(MAX_ENTRIES);
    let (t, formats) = (viewer.texts(), viewer.formats());
    let from = entries.iter().map(|entry| entry.at).min().unwrap_or(viewer.now());
    let span = entries.iter().map(|entry| entry.at.ms_since(from)).max().unwrap_or(0);
    let names: HashMap<&str, &str> = trace.jobs.iter().map(|job| (job.id.as_str(), job.name.as_str())).collect();
    let line = |entry: &&Entry| Line {
        at: formats.clock(entry.at),
        x: entry.at.ms_since(from) as f64 / span.max(1) as f64 * 97.0,
        kind: t.word(&entry.kind).to_owned(),
        what: t.word(&entry.what).to_owned(),
        subject: subject(&viewer, entry, &names),
        details: match entry.kind.as_str() {
            "event" => escaped(&event_details(t, &entry.details)),
            "job" => log_details(&viewer, &entry.what, &entry.details),
            kind => trace_details(&viewer, kind, &entry.details),
        },
    };
    let runs = runs(t, &trace.jobs);
    let page = TracePage {
        t,
        base: viewer.base(),
        id,
        runs: timeline::draw(&runs, formats, t.now),
        has_runs: !runs.is_empty(),
        lines: entries.iter().map(line).collect(),
        axis: [0, span / 2, span].map(|ms| format!("+{}", formats.duration(ms))),
        span: formats.duration(span),
        is_truncated,
    };
    Page::new(t.trace, "/trace", &page)
}

/// Leaves out the events that say the same as an entry of a log or a history.
fn without_repeated_events(entries: &[Entry]) -> Vec<&Entry> {
    let is_repeated = |event: &Entry| event.kind == "event" && entries.iter().any(|entry| entry.records(event));
    entries.iter().filter(|entry| !is_repeated(entry)).collect()
}

/// Returns one bar per attempt. The first run of a job waits from the job's creation, and each further one from the end of the
/// one before it.
fn runs(t: &Texts, jobs: &[Job]) -> Vec<Run> {
    let mut runs = Vec::new();
    for job in jobs {
        let mut ready_at = job.created_at;
        for (index, run) in job.runs.iter().enumerate() {
            let end = match (run.status.as_str(), run.finished_at) {
                (_, None) => End::None,
                ("COMPLETED", _) => End::Completed,
                ("CANCELLED", _) => End::Cancelled,
                _ => End::Failed,
            };
            let label = if job.runs.len() > 1 { format!("{} {}", job.name, index + 1) } else { job.name.clone() };
            let title = format!("{} {}", t.run, run.run);
            runs.push(Run { label, title, ready_at, started_at: run.started_at, ended_at: run.finished_at, end });
            ready_at = run.finished_at.unwrap_or(ready_at);
        }
    }
    runs
}

fn subject(viewer: &Viewer, entry: &Entry, names: &HashMap<&str, &str>) -> Markup {
    match (&entry.job_id, &entry.task_id, &entry.actor) {
        (Some(job), _, _) => {
            let text = names.get(job.as_str()).map(|name| format!("{name} {}", short_id(job)));
            anchor(&format!("{}/jobs/{job}", viewer.base()), &text.unwrap_or_else(|| short_id(job)))
        }
        (None, Some(task), _) => anchor(&format!("{}/tasks/{task}", viewer.base()), &short_id(task)),
        (None, None, Some(actor)) => escaped(actor),
        _ => Markup::default(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_event_that_repeats_the_log_is_left_out() {
        let at = |ms: u32| format!("2026-11-18T02:02:18.{ms:03}Z");
        let entries: Vec<Entry> = serde_json::from_value(json!([
            {"at": at(0), "kind": "job", "what": "created", "jobId": "a"},
            {"at": at(1), "kind": "event", "what": "job.created", "jobId": "a", "details": "PENDING"},
            {"at": at(2), "kind": "event", "what": "job.created", "jobId": "b", "details": "PENDING"},
            {"at": at(3), "kind": "job", "what": "queued", "jobId": "a"},
            {"at": at(4), "kind": "event", "what": "job.status.changed", "jobId": "a", "details": "PENDING to QUEUED"},
            {"at": at(5), "kind": "event", "what": "job.dead_lettered", "jobId": "a", "details": "FAILED"},
            {"at": at(6), "kind": "task", "what": "pay", "taskId": "t", "details": "PAYING to PAID; job x"},
            {"at": at(6), "kind": "event", "what": "task.state.changed", "taskId": "t", "details": "PAYING to PAID"},
            {"at": at(6), "kind": "event", "what": "task.ended", "taskId": "t"},
        ]))
        .expect("entries of a trace");
        let left: Vec<&str> = without_repeated_events(&entries).iter().map(|entry| entry.what.as_str()).collect();
        assert_eq!(left, ["created", "job.created", "queued", "job.dead_lettered", "pay", "task.ended"]);
    }
}
