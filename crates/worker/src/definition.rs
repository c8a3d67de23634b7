//! Everything about a worker that does not change while it runs.

use std::{sync::Arc, time::Duration};

use tokio::runtime::Handle;

use crate::{address::Address, handler::Handlers};

pub(crate) struct Definition {
    pub address: Address,
    pub worker_id: String,
    pub name: Option<String>,
    pub concurrency: u32,
    pub queues: Vec<String>,
    pub handlers: Arc<Handlers>,
    /// How long running handlers may go on once the worker is told to stop.
    pub grace: Duration,
    /// One job, then the end.
    pub ephemeral: bool,
    /// Where handlers run. Not where the connection does: a handler that blocks must not hold up the heartbeat.
    pub handlers_on: Handle,
}
