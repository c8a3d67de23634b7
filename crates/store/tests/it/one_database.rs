//! Behaviour of one database only: SQLite or PostgreSQL.

mod events;
mod lanes;
mod listening;
mod migrations;
mod plans;
mod postgres;
mod sqlite;
mod tasks;
mod transfer;
