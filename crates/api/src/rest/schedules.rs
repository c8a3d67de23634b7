//! `/schedules`: manages schedules and shows their past and future due times.

use axum::{
    Json,
    body::Body,
    extract::{RawQuery, State},
    http::{StatusCode, header},
};
use bytes::Bytes;
use faena_domain::{
    FieldError, JobId, JobView, ScheduleId, Timestamp,
    schedule::{
        self, CompiledSchedule, Schedule, SchedulePatch, ScheduleSpec, ScheduleView, ScheduledRun, TickRow,
        invalid_timing_reason,
    },
};
use faena_store::{COUNT_LIMIT, Filter, Page, ScheduleChange, ScheduleFilter, SchedulePage};
use faena_wire::{CreatedSchedule, PageInfo, RunList, ScheduleList, Success, TickList, Triggered, ValidSchedule};

use super::{
    list::parse_time,
    paging::{ListResponse, Paging, respond},
    schedule_fields::parse_schedule,
};
use crate::{
    Api, ApiError, ApiResult, access,
    context::actor,
    request::{Segment, UNKNOWN_PARAMETER, parse_number, read_body, read_query},
};

pub async fn create(
    State(api): State<Api>,
    body: Body,
) -> ApiResult<(StatusCode, [(header::HeaderName, String); 1], Json<CreatedSchedule>)> {
    let body = read_body(&api, body).await?;
    let schedule = create_from(&api, &body).await?;
    let location = [(header::LOCATION, format!("/api/v1/schedules/{}", schedule.id))];
    let created = CreatedSchedule { id: schedule.id, name: schedule.spec.name, next_run_at: schedule.next_at };
    Ok((StatusCode::CREATED, location, Json(created)))
}

pub async fn create_from(api: &Api, body: &Bytes) -> ApiResult<Schedule> {
    let now = Timestamp::now();
    let CompiledSchedule { schedule, .. } = parse_new(api, body, now)?;
    access::require_queue(&schedule.spec.job.queue)?;
    api.engine.store.schedule_create(schedule.clone(), &actor(), now).await?;
    Ok(schedule)
}

/// Parses a new schedule without storing it.
fn parse_new(api: &Api, body: &Bytes, now: Timestamp) -> ApiResult<CompiledSchedule> {
    let fields = api.parser().fields(body)?;
    let parsed = parse_schedule(fields, ScheduleSpec::default(), api.parser());
    match Schedule::new(parsed.spec.clone(), &api.parser().limits, now) {
        Ok(mut compiled) if parsed.errors.is_empty() => {
            if parsed.is_active == Some(false) {
                compiled.disable();
            }
            Ok(compiled)
        }
        Ok(_) => Err(ApiError::invalid(parsed.errors)),
        Err(checked) => Err(ApiError::invalid(parsed.merge_errors(checked))),
    }
}

pub async fn validate(State(api): State<Api>, body: Body) -> ApiResult<Json<ValidSchedule>> {
    let body = read_body(&api, body).await?;
    Ok(Json(validate_from(&api, &body)?))
}

pub fn validate_from(api: &Api, body: &Bytes) -> ApiResult<ValidSchedule> {
    let now = Timestamp::now();
    let compiled = parse_new(api, body, now)?;
    Ok(ValidSchedule {
        valid: true,
        explanation: compiled.timing.explain(),
        next_runs: schedule::preview(&compiled, now, 10),
        timezone: compiled.schedule.spec.timing.timezone,
    })
}

pub async fn list(State(api): State<Api>, RawQuery(query): RawQuery) -> ListResponse<ScheduleList> {
    let (schedules, page_info) = find(&api, query.as_deref()).await?;
    respond(page_info, |page_info| ScheduleList::new(schedules, page_info))
}

/// Finds the schedules that match a query string, ordered by name.
pub async fn find(api: &Api, query: Option<&str>) -> ApiResult<(Vec<ScheduleView>, PageInfo)> {
    let (mut filter, mut paging) = (ScheduleFilter::default(), Paging::<usize>::new());
    read_query(query, &[], |name, value| {
        if paging.set(name, &value)? {
            return Ok(());
        }
        match name {
            "isActive" | "enabled" => {
                let is_active = value.parse().map_err(|_| "must be true or false")?;
                if filter.is_active.is_some_and(|known| known != is_active) {
                    return Err("isActive and enabled differ; set only one of them".into());
                }
                filter.is_active = Some(is_active);
            }
            "name" => filter.name = Some(value),
            "q" if value.trim().is_empty() => return Err("must not be empty".into()),
            "q" => filter.q = Some(value.trim().to_owned()),
            _ => return Err(UNKNOWN_PARAMETER.into()),
        }
        Ok(())
    })?;
    if access::queues()?.is_some() {
        let page = SchedulePage { offset: 0, limit: COUNT_LIMIT };
        let (all, _) = api.engine.store.schedule_list(filter, page).await?;
        let visible =
            all.iter().filter(|schedule| access::includes_queue(&schedule.spec.job.queue)).map(Schedule::view);
        return Ok(paging.page_of_all(visible.collect()));
    }
    let limit = paging.limit;
    let offset = paging.after().map_or_else(|| paging.offset(), Ok)?;
    let (found, total) = api.engine.store.schedule_list(filter, SchedulePage { offset, limit }).await?;
    let end = offset.saturating_add(limit);
    let page_info = paging.page_info(total, true, ((end as u64) < total).then_some(end));
    Ok((found.iter().map(Schedule::view).collect(), page_info))
}

/// Number of latest jobs in the view of a schedule.
const LATEST_JOBS: usize = 10;

pub async fn show(State(api): State<Api>, Segment(id): Segment) -> ApiResult<Json<ScheduleView>> {
    Ok(Json(read_view(&api, &id).await?))
}

/// Returns a schedule with its latest jobs.
pub async fn read_view(api: &Api, id: &str) -> ApiResult<ScheduleView> {
    let schedule = load(api, id).await?;
    Ok(ScheduleView { jobs: Some(latest_jobs(api, schedule.id).await?), ..schedule.view() })
}

async fn latest_jobs(api: &Api, id: ScheduleId) -> ApiResult<Vec<JobView>> {
    let filter = Filter { schedule_id: Some(id.to_string()), ..Filter::default() };
    let found = api.engine.store.job_list(&filter, Page::after(None, LATEST_JOBS)).await?;
    Ok(found.jobs.into_iter().map(|job| api.with_default_timeout(job)).collect())
}

async fn load(api: &Api, text: &str) -> ApiResult<Schedule> {
    let id = parse_id(text)?;
    api.engine.store.schedule_get(id).await?.ok_or_else(|| unknown(text))
}

fn parse_id(text: &str) -> ApiResult<ScheduleId> {
    text.parse().map_err(|_| unknown(text))
}

fn unknown(id: &str) -> ApiError {
    ApiError::not_found(format!("no schedule \"{id}\""))
}

pub async fn patch(State(api): State<Api>, Segment(id): Segment, body: Body) -> ApiResult<Json<ScheduleView>> {
    let body = read_body(&api, body).await?;
    Ok(Json(patch_from(&api, &id, body).await?))
}

pub async fn patch_from(api: &Api, id: &str, body: Bytes) -> ApiResult<ScheduleView> {
    if api.parser().fields(&body)?.is_empty() {
        return Err(ApiError::invalid_field("body", "nothing to change; set at least one field"));
    }
    let parser = api.parser().clone();
    // Applied to the stored schedule under its lock, so that concurrent changes do not undo each other.
    let edit = move |schedule: &Schedule| {
        let fields = parser.fields(&body).map_err(|error| ApiError::from(error).details)?;
        let parsed = parse_schedule(fields, schedule.spec.clone(), &parser);
        if !parsed.errors.is_empty() {
            let checked = parsed.spec.check(&parser.limits, schedule.anchor_at).err().unwrap_or_default();
            return Err(parsed.merge_errors(checked));
        }
        Ok(SchedulePatch { spec: Some(parsed.spec), is_active: parsed.is_active })
    };
    change(api, id, "schedule.edit", edit).await
}

pub async fn enable(State(api): State<Api>, Segment(id): Segment) -> ApiResult<Json<ScheduleView>> {
    Ok(Json(enable_by_id(&api, &id).await?))
}

pub async fn disable(State(api): State<Api>, Segment(id): Segment) -> ApiResult<Json<ScheduleView>> {
    Ok(Json(disable_by_id(&api, &id).await?))
}

pub async fn enable_by_id(api: &Api, id: &str) -> ApiResult<ScheduleView> {
    let patch = SchedulePatch { spec: None, is_active: Some(true) };
    change(api, id, "schedule.enable", move |_| Ok(patch.clone())).await
}

pub async fn disable_by_id(api: &Api, id: &str) -> ApiResult<ScheduleView> {
    let patch = SchedulePatch { spec: None, is_active: Some(false) };
    change(api, id, "schedule.disable", move |_| Ok(patch.clone())).await
}

async fn change(
    api: &Api,
    id: &str,
    action: &'static str,
    edit: impl Fn(&Schedule) -> Result<SchedulePatch, Vec<FieldError>> + Send + Sync + 'static,
) -> ApiResult<ScheduleView> {
    let queues = access::queues()?;
    let edit = move |schedule: &Schedule| {
        let patch = edit(schedule)?;
        let queue = patch.spec.as_ref().map(|spec| &spec.job.queue);
        if let (Some(queues), Some(queue)) = (&queues, queue)
            && !queues.contains(queue)
        {
            return Err(vec![FieldError::new("queue", "this API key is restricted to other queues")]);
        }
        Ok(patch)
    };
    let change = ScheduleChange { edit: Box::new(edit), limits: api.parser().limits.clone(), action };
    let changed = api.engine.store.schedule_patch(parse_id(id)?, change, &actor(), Timestamp::now()).await?;
    Ok(changed.ok_or_else(|| unknown(id))?.view())
}

pub async fn delete(State(api): State<Api>, Segment(id): Segment) -> ApiResult<Json<Success>> {
    remove(&api, &id).await?;
    Ok(Json(Success { success: true }))
}

pub async fn remove(api: &Api, id: &str) -> ApiResult<()> {
    match api.engine.store.schedule_delete(parse_id(id)?, &actor(), Timestamp::now()).await? {
        true => Ok(()),
        false => Err(unknown(id)),
    }
}

pub async fn trigger(
    State(api): State<Api>,
    Segment(id): Segment,
) -> ApiResult<(StatusCode, [(header::HeaderName, String); 1], Json<Triggered>)> {
    let job_id = run_now(&api, &id).await?;
    let location = [(header::LOCATION, format!("/api/v1/jobs/{job_id}"))];
    Ok((StatusCode::CREATED, location, Json(Triggered { job_id })))
}

pub async fn run_now(api: &Api, id: &str) -> ApiResult<JobId> {
    let now = Timestamp::now();
    api.engine.trigger_schedule(parse_id(id)?, &actor(), now).await?.ok_or_else(|| unknown(id))
}

pub async fn preview(
    State(api): State<Api>,
    Segment(id): Segment,
    RawQuery(query): RawQuery,
) -> ApiResult<Json<RunList>> {
    Ok(Json(next_runs(&api, &id, query.as_deref()).await?))
}

/// Returns the next due times, as if the schedule were active.
pub async fn next_runs(api: &Api, id: &str, query: Option<&str>) -> ApiResult<RunList> {
    let mut count = 10;
    read_query(query, &[], |name, value| {
        match name {
            "count" => count = parse_number(&value, 1_000)?,
            _ => return Err(UNKNOWN_PARAMETER.into()),
        }
        Ok(())
    })?;
    let schedule = load(api, id).await?;
    let timezone = schedule.spec.timing.timezone.clone();
    let (next_runs, explanation): (Vec<ScheduledRun>, String) = match schedule.compile() {
        Ok(compiled) => {
            let after = compiled.schedule.cursor_at.max(Timestamp::now());
            (schedule::preview(&compiled, after, count), compiled.timing.explain())
        }
        Err(errors) => (Vec::new(), invalid_timing_reason(&errors)),
    };
    Ok(RunList { next_runs, timezone, explanation })
}

pub async fn ticks(State(api): State<Api>, Segment(id): Segment, RawQuery(query): RawQuery) -> ListResponse<TickList> {
    let (ticks, page_info) = past_ticks(&api, &id, query.as_deref()).await?;
    respond(page_info, |page_info| TickList::new(ticks, page_info))
}

/// Returns records of past due times, latest first.
pub async fn past_ticks(api: &Api, id: &str, query: Option<&str>) -> ApiResult<(Vec<TickRow>, PageInfo)> {
    let (mut before, mut paging) = (None, Paging::<i64>::new());
    read_query(query, &[], |name, value| {
        if paging.set(name, &value)? {
            return Ok(());
        }
        match name {
            "before" => before = Some(parse_time(&value)?),
            _ => return Err(UNKNOWN_PARAMETER.into()),
        }
        Ok(())
    })?;
    let schedule = load(api, id).await?;
    let store = &api.engine.store;
    let total = store.schedule_tick_total(schedule.id, before).await?;
    // The cursor is the due time of the last record.
    let after = paging.after().map(Timestamp::from_ms).into_iter().chain(before).min();
    let read = store.schedule_ticks(schedule.id, after, paging.wanted()?).await?;
    paging.page_of_read(read, total, |tick| tick.due_at.as_ms())
}
