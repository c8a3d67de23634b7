//! Claims jobs of lanes with limits or keys.
//!
//! Limits are exact over all nodes. For a limit of the system, a queue or a type, the claim locks the row of the limit and counts
//! the jobs in flight in a later statement, so it sees every earlier claim; a job whose end is not committed counts as in flight.
//! For a key, the claim takes the advisory lock of the key, and skips the key queue if another claim has that lock.
//!
//! Locks are taken in this order: the worker, limits, key queues and keys, ready jobs. A claim waits only for the first two,
//! so there is no deadlock.

use std::collections::{HashMap, HashSet};

use deadpool_postgres::Object;
use faena_domain::{JobId, Rules, Scope, Timestamp};
use futures_util::future::join4;
use tokio_postgres::types::ToSql;

use super::{
    PooledClient, Shared, candidates,
    claim::{BEGIN_CLAIM, Group, HEAD, HEADS, LaneShare, TransactionControl, may_claim, take},
    key_queues::{next_opening_at, open_due, read_key_queue_jobs, read_keys, read_open_key_queues, write_key_queues},
    rules,
};
use crate::{
    ClaimRequest, ClaimResult, ClaimedJob, Lane, LaneId, Owner, Result,
    admit::{self, Admission, BUSY_MS, LimitedClaim, ReadyJob},
    claim_limits::{ClaimLimit, ClaimLimits},
    sql::sql,
};

/// Locks and reads the limits of the given scopes.
pub const LOCK_LIMITS: &str =
    "SELECT r.scope, r.name, r.concurrency, r.rate_count, r.rate_period_ms, r.tokens, r.tokens_at, r.origin, r.changed_at,
            r.changed_by, r.reached_at
     FROM unnest($1::int2[], $2::text[]) AS s(scope, name)
     JOIN faena.limit_rule r ON r.scope = s.scope AND r.name = s.name
     ORDER BY r.scope, r.name FOR UPDATE OF r";

/// Counts the jobs in flight of each scope.
pub const IN_FLIGHT: &str = sql!("SELECT s.scope, s.name, (
         SELECT coalesce(sum(c.n), 0)::int8 FROM faena.lane l
         CROSS JOIN LATERAL (SELECT n FROM faena.counter WHERE lane = l.id AND tally = {TALLY_IN_FLIGHT}) c
         WHERE s.scope = {SCOPE_SYSTEM} OR (s.scope = {SCOPE_QUEUE} AND l.queue = s.name) OR (s.scope = {SCOPE_TYPE} AND l.type = s.name))
     FROM unnest($1::int2[], $2::text[]) AS s(scope, name)");

/// Claims the given jobs. Skips jobs that another transaction is cancelling or moving. If the session of a worker is
/// given, claims nothing for a worker that has ended or reconnected.
pub const TAKE: &str = sql!("
    WITH owner AS MATERIALIZED (
        SELECT id FROM faena.worker WHERE id = $4 AND session = $7 AND ended_at IS NULL FOR KEY SHARE),
    picked AS (
        DELETE FROM faena.ready WHERE ctid = ANY (ARRAY(
            SELECT r.ctid FROM unnest($1::int4[], $2::int8[], $3::uuid[]) AS c(lane, ready_at, id)
            CROSS JOIN LATERAL (
                SELECT ctid FROM faena.ready WHERE lane = c.lane AND ready_at = c.ready_at AND id = c.id
                FOR UPDATE SKIP LOCKED) AS r
            WHERE $7::int8 IS NULL OR EXISTS (SELECT FROM owner)))
        RETURNING lane, ready_at, id, retry_count, must_record_start, key),
    keyed AS (
        INSERT INTO faena.key_in_flight (key, id) SELECT key, id FROM picked WHERE key IS NOT NULL ON CONFLICT DO NOTHING),
    claim AS (
        INSERT INTO faena.claim (run, owner, claimed_at, first_ready_at, ids, retries)
        SELECT nextval('faena.run'), $4, $5, min(ready_at), array_agg(id),
               CASE WHEN bool_or(retry_count > 0) THEN array_agg(retry_count) END
        FROM picked HAVING count(*) > 0
        RETURNING run),
    counted AS (
        INSERT INTO faena.counter AS c (shard, lane, tally, n)
        SELECT $6, s.lane, t.tally, t.sign * s.n
        FROM (SELECT lane, count(*) AS n FROM picked GROUP BY lane) AS s, (VALUES ({TALLY_QUEUED}::int2, -1), ({TALLY_IN_FLIGHT}::int2, 1)) AS t(tally, sign)
        ORDER BY 2, 3
        ON CONFLICT (shard, lane, tally) DO UPDATE SET n = c.n + excluded.n)
    SELECT claim.run, picked.ready_at, picked.id, picked.retry_count, picked.must_record_start,
           job.correlation, job.options, job.payload, picked.lane, picked.key
    FROM picked JOIN faena.job ON job.id = picked.id CROSS JOIN claim");

/// Maximum number of rounds of reading key queues. Each round closes the key queues of keys at their limit, so that the next
/// round reads the key queues behind them.
const ROUNDS: usize = 16;

/// Result of one transaction.
struct ClaimBatch {
    claims: Vec<LimitedClaim>,
    /// Whether there are more open key queues than were read.
    more: bool,
}

pub async fn claim(
    shared: &Shared,
    requests: &[ClaimRequest],
    group: &Group,
    rules: &Rules,
    now: Timestamp,
) -> Result<Vec<LimitedClaim>> {
    let mut remaining: Vec<ClaimRequest> = group
        .requests
        .iter()
        .map(|(at, lanes)| ClaimRequest { lanes: lanes.clone(), ..requests[*at].clone() })
        .collect();
    let mut claims: Vec<LimitedClaim> = Vec::new();
    claims.resize_with(remaining.len(), LimitedClaim::default);
    for _ in 0..ROUNDS {
        let served = match shared.retrying(|| serve(shared, &remaining, rules, now)).await {
            Ok(served) => served,
            // The claims of the earlier rounds are committed.
            Err(_) if claims.iter().any(|limited| !limited.claim.jobs.is_empty()) => break,
            Err(error) => return Err(error),
        };
        for ((limited, request), next) in claims.iter_mut().zip(&mut remaining).zip(served.claims) {
            let LimitedClaim { claim: mut next, prefetch_limited } = next;
            let claim = &mut limited.claim;
            limited.prefetch_limited = prefetch_limited;
            request.limit = request.limit.saturating_sub(next.jobs.len());
            request.idle_slots = request.idle_slots.saturating_sub(next.jobs.len());
            claim.jobs.append(&mut next.jobs);
            claim.limited = next.limited;
            claim.rejected = next.rejected && claim.jobs.is_empty();
        }
        if !served.more || remaining.iter().all(|request| request.limit == 0) {
            break;
        }
    }
    Ok(claims)
}

async fn serve(shared: &Shared, requests: &[ClaimRequest], rules: &Rules, now: Timestamp) -> Result<ClaimBatch> {
    let client = shared.client().await?;
    let result = serve_in(shared, &client, requests, rules, now).await;
    client.end(result).await
}

async fn serve_in(
    shared: &Shared,
    client: &PooledClient,
    requests: &[ClaimRequest],
    rules: &Rules,
    now: Timestamp,
) -> Result<ClaimBatch> {
    let lanes = admit::distinct(requests.iter().flat_map(|request| request.lanes.iter().copied()));
    let lanes: Vec<Lane> = lanes.into_iter().filter_map(|lane| shared.lanes.get(lane)).collect();
    let (mut claim_limits, live) = begin(client, requests, &lanes, rules, now).await?;
    let keyed = lanes.iter().any(|lane| lane.keyed);
    if keyed && !live {
        return Ok(ClaimBatch {
            claims: vec![ClaimResult { rejected: true, ..ClaimResult::default() }.into()],
            more: false,
        });
    }
    let served = match requests {
        [request] if keyed || lanes.len() > 1 || request.candidates.is_some() => {
            serve_one(shared, client, request, lanes, &mut claim_limits, rules, now).await?
        }
        singles => serve_singles(shared, client, singles, &mut claim_limits, now).await?,
    };
    put_claim_limits(client, &claim_limits, now).await?;
    Ok(served)
}

/// Begins the transaction: locks the worker (if there is one) and the limits, then counts the jobs in flight. Returns
/// the limits, and whether the worker is still registered.
async fn begin(
    client: &Object,
    requests: &[ClaimRequest],
    lanes: &[Lane],
    rules: &Rules,
    now: Timestamp,
) -> Result<(ClaimLimits, bool)> {
    let scopes = ClaimLimits::scopes(rules, lanes);
    let numbers: Vec<i16> = scopes.iter().map(|scope| scope.parts().0).collect();
    let names: Vec<&str> = scopes.iter().map(|scope| scope.parts().1).collect();
    let owner = match requests {
        [ClaimRequest { owner: Owner::Worker { id, session }, .. }] => Some((id.0, *session)),
        _ => None,
    };
    let (id, session) = owner.unwrap_or_default();
    let worker = client
        .prepare_cached("SELECT FROM faena.worker WHERE id = $1 AND session = $2 AND ended_at IS NULL FOR KEY SHARE")
        .await?;
    let lock = client.prepare_cached(LOCK_LIMITS).await?;
    let in_flight = client.prepare_cached(IN_FLIGHT).await?;
    let worker_parameters: [&(dyn ToSql + Sync); 2] = [&id, &session];
    let scope_parameters: [&(dyn ToSql + Sync); 2] = [&numbers, &names];
    let (begun, worker, limits, in_flight) = join4(
        client.batch_execute(BEGIN_CLAIM),
        client.query(&worker, &worker_parameters),
        client.query(&lock, &scope_parameters),
        client.query(&in_flight, &scope_parameters),
    )
    .await;
    begun?;
    let live = owner.is_none() || !worker?.is_empty();
    let in_flight: HashMap<Scope, i64> =
        in_flight?.iter().filter_map(|row| Some((Scope::from_parts(row.get(0), row.get(1))?, row.get(2)))).collect();
    let limits = limits?;
    let claim_limits = limits.iter().filter_map(rules::stored).filter(|stored| !stored.limit.is_none()).map(|stored| {
        let running = in_flight.get(&stored.scope).copied().unwrap_or(0);
        ClaimLimit::stored(stored, usize::try_from(running).unwrap_or(0), now)
    });
    Ok((ClaimLimits::new(claim_limits.collect(), lanes), live))
}

/// Serves requests with one lane each.
async fn serve_singles(
    shared: &Shared,
    client: &Object,
    requests: &[ClaimRequest],
    claim_limits: &mut ClaimLimits,
    now: Timestamp,
) -> Result<ClaimBatch> {
    let owners: Vec<Owner> = requests.iter().map(|request| request.owner).collect();
    let mut prefetch_limited: Vec<Vec<LaneId>> = requests.iter().map(|_| Vec::new()).collect();
    let mut shares = Vec::new();
    for (at, request) in requests.iter().enumerate() {
        let Some(lane) = request.lanes.first().copied() else { continue };
        claim_limits.begin(request.idle_slots);
        let quota = request.limit.min(claim_limits.room(lane));
        claim_limits.take(lane, quota);
        if quota < request.limit && claim_limits.is_limited_by_prefetch_only(lane) {
            prefetch_limited[at].push(lane);
        }
        shares.push(LaneShare { request: at, lane, quota });
    }
    let requested: Vec<LaneShare> = shares.iter().copied().filter(|share| share.quota > 0).collect();
    let mut jobs: Vec<Vec<ClaimedJob>> = if requested.is_empty() {
        owners.iter().map(|_| Vec::new()).collect()
    } else {
        take(shared, client, &owners, requested, TransactionControl::ByCaller, now).await?
    };
    let mut claims: Vec<ClaimResult> = Vec::with_capacity(requests.len());
    for (request, jobs) in requests.iter().zip(&mut jobs) {
        for job in jobs.iter_mut() {
            job.limited = claim_limits.wait_cause(job.lane, job.ready_at);
        }
        let jobs = std::mem::take(jobs);
        let rejected = jobs.is_empty() && !may_claim(client, request.owner).await?;
        claims.push(ClaimResult { jobs, rejected, ..ClaimResult::default() });
    }
    for LaneShare { request, lane, quota } in shares {
        claim_limits.release(lane, quota - claims[request].jobs.len().min(quota));
        // The request got all jobs that the limits allow, so the lane may have more.
        if quota < requests[request].limit && claims[request].jobs.len() == quota && !claims[request].rejected {
            let limited = claim_limits.mark_limited(lane);
            claims[request].limited.push(limited);
        }
    }
    let results = claims
        .into_iter()
        .zip(prefetch_limited)
        .map(|(claim, prefetch_limited)| LimitedClaim { claim, prefetch_limited })
        .collect();
    Ok(ClaimBatch { claims: results, more: false })
}

/// Serves one request with several lanes, or with keyed lanes.
async fn serve_one(
    shared: &Shared,
    client: &Object,
    request: &ClaimRequest,
    lanes: Vec<Lane>,
    claim_limits: &mut ClaimLimits,
    rules: &Rules,
    now: Timestamp,
) -> Result<ClaimBatch> {
    let limits = (request.limit, request.idle_slots);
    let keyed: Vec<LaneId> = lanes.iter().filter(|lane| lane.keyed).map(|lane| lane.id).collect();
    let mut admission = Admission::new(claim_limits, lanes, (rules, &shared.round_robin), limits, now);
    let selection = select_jobs(shared, client, &mut admission, request, rules, now).await?;
    let jobs = match request.candidates {
        Some(_) => candidates::claim_chosen(shared, client, &mut admission, request.owner, now).await?,
        None => claim_chosen(shared, client, &mut admission, request.owner, now).await?,
    };
    let more = jobs.len() < request.limit && !selection.more.is_empty();
    if jobs.len() < request.limit {
        for lane in selection.more {
            admission.recheck_at(lane, now);
        }
        for lane in selection.busy {
            admission.recheck_at(lane, now.plus_ms(BUSY_MS));
        }
    }
    if admit::keys_have_rates(rules) && !keyed.is_empty() {
        for (lane, at) in next_opening_at(client, &keyed).await? {
            admission.recheck_at(lane, at);
        }
    }
    let rejected = jobs.is_empty() && !may_claim(client, request.owner).await?;
    let claim = ClaimResult { jobs, rejected, limited: admission.limited() };
    let result = LimitedClaim { claim, prefetch_limited: admission.prefetch_limited() };
    Ok(ClaimBatch { claims: vec![result], more })
}

#[derive(Default)]
pub struct Selection {
    /// Lanes with more open key queues than were read.
    pub more: Vec<LaneId>,
    /// Lanes with key queues that another claim has locked.
    pub busy: Vec<LaneId>,
}

/// Reads candidates and chooses among them.
async fn select_jobs(
    shared: &Shared,
    client: &Object,
    admission: &mut Admission<'_>,
    request: &ClaimRequest,
    rules: &Rules,
    now: Timestamp,
) -> Result<Selection> {
    let mut selection = Selection::default();
    let (keyed, plain): (Vec<Lane>, Vec<Lane>) = admission.open_lanes().into_iter().partition(|lane| lane.keyed);
    match &request.candidates {
        Some(chosen) => candidates::read_candidates(client, admission, &plain, chosen).await?,
        None => read_heads(shared, client, admission, &plain).await?,
    }
    if !keyed.is_empty() {
        if admit::keys_have_rates(rules) {
            open_due(client, &keyed, now).await?;
        }
        let key_queues = read_open_key_queues(
            client,
            &keyed,
            admit::key_queues_per_lane(admission.limit(), keyed.len()),
            &mut selection,
        )
        .await?;
        read_keys(client, admission, key_queues, request.idle_slots, rules, now).await?;
    }
    let mut wanted = admission.wanted();
    loop {
        read_key_queue_jobs(client, admission, &wanted).await?;
        wanted = admission.choose();
        if wanted.is_empty() {
            return Ok(selection);
        }
    }
}

/// Reads the heads of lanes without keys. Nothing is locked: if another node takes some of these jobs, the claim skips them
/// and takes the next.
async fn read_heads(shared: &Shared, client: &Object, admission: &mut Admission<'_>, lanes: &[Lane]) -> Result<()> {
    let statement = client.prepare_cached(HEADS).await?;
    for lane in lanes {
        let wanted = admission.plain_jobs_wanted(lane.id);
        let count = i64::try_from(wanted).unwrap_or(i64::MAX);
        let start = shared.cursors.start(lane.id);
        let mut rows = client.query(&statement, &[&lane.id, &start, &count]).await?;
        if rows.len() < wanted && start != HEAD {
            shared.cursors.forget(lane.id);
            rows = client.query(&statement, &[&lane.id, &HEAD, &count]).await?;
        }
        for row in rows {
            admission.add_plain_job(lane.id, Timestamp::from_ms(row.get(0)), JobId(row.get(1)));
        }
    }
    Ok(())
}

/// Claims the chosen jobs and updates the key queues.
async fn claim_chosen(
    shared: &Shared,
    client: &Object,
    admission: &mut Admission<'_>,
    owner: Owner,
    now: Timestamp,
) -> Result<Vec<ClaimedJob>> {
    let shares: Vec<LaneShare> =
        admission.quotas().into_iter().map(|(lane, quota)| LaneShare { request: 0, lane, quota }).collect();
    let mut jobs: Vec<(ClaimedJob, Option<i64>)> = Vec::new();
    if !shares.is_empty() {
        let taken = take(shared, client, &[owner], shares, TransactionControl::ByCaller, now).await?;
        jobs.extend(taken.into_iter().flatten().map(|job| (job, None)));
    }
    jobs.extend(take_keyed(shared, client, admission, owner, now).await?);
    let order: HashMap<JobId, usize> =
        admission.chosen().iter().enumerate().map(|(index, ready_job)| (ready_job.id, index)).collect();
    let mut missing = admission.quotas();
    for (job, key) in &mut jobs {
        job.limited = admission.wait_cause(job.lane, *key, job.ready_at);
        if key.is_none() {
            missing.entry(job.lane).and_modify(|count| *count = count.saturating_sub(1));
        }
    }
    for (lane, count) in missing {
        admission.claim_limits.release(lane, count);
    }
    let taken: HashSet<JobId> = jobs.iter().map(|(job, _)| job.id).collect();
    admission.remove_missed(|ready_job| ready_job.key.is_some() && !taken.contains(&ready_job.id));
    write_key_queues(client, admission).await?;
    let mut jobs: Vec<ClaimedJob> = jobs.into_iter().map(|(job, _)| job).collect();
    jobs.sort_by_key(|job| (order.get(&job.id).copied().unwrap_or(usize::MAX), job.ready_at, job.id));
    Ok(jobs)
}

async fn take_keyed(
    shared: &Shared,
    client: &Object,
    admission: &Admission<'_>,
    owner: Owner,
    now: Timestamp,
) -> Result<Vec<(ClaimedJob, Option<i64>)>> {
    let chosen: Vec<ReadyJob> =
        admission.chosen().iter().copied().filter(|ready_job| ready_job.key.is_some()).collect();
    candidates::take_jobs(shared, client, &chosen, owner, now).await
}

async fn put_claim_limits(client: &Object, claim_limits: &ClaimLimits, now: Timestamp) -> Result<()> {
    let changes = claim_limits.changes(now);
    if changes.is_empty() {
        return Ok(());
    }
    let scopes: Vec<i16> = changes.iter().map(|change| change.scope.parts().0).collect();
    let names: Vec<&str> = changes.iter().map(|change| change.scope.parts().1).collect();
    let tokens: Vec<Option<f64>> = changes.iter().map(|change| change.bucket.map(|bucket| bucket.tokens)).collect();
    let times: Vec<Option<i64>> = changes.iter().map(|change| change.bucket.map(|bucket| bucket.at.as_ms())).collect();
    let reached: Vec<Option<i64>> = changes.iter().map(|change| change.reached_at.map(Timestamp::as_ms)).collect();
    let statement = client
        .prepare_cached(
            "UPDATE faena.limit_rule r SET tokens = u.tokens, tokens_at = u.at, reached_at = u.reached_at
             FROM unnest($1::int2[], $2::text[], $3::float8[], $4::int8[], $5::int8[]) AS u(scope, name, tokens, at, reached_at)
             WHERE r.scope = u.scope AND r.name = u.name",
        )
        .await?;
    client.execute(&statement, &[&scopes, &names, &tokens, &times, &reached]).await?;
    Ok(())
}
