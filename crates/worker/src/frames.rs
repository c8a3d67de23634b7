//! The frames of the worker protocol: JSON objects with a `type`, over a WebSocket.
//!
//! One flat struct per direction: a tagged enum would buffer every frame and could not keep payloads and results unchanged.

use std::{borrow::Cow, fmt};

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::{ErrorCode, JobId, Progress, RunNumber, Timestamp};

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum WorkerFrameKind {
    Register,
    Heartbeat,
    Progress,
    Log,
    Step,
    Complete,
    Fail,
    Release,
    Drain,
    Leave,
}

/// A frame from the worker. Fields that its kind does not use are absent.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct WorkerFrame<'a> {
    #[serde(rename = "type")]
    pub kind: WorkerFrameKind,

    // register
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worker_id: Option<&'a str>,
    /// `register`: the name of the worker. `step`: the name of the step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capabilities: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queues: Option<&'a [String]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub concurrency: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token: Option<Secret<'a>>,
    /// Session token of an earlier registration, which the worker then resumes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session_token: Option<Secret<'a>>,
    /// The runs that this worker still works on. The server reassigns all other jobs of the worker.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub in_flight: Option<Vec<RunKey>>,

    // reports about a job
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job_id: Option<JobId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run: Option<RunNumber>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
    /// `log`
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<&'a str>,
    /// `log`: the name of the entry; `message` if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub event: Option<&'a str>,
    /// `step`, `complete`: any JSON.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub result: Option<&'a RawValue>,
    /// `step`: how many steps the job has, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_steps: Option<u32>,
    /// `fail`
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retryable: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<u64>,
}

impl WorkerFrame<'_> {
    pub fn new(kind: WorkerFrameKind) -> WorkerFrame<'static> {
        WorkerFrame {
            kind,
            worker_id: None,
            name: None,
            version: None,
            capabilities: None,
            queues: None,
            concurrency: None,
            token: None,
            session_token: None,
            in_flight: None,
            job_id: None,
            run: None,
            progress: None,
            message: None,
            event: None,
            result: None,
            total_steps: None,
            error: None,
            retryable: None,
            retry_after_ms: None,
        }
    }
}

/// A secret in a frame. `Debug` hides it.
#[derive(Clone, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Secret<'a>(#[serde(borrow)] pub Cow<'a, str>);

impl fmt::Debug for Secret<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("\"…\"")
    }
}

/// Identifies one run of one job.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
pub(crate) struct RunKey {
    #[serde(rename = "jobId")]
    pub job: JobId,
    pub run: RunNumber,
}

/// What a report of a worker says about a run. The server acknowledges each report by this name.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum ReportKind {
    Step,
    Complete,
    Fail,
    Release,
    /// A kind of report that only a newer server knows. Never sent.
    #[serde(other)]
    Unknown,
}

impl ReportKind {
    pub fn ends_the_run(self) -> bool {
        self != ReportKind::Step
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum ServerFrameKind {
    Registered,
    Job,
    Ack,
    Cancel,
    Drain,
    Resume,
    Heartbeat,
    Error,
    /// A frame of a newer server. Ignored.
    #[serde(other)]
    Unknown,
}

/// A frame from the server. Fields that this version does not know are ignored.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ServerFrame<'a> {
    #[serde(rename = "type")]
    pub kind: ServerFrameKind,

    // registered
    #[serde(default, borrow)]
    pub worker_id: Option<Cow<'a, str>>,
    #[serde(default, borrow)]
    pub session_token: Option<Secret<'a>>,
    pub heartbeat_interval_ms: Option<u64>,
    /// Whether the server still knows this worker and its runs.
    pub resumed: Option<bool>,

    // job
    #[serde(default, borrow)]
    pub job: Option<JobFrame<'a>>,

    // ack, cancel
    pub job_id: Option<JobId>,
    pub run: Option<RunNumber>,
    /// `ack`: the report that is acknowledged.
    pub of: Option<ReportKind>,
    pub ok: Option<bool>,
    /// `cancel`
    #[serde(default, borrow)]
    pub reason: Option<Cow<'a, str>>,
    /// `error`, and an `ack` that is not `ok`.
    pub error: Option<FrameError>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct FrameError {
    pub code: ErrorCode,
    pub message: String,
}

/// A job that is assigned to this worker.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct JobFrame<'a> {
    pub id: JobId,
    #[serde(borrow)]
    pub name: Cow<'a, str>,
    #[serde(rename = "type", borrow)]
    pub kind: Cow<'a, str>,
    #[serde(borrow)]
    pub queue: Cow<'a, str>,
    #[serde(borrow)]
    pub payload: &'a RawValue,
    pub run: RunNumber,
    /// Which attempt of the job this run is: 1 for the first.
    pub attempt: u32,
    pub retry_count: u32,
    pub max_retries: u32,
    #[serde(borrow)]
    pub correlation_id: Cow<'a, str>,
    #[serde(default, borrow)]
    pub traceparent: Option<Cow<'a, str>>,
    #[serde(default, borrow)]
    pub schedule_id: Option<Cow<'a, str>>,
    pub schedule_due: Option<Timestamp>,
    pub deadline: Timestamp,
    /// The steps that an earlier run has completed.
    #[serde(default, borrow)]
    pub steps: Vec<StepFrame<'a>>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct StepFrame<'a> {
    #[serde(borrow)]
    pub name: Cow<'a, str>,
    #[serde(borrow)]
    pub result: &'a RawValue,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_output_hides_the_tokens() {
        let text = r#"{"type":"registered","workerId":"w","sessionToken":"fst_secret"}"#;
        let frame: ServerFrame<'_> = serde_json::from_str(text).expect("a frame");
        assert_eq!(frame.session_token.as_ref().map(|token| &*token.0), Some("fst_secret"));
        assert!(!format!("{frame:?}").contains("fst_secret"));
        let secret = |text| Some(Secret(Cow::Borrowed(text)));
        let frame = WorkerFrame {
            token: secret("fna_secret"),
            session_token: secret("fst_secret"),
            ..WorkerFrame::new(WorkerFrameKind::Register)
        };
        assert!(!format!("{frame:?}").contains("secret\""), "{frame:?}");
    }

    #[test]
    fn a_frame_of_a_newer_server_is_read_and_ignored() {
        let frame: ServerFrame<'_> =
            serde_json::from_str(r#"{"type":"rebalance","shard":7,"run":1}"#).expect("any type is a frame");
        assert_eq!(frame.kind, ServerFrameKind::Unknown);
        let ack = r#"{"type":"ack","of":"checkpoint","ok":false,"error":{"code":"TOO_EARLY","message":"wait","ms":5}}"#;
        let frame: ServerFrame<'_> = serde_json::from_str(ack).expect("an ack");
        assert_eq!((frame.kind, frame.of), (ServerFrameKind::Ack, Some(ReportKind::Unknown)));
        assert_eq!(frame.error.expect("an error").code, ErrorCode::Unknown("TOO_EARLY".into()));
    }
}
