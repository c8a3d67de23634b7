//! Limits the memory of everything that callers send and the server has not processed yet.
//!
//! The first [`FREE_BYTES`] of a request or message are not counted, so a small one is never rejected. A larger one takes
//! its further bytes from one budget of the process as they arrive, waits while the budget is used up, and is rejected
//! if it has to wait too long ([`MAX_WAIT`]).

use std::{
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll, ready},
    time::Duration,
};

use rand::RngExt;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, Sleep},
};
use tokio_util::sync::PollSemaphore;

use faena_domain::ErrorCode;

use crate::ApiError;

/// Bytes of each request or message that do not count.
pub const FREE_BYTES: usize = 16 << 10;
/// Largest message of a worker before its registration.
pub const MAX_UNREGISTERED_BYTES: usize = 64 << 10;
/// Bytes of path, query and headers that are not counted.
pub const FREE_HEAD_BYTES: usize = 8 << 10;
/// Bytes per permit of the semaphore.
const STEP_BYTES: usize = 16 << 10;
/// Maximum time that a request or message waits for the budget, in total. Without this limit, a request that gets the
/// budget bit by bit could wait forever and keep what it has.
const MAX_WAIT: Duration = Duration::from_secs(2);

/// Bytes that all requests of the process may occupy.
#[derive(Clone, Debug)]
pub struct ByteBudget {
    permits: Arc<Semaphore>,
    bytes: usize,
}

/// The budget is used up.
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error, Debug)]
#[error("the server receives too much data at the moment; try again")]
pub struct Exhausted;

impl From<Exhausted> for ApiError {
    fn from(exhausted: Exhausted) -> ApiError {
        ApiError::new(ErrorCode::Unavailable, exhausted.to_string())
    }
}

impl ByteBudget {
    pub fn new(bytes: usize) -> ByteBudget {
        ByteBudget { permits: Arc::new(Semaphore::new(bytes.div_ceil(STEP_BYTES))), bytes }
    }

    /// Returns the bytes that are taken now.
    pub fn used(&self) -> usize {
        self.bytes.saturating_sub(self.permits.available_permits().saturating_mul(STEP_BYTES))
    }

    /// Returns the size of the whole budget.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// The part of the budget that one request or message has taken. Dropping it returns that part.
pub struct Charge {
    permits: PollSemaphore,
    held: Option<OwnedSemaphorePermit>,
    /// How much longer it may wait. `None`: it has not waited yet.
    remaining_wait: Option<Duration>,
    /// When the current wait began, and its end.
    wait: Option<(Instant, Pin<Box<Sleep>>)>,
}

impl Charge {
    pub fn new(budget: &ByteBudget) -> Charge {
        let permits = PollSemaphore::new(budget.permits.clone());
        Charge { permits, held: None, remaining_wait: None, wait: None }
    }

    /// Takes the missing part of `bytes` from the budget. Fails if all waits of this charge together are too long:
    /// after a random time between half of `MAX_WAIT` and `MAX_WAIT`.
    pub fn poll_cover(&mut self, cx: &mut Context<'_>, bytes: usize) -> Poll<Result<(), Exhausted>> {
        let needed = bytes.saturating_sub(FREE_BYTES).div_ceil(STEP_BYTES);
        let missing = needed.saturating_sub(self.held.as_ref().map_or(0, OwnedSemaphorePermit::num_permits));
        if missing == 0 {
            return Poll::Ready(Ok(()));
        }
        let Ok(missing) = u32::try_from(missing) else { return Poll::Ready(Err(Exhausted)) };
        if let Poll::Ready(permit) = self.permits.poll_acquire_many(cx, missing) {
            if let (Some((began, _)), Some(remaining)) = (self.wait.take(), &mut self.remaining_wait) {
                *remaining = remaining.saturating_sub(began.elapsed());
            }
            let Some(permit) = permit else { return Poll::Ready(Err(Exhausted)) };
            match &mut self.held {
                Some(held) => held.merge(permit),
                None => self.held = Some(permit),
            }
            return Poll::Ready(Ok(()));
        }
        // A random time: requests that arrived together are rejected at different times, so that their clients do not
        // retry together.
        let remaining =
            *self.remaining_wait.get_or_insert_with(|| MAX_WAIT.mul_f64(rand::rng().random_range(0.5..=1.0)));
        let (_, end) = self.wait.get_or_insert_with(|| {
            let now = Instant::now();
            (now, Box::pin(tokio::time::sleep_until(now + remaining)))
        });
        ready!(end.as_mut().poll(cx));
        // Leaves the queue of the semaphore, in which it would still take released permits.
        self.permits = PollSemaphore::new(self.permits.clone_inner());
        (self.wait, self.remaining_wait) = (None, Some(Duration::ZERO));
        Poll::Ready(Err(Exhausted))
    }

    /// Takes the missing part of `bytes` from the budget if it need not wait. Returns whether `bytes` are covered.
    pub fn try_cover(&mut self, bytes: usize) -> bool {
        let needed = bytes.saturating_sub(FREE_BYTES).div_ceil(STEP_BYTES);
        let missing = needed.saturating_sub(self.held.as_ref().map_or(0, OwnedSemaphorePermit::num_permits));
        let Ok(missing) = u32::try_from(missing) else { return false };
        let Ok(permit) = self.permits.clone_inner().try_acquire_many_owned(missing) else { return false };
        match &mut self.held {
            Some(held) => held.merge(permit),
            None => self.held = Some(permit),
        }
        true
    }

    /// Waits until `bytes` in total are covered.
    pub async fn cover(&mut self, bytes: usize) -> Result<(), Exhausted> {
        std::future::poll_fn(|cx| self.poll_cover(cx, bytes)).await
    }

    /// Returns everything to the budget, for the next message.
    pub fn release(&mut self) {
        (self.held, self.wait, self.remaining_wait) = (None, None, None);
    }

    /// Returns whether part of the budget is taken.
    pub fn is_held(&self) -> bool {
        self.held.is_some()
    }
}

/// Counts the bytes that a connection reads before a handler takes them over: the headers of a request, or a message of a
/// WebSocket.
///
/// The connection calls [`poll_read`](Self::poll_read) before each read. The handler reports when it has taken over the bytes.
#[derive(Clone)]
pub struct ReadMeter(Arc<Mutex<MeterState>>);

struct MeterState {
    charge: Charge,
    bytes: usize,
    /// Bytes that may be read before the next [`ReadMeter::count_next_message`], for peers that are not identified yet.
    max_bytes: Option<usize>,
    is_counting: bool,
    /// Bytes that are not counted.
    free: usize,
}

/// Why a connection may not read more.
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error, Debug)]
pub enum ReadError {
    #[error(transparent)]
    Exhausted(#[from] Exhausted),
    #[error("more data than is accepted before the registration")]
    TooMuch,
}

impl ReadMeter {
    /// Starts to count the head of a request.
    pub fn new(budget: &ByteBudget) -> ReadMeter {
        let metered = MeterState {
            charge: Charge::new(budget),
            bytes: 0,
            max_bytes: None,
            is_counting: true,
            free: FREE_HEAD_BYTES,
        };
        ReadMeter(Arc::new(Mutex::new(metered)))
    }

    /// Waits until the next bytes may be read.
    pub fn poll_read(&self, cx: &mut Context<'_>) -> Poll<Result<(), ReadError>> {
        let mut metered = self.lock();
        if !metered.is_counting {
            return Poll::Ready(Ok(()));
        }
        if metered.max_bytes.is_some_and(|max| metered.bytes > max) {
            return Poll::Ready(Err(ReadError::TooMuch));
        }
        let bytes = metered.bytes + FREE_BYTES - metered.free;
        metered.charge.poll_cover(cx, bytes).map_err(ReadError::from)
    }

    /// Adds bytes that were read.
    pub fn add(&self, bytes: usize) {
        let mut metered = self.lock();
        if metered.is_counting {
            metered.bytes += bytes;
        }
    }

    /// Starts to count the next message, because a handler has taken over this one.
    pub fn count_next_message(&self) {
        self.count(true, None, FREE_BYTES);
    }

    /// Stops counting, because a handler reads and counts the bytes from now on.
    pub fn stop(&self) {
        self.count(false, None, FREE_BYTES);
    }

    /// Starts to count the head of the next request.
    pub fn expect_head(&self) {
        self.count(true, None, FREE_HEAD_BYTES);
    }

    /// Starts to count again, and rejects more than `max_bytes` until [`count_next_message`](Self::count_next_message).
    pub fn restrict(&self, max_bytes: usize) {
        self.count(true, Some(max_bytes), FREE_BYTES);
    }

    /// Returns whether more was read than [`restrict`](Self::restrict) permits.
    pub fn is_exceeded(&self) -> bool {
        let metered = self.lock();
        metered.max_bytes.is_some_and(|max| metered.bytes > max)
    }

    fn count(&self, is_counting: bool, max_bytes: Option<usize>, free: usize) {
        let mut metered = self.lock();
        metered.charge.release();
        (metered.bytes, metered.is_counting, metered.max_bytes, metered.free) = (0, is_counting, max_bytes, free);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, MeterState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn small_requests_are_free_and_large_ones_wait_briefly() {
        let budget = ByteBudget::new(1 << 20);
        let mut first = Charge::new(&budget);
        first.cover(FREE_BYTES + (1 << 20)).await.expect("everything is free");
        assert_eq!(budget.used(), 1 << 20);
        let mut second = Charge::new(&budget);
        second.cover(FREE_BYTES).await.expect("a small request takes nothing");
        assert!(second.try_cover(FREE_BYTES) && !second.try_cover(FREE_BYTES + 1));
        assert_eq!(second.cover(FREE_BYTES + 1).await, Err(Exhausted));
        let mut third = Charge::new(&budget);
        let (covered, ()) = tokio::join!(third.cover(FREE_BYTES + 1), async { first.release() });
        covered.expect("a waiting request gets what another returns");
        assert_eq!(budget.used(), STEP_BYTES);
        drop((second, third));
        assert_eq!(budget.used(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_gets_the_budget_bit_by_bit_waits_no_longer_than_others() {
        const PAUSE: Duration = Duration::from_millis(100);
        let budget = ByteBudget::new(100 * STEP_BYTES);
        let mut others: Vec<Charge> = (0..100).map(|_| Charge::new(&budget)).collect();
        assert!(others.iter_mut().all(|other| other.try_cover(FREE_BYTES + STEP_BYTES)));
        let (mut slow, started) = (Charge::new(&budget), Instant::now());
        for steps in 1.. {
            let release = async {
                tokio::time::sleep(PAUSE).await;
                others.pop()
            };
            let (covered, _) = tokio::join!(slow.cover(FREE_BYTES + steps * STEP_BYTES), release);
            if covered.is_err() {
                break;
            }
            assert!(started.elapsed() <= MAX_WAIT + PAUSE, "it still waits after {steps} steps");
        }
        assert!(started.elapsed() >= MAX_WAIT / 2 - PAUSE, "it has waited for {:?} only", started.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_above_the_whole_budget_is_rejected() {
        let budget = ByteBudget::new(1 << 20);
        assert_eq!(Charge::new(&budget).cover(FREE_BYTES + (1 << 20) + 1).await, Err(Exhausted));
        assert_eq!(budget.used(), 0);
    }

    #[tokio::test]
    async fn a_connection_reads_a_restricted_number_of_bytes_until_they_are_consumed() {
        let meter = ReadMeter::new(&ByteBudget::new(1 << 20));
        let read = || std::future::poll_fn(|cx| meter.poll_read(cx));
        meter.restrict(10);
        meter.add(10);
        assert_eq!(read().await, Ok(()));
        meter.add(1);
        assert_eq!(read().await, Err(ReadError::TooMuch));
        meter.count_next_message();
        meter.add(1_000);
        assert_eq!(read().await, Ok(()));
    }
}
