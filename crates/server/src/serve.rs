//! `faena serve`: wires, starts and stops the server.

use std::{
    io::IsTerminal,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
    time::Duration,
};

use anyhow::Context;
use faena_api::{Api, Parts};
use faena_domain::{Rules, Timestamp};
use faena_engine::{Engine, EngineConfig};
use faena_store::Configured;
use tokio::{
    net::{TcpListener, lookup_host},
    signal::unix::{SignalKind, signal},
};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::{EnvFilter, layer::SubscriberExt, util::SubscriberInitExt};

use crate::{
    config::{Config, without_password},
    http,
};

/// A problem of the environment that the operator must fix first. The binary exits with code 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct CannotStart(String);

pub async fn serve(config: Config, migrate: bool, insecure: bool) -> anyhow::Result<()> {
    start_logging(&config);
    let roles = config.roles();
    let listener = if roles.api { Some(bind(&config, insecure).await?) } else { None };
    let store = faena_store::open(config.text("database.url"), config.store(migrate)).await?;
    store.rules_configure(config.rules(), Timestamp::now()).await?;
    warn_about_overrides(&config.rules(), &store.rules());
    // Installed before the first job can run: from here on SIGTERM drains.
    let mut stop = Stop::new()?;
    let engine = Engine::start(store.clone(), engine_config(&config, listener.as_ref())?).await?;
    let closing = CancellationToken::new();
    let api = Api::new(Parts { engine: engine.clone(), loopback_only: !insecure, closing: closing.clone() });
    let server = match listener {
        Some(listener) => {
            let address = listener.local_addr().context("the listening address")?;
            tracing::info!(
                version = env!("CARGO_PKG_VERSION"),
                url = %format!("http://{address}"),
                database = without_password(config.text("database.url")),
                roles = config.text("server.roles"),
                "faena started"
            );
            Some(tokio::spawn(http::serve(listener, faena_api::router(api), closing.clone())))
        }
        None => {
            tracing::info!(
                version = env!("CARGO_PKG_VERSION"),
                database = without_password(config.text("database.url")),
                roles = config.text("server.roles"),
                api = "disabled",
                "faena started"
            );
            None
        }
    };
    stop.first().await;
    tracing::info!(grace = ?engine.config.drain_grace, "draining, a second signal stops immediately");
    shut_down(engine, store, closing, server, stop).await;
    tracing::info!("stopped");
    Ok(())
}

/// Warns about configured limits that have no effect because an operator set another limit at run time.
fn warn_about_overrides(configured: &Configured, rules: &Rules) {
    for (scope, limit) in &configured.limits {
        let effective = rules.limits.get(scope).copied().unwrap_or_default();
        if effective != *limit {
            tracing::warn!(
                %scope,
                configured = ?limit,
                ?effective,
                "configured limit overridden at run time, \"faena limits reset\" restores it"
            );
        }
    }
}

/// Returns the engine's configuration, including how pool processes reach this server and are stopped with it.
fn engine_config(config: &Config, listener: Option<&TcpListener>) -> anyhow::Result<EngineConfig> {
    let mut engine = config.engine();
    let own = std::env::current_exe().context("the path of this program")?;
    engine.guard = vec![own.to_string_lossy().into_owned(), "guard".into(), "--".into()];
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
    server: Option<tokio::task::JoinHandle<()>>,
    mut stop: Stop,
) {
    let hurry = CancellationToken::new();
    let impatient = hurry.clone();
    let watcher = tokio::spawn(async move {
        stop.first().await;
        impatient.cancel();
    });
    engine.stop(hurry).await;
    closing.cancel();
    if let Some(server) = server {
        let _ = tokio::time::timeout(Duration::from_secs(5), server).await;
    }
    store.close().await;
    watcher.abort();
}

struct Stop {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

impl Stop {
    fn new() -> anyhow::Result<Stop> {
        Ok(Stop { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn first(&mut self) {
        tokio::select! { _ = self.terminate.recv() => {}, _ = self.interrupt.recv() => {} }
    }
}

/// Binds the listener. Without API keys every caller may do everything, so only loopback addresses are accepted.
async fn bind(config: &Config, insecure: bool) -> anyhow::Result<TcpListener> {
    let (host, port) = (config.text("server.host"), config.port());
    let addresses: Vec<_> = lookup_host((host, port))
        .await
        .map_err(|error| CannotStart(format!("cannot listen on {host}: {error}; check HOST")))?
        .collect();
    let is_loopback = |address: IpAddr| address.to_canonical().is_loopback();
    if !insecure && let Some(open) = addresses.iter().find(|address| !is_loopback(address.ip())) {
        return Err(CannotStart(format!(
            "{open} is reachable from other machines and there are no API keys; listen on 127.0.0.1, or pass --insecure-no-auth"
        ))
        .into());
    }
    TcpListener::bind(addresses.as_slice()).await.map_err(|error| {
        let hint = match error.kind() {
            std::io::ErrorKind::AddrInUse => "is another faena running? choose another with --port or PORT",
            _ => "check HOST and PORT",
        };
        CannotStart(format!("cannot listen on {host}:{port}: {error}; {hint}")).into()
    })
}

fn start_logging(config: &Config) {
    let level = config.text("log.level");
    // `trace` means Faena's own trace, not that of the libraries. The broker clients would log passwords and message bodies.
    let filter = EnvFilter::new(format!(
        "{level},hyper=info,h2=info,tokio_postgres=info,reqwest=info,rustls=info,lapin=off,async_nats=off"
    ));
    let registry = tracing_subscriber::registry().with(filter);
    let result = if config.text("log.format") == "json" {
        registry.with(tracing_subscriber::fmt::layer().json().with_writer(std::io::stderr)).try_init()
    } else {
        let colours = std::io::stderr().is_terminal();
        registry
            .with(tracing_subscriber::fmt::layer().with_ansi(colours).with_target(false).with_writer(std::io::stderr))
            .try_init()
    };
    // Fails only if a test has installed a subscriber.
    let _ = result;
}
