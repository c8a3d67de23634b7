//! `/outbox`: shows sinks, sources and inboxes; shows, replays and resolves dead letters (events that a sink rejected); republishes events.

use axum::{
    Json,
    body::Body,
    extract::{RawQuery, State},
};
use faena_domain::{ErrorCode, FieldError, NodeId, Timestamp, parse::Fields};
use faena_store::{DeadEvent, DeadFilter, InputKind, InputView, NodeReport, Republish, SinkView};
use faena_wire::PageInfo;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};
use uuid::Uuid;

use super::{
    bulk::parse_per_second,
    list::{parse_time, set_from_body},
    paging::{ListResponse, Paging, parse_paging, respond},
};
use crate::{
    Api, ApiError, ApiResult,
    context::actor,
    request::{Segment, UNKNOWN_PARAMETER, check, finish, optional_fields, read_body, read_query},
};

const MAX_PER_SECOND: u64 = 100_000;
const MAX_NOTES_LENGTH: usize = 2_000;

/// Response of `GET /outbox`.
#[derive(Serialize, JsonSchema)]
pub struct OutboxOverview {
    sinks: Vec<SinkView>,
    sources: Vec<InputOfNode>,
    inboxes: Vec<InputOfNode>,
    #[serde(flatten)]
    page_info: PageInfo,
}

/// A source or inbox, with the node that it belongs to.
#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct InputOfNode {
    #[serde(flatten)]
    input: InputView,
    node_id: NodeId,
    node_name: String,
}

/// Response to replaying rejected events.
#[derive(Serialize, JsonSchema)]
pub struct Replayed {
    replayed: usize,
}

/// Response to resolving rejected events.
#[derive(Serialize, JsonSchema)]
pub struct Resolved {
    resolved: usize,
}

/// Response to republishing events.
#[derive(Serialize, JsonSchema)]
pub struct Republished {
    republished: usize,
}

/// Response of `GET /outbox/dead-letter`.
#[derive(Serialize, JsonSchema)]
pub struct DeadList {
    data: Vec<DeadEvent>,
    #[serde(flatten)]
    page_info: PageInfo,
}

/// Lists the sinks, and the sources and inboxes of every node.
pub async fn overview(State(api): State<Api>, RawQuery(query): RawQuery) -> ListResponse<OutboxOverview> {
    let paging = parse_paging(query.as_deref(), Paging::of_short_list())?;
    let now = Timestamp::now();
    let (sinks, page_info) = paging.page_of_all(api.engine.store.outbox_sinks(now).await?);
    let reports = api.engine.input_reports(now).await?;
    let of = |kind: InputKind| -> Vec<InputOfNode> { reports.iter().flat_map(|report| inputs(report, kind)).collect() };
    let (sources, inboxes) = (of(InputKind::Source), of(InputKind::Inbox));
    respond(page_info, |page_info| OutboxOverview { sinks, sources, inboxes, page_info })
}

/// Returns the sources or inboxes of one node.
fn inputs(report: &NodeReport, kind: InputKind) -> impl Iterator<Item = InputOfNode> {
    report.inputs.iter().filter(move |input| input.kind == kind).map(|input| InputOfNode {
        input: input.clone(),
        node_id: report.node,
        node_name: report.name.clone(),
    })
}

pub async fn dead(State(api): State<Api>, RawQuery(query): RawQuery) -> ListResponse<DeadList> {
    let (mut filter, mut paging) = (DeadFilter::default(), Paging::<Uuid>::new());
    read_query(query.as_deref(), &[], |name, value| {
        if paging.set(name, &value)? {
            return Ok(());
        }
        match name {
            "resolved" => filter.is_resolved = Some(value.parse().map_err(|_| "must be true or false")?),
            _ => set_filter(&mut filter, name, value)?,
        }
        Ok(())
    })?;
    let store = &api.engine.store;
    let total = store.outbox_dead_total(filter.clone()).await?;
    let read = store.outbox_dead(filter, paging.after(), paging.wanted()?).await?;
    let (data, page_info) = paging.page_of_read(read, total, |dead| dead.id)?;
    respond(page_info, |page_info| DeadList { data, page_info })
}

fn set_filter(filter: &mut DeadFilter, name: &str, value: String) -> Result<(), String> {
    match name {
        "sink" => filter.sink = Some(value),
        "type" => filter.event_type = Some(value),
        "aggregateId" => filter.aggregate_id = Some(value.parse().map_err(|_| "must be a UUID")?),
        "movedAfter" => filter.moved_after = Some(parse_time(&value)?),
        "movedBefore" => filter.moved_before = Some(parse_time(&value)?),
        _ => return Err(UNKNOWN_PARAMETER.into()),
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
    found.ok_or_else(|| ApiError::not_found(format!("no dead letter {id} in the outbox")))
}

/// Fails if there is no such dead letter or it is resolved.
async fn check_unresolved(api: &Api, id: Uuid) -> ApiResult<()> {
    match find(api, id).await?.resolved_at {
        None => Ok(()),
        Some(at) => Err(ApiError::new(ErrorCode::InvalidTransition, format!("dead letter {id} was resolved at {at}"))),
    }
}

pub async fn replay(State(api): State<Api>, Segment(id): Segment) -> ApiResult<Json<DeadEvent>> {
    let id = parse_id(&id)?;
    check_unresolved(&api, id).await?;
    if api.engine.store.outbox_replay(only(id), None, &actor(), Timestamp::now()).await? == 0 {
        check_unresolved(&api, id).await?;
        return Err(ApiError::not_found(format!("the sink of dead letter {id} no longer exists")));
    }
    Ok(Json(find(&api, id).await?))
}

pub async fn resolve(State(api): State<Api>, Segment(id): Segment, body: Body) -> ApiResult<Json<DeadEvent>> {
    let id = parse_id(&id)?;
    let body = read_body(&api, body).await?;
    let mut fields = optional_fields(&api, &body)?;
    let notes = parse_notes(&mut fields);
    finish(fields)?;
    check_unresolved(&api, id).await?;
    api.engine.store.outbox_resolve(only(id), &notes, &actor(), Timestamp::now()).await?;
    Ok(Json(find(&api, id).await?))
}

pub async fn replay_many(State(api): State<Api>, body: Body) -> ApiResult<Json<Replayed>> {
    let body = read_body(&api, body).await?;
    let mut fields = api.parser().fields(&body)?;
    let per_second = parse_per_second(&mut fields, MAX_PER_SECOND);
    let filter = parse_filter(fields)?;
    let count = api.engine.store.outbox_replay(filter, per_second, &actor(), Timestamp::now()).await?;
    Ok(Json(Replayed { replayed: count }))
}

pub async fn resolve_many(State(api): State<Api>, body: Body) -> ApiResult<Json<Resolved>> {
    let body = read_body(&api, body).await?;
    let mut fields = api.parser().fields(&body)?;
    let notes = parse_notes(&mut fields);
    let filter = parse_filter(fields)?;
    let count = api.engine.store.outbox_resolve(filter, &notes, &actor(), Timestamp::now()).await?;
    Ok(Json(Resolved { resolved: count }))
}

fn parse_notes(fields: &mut Fields) -> String {
    let notes = fields.text("notes").unwrap_or_default();
    if notes.chars().count() > MAX_NOTES_LENGTH {
        fields.reject("notes", format!("must have at most {MAX_NOTES_LENGTH} characters"));
    }
    notes
}

/// Parses the rest of a body: the filter, or `all` to confirm that the action applies to every dead letter.
fn parse_filter(mut fields: Fields) -> ApiResult<DeadFilter> {
    let all = fields.take::<bool>("all", "true or false").unwrap_or(false);
    let parameters: Map<String, Value> = fields.take("filter", "an object").unwrap_or_default();
    let mut errors = fields.finish();
    let mut filter = DeadFilter::default();
    set_from_body(parameters, &mut errors, |name, value| set_filter(&mut filter, name, value));
    if errors.is_empty() && filter == DeadFilter::default() && !all {
        errors.push(FieldError::new("filter", "matches every dead letter; set \"all\": true to confirm"));
    }
    check(errors)?;
    Ok(filter)
}

pub async fn republish(State(api): State<Api>, body: Body) -> ApiResult<Json<Republished>> {
    let body = read_body(&api, body).await?;
    let mut fields = api.parser().fields(&body)?;
    let per_second = parse_per_second(&mut fields, MAX_PER_SECOND);
    let sink = fields.text("sink");
    let event_type = fields.text("type");
    let (from, to) = (required_time(&mut fields, "from"), required_time(&mut fields, "to"));
    if sink.is_none() && !fields.errors.iter().any(|error| error.path == "sink") {
        fields.reject("sink", "is required");
    }
    if from.zip(to).is_some_and(|(from, to)| from >= to) {
        fields.reject("to", "must be later than from");
    }
    let errors = fields.finish();
    let (Some(sink), Some(from), Some(to), true) = (sink, from, to, errors.is_empty()) else {
        return Err(ApiError::invalid(errors));
    };
    let range = Republish { sink: sink.clone(), from, to, event_type };
    let count = api.engine.store.outbox_republish(range, per_second, &actor(), Timestamp::now()).await?;
    let count = count.ok_or_else(|| ApiError::not_found(format!("no sink \"{sink}\"")))?;
    Ok(Json(Republished { republished: count }))
}

fn required_time(fields: &mut Fields, name: &str) -> Option<Timestamp> {
    if !fields.is_present(name) {
        fields.reject(name, "is required");
        return None;
    }
    fields.time(name)
}
