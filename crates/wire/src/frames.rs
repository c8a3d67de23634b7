//! What a worker and the server say to each other on a WebSocket: JSON objects with a `type` (SPEC 4.1).
//!
//! One flat struct per direction: fields that a type does not use are absent. A tagged enum would read each frame twice and
//! could not keep payloads and results to the letter.

use std::borrow::Cow;

use faena_domain::{JobId, Progress, Run, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// From the worker: `register`, `heartbeat`, `started`, `progress`, `log`, `step`, `complete`, `fail`, `release`, `drain`, `leave`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WorkerFrame<'a> {
    #[serde(rename = "type", borrow)]
    pub kind: Cow<'a, str>,

    // register
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    pub worker_id: Option<Cow<'a, str>>,
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    pub name: Option<Cow<'a, str>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capabilities: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queues: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub concurrency: Option<u32>,
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    pub token: Option<Cow<'a, str>>,
    /// It tells each start itself with `started`; otherwise a job counts as started when it is delivered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tells_starts: Option<bool>,
    /// The jobs it has in its hands. What the server thinks it has besides goes to others at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holds: Option<Vec<HeldRun>>,

    // about a job
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job_id: Option<JobId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<Run>,
    /// `progress`
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
    /// `log`
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    pub message: Option<Cow<'a, str>>,
    /// `step`, `complete`: any JSON.
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    pub result: Option<&'a RawValue>,
    /// `step`: how many steps the job has, if the worker knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_steps: Option<u32>,
    /// `fail`: a text, or any JSON, which is kept as text.
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    pub error: Option<&'a RawValue>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retryable: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HeldRun {
    pub job_id: JobId,
    pub run: Run,
}

/// From the server: `registered`, `job`, `ack`, `cancel`, `drain`, `resume`, `heartbeat`, `error`. What a worker does not know of
/// it leaves alone.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServerFrame<'a> {
    #[serde(rename = "type", borrow)]
    pub kind: Cow<'a, str>,

    // registered
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    pub worker_id: Option<Cow<'a, str>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heartbeat_interval_ms: Option<u64>,
    /// Whether this is the same life as before, with the jobs in its hands.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resumed: Option<bool>,

    // job
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    pub job: Option<JobFrame<'a>>,

    // ack, cancel
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job_id: Option<JobId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<Run>,
    /// `ack`: which report this is about.
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    pub of: Option<Cow<'a, str>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ok: Option<bool>,
    /// `cancel`
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    pub reason: Option<Cow<'a, str>>,
    /// `error`, and an `ack` that is not `ok`.
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    pub error: Option<FrameError<'a>>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FrameError<'a> {
    #[serde(borrow)]
    pub code: Cow<'a, str>,
    #[serde(borrow)]
    pub message: Cow<'a, str>,
}

/// A job as it is handed to a worker, on a WebSocket and in the answer to a claim.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct JobFrame<'a> {
    pub id: JobId,
    #[serde(borrow)]
    pub name: Cow<'a, str>,
    #[serde(rename = "type", borrow)]
    pub kind: Cow<'a, str>,
    #[serde(borrow)]
    pub queue: Cow<'a, str>,
    #[serde(borrow)]
    pub payload: &'a RawValue,
    pub run: Run,
    pub retry_count: u32,
    pub max_retries: u32,
    #[serde(borrow)]
    pub correlation_id: Cow<'a, str>,
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    pub traceparent: Option<Cow<'a, str>>,
    /// The schedule that made it, and for which due time.
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    pub schedule_id: Option<Cow<'a, str>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule_due: Option<Timestamp>,
    /// When it is told to stop.
    pub deadline: Timestamp,
    /// Steps that an earlier run has finished, with their results.
    #[serde(default, borrow)]
    pub steps: Vec<StepFrame<'a>>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StepFrame<'a> {
    #[serde(borrow)]
    pub name: Cow<'a, str>,
    #[serde(borrow)]
    pub result: &'a RawValue,
}
