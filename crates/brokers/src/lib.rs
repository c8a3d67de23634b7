//! Talks to brokers: RabbitMQ, NATS JetStream, Redis streams, and log files for who has none.
//!
//! A sink publishes what it is given, in order, and says of each message what became of it; a consumer hands out what arrives and takes the
//! acknowledgement. Neither knows what a message is about, nor where it is kept: ids, order, attempts and waiting belong to the caller.
//!
//! Two kinds of failure are told apart everywhere: a *message* is bad (`Verdict::Refused`), or the *broker* is unusable (`down`). Every call has a
//! bound in time, every connection is made anew by the next call after it broke, and no text that leaves this crate holds a password.

mod address;
mod delivery;
pub mod file;
mod message;
pub mod nats;
pub mod rabbitmq;
pub mod redis;
mod routing;

pub use address::{BrokerUrl, BrokerUrlError};
pub use delivery::{Consumer, Delivery, Down};
pub use message::{Declare, Message, Published, Sink, Verdict};
pub use routing::routing_key;

/// How long making a connection may take.
const CONNECT_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(5);
/// How long one call may take, if nothing else is said.
pub const DEFAULT_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(10);
/// How many messages may be on their way without a confirmation, if nothing else is said.
pub const DEFAULT_WINDOW: usize = 1_000;
