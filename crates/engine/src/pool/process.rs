//! One process of a pool, started under a guard that ends it when this server ends.

use std::{process::Stdio, sync::Arc, time::Duration};

use parking_lot::Mutex;
use process_wrap::tokio::{ChildWrapper, CommandWrap, ProcessGroup};
use tokio::{
    io::AsyncWriteExt,
    sync::{Notify, mpsc},
};

use super::{
    PoolConfig,
    output::{OutputLabels, log_lines},
};
use crate::{EngineConfig, builtin::INHERITED, process_end::ProcessEnd, workers::ConnectedWorker};

/// Handle of a process. Dropping it kills the process.
pub struct Process {
    commands: mpsc::UnboundedSender<ProcessCommand>,
    ended: Arc<Mutex<Option<ProcessEnd>>>,
}

/// How long the outputs are read after the end of a process while its children keep them open.
const OUTPUT_TIMEOUT: Duration = Duration::from_millis(500);

enum ProcessCommand {
    Terminate,
    Kill,
}

impl Process {
    pub fn start(
        pool: &PoolConfig,
        worker: &ConnectedWorker,
        config: &EngineConfig,
        wakeup: Arc<Notify>,
    ) -> std::io::Result<Process> {
        let mut command: Vec<&str> = config.guard_command.iter().map(String::as_str).collect();
        command.extend(pool.command.iter().map(String::as_str));
        let (program, arguments) =
            command.split_first().ok_or_else(|| std::io::Error::other("the command is empty"))?;
        let mut wrap = CommandWrap::with_new(program, |inner| {
            inner.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).env_clear();
            inner.envs(INHERITED.iter().filter_map(|name| Some((*name, std::env::var_os(name)?))));
            inner.env("FAENA_URL", &config.own_url);
            inner.env("FAENA_TOKEN", &config.pool_token.0);
            inner.env("FAENA_WORKER_ID", &worker.key);
            inner.env("FAENA_POOL", &pool.name);
            inner.env("FAENA_CAPABILITIES", pool.capabilities.join(","));
            inner.env("FAENA_QUEUES", pool.queues.join(","));
            inner.env("FAENA_CONCURRENCY", pool.concurrency.to_string());
            if pool.ephemeral {
                inner.env("FAENA_EPHEMERAL", "1");
            }
            inner.envs(&pool.env);
            if let Some(cwd) = &pool.cwd {
                inner.current_dir(cwd);
            }
        });
        wrap.wrap(ProcessGroup::leader());
        let mut child = wrap.spawn()?;
        let labels = OutputLabels { pool: pool.name.as_str().into(), worker: worker.key.as_str().into() };
        let (out, err) = (child.stdout().take(), child.stderr().take());
        let output = tokio::spawn(async move {
            tokio::join!(log_lines(out, "stdout", labels.clone()), log_lines(err, "stderr", labels));
        });
        let (commands, received) = mpsc::unbounded_channel();
        let ended = Arc::new(Mutex::new(None));
        let is_unguarded = config.guard_command.is_empty();
        let (own_ended, watched) = (ended.clone(), watch(child, received, is_unguarded));
        tokio::spawn(async move {
            let end = watched.await;
            let abort = output.abort_handle();
            if tokio::time::timeout(OUTPUT_TIMEOUT, output).await.is_err() {
                abort.abort();
            }
            *own_ended.lock() = Some(end);
            wakeup.notify_one();
        });
        Ok(Process { commands, ended })
    }

    /// Returns the handle of a process that could not be started.
    pub fn not_started(error: &std::io::Error) -> Process {
        let end = ProcessEnd::NotStarted(error.to_string());
        Process { commands: mpsc::unbounded_channel().0, ended: Arc::new(Mutex::new(Some(end))) }
    }

    /// Returns how it ended, if it has.
    pub fn ended(&self) -> Option<ProcessEnd> {
        self.ended.lock().clone()
    }

    pub fn request_stop(&mut self) {
        let _ = self.commands.send(ProcessCommand::Terminate);
    }

    pub fn kill(&mut self) {
        let _ = self.commands.send(ProcessCommand::Kill);
    }
}

/// Waits for the end of a process and stops it on request.
///
/// The guard is controlled by its standard input: a line makes it send SIGTERM, the end of the input makes it kill.
async fn watch(
    mut child: Box<dyn ChildWrapper>,
    mut commands: mpsc::UnboundedReceiver<ProcessCommand>,
    is_unguarded: bool,
) -> ProcessEnd {
    let mut guard_input = child.stdin().take();
    let status = loop {
        tokio::select! {
            status = child.wait() => break status,
            command = commands.recv() => match command {
                Some(ProcessCommand::Terminate) => {
                    if is_unguarded {
                        let _ = child.signal(15);
                    } else if let Some(input) = &mut guard_input {
                        let _ = input.write_all(b"term\n").await;
                    }
                }
                Some(ProcessCommand::Kill) | None => {
                    drop(guard_input);
                    if is_unguarded {
                        let _ = child.start_kill();
                    }
                    break child.wait().await;
                }
            }
        }
    };
    // The rest of its process group ends with it.
    let _ = child.start_kill();
    status.map_or_else(|error| ProcessEnd::NotStarted(error.to_string()), ProcessEnd::from)
}
