//! Workers come, tell how they are, and go.
//!
//! A worker's row is its life. What it holds is its own while the row lives, whatever becomes of the server it is connected to;
//! who ends the life frees what it held in the same transaction.

use faena_domain::{
    JobId, Run, Timestamp, WorkerCapabilities, WorkerChange, WorkerId, WorkerKind, WorkerState, WorkerView,
};
use rusqlite::{Connection, OptionalExtension, Row, ToSql};
use uuid::Uuid;

use super::{audit, claim::claim_jobs, end::ended_as, read, release::release_claims, writer::Tx};
use crate::{
    AuditEntry, ClaimedJob, GracePeriods, LaneId, Recovered, Result, ResumedJob, Signal, SweepResult, WorkerAdmitted,
    WorkerEnd, WorkerEntry, WorkerLost, WorkerUpdate, WorkerUpdateResult,
    assemble::parse_options,
    workers::{
        COLUMNS, FORGET, HISTORY, NO_HEARTBEAT, ROUND, ServerExit, WorkerRow, allowed, changes,
        deadline_without_server, kind_code, names, path_in, read_capabilities, shown_jobs, worker_code, worker_kind,
        worker_state,
    },
};

/// A living worker, as far as its life is looked after.
pub struct LiveWorker {
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
pub fn live_workers(tx: &Tx, condition: &str, parameters: &[&dyn ToSql]) -> Result<Vec<LiveWorker>> {
    let sql = format!(
        "SELECT id, key, kind, transport, node, session, state, reason, deadline FROM worker
         WHERE ended_at IS NULL AND {condition} ORDER BY deadline, id LIMIT {ROUND}"
    );
    let mut statement = tx.connection.prepare_cached(&sql)?;
    let mut rows = statement.query(parameters)?;
    let mut live = Vec::new();
    while let Some(row) = rows.next()? {
        live.push(LiveWorker {
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
    Ok(live)
}

pub fn admit(tx: &Tx, entry: &WorkerEntry, now: Timestamp) -> Result<WorkerAdmitted> {
    match live_workers(tx, "key = ?", &[&entry.key])?.into_iter().next() {
        Some(live) => resume(tx, live, entry, now),
        None => begin_registration(tx, entry, now),
    }
}

fn begin_registration(tx: &Tx, entry: &WorkerEntry, now: Timestamp) -> Result<WorkerAdmitted> {
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
fn resume(tx: &Tx, live: LiveWorker, entry: &WorkerEntry, now: Timestamp) -> Result<WorkerAdmitted> {
    let path = path_in(Some(live.state), entry.state);
    let state = path.last().copied().unwrap_or(live.state);
    let kind = if live.kind == WorkerKind::Pool { live.kind } else { entry.kind };
    let session = live.session + 1;
    tx.connection
        .prepare_cached(
            "UPDATE worker SET name = coalesce(?2, name), kind = ?3, transport = ?4, node = ?5, session = ?6, state = ?7,
                 reason = NULL, capabilities = ?8, queues = ?9, concurrency = ?10, pool = coalesce(?11, pool),
                 connected_at = ?12, seen_at = max(seen_at, ?12), deadline = ?13
             WHERE id = ?1",
        )?
        .execute((
            live.id.0,
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
    add_changes(tx, live.id, &changes(path, None, now))?;
    if live.node.is_some_and(|node| node != entry.node.0) {
        tx.signal(Signal::Worker(live.id));
    }
    let jobs = resumed_jobs(tx, live.id)?;
    Ok(WorkerAdmitted { id: live.id, session, was: Some(live.state), jobs })
}

/// Everything that the worker has in hand.
fn resumed_jobs(tx: &Tx, id: WorkerId) -> Result<Vec<ResumedJob>> {
    let mut held = Vec::new();
    for claim in claims_of(tx.connection, id)? {
        for (job, retry_count) in &claim.jobs {
            if let Some(job) = resumed_job(tx, &claim, *job, *retry_count)? {
                held.push(job);
            }
        }
    }
    Ok(held)
}

/// `None`: it has ended under this run.
fn resumed_job(tx: &Tx, claim: &Claim, id: JobId, retry_count: u32) -> Result<Option<ResumedJob>> {
    type Columns = (LaneId, Option<String>, Option<String>, String);
    let columns: Option<Columns> = tx
        .connection
        .prepare_cached("SELECT lane, correlation, options, payload FROM job WHERE id = ?")?
        .query_row([id.0], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?, r.get(3)?)))
        .optional()?;
    let Some((lane, correlation_id, options, payload)) = columns else { return Ok(None) };
    if ended_as(tx.connection, lane, id, claim.run)?.is_some() {
        return Ok(None);
    }
    let running: Option<(i64, i64)> = tx
        .connection
        .prepare_cached("SELECT started_at, ready_at FROM running WHERE id = ? AND run = ?")?
        .query_row((id.0, claim.run), |r| Ok((r.get(0)?, r.get(1)?)))
        .optional()?;
    let ready_at = running.map_or(claim.first_ready_at, |(_, ready_at)| ready_at);
    Ok(Some(ResumedJob {
        job: ClaimedJob {
            id,
            run: claim.run,
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
        claimed_at: Timestamp::from_ms(claim.claimed_at),
        started_at: running.map(|(at, _)| Timestamp::from_ms(at)),
    }))
}

struct Claim {
    run: Run,
    claimed_at: i64,
    first_ready_at: i64,
    jobs: Vec<(JobId, u32)>,
}

/// What this worker was handed, oldest run first.
fn claims_of(connection: &Connection, id: WorkerId) -> Result<Vec<Claim>> {
    let mut statement = connection.prepare_cached(
        "SELECT run, claimed_at, first_ready_at, ids, retries FROM claim WHERE owner = ? ORDER BY run",
    )?;
    let rows = statement.query_map([id.0], |row| {
        let (ids, retries): (Vec<u8>, Option<Vec<u8>>) = (row.get(3)?, row.get(4)?);
        Ok(Claim {
            run: row.get(0)?,
            claimed_at: row.get(1)?,
            first_ready_at: row.get(2)?,
            jobs: claim_jobs(&ids, retries.as_deref()),
        })
    })?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}

pub fn updates(tx: &Tx, updates: &[WorkerUpdate]) -> Result<Vec<WorkerUpdateResult>> {
    updates.iter().map(|updates| update_one(tx, updates)).collect()
}

fn update_one(tx: &Tx, updates: &WorkerUpdate) -> Result<WorkerUpdateResult> {
    let row: Option<(i16, Option<String>, bool)> = tx
        .connection
        .prepare_cached("SELECT state, reason, drain FROM worker WHERE id = ? AND session = ? AND ended_at IS NULL")?
        .query_row((updates.id.0, updates.session), |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))
        .optional()?;
    let Some((code, reason, drain)) = row else { return Ok(WorkerUpdateResult { connected: false, drain: false }) };
    let changes = allowed(worker_state(code), &updates.changes);
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
            updates.id.0,
            code,
            reason,
            updates.seen_at.as_ms(),
            updates.deadline.map(Timestamp::as_ms),
            updates.completed as i64,
            updates.failed as i64,
            updates.breaker,
        ))?;
    add_changes(tx, updates.id, &changes)?;
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
    match live_workers(tx, "id = ? AND session = ?", &[&id.0, &session])?.first() {
        Some(live) => end_registration(tx, live, end, now).map(Some),
        None => Ok(None),
    }
}

/// Ends a life and frees what it held.
fn end_registration(tx: &Tx, live: &LiveWorker, end: &WorkerEnd, now: Timestamp) -> Result<Recovered> {
    close_registration(tx, live, &end.reason(), now)?;
    let runs: Vec<Run> = claims_of(tx.connection, live.id)?.iter().map(|claim| claim.run).collect();
    let text = end.text(&live.key);
    release_claims(tx, &runs, end.release_reason(live.id, &text), now)
}

fn close_registration(tx: &Tx, live: &LiveWorker, reason: &str, now: Timestamp) -> Result<()> {
    tx.connection
        .prepare_cached("UPDATE worker SET state = ?, reason = ?, ended_at = ?, deadline = NULL WHERE id = ?")?
        .execute((worker_code(WorkerState::Terminated), reason, now.as_ms(), live.id.0))?;
    add_changes(tx, live.id, &changes(live.state.path_when_lost(), Some(reason), now))
}

/// Its server is gone: a worker inside it went with it, any other keeps what it holds and has some time to connect elsewhere.
pub fn detach(tx: &Tx, live: &LiveWorker, gone: ServerExit, grace_periods: GracePeriods, now: Timestamp) -> Result<()> {
    if live.kind == WorkerKind::BuiltIn {
        return close_registration(tx, live, gone.reason(), now);
    }
    let deadline = deadline_without_server(&live.transport, live.deadline, grace_periods, now);
    tx.connection.prepare_cached("UPDATE worker SET node = NULL, reason = ?, deadline = ? WHERE id = ?")?.execute((
        gone.waiting_reason(),
        deadline,
        live.id.0,
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
    for live in live_workers(tx, "deadline <= ?", &[&now.as_ms()])? {
        let reason = live.reason.clone().unwrap_or_else(|| NO_HEARTBEAT.to_owned());
        let end = WorkerEnd::Lost { reason, delay_ms: orphan_delay_ms };
        let freed = end_registration(tx, &live, &end, now)?;
        // Whoever it is connected to learns that it is over.
        tx.signal(Signal::Worker(live.id));
        swept.lost.push(WorkerLost { id: live.id, key: live.key, freed });
    }
    forget_ended(tx, forget_before)?;
    swept.next_at = next_deadline(tx.connection)?;
    swept.more = swept.next_at.is_some_and(|at| at <= now);
    Ok(swept)
}

/// A block whose owner is forgotten would be found all the same; but then nobody could say whose it was.
const FORGOTTEN: &str = "SELECT id FROM worker WHERE ended_at IS NOT NULL AND ended_at < ?
     AND id NOT IN (SELECT owner FROM claim) LIMIT ?";

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
    view.jobs = in_flight_ids(connection, id)?;
    view.history = history(connection, id)?;
    Ok(Some(view))
}

fn in_flight_ids(connection: &Connection, id: WorkerId) -> Result<Vec<String>> {
    let mut held = Vec::new();
    for claim in claims_of(connection, id)? {
        for (job, _) in claim.jobs {
            let Some((lane, _)) = read::lane_and_options(connection, job)? else { continue };
            if ended_as(connection, lane, job, claim.run)?.is_none() {
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
