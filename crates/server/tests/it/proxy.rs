//! A TCP proxy between workers and a server. A test can close its connections or make it drop all data.

use std::{
    net::SocketAddr,
    sync::{Arc, RwLock},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tokio_util::sync::CancellationToken;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Forward,
    /// Accepts connections and bytes and forwards nothing. A connection that has lost bytes never forwards any again.
    DropAll,
    /// Forwards to the server and drops what the server sends.
    DropAnswers,
    /// Closes new connections immediately.
    Refuse,
}

struct Shared {
    target: RwLock<SocketAddr>,
    mode: RwLock<Mode>,
    disconnect: RwLock<CancellationToken>,
}

/// A running proxy. Dropping it closes all connections.
pub struct Proxy {
    pub url: String,
    shared: Arc<Shared>,
    stop: CancellationToken,
}

impl Proxy {
    pub async fn start(url: &str) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let own_url = format!("http://{}", listener.local_addr().unwrap());
        let shared = Arc::new(Shared {
            target: RwLock::new(address(url)),
            mode: RwLock::new(Mode::Forward),
            disconnect: RwLock::default(),
        });
        let stop = CancellationToken::new();
        tokio::spawn(stop.clone().run_until_cancelled_owned(listen(listener, shared.clone(), stop.clone())));
        Proxy { url: own_url, shared, stop }
    }

    /// Closes all current connections. New ones are accepted.
    pub fn disconnect_all(&self) {
        std::mem::take(&mut *self.shared.disconnect.write().unwrap()).cancel();
    }

    /// Sends new connections to another server.
    pub fn retarget(&self, url: &str) {
        *self.shared.target.write().unwrap() = address(url);
    }

    pub fn drop_all(&self) {
        *self.shared.mode.write().unwrap() = Mode::DropAll;
    }

    pub fn drop_answers(&self) {
        *self.shared.mode.write().unwrap() = Mode::DropAnswers;
    }

    /// Closes all connections and refuses new ones.
    pub fn refuse(&self) {
        *self.shared.mode.write().unwrap() = Mode::Refuse;
        self.disconnect_all();
    }

    /// Forwards data again. Connections that have lost bytes stay open but transfer nothing.
    pub fn forward(&self) {
        *self.shared.mode.write().unwrap() = Mode::Forward;
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

fn address(url: &str) -> SocketAddr {
    url.strip_prefix("http://").unwrap().parse().unwrap()
}

async fn listen(listener: TcpListener, shared: Arc<Shared>, stop: CancellationToken) {
    loop {
        let Ok((client, _)) = listener.accept().await else { continue };
        if *shared.mode.read().unwrap() == Mode::Refuse {
            continue;
        }
        let disconnect = shared.disconnect.read().unwrap().clone();
        let (shared, stop) = (shared.clone(), stop.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = disconnect.cancelled() => {}
                () = stop.cancelled() => {}
                () = forward_both_ways(client, shared) => {}
            }
        });
    }
}

async fn forward_both_ways(client: TcpStream, shared: Arc<Shared>) {
    let target = *shared.target.read().unwrap();
    let Ok(server) = TcpStream::connect(target).await else { return };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let ((client_in, client_out), (server_in, server_out)) = (client.into_split(), server.into_split());
    tokio::select! {
        () = forward(client_in, server_out, &shared, &[Mode::DropAll]) => {}
        () = forward(server_in, client_out, &shared, &[Mode::DropAll, Mode::DropAnswers]) => {}
    }
}

/// Copies bytes until the connection ends. In a mode that is in `dropping`, it drops them.
async fn forward(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    shared: &Shared,
    dropping: &[Mode],
) {
    let mut buffer = vec![0; 64 << 10];
    let mut has_lost_bytes = false;
    loop {
        let Ok(count @ 1..) = from.read(&mut buffer).await else {
            if has_lost_bytes {
                // The end of the stream is lost as well.
                std::future::pending::<()>().await;
            }
            return;
        };
        has_lost_bytes |= dropping.contains(&shared.mode.read().unwrap());
        if !has_lost_bytes && to.write_all(&buffer[..count]).await.is_err() {
            return;
        }
    }
}
