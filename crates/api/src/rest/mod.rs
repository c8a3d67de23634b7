//! Handlers of `/api/v1`, one module per resource.
//!
//! `/jobs` has several: `jobs` for single jobs and batches, `list` for lists and filters, `patch` for changes, and
//! `events` for the stream of one job. `stream` serves `/events`. The handlers of `/workers` are in `crate::workers`.

pub mod audit;
pub mod bulk;
pub mod dead_letters;
pub mod events;
pub mod jobs;
pub mod limits;
pub mod list;
pub mod outbox;
pub mod patch;
pub mod queues;
mod schedule_fields;
pub mod schedules;
pub mod stream;
pub mod trace;
pub mod webhooks;
