//! `faena worker --type TYPE -- COMMAND…`: a worker that runs a command for each job.
//!
//! The command reads the payload from its standard input and writes the result to its standard output: JSON, or any text. What
//! it writes to standard error becomes the job's log. Exit 0 completes the job, 65 (data error) fails it without another try,
//! anything else fails this try.

use std::{process::Stdio, sync::Arc};

use faena::{Context, JobError};
use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    process::{Child, Command},
};

use crate::Problem;

#[derive(clap::Args)]
pub struct Arguments {
    /// The server [default: FAENA_URL, or http://127.0.0.1:3000]
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// A job type to run, or a prefix with * behind it; several times for several
    #[arg(long = "type", value_name = "TYPE", required = true)]
    kinds: Vec<String>,
    /// A queue to take jobs from; several times for several [default: all]
    #[arg(long = "queue", value_name = "QUEUE")]
    queues: Vec<String>,
    /// Jobs to run at once
    #[arg(long, default_value_t = 1, value_name = "N")]
    concurrency: u32,
    /// What people call it
    #[arg(long)]
    name: Option<String>,
    /// The command to run for each job
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

/// sysexits.h: the input was wrong, and will be at the next try.
const DATA_ERROR: i32 = 65;
/// The most that is kept as a result.
const RESULT_BYTES: u64 = 512 << 10;

pub async fn run(arguments: Arguments) -> Result<std::process::ExitCode, Problem> {
    let mut worker = faena::Worker::new().concurrency(arguments.concurrency).queues(arguments.queues);
    if let Some(url) = arguments.url {
        worker = worker.url(url);
    }
    if let Some(name) = arguments.name {
        worker = worker.name(name);
    }
    let command: Arc<[String]> = arguments.command.into();
    eprintln!("faena: waiting for jobs of type {}", arguments.kinds.join(", "));
    for kind in arguments.kinds {
        let command = command.clone();
        worker = worker.handle(kind, move |job: Context, _: Value| run_command(job, command.clone()));
    }
    worker.run().await.map_err(|error| Problem::Other(error.to_string()))?;
    Ok(std::process::ExitCode::SUCCESS)
}

async fn run_command(job: Context, command: Arc<[String]>) -> Result<Value, JobError> {
    let (program, arguments) = command.split_first().expect("clap requires one");
    let mut child = Command::new(program)
        .args(arguments)
        .env("FAENA_JOB_ID", job.id().to_string())
        .env("FAENA_JOB_TYPE", job.kind())
        .env("FAENA_RUN", job.run().to_string())
        .env("FAENA_RETRY_COUNT", job.retry_count().to_string())
        .env("FAENA_CORRELATION_ID", job.correlation_id())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| JobError::fail(format!("cannot start {program}: {error}")))?;
    tokio::select! {
        result = talk(&job, &mut child) => result,
        () = job.cancelled() => Err(JobError::cancelled()),
    }
}

async fn talk(job: &Context, child: &mut Child) -> Result<Value, JobError> {
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let payload = job.payload().get().to_owned();
    let write = async {
        if let Some(mut stdin) = stdin {
            // A command that does not read its payload is free not to.
            let _ = stdin.write_all(payload.as_bytes()).await;
        }
    };
    let read = async {
        let mut text = Vec::new();
        if let Some(stdout) = stdout {
            let _ = stdout.take(RESULT_BYTES).read_to_end(&mut text).await;
        }
        String::from_utf8_lossy(&text).trim().to_owned()
    };
    let log = async {
        let mut last = String::new();
        if let Some(stderr) = stderr {
            let mut lines = BufReader::new(stderr).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                job.log(&line);
                last = line;
            }
        }
        last
    };
    let ((), result, last) = tokio::join!(write, read, log);
    let status = child.wait().await?;
    if status.success() {
        return Ok(match result.as_str() {
            "" => Value::Null,
            text => serde_json::from_str(text).unwrap_or_else(|_| Value::from(text)),
        });
    }
    let text = if last.is_empty() { status.to_string() } else { format!("{status}: {last}") };
    Err(if status.code() == Some(DATA_ERROR) { JobError::fail(text) } else { JobError::retry(text) })
}
