//! The store in a SQLite file, for one node: one writer thread that commits in groups, and a few readers.

mod api_keys;
mod audit;
mod bulk;
mod change;
mod checkpoint;
mod claim;
mod cleanup;
mod dead_letters;
mod dependents;
pub mod doctor;
mod due;
mod end;
pub mod events;
mod graph;
mod history;
mod inbox;
mod job_log;
mod jobs;
mod lanes;
pub mod limited_claim;
mod list;
mod machines;
mod nodes;
mod outbox;
mod outbox_dlq;
mod position;
mod private;
mod queue;
mod read;
mod release;
mod rules;
mod run_updates;
mod schedules;
mod search;
mod signals;
mod storage;
mod submit;
mod task_keys;
mod task_limits;
mod task_queue;
mod tasks;
pub mod transfer;
mod usage;
mod webhooks;
mod worker_reads;
mod workers;
mod writer;

use std::{
    fs,
    os::unix::fs::OpenOptionsExt,
    path::Path,
    sync::{Arc, atomic::AtomicBool},
};

use async_trait::async_trait;
use faena_domain::Timestamp;
use parking_lot::Mutex;
use rusqlite::{Connection, OpenFlags};
use tokio::sync::broadcast;

use crate::{
    Cause, QueueFeed, Result, Signal, Store, StoreError, StoreOptions, admit::RoundRobin, api_keys::ApiKeyCache,
    lanes::LaneCache, migrate, rules::RuleCache, task_cache::TaskCache, task_meter::TaskMeter, tasks::MachineCache,
};
use checkpoint::Checkpoints;
use storage::Storage;
use task_queue::TaskQueue;
use writer::Writer;

pub struct Sqlite {
    shared: Arc<Shared>,
    writer: Writer,
    readers: Arc<Readers>,
    signals: broadcast::Sender<Signal>,
    /// Locked while this process uses the file, so that a second server does not start. Unlocked when the store is closed.
    lock: Mutex<Option<fs::File>>,
}

/// What the writer thread and the callers share.
pub struct Shared {
    pub lanes: LaneCache,
    pub rules: RuleCache,
    pub api_keys: ApiKeyCache,
    pub machines: MachineCache,
    pub task_meter: TaskMeter,
    pub task_queue: TaskQueue,
    /// Only the writer uses it.
    pub task_cache: Mutex<TaskCache>,
    pub round_robin: RoundRobin,
    pub options: StoreOptions,
    /// Whether a subscription to events exists.
    pub events_on: AtomicBool,
    pub queue_feed: QueueFeed,
    pub storage: Storage,
}

struct Readers {
    connections: Vec<Mutex<Connection>>,
    next: std::sync::atomic::AtomicUsize,
}

const READERS: usize = 3;

impl Sqlite {
    pub async fn open(path: &str, options: StoreOptions) -> Result<Sqlite> {
        let path = path.to_owned();
        tokio::task::spawn_blocking(move || Self::open_blocking(Path::new(&path), options))
            .await
            .map_err(|e| StoreError::Internal(Cause::of(e)))?
    }

    fn open_blocking(path: &Path, options: StoreOptions) -> Result<Sqlite> {
        let timeout = options.timeout();
        let setup = |what: String| StoreError::Setup(what);
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            private::create_folder(folder).map_err(|e| {
                setup(format!("cannot create the folder {}: {e}; choose another with DATABASE_URL", folder.display()))
            })?;
        }
        let lock = lock_file(path)?;
        private::create_file(path).map_err(|e| {
            setup(format!(
                "cannot write {}: {e}; check the folder's owner, or choose another with DATABASE_URL",
                path.display()
            ))
        })?;
        let mut writer = connect(path, 16_384).map_err(|e| opening(path, e))?;
        storage::check_after_failure(path, &writer)?;
        prepare_schema(&writer, &options).map_err(|e| match e {
            StoreError::Unavailable(cause) | StoreError::Internal(cause) => {
                setup(format!("cannot use {}: {cause}", path.display()))
            }
            other => other,
        })?;
        // Only now, because a file that is not a database of Faena must not be changed.
        private::restrict_files(path);
        // The lock was free, so the process that used this file before has ended. Without its node, its claims are released.
        writer.execute("DELETE FROM node", [])?;
        writer.execute("UPDATE outbox_lease SET node = NULL, until = 0 WHERE node IS NOT NULL", [])?;
        writer.execute("DELETE FROM outbox_node", [])?;
        let mut connections = Vec::with_capacity(READERS);
        for _ in 0..READERS {
            let reader = connect(path, 2_048)?;
            reader.pragma_update(None, "query_only", true)?;
            connections.push(Mutex::new(reader));
        }
        let shared = Arc::new(Shared {
            lanes: LaneCache::default(),
            rules: RuleCache::default(),
            api_keys: ApiKeyCache::default(),
            machines: MachineCache::default(),
            task_meter: TaskMeter::default(),
            task_queue: TaskQueue::default(),
            task_cache: Mutex::default(),
            round_robin: RoundRobin::default(),
            options,
            events_on: AtomicBool::default(),
            queue_feed: QueueFeed::default(),
            storage: Storage::new(path),
        });
        shared.lanes.insert(read::lanes(&writer)?);
        shared.rules.set(rules::load(&writer)?);
        shared.api_keys.set(api_keys::list(&writer)?);
        events::switch(&writer, &shared, Timestamp::now())?;
        let (signals, _) = broadcast::channel(4_096);
        let checkpoints = Checkpoints::start(&mut writer, connect(path, 2_048)?, shared.clone())?;
        let writer = Writer::start(writer, checkpoints, shared.clone(), signals.clone(), timeout)?;
        let readers = Arc::new(Readers { connections, next: Default::default() });
        Ok(Sqlite { shared, writer, readers, signals, lock: Mutex::new(Some(lock)) })
    }

    async fn read<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection, &Shared) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let readers = self.readers.clone();
        let shared = self.shared.clone();
        tokio::task::spawn_blocking(move || {
            let at = readers.next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let connection = readers.connections[at % READERS].lock();
            // One transaction, so that all rows come from one snapshot.
            let snapshot = connection.unchecked_transaction()?;
            work(&snapshot, &shared)
        })
        .await
        .map_err(|e| StoreError::Internal(Cause::of(e)))?
    }
}

impl Sqlite {
    /// Changes settings. The writer uses them before they are committed; if the commit fails, the stored ones are loaded again.
    async fn change_rules(&self, change: impl FnOnce(&writer::Tx) -> Result<()> + Send + 'static) -> Result<()> {
        let result = self.writer.call(change).await;
        if result.is_err() {
            let stored = self.read(|connection, _| rules::load(connection)).await?;
            self.shared.rules.set(stored);
        }
        result
    }
}

fn lock_file(path: &Path) -> Result<fs::File> {
    let name = format!("{}.lock", path.display());
    let file =
        fs::OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&name).map_err(|e| {
            StoreError::Setup(format!(
                "cannot write {name}: {e}; check the folder's owner, or choose another with DATABASE_URL"
            ))
        })?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(fs::TryLockError::WouldBlock) => Err(StoreError::Setup(format!(
            "{} is in use by another faena; stop that one, or choose another file with DATABASE_URL",
            path.display()
        ))),
        Err(fs::TryLockError::Error(e)) => Err(StoreError::Setup(format!("cannot lock {name}: {e}"))),
    }
}

fn connect(path: &Path, cache_kib: i64) -> rusqlite::Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags)?;
    connection.busy_timeout(std::time::Duration::from_secs(5))?;
    connection.pragma_update(None, "journal_mode", "WAL")?;
    connection.pragma_update(None, "synchronous", "FULL")?;
    connection.pragma_update(None, "cache_size", -cache_kib)?;
    connection.pragma_update(None, "temp_store", "MEMORY")?;
    connection.pragma_update(None, "foreign_keys", false)?;
    // `Checkpoints` runs the checkpoints.
    connection.pragma_update(None, "wal_autocheckpoint", 0)?;
    connection.pragma_update(None, "journal_size_limit", 64 << 20)?;
    connection.set_prepared_statement_cache_capacity(256);
    Ok(connection)
}

fn opening(path: &Path, error: rusqlite::Error) -> StoreError {
    let hint = match error.sqlite_error_code() {
        Some(rusqlite::ErrorCode::NotADatabase) => "not a SQLite database; choose another file with DATABASE_URL",
        Some(rusqlite::ErrorCode::DiskFull) => "the disk is full; free some space",
        Some(
            rusqlite::ErrorCode::ReadOnly | rusqlite::ErrorCode::CannotOpen | rusqlite::ErrorCode::PermissionDenied,
        ) => "the file or its folder cannot be written; check the owner, or choose another with DATABASE_URL",
        _ => "check the file, or choose another with DATABASE_URL",
    };
    StoreError::Setup(format!("cannot open {}: {error}; {hint}", path.display()))
}

fn prepare_schema(connection: &Connection, options: &StoreOptions) -> Result<()> {
    // Exclusive from the first read on: two processes cannot migrate at the same time, and a failure leaves the old
    // schema.
    connection.execute_batch("BEGIN EXCLUSIVE")?;
    let result = migrate_in_transaction(connection, options);
    connection.execute_batch(if result.is_ok() { "COMMIT" } else { "ROLLBACK" })?;
    result
}

fn migrate_in_transaction(connection: &Connection, options: &StoreOptions) -> Result<()> {
    let known: bool =
        connection.query_row("SELECT count(*) FROM sqlite_master WHERE name = 'faena_schema'", [], |row| row.get(0))?;
    let found: i32 = if known {
        connection.query_row("SELECT coalesce(max(version), 0) FROM faena_schema", [], |row| row.get(0))?
    } else {
        0
    };
    let missing = migrate::missing(options.migrations, found, options.migrate)?;
    if !known {
        let tables: i64 = connection.query_row("SELECT count(*) FROM sqlite_master", [], |row| row.get(0))?;
        if tables > 0 {
            return Err(StoreError::Setup("it contains tables of another application; choose another file".into()));
        }
        connection.execute_batch(
            "CREATE TABLE faena_schema (version INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at INTEGER NOT NULL)",
        )?;
    }
    for migration in missing {
        connection.execute_batch(migration.sqlite)?;
        connection.execute(
            "INSERT INTO faena_schema VALUES (?, ?, ?)",
            (migration.version, migration.name, Timestamp::now().as_ms()),
        )?;
    }
    Ok(())
}

#[async_trait]
impl Store for Sqlite {
    async fn ping(&self) -> Result<()> {
        // Through the writer, so that a stuck writer is noticed, without writing anything.
        self.writer.call(|tx| Ok(tx.connection.query_row("SELECT 1", [], |_| Ok(()))?)).await?;
        let shared = self.shared.clone();
        let checked = tokio::task::spawn_blocking(move || shared.storage.check_space());
        checked.await.map_err(|e| StoreError::Internal(Cause::of(e)))?
    }

    fn signals(&self) -> broadcast::Receiver<Signal> {
        self.signals.subscribe()
    }

    fn database_kind(&self) -> &'static str {
        "sqlite"
    }

    fn is_shared(&self) -> bool {
        false
    }

    fn signal_problem(&self) -> Option<String> {
        // SQLite: there are no other nodes.
        None
    }

    async fn storage_failure(&self) -> String {
        self.shared.storage.failed().await
    }

    async fn close(&self) {
        self.writer.stop().await;
        if let Some(lock) = self.lock.lock().take() {
            // Closing the file is not enough: a child process that is being started shares it until it executes its own program.
            let _ = lock.unlock();
        }
    }
}
