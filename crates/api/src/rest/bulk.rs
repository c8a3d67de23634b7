//! One action on every job that a filter finds: `POST /jobs/bulk/…`, `POST /dead-letter/bulk/…`, and `/bulk`, where they are kept.
//!
//! Without a rate it is done before the answer; with one, the loop of any node does it (`engine/bulk.rs`).

use std::time::Duration;

use axum::{
    Json,
    body::Body,
    extract::{RawQuery, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use faena_domain::{BulkId, ErrorCode, FieldError, JobState, Timestamp};
use faena_store::{Bulk, BulkAction, Filter, NewBulk, Page, StoreError};
use faena_wire::{BulkAnswer, BulkExample, BulkList, BulkView};
use serde_json::Value;

use super::{
    letters::set_letter_filter,
    list::{form_pairs, set_filter},
};
use crate::{
    Api, ApiError, ApiResult,
    frame::actor,
    request::{Segment, read_body},
};

/// Jobs that a dry run shows.
const SAMPLE: usize = 10;
/// How long an answer waits for an action without a rate; after that the action goes on without the caller.
const PATIENCE: Duration = Duration::from_secs(300);
const FASTEST: u64 = 10_000;

pub async fn jobs(State(api): State<Api>, Segment(action): Segment, body: Body) -> ApiResult<Response> {
    let action = BulkAction::parse(&action).ok_or_else(|| {
        ApiError::not_found(format!("there is no bulk action {action}; cancel, retry and delete are"))
    })?;
    let ask = read_ask(&api, &read_body(&api, body).await?, set_filter)?;
    let fitting = JobState::ALL.into_iter().filter(|state| action.fits(*state)).collect();
    bulk(api, action, ask, fitting).await
}

pub async fn letters(State(api): State<Api>, Segment(action): Segment, body: Body) -> ApiResult<Response> {
    let known = BulkAction::parse(&action).filter(|action| *action != BulkAction::Cancel);
    let action = known.ok_or_else(|| {
        ApiError::not_found(format!("there is no bulk action {action} for dead letters; retry and delete are"))
    })?;
    let ask = read_ask(&api, &read_body(&api, body).await?, set_letter_filter)?;
    bulk(api, action, ask, vec![JobState::Failed]).await
}

struct Ask {
    filter: Filter,
    all: bool,
    dry_run: bool,
    per_second: Option<u32>,
}

/// Nobody has a job from before 2020.
const FIRST_JOBS_MS: i64 = 1_577_836_800_000;

async fn bulk(api: Api, action: BulkAction, ask: Ask, fitting: Vec<JobState>) -> ApiResult<Response> {
    let mut filter = ask.filter;
    if !filter.states.is_empty() {
        filter.states.retain(|state| fitting.contains(state));
        if filter.states.is_empty() {
            return Ok(Json(BulkAnswer { dry_run: ask.dry_run, ..nothing() }).into_response());
        }
    }
    // A time that leaves nothing out is no filter.
    let since_ever = |at: &Timestamp| at.as_ms() <= FIRST_JOBS_MS;
    let for_ever = |at: &Timestamp| *at > Timestamp::now();
    let open = Filter {
        states: filter.states.clone(),
        created_after: filter.created_after.filter(since_ever),
        created_before: filter.created_before.filter(for_ever),
        ..Filter::default()
    };
    let narrow = filter != open;
    let every_state = filter.states.is_empty() || fitting.iter().all(|state| filter.states.contains(state));
    if every_state && !narrow && !ask.all {
        let message = "would match every job; say \"all\": true if that is meant";
        return Err(ApiError::invalid_field("filter", message));
    }
    if filter.states.is_empty() {
        filter.states = fitting;
    }
    let first = api.engine.store.job_list(&filter, Page::After { id: None, limit: SAMPLE }).await?;
    let mut answer = BulkAnswer {
        dry_run: ask.dry_run,
        matched: first.total,
        matched_is_exact: first.total_is_exact,
        per_second: ask.per_second,
        sample: first.jobs.iter().map(|job| job.id).collect(),
        examples: first.jobs.into_iter().map(example).collect(),
        ..nothing()
    };
    let newest = match answer.sample.first() {
        Some(newest) if !ask.dry_run => *newest,
        _ => return Ok(Json(answer).into_response()),
    };
    let (id, now) = (BulkId::new(), Timestamp::now());
    let new = NewBulk {
        id,
        action,
        filter,
        actor: actor(),
        per_second: ask.per_second,
        upto: newest,
        matched: answer.matched,
    };
    answer.id = Some(id);
    if ask.per_second.is_some() {
        api.engine.bulk_begin(new, now).await?;
        return Ok(accepted(answer));
    }
    // In a task of its own: a caller that goes away does not leave the work half done.
    let work = tokio::spawn(async move { api.engine.bulk_run(new, PATIENCE, now).await });
    let bulk = work.await.map_err(|_| StoreError::Broken("a bulk action panicked".into()))??;
    answer.done = bulk.done;
    answer.skipped = bulk.skipped;
    Ok(if bulk.finished_at.is_some() { Json(answer).into_response() } else { accepted(answer) })
}

fn accepted(answer: BulkAnswer) -> Response {
    let location = answer.id.map(|id| format!("/api/v1/bulk/{id}")).unwrap_or_default();
    (StatusCode::ACCEPTED, [(header::LOCATION, location)], Json(answer)).into_response()
}

fn nothing() -> BulkAnswer {
    BulkAnswer {
        id: None,
        dry_run: false,
        matched: 0,
        matched_is_exact: true,
        done: 0,
        skipped: 0,
        per_second: None,
        sample: Vec::new(),
        examples: Vec::new(),
    }
}

fn example(job: faena_domain::JobView) -> BulkExample {
    BulkExample { id: job.id, kind: job.kind, queue: job.queue, status: job.status, error: job.error }
}

type SetFilter = fn(&mut Filter, &str, String) -> Result<(), String>;

fn read_ask(api: &Api, body: &[u8], set: SetFilter) -> ApiResult<Ask> {
    let mut fields = api.parser().fields(body)?;
    let dry_run = fields.take::<bool>("dryRun", "true or false").unwrap_or(false);
    let all = fields.take::<bool>("all", "true or false").unwrap_or(false);
    let wanted: serde_json::Map<String, Value> = fields.take("filter", "an object").unwrap_or_default();
    let per_second = match fields.number("perSecond") {
        Some(n) if !(1..=FASTEST).contains(&n) => {
            fields.reject("perSecond", format!("must be from 1 to {FASTEST}, is {n}"));
            None
        }
        other => other.and_then(|n| u32::try_from(n).ok()),
    };
    let mut errors = fields.finish();
    let mut filter = Filter::default();
    for (name, value) in &wanted {
        let set = match value {
            Value::String(text) => set(&mut filter, name, text.clone()),
            _ => Err("must be a string".into()),
        };
        if let Err(message) = set {
            errors.push(FieldError::new(format!("filter.{name}"), message));
        }
    }
    if errors.is_empty() { Ok(Ask { filter, all, dry_run, per_second }) } else { Err(ApiError::invalid(errors)) }
}

pub async fn list(State(api): State<Api>, RawQuery(query): RawQuery) -> ApiResult<Json<BulkList>> {
    let mut limit = 20;
    let mut errors = Vec::new();
    for (name, value) in form_pairs(query.as_deref().unwrap_or("")) {
        match (name.as_str(), value.parse()) {
            ("limit", Ok(number @ 1..=100)) => limit = number,
            ("limit", _) => errors.push(FieldError::new(name, "must be a number from 1 to 100")),
            _ => errors.push(FieldError::new(name, "is not a known parameter")),
        }
    }
    if !errors.is_empty() {
        return Err(ApiError::invalid(errors));
    }
    let found = api.engine.store.bulk_list(limit).await?;
    Ok(Json(BulkList { actions: found.into_iter().map(view).collect() }))
}

pub async fn show(State(api): State<Api>, Segment(id): Segment) -> ApiResult<Json<BulkView>> {
    Ok(Json(view(find(&api, &id).await?)))
}

pub async fn cancel(State(api): State<Api>, Segment(id): Segment) -> ApiResult<Json<BulkView>> {
    let bulk = find(&api, &id).await?;
    if !api.engine.store.bulk_stop(bulk.id, &actor(), Timestamp::now()).await? {
        return Err(ApiError::new(ErrorCode::InvalidTransition, format!("bulk action {} is over", bulk.id)));
    }
    Ok(Json(view(find(&api, &id).await?)))
}

async fn find(api: &Api, id: &str) -> ApiResult<Bulk> {
    let id: BulkId = id.parse().map_err(|_| ApiError::invalid_field("id", "must be a UUID"))?;
    let bulk = api.engine.store.bulk_get(id).await?;
    bulk.ok_or_else(|| ApiError::not_found(format!("there is no bulk action {id}")))
}

fn view(bulk: Bulk) -> BulkView {
    BulkView {
        id: bulk.id,
        action: bulk.action.as_str().into(),
        filter: bulk.filter.shown(),
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
