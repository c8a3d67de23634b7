//! `/health/live` and `/health/ready`: whether this process is alive, and whether it can process jobs.

use std::time::{Duration, Instant};

use axum::{Json, extract::State, http::StatusCode};
use faena_domain::Timestamp;
use faena_engine::{Engine, LoopStatus};
use faena_wire::{Checks, DatabaseCheck, Health, LoopCheck, Ready, WorkersCheck};
use serde_json::{Value, json};

use crate::Api;

const PING_TIMEOUT: Duration = Duration::from_secs(3);

/// Returns 200 as long as this process can answer.
pub async fn live() -> Json<Value> {
    Json(json!({"status": "ok"}))
}

/// Checks the database, the workers and the loops of this node.
///
/// Returns 503 if the database does not respond, or a loop is late or has stopped. A node without workers, or with a
/// loop whose last round failed, is degraded and returns 200.
pub async fn ready(State(api): State<Api>) -> (StatusCode, Json<Ready>) {
    let engine = &api.engine;
    let database = check_database(engine).await;
    let workers = check_workers(engine);
    let now = Timestamp::now();
    let loops = engine.loops.health.all().into_iter();
    let loops: Vec<LoopCheck> = loops.map(|(name, status)| check_loop(name.as_ref().into(), status, now)).collect();
    let all: Vec<Health> =
        [database.status, workers.status].into_iter().chain(loops.iter().map(|check| check.status)).collect();
    let status = if all.contains(&Health::Unhealthy) {
        Health::Unhealthy
    } else if all.contains(&Health::Degraded) {
        Health::Degraded
    } else {
        Health::Healthy
    };
    let code = if status == Health::Unhealthy { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK };
    (code, Json(Ready { status, checks: Checks { database, workers, loops } }))
}

async fn check_database(engine: &Engine) -> DatabaseCheck {
    let started = Instant::now();
    let error = match tokio::time::timeout(PING_TIMEOUT, engine.store.ping()).await {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some(error.to_string()),
        Err(_) => Some(format!("no response within {} s", PING_TIMEOUT.as_secs())),
    };
    DatabaseCheck {
        status: if error.is_none() { Health::Healthy } else { Health::Unhealthy },
        engine: engine.store.engine().into(),
        // Rounded to two decimals.
        latency_ms: (started.elapsed().as_secs_f64() * 100_000.0).round() / 100.0,
        error,
    }
}

fn check_workers(engine: &Engine) -> WorkersCheck {
    let active = usize::from(engine.config.roles.worker) + engine.workers.count();
    WorkersCheck {
        status: if active > 0 { Health::Healthy } else { Health::Degraded },
        active_count: active as u64,
        message: (active == 0).then(|| "this node has no built-in worker and no connected worker".into()),
    }
}

fn check_loop(name: String, loop_status: LoopStatus, now: Timestamp) -> LoopCheck {
    let status = if loop_status.is_late(now) {
        Health::Unhealthy
    } else if loop_status.failures > 0 {
        Health::Degraded
    } else {
        Health::Healthy
    };
    LoopCheck {
        name,
        status,
        last_beat_at: loop_status.last_at,
        handled: loop_status.handled,
        error: loop_status.last_error,
    }
}
