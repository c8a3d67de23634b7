//! Why a job is where it is: what it waits for, who has it, how it ended. Answered from what is stored, so any node can; only the
//! times of breakers are known to the node alone that a worker is connected to.
//!
//! Every reason that holds a job is named, not the first one found: whoever removes one should know what comes next.

use faena_domain::{
    ErrorReason, JobId, JobState, JobView, Limit, Reason, Scope, Timestamp, Why, WorkerCapabilities, WorkerState,
    WorkerView,
};
use faena_store::{Filter, JobPosition, LaneId, Page, StoreError, StoredLimit, Tally};
use serde_json::json;

use crate::{Engine, config::ms};

/// Jobs that are named as holders of a limit.
const NAMED: usize = 10;
/// Workers that are looked at.
const WORKERS: usize = 10_000;

impl Engine {
    /// `None`: there is no such job.
    pub async fn why(&self, id: JobId, now: Timestamp) -> Result<Option<Why>, StoreError> {
        let Some(job) = self.store.job_get(id).await? else { return Ok(None) };
        let Some(standing) = self.store.job_position(id).await? else { return Ok(None) };
        let reasons = match job.status {
            JobState::Pending => pending(&job, &standing, now),
            JobState::Retrying => vec![retrying(&job)],
            JobState::Queued => queued(self, &job, &standing, now).await?,
            JobState::Scheduled | JobState::Assigned | JobState::Processing => held(self, &job, &standing, now).await?,
            JobState::Completed => vec![completed(&job)],
            JobState::Failed => vec![failed(&job)],
            JobState::Cancelled => vec![cancelled(&job)],
        };
        Ok(Some(Why::new(id, job.status, reasons)))
    }
}

fn pending(job: &JobView, standing: &JobPosition, now: Timestamp) -> Vec<Reason> {
    let mut reasons = Vec::new();
    if !standing.parents.is_empty() {
        let named: Vec<String> = standing
            .parents
            .iter()
            .take(NAMED)
            .map(|(id, state)| format!("{id} ({})", state.map_or("deleted", JobState::as_str)))
            .collect();
        let more = standing.parents.len().saturating_sub(NAMED);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let jobs: Vec<_> = standing.parents.iter().map(|(id, state)| json!({"id": id, "status": state})).collect();
        let message =
            format!("it depends on {} that have not completed: {}{more}", jobs_text(jobs.len()), named.join(", "));
        reasons.push(Reason::new("depends_on", message, json!({"jobs": jobs})));
    }
    if let Some(until) = job.scheduled_at.filter(|at| *at > now) {
        reasons.push(Reason::new("waits_until", format!("it waits until {until}"), json!({"until": until})));
    }
    if reasons.is_empty() {
        let message = "its time has come; it becomes ready with the next round of the promoter";
        reasons.push(Reason::new("due", message, json!({})));
    }
    reasons
}

fn retrying(job: &JobView) -> Reason {
    let until = job.next_retry_at;
    let when = until.map_or_else(|| "soon".to_owned(), |at| at.to_string());
    let error = job.error.as_deref().unwrap_or("no error was told");
    let tries = job.max_retries + 1;
    let message = format!("try {} of {tries} begins at {when}; the last one failed: {error}", job.retry_count + 1);
    let facts = json!({
        "until": until, "try": job.retry_count + 1, "tries": tries, "error": job.error, "errorReason": job.error_reason,
    });
    Reason::new("waits_until", message, facts)
}

async fn queued(
    engine: &Engine,
    job: &JobView,
    standing: &JobPosition,
    now: Timestamp,
) -> Result<Vec<Reason>, StoreError> {
    let rules = engine.store.rules_load().await?;
    let mut reasons = Vec::new();
    if let Some(pause) = rules.pause(&job.queue) {
        let because = pause.reason.as_ref().map(|text| format!(" ({text})")).unwrap_or_default();
        let message = format!("queue {} is paused by {} since {}{because}", job.queue, pause.by, pause.at);
        let facts = json!({"queue": job.queue, "by": pause.by, "since": pause.at, "reason": pause.reason});
        reasons.push(Reason::new("queue_paused", message, facts));
    }
    reasons.extend(limits(engine, job, now).await?);
    if let Some(key) = &job.concurrency_key
        && let Some(limit) = rules.key_limit(key)
    {
        reasons.extend(key_limit(key, limit, standing, now));
    }
    reasons.extend(workers(engine, job, now).await?);
    if standing.ahead > 0 {
        // While nobody works, what ran in the last minute says nothing about its turn.
        let moves = !reasons.iter().any(|reason| STANDSTILL.contains(&reason.code.as_str()));
        reasons.push(
            ahead(engine, job, standing, now).await?.filter(|_| moves).unwrap_or_else(|| only_ahead(job, standing)),
        );
    }
    if reasons.is_empty() {
        let since = job.queued_at.unwrap_or(job.created_at);
        let message = format!("nothing holds it: it has been ready since {since} and is next in line for a free slot");
        reasons.push(Reason::new("next", message, json!({"since": since})));
    }
    Ok(reasons)
}

/// Limits of the whole system, of its queue and of its type that have no room now.
async fn limits(engine: &Engine, job: &JobView, now: Timestamp) -> Result<Vec<Reason>, StoreError> {
    let own = [Scope::System, Scope::Queue(job.queue.clone()), Scope::Type(job.kind.clone())];
    let stored: Vec<StoredLimit> =
        engine.store.limits().await?.into_iter().filter(|stored| own.contains(&stored.scope)).collect();
    if stored.is_empty() {
        return Ok(Vec::new());
    }
    let lanes = engine.store.lanes().await?;
    let counts = engine.store.counts().await?;
    let mut reasons = Vec::new();
    for StoredLimit { scope, limit, bucket, .. } in stored {
        let inside = |id: LaneId| match lanes.iter().find(|lane| lane.id == id) {
            Some(lane) => match &scope {
                Scope::Queue(name) => lane.queue == *name,
                Scope::Type(name) => lane.kind == *name,
                _ => true,
            },
            None => false,
        };
        let held: i64 = counts
            .by_lane
            .iter()
            .filter(|((lane, tally), _)| *tally == Tally::InFlight && inside(*lane))
            .map(|(_, n)| n)
            .sum();
        if let Some(most) = limit.concurrency.filter(|most| held >= i64::from(*most)) {
            let holders = holders(engine, &scope).await?;
            reasons.push(limit_reached(&scope, most, u64::try_from(held).unwrap_or(0), &holders));
        }
        if let Some(rate) = limit.rate {
            let bucket = rate.refilled(bucket, now);
            if bucket.available() == 0 {
                reasons.push(rate_reached(&scope, &rate.to_string(), rate.next_at(bucket)));
            }
        }
    }
    Ok(reasons)
}

async fn holders(engine: &Engine, scope: &Scope) -> Result<Vec<JobId>, StoreError> {
    let states = JobState::ALL.into_iter().filter(|state| state.is_in_flight()).collect();
    let mut filter = Filter { states, ..Filter::default() };
    match scope {
        Scope::Queue(name) => filter.queue = Some(name.clone()),
        Scope::Type(name) => filter.kind = Some(name.clone()),
        Scope::System | Scope::Key(_) => {}
    }
    let page = engine.store.job_list(&filter, Page::After { id: None, limit: NAMED }).await?;
    Ok(page.jobs.into_iter().map(|job| job.id).collect())
}

fn key_limit(key: &str, limit: Limit, standing: &JobPosition, now: Timestamp) -> Vec<Reason> {
    let scope = Scope::Key(key.to_owned());
    let mut reasons = Vec::new();
    if let Some(most) = limit.concurrency.filter(|most| standing.key_held >= u64::from(*most)) {
        reasons.push(limit_reached(&scope, most, standing.key_held, &standing.key_holders));
    }
    if let Some(rate) = limit.rate {
        let bucket = rate.refilled(standing.key_bucket, now);
        if bucket.available() == 0 {
            reasons.push(rate_reached(&scope, &rate.to_string(), rate.next_at(bucket)));
        }
    }
    reasons
}

fn limit_reached(scope: &Scope, most: u32, held: u64, holders: &[JobId]) -> Reason {
    let named = holders.iter().map(JobId::to_string).collect::<Vec<_>>().join(", ");
    let more = if held > holders.len() as u64 { ", …" } else { "" };
    let are = if held == 1 { "is" } else { "are" };
    let message = format!("{scope} may run {most} at once, and {held} {are} running: {named}{more}");
    let facts = json!({"scope": scope.kind(), "name": scope.parts().1, "limit": most, "held": held, "heldBy": holders});
    Reason::new("limit_reached", message, facts)
}

fn rate_reached(scope: &Scope, rate: &str, next_at: Timestamp) -> Reason {
    let message = format!("{scope} may have {rate}, and these are used up; the next starts at {next_at}");
    Reason::new("rate_reached", message, json!({"scope": scope.kind(), "name": scope.parts().1, "nextAt": next_at}))
}

/// What is the matter with the workers that could run it, if none of them can now.
async fn workers(engine: &Engine, job: &JobView, now: Timestamp) -> Result<Vec<Reason>, StoreError> {
    let living: Vec<WorkerView> =
        engine.store.worker_list(Vec::new(), WORKERS).await?.into_iter().filter(|w| w.ended_at.is_none()).collect();
    let able: Vec<&WorkerView> = living.iter().filter(|worker| can_run(worker, job)).collect();
    if able.is_empty() {
        let mut known: Vec<&str> = living.iter().flat_map(|w| w.capabilities.iter().map(String::as_str)).collect();
        known.sort_unstable();
        known.dedup();
        let known =
            if known.is_empty() { "none is connected".into() } else { format!("they can run {}", known.join(", ")) };
        let message = format!("no living worker can run type {} from queue {} ({known})", job.kind, job.queue);
        return Ok(vec![Reason::new("no_worker", message, json!({"type": job.kind, "queue": job.queue}))]);
    }
    let mut reasons = Vec::new();
    let ids = |list: &[&WorkerView]| list.iter().take(NAMED).map(|w| w.id.clone()).collect::<Vec<_>>();
    let away: Vec<&WorkerView> =
        able.iter().copied().filter(|w| w.deadline.is_some() && w.transport != "http").collect();
    let open: Vec<&WorkerView> = able.iter().copied().filter(|w| w.breaker == "open").collect();
    let draining: Vec<&WorkerView> = able.iter().copied().filter(|w| w.state == WorkerState::Draining).collect();
    let fit = able.len() - away.len() - open.len() - draining.len();
    if fit == 0 || open.len() == able.len() {
        if !open.is_empty() {
            let until = open.iter().filter_map(|w| breaker_opens_at(engine, w, now)).min();
            let when = until.map(|at| format!(" until {at}")).unwrap_or_default();
            let message = format!("the breaker of {} is open{when}: too many hand-outs failed", ids(&open).join(", "));
            reasons.push(Reason::new("breaker_open", message, json!({"workers": ids(&open), "until": until})));
        }
        if !draining.is_empty() {
            let message = format!("{} drains and takes no more jobs", ids(&draining).join(", "));
            reasons.push(Reason::new("worker_draining", message, json!({"workers": ids(&draining)})));
        }
        if !away.is_empty() {
            let until = away.iter().filter_map(|w| w.deadline).min();
            let message = format!("{} has lost its connection and may come back", ids(&away).join(", "));
            reasons.push(Reason::new("worker_away", message, json!({"workers": ids(&away), "until": until})));
        }
    } else if able.iter().all(|worker| is_full(engine, worker)) {
        let message = match able.len() {
            1 => "the one worker that can run it is busy".to_owned(),
            count => format!("all {count} workers that can run it are busy"),
        };
        reasons.push(Reason::new("workers_busy", message, json!({"workers": able.len()})));
    }
    Ok(reasons)
}

fn can_run(worker: &WorkerView, job: &JobView) -> bool {
    let capabilities = WorkerCapabilities { types: worker.capabilities.clone(), queues: worker.queues.clone() };
    capabilities.covers(&job.queue, &job.kind)
}

/// A worker that is connected here is known by its load; of the others only whether they are busy.
fn is_full(engine: &Engine, view: &WorkerView) -> bool {
    match engine.workers.find_by_key(&view.id) {
        Some(worker) => {
            let (held, stopping) = worker.load();
            held + stopping >= usize::try_from(view.concurrency).unwrap_or(usize::MAX)
        }
        None if view.registration_id == engine.worker_id().to_string() => engine.load().1 == 0,
        None => view.state == WorkerState::Busy && view.concurrency == 1,
    }
}

fn breaker_opens_at(engine: &Engine, view: &WorkerView, now: Timestamp) -> Option<Timestamp> {
    engine.workers.find_by_key(&view.id)?.breaker_opens_at(now)
}

/// Reasons for which nothing of its kind runs at all.
const STANDSTILL: [&str; 5] = ["queue_paused", "no_worker", "worker_draining", "worker_away", "breaker_open"];

fn only_ahead(job: &JobView, standing: &JobPosition) -> Reason {
    let jobs = standing.ahead;
    let exact = jobs < JobPosition::MOST_AHEAD;
    Reason::new("jobs_ahead", ahead_text(job, standing), json!({"jobs": jobs, "exact": exact}))
}

fn ahead_text(job: &JobView, standing: &JobPosition) -> String {
    match standing.ahead {
        1 => format!("1 job of queue {} goes before it", job.queue),
        jobs if jobs < JobPosition::MOST_AHEAD => format!("{jobs} jobs of queue {} go before it", job.queue),
        jobs => format!("{jobs} or more jobs of queue {} go before it", job.queue),
    }
}

/// `None`: it has not been measured yet how fast jobs go.
async fn ahead(
    engine: &Engine,
    job: &JobView,
    standing: &JobPosition,
    now: Timestamp,
) -> Result<Option<Reason>, StoreError> {
    let jobs = standing.ahead;
    let exact = jobs < JobPosition::MOST_AHEAD;
    let lanes = engine.store.lanes().await?;
    let lanes: Vec<LaneId> = lanes.iter().filter(|lane| lane.queue == job.queue).map(|lane| lane.id).collect();
    if engine.throughput.is_due(now) {
        engine.throughput.add(&engine.store.counts().await?, now);
    }
    let Some(per_minute) = engine.throughput.per_minute(&lanes, now) else { return Ok(None) };
    let estimate_ms = (per_minute > 0.0).then(|| (jobs as f64 * 60_000.0 / per_minute).ceil() as i64);
    let at = estimate_ms.map(|wait_ms| now.plus_ms(wait_ms));
    let guess = match at {
        Some(at) => format!("; at {per_minute:.0} a minute, as in the last minute, its turn comes at about {at}"),
        None => "; none has run in the last minute, so there is no estimate".to_owned(),
    };
    let message = format!("{}{guess}", ahead_text(job, standing));
    let facts = json!({"jobs": jobs, "exact": exact, "perMinute": per_minute, "estimatedStartAt": at});
    Ok(Some(Reason::new("jobs_ahead", message, facts)))
}

/// It is in somebody's hands: in whose, since when, until when, and whether that one is still there.
async fn held(
    engine: &Engine,
    job: &JobView,
    standing: &JobPosition,
    now: Timestamp,
) -> Result<Vec<Reason>, StoreError> {
    let mut reasons = Vec::new();
    let worker = job.worker_id.as_deref().unwrap_or("its worker");
    let config = &engine.config;
    let claimed_at = standing.owner.as_ref().map_or(job.updated_at, |owner| owner.claimed_at);
    if let Some((since, cause)) = &standing.cancel {
        let message = format!("it was asked to stop at {since} ({cause}), and {worker} has not said that it did");
        reasons.push(Reason::new("cancel_requested", message, json!({"since": since, "reason": cause})));
    }
    if let Some(lost) = lost(engine, job, standing, now).await? {
        reasons.push(lost);
    }
    let since = job.started_at.unwrap_or(claimed_at);
    let (code, what, limit_ms) = match job.status {
        JobState::Scheduled => ("scheduled", "a process is being started for it", ms(config.scheduled_timeout)),
        JobState::Assigned => ("assigned", "it was handed out and has not started yet", ms(config.assigned_timeout)),
        _ => {
            let own = job.timeout_ms.and_then(|limit| i64::try_from(limit).ok());
            ("running", "it is running", own.unwrap_or(ms(config.processing_timeout)))
        }
    };
    let deadline = since.plus_ms(limit_ms);
    let progress = job.progress.as_ref().map(|progress| format!(", {}", progress_text(progress))).unwrap_or_default();
    let by = job.worker_id.as_ref().map(|id| format!(" (worker {id})")).unwrap_or_default();
    let message = format!("{what}{by} since {since}{progress}; it is taken away at {deadline}");
    let facts = json!({
        "workerId": job.worker_id, "since": since, "deadline": deadline, "run": job.run, "progress": job.progress,
    });
    reasons.push(Reason::new(code, message, facts));
    Ok(reasons)
}

fn progress_text(progress: &faena_domain::Progress) -> String {
    let mut parts = Vec::new();
    if let Some(percentage) = progress.percentage {
        parts.push(format!("{percentage:.0} %"));
    }
    if let (Some(done), Some(total)) = (progress.completed_steps, progress.total_steps) {
        parts.push(format!("step {done} of {total}"));
    }
    parts.extend(progress.phase.clone());
    parts.extend(progress.current_step.clone());
    parts.extend(progress.message.clone());
    parts.join(", ")
}

/// Whether its owner has gone, and when the job is given to another.
async fn lost(
    engine: &Engine,
    job: &JobView,
    standing: &JobPosition,
    now: Timestamp,
) -> Result<Option<Reason>, StoreError> {
    if let Some(key) = &job.worker_id
        && let Some(worker) = engine.store.worker_get(key).await?
        && worker.ended_at.is_none()
        && worker.transport != "http"
        && let Some(deadline) = worker.deadline
    {
        let message =
            format!("worker {key} is not connected; if it does not come back, its jobs are freed at {deadline}");
        return Ok(Some(Reason::new("worker_lost", message, json!({"workerId": key, "recoveryAt": deadline}))));
    }
    let Some(owner) = &standing.owner else { return Ok(None) };
    Ok(match owner.lease_until {
        // It is renewed every third of the lease.
        Some(until) if until > now.plus_ms(ms(engine.config.node_lease) / 3) => None,
        Some(until) if until > now => {
            let server = owner.server.as_deref().unwrap_or("that has it");
            let message =
                format!("the server {server} has missed a sign of life; without one its jobs are freed at {until}");
            Some(Reason::new("server_lost", message, json!({"server": owner.server, "recoveryAt": until})))
        }
        until => {
            let server = owner.server.as_deref().unwrap_or("that had it");
            let recovery_at = until.unwrap_or(now).max(now);
            let message = format!(
                "the server {server} gives no sign of life; its jobs are freed with the next round of the guardian"
            );
            Some(Reason::new("server_lost", message, json!({"server": owner.server, "recoveryAt": recovery_at})))
        }
    })
}

fn completed(job: &JobView) -> Reason {
    let took_ms = job.completed_at.zip(job.started_at).map(|(end, start)| end.ms_since(start));
    let when = job.completed_at.unwrap_or(job.updated_at);
    let took = took_ms.map(|ms| format!(" after {ms} ms")).unwrap_or_default();
    let facts = json!({"completedAt": job.completed_at, "tookMs": took_ms, "retries": job.retry_count});
    Reason::new("completed", format!("it completed at {when}{took}, with try {}", job.retry_count + 1), facts)
}

fn failed(job: &JobView) -> Reason {
    let error = job.error.as_deref().unwrap_or("no error was told");
    let reason = job.error_reason.unwrap_or(ErrorReason::Error);
    let tries = job.retry_count + 1;
    let allowed = job.max_retries + 1;
    let why = match reason {
        ErrorReason::Expired => "nobody took it before its expiry".to_owned(),
        ErrorReason::NoHandler => "no worker could run it".to_owned(),
        _ if allowed == 1 => format!("its only try failed with {}", reason.as_str()),
        _ if tries >= allowed => format!("all {allowed} tries failed, the last one with {}", reason.as_str()),
        _ => format!("try {tries} of {allowed} failed with {} and was not to be repeated", reason.as_str()),
    };
    let facts = json!({
        "error": job.error, "errorReason": reason, "tries": tries, "allowed": allowed, "failedAt": job.completed_at,
        "workerId": job.worker_id,
    });
    Reason::new("failed", format!("{why}: {error}"), facts)
}

fn cancelled(job: &JobView) -> Reason {
    let cause = job.error.as_deref().unwrap_or("no reason was told");
    let when = job.completed_at.unwrap_or(job.updated_at);
    let facts = json!({"cause": job.error, "cancelledAt": job.completed_at});
    Reason::new("cancelled", format!("it was cancelled at {when}: {cause}"), facts)
}

fn jobs_text(count: usize) -> String {
    if count == 1 { "1 job".into() } else { format!("{count} jobs") }
}
