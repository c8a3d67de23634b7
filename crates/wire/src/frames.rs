//! Frames between a worker and the server on a WebSocket: JSON objects with a `type`.
//!
//! One flat struct per direction; fields that a type does not use are absent. A tagged enum would parse each frame twice and
//! could not keep payloads and results unchanged.

use std::borrow::Cow;

use faena_domain::{JobId, Progress, Run, SecretText, Timestamp};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// Frame of a worker: `register`, `heartbeat`, `started`, `progress`, `log`, `step`, `complete`, `fail`, `release`, `drain`, `leave`.
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
    /// Version of the worker's program.
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    pub version: Option<Cow<'a, str>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capabilities: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queues: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub concurrency: Option<u32>,
    /// An API key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<SecretText>,
    /// Token from the first `registered` frame. Resumes that registration with its jobs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_token: Option<SecretText>,
    /// Whether the worker reports `started`; otherwise a job counts as started when it is delivered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reports_starts: Option<bool>,
    /// Jobs that the worker has in flight. The server reassigns all others that it assigned to the worker before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_flight: Option<Vec<JobRun>>,

    // reports about a job
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
    /// `log`: name of the entry in the job's execution log, if it is not `message`.
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    pub event: Option<Cow<'a, str>>,
    /// `step`, `complete`: any JSON.
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    pub result: Option<&'a RawValue>,
    /// `step`: total number of steps, if the worker knows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_steps: Option<u32>,
    /// `fail`: a string, or any other JSON, which is stored as a string.
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    pub error: Option<&'a RawValue>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retryable: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<u64>,
}

impl WorkerFrame<'_> {
    /// Names of all fields in JSON.
    pub const FIELDS: [&'static str; 21] = [
        "type",
        "workerId",
        "name",
        "version",
        "capabilities",
        "queues",
        "concurrency",
        "token",
        "sessionToken",
        "reportsStarts",
        "inFlight",
        "jobId",
        "run",
        "progress",
        "message",
        "event",
        "result",
        "totalSteps",
        "error",
        "retryable",
        "retryAfterMs",
    ];
}

/// A run of a job.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct JobRun {
    pub job_id: JobId,
    pub run: Run,
}

/// Frame of the server: `registered`, `job`, `ack`, `cancel`, `drain`, `resume`, `heartbeat`, `error`.
///
/// A worker ignores fields and types that it does not know.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServerFrame<'a> {
    #[serde(rename = "type", borrow)]
    pub kind: Cow<'a, str>,

    // registered
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    pub worker_id: Option<Cow<'a, str>>,
    /// What the worker needs to resume this registration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_token: Option<SecretText>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heartbeat_interval_ms: Option<u64>,
    /// Whether an earlier registration, with its jobs, was resumed.
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
    /// `ack`: type of the report.
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

/// Error about a frame or report.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FrameError<'a> {
    #[serde(borrow)]
    pub code: Cow<'a, str>,
    #[serde(borrow)]
    pub message: Cow<'a, str>,
}

/// A job to run, on a WebSocket and in the response to a claim.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
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
    /// Which attempt of the job this run is: 1 for the first.
    pub attempt: u32,
    pub retry_count: u32,
    pub max_retries: u32,
    #[serde(borrow)]
    pub correlation_id: Cow<'a, str>,
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    pub traceparent: Option<Cow<'a, str>>,
    /// Schedule that created the job, and for which due time.
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    pub schedule_id: Option<Cow<'a, str>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule_due: Option<Timestamp>,
    /// When the run times out.
    pub deadline: Timestamp,
    /// Steps that earlier runs completed.
    #[serde(default, borrow)]
    pub steps: Vec<StepFrame<'a>>,
}

/// Response to a claim.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Claimed<'a> {
    #[serde(borrow)]
    pub jobs: Vec<JobFrame<'a>>,
    #[serde(flatten)]
    pub notices: WorkerNotices,
}

/// Response to a heartbeat, and part of that to a claim.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct WorkerNotices {
    /// Jobs to stop.
    pub cancel: Vec<JobToStop>,
    /// Whether the worker receives no further jobs.
    pub drain: bool,
}

/// A job that its worker has to stop.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct JobToStop {
    pub job_id: JobId,
    pub run: Run,
    pub reason: String,
}

/// A completed step.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct StepFrame<'a> {
    #[serde(borrow)]
    pub name: Cow<'a, str>,
    #[serde(borrow)]
    pub result: &'a RawValue,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_list_of_fields_is_complete() {
        let raw = serde_json::value::to_raw_value(&1).expect("JSON");
        let frame = WorkerFrame {
            kind: "register".into(),
            worker_id: Some("".into()),
            name: Some("".into()),
            version: Some("".into()),
            capabilities: Some(Vec::new()),
            queues: Some(Vec::new()),
            concurrency: Some(1),
            token: Some(String::new().into()),
            session_token: Some(String::new().into()),
            reports_starts: Some(true),
            in_flight: Some(Vec::new()),
            job_id: Some(JobId::new()),
            run: Some(1),
            progress: Some(Progress::default()),
            message: Some("".into()),
            event: Some("".into()),
            result: Some(&raw),
            total_steps: Some(1),
            error: Some(&raw),
            retryable: Some(true),
            retry_after_ms: Some(1),
        };
        let json = json!(frame);
        let mut names: Vec<&str> = json.as_object().expect("an object").keys().map(String::as_str).collect();
        let mut fields = WorkerFrame::FIELDS.to_vec();
        names.sort_unstable();
        fields.sort_unstable();
        assert_eq!(names, fields);
    }
}
