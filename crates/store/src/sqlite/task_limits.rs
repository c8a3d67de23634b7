//! Limits the number of running tasks of each machine.

use faena_domain::{TaskId, Timestamp};
use faena_machine::{Definition, Input};
use rusqlite::{Connection, OptionalExtension};

use super::{rules, tasks::apply_to, writer::Tx};
use crate::{
    COUNT_LIMIT, Result, TaskInput,
    sql::sql,
    task_limits::{MACHINE, TaskCapacity, TaskPosition, may_be_limited},
};

/// Returns how many tasks of a machine may start.
pub fn capacity(tx: &Tx, definition: &Definition) -> Result<TaskCapacity> {
    let (mut capacity, machine) = (TaskCapacity::default(), &definition.machine);
    if !may_be_limited(&tx.shared.rules.current(), definition) {
        return Ok(capacity);
    }
    // SQLite: there is only one writer, so the count stays correct until the commit.
    let Some(max) = limit(tx.connection, machine)? else { return Ok(capacity) };
    let has_queue = tx
        .connection
        .prepare_cached("SELECT 1 FROM task WHERE status = 'queued' AND machine = ? LIMIT 1")?
        .exists([machine])?;
    capacity.set(machine, max - running(tx.connection, machine, max)?, has_queue);
    Ok(capacity)
}

fn limit(connection: &Connection, machine: &str) -> Result<Option<i64>> {
    let found: Option<Option<i64>> = connection
        .prepare_cached(sql!("SELECT concurrency FROM limit_rule WHERE scope = {SCOPE_MACHINE} AND name = ?"))?
        .query_row([machine], |row| row.get(0))
        .optional()?;
    Ok(found.flatten())
}

/// Counts the running tasks of a machine up to `max`. The join reads no tasks that have ended.
fn running(connection: &Connection, machine: &str, max: i64) -> Result<i64> {
    let sql = "SELECT count(*) FROM (SELECT 1 FROM machine m CROSS JOIN task t
         ON t.machine = m.name AND t.version = m.version AND t.status IN ('running', 'paused') WHERE m.name = ?1 LIMIT ?2)";
    Ok(connection.prepare_cached(sql)?.query_row((machine, max), |row| row.get(0))?)
}

/// Starts up to `limit` queued tasks of each machine that has capacity. Returns how many.
pub fn start_queued(tx: &Tx, limit: usize, now: Timestamp) -> Result<usize> {
    // Reads one queued task of each machine, however many there are.
    let mut statement = tx.connection.prepare_cached(
        "SELECT DISTINCT name FROM machine m
         WHERE EXISTS (SELECT 1 FROM task WHERE status = 'queued' AND machine = m.name) ORDER BY name",
    )?;
    let machines: Vec<String> = statement.query_map([], |row| row.get(0))?.collect::<rusqlite::Result<_>>()?;
    let mut started = 0;
    for machine in machines {
        let capacity = match self::limit(tx.connection, &machine)? {
            Some(max) => max - running(tx.connection, &machine, max)?,
            None => i64::MAX,
        };
        let capacity = capacity.min(i64::try_from(limit).unwrap_or(i64::MAX));
        let mut statement = tx
            .connection
            .prepare_cached("SELECT id FROM task WHERE status = 'queued' AND machine = ? ORDER BY id LIMIT ?")?;
        let inputs: Vec<TaskInput> = statement
            .query_map((&machine, capacity.max(0)), |row| {
                Ok(TaskInput { task: TaskId(row.get(0)?), input: Input::Start })
            })?
            .collect::<rusqlite::Result<_>>()?;
        started += inputs.len();
        if !inputs.is_empty() {
            apply_to(tx, &[(inputs, now)], None)?;
        }
    }
    Ok(started)
}

pub fn position(connection: &Connection, machine: &str, id: TaskId) -> Result<TaskPosition> {
    let limit = limit(connection, machine)?;
    let ahead: i64 = connection
        .prepare_cached(
            "SELECT count(*) FROM (SELECT 1 FROM task WHERE status = 'queued' AND machine = ?1 AND id < ?2 LIMIT ?3)",
        )?
        .query_row((machine, id.0, COUNT_LIMIT as i64), |row| row.get(0))?;
    let running = running(connection, machine, limit.unwrap_or(COUNT_LIMIT as i64))?;
    Ok(TaskPosition {
        running: running.unsigned_abs(),
        limit: limit.map(i64::unsigned_abs),
        ahead: ahead.unsigned_abs(),
    })
}

/// Applies the limit in the newest version of a machine, unless an operator set another one.
pub fn apply_definition(tx: &Tx, definition: &Definition, by: &str, now: Timestamp) -> Result<()> {
    let name = &definition.machine;
    let newest: u32 =
        tx.connection.query_row("SELECT max(version) FROM machine WHERE name = ?", [name], |row| row.get(0))?;
    if newest != definition.version {
        return Ok(());
    }
    let changed = match definition.limits.running {
        Some(running) => tx.connection.execute(
            sql!(
                "INSERT INTO limit_rule (scope, name, concurrency, origin, changed_at, changed_by)
                 VALUES ({SCOPE_MACHINE}, ?1, ?2, ?3, ?4, ?5)
                 ON CONFLICT DO UPDATE SET concurrency = ?2, changed_at = ?4, changed_by = ?5 WHERE origin = ?3"
            ),
            (name, running, MACHINE, now.as_ms(), by),
        )?,
        None => tx.connection.execute(
            sql!("DELETE FROM limit_rule WHERE scope = {SCOPE_MACHINE} AND name = ? AND origin = ?"),
            (name, MACHINE),
        )?,
    };
    if changed > 0 { rules::reload_and_signal(tx) } else { Ok(()) }
}
