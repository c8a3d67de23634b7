//! What only one engine can do, or fail at.

mod migrations;
mod postgres;
mod sqlite;
