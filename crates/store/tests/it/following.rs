//! Reading events: no event is skipped or read twice, and the kept range is known.

use std::{collections::HashMap, sync::Arc};

use faena_domain::{JobId, NewJob, Timestamp};
use faena_store::{
    EventPosition, EventQuery, EventRange, EventSubscription, Store, StoreOptions, StoredEvent, SubscriptionMode,
};
use uuid::Uuid;

use crate::support::Fixture;

pub const NAME: &str = "live";

pub fn subscription(until: Timestamp) -> EventSubscription {
    EventSubscription { name: NAME.into(), types: vec!["*".into()], mode: SubscriptionMode::Keep, until }
}

/// A reader that continues from its position.
pub struct Follower {
    position: EventPosition,
    pub seen: Vec<StoredEvent>,
}

impl Follower {
    pub async fn at_last_position(store: &dyn Store) -> Follower {
        Follower { position: store.event_last_position().await.unwrap(), seen: Vec::new() }
    }

    /// Reads a few events, so that many writers commit between two reads.
    pub async fn read(&mut self, store: &dyn Store) {
        let events = store.event_list(EventQuery::After(self.position), 7).await.unwrap();
        self.position = events.last().map_or(self.position, |event| event.position);
        self.seen.extend(events);
    }

    pub async fn read_until(&mut self, store: &dyn Store, count: usize) {
        while self.seen.len() < count {
            self.read(store).await;
            tokio::task::yield_now().await;
        }
    }

    /// Checks that positions are ordered, and that the sequence of each subject has no gap or repetition.
    pub fn assert_consistent(&self) {
        assert!(self.seen.is_sorted_by_key(|event| event.position));
        let mut sequences: HashMap<Uuid, i64> = HashMap::new();
        for event in &self.seen {
            let last = sequences.insert(event.subject, event.sequence).unwrap_or(0);
            assert_eq!(event.sequence, last + 1, "{event:?}");
        }
    }
}

/// Creates jobs and cancels them, some of them together.
pub async fn write(store: Arc<dyn Store>, writer: i64, jobs: i64) {
    for n in 0..jobs {
        let ids: Vec<JobId> = (0..=n % 3).map(|_| JobId::new()).collect();
        let batch = ids.iter().map(|id| NewJob { id: *id, ..NewJob::new(format!("kind-{writer}")) }).collect();
        store.job_submit(batch, None, Timestamp::now()).await.unwrap();
        for id in ids {
            store.job_cancel(id, "done with", Some("writer"), Timestamp::now()).await.unwrap();
        }
    }
}

/// Returns the number of events that `write` causes: each job is created, ready and cancelled.
pub fn event_count(jobs: i64) -> usize {
    (0..jobs).map(|n| 3 * (n % 3 + 1)).sum::<i64>() as usize
}

pub async fn a_reader_sees_every_event_once_and_each_subject_in_order_while_many_write(fixture: &Fixture) {
    fixture.store.event_subscribe(vec![subscription(Timestamp::MAX)], fixture.at(0)).await.unwrap();
    let mut stores = vec![fixture.store.clone(); 4];
    let others = if fixture.store.database_kind() == "postgres" {
        vec![fixture.reopen(StoreOptions::default()).await, fixture.reopen(StoreOptions::default()).await]
    } else {
        Vec::new()
    };
    stores.extend(others.iter().map(|other| other.store.clone()));
    let mut follower = Follower::at_last_position(&*fixture.store).await;
    let expected = stores.len() * event_count(30);
    let writers: Vec<_> =
        stores.into_iter().zip(1..).map(|(store, writer)| tokio::spawn(write(store, writer, 30))).collect();
    follower.read_until(&*fixture.store, expected).await;
    for writer in writers {
        writer.await.unwrap();
    }
    follower.read(&*fixture.store).await;
    assert_eq!(follower.seen.len(), expected, "no event is read twice");
    follower.assert_consistent();
    for other in others {
        other.store.close().await;
    }
}

async fn kept_range(fixture: &Fixture) -> EventRange {
    fixture.store.event_range(NAME).await.unwrap().unwrap()
}

pub async fn events_without_a_subscription_are_outside_the_kept_range(fixture: &Fixture) {
    assert_eq!(fixture.store.event_range(NAME).await.unwrap(), None);
    fixture.store.event_subscribe(vec![subscription(fixture.at(1_000))], fixture.at(0)).await.unwrap();
    fixture.submit(fixture.job("mail", 0)).await;
    let read_up_to = fixture.store.event_last_position().await.unwrap();
    assert!(kept_range(fixture).await.after < read_up_to, "nothing is missing");
    fixture.store.event_prune(fixture.at(0), 100, fixture.at(1_000)).await.unwrap();
    fixture.submit(fixture.job("mail", 1_100)).await;
    fixture.store.event_subscribe(vec![subscription(fixture.at(3_000))], fixture.at(2_000)).await.unwrap();
    assert!(read_up_to < kept_range(fixture).await.after, "a job was created in between");
    let read_up_to = fixture.store.event_last_position().await.unwrap();
    fixture.submit(fixture.job("mail", 2_100)).await;
    assert!(kept_range(fixture).await.after <= read_up_to, "a reader that starts afterwards misses nothing");
    assert_eq!(fixture.store.event_list(EventQuery::After(read_up_to), 10).await.unwrap().len(), 2);
}

pub async fn pruned_events_are_outside_the_kept_range(fixture: &Fixture) {
    fixture.store.event_subscribe(vec![subscription(Timestamp::MAX)], fixture.at(0)).await.unwrap();
    let begin = fixture.store.event_last_position().await.unwrap();
    fixture.submit_all(vec![fixture.job("mail", 0), fixture.job("mail", 0)]).await;
    let events = fixture.store.event_list(EventQuery::After(begin), 10).await.unwrap();
    assert_eq!(events.len(), 4);
    let ahead = Timestamp::now().plus_ms(60_000);
    assert_eq!(fixture.store.event_prune(ahead, 3, fixture.at(1)).await.unwrap(), 3);
    let left = fixture.store.event_list(EventQuery::After(0), 10).await.unwrap();
    assert_eq!(left.len(), 1);
    let kept = kept_range(fixture).await;
    assert!(begin < kept.after, "a reader that stopped at the beginning has missed events");
    assert!(kept.after <= events[3].position && kept.last >= events[3].position, "{kept:?} {left:?}");
}

pub async fn a_renewed_subscription_keeps_its_range(fixture: &Fixture) {
    fixture.store.event_subscribe(vec![subscription(fixture.at(1_000))], fixture.at(0)).await.unwrap();
    let before = kept_range(fixture).await;
    for ms in [10, 500, 900] {
        fixture.store.event_subscribe(vec![subscription(fixture.at(ms + 1_000))], fixture.at(ms)).await.unwrap();
    }
    assert_eq!(kept_range(fixture).await, before, "a renewal uses no position");
}
