//! A claim of lanes with limits or keys.
//!
//! Exact over all nodes. Of a limit of the system, a queue or a type: the claim locks its row, which only claims do, and counts what is
//! in hands in a later statement, so it sees every claim before it; an end that is not committed counts as running. Of a key: the
//! claim takes the key's advisory lock, and passes the line when somebody else has it.
//!
//! Locks are taken in this order: the worker, limits, lines and keys, ready jobs. A claim waits only for the first two, so nobody
//! waits for it in a circle.

use std::collections::{HashMap, HashSet};

use deadpool_postgres::Object;
use faena_domain::{Bucket, JobId, Rules, Scope, Timestamp};
use futures_util::future::{join4, try_join_all};
use tokio_postgres::{Row, types::ToSql};
use uuid::Uuid;

use super::{
    Lease, Shared,
    claim::{BEGIN_CLAIM, Frame, Group, HEAD, HEADS, Portion, claimed_job, may_claim, take},
    rules,
};
use crate::{
    ClaimRequest, ClaimResult, ClaimedJob, Lane, LaneId, Limited, Owner, Result,
    admit::{self, Admission, BUSY_MS, OpenLine, Ruled, Wanted},
    assemble::parse_options,
    gates::{Gate, Gates},
};

/// Locks the limits of some scopes.
pub const LOCK_LIMITS: &str =
    "SELECT r.scope, r.name, r.concurrency, r.rate_count, r.rate_period_ms, r.tokens, r.tokens_at, r.origin, r.changed_at,
            r.changed_by, r.reached_at
     FROM unnest($1::int2[], $2::text[]) AS s(scope, name)
     JOIN faena.limit_rule r ON r.scope = s.scope AND r.name = s.name
     ORDER BY r.scope, r.name FOR UPDATE OF r";

/// How many jobs of each scope are in hands.
pub const HELD: &str = "SELECT s.scope, s.name, (
         SELECT coalesce(sum(c.n), 0)::int8 FROM faena.lane l
         CROSS JOIN LATERAL (SELECT n FROM faena.counter WHERE lane = l.id AND tally = 2) c
         WHERE s.scope = 0 OR (s.scope = 1 AND l.queue = s.name) OR (s.scope = 2 AND l.type = s.name))
     FROM unnest($1::int2[], $2::text[]) AS s(scope, name)";

/// The open lines of a lane in turn, each locked unless somebody else has it. Whoever puts jobs into a line does not stand in the way.
pub const LINES: &str = "SELECT key, turn, limited_at, limited_by, pg_try_advisory_xact_lock(key) FROM (
         SELECT key, turn, limited_at, limited_by FROM faena.line WHERE lane = $1 AND open ORDER BY turn, key LIMIT $2
         FOR NO KEY UPDATE SKIP LOCKED) AS l";

/// `BETWEEN` and the order by key, here and below: so only `ready_key` gives the order. The planner would else walk over the jobs of
/// all other keys from the head of the lane, if it takes this one's for common.
///
/// Of each line: its first job's options, how many jobs of its key are in hands, what is left of its rate.
pub const KEYS: &str = "SELECT h.id IS NOT NULL, h.options,
         (SELECT count(*) FROM (SELECT FROM faena.hold WHERE key = l.key LIMIT $3) AS held), b.tokens, b.at
     FROM unnest($1::int4[], $2::int8[]) WITH ORDINALITY AS l(lane, key, n)
     LEFT JOIN LATERAL (
         SELECT j.id, j.options FROM faena.ready r JOIN faena.job j ON j.id = r.id
         WHERE r.lane = l.lane AND r.key BETWEEN l.key AND l.key ORDER BY r.key, r.ready_at, r.id LIMIT 1) AS h ON true
     LEFT JOIN faena.bucket b ON b.key = l.key
     ORDER BY l.n";

pub const LINE_HEADS: &str = "SELECT l.lane, l.key, r.ready_at, r.id
     FROM unnest($1::int4[], $2::int8[], $3::int8[]) AS l(lane, key, count)
     CROSS JOIN LATERAL (
         SELECT ready_at, id FROM faena.ready WHERE lane = l.lane AND key BETWEEN l.key AND l.key
         ORDER BY key, ready_at, id LIMIT l.count) AS r";

/// Makes a block of jobs with keys. One that somebody is just cancelling or moving is passed.
pub const TAKE: &str = "
    WITH picked AS (
        DELETE FROM faena.ready WHERE ctid = ANY (ARRAY(
            SELECT r.ctid FROM unnest($1::int4[], $2::int8[], $3::uuid[]) AS c(lane, ready_at, id)
            CROSS JOIN LATERAL (
                SELECT ctid FROM faena.ready WHERE lane = c.lane AND ready_at = c.ready_at AND id = c.id
                FOR UPDATE SKIP LOCKED) AS r))
        RETURNING lane, ready_at, id, retry_count, start_first, key),
    held AS (INSERT INTO faena.hold (key, id) SELECT key, id FROM picked ON CONFLICT DO NOTHING),
    block AS (
        INSERT INTO faena.block (run, node, claimed_at, first_ready_at, ids, retries)
        SELECT nextval('faena.run'), $4, $5, min(ready_at), array_agg(id),
               CASE WHEN bool_or(retry_count > 0) THEN array_agg(retry_count) END
        FROM picked HAVING count(*) > 0
        RETURNING run),
    counted AS (
        INSERT INTO faena.counter AS c (shard, lane, tally, n)
        SELECT $6, s.lane, t.tally, t.sign * s.n
        FROM (SELECT lane, count(*) AS n FROM picked GROUP BY lane) AS s, (VALUES (1::int2, -1), (2::int2, 1)) AS t(tally, sign)
        ORDER BY 2, 3
        ON CONFLICT (shard, lane, tally) DO UPDATE SET n = c.n + excluded.n)
    SELECT block.run, picked.ready_at, picked.id, picked.retry_count, picked.start_first,
           job.correlation, job.options, job.payload, picked.lane, picked.key
    FROM picked JOIN faena.job ON job.id = picked.id CROSS JOIN block";

/// Rounds of looking at lines: each closes the lines of keys without room, so that the next one sees those behind them.
const ROUNDS: usize = 16;

/// What one transaction gives.
struct Served {
    claims: Vec<Ruled>,
    /// There are more open lines than were looked at.
    more: bool,
}

pub async fn claim(
    shared: &Shared,
    asks: &[ClaimRequest],
    group: &Group,
    rules: &Rules,
    now: Timestamp,
) -> Result<Vec<Ruled>> {
    let mut open: Vec<ClaimRequest> =
        group.asks.iter().map(|(at, lanes)| ClaimRequest { lanes: lanes.clone(), ..asks[*at].clone() }).collect();
    let mut claims: Vec<Ruled> = Vec::new();
    claims.resize_with(open.len(), Ruled::default);
    for _ in 0..ROUNDS {
        let served = match shared.retrying(|| serve(shared, &open, rules, now)).await {
            Ok(served) => served,
            // What the rounds before were handed is theirs.
            Err(_) if claims.iter().any(|ruled| !ruled.claim.jobs.is_empty()) => break,
            Err(error) => return Err(error),
        };
        for ((ruled, ask), more) in claims.iter_mut().zip(&mut open).zip(served.claims) {
            let Ruled { claim: mut more, for_others } = more;
            let claim = &mut ruled.claim;
            ruled.for_others = for_others;
            ask.limit = ask.limit.saturating_sub(more.jobs.len());
            ask.at_once = ask.at_once.saturating_sub(more.jobs.len());
            claim.jobs.append(&mut more.jobs);
            claim.limited = more.limited;
            claim.refused = more.refused && claim.jobs.is_empty();
        }
        if !served.more || open.iter().all(|ask| ask.limit == 0) {
            break;
        }
    }
    Ok(claims)
}

async fn serve(shared: &Shared, asks: &[ClaimRequest], rules: &Rules, now: Timestamp) -> Result<Served> {
    let client = shared.client().await?;
    let result = serve_in(shared, &client, asks, rules, now).await;
    client.end(result).await
}

async fn serve_in(
    shared: &Shared,
    client: &Lease,
    asks: &[ClaimRequest],
    rules: &Rules,
    now: Timestamp,
) -> Result<Served> {
    let lanes = admit::distinct(asks.iter().flat_map(|ask| ask.lanes.iter().copied()));
    let lanes: Vec<Lane> = lanes.into_iter().filter_map(|lane| shared.lanes.get(lane)).collect();
    let (mut gates, living) = begin(client, asks, &lanes, rules, now).await?;
    let keyed = lanes.iter().any(|lane| lane.keyed);
    if keyed && !living {
        return Ok(Served {
            claims: vec![ClaimResult { refused: true, ..ClaimResult::default() }.into()],
            more: false,
        });
    }
    let served = match asks {
        [ask] if keyed || lanes.len() > 1 => serve_one(shared, client, ask, lanes, &mut gates, rules, now).await?,
        singles => serve_singles(shared, client, singles, &mut gates, now).await?,
    };
    put_gates(client, &gates, now).await?;
    Ok(served)
}

/// Begins the transaction: locks the worker (if there is one) and the limits, then counts what is in hands.
async fn begin(
    client: &Object,
    asks: &[ClaimRequest],
    lanes: &[Lane],
    rules: &Rules,
    now: Timestamp,
) -> Result<(Gates, bool)> {
    let scopes = Gates::scopes(rules, lanes);
    let numbers: Vec<i16> = scopes.iter().map(|scope| scope.parts().0).collect();
    let names: Vec<&str> = scopes.iter().map(|scope| scope.parts().1).collect();
    let owner = match asks {
        [ClaimRequest { owner: Owner::Worker { id, session }, .. }] => Some((id.0, *session)),
        _ => None,
    };
    let (id, session) = owner.unwrap_or_default();
    let worker = client
        .prepare_cached("SELECT FROM faena.worker WHERE id = $1 AND session = $2 AND ended_at IS NULL FOR KEY SHARE")
        .await?;
    let lock = client.prepare_cached(LOCK_LIMITS).await?;
    let held = client.prepare_cached(HELD).await?;
    let worker_parameters: [&(dyn ToSql + Sync); 2] = [&id, &session];
    let scope_parameters: [&(dyn ToSql + Sync); 2] = [&numbers, &names];
    let (begun, worker, limits, held) = join4(
        client.batch_execute(BEGIN_CLAIM),
        client.query(&worker, &worker_parameters),
        client.query(&lock, &scope_parameters),
        client.query(&held, &scope_parameters),
    )
    .await;
    begun?;
    let living = owner.is_none() || !worker?.is_empty();
    let held: HashMap<Scope, i64> =
        held?.iter().filter_map(|row| Some((Scope::from_parts(row.get(0), row.get(1))?, row.get(2)))).collect();
    let limits = limits?;
    let gates = limits.iter().filter_map(rules::stored).filter(|stored| !stored.limit.is_none()).map(|stored| {
        let running = held.get(&stored.scope).copied().unwrap_or(0);
        Gate::stored(stored, usize::try_from(running).unwrap_or(0), now)
    });
    Ok((Gates::new(gates.collect(), lanes), living))
}

/// Asks with one lane each.
async fn serve_singles(
    shared: &Shared,
    client: &Object,
    asks: &[ClaimRequest],
    gates: &mut Gates,
    now: Timestamp,
) -> Result<Served> {
    let owners: Vec<Owner> = asks.iter().map(|ask| ask.owner).collect();
    let mut for_others: Vec<Vec<LaneId>> = asks.iter().map(|_| Vec::new()).collect();
    let mut portions = Vec::new();
    for (at, ask) in asks.iter().enumerate() {
        let Some(lane) = ask.lanes.first().copied() else { continue };
        gates.begin(ask.at_once);
        let quota = ask.limit.min(gates.room(lane));
        gates.take(lane, quota);
        if quota < ask.limit && gates.has_room_for_others(lane) {
            for_others[at].push(lane);
        }
        portions.push(Portion { ask: at, lane, quota });
    }
    let asked: Vec<Portion> = portions.iter().copied().filter(|portion| portion.quota > 0).collect();
    let mut jobs: Vec<Vec<ClaimedJob>> = if asked.is_empty() {
        owners.iter().map(|_| Vec::new()).collect()
    } else {
        take(shared, client, &owners, asked, Frame::Inside, now).await?
    };
    let mut claims: Vec<ClaimResult> = Vec::with_capacity(asks.len());
    for (ask, jobs) in asks.iter().zip(&mut jobs) {
        for job in jobs.iter_mut() {
            job.limited = gates.waited(job.lane, job.ready_at);
        }
        let jobs = std::mem::take(jobs);
        let refused = jobs.is_empty() && !may_claim(client, ask.owner).await?;
        claims.push(ClaimResult { jobs, refused, ..ClaimResult::default() });
    }
    for Portion { ask, lane, quota } in portions {
        gates.give_back(lane, quota - claims[ask].jobs.len().min(quota));
        // It got all that it was let: there may be more.
        if quota < asks[ask].limit && claims[ask].jobs.len() == quota && !claims[ask].refused {
            let limited = gates.hold_back(lane);
            claims[ask].limited.push(limited);
        }
    }
    let ruled = claims.into_iter().zip(for_others).map(|(claim, for_others)| Ruled { claim, for_others }).collect();
    Ok(Served { claims: ruled, more: false })
}

/// One ask with several lanes, or with lanes of keys.
async fn serve_one(
    shared: &Shared,
    client: &Object,
    ask: &ClaimRequest,
    lanes: Vec<Lane>,
    gates: &mut Gates,
    rules: &Rules,
    now: Timestamp,
) -> Result<Served> {
    let limits = (ask.limit, ask.at_once);
    let keyed: Vec<LaneId> = lanes.iter().filter(|lane| lane.keyed).map(|lane| lane.id).collect();
    let mut admission = Admission::new(gates, lanes, (rules, &shared.turns), limits, now);
    let seen = look(shared, client, &mut admission, ask.at_once, rules, now).await?;
    let jobs = admitted(shared, client, &mut admission, ask.owner, now).await?;
    let more = jobs.len() < ask.limit && !seen.more.is_empty();
    if jobs.len() < ask.limit {
        for lane in seen.more {
            admission.look_again(lane, now);
        }
        for lane in seen.busy {
            admission.look_again(lane, now.plus_ms(BUSY_MS));
        }
    }
    if admit::keys_have_rates(rules) && !keyed.is_empty() {
        for (lane, at) in opens_at(client, &keyed).await? {
            admission.look_again(lane, at);
        }
    }
    let limited: Vec<Limited> = admission.limited();
    let refused = jobs.is_empty() && !may_claim(client, ask.owner).await?;
    let ruled = Ruled { claim: ClaimResult { jobs, refused, limited }, for_others: admission.for_others() };
    Ok(Served { claims: vec![ruled], more })
}

#[derive(Default)]
struct Looked {
    /// Lanes with more open lines than were looked at.
    more: Vec<LaneId>,
    /// Lanes with lines that somebody else has.
    busy: Vec<LaneId>,
}

/// Reads who could go and chooses.
async fn look(
    shared: &Shared,
    client: &Object,
    admission: &mut Admission<'_>,
    at_once: usize,
    rules: &Rules,
    now: Timestamp,
) -> Result<Looked> {
    let mut looked = Looked::default();
    let (keyed, plain): (Vec<Lane>, Vec<Lane>) = admission.open_lanes().into_iter().partition(|lane| lane.keyed);
    read_heads(shared, client, admission, &plain).await?;
    if !keyed.is_empty() {
        if admit::keys_have_rates(rules) {
            open_due(client, &keyed, now).await?;
        }
        let lines =
            open_lines(client, &keyed, admit::lines_looked_at(admission.limit(), keyed.len()), &mut looked).await?;
        read_keys(client, admission, lines, at_once, rules, now).await?;
    }
    let mut wanted = admission.wanted();
    loop {
        read_lines(client, admission, &wanted).await?;
        wanted = admission.choose();
        if wanted.is_empty() {
            return Ok(looked);
        }
    }
}

/// The heads of lanes without keys. Nothing is locked: if another node takes some of what was seen, the claim passes them and takes
/// the next.
async fn read_heads(shared: &Shared, client: &Object, admission: &mut Admission<'_>, lanes: &[Lane]) -> Result<()> {
    let statement = client.prepare_cached(HEADS).await?;
    for lane in lanes {
        let wanted = admission.heads_wanted(lane.id);
        let count = i64::try_from(wanted).unwrap_or(i64::MAX);
        let start = shared.cursors.start(lane.id);
        let mut rows = client.query(&statement, &[&lane.id, &start, &count]).await?;
        if rows.len() < wanted && start != HEAD {
            shared.cursors.forget(lane.id);
            rows = client.query(&statement, &[&lane.id, &HEAD, &count]).await?;
        }
        for row in rows {
            admission.add_head(lane.id, Timestamp::from_ms(row.get(0)), JobId(row.get(1)));
        }
    }
    Ok(())
}

/// What a rate held back until now may go on.
async fn open_due(client: &Object, lanes: &[Lane], now: Timestamp) -> Result<()> {
    let lanes: Vec<LaneId> = lanes.iter().map(|lane| lane.id).collect();
    let statement = client
        .prepare_cached(
            "WITH due AS (
                 SELECT lane, key FROM faena.line WHERE opens_at <= $1 AND lane = ANY($2) ORDER BY opens_at LIMIT 1000
                 FOR NO KEY UPDATE SKIP LOCKED)
             UPDATE faena.line l SET open = true, opens_at = NULL FROM due d WHERE l.lane = d.lane AND l.key = d.key",
        )
        .await?;
    client.execute(&statement, &[&now.as_ms(), &lanes]).await?;
    Ok(())
}

async fn open_lines(client: &Object, lanes: &[Lane], most: usize, looked: &mut Looked) -> Result<Vec<OpenLine>> {
    let statement = client.prepare_cached(LINES).await?;
    let count = i64::try_from(most).unwrap_or(i64::MAX);
    let rows = try_join_all(lanes.iter().map(|lane| {
        let (statement, count) = (&statement, &count);
        async move { client.query(statement, &[&lane.id, count]).await }
    }))
    .await?;
    let mut lines = Vec::new();
    let others = client
        .prepare_cached("SELECT 1 FROM faena.line WHERE lane = $1 AND open AND NOT (key = ANY($2)) LIMIT 1")
        .await?;
    for (lane, rows) in lanes.iter().zip(rows) {
        let keys: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
        if rows.len() == most {
            looked.more.push(lane.id);
        } else if rows.iter().any(|row| !row.get::<_, bool>(4))
            || client.query_opt(&others, &[&lane.id, &keys]).await?.is_some()
        {
            looked.busy.push(lane.id);
        }
        lines.extend(rows.iter().filter(|row| row.get(4)).map(|row| {
            let limited = row.get::<_, Option<i64>>(2).zip(row.get(3));
            OpenLine { lane: lane.id, key: row.get(0), turn: row.get(1), limited }
        }));
    }
    Ok(lines)
}

/// The keys of lines, once they are locked.
async fn read_keys(
    client: &Object,
    admission: &mut Admission<'_>,
    lines: Vec<OpenLine>,
    at_once: usize,
    rules: &Rules,
    now: Timestamp,
) -> Result<()> {
    if lines.is_empty() {
        return Ok(());
    }
    let statement = client.prepare_cached(KEYS).await?;
    let lanes: Vec<LaneId> = lines.iter().map(|line| line.lane).collect();
    let keys: Vec<i64> = lines.iter().map(|line| line.key).collect();
    let most = i64::try_from(admit::most_of_a_key(rules)).unwrap_or(i64::MAX);
    let rows = client.query(&statement, &[&lanes, &keys, &most]).await?;
    for (line, row) in lines.into_iter().zip(rows) {
        if !row.get::<_, bool>(0) {
            admission.add_empty(&line);
            continue;
        }
        let name = parse_options(row.get(1))?.concurrency_key.unwrap_or_default();
        let held = usize::try_from(row.get::<_, i64>(2)).unwrap_or(0);
        let bucket = row
            .get::<_, Option<f64>>(3)
            .zip(row.get::<_, Option<i64>>(4))
            .map(|(tokens, at)| Bucket { tokens, at: Timestamp::from_ms(at) });
        admission.add_line(line, || Gate::of_key(rules, name, held, bucket, now), at_once);
    }
    Ok(())
}

async fn read_lines(client: &Object, admission: &mut Admission<'_>, wanted: &[Wanted]) -> Result<()> {
    if wanted.is_empty() {
        return Ok(());
    }
    let statement = client.prepare_cached(LINE_HEADS).await?;
    let lanes: Vec<LaneId> = wanted.iter().map(|line| line.lane).collect();
    let keys: Vec<i64> = wanted.iter().map(|line| line.key).collect();
    let counts: Vec<i64> = wanted.iter().map(|line| i64::try_from(line.count).unwrap_or(i64::MAX)).collect();
    for row in client.query(&statement, &[&lanes, &keys, &counts]).await? {
        admission.add_job(row.get(0), row.get(1), Timestamp::from_ms(row.get(2)), JobId(row.get(3)));
    }
    Ok(())
}

/// Hands out what was chosen and sees to the lines.
async fn admitted(
    shared: &Shared,
    client: &Object,
    admission: &mut Admission<'_>,
    owner: Owner,
    now: Timestamp,
) -> Result<Vec<ClaimedJob>> {
    let portions: Vec<Portion> =
        admission.quotas().into_iter().map(|(lane, quota)| Portion { ask: 0, lane, quota }).collect();
    let mut jobs: Vec<(ClaimedJob, Option<i64>)> = Vec::new();
    if !portions.is_empty() {
        let taken = take(shared, client, &[owner], portions, Frame::Inside, now).await?;
        jobs.extend(taken.into_iter().flatten().map(|job| (job, None)));
    }
    jobs.extend(take_keyed(shared, client, admission, owner, now).await?);
    let places: HashMap<JobId, usize> =
        admission.chosen().iter().enumerate().map(|(place, waiting)| (waiting.id, place)).collect();
    let mut missing = admission.quotas();
    for (job, key) in &mut jobs {
        job.limited = admission.waited(job.lane, *key, job.ready_at);
        if key.is_none() {
            missing.entry(job.lane).and_modify(|count| *count = count.saturating_sub(1));
        }
    }
    for (lane, count) in missing {
        admission.gates.give_back(lane, count);
    }
    let taken: HashSet<JobId> = jobs.iter().map(|(job, _)| job.id).collect();
    admission.missed(|waiting| waiting.key.is_some() && !taken.contains(&waiting.id));
    see_to_lines(client, admission).await?;
    let mut jobs: Vec<ClaimedJob> = jobs.into_iter().map(|(job, _)| job).collect();
    jobs.sort_by_key(|job| (places.get(&job.id).copied().unwrap_or(usize::MAX), job.ready_at, job.id));
    Ok(jobs)
}

async fn take_keyed(
    shared: &Shared,
    client: &Object,
    admission: &Admission<'_>,
    owner: Owner,
    now: Timestamp,
) -> Result<Vec<(ClaimedJob, Option<i64>)>> {
    let chosen: Vec<_> = admission.chosen().iter().filter(|waiting| waiting.key.is_some()).collect();
    if chosen.is_empty() {
        return Ok(Vec::new());
    }
    let lanes: Vec<LaneId> = chosen.iter().map(|waiting| waiting.lane).collect();
    let times: Vec<i64> = chosen.iter().map(|waiting| waiting.ready_at.as_ms()).collect();
    let ids: Vec<Uuid> = chosen.iter().map(|waiting| waiting.id.0).collect();
    let statement = client.prepare_cached(TAKE).await?;
    let shard = shared.own_shard();
    let rows: Vec<Row> = client.query(&statement, &[&lanes, &times, &ids, &owner.uuid(), &now.as_ms(), &shard]).await?;
    rows.iter().map(|row| Ok((claimed_job(row.get(8), row)?, row.get(9)))).collect()
}

async fn see_to_lines(client: &Object, admission: &mut Admission<'_>) -> Result<()> {
    let changes = admission.line_changes();
    if !changes.is_empty() {
        let lanes: Vec<LaneId> = changes.iter().map(|change| change.lane).collect();
        let keys: Vec<i64> = changes.iter().map(|change| change.key).collect();
        let turns: Vec<Option<i64>> = changes.iter().map(|change| change.turn).collect();
        let open: Vec<bool> = changes.iter().map(|change| change.open).collect();
        let opens: Vec<Option<i64>> = changes.iter().map(|change| change.opens_at).collect();
        let (limited_at, limited_by): (Vec<Option<i64>>, Vec<Option<String>>) =
            changes.into_iter().map(|change| change.limited.unzip()).unzip();
        let statement = client
            .prepare_cached(
                "UPDATE faena.line l SET open = u.open, opens_at = u.opens_at,
                     turn = coalesce(u.turn, (SELECT r.ready_at FROM faena.ready r
                         WHERE r.lane = l.lane AND r.key BETWEEN l.key AND l.key ORDER BY r.key, r.ready_at, r.id LIMIT 1), l.turn),
                     limited_at = coalesce(u.limited_at, l.limited_at), limited_by = coalesce(u.limited_by, l.limited_by)
                 FROM unnest($1::int4[], $2::int8[], $3::int8[], $4::bool[], $5::int8[], $6::int8[], $7::text[])
                     AS u(lane, key, turn, open, opens_at, limited_at, limited_by)
                 WHERE l.lane = u.lane AND l.key = u.key",
            )
            .await?;
        client.execute(&statement, &[&lanes, &keys, &turns, &open, &opens, &limited_at, &limited_by]).await?;
    }
    remove_empty(client, admission.maybe_empty()).await?;
    let buckets = admission.buckets();
    if !buckets.is_empty() {
        let keys: Vec<i64> = buckets.iter().map(|(key, _)| *key).collect();
        let tokens: Vec<f64> = buckets.iter().map(|(_, bucket)| bucket.tokens).collect();
        let times: Vec<i64> = buckets.iter().map(|(_, bucket)| bucket.at.as_ms()).collect();
        let statement = client
            .prepare_cached(
                "INSERT INTO faena.bucket (key, tokens, at) SELECT * FROM unnest($1::int8[], $2::float8[], $3::int8[])
                 ON CONFLICT (key) DO UPDATE SET tokens = excluded.tokens, at = excluded.at",
            )
            .await?;
        client.execute(&statement, &[&keys, &tokens, &times]).await?;
    }
    Ok(())
}

/// Removes lines without jobs. Whoever is just putting a job into one has locked it (`put_lines`), and it stays. Looked at in a
/// statement after the lock: who put something in before that is seen.
async fn remove_empty(client: &Object, lines: Vec<(LaneId, i64)>) -> Result<()> {
    if lines.is_empty() {
        return Ok(());
    }
    let (lanes, keys): (Vec<LaneId>, Vec<i64>) = lines.into_iter().unzip();
    let lock = client
        .prepare_cached(
            "SELECT l.lane, l.key FROM unnest($1::int4[], $2::int8[]) AS u(lane, key)
             JOIN faena.line l ON l.lane = u.lane AND l.key = u.key FOR UPDATE OF l SKIP LOCKED",
        )
        .await?;
    let rows = client.query(&lock, &[&lanes, &keys]).await?;
    let lanes: Vec<LaneId> = rows.iter().map(|row| row.get(0)).collect();
    let keys: Vec<i64> = rows.iter().map(|row| row.get(1)).collect();
    let delete = client
        .prepare_cached(
            "DELETE FROM faena.line l USING unnest($1::int4[], $2::int8[]) AS u(lane, key)
             WHERE l.lane = u.lane AND l.key = u.key
               AND (SELECT 1 FROM faena.ready r WHERE r.lane = l.lane AND r.key BETWEEN l.key AND l.key
                    ORDER BY r.key, r.ready_at, r.id LIMIT 1) IS NULL",
        )
        .await?;
    client.execute(&delete, &[&lanes, &keys]).await?;
    Ok(())
}

/// When the first of each lane's lines goes on by itself.
async fn opens_at(client: &Object, lanes: &[LaneId]) -> Result<Vec<(LaneId, Timestamp)>> {
    let statement = client
        .prepare_cached(
            "SELECT k.lane, l.opens_at FROM unnest($1::int4[]) AS k(lane)
             CROSS JOIN LATERAL (
                 SELECT opens_at FROM faena.line WHERE lane = k.lane AND opens_at IS NOT NULL ORDER BY opens_at LIMIT 1) AS l",
        )
        .await?;
    let rows = client.query(&statement, &[&lanes]).await?;
    Ok(rows.iter().map(|row| (row.get(0), Timestamp::from_ms(row.get(1)))).collect())
}

async fn put_gates(client: &Object, gates: &Gates, now: Timestamp) -> Result<()> {
    let changes = gates.changes(now);
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
