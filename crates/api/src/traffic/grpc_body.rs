//! The body of a gRPC call: each message has a deadline and takes its bytes from the budget, and a worker may send only
//! small messages until it has registered.
//!
//! The library that decodes messages buffers each of them completely and waits for them forever. This body reads the frames (one
//! byte of flags, four of length) as they pass, so that it knows where messages begin and end.

use std::{
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
};

use axum::{
    body::{Body, Bytes, HttpBody},
    extract::Request,
};
use http_body::{Frame, SizeHint};
use tokio::time::{Instant, Sleep, sleep};
use tonic::Status;

use super::budget::{ByteBudget, Charge, MAX_UNREGISTERED_BYTES};
use crate::{ApiError, request::BODY_TIMEOUT};

const CONNECT: &str = "/faena.v1.WorkerService/Connect";
const HEADER_BYTES: usize = 5;

/// Whether the worker of a call has registered. Its messages may be large from then on.
#[derive(Clone, Default)]
pub struct HasRegistered(Arc<AtomicBool>);

impl HasRegistered {
    pub fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Bytes that the messages of a call have taken from the budget. The call keeps them until its handler has answered.
#[derive(Clone)]
pub struct SharedCharge(Arc<Mutex<Charge>>);

/// Returns the call with a limited body, and the charge of its messages.
pub fn limit(request: Request, budget: &ByteBudget) -> (Request, SharedCharge) {
    let charge = SharedCharge(Arc::new(Mutex::new(Charge::new(budget))));
    let is_connect = request.uri().path() == CONNECT;
    let registered = HasRegistered::default();
    if !is_connect {
        registered.set();
    }
    let (mut parts, inner) = request.into_parts();
    parts.extensions.insert(registered.clone());
    let body = GrpcBody {
        inner,
        charge: charge.clone(),
        registered,
        frames: Frames::default(),
        may_be_idle: is_connect,
        deadline: Box::pin(sleep(BODY_TIMEOUT)),
        waiting: None,
    };
    (Request::from_parts(parts, Body::new(body)), charge)
}

struct GrpcBody {
    inner: Body,
    charge: SharedCharge,
    registered: HasRegistered,
    frames: Frames,
    /// Whether the peer may send nothing between two messages.
    may_be_idle: bool,
    deadline: Pin<Box<Sleep>>,
    /// Data that waits for the budget.
    waiting: Option<Bytes>,
}

/// Position of the body in the sequence of messages.
#[derive(Default)]
struct Frames {
    header: [u8; HEADER_BYTES],
    header_bytes: usize,
    /// Bytes of the current message that have not arrived.
    missing: usize,
    /// Bytes of the current message that have arrived.
    arrived: usize,
    /// Bytes of the largest message in the data that was read last.
    largest: usize,
}

impl Frames {
    /// Follows the messages through `data`. Returns whether one ended.
    fn read(&mut self, mut data: &[u8]) -> bool {
        let mut has_ended = false;
        self.largest = 0;
        while !data.is_empty() {
            if self.header_bytes < HEADER_BYTES {
                self.header[self.header_bytes] = data[0];
                self.header_bytes += 1;
                data = &data[1..];
                if self.header_bytes == HEADER_BYTES {
                    let [_, length @ ..] = self.header;
                    (self.missing, self.arrived) = (u32::from_be_bytes(length) as usize, 0);
                }
            } else {
                let count = self.missing.min(data.len());
                (self.missing, self.arrived) = (self.missing - count, self.arrived + count);
                data = &data[count..];
            }
            if self.header_bytes == HEADER_BYTES {
                self.largest = self.largest.max(self.arrived + self.missing);
                if self.missing == 0 {
                    self.header_bytes = 0;
                    has_ended = true;
                }
            }
        }
        has_ended
    }

    fn is_between_messages(&self) -> bool {
        self.header_bytes == 0
    }
}

impl GrpcBody {
    fn reset_deadline(&mut self) {
        self.deadline.as_mut().reset(Instant::now() + BODY_TIMEOUT);
    }

    fn charge(&self) -> std::sync::MutexGuard<'_, Charge> {
        self.charge.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Charges the budget for the current message, then returns `waiting`.
    fn poll_waiting(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let covered = ready!(self.charge().poll_cover(cx, self.frames.arrived));
        if let Err(exhausted) = covered {
            return Poll::Ready(Some(Err(Status::from(ApiError::from(exhausted)))));
        }
        Poll::Ready(self.waiting.take().map(|data| Ok(Frame::data(data))))
    }

    fn receive(&mut self, data: Bytes) -> Result<(), Status> {
        if self.frames.is_between_messages() {
            // The handler asks for more, so it has the previous message.
            if self.may_be_idle {
                self.charge().release();
            }
            self.reset_deadline();
        }
        if self.frames.read(&data) {
            self.reset_deadline();
        }
        self.waiting = Some(data);
        if !self.registered.get() && self.frames.largest > MAX_UNREGISTERED_BYTES {
            let message =
                format!("a message before the registration must not be larger than {MAX_UNREGISTERED_BYTES} bytes");
            return Err(Status::resource_exhausted(message));
        }
        Ok(())
    }
}

impl HttpBody for GrpcBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        loop {
            if this.waiting.is_some() {
                return this.poll_waiting(cx);
            }
            match Pin::new(&mut this.inner).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => {
                        if let Err(status) = this.receive(data) {
                            return Poll::Ready(Some(Err(status)));
                        }
                    }
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Some(Err(Status::from_error(error.into())))),
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Pending if this.may_be_idle && this.frames.is_between_messages() => return Poll::Pending,
                Poll::Pending => {
                    ready!(this.deadline.as_mut().poll(cx));
                    let message = format!("the message did not arrive within {} s", BODY_TIMEOUT.as_secs());
                    return Poll::Ready(Some(Err(Status::deadline_exceeded(message))));
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.waiting.is_none() && self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    /// Starts a call that sends `data` and then nothing. Returns the code with which it ends.
    async fn code_after(path: &str, data: Vec<u8>) -> tonic::Code {
        let sent = futures_util::stream::iter([Ok::<_, std::io::Error>(Bytes::from(data))]);
        let body = Body::from_stream(futures_util::StreamExt::chain(sent, futures_util::stream::pending()));
        let request = Request::post(path).body(body).expect("a request");
        let (request, _charge) = limit(request, &ByteBudget::new(1 << 20));
        let mut body = request.into_body();
        loop {
            if let Err(error) = body.frame().await.expect("the stream does not end") {
                return Status::from_error(Box::new(error)).code();
            }
        }
    }

    fn message(length: usize, sent: usize) -> Vec<u8> {
        let mut data = vec![0];
        data.extend(u32::try_from(length).expect("a short message").to_be_bytes());
        data.resize(5 + sent, 7);
        data
    }

    #[tokio::test(start_paused = true)]
    async fn a_message_that_does_not_arrive_ends_its_call() {
        for data in [vec![], message(10, 5), message(10, 10)] {
            assert_eq!(code_after("/faena.v1.JobService/CreateJob", data).await, tonic::Code::DeadlineExceeded);
        }
        assert_eq!(code_after(CONNECT, message(10, 5)).await, tonic::Code::DeadlineExceeded, "a message is incomplete");
        let idle = tokio::time::timeout(BODY_TIMEOUT * 10, code_after(CONNECT, message(10, 10))).await;
        assert!(idle.is_err(), "a worker may be idle between two messages");
    }

    #[tokio::test(start_paused = true)]
    async fn a_large_message_needs_a_registration_and_the_budget() {
        let large = || message(MAX_UNREGISTERED_BYTES + 1, MAX_UNREGISTERED_BYTES + 1);
        assert_eq!(code_after(CONNECT, large()).await, tonic::Code::ResourceExhausted);
        let call = "/faena.v1.JobService/CreateJob";
        assert_eq!(code_after(call, large()).await, tonic::Code::DeadlineExceeded, "it is read, then the call waits");
        assert_eq!(code_after(call, message(3 << 20, 3 << 20)).await, tonic::Code::Unavailable);
    }

    #[test]
    fn the_ends_of_messages_are_found_wherever_the_data_is_split() {
        let mut data = Vec::new();
        for length in [3_u32, 0, 10] {
            data.push(0);
            data.extend(length.to_be_bytes());
            data.extend(vec![7; length as usize]);
        }
        for size in 1..=data.len() {
            let mut frames = Frames::default();
            let mut largest = 0;
            for chunk in data.chunks(size) {
                frames.read(chunk);
                largest = largest.max(frames.largest);
            }
            assert!(frames.is_between_messages() && largest == 10, "in chunks of {size}");
            assert!(!Frames::default().read(&data[..7]), "the first message is incomplete");
        }
    }
}
