//! HTTP, WebSocket and gRPC: decodes requests, calls the engine, encodes responses. The router is the table of contents.

mod context;
mod error;
mod grpc;
mod guard;
mod health;
mod metrics;
mod request;
mod rest;
mod watch;
mod workers;

use std::sync::Arc;

use axum::{
    Router,
    routing::{get, post},
};
use faena_domain::{JobView, parse::JobParser};
use faena_engine::Engine;
use tokio_util::sync::CancellationToken;

pub use error::{ApiError, ApiResult};
pub use metrics::{METRICS, Metric, MetricKind};

/// State of the handlers. One reference, because it is cloned several times per request.
#[derive(Clone)]
pub struct Api(Arc<Parts>);

/// Parts of [`Api`].
pub struct Parts {
    pub engine: Arc<Engine>,
    /// Whether only programs on this machine may call, so that the `Host` of a request must be this machine.
    pub loopback_only: bool,
    /// Cancelled when the server stops; ends all streams.
    pub closing: CancellationToken,
}

impl Api {
    pub fn new(parts: Parts) -> Api {
        Api(Arc::new(parts))
    }
}

impl Parts {
    pub(crate) fn parser(&self) -> &JobParser {
        &self.engine.job_parser
    }

    /// Fills in the default timeout of a job that has none of its own.
    pub fn shown(&self, mut job: JobView) -> JobView {
        let default_ms = u64::try_from(self.engine.config.processing_timeout.as_millis()).unwrap_or(u64::MAX);
        job.timeout_ms.get_or_insert(default_ms);
        job
    }
}

impl std::ops::Deref for Api {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.0
    }
}

/// Builds the routes of HTTP, WebSocket and gRPC.
pub fn router(api: Api) -> Router {
    let jobs = Router::new()
        .route("/", post(rest::jobs::create).get(rest::list::list))
        .route("/batch", post(rest::jobs::create_batch))
        .route("/bulk/{action}", post(rest::bulk::jobs))
        .route("/{id}", get(rest::jobs::show).patch(rest::patch::patch).delete(rest::jobs::delete))
        .route("/{id}/why", get(rest::jobs::why))
        .route("/{id}/cancel", post(rest::jobs::cancel))
        .route("/{id}/retry", post(rest::jobs::retry))
        .route("/{id}/events", get(rest::events::events));
    let workers = Router::new()
        .route("/", get(workers::records::list))
        .route("/connect", get(workers::websocket::connect))
        .route("/register", post(workers::http::register))
        .route("/{id}", get(workers::records::show).delete(workers::http::leave))
        .route("/{id}/drain", post(workers::records::drain).delete(workers::records::resume))
        .route("/{id}/claim", post(workers::http::claim))
        .route("/{id}/heartbeat", post(workers::http::heartbeat))
        .route("/{id}/jobs/{job}/{report}", post(workers::http::report));
    let webhooks = Router::new()
        .route("/", get(rest::webhooks::list))
        .route("/{id}", get(rest::webhooks::show))
        .route("/{id}/redeliver", post(rest::webhooks::redeliver));
    let dead_letters = Router::new()
        .route("/", get(rest::dead_letters::list))
        .route("/stats", get(rest::dead_letters::stats))
        .route("/bulk/{action}", post(rest::bulk::dead_letters))
        .route("/{id}", get(rest::dead_letters::show).delete(rest::dead_letters::delete))
        .route("/{id}/retry", post(rest::dead_letters::retry));
    let outbox = Router::new()
        .route("/", get(rest::outbox::sinks))
        .route("/dead", get(rest::outbox::dead))
        .route("/dead/replay", post(rest::outbox::replay_many))
        .route("/dead/resolve", post(rest::outbox::resolve_many))
        .route("/dead/{id}", get(rest::outbox::show))
        .route("/dead/{id}/replay", post(rest::outbox::replay))
        .route("/dead/{id}/resolve", post(rest::outbox::resolve))
        .route("/republish", post(rest::outbox::republish));
    let queues = Router::new()
        .route("/", get(rest::queues::list))
        .route("/{name}", get(rest::queues::show).patch(rest::queues::patch))
        .route("/{name}/pause", post(rest::queues::pause))
        .route("/{name}/resume", post(rest::queues::resume));
    let bulk = Router::new()
        .route("/", get(rest::bulk::list))
        .route("/{id}", get(rest::bulk::show))
        .route("/{id}/cancel", post(rest::bulk::cancel));
    let schedules = Router::new()
        .route("/", post(rest::schedules::create).get(rest::schedules::list))
        .route("/validate", post(rest::schedules::validate))
        .route("/{id}", get(rest::schedules::show).patch(rest::schedules::patch).delete(rest::schedules::delete))
        .route("/{id}/trigger", post(rest::schedules::trigger))
        .route("/{id}/enable", post(rest::schedules::enable))
        .route("/{id}/disable", post(rest::schedules::disable))
        .route("/{id}/preview", get(rest::schedules::preview))
        .route("/{id}/next-runs", get(rest::schedules::preview))
        .route("/{id}/ticks", get(rest::schedules::ticks));
    Router::new()
        .nest("/api/v1/jobs", jobs)
        .nest("/api/v1/schedules", schedules)
        .nest("/api/v1/dead-letter", dead_letters)
        .nest("/api/v1/outbox", outbox)
        .nest("/api/v1/queues", queues)
        .route("/api/v1/limits", get(rest::limits::list).patch(rest::limits::set))
        .route("/api/v1/limits/reset", post(rest::limits::reset))
        .nest("/api/v1/bulk", bulk)
        .route("/api/v1/audit", get(rest::audit::list))
        .route("/api/v1/events", get(rest::stream::events))
        .route("/api/v1/trace/{id}", get(rest::trace::show))
        .nest("/api/v1/workers", workers)
        .nest("/api/v1/webhooks", webhooks)
        .merge(grpc::routes(&api))
        .route("/health/live", get(health::live))
        .route("/health/ready", get(health::ready))
        .route("/metrics", get(metrics::metrics))
        .fallback(error::not_found)
        .method_not_allowed_fallback(error::method_not_allowed)
        .layer(axum::middleware::from_fn_with_state(api.clone(), guard::guard))
        .layer(axum::middleware::from_fn(context::with_context))
        .with_state(api)
}
