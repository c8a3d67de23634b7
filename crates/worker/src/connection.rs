//! Connects a session to the server: opens the WebSocket, moves frames, reconnects.
//!
//! Each worker has one such task. Each turn reads every frame that has arrived, takes every message of the handlers,
//! and flushes once at the end: under load, many frames share one system call.

use std::{
    future::{Future, poll_fn},
    pin::Pin,
    sync::Arc,
    task::{Context as Task, Poll},
    time::Duration,
};

use futures_util::{Sink, Stream, future::FusedFuture};
use tokio::{
    net::TcpStream,
    sync::mpsc,
    time::{Instant, Sleep, sleep, timeout},
};
use tokio_tungstenite::{
    MaybeTlsStream, WebSocketStream, connect_async_with_config,
    tungstenite::{self, Message, client::IntoClientRequest, http::HeaderValue, protocol::WebSocketConfig},
};

use crate::{
    Error,
    address::{Address, ensure_crypto},
    api::{rejection, retry_after},
    backoff::Backoff,
    context::HandlerMessage,
    outgoing,
    session::{CloseReason, Session},
    settings::Settings,
};

type WebSocket = WebSocketStream<MaybeTlsStream<TcpStream>>;

/// Handlers wait when this many of their messages are queued.
const MAX_MESSAGES: usize = 1_024;
const MESSAGES_PER_TURN: usize = 256;
/// After this many frames the task yields to other tasks.
const FRAMES_PER_TURN: usize = 512;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// A thousand workers in one process must be cheap, and tungstenite's default of 128 KiB each is not. 16 KiB hold about fifty jobs.
const BUFFER_BYTES: usize = 16 * 1024;
/// Large enough for a payload of 1 MiB and the results of many steps.
const MAX_FRAME_BYTES: usize = 64 * 1024 * 1024;

/// Why a connection has ended.
enum Ended {
    /// The worker has shut down.
    Done,
    Lost(String),
    Rejected(Error),
}

/// Runs a worker until it has shut down, and reconnects whenever the connection is lost.
///
/// # Errors
///
/// Returns the rejection of the server if it never accepted this worker and a retry would not help.
pub(crate) async fn run(settings: Settings, shutdown: impl FusedFuture<Output = ()>) -> Result<(), Error> {
    let (sender, messages) = mpsc::channel(MAX_MESSAGES);
    let session = Session::new(Arc::new(settings), sender);
    let shutdown = std::pin::pin!(shutdown);
    let timer = Box::pin(sleep(Duration::ZERO));
    let mut driver = Driver { session, messages, inbox: Vec::with_capacity(MESSAGES_PER_TURN), shutdown, timer };
    let mut backoff = Backoff::new();
    loop {
        let settings = driver.session.settings.clone();
        let ended = match driver.while_disconnected(connect(&settings.address)).await {
            None => return Ok(()),
            Some(Err(error)) => Ended::from(error),
            Some(Ok(socket)) => driver.run_connection(socket).await,
        };
        let was_registered = driver.session.is_registered();
        driver.session.on_disconnected();
        let rejection = match ended {
            Ended::Done => return Ok(()),
            Ended::Rejected(error) if !driver.session.was_registered && is_permanent(&error) => return Err(error),
            Ended::Rejected(error) => {
                tracing::warn!(url = ?settings.address, %error, "connection rejected by the server");
                Some(error)
            }
            Ended::Lost(reason) if was_registered => {
                let jobs = driver.session.runs.in_flight_count();
                tracing::warn!(url = ?settings.address, reason, jobs, "connection lost, reconnecting");
                None
            }
            Ended::Lost(reason) => {
                tracing::warn!(url = ?settings.address, reason, "cannot connect, retrying");
                None
            }
        };
        if was_registered {
            backoff.reset();
        }
        if driver.while_disconnected(sleep(backoff.delay_after(rejection.as_ref()))).await.is_none() {
            return Ok(());
        }
    }
}

/// Returns whether a retry would not help: the token is wrong, or the address is not a Faena server.
fn is_permanent(error: &Error) -> bool {
    matches!(error, Error::Response { status, .. } if (400..500).contains(status) && ![408, 409, 429].contains(status))
}

impl From<tungstenite::Error> for Ended {
    fn from(error: tungstenite::Error) -> Ended {
        match error {
            tungstenite::Error::Http(response) => {
                let (status, delay) = (response.status().as_u16(), retry_after(response.headers()));
                Ended::Rejected(rejection(status, delay, response.body().as_deref().unwrap_or_default()))
            }
            tungstenite::Error::Io(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
                Ended::Lost("connection refused".into())
            }
            error => Ended::Lost(error.to_string()),
        }
    }
}

async fn connect(address: &Address) -> Result<WebSocket, tungstenite::Error> {
    let mut request = address.websocket("/api/v1/workers/connect").into_client_request()?;
    if let Some(token) = address.token() {
        let value = HeaderValue::from_str(&format!("Bearer {token}"))?;
        request.headers_mut().insert("authorization", value);
    }
    ensure_crypto();
    let config = WebSocketConfig::default()
        .read_buffer_size(BUFFER_BYTES)
        .write_buffer_size(BUFFER_BYTES)
        .max_message_size(Some(MAX_FRAME_BYTES))
        .max_frame_size(Some(MAX_FRAME_BYTES));
    // Frames are already collected; Nagle's algorithm would only delay them.
    let disable_nagle = true;
    let connecting = connect_async_with_config(request, Some(config), disable_nagle);
    match timeout(CONNECT_TIMEOUT, connecting).await {
        Ok(connected) => connected.map(|(socket, _)| socket),
        Err(_) => Err(tungstenite::Error::Io(std::io::ErrorKind::TimedOut.into())),
    }
}

/// Feeds a session with frames, handler messages and time.
struct Driver<'a, S> {
    session: Session,
    messages: mpsc::Receiver<HandlerMessage>,
    inbox: Vec<HandlerMessage>,
    shutdown: Pin<&'a mut S>,
    timer: Pin<Box<Sleep>>,
}

struct Connection {
    socket: WebSocket,
    /// Whether frames were written since the last flush.
    needs_flush: bool,
    /// Whether the server does not read: nothing more is written until it does.
    is_blocked: bool,
}

impl<S: FusedFuture<Output = ()>> Driver<'_, S> {
    /// Waits for `work` while there is no connection. Handlers continue, and so does a shutdown.
    ///
    /// Returns `None` if the worker has shut down meanwhile.
    async fn while_disconnected<T>(&mut self, work: impl Future<Output = T>) -> Option<T> {
        let mut work = std::pin::pin!(work);
        poll_fn(|task| {
            if let Poll::Ready(value) = work.as_mut().poll(task) {
                return Poll::Ready(Some(value));
            }
            while self.poll_messages(task) {}
            if self.poll_timers(task) { Poll::Ready(None) } else { Poll::Pending }
        })
        .await
    }

    async fn run_connection(&mut self, socket: WebSocket) -> Ended {
        self.session.on_connected();
        let mut connection = Connection { socket, needs_flush: false, is_blocked: false };
        let mut registration_timeout = Box::pin(sleep(CONNECT_TIMEOUT));
        let ended = poll_fn(|task| {
            if !self.session.is_registered() && registration_timeout.as_mut().poll(task).is_ready() {
                return Poll::Ready(Ended::Lost("the server did not answer the registration".into()));
            }
            self.poll_connection(&mut connection, task)
        })
        .await;
        if let Ended::Done = ended {
            let _ = timeout(CLOSE_TIMEOUT, leave(&mut connection.socket)).await;
        }
        ended
    }

    /// Reads, handles and writes everything that is possible without waiting.
    fn poll_connection(&mut self, connection: &mut Connection, task: &mut Task<'_>) -> Poll<Ended> {
        let mut frames = 0;
        if connection.is_blocked
            && let Poll::Ready(ended) = connection.poll_flush(task)
        {
            return Poll::Ready(ended);
        }
        loop {
            let frames_before = frames;
            if let Poll::Ready(ended) = self.poll_read(connection, task, &mut frames) {
                return Poll::Ready(ended);
            }
            let took_messages = !connection.is_blocked && self.poll_messages(task);
            if let Poll::Ready(ended) = self.poll_write(connection, task) {
                return Poll::Ready(ended);
            }
            if frames >= FRAMES_PER_TURN {
                task.waker().wake_by_ref();
                break;
            }
            if frames == frames_before && !took_messages {
                break;
            }
        }
        let is_over = self.poll_timers(task);
        // A heartbeat may have become due.
        if let Poll::Ready(ended) = self.poll_write(connection, task) {
            return Poll::Ready(ended);
        }
        match self.session.close_reason.take() {
            Some(CloseReason::Rejected(error)) => return Poll::Ready(Ended::Rejected(error)),
            Some(CloseReason::Silence) => return Poll::Ready(Ended::Lost("the server sent nothing in time".into())),
            None if is_over => return Poll::Ready(Ended::Done),
            None => {}
        }
        if connection.is_blocked { Poll::Pending } else { connection.poll_flush(task) }
    }

    fn poll_read(&mut self, connection: &mut Connection, task: &mut Task<'_>, frames: &mut usize) -> Poll<Ended> {
        let now = Instant::now();
        while *frames < FRAMES_PER_TURN {
            match Pin::new(&mut connection.socket).poll_next(task) {
                Poll::Ready(Some(Ok(Message::Text(text)))) => self.session.on_frame(&text, now),
                Poll::Ready(Some(Ok(Message::Close(frame)))) => {
                    let reason = frame.map(|frame| frame.reason.to_string()).filter(|reason| !reason.is_empty());
                    return Poll::Ready(Ended::Lost(reason.unwrap_or_else(|| "closed by the server".into())));
                }
                Poll::Ready(Some(Ok(_))) => {}
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Ended::Lost(error.to_string())),
                Poll::Ready(None) => return Poll::Ready(Ended::Lost("closed by the server".into())),
                Poll::Pending => break,
            }
            *frames += 1;
        }
        Poll::Pending
    }

    /// Passes handler messages to the session. Returns `true` if there may be more.
    fn poll_messages(&mut self, task: &mut Task<'_>) -> bool {
        let took = self.messages.poll_recv_many(task, &mut self.inbox, MESSAGES_PER_TURN).is_ready();
        for message in self.inbox.drain(..) {
            self.session.on_message(message);
        }
        took
    }

    fn poll_write(&mut self, connection: &mut Connection, task: &mut Task<'_>) -> Poll<Ended> {
        while !connection.is_blocked && !self.session.outbox.is_empty() {
            match Pin::new(&mut connection.socket).poll_ready(task) {
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(error)) => return Poll::Ready(Ended::Lost(error.to_string())),
                Poll::Pending => {
                    connection.is_blocked = true;
                    break;
                }
            }
            let Some(text) = self.session.outbox.pop_front() else { break };
            connection.needs_flush = true;
            if let Err(error) = Pin::new(&mut connection.socket).start_send(Message::Text(text)) {
                return Poll::Ready(Ended::Lost(error.to_string()));
            }
        }
        Poll::Pending
    }

    /// Handles the shutdown signal and due timers. Returns `true` if the worker has shut down.
    fn poll_timers(&mut self, task: &mut Task<'_>) -> bool {
        let now = Instant::now();
        if !self.shutdown.is_terminated() && self.shutdown.as_mut().poll(task).is_ready() {
            self.session.shut_down(now);
        }
        self.session.tick(now);
        if let Some(wake_at) = self.session.wake_at() {
            if wake_at != self.timer.deadline() {
                self.timer.as_mut().reset(wake_at);
            }
            if self.timer.as_mut().poll(task).is_ready() {
                task.waker().wake_by_ref();
            }
        }
        self.session.is_over(now)
    }
}

impl Connection {
    fn poll_flush(&mut self, task: &mut Task<'_>) -> Poll<Ended> {
        if self.needs_flush {
            match Pin::new(&mut self.socket).poll_flush(task) {
                Poll::Ready(Ok(())) => (self.needs_flush, self.is_blocked) = (false, false),
                Poll::Ready(Err(error)) => return Poll::Ready(Ended::Lost(error.to_string())),
                Poll::Pending => self.is_blocked = true,
            }
        }
        Poll::Pending
    }
}

async fn leave(socket: &mut WebSocket) -> Result<(), tungstenite::Error> {
    use futures_util::SinkExt;
    socket.send(Message::Text(outgoing::leave())).await?;
    socket.close(None).await
}
