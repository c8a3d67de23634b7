//! Limits the number of open connections, in total and per address.

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
};

use ipnet::IpNet;

/// Connections above the total that are accepted for health checks.
const RESERVE: usize = 32;

#[derive(Clone, Debug)]
pub struct ConnectionLimits {
    pub total: usize,
    /// For one address. Does not hold for loopback and for `trusted_proxies`, which speak for many clients.
    pub per_address: usize,
    pub trusted_proxies: Vec<IpNet>,
}

pub struct Admission {
    limits: ConnectionLimits,
    open: Mutex<Open>,
}

#[derive(Default)]
struct Open {
    total: usize,
    by_address: HashMap<IpAddr, usize>,
}

/// An admitted connection. Dropping it frees its place.
pub struct Permit {
    admission: Arc<Admission>,
    address: IpAddr,
    is_reserve: bool,
}

impl Admission {
    pub fn new(limits: ConnectionLimits) -> Admission {
        Admission { limits, open: Mutex::default() }
    }

    /// Returns `None` if a limit is reached.
    pub fn admit(self: &Arc<Admission>, address: IpAddr) -> Option<Permit> {
        let address = address.to_canonical();
        let mut open = self.lock();
        let of_address = open.by_address.get(&address).copied().unwrap_or(0);
        if open.total >= self.limits.total + RESERVE
            || (self.is_limited(address) && of_address >= self.limits.per_address)
        {
            return None;
        }
        let is_reserve = open.total >= self.limits.total;
        open.total += 1;
        open.by_address.insert(address, of_address + 1);
        Some(Permit { admission: self.clone(), address, is_reserve })
    }

    /// Returns the number of open connections.
    pub fn open(&self) -> usize {
        self.lock().total
    }

    fn is_limited(&self, address: IpAddr) -> bool {
        !address.is_loopback() && !self.limits.trusted_proxies.iter().any(|network| network.contains(&address))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Permit {
    /// Returns whether the connection is above the limit, so that it may only check the health.
    pub fn is_reserve(&self) -> bool {
        self.is_reserve
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut open = self.admission.lock();
        open.total -= 1;
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
        assert!(admission.admit(address("203.0.113.9")).is_some(), "a closed connection frees its place");
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
        let mut permits: Vec<_> = (0..2).filter_map(|_| admission.admit(address("127.0.0.1"))).collect();
        assert!(permits.iter().all(|permit| !permit.is_reserve()));
        permits.extend((0..RESERVE).filter_map(|_| admission.admit(address("127.0.0.1"))));
        assert!(permits[2..].iter().all(Permit::is_reserve) && permits.len() == 2 + RESERVE);
        assert!(admission.admit(address("127.0.0.1")).is_none());
    }
}
