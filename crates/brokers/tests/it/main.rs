//! Tests of the sinks and consumers against real brokers.

#![expect(clippy::unwrap_used, reason = "a failed test must point at its line")]

mod file;
mod messages;
mod nats;
mod rabbitmq;
mod redis;
mod support;
