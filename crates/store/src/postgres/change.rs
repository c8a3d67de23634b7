//! Manual actions on a job: cancel, retry, patch, delete.

use std::collections::HashSet;

use deadpool_postgres::Object;
use faena_domain::{JobId, JobOptions, JobState, LogEvent, LogLine, Timestamp};
use serde_json::json;
use tokio_postgres::Row;
use uuid::Uuid;

use super::{
    Shared, Writes, audit,
    cleanup::clean_up,
    dependents::{self, put_ended},
    end::{QueueRows, storable},
    job_log::{add_log_entry, trim_attempts},
    lanes::lane_of,
    read,
    submit::{apply, put_key_queues},
    webhooks,
};
use crate::{
    CancelOutcome, JobExit, JobPatch, LaneId, QueueChange, Result, Retried, Signal, StoreError, Tally,
    assemble::Location,
    assemble::parse_options,
    audit::{audit_entry, retried_by},
    jobs::UNIQUE_KEY_TAKEN,
    lanes::LaneName,
    plan::{Deltas, Dequeued, FIRST_RECHECK_MS, KeyKind, Label, key_number, labels_of, stored_options},
    sql::sql,
    sql::{CANCELLED, PENDING},
};

/// A job that is to be changed, with its row locked against other changes.
struct LockedJob {
    state: JobState,
    lane: LaneId,
    options: JobOptions,
}

async fn lock(client: &Object, id: JobId) -> Result<LockedJob> {
    let row = client
        .query_opt("SELECT lane, options FROM faena.job WHERE id = $1 FOR UPDATE", &[&id.0])
        .await?
        .ok_or(StoreError::NotFound(id))?;
    let state = *read::states_of(client, &[id]).await?.get(&id).ok_or(StoreError::NotFound(id))?;
    Ok(LockedJob { state, lane: row.get(0), options: parse_options(row.get(1))? })
}

/// Signals and queue changes to send after the commit.
#[derive(Default)]
pub struct AfterCommit {
    pub signals: Vec<Signal>,
    pub queue_changes: Vec<QueueChange>,
}

impl AfterCommit {
    pub fn extend(&mut self, other: AfterCommit) {
        self.signals.extend(other.signals);
        self.queue_changes.extend(other.queue_changes);
    }

    /// Sends everything: first to the external queue, then to the subscribers of the signals.
    pub fn send(self, shared: &Shared) {
        shared.queue_feed.add(self.queue_changes);
        shared.signal(self.signals);
    }
}

/// Removes a job from `ready` or `waiting`. `None`: another transaction has removed it.
pub async fn dequeue(client: &Object, lane: LaneId, id: JobId) -> Result<Option<Dequeued>> {
    let dequeued = |row: &Row, ready_at| {
        let retry_count = u32::try_from(row.get::<_, i16>(0)).unwrap_or(0);
        Some(Dequeued { retry_count, ready_at })
    };
    let row = client
        .query_opt(
            "DELETE FROM faena.ready WHERE lane = $1 AND id = $2 RETURNING retry_count, ready_at",
            &[&lane, &id.0],
        )
        .await?;
    if let Some(row) = row {
        return Ok(dequeued(&row, Some(Timestamp::from_ms(row.get(1)))));
    }
    let row = client
        .query_opt(
            sql!("DELETE FROM faena.waiting WHERE lane = $1 AND state IN ({PENDING}, {RETRYING}) AND id = $2 RETURNING retry_count"),
            &[&lane, &id.0],
        )
        .await?;
    client.execute("DELETE FROM faena.dependency WHERE child = $1", &[&id.0]).await?;
    Ok(row.and_then(|row| dequeued(&row, None)))
}

/// Returns the error for a job that changed its state after it was read. The caller tries again.
fn state_changed() -> StoreError {
    StoreError::Contended("the job has just changed its state".into())
}

pub async fn cancel(
    shared: &Shared,
    id: JobId,
    reason: &str,
    by: Option<&str>,
    now: Timestamp,
) -> Result<CancelOutcome> {
    let client = shared.begin().await?;
    let entry = audit_entry(by, "job.cancel", id, json!({ "reason": reason }));
    let work = cancel_in(&client, shared.own_writes(), id, reason, now);
    let result = audit::run_audited(&client, entry, now, work).await;
    let (outcome, after_commit) = client.end(result).await?;
    after_commit.send(shared);
    match outcome {
        CancelOutcome::Cancelled => dependents::release_dependents(shared, &[id], now).await?,
        CancelOutcome::Requested { .. } => shared.signal([Signal::Cancel(id)]),
    }
    Ok(outcome)
}

pub async fn cancel_in(
    client: &Object,
    writes: Writes,
    id: JobId,
    reason: &str,
    now: Timestamp,
) -> Result<(CancelOutcome, AfterCommit)> {
    let found = lock(client, id).await?;
    let state = found.state;
    if state.is_terminal() {
        return Err(StoreError::InvalidTransition { from: state, wanted: "be cancelled" });
    }
    if state.is_in_flight() {
        client
            .execute(
                "INSERT INTO faena.cancel_request (id, reason, at) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING",
                &[&id.0, &storable(reason), &now.as_ms()],
            )
            .await?;
        add_log_entry(client, &writes.limits, id, None, LogLine::new(now, LogEvent::CancelRequested, reason)).await?;
        return Ok((CancelOutcome::Requested { state }, AfterCommit::default()));
    }
    let dequeued = dequeue(client, found.lane, id).await?.ok_or_else(state_changed)?;
    put_ended(client, found.lane, CANCELLED, id, dequeued, reason, "cancelled", LogEvent::Cancelled, now).await?;
    let signals = clean_up(client, &[(id.0, JobExit::Finished)]).await?;
    let mut deltas = Deltas::default();
    deltas.moved(found.lane, Tally::of(state), Tally::Cancelled, 1);
    apply(client, writes.shard, &deltas).await?;
    let queue_changes = vec![QueueChange::left(found.lane, id)];
    Ok((CancelOutcome::Cancelled, AfterCommit { signals, queue_changes }))
}

pub async fn retry(shared: &Shared, id: JobId, by: Option<&str>, now: Timestamp) -> Result<Retried> {
    let client = shared.begin().await?;
    let entry = audit_entry(by, "job.retry", id, json!({}));
    let work = retry_in(&client, shared.own_writes(), id, retried_by(by), now);
    let result = audit::run_audited(&client, entry, now, work).await;
    let retried = client.end(result).await?;
    shared.signal([Signal::Waiting]);
    Ok(retried)
}

pub async fn retry_in(client: &Object, writes: Writes, id: JobId, by: String, now: Timestamp) -> Result<Retried> {
    let found = lock(client, id).await?;
    if found.state == JobState::Retrying {
        return retry_now(client, writes, found.lane, id, by, now).await;
    }
    if !found.state.can_transition_to(JobState::Pending) {
        return Err(StoreError::InvalidTransition { from: found.state, wanted: "be retried" });
    }
    if let Some(key) = &found.options.unique_key {
        let kind = KeyKind::Unique as i16;
        let inserted = client
            .execute(
                "INSERT INTO faena.job_key (kind, key, id) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING",
                &[&kind, key, &id.0],
            )
            .await?;
        if inserted == 0 {
            // If the other job has just released the key, the caller tries again.
            let existing_job = client
                .query_opt("SELECT id FROM faena.job_key WHERE kind = $1 AND key = $2", &[&kind, key])
                .await?
                .map(|row| JobId(row.get(0)))
                .ok_or_else(state_changed)?;
            return Err(StoreError::Conflict { message: UNIQUE_KEY_TAKEN.into(), existing_job: Some(existing_job) });
        }
    }
    let parents = read::states_of(client, &found.options.depends_on).await?;
    // Finished parents do not block the job, even failed ones: the caller of a retry knows how they ended.
    let unfinished: Vec<Uuid> = parents.iter().filter(|(_, state)| !state.is_terminal()).map(|(id, _)| id.0).collect();
    restore_options(client, found.lane, id, found.options, now).await?;
    // A cancel request that came too late for the ended run does not apply to the next one.
    client.execute("DELETE FROM faena.cancel_request WHERE id = $1", &[&id.0]).await?;
    // The history is kept: the last run becomes an attempt, an end without a run becomes a log entry.
    let lane = found.lane;
    client
        .execute(
            sql!("INSERT INTO faena.attempt (id, run, state, retry_count, finished_at, started_at, worker, error, reason, log)
             SELECT id, run, state, retry_count, finished_at, started_at, worker, error, reason, log
             FROM faena.ended WHERE lane = $1 AND state IN ({FAILED}, {CANCELLED}) AND id = $2 AND run > 0 ON CONFLICT DO NOTHING"),
            &[&lane, &id.0],
        )
        .await?;
    trim_attempts(client, &[id.0]).await?;
    client
        .execute(
            sql!("INSERT INTO faena.job_log (id, run, log)
             SELECT id, NULL, log FROM faena.ended WHERE lane = $1 AND state IN ({FAILED}, {CANCELLED}) AND id = $2 AND run = 0"),
            &[&lane, &id.0],
        )
        .await?;
    client
        .execute(
            sql!("DELETE FROM faena.ended WHERE lane = $1 AND state IN ({FAILED}, {CANCELLED}) AND id = $2"),
            &[&lane, &id.0],
        )
        .await?;
    add_log_entry(client, &writes.limits, id, None, LogLine::new(now, LogEvent::Retried, by)).await?;
    if unfinished.is_empty() {
        let mut rows = QueueRows::default();
        rows.push(lane, id, now, 0);
        rows.put_waiting(client, PENDING).await?;
    } else {
        client
            .execute(
                "INSERT INTO faena.waiting (lane, state, id, due_at, blocked, retry_count) VALUES ($1, $2, $3, $4, true, 0)",
                &[&lane, &PENDING, &id.0, &now.plus_ms(FIRST_RECHECK_MS).as_ms()],
            )
            .await?;
        client
            .execute(
                "INSERT INTO faena.dependency (parent, child) SELECT parent, $2 FROM unnest($1::uuid[]) AS p(parent)
                 ON CONFLICT DO NOTHING",
                &[&unfinished, &id.0],
            )
            .await?;
    }
    let mut deltas = Deltas::default();
    deltas.moved(lane, Tally::of(found.state), Tally::Pending, 1);
    apply(client, writes.shard, &deltas).await?;
    Ok(Retried::FROM_START)
}

/// Makes the next attempt of a retrying job due now.
async fn retry_now(
    client: &Object,
    writes: Writes,
    lane: LaneId,
    id: JobId,
    by: String,
    now: Timestamp,
) -> Result<Retried> {
    let row = client
        .query_opt(
            sql!(
                "UPDATE faena.waiting SET due_at = least(due_at, $1) WHERE lane = $2 AND state = {RETRYING} AND id = $3
                 RETURNING retry_count"
            ),
            &[&now.as_ms(), &lane, &id.0],
        )
        .await?
        .ok_or_else(state_changed)?;
    add_log_entry(client, &writes.limits, id, None, LogLine::new(now, LogEvent::Retried, by)).await?;
    Ok(Retried { state: JobState::Retrying, retry_count: u32::try_from(row.get::<_, i16>(0)).unwrap_or(0) })
}

/// Adds the attempts so far to the options of a job that is retried, and restores its expiry. An expiry that has passed
/// is removed, because the caller wants the job to run anyway.
async fn restore_options(client: &Object, lane: LaneId, id: JobId, before: JobOptions, now: Timestamp) -> Result<()> {
    let mut options = before.clone();
    if let Some(Location::Finished(end)) = read::locations_of(client, &[lane], &[id.0]).await?.remove(&id.0) {
        options.earlier_attempts += end.attempts();
    }
    options.expires_at = before.expires_at.filter(|at| *at > now);
    if let Some(at) = options.expires_at {
        client
            .execute("INSERT INTO faena.expiry VALUES ($1, $2) ON CONFLICT DO NOTHING", &[&at.as_ms(), &id.0])
            .await?;
    }
    if options != before {
        client.execute("UPDATE faena.job SET options = $1 WHERE id = $2", &[&stored_options(&options), &id.0]).await?;
    }
    Ok(())
}

pub async fn patch(shared: &Shared, id: JobId, patch: &JobPatch, by: Option<&str>, now: Timestamp) -> Result<()> {
    let client = shared.begin().await?;
    let entry = audit_entry(by, "job.patch", id, json!({ "changed": patch.describe() }));
    let result = audit::run_audited(&client, entry, now, patch_in(shared, &client, id, patch, now)).await;
    let (moved, queue_changes) = client.end(result).await?;
    shared.queue_feed.add(queue_changes);
    if let Some((lane, ready_at)) = moved.ready {
        shared.cursors.lower(lane, ready_at);
        shared.signal([Signal::Ready(lane)]);
    }
    shared.signal([Signal::Waiting]);
    Ok(())
}

/// Returns the new location of the job, and the changes for the external queue.
async fn patch_in(
    shared: &Shared,
    client: &Object,
    id: JobId,
    patch: &JobPatch,
    now: Timestamp,
) -> Result<(Moved, Vec<QueueChange>)> {
    let LockedJob { state, lane, mut options } = lock(client, id).await?;
    if !matches!(state, JobState::Pending | JobState::Queued | JobState::Retrying) {
        return Err(StoreError::InvalidTransition { from: state, wanted: "be changed" });
    }
    if !shared.lanes.contains(lane) {
        shared.load_lanes().await?;
    }
    let old = shared.lanes.require(lane)?;
    let new_lane = match patch.priority {
        Some(priority) if priority != old.priority => lane_of(shared, LaneName { priority, ..old.name() }).await?,
        _ => lane,
    };
    if new_lane != lane {
        client.query_one("SELECT faena.require_lanes($1)", &[&vec![new_lane]]).await?;
    }
    let (expires_at_before, labels_before) = (options.expires_at, labels_of(&options));
    patch.apply_to(&mut options);
    options.name = options.name.filter(|name| *name != old.kind);
    replace_labels(client, id, &labels_before, &labels_of(&options)).await?;
    let text = stored_options(&options);
    client
        .execute(
            "UPDATE faena.job SET lane = $1, options = $2, payload = coalesce($3, payload) WHERE id = $4",
            &[&new_lane, &text, &patch.payload, &id.0],
        )
        .await?;
    move_expiry(client, id, expires_at_before, options.expires_at).await?;
    let key = options.concurrency_key.as_deref().filter(|_| old.keyed);
    let moved = move_patched(client, id, (lane, new_lane), state, patch.scheduled_at, key, now).await?;
    let mut deltas = Deltas::default();
    deltas.add(lane, Tally::of(state), -1);
    deltas.add(new_lane, Tally::of(moved.state), 1);
    add_log_entry(client, &shared.options.job_limits, id, None, LogLine::new(now, LogEvent::Patched, patch.describe()))
        .await?;
    apply(client, shared.own_shard(), &deltas).await?;
    let mut changes = Vec::new();
    if moved.has_left {
        changes.push(QueueChange::left(lane, id));
    }
    changes.extend(moved.ready.map(|(lane, at)| QueueChange::ready(lane, at, id)));
    changes.extend(moved.due_at.map(|at| QueueChange::delayed(new_lane, at, id)));
    Ok((moved, changes))
}

/// Location of a patched job.
struct Moved {
    state: JobState,
    /// Whether it has left its old position in the queue.
    has_left: bool,
    /// The lane and time at which it is ready now, if it is.
    ready: Option<(LaneId, i64)>,
    /// The time that it now waits for.
    due_at: Option<i64>,
}

/// Replaces the labels of a job.
async fn replace_labels(client: &Object, id: JobId, before: &[Label], after: &[Label]) -> Result<()> {
    let columns = |labels: &[Label], others: &[Label]| -> (Vec<i16>, Vec<String>) {
        let others: HashSet<&Label> = others.iter().collect();
        labels.iter().filter(|label| !others.contains(label)).map(|(kind, value)| (*kind as i16, value.clone())).unzip()
    };
    let (removed, added) = (columns(before, after), columns(after, before));
    if !removed.0.is_empty() {
        client
            .execute(
                "DELETE FROM faena.label l USING unnest($1::int2[], $2::text[]) AS u(kind, value)
                 WHERE l.kind = u.kind AND l.value = u.value AND l.id = $3",
                &[&removed.0, &removed.1, &id.0],
            )
            .await?;
    }
    if !added.0.is_empty() {
        client
            .execute(
                "INSERT INTO faena.label (kind, value, id)
                 SELECT kind, value, $3 FROM unnest($1::int2[], $2::text[]) AS u(kind, value) ON CONFLICT DO NOTHING",
                &[&added.0, &added.1, &id.0],
            )
            .await?;
    }
    Ok(())
}

/// Replaces the expiry of a job.
async fn move_expiry(client: &Object, id: JobId, before: Option<Timestamp>, after: Option<Timestamp>) -> Result<()> {
    if before == after {
        return Ok(());
    }
    if let Some(at) = before {
        client.execute("DELETE FROM faena.expiry WHERE expires_at = $1 AND id = $2", &[&at.as_ms(), &id.0]).await?;
    }
    if let Some(at) = after {
        client
            .execute("INSERT INTO faena.expiry VALUES ($1, $2) ON CONFLICT DO NOTHING", &[&at.as_ms(), &id.0])
            .await?;
    }
    Ok(())
}

/// Moves a patched job to its new lane and time.
async fn move_patched(
    client: &Object,
    id: JobId,
    (lane, new_lane): (LaneId, LaneId),
    state: JobState,
    scheduled_at: Option<Option<Timestamp>>,
    key: Option<&str>,
    now: Timestamp,
) -> Result<Moved> {
    let blocked =
        client.query_opt("SELECT 1 FROM faena.dependency WHERE child = $1 LIMIT 1", &[&id.0]).await?.is_some();
    let mut moved = Moved { state, has_left: false, ready: None, due_at: None };
    let move_waiting = sql!(
        "UPDATE faena.waiting SET lane = $1, due_at = coalesce($2, due_at)
         WHERE lane = $3 AND state IN ({PENDING}, {RETRYING}) AND id = $4"
    );
    match scheduled_at {
        // It waits for its parents: only the lane can change.
        _ if blocked => {
            if client.execute(move_waiting, &[&new_lane, &None::<i64>, &lane, &id.0]).await? == 0 {
                return Err(state_changed());
            }
        }
        // The patch changes the time of the next attempt.
        when if state == JobState::Retrying => {
            moved.due_at = when.map(|when| when.unwrap_or(now).as_ms());
            if client.execute(move_waiting, &[&new_lane, &moved.due_at, &lane, &id.0]).await? == 0 {
                return Err(state_changed());
            }
        }
        Some(when) => {
            let retry_count = dequeue(client, lane, id).await?.ok_or_else(state_changed)?.retry_count;
            moved.has_left = true;
            let mut rows = QueueRows::default();
            match when.filter(|due_at| *due_at > now) {
                Some(due_at) => {
                    rows.push(new_lane, id, due_at, retry_count);
                    rows.put_waiting(client, PENDING).await?;
                    (moved.state, moved.due_at) = (JobState::Pending, Some(due_at.as_ms()));
                }
                None => {
                    rows.push(new_lane, id, now, retry_count);
                    rows.put_ready(client, false).await?;
                    (moved.state, moved.ready) = (JobState::Queued, Some((new_lane, now.as_ms())));
                }
            }
        }
        None if state == JobState::Queued => {
            let row = client
                .query_opt(
                    "UPDATE faena.ready SET lane = $1 WHERE lane = $2 AND id = $3 RETURNING ready_at",
                    &[&new_lane, &lane, &id.0],
                )
                .await?
                .ok_or_else(state_changed)?;
            let ready_at = row.get(0);
            (moved.has_left, moved.ready) = (new_lane != lane, Some((new_lane, ready_at)));
            if let Some(key) = key {
                put_key_queues(client, vec![(new_lane, key_number(key), ready_at)]).await?;
            }
        }
        None => {
            if client.execute(move_waiting, &[&new_lane, &None::<i64>, &lane, &id.0]).await? == 0 {
                return Err(state_changed());
            }
        }
    }
    Ok(moved)
}

pub async fn delete(shared: &Shared, id: JobId, by: Option<&str>, now: Timestamp) -> Result<()> {
    let client = shared.begin().await?;
    let entry = audit_entry(by, "job.delete", id, json!({}));
    let result = audit::run_audited(&client, entry, now, delete_in(&client, shared.own_shard(), id)).await;
    client.end(result).await?.send(shared);
    // Jobs that wait for it will never see it complete.
    dependents::release_dependents(shared, &[id], now).await
}

pub async fn delete_in(client: &Object, shard: i16, id: JobId) -> Result<AfterCommit> {
    let found = lock(client, id).await?;
    if found.state.is_in_flight() {
        return Err(StoreError::InvalidTransition { from: found.state, wanted: "be deleted; cancel it first" });
    }
    let mut after_commit = AfterCommit::default();
    if !found.state.is_terminal() {
        dequeue(client, found.lane, id).await?.ok_or_else(state_changed)?;
        after_commit.queue_changes.push(QueueChange::left(found.lane, id));
    }
    client.execute("DELETE FROM faena.done WHERE lane = $1 AND id = $2", &[&found.lane, &id.0]).await?;
    client
        .execute(
            sql!("DELETE FROM faena.ended WHERE lane = $1 AND state IN ({FAILED}, {CANCELLED}) AND id = $2"),
            &[&found.lane, &id.0],
        )
        .await?;
    after_commit.signals = remove(client, &[id.0]).await?;
    // From now on, each report of a claim that contains this job must be checked on its own.
    client.execute("UPDATE faena.claim SET check_each = true WHERE ids @> ARRAY[$1::uuid]", &[&id.0]).await?;
    let mut deltas = Deltas::default();
    deltas.removed(found.lane, Tally::of(found.state), 1);
    apply(client, shard, &deltas).await?;
    Ok(after_commit)
}

/// Deletes everything that belongs to jobs, except their rows in the tables that contain their state. Returns the
/// signals to send after the commit.
pub async fn remove(client: &Object, ids: &[Uuid]) -> Result<Vec<Signal>> {
    let removed: Vec<(Uuid, JobExit)> = ids.iter().map(|id| (*id, JobExit::Deleted)).collect();
    let signals = clean_up(client, &removed).await?;
    webhooks::remove(client, ids).await?;
    let rows =
        client.query("SELECT id, options FROM faena.job WHERE id = ANY($1) AND options IS NOT NULL", &[&ids]).await?;
    let mut labels: (Vec<i16>, Vec<String>, Vec<Uuid>) = Default::default();
    let mut keys: (Vec<String>, Vec<Uuid>) = Default::default();
    for row in &rows {
        let (id, options): (Uuid, _) = (row.get(0), parse_options(row.get(1))?);
        for (kind, value) in labels_of(&options) {
            labels.0.push(kind as i16);
            labels.1.push(value);
            labels.2.push(id);
        }
        if let Some(key) = options.idempotency_key {
            keys.0.push(key);
            keys.1.push(id);
        }
    }
    if !labels.0.is_empty() {
        client
            .execute(
                "DELETE FROM faena.label l USING unnest($1::int2[], $2::text[], $3::uuid[]) AS u(kind, value, id)
                 WHERE l.kind = u.kind AND l.value = u.value AND l.id = u.id",
                &[&labels.0, &labels.1, &labels.2],
            )
            .await?;
    }
    if !keys.0.is_empty() {
        client
            .execute(
                sql!(
                    "DELETE FROM faena.job_key k USING unnest($1::text[], $2::uuid[]) AS u(key, id)
                 WHERE k.kind = {IDEMPOTENCY_KEY} AND k.key = u.key AND k.id = u.id"
                ),
                &[&keys.0, &keys.1],
            )
            .await?;
    }
    for table in ["attempt", "job_log", "stale_report", "step", "progress", "job"] {
        client.execute(&format!("DELETE FROM faena.{table} WHERE id = ANY($1)"), &[&ids]).await?;
    }
    Ok(signals)
}
