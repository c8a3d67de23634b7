//! Measures the time from submission to the start of the handler on an idle queue.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use faena_domain::{JobState, NewJob, Timestamp};
use faena_engine::{Engine, EngineConfig};
use hdrhistogram::Histogram;

use super::{baseline_sqlite::PAYLOAD, submit};

/// Time until a job starts, since its submission was sent and since the server accepted it.
pub struct Latency {
    pub accepted_p50_ms: f64,
    pub accepted_p99_ms: f64,
    pub sent_p50_ms: f64,
    pub sent_p99_ms: f64,
}

const JOBS: usize = 1_000;

pub async fn measure(url: &str) -> Result<Latency> {
    measure_with(url, EngineConfig::default()).await
}

pub async fn measure_with(url: &str, config: EngineConfig) -> Result<Latency> {
    let store = submit::open(url).await?;
    let engine = Engine::start(store.clone(), config).await?;
    let mut accepted = Histogram::<u64>::new(3)?;
    let mut sent = Histogram::<u64>::new(3)?;
    for n in 0..JOBS + 100 {
        let mut events = engine.bus.subscribe();
        let job = NewJob { payload: PAYLOAD.into(), ..NewJob::new("noop") };
        let id = job.id;
        let (submitted, started) = tokio::join!(
            async {
                let sent_at = Instant::now();
                engine.submit(vec![job], "bench", Timestamp::now()).await.map(|_| (sent_at, Instant::now()))
            },
            async {
                loop {
                    match events.recv().await {
                        Ok(event) if event.job_id == id && event.status == JobState::Processing => {
                            break Some(Instant::now());
                        }
                        Ok(_) => {}
                        Err(_) => break None,
                    }
                }
            }
        );
        let (sent_at, accepted_at) = submitted?;
        let started = started.context("the job did not start")?;
        // The first jobs warm up the connections.
        if n >= 100 {
            let micros = |since: Instant| {
                u64::try_from(started.saturating_duration_since(since).as_micros()).unwrap_or(u64::MAX)
            };
            accepted.record(micros(accepted_at).max(1))?;
            sent.record(micros(sent_at).max(1))?;
        }
        // Waits until the server is idle again.
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
    engine.stop(tokio_util::sync::CancellationToken::new()).await;
    store.close().await;
    let ms = |histogram: &Histogram<u64>, quantile: f64| histogram.value_at_quantile(quantile) as f64 / 1_000.0;
    Ok(Latency {
        accepted_p50_ms: ms(&accepted, 0.5),
        accepted_p99_ms: ms(&accepted, 0.99),
        sent_p50_ms: ms(&sent, 0.5),
        sent_p99_ms: ms(&sent, 0.99),
    })
}
