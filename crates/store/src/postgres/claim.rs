//! Claims ready jobs.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use deadpool_postgres::Object;
use faena_domain::{Fairness, JobId, Rules, Timestamp};
use futures_util::future::try_join_all;
use parking_lot::Mutex;
use tokio_postgres::{Row, types::ToSql};
use uuid::Uuid;

use super::{Postgres, Shared, candidates, end, limited_claim};
use crate::{
    ClaimRequest, ClaimResult, ClaimStore, ClaimedJob, LaneId, Limited, Owner, Result, RunEnd, RunUpdate, StoreError,
    UpdateResult,
    admit::{self, LimitedClaim},
    assemble::parse_options,
    fair_share::{Candidate, select_fairly},
    sql::sql,
};

#[async_trait]
impl ClaimStore for Postgres {
    async fn job_claim(&self, requests: Vec<ClaimRequest>, now: Timestamp) -> Result<Vec<ClaimResult>> {
        claim(&self.shared, &requests, now).await
    }

    async fn run_update(&self, updates: Vec<RunUpdate>, now: Timestamp) -> Result<Vec<UpdateResult>> {
        self.report(updates, |update| update.run, |_| false, end::Work::Updates, now).await
    }

    async fn job_end(&self, ends: Vec<RunEnd>, now: Timestamp) -> Result<Vec<bool>> {
        let any_keyed = self.shared.lanes.any_keyed(ends.iter().map(|end| end.lane));
        let is_keyed = |end: &RunEnd| any_keyed && self.shared.lanes.any_keyed([end.lane]);
        let answers = self.report(ends, |end| end.run, is_keyed, end::Work::Ends, now).await?;
        Ok(answers.iter().map(UpdateResult::is_accepted).collect())
    }
}

/// Positions up to which this process has claimed each lane.
///
/// While a session holds an old snapshot, deleted rows stay in the index, and a claim from the head would skip over all of
/// them again (measured: from 92 k to 22 k jobs/s while 600 000 were drained; from a remembered position 120–160 k
/// throughout). So a claim starts where the last one stopped, and goes back to the head twice a second, when it finds too few
/// jobs, and when this process inserts something before that position. A job that another node inserts before it waits
/// for at most half a second.
#[derive(Default)]
pub struct Cursors {
    lanes: Mutex<HashMap<LaneId, Cursor>>,
    first_queue: AtomicUsize,
}

#[derive(Clone, Copy)]
struct Cursor {
    ready_at: i64,
    /// When a claim last started at the head.
    from_head: Instant,
}

const BACK_TO_HEAD: Duration = Duration::from_millis(500);
pub const HEAD: i64 = i64::MIN;

impl Cursors {
    pub fn start(&self, lane: LaneId) -> i64 {
        match self.lanes.lock().get(&lane) {
            Some(cursor) if cursor.from_head.elapsed() < BACK_TO_HEAD => cursor.ready_at,
            _ => HEAD,
        }
    }

    fn advance(&self, lane: LaneId, started: i64, ready_at: i64) {
        let mut lanes = self.lanes.lock();
        let cursor = lanes.entry(lane).or_insert(Cursor { ready_at, from_head: Instant::now() });
        cursor.ready_at = ready_at;
        if started == HEAD {
            cursor.from_head = Instant::now();
        }
    }

    /// Records that a job was inserted at `ready_at`.
    pub fn lower(&self, lane: LaneId, ready_at: i64) {
        if let Some(cursor) = self.lanes.lock().get_mut(&lane) {
            cursor.ready_at = cursor.ready_at.min(ready_at);
        }
    }

    pub fn forget(&self, lane: LaneId) {
        self.lanes.lock().remove(&lane);
    }
}

/// Begins a claim, with settings that make the planner use the indexes. It knows nothing about a table that has just
/// been filled, and would sort the whole backlog for every claim (measured: 145 k falls to 20 k jobs/s). The claim
/// order is the primary key, so these settings never hurt. A test checks the plan.
pub const BEGIN_CLAIM: &str = "BEGIN; SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off; \
     SET LOCAL enable_sort = off; SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off; SET LOCAL jit = off";

/// The statement that claims jobs; it claims nothing unless `$guard` is true.
macro_rules! claim_sql {
    ($before:literal, $guard:literal) => {
        sql!(concat!(
            "
    WITH ",
            $before,
            "picked AS (
        DELETE FROM faena.ready WHERE ctid = ANY (ARRAY(
            SELECT ctid FROM faena.ready WHERE lane = $1 AND ready_at >= $2 ",
            $guard,
            "ORDER BY ready_at, id LIMIT $3
            FOR UPDATE SKIP LOCKED))
        RETURNING lane, ready_at, id, retry_count, must_record_start),
    claim AS (
        INSERT INTO faena.claim (run, owner, claimed_at, first_ready_at, ids, retries)
        SELECT nextval('faena.run'), $4, $5, min(ready_at), array_agg(id),
               CASE WHEN bool_or(retry_count > 0) THEN array_agg(retry_count) END
        FROM picked HAVING count(*) > 0
        RETURNING run),
    counted AS (
        INSERT INTO faena.counter AS c (shard, lane, tally, n)
        SELECT $6, $1, t.tally, t.sign * (SELECT count(*) FROM picked)
        FROM claim, (VALUES ({TALLY_QUEUED}::int2, -1), ({TALLY_IN_FLIGHT}::int2, 1)) AS t(tally, sign)
        ON CONFLICT (shard, lane, tally) DO UPDATE SET n = c.n + excluded.n)
    SELECT claim.run, picked.ready_at, picked.id, picked.retry_count, picked.must_record_start,
           job.correlation, job.options, job.payload
    FROM picked JOIN faena.job ON job.id = picked.id CROSS JOIN claim"
        ))
    };
}

pub const CLAIM: &str = claim_sql!("", "");

/// Claims jobs for a worker, unless it has ended or reconnected.
///
/// Ending or resuming a registration locks its row `FOR UPDATE`, and so waits for this claim and then sees it; a status
/// update (which changes no key) does not wait.
pub const CLAIM_FOR_WORKER: &str = claim_sql!(
    "owner AS MATERIALIZED (
        SELECT id FROM faena.worker WHERE id = $4 AND session = $7 AND ended_at IS NULL FOR KEY SHARE),
    ",
    "AND EXISTS (SELECT FROM owner) "
);

/// Claims a few jobs of one lane for each of many workers. Distributes the jobs in the order of the workers, each of
/// which gets its own claim.
///
/// Distributes them by array index: a join would compare all pairs, because the claim needs hash joins off. The run
/// numbers of workers that get nothing stay unused; run numbers only have to grow.
pub const CLAIM_FOR_MANY: &str = sql!("
    WITH owner AS MATERIALIZED (
        SELECT w.id, k.n, k.quota, nextval('faena.run') AS run
        FROM unnest($3::uuid[], $4::int8[], $5::int8[]) WITH ORDINALITY AS k(id, session, quota, n)
        JOIN faena.worker w ON w.id = k.id AND w.session = k.session AND w.ended_at IS NULL
        FOR KEY SHARE OF w),
    slots AS MATERIALIZED (
        SELECT array_agg(id ORDER BY n) AS ids, array_agg(run ORDER BY n) AS runs, array_agg(n ORDER BY n) AS numbers,
               count(*) AS total
        FROM owner, generate_series(1, quota)),
    picked AS (
        DELETE FROM faena.ready WHERE ctid = ANY (ARRAY(
            SELECT ctid FROM faena.ready WHERE lane = $1 AND ready_at >= $2
            ORDER BY ready_at, id LIMIT (SELECT total FROM slots)
            FOR UPDATE SKIP LOCKED))
        RETURNING ready_at, id, retry_count, must_record_start),
    assigned AS MATERIALIZED (
        SELECT p.ready_at, p.id, p.retry_count, p.must_record_start,
               slots.ids[p.index] AS owner, slots.runs[p.index] AS run, slots.numbers[p.index] AS n
        FROM slots, (SELECT *, (row_number() OVER (ORDER BY ready_at, id))::int4 AS index FROM picked) AS p),
    claim AS (
        INSERT INTO faena.claim (run, owner, claimed_at, first_ready_at, ids, retries)
        SELECT run, owner, $6, min(ready_at), array_agg(id),
               CASE WHEN bool_or(retry_count > 0) THEN array_agg(retry_count) END
        FROM assigned GROUP BY run, owner),
    counted AS (
        INSERT INTO faena.counter AS c (shard, lane, tally, n)
        SELECT $7, $1, t.tally, t.sign * picks.n
        FROM (SELECT count(*) AS n FROM picked) AS picks, (VALUES ({TALLY_QUEUED}::int2, -1), ({TALLY_IN_FLIGHT}::int2, 1)) AS t(tally, sign)
        WHERE picks.n > 0
        ON CONFLICT (shard, lane, tally) DO UPDATE SET n = c.n + excluded.n)
    SELECT assigned.run, assigned.ready_at, assigned.id, assigned.retry_count, assigned.must_record_start,
           job.correlation, job.options, job.payload, assigned.n
    FROM assigned JOIN faena.job ON job.id = assigned.id");

/// A request for more jobs than this is not combined with others.
const SMALL_REQUEST: usize = 32;

pub const HEADS: &str =
    "SELECT ready_at, id FROM faena.ready WHERE lane = $1 AND ready_at >= $2 ORDER BY ready_at, id LIMIT $3";

/// Number of requests that share one transaction, at first and at most.
const FIRST_GROUP_SIZE: usize = 2;
const MAX_GROUP_SIZE: usize = 256;

/// Serves one group of requests after the other. Requests with one lane share a transaction, and the groups grow while
/// all requests get as many jobs as they want. So a thousand idle workers do not search a thousand times for one job,
/// and a thousand jobs do not take a thousand commits.
///
/// The jobs of earlier groups are committed, so a later failure is not returned: it rejects the remaining requests, and
/// their callers repeat them.
pub async fn claim(shared: &Shared, requests: &[ClaimRequest], now: Timestamp) -> Result<Vec<ClaimResult>> {
    let mut claims: Vec<ClaimResult> = Vec::new();
    claims.resize_with(requests.len(), ClaimResult::default);
    let mut empty: HashSet<LaneId> = HashSet::new();
    let mut group_size = FIRST_GROUP_SIZE;
    let mut next = 0;
    if requests.iter().flat_map(|request| &request.lanes).any(|lane| !shared.lanes.contains(*lane)) {
        shared.retrying(|| shared.load_lanes()).await?;
    }
    let rules = shared.rules.current();
    while next < requests.len() {
        let group = Group::gather(shared, &rules, requests, next, group_size, &empty);
        next = group.end;
        for (at, limited) in &group.paused {
            empty.insert(limited.lane);
            claims[*at].limited.push(*limited);
        }
        if group.requests.is_empty() {
            continue;
        }
        let taken = if group.has_limits {
            limited_claim::claim(shared, requests, &group, &rules, now).await
        } else {
            let claims = shared.retrying(|| claim_group(shared, requests, &group, now)).await;
            claims.map(|claims| claims.into_iter().map(LimitedClaim::from).collect())
        };
        let taken = match taken {
            Ok(taken) => taken,
            Err(StoreError::Unavailable(_)) if claims.iter().any(|claim| !claim.jobs.is_empty()) => {
                claims.iter_mut().filter(|claim| claim.jobs.is_empty()).for_each(|claim| claim.rejected = true);
                break;
            }
            Err(error) => return Err(error),
        };
        let full =
            taken.iter().zip(&group.requests).all(|(result, (at, _))| result.claim.jobs.len() >= requests[*at].limit);
        group_size = if full { (group_size * 2).min(MAX_GROUP_SIZE) } else { FIRST_GROUP_SIZE };
        for (LimitedClaim { claim, prefetch_limited }, (at, lanes)) in taken.into_iter().zip(group.requests) {
            if requests[at].candidates.is_none() && claim.jobs.len() < requests[at].limit && !claim.rejected {
                empty.extend(lanes.into_iter().filter(|lane| !prefetch_limited.contains(lane)));
            }
            let mut paused = std::mem::take(&mut claims[at].limited);
            claims[at] = claim;
            claims[at].limited.append(&mut paused);
        }
    }
    shared.signal_events();
    Ok(claims)
}

/// Requests that are served in one transaction: several with one lane each, or one with several or keyed lanes.
pub struct Group {
    /// Indexes of the requests, each with the lanes that may have jobs for it.
    pub requests: Vec<(usize, Vec<LaneId>)>,
    /// Lanes whose queue is paused, with the request that named them first.
    paused: Vec<(usize, Limited)>,
    /// Whether its lanes have limits or keys.
    has_limits: bool,
    /// Whether the external queue has chosen the jobs of its requests.
    has_candidates: bool,
    /// The index of the first request after the group.
    end: usize,
}

impl Group {
    fn gather(
        shared: &Shared,
        rules: &Rules,
        requests: &[ClaimRequest],
        from: usize,
        group_size: usize,
        empty: &HashSet<LaneId>,
    ) -> Group {
        let mut group =
            Group { requests: Vec::new(), paused: Vec::new(), has_limits: false, has_candidates: false, end: from };
        for (at, request) in requests.iter().enumerate().skip(from) {
            let lanes = admit::distinct(request.lanes.iter().copied().filter(|lane| !empty.contains(lane)));
            let keyed = shared.lanes.any_keyed(lanes.iter().copied());
            let (lanes, has_limits) = if rules.limits.is_empty() && rules.queues.is_empty() {
                (lanes, keyed)
            } else {
                let known = lanes.into_iter().filter_map(|lane| shared.lanes.get(lane)).collect();
                let (open, paused) = admit::split_paused(rules, known);
                group.paused.extend(paused.into_iter().map(|limited| (at, limited)));
                (open.iter().map(|lane| lane.id).collect(), admit::has_limits_or_keys(rules, &open))
            };
            let chosen = request.candidates.is_some();
            // Requests with candidates read nothing before the claim, so they share a transaction for any lanes.
            let alone = if chosen { has_limits } else { lanes.len() > 1 || (keyed && !lanes.is_empty()) };
            let is_different = !lanes.is_empty() && (has_limits, chosen) != (group.has_limits, group.has_candidates);
            if !group.requests.is_empty() && (alone || is_different) {
                break;
            }
            group.end = at + 1;
            if !lanes.is_empty() {
                group.requests.push((at, lanes));
                (group.has_limits, group.has_candidates) = (has_limits, chosen);
            }
            if alone || group.requests.len() >= group_size {
                break;
            }
        }
        group
    }
}

async fn claim_group(
    shared: &Shared,
    requests: &[ClaimRequest],
    group: &Group,
    now: Timestamp,
) -> Result<Vec<ClaimResult>> {
    if group.has_candidates {
        return candidates::claim_group(shared, requests, group, now).await;
    }
    let client = shared.client().await?;
    let shares: Vec<LaneShare> = match group.requests.as_slice() {
        [(at, lanes)] if lanes.len() > 1 => {
            let quotas = quotas(shared, &client, lanes, requests[*at].limit).await?;
            quotas.into_iter().map(|(lane, quota)| LaneShare { request: 0, lane, quota }).collect()
        }
        singles => singles
            .iter()
            .enumerate()
            .map(|(request, (at, lanes))| LaneShare { request, lane: lanes[0], quota: requests[*at].limit })
            .collect(),
    };
    let owners: Vec<Owner> = group.requests.iter().map(|(at, _)| requests[*at].owner).collect();
    let several_lanes = shares.len() > owners.len();
    let mut jobs = take(shared, &client, &owners, shares, TransactionControl::BeginAndCommit, now).await?;
    let mut claims = Vec::with_capacity(owners.len());
    for (owner, jobs) in owners.into_iter().zip(jobs.drain(..)) {
        let rejected = jobs.is_empty() && !may_claim(&client, owner).await?;
        let jobs = if several_lanes { in_claim_order(shared, jobs) } else { jobs };
        claims.push(ClaimResult { jobs, rejected, ..ClaimResult::default() });
    }
    client.return_to_pool(Ok(claims))
}

/// Returns whether an owner may claim: a node always, a worker only while it is alive and has not reconnected.
pub async fn may_claim(client: &Object, owner: Owner) -> Result<bool> {
    let Owner::Worker { id, session } = owner else { return Ok(true) };
    let sql = "SELECT 1 FROM faena.worker WHERE id = $1 AND session = $2 AND ended_at IS NULL";
    let statement = client.prepare_cached(sql).await?;
    Ok(client.query_opt(&statement, &[&id.0, &session]).await?.is_some())
}

/// Number of jobs that one request may claim from one lane.
#[derive(Clone, Copy)]
pub struct LaneShare {
    /// The index of the request in its group.
    pub request: usize,
    pub lane: LaneId,
    pub quota: usize,
}

/// Whether a statement opens and closes the transaction itself, in the same round trip.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum TransactionControl {
    BeginAndCommit,
    ByCaller,
}

impl TransactionControl {
    async fn run(self, client: &Object, sql: &str) -> Result<()> {
        match self {
            TransactionControl::BeginAndCommit => Ok(client.batch_execute(sql).await?),
            TransactionControl::ByCaller => Ok(()),
        }
    }
}

/// Returns how many jobs to claim from each lane, by reading their heads. Nothing is locked: if another node takes some
/// of these jobs, the claim skips them and takes the next.
async fn quotas(shared: &Shared, client: &Object, lanes: &[LaneId], limit: usize) -> Result<BTreeMap<LaneId, usize>> {
    let statement = client.prepare_cached(HEADS).await?;
    let starts: Vec<i64> = lanes.iter().map(|lane| shared.cursors.start(*lane)).collect();
    let wanted = i64::try_from(limit).unwrap_or(i64::MAX);
    client.batch_execute(BEGIN_CLAIM).await?;
    let seen = try_join_all(lanes.iter().zip(&starts).map(|(lane, start)| {
        let statement = &statement;
        async move { client.query(statement, &[lane, start, &wanted]).await }
    }))
    .await?;
    client.batch_execute("COMMIT").await?;
    let mut candidates = Vec::new();
    for ((lane, rows), start) in lanes.iter().zip(seen).zip(starts) {
        if rows.is_empty() && start != HEAD {
            shared.cursors.forget(*lane);
        }
        let Some(known) = shared.lanes.get(*lane) else { continue };
        let claim_order = shared.rules.current().claim_order(&known.queue);
        candidates.extend(rows.iter().map(|row| Candidate {
            queue: known.queue.clone(),
            claim_order,
            fairness: Fairness::None,
            key: None,
            last_served_at: 0,
            priority: known.priority,
            ready_at: Timestamp::from_ms(row.get(0)),
            id: JobId(row.get(1)),
            row: *lane,
        }));
    }
    let first_queue = shared.cursors.first_queue.fetch_add(1, Ordering::Relaxed);
    let mut quotas = BTreeMap::new();
    for candidate in select_fairly(candidates, limit, first_queue) {
        *quotas.entry(candidate.row).or_insert(0) += 1;
    }
    Ok(quotas)
}

/// Several workers that want jobs of one lane.
struct LaneRequests {
    lane: LaneId,
    ids: Vec<Uuid>,
    sessions: Vec<i64>,
    quotas: Vec<i64>,
}

impl LaneRequests {
    fn of(owners: &[Owner], shares: &[LaneShare]) -> Option<LaneRequests> {
        let lane = shares.first()?.lane;
        if owners.len() < 2
            || owners.len() != shares.len()
            || shares.iter().any(|share| share.lane != lane || share.quota > SMALL_REQUEST)
        {
            return None;
        }
        let mut requests = LaneRequests { lane, ids: Vec::new(), sessions: Vec::new(), quotas: Vec::new() };
        for (owner, share) in owners.iter().zip(shares) {
            let Owner::Worker { id, session } = *owner else { return None };
            requests.ids.push(id.0);
            requests.sessions.push(session);
            requests.quotas.push(i64::try_from(share.quota).unwrap_or(i64::MAX));
        }
        Some(requests)
    }

    /// Claims from the remembered position, and again from the head if that returned too few jobs.
    async fn take(
        mut self,
        shared: &Shared,
        client: &Object,
        control: TransactionControl,
        now: Timestamp,
    ) -> Result<Vec<Vec<ClaimedJob>>> {
        let statement = client.prepare_cached(CLAIM_FOR_MANY).await?;
        let shard = shared.own_shard();
        let mut jobs: Vec<Vec<ClaimedJob>> = Vec::new();
        jobs.resize_with(self.ids.len(), Vec::new);
        let mut start = shared.cursors.start(self.lane);
        loop {
            let now_ms = now.as_ms();
            let parameters: [&(dyn ToSql + Sync); 7] =
                [&self.lane, &start, &self.ids, &self.sessions, &self.quotas, &now_ms, &shard];
            let begin = control.run(client, BEGIN_CLAIM);
            let commit = control.run(client, "COMMIT");
            let claim = client.query(&statement, &parameters);
            let (begun, rows, committed) = futures_util::future::join3(begin, claim, commit).await;
            begun?;
            let rows = rows?;
            committed?;
            let mut reached = start;
            for row in &rows {
                let at = usize::try_from(row.get::<_, i64>(8) - 1).unwrap_or(0);
                let job = claimed_job(self.lane, row)?;
                reached = reached.max(job.ready_at.as_ms());
                jobs[at].push(job);
                self.quotas[at] -= 1;
            }
            if self.quotas.iter().all(|quota| *quota == 0) {
                shared.cursors.advance(self.lane, start, reached);
                return Ok(in_run_order(jobs));
            }
            shared.cursors.forget(self.lane);
            if start == HEAD {
                return Ok(in_run_order(jobs));
            }
            start = HEAD;
        }
    }
}

/// Returns the jobs of each worker in the order in which they run.
fn in_run_order(mut jobs: Vec<Vec<ClaimedJob>>) -> Vec<Vec<ClaimedJob>> {
    for list in &mut jobs {
        list.sort_by_key(|job| (job.ready_at, job.id));
    }
    jobs
}

/// Claims all shares in one transaction, and again from the head of a lane if the remembered position returned too few
/// jobs. Returns the jobs of each owner.
pub async fn take(
    shared: &Shared,
    client: &Object,
    owners: &[Owner],
    shares: Vec<LaneShare>,
    control: TransactionControl,
    now: Timestamp,
) -> Result<Vec<Vec<ClaimedJob>>> {
    if let Some(requests) = LaneRequests::of(owners, &shares) {
        return requests.take(shared, client, control, now).await;
    }
    let for_node = client.prepare_cached(CLAIM).await?;
    let for_worker = client.prepare_cached(CLAIM_FOR_WORKER).await?;
    let shard = shared.own_shard();
    let mut jobs: Vec<Vec<ClaimedJob>> = Vec::new();
    jobs.resize_with(owners.len(), Vec::new);
    let mut open: Vec<(LaneShare, i64)> =
        shares.into_iter().map(|share| (share, shared.cursors.start(share.lane))).collect();
    while !open.is_empty() {
        let claims = open.iter().map(|(share, start)| {
            let (for_node, for_worker, shard) = (&for_node, &for_worker, &shard);
            let quota = i64::try_from(share.quota).unwrap_or(i64::MAX);
            async move {
                let owner = &owners[share.request];
                let (id, now_ms) = (owner.uuid(), now.as_ms());
                let mut parameters: Vec<&(dyn ToSql + Sync)> = vec![&share.lane, start, &quota, &id, &now_ms, shard];
                match owner {
                    Owner::Node(_) => client.query(for_node, &parameters).await,
                    Owner::Worker { session, .. } => {
                        parameters.push(session);
                        client.query(for_worker, &parameters).await
                    }
                }
            }
        });
        let begin = control.run(client, BEGIN_CLAIM);
        let commit = control.run(client, "COMMIT");
        let (begun, claimed, committed) = futures_util::future::join3(begin, try_join_all(claims), commit).await;
        begun?;
        let claimed = claimed?;
        committed?;
        let mut again = Vec::new();
        for ((share, start), rows) in open.into_iter().zip(claimed) {
            let LaneShare { request, lane, quota } = share;
            let mut lane_jobs = rows.iter().map(|row| claimed_job(lane, row)).collect::<Result<Vec<_>>>()?;
            lane_jobs.sort_by_key(|job| (job.ready_at, job.id));
            match lane_jobs.last() {
                Some(last) if lane_jobs.len() == quota => shared.cursors.advance(lane, start, last.ready_at.as_ms()),
                _ => {
                    shared.cursors.forget(lane);
                    // Fewer than requested, and the head was not read: there may be more before the start
                    // position.
                    if start != HEAD {
                        again.push((LaneShare { request, lane, quota: quota - lane_jobs.len() }, HEAD));
                    }
                }
            }
            jobs[request].extend(lane_jobs);
        }
        open = again;
    }
    Ok(jobs)
}

pub fn claimed_job(lane: LaneId, row: &Row) -> Result<ClaimedJob> {
    Ok(ClaimedJob {
        run: row.get(0),
        id: JobId(row.get(2)),
        lane,
        ready_at: Timestamp::from_ms(row.get(1)),
        retry_count: u32::try_from(row.get::<_, i16>(3)).unwrap_or(0),
        must_record_start: row.get(4),
        limited: None,
        correlation_id: row.get(5),
        options: parse_options(row.get(6))?,
        payload: row.get(7),
    })
}

pub fn in_claim_order(shared: &Shared, jobs: Vec<ClaimedJob>) -> Vec<ClaimedJob> {
    let count = jobs.len();
    let candidates = jobs
        .into_iter()
        .filter_map(|job| {
            let lane = shared.lanes.get(job.lane)?;
            Some(Candidate {
                claim_order: shared.rules.current().claim_order(&lane.queue),
                queue: lane.queue,
                fairness: Fairness::None,
                key: None,
                last_served_at: 0,
                priority: lane.priority,
                ready_at: job.ready_at,
                id: job.id,
                row: job,
            })
        })
        .collect();
    select_fairly(candidates, count, 0).into_iter().map(|candidate| candidate.row).collect()
}
