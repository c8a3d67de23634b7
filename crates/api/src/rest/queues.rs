//! `/queues` and `/limits`: how queues stand, what holds for them, how much may run.

use std::collections::{BTreeMap, BTreeSet};

use axum::{Json, body::Body, extract::State};
use faena_domain::{Fairness, FieldError, Limit, NewJob, Pause, Priority, Rate, Scope, Timestamp, parse::Fields};
use faena_store::{Counts, Lane, LaneId, QueuePatch, StoredLimit, Tally};
use faena_wire::{Depth, LimitList, LimitView, QueueList, QueueView};

use crate::{
    Api, ApiError, ApiResult,
    frame::actor,
    request::{Segment, read_body},
};

/// Everything that is read to show queues.
struct Seen {
    lanes: Vec<Lane>,
    counts: Counts,
    ready_since: BTreeMap<LaneId, Timestamp>,
    rules: std::sync::Arc<faena_domain::Rules>,
    now: Timestamp,
}

impl Seen {
    async fn read(api: &Api) -> ApiResult<Seen> {
        let store = &api.engine.store;
        let now = Timestamp::now();
        let counts = store.counts().await?;
        api.engine.throughput.add(&counts, now);
        Ok(Seen {
            lanes: store.lanes().await?,
            counts,
            ready_since: store.ready_since().await?.into_iter().collect(),
            rules: store.rules_load().await?,
            now,
        })
    }

    /// Every queue that a job or a rule has named.
    fn names(&self) -> BTreeSet<String> {
        let ruled = self.rules.limits.keys().filter_map(|scope| match scope {
            Scope::Queue(name) => Some(name),
            _ => None,
        });
        let named = self.lanes.iter().map(|lane| &lane.queue).chain(self.rules.queues.keys()).chain(ruled);
        named.cloned().collect()
    }

    fn count(&self, lane: &Lane, tally: Tally) -> u64 {
        self.counts.by_lane.get(&(lane.id, tally)).map_or(0, |n| u64::try_from(*n).unwrap_or(0))
    }

    fn show(&self, api: &Api, name: &str) -> QueueView {
        let lanes: Vec<&Lane> = self.lanes.iter().filter(|lane| lane.queue == name).collect();
        let sum = |tally| lanes.iter().map(|lane| self.count(lane, tally)).sum();
        let mut depth = Depth::default();
        for lane in &lanes {
            let queued = self.count(lane, Tally::Queued);
            depth.total += queued;
            match lane.priority {
                Priority::Critical => depth.critical += queued,
                Priority::High => depth.high += queued,
                Priority::Normal => depth.normal += queued,
                Priority::Low => depth.low += queued,
            }
        }
        let oldest = lanes.iter().filter_map(|lane| self.ready_since.get(&lane.id)).min().copied();
        let ids: Vec<LaneId> = lanes.iter().map(|lane| lane.id).collect();
        let limit = self.rules.limits.get(&Scope::Queue(name.into())).copied().unwrap_or_default();
        let rule = self.rules.queues.get(name);
        QueueView {
            name: name.into(),
            depth,
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

pub async fn list(State(api): State<Api>) -> ApiResult<Json<QueueList>> {
    let seen = Seen::read(&api).await?;
    Ok(Json(QueueList { queues: seen.names().iter().map(|name| seen.show(&api, name)).collect() }))
}

pub async fn show(State(api): State<Api>, Segment(name): Segment) -> ApiResult<Json<QueueView>> {
    let seen = Seen::read(&api).await?;
    if !seen.names().contains(&name) {
        return Err(ApiError::not_found(format!(
            "there is no queue {name} yet; it exists once a job or a setting has named it"
        )));
    }
    Ok(Json(seen.show(&api, &name)))
}

/// A queue as it is after a change, whoever has changed it.
async fn shown(api: &Api, name: &str) -> ApiResult<Json<QueueView>> {
    Ok(Json(Seen::read(api).await?.show(api, name)))
}

pub async fn patch(State(api): State<Api>, Segment(name): Segment, body: Body) -> ApiResult<Json<QueueView>> {
    check_queue(&api, &name)?;
    let body = read_body(&api, body).await?;
    let mut fields = api.parser().fields(&body)?;
    let (concurrency, rate) = read_limit(&mut fields);
    let patch = QueuePatch {
        concurrency,
        rate,
        strict: fields.take("strict", "true or false"),
        fairness: fields.take::<Fairness>("fairness", "none or key"),
        paused: None,
    };
    let mut errors = fields.finish();
    check_limit(concurrency, rate, &mut errors);
    if errors.is_empty() && patch == QueuePatch::default() {
        let message = "names nothing to change; concurrency, rate, strict and fairness can be";
        errors.push(FieldError::new("body", message));
    }
    if !errors.is_empty() {
        return Err(ApiError::invalid(errors));
    }
    api.engine.store.queue_set(&name, patch, &actor(), Timestamp::now()).await?;
    shown(&api, &name).await
}

pub async fn pause(State(api): State<Api>, Segment(name): Segment, body: Body) -> ApiResult<Json<QueueView>> {
    check_queue(&api, &name)?;
    let body = read_body(&api, body).await?;
    let reason = if body.is_empty() { None } else { read_reason(&api, &body)? };
    // Who paused it first is who paused it.
    if api.engine.store.rules_load().await?.pause(&name).is_none() {
        let (by, at) = (actor(), Timestamp::now());
        let pause = Pause { at, by: by.clone(), reason };
        let patch = QueuePatch { paused: Some(Some(pause)), ..QueuePatch::default() };
        api.engine.store.queue_set(&name, patch, &by, at).await?;
    }
    shown(&api, &name).await
}

pub async fn resume(State(api): State<Api>, Segment(name): Segment) -> ApiResult<Json<QueueView>> {
    check_queue(&api, &name)?;
    if api.engine.store.rules_load().await?.pause(&name).is_some() {
        let patch = QueuePatch { paused: Some(None), ..QueuePatch::default() };
        api.engine.store.queue_set(&name, patch, &actor(), Timestamp::now()).await?;
    }
    shown(&api, &name).await
}

fn read_reason(api: &Api, body: &[u8]) -> ApiResult<Option<String>> {
    let mut fields = api.parser().fields(body)?;
    let reason = fields.text("reason");
    if let Some(text) = &reason {
        check_text(&mut fields.errors, "reason", text, 255);
    }
    let errors = fields.finish();
    if errors.is_empty() { Ok(reason) } else { Err(ApiError::invalid(errors)) }
}

fn check_text(errors: &mut Vec<FieldError>, path: &str, text: &str, most: usize) {
    if text.is_empty() || text.chars().count() > most || text.contains(char::is_control) {
        errors.push(FieldError::new(path, format!("must have 1 to {most} visible characters")));
    }
}

/// What would be refused as a job's queue is refused here.
fn check_queue(api: &Api, name: &str) -> ApiResult<()> {
    let job = NewJob { queue: name.into(), ..NewJob::new("named") };
    let fault = job.check(&api.parser().limits).into_iter().find(|fault| fault.path == "queue");
    fault.map_or(Ok(()), |fault| Err(ApiError::invalid_field("name", fault.message)))
}

type LimitPatch = (Option<Option<u32>>, Option<Option<Rate>>);

/// `null` takes a limit away; what is absent stays.
fn read_limit(fields: &mut Fields) -> LimitPatch {
    let (concurrency_named, rate_named) = (fields.is_present("concurrency"), fields.is_present("rate"));
    let before = fields.errors.len();
    let concurrency = fields.number("concurrency").map(|n| u32::try_from(n).unwrap_or(u32::MAX));
    let rate = read_rate(fields);
    if fields.errors.len() > before {
        return (None, None);
    }
    (concurrency_named.then_some(concurrency), rate_named.then_some(rate))
}

fn read_rate(fields: &mut Fields) -> Option<Rate> {
    const WANTED: &str = "must be like \"100/1m\" or {\"count\": 100, \"periodMs\": 60000}";
    let raw = fields.raw("rate")?;
    if raw.get().starts_with('"') {
        let rate = serde_json::from_str::<String>(raw.get()).ok().and_then(|text| Rate::parse(&text));
        if rate.is_none() {
            fields.reject("rate", WANTED);
        }
        return rate;
    }
    let Ok(mut inner) = Fields::nested(raw, "rate.".into()) else {
        fields.reject("rate", WANTED);
        return None;
    };
    let (count, period_ms) = (inner.number("count"), inner.number("periodMs"));
    let mut errors = inner.finish();
    for (name, value) in [("count", count), ("periodMs", period_ms)] {
        let path = format!("rate.{name}");
        if value.is_none() && !errors.iter().any(|fault| fault.path == path) {
            errors.push(FieldError::new(path, "is missing"));
        }
    }
    let good = errors.is_empty();
    fields.errors.extend(errors);
    let count = u32::try_from(count?).unwrap_or(u32::MAX);
    good.then_some(Rate { count, period_ms: period_ms? })
}

fn check_limit(concurrency: Option<Option<u32>>, rate: Option<Option<Rate>>, errors: &mut Vec<FieldError>) {
    Limit { concurrency: concurrency.flatten(), rate: rate.flatten() }.check(errors);
}

pub async fn limits(State(api): State<Api>) -> ApiResult<Json<LimitList>> {
    let store = &api.engine.store;
    let (limits, counts, lanes) = (store.limits().await?, store.counts().await?, store.lanes().await?);
    let now = Timestamp::now();
    let held = |scope: &Scope| {
        let counted = lanes.iter().filter(|lane| match scope {
            Scope::System => true,
            Scope::Queue(name) => lane.queue == *name,
            Scope::Type(name) => lane.kind == *name,
            Scope::Key(_) => false,
        });
        let held =
            counted.map(|lane| counts.by_lane.get(&(lane.id, Tally::InFlight)).copied().unwrap_or(0)).sum::<i64>();
        u64::try_from(held).unwrap_or(0)
    };
    let limits = limits.into_iter().map(|stored| {
        let is_key = matches!(stored.scope, Scope::Key(_));
        let held = (!is_key && stored.limit.concurrency.is_some()).then(|| held(&stored.scope));
        let tokens = stored.limit.rate.filter(|_| !is_key);
        let tokens = tokens.map(|rate| rate.refilled(stored.bucket, now).available() as u64);
        show_limit(stored, held, tokens)
    });
    Ok(Json(LimitList { limits: limits.collect() }))
}

fn show_limit(stored: StoredLimit, held: Option<u64>, tokens: Option<u64>) -> LimitView {
    let name = stored.scope.parts().1;
    LimitView {
        scope: stored.scope.kind().into(),
        name: (!name.is_empty()).then(|| name.to_owned()),
        concurrency: stored.limit.concurrency,
        rate: stored.limit.rate,
        origin: stored.origin,
        changed_at: stored.changed_at,
        changed_by: stored.changed_by,
        reached_at: stored.reached_at,
        held,
        tokens,
    }
}

pub async fn set_limit(State(api): State<Api>, body: Body) -> ApiResult<Json<LimitList>> {
    let body = read_body(&api, body).await?;
    let mut fields = api.parser().fields(&body)?;
    let scope = read_scope(&mut fields);
    let (concurrency, rate) = read_limit(&mut fields);
    if scope == Some(Scope::System) && rate.flatten().is_some() {
        fields.reject("rate", "is for queues, types and keys");
    }
    let mut errors = fields.finish();
    check_limit(concurrency, rate, &mut errors);
    if errors.is_empty() && concurrency.is_none() && rate.is_none() {
        errors.push(FieldError::new("body", "names nothing to change; concurrency and rate can be"));
    }
    let Some(scope) = scope.filter(|_| errors.is_empty()) else { return Err(ApiError::invalid(errors)) };
    let store = &api.engine.store;
    let before = store.limits().await?.into_iter().find(|stored| stored.scope == scope);
    let before = before.map(|stored| stored.limit).unwrap_or_default();
    let limit = Limit { concurrency: concurrency.unwrap_or(before.concurrency), rate: rate.unwrap_or(before.rate) };
    store.limit_set(scope, limit, &actor(), Timestamp::now()).await?;
    limits(State(api)).await
}

/// What was said at run time is forgotten; the configuration of this server holds again.
pub async fn reset_limit(State(api): State<Api>, body: Body) -> ApiResult<Json<LimitList>> {
    let body = read_body(&api, body).await?;
    let mut fields = api.parser().fields(&body)?;
    let scope = read_scope(&mut fields);
    let errors = fields.finish();
    let Some(scope) = scope.filter(|_| errors.is_empty()) else { return Err(ApiError::invalid(errors)) };
    let configured = api.engine.config.rules.limits.iter().find(|(known, _)| *known == scope).map(|(_, limit)| *limit);
    api.engine.store.limit_reset(scope, configured, &actor(), Timestamp::now()).await?;
    limits(State(api)).await
}

fn read_scope(fields: &mut Fields) -> Option<Scope> {
    let (word, name) = (fields.text("scope"), fields.text("name"));
    let most = match word.as_deref() {
        Some("system") => {
            if name.is_some() {
                fields.reject("name", "the whole system has none");
            }
            return Some(Scope::System);
        }
        Some("queue" | "type") => 100,
        Some("key") => 255,
        _ => {
            if !fields.errors.iter().any(|fault| fault.path == "scope") {
                fields.reject("scope", "must be system, queue, type or key");
            }
            return None;
        }
    };
    let Some(name) = name else {
        fields.reject("name", "is missing");
        return None;
    };
    check_text(&mut fields.errors, "name", &name, most);
    match word.as_deref() {
        Some("queue") => Some(Scope::Queue(name)),
        Some("type") => Some(Scope::Type(name)),
        _ => Some(Scope::Key(name)),
    }
}
