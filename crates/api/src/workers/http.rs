//! Plain HTTP for workers: a worker can be a shell script with curl.
//!
//! The server cannot send anything to such a worker between two calls. So the worker receives jobs only as the response
//! to a claim, and learns of cancellations in the response to its next claim or heartbeat. It may call any node; that
//! node is responsible for it from then on.

use std::{pin::Pin, sync::Arc, time::Duration};

use axum::{
    Json,
    body::Body,
    extract::{Path, State, rejection::PathRejection},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use faena_domain::{Progress, Run, SecretText, Timestamp, parse::Fields};
use faena_engine::{
    EngineError,
    workers::{ConnectedWorker, Registration, Report, ReportKind, Transport, WorkerCommand},
};
use faena_wire::{
    Registered, Reported, Success,
    frames::{JobToStop, WorkerNotices},
};

use super::{encode, report, rest::unknown, session_token::SessionToken};
use crate::{
    Api, ApiError, ApiResult, access, context,
    request::{Segment, finish, optional_fields, parse_job_id, read_body},
};

const DEFAULT_WAIT_MS: u64 = 20_000;
const MAX_WAIT_MS: u64 = 60_000;

pub async fn register(State(api): State<Api>, body: Body) -> ApiResult<Response> {
    let body = read_body(&api, body).await?;
    let mut fields = optional_fields(&api, &body)?;
    let registration = Registration {
        worker_id: fields.text("workerId"),
        session_token: fields.text("sessionToken").map(SecretText::from),
        name: fields.text("name"),
        version: fields.text("version"),
        capabilities: fields.list("capabilities", "a list of job types"),
        queues: fields.list("queues", "a list of queues"),
        concurrency: fields.take("concurrency", "a non-negative integer"),
        reports_starts: fields.take("reportsStarts", "true or false").unwrap_or(false),
        api_key: None,
        in_flight: None,
    };
    // A key in the body takes precedence over the key in the header.
    let token = fields.text("token").map(SecretText::from);
    finish(fields)?;
    let registration = access::authorize_registration(&api, &context::caller(), registration, token.as_ref())?;
    let connection = api.engine.register_worker(registration, Transport::Http, Timestamp::now()).await?;
    let registered = Registered {
        worker_id: connection.worker.key.clone(),
        heartbeat_interval_ms: u64::try_from(api.engine.config.worker_heartbeat.as_millis()).unwrap_or(u64::MAX),
        resumed: connection.resumed,
        session_token: connection.session_token,
    };
    Ok((StatusCode::CREATED, Json(registered)).into_response())
}

pub async fn claim(
    State(api): State<Api>,
    Segment(key): Segment,
    token: SessionToken,
    body: Body,
) -> ApiResult<Response> {
    let body = read_body(&api, body).await?;
    let mut fields = optional_fields(&api, &body)?;
    let max = fields.number("max").map(|max| usize::try_from(max).unwrap_or(usize::MAX));
    let wait_ms = fields.number("waitMs").unwrap_or(DEFAULT_WAIT_MS);
    if max == Some(0) {
        fields.reject("max", "must be at least 1");
    }
    if wait_ms > MAX_WAIT_MS {
        fields.reject("waitMs", format!("must be at most {MAX_WAIT_MS}"));
    }
    finish(fields)?;
    let worker = find_worker(&api, &key, token).await?;
    let mut commands = worker.drain_commands();
    if commands.is_empty() && api.engine.is_stopping() {
        return Err(EngineError::Stopping.into());
    }
    if commands.is_empty() {
        commands = wait_for_commands(&api, &worker, max, Duration::from_millis(wait_ms)).await;
    }
    let jobs: Vec<String> = commands.into_iter().filter_map(job_json).collect();
    if !jobs.is_empty() && !api.engine.holds_lease(Timestamp::now()).await {
        // This server was suspended: its jobs may have been assigned again meanwhile.
        return Err(EngineError::LeaseLost.into());
    }
    // Puts the jobs and the fields of the notices into one object.
    let notices = serde_json::to_string(&notices(&worker)).expect("notices are JSON");
    let claimed = format!("{{\"jobs\":[{}],{}", jobs.join(","), &notices[1..]);
    Ok(([(header::CONTENT_TYPE, "application/json")], claimed).into_response())
}

async fn wait_for_commands(
    api: &Api,
    worker: &Arc<ConnectedWorker>,
    max: Option<usize>,
    timeout: Duration,
) -> Vec<WorkerCommand> {
    let free = worker.free_slots();
    let wanted = max.unwrap_or(free).min(worker.concurrency);
    if wanted > free {
        let undelivered = worker.unacknowledged(wanted - free);
        if !undelivered.is_empty() {
            api.engine.redeliver(worker, undelivered, Timestamp::now()).await;
            return worker.drain_commands();
        }
    }
    let _waiting = api.engine.wait_for_jobs(worker, wanted.min(free));
    // Counts as a heartbeat for as long as the worker waits. Ends when the request ends.
    let stay_alive = async {
        let mut heartbeat = tokio::time::interval(api.engine.config.worker_heartbeat);
        loop {
            heartbeat.tick().await;
            worker.record_heartbeat(Timestamp::now());
        }
    };
    let commands = tokio::select! {
        commands = worker.next_commands() => commands,
        () = tokio::time::sleep(timeout) => Vec::new(),
        () = worker.closing.cancelled() => Vec::new(),
        () = api.closing.cancelled() => Vec::new(),
        () = stay_alive => Vec::new(),
    };
    worker.record_heartbeat(Timestamp::now());
    commands
}

pub async fn heartbeat(
    State(api): State<Api>,
    Segment(key): Segment,
    token: SessionToken,
) -> ApiResult<Json<WorkerNotices>> {
    let worker = find_worker(&api, &key, token).await?;
    worker.drain_control_commands();
    Ok(Json(notices(&worker)))
}

fn job_json(command: WorkerCommand) -> Option<String> {
    match command {
        WorkerCommand::Job(delivery) => {
            let mut job = String::new();
            encode::job(&mut job, &delivery);
            Some(job)
        }
        // Not sent: the response to the report is the acknowledgement, and `notices` contains the rest.
        WorkerCommand::Cancel { .. } | WorkerCommand::Ack(_) | WorkerCommand::Drain | WorkerCommand::Resume => None,
    }
}

/// Returns what responses to claims and heartbeats share: which jobs to stop, and whether the worker drains.
fn notices(worker: &ConnectedWorker) -> WorkerNotices {
    let cancel = worker.jobs_to_stop().into_iter();
    let cancel = cancel.map(|(job_id, run, reason)| JobToStop { job_id, run, reason });
    WorkerNotices { cancel: cancel.collect(), drain: worker.is_draining() }
}

type ReportPath = Result<Path<(String, String)>, PathRejection>;
type ReportFuture = Pin<Box<dyn Future<Output = ApiResult<Json<Reported>>> + Send>>;

/// Returns the handler of the report `name`.
pub fn report(
    name: &'static str,
) -> impl Fn(State<Api>, ReportPath, SessionToken, Body) -> ReportFuture + Clone + Send + 'static {
    move |State(api), path, token, body| Box::pin(handle_report(api, name, path, token, body))
}

async fn handle_report(
    api: Api,
    name: &'static str,
    path: ReportPath,
    token: SessionToken,
    body: Body,
) -> ApiResult<Json<Reported>> {
    let Path((key, job)) = path.map_err(|_| ApiError::invalid_field("path", "must be UTF-8"))?;
    let job_id = parse_job_id(&job)?;
    let body = read_body(&api, body).await?;
    let mut fields = optional_fields(&api, &body)?;
    let run: Option<Run> = fields.take("run", "a whole number");
    let kind = parse_kind(name, &mut fields);
    // Reports all invalid fields together. Only then come the errors about the whole report.
    finish(fields)?;
    // Without a connection, only the run number links a report to its claim.
    let run = run.ok_or_else(|| ApiError::invalid_field("run", "is required; it is in the claimed job"))?;
    let kind = kind?;
    let worker = find_worker(&api, &key, token).await?;
    api.engine.reports.handler.handle_one(&worker, Report { job_id, run: Some(run), kind }, Timestamp::now()).await??;
    Ok(Json(Reported { ok: true }))
}

fn parse_kind(name: &str, fields: &mut Fields) -> ApiResult<ReportKind> {
    Ok(match name {
        "started" => ReportKind::Started,
        "progress" => {
            let expected = "an object with phase, currentStep, completedSteps, totalSteps, percentage and message";
            report::progress(fields.take::<Progress>("progress", expected))?
        }
        "log" => {
            let (message, event) = (fields.text("message"), fields.text("event"));
            report::log(message, event.as_deref())?
        }
        "step" => {
            let (step, result) = (fields.text("name"), fields.raw("result"));
            let total = fields.take("totalSteps", "a whole number");
            report::step(step, result.map(|raw| raw.get()), total)?
        }
        "complete" => report::complete(fields.raw("result").map(|raw| raw.get()))?,
        "fail" => {
            let error = report::error_text(fields.raw("error").map(|raw| raw.get()));
            report::fail(error, fields.take("retryable", "true or false"), fields.number("retryAfterMs"))
        }
        _ => ReportKind::Release,
    })
}

/// Ends a worker's registration. Its jobs return to their queues without using an attempt.
pub async fn leave(State(api): State<Api>, Segment(key): Segment, token: SessionToken) -> ApiResult<Json<Success>> {
    let worker = find_worker(&api, &key, token).await?;
    api.engine.deregister_worker(&worker, "the worker has left", Timestamp::now()).await;
    Ok(Json(Success { success: true }))
}

async fn find_worker(api: &Api, key: &str, SessionToken(token): SessionToken) -> ApiResult<Arc<ConnectedWorker>> {
    let worker = api.engine.find_polling_worker(key, token, context::access()?.key(), Timestamp::now()).await?;
    worker.ok_or_else(|| unknown(key))
}
