//! Reads single jobs, counters and due work.

use std::{
    collections::{BTreeMap, HashMap},
    sync::atomic::Ordering,
};

use deadpool_postgres::Object;
use faena_domain::{JobId, JobState, JobView, LogEntry, NodeId, Priority, Step, Timestamp};
use tokio_postgres::Row;
use uuid::Uuid;

use super::{Shared, job_log, nodes::OWNERLESS, rules};
use crate::{
    Counts, InFlightCount, Lane, LaneId, Poll, Result, Signal, Tally,
    assemble::{
        self, Details, FinishedRow, JobParts, JobRow, JobWorkers, Location, RunningRow, StepRow, parse_options,
    },
    claim_limits::stored_wait_cause,
    job_log::SHOWN_ENTRIES,
    jobs::state_of_code,
    plan::key_number,
    progress::Steps,
    sql::{CANCELLED, COMPLETED, FAILED, PENDING, RETRYING, sql},
    workers::JobWorker,
};

/// Begins a snapshot, so that a job that moves between tables is seen in one of them. Disables sequential scans and
/// joins that a planner without statistics might choose, and the compilation of queries, which takes longer than the
/// index lookups that these reads need.
pub const BEGIN_READ: &str = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET LOCAL jit = off; \
     SET LOCAL enable_seqscan = off; SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off";

pub async fn ping(shared: &Shared) -> Result<()> {
    let client = shared.client().await?;
    let answer = client.batch_execute("SELECT 1").await;
    client.return_to_pool(answer.map_err(Into::into))
}

/// Checks the free space: writes as much as a large job needs into a new table, and removes the table.
///
/// # Errors
/// `StoreError::Unavailable` with a public reason if the disk is full.
pub async fn check_space(shared: &Shared) -> Result<()> {
    let client = shared.begin().await?;
    let written = client
        .batch_execute(
            "CREATE TABLE faena.space_check AS
             SELECT string_agg(md5(n::text || clock_timestamp()), '') FROM generate_series(1, 16384) n GROUP BY n % 16",
        )
        .await;
    let rolled_back = client.batch_execute("ROLLBACK").await;
    client.return_to_pool(written.and(rolled_back).map_err(Into::into))
}

/// Returns all lanes, and the ids of those that are retired.
pub async fn lanes(client: &Object) -> Result<(Vec<Lane>, Vec<LaneId>)> {
    let rows = client.query("SELECT id, queue, type, priority, keyed, retired FROM faena.lane", &[]).await?;
    let retired = rows.iter().filter(|row| row.get(5)).map(|row| row.get(0)).collect();
    let lanes = rows
        .iter()
        .map(|row| Lane {
            id: row.get(0),
            queue: row.get(1),
            kind: row.get(2),
            priority: Priority::from_rank(row.get(3)).unwrap_or_default(),
            keyed: row.get(4),
        })
        .collect();
    Ok((lanes, retired))
}

/// Returns the states of jobs, from the tables their ids are in. Jobs that do not exist are left out.
pub async fn states_of(client: &Object, ids: &[JobId]) -> Result<HashMap<JobId, JobState>> {
    if ids.is_empty() {
        return Ok(HashMap::new());
    }
    let ids: Vec<Uuid> = ids.iter().map(|id| id.0).collect();
    let statement = client
        .prepare_cached(
            sql!("SELECT j.id, coalesce(
                 (SELECT {COMPLETED}::int2 FROM faena.done d WHERE d.lane = j.lane AND d.id = j.id LIMIT 1),
                 (SELECT {QUEUED}::int2 FROM faena.ready r WHERE r.lane = j.lane AND r.id = j.id LIMIT 1),
                 (SELECT w.state FROM faena.waiting w WHERE w.lane = j.lane AND w.state IN ({PENDING}, {RETRYING}) AND w.id = j.id LIMIT 1),
                 (SELECT e.state FROM faena.ended e WHERE e.lane = j.lane AND e.state IN ({FAILED}, {CANCELLED}) AND e.id = j.id LIMIT 1),
                 (SELECT {PROCESSING}::int2 FROM faena.running u WHERE u.id = j.id),
                 -- Claimed by a worker that is not connected yet; reads only the claims of such workers.
                 (SELECT {SCHEDULED}::int2 FROM faena.worker k JOIN faena.claim c ON c.owner = k.id
                  WHERE k.ended_at IS NULL AND k.state < {WORKER_READY} AND c.ids @> ARRAY[j.id]
                    AND NOT EXISTS (SELECT FROM faena.attempt a WHERE a.id = j.id AND a.run = c.run) LIMIT 1),
                 {ASSIGNED}::int2)
             FROM faena.job j WHERE j.id = ANY($1)"),
        )
        .await?;
    let rows = client.query(&statement, &[&ids]).await?;
    Ok(rows.iter().map(|row| (JobId(row.get(0)), state_of_code(row.get(1)))).collect())
}

/// Returns the workers among these ids.
pub async fn job_workers(client: &Object, ids: impl Iterator<Item = Uuid>) -> Result<JobWorkers> {
    let ids: Vec<Uuid> = ids.collect();
    if ids.is_empty() {
        return Ok(JobWorkers::new());
    }
    let statement = client
        .prepare_cached(sql!(
            "SELECT id, key, ended_at IS NULL AND state < {WORKER_READY} FROM faena.worker WHERE id = ANY($1)"
        ))
        .await?;
    let rows = client.query(&statement, &[&ids]).await?;
    Ok(rows.iter().map(|row| (row.get(0), JobWorker { key: row.get(1), is_starting: row.get(2) })).collect())
}

pub async fn step_count(client: &Object, id: JobId) -> Result<Steps> {
    let statement = client
        .prepare_cached(
            "SELECT count(*), (SELECT total FROM faena.step WHERE id = $1 AND total IS NOT NULL
                               ORDER BY at DESC, name COLLATE \"C\" DESC LIMIT 1)
             FROM faena.step WHERE id = $1",
        )
        .await?;
    let row = client.query_one(&statement, &[&id.0]).await?;
    Ok(Steps { completed: u32::try_from(row.get::<_, i64>(0)).unwrap_or(u32::MAX), total: total_of(&row, 1) })
}

/// Returns the finished steps of these jobs.
pub async fn steps(shared: &Shared, ids: &[JobId]) -> Result<Vec<(JobId, Step)>> {
    let client = shared.client().await?;
    let rows = step_rows(&client, ids).await;
    client.return_to_pool(rows)?.into_iter().map(|(id, row)| Ok((id, row.step()?))).collect()
}

async fn step_rows(client: &Object, ids: &[JobId]) -> Result<Vec<(JobId, StepRow)>> {
    let ids: Vec<Uuid> = ids.iter().map(|id| id.0).collect();
    let rows = client
        .query(
            "SELECT s.id, s.name, s.run, s.at, s.result
             FROM unnest($1::uuid[]) WITH ORDINALITY AS k(id, n) JOIN faena.step s ON s.id = k.id
             ORDER BY k.n, s.at, s.name COLLATE \"C\"",
            &[&ids],
        )
        .await?;
    let step = |row: &Row| StepRow {
        name: row.get(1),
        run: row.get(2),
        at: Timestamp::from_ms(row.get(3)),
        result: row.get(4),
    };
    Ok(rows.iter().map(|row| (JobId(row.get(0)), step(row))).collect())
}

fn total_of(row: &Row, column: usize) -> Option<u32> {
    row.get::<_, Option<i32>>(column).and_then(|total| u32::try_from(total).ok())
}

pub async fn next_due_at(client: &Object) -> Result<Option<Timestamp>> {
    let statement = client.prepare_cached("SELECT min(due_at) FROM faena.waiting").await?;
    Ok(client.query_one(&statement, &[]).await?.get::<_, Option<i64>>(0).map(Timestamp::from_ms))
}

pub async fn next_expiry_at(client: &Object) -> Result<Option<Timestamp>> {
    let statement = client.prepare_cached("SELECT min(expires_at) FROM faena.expiry").await?;
    Ok(client.query_one(&statement, &[]).await?.get::<_, Option<i64>>(0).map(Timestamp::from_ms))
}

pub async fn counts(shared: &Shared) -> Result<Counts> {
    let client = shared.client().await?;
    let counts = counts_in(&client).await;
    client.return_to_pool(counts)
}

pub async fn counts_in(client: &Object) -> Result<Counts> {
    let statement =
        client.prepare_cached("SELECT lane, tally, sum(n)::int8 FROM faena.counter GROUP BY lane, tally").await?;
    let mut by_lane = BTreeMap::new();
    for row in client.query(&statement, &[]).await? {
        if let Some(tally) = Tally::from_i16(row.get(1)) {
            by_lane.insert((row.get(0), tally), row.get(2));
        }
    }
    Ok(Counts { by_lane })
}

/// Counts the jobs in flight that have started, and those whose worker is being started.
pub async fn in_flight_counts(shared: &Shared) -> Result<Vec<InFlightCount>> {
    let client = shared.client().await?;
    let rows = client
        .query(
            sql!(
                "SELECT lane, {PROCESSING}::int2, count(*) FROM faena.running GROUP BY lane
                 UNION ALL
                 SELECT j.lane, {SCHEDULED}::int2, count(*) FROM faena.worker w JOIN faena.claim c ON c.owner = w.id
                     CROSS JOIN LATERAL unnest(c.ids) AS i(id) JOIN faena.job j ON j.id = i.id
                 WHERE w.ended_at IS NULL AND w.state < {WORKER_READY} GROUP BY j.lane"
            ),
            &[],
        )
        .await
        .map_err(Into::into);
    let rows = client.return_to_pool(rows)?;
    let count = |row: &Row| InFlightCount { lane: row.get(0), state: state_of_code(row.get(1)), count: row.get(2) };
    Ok(rows.iter().map(count).collect())
}

/// Reads everything that an idle node polls for, with one query. If there are cancel requests, a second one reads them.
pub async fn poll(shared: &Shared, node: NodeId, now: Timestamp) -> Result<Poll> {
    let client = shared.client().await?;
    let result = poll_in(&client, node, now).await;
    let (poll, digests, has_subscription) = client.return_to_pool(result)?;
    if has_subscription {
        // Another node may have made the subscription. The function that deletes expired subscriptions resets this when
        // none is left.
        shared.events_on.store(true, Ordering::Relaxed);
    }
    if digests.replace_rules(shared) {
        super::rules::load(shared).await?;
        shared.notifier.send_locally(Signal::Rules);
    }
    if digests.replace_api_keys(shared) {
        super::api_keys::load(shared).await?;
    }
    if poll.ready_lanes.iter().any(|lane| !shared.lanes.contains(*lane)) {
        shared.load_lanes().await?;
    }
    shared.notifier.nodes_seen(poll.nodes);
    Ok(poll)
}

/// Hashes that change whenever the settings of queues and limits, or the API keys, change.
struct Digests {
    rules: String,
    api_keys: String,
}

impl Digests {
    /// Remembers the digest of the rules. Returns whether it has changed.
    fn replace_rules(&self, shared: &Shared) -> bool {
        shared.rules_seen.lock().replace(self.rules.clone()).as_ref() != Some(&self.rules)
    }

    /// Remembers the digest of the API keys. Returns whether it has changed.
    fn replace_api_keys(&self, shared: &Shared) -> bool {
        shared.api_keys_seen.lock().replace(self.api_keys.clone()).as_ref() != Some(&self.api_keys)
    }
}

/// Returns the poll, the digests of what is cached, and whether a subscription exists.
async fn poll_in(client: &Object, node: NodeId, now: Timestamp) -> Result<(Poll, Digests, bool)> {
    let statement = client
        .prepare_cached(&format!(
            // Skips from lane to lane in the index: the cost grows with the number of lanes that have jobs, not
            // with the jobs. Cancel requests are few, so they are read first, and then their owners.
            "WITH RECURSIVE owners(id) AS (
                 SELECT $1 UNION ALL SELECT id FROM faena.worker WHERE node = $1 AND ended_at IS NULL),
             lanes(lane) AS (
                 (SELECT lane FROM faena.ready ORDER BY lane LIMIT 1)
                 UNION ALL
                 SELECT (SELECT r.lane FROM faena.ready r WHERE r.lane > lanes.lane ORDER BY r.lane LIMIT 1)
                 FROM lanes WHERE lanes.lane IS NOT NULL)
             SELECT ARRAY(SELECT lane FROM lanes WHERE lane IS NOT NULL),
                    ARRAY(SELECT r.id FROM faena.cancel_request r WHERE EXISTS (
                        SELECT FROM faena.claim c WHERE c.ids @> ARRAY[r.id] AND c.owner IN (SELECT id FROM owners))
                        ORDER BY r.id LIMIT 1000),
                    least((SELECT min(due_at) FROM faena.waiting), (SELECT min(expires_at) FROM faena.expiry)),
                    (SELECT count(*) FROM faena.node),
                    EXISTS (SELECT FROM faena.node WHERE lease_until < $2)
                        OR EXISTS (SELECT FROM faena.claim c WHERE {OWNERLESS})
                        OR EXISTS (SELECT FROM faena.worker w WHERE w.ended_at IS NULL AND w.node IS NOT NULL
                            AND NOT EXISTS (SELECT FROM faena.node n WHERE n.id = w.node)),
                    md5(concat((SELECT string_agg(q::text, ',' ORDER BY name) FROM faena.queue q), '|',
                        (SELECT string_agg(concat_ws(' ', scope, name, coalesce(concurrency, 0), coalesce(rate_count, 0),
                            coalesce(rate_period_ms, 0)), ',' ORDER BY scope, name) FROM faena.limit_rule))),
                    EXISTS (SELECT FROM faena.subscription),
                    md5(coalesce((SELECT string_agg(concat_ws(' ', id, rotated_at, coalesce(revoked_at, 0)), ',' ORDER BY id)
                        FROM faena.api_key), ''))"
        ))
        .await?;
    let row = client.query_one(&statement, &[&node.0, &now.as_ms()]).await?;
    let ids: Vec<Uuid> = row.get(1);
    let mut cancel_requests = Vec::new();
    if !ids.is_empty() {
        let rows = client.query("SELECT id, reason FROM faena.cancel_request WHERE id = ANY($1)", &[&ids]).await?;
        cancel_requests = rows.iter().map(|row| (JobId(row.get(0)), row.get(1))).collect();
    }
    let poll = Poll {
        ready_lanes: row.get(0),
        cancel_requests,
        next_due_at: row.get::<_, Option<i64>>(2).map(Timestamp::from_ms),
        nodes: usize::try_from(row.get::<_, i64>(3)).unwrap_or(1),
        needs_recovery: row.get(4),
    };
    Ok((poll, Digests { rules: row.get(5), api_keys: row.get(7) }, row.get(6)))
}

pub async fn get(shared: &Shared, id: JobId) -> Result<Option<JobView>> {
    let client = shared.client().await?;
    let parts = parts(shared, &client, id, SHOWN_ENTRIES).await;
    client.return_to_pool(parts)?.map(assemble::view).transpose()
}

/// Returns the whole log of a job.
pub async fn log(shared: &Shared, id: JobId) -> Result<Option<Vec<LogEntry>>> {
    let client = shared.client().await?;
    let parts = parts(shared, &client, id, usize::MAX).await;
    let view = client.return_to_pool(parts)?.map(assemble::whole_view).transpose()?;
    Ok(view.map(|view| view.execution_log))
}

/// Returns the rows of a job, with up to `max_messages` of its newest messages.
async fn parts(shared: &Shared, client: &Object, id: JobId, max_messages: usize) -> Result<Option<JobParts>> {
    client.batch_execute(BEGIN_READ).await?;
    let Some((row, mut location)) = rows_of(shared, client, &[id]).await?.into_iter().next() else {
        client.batch_execute("COMMIT").await?;
        return Ok(None);
    };
    if let Location::Ready { ready_at, limited, .. } = &mut location {
        *limited = limited_by(client, &row, *ready_at).await?;
    }
    let (messages, omitted) = job_log::messages(client, id, max_messages).await?;
    let details = Details {
        attempts: attempt_rows(client, id).await?,
        messages,
        omitted,
        stale: job_log::stale(client, id).await?,
        steps: step_rows(client, &[id]).await?.into_iter().map(|(_, row)| row).collect(),
    };
    let workers = job_workers(
        client,
        location.worker_id().into_iter().chain(details.attempts.iter().filter_map(|attempt| attempt.worker)),
    )
    .await?;
    client.batch_execute("COMMIT").await?;
    Ok(Some(JobParts { row, location, details, workers }))
}

async fn attempt_rows(client: &Object, id: JobId) -> Result<Vec<FinishedRow>> {
    let rows = client
        .query(
            "SELECT state, run, retry_count, worker, started_at, finished_at, NULL::text, error, reason, log
             FROM faena.attempt WHERE id = $1 ORDER BY run",
            &[&id.0],
        )
        .await?;
    Ok(rows.iter().map(|row| finished_row(row, 0)).collect())
}

/// Returns the ends of a job's runs, including the last one if the job has finished.
pub async fn ends_of(client: &Object, id: JobId) -> Result<Vec<FinishedRow>> {
    let mut rows = attempt_rows(client, id).await?;
    if let Some(job) = client.query_opt("SELECT lane FROM faena.job WHERE id = $1", &[&id.0]).await?
        && let Some(Location::Finished(end)) = locations_of(client, &[job.get(0)], &[id.0]).await?.remove(&id.0)
    {
        rows.push(end);
    }
    Ok(rows)
}

/// Returns when a ready job began to wait for a limit, and a description of the limit.
async fn limited_by(client: &Object, row: &JobRow, ready_at: Timestamp) -> Result<Option<(Timestamp, String)>> {
    if let Some(key) = row.options.concurrency_key.as_deref().filter(|_| row.lane.keyed) {
        let closed = client
            .query_opt(
                "SELECT limited_at, limited_by FROM faena.key_queue WHERE lane = $1 AND key = $2 AND NOT open",
                &[&row.lane.id, &key_number(key)],
            )
            .await?;
        if let Some(closed) = closed {
            return Ok(Some((Timestamp::from_ms(closed.get(0)), closed.get(1))));
        }
    }
    Ok(stored_wait_cause(&rules::limits_in(client).await?, &row.lane, ready_at))
}

pub async fn rows_of(shared: &Shared, client: &Object, ids: &[JobId]) -> Result<Vec<(JobRow, Location)>> {
    let ids: Vec<Uuid> = ids.iter().map(|id| id.0).collect();
    let rows = client
        .query(
            "SELECT j.id, j.lane, j.correlation, j.options, j.payload, p.progress
             FROM faena.job j LEFT JOIN faena.progress p ON p.id = j.id WHERE j.id = ANY($1) ORDER BY j.id DESC",
            &[&ids],
        )
        .await?;
    if rows.iter().any(|row| !shared.lanes.contains(row.get(1))) {
        shared.load_lanes().await?;
    }
    let ids: Vec<Uuid> = rows.iter().map(|row| row.get(0)).collect();
    let lanes: Vec<LaneId> = rows.iter().map(|row| row.get(1)).collect();
    let mut locations = locations_of(client, &lanes, &ids).await?;
    let mut found = Vec::with_capacity(rows.len());
    for row in rows {
        let id: Uuid = row.get(0);
        let location = locations.remove(&id).unwrap_or(Location::Between);
        let row = JobRow {
            id: JobId(id),
            lane: shared.lanes.require(row.get(1))?,
            correlation: row.get(2),
            options: parse_options(row.get(3))?,
            payload: row.get(4),
            progress: row.get(5),
        };
        found.push((row, location));
    }
    Ok(found)
}

pub async fn locations_of(client: &Object, lanes: &[LaneId], ids: &[Uuid]) -> Result<HashMap<Uuid, Location>> {
    let mut locations = HashMap::new();
    let keys = "unnest($1::int4[], $2::uuid[]) AS k(lane, id)";
    let finished = client
        .prepare_cached(&format!(
            "SELECT k.id, {COMPLETED}::int2, d.run, d.retry_count, d.worker, d.started_at, d.finished_at, d.result,
                    NULL::text, NULL::text, d.log
             FROM {keys} JOIN faena.done d ON d.lane = k.lane AND d.id = k.id
             UNION ALL
             SELECT k.id, e.state, e.run, e.retry_count, e.worker, e.started_at, e.finished_at, NULL, e.error, e.reason, e.log
             FROM {keys} JOIN faena.ended e ON e.lane = k.lane AND e.state IN ({FAILED}, {CANCELLED}) AND e.id = k.id"
        ))
        .await?;
    for row in client.query(&finished, &[&lanes, &ids]).await? {
        locations.insert(row.get(0), Location::Finished(finished_row(&row, 1)));
    }
    let ready = client
        .prepare_cached(&format!(
            "SELECT k.id, r.ready_at, r.retry_count FROM {keys} JOIN faena.ready r ON r.lane = k.lane AND r.id = k.id"
        ))
        .await?;
    for row in client.query(&ready, &[&lanes, &ids]).await? {
        locations.insert(
            row.get(0),
            Location::Ready { ready_at: Timestamp::from_ms(row.get(1)), retry_count: count(&row, 2), limited: None },
        );
    }
    let waiting = client
        .prepare_cached(&format!(
            "SELECT k.id, w.state, w.due_at, w.blocked, w.retry_count
             FROM {keys} JOIN faena.waiting w ON w.lane = k.lane AND w.state IN ({PENDING}, {RETRYING}) AND w.id = k.id"
        ))
        .await?;
    for row in client.query(&waiting, &[&lanes, &ids]).await? {
        let location = Location::Waiting {
            state: state_of_code(row.get(1)),
            due_at: Timestamp::from_ms(row.get(2)),
            blocked: row.get(3),
            retry_count: count(&row, 4),
        };
        locations.insert(row.get(0), location);
    }
    let remaining: Vec<Uuid> = ids.iter().copied().filter(|id| !locations.contains_key(id)).collect();
    if !remaining.is_empty() {
        in_flight_locations(client, &remaining, &mut locations).await?;
    }
    Ok(locations)
}

pub async fn in_flight_locations(
    client: &Object,
    job_ids: &[Uuid],
    locations: &mut HashMap<Uuid, Location>,
) -> Result<()> {
    // A claim contains the ids of many jobs; there are few claims at any time.
    let claims = client
        .query(
            "SELECT u.id, c.run, c.claimed_at, c.first_ready_at, u.retry, c.owner FROM faena.claim c,
                    unnest(c.ids, c.retries) AS u(id, retry)
             WHERE c.ids && $1 AND u.id = ANY($1) ORDER BY c.run",
            &[&job_ids],
        )
        .await?;
    for row in claims {
        let id: Uuid = row.get(0);
        let location = Location::Assigned {
            run: row.get(1),
            owner: row.get(5),
            claimed_at: Timestamp::from_ms(row.get(2)),
            ready_at: Timestamp::from_ms(row.get(3)).max(JobId(id).created_at()),
            retry_count: row.get::<_, Option<i16>>(4).and_then(|n| u32::try_from(n).ok()).unwrap_or(0),
        };
        locations.insert(id, location);
    }
    let running = client
        .query(
            "SELECT r.id, r.run, r.worker, r.retry_count, r.ready_at, coalesce(c.claimed_at, r.started_at), r.started_at,
                    r.updated_at
             FROM faena.running r LEFT JOIN faena.claim c ON c.run = r.run WHERE r.id = ANY($1)",
            &[&job_ids],
        )
        .await?;
    for row in running {
        let running = RunningRow {
            run: row.get(1),
            worker: row.get(2),
            retry_count: count(&row, 3),
            ready_at: Timestamp::from_ms(row.get(4)),
            claimed_at: Timestamp::from_ms(row.get(5)),
            started_at: Timestamp::from_ms(row.get(6)),
            updated_at: Timestamp::from_ms(row.get(7)),
        };
        locations.insert(row.get(0), Location::Running(running));
    }
    Ok(())
}

pub fn finished_row(row: &Row, first: usize) -> FinishedRow {
    FinishedRow {
        state: state_of_code(row.get(first)),
        run: row.get(first + 1),
        retry_count: count(row, first + 2),
        worker: row.get(first + 3),
        started_at: row.get::<_, Option<i64>>(first + 4).map(Timestamp::from_ms),
        finished_at: Timestamp::from_ms(row.get(first + 5)),
        result: row.get(first + 6),
        error: row.get(first + 7),
        reason: row.get(first + 8),
        log: row.get(first + 9),
    }
}

fn count(row: &Row, column: usize) -> u32 {
    u32::try_from(row.get::<_, i16>(column)).unwrap_or(0)
}

/// Returns when the first ready job of each lane became ready.
pub async fn ready_since(shared: &Shared) -> Result<Vec<(LaneId, Timestamp)>> {
    let client = shared.client().await?;
    let rows = ready_since_in(&client).await;
    client.return_to_pool(rows)
}

async fn ready_since_in(client: &Object) -> Result<Vec<(LaneId, Timestamp)>> {
    // Skips from lane to lane in the index, as a poll does.
    let statement = client
        .prepare_cached(
            "WITH RECURSIVE lanes(lane) AS (
                 (SELECT lane FROM faena.ready ORDER BY lane LIMIT 1)
                 UNION ALL
                 SELECT (SELECT r.lane FROM faena.ready r WHERE r.lane > lanes.lane ORDER BY r.lane LIMIT 1)
                 FROM lanes WHERE lanes.lane IS NOT NULL)
             SELECT l.lane, h.ready_at FROM lanes l CROSS JOIN LATERAL (
                 SELECT ready_at FROM faena.ready r WHERE r.lane = l.lane ORDER BY ready_at LIMIT 1) h",
        )
        .await?;
    let rows = client.query(&statement, &[]).await?;
    Ok(rows.iter().map(|row| (row.get(0), Timestamp::from_ms(row.get(1)))).collect())
}
