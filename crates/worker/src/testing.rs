//! Runs a handler without a server.
//!
//! ```
//! # use faena::{Worker, testing};
//! # #[tokio::main(flavor = "current_thread")] async fn main() {
//! let worker = Worker::new().handle("double", |job, number: i64| async move {
//!     job.log("doubling");
//!     job.step("multiply", || async { Ok(number * 2) }).await
//! });
//! let run = testing::run(&worker, "double", &21).await;
//! assert_eq!(run.result::<i64>(), 42);
//! assert_eq!(run.step_names(), ["multiply"]);
//! assert_eq!(run.logs, ["doubling"]);
//! # }
//! ```

use std::{borrow::Cow, time::Duration};

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::value::{RawValue, to_raw_value};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{
    Context, ErrorCode, JobError, Progress, Timestamp, Worker,
    context::{HandlerMessage, StepRejection},
    executor,
    frames::{JobFrame, StepFrame},
    handler::HandlerResult,
};

/// Updates are dropped while this many are waiting.
const MAX_MESSAGES: usize = 10_000;
const TIME_LEFT: Duration = Duration::from_secs(3_600);

/// Runs the handler that `worker` has for `kind`.
pub async fn run(worker: &Worker, kind: &str, payload: &impl Serialize) -> TestRun {
    TestJob::new(kind, payload).run(worker).await
}

/// A job for a test. Unlike [`run`], it can also set earlier attempts and completed steps.
///
/// ```
/// # use faena::{Worker, testing::TestJob};
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// let worker = Worker::new().handle("greet", |job, (): ()| async move {
///     job.step("name", || async { Ok("nobody".to_owned()) }).await
/// });
/// // An earlier run has completed the step, so it does not run again.
/// let run = TestJob::new("greet", &()).completed_step("name", &"Ada").run(&worker).await;
/// assert_eq!(run.result::<String>(), "Ada");
/// # }
/// ```
#[must_use]
pub struct TestJob {
    kind: String,
    payload: Box<RawValue>,
    retry_count: u32,
    completed_steps: Vec<(String, Box<RawValue>)>,
    rejected_step: Option<String>,
    token: CancellationToken,
}

/// What a run of a handler did.
#[derive(Debug)]
#[non_exhaustive]
pub struct TestRun {
    /// How it ended.
    pub outcome: HandlerResult,
    /// The steps that this run completed, with their results, in order. Does not contain those of earlier runs.
    pub steps: Vec<(String, Box<RawValue>)>,
    /// The progress it reported.
    pub progress: Vec<Progress>,
    /// The lines it wrote to the log.
    pub logs: Vec<String>,
    /// The events it wrote to the log, each with its name and message.
    pub events: Vec<(String, String)>,
}

impl TestJob {
    /// Creates a job of this type, in its first attempt, with an hour until its deadline.
    ///
    /// # Panics
    ///
    /// Panics if the payload cannot be written as JSON.
    pub fn new(kind: impl Into<String>, payload: &impl Serialize) -> TestJob {
        TestJob {
            kind: kind.into(),
            payload: raw(payload),
            retry_count: 0,
            completed_steps: Vec::new(),
            rejected_step: None,
            token: CancellationToken::new(),
        }
    }

    /// Sets how many attempts have failed before. The job allows three retries.
    pub fn retry_count(mut self, count: u32) -> Self {
        self.retry_count = count;
        self
    }

    /// Adds a step that an earlier run has completed.
    ///
    /// # Panics
    ///
    /// Panics if the result cannot be written as JSON.
    pub fn completed_step(mut self, name: impl Into<String>, result: &impl Serialize) -> Self {
        self.completed_steps.push((name.into(), raw(result)));
        self
    }

    /// Makes the server reject this step, as if the job had been assigned to another worker.
    pub fn rejected_step(mut self, name: impl Into<String>) -> Self {
        self.rejected_step = Some(name.into());
        self
    }

    /// Returns a token that cancels the run, before or while it runs.
    pub fn token(&self) -> CancellationToken {
        self.token.clone()
    }

    /// Runs the handler that `worker` has for this job.
    pub async fn run(self, worker: &Worker) -> TestRun {
        let (sender, mut messages) = mpsc::channel(MAX_MESSAGES);
        let context = Context::new(self.frame(), sender);
        let stop = context.token().clone();
        let mut work = std::pin::pin!(executor::outcome(context, worker.handlers()));
        let mut recorder = Recorder { rejected_step: self.rejected_step, ..Recorder::default() };
        loop {
            tokio::select! {
                biased;
                Some(message) = messages.recv() => recorder.record(message),
                () = self.token.cancelled(), if !stop.is_cancelled() => stop.cancel(),
                outcome = &mut work => {
                    while let Ok(message) = messages.try_recv() {
                        recorder.record(message);
                    }
                    let Recorder { steps, progress, logs, events, .. } = recorder;
                    return TestRun { outcome, steps, progress, logs, events };
                }
            }
        }
    }

    pub(crate) fn frame(&self) -> JobFrame<'_> {
        let id = Uuid::now_v7();
        let steps = self.completed_steps.iter();
        JobFrame {
            id: id.into(),
            name: Cow::Borrowed(&self.kind),
            kind: Cow::Borrowed(&self.kind),
            queue: Cow::Borrowed("default"),
            payload: &self.payload,
            run: (i64::from(self.retry_count) + 1).into(),
            attempt: self.retry_count + 1,
            retry_count: self.retry_count,
            max_retries: 3,
            correlation_id: Cow::Owned(id.to_string()),
            traceparent: None,
            schedule_id: None,
            schedule_due: None,
            deadline: Timestamp::now() + TIME_LEFT,
            steps: steps.map(|(name, result)| StepFrame { name: Cow::Borrowed(name), result }).collect(),
        }
    }
}

impl TestRun {
    /// Returns the result as a `T`.
    ///
    /// # Panics
    ///
    /// Panics if the run failed or the result is not a `T`.
    #[track_caller]
    pub fn result<T: DeserializeOwned>(&self) -> T {
        match &self.outcome {
            Ok(raw) => serde_json::from_str(raw.get()).expect("the result does not match the expected type"),
            Err(error) => panic!("the run did not complete: {error:?}"),
        }
    }

    /// Returns the error of the run.
    ///
    /// # Panics
    ///
    /// Panics if the run completed.
    #[track_caller]
    pub fn error(&self) -> &JobError {
        match &self.outcome {
            Ok(raw) => panic!("the run completed: {raw}"),
            Err(error) => error,
        }
    }

    /// Returns the names of the steps that this run completed, in order.
    pub fn step_names(&self) -> Vec<&str> {
        self.steps.iter().map(|(name, _)| name.as_str()).collect()
    }
}

#[derive(Default)]
struct Recorder {
    rejected_step: Option<String>,
    steps: Vec<(String, Box<RawValue>)>,
    progress: Vec<Progress>,
    logs: Vec<String>,
    events: Vec<(String, String)>,
}

impl Recorder {
    /// Records what the server would receive.
    fn record(&mut self, message: HandlerMessage) {
        match message {
            HandlerMessage::Update { frame } => {
                let frame = read(&frame);
                self.progress.extend(frame.progress);
                match (frame.event, frame.message) {
                    (Some(event), Some(message)) => self.events.push((event, message)),
                    (_, message) => self.logs.extend(message),
                }
            }
            HandlerMessage::Step { frame, waiter, .. } => {
                let frame = read(&frame);
                let name = frame.name.unwrap_or_default();
                let answer = if self.rejected_step.as_ref() == Some(&name) {
                    let message = "the job was assigned to another worker".into();
                    Err(StepRejection { code: ErrorCode::StaleRun, message })
                } else {
                    self.steps.extend(frame.result.map(|result| (name, result)));
                    Ok(())
                };
                let _ = waiter.send(answer);
            }
            HandlerMessage::Finished { .. } | HandlerMessage::Completed => {}
        }
    }
}

/// The fields of a worker's frame that end up in a [`TestRun`].
#[derive(Deserialize)]
struct RecordedFrame {
    name: Option<String>,
    progress: Option<Progress>,
    message: Option<String>,
    event: Option<String>,
    result: Option<Box<RawValue>>,
}

fn read(frame: &str) -> RecordedFrame {
    serde_json::from_str(frame).expect("a frame that was just written")
}

fn raw(value: &impl Serialize) -> Box<RawValue> {
    to_raw_value(value).expect("a value of a test can be written as JSON")
}
