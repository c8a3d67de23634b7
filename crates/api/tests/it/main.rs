//! Tests of the HTTP and gRPC interfaces over a real store and engine: status and body of every response.

#![expect(clippy::unwrap_used, reason = "a failing test must show where")]

mod app;
mod audit;
mod batch;
mod bulk;
mod change;
mod context;
mod create;
mod dead_letters;
mod events;
mod jobs_grpc;
mod list;
mod metrics;
mod outbox;
mod queues;
mod schedule_runs;
mod schedules;
mod schedules_grpc;
mod stream;
mod stream_grpc;
mod trace;
mod validation;
mod webhooks;
mod why;
