//! The engine over real stores: what becomes of jobs.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on shall say where")]

mod bulk;
mod driver;
mod http;
mod inbox;
mod limits;
mod event_reader;
mod outbox;
mod runs;
mod schedules;
mod shell;
mod simulation;
mod sources;
mod stop;
mod trace;
mod webhooks;
mod why;
mod world;
mod workers;
