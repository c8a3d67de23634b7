//! Jobs: the store methods, their arguments and results.

use std::collections::BTreeMap;

use async_trait::async_trait;
use faena_domain::{
    Attempt, Bucket, ErrorReason, JobGraph, JobId, JobOptions, JobState, JobView, NewJob, Priority, Step, Timestamp,
};
use serde::{Deserialize, Serialize};

use crate::{JobIdPage, JobPage, LaneId, LogCursor, LogPage, Page, Result};

/// Jobs: submitting, changing, moving and reading them.
#[async_trait]
pub trait JobStore: Send + Sync + 'static {
    /// Stores all jobs or none, each in `ready`, or in `waiting` for its time or its parents.
    ///
    /// An idempotency key that exists with the same fingerprint returns the existing job. `by` is the actor of the events; `None` for the
    /// system. A submission has no entry in the audit log.
    async fn job_submit(&self, jobs: Vec<NewJob>, by: Option<&str>, now: Timestamp) -> Result<Vec<Submitted>>;

    /// Cancels a job, or requests its cancellation if a worker has it.
    ///
    /// `by` is the actor of the entry in the audit log, which is written in the same transaction; `None` for the system and for bulk
    /// actions, which have an entry of their own. The same applies to the next three methods.
    async fn job_cancel(&self, id: JobId, reason: &str, by: Option<&str>, now: Timestamp) -> Result<CancelOutcome>;

    /// Retries a failed or cancelled job under its own id, with its full number of retries. Lets a retrying job make its next attempt
    /// now.
    async fn job_retry(&self, id: JobId, by: Option<&str>, now: Timestamp) -> Result<Retried>;

    /// Changes a job that is neither in flight nor finished.
    async fn job_patch(&self, id: JobId, patch: JobPatch, by: Option<&str>, now: Timestamp) -> Result<()>;

    /// Deletes a job that is not in flight, with everything that belongs to it.
    async fn job_delete(&self, id: JobId, by: Option<&str>, now: Timestamp) -> Result<()>;

    /// Moves up to `limit` due jobs: delayed and retrying jobs become ready, and the parents of blocked jobs are checked.
    async fn job_promote(&self, limit: usize, now: Timestamp) -> Result<DueResult>;

    /// Fails up to `limit` jobs that are past their expiry and not in flight. A job in flight may finish.
    async fn job_expire(&self, limit: usize, now: Timestamp) -> Result<DueResult>;

    /// Fails up to `limit` jobs that have been ready in these lanes since before `before`, because no worker can run them.
    async fn job_fail_unhandled(
        &self,
        lanes: Vec<LaneId>,
        before: Timestamp,
        limit: usize,
        now: Timestamp,
    ) -> Result<usize>;

    /// Deletes up to `limit` finished jobs that are older than their retention. Also deletes old webhooks, ticks,
    /// cancel requests, bulk actions and entries of the audit log.
    ///
    /// PostgreSQL: also creates the partitions of the coming days and drops empty ones.
    async fn job_prune(&self, retention: &Retention, limit: usize, now: Timestamp) -> Result<usize>;

    /// Returns a job with its steps and the newest entries of its log.
    async fn job_get(&self, id: JobId) -> Result<Option<JobView>>;

    /// Returns up to `limit` entries of a job's log, oldest first.
    async fn job_log(&self, id: JobId, after: Option<LogCursor>, limit: usize) -> Result<Option<LogPage>>;

    /// Returns what a job waits for: jobs ahead of it, parents, its key, its owner. Jobs of the lanes in `without` are not
    /// counted.
    async fn job_position(&self, id: JobId, without: Vec<LaneId>) -> Result<Option<JobPosition>>;

    /// Returns a job with its direct and indirect parents and dependents, the nearest first, up to `limit` jobs in all.
    ///
    /// Jobs of queues that are not in `queues` are left out. Returns `None` if the job does not exist or is in another queue.
    async fn job_graph(&self, id: JobId, queues: Option<Vec<String>>, limit: usize) -> Result<Option<JobGraph>>;

    /// Lists matching jobs without log and steps.
    async fn job_list(&self, filter: &Filter, page: Page) -> Result<JobPage>;

    /// Lists the ids of up to `limit` matching jobs that are newer than `after` and not newer than `up_to`, oldest first.
    async fn job_find(&self, filter: &Filter, after: Option<JobId>, up_to: JobId, limit: usize) -> Result<JobIdPage>;

    /// Lists how each run of a job ended, oldest first.
    async fn job_attempts(&self, id: JobId) -> Result<Vec<Attempt>>;

    /// Returns the finished steps of these jobs, by job in the order in which they finished.
    async fn job_steps(&self, ids: Vec<JobId>) -> Result<Vec<(JobId, Step)>>;
}

/// Counts of jobs.
#[async_trait]
pub trait JobCountStore: Send + Sync + 'static {
    /// Returns when the first ready job of each lane became ready. Lanes without ready jobs are left out.
    async fn ready_since(&self) -> Result<Vec<(LaneId, Timestamp)>>;

    /// Returns the number of jobs per lane and tally.
    async fn counts(&self) -> Result<Counts>;

    /// Returns how many jobs in flight of each lane are `SCHEDULED` and how many are `PROCESSING`. The others are `ASSIGNED`.
    async fn in_flight_counts(&self) -> Result<Vec<InFlightCount>>;
}

#[derive(Clone, PartialEq, Debug)]
pub struct Submitted {
    pub id: JobId,
    pub status: JobState,
    pub created_at: Timestamp,
    /// Whether the job existed before, under the same idempotency key.
    pub existed: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CancelOutcome {
    Cancelled,
    /// A worker has the job; the cancellation was requested.
    Requested {
        state: JobState,
    },
}

/// Result of a retry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Retried {
    pub state: JobState,
    pub retry_count: u32,
}

impl Retried {
    /// A failed or cancelled job starts over.
    pub const FROM_START: Retried = Retried { state: JobState::Pending, retry_count: 0 };
}

#[derive(Clone, Debug, Default)]
pub struct JobPatch {
    pub priority: Option<Priority>,
    pub payload: Option<String>,
    /// `Some(None)`: as soon as possible.
    pub scheduled_at: Option<Option<Timestamp>>,
    pub expires_at: Option<Option<Timestamp>>,
    pub max_retries: Option<u32>,
    pub retry_delay_ms: Option<u64>,
    pub timeout_ms: Option<u64>,
    /// `Some(None)`: the job has the name of its type.
    pub name: Option<Option<String>>,
    pub webhook_url: Option<Option<String>>,
    pub tags: Option<Vec<String>>,
}

impl JobPatch {
    pub fn apply_to(&self, options: &mut JobOptions) {
        if let Some(name) = &self.name {
            options.name = name.clone();
        }
        if let Some(webhook_url) = &self.webhook_url {
            options.webhook_url = webhook_url.clone();
        }
        if let Some(tags) = &self.tags {
            options.tags = tags.clone();
        }
        if let Some(scheduled_at) = self.scheduled_at {
            options.scheduled_at = scheduled_at;
        }
        if let Some(expires_at) = self.expires_at {
            options.expires_at = expires_at;
        }
        if let Some(max_retries) = self.max_retries {
            options.retry.max_retries = max_retries;
        }
        if let Some(retry_delay_ms) = self.retry_delay_ms {
            options.retry.retry_delay_ms = retry_delay_ms;
        }
        if self.timeout_ms.is_some() {
            options.timeout_ms = self.timeout_ms;
        }
    }

    /// Describes for the log what changes and to what. The new payload is not shown.
    pub fn describe(&self) -> String {
        let mut parts = Vec::new();
        if let Some(priority) = self.priority {
            parts.push(format!("priority {priority}"));
        }
        if self.payload.is_some() {
            parts.push("payload".into());
        }
        for (name, time) in [("scheduledAt", self.scheduled_at), ("expiresAt", self.expires_at)] {
            match time {
                Some(Some(at)) => parts.push(format!("{name} {at}")),
                Some(None) => parts.push(format!("no {name}")),
                None => {}
            }
        }
        if let Some(n) = self.max_retries {
            parts.push(format!("maxRetries {n}"));
        }
        if let Some(ms) = self.retry_delay_ms {
            parts.push(format!("retryDelay {ms}"));
        }
        if let Some(ms) = self.timeout_ms {
            parts.push(format!("timeoutMs {ms}"));
        }
        if let Some(name) = &self.name {
            parts.push(name.as_ref().map_or("no name".into(), |name| format!("name \"{name}\"")));
        }
        // The URL may contain a secret of its receiver.
        if let Some(url) = &self.webhook_url {
            parts.push(if url.is_some() { "webhookUrl".into() } else { "no webhookUrl".into() });
        }
        if let Some(tags) = &self.tags {
            parts.push(if tags.is_empty() { "no tags".into() } else { format!("tags {}", tags.join(" ")) });
        }
        parts.join(", ")
    }
}

/// Result of one round over due jobs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DueResult {
    pub promoted: usize,
    pub expired: usize,
    pub unblocked: usize,
    /// When the next round has something to do.
    pub next_at: Option<Timestamp>,
    /// Whether more jobs are due now.
    pub more: bool,
}

impl DueResult {
    pub fn handled(&self) -> usize {
        self.promoted + self.expired + self.unblocked
    }
}

/// How long finished jobs, entries of the audit log and the history are kept.
#[derive(Clone, Debug)]
pub struct Retention {
    pub completed_ms: i64,
    pub cancelled_ms: i64,
    pub failed_ms: i64,
    /// For entries of the audit log, and for finished bulk actions.
    pub audit_ms: i64,
    pub hourly_history_ms: i64,
    pub daily_history_ms: i64,
}

impl Retention {
    /// Returns the time after which no finished job is kept.
    pub fn longest_ms(&self) -> i64 {
        self.completed_ms.max(self.cancelled_ms).max(self.failed_ms)
    }
}

impl Default for Retention {
    fn default() -> Self {
        const DAY_MS: i64 = 24 * 3_600_000;
        Retention {
            completed_ms: 7 * DAY_MS,
            cancelled_ms: 7 * DAY_MS,
            failed_ms: 30 * DAY_MS,
            audit_ms: 365 * DAY_MS,
            hourly_history_ms: 14 * DAY_MS,
            daily_history_ms: 730 * DAY_MS,
        }
    }
}

/// A filter over jobs. Its JSON form, stored with a bulk action, has the field names of the API.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Filter {
    #[serde(rename = "status")]
    pub states: Vec<JobState>,
    #[serde(rename = "priority")]
    pub priorities: Vec<Priority>,
    #[serde(rename = "type")]
    pub kind: Option<String>,
    pub name: Option<String>,
    pub queue: Option<String>,
    /// Queues that the caller is restricted to. `None`: all queues.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queues: Option<Vec<String>>,
    pub tag: Option<String>,
    pub correlation_id: Option<String>,
    pub schedule_id: Option<String>,
    pub created_after: Option<Timestamp>,
    pub created_before: Option<Timestamp>,
    /// The worker that has the job, or had it when it finished.
    pub worker_id: Option<String>,
    /// Part of a name, type or queue, or exactly an id, a correlation id, a unique key or an idempotency key.
    pub q: Option<String>,
    /// Part of the error that the job shows, case-insensitive.
    pub error: Option<String>,
    /// Reason of the error that the job shows.
    pub reason: Option<ErrorReason>,
    /// Part of the payload as it was submitted, case-insensitive.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub payload: Option<String>,
}

/// What the counters of a lane count: jobs in one or several states, and totals.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[repr(i16)]
pub enum Tally {
    Pending = 0,
    Queued = 1,
    /// `SCHEDULED`, `ASSIGNED` or `PROCESSING`.
    InFlight = 2,
    Retrying = 3,
    Completed = 4,
    Failed = 5,
    Cancelled = 6,
    /// Runs that have ended so far. This and the following tallies only grow, so that rates can be derived from them.
    Ran = 7,
    /// Jobs that have failed so far, whatever happened to them later.
    EverFailed = 8,
    /// Jobs that were cancelled so far.
    EverCancelled = 9,
    /// Runs that have failed so far.
    FailedRuns = 10,
    /// Runs that a timeout ended, and jobs that expired.
    TimedOut = 11,
    /// Completed jobs that were deleted. Together with those that exist, they are all jobs that have ever completed.
    RemovedCompleted = 12,
    /// Other jobs that were deleted.
    RemovedOther = 13,
}

impl Tally {
    pub const ALL: [Tally; 14] = [
        Tally::Pending,
        Tally::Queued,
        Tally::InFlight,
        Tally::Retrying,
        Tally::Completed,
        Tally::Failed,
        Tally::Cancelled,
        Tally::Ran,
        Tally::EverFailed,
        Tally::EverCancelled,
        Tally::FailedRuns,
        Tally::TimedOut,
        Tally::RemovedCompleted,
        Tally::RemovedOther,
    ];

    pub fn of(state: JobState) -> Tally {
        match state {
            JobState::Pending => Tally::Pending,
            JobState::Queued => Tally::Queued,
            JobState::Scheduled | JobState::Assigned | JobState::Processing => Tally::InFlight,
            JobState::Retrying => Tally::Retrying,
            JobState::Completed => Tally::Completed,
            JobState::Failed => Tally::Failed,
            JobState::Cancelled => Tally::Cancelled,
        }
    }

    pub fn from_i16(number: i16) -> Option<Tally> {
        Tally::ALL.into_iter().find(|tally| *tally as i16 == number)
    }
}

/// Jobs of a lane that are `SCHEDULED` or `PROCESSING`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InFlightCount {
    pub lane: LaneId,
    pub state: JobState,
    pub count: i64,
}

#[derive(Clone, PartialEq, Debug, Default)]
pub struct Counts {
    pub by_lane: BTreeMap<(LaneId, Tally), i64>,
}

/// What has happened to jobs since the database was created. These numbers only grow.
///
/// The numbers of created and completed jobs are sums of other counters, so that submitting and completing a job needs
/// no further counter.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum JobTotal {
    Created = 0,
    Completed = 1,
    /// Jobs that failed permanently.
    Failed = 2,
    Cancelled = 3,
    /// Runs that a timeout ended, and jobs that expired.
    TimedOut = 4,
    /// Runs that failed, whether or not their job was retried.
    RunFailed = 5,
}

impl JobTotal {
    pub const ALL: [JobTotal; 6] = [
        JobTotal::Created,
        JobTotal::Completed,
        JobTotal::Failed,
        JobTotal::Cancelled,
        JobTotal::TimedOut,
        JobTotal::RunFailed,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            JobTotal::Created => "created",
            JobTotal::Completed => "completed",
            JobTotal::Failed => "failed",
            JobTotal::Cancelled => "cancelled",
            JobTotal::TimedOut => "timed_out",
            JobTotal::RunFailed => "run_failed",
        }
    }

    /// Returns the tallies that add up to this total. Every job that was ever created is in one state or was deleted.
    fn tallies(self) -> &'static [Tally] {
        use Tally::*;
        match self {
            JobTotal::Created => {
                &[Pending, Queued, InFlight, Retrying, Completed, Failed, Cancelled, RemovedCompleted, RemovedOther]
            }
            JobTotal::Completed => &[Completed, RemovedCompleted],
            JobTotal::Failed => &[EverFailed],
            JobTotal::Cancelled => &[EverCancelled],
            JobTotal::TimedOut => &[TimedOut],
            JobTotal::RunFailed => &[FailedRuns],
        }
    }
}

impl Counts {
    /// Returns how often `total` has happened in a lane.
    pub fn so_far(&self, lane: LaneId, total: JobTotal) -> i64 {
        total.tallies().iter().filter_map(|tally| self.by_lane.get(&(lane, *tally))).sum()
    }

    /// Returns every lane that has a counter.
    pub fn lanes(&self) -> impl Iterator<Item = LaneId> {
        let lanes: std::collections::BTreeSet<LaneId> = self.by_lane.keys().map(|(lane, _)| *lane).collect();
        lanes.into_iter()
    }

    pub fn total(&self, tally: Tally) -> i64 {
        self.by_lane.iter().filter(|((_, t), _)| *t == tally).map(|(_, n)| n).sum()
    }
}

impl JobExit {
    pub fn of(state: JobState) -> JobExit {
        if state.is_terminal() { JobExit::Finished } else { JobExit::Requeued }
    }
}

/// How a job leaves a queue or a worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum JobExit {
    /// Goes back to a queue.
    Requeued,
    /// Has finished.
    Finished,
    /// Is deleted with everything that belongs to it.
    Deleted,
}

/// What a job waits for, to explain why it is not running.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct JobPosition {
    /// Ready jobs of its queue that come before it, counted up to `JobPosition::MAX_AHEAD`.
    pub ahead: u64,
    /// Parents it waits for, with their state. `None`: the parent was deleted.
    pub parents: Vec<(JobId, Option<JobState>)>,
    /// Number of jobs with its concurrencyKey that are in flight.
    pub key_in_flight: u64,
    /// The first of these jobs, up to `JobPosition::MAX_NAMED`.
    pub key_jobs: Vec<JobId>,
    /// Starts that the rate limit of its key still allows.
    pub key_bucket: Option<Bucket>,
    pub owner: Option<ClaimOwner>,
    /// When and why its cancellation was requested.
    pub cancel: Option<(Timestamp, String)>,
}

/// Message of a conflict over a `uniqueKey`. It does not name the other job, which the caller may not be allowed to see.
pub(crate) const UNIQUE_KEY_TAKEN: &str = "a job with this uniqueKey has not finished";

impl JobPosition {
    pub const MAX_AHEAD: u64 = 10_000;
    pub(crate) const MAX_NAMED: usize = 10;
}

/// Owner of a job that is in flight.
#[derive(Clone, PartialEq, Debug)]
pub struct ClaimOwner {
    pub claimed_at: Timestamp,
    /// Name of the server that runs the job or supervises its worker. `None`: that server is not registered.
    pub server: Option<String>,
    /// When the lease of the owner ends. `None`: the owner is not alive; the job is about to be released.
    pub lease_until: Option<Timestamp>,
}

/// Returns the number by which a state is stored.
pub fn state_code(state: JobState) -> i16 {
    state as i16
}

/// Returns the state that is stored as this number, or `Pending` for an unknown number.
pub fn state_of_code(code: i16) -> JobState {
    usize::try_from(code).ok().and_then(|at| JobState::ALL.get(at)).copied().unwrap_or(JobState::Pending)
}
