//! `POST /jobs/bulk/{cancel,retry,delete}`: one action on every job that a filter finds.

use axum::{Json, body::Body, extract::State};
use faena_domain::{Fault, JobId, JobState, Timestamp};
use faena_store::{Filter, Page, StoreError};
use futures_util::StreamExt;
use serde::Serialize;
use serde_json::Value;

use super::{
    jobs::{Answer, Segment, read_body},
    list::set_filter,
};
use crate::{Api, ApiError, fields::body_object};

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BulkAnswer {
    dry_run: bool,
    /// Jobs that the filter finds and the action fits.
    matched: u64,
    /// Jobs on which the action was done.
    done: u64,
    /// Jobs that had moved on before the action reached them.
    skipped: u64,
    sample: Vec<JobId>,
}

#[derive(Clone, Copy)]
enum Action {
    Cancel,
    Retry,
    Delete,
}

impl Action {
    /// The states in which the action makes sense.
    fn states(self) -> Vec<JobState> {
        JobState::ALL
            .into_iter()
            .filter(|state| match self {
                Action::Cancel => !state.is_terminal(),
                Action::Retry => state.can_transition_to(JobState::Pending),
                Action::Delete => !state.is_held(),
            })
            .collect()
    }
}

pub async fn bulk(State(api): State<Api>, Segment(action): Segment, body: Body) -> Answer<Json<BulkAnswer>> {
    let action = match action.as_str() {
        "cancel" => Action::Cancel,
        "retry" => Action::Retry,
        "delete" => Action::Delete,
        other => {
            return Err(ApiError::not_found(format!("there is no bulk action {other}; cancel, retry and delete are")));
        }
    };
    let body = read_body(&api, body).await?;
    let (mut filter, dry_run) = read_ask(&api, &body)?;
    let fitting = action.states();
    filter.states = match filter.states.is_empty() {
        true => fitting,
        false => filter.states.into_iter().filter(|state| fitting.contains(state)).collect(),
    };
    if filter.states.is_empty() {
        return Ok(Json(BulkAnswer { dry_run, matched: 0, done: 0, skipped: 0, sample: Vec::new() }));
    }
    let first = api.engine.store.job_list(&filter, Page::After { id: None, limit: 100 }).await?;
    let answer = BulkAnswer {
        dry_run,
        matched: first.total,
        done: 0,
        skipped: 0,
        sample: first.jobs.iter().take(10).map(|job| job.id).collect(),
    };
    if dry_run {
        return Ok(Json(answer));
    }
    // In a task of its own: a caller that goes away does not leave the work half done.
    let work = tokio::spawn(async move { act_on_all(&api, action, &filter, answer).await });
    let answer = work.await.map_err(|_| StoreError::Broken("a bulk action panicked".into()))??;
    Ok(Json(answer))
}

/// So many at once share a commit.
const AT_ONCE: usize = 64;
/// The most jobs that one request acts on; `matched` tells that there are more.
const MOST: usize = 100_000;

async fn act_on_all(
    api: &Api,
    action: Action,
    filter: &Filter,
    mut answer: BulkAnswer,
) -> Result<BulkAnswer, StoreError> {
    let mut ids = Vec::new();
    let mut cursor = None;
    while ids.len() < MOST {
        let page = api.engine.store.job_list(filter, Page::After { id: cursor, limit: 100 }).await?;
        ids.extend(page.jobs.iter().map(|job| job.id));
        match page.next {
            Some(next) => cursor = Some(next),
            None => break,
        }
    }
    // Parents before their children: a retried child waits for a parent that was retried before it.
    ids.sort_unstable();
    let width = if matches!(action, Action::Retry) { 1 } else { AT_ONCE };
    let mut results =
        futures_util::stream::iter(ids).map(async |id| act(api, action, id).await).buffer_unordered(width);
    while let Some(result) = results.next().await {
        match result {
            Ok(()) => answer.done += 1,
            Err(StoreError::NotFound(_) | StoreError::InvalidTransition { .. } | StoreError::Conflict { .. }) => {
                answer.skipped += 1;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(answer)
}

async fn act(api: &Api, action: Action, id: JobId) -> Result<(), StoreError> {
    let store = &api.engine.store;
    match action {
        // Asked, not waited for: a worker may take its time to stop.
        Action::Cancel => store.job_cancel(id, "cancelled by request", None, Timestamp::now()).await.map(|_| ()),
        Action::Retry => store.job_retry(id, None, Timestamp::now()).await,
        Action::Delete => store.job_delete(id, None, Timestamp::now()).await,
    }
}

fn read_ask(api: &Api, body: &[u8]) -> Answer<(Filter, bool)> {
    let mut fields = body_object(body, api.body_bytes)?;
    let dry_run = fields.take::<bool>("dryRun", "true or false").unwrap_or(false);
    let all = fields.take::<bool>("all", "true or false").unwrap_or(false);
    let wanted: serde_json::Map<String, Value> = fields.take("filter", "an object").unwrap_or_default();
    let mut faults = fields.finish();
    let mut filter = Filter::default();
    for (name, value) in &wanted {
        let set = match value {
            Value::String(text) => set_filter(&mut filter, name, text.clone()),
            _ => Err("must be a string".into()),
        };
        if let Err(message) = set {
            faults.push(Fault::new(format!("filter.{name}"), message));
        }
    }
    if wanted.is_empty() && !all && faults.is_empty() {
        faults.push(Fault::new("filter", "would match every job; say \"all\": true if that is meant"));
    }
    if faults.is_empty() { Ok((filter, dry_run)) } else { Err(ApiError::invalid(faults)) }
}
