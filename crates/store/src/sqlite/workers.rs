//! Workers come, tell how they are, and go.
//!
//! A worker's row is its life. What it holds is its own while the row lives, whatever becomes of the server it is connected to;
//! who ends the life frees what it held in the same transaction.

use faena_domain::{
    JobId, Run, Timestamp, WorkerCapabilities, WorkerChange, WorkerId, WorkerKind, WorkerState, WorkerView,
};
use rusqlite::{Connection, OptionalExtension, Row, ToSql};
use uuid::Uuid;

use super::{audit, claim::block_jobs, end::ended_as, free::free_blocks, read, writer::Tx};
use crate::{
    AuditEntry, ClaimedJob, GracePeriods, LaneId, Recovered, Result, ResumedJob, Signal, SweepResult, WorkerAdmitted,
    WorkerEnd, WorkerEntry, WorkerLost, WorkerUpdate, WorkerUpdateResult,
    assemble::parse_options,
    workers::{
        COLUMNS, FORGET, HISTORY, ROUND, SILENT, ServerGone, WorkerRow, allowed, changes, deadline_without_server,
        kind_code, names, path_in, read_capabilities, shown_jobs, worker_code, worker_kind, worker_state,
    },
};

/// A living worker, as far as its life is looked after.
pub struct Living {
    id: WorkerId,
    key: String,
    kind: WorkerKind,
    transport: String,
    node: Option<Uuid>,
    session: i64,
    state: WorkerState,
    reason: Option<String>,
    deadline: Option<i64>,
}

/// The living workers of which this is true, up to as many as one round takes.
pub fn living_of(tx: &Tx, condition: &str, parameters: &[&dyn ToSql]) -> Result<Vec<Living>> {
    let sql = format!(
        "SELECT id, key, kind, transport, node, session, state, reason, deadline FROM worker
         WHERE ended_at IS NULL AND {condition} ORDER BY deadline, id LIMIT {ROUND}"
    );
    let mut statement = tx.connection.prepare_cached(&sql)?;
    let mut rows = statement.query(parameters)?;
    let mut living = Vec::new();
    while let Some(row) = rows.next()? {
        living.push(Living {
            id: WorkerId(row.get(0)?),
            key: row.get(1)?,
            kind: worker_kind(row.get(2)?)?,
            transport: row.get(3)?,
            node: row.get(4)?,
            session: row.get(5)?,
            state: worker_state(row.get(6)?),
            reason: row.get(7)?,
            deadline: row.get(8)?,
        });
    }
    Ok(living)
}

pub fn admit(tx: &Tx, entry: &WorkerEntry, now: Timestamp) -> Result<WorkerAdmitted> {
    match living_of(tx, "key = ?", &[&entry.key])?.into_iter().next() {
        Some(living) => go_on(tx, living, entry, now),
        None => begin_life(tx, entry, now),
    }
}

fn begin_life(tx: &Tx, entry: &WorkerEntry, now: Timestamp) -> Result<WorkerAdmitted> {
    let path = path_in(None, entry.state);
    let state = path.last().copied().unwrap_or(WorkerState::Creating);
    tx.connection
        .prepare_cached(
            "INSERT INTO worker (id, key, name, kind, transport, node, session, state, capabilities, queues, concurrency, pool,
                                 registered_at, connected_at, seen_at, deadline)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, 1, ?7, ?8, ?9, ?10, ?11, ?12, ?12, ?12, ?13)",
        )?
        .execute((
            entry.id.0,
            &entry.key,
            &entry.name,
            kind_code(entry.kind),
            &entry.transport,
            entry.node.0,
            worker_code(state),
            names(&entry.capabilities.types),
            names(&entry.capabilities.queues),
            entry.concurrency,
            &entry.pool,
            now.as_ms(),
            entry.deadline.map(Timestamp::as_ms),
        ))?;
    add_changes(tx, entry.id, &changes(path, None, now))?;
    Ok(WorkerAdmitted { id: entry.id, session: 1, was: None, jobs: Vec::new() })
}

/// A worker that lives connects anew, here or elsewhere, with what it has in hand.
fn go_on(tx: &Tx, living: Living, entry: &WorkerEntry, now: Timestamp) -> Result<WorkerAdmitted> {
    let path = path_in(Some(living.state), entry.state);
    let state = path.last().copied().unwrap_or(living.state);
    let kind = if living.kind == WorkerKind::Pool { living.kind } else { entry.kind };
    let session = living.session + 1;
    tx.connection
        .prepare_cached(
            "UPDATE worker SET name = coalesce(?2, name), kind = ?3, transport = ?4, node = ?5, session = ?6, state = ?7,
                 reason = NULL, capabilities = ?8, queues = ?9, concurrency = ?10, pool = coalesce(?11, pool),
                 connected_at = ?12, seen_at = max(seen_at, ?12), deadline = ?13
             WHERE id = ?1",
        )?
        .execute((
            living.id.0,
            &entry.name,
            kind_code(kind),
            &entry.transport,
            entry.node.0,
            session,
            worker_code(state),
            names(&entry.capabilities.types),
            names(&entry.capabilities.queues),
            entry.concurrency,
            &entry.pool,
            now.as_ms(),
            entry.deadline.map(Timestamp::as_ms),
        ))?;
    add_changes(tx, living.id, &changes(path, None, now))?;
    if living.node.is_some_and(|node| node != entry.node.0) {
        tx.signal(Signal::Worker(living.id));
    }
    let jobs = held_jobs(tx, living.id)?;
    Ok(WorkerAdmitted { id: living.id, session, was: Some(living.state), jobs })
}

/// Everything that the worker has in hand.
fn held_jobs(tx: &Tx, id: WorkerId) -> Result<Vec<ResumedJob>> {
    let mut held = Vec::new();
    for block in blocks_of(tx.connection, id)? {
        for (job, retry_count) in &block.jobs {
            if let Some(job) = held_job(tx, &block, *job, *retry_count)? {
                held.push(job);
            }
        }
    }
    Ok(held)
}

/// `None`: it has ended under this run.
fn held_job(tx: &Tx, block: &Block, id: JobId, retry_count: u32) -> Result<Option<ResumedJob>> {
    type Columns = (LaneId, Option<String>, Option<String>, String);
    let columns: Option<Columns> = tx
        .connection
        .prepare_cached("SELECT lane, correlation, options, payload FROM job WHERE id = ?")?
        .query_row([id.0], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?, r.get(3)?)))
        .optional()?;
    let Some((lane, correlation_id, options, payload)) = columns else { return Ok(None) };
    if ended_as(tx.connection, lane, id, block.run)?.is_some() {
        return Ok(None);
    }
    let running: Option<(i64, i64)> = tx
        .connection
        .prepare_cached("SELECT started_at, ready_at FROM running WHERE id = ? AND run = ?")?
        .query_row((id.0, block.run), |r| Ok((r.get(0)?, r.get(1)?)))
        .optional()?;
    let ready_at = running.map_or(block.first_ready_at, |(_, ready_at)| ready_at);
    Ok(Some(ResumedJob {
        job: ClaimedJob {
            id,
            run: block.run,
            lane,
            ready_at: Timestamp::from_ms(ready_at).max(id.created_at()),
            retry_count,
            start_first: false,
            limited: None,
            correlation_id,
            options: parse_options(options.as_deref())?,
            payload,
        },
        kind: tx.shared.lanes.require(lane)?.kind,
        claimed_at: Timestamp::from_ms(block.claimed_at),
        started_at: running.map(|(at, _)| Timestamp::from_ms(at)),
    }))
}

struct Block {
    run: Run,
    claimed_at: i64,
    first_ready_at: i64,
    jobs: Vec<(JobId, u32)>,
}

/// What this worker was handed, oldest run first.
fn blocks_of(connection: &Connection, id: WorkerId) -> Result<Vec<Block>> {
    let mut statement = connection.prepare_cached(
        "SELECT run, claimed_at, first_ready_at, ids, retries FROM block WHERE node = ? ORDER BY run",
    )?;
    let rows = statement.query_map([id.0], |row| {
        let (ids, retries): (Vec<u8>, Option<Vec<u8>>) = (row.get(3)?, row.get(4)?);
        Ok(Block {
            run: row.get(0)?,
            claimed_at: row.get(1)?,
            first_ready_at: row.get(2)?,
            jobs: block_jobs(&ids, retries.as_deref()),
        })
    })?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}

pub fn news(tx: &Tx, news: &[WorkerUpdate]) -> Result<Vec<WorkerUpdateResult>> {
    news.iter().map(|news| news_of_one(tx, news)).collect()
}

fn news_of_one(tx: &Tx, news: &WorkerUpdate) -> Result<WorkerUpdateResult> {
    let row: Option<(i16, Option<String>, bool)> = tx
        .connection
        .prepare_cached("SELECT state, reason, drain FROM worker WHERE id = ? AND session = ? AND ended_at IS NULL")?
        .query_row((news.id.0, news.session), |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))
        .optional()?;
    let Some((code, reason, drain)) = row else { return Ok(WorkerUpdateResult { connected: false, drain: false }) };
    let changes = allowed(worker_state(code), &news.changes);
    let (code, reason) =
        changes.last().map_or((code, reason), |change| (worker_code(change.state), change.reason.clone()));
    // A worker whose server was taken for dead keeps its deadline: nobody would miss it otherwise.
    tx.connection
        .prepare_cached(
            "UPDATE worker SET state = ?2, reason = ?3, seen_at = max(seen_at, ?4),
                 deadline = CASE WHEN node IS NULL THEN coalesce(?5, deadline) ELSE ?5 END,
                 completed = completed + ?6, failed = failed + ?7, breaker = ?8
             WHERE id = ?1",
        )?
        .execute((
            news.id.0,
            code,
            reason,
            news.seen_at.as_ms(),
            news.deadline.map(Timestamp::as_ms),
            news.completed as i64,
            news.failed as i64,
            news.breaker,
        ))?;
    add_changes(tx, news.id, &changes)?;
    Ok(WorkerUpdateResult { connected: true, drain })
}

fn add_changes(tx: &Tx, id: WorkerId, changes: &[WorkerChange]) -> Result<()> {
    if changes.is_empty() {
        return Ok(());
    }
    let mut last: i64 = tx
        .connection
        .prepare_cached("SELECT coalesce(max(sequence), 0) FROM worker_change WHERE worker = ?")?
        .query_row([id.0], |row| row.get(0))?;
    let mut insert = tx
        .connection
        .prepare_cached("INSERT INTO worker_change (worker, sequence, at, state, reason) VALUES (?, ?, ?, ?, ?)")?;
    for change in changes {
        last += 1;
        insert.execute((id.0, last, change.at.as_ms(), worker_code(change.state), &change.reason))?;
    }
    tx.connection
        .prepare_cached("DELETE FROM worker_change WHERE worker = ? AND sequence <= ?")?
        .execute((id.0, last - HISTORY))?;
    Ok(())
}

pub fn drain(tx: &Tx, key: &str, drain: bool, entry: Option<AuditEntry>, now: Timestamp) -> Result<Option<WorkerId>> {
    let id = tx
        .connection
        .prepare_cached("UPDATE worker SET drain = ? WHERE key = ? AND ended_at IS NULL RETURNING id")?
        .query_row((drain, key), |row| Ok(WorkerId(row.get(0)?)))
        .optional()?;
    if let Some(id) = id {
        tx.signal(Signal::Worker(id));
        if let Some(entry) = entry {
            audit::add(tx, &entry, now)?;
        }
    }
    Ok(id)
}

pub fn end(tx: &Tx, id: WorkerId, session: i64, end: &WorkerEnd, now: Timestamp) -> Result<Option<Recovered>> {
    match living_of(tx, "id = ? AND session = ?", &[&id.0, &session])?.first() {
        Some(living) => end_life(tx, living, end, now).map(Some),
        None => Ok(None),
    }
}

/// Ends a life and frees what it held.
fn end_life(tx: &Tx, living: &Living, end: &WorkerEnd, now: Timestamp) -> Result<Recovered> {
    close_life(tx, living, &end.reason(), now)?;
    let runs: Vec<Run> = blocks_of(tx.connection, living.id)?.iter().map(|block| block.run).collect();
    let text = end.text(&living.key);
    free_blocks(tx, &runs, end.why(living.id, &text), now)
}

fn close_life(tx: &Tx, living: &Living, reason: &str, now: Timestamp) -> Result<()> {
    tx.connection
        .prepare_cached("UPDATE worker SET state = ?, reason = ?, ended_at = ?, deadline = NULL WHERE id = ?")?
        .execute((worker_code(WorkerState::Terminated), reason, now.as_ms(), living.id.0))?;
    add_changes(tx, living.id, &changes(living.state.path_when_lost(), Some(reason), now))
}

/// Its server is gone: a worker inside it went with it, any other keeps what it holds and has some time to connect elsewhere.
pub fn let_go(tx: &Tx, living: &Living, gone: ServerGone, grace_periods: GracePeriods, now: Timestamp) -> Result<()> {
    if living.kind == WorkerKind::BuiltIn {
        return close_life(tx, living, gone.reason(), now);
    }
    let deadline = deadline_without_server(&living.transport, living.deadline, grace_periods, now);
    tx.connection.prepare_cached("UPDATE worker SET node = NULL, reason = ?, deadline = ? WHERE id = ?")?.execute((
        gone.waiting_reason(),
        deadline,
        living.id.0,
    ))?;
    Ok(())
}

/// Whether a sweep has something to do, and when it has next.
pub fn due(connection: &Connection, forget_before: Timestamp, now: Timestamp) -> Result<(bool, Option<Timestamp>)> {
    let next_at = next_deadline(connection)?;
    let old = connection.prepare_cached(FORGOTTEN)?.exists((forget_before.as_ms(), 1))?;
    Ok((old || next_at.is_some_and(|at| at <= now), next_at))
}

fn next_deadline(connection: &Connection) -> Result<Option<Timestamp>> {
    let next: Option<i64> = connection
        .prepare_cached("SELECT min(deadline) FROM worker WHERE deadline IS NOT NULL AND ended_at IS NULL")?
        .query_row([], |row| row.get(0))?;
    Ok(next.map(Timestamp::from_ms))
}

pub fn sweep(tx: &Tx, orphan_delay_ms: i64, forget_before: Timestamp, now: Timestamp) -> Result<SweepResult> {
    let mut swept = SweepResult::default();
    for living in living_of(tx, "deadline <= ?", &[&now.as_ms()])? {
        let reason = living.reason.clone().unwrap_or_else(|| SILENT.to_owned());
        let end = WorkerEnd::Lost { reason, delay_ms: orphan_delay_ms };
        let freed = end_life(tx, &living, &end, now)?;
        // Whoever it is connected to learns that it is over.
        tx.signal(Signal::Worker(living.id));
        swept.lost.push(WorkerLost { id: living.id, key: living.key, freed });
    }
    forget_ended(tx, forget_before)?;
    swept.next_at = next_deadline(tx.connection)?;
    swept.more = swept.next_at.is_some_and(|at| at <= now);
    Ok(swept)
}

/// A block whose owner is forgotten would be found all the same; but then nobody could say whose it was.
const FORGOTTEN: &str = "SELECT id FROM worker WHERE ended_at IS NOT NULL AND ended_at < ?
     AND id NOT IN (SELECT node FROM block) LIMIT ?";

fn forget_ended(tx: &Tx, forget_before: Timestamp) -> Result<()> {
    let old: Vec<Uuid> = tx
        .connection
        .prepare_cached(FORGOTTEN)?
        .query_map((forget_before.as_ms(), FORGET), |row| row.get(0))?
        .collect::<rusqlite::Result<_>>()?;
    for id in old {
        tx.connection.prepare_cached("DELETE FROM worker_change WHERE worker = ?")?.execute([id])?;
        tx.connection.prepare_cached("DELETE FROM worker WHERE id = ?")?.execute([id])?;
    }
    Ok(())
}

pub fn session(connection: &Connection, id: WorkerId) -> Result<Option<i64>> {
    let sql = "SELECT session FROM worker WHERE id = ? AND ended_at IS NULL";
    Ok(connection.prepare_cached(sql)?.query_row([id.0], |row| row.get(0)).optional()?)
}

pub fn get(connection: &Connection, key: &str) -> Result<Option<WorkerView>> {
    let by_key = format!(
        "SELECT {COLUMNS} FROM worker WHERE key = ? ORDER BY ended_at IS NULL DESC, registered_at DESC, id DESC LIMIT 1"
    );
    let mut row = connection.prepare_cached(&by_key)?.query_row([key], worker_row).optional()?;
    if row.is_none()
        && let Ok(id) = key.parse::<Uuid>()
    {
        let by_id = format!("SELECT {COLUMNS} FROM worker WHERE id = ?");
        row = connection.prepare_cached(&by_id)?.query_row([id], worker_row).optional()?;
    }
    let Some(row) = row else { return Ok(None) };
    let id = WorkerId(row.id);
    let mut view = row.view()?;
    view.jobs = held_ids(connection, id)?;
    view.history = history(connection, id)?;
    Ok(Some(view))
}

fn held_ids(connection: &Connection, id: WorkerId) -> Result<Vec<String>> {
    let mut held = Vec::new();
    for block in blocks_of(connection, id)? {
        for (job, _) in block.jobs {
            let Some((lane, _)) = read::lane_and_options(connection, job)? else { continue };
            if ended_as(connection, lane, job, block.run)?.is_none() {
                held.push(job);
            }
        }
    }
    Ok(shown_jobs(held.into_iter()))
}

fn history(connection: &Connection, id: WorkerId) -> Result<Vec<WorkerChange>> {
    let mut statement =
        connection.prepare_cached("SELECT at, state, reason FROM worker_change WHERE worker = ? ORDER BY sequence")?;
    let mut rows = statement.query([id.0])?;
    let mut history = Vec::new();
    while let Some(row) = rows.next()? {
        let at = Timestamp::from_ms(row.get(0)?);
        history.push(WorkerChange { at, state: worker_state(row.get(1)?), reason: row.get(2)? });
    }
    Ok(history)
}

pub fn list(connection: &Connection, states: &[WorkerState], limit: usize) -> Result<Vec<WorkerView>> {
    let wanted = if states.is_empty() { &WorkerState::ALL[..] } else { states };
    let codes: Vec<String> = wanted.iter().map(|state| worker_code(*state).to_string()).collect();
    let sql = format!(
        "SELECT {COLUMNS} FROM worker WHERE state IN ({})
         ORDER BY ended_at IS NULL DESC, registered_at DESC, id DESC LIMIT ?",
        codes.join(", ")
    );
    let mut statement = connection.prepare_cached(&sql)?;
    let rows = statement.query_map([limit as i64], worker_row)?.collect::<rusqlite::Result<Vec<_>>>()?;
    rows.into_iter().map(WorkerRow::view).collect()
}

pub fn worker_capabilities(connection: &Connection) -> Result<Vec<WorkerCapabilities>> {
    let mut statement =
        connection.prepare_cached("SELECT capabilities, queues FROM worker WHERE ended_at IS NULL AND state < ?")?;
    let mut rows = statement.query([worker_code(WorkerState::Draining)])?;
    let mut all = Vec::new();
    while let Some(row) = rows.next()? {
        all.push(read_capabilities(&row.get::<_, String>(0)?, &row.get::<_, String>(1)?)?);
    }
    Ok(all)
}

fn worker_row(row: &Row) -> rusqlite::Result<WorkerRow> {
    Ok(WorkerRow {
        id: row.get(0)?,
        key: row.get(1)?,
        name: row.get(2)?,
        kind: row.get(3)?,
        transport: row.get(4)?,
        node: row.get(5)?,
        state: row.get(6)?,
        reason: row.get(7)?,
        capabilities: row.get(8)?,
        queues: row.get(9)?,
        concurrency: row.get(10)?,
        pool: row.get(11)?,
        registered_at: row.get(12)?,
        seen_at: row.get(13)?,
        ended_at: row.get(14)?,
        deadline: row.get(15)?,
        completed: row.get(16)?,
        failed: row.get(17)?,
        breaker: row.get(18)?,
    })
}
