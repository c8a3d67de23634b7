//! `faena worker --type TYPE -- COMMAND…`: a worker that runs a command for each job.

use std::{io::IsTerminal, process::Stdio, sync::Arc, time::Duration};

use faena::{Context, JobError};
use faena_domain::LogWriter;
use process_wrap::tokio::{ChildWrapper, CommandWrap, ProcessGroup};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tracing_subscriber::{layer::SubscriberExt, util::SubscriberInitExt};

use crate::CommandError;

pub const HELP: &str = "\
The command reads the payload from standard input.
It writes the result, JSON or any text, to standard output.
Standard error becomes the job's log.
Exit code 0 completes the job, 65 fails it without a retry, any other fails the attempt.
The whole process group is killed when the job is finished, cancelled or timed out.

Example:
  faena worker --type resize --concurrency 4 -- ./resize.sh";

#[derive(clap::Args)]
pub struct Arguments {
    /// Server URL; the API key is read from FAENA_WORKER_TOKEN or FAENA_TOKEN [default: FAENA_URL, or http://127.0.0.1:3000]
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// Job type to run, or PREFIX*; repeat for several
    #[arg(long = "type", value_name = "TYPE", required = true, add = crate::complete::types())]
    kinds: Vec<String>,
    /// Queue to take jobs from; repeat for several [default: all]
    #[arg(long = "queue", value_name = "QUEUE", add = crate::complete::queues())]
    queues: Vec<String>,
    /// Maximum number of jobs that run concurrently
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    concurrency: u32,
    /// Display name
    #[arg(long)]
    name: Option<String>,
    /// Version of the command, shown in lists of workers
    #[arg(long, value_name = "TEXT")]
    worker_version: Option<String>,
    /// Command to run for each job
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

/// `EX_DATAERR` of sysexits.h: the input is wrong, and another attempt would fail the same way.
const DATA_ERROR: i32 = 65;
const MAX_RESULT_BYTES: u64 = 512 << 10;
/// How long the outputs are read after the command has ended, if a process it started keeps them open.
const OUTPUT_GRACE: Duration = Duration::from_millis(500);

pub async fn run(arguments: Arguments) -> Result<std::process::ExitCode, CommandError> {
    let mut worker = faena::Worker::new().concurrency(arguments.concurrency).queues(arguments.queues);
    if let Some(url) = arguments.url {
        worker = worker.url(url);
    }
    if let Some(name) = arguments.name {
        worker = worker.name(name);
    }
    if let Some(version) = arguments.worker_version {
        worker = worker.version(version);
    }
    let command: Arc<[String]> = arguments.command.into();
    start_logging();
    for kind in arguments.kinds {
        let command = command.clone();
        worker = worker.handle(kind, move |job: Context, _: Value| run_command(job, command.clone()));
    }
    worker.run().await?;
    tracing::info!("stopped");
    Ok(std::process::ExitCode::SUCCESS)
}

/// Logs connection events in the format of the server's log.
fn start_logging() {
    let colours = std::io::stderr().is_terminal();
    let layer = tracing_subscriber::fmt::layer()
        .with_ansi(colours)
        .with_target(false)
        .with_writer(move || LogWriter::new(std::io::stderr(), colours));
    let filter = tracing_subscriber::filter::Targets::new().with_target("faena", tracing::Level::INFO);
    // Fails only if a test has installed a subscriber.
    let _ = tracing_subscriber::registry().with(filter).with(layer).try_init();
}

async fn run_command(job: Context, command: Arc<[String]>) -> Result<Value, JobError> {
    let (program, arguments) = command.split_first().expect("clap requires one");
    let mut wrap = CommandWrap::with_new(program, |inner| {
        inner.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // Only the worker itself may report about its jobs.
        inner.env_remove("FAENA_SESSION_TOKEN");
        inner.env("FAENA_JOB_ID", job.id().to_string());
        inner.env("FAENA_JOB_TYPE", job.kind());
        inner.env("FAENA_RUN", job.run().to_string());
        inner.env("FAENA_RETRY_COUNT", job.retry_count().to_string());
        inner.env("FAENA_CORRELATION_ID", job.correlation_id());
        if let Some(traceparent) = job.traceparent() {
            inner.env("TRACEPARENT", traceparent);
        }
        if let (Some(id), Some(due)) = (job.schedule_id(), job.schedule_due()) {
            inner.env("FAENA_SCHEDULE_ID", id).env("FAENA_SCHEDULE_DUE", due.to_string());
        }
    });
    wrap.wrap(ProcessGroup::leader());
    let child = wrap.spawn().map_err(|error| JobError::fail(format!("cannot start \"{program}\": {error}")))?;
    let mut group = KilledOnDrop(child);
    tokio::select! {
        result = communicate(&job, &mut group) => result,
        () = job.cancelled() => Err(JobError::cancelled()),
    }
}

/// A command with all processes it has started.
struct KilledOnDrop(Box<dyn ChildWrapper>);

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        // Fails if all processes have ended.
        let _ = self.0.start_kill();
    }
}

/// Passes the payload to the command, and its outputs to the job.
async fn communicate(job: &Context, group: &mut KilledOnDrop) -> Result<Value, JobError> {
    let child = &mut group.0;
    let (stdin, stdout, stderr) = (child.stdin().take(), child.stdout().take(), child.stderr().take());
    let payload = job.payload().get().to_owned();
    let write_payload = async {
        if let Some(mut stdin) = stdin {
            // A command does not have to read its payload.
            let _ = stdin.write_all(payload.as_bytes()).await;
        }
    };
    let (mut result, mut last_line) = (Vec::new(), String::new());
    let read_result = async {
        if let Some(mut stdout) = stdout {
            let _ = (&mut stdout).take(MAX_RESULT_BYTES + 1).read_to_end(&mut result).await;
            // The rest is discarded, so that the command does not block.
            let _ = tokio::io::copy(&mut stdout, &mut tokio::io::sink()).await;
        }
    };
    let read_log = async {
        if let Some(stderr) = stderr {
            let mut lines = BufReader::new(stderr).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                job.log(&line);
                last_line = line;
            }
        }
    };
    let status = {
        let outputs = async { tokio::join!(write_payload, read_result, read_log) };
        tokio::pin!(outputs);
        tokio::select! {
            _ = &mut outputs => child.wait().await?,
            status = child.wait() => {
                // Kills processes that the command left behind and that keep its outputs open.
                let _ = child.start_kill();
                let _ = tokio::time::timeout(OUTPUT_GRACE, outputs).await;
                status?
            }
        }
    };
    if result.len() as u64 > MAX_RESULT_BYTES {
        return Err(JobError::fail(format!("the output is larger than {MAX_RESULT_BYTES} bytes")));
    }
    if status.success() {
        let text = String::from_utf8_lossy(&result);
        return Ok(match text.trim() {
            "" => Value::Null,
            text => serde_json::from_str(text).unwrap_or_else(|_| Value::from(text)),
        });
    }
    let ending = status.code().map_or_else(|| "killed by a signal".to_owned(), |code| format!("exit code {code}"));
    let message = if last_line.is_empty() { ending } else { format!("{ending}: {last_line}") };
    Err(if status.code() == Some(DATA_ERROR) { JobError::fail(message) } else { JobError::retry(message) })
}
