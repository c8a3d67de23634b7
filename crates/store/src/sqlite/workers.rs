//! Registers workers, records their status, and ends their registrations.
//!
//! A claim belongs to its worker while the row in `worker` is alive, whatever happens to the server it is connected to.
//! Ending a registration releases its claims in the same transaction.

use std::collections::{BTreeMap, HashMap};

use async_trait::async_trait;
use faena_domain::{Run, Timestamp, WorkerCapabilities, WorkerChange, WorkerId, WorkerKind, WorkerState, WorkerView};
use rusqlite::{Connection, OptionalExtension, ToSql};
use serde_json::json;
use uuid::Uuid;

use super::{
    Sqlite, audit, events,
    release::release_claims,
    worker_reads::{
        claims_of, counts_by_state, get, in_flight_counts, in_flight_jobs, list, session, total, unattended_jobs,
        worker_capabilities,
    },
    writer::Tx,
};
use crate::{
    AuditEntry, GracePeriods, RecoveryCounts, Result, Signal, SweepResult, UnattendedJob, WorkerAdmitted, WorkerEnd,
    WorkerEntry, WorkerLost, WorkerStore, WorkerUpdate, WorkerUpdateResult,
    audit::{audit_entry, drain_action},
    workers::{
        FORGET, HISTORY, LiveWorker, NO_HEARTBEAT, NodeExit, ROUND, RegistrationOwner, allowed, changes,
        deadline_without_node, kind_code, names, path_when_connecting, worker_code, worker_kind, worker_state,
    },
};

#[async_trait]
impl WorkerStore for Sqlite {
    async fn worker_admit(&self, entry: WorkerEntry, now: Timestamp) -> Result<WorkerAdmitted> {
        self.writer.call(move |tx| admit(tx, &entry, now)).await
    }

    async fn worker_update(&self, updates: Vec<WorkerUpdate>, _now: Timestamp) -> Result<Vec<WorkerUpdateResult>> {
        self.writer.call(move |tx| update(tx, &updates)).await
    }

    async fn worker_drain(&self, key: &str, drain: bool, by: Option<&str>, now: Timestamp) -> Result<Option<WorkerId>> {
        let key = key.to_owned();
        let entry = audit_entry(by, drain_action(drain), &key, json!({}));
        self.writer.call(move |tx| self::drain(tx, &key, drain, entry, now)).await
    }

    async fn worker_end(
        &self,
        id: WorkerId,
        session: i64,
        end: WorkerEnd,
        now: Timestamp,
    ) -> Result<Option<RecoveryCounts>> {
        self.writer.call(move |tx| self::end(tx, id, session, &end, now)).await
    }

    async fn worker_sweep(
        &self,
        orphan_delay_ms: i64,
        forget_before: Timestamp,
        now: Timestamp,
    ) -> Result<SweepResult> {
        // SQLite: usually nothing is due, and reading is enough to know that and when to check again.
        let (due, next_at) = self.read(move |connection, _| due(connection, forget_before, now)).await?;
        if !due {
            return Ok(SweepResult { next_at, ..SweepResult::default() });
        }
        self.writer.call(move |tx| sweep(tx, orphan_delay_ms, forget_before, now)).await
    }

    async fn worker_unattended_jobs(&self) -> Result<Vec<UnattendedJob>> {
        self.read(unattended_jobs).await
    }

    async fn worker_get(&self, key: &str) -> Result<Option<WorkerView>> {
        let key = key.to_owned();
        self.read(move |connection, _| get(connection, &key)).await
    }

    async fn worker_session(&self, id: WorkerId) -> Result<Option<i64>> {
        self.read(move |connection, _| session(connection, id)).await
    }

    async fn worker_list(&self, states: Vec<WorkerState>, limit: usize) -> Result<Vec<WorkerView>> {
        self.read(move |connection, _| list(connection, &states, limit)).await
    }

    async fn worker_in_flight_counts(&self, workers: Vec<WorkerId>) -> Result<HashMap<WorkerId, u64>> {
        self.read(move |connection, _| in_flight_counts(connection, &workers)).await
    }

    async fn worker_total(&self, states: Vec<WorkerState>) -> Result<u64> {
        self.read(move |connection, _| total(connection, &states)).await
    }

    async fn worker_counts(&self) -> Result<BTreeMap<WorkerState, u64>> {
        self.read(|connection, _| counts_by_state(connection)).await
    }

    async fn worker_capabilities(&self) -> Result<Vec<WorkerCapabilities>> {
        self.read(|connection, _| worker_capabilities(connection)).await
    }
}

/// Returns the live workers that match, at most [`ROUND`] of them.
pub fn live_workers(tx: &Tx, condition: &str, parameters: &[&dyn ToSql]) -> Result<Vec<LiveWorker>> {
    let sql = format!(
        "SELECT id, key, kind, transport, node, session, state, reason, deadline, api_key, token FROM worker
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
            owner: RegistrationOwner { deadline: row.get(8)?, api_key: row.get(9)?, token: row.get(10)? },
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
    let path = path_when_connecting(None, entry.state);
    let state = path.last().copied().unwrap_or(WorkerState::Creating);
    tx.connection
        .prepare_cached(
            "INSERT INTO worker (id, key, name, kind, transport, node, session, state, capabilities, queues, concurrency, pool,
                                 registered_at, connected_at, seen_at, deadline, api_key, token, version)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, 1, ?7, ?8, ?9, ?10, ?11, ?12, ?12, ?12, ?13, ?14, ?15, ?16)",
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
            entry.api_key.map(|key| key.0),
            entry.token.0,
            &entry.version,
        ))?;
    add_changes(tx, entry.id, &changes(path, None, now))?;
    Ok(WorkerAdmitted { id: entry.id, session: 1, was: None, jobs: Vec::new(), token: entry.token })
}

/// Continues a live registration on a new connection, here or on another node, with its jobs.
fn resume(tx: &Tx, live: LiveWorker, entry: &WorkerEntry, now: Timestamp) -> Result<WorkerAdmitted> {
    let token = live.owner.admit(entry)?;
    let path = path_when_connecting(Some(live.state), entry.state);
    let state = path.last().copied().unwrap_or(live.state);
    let kind = if live.kind == WorkerKind::Pool { live.kind } else { entry.kind };
    let session = live.session + 1;
    tx.connection
        .prepare_cached(
            "UPDATE worker SET name = coalesce(?2, name), kind = ?3, transport = ?4, node = ?5, session = ?6, state = ?7,
                 reason = NULL, capabilities = ?8, queues = ?9, concurrency = ?10, pool = coalesce(?11, pool),
                 connected_at = ?12, seen_at = max(seen_at, ?12), deadline = ?13, api_key = ?14, token = ?15,
                 version = ?16
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
            entry.api_key.map(|key| key.0),
            token.0,
            &entry.version,
        ))?;
    add_changes(tx, live.id, &changes(path, None, now))?;
    if live.node.is_some_and(|node| node != entry.node.0) {
        tx.signal(Signal::Worker(live.id));
    }
    let jobs = in_flight_jobs(tx.connection, tx.shared, live.id)?;
    Ok(WorkerAdmitted { id: live.id, session, was: Some(live.state), jobs, token })
}

pub fn update(tx: &Tx, updates: &[WorkerUpdate]) -> Result<Vec<WorkerUpdateResult>> {
    updates.iter().map(|update| update_one(tx, update)).collect()
}

fn update_one(tx: &Tx, update: &WorkerUpdate) -> Result<WorkerUpdateResult> {
    let row: Option<(i16, Option<String>, bool)> = tx
        .connection
        .prepare_cached("SELECT state, reason, drain FROM worker WHERE id = ? AND session = ? AND ended_at IS NULL")?
        .query_row((update.id.0, update.session), |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))
        .optional()?;
    let Some((code, reason, drain)) = row else { return Ok(WorkerUpdateResult { connected: false, drain: false }) };
    let changes = allowed(worker_state(code), &update.changes);
    let (code, reason) =
        changes.last().map_or((code, reason), |change| (worker_code(change.state), change.reason.clone()));
    // A worker whose server was declared dead keeps its deadline: otherwise it would never be declared lost.
    tx.connection
        .prepare_cached(
            "UPDATE worker SET state = ?2, reason = ?3, seen_at = max(seen_at, ?4),
                 deadline = CASE WHEN node IS NULL THEN coalesce(?5, deadline) ELSE ?5 END,
                 completed = completed + ?6, failed = failed + ?7, breaker = ?8
             WHERE id = ?1",
        )?
        .execute((
            update.id.0,
            code,
            reason,
            update.seen_at.as_ms(),
            update.deadline.map(Timestamp::as_ms),
            update.completed as i64,
            update.failed as i64,
            update.breaker,
        ))?;
    add_changes(tx, update.id, &changes)?;
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

pub fn end(tx: &Tx, id: WorkerId, session: i64, end: &WorkerEnd, now: Timestamp) -> Result<Option<RecoveryCounts>> {
    match live_workers(tx, "id = ? AND session = ?", &[&id.0, &session])?.first() {
        Some(live) => end_registration(tx, live, end, now).map(Some),
        None => Ok(None),
    }
}

/// Ends a registration and releases its claims.
fn end_registration(tx: &Tx, live: &LiveWorker, end: &WorkerEnd, now: Timestamp) -> Result<RecoveryCounts> {
    close_registration(tx, live, &end.reason(), end.actor(), now)?;
    let runs: Vec<Run> = claims_of(tx.connection, live.id.0)?.iter().map(|claim| claim.run).collect();
    let text = end.text(&live.key);
    release_claims(tx, &runs, end.release_reason(live.id, live.state, &text), now)
}

fn close_registration(tx: &Tx, live: &LiveWorker, reason: &str, actor: &str, now: Timestamp) -> Result<()> {
    tx.connection
        .prepare_cached("UPDATE worker SET state = ?, reason = ?, ended_at = ?, deadline = NULL WHERE id = ?")?
        .execute((worker_code(WorkerState::Terminated), reason, now.as_ms(), live.id.0))?;
    let changes = changes(live.state.path_when_lost(), Some(reason), now);
    events::with_actor(tx, actor, |tx| add_changes(tx, live.id, &changes))
}

/// Detaches a worker from a server that has ended: a built-in worker ends with it, any other keeps its jobs and may
/// reconnect.
pub fn detach(tx: &Tx, live: &LiveWorker, exit: NodeExit, grace_periods: GracePeriods, now: Timestamp) -> Result<()> {
    if live.kind == WorkerKind::BuiltIn {
        return close_registration(tx, live, exit.reason(), exit.actor(), now);
    }
    let deadline = deadline_without_node(&live.transport, live.owner.deadline, grace_periods, now);
    tx.connection.prepare_cached("UPDATE worker SET node = NULL, reason = ?, deadline = ? WHERE id = ?")?.execute((
        exit.waiting_reason(),
        deadline,
        live.id.0,
    ))?;
    Ok(())
}

/// Returns whether a sweep has something to do, and the next deadline of a worker.
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
        let released = end_registration(tx, &live, &end, now)?;
        // Notifies the node that the worker is connected to.
        tx.signal(Signal::Worker(live.id));
        swept.lost.push(WorkerLost { id: live.id, key: live.key, released });
    }
    forget_ended(tx, forget_before)?;
    swept.next_at = next_deadline(tx.connection)?;
    swept.more = swept.next_at.is_some_and(|at| at <= now);
    Ok(swept)
}

/// Selects ended registrations to delete. Keeps those with claims, because they show which worker had the jobs.
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
