//! Limits the memory of answers that are not sent yet.
//!
//! An answer of up to 64 KiB costs nothing. A larger one takes its bytes from one budget of the process until its peer
//! has read it. While the budget is used up, a large answer is dropped, and its request waits and is handled again when
//! there is room. When the budget is nearly used up, connections of peers that do not read are closed earlier than
//! usual. A connection whose previous answer was large reserves the same number of bytes before its next request is
//! handled, so a client that requests many large answers and reads none costs little.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use axum::{
    Router,
    body::{Body, HttpBody},
    http::{Method, Request, Response},
};
use faena_api::{ByteBudget, Charge};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tower::ServiceExt;

use super::unavailable;

/// A larger answer takes its bytes from the budget.
const LARGE_BYTES: usize = 64 << 10;
/// Maximum number of GET requests that are handled at the same time, from connections whose previous answer was small. An
/// answer is in memory before its size is known.
const USUAL_READS: usize = 24;
/// The same for connections without an answer yet.
const FIRST_READS: usize = 8;
/// The same for connections whose previous answer was large.
const LARGE_READS: usize = 2;
/// Maximum number of GET requests of one connection that are being handled, or whose large answer is not sent. Until its
/// first small answer, a connection may have only one.
const READS_OF_CONNECTION: usize = 8;

/// The answers of the process.
#[derive(Clone)]
pub struct Answers {
    budget: ByteBudget,
    usual: Arc<Semaphore>,
    first: Arc<Semaphore>,
    large: Arc<Semaphore>,
}

/// The answers of one connection.
#[derive(Clone)]
pub struct ConnectionAnswers {
    reads: Arc<Semaphore>,
    /// Size of the previous answer if it was large, otherwise 0.
    previous: Arc<AtomicUsize>,
    had_small: Arc<AtomicBool>,
}

/// The part of the budget and the slot that a large answer occupies until it is sent.
pub struct Unsent {
    _charge: Charge,
    _read: OwnedSemaphorePermit,
}

impl Default for ConnectionAnswers {
    fn default() -> ConnectionAnswers {
        ConnectionAnswers { reads: Arc::new(Semaphore::new(1)), previous: Arc::default(), had_small: Arc::default() }
    }
}

impl ConnectionAnswers {
    /// Records the size of an answer, 0 if it is small.
    fn record(&self, bytes: usize) {
        self.previous.store(bytes, Ordering::Relaxed);
        if bytes == 0 && !self.had_small.swap(true, Ordering::Relaxed) {
            self.reads.add_permits(READS_OF_CONNECTION - 1);
        }
    }
}

impl Answers {
    pub fn new(bytes: usize) -> Answers {
        let reads = |count| Arc::new(Semaphore::new(count));
        Answers {
            budget: ByteBudget::new(bytes),
            usual: reads(USUAL_READS),
            first: reads(FIRST_READS),
            large: reads(LARGE_READS),
        }
    }

    /// Returns whether the budget is nearly used up, so that peers that do not read are disconnected early.
    pub fn is_short(&self) -> bool {
        self.budget.used() > self.budget.bytes() / 4 * 3
    }

    /// Handles a request. Returns its answer, and what the answer occupies until it is sent.
    pub async fn handle(
        &self,
        router: Router,
        request: Box<Request<Body>>,
        connection: &ConnectionAnswers,
    ) -> (Response<Body>, Option<Unsent>) {
        if request.method() != Method::GET || request.uri().path().starts_with("/health") {
            return (Box::pin(call(router, *request)).await, None);
        }
        let permit = connection.reads.clone().acquire_owned().await.expect("the semaphore is never closed");
        // Boxed, so that the future of a request that waits for its connection is small.
        Box::pin(self.handle_read(router, *request, connection, permit)).await
    }

    /// Handles a GET request, which occupies one of the read slots of its connection (`permit`).
    async fn handle_read(
        &self,
        router: Router,
        request: Request<Body>,
        connection: &ConnectionAnswers,
        permit: OwnedSemaphorePermit,
    ) -> (Response<Body>, Option<Unsent>) {
        let mut charge = Charge::new(&self.budget);
        if charge.cover(connection.previous.load(Ordering::Relaxed)).await.is_err() {
            return (too_many_unread(), None);
        }
        let (parts, body) = request.into_parts();
        let reads = self.reads_of(connection);
        let mut response = read(reads, router.clone(), Request::from_parts(parts.clone(), body)).await;
        let mut bytes = self.large_bytes(&response);
        connection.record(bytes);
        if !charge.try_cover(bytes) {
            // Without the answer, waiting costs no memory. A GET request changes nothing, so it can be handled again.
            drop(response);
            if charge.cover(bytes).await.is_err() {
                return (too_many_unread(), None);
            }
            response = read(&self.large, router, Request::from_parts(parts, Body::empty())).await;
            bytes = self.large_bytes(&response);
        }
        (response, (bytes > 0).then_some(Unsent { _charge: charge, _read: permit }))
    }

    /// Returns the semaphore that limits the next request of a connection.
    fn reads_of(&self, connection: &ConnectionAnswers) -> &Semaphore {
        if connection.previous.load(Ordering::Relaxed) > 0 {
            &self.large
        } else if connection.had_small.load(Ordering::Relaxed) {
            &self.usual
        } else {
            &self.first
        }
    }

    /// Returns the size of a large answer, at most the whole budget, otherwise 0. A stream has no size.
    fn large_bytes(&self, response: &Response<Body>) -> usize {
        let bytes = response.body().size_hint().exact().and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(0);
        if bytes > LARGE_BYTES { bytes.min(self.budget.bytes()) } else { 0 }
    }
}

async fn read(reads: &Semaphore, router: Router, request: Request<Body>) -> Response<Body> {
    let _read = reads.acquire().await.expect("the semaphore is never closed");
    // Boxed, so that the future of a request that waits is small.
    Box::pin(call(router, request)).await
}

async fn call(router: Router, request: Request<Body>) -> Response<Body> {
    match router.oneshot(request).await {
        Ok(response) => response,
        Err(never) => match never {},
    }
}

fn too_many_unread() -> Response<Body> {
    unavailable("too many large answers are not read by their clients; try again")
}
