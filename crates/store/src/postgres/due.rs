//! Processes what is due: waiting jobs become ready, expired jobs fail, old jobs are deleted.

use deadpool_postgres::Object;
use faena_domain::{ErrorReason, JobId, JobState, LogEvent, Timestamp, error_chain};
use tokio_postgres::{Row, error::SqlState};
use uuid::Uuid;

use super::{
    Shared, audit,
    change::{AfterCommit, dequeue, remove},
    cleanup::clean_up,
    dependents::{self, put_ended},
    end::QueueRows,
    read, schedules,
    submit::apply,
    webhooks,
};
use crate::{
    DueResult, JobExit, LaneId, QueueChange, Result, Retention, Signal, StoreError, Tally,
    jobs::state_of_code,
    plan::{Deltas, Dequeued, next_recheck_at, no_handler},
    sql::{CANCELLED, FAILED},
    sql::{TALLY_COMPLETED, sql},
};

pub async fn promote(shared: &Shared, limit: usize, now: Timestamp) -> Result<DueResult> {
    let promoted = promote_due(shared, limit, now).await?;
    let (released, more) = dependents::continue_release(shared, now).await?;
    let mut due = DueResult { promoted, more: more || promoted == limit, ..DueResult::default() };
    check_parents(shared, limit, now, &mut due).await?;
    due.unblocked += released;
    let client = shared.client().await?;
    let next = read::next_due_at(&client).await;
    due.next_at = client.return_to_pool(next)?;
    Ok(due)
}

/// Promotes due jobs. Nodes can do this concurrently: each skips the rows that another node has locked.
async fn promote_due(shared: &Shared, limit: usize, now: Timestamp) -> Result<usize> {
    let client = shared.begin().await?;
    let result = async {
        let statement = client
            .prepare_cached(
                "WITH due AS (
                     DELETE FROM faena.waiting WHERE ctid = ANY (ARRAY(
                         SELECT ctid FROM faena.waiting WHERE due_at <= $1 AND NOT blocked ORDER BY due_at, id LIMIT $2
                         FOR UPDATE SKIP LOCKED))
                     RETURNING lane, state, id, due_at, retry_count),
                 sorted AS MATERIALIZED (
                     SELECT due.*, (SELECT keyed FROM faena.lane l WHERE l.id = due.lane) AS keyed FROM due),
                 put AS (
                     INSERT INTO faena.ready (lane, ready_at, id, retry_count, must_record_start)
                     SELECT lane, due_at, id, retry_count, false FROM sorted WHERE NOT keyed)
                 SELECT lane, state, count(*), min(due_at), keyed,
                        array_agg(id) FILTER (WHERE keyed OR $3), array_agg(due_at) FILTER (WHERE keyed OR $3),
                        array_agg(retry_count) FILTER (WHERE keyed)
                 FROM sorted GROUP BY lane, state, keyed",
            )
            .await?;
        let has_feed = shared.queue_feed.is_on();
        let rows = client.query(&statement, &[&now.as_ms(), &(limit as i64), &has_feed]).await?;
        let mut deltas = Deltas::default();
        let mut lanes: Vec<(LaneId, i64)> = Vec::new();
        let mut changes = Vec::new();
        let mut count = 0;
        let mut keyed = QueueRows::default();
        for row in rows {
            if has_feed {
                let (ids, times): (Vec<Uuid>, Vec<i64>) = (row.get(5), row.get(6));
                changes
                    .extend(ids.into_iter().zip(times).map(|(id, at)| QueueChange::ready(row.get(0), at, JobId(id))));
            }
            if row.get(4) {
                let (ids, times, retries): (Vec<Uuid>, Vec<i64>, Vec<i16>) = (row.get(5), row.get(6), row.get(7));
                keyed.lanes.extend(ids.iter().map(|_| row.get::<_, LaneId>(0)));
                keyed.ids.extend(ids);
                keyed.times.extend(times);
                keyed.retries.extend(retries);
            }
            let (lane, state, n): (LaneId, i16, i64) = (row.get(0), row.get(1), row.get(2));
            deltas.moved(lane, Tally::of(state_of_code(state)), Tally::Queued, n);
            lanes.push((lane, row.get(3)));
            count += usize::try_from(n).unwrap_or(0);
        }
        keyed.put_ready(&client, false).await?;
        apply(&client, shared.own_shard(), &deltas).await?;
        Ok((count, lanes, changes))
    }
    .await;
    let (count, lanes, changes) = client.end(result).await?;
    shared.queue_feed.add(changes);
    for (lane, ready_at) in lanes {
        shared.cursors.lower(lane, ready_at);
        shared.signal([Signal::Ready(lane)]);
    }
    Ok(count)
}

pub async fn expire(shared: &Shared, limit: usize, now: Timestamp) -> Result<DueResult> {
    let next_at = next_expiry_at(shared).await?;
    if next_at.is_none_or(|at| at > now) {
        return Ok(DueResult { next_at, ..DueResult::default() });
    }
    let client = shared.begin().await?;
    let result = expire_in(&client, shared.own_shard(), limit, now).await;
    let (seen, expired, after_commit) = client.end(result).await?;
    after_commit.send(shared);
    if !expired.is_empty() {
        dependents::release_dependents(shared, &expired, now).await?;
    }
    let next_at = next_expiry_at(shared).await?;
    Ok(DueResult { expired: expired.len(), more: seen == limit, next_at, ..DueResult::default() })
}

async fn next_expiry_at(shared: &Shared) -> Result<Option<Timestamp>> {
    let client = shared.client().await?;
    let next = read::next_expiry_at(&client).await;
    client.return_to_pool(next)
}

/// Fails expired jobs. Returns how many rows of `expiry` were read, and which jobs have expired.
async fn expire_in(
    client: &Object,
    shard: i16,
    limit: usize,
    now: Timestamp,
) -> Result<(usize, Vec<JobId>, AfterCommit)> {
    let statement = client
        .prepare_cached(
            "DELETE FROM faena.expiry WHERE ctid = ANY (ARRAY(
                 SELECT ctid FROM faena.expiry WHERE expires_at <= $1 ORDER BY expires_at, id LIMIT $2
                 FOR UPDATE SKIP LOCKED)) RETURNING expires_at, id",
        )
        .await?;
    let rows = client.query(&statement, &[&now.as_ms(), &(limit as i64)]).await?;
    let ids: Vec<JobId> = rows.iter().map(|row| JobId(row.get(1))).collect();
    let states = read::states_of(client, &ids).await?;
    let mut deltas = Deltas::default();
    let mut expired = Vec::new();
    let mut after_commit = AfterCommit::default();
    for row in &rows {
        let (at, id): (i64, JobId) = (row.get(0), JobId(row.get(1)));
        let Some(state) = states.get(&id).copied().filter(|state| !state.is_in_flight() && !state.is_terminal()) else {
            continue;
        };
        let lane: LaneId = client.query_one("SELECT lane FROM faena.job WHERE id = $1", &[&id.0]).await?.get(0);
        // If a worker has just claimed the job, the job may run.
        let Some(dequeued) = dequeue(client, lane, id).await? else { continue };
        let error = format!("expired at {}", Timestamp::from_ms(at));
        let reason = ErrorReason::Expired.as_str();
        put_ended(client, lane, FAILED, id, dequeued, &error, reason, LogEvent::Expired, now).await?;
        deltas.moved(lane, Tally::of(state), Tally::Failed, 1);
        deltas.timed_out(lane, ErrorReason::Expired);
        after_commit.queue_changes.push(QueueChange::left(lane, id));
        expired.push(id);
    }
    if !expired.is_empty() {
        after_commit.signals =
            clean_up(client, &expired.iter().map(|id| (id.0, JobExit::Finished)).collect::<Vec<_>>()).await?;
    }
    apply(client, shard, &deltas).await?;
    Ok((rows.len(), expired, after_commit))
}

/// Fails jobs that have been ready for too long without a worker that can run them.
pub async fn fail_unhandled(
    shared: &Shared,
    lanes: &[LaneId],
    before: Timestamp,
    limit: usize,
    now: Timestamp,
) -> Result<usize> {
    if lanes.iter().any(|lane| !shared.lanes.contains(*lane)) {
        shared.load_lanes().await?;
    }
    let client = shared.begin().await?;
    let result = fail_unhandled_in(shared, &client, lanes, before, limit, now).await;
    let (failed, after_commit) = client.end(result).await?;
    after_commit.send(shared);
    if !failed.is_empty() {
        dependents::release_dependents(shared, &failed, now).await?;
    }
    Ok(failed.len())
}

/// Fails the jobs, and returns which have failed.
async fn fail_unhandled_in(
    shared: &Shared,
    client: &Object,
    lanes: &[LaneId],
    before: Timestamp,
    limit: usize,
    now: Timestamp,
) -> Result<(Vec<JobId>, AfterCommit)> {
    let mut deltas = Deltas::default();
    let mut failed = Vec::new();
    let mut after_commit = AfterCommit::default();
    for lane in lanes {
        let Some(known) = shared.lanes.get(*lane) else { continue };
        let left = limit.saturating_sub(failed.len());
        let rows = client
            .query(
                "DELETE FROM faena.ready WHERE ctid = ANY (ARRAY(
                     SELECT ctid FROM faena.ready WHERE lane = $1 AND ready_at < $2 ORDER BY ready_at, id LIMIT $3
                     FOR UPDATE SKIP LOCKED))
                 RETURNING ready_at, id, retry_count",
                &[lane, &before.as_ms(), &(left as i64)],
            )
            .await?;
        let error = no_handler(&known);
        let reason = ErrorReason::NoHandler.as_str();
        for row in rows {
            let id = JobId(row.get(1));
            let retry_count = u32::try_from(row.get::<_, i16>(2)).unwrap_or(0);
            let dequeued = Dequeued { retry_count, ready_at: Some(Timestamp::from_ms(row.get(0))) };
            put_ended(client, *lane, FAILED, id, dequeued, &error, reason, LogEvent::Failed, now).await?;
            deltas.moved(*lane, Tally::Queued, Tally::Failed, 1);
            after_commit.queue_changes.push(QueueChange::left(*lane, id));
            failed.push(id);
        }
    }
    if !failed.is_empty() {
        after_commit.signals =
            clean_up(client, &failed.iter().map(|id| (id.0, JobExit::Finished)).collect::<Vec<_>>()).await?;
    }
    apply(client, shared.own_shard(), &deltas).await?;
    Ok((failed, after_commit))
}

/// Releases blocked jobs whose parents have ended, in case an earlier release missed them.
async fn check_parents(shared: &Shared, limit: usize, now: Timestamp, due: &mut DueResult) -> Result<()> {
    let client = shared.begin().await?;
    let result = async {
        let rows = client
            .query(
                "SELECT lane, id FROM faena.waiting WHERE due_at <= $1 AND blocked ORDER BY due_at, id LIMIT $2
                 FOR UPDATE SKIP LOCKED",
                &[&now.as_ms(), &(limit as i64)],
            )
            .await?;
        let lanes: Vec<LaneId> = rows.iter().map(|row| row.get(0)).collect();
        let ids: Vec<Uuid> = rows.iter().map(|row| row.get(1)).collect();
        let next: Vec<i64> = ids.iter().map(|id| next_recheck_at(JobId(*id), now).as_ms()).collect();
        client
            .execute(
                sql!("UPDATE faena.waiting w SET due_at = n.at FROM unnest($1::int4[], $2::uuid[], $3::int8[]) AS n(lane, id, at)
                 WHERE w.lane = n.lane AND w.state = {PENDING} AND w.id = n.id"),
                &[&lanes, &ids, &next],
            )
            .await?;
        let parents: Vec<JobId> = client
            .query("SELECT DISTINCT parent FROM faena.dependency WHERE child = ANY($1)", &[&ids])
            .await?
            .iter()
            .map(|row| JobId(row.get(0)))
            .collect();
        let states = read::states_of(&client, &parents).await?;
        let ended = parents.into_iter().filter(|id| states.get(id).is_none_or(|s| s.is_terminal())).collect::<Vec<_>>();
        Ok((ids, ended))
    }
    .await;
    let (ids, ended) = client.end(result).await?;
    due.more |= ids.len() == limit;
    if ended.is_empty() {
        return Ok(());
    }
    dependents::release_dependents(shared, &ended, now).await?;
    let client = shared.client().await?;
    let children: Vec<JobId> = ids.into_iter().map(JobId).collect();
    let states = read::states_of(&client, &children).await;
    let states = client.return_to_pool(states)?;
    due.unblocked = states.values().filter(|state| **state != JobState::Pending).count();
    Ok(())
}

const DAY_MS: i64 = 24 * 3_600_000;
const DAYS_AHEAD: i64 = 3;

/// Creates one partition of `done` per day (UTC), for today and the coming days. All nodes may do this concurrently.
pub async fn make_partitions(shared: &Shared, now: Timestamp) -> Result<()> {
    let client = shared.client().await?;
    make_coming_partitions(&client, now).await?;
    client.return_to_pool(Ok(()))
}

pub async fn make_coming_partitions(client: &Object, now: Timestamp) -> Result<()> {
    for day in 0..=DAYS_AHEAD {
        make_partition(client, (now.as_ms().div_euclid(DAY_MS) + day) * DAY_MS).await?;
    }
    Ok(())
}

/// Creates the partition of the day that begins at `from`, unless it exists.
pub async fn make_partition(client: &Object, from: i64) -> Result<()> {
    let name = partition_name(from);
    let known =
        client.query_one("SELECT to_regclass($1) IS NOT NULL", &[&format!("faena.{name}")]).await?.get::<_, bool>(0);
    if known {
        return Ok(());
    }
    // Fails if the default partition has rows of that day; then they stay there, which does no harm.
    let made = client
        .batch_execute(&format!(
            "SET lock_timeout = '2s'; CREATE TABLE IF NOT EXISTS faena.{name} PARTITION OF faena.done \
             (PRIMARY KEY (lane, id)) FOR VALUES FROM ({from}) TO ({}); RESET lock_timeout",
            from + DAY_MS
        ))
        .await;
    if let Err(error) = made {
        client.batch_execute("RESET lock_timeout").await?;
        let concurrent = [SqlState::DUPLICATE_TABLE, SqlState::UNIQUE_VIOLATION, SqlState::T_R_DEADLOCK_DETECTED];
        if concurrent.iter().any(|code| error.code() == Some(code)) {
            // Another node has created it, or is doing so; the next round checks again.
            return Ok(());
        }
        tracing::warn!(partition = name, error = %error_chain(&error), "partition not created, using the default partition");
    }
    Ok(())
}

/// Returns the partitions that must exist: those of today and the coming days.
pub fn coming_partitions(now: Timestamp) -> impl Iterator<Item = String> {
    (0..=DAYS_AHEAD).map(move |day| partition_name((now.as_ms().div_euclid(DAY_MS) + day) * DAY_MS))
}

fn partition_name(from_ms: i64) -> String {
    let date = Timestamp::from_ms(from_ms).to_string();
    format!("done_{}", date[..10].replace('-', ""))
}

pub async fn prune(shared: &Shared, retention: &Retention, limit: usize, now: Timestamp) -> Result<usize> {
    make_partitions(shared, now).await?;
    let client = shared.begin().await?;
    let result = prune_in(&client, shared.own_shard(), retention, limit, now).await;
    let pruned = client.end(result).await?;
    if pruned < limit {
        drop_empty_partitions(shared, now.plus_ms(-retention.completed_ms)).await?;
    }
    Ok(pruned)
}

async fn prune_in(client: &Object, shard: i16, retention: &Retention, limit: usize, now: Timestamp) -> Result<usize> {
    // Forces index lookups: the planner has no statistics of a fresh partition and would scan all of it.
    client.batch_execute("SET LOCAL enable_seqscan = off; SET LOCAL enable_hashjoin = off").await?;
    let mut rows = prune_done(client, now.plus_ms(-retention.completed_ms), limit).await?;
    for (state, tally, keep_ms) in [
        (FAILED, Tally::Failed as i16, retention.failed_ms),
        (CANCELLED, Tally::Cancelled as i16, retention.cancelled_ms),
    ] {
        let left = limit.saturating_sub(rows.len());
        if left == 0 {
            break;
        }
        let cutoff = now.plus_ms(-keep_ms).as_ms();
        // The id contains the creation time, so the oldest jobs come first in their lane.
        let bound = JobId::first_at_ms(cutoff).0;
        rows.extend(
            client
                .query(
                    "DELETE FROM faena.ended WHERE ctid = ANY (ARRAY(
                         SELECT e.ctid FROM faena.lane l CROSS JOIN LATERAL (
                             SELECT ctid FROM faena.ended WHERE lane = l.id AND state = $1 AND id < $2 AND finished_at < $3
                             ORDER BY id LIMIT $4 FOR UPDATE SKIP LOCKED) e LIMIT $4))
                     RETURNING lane, id, $5::int2",
                    &[&state, &bound, &cutoff, &(left as i64), &tally],
                )
                .await?,
        );
    }
    let mut deltas = Deltas::default();
    let mut ids = Vec::with_capacity(rows.len());
    for row in &rows {
        let tally = Tally::from_i16(row.get(2)).ok_or_else(|| StoreError::Internal("unknown tally".into()))?;
        deltas.removed(row.get(0), tally, 1);
        ids.push(row.get::<_, Uuid>(1));
    }
    if !ids.is_empty() {
        remove(client, &ids).await?;
    }
    webhooks::prune(client, retention, limit, now).await?;
    schedules::prune(client, now.plus_ms(-retention.longest_ms()), limit).await?;
    delete_obsolete_cancel_requests(client, now).await?;
    audit::prune(client, now.plus_ms(-retention.audit_ms)).await?;
    apply(client, shard, &deltas).await?;
    Ok(rows.len())
}

/// Deletes old completed jobs from the partitions that can contain them.
///
/// The id contains the creation time, so old jobs come first in their lane, and a lane without them costs one index
/// lookup.
async fn prune_done(client: &Object, cutoff: Timestamp, limit: usize) -> Result<Vec<Row>> {
    let partitions = client
        .query(
            "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
             WHERE i.inhparent = 'faena.done'::regclass AND (c.relname = 'done_default' OR c.relname <= $1) ORDER BY 1",
            &[&partition_name(cutoff.as_ms().div_euclid(DAY_MS) * DAY_MS)],
        )
        .await?;
    let bound = JobId::first_at_ms(cutoff.as_ms()).0;
    let mut rows = Vec::new();
    for partition in partitions {
        let left = limit.saturating_sub(rows.len());
        if left == 0 {
            break;
        }
        let name: String = partition.get(0);
        let sql = format!(
            "DELETE FROM faena.{name} WHERE ctid = ANY (ARRAY(
                 SELECT d.ctid FROM faena.lane l CROSS JOIN LATERAL (
                     SELECT ctid FROM faena.{name} WHERE lane = l.id AND id < $1 AND finished_at < $2
                     ORDER BY id LIMIT $3 FOR UPDATE SKIP LOCKED) d LIMIT $3))
             RETURNING lane, id, {TALLY_COMPLETED}::int2"
        );
        rows.extend(client.query(&sql, &[&bound, &cutoff.as_ms(), &(left as i64)]).await?);
    }
    Ok(rows)
}

/// Deletes cancel requests of jobs that ended before the worker noticed.
async fn delete_obsolete_cancel_requests(client: &Object, now: Timestamp) -> Result<()> {
    let hour_ago = now.plus_ms(-3_600_000).as_ms();
    let rows = client.query("SELECT id FROM faena.cancel_request WHERE at < $1", &[&hour_ago]).await?;
    let ids: Vec<JobId> = rows.iter().map(|row| JobId(row.get(0))).collect();
    let states = read::states_of(client, &ids).await?;
    let obsolete: Vec<Uuid> =
        ids.iter().filter(|id| !states.get(id).is_some_and(|state| state.is_in_flight())).map(|id| id.0).collect();
    if !obsolete.is_empty() {
        client.execute("DELETE FROM faena.cancel_request WHERE id = ANY($1)", &[&obsolete]).await?;
    }
    Ok(())
}

/// Drops the empty partitions of past days.
async fn drop_empty_partitions(shared: &Shared, cutoff: Timestamp) -> Result<()> {
    let client = shared.client().await?;
    let rows = client
        .query(
            "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
             WHERE i.inhparent = 'faena.done'::regclass AND c.relname ~ '^done_[0-9]{8}$' AND c.relname < $1 ORDER BY 1",
            &[&partition_name(cutoff.as_ms().div_euclid(DAY_MS) * DAY_MS)],
        )
        .await?;
    for row in rows {
        let name: String = row.get(0);
        // Locked before it is checked: a job that finishes just now must not be dropped with it.
        let dropped = client
            .batch_execute(&format!(
                "BEGIN; SET LOCAL lock_timeout = '1s'; LOCK TABLE faena.{name} IN ACCESS EXCLUSIVE MODE; \
                 DO $$ BEGIN IF NOT EXISTS (SELECT FROM faena.{name}) THEN DROP TABLE faena.{name}; END IF; END $$; COMMIT"
            ))
            .await;
        if let Err(error) = dropped {
            // A session is reading it; the next round tries again.
            tracing::debug!(partition = name, error = %error_chain(&error), "partition not dropped");
            client.batch_execute("ROLLBACK").await?;
        }
    }
    client.return_to_pool(Ok(()))
}
