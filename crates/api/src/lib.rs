//! HTTP, WebSocket and gRPC: decodes requests, calls the engine, encodes responses. The router lists every route.

mod access;
mod access_log;
mod certificate;
mod context;
mod doctor;
mod error;
mod grpc;
mod health;
mod job_watch;
mod metrics;
mod openapi;
mod payloads;
mod request;
mod request_trace;
mod rest;
mod routes;
mod traffic;
mod watch;
mod workers;

use std::{pin::Pin, sync::Arc, time::Duration};

use axum::{Router, extract::Request, http::Uri};
use faena_auth::{Access, AccessError, Credentials, Policy};
use faena_domain::{ApiKeyId, JobView, KeyScope, Timestamp, parse::JobParser};
use faena_engine::Engine;
use tokio_util::sync::CancellationToken;
use tower::{Layer, util::MapRequestLayer};

pub use certificate::CertificateExpiry;
pub use doctor::{Checked, Doctor};
pub use error::{ApiError, ApiResult};
pub use metrics::{METRICS, Metric, MetricKind, MetricScope};
pub use openapi::{document, operation::Operation};
pub use routes::{DeclaredRoute, Needs, Routes};
pub use traffic::{ByteBudget, Charge, Cors, ReadMeter, RejectReason, RequestRate, Traffic, TrafficConfig};

use openapi::operations as docs;

use KeyScope::{Admin, Read, Worker, Write};
use Needs::{AllQueues, Events, Job, Nothing, Queue, Schedule, Scope, Task, Webhook};

/// State of the handlers. It is a single `Arc`, because it is cloned several times per request.
#[derive(Clone)]
pub struct Api(Arc<Shared>);

struct Shared {
    parts: Parts,
    documentation: openapi::Rendered,
    watches: job_watch::JobWatches,
}

/// Parts of [`Api`].
pub struct Parts {
    pub engine: Arc<Engine>,
    /// Whether only programs on this machine may call, so that the `Host` of a request must be this machine.
    pub loopback_only: bool,
    /// Cancelled when the server stops; ends all streams.
    pub closing: CancellationToken,
    /// Decides what callers without a key may do.
    pub policy: Policy,
    /// Whether every request is logged at `info`.
    pub access_log: bool,
    /// Expiry of the certificate that this server presents.
    pub certificate: CertificateExpiry,
    pub traffic: Traffic,
    /// Checks the database and the configuration.
    pub doctor: Doctor,
}

impl Api {
    pub fn new(parts: Parts) -> Api {
        Api(Arc::new(Shared {
            parts,
            documentation: openapi::Rendered::default(),
            watches: job_watch::JobWatches::default(),
        }))
    }

    fn documentation(&self) -> &openapi::Rendered {
        &self.0.documentation
    }

    fn watches(&self) -> &job_watch::JobWatches {
        &self.0.watches
    }
}

impl Parts {
    /// Returns the access that these credentials give, and records the use of the key.
    pub(crate) fn authenticate(&self, presented: Credentials<'_>, now: Timestamp) -> Result<Access, AccessError> {
        let access = self.policy.access(presented, &self.engine.store.api_keys(), now)?;
        if let Some(key) = access.key() {
            self.engine.key_usage.record(key, now);
        }
        Ok(access)
    }

    /// Waits until the key of a caller is revoked or expires, so that its open streams end. Never returns for a caller without
    /// a key.
    pub(crate) fn key_end(&self, key: Option<ApiKeyId>) -> KeyEnd {
        let mut keys = self.engine.store.api_keys_watch();
        Box::pin(async move {
            let Some(id) = key else { return std::future::pending().await };
            loop {
                let now = Timestamp::now();
                let current = keys.borrow_and_update().values().find(|stored| stored.key.id == id).cloned();
                let Some(stored) = current.filter(|stored| stored.key.rejection(now).is_none()) else { return };
                tokio::select! {
                    changed = keys.changed() => if changed.is_err() { return },
                    () = wait_until(stored.key.expires_at, now) => {}
                }
            }
        })
    }

    pub(crate) fn parser(&self) -> &JobParser {
        &self.engine.job_parser
    }

    /// Fills in the default timeout of a job that has none of its own.
    pub fn with_default_timeout(&self, mut job: JobView) -> JobView {
        let default_ms = u64::try_from(self.engine.config.processing_timeout.as_millis()).unwrap_or(u64::MAX);
        job.timeout_ms.get_or_insert(default_ms);
        job
    }
}

/// Completes when the key of a caller is no longer valid.
pub(crate) type KeyEnd = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Waits until `at`, but at most a day: a timer cannot be set more than a few years ahead.
async fn wait_until(at: Option<Timestamp>, now: Timestamp) {
    const DAY_MS: i64 = 86_400_000;
    let ms = at.map_or(DAY_MS, |at| at.ms_since(now).clamp(1, DAY_MS));
    tokio::time::sleep(Duration::from_millis(ms.unsigned_abs())).await;
}

impl std::ops::Deref for Api {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.0.parts
    }
}

/// Builds the service for HTTP, WebSocket and gRPC.
pub fn router(api: Api) -> Router {
    service(declared_routes().router(&api).merge(grpc::routes(&api)), api)
}

/// Builds the service for health checks and metrics only.
pub fn health_router(api: Api) -> Router {
    service(health_and_metrics().router(&api), api)
}

/// Removes slashes from the end of a path.
fn without_trailing_slash(mut request: Request) -> Request {
    let uri = request.uri();
    let path = uri.path().trim_end_matches('/');
    if path.len() < uri.path().len() && !path.is_empty() {
        let query = uri.query().map(|query| format!("?{query}")).unwrap_or_default();
        let mut parts = uri.clone().into_parts();
        parts.path_and_query = format!("{path}{query}").parse().ok();
        if let Ok(uri) = Uri::from_parts(parts) {
            *request.uri_mut() = uri;
        }
    }
    request
}

/// Adds the layers that apply to every request. A slash at the end of a path is ignored.
fn service(routes: Router<Api>, api: Api) -> Router {
    let routes = routes
        .fallback(error::not_found)
        .method_not_allowed_fallback(error::method_not_allowed)
        .layer(axum::middleware::from_fn_with_state(api.clone(), traffic::admit))
        .layer(axum::middleware::from_fn_with_state(api.clone(), context::with_context))
        .layer(traffic::compression())
        .with_state(api);
    // A layer of a router runs after the route is chosen, so the path is changed before the router sees it.
    Router::new().fallback_service(MapRequestLayer::new(without_trailing_slash).layer(routes))
}

/// Returns every HTTP route with the scope that it needs and its documentation.
pub fn declared_routes() -> Routes {
    Routes::below("")
        .merge(jobs())
        .merge(schedules())
        .merge(machines())
        .merge(tasks())
        .merge(dead_letters())
        .merge(outbox())
        .merge(queues_and_limits())
        .merge(bulk())
        .merge(workers())
        .merge(webhooks())
        .merge(metrics_of_jobs())
        .merge(administration())
        .merge(health_and_metrics())
        .merge(documentation())
}

fn jobs() -> Routes {
    Routes::below("/api/v1/jobs")
        .post("", Scope(Write), rest::jobs::create, docs::jobs::create)
        .get("", Scope(Read), rest::list::list, docs::jobs::list)
        .post("/batch", Scope(Write), rest::jobs::create_batch, docs::jobs::create_batch)
        .post("/bulk/{action}", Scope(Write), rest::bulk::jobs, docs::bulk::jobs)
        .get("/{id}", Job(Read), rest::jobs::show, docs::jobs::show)
        .patch("/{id}", Job(Write), rest::patch::patch, docs::jobs::patch)
        .delete("/{id}", Job(Write), rest::jobs::delete, docs::jobs::delete)
        .get("/{id}/why", Job(Read), rest::jobs::why, docs::jobs::why)
        .get("/{id}/dependencies", Job(Read), rest::job_graph::show, docs::jobs::dependencies)
        .post("/{id}/cancel", Job(Write), rest::jobs::cancel, docs::jobs::cancel)
        .post("/{id}/retry", Job(Write), rest::jobs::retry, docs::jobs::retry)
        .get("/{id}/log", Job(Read), rest::job_log::log, docs::jobs::log)
        .get("/{id}/events", Job(Read), rest::job_events::stream_job_events, docs::jobs::events)
}

fn schedules() -> Routes {
    Routes::below("/api/v1/schedules")
        .post("", Scope(Write), rest::schedules::create, docs::schedules::create)
        .get("", Scope(Read), rest::schedules::list, docs::schedules::list)
        .post("/validate", Scope(Read), rest::schedules::validate, docs::schedules::validate)
        .get("/{id}", Schedule(Read), rest::schedules::show, docs::schedules::show)
        .patch("/{id}", Schedule(Write), rest::schedules::patch, docs::schedules::patch)
        .delete("/{id}", Schedule(Write), rest::schedules::delete, docs::schedules::delete)
        .post("/{id}/trigger", Schedule(Write), rest::schedules::trigger, docs::schedules::trigger)
        .post("/{id}/enable", Schedule(Write), rest::schedules::enable, docs::schedules::enable)
        .post("/{id}/disable", Schedule(Write), rest::schedules::disable, docs::schedules::disable)
        .get("/{id}/preview", Schedule(Read), rest::schedules::preview, docs::schedules::preview)
        .get("/{id}/next-runs", Schedule(Read), rest::schedules::preview, docs::schedules::next_runs)
        .get("/{id}/ticks", Schedule(Read), rest::schedules::ticks, docs::schedules::ticks)
}

/// Tasks belong to no queue, so a key that is restricted to queues cannot see them.
fn machines() -> Routes {
    Routes::below("/api/v1/machines")
        .post("", AllQueues(Write), rest::machines::register, docs::tasks::register)
        .get("", AllQueues(Read), rest::machines::list, docs::tasks::machines)
        .get("/{name}", AllQueues(Read), rest::machines::show, docs::tasks::machine)
        .get("/{name}/diagram", AllQueues(Read), rest::machines::diagram, docs::tasks::diagram)
        .post("/{name}/migrate", AllQueues(Write), rest::task_bulk::migrate, docs::tasks::migrate)
}

/// A service that takes part in tasks has the scope `worker`: it may see tasks and send them events, but not decide on them.
fn tasks() -> Routes {
    Routes::below("/api/v1/tasks")
        .post("", AllQueues(Write), rest::tasks::create, docs::tasks::create)
        .get("", Task(Read), rest::tasks::list, docs::tasks::list)
        .post("/bulk/{action}", AllQueues(Write), rest::task_bulk::act, docs::tasks::bulk)
        .get("/{id}", Task(Read), rest::tasks::show, docs::tasks::show)
        .get("/{id}/history", AllQueues(Read), rest::tasks::history, docs::tasks::history)
        .get("/{id}/why", AllQueues(Read), rest::tasks::why, docs::tasks::why)
        .get("/{id}/events", AllQueues(Read), rest::tasks::events, docs::tasks::events)
        .post("/{id}/events", Task(Write), rest::tasks::send, docs::tasks::send)
        .post("/{id}/fork", AllQueues(Write), rest::task_forks::fork, docs::tasks::fork)
        .post("/{id}/approve", AllQueues(Write), rest::tasks::approve, docs::tasks::approve)
        .post("/{id}/reject", AllQueues(Write), rest::tasks::reject, docs::tasks::reject)
        .post("/{id}/cancel", AllQueues(Write), rest::tasks::cancel, docs::tasks::cancel)
        .post("/{id}/pause", AllQueues(Write), rest::tasks::pause, docs::tasks::pause)
        .post("/{id}/resume", AllQueues(Write), rest::tasks::resume, docs::tasks::resume)
}

fn dead_letters() -> Routes {
    Routes::below("/api/v1/dead-letter")
        .get("", Scope(Read), rest::dead_letters::list, docs::dead_letters::list)
        .get("/stats", Scope(Read), rest::dead_letters::stats, docs::dead_letters::stats)
        .post("/bulk/{action}", Scope(Write), rest::bulk::dead_letters, docs::bulk::dead_letters)
        .get("/{id}", Job(Read), rest::dead_letters::show, docs::dead_letters::show)
        .delete("/{id}", Job(Write), rest::dead_letters::delete, docs::dead_letters::delete)
        .post("/{id}/retry", Job(Write), rest::dead_letters::retry, docs::dead_letters::retry)
}

/// Sinks receive the events of all queues, so only administrators may manage rejected events.
fn outbox() -> Routes {
    Routes::below("/api/v1/outbox")
        .get("", AllQueues(Read), rest::outbox::overview, docs::outbox::overview)
        .get("/dead-letter", AllQueues(Admin), rest::outbox::dead, docs::outbox::dead)
        .post("/dead-letter/replay", AllQueues(Admin), rest::outbox::replay_many, docs::outbox::replay_many)
        .post("/dead-letter/resolve", AllQueues(Admin), rest::outbox::resolve_many, docs::outbox::resolve_many)
        .get("/dead-letter/{id}", AllQueues(Admin), rest::outbox::show, docs::outbox::show)
        .post("/dead-letter/{id}/replay", AllQueues(Admin), rest::outbox::replay, docs::outbox::replay)
        .post("/dead-letter/{id}/resolve", AllQueues(Admin), rest::outbox::resolve, docs::outbox::resolve)
        .post("/republish", AllQueues(Admin), rest::outbox::republish, docs::outbox::republish)
}

fn queues_and_limits() -> Routes {
    Routes::below("/api/v1")
        .get("/queues", Scope(Read), rest::queues::list, docs::queues::list)
        .get("/queues/{name}", Queue(Read), rest::queues::show, docs::queues::show)
        .patch("/queues/{name}", Queue(Write), rest::queues::patch, docs::queues::patch)
        .post("/queues/{name}/pause", Queue(Write), rest::queues::pause, docs::queues::pause)
        .post("/queues/{name}/resume", Queue(Write), rest::queues::resume, docs::queues::resume)
        .get("/limits", AllQueues(Read), rest::limits::list, docs::queues::limits)
        .patch("/limits", Scope(Admin), rest::limits::set, docs::queues::set_limit)
        .post("/limits/reset", Scope(Admin), rest::limits::reset, docs::queues::reset_limit)
}

fn bulk() -> Routes {
    Routes::below("/api/v1/bulk")
        .get("", AllQueues(Read), rest::bulk::list, docs::bulk::list)
        .get("/{id}", AllQueues(Read), rest::bulk::show, docs::bulk::show)
        .post("/{id}/cancel", AllQueues(Write), rest::bulk::cancel, docs::bulk::cancel)
}

/// The route `/connect` needs no scope: a worker may send its key in the `register` frame, where the handler checks it.
fn workers() -> Routes {
    Routes::below("/api/v1/workers")
        .get("", AllQueues(Read), workers::rest::list, docs::workers::list)
        .get("/connect", Nothing, workers::websocket::connect, docs::workers::connect)
        .post("/register", Scope(Worker), workers::http::register, docs::workers::register)
        .get("/{id}", AllQueues(Read), workers::rest::show, docs::workers::show)
        .delete("/{id}", Scope(Worker), workers::http::leave, docs::workers::deregister)
        .post("/{id}/drain", AllQueues(Write), workers::rest::drain, docs::workers::drain)
        .delete("/{id}/drain", AllQueues(Write), workers::rest::resume, docs::workers::resume)
        .post("/{id}/claim", Scope(Worker), workers::http::claim, docs::workers::claim)
        .post("/{id}/heartbeat", Scope(Worker), workers::http::heartbeat, docs::workers::heartbeat)
        .post("/{id}/jobs/{job}/started", Scope(Worker), workers::http::report("started"), docs::workers::started)
        .post("/{id}/jobs/{job}/progress", Scope(Worker), workers::http::report("progress"), docs::workers::progress)
        .post("/{id}/jobs/{job}/log", Scope(Worker), workers::http::report("log"), docs::workers::log)
        .post("/{id}/jobs/{job}/step", Scope(Worker), workers::http::report("step"), docs::workers::step)
        .post("/{id}/jobs/{job}/complete", Scope(Worker), workers::http::report("complete"), docs::workers::complete)
        .post("/{id}/jobs/{job}/fail", Scope(Worker), workers::http::report("fail"), docs::workers::fail)
        .post("/{id}/jobs/{job}/release", Scope(Worker), workers::http::report("release"), docs::workers::released)
}

fn webhooks() -> Routes {
    Routes::below("/api/v1/webhooks")
        .get("", AllQueues(Read), rest::webhooks::list, docs::webhooks::list)
        .get("/{id}", Webhook(Read), rest::webhooks::show, docs::webhooks::show)
        .post("/{id}/redeliver", Webhook(Write), rest::webhooks::redeliver, docs::webhooks::redeliver)
}

/// Metrics of the whole cluster as JSON. A caller that is restricted to queues gets the metrics of its queues.
fn metrics_of_jobs() -> Routes {
    Routes::below("/api/v1/metrics")
        .get("/overview", Scope(Read), rest::metrics::overview, docs::metrics::overview)
        .get("/queues", Scope(Read), rest::metrics::queues, docs::metrics::queues)
        .get("/workers", AllQueues(Read), rest::metrics::workers, docs::metrics::workers)
        .get("/jobs", Scope(Read), rest::metrics::jobs, docs::metrics::jobs)
        .get("/schedules", Scope(Read), rest::metrics::schedules, docs::metrics::schedules)
        .get("/history", Scope(Read), rest::history::list, docs::metrics::history)
}

fn administration() -> Routes {
    Routes::below("/api/v1")
        .get("/audit", AllQueues(Admin), rest::audit::list, docs::administration::audit)
        .get("/nodes", AllQueues(Read), rest::system::nodes, docs::system::nodes)
        .get("/doctor", AllQueues(Admin), rest::system::doctor, docs::system::doctor)
        .post("/doctor", AllQueues(Admin), rest::system::start_doctor, docs::system::start_doctor)
        .get("/events", Events, rest::events::stream_events, docs::events::stream)
        .get("/trace/{id}", Scope(Read), rest::trace::show, docs::events::trace)
        .get("/api-keys", Scope(Admin), rest::api_keys::list, docs::administration::keys)
        .post("/api-keys", Scope(Admin), rest::api_keys::create, docs::administration::create_key)
        .post("/api-keys/{id}/rotate", Scope(Admin), rest::api_keys::rotate, docs::administration::rotate_key)
        .delete("/api-keys/{id}", Scope(Admin), rest::api_keys::revoke, docs::administration::revoke_key)
}

fn health_and_metrics() -> Routes {
    Routes::below("")
        .get("/health", Nothing, health::ready, docs::system::health)
        .get("/health/live", Nothing, health::live, docs::system::live)
        .get("/health/ready", Nothing, health::ready, docs::system::ready)
        .get("/metrics", AllQueues(Read), metrics::metrics, docs::system::metrics)
}

fn documentation() -> Routes {
    Routes::below("")
        .get("/openapi.json", Nothing, openapi::serve_document, docs::system::document)
        .get("/machine.schema.json", Nothing, rest::machines::schema, docs::system::machine_schema)
        .get("/docs", Nothing, openapi::serve_page, docs::system::page)
        .get("/docs/style.css", Nothing, openapi::serve_style, docs::system::style)
}
