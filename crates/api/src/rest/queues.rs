//! `/queues`: shows, configures, pauses and resumes queues.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use axum::{
    Json,
    body::Body,
    extract::{RawQuery, State},
};
use faena_domain::{Fairness, FieldError, NewJob, Pause, Priority, Rules, Scope, Timestamp};
use faena_store::{Counts, Lane, LaneId, QueuePatch, Tally};
use faena_wire::{Depth, QueueList, QueueView};

use super::{
    limits::{LimitPatch, check_text},
    paging::{ListResponse, Paging, parse_paging, respond},
};
use crate::{
    Api, ApiError, ApiResult, access,
    context::actor,
    request::{Segment, check, read_body},
};

/// Data from which the views of queues are built.
struct Snapshot {
    lanes: Vec<Lane>,
    counts: Counts,
    ready_since: BTreeMap<LaneId, Timestamp>,
    rules: Arc<Rules>,
    now: Timestamp,
}

impl Snapshot {
    async fn read(api: &Api) -> ApiResult<Snapshot> {
        let store = &api.engine.store;
        let now = Timestamp::now();
        let counts = store.counts().await?;
        api.engine.throughput.add(&counts, now);
        Ok(Snapshot {
            lanes: store.lanes().await?,
            counts,
            ready_since: store.ready_since().await?.into_iter().collect(),
            rules: store.rules_load().await?,
            now,
        })
    }

    /// Returns every queue that a job or a setting names.
    fn names(&self) -> BTreeSet<String> {
        let limited = self.rules.limits.keys().filter_map(|scope| match scope {
            Scope::Queue(name) => Some(name),
            _ => None,
        });
        let named = self.lanes.iter().map(|lane| &lane.queue).chain(self.rules.queues.keys()).chain(limited);
        named.cloned().collect()
    }

    fn count(&self, lane: &Lane, tally: Tally) -> u64 {
        self.counts.by_lane.get(&(lane.id, tally)).map_or(0, |n| u64::try_from(*n).unwrap_or(0))
    }

    fn depth(&self, lanes: &[&Lane]) -> Depth {
        let mut depth = Depth::default();
        for lane in lanes {
            let queued = self.count(lane, Tally::Queued);
            depth.total += queued;
            match lane.priority {
                Priority::Critical => depth.critical += queued,
                Priority::High => depth.high += queued,
                Priority::Normal => depth.normal += queued,
                Priority::Low => depth.low += queued,
            }
        }
        depth
    }

    fn show(&self, api: &Api, name: &str) -> QueueView {
        let lanes: Vec<&Lane> = self.lanes.iter().filter(|lane| lane.queue == name).collect();
        let sum = |tally| lanes.iter().map(|lane| self.count(lane, tally)).sum();
        let oldest = lanes.iter().filter_map(|lane| self.ready_since.get(&lane.id)).min().copied();
        let ids: Vec<LaneId> = lanes.iter().map(|lane| lane.id).collect();
        let limit = self.rules.limits.get(&Scope::Queue(name.into())).copied().unwrap_or_default();
        let rule = self.rules.queues.get(name);
        QueueView {
            name: name.into(),
            depth: self.depth(&lanes),
            pending: sum(Tally::Pending),
            retrying: sum(Tally::Retrying),
            running: sum(Tally::InFlight),
            oldest,
            waiting_ms: oldest.map(|at| u64::try_from(self.now.ms_since(at)).unwrap_or(0)),
            rate_per_minute: api.engine.throughput.per_minute(&ids, self.now),
            concurrency: limit.concurrency,
            rate: limit.rate,
            strict: rule.and_then(|rule| rule.strict).unwrap_or(false),
            fairness: self.rules.fairness(name),
            paused: rule.and_then(|rule| rule.paused.clone()),
        }
    }
}

pub async fn list(State(api): State<Api>, RawQuery(query): RawQuery) -> ListResponse<QueueList> {
    let paging = parse_paging(query.as_deref(), Paging::of_short_list())?;
    let snapshot = Snapshot::read(&api).await?;
    let (names, page_info) =
        paging.page_of_all(snapshot.names().into_iter().filter(|name| access::includes_queue(name)).collect());
    let queues = names.iter().map(|name| snapshot.show(&api, name)).collect();
    respond(page_info, |page_info| QueueList::new(queues, page_info))
}

pub async fn show(State(api): State<Api>, Segment(name): Segment) -> ApiResult<Json<QueueView>> {
    let snapshot = Snapshot::read(&api).await?;
    if !snapshot.names().contains(&name) {
        return Err(no_queue(&name));
    }
    Ok(Json(snapshot.show(&api, &name)))
}

fn no_queue(name: &str) -> ApiError {
    ApiError::not_found(format!("no queue \"{name}\"; a queue exists as soon as a job or a setting names it"))
}

/// Returns the view of a queue that was just changed.
async fn view_after_change(api: &Api, name: &str) -> ApiResult<Json<QueueView>> {
    Ok(Json(Snapshot::read(api).await?.show(api, name)))
}

pub async fn patch(State(api): State<Api>, Segment(name): Segment, body: Body) -> ApiResult<Json<QueueView>> {
    check_name(&api, &name)?;
    let body = read_body(&api, body).await?;
    let mut fields = api.parser().fields(&body)?;
    let limit = LimitPatch::parse(&mut fields);
    let patch = QueuePatch {
        concurrency: limit.concurrency,
        rate: limit.rate,
        strict: fields.take("strict", "true or false"),
        fairness: fields.take::<Fairness>("fairness", "none or key"),
        paused: None,
    };
    let mut errors = fields.finish();
    limit.check(&mut errors);
    if errors.is_empty() && patch == QueuePatch::default() {
        errors.push(FieldError::new("body", "nothing to change; set concurrency, rate, strict or fairness"));
    }
    check(errors)?;
    api.engine.store.queue_set(&name, patch, &actor(), Timestamp::now()).await?;
    view_after_change(&api, &name).await
}

pub async fn pause(State(api): State<Api>, Segment(name): Segment, body: Body) -> ApiResult<Json<QueueView>> {
    check_name(&api, &name)?;
    let body = read_body(&api, body).await?;
    let reason = if body.is_empty() { None } else { parse_reason(&api, &body)? };
    // Pausing a paused queue again keeps the actor, time and reason of the first pause.
    if api.engine.store.rules_load().await?.pause(&name).is_none() {
        let (by, at) = (actor(), Timestamp::now());
        let pause = Pause { at, by: by.clone(), reason: reason.clone() };
        let patch = QueuePatch { paused: Some(Some(pause)), ..QueuePatch::default() };
        api.engine.store.queue_set(&name, patch, &by, at).await?;
        tracing::info!(queue = name, by, reason, "queue paused");
    }
    view_after_change(&api, &name).await
}

pub async fn resume(State(api): State<Api>, Segment(name): Segment) -> ApiResult<Json<QueueView>> {
    check_name(&api, &name)?;
    let snapshot = Snapshot::read(&api).await?;
    if !snapshot.names().contains(&name) {
        return Err(no_queue(&name));
    }
    if snapshot.rules.pause(&name).is_some() {
        let (by, patch) = (actor(), QueuePatch { paused: Some(None), ..QueuePatch::default() });
        api.engine.store.queue_set(&name, patch, &by, Timestamp::now()).await?;
        tracing::info!(queue = name, by, "queue resumed");
    }
    view_after_change(&api, &name).await
}

fn parse_reason(api: &Api, body: &[u8]) -> ApiResult<Option<String>> {
    let mut fields = api.parser().fields(body)?;
    let reason = fields.text("reason");
    if let Some(text) = &reason {
        check_text(&mut fields.errors, "reason", text, 255);
    }
    check(fields.finish())?;
    Ok(reason)
}

/// Rejects a name that is not valid as the queue of a job.
fn check_name(api: &Api, name: &str) -> ApiResult<()> {
    let job = NewJob { queue: name.into(), ..NewJob::new("named") };
    let error = job.check(&api.parser().limits).into_iter().find(|error| error.path == "queue");
    error.map_or(Ok(()), |error| Err(ApiError::invalid_field("name", error.message)))
}
