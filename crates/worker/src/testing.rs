//! Running a handler without a server.
//!
//! ```
//! # use faena::{Worker, testing};
//! # #[tokio::main(flavor = "current_thread")] async fn main() {
//! let worker = Worker::new().handle("double", |job, number: i64| async move {
//!     job.log("doubling");
//!     job.step("E1", || async { Ok(number * 2) }).await
//! });
//! let ran = testing::run(&worker, "double", &21).await;
//! assert_eq!(ran.result::<i64>(), 42);
//! assert_eq!(ran.step_names(), ["E1"]);
//! assert_eq!(ran.logs, ["doubling"]);
//! # }
//! ```

use std::{borrow::Cow, time::Duration};

use faena_domain::{JobId, Progress, Timestamp};
use faena_wire::frames::{JobFrame, StepFrame, WorkerFrame};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::value::{RawValue, to_raw_value};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::{
    Context, JobError, Worker,
    context::{Note, Refusal},
    floor,
    handler::Outcome,
};

/// So much may be told at once.
const MOST_NOTES: usize = 10_000;

/// Runs the handler that this worker has for `kind`.
pub async fn run(worker: &Worker, kind: &str, payload: &impl Serialize) -> Ran {
    TestJob::new(kind, payload).run(worker).await
}

/// A job for a test, when more than its payload matters.
#[must_use]
pub struct TestJob {
    kind: String,
    payload: Box<RawValue>,
    retry_count: u32,
    finished: Vec<(String, Box<RawValue>)>,
    refused: Option<String>,
    token: CancellationToken,
}

/// What a run did.
#[derive(Debug)]
#[non_exhaustive]
pub struct Ran {
    pub outcome: Outcome,
    /// The steps that this run finished, with their results, in order. Those that were finished before are not among them.
    pub steps: Vec<(String, Box<RawValue>)>,
    pub progress: Vec<Progress>,
    pub logs: Vec<String>,
}

impl TestJob {
    pub fn new(kind: impl Into<String>, payload: &impl Serialize) -> TestJob {
        TestJob {
            kind: kind.into(),
            payload: raw(payload),
            retry_count: 0,
            finished: Vec::new(),
            refused: None,
            token: CancellationToken::new(),
        }
    }

    pub fn retry_count(mut self, count: u32) -> Self {
        self.retry_count = count;
        self
    }

    /// An earlier run has finished this step.
    pub fn finished_step(mut self, name: impl Into<String>, result: &impl Serialize) -> Self {
        self.finished.push((name.into(), raw(result)));
        self
    }

    /// The server refuses this step, as if the job had been given to another worker.
    pub fn refused_step(mut self, name: impl Into<String>) -> Self {
        self.refused = Some(name.into());
        self
    }

    /// Cancel this, at any time, and the run is told to stop.
    pub fn token(&self) -> CancellationToken {
        self.token.clone()
    }

    pub async fn run(self, worker: &Worker) -> Ran {
        let (sender, mut notes) = mpsc::channel(MOST_NOTES);
        let context = Context::new(self.frame(), sender);
        let stop = context.token().clone();
        let mut work = std::pin::pin!(floor::outcome(context, worker.handlers()));
        let mut record = Record { refused: self.refused, ..Record::default() };
        loop {
            tokio::select! {
                biased;
                Some(note) = notes.recv() => record.take(note),
                () = self.token.cancelled(), if !stop.is_cancelled() => stop.cancel(),
                outcome = &mut work => {
                    while let Ok(note) = notes.try_recv() {
                        record.take(note);
                    }
                    return Ran { outcome, steps: record.steps, progress: record.progress, logs: record.logs };
                }
            }
        }
    }

    pub(crate) fn frame(&self) -> JobFrame<'_> {
        let id = JobId::new();
        let hour_ms = i64::try_from(Duration::from_secs(3_600).as_millis()).unwrap_or(i64::MAX);
        JobFrame {
            id,
            name: Cow::Borrowed(&self.kind),
            kind: Cow::Borrowed(&self.kind),
            queue: Cow::Borrowed(faena_domain::DEFAULT_QUEUE),
            payload: &self.payload,
            run: i64::from(self.retry_count) + 1,
            retry_count: self.retry_count,
            max_retries: 3,
            correlation_id: Cow::Owned(id.to_string()),
            traceparent: None,
            schedule_id: None,
            schedule_due: None,
            deadline: Timestamp::now().plus_ms(hour_ms),
            steps: self.finished.iter().map(|(name, result)| StepFrame { name: Cow::Borrowed(name), result }).collect(),
        }
    }
}

impl Ran {
    /// The result as a type of yours. Panics, with the reason, when there is none: this is for tests.
    #[track_caller]
    pub fn result<T: DeserializeOwned>(&self) -> T {
        match &self.outcome {
            Ok(raw) => serde_json::from_str(raw.get()).expect("the result does not fit"),
            Err(error) => panic!("the run did not complete: {error:?}"),
        }
    }

    /// Why it failed. Panics when it did not.
    #[track_caller]
    pub fn error(&self) -> &JobError {
        match &self.outcome {
            Ok(raw) => panic!("the run completed: {raw}"),
            Err(error) => error,
        }
    }

    pub fn step_names(&self) -> Vec<&str> {
        self.steps.iter().map(|(name, _)| name.as_str()).collect()
    }
}

#[derive(Default)]
struct Record {
    refused: Option<String>,
    steps: Vec<(String, Box<RawValue>)>,
    progress: Vec<Progress>,
    logs: Vec<String>,
}

impl Record {
    /// Reads what would have been sent, so that a test sees what the server would.
    fn take(&mut self, note: Note) {
        match note {
            Note::Tell { text } => {
                let frame = read(&text);
                self.progress.extend(frame.progress);
                self.logs.extend(frame.message.map(Cow::into_owned));
            }
            Note::Step { text, waiter, .. } => {
                let frame = read(&text);
                let name = frame.name.unwrap_or_default().into_owned();
                let answer = if self.refused.as_ref() == Some(&name) {
                    Err(Refusal { code: "STALE_RUN".into(), message: "another worker has it".into() })
                } else {
                    self.steps.extend(frame.result.map(|result| (name, result.to_owned())));
                    Ok(())
                };
                let _ = waiter.send(answer);
            }
            Note::End { .. } | Note::Shelf => {}
        }
    }
}

fn read(text: &str) -> WorkerFrame<'_> {
    serde_json::from_str(text).expect("a frame that was just written")
}

fn raw(value: &impl Serialize) -> Box<RawValue> {
    to_raw_value(value).expect("a value of a test can be written as JSON")
}
