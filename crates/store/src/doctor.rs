//! Proves over a whole database what must always hold, and puts right what can be put right without losing a job.
//!
//! What is to be proved stands here once, as SQL that both engines understand (`doctor/checks.rs`) and as rules for what must be
//! read line by line (`doctor/judge.rs`); how it is put right in `doctor/fixes.rs`. Each engine runs it on one snapshot, beside
//! whoever works on the database, and adds what only it can have. Nothing is held in memory but what is at fault.

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

/// At most so many rows are named per finding; the rest is counted.
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

/// One thing that is not as it must be.
#[derive(Clone, PartialEq, Debug)]
pub struct Finding {
    /// Never changes its meaning; scripts may go by it.
    pub code: &'static str,
    pub severity: Severity,
    pub count: u64,
    pub text: String,
    /// What to do about it.
    pub advice: &'static str,
    /// Whether `repair` puts it right.
    pub fixable: bool,
}

#[derive(Debug)]
pub struct Inspection {
    pub engine: &'static str,
    pub jobs: u64,
    /// SQLite: who has the file's lock, if somebody has.
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

/// Told before each step of a walk: what comes, its number, how many there are.
pub type Progress<'a> = &'a (dyn Fn(&'static str, usize, usize) + Send + Sync);

/// Looks at the whole database, beside whoever works on it, and changes nothing.
pub async fn inspect(url: &str, now: Timestamp, progress: Progress<'_>) -> Result<Inspection> {
    match file_of(url) {
        Some(path) => sqlite::doctor::inspect(path, now, progress).await,
        None => postgres::doctor::inspect(url, now, progress).await,
    }
}

/// Puts right what can be put right safely, each kind in one transaction with its entry in the audit log, and looks again. One
/// repair can bring the next to light (a job that is back in line wants its counter), so it goes on while it gets better. On SQLite it needs
/// the file for itself.
pub async fn repair(
    url: &str,
    options: StoreOptions,
    grace_periods: GracePeriods,
    now: Timestamp,
    progress: Progress<'_>,
) -> Result<(Vec<Repaired>, Inspection)> {
    // Found before anything is opened for writing: opening alone already puts some things right.
    let inspection = inspect(url, now, progress).await?;
    // A file whose pages are damaged is not written to: what is missing from it may still be saved.
    let damaged = inspection.findings.iter().any(|finding| finding.code == "file-damaged");
    if damaged || !inspection.findings.iter().any(|finding| finding.fixable) {
        return Ok((Vec::new(), inspection));
    }
    let hands = match file_of(url) {
        Some(path) => Hands::Sqlite(sqlite::Sqlite::open(path, options).await?),
        None => Hands::Postgres(postgres::Postgres::open(url, options).await?),
    };
    let result = hands.repair(url, inspection, grace_periods, now, progress).await;
    hands.close().await;
    result
}

fn note_repaired(repaired: &mut Vec<Repaired>, code: &'static str, count: u64) {
    match repaired.iter_mut().find(|known| known.code == code) {
        Some(known) => known.count += count,
        None if count > 0 => repaired.push(Repaired { code, count, done: code_of(code).fixed }),
        None => {}
    }
}

/// Whoever writes: the store itself, so that what it can do already is done by it.
enum Hands {
    Sqlite(sqlite::Sqlite),
    Postgres(postgres::Postgres),
}

impl Hands {
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
            Hands::Sqlite(store) => store.doctor_fix(code, fix, found, grace_periods, now).await,
            Hands::Postgres(store) => store.doctor_fix(code, fix, found, grace_periods, now).await,
        }
    }

    async fn close(&self) {
        use crate::Store;
        match self {
            Hands::Sqlite(store) => store.close().await,
            Hands::Postgres(store) => store.close().await,
        }
    }
}

fn file_of(url: &str) -> Option<&str> {
    url.strip_prefix("sqlite:").map(|path| path.strip_prefix("//").unwrap_or(path))
}

/// A value of a row, whichever engine it comes from.
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

/// Where the engines' SQL differs.
pub(crate) struct Dialect {
    /// Makes `claimed (run, owner, id)` from the blocks.
    pub claimed: &'static str,
    /// Which nodes count as dead.
    pub dead: String,
    /// The last run number that was given out.
    pub last_run: &'static str,
    /// How an id is written.
    pub literal: fn(Uuid) -> String,
    pub now: Timestamp,
}

impl Dialect {
    /// Puts the shared parts into a statement.
    pub fn sql(&self, sql: &str) -> String {
        sql.replace("{with}", &checks::WITH.replace("{claimed}", self.claimed))
            .replace("{dead}", &self.dead)
            .replace("{last_run}", self.last_run)
            .replace("{now}", &self.now.as_ms().to_string())
    }
}

/// Which version the schema has must be known before anything is asked of it. `Some`: it is too old to be looked at.
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
