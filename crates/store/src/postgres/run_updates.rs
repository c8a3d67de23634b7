//! Stores the reports of running jobs: their start, progress, log messages and finished steps.

use std::collections::HashMap;

use deadpool_postgres::Object;
use faena_domain::{LogEvent, LogLine, Progress, Run};
use uuid::Uuid;

use super::{
    end::{Key, existing, saturating_i16, storable, stored_ends},
    job_log::{add_log_entries, add_stale, step_rejection},
    read,
};
use crate::{LaneId, Result, RunEnd, RunUpdate, RunUpdateKind, StoredJobLimits, UpdateResult, progress};

/// Writes updates. `unwritten_ends`: ends of runs that the same transaction writes later.
pub async fn write_updates(
    client: &Object,
    updates: &[RunUpdate],
    open_claims: &HashMap<Run, i64>,
    unwritten_ends: &HashMap<Key, &RunEnd>,
    limits: &StoredJobLimits,
) -> Result<Vec<UpdateResult>> {
    let keys: Vec<(LaneId, Uuid, Run)> = updates.iter().map(|update| (update.lane, update.id.0, update.run)).collect();
    let ended = stored_ends(client, &keys).await?;
    let existing_jobs = existing(client, keys.iter().map(|key| key.1)).await?;
    let mut answers = Vec::with_capacity(updates.len());
    let mut entries = Vec::new();
    for update in updates {
        let key = (update.id.0, update.run);
        let live = open_claims.contains_key(&update.run)
            && !ended.contains_key(&key)
            && !unwritten_ends.contains_key(&key)
            && existing_jobs.contains(&update.id.0);
        // A stale report is counted, whichever run owns the job.
        if let RunUpdateKind::Stale(text) = &update.kind {
            let exists = existing_jobs.contains(&update.id.0);
            if exists {
                add_stale(client, update, text).await?;
            }
            answers.push(UpdateResult::of(exists));
            continue;
        }
        if live
            && let RunUpdateKind::Step { name, result, .. } = &update.kind
            && let Some(reason) = step_rejection(client, limits, update.id, name, result).await?
        {
            answers.push(UpdateResult::Rejected(reason));
            continue;
        }
        if live {
            let entry = write_update(client, update).await?;
            entries.extend(entry.map(|entry| (update.id, Some(update.run), entry)));
        }
        answers.push(UpdateResult::of(live));
    }
    add_log_entries(client, limits, entries).await?;
    Ok(answers)
}

/// Writes an update, and returns its log entry.
async fn write_update(client: &Object, update: &RunUpdate) -> Result<Option<LogLine>> {
    if let RunUpdateKind::Step { name, result, total } = &update.kind {
        put_step(client, update, name, result, *total).await?;
    }
    put_running(client, update).await?;
    if let Some(progress) = progress_of(client, update).await? {
        put_progress(client, update, &progress).await?;
    }
    Ok(match &update.kind {
        RunUpdateKind::Progress(progress) => {
            Some(LogLine::new(update.at, LogEvent::Progress, progress::describe(progress)))
        }
        RunUpdateKind::Message { event, text } => Some(LogLine::new(update.at, event.clone(), text.clone())),
        RunUpdateKind::Started | RunUpdateKind::Step { .. } | RunUpdateKind::Stale(_) => None,
    })
}

/// Stores a step. An existing step keeps its first result.
async fn put_step(client: &Object, update: &RunUpdate, name: &str, result: &str, total: Option<u32>) -> Result<()> {
    client
        .execute(
            "INSERT INTO faena.step AS s (id, name, run, at, result, total) VALUES ($1, $2, $3, $4, $5, $6)
             ON CONFLICT (id, name) DO UPDATE SET total = coalesce(excluded.total, s.total)",
            &[
                &update.id.0,
                &storable(name),
                &update.run,
                &update.at.as_ms(),
                &result,
                &total.map(|total| i32::try_from(total).unwrap_or(i32::MAX)),
            ],
        )
        .await?;
    Ok(())
}

/// Returns the progress after this update, if the update changes it.
async fn progress_of(client: &Object, update: &RunUpdate) -> Result<Option<Progress>> {
    Ok(match &update.kind {
        RunUpdateKind::Progress(reported) => Some(read::step_count(client, update.id).await?.complete(reported)),
        RunUpdateKind::Step { name, total, .. } => {
            let before = client
                .query_opt(
                    "SELECT progress FROM faena.progress WHERE id = $1 AND run = $2",
                    &[&update.id.0, &update.run],
                )
                .await?;
            let before = before.and_then(|row| progress::parse(row.get(0)));
            Some(read::step_count(client, update.id).await?.after_step(name, *total, before))
        }
        RunUpdateKind::Started | RunUpdateKind::Message { .. } | RunUpdateKind::Stale(_) => None,
    })
}

async fn put_running(client: &Object, update: &RunUpdate) -> Result<()> {
    let statement = client
        .prepare_cached(
            "INSERT INTO faena.running AS r
                 (id, lane, run, node, worker, retry_count, ready_at, started_at, updated_at)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)
             ON CONFLICT (id) DO UPDATE SET run = excluded.run, node = excluded.node, worker = excluded.worker,
                 retry_count = excluded.retry_count, ready_at = excluded.ready_at,
                 started_at = CASE WHEN r.run = excluded.run THEN r.started_at ELSE excluded.started_at END,
                 updated_at = excluded.updated_at",
        )
        .await?;
    client
        .execute(
            &statement,
            &[
                &update.id.0,
                &update.lane,
                &update.run,
                &update.node.0,
                &update.worker.0,
                &saturating_i16(update.retry_count),
                &update.ready_at.as_ms(),
                &update.started_at.as_ms(),
                &update.at.as_ms(),
            ],
        )
        .await?;
    Ok(())
}

/// Stores the progress of a job. It is kept when the run ends.
async fn put_progress(client: &Object, update: &RunUpdate, progress: &Progress) -> Result<()> {
    let statement = client
        .prepare_cached(
            "INSERT INTO faena.progress (id, run, progress) VALUES ($1, $2, $3)
             ON CONFLICT (id) DO UPDATE SET run = excluded.run, progress = excluded.progress",
        )
        .await?;
    client.execute(&statement, &[&update.id.0, &update.run, &progress::stored(progress)]).await?;
    Ok(())
}
