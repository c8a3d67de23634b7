//! Runs a configured command with input from a file, bounded output and resource limits, and leaves no process behind.
//!
//! The command runs under `faena guard`, which kills everything it has started when this process ends for any reason.

use std::{
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use faena_process::{Folder, ProcessEnd, Program, RunningProgram};
use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncReadExt},
    sync::Notify,
};
use tokio_util::sync::CancellationToken;

use crate::{
    isolation::{self, UsageLimits},
    output::BoundedLog,
    progress::Progress,
};

/// Variables with secrets of Faena, which no command receives.
const SECRETS: [&str; 4] =
    ["FAENA_TOKEN", "FAENA_WORKER_TOKEN", crate::transport::broker::URL_VARIABLE, crate::gateway::TOKEN_VARIABLE];
/// How long the outputs are read after the command has ended, if a process it started keeps them open.
const OUTPUT_GRACE: Duration = Duration::from_millis(500);
/// Shells report a command killed by a signal with this exit code plus the signal's number.
const KILLED: i32 = 128;
const CHUNK_BYTES: usize = 16 << 10;

/// A command to run.
pub struct CommandSpec<'a> {
    pub argv: Vec<String>,
    pub folder: &'a Path,
    /// A file that becomes standard input.
    pub input: Option<&'a Path>,
    pub variables: Vec<(&'static str, OsString)>,
    /// Whether the command sees the environment of this process, apart from secrets.
    pub inherits_environment: bool,
    pub time_limit: Duration,
    /// The command is killed if it writes more.
    pub max_output_bytes: u64,
    /// How much of the output is kept.
    pub kept_bytes: usize,
    /// Limits of the whole process tree.
    pub usage: Option<UsageLimits>,
}

/// How a command ended, and what it wrote.
#[derive(Debug)]
pub struct CommandEnd {
    pub ending: Ending,
    /// The part of standard output that is kept.
    pub stdout: Vec<u8>,
    /// Both outputs, in the order in which they arrived.
    pub log: String,
    pub last_line: String,
    pub output_bytes: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Ending {
    Exit(i32),
    TimedOut,
    TooMuchOutput,
    /// It exceeded a resource limit; the text says which.
    Exceeded(String),
    Cancelled,
    /// The program cannot be started, or the system failed.
    Broken(String),
}

/// Returns the program that guards commands: the one that is running now.
pub fn guard_program() -> std::io::Result<PathBuf> {
    std::env::current_exe()
}

struct Capture {
    stdout: Vec<u8>,
    log: BoundedLog,
}

/// State that the readers of both outputs share.
struct Shared<'a> {
    capture: Mutex<Capture>,
    overflow: Notify,
    kept_bytes: usize,
    max_output_bytes: u64,
    progress: &'a Progress,
}

/// Runs a command until it ends, exceeds a limit, or is cancelled. Afterwards none of its processes is left.
pub async fn run(guard: &Path, spec: CommandSpec<'_>, progress: &Progress, cancel: &CancellationToken) -> CommandEnd {
    let shared = Arc::new(Shared {
        capture: Mutex::new(Capture { stdout: Vec::new(), log: BoundedLog::new(spec.kept_bytes) }),
        overflow: Notify::new(),
        kept_bytes: spec.kept_bytes,
        max_output_bytes: spec.max_output_bytes,
        progress,
    });
    let ending = run_guarded(guard, &spec, &shared, cancel).await;
    let mut capture = shared.capture.lock();
    CommandEnd {
        ending,
        stdout: std::mem::take(&mut capture.stdout),
        log: capture.log.text(),
        last_line: capture.log.last_line(),
        output_bytes: capture.log.total(),
    }
}

async fn run_guarded(guard: &Path, spec: &CommandSpec<'_>, shared: &Shared<'_>, cancel: &CancellationToken) -> Ending {
    let RunningProgram { stdout, stderr, guard_id, control, mut end } =
        match faena_process::start(Some(guard), program(spec)) {
            Ok(running) => running,
            Err(error) => return Ending::Broken(format!("cannot start a process: {error}")),
        };
    let outputs = async { tokio::join!(read(stdout, true, shared), read(stderr, false, shared)) };
    tokio::pin!(outputs);
    let watch = isolation::watch(guard_id, spec.usage);
    tokio::pin!(watch);
    let limit = tokio::time::sleep(spec.time_limit);
    tokio::pin!(limit);
    let mut outputs_open = true;
    let ending = loop {
        tokio::select! {
            end = end.wait() => {
                break match end {
                    ProcessEnd::Exited(code) => Ending::Exit(code),
                    ProcessEnd::KilledBySignal(signal) => Ending::Exit(KILLED + signal),
                    ProcessEnd::NotStarted(error) => Ending::Broken(format!("cannot start {}: {error}", spec.argv[0])),
                    ProcessEnd::GuardLost => Ending::Broken("the guard of the command was killed".into()),
                };
            }
            _ = &mut outputs, if outputs_open => outputs_open = false,
            () = &mut limit => break Ending::TimedOut,
            () = shared.overflow.notified() => break Ending::TooMuchOutput,
            reason = &mut watch => break Ending::Exceeded(reason),
            () = cancel.cancelled() => break Ending::Cancelled,
        }
    };
    control.kill();
    let _ = end.wait().await;
    if outputs_open {
        let _ = tokio::time::timeout(OUTPUT_GRACE, outputs).await;
    }
    // Output that was read after the command ended may exceed the limit too.
    let is_over = shared.capture.lock().log.total() > spec.max_output_bytes;
    if is_over && matches!(ending, Ending::Exit(_)) { Ending::TooMuchOutput } else { ending }
}

fn program(spec: &CommandSpec<'_>) -> Program {
    let is_passed = |name: &OsStr| match spec.inherits_environment {
        true => !SECRETS.iter().any(|secret| name == *secret),
        false => ["PATH", "LANG", "TZ"].iter().any(|passed| name == *passed),
    };
    let mut environment: Vec<_> = std::env::vars_os().filter(|(name, _)| is_passed(name)).collect();
    environment.extend(spec.variables.iter().map(|(name, value)| ((*name).into(), value.clone())));
    Program {
        argv: spec.argv.iter().map(OsString::from).collect(),
        environment,
        folder: Folder::Given(spec.folder.to_owned()),
        input: spec.input.map(Path::to_owned),
    }
}

/// Reads an output to its end. What is not kept is discarded, so that the command does not block.
async fn read(output: Option<impl AsyncRead + Unpin>, is_stdout: bool, shared: &Shared<'_>) {
    let Some(mut output) = output else { return };
    let mut chunk = vec![0; CHUNK_BYTES];
    while let Ok(length @ 1..) = output.read(&mut chunk).await {
        let mut capture = shared.capture.lock();
        if is_stdout {
            let room = shared.kept_bytes.saturating_sub(capture.stdout.len()).min(length);
            capture.stdout.extend_from_slice(&chunk[..room]);
        }
        capture.log.push(&chunk[..length]);
        shared.progress.set_output(capture.log.total(), capture.log.last_line());
        if capture.log.total() > shared.max_output_bytes {
            shared.overflow.notify_one();
        }
    }
}
