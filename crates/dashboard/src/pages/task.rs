//! One task: its machine with the current state highlighted, what it waits for, its history, and the form for a decision.

use askama::Template;
use axum::{
    extract::Path,
    http::{HeaderValue, header},
    response::{IntoResponse, Response},
};
use faena_domain::Timestamp;
use faena_machine::Definition;
use serde::Deserialize;
use serde_json::{Value, json};

use super::tasks::state;
use crate::{
    action::show_result,
    content::{Hidden, content, pretty},
    error::Failure,
    form::Form,
    format::short_id,
    layout::Page,
    markup::Markup,
    prose::prose,
    query::segment,
    table::{anchor, escaped},
    texts::Texts,
    viewer::Viewer,
};

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Task {
    id: String,
    machine: String,
    version: u64,
    title: Option<String>,
    correlation_id: String,
    status: String,
    state: String,
    epoch: u64,
    data: Value,
    #[serde(default)]
    counters: Value,
    #[serde(default)]
    timers: Vec<Timer>,
    #[serde(default)]
    approval: Option<Approval>,
    created_at: Timestamp,
    created_by: String,
    #[serde(default)]
    active: Vec<Active>,
    #[serde(default)]
    hidden: Hidden,
}

#[derive(Deserialize)]
struct Active {
    state: String,
}

#[derive(Deserialize)]
struct Timer {
    /// A name of the API, or an object with the name that the machine gives it.
    kind: Value,
    due: Timestamp,
}

#[derive(Deserialize)]
struct Approval {
    subject: Value,
    hash: String,
    quorum: u64,
    #[serde(default)]
    decisions: Vec<Value>,
    #[serde(default)]
    groups: Vec<String>,
    #[serde(default)]
    hidden: Hidden,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Why {
    summary: String,
    reasons: Vec<Reason>,
}

#[derive(Deserialize)]
struct Reason {
    code: String,
    message: String,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct History {
    history: Vec<Record>,
}

#[derive(Deserialize)]
struct Record {
    at: Timestamp,
    event: String,
    actor: String,
    outcome: String,
    #[serde(default)]
    to: Option<String>,
    #[serde(default)]
    reason: Option<String>,
}

struct HistoryLine {
    at: Markup,
    event: String,
    detail: String,
}

/// The decision that the task waits for.
struct Decision {
    /// What is decided about: its parts with their names.
    subject: Vec<(String, String)>,
    hash: String,
    help: String,
}

/// Returns the first characters of a hash, which are enough to compare it.
fn short_hash(hash: &str) -> String {
    hash.chars().take(16).collect()
}

impl Decision {
    fn short_hash(&self) -> String {
        short_hash(&self.hash)
    }
}

#[derive(Template)]
#[template(path = "task.html")]
struct TaskPage<'a> {
    t: &'static Texts,
    base: &'a str,
    task: &'a Task,
    title: String,
    badge: Markup,
    facts: String,
    reasons: Vec<Markup>,
    drawing: String,
    decision: Option<Decision>,
    details: Vec<(&'static str, Markup)>,
    timers: Vec<(String, Markup)>,
    history: Vec<HistoryLine>,
    data: Markup,
    is_open: bool,
    is_paused: bool,
    is_queued: bool,
}

pub async fn show(viewer: Viewer, Path(id): Path<String>) -> Result<Page, Failure> {
    let path = format!("/api/v1/tasks/{}", segment(&id));
    let task: Task = viewer.get(&path).await?;
    let (why_path, history_path) = (format!("{path}/why"), format!("{path}/history?limit=100"));
    let (why, history) = tokio::join!(viewer.get::<Why>(&why_path), viewer.get::<History>(&history_path));
    let (t, formats, base) = (viewer.texts(), viewer.formats(), viewer.base());
    let title = task.title.clone().unwrap_or_else(|| short_id(&task.id));
    let line = |record: &Record| HistoryLine {
        at: formats.clock(record.at),
        event: record.event.clone(),
        detail: history_detail(t, record),
    };
    // A viewer who may not see what is decided about cannot decide.
    let shown_approval = task.approval.as_ref().filter(|approval| approval.hidden.is_empty());
    let page = TaskPage {
        t,
        base,
        badge: state(t, &task.status, &task.state, task.approval.is_some()),
        facts: format!("{} v{}, {} {}", task.machine, task.version, t.created_by, task.created_by),
        reasons: reasons(&viewer, why.unwrap_or_default(), shown_approval),
        drawing: format!("{base}/tasks/{}/drawing.svg?epoch={}", segment(&task.id), task.epoch),
        decision: shown_approval.map(|approval| decision(t, approval)),
        details: vec![
            (t.id, escaped(&task.id)),
            (t.machine, anchor(&format!("{base}/machines/{}", segment(&task.machine)), &task.machine)),
            (t.created, formats.relative(task.created_at)),
            (
                t.correlation,
                anchor(&format!("{base}/trace?id={}", segment(&task.correlation_id)), &task.correlation_id),
            ),
            (t.counters, escaped(&task.counters.to_string())),
        ],
        timers: task.timers.iter().map(|timer| (timer_name(t, timer), formats.relative(timer.due))).collect(),
        history: history.unwrap_or_default().history.iter().rev().map(line).collect(),
        data: content(t, &task.hidden, "data", &task.data),
        is_open: matches!(task.status.as_str(), "running" | "paused" | "queued"),
        is_paused: task.status == "paused",
        is_queued: task.status == "queued",
        title: title.clone(),
        task: &task,
    };
    Page::new(title, "/tasks", &page)
}

fn timer_name(t: &Texts, timer: &Timer) -> String {
    match &timer.kind {
        Value::String(kind) => t.word(kind).to_owned(),
        kind => kind["named"].as_str().unwrap_or_default().to_owned(),
    }
}

/// Returns what the task waits for. Timers have a list of their own, with times that a person can read.
fn reasons(viewer: &Viewer, why: Why, approval: Option<&Approval>) -> Vec<Markup> {
    let reasons = why.reasons.into_iter().filter(|reason| reason.code != "timer");
    let messages: Vec<String> = reasons.map(|reason| reason.message).collect();
    let messages = if messages.is_empty() { vec![why.summary] } else { messages };
    // The form beside it has the whole hash.
    let short = |message: &String| match approval {
        Some(approval) => message.replace(&approval.hash, &short_hash(&approval.hash)),
        None => message.clone(),
    };
    messages.iter().map(|message| prose(viewer, &short(message), &[])).collect()
}

fn history_detail(t: &Texts, record: &Record) -> String {
    let to = record.to.as_ref().map(|to| format!("→ {to}")).unwrap_or_default();
    let outcome = if record.outcome == "applied" { String::new() } else { t.word(&record.outcome).to_owned() };
    let parts = [to, outcome, record.reason.clone().unwrap_or_default(), record.actor.clone()];
    parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" · ")
}

fn decision(t: &Texts, approval: &Approval) -> Decision {
    let text = |value: &Value| match value {
        Value::String(text) => text.clone(),
        other => pretty(other),
    };
    let subject = match &approval.subject {
        Value::Object(fields) => fields.iter().map(|(name, value)| (name.clone(), text(value))).collect(),
        other => vec![(String::new(), text(other))],
    };
    let needed = approval.quorum.saturating_sub(approval.decisions.len() as u64).max(1);
    let mut help = t.decisions_needed(needed);
    if !approval.groups.is_empty() {
        help = format!("{help}, {} {}", t.of_group, approval.groups.join(", "));
    }
    Decision { subject, hash: approval.hash.clone(), help }
}

/// Draws the machine of a task with its active states highlighted.
pub async fn drawing(viewer: Viewer, Path(id): Path<String>) -> Result<Response, Failure> {
    let task: Task = viewer.get(&format!("/api/v1/tasks/{}", segment(&id))).await?;
    let active: Vec<&str> = task.active.iter().map(|active| active.state.as_str()).collect();
    draw(&viewer, &task.machine, Some(task.version), &active).await
}

/// The colours of the style sheet. A picture cannot use those of its page.
const COLOURS: &str = "<style>.machine{--machine-back:transparent;--machine-line:#5f6368;--machine-text:#1d1e20;\
--machine-box:#fff;--machine-group:#f0f0ed;--machine-limit:#8a4f00;--machine-good:#2a7336;--machine-bad:#b92f28;\
--machine-accent:#6a5a9a;--machine-glow:#eeeaf6}@media (prefers-color-scheme:dark){.machine{--machine-line:#a9acb2;\
--machine-text:#e8e8e6;--machine-box:#1c1d20;--machine-group:#232529;--machine-limit:#e9ad52;--machine-good:#82ca8c;\
--machine-bad:#f48d85;--machine-accent:#bdaee6;--machine-glow:#2c2640}}</style>";

fn in_our_colours(svg: &str) -> String {
    match svg.split_once('>') {
        Some((opening, rest)) => format!("{opening}>{COLOURS}{rest}"),
        None => svg.to_owned(),
    }
}

/// Draws a version of a machine. Its styles are inside, so it is shown as a picture.
pub async fn draw(viewer: &Viewer, machine: &str, version: Option<u64>, active: &[&str]) -> Result<Response, Failure> {
    #[derive(Deserialize)]
    struct Machine {
        definition: Value,
    }
    let query = version.map(|version| format!("?version={version}")).unwrap_or_default();
    let machine: Machine = viewer.get(&format!("/api/v1/machines/{}{query}", segment(machine))).await?;
    let definition = Definition::parse(&machine.definition.to_string())
        .map_err(|_| Failure::internal("the machine is not readable"))?;
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("image/svg+xml")),
        (
            header::CONTENT_SECURITY_POLICY,
            HeaderValue::from_static("default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"),
        ),
    ];
    Ok((headers, in_our_colours(&definition.to_svg(active))).into_response())
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub struct DecisionForm {
    hash: String,
    comment: String,
}

pub async fn act(
    viewer: Viewer,
    Path((id, action)): Path<(String, String)>,
    Form(form): Form<DecisionForm>,
) -> Result<Response, Failure> {
    let (t, id) = (viewer.texts(), segment(&id));
    let mut body = json!({});
    let done = match action.as_str() {
        "approve" | "reject" => {
            body = json!({"hash": form.hash});
            if !form.comment.trim().is_empty() {
                body["comment"] = json!(form.comment);
            }
            if action == "approve" { t.task_was_approved } else { t.task_was_rejected }
        }
        "cancel" => t.task_was_cancelled,
        "pause" => t.task_was_paused,
        "resume" => t.task_was_resumed,
        _ => return Err(Failure::not_found(t.no_such_action)),
    };
    let result = viewer.post_json(&format!("/api/v1/tasks/{id}/{action}"), &body).await;
    show_result(&viewer, &format!("/tasks/{id}"), result, done)
}
