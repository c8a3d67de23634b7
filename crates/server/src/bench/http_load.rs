//! Sends HTTP requests over loopback on kept-alive connections, one at a time per connection.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use axum::{Router, http::StatusCode, routing::post, serve::ListenerExt};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use super::{baseline_sqlite::PAYLOAD, drain::Server};

const MEASURED_SECONDS: u64 = 4;

/// A server in a separate process, so that the load does not share its threads. Killed on drop.
pub struct Target {
    pub address: SocketAddr,
    pub server: Server,
}

impl Target {
    /// Starts a server that only reads the body and answers 201: the cost of HTTP alone.
    pub async fn bare() -> Result<Target> {
        Target::start(|port| vec!["bench".into(), "--bare-server".into(), port.to_string()], &[]).await
    }

    /// Starts Faena with the API and without a worker.
    pub async fn faena(url: &str) -> Result<Target> {
        Target::faena_with(url, &[]).await
    }

    /// Starts Faena like `faena`, with additional environment variables.
    pub async fn faena_with(url: &str, environment: &[(&str, &str)]) -> Result<Target> {
        let arguments = |port: u16| {
            ["serve", "--roles", "api,engine", "--port", &port.to_string(), "--database-url", url]
                .map(String::from)
                .to_vec()
        };
        Target::start(arguments, environment).await
    }

    /// Starts Faena with its built-in worker.
    pub async fn faena_with_worker(url: &str) -> Result<Target> {
        let arguments =
            |port: u16| ["serve", "--port", &port.to_string(), "--database-url", url].map(String::from).to_vec();
        Target::start(arguments, &[]).await
    }

    async fn start(arguments: impl FnOnce(u16) -> Vec<String>, environment: &[(&str, &str)]) -> Result<Target> {
        let address = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let child = std::process::Command::new(std::env::current_exe()?)
            .args(arguments(address.port()))
            .env("LOG_LEVEL", "warn")
            .envs(environment.iter().copied())
            .stdin(std::process::Stdio::null())
            .spawn()
            .context("cannot start the server")?;
        let target = Target { address, server: Server(child) };
        let deadline = Instant::now() + Duration::from_secs(30);
        while TcpStream::connect(address).await.is_err() {
            ensure!(Instant::now() < deadline, "the server does not listen");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(target)
    }
}

/// Runs `faena bench --bare-server PORT`.
pub async fn serve_bare(port: u16) -> Result<()> {
    let router = Router::new().route(
        "/api/v1/jobs",
        post(|body: axum::body::Bytes| async move { (StatusCode::CREATED, format!("{{\"bytes\":{}}}", body.len())) }),
    );
    let listener = TcpListener::bind(("127.0.0.1", port)).await?;
    axum::serve(listener.tap_io(|stream| drop(stream.set_nodelay(true))), router).await?;
    Ok(())
}

/// Measures the requests per second of the bare server, which stores nothing.
pub async fn bare(connections: usize) -> Result<f64> {
    let target = Target::bare().await?;
    requests_per_second(target.address, connections, job_request()).await
}

/// Measures the submissions per second of Faena.
pub async fn faena(url: &str, connections: usize) -> Result<f64> {
    let target = Target::faena(url).await?;
    requests_per_second(target.address, connections, job_request()).await
}

fn job_request() -> Arc<[u8]> {
    request("/api/v1/jobs", &format!(r#"{{"name":"noop","payload":{PAYLOAD}}}"#))
}

/// Repeats a request for a few seconds. Returns the requests per second.
pub async fn requests_per_second(address: SocketAddr, connections: usize, request: Arc<[u8]>) -> Result<f64> {
    let done = Arc::new(AtomicUsize::new(0));
    let deadline = Instant::now() + Duration::from_secs(MEASURED_SECONDS);
    let started = Instant::now();
    let callers: Vec<_> = (0..connections)
        .map(|_| {
            let (request, done) = (request.clone(), done.clone());
            tokio::spawn(async move {
                let mut connection = Connection::open(address).await?;
                while Instant::now() < deadline {
                    connection.call(&request).await?;
                    done.fetch_add(1, Ordering::Relaxed);
                }
                anyhow::Ok(())
            })
        })
        .collect();
    for caller in callers {
        caller.await??;
    }
    Ok(done.load(Ordering::Relaxed) as f64 / started.elapsed().as_secs_f64())
}

/// Sends `requests` requests over `connections` connections.
pub async fn load(
    address: SocketAddr,
    connections: usize,
    requests: usize,
    path: &str,
    body: &str,
) -> Result<Duration> {
    let request = request(path, body);
    let remaining = Arc::new(AtomicUsize::new(requests));
    let started = Instant::now();
    let callers: Vec<_> = (0..connections)
        .map(|_| {
            let (request, remaining) = (request.clone(), remaining.clone());
            tokio::spawn(async move {
                let mut connection = Connection::open(address).await?;
                while remaining.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1)).is_ok() {
                    connection.call(&request).await?;
                }
                anyhow::Ok(())
            })
        })
        .collect();
    for caller in callers {
        caller.await??;
    }
    Ok(started.elapsed())
}

pub fn request(path: &str, body: &str) -> Arc<[u8]> {
    format!(
        "POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
    .into()
}

pub struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Connection {
    pub async fn open(address: SocketAddr) -> Result<Connection> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Connection { stream, buffer: Vec::with_capacity(4_096) })
    }

    /// Sends a request and reads the whole response, which must be a success.
    pub async fn call(&mut self, request: &[u8]) -> Result<Vec<u8>> {
        let (status, body) = self.exchange(request).await?;
        ensure!((200..300).contains(&status), "the server answered {status}: {}", String::from_utf8_lossy(&body));
        Ok(body)
    }

    /// Sends a request and reads the whole response. Returns its status and body.
    pub async fn exchange(&mut self, request: &[u8]) -> Result<(u16, Vec<u8>)> {
        self.stream.write_all(request).await?;
        self.buffer.clear();
        loop {
            let count = self.stream.read_buf(&mut self.buffer).await?;
            ensure!(count > 0, "the server closed the connection");
            if let Some(end) = find(&self.buffer, b"\r\n\r\n") {
                let head = std::str::from_utf8(&self.buffer[..end])?;
                let status = head.get(9..12).and_then(|status| status.parse().ok()).context("no status")?;
                let length: usize = head
                    .lines()
                    .find_map(|line| line.strip_prefix("content-length: ")?.trim().parse().ok())
                    .context("the response has no content-length")?;
                if self.buffer.len() >= end + 4 + length {
                    return Ok((status, self.buffer[end + 4..end + 4 + length].to_vec()));
                }
            }
        }
    }
}

fn find(text: &[u8], wanted: &[u8]) -> Option<usize> {
    text.windows(wanted.len()).position(|window| window == wanted)
}
