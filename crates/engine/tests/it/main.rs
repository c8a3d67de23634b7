//! The engine over real stores: what becomes of jobs.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on shall say where")]

mod bulk;
mod driver;
mod http;
mod inbox;
mod limits;
mod outbox;
mod runs;
mod shell;
mod simulation;
mod sources;
mod stop;
mod webhooks;
mod why;
mod world;
mod workers;
