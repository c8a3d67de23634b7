//! `faena queues …`.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use faena_wire::{QueueList, QueueView};
use reqwest::Method;
use serde_json::{Map, Value, json};

use crate::{
    Client, Connection, Problem, print, table,
    workers::{ago, escaped},
};

#[derive(Subcommand)]
pub enum Command {
    /// List queues: what waits, what runs, what holds for them
    List(List),
    /// Show one queue
    Show(One),
    /// Change what holds for a queue
    Set(Set),
    /// Let no job of a queue start, on all nodes, until it is resumed
    Pause(Pause),
    /// Let its jobs start again
    Resume(One),
}

#[derive(Args)]
pub struct List {
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct One {
    name: String,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct Set {
    name: String,
    #[command(flatten)]
    numbers: Numbers,
    /// true: a higher priority always goes first
    #[arg(long)]
    strict: Option<bool>,
    /// key: each concurrencyKey in its turn; none: who has waited longest goes first
    #[arg(long)]
    fairness: Option<String>,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct Pause {
    name: String,
    /// Why, for those who wonder
    #[arg(long)]
    reason: Option<String>,
    #[command(flatten)]
    connection: Connection,
}

/// The numbers of a limit.
#[derive(Args)]
pub struct Numbers {
    /// Jobs that run at once, on all nodes together; none: no limit
    #[arg(long, value_name = "N|none")]
    concurrency: Option<String>,
    /// Starts per period, like 100/1m; none: no limit
    #[arg(long, value_name = "N/PERIOD|none")]
    rate: Option<String>,
}

impl Numbers {
    pub fn put_into(&self, body: &mut Map<String, Value>) -> Result<(), Problem> {
        if let Some(text) = &self.concurrency {
            let number = match text.as_str() {
                "none" => Value::Null,
                text => {
                    let wrong = || Problem::Usage(format!("--concurrency {text} is neither a number nor none"));
                    json!(text.parse::<u64>().map_err(|_| wrong())?)
                }
            };
            body.insert("concurrency".into(), number);
        }
        if let Some(text) = &self.rate {
            body.insert("rate".into(), if text == "none" { Value::Null } else { json!(text) });
        }
        Ok(())
    }
}

pub async fn run(command: Command) -> Result<ExitCode, Problem> {
    match command {
        Command::List(list) => show_list(&list.connection).await?,
        Command::Show(one) => {
            let client = Client::new(&one.connection)?;
            let request = client.request(Method::GET, &path(&one.name, ""));
            client.show(request, describe).await?;
        }
        Command::Set(set) => {
            let mut body = Map::new();
            set.numbers.put_into(&mut body)?;
            body.extend(set.strict.map(|strict| ("strict".into(), json!(strict))));
            body.extend(set.fairness.map(|fairness| ("fairness".into(), json!(fairness))));
            change(&set.connection, Method::PATCH, &path(&set.name, ""), Value::Object(body)).await?;
        }
        Command::Pause(pause) => {
            let body = pause.reason.map_or(json!({}), |reason| json!({ "reason": reason }));
            change(&pause.connection, Method::POST, &path(&pause.name, "/pause"), body).await?;
        }
        Command::Resume(one) => {
            change(&one.connection, Method::POST, &path(&one.name, "/resume"), json!({})).await?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn path(name: &str, rest: &str) -> String {
    format!("/api/v1/queues/{}{rest}", escaped(name))
}

async fn change(connection: &Connection, method: Method, path: &str, body: Value) -> Result<(), Problem> {
    let client = Client::new(connection)?;
    let request = client.request(method, path).json(&body);
    client.show(request, describe).await
}

async fn show_list(connection: &Connection) -> Result<(), Problem> {
    let client = Client::new(connection)?;
    let request = client.request(Method::GET, "/api/v1/queues");
    if connection.json {
        print(&client.text(request).await?);
        return Ok(());
    }
    let found: QueueList = client.call(request).await?;
    let mut table =
        table(["queue", "waiting", "critical/high/normal/low", "oldest", "running", "later", "per minute", "holds"]);
    for queue in &found.queues {
        let depth = queue.depth;
        table.add_row([
            queue.name.clone(),
            depth.total.to_string(),
            format!("{}/{}/{}/{}", depth.critical, depth.high, depth.normal, depth.low),
            queue.oldest.map(ago).unwrap_or_default(),
            queue.running.to_string(),
            (queue.pending + queue.retrying).to_string(),
            queue.rate_per_minute.map(|rate| format!("{rate:.0}")).unwrap_or_default(),
            rules(queue).join(", "),
        ]);
    }
    print(&table.to_string());
    Ok(())
}

/// What holds for a queue, as far as it is not the default.
fn rules(queue: &QueueView) -> Vec<String> {
    let mut rules = Vec::new();
    rules.extend(queue.paused.as_ref().map(|pause| format!("paused by {}", pause.by)));
    rules.extend(queue.concurrency.map(|n| format!("{n} at once")));
    rules.extend(queue.rate.map(|rate| rate.to_string()));
    rules.extend(queue.strict.then(|| "strict".to_owned()));
    rules.extend((queue.fairness == faena_domain::Fairness::Key).then(|| "fair by key".to_owned()));
    rules
}

fn describe(queue: &QueueView) -> String {
    let depth = queue.depth;
    let mut lines = vec![format!("queue         {}", queue.name)];
    let mut line = |name: &str, value: String| {
        if !value.is_empty() {
            lines.push(format!("{name:<14}{value}"));
        }
    };
    line(
        "waiting",
        format!(
            "{} ({} critical, {} high, {} normal, {} low)",
            depth.total, depth.critical, depth.high, depth.normal, depth.low
        ),
    );
    line("oldest", queue.oldest.map(|at| format!("{at} ({})", ago(at))).unwrap_or_default());
    line("running", queue.running.to_string());
    line("later", format!("{} pending, {} retrying", queue.pending, queue.retrying));
    line("per minute", queue.rate_per_minute.map(|rate| format!("{rate:.1}")).unwrap_or_default());
    line("at once", queue.concurrency.map(|n| n.to_string()).unwrap_or_default());
    line("rate", queue.rate.map(|rate| rate.to_string()).unwrap_or_default());
    line("order", if queue.strict { "strict: a higher priority always goes first".into() } else { String::new() });
    let fair = queue.fairness == faena_domain::Fairness::Key;
    line("fairness", if fair { "each concurrencyKey in its turn".into() } else { String::new() });
    if let Some(pause) = &queue.paused {
        let reason = pause.reason.as_deref().map(|reason| format!(": {reason}")).unwrap_or_default();
        line("paused", format!("by {} since {}{reason}", pause.by, pause.at));
    }
    lines.join("\n")
}
