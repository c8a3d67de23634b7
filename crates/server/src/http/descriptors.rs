//! Raises the limit of open file descriptors: every connection takes one.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors for everything that is not a connection of a client: the database, brokers, files, pipes of programs.
const RESERVED: u64 = 1_024;

/// Raises the soft limit of this process so that `connections` fit, as far as the hard limit allows.
///
/// Many systems start processes with a soft limit of 1024, for programs that use `select`.
pub fn raise_limit(connections: usize) {
    let wanted = u64::try_from(connections).unwrap_or(u64::MAX).saturating_add(RESERVED);
    let limit = getrlimit(Resource::Nofile);
    let Some(current) = limit.current.filter(|current| *current < wanted) else { return };
    let reachable = limit.maximum.map_or(wanted, |maximum| maximum.min(wanted));
    let raised = Rlimit { current: Some(reachable), maximum: limit.maximum };
    let limit = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => reachable,
        Err(_) => current,
    };
    if limit < wanted - RESERVED {
        tracing::warn!(
            limit,
            connections,
            "too few file descriptors for server.max_connections, raise the limit (ulimit -n, LimitNOFILE)"
        );
    }
}
