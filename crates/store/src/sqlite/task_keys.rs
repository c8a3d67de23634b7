//! Creates a task once per idempotency key.

use faena_domain::{TaskId, Timestamp};

use super::{tasks, writer::Tx};
use crate::{KeyedTask, NewTask, Result, TaskKey};

pub fn create_once(tx: &Tx, key: &TaskKey, task: &NewTask, now: Timestamp) -> Result<Option<KeyedTask>> {
    let sql = "INSERT OR IGNORE INTO task_key (key, task, fingerprint) VALUES (?, ?, ?)";
    if tx.connection.prepare_cached(sql)?.execute((&key.key, task.id.0, key.fingerprint))? > 0 {
        tasks::create(tx, task, now)?;
        return Ok(None);
    }
    let mut find = tx.connection.prepare_cached("SELECT task, fingerprint = ?2 FROM task_key WHERE key = ?1")?;
    let found = find.query_row((&key.key, key.fingerprint), |row| {
        Ok(KeyedTask { id: TaskId(row.get(0)?), is_same_request: row.get(1)? })
    })?;
    Ok(Some(found))
}
