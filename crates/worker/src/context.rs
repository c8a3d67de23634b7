//! What a handler is given besides its payload: which run it is, how to tell how far it is, when to stop.

use std::{
    fmt,
    future::Future,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use faena_domain::{JobId, Progress, Run, Timestamp};
use faena_wire::frames::JobFrame;
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
    JobError,
    ledger::{Key, Of},
    outgoing,
};

/// One run of one job, as its handler sees it. Cheap to clone.
#[derive(Clone)]
pub struct Context(Arc<Parts>);

struct Parts {
    key: Key,
    name: String,
    kind: String,
    queue: String,
    payload: Box<RawValue>,
    retry_count: u32,
    max_retries: u32,
    correlation_id: String,
    traceparent: Option<String>,
    schedule_id: Option<String>,
    schedule_due: Option<Timestamp>,
    deadline: Timestamp,
    /// Those of earlier runs, and those that this run has finished.
    steps: Mutex<Vec<(String, Box<RawValue>)>>,
    /// 0: not known.
    total_steps: AtomicU32,
    token: CancellationToken,
    notes: mpsc::Sender<Note>,
    /// Once it has a task of its own.
    task: OnceLock<AbortHandle>,
}

/// What a run tells its session.
pub(crate) enum Note {
    /// Progress or a line of log: nobody waits for it.
    Tell {
        text: Utf8Bytes,
    },
    Step {
        key: Key,
        text: Utf8Bytes,
        waiter: Waiter,
    },
    End {
        key: Key,
        of: Of,
        text: Utf8Bytes,
    },
    /// Ends stand on the shelf of the floor.
    Shelf,
}

/// Who waits for the acknowledgement of a step.
pub(crate) type Waiter = oneshot::Sender<Result<(), Refusal>>;

#[derive(Debug)]
pub(crate) struct Refusal {
    pub code: String,
    pub message: String,
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} run {}", self.kind(), self.id(), self.run())
    }
}

impl Context {
    pub(crate) fn new(job: JobFrame<'_>, notes: mpsc::Sender<Note>) -> Context {
        let steps = job.steps.iter().map(|step| (step.name.as_ref().to_owned(), step.result.to_owned())).collect();
        Context(Arc::new(Parts {
            key: Key { job: job.id, run: job.run },
            name: job.name.into_owned(),
            kind: job.kind.into_owned(),
            queue: job.queue.into_owned(),
            payload: job.payload.to_owned(),
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
            notes,
            task: OnceLock::new(),
        }))
    }

    pub fn id(&self) -> JobId {
        self.0.key.job
    }

    /// The number of this hand-out. It only ever grows: what you write elsewhere under it, a later run may overwrite and an
    /// earlier one must not.
    pub fn run(&self) -> Run {
        self.0.key.run
    }

    pub(crate) fn key(&self) -> Key {
        self.0.key
    }

    pub(crate) fn runs_as(&self, task: AbortHandle) {
        let _ = self.0.task.set(task);
    }

    /// Ends it where it next waits.
    pub(crate) fn abort(&self) {
        if let Some(task) = self.0.task.get() {
            task.abort();
        }
    }

    /// Its type.
    pub fn kind(&self) -> &str {
        &self.0.kind
    }

    pub fn name(&self) -> &str {
        &self.0.name
    }

    pub fn queue(&self) -> &str {
        &self.0.queue
    }

    /// The payload as it came.
    pub fn payload(&self) -> &RawValue {
        &self.0.payload
    }

    /// The payload as a type of yours. One that does not fit is not tried again.
    pub fn payload_as<P: DeserializeOwned>(&self) -> Result<P, JobError> {
        serde_json::from_str(self.0.payload.get())
            .map_err(|error| JobError::fail(format!("the payload does not fit: {error}")))
    }

    /// How many tries have failed before this one.
    pub fn retry_count(&self) -> u32 {
        self.0.retry_count
    }

    pub fn max_retries(&self) -> u32 {
        self.0.max_retries
    }

    /// Whether a failure now is the end of the job.
    pub fn is_last_try(&self) -> bool {
        self.0.retry_count >= self.0.max_retries
    }

    pub fn correlation_id(&self) -> &str {
        &self.0.correlation_id
    }

    pub fn traceparent(&self) -> Option<&str> {
        self.0.traceparent.as_deref()
    }

    /// The schedule that made this job.
    pub fn schedule_id(&self) -> Option<&str> {
        self.0.schedule_id.as_deref()
    }

    /// For which due time of that schedule. It is the same in every run, however late.
    pub fn schedule_due(&self) -> Option<Timestamp> {
        self.0.schedule_due
    }

    /// When it is told to stop, by the server's clock.
    pub fn deadline(&self) -> Timestamp {
        self.0.deadline
    }

    /// How long that is, by the clock of this machine.
    pub fn time_left(&self) -> Duration {
        let ms = self.0.deadline.ms_since(Timestamp::now());
        Duration::from_millis(u64::try_from(ms).unwrap_or(0))
    }

    /// Ends when the run is to stop: it was cancelled, is past its deadline, was given to another worker, or this worker
    /// stops. Nothing is torn down by force; a handler that does not look is left to finish.
    pub async fn cancelled(&self) {
        self.0.token.cancelled().await;
    }

    pub fn is_cancelled(&self) -> bool {
        self.0.token.is_cancelled()
    }

    /// The same as something to hand on.
    pub fn token(&self) -> &CancellationToken {
        &self.0.token
    }

    /// Tells how far the job is. Never waits; when there is too much to tell at once, some of it is lost.
    pub fn progress(&self, progress: Progress) {
        self.tell(outgoing::progress(self.0.key, progress));
    }

    /// Writes a line into the job's log. Never waits, like [`progress`](Self::progress).
    pub fn log(&self, message: impl AsRef<str>) {
        self.tell(outgoing::log(self.0.key, message.as_ref()));
    }

    fn tell(&self, text: Utf8Bytes) {
        if self.0.notes.try_send(Note::Tell { text }).is_err() {
            tracing::debug!(job = %self.id(), "too much to tell at once; something was left out");
        }
    }

    /// How many steps the job has in all, so that its progress shows `4 of 9`.
    pub fn steps_total(&self, total: u32) {
        self.0.total_steps.store(total, Ordering::Relaxed);
    }

    /// Does one step, once.
    ///
    /// When an earlier run of this job has finished the step, its stored result is given and `work` does not run. Otherwise
    /// `work` runs, and its result is stored on the server before this returns. The name is what counts: give each step its
    /// own, and never a new meaning to an old one. `work` may still run twice when a worker dies between its end and its
    /// being stored; make it so that this does no harm.
    ///
    /// An error ends the handler when passed on with `?`: that of `work`, that the run is to stop ([`JobError::cancelled`]),
    /// or that the server refused the step, because the job has been given to another worker.
    pub async fn step<T, F, Fut>(&self, name: &str, work: F) -> Result<T, JobError>
    where
        T: Serialize + DeserializeOwned,
        F: FnOnce() -> Fut,
        Fut: Future<Output = Result<T, JobError>>,
    {
        if let Some(stored) = self.stored(name) {
            return serde_json::from_str(stored.get())
                .map_err(|error| JobError::fail(format!("the stored result of step {name} does not fit: {error}")));
        }
        if self.is_cancelled() {
            return Err(JobError::cancelled());
        }
        let result = work().await?;
        let raw = to_raw_value(&result)
            .map_err(|error| JobError::fail(format!("the result of step {name} cannot be written: {error}")))?;
        self.store(name, &raw).await?;
        self.0.steps.lock().push((name.to_owned(), raw));
        Ok(result)
    }

    fn stored(&self, name: &str) -> Option<Box<RawValue>> {
        self.0.steps.lock().iter().find(|(known, _)| known == name).map(|(_, result)| result.clone())
    }

    async fn store(&self, name: &str, result: &RawValue) -> Result<(), JobError> {
        let total = Some(self.0.total_steps.load(Ordering::Relaxed)).filter(|total| *total > 0);
        let (waiter, answer) = oneshot::channel();
        let note = Note::Step { key: self.0.key, text: outgoing::step(self.0.key, name, result, total), waiter };
        // Both ends are gone only when the worker has stopped and given the job back.
        self.0.notes.send(note).await.map_err(|_| JobError::cancelled())?;
        match answer.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(refusal)) => {
                Err(JobError::retry(format!("step {name} was refused: {} ({})", refusal.message, refusal.code)))
            }
            Err(_) => Err(JobError::cancelled()),
        }
    }
}
