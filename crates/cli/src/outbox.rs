//! `faena outbox …`: how sinks stand, and the messages that they would not take.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use reqwest::Method;
use serde_json::{Map, Value, json};

use crate::{
    Client, Connection, Problem, print, table,
    workers::{escaped, shorten},
};

#[derive(Subcommand)]
pub enum Command {
    /// How each sink stands
    Sinks(Sinks),
    /// List messages that a sink would not take, the latest first
    Dead(Dead),
    /// Show one of them whole
    Show(One),
    /// Publish one again, or all that a filter finds
    Replay(Replay),
    /// Mark one as dealt with by other means, or all that a filter finds
    Resolve(Resolve),
    /// Publish events of a time again that were sent, for a broker that lost them
    Republish(Republish),
}

#[derive(Args)]
pub struct Sinks {
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct Which {
    #[arg(long)]
    sink: Option<String>,
    /// job.failed, job.*
    #[arg(long = "type", value_name = "TYPE")]
    kind: Option<String>,
    /// Of this job, worker, schedule …
    #[arg(long, value_name = "ID")]
    aggregate: Option<String>,
    #[arg(long, value_name = "TIME")]
    moved_after: Option<String>,
    #[arg(long, value_name = "TIME")]
    moved_before: Option<String>,
}

impl Which {
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
    which: Which,
    /// Also those that are resolved
    #[arg(long)]
    resolved: bool,
    #[arg(long, default_value_t = 20)]
    limit: u32,
    /// Where another list ended
    #[arg(long)]
    cursor: Option<String>,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct One {
    id: String,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct Chosen {
    /// One letter; without it, those that the filter finds
    id: Option<String>,
    #[command(flatten)]
    which: Which,
    /// Every dead letter
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct Replay {
    #[command(flatten)]
    chosen: Chosen,
    /// No more than so many per second
    #[arg(long, value_name = "N")]
    per_second: Option<u32>,
}

#[derive(Args)]
pub struct Resolve {
    #[command(flatten)]
    chosen: Chosen,
    /// How it was dealt with
    #[arg(long, default_value = "")]
    notes: String,
}

#[derive(Args)]
pub struct Republish {
    #[arg(long)]
    sink: String,
    /// From this time on: 2026-01-31T12:00:00Z
    #[arg(long)]
    from: String,
    /// Before this time
    #[arg(long)]
    to: String,
    #[arg(long = "type", value_name = "TYPE")]
    kind: Option<String>,
    /// No more than so many per second
    #[arg(long, value_name = "N")]
    per_second: Option<u32>,
    #[command(flatten)]
    connection: Connection,
}

pub async fn run(command: Command) -> Result<ExitCode, Problem> {
    match command {
        Command::Sinks(sinks) => show_sinks(&sinks.connection).await?,
        Command::Dead(dead) => show_dead(dead).await?,
        Command::Show(one) => {
            let client = Client::new(&one.connection)?;
            client.show(client.request(Method::GET, &path(&one.id, "")), describe).await?;
        }
        Command::Replay(replay) => {
            let pace = replay.per_second.map(|n| ("perSecond", json!(n)));
            if replay.chosen.id.is_some() && pace.is_some() {
                return Err(Problem::Usage("--per-second is for many, not for one".into()));
            }
            act(replay.chosen, "replay", pace, "replayed").await?;
        }
        Command::Resolve(resolve) => {
            act(resolve.chosen, "resolve", Some(("notes", json!(resolve.notes))), "resolved").await?;
        }
        Command::Republish(what) => republish(what).await?,
    }
    Ok(ExitCode::SUCCESS)
}

fn path(id: &str, rest: &str) -> String {
    format!("/api/v1/outbox/dead/{}{rest}", escaped(id))
}

/// A field of an answer as it is shown.
fn word(value: &Value, name: &str) -> String {
    match &value[name] {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

async fn show_sinks(connection: &Connection) -> Result<(), Problem> {
    let client = Client::new(connection)?;
    let request = client.request(Method::GET, "/api/v1/outbox");
    if connection.json {
        print(&client.text(request).await?);
        return Ok(());
    }
    let found: Value = client.call(request).await?;
    let mut table = table(["sink", "types", "on bad", "waiting", "since", "dead", "sent", "nodes", "down"]);
    for sink in found["sinks"].as_array().into_iter().flatten() {
        let types: Vec<&str> = sink["types"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let down = match sink["downSince"].as_str() {
            Some(since) => format!("since {since}: {}", word(sink, "downReason")),
            None => String::new(),
        };
        table.add_row([
            word(sink, "name"),
            types.join(" "),
            word(sink, "onBad"),
            word(sink, "pending"),
            word(sink, "oldestPendingAt"),
            word(sink, "dead"),
            word(sink, "sent"),
            sink["holders"].as_array().map_or(0, Vec::len).to_string(),
            down,
        ]);
    }
    print(&table.to_string());
    Ok(())
}

async fn show_dead(dead: Dead) -> Result<(), Problem> {
    let client = Client::new(&dead.connection)?;
    let (limit, open) = (dead.limit.to_string(), "false".to_owned());
    let mut query = dead.which.pairs();
    query.push(("limit", &limit));
    if !dead.resolved {
        query.push(("resolved", &open));
    }
    query.extend(dead.cursor.as_ref().map(|cursor| ("cursor", cursor)));
    let request = client.request(Method::GET, "/api/v1/outbox/dead").query(&query);
    if dead.connection.json {
        print(&client.text(request).await?);
        return Ok(());
    }
    let found: Value = client.call(request).await?;
    let mut table = table(["id", "sink", "type", "of", "tries", "dead since", "resolved", "error"]);
    for letter in found["data"].as_array().into_iter().flatten() {
        table.add_row([
            word(letter, "id"),
            word(letter, "sink"),
            word(letter, "eventType"),
            word(letter, "aggregateId"),
            word(letter, "retryCount"),
            word(letter, "movedAt"),
            word(letter, "resolvedBy"),
            shorten(&word(letter, "errorMessage"), 60),
        ]);
    }
    print(&table.to_string());
    if let Some(next) = found["nextCursor"].as_str() {
        print(&format!("more with --cursor {next}"));
    }
    Ok(())
}

fn describe(letter: &Value) -> String {
    let fields = letter.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
    fields.map(|(name, _)| format!("{name:<20} {}", word(letter, name))).collect::<Vec<_>>().join("\n")
}

async fn act(chosen: Chosen, action: &str, more: Option<(&str, Value)>, done: &str) -> Result<(), Problem> {
    let filter = chosen.which.pairs();
    let mut body = Map::new();
    body.extend(more.map(|(name, value)| (name.to_owned(), value)));
    let target = match &chosen.id {
        Some(_) if !filter.is_empty() || chosen.all => {
            return Err(Problem::Usage("one letter by its id, or many by --sink, --type …; not both".into()));
        }
        Some(id) => path(id, &format!("/{action}")),
        None if filter.is_empty() && !chosen.all => {
            let hint = "which letters? name one by its id, or many by --sink, --type, --aggregate …, or --all";
            return Err(Problem::Usage(hint.into()));
        }
        None => {
            let filter: Map<String, Value> =
                filter.into_iter().map(|(name, text)| (name.into(), json!(text))).collect();
            body.insert("filter".into(), json!(filter));
            body.insert("all".into(), json!(chosen.all));
            format!("/api/v1/outbox/dead/{action}")
        }
    };
    let client = Client::new(&chosen.connection)?;
    let text = client.patient_text(client.request(Method::POST, &target).json(&body)).await?;
    if chosen.connection.json {
        print(&text);
        return Ok(());
    }
    match &chosen.id {
        Some(id) => print(&format!("{id} is {done}")),
        None => print(&format!("{} dead letters {done}", count(&text, done)?)),
    }
    Ok(())
}

fn count(text: &str, name: &str) -> Result<u64, Problem> {
    let answer: Value = serde_json::from_str(text).unwrap_or_default();
    answer[name].as_u64().ok_or_else(|| Problem::Other("the answer was not understood".into()))
}

async fn republish(what: Republish) -> Result<(), Problem> {
    let client = Client::new(&what.connection)?;
    let mut body = json!({ "sink": what.sink, "from": what.from, "to": what.to });
    if let Some(kind) = what.kind {
        body["type"] = json!(kind);
    }
    if let Some(n) = what.per_second {
        body["perSecond"] = json!(n);
    }
    let text = client.patient_text(client.request(Method::POST, "/api/v1/outbox/republish").json(&body)).await?;
    if what.connection.json {
        print(&text);
        return Ok(());
    }
    print(&format!("{} events are published again to {}", count(&text, "republished")?, what.sink));
    Ok(())
}
