//! Tests of the real binary with real databases and real signals.
//!
//! `./test` starts PostgreSQL and passes its address. A test fails if its database is missing.

#![expect(clippy::unwrap_used, reason = "a failing test panics where it fails")]

mod access_log;
mod adapters;
mod certificate;
#[path = "../../../brokers/tests/it/support/mod.rs"]
mod broker_support;
#[cfg(target_os = "linux")]
mod clocks;
mod bad_input;
mod browser;
mod command_line;
mod connections;
mod crash;
mod dashboard;
mod demo;
mod deployment;
mod disk;
mod doctor;
mod example_workers;
mod exposure;
mod faena;
mod faults;
mod health;
mod hostile;
mod inputs;
mod invalid_messages;
mod limits;
mod llm;
mod load;
mod log;
mod markdown;
mod metrics;
mod monitoring;
mod moving;
mod nodes;
mod openapi;
mod origins;
mod outage;
mod pages;
mod pools;
mod postgres;
mod processes;
mod program;
mod proxy;
mod queue_redis;
mod reference;
mod schedules;
mod security;
mod shell;
mod start;
mod stop;
mod structure;
mod tables;
mod takeover;
mod task_crashes;
mod task_scheduler;
mod terminal;
mod top;
mod traces;
mod transports;
mod watching;
mod viewer_keys;
mod webhooks;
mod worker_crashes;
mod worker_failover;
mod worker_protocol;
mod workers;

use broker_support::ports;
