//! What a handler receives besides its payload: the job and its run, progress, steps and cancellation.

use std::{
    fmt,
    future::Future,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::value::{RawValue, to_raw_value};
use tokio::{
    sync::{mpsc, oneshot},
    task::AbortHandle,
};
use tokio_tungstenite::tungstenite::Utf8Bytes;
use tokio_util::sync::CancellationToken;

use crate::{
    ErrorCode, JobError, JobId, Progress, RunNumber, Timestamp,
    frames::{JobFrame, ReportKind, RunKey},
    outgoing,
};

/// One run of one job, as its handler sees it. Cheap to clone.
#[derive(Clone)]
pub struct Context(Arc<Inner>);

struct Inner {
    key: RunKey,
    name: String,
    kind: String,
    queue: String,
    payload: Box<RawValue>,
    attempt: u32,
    retry_count: u32,
    max_retries: u32,
    correlation_id: String,
    traceparent: Option<String>,
    schedule_id: Option<String>,
    schedule_due: Option<Timestamp>,
    deadline: Timestamp,
    /// The steps that this run or an earlier one has completed.
    steps: Mutex<Vec<(String, Box<RawValue>)>>,
    /// 0 if not known.
    total_steps: AtomicU32,
    token: CancellationToken,
    messages: mpsc::Sender<HandlerMessage>,
    /// Set once the handler has a task of its own.
    task: OnceLock<AbortHandle>,
}

/// A message of a handler to the session.
pub(crate) enum HandlerMessage {
    /// Progress or a log line. Sent once, without an acknowledgement.
    Update { frame: Utf8Bytes },
    /// A completed step. The handler waits for its acknowledgement.
    Step { key: RunKey, frame: Utf8Bytes, waiter: StepAck },
    /// The handler has ended.
    Finished { key: RunKey, kind: ReportKind, frame: Utf8Bytes },
    /// The executor has completed jobs for the session to take.
    Completed,
}

/// Wakes the handler that waits for the acknowledgement of a step.
pub(crate) type StepAck = oneshot::Sender<Result<(), StepRejection>>;

#[derive(Debug)]
pub(crate) struct StepRejection {
    pub code: ErrorCode,
    pub message: String,
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} run {}", self.kind(), self.id(), self.run())
    }
}

impl Context {
    pub(crate) fn new(job: JobFrame<'_>, messages: mpsc::Sender<HandlerMessage>) -> Context {
        let steps = job.steps.iter().map(|step| (step.name.as_ref().to_owned(), step.result.to_owned())).collect();
        Context(Arc::new(Inner {
            key: RunKey { job: job.id, run: job.run },
            name: job.name.into_owned(),
            kind: job.kind.into_owned(),
            queue: job.queue.into_owned(),
            payload: job.payload.to_owned(),
            attempt: job.attempt,
            retry_count: job.retry_count,
            max_retries: job.max_retries,
            correlation_id: job.correlation_id.into_owned(),
            traceparent: job.traceparent.map(|trace| trace.into_owned()),
            schedule_id: job.schedule_id.map(|id| id.into_owned()),
            schedule_due: job.schedule_due,
            deadline: job.deadline,
            steps: Mutex::new(steps),
            total_steps: AtomicU32::new(0),
            token: CancellationToken::new(),
            messages,
            task: OnceLock::new(),
        }))
    }

    /// Returns the id of the job.
    pub fn id(&self) -> JobId {
        self.0.key.job
    }

    /// Returns the number of this run.
    ///
    /// Every later run of the job has a larger number. Store it with what you write elsewhere, and reject writes with a smaller
    /// one: they come from a run that was replaced.
    pub fn run(&self) -> RunNumber {
        self.0.key.run
    }

    pub(crate) fn key(&self) -> RunKey {
        self.0.key
    }

    pub(crate) fn set_task(&self, task: AbortHandle) {
        let _ = self.0.task.set(task);
    }

    /// Aborts the task of the handler at its next await.
    pub(crate) fn abort(&self) {
        if let Some(task) = self.0.task.get() {
            task.abort();
        }
    }

    /// Returns the type of the job.
    pub fn kind(&self) -> &str {
        &self.0.kind
    }

    /// Returns the name of the job; its type if it was given none.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Returns the queue of the job.
    pub fn queue(&self) -> &str {
        &self.0.queue
    }

    /// Returns the payload as it was submitted.
    pub fn payload(&self) -> &RawValue {
        &self.0.payload
    }

    /// Reads the payload as a `P`.
    ///
    /// # Errors
    ///
    /// The error is not retryable: a payload that does not fit never will.
    pub fn payload_as<P: DeserializeOwned>(&self) -> Result<P, JobError> {
        serde_json::from_str(self.0.payload.get())
            .map_err(|error| JobError::fail(format!("payload: does not match the handler: {error}")))
    }

    /// Returns which attempt of the job this run is: 1 for the first.
    ///
    /// A manual retry continues the count. A run that was released does not count, so the next run has the same number.
    pub fn attempt(&self) -> u32 {
        self.0.attempt
    }

    /// Returns how many attempts have failed before this one, since the last manual retry.
    pub fn retry_count(&self) -> u32 {
        self.0.retry_count
    }

    /// Returns how many retries the job may have.
    pub fn max_retries(&self) -> u32 {
        self.0.max_retries
    }

    /// Returns `true` if the job fails permanently when this attempt fails.
    pub fn is_last_attempt(&self) -> bool {
        self.0.retry_count >= self.0.max_retries
    }

    /// Returns the correlation id of the job.
    pub fn correlation_id(&self) -> &str {
        &self.0.correlation_id
    }

    /// Returns the W3C trace context of this run, for spans of the handler and for what it calls.
    pub fn traceparent(&self) -> Option<&str> {
        self.0.traceparent.as_deref()
    }

    /// Returns the id of the schedule that created the job.
    pub fn schedule_id(&self) -> Option<&str> {
        self.0.schedule_id.as_deref()
    }

    /// Returns the due time of the schedule for which the job was created. It is the same in every run, however late.
    pub fn schedule_due(&self) -> Option<Timestamp> {
        self.0.schedule_due
    }

    /// Returns the time at which the run is cancelled, by the clock of the server.
    pub fn deadline(&self) -> Timestamp {
        self.0.deadline
    }

    /// Returns the time until the deadline, by the clock of this machine.
    pub fn time_left(&self) -> Duration {
        self.0.deadline.saturating_duration_since(Timestamp::now())
    }

    /// Waits until the run is cancelled.
    ///
    /// A run is cancelled when the job is cancelled, exceeds its deadline or is assigned to another worker, and when this worker
    /// shuts down. The handler decides how to stop, usually with [`JobError::cancelled`]; a handler that does not check is left
    /// to finish.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use faena::{Context, JobError};
    /// async fn poll_until_ready(job: Context, _: serde_json::Value) -> Result<(), JobError> {
    ///     loop {
    ///         tokio::select! {
    ///             () = tokio::time::sleep(Duration::from_secs(5)) => job.log("still waiting"),
    ///             () = job.cancelled() => return Err(JobError::cancelled()),
    ///         }
    ///     }
    /// }
    /// ```
    pub async fn cancelled(&self) {
        self.0.token.cancelled().await;
    }

    /// Returns `true` if the run is cancelled. See [`cancelled`](Self::cancelled).
    pub fn is_cancelled(&self) -> bool {
        self.0.token.is_cancelled()
    }

    /// Returns the token that is cancelled with the run, to pass it to other code.
    pub fn token(&self) -> &CancellationToken {
        &self.0.token
    }

    /// Reports the progress of the job. Never waits; if too many updates are waiting, some are dropped.
    pub fn progress(&self, progress: Progress) {
        self.update(outgoing::progress(self.0.key, progress));
    }

    /// Writes a line to the log of the job. Never waits, like [`progress`](Self::progress).
    pub fn log(&self, message: impl AsRef<str>) {
        self.update(outgoing::log(self.0.key, None, message.as_ref()));
    }

    /// Writes an entry with an event name of your own to the log of the job, with `message` as its details. Never waits, like
    /// [`progress`](Self::progress).
    ///
    /// The name has 1 to 64 characters of `a-z`, `0-9`, `_` and `.`, and is not the name of a built-in event such as `started`.
    /// The server rejects an entry with any other name, and the worker logs the rejection.
    ///
    /// ```
    /// # use faena::{Context, JobError};
    /// async fn train(job: Context, _: serde_json::Value) -> Result<(), JobError> {
    ///     job.log_event("training_started", "10 epochs");
    ///     Ok(())
    /// }
    /// ```
    pub fn log_event(&self, event: &str, message: impl AsRef<str>) {
        self.update(outgoing::log(self.0.key, Some(event), message.as_ref()));
    }

    fn update(&self, frame: Utf8Bytes) {
        if self.0.messages.try_send(HandlerMessage::Update { frame }).is_err() {
            tracing::debug!(job = %self.id(), "update dropped");
        }
    }

    /// Sets how many steps the job has in total, so that its progress shows `4 of 9`.
    pub fn set_total_steps(&self, total: u32) {
        self.0.total_steps.store(total, Ordering::Relaxed);
    }

    /// Runs a durable step: its result is stored, and later runs of the job reuse it.
    ///
    /// If an earlier run has completed the step, this returns the stored result and `work` does not run. Otherwise `work` runs,
    /// and its result is stored on the server before this returns.
    ///
    /// A step is identified by its name: give each step its own name, and never use an old name for something else. `work` can
    /// still run twice if the worker dies after `work` and before the result is stored; make it idempotent.
    ///
    /// ```
    /// # use faena::{Context, JobError};
    /// async fn order(job: Context, order: serde_json::Value) -> Result<String, JobError> {
    ///     let payment: String = job.step("charge", || async { Ok("payment-1".to_owned()) }).await?;
    ///     job.step("ship", || async { Ok(format!("{} for {payment}", order["item"])) }).await
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// Returns the error of `work`, [`JobError::cancelled`] if the run is cancelled, or an error if the server rejects the step
    /// because the job has been assigned to another worker. Pass all of them on with `?`.
    pub async fn step<T, F, Fut>(&self, name: &str, work: F) -> Result<T, JobError>
    where
        T: Serialize + DeserializeOwned,
        F: FnOnce() -> Fut,
        Fut: Future<Output = Result<T, JobError>>,
    {
        if let Some(stored) = self.stored_step(name) {
            return serde_json::from_str(stored.get()).map_err(|error| {
                JobError::fail(format!("step \"{name}\": the stored result does not match the handler: {error}"))
            });
        }
        if self.is_cancelled() {
            return Err(JobError::cancelled());
        }
        let result = work().await?;
        let raw = to_raw_value(&result).map_err(|error| {
            JobError::fail(format!("step \"{name}\": the result cannot be written as JSON: {error}"))
        })?;
        self.store_step(name, &raw).await?;
        self.0.steps.lock().push((name.to_owned(), raw));
        Ok(result)
    }

    fn stored_step(&self, name: &str) -> Option<Box<RawValue>> {
        self.0.steps.lock().iter().find(|(known, _)| known == name).map(|(_, result)| result.clone())
    }

    async fn store_step(&self, name: &str, result: &RawValue) -> Result<(), JobError> {
        let total = Some(self.0.total_steps.load(Ordering::Relaxed)).filter(|total| *total > 0);
        let (waiter, answer) = oneshot::channel();
        let key = self.0.key;
        let message = HandlerMessage::Step { key, frame: outgoing::step(key, name, result, total), waiter };
        // Both channels are closed only after the worker has stopped and released the job.
        self.0.messages.send(message).await.map_err(|_| JobError::cancelled())?;
        match answer.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(rejection)) => {
                let StepRejection { code, message } = rejection;
                Err(JobError::retry(format!("step \"{name}\": rejected by the server: {message} ({code})")))
            }
            Err(_) => Err(JobError::cancelled()),
        }
    }
}
