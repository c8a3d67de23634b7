//! Behaviour of one engine only.

mod events;
mod listening;
mod migrations;
mod plans;
mod postgres;
mod sqlite;
