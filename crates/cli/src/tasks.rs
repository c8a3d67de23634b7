//! `faena tasks …`.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use faena_domain::Timestamp;
use faena_machine::{Outcome, Record, Status};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::{
    Api, CommandError, Connection,
    api::segment,
    complete, ids,
    output::{Details, relative, shorten},
    table::table,
    task_bulk, task_watch, whole_list,
};

#[derive(Subcommand)]
pub enum Command {
    /// Create a task
    #[command(after_help = "Example:\n  faena tasks create order '{\"amount\": 5}' --title 'Order 7'")]
    Create(Create),
    /// List tasks, newest first
    #[command(after_help = "Example:\n  faena tasks list --machine coding-task --approval")]
    List(List),
    /// Show a task
    #[command(after_help = "Example:\n  faena tasks show 018f3c5e-7b1a-7000-8000-0000000000aa")]
    Show(TaskArguments),
    /// Show the history of a task
    #[command(after_help = "Example:\n  faena tasks history 018f3c5e-7b1a-7000-8000-0000000000aa")]
    History(TaskArguments),
    /// Follow a task until it ends
    #[command(
        after_help = "Exits with 1 if the task does not end successfully.\n\nExample:\n  faena tasks watch 018f3c5e-7b1a-7000-8000-0000000000aa"
    )]
    Watch(TaskArguments),
    /// List the events that were published about a task
    #[command(after_help = "Example:\n  faena tasks events 018f3c5e-7b1a-7000-8000-0000000000aa --follow")]
    Events(Events),
    /// Explain what a task waits for
    #[command(after_help = "Example:\n  faena tasks why 018f3c5e-7b1a-7000-8000-0000000000aa")]
    Why(TaskArguments),
    /// Send an event to a task
    #[command(after_help = "Example:\n  faena tasks send 018f3c5e-7b1a-7000-8000-0000000000aa pay '{\"amount\": 5}'")]
    Send(Send),
    /// Start a new task from a point in the history of a task
    #[command(
        after_help = "Example:\n  faena tasks fork 018f3c5e-7b1a-7000-8000-0000000000aa --at 3 \\\n    --data '{\"amount\": 7}'"
    )]
    Fork(Fork),
    /// Act on every task that matches a filter
    #[command(subcommand)]
    Bulk(task_bulk::Command),
    /// Approve what a task waits for
    #[command(after_help = "Example:\n  faena tasks approve 018f3c5e-7b1a-7000-8000-0000000000aa --comment 'go ahead'")]
    Approve(Decide),
    /// Reject what a task waits for
    #[command(after_help = "Example:\n  faena tasks reject 018f3c5e-7b1a-7000-8000-0000000000aa --comment 'too broad'")]
    Reject(Decide),
    /// Cancel a task
    #[command(after_help = "Example:\n  faena tasks cancel 018f3c5e-7b1a-7000-8000-0000000000aa")]
    Cancel(TaskArguments),
    /// Pause a task and its timers
    #[command(after_help = "Example:\n  faena tasks pause 018f3c5e-7b1a-7000-8000-0000000000aa")]
    Pause(TaskArguments),
    /// Resume a paused task
    #[command(after_help = "Example:\n  faena tasks resume 018f3c5e-7b1a-7000-8000-0000000000aa")]
    Resume(TaskArguments),
}

#[derive(Args)]
pub struct Create {
    /// Machine name
    #[arg(add = complete::machines())]
    machine: String,
    /// Data of the task as a JSON object
    #[arg(default_value = "{}")]
    data: String,
    /// Version of the machine [default: the newest]
    #[arg(long)]
    version: Option<u32>,
    /// Display title
    #[arg(long)]
    title: Option<String>,
    /// Correlation id [default: the id of the task]
    #[arg(long)]
    correlation_id: Option<String>,
    /// Return the existing task if the same request was sent before with this key
    #[arg(long, value_name = "KEY")]
    idempotency_key: Option<String>,
    /// Tag to find the task by; repeat for several
    #[arg(long = "tag", value_name = "TAG")]
    tags: Vec<String>,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct List {
    /// Only tasks of this machine
    #[arg(long, add = complete::machines())]
    machine: Option<String>,
    /// Only tasks in this state, or in a state inside it
    #[arg(long)]
    state: Option<String>,
    /// Only tasks with this status: queued, running, paused, completed, failed or cancelled
    #[arg(long)]
    status: Option<String>,
    /// Only tasks with this tag
    #[arg(long)]
    tag: Option<String>,
    /// Only tasks that wait for a decision
    #[arg(long)]
    approval: bool,
    /// Maximum number of tasks
    #[arg(long, default_value_t = 20)]
    limit: u32,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct TaskArguments {
    /// Task id, or the beginning of one
    #[arg(add = complete::tasks())]
    id: String,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct Events {
    /// Task id, or the beginning of one
    #[arg(add = complete::tasks())]
    id: String,
    /// Wait for new events
    #[arg(long)]
    follow: bool,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct Fork {
    /// Task id, or the beginning of one
    #[arg(add = complete::tasks())]
    id: String,
    /// Number of a record, as "faena tasks history" prints it [default: the last before the end of the task]
    #[arg(long, value_name = "RECORD")]
    at: Option<u64>,
    /// Fields of the data to replace, as a JSON object
    #[arg(long, value_name = "JSON")]
    data: Option<String>,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct Send {
    /// Task id, or the beginning of one
    #[arg(add = complete::tasks())]
    id: String,
    /// Event type
    event: String,
    /// Payload as a JSON object
    #[arg(default_value = "{}")]
    payload: String,
    /// Id of the event; a repeated id has no effect [default: a new one]
    #[arg(long)]
    event_id: Option<String>,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct Decide {
    /// Task id, or the beginning of one
    #[arg(add = complete::tasks())]
    id: String,
    /// Comment, shown in the history and passed to the machine
    #[arg(long)]
    comment: Option<String>,
    /// Hash of the subject you have read, as "faena tasks show" prints it; refused if the subject has changed since
    #[arg(long)]
    hash: Option<String>,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct TaskView {
    id: String,
    machine: String,
    version: u32,
    title: Option<String>,
    correlation_id: String,
    #[serde(default)]
    tags: Vec<String>,
    #[serde(default)]
    forked_from: Option<faena_machine::Origin>,
    status: Status,
    state: String,
    created_at: Timestamp,
    created_by: String,
    updated_at: Timestamp,
    #[serde(default)]
    fault: Option<String>,
    #[serde(default)]
    due_at: Option<Timestamp>,
    data: Value,
    #[serde(default)]
    counters: Map<String, Value>,
    #[serde(default)]
    approval: Option<faena_machine::Approval>,
    #[serde(default)]
    deferred: Vec<faena_machine::Event>,
}

#[derive(Deserialize)]
struct TaskList {
    tasks: Vec<TaskView>,
}

#[derive(Deserialize)]
struct History {
    history: Vec<Record>,
}

#[derive(Deserialize)]
struct EventList {
    events: Vec<Value>,
}

#[derive(Deserialize)]
struct Answer {
    outcome: Outcome,
    state: String,
    reason: Option<String>,
    #[serde(default)]
    duplicate: bool,
}

#[derive(Deserialize)]
struct Why {
    state: String,
    reasons: Vec<Reason>,
}

#[derive(Deserialize)]
struct Reason {
    message: String,
}

pub async fn run(command: Command) -> Result<ExitCode, CommandError> {
    match command {
        Command::Create(create) => create_task(create).await,
        Command::List(list) => list_tasks(list).await,
        Command::Show(task) => {
            let (api, id) = open(&task.connection, &task.id).await?;
            api.show(api.get(&path(&id, "")), details).await
        }
        Command::History(task) => {
            let (api, id) = open(&task.connection, &task.id).await?;
            whole_list::show(
                &api,
                whole_list::read_after(&api, &path(&id, "/history"), "history").await?,
                history_table,
            )
        }
        Command::Watch(task) => {
            let (api, id) = open(&task.connection, &task.id).await?;
            task_watch::watch(&api, &id).await
        }
        Command::Events(arguments) => {
            let (api, id) = open(&arguments.connection, &arguments.id).await?;
            if arguments.follow {
                return crate::events::run(crate::events::Arguments::of_task(id, arguments.connection)).await;
            }
            whole_list::show(&api, whole_list::read_after(&api, &path(&id, "/events"), "events").await?, events_table)
        }
        Command::Fork(fork) => fork_task(fork).await,
        Command::Bulk(command) => task_bulk::run(command).await,
        Command::Why(task) => {
            let (api, id) = open(&task.connection, &task.id).await?;
            api.show(api.get(&path(&id, "/why")), explanation).await
        }
        Command::Send(send) => {
            let (api, id) = open(&send.connection, &send.id).await?;
            let api = api.with_options(&[("event", "EVENT"), ("type", "EVENT")]);
            let mut body = json!({"type": send.event, "payload": object(&send.payload, "the payload")?});
            if let Some(id) = send.event_id {
                body["metadata"] = json!({"traceId": id});
            }
            api.show(api.post(&path(&id, "/events")).json(&body), |response| answer(response, "applied")).await
        }
        Command::Approve(decide) => decision(decide, "approve", "approved").await,
        Command::Reject(decide) => decision(decide, "reject", "rejected").await,
        Command::Cancel(task) => act(task, "cancel", "cancelled").await,
        Command::Pause(task) => act(task, "pause", "paused").await,
        Command::Resume(task) => act(task, "resume", "resumed").await,
    }
}

async fn create_task(create: Create) -> Result<ExitCode, CommandError> {
    let api = Api::new(&create.connection)?;
    let mut body = json!({"machine": create.machine, "data": object(&create.data, "the data")?});
    for (name, value) in [
        ("title", create.title.map(Value::from)),
        ("correlationId", create.correlation_id.map(Value::from)),
        ("idempotencyKey", create.idempotency_key.map(Value::from)),
        ("version", create.version.map(Value::from)),
    ] {
        if let Some(value) = value {
            body[name] = value;
        }
    }
    if !create.tags.is_empty() {
        body["tags"] = json!(create.tags);
    }
    api.show(api.post("/api/v1/tasks").json(&body), |task: &TaskView| format!("{}  {}", task.id, task.state)).await
}

async fn fork_task(fork: Fork) -> Result<ExitCode, CommandError> {
    let (api, id) = open(&fork.connection, &fork.id).await?;
    let mut body = json!({});
    if let Some(at) = fork.at {
        body["at"] = json!(at);
    }
    if let Some(data) = &fork.data {
        body["data"] = object(data, "the data")?;
    }
    let request = api.post(&path(&id, "/fork")).json(&body);
    api.show(request, |task: &TaskView| format!("{}  {}", task.id, task.state)).await
}

async fn list_tasks(list: List) -> Result<ExitCode, CommandError> {
    let api = Api::new(&list.connection)?;
    let mut query = format!("/api/v1/tasks?limit={}", list.limit);
    let filters = [("machine", &list.machine), ("state", &list.state), ("status", &list.status), ("tag", &list.tag)];
    for (name, value) in filters {
        if let Some(value) = value {
            query.push_str(&format!("&{name}={}", segment(value)));
        }
    }
    if list.approval {
        query.push_str("&approval=true");
    }
    api.show(api.get(&query), tasks_table).await
}

async fn decision(decide: Decide, action: &str, participle: &str) -> Result<ExitCode, CommandError> {
    let (api, id) = open(&decide.connection, &decide.id).await?;
    let body = json!({"comment": decide.comment, "hash": decide.hash});
    let body: Map<String, Value> = match body {
        Value::Object(fields) => fields.into_iter().filter(|(_, value)| !value.is_null()).collect(),
        _ => Map::new(),
    };
    let request = api.post(&path(&id, &format!("/{action}"))).json(&Value::Object(body));
    api.show(request, |response| answer(response, participle)).await
}

async fn act(task: TaskArguments, action: &str, participle: &str) -> Result<ExitCode, CommandError> {
    let (api, id) = open(&task.connection, &task.id).await?;
    let request = api.post(&path(&id, &format!("/{action}"))).json(&json!({}));
    api.show(request, |response| answer(response, participle)).await
}

/// Returns a client of the API, and the full id of a task.
async fn open(connection: &Connection, id: &str) -> Result<(Api, String), CommandError> {
    let api = Api::new(connection)?;
    let id = ids::resolve(&api, &ids::TASK, id).await?;
    Ok((api, id))
}

pub fn path(id: &str, rest: &str) -> String {
    format!("/api/v1/tasks/{}{rest}", segment(id))
}

pub fn object(text: &str, what: &str) -> Result<Value, CommandError> {
    match serde_json::from_str(text) {
        Ok(value @ Value::Object(_)) => Ok(value),
        _ => Err(CommandError::Usage(format!("{what} must be a JSON object such as '{{\"amount\": 5}}'"))),
    }
}

/// Describes the outcome of an event. If the event was applied, `participle` names the outcome.
fn answer(answer: &Answer, participle: &str) -> String {
    let outcome = if answer.outcome == Outcome::Applied { participle } else { answer.outcome.as_str() };
    let reason = answer.reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
    let duplicate = if answer.duplicate { " (duplicate)" } else { "" };
    format!("{outcome}{reason}{duplicate}\nstate  {}", answer.state)
}

fn tasks_table(list: &TaskList) -> String {
    if list.tasks.is_empty() {
        return "no tasks match".to_owned();
    }
    let mut table = table(["id", "status", "state", "machine", "updated", "title"]);
    for task in &list.tasks {
        table.add_row([
            task.id.clone(),
            task.status.as_str().to_owned(),
            task.state.clone(),
            format!("{} {}", task.machine, task.version),
            relative(task.updated_at),
            task.title.clone().unwrap_or_default(),
        ]);
    }
    table.to_string()
}

fn details(task: &TaskView) -> String {
    let mut details = Details::new(12);
    details.add("id", &task.id);
    details.add("title", task.title.as_deref().unwrap_or_default());
    details.add("machine", format!("{} version {}", task.machine, task.version));
    details.add("state", &task.state);
    details.add("status", task.status.as_str());
    details.add("fault", task.fault.as_deref().unwrap_or_default());
    details.add("created", format!("{} by {}", relative(task.created_at), task.created_by));
    details.add("updated", relative(task.updated_at));
    details.add("next timer", task.due_at.map(relative).unwrap_or_default());
    details.add("correlation", &task.correlation_id);
    details.add("tags", task.tags.join(" "));
    let origin = task.forked_from.as_ref();
    details.add(
        "forked from",
        origin.map(|origin| format!("record {} of {}", origin.record, origin.task_id)).unwrap_or_default(),
    );
    for (name, count) in &task.counters {
        details.add("counter", format!("{name} {count}"));
    }
    for event in &task.deferred {
        details.add("deferred", format!("{} from {}", event.kind, event.actor));
    }
    if let Some(approval) = &task.approval {
        details.add("approval", format!("{} of {} decided", approval.decisions.len(), approval.quorum));
        details.add("hash", &approval.hash);
        details.add("subject", approval.subject.to_string());
    }
    details.add("data", task.data.to_string());
    details.text()
}

fn history_table(history: &History) -> String {
    let mut table = table(["#", "event", "outcome", "to", "actor", "when", "note"]);
    for record in &history.history {
        let mut notes = record.actions.clone();
        notes.extend(record.reason.clone());
        table.add_row([
            record.sequence.to_string(),
            record.event.clone(),
            format!("{:?}", record.outcome).to_lowercase(),
            record.to.clone().unwrap_or_default(),
            record.actor.clone(),
            relative(record.at),
            notes.join("; "),
        ]);
    }
    table.to_string()
}

fn events_table(list: &EventList) -> String {
    if list.events.is_empty() {
        return "no events are stored".to_owned();
    }
    let mut table = table(["event", "actor", "when", "data"]);
    for event in &list.events {
        let text = |name: &str| event[name].as_str().unwrap_or_default().to_owned();
        let when = Timestamp::parse(&text("time")).map(relative).unwrap_or_default();
        table.add_row([text("type"), text("actor"), when, shorten(&event["data"]["payload"].to_string(), 100)]);
    }
    table.to_string()
}

fn explanation(why: &Why) -> String {
    let reasons = why.reasons.iter().map(|reason| format!("- {}", reason.message));
    std::iter::once(why.state.clone()).chain(reasons).collect::<Vec<_>>().join("\n")
}
