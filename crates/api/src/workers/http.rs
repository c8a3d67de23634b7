//! The plain-HTTP door: a worker can be a shell script with curl.
//!
//! Between two calls nothing can be told to such a worker, so it gets jobs only while it waits in a claim, and hears of
//! cancellations with its next call. It may call any node; the one it calls looks after it from then on.

use std::{sync::Arc, time::Duration};

use axum::{
    Json,
    body::{Body, Bytes},
    extract::{Path, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use faena_domain::{Progress, Timestamp, parse::Fields};
use faena_engine::workers::{ConnectedWorker, Order, Registration, Report, ReportKind, Transport};
use faena_wire::{Registered, Success};
use serde_json::json;

use super::{encode, records::unknown, report};
use crate::{
    Api, ApiError, ApiResult,
    request::{Segment, parse_job_id, read_body},
};

/// How long a claim waits, when it does not say.
const WAIT_MS: u64 = 20_000;
const LONGEST_WAIT_MS: u64 = 60_000;

pub async fn register(State(api): State<Api>, body: Body) -> ApiResult<Response> {
    let body = read_body(&api, body).await?;
    let mut fields = object_or_nothing(&api, &body)?;
    let registration = Registration {
        worker_id: fields.text("workerId"),
        name: fields.text("name"),
        capabilities: fields.list("capabilities", "a list of job types"),
        queues: fields.list("queues", "a list of queues"),
        concurrency: fields.take("concurrency", "a whole number, not negative"),
        tells_starts: fields.take("tellsStarts", "true or false").unwrap_or(false),
        holds: None,
    };
    let _token: Option<String> = fields.text("token");
    refuse(fields)?;
    let connection = api.engine.worker_connect(registration, Transport::Http, Timestamp::now()).await?;
    let answer = Registered {
        worker_id: connection.worker.key.clone(),
        heartbeat_interval_ms: u64::try_from(api.engine.config.worker_heartbeat.as_millis()).unwrap_or(u64::MAX),
        resumed: connection.resumed,
    };
    Ok((StatusCode::CREATED, Json(answer)).into_response())
}

pub async fn claim(State(api): State<Api>, Segment(key): Segment, body: Body) -> ApiResult<Response> {
    let body = read_body(&api, body).await?;
    let mut fields = object_or_nothing(&api, &body)?;
    let max = fields.number("max").map(|max| usize::try_from(max).unwrap_or(usize::MAX));
    let wait_ms = fields.number("waitMs").unwrap_or(WAIT_MS);
    if max == Some(0) {
        fields.reject("max", "must be at least 1");
    }
    if wait_ms > LONGEST_WAIT_MS {
        fields.reject("waitMs", format!("must be at most {LONGEST_WAIT_MS}"));
    }
    refuse(fields)?;
    let worker = caller(&api, &key).await?;
    let mut orders = worker.take_orders();
    if orders.is_empty() {
        orders = wait(&api, &worker, max, Duration::from_millis(wait_ms)).await;
    }
    Ok(json_text(&told(&worker, orders, true)))
}

async fn wait(api: &Api, worker: &Arc<ConnectedWorker>, max: Option<usize>, grace_periods: Duration) -> Vec<Order> {
    let free = worker.free();
    let wanted = max.unwrap_or(free).min(worker.concurrency);
    if wanted > free {
        let lost = worker.unheard(wanted - free);
        if !lost.is_empty() {
            api.engine.deliver_again(worker, lost, Timestamp::now()).await;
            return worker.take_orders();
        }
    }
    let _waiting = worker.wait_for(wanted.min(free));
    api.engine.worker_waits();
    // Whoever waits is there, however long: this ends with its request.
    let is_there = async {
        let mut beat = tokio::time::interval(api.engine.config.worker_heartbeat);
        loop {
            beat.tick().await;
            worker.seen(Timestamp::now());
        }
    };
    let orders = tokio::select! {
        orders = worker.orders() => orders,
        () = tokio::time::sleep(grace_periods) => Vec::new(),
        () = worker.closing.cancelled() => Vec::new(),
        () = api.closing.cancelled() => Vec::new(),
        () = is_there => Vec::new(),
    };
    worker.seen(Timestamp::now());
    orders
}

pub async fn heartbeat(State(api): State<Api>, Segment(key): Segment) -> ApiResult<Response> {
    let worker = caller(&api, &key).await?;
    let words = worker.take_words();
    Ok(json_text(&told(&worker, words, false)))
}

/// What a worker hears with the answer to a call.
fn told(worker: &ConnectedWorker, orders: Vec<Order>, with_jobs: bool) -> String {
    let mut jobs = Vec::new();
    let cancel: Vec<_> = worker
        .to_stop()
        .into_iter()
        .map(|(job_id, run, reason)| json!({"jobId": job_id, "run": run, "reason": reason}))
        .collect();
    for order in orders {
        match order {
            Order::Job(delivery) => {
                let mut job = String::new();
                encode::job(&mut job, &delivery);
                jobs.push(job);
            }
            Order::Cancel { .. } | Order::Ack(_) | Order::Drain | Order::Resume => {}
        }
    }
    let cancel = serde_json::Value::from(cancel);
    let rest = format!("\"cancel\":{cancel},\"drain\":{}}}", worker.is_draining());
    if with_jobs { format!("{{\"jobs\":[{}],{rest}", jobs.join(",")) } else { format!("{{{rest}") }
}

pub async fn report(
    State(api): State<Api>,
    path: Result<Path<(String, String, String)>, axum::extract::rejection::PathRejection>,
    body: Body,
) -> ApiResult<Json<serde_json::Value>> {
    let Path((key, job, name)) = path.map_err(|_| ApiError::invalid_field("path", "must be UTF-8"))?;
    let job_id = parse_job_id(&job)?;
    let body = read_body(&api, body).await?;
    let mut fields = object_or_nothing(&api, &body)?;
    let run = fields.take("run", "a whole number");
    let kind = read_kind(&name, &mut fields)?;
    refuse(fields)?;
    let worker = caller(&api, &key).await?;
    api.engine.report_handler.take_one(&worker, Report { job_id, run, kind }, Timestamp::now()).await??;
    Ok(Json(json!({"ok": true})))
}

fn read_kind(name: &str, fields: &mut Fields) -> ApiResult<ReportKind> {
    Ok(match name {
        "started" => ReportKind::Started,
        "release" => ReportKind::Release,
        "progress" => {
            let wanted = "an object of phase, currentStep, completedSteps, totalSteps, percentage and message";
            let progress = fields.take::<Progress>("progress", wanted);
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
                "{other} is not known here; there are started, progress, log, step, complete, fail and release"
            )));
        }
    })
}

/// The worker says goodbye; what it has goes back without costing a try.
pub async fn leave(State(api): State<Api>, Segment(key): Segment) -> ApiResult<Json<Success>> {
    let worker = caller(&api, &key).await?;
    api.engine.worker_leave(&worker, "it left", Timestamp::now()).await;
    Ok(Json(Success { success: true }))
}

async fn caller(api: &Api, key: &str) -> ApiResult<Arc<ConnectedWorker>> {
    let worker = api.engine.worker_calling(key, Timestamp::now()).await?;
    worker.ok_or_else(|| unknown(key))
}

fn object_or_nothing<'a>(api: &Api, body: &'a Bytes) -> ApiResult<Fields<'a>> {
    Ok(api.parser().fields(if body.is_empty() { b"{}" } else { body })?)
}

fn refuse(fields: Fields) -> ApiResult<()> {
    let errors = fields.finish();
    if errors.is_empty() { Ok(()) } else { Err(ApiError::invalid(errors)) }
}

fn json_text(json: &str) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], json.to_owned()).into_response()
}
