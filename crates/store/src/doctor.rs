//! Checks what must always hold over a whole database, and repairs what can be repaired without losing a job.
//!
//! The checks are shared: SQL that both engines understand (`doctor/checks.rs`), rules for rows that must be parsed
//! (`doctor/judge.rs`), and repairs (`doctor/fixes.rs`). Each engine runs them on one snapshot, beside running servers, and
//! adds its own checks. Only faulty rows are kept in memory.

mod checks;
pub(crate) mod fixes;
mod judge;

use faena_domain::Timestamp;
use uuid::Uuid;

use crate::{
    GracePeriods, Result, StoreError, StoreOptions,
    migrate::{MIGRATIONS, missing},
    postgres, sqlite,
};

pub(crate) use checks::{code_of, steps};
pub(crate) use fixes::{Fix, Statement, fix_of};
pub(crate) use judge::Judge;

/// Number of rows that a finding names; the rest is counted.
pub const EXAMPLES: usize = 20;

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

/// One kind of fault.
#[derive(Clone, PartialEq, Debug)]
pub struct Finding {
    /// Never changes its meaning, so that scripts can rely on it.
    pub code: &'static str,
    pub severity: Severity,
    pub count: u64,
    pub text: String,
    /// What to do about it.
    pub advice: &'static str,
    /// Whether `repair` fixes it.
    pub fixable: bool,
}

#[derive(Debug)]
pub struct Inspection {
    pub engine: &'static str,
    pub jobs: u64,
    /// SQLite: the process that has locked the file, if any.
    pub in_use_by: Option<String>,
    pub findings: Vec<Finding>,
}

/// What `repair` has done about one code.
#[derive(Clone, PartialEq, Debug)]
pub struct Repaired {
    pub code: &'static str,
    pub count: u64,
    pub done: &'static str,
}

/// Called before each step of an inspection, with its name, its number and the number of steps.
pub type Progress<'a> = &'a (dyn Fn(&'static str, usize, usize) + Send + Sync);

/// Inspects the whole database, beside running servers, and changes nothing.
pub async fn inspect(url: &str, now: Timestamp, progress: Progress<'_>) -> Result<Inspection> {
    match file_of(url) {
        Some(path) => sqlite::doctor::inspect(path, now, progress).await,
        None => postgres::doctor::inspect(url, now, progress).await,
    }
}

/// Repairs what can be repaired safely, each kind in one transaction with an audit entry, and inspects again.
///
/// One repair can reveal the next fault (a job that is ready again needs its counter), so it continues while the number of
/// faults decreases. On SQLite it needs exclusive use of the file.
pub async fn repair(
    url: &str,
    options: StoreOptions,
    grace_periods: GracePeriods,
    now: Timestamp,
    progress: Progress<'_>,
) -> Result<(Vec<Repaired>, Inspection)> {
    // Inspects before anything is opened for writing: opening alone already repairs some faults.
    let inspection = inspect(url, now, progress).await?;
    // A file with damaged pages is not written to: its content may still be recovered.
    let damaged = inspection.findings.iter().any(|finding| finding.code == "file-damaged");
    if damaged || !inspection.findings.iter().any(|finding| finding.fixable) {
        return Ok((Vec::new(), inspection));
    }
    let opened = match file_of(url) {
        Some(path) => Opened::Sqlite(sqlite::Sqlite::open(path, options).await?),
        None => Opened::Postgres(postgres::Postgres::open(url, options).await?),
    };
    let result = opened.repair(url, inspection, grace_periods, now, progress).await;
    opened.close().await;
    result
}

fn note_repaired(repaired: &mut Vec<Repaired>, code: &'static str, count: u64) {
    match repaired.iter_mut().find(|known| known.code == code) {
        Some(known) => known.count += count,
        None if count > 0 => repaired.push(Repaired { code, count, done: code_of(code).fixed }),
        None => {}
    }
}

/// The opened store, which repairs by its own verbs where it can.
enum Opened {
    Sqlite(sqlite::Sqlite),
    Postgres(postgres::Postgres),
}

impl Opened {
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
                note_repaired(&mut repaired, finding.code, count);
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
            Opened::Sqlite(store) => store.doctor_fix(code, fix, found, grace_periods, now).await,
            Opened::Postgres(store) => store.doctor_fix(code, fix, found, grace_periods, now).await,
        }
    }

    async fn close(&self) {
        use crate::Store;
        match self {
            Opened::Sqlite(store) => store.close().await,
            Opened::Postgres(store) => store.close().await,
        }
    }
}

fn file_of(url: &str) -> Option<&str> {
    url.strip_prefix("sqlite:").map(|path| path.strip_prefix("//").unwrap_or(path))
}

/// A value of a row, from either engine.
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

/// Where the SQL of the engines differs.
pub(crate) struct Dialect {
    /// Defines `claimed (run, owner, id)`, one row per job of a claim.
    pub claimed: &'static str,
    /// Which nodes count as dead.
    pub dead: String,
    /// The last run number that was assigned.
    pub last_run: &'static str,
    /// Writes an id as a literal.
    pub literal: fn(Uuid) -> String,
    pub now: Timestamp,
}

impl Dialect {
    /// Fills in the shared parts of a statement.
    pub fn sql(&self, sql: &str) -> String {
        sql.replace("{with}", &checks::WITH.replace("{claimed}", self.claimed))
            .replace("{dead}", &self.dead)
            .replace("{last_run}", self.last_run)
            .replace("{now}", &self.now.as_ms().to_string())
    }
}

/// Checks the version of the schema before anything else. `Some`: it is too old to be inspected.
pub(crate) fn judge_schema(found: i32, engine: &'static str) -> Result<Option<Inspection>> {
    match missing(MIGRATIONS, found, true)? {
        [] => Ok(None),
        missing => {
            let code = code_of("schema-old");
            let needed = missing.last().map_or(found, |migration| migration.version);
            let text = format!("the database has schema version {found}, this faena works with {needed}");
            Ok(Some(Inspection { engine, jobs: 0, in_use_by: None, findings: vec![code.finding(1, text)] }))
        }
    }
}

pub(crate) fn nothing_there(what: &str) -> StoreError {
    StoreError::Setup(format!(
        "there is no Faena database in {what}; check DATABASE_URL or --database-url, or start `faena serve` once to make it"
    ))
}
