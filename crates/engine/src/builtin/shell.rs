//! `shell.run`: a program with its arguments, when the operator allows it. Never a line for a shell to interpret.
//!
//! The program is the leader of its own process group; whatever ends the job early (cancel, timeout, a stopping server)
//! kills the group. A guard between the two does so even when this server is killed.

use std::{collections::BTreeMap, process::Stdio, time::Duration};

use faena_domain::Failure;
use process_wrap::tokio::{ChildWrapper, CommandWrap, ProcessGroup};
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncRead, AsyncReadExt},
    process::ChildStdin,
};

use super::{Context, run::payload};
use crate::EngineConfig;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Command {
    argv: Vec<String>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    #[serde(default)]
    cwd: Option<String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Output {
    exit_code: Option<i32>,
    stdout: String,
    stderr: String,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    truncated: bool,
}

/// Kills the whole group when it is dropped before its end.
struct Group {
    child: Box<dyn ChildWrapper>,
    /// The guard's standard input; not left with the child, which would close it to wait.
    guard: Option<ChildStdin>,
}

impl Group {
    fn kill(&mut self) {
        match self.guard.take() {
            // The guard hears that nobody is left, and kills what it has started.
            Some(line) => drop(line),
            // Fails when all have ended, and that is well.
            None => {
                let _ = self.child.start_kill();
            }
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.kill();
    }
}

/// What the guard answers when it cannot start a program.
const CANNOT_START: i32 = 127;

/// How long the outputs of a program are listened to after its end, when somebody still holds them open.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Of the server's own environment only this is handed on: the rest may hold secrets.
pub const INHERITED: [&str; 5] = ["PATH", "HOME", "LANG", "TZ", "TMPDIR"];

pub async fn run(context: &Context<'_>, config: &EngineConfig) -> Result<Option<String>, Failure> {
    if !config.shell_allowed {
        return Err(Failure::fatal(
            "shell.run is not allowed here; the operator can allow it with worker.shell = true (FAENA_WORKER_SHELL=true)",
        ));
    }
    let command: Command = payload(context)?;
    let Some(program) = command.argv.first() else {
        return Err(Failure::fatal("the payload is not valid: argv must name a program"));
    };
    let guarded = !config.guard.is_empty();
    let line: Vec<&String> = config.guard.iter().chain(&command.argv).collect();
    let mut wrap = CommandWrap::with_new(line[0], |inner| {
        inner
            .args(&line[1..])
            .stdin(if guarded { Stdio::piped() } else { Stdio::null() })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .env_clear();
        inner.envs(INHERITED.iter().filter_map(|name| Some((*name, std::env::var_os(name)?))));
        inner.env("FAENA_JOB_ID", context.id().to_string());
        inner.env("FAENA_RUN", context.run().to_string());
        inner.env("FAENA_CORRELATION_ID", context.correlation_id());
        inner.envs(&command.env);
        if let Some(cwd) = &command.cwd {
            inner.current_dir(cwd);
        }
    });
    wrap.wrap(ProcessGroup::leader());
    let mut child = wrap.spawn().map_err(|e| Failure::fatal(format!("cannot start {program}: {e}")))?;
    let guard = child.stdin().take();
    let mut group = Group { child, guard };
    let (mut stdout, mut stderr) = (Captured::new(config), Captured::new(config));
    let (out, err) = (group.child.stdout().take(), group.child.stderr().take());
    let status = {
        let capture = async { tokio::join!(stdout.add(out), stderr.add(err)) };
        tokio::pin!(capture);
        let status = tokio::select! {
            _ = &mut capture => group.child.wait().await,
            status = group.child.wait() => {
                // It has ended and left children behind that hold its outputs. They end with it; one that has made off to a
                // group of its own is not waited for.
                group.kill();
                let _ = tokio::time::timeout(LAST_WORDS, capture).await;
                status
            }
        };
        status.map_err(|e| Failure::error(format!("lost sight of {program}: {e}")))?
    };
    let output = Output {
        exit_code: status.code(),
        truncated: stdout.truncated || stderr.truncated,
        stdout: stdout.text(),
        stderr: stderr.text(),
    };
    if status.success() {
        return Ok(Some(serde_json::to_string(&output).expect("an output is JSON")));
    }
    if guarded && status.code() == Some(CANNOT_START) && output.stderr.starts_with("cannot start ") {
        return Err(Failure::fatal(output.stderr.trim()));
    }
    let tail: String = output.stderr.chars().rev().take(500).collect::<Vec<_>>().into_iter().rev().collect();
    Err(Failure::error(format!("{program}: {status}: {}", tail.trim())))
}

/// The first `limit` bytes of an output; the rest is read and thrown away, so that the program is not held up.
struct Captured {
    limit: usize,
    kept: Vec<u8>,
    truncated: bool,
}

impl Captured {
    fn new(config: &EngineConfig) -> Captured {
        Captured { limit: config.shell_output_bytes, kept: Vec::new(), truncated: false }
    }

    async fn add(&mut self, from: Option<impl AsyncRead + Unpin>) {
        let Some(mut from) = from else { return };
        let mut buffer = vec![0; 8 << 10];
        while let Ok(count) = from.read(&mut buffer).await {
            if count == 0 {
                break;
            }
            let room = self.limit.saturating_sub(self.kept.len());
            self.kept.extend_from_slice(&buffer[..count.min(room)]);
            self.truncated |= count > room;
        }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.kept).into_owned()
    }
}
