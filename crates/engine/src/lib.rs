//! Moves jobs forward: loops, dispatch, the built-in worker, connected workers, pools, webhooks and event delivery.
//!
//! `engine/loops.rs` lists everything that runs. Each loop does one bounded batch per round, runs on a period and when it
//! is woken, and is safe to run on all nodes concurrently.

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
mod key_usage;
mod log_throttle;
mod loop_health;
pub mod measure;
mod nodes;
pub mod outbox;
mod poller;
mod pool;
mod promoter;
mod queue;
mod recorder;
mod reporter;
mod retention;
pub mod schedules;
mod tasks;
mod signature;
pub mod throughput;
pub mod trace;
pub mod traces;
mod run_outcome;
mod wakeups;
mod webhooks;
mod why;
pub mod workers;

pub use builtin::LlmConfig;
pub use bus::Bus;
pub use config::{EngineConfig, PoolToken, Roles};
pub use driver::{Driver, Round};
pub use engine::{CancelResult, Engine};
pub use error::EngineError;
pub use inbox::{Deliver, Inbox, InboxBroker, InboxConfig, JobTemplate, TaskCounts, TaskEvents};
pub use key_usage::KeyUsage;
pub use loop_health::{LoopHealth, LoopStatus};
pub use outbox::{DatabaseUrl, OutboxConfig, SinkBody, SinkConfig, Source, SourceConfig, Target};
pub use pool::PoolConfig;
pub use queue::{JobQueue, QueueStatus, RedisQueueConfig};
pub use signature::{Secret, sign};
pub use webhooks::{WebhookConfig, Webhooks};
