//! Builds the view of a job from its rows.

use std::collections::HashMap;

use faena_domain::{
    Attempt, ErrorReason, JobId, JobOptions, JobState, JobView, LogDetails, LogEntry, LogEvent, Run, Step, Timestamp,
};
use serde_json::value::RawValue;
use uuid::Uuid;

use crate::{
    Cause, Lane, Result, StoreError,
    job_log::{MessageRow, SHOWN_ENTRIES, StaleRow},
    progress,
    workers::JobWorker,
};

pub struct JobRow {
    pub id: JobId,
    pub lane: Lane,
    pub correlation: Option<String>,
    pub options: JobOptions,
    pub payload: String,
    /// The last progress that any of its runs reported.
    pub progress: Option<String>,
}

/// Location of a job: its state, with the columns of its row.
pub enum Location {
    Ready {
        ready_at: Timestamp,
        retry_count: u32,
        /// When it began to wait for a limit, and for which one. Only read for a single job.
        limited: Option<(Timestamp, String)>,
    },
    Waiting {
        state: JobState,
        due_at: Timestamp,
        blocked: bool,
        retry_count: u32,
    },
    /// In a claim, without a report yet.
    Assigned {
        run: Run,
        /// The node or worker that owns the claim.
        owner: Uuid,
        claimed_at: Timestamp,
        ready_at: Timestamp,
        retry_count: u32,
    },
    Running(RunningRow),
    Finished(FinishedRow),
    /// Only the job row exists: a read without a snapshot found it while it moved between two tables.
    Between,
}

impl Location {
    /// Returns the owner or last owner, if it can be a worker.
    pub fn worker_id(&self) -> Option<Uuid> {
        match self {
            Location::Assigned { owner, .. } => Some(*owner),
            Location::Running(running) => Some(running.worker),
            Location::Finished(end) => end.worker,
            Location::Ready { .. } | Location::Waiting { .. } | Location::Between => None,
        }
    }

    /// Returns the attempts since the job was submitted or last retried manually.
    fn attempts(&self) -> u32 {
        match self {
            Location::Ready { retry_count, .. }
            | Location::Waiting { retry_count, .. }
            | Location::Assigned { retry_count, .. } => *retry_count,
            Location::Running(running) => running.retry_count + 1,
            Location::Finished(end) => end.attempts(),
            Location::Between => 0,
        }
    }
}

/// The known workers among the owners of jobs.
pub type JobWorkers = HashMap<Uuid, JobWorker>;

pub struct RunningRow {
    pub run: Run,
    pub worker: Uuid,
    pub retry_count: u32,
    pub ready_at: Timestamp,
    pub claimed_at: Timestamp,
    pub started_at: Timestamp,
    pub updated_at: Timestamp,
}

/// End of a run: the last one (`done`, `ended`) or an earlier one (`attempt`).
pub struct FinishedRow {
    pub state: JobState,
    pub run: Run,
    pub retry_count: u32,
    pub worker: Option<Uuid>,
    pub started_at: Option<Timestamp>,
    pub finished_at: Timestamp,
    pub result: Option<String>,
    pub error: Option<String>,
    pub reason: Option<String>,
    pub log: String,
}

impl FinishedRow {
    /// Returns the attempts since the job was submitted or last retried manually.
    ///
    /// A failed last run counts as an attempt even if its start is not known: it was lost, or timed out before it
    /// started.
    pub fn attempts(&self) -> u32 {
        let has_run = self.run > 0 && (self.started_at.is_some() || self.state == JobState::Failed);
        self.retry_count + u32::from(has_run)
    }
}

/// Further rows of a job. For a list, only the last attempt and the last message are read.
#[derive(Default)]
pub struct Details {
    pub attempts: Vec<FinishedRow>,
    /// Oldest first; only the newest ones, unless the whole log is read.
    pub messages: Vec<MessageRow>,
    /// The number of messages before them.
    pub omitted: u64,
    pub stale: Option<StaleRow>,
    pub steps: Vec<StepRow>,
}

pub struct StepRow {
    pub name: String,
    pub run: Run,
    pub at: Timestamp,
    pub result: String,
}

impl StepRow {
    pub fn step(self) -> Result<Step> {
        Ok(Step { name: self.name, result: raw(self.result)?, at: self.at, run: self.run })
    }
}

pub fn parse_options(text: Option<&str>) -> Result<JobOptions> {
    match text {
        None => Ok(JobOptions::default()),
        Some(text) => serde_json::from_str(text).map_err(|e| StoreError::Internal(Cause::new("options of a job", e))),
    }
}

/// Everything that is needed to build the view of a job.
pub struct JobParts {
    pub row: JobRow,
    pub location: Location,
    pub details: Details,
    pub workers: JobWorkers,
}

/// Builds the view of a job, with the newest entries of its log.
pub fn view(parts: JobParts) -> Result<JobView> {
    let mut view = whole_view(parts)?;
    let more = view.execution_log.len().saturating_sub(SHOWN_ENTRIES);
    view.execution_log.drain(..more);
    view.execution_log_omitted += more as u64;
    Ok(view)
}

/// Builds the view with every log entry that was read.
pub fn whole_view(parts: JobParts) -> Result<JobView> {
    let JobParts { row, location, details, workers } = parts;
    listed_view(row, location, details, &workers)
}

/// Builds the view of one of several jobs.
pub fn listed_view(row: JobRow, location: Location, details: Details, workers: &JobWorkers) -> Result<JobView> {
    let Details { attempts, messages, omitted, stale, steps } = details;
    let steps = steps.into_iter().map(StepRow::step).collect::<Result<Vec<Step>>>()?;
    let mut log = stored_log(row.id, &attempts, &messages, &steps);
    log.extend(stale.map(StaleRow::entry));
    let attempt = row.options.earlier_attempts + location.attempts();
    let mut view = queued_view(row, steps, attempts.last())?;
    view.attempt = attempt;
    locate(&mut view, &mut log, location, workers)?;
    sort_log(&mut log, &attempts);
    add_values(&mut log, &view, &attempts, workers);
    if view.status.is_terminal() {
        view.queued_at = log.iter().rev().find(|entry| entry.event == LogEvent::Queued).map(|entry| entry.timestamp);
    }
    view.updated_at = log.last().map_or(view.updated_at, |entry| entry.timestamp.max(view.updated_at));
    view.execution_log = log;
    view.execution_log_omitted = omitted;
    Ok(view)
}

/// Returns the entries that are stored outside the row of the current state.
fn stored_log(id: JobId, attempts: &[FinishedRow], messages: &[MessageRow], steps: &[Step]) -> Vec<LogEntry> {
    let created_at = id.created_at();
    let mut log = vec![LogEntry { timestamp: created_at, event: LogEvent::Created, details: String::new(), run: None }];
    for attempt in attempts {
        LogEntry::read_chunk(&attempt.log, Some(attempt.run), &mut log);
    }
    for message in messages {
        message.read(&mut log);
    }
    log.extend(steps.iter().map(|step| LogEntry {
        timestamp: step.at,
        event: LogEvent::StepCompleted,
        details: step.name.clone(),
        run: Some(step.run),
    }));
    log
}

/// Returns the view of a job as if it were queued, after its last attempt.
fn queued_view(row: JobRow, steps: Vec<Step>, last_attempt: Option<&FinishedRow>) -> Result<JobView> {
    let created_at = row.id.created_at();
    let options = row.options;
    let retry = &options.retry;
    Ok(JobView {
        id: row.id,
        name: options.name.clone().unwrap_or_else(|| row.lane.kind.clone()),
        kind: row.lane.kind,
        queue: row.lane.queue,
        status: JobState::Queued,
        priority: row.lane.priority,
        payload: raw(row.payload)?,
        max_retries: retry.max_retries,
        retry_count: 0,
        retry_delay: retry.retry_delay_ms,
        backoff_multiplier: retry.backoff_multiplier,
        max_delay: retry.max_delay_ms,
        retry_delays: retry.retry_delays_ms.clone(),
        jitter: retry.jitter,
        retry_on: retry.retry_on.to_json(),
        timeout_ms: options.timeout_ms,
        created_at,
        updated_at: created_at,
        scheduled_at: options.scheduled_at,
        expires_at: options.expires_at,
        queued_at: None,
        started_at: None,
        completed_at: None,
        next_attempt_at: None,
        result: None,
        error: last_attempt.and_then(|attempt| attempt.error.clone()),
        error_reason: last_attempt.and_then(|attempt| attempt.reason.as_deref().and_then(ErrorReason::parse)),
        progress: progress::parse(row.progress.as_deref()),
        steps,
        attempts: Vec::new(),
        execution_log: Vec::new(),
        execution_log_omitted: 0,
        schedule_id: options.schedule_id,
        schedule_due: options.schedule_due,
        worker_id: None,
        run: last_attempt.map(|attempt| attempt.run),
        attempt: 0,
        webhook_url: options.webhook_url,
        correlation_id: row.correlation.unwrap_or_else(|| row.id.to_string()),
        idempotency_key: options.idempotency_key,
        unique_key: options.unique_key,
        concurrency_key: options.concurrency_key,
        depends_on: options.depends_on,
        on_parent_failure: options.on_parent_failure,
        tags: options.tags,
    })
}

/// Completes the view with the row of the current state, and the log with the entries that follow from it.
fn locate(view: &mut JobView, log: &mut Vec<LogEntry>, location: Location, workers: &JobWorkers) -> Result<()> {
    let mut derived =
        |at: Timestamp, event, run| log.push(LogEntry { timestamp: at, event, details: String::new(), run });
    match location {
        Location::Ready { ready_at, retry_count, limited } => {
            derived(ready_at, LogEvent::Queued, None);
            if let Some((at, details)) = limited {
                let timestamp = at.max(ready_at);
                log.push(LogEntry { timestamp, event: LogEvent::Limited, details, run: None });
            }
            view.queued_at = Some(ready_at);
            view.retry_count = retry_count;
        }
        Location::Waiting { state, due_at, blocked, retry_count } => {
            view.status = state;
            view.retry_count = retry_count;
            view.next_attempt_at = (state == JobState::Retrying && !blocked).then_some(due_at);
        }
        Location::Assigned { run, owner, claimed_at, ready_at, retry_count } => {
            let worker = workers.get(&owner);
            let (event, state) = if worker.is_some_and(|worker| worker.is_starting) {
                (LogEvent::Scheduled, JobState::Scheduled)
            } else {
                (LogEvent::Assigned, JobState::Assigned)
            };
            derived(ready_at, LogEvent::Queued, Some(run));
            derived(claimed_at, event, Some(run));
            view.status = state;
            view.worker_id = worker.map(|worker| worker.key.clone());
            view.queued_at = Some(ready_at);
            view.run = Some(run);
            view.retry_count = retry_count;
        }
        Location::Running(running) => {
            derived(running.ready_at, LogEvent::Queued, Some(running.run));
            derived(running.claimed_at, LogEvent::Assigned, Some(running.run));
            derived(running.started_at, LogEvent::Started, Some(running.run));
            view.status = JobState::Processing;
            view.queued_at = Some(running.ready_at);
            view.started_at = Some(running.started_at);
            view.updated_at = running.updated_at;
            view.run = Some(running.run);
            view.worker_id = Some(worker_name(running.worker, workers));
            view.retry_count = running.retry_count;
        }
        Location::Finished(end) => {
            LogEntry::read_chunk(&end.log, (end.run > 0).then_some(end.run), log);
            view.status = end.state;
            view.retry_count = end.retry_count;
            view.started_at = end.started_at;
            view.completed_at = Some(end.finished_at);
            view.run = if end.run > 0 { Some(end.run) } else { view.run };
            view.worker_id = end.worker.map(|worker| worker_name(worker, workers));
            view.result = end.result.map(raw).transpose()?;
            view.error = end.error;
            view.error_reason = end.reason.as_deref().and_then(ErrorReason::parse);
        }
        Location::Between => {}
    }
    Ok(())
}

/// Adds details that are not stored in each entry: which worker received the job, and how long the run took.
fn add_values(log: &mut [LogEntry], view: &JobView, attempts: &[FinishedRow], workers: &JobWorkers) {
    let worker_of = |run: Option<Run>| match attempts.iter().find(|attempt| Some(attempt.run) == run) {
        Some(attempt) => attempt.worker.map(|worker| worker_name(worker, workers)),
        None => view.worker_id.clone().filter(|_| run == view.run),
    };
    for entry in log.iter_mut().filter(|entry| entry.details.is_empty()) {
        let text = match &entry.event {
            LogEvent::Assigned => {
                worker_of(entry.run).map(|worker| LogDetails::Assigned { worker: &worker }.to_string())
            }
            LogEvent::Scheduled => {
                worker_of(entry.run).map(|worker| LogDetails::Starting { worker: &worker }.to_string())
            }
            LogEvent::Completed => {
                view.started_at.map(|at| LogDetails::Took { ms: entry.timestamp.ms_since(at) }.to_string())
            }
            _ => None,
        };
        entry.details = text.unwrap_or_default();
    }
}

/// Returns the ends of a job's runs as they are shown.
pub fn attempts(rows: Vec<FinishedRow>, workers: &JobWorkers) -> Vec<Attempt> {
    rows.into_iter()
        .map(|row| Attempt {
            run: (row.run > 0).then_some(row.run),
            status: row.state,
            worker_id: row.worker.map(|worker| worker_name(worker, workers)),
            started_at: row.started_at,
            finished_at: row.finished_at,
            error: row.error,
            error_reason: row.reason.as_deref().and_then(ErrorReason::parse),
        })
        .collect()
}

/// Returns the key of a worker, or the id of its registration if that was deleted.
fn worker_name(id: Uuid, workers: &JobWorkers) -> String {
    workers.get(&id).map_or_else(|| id.to_string(), |worker| worker.key.clone())
}

/// Sorts entries by time; within one millisecond by run, and within a run by the order of a job's life.
///
/// Servers have different clocks, and a clock can be set back. So the entries of a run are moved after the end of the
/// previous run, and its start is moved before its end.
fn sort_log(log: &mut [LogEntry], attempts: &[FinishedRow]) {
    let created = log.iter().find(|entry| entry.event == LogEvent::Created);
    let created_at = created.map_or(Timestamp::from_ms(0), |entry| entry.timestamp);
    let mut latest = created_at;
    let ends: Vec<Timestamp> = attempts
        .iter()
        .map(|attempt| {
            latest = latest.max(attempt.finished_at);
            latest
        })
        .collect();
    let attempt_index = |entry: &LogEntry| match entry.run {
        Some(run) => attempts.iter().position(|attempt| attempt.run == run).unwrap_or(attempts.len()),
        None => ends.iter().filter(|end| **end <= entry.timestamp).count(),
    };
    for entry in log.iter_mut().filter(|entry| entry.run.is_some()) {
        let attempt_index = attempt_index(entry);
        // A returned job keeps its old ready time, although it was queued again only when it was returned.
        let earliest = attempt_index.checked_sub(1).and_then(|before| ends.get(before)).copied().unwrap_or(created_at);
        entry.timestamp = entry.timestamp.max(earliest);
        let is_start = matches!(entry.event, LogEvent::Scheduled | LogEvent::Assigned | LogEvent::Started);
        if let Some(end) = ends.get(attempt_index).filter(|_| is_start) {
            entry.timestamp = entry.timestamp.min(*end);
        }
    }
    log.sort_by_cached_key(|entry| (entry.timestamp, attempt_index(entry), rank(&entry.event)));
    for entry in log.iter_mut().filter(|entry| entry.event == LogEvent::Queued) {
        entry.run = None;
    }
}

/// Returns the order of an event among those of one run within one millisecond.
fn rank(event: &LogEvent) -> u8 {
    match event {
        LogEvent::Created => 0,
        LogEvent::Retried | LogEvent::ParentsDone | LogEvent::Patched => 1,
        LogEvent::Queued => 2,
        LogEvent::Limited => 3,
        LogEvent::Scheduled | LogEvent::Assigned => 4,
        LogEvent::Started => 5,
        LogEvent::Failed | LogEvent::Timeout | LogEvent::Orphaned | LogEvent::Expired | LogEvent::RetrySuccess => 7,
        LogEvent::RetryScheduled | LogEvent::Released | LogEvent::Recovered => 8,
        LogEvent::Completed | LogEvent::Cancelled => 9,
        LogEvent::WebhookSent | LogEvent::WebhookFailed => 10,
        _ => 6,
    }
}

fn raw(text: String) -> Result<Box<RawValue>> {
    RawValue::from_string(text).map_err(|e| StoreError::Internal(Cause::new("stored JSON", e)))
}
