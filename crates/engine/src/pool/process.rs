//! One process of a pool, started under a guard that ends it when this server ends.

use std::{process::Stdio, sync::Arc};

use parking_lot::Mutex;
use process_wrap::tokio::{ChildWrapper, CommandWrap, ProcessGroup};
use tokio::{
    io::AsyncWriteExt,
    sync::{Notify, mpsc},
};

use super::PoolConfig;
use crate::{EngineConfig, builtin::INHERITED, workers::ConnectedWorker};

/// Handle of a process. Dropping it kills the process.
pub struct Process {
    commands: mpsc::UnboundedSender<ProcessCommand>,
    ended: Arc<Mutex<Option<String>>>,
}

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
        let mut command: Vec<&str> = config.guard.iter().map(String::as_str).collect();
        command.extend(pool.command.iter().map(String::as_str));
        let (program, arguments) =
            command.split_first().ok_or_else(|| std::io::Error::other("the command is empty"))?;
        let mut wrap = CommandWrap::with_new(program, |inner| {
            inner.args(arguments).stdin(Stdio::piped()).stdout(std::io::stderr()).stderr(std::io::stderr()).env_clear();
            inner.envs(INHERITED.iter().filter_map(|name| Some((*name, std::env::var_os(name)?))));
            inner.env("FAENA_URL", &config.own_url);
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
        let child = wrap.spawn()?;
        let (commands, received) = mpsc::unbounded_channel();
        let ended = Arc::new(Mutex::new(None));
        tokio::spawn(watch(child, received, ended.clone(), wakeup, config.guard.is_empty()));
        Ok(Process { commands, ended })
    }

    /// Returns the handle of a process that could not be started.
    pub fn not_started(error: String) -> Process {
        Process { commands: mpsc::unbounded_channel().0, ended: Arc::new(Mutex::new(Some(error))) }
    }

    /// Returns how it ended, if it has.
    pub fn ended(&self) -> Option<String> {
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
    ended: Arc<Mutex<Option<String>>>,
    wakeup: Arc<Notify>,
    unguarded: bool,
) {
    let mut guard_input = child.stdin().take();
    let status = loop {
        tokio::select! {
            status = child.wait() => break status,
            command = commands.recv() => match command {
                Some(ProcessCommand::Terminate) => {
                    if unguarded {
                        let _ = child.signal(15);
                    } else if let Some(input) = &mut guard_input {
                        let _ = input.write_all(b"term\n").await;
                    }
                }
                Some(ProcessCommand::Kill) | None => {
                    drop(guard_input);
                    if unguarded {
                        let _ = child.start_kill();
                    }
                    break child.wait().await;
                }
            }
        }
    };
    // The rest of its process group ends with it.
    let _ = child.start_kill();
    *ended.lock() = Some(match status {
        Ok(status) => status.to_string(),
        Err(error) => error.to_string(),
    });
    wakeup.notify_one();
}
