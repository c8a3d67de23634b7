//! The stories: the real binary, real databases, real signals.
//!
//! They are run by `./test`, which starts PostgreSQL and says where it is. A story that cannot have its database fails.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on shall say where")]

mod bad_frames;
mod command_line;
mod crash;
mod disk;
mod doctor;
mod doors;
mod example_workers;
mod faena;
mod hands;
mod limits;
mod markdown;
mod line;
mod load;
mod nodes;
mod outage;
mod pools;
mod postgres;
mod reference;
mod pages;
mod schedules;
mod start;
mod stop;
mod watching;
mod webhooks;
mod worker_deaths;
mod worker_moves;
