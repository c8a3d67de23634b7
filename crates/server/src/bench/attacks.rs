//! Attacks the server over many connections while a regular client submits, reads and completes jobs.
//!
//! Each attack runs against a server of its own. The hostile connections send their opening, hold the connection, and
//! connect again when the server closes it.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use hdrhistogram::Histogram;
use tokio::{
    io::AsyncWriteExt,
    net::TcpStream,
    task::JoinSet,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use super::{
    drain::Server,
    http_load::{Connection, Target, request},
    report::Report,
    scratch::Scratch,
};
use crate::http::raise_limit;

/// Pause of the regular client between two jobs.
const PACE: Duration = Duration::from_millis(50);
/// How often the memory is read, and how often a hostile connection checks whether it is closed.
const CHECK_EVERY: Duration = Duration::from_millis(100);
/// Time that the server has to release memory after an attack.
const MAX_RECOVERY: Duration = Duration::from_secs(10);
const MAX_P99_MS: f64 = 250.0;
const MAX_RESIDENT_MIB: f64 = 300.0;
/// Memory above the level before an attack that may still be in use after it.
const MAX_LEFT_MIB: f64 = 50.0;
/// The largest batch that the server accepts by default, and the largest frame of a WebSocket.
const LARGE_BYTES: usize = 16 << 20;

struct Attack {
    name: &'static str,
    /// What each hostile connection sends first. Gets the id of a large job.
    opening: fn(&str) -> Vec<u8>,
    /// Whether the connection is held, or closed and opened again.
    holds: bool,
}

const ATTACKS: &[Attack] = &[
    Attack { name: "idle sockets", opening: |_| Vec::new(), holds: true },
    Attack { name: "unfinished headers", opening: |_| unfinished_headers(), holds: true },
    Attack { name: "bare HTTP/2 prefaces", opening: |_| PREFACE.to_vec(), holds: true },
    Attack { name: "unfinished batches of 16 MiB", opening: |_| unfinished_batch(), holds: true },
    Attack { name: "WebSocket frames of 16 MiB before registration", opening: |_| unregistered_frame(), holds: true },
    Attack { name: "watchers of one job that do not read", opening: watcher, holds: true },
    Attack { name: "large answers that are not read", opening: unread_answers, holds: true },
    Attack { name: "HTTP/2 answers that are not read", opening: unread_http2, holds: true },
    Attack { name: "connections that come and go", opening: |_| get("/health/live"), holds: false },
];

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

fn get(path: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n").into_bytes()
}

fn unfinished_headers() -> Vec<u8> {
    format!("GET / HTTP/1.1\r\nhost: localhost\r\nx-large: {}", "x".repeat(60_000)).into_bytes()
}

fn unfinished_batch() -> Vec<u8> {
    let head = format!("POST /api/v1/jobs/batch HTTP/1.1\r\nhost: localhost\r\ncontent-length: {LARGE_BYTES}\r\n\r\n");
    let mut opening = head.into_bytes();
    opening.resize(opening.len() + LARGE_BYTES - 1, b' ');
    opening
}

fn unregistered_frame() -> Vec<u8> {
    let mut opening =
        b"GET /api/v1/workers/connect HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
        sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
            .to_vec();
    // A final text frame with a length of eight bytes and a mask of zeros.
    opening.extend([0x81, 0xff]);
    opening.extend((LARGE_BYTES as u64).to_be_bytes());
    opening.resize(opening.len() + 4 + LARGE_BYTES - 1, 0);
    opening
}

fn watcher(job: &str) -> Vec<u8> {
    get(&format!("/api/v1/jobs/{job}/events"))
}

fn unread_answers(job: &str) -> Vec<u8> {
    get(&format!("/api/v1/jobs/{job}")).repeat(50)
}

/// Opens a hundred streams and never permits their answers to be sent.
fn unread_http2(job: &str) -> Vec<u8> {
    let frame = |kind: u8, flags: u8, stream: u32, payload: &[u8]| {
        let mut frame = (payload.len() as u32).to_be_bytes()[1..].to_vec();
        frame.extend([kind, flags]);
        frame.extend(stream.to_be_bytes());
        frame.extend(payload);
        frame
    };
    let text = |text: &str| [&[text.len() as u8], text.as_bytes()].concat();
    // Indexed: method GET, scheme http. Literal: path, authority.
    let headers =
        [&[0x82, 0x86, 0x04][..], &text(&format!("/api/v1/jobs/{job}")), &[0x01], &text("localhost")].concat();
    // SETTINGS_INITIAL_WINDOW_SIZE is 1.
    let mut opening = [PREFACE, &frame(4, 0, 0, &[0, 4, 0, 0, 0, 1])].concat();
    for number in 0..100 {
        opening.extend(frame(1, 5, 2 * number + 1, &headers));
    }
    opening
}

pub async fn attacks(scratch: &mut Scratch, clients: usize, seconds: u64, report: &mut Report) -> Result<()> {
    raise_limit(clients);
    let duration = Duration::from_secs(seconds);
    for attack in ATTACKS {
        run(scratch, attack, clients, duration, report).await.with_context(|| attack.name.to_owned())?;
    }
    Ok(())
}

async fn run(
    scratch: &mut Scratch,
    attack: &Attack,
    clients: usize,
    duration: Duration,
    report: &mut Report,
) -> Result<()> {
    let database = scratch.database_kind();
    report.step(&format!("{database}: {clients} x {}", attack.name));
    let target = Target::faena_with_worker(&scratch.fresh().await?).await?;
    let job = submit_large(target.address).await?;
    let quiet = regular_client(target.address, duration / 4).await?;
    let before = target.server.resident_mib();
    let stop = CancellationToken::new();
    let opening: Arc<[u8]> = (attack.opening)(&job).into();
    let mut hostile = JoinSet::new();
    for _ in 0..clients {
        hostile.spawn(attack_until(target.address, opening.clone(), attack.holds, stop.clone()));
    }
    let attacked = async {
        let seen = regular_client(target.address, duration).await;
        stop.cancel();
        hostile.join_all().await;
        seen
    };
    let (seen, peak) = peak_mib(&target.server, attacked).await;
    let seen = seen?;
    sleep(duration.min(MAX_RECOVERY)).await;
    let after = target.server.resident_mib();
    let name = |what: &str| format!("{}: {what}", attack.name);
    report.plain(database, &name("p99 before"), quiet.ms(0.99), "ms");
    report.at_most(database, &name("errors of the regular client"), f64::from(seen.errors), "requests", 0.0);
    report.plain(database, &name("p50"), seen.ms(0.5), "ms");
    report.at_most(database, &name("p99"), seen.ms(0.99), "ms", MAX_P99_MS);
    report.plain(database, &name("memory before"), before, "MiB");
    report.at_most(database, &name("memory during"), peak, "MiB", MAX_RESIDENT_MIB);
    report.at_most(database, &name("memory after"), after, "MiB", before + MAX_LEFT_MIB);
    Ok(())
}

/// Submits a job of a type that no worker runs, with a payload of almost 1 MiB.
async fn submit_large(address: SocketAddr) -> Result<String> {
    let body = format!(r#"{{"name":"elsewhere","payload":{{"text":"{}"}}}}"#, "x".repeat(900_000));
    let answer = Connection::open(address).await?.call(&request("/api/v1/jobs", &body)).await?;
    id_of(&answer)
}

fn id_of(answer: &[u8]) -> Result<String> {
    let answer: serde_json::Value = serde_json::from_slice(answer)?;
    Ok(answer["id"].as_str().context("the answer has no id")?.to_owned())
}

/// Returns the output of `work` and the highest memory of the server meanwhile.
async fn peak_mib<T>(server: &Server, work: impl Future<Output = T>) -> (T, f64) {
    tokio::pin!(work);
    let mut peak = 0.0;
    loop {
        peak = server.resident_mib().max(peak);
        tokio::select! {
            output = &mut work => return (output, peak),
            () = sleep(CHECK_EVERY) => {}
        }
    }
}

/// What the regular client has seen.
struct Seen {
    micros: Histogram<u64>,
    errors: u32,
}

impl Seen {
    fn ms(&self, quantile: f64) -> f64 {
        self.micros.value_at_quantile(quantile) as f64 / 1_000.0
    }
}

/// Submits jobs and reads them until they are completed, each on a new connection.
async fn regular_client(address: SocketAddr, duration: Duration) -> Result<Seen> {
    let started = Instant::now();
    let mut seen = Seen { micros: Histogram::new(3)?, errors: 0 };
    while started.elapsed() < duration {
        if let Err(error) = complete_job(address, &mut seen.micros).await {
            eprintln!("  regular client: {error:#}");
            seen.errors += 1;
        }
        sleep(PACE).await;
    }
    ensure!(!seen.micros.is_empty() || seen.errors > 0, "the regular client did nothing");
    Ok(seen)
}

async fn complete_job(address: SocketAddr, micros: &mut Histogram<u64>) -> Result<()> {
    let mut begun = Instant::now();
    let mut connection = Connection::open(address).await?;
    let mut record =
        |begun: Instant| micros.record(u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX).max(1));
    let id = id_of(&connection.call(&request("/api/v1/jobs", r#"{"name":"noop"}"#)).await?)?;
    record(begun)?;
    let show = get(&format!("/api/v1/jobs/{id}"));
    let submitted = Instant::now();
    loop {
        begun = Instant::now();
        let job: serde_json::Value = serde_json::from_slice(&connection.call(&show).await?)?;
        record(begun)?;
        if job["status"] == "COMPLETED" {
            return Ok(());
        }
        ensure!(
            submitted.elapsed() < Duration::from_secs(30),
            "the job is not completed after 30 s: {}",
            job["status"]
        );
        sleep(Duration::from_millis(20)).await;
    }
}

/// Connects and sends the opening again and again. If `holds`, keeps each connection until the server closes it.
async fn attack_until(address: SocketAddr, opening: Arc<[u8]>, holds: bool, stop: CancellationToken) {
    let attack = async {
        loop {
            if let Ok(Ok(mut stream)) = timeout(Duration::from_secs(5), TcpStream::connect(address)).await
                && stream.write_all(&opening).await.is_ok()
                && holds
            {
                hold(&stream).await;
            }
            sleep(CHECK_EVERY).await;
        }
    };
    tokio::select! { () = stop.cancelled() => {}, () = attack => {} }
}

/// Waits until the server closes the connection. Reads nothing.
async fn hold(stream: &TcpStream) {
    loop {
        match timeout(CHECK_EVERY, stream.peek(&mut [0])).await {
            Ok(Ok(0) | Err(_)) => return,
            Ok(Ok(_)) => sleep(CHECK_EVERY).await,
            Err(_) => {}
        }
    }
}
