//! `/health/live` and `/health/ready` (also `/health`): whether this process is alive, and whether it can process jobs.

use std::time::{Duration, Instant};

use axum::{Json, extract::State, http::StatusCode};
use faena_domain::{Timestamp, WorkerState};
use faena_engine::{Engine, LoopStatus};
use faena_store::{InputKind, InputState, InputView};
use faena_wire::{Alive, Checks, DatabaseCheck, Health, InputCheck, LoopCheck, Ready, RedisCheck, WorkersCheck};

use crate::Api;

const PING_TIMEOUT: Duration = Duration::from_secs(3);
/// States in which a worker takes jobs.
const WORKING: [WorkerState; 2] = [WorkerState::Ready, WorkerState::Busy];

/// Returns 200 as long as this process can answer.
pub async fn live() -> Json<Alive> {
    Json(Alive { status: "ok".into() })
}

/// Checks the database, the queue in Redis, the workers of all nodes, and the loops, sources, inboxes and sinks of this
/// node.
///
/// Returns 503 if the database does not respond, if Redis does not respond and there is no fallback, or if a loop is
/// late or has stopped. A cluster without workers, a Redis outage with a fallback, a source, inbox or sink that is
/// down, and a loop whose last round failed are degraded and return 200.
pub async fn ready(State(api): State<Api>) -> (StatusCode, Json<Ready>) {
    let engine = &api.engine;
    let database = check_database(engine).await;
    let redis = check_redis(engine).await;
    let workers = check_workers(engine).await;
    let inputs: Vec<InputCheck> = engine.input_views().into_iter().map(check_input).collect();
    let sinks: Vec<InputCheck> = engine.sink_outages().into_iter().map(check_sink).collect();
    let now = Timestamp::now();
    let loops = engine.loops.health.all().into_iter();
    let loops: Vec<LoopCheck> = loops.map(|(name, status)| check_loop(name.as_ref().into(), status, now)).collect();
    let all = [database.status, workers.status].into_iter().chain(loops.iter().map(|check| check.status));
    let all = all.chain(redis.iter().map(|check| check.status));
    let all: Vec<Health> = all.chain(inputs.iter().chain(&sinks).map(|check| check.status)).collect();
    let status = if all.contains(&Health::Unhealthy) {
        Health::Unhealthy
    } else if all.contains(&Health::Degraded) {
        Health::Degraded
    } else {
        Health::Healthy
    };
    let code = if status == Health::Unhealthy { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK };
    (code, Json(Ready { status, checks: Checks { database, redis, workers, loops, inputs, sinks } }))
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
        engine: engine.store.database_kind().into(),
        // Rounded to two decimals.
        latency_ms: (started.elapsed().as_secs_f64() * 100_000.0).round() / 100.0,
        error,
        signal_problem: engine.store.signal_problem(),
    }
}

/// Checks the queue in Redis. An outage without a fallback is unhealthy, because no job can start.
async fn check_redis(engine: &Engine) -> Option<RedisCheck> {
    let status = engine.queue.status()?;
    let started = Instant::now();
    let error = match tokio::time::timeout(PING_TIMEOUT, engine.queue.ping()).await {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some(error.to_string()),
        Err(_) => Some(format!("no response within {} s", PING_TIMEOUT.as_secs())),
    };
    Some(RedisCheck {
        status: match &error {
            None => Health::Healthy,
            Some(_) if status.fallback => Health::Degraded,
            Some(_) => Health::Unhealthy,
        },
        latency_ms: (started.elapsed().as_secs_f64() * 100_000.0).round() / 100.0,
        error,
    })
}

/// Counts the workers of all nodes. While the database does not respond, only those of this node are known.
async fn check_workers(engine: &Engine) -> WorkersCheck {
    let active = match tokio::time::timeout(PING_TIMEOUT, engine.store.worker_total(WORKING.to_vec())).await {
        Ok(Ok(count)) => count,
        _ => (usize::from(engine.config.roles.worker) + engine.workers.count()) as u64,
    };
    WorkersCheck {
        status: if active > 0 { Health::Healthy } else { Health::Degraded },
        active_count: active,
        message: (active == 0).then(|| "no node has a built-in worker or a connected worker that takes jobs".into()),
    }
}

fn check_input(input: InputView) -> InputCheck {
    let prefix = match input.kind {
        InputKind::Source => "source",
        InputKind::Inbox => "inbox",
    };
    InputCheck {
        name: format!("{prefix}:{}", input.name),
        status: if input.state == InputState::Up { Health::Healthy } else { Health::Degraded },
        down_since: input.down_since,
        error: input.down_reason,
    }
}

fn check_sink((name, outage): (String, Option<(Timestamp, String)>)) -> InputCheck {
    let (down_since, error) = outage.unzip();
    let status = if down_since.is_none() { Health::Healthy } else { Health::Degraded };
    InputCheck { name: format!("sink:{name}"), status, down_since, error }
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
