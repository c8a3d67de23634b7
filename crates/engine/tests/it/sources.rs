//! Sources: rows of an application's outbox at a sink or as jobs, also during outages.

pub mod application;
mod jobs;
mod rabbitmq;
