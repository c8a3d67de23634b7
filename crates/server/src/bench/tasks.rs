//! Measures tasks: events applied per second, the time from an event's arrival to the commit of its effect, and what waiting tasks cost.
//!
//! The baseline is a bare loop that reads and writes the rows of one event, in batches of the size that concurrent callers form.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use faena_domain::{TaskId, Timestamp};
use faena_machine::{Definition, Event, Input, Outcome, create};
use faena_store::{NewMachine, NewTask, Store, TaskInput};
use futures_util::{StreamExt, TryStreamExt, stream};
use hdrhistogram::Histogram;
use serde_json::json;

use super::{
    baseline_sqlite::rate,
    drain::Server,
    http_load::{Connection, Target, request},
    report::Report,
    scratch::{Scratch, connect},
    submit, tasks_baseline,
};

/// Every event moves the task and restarts a timer.
const MACHINE: &str = "
machine: bench
version: 1
events: {go: {}, alive: {heartbeat: true}}
limits: {transitions: 1000000000}
initial: LEFT
states:
  LEFT:  {deadline: {silence: 6h, total: 12h, to: LATE}, on: {go: {to: RIGHT, set: {round: event.round}}}}
  RIGHT: {deadline: {silence: 6h, total: 12h, to: LATE}, on: {go: {to: LEFT, set: {round: event.round}}}}
  LATE:  {final: true, ends: failure}
";
const TASKS: usize = 2_000;
/// Callers when throughput is measured. Each waits for its answer before it sends its next event.
const CALLERS: usize = 256;
const OFFERED_PER_SECOND: usize = 10_000;
const OFFERED_SECONDS: usize = 5;
const GOAL_PER_SECOND: f64 = 10_000.0;
const GOAL_P50_MS: f64 = 3.0;
const HTTP_CONNECTIONS: usize = 64;
const HTTP_SECONDS: u64 = 4;
const WAITING: usize = 100_000;
const IDLE_SECONDS: u64 = 20;
/// Difference in processor time per second that counts as noise between two measurements.
const NOISE_MS: f64 = 5.0;

pub async fn tasks(scratch: &mut Scratch, events: usize, report: &mut Report) -> Result<()> {
    let database = scratch.database_kind();
    let definition = Arc::new(Definition::parse(MACHINE).map_err(|findings| anyhow::anyhow!("{findings:?}"))?);
    report.step(&format!("{database}: the baseline"));
    let rows = tasks_baseline::EventRows::sample(&definition)?;
    let bare = tasks_baseline::run(scratch, &rows, events).await?;
    report.plain(database, "baseline: rows of an event", bare, "events/s");

    report.step(&format!("{database}: events"));
    let store = submit::open(&scratch.fresh().await?).await?;
    let started = Instant::now();
    let ids = fill(&*store, &definition, TASKS * 5).await?;
    report.plain(database, &format!("tasks created, {CALLERS} callers"), rate(TASKS * 5, started), "tasks/s");
    let ids: Arc<[TaskId]> = ids.into_iter().take(TASKS).collect();
    let applied = closed_loop(&store, &ids, "go", events, CALLERS).await?;
    let what = format!("events applied, {CALLERS} callers");
    report.against(database, &what, applied.rate, "events/s", bare, None);
    report.at_least(database, "events applied, goal", applied.rate, "events/s", GOAL_PER_SECOND);
    let single = closed_loop(&store, &ids, "go", (events / 50).max(100), 1).await?;
    report.plain(database, "event to its committed effect, 1 caller, p50", single.ms(0.5), "ms");
    let offered = open_loop(&store, &ids).await?;
    let what = format!("event to its committed effect at {OFFERED_PER_SECOND}/s");
    report.at_most(database, &format!("{what}, p50"), offered.ms(0.5), "ms", GOAL_P50_MS);
    report.plain(database, &format!("{what}, p99"), offered.ms(0.99), "ms");
    let alive = closed_loop(&store, &ids, "alive", events, CALLERS).await?;
    report.plain(database, &format!("heartbeats, {CALLERS} callers"), alive.rate, "events/s");
    store.close().await;

    report.step(&format!("{database}: events over HTTP"));
    let rate = over_http(scratch, &definition).await?;
    report.plain(database, &format!("events over HTTP, {HTTP_CONNECTIONS} connections"), rate, "requests/s");
    idle(scratch, &definition, report).await
}

/// Creates tasks. Each waits for an event, with timers that are due in hours.
async fn fill(store: &dyn Store, definition: &Arc<Definition>, count: usize) -> Result<Vec<TaskId>> {
    let now = Timestamp::now();
    store.machine_register(NewMachine { definition: definition.clone() }, "bench", now).await?;
    let creations = stream::iter(0..count).map(|number| async move {
        let (id, now) = (TaskId::new(), Timestamp::now());
        let data = json!({"customer": "ada.byron@example.org", "number": number, "round": 0});
        let first = create(definition, id.to_string(), "bench".into(), data, now).map_err(anyhow::Error::msg)?;
        let (definition, correlation) = (definition.clone(), id.to_string());
        let new = NewTask { id, definition, title: None, correlation, tags: Vec::new(), first, audit: None };
        store.task_create(new, now).await?;
        anyhow::Ok(id)
    });
    creations.buffer_unordered(CALLERS).try_collect().await
}

fn event(kind: &str, round: usize) -> Input {
    let (payload, at) = (json!({ "round": round }), Timestamp::now());
    Input::Event(Event {
        id: TaskId::new().to_string(),
        kind: kind.to_owned(),
        payload,
        actor: "bench".into(),
        decider: None,
        at,
    })
}

async fn send(store: &dyn Store, task: TaskId, kind: &str, round: usize) -> Result<()> {
    let inputs = vec![TaskInput { task, input: event(kind, round) }];
    let answers = store.task_apply(inputs, Timestamp::now()).await?;
    let answer = answers.into_iter().next().flatten().context("the task does not exist")?;
    ensure!(answer.outcome == Outcome::Applied && !answer.duplicate, "the event was not applied: {answer:?}");
    Ok(())
}

struct Measured {
    rate: f64,
    latency: Histogram<u64>,
}

impl Measured {
    fn ms(&self, quantile: f64) -> f64 {
        self.latency.value_at_quantile(quantile) as f64 / 1_000.0
    }
}

fn micros_since(instant: Instant) -> u64 {
    u64::try_from(instant.elapsed().as_micros()).unwrap_or(u64::MAX).max(1)
}

/// Sends events from callers that each wait for their answer.
async fn closed_loop(
    store: &Arc<dyn Store>,
    ids: &Arc<[TaskId]>,
    kind: &'static str,
    events: usize,
    callers: usize,
) -> Result<Measured> {
    let next = Arc::new(AtomicUsize::new(0));
    let started = Instant::now();
    let callers: Vec<_> = (0..callers)
        .map(|_| {
            let (store, ids, next) = (store.clone(), ids.clone(), next.clone());
            tokio::spawn(async move {
                let mut latency = Histogram::<u64>::new(3)?;
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= events {
                        return anyhow::Ok(latency);
                    }
                    let sent_at = Instant::now();
                    send(&*store, ids[number % ids.len()], kind, number).await?;
                    latency.record(micros_since(sent_at))?;
                }
            })
        })
        .collect();
    let mut latency = Histogram::<u64>::new(3)?;
    for caller in callers {
        latency.add(caller.await??)?;
    }
    Ok(Measured { rate: rate(events, started), latency })
}

/// Sends events at a fixed rate, whether or not the earlier ones are answered. The time counts from when an event was due.
async fn open_loop(store: &Arc<dyn Store>, ids: &Arc<[TaskId]>) -> Result<Measured> {
    const PER_TICK: usize = OFFERED_PER_SECOND / 1_000;
    let (results, mut received) = tokio::sync::mpsc::unbounded_channel();
    let (store, ids, runtime) = (store.clone(), ids.clone(), tokio::runtime::Handle::current());
    let started = Instant::now();
    // The timers of tokio are late by up to a millisecond, which would count as latency.
    let sender = tokio::task::spawn_blocking(move || {
        for tick in 0..OFFERED_SECONDS * 1_000 {
            let due = started + Duration::from_millis(tick as u64);
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            for number in tick * PER_TICK..(tick + 1) * PER_TICK {
                let (store, task, results) = (store.clone(), ids[number % ids.len()], results.clone());
                runtime.spawn(async move {
                    let sent = send(&*store, task, "go", number).await;
                    let _ = results.send(sent.map(|()| micros_since(due)));
                });
            }
        }
    });
    let mut latency = Histogram::<u64>::new(3)?;
    while let Some(sent) = received.recv().await {
        latency.record(sent?)?;
    }
    sender.await?;
    Ok(Measured { rate: rate(OFFERED_SECONDS * OFFERED_PER_SECOND, started), latency })
}

/// Sends events to a server process over kept-alive connections, one at a time per connection.
async fn over_http(scratch: &mut Scratch, definition: &Arc<Definition>) -> Result<f64> {
    let url = scratch.fresh().await?;
    let store = submit::open(&url).await?;
    let ids = fill(&*store, definition, TASKS).await?;
    store.close().await;
    let target = Target::faena(&url).await?;
    let sent = Arc::new(AtomicUsize::new(0));
    let started = Instant::now();
    let deadline = started + Duration::from_secs(HTTP_SECONDS);
    let callers: Vec<_> = ids
        .chunks(TASKS.div_ceil(HTTP_CONNECTIONS))
        .map(|ids| {
            let path = |id: &TaskId| format!("/api/v1/tasks/{id}/events");
            let body = r#"{"type":"go","payload":{"round":1}}"#;
            let requests: Vec<_> = ids.iter().map(|id| request(&path(id), body)).collect();
            let (sent, address) = (sent.clone(), target.address);
            tokio::spawn(async move {
                let mut connection = Connection::open(address).await?;
                for request in requests.iter().cycle() {
                    if Instant::now() >= deadline {
                        break;
                    }
                    connection.call(request).await?;
                    sent.fetch_add(1, Ordering::Relaxed);
                }
                anyhow::Ok(())
            })
        })
        .collect();
    for caller in callers {
        caller.await??;
    }
    Ok(sent.load(Ordering::Relaxed) as f64 / started.elapsed().as_secs_f64())
}

/// Measures the processor time of a server that has nothing to do, without tasks and with many that wait.
async fn idle(scratch: &mut Scratch, definition: &Arc<Definition>, report: &mut Report) -> Result<()> {
    let database = scratch.database_kind();
    report.step(&format!("{database}: {WAITING} waiting tasks"));
    let without = idle_cpu(&scratch.fresh().await?).await?;
    let url = scratch.fresh().await?;
    let store = submit::open(&url).await?;
    fill(&*store, definition, WAITING).await?;
    store.close().await;
    let with = idle_cpu(&url).await?;
    report.plain(database, "idle, no tasks, processor time per second", without, "ms");
    let what = format!("idle, {WAITING} waiting tasks with timers, processor time per second");
    report.at_most(database, &what, with, "ms", without + NOISE_MS);
    Ok(())
}

/// Returns the milliseconds of processor time per second that an idle server and its database sessions use.
async fn idle_cpu(url: &str) -> Result<f64> {
    let server = Server::start(url, &[])?;
    // By then, the server has started, recovered and read every task once.
    tokio::time::sleep(Duration::from_secs(5)).await;
    let processes = [vec![server.0.id()], sessions(url).await?].concat();
    let used = || processes.iter().map(|id| processor_ms(*id)).sum::<f64>();
    let (before, started) = (used(), Instant::now());
    tokio::time::sleep(Duration::from_secs(IDLE_SECONDS)).await;
    Ok((used() - before) / started.elapsed().as_secs_f64())
}

/// Returns the processes of the sessions of this database, if it is PostgreSQL.
async fn sessions(url: &str) -> Result<Vec<u32>> {
    if !url.starts_with("postgres") {
        return Ok(Vec::new());
    }
    let client = connect(url).await?;
    let sql = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
    let rows = client.query(sql, &[]).await?;
    Ok(rows.iter().filter_map(|row| u32::try_from(row.get::<_, i32>(0)).ok()).collect())
}

/// Returns the processor time of a process so far. 0 if it is not on this machine.
fn processor_ms(process: u32) -> f64 {
    /// Linux counts processor time in hundredths of a second.
    const TICK_MS: f64 = 10.0;
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // The name of the program, in brackets, may contain spaces.
    let fields = stat.rsplit(')').next().unwrap_or_default();
    let ticks = fields.split_whitespace().skip(11).take(2).filter_map(|field| field.parse::<f64>().ok());
    ticks.sum::<f64>() * TICK_MS
}
