//! An application's own outbox: what arrives of it, what becomes a job, and what trouble costs.

#[path = "../../../brokers/tests/it/support/mod.rs"]
pub mod support;

pub mod application;
mod jobs;
mod rabbitmq;
