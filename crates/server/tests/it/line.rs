//! A line between workers and a server that a test may cut, or turn into a hole that swallows everything.

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
    Open,
    /// Takes connections and bytes, and passes nothing on. A connection that has lost bytes never carries any again.
    Swallowing,
    /// Only what the server says is lost.
    SwallowingAnswers,
    /// Whoever comes is sent away.
    Shut,
}

struct Shared {
    target: RwLock<SocketAddr>,
    mode: RwLock<Mode>,
    cut: RwLock<CancellationToken>,
}

/// Dropping it cuts all connections.
pub struct Line {
    pub url: String,
    shared: Arc<Shared>,
    over: CancellationToken,
}

impl Line {
    pub async fn to(url: &str) -> Line {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url_here = format!("http://{}", listener.local_addr().unwrap());
        let shared = Arc::new(Shared {
            target: RwLock::new(address(url)),
            mode: RwLock::new(Mode::Open),
            cut: RwLock::default(),
        });
        let over = CancellationToken::new();
        tokio::spawn(over.clone().run_until_cancelled_owned(listen(listener, shared.clone(), over.clone())));
        Line { url: url_here, shared, over }
    }

    /// Ends every connection there is. New ones are taken.
    pub fn cut(&self) {
        std::mem::take(&mut *self.shared.cut.write().unwrap()).cancel();
    }

    /// New connections lead to another server.
    pub fn turn_to(&self, url: &str) {
        *self.shared.target.write().unwrap() = address(url);
    }

    pub fn swallow(&self) {
        *self.shared.mode.write().unwrap() = Mode::Swallowing;
    }

    pub fn swallow_answers(&self) {
        *self.shared.mode.write().unwrap() = Mode::SwallowingAnswers;
    }

    pub fn shut(&self) {
        *self.shared.mode.write().unwrap() = Mode::Shut;
        self.cut();
    }

    /// What comes from now on is passed on. Connections that have lost something stay dead, and open.
    pub fn open(&self) {
        *self.shared.mode.write().unwrap() = Mode::Open;
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.over.cancel();
    }
}

fn address(url: &str) -> SocketAddr {
    url.strip_prefix("http://").unwrap().parse().unwrap()
}

async fn listen(listener: TcpListener, shared: Arc<Shared>, over: CancellationToken) {
    loop {
        let Ok((near, _)) = listener.accept().await else { continue };
        if *shared.mode.read().unwrap() == Mode::Shut {
            continue;
        }
        let cut = shared.cut.read().unwrap().clone();
        let (shared, over) = (shared.clone(), over.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = cut.cancelled() => {}
                () = over.cancelled() => {}
                () = carry(near, shared) => {}
            }
        });
    }
}

async fn carry(near: TcpStream, shared: Arc<Shared>) {
    let target = *shared.target.read().unwrap();
    let Ok(far) = TcpStream::connect(target).await else { return };
    let _ = (near.set_nodelay(true), far.set_nodelay(true));
    let ((near_in, near_out), (far_in, far_out)) = (near.into_split(), far.into_split());
    tokio::select! {
        () = pass(near_in, far_out, &shared, &[Mode::Swallowing]) => {}
        () = pass(far_in, near_out, &shared, &[Mode::Swallowing, Mode::SwallowingAnswers]) => {}
    }
}

async fn pass(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    shared: &Shared,
    swallows: &[Mode],
) {
    let mut buffer = vec![0; 64 << 10];
    let mut dead = false;
    loop {
        let Ok(count @ 1..) = from.read(&mut buffer).await else {
            if dead {
                // Not even the end comes through.
                std::future::pending::<()>().await;
            }
            return;
        };
        dead |= swallows.contains(&shared.mode.read().unwrap());
        if !dead && to.write_all(&buffer[..count]).await.is_err() {
            return;
        }
    }
}
