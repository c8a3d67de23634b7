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

use faena_domain::{Fault, JobId, JobState, JobView, Timestamp, WebhookId, WebhookView, WorkerView};
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
    pub details: Vec<Fault>,
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
