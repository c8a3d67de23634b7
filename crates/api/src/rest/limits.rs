//! `/limits`: shows and changes limits on concurrency and rate.

use std::collections::HashMap;

use axum::{
    body::Body,
    extract::{RawQuery, State},
};
use faena_domain::{FieldError, Limit, Rate, Scope, Timestamp, parse::Fields};
use faena_machine::MAX_RUNNING;
use faena_store::{Counts, Lane, StoredLimit, Tally, limit_of};
use faena_wire::{LimitList, LimitView};

use super::paging::{ListResponse, Paging, parse_paging, respond};
use crate::{Api, ApiError, ApiResult, context::actor, request::read_body};

pub async fn list(State(api): State<Api>, RawQuery(query): RawQuery) -> ListResponse<LimitList> {
    let paging = parse_paging(query.as_deref(), Paging::of_short_list())?;
    let store = &api.engine.store;
    let (limits, counts, lanes) = (store.limits().await?, store.counts().await?, store.lanes().await?);
    let now = Timestamp::now();
    let running = running_tasks(&api, &limits).await?;
    let limits = limits.into_iter().map(|stored| {
        // A pattern of keys stands for many limits, each with its own usage.
        let is_key = matches!(stored.scope, Scope::Key(_));
        let in_flight = (!is_key && stored.limit.concurrency.is_some()).then(|| match &stored.scope {
            Scope::Machine(name) => running.get(name).copied().unwrap_or(0),
            scope => in_flight(scope, &lanes, &counts),
        });
        let rate = stored.limit.rate.filter(|_| !is_key);
        let tokens = rate.map(|rate| rate.refilled(stored.bucket, now).available() as u64);
        view(stored, in_flight, tokens)
    });
    let (limits, page_info) = paging.page_of_all(limits.collect());
    respond(page_info, |page_info| LimitList::new(limits, page_info))
}

/// Counts the running and paused tasks of each machine. Returns no counts if no machine has a limit.
async fn running_tasks(api: &Api, limits: &[StoredLimit]) -> ApiResult<HashMap<String, u64>> {
    let mut running = HashMap::new();
    if limits.iter().any(|stored| matches!(stored.scope, Scope::Machine(_))) {
        for state in api.engine.store.task_figures().await?.states {
            *running.entry(state.machine).or_default() += state.tasks;
        }
    }
    Ok(running)
}

/// Counts the jobs in flight that count towards a limit.
fn in_flight(scope: &Scope, lanes: &[Lane], counts: &Counts) -> u64 {
    let counted = lanes.iter().filter(|lane| match scope {
        Scope::System => true,
        Scope::Queue(name) => lane.queue == *name,
        Scope::Type(name) => lane.kind == *name,
        Scope::Key(_) | Scope::Machine(_) => false,
    });
    let in_flight = counted.map(|lane| counts.by_lane.get(&(lane.id, Tally::InFlight)).copied().unwrap_or(0));
    u64::try_from(in_flight.sum::<i64>()).unwrap_or(0)
}

fn view(stored: StoredLimit, in_flight: Option<u64>, tokens: Option<u64>) -> LimitView {
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
        in_flight,
        tokens,
    }
}

pub async fn set(State(api): State<Api>, body: Body) -> ListResponse<LimitList> {
    let body = read_body(&api, body).await?;
    let mut fields = api.parser().fields(&body)?;
    let scope = parse_scope(&mut fields);
    let patch = LimitPatch::parse(&mut fields);
    if scope == Some(Scope::System) && patch.rate.flatten().is_some() {
        fields.reject("rate", "works only for queues, types and keys");
    }
    let is_machine = matches!(scope, Some(Scope::Machine(_)));
    if is_machine && patch.rate.flatten().is_some() {
        fields.reject("rate", "works only for queues, types and keys");
    }
    let mut errors = fields.finish();
    patch.check(&mut errors);
    if is_machine && patch.concurrency.flatten().is_some_and(|limit| limit > MAX_RUNNING) && errors.is_empty() {
        let message = format!("must be between 1 and {MAX_RUNNING} for a machine");
        errors.push(FieldError::new("concurrency", message));
    }
    if errors.is_empty() && patch == LimitPatch::default() {
        errors.push(FieldError::new("body", "nothing to change; set concurrency or rate"));
    }
    let Some(scope) = scope.filter(|_| errors.is_empty()) else { return Err(ApiError::invalid(errors)) };
    let store = &api.engine.store;
    let before = store.limits().await?.into_iter().find(|stored| stored.scope == scope);
    let before = before.map(|stored| stored.limit).unwrap_or_default();
    let limit =
        Limit { concurrency: patch.concurrency.unwrap_or(before.concurrency), rate: patch.rate.unwrap_or(before.rate) };
    store.limit_set(scope, limit, &actor(), Timestamp::now()).await?;
    list(State(api), RawQuery(None)).await
}

/// Removes what was set at run time; the server's configuration or the machine's definition applies again.
pub async fn reset(State(api): State<Api>, body: Body) -> ListResponse<LimitList> {
    let body = read_body(&api, body).await?;
    let mut fields = api.parser().fields(&body)?;
    let scope = parse_scope(&mut fields);
    let errors = fields.finish();
    let Some(scope) = scope.filter(|_| errors.is_empty()) else { return Err(ApiError::invalid(errors)) };
    if !api.engine.store.limits().await?.iter().any(|stored| stored.scope == scope) {
        return Err(ApiError::not_found(format!("there is no limit for {scope}; list them with GET /api/v1/limits")));
    }
    let configured = match &scope {
        Scope::Machine(name) => {
            let machine = api.engine.store.machine_get(name, None).await?;
            machine.and_then(|machine| limit_of(&machine.definition))
        }
        _ => api.engine.config.rules.limits.iter().find(|(known, _)| *known == scope).map(|(_, limit)| *limit),
    };
    api.engine.store.limit_reset(scope, configured, &actor(), Timestamp::now()).await?;
    list(State(api), RawQuery(None)).await
}

/// Changes to a limit: an absent field is kept, `null` removes it.
#[derive(Clone, Copy, PartialEq, Default)]
pub struct LimitPatch {
    pub concurrency: Option<Option<u32>>,
    pub rate: Option<Option<Rate>>,
}

impl LimitPatch {
    pub fn parse(fields: &mut Fields) -> LimitPatch {
        let (has_concurrency, has_rate) = (fields.is_present("concurrency"), fields.is_present("rate"));
        let errors_before = fields.errors.len();
        let concurrency = fields.number("concurrency").map(|number| u32::try_from(number).unwrap_or(u32::MAX));
        let rate = parse_rate(fields);
        if fields.errors.len() > errors_before {
            return LimitPatch::default();
        }
        LimitPatch { concurrency: has_concurrency.then_some(concurrency), rate: has_rate.then_some(rate) }
    }

    /// Appends the errors of the new values.
    pub fn check(self, errors: &mut Vec<FieldError>) {
        Limit { concurrency: self.concurrency.flatten(), rate: self.rate.flatten() }.check(errors);
    }
}

fn parse_rate(fields: &mut Fields) -> Option<Rate> {
    const EXPECTED: &str = "must be like \"100/1m\" or {\"count\": 100, \"periodMs\": 60000}";
    let raw = fields.raw("rate")?;
    if raw.get().starts_with('"') {
        let rate = serde_json::from_str::<String>(raw.get()).ok().and_then(|text| Rate::parse(&text));
        if rate.is_none() {
            fields.reject("rate", EXPECTED);
        }
        return rate;
    }
    let Ok(mut nested) = Fields::nested(raw, "rate.".into()) else {
        fields.reject("rate", EXPECTED);
        return None;
    };
    let (count, period_ms) = (nested.number("count"), nested.number("periodMs"));
    let mut errors = nested.finish();
    for (name, value) in [("count", count), ("periodMs", period_ms)] {
        let path = format!("rate.{name}");
        if value.is_none() && !errors.iter().any(|error| error.path == path) {
            errors.push(FieldError::new(path, "is required"));
        }
    }
    let is_valid = errors.is_empty();
    fields.errors.extend(errors);
    let count = u32::try_from(count?).unwrap_or(u32::MAX);
    is_valid.then_some(Rate { count, period_ms: period_ms? })
}

fn parse_scope(fields: &mut Fields) -> Option<Scope> {
    let (scope, name) = (fields.text("scope"), fields.text("name"));
    let max_length = match scope.as_deref() {
        Some("system") => {
            if name.is_some() {
                fields.reject("name", "must be absent: the scope system has no name");
            }
            return Some(Scope::System);
        }
        Some("queue" | "type" | "machine") => 100,
        Some("key") => 255,
        _ => {
            if !fields.errors.iter().any(|error| error.path == "scope") {
                fields.reject("scope", "must be system, queue, type, key or machine");
            }
            return None;
        }
    };
    let Some(name) = name else {
        fields.reject("name", "is required");
        return None;
    };
    check_text(&mut fields.errors, "name", &name, max_length);
    match scope.as_deref() {
        Some("queue") => Some(Scope::Queue(name)),
        Some("type") => Some(Scope::Type(name)),
        Some("machine") => Some(Scope::Machine(name)),
        _ => Some(Scope::Key(name)),
    }
}

pub fn check_text(errors: &mut Vec<FieldError>, path: &str, text: &str, max_length: usize) {
    if text.is_empty() || text.chars().count() > max_length || text.contains(char::is_control) {
        let message = format!("must have 1 to {max_length} characters and no control characters");
        errors.push(FieldError::new(path, message));
    }
}
