//! Starts a program under a guard, and controls it.

use std::{
    ffi::OsString,
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use rustix::process::{Signal, kill_process_group};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    process::{Child, ChildStderr, ChildStdout, Command},
    sync::{mpsc, watch},
};

use crate::{
    KnownChild, ProcessEnd,
    children::{self, kill_orphans},
    folder,
    guard::{TERMINATE, guarded_name},
};

/// A program to run.
#[derive(Debug)]
pub struct Program {
    pub argv: Vec<OsString>,
    /// The whole environment of the program.
    pub environment: Vec<(OsString, OsString)>,
    pub folder: Folder,
    /// A file that becomes standard input. Needs a guard.
    pub input: Option<PathBuf>,
}

/// Where a program runs.
#[derive(Debug)]
pub enum Folder {
    /// In the folder of this process.
    Inherited,
    Given(PathBuf),
    /// In a folder that does not exist yet and is removed when the program has ended.
    Scratch(PathBuf),
}

/// A program that was started.
#[derive(Debug)]
pub struct RunningProgram {
    pub stdout: Option<ChildStdout>,
    pub stderr: Option<ChildStderr>,
    /// Process id of the guard, or of a program without one.
    pub guard_id: Option<u32>,
    pub control: RunningControl,
    pub end: RunningEnd,
}

/// Controls a running program. Dropping it kills the program with everything that it has started.
#[derive(Debug)]
pub struct RunningControl(mpsc::UnboundedSender<ControlCommand>);

#[derive(Clone, Debug)]
pub struct RunningEnd(watch::Receiver<Option<ProcessEnd>>);

#[derive(Debug)]
enum ControlCommand {
    Terminate,
    Kill,
}

/// How long a guard may take to kill its program. Then the guard is killed too: its program may have suspended it.
const KILL_LIMIT: Duration = Duration::from_secs(5);
/// Time limit for reading the report of a guard that has ended.
const REPORT_LIMIT: Duration = Duration::from_secs(1);
const MAX_REPORT_BYTES: u64 = 64 << 10;

impl RunningControl {
    /// Sends SIGTERM to the process group of the program.
    pub fn terminate(&self) {
        let _ = self.0.send(ControlCommand::Terminate);
    }

    /// Kills the program with everything that it has started.
    pub fn kill(&self) {
        let _ = self.0.send(ControlCommand::Kill);
    }
}

impl RunningEnd {
    /// Waits until no process of the program is left.
    pub async fn wait(&mut self) -> ProcessEnd {
        match self.0.wait_for(Option::is_some).await {
            Ok(end) => end.clone().unwrap_or(ProcessEnd::GuardLost),
            // The runtime is shutting down.
            Err(_) => ProcessEnd::GuardLost,
        }
    }
}

/// Starts a program. `guard` is the `faena` binary.
///
/// Without a guard, only this process kills the program, and only its process group. Only tests do without one.
///
/// # Errors
/// Fails if the guard, or the program without a guard, cannot be started. If a guard cannot start its program,
/// [`RunningEnd::wait`] returns [`ProcessEnd::NotStarted`].
pub fn start(guard: Option<&Path>, program: Program) -> io::Result<RunningProgram> {
    let scratch = match &program.folder {
        Folder::Scratch(path) => Some(path.clone()),
        Folder::Inherited | Folder::Given(_) => None,
    };
    let mut command = match guard {
        Some(guard) => guarded_command(guard, program),
        None => bare_command(program)?,
    };
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let socket = if guard.is_some() { Some(connect_stdin(&mut command)?) } else { None };
    let (mut child, known) = children::spawn(&mut command)?;
    let (commands, received) = mpsc::unbounded_channel();
    let (report, end) = watch::channel(None);
    let running = RunningProgram {
        stdout: child.stdout.take(),
        stderr: child.stderr.take(),
        guard_id: child.id(),
        control: RunningControl(commands),
        end: RunningEnd(end),
    };
    tokio::spawn(async move {
        let end = match socket {
            Some(socket) => watch_guard(child, known, socket, received).await,
            None => watch_bare(child, received).await,
        };
        if let Some(scratch) = scratch {
            // The guard has removed it, unless it was killed.
            let _ = tokio::task::spawn_blocking(move || folder::remove(&scratch)).await;
        }
        let _ = report.send(Some(end));
    });
    Ok(running)
}

fn guarded_command(guard: &Path, program: Program) -> Command {
    let mut command = Command::new(guard);
    command.arg("guard").env_clear();
    command.envs(program.environment.iter().map(|(name, value)| (guarded_name(name), value)));
    if let Some(input) = &program.input {
        command.arg("--input").arg(input);
    }
    match &program.folder {
        Folder::Inherited => {}
        Folder::Given(folder) => {
            command.current_dir(folder);
        }
        Folder::Scratch(folder) => {
            command.arg("--scratch").arg(folder).current_dir("/");
        }
    }
    command.arg("--").args(program.argv);
    command
}

fn bare_command(program: Program) -> io::Result<Command> {
    let (name, arguments) = program.argv.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let mut command = Command::new(name);
    command.args(arguments).env_clear().envs(program.environment).stdin(Stdio::null());
    match program.folder {
        Folder::Inherited => {}
        Folder::Given(folder) => {
            command.current_dir(folder);
        }
        Folder::Scratch(folder) => {
            folder::create(&folder)?;
            command.current_dir(folder);
        }
    }
    Ok(command)
}

/// Connects the standard input of a guard. Returns the other end.
fn connect_stdin(command: &mut Command) -> io::Result<UnixStream> {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    command.stdin(Stdio::from(OwnedFd::from(theirs)));
    UnixStream::from_std(ours)
}

async fn watch_guard(
    mut guard: Child,
    known: KnownChild,
    socket: UnixStream,
    mut commands: mpsc::UnboundedReceiver<ControlCommand>,
) -> ProcessEnd {
    let (mut reader, writer) = socket.into_split();
    pass_commands(&mut guard, writer, &mut commands).await;
    let end = read_report(&mut reader).await;
    drop(known);
    if end.is_none() {
        let _ = tokio::task::spawn_blocking(kill_orphans).await;
    }
    end.unwrap_or(ProcessEnd::GuardLost)
}

/// Passes commands to a guard until it has ended.
async fn pass_commands(
    guard: &mut Child,
    mut writer: OwnedWriteHalf,
    commands: &mut mpsc::UnboundedReceiver<ControlCommand>,
) {
    loop {
        tokio::select! {
            _ = guard.wait() => return,
            command = commands.recv() => match command {
                Some(ControlCommand::Terminate) => {
                    let _ = writer.write_all(format!("{TERMINATE}\n").as_bytes()).await;
                }
                Some(ControlCommand::Kill) | None => break,
            }
        }
    }
    // At the end of its input, the guard kills its program.
    drop(writer);
    if tokio::time::timeout(KILL_LIMIT, guard.wait()).await.is_err() {
        let _ = guard.kill().await;
    }
}

async fn read_report(reader: &mut OwnedReadHalf) -> Option<ProcessEnd> {
    let mut text = Vec::new();
    let mut reader = reader.take(MAX_REPORT_BYTES);
    tokio::time::timeout(REPORT_LIMIT, reader.read_to_end(&mut text)).await.ok()?.ok()?;
    serde_json::from_slice(&text).ok()
}

/// Watches a program without a guard.
async fn watch_bare(mut child: Child, mut commands: mpsc::UnboundedReceiver<ControlCommand>) -> ProcessEnd {
    let group = child.id().and_then(children::pid);
    let signal = |signal| group.map(|group| kill_process_group(group, signal));
    let status = loop {
        tokio::select! {
            status = child.wait() => break status,
            command = commands.recv() => match command {
                Some(ControlCommand::Terminate) => {
                    signal(Signal::TERM);
                }
                Some(ControlCommand::Kill) | None => {
                    signal(Signal::KILL);
                    break child.wait().await;
                }
            }
        }
    };
    // The rest of its process group ends with it.
    signal(Signal::KILL);
    status.map_or_else(|error| ProcessEnd::NotStarted(error.to_string()), ProcessEnd::from)
}
