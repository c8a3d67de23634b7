//! The programs that carry out a coding task: the smith makes plans and changes, the sandbox tests them, and the gateway
//! connects a web page.
//!
//! A message tells a service that a task changed; the service then reads the task to find out what to do. It writes accepted work
//! and results to disk before it continues, so that a killed service resumes: interrupted work starts again, and a result that is
//! sent again has the same id.

mod options;
mod words;
mod repository;
mod task;
mod outgoing;
mod private;
mod records;
mod backoff;
mod transport;
mod progress;
mod output;
mod command;
mod isolation;
mod git;
mod service;
mod runner;
mod smith;
mod sandbox;
mod gateway;

use std::{io::IsTerminal, pin::Pin, process::ExitCode};

use clap::Subcommand;
use faena_domain::{LogWriter, printable};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::{layer::SubscriberExt, util::SubscriberInitExt};

/// The adapters.
#[derive(Subcommand)]
pub enum Command {
    /// Make the plans and the changes of coding tasks with a coding agent
    #[command(after_help = smith::HELP)]
    Smith(smith::Arguments),
    /// Test the changes of coding tasks in a limited process
    #[command(after_help = sandbox::HELP)]
    Sandbox(sandbox::Arguments),
    /// Connect web pages to coding tasks over WebSocket
    #[command(after_help = gateway::HELP)]
    Gateway(gateway::Arguments),
}

/// Why an adapter cannot start.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct CannotStart(pub String);

/// Exit code for an invalid configuration.
const USAGE: u8 = 2;

/// Runs an adapter until SIGTERM or Ctrl-C.
///
/// Returns a boxed future, so that the code of all commands is compiled in this crate. That of an `async fn` would be
/// compiled in the crate of the caller.
pub fn run(command: Command) -> Pin<Box<dyn Future<Output = ExitCode>>> {
    Box::pin(run_command(command))
}

async fn run_command(command: Command) -> ExitCode {
    start_logging();
    faena_process::adopt_orphans();
    let stop = CancellationToken::new();
    let signals = tokio::spawn(stop_on_signal(stop.clone()));
    let result = match command {
        Command::Smith(arguments) => smith::run(arguments, stop).await,
        Command::Sandbox(arguments) => sandbox::run(arguments, stop).await,
        Command::Gateway(arguments) => gateway::run(arguments, stop).await,
    };
    signals.abort();
    match result {
        Ok(()) => {
            tracing::info!("stopped");
            ExitCode::SUCCESS
        }
        Err(CannotStart(message)) => {
            eprintln!("faena: {}", printable(&message));
            ExitCode::from(USAGE)
        }
    }
}

/// Prints the log as the server does.
fn start_logging() {
    let colours = std::io::stderr().is_terminal();
    let layer = tracing_subscriber::fmt::layer()
        .with_ansi(colours)
        .with_target(false)
        .with_writer(move || LogWriter::new(std::io::stderr(), colours));
    let filter = tracing_subscriber::filter::Targets::new()
        .with_target("faena", tracing::Level::INFO)
        .with_target("faena_adapter", tracing::Level::INFO);
    // Fails only if a test has installed a subscriber.
    let _ = tracing_subscriber::registry().with(filter).with(layer).try_init();
}

async fn stop_on_signal(stop: CancellationToken) {
    use tokio::signal::unix::{SignalKind, signal};
    let Ok(mut terminate) = signal(SignalKind::terminate()) else { return };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = tokio::signal::ctrl_c() => {}
    }
    tracing::info!("stopping");
    stop.cancel();
}
