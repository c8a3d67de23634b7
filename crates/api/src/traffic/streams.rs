//! Limits the number of open streams: events, and changes of one job.

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
};

use faena_domain::{ApiKeyId, ErrorCode};

use super::client_network;
use crate::{ApiError, ApiResult, context::Caller};

pub struct StreamLimits {
    pub total: usize,
    /// Limit of one API key, or of one address for callers without a key. Does not apply to local callers without a key.
    pub per_caller: usize,
}

pub struct Streams {
    limits: StreamLimits,
    open: Arc<Mutex<Open>>,
}

#[derive(Default)]
struct Open {
    total: usize,
    by_caller: HashMap<StreamCaller, usize>,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum StreamCaller {
    Key(ApiKeyId),
    Address(IpAddr),
    Local,
}

/// An open stream. Dropping it frees its slot.
pub struct StreamPermit {
    open: Arc<Mutex<Open>>,
    caller: StreamCaller,
}

impl Streams {
    pub fn new(limits: StreamLimits) -> Streams {
        Streams { limits, open: Arc::default() }
    }

    /// Admits a stream. Fails with 429 if the caller has too many streams, and with 503 if the server has.
    pub fn admit(&self, caller: &Caller) -> ApiResult<StreamPermit> {
        let key = caller.access.as_ref().ok().and_then(|access| access.key());
        let caller = match (key, caller.address) {
            (Some(key), _) => StreamCaller::Key(key),
            (None, Some(address)) if !address.to_canonical().is_loopback() => {
                StreamCaller::Address(client_network(address.to_canonical()))
            }
            (None, _) => StreamCaller::Local,
        };
        let StreamLimits { total, per_caller } = self.limits;
        let mut open = lock(&self.open);
        let of_caller = open.by_caller.get(&caller).copied().unwrap_or(0);
        if caller != StreamCaller::Local && of_caller >= per_caller {
            let message = format!("this caller already has {per_caller} open streams; close one or try again later");
            return Err(ApiError { retry_after_seconds: Some(1), ..ApiError::new(ErrorCode::RateLimited, message) });
        }
        if open.total >= total {
            let message = format!("this node already has {total} open streams; use another node or try again later");
            return Err(ApiError::new(ErrorCode::Unavailable, message));
        }
        open.total += 1;
        open.by_caller.insert(caller.clone(), of_caller + 1);
        Ok(StreamPermit { open: self.open.clone(), caller })
    }
}

impl Drop for StreamPermit {
    fn drop(&mut self) {
        let mut open = lock(&self.open);
        open.total -= 1;
        if let Some(count) = open.by_caller.get_mut(&self.caller) {
            *count -= 1;
            if *count == 0 {
                open.by_caller.remove(&self.caller);
            }
        }
    }
}

fn lock(open: &Mutex<Open>) -> std::sync::MutexGuard<'_, Open> {
    open.lock().unwrap_or_else(PoisonError::into_inner)
}
