//! The doors, over a real store and engine: status and body of every answer.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on shall say where")]

mod app;
mod audit;
mod batch;
mod bulk;
mod change;
mod create;
mod events;
mod faults;
mod frame;
mod letters;
mod list;
mod outbox;
mod schedules;
mod schedules_grpc;
mod stream;
mod stream_grpc;
mod trace;
mod webhooks;

mod queues;
mod why;
