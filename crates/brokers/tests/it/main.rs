//! What the sinks and consumers promise, against real brokers.

mod file;
mod messages;
mod nats;
mod rabbitmq;
mod redis;
mod support;
