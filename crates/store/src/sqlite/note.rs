//! Reports of running jobs: their start, progress, a log line, a finished step.

use std::collections::HashMap;

use faena_domain::{JobId, LogEvent, LogLine, Run};
use rusqlite::OptionalExtension;

use super::{
    end::{ClaimStatus, claim_status, ended_as, job_exists},
    read,
    writer::Tx,
};
use crate::{NoteKind, Result, RunNote, progress};

pub fn note(tx: &Tx, notes: Vec<RunNote>) -> Result<Vec<bool>> {
    let mut claims = HashMap::new();
    notes.into_iter().map(|note| note_one(tx, note, &mut claims)).collect()
}

fn note_one(tx: &Tx, note: RunNote, claims: &mut HashMap<Run, ClaimStatus>) -> Result<bool> {
    if !job_exists(tx, note.id)? {
        return Ok(false);
    }
    // Recorded whichever run owns the job.
    if let NoteKind::Stale(text) = note.kind {
        add_note(tx, note.id, Some(note.run), LogLine::new(note.at, LogEvent::StaleReport, text))?;
        return Ok(true);
    }
    if claim_status(tx, note.run, claims)? == ClaimStatus::Closed
        || ended_as(tx.connection, note.lane, note.id, note.run)?.is_some()
    {
        return Ok(false);
    }
    if let NoteKind::Step { name, result, total } = &note.kind {
        put_step(tx, &note, name, result, *total)?;
    }
    put_running(tx, &note, progress_of(tx, &note)?)?;
    let entry = match note.kind {
        NoteKind::Progress(progress) => LogLine::new(note.at, LogEvent::Progress, progress::describe(&progress)),
        NoteKind::Message(text) => LogLine::new(note.at, LogEvent::Message, text),
        NoteKind::Started | NoteKind::Step { .. } | NoteKind::Stale(_) => return Ok(true),
    };
    add_note(tx, note.id, Some(note.run), entry)?;
    Ok(true)
}

/// Stores a step. An existing step keeps its first result.
fn put_step(tx: &Tx, note: &RunNote, name: &str, result: &str, total: Option<u32>) -> Result<()> {
    tx.connection
        .prepare_cached(
            "INSERT INTO step (id, name, run, at, result, total) VALUES (?, ?, ?, ?, ?, ?)
             ON CONFLICT DO UPDATE SET total = coalesce(excluded.total, total)",
        )?
        .execute((note.id.0, name, note.run, note.at.as_ms(), result, total))?;
    Ok(())
}

/// Returns the progress after this note, if the note changes it.
fn progress_of(tx: &Tx, note: &RunNote) -> Result<Option<String>> {
    let progress = match &note.kind {
        NoteKind::Progress(reported) => read::step_count(tx.connection, note.id)?.complete(reported),
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

pub fn add_note(tx: &Tx, id: JobId, run: Option<Run>, entry: LogLine) -> Result<()> {
    tx.connection.prepare_cached("INSERT INTO job_log (id, run, log) VALUES (?, ?, ?)")?.execute((
        id.0,
        run,
        LogLine::chunk(&[entry]),
    ))?;
    Ok(())
}
