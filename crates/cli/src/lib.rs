//! The commands that talk to a server.

mod audit;
mod client;
mod enqueue;
mod events;
mod jobs;
mod letters;
mod limits;
pub mod outbox;
mod queues;
mod schedule_flags;
mod schedules;
mod sse;
mod trace;
mod watch;
mod webhooks;
mod worker;
mod workers;

use std::process::ExitCode;

use clap::{Args, Subcommand};

use client::{Client, Problem};

#[derive(Subcommand)]
pub enum Command {
    /// Hand in a job
    Enqueue(enqueue::Arguments),
    /// Look at jobs and act on them
    Jobs {
        #[command(subcommand)]
        command: jobs::Command,
    },
    /// Make jobs by the clock: schedules, when they are due, what became of it
    Schedules {
        #[command(subcommand)]
        command: schedules::Command,
    },
    /// Look at workers and drain them
    Workers {
        #[command(subcommand)]
        command: workers::Command,
    },
    /// Look at webhooks and send them again
    Webhooks {
        #[command(subcommand)]
        command: webhooks::Command,
    },
    /// Look at queues, pause them, change what holds for them
    Queues {
        #[command(subcommand)]
        command: queues::Command,
    },
    /// Look at limits and set them
    Limits {
        #[command(subcommand)]
        command: limits::Command,
    },
    /// Look at dead letters, retry them, put them away
    Dlq {
        #[command(subcommand)]
        command: letters::Command,
    },
    /// The binary puts these together with `outbox init-sql`, which needs no server.
    #[command(skip)]
    Outbox { command: outbox::Command },
    /// Follow what happens, as it happens
    Events(events::Arguments),
    /// Show everything with one correlation id, in the order in which it happened
    Trace(trace::Arguments),
    /// Show who did what
    Audit(audit::Arguments),
    /// Be a worker: run a command for each job of some types
    Worker(worker::Arguments),
}

/// How to reach the server and how to print.
#[derive(Args, Clone)]
pub struct Connection {
    /// The server [default: FAENA_URL, or http://127.0.0.1:3000]
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// Print JSON for machines
    #[arg(long)]
    json: bool,
}

/// Exit codes: 0 done, 1 the server refused or the job failed, 2 wrong usage, 3 the server cannot be reached.
pub async fn run(command: Command) -> ExitCode {
    let result = match command {
        Command::Enqueue(arguments) => enqueue::run(arguments).await,
        Command::Jobs { command } => jobs::run(command).await,
        Command::Schedules { command } => schedules::run(command).await,
        Command::Workers { command } => workers::run(command).await,
        Command::Webhooks { command } => webhooks::run(command).await,
        Command::Queues { command } => queues::run(command).await,
        Command::Limits { command } => limits::run(command).await,
        Command::Dlq { command } => letters::run(command).await,
        Command::Outbox { command } => outbox::run(command).await,
        Command::Events(arguments) => events::run(arguments).await,
        Command::Trace(arguments) => trace::run(arguments).await,
        Command::Audit(arguments) => audit::run(arguments).await,
        Command::Worker(arguments) => worker::run(arguments).await,
    };
    match result {
        Ok(code) => code,
        Err(problem) => {
            eprintln!("faena: {problem}");
            ExitCode::from(match problem {
                Problem::Refused { .. } | Problem::Other(_) => 1,
                Problem::Usage(_) => 2,
                Problem::Unreachable { .. } => 3,
            })
        }
    }
}

/// An empty table for people.
fn table<const N: usize>(header: [&str; N]) -> comfy_table::Table {
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::UTF8_FULL_CONDENSED);
    table.set_header(header);
    table
}

/// A reader that went away (`faena jobs list | head`) is no error.
fn print(text: &str) {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{text}");
    let _ = out.flush();
}
