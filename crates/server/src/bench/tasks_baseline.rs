//! Measures the baseline of tasks: a bare loop that reads and writes the rows of one event, without a state machine.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use faena_domain::Timestamp;
use faena_machine::{Definition, Event, Input, create, step};
use serde_json::json;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use super::{
    baseline_sqlite::rate,
    scratch::{Scratch, connect},
};

/// Events per transaction: the size of the batches that form in the measurement, because its callers are concurrent.
const BATCH: usize = 256;
const TASKS: usize = 2_000;

/// Texts of the size that one event of the measured machine writes.
pub struct EventRows {
    body: String,
    record: String,
    answer: String,
    data: String,
}

impl EventRows {
    pub fn sample(definition: &Definition) -> Result<EventRows> {
        let (id, now) = (Uuid::now_v7().to_string(), Timestamp::now());
        let data = json!({"customer": "ada.byron@example.org", "number": 1_000, "round": 100_000});
        let first = create(definition, id.clone(), "bench".into(), data, now).map_err(anyhow::Error::msg)?;
        let event = Event {
            id: id.clone(),
            kind: "go".into(),
            payload: json!({"round": 100_000}),
            actor: "bench".into(),
            decider: None,
            at: now,
        };
        let applied = step(definition, &first.task, Input::Event(event), now);
        let record = applied.records.first().context("the event leaves a record")?;
        let metadata = json!({"taskId": id, "traceId": id, "timestamp": now, "originator": "faena"});
        let payload =
            json!({"machine": "bench", "version": 1, "from": "LEFT", "to": "RIGHT", "event": "go", "reason": null});
        Ok(EventRows {
            body: serde_json::to_string(&applied.task)?,
            record: serde_json::to_string(record)?,
            answer: json!({"outcome": "applied", "state": "RIGHT"}).to_string(),
            data: json!({"metadata": metadata, "payload": payload}).to_string(),
        })
    }
}

/// Returns the events per second of the bare loop.
pub async fn run(scratch: &mut Scratch, rows: &EventRows, events: usize) -> Result<f64> {
    let url = scratch.fresh().await?;
    match scratch {
        Scratch::Sqlite { .. } => sqlite(url.trim_start_matches("sqlite:"), rows, events),
        Scratch::Postgres { .. } => postgres(&url, rows, events).await,
    }
}

const SCHEMA: &str = "
    CREATE TABLE task (id {uuid} PRIMARY KEY, status text, state text, updated_at int8, due_at int8, body text){tail};
    CREATE INDEX task_due ON task (due_at);
    CREATE INDEX task_state ON task (status, state);
    CREATE TABLE task_record (task {uuid}, sequence int8, record text, PRIMARY KEY (task, sequence)){tail};
    CREATE TABLE task_inbox (task {uuid}, event_id text, answer text, PRIMARY KEY (task, event_id)){tail};
    CREATE TABLE event (position {serial}, id {uuid} UNIQUE, type text, subject {uuid}, sequence int8, at int8, actor text, data text);";

/// The rows of a batch, as columns.
struct BatchRows {
    tasks: Vec<Uuid>,
    sequences: Vec<i64>,
    events: Vec<Uuid>,
    names: Vec<String>,
    now: i64,
}

impl BatchRows {
    fn new(all: &[Uuid], first: usize) -> BatchRows {
        let numbers = first..first + BATCH;
        let events: Vec<Uuid> = numbers.clone().map(|_| Uuid::now_v7()).collect();
        BatchRows {
            tasks: numbers.clone().map(|number| all[number % all.len()]).collect(),
            sequences: numbers.map(|number| (number / all.len()) as i64 + 1).collect(),
            names: events.iter().map(Uuid::to_string).collect(),
            events,
            now: Timestamp::now().as_ms(),
        }
    }
}

fn sqlite(path: &str, rows: &EventRows, events: usize) -> Result<f64> {
    let connection = rusqlite::Connection::open(path)?;
    connection.execute_batch(
        "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA cache_size = -16384; PRAGMA wal_autocheckpoint = 4096;",
    )?;
    connection.execute_batch(
        &SCHEMA
            .replace("{uuid}", "blob")
            .replace("{serial}", "INTEGER PRIMARY KEY AUTOINCREMENT")
            .replace("{tail}", " WITHOUT ROWID"),
    )?;
    let all: Vec<Uuid> = (0..TASKS).map(|_| Uuid::now_v7()).collect();
    for id in &all {
        connection
            .prepare_cached("INSERT INTO task VALUES (?, 'running', 'LEFT', 0, 0, ?)")?
            .execute((id, &rows.body))?;
    }
    let started = Instant::now();
    for first in (0..events).step_by(BATCH) {
        let batch = BatchRows::new(&all, first);
        connection.execute_batch("BEGIN IMMEDIATE")?;
        for n in 0..BATCH {
            sqlite_event(&connection, rows, &batch, n)?;
        }
        connection.execute_batch("COMMIT")?;
    }
    Ok(rate(events.next_multiple_of(BATCH), started))
}

fn sqlite_event(connection: &rusqlite::Connection, rows: &EventRows, batch: &BatchRows, n: usize) -> Result<()> {
    let (task, sequence, event, now) = (batch.tasks[n], batch.sequences[n], batch.events[n], batch.now);
    let body: String =
        connection.prepare_cached("SELECT body FROM task WHERE id = ?")?.query_row([task], |row| row.get(0))?;
    ensure!(!body.is_empty(), "the loop reads every task");
    let known = connection
        .prepare_cached("SELECT answer FROM task_inbox WHERE task = ? AND event_id = ?")?
        .exists((task, &batch.names[n]))?;
    ensure!(!known, "every event is new");
    let state = if sequence % 2 == 0 { "LEFT" } else { "RIGHT" };
    connection
        .prepare_cached("UPDATE task SET state = ?, updated_at = ?, due_at = ?, body = ? WHERE id = ?")?
        .execute((state, now, now, &rows.body, task))?;
    connection.prepare_cached("INSERT INTO task_record VALUES (?, ?, ?)")?.execute((task, sequence, &rows.record))?;
    connection.prepare_cached("INSERT INTO task_inbox VALUES (?, ?, ?)")?.execute((
        task,
        &batch.names[n],
        &rows.answer,
    ))?;
    connection
        .prepare_cached("INSERT INTO event VALUES (NULL, ?, 'task.state.changed', ?, ?, ?, 'bench', ?)")?
        .execute((event, task, sequence, now, &rows.data))?;
    Ok(())
}

async fn postgres(url: &str, rows: &EventRows, events: usize) -> Result<f64> {
    let client = connect(url).await?;
    let serial = "bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY";
    let schema = SCHEMA.replace("{uuid}", "uuid").replace("{serial}", serial).replace("{tail}", "");
    client.batch_execute(&schema).await?;
    client
        .execute(
            "INSERT INTO task SELECT gen_random_uuid(), 'running', 'LEFT', 0, 0, $1 FROM generate_series(1, $2::int8)",
            &[&rows.body, &(TASKS as i64)],
        )
        .await?;
    let all: Vec<Uuid> = client.query("SELECT id FROM task", &[]).await?.iter().map(|row| row.get(0)).collect();
    let loops = BareLoop::prepare(&client).await?;
    let started = Instant::now();
    for first in (0..events).step_by(BATCH) {
        loops.batch(&client, rows, &BatchRows::new(&all, first)).await?;
    }
    Ok(rate(events.next_multiple_of(BATCH), started))
}

struct BareLoop {
    read: tokio_postgres::Statement,
    known: tokio_postgres::Statement,
    write: tokio_postgres::Statement,
}

impl BareLoop {
    async fn prepare(client: &tokio_postgres::Client) -> Result<BareLoop> {
        let write = "WITH n AS MATERIALIZED (
                 SELECT * FROM unnest($1::uuid[], $2::int8[], $3::uuid[], $4::text[]) AS n(task, sequence, event, name)),
             t AS (UPDATE task SET state = CASE n.sequence % 2 WHEN 0 THEN 'LEFT' ELSE 'RIGHT' END, updated_at = $5, due_at = $5, body = $6
                   FROM n WHERE id = n.task),
             r AS (INSERT INTO task_record SELECT task, sequence, $7 FROM n),
             i AS (INSERT INTO task_inbox SELECT task, name, $8 FROM n)
             INSERT INTO event (id, type, subject, sequence, at, actor, data)
             SELECT event, 'task.state.changed', task, sequence, $5, 'bench', $9 FROM n";
        Ok(BareLoop {
            read: client.prepare("SELECT id, body FROM task WHERE id = ANY($1) ORDER BY id FOR UPDATE").await?,
            known: client
                .prepare(
                    "SELECT i.answer FROM unnest($1::uuid[], $2::text[]) AS n(task, name)
                     JOIN task_inbox i ON i.task = n.task AND i.event_id = n.name",
                )
                .await?,
            write: client.prepare(write).await?,
        })
    }

    /// Reads in one round trip, and writes in another.
    async fn batch(&self, client: &tokio_postgres::Client, rows: &EventRows, batch: &BatchRows) -> Result<()> {
        let parameters: [&(dyn ToSql + Sync); 2] = [&batch.tasks, &batch.names];
        let (begun, read, known) = futures_util::join!(
            client.batch_execute("BEGIN"),
            client.query(&self.read, &parameters[..1]),
            client.query(&self.known, &parameters),
        );
        begun?;
        ensure!(read?.len() == BATCH && known?.is_empty(), "the loop reads every task");
        let values: [&(dyn ToSql + Sync); 9] = [
            &batch.tasks,
            &batch.sequences,
            &batch.events,
            &batch.names,
            &batch.now,
            &rows.body,
            &rows.record,
            &rows.answer,
            &rows.data,
        ];
        let (written, committed) =
            futures_util::join!(client.execute(&self.write, &values), client.batch_execute("COMMIT"));
        written?;
        committed?;
        Ok(())
    }
}
