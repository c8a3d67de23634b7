//! `faena tasks bulk …` and `faena machines migrate`: actions on many tasks.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use faena_machine::Status;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::{Api, CommandError, Connection, api::segment, complete, output::count, table::table, tasks::object};

#[derive(Subcommand)]
pub enum Command {
    /// Send an event to every task that matches
    #[command(after_help = "Example:\n  faena tasks bulk send pay '{\"amount\": 5}' --machine order --dry-run")]
    Send(SendAll),
    /// Cancel every task that matches
    #[command(after_help = "Example:\n  faena tasks bulk cancel --machine order --tag test --dry-run")]
    Cancel(CancelAll),
    /// Pause every task that matches
    #[command(after_help = "Example:\n  faena tasks bulk pause --machine order --per-second 50")]
    Pause(Selection),
    /// Resume every paused task that matches
    #[command(after_help = "Example:\n  faena tasks bulk resume --machine order")]
    Resume(Selection),
}

#[derive(Args)]
pub struct SendAll {
    /// Event type
    event: String,
    /// Payload as a JSON object
    #[arg(default_value = "{}")]
    payload: String,
    #[command(flatten)]
    selection: Selection,
}

#[derive(Args)]
pub struct CancelAll {
    /// Reason shown in the history
    #[arg(long)]
    reason: Option<String>,
    #[command(flatten)]
    selection: Selection,
}

#[derive(Args)]
pub struct Selection {
    /// Only tasks of this machine
    #[arg(long, add = complete::machines())]
    machine: Option<String>,
    /// Only tasks of this version of the machine
    #[arg(long)]
    version: Option<u32>,
    /// Only tasks in this state, or in a state inside it
    #[arg(long)]
    state: Option<String>,
    /// Only tasks with this status: queued, running or paused
    #[arg(long)]
    status: Option<String>,
    /// Only tasks with this tag
    #[arg(long)]
    tag: Option<String>,
    /// Only tasks with this correlation id
    #[arg(long)]
    correlation_id: Option<String>,
    /// Confirm that the action applies to every task
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    bulk_options: BulkOptions,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct BulkOptions {
    /// Count the tasks and show examples, but change nothing
    #[arg(long)]
    dry_run: bool,
    /// Maximum number of tasks per second; the server continues in the background
    #[arg(long, value_name = "N")]
    per_second: Option<u32>,
}

impl BulkOptions {
    fn add_to(&self, body: &mut Value) {
        body["dryRun"] = json!(self.dry_run);
        if let Some(rate) = self.per_second {
            body["perSecond"] = json!(rate);
        }
    }
}

#[derive(Args)]
pub struct Migrate {
    /// Machine name
    #[arg(add = complete::machines())]
    name: String,
    /// Version that tasks move from
    #[arg(long)]
    from: u32,
    /// Version that tasks move to
    #[arg(long)]
    to: u32,
    /// New state of a state that the new version does not have; repeat for several
    #[arg(long = "map", value_name = "OLD=NEW")]
    map: Vec<String>,
    /// Enter the new states without their entry actions
    #[arg(long)]
    skip_entry: bool,
    #[command(flatten)]
    bulk_options: BulkOptions,
    #[command(flatten)]
    connection: Connection,
}

pub async fn run(command: Command) -> Result<ExitCode, CommandError> {
    match command {
        Command::Send(send) => {
            let parameters = json!({"type": send.event, "payload": object(&send.payload, "the payload")?});
            act("send", parameters, send.selection).await
        }
        Command::Cancel(cancel) => {
            let parameters = cancel.reason.map_or(json!({}), |reason| json!({"reason": reason}));
            act("cancel", parameters, cancel.selection).await
        }
        Command::Pause(selection) => act("pause", json!({}), selection).await,
        Command::Resume(selection) => act("resume", json!({}), selection).await,
    }
}

async fn act(action: &str, mut body: Value, selection: Selection) -> Result<ExitCode, CommandError> {
    let api = Api::new(&selection.connection)?;
    let texts = [
        ("machine", selection.machine),
        ("state", selection.state),
        ("status", selection.status),
        ("tag", selection.tag),
        ("correlationId", selection.correlation_id),
    ];
    let mut filter: Map<String, Value> =
        texts.into_iter().filter_map(|(name, text)| Some((name.to_owned(), Value::String(text?)))).collect();
    filter.extend(selection.version.map(|version| ("version".to_owned(), json!(version))));
    if filter.is_empty() && !selection.all {
        let message = "missing a filter: --machine, --version, --state, --status, --tag, --correlation-id, or --all";
        return Err(CommandError::Usage(message.into()));
    }
    body["filter"] = Value::Object(filter);
    body["all"] = json!(selection.all);
    selection.bulk_options.add_to(&mut body);
    let request = api.post_bulk(&format!("/api/v1/tasks/bulk/{action}")).json(&body);
    api.show_long(request, "waiting for the server", |answer: &Answer| describe(answer, action)).await
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Answer {
    id: Option<String>,
    dry_run: bool,
    matched: u64,
    matched_is_exact: bool,
    per_second: Option<u32>,
    done: u64,
    skipped: u64,
    sample: Vec<Example>,
}

#[derive(Deserialize)]
struct Example {
    id: String,
    machine: String,
    version: u32,
    state: String,
    status: Status,
    title: Option<String>,
}

fn describe(answer: &Answer, action: &str) -> String {
    let at_least = if answer.matched_is_exact { "" } else { "at least " };
    let matched = format!("{at_least}{}", count(answer.matched, "task"));
    if answer.matched == 0 {
        return "no tasks match".to_owned();
    }
    if answer.dry_run {
        let mut table = table(["id", "machine", "state", "status", "title"]);
        for task in &answer.sample {
            table.add_row([
                task.id.clone(),
                format!("{} {}", task.machine, task.version),
                task.state.clone(),
                task.status.as_str().to_owned(),
                task.title.clone().unwrap_or_default(),
            ]);
        }
        return format!("{table}\n{} (dry run)", sentence(action, "would be", &matched));
    }
    if let (Some(id), Some(rate)) = (&answer.id, answer.per_second) {
        return format!(
            "{}, {rate} per second (bulk action {id})",
            sentence(action, if answer.matched == 1 { "is being" } else { "are being" }, &matched)
        );
    }
    format!("{}{}", sentence(action, "", &count(answer.done, "task")), skipped(answer.skipped))
}

/// Returns a sentence such as `event would be sent to 3 tasks` or `3 tasks would be paused`.
fn sentence(action: &str, verb: &str, tasks: &str) -> String {
    let verb = if verb.is_empty() { String::new() } else { format!("{verb} ") };
    match action {
        "send" => format!("event {}sent to {tasks}", verb.replace("are ", "is ")),
        "cancel" => format!("{tasks} {verb}cancelled"),
        "pause" => format!("{tasks} {verb}paused"),
        _ => format!("{tasks} {verb}resumed"),
    }
}

fn skipped(count: u64) -> String {
    match count {
        0 => String::new(),
        count => format!("; {count} skipped (changed meanwhile or rejected the action)"),
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct MigrationAnswer {
    id: Option<String>,
    dry_run: bool,
    from: u32,
    to: u32,
    matched: u64,
    per_second: Option<u32>,
    states: Vec<MigratedState>,
    refusals: Vec<Refusal>,
    refused: u64,
    tried: u64,
    done: u64,
    skipped: u64,
}

#[derive(Deserialize)]
struct MigratedState {
    state: String,
    tasks: u64,
    to: Option<String>,
    reason: Option<String>,
}

#[derive(Deserialize)]
struct Refusal {
    id: String,
    reason: String,
}

pub async fn migrate(arguments: Migrate) -> Result<ExitCode, CommandError> {
    let mut map = Map::new();
    for pair in &arguments.map {
        let Some((old, new)) = pair.split_once('=').filter(|(old, new)| !old.is_empty() && !new.is_empty()) else {
            return Err(CommandError::Usage(format!("not a pair of states: \"{pair}\"; write --map OLD=NEW")));
        };
        map.insert(old.to_owned(), json!(new));
    }
    let api = Api::new(&arguments.connection)?;
    let entry = if arguments.skip_entry { "skip" } else { "run" };
    let mut body = json!({"from": arguments.from, "to": arguments.to, "map": map, "entry": entry});
    arguments.bulk_options.add_to(&mut body);
    let request = api.post_bulk(&format!("/api/v1/machines/{}/migrate", segment(&arguments.name))).json(&body);
    api.show_long(request, "waiting for the server", describe_migration).await
}

fn describe_migration(answer: &MigrationAnswer) -> String {
    if answer.matched == 0 {
        return format!("no running tasks of version {}", answer.from);
    }
    let mut table = table(["state", "tasks", "new state", "note"]);
    for state in &answer.states {
        table.add_row([
            state.state.clone(),
            state.tasks.to_string(),
            state.to.clone().unwrap_or_default(),
            state.reason.clone().unwrap_or_default(),
        ]);
    }
    let mut lines = vec![table.to_string()];
    if answer.refused > 0 {
        lines.push(format!("{} of {} cannot move:", answer.refused, count(answer.tried, "tried task")));
        lines.extend(answer.refusals.iter().map(|refusal| format!("  {}  {}", refusal.id, refusal.reason)));
    }
    lines.push(match (&answer.id, answer.per_second) {
        _ if answer.dry_run => format!("nothing was changed (dry run from version {} to {})", answer.from, answer.to),
        (Some(id), Some(rate)) => {
            format!(
                "moving {} to version {}, {rate} per second (bulk action {id})",
                count(answer.matched, "task"),
                answer.to
            )
        }
        _ => format!("{} moved to version {}{}", count(answer.done, "task"), answer.to, skipped(answer.skipped)),
    });
    lines.join("\n")
}
