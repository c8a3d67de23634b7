//! What only one engine can do, or fail at.

mod postgres;
mod sqlite;
