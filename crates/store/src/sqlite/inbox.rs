//! Messages from brokers, once per consumer and message.

use faena_domain::{NewJob, Timestamp};

use super::{events, submit, writer::Tx};
use crate::{Result, Submitted};

pub fn submit(
    tx: &Tx,
    consumer: &str,
    message: &str,
    jobs: Vec<NewJob>,
    now: Timestamp,
) -> Result<Option<Vec<Submitted>>> {
    let new = tx
        .connection
        .prepare_cached("INSERT OR IGNORE INTO inbox (consumer, id, at) VALUES (?, ?, ?)")?
        .execute((consumer, message, now.as_ms()))?;
    if new == 0 {
        return Ok(None);
    }
    events::with_actor(tx, consumer, |tx| submit::submit(tx, jobs, now)).map(Some)
}
