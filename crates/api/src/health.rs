//! Whether this process lives, and whether it can work.

use std::time::{Duration, Instant};

use axum::{Json, extract::State, http::StatusCode};
use faena_domain::Timestamp;
use faena_wire::{Checks, DatabaseCheck, Health, LoopCheck, Ready, WorkersCheck};
use serde_json::{Value, json};

use crate::Api;

pub async fn live() -> Json<Value> {
    Json(json!({"status": "ok"}))
}

pub async fn ready(State(api): State<Api>) -> (StatusCode, Json<Ready>) {
    let engine = &api.engine;
    let started = Instant::now();
    let ping = tokio::time::timeout(Duration::from_secs(3), engine.store.ping()).await;
    let error = match ping {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some(error.to_string()),
        Err(_) => Some("did not answer within 3 s".into()),
    };
    let database = DatabaseCheck {
        status: if error.is_none() { Health::Healthy } else { Health::Unhealthy },
        engine: engine.store.engine().into(),
        latency_ms: (started.elapsed().as_secs_f64() * 100_000.0).round() / 100.0,
        error,
    };
    let active = usize::from(engine.config.roles.worker) + engine.workers.count();
    let workers = WorkersCheck {
        status: if active > 0 { Health::Healthy } else { Health::Degraded },
        active_count: active as u64,
        message: (active == 0).then(|| "this process runs no worker, and none is connected to it".into()),
    };
    let now = Timestamp::now();
    let loops: Vec<LoopCheck> = engine
        .beats
        .all()
        .into_iter()
        .map(|(name, beat)| {
            let status = if beat.is_late(now) {
                Health::Unhealthy
            } else if beat.failures > 0 {
                Health::Degraded
            } else {
                Health::Healthy
            };
            LoopCheck {
                name: name.as_ref().into(),
                status,
                last_beat_at: beat.last_at,
                handled: beat.handled,
                error: beat.last_error,
            }
        })
        .collect();
    let all: Vec<Health> =
        [database.status, workers.status].into_iter().chain(loops.iter().map(|l| l.status)).collect();
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
