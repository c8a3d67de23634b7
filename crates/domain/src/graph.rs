//! The jobs around a job: those that it depends on and those that depend on it. `GET /api/v1/jobs/:id/dependencies`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{JobId, JobState};

/// A job with the jobs that it depends on and the jobs that depend on it, nearest first, up to a limit.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct JobGraph {
    pub job_id: JobId,
    /// The job itself first, then the others by their distance from it.
    pub jobs: Vec<GraphJob>,
    /// Number of dependencies between the jobs of this list and jobs that are not in it.
    pub hidden: u64,
    /// Whether the hidden numbers are exact. Otherwise there are at least this many.
    pub hidden_is_exact: bool,
}

/// A job of a graph.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GraphJob {
    pub id: JobId,
    /// Distance from the requested job: below 0 for jobs that it depends on, above 0 for jobs that depend on it.
    pub depth: i32,
    /// Absent, like the next three, if the job was deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<JobState>,
    /// The jobs of this graph that it depends on.
    pub depends_on: Vec<JobId>,
    /// How many further jobs it depends on.
    pub hidden_parents: u64,
    /// How many further jobs depend on it.
    pub hidden_children: u64,
}
