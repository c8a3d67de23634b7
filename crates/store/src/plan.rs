//! Decides which rows a submission writes. The SQLite and PostgreSQL stores write them.

use std::collections::{BTreeMap, HashMap, HashSet};

use faena_domain::{
    ErrorReason, FieldError, JobId, JobOptions, JobState, LogDetails, LogEvent, LogLine, NewJob, OnParentFailure,
    Timestamp,
};

use sha2::{Digest, Sha256};

use crate::{Lane, LaneId, StoreError, Tally};

/// Labels by which jobs are listed, besides their lane.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(i16)]
pub enum LabelKind {
    Tag = 0,
    Schedule = 1,
    /// A name that differs from the type.
    Name = 2,
    /// The id of a job that it depends on. Unlike a row of `dependency` it stays when the parent has ended.
    Parent = 3,
}

pub type Label = (LabelKind, String);

/// Keys that name at most one job each.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[repr(i16)]
pub enum KeyKind {
    Idempotency = 0,
    /// Names the job until it has finished.
    Unique = 1,
}

/// The rows that a submitted job needs.
pub struct PlannedJob {
    pub id: JobId,
    pub lane: LaneId,
    pub correlation: Option<String>,
    pub options: Option<String>,
    pub payload: String,
    pub placement: Placement,
    /// The number of its `concurrencyKey`.
    pub key: Option<i64>,
    pub labels: Vec<Label>,
    pub expires_at: Option<Timestamp>,
    pub parents: Vec<JobId>,
}

/// State in which a submitted job begins.
#[derive(Clone, PartialEq, Debug)]
pub enum Placement {
    Ready,
    Delayed {
        due_at: Timestamp,
    },
    /// Waits for parents. Checked again at this time, even if no parent has released it.
    Blocked {
        recheck_at: Timestamp,
    },
    /// A parent has already failed or was cancelled.
    Cancelled {
        cause: String,
    },
}

impl Placement {
    pub fn state(&self) -> JobState {
        match self {
            Placement::Ready => JobState::Queued,
            Placement::Delayed { .. } | Placement::Blocked { .. } => JobState::Pending,
            Placement::Cancelled { .. } => JobState::Cancelled,
        }
    }
}

/// State of each parent: `None` while it has not finished.
pub type Parents = HashMap<JobId, Option<JobState>>;

/// Checks that every parent exists, or is a job of the same batch.
pub fn check_parents(jobs: &[NewJob], known: &Parents) -> Result<(), StoreError> {
    let siblings: HashSet<JobId> = jobs.iter().map(|job| job.id).collect();
    let mut errors = Vec::new();
    for (index, job) in jobs.iter().enumerate() {
        for parent in &job.options.depends_on {
            if !known.contains_key(parent) && !siblings.contains(parent) {
                let path = if jobs.len() == 1 { "dependsOn".into() } else { format!("jobs[{index}].dependsOn") };
                errors.push(FieldError::new(path, format!("there is no job {parent}")));
            }
        }
    }
    if errors.is_empty() { Ok(()) } else { Err(StoreError::Invalid(errors)) }
}

/// Returns whether no stored row can make the submission of this job fail.
pub fn is_plain(job: &NewJob) -> bool {
    let options = &job.options;
    options.idempotency_key.is_none() && options.unique_key.is_none() && options.depends_on.is_empty()
}

/// Returns the ids of all parents of these jobs that are not among them, each once.
pub fn parent_ids(jobs: &[NewJob]) -> Vec<JobId> {
    let mut parents: Vec<JobId> = jobs.iter().flat_map(|job| job.options.depends_on.iter().copied()).collect();
    if parents.is_empty() {
        return parents;
    }
    parents.sort_unstable();
    parents.dedup();
    let siblings: HashSet<JobId> = jobs.iter().map(|job| job.id).collect();
    parents.retain(|parent| !siblings.contains(parent));
    parents
}

/// Returns the approximate number of rows that a submission of these jobs writes. A large payload counts as several.
pub fn weight(jobs: &[NewJob]) -> usize {
    let of = |job: &NewJob| 1 + 2 * job.options.depends_on.len() + job.options.tags.len() + job.payload.len() / 1_024;
    jobs.iter().map(of).sum()
}

/// Returns the jobs of a batch whose idempotency key an earlier job of the batch has, each with that job.
///
/// Fails if jobs with the same key differ, or if two jobs have the same `uniqueKey`.
pub fn repeated(jobs: &[NewJob]) -> Result<HashMap<JobId, JobId>, StoreError> {
    let conflict = |message: &str| Err(StoreError::Conflict { message: message.into(), existing_job: None });
    let mut repeated = HashMap::new();
    let mut first: HashMap<&str, &NewJob> = HashMap::new();
    let mut unique = HashSet::new();
    for job in jobs {
        if let Some(key) = &job.options.idempotency_key {
            match first.get(key.as_str()) {
                Some(same) if same.fingerprint == job.fingerprint => {
                    repeated.insert(job.id, same.id);
                    continue;
                }
                Some(_) => return conflict("two different jobs of this batch have the same idempotency key"),
                None => first.insert(key, job),
            };
        }
        if let Some(key) = &job.options.unique_key
            && !unique.insert(key)
        {
            return conflict("two jobs of this batch have the same uniqueKey");
        }
    }
    Ok(repeated)
}

pub fn plan(job: &NewJob, lane: LaneId, known: &Parents, now: Timestamp) -> PlannedJob {
    let placement = placement_of(job, known, now);
    let text = stored_options(&job.options);
    PlannedJob {
        id: job.id,
        lane,
        correlation: job.correlation_id.clone().filter(|text| *text != job.id.to_string()),
        options: text,
        payload: job.payload.clone(),
        parents: if matches!(placement, Placement::Blocked { .. }) {
            open_parents(&job.options, known)
        } else {
            Vec::new()
        },
        placement,
        key: job.options.concurrency_key.as_deref().map(key_number),
        labels: labels_of(&job.options),
        expires_at: job.options.expires_at,
    }
}

/// Returns the labels of a job, each once.
pub fn labels_of(options: &JobOptions) -> Vec<Label> {
    let mut labels: Vec<Label> = Vec::new();
    for tag in &options.tags {
        if !labels.iter().any(|(_, known)| known == tag) {
            labels.push((LabelKind::Tag, tag.clone()));
        }
    }
    labels.extend(options.schedule_id.clone().map(|schedule| (LabelKind::Schedule, schedule)));
    labels.extend(options.name.clone().map(|name| (LabelKind::Name, name)));
    labels.extend(options.depends_on.iter().map(|parent| (LabelKind::Parent, parent.to_string())));
    labels
}

/// Returns the number of a `concurrencyKey`: the first eight bytes of its SHA-256.
///
/// If two keys have the same number, they share a limit. Nothing else depends on the number.
pub fn key_number(key: &str) -> i64 {
    let digest = Sha256::digest(key.as_bytes());
    i64::from_be_bytes(digest[..8].try_into().expect("a digest has 32 bytes"))
}

/// Returns the options as JSON; `None` if all have their defaults, as most jobs do.
pub fn stored_options(options: &JobOptions) -> Option<String> {
    (*options != JobOptions::default()).then(|| serde_json::to_string(options).expect("options are JSON"))
}

/// Returns the parents that have not finished. The others will not release this job.
fn open_parents(options: &JobOptions, known: &Parents) -> Vec<JobId> {
    let open = |parent: &&JobId| known.get(*parent).copied().flatten().is_none();
    options.depends_on.iter().filter(open).copied().collect()
}

fn placement_of(job: &NewJob, known: &Parents, now: Timestamp) -> Placement {
    let mut open = false;
    for parent in &job.options.depends_on {
        match known.get(parent).copied().flatten() {
            None => open = true,
            Some(JobState::Completed) => {}
            Some(_) if job.options.on_parent_failure == OnParentFailure::Run => {}
            Some(state) => return Placement::Cancelled { cause: parent_cause(*parent, Some(state)) },
        }
    }
    if open {
        return Placement::Blocked { recheck_at: now.plus_ms(FIRST_RECHECK_MS) };
    }
    match job.options.scheduled_at {
        Some(due_at) if due_at > now => Placement::Delayed { due_at },
        _ => Placement::Ready,
    }
}

/// Delay of the first check of a job that waits for parents; later checks are less and less frequent.
///
/// The job is normally released when its parents finish. But the node that should have released it may have died, or may have
/// read the list of dependents just before this job was added.
pub const FIRST_RECHECK_MS: i64 = 2_000;

pub fn next_recheck_at(id: JobId, now: Timestamp) -> Timestamp {
    let age_ms = now.ms_since(id.created_at());
    now.plus_ms(age_ms.clamp(FIRST_RECHECK_MS, 3_600_000))
}

/// A job that was removed from `ready` (with its ready time) or `waiting`.
#[derive(Clone, Copy, Default)]
pub struct Dequeued {
    pub retry_count: u32,
    pub ready_at: Option<Timestamp>,
}

impl Dequeued {
    /// Returns the log of a job that ends without a run.
    pub fn log(&self, now: Timestamp, event: LogEvent, details: &str) -> String {
        let queued = self.ready_at.map(|at| LogLine::new(at, LogEvent::Queued, ""));
        let lines: Vec<LogLine> = queued.into_iter().chain([LogLine::new(now, event, details)]).collect();
        LogLine::chunk(&lines)
    }
}

pub fn parent_cause(parent: JobId, state: Option<JobState>) -> String {
    LogDetails::ParentEnded { parent: &parent.to_string(), state }.to_string()
}

/// Returns the error of a job that no worker could run.
pub fn no_handler(lane: &Lane) -> String {
    format!("no worker can run type {} (queue {})", lane.kind, lane.queue)
}

/// Changes of the counters in one transaction.
#[derive(Default, Debug)]
pub struct Deltas(pub BTreeMap<(LaneId, Tally), i64>);

impl Deltas {
    pub fn add(&mut self, lane: LaneId, tally: Tally, n: i64) {
        *self.0.entry((lane, tally)).or_default() += n;
    }

    /// Counts a submitted job.
    pub fn created(&mut self, lane: LaneId, tally: Tally) {
        self.add(lane, tally, 1);
        self.count_reached(lane, tally, 1);
    }

    pub fn moved(&mut self, lane: LaneId, from: Tally, to: Tally, n: i64) {
        if from == Tally::InFlight {
            self.add(lane, Tally::Ran, n);
            if matches!(to, Tally::Retrying | Tally::Failed) {
                self.add(lane, Tally::FailedRuns, n);
            }
        }
        self.add(lane, from, -n);
        self.add(lane, to, n);
        self.count_reached(lane, to, n);
    }

    /// Counts jobs that are deleted.
    pub fn removed(&mut self, lane: LaneId, from: Tally, n: i64) {
        self.add(lane, from, -n);
        let removed = if from == Tally::Completed { Tally::RemovedCompleted } else { Tally::RemovedOther };
        self.add(lane, removed, n);
    }

    /// Counts a run or a job that exceeded a time limit.
    pub fn timed_out(&mut self, lane: LaneId, reason: ErrorReason) {
        if matches!(reason, ErrorReason::Timeout | ErrorReason::Expired) {
            self.add(lane, Tally::TimedOut, 1);
        }
    }

    fn count_reached(&mut self, lane: LaneId, tally: Tally, n: i64) {
        match tally {
            Tally::Failed => self.add(lane, Tally::EverFailed, n),
            Tally::Cancelled => self.add(lane, Tally::EverCancelled, n),
            _ => {}
        }
    }

    pub fn merge(&mut self, other: Deltas) {
        for (key, n) in other.0 {
            *self.0.entry(key).or_default() += n;
        }
    }

    pub fn columns(&self) -> (Vec<LaneId>, Vec<i16>, Vec<i64>) {
        let changed = self.0.iter().filter(|(_, n)| **n != 0);
        let mut columns = (Vec::new(), Vec::new(), Vec::new());
        for ((lane, tally), n) in changed {
            columns.0.push(*lane);
            columns.1.push(*tally as i16);
            columns.2.push(*n);
        }
        columns
    }
}
