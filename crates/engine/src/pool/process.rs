//! One process of a pool, started under a guard that ends it when this server ends.

use std::{ffi::OsString, sync::Arc, time::Duration};

use faena_domain::SecretText;
use faena_process::{Folder, ProcessEnd, Program, RunningControl, RunningProgram};
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::{
    PoolConfig,
    output::{OutputLabels, log_lines},
};
use crate::{EngineConfig, builtin::inherited_environment, workers::ConnectedWorker};

/// Handle of a process. Dropping it kills the process with everything that it has started.
pub struct Process {
    /// `None` if it could not be started.
    control: Option<RunningControl>,
    ended: Arc<Mutex<Option<ProcessEnd>>>,
}

/// How long the outputs are read after the end of a process. Only a process that could not be killed keeps them open.
const OUTPUT_TIMEOUT: Duration = Duration::from_millis(500);

impl Process {
    pub fn start(
        pool: &PoolConfig,
        worker: &ConnectedWorker,
        session_token: &SecretText,
        config: &EngineConfig,
        wakeup: Arc<Notify>,
    ) -> std::io::Result<Process> {
        let name = pool.command.first().cloned().unwrap_or_default();
        let program = Program {
            argv: pool.command.iter().map(OsString::from).collect(),
            environment: environment(pool, worker, session_token, config),
            folder: pool.cwd.as_ref().map_or(Folder::Inherited, |cwd| Folder::Given(cwd.into())),
            input: None,
        };
        let RunningProgram { stdout, stderr, control, mut end, .. } =
            faena_process::start(config.guard.as_deref(), program)?;
        let labels = OutputLabels { pool: pool.name.as_str().into(), worker: worker.key.as_str().into() };
        let output = tokio::spawn(async move {
            tokio::join!(log_lines(stdout, "stdout", labels.clone()), log_lines(stderr, "stderr", labels));
        });
        let ended = Arc::new(Mutex::new(None));
        let own_ended = ended.clone();
        tokio::spawn(async move {
            let end = match end.wait().await {
                ProcessEnd::NotStarted(error) => ProcessEnd::NotStarted(format!("{name}: {error}")),
                end => end,
            };
            let abort = output.abort_handle();
            if tokio::time::timeout(OUTPUT_TIMEOUT, output).await.is_err() {
                abort.abort();
            }
            *own_ended.lock() = Some(end);
            wakeup.notify_one();
        });
        Ok(Process { control: Some(control), ended })
    }

    /// Returns the handle of a process that could not be started.
    pub fn not_started(error: &std::io::Error) -> Process {
        let end = ProcessEnd::NotStarted(error.to_string());
        Process { control: None, ended: Arc::new(Mutex::new(Some(end))) }
    }

    /// Returns how it ended, if it has.
    pub fn ended(&self) -> Option<ProcessEnd> {
        self.ended.lock().clone()
    }

    pub fn request_stop(&mut self) {
        self.control.iter().for_each(RunningControl::terminate);
    }

    pub fn kill(&mut self) {
        self.control.iter().for_each(RunningControl::kill);
    }
}

fn environment(
    pool: &PoolConfig,
    worker: &ConnectedWorker,
    session_token: &SecretText,
    config: &EngineConfig,
) -> Vec<(OsString, OsString)> {
    let mut environment = inherited_environment();
    let mut add = |name: &str, value: &str| environment.push((name.into(), value.into()));
    add("FAENA_URL", &config.own_url);
    add("FAENA_TOKEN", &config.pool_token.0);
    add("FAENA_WORKER_ID", &worker.key);
    add("FAENA_SESSION_TOKEN", session_token.reveal());
    add("FAENA_POOL", &pool.name);
    add("FAENA_CAPABILITIES", &pool.capabilities.join(","));
    add("FAENA_QUEUES", &pool.queues.join(","));
    add("FAENA_CONCURRENCY", &pool.concurrency.to_string());
    if pool.ephemeral {
        add("FAENA_EPHEMERAL", "1");
    }
    for (name, value) in &pool.env {
        add(name, value);
    }
    environment
}
