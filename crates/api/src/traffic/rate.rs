//! Limits the rate of requests per caller: one bucket per API key or client address.
//!
//! A bucket holds up to `burst` requests and fills at `per_second`. A full bucket is deleted, because a new one would be full
//! too. So memory depends on the number of callers in the last seconds, and never exceeds [`MAX_BUCKETS`]: above it,
//! further callers share a few buckets.

use std::{
    hash::{BuildHasher, Hash, RandomState},
    num::NonZeroU32,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use governor::{
    Quota, RateLimiter,
    clock::{Clock, DefaultClock},
    middleware::{StateInformationMiddleware, StateSnapshot},
    state::keyed::HashMapStateStore,
};

/// Buckets of one limiter. One takes about 100 bytes.
const MAX_BUCKETS: usize = 100_000;
/// Buckets that callers share while there are too many of them.
const SHARED_BUCKETS: u64 = 1_024;
/// Full buckets are deleted after this many requests.
const EVICT_EVERY: usize = 10_000;

/// Requests that one caller may send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RequestRate {
    pub per_second: NonZeroU32,
    /// Requests that may arrive together.
    pub burst: NonZeroU32,
}

impl RequestRate {
    /// Returns the seconds after which an empty bucket is full.
    fn window_seconds(self) -> u32 {
        self.burst.get().div_ceil(self.per_second.get())
    }
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum Bucket<K> {
    Own(K),
    Shared(u64),
}

type Buckets<K, C> = RateLimiter<Bucket<K>, HashMapStateStore<Bucket<K>>, C, StateInformationMiddleware>;

/// Counts requests by caller.
pub struct Limiter<K: Hash + Eq + Clone, C: Clock + Clone = DefaultClock> {
    /// Name of the policy in the headers: `key` or `address`.
    name: &'static str,
    rate: RequestRate,
    buckets: Buckets<K, C>,
    clock: C,
    hasher: RandomState,
    requests: AtomicUsize,
}

impl<K: Hash + Eq + Clone> Limiter<K> {
    pub fn new(name: &'static str, rate: RequestRate) -> Limiter<K> {
        Limiter::with_clock(name, rate, DefaultClock::default())
    }
}

impl<K: Hash + Eq + Clone, C: Clock + Clone> Limiter<K, C> {
    fn with_clock(name: &'static str, rate: RequestRate, clock: C) -> Limiter<K, C> {
        let quota = Quota::per_second(rate.per_second).allow_burst(rate.burst);
        let buckets = RateLimiter::hashmap_with_clock(quota, clock.clone()).with_middleware();
        Limiter { name, rate, buckets, clock, hasher: RandomState::new(), requests: AtomicUsize::new(0) }
    }

    /// Counts one request of a caller and returns whether it may run.
    pub fn check(&self, caller: K) -> Usage {
        if self.requests.fetch_add(1, Ordering::Relaxed) % EVICT_EVERY == EVICT_EVERY - 1 {
            self.buckets.retain_recent();
            self.buckets.shrink_to_fit();
        }
        let bucket = if self.buckets.len() < MAX_BUCKETS {
            Bucket::Own(caller)
        } else {
            Bucket::Shared(self.hasher.hash_one(&caller) % SHARED_BUCKETS)
        };
        let usage = Usage { name: self.name, rate: self.rate, remaining: 0, wait: None };
        match self.buckets.check_key(&bucket) {
            Ok(snapshot) => Usage { remaining: StateSnapshot::remaining_burst_capacity(&snapshot), ..usage },
            Err(until) => Usage { wait: Some(until.wait_time_from(self.clock.now())), ..usage },
        }
    }
}

/// How much of a limit one caller has used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Usage {
    pub name: &'static str,
    rate: RequestRate,
    remaining: u32,
    /// Time until the next request may run, if this one may not.
    wait: Option<Duration>,
}

impl Usage {
    /// Returns the whole seconds after which the caller may try again, or `None` if the request may run.
    pub fn retry_after_seconds(&self) -> Option<u64> {
        self.wait.map(|wait| (wait.as_secs() + u64::from(wait.subsec_nanos() > 0)).max(1))
    }

    /// Returns the item of the header `RateLimit-Policy`: the quota and its window in seconds.
    pub fn policy(&self) -> String {
        format!("\"{}\";q={};w={}", self.name, self.rate.burst, self.rate.window_seconds())
    }

    /// Returns the item of the header `RateLimit`: what remains, and the seconds until all of it is available again.
    pub fn state(&self) -> String {
        let missing = self.rate.burst.get().saturating_sub(self.remaining);
        format!("\"{}\";r={};t={}", self.name, self.remaining, missing.div_ceil(self.rate.per_second.get()))
    }
}

#[cfg(test)]
mod tests {
    use governor::clock::FakeRelativeClock;

    use super::*;

    fn limiter(per_second: u32, burst: u32) -> (Limiter<u32, FakeRelativeClock>, FakeRelativeClock) {
        let clock = FakeRelativeClock::default();
        let number = |number| NonZeroU32::new(number).expect("not zero");
        let rate = RequestRate { per_second: number(per_second), burst: number(burst) };
        (Limiter::with_clock("key", rate, clock.clone()), clock)
    }

    #[test]
    fn a_burst_is_accepted_and_then_the_rate() {
        let (limiter, clock) = limiter(2, 3);
        let remaining: Vec<u32> = (0..3).map(|_| limiter.check(1).remaining).collect();
        assert_eq!(remaining, [2, 1, 0]);
        let rejected = limiter.check(1);
        assert_eq!(rejected.retry_after_seconds(), Some(1), "rounded up to whole seconds");
        assert_eq!(limiter.check(2).retry_after_seconds(), None, "another caller has a bucket of its own");
        clock.advance(Duration::from_millis(500));
        assert_eq!(limiter.check(1).retry_after_seconds(), None);
        assert!(limiter.check(1).retry_after_seconds().is_some());
    }

    #[test]
    fn the_headers_name_the_quota_and_what_remains_of_it() {
        let (limiter, _) = limiter(2, 5);
        let usage = limiter.check(1);
        assert_eq!((usage.policy().as_str(), usage.state().as_str()), ("\"key\";q=5;w=3", "\"key\";r=4;t=1"));
        let last = (0..5).map(|_| limiter.check(1)).last().expect("five checks");
        assert_eq!(last.state(), "\"key\";r=0;t=3");
    }

    #[test]
    fn buckets_of_idle_callers_are_deleted() {
        let (limiter, clock) = limiter(1, 1);
        for caller in 0..EVICT_EVERY as u32 - 1 {
            limiter.check(caller);
        }
        assert_eq!(limiter.buckets.len(), EVICT_EVERY - 1);
        clock.advance(Duration::from_secs(2));
        limiter.check(0);
        assert_eq!(limiter.buckets.len(), 1);
    }

    #[test]
    fn very_many_callers_share_buckets_and_memory_stays_bounded() {
        let (limiter, _) = limiter(1, 1_000_000);
        for caller in 0..2 * MAX_BUCKETS as u32 {
            limiter.check(caller);
        }
        assert!(limiter.buckets.len() <= MAX_BUCKETS + SHARED_BUCKETS as usize, "{}", limiter.buckets.len());
    }
}
