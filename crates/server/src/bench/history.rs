//! Measures the drain with a long history, a deep backlog or a held snapshot. None of these may slow it down.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use uuid::Uuid;

use super::{
    baseline_sqlite::{LOG, PAYLOAD},
    drain::{self, CompletionCounter, Server},
    report::Report,
    scratch::{Scratch, connect},
    submit,
};

const BACKLOG: usize = 1_000_000;

pub async fn history(scratch: &mut Scratch, jobs: usize, finished: usize, report: &mut Report) -> Result<()> {
    let database = scratch.database_kind();
    report.step(&format!("{database}: drain of an empty database"));
    let url = scratch.fresh().await?;
    submit::fill(&url, jobs).await?;
    let empty = drain::drain(scratch, &url, jobs).await?;
    report.plain(database, "drain, nothing else stored", empty.rate, "jobs/s");

    let url = scratch.fresh().await?;
    report.step(&format!("{database}: storing {finished} finished jobs"));
    submit::fill(&url, 1_000).await?;
    match scratch {
        Scratch::Sqlite { .. } => finish_sqlite(url.trim_start_matches("sqlite:"), finished)?,
        Scratch::Postgres { .. } => finish_postgres(&url, finished).await?,
    }
    report.step(&format!("{database}: storing {BACKLOG} waiting jobs"));
    submit::fill(&url, BACKLOG).await?;
    let full = drain::drain(scratch, &url, jobs).await?;
    report.against(database, "drain, 1 M waiting, 10 M finished", full.rate, "jobs/s", empty.rate, Some(0.8));
    lists(scratch, &url, report).await
}

/// Ids and end times of finished jobs, spread over the last six days.
struct Finished {
    ids: Vec<Uuid>,
    times: Vec<i64>,
}

fn finished_batch(first: usize, count: usize, total: usize) -> Finished {
    const SPAN_MS: i64 = 6 * 24 * 3_600_000;
    let start = faena_domain::Timestamp::now().as_ms() - SPAN_MS;
    let times: Vec<i64> =
        (first..first + count).map(|n| start + (n as i64) * (SPAN_MS - 3_600_000) / total as i64).collect();
    let ids = times.iter().map(|ms| faena_domain::JobId::at(faena_domain::Timestamp::from_ms(*ms)).0).collect();
    Finished { ids, times }
}

const BATCH: usize = 10_000;

fn finish_sqlite(path: &str, total: usize) -> Result<()> {
    let connection = rusqlite::Connection::open(path)?;
    connection.execute_batch("PRAGMA synchronous = OFF")?;
    for first in (0..total).step_by(BATCH) {
        let batch = finished_batch(first, BATCH.min(total - first), total);
        connection.execute_batch("BEGIN IMMEDIATE")?;
        for (id, at) in batch.ids.iter().zip(&batch.times) {
            connection
                .prepare_cached("INSERT INTO job (id, lane, payload) VALUES (?, 1, ?)")?
                .execute((id, PAYLOAD))?;
            connection
                .prepare_cached(
                    "INSERT INTO done (lane, id, finished_at, run, retry_count, started_at, worker, log)
                     VALUES (1, ?, ?, 1, 0, ?, ?, ?)",
                )?
                .execute((id, at, at, Uuid::nil(), LOG))?;
        }
        connection.execute(
            "INSERT INTO counter (lane, tally, n) VALUES (1, 4, ?1) ON CONFLICT DO UPDATE SET n = n + excluded.n",
            [batch.ids.len() as i64],
        )?;
        connection.execute_batch("COMMIT")?;
    }
    connection.execute_batch("PRAGMA wal_checkpoint(TRUNCATE)")?;
    // A real installation of this size would have written its pages to disk.
    std::fs::File::open(path)?.sync_all()?;
    Ok(())
}

async fn finish_postgres(url: &str, total: usize) -> Result<()> {
    let client = connect(url).await?;
    client.batch_execute("SET synchronous_commit = off").await?;
    // A new database has no partitions for past days; an installation of this age has them.
    const DAY_MS: i64 = 24 * 3_600_000;
    let today = faena_domain::Timestamp::now().as_ms().div_euclid(DAY_MS);
    for day in today - 7..today {
        let name = faena_domain::Timestamp::from_ms(day * DAY_MS).to_string()[..10].replace('-', "");
        let (from, to) = (day * DAY_MS, (day + 1) * DAY_MS);
        client
            .batch_execute(&format!(
                "CREATE TABLE IF NOT EXISTS faena.done_{name} PARTITION OF faena.done (PRIMARY KEY (lane, id)) FOR VALUES FROM ({from}) TO ({to})"
            ))
            .await?;
    }
    for first in (0..total).step_by(BATCH) {
        let batch = finished_batch(first, BATCH.min(total - first), total);
        client
            .execute(
                "WITH j AS (INSERT INTO faena.job (id, lane, payload) SELECT id, 1, $3 FROM unnest($1::uuid[]) AS n(id)),
                 c AS (INSERT INTO faena.counter AS c VALUES (0, 1, 4, cardinality($1))
                       ON CONFLICT (shard, lane, tally) DO UPDATE SET n = c.n + excluded.n)
                 INSERT INTO faena.done (lane, id, finished_at, run, retry_count, started_at, log)
                 SELECT 1, id, at, 1, 0, at, $4 FROM unnest($1::uuid[], $2::int8[]) AS n(id, at)",
                &[&batch.ids, &batch.times, &PAYLOAD, &LOG],
            )
            .await?;
    }
    // A real database of this size would have been vacuumed, analysed and checkpointed.
    client.batch_execute("VACUUM (ANALYZE) faena.job; ").await?;
    client.batch_execute("VACUUM (ANALYZE) faena.done; ").await?;
    client.batch_execute("CHECKPOINT").await?;
    Ok(())
}

async fn lists(scratch: &Scratch, url: &str, report: &mut Report) -> Result<()> {
    let database = scratch.database_kind();
    let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    // Runs no worker, so that lists are measured on a quiet server.
    let server = std::process::Command::new(std::env::current_exe()?)
        .args(["serve", "--roles", "api,engine", "--port", &port.to_string(), "--database-url", url])
        .env("LOG_LEVEL", "warn")
        .spawn()
        .context("cannot start the server")?;
    let _server = Server(server);
    let client = reqwest::Client::new();
    let base = format!("http://127.0.0.1:{port}");
    let deadline = Instant::now() + Duration::from_secs(60);
    while client.get(format!("{base}/health/live")).send().await.is_err() {
        anyhow::ensure!(Instant::now() < deadline, "the server does not answer");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let newest: serde_json::Value = client.get(format!("{base}/api/v1/jobs?limit=1")).send().await?.json().await?;
    let some_id = newest["jobs"][0]["id"].as_str().unwrap_or_default().to_owned();
    let three_days_ago = faena_domain::Timestamp::now().plus_ms(-3 * 24 * 3_600_000);
    for query in [
        "limit=20".to_owned(),
        "status=COMPLETED".into(),
        "status=QUEUED&type=noop".into(),
        "status=FAILED".into(),
        "status=COMPLETED&type=noop&queue=default&priority=NORMAL&limit=100".into(),
        "type=nothing".into(),
        "q=noop&page=50".into(),
        "tag=nothing".into(),
        format!("correlationId={some_id}"),
        format!("status=COMPLETED&createdBefore={three_days_ago}"),
    ] {
        let mut worst: f64 = 0.0;
        for _ in 0..5 {
            let started = Instant::now();
            let answer = client.get(format!("{base}/api/v1/jobs?{query}")).send().await?;
            anyhow::ensure!(answer.status().is_success(), "{query}: {}", answer.status());
            answer.bytes().await?;
            let took = started.elapsed().as_secs_f64() * 1_000.0;
            worst = worst.max(took);
        }
        report.at_most(database, &format!("GET /jobs?{query}, worst of 5"), worst, "ms", 50.0);
    }
    Ok(())
}

pub async fn held_snapshot(scratch: &mut Scratch, report: &mut Report) -> Result<()> {
    const JOBS: usize = 600_000;
    let database = scratch.database_kind();
    let url = scratch.fresh().await?;
    submit::fill(&url, JOBS).await?;
    let snapshot_session = connect(&url).await?;
    snapshot_session.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM faena.lane").await?;
    let drained = drain::drain(scratch, &url, JOBS).await?;
    snapshot_session.batch_execute("COMMIT").await?;
    let counter = CompletionCounter::connect(scratch, &url).await?;
    anyhow::ensure!(counter.completed().await? == JOBS, "jobs were lost");
    report.plain(database, "drain under a held snapshot", drained.rate, "jobs/s");
    for (second, count) in drained.per_second.iter().enumerate() {
        report.plain(database, &format!("  second {}", second + 1), *count as f64, "jobs/s");
    }
    if let (Some(first), Some(last)) = (drained.per_second.first(), drained.per_second.last()) {
        report.against(
            database,
            "last second compared with the first",
            *last as f64,
            "jobs/s",
            *first as f64,
            Some(0.5),
        );
    }
    Ok(())
}
