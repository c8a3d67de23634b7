//! Processes messages from brokers, each once per consumer.

use faena_domain::{NewJob, Timestamp};

use super::{events, submit, tasks, writer::Tx};
use crate::{NewTask, Result, Submitted};

pub fn submit(
    tx: &Tx,
    consumer: &str,
    message: &str,
    jobs: Vec<NewJob>,
    now: Timestamp,
) -> Result<Option<Vec<Submitted>>> {
    if !record_message(tx, consumer, message, now)? {
        return Ok(None);
    }
    events::with_actor(tx, consumer, |tx| submit::submit(tx, jobs, now)).map(Some)
}

pub fn create_task(tx: &Tx, consumer: &str, message: &str, task: &NewTask, now: Timestamp) -> Result<bool> {
    let is_new = record_message(tx, consumer, message, now)?;
    if is_new {
        tasks::create(tx, task, now)?;
    }
    Ok(is_new)
}

/// Records a message. Returns whether it is the first with its id.
fn record_message(tx: &Tx, consumer: &str, message: &str, now: Timestamp) -> Result<bool> {
    let mut insert = tx.connection.prepare_cached("INSERT OR IGNORE INTO inbox (consumer, id, at) VALUES (?, ?, ?)")?;
    Ok(insert.execute((consumer, message, now.as_ms()))? > 0)
}
