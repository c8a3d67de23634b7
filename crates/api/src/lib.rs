//! REST and the doors for workers: decode, call, encode. The router is the table of contents.

mod error;
mod frame;
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

/// What handlers work with. Behind one reference: it is handed on several times per request.
#[derive(Clone)]
pub struct Api(Arc<Parts>);

pub struct Parts {
    pub engine: Arc<Engine>,
    /// Only this machine may call, so it has to be called by a name of this machine.
    pub loopback_only: bool,
    /// Streams end when this is cancelled.
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

    /// The job as it is shown: with the limit that holds for it when it names none.
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
    let letters = Router::new()
        .route("/", get(rest::letters::list))
        .route("/stats", get(rest::letters::stats))
        .route("/bulk/{action}", post(rest::bulk::letters))
        .route("/{id}", get(rest::letters::show).delete(rest::letters::delete))
        .route("/{id}/retry", post(rest::letters::retry));
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
        .nest("/api/v1/dead-letter", letters)
        .nest("/api/v1/outbox", outbox)
        .nest("/api/v1/queues", queues)
        .route("/api/v1/limits", get(rest::queues::limits).patch(rest::queues::set_limit))
        .route("/api/v1/limits/reset", post(rest::queues::reset_limit))
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
        .layer(axum::middleware::from_fn(frame::frame))
        .with_state(api)
}
