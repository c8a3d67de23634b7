//! Raises the limit on open file descriptors: every connection needs one.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::admission::RESERVE;

/// Descriptors for everything except client connections: the database, brokers, files, pipes to child processes.
const RESERVED: u64 = 1_024;

/// Raises the soft limit of this process so that `connections` fit, as far as the hard limit allows.
///
/// Many systems start processes with a soft limit of 1024, for programs that use `select`. Returns how many connections
/// fit. The server accepts no more than that: without free descriptors, it could not answer health checks either.
pub fn raise_limit(connections: usize) -> usize {
    let wanted = u64::try_from(connections).unwrap_or(u64::MAX).saturating_add(RESERVED);
    let limit = getrlimit(Resource::Nofile);
    let Some(current) = limit.current.filter(|current| *current < wanted) else { return connections };
    let reachable = limit.maximum.map_or(wanted, |maximum| maximum.min(wanted));
    let raised = Rlimit { current: Some(reachable), maximum: limit.maximum };
    let limit = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => reachable,
        Err(_) => current,
    };
    let fitting = fitting(limit).min(connections);
    if limit < wanted - RESERVED {
        tracing::warn!(
            limit,
            connections,
            allowed = fitting,
            "too few file descriptors for server.max_connections, raise the limit (ulimit -n, LimitNOFILE)"
        );
    }
    fitting
}

/// Returns how many connections fit into a descriptor limit.
///
/// If the limit is low, half of it and [`RESERVE`] descriptors are kept for everything else.
fn fitting(limit: u64) -> usize {
    let reserve = u64::try_from(RESERVE).unwrap_or(u64::MAX);
    usize::try_from(limit.saturating_sub(RESERVED.min(limit / 2 + reserve))).unwrap_or(usize::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_descriptors_for_everything_else() {
        assert_eq!([fitting(100), fitting(1_024), fitting(21_024)], [18, 480, 20_000]);
    }
}
