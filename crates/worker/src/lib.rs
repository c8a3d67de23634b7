//! Submit jobs to a Faena server, and write the workers that run them.
//!
//! A worker:
//!
//! ```no_run
//! use faena::{Context, JobError, Worker};
//! use serde::{Deserialize, Serialize};
//!
//! #[derive(Deserialize)]
//! struct Email { to: String }
//!
//! #[derive(Serialize)]
//! struct Receipt { characters: usize }
//!
//! // An error returned with `?` is retried.
//! async fn send(job: Context, email: Email) -> Result<Receipt, JobError> {
//!     if !email.to.contains('@') {
//!         return Err(JobError::fail("the address is not valid"));     // fails the job immediately
//!     }
//!     job.log(format!("sending to {}", email.to));
//!     Ok(Receipt { characters: email.to.len() })
//! }
//!
//! #[tokio::main]
//! async fn main() -> Result<(), faena::Error> {
//!     Worker::new().concurrency(16).handle("email.send", send).run().await
//! }
//! ```
//!
//! A program that submits a job and waits for its result:
//!
//! ```no_run
//! # async fn example() -> Result<(), faena::Error> {
//! let client = faena::Client::from_env()?;
//! let job = faena::JobRequest::new("email.send").payload(&serde_json::json!({ "to": "ada@example.org" }));
//! let id = client.submit(&job).await?.id;
//! let receipt: serde_json::Value = client.wait_for_result(id).await?;
//! # Ok(()) }
//! ```
//!
//! # Guarantees for handlers
//!
//! - A job runs **at least once**. It runs again if its worker dies, or is disconnected for longer than the grace period of the
//!   server. Every later run has a larger [`Context::run`], and the server rejects reports of an older one.
//! - A completed [`Context::step`] does not run again: a later run gets the stored result.
//! - The worker reconnects after a lost connection while its handlers continue. Reports without an acknowledgement are sent again.
//! - [`Context::cancelled`] says when to stop: the job was cancelled or exceeded its deadline, or the worker shuts down. A handler
//!   that blocks its thread should run that part in `tokio::task::spawn_blocking`.
//! - With [`Worker::run`], SIGTERM or Ctrl-C starts a graceful shutdown, which [`Worker::run_until`] describes.
//!
//! To test handlers without a server, see [`testing`].
//!
//! # Stability
//!
//! This version works with newer servers. Unknown fields are ignored; a value that this version does not know becomes the
//! `Unknown` variant of its enum. All such enums and all structs that the server fills are `#[non_exhaustive]`, so match with a
//! wildcard arm and do not construct them. `STABILITY.md` in the crate lists what may change in which release.

#![warn(missing_docs)]

/// Compiles the examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod address;
mod api;
mod backoff;
mod client;
mod connection;
mod context;
mod error;
mod executor;
mod frames;
mod handler;
mod ids;
mod job;
mod open_enum;
mod outgoing;
mod reports;
mod request;
mod runs;
mod session;
mod settings;
mod shutdown;
mod sse;
pub mod testing;
mod timestamp;
mod wait;
mod worker;

pub use api::{ApiRequest, Method};
pub use client::{Client, ClientBuilder};
pub use context::Context;
pub use error::{Error, ErrorCode, FieldError, JobError};
pub use handler::{HandlerResult, Next};
pub use ids::{JobId, RunNumber};
pub use job::{
    Attempt, ChangedJob, ErrorReason, Job, JobState, LogEntry, LogEvent, OnParentFailure, Priority, Progress, RetryOn,
    Step, SubmittedJob,
};
pub use request::JobRequest;
pub use sse::{EventStream, StreamEvent};
pub use timestamp::{InvalidTimestamp, Timestamp};
pub use tokio_util::sync::CancellationToken;
pub use worker::Worker;
