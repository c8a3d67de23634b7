//! Tests the engine with real stores.

#![expect(clippy::unwrap_used, reason = "a test that cannot continue must say where")]

mod approval_webhooks;
mod bulk;
mod driver;
mod event_reader;
mod failover_redis;
mod http;
mod inbox;
mod inbox_messages;
mod limits;
mod llm;
mod outbox;
mod queue_redis;
mod runs;
mod schedules;
mod shell;
mod simulation;
mod sources;
mod stop;
mod task_inbox;
mod trace;
mod traces;
mod wakeups;
mod webhooks;
mod why;
mod workers;
mod fixture;
