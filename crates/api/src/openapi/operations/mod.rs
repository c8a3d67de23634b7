//! Documentation of the operations, one module per resource. The route table names one function per route.

pub mod administration;
pub mod bulk;
pub mod dead_letters;
pub mod events;
pub mod jobs;
pub mod metrics;
pub mod outbox;
pub mod queues;
pub mod schedules;
pub mod system;
pub mod tasks;
pub mod webhooks;
pub mod workers;
