//! The versions of the schema. Each migration continues from the one before; a released migration never changes.

use crate::{StoreError, sql::sql};

/// One step from a version of the schema to the next, for each database.
#[derive(Clone, Copy, Debug)]
pub struct Migration {
    pub version: i32,
    pub name: &'static str,
    pub sqlite: &'static str,
    pub postgres: &'static str,
}

pub const SCHEMA: Migration = Migration {
    version: 1,
    name: "schema",
    sqlite: sql!(include_str!("../migrations/001_schema.sqlite.sql")),
    postgres: sql!(include_str!("../migrations/001_schema.postgres.sql")),
};

pub const MIGRATIONS: &[Migration] = &[SCHEMA];

/// Returns the migrations that a schema of version `found` still needs.
///
/// Fails if the schema is newer than every known migration, or if it needs migrations and `allowed` is false.
pub fn missing(migrations: &[Migration], found: i32, allowed: bool) -> Result<&[Migration], StoreError> {
    let newest = migrations.last().map_or(0, |migration| migration.version);
    if found > newest {
        return Err(StoreError::Setup(format!(
            "the database has schema version {found}, but this version of faena knows only up to {newest}; use a newer version (nothing was changed)"
        )));
    }
    let from = migrations.partition_point(|migration| migration.version <= found);
    if from < migrations.len() && !allowed {
        return Err(StoreError::Setup(format!(
            "the database has schema version {found}, but this version of faena needs {newest}; run \"faena migrate\" first, or start without --no-migrate"
        )));
    }
    Ok(&migrations[from..])
}
