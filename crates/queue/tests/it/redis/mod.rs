//! Tests that need Redis.

mod faults;
mod moves;
