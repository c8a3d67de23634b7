//! Moves jobs forward: loops, dispatch, the built-in worker, connected workers, pools, webhooks and event delivery.
//!
//! `engine/loops.rs` lists everything that runs. Each loop does one bounded batch per round, runs on a period and when it
//! is woken, and is safe to run on every node at once.

pub mod address;
pub mod breaker;
mod builtin;
pub mod bulk;
mod bus;
mod config;
mod dispatcher;
mod driver;
mod engine;
mod error;
pub mod event_reader;
pub mod guardian;
mod handlers;
mod in_flight;
mod inbox;
mod input;
mod loop_health;
mod nodes;
pub mod outbox;
mod poller;
mod pool;
mod promoter;
mod recorder;
mod reporter;
mod retention;
pub mod schedules;
mod signature;
pub mod throughput;
pub mod trace;
mod verdict;
mod wakeups;
mod webhooks;
mod why;
pub mod workers;

pub use bus::Bus;
pub use config::{EngineConfig, Roles};
pub use driver::{Driver, Round};
pub use engine::{CancelResult, Engine};
pub use error::EngineError;
pub use inbox::{Inbox, InboxBroker, InboxConfig};
pub use loop_health::{LoopHealth, LoopStatus};
pub use outbox::{DatabaseUrl, OutboxConfig, SinkConfig, Source, SourceConfig, Target};
pub use pool::PoolConfig;
pub use signature::{Secret, sign};
pub use webhooks::{WebhookConfig, Webhooks};
