//! Stores the ends of runs.

use std::collections::HashMap;

use faena_domain::{JobId, JobState, LogEvent, LogLine, Run, Timestamp};
use rusqlite::{Connection, OptionalExtension};

use super::{
    cleanup::{clean_up, signal_capacity},
    dependents::release_dependents,
    events,
    job_log::trim_attempts,
    submit::{apply, put_ready, put_waiting},
    writer::Tx,
};
use crate::{
    JobExit, LaneId, Result, RunEnd, RunOutcome, Tally,
    events::GUARDIAN,
    jobs::state_code,
    plan::Deltas,
    sql::sql,
    sql::{CANCELLED, FAILED, RETRYING},
};

pub fn end(tx: &Tx, ends: Vec<RunEnd>, now: Timestamp) -> Result<Vec<bool>> {
    let mut claims = HashMap::new();
    let mut deltas = Deltas::default();
    let mut finished = Vec::new();
    let mut answers = Vec::with_capacity(ends.len());
    let has_dependencies = has_rows(tx, "SELECT 1 FROM dependency LIMIT 1")?;
    signal_capacity(tx, ends.iter().map(|end| end.lane));
    for end in ends {
        let id = end.id;
        let claim = claim_status(tx, end.run, &mut claims)?;
        if claim == ClaimStatus::Plain && complete_plainly(tx, &end)? {
            deltas.moved(end.lane, Tally::InFlight, Tally::Completed, 1);
            if has_dependencies {
                finished.push(id);
            }
            answers.push(true);
            close_claim(tx, &end, &mut claims)?;
            continue;
        }
        let before = outcome_of_run(tx.connection, end.lane, end.id, end.run)?;
        if claim != ClaimStatus::Closed {
            close_claim(tx, &end, &mut claims)?;
        }
        match before {
            // Reported again because the answer after its commit was lost: it counts once and is not stale.
            Some((state, at_ms)) => answers.push(end.is_stored_as(state, at_ms)),
            // A claim may still contain the id of a job that was deleted or pruned.
            None if claim != ClaimStatus::Closed && job_exists(tx, end.id)? => {
                let run = end.run;
                let state = if end.by_guardian {
                    events::with_actor(tx, GUARDIAN, |tx| end_one(tx, end, &mut deltas))?
                } else {
                    end_one(tx, end, &mut deltas)?
                };
                if state != JobState::Completed && claim == ClaimStatus::Plain {
                    tx.connection.prepare_cached("UPDATE claim SET check_each = 1 WHERE run = ?")?.execute([run])?;
                    claims.entry(run).and_modify(|known| {
                        if *known == ClaimStatus::Plain {
                            *known = ClaimStatus::Strict
                        }
                    });
                }
                if state.is_terminal() && has_dependencies {
                    finished.push(id);
                }
                answers.push(true);
            }
            None => answers.push(false),
        }
    }
    release_dependents(tx, finished, &mut deltas, now)?;
    apply(tx, deltas);
    Ok(answers)
}

/// Writes one end of a run, and returns the new state of the job.
fn end_one(tx: &Tx, end: RunEnd, deltas: &mut Deltas) -> Result<JobState> {
    let end = apply_cancel_requests(tx, end)?;
    let state = end.outcome.state();
    match &end.outcome {
        RunOutcome::Completed { result } => {
            put_done(tx, &end, result.as_deref())?;
        }
        RunOutcome::Failed { error, reason } => put_ended(tx, &end, FAILED, error, reason.as_str())?,
        RunOutcome::Cancelled { cause } => put_ended(tx, &end, CANCELLED, cause, "cancelled")?,
        RunOutcome::Retry { due_at, error, reason } => {
            put_attempt(tx, &end, RETRYING, Some(error), Some(reason.as_str()))?;
            put_waiting(tx, end.lane, RETRYING, end.id, *due_at, false, end.retry_count + 1)?;
        }
        RunOutcome::Released => {
            put_attempt(tx, &end, state_code(JobState::Queued), None, None)?;
            trim_attempts(tx, end.id)?;
            put_ready(tx, end.lane, end.ready_at, end.id, end.retry_count, false)?;
        }
    }
    deltas.moved(end.lane, Tally::InFlight, Tally::of(state), 1);
    if let Some(reason) = end.outcome.error_reason() {
        deltas.timed_out(end.lane, reason);
    }
    // Only completions trust `may_have_other_rows`; for all other ends, the reporter may not know about everything that is stored.
    if end.may_have_other_rows || state != JobState::Completed || tx.is_keyed(end.lane) {
        clean_up(tx, end.id, JobExit::of(state))?;
    }
    Ok(state)
}

/// Turns an end that would requeue a job into a cancellation, if that was requested.
fn apply_cancel_requests(tx: &Tx, mut end: RunEnd) -> Result<RunEnd> {
    if matches!(end.outcome, RunOutcome::Retry { .. } | RunOutcome::Released) {
        let cancel_reason: Option<String> = tx
            .connection
            .prepare_cached("SELECT reason FROM cancel_request WHERE id = ?")?
            .query_row([end.id.0], |row| row.get(0))
            .optional()?;
        if let Some(cause) = cancel_reason {
            LogLine::new(end.at, LogEvent::Cancelled, cause.clone()).append_to(&mut end.log);
            end.outcome = RunOutcome::Cancelled { cause };
        }
    }
    Ok(end)
}

fn put_ended(tx: &Tx, end: &RunEnd, state: i16, error: &str, reason: &str) -> Result<()> {
    tx.connection
        .prepare_cached(
            "INSERT INTO ended (lane, state, id, finished_at, run, retry_count, started_at, worker, error, reason, log)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        )?
        .execute((
            end.lane,
            state,
            end.id.0,
            end.at.as_ms(),
            end.run,
            end.retry_count,
            end.started_at.map(Timestamp::as_ms),
            end.worker.0,
            error,
            reason,
            &end.log,
        ))?;
    Ok(())
}

fn put_attempt(tx: &Tx, end: &RunEnd, state: i16, error: Option<&str>, reason: Option<&str>) -> Result<()> {
    tx.connection
        .prepare_cached(
            "INSERT INTO attempt (id, run, state, retry_count, finished_at, started_at, worker, error, reason, log)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        )?
        .execute((
            end.id.0,
            end.run,
            state,
            end.retry_count,
            end.at.as_ms(),
            end.started_at.map(Timestamp::as_ms),
            end.worker.0,
            error,
            reason,
            &end.log,
        ))?;
    Ok(())
}

/// Status of a claim.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum ClaimStatus {
    /// Closed or released: reports under its run are stale.
    Closed,
    /// Only completions were reported so far.
    Plain,
    /// Each end must be checked.
    Strict,
}

pub fn claim_status(tx: &Tx, run: Run, claims: &mut HashMap<Run, ClaimStatus>) -> Result<ClaimStatus> {
    if let Some(known) = claims.get(&run) {
        return Ok(*known);
    }
    let check_each: Option<bool> = tx
        .connection
        .prepare_cached("SELECT check_each FROM claim WHERE run = ?")?
        .query_row([run], |row| row.get(0))
        .optional()?;
    let claim = match check_each {
        None => ClaimStatus::Closed,
        Some(false) => ClaimStatus::Plain,
        Some(true) => ClaimStatus::Strict,
    };
    claims.insert(run, claim);
    Ok(claim)
}

fn close_claim(tx: &Tx, end: &RunEnd, claims: &mut HashMap<Run, ClaimStatus>) -> Result<()> {
    if end.closes_claim {
        tx.connection.prepare_cached("DELETE FROM claim WHERE run = ?")?.execute([end.run])?;
        claims.insert(end.run, ClaimStatus::Closed);
    }
    Ok(())
}

/// Stores a completion that only needs a row in `done`. Returns `false` if it needs more, or is already stored.
fn complete_plainly(tx: &Tx, end: &RunEnd) -> Result<bool> {
    match &end.outcome {
        RunOutcome::Completed { result } if !end.may_have_other_rows && !tx.is_keyed(end.lane) => {
            put_done(tx, end, result.as_deref())
        }
        _ => Ok(false),
    }
}

/// Inserts a row into `done`. Returns `false` if the job already has one.
fn put_done(tx: &Tx, end: &RunEnd, result: Option<&str>) -> Result<bool> {
    let written = tx
        .connection
        .prepare_cached(
            "INSERT OR IGNORE INTO done (lane, id, finished_at, run, retry_count, started_at, worker, result, log)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        )?
        .execute((
            end.lane,
            end.id.0,
            end.at.as_ms(),
            end.run,
            end.retry_count,
            end.started_at.map(Timestamp::as_ms),
            end.worker.0,
            result,
            &end.log,
        ))?;
    Ok(written == 1)
}

/// Returns the state and the time with which this run ended; `None` if it has not ended.
pub fn outcome_of_run(connection: &Connection, lane: LaneId, id: JobId, run: Run) -> Result<Option<(i16, i64)>> {
    let ended = connection
        .prepare_cached(
            sql!("SELECT {COMPLETED}, finished_at FROM done WHERE lane = ?1 AND id = ?2 AND run = ?3
             UNION ALL
             SELECT state, finished_at FROM ended WHERE lane = ?1 AND state IN ({FAILED}, {CANCELLED}) AND id = ?2 AND run = ?3
             UNION ALL SELECT state, finished_at FROM attempt WHERE id = ?2 AND run = ?3
             LIMIT 1"),
        )?
        .query_row((lane, id.0, run), |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?;
    Ok(ended)
}

pub fn job_exists(tx: &Tx, id: JobId) -> Result<bool> {
    Ok(tx.connection.prepare_cached("SELECT 1 FROM job WHERE id = ?")?.exists([id.0])?)
}

fn has_rows(tx: &Tx, sql: &str) -> Result<bool> {
    Ok(tx.connection.prepare_cached(sql)?.exists([])?)
}
