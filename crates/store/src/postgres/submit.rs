//! Submit: the rows of new jobs, of many callers in one transaction.

use std::{
    borrow::Cow,
    collections::{HashMap, HashSet},
};

use deadpool_postgres::Object;
use faena_domain::{JobId, JobState, LogEvent, LogLine, NewJob, Timestamp};
use futures_util::future::try_join_all;
use tokio_postgres::{Row, types::ToSql};
use uuid::Uuid;

use super::{
    Shared,
    batch::{Answer, Weight},
    cleanup::clean_up,
    read,
};
use crate::{
    JobExit, LaneId, Result, Signal, StoreError, Submitted, Tally,
    lanes::{LaneName, MAX_LANES, too_many_lanes},
    plan::{self, Deltas, KeyKind, Parents, Placement, PlannedJob},
    types::{CANCELLED, PENDING},
};

pub struct Call {
    pub jobs: Vec<NewJob>,
    pub now: Timestamp,
    pub answer: Answer<Vec<Submitted>>,
}

impl Weight for Call {
    fn weight(&self) -> usize {
        self.jobs.len()
    }
}

/// Stores the jobs of all `calls` in one transaction. A call that is refused takes nothing of the others with it.
pub async fn run(shared: &Shared, shard: i16, calls: Vec<Call>) {
    let (mut works, answers): (Vec<_>, Vec<_>) =
        calls.into_iter().map(|call| (Some((call.jobs, call.now)), call.answer)).unzip();
    let mut results: Vec<Option<Result<Vec<Submitted>>>> = works.iter().map(|_| None).collect();
    // Calls whose answer hangs on another call of the same group (they share a key) go into a group of their own.
    let mut rounds = 0;
    while works.iter().any(Option::is_some) {
        rounds += 1;
        if rounds > works.len() + 10 {
            // Each round settles one call at least, unless others keep taking the same keys.
            for (at, work) in works.iter_mut().enumerate().filter(|(_, work)| work.is_some()) {
                *work = None;
                results[at] = Some(Err(StoreError::Unavailable("others are taking the same keys".into())));
            }
            break;
        }
        let group: Vec<usize> = (0..works.len()).filter(|at| works[*at].is_some()).collect();
        let input: Vec<&(Vec<NewJob>, Timestamp)> = group.iter().filter_map(|at| works[*at].as_ref()).collect();
        match shared.retrying(|| store(shared, shard, &input)).await {
            Ok(outcomes) => {
                for (at, outcome) in group.into_iter().zip(outcomes) {
                    if let Some(outcome) = outcome {
                        results[at] = Some(outcome);
                        works[at] = None;
                    }
                }
            }
            Err(error) => {
                let text = error.to_string();
                for at in group {
                    works[at] = None;
                    results[at] = Some(Err(match &error {
                        StoreError::Unavailable(text) => StoreError::Unavailable(text.clone()),
                        _ => StoreError::Broken(text.clone()),
                    }));
                }
            }
        }
    }
    for (answer, result) in answers.into_iter().zip(results) {
        let _ = answer.send(result.unwrap_or_else(|| Err(StoreError::Broken("a call was lost".into()))));
    }
}

type RunOutcome = Option<Result<Vec<Submitted>>>;

/// One transaction. `None` for a call that has to be tried again without the others.
async fn store(shared: &Shared, shard: i16, calls: &[&(Vec<NewJob>, Timestamp)]) -> Result<Vec<RunOutcome>> {
    let mut outcomes: Vec<RunOutcome> = calls.iter().map(|_| None).collect();
    let mut lanes: Vec<Vec<LaneId>> = Vec::with_capacity(calls.len());
    for (at, (jobs, _)) in calls.iter().enumerate() {
        match lanes_of(shared, jobs).await {
            Ok(ids) => lanes.push(ids),
            Err(StoreError::Invalid(faults)) => {
                outcomes[at] = Some(Err(StoreError::Invalid(faults)));
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
                outcomes[at] = Some(Ok(rows.add(jobs, &lanes[at], Parents::new(), &Taken::default(), *now)));
            }
        }
        if rows.are_ready() {
            rows.write_ready(&client, shard).await?;
        } else if !rows.lines.is_empty() {
            client.batch_execute("BEGIN").await?;
            let result = rows.write(&client, shard, Frame::Inside).await;
            return close(shared, client.end(result).await.map(|()| outcomes), &rows);
        } else {
            rows.write(&client, shard, Frame::Whole).await?;
        }
        client.keep(Ok(()))?;
    } else {
        client.batch_execute("BEGIN").await?;
        let result = store_with_keys(&client, shard, calls, &lanes, &mut outcomes, &mut rows).await;
        client.end(result).await?;
    }
    close(shared, Ok(outcomes), &rows)
}

fn close(shared: &Shared, outcomes: Result<Vec<RunOutcome>>, rows: &Rows) -> Result<Vec<RunOutcome>> {
    if outcomes.is_ok() {
        signal_ready(shared, rows);
    }
    outcomes
}

/// Tells what has become ready, after the commit.
fn signal_ready(shared: &Shared, rows: &Rows) {
    for (lane, ready_at) in &rows.earliest {
        shared.cursors.lower(*lane, *ready_at);
    }
    shared.signal(rows.signals());
}

/// Jobs that are stored as a part of somebody else's transaction.
#[derive(Default)]
pub struct Put {
    rows: Rows,
}

impl Put {
    /// Stores all of them or none; `lanes` has the lane of each.
    pub async fn jobs(
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
        outcome.unwrap_or_else(|| Err(StoreError::Contended("others are taking the same keys".into())))
    }

    /// To be called after the commit.
    pub fn signal(&self, shared: &Shared) {
        signal_ready(shared, &self.rows);
    }
}

async fn store_with_keys(
    client: &Object,
    shard: i16,
    calls: &[&(Vec<NewJob>, Timestamp)],
    lanes: &[Vec<LaneId>],
    outcomes: &mut [RunOutcome],
    rows: &mut Rows,
) -> Result<()> {
    let parents: Vec<JobId> = calls.iter().flat_map(|(jobs, _)| plan::outside_parents(jobs)).collect();
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
    let mut forgotten = Vec::new();
    for (at, (jobs, now)) in calls.iter().enumerate() {
        if outcomes[at].is_some() || taken.again.contains(&at) {
            continue;
        }
        let mut known = known.clone();
        for found in jobs.iter().filter_map(|job| taken.existing.get(&job.id)) {
            known.insert(found.id, found.status.is_terminal().then_some(found.status));
        }
        let answers = rows.add(jobs, &lanes[at], known, &taken, *now);
        let cancelled = answers.iter().filter(|answer| !answer.existed && answer.status == JobState::Cancelled);
        forgotten.extend(cancelled.map(|answer| (answer.id.0, JobExit::Finished)));
        outcomes[at] = Some(Ok(answers));
    }
    rows.write(client, shard, Frame::Inside).await?;
    if !forgotten.is_empty() {
        rows.forgotten = clean_up(client, &forgotten).await?;
    }
    Ok(())
}

#[derive(Default)]
struct Taken {
    /// Jobs that exist already under their idempotency key.
    existing: HashMap<JobId, Submitted>,
    /// Jobs that repeat an earlier one of their batch.
    repeated: HashMap<JobId, JobId>,
    /// Calls to be tried again.
    again: HashSet<usize>,
}

/// Takes the keys of all jobs. Whoever else is just taking the same key is waited for, and counts only if it commits.
async fn take_keys(client: &Object, calls: &[&(Vec<NewJob>, Timestamp)], outcomes: &mut [RunOutcome]) -> Result<Taken> {
    struct Wish<'a> {
        call: usize,
        kind: i16,
        key: &'a str,
        id: Uuid,
        fingerprint: Option<&'a [u8]>,
    }
    let mut taken = Taken::default();
    let mut wishes = Vec::new();
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
                wishes.push(Wish { call, kind: KeyKind::Idempotency as i16, key, id: job.id.0, fingerprint });
            }
            if let Some(key) = &job.options.unique_key {
                wishes.push(Wish { call, kind: KeyKind::Unique as i16, key, id: job.id.0, fingerprint: None });
            }
        }
    }
    if wishes.is_empty() {
        return Ok(taken);
    }
    // Always in the same order, so that two groups do not wait for each other in a circle.
    wishes.sort_by_key(|wish| (wish.kind, wish.key));
    let kinds: Vec<i16> = wishes.iter().map(|wish| wish.kind).collect();
    let keys: Vec<&str> = wishes.iter().map(|wish| wish.key).collect();
    let ids: Vec<Uuid> = wishes.iter().map(|wish| wish.id).collect();
    let fingerprints: Vec<Option<&[u8]>> = wishes.iter().map(|wish| wish.fingerprint).collect();
    let insert = client
        .prepare_cached(
            "INSERT INTO faena.job_key (kind, key, id, fingerprint)
             SELECT * FROM unnest($1::int2[], $2::text[], $3::uuid[], $4::bytea[]) ON CONFLICT DO NOTHING RETURNING kind, id",
        )
        .await?;
    let won: HashSet<(i16, Uuid)> = client
        .query(&insert, &[&kinds, &keys, &ids, &fingerprints])
        .await?
        .iter()
        .map(|row| (row.get(0), row.get(1)))
        .collect();
    let lost: Vec<&Wish> = wishes.iter().filter(|wish| !won.contains(&(wish.kind, wish.id))).collect();
    if lost.is_empty() {
        return Ok(taken);
    }
    let holders = holders(client, &lost.iter().map(|wish| (wish.kind, wish.key)).collect::<Vec<_>>()).await?;
    let held_by: Vec<JobId> = holders.values().map(|(id, _)| *id).collect();
    let states = read::states_of(client, &held_by).await?;
    for wish in lost {
        // It exists already, with all its keys. (Idempotency keys come first.)
        if taken.existing.contains_key(&JobId(wish.id)) {
            continue;
        }
        let Some((holder, fingerprint)) = holders.get(&(wish.kind, wish.key.to_owned())) else {
            taken.again.insert(wish.call);
            continue;
        };
        let Some(status) = states.get(holder).copied() else {
            // The holder is of this very group and not written yet.
            taken.again.insert(wish.call);
            continue;
        };
        if wish.kind == KeyKind::Unique as i16 {
            outcomes[wish.call] = Some(Err(StoreError::Conflict {
                message: format!("job {holder} with this uniqueKey has not finished"),
                holder: Some(*holder),
            }));
        } else if fingerprint.as_deref() != wish.fingerprint {
            outcomes[wish.call] = Some(Err(StoreError::Conflict {
                message: "this idempotency key was used for another request".into(),
                holder: Some(*holder),
            }));
        } else {
            let found = Submitted { id: *holder, status, created_at: holder.created_at(), existed: true };
            taken.existing.insert(JobId(wish.id), found);
        }
    }
    // What is not stored now gives its keys back.
    let mut unused: Vec<Uuid> = taken.existing.keys().map(|id| id.0).collect();
    for (at, (jobs, _)) in calls.iter().enumerate() {
        if outcomes[at].is_some() || taken.again.contains(&at) {
            unused.extend(jobs.iter().map(|job| job.id.0));
        }
    }
    client.execute("DELETE FROM faena.job_key WHERE key = ANY($1) AND id = ANY($2)", &[&keys, &unused]).await?;
    Ok(taken)
}

type Holders = HashMap<(i16, String), (JobId, Option<Vec<u8>>)>;

async fn holders(client: &Object, keys: &[(i16, &str)]) -> Result<Holders> {
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

pub async fn lanes_of(shared: &Shared, jobs: &[NewJob]) -> Result<Vec<LaneId>> {
    let mut ids = Vec::with_capacity(jobs.len());
    for job in jobs {
        // Neighbours are mostly alike.
        let same = ids.last().copied().zip(jobs.get(ids.len().wrapping_sub(1)));
        match same {
            Some((id, last)) if LaneName::of(last) == LaneName::of(job) => ids.push(id),
            _ => ids.push(lane_of(shared, LaneName::of(job)).await?),
        }
    }
    Ok(ids)
}

pub async fn lane_of(shared: &Shared, name: LaneName<'_>) -> Result<LaneId> {
    if let Some(id) = shared.lanes.id_of(name) {
        return Ok(id);
    }
    let client = shared.client().await?;
    let result = async {
        if shared.lanes.len() >= MAX_LANES {
            return Err(too_many_lanes());
        }
        let rank = name.priority.rank();
        let columns: [&(dyn ToSql + Sync); 4] = [&name.queue, &name.kind, &rank, &name.keyed];
        client
            .execute(
                "INSERT INTO faena.lane (queue, type, priority, keyed) VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING",
                &columns,
            )
            .await?;
        let row = client
            .query_one(
                "SELECT id FROM faena.lane WHERE queue = $1 AND type = $2 AND priority = $3 AND keyed = $4",
                &columns,
            )
            .await?;
        Ok(row.get::<_, LaneId>(0))
    };
    let id = result.await;
    let id = client.keep(id)?;
    shared.lanes.insert([name.with_id(id)]);
    Ok(id)
}

/// A line in which a job that is ready since this time can stand: lane, key, ready time.
pub type KeyQueueEntry = (LaneId, i64, i64);

/// Sees to it that there are these lines, and that they stay until the commit: a claim that finds one of them empty cannot remove
/// it while it is locked like this. Many may hold this lock at once, and a claim does not wait for it.
///
/// Always in the same order, so that two transactions do not wait for each other in a circle.
pub async fn put_key_queues(client: &Object, mut places: Vec<KeyQueueEntry>) -> Result<()> {
    if places.is_empty() {
        return Ok(());
    }
    places.sort_unstable();
    places.dedup_by_key(|(lane, key, _)| (*lane, *key));
    let lanes: Vec<LaneId> = places.iter().map(|place| place.0).collect();
    let keys: Vec<i64> = places.iter().map(|place| place.1).collect();
    let times: Vec<i64> = places.iter().map(|place| place.2).collect();
    let insert = client
        .prepare_cached(
            "INSERT INTO faena.key_queue (lane, key, turn) SELECT * FROM unnest($1::int4[], $2::int8[], $3::int8[])
             ON CONFLICT DO NOTHING",
        )
        .await?;
    let lock = client
        .prepare_cached(
            "SELECT l.turn > p.ready_at FROM unnest($1::int4[], $2::int8[], $3::int8[]) AS p(lane, key, ready_at)
             JOIN faena.key_queue l ON l.lane = p.lane AND l.key = p.key FOR KEY SHARE OF l",
        )
        .await?;
    let parameters: [&(dyn ToSql + Sync); 3] = [&lanes, &keys, &times];
    let (inserted, locked) =
        futures_util::future::join(client.execute(&insert, &parameters), client.query(&lock, &parameters)).await;
    inserted?;
    let locked = locked?;
    if locked.len() < places.len() {
        return Err(StoreError::Contended("a line was removed in this very moment".into()));
    }
    // Only of jobs that come back to their old place.
    if locked.iter().any(|row| row.get(0)) {
        let earlier = client
            .prepare_cached(
                "WITH earlier AS (
                     SELECT l.lane, l.key, p.ready_at FROM unnest($1::int4[], $2::int8[], $3::int8[]) AS p(lane, key, ready_at)
                     JOIN faena.key_queue l ON l.lane = p.lane AND l.key = p.key AND l.turn > p.ready_at
                     ORDER BY l.lane, l.key FOR NO KEY UPDATE OF l)
                 UPDATE faena.key_queue l SET turn = e.ready_at FROM earlier e WHERE l.lane = e.lane AND l.key = e.key",
            )
            .await?;
        client.execute(&earlier, &parameters).await?;
    }
    Ok(())
}

/// Lanes, ids, times, causes and logs.
type Ended = (Vec<LaneId>, Vec<Uuid>, Vec<i64>, Vec<String>, Vec<String>);

/// The columns of everything that one transaction inserts.
#[derive(Default)]
struct Rows {
    ids: Vec<Uuid>,
    lanes: Vec<LaneId>,
    correlations: Vec<Option<String>>,
    options: Vec<Option<String>>,
    payloads: Vec<String>,
    ready: (Vec<LaneId>, Vec<i64>, Vec<Uuid>, Vec<Option<i64>>),
    lines: Vec<KeyQueueEntry>,
    waiting: (Vec<LaneId>, Vec<Uuid>, Vec<i64>, Vec<bool>),
    ended: Ended,
    labels: (Vec<i16>, Vec<String>, Vec<Uuid>),
    expiries: (Vec<i64>, Vec<Uuid>),
    depends: (Vec<Uuid>, Vec<Uuid>),
    deltas: Deltas,
    earliest: HashMap<LaneId, i64>,
    /// What those that were cancelled at once give to tell.
    forgotten: Vec<Signal>,
}

/// Whether `write` opens and closes the transaction itself, in the same round trip.
enum Frame {
    Whole,
    Inside,
}

impl Rows {
    fn add(
        &mut self,
        jobs: &[NewJob],
        lanes: &[LaneId],
        mut known: Parents,
        Taken { existing, repeated, .. }: &Taken,
        now: Timestamp,
    ) -> Vec<Submitted> {
        let mut answers = Vec::with_capacity(jobs.len());
        let mut answered: HashMap<JobId, Submitted> = HashMap::new();
        for (job, lane) in jobs.iter().zip(lanes) {
            if let Some(found) = existing.get(&job.id).or(repeated.get(&job.id).and_then(|first| answered.get(first))) {
                let found = Submitted { existed: true, ..found.clone() };
                answered.insert(job.id, found.clone());
                answers.push(found);
                continue;
            }
            let mut job = Cow::Borrowed(job);
            if !job.options.depends_on.is_empty() {
                for parent in &mut job.to_mut().options.depends_on {
                    *parent = repeated.get(parent).copied().unwrap_or(*parent);
                    *parent = existing.get(parent).map_or(*parent, |found| found.id);
                }
            }
            let planned = plan::plan(&job, *lane, &known, now);
            let status: JobState = planned.place.state();
            if status == JobState::Cancelled {
                known.insert(planned.id, Some(status));
            }
            let answer = Submitted { id: planned.id, status, created_at: planned.id.created_at(), existed: false };
            if !repeated.is_empty() {
                answered.insert(planned.id, answer.clone());
            }
            answers.push(answer);
            self.deltas.add(*lane, Tally::of(status), 1);
            self.add_planned(planned, now);
        }
        answers
    }

    fn add_planned(&mut self, job: PlannedJob, now: Timestamp) {
        let id = job.id.0;
        let cancelled = job.place.state() == JobState::Cancelled;
        match job.place {
            Placement::Ready => {
                let ready_at = job.id.created_at().as_ms();
                self.ready.0.push(job.lane);
                self.ready.1.push(ready_at);
                self.ready.2.push(id);
                self.ready.3.push(job.key);
                self.lines.extend(job.key.map(|key| (job.lane, key, ready_at)));
                let earliest = self.earliest.entry(job.lane).or_insert(ready_at);
                *earliest = (*earliest).min(ready_at);
            }
            Placement::Delayed { due_at } => self.add_waiting(job.lane, id, due_at, false),
            Placement::Blocked { look_again_at } => self.add_waiting(job.lane, id, look_again_at, true),
            Placement::Cancelled { cause } => {
                self.ended.0.push(job.lane);
                self.ended.1.push(id);
                self.ended.2.push(now.as_ms());
                self.ended.4.push(LogLine::chunk(&[LogLine::new(now, LogEvent::Cancelled, cause.clone())]));
                self.ended.3.push(cause);
            }
        }
        for (kind, value) in job.labels {
            self.labels.0.push(kind as i16);
            self.labels.1.push(value);
            self.labels.2.push(id);
        }
        if let Some(expires_at) = job.expires_at.filter(|_| !cancelled) {
            self.expiries.0.push(expires_at.as_ms());
            self.expiries.1.push(id);
        }
        for parent in job.parents {
            self.depends.0.push(parent.0);
            self.depends.1.push(id);
        }
        self.ids.push(id);
        self.lanes.push(job.lane);
        self.correlations.push(job.correlation);
        self.options.push(job.options);
        self.payloads.push(job.payload);
    }

    fn add_waiting(&mut self, lane: LaneId, id: Uuid, due_at: Timestamp, blocked: bool) {
        self.waiting.0.push(lane);
        self.waiting.1.push(id);
        self.waiting.2.push(due_at.as_ms());
        self.waiting.3.push(blocked);
    }

    fn signals(&self) -> Vec<Signal> {
        let mut signals: Vec<Signal> = self.earliest.keys().map(|lane| Signal::Ready(*lane)).collect();
        if !self.waiting.0.is_empty() || !self.expiries.0.is_empty() {
            signals.push(Signal::Waiting);
        }
        signals.extend_from_slice(&self.forgotten);
        signals
    }

    /// Whether there is nothing but ready jobs without keys.
    fn are_ready(&self) -> bool {
        self.ready.0.len() == self.ids.len()
            && self.labels.0.is_empty()
            && self.expiries.0.is_empty()
            && self.lines.is_empty()
    }

    /// Ready jobs and nothing else: one statement, which is its own transaction.
    async fn write_ready(&self, client: &Object, shard: i16) -> Result<()> {
        let (lanes, tallies, changes) = self.deltas.columns();
        let statement = client
            .prepare_cached(
                "WITH put AS (
                     INSERT INTO faena.job (id, lane, correlation, options, payload)
                     SELECT * FROM unnest($1::uuid[], $2::int4[], $3::text[], $4::text[], $5::text[])),
                 line AS (
                     INSERT INTO faena.ready (lane, ready_at, id, retry_count, start_first)
                     SELECT lane, ready_at, id, 0, false FROM unnest($2::int4[], $6::int8[], $1::uuid[]) AS r(lane, ready_at, id))
                 INSERT INTO faena.counter AS c (shard, lane, tally, n)
                 SELECT $7, lane, tally, n FROM unnest($8::int4[], $9::int2[], $10::int8[]) AS d(lane, tally, n)
                 ON CONFLICT (shard, lane, tally) DO UPDATE SET n = c.n + excluded.n",
            )
            .await?;
        client
            .execute(
                &statement,
                &[
                    &self.ids,
                    &self.lanes,
                    &self.correlations,
                    &self.options,
                    &self.payloads,
                    &self.ready.1,
                    &shard,
                    &lanes,
                    &tallies,
                    &changes,
                ],
            )
            .await?;
        Ok(())
    }

    /// All statements go out at once; the answers are read together.
    async fn write(&self, client: &Object, shard: i16, frame: Frame) -> Result<()> {
        let counters = self.deltas.columns();
        let all: [(bool, &str, Vec<&(dyn ToSql + Sync)>); 8] = [
            (
                !self.ids.is_empty(),
                "INSERT INTO faena.job (id, lane, correlation, options, payload)
                 SELECT * FROM unnest($1::uuid[], $2::int4[], $3::text[], $4::text[], $5::text[])",
                vec![&self.ids, &self.lanes, &self.correlations, &self.options, &self.payloads],
            ),
            (
                !self.ready.0.is_empty(),
                "INSERT INTO faena.ready (lane, ready_at, id, retry_count, start_first, key)
                 SELECT lane, ready_at, id, 0, false, key
                 FROM unnest($1::int4[], $2::int8[], $3::uuid[], $4::int8[]) AS r(lane, ready_at, id, key)",
                vec![&self.ready.0, &self.ready.1, &self.ready.2, &self.ready.3],
            ),
            (
                !self.waiting.0.is_empty(),
                "INSERT INTO faena.waiting (lane, state, id, due_at, blocked, retry_count)
                 SELECT lane, $5, id, due_at, blocked, 0
                 FROM unnest($1::int4[], $2::uuid[], $3::int8[], $4::bool[]) AS w(lane, id, due_at, blocked)",
                vec![&self.waiting.0, &self.waiting.1, &self.waiting.2, &self.waiting.3, &PENDING],
            ),
            (
                !self.ended.0.is_empty(),
                "INSERT INTO faena.ended (lane, state, id, finished_at, run, retry_count, error, reason, log)
                 SELECT lane, $6, id, at, 0, 0, error, 'cancelled', log
                 FROM unnest($1::int4[], $2::uuid[], $3::int8[], $4::text[], $5::text[]) AS e(lane, id, at, error, log)",
                vec![&self.ended.0, &self.ended.1, &self.ended.2, &self.ended.3, &self.ended.4, &CANCELLED],
            ),
            (
                !self.labels.0.is_empty(),
                "INSERT INTO faena.label (kind, value, id)
                 SELECT * FROM unnest($1::int2[], $2::text[], $3::uuid[]) ON CONFLICT DO NOTHING",
                vec![&self.labels.0, &self.labels.1, &self.labels.2],
            ),
            (
                !self.expiries.0.is_empty(),
                "INSERT INTO faena.expiry (expires_at, id) SELECT * FROM unnest($1::int8[], $2::uuid[])",
                vec![&self.expiries.0, &self.expiries.1],
            ),
            (
                !self.depends.0.is_empty(),
                "INSERT INTO faena.dependency (parent, child)
                 SELECT * FROM unnest($1::uuid[], $2::uuid[]) ON CONFLICT DO NOTHING",
                vec![&self.depends.0, &self.depends.1],
            ),
            (!counters.0.is_empty(), COUNT, vec![&shard, &counters.0, &counters.1, &counters.2]),
        ];
        let mut statements = Vec::new();
        for (needed, sql, parameters) in &all {
            if *needed {
                statements.push((client.prepare_cached(sql).await?, parameters));
            }
        }
        let queries = statements.iter().map(|(statement, parameters)| client.query(statement, parameters.as_slice()));
        match frame {
            Frame::Inside => {
                try_join_all(queries).await?;
                put_key_queues(client, self.lines.clone()).await?;
            }
            Frame::Whole => {
                // A failed statement makes the COMMIT a rollback, so looking at all answers is enough.
                let begin = client.batch_execute("BEGIN");
                let commit = client.batch_execute("COMMIT");
                let (begun, written, committed): (_, std::result::Result<Vec<Vec<Row>>, _>, _) =
                    futures_util::future::join3(begin, try_join_all(queries), commit).await;
                begun?;
                written?;
                committed?;
            }
        }
        Ok(())
    }
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
