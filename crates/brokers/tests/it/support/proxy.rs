//! A TCP proxy to a broker that can cut or stall connections, immediately or after a number of bytes.

use std::{
    net::Ipv4Addr,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, tcp::OwnedReadHalf, tcp::OwnedWriteHalf},
    sync::watch,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Open,
    /// No byte gets through, and connections stay open.
    Stalled,
    /// Every connection is closed, including new ones.
    Cut,
}

pub struct Proxy {
    port: u16,
    state: Arc<ProxyState>,
    accepting: tokio::task::JoinHandle<()>,
}

struct ProxyState {
    mode: watch::Sender<Mode>,
    /// Bytes that may still go to the broker before `fault` takes effect.
    bytes_left: AtomicI64,
    fault: watch::Sender<Mode>,
    /// Number of open directions: two per connection.
    open_directions: watch::Sender<usize>,
}

impl Proxy {
    /// Starts a proxy to this local port.
    pub async fn to(port: u16) -> Proxy {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
        let proxy_port = listener.local_addr().expect("the local address").port();
        let state = Arc::new(ProxyState {
            mode: watch::Sender::new(Mode::Open),
            bytes_left: AtomicI64::new(i64::MAX),
            fault: watch::Sender::new(Mode::Open),
            open_directions: watch::Sender::new(0),
        });
        let shared = state.clone();
        let accepting = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                if *shared.mode.borrow() == Mode::Cut {
                    continue;
                }
                if let Ok(broker) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await {
                    let ((from_client, to_client), (from_broker, to_broker)) =
                        (client.into_split(), broker.into_split());
                    tokio::spawn(shared.clone().forward_counted(from_client, to_broker, true));
                    tokio::spawn(shared.clone().forward_counted(from_broker, to_client, false));
                }
            }
        });
        Proxy { port: proxy_port, state, accepting }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn cut(&self) {
        self.state.mode.send_replace(Mode::Cut);
    }

    pub fn stall(&self) {
        self.state.mode.send_replace(Mode::Stalled);
    }

    /// Cuts all connections once this many more bytes have gone to the broker.
    pub fn cut_after(&self, bytes: i64) {
        self.state.fault.send_replace(Mode::Cut);
        self.state.bytes_left.store(bytes, Ordering::SeqCst);
    }

    /// Stalls all connections once this many more bytes have gone to the broker.
    pub fn stall_after(&self, bytes: i64) {
        self.state.fault.send_replace(Mode::Stalled);
        self.state.bytes_left.store(bytes, Ordering::SeqCst);
    }

    pub fn is_open(&self) -> bool {
        *self.state.mode.borrow() == Mode::Open
    }

    /// Waits until every connection is closed. Panics after ten seconds.
    pub async fn wait_until_unused(&self) {
        let mut open_directions = self.state.open_directions.subscribe();
        let waited = tokio::time::timeout(
            Duration::from_secs(10),
            open_directions.wait_for(|open_directions| *open_directions == 0),
        )
        .await;
        assert!(waited.is_ok(), "{} directions of connections are still open", *self.state.open_directions.borrow());
    }

    /// Lets new connections through again, and closes stalled ones.
    pub fn restore(&self) {
        self.state.bytes_left.store(i64::MAX, Ordering::SeqCst);
        self.state.mode.send_replace(Mode::Cut);
        self.state.mode.send_replace(Mode::Open);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
        self.state.mode.send_replace(Mode::Cut);
    }
}

impl ProxyState {
    async fn forward_counted(self: Arc<Self>, from: OwnedReadHalf, to: OwnedWriteHalf, to_broker: bool) {
        self.open_directions.send_modify(|open_directions| *open_directions += 1);
        self.forward(from, to, to_broker).await;
        self.open_directions.send_modify(|open_directions| *open_directions -= 1);
    }

    async fn forward(&self, mut from: OwnedReadHalf, mut to: OwnedWriteHalf, to_broker: bool) {
        let mut mode = self.mode.subscribe();
        let mut buffer = vec![0; 16 * 1024];
        loop {
            if *mode.borrow_and_update() != Mode::Open {
                // This connection has ended, whatever the next mode is: restoring the proxy does not repair it.
                while *mode.borrow_and_update() == Mode::Stalled && mode.changed().await.is_ok() {}
                return;
            }
            let read = tokio::select! {
                read = from.read(&mut buffer) => read,
                _ = mode.changed() => continue,
            };
            let Ok(count @ 1..) = read else { return };
            let allowed = if to_broker { self.take_allowance(count) } else { count };
            if to.write_all(&buffer[..allowed]).await.is_err() {
                return;
            }
            if allowed < count {
                self.mode.send_replace(*self.fault.borrow());
            }
        }
    }

    fn take_allowance(&self, count: usize) -> usize {
        let left = self.bytes_left.fetch_sub(count as i64, Ordering::SeqCst);
        (count as i64).min(left.max(0)) as usize
    }
}
