//! Serves the router over HTTP/1 and HTTP/2, with or without TLS.
//!
//! One task accepts connections; each connection is a task of its own. A connection that sends nothing, or only part of a
//! request's headers, is closed after `idle_timeout`, and the number of connections is limited in total and per address, so
//! that one client cannot use up what the others need. A few connections above the limit are still accepted for health
//! checks.

mod admission;
mod descriptors;
mod invalid;
mod tls;

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::ConnectInfo,
    http::{HeaderValue, Request, Response, StatusCode, header},
};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::ServiceExt;

pub use admission::ConnectionLimits;
use admission::{Admission, Permit};
pub use descriptors::raise_limit;
use invalid::AnswersInvalid;
pub use tls::{Tls, TlsFiles};

/// Pause after a failed accept, for example because the process has no file descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How often failed accepts and rejected connections are logged.
const LOG_EVERY: Duration = Duration::from_secs(10);
/// Requests that one HTTP/2 connection may have in flight.
const MAX_STREAMS: u32 = 250;
/// Largest set of headers of one request.
const MAX_HEADER_BYTES: usize = 64 << 10;
/// How long a client may take to answer a ping on an idle HTTP/2 connection.
const HTTP2_PING_TIMEOUT: Duration = Duration::from_secs(10);
/// Start of every HTTP/2 connection without TLS.
const HTTP2_PREFACE: &[u8; 4] = b"PRI ";

/// How connections are accepted.
#[derive(Clone)]
pub struct HttpConfig {
    pub limits: ConnectionLimits,
    /// Longest time without a complete request header.
    pub idle_timeout: Duration,
    pub tls: Option<Arc<Tls>>,
}

/// What every connection shares.
struct Shared {
    router: Router,
    config: HttpConfig,
    closing: CancellationToken,
}

/// Serves until `closing` is cancelled, then finishes the requests in flight.
pub async fn serve(listener: TcpListener, router: Router, config: HttpConfig, closing: CancellationToken) {
    let admission = Arc::new(Admission::new(config.limits.clone()));
    let shared = Arc::new(Shared { router, config, closing: closing.clone() });
    let connections = TaskTracker::new();
    let mut failures = LogThrottle::default();
    loop {
        let accepted = tokio::select! { () = closing.cancelled() => break, accepted = listener.accept() => accepted };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                if failures.allows() {
                    tracing::error!(%error, "connection not accepted");
                }
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Some(permit) = admission.admit(peer.ip()) else {
            if failures.allows() {
                tracing::warn!(peer = %peer.ip(), open = admission.open(), "connection limit reached");
            }
            continue;
        };
        // Responses are small and must not wait for more data.
        let _ = stream.set_nodelay(true);
        connections.spawn(serve_connection(shared.clone(), stream, peer, permit));
    }
    connections.close();
    connections.wait().await;
}

async fn serve_connection(shared: Arc<Shared>, stream: TcpStream, peer: SocketAddr, permit: Permit) {
    let patience = shared.config.idle_timeout;
    match shared.config.tls.clone() {
        Some(tls) => {
            let Ok(Ok(stream)) = tokio::time::timeout(patience, tls.acceptor().accept(stream)).await else { return };
            let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
            serve_stream(shared, stream, is_http2, peer, permit).await;
        }
        None => {
            let Ok(Some(is_http2)) = tokio::time::timeout(patience, starts_http2(&stream)).await else { return };
            serve_stream(shared, stream, is_http2, peer, permit).await;
        }
    }
}

/// Looks at the first bytes without consuming them. `None`: the client has disconnected.
async fn starts_http2(stream: &TcpStream) -> Option<bool> {
    let mut start = [0; HTTP2_PREFACE.len()];
    loop {
        let count = stream.peek(&mut start).await.ok().filter(|count| *count > 0)?;
        if start[..count] != HTTP2_PREFACE[..count] {
            return Some(false);
        }
        if count == start.len() {
            return Some(true);
        }
        // The socket stays readable, so waiting for readiness would not wait.
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn serve_stream<S>(shared: Arc<Shared>, stream: S, is_http2: bool, peer: SocketAddr, permit: Permit)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let only_health = permit.is_reserve();
    // A WebSocket outlives the HTTP connection, so the permit belongs to the stream.
    let stream = Permitted { stream, _permit: permit };
    let (router, idle_timeout, closing) = (shared.router.clone(), shared.config.idle_timeout, shared.closing.clone());
    let service = hyper::service::service_fn(move |request: Request<Incoming>| {
        let router = router.clone();
        async move {
            if only_health && !request.uri().path().starts_with("/health") {
                return Ok(overloaded());
            }
            let mut request = request.map(Body::new);
            request.extensions_mut().insert(ConnectInfo(peer));
            router.oneshot(request).await
        }
    });
    // An error here is a client that disconnected, timed out or sent something else than HTTP.
    if is_http2 {
        let mut builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
        builder
            .timer(TokioTimer::new())
            .keep_alive_interval(idle_timeout)
            .keep_alive_timeout(HTTP2_PING_TIMEOUT)
            .max_concurrent_streams(MAX_STREAMS)
            .max_header_list_size(MAX_HEADER_BYTES as u32);
        let connection = builder.serve_connection(TokioIo::new(stream), service);
        tokio::pin!(connection);
        tokio::select! {
            _ = connection.as_mut() => return,
            () = closing.cancelled() => connection.as_mut().graceful_shutdown(),
        }
        let _ = connection.await;
    } else {
        let mut builder = hyper::server::conn::http1::Builder::new();
        builder.timer(TokioTimer::new()).header_read_timeout(idle_timeout).max_header_size(MAX_HEADER_BYTES);
        let io = TokioIo::new(AnswersInvalid::new(stream));
        let connection = builder.serve_connection(io, service).with_upgrades();
        tokio::pin!(connection);
        tokio::select! {
            _ = connection.as_mut() => return,
            () = closing.cancelled() => connection.as_mut().graceful_shutdown(),
        }
        let _ = connection.await;
    }
}

/// A stream with its permit.
struct Permitted<S> {
    stream: S,
    _permit: Permit,
}

impl<S: AsyncRead + Unpin> AsyncRead for Permitted<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Permitted<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

/// Answer on a connection above the limit.
fn overloaded() -> Response<Body> {
    let body = r#"{"error":{"code":"UNAVAILABLE","message":"too many connections; try again","requestId":""}}"#;
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

/// Lets one log line through per `LOG_EVERY`.
#[derive(Default)]
struct LogThrottle(Option<std::time::Instant>);

impl LogThrottle {
    fn allows(&mut self) -> bool {
        let now = std::time::Instant::now();
        let allows = self.0.is_none_or(|last| now.duration_since(last) >= LOG_EVERY);
        if allows {
            self.0 = Some(now);
        }
        allows
    }
}
