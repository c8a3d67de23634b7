//! Types of the messages between Faena and its callers: HTTP bodies, WebSocket frames and the gRPC protocol. No logic.

pub mod frames;
pub mod metrics;
mod system;

/// Messages and services of `proto/faena/v1`.
#[cfg(feature = "grpc")]
#[allow(clippy::all, clippy::unwrap_used, missing_docs, reason = "generated")]
pub mod v1 {
    tonic::include_proto!("faena.v1");

    // The derived implementations would show the API key and the session token.
    impl std::fmt::Debug for Register {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.debug_struct("Register").field("worker_id", &self.worker_id).finish_non_exhaustive()
        }
    }

    impl std::fmt::Debug for Registered {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.debug_struct("Registered").field("worker_id", &self.worker_id).finish_non_exhaustive()
        }
    }

    /// Descriptors of all files, for server reflection.
    pub const DESCRIPTOR: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/faena_descriptor.bin"));
}

pub use system::{DoctorFinding, DoctorReport, DoctorSeverity, NodeList, NodeView};

use faena_domain::{
    ApiKey, AuditRow, BulkId, ErrorCode, ErrorReason, Fairness, FieldError, JobId, JobState, JobView, Pause, Priority,
    Rate, ScheduleId, SecretText, Timestamp, WebhookView, WorkerView,
    schedule::{ScheduleView, ScheduledRun, TickRow},
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// Body of every error response.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ErrorBody {
    pub error: ErrorInfo,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ErrorInfo {
    #[schemars(with = "ErrorCode")]
    pub code: String,
    pub message: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub details: Vec<FieldError>,
    pub request_id: String,
}

/// Response of `POST /api/v1/jobs`.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Created {
    pub id: JobId,
    pub status: JobState,
    pub created_at: Timestamp,
    pub correlation_id: String,
}

/// Response of `POST /api/v1/jobs/batch`.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct CreatedBatch {
    pub ids: Vec<JobId>,
}

/// Response of `GET /api/v1/jobs/:id/log`: entries, oldest first.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct JobLog<T> {
    pub entries: Vec<T>,
    /// Cursor of the next page; absent on the last one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
}

/// Information about a page and the whole list, in the body and in headers.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PageInfo {
    pub total: u64,
    #[serde(skip_serializing_if = "is_true")]
    pub total_is_exact: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub page: Option<u64>,
    pub limit: u64,
    pub total_pages: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_partial: bool,
    #[serde(skip_serializing_if = "is_true")]
    pub sort_is_exact: bool,
}

/// Defines the response of a list: its entries and information about the page.
macro_rules! list {
    ($(#[$meta:meta])* $name:ident { $field:ident: $entry:ty }) => {
        $(#[$meta])*
        #[serde(rename_all = "camelCase")]
        pub struct $name {
            pub $field: Vec<$entry>,
            pub total: u64,
            /// `false` if `total` is a lower bound: counting all entries would take too long.
            #[serde(default = "default_true", skip_serializing_if = "is_true")]
            pub total_is_exact: bool,
            /// Absent if the page was chosen by `cursor`.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub page: Option<u64>,
            pub limit: u64,
            /// Number of pages that `page` can reach.
            pub total_pages: u64,
            /// Value of `cursor` for the next page.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub next_cursor: Option<String>,
            /// Whether the search stopped at its bound before the page was full; `nextCursor` continues it.
            #[serde(default, skip_serializing_if = "std::ops::Not::not")]
            pub is_partial: bool,
            /// `false` if only the newest entries were sorted.
            #[serde(default = "default_true", skip_serializing_if = "is_true")]
            pub sort_is_exact: bool,
        }

        impl $name {
            pub fn new($field: Vec<$entry>, page_info: PageInfo) -> $name {
                let PageInfo { total, total_is_exact, page, limit, total_pages, next_cursor, .. } = page_info;
                let PageInfo { is_partial, sort_is_exact, .. } = page_info;
                $name {
                    $field,
                    total,
                    total_is_exact,
                    page,
                    limit,
                    total_pages,
                    next_cursor,
                    is_partial,
                    sort_is_exact,
                }
            }
        }
    };
}

fn default_true() -> bool {
    true
}

fn is_true(flag: &bool) -> bool {
    *flag
}

list! {
    /// Response of `GET /api/v1/jobs`.
    #[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
    JobList { jobs: JobView }
}

list! {
    /// Response of `GET /api/v1/dead-letter`.
    #[derive(Clone, Debug, Serialize, JsonSchema)]
    DeadLetterList { data: DeadLetterView }
}

/// A dead-lettered job. Some fields are repeated under other names, for clients of the task-scheduler API.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DeadLetterView {
    #[serde(flatten)]
    pub job: JobView,
    pub original_job_id: JobId,
    pub job_name: String,
    pub job_type: String,
    #[schemars(with = "serde_json::Map<String, serde_json::Value>")]
    pub job_payload: Box<RawValue>,
    pub job_priority: Priority,
    /// The same as `error`; the `errorReason` if the job has no error text.
    pub failure_reason: Option<String>,
    /// Attempts that failed.
    pub failure_count: u32,
    pub last_error: Option<String>,
    pub failed_at: Option<Timestamp>,
    pub original_created_at: Timestamp,
}

impl DeadLetterView {
    pub fn new(job: JobView) -> DeadLetterView {
        // A job that ended without a run failed only in its earlier attempts.
        let ended_without_run = matches!(job.error_reason, Some(ErrorReason::Expired | ErrorReason::NoHandler));
        DeadLetterView {
            original_job_id: job.id,
            job_name: job.name.clone(),
            job_type: job.kind.clone(),
            job_payload: job.payload.clone(),
            job_priority: job.priority,
            failure_reason: job.error.clone().or(job.error_reason.map(|reason| reason.as_str().to_owned())),
            failure_count: job.retry_count + u32::from(!ended_without_run),
            last_error: job.error.clone(),
            failed_at: job.completed_at,
            original_created_at: job.created_at,
            job,
        }
    }
}

/// Response of `GET /api/v1/dead-letter/stats`.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DeadLetterStats {
    pub total: u64,
    pub by_type: Vec<TypeCount>,
    pub by_queue: Vec<QueueCount>,
    /// Counts among the newest dead letters only; `reasonSampleSize` says how many those are.
    pub by_reason: Vec<ReasonCount>,
    pub reason_sample_size: u64,
    /// When the oldest and the newest dead letter were created.
    pub oldest: Option<Timestamp>,
    pub newest: Option<Timestamp>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TypeCount {
    pub job_type: String,
    pub count: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct QueueCount {
    pub queue: String,
    pub count: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ReasonCount {
    pub reason: String,
    pub count: u64,
}

/// Response to a bulk action.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
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
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
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
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BulkView {
    pub id: BulkId,
    #[schemars(extend("enum" = ["cancel", "retry", "delete", "tasks.send", "tasks.cancel", "tasks.pause", "tasks.resume", "tasks.migrate"]))]
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

list! {
    /// Response of `GET /api/v1/bulk`.
    #[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
    BulkList { actions: BulkView }
}

list! {
    /// Response of `GET /api/v1/api-keys`.
    #[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
    ApiKeyList { api_keys: ApiKey }
}

/// Response of `POST /api/v1/api-keys` and of a rotation. No other response contains the key itself.
#[derive(Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ShownApiKey {
    pub key: String,
    #[serde(flatten)]
    pub details: ApiKey,
}

list! {
    /// Response of `GET /api/v1/audit`.
    #[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
    AuditList { entries: AuditRow }
}

list! {
    /// Response of `GET /api/v1/queues`.
    #[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
    QueueList { queues: QueueView }
}

/// A queue.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct QueueView {
    pub name: String,
    /// Jobs that are ready to run, by priority.
    pub depth: Depth,
    pub pending: u64,
    pub retrying: u64,
    pub running: u64,
    /// When the oldest job in `depth` became ready, and how long ago that was.
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
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, JsonSchema)]
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

list! {
    /// Response of `GET /api/v1/limits`.
    #[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
    LimitList { limits: LimitView }
}

/// A limit on concurrency or rate.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LimitView {
    #[schemars(extend("enum" = ["system", "queue", "type", "key", "machine"]))]
    pub scope: String,
    pub name: Option<String>,
    pub concurrency: Option<u32>,
    pub rate: Option<Rate>,
    /// Where it was set.
    #[schemars(extend("enum" = ["config", "api", "machine"]))]
    pub origin: String,
    pub changed_at: Timestamp,
    pub changed_by: String,
    /// When the limit last delayed a job.
    pub reached_at: Option<Timestamp>,
    /// Jobs in flight that count towards the limit, or tasks of a machine. Absent for keys: each has its own count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_flight: Option<u64>,
    /// Jobs that may start now. Absent for keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<u64>,
}

/// Response to cancelling or retrying a job.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
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

list! {
    /// Response of `GET /api/v1/workers`.
    #[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
    WorkerList { workers: WorkerView }
}

list! {
    /// Response of `GET /api/v1/webhooks`.
    #[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
    WebhookList { webhooks: WebhookView }
}

/// Response of `POST /api/v1/schedules`.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CreatedSchedule {
    pub id: ScheduleId,
    pub name: String,
    /// `null` if the schedule is not active.
    pub next_run_at: Option<Timestamp>,
}

list! {
    /// Response of `GET /api/v1/schedules`.
    #[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
    ScheduleList { schedules: ScheduleView }
}

/// Response of `GET /api/v1/schedules/:id/preview` and `…/next-runs`.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RunList {
    pub next_runs: Vec<ScheduledRun>,
    pub timezone: String,
    /// Human-readable description of the timing.
    pub explanation: String,
}

/// Response of `POST /api/v1/schedules/validate` for a valid schedule.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ValidSchedule {
    pub valid: bool,
    pub explanation: String,
    pub timezone: String,
    pub next_runs: Vec<ScheduledRun>,
}

list! {
    /// Response of `GET /api/v1/schedules/:id/ticks`.
    #[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
    TickList { ticks: TickRow }
}

/// Response of `POST /api/v1/schedules/:id/trigger`.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Triggered {
    pub job_id: JobId,
}

/// Response of `POST /api/v1/workers/register`.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Registered {
    pub worker_id: String,
    /// Needed in the header `X-Session-Token` of every further call, and to register again under this id.
    pub session_token: SecretText,
    pub heartbeat_interval_ms: u64,
    pub resumed: bool,
}

/// Response to a report of a worker.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Reported {
    pub ok: bool,
}

/// Response of `/health/live`.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Alive {
    #[schemars(extend("const" = "ok"))]
    pub status: String,
}

/// Response of actions that return nothing else.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Success {
    pub success: bool,
}

/// Response of `/health/ready`.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Ready {
    pub status: Health,
    pub checks: Checks,
}

/// Result of a health check.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Health {
    Healthy,
    Degraded,
    Unhealthy,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Checks {
    pub database: DatabaseCheck,
    /// The queue in Redis, if jobs are dispatched from one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub redis: Option<RedisCheck>,
    pub workers: WorkersCheck,
    pub loops: Vec<LoopCheck>,
    /// The sources and inboxes of the node that sent this response.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub inputs: Vec<InputCheck>,
    /// The sinks of the node that sent this response.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sinks: Vec<InputCheck>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DatabaseCheck {
    pub status: Health,
    pub engine: String,
    pub latency_ms: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Why signals of other nodes do not arrive. The node polls until they do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal_problem: Option<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RedisCheck {
    pub status: Health,
    pub latency_ms: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WorkersCheck {
    pub status: Health,
    pub active_count: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LoopCheck {
    pub name: String,
    pub status: Health,
    pub last_beat_at: Option<Timestamp>,
    pub handled: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Health of a source, inbox or sink.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct InputCheck {
    /// `source:…`, `inbox:…` or `sink:…`.
    pub name: String,
    pub status: Health,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub down_since: Option<Timestamp>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}
