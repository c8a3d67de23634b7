//! Plain HTTP for workers: a worker can be a shell script with curl.
//!
//! The server cannot send anything to such a worker between two calls. So the worker receives jobs only as the response
//! to a claim, and learns of cancellations in the response to its next claim or heartbeat. It may call any node; that
//! node is responsible for it from then on.

use std::{sync::Arc, time::Duration};

use axum::{
    Json,
    body::Body,
    extract::{Path, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use faena_domain::{Progress, Timestamp, parse::Fields};
use faena_engine::workers::{ConnectedWorker, Registration, Report, ReportKind, Transport, WorkerCommand};
use faena_wire::{Registered, Success};
use serde_json::json;

use super::{encode, records::unknown, report};
use crate::{
    Api, ApiError, ApiResult,
    request::{Segment, finish, optional_fields, parse_job_id, read_body},
};

const DEFAULT_WAIT_MS: u64 = 20_000;
const MAX_WAIT_MS: u64 = 60_000;

pub async fn register(State(api): State<Api>, body: Body) -> ApiResult<Response> {
    let body = read_body(&api, body).await?;
    let mut fields = optional_fields(&api, &body)?;
    let registration = Registration {
        worker_id: fields.text("workerId"),
        name: fields.text("name"),
        capabilities: fields.list("capabilities", "a list of job types"),
        queues: fields.list("queues", "a list of queues"),
        concurrency: fields.take("concurrency", "a whole number, not negative"),
        reports_starts: fields.take("reportsStarts", "true or false").unwrap_or(false),
        in_flight: None,
    };
    let _token: Option<String> = fields.text("token");
    finish(fields)?;
    let connection = api.engine.register_worker(registration, Transport::Http, Timestamp::now()).await?;
    let registered = Registered {
        worker_id: connection.worker.key.clone(),
        heartbeat_interval_ms: u64::try_from(api.engine.config.worker_heartbeat.as_millis()).unwrap_or(u64::MAX),
        resumed: connection.resumed,
    };
    Ok((StatusCode::CREATED, Json(registered)).into_response())
}

pub async fn claim(State(api): State<Api>, Segment(key): Segment, body: Body) -> ApiResult<Response> {
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
    let worker = find_worker(&api, &key).await?;
    let mut commands = worker.drain_commands();
    if commands.is_empty() {
        commands = wait_for_commands(&api, &worker, max, Duration::from_millis(wait_ms)).await;
    }
    let jobs: Vec<String> = commands.into_iter().filter_map(job_json).collect();
    Ok(json_response(format!("{{\"jobs\":[{}],{}}}", jobs.join(","), notices(&worker))))
}

async fn wait_for_commands(
    api: &Api,
    worker: &Arc<ConnectedWorker>,
    max: Option<usize>,
    timeout: Duration,
) -> Vec<WorkerCommand> {
    let free = worker.free();
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
            worker.seen(Timestamp::now());
        }
    };
    let commands = tokio::select! {
        commands = worker.next_commands() => commands,
        () = tokio::time::sleep(timeout) => Vec::new(),
        () = worker.closing.cancelled() => Vec::new(),
        () = api.closing.cancelled() => Vec::new(),
        () = stay_alive => Vec::new(),
    };
    worker.seen(Timestamp::now());
    commands
}

pub async fn heartbeat(State(api): State<Api>, Segment(key): Segment) -> ApiResult<Response> {
    let worker = find_worker(&api, &key).await?;
    worker.drain_control_commands();
    Ok(json_response(format!("{{{}}}", notices(&worker))))
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

/// Returns the fields that responses to claims and heartbeats share: which jobs to stop, and whether the worker drains.
fn notices(worker: &ConnectedWorker) -> String {
    let cancel = worker.jobs_to_stop().into_iter();
    let cancel = cancel.map(|(job_id, run, reason)| json!({"jobId": job_id, "run": run, "reason": reason}));
    let cancel = serde_json::Value::from_iter(cancel);
    format!("\"cancel\":{cancel},\"drain\":{}", worker.is_draining())
}

pub async fn report(
    State(api): State<Api>,
    path: Result<Path<(String, String, String)>, axum::extract::rejection::PathRejection>,
    body: Body,
) -> ApiResult<Json<serde_json::Value>> {
    let Path((key, job, name)) = path.map_err(|_| ApiError::invalid_field("path", "must be UTF-8"))?;
    let job_id = parse_job_id(&job)?;
    let body = read_body(&api, body).await?;
    let mut fields = optional_fields(&api, &body)?;
    let run = fields.take("run", "a whole number");
    let kind = parse_kind(&name, &mut fields)?;
    finish(fields)?;
    let worker = find_worker(&api, &key).await?;
    api.engine.reports.handler.handle_one(&worker, Report { job_id, run, kind }, Timestamp::now()).await??;
    Ok(Json(json!({"ok": true})))
}

fn parse_kind(name: &str, fields: &mut Fields) -> ApiResult<ReportKind> {
    Ok(match name {
        "started" => ReportKind::Started,
        "release" => ReportKind::Release,
        "progress" => {
            let expected = "an object with phase, currentStep, completedSteps, totalSteps, percentage and message";
            let progress = fields.take::<Progress>("progress", expected);
            if !fields.errors.is_empty() {
                return Err(ApiError::invalid(std::mem::take(&mut fields.errors)));
            }
            report::progress(progress)?
        }
        "log" => report::log(fields.text("message"))?,
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
        other => {
            return Err(ApiError::not_found(format!(
                "no report \"{other}\"; use started, progress, log, step, complete, fail or release"
            )));
        }
    })
}

/// Ends a worker's registration. Its jobs return to their queues without using an attempt.
pub async fn leave(State(api): State<Api>, Segment(key): Segment) -> ApiResult<Json<Success>> {
    let worker = find_worker(&api, &key).await?;
    api.engine.deregister_worker(&worker, "the worker has left", Timestamp::now()).await;
    Ok(Json(Success { success: true }))
}

async fn find_worker(api: &Api, key: &str) -> ApiResult<Arc<ConnectedWorker>> {
    let worker = api.engine.find_polling_worker(key, Timestamp::now()).await?;
    worker.ok_or_else(|| unknown(key))
}

fn json_response(json: String) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], json).into_response()
}
