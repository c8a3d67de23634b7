//! The job type `shell.run`: a program with its arguments, if the operator allows it. No shell interprets them.
//!
//! The program leads its own process group. A cancel, a timeout or a stopping server kills the group. A guard process
//! between this server and the program does so even if this server is killed.

use std::{collections::BTreeMap, process::Stdio, time::Duration};

use faena_domain::Failure;
use process_wrap::tokio::{ChildWrapper, CommandWrap, ProcessGroup};
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncRead, AsyncReadExt},
    process::ChildStdin,
};

use super::{Context, run::payload};
use crate::{EngineConfig, process_end::ProcessEnd};

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

/// A process group. Dropping it kills the group.
struct Group {
    child: Box<dyn ChildWrapper>,
    /// The guard's standard input. Taken from the child, which would close it before waiting.
    guard: Option<ChildStdin>,
}

impl Group {
    fn kill(&mut self) {
        match self.guard.take() {
            // The end of its input makes the guard kill what it has started.
            Some(input) => drop(input),
            // An error means that the processes have ended already.
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

/// Exit code of the guard if it cannot start a program.
const CANNOT_START: i32 = 127;

/// How long to read the outputs after the end of a program while its children keep them open.
const OUTPUT_TIMEOUT: Duration = Duration::from_millis(500);

/// Variables of the server's environment that are passed on. The others may contain secrets.
pub const INHERITED: [&str; 5] = ["PATH", "HOME", "LANG", "TZ", "TMPDIR"];

pub async fn run(context: &Context<'_>, config: &EngineConfig) -> Result<Option<String>, Failure> {
    if !config.is_shell_allowed {
        return Err(Failure::fatal(
            "shell.run is not allowed; the operator can allow it with worker.shell = true (FAENA_WORKER_SHELL=true)",
        ));
    }
    let command: Command = payload(context, r#"{"argv": ["ls", "-l"], "env": {"LANG": "C"}, "cwd": "/tmp"}"#)?;
    let Some(program) = command.argv.first() else {
        return Err(Failure::fatal("the payload is not valid: argv must name a program"));
    };
    let guarded = !config.guard_command.is_empty();
    let argv: Vec<&String> = config.guard_command.iter().chain(&command.argv).collect();
    let mut wrap = CommandWrap::with_new(argv[0], |inner| {
        inner
            .args(&argv[1..])
            .stdin(if guarded { Stdio::piped() } else { Stdio::null() })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .env_clear();
        inner.envs(INHERITED.iter().filter_map(|name| Some((*name, std::env::var_os(name)?))));
        inner.env("FAENA_JOB_ID", context.id().to_string());
        inner.env("FAENA_RUN", context.run().to_string());
        inner.env("FAENA_CORRELATION_ID", context.correlation_id());
        if let Some(traceparent) = context.traceparent() {
            // The name that the tools of OpenTelemetry read.
            inner.env("TRACEPARENT", traceparent);
        }
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
                // It has ended, but its children keep its outputs open. They are killed; a child in a group of its own is
                // not waited for.
                group.kill();
                let _ = tokio::time::timeout(OUTPUT_TIMEOUT, capture).await;
                status
            }
        };
        status.map_err(|e| Failure::error(format!("cannot wait for {program}: {e}")))?
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
    let ending = format!("{program} {}", ProcessEnd::from(status));
    let tail = tail.trim();
    Err(Failure::error(if tail.is_empty() { ending } else { format!("{ending}: {tail}") }))
}

/// The first `limit` bytes of an output. The rest is read and discarded, so that the program is not blocked.
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
