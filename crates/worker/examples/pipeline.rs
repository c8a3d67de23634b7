//! Nine durable steps, E1 to E9, and a crash in one of them.
//!
//!     faena serve                                                     # in another terminal
//!     faena enqueue pipeline
//!     CRASH_AT=E5 cargo run -p faena --example pipeline               # crashes in E5; E1 to E4 are stored
//!     cargo run -p faena --example pipeline                           # continues with E5
//!
//! Each step takes `STEP_MS` milliseconds (default: 100).

use std::time::Duration;

use faena::{Context, Error, JobError, Worker};
use serde_json::{Value, json};

const STEPS: [&str; 9] = ["E1", "E2", "E3", "E4", "E5", "E6", "E7", "E8", "E9"];

#[tokio::main]
async fn main() -> Result<(), Error> {
    tracing_subscriber::fmt().init();
    Worker::new().name("pipeline").concurrency(4).handle("pipeline", pipeline).run().await
}

async fn pipeline(job: Context, _: Value) -> Result<Value, JobError> {
    job.set_total_steps(9);
    let mut done_here = Vec::new();
    let mut sum = 0;
    for (name, number) in STEPS.into_iter().zip(1..) {
        let work = || {
            done_here.push(name);
            do_step(name, number)
        };
        sum += job.step(name, work).await?;
    }
    Ok(json!({ "sum": sum, "doneInLastRun": done_here, "retryCount": job.retry_count() }))
}

async fn do_step(name: &str, number: u64) -> Result<u64, JobError> {
    if std::env::var("CRASH_AT").is_ok_and(|at| at == name) {
        tracing::error!(name, "crashing on request");
        std::process::abort();
    }
    let step_ms = std::env::var("STEP_MS").ok().and_then(|text| text.parse().ok()).unwrap_or(100);
    tokio::time::sleep(Duration::from_millis(step_ms)).await;
    tracing::info!(name, "step completed");
    Ok(number)
}
