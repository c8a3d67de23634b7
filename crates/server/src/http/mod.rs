//! Serves the router over HTTP/1 and HTTP/2, with or without TLS.
//!
//! One task accepts connections; each connection is a task of its own. A connection without a complete request is closed
//! after `idle_timeout`, or earlier if a new connection needs its slot. A connection whose peer does not read is closed after
//! `write_timeout`. The number of connections is limited in total and per address, so that one client cannot use up what
//! the others need.

mod admission;
mod answers;
mod descriptors;
mod invalid;
mod response;
mod stream;
mod tls;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Router,
    body::Body,
    extract::ConnectInfo,
    http::{HeaderValue, Request, Response, StatusCode, header},
};
use faena_api::{ByteBudget, ReadMeter};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    time::MissedTickBehavior,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

pub use admission::ConnectionLimits;
use admission::{Admission, Permit, Tracked};
pub use answers::Answers;
use answers::{ConnectionAnswers, Unsent};
pub use descriptors::raise_limit;
use invalid::ErrorBodyStream;
use response::{ResponseBody, Unread};
use stream::{ClientStream, WriteTimeout};
pub use tls::{Tls, TlsFiles};

/// Pause after a failed accept, for example because the process has no file descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How often failed accepts and rejected connections are logged.
const LOG_EVERY: Duration = Duration::from_secs(10);
/// Requests that one HTTP/2 connection may have in flight.
const MAX_STREAMS: u32 = 32;
/// Data of requests that an HTTP/2 connection buffers while no handler reads it.
const HTTP2_WINDOW_BYTES: u32 = 128 << 10;
/// Data of one response that an HTTP/2 connection buffers while its peer does not read. The rest is counted (`answers.rs`).
const HTTP2_UNSENT_BYTES: usize = 32 << 10;
/// How long the requests of an HTTP/2 connection may take to end after the server has begun to close it.
const HTTP2_CLOSE_TIMEOUT: Duration = Duration::from_secs(10);
/// Buffer of an HTTP/1 connection for headers and for responses that are not sent yet. Holds the largest set of headers.
const HTTP1_BUFFER_BYTES: usize = MAX_HEADER_BYTES + (8 << 10);
/// Largest set of headers of one request.
const MAX_HEADER_BYTES: usize = 64 << 10;
/// How long a client may take to answer a ping on an idle HTTP/2 connection.
const HTTP2_PING_TIMEOUT: Duration = Duration::from_secs(10);
/// How often an HTTP/2 connection is checked for answers that are not read.
const CHECK_EVERY: Duration = Duration::from_secs(1);
/// Start of every HTTP/2 connection without TLS.
const HTTP2_PREFACE: &[u8; 4] = b"PRI ";

/// How connections are accepted.
#[derive(Clone)]
pub struct HttpConfig {
    pub limits: ConnectionLimits,
    /// Longest time without a complete request header.
    pub idle_timeout: Duration,
    /// How long a peer may read nothing of its response.
    pub write_timeout: Duration,
    pub answers: Answers,
    pub tls: Option<Arc<Tls>>,
}

/// What every connection shares.
struct Shared {
    router: Router,
    config: HttpConfig,
    budget: ByteBudget,
    closing: CancellationToken,
}

/// Serves until `closing` is cancelled, then finishes the requests in flight.
///
/// Headers and messages of WebSockets that are larger than usual take their memory from `budget`.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    config: HttpConfig,
    budget: ByteBudget,
    closing: CancellationToken,
) {
    let admission = Arc::new(Admission::new(config.limits.clone()));
    let shared = Arc::new(Shared { router, config, budget, closing: closing.clone() });
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
    let (idle_timeout, tracked) = (shared.config.idle_timeout, permit.tracked());
    // Until the first byte, or the end of the handshake, the connection is idle.
    let waiting = async {
        Some(match shared.config.tls.clone() {
            Some(tls) => {
                let stream = tls.acceptor().accept(stream).await.ok()?;
                let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                (Transport::Tls(Box::new(stream)), is_http2)
            }
            None => {
                let is_http2 = starts_http2(&stream).await?;
                (Transport::Plain(stream), is_http2)
            }
        })
    };
    let opened = tokio::select! {
        opened = tokio::time::timeout(idle_timeout, waiting) => opened,
        () = tracked.evicted() => return,
    };
    match opened {
        Ok(Some((Transport::Tls(stream), is_http2))) => serve_stream(shared, *stream, is_http2, peer, permit).await,
        Ok(Some((Transport::Plain(stream), is_http2))) => serve_stream(shared, stream, is_http2, peer, permit).await,
        Ok(None) | Err(_) => {}
    }
}

enum Transport {
    Plain(TcpStream),
    Tls(Box<tokio_rustls::server::TlsStream<TcpStream>>),
}

/// Peeks at the first bytes. Returns `None` if the client has disconnected.
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
    let tracked = permit.tracked();
    // HTTP/2 has its own limit for headers.
    let meter = (!is_http2).then(|| ReadMeter::new(&shared.budget));
    let write_timeout = WriteTimeout { timeout: shared.config.write_timeout, answers: shared.config.answers.clone() };
    let stream = ClientStream::new(stream, permit, meter.clone(), write_timeout);
    let (evicted, served) = (tracked.clone(), async {
        if is_http2 {
            serve_http2(&shared, stream, peer, tracked).await;
        } else {
            serve_http1(&shared, stream, peer, tracked, meter).await;
        }
    });
    tokio::select! { () = served => {}, () = evicted.evicted() => {} }
}

async fn serve_http1<S>(
    shared: &Shared,
    stream: ClientStream<S>,
    peer: SocketAddr,
    tracked: Tracked,
    meter: Option<ReadMeter>,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let caller = Caller::new(shared, peer, tracked);
    let service = hyper::service::service_fn(move |request: Request<Incoming>| {
        let (caller, guard, meter) = (caller.clone(), caller.tracked.begin(), meter.clone());
        let mut request = boxed(request);
        async move {
            if let Some(meter) = &meter {
                meter.stop();
                request.extensions_mut().insert(meter.clone());
            }
            let (response, unsent) = caller.respond(request).await;
            if response.status() == StatusCode::SWITCHING_PROTOCOLS {
                caller.tracked.begin_forever();
                return Ok::<_, std::convert::Infallible>(response);
            }
            Ok(response.map(|body| Body::new(ResponseBody::http1(body, guard, meter, unsent))))
        }
    });
    let mut builder = hyper::server::conn::http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(shared.config.idle_timeout)
        .max_header_size(MAX_HEADER_BYTES)
        .max_buf_size(HTTP1_BUFFER_BYTES);
    let io = TokioIo::new(ErrorBodyStream::new(stream));
    let connection = builder.serve_connection(io, service).with_upgrades();
    tokio::pin!(connection);
    // An error here is a client that disconnected, timed out or sent something other than HTTP.
    tokio::select! {
        _ = connection.as_mut() => return,
        () = shared.closing.cancelled() => connection.as_mut().graceful_shutdown(),
    }
    let _ = connection.await;
}

async fn serve_http2<S>(shared: &Shared, stream: ClientStream<S>, peer: SocketAddr, tracked: Tracked)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (caller, unread) = (Caller::new(shared, peer, tracked.clone()), Unread::default());
    let responses = unread.clone();
    let service = hyper::service::service_fn(move |request: Request<Incoming>| {
        let (caller, guard, unread) = (caller.clone(), caller.tracked.begin(), responses.clone());
        let request = boxed(request);
        async move {
            let (response, unsent) = caller.respond(request).await;
            let response = response.map(|body| Body::new(ResponseBody::http2(body, guard, &unread, unsent)));
            Ok::<_, std::convert::Infallible>(response)
        }
    });
    let idle_timeout = shared.config.idle_timeout;
    let mut builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .keep_alive_interval(idle_timeout)
        .keep_alive_timeout(HTTP2_PING_TIMEOUT)
        .max_concurrent_streams(MAX_STREAMS)
        .initial_connection_window_size(HTTP2_WINDOW_BYTES)
        .initial_stream_window_size(HTTP2_WINDOW_BYTES)
        .max_send_buf_size(HTTP2_UNSENT_BYTES)
        .max_header_list_size(MAX_HEADER_BYTES as u32);
    let connection = builder.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    let write_timeout = WriteTimeout { timeout: shared.config.write_timeout, answers: shared.config.answers.clone() };
    let mut checks = tokio::time::interval((idle_timeout.min(write_timeout.timeout) / 2).min(CHECK_EVERY));
    checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = connection.as_mut() => return,
            () = shared.closing.cancelled() => {
                connection.as_mut().graceful_shutdown();
                let _ = connection.await;
                return;
            }
            _ = checks.tick() => {
                if unread.is_stalled(write_timeout.current()) {
                    return;
                }
                // A peer that answers pings would otherwise keep its connection without a request forever.
                if u128::from(tracked.idle_ms()) >= idle_timeout.as_millis() {
                    break;
                }
            }
        }
    }
    connection.as_mut().graceful_shutdown();
    let _ = tokio::time::timeout(HTTP2_CLOSE_TIMEOUT, connection).await;
}

/// The client of one connection.
#[derive(Clone)]
struct Caller {
    router: Router,
    peer: SocketAddr,
    tracked: Tracked,
    answers: Answers,
    connection: ConnectionAnswers,
}

impl Caller {
    fn new(shared: &Shared, peer: SocketAddr, tracked: Tracked) -> Caller {
        let (router, answers) = (shared.router.clone(), shared.config.answers.clone());
        Caller { router, peer, tracked, answers, connection: ConnectionAnswers::default() }
    }

    async fn respond(&self, mut request: Box<Request<Body>>) -> (Response<Body>, Option<Unsent>) {
        if self.tracked.is_above_limit() && !request.uri().path().starts_with("/health") {
            let mut response = unavailable("too many connections; try again");
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            return (response, None);
        }
        request.extensions_mut().insert(ConnectInfo(self.peer));
        self.answers.handle(self.router.clone(), request, &self.connection).await
    }
}

/// Moves a request out of the futures that handle it: each of them would reserve its size, even while it waits.
fn boxed(request: Request<Incoming>) -> Box<Request<Body>> {
    Box::new(request.map(Body::new))
}

/// Response to a request that the server has no capacity for at the moment.
fn unavailable(message: &str) -> Response<Body> {
    let body = format!(r#"{{"error":{{"code":"UNAVAILABLE","message":"{message}","requestId":""}}}}"#);
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
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
