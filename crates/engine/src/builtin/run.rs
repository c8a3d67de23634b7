//! Maps each built-in job type to its handler.

use std::time::Duration;

use faena_domain::{ErrorReason, Failure, Progress};
use serde::{Deserialize, de::DeserializeOwned};

use super::{Context, shell};

pub async fn run(context: &Context<'_>) -> Result<Option<String>, Failure> {
    match context.kind() {
        "noop" => Ok(None),
        "sleep" => sleep(context).await,
        "http.request" => context.worker.http.run(context).await,
        "shell.run" => shell::run(context, &context.worker.config).await,
        other => Err(Failure::fatal(format!("the built-in worker cannot run type \"{other}\""))
            .with_reason(ErrorReason::NoHandler)),
    }
}

/// Parses a payload. An invalid payload is a fatal failure: it stays invalid on a retry.
pub fn payload<T: DeserializeOwned>(context: &Context<'_>) -> Result<T, Failure> {
    serde_json::from_str(context.payload()).map_err(|e| Failure::fatal(format!("the payload is not valid: {e}")))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Sleep {
    ms: u64,
    /// Sleeps in this many steps and reports progress after each.
    #[serde(default)]
    steps: u32,
}

async fn sleep(context: &Context<'_>) -> Result<Option<String>, Failure> {
    let Sleep { ms, steps } = payload(context)?;
    if steps > 1_000 {
        return Err(Failure::fatal("the payload is not valid: steps must be at most 1000"));
    }
    if steps == 0 {
        tokio::time::sleep(Duration::from_millis(ms)).await;
        return Ok(None);
    }
    for step in 1..=steps {
        tokio::time::sleep(Duration::from_millis(ms / u64::from(steps))).await;
        context
            .progress(Progress {
                phase: Some("sleep".into()),
                completed_steps: Some(step),
                total_steps: Some(steps),
                percentage: Some(f64::from(step) * 100.0 / f64::from(steps)),
                message: Some(format!("step {step} of {steps}")),
                ..Progress::default()
            })
            .await;
    }
    Ok(None)
}
