//! The schema's versions. Each goes forward from the one before; none is ever changed after it was released.

use crate::StoreError;

pub struct Migration {
    pub version: i32,
    pub name: &'static str,
    pub sqlite: &'static str,
    pub postgres: &'static str,
}

pub const MIGRATIONS: &[Migration] = &[
    Migration {
        version: 1,
        name: "jobs",
        sqlite: include_str!("../migrations/001_jobs.sqlite.sql"),
        postgres: include_str!("../migrations/001_jobs.postgres.sql"),
    },
    Migration {
        version: 2,
        name: "workers",
        sqlite: include_str!("../migrations/002_workers.sqlite.sql"),
        postgres: include_str!("../migrations/002_workers.postgres.sql"),
    },
    Migration {
        version: 3,
        name: "limits",
        sqlite: include_str!("../migrations/003_limits.sqlite.sql"),
        postgres: include_str!("../migrations/003_limits.postgres.sql"),
    },
    Migration {
        version: 4,
        name: "schedules",
        sqlite: include_str!("../migrations/004_schedules.sqlite.sql"),
        postgres: include_str!("../migrations/004_schedules.postgres.sql"),
    },
    Migration {
        version: 5,
        name: "events",
        sqlite: include_str!("../migrations/005_events.sqlite.sql"),
        postgres: include_str!("../migrations/005_events.postgres.sql"),
    },
];

/// Which migrations are still to run on a schema of version `found`, or why it cannot be used.
pub fn missing(found: i32, allowed: bool) -> Result<&'static [Migration], StoreError> {
    let newest = MIGRATIONS.last().map_or(0, |migration| migration.version);
    if found > newest {
        return Err(StoreError::Setup(format!(
            "the database has schema version {found}, this faena knows only up to {newest}; use a newer faena (nothing was changed)"
        )));
    }
    let from = MIGRATIONS.partition_point(|migration| migration.version <= found);
    if from < MIGRATIONS.len() && !allowed {
        return Err(StoreError::Setup(format!(
            "the database has schema version {found}, this faena needs {newest}; run `faena migrate` first, or start without --no-migrate"
        )));
    }
    Ok(&MIGRATIONS[from..])
}
