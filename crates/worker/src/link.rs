//! Between a session and the server: connects, moves frames, connects again.
//!
//! One task per worker. In each turn it reads every frame that has come, takes every note of its handlers, and flushes once,
//! when there is nothing more to do: under load many frames share one system call.

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
    backoff::Backoff,
    client::refusal,
    context::Note,
    definition::Definition,
    outgoing,
    session::{Session, Verdict},
};

type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;

/// Handlers wait when so many notes have not been taken.
const NOTES: usize = 1_024;
const NOTES_AT_ONCE: usize = 256;
/// After so many frames the others have their turn.
const FRAMES_PER_TURN: usize = 512;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// A thousand workers in one process must be cheap: tungstenite's own 128 KiB each would not be. 16 KiB hold some fifty jobs.
const BUFFER_BYTES: usize = 16 * 1024;

/// A payload of 1 MiB, with the results of many steps.
const LARGEST_FRAME_BYTES: usize = 64 * 1024 * 1024;

/// Why a conversation ended.
enum End {
    /// The worker is done.
    Over,
    Lost(String),
    Refused(Error),
}

pub(crate) async fn run(definition: Definition, shutdown: impl FusedFuture<Output = ()>) -> Result<(), Error> {
    let (sender, notes) = mpsc::channel(NOTES);
    let session = Session::new(Arc::new(definition), sender);
    let shutdown = std::pin::pin!(shutdown);
    let timer = Box::pin(sleep(Duration::ZERO));
    let mut link = Link { session, notes, inbox: Vec::with_capacity(NOTES_AT_ONCE), shutdown, timer };
    let mut backoff = Backoff::new();
    loop {
        let definition = link.session.definition.clone();
        let lost = match link.meanwhile(connect(&definition.address)).await {
            None => return Ok(()),
            Some(Err(error)) => End::from(error),
            Some(Ok(socket)) => link.converse(socket).await,
        };
        let registered = link.session.is_registered();
        link.session.disconnected();
        match lost {
            End::Over => return Ok(()),
            End::Refused(error) if !link.session.was_registered && is_final(&error) => return Err(error),
            End::Refused(error) => tracing::warn!(%error, "the server refused the connection"),
            End::Lost(why) => tracing::warn!(url = ?definition.address, why, "no connection to the server"),
        }
        if registered {
            backoff.reset();
        }
        if link.meanwhile(sleep(backoff.next_delay())).await.is_none() {
            return Ok(());
        }
    }
}

/// Waiting does not help: a wrong token, or something that is no Faena server.
fn is_final(error: &Error) -> bool {
    matches!(error, Error::Refused { status, .. } if (400..500).contains(status) && ![408, 409, 429].contains(status))
}

impl From<tungstenite::Error> for End {
    fn from(error: tungstenite::Error) -> End {
        match error {
            tungstenite::Error::Http(answer) => {
                let status = answer.status().as_u16();
                End::Refused(refusal(status, answer.body().as_deref().unwrap_or_default()))
            }
            error => End::Lost(error.to_string()),
        }
    }
}

async fn connect(address: &Address) -> Result<Socket, tungstenite::Error> {
    let mut request = address.websocket("/api/v1/workers/connect").into_client_request()?;
    if let Some(token) = address.token() {
        let value = HeaderValue::from_str(&format!("Bearer {token}"))?;
        request.headers_mut().insert("authorization", value);
    }
    ensure_crypto();
    let config = WebSocketConfig::default()
        .read_buffer_size(BUFFER_BYTES)
        .write_buffer_size(BUFFER_BYTES)
        .max_message_size(Some(LARGEST_FRAME_BYTES))
        .max_frame_size(Some(LARGEST_FRAME_BYTES));
    // Frames are already put together; holding them back any longer gains nothing.
    let without_delay = true;
    let connecting = connect_async_with_config(request, Some(config), without_delay);
    match timeout(CONNECT_TIMEOUT, connecting).await {
        Ok(connected) => connected.map(|(socket, _)| socket),
        Err(_) => Err(tungstenite::Error::Io(std::io::ErrorKind::TimedOut.into())),
    }
}

struct Link<'a, S> {
    session: Session,
    notes: mpsc::Receiver<Note>,
    inbox: Vec<Note>,
    shutdown: Pin<&'a mut S>,
    timer: Pin<Box<Sleep>>,
}

/// What a conversation has not got rid of.
struct Wire {
    socket: Socket,
    /// Something was handed over since the last flush.
    unflushed: bool,
    /// The far end does not read: nothing more is handed over until it does.
    choked: bool,
}

impl<S: FusedFuture<Output = ()>> Link<'_, S> {
    /// Waits for something while there is no connection. Handlers go on, and so does the end. `None`: the worker is done.
    async fn meanwhile<T>(&mut self, work: impl Future<Output = T>) -> Option<T> {
        let mut work = std::pin::pin!(work);
        poll_fn(|task| {
            if let Poll::Ready(value) = work.as_mut().poll(task) {
                return Poll::Ready(Some(value));
            }
            while self.take_notes(task) {}
            if self.take_time(task) { Poll::Ready(None) } else { Poll::Pending }
        })
        .await
    }

    async fn converse(&mut self, socket: Socket) -> End {
        self.session.connected();
        let mut wire = Wire { socket, unflushed: false, choked: false };
        let mut patience = Box::pin(sleep(CONNECT_TIMEOUT));
        let end = poll_fn(|task| {
            if !self.session.is_registered() && patience.as_mut().poll(task).is_ready() {
                return Poll::Ready(End::Lost("the server did not answer the registration".into()));
            }
            self.turn(&mut wire, task)
        })
        .await;
        if let End::Over = end {
            let _ = timeout(CLOSE_TIMEOUT, leave(&mut wire.socket)).await;
        }
        end
    }

    /// Moves everything that can be moved now.
    fn turn(&mut self, wire: &mut Wire, task: &mut Task<'_>) -> Poll<End> {
        let mut frames = 0;
        if wire.choked
            && let Poll::Ready(end) = wire.flush(task)
        {
            return Poll::Ready(end);
        }
        loop {
            let before = frames;
            if let Poll::Ready(end) = self.read(wire, task, &mut frames) {
                return Poll::Ready(end);
            }
            let took_notes = !wire.choked && self.take_notes(task);
            if let Poll::Ready(end) = self.write(wire, task) {
                return Poll::Ready(end);
            }
            if frames >= FRAMES_PER_TURN {
                task.waker().wake_by_ref();
                break;
            }
            if frames == before && !took_notes {
                break;
            }
        }
        let over = self.take_time(task);
        // The time may have brought a heartbeat.
        if let Poll::Ready(end) = self.write(wire, task) {
            return Poll::Ready(end);
        }
        match self.session.verdict.take() {
            Some(Verdict::Refused(error)) => return Poll::Ready(End::Refused(error)),
            Some(Verdict::Silent) => return Poll::Ready(End::Lost("the server is silent".into())),
            None if over => return Poll::Ready(End::Over),
            None => {}
        }
        if wire.choked { Poll::Pending } else { wire.flush(task) }
    }

    fn read(&mut self, wire: &mut Wire, task: &mut Task<'_>, frames: &mut usize) -> Poll<End> {
        let now = Instant::now();
        while *frames < FRAMES_PER_TURN {
            match Pin::new(&mut wire.socket).poll_next(task) {
                Poll::Ready(Some(Ok(Message::Text(text)))) => self.session.on_frame(&text, now),
                Poll::Ready(Some(Ok(Message::Close(frame)))) => {
                    let why = frame.map(|frame| frame.reason.to_string()).filter(|reason| !reason.is_empty());
                    return Poll::Ready(End::Lost(why.unwrap_or_else(|| "the server closed the connection".into())));
                }
                Poll::Ready(Some(Ok(_))) => {}
                Poll::Ready(Some(Err(error))) => return Poll::Ready(End::Lost(error.to_string())),
                Poll::Ready(None) => return Poll::Ready(End::Lost("the server closed the connection".into())),
                Poll::Pending => break,
            }
            *frames += 1;
        }
        Poll::Pending
    }

    /// `true`: there may be more.
    fn take_notes(&mut self, task: &mut Task<'_>) -> bool {
        let took = self.notes.poll_recv_many(task, &mut self.inbox, NOTES_AT_ONCE).is_ready();
        for note in self.inbox.drain(..) {
            self.session.on_note(note);
        }
        took
    }

    fn write(&mut self, wire: &mut Wire, task: &mut Task<'_>) -> Poll<End> {
        while !wire.choked && !self.session.outbox.is_empty() {
            match Pin::new(&mut wire.socket).poll_ready(task) {
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(error)) => return Poll::Ready(End::Lost(error.to_string())),
                Poll::Pending => {
                    wire.choked = true;
                    break;
                }
            }
            let Some(text) = self.session.outbox.pop_front() else { break };
            wire.unflushed = true;
            if let Err(error) = Pin::new(&mut wire.socket).start_send(Message::Text(text)) {
                return Poll::Ready(End::Lost(error.to_string()));
            }
        }
        Poll::Pending
    }

    /// The shutdown, and whatever is due. `true`: the worker is done.
    fn take_time(&mut self, task: &mut Task<'_>) -> bool {
        let now = Instant::now();
        if !self.shutdown.is_terminated() && self.shutdown.as_mut().poll(task).is_ready() {
            self.session.stop(now);
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

impl Wire {
    fn flush(&mut self, task: &mut Task<'_>) -> Poll<End> {
        if self.unflushed {
            match Pin::new(&mut self.socket).poll_flush(task) {
                Poll::Ready(Ok(())) => (self.unflushed, self.choked) = (false, false),
                Poll::Ready(Err(error)) => return Poll::Ready(End::Lost(error.to_string())),
                Poll::Pending => self.choked = true,
            }
        }
        Poll::Pending
    }
}

async fn leave(socket: &mut Socket) -> Result<(), tungstenite::Error> {
    use futures_util::SinkExt;
    socket.send(Message::Text(outgoing::plain("leave"))).await?;
    socket.close(None).await
}
