//! Stores the updates and ends of runs that many callers report, in one transaction.

use std::{
    borrow::Cow,
    collections::{HashMap, HashSet},
};

use deadpool_postgres::Object;
use faena_domain::{JobId, JobState, LogEvent, LogLine, Run, Timestamp};
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use super::{
    Shared,
    batch::{Answer, Weight},
    claim::BEGIN_CLAIM,
    cleanup::{clean_up, frees_capacity},
    complete::{DoneColumns, complete, plain_completions},
    dependents, events,
    job_log::trim_attempts,
    run_updates::write_updates,
    submit::put_key_queues,
};
use crate::{
    JobExit, LaneId, QueueChange, Result, RunEnd, RunOutcome, RunUpdate, Signal, Tally, UpdateResult,
    assemble::parse_options,
    events::GUARDIAN,
    jobs::state_code,
    plan::{Deltas, key_number},
    sql::{CANCELLED, FAILED, RETRYING, sql},
};

pub struct Call {
    pub work: Work,
    pub now: Timestamp,
    pub answer: Answer<Vec<UpdateResult>>,
}

#[derive(Clone)]
pub enum Work {
    Updates(Vec<RunUpdate>),
    Ends(Vec<RunEnd>),
}

impl Weight for Call {
    fn weight(&self) -> usize {
        match &self.work {
            Work::Updates(updates) => updates.len(),
            Work::Ends(ends) => ends.len(),
        }
    }

    fn is_abandoned(&self) -> bool {
        self.answer.is_closed()
    }
}

pub async fn run(shared: &Shared, shard: i16, calls: Vec<Call>) {
    let now = calls.iter().map(|call| call.now).max().unwrap_or_default();
    let (works, answers): (Vec<Work>, Vec<_>) = calls.into_iter().map(|call| (call.work, call.answer)).unzip();
    match shared.retrying(|| store(shared, shard, &works)).await {
        Ok((results, finished)) => {
            shared.signal_events();
            // The ends are committed; if this fails, a later check releases the dependents.
            if !finished.is_empty()
                && let Err(error) = shared.retrying(|| dependents::release_dependents(shared, &finished, now)).await
            {
                tracing::warn!(%error, "dependents not released, retrying later");
            }
            for (answer, result) in answers.into_iter().zip(results) {
                let _ = answer.send(Ok(result));
            }
        }
        Err(error) => {
            for answer in answers {
                let _ = answer.send(Err(error.clone_for_caller()));
            }
        }
    }
}

/// Writes one transaction. Returns, per call, whether each report was accepted, and the finished jobs that other jobs depend on.
async fn store(shared: &Shared, shard: i16, works: &[Work]) -> Result<(Vec<Vec<UpdateResult>>, Vec<JobId>)> {
    let mut runs: Vec<Run> = works
        .iter()
        .flat_map(|work| match work {
            Work::Updates(updates) => updates.iter().map(|update| update.run).collect::<Vec<_>>(),
            Work::Ends(ends) => ends.iter().map(|end| end.run).collect(),
        })
        .collect();
    runs.sort_unstable();
    runs.dedup();
    let client = shared.client().await?;
    // No claim is released meanwhile: a release begins by deleting the claim, which waits for this lock.
    let lock = client
        .prepare_cached("SELECT run, claimed_at, check_each FROM faena.claim WHERE run = ANY($1) FOR KEY SHARE")
        .await?;
    // This transaction only looks up single rows; without these settings the planner might scan whole tables.
    let begin = client.batch_execute(BEGIN_CLAIM);
    let (begun, rows) = futures_util::future::join(begin, client.query(&lock, &[&runs])).await;
    begun?;
    let rows = rows?;
    let open_claims: HashMap<Run, i64> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
    let check_each = rows.len() < runs.len() || rows.iter().any(|row| row.get(2));
    if !check_each && let Some(ends) = plain_completions(works, &shared.lanes) {
        let answer = complete(client, shard, works, &ends).await?;
        if frees_capacity(shared, ends.iter().map(|end| end.lane)) {
            shared.signal([Signal::Capacity]);
        }
        return Ok(answer);
    }

    let result = write(shared, &client, shard, works, &open_claims).await;
    let (results, effects) = client.end(result).await?;
    if frees_capacity(shared, effects.freed_lanes.iter().copied()) {
        shared.signal([Signal::Capacity]);
    }
    shared.queue_feed.add(effects.queue_changes);
    for (lane, ready_at) in &effects.ready {
        shared.cursors.lower(*lane, *ready_at);
    }
    shared.signal(effects.ready.iter().map(|(lane, _)| Signal::Ready(*lane)));
    if effects.waiting {
        shared.signal([Signal::Waiting]);
    }
    shared.signal(effects.signals);
    Ok((results, effects.parents))
}

#[derive(Default)]
struct Effects {
    ready: Vec<(LaneId, i64)>,
    queue_changes: Vec<QueueChange>,
    /// Lanes of jobs that are no longer in flight.
    freed_lanes: Vec<LaneId>,
    waiting: bool,
    signals: Vec<Signal>,
    /// Ends that this transaction has written.
    written: HashSet<Key>,
    finished: Vec<Uuid>,
    /// Finished jobs that other jobs depend on.
    parents: Vec<JobId>,
}

impl Effects {
    fn add(&mut self, more: Effects) {
        self.ready.extend(more.ready);
        self.queue_changes.extend(more.queue_changes);
        self.freed_lanes.extend(more.freed_lanes);
        self.waiting |= more.waiting;
        self.signals.extend(more.signals);
        self.written.extend(more.written);
        self.finished.extend(more.finished);
        self.parents.extend(more.parents);
    }
}

pub type Key = (Uuid, Run);

pub fn key(end: &RunEnd) -> Key {
    (end.id.0, end.run)
}

async fn write(
    shared: &Shared,
    client: &Object,
    shard: i16,
    works: &[Work],
    open_claims: &HashMap<Run, i64>,
) -> Result<(Vec<Vec<UpdateResult>>, Effects)> {
    let mut results = Vec::with_capacity(works.len());
    let mut ends: HashMap<Key, &RunEnd> = HashMap::new();
    let mut closed = Vec::new();
    for work in works {
        let answers = match work {
            Work::Updates(updates) => {
                write_updates(client, updates, open_claims, &ends, &shared.options.job_limits).await?
            }
            Work::Ends(list) => {
                for end in list.iter().filter(|end| open_claims.contains_key(&end.run)) {
                    // If a run has several ends, the first one counts.
                    ends.entry(key(end)).or_insert(end);
                    if end.closes_claim {
                        closed.push(end.run);
                    }
                }
                Vec::new()
            }
        };
        results.push(answers);
    }
    let since = open_claims.values().copied().min().unwrap_or_default();
    let (by_guardian, others): (Vec<RunEnd>, Vec<RunEnd>) =
        ends.values().map(|end| (*end).clone()).partition(|end| end.by_guardian);
    let mut effects = write_ends(shared, client, shard, others, since).await?;
    if !by_guardian.is_empty() {
        events::set_actor(client, GUARDIAN).await?;
        effects.add(write_ends(shared, client, shard, by_guardian, since).await?);
    }
    ends.retain(|key, _| effects.written.contains(key));
    close(client, &closed, &mut effects).await?;

    // A repeated report, sent because the response was lost, is accepted and counts once.
    let all = works.iter().flat_map(|work| match work {
        Work::Ends(list) => list.as_slice(),
        Work::Updates(_) => &[],
    });
    let keys: Vec<_> =
        all.filter(|end| !ends.contains_key(&key(end))).map(|end| (end.lane, end.id.0, end.run)).collect();
    let before = stored_ends(client, &keys).await?;
    let is_accepted = |end: &RunEnd| match ends.get(&key(end)) {
        Some(written) => written.outcome == end.outcome && written.at == end.at,
        None => before.get(&key(end)).is_some_and(|(state, at_ms)| end.is_stored_as(*state, *at_ms)),
    };
    for (work, answers) in works.iter().zip(&mut results) {
        if let Work::Ends(list) = work {
            *answers = list.iter().map(|end| UpdateResult::of(is_accepted(end))).collect();
        }
    }
    Ok((results, effects))
}

/// Writes the ends of runs that have not ended. `since`: none of these runs began before this time.
async fn write_ends(shared: &Shared, client: &Object, shard: i16, ends: Vec<RunEnd>, since: i64) -> Result<Effects> {
    let mut effects = Effects::default();
    if ends.is_empty() {
        return Ok(effects);
    }
    let mut deltas = Deltas::default();
    let (completed, mut not_completed): (Vec<RunEnd>, Vec<RunEnd>) =
        ends.into_iter().partition(|end| matches!(end.outcome, RunOutcome::Completed { .. }));
    let mut exits = Vec::new();
    effects.written = put_done(client, &completed, since, &mut deltas).await?;
    for end in completed.iter().filter(|end| effects.written.contains(&key(end))) {
        effects.finished.push(end.id.0);
        effects.freed_lanes.push(end.lane);
        if end.may_have_other_rows || shared.lanes.any_keyed([end.lane]) {
            exits.push((end.id.0, JobExit::Finished));
        }
    }
    let mut ready = QueueRows::default();
    if !not_completed.is_empty() {
        let keys: Vec<_> = not_completed.iter().map(|end| (end.lane, end.id.0, end.run)).collect();
        let stored = stored_ends(client, &keys).await?;
        let existing_jobs = existing(client, keys.iter().map(|key| key.1)).await?;
        not_completed.retain(|end| !stored.contains_key(&key(end)) && existing_jobs.contains(&end.id.0));
        apply_cancel_requests(client, &mut not_completed).await?;
        ready = put_not_completed(client, &not_completed, &mut deltas, &mut effects).await?;
        effects.freed_lanes.extend(not_completed.iter().map(|end| end.lane));
        // Only completions trust `may_have_other_rows`; for all other ends, the reporter may not know about everything that is stored.
        exits.extend(not_completed.iter().map(|end| (end.id.0, JobExit::of(end.outcome.state()))));
    }
    if !exits.is_empty() {
        effects.signals = clean_up(client, &exits).await?;
    }
    ready.put_ready(client, false).await?;
    super::submit::apply(client, shard, &deltas).await?;
    Ok(effects)
}

/// Deletes the claims whose last job has ended, and finds the finished jobs that other jobs depend on.
async fn close(client: &Object, closed: &[Run], effects: &mut Effects) -> Result<()> {
    let close = client.prepare_cached("DELETE FROM faena.claim WHERE run = ANY($1)").await?;
    let parents = client.prepare_cached("SELECT DISTINCT parent FROM faena.dependency WHERE parent = ANY($1)").await?;
    let close_parameters: [&(dyn ToSql + Sync); 1] = [&closed];
    let parent_parameters: [&(dyn ToSql + Sync); 1] = [&effects.finished];
    let (closed, parents) = futures_util::future::join(
        client.execute(&close, &close_parameters),
        client.query(&parents, &parent_parameters),
    )
    .await;
    closed?;
    effects.parents = parents?.iter().map(|row| JobId(row.get(0))).collect();
    Ok(())
}

/// Turns ends that would requeue a job into cancellations, if a cancellation of the job was requested.
async fn apply_cancel_requests(client: &Object, ends: &mut [RunEnd]) -> Result<()> {
    let requeued: Vec<Uuid> = ends
        .iter()
        .filter(|end| matches!(end.outcome, RunOutcome::Retry { .. } | RunOutcome::Released))
        .map(|end| end.id.0)
        .collect();
    if requeued.is_empty() {
        return Ok(());
    }
    let rows = client.query("SELECT id, reason FROM faena.cancel_request WHERE id = ANY($1)", &[&requeued]).await?;
    let requests: HashMap<Uuid, String> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
    for end in ends {
        if matches!(end.outcome, RunOutcome::Retry { .. } | RunOutcome::Released)
            && let Some(cause) = requests.get(&end.id.0)
        {
            LogLine::new(end.at, LogEvent::Cancelled, cause.clone()).append_to(&mut end.log);
            end.outcome = RunOutcome::Cancelled { cause: cause.clone() };
        }
    }
    Ok(())
}

/// Writes completions with one statement that skips runs that have ended. Returns the runs that it has written.
///
/// `done` is searched only from the day on which the first of these runs began.
async fn put_done(client: &Object, ends: &[RunEnd], since: i64, deltas: &mut Deltas) -> Result<HashSet<Key>> {
    if ends.is_empty() {
        return Ok(HashSet::new());
    }
    let until = ends.iter().map(|end| end.at.as_ms()).max().unwrap_or(since);
    let columns = DoneColumns::of(ends.iter());
    let statement = client
        .prepare_cached(
            // The planner cannot turn these subqueries into joins, so each is one index lookup.
            sql!("INSERT INTO faena.done (lane, id, finished_at, run, retry_count, started_at, worker, result, log)
             SELECT * FROM unnest($1::int4[], $2::uuid[], $3::int8[], $4::int8[], $5::int2[], $6::int8[], $7::uuid[],
                                  $8::text[], $9::text[])
                 AS e(lane, id, finished_at, run, retry_count, started_at, worker, result, log)
             WHERE (SELECT 1 FROM faena.done d WHERE d.lane = e.lane AND d.id = e.id
                        AND d.finished_at BETWEEN $10 AND $11 LIMIT 1) IS NULL
               AND (SELECT 1 FROM faena.attempt a WHERE a.id = e.id AND a.run = e.run) IS NULL
               AND (SELECT 1 FROM faena.job j WHERE j.id = e.id) IS NOT NULL
               AND (SELECT 1 FROM faena.ended x WHERE x.lane = e.lane AND x.state IN ({FAILED}, {CANCELLED}) AND x.id = e.id LIMIT 1) IS NULL
             ON CONFLICT DO NOTHING RETURNING lane, id, run"),
        )
        .await?;
    let mut parameters = columns.parameters();
    parameters.push(&since);
    parameters.push(&until);
    let rows = client.query(&statement, &parameters).await?;
    for row in &rows {
        deltas.moved(row.get(0), Tally::InFlight, Tally::Completed, 1);
    }
    Ok(rows.iter().map(|row| (row.get(1), row.get(2))).collect())
}

fn count_end(end: &RunEnd, deltas: &mut Deltas) {
    deltas.moved(end.lane, Tally::InFlight, Tally::of(end.outcome.state()), 1);
    if let Some(reason) = end.outcome.error_reason() {
        deltas.timed_out(end.lane, reason);
    }
}

/// Writes the ends of runs that did not complete their jobs. Returns the jobs that return to `ready`.
async fn put_not_completed(
    client: &Object,
    ends: &[RunEnd],
    deltas: &mut Deltas,
    effects: &mut Effects,
) -> Result<QueueRows> {
    let finished: Vec<&RunEnd> = ends.iter().filter(|end| end.outcome.state().is_terminal()).collect();
    let requeued: Vec<&RunEnd> = ends.iter().filter(|end| !end.outcome.state().is_terminal()).collect();
    let runs: Vec<Run> = ends.iter().map(|end| end.run).collect();
    client.execute("UPDATE faena.claim SET check_each = true WHERE run = ANY($1) AND NOT check_each", &[&runs]).await?;
    put_rows(client, &finished, true).await?;
    for end in finished {
        count_end(end, deltas);
        effects.written.insert(key(end));
        effects.finished.push(end.id.0);
    }
    put_rows(client, &requeued, false).await?;
    let returned = requeued.iter().filter(|end| matches!(end.outcome, RunOutcome::Released)).map(|end| end.id.0);
    trim_attempts(client, &returned.collect::<Vec<_>>()).await?;
    let mut waiting = QueueRows::default();
    let mut ready = QueueRows::default();
    for end in requeued {
        effects.written.insert(key(end));
        count_end(end, deltas);
        match &end.outcome {
            RunOutcome::Retry { due_at, .. } => {
                waiting.push(end.lane, end.id, *due_at, end.retry_count + 1);
                effects.queue_changes.push(QueueChange::delayed(end.lane, due_at.as_ms(), end.id));
            }
            _ => {
                effects.queue_changes.push(QueueChange::ready(end.lane, end.ready_at.as_ms(), end.id));
                ready.push(end.lane, end.id, end.ready_at, end.retry_count);
                effects.ready.push((end.lane, end.ready_at.as_ms()));
            }
        }
    }
    effects.waiting |= !waiting.ids.is_empty();
    waiting.put_waiting(client, RETRYING).await?;
    Ok(ready)
}

/// Rows for `ready` or `waiting`.
#[derive(Default)]
pub struct QueueRows {
    pub lanes: Vec<LaneId>,
    pub ids: Vec<Uuid>,
    pub times: Vec<i64>,
    pub retries: Vec<i16>,
}

impl QueueRows {
    pub fn push(&mut self, lane: LaneId, id: JobId, at: Timestamp, retry_count: u32) {
        self.lanes.push(lane);
        self.ids.push(id.0);
        self.times.push(at.as_ms());
        self.retries.push(saturating_i16(retry_count));
    }

    pub async fn put_waiting(&self, client: &Object, state: i16) -> Result<()> {
        if !self.ids.is_empty() {
            client
                .execute(
                    "INSERT INTO faena.waiting (lane, state, id, due_at, blocked, retry_count)
                     SELECT lane, $5, id, at, false, retries
                     FROM unnest($1::int4[], $2::uuid[], $3::int8[], $4::int2[]) AS l(lane, id, at, retries)",
                    &[&self.lanes, &self.ids, &self.times, &self.retries, &state],
                )
                .await?;
        }
        Ok(())
    }

    pub async fn put_ready(&self, client: &Object, must_record_start: bool) -> Result<()> {
        if self.ids.is_empty() {
            return Ok(());
        }
        let keys = self.keys(client).await?;
        client
            .execute(
                "INSERT INTO faena.ready (lane, ready_at, id, retry_count, must_record_start, key)
                 SELECT lane, at, id, retries, $5, key
                 FROM unnest($1::int4[], $2::uuid[], $3::int8[], $4::int2[], $6::int8[]) AS l(lane, id, at, retries, key)",
                &[&self.lanes, &self.ids, &self.times, &self.retries, &must_record_start, &keys],
            )
            .await?;
        let entries = self.lanes.iter().zip(&keys).zip(&self.times);
        put_key_queues(client, entries.filter_map(|((lane, key), at)| Some((*lane, (*key)?, *at))).collect()).await
    }

    /// Returns the key of each job in a keyed lane.
    async fn keys(&self, client: &Object) -> Result<Vec<Option<i64>>> {
        let statement = client
            .prepare_cached(
                "SELECT j.id, j.options FROM faena.job j JOIN faena.lane l ON l.id = j.lane AND l.keyed WHERE j.id = ANY($1)",
            )
            .await?;
        let mut keys: HashMap<Uuid, i64> = HashMap::new();
        for row in client.query(&statement, &[&self.ids]).await? {
            if let Some(key) = parse_options(row.get(1))?.concurrency_key {
                keys.insert(row.get(0), key_number(&key));
            }
        }
        Ok(self.ids.iter().map(|id| keys.get(id).copied()).collect())
    }
}

/// Writes ends that are not completions, into `ended` if `is_final`, otherwise into `attempt`.
async fn put_rows(client: &Object, ends: &[&RunEnd], is_final: bool) -> Result<()> {
    if ends.is_empty() {
        return Ok(());
    }
    let lanes: Vec<LaneId> = ends.iter().map(|end| end.lane).collect();
    let states: Vec<i16> = ends
        .iter()
        .map(|end| match end.outcome.state() {
            JobState::Failed => FAILED,
            JobState::Cancelled => CANCELLED,
            other => state_code(other),
        })
        .collect();
    let ids: Vec<Uuid> = ends.iter().map(|end| end.id.0).collect();
    let finished: Vec<i64> = ends.iter().map(|end| end.at.as_ms()).collect();
    let runs: Vec<Run> = ends.iter().map(|end| end.run).collect();
    let retries: Vec<i16> = ends.iter().map(|end| saturating_i16(end.retry_count)).collect();
    let started: Vec<Option<i64>> = ends.iter().map(|end| end.started_at.map(Timestamp::as_ms)).collect();
    let workers: Vec<Uuid> = ends.iter().map(|end| end.worker.0).collect();
    let (errors, reasons): (Vec<Option<Cow<str>>>, Vec<Option<&str>>) = ends
        .iter()
        .map(|end| match &end.outcome {
            RunOutcome::Failed { error, reason } | RunOutcome::Retry { error, reason, .. } => {
                (Some(storable(error)), Some(reason.as_str()))
            }
            RunOutcome::Cancelled { cause } => (Some(storable(cause)), Some("cancelled")),
            _ => (None, None),
        })
        .unzip();
    let logs: Vec<&str> = ends.iter().map(|end| end.log.as_str()).collect();
    let columns = "e(lane, state, id, finished_at, run, retry_count, started_at, worker, error, reason, log)";
    let arrays = "$1::int4[], $2::int2[], $3::uuid[], $4::int8[], $5::int8[], $6::int2[], $7::int8[], $8::uuid[],
                  $9::text[], $10::text[], $11::text[]";
    let (table, chosen) = if is_final {
        ("ended", "lane, state, id, finished_at, run, retry_count, started_at, worker, error, reason, log")
    } else {
        ("attempt", "state, id, finished_at, run, retry_count, started_at, worker, error, reason, log")
    };
    let sql = format!("INSERT INTO faena.{table} ({chosen}) SELECT {chosen} FROM unnest({arrays}) AS {columns}");
    let statement = client.prepare_cached(&sql).await?;
    client
        .execute(
            &statement,
            &[&lanes, &states, &ids, &finished, &runs, &retries, &started, &workers, &errors, &reasons, &logs],
        )
        .await?;
    Ok(())
}

/// Replaces NUL characters, which a text in PostgreSQL cannot contain but the error of a worker may.
pub fn storable(text: &str) -> Cow<'_, str> {
    if text.contains('\0') { Cow::Owned(text.replace('\0', "\u{fffd}")) } else { Cow::Borrowed(text) }
}

/// Returns which of these jobs still exist: a claim may contain ids of jobs that were deleted or pruned.
pub async fn existing(client: &Object, ids: impl Iterator<Item = Uuid>) -> Result<HashSet<Uuid>> {
    let ids: Vec<Uuid> = ids.collect();
    let statement = client.prepare_cached("SELECT id FROM faena.job WHERE id = ANY($1)").await?;
    Ok(client.query(&statement, &[&ids]).await?.iter().map(|row| row.get(0)).collect())
}

/// Returns the stored state and time of those runs that have ended.
pub async fn stored_ends(client: &Object, keys: &[(LaneId, Uuid, Run)]) -> Result<HashMap<Key, (i16, i64)>> {
    if keys.is_empty() {
        return Ok(HashMap::new());
    }
    let lanes: Vec<LaneId> = keys.iter().map(|key| key.0).collect();
    let ids: Vec<Uuid> = keys.iter().map(|key| key.1).collect();
    let runs: Vec<Run> = keys.iter().map(|key| key.2).collect();
    let statement = client
        .prepare_cached(
            sql!("SELECT k.id, k.run, o.state, o.finished_at FROM unnest($1::int4[], $2::uuid[], $3::int8[]) AS k(lane, id, run)
             CROSS JOIN LATERAL (
                 SELECT {COMPLETED}::int2 AS state, finished_at FROM faena.done d
                 WHERE d.lane = k.lane AND d.id = k.id AND d.run = k.run
                 UNION ALL
                 SELECT state, finished_at FROM faena.ended e
                 WHERE e.lane = k.lane AND e.state IN ({FAILED}, {CANCELLED}) AND e.id = k.id AND e.run = k.run
                 UNION ALL
                 SELECT state, finished_at FROM faena.attempt a WHERE a.id = k.id AND a.run = k.run
                 LIMIT 1) o"),
        )
        .await?;
    let rows = client.query(&statement, &[&lanes, &ids, &runs]).await?;
    Ok(rows.iter().map(|row| ((row.get(0), row.get(1)), (row.get(2), row.get(3)))).collect())
}

pub fn saturating_i16(number: u32) -> i16 {
    i16::try_from(number).unwrap_or(i16::MAX)
}
