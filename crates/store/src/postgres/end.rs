//! What runs tell, and how they end, of many callers in one transaction.

use std::collections::{HashMap, HashSet};

use deadpool_postgres::Object;
use faena_domain::{JobId, JobState, LogEvent, LogLine, Run, Timestamp};
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use super::{
    Shared,
    batch::{Answer, Weight},
    family,
};
use crate::{
    LaneId, NoteKind, Outcome, Result, RunEnd, RunNote, Signal, StoreError, Tally,
    plan::Deltas,
    types::{CANCELLED, FAILED, RETRYING, state_code},
};

pub struct Call {
    pub work: Work,
    pub now: Timestamp,
    pub answer: Answer<Vec<bool>>,
}

#[derive(Clone)]
pub enum Work {
    Notes(Vec<RunNote>),
    Ends(Vec<RunEnd>),
}

impl Weight for Call {
    fn weight(&self) -> usize {
        match &self.work {
            Work::Notes(notes) => notes.len(),
            Work::Ends(ends) => ends.len(),
        }
    }
}

pub async fn run(shared: &Shared, shard: i16, calls: Vec<Call>) {
    let now = calls.iter().map(|call| call.now).max().unwrap_or_default();
    let (works, answers): (Vec<Work>, Vec<_>) = calls.into_iter().map(|call| (call.work, call.answer)).unzip();
    match shared.retrying(|| store(shared, shard, &works)).await {
        Ok((results, finished)) => {
            // The ends are committed; should this not come to pass, the children look for themselves later.
            if !finished.is_empty()
                && let Err(error) = shared.retrying(|| family::tell_children(shared, &finished, now)).await
            {
                tracing::warn!(%error, "dependent jobs will be looked at later");
            }
            for (answer, result) in answers.into_iter().zip(results) {
                let _ = answer.send(Ok(result));
            }
        }
        Err(error) => {
            for answer in answers {
                let _ = answer.send(Err(match &error {
                    StoreError::Unavailable(text) => StoreError::Unavailable(text.clone()),
                    other => StoreError::Broken(other.to_string()),
                }));
            }
        }
    }
}

/// One transaction: what each call's runs answer, and the finished jobs that others depend on.
async fn store(shared: &Shared, shard: i16, works: &[Work]) -> Result<(Vec<Vec<bool>>, Vec<JobId>)> {
    let mut runs: Vec<Run> = works
        .iter()
        .flat_map(|work| match work {
            Work::Notes(notes) => notes.iter().map(|note| note.run).collect::<Vec<_>>(),
            Work::Ends(ends) => ends.iter().map(|end| end.run).collect(),
        })
        .collect();
    runs.sort_unstable();
    runs.dedup();
    let client = shared.client().await?;
    // The block is the fence: whoever takes the jobs away deletes it first, and waits for this lock before.
    let lock = client.prepare_cached("SELECT run FROM faena.block WHERE run = ANY($1) FOR KEY SHARE").await?;
    let begin = client.batch_execute("BEGIN");
    let (begun, rows) = futures_util::future::join(begin, client.query(&lock, &[&runs])).await;
    begun?;
    let held: HashSet<Run> = rows?.iter().map(|row| row.get(0)).collect();

    let result = write(&client, shard, works, &held).await;
    let (results, effects) = client.end(result).await?;
    for (lane, ready_at) in &effects.ready {
        shared.cursors.lower(*lane, *ready_at);
    }
    shared.tell(effects.ready.iter().map(|(lane, _)| Signal::Ready(*lane)));
    if effects.waiting {
        shared.tell([Signal::Waiting]);
    }
    Ok((results, effects.parents))
}

#[derive(Default)]
struct Effects {
    ready: Vec<(LaneId, i64)>,
    waiting: bool,
    parents: Vec<JobId>,
}

async fn write(client: &Object, shard: i16, works: &[Work], held: &HashSet<Run>) -> Result<(Vec<Vec<bool>>, Effects)> {
    let mut results = Vec::with_capacity(works.len());
    let mut ends: Vec<RunEnd> = Vec::new();
    for work in works {
        match work {
            Work::Notes(notes) => {
                // Ends that came before these notes must be written first.
                results.push(write_notes(client, notes, held, &ends).await?);
            }
            Work::Ends(list) => {
                let stale: Vec<&RunEnd> = list.iter().filter(|end| !held.contains(&end.run)).collect();
                let repeated = ended_runs(client, &stale).await?;
                results.push(
                    list.iter().map(|end| held.contains(&end.run) || repeated.contains(&(end.id.0, end.run))).collect(),
                );
                ends.extend(list.iter().filter(|end| held.contains(&end.run)).cloned());
            }
        }
    }
    let effects = write_ends(client, shard, ends).await?;
    Ok((results, effects))
}

async fn write_ends(client: &Object, shard: i16, mut ends: Vec<RunEnd>) -> Result<Effects> {
    let mut effects = Effects::default();
    if ends.is_empty() {
        return Ok(effects);
    }
    turn_cancelled(client, &mut ends).await?;
    let mut deltas = Deltas::default();
    let mut completed = Vec::new();
    let mut others = Vec::new();
    let mut records = Vec::new();
    let mut finished = Vec::new();
    let mut closed = Vec::new();
    for end in ends {
        if end.closes_block {
            closed.push(end.run);
        }
        if end.on_record {
            records.push((end.id.0, end.outcome.state().is_terminal()));
        }
        if end.outcome.state().is_terminal() {
            finished.push(end.id.0);
        }
        if matches!(end.outcome, Outcome::Completed { .. }) { completed.push(end) } else { others.push(end) }
    }
    put_done(client, &completed, &mut deltas).await?;
    if !others.is_empty() {
        put_others(client, &others, &mut deltas, &mut effects).await?;
    }
    if !records.is_empty() {
        forget(client, &records).await?;
    }
    let (lanes, tallies, changes) = deltas.columns();
    let count = client.prepare_cached(super::submit::COUNT).await?;
    let close = client.prepare_cached("DELETE FROM faena.block WHERE run = ANY($1)").await?;
    let parents = client.prepare_cached("SELECT DISTINCT parent FROM faena.depends WHERE parent = ANY($1)").await?;
    let parameters: [&(dyn ToSql + Sync); 4] = [&shard, &lanes, &tallies, &changes];
    let close_parameters: [&(dyn ToSql + Sync); 1] = [&closed];
    let parent_parameters: [&(dyn ToSql + Sync); 1] = [&finished];
    let (counted, closed, parents) = futures_util::future::join3(
        client.execute(&count, &parameters),
        client.execute(&close, &close_parameters),
        client.query(&parents, &parent_parameters),
    )
    .await;
    counted?;
    closed?;
    effects.parents = parents?.iter().map(|row| JobId(row.get(0))).collect();
    Ok(effects)
}

/// A job that somebody wants cancelled does not go back to any line.
async fn turn_cancelled(client: &Object, ends: &mut [RunEnd]) -> Result<()> {
    let returning: Vec<Uuid> = ends
        .iter()
        .filter(|end| matches!(end.outcome, Outcome::Retry { .. } | Outcome::HandedBack))
        .map(|end| end.id.0)
        .collect();
    if returning.is_empty() {
        return Ok(());
    }
    let rows = client.query("SELECT id, reason FROM faena.cancel WHERE id = ANY($1)", &[&returning]).await?;
    let asked: HashMap<Uuid, String> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
    for end in ends {
        if matches!(end.outcome, Outcome::Retry { .. } | Outcome::HandedBack)
            && let Some(cause) = asked.get(&end.id.0)
        {
            LogLine::new(end.at, LogEvent::Cancelled, cause.clone()).append_to(&mut end.log);
            end.outcome = Outcome::Cancelled { cause: cause.clone() };
            end.on_record = true;
        }
    }
    Ok(())
}

/// The fast path: one statement for all. What is there already (told again after a lost answer) counts once.
async fn put_done(client: &Object, ends: &[RunEnd], deltas: &mut Deltas) -> Result<()> {
    if ends.is_empty() {
        return Ok(());
    }
    let lanes: Vec<LaneId> = ends.iter().map(|end| end.lane).collect();
    let ids: Vec<Uuid> = ends.iter().map(|end| end.id.0).collect();
    let finished: Vec<i64> = ends.iter().map(|end| end.at.as_ms()).collect();
    let runs: Vec<Run> = ends.iter().map(|end| end.run).collect();
    let retries: Vec<i16> = ends.iter().map(|end| small(end.retry_count)).collect();
    let started: Vec<Option<i64>> = ends.iter().map(|end| end.started_at.map(Timestamp::as_ms)).collect();
    let workers: Vec<Uuid> = ends.iter().map(|end| end.worker.0).collect();
    let results: Vec<Option<&str>> = ends
        .iter()
        .map(|end| match &end.outcome {
            Outcome::Completed { result } => result.as_deref(),
            _ => None,
        })
        .collect();
    let logs: Vec<&str> = ends.iter().map(|end| end.log.as_str()).collect();
    let statement = client
        .prepare_cached(
            "WITH put AS (
                 INSERT INTO faena.done (lane, id, finished_at, run, retry_count, started_at, worker, result, log)
                 SELECT * FROM unnest($1::int4[], $2::uuid[], $3::int8[], $4::int8[], $5::int2[], $6::int8[], $7::uuid[],
                                      $8::text[], $9::text[])
                 ON CONFLICT DO NOTHING RETURNING lane)
             SELECT lane, count(*) FROM put GROUP BY lane",
        )
        .await?;
    let rows = client
        .query(&statement, &[&lanes, &ids, &finished, &runs, &retries, &started, &workers, &results, &logs])
        .await?;
    for row in rows {
        deltas.moved(row.get(0), Tally::Held, Tally::Completed, row.get(1));
    }
    Ok(())
}

async fn put_others(client: &Object, ends: &[RunEnd], deltas: &mut Deltas, effects: &mut Effects) -> Result<()> {
    let over: Vec<&RunEnd> = ends.iter().filter(|end| end.outcome.state().is_terminal()).collect();
    let back: Vec<&RunEnd> = ends.iter().filter(|end| !end.outcome.state().is_terminal()).collect();
    for id in put_rows(client, &over, true).await? {
        if let Some(end) = over.iter().find(|end| end.id.0 == id) {
            deltas.moved(end.lane, Tally::Held, Tally::of(end.outcome.state()), 1);
        }
    }
    let written: HashSet<Uuid> = put_rows(client, &back, false).await?.into_iter().collect();
    let mut waiting = Line::default();
    let mut ready = Line::default();
    for end in back.into_iter().filter(|end| written.contains(&end.id.0)) {
        deltas.moved(end.lane, Tally::Held, Tally::of(end.outcome.state()), 1);
        match &end.outcome {
            Outcome::Retry { due_at, .. } => waiting.push(end.lane, end.id, *due_at, end.retry_count + 1),
            _ => {
                ready.push(end.lane, end.id, end.ready_at, end.retry_count);
                effects.ready.push((end.lane, end.ready_at.as_ms()));
            }
        }
    }
    effects.waiting |= !waiting.ids.is_empty();
    waiting.put_waiting(client, RETRYING).await?;
    ready.put_ready(client, false).await
}

/// Rows for `ready` or `waiting`.
#[derive(Default)]
pub struct Line {
    pub lanes: Vec<LaneId>,
    pub ids: Vec<Uuid>,
    pub times: Vec<i64>,
    pub retries: Vec<i16>,
}

impl Line {
    pub fn push(&mut self, lane: LaneId, id: JobId, at: Timestamp, retry_count: u32) {
        self.lanes.push(lane);
        self.ids.push(id.0);
        self.times.push(at.as_ms());
        self.retries.push(small(retry_count));
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

    pub async fn put_ready(&self, client: &Object, start_first: bool) -> Result<()> {
        if !self.ids.is_empty() {
            client
                .execute(
                    "INSERT INTO faena.ready (lane, ready_at, id, retry_count, start_first)
                     SELECT lane, at, id, retries, $5
                     FROM unnest($1::int4[], $2::uuid[], $3::int8[], $4::int2[]) AS l(lane, id, at, retries)",
                    &[&self.lanes, &self.ids, &self.times, &self.retries, &start_first],
                )
                .await?;
        }
        Ok(())
    }
}

/// Writes ends that are not completions into `ended` (`last`) or `attempt`, and answers with those that were not there yet.
async fn put_rows(client: &Object, ends: &[&RunEnd], last: bool) -> Result<Vec<Uuid>> {
    if ends.is_empty() {
        return Ok(Vec::new());
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
    let retries: Vec<i16> = ends.iter().map(|end| small(end.retry_count)).collect();
    let started: Vec<Option<i64>> = ends.iter().map(|end| end.started_at.map(Timestamp::as_ms)).collect();
    let workers: Vec<Uuid> = ends.iter().map(|end| end.worker.0).collect();
    let (errors, reasons): (Vec<Option<&str>>, Vec<Option<&str>>) = ends
        .iter()
        .map(|end| match &end.outcome {
            Outcome::Failed { error, reason } | Outcome::Retry { error, reason, .. } => {
                (Some(error.as_str()), Some(reason.as_str()))
            }
            Outcome::Cancelled { cause } => (Some(cause.as_str()), Some("cancelled")),
            _ => (None, None),
        })
        .unzip();
    let logs: Vec<&str> = ends.iter().map(|end| end.log.as_str()).collect();
    let columns = "e(lane, state, id, finished_at, run, retry_count, started_at, worker, error, reason, log)";
    let arrays = "$1::int4[], $2::int2[], $3::uuid[], $4::int8[], $5::int8[], $6::int2[], $7::int8[], $8::uuid[],
                  $9::text[], $10::text[], $11::text[]";
    let (table, chosen) = if last {
        ("ended", "lane, state, id, finished_at, run, retry_count, started_at, worker, error, reason, log")
    } else {
        ("attempt", "state, id, finished_at, run, retry_count, started_at, worker, error, reason, log")
    };
    let sql = format!(
        "INSERT INTO faena.{table} ({chosen}) SELECT {chosen} FROM unnest({arrays}) AS {columns}
         ON CONFLICT DO NOTHING RETURNING id"
    );
    let statement = client.prepare_cached(&sql).await?;
    let rows = client
        .query(
            &statement,
            &[&lanes, &states, &ids, &finished, &runs, &retries, &started, &workers, &errors, &reasons, &logs],
        )
        .await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

/// Removes what stood beside the fast path. `true` beside an id: the job has finished.
pub async fn forget(client: &Object, jobs: &[(Uuid, bool)]) -> Result<()> {
    let all: Vec<Uuid> = jobs.iter().map(|(id, _)| *id).collect();
    let finished: Vec<Uuid> = jobs.iter().filter(|(_, finished)| *finished).map(|(id, _)| *id).collect();
    client.execute("DELETE FROM faena.running WHERE id = ANY($1)", &[&all]).await?;
    if !finished.is_empty() {
        client.execute("DELETE FROM faena.cancel WHERE id = ANY($1)", &[&finished]).await?;
        client
            .execute(
                "DELETE FROM faena.job_key k USING faena.job j
                 WHERE j.id = ANY($1) AND j.options IS NOT NULL AND k.kind = 1
                   AND k.key = j.options::json ->> 'uniqueKey' AND k.id = j.id",
                &[&finished],
            )
            .await?;
    }
    Ok(())
}

/// Which of these runs are over, however they ended.
pub async fn ended_runs(client: &Object, ends: &[&RunEnd]) -> Result<HashSet<(Uuid, Run)>> {
    let keys: Vec<(LaneId, Uuid, Run)> = ends.iter().map(|end| (end.lane, end.id.0, end.run)).collect();
    ended(client, &keys).await
}

pub async fn ended(client: &Object, keys: &[(LaneId, Uuid, Run)]) -> Result<HashSet<(Uuid, Run)>> {
    if keys.is_empty() {
        return Ok(HashSet::new());
    }
    let lanes: Vec<LaneId> = keys.iter().map(|key| key.0).collect();
    let ids: Vec<Uuid> = keys.iter().map(|key| key.1).collect();
    let runs: Vec<Run> = keys.iter().map(|key| key.2).collect();
    let rows = client
        .query(
            "SELECT k.id, k.run FROM unnest($1::int4[], $2::uuid[], $3::int8[]) AS k(lane, id, run)
             WHERE EXISTS (SELECT FROM faena.done d WHERE d.lane = k.lane AND d.id = k.id AND d.run = k.run)
                OR EXISTS (SELECT FROM faena.ended e
                           WHERE e.lane = k.lane AND e.state IN (7, 8) AND e.id = k.id AND e.run = k.run)
                OR EXISTS (SELECT FROM faena.attempt a WHERE a.id = k.id AND a.run = k.run)",
            &[&lanes, &ids, &runs],
        )
        .await?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
}

/// `before`: ends of the same transaction that are not written yet.
async fn write_notes(client: &Object, notes: &[RunNote], held: &HashSet<Run>, before: &[RunEnd]) -> Result<Vec<bool>> {
    let keys: Vec<(LaneId, Uuid, Run)> = notes.iter().map(|note| (note.lane, note.id.0, note.run)).collect();
    let mut over = ended(client, &keys).await?;
    over.extend(before.iter().map(|end| (end.id.0, end.run)));
    let mut answers = Vec::with_capacity(notes.len());
    for note in notes {
        let live = held.contains(&note.run) && !over.contains(&(note.id.0, note.run));
        if live {
            write_note(client, note).await?;
        }
        answers.push(live);
    }
    Ok(answers)
}

async fn write_note(client: &Object, note: &RunNote) -> Result<()> {
    let progress = match &note.kind {
        NoteKind::Progress(progress) => Some(serde_json::to_string(progress).expect("progress is JSON")),
        _ => None,
    };
    let statement = client
        .prepare_cached(
            "INSERT INTO faena.running AS r
                 (id, lane, run, node, worker, retry_count, ready_at, started_at, updated_at, progress)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)
             ON CONFLICT (id) DO UPDATE SET run = excluded.run, node = excluded.node, worker = excluded.worker,
                 retry_count = excluded.retry_count, ready_at = excluded.ready_at, started_at = excluded.started_at,
                 updated_at = excluded.updated_at, progress = coalesce(excluded.progress, r.progress)",
        )
        .await?;
    client
        .execute(
            &statement,
            &[
                &note.id.0,
                &note.lane,
                &note.run,
                &note.node.0,
                &note.worker.0,
                &small(note.retry_count),
                &note.ready_at.as_ms(),
                &note.started_at.as_ms(),
                &note.at.as_ms(),
                &progress,
            ],
        )
        .await?;
    match &note.kind {
        NoteKind::Started => {}
        NoteKind::Progress(progress) => {
            let text = progress.message.clone().or_else(|| progress.percentage.map(|p| format!("{p} %"))).unwrap_or_default();
            add_note(client, note.id, Some(note.run), LogLine::new(note.at, LogEvent::Progress, text)).await?;
        }
        NoteKind::Message(text) => {
            add_note(client, note.id, Some(note.run), LogLine::new(note.at, LogEvent::Message, text.clone())).await?;
        }
        NoteKind::Step { name, result } => {
            client
                .execute(
                    "INSERT INTO faena.step (id, name, run, at, result) VALUES ($1, $2, $3, $4, $5) ON CONFLICT DO NOTHING",
                    &[&note.id.0, name, &note.run, &note.at.as_ms(), result],
                )
                .await?;
        }
    }
    Ok(())
}

pub async fn add_note(client: &Object, id: JobId, run: Option<Run>, line: LogLine) -> Result<()> {
    client
        .execute(
            "INSERT INTO faena.note (id, run, log) VALUES ($1, $2, $3)",
            &[&id.0, &run, &LogLine::chunk(&[line])],
        )
        .await?;
    Ok(())
}

pub fn small(number: u32) -> i16 {
    i16::try_from(number).unwrap_or(i16::MAX)
}
