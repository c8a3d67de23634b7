//! Releases claims: each of their jobs becomes ready, waits for a retry, or finishes.

use faena_domain::{ErrorReason, JobId, JobOptions, JobState, LogEvent, LogLine, Run, Timestamp};
use rusqlite::OptionalExtension;
use uuid::Uuid;

use super::{
    claim::decode_claimed_jobs,
    cleanup::{clean_up, signal_capacity},
    dependents::release_dependents,
    end::outcome_of_run,
    events,
    job_log::trim_attempts,
    read,
    submit::{apply, put_ready, put_waiting},
    writer::Tx,
};
use crate::{
    JobExit, LaneId, RecoveryCounts, Result, Tally,
    disposition::{Disposition, ReleaseReason},
    events::GUARDIAN,
    jobs::state_code,
    plan::Deltas,
    sql::{CANCELLED, FAILED, RETRYING},
};

pub fn release_claims(tx: &Tx, runs: &[Run], reason: ReleaseReason, now: Timestamp) -> Result<RecoveryCounts> {
    let mut all = RecoveryCounts::default();
    for run in runs {
        let released = if reason.is_by_guardian() {
            events::with_actor(tx, GUARDIAN, |tx| release_claim(tx, *run, reason, now))?
        } else {
            release_claim(tx, *run, reason, now)?
        };
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
    run: Run,
    claimed_at: Timestamp,
    /// Log event of the claim: `assigned`, or `scheduled` if the worker's process had not connected.
    claimed_as: LogEvent,
    first_ready_at: Timestamp,
    ready_at: Timestamp,
    started_at: Option<Timestamp>,
    worker: Option<Uuid>,
}

/// Deletes the claim first, so that late reports find none, then moves each of its jobs.
fn release_claim(tx: &Tx, run: Run, reason: ReleaseReason, now: Timestamp) -> Result<RecoveryCounts> {
    let (claimed_at, first_ready_at, ids, retries): (i64, i64, Vec<u8>, Option<Vec<u8>>) = tx
        .connection
        .prepare_cached("DELETE FROM claim WHERE run = ? RETURNING claimed_at, first_ready_at, ids, retries")?
        .query_row([run], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?, r.get(3)?)))?;
    let mut released = RecoveryCounts::default();
    let mut deltas = Deltas::default();
    let mut finished = Vec::new();
    let mut lanes = Vec::new();
    for (id, retry_count) in decode_claimed_jobs(&ids, retries.as_deref()) {
        let Some((lane, options)) = read::lane_and_options(tx.connection, id)? else { continue };
        if outcome_of_run(tx.connection, lane, id, run)?.is_some() {
            continue;
        }
        let running: Option<(i64, Uuid, i64)> = tx
            .connection
            .prepare_cached("SELECT started_at, worker, ready_at FROM running WHERE id = ? AND run = ?")?
            .query_row((id.0, run), |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?)))
            .optional()?;
        let cancel: Option<String> = tx
            .connection
            .prepare_cached("SELECT reason FROM cancel_request WHERE id = ?")?
            .query_row([id.0], |r| r.get(0))
            .optional()?;
        let job = ReleasedJob {
            id,
            lane,
            options,
            retry_count,
            run,
            claimed_at: Timestamp::from_ms(claimed_at),
            claimed_as: reason.claimed_as(),
            first_ready_at: Timestamp::from_ms(first_ready_at),
            ready_at: Timestamp::from_ms(running.map_or(first_ready_at, |(_, _, at)| at)).max(id.created_at()),
            started_at: running.map(|(at, _, _)| Timestamp::from_ms(at)),
            worker: running.map(|(_, worker, _)| worker).or(reason.worker()),
        };
        let disposition =
            reason.disposition(cancel.as_deref(), running.is_some(), retry_count < job.options.retry.max_retries);
        match &disposition {
            Disposition::Cancelled { .. } => {}
            Disposition::Retry { .. } | Disposition::Failed { .. } => released.orphaned += 1,
            Disposition::Ready { .. } => released.returned += 1,
        }
        let to = put_released(tx, &job, disposition, reason.must_record_start(), now)?;
        let terminal = matches!(to, Tally::Cancelled | Tally::Failed);
        if terminal {
            finished.push(id);
        }
        deltas.moved(lane, Tally::InFlight, to, 1);
        lanes.push(lane);
        clean_up(tx, id, if terminal { JobExit::Finished } else { JobExit::Requeued })?;
    }
    signal_capacity(tx, lanes.into_iter());
    release_dependents(tx, finished, &mut deltas, now)?;
    apply(tx, deltas);
    Ok(released)
}

fn put_released(
    tx: &Tx,
    job: &ReleasedJob,
    disposition: Disposition,
    must_record_start: bool,
    now: Timestamp,
) -> Result<Tally> {
    let orphaned = ErrorReason::Orphaned.as_str();
    match disposition {
        Disposition::Cancelled { cause } => {
            put_ended(tx, job, CANCELLED, cause, "cancelled", LogEvent::Cancelled, now)?;
            Ok(Tally::Cancelled)
        }
        Disposition::Failed { error } => {
            put_ended(tx, job, FAILED, error, orphaned, LogEvent::Orphaned, now)?;
            Ok(Tally::Failed)
        }
        Disposition::Retry { error, delay_ms } => {
            let next = job.options.next_attempt_text(job.retry_count, now.plus_ms(delay_ms));
            let log = job.log(&[
                LogLine::new(now, LogEvent::Orphaned, error),
                LogLine::new(now, LogEvent::RetryScheduled, next),
            ]);
            put_attempt(tx, job, RETRYING, Some(error), Some(orphaned), log, now)?;
            put_waiting(tx, job.lane, RETRYING, job.id, now.plus_ms(delay_ms), false, job.retry_count + 1)?;
            Ok(Tally::Retrying)
        }
        Disposition::Ready { event, text } => {
            let log = job.log(&[LogLine::new(now, event, text)]);
            put_attempt(tx, job, state_code(JobState::Queued), None, None, log, now)?;
            trim_attempts(tx, job.id)?;
            put_ready(tx, job.lane, job.first_ready_at, job.id, job.retry_count, must_record_start)?;
            Ok(Tally::Queued)
        }
    }
}

impl ReleasedJob {
    fn log(&self, last: &[LogLine]) -> String {
        let mut lines = vec![
            LogLine::new(self.ready_at, LogEvent::Queued, ""),
            LogLine::new(self.claimed_at, self.claimed_as.clone(), ""),
        ];
        if let Some(started_at) = self.started_at {
            lines.push(LogLine::new(started_at, LogEvent::Started, ""));
        }
        lines.extend_from_slice(last);
        LogLine::chunk(&lines)
    }
}

fn put_attempt(
    tx: &Tx,
    job: &ReleasedJob,
    state: i16,
    error: Option<&str>,
    reason: Option<&str>,
    log: String,
    now: Timestamp,
) -> Result<()> {
    tx.connection
        .prepare_cached(
            "INSERT INTO attempt (id, run, state, retry_count, finished_at, started_at, worker, error, reason, log)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        )?
        .execute((
            job.id.0,
            job.run,
            state,
            job.retry_count,
            now.as_ms(),
            job.started_at.map(Timestamp::as_ms),
            job.worker,
            error,
            reason,
            log,
        ))?;
    Ok(())
}

fn put_ended(
    tx: &Tx,
    job: &ReleasedJob,
    state: i16,
    error: &str,
    reason: &str,
    event: LogEvent,
    now: Timestamp,
) -> Result<()> {
    tx.connection
        .prepare_cached(
            "INSERT INTO ended (lane, state, id, finished_at, run, retry_count, started_at, worker, error, reason, log)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        )?
        .execute((
            job.lane,
            state,
            job.id.0,
            now.as_ms(),
            job.run,
            job.retry_count,
            job.started_at.map(Timestamp::as_ms),
            job.worker,
            error,
            reason,
            job.log(&[LogLine::new(now, event, error)]),
        ))?;
    Ok(())
}
