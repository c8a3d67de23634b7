//! Clients for message brokers: RabbitMQ, NATS JetStream, Redis streams, and log files.
//!
//! A sink publishes messages in order and reports the outcome of each. A consumer yields deliveries and acknowledges
//! them. Neither interprets or stores a message: the caller is responsible for ids, order, attempts and retries.
//!
//! The crate keeps two kinds of failure apart: the *message* is bad (`PublishOutcome::Rejected`), or the *broker*
//! cannot be used (`BrokerError`). Every call has a time limit, the call after a connection loss connects again, and no
//! text that this crate returns contains a password.

mod message;
mod delivery;
mod error;
mod broker_url;
mod routing;
pub mod rabbitmq;
pub mod nats;
pub mod redis;
pub mod file;

pub use broker_url::{BrokerUrl, BrokerUrlError};
pub use delivery::{Consumer, Delivery};
pub use error::BrokerError;
pub use message::{Declare, Message, PublishOutcome, PublishReport, Sink};

/// Time limit for opening a connection.
const CONNECT_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(5);
/// Default time limit for one call.
pub const DEFAULT_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(10);
/// Default limit for messages sent and not yet confirmed.
pub const DEFAULT_WINDOW: usize = 1_000;
