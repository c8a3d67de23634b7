//! Responses of `/api/v1/metrics`.

use std::collections::BTreeMap;

use faena_domain::{JobState, Priority, Timestamp};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Response of `GET /api/v1/metrics/overview`.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MetricsOverview {
    pub queues: QueueMetrics,
    /// Absent for an API key that is restricted to queues.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers: Option<WorkerMetrics>,
    pub jobs: JobMetrics,
    pub schedules: ScheduleMetrics,
    /// Absent for an API key that is restricted to queues: tasks belong to no queue.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tasks: Option<TaskMetrics>,
    /// Seconds since this node started.
    pub uptime: u64,
}

/// Response of `GET /api/v1/metrics/queues`: jobs that have not finished, and dead letters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct QueueMetrics {
    /// Jobs that are ready to run, of all priorities.
    pub priority: u64,
    /// Jobs that wait for their time, their parents or their next attempt.
    pub delayed: u64,
    /// Jobs in flight.
    pub processing: u64,
    /// Dead-lettered jobs.
    pub dlq: u64,
}

/// Response of `GET /api/v1/metrics/workers`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WorkerMetrics {
    /// All stored registrations.
    pub total: u64,
    /// Workers that have a job.
    pub active: u64,
    /// Workers that wait for a job.
    pub idle: u64,
    /// Workers that are stopping or have ended.
    pub stopped: u64,
    /// Runs that completed.
    pub total_processed: u64,
    /// Runs that failed.
    pub total_failed: u64,
}

/// Response of `GET /api/v1/metrics/jobs`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct JobMetrics {
    /// Jobs that exist.
    pub total: u64,
    pub by_status: BTreeMap<JobState, u64>,
    pub last24h: RecentJobs,
    /// Types with queued jobs that no live worker can run, those with most jobs first; at most 100.
    pub without_worker: Vec<UnservedType>,
}

/// Queued jobs of one type that no live worker can run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct UnservedType {
    #[serde(rename = "type")]
    pub kind: String,
    pub queue: String,
    /// Queued jobs.
    pub jobs: u64,
}

/// What happened to jobs in the current hour and the 23 hours before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RecentJobs {
    pub created: u64,
    pub completed: u64,
    pub failed: u64,
}

/// Response of `GET /api/v1/metrics/schedules`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ScheduleMetrics {
    pub total: u64,
    pub enabled: u64,
    pub disabled: u64,
    /// Jobs that the existing schedules created.
    pub total_runs: u64,
}

/// Tasks in `GET /api/v1/metrics/overview`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TaskMetrics {
    /// Sum of `byStatus`.
    pub total: u64,
    /// `queued`, `running`, `paused`, `completed`, `failed` and `cancelled`, each counted up to 10000 per version of a machine.
    pub by_status: BTreeMap<String, u64>,
    /// Tasks that wait for a decision.
    pub approvals_waiting: u64,
    /// When the task that has waited longest for a decision began to wait.
    pub oldest_approval_at: Option<Timestamp>,
    /// When the running or paused task that has been in its state longest entered that state.
    pub oldest_in_state_at: Option<Timestamp>,
    /// When the task that has been queued longest was queued.
    pub oldest_queued_at: Option<Timestamp>,
    /// When the next timer of a task is due.
    pub next_timer_at: Option<Timestamp>,
    /// Missed deadlines that this node has found since it started.
    pub deadlines_missed: u64,
}

/// Response of `GET /api/v1/metrics/history`.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MetricsHistory {
    /// `minute`, `hour` or `day`.
    pub period: String,
    pub from: Timestamp,
    pub until: Timestamp,
    /// Oldest first.
    pub history: Vec<HistoryView>,
}

/// What happened to jobs in one minute, hour or day (UTC).
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HistoryView {
    /// Start of the minute, hour or day.
    pub date: Timestamp,
    /// Only with `byQueue=true`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<String>,
    pub total_created: u64,
    pub total_completed: u64,
    /// Jobs that failed permanently and were dead-lettered.
    pub total_failed: u64,
    pub total_cancelled: u64,
    /// Runs that did not start in time or ran too long, and jobs that expired.
    pub total_timed_out: u64,
    /// Runs that failed, whether or not their job was retried.
    pub failed_runs: u64,
    /// In milliseconds; `null` if no run ended.
    pub avg_processing_time: Option<f64>,
    /// In milliseconds, from becoming ready to the start.
    pub avg_wait_time: Option<f64>,
    pub processing_time: Percentiles,
    pub wait_time: Percentiles,
    pub completed_by_priority: BTreeMap<Priority, u64>,
}

/// Estimates in milliseconds, interpolated between the bounds of a histogram. `null` if nothing was measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Percentiles {
    pub p50: Option<f64>,
    pub p95: Option<f64>,
    pub p99: Option<f64>,
}
