//! The stream of one connection: the bytes it reads count against the budget, and a peer that does not read is disconnected.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use faena_api::ReadMeter;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep, sleep},
};

use super::{admission::Permit, answers::Answers};

/// Bytes that a peer must read within its write timeout. A socket that was full accepts more than this at a time, so only a
/// peer that reads byte by byte stays below this limit.
const MIN_READ_BYTES: usize = 4 << 10;

/// Largest read of an HTTP/1 connection. hyper doubles the buffer of a connection after each read that fills it, so one byte less
/// keeps that buffer at 16 KiB.
const READ_BYTES: usize = (16 << 10) - 1;

/// Bytes that an HTTP/1 connection reads before other connections get their turn. A thousand connections with large
/// bodies would otherwise keep a small request waiting for as long as each of them has data.
const TURN_BYTES: usize = 64 << 10;

/// How long a peer may read nothing while the memory for unsent answers is nearly used up.
const SHORT_TIMEOUT: Duration = Duration::from_secs(1);

/// How long a peer may read nothing of its response.
pub struct WriteTimeout {
    pub timeout: Duration,
    pub answers: Answers,
}

impl WriteTimeout {
    pub fn current(&self) -> Duration {
        if self.answers.is_short() { self.timeout.min(SHORT_TIMEOUT) } else { self.timeout }
    }
}

/// A peer that does not read.
struct Stalled {
    since: Instant,
    /// Bytes that the peer has read since then.
    bytes: usize,
    next_check: Pin<Box<Sleep>>,
}

/// The stream of a connection. It owns the permit, because a WebSocket outlives the HTTP connection.
pub struct ClientStream<S> {
    stream: S,
    meter: Option<ReadMeter>,
    write_timeout: WriteTimeout,
    stalled: Option<Stalled>,
    /// Bytes that were read in this turn.
    turn_bytes: usize,
    _permit: Permit,
}

impl<S> ClientStream<S> {
    pub fn new(stream: S, permit: Permit, meter: Option<ReadMeter>, write_timeout: WriteTimeout) -> ClientStream<S> {
        ClientStream { stream, meter, write_timeout, stalled: None, turn_bytes: 0, _permit: permit }
    }

    /// Records how much a write accepted. Fails if the peer does not read.
    fn track_write(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        match written {
            Poll::Ready(Ok(count)) => {
                if let Some(stalled) = &mut self.stalled {
                    stalled.bytes += count;
                    if stalled.bytes >= MIN_READ_BYTES {
                        self.stalled = None;
                    }
                }
                Poll::Ready(Ok(count))
            }
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => {
                let pause = self.write_timeout.timeout.min(SHORT_TIMEOUT);
                let stalled = self.stalled.get_or_insert_with(|| Stalled {
                    since: Instant::now(),
                    bytes: 0,
                    next_check: Box::pin(sleep(pause)),
                });
                loop {
                    ready!(stalled.next_check.as_mut().poll(cx));
                    if stalled.since.elapsed() >= self.write_timeout.current() {
                        return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the peer does not read")));
                    }
                    stalled.next_check.as_mut().reset(Instant::now() + pause);
                }
            }
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ClientStream<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if let Some(meter) = &self.meter {
            ready!(meter.poll_read(cx)).map_err(io::Error::other)?;
        }
        if self.meter.is_none() {
            return Pin::new(&mut self.stream).poll_read(cx, buf);
        }
        if self.turn_bytes >= TURN_BYTES {
            self.turn_bytes = 0;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let wanted = buf.remaining().min(READ_BYTES);
        let mut part = ReadBuf::new(buf.initialize_unfilled_to(wanted));
        let Poll::Ready(read) = Pin::new(&mut self.stream).poll_read(cx, &mut part) else {
            self.turn_bytes = 0;
            return Poll::Pending;
        };
        read?;
        let count = part.filled().len();
        self.turn_bytes += count;
        buf.advance(count);
        if let Some(meter) = &self.meter {
            meter.add(count);
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ClientStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.track_write(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.track_write(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // TLS writes its last record here.
        let flushed = Pin::new(&mut self.stream).poll_flush(cx).map_ok(|()| 0);
        self.track_write(cx, flushed).map_ok(|_| ())
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let closed = Pin::new(&mut self.stream).poll_shutdown(cx).map_ok(|()| 0);
        self.track_write(cx, closed).map_ok(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use faena_api::ByteBudget;

    use super::*;
    use crate::http::{ConnectionLimits, admission::Admission};

    #[tokio::test]
    async fn a_connection_with_much_data_lets_others_have_their_turn() {
        let limits = ConnectionLimits { total: 1, per_address: 1, trusted_proxies: Vec::new() };
        let permit =
            std::sync::Arc::new(Admission::new(limits)).admit(Ipv4Addr::LOCALHOST.into()).expect("it is the first");
        let meter = ReadMeter::new(&ByteBudget::new(1 << 20));
        meter.stop();
        let write_timeout = WriteTimeout { timeout: Duration::from_secs(1), answers: Answers::new(1 << 20) };
        let mut stream = ClientStream::new(tokio::io::repeat(b'x'), permit, Some(meter), write_timeout);
        let mut cx = Context::from_waker(std::task::Waker::noop());
        for _ in 0..3 {
            let mut bytes = 0;
            loop {
                let mut part = [0; 20_000];
                let mut buffer = ReadBuf::new(&mut part);
                match Pin::new(&mut stream).poll_read(&mut cx, &mut buffer) {
                    Poll::Ready(read) => read.expect("the stream never fails"),
                    Poll::Pending => break,
                }
                bytes += buffer.filled().len();
            }
            assert!((TURN_BYTES..TURN_BYTES + READ_BYTES).contains(&bytes), "{bytes}");
        }
    }
}
