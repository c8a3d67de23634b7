//! `faena bench`: measures Faena and the limit of this machine in one run.
//!
//! The limit is a bare loop over similar tables without Faena: the best the database can deliver. Ratios to the limit are
//! comparable between machines; jobs per second are not.

mod drain;
mod history;
mod http_load;
mod latency;
mod limit_postgres;
mod limit_sqlite;
mod limits;
mod outbox;
mod report;
mod schedules;
mod scratch;
mod submit;
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
    /// Duration of the steady-flow measurement
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
    /// Measure only the outbox relay to RabbitMQ
    #[arg(long)]
    outbox: bool,
    /// RabbitMQ server for --outbox, such as amqp://guest:guest@127.0.0.1:5672/%2f [default: FAENA_TEST_RABBITMQ]
    #[arg(long, value_name = "URL")]
    broker: Option<String>,
    /// Events for --outbox
    #[arg(long, default_value_t = 100_000, value_name = "N", requires = "outbox")]
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
        } else if arguments.outbox {
            outbox::outbox(scratch, &broker(&arguments)?, arguments.events, &mut report).await
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

async fn all(scratch: &mut Scratch, arguments: &Arguments, report: &mut Report) -> Result<()> {
    let engine = scratch.engine();
    let jobs = arguments.jobs;
    eprintln!("{engine}: the limit");
    let limit = match scratch {
        Scratch::Sqlite { .. } => limit_sqlite::run(&scratch.limit_url(), jobs)?,
        Scratch::Postgres { .. } => limit_postgres::run(&scratch.limit_url(), jobs).await?,
    };
    report.plain(engine, "limit: insert", limit.insert, "jobs/s");
    report.plain(engine, "limit: drain", limit.drain, "jobs/s");

    eprintln!("{engine}: bulk submit");
    let bulk = submit::bulk(&scratch.fresh().await?, jobs).await?;
    report.against(engine, "bulk submit, 2 x 1000", bulk, "jobs/s", limit.insert, Some(0.5));
    let over_http = submit::bulk_http(&scratch.fresh().await?, jobs / 3).await?;
    report.against(engine, "bulk submit over HTTP, 2 x 1000", over_http, "jobs/s", limit.insert, None);

    eprintln!("{engine}: drain");
    let url = scratch.fresh().await?;
    submit::fill(&url, jobs).await?;
    let drained = drain::drain(scratch, &url, jobs).await?;
    report.against(engine, "drain, no-op, history kept", drained.rate, "jobs/s", limit.drain, Some(0.5));
    report.at_most(engine, "memory after the drain", drained.resident_mib, "MiB", 64.0);
    report.plain(engine, "written per job, drain", drained.bytes_per_job, "bytes");

    eprintln!("{engine}: steady flow, {} s", arguments.seconds);
    let flow = submit::steady(&scratch.fresh().await?, arguments.seconds).await?;
    report.plain(engine, "steady flow: submitted", flow.submitted, "jobs/s");
    report.plain(engine, "steady flow: drained", flow.drained, "jobs/s");

    eprintln!("{engine}: single submits over HTTP");
    for connections in [1, 16, 64] {
        let bare = http_load::bare(connections).await?;
        report.plain(engine, &format!("bare 201 server, {connections} connections"), bare, "requests/s");
        let faena = http_load::faena(&scratch.fresh().await?, connections).await?;
        let goal = (connections == 64).then_some(0.3);
        report.against(
            engine,
            &format!("POST /api/v1/jobs, {connections} connections"),
            faena,
            "requests/s",
            bare,
            goal,
        );
    }

    eprintln!("{engine}: latency");
    let latency = latency::measure(&scratch.fresh().await?).await?;
    let goal_ms = if engine == "sqlite" { 1.5 } else { 3.0 };
    report.at_most(engine, "accepted to started, p50", latency.accepted_p50_ms, "ms", goal_ms);
    report.plain(engine, "accepted to started, p99", latency.accepted_p99_ms, "ms");
    report.plain(engine, "sent to started, p50", latency.sent_p50_ms, "ms");
    report.plain(engine, "sent to started, p99", latency.sent_p99_ms, "ms");
    Ok(())
}
