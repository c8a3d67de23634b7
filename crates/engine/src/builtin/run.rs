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
        "llm.chat" => context.worker.llm.run(context).await,
        shell::KIND if context.worker.config.is_shell_allowed => shell::run(context, &context.worker.config).await,
        other => Err(Failure::fatal(format!("the built-in worker cannot run type \"{other}\""))
            .with_reason(ErrorReason::NoHandler)),
    }
}

/// Parses a payload. An invalid payload is a fatal failure: it stays invalid on a retry.
///
/// `expected`: a payload with every field, for the error.
pub fn payload<T: DeserializeOwned>(context: &Context<'_>, expected: &str) -> Result<T, Failure> {
    serde_json::from_str(context.payload()).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        Failure::fatal(format!("the payload is not valid at line {line}, column {column}; write it like {expected}"))
    })
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
    let Sleep { ms, steps } = payload(context, r#"{"ms": 500, "steps": 5}"#)?;
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
                percentage: Progress::percentage_of(step, steps),
                message: Some(format!("step {step} of {steps}")),
                ..Progress::default()
            })
            .await;
    }
    Ok(None)
}
