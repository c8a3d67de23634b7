//! `POST /tasks/:id/fork`: starts a new task from a point in the history of another.

use std::sync::Arc;

use axum::{body::Body, extract::State};
use faena_domain::{TaskId, Timestamp};
use faena_machine::{Definition, HistoryPoint, Origin, Record, fork as first_step};
use faena_store::{AuditEntry, NewTask, TaskView as StoredTask};
use serde_json::{Map, Value, json};

use super::{
    machines,
    tasks::{Created, created_response, load, parse_id},
};
use crate::{
    Api, ApiError, ApiResult, access,
    context::actor,
    request::{Segment, check, optional_fields, read_body},
};

/// Number of records to read per query.
const PAGE: usize = 1_000;

pub async fn fork(State(api): State<Api>, Segment(id): Segment, body: Body) -> ApiResult<Created> {
    let body = read_body(&api, body).await?;
    let fork = fork_from(&api, &id, &body).await?;
    created_response(&api, fork).await
}

/// Creates the fork of a request and returns its id.
pub async fn fork_from(api: &Api, id: &str, body: &[u8]) -> ApiResult<TaskId> {
    let mut fields = optional_fields(api, body)?;
    let at = fields.number("at");
    let data: Map<String, Value> = fields.take("data", "an object").unwrap_or_default();
    check(fields.finish())?;
    let original = load(api, id).await?;
    let (definition, point) = find_point(api, &original, parse_id(id)?, at).await?;
    let (fork, now) = (TaskId::new(), Timestamp::now());
    let origin = Origin { task_id: original.task.id.clone(), record: point.record };
    let audit = AuditEntry {
        actor: actor(),
        action: "task.fork".into(),
        target: original.task.id.clone(),
        details: json!({"fork": fork, "record": point.record}),
        count: 1,
    };
    let first = first_step(&definition, fork.to_string(), access::task_caller()?, point, origin, data, now)
        .map_err(|error| ApiError::invalid_field("at", error))?;
    let StoredTask { title, correlation, tags, .. } = original;
    let new = NewTask { id: fork, definition, title, correlation, tags, first, audit: Some(audit) };
    api.engine.store.task_create(new, now).await?;
    Ok(fork)
}

/// Reads a history up to the record `at`, or up to the last one before the end of the task.
async fn find_point(
    api: &Api,
    task: &StoredTask,
    id: TaskId,
    at: Option<u64>,
) -> ApiResult<(Arc<Definition>, HistoryPoint)> {
    let mut definition: Option<Arc<Definition>> = None;
    let mut point = HistoryPoint::default();
    'history: loop {
        let page = api.engine.store.task_history(id, point.record, PAGE).await?;
        for record in &page {
            if at.is_some_and(|at| point.record >= at) {
                break 'history;
            }
            let next = match record.version {
                Some(version) => Some(machines::load(api, &task.machine, Some(version)).await?.definition),
                None => definition.clone(),
            };
            if at.is_none() && next.as_ref().is_some_and(|definition| leads_to_the_end(definition, record)) {
                break 'history;
            }
            definition = next;
            point.advance(record);
        }
        if page.len() < PAGE {
            break;
        }
    }
    match definition {
        Some(definition) if at.is_none_or(|at| at == point.record) => Ok((definition, point)),
        _ => {
            let message = format!("must be a record of the history, from 1 to {}", task.task.sequence);
            Err(ApiError::invalid_field("at", message))
        }
    }
}

fn leads_to_the_end(definition: &Definition, record: &Record) -> bool {
    let state = record.to.clone().unwrap_or_default();
    HistoryPoint { state, ..HistoryPoint::default() }.is_final(definition)
}
