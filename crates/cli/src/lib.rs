//! The commands that talk to a server.

mod api;
mod audit;
mod complete;
mod dead_letters;
mod enqueue;
mod events;
mod ids;
mod jobs;
pub mod keys;
mod limits;
mod machines;
pub mod outbox;
pub mod output;
pub mod progress;
mod queues;
mod schedule_options;
mod schedules;
mod state_marks;
pub mod table;
mod task_bulk;
mod task_watch;
mod tasks;
mod top;
mod trace;
mod watch;
mod webhooks;
mod whole_list;
mod worker;
mod workers;

use std::{pin::Pin, process::ExitCode};

use clap::{Args, Subcommand};

use api::{Api, CommandError};

#[derive(Subcommand)]
pub enum Command {
    /// Submit a job
    #[command(after_help = "Example:\n  faena enqueue sleep '{\"ms\": 500}' --queue reports --watch")]
    Enqueue(enqueue::Arguments),
    /// List, show, cancel and retry jobs
    Jobs {
        #[command(subcommand)]
        command: jobs::Command,
    },
    /// Manage schedules
    Schedules {
        #[command(subcommand)]
        command: schedules::Command,
    },
    /// Create, list, follow, approve and reject tasks
    Tasks {
        #[command(subcommand)]
        command: tasks::Command,
    },
    /// Check, draw, register and list machines
    Machines {
        #[command(subcommand)]
        command: machines::Command,
    },
    /// List, show and drain workers
    Workers {
        #[command(subcommand)]
        command: workers::Command,
    },
    /// List, show and redeliver webhooks
    Webhooks {
        #[command(subcommand)]
        command: webhooks::Command,
    },
    /// List and pause queues, and change their settings
    Queues {
        #[command(subcommand)]
        command: queues::Command,
    },
    /// List and set limits
    Limits {
        #[command(subcommand)]
        command: limits::Command,
    },
    /// List, retry and delete dead-lettered jobs
    Dlq {
        #[command(subcommand)]
        command: dead_letters::Command,
    },
    /// Create, list, rotate and revoke API keys
    Keys {
        #[command(subcommand)]
        command: keys::Command,
    },
    /// Added by the binary, which combines it with `outbox init-sql`, a command that needs no server.
    #[command(skip)]
    Outbox { command: outbox::Command },
    /// Follow events as they happen
    #[command(after_help = "Example:\n  faena events --types 'job.*,schedule.missed' --queue mail")]
    Events(events::Arguments),
    /// Show everything with one correlation id as a timeline
    #[command(after_help = "Example:\n  faena trace order-7")]
    Trace(trace::Arguments),
    /// List administrative actions, newest first
    #[command(after_help = "Example:\n  faena audit --action queue.pause --limit 10")]
    Audit(audit::Arguments),
    /// Watch queues, workers and jobs live, and act on them
    #[command(after_help = top::HELP)]
    Top(top::Arguments),
    /// Run a command as a worker
    #[command(after_help = worker::HELP)]
    Worker(worker::Arguments),
}

/// How to reach the server and how to print.
#[derive(Args, Clone)]
pub struct Connection {
    /// Server URL; the API key is read from FAENA_TOKEN [default: FAENA_URL, or http://127.0.0.1:3000]
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// Output JSON
    #[arg(long)]
    pub json: bool,
    /// Show exact times in UTC instead of relative ones
    #[arg(long)]
    utc: bool,
}

/// Runs a command.
///
/// Exit codes: 0 done, 1 the server rejected the request or the job failed, 2 invalid usage, 3 the server cannot be reached.
///
/// Returns a boxed future, so that this crate contains the compiled code of all commands. An `async fn` would be
/// compiled in the crate of its caller.
pub fn run(command: Command) -> Pin<Box<dyn Future<Output = ExitCode>>> {
    Box::pin(run_command(command))
}

async fn run_command(command: Command) -> ExitCode {
    let result = match command {
        Command::Enqueue(arguments) => enqueue::run(arguments).await,
        Command::Jobs { command } => jobs::run(command).await,
        Command::Schedules { command } => schedules::run(command).await,
        Command::Tasks { command } => tasks::run(command).await,
        Command::Machines { command } => machines::run(command).await,
        Command::Workers { command } => workers::run(command).await,
        Command::Webhooks { command } => webhooks::run(command).await,
        Command::Queues { command } => queues::run(command).await,
        Command::Limits { command } => limits::run(command).await,
        Command::Dlq { command } => dead_letters::run(command).await,
        Command::Keys { command } => keys::run(command).await,
        Command::Outbox { command } => outbox::run(command).await,
        Command::Events(arguments) => events::run(arguments).await,
        Command::Trace(arguments) => trace::run(arguments).await,
        Command::Audit(arguments) => audit::run(arguments).await,
        Command::Top(arguments) => top::run(arguments).await,
        Command::Worker(arguments) => worker::run(arguments).await,
    };
    result.unwrap_or_else(|error| {
        output::print_error(&error.to_string());
        error.exit_code()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks a command and its subcommands.
    fn check(command: &clap::Command, path: &str) {
        let about = command.get_about().map(ToString::to_string).unwrap_or_default();
        assert!(about.starts_with(char::is_uppercase) && !about.ends_with('.'), "{path}: {about}");
        for argument in command.get_arguments() {
            let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
            assert!(help.starts_with(|c: char| !c.is_lowercase()) && !help.ends_with('.'), "{path} {argument}: {help}");
        }
        if command.get_subcommands().next().is_none() {
            let example = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let example = example.replace("Examples:", "Example:");
            assert!(example.contains(&format!("Example:\n  {path}")), "{path}: {example}");
        }
        for subcommand in command.get_subcommands() {
            check(subcommand, &format!("{path} {}", subcommand.get_name()));
        }
    }

    #[test]
    fn every_option_has_a_description_and_every_command_an_example() {
        let outbox = outbox::Command::augment_subcommands(clap::Command::new("outbox").about("Manage sinks"));
        check(&Command::augment_subcommands(clap::Command::new("faena").about("Jobs")).subcommand(outbox), "faena");
    }
}
