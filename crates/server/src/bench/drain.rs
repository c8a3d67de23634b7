//! Measures throughput: a real server process completes a backlog of jobs.

use std::{
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use faena_store::Tally;

use super::scratch::{Scratch, connect};

pub struct BacklogResult {
    pub rate: f64,
    pub resident_mib: f64,
    pub bytes_per_job: f64,
    /// Completed jobs in each second.
    pub per_second: Vec<usize>,
}

/// A running `faena serve`, killed when it goes out of scope.
pub struct Server(pub Child);

impl Server {
    pub fn start(url: &str, environment: &[(&str, &str)]) -> Result<Server> {
        let child = Command::new(std::env::current_exe()?)
            .args(["serve", "--port", "0", "--database-url", url])
            .env("LOG_LEVEL", "warn")
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .context("cannot start the server")?;
        Ok(Server(child))
    }

    pub fn resident_mib(&self) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.id())).unwrap_or_default();
        field(&status, "VmRSS:") / 1_024.0
    }

    fn written_bytes(&self) -> f64 {
        let io = std::fs::read_to_string(format!("/proc/{}/io", self.0.id())).unwrap_or_default();
        field(&io, "write_bytes:")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn field(text: &str, name: &str) -> f64 {
    let line = text.lines().find(|line| line.starts_with(name));
    line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok()).unwrap_or(0.0)
}

/// Counts completed jobs from outside the server.
pub enum CompletionCounter {
    Sqlite(rusqlite::Connection),
    Postgres(tokio_postgres::Client),
}

impl CompletionCounter {
    pub async fn connect(scratch: &Scratch, url: &str) -> Result<CompletionCounter> {
        Ok(match scratch {
            Scratch::Sqlite { .. } => CompletionCounter::Sqlite(rusqlite::Connection::open_with_flags(
                url.trim_start_matches("sqlite:"),
                rusqlite::OpenFlags::SQLITE_OPEN_READ_ONLY,
            )?),
            Scratch::Postgres { .. } => CompletionCounter::Postgres(connect(url).await?),
        })
    }

    pub async fn completed(&self) -> Result<usize> {
        let count: i64 = match self {
            CompletionCounter::Sqlite(connection) => connection.query_row(
                "SELECT coalesce(sum(n), 0) FROM counter WHERE tally = ?",
                [Tally::Completed as i16],
                |row| row.get(0),
            )?,
            CompletionCounter::Postgres(client) => client
                .query_one(
                    "SELECT coalesce(sum(n), 0)::int8 FROM faena.counter WHERE tally = $1",
                    &[&(Tally::Completed as i16)],
                )
                .await?
                .get(0),
        };
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// Returns the position of PostgreSQL's write-ahead log in bytes. Returns 0 for SQLite, where `Server::written_bytes` is used
    /// instead.
    async fn wal_position(&self) -> Result<f64> {
        Ok(match self {
            CompletionCounter::Sqlite(_) => 0.0,
            CompletionCounter::Postgres(client) => {
                client.query_one("SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::float8", &[]).await?.get(0)
            }
        })
    }
}

/// Starts a server and measures how fast it completes `jobs` jobs, how much memory it then uses and how much it has written.
pub async fn drain(scratch: &Scratch, url: &str, jobs: usize) -> Result<BacklogResult> {
    drain_with(scratch, url, jobs, &[]).await
}

/// Like [`drain`], but starts the server with these environment variables.
pub async fn drain_with(
    scratch: &Scratch,
    url: &str,
    jobs: usize,
    environment: &[(&str, &str)],
) -> Result<BacklogResult> {
    let counter = CompletionCounter::connect(scratch, url).await?;
    let before = counter.completed().await?;
    let wal_before = counter.wal_position().await?;
    let server = Server::start(url, environment)?;
    // The clock starts with the first completed job, because starting the process is not measured.
    let mut first = before;
    let deadline = Instant::now() + Duration::from_secs(600);
    while first == before {
        tokio::time::sleep(Duration::from_millis(1)).await;
        first = counter.completed().await?;
        anyhow::ensure!(Instant::now() < deadline, "no job completed within 600 s");
    }
    let started = Instant::now();
    let mut per_second = Vec::new();
    let (mut last_count, mut last_count_at) = (first, started);
    let mut now = first;
    while now < before + jobs {
        tokio::time::sleep(Duration::from_millis(5)).await;
        now = counter.completed().await?;
        anyhow::ensure!(Instant::now() < deadline, "timed out after 600 s: {} of {jobs} jobs completed", now - before);
        if last_count_at.elapsed() >= Duration::from_secs(1) {
            per_second.push(((now - last_count) as f64 / last_count_at.elapsed().as_secs_f64()) as usize);
            (last_count, last_count_at) = (now, Instant::now());
        }
    }
    let rate = (now - first) as f64 / started.elapsed().as_secs_f64();
    let written = match counter {
        CompletionCounter::Sqlite(_) => server.written_bytes(),
        CompletionCounter::Postgres(_) => counter.wal_position().await? - wal_before,
    };
    Ok(BacklogResult {
        rate,
        resident_mib: server.resident_mib(),
        bytes_per_job: written / (now - before) as f64,
        per_second,
    })
}
