//! Definitions, their errors, and what events do to tasks.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod approval_webhooks;
mod approvals;
mod coding_task;
mod deferred;
mod definitions;
mod diagrams;
mod examples;
mod hostile;
mod operations;
mod properties;
mod queued;
mod reference;
mod schema;
mod states;
mod support;
mod timers;
