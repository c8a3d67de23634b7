//! What only one engine can do, or fail at.

mod events;
mod listening;
mod migrations;
mod postgres;
mod sqlite;
