//! Stores everything that Faena keeps, in SQLite or PostgreSQL, with the same behaviour. Contains all SQL of the
//! server.
//!
//! A job's state is the table its id is in: `waiting`, `ready`, `claim` (in flight), `done` or `ended`. As a rule, one
//! method is one transaction; `docs/decisions/001-storage-shape.md` says why.
//!
//! Each kind of object has a trait next to its types (`jobs.rs`, `claims.rs`, …), implemented beside its SQL in `sqlite/` and
//! `postgres/`, which have the same file and function names where they do the same. [`Store`] is the sum of these traits. Logic that
//! both databases share is in `plan`, `admit`, `claim_limits`, `fair_share`, `disposition`, `lists` and `assemble`.

mod admit;
mod api_keys;
mod assemble;
mod audit;
mod bulk;
mod claim_limits;
mod claims;
mod dead_letters;
mod dependents;
mod disposition;
pub mod doctor;
mod error;
mod events;
mod external;
mod fair_share;
mod graph;
mod history;
mod job_log;
mod jobs;
mod lanes;
mod lists;
mod migrate;
mod nodes;
mod outbox;
mod pages;
mod plan;
mod postgres;
mod progress;
mod queue;
mod rules;
mod schedules;
mod sql;
mod sqlite;
mod store;
mod task_cache;
mod task_filter;
mod task_limits;
mod task_meter;
mod task_rows;
mod tasks;
pub mod transfer;
mod usage;
mod webhooks;
mod approval_webhooks;
mod workers;

/// Statements whose plans are tested.
#[doc(hidden)]
pub mod plan_probe {
    pub use crate::postgres::{
        claim::{BEGIN_CLAIM, CLAIM, CLAIM_FOR_MANY, CLAIM_FOR_WORKER, HEADS},
        key_queues::{KEY_QUEUE_HEADS, KEY_QUEUES, KEYS},
        limited_claim::{IN_FLIGHT, TAKE},
        schedules::{NEXT_AT, due_sql as due_schedules},
        task_writes::{BEGIN as BEGIN_TASKS, UPDATE_TASKS},
        tasks::{FIND_ANSWERS, lock_sql as lock_tasks},
    };
    pub use crate::sqlite::limited_claim::OPEN_KEY_QUEUES;
}

pub use api_keys::{ApiKeyStore, KeyRotation};
pub use audit::{AuditEntry, AuditFilter, AuditStore};
pub use bulk::{Bulk, BulkAction, BulkStep, BulkStore, BulkWork, NewBulk, TaskAction, TaskBulk};
pub use claims::{
    ClaimCandidate, ClaimRequest, ClaimResult, ClaimStore, ClaimedJob, Limited, Owner, RunEnd, RunOutcome, RunTiming,
    RunTrace, RunUpdate, RunUpdateKind, UpdateResult,
};
pub use dead_letters::{DeadLetterStats, DeadLetterStore};
pub use error::{Cause, StoreError};
pub use events::{
    EventPosition, EventQuery, EventRange, EventStore, EventSubscription, GUARDIAN, OnRejected, StoredEvent,
    SubscriptionMode,
};
pub use external::{
    ExternalColumns, ExternalEnd, ExternalMapping, ExternalOutbox, ExternalRow, ExternalSettled, ExternalTake,
};
pub use history::{
    HISTORY_BOUNDS_MS, HistoryCutoffs, HistoryEntry, HistoryMeasure, HistoryPeriod, HistoryQuery, HistoryStore,
    TimingCount, named_queues,
};
pub use job_log::{LogCursor, LogPage, StoredJobLimits};
pub use jobs::{
    CancelOutcome, ClaimOwner, Counts, DueResult, Filter, InFlightCount, JobCountStore, JobExit, JobPatch, JobPosition,
    JobStore, JobTotal, Retention, Retried, Submitted, Tally,
};
pub use lanes::{Lane, LaneId, LaneStore, LaneUsage};
pub use lists::COUNT_LIMIT;
#[doc(hidden)]
pub use migrate::{MIGRATIONS, Migration};
pub use nodes::{
    ClaimCutoff, GracePeriods, InputKind, InputState, InputView, NodeInfo, NodeReport, NodeStore, Poll, RecoveryCounts,
};
pub use outbox::{
    DeadEvent, DeadFilter, MAX_ATTEMPTS, OutboxEvent, OutboxResult, OutboxStore, OutboxTakeRequest, OutboxTaken,
    PARTITIONS, Partition, PublishingNode, Republish, SinkView,
};
pub use pages::{Cursor, JobIdPage, JobPage, Order, Page, Sort, SortBy, Start};
pub use queue::{QueueChange, QueueChangeKind, QueueFeed, QueueLocation, QueuePosition, QueueStore};
pub use rules::{ConfiguredRules, QueuePatch, RuleStore, StoredLimit};
pub use schedules::{Fired, ScheduleChange, ScheduleCounts, ScheduleEdit, ScheduleFilter, SchedulePage, ScheduleStore};
pub use store::{Signal, Store, StoreOptions, open};
pub use task_filter::TaskFilter;
pub use task_limits::{TaskPosition, limit_of};
pub use task_meter::{QueuedTasks, TaskFigures, TaskMeasures, TasksInState};
pub use tasks::{
    KeyedTask, MachineStatus, NewMachine, NewTask, Registered, StateCount, StoredMachine, TaskAnswer, TaskInput,
    TaskKey, TaskStore, TaskView, TasksFired,
};
pub use usage::{TaskTokens, UsageStore};
pub use webhooks::{
    Delivery, EXTRA_ATTEMPTS, WebhookFilter, WebhookNext, WebhookResult, WebhookStore, WebhookTakeRequest,
    WebhookTaken, host_of, without_query,
};
pub use workers::{
    ResumedJob, SweepResult, UnattendedJob, WorkerAdmitted, WorkerEnd, WorkerEntry, WorkerLost, WorkerStore,
    WorkerUpdate, WorkerUpdateResult,
};

pub type Result<T> = std::result::Result<T, StoreError>;
