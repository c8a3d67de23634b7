//! Checks the invariants of a whole database, and repairs what can be repaired without losing a job.
//!
//! `doctor/checks.rs` has the invariants as SQL that both databases understand, `doctor/collector.rs` those that need code for
//! each row, `doctor/tasks.rs` those of tasks, and `doctor/fixes.rs` the repairs. `doctor/queue.rs` reads what is compared with
//! an external queue. Each store runs them on one snapshot, while servers work on the database, and
//! adds checks of its own. Only the violations are kept in memory.

mod checks;
pub(crate) mod fixes;
mod collector;
mod queue;
pub(crate) mod tasks;

use faena_domain::Timestamp;
use uuid::Uuid;

use crate::{
    GracePeriods, Result, StoreError, StoreOptions,
    migrate::{MIGRATIONS, missing},
    postgres, sqlite,
};

pub(crate) use checks::{code_of, steps};
pub(crate) use collector::Collector;
pub(crate) use fixes::{Fix, Statement, fix_of};
pub(crate) use queue::queue_steps;
pub use queue::{QueueEntries, queue_entries};

/// Maximum number of rows that a finding names; further rows are counted.
pub const EXAMPLES: usize = 20;

/// Severity of a finding.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Severity {
    Error,
    Warning,
}

impl Severity {
    pub fn as_str(self) -> &'static str {
        match self {
            Severity::Error => "error",
            Severity::Warning => "warning",
        }
    }
}

/// A violated invariant, or a problem of the configuration.
#[derive(Clone, PartialEq, Debug)]
pub struct Finding {
    /// Stable; scripts can rely on it.
    pub code: &'static str,
    pub severity: Severity,
    pub count: u64,
    pub text: String,
    /// What the operator can do about it.
    pub advice: &'static str,
    /// Whether `repair` can fix it.
    pub fixable: bool,
}

/// Result of an inspection.
#[derive(Debug)]
pub struct Inspection {
    pub database_kind: &'static str,
    pub jobs: u64,
    /// SQLite: the process that holds the file's lock.
    pub in_use_by: Option<String>,
    pub findings: Vec<Finding>,
}

/// What `repair` has done about the findings of one code.
#[derive(Clone, PartialEq, Debug)]
pub struct Repaired {
    pub code: &'static str,
    pub count: u64,
    pub done: String,
}

/// Called before each step with its name, its number and the number of steps.
pub type Progress<'a> = &'a (dyn Fn(&'static str, usize, usize) + Send + Sync);

/// Checks the whole database, while servers may work on it, and changes nothing.
pub async fn inspect(url: &str, now: Timestamp, progress: Progress<'_>) -> Result<Inspection> {
    match file_of(url) {
        Some(path) => sqlite::doctor::inspect(path, now, progress).await,
        None => postgres::doctor::inspect(url, now, progress).await,
    }
}

/// Repairs what can be repaired safely, then checks again.
///
/// All findings of one code are repaired in one transaction, together with an entry in the audit log. One repair can reveal the
/// next finding (a job that is queued again changes a counter), so it repeats while it makes progress, up to four times. On
/// SQLite it needs exclusive access to the file.
pub async fn repair(
    url: &str,
    options: StoreOptions,
    grace_periods: GracePeriods,
    now: Timestamp,
    progress: Progress<'_>,
) -> Result<(Vec<Repaired>, Inspection)> {
    // Before the database is opened for writing, because opening it already repairs some things.
    let inspection = inspect(url, now, progress).await?;
    // A damaged file is not written to: its data may still be recoverable.
    let damaged = inspection.findings.iter().any(|finding| finding.code == "file-damaged");
    if damaged || !inspection.findings.iter().any(|finding| finding.fixable) {
        return Ok((Vec::new(), inspection));
    }
    let store = OpenStore::open(url, options).await?;
    let result = store.repair(url, inspection, grace_periods, now, progress).await;
    store.close().await;
    result
}

fn add_repaired(repaired: &mut Vec<Repaired>, code: &'static str, count: u64) {
    match repaired.iter_mut().find(|known| known.code == code) {
        Some(known) => {
            known.count += count;
            known.done = code_of(code).fixed(known.count);
        }
        None if count > 0 => repaired.push(Repaired { code, count, done: code_of(code).fixed(count) }),
        None => {}
    }
}

/// The store itself, so that repairs can use its own operations.
enum OpenStore {
    Sqlite(sqlite::Sqlite),
    Postgres(postgres::Postgres),
}

impl OpenStore {
    async fn open(url: &str, options: StoreOptions) -> Result<OpenStore> {
        Ok(match file_of(url) {
            Some(path) => OpenStore::Sqlite(sqlite::Sqlite::open(path, options).await?),
            None => OpenStore::Postgres(postgres::Postgres::open(url, options).await?),
        })
    }

    async fn repair(
        &self,
        url: &str,
        mut inspection: Inspection,
        grace_periods: GracePeriods,
        now: Timestamp,
        progress: Progress<'_>,
    ) -> Result<(Vec<Repaired>, Inspection)> {
        const PASSES: usize = 4;
        let mut repaired = Vec::new();
        for _ in 0..PASSES {
            let mut changed = 0;
            for finding in inspection.findings.iter().filter(|finding| finding.fixable) {
                let count = self.fix(finding.code, finding.count, grace_periods, now).await?;
                changed += count;
                add_repaired(&mut repaired, finding.code, count);
            }
            inspection = inspect(url, now, progress).await?;
            if changed == 0 || !inspection.findings.iter().any(|finding| finding.fixable) {
                break;
            }
        }
        Ok((repaired, inspection))
    }

    async fn fix(&self, code: &'static str, found: u64, grace_periods: GracePeriods, now: Timestamp) -> Result<u64> {
        let fix = fix_of(code);
        match self {
            OpenStore::Sqlite(store) => store.doctor_fix(code, fix, found, grace_periods, now).await,
            OpenStore::Postgres(store) => store.doctor_fix(code, fix, found, grace_periods, now).await,
        }
    }

    async fn close(&self) {
        use crate::Store;
        match self {
            OpenStore::Sqlite(store) => store.close().await,
            OpenStore::Postgres(store) => store.close().await,
        }
    }
}

fn file_of(url: &str) -> Option<&str> {
    url.strip_prefix("sqlite:").map(|path| path.strip_prefix("//").unwrap_or(path))
}

/// A value of a row, from either database.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Cell {
    Null,
    Id(Uuid),
    Number(i64),
    Text(String),
}

impl Cell {
    pub fn number(&self) -> i64 {
        if let Cell::Number(n) = self { *n } else { 0 }
    }

    pub fn text(&self) -> &str {
        if let Cell::Text(text) = self { text } else { "" }
    }

    pub fn id(&self) -> Uuid {
        if let Cell::Id(id) = self { *id } else { Uuid::nil() }
    }
}

impl std::fmt::Display for Cell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Cell::Null => f.write_str("?"),
            Cell::Id(id) => id.fmt(f),
            Cell::Number(n) => n.fmt(f),
            Cell::Text(text) => f.write_str(text),
        }
    }
}

/// Differences between the SQL of the two databases.
pub(crate) struct Dialect {
    /// Common table expression `claimed (run, owner, id)`.
    pub claimed: &'static str,
    /// Condition under which a node is dead.
    pub dead: String,
    /// Expression for the latest run number that was assigned.
    pub last_run: &'static str,
    /// Formats an id as a literal.
    pub literal: fn(Uuid) -> String,
    pub now: Timestamp,
}

impl Dialect {
    /// Replaces the placeholders of a statement.
    pub fn sql(&self, sql: &str) -> String {
        sql.replace("{with}", &checks::WITH.replace("{claimed}", self.claimed))
            .replace("{dead}", &self.dead)
            .replace("{last_run}", self.last_run)
            .replace("{now}", &self.now.as_ms().to_string())
    }
}

/// Returns an inspection with one finding if the schema is too old for the other checks.
///
/// Fails if the schema is newer than this version of faena.
pub(crate) fn check_schema(found: i32, database_kind: &'static str) -> Result<Option<Inspection>> {
    match missing(MIGRATIONS, found, true)? {
        [] => Ok(None),
        missing => {
            let code = code_of("schema-old");
            let needed = missing.last().map_or(found, |migration| migration.version);
            let text = format!("the database has schema version {found}, but this version of faena needs {needed}");
            Ok(Some(Inspection { database_kind, jobs: 0, in_use_by: None, findings: vec![code.finding(1, text)] }))
        }
    }
}

pub(crate) fn no_database(place: &str) -> StoreError {
    StoreError::Setup(format!(
        "there is no Faena database in {place}; check DATABASE_URL or --database-url, or run \"faena serve\" to create it"
    ))
}
