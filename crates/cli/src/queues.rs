//! `faena queues …`.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use faena_domain::Fairness;
use faena_wire::{QueueList, QueueView};
use serde_json::{Map, Value, json};

use crate::{
    Api, CommandError, Connection,
    api::segment,
    complete,
    output::{Details, exact_and_relative, relative},
    table::table,
    whole_list,
};

#[derive(Subcommand)]
pub enum Command {
    /// List queues with their jobs and settings
    #[command(after_help = "Example:\n  faena queues list")]
    List(List),
    /// Show a queue
    #[command(after_help = "Example:\n  faena queues show mail")]
    Show(QueueArguments),
    /// Change the settings of a queue; omitted settings are kept
    #[command(after_help = "Example:\n  faena queues set mail --concurrency 10 --rate 100/1m")]
    Set(Set),
    /// Pause a queue; none of its jobs starts until it is resumed
    #[command(
        after_help = "Running jobs finish.\n\nExample:\n  faena queues pause mail --reason 'the SMTP server is down'"
    )]
    Pause(Pause),
    /// Resume a queue
    #[command(after_help = "Example:\n  faena queues resume mail")]
    Resume(QueueArguments),
}

#[derive(Args)]
pub struct List {
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct QueueArguments {
    /// Queue name
    #[arg(add = complete::queues())]
    name: String,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct Set {
    /// Queue name
    #[arg(add = complete::queues())]
    name: String,
    #[command(flatten)]
    limit: LimitOptions,
    /// Whether a job with a higher priority always runs first
    #[arg(long)]
    strict: Option<bool>,
    /// Order of jobs with concurrency keys: key (round robin over the keys) or none (oldest first)
    #[arg(long)]
    fairness: Option<String>,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct Pause {
    /// Queue name
    #[arg(add = complete::queues())]
    name: String,
    /// Reason shown to others
    #[arg(long)]
    reason: Option<String>,
    #[command(flatten)]
    connection: Connection,
}

/// The options that set a limit.
#[derive(Args)]
pub struct LimitOptions {
    /// Maximum number of jobs that run concurrently, on all nodes together; none removes the limit
    #[arg(long, value_name = "N|none")]
    concurrency: Option<String>,
    /// Maximum number of starts per period, like 100/1m; none removes the limit
    #[arg(long, value_name = "N/PERIOD|none")]
    rate: Option<String>,
}

impl LimitOptions {
    /// Adds the options that were passed to the body of a request.
    pub fn add_to(&self, body: &mut Map<String, Value>) -> Result<(), CommandError> {
        if let Some(text) = &self.concurrency {
            let number = match text.as_str() {
                "none" => Value::Null,
                text => {
                    let invalid = || format!("--concurrency: not a number or \"none\": \"{text}\"");
                    json!(text.parse::<u64>().map_err(|_| CommandError::Usage(invalid()))?)
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

pub async fn run(command: Command) -> Result<ExitCode, CommandError> {
    match command {
        Command::List(list) => {
            let api = Api::new(&list.connection)?;
            whole_list::show(&api, whole_list::read_pages(&api, "/api/v1/queues", "queues").await?, list_text)
        }
        Command::Show(queue) => {
            let api = Api::new(&queue.connection)?.with_options(&[("name", "NAME")]);
            api.show(api.get(&path(&queue.name, "")), describe).await
        }
        Command::Set(set) => {
            let api = Api::new(&set.connection)?.with_options(&[("name", "NAME")]);
            let mut body = Map::new();
            set.limit.add_to(&mut body)?;
            body.extend(set.strict.map(|strict| ("strict".into(), json!(strict))));
            body.extend(set.fairness.map(|fairness| ("fairness".into(), json!(fairness))));
            if body.is_empty() {
                let message = "nothing to change; pass --concurrency, --rate, --strict or --fairness";
                return Err(CommandError::Usage(message.into()));
            }
            api.show(api.patch(&path(&set.name, "")).json(&body), describe).await
        }
        Command::Pause(pause) => {
            let api = Api::new(&pause.connection)?.with_options(&[("name", "NAME")]);
            let body = pause.reason.map_or(json!({}), |reason| json!({ "reason": reason }));
            api.show(api.post(&path(&pause.name, "/pause")).json(&body), describe).await
        }
        Command::Resume(queue) => {
            let api = Api::new(&queue.connection)?.with_options(&[("name", "NAME")]);
            api.show(api.post(&path(&queue.name, "/resume")).json(&json!({})), describe).await
        }
    }
}

fn path(name: &str, rest: &str) -> String {
    format!("/api/v1/queues/{}{rest}", segment(name))
}

fn list_text(list: &QueueList) -> String {
    let mut table = table(["queue", "ready", "oldest", "running", "scheduled", "finished/min", "settings"]);
    for queue in &list.queues {
        table.add_row([
            queue.name.clone(),
            queue.depth.total.to_string(),
            queue.oldest.map(relative).unwrap_or_default(),
            queue.running.to_string(),
            (queue.pending + queue.retrying).to_string(),
            queue.rate_per_minute.map(|rate| format!("{rate:.0}")).unwrap_or_default(),
            settings(queue).join(", "),
        ]);
    }
    table.or_text("no queues; a queue exists as soon as a job or a setting names it")
}

/// Returns the settings of a queue that differ from the default.
pub fn settings(queue: &QueueView) -> Vec<String> {
    let mut settings = Vec::new();
    settings.extend(queue.paused.as_ref().map(|pause| format!("paused by {}", pause.by)));
    settings.extend(queue.concurrency.map(|n| format!("concurrency {n}")));
    settings.extend(queue.rate.map(|rate| rate.to_string()));
    settings.extend(queue.strict.then(|| "strict priority".to_owned()));
    settings.extend((queue.fairness == Fairness::Key).then(|| "fair by key".to_owned()));
    settings
}

fn describe(queue: &QueueView) -> String {
    let depth = queue.depth;
    let mut details = Details::new(14);
    details.add("queue", queue.name.clone());
    let by_priority =
        format!("{} critical, {} high, {} normal, {} low", depth.critical, depth.high, depth.normal, depth.low);
    details.add("ready", format!("{} ({by_priority})", depth.total));
    details.add_opt("oldest", queue.oldest.map(exact_and_relative));
    details.add("running", queue.running.to_string());
    details.add("scheduled", format!("{} pending, {} retrying", queue.pending, queue.retrying));
    details.add_opt("finished/min", queue.rate_per_minute.map(|rate| format!("{rate:.1}")));
    details.add_opt("concurrency", queue.concurrency);
    details.add_opt("rate", queue.rate.map(|rate| rate.to_string()));
    details.add_opt("order", queue.strict.then_some("strict: a higher priority always runs first"));
    details.add_opt("fairness", (queue.fairness == Fairness::Key).then_some("key: round robin over concurrency keys"));
    if let Some(pause) = &queue.paused {
        let reason = pause.reason.as_deref().map(|reason| format!(": {reason}")).unwrap_or_default();
        details.add("paused", format!("by {} since {}{reason}", pause.by, pause.at));
    }
    details.text()
}
