//! Reading events: none is skipped, none comes twice, and the range that is kept is known.

use std::{collections::HashMap, sync::Arc};

use faena_domain::{JobId, NewJob, Timestamp};
use faena_store::{
    EventPosition, EventQuery, EventRange, EventSubscription, Store, StoreOptions, StoredEvent, SubscriptionMode,
};
use uuid::Uuid;

use crate::support::World;

pub const NAME: &str = "live";

pub fn mode(until: Timestamp) -> EventSubscription {
    EventSubscription { name: NAME.into(), types: vec!["*".into()], mode: SubscriptionMode::Keep, until }
}

/// A reader that continues from its position.
pub struct Follower {
    place: EventPosition,
    pub seen: Vec<StoredEvent>,
}

impl Follower {
    pub async fn at_the_end(store: &dyn Store) -> Follower {
        Follower { place: store.event_end().await.unwrap(), seen: Vec::new() }
    }

    /// A small step, so that many writers commit between two.
    pub async fn read(&mut self, store: &dyn Store) {
        let events = store.event_list(EventQuery::After(self.place), 7).await.unwrap();
        self.place = events.last().map_or(self.place, |event| event.position);
        self.seen.extend(events);
    }

    pub async fn read_until(&mut self, store: &dyn Store, count: usize) {
        while self.seen.len() < count {
            self.read(store).await;
            tokio::task::yield_now().await;
        }
    }

    /// Checks the order of positions, that none comes twice, and the order of each subject.
    pub fn prove(&self) {
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
        store.job_submit(batch, Timestamp::now()).await.unwrap();
        for id in ids {
            store.job_cancel(id, "done with", Some("writer"), Timestamp::now()).await.unwrap();
        }
    }
}

/// Number of events of `write`: each job is created, ready and cancelled.
pub fn told_by(jobs: i64) -> usize {
    (0..jobs).map(|n| 3 * (n % 3 + 1)).sum::<i64>() as usize
}

pub async fn a_reader_sees_every_event_once_and_each_subject_in_order_while_many_write(world: &World) {
    world.store.event_subscribe(vec![mode(Timestamp::MAX)], world.at(0)).await.unwrap();
    let mut stores = vec![world.store.clone(); 4];
    let others = if world.store.engine() == "postgres" {
        vec![world.reopen(StoreOptions::default()).await, world.reopen(StoreOptions::default()).await]
    } else {
        Vec::new()
    };
    stores.extend(others.iter().map(|other| other.store.clone()));
    let mut follower = Follower::at_the_end(&*world.store).await;
    let expected = stores.len() * told_by(30);
    let writers: Vec<_> =
        stores.into_iter().zip(1..).map(|(store, writer)| tokio::spawn(write(store, writer, 30))).collect();
    follower.read_until(&*world.store, expected).await;
    for writer in writers {
        writer.await.unwrap();
    }
    follower.read(&*world.store).await;
    assert_eq!(follower.seen.len(), expected, "nothing comes twice");
    follower.prove();
    for other in others {
        other.store.close().await;
    }
}

async fn span(world: &World) -> EventRange {
    world.store.event_range(NAME).await.unwrap().unwrap()
}

pub async fn events_without_a_subscription_are_outside_the_kept_range(world: &World) {
    assert_eq!(world.store.event_range(NAME).await.unwrap(), None);
    world.store.event_subscribe(vec![mode(world.at(1_000))], world.at(0)).await.unwrap();
    world.submit(world.job("mail", 0)).await;
    let read_up_to = world.store.event_end().await.unwrap();
    assert!(span(world).await.after < read_up_to, "nothing is missing");
    world.store.event_settle(world.at(0), 100, world.at(1_000)).await.unwrap();
    world.submit(world.job("mail", 1_100)).await;
    world.store.event_subscribe(vec![mode(world.at(3_000))], world.at(2_000)).await.unwrap();
    assert!(read_up_to < span(world).await.after, "a job was made in between");
    let read_up_to = world.store.event_end().await.unwrap();
    world.submit(world.job("mail", 2_100)).await;
    assert!(span(world).await.after <= read_up_to, "who came afterwards misses nothing");
    assert_eq!(world.store.event_list(EventQuery::After(read_up_to), 10).await.unwrap().len(), 2);
}

pub async fn pruned_events_are_outside_the_kept_range(world: &World) {
    world.store.event_subscribe(vec![mode(Timestamp::MAX)], world.at(0)).await.unwrap();
    let begin = world.store.event_end().await.unwrap();
    world.submit_all(vec![world.job("mail", 0), world.job("mail", 0)]).await;
    let events = world.store.event_list(EventQuery::After(begin), 10).await.unwrap();
    assert_eq!(events.len(), 4);
    let ahead = Timestamp::now().plus_ms(60_000);
    assert_eq!(world.store.event_settle(ahead, 3, world.at(1)).await.unwrap(), 3);
    let left = world.store.event_list(EventQuery::After(0), 10).await.unwrap();
    assert_eq!(left.len(), 1);
    let kept = span(world).await;
    assert!(begin < kept.after, "who stopped at the beginning has missed something");
    assert!(kept.after <= events[3].position && kept.last >= events[3].position, "{kept:?} {left:?}");
}

pub async fn a_renewed_subscription_keeps_its_range(world: &World) {
    world.store.event_subscribe(vec![mode(world.at(1_000))], world.at(0)).await.unwrap();
    let before = span(world).await;
    for ms in [10, 500, 900] {
        world.store.event_subscribe(vec![mode(world.at(ms + 1_000))], world.at(ms)).await.unwrap();
    }
    assert_eq!(span(world).await, before, "and no place is used up");
}
