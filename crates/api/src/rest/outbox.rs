//! `/outbox`: how sinks stand, and the messages that they would not take.

use axum::{
    Json,
    body::Body,
    extract::{RawQuery, State},
};
use faena_domain::{ErrorCode, FieldError, Timestamp, parse::Fields};
use faena_store::{DeadEvent, DeadFilter, Republish};
use serde_json::{Map, Value, json};
use uuid::Uuid;

use super::list::form_pairs;
use crate::{
    Api, ApiError, ApiResult,
    frame::actor,
    request::{Segment, read_body},
};

const FASTEST: u64 = 100_000;
/// Characters of a note.
const LONGEST_NOTE: usize = 2_000;

pub async fn sinks(State(api): State<Api>) -> ApiResult<Json<Value>> {
    Ok(Json(json!({ "sinks": api.engine.store.outbox_sinks(Timestamp::now()).await? })))
}

pub async fn dead(State(api): State<Api>, RawQuery(query): RawQuery) -> ApiResult<Json<Value>> {
    let Query { filter, after, limit } = read_query(query.as_deref().unwrap_or(""))?;
    let letters = api.engine.store.outbox_dead(filter, after, limit).await?;
    let mut list = json!({ "limit": limit });
    if let Some(last) = letters.last().filter(|_| letters.len() == limit) {
        list["nextCursor"] = json!(last.id);
    }
    list["data"] = json!(letters);
    Ok(Json(list))
}

struct Query {
    filter: DeadFilter,
    after: Option<Uuid>,
    limit: usize,
}

fn read_query(query: &str) -> ApiResult<Query> {
    let mut ask = Query { filter: DeadFilter::default(), after: None, limit: 20 };
    let mut errors = Vec::new();
    for (name, value) in form_pairs(query) {
        if let Err(message) = ask.set(&name, value) {
            errors.push(FieldError::new(name, message));
        }
    }
    if errors.is_empty() { Ok(ask) } else { Err(ApiError::invalid(errors)) }
}

impl Query {
    fn set(&mut self, name: &str, value: String) -> Result<(), String> {
        match name {
            "limit" => {
                let limit = value.parse().ok().filter(|n| (1..=100).contains(n));
                self.limit = limit.ok_or("must be a number from 1 to 100")?;
            }
            "cursor" if value.is_empty() => self.after = None,
            "cursor" => {
                let id = value.parse().map_err(|_| "must be the nextCursor of another answer, or empty to begin")?;
                self.after = Some(id);
            }
            "resolved" => {
                self.filter.is_resolved = Some(value.parse().map_err(|_| "must be true or false")?);
            }
            _ => set_dead_filter(&mut self.filter, name, value)?,
        }
        Ok(())
    }
}

fn time(value: &str) -> Result<Timestamp, String> {
    Timestamp::parse(value).ok_or("must be a time like 2026-11-15T20:00:00Z".into())
}

fn set_dead_filter(filter: &mut DeadFilter, name: &str, value: String) -> Result<(), String> {
    if value.contains(char::is_control) {
        return Err("must not contain control characters".into());
    }
    match name {
        "sink" => filter.sink = Some(value),
        "type" => filter.event_type = Some(value),
        "aggregateId" => filter.aggregate_id = Some(value.parse().map_err(|_| "must be a UUID")?),
        "movedAfter" => filter.moved_after = Some(time(&value)?),
        "movedBefore" => filter.moved_before = Some(time(&value)?),
        _ => return Err("is not a known parameter".into()),
    }
    Ok(())
}

pub async fn show(State(api): State<Api>, Segment(id): Segment) -> ApiResult<Json<DeadEvent>> {
    Ok(Json(find(&api, parse_id(&id)?).await?))
}

fn parse_id(text: &str) -> ApiResult<Uuid> {
    text.parse().map_err(|_| ApiError::invalid_field("id", "must be a UUID"))
}

fn only(id: Uuid) -> DeadFilter {
    DeadFilter { ids: vec![id], ..DeadFilter::default() }
}

async fn find(api: &Api, id: Uuid) -> ApiResult<DeadEvent> {
    let found = api.engine.store.outbox_dead(only(id), None, 1).await?.pop();
    found.ok_or_else(|| ApiError::not_found(format!("there is no dead letter {id} of the outbox")))
}

/// One that is still open.
async fn find_open(api: &Api, id: Uuid) -> ApiResult<()> {
    match find(api, id).await?.resolved_at {
        None => Ok(()),
        Some(at) => Err(ApiError::new(ErrorCode::InvalidTransition, format!("dead letter {id} was resolved at {at}"))),
    }
}

pub async fn replay(State(api): State<Api>, Segment(id): Segment) -> ApiResult<Json<DeadEvent>> {
    let id = parse_id(&id)?;
    find_open(&api, id).await?;
    if api.engine.store.outbox_replay(only(id), None, &actor(), Timestamp::now()).await? == 0 {
        find_open(&api, id).await?;
        return Err(ApiError::not_found(format!("the sink of dead letter {id} does not exist any more")));
    }
    Ok(Json(find(&api, id).await?))
}

pub async fn resolve(State(api): State<Api>, Segment(id): Segment, body: Body) -> ApiResult<Json<DeadEvent>> {
    let id = parse_id(&id)?;
    let body = read_body(&api, body).await?;
    let mut fields = api.parser().fields(if body.is_empty() { b"{}" } else { &body })?;
    let notes = notes(&mut fields);
    finish(fields)?;
    find_open(&api, id).await?;
    api.engine.store.outbox_resolve(only(id), &notes, &actor(), Timestamp::now()).await?;
    Ok(Json(find(&api, id).await?))
}

pub async fn replay_many(State(api): State<Api>, body: Body) -> ApiResult<Json<Value>> {
    let body = read_body(&api, body).await?;
    let mut fields = api.parser().fields(&body)?;
    let per_second = per_second(&mut fields);
    let filter = filter_of(fields)?;
    let count = api.engine.store.outbox_replay(filter, per_second, &actor(), Timestamp::now()).await?;
    Ok(Json(json!({ "replayed": count })))
}

pub async fn resolve_many(State(api): State<Api>, body: Body) -> ApiResult<Json<Value>> {
    let body = read_body(&api, body).await?;
    let mut fields = api.parser().fields(&body)?;
    let notes = notes(&mut fields);
    let filter = filter_of(fields)?;
    let count = api.engine.store.outbox_resolve(filter, &notes, &actor(), Timestamp::now()).await?;
    Ok(Json(json!({ "resolved": count })))
}

fn notes(fields: &mut Fields) -> String {
    let notes = fields.take::<String>("notes", "a string").unwrap_or_default();
    if notes.chars().count() > LONGEST_NOTE {
        fields.reject("notes", format!("must not have more than {LONGEST_NOTE} characters"));
    }
    notes
}

fn per_second(fields: &mut Fields) -> Option<u32> {
    match fields.number("perSecond") {
        Some(n) if !(1..=FASTEST).contains(&n) => {
            fields.reject("perSecond", format!("must be from 1 to {FASTEST}, is {n}"));
            None
        }
        other => other.and_then(|n| u32::try_from(n).ok()),
    }
}

fn finish(fields: Fields) -> ApiResult<()> {
    let errors = fields.finish();
    if errors.is_empty() { Ok(()) } else { Err(ApiError::invalid(errors)) }
}

/// What is left of the body: the filter, and `all` for everything.
fn filter_of(mut fields: Fields) -> ApiResult<DeadFilter> {
    let all = fields.take::<bool>("all", "true or false").unwrap_or(false);
    let wanted: Map<String, Value> = fields.take("filter", "an object").unwrap_or_default();
    let mut errors = fields.finish();
    let mut filter = DeadFilter::default();
    for (name, value) in wanted {
        let set = match value {
            Value::String(text) => set_dead_filter(&mut filter, &name, text),
            _ => Err("must be a string".into()),
        };
        if let Err(message) = set {
            errors.push(FieldError::new(format!("filter.{name}"), message));
        }
    }
    if errors.is_empty() && filter == DeadFilter::default() && !all {
        errors.push(FieldError::new("filter", "would match every dead letter; say \"all\": true if that is meant"));
    }
    if errors.is_empty() { Ok(filter) } else { Err(ApiError::invalid(errors)) }
}

pub async fn republish(State(api): State<Api>, body: Body) -> ApiResult<Json<Value>> {
    let body = read_body(&api, body).await?;
    let mut fields = api.parser().fields(&body)?;
    let per_second = per_second(&mut fields);
    let sink = fields.take::<String>("sink", "a string");
    let event_type = fields.take::<String>("type", "a string");
    let (from, to) = (needed_time(&mut fields, "from"), needed_time(&mut fields, "to"));
    if sink.is_none() && !fields.errors.iter().any(|fault| fault.path == "sink") {
        fields.reject("sink", "is required");
    }
    if from.zip(to).is_some_and(|(from, to)| from >= to) {
        fields.reject("to", "must be later than from");
    }
    let errors = fields.finish();
    let (Some(sink), Some(from), Some(to), true) = (sink, from, to, errors.is_empty()) else {
        return Err(ApiError::invalid(errors));
    };
    let what = Republish { sink: sink.clone(), from, to, event_type };
    let count = api.engine.store.outbox_republish(what, per_second, &actor(), Timestamp::now()).await?;
    let count = count.ok_or_else(|| ApiError::not_found(format!("there is no sink {sink}")))?;
    Ok(Json(json!({ "republished": count })))
}

fn needed_time(fields: &mut Fields, name: &str) -> Option<Timestamp> {
    if !fields.is_present(name) {
        fields.reject(name, "is required");
        return None;
    }
    fields.time(name)
}
