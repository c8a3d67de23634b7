//! The servers of `DATABASE_URL`: connects to the one that accepts writes, and switches when another one does.
//!
//! Every host has its own timeout, so that one that hangs or drops packets does not hide the others. The host that worked last is
//! tried first. When a connection is made to a host other than the last one, all older ones are closed: they belong to a server that was
//! replaced. The calls that wait on them fail immediately instead of waiting for their timeout.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use deadpool_postgres::Connect;
use futures_util::{
    StreamExt,
    future::BoxFuture,
    stream::{self, BoxStream},
};
use parking_lot::Mutex;
use tokio::{
    net::lookup_host,
    sync::watch,
    task::{AbortHandle, JoinHandle},
};
use tokio_postgres::{
    AsyncMessage, Client, Config, Error, NoTls, Socket,
    config::{Host, LoadBalanceHosts, SslMode, TargetSessionAttrs},
    tls::{MakeTlsConnect, TlsConnect},
};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::connect;
use crate::Result;

/// Time limit for connecting to the only host, and to each of several. `connect_timeout` of the URL takes precedence.
const ONE_HOST: Duration = Duration::from_secs(5);
const EACH_HOST: Duration = Duration::from_secs(2);
/// Minimum time between two disconnections from a read-only server. Without it, a read-only server that is the only one would cost
/// a new connection per call.
const MIN_CLOSE_INTERVAL: Duration = Duration::from_secs(1);

/// What a connection receives. Polling it drives the connection.
pub type Messages = BoxStream<'static, std::result::Result<AsyncMessage, Error>>;

/// The servers of a URL. Clones share which of them is in use.
#[derive(Clone)]
pub struct Hosts(Arc<Inner>);

struct Inner {
    /// One configuration per host.
    hosts: Vec<Config>,
    tls: Option<MakeRustlsConnect>,
    timeout: Duration,
    /// Index of the host that worked last.
    current: Arc<AtomicUsize>,
    open: Mutex<Vec<AbortHandle>>,
    closed_at: Mutex<Option<Instant>>,
    disconnections: watch::Sender<u64>,
}

impl Hosts {
    pub fn new(url: &str) -> Result<Hosts> {
        let config = connect::config(url)?;
        let count = config.get_hosts().len().max(config.get_hostaddrs().len()).max(1);
        let default = if count > 1 { EACH_HOST } else { ONE_HOST };
        let timeout = connect::parse(url)?.get_connect_timeout().copied().unwrap_or(default);
        let tls = if config.get_ssl_mode() == SslMode::Require { Some(connect::tls()?) } else { None };
        Ok(Hosts(Arc::new(Inner {
            hosts: (0..count).map(|at| only_host(&config, at, timeout)).collect(),
            tls,
            timeout,
            current: Arc::new(AtomicUsize::new(first(&config, count))),
            open: Mutex::default(),
            closed_at: Mutex::default(),
            disconnections: watch::Sender::new(0),
        })))
    }

    /// Returns the same servers, with another name for their sessions in `pg_stat_activity`. Both share which host is in use.
    pub fn named(&self, name: &str) -> Hosts {
        let rename = |config: &Config| config.clone().application_name(name).clone();
        Hosts(Arc::new(Inner {
            hosts: self.0.hosts.iter().map(rename).collect(),
            tls: self.0.tls.clone(),
            timeout: self.0.timeout,
            current: self.0.current.clone(),
            open: Mutex::default(),
            closed_at: Mutex::default(),
            disconnections: watch::Sender::new(0),
        }))
    }

    pub fn has_several(&self) -> bool {
        self.0.hosts.len() > 1
    }

    /// Returns whether sessions must accept writes.
    pub fn needs_writable(&self) -> bool {
        self.0.hosts[0].get_target_session_attrs() == TargetSessionAttrs::ReadWrite
    }

    /// Returns how long connecting takes if no host answers and each has one address.
    pub fn longest_connect(&self) -> Duration {
        self.0.timeout * u32::try_from(self.0.hosts.len()).unwrap_or(u32::MAX)
    }

    /// Returns a counter of the times that all connections were closed, because their server was replaced or has become
    /// read-only.
    pub fn disconnections(&self) -> watch::Receiver<u64> {
        self.0.disconnections.subscribe()
    }

    /// Closes all connections: their server has become read-only.
    pub fn close_read_only(&self) {
        let mut closed_at = self.0.closed_at.lock();
        if closed_at.is_none_or(|at| at.elapsed() >= MIN_CLOSE_INTERVAL) {
            *closed_at = Some(Instant::now());
            drop(closed_at);
            tracing::warn!("database is read-only, connecting again");
            self.close_all();
        }
    }

    /// Records that `host` is in use. Closes all connections if another host was in use before.
    pub fn move_to(&self, host: usize) {
        if self.0.current.swap(host, Ordering::Relaxed) != host {
            tracing::warn!(host = %address(&self.0.hosts[host]), "connected to another database host");
            self.close_all();
        }
    }

    fn close_all(&self) {
        for connection in std::mem::take(&mut *self.0.open.lock()) {
            connection.abort();
        }
        self.0.disconnections.send_modify(|disconnections| *disconnections += 1);
    }

    /// Connects to the first host that accepts the session, beginning with the one that worked last. Returns its index.
    ///
    /// # Errors
    /// Returns the error of the last host. For a host that does not answer in time, it is "timeout waiting for server".
    pub async fn open(&self) -> std::result::Result<(usize, Client, Messages), Error> {
        let mut first = self.0.current.load(Ordering::Relaxed);
        let mut at = first;
        loop {
            let result = self.open_at(at).await;
            let current = self.0.current.load(Ordering::Relaxed);
            match result {
                // Meanwhile another connection has switched to another host: this one was replaced while it did not answer.
                Ok(_) if current != first && current != at => (first, at) = (current, current),
                Ok((client, messages)) => return Ok((at, client, messages)),
                Err(error) => {
                    at = (at + 1) % self.0.hosts.len();
                    if at == first {
                        return Err(error);
                    }
                }
            }
        }
    }

    /// Connects to one host. Each of its addresses has its own timeout.
    async fn open_at(&self, at: usize) -> std::result::Result<(Client, Messages), Error> {
        let config = &self.0.hosts[at];
        let mut result = Err(Error::__private_api_timeout());
        for config in addresses(config, self.0.timeout).await {
            let connected = match &self.0.tls {
                Some(tls) => tokio::time::timeout(self.0.timeout, open_once(&config, tls.clone())).await,
                None => tokio::time::timeout(self.0.timeout, open_once(&config, NoTls)).await,
            };
            result = connected.unwrap_or_else(|_| Err(Error::__private_api_timeout()));
            if result.is_ok() {
                break;
            }
        }
        result
    }
}

impl Connect for Hosts {
    /// Connects for the pool. Ignores the configuration of the pool, which is that of the URL.
    fn connect(&self, _: &Config) -> BoxFuture<'_, std::result::Result<(Client, JoinHandle<()>), Error>> {
        Box::pin(async move {
            let (host, client, mut messages) = self.open().await?;
            self.move_to(host);
            let driver = tokio::spawn(async move { while let Some(Ok(_)) = messages.next().await {} });
            let mut open = self.0.open.lock();
            open.retain(|connection| !connection.is_finished());
            open.push(driver.abort_handle());
            Ok((client, driver))
        })
    }
}

async fn open_once<T>(config: &Config, tls: T) -> std::result::Result<(Client, Messages), Error>
where
    T: MakeTlsConnect<Socket> + Send,
    T::Stream: Send + Unpin + 'static,
    T::TlsConnect: Send,
    <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
{
    let (client, mut connection) = config.connect(tls).await?;
    Ok((client, stream::poll_fn(move |context| connection.poll_message(context)).boxed()))
}

/// Returns the configuration for the host at this index alone.
fn only_host(config: &Config, at: usize, timeout: Duration) -> Config {
    let mut one = Config::new();
    one.application_name(config.get_application_name().unwrap_or("faena"));
    one.ssl_mode(config.get_ssl_mode()).ssl_negotiation(config.get_ssl_negotiation());
    one.channel_binding(config.get_channel_binding()).target_session_attrs(config.get_target_session_attrs());
    one.connect_timeout(timeout);
    one.keepalives(config.get_keepalives()).keepalives_idle(config.get_keepalives_idle());
    if let Some(interval) = config.get_keepalives_interval() {
        one.keepalives_interval(interval);
    }
    if let Some(retries) = config.get_keepalives_retries() {
        one.keepalives_retries(retries);
    }
    if let Some(user) = config.get_user() {
        one.user(user);
    }
    if let Some(password) = config.get_password() {
        one.password(password);
    }
    if let Some(name) = config.get_dbname() {
        one.dbname(name);
    }
    if let Some(options) = config.get_options() {
        one.options(options);
    }
    if let Some(timeout) = config.get_tcp_user_timeout() {
        one.tcp_user_timeout(*timeout);
    }
    match config.get_hosts().get(at) {
        Some(Host::Tcp(name)) => _ = one.host(name),
        Some(Host::Unix(path)) => _ = one.host_path(path),
        None => {}
    }
    if let Some(address) = config.get_hostaddrs().get(at) {
        one.hostaddr(*address);
    }
    let ports = config.get_ports();
    if let Some(port) = ports.get(at).or(ports.first()) {
        one.port(*port);
    }
    one
}

/// Returns one configuration per address of a host name, or the configuration itself.
async fn addresses(config: &Config, timeout: Duration) -> Vec<Config> {
    let ([Host::Tcp(name)], []) = (config.get_hosts(), config.get_hostaddrs()) else { return vec![config.clone()] };
    let port = config.get_ports().first().copied().unwrap_or(5432);
    match tokio::time::timeout(timeout, lookup_host((name.as_str(), port))).await {
        Ok(Ok(found)) => found.map(|address| config.clone().hostaddr(address.ip()).clone()).collect(),
        // The driver looks the name up again and says what is wrong.
        _ => vec![config.clone()],
    }
}

fn address(config: &Config) -> String {
    let port = config.get_ports().first().copied().unwrap_or(5432);
    match config.get_hosts().first() {
        Some(Host::Tcp(name)) => format!("{name}:{port}"),
        Some(Host::Unix(path)) => path.display().to_string(),
        None => config.get_hostaddrs().first().map_or(String::new(), |address| format!("{address}:{port}")),
    }
}

/// Returns the index of the host to try first.
fn first(config: &Config, count: usize) -> usize {
    let random = usize::try_from(uuid::Uuid::new_v4().as_u128() % count as u128).unwrap_or(0);
    if config.get_load_balance_hosts() == LoadBalanceHosts::Random { random } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_host_has_its_own_timeout_which_the_url_can_set() {
        let longest = |url: &str| Hosts::new(url).expect("a valid URL").longest_connect();
        assert_eq!(longest("postgres://u@a/d"), ONE_HOST);
        assert_eq!(longest("postgres://u@a,b,c/d"), EACH_HOST * 3);
        assert_eq!(longest("postgres://u@a,b/d?connect_timeout=7"), Duration::from_secs(14));
    }

    #[test]
    fn with_several_hosts_the_session_must_accept_writes_unless_the_url_says_otherwise() {
        let needs = |url: &str| Hosts::new(url).expect("a valid URL").needs_writable();
        assert!(needs("postgres://u@a,b/d"));
        assert!(needs("postgres://u@a/d?target_session_attrs=read-write"));
        assert!(!needs("postgres://u@a/d"));
        assert!(!needs("postgres://u@a,b/d?target_session_attrs=any"));
    }

    #[test]
    fn the_configuration_of_one_host_keeps_everything_else() {
        let config =
            connect::config("postgres://me:secret@a:1,b:2/d?sslmode=require&options=-c%20x%3D1").expect("valid");
        let one = only_host(&config, 1, ONE_HOST);
        assert_eq!(address(&one), "b:2");
        assert_eq!((one.get_user(), one.get_password()), (Some("me"), Some(&b"secret"[..])));
        assert_eq!((one.get_dbname(), one.get_options()), (Some("d"), Some("-c x=1")));
        assert_eq!(one.get_ssl_mode(), SslMode::Require);
    }
}
