//! Stores and reads the definitions of machines.

use std::{collections::BTreeMap, sync::Arc};

use deadpool_postgres::Object;
use faena_domain::Timestamp;
use faena_machine::Definition;

use super::{Shared, audit, rules, task_limits};
use crate::{
    MachineStatus, Registered, Result, StoreError, StoredMachine,
    tasks::{TASKS, machine_audit, version_conflict},
};

pub async fn register(shared: &Shared, definition: &Arc<Definition>, by: &str, now: Timestamp) -> Result<Registered> {
    let client = shared.begin().await?;
    let result = register_in(&client, definition, by, now).await;
    let (registered, has_new_limit) = client.end(result).await?;
    if has_new_limit {
        rules::reload_and_signal(shared).await?;
    }
    Ok(registered)
}

/// Stores a version of a machine. Also returns whether the limit of running tasks changed.
async fn register_in(client: &Object, definition: &Definition, by: &str, now: Timestamp) -> Result<(Registered, bool)> {
    let source = definition.source.to_string();
    let version = version_number(definition.version);
    let added = client
        .execute(
            "INSERT INTO faena.machine (name, version, hash, definition, created_at, created_by)
             VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT DO NOTHING",
            &[&definition.machine, &version, &definition.hash, &source, &now.as_ms(), &by],
        )
        .await?;
    if added == 1 {
        // The built-in machines are part of the program; no caller registered them.
        if by != TASKS {
            audit::add(client, &machine_audit(definition, by), now).await?;
        }
        return Ok((Registered::New, task_limits::apply_definition(client, definition, by, now).await?));
    }
    let sql = "SELECT hash FROM faena.machine WHERE name = $1 AND version = $2";
    let hash: String = client.query_one(sql, &[&definition.machine, &version]).await?.get(0);
    if hash == definition.hash { Ok((Registered::Known, false)) } else { Err(version_conflict(definition)) }
}

/// Converts a version for PostgreSQL, which has no unsigned types.
pub fn version_number(version: u32) -> i32 {
    i32::try_from(version).unwrap_or(i32::MAX)
}

pub fn from_version_number(version: i32) -> u32 {
    u32::try_from(version).unwrap_or_default()
}

pub async fn machines(shared: &Shared) -> Result<Vec<MachineStatus>> {
    let client = shared.client().await?;
    let result = machines_in(&client).await;
    client.return_to_pool(result)
}

async fn machines_in(client: &Object) -> Result<Vec<MachineStatus>> {
    let sql = "SELECT machine, version, status, count(*) FROM faena.task GROUP BY machine, version, status";
    let mut counts: BTreeMap<(String, i32), BTreeMap<String, u64>> = BTreeMap::new();
    for row in client.query(sql, &[]).await? {
        let count = u64::try_from(row.get::<_, i64>(3)).unwrap_or_default();
        counts.entry((row.get(0), row.get(1))).or_default().insert(row.get(2), count);
    }
    let sql = "SELECT name, version, hash, created_at, created_by FROM faena.machine ORDER BY name, version DESC";
    let rows = client.query(sql, &[]).await?;
    let machines = rows.iter().map(|row| {
        let (name, version): (String, i32) = (row.get(0), row.get(1));
        let tasks = counts.remove(&(name.clone(), version)).unwrap_or_default();
        MachineStatus {
            name,
            version: from_version_number(version),
            hash: row.get(2),
            created_at: Timestamp::from_ms(row.get(3)),
            created_by: row.get(4),
            tasks,
        }
    });
    Ok(machines.collect())
}

pub async fn machine(
    client: &Object,
    shared: &Shared,
    name: &str,
    version: Option<u32>,
) -> Result<Option<StoredMachine>> {
    let sql = "SELECT version, definition, created_at, created_by FROM faena.machine
               WHERE name = $1 AND ($2::int4 IS NULL OR version = $2) ORDER BY version DESC LIMIT 1";
    let Some(row) = client.query_opt(sql, &[&name, &version.map(version_number)]).await? else { return Ok(None) };
    let definition = match shared.machines.get(name, from_version_number(row.get(0))) {
        Some(definition) => definition,
        None => shared.machines.parse(row.get(1))?,
    };
    Ok(Some(StoredMachine { definition, created_at: Timestamp::from_ms(row.get(2)), created_by: row.get(3) }))
}

pub async fn definition(client: &Object, shared: &Shared, name: &str, version: u32) -> Result<Arc<Definition>> {
    if let Some(known) = shared.machines.get(name, version) {
        return Ok(known);
    }
    let found = machine(client, shared, name, Some(version)).await?;
    let found =
        found.ok_or_else(|| StoreError::Internal(format!("machine {name} version {version} is missing").into()))?;
    Ok(found.definition)
}
