//! The guard: runs one program, and kills everything that the program has started when it ends or when the server ends.
//!
//! Its standard input is a socket whose other end the server holds. The kernel closes it however the server ends, even by
//! `kill -9`. The line `term` makes the guard send SIGTERM to the program; at the end the guard writes how the program ended.

use std::{
    ffi::{OsStr, OsString},
    fs::File,
    io::{self, BufRead, Write},
    os::{
        fd::AsFd,
        unix::{
            ffi::{OsStrExt, OsStringExt},
            process::{CommandExt, ExitStatusExt},
        },
    },
    path::PathBuf,
    process::{Command, ExitStatus, Stdio},
};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, kill_process_group, wait};

use crate::{ProcessEnd, children, folder, protection::restrict_guard};

/// Prefix of the program's variables in the environment of its guard, where they have no effect.
pub(crate) const VARIABLE_PREFIX: &str = "FAENA_GUARDED_";
/// Line that asks for SIGTERM.
pub(crate) const TERMINATE: &str = "term";

#[derive(Debug, Default)]
pub struct GuardOptions {
    /// Becomes the standard input of the program, which otherwise has none.
    pub input: Option<PathBuf>,
    /// Folder to create, to run the program in, and to remove at the end.
    pub scratch: Option<PathBuf>,
}

/// Runs a program, reports its end, and exits.
pub fn run_guard(argv: &[OsString], options: &GuardOptions) -> ! {
    let end = guard(argv, options);
    if let Some(scratch) = &options.scratch {
        folder::remove(scratch);
    }
    report(&end);
    // Ends the other thread too, whose pending read of standard input cannot be cancelled.
    std::process::exit(0)
}

fn guard(argv: &[OsString], options: &GuardOptions) -> ProcessEnd {
    restrict_guard();
    let process = match start(argv, options) {
        Ok(process) => process,
        Err(error) => return ProcessEnd::NotStarted(error.to_string()),
    };
    std::thread::spawn(move || handle_commands(process));
    let end = wait_for(process);
    children::kill_children(&|_| true, None);
    end
}

fn start(argv: &[OsString], options: &GuardOptions) -> io::Result<Pid> {
    let (program, arguments) = argv.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let mut command = Command::new(program);
    command.args(arguments).process_group(0).env_clear().envs(variables());
    command.stdin(options.input.as_ref().map(File::open).transpose()?.map_or_else(Stdio::null, Stdio::from));
    if let Some(scratch) = &options.scratch {
        folder::create(scratch)?;
        command.current_dir(scratch);
    }
    let child = command.spawn()?;
    Ok(children::pid(child.id()).expect("a child has a process id"))
}

/// Returns the environment of the program.
fn variables() -> impl Iterator<Item = (OsString, OsString)> {
    std::env::vars_os().filter_map(|(name, value)| {
        let name = name.as_bytes().strip_prefix(VARIABLE_PREFIX.as_bytes()).filter(|name| !name.is_empty())?;
        Some((OsString::from_vec(name.to_owned()), value))
    })
}

/// Returns the name of a program's variable in the environment of its guard.
pub(crate) fn guarded_name(name: &OsStr) -> OsString {
    let mut guarded = OsString::from(VARIABLE_PREFIX);
    guarded.push(name);
    guarded
}

/// Executes the commands of the server. Kills the program at the end of the input.
fn handle_commands(process: Pid) {
    for line in io::stdin().lock().lines().map_while(Result::ok) {
        if line == TERMINATE {
            let _ = kill_process_group(process, Signal::TERM);
        }
    }
    // The end of the program makes `guard` kill the rest.
    let _ = kill_process(process, Signal::KILL);
}

/// Waits for the program. Orphans that end meanwhile are removed from the process table.
fn wait_for(process: Pid) -> ProcessEnd {
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((ended, status))) if ended == process => {
                return ExitStatus::from_raw(status.as_raw()).into();
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return ProcessEnd::NotStarted(error.to_string()),
        }
    }
}

fn report(end: &ProcessEnd) {
    let written = || -> io::Result<()> {
        let mut socket = File::from(io::stdin().as_fd().try_clone_to_owned()?);
        socket.write_all(&serde_json::to_vec(end)?)
    };
    // Fails if the server has ended.
    let _ = written();
}
