//! Tells whoever watches what happens, on all nodes, in the order in which it was committed.
//!
//! While somebody watches, events are wanted, and one reader per process follows what the store keeps and hands it to all. Nobody is
//! waited for: each subscriber has a place of its own, and one who fell behind reads on from there by itself. What it missed and is
//! kept no more it is told.
//!
//! Safe on every node at once: it only reads.

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
use tokio::sync::{Mutex, Notify, Semaphore, broadcast};

use crate::{Round, config::ms};

pub use subscription::{EventFilter, Gap, Subscription, Told};

/// The name of the wish. All nodes share it.
pub const WISH: &str = "live";
/// How long events are wanted after the last word about it, and how often that is said again.
const WANTED_FOR: Duration = Duration::from_secs(3_600);
const WANT_AGAIN: Duration = Duration::from_secs(600);
/// Events per read, and reads that wait for subscribers before those who are slower have to read by themselves.
const BATCH: usize = 256;
const BATCHES: usize = 64;
/// Subscribers of one process. Each costs a connection and a place in the line.
pub const SUBSCRIBERS: usize = 1_000;
/// How many of those who fell behind read at the same time: the database has other things to do.
const CATCHING_UP: usize = 3;

pub struct Live {
    pub(crate) nudge: Arc<Notify>,
    store: Arc<dyn Store>,
    news: broadcast::Sender<Arc<Batch>>,
    /// Up to where the reader has come, while there is anybody to read for.
    last: Mutex<Option<EventPosition>>,
    /// When it was last said that events are wanted.
    wanted_at: Mutex<Option<Timestamp>>,
    watching: AtomicUsize,
    /// When somebody last watched, in milliseconds.
    watched_at: AtomicI64,
    catching_up: Semaphore,
}

/// What happened after one place and up to another.
struct Batch {
    after: EventPosition,
    upto: EventPosition,
    events: Vec<Arc<StoredEvent>>,
}

/// Why somebody cannot watch.
#[derive(Debug)]
pub enum Refused {
    /// There are `SUBSCRIBERS` already.
    Full,
    Store(StoreError),
}

impl From<StoreError> for Refused {
    fn from(error: StoreError) -> Refused {
        Refused::Store(error)
    }
}

impl Live {
    pub(crate) fn new(store: Arc<dyn Store>) -> Live {
        Live {
            nudge: Arc::new(Notify::new()),
            store,
            news: broadcast::channel(BATCHES).0,
            last: Mutex::new(None),
            wanted_at: Mutex::new(None),
            watching: AtomicUsize::new(0),
            watched_at: AtomicI64::new(i64::MIN),
            catching_up: Semaphore::new(CATCHING_UP),
        }
    }

    /// Watches: first what is kept after `from`, then what happens, without a gap and nothing twice. `None`: from now on. Once this has
    /// returned, whatever happens is told.
    pub async fn subscribe(
        self: &Arc<Live>,
        from: Option<EventPosition>,
        filter: EventFilter,
        now: Timestamp,
    ) -> Result<Subscription, Refused> {
        let seat = Seat::take(self).ok_or(Refused::Full)?;
        self.want(now).await?;
        // Before the place is asked for: what comes between is told twice and left out once.
        let news = self.news.subscribe();
        let (place, gaps_upto) = match from {
            None => (self.store.event_end().await?, 0),
            // Who begins at 0 asks for what is kept, whatever that is.
            Some(0) => (0, self.store.event_range(WISH).await?.map_or(0, |span| span.after)),
            Some(place) => (place, 0),
        };
        self.nudge.notify_one();
        Ok(Subscription::new(seat, news, filter, place, gaps_upto))
    }

    /// How many watch here.
    pub fn watching(&self) -> usize {
        self.watching.load(Ordering::Relaxed)
    }

    /// One read for all who watch.
    pub(crate) async fn run_once(&self, now: Timestamp) -> Result<Round, StoreError> {
        let watching = self.watching() > 0;
        if watching {
            self.watched_at.store(now.as_ms(), Ordering::Relaxed);
        }
        let watched_at = Timestamp::from_ms(self.watched_at.load(Ordering::Relaxed));
        if watching || now.plus_ms(-ms(WANTED_FOR)) < watched_at {
            self.want(now).await?;
        }
        let mut last = self.last.lock().await;
        if !watching {
            *last = None;
            return Ok(Round::done(0));
        }
        let after = match *last {
            Some(place) => place,
            None => {
                let end = *last.insert(self.store.event_end().await?);
                // Who has looked before and found nothing looks again: what came in between is not read for everybody.
                let _ = self.news.send(Arc::new(Batch { after: end, upto: end, events: Vec::new() }));
                end
            }
        };
        let events = self.store.event_list(EventQuery::After(after), BATCH).await?;
        let Some(upto) = events.last().map(|event| event.position) else { return Ok(Round::done(0)) };
        let handled = events.len();
        let batch = Batch { after, upto, events: events.into_iter().map(Arc::new).collect() };
        // Nobody there to hear it: who comes next begins at a place of its own.
        let _ = self.news.send(Arc::new(batch));
        *last = Some(upto);
        Ok(Round { handled, more: handled == BATCH, next_at: None })
    }

    /// Says that events are wanted, unless that was said lately.
    async fn want(&self, now: Timestamp) -> Result<(), StoreError> {
        let mut wanted_at = self.wanted_at.lock().await;
        let fresh = wanted_at.is_some_and(|at| now.ms_since(at) < ms(WANT_AGAIN));
        if fresh && self.store.has_event_subscriptions() {
            return Ok(());
        }
        let until = now.plus_ms(ms(WANTED_FOR));
        let want =
            EventSubscription { name: WISH.into(), types: vec!["*".into()], mode: SubscriptionMode::Keep, until };
        self.store.event_subscribe(vec![want], now).await?;
        *wanted_at = Some(now);
        Ok(())
    }

    /// Whether somebody who has read up to `place` has missed something for good.
    async fn gap_after(&self, place: EventPosition) -> Result<Option<Gap>, StoreError> {
        let Some(span) = self.store.event_range(WISH).await? else { return Ok(None) };
        // A place that was never given out: this is another database, or an older copy of it.
        let foreign = place > span.last;
        let gap = Gap { after: place, first: if foreign { span.last } else { span.after } + 1 };
        Ok((foreign || place < span.after).then_some(gap))
    }
}

/// One subscriber's place among those that there may be.
struct Seat(Arc<Live>);

impl Seat {
    fn take(live: &Arc<Live>) -> Option<Seat> {
        let taken =
            live.watching.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| (n < SUBSCRIBERS).then_some(n + 1));
        taken.ok().map(|_| Seat(live.clone()))
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.watching.fetch_sub(1, Ordering::Relaxed);
    }
}
