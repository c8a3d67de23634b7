//! Releases claims: each of their jobs becomes ready, waits for a retry, or finishes.

use std::collections::HashMap;

use deadpool_postgres::Object;
use faena_domain::{ErrorReason, JobId, JobOptions, JobState, LogEvent, LogLine, Run, Timestamp};
use uuid::Uuid;

use super::{
    Shared,
    cleanup::{clean_up, frees_capacity},
    dependents,
    end::{QueueRows, storable, stored_ends},
    events,
    job_log::trim_attempts,
    submit::apply,
};
use crate::{
    JobExit, LaneId, QueueChange, RecoveryCounts, Result, Signal, Tally,
    assemble::parse_options,
    disposition::{Disposition, ReleaseReason},
    events::GUARDIAN,
    jobs::state_code,
    plan::Deltas,
    sql::{CANCELLED, FAILED, RETRYING},
};

/// Releases each claim in a transaction of its own.
pub async fn release_claims(
    shared: &Shared,
    runs: &[Run],
    reason: ReleaseReason<'_>,
    now: Timestamp,
) -> Result<RecoveryCounts> {
    let mut all = RecoveryCounts::default();
    for run in runs {
        let client = shared.begin().await?;
        let result = release_in(&client, shared.own_shard(), &[*run], reason, now).await;
        let released = client.end(result).await?.after_commit(shared, now).await;
        all.orphaned += released.orphaned;
        all.returned += released.returned;
    }
    Ok(all)
}

/// A job of a claim that is released.
struct ReleasedJob {
    id: JobId,
    lane: LaneId,
    options: JobOptions,
    retry_count: u32,
    ready_at: Timestamp,
    started_at: Option<i64>,
    worker: Option<Uuid>,
    cancel: Option<String>,
}

struct Claim {
    run: Run,
    claimed_at: Timestamp,
    /// Log event of the claim: `assigned`, or `scheduled` if the worker's process had not connected.
    claimed_as: LogEvent,
    first_ready_at: Timestamp,
    jobs: Vec<ReleasedJob>,
}

/// Work that follows the commit of a release, and its counts.
#[derive(Default)]
pub struct ReleaseEffects {
    count: RecoveryCounts,
    finished: Vec<JobId>,
    lanes: Vec<(LaneId, i64)>,
    queue_changes: Vec<QueueChange>,
    signals: Vec<Signal>,
    /// Lanes of jobs that are no longer in flight.
    freed_lanes: Vec<LaneId>,
}

impl ReleaseEffects {
    pub async fn after_commit(mut self, shared: &Shared, now: Timestamp) -> RecoveryCounts {
        shared.queue_feed.add(self.queue_changes.drain(..));
        self.lanes.sort_unstable();
        self.lanes.dedup_by_key(|(lane, _)| *lane);
        for (lane, ready_at) in self.lanes.drain(..) {
            shared.cursors.lower(lane, ready_at);
            shared.signal([Signal::Ready(lane)]);
        }
        if frees_capacity(shared, self.freed_lanes.drain(..)) {
            shared.signal([Signal::Capacity]);
        }
        if self.count != RecoveryCounts::default() {
            shared.signal([Signal::Waiting]);
        }
        shared.signal(self.signals.drain(..));
        // The release is committed; if this fails, a later check of the dependents releases them.
        if !self.finished.is_empty()
            && let Err(error) = shared.retrying(|| dependents::release_dependents(shared, &self.finished, now)).await
        {
            tracing::warn!(%error, "dependents not released, retrying later");
        }
        self.count
    }
}

/// Deletes each claim first, so that late reports find none, then moves each of its jobs.
pub async fn release_in(
    client: &Object,
    shard: i16,
    runs: &[Run],
    reason: ReleaseReason<'_>,
    now: Timestamp,
) -> Result<ReleaseEffects> {
    let mut released = ReleaseEffects::default();
    let mut deltas = Deltas::default();
    let mut ready = QueueRows::default();
    let mut exits = Vec::new();
    if reason.is_by_guardian() {
        events::set_actor(client, GUARDIAN).await?;
    }
    for run in runs {
        if let Some(claim) = take_claim(client, *run, reason).await? {
            let jobs = release_claim(client, &claim, reason, now, (&mut released, &mut deltas, &mut ready)).await?;
            exits.extend(jobs);
        }
    }
    if !exits.is_empty() {
        released.signals = clean_up(client, &exits).await?;
    }
    ready.put_ready(client, reason.must_record_start()).await?;
    apply(client, shard, &deltas).await?;
    Ok(released)
}

/// Writes the rows of the released jobs, except ready ones, which it adds to `ready`. Returns the jobs to clean up.
async fn release_claim(
    client: &Object,
    claim: &Claim,
    reason: ReleaseReason<'_>,
    now: Timestamp,
    (released, deltas, ready): (&mut ReleaseEffects, &mut Deltas, &mut QueueRows),
) -> Result<Vec<(Uuid, JobExit)>> {
    let mut retrying = QueueRows::default();
    let mut attempts = EndedRows::default();
    let mut ended = EndedRows::default();
    let mut exits = Vec::new();
    let orphaned = ErrorReason::Orphaned.as_str();
    for job in &claim.jobs {
        let tally = match reason.disposition(
            job.cancel.as_deref(),
            job.started_at.is_some(),
            job.retry_count < job.options.retry.max_retries,
        ) {
            Disposition::Cancelled { cause } => {
                let log = claim.log(job, &[LogLine::new(now, LogEvent::Cancelled, cause)]);
                ended.push(claim, job, CANCELLED, Some(cause), Some("cancelled"), log, now);
                Tally::Cancelled
            }
            Disposition::Failed { error } => {
                released.count.orphaned += 1;
                let log = claim.log(job, &[LogLine::new(now, LogEvent::Orphaned, error)]);
                ended.push(claim, job, FAILED, Some(error), Some(orphaned), log, now);
                Tally::Failed
            }
            Disposition::Retry { error, delay_ms } => {
                released.count.orphaned += 1;
                let line = LogLine::new(now, LogEvent::Orphaned, error);
                let next = job.options.next_attempt_text(job.retry_count, now.plus_ms(delay_ms));
                let next = LogLine::new(now, LogEvent::RetryScheduled, next);
                attempts.push(claim, job, RETRYING, Some(error), Some(orphaned), claim.log(job, &[line, next]), now);
                retrying.push(job.lane, job.id, now.plus_ms(delay_ms), job.retry_count + 1);
                released.queue_changes.push(QueueChange::delayed(job.lane, now.plus_ms(delay_ms).as_ms(), job.id));
                Tally::Retrying
            }
            Disposition::Ready { event, text } => {
                released.count.returned += 1;
                let log = claim.log(job, &[LogLine::new(now, event, text)]);
                attempts.push(claim, job, state_code(JobState::Queued), None, None, log, now);
                ready.push(job.lane, job.id, claim.first_ready_at, job.retry_count);
                released.lanes.push((job.lane, claim.first_ready_at.as_ms()));
                released.queue_changes.push(QueueChange::ready(job.lane, claim.first_ready_at.as_ms(), job.id));
                Tally::Queued
            }
        };
        let finished = matches!(tally, Tally::Cancelled | Tally::Failed);
        if finished {
            released.finished.push(job.id);
        }
        exits.push((job.id.0, if finished { JobExit::Finished } else { JobExit::Requeued }));
        deltas.moved(job.lane, Tally::InFlight, tally, 1);
        released.freed_lanes.push(job.lane);
    }
    attempts.put(client, "attempt").await?;
    trim_attempts(client, &attempts.ids).await?;
    ended.put(client, "ended").await?;
    retrying.put_waiting(client, RETRYING).await?;
    Ok(exits)
}

/// Deletes a claim and returns it with its unfinished jobs; `None` if it was released before.
async fn take_claim(client: &Object, run: Run, reason: ReleaseReason<'_>) -> Result<Option<Claim>> {
    let row = client
        .query_opt("DELETE FROM faena.claim WHERE run = $1 RETURNING claimed_at, first_ready_at, ids, retries", &[&run])
        .await?;
    let Some(row) = row else { return Ok(None) };
    let ids: Vec<Uuid> = row.get(2);
    let retries: Option<Vec<i16>> = row.get(3);
    let retries: HashMap<Uuid, i16> = ids.iter().copied().zip(retries.unwrap_or_default()).collect();
    let rows = client
        .query(
            "SELECT j.id, j.lane, j.options, r.started_at, r.worker, c.reason, r.ready_at FROM faena.job j
             LEFT JOIN faena.running r ON r.id = j.id AND r.run = $2
             LEFT JOIN faena.cancel_request c ON c.id = j.id
             WHERE j.id = ANY($1) ORDER BY j.id",
            &[&ids, &run],
        )
        .await?;
    let keys: Vec<(LaneId, Uuid, Run)> = rows.iter().map(|row| (row.get(1), row.get(0), run)).collect();
    let ended = stored_ends(client, &keys).await?;
    let mut jobs = Vec::new();
    for found in rows.iter().filter(|found| !ended.contains_key(&(found.get(0), run))) {
        let id: Uuid = found.get(0);
        let ready_at = found.get::<_, Option<i64>>(6).unwrap_or(row.get(1));
        jobs.push(ReleasedJob {
            id: JobId(id),
            lane: found.get(1),
            options: parse_options(found.get(2))?,
            retry_count: u32::try_from(retries.get(&id).copied().unwrap_or(0)).unwrap_or(0),
            ready_at: Timestamp::from_ms(ready_at).max(JobId(id).created_at()),
            started_at: found.get(3),
            worker: found.get::<_, Option<Uuid>>(4).or(reason.worker()),
            cancel: found.get(5),
        });
    }
    Ok(Some(Claim {
        run,
        claimed_at: Timestamp::from_ms(row.get(0)),
        claimed_as: reason.claimed_as(),
        first_ready_at: Timestamp::from_ms(row.get(1)),
        jobs,
    }))
}

impl Claim {
    fn log(&self, job: &ReleasedJob, last: &[LogLine]) -> String {
        let mut lines = vec![
            LogLine::new(job.ready_at, LogEvent::Queued, ""),
            LogLine::new(self.claimed_at, self.claimed_as.clone(), ""),
        ];
        if let Some(started_at) = job.started_at {
            lines.push(LogLine::new(Timestamp::from_ms(started_at), LogEvent::Started, ""));
        }
        lines.extend_from_slice(last);
        LogLine::chunk(&lines)
    }
}

/// Rows for `attempt` or `ended`.
#[derive(Default)]
struct EndedRows {
    lanes: Vec<LaneId>,
    states: Vec<i16>,
    ids: Vec<Uuid>,
    runs: Vec<Run>,
    times: Vec<i64>,
    retries: Vec<i16>,
    started: Vec<Option<i64>>,
    workers: Vec<Option<Uuid>>,
    errors: Vec<Option<String>>,
    reasons: Vec<Option<String>>,
    logs: Vec<String>,
}

impl EndedRows {
    #[expect(clippy::too_many_arguments, reason = "one row, one argument per column")]
    fn push(
        &mut self,
        claim: &Claim,
        job: &ReleasedJob,
        state: i16,
        error: Option<&str>,
        reason: Option<&str>,
        log: String,
        now: Timestamp,
    ) {
        self.lanes.push(job.lane);
        self.states.push(state);
        self.ids.push(job.id.0);
        self.runs.push(claim.run);
        self.times.push(now.as_ms());
        self.retries.push(super::end::saturating_i16(job.retry_count));
        self.started.push(job.started_at);
        self.workers.push(job.worker);
        self.errors.push(error.map(|text| storable(text).into_owned()));
        self.reasons.push(reason.map(str::to_owned));
        self.logs.push(log);
    }

    async fn put(&self, client: &Object, table: &str) -> Result<()> {
        if self.ids.is_empty() {
            return Ok(());
        }
        let lane = if table == "ended" { "lane, " } else { "" };
        let columns = format!("{lane}state, id, run, finished_at, retry_count, started_at, worker, error, reason, log");
        client
            .execute(
                &format!(
                    "INSERT INTO faena.{table} ({columns}) SELECT {columns}
                     FROM unnest($1::int4[], $2::int2[], $3::uuid[], $4::int8[], $5::int8[], $6::int2[], $7::int8[],
                                 $8::uuid[], $9::text[], $10::text[], $11::text[])
                     AS e(lane, state, id, run, finished_at, retry_count, started_at, worker, error, reason, log)"
                ),
                &[
                    &self.lanes,
                    &self.states,
                    &self.ids,
                    &self.runs,
                    &self.times,
                    &self.retries,
                    &self.started,
                    &self.workers,
                    &self.errors,
                    &self.reasons,
                    &self.logs,
                ],
            )
            .await?;
        Ok(())
    }
}
