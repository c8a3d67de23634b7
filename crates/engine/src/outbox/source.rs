//! Relays the outbox table of an application: its rows go to a sink, or become jobs.
//!
//! A round takes a batch of rows under a lock in the application's database, publishes it, waits for the confirmations, marks
//! the rows, and continues immediately while there are more. A row of type `faena.job` is stored as a job, once per row id,
//! before the row is marked. A rejected row uses an attempt and is retried later; it does not delay other rows. A sink
//! or database that is down uses no attempt of any row.
//!
//! All nodes may run a source concurrently: a node without the lock does nothing, and a node that loses the session of
//! the lock stops immediately.

use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use faena_brokers::{Message, PublishOutcome, PublishReport, Sink};
use faena_domain::{Timestamp, parse::JobParser};
use faena_store::{
    ExternalEnd, ExternalMapping, ExternalOutbox, ExternalRow, ExternalSettled, ExternalTake, InputKind, InputView,
    MAX_ATTEMPTS, Store, StoreError,
};
use futures_util::{StreamExt, stream};
use serde::de::IgnoredAny;
use tokio::sync::{Mutex, Notify};

use super::Target;
use crate::{
    Bus, EngineError, Round,
    config::ms,
    input::{Backlog, InputHealth, Outage, Submission, submit_once},
};

/// The type of rows that become jobs.
pub const JOB_TYPE: &str = "faena.job";

/// Longest delay while something a source depends on is down.
const MAX_BACKOFF: Duration = Duration::from_secs(15);
/// Delay after the first rejection of a row. It doubles with each rejection.
const ROW_BACKOFF: Duration = Duration::from_secs(5);
/// Maximum number of rejected rows that wait for their retry. If there are more, the source waits for the first of them.
const MAX_DELAYED: usize = 1_000;
/// Timeout of publishing and storing one batch. Below the time after which the database ends an idle transaction.
const WORK_TIMEOUT: Duration = Duration::from_secs(45);
const CONCURRENT_SUBMITS: usize = 8;
/// How often the rows that wait are counted while there are any.
const COUNT_PERIOD: Duration = Duration::from_secs(15);

#[derive(Clone, Debug)]
pub struct SourceConfig {
    pub name: String,
    pub url: DatabaseUrl,
    pub mapping: ExternalMapping,
    /// Where its rows go. `None`: only rows that become jobs are relayed.
    pub sink: Option<Target>,
    /// How often it is polled without a notification.
    pub period: Duration,
}

/// URL of a database. Its debug output hides it, because it may contain a password.
#[derive(Clone, PartialEq, Eq)]
pub struct DatabaseUrl(pub String);

impl fmt::Debug for DatabaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

pub struct Source {
    pub name: String,
    pub wakeup: Arc<Notify>,
    /// Rows that this node published and the sink confirmed.
    pub sent: AtomicU64,
    /// Rows that this node published and the sink rejected.
    pub rejected: AtomicU64,
    /// Jobs that this node stored.
    pub jobs: AtomicU64,
    period: Duration,
    sink: Option<Box<dyn Sink>>,
    parser: JobParser,
    health: InputHealth,
    state: Mutex<State>,
}

struct State {
    outbox: ExternalOutbox,
    /// Rejected rows and when they are retried.
    delayed: HashMap<String, Timestamp>,
    outage: Outage,
    /// When the waiting rows were last counted.
    counted_at: Option<Timestamp>,
}

/// Why a round stopped: something it depends on is down.
struct Stopped {
    dependency: &'static str,
    reason: String,
}

const SINK: &str = "sink of the source";
const DATABASE: &str = "database of the source";
/// The table differs from the configuration: the operator has to act.
const TABLE: &str = "table of the source";
const STORE: &str = "job database";

/// Results of processing a batch, as far as they are known.
#[derive(Default)]
struct Processed {
    ends: Vec<(String, ExternalEnd)>,
    jobs: u64,
    sent: u64,
    stopped: Option<Stopped>,
}

impl Source {
    pub fn new(config: &SourceConfig, parser: JobParser) -> Result<Source, EngineError> {
        let outbox = ExternalOutbox::open(&config.url.0, config.mapping.clone())
            .map_err(|source| EngineError::InvalidSource { name: config.name.clone(), source })?;
        Ok(Source {
            name: format!("source:{}", config.name),
            wakeup: outbox.wakeup.clone(),
            sent: AtomicU64::new(0),
            rejected: AtomicU64::new(0),
            jobs: AtomicU64::new(0),
            period: config.period,
            sink: config.sink.as_ref().map(|target| target.open(&parser.addresses)),
            parser,
            health: InputHealth::default(),
            state: Mutex::new(State {
                outbox,
                delayed: HashMap::new(),
                outage: Outage::new(InputKind::Source, &config.name),
                counted_at: None,
            }),
        })
    }

    pub async fn run_once(&self, store: &dyn Store, bus: &Bus, now: Timestamp) -> Result<Round, StoreError> {
        let mut state = self.state.lock().await;
        if let Some(at) = state.outage.retry_at(now) {
            return Ok(Round::idle_until(Some(at)));
        }
        let round = match self.round(&mut state, store, bus, now).await {
            Ok(round) => {
                state.outage.clear();
                round
            }
            Err(stopped) => {
                self.count_pending(&mut state, now).await;
                // Another node may succeed. If the release fails too, the session is closed, and the lock with it.
                let _ = state.outbox.release().await;
                let Stopped { dependency, reason } = stopped;
                let at = state.outage.record_failure(dependency, &reason, MAX_BACKOFF, now);
                Round::idle_until(Some(at))
            }
        };
        self.health.set_outage(&state.outage);
        Ok(round)
    }

    /// Returns the state of this source.
    pub fn view(&self) -> InputView {
        let processed = [("sent", &self.sent), ("rejected", &self.rejected), ("job", &self.jobs)];
        self.health.view(InputKind::Source, &self.name, processed)
    }

    /// Counts the rows that wait, if this node has the lock and did not count them lately. A failure changes nothing: the
    /// round that follows reports it.
    async fn count_pending(&self, state: &mut State, now: Timestamp) {
        if state.counted_at.is_some_and(|at| now.ms_since(at) < ms(COUNT_PERIOD)) {
            return;
        }
        let kind = self.sink.is_none().then_some(JOB_TYPE);
        if let Ok(Some((pending, oldest_at))) = state.outbox.count_pending(kind).await {
            self.health.set_backlog(Some(Backlog { pending, oldest_at }));
            state.counted_at = Some(now);
        }
    }

    /// Releases the lock. Called on shutdown.
    pub async fn close(&self) {
        self.state.lock().await.outbox.close();
        if let Some(sink) = &self.sink {
            sink.close().await;
        }
    }

    async fn round(&self, state: &mut State, store: &dyn Store, bus: &Bus, now: Timestamp) -> Result<Round, Stopped> {
        state.delayed.retain(|_, until| *until > now);
        let next_at = now.plus_ms(ms(self.period));
        let next_at = state.delayed.values().copied().fold(next_at, Timestamp::min);
        if state.delayed.len() >= MAX_DELAYED {
            return Ok(Round::idle_until(Some(next_at)));
        }
        let except: Vec<String> = state.delayed.keys().cloned().collect();
        let kind = self.sink.is_none().then_some(JOB_TYPE);
        let rows = match state.outbox.take_of(kind, &except).await.map_err(unusable)? {
            ExternalTake::Elsewhere => {
                self.health.set_backlog(None);
                return Ok(Round::idle_until(Some(next_at)));
            }
            ExternalTake::Rows(rows) => rows,
        };
        if rows.is_empty() {
            state.counted_at = None;
            if state.delayed.is_empty() {
                self.health.set_backlog(Some(Backlog::default()));
                state.outbox.release().await.map_err(unusable)?;
            } else {
                // Keeps the lock: only this node knows when the delayed rows are retried.
                state.outbox.settle(&[], now).await.map_err(unusable)?;
                self.count_pending(state, now).await;
            }
            return Ok(Round::idle_until(Some(next_at)));
        }
        let session_ended = state.outbox.closed();
        let processed = tokio::select! {
            biased;
            () = session_ended.cancelled() => return Err(lock_lost()),
            processed = tokio::time::timeout(WORK_TIMEOUT, self.process(store, bus, &rows, now)) => {
                let reason = format!("no answer within {WORK_TIMEOUT:?}");
                processed.map_err(|_| Stopped { dependency: SINK, reason })?
            }
        };
        let settled = state.outbox.settle(&processed.ends, now).await.map_err(unusable)?;
        let handled = self.count(state, &processed, &settled, now);
        self.count_pending(state, now).await;
        match processed.stopped {
            Some(stopped) => Err(stopped),
            None => Ok(Round { handled, more: handled > 0, next_at: Some(next_at) }),
        }
    }

    /// Counts the results, and delays rejected rows.
    fn count(&self, state: &mut State, processed: &Processed, settled: &ExternalSettled, now: Timestamp) -> usize {
        self.sent.fetch_add(processed.sent, Ordering::Relaxed);
        self.jobs.fetch_add(processed.jobs, Ordering::Relaxed);
        self.rejected.fetch_add(settled.rejected.len() as u64, Ordering::Relaxed);
        for (id, attempts) in &settled.rejected {
            let reason = processed.ends.iter().find_map(|(known, end)| match end {
                ExternalEnd::Rejected(reason) if known == id => Some(reason.as_str()),
                _ => None,
            });
            let source = self.name.trim_start_matches("source:");
            if *attempts >= MAX_ATTEMPTS {
                tracing::warn!(source, row = id, attempts, reason, "outbox row abandoned");
                continue;
            }
            tracing::warn!(source, row = id, attempts, max_attempts = MAX_ATTEMPTS, reason, "outbox row rejected");
            let delay = ROW_BACKOFF * 2u32.saturating_pow(attempts.saturating_sub(1));
            state.delayed.insert(id.clone(), now.plus_ms(ms(delay)));
        }
        settled.dispatched + settled.rejected.len()
    }

    async fn process(&self, store: &dyn Store, bus: &Bus, rows: &[ExternalRow], now: Timestamp) -> Processed {
        let mut processed = Processed::default();
        let (mut messages, mut jobs) = (Vec::new(), Vec::new());
        for row in rows {
            let rejected = |reason: String| (row.id.clone(), ExternalEnd::Rejected(reason));
            match &row.payload {
                _ if row.is_processed => processed.ends.push((row.id.clone(), ExternalEnd::Dispatched)),
                Err(reason) => processed.ends.push(rejected(reason.clone())),
                Ok(payload) if row.kind == JOB_TYPE => jobs.push((row, payload)),
                Ok(payload) => match serde_json::from_str::<IgnoredAny>(payload) {
                    Ok(_) => messages.push(message(row, payload, now)),
                    Err(error) => processed.ends.push(rejected(format!("the payload is not JSON: {error}"))),
                },
            }
        }
        let submits: Vec<_> = jobs.iter().map(|(row, payload)| self.submit(store, bus, row, payload, now)).collect();
        let submits = stream::iter(submits).buffered(CONCURRENT_SUBMITS).collect::<Vec<Submission>>();
        let (report, submissions) = tokio::join!(self.publish(&messages), submits);
        if let Some(report) = report {
            processed.add_report(&messages, report);
        }
        for ((row, _), submission) in jobs.into_iter().zip(submissions) {
            processed.add_submission(row, submission);
        }
        processed
    }

    async fn publish(&self, messages: &[Message]) -> Option<PublishReport> {
        match &self.sink {
            Some(sink) if !messages.is_empty() => Some(sink.publish(messages).await),
            _ => None,
        }
    }

    async fn submit(
        &self,
        store: &dyn Store,
        bus: &Bus,
        row: &ExternalRow,
        payload: &str,
        now: Timestamp,
    ) -> Submission {
        match self.parser.parse(payload.as_bytes()) {
            Ok(mut job) => {
                if job.correlation_id.is_none() {
                    job.correlation_id = row.correlation_id.clone().filter(|id| is_valid_correlation_id(id));
                }
                submit_once(store, bus, &self.name, &row.id, job, now).await
            }
            Err(error) => Submission::Rejected(error.to_string()),
        }
    }
}

impl Processed {
    fn add_report(&mut self, messages: &[Message], report: PublishReport) {
        for (message, outcome) in messages.iter().zip(report.outcomes) {
            let end = match outcome {
                Some(PublishOutcome::Confirmed) => {
                    self.sent += 1;
                    ExternalEnd::Dispatched
                }
                Some(PublishOutcome::Rejected(reason)) => ExternalEnd::Rejected(reason),
                None => continue,
            };
            self.ends.push((message.id.clone(), end));
        }
        if let Some(error) = report.outage {
            self.stopped = Some(Stopped { dependency: SINK, reason: format!("{error:#}") });
        }
    }

    fn add_submission(&mut self, row: &ExternalRow, submission: Submission) {
        let end = match submission {
            Submission::Stored => {
                self.jobs += 1;
                ExternalEnd::Dispatched
            }
            Submission::Duplicate => ExternalEnd::Dispatched,
            Submission::Rejected(reason) => ExternalEnd::Rejected(reason),
            Submission::Deferred(error) => {
                self.stopped = Some(Stopped { dependency: STORE, reason: error.to_string() });
                return;
            }
        };
        self.ends.push((row.id.clone(), end));
    }
}

fn message(row: &ExternalRow, payload: &str, now: Timestamp) -> Message {
    Message {
        id: row.id.clone(),
        kind: row.kind.clone(),
        routing_key: None,
        key: row.id.clone(),
        sequence: 0,
        at: row.occurred_at.unwrap_or(now),
        correlation_id: row.correlation_id.clone(),
        traceparent: None,
        content_type: "application/json".into(),
        body: Bytes::copy_from_slice(payload.as_bytes()),
    }
}

/// Returns whether a job may have this correlation id.
fn is_valid_correlation_id(id: &str) -> bool {
    id.chars().count() <= 255 && !id.chars().any(char::is_control)
}

fn unusable(error: StoreError) -> Stopped {
    let dependency = if matches!(error, StoreError::Setup { .. }) { TABLE } else { DATABASE };
    Stopped { dependency, reason: error.to_string() }
}

fn lock_lost() -> Stopped {
    Stopped { dependency: DATABASE, reason: "the session that holds the lock has ended".into() }
}
