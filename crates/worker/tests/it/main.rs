//! The SDK against a fake server that these tests control.

mod client;
mod fake_server;
mod handlers;
mod newer_server;
mod reconnecting;
mod running_jobs;
mod shutdown;
