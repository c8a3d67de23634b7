//! `faena guard -- COMMAND…`: runs a command in its own process group and kills the group when the parent process ends.
//!
//! The parent holds the other end of the guard's standard input. The kernel closes it however the parent ends, even by
//! `kill -9`. The line `term` on standard input makes the guard send SIGTERM to the command.

use std::{fs::File, path::Path, process::Stdio};

use process_wrap::tokio::{CommandWrap, ProcessGroup};
use tokio::io::{AsyncBufReadExt, BufReader};

/// The exit code of a shell that cannot start a command.
const CANNOT_START: i32 = 127;
const KILLED: i32 = 137;
const SIGTERM: i32 = 15;

/// Runs the command, then exits: a pending read of standard input cannot be cancelled.
pub async fn run(argv: Vec<String>, input: Option<&Path>) -> ! {
    std::process::exit(guard(argv, input).await)
}

/// `input` becomes the standard input of the command, which otherwise has none.
async fn guard(argv: Vec<String>, input: Option<&Path>) -> i32 {
    let Some((program, arguments)) = argv.split_first() else { return CANNOT_START };
    let stdin = match input.map(File::open).transpose() {
        Ok(file) => file.map_or_else(Stdio::null, Stdio::from),
        Err(error) => {
            eprintln!("cannot open the input: {error}");
            return CANNOT_START;
        }
    };
    let mut wrap = CommandWrap::with_new(program, |inner| {
        inner.args(arguments).stdin(stdin);
    });
    wrap.wrap(ProcessGroup::leader());
    let mut child = match wrap.spawn() {
        Ok(child) => child,
        Err(error) => {
            eprintln!("cannot start {program}: {error}");
            return CANNOT_START;
        }
    };
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    let code = loop {
        tokio::select! {
            status = child.wait() => break status.ok().and_then(|status| status.code()).unwrap_or(KILLED),
            line = lines.next_line() => match line {
                Ok(Some(line)) if line == "term" => {
                    let _ = child.signal(SIGTERM);
                }
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => break KILLED,
            }
        }
    };
    // The leader may have exited; this kills the rest of its group.
    let _ = child.start_kill();
    code
}
