//! `faena workers …`.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use faena_domain::WorkerView;
use faena_wire::{Success, WorkerList};

use crate::{
    Api, CommandError, Connection,
    api::segment,
    complete,
    output::{Details, exact_and_relative, relative},
    table::table,
};

#[derive(Subcommand)]
pub enum Command {
    /// List workers, active ones first
    #[command(after_help = "Example:\n  faena workers list --state Ready,Busy")]
    List(List),
    /// Show a worker with its jobs and history
    #[command(after_help = "Example:\n  faena workers show mailer-1")]
    Show(WorkerArguments),
    /// Stop assigning jobs to a worker
    #[command(after_help = "Running jobs finish.\n\nExample:\n  faena workers drain mailer-1")]
    Drain(WorkerArguments),
    /// Cancel a drain
    #[command(after_help = "Example:\n  faena workers resume mailer-1")]
    Resume(WorkerArguments),
}

#[derive(Args)]
pub struct WorkerArguments {
    /// Worker id
    #[arg(add = complete::workers())]
    id: String,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct List {
    /// Only workers in these states: Creating, Connecting, Ready, Busy, Draining, Terminating, Terminated
    #[arg(long, value_name = "STATE,…")]
    state: Option<String>,
    /// Maximum number of workers
    #[arg(long, default_value_t = 100, value_name = "N")]
    limit: u32,
    #[command(flatten)]
    connection: Connection,
}

pub async fn run(command: Command) -> Result<ExitCode, CommandError> {
    match command {
        Command::List(list) => {
            let api = Api::new(&list.connection)?;
            let request = api.get("/api/v1/workers").query("limit", list.limit).query_opt("state", list.state);
            api.show(request, listed).await
        }
        Command::Show(worker) => {
            let api = Api::new(&worker.connection)?;
            api.show(api.get(&path(&worker.id, "")), describe).await
        }
        Command::Drain(worker) => {
            let api = Api::new(&worker.connection)?;
            let message = format!("{} drains: it receives no more jobs", worker.id);
            api.show(api.post(&path(&worker.id, "/drain")), |_: &Success| message).await
        }
        Command::Resume(worker) => {
            let api = Api::new(&worker.connection)?;
            let message = format!("{} was resumed: it receives jobs again", worker.id);
            api.show(api.delete(&path(&worker.id, "/drain")), |_: &Success| message).await
        }
    }
}

fn path(id: &str, rest: &str) -> String {
    format!("/api/v1/workers/{}{rest}", segment(id))
}

fn listed(list: &WorkerList) -> String {
    let mut table = table(["id", "state", "seen", "types", "note", "runs", "transport", "version"]);
    for worker in &list.workers {
        let transport = match (&worker.pool, worker.transport.as_str()) {
            (Some(pool), _) => format!("pool {pool}"),
            (None, "") => "built-in".into(),
            (None, transport) => transport.into(),
        };
        let breaker = (worker.breaker != "closed").then(|| format!("breaker {}", worker.breaker));
        let notes: Vec<String> = [worker.reason.clone(), breaker].into_iter().flatten().collect();
        let failed = if worker.failed > 0 { format!(", {} failed", worker.failed) } else { String::new() };
        table.add_row([
            worker.id.clone(),
            worker.state.to_string(),
            relative(worker.last_seen_at),
            worker.capabilities.join(", "),
            notes.join(", "),
            format!("{}{failed}", worker.completed + worker.failed),
            transport,
            worker.version.clone().unwrap_or_default(),
        ]);
    }
    table.or_text("no workers; start one with \"faena worker --type TYPE -- COMMAND\"")
}

fn describe(worker: &WorkerView) -> String {
    let mut details = Details::new(14);
    details.add("worker", worker.id.clone());
    details.add_opt("name", worker.name.as_ref());
    details.add("version", worker.version.clone().unwrap_or_else(|| "unknown".into()));
    details.add("state", worker.state.to_string());
    details.add_opt("reason", worker.reason.as_ref());
    details.add("types", worker.capabilities.join(", "));
    details.add("queues", if worker.queues.is_empty() { "all".into() } else { worker.queues.join(", ") });
    details.add("concurrency", worker.concurrency.to_string());
    details.add_opt("pool", worker.pool.as_ref());
    details.add("transport", worker.transport.clone());
    details.add("breaker", worker.breaker.clone());
    details.add("runs", format!("{} completed, {} failed", worker.completed, worker.failed));
    details.add("registered", worker.registered_at.to_string());
    details.add("last seen", exact_and_relative(worker.last_seen_at));
    details.add_opt("deadline", worker.deadline.map(|at| format!("{at}: declared lost unless it reconnects by then")));
    for job in &worker.jobs {
        details.add("job", job.clone());
    }
    if !worker.history.is_empty() {
        details.line("history");
    }
    for change in &worker.history {
        let reason = change.reason.as_deref().map(|reason| format!("  {reason}")).unwrap_or_default();
        details.line(format!("  {}  {}{reason}", change.at, change.state));
    }
    details.text()
}
