//! Explains the state of a job: what it waits for, which worker has it, how it ended.
//!
//! The explanation comes from the store, so any node can give it. Only a few details depend on the node that answers:
//! the breaker and the free slots of the workers that are connected to it, and its connection to Redis. All reasons are
//! listed, not only the first: a person who removes one should know which comes next.

use faena_domain::{
    ErrorReason, Explanation, JobId, JobState, JobView, Limit, Reason, Scope, Timestamp, WorkerCapabilities,
    WorkerState, WorkerView,
};
use faena_store::{ClaimOwner, Filter, JobPosition, Lane, LaneId, Page, StoredLimit, Tally};
use serde_json::json;

use crate::{Engine, EngineError, QueueStatus, builtin::how_to_allow, config::ms};

/// Maximum number of jobs or workers that are listed by id.
const MAX_LISTED: usize = 10;
/// Maximum number of workers that are considered.
const MAX_WORKERS: usize = 10_000;

impl Engine {
    /// Explains why a job is in its state. Returns `None` if it was deleted.
    pub async fn why(&self, job: &JobView, now: Timestamp) -> Result<Option<Explanation>, EngineError> {
        let id = job.id;
        let unserved = if job.status == JobState::Queued { self.unserved_lanes(&job.queue).await? } else { Vec::new() };
        let Some(position) = self.store.job_position(id, unserved).await? else { return Ok(None) };
        let reasons = match job.status {
            JobState::Pending => pending(job, &position, now),
            JobState::Retrying => vec![retrying(job)],
            JobState::Queued => queued(self, job, &position, now).await?,
            JobState::Scheduled | JobState::Assigned | JobState::Processing => {
                in_flight(self, job, &position, now).await?
            }
            JobState::Completed => vec![completed(job)],
            JobState::Failed => vec![failed(job)],
            JobState::Cancelled => vec![cancelled(job)],
        };
        Ok(Some(Explanation::new(id, job.status, reasons)))
    }

    /// Returns the lanes of a queue whose jobs no worker can run. They delay no other job.
    async fn unserved_lanes(&self, queue: &str) -> Result<Vec<LaneId>, EngineError> {
        let capabilities = self.store.worker_capabilities().await?;
        let is_served = |lane: &Lane| capabilities.iter().any(|known| known.covers(&lane.queue, &lane.kind));
        let lanes = self.store.lanes().await?.into_iter().filter(|lane| lane.queue == queue && !is_served(lane));
        Ok(lanes.map(|lane| lane.id).collect())
    }
}

fn pending(job: &JobView, position: &JobPosition, now: Timestamp) -> Vec<Reason> {
    let mut reasons = Vec::new();
    if !position.parents.is_empty() {
        let listed: Vec<String> = position
            .parents
            .iter()
            .take(MAX_LISTED)
            .map(|(id, state)| format!("{id} ({})", state.map_or("deleted", JobState::as_str)))
            .collect();
        let more = position.parents.len().saturating_sub(MAX_LISTED);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let jobs: Vec<_> = position.parents.iter().map(|(id, state)| json!({"id": id, "status": state})).collect();
        let count =
            if jobs.len() == 1 { "1 job that has".to_owned() } else { format!("{} jobs that have", jobs.len()) };
        let message = format!("it depends on {count} not completed: {}{more}", listed.join(", "));
        reasons.push(Reason::new("depends_on", message, json!({"jobs": jobs})));
    }
    if let Some(until) = job.scheduled_at.filter(|at| *at > now) {
        reasons.push(Reason::new("waits_until", format!("it is scheduled for {until}"), json!({"until": until})));
    }
    if reasons.is_empty() {
        let message = "it is due and becomes ready within a second";
        reasons.push(Reason::new("due", message, json!({})));
    }
    reasons
}

fn retrying(job: &JobView) -> Reason {
    let until = job.next_attempt_at;
    let when = until.map_or_else(|| "soon".to_owned(), |at| at.to_string());
    let error = job.error.as_deref().unwrap_or("no error was reported");
    // Attempts before a manual retry count too, as in every view of the job.
    let earlier = job.attempt.saturating_sub(job.retry_count);
    let (attempt, attempts) = (job.attempt + 1, earlier + job.max_retries + 1);
    let message = format!("attempt {attempt} of {attempts} starts at {when}; the last attempt failed: {error}");
    let facts = json!({
        "until": until, "attempt": attempt, "attempts": attempts, "error": job.error, "errorReason": job.error_reason,
    });
    Reason::new("waits_until", message, facts)
}

async fn queued(
    engine: &Engine,
    job: &JobView,
    position: &JobPosition,
    now: Timestamp,
) -> Result<Vec<Reason>, EngineError> {
    let rules = engine.store.rules_load().await?;
    let mut reasons: Vec<Reason> = engine.queue.status().and_then(redis_outage).into_iter().collect();
    if let Some(pause) = rules.pause(&job.queue) {
        let because = pause.reason.as_ref().map(|text| format!(" ({text})")).unwrap_or_default();
        let message = format!("queue \"{}\" was paused by {} at {}{because}", job.queue, pause.by, pause.at);
        let facts = json!({"queue": job.queue, "by": pause.by, "since": pause.at, "reason": pause.reason});
        reasons.push(Reason::new("queue_paused", message, facts));
    }
    reasons.extend(limits(engine, job, now).await?);
    if let Some(key) = &job.concurrency_key
        && let Some(limit) = rules.key_limit(key)
    {
        reasons.extend(key_limit(key, limit, position, now));
    }
    reasons.extend(workers(engine, job, now).await?);
    if position.ahead > 0 {
        // While no job of its kind runs, the throughput of the last minute says nothing about its start.
        let is_moving = !reasons.iter().any(|reason| BLOCKING.contains(&reason.code.as_str()));
        reasons.push(
            ahead(engine, job, position, now).await?.filter(|_| is_moving).unwrap_or_else(|| only_ahead(job, position)),
        );
    }
    if reasons.is_empty() {
        let since = job.queued_at.unwrap_or(job.created_at);
        let message = format!("nothing blocks it: it has been ready since {since} and is next for a free slot");
        reasons.push(Reason::new("next", message, json!({"since": since})));
    }
    Ok(reasons)
}

/// Returns the reason why no job starts on this node: Redis is not available and the database must not dispatch.
fn redis_outage(status: QueueStatus) -> Option<Reason> {
    let error = status.outage.filter(|_| !status.fallback)?;
    let message = format!(
        "the queue in Redis at {} is not available ({error}); no job starts until it is, unless queue.fallback is true",
        status.address
    );
    Some(Reason::new("redis_unavailable", message, json!({"address": status.address, "error": error})))
}

/// Returns the limits of the whole system, of the job's queue and of its type that are reached now.
async fn limits(engine: &Engine, job: &JobView, now: Timestamp) -> Result<Vec<Reason>, EngineError> {
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
        let running: i64 = counts
            .by_lane
            .iter()
            .filter(|((lane, tally), _)| *tally == Tally::InFlight && inside(*lane))
            .map(|(_, n)| n)
            .sum();
        if let Some(most) = limit.concurrency.filter(|most| running >= i64::from(*most)) {
            let in_flight = running_jobs(engine, &scope).await?;
            reasons.push(limit_reached(&scope, most, u64::try_from(running).unwrap_or(0), &in_flight));
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

async fn running_jobs(engine: &Engine, scope: &Scope) -> Result<Vec<JobId>, EngineError> {
    let states = JobState::ALL.into_iter().filter(|state| state.is_in_flight()).collect();
    let mut filter = Filter { states, ..Filter::default() };
    match scope {
        Scope::Queue(name) => filter.queue = Some(name.clone()),
        Scope::Type(name) => filter.kind = Some(name.clone()),
        Scope::System | Scope::Key(_) | Scope::Machine(_) => {}
    }
    let page = engine.store.job_list(&filter, Page::after(None, MAX_LISTED)).await?;
    Ok(page.jobs.into_iter().map(|job| job.id).collect())
}

fn key_limit(key: &str, limit: Limit, position: &JobPosition, now: Timestamp) -> Vec<Reason> {
    let scope = Scope::Key(key.to_owned());
    let mut reasons = Vec::new();
    if let Some(most) = limit.concurrency.filter(|most| position.key_in_flight >= u64::from(*most)) {
        reasons.push(limit_reached(&scope, most, position.key_in_flight, &position.key_jobs));
    }
    if let Some(rate) = limit.rate {
        let bucket = rate.refilled(position.key_bucket, now);
        if bucket.available() == 0 {
            reasons.push(rate_reached(&scope, &rate.to_string(), rate.next_at(bucket)));
        }
    }
    reasons
}

fn limit_reached(scope: &Scope, most: u32, running: u64, in_flight: &[JobId]) -> Reason {
    let listed = in_flight.iter().map(JobId::to_string).collect::<Vec<_>>().join(", ");
    let more = if running > in_flight.len() as u64 { ", …" } else { "" };
    let are = if running == 1 { "is" } else { "are" };
    let message = format!("{scope} may run at most {most} concurrently, and {running} {are} running: {listed}{more}");
    let (word, name) = (scope.kind(), scope.parts().1);
    let facts = json!({"scope": word, "name": name, "limit": most, "inFlight": running, "jobs": in_flight});
    Reason::new("limit_reached", message, facts)
}

fn rate_reached(scope: &Scope, rate: &str, next_at: Timestamp) -> Reason {
    let message = format!("{scope} is limited to {rate} and has reached this limit; the next job starts at {next_at}");
    Reason::new("rate_reached", message, json!({"scope": scope.kind(), "name": scope.parts().1, "nextAt": next_at}))
}

/// Returns why none of the workers that can run the job can start it now.
async fn workers(engine: &Engine, job: &JobView, now: Timestamp) -> Result<Vec<Reason>, EngineError> {
    let living: Vec<WorkerView> =
        engine.store.worker_list(Vec::new(), MAX_WORKERS).await?.into_iter().filter(|w| w.ended_at.is_none()).collect();
    let able: Vec<&WorkerView> = living.iter().filter(|worker| can_run(worker, job)).collect();
    if able.is_empty() {
        let mut known: Vec<&str> = living.iter().flat_map(|w| w.capabilities.iter().map(String::as_str)).collect();
        known.sort_unstable();
        known.dedup();
        let known = if known.is_empty() {
            "no worker is connected".into()
        } else {
            format!("workers can run {}", known.join(", "))
        };
        let hint = how_to_allow(&job.kind, &engine.config).map(|hint| format!("; {hint}")).unwrap_or_default();
        let message = format!("no worker can run type \"{}\" from queue \"{}\" ({known}){hint}", job.kind, job.queue);
        return Ok(vec![Reason::new("no_worker", message, json!({"type": job.kind, "queue": job.queue}))]);
    }
    let mut reasons = Vec::new();
    let ids = |list: &[&WorkerView]| list.iter().take(MAX_LISTED).map(|w| w.id.clone()).collect::<Vec<_>>();
    let disconnected: Vec<&WorkerView> =
        able.iter().copied().filter(|w| w.deadline.is_some() && w.transport != "http").collect();
    let open: Vec<&WorkerView> = able.iter().copied().filter(|w| w.breaker == "open").collect();
    let draining: Vec<&WorkerView> = able.iter().copied().filter(|w| w.state == WorkerState::Draining).collect();
    let usable = able.len() - disconnected.len() - open.len() - draining.len();
    if usable == 0 || open.len() == able.len() {
        if !open.is_empty() {
            let until = open.iter().filter_map(|w| breaker_retry_at(engine, w, now)).min();
            let when = until.map(|at| format!(" until {at}")).unwrap_or_default();
            let message =
                format!("the circuit of worker {} is open{when}: too many deliveries failed", ids(&open).join(", "));
            reasons.push(Reason::new("breaker_open", message, json!({"workers": ids(&open), "until": until})));
        }
        if !draining.is_empty() {
            let message = format!("worker {} is draining and accepts no more jobs", ids(&draining).join(", "));
            reasons.push(Reason::new("worker_draining", message, json!({"workers": ids(&draining)})));
        }
        if !disconnected.is_empty() {
            let until = disconnected.iter().filter_map(|w| w.deadline).min();
            let message = format!("worker {} is disconnected and may reconnect", ids(&disconnected).join(", "));
            reasons.push(Reason::new(
                "worker_disconnected",
                message,
                json!({"workers": ids(&disconnected), "until": until}),
            ));
        }
    } else if able.iter().all(|worker| is_full(engine, worker)) {
        let message = match able.len() {
            1 => "the only worker that can run it is busy".to_owned(),
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

/// Returns whether a worker has no free slot. For a worker of another node only its state is known.
fn is_full(engine: &Engine, view: &WorkerView) -> bool {
    match engine.workers.find_by_key(&view.id) {
        Some(worker) => {
            let (jobs, stopping) = worker.load();
            jobs + stopping >= usize::try_from(view.concurrency).unwrap_or(usize::MAX)
        }
        None if view.registration_id == engine.worker_id().to_string() => engine.load().1 == 0,
        None => view.state == WorkerState::Busy && view.concurrency == 1,
    }
}

fn breaker_retry_at(engine: &Engine, view: &WorkerView, now: Timestamp) -> Option<Timestamp> {
    engine.workers.find_by_key(&view.id)?.breaker_retry_at(now)
}

/// Reasons that stop all jobs of the same type.
const BLOCKING: [&str; 6] =
    ["redis_unavailable", "queue_paused", "no_worker", "worker_draining", "worker_disconnected", "breaker_open"];

fn only_ahead(job: &JobView, position: &JobPosition) -> Reason {
    let jobs = position.ahead;
    let exact = jobs < JobPosition::MAX_AHEAD;
    Reason::new("jobs_ahead", ahead_text(job, position), json!({"jobs": jobs, "exact": exact}))
}

fn ahead_text(job: &JobView, position: &JobPosition) -> String {
    match position.ahead {
        1 => format!("1 job of queue \"{}\" is ahead of it", job.queue),
        jobs if jobs < JobPosition::MAX_AHEAD => format!("{jobs} jobs of queue \"{}\" are ahead of it", job.queue),
        jobs => format!("{jobs} or more jobs of queue \"{}\" are ahead of it", job.queue),
    }
}

/// Estimates when the job starts. Returns `None` if the throughput has not been measured yet.
async fn ahead(
    engine: &Engine,
    job: &JobView,
    position: &JobPosition,
    now: Timestamp,
) -> Result<Option<Reason>, EngineError> {
    let jobs = position.ahead;
    let exact = jobs < JobPosition::MAX_AHEAD;
    let lanes = engine.store.lanes().await?;
    let lanes: Vec<LaneId> = lanes.iter().filter(|lane| lane.queue == job.queue).map(|lane| lane.id).collect();
    if engine.throughput.is_due(now) {
        engine.throughput.add(&engine.store.counts().await?, now);
    }
    let Some(per_minute) = engine.throughput.per_minute(&lanes, now) else { return Ok(None) };
    let estimate_ms = (per_minute > 0.0).then(|| (jobs as f64 * 60_000.0 / per_minute).ceil() as i64);
    let at = estimate_ms.map(|wait_ms| now.plus_ms(wait_ms));
    let estimate = match at {
        Some(at) => format!("; at {per_minute:.0} per minute, as in the last minute, it starts at about {at}"),
        None => "; none has run in the last minute, so there is no estimate".to_owned(),
    };
    let message = format!("{}{estimate}", ahead_text(job, position));
    let facts = json!({"jobs": jobs, "exact": exact, "perMinute": per_minute, "estimatedStartAt": at});
    Ok(Some(Reason::new("jobs_ahead", message, facts)))
}

/// Returns which worker has the job, since when, until when, and whether the worker is still alive.
async fn in_flight(
    engine: &Engine,
    job: &JobView,
    position: &JobPosition,
    now: Timestamp,
) -> Result<Vec<Reason>, EngineError> {
    let mut reasons = Vec::new();
    let worker = job.worker_id.as_ref().map_or_else(|| "its worker".to_owned(), |id| format!("worker {id}"));
    let config = &engine.config;
    let claimed_at = position.owner.as_ref().map_or(job.updated_at, |owner| owner.claimed_at);
    if let Some((since, cause)) = &position.cancel {
        let message = format!("it was asked to stop at {since} ({cause}), and {worker} has not stopped it yet");
        reasons.push(Reason::new("cancel_requested", message, json!({"since": since, "reason": cause})));
    }
    if let Some(lost) = lost(engine, job, position, now).await? {
        reasons.push(lost);
    }
    let since = job.started_at.unwrap_or(claimed_at);
    let (code, what, limit_ms) = match job.status {
        JobState::Scheduled => ("scheduled", "a process is being started for it", ms(config.scheduled_timeout)),
        JobState::Assigned => ("assigned", "it is assigned but not started", ms(config.assigned_timeout)),
        _ => {
            let own = job.timeout_ms.and_then(|limit| i64::try_from(limit).ok());
            ("running", "it is running", own.unwrap_or(ms(config.processing_timeout)))
        }
    };
    let deadline = since.plus_ms(limit_ms);
    let progress = job.progress.as_ref().map(|progress| format!(", {}", progress_text(progress))).unwrap_or_default();
    let by = job.worker_id.as_ref().map(|id| format!(" (worker {id})")).unwrap_or_default();
    let message = format!("{what}{by} since {since}{progress}; it times out at {deadline}");
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

/// Returns a reason if the owner of the claim may be dead. It says when the job is recovered.
async fn lost(
    engine: &Engine,
    job: &JobView,
    position: &JobPosition,
    now: Timestamp,
) -> Result<Option<Reason>, EngineError> {
    if let Some(key) = &job.worker_id
        && let Some(worker) = engine.store.worker_get(key).await?
        && worker.ended_at.is_none()
        && worker.transport != "http"
        && let Some(deadline) = worker.deadline
    {
        let message =
            format!("worker {key} is disconnected; if it does not reconnect, its jobs are recovered at {deadline}");
        return Ok(Some(Reason::new("worker_lost", message, json!({"workerId": key, "recoveryAt": deadline}))));
    }
    let Some(owner) = &position.owner else { return Ok(None) };
    Ok(match owner.lease_until {
        // A node renews its lease every third of its duration.
        Some(until) if until > now.plus_ms(ms(engine.config.node_lease) / 3) => None,
        Some(until) if until > now => {
            let message = format!(
                "{} missed a heartbeat; unless one arrives, its jobs are recovered at {until}",
                server_text(owner)
            );
            Some(Reason::new("server_lost", message, json!({"server": owner.server, "recoveryAt": until})))
        }
        until => {
            let recovery_at = until.unwrap_or(now).max(now);
            let message = format!("{} is dead; another server recovers its jobs within seconds", server_text(owner));
            Some(Reason::new("server_lost", message, json!({"server": owner.server, "recoveryAt": recovery_at})))
        }
    })
}

fn completed(job: &JobView) -> Reason {
    let took_ms = job.completed_at.zip(job.started_at).map(|(end, start)| end.ms_since(start));
    let when = job.completed_at.unwrap_or(job.updated_at);
    let took = took_ms.map(|ms| format!(" after {ms} ms")).unwrap_or_default();
    let facts = json!({"completedAt": job.completed_at, "tookMs": took_ms, "retries": job.retry_count});
    Reason::new("completed", format!("it completed at {when}{took}, in attempt {}", job.attempt), facts)
}

fn failed(job: &JobView) -> Reason {
    let error = job.error.as_deref().unwrap_or("no error was reported");
    let reason = job.error_reason.unwrap_or(ErrorReason::Error);
    let earlier = job.attempt.saturating_sub(job.retry_count + 1);
    let (attempt, attempts) = (job.attempt, earlier + job.max_retries + 1);
    let ending = match reason {
        ErrorReason::Timeout => "timed out",
        ErrorReason::Orphaned => "was lost with its worker",
        _ => "failed",
    };
    let why = match reason {
        ErrorReason::Expired => "no worker started it before its expiry".to_owned(),
        ErrorReason::NoHandler => "no worker could run it".to_owned(),
        _ if attempts == 1 => format!("its only attempt {ending}"),
        _ if attempt >= attempts => format!("the last of {attempts} attempts {ending}"),
        _ => format!("attempt {attempt} of {attempts} {ending} and is not retried"),
    };
    let facts = json!({
        "error": job.error, "errorReason": reason, "attempt": attempt, "attempts": attempts, "failedAt": job.completed_at,
        "workerId": job.worker_id,
    });
    Reason::new("failed", format!("{why}: {error}"), facts)
}

fn cancelled(job: &JobView) -> Reason {
    let cause = job.error.as_deref().unwrap_or("no reason was given");
    let when = job.completed_at.unwrap_or(job.updated_at);
    let facts = json!({"cause": job.error, "cancelledAt": job.completed_at});
    Reason::new("cancelled", format!("it was cancelled at {when}: {cause}"), facts)
}

fn server_text(owner: &ClaimOwner) -> String {
    owner.server.as_ref().map_or_else(|| "its server".to_owned(), |server| format!("server {server}"))
}
