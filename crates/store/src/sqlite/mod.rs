//! The embedded engine: one writer thread that commits in groups, a few readers beside it.

mod audit;
mod bulk;
mod change;
mod claim;
pub mod doctor;
mod due;
mod end;
pub mod events;
mod release;
mod inbox;
mod cleanup;
mod dead_letters;
pub mod limited_claim;
mod nodes;
mod note;
mod outbox;
mod read;
mod rules;
mod schedules;
mod position;
mod submit;
mod webhooks;
mod workers;
mod writer;

use std::{
    fs,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use async_trait::async_trait;
use faena_domain::{
    Attempt, AuditRow, BulkId, JobId, JobView, Limit, NewJob, NodeId, Rules, Run, ScheduleId, Scope, Step, Timestamp,
    WebhookId, WebhookState, WebhookView, WorkerCapabilities, WorkerId, WorkerState, WorkerView,
    schedule::{Schedule, TickRow},
};
use parking_lot::Mutex;
use rusqlite::{Connection, OpenFlags};
use serde_json::json;
use tokio::sync::broadcast;
use uuid::Uuid;

use crate::{
    AuditEntry, AuditFilter, Bulk, BulkStep, CancelOutcome, ClaimRequest, ClaimResult, Configured, Counts, DeadEvent,
    DeadFilter, DeadLetterStats, DueResult, EventPosition, EventQuery, EventRange, EventSubscription, Filter, Fired,
    GracePeriods, JobIdPage, JobPage, JobPatch, JobPosition, Lane, LaneId, NewBulk, NodeInfo, OutboxResult,
    OutboxTakeRequest, OutboxTaken, Page, Partition, Poll, QueuePatch, Recovered, Republish, Result, Retention, RunEnd,
    RunNote, ScheduleChange, ScheduleCounts, ScheduleFilter, SchedulePage, Signal, SinkView, Store, StoreError,
    StoreOptions, StoredEvent, StoredLimit, Submitted, SweepResult, WebhookFilter, WebhookResult, WebhookTakeRequest,
    WebhookTaken, WorkerAdmitted, WorkerEnd, WorkerEntry, WorkerUpdate, WorkerUpdateResult,
    admit::RoundRobin,
    audit::{act, drain_action, retried_by},
    lanes::{LaneCache, LaneName},
    migrate, plan,
    rules::RuleCache,
};
use writer::Writer;

pub struct Sqlite {
    shared: Arc<Shared>,
    writer: Writer,
    readers: Arc<Readers>,
    signals: broadcast::Sender<Signal>,
    /// Held while this process uses the file; a second `serve` on it is refused. Given up when the store is closed.
    lock: Mutex<Option<fs::File>>,
}

/// What the writer thread and the callers both know.
pub struct Shared {
    pub lanes: LaneCache,
    pub rules: RuleCache,
    pub round_robin: RoundRobin,
    /// Somebody wants events.
    pub events_on: AtomicBool,
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
            .map_err(|e| StoreError::Broken(e.to_string()))?
    }

    fn open_blocking(path: &Path, options: StoreOptions) -> Result<Sqlite> {
        let setup = |what: String| StoreError::Setup(what);
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            fs::create_dir_all(folder).map_err(|e| {
                setup(format!("cannot make the folder {}: {e}; choose another with DATABASE_URL", folder.display()))
            })?;
        }
        let lock = lock_file(path)?;
        let writer = connect(path, 16_384).map_err(|e| opening(path, e))?;
        prepare_schema(&writer, &options).map_err(|e| match e {
            StoreError::Unavailable(text) | StoreError::Broken(text) => {
                setup(format!("cannot use {}: {text}", path.display()))
            }
            other => other,
        })?;
        // Whoever used this file before is gone: its lock is ours. What it held is free at once.
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
            round_robin: RoundRobin::default(),
            events_on: AtomicBool::default(),
        });
        shared.lanes.insert(read::lanes(&writer)?);
        shared.rules.set(rules::load(&writer)?);
        events::switch(&writer, &shared, Timestamp::now())?;
        let (signals, _) = broadcast::channel(4_096);
        let writer = Writer::start(writer, shared.clone(), signals.clone());
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
            // One transaction, so that all rows are of one moment.
            let snapshot = connection.unchecked_transaction()?;
            work(&snapshot, &shared)
        })
        .await
        .map_err(|e| StoreError::Broken(e.to_string()))?
    }
}

impl Sqlite {
    /// The writer goes by the new rules before they are committed; should that fail, it goes by what is stored again.
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
    let file = fs::OpenOptions::new().create(true).truncate(false).write(true).open(&name).map_err(|e| {
        StoreError::Setup(format!(
            "cannot write {name}: {e}; check the folder's owner, or choose another with DATABASE_URL"
        ))
    })?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(fs::TryLockError::WouldBlock) => Err(StoreError::Setup(format!(
            "{} is in use by another faena; stop that one, or give this one its own DATABASE_URL",
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
    // 16 MiB of log between two checkpoints: large enough to write each page once per burst, small enough to stay in cache.
    connection.pragma_update(None, "wal_autocheckpoint", 4_096)?;
    connection.pragma_update(None, "journal_size_limit", 64 << 20)?;
    connection.set_prepared_statement_cache_capacity(256);
    Ok(connection)
}

fn opening(path: &Path, error: rusqlite::Error) -> StoreError {
    let hint = match error.sqlite_error_code() {
        Some(rusqlite::ErrorCode::NotADatabase) => "it is no SQLite database; choose another file with DATABASE_URL",
        Some(rusqlite::ErrorCode::DiskFull) => "the disk is full; free some space",
        Some(
            rusqlite::ErrorCode::ReadOnly | rusqlite::ErrorCode::CannotOpen | rusqlite::ErrorCode::PermissionDenied,
        ) => "the file or its folder cannot be written; check the owner, or choose another with DATABASE_URL",
        _ => "check the file, or choose another with DATABASE_URL",
    };
    StoreError::Setup(format!("cannot open {}: {error}; {hint}", path.display()))
}

fn prepare_schema(connection: &Connection, options: &StoreOptions) -> Result<()> {
    // Exclusive from the first read on: two processes cannot migrate at once, and a failure leaves the old schema.
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
            return Err(StoreError::Setup("it holds tables that are not Faena's; choose another file".into()));
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
    async fn job_submit(&self, jobs: Vec<NewJob>, now: Timestamp) -> Result<Vec<Submitted>> {
        // A new lane may be one too many.
        let known = |job: &NewJob| self.shared.lanes.id_of(LaneName::of(job)).is_some();
        if jobs.iter().all(|job| plan::is_plain(job) && known(job)) {
            return self.writer.call_without_savepoint(move |tx| submit::submit(tx, jobs, now)).await;
        }
        self.writer.call(move |tx| submit::submit(tx, jobs, now)).await
    }

    async fn job_claim(&self, requests: Vec<ClaimRequest>, now: Timestamp) -> Result<Vec<ClaimResult>> {
        self.writer.call(move |tx| claim::claim(tx, requests, now)).await
    }

    async fn job_steps(&self, ids: Vec<JobId>) -> Result<Vec<(JobId, Step)>> {
        self.read(move |connection, _| read::steps(connection, &ids)).await
    }

    async fn job_fail_unhandled(
        &self,
        lanes: Vec<LaneId>,
        before: Timestamp,
        limit: usize,
        now: Timestamp,
    ) -> Result<usize> {
        self.writer.call(move |tx| due::fail_unhandled(tx, &lanes, before, limit, now)).await
    }

    async fn job_note(&self, notes: Vec<RunNote>, _now: Timestamp) -> Result<Vec<bool>> {
        self.writer.call(move |tx| note::note(tx, notes)).await
    }

    async fn job_end(&self, ends: Vec<RunEnd>, now: Timestamp) -> Result<Vec<bool>> {
        self.writer.call(move |tx| end::end(tx, ends, now)).await
    }

    async fn job_cancel(&self, id: JobId, reason: &str, by: Option<&str>, now: Timestamp) -> Result<CancelOutcome> {
        let reason = reason.to_owned();
        let entry = act(by, "job.cancel", id, json!({ "reason": reason }));
        self.writer.call(move |tx| audit::with(tx, entry, now, |tx| change::cancel(tx, id, &reason, now))).await
    }

    async fn job_retry(&self, id: JobId, by: Option<&str>, now: Timestamp) -> Result<()> {
        let (entry, by) = (act(by, "job.retry", id, json!({})), retried_by(by));
        self.writer.call(move |tx| audit::with(tx, entry, now, |tx| change::retry(tx, id, &by, now))).await
    }

    async fn job_patch(&self, id: JobId, patch: JobPatch, by: Option<&str>, now: Timestamp) -> Result<()> {
        let entry = act(by, "job.patch", id, json!({ "changed": patch.describe() }));
        self.writer.call(move |tx| audit::with(tx, entry, now, |tx| change::patch(tx, id, patch, now))).await
    }

    async fn job_delete(&self, id: JobId, by: Option<&str>, now: Timestamp) -> Result<()> {
        let entry = act(by, "job.delete", id, json!({}));
        self.writer.call(move |tx| audit::with(tx, entry, now, |tx| change::delete(tx, id, now))).await
    }

    async fn job_promote(&self, limit: usize, now: Timestamp) -> Result<DueResult> {
        self.writer.call(move |tx| due::promote(tx, limit, now)).await
    }

    async fn job_expire(&self, limit: usize, now: Timestamp) -> Result<DueResult> {
        // SQLite: mostly there is nothing to do; a look is enough to know, and when to look again.
        let next_at = self.read(|connection, _| read::next_expiry_at(connection)).await?;
        if next_at.is_none_or(|at| at > now) {
            return Ok(DueResult { next_at, ..DueResult::default() });
        }
        self.writer.call(move |tx| due::expire(tx, limit, now)).await
    }

    async fn job_prune(&self, retention: &Retention, limit: usize, now: Timestamp) -> Result<usize> {
        let retention = retention.clone();
        self.writer.call(move |tx| due::prune(tx, &retention, limit, now)).await
    }

    async fn job_get(&self, id: JobId) -> Result<Option<JobView>> {
        self.read(move |connection, shared| read::get(connection, shared, id)).await
    }

    async fn job_position(&self, id: JobId) -> Result<Option<JobPosition>> {
        self.read(move |connection, shared| position::position(connection, shared, id)).await
    }

    async fn job_list(&self, filter: &Filter, page: Page) -> Result<JobPage> {
        let filter = filter.clone();
        self.read(move |connection, shared| read::list(connection, shared, &filter, page)).await
    }

    async fn job_find(&self, filter: &Filter, after: Option<JobId>, upto: JobId, limit: usize) -> Result<JobIdPage> {
        let filter = filter.clone();
        let page = Page::Upward { after, upto, limit };
        self.read(move |connection, shared| read::find(connection, shared, &filter, page)).await
    }

    async fn job_attempts(&self, id: JobId) -> Result<Vec<Attempt>> {
        self.read(move |connection, _| dead_letters::attempts(connection, id)).await
    }

    async fn dead_letter_retry(&self, id: JobId, by: &str, now: Timestamp) -> Result<()> {
        let by = by.to_owned();
        self.writer.call(move |tx| dead_letters::retry(tx, id, &by, now)).await
    }

    async fn dead_letter_delete(&self, id: JobId, by: &str, now: Timestamp) -> Result<()> {
        let by = by.to_owned();
        self.writer.call(move |tx| dead_letters::delete(tx, id, &by, now)).await
    }

    async fn dead_letter_stats(&self) -> Result<DeadLetterStats> {
        self.read(|connection, _| dead_letters::stats(connection)).await
    }

    async fn bulk_begin(&self, bulk: NewBulk, due_at: Timestamp, now: Timestamp) -> Result<()> {
        self.writer.call(move |tx| bulk::begin(tx, &bulk, due_at, now)).await
    }

    async fn bulk_due(&self) -> Result<Option<Bulk>> {
        self.read(|connection, _| bulk::due(connection)).await
    }

    async fn bulk_step(&self, step: BulkStep, now: Timestamp) -> Result<bool> {
        self.writer.call(move |tx| bulk::step(tx, &step, now)).await
    }

    async fn bulk_stop(&self, id: BulkId, by: &str, now: Timestamp) -> Result<bool> {
        let by = by.to_owned();
        self.writer.call(move |tx| bulk::stop(tx, id, &by, now)).await
    }

    async fn bulk_get(&self, id: BulkId) -> Result<Option<Bulk>> {
        self.read(move |connection, _| bulk::get(connection, id)).await
    }

    async fn bulk_list(&self, limit: usize) -> Result<Vec<Bulk>> {
        self.read(move |connection, _| bulk::list(connection, limit)).await
    }

    async fn ready_since(&self) -> Result<Vec<(LaneId, Timestamp)>> {
        self.read(|connection, _| read::ready_since(connection)).await
    }

    async fn counts(&self) -> Result<Counts> {
        self.read(|connection, _| read::counts(connection)).await
    }

    async fn node_join(&self, node: NodeInfo, lease_ms: i64, now: Timestamp) -> Result<()> {
        self.writer.call(move |tx| nodes::join(tx, &node, lease_ms, now)).await
    }

    async fn node_renew(&self, node: NodeId, lease_ms: i64, now: Timestamp) -> Result<bool> {
        // SQLite: the file's lock is the lease; while this process has it, nobody else can take its jobs. Nothing is written.
        let _ = lease_ms;
        self.read(move |connection, _| nodes::is_known(connection, node, now)).await
    }

    async fn node_leave(&self, node: NodeId, grace_periods: GracePeriods, now: Timestamp) -> Result<usize> {
        self.writer.call(move |tx| nodes::leave(tx, node, grace_periods, now)).await
    }

    async fn node_recover(&self, grace_periods: GracePeriods, now: Timestamp) -> Result<Recovered> {
        self.writer.call(move |tx| nodes::recover(tx, grace_periods, now)).await
    }

    async fn node_reconcile(&self, node: NodeId, known: Vec<Run>, before: Timestamp, now: Timestamp) -> Result<usize> {
        // SQLite: a claim is lost only together with its answer, so there is mostly nothing; a look is enough to know.
        let lost = self.read(move |connection, _| nodes::unknown_claims(connection, node, &known, before)).await?;
        if lost.is_empty() {
            return Ok(0);
        }
        self.writer.call(move |tx| nodes::return_claims(tx, &lost, nodes::UNDELIVERED, now)).await
    }

    async fn worker_admit(&self, entry: WorkerEntry, now: Timestamp) -> Result<WorkerAdmitted> {
        self.writer.call(move |tx| workers::admit(tx, &entry, now)).await
    }

    async fn worker_update(&self, updates: Vec<WorkerUpdate>, _now: Timestamp) -> Result<Vec<WorkerUpdateResult>> {
        self.writer.call(move |tx| workers::updates(tx, &updates)).await
    }

    async fn worker_drain(&self, key: &str, drain: bool, by: Option<&str>, now: Timestamp) -> Result<Option<WorkerId>> {
        let key = key.to_owned();
        let entry = act(by, drain_action(drain), &key, json!({}));
        self.writer.call(move |tx| workers::drain(tx, &key, drain, entry, now)).await
    }

    async fn worker_end(
        &self,
        id: WorkerId,
        session: i64,
        end: WorkerEnd,
        now: Timestamp,
    ) -> Result<Option<Recovered>> {
        self.writer.call(move |tx| workers::end(tx, id, session, &end, now)).await
    }

    async fn worker_sweep(
        &self,
        orphan_delay_ms: i64,
        forget_before: Timestamp,
        now: Timestamp,
    ) -> Result<SweepResult> {
        // SQLite: mostly there is nothing to do; a look is enough to know, and when to look again.
        let (due, next_at) = self.read(move |connection, _| workers::due(connection, forget_before, now)).await?;
        if !due {
            return Ok(SweepResult { next_at, ..SweepResult::default() });
        }
        self.writer.call(move |tx| workers::sweep(tx, orphan_delay_ms, forget_before, now)).await
    }

    async fn worker_get(&self, key: &str) -> Result<Option<WorkerView>> {
        let key = key.to_owned();
        self.read(move |connection, _| workers::get(connection, &key)).await
    }

    async fn worker_session(&self, id: WorkerId) -> Result<Option<i64>> {
        self.read(move |connection, _| workers::session(connection, id)).await
    }

    async fn worker_list(&self, states: Vec<WorkerState>, limit: usize) -> Result<Vec<WorkerView>> {
        self.read(move |connection, _| workers::list(connection, &states, limit)).await
    }

    async fn worker_capabilities(&self) -> Result<Vec<WorkerCapabilities>> {
        self.read(|connection, _| workers::worker_capabilities(connection)).await
    }

    fn rules(&self) -> Arc<Rules> {
        self.shared.rules.current()
    }

    async fn rules_load(&self) -> Result<Arc<Rules>> {
        // SQLite: nobody else changes them.
        Ok(self.shared.rules.current())
    }

    async fn rules_configure(&self, configured: Configured, now: Timestamp) -> Result<()> {
        self.change_rules(move |tx| rules::configure(tx, &configured, now)).await
    }

    async fn queue_set(&self, name: &str, patch: QueuePatch, by: &str, now: Timestamp) -> Result<()> {
        let (name, by) = (name.to_owned(), by.to_owned());
        self.change_rules(move |tx| rules::set_queue(tx, &name, &patch, &by, now)).await
    }

    async fn limit_set(&self, scope: Scope, limit: Limit, by: &str, now: Timestamp) -> Result<()> {
        let by = by.to_owned();
        self.change_rules(move |tx| rules::set_limit(tx, &scope, &limit, &by, now)).await
    }

    async fn limit_reset(&self, scope: Scope, configured: Option<Limit>, by: &str, now: Timestamp) -> Result<()> {
        let by = by.to_owned();
        self.change_rules(move |tx| rules::reset_limit(tx, &scope, configured, &by, now)).await
    }

    async fn limits(&self) -> Result<Vec<StoredLimit>> {
        self.read(|connection, _| rules::limits(connection)).await
    }

    async fn audit_add(&self, entry: AuditEntry, now: Timestamp) -> Result<()> {
        self.writer.call(move |tx| audit::add(tx, &entry, now)).await
    }

    async fn audit_list(&self, filter: AuditFilter, limit: usize) -> Result<Vec<AuditRow>> {
        self.read(move |connection, _| audit::list(connection, &filter, limit)).await
    }

    async fn webhook_take(&self, request: WebhookTakeRequest, now: Timestamp) -> Result<WebhookTaken> {
        self.writer.call(move |tx| webhooks::take(tx, &request, now)).await
    }

    async fn webhook_settle(&self, results: Vec<WebhookResult>, now: Timestamp) -> Result<Vec<bool>> {
        self.writer.call(move |tx| webhooks::settle(tx, &results, now)).await
    }

    async fn webhook_redeliver(&self, id: WebhookId, by: &str, now: Timestamp) -> Result<Option<JobId>> {
        let by = by.to_owned();
        self.writer.call(move |tx| webhooks::redeliver(tx, id, &by, now)).await
    }

    async fn webhook_get(&self, id: WebhookId) -> Result<Option<WebhookView>> {
        self.read(move |connection, _| webhooks::get(connection, id)).await
    }

    async fn webhook_list(
        &self,
        filter: WebhookFilter,
        after: Option<WebhookId>,
        limit: usize,
    ) -> Result<Vec<WebhookView>> {
        self.read(move |connection, _| webhooks::list(connection, &filter, after, limit)).await
    }

    async fn webhook_counts(&self) -> Result<Vec<(WebhookState, u64)>> {
        self.read(|connection, _| webhooks::counts(connection)).await
    }

    async fn schedule_create(&self, schedule: Schedule, by: &str, now: Timestamp) -> Result<()> {
        let by = by.to_owned();
        self.writer.call(move |tx| schedules::create(tx, &schedule, &by, now)).await
    }

    async fn schedule_patch(
        &self,
        id: ScheduleId,
        change: ScheduleChange,
        by: &str,
        now: Timestamp,
    ) -> Result<Option<Schedule>> {
        let by = by.to_owned();
        self.writer.call(move |tx| schedules::patch(tx, id, &change, &by, now)).await
    }

    async fn schedule_delete(&self, id: ScheduleId, by: &str, now: Timestamp) -> Result<bool> {
        let by = by.to_owned();
        self.writer.call(move |tx| schedules::delete(tx, id, &by, now)).await
    }

    async fn schedule_trigger(&self, id: ScheduleId, by: &str, now: Timestamp) -> Result<Option<JobId>> {
        let by = by.to_owned();
        self.writer.call(move |tx| schedules::trigger(tx, id, &by, now)).await
    }

    async fn schedule_fire(&self, limit: usize, now: Timestamp) -> Result<Fired> {
        self.writer.call(move |tx| schedules::fire(tx, limit, now)).await
    }

    async fn schedule_get(&self, id: ScheduleId) -> Result<Option<Schedule>> {
        self.read(move |connection, _| schedules::get(connection, id)).await
    }

    async fn schedule_list(&self, filter: ScheduleFilter, page: SchedulePage) -> Result<(Vec<Schedule>, u64)> {
        self.read(move |connection, _| schedules::list(connection, &filter, page)).await
    }

    async fn schedule_ticks(&self, id: ScheduleId, before: Option<Timestamp>, limit: usize) -> Result<Vec<TickRow>> {
        self.read(move |connection, _| schedules::ticks(connection, id, before, limit)).await
    }

    async fn schedule_counts(&self) -> Result<ScheduleCounts> {
        self.read(|connection, _| schedules::counts(connection)).await
    }

    async fn event_subscribe(&self, wants: Vec<EventSubscription>, now: Timestamp) -> Result<()> {
        self.writer.call(move |tx| events::subscribe(tx, &wants, now)).await
    }

    fn has_event_subscriptions(&self) -> bool {
        self.shared.events_on.load(Ordering::Relaxed)
    }

    async fn event_settle(&self, before: Timestamp, limit: usize, now: Timestamp) -> Result<usize> {
        self.writer.call(move |tx| events::settle(tx, before, limit, now)).await
    }

    async fn event_list(&self, query: EventQuery, limit: usize) -> Result<Vec<StoredEvent>> {
        self.read(move |connection, _| events::list(connection, &query, limit)).await
    }

    async fn event_end(&self) -> Result<EventPosition> {
        self.read(|connection, _| events::end(connection)).await
    }

    async fn event_range(&self, name: &str) -> Result<Option<EventRange>> {
        let name = name.to_owned();
        self.read(move |connection, _| events::range(connection, &name)).await
    }

    async fn outbox_take(&self, request: OutboxTakeRequest, now: Timestamp) -> Result<OutboxTaken> {
        let asked = request.clone();
        if let Some(taken) = self.read(move |connection, _| outbox::peek(connection, &asked, now)).await? {
            return Ok(taken);
        }
        self.writer.call(move |tx| outbox::take(tx, &request, now)).await
    }

    async fn outbox_settle(
        &self,
        sink: &str,
        held: Vec<Partition>,
        results: Vec<OutboxResult>,
        now: Timestamp,
    ) -> Result<()> {
        let sink = sink.to_owned();
        self.writer.call(move |tx| outbox::settle(tx, &sink, &held, &results, now)).await
    }

    async fn outbox_down(&self, sink: &str, reason: Option<String>, now: Timestamp) -> Result<()> {
        let sink = sink.to_owned();
        self.writer.call(move |tx| outbox::down(tx, &sink, reason.as_deref(), now)).await
    }

    async fn outbox_leave(&self, node: NodeId) -> Result<()> {
        self.writer.call(move |tx| outbox::leave(tx, node)).await
    }

    async fn outbox_sinks(&self, now: Timestamp) -> Result<Vec<SinkView>> {
        self.read(move |connection, _| outbox::sinks(connection, now)).await
    }

    async fn outbox_dead(&self, filter: DeadFilter, after: Option<Uuid>, limit: usize) -> Result<Vec<DeadEvent>> {
        self.read(move |connection, _| outbox::dead(connection, &filter, after, limit)).await
    }

    async fn outbox_replay(
        &self,
        filter: DeadFilter,
        per_second: Option<u32>,
        by: &str,
        now: Timestamp,
    ) -> Result<usize> {
        let by = by.to_owned();
        self.writer.call(move |tx| outbox::replay(tx, &filter, per_second, &by, now)).await
    }

    async fn outbox_resolve(&self, filter: DeadFilter, notes: &str, by: &str, now: Timestamp) -> Result<usize> {
        let (notes, by) = (notes.to_owned(), by.to_owned());
        self.writer.call(move |tx| outbox::resolve(tx, &filter, &notes, &by, now)).await
    }

    async fn outbox_republish(
        &self,
        what: Republish,
        per_second: Option<u32>,
        by: &str,
        now: Timestamp,
    ) -> Result<Option<usize>> {
        let by = by.to_owned();
        self.writer.call(move |tx| outbox::republish(tx, &what, per_second, &by, now)).await
    }

    async fn inbox_submit(
        &self,
        consumer: &str,
        message: &str,
        jobs: Vec<NewJob>,
        now: Timestamp,
    ) -> Result<Option<Vec<Submitted>>> {
        let (consumer, message) = (consumer.to_owned(), message.to_owned());
        self.writer.call(move |tx| inbox::submit(tx, &consumer, &message, jobs, now)).await
    }

    async fn poll(&self, node: NodeId, _now: Timestamp) -> Result<Poll> {
        self.read(move |connection, _| read::poll(connection, node)).await
    }

    async fn lanes(&self) -> Result<Vec<Lane>> {
        Ok(self.shared.lanes.all())
    }

    async fn ping(&self) -> Result<()> {
        // Through the writer, so that a full disk or a stuck writer is seen, without writing anything.
        self.writer.call(|tx| Ok(tx.connection.query_row("SELECT 1", [], |_| Ok(()))?)).await
    }

    fn signals(&self) -> broadcast::Receiver<Signal> {
        self.signals.subscribe()
    }

    fn engine(&self) -> &'static str {
        "sqlite"
    }

    async fn close(&self) {
        self.writer.stop().await;
        if let Some(lock) = self.lock.lock().take() {
            // Closing the file is not enough: a process that is being started has a copy of it until it runs its own program.
            let _ = lock.unlock();
        }
    }
}
