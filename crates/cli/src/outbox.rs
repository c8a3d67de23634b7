//! `faena outbox …`: sinks of events and the events they have rejected; sources and inboxes.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use serde_json::{Map, Value, json};

use crate::{
    Api, CommandError, Connection,
    api::segment,
    complete, ids,
    output::{Details, count, relative_text, shorten},
    table::table,
};

#[derive(Subcommand)]
pub enum Command {
    /// List sinks with their backlog and state
    #[command(after_help = "Example:\n  faena outbox sinks")]
    Sinks(Sinks),
    /// List sources and inboxes of all nodes with their backlog and state
    #[command(after_help = "Example:\n  faena outbox sources")]
    Sources(Sources),
    /// List events that a sink has rejected, newest first
    #[command(after_help = "Example:\n  faena outbox dead --sink bus --type 'job.*'")]
    Dead(Dead),
    /// Show a rejected event
    #[command(after_help = "Example:\n  faena outbox show 0199a3c4-7e1b-7c51-9d3e-5a7c2f6b8d10")]
    Show(EventArguments),
    /// Publish a rejected event again, or all that match a filter
    #[command(after_help = "Example:\n  faena outbox replay --sink bus --per-second 50")]
    Replay(Replay),
    /// Mark a rejected event as resolved, or all that match a filter
    #[command(
        after_help = "Example:\n  faena outbox resolve 0199a3c4-7e1b-7c51-9d3e-5a7c2f6b8d10 --notes 'sent by mail'"
    )]
    Resolve(Resolve),
    /// Republish events sent in a time range
    #[command(
        after_help = "Use it after a broker has lost events.\n\nExample:\n  faena outbox republish --sink bus \\\n    --from 2026-01-31T12:00:00Z --to 2026-01-31T13:00:00Z"
    )]
    Republish(Republish),
}

#[derive(Args)]
pub struct Sinks {
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct Sources {
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct Filter {
    /// Only events of this sink
    #[arg(long, value_name = "NAME", add = complete::sinks())]
    sink: Option<String>,
    /// Only events of this type, like job.failed or job.*
    #[arg(long = "type", value_name = "TYPE")]
    kind: Option<String>,
    /// Only events of this job, worker or schedule
    #[arg(long, value_name = "ID")]
    aggregate: Option<String>,
    /// Only events rejected after this time, like 2026-01-31T12:00:00Z
    #[arg(long, value_name = "TIME")]
    moved_after: Option<String>,
    /// Only events rejected before this time
    #[arg(long, value_name = "TIME")]
    moved_before: Option<String>,
}

impl Filter {
    fn pairs(&self) -> Vec<(&'static str, &String)> {
        [
            ("sink", &self.sink),
            ("type", &self.kind),
            ("aggregateId", &self.aggregate),
            ("movedAfter", &self.moved_after),
            ("movedBefore", &self.moved_before),
        ]
        .into_iter()
        .filter_map(|(name, value)| Some((name, value.as_ref()?)))
        .collect()
    }
}

#[derive(Args)]
pub struct Dead {
    #[command(flatten)]
    filter: Filter,
    /// Also events that are resolved
    #[arg(long)]
    resolved: bool,
    /// Maximum number of events, up to 100
    #[arg(long, default_value_t = 20, value_name = "N")]
    limit: u32,
    /// Cursor from the previous page
    #[arg(long)]
    cursor: Option<String>,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct EventArguments {
    /// Id of the rejected event, or the beginning of one
    id: String,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct Selection {
    /// Id of the rejected event, or the beginning of one; omit it to use a filter
    id: Option<String>,
    #[command(flatten)]
    filter: Filter,
    /// Every rejected event
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct Replay {
    #[command(flatten)]
    selection: Selection,
    /// Maximum number of events per second
    #[arg(long, value_name = "N")]
    per_second: Option<u32>,
}

#[derive(Args)]
pub struct Resolve {
    #[command(flatten)]
    selection: Selection,
    /// How it was resolved
    #[arg(long, default_value = "")]
    notes: String,
}

#[derive(Args)]
pub struct Republish {
    /// Sink to publish to
    #[arg(long, value_name = "NAME", add = complete::sinks())]
    sink: String,
    /// Start of the range, included, like 2026-01-31T12:00:00Z
    #[arg(long, value_name = "TIME")]
    from: String,
    /// End of the range, excluded
    #[arg(long, value_name = "TIME")]
    to: String,
    /// Only events of this type, like job.failed or job.*
    #[arg(long = "type", value_name = "TYPE")]
    kind: Option<String>,
    /// Maximum number of events per second
    #[arg(long, value_name = "N")]
    per_second: Option<u32>,
    #[command(flatten)]
    connection: Connection,
}

pub async fn run(command: Command) -> Result<ExitCode, CommandError> {
    match command {
        Command::Sinks(sinks) => {
            let api = Api::new(&sinks.connection)?;
            api.show(api.get("/api/v1/outbox").query("limit", 1_000), listed_sinks).await
        }
        Command::Sources(sources) => {
            let api = Api::new(&sources.connection)?;
            api.show(api.get("/api/v1/outbox"), listed_inputs).await
        }
        Command::Dead(dead) => show_dead(dead).await,
        Command::Show(event) => {
            let api = Api::new(&event.connection)?;
            let id = ids::resolve(&api, &ids::REJECTED_EVENT, &event.id).await?;
            api.show(api.get(&path(&id, "")), describe).await
        }
        Command::Replay(replay) => {
            let rate = replay.per_second.map(|n| ("perSecond", json!(n)));
            if replay.selection.id.is_some() && rate.is_some() {
                return Err(CommandError::Usage("--per-second needs a filter, not an id".into()));
            }
            act(replay.selection, "replay", rate, "replayed").await
        }
        Command::Resolve(resolve) => {
            act(resolve.selection, "resolve", Some(("notes", json!(resolve.notes))), "resolved").await
        }
        Command::Republish(arguments) => republish(arguments).await,
    }
}

fn path(id: &str, rest: &str) -> String {
    format!("/api/v1/outbox/dead-letter/{}{rest}", segment(id))
}

/// Returns a field of an answer as text.
fn field(value: &Value, name: &str) -> String {
    match &value[name] {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn listed_sinks(answer: &Value) -> String {
    let mut table = table(["sink", "pending", "oldest", "dead", "sent", "down", "types", "on rejection", "nodes"]);
    for sink in answer["sinks"].as_array().into_iter().flatten() {
        let types: Vec<&str> = sink["types"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        table.add_row([
            field(sink, "name"),
            field(sink, "pending"),
            relative_text(&field(sink, "oldestPendingAt")),
            field(sink, "dead"),
            field(sink, "sent"),
            down(sink),
            types.join(" "),
            field(sink, "onRejected"),
            sink["nodes"].as_array().map_or(0, Vec::len).to_string(),
        ]);
    }
    table.or_text("no sinks; add a [[sink]] to the configuration of the server")
}

fn listed_inputs(answer: &Value) -> String {
    let mut table = table(["name", "kind", "state", "pending", "oldest", "down", "processed", "node"]);
    for input in ["sources", "inboxes"].into_iter().flat_map(|list| answer[list].as_array().into_iter().flatten()) {
        let processed = input["processed"].as_object().into_iter().flatten();
        let processed: Vec<String> = processed.map(|(outcome, count)| format!("{count} {outcome}")).collect();
        table.add_row([
            field(input, "name"),
            field(input, "kind"),
            field(input, "state"),
            field(input, "pending"),
            relative_text(&field(input, "oldestPendingAt")),
            down(input),
            processed.join(", "),
            field(input, "nodeName"),
        ]);
    }
    table.or_text(
        "no sources and no inboxes; add an [[outbox.source]] or an [[inbox]] to the configuration of the server",
    )
}

/// Returns when a sink, source or inbox went down, and why.
fn down(of: &Value) -> String {
    let since = of["downSince"].as_str();
    since.map(|since| format!("since {}: {}", relative_text(since), field(of, "downReason"))).unwrap_or_default()
}

async fn show_dead(dead: Dead) -> Result<ExitCode, CommandError> {
    let api = Api::new(&dead.connection)?.with_options(&[("aggregateId", "--aggregate")]);
    let mut request = api.get("/api/v1/outbox/dead-letter").query("limit", dead.limit).query_opt("cursor", dead.cursor);
    if !dead.resolved {
        request = request.query("resolved", false);
    }
    for (name, value) in dead.filter.pairs() {
        request = request.query(name, value);
    }
    api.show(request, listed_dead).await
}

fn listed_dead(answer: &Value) -> String {
    let mut table = table(["id", "sink", "type", "error", "rejected", "subject", "resolved by", "retries"]);
    for event in answer["data"].as_array().into_iter().flatten() {
        table.add_row([
            field(event, "id"),
            field(event, "sink"),
            field(event, "eventType"),
            shorten(&field(event, "errorMessage"), 60),
            relative_text(&field(event, "movedAt")),
            field(event, "aggregateId"),
            field(event, "resolvedBy"),
            field(event, "retryCount"),
        ]);
    }
    let more = answer["nextCursor"].as_str().map(|next| format!("\nnext page: --cursor {next}")).unwrap_or_default();
    format!("{}{more}", table.or_text("no rejected events"))
}

fn describe(event: &Value) -> String {
    let mut details = Details::new(21);
    for (name, _) in event.as_object().into_iter().flatten() {
        details.add(name, field(event, name));
    }
    details.text()
}

async fn act(
    selection: Selection,
    action: &str,
    extra: Option<(&str, Value)>,
    participle: &str,
) -> Result<ExitCode, CommandError> {
    let filter = selection.filter.pairs();
    let mut body = Map::new();
    body.extend(extra.map(|(name, value)| (name.to_owned(), value)));
    let api = Api::new(&selection.connection)?.with_options(&[("aggregateId", "--aggregate")]);
    match &selection.id {
        Some(_) if !filter.is_empty() || selection.all => {
            Err(CommandError::Usage("pass an id or a filter (--sink, --type …), not both".into()))
        }
        Some(id) => {
            let id = ids::resolve(&api, &ids::REJECTED_EVENT, id).await?;
            let message = format!("{id} was {participle}");
            let request = api.post(&path(&id, &format!("/{action}"))).json(&body);
            api.show(request, |_: &Value| message).await
        }
        None if filter.is_empty() && !selection.all => {
            let message =
                "missing an id or a filter: --sink, --type, --aggregate, --moved-after, --moved-before, or --all";
            Err(CommandError::Usage(message.into()))
        }
        None => {
            let filter: Map<String, Value> =
                filter.into_iter().map(|(name, text)| (name.into(), json!(text))).collect();
            body.insert("filter".into(), json!(filter));
            body.insert("all".into(), json!(selection.all));
            let request = api.post_bulk(&format!("/api/v1/outbox/dead-letter/{action}")).json(&body);
            let describe = |answer: &Value| format!("{} {participle}", events(answer, participle));
            api.show_long(request, "waiting for the server", describe).await
        }
    }
}

/// Returns the number of events in the answer, as `1 event` or `2 events`.
fn events(answer: &Value, field: &str) -> String {
    count(answer[field].as_u64().unwrap_or(0), "event")
}

async fn republish(arguments: Republish) -> Result<ExitCode, CommandError> {
    let api = Api::new(&arguments.connection)?;
    let mut body = json!({ "sink": arguments.sink, "from": arguments.from, "to": arguments.to });
    if let Some(kind) = arguments.kind {
        body["type"] = json!(kind);
    }
    if let Some(n) = arguments.per_second {
        body["perSecond"] = json!(n);
    }
    let describe = |answer: &Value| format!("{} queued for sink {}", events(answer, "republished"), arguments.sink);
    api.show_long(api.post_bulk("/api/v1/outbox/republish").json(&body), "waiting for the server", describe).await
}
