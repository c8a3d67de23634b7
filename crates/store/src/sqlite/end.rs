//! What runs tell, and how they end.

use std::collections::HashMap;

use faena_domain::{JobId, JobState, LogEvent, LogLine, OnParentFailure, Run, Timestamp};
use rusqlite::{Connection, OptionalExtension};
use uuid::Uuid;

use super::{
    read,
    submit::{apply, put_ended_without_run, put_ready, put_waiting},
    webhooks,
    writer::Tx,
};
use crate::{
    Lane, LaneId, Leave, NoteKind, Outcome, Result, RunEnd, RunNote, Signal, Tally,
    admit::{counts, distinct},
    plan::{Deltas, KeyKind, Taken, key_number, parent_cause},
    progress,
    types::{CANCELLED, FAILED, RETRYING, state_code},
};

pub fn note(tx: &Tx, notes: Vec<RunNote>) -> Result<Vec<bool>> {
    let mut blocks = HashMap::new();
    notes.into_iter().map(|note| note_one(tx, note, &mut blocks)).collect()
}

fn note_one(tx: &Tx, note: RunNote, blocks: &mut HashMap<Run, Block>) -> Result<bool> {
    if !job_exists(tx, note.id)? {
        return Ok(false);
    }
    // Whoever holds the job: it is only written down.
    if let NoteKind::Stale(text) = note.kind {
        add_note(tx, note.id, Some(note.run), LogLine::new(note.at, LogEvent::StaleReport, text))?;
        return Ok(true);
    }
    if block_of(tx, note.run, blocks)? == Block::Gone
        || ended_as(tx.connection, note.lane, note.id, note.run)?.is_some()
    {
        return Ok(false);
    }
    if let NoteKind::Step { name, result, total } = &note.kind {
        put_step(tx, &note, name, result, *total)?;
    }
    put_running(tx, &note, progress_of(tx, &note)?)?;
    let line = match note.kind {
        NoteKind::Progress(progress) => LogLine::new(note.at, LogEvent::Progress, progress::describe(&progress)),
        NoteKind::Message(text) => LogLine::new(note.at, LogEvent::Message, text),
        NoteKind::Started | NoteKind::Step { .. } | NoteKind::Stale(_) => return Ok(true),
    };
    add_note(tx, note.id, Some(note.run), line)?;
    Ok(true)
}

/// A step that is there keeps its first result.
fn put_step(tx: &Tx, note: &RunNote, name: &str, result: &str, total: Option<u32>) -> Result<()> {
    tx.connection
        .prepare_cached(
            "INSERT INTO step (id, name, run, at, result, total) VALUES (?, ?, ?, ?, ?, ?)
             ON CONFLICT DO UPDATE SET total = coalesce(excluded.total, total)",
        )?
        .execute((note.id.0, name, note.run, note.at.as_ms(), result, total))?;
    Ok(())
}

/// What is known of the progress after this note, if it says anything about it.
fn progress_of(tx: &Tx, note: &RunNote) -> Result<Option<String>> {
    let progress = match &note.kind {
        NoteKind::Progress(told) => read::step_count(tx.connection, note.id)?.beside(told),
        NoteKind::Step { name, total, .. } => {
            let before: Option<Option<String>> = tx
                .connection
                .prepare_cached("SELECT progress FROM running WHERE id = ? AND run = ?")?
                .query_row((note.id.0, note.run), |row| row.get(0))
                .optional()?;
            let before = progress::parse(before.flatten().as_deref());
            read::step_count(tx.connection, note.id)?.after_step(name, *total, before)
        }
        NoteKind::Started | NoteKind::Message(_) | NoteKind::Stale(_) => return Ok(None),
    };
    Ok(Some(progress::stored(&progress)))
}

fn put_running(tx: &Tx, note: &RunNote, progress: Option<String>) -> Result<()> {
    tx.connection
        .prepare_cached(
            "INSERT INTO running (id, lane, run, node, worker, retry_count, ready_at, started_at, updated_at, progress)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)
             ON CONFLICT DO UPDATE SET run = excluded.run, node = excluded.node, worker = excluded.worker,
                 retry_count = excluded.retry_count, ready_at = excluded.ready_at,
                 started_at = CASE WHEN run = excluded.run THEN started_at ELSE excluded.started_at END,
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
    Ok(())
}

pub fn add_note(tx: &Tx, id: JobId, run: Option<Run>, line: LogLine) -> Result<()> {
    tx.connection.prepare_cached("INSERT INTO note (id, run, log) VALUES (?, ?, ?)")?.execute((
        id.0,
        run,
        LogLine::chunk(&[line]),
    ))?;
    Ok(())
}

pub fn end(tx: &Tx, ends: Vec<RunEnd>, now: Timestamp) -> Result<Vec<bool>> {
    let mut blocks = HashMap::new();
    let mut deltas = Deltas::default();
    let mut finished = Vec::new();
    let mut answers = Vec::with_capacity(ends.len());
    let parents_matter = has_rows(tx, "SELECT 1 FROM depends LIMIT 1")?;
    tell_room(tx, ends.iter().map(|end| end.lane));
    for end in ends {
        let id = end.id;
        let block = block_of(tx, end.run, &mut blocks)?;
        if block == Block::Plain && complete_plainly(tx, &end)? {
            deltas.moved(end.lane, Tally::Held, Tally::Completed, 1);
            if parents_matter {
                finished.push(id);
            }
            answers.push(true);
            close_block(tx, &end, &mut blocks)?;
            continue;
        }
        let before = ended_as(tx.connection, end.lane, end.id, end.run)?;
        if block != Block::Gone {
            close_block(tx, &end, &mut blocks)?;
        }
        match before {
            // Told again after its commit, whose answer was lost: it counts once and is not stale.
            Some((state, at_ms)) => answers.push(end.is_stored_as(state, at_ms)),
            // A job that was deleted or pruned may still be named by the block of one of its runs.
            None if block != Block::Gone && job_exists(tx, end.id)? => {
                let run = end.run;
                let state = end_one(tx, end, &mut deltas)?;
                if state != JobState::Completed && block == Block::Plain {
                    tx.connection.prepare_cached("UPDATE block SET strict = 1 WHERE run = ?")?.execute([run])?;
                    blocks.entry(run).and_modify(|known| {
                        if *known == Block::Plain {
                            *known = Block::Strict
                        }
                    });
                }
                if state.is_terminal() && parents_matter {
                    finished.push(id);
                }
                answers.push(true);
            }
            None => answers.push(false),
        }
    }
    tell_children(tx, finished, &mut deltas, now)?;
    apply(tx, deltas);
    Ok(answers)
}

/// Writes one end of a run that is not over yet, and answers with what the job has become.
fn end_one(tx: &Tx, end: RunEnd, deltas: &mut Deltas) -> Result<JobState> {
    let end = turn_cancelled(tx, end)?;
    let state = end.outcome.state();
    match &end.outcome {
        Outcome::Completed { result } => {
            put_done(tx, &end, result.as_deref())?;
        }
        Outcome::Failed { error, reason } => put_ended(tx, &end, FAILED, error, reason.as_str())?,
        Outcome::Cancelled { cause } => put_ended(tx, &end, CANCELLED, cause, "cancelled")?,
        Outcome::Retry { due_at, error, reason } => {
            put_attempt(tx, &end, RETRYING, Some(error), Some(reason.as_str()))?;
            put_waiting(tx, end.lane, RETRYING, end.id, *due_at, false, end.retry_count + 1)?;
        }
        Outcome::HandedBack => {
            put_attempt(tx, &end, state_code(JobState::Queued), None, None)?;
            put_ready(tx, end.lane, end.ready_at, end.id, end.retry_count, false)?;
        }
    }
    deltas.moved(end.lane, Tally::Held, Tally::of(state), 1);
    // Only the fast path trusts its word that there is nothing more: whoever ends a job may not have heard of everything.
    if end.on_record || state != JobState::Completed || tx.is_keyed(end.lane) {
        forget(tx, end.id, Leave::of(state))?;
    }
    Ok(state)
}

/// A job that somebody wants cancelled does not go back to any line.
fn turn_cancelled(tx: &Tx, mut end: RunEnd) -> Result<RunEnd> {
    if matches!(end.outcome, Outcome::Retry { .. } | Outcome::HandedBack) {
        let asked: Option<String> = tx
            .connection
            .prepare_cached("SELECT reason FROM cancel WHERE id = ?")?
            .query_row([end.id.0], |row| row.get(0))
            .optional()?;
        if let Some(cause) = asked {
            LogLine::new(end.at, LogEvent::Cancelled, cause.clone()).append_to(&mut end.log);
            end.outcome = Outcome::Cancelled { cause };
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

/// Removes what stood beside the fast path, and lets a finished job's webhook follow, so its row in `done` or `ended` must stand.
/// A job that comes back can expire again: its expiry may have passed while it ran.
pub fn forget(tx: &Tx, id: JobId, leave: Leave) -> Result<()> {
    let terminal = leave != Leave::Back;
    tx.connection.prepare_cached("DELETE FROM running WHERE id = ?")?.execute([id.0])?;
    if terminal {
        tx.connection.prepare_cached("DELETE FROM cancel WHERE id = ?")?.execute([id.0])?;
    }
    let Some((lane, options)) = read::lane_and_options(tx.connection, id)? else { return Ok(()) };
    if leave == Leave::Over
        && let Some(url) = options.webhook_url.clone()
    {
        webhooks::announce(tx, lane, id, url, &options)?;
    }
    if terminal && let Some(key) = options.unique_key {
        tx.connection.prepare_cached("DELETE FROM job_key WHERE kind = ? AND key = ? AND id = ?")?.execute((
            KeyKind::Unique as i16,
            key,
            id.0,
        ))?;
    }
    if let Some(key) = options.concurrency_key {
        release(tx, key_number(&key), id)?;
    }
    if let Some(expires_at) = options.expires_at {
        let sql = if terminal {
            "DELETE FROM expiry WHERE expires_at = ? AND id = ?"
        } else {
            tx.signal(Signal::Waiting);
            "INSERT OR IGNORE INTO expiry (expires_at, id) VALUES (?, ?)"
        };
        tx.connection.prepare_cached(sql)?.execute((expires_at.as_ms(), id.0))?;
    }
    Ok(())
}

/// A job with a key is in nobody's hands any more: the lines of its key may go on.
fn release(tx: &Tx, key: i64, id: JobId) -> Result<()> {
    let held = tx.connection.prepare_cached("DELETE FROM hold WHERE key = ? AND id = ?")?.execute((key, id.0))?;
    if held == 0 {
        return Ok(());
    }
    // What waits for its rate goes on when that lets it.
    tx.connection
        .prepare_cached("UPDATE line SET open = 1 WHERE key = ? AND open = 0 AND opens_at IS NULL")?
        .execute([key])?;
    let mut statement = tx.connection.prepare_cached("SELECT lane FROM line WHERE key = ?")?;
    let mut lanes = statement.query([key])?;
    while let Some(row) = lanes.next()? {
        tx.signal(Signal::Ready(row.get(0)?));
    }
    Ok(())
}

/// Tells that jobs of these lanes have left somebody's hands, if that lets others go.
pub fn tell_room(tx: &Tx, lanes: impl Iterator<Item = LaneId>) {
    let rules = tx.shared.rules.current();
    if !rules.limits.is_empty() {
        let lanes: Vec<Lane> = distinct(lanes).into_iter().filter_map(|lane| tx.shared.lanes.get(lane)).collect();
        if counts(&rules, &lanes) {
            tx.signal(Signal::Room);
        }
    }
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
        let log = Taken::default().log(now, LogEvent::Cancelled, &cause);
        put_ended_without_run(tx, lane, CANCELLED, child, 0, &cause, "cancelled", log, now)?;
        forget(tx, child, Leave::Over)?;
        deltas.moved(lane, Tally::Pending, Tally::Cancelled, 1);
        return Ok(true);
    }
    tx.connection.prepare_cached("DELETE FROM depends WHERE parent = ? AND child = ?")?.execute((parent.0, child.0))?;
    let open = tx.connection.prepare_cached("SELECT 1 FROM depends WHERE child = ? LIMIT 1")?.exists([child.0])?;
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

/// What is known of a hand-out.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Block {
    /// Closed, or taken away: reports under its run are stale.
    Gone,
    /// Nothing but completions was told so far.
    Plain,
    /// Each end has to be looked at closely.
    Strict,
}

fn block_of(tx: &Tx, run: Run, blocks: &mut HashMap<Run, Block>) -> Result<Block> {
    if let Some(known) = blocks.get(&run) {
        return Ok(*known);
    }
    let strict: Option<bool> = tx
        .connection
        .prepare_cached("SELECT strict FROM block WHERE run = ?")?
        .query_row([run], |row| row.get(0))
        .optional()?;
    let block = match strict {
        None => Block::Gone,
        Some(false) => Block::Plain,
        Some(true) => Block::Strict,
    };
    blocks.insert(run, block);
    Ok(block)
}

fn close_block(tx: &Tx, end: &RunEnd, blocks: &mut HashMap<Run, Block>) -> Result<()> {
    if end.closes_block {
        tx.connection.prepare_cached("DELETE FROM block WHERE run = ?")?.execute([end.run])?;
        blocks.insert(end.run, Block::Gone);
    }
    Ok(())
}

/// The fast path: a completion with nothing else on record. `false`: it is none, or it is stored already.
fn complete_plainly(tx: &Tx, end: &RunEnd) -> Result<bool> {
    match &end.outcome {
        Outcome::Completed { result } if !end.on_record && !tx.is_keyed(end.lane) => {
            put_done(tx, end, result.as_deref())
        }
        _ => Ok(false),
    }
}

/// `false`: the job has a row there.
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

/// How and when this run of the job ended, if it is over.
pub fn ended_as(connection: &Connection, lane: LaneId, id: JobId, run: Run) -> Result<Option<(i16, i64)>> {
    let ended = connection
        .prepare_cached(
            "SELECT 6, finished_at FROM done WHERE lane = ?1 AND id = ?2 AND run = ?3
             UNION ALL
             SELECT state, finished_at FROM ended WHERE lane = ?1 AND state IN (7, 8) AND id = ?2 AND run = ?3
             UNION ALL SELECT state, finished_at FROM attempt WHERE id = ?2 AND run = ?3
             LIMIT 1",
        )?
        .query_row((lane, id.0, run), |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?;
    Ok(ended)
}

fn job_exists(tx: &Tx, id: JobId) -> Result<bool> {
    Ok(tx.connection.prepare_cached("SELECT 1 FROM job WHERE id = ?")?.exists([id.0])?)
}

fn has_rows(tx: &Tx, sql: &str) -> Result<bool> {
    Ok(tx.connection.prepare_cached(sql)?.exists([])?)
}
