//! Collects everything with one correlation id into one timeline.
//!
//! It only reads, a few jobs at a time, and at most a fixed number of each kind: the result says what was left out.

use std::collections::HashMap;

use faena_domain::{
    Attempt, DeliveryOutcome, JobId, JobView, LogDetails, LogEvent, ScheduleId, TaskId, Trace, TraceEntry, TraceJob,
    TraceKind, TraceTask, WebhookAttempt,
};
use faena_machine::Record;
use faena_store::{
    AuditFilter, EventQuery, Filter, Page, Store, StoreError, StoredEvent, TaskFilter, TaskView, WebhookFilter,
};
use futures_util::{StreamExt, TryStreamExt, stream};

const MAX_TASKS: usize = 100;
/// Maximum number of records of one task.
const MAX_RECORDS: usize = 1_000;
const MAX_JOBS: usize = 1_000;
const PAGE: usize = 100;
const MAX_EVENTS: usize = 10_000;
/// Maximum number of webhooks of one job or task.
const MAX_WEBHOOKS: usize = 20;
/// Maximum number of audit entries of one job or task.
const MAX_AUDIT: usize = 100;
/// Number of jobs that are read concurrently.
const CONCURRENCY: usize = 4;
/// Maximum number of ticks of a schedule that are searched for the one that created a job.
const MAX_TICKS: usize = 20;

/// Returns the timeline of a correlation id, or `None` if nothing has this id.
pub async fn trace(store: &dyn Store, correlation_id: &str) -> Result<Option<Trace>, StoreError> {
    let (ids, more_jobs) = jobs(store, correlation_id).await?;
    let mut events = store.event_list(EventQuery::Correlation(correlation_id.into()), MAX_EVENTS + 1).await?;
    let (tasks, more_tasks) = tasks(store, correlation_id).await?;
    if ids.is_empty() && events.is_empty() && tasks.is_empty() {
        return Ok(None);
    }
    let mut omitted = Vec::new();
    if more_tasks {
        omitted.push(format!("only the latest {MAX_TASKS} tasks are shown"));
    }
    if more_jobs {
        omitted.push(format!("only the latest {MAX_JOBS} jobs are shown"));
    }
    if events.len() > MAX_EVENTS {
        events.truncate(MAX_EVENTS);
        omitted.push(format!("only the first {MAX_EVENTS} events are shown"));
    }
    let found: Vec<Option<JobTrace>> =
        stream::iter(ids).map(|id| trace_job(store, id)).buffered(CONCURRENCY).try_collect().await?;
    let mut jobs = Vec::new();
    let mut timeline = Vec::new();
    for (id, _) in &tasks {
        timeline.extend(task_entries(store, *id, &mut omitted).await?);
    }
    for traced in found.into_iter().flatten() {
        jobs.push(traced.job);
        timeline.extend(traced.entries);
    }
    let tasks: Vec<TraceTask> = tasks.into_iter().map(|(id, view)| trace_task(id, view)).collect();
    timeline.extend(events.iter().map(|stored| event(stored, &tasks)));
    // A stable sort: entries of the same millisecond stay in the order in which they were stored.
    timeline.sort_by_key(|entry| entry.at);
    add_dependents(&mut jobs);
    Ok(Some(Trace { correlation_id: correlation_id.into(), tasks, jobs, timeline, omitted }))
}

/// Returns the latest tasks, oldest first, and whether there are more.
async fn tasks(store: &dyn Store, correlation_id: &str) -> Result<(Vec<(TaskId, TaskView)>, bool), StoreError> {
    let filter = TaskFilter { correlation: Some(correlation_id.into()), ..TaskFilter::default() };
    let (mut found, _) = store.task_list(filter, None, MAX_TASKS + 1).await?;
    let has_more = found.len() > MAX_TASKS;
    found.truncate(MAX_TASKS);
    found.reverse();
    let with_ids = found.into_iter().filter_map(|view| Some((view.task.id.parse().ok()?, view)));
    Ok((with_ids.collect(), has_more))
}

fn trace_task(id: TaskId, view: TaskView) -> TraceTask {
    let status = serde_json::to_value(view.task.status).ok();
    TraceTask {
        id,
        machine: view.machine,
        version: view.version,
        title: view.title,
        status: status.and_then(|status| status.as_str().map(str::to_owned)).unwrap_or_default(),
        state: view.task.state(),
        created_at: view.task.created_at,
        ended_at: view.task.ended_at,
    }
}

/// Returns the history of a task, the audit entries about it, and the webhooks about its approvals.
async fn task_entries(store: &dyn Store, id: TaskId, omitted: &mut Vec<String>) -> Result<Vec<TraceEntry>, StoreError> {
    let mut records = store.task_history(id, 0, MAX_RECORDS + 1).await?;
    if records.len() > MAX_RECORDS {
        records.truncate(MAX_RECORDS);
        omitted.push(format!("only the first {MAX_RECORDS} records of task {id} are shown"));
    }
    let mut entries: Vec<TraceEntry> = records.iter().map(|record| task_entry(id, record)).collect();
    entries.extend(
        audit(store, &id.to_string()).await?.into_iter().map(|entry| TraceEntry { task_id: Some(id), ..entry }),
    );
    entries.extend(webhooks(store, WebhookFilter { task: Some(id), ..WebhookFilter::default() }).await?);
    Ok(entries)
}

/// Returns the entry for a record, with details such as `PLANNING to REVIEW; emit plan.requested; the plan is ready`.
fn task_entry(id: TaskId, record: &Record) -> TraceEntry {
    let outcome = serde_json::to_value(record.outcome).ok().filter(|outcome| outcome != "applied");
    let move_to = record.to.as_ref().map(|to| match record.from.is_empty() {
        true => to.clone(),
        false => format!("{} to {to}", record.from),
    });
    let parts = outcome.and_then(|outcome| outcome.as_str().map(str::to_owned)).into_iter().chain(move_to);
    let details: Vec<String> = parts.chain(record.actions.clone()).chain(record.reason.clone()).collect();
    TraceEntry {
        task_id: Some(id),
        actor: Some(record.actor.clone()),
        details: details.join("; "),
        ..TraceEntry::new(record.at, TraceKind::Task, record.event.as_str())
    }
}

/// Returns the audit entries about a job or a task, oldest first.
async fn audit(store: &dyn Store, target: &str) -> Result<Vec<TraceEntry>, StoreError> {
    let filter = AuditFilter { target: Some(target.to_owned()), ..AuditFilter::default() };
    let actions = store.audit_list(filter, MAX_AUDIT).await?.into_iter().rev().map(|action| {
        let is_empty = action.details.as_object().is_some_and(|details| details.is_empty());
        let details = if is_empty { String::new() } else { action.details.to_string() };
        let entry = TraceEntry::new(action.at, TraceKind::Audit, action.action);
        TraceEntry { actor: Some(action.actor), details, ..entry }
    });
    Ok(actions.collect())
}

/// Returns the ids of the latest jobs, oldest first, and whether there are more.
async fn jobs(store: &dyn Store, correlation_id: &str) -> Result<(Vec<JobId>, bool), StoreError> {
    let filter = Filter { correlation_id: Some(correlation_id.into()), ..Filter::default() };
    let mut ids = Vec::new();
    let mut after = None;
    loop {
        let page = store.job_list(&filter, Page::after(after, PAGE)).await?;
        ids.extend(page.jobs.iter().map(|job| job.id));
        after = page.next.map(|cursor| cursor.id);
        if after.is_none() || ids.len() >= MAX_JOBS {
            ids.reverse();
            return Ok((ids, after.is_some()));
        }
    }
}

struct JobTrace {
    job: TraceJob,
    entries: Vec<TraceEntry>,
}

/// Returns the trace of one job, or `None` if it was deleted meanwhile.
async fn trace_job(store: &dyn Store, id: JobId) -> Result<Option<JobTrace>, StoreError> {
    let Some(job) = store.job_get(id).await? else { return Ok(None) };
    let mut runs = store.job_attempts(id).await?;
    if let Some(last) = last_run(&job).filter(|last| runs.iter().all(|known| known.run != last.run)) {
        runs.push(last);
    }
    let mut entries = due_time(store, &job).await?;
    let filter = WebhookFilter { job: Some(id), ..WebhookFilter::default() };
    let webhooks = if job.webhook_url.is_some() { webhooks(store, filter).await? } else { Vec::new() };
    entries.extend(log(&job, &runs, &webhooks));
    entries.extend(webhooks);
    let actions = audit(store, &id.to_string()).await?;
    entries.extend(actions.into_iter().map(|entry| TraceEntry { job_id: Some(id), ..entry }));
    let job = TraceJob {
        id,
        name: job.name,
        kind: job.kind,
        queue: job.queue,
        status: job.status,
        created_at: job.created_at,
        completed_at: job.completed_at,
        schedule_id: job.schedule_id,
        depends_on: job.depends_on,
        dependents: Vec::new(),
        runs,
    };
    Ok(Some(JobTrace { job, entries }))
}

/// Returns the last run from the job itself: a successful run is not stored as an attempt.
fn last_run(job: &JobView) -> Option<Attempt> {
    let finished_at = job.completed_at.filter(|_| job.status.is_terminal())?;
    job.run.map(|run| Attempt {
        run: Some(run),
        status: job.status,
        worker_id: job.worker_id.clone(),
        started_at: job.started_at,
        finished_at,
        error: job.error.clone(),
        error_reason: job.error_reason,
    })
}

fn log(job: &JobView, runs: &[Attempt], webhooks: &[TraceEntry]) -> Vec<TraceEntry> {
    // The attempts of a webhook contain more than the log lines about them.
    let is_webhook_line =
        |event: &LogEvent| matches!(event, LogEvent::WebhookSent | LogEvent::WebhookFailed) && !webhooks.is_empty();
    let lines = job.execution_log.iter().filter(|line| !is_webhook_line(&line.event));
    lines
        .map(|line| {
            let run = runs.iter().find(|run| run.run.is_some() && run.run == line.run);
            let worker = run.and_then(|run| run.worker_id.clone());
            let worker_id =
                worker.or_else(|| job.worker_id.clone().filter(|_| line.run.is_some() && line.run == job.run));
            TraceEntry {
                job_id: Some(job.id),
                run: line.run,
                worker_id,
                details: line.details.clone(),
                ..TraceEntry::new(line.timestamp, TraceKind::Job, line.event.as_str())
            }
        })
        .collect()
}

/// Returns the entry of the due time for which a schedule created this job, if one did.
async fn due_time(store: &dyn Store, job: &JobView) -> Result<Vec<TraceEntry>, StoreError> {
    let Some(schedule) = job.schedule_id.as_deref().and_then(|id| id.parse::<ScheduleId>().ok()) else {
        return Ok(Vec::new());
    };
    let before = job.schedule_due.map(|due| due.plus_ms(1));
    let ticks = store.schedule_ticks(schedule, before, MAX_TICKS).await?;
    let created = ticks.into_iter().filter(|tick| tick.job_id == Some(job.id));
    Ok(created
        .map(|tick| TraceEntry {
            job_id: Some(job.id),
            details: format!("schedule {schedule}, due {}", tick.due_at),
            ..TraceEntry::new(tick.at, TraceKind::Schedule, tick.outcome.as_str())
        })
        .collect())
}

/// Returns the webhooks of a job or a task with their attempts, oldest first.
async fn webhooks(store: &dyn Store, filter: WebhookFilter) -> Result<Vec<TraceEntry>, StoreError> {
    let mut entries = Vec::new();
    for webhook in store.webhook_list(filter, None, MAX_WEBHOOKS).await?.into_iter().rev() {
        let Some(webhook) = store.webhook_get(webhook.id).await? else { continue };
        let event = webhook.job_id.is_none().then_some(webhook.event.as_str());
        let state = webhook.state.as_str().to_lowercase();
        let details = LogDetails::Receiver { event, state: &state, url: &webhook.url }.to_string();
        let created = TraceEntry::new(webhook.created_at, TraceKind::Webhook, "created");
        let attempts = webhook.history.iter().map(delivery);
        let all = [TraceEntry { details, ..created }].into_iter().chain(attempts);
        entries.extend(all.map(|entry| TraceEntry { job_id: webhook.job_id, task_id: webhook.task_id, ..entry }));
    }
    Ok(entries)
}

fn delivery(attempt: &WebhookAttempt) -> TraceEntry {
    let delivered = attempt.error.is_none() && attempt.status.is_some_and(|status| (200..300).contains(&status));
    let outcome = match attempt.status {
        Some(status) => DeliveryOutcome::Status(status),
        None => DeliveryOutcome::Error(attempt.error.as_deref().unwrap_or_default()),
    };
    TraceEntry {
        details: LogDetails::Delivery { attempt: attempt.number, outcome, took_ms: attempt.took_ms }.to_string(),
        ..TraceEntry::new(attempt.at, TraceKind::Webhook, if delivered { "delivered" } else { "not delivered" })
    }
}

fn event(event: &StoredEvent, tasks: &[TraceTask]) -> TraceEntry {
    let is_job = event.kind.starts_with("job.");
    let task = tasks.iter().find(|task| task.id.0 == event.subject);
    TraceEntry {
        task_id: task.map(|task| task.id),
        job_id: is_job.then_some(JobId(event.subject)),
        actor: Some(event.actor.clone()),
        details: status(&event.data),
        ..TraceEntry::new(event.at, TraceKind::Event, event.kind.as_str())
    }
}

/// Returns the change of state that an event of a job or task describes: `QUEUED to ASSIGNED`.
fn status(data: &str) -> String {
    let data: serde_json::Value = serde_json::from_str(data).unwrap_or_default();
    let payload = &data["payload"];
    if let (Some(from), Some(to)) = (payload["from"].as_str(), payload["to"].as_str()) {
        return if from.is_empty() { to.to_owned() } else { format!("{from} to {to}") };
    }
    match (data["previousStatus"].as_str(), data["status"].as_str()) {
        (Some(from), Some(to)) if from != to => format!("{from} to {to}"),
        (_, Some(to)) => to.to_owned(),
        _ => String::new(),
    }
}

fn add_dependents(jobs: &mut [TraceJob]) {
    let mut dependents: HashMap<JobId, Vec<JobId>> = HashMap::new();
    for job in jobs.iter() {
        for parent in &job.depends_on {
            dependents.entry(*parent).or_default().push(job.id);
        }
    }
    for job in jobs {
        job.dependents = dependents.remove(&job.id).unwrap_or_default();
    }
}
