//! Measures the cost of API keys and connections, idle and busy, and the effect of one flooding client on other clients.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use hdrhistogram::Histogram;
use tokio::{sync::Semaphore, task::JoinSet, time::MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use super::{
    baseline_sqlite::PAYLOAD,
    http_load::{Connection, Target, requests_per_second},
    report::Report,
    scratch::Scratch,
};
use crate::http::raise_limit;

const IDLE: usize = 10_000;
const BUSY: usize = 1_000;
/// Connections that are opened concurrently; more would overflow the queue of the listener.
const OPENING: usize = 64;
const ROUNDS: usize = 3;
const CONNECTIONS: usize = 16;
const SECONDS: u64 = 4;
/// Clients alongside the flooding one, each with its own address.
const CLIENTS: usize = 8;
const REQUESTS_PER_SECOND: u64 = 100;
const FLOOD_CONNECTIONS: usize = 64;
const LIMIT_PER_ADDRESS: &str = "200";

pub async fn connections(scratch: &mut Scratch, report: &mut Report) -> Result<()> {
    raise_limit(IDLE + BUSY);
    keys(scratch, report).await?;
    idle_connections(scratch, report).await?;
    flood(scratch, report).await
}

/// Alternates between a server without keys and one with a key, so that a slow minute of the machine hits both.
async fn keys(scratch: &mut Scratch, report: &mut Report) -> Result<()> {
    let database = scratch.database_kind();
    report.step(&format!("{database}: submits without and with an API key"));
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let target = Target::faena(&scratch.fresh().await?).await?;
        without.push(requests_per_second(target.address, CONNECTIONS, submit("")).await?);
        drop(target);
        let target = Target::faena(&scratch.fresh().await?).await?;
        let key = create_key(target.address).await?;
        let request = submit(&format!("authorization: Bearer {key}\r\n"));
        with.push(requests_per_second(target.address, CONNECTIONS, request).await?);
    }
    let (without, with) = (median(without), median(with));
    report.plain(database, "POST /api/v1/jobs without a key, 16 connections", without, "requests/s");
    report.against(database, "POST /api/v1/jobs with a key, 16 connections", with, "requests/s", without, Some(0.95));
    Ok(())
}

/// Keeps idle connections open while others send requests, and checks that every idle one still works.
async fn idle_connections(scratch: &mut Scratch, report: &mut Report) -> Result<()> {
    let database = scratch.database_kind();
    report.step(&format!("{database}: {IDLE} idle and {BUSY} busy connections"));
    let target = Target::faena_with(&scratch.fresh().await?, &[("FAENA_SERVER_IDLE_TIMEOUT", "10m")]).await?;
    let ping: Arc<[u8]> = get("/health/live", "").into();
    let before = target.server.resident_mib();
    let mut idle = open(target.address, IDLE, &ping).await?;
    let kib = (target.server.resident_mib() - before) * 1_024.0 / IDLE as f64;
    report.plain(database, "memory per idle connection", kib, "KiB");
    let rate = requests_per_second(target.address, BUSY, submit("")).await?;
    report.plain(database, "POST /api/v1/jobs, 1000 connections and 10 000 idle ones", rate, "requests/s");
    let mut alive = 0;
    for connection in &mut idle {
        alive += usize::from(connection.call(&ping).await.is_ok());
    }
    report.at_least(database, "idle connections that still work", alive as f64, "connections", IDLE as f64);
    Ok(())
}

async fn open(address: SocketAddr, count: usize, ping: &Arc<[u8]>) -> Result<Vec<Connection>> {
    let permits = Arc::new(Semaphore::new(OPENING));
    let mut opening = JoinSet::new();
    for _ in 0..count {
        let (permits, ping) = (permits.clone(), ping.clone());
        opening.spawn(async move {
            let _permit = permits.acquire().await?;
            let mut connection = Connection::open(address).await?;
            connection.call(&ping).await?;
            anyhow::Ok(connection)
        });
    }
    let opened: Result<Vec<Connection>> = opening.join_all().await.into_iter().collect();
    opened.context("cannot open all connections; raise the limit on file descriptors (ulimit -n)")
}

/// Measures the response time of clients that send at a fixed rate, alone and alongside one that sends as much as it can.
async fn flood(scratch: &mut Scratch, report: &mut Report) -> Result<()> {
    let database = scratch.database_kind();
    report.step(&format!("{database}: {CLIENTS} clients while another one floods the server"));
    let environment = [
        ("FAENA_SERVER_TRUSTED_PROXIES", "127.0.0.0/8"),
        ("FAENA_LIMITS_REQUESTS_PER_ADDRESS", LIMIT_PER_ADDRESS),
        ("FAENA_LIMITS_REQUESTS_PER_ADDRESS_BURST", LIMIT_PER_ADDRESS),
    ];
    let target = Target::faena_with(&scratch.fresh().await?, &environment).await?;
    response_times(target.address).await?;
    let alone = response_times(target.address).await?;
    let stop = CancellationToken::new();
    let flooding = flooding(target.address, &stop);
    let flooded = response_times(target.address).await?;
    stop.cancel();
    let (mut accepted, mut refused) = (0, 0);
    for counts in flooding.join_all().await {
        let (more_accepted, more_refused) = counts?;
        (accepted, refused) = (accepted + more_accepted, refused + more_refused);
    }
    ensure!(refused > 0, "the flooding client was never refused");
    let seconds = SECONDS as f64;
    report.plain(database, "flooding client: accepted", f64::from(accepted) / seconds, "requests/s");
    report.plain(database, "flooding client: refused", f64::from(refused) / seconds, "requests/s");
    for (name, quantile, goal) in [("p50", 0.5, Some(0.8)), ("p99", 0.99, None)] {
        let ms = |times: &Histogram<u64>| times.value_at_quantile(quantile) as f64 / 1_000.0;
        report.plain(database, &format!("8 x 100 submits/s alone, {name}"), ms(&alone), "ms");
        report.plain(database, &format!("8 x 100 submits/s during a flood, {name}"), ms(&flooded), "ms");
        let speed = [ms(&flooded), ms(&alone)].map(|ms| 1_000.0 / ms);
        let what = format!("speed of the other clients during a flood, {name}");
        report.against(database, &what, speed[0], "per connection and second", speed[1], goal);
    }
    Ok(())
}

/// Returns the response times of all clients in microseconds.
async fn response_times(address: SocketAddr) -> Result<Histogram<u64>> {
    let mut clients = JoinSet::new();
    for number in 0..CLIENTS {
        clients.spawn(async move {
            let request = submit(&format!("x-forwarded-for: 198.51.100.{number}\r\n"));
            let mut connection = Connection::open(address).await?;
            let mut times = Histogram::<u64>::new(3)?;
            let mut pace = tokio::time::interval(Duration::from_millis(1_000 / REQUESTS_PER_SECOND));
            pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
            for _ in 0..SECONDS * REQUESTS_PER_SECOND {
                pace.tick().await;
                let sent_at = Instant::now();
                connection.call(&request).await?;
                times.record(u64::try_from(sent_at.elapsed().as_micros())?)?;
            }
            anyhow::Ok(times)
        });
    }
    let mut all = Histogram::<u64>::new(3)?;
    for times in clients.join_all().await {
        all.add(times?)?;
    }
    Ok(all)
}

/// Sends requests from one address as fast as they are answered. Each task returns how many were accepted and rejected.
fn flooding(address: SocketAddr, stop: &CancellationToken) -> JoinSet<Result<(u32, u32)>> {
    let mut tasks = JoinSet::new();
    for _ in 0..FLOOD_CONNECTIONS {
        let stop = stop.clone();
        tasks.spawn(async move {
            let request = submit("x-forwarded-for: 203.0.113.66\r\n");
            let mut connection = Connection::open(address).await?;
            let (mut accepted, mut refused) = (0, 0);
            while !stop.is_cancelled() {
                match connection.exchange(&request).await?.0 {
                    429 => refused += 1,
                    201 => accepted += 1,
                    status => anyhow::bail!("the server answered {status}"),
                }
            }
            Ok((accepted, refused))
        });
    }
    tasks
}

/// Creates the first API key, which needs none itself.
async fn create_key(address: SocketAddr) -> Result<String> {
    let body = r#"{"name":"bench","scopes":["admin"]}"#;
    let created = Connection::open(address).await?.call(&request("/api/v1/api-keys", "", body)).await?;
    let created: serde_json::Value = serde_json::from_slice(&created)?;
    Ok(created["key"].as_str().context("the answer has no key")?.to_owned())
}

fn submit(headers: &str) -> Arc<[u8]> {
    request("/api/v1/jobs", headers, &format!(r#"{{"name":"noop","payload":{PAYLOAD}}}"#)).into()
}

fn request(path: &str, headers: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n{headers}content-length: {length}\r\n\r\n{body}"
    )
    .into_bytes()
}

fn get(path: &str, headers: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n{headers}\r\n").into_bytes()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
