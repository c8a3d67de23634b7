//! Stores jobs, in SQLite or PostgreSQL, with one behaviour. The only crate with SQL.
//!
//! A job's state is the table its id is in: `waiting`, `ready`, `claim` (in flight), `done` or `ended`. One verb is one
//! transaction; `docs/decisions/001-storage-shape.md` says why.
//!
//! Each noun has a trait beside its types (`jobs.rs`, `claims.rs`, …), implemented beside its SQL in `sqlite/` and
//! `postgres/`, which are twins: the same file and function names. [`Store`] is the sum of these traits. What both engines
//! decide alike is in `plan`, `admit`, `claim_limits`, `fair_share`, `disposition`, `lists` and `assemble`.

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
mod claims;
mod dead_letters;
mod jobs;
mod lanes;
mod lists;
mod migrate;
mod nodes;
mod outbox;
mod plan;
mod postgres;
mod progress;
mod rules;
mod schedules;
mod sql;
mod sqlite;
mod store;
mod webhooks;
mod workers;

/// Statements whose plans are tested.
#[doc(hidden)]
pub mod plan_probe {
    pub use crate::postgres::{
        claim::{BEGIN_CLAIM, CLAIM, CLAIM_FOR_MANY, CLAIM_FOR_WORKER, HEADS},
        key_queues::{KEY_QUEUE_HEADS, KEY_QUEUES, KEYS},
        limited_claim::{IN_FLIGHT, TAKE},
        schedules::{NEXT_AT, due_sql as due_schedules},
    };
    pub use crate::sqlite::limited_claim::OPEN_KEY_QUEUES;
}

pub use audit::{AuditEntry, AuditFilter, AuditStore};
pub use bulk::{Bulk, BulkAction, BulkStep, BulkStore, NewBulk};
pub use claims::{
    ClaimRequest, ClaimResult, ClaimStore, ClaimedJob, Limited, NoteKind, Owner, RunEnd, RunNote, RunOutcome,
};
pub use dead_letters::{DeadLetterStats, DeadLetterStore};
pub use error::{Cause, StoreError};
pub use events::{
    EventPosition, EventQuery, EventRange, EventStore, EventSubscription, OnRejected, StoredEvent, SubscriptionMode,
};
pub use foreign::{ForeignColumns, ForeignEnd, ForeignMapping, ForeignOutbox, ForeignRow, ForeignSettled, ForeignTake};
pub use jobs::{
    CancelOutcome, ClaimOwner, Counts, DueResult, Filter, JobExit, JobIdPage, JobPage, JobPatch, JobPosition, JobStore,
    Page, Retention, Submitted, Tally,
};
pub use lanes::{Lane, LaneId};
#[doc(hidden)]
pub use migrate::{MIGRATIONS, Migration};
pub use nodes::{GracePeriods, NodeInfo, NodeStore, Poll, Recovered};
pub use outbox::{
    DeadEvent, DeadFilter, MAX_ATTEMPTS, OutboxEvent, OutboxResult, OutboxStore, OutboxTakeRequest, OutboxTaken,
    PARTITIONS, Partition, Republish, SinkView,
};
pub use rules::{Configured, QueuePatch, RuleStore, StoredLimit};
pub use schedules::{Fired, ScheduleChange, ScheduleCounts, ScheduleEdit, ScheduleFilter, SchedulePage, ScheduleStore};
pub use store::{Signal, Store, StoreOptions, open};
pub use webhooks::{
    Delivery, LOST_FORGIVEN, WebhookFilter, WebhookNext, WebhookResult, WebhookStore, WebhookTakeRequest, WebhookTaken,
    host_of, without_query,
};
pub use workers::{
    ResumedJob, SweepResult, WorkerAdmitted, WorkerEnd, WorkerEntry, WorkerLost, WorkerStore, WorkerUpdate,
    WorkerUpdateResult,
};

pub type Result<T> = std::result::Result<T, StoreError>;
