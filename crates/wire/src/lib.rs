//! What travels between Faena and its callers: bodies and names, no logic.

pub mod frames;

/// The messages and services of `proto/faena/v1/faena.proto`.
#[cfg(feature = "grpc")]
#[allow(clippy::all, clippy::unwrap_used, missing_docs, reason = "generated")]
pub mod v1 {
    tonic::include_proto!("faena.v1");

    /// What server reflection tells.
    pub const DESCRIPTOR: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/faena_descriptor.bin"));
}

use std::collections::BTreeMap;

use faena_domain::{
    AuditRow, BulkId, Fairness, FieldError, JobId, JobState, JobView, Pause, Rate, ScheduleId, Timestamp, WebhookId,
    WebhookView, WorkerView,
    schedule::{ScheduleView, ScheduledRun, TickRow},
};
use serde::{Deserialize, Serialize};

/// The answer to a refused request.
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

/// The answer to `POST /api/v1/jobs`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Created {
    pub id: JobId,
    pub status: JobState,
    pub created_at: Timestamp,
    pub correlation_id: String,
}

/// The answer to `POST /api/v1/jobs/batch`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CreatedBatch {
    pub ids: Vec<JobId>,
}

/// The answer to `GET /api/v1/jobs`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct JobList {
    pub jobs: Vec<JobView>,
    pub total: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page: Option<u64>,
    pub limit: u64,
    /// Give this as `cursor` to go on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<JobId>,
}

/// The answer to `GET /api/v1/dead-letter`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeadLetterList {
    pub data: Vec<JobView>,
    pub total: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page: Option<u64>,
    pub limit: u64,
    pub total_pages: u64,
    /// Give this as `cursor` to go on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<JobId>,
}

/// The answer to `GET /api/v1/dead-letter/stats`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeadLetterStats {
    pub total: u64,
    pub by_type: BTreeMap<String, u64>,
    pub by_queue: BTreeMap<String, u64>,
    /// Of the newest letters; `reasons_of` says of how many.
    pub by_reason: BTreeMap<String, u64>,
    pub reasons_of: u64,
    /// When the oldest and the newest of them were created.
    pub oldest: Option<Timestamp>,
    pub newest: Option<Timestamp>,
}

/// The answer to a bulk action.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BulkAnswer {
    /// Where it is kept; absent when nothing was to be done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<BulkId>,
    pub dry_run: bool,
    /// Jobs that the filter finds and the action fits.
    pub matched: u64,
    /// `false`: there are at least so many; counting all would take too long.
    pub matched_is_exact: bool,
    /// Jobs on which the action was done so far.
    pub done: u64,
    /// Jobs that had moved on before the action reached them.
    pub skipped: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_second: Option<u32>,
    /// The ids of the first of them.
    pub sample: Vec<JobId>,
    /// The same jobs, with what tells them apart.
    pub examples: Vec<BulkExample>,
}

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

/// How far a bulk action has come.
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
    /// When it goes on.
    pub due_at: Option<Timestamp>,
    pub finished_at: Option<Timestamp>,
    /// Why it ended early.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The answer to `GET /api/v1/bulk`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BulkList {
    pub actions: Vec<BulkView>,
}

/// The answer to `GET /api/v1/audit`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AuditList {
    pub entries: Vec<AuditRow>,
    /// Give this as `before` to go on.
    pub next: Option<i64>,
}

/// The answer to `GET /api/v1/queues`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct QueueList {
    pub queues: Vec<QueueView>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct QueueView {
    pub name: String,
    /// Jobs that could run now, by priority.
    pub depth: Depth,
    pub pending: u64,
    pub retrying: u64,
    pub running: u64,
    /// Since when the first of those in `depth` could run, and how long that is.
    pub oldest: Option<Timestamp>,
    pub waiting_ms: Option<u64>,
    /// Runs that ended in the last minute. `null`: not known yet.
    pub rate_per_minute: Option<f64>,
    pub concurrency: Option<u32>,
    pub rate: Option<Rate>,
    pub strict: bool,
    pub fairness: Fairness,
    pub paused: Option<Pause>,
}

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

/// The answer to `GET /api/v1/limits`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LimitList {
    pub limits: Vec<LimitView>,
}

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
    /// When it last held a job back.
    pub reached_at: Option<Timestamp>,
    /// Jobs in workers' hands that count for it. Not told of keys: each has its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held: Option<u64>,
    /// How many more may start now. Not told of keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<u64>,
}

/// The answer to cancel and retry.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Changed {
    pub id: JobId,
    pub status: JobState,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_count: Option<u32>,
    /// A worker has been told to stop and has not done so yet.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cancel_requested: bool,
}

/// The answer to `GET /api/v1/workers`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct WorkerList {
    pub workers: Vec<WorkerView>,
    pub total: u64,
}

/// The answer to `GET /api/v1/webhooks`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WebhookList {
    pub webhooks: Vec<WebhookView>,
    pub limit: u64,
    /// Give this as `cursor` to go on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<WebhookId>,
}

/// The answer to `POST /api/v1/schedules`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CreatedSchedule {
    pub id: ScheduleId,
    pub name: String,
    /// `None`: it is not active.
    pub next_run_at: Option<Timestamp>,
}

/// The answer to `GET /api/v1/schedules`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ScheduleList {
    pub schedules: Vec<ScheduleView>,
    pub total: u64,
    pub page: u64,
    pub limit: u64,
}

/// The answer to `GET /api/v1/schedules/:id/preview`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RunList {
    pub runs: Vec<ScheduledRun>,
    pub timezone: String,
    /// When it is due, in words.
    pub explanation: String,
}

/// The answer to `POST /api/v1/schedules/validate`, when there is nothing wrong.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ValidSchedule {
    pub valid: bool,
    pub explanation: String,
    pub timezone: String,
    pub next_runs: Vec<ScheduledRun>,
}

/// The answer to `GET /api/v1/schedules/:id/ticks`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TickList {
    pub ticks: Vec<TickRow>,
}

/// The answer to `POST /api/v1/schedules/:id/trigger`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Triggered {
    pub job_id: JobId,
}

/// The answer to `POST /api/v1/workers/register`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Registered {
    pub worker_id: String,
    pub heartbeat_interval_ms: u64,
    pub resumed: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Success {
    pub success: bool,
}

/// The answer to `/health/ready`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Ready {
    pub status: Health,
    pub checks: Checks,
}

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
