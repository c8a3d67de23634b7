//! Tests of the real binary with real databases and real signals.
//!
//! `./test` starts PostgreSQL and passes its address. A test fails if its database is missing.

#![expect(clippy::unwrap_used, reason = "a failing test panics where it fails")]

mod command_line;
mod crash;
mod disk;
mod doctor;
mod example_workers;
mod faena;
mod invalid_messages;
mod limits;
mod load;
mod markdown;
mod nodes;
mod outage;
mod pages;
mod pools;
mod postgres;
mod program;
mod proxy;
mod reference;
mod schedules;
mod shell;
mod start;
mod stop;
mod structure;
mod transports;
mod watching;
mod webhooks;
mod worker_crashes;
mod worker_failover;
mod worker_protocol;
mod workers;
