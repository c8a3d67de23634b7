//! The settings of a worker that do not change while it runs.

use std::{sync::Arc, time::Duration};

use tokio::runtime::Handle;

use crate::{address::Address, handler::Handlers};

pub(crate) struct Settings {
    pub address: Address,
    pub worker_id: String,
    /// Token of the registration that a worker pool has created for this process.
    pub session_token: Option<String>,
    pub name: Option<String>,
    /// Version of the program that the worker is part of.
    pub version: Option<String>,
    pub concurrency: u32,
    pub queues: Vec<String>,
    pub handlers: Arc<Handlers>,
    /// How long running handlers may continue after a shutdown was requested.
    pub grace_period: Duration,
    /// Whether the worker ends after one job.
    pub ephemeral: bool,
    /// The runtime of the handlers. The connection has its own: a handler that blocks must not delay the heartbeat.
    pub handler_runtime: Handle,
}
