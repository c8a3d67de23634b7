//! Moves a whole installation from SQLite to PostgreSQL.
//!
//! Every table is copied in chunks, each with its progress in one transaction, so a move that was killed continues where it stopped. Then
//! every row of both databases is read again, and the row count and the checksum of each table must be equal. Only then are the
//! sequences and the event triggers set up, and servers can start. The source is never changed, and no server can start on it during
//! the move.
//!
//! `sqlite/transfer.rs` reads the source, `postgres/transfer.rs` fills the target, `transfer/shape.rs` says what is moved, and
//! `transfer/value.rs` converts.

pub(crate) mod shape;
pub(crate) mod value;

use std::sync::Arc;

use faena_domain::Timestamp;

use crate::{
    Result, StoreError,
    postgres::transfer::{Found, Target},
    sqlite::transfer::{Access, Source},
};
use shape::Table;
use value::Checksum;

pub use crate::postgres::transfer::Resume;

/// Part of a move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    Copy,
    Verify,
}

/// Progress of a move.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    pub phase: Phase,
    pub table: &'a str,
    /// Rows of all tables that are processed in this phase.
    pub done: u64,
    pub total: u64,
}

pub type Progress<'a> = &'a (dyn Fn(Step<'_>) + Send + Sync);

/// Number of rows of a table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TableRows {
    pub name: String,
    pub rows: u64,
}

/// What a move would do.
#[derive(Debug)]
pub struct Survey {
    pub tables: Vec<TableRows>,
    /// Rows that an earlier move has copied.
    pub copied: u64,
    /// When the source was moved to this target.
    pub moved_at: Option<Timestamp>,
    /// The server that must be stopped before the move.
    pub in_use_by: Option<String>,
}

impl Survey {
    pub fn rows(&self) -> u64 {
        self.tables.iter().map(|table| table.rows).sum()
    }
}

/// A table whose rows are equal in both databases.
#[derive(Debug)]
pub struct MovedTable {
    pub name: String,
    pub rows: u64,
    pub checksum: String,
}

/// Result of a move.
#[derive(Debug)]
pub struct Moved {
    /// Empty if an earlier move was complete.
    pub tables: Vec<MovedTable>,
    /// Rows that an earlier move had copied.
    pub resumed: u64,
    /// When an earlier move was complete.
    pub moved_at: Option<Timestamp>,
}

impl Moved {
    pub fn rows(&self) -> u64 {
        self.tables.iter().map(|table| table.rows).sum()
    }
}

/// Which installation is moved, and in which state it is.
#[derive(Debug)]
pub(crate) struct Identity {
    pub source: String,
    pub state: String,
}

/// The last numbers that the source has assigned.
#[derive(Debug)]
pub(crate) struct Sequences {
    pub last_run: i64,
    /// By table.
    pub last_values: Vec<(String, i64)>,
}

/// Returns what a move would do, and checks that it could begin. Changes nothing.
///
/// # Errors
/// `StoreError::Setup` if the source is not a database of Faena, or the target is neither empty nor a partial copy of
/// this source.
pub async fn survey(from: &str, to: &str, resume: Resume) -> Result<Survey> {
    let source = Source::open(file_of(from)?, Access::Shared).await?;
    let target = Target::open(server_of(to)?).await?;
    let plan = Plan::make(&source, &target, resume).await?;
    target.roll_back().await?;
    let moved_at = if let Found::Moved(at) = plan.found { Some(at) } else { None };
    let copied = plan.copied();
    let tables = plan.tables.iter().zip(plan.counts);
    let tables = tables.map(|(table, rows)| TableRows { name: table.name.clone(), rows }).collect();
    Ok(Survey { tables, copied, moved_at, in_use_by: source.in_use_by.clone() })
}

/// Moves everything, or continues a move that was interrupted.
///
/// # Errors
/// `StoreError::Setup` as for `survey`, and if a server uses the source. `StoreError::Conflict` if the rows of the two databases are
/// not equal at the end; servers do not start on the target then.
pub async fn run(from: &str, to: &str, resume: Resume, now: Timestamp, progress: Progress<'_>) -> Result<Moved> {
    let source = Source::open(file_of(from)?, Access::Exclusive).await?;
    let target = Target::open(server_of(to)?).await?;
    let plan = Plan::make(&source, &target, resume).await?;
    if let Found::Moved(at) = plan.found {
        target.roll_back().await?;
        return Ok(Moved { tables: Vec::new(), resumed: 0, moved_at: Some(at) });
    }
    target.begin(&plan.tables, &plan.identity, &plan.found, now).await?;
    target.make_partitions(&source.days_of_completed_jobs().await?, now).await?;
    copy(&source, &target, &plan, progress).await?;
    let tables = verify(&source, &target, &plan, progress).await?;
    target.finish(&plan.sequences, now).await?;
    target.analyze(&plan.tables).await?;
    Ok(Moved { tables, resumed: plan.copied(), moved_at: None })
}

struct Plan {
    tables: Vec<Arc<Table>>,
    /// Rows of each table of the source.
    counts: Vec<u64>,
    sequences: Sequences,
    identity: Identity,
    found: Found,
}

impl Plan {
    async fn make(source: &Source, target: &Target, resume: Resume) -> Result<Plan> {
        let tables = shape::tables(&source.columns().await?, &target.columns().await?)?;
        let tables: Vec<Arc<Table>> = tables.into_iter().map(Arc::new).collect();
        let counts = source.counts(&tables).await?;
        let sequences = source.sequences().await?;
        let identity = source.identity(&counts, &sequences).await?;
        let found = target.inspect(&tables, &identity, resume).await?;
        Ok(Plan { tables, counts, sequences, identity, found })
    }

    /// Returns how many rows of a table an earlier move has copied.
    fn copied_of(&self, table: &Table) -> u64 {
        if let Found::Part(rows) = &self.found { rows.get(&table.name).copied().unwrap_or(0) } else { 0 }
    }

    fn copied(&self) -> u64 {
        self.tables.iter().map(|table| self.copied_of(table)).sum()
    }

    fn total(&self) -> u64 {
        self.counts.iter().sum()
    }
}

async fn copy(source: &Source, target: &Target, plan: &Plan, progress: Progress<'_>) -> Result<()> {
    let (mut done, total) = (plan.copied(), plan.total());
    for (table, count) in plan.tables.iter().zip(&plan.counts) {
        let mut copied = plan.copied_of(table);
        if copied >= *count {
            continue;
        }
        let step = |done| progress(Step { phase: Phase::Copy, table: &table.name, done, total });
        step(done);
        let mut chunks = source.read(table, copied);
        while let Some(rows) = chunks.recv().await {
            let rows = rows?;
            target.copy(table, &rows, copied).await?;
            copied += rows.len() as u64;
            done += rows.len() as u64;
            step(done);
        }
    }
    Ok(())
}

/// Reads every row of both databases again, and compares them table by table.
async fn verify(source: &Source, target: &Target, plan: &Plan, progress: Progress<'_>) -> Result<Vec<MovedTable>> {
    let (mut done, total) = (0, plan.total());
    let mut verified = Vec::with_capacity(plan.tables.len());
    target.begin_snapshot().await?;
    for table in &plan.tables {
        let step = |rows: u64| progress(Step { phase: Phase::Verify, table: &table.name, done: done + rows, total });
        step(0);
        let (expected, found) = tokio::try_join!(source.checksum(table), target.checksum(table, &step))?;
        if expected != found {
            return Err(differs(table, expected, found));
        }
        done += found.rows;
        verified.push(MovedTable { name: table.name.clone(), rows: found.rows, checksum: found.to_string() });
    }
    target.end_snapshot().await?;
    Ok(verified)
}

fn differs(table: &Table, source: Checksum, target: Checksum) -> StoreError {
    let what = if source.rows == target.rows {
        format!("some of its {} rows differ", source.rows)
    } else {
        format!("the source has {} rows, the target {}", source.rows, target.rows)
    };
    let message = format!(
        "table {} is not the same in both databases: {what}; pass --restart to discard the copy and begin again",
        table.name
    );
    StoreError::Conflict { message, existing_job: None }
}

fn file_of(url: &str) -> Result<&str> {
    let path = url.strip_prefix("sqlite:").map(|path| path.strip_prefix("//").unwrap_or(path));
    path.filter(|path| !path.is_empty())
        .ok_or_else(|| StoreError::Setup("--from is not a SQLite database; write sqlite:faena-data/faena.db".into()))
}

fn server_of(url: &str) -> Result<&str> {
    if url.starts_with("postgres://") || url.starts_with("postgresql://") {
        return Ok(url);
    }
    let text = "the target is not a PostgreSQL database; pass --to postgres://user:password@host/database";
    Err(StoreError::Setup(text.into()))
}
