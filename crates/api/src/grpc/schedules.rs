//! `faena.v1.ScheduleService`.
//!
//! A request becomes a body or query of the HTTP API, so that the same rules apply to both.

use bytes::Bytes;
use faena_domain::schedule::{self, ScheduleView, TickRow};
use faena_wire::v1::{
    CreateScheduleRequest, CreateScheduleResponse, DeleteScheduleRequest, DeleteScheduleResponse, GetScheduleRequest,
    GetScheduleResponse, ListScheduleTicksRequest, ListScheduleTicksResponse, ListSchedulesRequest,
    ListSchedulesResponse, PreviewScheduleRequest, PreviewScheduleResponse, Schedule, ScheduleSpec, ScheduleTick,
    ScheduledRun, SetScheduleActiveRequest, SetScheduleActiveResponse, TriggerScheduleRequest, TriggerScheduleResponse,
    UpdateScheduleRequest, UpdateScheduleResponse, ValidateScheduleRequest, ValidateScheduleResponse,
    schedule_service_server::ScheduleService,
};
use serde_json::Value;
use tonic::{Request, Response};

use super::{
    GrpcResult,
    convert::{self, JsonBody, RetryFields},
    query,
};
use crate::{Api, ApiError, ApiResult, access, rest::schedules};

pub struct Schedules(pub Api);

#[tonic::async_trait]
impl ScheduleService for Schedules {
    async fn create_schedule(&self, request: Request<CreateScheduleRequest>) -> GrpcResult<CreateScheduleResponse> {
        let schedule = schedules::create_from(&self.0, &body(request.into_inner().schedule)).await?;
        Ok(Response::new(CreateScheduleResponse { schedule: Some(message(schedule.view())) }))
    }

    async fn get_schedule(&self, request: Request<GetScheduleRequest>) -> GrpcResult<GetScheduleResponse> {
        let id = request.into_inner().id;
        access::require_schedule(&self.0, &id).await?;
        let schedule = schedules::read_view(&self.0, &id).await?;
        Ok(Response::new(GetScheduleResponse { schedule: Some(message(schedule)) }))
    }

    async fn list_schedules(&self, request: Request<ListSchedulesRequest>) -> GrpcResult<ListSchedulesResponse> {
        let request = request.into_inner();
        let query = query([
            ("isActive", request.is_active.map(|flag| flag.to_string())),
            ("name", request.name),
            ("q", request.query),
            ("limit", request.page_size.map(|size| size.to_string())),
            ("cursor", Some(request.page_token)),
        ]);
        let (schedules, page_info) = schedules::find(&self.0, Some(&query)).await?;
        Ok(Response::new(ListSchedulesResponse {
            schedules: schedules.into_iter().map(message).collect(),
            total_size: page_info.total,
            next_page_token: page_info.next_cursor.unwrap_or_default(),
        }))
    }

    async fn update_schedule(&self, request: Request<UpdateScheduleRequest>) -> GrpcResult<UpdateScheduleResponse> {
        let UpdateScheduleRequest { id, schedule, update_mask } = request.into_inner();
        access::require_schedule(&self.0, &id).await?;
        let paths = update_mask.map(|mask| mask.paths).unwrap_or_default();
        let body = masked_body(schedule, &paths)?;
        let changed = schedules::patch_from(&self.0, &id, body).await?;
        Ok(Response::new(UpdateScheduleResponse { schedule: Some(message(changed)) }))
    }

    async fn delete_schedule(&self, request: Request<DeleteScheduleRequest>) -> GrpcResult<DeleteScheduleResponse> {
        let id = request.into_inner().id;
        access::require_schedule(&self.0, &id).await?;
        schedules::remove(&self.0, &id).await?;
        Ok(Response::new(DeleteScheduleResponse {}))
    }

    async fn trigger_schedule(&self, request: Request<TriggerScheduleRequest>) -> GrpcResult<TriggerScheduleResponse> {
        let id = request.into_inner().id;
        access::require_schedule(&self.0, &id).await?;
        let job = schedules::run_now(&self.0, &id).await?;
        Ok(Response::new(TriggerScheduleResponse { job_id: job.to_string() }))
    }

    async fn set_schedule_active(
        &self,
        request: Request<SetScheduleActiveRequest>,
    ) -> GrpcResult<SetScheduleActiveResponse> {
        let SetScheduleActiveRequest { id, is_active } = request.into_inner();
        access::require_schedule(&self.0, &id).await?;
        let changed = match is_active {
            true => schedules::enable_by_id(&self.0, &id).await?,
            false => schedules::disable_by_id(&self.0, &id).await?,
        };
        Ok(Response::new(SetScheduleActiveResponse { schedule: Some(message(changed)) }))
    }

    async fn preview_schedule(&self, request: Request<PreviewScheduleRequest>) -> GrpcResult<PreviewScheduleResponse> {
        let PreviewScheduleRequest { id, count } = request.into_inner();
        let query = query([("count", count.map(|count| count.to_string()))]);
        access::require_schedule(&self.0, &id).await?;
        let found = schedules::next_runs(&self.0, &id, Some(&query)).await?;
        Ok(Response::new(PreviewScheduleResponse {
            runs: found.next_runs.into_iter().map(run).collect(),
            timezone: found.timezone,
            explanation: found.explanation,
        }))
    }

    async fn validate_schedule(
        &self,
        request: Request<ValidateScheduleRequest>,
    ) -> GrpcResult<ValidateScheduleResponse> {
        let valid = schedules::validate_from(&self.0, &body(request.into_inner().schedule))?;
        Ok(Response::new(ValidateScheduleResponse {
            explanation: valid.explanation,
            timezone: valid.timezone,
            next_runs: valid.next_runs.into_iter().map(run).collect(),
        }))
    }

    async fn list_schedule_ticks(
        &self,
        request: Request<ListScheduleTicksRequest>,
    ) -> GrpcResult<ListScheduleTicksResponse> {
        let ListScheduleTicksRequest { id, before, page_size } = request.into_inner();
        access::require_schedule(&self.0, &id).await?;
        let before = before.map(convert::time_json).and_then(|time| time.as_str().map(str::to_owned));
        let query = query([("before", before), ("limit", page_size.map(|size| size.to_string()))]);
        let (ticks, _) = schedules::past_ticks(&self.0, &id, Some(&query)).await?;
        Ok(Response::new(ListScheduleTicksResponse { ticks: ticks.into_iter().map(tick).collect() }))
    }
}

/// Fields of `ScheduleSpec` and their names in JSON.
const FIELDS: &[(&str, &str)] = &[
    ("name", "name"),
    ("description", "description"),
    ("cron_expression", "cronExpression"),
    ("interval", "intervalMs"),
    ("timezone", "timezone"),
    ("dst_gap", "dstGap"),
    ("dst_overlap", "dstOverlap"),
    ("start_at", "startAt"),
    ("end_at", "endAt"),
    ("except", "except"),
    ("job_name", "jobName"),
    ("job_type", "jobType"),
    ("job_payload_json", PAYLOAD),
    ("job_priority", "jobPriority"),
    ("queue", "queue"),
    ("retry_policy.max_retries", "maxRetries"),
    ("retry_policy.delay", "retryDelay"),
    ("retry_policy.backoff_multiplier", "backoffMultiplier"),
    ("retry_policy.max_delay", "maxDelay"),
    ("retry_policy.delays", "retryDelays"),
    ("retry_policy.retry_on", "retryOn"),
    ("retry_policy.error_patterns", "retryOn"),
    ("timeout", "timeoutMs"),
    ("webhook_url", "webhookUrl"),
    ("concurrency_key", "concurrencyKey"),
    ("tags", "tags"),
    ("misfire", "misfire"),
    ("misfire_grace", "misfireGraceMs"),
    ("catch_up_limit", "catchUpLimit"),
    ("overlap", "overlap"),
    ("jitter", "jitterMs"),
    ("max_runs", "maxRuns"),
    ("is_active", "isActive"),
];

const PAYLOAD: &str = "jobPayload";

/// Returns the body of `POST /api/v1/schedules` for the same schedule. The payload is copied unchanged.
fn body(spec: Option<ScheduleSpec>) -> Bytes {
    let spec = spec.unwrap_or_default();
    let payload = spec.job_payload_json.clone();
    Bytes::from(fields(spec).into_text(PAYLOAD, &payload))
}

/// Returns the body of `PATCH /api/v1/schedules/:id`.
///
/// If there are paths, the body has only the fields that they name, with `null` for fields that are not set.
fn masked_body(spec: Option<ScheduleSpec>, paths: &[String]) -> ApiResult<Bytes> {
    if paths.is_empty() {
        return Ok(body(spec));
    }
    let spec = spec.unwrap_or_default();
    let mut payload = spec.job_payload_json.clone();
    let mut set = fields(spec).0;
    let mut masked = JsonBody::default();
    for path in paths {
        let below = format!("{path}.");
        let mut named = FIELDS.iter().filter(|(field, _)| field == path || field.starts_with(&below)).peekable();
        if named.peek().is_none() {
            let message = format!("\"{path}\" is not a field of a schedule");
            return Err(ApiError::invalid_field("update_mask", message));
        }
        for (_, name) in named {
            let known = masked.0.get(*name).cloned();
            masked.0.insert((*name).to_owned(), set.remove(*name).or(known).unwrap_or(Value::Null));
        }
    }
    if masked.0.remove(PAYLOAD).is_none() {
        payload.clear();
    } else if payload.is_empty() {
        payload.push_str("null");
    }
    Ok(Bytes::from(masked.into_text(PAYLOAD, &payload)))
}

fn fields(spec: ScheduleSpec) -> JsonBody {
    let mut body = JsonBody::default();
    body.put("name", spec.name);
    body.put("description", spec.description);
    body.put("cronExpression", spec.cron_expression);
    body.put_duration("intervalMs", spec.interval);
    body.put("timezone", spec.timezone);
    body.put("dstGap", convert::dst_gap_name(spec.dst_gap));
    body.put("dstOverlap", convert::dst_overlap_name(spec.dst_overlap));
    body.put_time("startAt", spec.start_at);
    body.put_time("endAt", spec.end_at);
    body.put_list("except", spec.except);
    body.put("jobName", spec.job_name);
    body.put("jobType", spec.job_type);
    body.put("jobPriority", convert::priority_name(spec.job_priority));
    body.put("queue", spec.queue);
    body.put_retry_policy(spec.retry_policy);
    body.put_duration("timeoutMs", spec.timeout);
    body.put("webhookUrl", spec.webhook_url);
    body.put("concurrencyKey", spec.concurrency_key);
    body.put_list("tags", spec.tags);
    body.put("misfire", convert::misfire_name(spec.misfire));
    body.put_duration("misfireGraceMs", spec.misfire_grace);
    body.put("catchUpLimit", spec.catch_up_limit);
    body.put("overlap", convert::overlap_name(spec.overlap));
    body.put_duration("jitterMs", spec.jitter);
    body.put("maxRuns", spec.max_runs);
    body.put("isActive", spec.is_active);
    body
}

fn run(run: schedule::ScheduledRun) -> ScheduledRun {
    ScheduledRun { run_at: Some(convert::timestamp(run.at)), local: run.local, note: run.note }
}

fn tick(tick: TickRow) -> ScheduleTick {
    ScheduleTick {
        due_at: Some(convert::timestamp(tick.due_at)),
        outcome: convert::tick_outcome(tick.outcome),
        reason: tick.reason,
        job_id: tick.job_id.map(|id| id.to_string()),
        decided_at: Some(convert::timestamp(tick.at)),
        through_at: tick.through_at.map(convert::timestamp),
        count: tick.count,
    }
}

fn message(view: ScheduleView) -> Schedule {
    let (id, explanation) = (view.id.to_string(), view.explanation.clone());
    let (next_run_at, last_run_at, last_due_at) = (view.next_run_at, view.last_run_at, view.last_due_at);
    Schedule {
        id,
        explanation,
        next_run_at: next_run_at.map(convert::timestamp),
        last_run_at: last_run_at.map(convert::timestamp),
        last_due_at: last_due_at.map(convert::timestamp),
        last_job_id: view.last_job_id.map(|id| id.to_string()),
        run_count: view.run_count,
        finished: view.finished.clone(),
        created_at: Some(convert::timestamp(view.created_at)),
        updated_at: Some(convert::timestamp(view.updated_at)),
        jobs: view.jobs.iter().flatten().cloned().map(convert::job).collect(),
        spec: Some(spec(view)),
    }
}

fn spec(view: ScheduleView) -> ScheduleSpec {
    let retry = RetryFields {
        max_retries: view.max_retries,
        delay_ms: view.retry_delay,
        backoff_multiplier: view.backoff_multiplier,
        max_delay_ms: view.max_delay,
        delays_ms: view.retry_delays,
        jitter: None,
        retry_on: view.retry_on,
    };
    ScheduleSpec {
        name: Some(view.name),
        description: view.description,
        cron_expression: view.cron_expression,
        interval: view.interval_ms.map(convert::duration),
        timezone: Some(view.timezone),
        dst_gap: convert::dst_gap(&convert::json_name(&view.dst_gap)),
        dst_overlap: convert::dst_overlap(&convert::json_name(&view.dst_overlap)),
        start_at: view.start_at.map(convert::timestamp),
        end_at: view.end_at.map(convert::timestamp),
        except: view.except,
        job_name: Some(view.job_name),
        job_type: Some(view.job_type),
        job_payload_json: view.job_payload.get().into(),
        job_priority: convert::priority(view.job_priority),
        queue: Some(view.queue),
        retry_policy: Some(convert::retry_policy(retry)),
        timeout: view.timeout_ms.map(convert::duration),
        webhook_url: view.webhook_url,
        concurrency_key: view.concurrency_key,
        tags: view.tags,
        misfire: convert::misfire(&convert::json_name(&view.misfire)),
        misfire_grace: Some(convert::duration(view.misfire_grace_ms)),
        catch_up_limit: Some(view.catch_up_limit),
        overlap: convert::overlap(&convert::json_name(&view.overlap)),
        jitter: Some(convert::duration(view.jitter_ms)),
        max_runs: view.max_runs,
        is_active: Some(view.is_active),
    }
}
