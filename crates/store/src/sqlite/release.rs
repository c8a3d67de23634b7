//! Releases claims: their jobs go where they belong.

use faena_domain::{ErrorReason, JobId, JobState, LogEvent, LogLine, Run, Timestamp};
use rusqlite::OptionalExtension;
use uuid::Uuid;

use super::{
    claim::claim_jobs,
    cleanup::{clean_up, signal_room},
    end::{ended_as, release_dependents},
    read,
    submit::{apply, put_ready, put_waiting},
    writer::Tx,
};
use crate::{
    JobExit, LaneId, Recovered, Result, Tally,
    disposition::{Disposition, ReleaseReason},
    jobs::state_code,
    plan::Deltas,
    sql::{CANCELLED, FAILED, RETRYING},
};

pub fn release_claims(tx: &Tx, runs: &[Run], reason: ReleaseReason, now: Timestamp) -> Result<Recovered> {
    let mut all = Recovered::default();
    for run in runs {
        let freed = release_claim(tx, *run, reason, now)?;
        all.orphaned += freed.orphaned;
        all.returned += freed.returned;
    }
    Ok(all)
}

struct Lost {
    id: JobId,
    lane: LaneId,
    retry_count: u32,
    run: Run,
    claimed_at: Timestamp,
    first_ready_at: Timestamp,
    ready_at: Timestamp,
    started_at: Option<Timestamp>,
    worker: Option<Uuid>,
}

/// Deletes the claim first, so that late reports find none, then moves each of its jobs.
fn release_claim(tx: &Tx, run: Run, reason: ReleaseReason, now: Timestamp) -> Result<Recovered> {
    let (claimed_at, first_ready_at, ids, retries): (i64, i64, Vec<u8>, Option<Vec<u8>>) = tx
        .connection
        .prepare_cached("DELETE FROM claim WHERE run = ? RETURNING claimed_at, first_ready_at, ids, retries")?
        .query_row([run], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?, r.get(3)?)))?;
    let mut freed = Recovered::default();
    let mut deltas = Deltas::default();
    let mut finished = Vec::new();
    let mut lanes = Vec::new();
    for (id, retry_count) in claim_jobs(&ids, retries.as_deref()) {
        let Some((lane, options)) = read::lane_and_options(tx.connection, id)? else { continue };
        if ended_as(tx.connection, lane, id, run)?.is_some() {
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
        let lost = Lost {
            id,
            lane,
            retry_count,
            run,
            claimed_at: Timestamp::from_ms(claimed_at),
            first_ready_at: Timestamp::from_ms(first_ready_at),
            ready_at: Timestamp::from_ms(running.map_or(first_ready_at, |(_, _, at)| at)).max(id.created_at()),
            started_at: running.map(|(at, _, _)| Timestamp::from_ms(at)),
            worker: running.map(|(_, worker, _)| worker).or(reason.worker()),
        };
        let disposition =
            reason.disposition(cancel.as_deref(), running.is_some(), retry_count < options.retry.max_retries);
        match disposition {
            Disposition::Cancelled { .. } => {}
            Disposition::Retry { .. } | Disposition::Failed { .. } => freed.orphaned += 1,
            Disposition::Ready { .. } => freed.returned += 1,
        }
        let to = put_lost(tx, &lost, disposition, reason.start_first(), now)?;
        let terminal = matches!(to, Tally::Cancelled | Tally::Failed);
        if terminal {
            finished.push(id);
        }
        deltas.moved(lane, Tally::InFlight, to, 1);
        lanes.push(lane);
        clean_up(tx, id, if terminal { JobExit::Finished } else { JobExit::Requeued })?;
    }
    signal_room(tx, lanes.into_iter());
    release_dependents(tx, finished, &mut deltas, now)?;
    apply(tx, deltas);
    Ok(freed)
}

fn put_lost(tx: &Tx, lost: &Lost, disposition: Disposition, start_first: bool, now: Timestamp) -> Result<Tally> {
    let orphaned = ErrorReason::Orphaned.as_str();
    match disposition {
        Disposition::Cancelled { cause } => {
            put_lost_ended(tx, lost, CANCELLED, cause, "cancelled", LogEvent::Cancelled, now)?;
            Ok(Tally::Cancelled)
        }
        Disposition::Failed { error } => {
            put_lost_ended(tx, lost, FAILED, error, orphaned, LogEvent::Orphaned, now)?;
            Ok(Tally::Failed)
        }
        Disposition::Retry { error, delay_ms } => {
            let log = lost.log(&[
                LogLine::new(now, LogEvent::Orphaned, error),
                LogLine::new(now, LogEvent::RetryScheduled, format!("in {delay_ms} ms")),
            ]);
            put_lost_attempt(tx, lost, RETRYING, Some(error), Some(orphaned), log, now)?;
            put_waiting(tx, lost.lane, RETRYING, lost.id, now.plus_ms(delay_ms), false, lost.retry_count + 1)?;
            Ok(Tally::Retrying)
        }
        Disposition::Ready { event, text } => {
            let log = lost.log(&[LogLine::new(now, event, text)]);
            put_lost_attempt(tx, lost, state_code(JobState::Queued), None, None, log, now)?;
            put_ready(tx, lost.lane, lost.first_ready_at, lost.id, lost.retry_count, start_first)?;
            Ok(Tally::Queued)
        }
    }
}

impl Lost {
    fn log(&self, last: &[LogLine]) -> String {
        let mut lines = vec![
            LogLine::new(self.ready_at, LogEvent::Queued, ""),
            LogLine::new(self.claimed_at, LogEvent::Assigned, ""),
        ];
        if let Some(started_at) = self.started_at {
            lines.push(LogLine::new(started_at, LogEvent::Started, ""));
        }
        lines.extend_from_slice(last);
        LogLine::chunk(&lines)
    }
}

fn put_lost_attempt(
    tx: &Tx,
    lost: &Lost,
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
            lost.id.0,
            lost.run,
            state,
            lost.retry_count,
            now.as_ms(),
            lost.started_at.map(Timestamp::as_ms),
            lost.worker,
            error,
            reason,
            log,
        ))?;
    Ok(())
}

fn put_lost_ended(
    tx: &Tx,
    lost: &Lost,
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
            lost.lane,
            state,
            lost.id.0,
            now.as_ms(),
            lost.run,
            lost.retry_count,
            lost.started_at.map(Timestamp::as_ms),
            lost.worker,
            error,
            reason,
            lost.log(&[LogLine::new(now, event, error)]),
        ))?;
    Ok(())
}
