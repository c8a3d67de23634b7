//! Bulk actions, step by step.

use async_trait::async_trait;
use faena_domain::{BulkId, JobId, Timestamp};
use rusqlite::{Connection, OptionalExtension, Row};

use super::{Sqlite, audit, change, events, machines::definition, read, tasks, writer::Tx};
use crate::{
    Bulk, BulkAction, BulkStep, BulkStore, BulkWork, COUNT_LIMIT, Filter, NewBulk, Result, StoreError, TaskBulk,
    audit::retried_by,
    bulk::{
        BulkRow, BulkStepCounts, CANCEL_REASON, COLUMNS, MAX_CANDIDATES, begin_audit, end_audit, first_readable,
        is_unchanged, stop_audit,
    },
};

#[async_trait]
impl BulkStore for Sqlite {
    async fn bulk_begin(&self, bulk: NewBulk, due_at: Timestamp, now: Timestamp) -> Result<()> {
        self.writer.call(move |tx| begin(tx, &bulk, due_at, now)).await
    }

    async fn bulk_due(&self) -> Result<Option<Bulk>> {
        self.read(|connection, _| due(connection)).await
    }

    async fn bulk_step(&self, step: BulkStep, now: Timestamp) -> Result<bool> {
        self.writer.call(move |tx| self::step(tx, &step, now)).await
    }

    async fn bulk_stop(&self, id: BulkId, by: &str, now: Timestamp) -> Result<bool> {
        let by = by.to_owned();
        self.writer.call(move |tx| stop(tx, id, &by, now)).await
    }

    async fn bulk_get(&self, id: BulkId) -> Result<Option<Bulk>> {
        self.read(move |connection, _| get(connection, id)).await
    }

    async fn bulk_list(&self, limit: usize) -> Result<Vec<Bulk>> {
        self.read(move |connection, _| list(connection, limit)).await
    }

    async fn bulk_total(&self) -> Result<u64> {
        self.read(|connection, _| total(connection)).await
    }
}

pub fn begin(tx: &Tx, bulk: &NewBulk, due_at: Timestamp, now: Timestamp) -> Result<()> {
    tx.connection.execute(
        "INSERT INTO bulk (id, action, filter, actor, per_second, created_at, up_to, matched, due_at)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
        (
            bulk.id.0,
            bulk.work.name(),
            bulk.work.to_api_json().to_string(),
            &bulk.actor,
            bulk.per_second.map_or(0, i64::from),
            now.as_ms(),
            bulk.up_to,
            i64::try_from(bulk.matched).unwrap_or(i64::MAX),
            due_at.as_ms(),
        ),
    )?;
    if let Some(entry) = begin_audit(bulk) {
        audit::add(tx, &entry, now)?;
    }
    Ok(())
}

pub fn due(connection: &Connection) -> Result<Option<Bulk>> {
    let rows: Vec<BulkRow> = connection
        .prepare_cached(&format!(
            "SELECT {COLUMNS} FROM bulk WHERE due_at IS NOT NULL ORDER BY due_at, id LIMIT {MAX_CANDIDATES}"
        ))?
        .query_map([], row)?
        .collect::<rusqlite::Result<_>>()?;
    Ok(first_readable(rows))
}

fn one(connection: &Connection, which: &str, parameters: impl rusqlite::Params) -> Result<Option<Bulk>> {
    connection
        .prepare_cached(&format!("SELECT {COLUMNS} FROM bulk WHERE {which}"))?
        .query_row(parameters, row)
        .optional()?
        .map(BulkRow::bulk)
        .transpose()
}

pub fn step(tx: &Tx, step: &BulkStep, now: Timestamp) -> Result<bool> {
    let id = step.bulk.id.0;
    let progress = tx
        .connection
        .prepare_cached("SELECT last, due_at FROM bulk WHERE id = ?")?
        .query_row([id], |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?;
    if !progress.is_some_and(|(last, due_at)| is_unchanged(step, last, due_at)) {
        return Ok(false);
    }
    let counts = match &step.bulk.work {
        BulkWork::Jobs { action, filter } => {
            let mut counts = BulkStepCounts::default();
            for id in &step.ids {
                let result =
                    events::with_actor(tx, &step.bulk.actor, |tx| act_on(tx, *action, filter, JobId(*id), now));
                counts.add(result)?;
            }
            counts
        }
        BulkWork::Tasks(work) => act_on_tasks(tx, step, work, now)?,
    };
    let (done, skipped): (i64, i64) = tx
        .connection
        .prepare_cached(
            "UPDATE bulk SET last = coalesce(?2, last), done = done + ?3, skipped = skipped + ?4, due_at = ?5,
                 finished_at = CASE WHEN ?5 IS NULL THEN ?6 END
             WHERE id = ?1 RETURNING done, skipped",
        )?
        .query_row(
            (id, step.last, counts.done, counts.skipped, step.due_at.map(Timestamp::as_ms), now.as_ms()),
            |row| Ok((row.get(0)?, row.get(1)?)),
        )?;
    if step.due_at.is_none() {
        audit::add(tx, &end_audit(&step.bulk, done.unsigned_abs(), skipped.unsigned_abs()), now)?;
    }
    Ok(true)
}

/// Processes one job: rejects it before anything is written, or applies the whole action.
fn act_on(tx: &Tx, action: BulkAction, filter: &Filter, id: JobId, now: Timestamp) -> Result<()> {
    let state = read::state_of(tx.connection, id)?.ok_or(StoreError::NotFound(id))?;
    if !filter.states.contains(&state) {
        return Err(StoreError::InvalidTransition { from: state, wanted: "be acted on" });
    }
    match action {
        BulkAction::Cancel => change::cancel(tx, id, CANCEL_REASON, now).map(|_| ()),
        BulkAction::Retry => change::retry(tx, id, &retried_by(None), now).map(|_| ()),
        BulkAction::Delete => change::delete(tx, id, now),
    }
}

/// Applies the action to tasks that still match.
fn act_on_tasks(tx: &Tx, step: &BulkStep, work: &TaskBulk, now: Timestamp) -> Result<BulkStepCounts> {
    let target = work.target().map(|(machine, version)| definition(tx, machine, version)).transpose()?;
    let inputs = work.inputs(&step.bulk, &step.ids, target, now);
    Ok(BulkStepCounts::of(tasks::apply_to(tx, &[(inputs, now)], Some(work.filter.clone()))?.0))
}

pub fn stop(tx: &Tx, id: BulkId, by: &str, now: Timestamp) -> Result<bool> {
    let Some(bulk) = one(tx.connection, "id = ? AND due_at IS NOT NULL", [id.0])? else { return Ok(false) };
    tx.connection.execute(
        "UPDATE bulk SET due_at = NULL, finished_at = ?, error = ? WHERE id = ?",
        (now.as_ms(), format!("stopped by {by}"), id.0),
    )?;
    audit::add(tx, &stop_audit(&bulk, by), now)?;
    Ok(true)
}

pub fn get(connection: &Connection, id: BulkId) -> Result<Option<Bulk>> {
    one(connection, "id = ?", [id.0])
}

pub fn list(connection: &Connection, limit: usize) -> Result<Vec<Bulk>> {
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let rows: Vec<BulkRow> = connection
        .prepare_cached(&format!("SELECT {COLUMNS} FROM bulk ORDER BY id DESC LIMIT ?"))?
        .query_map([limit], row)?
        .collect::<rusqlite::Result<_>>()?;
    Ok(rows.into_iter().filter_map(|row| row.bulk().ok()).collect())
}

fn total(connection: &Connection) -> Result<u64> {
    let sql = format!("SELECT count(*) FROM (SELECT 1 FROM bulk LIMIT {COUNT_LIMIT})");
    Ok(connection.prepare_cached(&sql)?.query_row([], |row| row.get::<_, i64>(0))?.unsigned_abs())
}

fn row(row: &Row) -> rusqlite::Result<BulkRow> {
    Ok(BulkRow {
        id: row.get(0)?,
        action: row.get(1)?,
        filter: row.get(2)?,
        actor: row.get(3)?,
        per_second: row.get(4)?,
        created_at: row.get(5)?,
        up_to: row.get(6)?,
        last: row.get(7)?,
        matched: row.get(8)?,
        done: row.get(9)?,
        skipped: row.get(10)?,
        due_at: row.get(11)?,
        finished_at: row.get(12)?,
        error: row.get(13)?,
    })
}
