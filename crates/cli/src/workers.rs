//! `faena workers …`.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use comfy_table::{Table, presets};
use faena_domain::{Timestamp, WorkerView};
use faena_wire::{Success, WorkerList};
use reqwest::Method;

use crate::{Client, Connection, Problem, print};

#[derive(Subcommand)]
pub enum Command {
    /// List workers, the living ones first
    List(List),
    /// Show one worker whole, with its jobs and its history
    Show(One),
    /// Let a worker take no more jobs
    Drain(One),
    /// Call a drain off
    Resume(One),
}

#[derive(Args)]
pub struct One {
    id: String,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct List {
    /// Creating, Connecting, Ready, Busy, Draining, Terminating or Terminated; several with commas
    #[arg(long)]
    state: Option<String>,
    #[arg(long, default_value_t = 100)]
    limit: u32,
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
        Command::Drain(one) => drain(one, Method::POST, "takes no more jobs").await?,
        Command::Resume(one) => drain(one, Method::DELETE, "takes jobs again").await?,
    }
    Ok(ExitCode::SUCCESS)
}

fn path(id: &str, rest: &str) -> String {
    format!("/api/v1/workers/{}{rest}", escaped(id))
}

/// A name as one segment of a path.
pub fn escaped(name: &str) -> String {
    name.replace('%', "%25").replace('/', "%2F").replace('?', "%3F").replace('#', "%23")
}

async fn drain(one: One, method: Method, what: &str) -> Result<(), Problem> {
    let client = Client::new(&one.connection)?;
    let request = client.request(method, &path(&one.id, "/drain"));
    if one.connection.json {
        print(&client.text(request).await?);
        return Ok(());
    }
    let _: Success = client.call(request).await?;
    print(&format!("{} {what}", one.id));
    Ok(())
}

async fn show_list(list: List) -> Result<(), Problem> {
    let client = Client::new(&list.connection)?;
    let mut query = vec![("limit", list.limit.to_string())];
    query.extend(list.state.map(|state| ("state", state)));
    let request = client.request(Method::GET, "/api/v1/workers").query(&query);
    if list.connection.json {
        print(&client.text(request).await?);
        return Ok(());
    }
    let found: WorkerList = client.call(request).await?;
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header(["id", "kind", "state", "runs", "slots", "done", "failed", "breaker", "last seen"]);
    for worker in &found.workers {
        let kind = match (&worker.pool, worker.transport.as_str()) {
            (Some(pool), _) => format!("pool {pool}"),
            (None, "") => "built-in".into(),
            (None, door) => door.into(),
        };
        let state = match &worker.reason {
            Some(reason) => format!("{}: {reason}", worker.state),
            None => worker.state.to_string(),
        };
        table.add_row([
            worker.id.clone(),
            kind,
            state,
            shorten(&worker.capabilities.join(", "), 40),
            worker.concurrency.to_string(),
            worker.completed.to_string(),
            worker.failed.to_string(),
            worker.breaker.clone(),
            ago(worker.last_seen_at),
        ]);
    }
    print(&table.to_string());
    Ok(())
}

pub fn shorten(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        text.to_owned()
    } else {
        format!("{}…", text.chars().take(most - 1).collect::<String>())
    }
}

pub fn ago(at: Timestamp) -> String {
    let seconds = Timestamp::now().ms_since(at).max(0) / 1_000;
    match seconds {
        0..=119 => format!("{seconds} s ago"),
        120..=7_199 => format!("{} min ago", seconds / 60),
        _ => format!("{} h ago", seconds / 3_600),
    }
}

fn describe(worker: &WorkerView) -> String {
    let mut lines = vec![format!("worker        {}", worker.id)];
    let mut line = |name: &str, value: String| {
        if !value.is_empty() {
            lines.push(format!("{name:<14}{value}"));
        }
    };
    line("name", worker.name.clone().unwrap_or_default());
    line("state", worker.state.to_string());
    line("reason", worker.reason.clone().unwrap_or_default());
    line("runs", worker.capabilities.join(", "));
    line("queues", if worker.queues.is_empty() { "all".into() } else { worker.queues.join(", ") });
    line("slots", worker.concurrency.to_string());
    line("pool", worker.pool.clone().unwrap_or_default());
    line("transport", worker.transport.clone());
    line("breaker", worker.breaker.clone());
    line("done", format!("{} completed, {} failed", worker.completed, worker.failed));
    line("registered", worker.registered_at.to_string());
    line("last seen", format!("{} ({})", worker.last_seen_at, ago(worker.last_seen_at)));
    line("deadline", worker.deadline.map(|at| format!("{at}: lost unless it is back by then")).unwrap_or_default());
    for job in &worker.jobs {
        line("has", job.clone());
    }
    for change in &worker.history {
        let reason = change.reason.as_deref().map(|reason| format!("  {reason}")).unwrap_or_default();
        lines.push(format!("  {}  {}{reason}", change.at, change.state));
    }
    lines.join("\n")
}
