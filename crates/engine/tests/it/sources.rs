//! An application's own outbox: what arrives of it, what becomes a job, and what trouble costs.

pub mod application;
mod jobs;
mod rabbitmq;
