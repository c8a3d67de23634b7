//! Measures bulk submits, and submits while the built-in worker runs jobs.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::Result;
use faena_domain::{NewJob, Timestamp};
use faena_engine::{Engine, EngineConfig};
use faena_store::{Store, StoreOptions, Tally};

use super::{
    baseline_sqlite::{PAYLOAD, rate},
    http_load,
};

const BATCH: usize = 1_000;

fn batch(count: usize, kind: &str) -> Vec<NewJob> {
    (0..count).map(|_| NewJob { payload: PAYLOAD.into(), ..NewJob::new(kind) }).collect()
}

pub async fn open(url: &str) -> Result<Arc<dyn Store>> {
    Ok(faena_store::open(url, StoreOptions::default()).await?)
}

/// Submits from two callers in batches of 1 000. Returns the jobs per second.
pub async fn bulk(url: &str, jobs: usize) -> Result<f64> {
    bulk_with_type(url, jobs, "noop").await
}

async fn bulk_with_type(url: &str, jobs: usize, kind: &'static str) -> Result<f64> {
    let store = open(url).await?;
    let remaining = Arc::new(AtomicUsize::new(jobs.div_ceil(BATCH)));
    let started = Instant::now();
    let callers = (0..2).map(|_| {
        let (store, remaining) = (store.clone(), remaining.clone());
        tokio::spawn(async move {
            while remaining.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1)).is_ok() {
                store.job_submit(batch(BATCH, kind), None, Timestamp::now()).await?;
            }
            anyhow::Ok(())
        })
    });
    for caller in callers.collect::<Vec<_>>() {
        caller.await??;
    }
    let rate = rate(jobs, started);
    store.close().await;
    Ok(rate)
}

pub async fn fill(url: &str, jobs: usize) -> Result<()> {
    bulk(url, jobs).await.map(|_| ())
}

/// Submits jobs of the given type.
pub async fn fill_with_type(url: &str, jobs: usize, kind: &'static str) -> Result<()> {
    bulk_with_type(url, jobs, kind).await.map(|_| ())
}

/// Submits jobs with concurrency keys.
pub async fn fill_keyed(url: &str, jobs: usize, kind: &str, key: impl Fn(usize) -> String) -> Result<()> {
    let store = open(url).await?;
    for first in (0..jobs).step_by(BATCH) {
        let mut part = batch(BATCH.min(jobs - first), "noop");
        for (n, job) in part.iter_mut().enumerate() {
            job.kind = kind.to_owned();
            job.options.concurrency_key = Some(key(first + n));
        }
        store.job_submit(part, None, Timestamp::now()).await?;
    }
    store.close().await;
    Ok(())
}

/// Submits in bulk over HTTP. Returns the jobs per second.
pub async fn bulk_http(url: &str, jobs: usize) -> Result<f64> {
    let server = http_load::Target::faena(url).await?;
    let job = format!(r#"{{"name":"noop","payload":{PAYLOAD}}}"#);
    let body = format!(r#"{{"jobs":[{}]}}"#, vec![job; BATCH].join(","));
    let requests = jobs.div_ceil(BATCH);
    let took = http_load::load(server.address, 2, requests, "/api/v1/jobs/batch", &body).await?;
    Ok((requests * BATCH) as f64 / took.as_secs_f64())
}

pub struct Flow {
    pub submitted: f64,
    pub drained: f64,
}

/// Submits as fast as the store accepts while the worker drains, for `seconds`.
pub async fn steady(url: &str, seconds: u64) -> Result<Flow> {
    steady_with(url, seconds, EngineConfig::default()).await
}

pub async fn steady_with(url: &str, seconds: u64, config: EngineConfig) -> Result<Flow> {
    let store = open(url).await?;
    let engine = Engine::start(store.clone(), config).await?;
    let stop = Arc::new(AtomicBool::new(false));
    let submitted = Arc::new(AtomicUsize::new(0));
    let callers: Vec<_> = (0..2)
        .map(|_| {
            let (store, stop, submitted) = (store.clone(), stop.clone(), submitted.clone());
            tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    store.job_submit(batch(BATCH, "noop"), None, Timestamp::now()).await?;
                    submitted.fetch_add(BATCH, Ordering::Relaxed);
                }
                anyhow::Ok(())
            })
        })
        .collect();
    let started = Instant::now();
    tokio::time::sleep(Duration::from_secs(seconds)).await;
    let drained = store.counts().await?.total(Tally::Completed);
    let took = started.elapsed().as_secs_f64();
    let count = submitted.load(Ordering::Relaxed);
    stop.store(true, Ordering::Relaxed);
    for caller in callers {
        caller.await??;
    }
    engine.stop(tokio_util::sync::CancellationToken::new()).await;
    store.close().await;
    Ok(Flow { submitted: count as f64 / took, drained: drained as f64 / took })
}
