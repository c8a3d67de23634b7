//! `faena bench`: measures Faena and a baseline in one run.
//!
//! The baseline is a bare loop over similar tables without Faena: the best that the database can deliver. Ratios to the
//! baseline are comparable between machines; jobs per second are not.

mod attacks;
mod connections;
mod drain;
mod history;
mod http_load;
mod latency;
mod baseline_postgres;
mod baseline_sqlite;
mod limits;
mod outbox;
mod queue;
mod report;
mod schedules;
mod scratch;
mod stalls;
mod submit;
mod tasks;
mod tasks_baseline;
mod workers;

use std::path::PathBuf;

use anyhow::{Context, Result};
use report::Report;
use scratch::Scratch;

#[derive(clap::Args)]
pub struct Arguments {
    /// PostgreSQL server for a scratch database, such as postgres://user:password@127.0.0.1/postgres
    #[arg(long, value_name = "URL")]
    postgres: Option<String>,
    /// Skip SQLite
    #[arg(long)]
    no_sqlite: bool,
    /// Folder for the SQLite scratch file [default: the system's temporary folder]
    #[arg(long, value_name = "FOLDER")]
    folder: Option<PathBuf>,
    /// Jobs to submit and drain
    #[arg(long, default_value_t = 300_000, value_name = "N")]
    jobs: usize,
    /// Duration of the steady-flow measurement, and of each attack
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    seconds: u64,
    /// Measure only the drain with 1 million waiting and 10 million finished jobs
    #[arg(long)]
    history: bool,
    /// Finished jobs for --history
    #[arg(long, default_value_t = 10_000_000, value_name = "N", requires = "history")]
    finished: usize,
    /// Measure only the drain on PostgreSQL while another session holds an old snapshot
    #[arg(long)]
    held_snapshot: bool,
    /// Measure only remote workers: drain through each transport, memory per worker
    #[arg(long)]
    workers: bool,
    /// Measure only the drain with and without limits
    #[arg(long)]
    limits: bool,
    /// Measure only 100 000 schedules that are due at the same time
    #[arg(long)]
    schedules: bool,
    /// Measure only API keys, 10 000 idle and 1 000 busy connections, and a flooding client
    #[arg(long)]
    connections: bool,
    /// Measure only a well-behaved client and the memory of the server while hostile clients attack it
    #[arg(long)]
    attacks: bool,
    /// Hostile connections for --attacks
    #[arg(long, default_value_t = 1_000, value_name = "N", requires = "attacks")]
    clients: usize,
    /// Measure only how long small writes wait while another client submits large batches or cancels a large graph
    #[arg(long)]
    stalls: bool,
    /// Measure only tasks: events applied, their latency, and 100 000 waiting tasks
    #[arg(long, group = "with_events")]
    tasks: bool,
    /// Measure only the outbox relay to RabbitMQ
    #[arg(long, group = "with_events")]
    outbox: bool,
    /// RabbitMQ server for --outbox, such as amqp://guest:guest@127.0.0.1:5672/%2f [default: FAENA_TEST_RABBITMQ]
    #[arg(long, value_name = "URL")]
    broker: Option<String>,
    /// Measure only the queue in Redis, compared with that of the database
    #[arg(long, value_name = "BACKEND", value_parser = ["redis"])]
    queue: Option<String>,
    /// Redis server for --queue, such as redis://127.0.0.1:6379; the keys it creates begin with faena-bench- [default: FAENA_TEST_REDIS]
    #[arg(long, value_name = "URL")]
    redis: Option<String>,
    /// Events for --outbox and --tasks
    #[arg(long, default_value_t = 100_000, value_name = "N", requires = "with_events")]
    events: usize,
    #[arg(long, hide = true, value_name = "PORT")]
    bare_server: Option<u16>,
    /// Write the results to this file as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

pub async fn run(arguments: Arguments) -> Result<()> {
    if let Some(port) = arguments.bare_server {
        return http_load::serve_bare(port).await;
    }
    let mut report = Report::new();
    let mut scratches = Vec::new();
    if !arguments.no_sqlite && !arguments.held_snapshot {
        scratches.push(Scratch::sqlite(arguments.folder.as_deref())?);
    }
    match &arguments.postgres {
        Some(url) => scratches.push(Scratch::postgres(url).await?),
        None if arguments.held_snapshot => anyhow::bail!("--held-snapshot needs --postgres URL"),
        None => eprintln!("skipping PostgreSQL; pass --postgres URL to measure it"),
    }
    for scratch in &mut scratches {
        let result = if arguments.held_snapshot {
            history::held_snapshot(scratch, &mut report).await
        } else if arguments.workers {
            workers::workers(scratch, &mut report).await
        } else if arguments.limits {
            limits::limits(scratch, arguments.jobs, &mut report).await
        } else if arguments.schedules {
            schedules::schedules(scratch, &mut report).await
        } else if arguments.connections {
            connections::connections(scratch, &mut report).await
        } else if arguments.attacks {
            attacks::attacks(scratch, arguments.clients, arguments.seconds, &mut report).await
        } else if arguments.stalls {
            stalls::stalls(scratch, &mut report).await
        } else if arguments.tasks {
            tasks::tasks(scratch, arguments.events, &mut report).await
        } else if arguments.outbox {
            outbox::outbox(scratch, &broker(&arguments)?, arguments.events, &mut report).await
        } else if arguments.queue.is_some() {
            queue::queue(scratch, &redis(&arguments)?, arguments.jobs, arguments.seconds, &mut report).await
        } else if arguments.history {
            history::history(scratch, arguments.jobs, arguments.finished, &mut report).await
        } else {
            all(scratch, &arguments, &mut report).await
        };
        // Removes the scratch database even if the measurement failed.
        scratch.remove().await?;
        result?;
    }
    report.print();
    if let Some(path) = &arguments.json {
        std::fs::write(path, report.json())?;
    }
    Ok(())
}

/// Reads the variable here, because clap would show its value, which may contain a password, in `--help`.
fn broker(arguments: &Arguments) -> Result<String> {
    let from_environment = || std::env::var("FAENA_TEST_RABBITMQ").ok();
    arguments.broker.clone().or_else(from_environment).context("--outbox needs --broker URL")
}

/// Reads the variable here, for the same reason as `broker`.
fn redis(arguments: &Arguments) -> Result<String> {
    let from_environment = || std::env::var("FAENA_TEST_REDIS").ok();
    arguments.redis.clone().or_else(from_environment).context("--queue redis needs --redis URL")
}

async fn all(scratch: &mut Scratch, arguments: &Arguments, report: &mut Report) -> Result<()> {
    let database = scratch.database_kind();
    let jobs = arguments.jobs;
    report.step(&format!("{database}: the baseline"));
    let baseline = match scratch {
        Scratch::Sqlite { .. } => baseline_sqlite::run(&scratch.baseline_url(), jobs)?,
        Scratch::Postgres { .. } => baseline_postgres::run(&scratch.baseline_url(), jobs).await?,
    };
    report.plain(database, "baseline: insert", baseline.insert, "jobs/s");
    report.plain(database, "baseline: drain", baseline.drain, "jobs/s");

    report.step(&format!("{database}: bulk submit"));
    let bulk = submit::bulk(&scratch.fresh().await?, jobs).await?;
    report.against(database, "bulk submit, 2 x 1000", bulk, "jobs/s", baseline.insert, Some(0.5));
    let over_http = submit::bulk_http(&scratch.fresh().await?, jobs / 3).await?;
    report.against(database, "bulk submit over HTTP, 2 x 1000", over_http, "jobs/s", baseline.insert, None);

    report.step(&format!("{database}: drain"));
    let url = scratch.fresh().await?;
    submit::fill(&url, jobs).await?;
    let drained = drain::drain(scratch, &url, jobs).await?;
    report.against(database, "drain, no-op, history kept", drained.rate, "jobs/s", baseline.drain, Some(0.5));
    report.at_most(database, "memory after the drain", drained.resident_mib, "MiB", 64.0);
    report.plain(database, "written per job, drain", drained.bytes_per_job, "bytes");

    report.step(&format!("{database}: steady flow, {} s", arguments.seconds));
    let flow = submit::steady(&scratch.fresh().await?, arguments.seconds).await?;
    report.plain(database, "steady flow: submitted", flow.submitted, "jobs/s");
    report.plain(database, "steady flow: drained", flow.drained, "jobs/s");

    report.step(&format!("{database}: single submits over HTTP"));
    for connections in [1, 16, 64] {
        let bare = http_load::bare(connections).await?;
        report.plain(database, &format!("bare 201 server, {connections} connections"), bare, "requests/s");
        let faena = http_load::faena(&scratch.fresh().await?, connections).await?;
        let goal = (connections == 64).then_some(0.3);
        report.against(
            database,
            &format!("POST /api/v1/jobs, {connections} connections"),
            faena,
            "requests/s",
            bare,
            goal,
        );
    }

    report.step(&format!("{database}: latency"));
    let latency = latency::measure(&scratch.fresh().await?).await?;
    let goal_ms = if database == "sqlite" { 1.5 } else { 3.0 };
    report.at_most(database, "accepted to started, p50", latency.accepted_p50_ms, "ms", goal_ms);
    report.plain(database, "accepted to started, p99", latency.accepted_p99_ms, "ms");
    report.plain(database, "sent to started, p50", latency.sent_p50_ms, "ms");
    report.plain(database, "sent to started, p99", latency.sent_p99_ms, "ms");
    Ok(())
}
