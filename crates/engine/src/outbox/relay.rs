//! Takes what is due for one sink, publishes it, and writes down what the sink said.
//!
//! A round takes a batch of the parts of the outbox that are this node's, publishes it in order and settles it in one statement. What was
//! published and not settled (this process died, the line broke) is published again under the same id, from the first on: so of each
//! subject the first deliveries stay in order. A call to the sink only begins if it must end before the lease does; nobody else
//! publishes these subjects meanwhile.
//!
//! Two kinds of failure. The sink is down: it rests, longer each time, and no message pays for it. A message is refused: it has to rest
//! by itself, and after `MAX_ATTEMPTS` it is a dead letter. Where later messages of its subject have to wait for it (`park`), each call
//! holds one message of a subject at most.
//!
//! Safe on every node at once: a part is one node's, and the store refuses whom it was taken from.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use faena_brokers::{Message, PublishOutcome, PublishReport, Sink};
use faena_domain::{CloudEvent, NodeId, Timestamp};
use faena_store::{
    OnRejected, OutboxEvent, OutboxResult, OutboxTakeRequest, OutboxTaken, Store, StoreError, StoredEvent,
};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{OutboxConfig, SinkConfig};
use crate::{Round, config::ms};

const LONGEST_REST: Duration = Duration::from_secs(60);
/// A wish is repeated this often; it holds for days.
const WISH_AGAIN_MS: i64 = 3_600_000;
/// What must be left of a lease beyond a call to the sink. Half of it is left at least after each take: that one renews what is older.
const MARGIN: Duration = Duration::from_secs(1);
/// A server that stops waits this long for confirmations; what comes later is published again by others.
const LAST_WORDS: Duration = Duration::from_secs(2);

pub struct Relay {
    pub(super) config: SinkConfig,
    pub nudge: Arc<Notify>,
    confirmed: AtomicU64,
    refused: AtomicU64,
    spent: Mutex<Spent>,
    sink: Box<dyn Sink>,
    source: String,
    lease: Duration,
    batch: usize,
    first_rest: Duration,
    wished_at: AtomicI64,
    health: Mutex<Health>,
    stop: CancellationToken,
}

/// Where a relay's time has gone.
#[derive(Clone, Copy, Default, Debug)]
pub struct Spent {
    pub taking: Duration,
    pub publishing: Duration,
    pub settling: Duration,
}

/// An event as it travels.
fn message(event: &StoredEvent, source: &str) -> Message {
    Message {
        id: event.id.to_string(),
        kind: event.kind.clone(),
        key: event.subject.to_string(),
        sequence: event.sequence,
        at: event.at,
        correlation_id: Some(event.correlation_id.clone()).filter(|id| !id.is_empty()),
        traceparent: event.traceparent.clone(),
        content_type: CloudEvent::CONTENT_TYPE.into(),
        body: event.cloud_event(source).to_json().into(),
    }
}

/// How the sink is, as far as this node knows.
#[derive(Default)]
struct Health {
    /// `None`: this node has not heard of it yet.
    is_down: Option<bool>,
    failures: u32,
    rest_until: Option<Timestamp>,
}

/// What a round has learned.
#[derive(Default)]
struct Learned {
    results: Vec<OutboxResult>,
    confirmed: usize,
    refused: usize,
    down: Option<String>,
    /// Not everything was published: time was up, or the sink said nothing of it.
    is_partial: bool,
}

impl Relay {
    pub(super) fn new(
        config: &OutboxConfig,
        sink_config: &SinkConfig,
        sink: Box<dyn Sink>,
        stop: CancellationToken,
    ) -> Relay {
        Relay {
            config: sink_config.clone(),
            nudge: Arc::new(Notify::new()),
            confirmed: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            spent: Mutex::default(),
            sink,
            source: config.source.clone(),
            lease: config.lease.max(2 * (sink_config.target.timeout() + 2 * MARGIN)),
            batch: config.batch,
            first_rest: config.first_rest,
            wished_at: AtomicI64::new(i64::MIN),
            health: Mutex::default(),
            stop,
        }
    }

    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// Messages that the sink confirmed through this node.
    pub fn confirmed(&self) -> u64 {
        self.confirmed.load(Ordering::Relaxed)
    }

    /// Messages that it refused.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    pub fn spent(&self) -> Spent {
        *self.spent.lock()
    }

    pub async fn run_once(&self, store: &dyn Store, node: NodeId, now: Timestamp) -> Result<Round, StoreError> {
        self.mode(store, now).await?;
        let rest_until = self.health.lock().rest_until.filter(|until| *until > now);
        if rest_until.is_some() {
            return Ok(Round { next_at: rest_until, ..Round::default() });
        }
        // Counted from before the call: the lease may begin as soon as the store hears of it.
        let began = Instant::now();
        let ask =
            OutboxTakeRequest { sink: self.config.name.clone(), node, lease_ms: ms(self.lease), limit: self.batch };
        let taken = store.outbox_take(ask, now).await?;
        if taken.events.is_empty() {
            return Ok(Round { next_at: taken.next_at, ..Round::default() });
        }
        let is_full = taken.events.len() >= self.batch;
        let taking = began.elapsed();
        let learned = self.publish(&taken, began, now).await;
        let publishing = began.elapsed() - taking;
        let at = now.plus_ms(ms(began.elapsed()));
        let handled = learned.results.len();
        let more = learned.down.is_none() && (is_full || learned.is_partial) && !self.stop.is_cancelled();
        // Of each refused message the store knows when it is due again; this loop has to look then.
        let again_at = learned.results.iter().filter(|result| result.refused.is_some()).map(|result| result.again_at);
        let next_at = again_at.chain(taken.next_at).min();
        if handled > 0 {
            store.outbox_settle(&self.config.name, taken.partitions, learned.results, at).await?;
        } else if learned.down.is_none() {
            // There was no time for anything.
            return Ok(Round { more, ..Round::default() });
        }
        {
            let mut spent = self.spent.lock();
            spent.taking += taking;
            spent.publishing += publishing;
            spent.settling += began.elapsed() - taking - publishing;
        }
        self.confirmed.fetch_add(learned.confirmed as u64, Ordering::Relaxed);
        self.refused.fetch_add(learned.refused as u64, Ordering::Relaxed);
        let rest_until = self.judge(store, learned.down, learned.confirmed, at).await?;
        Ok(Round { handled, more, next_at: rest_until.or(next_at) })
    }

    /// Repeats the wish for events before it is forgotten.
    async fn mode(&self, store: &dyn Store, now: Timestamp) -> Result<(), StoreError> {
        if now.ms_since(Timestamp::from_ms(self.wished_at.load(Ordering::Relaxed))) >= WISH_AGAIN_MS {
            store.event_subscribe(vec![self.config.want(now)], now).await?;
            self.wished(now);
        }
        Ok(())
    }

    pub(super) fn wished(&self, now: Timestamp) {
        self.wished_at.store(now.as_ms(), Ordering::Relaxed);
    }

    async fn publish(&self, taken: &OutboxTaken, began: Instant, now: Timestamp) -> Learned {
        let mut learned = Learned::default();
        let waves = match self.config.on_bad {
            OnRejected::Skip => vec![taken.events.iter().collect()],
            OnRejected::Park => waves(&taken.events),
        };
        let mut held_back: HashSet<Uuid> = HashSet::new();
        for wave in waves {
            let wave: Vec<&OutboxEvent> =
                wave.into_iter().filter(|one| !held_back.contains(&one.event.subject)).collect();
            if wave.is_empty() {
                continue;
            }
            if learned.down.is_some() || began.elapsed() + self.config.target.timeout() + MARGIN > self.lease / 2 {
                learned.is_partial = true;
                break;
            }
            let messages: Vec<Message> = wave.iter().map(|one| message(&one.event, &self.source)).collect();
            let Some(report) = self.publish_unless_stopped(&messages).await else {
                learned.is_partial = true;
                break;
            };
            let at = now.plus_ms(ms(began.elapsed()));
            self.note(&wave, report, at, &mut learned, &mut held_back);
        }
        learned
    }

    /// `None`: this server stops, and has waited long enough.
    async fn publish_unless_stopped(&self, messages: &[Message]) -> Option<PublishReport> {
        let impatience = async {
            self.stop.cancelled().await;
            tokio::time::sleep(LAST_WORDS).await;
        };
        tokio::select! {
            report = self.sink.publish(messages) => Some(report),
            () = impatience => None,
        }
    }

    fn note(
        &self,
        wave: &[&OutboxEvent],
        report: PublishReport,
        at: Timestamp,
        learned: &mut Learned,
        held_back: &mut HashSet<Uuid>,
    ) {
        let before = learned.results.len();
        for (one, outcome) in wave.iter().zip(report.outcomes) {
            let refused = match outcome {
                Some(PublishOutcome::Confirmed) => {
                    learned.confirmed += 1;
                    None
                }
                Some(PublishOutcome::Rejected(reason)) => {
                    learned.refused += 1;
                    held_back.insert(one.event.subject);
                    Some(reason)
                }
                None => {
                    learned.is_partial = true;
                    held_back.insert(one.event.subject);
                    continue;
                }
            };
            learned.results.push(OutboxResult {
                partition: one.partition,
                position: one.event.position,
                refused,
                again_at: at.plus_ms(ms(rest(self.first_rest, one.attempts))),
            });
        }
        learned.down = report.outage.map(|error| format!("{error:#}"));
        if learned.down.is_none() && learned.results.len() == before {
            learned.down = Some("the sink reported no outcome for any message".into());
        }
    }

    /// Writes down how the sink is, when that has changed, and says until when it is left alone.
    async fn judge(
        &self,
        store: &dyn Store,
        down: Option<String>,
        confirmed: usize,
        at: Timestamp,
    ) -> Result<Option<Timestamp>, StoreError> {
        let was_down = self.health.lock().is_down;
        let name = self.name();
        let Some(reason) = down else {
            if was_down != Some(false) {
                store.outbox_down(name, None, at).await?;
            }
            if was_down == Some(true) {
                tracing::info!(sink = name, "the sink works again");
            }
            *self.health.lock() = Health { is_down: Some(false), ..Health::default() };
            return Ok(None);
        };
        let until = {
            let mut health = self.health.lock();
            // It got something done before it went down: that is another outage.
            health.failures = if confirmed > 0 { 1 } else { health.failures + 1 };
            let until = at.plus_ms(ms(jittered(rest(self.first_rest, health.failures - 1))));
            health.rest_until = Some(until);
            until
        };
        if was_down != Some(true) {
            store.outbox_down(name, Some(reason.clone()), at).await?;
            tracing::warn!(sink = name, reason, "the sink is down; its events wait, and it is tried again and again");
            self.health.lock().is_down = Some(true);
        }
        Ok(Some(until))
    }

    pub(super) async fn close(&self) {
        self.sink.close().await;
    }
}

/// Cuts a batch into calls that hold one message of a subject at most, in order.
fn waves(events: &[OutboxEvent]) -> Vec<Vec<&OutboxEvent>> {
    let mut waves: Vec<Vec<&OutboxEvent>> = Vec::new();
    let mut count = std::collections::HashMap::new();
    for one in events {
        let number: &mut usize = count.entry(one.event.subject).or_default();
        if waves.len() == *number {
            waves.push(Vec::new());
        }
        waves[*number].push(one);
        *number += 1;
    }
    waves
}

/// How long to wait after so many failures before this one.
fn rest(first: Duration, before: u32) -> Duration {
    first.saturating_mul(2u32.saturating_pow(before)).min(LONGEST_REST)
}

/// So that relays that lost their broker together do not come back together.
fn jittered(rest: Duration) -> Duration {
    rest.mul_f64(0.75 + 0.25 * rand::random::<f64>())
}

#[cfg(test)]
mod tests {
    use faena_store::StoredEvent;

    use super::*;

    fn event(position: i64, subject: u128) -> OutboxEvent {
        let event = StoredEvent {
            position,
            id: Uuid::from_u128(position.unsigned_abs().into()),
            kind: "job.created".into(),
            subject: Uuid::from_u128(subject),
            sequence: position,
            at: Timestamp::from_ms(0),
            correlation_id: String::new(),
            actor: String::new(),
            traceparent: None,
            data: "{}".into(),
        };
        OutboxEvent { partition: 0, event, attempts: 0 }
    }

    #[test]
    fn a_wave_holds_one_message_of_a_subject_at_most_and_all_stay_in_order() {
        let events = [event(1, 7), event(2, 8), event(3, 7), event(4, 7), event(5, 8)];
        let positions: Vec<Vec<i64>> =
            waves(&events).iter().map(|wave| wave.iter().map(|one| one.event.position).collect()).collect();
        assert_eq!(positions, [vec![1, 2], vec![3, 5], vec![4]]);
    }

    #[test]
    fn a_rest_doubles_up_to_a_minute() {
        let seconds = [0, 1, 2, 5, 6, 40].map(|before| rest(Duration::from_secs(1), before).as_secs());
        assert_eq!(seconds, [1, 2, 4, 32, 60, 60]);
    }
}
