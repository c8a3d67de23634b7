//! What runs tell, and how they end.

use std::collections::HashMap;

use faena_domain::{JobId, JobState, LogEvent, LogLine, OnParentFailure, Run, Timestamp};
use rusqlite::OptionalExtension;
use uuid::Uuid;

use super::{
    read,
    submit::{apply, put_ended_without_run, put_ready, put_waiting},
    writer::Tx,
};
use crate::{
    LaneId, NoteKind, Outcome, Result, RunEnd, RunNote, Tally,
    assemble::parse_options,
    plan::{Deltas, KeyKind, parent_cause},
    types::{CANCELLED, FAILED, RETRYING, state_code},
};

pub fn note(tx: &Tx, notes: Vec<RunNote>) -> Result<Vec<bool>> {
    let mut blocks = HashMap::new();
    notes.into_iter().map(|note| note_one(tx, note, &mut blocks)).collect()
}

fn note_one(tx: &Tx, note: RunNote, blocks: &mut HashMap<Run, bool>) -> Result<bool> {
    if !block_stands(tx, note.run, blocks)? || run_has_ended(tx, note.lane, note.id, note.run)? {
        return Ok(false);
    }
    let progress = match &note.kind {
        NoteKind::Progress(progress) => Some(serde_json::to_string(progress).expect("progress is JSON")),
        _ => None,
    };
    tx.connection
        .prepare_cached(
            "INSERT INTO running (id, lane, run, node, worker, retry_count, ready_at, started_at, updated_at, progress)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)
             ON CONFLICT DO UPDATE SET run = excluded.run, node = excluded.node, worker = excluded.worker,
                 retry_count = excluded.retry_count, ready_at = excluded.ready_at, started_at = excluded.started_at,
                 updated_at = excluded.updated_at, progress = coalesce(excluded.progress, progress)",
        )?
        .execute((
            note.id.0,
            note.lane,
            note.run,
            note.node.0,
            note.worker.0,
            note.retry_count,
            note.ready_at.as_ms(),
            note.started_at.as_ms(),
            note.at.as_ms(),
            progress,
        ))?;
    match note.kind {
        NoteKind::Started => {}
        NoteKind::Progress(progress) => {
            let text = progress.message.clone().or_else(|| progress.percentage.map(|p| format!("{p} %"))).unwrap_or_default();
            add_note(tx, note.id, Some(note.run), LogLine::new(note.at, LogEvent::Progress, text))?;
        }
        NoteKind::Message(text) => {
            add_note(tx, note.id, Some(note.run), LogLine::new(note.at, LogEvent::Message, text))?;
        }
        NoteKind::Step { name, result } => {
            tx.connection
                .prepare_cached("INSERT OR IGNORE INTO step (id, name, run, at, result) VALUES (?, ?, ?, ?, ?)")?
                .execute((note.id.0, name, note.run, note.at.as_ms(), result))?;
        }
    }
    Ok(true)
}

pub fn add_note(tx: &Tx, id: JobId, run: Option<Run>, line: LogLine) -> Result<()> {
    tx.connection
        .prepare_cached("INSERT INTO note (id, run, log) VALUES (?, ?, ?)")?
        .execute((id.0, run, LogLine::chunk(&[line])))?;
    Ok(())
}

pub fn end(tx: &Tx, ends: Vec<RunEnd>, now: Timestamp) -> Result<Vec<bool>> {
    let mut blocks = HashMap::new();
    let mut deltas = Deltas::default();
    let mut finished = Vec::new();
    let mut answers = Vec::with_capacity(ends.len());
    let parents_matter = has_rows(tx, "SELECT 1 FROM depends LIMIT 1")?;
    for end in ends {
        let stands = block_stands(tx, end.run, &mut blocks)?;
        let (run, closes) = (end.run, end.closes_block);
        if stands {
            if end_one(tx, &end, &mut deltas)? && end.outcome.state().is_terminal() && parents_matter {
                finished.push(end.id);
            }
            answers.push(true);
        } else {
            // Told again after its commit, whose answer was lost: it counts once and is not stale.
            answers.push(run_has_ended(tx, end.lane, end.id, end.run)?);
        }
        if stands && closes {
            tx.connection.prepare_cached("DELETE FROM block WHERE run = ?")?.execute([run])?;
            blocks.insert(run, false);
        }
    }
    tell_children(tx, finished, &mut deltas, now)?;
    apply(tx, &deltas)?;
    Ok(answers)
}

/// Writes one end. `false`: it was written before.
fn end_one(tx: &Tx, end: &RunEnd, deltas: &mut Deltas) -> Result<bool> {
    let asked_to_stop = || -> Result<Option<String>> {
        Ok(tx
            .connection
            .prepare_cached("SELECT reason FROM cancel WHERE id = ?")?
            .query_row([end.id.0], |row| row.get(0))
            .optional()?)
    };
    let written = match &end.outcome {
        Outcome::Completed { result } => {
            tx.connection
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
                ))?
                == 1
        }
        Outcome::Failed { error, reason } => put_ended(tx, end, FAILED, Some(error), reason.as_str())?,
        Outcome::Cancelled { cause } => put_ended(tx, end, CANCELLED, Some(cause), "cancelled")?,
        Outcome::Retry { due_at, error, reason } => match asked_to_stop()? {
            Some(cause) => return cancel_instead(tx, end, cause, deltas),
            None => {
                let written = put_attempt(tx, end, RETRYING, Some(error), Some(reason.as_str()))?;
                if written {
                    put_waiting(tx, end.lane, RETRYING, end.id, *due_at, false, end.retry_count + 1)?;
                }
                written
            }
        },
        Outcome::HandedBack => match asked_to_stop()? {
            Some(cause) => return cancel_instead(tx, end, cause, deltas),
            None => {
                let written = put_attempt(tx, end, state_code(JobState::Queued), None, None)?;
                if written {
                    put_ready(tx, end.lane, end.ready_at, end.id, end.retry_count, false)?;
                }
                written
            }
        },
    };
    if written {
        deltas.moved(end.lane, Tally::Held, Tally::of(end.outcome.state()), 1);
        if end.on_record {
            forget(tx, end.id, end.outcome.state().is_terminal())?;
        }
    }
    Ok(written)
}

fn cancel_instead(tx: &Tx, end: &RunEnd, cause: String, deltas: &mut Deltas) -> Result<bool> {
    let mut end = RunEnd { on_record: true, ..end.clone() };
    LogLine::new(end.at, LogEvent::Cancelled, cause.clone()).append_to(&mut end.log);
    end.outcome = Outcome::Cancelled { cause };
    end_one(tx, &end, deltas)
}

fn put_ended(tx: &Tx, end: &RunEnd, state: i16, error: Option<&str>, reason: &str) -> Result<bool> {
    let written = tx
        .connection
        .prepare_cached(
            "INSERT OR IGNORE INTO ended (lane, state, id, finished_at, run, retry_count, started_at, worker, error, reason, log)
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
    Ok(written == 1)
}

fn put_attempt(tx: &Tx, end: &RunEnd, state: i16, error: Option<&str>, reason: Option<&str>) -> Result<bool> {
    let written = tx
        .connection
        .prepare_cached(
            "INSERT OR IGNORE INTO attempt (id, run, state, retry_count, finished_at, started_at, worker, error, reason, log)
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
    Ok(written == 1)
}

/// Removes what stood beside the fast path.
pub fn forget(tx: &Tx, id: JobId, terminal: bool) -> Result<()> {
    tx.connection.prepare_cached("DELETE FROM running WHERE id = ?")?.execute([id.0])?;
    if terminal {
        tx.connection.prepare_cached("DELETE FROM cancel WHERE id = ?")?.execute([id.0])?;
        let options: Option<Option<String>> = tx
            .connection
            .prepare_cached("SELECT options FROM job WHERE id = ?")?
            .query_row([id.0], |row| row.get(0))
            .optional()?;
        let options = parse_options(options.flatten().as_deref())?;
        if let Some(key) = options.unique_key {
            tx.connection
                .prepare_cached("DELETE FROM job_key WHERE kind = ? AND key = ? AND id = ?")?
                .execute((KeyKind::Unique as i16, key, id.0))?;
        }
        if let Some(expires_at) = options.expires_at {
            tx.connection
                .prepare_cached("DELETE FROM expiry WHERE expires_at = ? AND id = ?")?
                .execute((expires_at.as_ms(), id.0))?;
        }
    }
    Ok(())
}

/// Lets the jobs that depend on `finished` go on, or cancels them, and so on down the graph.
pub fn tell_children(tx: &Tx, mut finished: Vec<JobId>, deltas: &mut Deltas, now: Timestamp) -> Result<()> {
    while let Some(parent) = finished.pop() {
        let children: Vec<Uuid> = tx
            .connection
            .prepare_cached("SELECT child FROM depends WHERE parent = ?")?
            .query_map([parent.0], |row| row.get(0))?
            .collect::<rusqlite::Result<_>>()?;
        if children.is_empty() {
            continue;
        }
        let state = read::state_of(tx.connection, parent)?;
        for child in children {
            if parent_ended(tx, JobId(child), parent, state, deltas, now)? {
                finished.push(JobId(child));
            }
        }
    }
    Ok(())
}

/// Takes one parent off a child's list. `true`: the child was cancelled because of it.
fn parent_ended(
    tx: &Tx,
    child: JobId,
    parent: JobId,
    state: Option<JobState>,
    deltas: &mut Deltas,
    now: Timestamp,
) -> Result<bool> {
    let Some((lane, options)) = read::lane_and_options(tx.connection, child)? else {
        tx.connection.prepare_cached("DELETE FROM depends WHERE child = ?")?.execute([child.0])?;
        return Ok(false);
    };
    let good = state == Some(JobState::Completed) || options.on_parent_failure == OnParentFailure::Run;
    if !good {
        tx.connection.prepare_cached("DELETE FROM depends WHERE child = ?")?.execute([child.0])?;
        if !take_blocked(tx, lane, child)? {
            return Ok(false);
        }
        let cause = parent_cause(parent, state);
        put_ended_without_run(tx, lane, CANCELLED, child, 0, &cause, "cancelled", LogEvent::Cancelled, now)?;
        forget(tx, child, true)?;
        deltas.moved(lane, Tally::Pending, Tally::Cancelled, 1);
        return Ok(true);
    }
    tx.connection
        .prepare_cached("DELETE FROM depends WHERE parent = ? AND child = ?")?
        .execute((parent.0, child.0))?;
    let open = tx
        .connection
        .prepare_cached("SELECT 1 FROM depends WHERE child = ? LIMIT 1")?
        .exists([child.0])?;
    if !open && take_blocked(tx, lane, child)? {
        add_note(tx, child, None, LogLine::new(now, LogEvent::ParentsDone, ""))?;
        match options.scheduled_at {
            Some(due_at) if due_at > now => put_waiting(tx, lane, 0, child, due_at, false, 0)?,
            _ => {
                put_ready(tx, lane, now, child, 0, false)?;
                deltas.moved(lane, Tally::Pending, Tally::Queued, 1);
            }
        }
    }
    Ok(false)
}

fn take_blocked(tx: &Tx, lane: LaneId, child: JobId) -> Result<bool> {
    let taken = tx
        .connection
        .prepare_cached("DELETE FROM waiting WHERE lane = ? AND state = 0 AND id = ? AND blocked = 1")?
        .execute((lane, child.0))?;
    Ok(taken == 1)
}

fn block_stands(tx: &Tx, run: Run, blocks: &mut HashMap<Run, bool>) -> Result<bool> {
    if let Some(stands) = blocks.get(&run) {
        return Ok(*stands);
    }
    let stands = tx.connection.prepare_cached("SELECT 1 FROM block WHERE run = ?")?.exists([run])?;
    blocks.insert(run, stands);
    Ok(stands)
}

/// Whether this run of the job is over, however it ended.
pub fn run_has_ended(tx: &Tx, lane: LaneId, id: JobId, run: Run) -> Result<bool> {
    let ended = tx
        .connection
        .prepare_cached(
            "SELECT 1 FROM done WHERE lane = ?1 AND id = ?2 AND run = ?3
             UNION ALL SELECT 1 FROM ended WHERE lane = ?1 AND state IN (7, 8) AND id = ?2 AND run = ?3
             UNION ALL SELECT 1 FROM attempt WHERE id = ?2 AND run = ?3",
        )?
        .exists((lane, id.0, run))?;
    Ok(ended)
}

fn has_rows(tx: &Tx, sql: &str) -> Result<bool> {
    Ok(tx.connection.prepare_cached(sql)?.exists([])?)
}
