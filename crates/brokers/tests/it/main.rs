//! What the sinks and consumers promise, against real brokers.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on shall say where")]

mod file;
mod messages;
mod nats;
mod rabbitmq;
mod redis;
mod support;
