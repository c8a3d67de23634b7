//! One job: first why it is in its state, then its timeline, steps, log, and related jobs and webhooks.

use askama::Template;
use axum::{extract::Path, response::Response};
use faena_domain::Timestamp;
use serde::Deserialize;
use serde_json::Value;

use super::{
    job_form, job_graph,
    job_related::{self, Related},
    jobs::{Progress, progress_bar},
    queues::queue_link,
    timeline::{self, End, Run},
};
use crate::{
    action::show_result,
    content::{Hidden, content},
    details::{cause, log_details},
    error::Failure,
    format::short_id,
    layout::Page,
    markup::{Markup, StateStyle, badge, job_state},
    query::segment,
    reasons::Reason,
    table::{anchor, escaped},
    texts::Texts,
    viewer::Viewer,
    visible::visible_json,
};

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Job {
    id: String,
    name: String,
    #[serde(rename = "type")]
    kind: String,
    queue: String,
    status: String,
    priority: String,
    payload: Value,
    max_retries: u64,
    #[serde(default)]
    retry_count: u64,
    attempt: u64,
    #[serde(default)]
    timeout_ms: Option<u64>,
    created_at: Timestamp,
    completed_at: Option<Timestamp>,
    scheduled_at: Option<Timestamp>,
    expires_at: Option<Timestamp>,
    #[serde(default)]
    next_attempt_at: Option<Timestamp>,
    result: Option<Value>,
    error: Option<String>,
    progress: Option<Progress>,
    #[serde(default)]
    execution_log: Vec<LogEntry>,
    #[serde(default)]
    steps: Vec<Step>,
    #[serde(default)]
    attempts: Vec<Attempt>,
    schedule_id: Option<String>,
    worker_id: Option<String>,
    run: Option<u64>,
    webhook_url: Option<String>,
    correlation_id: String,
    unique_key: Option<String>,
    concurrency_key: Option<String>,
    #[serde(default)]
    tags: Vec<String>,
    #[serde(default)]
    hidden: Hidden,
}

#[derive(Deserialize)]
struct LogEntry {
    timestamp: Timestamp,
    event: String,
    #[serde(default)]
    details: Option<String>,
    #[serde(default)]
    run: Option<u64>,
    #[serde(default)]
    hidden: Hidden,
}

#[derive(Deserialize)]
struct Step {
    name: String,
    #[serde(default)]
    result: Value,
}

#[derive(Deserialize)]
struct Attempt {
    /// `None`: the job ended without a run.
    run: Option<u64>,
    #[serde(default)]
    error: Option<String>,
}

#[derive(Deserialize)]
struct Why {
    reasons: Vec<Reason>,
}

/// Explanation of the job's current state.
struct WhyPanel {
    question: &'static str,
    /// The only reason.
    reason: Option<Markup>,
    /// Every reason, if there is more than one.
    reasons: Vec<Markup>,
    cancelled_by: Option<String>,
}

struct LogLine {
    at: Markup,
    event: String,
    details: Markup,
}

/// Actions that the job's state permits.
struct PermittedActions {
    retry: bool,
    cancel: bool,
    edit: bool,
    delete: bool,
}

#[derive(Template)]
#[template(path = "job.html")]
struct JobPage<'a> {
    t: &'static Texts,
    base: &'a str,
    job: &'a Job,
    badge: Markup,
    short_id: String,
    facts: Markup,
    style: &'static str,
    why: Option<WhyPanel>,
    /// Why it was cancelled.
    cause: Option<Markup>,
    /// Drawing of the runs. `None`: there is no run to draw.
    timeline: Option<Markup>,
    progress: Option<Markup>,
    steps: Vec<(String, Markup, String)>,
    /// The attempt that failed, its run, and the error.
    errors: Vec<(usize, String, String)>,
    log: Vec<LogLine>,
    log_is_hidden: bool,
    details: Vec<(&'static str, Markup)>,
    payload: Markup,
    payload_is_hidden: bool,
    result: Option<Markup>,
    graph: Markup,
    related: Related,
    curl: String,
    can: PermittedActions,
}

pub async fn show(viewer: Viewer, Path(id): Path<String>) -> Result<Page, Failure> {
    let path = format!("/api/v1/jobs/{}", segment(&id));
    let answer: Value = viewer.get(&path).await?;
    let curl = curl(&viewer, &answer);
    let job: Job = serde_json::from_value(answer).map_err(Failure::internal)?;
    let why = match job.status.as_str() {
        "COMPLETED" => None,
        _ => viewer.get::<Why>(&format!("{path}/why")).await.ok(),
    };
    let cancelled_by = if job.status == "CANCELLED" { cancelled_by(&viewer, &job.id).await } else { None };
    let (t, formats) = (viewer.texts(), viewer.formats());
    let is_hidden = |field: &str| job.hidden.iter().any(|name| name == field);
    let shown_result = job.result.as_ref().or(is_hidden("result").then_some(&Value::Null));
    let page = JobPage {
        t,
        base: viewer.base(),
        badge: job_state(t, &job.status),
        short_id: short_id(&job.id),
        facts: facts(&viewer, &job),
        style: StateStyle::of(&job.status).class(),
        why: why.map(|why| why_panel(&viewer, &job, &why, cancelled_by)),
        cause: job.error.as_deref().map(|error| cause(&viewer, error)),
        timeline: Some(runs(t, &job)).filter(|runs| !runs.is_empty()).map(|runs| timeline::draw(&runs, formats, t.now)),
        progress: job.progress.as_ref().map(|progress| progress_bar(formats, progress)),
        steps: steps(t, &job),
        errors: errors(t, &job),
        log: log(&viewer, &job),
        details: details(&viewer, &job),
        log_is_hidden: job.execution_log.iter().any(|entry| !entry.hidden.is_empty()),
        payload: content(t, &job.hidden, "payload", &job.payload),
        payload_is_hidden: is_hidden("payload"),
        result: shown_result.map(|result| content(t, &job.hidden, "result", result)),
        graph: job_graph::read(&viewer, &job.id).await?,
        related: job_related::read(&viewer, &job.id, &job.correlation_id).await?,
        curl,
        can: PermittedActions {
            retry: matches!(job.status.as_str(), "FAILED" | "CANCELLED" | "RETRYING"),
            cancel: !matches!(job.status.as_str(), "COMPLETED" | "FAILED" | "CANCELLED"),
            edit: matches!(job.status.as_str(), "PENDING" | "QUEUED" | "RETRYING"),
            delete: matches!(job.status.as_str(), "COMPLETED" | "FAILED" | "CANCELLED"),
        },
        job: &job,
    };
    Page::new(job.name.clone(), "/jobs", &page)
}

#[derive(Deserialize)]
struct AuditList {
    entries: Vec<AuditEntry>,
}

#[derive(Deserialize)]
struct AuditEntry {
    actor: String,
}

/// Returns who cancelled a job, if the audit log says so and the viewer may read it.
async fn cancelled_by(viewer: &Viewer, id: &str) -> Option<String> {
    let path = format!("/api/v1/audit?action=job.cancel&limit=1&target={}", segment(id));
    let list: AuditList = viewer.get(&path).await.ok()?;
    list.entries.into_iter().next().map(|entry| entry.actor)
}

fn why_panel(viewer: &Viewer, job: &Job, why: &Why, cancelled_by: Option<String>) -> WhyPanel {
    let t = viewer.texts();
    let mut reasons: Vec<Markup> = why.reasons.iter().map(|reason| reason.shown(viewer)).collect();
    WhyPanel {
        question: match job.status.as_str() {
            "FAILED" => t.why_failed,
            "CANCELLED" => t.why_cancelled,
            "SCHEDULED" | "ASSIGNED" | "PROCESSING" => t.why_running,
            _ => t.why_not_running,
        },
        reason: if reasons.len() == 1 { reasons.pop() } else { None },
        reasons,
        cancelled_by,
    }
}

#[derive(Template)]
#[template(ext = "html", source = "{{ t.in_queue }} {{ queue }}, {{ rest }}")]
struct Facts {
    t: &'static Texts,
    queue: Markup,
    rest: String,
}

fn facts(viewer: &Viewer, job: &Job) -> Markup {
    let (t, formats) = (viewer.texts(), viewer.formats());
    let mut facts = vec![
        format!("{} {}", t.priority, t.priority_word(&job.priority)),
        match job.attempt {
            0 => t.attempts_allowed(job.attempts_allowed()),
            attempt => format!("{} {attempt} {} {}", t.attempt_word, t.of, job.attempts_allowed()),
        },
    ];
    if let (Some(at), false) = (job.next_attempt_at, formats.is_live) {
        facts.push(format!("{} {}", t.next_attempt_in, formats.duration(at.ms_since(formats.now))));
    }
    Markup::of(&Facts { t, queue: queue_link(viewer, &job.queue), rest: facts.join(", ") })
}

impl Job {
    /// Returns how many attempts it may have. Those before a manual retry count too.
    fn attempts_allowed(&self) -> u64 {
        let waits = matches!(self.status.as_str(), "PENDING" | "QUEUED" | "RETRYING");
        let since_retry = if waits { self.retry_count } else { self.retry_count + 1 };
        self.attempt.saturating_sub(since_retry) + self.max_retries + 1
    }
}

/// Returns the errors of earlier attempts.
fn errors(t: &Texts, job: &Job) -> Vec<(usize, String, String)> {
    let entry = |(index, attempt): (usize, &Attempt)| {
        let run = attempt.run.map(|run| format!("{} {run}", t.run)).unwrap_or_default();
        Some((index + 1, run, attempt.error.clone()?))
    };
    job.attempts.iter().enumerate().filter_map(entry).collect()
}

/// Labels the attempts with their numbers. Counts back from the current attempt, because the log may have lost the
/// first.
fn name_attempts(t: &Texts, job: &Job, runs: &mut [(Option<u64>, Run)]) {
    let counted = runs.iter_mut().rev().filter(|(_, run)| run.end != End::Released);
    for (before, (_, run)) in counted.enumerate() {
        let number = job.attempt.saturating_sub(before as u64).max(1);
        run.label = format!("{} {number} {} {}", t.attempt, t.of, job.attempts_allowed());
    }
}

/// Returns the runs of a job, according to its log.
fn runs(t: &Texts, job: &Job) -> Vec<Run> {
    let mut runs: Vec<(Option<u64>, Run)> = Vec::new();
    let mut ready_at = job.created_at;
    for entry in &job.execution_log {
        let at = entry.timestamp;
        match entry.event.as_str() {
            "queued" | "retry_scheduled" => ready_at = at,
            "started" => {
                let title = entry.run.map(|run| format!("{} {run}", t.run)).unwrap_or_default();
                let (label, started_at) = (t.run.to_owned(), Some(at));
                runs.push((entry.run, Run { label, title, ready_at, started_at, ended_at: None, end: End::None }));
            }
            "completed" | "failed" | "timeout" | "orphaned" | "cancelled" | "released" => {
                let end = match entry.event.as_str() {
                    "completed" => End::Completed,
                    "cancelled" => End::Cancelled,
                    "released" => End::Released,
                    _ => End::Failed,
                };
                let open = runs.iter_mut().rev().find(|(run, found)| found.end == End::None && *run == entry.run);
                if let Some((_, found)) = open {
                    (found.ended_at, found.end) = (Some(at), end);
                }
                ready_at = at;
            }
            _ => {}
        }
    }
    name_attempts(t, job, &mut runs);
    let mut runs: Vec<Run> = runs.into_iter().map(|(_, run)| run).collect();
    if matches!(job.status.as_str(), "PENDING" | "QUEUED" | "RETRYING") {
        let (label, title) = (t.waiting.to_owned(), String::new());
        runs.push(Run { label, title, ready_at, started_at: None, ended_at: job.next_attempt_at, end: End::None });
    }
    runs
}

fn steps(t: &Texts, job: &Job) -> Vec<(String, Markup, String)> {
    let step = |step: &Step| {
        let result = if step.result.is_null() { String::new() } else { step.result.to_string() };
        (step.name.clone(), badge(StateStyle::Completed, t.step_done), result.chars().take(200).collect())
    };
    job.steps.iter().map(step).collect()
}

fn log(viewer: &Viewer, job: &Job) -> Vec<LogLine> {
    let (t, formats) = (viewer.texts(), viewer.formats());
    let line = |entry: &LogEntry| LogLine {
        at: formats.clock(entry.timestamp),
        event: t.word(&entry.event).to_owned(),
        details: log_details(viewer, &entry.event, entry.details.as_deref().unwrap_or_default()),
    };
    job.execution_log.iter().map(line).collect()
}

/// Maximum number of tags that the page shows.
const SHOWN_TAGS: usize = 20;

#[derive(Template)]
#[template(
    ext = "html",
    source = r#"<span class="tags">{% for part in parts %}<span>{{ part }}</span>{% endfor %}</span>"#
)]
struct Tags {
    parts: Vec<Markup>,
}

fn details(viewer: &Viewer, job: &Job) -> Vec<(&'static str, Markup)> {
    let (t, formats, base) = (viewer.texts(), viewer.formats(), viewer.base());
    let link = |path: String, text: &str| anchor(&format!("{base}{path}"), text);
    let mut rows = vec![(t.id, escaped(&job.id)), (t.submitted, formats.relative(job.created_at))];
    let correlation = link(format!("/trace?id={}", segment(&job.correlation_id)), &job.correlation_id);
    rows.push((t.correlation, correlation));
    let mut add = |name, value: Option<Markup>| rows.extend(value.map(|value| (name, value)));
    add(t.kind, Some(escaped(&job.kind)));
    add(t.scheduled_for, job.scheduled_at.map(|at| formats.relative(at)));
    add(t.expires, job.expires_at.map(|at| formats.relative(at)));
    add(t.finished, job.completed_at.map(|at| formats.relative(at)));
    add(t.run_number, job.run.map(|run| escaped(&run.to_string())));
    add(t.worker, job.worker_id.as_ref().map(|id| link(format!("/workers/{id}"), &short_id(id))));
    add(t.schedule, job.schedule_id.as_ref().map(|id| link(format!("/schedules/{id}"), &short_id(id))));
    add(t.time_limit, job.timeout_ms.map(|ms| escaped(&formats.duration(ms as i64))));
    add(t.concurrency_key, job.concurrency_key.as_deref().map(escaped));
    add(t.unique_key, job.unique_key.as_deref().map(escaped));
    add(t.webhook, job.webhook_url.as_ref().map(|url| link(format!("/webhooks?jobId={}", job.id), url)));
    if !job.tags.is_empty() {
        let tags = job.tags.iter().take(SHOWN_TAGS).map(|tag| link(format!("/jobs?tag={}", segment(tag)), tag));
        let mut parts: Vec<Markup> = tags.collect();
        if job.tags.len() > SHOWN_TAGS {
            parts.push(escaped(&format!("{} {}", job.tags.len() - SHOWN_TAGS, t.more)));
        }
        rows.push((t.tags, Markup::of(&Tags { parts })));
    }
    rows
}

/// Returns the command that submits the same job again.
fn curl(viewer: &Viewer, job: &Value) -> String {
    let body = Value::Object(job_form::resubmission(job));
    let quoted = visible_json(body.to_string()).replace('\'', r"'\''");
    let key = if viewer.has_session() { " -H \"Authorization: Bearer $FAENA_API_KEY\"" } else { "" };
    let url = viewer.server_url();
    format!("curl -X POST {url}/api/v1/jobs{key} -H 'Content-Type: application/json' -d '{quoted}'")
}

pub async fn act(viewer: Viewer, Path((id, action)): Path<(String, String)>) -> Result<Response, Failure> {
    let (t, id) = (viewer.texts(), segment(&id));
    let path = format!("/api/v1/jobs/{id}");
    let (result, done, page) = match action.as_str() {
        "cancel" => (viewer.post(&format!("{path}/cancel")).await, t.job_was_cancelled, format!("/jobs/{id}")),
        "retry" => (viewer.post(&format!("{path}/retry")).await, t.job_was_retried, format!("/jobs/{id}")),
        "delete" => (viewer.delete(&path).await, t.job_was_deleted, "/jobs".to_owned()),
        _ => return Err(Failure::not_found(t.no_such_action)),
    };
    // A job that could not be deleted still has its page.
    let page = if result.is_err() { format!("/jobs/{id}") } else { page };
    show_result(&viewer, &page, result, done)
}
