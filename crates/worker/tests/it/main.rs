//! The SDK against a server that these tests play themselves.

mod client;
mod fake_server;
mod handlers;
mod newer_server;
mod reconnecting;
mod running_jobs;
mod shutdown;
