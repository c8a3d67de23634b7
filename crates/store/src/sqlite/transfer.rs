//! The source of a move: reads every table of a file in one snapshot, and changes nothing.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use parking_lot::Mutex;
use rusqlite::{Connection, OpenFlags, OptionalExtension};
use sha2::{Digest, Sha256};
use tokio::sync::mpsc;

use super::{doctor::running_server, lock_file, opening};
use crate::{
    Cause, Result, StoreError, migrate,
    transfer::{
        Identity, Sequences,
        shape::{FoundColumn, Table, quoted},
        value::{Checksum, Value},
    },
};

/// Bounds of the rows that are in memory together.
const CHUNK_ROWS: usize = 5_000;
const CHUNK_BYTES: usize = 4 << 20;
const CHUNKS_AHEAD: usize = 2;
const DAY_MS: i64 = 24 * 3_600_000;
/// Maximum number of days of completed jobs that get a partition of their own. Older jobs go to the default partition.
const MAX_DAYS: usize = 1_000;

/// Whether the file may be in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// No server may use the file, now or until the source is dropped.
    Exclusive,
    /// A server may use the file; the rows are those of one snapshot.
    Shared,
}

/// An open file. Its lock is released when it is dropped.
pub struct Source {
    connection: Arc<Mutex<Connection>>,
    _lock: Option<fs::File>,
    /// The server that uses the file.
    pub in_use_by: Option<String>,
}

impl Source {
    pub async fn open(path: &str, access: Access) -> Result<Source> {
        let path = PathBuf::from(path);
        blocking(move || open(&path, access)).await
    }

    pub async fn columns(&self) -> Result<Vec<FoundColumn>> {
        self.with(columns).await
    }

    /// Returns the number of rows of each table, in order.
    pub async fn counts(&self, tables: &[Arc<Table>]) -> Result<Vec<u64>> {
        let names: Vec<String> = tables.iter().map(|table| quoted(&table.name)).collect();
        self.with(move |connection| {
            let count = |name: &String| {
                let sql = format!("SELECT count(*) FROM {name}");
                Ok(connection.query_row(&sql, [], |row| row.get::<_, i64>(0))?.unsigned_abs())
            };
            names.iter().map(count).collect()
        })
        .await
    }

    pub async fn sequences(&self) -> Result<Sequences> {
        self.with(sequences).await
    }

    /// Identifies the installation and its current state by numbers of rows and sequences, which nearly every change
    /// increases.
    pub async fn identity(&self, counts: &[u64], sequences: &Sequences) -> Result<Identity> {
        let state = digest(&format!("{counts:?} {} {:?}", sequences.last_run, sequences.last_values));
        let created = self
            .with(|connection| {
                let sql = "SELECT group_concat(version || ' ' || applied_at) FROM faena_schema";
                Ok(connection.query_row(sql, [], |row| row.get::<_, String>(0))?)
            })
            .await?;
        Ok(Identity { source: digest(&created), state })
    }

    /// Returns the start of each day on which jobs were completed.
    pub async fn days_of_completed_jobs(&self) -> Result<Vec<i64>> {
        self.with(|connection| {
            let sql = "SELECT DISTINCT finished_at / ?1 AS day FROM done ORDER BY day DESC LIMIT ?2";
            let mut statement = connection.prepare(sql)?;
            let days = statement.query_map((DAY_MS, MAX_DAYS as i64), |row| Ok(row.get::<_, i64>(0)? * DAY_MS))?;
            Ok(days.collect::<rusqlite::Result<_>>()?)
        })
        .await
    }

    /// Reads the rows of a table after the first `skip`, in chunks.
    pub fn read(&self, table: &Arc<Table>, skip: u64) -> mpsc::Receiver<Result<Vec<Vec<Value>>>> {
        let (sender, receiver) = mpsc::channel(CHUNKS_AHEAD);
        let (connection, table) = (self.connection.clone(), table.clone());
        tokio::task::spawn_blocking(move || {
            let (mut chunk, mut bytes) = (Vec::new(), 0);
            let read = for_each_row(&connection.lock(), &table, skip, |row| {
                bytes += row.iter().map(Value::size_bytes).sum::<usize>();
                chunk.push(row.to_vec());
                if chunk.len() < CHUNK_ROWS && bytes < CHUNK_BYTES {
                    return true;
                }
                bytes = 0;
                // An error means that nothing reads the chunks any more.
                sender.blocking_send(Ok(std::mem::take(&mut chunk))).is_ok()
            });
            let last = read.map(|()| chunk);
            if !matches!(&last, Ok(rows) if rows.is_empty()) {
                let _ = sender.blocking_send(last);
            }
        });
        receiver
    }

    /// Computes the checksum of a whole table.
    pub async fn checksum(&self, table: &Arc<Table>) -> Result<Checksum> {
        let table = table.clone();
        self.with(move |connection| {
            let (mut sum, mut buffer) = (Checksum::default(), Vec::new());
            for_each_row(connection, &table, 0, |row| {
                sum.add(row, &mut buffer);
                true
            })?;
            Ok(sum)
        })
        .await
    }

    async fn with<T: Send + 'static>(&self, work: impl FnOnce(&Connection) -> Result<T> + Send + 'static) -> Result<T> {
        let connection = self.connection.clone();
        blocking(move || work(&connection.lock())).await
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(|e| StoreError::Internal(Cause::of(e)))?
}

fn open(path: &Path, access: Access) -> Result<Source> {
    let missing = || StoreError::Setup(format!("there is no Faena database in {}; check --from", path.display()));
    if !path.exists() {
        return Err(missing());
    }
    let in_use_by = running_server(path);
    let in_use = || {
        StoreError::Setup(format!(
            "{} is in use by {}; stop it first, so that nothing changes during the move",
            path.display(),
            in_use_by.as_deref().unwrap_or("another faena")
        ))
    };
    if access == Access::Exclusive && in_use_by.is_some() {
        return Err(in_use());
    }
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags).map_err(|e| opening(path, e))?;
    connection.busy_timeout(std::time::Duration::from_secs(5))?;
    connection.pragma_update(None, "cache_size", -65_536).map_err(|e| opening(path, e))?;
    // Only a database of Faena is locked, because locking creates a file next to it.
    let sql = "SELECT 1 FROM sqlite_master WHERE name = 'faena_schema'";
    connection.query_row(sql, [], |_| Ok(())).optional().map_err(|e| opening(path, e))?.ok_or_else(missing)?;
    let lock = match access {
        Access::Exclusive => Some(lock_file(path).map_err(|_| in_use())?),
        Access::Shared => None,
    };
    connection.execute_batch("BEGIN")?;
    let version = connection.query_row("SELECT coalesce(max(version), 0) FROM faena_schema", [], |row| row.get(0))?;
    if !migrate::missing(migrate::MIGRATIONS, version, true)?.is_empty() {
        return Err(StoreError::Setup(format!(
            "{0} has an old schema; run \"faena migrate --database-url sqlite:{0}\" first",
            path.display()
        )));
    }
    Ok(Source { connection: Arc::new(Mutex::new(connection)), _lock: lock, in_use_by })
}

fn columns(connection: &Connection) -> Result<Vec<FoundColumn>> {
    // Generated columns have 2 or 3 in `hidden`.
    let mut statement = connection.prepare(
        "SELECT t.name, c.name, c.pk FROM sqlite_master t JOIN pragma_table_xinfo(t.name) c
         WHERE t.type = 'table' AND t.name NOT LIKE 'sqlite\\_%' ESCAPE '\\' AND c.hidden = 0 ORDER BY t.name, c.cid",
    )?;
    let columns = statement
        .query_map([], |row| Ok(FoundColumn { table: row.get(0)?, name: row.get(1)?, kind: None, key: row.get(2)? }))?;
    Ok(columns.collect::<rusqlite::Result<_>>()?)
}

fn sequences(connection: &Connection) -> Result<Sequences> {
    let last_run = connection.query_row("SELECT coalesce(max(last), 0) FROM run_sequence", [], |row| row.get(0))?;
    let mut statement = connection.prepare("SELECT name, seq FROM sqlite_sequence ORDER BY name")?;
    let last_values = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
    Ok(Sequences { last_run, last_values: last_values.collect::<rusqlite::Result<_>>()? })
}

/// Calls `visit` for each row until it returns false.
fn for_each_row(
    connection: &Connection,
    table: &Table,
    skip: u64,
    mut visit: impl FnMut(&[Value]) -> bool,
) -> Result<()> {
    let mut statement = connection.prepare(&table.sqlite_select(skip))?;
    let mut rows = statement.query([])?;
    let mut values = Vec::with_capacity(table.columns.len());
    while let Some(row) = rows.next()? {
        values.clear();
        for (at, column) in table.columns.iter().enumerate() {
            let value = Value::from_sqlite(column.kind, row.get_ref(at)?).map_err(|problem| {
                let text = format!("column {}.{} cannot be moved: {problem}", table.name, column.name);
                StoreError::Internal(text.into())
            })?;
            values.push(value);
        }
        if !visit(&values) {
            break;
        }
    }
    Ok(())
}

fn digest(text: &str) -> String {
    let digest = Sha256::digest(text.as_bytes());
    digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}
