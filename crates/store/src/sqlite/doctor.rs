//! Runs the doctor on a file: reads in one transaction, even while a server runs; repairs in transactions of the
//! writer.

use std::{
    fs,
    path::{Path, PathBuf},
};

use faena_domain::Timestamp;
use rusqlite::{Connection, OpenFlags, types::ValueRef};
use uuid::Uuid;

use super::{Sqlite, audit, opening, private, writer::Tx};
use crate::{
    AuditEntry, AuditStore, Cause, GracePeriods, NodeStore, Result, StoreError,
    doctor::{
        Cell, Collector, Dialect, Fix, Inspection, Progress, QueueEntries, Statement, check_schema, code_of, fixes,
        no_database, queue_steps, steps,
        tasks::{self, TaskRepair},
    },
};

const CLAIMED: &str = "numbers (at) AS (
    SELECT 0 UNION ALL SELECT at + 16 FROM numbers WHERE at + 16 < (SELECT coalesce(max(length(ids)), 0) FROM claim)),
claimed (run, owner, id) AS MATERIALIZED (
    SELECT c.run, c.owner, substr(c.ids, n.at + 1, 16) FROM claim c JOIN numbers n ON n.at < length(c.ids))";

/// A write-ahead log larger than this is reported.
const LARGE_WAL_BYTES: u64 = 256 << 20;

fn dialect(server: &Server, now: Timestamp) -> Dialect {
    Dialect {
        claimed: CLAIMED,
        // SQLite: the lock on the file is the lease.
        dead: if matches!(server, Server::None) { "TRUE".into() } else { "FALSE".into() },
        last_run: "(SELECT max(last) FROM run_sequence)",
        literal: |id| format!("x'{}'", id.simple()),
        now,
    }
}

pub async fn inspect(path: &str, now: Timestamp, progress: Progress<'_>) -> Result<Inspection> {
    // The whole inspection is one long call that blocks its thread.
    let path = PathBuf::from(path);
    let (sender, mut steps) = tokio::sync::mpsc::unbounded_channel();
    let inspection = tokio::task::spawn_blocking(move || {
        inspect_blocking(&path, now, &|name, number, total| {
            let _ = sender.send((name, number, total));
        })
    });
    while let Some((name, number, total)) = steps.recv().await {
        progress(name, number, total);
    }
    inspection.await.map_err(|e| StoreError::Internal(Cause::of(e)))?
}

fn inspect_blocking(path: &Path, now: Timestamp, progress: Progress<'_>) -> Result<Inspection> {
    if !path.exists() {
        return Err(no_database(&path.display().to_string()));
    }
    let mut collector = Collector::default();
    let mut findings = Vec::new();
    let connection = open_for_reading(path)?;
    connection.pragma_update(None, "cache_size", -65_536).map_err(|e| opening(path, e))?;
    let snapshot = connection.unchecked_transaction()?;
    let known: bool = snapshot
        .query_row("SELECT count(*) > 0 FROM sqlite_master WHERE name = 'faena_schema'", [], |row| row.get(0))
        .map_err(|e| opening(path, e))?;
    if !known {
        return Err(no_database(&path.display().to_string()));
    }
    let version = snapshot.query_row("SELECT coalesce(max(version), 0) FROM faena_schema", [], |row| row.get(0))?;
    if let Some(old) = check_schema(version, "sqlite")? {
        return Ok(old);
    }
    let server = server(path);
    let steps = steps(&dialect(&server, now));
    let total = steps.len() + 1;
    progress("file", 0, total);
    let checked = for_each(&snapshot, "PRAGMA quick_check(20)", |row| {
        if row[0].text() != "ok" {
            collector.add("file-damaged", Uuid::nil(), row[0].text());
        }
    });
    unless_damaged(checked, "the file", &mut collector)?;
    for (at, step) in steps.iter().enumerate() {
        progress(step.name, at + 1, total);
        let result = for_each(&snapshot, &step.sql, |row| (step.take)(&mut collector, row));
        unless_damaged(result, step.name, &mut collector)?;
    }
    check_files(path, &mut findings);
    let jobs = collector.jobs;
    let mut all = collector.findings();
    all.append(&mut findings);
    Ok(Inspection { database_kind: "sqlite", jobs, in_use_by: server.describe(), findings: all })
}

/// Opens the file. Only what SQLite needs to read the write-ahead log is written.
fn open_for_reading(path: &Path) -> Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags).map_err(|e| opening(path, e))?;
    connection.busy_timeout(std::time::Duration::from_secs(5))?;
    Ok(connection)
}

/// Reads the jobs that wait, on one snapshot.
pub async fn queue_entries(path: &str) -> Result<QueueEntries> {
    let path = PathBuf::from(path);
    let reading = tokio::task::spawn_blocking(move || read_queue(&path));
    reading.await.map_err(|e| StoreError::Internal(Cause::of(e)))?
}

fn read_queue(path: &Path) -> Result<QueueEntries> {
    let connection = open_for_reading(path)?;
    let snapshot = connection.unchecked_transaction()?;
    let mut entries = QueueEntries::default();
    for (sql, take) in queue_steps() {
        for_each(&snapshot, &sql, |row| take(&mut entries, row))?;
    }
    Ok(entries)
}

/// Turns the error of a damaged file into a finding, so that the inspection continues.
fn unless_damaged(result: rusqlite::Result<()>, what: &str, collector: &mut Collector) -> Result<()> {
    match result {
        Err(error) if error.sqlite_error_code() == Some(rusqlite::ErrorCode::DatabaseCorrupt) => {
            collector.add("file-damaged", Uuid::nil(), &format!("{what} cannot be read completely"));
            Ok(())
        }
        result => Ok(result?),
    }
}

fn for_each(connection: &Connection, sql: &str, mut take: impl FnMut(&[Cell])) -> rusqlite::Result<()> {
    let mut statement = connection.prepare(sql)?;
    let columns = statement.column_count();
    let mut cells = Vec::with_capacity(columns);
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        cells.clear();
        for at in 0..columns {
            cells.push(cell(row.get_ref(at)?));
        }
        take(&cells);
    }
    Ok(())
}

fn cell(value: ValueRef<'_>) -> Cell {
    match value {
        ValueRef::Null => Cell::Null,
        ValueRef::Integer(n) => Cell::Number(n),
        ValueRef::Real(x) => Cell::Text(x.to_string()),
        ValueRef::Text(bytes) => Cell::Text(String::from_utf8_lossy(bytes).into_owned()),
        ValueRef::Blob(bytes) => Uuid::from_slice(bytes).map_or(Cell::Null, Cell::Id),
    }
}

fn check_files(path: &Path, findings: &mut Vec<crate::doctor::Finding>) {
    let wal = PathBuf::from(format!("{}-wal", path.display()));
    if let Ok(size) = fs::metadata(&wal).map(|data| data.len())
        && size > LARGE_WAL_BYTES
    {
        findings.push(code_of("wal-large").finding(1, format!("{} has {} MiB", wal.display(), size >> 20)));
    }
    let Ok(permissions) = fs::metadata(path).map(|data| data.permissions()) else { return };
    if permissions.readonly() {
        findings.push(code_of("file-read-only").finding(1, format!("{} is read-only for every user", path.display())));
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        if permissions.mode() & 0o002 != 0 {
            let text = format!("{} can be written by every user of this machine", path.display());
            findings.push(code_of("file-open-to-all").finding(1, text));
        }
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        if private::is_writable_by_others(folder) {
            let text = format!("other users of this machine can replace files in {}", folder.display());
            findings.push(code_of("file-open-to-all").finding(1, text));
        }
    }
}

/// The server that uses the file.
enum Server {
    None,
    /// With its process id, if that is visible.
    Running(Option<String>),
}

impl Server {
    fn describe(self) -> Option<String> {
        match self {
            Server::None => None,
            Server::Running(process) => Some(process.map_or("another process".into(), |id| format!("process {id}"))),
        }
    }
}

/// Describes the server that uses the file, if there is one.
pub fn running_server(path: &Path) -> Option<String> {
    server(path).describe()
}

/// Determines from the lock file whether a server runs.
///
/// Linux shows the owner of a lock. On other systems, or if the owner is in another container, this function tries to
/// take a shared lock for a moment.
fn server(path: &Path) -> Server {
    let Ok(file) = fs::File::open(format!("{}.lock", path.display())) else { return Server::None };
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let inode = file.metadata().map_or(0, |data| data.ino());
        let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
        // `1: FLOCK  ADVISORY  WRITE 4711 08:01:1234 0 EOF`
        let of_file = |line: &&str| line.split_whitespace().nth(5).is_some_and(|at| at.ends_with(&format!(":{inode}")));
        if let Some(line) = locks.lines().find(of_file) {
            return Server::Running(line.split_whitespace().nth(4).map(str::to_owned));
        }
    }
    match file.try_lock_shared() {
        Ok(()) => Server::None,
        Err(_) => Server::Running(None),
    }
}

impl Sqlite {
    pub async fn doctor_fix(
        &self,
        code: &'static str,
        fix: Fix,
        found: u64,
        grace_periods: GracePeriods,
        now: Timestamp,
    ) -> Result<u64> {
        match fix {
            Fix::None => Ok(0),
            Fix::Recover => {
                let mut count = 0;
                loop {
                    let released = self.node_recover(grace_periods, now).await?;
                    count += (released.orphaned + released.returned) as u64;
                    if released.nodes == 0 {
                        break;
                    }
                }
                // SQLite: opening the file has removed the dead servers.
                let count = count.max(if code == "node-dead" { found } else { 0 });
                self.audit_add(entry(code, count), now).await?;
                Ok(count)
            }
            fix => {
                self.writer
                    .call(move |tx| {
                        let count = fix_in(tx, &fix, now)?;
                        tx.shared.task_cache.lock().clear();
                        if count > 0 {
                            audit::add(tx, &entry(code, count), now)?;
                        }
                        Ok(count)
                    })
                    .await
            }
        }
    }
}

fn entry(code: &str, count: u64) -> AuditEntry {
    AuditEntry {
        actor: "cli".into(),
        action: "doctor.fix".into(),
        target: code.into(),
        details: serde_json::json!({"code": code, "count": count}),
        count,
    }
}

fn fix_in(tx: &Tx, fix: &Fix, now: Timestamp) -> Result<u64> {
    let dialect = dialect(&Server::Running(None), now);
    let run = |sql: &str| -> Result<u64> { Ok(tx.connection.execute(&dialect.sql(sql), [])? as u64) };
    match fix {
        Fix::Sql(statements) => {
            let mut count = 0;
            for statement in *statements {
                match statement {
                    Statement::Counted(sql) => count += run(sql)?,
                    Statement::Uncounted(sql) => {
                        run(sql)?;
                    }
                }
            }
            Ok(count)
        }
        Fix::Rows { select, make } => {
            let mut made = Vec::new();
            for_each(tx.connection, &dialect.sql(select), |row| made.push(make(&dialect, row)))?;
            let mut count = 0;
            for statements in made.iter().filter(|statements| !statements.is_empty()) {
                for sql in statements {
                    tx.connection.execute(sql, [])?;
                }
                count += 1;
            }
            Ok(count)
        }
        Fix::Tasks => {
            let (mut repair, mut made) = (TaskRepair::default(), Vec::new());
            for_each(tx.connection, tasks::MACHINES, |row| repair.add_machine(row))?;
            for_each(tx.connection, tasks::ALL_TASKS, |row| made.extend(repair.statement(&dialect, row)))?;
            for sql in &made {
                tx.connection.execute(sql, [])?;
            }
            Ok(made.len() as u64)
        }
        Fix::Recount => {
            let mut drift = Vec::new();
            for_each(tx.connection, &dialect.sql(fixes::DRIFT), |row| {
                drift.push((row[0].number(), row[1].number(), row[2].number()));
            })?;
            for (lane, tally, n) in &drift {
                tx.connection.execute(
                    "INSERT INTO counter (lane, tally, n) VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET n = n + excluded.n",
                    (lane, tally, n),
                )?;
            }
            Ok(drift.len() as u64)
        }
        Fix::MoveSequence => {
            run("INSERT INTO run_sequence (last) SELECT -1 WHERE NOT EXISTS (SELECT 1 FROM run_sequence)")?;
            run(&format!("UPDATE run_sequence SET last = ({0}) WHERE last < ({0})", fixes::LARGEST_RUN))
        }
        Fix::None | Fix::Recover | Fix::MakePartitions => Ok(0),
    }
}
