//! `/api/v1`.

pub mod bulk;
pub mod events;
pub mod jobs;
pub mod list;
pub mod patch;
mod submit;
pub mod webhooks;
