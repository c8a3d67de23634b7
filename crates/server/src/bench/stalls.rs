//! Measures how long a small write waits while another client submits large batches or graphs, or cancels a large graph.
//!
//! A writer submits one job after the other. At the same time, the other client runs its case on the same store.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::Result;
use faena_domain::{JobId, NewJob, Timestamp};
use faena_store::{EventSubscription, Store, StoreOptions, SubscriptionMode};

use super::{report::Report, scratch::Scratch};

/// Goal for the 99th percentile of a small write.
const GOAL_MS: f64 = 250.0;
const BATCH: usize = 10_000;
/// Number of events that exist before the chain is submitted with events enabled.
const EVENTS: usize = 200_000;

pub async fn stalls(scratch: &mut Scratch, report: &mut Report) -> Result<()> {
    let database = scratch.database_kind();
    let large = "x".repeat(1_500);
    let cases: [(&str, bool, Case); 5] = [
        ("nothing else", false, Case::Nothing),
        ("20 000 dependencies in a batch", false, Case::Dependencies),
        ("8 batches of 15 MB", false, Case::Large(large)),
        ("cancelling a chain of 10 000", false, Case::CancelChain),
        ("a chain of 10 000, events on", true, Case::Chain),
    ];
    for (name, events, case) in cases {
        report.step(&format!("{database}: small writes and {name}"));
        let store = faena_store::open(&scratch.fresh().await?, StoreOptions::default()).await?;
        if events {
            watch_events(&*store).await?;
        }
        let waits = measure(store.clone(), case).await?;
        store.close().await;
        report.at_most(database, &format!("small write, p99, during {name}"), waits.p99_ms, "ms", GOAL_MS);
        report.plain(database, &format!("small write, longest, during {name}"), waits.longest_ms, "ms");
        report.plain(database, name, waits.case_ms, "ms");
    }
    Ok(())
}

enum Case {
    Nothing,
    Dependencies,
    Large(String),
    CancelChain,
    Chain,
}

struct Waits {
    p99_ms: f64,
    longest_ms: f64,
    case_ms: f64,
}

async fn measure(store: Arc<dyn Store>, case: Case) -> Result<Waits> {
    // Creates what the case needs before the measurement begins.
    let root = match case {
        Case::CancelChain => Some(submit_chain(&*store).await?),
        _ => None,
    };
    let stop = Arc::new(AtomicBool::new(false));
    let writer = tokio::spawn(write_small(store.clone(), stop.clone()));
    tokio::time::sleep(Duration::from_millis(300)).await;
    let began = Instant::now();
    act(&store, case, root).await?;
    let case_ms = began.elapsed().as_secs_f64() * 1_000.0;
    tokio::time::sleep(Duration::from_millis(300)).await;
    stop.store(true, Ordering::Relaxed);
    let mut waits = writer.await??;
    waits.sort_by(f64::total_cmp);
    let at = |part: f64| waits.get(((waits.len() - 1) as f64 * part) as usize).copied().unwrap_or(0.0);
    Ok(Waits { p99_ms: at(0.99), longest_ms: at(1.0), case_ms })
}

/// Submits one job after the other, and returns how long each took, in ms.
async fn write_small(store: Arc<dyn Store>, stop: Arc<AtomicBool>) -> Result<Vec<f64>> {
    let mut waits = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let began = Instant::now();
        store.job_submit(vec![NewJob::new("small")], None, Timestamp::now()).await?;
        waits.push(began.elapsed().as_secs_f64() * 1_000.0);
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    Ok(waits)
}

async fn act(store: &Arc<dyn Store>, case: Case, root: Option<JobId>) -> Result<()> {
    match case {
        Case::Nothing => tokio::time::sleep(Duration::from_secs(2)).await,
        Case::Dependencies => {
            let parents: Vec<NewJob> = (0..500).map(|_| NewJob::new("parent")).collect();
            let ids: Vec<JobId> = parents.iter().map(|job| job.id).collect();
            store.job_submit(parents, None, Timestamp::now()).await?;
            for _ in 0..10 {
                let children = (0..40).map(|_| child(&ids)).collect();
                store.job_submit(children, None, Timestamp::now()).await?;
            }
        }
        Case::Large(text) => {
            let payload = serde_json::to_string(&text)?;
            let batch = || (0..BATCH).map(|_| NewJob { payload: payload.clone(), ..NewJob::new("large") }).collect();
            let batches: Vec<Vec<NewJob>> = (0..8).map(|_| batch()).collect();
            let calls = batches.into_iter().map(|jobs| store.job_submit(jobs, None, Timestamp::now()));
            futures_util::future::try_join_all(calls).await?;
        }
        Case::CancelChain => {
            if let Some(root) = root {
                store.job_cancel(root, "bench", None, Timestamp::now()).await?;
                while store.job_promote(1_000, Timestamp::now()).await?.more {}
            }
        }
        Case::Chain => {
            submit_chain(&**store).await?;
        }
    }
    Ok(())
}

fn child(parents: &[JobId]) -> NewJob {
    let mut job = NewJob::new("child");
    job.options.depends_on = parents.to_vec();
    job
}

/// Submits a chain in one batch, and returns its first job.
async fn submit_chain(store: &dyn Store) -> Result<JobId> {
    let mut jobs: Vec<NewJob> = vec![NewJob::new("chain")];
    let root = jobs[0].id;
    while jobs.len() < BATCH {
        let parent = jobs[jobs.len() - 1].id;
        jobs.push(child(&[parent]));
    }
    store.job_submit(jobs, None, Timestamp::now()).await?;
    Ok(root)
}

/// Subscribes to all events, and records enough of them to make their tables large.
async fn watch_events(store: &dyn Store) -> Result<()> {
    let now = Timestamp::now();
    let subscription = EventSubscription {
        name: "bench".into(),
        types: vec!["*".into()],
        mode: SubscriptionMode::Keep,
        until: now.plus_ms(3_600_000),
    };
    store.event_subscribe(vec![subscription], now).await?;
    for _ in 0..EVENTS / 2_000 {
        let jobs = (0..1_000).map(|_| NewJob::new("before")).collect();
        store.job_submit(jobs, None, Timestamp::now()).await?;
    }
    Ok(())
}
