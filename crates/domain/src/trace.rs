//! Everything that belongs together, as one timeline: `GET /api/v1/trace/:correlationId`.

use serde::{Deserialize, Serialize};

use crate::{Attempt, JobId, JobState, Run, Timestamp};

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Trace {
    pub correlation_id: String,
    /// The first one first.
    pub jobs: Vec<TraceJob>,
    /// By time; what happened in the same millisecond, in the order in which it was written down.
    pub timeline: Vec<TraceEntry>,
    /// What was left out, because there is too much of it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub omitted: Vec<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TraceJob {
    pub id: JobId,
    pub name: String,
    #[serde(rename = "type")]
    pub kind: String,
    pub queue: String,
    pub status: JobState,
    pub created_at: Timestamp,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completed_at: Option<Timestamp>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule_id: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub depends_on: Vec<JobId>,
    /// Jobs of this trace that wait for it, or did.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dependents: Vec<JobId>,
    /// Its runs that have ended.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub runs: Vec<Attempt>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum TraceKind {
    /// A due time of the schedule that made a job.
    Schedule,
    /// A line of a job's log.
    Job,
    /// An attempt to deliver a webhook.
    Webhook,
    Event,
    /// Somebody's act.
    Audit,
}

impl TraceKind {
    pub fn as_str(self) -> &'static str {
        match self {
            TraceKind::Schedule => "schedule",
            TraceKind::Job => "job",
            TraceKind::Webhook => "webhook",
            TraceKind::Event => "event",
            TraceKind::Audit => "audit",
        }
    }
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TraceEntry {
    pub at: Timestamp,
    pub kind: TraceKind,
    /// `started`, `delivered`, `job.completed`, `job.cancel` …
    pub what: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job_id: Option<JobId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<Run>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker_id: Option<String>,
    /// Who did it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub actor: Option<String>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub details: String,
}

impl TraceEntry {
    pub fn new(at: Timestamp, kind: TraceKind, what: impl Into<String>) -> TraceEntry {
        let what = what.into();
        TraceEntry { at, kind, what, job_id: None, run: None, worker_id: None, actor: None, details: String::new() }
    }
}
