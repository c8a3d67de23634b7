//! `faena worker --type TYPE -- COMMAND…`: a worker that runs a command for each job.
//!
//! The command reads the payload from its standard input and writes the result to its standard output: JSON, or any text. What
//! it writes to standard error becomes the job's log. Exit 0 completes the job, 65 (data error) fails it without another try,
//! anything else fails this try. Its whole process group is killed when the job is over, cancelled or out of time.

use std::{process::Stdio, sync::Arc, time::Duration};

use faena::{Context, JobError};
use process_wrap::tokio::{ChildWrapper, CommandWrap, ProcessGroup};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};

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
/// How long the outputs of a command are listened to after its end, when somebody still holds them open.
const LAST_WORDS: Duration = Duration::from_millis(500);

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
    let mut wrap = CommandWrap::with_new(program, |inner| {
        inner.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        inner.env("FAENA_JOB_ID", job.id().to_string());
        inner.env("FAENA_JOB_TYPE", job.kind());
        inner.env("FAENA_RUN", job.run().to_string());
        inner.env("FAENA_RETRY_COUNT", job.retry_count().to_string());
        inner.env("FAENA_CORRELATION_ID", job.correlation_id());
        if let (Some(id), Some(due)) = (job.schedule_id(), job.schedule_due()) {
            inner.env("FAENA_SCHEDULE_ID", id).env("FAENA_SCHEDULE_DUE", due.to_string());
        }
    });
    wrap.wrap(ProcessGroup::leader());
    let child = wrap.spawn().map_err(|error| JobError::fail(format!("cannot start {program}: {error}")))?;
    let mut group = Group(child);
    tokio::select! {
        result = talk(&job, &mut group) => result,
        () = job.cancelled() => Err(JobError::cancelled()),
    }
}

/// A command with whatever it has started; killed when it is dropped.
struct Group(Box<dyn ChildWrapper>);

impl Drop for Group {
    fn drop(&mut self) {
        // Fails when all have ended, and that is well.
        let _ = self.0.start_kill();
    }
}

async fn talk(job: &Context, group: &mut Group) -> Result<Value, JobError> {
    let child = &mut group.0;
    let (stdin, stdout, stderr) = (child.stdin().take(), child.stdout().take(), child.stderr().take());
    let payload = job.payload().get().to_owned();
    let write = async {
        if let Some(mut stdin) = stdin {
            // A command that does not read its payload is free not to.
            let _ = stdin.write_all(payload.as_bytes()).await;
        }
    };
    let (mut result, mut last) = (Vec::new(), String::new());
    let read = async {
        if let Some(mut stdout) = stdout {
            let _ = (&mut stdout).take(RESULT_BYTES + 1).read_to_end(&mut result).await;
            // The rest is read and thrown away, so that the command is not held up.
            let _ = tokio::io::copy(&mut stdout, &mut tokio::io::sink()).await;
        }
    };
    let log = async {
        if let Some(stderr) = stderr {
            let mut lines = BufReader::new(stderr).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                job.log(&line);
                last = line;
            }
        }
    };
    let status = {
        let outputs = async { tokio::join!(write, read, log) };
        tokio::pin!(outputs);
        tokio::select! {
            _ = &mut outputs => child.wait().await?,
            status = child.wait() => {
                // What it has left behind and holds its outputs open ends with it.
                let _ = child.start_kill();
                let _ = tokio::time::timeout(LAST_WORDS, outputs).await;
                status?
            }
        }
    };
    if result.len() as u64 > RESULT_BYTES {
        return Err(JobError::fail(format!("the output is larger than {RESULT_BYTES} bytes")));
    }
    if status.success() {
        let text = String::from_utf8_lossy(&result);
        return Ok(match text.trim() {
            "" => Value::Null,
            text => serde_json::from_str(text).unwrap_or_else(|_| Value::from(text)),
        });
    }
    let text = if last.is_empty() { status.to_string() } else { format!("{status}: {last}") };
    Err(if status.code() == Some(DATA_ERROR) { JobError::fail(text) } else { JobError::retry(text) })
}
