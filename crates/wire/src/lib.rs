//! Types of the messages between Faena and its callers: HTTP bodies, WebSocket frames and the gRPC protocol. No logic.

pub mod frames;

/// Messages and services of `proto/faena/v1`.
#[cfg(feature = "grpc")]
#[allow(clippy::all, clippy::unwrap_used, missing_docs, reason = "generated")]
pub mod v1 {
    tonic::include_proto!("faena.v1");

    /// Descriptors of all files, for server reflection.
    pub const DESCRIPTOR: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/faena_descriptor.bin"));
}

use std::collections::BTreeMap;

use faena_domain::{
    AuditRow, BulkId, Fairness, FieldError, JobId, JobState, JobView, Pause, Rate, ScheduleId, Timestamp, WebhookId,
    WebhookView, WorkerView,
    schedule::{ScheduleView, ScheduledRun, TickRow},
};
use serde::{Deserialize, Serialize};

/// Body of every error response.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ErrorBody {
    pub error: ErrorInfo,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ErrorInfo {
    pub code: String,
    pub message: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub details: Vec<FieldError>,
    pub request_id: String,
}

/// Response of `POST /api/v1/jobs`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Created {
    pub id: JobId,
    pub status: JobState,
    pub created_at: Timestamp,
    pub correlation_id: String,
}

/// Response of `POST /api/v1/jobs/batch`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CreatedBatch {
    pub ids: Vec<JobId>,
}

/// Response of `GET /api/v1/jobs`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct JobList {
    pub jobs: Vec<JobView>,
    pub total: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page: Option<u64>,
    pub limit: u64,
    /// Value of `cursor` for the next page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<JobId>,
}

/// Response of `GET /api/v1/dead-letter`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeadLetterList {
    pub data: Vec<JobView>,
    pub total: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page: Option<u64>,
    pub limit: u64,
    pub total_pages: u64,
    /// Value of `cursor` for the next page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<JobId>,
}

/// Response of `GET /api/v1/dead-letter/stats`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeadLetterStats {
    pub total: u64,
    pub by_type: BTreeMap<String, u64>,
    pub by_queue: BTreeMap<String, u64>,
    /// Counts among the newest dead letters only; `reasons_of` says how many those are.
    pub by_reason: BTreeMap<String, u64>,
    pub reasons_of: u64,
    /// When the oldest and the newest dead letter were created.
    pub oldest: Option<Timestamp>,
    pub newest: Option<Timestamp>,
}

/// Response to a bulk action.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BulkResponse {
    /// Id under `/api/v1/bulk`; absent if there was nothing to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<BulkId>,
    pub dry_run: bool,
    /// Jobs that match the filter and are in a state that allows the action.
    pub matched: u64,
    /// `false` if `matched` is a lower bound: counting all jobs would take too long.
    pub matched_is_exact: bool,
    /// Jobs that the action was applied to so far.
    pub done: u64,
    /// Jobs that had changed their state before the action reached them.
    pub skipped: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_second: Option<u32>,
    /// Ids of the first matching jobs.
    pub sample: Vec<JobId>,
    /// The jobs of `sample`, with details.
    pub examples: Vec<BulkExample>,
}

/// Job that a bulk action matches.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BulkExample {
    pub id: JobId,
    #[serde(rename = "type")]
    pub kind: String,
    pub queue: String,
    pub status: JobState,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A bulk action and its progress.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BulkView {
    pub id: BulkId,
    pub action: String,
    pub filter: serde_json::Value,
    pub actor: String,
    pub per_second: Option<u32>,
    pub created_at: Timestamp,
    pub matched: u64,
    pub done: u64,
    pub skipped: u64,
    /// When the next jobs are processed.
    pub due_at: Option<Timestamp>,
    pub finished_at: Option<Timestamp>,
    /// Why the action ended early.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Response of `GET /api/v1/bulk`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BulkList {
    pub actions: Vec<BulkView>,
}

/// Response of `GET /api/v1/audit`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AuditList {
    pub entries: Vec<AuditRow>,
    /// Value of `before` for the next page.
    pub next: Option<i64>,
}

/// Response of `GET /api/v1/queues`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct QueueList {
    pub queues: Vec<QueueView>,
}

/// A queue.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct QueueView {
    pub name: String,
    /// Jobs that are ready to run, by priority.
    pub depth: Depth,
    pub pending: u64,
    pub retrying: u64,
    pub running: u64,
    /// Since when the oldest job in `depth` has been ready, and how long that is.
    pub oldest: Option<Timestamp>,
    pub waiting_ms: Option<u64>,
    /// Runs that ended in the last minute; `null` if not known yet.
    pub rate_per_minute: Option<f64>,
    pub concurrency: Option<u32>,
    pub rate: Option<Rate>,
    pub strict: bool,
    pub fairness: Fairness,
    pub paused: Option<Pause>,
}

/// Ready jobs of a queue by priority.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Depth {
    #[serde(rename = "CRITICAL")]
    pub critical: u64,
    #[serde(rename = "HIGH")]
    pub high: u64,
    #[serde(rename = "NORMAL")]
    pub normal: u64,
    #[serde(rename = "LOW")]
    pub low: u64,
    pub total: u64,
}

/// Response of `GET /api/v1/limits`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LimitList {
    pub limits: Vec<LimitView>,
}

/// A limit on concurrency or rate.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LimitView {
    /// `system`, `queue`, `type` or `key`.
    pub scope: String,
    pub name: Option<String>,
    pub concurrency: Option<u32>,
    pub rate: Option<Rate>,
    /// `config` or `api`.
    pub origin: String,
    pub changed_at: Timestamp,
    pub changed_by: String,
    /// When the limit last delayed a job.
    pub reached_at: Option<Timestamp>,
    /// Jobs in flight that count towards the limit. Absent for keys: each key has its own count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_flight: Option<u64>,
    /// Jobs that may start now. Absent for keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<u64>,
}

/// Response to cancelling or retrying a job.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Changed {
    pub id: JobId,
    pub status: JobState,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_count: Option<u32>,
    /// Whether a worker was asked to stop the job and has not done so yet.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cancel_requested: bool,
}

/// Response of `GET /api/v1/workers`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct WorkerList {
    pub workers: Vec<WorkerView>,
    pub total: u64,
}

/// Response of `GET /api/v1/webhooks`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WebhookList {
    pub webhooks: Vec<WebhookView>,
    pub limit: u64,
    /// Value of `cursor` for the next page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<WebhookId>,
}

/// Response of `POST /api/v1/schedules`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CreatedSchedule {
    pub id: ScheduleId,
    pub name: String,
    /// `None` if the schedule is not active.
    pub next_run_at: Option<Timestamp>,
}

/// Response of `GET /api/v1/schedules`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ScheduleList {
    pub schedules: Vec<ScheduleView>,
    pub total: u64,
    pub page: u64,
    pub limit: u64,
}

/// Response of `GET /api/v1/schedules/:id/preview`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RunList {
    pub runs: Vec<ScheduledRun>,
    pub timezone: String,
    /// Timing in words.
    pub explanation: String,
}

/// Response of `POST /api/v1/schedules/validate` for a valid schedule.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ValidSchedule {
    pub valid: bool,
    pub explanation: String,
    pub timezone: String,
    pub next_runs: Vec<ScheduledRun>,
}

/// Response of `GET /api/v1/schedules/:id/ticks`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TickList {
    pub ticks: Vec<TickRow>,
}

/// Response of `POST /api/v1/schedules/:id/trigger`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Triggered {
    pub job_id: JobId,
}

/// Response of `POST /api/v1/workers/register`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Registered {
    pub worker_id: String,
    pub heartbeat_interval_ms: u64,
    pub resumed: bool,
}

/// Response of actions that return nothing else.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Success {
    pub success: bool,
}

/// Response of `/health/ready`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Ready {
    pub status: Health,
    pub checks: Checks,
}

/// Result of a health check.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Health {
    Healthy,
    Degraded,
    Unhealthy,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Checks {
    pub database: DatabaseCheck,
    pub workers: WorkersCheck,
    pub loops: Vec<LoopCheck>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DatabaseCheck {
    pub status: Health,
    pub engine: String,
    pub latency_ms: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WorkersCheck {
    pub status: Health,
    pub active_count: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LoopCheck {
    pub name: String,
    pub status: Health,
    pub last_beat_at: Option<Timestamp>,
    pub handled: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}
