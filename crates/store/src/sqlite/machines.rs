//! Stores and reads the definitions of machines.

use std::{collections::BTreeMap, sync::Arc};

use faena_domain::Timestamp;
use faena_machine::Definition;
use rusqlite::{Connection, OptionalExtension};

use super::{Shared, audit, task_limits, writer::Tx};
use crate::{
    MachineStatus, Registered, Result, StoreError, StoredMachine,
    tasks::{TASKS, machine_audit, version_conflict},
};

pub fn register(tx: &Tx, definition: &Arc<Definition>, by: &str, now: Timestamp) -> Result<Registered> {
    let known: Option<String> = tx
        .connection
        .prepare_cached("SELECT hash FROM machine WHERE name = ? AND version = ?")?
        .query_row((&definition.machine, definition.version), |row| row.get(0))
        .optional()?;
    match known {
        Some(hash) if hash == definition.hash => return Ok(Registered::Known),
        Some(_) => return Err(version_conflict(definition)),
        None => {}
    }
    tx.connection.execute(
        "INSERT INTO machine (name, version, hash, definition, created_at, created_by) VALUES (?, ?, ?, ?, ?, ?)",
        (&definition.machine, definition.version, &definition.hash, definition.source.to_string(), now.as_ms(), by),
    )?;
    // The built-in machines are part of the program; no caller registered them.
    if by != TASKS {
        audit::add(tx, &machine_audit(definition, by), now)?;
    }
    task_limits::apply_definition(tx, definition, by, now)?;
    Ok(Registered::New)
}

pub fn machines(connection: &Connection) -> Result<Vec<MachineStatus>> {
    let mut counts: BTreeMap<(String, u32), BTreeMap<String, u64>> = BTreeMap::new();
    let mut statement = connection
        .prepare_cached("SELECT machine, version, status, count(*) FROM task GROUP BY machine, version, status")?;
    let rows =
        statement.query_map([], |row| Ok(((row.get(0)?, row.get(1)?), row.get(2)?, row.get::<_, i64>(3)? as u64)))?;
    for row in rows {
        let (key, status, count) = row?;
        counts.entry(key).or_default().insert(status, count);
    }
    let mut statement = connection.prepare_cached(
        "SELECT name, version, hash, created_at, created_by FROM machine ORDER BY name, version DESC",
    )?;
    let rows = statement.query_map([], |row| {
        Ok(MachineStatus {
            name: row.get(0)?,
            version: row.get(1)?,
            hash: row.get(2)?,
            created_at: Timestamp::from_ms(row.get(3)?),
            created_by: row.get(4)?,
            tasks: BTreeMap::new(),
        })
    })?;
    let filled = rows.map(|row| {
        let row = row?;
        let tasks = counts.remove(&(row.name.clone(), row.version)).unwrap_or_default();
        Ok(MachineStatus { tasks, ..row })
    });
    filled.collect()
}

pub fn machine(
    connection: &Connection,
    shared: &Shared,
    name: &str,
    version: Option<u32>,
) -> Result<Option<StoredMachine>> {
    let found: Option<(u32, String, i64, String)> = connection
        .prepare_cached(
            "SELECT version, definition, created_at, created_by FROM machine
             WHERE name = ?1 AND (?2 IS NULL OR version = ?2) ORDER BY version DESC LIMIT 1",
        )?
        .query_row((name, version), |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?)))
        .optional()?;
    let Some((version, text, created_at, created_by)) = found else { return Ok(None) };
    let definition = match shared.machines.get(name, version) {
        Some(definition) => definition,
        None => shared.machines.parse(&text)?,
    };
    Ok(Some(StoredMachine { definition, created_at: Timestamp::from_ms(created_at), created_by }))
}

pub fn definition(tx: &Tx, name: &str, version: u32) -> Result<Arc<Definition>> {
    if let Some(known) = tx.shared.machines.get(name, version) {
        return Ok(known);
    }
    let found = machine(tx.connection, tx.shared, name, Some(version))?;
    let found =
        found.ok_or_else(|| StoreError::Internal(format!("machine {name} version {version} is missing").into()))?;
    Ok(found.definition)
}
