//! Opens the ports of this server: the API, health checks alone, and a loopback port for the processes of pools.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::Path,
};

use anyhow::Context;
use tokio::net::{TcpListener, lookup_host};

use crate::{config::Config, http::HttpConfig, serve::CannotStart};

/// A host and a port of the configuration with the addresses they mean.
struct Endpoint {
    host: String,
    port: u16,
    /// How to choose another port.
    hint: &'static str,
    addresses: Vec<SocketAddr>,
}

impl Endpoint {
    async fn resolve(host: &str, port: u16, hint: &'static str) -> anyhow::Result<Endpoint> {
        let addresses = lookup_host((host, port)).await;
        let addresses = addresses.map_err(|error| {
            CannotStart::new(format!("cannot listen on {host}: {error}; check HOST and FAENA_HEALTH_HOST"))
        })?;
        Ok(Endpoint { host: host.to_owned(), port, hint, addresses: addresses.collect() })
    }

    async fn bind(&self) -> anyhow::Result<TcpListener> {
        let Endpoint { host, port, .. } = self;
        TcpListener::bind(&*self.addresses).await.map_err(|error| {
            let hint = match error.kind() {
                std::io::ErrorKind::AddrInUse => {
                    format!("another process uses it; choose another port with {}", self.hint)
                }
                _ => format!("check the address, and choose another port with {}", self.hint),
            };
            CannotStart::new(format!("cannot listen on {host}:{port}: {error}; {hint}")).into()
        })
    }
}

/// Where this server listens.
pub struct Endpoints {
    api: Option<Endpoint>,
    health: Option<Endpoint>,
}

/// The open ports of this server.
pub struct Listeners {
    pub api: Option<TcpListener>,
    pub health: Option<TcpListener>,
}

impl Endpoints {
    pub async fn resolve(config: &Config) -> anyhow::Result<Endpoints> {
        let api = match config.roles().api {
            true => Some(Endpoint::resolve(config.text("server.host"), config.port(), "--port or PORT").await?),
            false => None,
        };
        let health = match config.health_address() {
            Some((host, port)) => Some(Endpoint::resolve(host, port, "FAENA_HEALTH_PORT").await?),
            None => None,
        };
        Ok(Endpoints { api, health })
    }

    /// Returns an address that other machines can reach.
    pub fn public_address(&self) -> Option<SocketAddr> {
        let all = self.api.iter().chain(&self.health).flat_map(|endpoint| &endpoint.addresses);
        all.copied().find(|address| !is_loopback(address.ip()))
    }

    pub async fn bind(&self) -> anyhow::Result<Listeners> {
        let mut listeners = Listeners { api: None, health: None };
        if let Some(endpoint) = &self.api {
            listeners.api = Some(endpoint.bind().await?);
        }
        if let Some(endpoint) = &self.health {
            listeners.health = Some(endpoint.bind().await?);
        }
        Ok(listeners)
    }
}

fn is_loopback(address: IpAddr) -> bool {
    address.to_canonical().is_loopback()
}

/// Returns the error for a public address without API keys. Without keys every caller may do everything, so the server
/// listens on loopback addresses only.
pub fn without_keys(public: SocketAddr) -> CannotStart {
    CannotStart::new(format!(
        "{public} is reachable from other machines and there are no API keys; create one with \"faena keys create NAME --scopes \
         admin --offline\", listen on 127.0.0.1, or pass --insecure-no-auth"
    ))
}

/// Returns whether the database is an SQLite file that does not exist yet, so that it has no keys either.
pub fn is_new_file(url: &str) -> bool {
    url.strip_prefix("sqlite:").is_some_and(|path| !Path::new(path.strip_prefix("//").unwrap_or(path)).exists())
}

/// Opens a loopback listener without TLS for the processes of pools if the server uses TLS: they connect to 127.0.0.1,
/// and the server's certificate is for another name.
pub async fn bind_for_pools(config: &Config, http: &HttpConfig) -> anyhow::Result<Option<TcpListener>> {
    if http.tls.is_none() || !config.roles().api || config.engine().pools.is_empty() {
        return Ok(None);
    }
    Ok(Some(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("the listener for pools")?))
}
