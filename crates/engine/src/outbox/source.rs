//! Empties an application's own outbox: its rows go to a sink, or become jobs.
//!
//! A round takes a batch under the application's lock, publishes it, waits for the confirmations, writes down what became of it, and goes on at once while there
//! is something. A row of type `faena.job` is stored as a job, once per row id, before the row is marked. A row that is refused counts an attempt and rests
//! for itself; the others flow on. A sink or database that is down costs no row anything.
//!
//! Safe on every node at once: who does not have the lock does nothing, and who loses the session that holds it stops in the middle.

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
    ForeignEnd, ForeignMapping, ForeignOutbox, ForeignRow, ForeignSettled, ForeignTake, MAX_ATTEMPTS, Store, StoreError,
};
use futures_util::{StreamExt, stream};
use serde::de::IgnoredAny;
use tokio::sync::{Mutex, Notify};

use super::Target;
use crate::{
    Bus, Round,
    arrivals::{Arrival, Trouble, arrive},
    config::ms,
};

/// The type of rows that become jobs.
pub const JOB_TYPE: &str = "faena.job";

/// A source in trouble is tried again after this time at the latest.
const LONGEST_REST: Duration = Duration::from_secs(15);
/// How long a refused row rests at first; each further refusal doubles it.
const ROW_REST: Duration = Duration::from_secs(5);
/// Rows that rest. If there are more, all wait for the first of them.
const MOST_RESTING: usize = 1_000;
/// For publishing and storing one batch. Below what the database allows a silent transaction.
const WORK_TIMEOUT: Duration = Duration::from_secs(45);
const SUBMITS_AT_ONCE: usize = 8;

#[derive(Clone, Debug)]
pub struct SourceConfig {
    pub name: String,
    pub url: DatabaseUrl,
    pub mapping: ForeignMapping,
    /// Where its rows go. `None`: only rows that become jobs are taken.
    pub sink: Option<Target>,
    /// How often it is looked at when nothing tells of news.
    pub period: Duration,
}

/// Never shows itself: it may hold a password.
#[derive(Clone, PartialEq, Eq)]
pub struct DatabaseUrl(pub String);

impl fmt::Debug for DatabaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

pub struct Source {
    pub name: String,
    pub nudge: Arc<Notify>,
    /// Through this node: rows that the sink confirmed, rows that were refused, jobs that were stored.
    pub sent: AtomicU64,
    pub refused: AtomicU64,
    pub jobs: AtomicU64,
    period: Duration,
    sink: Option<Box<dyn Sink>>,
    parser: JobParser,
    state: Mutex<State>,
}

struct State {
    outbox: ForeignOutbox,
    /// Rows that were refused, and until when they rest.
    resting: HashMap<String, Timestamp>,
    trouble: Trouble,
}

/// What stopped a round.
struct Stopped {
    what: &'static str,
    reason: String,
}

const SINK: &str = "the sink of a source";
const DATABASE: &str = "the database of a source";
/// They are not as the configuration says: somebody has to look.
const TABLES: &str = "the table of a source";
const STORE: &str = "the database of jobs";

/// What became of the rows of a batch, as far as it is known.
#[derive(Default)]
struct Dealt {
    ends: Vec<(String, ForeignEnd)>,
    jobs: u64,
    sent: u64,
    stopped: Option<Stopped>,
}

impl Source {
    pub fn new(config: &SourceConfig, parser: JobParser) -> Result<Source, StoreError> {
        let outbox = ForeignOutbox::open(&config.url.0, config.mapping.clone())?;
        Ok(Source {
            name: format!("source:{}", config.name),
            nudge: outbox.nudge.clone(),
            sent: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            jobs: AtomicU64::new(0),
            period: config.period,
            sink: config.sink.as_ref().map(|target| target.open(&parser.addresses)),
            parser,
            state: Mutex::new(State { outbox, resting: HashMap::new(), trouble: Trouble::default() }),
        })
    }

    pub async fn run_once(&self, store: &dyn Store, bus: &Bus, now: Timestamp) -> Result<Round, StoreError> {
        let mut state = self.state.lock().await;
        if let Some(until) = state.trouble.rests_until(now) {
            return Ok(Round { next_at: Some(until), ..Round::default() });
        }
        match self.round(&mut state, store, bus, now).await {
            Ok(round) => {
                state.trouble.is_over(&self.name);
                Ok(round)
            }
            Err(stopped) => {
                // Another node may have more luck. Should this fail too, the session is closed, and the lock with it.
                let _ = state.outbox.release().await;
                let until = state.trouble.came(&self.name, stopped.what, &stopped.reason, LONGEST_REST, now);
                Ok(Round { next_at: Some(until), ..Round::default() })
            }
        }
    }

    /// Lets the lock go: this node stops.
    pub async fn close(&self) {
        self.state.lock().await.outbox.close();
        if let Some(sink) = &self.sink {
            sink.close().await;
        }
    }

    async fn round(&self, state: &mut State, store: &dyn Store, bus: &Bus, now: Timestamp) -> Result<Round, Stopped> {
        state.resting.retain(|_, until| *until > now);
        let next_at = now.plus_ms(ms(self.period));
        let next_at = state.resting.values().copied().fold(next_at, Timestamp::min);
        if state.resting.len() >= MOST_RESTING {
            return Ok(Round { next_at: Some(next_at), ..Round::default() });
        }
        let except: Vec<String> = state.resting.keys().cloned().collect();
        let kind = self.sink.is_none().then_some(JOB_TYPE);
        let rows = match state.outbox.take_of(kind, &except).await.map_err(unusable)? {
            ForeignTake::Elsewhere => return Ok(Round { next_at: Some(next_at), ..Round::default() }),
            ForeignTake::Rows(rows) => rows,
        };
        if rows.is_empty() {
            if state.resting.is_empty() {
                state.outbox.release().await.map_err(unusable)?;
            } else {
                // Only who knows how long rows rest lets them rest so long.
                state.outbox.settle(&[], now).await.map_err(unusable)?;
            }
            return Ok(Round { next_at: Some(next_at), ..Round::default() });
        }
        let gone = state.outbox.gone();
        let dealt = tokio::select! {
            biased;
            () = gone.cancelled() => return Err(lock_lost()),
            dealt = tokio::time::timeout(WORK_TIMEOUT, self.deal_with(store, bus, &rows, now)) => {
                dealt.map_err(|_| Stopped { what: SINK, reason: format!("it took longer than {WORK_TIMEOUT:?}") })?
            }
        };
        let settled = state.outbox.settle(&dealt.ends, now).await.map_err(unusable)?;
        let handled = self.count(state, &dealt, &settled, now);
        match dealt.stopped {
            Some(stopped) => Err(stopped),
            None => Ok(Round { handled, more: handled > 0, next_at: Some(next_at) }),
        }
    }

    /// Counts, and puts to rest what was refused.
    fn count(&self, state: &mut State, dealt: &Dealt, settled: &ForeignSettled, now: Timestamp) -> usize {
        self.sent.fetch_add(dealt.sent, Ordering::Relaxed);
        self.jobs.fetch_add(dealt.jobs, Ordering::Relaxed);
        self.refused.fetch_add(settled.refused.len() as u64, Ordering::Relaxed);
        for (id, attempts) in &settled.refused {
            if *attempts >= MAX_ATTEMPTS {
                let reason = dealt.ends.iter().find_map(|(known, end)| match end {
                    ForeignEnd::Refused(reason) if known == id => Some(reason.as_str()),
                    _ => None,
                });
                tracing::warn!(name = self.name, row = id, reason, "a row was refused too often and is given up");
                continue;
            }
            let rest = ROW_REST * 2u32.saturating_pow(attempts.saturating_sub(1));
            state.resting.insert(id.clone(), now.plus_ms(ms(rest)));
        }
        settled.dispatched + settled.refused.len()
    }

    async fn deal_with(&self, store: &dyn Store, bus: &Bus, rows: &[ForeignRow], now: Timestamp) -> Dealt {
        let mut dealt = Dealt::default();
        let (mut messages, mut jobs) = (Vec::new(), Vec::new());
        for row in rows {
            let refused = |reason: String| (row.id.clone(), ForeignEnd::Refused(reason));
            match &row.payload {
                _ if row.is_processed => dealt.ends.push((row.id.clone(), ForeignEnd::Dispatched)),
                Err(reason) => dealt.ends.push(refused(reason.clone())),
                Ok(payload) if row.kind == JOB_TYPE => jobs.push((row, payload)),
                Ok(payload) => match serde_json::from_str::<IgnoredAny>(payload) {
                    Ok(_) => messages.push(message(row, payload, now)),
                    Err(error) => dealt.ends.push(refused(format!("the payload is not JSON: {error}"))),
                },
            }
        }
        let submits: Vec<_> = jobs.iter().map(|(row, payload)| self.submit(store, bus, row, payload, now)).collect();
        let submits = stream::iter(submits).buffered(SUBMITS_AT_ONCE).collect::<Vec<Arrival>>();
        let (report, arrivals) = tokio::join!(self.publish(&messages), submits);
        if let Some(report) = report {
            dealt.add_report(&messages, report);
        }
        for ((row, _), arrival) in jobs.into_iter().zip(arrivals) {
            dealt.add_arrival(row, arrival);
        }
        dealt
    }

    async fn publish(&self, messages: &[Message]) -> Option<PublishReport> {
        match &self.sink {
            Some(sink) if !messages.is_empty() => Some(sink.publish(messages).await),
            _ => None,
        }
    }

    async fn submit(&self, store: &dyn Store, bus: &Bus, row: &ForeignRow, payload: &str, now: Timestamp) -> Arrival {
        match self.parser.parse(payload.as_bytes()) {
            Ok(mut job) => {
                if job.correlation_id.is_none() {
                    job.correlation_id = row.correlation_id.clone().filter(|id| fits(id));
                }
                arrive(store, bus, &self.name, &row.id, job, now).await
            }
            Err(error) => Arrival::Refused(error.to_string()),
        }
    }
}

impl Dealt {
    fn add_report(&mut self, messages: &[Message], report: PublishReport) {
        for (message, outcome) in messages.iter().zip(report.outcomes) {
            let end = match outcome {
                Some(PublishOutcome::Confirmed) => {
                    self.sent += 1;
                    ForeignEnd::Dispatched
                }
                Some(PublishOutcome::Rejected(reason)) => ForeignEnd::Refused(reason),
                None => continue,
            };
            self.ends.push((message.id.clone(), end));
        }
        if let Some(error) = report.outage {
            self.stopped = Some(Stopped { what: SINK, reason: format!("{error:#}") });
        }
    }

    fn add_arrival(&mut self, row: &ForeignRow, arrival: Arrival) {
        let end = match arrival {
            Arrival::Stored => {
                self.jobs += 1;
                ForeignEnd::Dispatched
            }
            Arrival::Known => ForeignEnd::Dispatched,
            Arrival::Refused(reason) => ForeignEnd::Refused(reason),
            Arrival::Later(error) => {
                self.stopped = Some(Stopped { what: STORE, reason: error.to_string() });
                return;
            }
        };
        self.ends.push((row.id.clone(), end));
    }
}

fn message(row: &ForeignRow, payload: &str, now: Timestamp) -> Message {
    Message {
        id: row.id.clone(),
        kind: row.kind.clone(),
        key: row.id.clone(),
        sequence: 0,
        at: row.occurred_at.unwrap_or(now),
        correlation_id: row.correlation_id.clone(),
        traceparent: None,
        content_type: "application/json".into(),
        body: Bytes::copy_from_slice(payload.as_bytes()),
    }
}

/// Whether a correlation id from outside can be a job's.
fn fits(id: &str) -> bool {
    id.chars().count() <= 255 && !id.chars().any(char::is_control)
}

fn unusable(error: StoreError) -> Stopped {
    let what = if matches!(error, StoreError::Setup(_)) { TABLES } else { DATABASE };
    Stopped { what, reason: error.to_string() }
}

fn lock_lost() -> Stopped {
    Stopped { what: DATABASE, reason: "the session that holds the lock has ended".into() }
}
