//! The job type `shell.run`: a program with its arguments, if the operator allows it. No shell interprets them.
//!
//! The program runs under a guard, in a temporary folder unless the payload names another. A cancellation, a timeout or
//! a stopping server kills it with everything that it has started; the guard does so even if this server is killed.

use std::{collections::BTreeMap, ffi::OsString, path::PathBuf, time::Duration};

use faena_domain::Failure;
use faena_process::{Folder, ProcessEnd, Program, RunningProgram};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt};
use uuid::Uuid;

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

/// How long to read the outputs after the end of a program. Only a process that could not be killed keeps them open.
const OUTPUT_TIMEOUT: Duration = Duration::from_millis(500);

/// Variables of the server's environment that are passed on. The others may contain secrets.
const INHERITED: [&str; 5] = ["PATH", "HOME", "LANG", "TZ", "TMPDIR"];

/// Name of the job type.
pub const KIND: &str = "shell.run";

/// Returns the variables of the server's environment that its programs receive.
pub fn inherited_environment() -> Vec<(OsString, OsString)> {
    INHERITED.iter().filter_map(|name| Some(((*name).into(), std::env::var_os(name)?))).collect()
}

pub async fn run(context: &Context<'_>, config: &EngineConfig) -> Result<Option<String>, Failure> {
    let command: Command = payload(context, r#"{"argv": ["ls", "-l"], "env": {"LANG": "C"}, "cwd": "/tmp"}"#)?;
    let Some(name) = command.argv.first().cloned() else {
        return Err(Failure::fatal("the payload is not valid: argv must name a program"));
    };
    let program = program(context, command)?;
    let not_started = |reason: String| Failure::fatal(format!("cannot start {name}: {reason}"));
    let running =
        faena_process::start(config.guard.as_deref(), program).map_err(|error| not_started(error.to_string()))?;
    let (end, output) = capture(running, config).await;
    if let ProcessEnd::NotStarted(reason) = end {
        return Err(not_started(reason));
    }
    if end.is_success() {
        return Ok(Some(serde_json::to_string(&output).expect("an output is JSON")));
    }
    let tail: String = output.stderr.chars().rev().take(500).collect::<Vec<_>>().into_iter().rev().collect();
    let (ending, tail) = (format!("{name} {end}"), tail.trim());
    Err(Failure::error(if tail.is_empty() { ending } else { format!("{ending}: {tail}") }))
}

fn program(context: &Context<'_>, command: Command) -> Result<Program, Failure> {
    let mut environment = inherited_environment();
    let mut add = |name: &str, value: String| environment.push((name.into(), value.into()));
    add("FAENA_JOB_ID", context.id().to_string());
    add("FAENA_RUN", context.run().to_string());
    add("FAENA_CORRELATION_ID", context.correlation_id());
    if let Some(traceparent) = context.traceparent() {
        // The name that the tools of OpenTelemetry read.
        add("TRACEPARENT", traceparent);
    }
    for (name, value) in command.env {
        add(&name, value);
    }
    let folder = match command.cwd.map(PathBuf::from) {
        Some(folder) if folder.is_absolute() => Folder::Given(folder),
        Some(_) => return Err(Failure::fatal("the payload is not valid: cwd must be an absolute path")),
        // The random part keeps other users of the machine from creating the folder first.
        None => {
            Folder::Scratch(std::env::temp_dir().join(format!("faena-{}-{}", context.id(), Uuid::new_v4().simple())))
        }
    };
    let argv = command.argv.into_iter().map(OsString::from).collect();
    Ok(Program { argv, environment, folder, input: None })
}

/// Reads the outputs of a program until none of its processes is left.
async fn capture(running: RunningProgram, config: &EngineConfig) -> (ProcessEnd, Output) {
    let RunningProgram { stdout: out, stderr: err, control: _killed_on_drop, mut end, .. } = running;
    let (mut stdout, mut stderr) = (Captured::new(config), Captured::new(config));
    let end = {
        let outputs = async { tokio::join!(stdout.add(out), stderr.add(err)) };
        tokio::pin!(outputs);
        tokio::select! {
            _ = &mut outputs => end.wait().await,
            end = end.wait() => {
                let _ = tokio::time::timeout(OUTPUT_TIMEOUT, outputs).await;
                end
            }
        }
    };
    let output = Output {
        exit_code: end.exit_code(),
        truncated: stdout.truncated || stderr.truncated,
        stdout: stdout.text(),
        stderr: stderr.text(),
    };
    (end, output)
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
