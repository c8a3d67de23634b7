//! The engine over real stores: what becomes of jobs.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on shall say where")]

mod driver;
mod http;
mod limits;
mod runs;
mod shell;
mod stop;
mod world;
mod workers;
