//! The rows of a submission, collected per table and written with one statement each.

use std::{borrow::Cow, collections::HashMap};

use deadpool_postgres::Object;
use faena_domain::{JobId, JobState, LogEvent, LogLine, NewJob, Timestamp};
use futures_util::future::try_join_all;
use tokio_postgres::{Row, types::ToSql};
use uuid::Uuid;

use super::submit::{COUNT, KeyQueueEntry, TakenKeys, put_key_queues};
use crate::{
    LaneId, QueueChange, Result, Signal, Submitted, Tally,
    plan::{self, Deltas, Parents, Placement, PlannedJob},
    sql::{CANCELLED, PENDING},
};

/// Lanes, ids, times, causes and logs.
pub type Ended = (Vec<LaneId>, Vec<Uuid>, Vec<i64>, Vec<String>, Vec<String>);

/// The columns of everything that one transaction inserts.
#[derive(Default)]
pub struct Rows {
    pub ids: Vec<Uuid>,
    pub lanes: Vec<LaneId>,
    pub correlations: Vec<Option<String>>,
    pub options: Vec<Option<String>>,
    pub payloads: Vec<String>,
    pub ready: (Vec<LaneId>, Vec<i64>, Vec<Uuid>, Vec<Option<i64>>),
    pub key_queues: Vec<KeyQueueEntry>,
    pub waiting: (Vec<LaneId>, Vec<Uuid>, Vec<i64>, Vec<bool>),
    pub ended: Ended,
    pub labels: (Vec<i16>, Vec<String>, Vec<Uuid>),
    pub expiries: (Vec<i64>, Vec<Uuid>),
    pub dependencies: (Vec<Uuid>, Vec<Uuid>),
    pub deltas: Deltas,
    pub earliest: HashMap<LaneId, i64>,
    /// Signals of jobs that were cancelled at submit.
    pub signals: Vec<Signal>,
}

/// Whether `write` opens and closes the transaction itself, in the same round trip.
pub enum TransactionControl {
    BeginAndCommit,
    ByCaller,
}

impl Rows {
    pub fn add(
        &mut self,
        jobs: &[NewJob],
        lanes: &[LaneId],
        mut known: Parents,
        TakenKeys { existing, repeated, .. }: &TakenKeys,
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
            let status: JobState = planned.placement.state();
            if status == JobState::Cancelled {
                known.insert(planned.id, Some(status));
            }
            let answer = Submitted { id: planned.id, status, created_at: planned.id.created_at(), existed: false };
            if !repeated.is_empty() {
                answered.insert(planned.id, answer.clone());
            }
            answers.push(answer);
            self.deltas.created(*lane, Tally::of(status));
            self.add_planned(planned, now);
        }
        answers
    }

    pub fn add_planned(&mut self, job: PlannedJob, now: Timestamp) {
        let id = job.id.0;
        let cancelled = job.placement.state() == JobState::Cancelled;
        match job.placement {
            Placement::Ready => {
                let ready_at = job.id.created_at().as_ms();
                self.ready.0.push(job.lane);
                self.ready.1.push(ready_at);
                self.ready.2.push(id);
                self.ready.3.push(job.key);
                self.key_queues.extend(job.key.map(|key| (job.lane, key, ready_at)));
                let earliest = self.earliest.entry(job.lane).or_insert(ready_at);
                *earliest = (*earliest).min(ready_at);
            }
            Placement::Delayed { due_at } => self.add_waiting(job.lane, id, due_at, false),
            Placement::Blocked { recheck_at } => self.add_waiting(job.lane, id, recheck_at, true),
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
            self.dependencies.0.push(parent.0);
            self.dependencies.1.push(id);
        }
        self.ids.push(id);
        self.lanes.push(job.lane);
        self.correlations.push(job.correlation);
        self.options.push(job.options);
        self.payloads.push(job.payload);
    }

    pub fn add_waiting(&mut self, lane: LaneId, id: Uuid, due_at: Timestamp, blocked: bool) {
        self.waiting.0.push(lane);
        self.waiting.1.push(id);
        self.waiting.2.push(due_at.as_ms());
        self.waiting.3.push(blocked);
    }

    pub fn signals(&self) -> Vec<Signal> {
        let mut signals: Vec<Signal> = self.earliest.keys().map(|lane| Signal::Ready(*lane)).collect();
        if !self.waiting.0.is_empty() || !self.expiries.0.is_empty() {
            signals.push(Signal::Waiting);
        }
        signals.extend_from_slice(&self.signals);
        signals
    }

    /// Returns a change for each job that is ready or waits for a time.
    pub fn queue_changes(&self) -> impl Iterator<Item = QueueChange> {
        let ready = self.ready.0.iter().zip(&self.ready.1).zip(&self.ready.2);
        let ready = ready.map(|((lane, at), id)| QueueChange::ready(*lane, *at, JobId(*id)));
        let waiting = self.waiting.0.iter().zip(&self.waiting.1).zip(self.waiting.2.iter().zip(&self.waiting.3));
        let delayed = waiting.filter(|(_, (_, blocked))| !**blocked);
        ready.chain(delayed.map(|((lane, id), (at, _))| QueueChange::delayed(*lane, *at, JobId(*id))))
    }

    /// Returns the lanes that get jobs, each of them once.
    fn distinct_lanes(&self) -> Vec<LaneId> {
        let mut lanes: Vec<LaneId> = self.deltas.0.keys().map(|(lane, _)| *lane).collect();
        lanes.dedup();
        lanes
    }

    /// Returns whether there are only ready jobs without keys, labels and expiries.
    pub fn are_ready(&self) -> bool {
        self.ready.0.len() == self.ids.len()
            && self.labels.0.is_empty()
            && self.expiries.0.is_empty()
            && self.key_queues.is_empty()
    }

    /// Writes only ready jobs: one statement, which is its own transaction.
    pub async fn write_ready(&self, client: &Object, shard: i16) -> Result<()> {
        let (lanes, tallies, changes) = self.deltas.columns();
        let statement = client
            .prepare_cached(
                "WITH new_job AS (
                     INSERT INTO faena.job (id, lane, correlation, options, payload)
                     SELECT * FROM unnest($1::uuid[], $2::int4[], $3::text[], $4::text[], $5::text[])
                     WHERE (SELECT faena.require_lanes($11))),
                 new_ready_job AS (
                     INSERT INTO faena.ready (lane, ready_at, id, retry_count, must_record_start)
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
                    &self.distinct_lanes(),
                ],
            )
            .await?;
        Ok(())
    }

    /// Sends all statements at once, and reads the answers together.
    pub async fn write(&self, client: &Object, shard: i16, control: TransactionControl) -> Result<()> {
        let (counters, lanes) = (self.deltas.columns(), self.distinct_lanes());
        let all: [(bool, &str, Vec<&(dyn ToSql + Sync)>); 9] = [
            (!lanes.is_empty(), "SELECT faena.require_lanes($1)", vec![&lanes]),
            (
                !self.ids.is_empty(),
                "INSERT INTO faena.job (id, lane, correlation, options, payload)
                 SELECT * FROM unnest($1::uuid[], $2::int4[], $3::text[], $4::text[], $5::text[])",
                vec![&self.ids, &self.lanes, &self.correlations, &self.options, &self.payloads],
            ),
            (
                !self.ready.0.is_empty(),
                "INSERT INTO faena.ready (lane, ready_at, id, retry_count, must_record_start, key)
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
                !self.dependencies.0.is_empty(),
                "INSERT INTO faena.dependency (parent, child)
                 SELECT * FROM unnest($1::uuid[], $2::uuid[]) ON CONFLICT DO NOTHING",
                vec![&self.dependencies.0, &self.dependencies.1],
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
        match control {
            TransactionControl::ByCaller => {
                try_join_all(queries).await?;
                put_key_queues(client, self.key_queues.clone()).await?;
            }
            TransactionControl::BeginAndCommit => {
                // A failed statement turns the COMMIT into a rollback, so checking all answers is enough.
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
