//! Measures the queue in Redis and, in the same run, the database's own queue for comparison.

use anyhow::{Context, Result};
use faena_engine::{EngineConfig, RedisQueueConfig};

use super::{drain, latency, report::Report, scratch::Scratch, submit};

pub async fn queue(scratch: &mut Scratch, redis: &str, jobs: usize, seconds: u64, report: &mut Report) -> Result<()> {
    let database = scratch.database_kind();
    let mut drained = Vec::new();
    for backend in ["store", "redis"] {
        eprintln!("{database}: drain, queue.backend = {backend}");
        let url = scratch.fresh().await?;
        submit::fill(&url, jobs).await?;
        let prefix = prefix();
        let environment = [("FAENA_QUEUE_BACKEND", backend), ("REDIS_URL", redis), ("QUEUE_PREFIX", prefix.as_str())];
        drained.push(drain::drain_with(scratch, &url, jobs, &environment).await?.rate);
    }
    report.plain(database, "drain, queue of the database", drained[0], "jobs/s");
    report.against(database, "drain, queue in Redis", drained[1], "jobs/s", drained[0], None);
    let mut flows = Vec::new();
    for backend in ["store", "redis"] {
        eprintln!("{database}: steady flow, {seconds} s, queue.backend = {backend}");
        flows.push(submit::steady_with(&scratch.fresh().await?, seconds, config(backend, redis)?).await?);
    }
    report.plain(database, "steady flow drained, queue of the database", flows[0].drained, "jobs/s");
    report.against(database, "steady flow drained, queue in Redis", flows[1].drained, "jobs/s", flows[0].drained, None);
    for (backend, name) in [("store", "queue of the database"), ("redis", "queue in Redis")] {
        eprintln!("{database}: latency, queue.backend = {backend}");
        let latency = latency::measure_with(&scratch.fresh().await?, config(backend, redis)?).await?;
        report.plain(database, &format!("accepted to started, p50, {name}"), latency.accepted_p50_ms, "ms");
        report.plain(database, &format!("accepted to started, p99, {name}"), latency.accepted_p99_ms, "ms");
    }
    Ok(())
}

fn config(backend: &str, redis: &str) -> Result<EngineConfig> {
    let address = redis.parse().context("--redis")?;
    let redis_queue = (backend == "redis").then(|| RedisQueueConfig { address, prefix: prefix(), fallback: false });
    Ok(EngineConfig { redis_queue, ..EngineConfig::default() })
}

/// Returns an unused prefix: each measurement begins without entries.
fn prefix() -> String {
    format!("faena-bench-{}", uuid::Uuid::new_v4().simple())
}
