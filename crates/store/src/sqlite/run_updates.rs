//! Stores the reports of running jobs: their start, progress, log messages and finished steps.

use std::collections::HashMap;

use faena_domain::{LogEvent, LogLine, Progress, Run};
use rusqlite::OptionalExtension;

use super::{
    end::{ClaimStatus, claim_status, job_exists, outcome_of_run},
    job_log::{add_log_entry, add_stale, step_rejection},
    read,
    writer::Tx,
};
use crate::{Result, RunUpdate, RunUpdateKind, UpdateResult, progress};

pub fn write_updates(tx: &Tx, updates: Vec<RunUpdate>) -> Result<Vec<UpdateResult>> {
    let mut claims = HashMap::new();
    updates.into_iter().map(|update| write_update(tx, update, &mut claims)).collect()
}

fn write_update(tx: &Tx, update: RunUpdate, claims: &mut HashMap<Run, ClaimStatus>) -> Result<UpdateResult> {
    if !job_exists(tx, update.id)? {
        return Ok(UpdateResult::Stale);
    }
    // A stale report is counted, whichever run owns the job.
    if let RunUpdateKind::Stale(text) = &update.kind {
        add_stale(tx, &update, text)?;
        return Ok(UpdateResult::Accepted);
    }
    if claim_status(tx, update.run, claims)? == ClaimStatus::Closed
        || outcome_of_run(tx.connection, update.lane, update.id, update.run)?.is_some()
    {
        return Ok(UpdateResult::Stale);
    }
    if let RunUpdateKind::Step { name, result, total } = &update.kind {
        if let Some(reason) = step_rejection(tx, update.id, name, result)? {
            return Ok(UpdateResult::Rejected(reason));
        }
        put_step(tx, &update, name, result, *total)?;
    }
    put_running(tx, &update)?;
    if let Some(progress) = progress_of(tx, &update)? {
        put_progress(tx, &update, &progress)?;
    }
    let entry = match update.kind {
        RunUpdateKind::Progress(progress) => LogLine::new(update.at, LogEvent::Progress, progress::describe(&progress)),
        RunUpdateKind::Message { event, text } => LogLine::new(update.at, event, text),
        RunUpdateKind::Started | RunUpdateKind::Step { .. } | RunUpdateKind::Stale(_) => {
            return Ok(UpdateResult::Accepted);
        }
    };
    add_log_entry(tx, update.id, Some(update.run), entry)?;
    Ok(UpdateResult::Accepted)
}

/// Stores a step. An existing step keeps its first result.
fn put_step(tx: &Tx, update: &RunUpdate, name: &str, result: &str, total: Option<u32>) -> Result<()> {
    tx.connection
        .prepare_cached(
            "INSERT INTO step (id, name, run, at, result, total) VALUES (?, ?, ?, ?, ?, ?)
             ON CONFLICT DO UPDATE SET total = coalesce(excluded.total, total)",
        )?
        .execute((update.id.0, name, update.run, update.at.as_ms(), result, total))?;
    Ok(())
}

/// Returns the progress after this update, if the update changes it.
fn progress_of(tx: &Tx, update: &RunUpdate) -> Result<Option<Progress>> {
    Ok(match &update.kind {
        RunUpdateKind::Progress(reported) => Some(read::step_count(tx.connection, update.id)?.complete(reported)),
        RunUpdateKind::Step { name, total, .. } => {
            let before: Option<String> = tx
                .connection
                .prepare_cached("SELECT progress FROM progress WHERE id = ? AND run = ?")?
                .query_row((update.id.0, update.run), |row| row.get(0))
                .optional()?;
            let before = progress::parse(before.as_deref());
            Some(read::step_count(tx.connection, update.id)?.after_step(name, *total, before))
        }
        RunUpdateKind::Started | RunUpdateKind::Message { .. } | RunUpdateKind::Stale(_) => None,
    })
}

fn put_running(tx: &Tx, update: &RunUpdate) -> Result<()> {
    tx.connection
        .prepare_cached(
            "INSERT INTO running (id, lane, run, node, worker, retry_count, ready_at, started_at, updated_at)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)
             ON CONFLICT DO UPDATE SET run = excluded.run, node = excluded.node, worker = excluded.worker,
                 retry_count = excluded.retry_count, ready_at = excluded.ready_at,
                 started_at = CASE WHEN run = excluded.run THEN started_at ELSE excluded.started_at END,
                 updated_at = excluded.updated_at",
        )?
        .execute((
            update.id.0,
            update.lane,
            update.run,
            update.node.0,
            update.worker.0,
            update.retry_count,
            update.ready_at.as_ms(),
            update.started_at.as_ms(),
            update.at.as_ms(),
        ))?;
    Ok(())
}

/// Stores the progress of a job. It is kept when the run ends.
fn put_progress(tx: &Tx, update: &RunUpdate, progress: &Progress) -> Result<()> {
    tx.connection
        .prepare_cached(
            "INSERT INTO progress (id, run, progress) VALUES (?, ?, ?)
             ON CONFLICT DO UPDATE SET run = excluded.run, progress = excluded.progress",
        )?
        .execute((update.id.0, update.run, progress::stored(progress)))?;
    Ok(())
}
