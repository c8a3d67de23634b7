//! The engine for many nodes on one PostgreSQL.
//!
//! Busy verbs go through batchers: whatever is asked while one transaction runs goes into the next one together. Ends of the
//! same run always take the same batcher, so they keep their order.

mod audit;
mod batch;
mod bulk;
mod change;
pub mod claim;
mod complete;
pub mod connect;
pub mod doctor;
mod due;
mod end;
mod events;
mod dependents;
mod release;
mod inbox;
mod cleanup;
mod dead_letters;
pub mod limited_claim;
mod nodes;
mod note;
mod notify;
mod outbox;
mod read;
mod rules;
pub mod schedules;
mod position;
mod submit;
mod webhooks;
mod workers;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use deadpool_postgres::{Object, Pool};
use faena_domain::{
    Attempt, AuditRow, BulkId, JobId, JobView, Limit, NewJob, NodeId, Rules, Run, ScheduleId, Scope, Step, Timestamp,
    WebhookId, WebhookState, WebhookView, WorkerCapabilities, WorkerId, WorkerState, WorkerView,
    schedule::{Schedule, TickRow},
};
use parking_lot::Mutex;
use tokio::sync::broadcast;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{
    AuditEntry, AuditFilter, Bulk, BulkStep, CancelOutcome, ClaimRequest, ClaimResult, Configured, Counts, DeadEvent,
    DeadFilter, DeadLetterStats, DueResult, EventPosition, EventQuery, EventRange, EventSubscription, Filter, Fired,
    GracePeriods, JobIdPage, JobPage, JobPatch, JobPosition, Lane, LaneId, NewBulk, NodeInfo, OutboxResult,
    OutboxTakeRequest, OutboxTaken, Page, Partition, Poll, QueuePatch, Recovered, Republish, Result, Retention, RunEnd,
    RunNote, ScheduleChange, ScheduleCounts, ScheduleFilter, SchedulePage, Signal, SinkView, Store, StoreError,
    StoreOptions, StoredEvent, StoredLimit, Submitted, SweepResult, WebhookFilter, WebhookResult, WebhookTakeRequest,
    WebhookTaken, WorkerAdmitted, WorkerEnd, WorkerEntry, WorkerUpdate, WorkerUpdateResult, admit::RoundRobin,
    lanes::LaneCache, rules::RuleCache,
};
use batch::Batcher;
use claim::Cursors;
use notify::Notifier;

pub struct Postgres {
    shared: Arc<Shared>,
    submits: Batcher<submit::Call>,
    reports: Vec<Batcher<end::Call>>,
    stop: CancellationToken,
}

pub struct Shared {
    pool: Pool,
    lanes: LaneCache,
    rules: RuleCache,
    /// A digest of the rules as the last poll saw them.
    rules_seen: Mutex<Option<String>>,
    options: StoreOptions,
    cursors: Cursors,
    round_robin: RoundRobin,
    /// Somebody wants events.
    events_on: AtomicBool,
    notifier: Notifier,
    /// The counter rows of this process are its own, as far as chance allows: writers do not wait for each other.
    first_shard: i16,
}

/// Submitting connections, and reporting ones.
const SUBMITTERS: usize = 2;
const REPORTERS: usize = 2;
/// Each end of a job with a key takes the key's lock, and a server has 6 400 places for locks by default, for all its sessions.
const KEYED_AT_ONCE: usize = 250;

/// Reports that one call to a batcher carries, with their places among all.
struct Part<T> {
    places: Vec<usize>,
    reports: Vec<T>,
    keyed: usize,
}

impl Postgres {
    pub async fn open(url: &str, options: StoreOptions) -> Result<Postgres> {
        let pool = connect::pool(url)?;
        connect::prepare_schema(&pool, &options).await?;
        let stop = CancellationToken::new();
        let notifier = Notifier::start(url, pool.clone(), stop.clone())?;
        let first_shard = i16::try_from(uuid::Uuid::new_v4().as_u128() % 16).unwrap_or(0) * 16;
        let shared = Arc::new(Shared {
            pool,
            lanes: LaneCache::default(),
            rules: RuleCache::default(),
            rules_seen: Mutex::default(),
            options,
            cursors: Cursors::default(),
            round_robin: RoundRobin::default(),
            events_on: AtomicBool::default(),
            notifier,
            first_shard,
        });
        shared.load_lanes().await?;
        rules::load(&shared).await?;
        events::look(&shared).await?;
        due::make_partitions(&shared, Timestamp::now()).await?;
        let submits = Batcher::start(shared.clone(), SUBMITTERS, 0, |shared, shard, calls| {
            Box::pin(submit::run(shared, shard, calls))
        });
        let reports = (0..REPORTERS)
            .map(|n| {
                let shard = SUBMITTERS + n;
                Batcher::start(shared.clone(), 1, shard, |shared, shard, calls| {
                    Box::pin(end::run(shared, shard, calls))
                })
            })
            .collect();
        Ok(Postgres { shared, submits, reports, stop })
    }
}

impl Shared {
    /// A connection for reads and single statements.
    pub async fn client(&self) -> Result<Lease> {
        let object = self.pool.get().await.map_err(|e| StoreError::Unavailable(crate::error::chain(&e)))?;
        Ok(Lease(Some(object)))
    }

    pub async fn begin(&self) -> Result<Lease> {
        let client = self.client().await?;
        client.batch_execute("BEGIN; SET LOCAL jit = off").await?;
        Ok(client)
    }

    /// Runs `work` again when it stood in another transaction's way, and not longer than a statement may take.
    pub async fn retrying<T, F: Future<Output = Result<T>>>(&self, work: impl Fn() -> F) -> Result<T> {
        let limit = Duration::from_millis(self.options.statement_timeout_ms);
        let mut tries = 0;
        loop {
            let result = match tokio::time::timeout(limit, work()).await {
                Ok(result) => result,
                Err(_) => Err(StoreError::Unavailable(format!(
                    "the database did not answer within {} s",
                    limit.as_secs_f32()
                ))),
            };
            match result {
                Err(StoreError::Contended(_)) if tries < 10 => {
                    tries += 1;
                    tokio::time::sleep(Duration::from_millis(tries * 3)).await;
                }
                Err(StoreError::Contended(text)) => return Err(StoreError::Unavailable(text)),
                result => return result,
            }
        }
    }

    pub fn shard(&self, writer: usize) -> i16 {
        self.first_shard + i16::try_from(writer).unwrap_or(0)
    }

    /// The shard of everything that does not go through a batcher.
    pub fn own_shard(&self) -> i16 {
        self.shard(SUBMITTERS + REPORTERS)
    }

    /// The shard of bulk actions, whose transactions are longer.
    pub fn bulk_shard(&self) -> i16 {
        self.shard(SUBMITTERS + REPORTERS + 1)
    }

    pub async fn load_lanes(&self) -> Result<()> {
        let client = self.client().await?;
        let lanes = read::lanes(&client).await;
        self.lanes.insert(client.keep(lanes)?);
        Ok(())
    }

    pub fn signal(&self, signals: impl IntoIterator<Item = Signal>) {
        for signal in signals {
            self.notifier.send(signal);
        }
        self.signal_events();
    }

    /// Something has happened: whoever brings events somewhere looks.
    pub fn signal_events(&self) {
        if self.events_on.load(Ordering::Relaxed) {
            self.notifier.send(Signal::Event);
        }
    }
}

/// A connection on loan. It goes back to the pool only by `keep` or `end`; dropped in the middle of something (an error, a
/// timeout, a caller who went away) it is closed, so that nobody inherits a half-done transaction.
pub struct Lease(Option<Object>);

impl Lease {
    /// Gives the connection back if it is still good.
    pub fn keep<T>(mut self, result: Result<T>) -> Result<T> {
        if matches!(result, Ok(_) | Err(StoreError::NotFound(_) | StoreError::Invalid(_) | StoreError::Conflict { .. }))
        {
            drop(self.0.take());
        }
        result
    }

    /// Ends a transaction: commits what went well, takes back what did not.
    pub async fn end<T>(mut self, result: Result<T>) -> Result<T> {
        let word = match &result {
            Ok(_) => "COMMIT",
            Err(StoreError::Unavailable(_)) => return result,
            Err(_) => "ROLLBACK",
        };
        self.batch_execute(word).await?;
        drop(self.0.take());
        result
    }
}

impl std::ops::Deref for Lease {
    type Target = Object;

    fn deref(&self) -> &Object {
        self.0.as_ref().expect("a lease holds its connection until it ends")
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(object) = self.0.take() {
            drop(Object::take(object));
        }
    }
}

#[async_trait]
impl Store for Postgres {
    async fn job_submit(&self, jobs: Vec<NewJob>, now: Timestamp) -> Result<Vec<Submitted>> {
        self.submits.call(|answer| submit::Call { jobs, now, answer }).await
    }

    async fn job_claim(&self, requests: Vec<ClaimRequest>, now: Timestamp) -> Result<Vec<ClaimResult>> {
        claim::claim(&self.shared, &requests, now).await
    }

    async fn job_steps(&self, ids: Vec<JobId>) -> Result<Vec<(JobId, Step)>> {
        self.shared.retrying(|| read::steps(&self.shared, &ids)).await
    }

    async fn job_fail_unhandled(
        &self,
        lanes: Vec<LaneId>,
        before: Timestamp,
        limit: usize,
        now: Timestamp,
    ) -> Result<usize> {
        self.shared.retrying(|| due::fail_unhandled(&self.shared, &lanes, before, limit, now)).await
    }

    async fn job_note(&self, notes: Vec<RunNote>, now: Timestamp) -> Result<Vec<bool>> {
        self.report(notes, |note| note.run, |_| false, end::Work::Notes, now).await
    }

    async fn job_end(&self, ends: Vec<RunEnd>, now: Timestamp) -> Result<Vec<bool>> {
        let some = self.shared.lanes.any_keyed(ends.iter().map(|end| end.lane));
        let keyed = |end: &RunEnd| some && self.shared.lanes.any_keyed([end.lane]);
        self.report(ends, |end| end.run, keyed, end::Work::Ends, now).await
    }

    async fn job_cancel(&self, id: JobId, reason: &str, by: Option<&str>, now: Timestamp) -> Result<CancelOutcome> {
        self.shared.retrying(|| change::cancel(&self.shared, id, reason, by, now)).await
    }

    async fn job_retry(&self, id: JobId, by: Option<&str>, now: Timestamp) -> Result<()> {
        self.shared.retrying(|| change::retry(&self.shared, id, by, now)).await
    }

    async fn job_patch(&self, id: JobId, patch: JobPatch, by: Option<&str>, now: Timestamp) -> Result<()> {
        self.shared.retrying(|| change::patch(&self.shared, id, &patch, by, now)).await
    }

    async fn job_delete(&self, id: JobId, by: Option<&str>, now: Timestamp) -> Result<()> {
        self.shared.retrying(|| change::delete(&self.shared, id, by, now)).await
    }

    async fn job_promote(&self, limit: usize, now: Timestamp) -> Result<DueResult> {
        self.shared.retrying(|| due::promote(&self.shared, limit, now)).await
    }

    async fn job_expire(&self, limit: usize, now: Timestamp) -> Result<DueResult> {
        self.shared.retrying(|| due::expire(&self.shared, limit, now)).await
    }

    async fn job_prune(&self, retention: &Retention, limit: usize, now: Timestamp) -> Result<usize> {
        self.shared.retrying(|| due::prune(&self.shared, retention, limit, now)).await
    }

    async fn job_get(&self, id: JobId) -> Result<Option<JobView>> {
        self.shared.retrying(|| read::get(&self.shared, id)).await
    }

    async fn job_position(&self, id: JobId) -> Result<Option<JobPosition>> {
        self.shared.retrying(|| position::position(&self.shared, id)).await
    }

    async fn job_list(&self, filter: &Filter, page: Page) -> Result<JobPage> {
        self.shared.retrying(|| read::list(&self.shared, filter, page)).await
    }

    async fn job_find(&self, filter: &Filter, after: Option<JobId>, upto: JobId, limit: usize) -> Result<JobIdPage> {
        self.shared.retrying(|| read::find(&self.shared, filter, Page::Upward { after, upto, limit })).await
    }

    async fn job_attempts(&self, id: JobId) -> Result<Vec<Attempt>> {
        self.shared.retrying(|| dead_letters::attempts(&self.shared, id)).await
    }

    async fn dead_letter_retry(&self, id: JobId, by: &str, now: Timestamp) -> Result<()> {
        self.shared.retrying(|| dead_letters::retry(&self.shared, id, by, now)).await
    }

    async fn dead_letter_delete(&self, id: JobId, by: &str, now: Timestamp) -> Result<()> {
        self.shared.retrying(|| dead_letters::delete(&self.shared, id, by, now)).await
    }

    async fn dead_letter_stats(&self) -> Result<DeadLetterStats> {
        self.shared.retrying(|| dead_letters::stats(&self.shared)).await
    }

    async fn bulk_begin(&self, bulk: NewBulk, due_at: Timestamp, now: Timestamp) -> Result<()> {
        self.shared.retrying(|| bulk::begin(&self.shared, &bulk, due_at, now)).await
    }

    async fn bulk_due(&self) -> Result<Option<Bulk>> {
        self.shared.retrying(|| bulk::due(&self.shared)).await
    }

    async fn bulk_step(&self, step: BulkStep, now: Timestamp) -> Result<bool> {
        self.shared.retrying(|| bulk::step(&self.shared, &step, now)).await
    }

    async fn bulk_stop(&self, id: BulkId, by: &str, now: Timestamp) -> Result<bool> {
        self.shared.retrying(|| bulk::stop(&self.shared, id, by, now)).await
    }

    async fn bulk_get(&self, id: BulkId) -> Result<Option<Bulk>> {
        self.shared.retrying(|| bulk::get(&self.shared, id)).await
    }

    async fn bulk_list(&self, limit: usize) -> Result<Vec<Bulk>> {
        self.shared.retrying(|| bulk::list(&self.shared, limit)).await
    }

    async fn ready_since(&self) -> Result<Vec<(LaneId, Timestamp)>> {
        self.shared.retrying(|| read::ready_since(&self.shared)).await
    }

    async fn counts(&self) -> Result<Counts> {
        self.shared.retrying(|| read::counts(&self.shared)).await
    }

    async fn node_join(&self, node: NodeInfo, lease_ms: i64, now: Timestamp) -> Result<()> {
        self.shared.retrying(|| nodes::join(&self.shared, &node, lease_ms, now)).await
    }

    async fn node_renew(&self, node: NodeId, lease_ms: i64, now: Timestamp) -> Result<bool> {
        self.shared.retrying(|| nodes::renew(&self.shared, node, lease_ms, now)).await
    }

    async fn node_leave(&self, node: NodeId, grace_periods: GracePeriods, now: Timestamp) -> Result<usize> {
        self.shared.retrying(|| nodes::leave(&self.shared, node, grace_periods, now)).await
    }

    async fn node_recover(&self, grace_periods: GracePeriods, now: Timestamp) -> Result<Recovered> {
        self.shared.retrying(|| nodes::recover(&self.shared, grace_periods, now)).await
    }

    async fn node_reconcile(&self, node: NodeId, known: Vec<Run>, before: Timestamp, now: Timestamp) -> Result<usize> {
        self.shared.retrying(|| nodes::reconcile(&self.shared, node, &known, before, now)).await
    }

    async fn worker_admit(&self, entry: WorkerEntry, now: Timestamp) -> Result<WorkerAdmitted> {
        self.shared.retrying(|| workers::admit(&self.shared, &entry, now)).await
    }

    async fn worker_update(&self, updates: Vec<WorkerUpdate>, _now: Timestamp) -> Result<Vec<WorkerUpdateResult>> {
        self.shared.retrying(|| workers::updates(&self.shared, &updates)).await
    }

    async fn worker_drain(&self, key: &str, drain: bool, by: Option<&str>, now: Timestamp) -> Result<Option<WorkerId>> {
        self.shared.retrying(|| workers::drain(&self.shared, key, drain, by, now)).await
    }

    async fn worker_end(
        &self,
        id: WorkerId,
        session: i64,
        end: WorkerEnd,
        now: Timestamp,
    ) -> Result<Option<Recovered>> {
        self.shared.retrying(|| workers::end(&self.shared, id, session, &end, now)).await
    }

    async fn worker_sweep(
        &self,
        orphan_delay_ms: i64,
        forget_before: Timestamp,
        now: Timestamp,
    ) -> Result<SweepResult> {
        workers::sweep(&self.shared, orphan_delay_ms, forget_before, now).await
    }

    async fn worker_get(&self, key: &str) -> Result<Option<WorkerView>> {
        self.shared.retrying(|| workers::get(&self.shared, key)).await
    }

    async fn worker_session(&self, id: WorkerId) -> Result<Option<i64>> {
        self.shared.retrying(|| workers::session(&self.shared, id)).await
    }

    async fn worker_list(&self, states: Vec<WorkerState>, limit: usize) -> Result<Vec<WorkerView>> {
        self.shared.retrying(|| workers::list(&self.shared, &states, limit)).await
    }

    async fn worker_capabilities(&self) -> Result<Vec<WorkerCapabilities>> {
        self.shared.retrying(|| workers::worker_capabilities(&self.shared)).await
    }

    fn rules(&self) -> Arc<Rules> {
        self.shared.rules.current()
    }

    async fn rules_load(&self) -> Result<Arc<Rules>> {
        self.shared.retrying(|| rules::load(&self.shared)).await
    }

    async fn rules_configure(&self, configured: Configured, now: Timestamp) -> Result<()> {
        self.shared.retrying(|| rules::configure(&self.shared, &configured, now)).await
    }

    async fn queue_set(&self, name: &str, patch: QueuePatch, by: &str, now: Timestamp) -> Result<()> {
        self.shared.retrying(|| rules::set_queue(&self.shared, name, &patch, by, now)).await
    }

    async fn limit_set(&self, scope: Scope, limit: Limit, by: &str, now: Timestamp) -> Result<()> {
        self.shared.retrying(|| rules::set_limit(&self.shared, &scope, &limit, by, now)).await
    }

    async fn limit_reset(&self, scope: Scope, configured: Option<Limit>, by: &str, now: Timestamp) -> Result<()> {
        self.shared.retrying(|| rules::reset_limit(&self.shared, &scope, configured, by, now)).await
    }

    async fn limits(&self) -> Result<Vec<StoredLimit>> {
        self.shared.retrying(|| rules::limits(&self.shared)).await
    }

    async fn audit_add(&self, entry: AuditEntry, now: Timestamp) -> Result<()> {
        self.shared.retrying(|| audit::put(&self.shared, &entry, now)).await
    }

    async fn audit_list(&self, filter: AuditFilter, limit: usize) -> Result<Vec<AuditRow>> {
        self.shared.retrying(|| audit::list(&self.shared, &filter, limit)).await
    }

    async fn webhook_take(&self, request: WebhookTakeRequest, now: Timestamp) -> Result<WebhookTaken> {
        self.shared.retrying(|| webhooks::take(&self.shared, &request, now)).await
    }

    async fn webhook_settle(&self, results: Vec<WebhookResult>, now: Timestamp) -> Result<Vec<bool>> {
        self.shared.retrying(|| webhooks::settle(&self.shared, &results, now)).await
    }

    async fn webhook_redeliver(&self, id: WebhookId, by: &str, now: Timestamp) -> Result<Option<JobId>> {
        self.shared.retrying(|| webhooks::redeliver(&self.shared, id, by, now)).await
    }

    async fn webhook_get(&self, id: WebhookId) -> Result<Option<WebhookView>> {
        self.shared.retrying(|| webhooks::get(&self.shared, id)).await
    }

    async fn webhook_list(
        &self,
        filter: WebhookFilter,
        after: Option<WebhookId>,
        limit: usize,
    ) -> Result<Vec<WebhookView>> {
        self.shared.retrying(|| webhooks::list(&self.shared, &filter, after, limit)).await
    }

    async fn webhook_counts(&self) -> Result<Vec<(WebhookState, u64)>> {
        self.shared.retrying(|| webhooks::counts(&self.shared)).await
    }

    async fn schedule_create(&self, schedule: Schedule, by: &str, now: Timestamp) -> Result<()> {
        self.shared.retrying(|| schedules::create(&self.shared, &schedule, by, now)).await
    }

    async fn schedule_patch(
        &self,
        id: ScheduleId,
        change: ScheduleChange,
        by: &str,
        now: Timestamp,
    ) -> Result<Option<Schedule>> {
        self.shared.retrying(|| schedules::patch(&self.shared, id, &change, by, now)).await
    }

    async fn schedule_delete(&self, id: ScheduleId, by: &str, now: Timestamp) -> Result<bool> {
        self.shared.retrying(|| schedules::delete(&self.shared, id, by, now)).await
    }

    async fn schedule_trigger(&self, id: ScheduleId, by: &str, now: Timestamp) -> Result<Option<JobId>> {
        self.shared.retrying(|| schedules::trigger(&self.shared, id, by, now)).await
    }

    async fn schedule_fire(&self, limit: usize, now: Timestamp) -> Result<Fired> {
        self.shared.retrying(|| schedules::fire(&self.shared, limit, now)).await
    }

    async fn schedule_get(&self, id: ScheduleId) -> Result<Option<Schedule>> {
        self.shared.retrying(|| schedules::get(&self.shared, id)).await
    }

    async fn schedule_list(&self, filter: ScheduleFilter, page: SchedulePage) -> Result<(Vec<Schedule>, u64)> {
        self.shared.retrying(|| schedules::list(&self.shared, &filter, page)).await
    }

    async fn schedule_ticks(&self, id: ScheduleId, before: Option<Timestamp>, limit: usize) -> Result<Vec<TickRow>> {
        self.shared.retrying(|| schedules::ticks(&self.shared, id, before, limit)).await
    }

    async fn schedule_counts(&self) -> Result<ScheduleCounts> {
        self.shared.retrying(|| schedules::counts(&self.shared)).await
    }

    async fn event_subscribe(&self, wants: Vec<EventSubscription>, now: Timestamp) -> Result<()> {
        self.shared.retrying(|| events::subscribe(&self.shared, &wants, now)).await
    }

    fn has_event_subscriptions(&self) -> bool {
        self.shared.events_on.load(Ordering::Relaxed)
    }

    async fn event_settle(&self, before: Timestamp, limit: usize, now: Timestamp) -> Result<usize> {
        self.shared.retrying(|| events::settle(&self.shared, before, limit, now)).await
    }

    async fn event_list(&self, query: EventQuery, limit: usize) -> Result<Vec<StoredEvent>> {
        self.shared.retrying(|| events::list(&self.shared, &query, limit)).await
    }

    async fn event_end(&self) -> Result<EventPosition> {
        self.shared.retrying(|| events::end(&self.shared)).await
    }

    async fn event_range(&self, name: &str) -> Result<Option<EventRange>> {
        self.shared.retrying(|| events::range(&self.shared, name)).await
    }

    async fn outbox_take(&self, request: OutboxTakeRequest, now: Timestamp) -> Result<OutboxTaken> {
        self.shared.retrying(|| outbox::take(&self.shared, &request, now)).await
    }

    async fn outbox_settle(
        &self,
        sink: &str,
        held: Vec<Partition>,
        results: Vec<OutboxResult>,
        now: Timestamp,
    ) -> Result<()> {
        self.shared.retrying(|| outbox::settle(&self.shared, sink, &held, &results, now)).await
    }

    async fn outbox_down(&self, sink: &str, reason: Option<String>, now: Timestamp) -> Result<()> {
        self.shared.retrying(|| outbox::down(&self.shared, sink, reason.as_deref(), now)).await
    }

    async fn outbox_leave(&self, node: NodeId) -> Result<()> {
        self.shared.retrying(|| outbox::leave(&self.shared, node)).await
    }

    async fn outbox_sinks(&self, now: Timestamp) -> Result<Vec<SinkView>> {
        self.shared.retrying(|| outbox::sinks(&self.shared, now)).await
    }

    async fn outbox_dead(&self, filter: DeadFilter, after: Option<Uuid>, limit: usize) -> Result<Vec<DeadEvent>> {
        self.shared.retrying(|| outbox::dead(&self.shared, &filter, after, limit)).await
    }

    async fn outbox_replay(
        &self,
        filter: DeadFilter,
        per_second: Option<u32>,
        by: &str,
        now: Timestamp,
    ) -> Result<usize> {
        self.shared.retrying(|| outbox::replay(&self.shared, &filter, per_second, by, now)).await
    }

    async fn outbox_resolve(&self, filter: DeadFilter, notes: &str, by: &str, now: Timestamp) -> Result<usize> {
        self.shared.retrying(|| outbox::resolve(&self.shared, &filter, notes, by, now)).await
    }

    async fn outbox_republish(
        &self,
        what: Republish,
        per_second: Option<u32>,
        by: &str,
        now: Timestamp,
    ) -> Result<Option<usize>> {
        self.shared.retrying(|| outbox::republish(&self.shared, &what, per_second, by, now)).await
    }

    async fn inbox_submit(
        &self,
        consumer: &str,
        message: &str,
        jobs: Vec<NewJob>,
        now: Timestamp,
    ) -> Result<Option<Vec<Submitted>>> {
        self.shared.retrying(|| inbox::submit(&self.shared, consumer, message, &jobs, now)).await
    }

    async fn poll(&self, node: NodeId, now: Timestamp) -> Result<Poll> {
        self.shared.retrying(|| read::poll(&self.shared, node, now)).await
    }

    async fn lanes(&self) -> Result<Vec<Lane>> {
        // Other nodes make lanes too.
        self.shared.retrying(|| self.shared.load_lanes()).await?;
        Ok(self.shared.lanes.all())
    }

    async fn ping(&self) -> Result<()> {
        self.shared.retrying(|| read::ping(&self.shared)).await
    }

    fn signals(&self) -> broadcast::Receiver<Signal> {
        self.shared.notifier.subscribe()
    }

    fn engine(&self) -> &'static str {
        "postgres"
    }

    async fn close(&self) {
        self.submits.stop().await;
        for reporter in &self.reports {
            reporter.stop().await;
        }
        self.stop.cancel();
        self.shared.pool.close();
    }
}

impl Postgres {
    /// Sends each report to the batcher of its run and puts the answers back in order. A part goes out when the one before it is
    /// stored: the report that closes a block is the last of its run.
    async fn report<T>(
        &self,
        reports: Vec<T>,
        run_of: impl Fn(&T) -> i64,
        is_keyed: impl Fn(&T) -> bool,
        work: impl Fn(Vec<T>) -> end::Work,
        now: Timestamp,
    ) -> Result<Vec<bool>> {
        let count = reports.len();
        let mut lines: Vec<Vec<Part<T>>> = (0..REPORTERS).map(|_| Vec::new()).collect();
        for (at, report) in reports.into_iter().enumerate() {
            let line = &mut lines[usize::try_from(run_of(&report)).unwrap_or(0) % REPORTERS];
            if line.last().is_none_or(|part| part.keyed >= KEYED_AT_ONCE) {
                line.push(Part { places: Vec::new(), reports: Vec::new(), keyed: 0 });
            }
            let part = line.last_mut().expect("there is one now");
            part.keyed += usize::from(is_keyed(&report));
            part.places.push(at);
            part.reports.push(report);
        }
        let work = &work;
        let calls = lines.into_iter().zip(&self.reports).map(|(line, batcher)| async move {
            let mut answered = Vec::new();
            for Part { places, reports, .. } in line {
                let work = work(reports);
                let answers = batcher.call(|answer| end::Call { work, now, answer }).await?;
                answered.extend(places.into_iter().zip(answers));
            }
            Ok::<_, StoreError>(answered)
        });
        let mut answers = vec![false; count];
        for (at, held) in futures_util::future::try_join_all(calls).await?.into_iter().flatten() {
            answers[at] = held;
        }
        Ok(answers)
    }
}
