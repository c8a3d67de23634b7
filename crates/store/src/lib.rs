//! Keeps jobs, in SQLite or PostgreSQL, with one behaviour. The only crate with SQL.
//!
//! A job's state is where its id stands: `ready`, `waiting`, a `claim` (handed out), `done`, `ended`. The `job` row is written
//! once, at submit. One verb is one transaction; concurrent callers of the busy verbs share one. An answer leaves after the
//! commit that holds it. `docs/decisions/001-storage-shape.md` says why it is built like this.

mod admit;
mod assemble;
mod audit;
mod bulk;
mod fair_share;
pub mod doctor;
mod error;
mod events;
mod disposition;
mod foreign;
mod claim_limits;
mod lanes;
mod lists;
mod migrate;
mod outbox;
mod plan;
mod postgres;
mod progress;
mod rules;
mod schedules;
mod sql;
mod sqlite;
mod types;
mod webhooks;
mod workers;

/// For the tests that hold the claim's plan.
#[doc(hidden)]
pub mod plan_probe {
    pub use crate::postgres::{
        claim::{BEGIN_CLAIM, CLAIM, CLAIM_FOR_MANY, CLAIM_FOR_WORKER, HEADS},
        limited_claim::{IN_FLIGHT, KEY_QUEUE_HEADS, KEY_QUEUES, KEYS, TAKE},
        schedules::{NEXT_AT, due_sql as due_schedules},
    };
    pub use crate::sqlite::limited_claim::OPEN_KEY_QUEUES;
}

use std::sync::Arc;

use async_trait::async_trait;
use faena_domain::{
    Attempt, AuditRow, BulkId, JobId, JobView, Limit, NewJob, NodeId, Rules, Run, ScheduleId, Scope, Step, Timestamp,
    WebhookId, WebhookState, WebhookView, WorkerCapabilities, WorkerId, WorkerState, WorkerView,
    schedule::{Schedule, TickRow},
};

use uuid::Uuid;

pub use error::StoreError;
pub use events::{EventPosition, EventQuery, EventRange, EventSubscription, OnRejected, StoredEvent, SubscriptionMode};
pub use foreign::{ForeignColumns, ForeignEnd, ForeignMapping, ForeignOutbox, ForeignRow, ForeignSettled, ForeignTake};
pub use lanes::{Lane, LaneId};
#[doc(hidden)]
pub use migrate::{MIGRATIONS, Migration};
pub use outbox::{
    DeadEvent, DeadFilter, MAX_ATTEMPTS, OutboxEvent, OutboxResult, OutboxTakeRequest, OutboxTaken, PARTITIONS,
    Partition, Republish, SinkView,
};
pub use schedules::{Fired, ScheduleChange, ScheduleCounts, ScheduleEdit, ScheduleFilter, SchedulePage};
pub use types::{
    AuditEntry, AuditFilter, Bulk, BulkAction, BulkStep, CancelOutcome, ClaimOwner, ClaimRequest, ClaimResult,
    ClaimedJob, Configured, Counts, DeadLetterStats, DueResult, Filter, GracePeriods, JobExit, JobIdPage, JobPage,
    JobPatch, JobPosition, Limited, NewBulk, NodeInfo, NoteKind, Owner, Page, Poll, QueuePatch, Recovered, ResumedJob,
    Retention, RunEnd, RunNote, RunOutcome, Signal, StoreOptions, StoredLimit, Submitted, SweepResult, Tally,
    WorkerAdmitted, WorkerEnd, WorkerEntry, WorkerLost, WorkerUpdate, WorkerUpdateResult,
};
pub use webhooks::{
    Delivery, LOST_FORGIVEN, WebhookFilter, WebhookNext, WebhookResult, WebhookTakeRequest, WebhookTaken, host_of,
    without_query,
};

pub type Result<T> = std::result::Result<T, StoreError>;

/// Everything that can be asked of the database, in the words of the domain.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// Stores all jobs or none, each where it belongs (`ready`, or `waiting` for its time or its parents). A repeated
    /// idempotency key with the same fingerprint answers with the job that exists.
    async fn job_submit(&self, jobs: Vec<NewJob>, now: Timestamp) -> Result<Vec<Submitted>>;

    /// For each ask in turn hands out up to `limit` ready jobs of its lanes, in score order inside each queue and in turn between
    /// queues. No job is handed out twice. Each carries a new run number; jobs that share one are in one block (PostgreSQL
    /// makes one per lane) with one owner, which the last end of them closes. A worker that has ended, or has connected anew
    /// since the ask's session, is refused. Lanes that one ask has emptied are not looked at again for the next ones.
    async fn job_claim(&self, asks: Vec<ClaimRequest>, now: Timestamp) -> Result<Vec<ClaimResult>>;

    /// The finished steps of these jobs, by job in the order in which they were finished.
    async fn job_steps(&self, ids: Vec<JobId>) -> Result<Vec<(JobId, Step)>>;

    /// Fails up to `limit` jobs that have been ready in these lanes since before `before`: nobody can run them.
    async fn job_fail_unhandled(
        &self,
        lanes: Vec<LaneId>,
        before: Timestamp,
        limit: usize,
        now: Timestamp,
    ) -> Result<usize>;

    /// Writes down what a running job tells: that it started, its progress, a line of log, a finished step. Answers for each
    /// whether its run still holds the job; a note of a run that does not, changes nothing.
    async fn job_note(&self, notes: Vec<RunNote>, now: Timestamp) -> Result<Vec<bool>>;

    /// Ends runs: state and log in one transaction, then what depends on it. Answers for each whether its run still held the
    /// job; an end of a run that does not, changes nothing. The same end (of the same time) may be told again and counts once.
    async fn job_end(&self, ends: Vec<RunEnd>, now: Timestamp) -> Result<Vec<bool>>;

    // What people do. `by`: who; it goes to the audit log in the transaction of the act. `None`: the system, or a bulk action, which
    // has an entry of its own.

    /// Cancels what nobody runs at once; asks for it where a worker has the job.
    async fn job_cancel(&self, id: JobId, reason: &str, by: Option<&str>, now: Timestamp) -> Result<CancelOutcome>;

    /// Gives a failed or cancelled job new tries, under its own id.
    async fn job_retry(&self, id: JobId, by: Option<&str>, now: Timestamp) -> Result<()>;

    /// Changes a job that has not started.
    async fn job_patch(&self, id: JobId, patch: JobPatch, by: Option<&str>, now: Timestamp) -> Result<()>;

    /// Removes a job that nobody runs, with all that belongs to it.
    async fn job_delete(&self, id: JobId, by: Option<&str>, now: Timestamp) -> Result<()>;

    /// Moves up to `limit` jobs whose time has come: delayed and retrying ones become ready, those that wait for parents are
    /// looked at again.
    async fn job_promote(&self, limit: usize, now: Timestamp) -> Result<DueResult>;

    /// Fails up to `limit` jobs that are past their expiry and in nobody's hands. One that is may finish.
    async fn job_expire(&self, limit: usize, now: Timestamp) -> Result<DueResult>;

    /// Removes up to `limit` finished jobs that are older than their retention, and some old entries of the audit log; PostgreSQL also makes the partitions of the
    /// coming days and drops the empty ones.
    async fn job_prune(&self, retention: &Retention, limit: usize, now: Timestamp) -> Result<usize>;

    /// The job whole, with its log and steps.
    async fn job_get(&self, id: JobId) -> Result<Option<JobView>>;

    /// Where it stands among others.
    async fn job_position(&self, id: JobId) -> Result<Option<JobPosition>>;

    /// Jobs that match, newest first, without log and steps.
    async fn job_list(&self, filter: &Filter, page: Page) -> Result<JobPage>;

    /// The ids of up to `limit` jobs that match, newer than `after` and not newer than `upto`, the oldest first.
    async fn job_find(&self, filter: &Filter, after: Option<JobId>, upto: JobId, limit: usize) -> Result<JobIdPage>;

    /// How each run of a job ended, the first one first.
    async fn job_attempts(&self, id: JobId) -> Result<Vec<Attempt>>;

    /// Gives a failed job new tries; one in another state is not touched.
    async fn dead_letter_retry(&self, id: JobId, by: &str, now: Timestamp) -> Result<()>;

    /// Removes a failed job; one in another state is not touched.
    async fn dead_letter_delete(&self, id: JobId, by: &str, now: Timestamp) -> Result<()>;

    /// What the dead letters have in common; how many there are, the counters know.
    async fn dead_letter_stats(&self) -> Result<DeadLetterStats>;

    /// Keeps an action on many jobs, to be done step by step from `due_at` on. With its entry in the audit log, if it takes its time.
    async fn bulk_begin(&self, bulk: NewBulk, due_at: Timestamp, now: Timestamp) -> Result<()>;

    /// The bulk action that is due first, be it later than now.
    async fn bulk_due(&self) -> Result<Option<Bulk>>;

    /// Acts on the next few jobs, those that are still in the states that are meant, and notes how far it has come, in one
    /// transaction: no job has its turn twice, whoever dies when. The last step goes to the audit log. `false`: it has come
    /// further since it was read, or is over; nothing was done.
    async fn bulk_step(&self, step: BulkStep, now: Timestamp) -> Result<bool>;

    /// Ends it early. `false`: it was over, or there is none.
    async fn bulk_stop(&self, id: BulkId, by: &str, now: Timestamp) -> Result<bool>;

    async fn bulk_get(&self, id: BulkId) -> Result<Option<Bulk>>;

    /// The latest bulk actions, the latest first.
    async fn bulk_list(&self, limit: usize) -> Result<Vec<Bulk>>;

    /// Since when the first ready job of each lane has been ready; lanes without one are left out.
    async fn ready_since(&self) -> Result<Vec<(LaneId, Timestamp)>>;

    /// How many jobs stand where, per lane.
    async fn counts(&self) -> Result<Counts>;

    /// Makes this process known; its jobs are its own while its lease lasts.
    async fn node_join(&self, node: NodeInfo, lease_ms: i64, now: Timestamp) -> Result<()>;

    /// Renews the lease. `false`: somebody has taken this node for dead, and its jobs are not its own any more.
    async fn node_renew(&self, node: NodeId, lease_ms: i64, now: Timestamp) -> Result<bool>;

    /// Takes leave: what it still holds goes back to the queue without costing a try. Workers that were connected to it keep
    /// their jobs and have `patience` to connect elsewhere.
    async fn node_leave(&self, node: NodeId, grace_periods: GracePeriods, now: Timestamp) -> Result<usize>;

    /// Frees what dead nodes held: what had started costs a try and waits; the rest is ready again. Workers that were connected
    /// to them keep their jobs and have `patience` to connect elsewhere; the workers inside them are ended. Also frees what
    /// workers hold whose life is over, and webhooks that dead nodes were sending.
    async fn node_recover(&self, grace_periods: GracePeriods, now: Timestamp) -> Result<Recovered>;

    /// Gives back what this node, or a worker connected to it, was handed before `before` without knowing it: a claim whose answer
    /// got lost on the way. `known` are the runs that it has jobs of.
    async fn node_reconcile(&self, node: NodeId, known: Vec<Run>, before: Timestamp, now: Timestamp) -> Result<usize>;

    /// Lets a worker in: begins a life under its key, or goes on with the one that has not ended, with the jobs in its hands.
    async fn worker_admit(&self, entry: WorkerEntry, now: Timestamp) -> Result<WorkerAdmitted>;

    /// Writes down what is new about connected workers. Answers for each whether it is still connected here (a worker that has
    /// ended, or has connected anew, is not changed) and what is wanted of it.
    async fn worker_update(&self, updates: Vec<WorkerUpdate>, now: Timestamp) -> Result<Vec<WorkerUpdateResult>>;

    /// Asks a living worker, wherever it is connected, to take no more jobs, or to take jobs again. `None`: no such worker lives.
    async fn worker_drain(&self, key: &str, drain: bool, by: Option<&str>, now: Timestamp) -> Result<Option<WorkerId>>;

    /// Ends a worker's life and frees the jobs in its hands, in one transaction. `None`: it has ended before, or connected anew.
    async fn worker_end(&self, id: WorkerId, session: i64, end: WorkerEnd, now: Timestamp)
    -> Result<Option<Recovered>>;

    /// Gives up workers whose deadline has passed, up to 100 of them: as `worker_end` with `Lost`. Forgets workers that ended
    /// before `forget_before`.
    async fn worker_sweep(&self, orphan_delay_ms: i64, forget_before: Timestamp, now: Timestamp)
    -> Result<SweepResult>;

    /// A worker whole, by its key (the latest life under it) or by the id of a life.
    async fn worker_get(&self, key: &str) -> Result<Option<WorkerView>>;

    /// Which connection of a living worker counts. `None`: it has ended.
    async fn worker_session(&self, id: WorkerId) -> Result<Option<i64>>;

    /// Workers, the living ones first, the latest first: those in one of `states` (none: in any), without jobs and history.
    async fn worker_list(&self, states: Vec<WorkerState>, limit: usize) -> Result<Vec<WorkerView>>;

    /// What the living workers can do, on all nodes.
    async fn worker_capabilities(&self) -> Result<Vec<WorkerCapabilities>>;

    /// What was said about queues and limits, as this process last read it.
    fn rules(&self) -> Arc<Rules>;

    /// Reads it again: another node may have changed it.
    async fn rules_load(&self) -> Result<Arc<Rules>>;

    /// Makes what the configuration says the rule, wherever nothing else was said at run time.
    async fn rules_configure(&self, configured: Configured, now: Timestamp) -> Result<()>;

    /// Changes what holds for a queue; one that nobody has named yet exists from then on. With its entry in the audit log.
    async fn queue_set(&self, name: &str, patch: QueuePatch, by: &str, now: Timestamp) -> Result<()>;

    /// Sets a limit, or takes it away (without numbers). With its entry in the audit log.
    async fn limit_set(&self, scope: Scope, limit: Limit, by: &str, now: Timestamp) -> Result<()>;

    /// Forgets what was said at run time about a limit; `configured` holds again. With its entry in the audit log.
    async fn limit_reset(&self, scope: Scope, configured: Option<Limit>, by: &str, now: Timestamp) -> Result<()>;

    /// All limits, those of queues included, with where they come from.
    async fn limits(&self) -> Result<Vec<StoredLimit>>;

    /// Writes down an act that no other verb writes down with what it does.
    async fn audit_add(&self, entry: AuditEntry, now: Timestamp) -> Result<()>;

    /// What people and keys did, latest first.
    async fn audit_list(&self, filter: AuditFilter, limit: usize) -> Result<Vec<AuditRow>>;

    /// Takes webhooks that are due, and those whose sender has fallen silent, each for one attempt: the longest due first, up to
    /// the room that each host has. No attempt is handed out twice. What one host keeps waiting stands in no other's way.
    async fn webhook_take(&self, ask: WebhookTakeRequest, now: Timestamp) -> Result<WebhookTaken>;

    /// Writes down how attempts went, with a line in their job's log. Answers for each whether it was still its sender's; one
    /// that is not changes nothing.
    async fn webhook_settle(&self, results: Vec<WebhookResult>, now: Timestamp) -> Result<Vec<bool>>;

    /// Sends a webhook that is over again, with new attempts. With its entry in the audit log. `None`: there is no such webhook.
    async fn webhook_redeliver(&self, id: WebhookId, by: &str, now: Timestamp) -> Result<Option<JobId>>;

    /// A webhook whole, with its attempts.
    async fn webhook_get(&self, id: WebhookId) -> Result<Option<WebhookView>>;

    /// Webhooks that match, newest first, from below `after` on, without bodies and attempts.
    async fn webhook_list(
        &self,
        filter: WebhookFilter,
        after: Option<WebhookId>,
        limit: usize,
    ) -> Result<Vec<WebhookView>>;

    /// How many webhooks wait, are being sent, and have failed; each up to 100 000.
    async fn webhook_counts(&self) -> Result<Vec<(WebhookState, u64)>>;

    /// Keeps a schedule. With its entry in the audit log.
    async fn schedule_create(&self, schedule: Schedule, by: &str, now: Timestamp) -> Result<()>;

    /// Changes it by what `change` makes of what stands there. With its entry in the audit log. A change that is refused changes nothing.
    /// `None`: there is no such schedule.
    async fn schedule_patch(
        &self,
        id: ScheduleId,
        change: ScheduleChange,
        by: &str,
        now: Timestamp,
    ) -> Result<Option<Schedule>>;

    /// Removes it with the records of its due times; its jobs stay. With its entry in the audit log. `false`: there is none.
    async fn schedule_delete(&self, id: ScheduleId, by: &str, now: Timestamp) -> Result<bool>;

    /// Makes a job of it now, whatever is due. With its entry in the audit log. `None`: there is no such schedule.
    async fn schedule_trigger(&self, id: ScheduleId, by: &str, now: Timestamp) -> Result<Option<JobId>>;

    /// Deals with what has become due of up to `limit` schedules, the longest due first: jobs, records of due times and the schedules' own
    /// rows in one transaction. Each due time is dealt with once, however many nodes ask at the same moment and whoever dies when.
    async fn schedule_fire(&self, limit: usize, now: Timestamp) -> Result<Fired>;

    async fn schedule_get(&self, id: ScheduleId) -> Result<Option<Schedule>>;

    /// Schedules that match, by name, and how many there are of them.
    async fn schedule_list(&self, filter: ScheduleFilter, page: SchedulePage) -> Result<(Vec<Schedule>, u64)>;

    /// What became of a schedule's due times, the latest first, from before `before` on.
    async fn schedule_ticks(&self, id: ScheduleId, before: Option<Timestamp>, limit: usize) -> Result<Vec<TickRow>>;

    async fn schedule_counts(&self) -> Result<ScheduleCounts>;

    /// Makes known who wants which events. From then on, and until nobody wants any, what happens is written down in the transaction in
    /// which it happens. Nobody wanting any costs nothing.
    async fn event_subscribe(&self, wants: Vec<EventSubscription>, now: Timestamp) -> Result<()>;

    /// Whether somebody wants events, as this process knows.
    fn has_event_subscriptions(&self) -> bool;

    /// Forgets wishes that nobody repeated, and up to `limit` events from before `before` that no sink still waits for. Answers how many.
    async fn event_settle(&self, before: Timestamp, limit: usize, now: Timestamp) -> Result<usize>;

    /// Events that are looked for, in the order in which they were committed. Read again from the place of the last one on, none is
    /// passed by, whatever is committed how late.
    async fn event_list(&self, query: EventQuery, limit: usize) -> Result<Vec<StoredEvent>>;

    /// The place after everything that has happened so far.
    async fn event_end(&self) -> Result<EventPosition>;

    /// What is kept for this wish. Whoever has read up to a place before it has missed something for good. `None`: there is no such wish.
    async fn event_range(&self, name: &str) -> Result<Option<EventRange>>;

    /// Takes or keeps this node's share of a sink's parts (as many as there are parts per node that asks), and reads what is due of them. No
    /// part is two nodes' at once. A sink that nobody wants any more: nothing.
    async fn outbox_take(&self, ask: OutboxTakeRequest, now: Timestamp) -> Result<OutboxTaken>;

    /// Writes down what a sink said: confirmed messages leave the outbox, refused ones are due again or become dead letters, in one
    /// transaction. A result of a part that has another holder by now counts if it is a confirmation.
    async fn outbox_settle(
        &self,
        sink: &str,
        held: Vec<Partition>,
        results: Vec<OutboxResult>,
        now: Timestamp,
    ) -> Result<()>;

    /// Writes down since when and why a sink as a whole is unusable, or that it works again (`None`). Costs no message an attempt.
    async fn outbox_down(&self, sink: &str, reason: Option<String>, now: Timestamp) -> Result<()>;

    /// Gives this node's parts back, of all sinks: it stops.
    async fn outbox_leave(&self, node: NodeId) -> Result<()>;

    async fn outbox_sinks(&self, now: Timestamp) -> Result<Vec<SinkView>>;

    /// Dead letters that match, the latest first, from below `after` on.
    async fn outbox_dead(&self, filter: DeadFilter, after: Option<Uuid>, limit: usize) -> Result<Vec<DeadEvent>>;

    /// Puts dead letters that match and are unresolved back into the outbox, in order, under their own ids, `per_second` of them at most
    /// (`None`: at once), and marks them resolved. With its entry in the audit log. Answers how many.
    async fn outbox_replay(
        &self,
        filter: DeadFilter,
        per_second: Option<u32>,
        by: &str,
        now: Timestamp,
    ) -> Result<usize>;

    /// Marks dead letters that match as dealt with by other means; what is parked behind them goes on. With its entry in the audit log.
    async fn outbox_resolve(&self, filter: DeadFilter, notes: &str, by: &str, now: Timestamp) -> Result<usize>;

    /// Publishes events again that were sent: puts those that are still kept and do not wait already back into the outbox, in order, under
    /// their own ids. With its entry in the audit log. `None`: there is no such sink.
    async fn outbox_republish(
        &self,
        what: Republish,
        per_second: Option<u32>,
        by: &str,
        now: Timestamp,
    ) -> Result<Option<usize>>;

    /// Stores the jobs that come of a message from outside, once per consumer and message id, in one transaction with that knowledge.
    /// `None`: the message was dealt with before.
    async fn inbox_submit(
        &self,
        consumer: &str,
        message: &str,
        jobs: Vec<NewJob>,
        now: Timestamp,
    ) -> Result<Option<Vec<Submitted>>>;

    /// Which lanes have ready jobs, which of this node's jobs shall be cancelled, when the next waiting job is due,
    /// whether a node has died.
    async fn poll(&self, node: NodeId, now: Timestamp) -> Result<Poll>;

    /// All lanes known so far.
    async fn lanes(&self) -> Result<Vec<Lane>>;

    /// Whether the database answers.
    async fn ping(&self) -> Result<()>;

    /// Told after each commit that makes something ready or asks for a cancellation, on this node or on another.
    fn signals(&self) -> tokio::sync::broadcast::Receiver<Signal>;

    /// `sqlite` or `postgres`.
    fn engine(&self) -> &'static str;

    /// Finishes what is under way and closes.
    async fn close(&self);
}

/// Opens the database that `url` names, migrating it if `options` allow.
pub async fn open(url: &str, options: StoreOptions) -> Result<Arc<dyn Store>> {
    if let Some(path) = url.strip_prefix("sqlite:") {
        let path = path.strip_prefix("//").unwrap_or(path);
        if path.is_empty() || path.starts_with(":memory:") || path.starts_with("file:") {
            return Err(StoreError::Setup(
                "DATABASE_URL names no file (jobs must survive a crash); write sqlite:faena-data/faena.db".into(),
            ));
        }
        Ok(Arc::new(sqlite::Sqlite::open(path, options).await?))
    } else if url.starts_with("postgres://") || url.starts_with("postgresql://") {
        Ok(Arc::new(postgres::Postgres::open(url, options).await?))
    } else {
        Err(StoreError::Setup(
            "DATABASE_URL is not understood; write sqlite:faena-data/faena.db or postgres://user:password@host/database".into(),
        ))
    }
}
