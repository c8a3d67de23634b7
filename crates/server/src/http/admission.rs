//! Limits the number of open connections, in total and per address.
//!
//! When the total is reached, a new connection takes the place of those that have been idle longest, so connections
//! without a request cannot lock out other clients. Until the idle ones are closed, [`RESERVE`] connections above the total are
//! accepted. If no connection is idle, those above the total serve health checks only.

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Instant,
};

use ipnet::IpNet;
use tokio_util::sync::CancellationToken;

/// Connections above the total that are accepted.
pub const RESERVE: usize = 32;
/// Minimum and maximum number of idle connections that are closed together when the total is reached. Between the two, it is
/// one percent of the total. Finding them takes a scan of all connections, so several are closed at a time.
const EVICTED_TOGETHER: (usize, usize) = (16, 256);

#[derive(Clone, Debug)]
pub struct ConnectionLimits {
    pub total: usize,
    /// For one address. Does not apply to loopback and `trusted_proxies`, which forward requests of many clients.
    pub per_address: usize,
    pub trusted_proxies: Vec<IpNet>,
}

pub struct Admission {
    limits: ConnectionLimits,
    started_at: Instant,
    open: Mutex<Open>,
    /// Number of open connections. Read for every request, so without the lock.
    count: AtomicUsize,
}

#[derive(Default)]
struct Open {
    by_address: HashMap<IpAddr, usize>,
    connections: HashMap<u64, Arc<Activity>>,
    next_id: u64,
    /// Connections that were evicted and are not closed yet.
    evicting: usize,
}

/// What a connection does now.
#[derive(Default)]
struct Activity {
    /// Requests in flight. A WebSocket is a request that does not end.
    requests: AtomicUsize,
    /// Milliseconds since the start of the server.
    idle_since: AtomicU64,
    evicted: CancellationToken,
}

/// An admitted connection. Dropping it frees its slot.
pub struct Permit {
    admission: Arc<Admission>,
    address: IpAddr,
    id: u64,
    activity: Arc<Activity>,
}

/// A request in flight. Its connection is not idle until this is dropped.
pub struct RequestGuard {
    admission: Arc<Admission>,
    activity: Arc<Activity>,
}

/// A view of a connection for the task that serves it.
#[derive(Clone)]
pub struct Tracked {
    admission: Arc<Admission>,
    activity: Arc<Activity>,
}

impl Admission {
    pub fn new(limits: ConnectionLimits) -> Admission {
        Admission { limits, started_at: Instant::now(), open: Mutex::default(), count: AtomicUsize::new(0) }
    }

    /// Admits a connection. Returns `None` if a limit is reached.
    pub fn admit(self: &Arc<Admission>, address: IpAddr) -> Option<Permit> {
        let address = address.to_canonical();
        let mut open = self.lock();
        let of_address = open.by_address.get(&address).copied().unwrap_or(0);
        if self.is_limited(address) && of_address >= self.limits.per_address {
            return None;
        }
        if open.connections.len() - open.evicting >= self.limits.total {
            open.evict_idle((self.limits.total / 100).clamp(EVICTED_TOGETHER.0, EVICTED_TOGETHER.1));
        }
        if open.connections.len() >= self.limits.total + RESERVE {
            return None;
        }
        let (id, activity) = (open.next_id, Arc::new(Activity::default()));
        activity.idle_since.store(self.now_ms(), Ordering::Relaxed);
        open.next_id += 1;
        open.connections.insert(id, activity.clone());
        open.by_address.insert(address, of_address + 1);
        self.count.store(open.connections.len(), Ordering::Relaxed);
        Some(Permit { admission: self.clone(), address, id, activity })
    }

    /// Returns the number of open connections.
    pub fn open(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    fn is_limited(&self, address: IpAddr) -> bool {
        !address.is_loopback() && !self.limits.trusted_proxies.iter().any(|network| network.contains(&address))
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.started_at.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Open {
    /// Closes up to `max` of the connections that have been idle longest, but not more than half of the idle ones.
    fn evict_idle(&mut self, max: usize) {
        let idle = self
            .connections
            .iter()
            .filter(|(_, activity)| activity.requests.load(Ordering::Relaxed) == 0 && !activity.evicted.is_cancelled());
        // Connections that became idle in the same millisecond are in the order of their ids.
        let mut idle: Vec<(u64, u64)> =
            idle.map(|(id, activity)| (activity.idle_since.load(Ordering::Relaxed), *id)).collect();
        let count = max.min(idle.len().div_ceil(2));
        if count == 0 {
            return;
        }
        idle.select_nth_unstable(count - 1);
        for (_, id) in &idle[..count] {
            self.connections[id].evicted.cancel();
        }
        self.evicting += count;
    }
}

impl Permit {
    /// Returns the view of this connection for the task that serves it.
    pub fn tracked(&self) -> Tracked {
        Tracked { admission: self.admission.clone(), activity: self.activity.clone() }
    }
}

impl Tracked {
    /// Begins a request.
    pub fn begin(&self) -> RequestGuard {
        self.activity.requests.fetch_add(1, Ordering::Relaxed);
        RequestGuard { admission: self.admission.clone(), activity: self.activity.clone() }
    }

    /// Marks the connection as busy until it is closed: it is a WebSocket now.
    pub fn begin_forever(&self) {
        self.activity.requests.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns whether there are more connections than the limit, so that only health checks are served.
    pub fn is_above_limit(&self) -> bool {
        self.admission.open() > self.admission.limits.total
    }

    /// Returns how long the connection has had no request.
    pub fn idle_ms(&self) -> u64 {
        match self.activity.requests.load(Ordering::Relaxed) {
            0 => self.admission.now_ms().saturating_sub(self.activity.idle_since.load(Ordering::Relaxed)),
            _ => 0,
        }
    }

    /// Waits until another connection needs the slot of this idle one.
    pub async fn evicted(&self) {
        self.activity.evicted.cancelled().await;
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.activity.idle_since.store(self.admission.now_ms(), Ordering::Relaxed);
        self.activity.requests.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut open = self.admission.lock();
        open.connections.remove(&self.id);
        open.evicting -= usize::from(self.activity.evicted.is_cancelled());
        self.admission.count.store(open.connections.len(), Ordering::Relaxed);
        if let Some(count) = open.by_address.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                open.by_address.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admission(total: usize, per_address: usize) -> Arc<Admission> {
        let trusted_proxies = vec!["10.0.0.0/24".parse().expect("a network")];
        Arc::new(Admission::new(ConnectionLimits { total, per_address, trusted_proxies }))
    }

    fn address(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn one_address_cannot_use_up_the_connections_of_others() {
        let admission = admission(100, 2);
        let first = admission.admit(address("203.0.113.9"));
        let _second = admission.admit(address("203.0.113.9"));
        assert!(first.is_some() && admission.admit(address("::ffff:203.0.113.9")).is_none());
        assert!(admission.admit(address("203.0.113.10")).is_some());
        drop(first);
        assert!(admission.admit(address("203.0.113.9")).is_some(), "a closed connection frees its slot");
    }

    #[test]
    fn proxies_and_this_machine_have_only_the_total_limit() {
        let admission = admission(100, 1);
        for peer in ["10.0.0.7", "127.0.0.1", "::1"] {
            let permits: Vec<_> = (0..5).map(|_| admission.admit(address(peer))).collect();
            assert!(permits.iter().all(Option::is_some), "{peer}");
        }
        assert_eq!(admission.open(), 0);
    }

    #[test]
    fn above_the_total_only_a_reserve_for_health_checks_is_left() {
        let admission = admission(2, 100);
        let admit = || admission.admit(address("127.0.0.1"));
        let mut permits: Vec<Permit> = (0..2).filter_map(|_| admit()).collect();
        assert!(!permits[1].tracked().is_above_limit());
        let mut requests: Vec<RequestGuard> = permits.iter().map(|permit| permit.tracked().begin()).collect();
        for _ in 0..RESERVE {
            let permit = admit().expect("the reserve");
            requests.push(permit.tracked().begin());
            permits.push(permit);
        }
        assert!(permits.iter().all(|permit| permit.tracked().is_above_limit()));
        assert!(
            permits.iter().all(|permit| !permit.activity.evicted.is_cancelled()),
            "a busy connection is not closed"
        );
        assert!(admit().is_none());
    }

    #[test]
    fn a_new_connection_takes_the_place_of_the_one_that_was_idle_longest() {
        let admission = admission(4, 100);
        let permits: Vec<Permit> = (0..4).filter_map(|_| admission.admit(address("127.0.0.1"))).collect();
        let _busy = permits[0].tracked().begin();
        let _new = admission.admit(address("127.0.0.1")).expect("a slot");
        let evicted: Vec<bool> = permits.iter().map(|permit| permit.activity.evicted.is_cancelled()).collect();
        assert_eq!(evicted, [false, true, true, false]);
    }
}
