//! Hand jobs to a Faena server, and write the workers that do them.
//!
//! A worker in twenty lines:
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
//! async fn send(job: Context, email: Email) -> Result<Receipt, JobError> {
//!     if !email.to.contains('@') {
//!         return Err(JobError::fail("no address"));      // not tried again
//!     }
//!     job.log(format!("sending to {}", email.to));
//!     Ok(Receipt { characters: email.to.len() })         // `?` on any error: tried again
//! }
//!
//! #[tokio::main]
//! async fn main() -> Result<(), faena::Error> {
//!     Worker::new().concurrency(16).handle("email.send", send).run().await
//! }
//! ```
//!
//! And who gives it work:
//!
//! ```no_run
//! # async fn example() -> Result<(), faena::Error> {
//! let client = faena::Client::from_env()?;
//! let job = faena::JobRequest::new("email.send").payload(&serde_json::json!({ "to": "ada@example.org" }));
//! let id = client.submit(&job).await?.id;
//! let receipt: serde_json::Value = client.wait_for(id).await?;
//! # Ok(()) }
//! ```
//!
//! # What a handler may count on
//!
//! - A job runs **at least once**. It runs again when the worker dies, or is away for longer than the server's grace time.
//!   [`Context::run`] grows with every hand-out, and the server refuses reports of an older one.
//! - A finished [`Context::step`] does not run again: a later run gets its stored result.
//! - A lost connection is made again while handlers go on. What was reported and not acknowledged is sent again.
//! - [`Context::cancelled`] tells when to stop: the job was cancelled, is past its deadline, or the worker stops. A handler that
//!   blocks its thread should hand that work to `tokio::task::spawn_blocking`.
//! - SIGTERM is a wish to finish: see [`Worker::run_until`].
//!
//! Handlers are tested without a server: see [`testing`].

mod address;
mod backoff;
mod client;
mod context;
mod definition;
mod error;
mod floor;
mod handler;
mod ledger;
mod link;
mod outgoing;
mod request;
mod runs;
mod session;
mod stopping;
pub mod testing;
mod wait;
mod worker;

pub use client::{Client, ClientBuilder};
pub use context::Context;
pub use error::{Error, JobError};
pub use faena_domain::{FieldError, JobId, JobState, JobView, OnParentFailure, Priority, Progress, Run, Timestamp};
pub use faena_wire::{Changed, Created};
pub use handler::{Next, Outcome};
pub use request::JobRequest;
pub use tokio_util::sync::CancellationToken;
pub use worker::Worker;
