//! `faena serve`: wiring, start, stop.

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

/// Something outside that has to be put right first: exit code 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct CannotStart(String);

pub async fn serve(config: Config, migrate: bool, insecure: bool) -> anyhow::Result<()> {
    start_logging(&config);
    let roles = config.roles();
    let listener = if roles.api { Some(bind(&config, insecure).await?) } else { None };
    let store = faena_store::open(config.text("database.url"), config.store(migrate)).await?;
    store.rules_configure(config.rules(), Timestamp::now()).await?;
    say_overruled(&config.rules(), &store.rules());
    // Told before the first job can run: from here on SIGTERM drains.
    let mut stop = Stop::new()?;
    let engine = Engine::start(store.clone(), engine_config(&config, listener.as_ref())?).await?;
    let closing = CancellationToken::new();
    let (body_bytes, batch_bytes) = config.body_bytes();
    let api = Api::new(Parts {
        engine: engine.clone(),
        limits: config.limits(),
        body_bytes,
        batch_bytes,
        loopback_only: !insecure,
        closing: closing.clone(),
    });
    let server = match listener {
        Some(listener) => {
            let address = listener.local_addr().context("the listening address")?;
            tracing::info!(
                "faena {} listens on http://{address}, database {}",
                env!("CARGO_PKG_VERSION"),
                without_password(config.text("database.url"))
            );
            Some(tokio::spawn(http::serve(listener, faena_api::router(api), closing.clone())))
        }
        None => {
            tracing::info!(
                "faena {} works without doors, as {}",
                env!("CARGO_PKG_VERSION"),
                config.text("server.roles")
            );
            None
        }
    };
    stop.first().await;
    tracing::info!(
        "stopping: running jobs have {:?} to finish; a second signal ends them now",
        engine.config.drain_grace
    );
    shut_down(engine, store, closing, server, stop).await;
    tracing::info!("stopped");
    Ok(())
}

/// What was set at run time goes before the configuration; whoever changes the latter should know.
fn say_overruled(configured: &Configured, rules: &Rules) {
    for (scope, limit) in &configured.limits {
        let holds = rules.limits.get(scope).copied().unwrap_or_default();
        if holds != *limit {
            tracing::warn!(
                configured = ?limit,
                holds = ?holds,
                "the limit of {scope} was set at run time, which goes before the configuration; `faena limits reset` lets the configuration hold again"
            );
        }
    }
}

/// What the engine is told, and how its worker processes find this server and do not outlive it.
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

/// Without keys everybody who can connect may do everything, so only this machine may connect.
async fn bind(config: &Config, insecure: bool) -> anyhow::Result<TcpListener> {
    let (host, port) = (config.text("server.host"), config.port());
    let addresses: Vec<_> = lookup_host((host, port))
        .await
        .map_err(|error| CannotStart(format!("cannot listen on {host}: {error}; check HOST")))?
        .collect();
    let is_loopback = |address: IpAddr| address.to_canonical().is_loopback();
    if !insecure && let Some(open) = addresses.iter().find(|address| !is_loopback(address.ip())) {
        return Err(CannotStart(format!(
            "{open} can be reached from other machines, and there are no keys; listen on 127.0.0.1, or say --insecure-no-auth"
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
    // The libraries below us say their own at these levels; `trace` means Faena's trace. Those of the brokers would tell passwords and bodies.
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
    // Only in tests can there be one already.
    let _ = result;
}
