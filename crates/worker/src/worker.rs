//! A worker as a program sees it: its settings, its handlers, and running it.

use std::{
    future::Future,
    sync::{Arc, OnceLock},
    time::Duration,
};

use futures_util::FutureExt;
use serde::{Serialize, de::DeserializeOwned};
use tokio::runtime::{Handle, Runtime};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use crate::{
    Context, Error, JobError,
    address::Address,
    definition::Definition,
    handler::{Handlers, Next, Outcome, typed},
    link,
};

const DEFAULT_CONCURRENCY: u32 = 8;
const DEFAULT_GRACE: Duration = Duration::from_secs(30);

/// Takes jobs from a server and does them.
///
/// What is not said is read from the environment: `FAENA_URL`, `FAENA_WORKER_TOKEN` (or `FAENA_TOKEN`), and, when Faena itself
/// has started the process, `FAENA_WORKER_ID` and `FAENA_EPHEMERAL`.
#[derive(Clone)]
#[must_use = "a worker does nothing until it is run"]
pub struct Worker {
    url: Option<String>,
    token: Option<String>,
    worker_id: Option<String>,
    name: Option<String>,
    concurrency: u32,
    queues: Vec<String>,
    handlers: Handlers,
    grace: Duration,
    ephemeral: bool,
}

impl Default for Worker {
    fn default() -> Worker {
        Worker::new()
    }
}

impl Worker {
    pub fn new() -> Worker {
        Worker {
            url: None,
            token: env("FAENA_WORKER_TOKEN").or_else(|| env("FAENA_TOKEN")),
            worker_id: env("FAENA_WORKER_ID"),
            name: None,
            concurrency: DEFAULT_CONCURRENCY,
            queues: Vec::new(),
            handlers: Handlers::default(),
            grace: DEFAULT_GRACE,
            ephemeral: env("FAENA_EPHEMERAL").is_some_and(|value| value == "1"),
        }
    }

    /// Where the server is: `http://host:port`.
    pub fn url(mut self, url: impl Into<String>) -> Self {
        self.url = Some(url.into());
        self
    }

    pub fn token(mut self, token: impl Into<String>) -> Self {
        self.token = Some(token.into());
        self
    }

    /// What it is called where people look at workers.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// How many jobs it does at once; 8 when nothing is said.
    pub fn concurrency(mut self, jobs: u32) -> Self {
        self.concurrency = jobs.max(1);
        self
    }

    /// Only jobs of these queues. Without it, of all.
    pub fn queues<T: Into<String>>(mut self, queues: impl IntoIterator<Item = T>) -> Self {
        self.queues = queues.into_iter().map(Into::into).collect();
        self
    }

    /// How long handlers may go on when the worker is told to stop; 30 s when nothing is said.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Takes one job, does it, and ends.
    pub fn ephemeral(mut self) -> Self {
        self.ephemeral = true;
        self
    }

    /// What is done with jobs of this type. The payload is read as `P`; one that does not fit fails without another try. The
    /// result is what the job's result becomes. Use `serde_json::Value` for either to take what comes.
    ///
    /// `kind` may end in `*`, for all types that begin so; the handler with the longest name that fits is taken.
    ///
    /// A panic is a failure like others, and is tried again.
    pub fn handle<P, R, F, Fut>(mut self, kind: impl Into<String>, handler: F) -> Self
    where
        P: DeserializeOwned + Send + 'static,
        R: Serialize,
        F: Fn(Context, P) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<R, JobError>> + Send + 'static,
    {
        self.handlers.add(kind.into(), typed(handler));
        self
    }

    /// Stands around every handler: sees the job before it and the outcome after it, and may change that. What was added
    /// first is outermost.
    ///
    /// ```no_run
    /// # let worker = faena::Worker::new();
    /// worker.around(|job, next| async move {
    ///     let started = std::time::Instant::now();
    ///     let outcome = next.run(job.clone()).await;
    ///     tracing::info!(job = %job.id(), kind = job.kind(), took = ?started.elapsed(), ok = outcome.is_ok());
    ///     outcome.map_err(|error| error.context("on machine 7"))
    /// });
    /// ```
    pub fn around<F, Fut>(mut self, around: F) -> Self
    where
        F: Fn(Context, Next) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Outcome> + Send + 'static,
    {
        self.handlers.add_around(around);
        self
    }

    /// Works until SIGTERM or Ctrl-C, or until the server has drained it.
    pub async fn run(self) -> Result<(), Error> {
        let signals = signals().map_err(|error| Error::Invalid(format!("cannot listen for signals: {error}")))?;
        self.run_until(signals).await
    }

    /// Works until `shutdown` is ready. Then it takes no more jobs, lets those that run finish within the grace time, gives
    /// back the rest, which costs them no try, and returns when the server has acknowledged all of it.
    ///
    /// A connection that is lost is made again, for as long as it takes; running jobs go on meanwhile. An error is returned
    /// only when the worker could never work: its settings are wrong, or the server refused its first registration.
    pub async fn run_until(self, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
        let (definition, stop) = (self.define()?, CancellationToken::new());
        let connection = link::run(definition, stop.clone().cancelled_owned().fuse());
        // Who gives up waiting for this ends the connection with it.
        let mut connection = AbortOnDropHandle::new(connections()?.spawn(connection));
        let ended = tokio::select! {
            () = shutdown => {
                stop.cancel();
                connection.await
            }
            ended = &mut connection => ended,
        };
        ended.unwrap_or_else(|error| match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => Ok(()),
        })
    }

    pub(crate) fn handlers(&self) -> Arc<Handlers> {
        Arc::new(self.handlers.clone())
    }

    fn define(self) -> Result<Definition, Error> {
        if self.handlers.names().is_empty() {
            return Err(Error::Invalid("a worker without handlers has nothing to do".into()));
        }
        Ok(Definition {
            address: Address::new(self.url, self.token)?,
            worker_id: self.worker_id.unwrap_or_else(|| uuid::Uuid::now_v7().to_string()),
            name: self.name,
            concurrency: if self.ephemeral { 1 } else { self.concurrency },
            queues: self.queues,
            handlers: Arc::new(self.handlers),
            grace: self.grace,
            ephemeral: self.ephemeral,
            handlers_on: Handle::current(),
        })
    }
}

/// One thread for the connections of all workers of this process.
fn connections() -> Result<&'static Runtime, Error> {
    static CONNECTIONS: OnceLock<std::io::Result<Runtime>> = OnceLock::new();
    let made = CONNECTIONS.get_or_init(|| {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(1).thread_name("faena-connections").enable_all().build()
    });
    made.as_ref().map_err(|error| Error::Invalid(format!("cannot start a thread for the connection: {error}")))
}

fn env(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

#[cfg(unix)]
fn signals() -> std::io::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

#[cfg(not(unix))]
fn signals() -> std::io::Result<impl Future<Output = ()>> {
    Ok(async {
        let _ = tokio::signal::ctrl_c().await;
    })
}
