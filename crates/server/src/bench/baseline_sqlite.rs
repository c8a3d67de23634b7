//! Measures the baseline of SQLite: a bare loop with one writer, batches of 1 000 and the same durability.

use std::time::Instant;

use anyhow::Result;
use rusqlite::Connection;
use uuid::Uuid;

/// Jobs per second of the bare loops.
pub struct Baseline {
    pub insert: f64,
    pub drain: f64,
}

const BATCH: usize = 1_000;
pub const PAYLOAD: &str =
    r#"{"to":"ada.byron@example.org","template":"welcome","locale":"es","attempt":1,"note":"abcdefgh"}"#;
pub const LOG: &str =
    r#"[1763236800123,"queued"],[1763236800124,"assigned"],[1763236800124,"started"],[1763236800125,"completed"]"#;

pub fn run(path: &str, jobs: usize) -> Result<Baseline> {
    let connection = Connection::open(path)?;
    connection.execute_batch(
        "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA cache_size = -16384; PRAGMA wal_autocheckpoint = 4096;
         CREATE TABLE job (id BLOB PRIMARY KEY, queue TEXT, type TEXT, priority INT, created_at INT, correlation TEXT,
                           options TEXT, payload TEXT) WITHOUT ROWID;
         CREATE TABLE ready (queue TEXT, score INT, id BLOB, PRIMARY KEY (queue, score, id)) WITHOUT ROWID;
         CREATE TABLE claim (run INTEGER PRIMARY KEY, node BLOB, ids BLOB);
         CREATE TABLE done (id BLOB PRIMARY KEY, run INT, state INT, finished_at INT, result TEXT, error TEXT, log TEXT)
             WITHOUT ROWID;",
    )?;
    let started = Instant::now();
    for batch in 0..jobs.div_ceil(BATCH) {
        connection.execute_batch("BEGIN IMMEDIATE")?;
        for n in 0..BATCH {
            let id = Uuid::now_v7();
            connection
                .prepare_cached("INSERT INTO job VALUES (?, 'default', 'noop', 2, ?, NULL, NULL, ?)")?
                .execute((id, 1_763_236_800_123_i64, PAYLOAD))?;
            connection
                .prepare_cached("INSERT INTO ready VALUES ('default', ?, ?)")?
                .execute(((batch * BATCH + n) as i64, id))?;
        }
        connection.execute_batch("COMMIT")?;
    }
    let insert = rate(jobs, started);

    let started = Instant::now();
    let mut run = 0_i64;
    loop {
        run += 1;
        connection.execute_batch("BEGIN IMMEDIATE")?;
        let rows: Vec<(i64, Uuid)> = connection
            .prepare_cached("SELECT score, id FROM ready WHERE queue = 'default' ORDER BY score, id LIMIT 1000")?
            .query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?
            .collect::<rusqlite::Result<_>>()?;
        if rows.is_empty() {
            connection.execute_batch("COMMIT")?;
            break;
        }
        let mut ids = Vec::with_capacity(rows.len() * 16);
        let mut payload_bytes = 0;
        for (score, id) in &rows {
            connection
                .prepare_cached("DELETE FROM ready WHERE queue = 'default' AND score = ? AND id = ?")?
                .execute((score, id))?;
            let payload: String =
                connection.prepare_cached("SELECT payload FROM job WHERE id = ?")?.query_row([id], |row| row.get(0))?;
            payload_bytes += payload.len();
            ids.extend_from_slice(id.as_bytes());
        }
        assert!(payload_bytes > 0, "the loop reads every payload");
        connection.prepare_cached("INSERT INTO claim VALUES (?, ?, ?)")?.execute((run, Uuid::nil(), ids))?;
        connection.execute_batch("COMMIT")?;
        connection.execute_batch("BEGIN IMMEDIATE")?;
        for (_, id) in &rows {
            connection
                .prepare_cached("INSERT INTO done VALUES (?, ?, 6, 1763236800125, NULL, NULL, ?)")?
                .execute((id, run, LOG))?;
        }
        connection.prepare_cached("DELETE FROM claim WHERE run = ?")?.execute([run])?;
        connection.execute_batch("COMMIT")?;
    }
    Ok(Baseline { insert, drain: rate(jobs, started) })
}

pub fn rate(jobs: usize, started: Instant) -> f64 {
    jobs as f64 / started.elapsed().as_secs_f64()
}
