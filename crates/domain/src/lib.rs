//! Defines jobs, schedules and workers, and which changes of their state are legal.
//!
//! This crate has no database: the other crates change state; this crate decides which changes are allowed. The time is
//! an argument, except in `clock.rs`, which reads it, and in new ids, which contain it.

mod address;
mod api_key;
mod audit;
mod clock;
mod cloud_event;
mod error_chain;
mod error_code;
mod event;
mod field_error;
mod graph;
mod ids;
mod job;
pub mod job_state;
mod log;
mod log_details;
mod masked_url;
pub mod parse;
mod priority;
mod retry;
mod rules;
pub mod schedule;
mod secret_text;
mod terminal;
mod time;
mod trace;
mod trace_context;
mod webhook;
mod why;
mod worker;
pub mod worker_state;

pub use address::{AddressError, AddressRule, check_url_form};
pub use api_key::{ApiKey, ApiKeyText, KeyHash, KeyScope, NewApiKey, StoredApiKey, parse_groups};
pub use audit::AuditRow;
pub use clock::{ClockMeasurement, SteadyClock};
pub use cloud_event::{CloudEvent, SOURCE, event_type_matches};
pub use error_chain::{error_chain, outage};
pub use error_code::{ErrorCode, UnknownErrorCode};
pub use event::{EVENT_TYPES, Event, EventKind, TASK_EVENT_TYPES};
pub use field_error::FieldError;
pub use graph::{GraphJob, JobGraph};
pub use ids::{ApiKeyId, BulkId, JobId, NodeId, Run, ScheduleId, TaskId, WebhookId, WorkerId};
pub use job::{Attempt, DEFAULT_QUEUE, JobLimits, JobOptions, JobView, NewJob, OnParentFailure, Progress, Step};
pub use job_state::JobState;
pub use log::{LogEntry, LogEvent, LogLine};
pub use log_details::{AfterAttempt, DeliveryOutcome, LogDetails};
pub use masked_url::{masked_url, masked_words};
pub use priority::{ClaimOrder, Priority};
pub use retry::{ErrorReason, Failure, RetryDecision, RetryOn, RetryPolicy};
pub use rules::{Bucket, Fairness, Limit, Pause, QueueRule, Rate, Rules, Scope};
pub use secret_text::SecretText;
pub use terminal::{LogWriter, printable};
pub use time::{Timestamp, parse_duration};
pub use trace::{Trace, TraceEntry, TraceJob, TraceKind, TraceTask};
pub use trace_context::TraceContext;
pub use webhook::{JOB_STATUS, WebhookAttempt, WebhookBody, WebhookState, WebhookSubject, WebhookView};
pub use why::{Explanation, Reason};
pub use worker::{WorkerCapabilities, WorkerChange, WorkerKind, WorkerView};
pub use worker_state::{WorkerCategory, WorkerState};
