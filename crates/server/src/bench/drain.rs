//! Measures the drain: a real server process works off a database full of jobs.

use std::{
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

use super::scratch::{Scratch, connect};

pub struct Drained {
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
pub enum Watch {
    Sqlite(rusqlite::Connection),
    Postgres(tokio_postgres::Client),
}

impl Watch {
    pub async fn open(scratch: &Scratch, url: &str) -> Result<Watch> {
        Ok(match scratch {
            Scratch::Sqlite { .. } => Watch::Sqlite(rusqlite::Connection::open_with_flags(
                url.trim_start_matches("sqlite:"),
                rusqlite::OpenFlags::SQLITE_OPEN_READ_ONLY,
            )?),
            Scratch::Postgres { .. } => Watch::Postgres(connect(url).await?),
        })
    }

    pub async fn completed(&self) -> Result<usize> {
        let count: i64 = match self {
            Watch::Sqlite(connection) => {
                connection.query_row("SELECT coalesce(sum(n), 0) FROM counter WHERE tally = 4", [], |row| row.get(0))?
            }
            Watch::Postgres(client) => client
                .query_one("SELECT coalesce(sum(n), 0)::int8 FROM faena.counter WHERE tally = 4", &[])
                .await?
                .get(0),
        };
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// Returns the position of PostgreSQL's write-ahead log. SQLite: 0, the process's own counter is used instead.
    async fn log_position(&self) -> Result<f64> {
        Ok(match self {
            Watch::Sqlite(_) => 0.0,
            Watch::Postgres(client) => {
                client.query_one("SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::float8", &[]).await?.get(0)
            }
        })
    }
}

/// Drains `jobs` jobs in addition to those already completed, then reads the server's memory and writes.
pub async fn drain(scratch: &Scratch, url: &str, jobs: usize) -> Result<Drained> {
    drain_with(scratch, url, jobs, &[]).await
}

/// Drains as `drain` does, with a server in this environment.
pub async fn drain_with(scratch: &Scratch, url: &str, jobs: usize, environment: &[(&str, &str)]) -> Result<Drained> {
    let watch = Watch::open(scratch, url).await?;
    let before = watch.completed().await?;
    let log_before = watch.log_position().await?;
    let server = Server::start(url, environment)?;
    // The clock starts with the first completed job, because starting the process is not part of the drain.
    let mut first = before;
    let deadline = Instant::now() + Duration::from_secs(600);
    while first == before {
        tokio::time::sleep(Duration::from_millis(1)).await;
        first = watch.completed().await?;
        anyhow::ensure!(Instant::now() < deadline, "the server does not drain");
    }
    let started = Instant::now();
    let mut per_second = Vec::new();
    let (mut mark, mut marked_at) = (first, started);
    let mut now = first;
    while now < before + jobs {
        tokio::time::sleep(Duration::from_millis(5)).await;
        now = watch.completed().await?;
        anyhow::ensure!(Instant::now() < deadline, "the server stopped draining at {} of {jobs}", now - before);
        if marked_at.elapsed() >= Duration::from_secs(1) {
            per_second.push(((now - mark) as f64 / marked_at.elapsed().as_secs_f64()) as usize);
            (mark, marked_at) = (now, Instant::now());
        }
    }
    let rate = (now - first) as f64 / started.elapsed().as_secs_f64();
    let written = match watch {
        Watch::Sqlite(_) => server.written_bytes(),
        Watch::Postgres(_) => watch.log_position().await? - log_before,
    };
    Ok(Drained {
        rate,
        resident_mib: server.resident_mib(),
        bytes_per_job: written / (now - before) as f64,
        per_second,
    })
}
