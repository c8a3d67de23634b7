//! Tests of the HTTP and gRPC interfaces over a real store and engine: status and body of every response.

#![expect(clippy::unwrap_used, reason = "a failing test must show where")]

mod access;
mod access_grpc;
mod app;
mod audit;
mod bad_input;
mod batch;
mod bulk;
mod change;
mod conformance;
mod context;
mod create;
mod dead_letters;
mod events;
mod events_grpc;
mod example_machines;
mod dependencies;
mod job_events;
mod job_log;
mod jobs_grpc;
mod list;
mod metrics;
mod metrics_api;
mod openapi;
mod outbox;
mod payloads;
mod queues;
mod schedule_runs;
mod schedules;
mod schedules_grpc;
mod task_access;
mod task_limits;
mod task_operations;
mod task_operations_grpc;
mod tasks;
mod tasks_grpc;
mod trace;
mod traffic;
mod validation;
mod webhooks;
mod why;
