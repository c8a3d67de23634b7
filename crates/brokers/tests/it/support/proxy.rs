//! A line to a broker that can be cut or stalled, at once or in the middle of what is being sent.

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
    /// Nothing gets through, and nobody is told.
    Stalled,
    /// Every connection is closed, new ones too.
    Cut,
}

pub struct Proxy {
    port: u16,
    line: Arc<Line>,
    accepting: tokio::task::JoinHandle<()>,
}

struct Line {
    mode: watch::Sender<Mode>,
    /// How many more bytes go to the broker before `fault` happens.
    budget: AtomicI64,
    fault: watch::Sender<Mode>,
    /// How many connections there are, counted from either end.
    ends: watch::Sender<usize>,
}

impl Proxy {
    pub async fn to(port: u16) -> Proxy {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
        let own = listener.local_addr().expect("its address").port();
        let line = Arc::new(Line {
            mode: watch::Sender::new(Mode::Open),
            budget: AtomicI64::new(i64::MAX),
            fault: watch::Sender::new(Mode::Open),
            ends: watch::Sender::new(0),
        });
        let shared = line.clone();
        let accepting = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                if *shared.mode.borrow() == Mode::Cut {
                    continue;
                }
                if let Ok(broker) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await {
                    let ((from_client, to_client), (from_broker, to_broker)) =
                        (client.into_split(), broker.into_split());
                    tokio::spawn(shared.clone().carry(from_client, to_broker, true));
                    tokio::spawn(shared.clone().carry(from_broker, to_client, false));
                }
            }
        });
        Proxy { port: own, line, accepting }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn cut(&self) {
        self.line.mode.send_replace(Mode::Cut);
    }

    pub fn stall(&self) {
        self.line.mode.send_replace(Mode::Stalled);
    }

    /// Cuts as soon as this many more bytes have gone to the broker.
    pub fn cut_after(&self, bytes: i64) {
        self.line.fault.send_replace(Mode::Cut);
        self.line.budget.store(bytes, Ordering::SeqCst);
    }

    /// Stalls as soon as this many more bytes have gone to the broker.
    pub fn stall_after(&self, bytes: i64) {
        self.line.fault.send_replace(Mode::Stalled);
        self.line.budget.store(bytes, Ordering::SeqCst);
    }

    pub fn is_whole(&self) -> bool {
        *self.line.mode.borrow() == Mode::Open
    }

    /// Fails if somebody keeps a connection.
    pub async fn wait_until_unused(&self) {
        let mut ends = self.line.ends.subscribe();
        let waited = tokio::time::timeout(Duration::from_secs(10), ends.wait_for(|ends| *ends == 0)).await;
        assert!(waited.is_ok(), "{} ends of connections are still there", *self.line.ends.borrow());
    }

    /// New connections get through again. Those that were stalled are closed.
    pub fn heal(&self) {
        self.line.budget.store(i64::MAX, Ordering::SeqCst);
        self.line.mode.send_replace(Mode::Cut);
        self.line.mode.send_replace(Mode::Open);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
        self.line.mode.send_replace(Mode::Cut);
    }
}

impl Line {
    async fn carry(self: Arc<Self>, from: OwnedReadHalf, to: OwnedWriteHalf, to_broker: bool) {
        self.ends.send_modify(|ends| *ends += 1);
        self.pass_on(from, to, to_broker).await;
        self.ends.send_modify(|ends| *ends -= 1);
    }

    async fn pass_on(&self, mut from: OwnedReadHalf, mut to: OwnedWriteHalf, to_broker: bool) {
        let mut mode = self.mode.subscribe();
        let mut buffer = vec![0; 16 * 1024];
        loop {
            if *mode.borrow_and_update() != Mode::Open {
                // Whatever comes after, this connection is over: a fault does not heal the connections it met.
                while *mode.borrow_and_update() == Mode::Stalled && mode.changed().await.is_ok() {}
                return;
            }
            let read = tokio::select! {
                read = from.read(&mut buffer) => read,
                _ = mode.changed() => continue,
            };
            let Ok(count @ 1..) = read else { return };
            let allowed = if to_broker { self.allowance(count) } else { count };
            if to.write_all(&buffer[..allowed]).await.is_err() {
                return;
            }
            if allowed < count {
                self.mode.send_replace(*self.fault.borrow());
            }
        }
    }

    fn allowance(&self, count: usize) -> usize {
        let left = self.budget.fetch_sub(count as i64, Ordering::SeqCst);
        (count as i64).min(left.max(0)) as usize
    }
}
