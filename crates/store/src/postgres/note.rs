//! Reports of running jobs: their start, progress, a log line, a finished step.

use std::collections::HashMap;

use deadpool_postgres::Object;
use faena_domain::{JobId, LogEvent, LogLine, Run};
use uuid::Uuid;

use super::{
    end::{Key, ended, existing, small, storable},
    read,
};
use crate::{LaneId, NoteKind, Result, RunEnd, RunNote, progress};

/// Writes notes. `before`: ends of the same transaction that are not written yet.
pub async fn write_notes(
    client: &Object,
    notes: &[RunNote],
    open_claims: &HashMap<Run, i64>,
    before: &HashMap<Key, &RunEnd>,
) -> Result<Vec<bool>> {
    let keys: Vec<(LaneId, Uuid, Run)> = notes.iter().map(|note| (note.lane, note.id.0, note.run)).collect();
    let over = ended(client, &keys).await?;
    let there = existing(client, keys.iter().map(|key| key.1)).await?;
    let mut answers = Vec::with_capacity(notes.len());
    for note in notes {
        let key = (note.id.0, note.run);
        let live = open_claims.contains_key(&note.run)
            && !over.contains_key(&key)
            && !before.contains_key(&key)
            && there.contains(&note.id.0);
        // Recorded whichever run owns the job.
        if let NoteKind::Stale(text) = &note.kind {
            let exists = there.contains(&note.id.0);
            if exists {
                let entry = LogLine::new(note.at, LogEvent::StaleReport, text.clone());
                add_note(client, note.id, Some(note.run), entry).await?;
            }
            answers.push(exists);
            continue;
        }
        if live {
            write_note(client, note).await?;
        }
        answers.push(live);
    }
    Ok(answers)
}

async fn write_note(client: &Object, note: &RunNote) -> Result<()> {
    if let NoteKind::Step { name, result, total } = &note.kind {
        put_step(client, note, name, result, *total).await?;
    }
    put_running(client, note, progress_of(client, note).await?).await?;
    let entry = match &note.kind {
        NoteKind::Progress(progress) => LogLine::new(note.at, LogEvent::Progress, progress::describe(progress)),
        NoteKind::Message(text) => LogLine::new(note.at, LogEvent::Message, text.clone()),
        NoteKind::Started | NoteKind::Step { .. } | NoteKind::Stale(_) => return Ok(()),
    };
    add_note(client, note.id, Some(note.run), entry).await
}

/// Stores a step. An existing step keeps its first result.
async fn put_step(client: &Object, note: &RunNote, name: &str, result: &str, total: Option<u32>) -> Result<()> {
    client
        .execute(
            "INSERT INTO faena.step AS s (id, name, run, at, result, total) VALUES ($1, $2, $3, $4, $5, $6)
             ON CONFLICT (id, name) DO UPDATE SET total = coalesce(excluded.total, s.total)",
            &[
                &note.id.0,
                &storable(name),
                &note.run,
                &note.at.as_ms(),
                &result,
                &total.map(|total| i32::try_from(total).unwrap_or(i32::MAX)),
            ],
        )
        .await?;
    Ok(())
}

/// Returns the progress after this note, if the note changes it.
async fn progress_of(client: &Object, note: &RunNote) -> Result<Option<String>> {
    let progress = match &note.kind {
        NoteKind::Progress(reported) => read::step_count(client, note.id).await?.complete(reported),
        NoteKind::Step { name, total, .. } => {
            let before = client
                .query_opt("SELECT progress FROM faena.running WHERE id = $1 AND run = $2", &[&note.id.0, &note.run])
                .await?;
            let before = before.and_then(|row| progress::parse(row.get(0)));
            read::step_count(client, note.id).await?.after_step(name, *total, before)
        }
        NoteKind::Started | NoteKind::Message(_) | NoteKind::Stale(_) => return Ok(None),
    };
    Ok(Some(progress::stored(&progress)))
}

async fn put_running(client: &Object, note: &RunNote, progress: Option<String>) -> Result<()> {
    let statement = client
        .prepare_cached(
            "INSERT INTO faena.running AS r
                 (id, lane, run, node, worker, retry_count, ready_at, started_at, updated_at, progress)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)
             ON CONFLICT (id) DO UPDATE SET run = excluded.run, node = excluded.node, worker = excluded.worker,
                 retry_count = excluded.retry_count, ready_at = excluded.ready_at,
                 started_at = CASE WHEN r.run = excluded.run THEN r.started_at ELSE excluded.started_at END,
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
    Ok(())
}

pub async fn add_note(client: &Object, id: JobId, run: Option<Run>, entry: LogLine) -> Result<()> {
    client
        .execute(
            "INSERT INTO faena.job_log (id, run, log) VALUES ($1, $2, $3)",
            &[&id.0, &run, &LogLine::chunk(&[entry])],
        )
        .await?;
    Ok(())
}
