//! One process of a pool, under its guard.

use std::{process::Stdio, sync::Arc};

use parking_lot::Mutex;
use process_wrap::tokio::{ChildWrapper, CommandWrap, ProcessGroup};
use tokio::{
    io::AsyncWriteExt,
    sync::{Notify, mpsc},
};

use super::PoolConfig;
use crate::{EngineConfig, builtin::INHERITED, workers::ConnectedWorker};

/// Dropping it kills it.
pub struct Process {
    orders: mpsc::UnboundedSender<Order>,
    ended: Arc<Mutex<Option<String>>>,
}

enum Order {
    Terminate,
    Kill,
}

impl Process {
    pub fn start(
        pool: &PoolConfig,
        worker: &ConnectedWorker,
        config: &EngineConfig,
        nudge: Arc<Notify>,
    ) -> std::io::Result<Process> {
        let mut line: Vec<&str> = config.guard.iter().map(String::as_str).collect();
        line.extend(pool.command.iter().map(String::as_str));
        let (program, arguments) = line.split_first().ok_or_else(|| std::io::Error::other("the command is empty"))?;
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
        let (orders, received) = mpsc::unbounded_channel();
        let ended = Arc::new(Mutex::new(None));
        tokio::spawn(watch(child, received, ended.clone(), nudge, config.guard.is_empty()));
        Ok(Process { orders, ended })
    }

    /// One that could not even be started.
    pub fn stillborn(error: String) -> Process {
        Process { orders: mpsc::unbounded_channel().0, ended: Arc::new(Mutex::new(Some(error))) }
    }

    /// How it ended, if it has.
    pub fn ended(&self) -> Option<String> {
        self.ended.lock().clone()
    }

    pub fn ask_to_stop(&mut self) {
        let _ = self.orders.send(Order::Terminate);
    }

    pub fn kill(&mut self) {
        let _ = self.orders.send(Order::Kill);
    }
}

/// Follows a process to its end. The guard is told by its standard input: a line asks it to pass SIGTERM on, its end to kill.
async fn watch(
    mut child: Box<dyn ChildWrapper>,
    mut orders: mpsc::UnboundedReceiver<Order>,
    ended: Arc<Mutex<Option<String>>>,
    nudge: Arc<Notify>,
    unguarded: bool,
) {
    let mut line = child.stdin().take();
    let status = loop {
        tokio::select! {
            status = child.wait() => break status,
            order = orders.recv() => match order {
                Some(Order::Terminate) => {
                    if unguarded {
                        let _ = child.signal(15);
                    } else if let Some(line) = &mut line {
                        let _ = line.write_all(b"term\n").await;
                    }
                }
                Some(Order::Kill) | None => {
                    drop(line);
                    if unguarded {
                        let _ = child.start_kill();
                    }
                    break child.wait().await;
                }
            }
        }
    };
    // Whoever of its group is left goes with it.
    let _ = child.start_kill();
    *ended.lock() = Some(match status {
        Ok(status) => status.to_string(),
        Err(error) => error.to_string(),
    });
    nudge.notify_one();
}
