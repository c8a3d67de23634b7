//! The body of one response. Its connection does not count as idle until the body is sent. It also notices a peer that
//! stops reading one stream of an HTTP/2 connection.

use std::{
    collections::HashMap,
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use axum::body::{Body, Bytes, HttpBody};
use faena_api::ReadMeter;
use hyper::body::{Frame, SizeHint};

use super::{admission::RequestGuard, answers::Unsent};

/// Largest part of a response that is passed to HTTP/2 in one piece. The HTTP/2 library would buffer a larger part
/// completely, even if the peer does not read.
const PART_BYTES: usize = 16 << 10;
/// Largest part of a large response that is passed to HTTP/1 in one piece. The response counts as unsent until its
/// last part has been passed on.
const HTTP1_PART_BYTES: usize = 64 << 10;

/// Responses of an HTTP/2 connection that the peer has not read yet, each with the time at which it began to wait.
#[derive(Clone, Default)]
pub struct Unread(Arc<UnreadResponses>);

#[derive(Default)]
struct UnreadResponses {
    next_id: AtomicU64,
    since: Mutex<HashMap<u64, Instant>>,
}

impl Unread {
    /// Returns whether a response has waited for longer than `timeout`.
    pub fn is_stalled(&self, timeout: Duration) -> bool {
        self.lock().values().any(|since| since.elapsed() > timeout)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Instant>> {
        self.0.since.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub struct ResponseBody {
    inner: Body,
    /// The rest of a frame that is larger than a part.
    rest: Bytes,
    unread: Option<(Unread, u64)>,
    meter: Option<ReadMeter>,
    unsent: Option<Unsent>,
    _request: RequestGuard,
}

impl ResponseBody {
    pub fn http1(inner: Body, request: RequestGuard, meter: Option<ReadMeter>, unsent: Option<Unsent>) -> ResponseBody {
        ResponseBody { inner, rest: Bytes::new(), unread: None, meter, unsent, _request: request }
    }

    pub fn http2(inner: Body, request: RequestGuard, unread: &Unread, unsent: Option<Unsent>) -> ResponseBody {
        let unread = (unread.clone(), unread.0.next_id.fetch_add(1, Ordering::Relaxed));
        ResponseBody { inner, rest: Bytes::new(), unread: Some(unread), meter: None, unsent, _request: request }
    }

    /// Returns the next part of a frame. The part counts as unread until the next one is requested.
    fn part(&mut self, mut data: Bytes) -> Frame<Bytes> {
        if let Some((unread, id)) = &self.unread {
            self.rest = data.split_off(data.len().min(PART_BYTES));
            unread.lock().insert(*id, Instant::now());
        } else if self.unsent.is_some() {
            self.rest = data.split_off(data.len().min(HTTP1_PART_BYTES));
        }
        Frame::data(data)
    }
}

impl HttpBody for ResponseBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = &mut *self;
        if let Some((unread, id)) = &this.unread {
            unread.lock().remove(id);
        }
        if !this.rest.is_empty() {
            let rest = std::mem::take(&mut this.rest);
            return Poll::Ready(Some(Ok(this.part(rest))));
        }
        let Some(frame) = ready!(Pin::new(&mut this.inner).poll_frame(cx)).transpose()? else {
            return Poll::Ready(None);
        };
        Poll::Ready(Some(Ok(match frame.into_data() {
            Ok(data) => this.part(data),
            Err(trailers) => trailers,
        })))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let inner = self.inner.size_hint();
        let rest = self.rest.len() as u64;
        let mut hint = SizeHint::new();
        hint.set_lower(inner.lower() + rest);
        if let Some(upper) = inner.upper() {
            hint.set_upper(upper + rest);
        }
        hint
    }
}

impl Drop for ResponseBody {
    fn drop(&mut self) {
        if let Some((unread, id)) = &self.unread {
            unread.lock().remove(id);
        }
        // The next data on an HTTP/1 connection is the head of another request.
        if let Some(meter) = &self.meter {
            meter.expect_head();
        }
    }
}
