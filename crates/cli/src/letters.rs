//! `faena dlq …`: dead letters.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use faena_domain::JobView;
use faena_wire::{BulkResponse, Changed, DeadLetterList, DeadLetterStats};
use reqwest::Method;
use serde_json::{Map, Value, json};

use crate::{
    Client, Connection, Problem, jobs, print, table,
    workers::{ago, escaped, shorten},
};

#[derive(Subcommand)]
pub enum Command {
    /// List dead letters, newest first
    List(List),
    /// Show one whole, with the errors of all its runs
    Show(One),
    /// Give one new tries, or all that a filter finds
    Retry(Chosen),
    /// Remove one, or all that a filter finds
    Delete(Chosen),
    /// How many there are, of which types, for which reasons
    Stats(Stats),
}

#[derive(Args)]
pub struct Which {
    #[arg(long = "type", value_name = "TYPE")]
    kind: Option<String>,
    #[arg(long)]
    queue: Option<String>,
    /// Part of the error
    #[arg(long)]
    error: Option<String>,
    /// error, timeout, orphaned, cancelled, expired or no_handler
    #[arg(long)]
    reason: Option<String>,
    /// Part of a type or queue name, or an id or key
    #[arg(short, long)]
    q: Option<String>,
}

impl Which {
    fn pairs(&self) -> Vec<(&'static str, &String)> {
        [("type", &self.kind), ("queue", &self.queue), ("error", &self.error), ("reason", &self.reason), ("q", &self.q)]
            .into_iter()
            .filter_map(|(name, value)| Some((name, value.as_ref()?)))
            .collect()
    }
}

#[derive(Args)]
pub struct List {
    #[command(flatten)]
    which: Which,
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
    /// Only say how many there are, and show some
    #[arg(long)]
    dry_run: bool,
    /// No more than so many per second; goes on in the background
    #[arg(long, value_name = "N")]
    per_second: Option<u32>,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct Stats {
    #[command(flatten)]
    connection: Connection,
}

pub async fn run(command: Command) -> Result<ExitCode, Problem> {
    match command {
        Command::List(list) => show_list(list).await?,
        Command::Show(one) => {
            let client = Client::new(&one.connection)?;
            let request = client.request(Method::GET, &path(&one.id, ""));
            client.show(request, describe).await?;
        }
        Command::Retry(chosen) => act(chosen, "retry", "has new tries", "retried").await?,
        Command::Delete(chosen) => act(chosen, "delete", "is deleted", "deleted").await?,
        Command::Stats(stats) => show_stats(&stats.connection).await?,
    }
    Ok(ExitCode::SUCCESS)
}

fn path(id: &str, rest: &str) -> String {
    format!("/api/v1/dead-letter/{}{rest}", escaped(id))
}

async fn show_list(list: List) -> Result<(), Problem> {
    let client = Client::new(&list.connection)?;
    let limit = list.limit.to_string();
    let mut query = list.which.pairs();
    query.push(("limit", &limit));
    query.extend(list.cursor.as_ref().map(|cursor| ("cursor", cursor)));
    let request = client.request(Method::GET, "/api/v1/dead-letter").query(&query);
    if list.connection.json {
        print(&client.text(request).await?);
        return Ok(());
    }
    let found: DeadLetterList = client.call(request).await?;
    let mut table = table(["id", "type", "queue", "runs", "failed", "reason", "error"]);
    for job in &found.data {
        table.add_row([
            job.id.to_string(),
            job.kind.clone(),
            job.queue.clone(),
            (job.retry_count + 1).to_string(),
            job.completed_at.map(ago).unwrap_or_default(),
            job.error_reason.map(|reason| reason.as_str().to_owned()).unwrap_or_default(),
            shorten(job.error.as_deref().unwrap_or(""), 60),
        ]);
    }
    print(&table.to_string());
    let more = found.next_cursor.map(|id| format!("; more with --cursor {id}")).unwrap_or_default();
    print(&format!("{} of {} dead letters{more}", found.data.len(), found.total));
    Ok(())
}

fn describe(job: &JobView) -> String {
    let mut text = jobs::describe(job);
    text.push_str("\n  runs");
    for attempt in &job.attempts {
        let run = attempt.run.map_or("no run".to_owned(), |run| format!("run {run}"));
        let worker = attempt.worker_id.as_deref().map(|worker| format!(" by {worker}")).unwrap_or_default();
        let reason = attempt.error_reason.map(|reason| format!(" ({})", reason.as_str())).unwrap_or_default();
        let error = attempt.error.as_deref().unwrap_or("");
        text.push_str(&format!("\n    {}  {run}{worker}  {}{reason} {error}", attempt.finished_at, attempt.status));
    }
    text
}

async fn act(chosen: Chosen, action: &str, one: &str, many: &str) -> Result<(), Problem> {
    let filter = chosen.which.pairs();
    match &chosen.id {
        Some(_) if !filter.is_empty() || chosen.all || chosen.dry_run || chosen.per_second.is_some() => {
            Err(Problem::Usage("one letter by its id, or many by --type, --queue, --error …; not both".into()))
        }
        Some(id) => act_on_one(id, &chosen.connection, action, one).await,
        None if filter.is_empty() && !chosen.all => Err(Problem::Usage(
            "which letters? name one by its id, or many by --type, --queue, --error, --reason, -q, or --all".into(),
        )),
        None => {
            let filter: Map<String, Value> =
                filter.into_iter().map(|(name, text)| (name.into(), json!(text))).collect();
            let mut body = json!({ "filter": filter, "all": chosen.all, "dryRun": chosen.dry_run });
            if let Some(n) = chosen.per_second {
                body["perSecond"] = json!(n);
            }
            act_on_many(&body, &chosen.connection, action, many).await
        }
    }
}

async fn act_on_one(id: &str, connection: &Connection, action: &str, what: &str) -> Result<(), Problem> {
    let client = Client::new(connection)?;
    if action == "delete" {
        client.text(client.request(Method::DELETE, &path(id, ""))).await?;
        print(&if connection.json { json!({ "id": id, "deleted": true }).to_string() } else { format!("{id} {what}") });
        return Ok(());
    }
    let request = client.request(Method::POST, &path(id, "/retry"));
    if connection.json {
        print(&client.text(request).await?);
        return Ok(());
    }
    let changed: Changed = client.call(request).await?;
    print(&format!("{} {what} and is {}", changed.id, changed.status));
    Ok(())
}

async fn act_on_many(body: &Value, connection: &Connection, action: &str, what: &str) -> Result<(), Problem> {
    let client = Client::new(connection)?;
    let request = client.request(Method::POST, &format!("/api/v1/dead-letter/bulk/{action}")).json(body);
    let text = client.patient_text(request).await?;
    if connection.json {
        print(&text);
        return Ok(());
    }
    let answer: BulkResponse =
        serde_json::from_str(&text).map_err(|e| Problem::Other(format!("the answer was not understood: {e}")))?;
    let at_least = if answer.matched_is_exact { "" } else { "at least " };
    if answer.dry_run {
        let mut table = table(["id", "type", "queue", "error"]);
        for job in answer.examples {
            let error = shorten(job.error.as_deref().unwrap_or(""), 60);
            table.add_row([job.id.to_string(), job.kind, job.queue, error]);
        }
        print(&table.to_string());
        print(&format!("{at_least}{} dead letters would be {what}; nothing was done", answer.matched));
    } else if let (Some(id), Some(n)) = (answer.id, answer.per_second) {
        print(&format!("{at_least}{} dead letters are being {what}, {n} per second: {id}", answer.matched));
    } else {
        let skipped = match answer.skipped {
            0 => String::new(),
            n => format!(", {n} had moved on"),
        };
        print(&format!("{} dead letters {what}{skipped}", answer.done));
    }
    Ok(())
}

async fn show_stats(connection: &Connection) -> Result<(), Problem> {
    let client = Client::new(connection)?;
    let request = client.request(Method::GET, "/api/v1/dead-letter/stats");
    if connection.json {
        print(&client.text(request).await?);
        return Ok(());
    }
    let stats: DeadLetterStats = client.call(request).await?;
    let mut lines = vec![format!("{} dead letters", stats.total)];
    for (title, counts) in [("by type", &stats.by_type), ("by queue", &stats.by_queue), ("by reason", &stats.by_reason)]
    {
        if !counts.is_empty() {
            let of = if title == "by reason" && stats.reasons_of < stats.total {
                format!(" (of the newest {})", stats.reasons_of)
            } else {
                String::new()
            };
            lines.push(format!("{title}{of}"));
            lines.extend(counts.iter().map(|(name, n)| format!("  {n:>8}  {name}")));
        }
    }
    lines.extend(stats.oldest.map(|at| format!("oldest created {at} ({})", ago(at))));
    lines.extend(stats.newest.map(|at| format!("newest created {at} ({})", ago(at))));
    print(&lines.join("\n"));
    Ok(())
}
