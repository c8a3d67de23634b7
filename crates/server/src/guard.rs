//! `faena guard -- COMMAND…`: runs a command as the leader of a process group, and kills the whole group when whoever started
//! the guard is gone.
//!
//! The starter holds the other end of the guard's standard input. The kernel closes it however the starter ends, also by
//! `kill -9`; that is the guard's signal. The line `term` asks it to pass SIGTERM on.

use std::process::Stdio;

use process_wrap::tokio::{CommandWrap, ProcessGroup};
use tokio::io::{AsyncBufReadExt, BufReader};

/// What a shell answers when it cannot start a command.
const CANNOT_START: i32 = 127;
const KILLED: i32 = 137;
const SIGTERM: i32 = 15;

/// Does not come back: reading standard input cannot be given up in the middle.
pub async fn run(argv: Vec<String>) -> ! {
    std::process::exit(guard(argv).await)
}

async fn guard(argv: Vec<String>) -> i32 {
    let Some((program, arguments)) = argv.split_first() else { return CANNOT_START };
    let mut wrap = CommandWrap::with_new(program, |inner| {
        inner.args(arguments).stdin(Stdio::null());
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
    // The leader may be gone; whoever of its group is left goes too.
    let _ = child.start_kill();
    code
}
