//! Sources: rows of an application's outbox are published to a sink or become jobs, also during outages.

pub mod application;
mod jobs;
mod rabbitmq;
