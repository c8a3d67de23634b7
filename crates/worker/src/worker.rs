//! A worker: its settings, its handlers, and running it.

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
    connection,
    handler::{HandlerResult, Handlers, Next, typed},
    settings::Settings,
};

const DEFAULT_CONCURRENCY: u32 = 8;
const DEFAULT_GRACE_PERIOD: Duration = Duration::from_secs(30);

/// Receives jobs from a server and runs their handlers.
///
/// Settings that are not set come from the environment: `FAENA_URL`, and `FAENA_WORKER_TOKEN` or `FAENA_TOKEN`. A worker pool of
/// the server also sets `FAENA_WORKER_ID`, `FAENA_SESSION_TOKEN` and `FAENA_EPHEMERAL` for the processes it starts.
///
/// ```no_run
/// # async fn example() -> Result<(), faena::Error> {
/// #[derive(serde::Deserialize)]
/// struct Numbers { a: i64, b: i64 }
///
/// faena::Worker::new()
///     .name("adder")
///     .handle("add", |_job, numbers: Numbers| async move { Ok(numbers.a + numbers.b) })
///     .run()
///     .await
/// # }
/// ```
#[derive(Clone)]
#[must_use = "a worker does nothing until it is run"]
pub struct Worker {
    url: Option<String>,
    token: Option<String>,
    worker_id: Option<String>,
    session_token: Option<String>,
    name: Option<String>,
    version: Option<String>,
    concurrency: u32,
    queues: Vec<String>,
    handlers: Handlers,
    grace_period: Duration,
    ephemeral: bool,
}

impl Default for Worker {
    fn default() -> Worker {
        Worker::new()
    }
}

impl Worker {
    /// Creates a worker without handlers, with the settings of the environment.
    pub fn new() -> Worker {
        Worker {
            url: None,
            token: env("FAENA_WORKER_TOKEN").or_else(|| env("FAENA_TOKEN")),
            worker_id: env("FAENA_WORKER_ID"),
            session_token: env("FAENA_SESSION_TOKEN"),
            name: None,
            version: None,
            concurrency: DEFAULT_CONCURRENCY,
            queues: Vec::new(),
            handlers: Handlers::default(),
            grace_period: DEFAULT_GRACE_PERIOD,
            ephemeral: env("FAENA_EPHEMERAL").is_some_and(|value| value == "1"),
        }
    }

    /// Sets the address of the server. Default: `FAENA_URL`, or `http://127.0.0.1:3000`.
    pub fn url(mut self, url: impl Into<String>) -> Self {
        self.url = Some(url.into());
        self
    }

    /// Sets the API key. Default: `FAENA_WORKER_TOKEN`, or `FAENA_TOKEN`.
    pub fn token(mut self, token: impl Into<String>) -> Self {
        self.token = Some(token.into());
        self
    }

    /// Sets the name that people see.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Sets the version of your program, 1 to 100 characters, so that operators see which workers still run an old one. Default: none.
    ///
    /// ```
    /// let worker = faena::Worker::new().version(env!("CARGO_PKG_VERSION"));
    /// ```
    pub fn version(mut self, version: impl Into<String>) -> Self {
        self.version = Some(version.into());
        self
    }

    /// Sets how many jobs run concurrently. Default: 8. At least 1.
    pub fn concurrency(mut self, jobs: u32) -> Self {
        self.concurrency = jobs.max(1);
        self
    }

    /// Sets the queues to take jobs from. Default: all.
    pub fn queues<T: Into<String>>(mut self, queues: impl IntoIterator<Item = T>) -> Self {
        self.queues = queues.into_iter().map(Into::into).collect();
        self
    }

    /// Sets how long running handlers may continue after a shutdown was requested. Default: 30 s.
    pub fn grace_period(mut self, limit: Duration) -> Self {
        self.grace_period = limit;
        self
    }

    /// Makes the worker run one job and then end.
    pub fn ephemeral(mut self) -> Self {
        self.ephemeral = true;
        self
    }

    /// Sets the handler of a job type.
    ///
    /// The payload is read as `P`; a payload that does not match fails the job without a retry. The returned value becomes the
    /// result of the job. Use `serde_json::Value` for either to accept any JSON.
    ///
    /// `kind` may end in `*` to handle all types with that prefix. The handler with the longest matching name is chosen.
    ///
    /// A panic counts as a retryable error.
    ///
    /// ```
    /// # use faena::{Context, JobError};
    /// async fn resize(job: Context, payload: serde_json::Value) -> Result<String, JobError> {
    ///     job.log(format!("{} of type {}", payload["file"], job.kind()));
    ///     Ok("done".into())
    /// }
    /// let worker = faena::Worker::new().handle("image.*", resize);
    /// ```
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

    /// Adds a middleware around every handler. It sees the job before and the outcome after the handler, and may change both.
    ///
    /// The first one added is the outermost.
    ///
    /// ```no_run
    /// # let worker = faena::Worker::new();
    /// worker.middleware(|job, next| async move {
    ///     let started = std::time::Instant::now();
    ///     let outcome = next.run(job.clone()).await;
    ///     tracing::info!(job = %job.id(), job_type = job.kind(), took = ?started.elapsed(), ok = outcome.is_ok());
    ///     outcome.map_err(|error| error.context("on machine 7"))
    /// });
    /// ```
    pub fn middleware<F, Fut>(mut self, middleware: F) -> Self
    where
        F: Fn(Context, Next) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = HandlerResult> + Send + 'static,
    {
        self.handlers.add_middleware(middleware);
        self
    }

    /// Runs until SIGTERM or Ctrl-C, or until the server has drained the worker.
    ///
    /// # Errors
    ///
    /// As [`run_until`](Self::run_until).
    pub async fn run(self) -> Result<(), Error> {
        let signals = signals().map_err(|error| Error::Invalid(format!("cannot listen for signals: {error}")))?;
        self.run_until(signals).await
    }

    /// Runs until `shutdown` is ready, or until the server has drained the worker.
    ///
    /// Then the worker accepts no more jobs, lets running handlers finish within the
    /// [grace period](Self::grace_period), releases the remaining jobs without using one of their attempts, and returns when the server
    /// has acknowledged all of it.
    ///
    /// After a lost connection, the worker tries to reconnect until it succeeds. Running handlers continue meanwhile.
    ///
    /// # Errors
    ///
    /// Returns an error only if the worker could never work: its settings are not valid, or the server rejected its first
    /// registration.
    pub async fn run_until(self, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
        let (settings, stop) = (self.settings()?, CancellationToken::new());
        let connection = connection::run(settings, stop.clone().cancelled_owned().fuse());
        // Dropping this future ends the connection.
        let mut connection = AbortOnDropHandle::new(connection_runtime()?.spawn(connection));
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

    fn settings(self) -> Result<Settings, Error> {
        if self.handlers.names().is_empty() {
            return Err(Error::Invalid("the worker has no handlers; add one with Worker::handle".into()));
        }
        Ok(Settings {
            address: Address::new(self.url, self.token)?,
            worker_id: self.worker_id.unwrap_or_else(|| uuid::Uuid::now_v7().to_string()),
            session_token: self.session_token,
            name: self.name,
            version: self.version,
            concurrency: if self.ephemeral { 1 } else { self.concurrency },
            queues: self.queues,
            handlers: Arc::new(self.handlers),
            grace_period: self.grace_period,
            ephemeral: self.ephemeral,
            handler_runtime: Handle::current(),
        })
    }
}

/// Returns the runtime of the connections: one thread for all workers of this process.
fn connection_runtime() -> Result<&'static Runtime, Error> {
    static RUNTIME: OnceLock<std::io::Result<Runtime>> = OnceLock::new();
    let runtime = RUNTIME.get_or_init(|| {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(1).thread_name("faena-connections").enable_all().build()
    });
    runtime.as_ref().map_err(|error| Error::Invalid(format!("cannot start the connection thread: {error}")))
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
