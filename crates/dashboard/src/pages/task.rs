//! One task: its machine with the current state highlighted, what it waits for, its history, and the form for a decision.

use askama::Template;
use axum::{extract::Path, response::Response};
use faena_domain::Timestamp;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{drawing, tasks};
use crate::{
    action::show_result,
    content::{Hidden, content, pretty},
    details::decision_count,
    error::Failure,
    form::Form,
    format::short_id,
    layout::Page,
    markup::Markup,
    prose::prose,
    query::segment,
    reasons::{as_sentence, english},
    table::{anchor, escaped},
    texts::{Language, Texts},
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
    drawing: Markup,
    /// Class of the colour of the active states.
    style: &'static str,
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
    let active: Vec<&str> = task.active.iter().map(|active| active.state.as_str()).collect();
    // A machine that cannot be drawn is no reason to hide the task.
    let drawing = drawing::read(&viewer, &task.machine, task.version, &active).await.unwrap_or_default();
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
        badge: tasks::state(t, &task.status, &task.state, task.approval.is_some()),
        style: tasks::style(&task.status, task.approval.is_some()).class(),
        facts: format!("{} v{}, {} {}", task.machine, task.version, t.created_by, task.created_by),
        reasons: reasons(&viewer, why.unwrap_or_default(), shown_approval),
        drawing,
        decision: shown_approval.map(|approval| decision(t, approval)),
        details: vec![
            (t.id, escaped(&task.id)),
            (t.machine, anchor(&format!("{base}/machines/{}", segment(&task.machine)), &task.machine)),
            (t.created, formats.relative(task.created_at)),
            (
                t.correlation,
                anchor(&format!("{base}/trace?id={}", segment(&task.correlation_id)), &task.correlation_id),
            ),
        ]
        .into_iter()
        .chain(counters(&task.counters).map(|counters| (t.counters, escaped(&counters))))
        .collect(),
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

/// Returns the counters of a task with their values: `corrections: 2, plans: 1`. `None`: it has counted nothing.
fn counters(counters: &Value) -> Option<String> {
    let counters = counters.as_object().filter(|counters| !counters.is_empty())?;
    Some(counters.iter().map(|(name, value)| format!("{name}: {value}")).collect::<Vec<_>>().join(", "))
}

fn timer_name(t: &Texts, timer: &Timer) -> String {
    match &timer.kind {
        Value::String(kind) => t.word(kind).to_owned(),
        kind => kind["named"].as_str().unwrap_or_default().to_owned(),
    }
}

/// Returns what the task waits for. Timers have a list of their own, with times that a person can read.
fn reasons(viewer: &Viewer, why: Why, approval: Option<&Approval>) -> Vec<Markup> {
    let mut reasons: Vec<Reason> = why.reasons.into_iter().filter(|reason| reason.code != "timer").collect();
    if reasons.is_empty() {
        reasons.push(Reason { code: String::new(), message: why.summary });
    }
    let shown = |reason: &Reason| {
        // The form for the decision shows the hash in the same way.
        let message = match approval {
            Some(approval) => reason.message.replace(&approval.hash, &format!("sha256 {}", short_hash(&approval.hash))),
            None => reason.message.clone(),
        };
        match (viewer.texts().language(), in_spanish(&reason.code, &message)) {
            (Language::Spanish, Some(text)) => prose(viewer, &as_sentence(&text), &[]),
            _ => english(viewer, &as_sentence(&message), &[]),
        }
    };
    reasons.iter().map(shown).collect()
}

/// Returns what a task waits for in Spanish, or `None` if the message has another form.
fn in_spanish(code: &str, message: &str) -> Option<String> {
    Some(match code {
        "event" => format!("espera {}", message.strip_prefix("it waits for ")?),
        "approval" => {
            let (who, rest) = message.strip_prefix("it waits for ")?.split_once(" to approve ")?;
            let who = if who == "a person" { "una persona".to_owned() } else { who.replace(" or ", " o ") };
            format!("espera que {who} apruebe {}", rest.replace(" of ", " de "))
        }
        "ended" => format!("ha terminado en {}", message.strip_prefix("it has ended in ")?),
        "paused" => "está en pausa; reanúdala".to_owned(),
        "queued" => {
            let (running, rest) = message.strip_prefix("it is queued: ")?.split_once(" of at most ")?;
            let (limit, rest) = rest.split_once(" tasks of ")?;
            let (machine, rest) = rest.split_once(" run, and ")?;
            let (ahead, command) = rest.split_once(" start before it; raise the limit with ")?;
            format!(
                "está en cola: tareas de {machine} en ejecución: {running} de {limit} como máximo; por delante: {ahead}; \
                 sube el límite con {command}"
            )
        }
        _ => return None,
    })
}

fn history_detail(t: &Texts, record: &Record) -> String {
    let to = record.to.as_ref().map(|to| format!("→ {to}")).unwrap_or_default();
    let outcome = if record.outcome == "applied" { String::new() } else { t.word(&record.outcome).to_owned() };
    let reason = record.reason.as_deref().map(|reason| decision_count(t, reason).unwrap_or_else(|| reason.to_owned()));
    let parts = [to, outcome, reason.unwrap_or_default(), record.actor.clone()];
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
