//! Bulk actions: one action on every job that a filter matches. `POST /jobs/bulk/…` and `POST /dead-letter/bulk/…`
//! start one; `/bulk` lists, shows and cancels them.
//!
//! Without a rate, the response waits until the action has finished. With a rate, the server accepts the action and the
//! bulk loop of any node runs it (`bulk.rs` of the engine).

use std::time::Duration;

use axum::{
    Json,
    body::Body,
    extract::{RawQuery, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use faena_domain::{BulkId, ErrorCode, JobId, JobState, JobView, Timestamp, parse::Fields};
use faena_store::{Bulk, BulkAction, BulkWork, Filter, NewBulk, Page, StoreError};
use faena_wire::{BulkExample, BulkList, BulkResponse, BulkView, PageInfo};
use serde_json::{Map, Value};

use super::{
    dead_letters::set_dead_letter_filter,
    list::{SetFilter, set_filter, set_from_body},
    paging::{ListResponse, Paging, parse_paging, respond},
};
use crate::{
    Api, ApiError, ApiResult, access,
    context::actor,
    request::{Segment, check, read_body},
};

/// Number of matching jobs that the response shows.
const SAMPLE: usize = 10;
/// Longest time that the response waits for an action without a rate. Then the action continues in the background.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(300);
pub const MAX_PER_SECOND: u64 = 10_000;

pub async fn jobs(State(api): State<Api>, Segment(action): Segment, body: Body) -> ApiResult<Response> {
    let action = BulkAction::parse(&action)
        .ok_or_else(|| ApiError::not_found(format!("no bulk action \"{action}\"; use cancel, retry or delete")))?;
    let request = parse_request(&api, &read_body(&api, body).await?, set_filter)?;
    let states = JobState::ALL.into_iter().filter(|state| action.applies_to(*state)).collect();
    start(api, action, request, states).await
}

pub async fn dead_letters(State(api): State<Api>, Segment(action): Segment, body: Body) -> ApiResult<Response> {
    let known = BulkAction::parse(&action).filter(|action| *action != BulkAction::Cancel);
    let action = known.ok_or_else(|| {
        ApiError::not_found(format!("no bulk action \"{action}\" for dead letters; use retry or delete"))
    })?;
    let request = parse_request(&api, &read_body(&api, body).await?, set_dead_letter_filter)?;
    start(api, action, request, vec![JobState::Failed]).await
}

/// Body of a request for a bulk action.
struct BulkRequest {
    filter: Filter,
    /// Confirms a filter that matches every job.
    all: bool,
    dry_run: bool,
    per_second: Option<u32>,
}

/// 2020-01-01. No job is older, so a `created_after` up to this time excludes nothing.
const FIRST_JOBS_MS: i64 = 1_577_836_800_000;

impl BulkRequest {
    /// Limits the filter to `states`. Returns `None` if no job can match.
    ///
    /// Fails if the filter matches every job and the caller has not confirmed that with `all`.
    fn filter(&self, states: Vec<JobState>) -> ApiResult<Option<Filter>> {
        let mut filter = self.filter.clone();
        if !filter.states.is_empty() {
            filter.states.retain(|state| states.contains(state));
            if filter.states.is_empty() {
                return Ok(None);
            }
        }
        let has_every_state = filter.states.is_empty() || states.iter().all(|state| filter.states.contains(state));
        if has_every_state && !is_narrow(&filter) && !self.all {
            let message = "matches every job; set \"all\": true to confirm";
            return Err(ApiError::invalid_field("filter", message));
        }
        if filter.states.is_empty() {
            filter.states = states;
        }
        Ok(Some(filter))
    }
}

/// Returns whether a filter excludes any job, apart from its states. A time that excludes nothing does not count.
fn is_narrow(filter: &Filter) -> bool {
    let unrestricted = Filter {
        states: filter.states.clone(),
        created_after: filter.created_after.filter(|at| at.as_ms() <= FIRST_JOBS_MS),
        created_before: filter.created_before.filter(|at| *at > Timestamp::now()),
        ..Filter::default()
    };
    *filter != unrestricted
}

/// Starts an action on the jobs that match now. Jobs that are submitted later are not affected.
async fn start(api: Api, action: BulkAction, request: BulkRequest, states: Vec<JobState>) -> ApiResult<Response> {
    let mut response = BulkResponse { dry_run: request.dry_run, matched_is_exact: true, ..BulkResponse::default() };
    let Some(mut filter) = request.filter(states)? else { return Ok(Json(response).into_response()) };
    access::restrict(&mut filter)?;
    let first = api.engine.store.job_list(&filter, Page::after(None, SAMPLE)).await?;
    response.matched = first.total;
    response.matched_is_exact = first.total_is_exact;
    response.per_second = request.per_second;
    response.sample = first.jobs.iter().map(|job| job.id).collect();
    response.examples = first.jobs.into_iter().map(example).collect();
    let (id, now) = (BulkId::new(), Timestamp::now());
    // A search that stopped at its bound may match older jobs.
    let unseen = first.is_partial.then(|| JobId::first_at_ms(now.as_ms()));
    let Some(newest) = response.sample.first().copied().or(unseen).filter(|_| !request.dry_run) else {
        return Ok(Json(response).into_response());
    };
    let per_second = request.per_second;
    let (work, matched) = (BulkWork::Jobs { action, filter }, response.matched);
    let new = NewBulk { id, work, actor: actor(), per_second, up_to: newest.0, matched };
    response.id = Some(id);
    let Some(bulk) = launch(api, new, now).await? else { return Ok(accepted(response)) };
    response.done = bulk.done;
    response.skipped = bulk.skipped;
    Ok(if bulk.finished_at.is_some() { Json(response).into_response() } else { accepted(response) })
}

/// Starts an action. Without a rate, returns its progress when it has finished, or when the response cannot wait any longer.
pub async fn launch(api: Api, new: NewBulk, now: Timestamp) -> ApiResult<Option<Bulk>> {
    if new.per_second.is_some() {
        api.engine.bulk_begin(new, now).await?;
        return Ok(None);
    }
    // Runs in its own task, so that the action does not stop halfway if the caller disconnects.
    let work = tokio::spawn(async move { api.engine.bulk_run(new, RESPONSE_TIMEOUT, now).await });
    let bulk = work.await.map_err(|_| StoreError::Internal("a bulk action panicked".into()))??;
    Ok(Some(bulk))
}

/// Returns 202 with the location of an action that continues in the background.
fn accepted(response: BulkResponse) -> Response {
    let location = response.id.map(|id| format!("/api/v1/bulk/{id}")).unwrap_or_default();
    (StatusCode::ACCEPTED, [(header::LOCATION, location)], Json(response)).into_response()
}

fn example(job: JobView) -> BulkExample {
    BulkExample { id: job.id, kind: job.kind, queue: job.queue, status: job.status, error: job.error }
}

fn parse_request(api: &Api, body: &[u8], set_filter: SetFilter) -> ApiResult<BulkRequest> {
    let mut fields = api.parser().fields(body)?;
    let dry_run = fields.take::<bool>("dryRun", "true or false").unwrap_or(false);
    let all = fields.take::<bool>("all", "true or false").unwrap_or(false);
    let parameters: Map<String, Value> = fields.take("filter", "an object").unwrap_or_default();
    let per_second = parse_per_second(&mut fields, MAX_PER_SECOND);
    let mut errors = fields.finish();
    let mut filter = Filter::default();
    set_from_body(parameters, &mut errors, |name, value| set_filter(&mut filter, name, value));
    check(errors)?;
    Ok(BulkRequest { filter, all, dry_run, per_second })
}

/// Parses the rate of a bulk action or a replay.
pub fn parse_per_second(fields: &mut Fields, max: u64) -> Option<u32> {
    match fields.number("perSecond") {
        Some(number) if !(1..=max).contains(&number) => {
            fields.reject("perSecond", format!("must be between 1 and {max}, got {number}"));
            None
        }
        other => other.and_then(|number| u32::try_from(number).ok()),
    }
}

pub async fn list(State(api): State<Api>, RawQuery(query): RawQuery) -> ListResponse<BulkList> {
    let (actions, page_info) = read_page(&api, query.as_deref()).await?;
    respond(page_info, |page_info| BulkList::new(actions, page_info))
}

/// Returns the page of actions that a query asks for.
pub async fn read_page(api: &Api, query: Option<&str>) -> ApiResult<(Vec<BulkView>, PageInfo)> {
    let paging = parse_paging(query, Paging::new())?;
    let store = &api.engine.store;
    let total = store.bulk_total().await?;
    let read = store.bulk_list(paging.wanted_by_position()?).await?;
    let (found, page_info) = paging.page_by_position(read, total)?;
    Ok((found.into_iter().map(view).collect(), page_info))
}

pub async fn show(State(api): State<Api>, Segment(id): Segment) -> ApiResult<Json<BulkView>> {
    Ok(Json(read_view(&api, &id).await?))
}

/// Returns an action with its progress.
pub async fn read_view(api: &Api, id: &str) -> ApiResult<BulkView> {
    Ok(view(find(api, id).await?))
}

pub async fn cancel(State(api): State<Api>, Segment(id): Segment) -> ApiResult<Json<BulkView>> {
    Ok(Json(cancel_by_id(&api, &id).await?))
}

/// Cancels an action and returns it.
pub async fn cancel_by_id(api: &Api, id: &str) -> ApiResult<BulkView> {
    let bulk = find(api, id).await?;
    if !api.engine.store.bulk_stop(bulk.id, &actor(), Timestamp::now()).await? {
        let message = format!("bulk action {} has already finished", bulk.id);
        return Err(ApiError::new(ErrorCode::InvalidTransition, message));
    }
    read_view(api, id).await
}

async fn find(api: &Api, id: &str) -> ApiResult<Bulk> {
    let id: BulkId = id.parse().map_err(|_| ApiError::invalid_field("id", "must be a UUID"))?;
    let bulk = api.engine.store.bulk_get(id).await?;
    bulk.ok_or_else(|| ApiError::not_found(format!("no bulk action {id}")))
}

fn view(bulk: Bulk) -> BulkView {
    BulkView {
        id: bulk.id,
        action: bulk.work.name(),
        filter: bulk.work.to_api_json(),
        actor: bulk.actor,
        per_second: bulk.per_second,
        created_at: bulk.created_at,
        matched: bulk.matched,
        done: bulk.done,
        skipped: bulk.skipped,
        due_at: bulk.due_at,
        finished_at: bulk.finished_at,
        error: bulk.error,
    }
}
