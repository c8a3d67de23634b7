//! Registers workers, records their status, and ends their registrations.
//!
//! A claim belongs to its worker while the row in `worker` is alive, whatever happens to the server it is connected to.
//! Ending a registration releases its claims in the same transaction.
//!
//! Resuming, detaching or ending a registration first locks its row `FOR UPDATE`, and so waits for a claim that is
//! under way. Other changes and claims do not wait for each other.

use std::collections::{BTreeMap, HashMap};

use async_trait::async_trait;
use deadpool_postgres::Object;
use faena_domain::{
    NodeId, Run, Timestamp, WorkerCapabilities, WorkerChange, WorkerId, WorkerKind, WorkerState, WorkerView,
};
use serde_json::json;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use super::{
    Postgres, Shared, audit,
    end::storable,
    events,
    release::{ReleaseEffects, release_in},
    worker_reads::{
        counts_by_state, get, in_flight_counts, in_flight_jobs, list, session, total, unattended_jobs,
        worker_capabilities,
    },
};
use crate::{
    GracePeriods, RecoveryCounts, Result, Signal, StoreError, SweepResult, UnattendedJob, WorkerAdmitted, WorkerEnd,
    WorkerEntry, WorkerLost, WorkerStore, WorkerUpdate, WorkerUpdateResult,
    audit::{audit_entry, drain_action},
    workers::{
        FORGET, HISTORY, LiveWorker, NO_HEARTBEAT, NodeExit, ROUND, RegistrationOwner, allowed, changes,
        deadline_without_node, kind_code, names, path_when_connecting, worker_code, worker_kind, worker_state,
    },
};

#[async_trait]
impl WorkerStore for Postgres {
    async fn worker_admit(&self, entry: WorkerEntry, now: Timestamp) -> Result<WorkerAdmitted> {
        self.shared.retrying(|| admit(&self.shared, &entry, now)).await
    }

    async fn worker_update(&self, updates: Vec<WorkerUpdate>, _now: Timestamp) -> Result<Vec<WorkerUpdateResult>> {
        self.shared.retrying(|| update(&self.shared, &updates)).await
    }

    async fn worker_drain(&self, key: &str, drain: bool, by: Option<&str>, now: Timestamp) -> Result<Option<WorkerId>> {
        self.shared.retrying(|| self::drain(&self.shared, key, drain, by, now)).await
    }

    async fn worker_end(
        &self,
        id: WorkerId,
        session: i64,
        end: WorkerEnd,
        now: Timestamp,
    ) -> Result<Option<RecoveryCounts>> {
        self.shared.retrying(|| self::end(&self.shared, id, session, &end, now)).await
    }

    async fn worker_sweep(
        &self,
        orphan_delay_ms: i64,
        forget_before: Timestamp,
        now: Timestamp,
    ) -> Result<SweepResult> {
        sweep(&self.shared, orphan_delay_ms, forget_before, now).await
    }

    async fn worker_unattended_jobs(&self) -> Result<Vec<UnattendedJob>> {
        self.shared.retrying(|| unattended_jobs(&self.shared)).await
    }

    async fn worker_get(&self, key: &str) -> Result<Option<WorkerView>> {
        self.shared.retrying(|| get(&self.shared, key)).await
    }

    async fn worker_session(&self, id: WorkerId) -> Result<Option<i64>> {
        self.shared.retrying(|| session(&self.shared, id)).await
    }

    async fn worker_list(&self, states: Vec<WorkerState>, limit: usize) -> Result<Vec<WorkerView>> {
        self.shared.retrying(|| list(&self.shared, &states, limit)).await
    }

    async fn worker_in_flight_counts(&self, workers: Vec<WorkerId>) -> Result<HashMap<WorkerId, u64>> {
        in_flight_counts(&self.shared, &workers).await
    }

    async fn worker_total(&self, states: Vec<WorkerState>) -> Result<u64> {
        self.shared.retrying(|| total(&self.shared, &states)).await
    }

    async fn worker_counts(&self) -> Result<BTreeMap<WorkerState, u64>> {
        self.shared.retrying(|| counts_by_state(&self.shared)).await
    }

    async fn worker_capabilities(&self) -> Result<Vec<WorkerCapabilities>> {
        self.shared.retrying(|| worker_capabilities(&self.shared)).await
    }
}

/// Locks and returns the live workers that match, at most [`ROUND`] of them.
async fn live_workers(
    client: &Object,
    condition: &str,
    lock: &str,
    parameters: &[&(dyn ToSql + Sync)],
) -> Result<Vec<LiveWorker>> {
    let sql = format!(
        "SELECT id, key, kind, transport, node, session, state, reason, deadline, api_key, token FROM faena.worker w
         WHERE ended_at IS NULL AND {condition} ORDER BY id LIMIT {ROUND} {lock}"
    );
    let statement = client.prepare_cached(&sql).await?;
    let rows = client.query(&statement, parameters).await?;
    rows.iter()
        .map(|row| {
            Ok(LiveWorker {
                id: WorkerId(row.get(0)),
                key: row.get(1),
                kind: worker_kind(row.get(2))?,
                transport: row.get(3),
                node: row.get(4),
                session: row.get(5),
                state: worker_state(row.get(6)),
                reason: row.get(7),
                owner: RegistrationOwner { deadline: row.get(8), api_key: row.get(9), token: row.get(10) },
            })
        })
        .collect()
}

pub async fn admit(shared: &Shared, entry: &WorkerEntry, now: Timestamp) -> Result<WorkerAdmitted> {
    let client = shared.begin().await?;
    let result = admit_in(shared, &client, entry, now).await;
    let (admitted, moved) = client.end(result).await?;
    if moved {
        shared.signal([Signal::Worker(admitted.id)]);
    }
    Ok(admitted)
}

/// Registers a worker, or resumes its live registration. Also returns whether the worker has moved from another node.
async fn admit_in(
    shared: &Shared,
    client: &Object,
    entry: &WorkerEntry,
    now: Timestamp,
) -> Result<(WorkerAdmitted, bool)> {
    let key = storable(&entry.key);
    match live_workers(client, "key = $1", "FOR UPDATE", &[&key]).await?.into_iter().next() {
        Some(live) => {
            let moved = live.node.is_some_and(|node| node != entry.node.0);
            Ok((resume(shared, client, live, entry, now).await?, moved))
        }
        None => Ok((begin_registration(client, entry, now).await?, false)),
    }
}

async fn begin_registration(client: &Object, entry: &WorkerEntry, now: Timestamp) -> Result<WorkerAdmitted> {
    let path = path_when_connecting(None, entry.state);
    let state = path.last().copied().unwrap_or(WorkerState::Creating);
    let begun = client
        .execute(
            "INSERT INTO faena.worker (id, key, name, kind, transport, node, session, state, capabilities, queues, concurrency,
                                       pool, registered_at, connected_at, seen_at, deadline, api_key, token, version)
             VALUES ($1, $2, $3, $4, $5, $6, 1, $7, $8, $9, $10, $11, $12, $12, $12, $13, $14, $15, $16)
             ON CONFLICT (key) WHERE ended_at IS NULL DO NOTHING",
            &[
                &entry.id.0,
                &storable(&entry.key),
                &entry.name.as_deref().map(storable),
                &kind_code(entry.kind),
                &storable(&entry.transport),
                &entry.node.0,
                &worker_code(state),
                &names(&entry.capabilities.types),
                &names(&entry.capabilities.queues),
                &concurrency(entry),
                &entry.pool.as_deref().map(storable),
                &now.as_ms(),
                &entry.deadline.map(Timestamp::as_ms),
                &entry.api_key.map(|key| key.0),
                &entry.token.0.as_slice(),
                &entry.version.as_deref().map(storable),
            ],
        )
        .await?;
    if begun == 0 {
        return Err(StoreError::Contended("a worker of this name has just connected".into()));
    }
    add_changes(client, &[(entry.id, changes(path, None, now))]).await?;
    Ok(WorkerAdmitted { id: entry.id, session: 1, was: None, jobs: Vec::new(), token: entry.token })
}

/// Continues a live registration on a new connection, here or on another node, with its jobs.
async fn resume(
    shared: &Shared,
    client: &Object,
    live: LiveWorker,
    entry: &WorkerEntry,
    now: Timestamp,
) -> Result<WorkerAdmitted> {
    let token = live.owner.admit(entry)?;
    let path = path_when_connecting(Some(live.state), entry.state);
    let state = path.last().copied().unwrap_or(live.state);
    let kind = if live.kind == WorkerKind::Pool { live.kind } else { entry.kind };
    let session = live.session + 1;
    client
        .execute(
            "UPDATE faena.worker SET name = coalesce($2, name), kind = $3, transport = $4, node = $5, session = $6, state = $7,
                 reason = NULL, capabilities = $8, queues = $9, concurrency = $10, pool = coalesce($11, pool),
                 connected_at = $12, seen_at = greatest(seen_at, $12), deadline = $13, api_key = $14, token = $15,
                 version = $16
             WHERE id = $1",
            &[
                &live.id.0,
                &entry.name.as_deref().map(storable),
                &kind_code(kind),
                &storable(&entry.transport),
                &entry.node.0,
                &session,
                &worker_code(state),
                &names(&entry.capabilities.types),
                &names(&entry.capabilities.queues),
                &concurrency(entry),
                &entry.pool.as_deref().map(storable),
                &now.as_ms(),
                &entry.deadline.map(Timestamp::as_ms),
                &entry.api_key.map(|key| key.0),
                &token.0.as_slice(),
                &entry.version.as_deref().map(storable),
            ],
        )
        .await?;
    add_changes(client, &[(live.id, changes(path, None, now))]).await?;
    let jobs = in_flight_jobs(shared, client, live.id).await?;
    Ok(WorkerAdmitted { id: live.id, session, was: Some(live.state), jobs, token })
}

fn concurrency(entry: &WorkerEntry) -> i32 {
    i32::try_from(entry.concurrency).unwrap_or(i32::MAX)
}

pub async fn update(shared: &Shared, updates: &[WorkerUpdate]) -> Result<Vec<WorkerUpdateResult>> {
    let client = shared.begin().await?;
    let result = update_in(&client, updates).await;
    client.end(result).await
}

/// The updates of one worker, merged.
struct MergedUpdate {
    session: i64,
    drain: bool,
    state: WorkerState,
    reason: Option<String>,
    changes: Vec<WorkerChange>,
    /// Index of the last update.
    last: Option<usize>,
    completed: i64,
    failed: i64,
}

async fn update_in(client: &Object, updates: &[WorkerUpdate]) -> Result<Vec<WorkerUpdateResult>> {
    let ids: Vec<Uuid> = updates.iter().map(|update| update.id.0).collect();
    // PostgreSQL: locks the rows in order, so that two nodes never deadlock, and with `NO KEY`, so that claims do not
    // wait.
    let rows = client
        .query(
            "SELECT id, session, drain, state, reason FROM faena.worker WHERE id = ANY($1) AND ended_at IS NULL
             ORDER BY id FOR NO KEY UPDATE",
            &[&ids],
        )
        .await?;
    let mut merged: BTreeMap<Uuid, MergedUpdate> = BTreeMap::new();
    for row in rows {
        let one = MergedUpdate {
            session: row.get(1),
            drain: row.get(2),
            state: worker_state(row.get(3)),
            reason: row.get(4),
            changes: Vec::new(),
            last: None,
            completed: 0,
            failed: 0,
        };
        merged.insert(row.get(0), one);
    }
    let mut results = Vec::with_capacity(updates.len());
    for (index, update) in updates.iter().enumerate() {
        let known = merged.get_mut(&update.id.0).filter(|known| known.session == update.session);
        results.push(WorkerUpdateResult {
            connected: known.is_some(),
            drain: known.as_ref().is_some_and(|known| known.drain),
        });
        if let Some(known) = known {
            known.merge(index, update);
        }
    }
    merged.retain(|_, known| known.last.is_some());
    put_updates(client, updates, &merged).await?;
    let changed: Vec<(WorkerId, Vec<WorkerChange>)> =
        merged.into_iter().map(|(id, known)| (WorkerId(id), known.changes)).collect();
    add_changes(client, &changed).await?;
    Ok(results)
}

impl MergedUpdate {
    fn merge(&mut self, index: usize, update: &WorkerUpdate) {
        let changes = allowed(self.state, &update.changes);
        if let Some(change) = changes.last() {
            self.state = change.state;
            self.reason = change.reason.clone();
        }
        self.changes.extend(changes);
        self.last = Some(index);
        self.completed += update.completed as i64;
        self.failed += update.failed as i64;
    }
}

async fn put_updates(client: &Object, updates: &[WorkerUpdate], merged: &BTreeMap<Uuid, MergedUpdate>) -> Result<()> {
    let ids: Vec<Uuid> = merged.keys().copied().collect();
    let last: Vec<&WorkerUpdate> = merged.values().filter_map(|known| updates.get(known.last?)).collect();
    let states: Vec<i16> = merged.values().map(|known| worker_code(known.state)).collect();
    let reasons: Vec<Option<String>> =
        merged.values().map(|known| known.reason.as_deref().map(|text| storable(text).into_owned())).collect();
    let seen: Vec<i64> = last.iter().map(|update| update.seen_at.as_ms()).collect();
    let deadlines: Vec<Option<i64>> = last.iter().map(|update| update.deadline.map(Timestamp::as_ms)).collect();
    let completed: Vec<i64> = merged.values().map(|known| known.completed).collect();
    let failed: Vec<i64> = merged.values().map(|known| known.failed).collect();
    let breakers: Vec<&str> = last.iter().map(|update| update.breaker).collect();
    // A worker whose server was declared dead keeps its deadline: otherwise it would never be declared lost.
    let statement = client
        .prepare_cached(
            "UPDATE faena.worker w SET state = n.state, reason = n.reason, seen_at = greatest(w.seen_at, n.seen_at),
                 deadline = CASE WHEN w.node IS NULL THEN coalesce(n.deadline, w.deadline) ELSE n.deadline END,
                 completed = w.completed + n.completed, failed = w.failed + n.failed, breaker = n.breaker
             FROM unnest($1::uuid[], $2::int2[], $3::text[], $4::int8[], $5::int8[], $6::int8[], $7::int8[], $8::text[])
                  AS n(id, state, reason, seen_at, deadline, completed, failed, breaker)
             WHERE w.id = n.id",
        )
        .await?;
    client.execute(&statement, &[&ids, &states, &reasons, &seen, &deadlines, &completed, &failed, &breakers]).await?;
    Ok(())
}

async fn add_changes(client: &Object, changed: &[(WorkerId, Vec<WorkerChange>)]) -> Result<()> {
    let mut ids: Vec<Uuid> = Vec::new();
    let mut times: Vec<i64> = Vec::new();
    let mut states: Vec<i16> = Vec::new();
    let mut reasons: Vec<Option<String>> = Vec::new();
    for (id, changes) in changed {
        for change in changes {
            ids.push(id.0);
            times.push(change.at.as_ms());
            states.push(worker_code(change.state));
            reasons.push(change.reason.as_deref().map(|text| storable(text).into_owned()));
        }
    }
    if ids.is_empty() {
        return Ok(());
    }
    client
        .execute(
            "INSERT INTO faena.worker_change (worker, sequence, at, state, reason)
             SELECT u.worker, coalesce((SELECT max(c.sequence) FROM faena.worker_change c WHERE c.worker = u.worker), 0)
                        + row_number() OVER (PARTITION BY u.worker ORDER BY u.n), u.at, u.state, u.reason
             FROM unnest($1::uuid[], $2::int8[], $3::int2[], $4::text[]) WITH ORDINALITY AS u(worker, at, state, reason, n)",
            &[&ids, &times, &states, &reasons],
        )
        .await?;
    client
        .execute(
            "DELETE FROM faena.worker_change c WHERE c.worker = ANY($1) AND c.sequence <= (
                 SELECT max(m.sequence) FROM faena.worker_change m WHERE m.worker = c.worker) - $2",
            &[&ids, &HISTORY],
        )
        .await?;
    Ok(())
}

pub async fn drain(
    shared: &Shared,
    key: &str,
    drain: bool,
    by: Option<&str>,
    now: Timestamp,
) -> Result<Option<WorkerId>> {
    let client = shared.begin().await?;
    let result = drain_in(&client, key, drain, by, now).await;
    let id = client.end(result).await?;
    shared.signal(id.map(Signal::Worker));
    Ok(id)
}

async fn drain_in(
    client: &Object,
    key: &str,
    drain: bool,
    by: Option<&str>,
    now: Timestamp,
) -> Result<Option<WorkerId>> {
    let row = client
        .query_opt(
            "UPDATE faena.worker SET drain = $1 WHERE key = $2 AND ended_at IS NULL RETURNING id",
            &[&drain, &storable(key)],
        )
        .await?;
    let Some(row) = row else { return Ok(None) };
    if let Some(entry) = audit_entry(by, drain_action(drain), key, json!({})) {
        audit::add(client, &entry, now).await?;
    }
    Ok(Some(WorkerId(row.get(0))))
}

pub async fn end(
    shared: &Shared,
    id: WorkerId,
    session: i64,
    end: &WorkerEnd,
    now: Timestamp,
) -> Result<Option<RecoveryCounts>> {
    let client = shared.begin().await?;
    let result = async {
        match live_workers(&client, "id = $1 AND session = $2", "FOR UPDATE", &[&id.0, &session]).await?.first() {
            Some(live) => end_registration(shared, &client, live, end, now).await.map(Some),
            None => Ok(None),
        }
    }
    .await;
    match client.end(result).await? {
        Some(released) => Ok(Some(released.after_commit(shared, now).await)),
        None => Ok(None),
    }
}

/// Ends a registration and releases its claims.
async fn end_registration(
    shared: &Shared,
    client: &Object,
    live: &LiveWorker,
    end: &WorkerEnd,
    now: Timestamp,
) -> Result<ReleaseEffects> {
    close_registration(client, live, &end.reason(), end.actor(), now).await?;
    // PostgreSQL: the claims are read after the row was locked, so that a claim that was under way is seen, and no
    // other can follow.
    let rows = client.query("SELECT run FROM faena.claim WHERE owner = $1 ORDER BY run", &[&live.id.0]).await?;
    let runs: Vec<Run> = rows.iter().map(|row| row.get(0)).collect();
    let text = end.text(&live.key);
    release_in(client, shared.own_shard(), &runs, end.release_reason(live.id, live.state, &text), now).await
}

async fn close_registration(
    client: &Object,
    live: &LiveWorker,
    reason: &str,
    actor: &str,
    now: Timestamp,
) -> Result<()> {
    events::set_actor(client, actor).await?;
    client
        .execute(
            "UPDATE faena.worker SET state = $1, reason = $2, ended_at = $3, deadline = NULL WHERE id = $4",
            &[&worker_code(WorkerState::Terminated), &storable(reason), &now.as_ms(), &live.id.0],
        )
        .await?;
    add_changes(client, &[(live.id, changes(live.state.path_when_lost(), Some(reason), now))]).await
}

/// Detaches workers from a server that has ended (`node`, or any without a row): a built-in worker ends with it, any other
/// keeps its jobs and may reconnect. Returns the number of workers.
pub async fn detach(
    shared: &Shared,
    node: Option<NodeId>,
    exit: NodeExit,
    grace_periods: GracePeriods,
    now: Timestamp,
) -> Result<usize> {
    let client = shared.begin().await?;
    let result = async {
        let live = match node {
            Some(node) => live_workers(&client, "node = $1", "FOR UPDATE", &[&node.0]).await?,
            None => {
                let dead = "node IS NOT NULL AND NOT EXISTS (SELECT FROM faena.node n WHERE n.id = w.node)";
                live_workers(&client, dead, "FOR UPDATE SKIP LOCKED", &[]).await?
            }
        };
        for worker in &live {
            detach_one(&client, worker, exit, grace_periods, now).await?;
        }
        Ok(live.len())
    }
    .await;
    client.end(result).await
}

async fn detach_one(
    client: &Object,
    live: &LiveWorker,
    exit: NodeExit,
    grace_periods: GracePeriods,
    now: Timestamp,
) -> Result<()> {
    if live.kind == WorkerKind::BuiltIn {
        return close_registration(client, live, exit.reason(), exit.actor(), now).await;
    }
    let deadline = deadline_without_node(&live.transport, live.owner.deadline, grace_periods, now);
    client
        .execute(
            "UPDATE faena.worker SET node = NULL, reason = $1, deadline = $2 WHERE id = $3",
            &[&exit.waiting_reason(), &deadline, &live.id.0],
        )
        .await?;
    Ok(())
}

async fn next_deadline(client: &Object) -> Result<Option<Timestamp>> {
    let statement = client
        .prepare_cached("SELECT min(deadline) FROM faena.worker WHERE deadline IS NOT NULL AND ended_at IS NULL")
        .await?;
    Ok(client.query_one(&statement, &[]).await?.get::<_, Option<i64>>(0).map(Timestamp::from_ms))
}

pub async fn sweep(
    shared: &Shared,
    orphan_delay_ms: i64,
    forget_before: Timestamp,
    now: Timestamp,
) -> Result<SweepResult> {
    let mut swept = SweepResult::default();
    // PostgreSQL: each worker has its own transaction and its own retries, so that each result is returned.
    for id in shared.retrying(|| overdue(shared, now)).await? {
        swept.lost.extend(shared.retrying(|| sweep_one(shared, id, orphan_delay_ms, now)).await?);
    }
    swept.next_at = shared.retrying(|| forget_ended(shared, forget_before)).await?;
    swept.more = swept.next_at.is_some_and(|at| at <= now);
    Ok(swept)
}

async fn overdue(shared: &Shared, now: Timestamp) -> Result<Vec<WorkerId>> {
    let client = shared.client().await?;
    let rows = client
        .query(
            "SELECT id FROM faena.worker WHERE deadline <= $1 AND ended_at IS NULL ORDER BY deadline, id LIMIT $2",
            &[&now.as_ms(), &ROUND],
        )
        .await?;
    client.return_to_pool(Ok(rows.iter().map(|row| WorkerId(row.get(0))).collect()))
}

/// Declares a worker lost. Returns `None` if it has reported meanwhile, or if another node has declared it lost.
async fn sweep_one(shared: &Shared, id: WorkerId, orphan_delay_ms: i64, now: Timestamp) -> Result<Option<WorkerLost>> {
    let client = shared.begin().await?;
    let result = async {
        let due = live_workers(&client, "id = $1 AND deadline <= $2", "FOR UPDATE", &[&id.0, &now.as_ms()]).await?;
        let Some(live) = due.into_iter().next() else { return Ok(None) };
        let reason = live.reason.clone().unwrap_or_else(|| NO_HEARTBEAT.to_owned());
        let end = WorkerEnd::Lost { reason, delay_ms: orphan_delay_ms };
        let released = end_registration(shared, &client, &live, &end, now).await?;
        Ok(Some((live.key, released)))
    }
    .await;
    let Some((key, released)) = client.end(result).await? else { return Ok(None) };
    // Notifies the node that the worker is connected to.
    shared.signal([Signal::Worker(id)]);
    Ok(Some(WorkerLost { id, key, released: released.after_commit(shared, now).await }))
}

/// Deletes old registrations. Returns the next deadline.
async fn forget_ended(shared: &Shared, forget_before: Timestamp) -> Result<Option<Timestamp>> {
    let client = shared.begin().await?;
    let result = forget_in(&client, forget_before).await;
    client.end(result).await
}

/// Deletes old registrations, except those with claims, because they show which worker had the jobs.
async fn forget_in(client: &Object, forget_before: Timestamp) -> Result<Option<Timestamp>> {
    let rows = client
        .query(
            "DELETE FROM faena.worker WHERE id = ANY (ARRAY(
                 SELECT id FROM faena.worker w WHERE ended_at IS NOT NULL AND ended_at < $1
                     AND NOT EXISTS (SELECT FROM faena.claim c WHERE c.owner = w.id)
                 ORDER BY ended_at LIMIT $2 FOR UPDATE SKIP LOCKED)) RETURNING id",
            &[&forget_before.as_ms(), &FORGET],
        )
        .await?;
    if !rows.is_empty() {
        let ids: Vec<Uuid> = rows.iter().map(|row| row.get(0)).collect();
        client.execute("DELETE FROM faena.worker_change WHERE worker = ANY($1)", &[&ids]).await?;
    }
    next_deadline(client).await
}
