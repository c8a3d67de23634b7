//! `/api/v1`.

pub mod audit;
pub mod bulk;
pub mod events;
pub mod jobs;
pub mod letters;
pub mod list;
pub mod outbox;
pub mod patch;
pub mod queues;
mod schedule_fields;
pub mod schedules;
pub mod stream;
pub mod trace;
pub mod webhooks;
