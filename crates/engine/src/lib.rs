//! Moves jobs forward: loops, dispatch, the built-in worker, the workers that connect.
//!
//! `Engine::start` is the list of everything that runs. Each loop does one bounded batch per round, on a period and on a nudge,
//! and is safe to run on every node at once.

mod config;
mod arrivals;
mod inbox;
mod beats;
pub mod bulk;
mod driver;
mod bus;
pub mod live;
pub mod breaker;
mod in_flight;
mod verdict;
pub mod workers;
mod dispatcher;
mod reporter;
mod signature;
mod webhooks;
pub mod outbox;
mod recorder;
mod promoter;
mod retention;
pub mod schedules;
mod nodes;
pub mod guardian;
mod handlers;
mod pool;
mod poller;
pub mod throughput;
pub mod address;
mod builtin;
mod why;
pub mod trace;
mod engine;

pub use beats::{Beat, Beats};
pub use bus::Bus;
pub use config::{EngineConfig, Roles};
pub use driver::{Driver, Round};
pub use engine::{CancelResult, Engine};
pub use inbox::{Inbox, InboxBroker, InboxConfig};
pub use outbox::{DatabaseUrl, OutboxConfig, SinkConfig, Source, SourceConfig, Target};
pub use pool::PoolConfig;
pub use signature::{Secret, sign};
pub use webhooks::{WebhookConfig, Webhooks};
