//! Handlers of `/api/v1`, one module per resource.
//!
//! `/jobs` has several modules, among them `jobs` for single jobs and batches, `list` for lists and filters,
//! `patch` for changes, and `job_events` for the stream of one job. `events` serves `/events`. `paging` implements the
//! paging rule of all lists. The handlers of `/workers` are in `crate::workers`.

pub mod api_keys;
pub mod audit;
pub mod bulk;
pub mod dead_letters;
pub mod events;
pub mod history;
pub mod job_events;
pub mod job_graph;
pub mod job_log;
pub mod jobs;
pub mod limits;
pub mod list;
pub mod machines;
pub mod metrics;
pub mod outbox;
pub mod paging;
pub mod patch;
pub mod queues;
mod schedule_fields;
pub mod schedules;
pub mod system;
pub mod task_bulk;
pub mod task_forks;
pub mod task_views;
pub mod tasks;
pub mod trace;
pub mod webhooks;
