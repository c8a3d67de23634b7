//! `faena serve`: wires, starts and stops the server.

use std::{
    io::IsTerminal,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use anyhow::Context;
use faena_api::{Api, Doctor, Parts, Traffic};
use faena_auth::{OwnToken, Policy};
use faena_dashboard::DashboardConfig;
use faena_domain::{Limit, LogWriter, Rules, Timestamp, masked_url};
use faena_engine::{Engine, EngineConfig, EngineError, PoolToken};
use faena_queue::QueueError;
use faena_store::ConfiguredRules;
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    sync::oneshot,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing_subscriber::{EnvFilter, layer::SubscriberExt, util::SubscriberInitExt};

use crate::{
    config::Config,
    http::{self, HttpConfig},
    listen::{Endpoints, Listeners, bind_for_pools, is_new_file, without_keys},
    memory,
};

/// A problem of the environment that the operator must fix first. The binary exits with code 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct CannotStart(String);

impl CannotStart {
    pub fn new(message: String) -> CannotStart {
        CannotStart(message)
    }
}

/// The disk of the database failed while the server ran. The binary exits with code 74 (`EX_IOERR`), so that a supervisor restarts it.
#[derive(Debug, thiserror::Error)]
#[error("the disk of the database failed: {0}; the next start checks the database")]
pub struct StorageFailed(String);

/// How long requests may take to receive their error after the disk has failed.
const FAILURE_GRACE: Duration = Duration::from_secs(1);

/// Runs the server until a signal stops it. Sends the address of the API to `started` once it listens.
pub async fn serve(
    config: Config,
    migrate: bool,
    insecure: bool,
    started: Option<oneshot::Sender<SocketAddr>>,
) -> anyhow::Result<()> {
    let config = Arc::new(config);
    start_logging(&config);
    faena_process::adopt_orphans();
    for (variable, reason) in config.unused_variables() {
        tracing::warn!(variable, reason, "environment variable has no effect");
    }
    let mut http = config.http().map_err(|error| CannotStart(format!("{error:#}")))?;
    http.limits.total = http::raise_limit(http.limits.total);
    let dashboard = config.dashboard().map_err(|error| CannotStart(format!("{error:#}")))?;
    let endpoints = Endpoints::resolve(&config).await?;
    let needs_keys = if insecure { None } else { endpoints.public_address() };
    if let Some(public) = needs_keys
        && is_new_file(config.text("database.url"))
    {
        return Err(without_keys(public).into());
    }
    let early = if needs_keys.is_none() { Some(endpoints.bind().await?) } else { None };
    let store = faena_store::open(config.text("database.url"), config.store(migrate)).await?;
    let has_keys = !store.api_keys().is_empty();
    let listeners = match (early, needs_keys) {
        (Some(listeners), _) => listeners,
        (None, Some(public)) if !has_keys => return Err(without_keys(public).into()),
        (None, _) => endpoints.bind().await?,
    };
    let pool_listener = bind_for_pools(&config, &http).await?;
    store.rules_configure(config.rules(), Timestamp::now()).await?;
    warn_about_overrides(&config.rules(), &store.rules());
    // Installed before the first job can run: from here on SIGTERM drains.
    let mut stop = StopSignals::new()?;
    let own_token = OwnToken::new();
    let mut engine = engine_config(&config, pool_listener.as_ref().or(listeners.api.as_ref()))?;
    engine.pool_token = PoolToken(own_token.reveal().to_owned());
    let engine = match Engine::start(store.clone(), engine).await {
        Err(EngineError::Queue(error)) => return Err(CannotStart(cannot_use_redis(&error)).into()),
        started => started?,
    };
    let closing = CancellationToken::new();
    let api = Api::new(Parts {
        engine: engine.clone(),
        loopback_only: !insecure && !has_keys,
        closing: closing.clone(),
        policy: Policy { own_token: Some(own_token), ..config.policy(insecure) },
        access_log: config.text("log.access") == "true",
        certificate: http.tls.as_ref().map(|tls| tls.expiry().clone()).unwrap_or_default(),
        traffic: Traffic::new(config.traffic()),
        doctor: Doctor::new({
            let config = config.clone();
            move || {
                let config = config.clone();
                async move { crate::doctor::check(&config).await }
            }
        }),
    });
    log_start(&config, &listeners, &http);
    let address = listeners.api.as_ref().and_then(|listener| listener.local_addr().ok());
    if let (Some(started), Some(address)) = (started, address) {
        let _ = started.send(address);
    }
    let servers = start_servers(api, dashboard, listeners, pool_listener, http, &closing);
    tokio::select! {
        () = stop.received() => {}
        never = memory::give_back_freed_memory() => match never {},
        reason = store.storage_failure() => {
            closing.cancel();
            servers.close();
            let _ = tokio::time::timeout(FAILURE_GRACE, servers.wait()).await;
            return Err(StorageFailed(reason).into());
        }
    }
    let (jobs, grace) = (engine.local_jobs(), engine.config.drain_grace);
    tracing::info!(jobs, ?grace, "draining, a second signal stops immediately");
    shut_down(engine, store, closing, servers, stop).await;
    tracing::info!("stopped");
    Ok(())
}

fn cannot_use_redis(error: &QueueError) -> String {
    format!(
        "{error}; start Redis, correct queue.redis_url (REDIS_URL), or let the database dispatch: always with queue.backend = \
         \"store\", while Redis is not available with queue.fallback = true"
    )
}

/// Starts a server on each listener: one for the API and the dashboard, one for pool processes, and one for health checks.
fn start_servers(
    api: Api,
    dashboard: DashboardConfig,
    listeners: Listeners,
    pool_listener: Option<TcpListener>,
    http: HttpConfig,
    closing: &CancellationToken,
) -> TaskTracker {
    let servers = TaskTracker::new();
    let budget = api.traffic.budget().clone();
    let plain = HttpConfig { tls: None, ..http.clone() };
    if let Some(listener) = listeners.health {
        let router = faena_api::health_router(api.clone());
        servers.spawn(http::serve(listener, router, plain.clone(), budget.clone(), closing.clone()));
    }
    let router = faena_api::router(api);
    if let Some(listener) = pool_listener {
        servers.spawn(http::serve(listener, router.clone(), plain, budget.clone(), closing.clone()));
    }
    if let Some(listener) = listeners.api {
        if let Some(tls) = &http.tls {
            tokio::spawn(tls.clone().reload_on_change(closing.clone()));
        }
        let router = faena_dashboard::router(dashboard, router, closing.clone());
        servers.spawn(http::serve(listener, router, http, budget, closing.clone()));
    }
    servers
}

fn log_start(config: &Config, listeners: &Listeners, http: &HttpConfig) {
    let scheme = if http.tls.is_some() { "https" } else { "http" };
    let address = |listener: &Option<TcpListener>| listener.as_ref().and_then(|listener| listener.local_addr().ok());
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        url = address(&listeners.api).map(|address| format!("{scheme}://{address}")),
        health = address(&listeners.health).map(|address| format!("http://{address}")),
        database = masked_url(config.text("database.url")),
        roles = config.text("server.roles"),
        api = if listeners.api.is_none() { Some("disabled") } else { None },
        "faena started"
    );
}

/// Warns about configured limits that have no effect because an operator set another limit at run time.
fn warn_about_overrides(configured: &ConfiguredRules, rules: &Rules) {
    for (scope, limit) in &configured.limits {
        let effective = rules.limits.get(scope).copied().unwrap_or_default();
        if effective != *limit {
            tracing::warn!(
                %scope,
                configured = limit_text(limit),
                effective = limit_text(&effective),
                "configured limit overridden at run time, \"faena limits reset\" restores it"
            );
        }
    }
}

fn limit_text(limit: &Limit) -> String {
    let parts = [limit.concurrency.map(|n| format!("concurrency {n}")), limit.rate.map(|rate| rate.to_string())];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    if parts.is_empty() { "none".into() } else { parts.join(", ") }
}

/// Returns the engine's configuration, including how pool processes reach this server and are stopped with it.
fn engine_config(config: &Config, listener: Option<&TcpListener>) -> anyhow::Result<EngineConfig> {
    let mut engine = config.engine();
    engine.guard = Some(std::env::current_exe().context("the path of this program")?);
    match listener {
        Some(listener) => {
            let mut address = listener.local_addr().context("the listening address")?;
            if address.ip().is_unspecified() {
                address.set_ip(if address.is_ipv6() { Ipv6Addr::LOCALHOST.into() } else { Ipv4Addr::LOCALHOST.into() });
            }
            engine.own_url = format!("http://{address}");
        }
        None if !engine.pools.is_empty() => {
            return Err(CannotStart(
                "[[pool]]: worker processes need the api role of the same server to connect to; add api to --roles"
                    .into(),
            )
            .into());
        }
        None => {}
    }
    Ok(engine)
}

async fn shut_down(
    engine: Arc<Engine>,
    store: Arc<dyn faena_store::Store>,
    closing: CancellationToken,
    servers: TaskTracker,
    mut stop: StopSignals,
) {
    let stop_now = CancellationToken::new();
    let second_signal = stop_now.clone();
    let watcher = tokio::spawn(async move {
        stop.received().await;
        second_signal.cancel();
    });
    engine.stop(stop_now).await;
    closing.cancel();
    servers.close();
    let _ = tokio::time::timeout(Duration::from_secs(5), servers.wait()).await;
    store.close().await;
    watcher.abort();
}

/// SIGTERM and SIGINT.
pub struct StopSignals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

impl StopSignals {
    pub fn new() -> anyhow::Result<StopSignals> {
        Ok(StopSignals { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    pub async fn received(&mut self) {
        tokio::select! { _ = self.terminate.recv() => {}, _ = self.interrupt.recv() => {} }
    }
}

fn start_logging(config: &Config) {
    let level = match config.text("log.level") {
        // There is no level above `error`.
        "fatal" => "error",
        level => level,
    };
    // The libraries keep their own levels, even if `log.level` is `trace`. The broker clients would log passwords and
    // message bodies. The connection pool would log each connection that fails in an outage; Faena logs the outage
    // once.
    let filter = EnvFilter::new(format!(
        "{level},hyper=info,h2=info,tokio_postgres=info,deadpool=error,reqwest=info,rustls=info,lapin=off,async_nats=off"
    ));
    let registry = tracing_subscriber::registry().with(filter);
    let result = if config.text("log.format") == "json" {
        let writer = || LogWriter::new(std::io::stderr(), false);
        registry.with(tracing_subscriber::fmt::layer().json().with_writer(writer)).try_init()
    } else {
        let colours = std::io::stderr().is_terminal();
        let writer = move || LogWriter::new(std::io::stderr(), colours);
        registry
            .with(tracing_subscriber::fmt::layer().with_ansi(colours).with_target(false).with_writer(writer))
            .try_init()
    };
    // Fails only if a test has installed a subscriber.
    let _ = result;
}
