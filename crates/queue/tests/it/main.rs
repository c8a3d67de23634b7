//! Tests the queue with a real Redis.

#![expect(clippy::unwrap_used, reason = "a test that cannot continue must say where")]

mod redis;
mod servers;
