//! `faena.v1.ScheduleService`. A request is put into the words of REST, so that one set of rules holds for both.

use bytes::Bytes;
use faena_domain::{
    Timestamp,
    schedule::{self, ScheduleView, TickRow},
};
use faena_wire::v1::{
    CreateScheduleRequest, DeleteScheduleResponse, ListSchedulesRequest, ListSchedulesResponse, ListTicksRequest,
    ListTicksResponse, PreviewScheduleRequest, PreviewScheduleResponse, Schedule, ScheduleRequest, ScheduleSpec,
    ScheduleTick, ScheduledRun, SetScheduleActiveRequest, TriggerScheduleResponse, UpdateScheduleRequest,
    ValidateScheduleResponse, schedule_service_server::ScheduleService,
};
use serde_json::{Map, Value, value::RawValue};
use tonic::{Request, Response, Status};

use super::jobs;
use crate::{Api, rest::schedules};

pub struct Schedules(pub Api);

type GrpcResult<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl ScheduleService for Schedules {
    async fn create(&self, request: Request<CreateScheduleRequest>) -> GrpcResult<Schedule> {
        let body = body(request.into_inner().schedule, Vec::new());
        let schedule = schedules::create_from(&self.0, &body).await?;
        Ok(Response::new(message(schedule.view())))
    }

    async fn get(&self, request: Request<ScheduleRequest>) -> GrpcResult<Schedule> {
        Ok(Response::new(message(schedules::shown(&self.0, &request.into_inner().id).await?)))
    }

    async fn list(&self, request: Request<ListSchedulesRequest>) -> GrpcResult<ListSchedulesResponse> {
        let ask = request.into_inner();
        let query = query([
            ("isActive", ask.is_active.map(|flag| flag.to_string())),
            ("name", ask.name),
            ("q", ask.q),
            ("page", ask.page.map(|page| page.to_string())),
            ("limit", ask.limit.map(|limit| limit.to_string())),
        ]);
        let found = schedules::find(&self.0, &query).await?;
        let schedules = found.schedules.into_iter().map(message).collect();
        Ok(Response::new(ListSchedulesResponse { schedules, total: found.total }))
    }

    async fn update(&self, request: Request<UpdateScheduleRequest>) -> GrpcResult<Schedule> {
        let UpdateScheduleRequest { id, schedule, clear } = request.into_inner();
        let body = body(schedule, clear);
        Ok(Response::new(message(schedules::patch_from(&self.0, &id, body).await?)))
    }

    async fn delete(&self, request: Request<ScheduleRequest>) -> GrpcResult<DeleteScheduleResponse> {
        schedules::remove(&self.0, &request.into_inner().id).await?;
        Ok(Response::new(DeleteScheduleResponse {}))
    }

    async fn trigger(&self, request: Request<ScheduleRequest>) -> GrpcResult<TriggerScheduleResponse> {
        let job = schedules::run_now(&self.0, &request.into_inner().id).await?;
        Ok(Response::new(TriggerScheduleResponse { job_id: job.to_string() }))
    }

    async fn set_active(&self, request: Request<SetScheduleActiveRequest>) -> GrpcResult<Schedule> {
        let SetScheduleActiveRequest { id, is_active } = request.into_inner();
        let changed = match is_active {
            true => schedules::enabled(&self.0, &id).await?,
            false => schedules::disabled(&self.0, &id).await?,
        };
        Ok(Response::new(message(changed)))
    }

    async fn preview(&self, request: Request<PreviewScheduleRequest>) -> GrpcResult<PreviewScheduleResponse> {
        let PreviewScheduleRequest { id, count } = request.into_inner();
        let found = schedules::coming(&self.0, &id, &query([("count", count.map(|n| n.to_string()))])).await?;
        Ok(Response::new(PreviewScheduleResponse {
            runs: found.runs.into_iter().map(run).collect(),
            timezone: found.timezone,
            explanation: found.explanation,
        }))
    }

    async fn validate(&self, request: Request<CreateScheduleRequest>) -> GrpcResult<ValidateScheduleResponse> {
        let valid = schedules::validate_from(&self.0, &body(request.into_inner().schedule, Vec::new()))?;
        Ok(Response::new(ValidateScheduleResponse {
            explanation: valid.explanation,
            timezone: valid.timezone,
            next_runs: valid.next_runs.into_iter().map(run).collect(),
        }))
    }

    async fn list_ticks(&self, request: Request<ListTicksRequest>) -> GrpcResult<ListTicksResponse> {
        let ListTicksRequest { id, before_ms, limit } = request.into_inner();
        let before = before_ms.map(|ms| Timestamp::from_ms(ms).to_string());
        let query = query([("before", before), ("limit", limit.map(|limit| limit.to_string()))]);
        let ticks = schedules::past(&self.0, &id, &query).await?.into_iter().map(tick).collect();
        Ok(Response::new(ListTicksResponse { ticks }))
    }
}

fn query<const N: usize>(pairs: [(&str, Option<String>); N]) -> String {
    let mut query = url::form_urlencoded::Serializer::new(String::new());
    for (name, value) in pairs {
        if let Some(value) = value {
            query.append_pair(name, &value);
        }
    }
    query.finish()
}

/// The body that says the same to REST. The payload goes in to the letter.
fn body(spec: Option<ScheduleSpec>, clear: Vec<String>) -> Bytes {
    let spec = spec.unwrap_or_default();
    let mut fields: Map<String, Value> = clear.into_iter().map(|name| (name, Value::Null)).collect();
    let mut put = |name: &str, value: Option<Value>| {
        if let Some(value) = value {
            fields.insert(name.to_owned(), value);
        }
    };
    let list = |list: Vec<String>| (!list.is_empty()).then(|| Value::from(list));
    let time = |ms: Option<i64>| ms.map(|ms| Value::from(Timestamp::from_ms(ms).to_string()));
    for (name, text) in [
        ("name", spec.name),
        ("description", spec.description),
        ("cronExpression", spec.cron_expression),
        ("timezone", spec.timezone),
        ("dstGap", spec.dst_gap),
        ("dstOverlap", spec.dst_overlap),
        ("jobName", spec.job_name),
        ("jobType", spec.job_type),
        ("jobPriority", spec.job_priority),
        ("queue", spec.queue),
        ("webhookUrl", spec.webhook_url),
        ("concurrencyKey", spec.concurrency_key),
        ("misfire", spec.misfire),
        ("overlap", spec.overlap),
    ] {
        put(name, text.map(Value::from));
    }
    for (name, number) in [
        ("intervalMs", spec.interval_ms),
        ("maxRetries", spec.max_retries.map(u64::from)),
        ("retryDelay", spec.retry_delay_ms),
        ("maxDelay", spec.max_delay_ms),
        ("timeoutMs", spec.timeout_ms),
        ("misfireGraceMs", spec.misfire_grace_ms),
        ("catchUpLimit", spec.catch_up_limit.map(u64::from)),
        ("jitterMs", spec.jitter_ms),
        ("maxRuns", spec.max_runs),
    ] {
        put(name, number.map(Value::from));
    }
    put("startAt", time(spec.start_at_ms));
    put("endAt", time(spec.end_at_ms));
    put("except", list(spec.except));
    put("backoffMultiplier", spec.backoff_multiplier.map(Value::from));
    put("retryDelays", (!spec.retry_delays_ms.is_empty()).then(|| spec.retry_delays_ms.into()));
    put("retryOn", jobs::retry_on(spec.retry_on));
    put("tags", list(spec.tags));
    put("isActive", spec.is_active.map(Value::from));
    if !spec.job_payload_json.is_empty() {
        // Its place; what is no JSON stays a text, which is refused as a payload by its name.
        put("jobPayload", Some(spec.job_payload_json.clone().into()));
    }
    with_payload(fields, &spec.job_payload_json)
}

fn with_payload(fields: Map<String, Value>, payload: &str) -> Bytes {
    let raw = serde_json::from_str::<&RawValue>(payload).ok();
    let texts: Vec<String> = fields
        .into_iter()
        .map(|(name, value)| {
            let text = match raw.filter(|_| name == "jobPayload" && !value.is_null()) {
                Some(raw) => raw.get().to_owned(),
                None => value.to_string(),
            };
            format!("{}:{text}", Value::from(name))
        })
        .collect();
    Bytes::from(format!("{{{}}}", texts.join(",")))
}

fn run(run: schedule::ScheduledRun) -> ScheduledRun {
    ScheduledRun { at_ms: run.at.as_ms(), local: run.local, note: run.note }
}

fn tick(tick: TickRow) -> ScheduleTick {
    ScheduleTick {
        due_at_ms: tick.due_at.as_ms(),
        outcome: tick.outcome.as_str().into(),
        reason: tick.reason,
        job_id: tick.job_id.map(|id| id.to_string()),
        at_ms: tick.at.as_ms(),
        through_at_ms: tick.through_at.map(Timestamp::as_ms),
        count: tick.count,
    }
}

/// The name by which it stands in JSON.
fn word(choice: &impl serde::Serialize) -> String {
    match serde_json::to_value(choice) {
        Ok(Value::String(text)) => text,
        _ => String::new(),
    }
}

fn message(view: ScheduleView) -> Schedule {
    let retry_on = match view.retry_on {
        Value::Array(patterns) => patterns.iter().filter_map(|one| one.as_str().map(str::to_owned)).collect(),
        name => name.as_str().map(str::to_owned).into_iter().collect(),
    };
    let spec = ScheduleSpec {
        name: Some(view.name),
        description: view.description,
        cron_expression: view.cron_expression,
        interval_ms: view.interval_ms,
        timezone: Some(view.timezone),
        dst_gap: Some(word(&view.dst_gap)),
        dst_overlap: Some(word(&view.dst_overlap)),
        start_at_ms: view.start_at.map(Timestamp::as_ms),
        end_at_ms: view.end_at.map(Timestamp::as_ms),
        except: view.except,
        job_name: Some(view.job_name),
        job_type: Some(view.job_type),
        job_payload_json: view.job_payload.get().into(),
        job_priority: Some(view.job_priority.as_str().into()),
        queue: Some(view.queue),
        max_retries: Some(view.max_retries),
        retry_delay_ms: Some(view.retry_delay),
        backoff_multiplier: Some(view.backoff_multiplier),
        max_delay_ms: Some(view.max_delay),
        retry_delays_ms: view.retry_delays,
        retry_on,
        timeout_ms: view.timeout_ms,
        webhook_url: view.webhook_url,
        concurrency_key: view.concurrency_key,
        tags: view.tags,
        misfire: Some(word(&view.misfire)),
        misfire_grace_ms: Some(view.misfire_grace_ms),
        catch_up_limit: Some(view.catch_up_limit),
        overlap: Some(word(&view.overlap)),
        jitter_ms: Some(view.jitter_ms),
        max_runs: view.max_runs,
        is_active: Some(view.is_active),
    };
    Schedule {
        id: view.id.to_string(),
        spec: Some(spec),
        explanation: view.explanation,
        next_run_at_ms: view.next_run_at.map(Timestamp::as_ms),
        last_run_at_ms: view.last_run_at.map(Timestamp::as_ms),
        last_due_at_ms: view.last_due_at.map(Timestamp::as_ms),
        last_job_id: view.last_job_id.map(|id| id.to_string()),
        run_count: view.run_count,
        finished: view.finished,
        created_at_ms: view.created_at.as_ms(),
        updated_at_ms: view.updated_at.as_ms(),
        jobs: view.jobs.into_iter().map(jobs::message).collect(),
    }
}
