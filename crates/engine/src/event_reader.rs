//! Streams events to subscribers: everything that happens, on all nodes, in the order of commits.
//!
//! While there are subscribers, a stored subscription makes the store keep events, and one reader per process reads
//! them and passes them to all subscribers. No subscriber delays another: each has its own position, and a subscriber
//! that falls behind reads from the store itself. A subscriber receives a gap for events that were
//! deleted before it could read them.
//!
//! Safe to run on all nodes concurrently: it only reads.

mod subscription;

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use faena_domain::Timestamp;
use faena_store::{EventPosition, EventQuery, EventSubscription, Store, StoreError, StoredEvent, SubscriptionMode};
use tokio::sync::{Mutex, Semaphore, broadcast};

use crate::{Round, config::ms, wakeups::Wakeups};

pub use subscription::{EventFilter, Gap, StreamItem, Subscription};

/// Name of the stored subscription. All nodes share it.
pub const SUBSCRIPTION: &str = "live";
/// How long events are kept after the last subscriber.
const KEEP_FOR: Duration = Duration::from_secs(3_600);
/// How often the stored subscription is renewed.
const RENEW_EVERY: Duration = Duration::from_secs(600);
/// Events per read.
const BATCH: usize = 256;
/// Reads that are buffered for subscribers. A slower subscriber reads from the store.
const BATCHES: usize = 64;
/// Maximum number of subscribers of one process. Each uses a connection.
pub const MAX_SUBSCRIBERS: usize = 1_000;
/// How many subscribers that fell behind may read the database at the same time.
const MAX_CATCHING_UP: usize = 3;

pub struct EventReader {
    wakeups: Wakeups,
    store: Arc<dyn Store>,
    batches: broadcast::Sender<Arc<Batch>>,
    /// Position of the reader while there are subscribers.
    position: Mutex<Option<EventPosition>>,
    /// When the stored subscription was last renewed.
    renewed_at: Mutex<Option<Timestamp>>,
    subscribers: AtomicUsize,
    /// When there last was a subscriber, in milliseconds.
    last_subscriber_at: AtomicI64,
    catching_up: Semaphore,
}

/// The events after one position and up to another.
struct Batch {
    after: EventPosition,
    up_to: EventPosition,
    events: Vec<Arc<StoredEvent>>,
}

/// Why a caller cannot subscribe.
#[derive(thiserror::Error, Debug)]
pub enum SubscribeError {
    #[error("this server has {MAX_SUBSCRIBERS} event subscribers already; use another node, or try again later")]
    TooManySubscribers,
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl EventReader {
    pub(crate) fn new(store: Arc<dyn Store>, wakeups: Wakeups) -> EventReader {
        EventReader {
            wakeups,
            store,
            batches: broadcast::channel(BATCHES).0,
            position: Mutex::new(None),
            renewed_at: Mutex::new(None),
            subscribers: AtomicUsize::new(0),
            last_subscriber_at: AtomicI64::new(i64::MIN),
            catching_up: Semaphore::new(MAX_CATCHING_UP),
        }
    }

    /// Subscribes to all events after `from`, or from now on: first those that are kept, then new ones, without a gap or a
    /// repetition. Every event that is committed after this returns is delivered.
    pub async fn subscribe(
        self: &Arc<EventReader>,
        from: Option<EventPosition>,
        filter: EventFilter,
        now: Timestamp,
    ) -> Result<Subscription, SubscribeError> {
        let permit = SubscriberPermit::acquire(self).ok_or(SubscribeError::TooManySubscribers)?;
        self.renew_subscription(now).await?;
        // Subscribes before reading the position: an event in between is received twice, and its repetition is dropped.
        let batches = self.batches.subscribe();
        let (position, gaps_up_to) = match from {
            None => (self.store.event_last_position().await?, 0),
            // Position 0 asks for all events that are kept, so a gap before them is not reported.
            Some(0) => (0, self.store.event_range(SUBSCRIPTION).await?.map_or(0, |range| range.after)),
            Some(position) => (position, 0),
        };
        self.wakeups.events_changed();
        Ok(Subscription::new(permit, batches, filter, position, gaps_up_to))
    }

    /// Returns the number of subscribers of this process.
    pub fn subscribers(&self) -> usize {
        self.subscribers.load(Ordering::Relaxed)
    }

    /// Reads the next events for all subscribers.
    pub(crate) async fn run_once(&self, now: Timestamp) -> Result<Round, StoreError> {
        let has_subscribers = self.subscribers() > 0;
        if has_subscribers {
            self.last_subscriber_at.store(now.as_ms(), Ordering::Relaxed);
        }
        let last_subscriber_at = Timestamp::from_ms(self.last_subscriber_at.load(Ordering::Relaxed));
        if has_subscribers || now.plus_ms(-ms(KEEP_FOR)) < last_subscriber_at {
            self.renew_subscription(now).await?;
        }
        let mut position = self.position.lock().await;
        if !has_subscribers {
            *position = None;
            return Ok(Round::done(0));
        }
        let after = match *position {
            Some(after) => after,
            None => {
                let end = *position.insert(self.store.event_last_position().await?);
                // Events between a subscriber's last read and this position are not read here; an empty batch makes the
                // subscriber read them from the store.
                let _ = self.batches.send(Arc::new(Batch { after: end, up_to: end, events: Vec::new() }));
                end
            }
        };
        let events = self.store.event_list(EventQuery::After(after), BATCH).await?;
        let Some(up_to) = events.last().map(|event| event.position) else { return Ok(Round::done(0)) };
        let handled = events.len();
        let batch = Batch { after, up_to, events: events.into_iter().map(Arc::new).collect() };
        // An error means that the last subscriber has left; the next one starts at its own position.
        let _ = self.batches.send(Arc::new(batch));
        *position = Some(up_to);
        Ok(Round { handled, more: handled == BATCH, next_at: None })
    }

    /// Makes the store keep events, unless that was renewed recently.
    async fn renew_subscription(&self, now: Timestamp) -> Result<(), StoreError> {
        let mut renewed_at = self.renewed_at.lock().await;
        let is_recent = renewed_at.is_some_and(|at| now.ms_since(at) < ms(RENEW_EVERY));
        if is_recent && self.store.has_event_subscriptions() {
            return Ok(());
        }
        let subscription = EventSubscription {
            name: SUBSCRIPTION.into(),
            types: vec!["*".into()],
            mode: SubscriptionMode::Keep,
            until: now.plus_ms(ms(KEEP_FOR)),
        };
        self.store.event_subscribe(vec![subscription], now).await?;
        *renewed_at = Some(now);
        Ok(())
    }

    /// Returns the gap after `position` if events there can no longer be read.
    async fn gap_after(&self, position: EventPosition) -> Result<Option<Gap>, StoreError> {
        let Some(range) = self.store.event_range(SUBSCRIPTION).await? else { return Ok(None) };
        // A position that was never assigned comes from another database, or from a newer copy of this one.
        let is_foreign = position > range.last;
        let gap = Gap { after: position, first: if is_foreign { range.last } else { range.after } + 1 };
        Ok((is_foreign || position < range.after).then_some(gap))
    }
}

/// Counts one subscriber as long as it exists.
struct SubscriberPermit(Arc<EventReader>);

impl SubscriberPermit {
    fn acquire(reader: &Arc<EventReader>) -> Option<SubscriberPermit> {
        let increment = |count: usize| (count < MAX_SUBSCRIBERS).then_some(count + 1);
        let acquired = reader.subscribers.fetch_update(Ordering::Relaxed, Ordering::Relaxed, increment);
        acquired.ok().map(|_| SubscriberPermit(reader.clone()))
    }
}

impl Drop for SubscriberPermit {
    fn drop(&mut self) {
        self.0.subscribers.fetch_sub(1, Ordering::Relaxed);
    }
}
