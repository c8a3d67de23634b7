//! Stores new jobs, those of many callers in one transaction.

use std::{
    collections::{HashMap, HashSet},
    sync::atomic::Ordering,
};

use deadpool_postgres::Object;
use faena_domain::{JobId, JobState, NewJob, Timestamp};
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use super::{
    Shared,
    batch::{Answer, Weight},
    cleanup::clean_up,
    events,
    lanes::lanes_of,
    read,
    submit_rows::{Rows, TransactionControl},
};
use crate::{
    JobExit, LaneId, Result, StoreError, Submitted,
    events::SYSTEM,
    jobs::UNIQUE_KEY_TAKEN,
    plan::{self, Deltas, KeyKind, Parents},
};

pub struct Call {
    pub jobs: Vec<NewJob>,
    /// The actor of the events.
    pub by: String,
    pub now: Timestamp,
    pub answer: Answer<Vec<Submitted>>,
}

impl Weight for Call {
    fn weight(&self) -> usize {
        self.jobs.len()
    }

    fn is_abandoned(&self) -> bool {
        self.answer.is_closed()
    }
}

/// Stores the jobs of all `calls` in one transaction. A rejected call does not affect the others.
pub async fn run(shared: &Shared, shard: i16, calls: Vec<Call>) {
    let actors: Vec<String> = calls.iter().map(|call| call.by.clone()).collect();
    let (mut pending, answers): (Vec<_>, Vec<_>) =
        calls.into_iter().map(|call| (Some((call.jobs, call.now)), call.answer)).unzip();
    // A transaction has one actor. While there are no events, it does not matter.
    let has_events = shared.events_on.load(Ordering::Relaxed);
    let mut results: Vec<Option<Result<Vec<Submitted>>>> = pending.iter().map(|_| None).collect();
    // A call whose answer depends on another call of its group, because they share a key, is moved to a later group.
    let mut rounds = 0;
    while pending.iter().any(Option::is_some) {
        rounds += 1;
        if rounds > pending.len() + 10 {
            // Each round answers at least one call, unless other transactions keep taking the same keys.
            for (at, call) in pending.iter_mut().enumerate().filter(|(_, call)| call.is_some()) {
                *call = None;
                results[at] = Some(Err(StoreError::Unavailable("other submissions are using the same keys".into())));
            }
            break;
        }
        let mut group: Vec<usize> = (0..pending.len()).filter(|at| pending[*at].is_some()).collect();
        let actor = actors[group[0]].as_str();
        if has_events {
            group.retain(|at| actors[*at] == actor);
        }
        let actor = Some(actor).filter(|actor| has_events && *actor != SYSTEM);
        let input: Vec<&(Vec<NewJob>, Timestamp)> = group.iter().filter_map(|at| pending[*at].as_ref()).collect();
        match shared.retrying(|| store(shared, shard, &input, actor)).await {
            Ok(outcomes) => {
                for (at, outcome) in group.into_iter().zip(outcomes) {
                    if let Some(outcome) = outcome {
                        results[at] = Some(outcome);
                        pending[at] = None;
                    }
                }
            }
            Err(error) => {
                for at in group {
                    pending[at] = None;
                    results[at] = Some(Err(error.clone_for_caller()));
                }
            }
        }
    }
    for (answer, result) in answers.into_iter().zip(results) {
        let _ = answer.send(result.unwrap_or_else(|| Err(StoreError::Internal("a call got no answer".into()))));
    }
}

type CallOutcome = Option<Result<Vec<Submitted>>>;

/// Stores the jobs of `calls` in one transaction. Returns `None` for a call that must be repeated without the others.
async fn store(
    shared: &Shared,
    shard: i16,
    calls: &[&(Vec<NewJob>, Timestamp)],
    actor: Option<&str>,
) -> Result<Vec<CallOutcome>> {
    let mut outcomes: Vec<CallOutcome> = calls.iter().map(|_| None).collect();
    let mut lanes: Vec<Vec<LaneId>> = Vec::with_capacity(calls.len());
    for (at, (jobs, _)) in calls.iter().enumerate() {
        match lanes_of(shared, jobs).await {
            Ok(ids) => lanes.push(ids),
            Err(StoreError::Invalid(errors)) => {
                outcomes[at] = Some(Err(StoreError::Invalid(errors)));
                lanes.push(Vec::new());
            }
            Err(error) => return Err(error),
        }
    }
    let plain = calls.iter().all(|(jobs, _)| jobs.iter().all(plan::is_plain));
    let client = shared.client().await?;
    let mut rows = Rows::default();
    if plain {
        for (at, (jobs, now)) in calls.iter().enumerate() {
            if outcomes[at].is_none() {
                outcomes[at] = Some(Ok(rows.add(jobs, &lanes[at], Parents::new(), &TakenKeys::default(), *now)));
            }
        }
    }
    if plain && actor.is_none() && rows.key_queues.is_empty() {
        if rows.are_ready() {
            rows.write_ready(&client, shard).await?;
        } else {
            rows.write(&client, shard, TransactionControl::BeginAndCommit).await?;
        }
        client.return_to_pool(Ok(()))?;
    } else {
        begin(&client, actor).await?;
        let result = if plain {
            rows.write(&client, shard, TransactionControl::ByCaller).await
        } else {
            store_with_keys(&client, shard, calls, &lanes, &mut outcomes, &mut rows).await
        };
        client.end(result).await?;
    }
    signal_ready(shared, &rows);
    Ok(outcomes)
}

/// Begins a transaction and sets the actor of its events, in one round trip.
async fn begin(client: &Object, actor: Option<&str>) -> Result<()> {
    let Some(actor) = actor else { return Ok(client.batch_execute("BEGIN").await?) };
    let (begun, set) =
        futures_util::future::join(client.batch_execute("BEGIN"), events::set_actor(client, actor)).await;
    begun?;
    set
}

/// Signals which lanes have become ready, after the commit.
fn signal_ready(shared: &Shared, rows: &Rows) {
    shared.queue_feed.add(rows.queue_changes());
    for (lane, ready_at) in &rows.earliest {
        shared.cursors.lower(*lane, *ready_at);
    }
    shared.signal(rows.signals());
}

/// Jobs that are stored as part of another transaction.
#[derive(Default)]
pub struct NestedSubmission {
    rows: Rows,
}

impl NestedSubmission {
    /// Stores all jobs or none; `lanes` has the lane of each.
    pub async fn store(
        &mut self,
        client: &Object,
        shard: i16,
        jobs: Vec<NewJob>,
        lanes: Vec<LaneId>,
        now: Timestamp,
    ) -> Result<Vec<Submitted>> {
        let mut outcomes = [None];
        store_with_keys(client, shard, &[&(jobs, now)], &[lanes], &mut outcomes, &mut self.rows).await?;
        let [outcome] = outcomes;
        outcome.unwrap_or_else(|| Err(StoreError::Contended("other submissions are using the same keys".into())))
    }

    /// Sends the signals, after the commit.
    pub fn signal(&self, shared: &Shared) {
        signal_ready(shared, &self.rows);
    }
}

async fn store_with_keys(
    client: &Object,
    shard: i16,
    calls: &[&(Vec<NewJob>, Timestamp)],
    lanes: &[Vec<LaneId>],
    outcomes: &mut [CallOutcome],
    rows: &mut Rows,
) -> Result<()> {
    let parents: Vec<JobId> = calls.iter().flat_map(|(jobs, _)| plan::parent_ids(jobs)).collect();
    let known: Parents = read::states_of(client, &parents)
        .await?
        .into_iter()
        .map(|(id, state)| (id, state.is_terminal().then_some(state)))
        .collect();
    for (at, (jobs, _)) in calls.iter().enumerate() {
        if outcomes[at].is_none()
            && let Err(error) = plan::check_parents(jobs, &known)
        {
            outcomes[at] = Some(Err(error));
        }
    }
    let taken = take_keys(client, calls, outcomes).await?;
    let mut exits = Vec::new();
    for (at, (jobs, now)) in calls.iter().enumerate() {
        if outcomes[at].is_some() || taken.must_repeat.contains(&at) {
            continue;
        }
        let mut known = known.clone();
        for found in jobs.iter().filter_map(|job| taken.existing.get(&job.id)) {
            known.insert(found.id, found.status.is_terminal().then_some(found.status));
        }
        let answers = rows.add(jobs, &lanes[at], known, &taken, *now);
        let cancelled = answers.iter().filter(|answer| !answer.existed && answer.status == JobState::Cancelled);
        exits.extend(cancelled.map(|answer| (answer.id.0, JobExit::Finished)));
        outcomes[at] = Some(Ok(answers));
    }
    rows.write(client, shard, TransactionControl::ByCaller).await?;
    if !exits.is_empty() {
        rows.signals = clean_up(client, &exits).await?;
    }
    Ok(())
}

/// Result of taking the keys of a group of calls.
#[derive(Default)]
pub struct TakenKeys {
    /// Jobs that exist already under their idempotency key.
    pub existing: HashMap<JobId, Submitted>,
    /// Jobs that repeat an earlier one of their batch.
    pub repeated: HashMap<JobId, JobId>,
    /// Calls that must be repeated, by index.
    pub must_repeat: HashSet<usize>,
}

/// A key that a job takes.
struct KeyRequest<'a> {
    call: usize,
    kind: i16,
    key: &'a str,
    id: Uuid,
    fingerprint: Option<&'a [u8]>,
}

/// Takes the keys of all jobs. If another transaction is taking the same key, waits for its end; if that transaction rolls back,
/// the key is free.
async fn take_keys(
    client: &Object,
    calls: &[&(Vec<NewJob>, Timestamp)],
    outcomes: &mut [CallOutcome],
) -> Result<TakenKeys> {
    let mut taken = TakenKeys::default();
    let mut requests = key_requests(calls, outcomes, &mut taken);
    if requests.is_empty() {
        return Ok(taken);
    }
    // Always in the same order, so that two groups do not deadlock.
    requests.sort_by_key(|request| (request.kind, request.key));
    let kinds: Vec<i16> = requests.iter().map(|request| request.kind).collect();
    let keys: Vec<&str> = requests.iter().map(|request| request.key).collect();
    let ids: Vec<Uuid> = requests.iter().map(|request| request.id).collect();
    let fingerprints: Vec<Option<&[u8]>> = requests.iter().map(|request| request.fingerprint).collect();
    let insert = client
        .prepare_cached(
            "INSERT INTO faena.job_key (kind, key, id, fingerprint)
             SELECT * FROM unnest($1::int2[], $2::text[], $3::uuid[], $4::bytea[]) ON CONFLICT DO NOTHING RETURNING kind, id",
        )
        .await?;
    let inserted: HashSet<(i16, Uuid)> = client
        .query(&insert, &[&kinds, &keys, &ids, &fingerprints])
        .await?
        .iter()
        .map(|row| (row.get(0), row.get(1)))
        .collect();
    let conflicting: Vec<&KeyRequest> =
        requests.iter().filter(|request| !inserted.contains(&(request.kind, request.id))).collect();
    if conflicting.is_empty() {
        return Ok(taken);
    }
    resolve_conflicts(client, conflicting, outcomes, &mut taken).await?;
    // Jobs that this transaction does not store release their keys.
    let mut unused: Vec<Uuid> = taken.existing.keys().map(|id| id.0).collect();
    for (at, (jobs, _)) in calls.iter().enumerate() {
        if outcomes[at].is_some() || taken.must_repeat.contains(&at) {
            unused.extend(jobs.iter().map(|job| job.id.0));
        }
    }
    client.execute("DELETE FROM faena.job_key WHERE key = ANY($1) AND id = ANY($2)", &[&keys, &unused]).await?;
    Ok(taken)
}

/// Returns the keys of all jobs except those that repeat another one of their batch.
fn key_requests<'a>(
    calls: &[&'a (Vec<NewJob>, Timestamp)],
    outcomes: &mut [CallOutcome],
    taken: &mut TakenKeys,
) -> Vec<KeyRequest<'a>> {
    let mut requests = Vec::new();
    for (call, (jobs, _)) in calls.iter().enumerate() {
        if outcomes[call].is_some() {
            continue;
        }
        match plan::repeated(jobs) {
            Ok(repeated) => taken.repeated.extend(repeated),
            Err(error) => {
                outcomes[call] = Some(Err(error));
                continue;
            }
        }
        for job in jobs.iter().filter(|job| !taken.repeated.contains_key(&job.id)) {
            let fingerprint = job.fingerprint.as_ref().map(|f| f.as_slice());
            if let Some(key) = &job.options.idempotency_key {
                requests.push(KeyRequest { call, kind: KeyKind::Idempotency as i16, key, id: job.id.0, fingerprint });
            }
            if let Some(key) = &job.options.unique_key {
                requests.push(KeyRequest { call, kind: KeyKind::Unique as i16, key, id: job.id.0, fingerprint: None });
            }
        }
    }
    requests
}

/// Decides what happens to requests whose keys other jobs already have.
async fn resolve_conflicts(
    client: &Object,
    conflicting: Vec<&KeyRequest<'_>>,
    outcomes: &mut [CallOutcome],
    taken: &mut TakenKeys,
) -> Result<()> {
    let existing_jobs =
        existing_jobs(client, &conflicting.iter().map(|request| (request.kind, request.key)).collect::<Vec<_>>())
            .await?;
    let existing_ids: Vec<JobId> = existing_jobs.values().map(|(id, _)| *id).collect();
    let states = read::states_of(client, &existing_ids).await?;
    for request in conflicting {
        // The job exists already, with all its keys. (Idempotency keys come first.)
        if taken.existing.contains_key(&JobId(request.id)) {
            continue;
        }
        let Some((existing_job, fingerprint)) = existing_jobs.get(&(request.kind, request.key.to_owned())) else {
            taken.must_repeat.insert(request.call);
            continue;
        };
        let Some(status) = states.get(existing_job).copied() else {
            // The job with the key is in this group and not written yet.
            taken.must_repeat.insert(request.call);
            continue;
        };
        if request.kind == KeyKind::Unique as i16 {
            outcomes[request.call] =
                Some(Err(StoreError::Conflict { message: UNIQUE_KEY_TAKEN.into(), existing_job: Some(*existing_job) }));
        } else if fingerprint.as_deref() != request.fingerprint {
            outcomes[request.call] = Some(Err(StoreError::Conflict {
                message: "this idempotency key was used for another request".into(),
                existing_job: Some(*existing_job),
            }));
        } else {
            let found = Submitted { id: *existing_job, status, created_at: existing_job.created_at(), existed: true };
            taken.existing.insert(JobId(request.id), found);
        }
    }
    Ok(())
}

type ExistingJobs = HashMap<(i16, String), (JobId, Option<Vec<u8>>)>;

async fn existing_jobs(client: &Object, keys: &[(i16, &str)]) -> Result<ExistingJobs> {
    let kinds: Vec<i16> = keys.iter().map(|(kind, _)| *kind).collect();
    let texts: Vec<&str> = keys.iter().map(|(_, key)| *key).collect();
    let rows = client
        .query(
            "SELECT k.kind, k.key, k.id, k.fingerprint FROM unnest($1::int2[], $2::text[]) AS w(kind, key)
             JOIN faena.job_key k ON k.kind = w.kind AND k.key = w.key",
            &[&kinds, &texts],
        )
        .await?;
    Ok(rows.iter().map(|row| ((row.get(0), row.get(1)), (JobId(row.get(2)), row.get(3)))).collect())
}

/// A key queue to create for a ready job: lane, key, ready time.
pub type KeyQueueEntry = (LaneId, i64, i64);

/// Creates these key queues, and locks them until the commit, so that a claim that finds one of them empty cannot delete it. Many
/// transactions may hold this lock, and a claim does not wait for it.
///
/// The rows are always locked in the same order, so that two transactions do not deadlock.
pub async fn put_key_queues(client: &Object, mut entries: Vec<KeyQueueEntry>) -> Result<()> {
    if entries.is_empty() {
        return Ok(());
    }
    entries.sort_unstable();
    entries.dedup_by_key(|(lane, key, _)| (*lane, *key));
    let lanes: Vec<LaneId> = entries.iter().map(|entry| entry.0).collect();
    let keys: Vec<i64> = entries.iter().map(|entry| entry.1).collect();
    let times: Vec<i64> = entries.iter().map(|entry| entry.2).collect();
    let insert = client
        .prepare_cached(
            "INSERT INTO faena.key_queue (lane, key, rank) SELECT * FROM unnest($1::int4[], $2::int8[], $3::int8[])
             ON CONFLICT DO NOTHING",
        )
        .await?;
    let lock = client
        .prepare_cached(
            "SELECT l.rank > p.ready_at FROM unnest($1::int4[], $2::int8[], $3::int8[]) AS p(lane, key, ready_at)
             JOIN faena.key_queue l ON l.lane = p.lane AND l.key = p.key FOR KEY SHARE OF l",
        )
        .await?;
    let parameters: [&(dyn ToSql + Sync); 3] = [&lanes, &keys, &times];
    let (inserted, locked) =
        futures_util::future::join(client.execute(&insert, &parameters), client.query(&lock, &parameters)).await;
    inserted?;
    let locked = locked?;
    if locked.len() < entries.len() {
        return Err(StoreError::Contended("a key queue was just removed".into()));
    }
    // True only for jobs that return to their old position.
    if locked.iter().any(|row| row.get(0)) {
        let earlier = client
            .prepare_cached(
                "WITH earlier AS (
                     SELECT l.lane, l.key, p.ready_at FROM unnest($1::int4[], $2::int8[], $3::int8[]) AS p(lane, key, ready_at)
                     JOIN faena.key_queue l ON l.lane = p.lane AND l.key = p.key AND l.rank > p.ready_at
                     ORDER BY l.lane, l.key FOR NO KEY UPDATE OF l)
                 UPDATE faena.key_queue l SET rank = e.ready_at FROM earlier e WHERE l.lane = e.lane AND l.key = e.key",
            )
            .await?;
        client.execute(&earlier, &parameters).await?;
    }
    Ok(())
}

/// Adds to the counters of one shard.
pub const COUNT: &str = "INSERT INTO faena.counter AS c (shard, lane, tally, n)
     SELECT $1, lane, tally, n FROM unnest($2::int4[], $3::int2[], $4::int8[]) AS d(lane, tally, n)
     ON CONFLICT (shard, lane, tally) DO UPDATE SET n = c.n + excluded.n";

pub async fn apply(client: &Object, shard: i16, deltas: &Deltas) -> Result<()> {
    let (lanes, tallies, changes) = deltas.columns();
    if !lanes.is_empty() {
        let statement = client.prepare_cached(COUNT).await?;
        client.execute(&statement, &[&shard, &lanes, &tallies, &changes]).await?;
    }
    Ok(())
}
