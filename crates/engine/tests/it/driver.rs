//! The driver keeps every loop going, whatever happens in a round.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use faena_engine::{Driver, LoopHealth, Round};
use faena_store::StoreError;
use tokio::sync::Notify;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::world::eventually;

fn driver() -> Driver {
    Driver { tasks: TaskTracker::new(), stop: CancellationToken::new(), health: LoopHealth::default() }
}

const NEVER: Duration = Duration::from_secs(3_600);

#[tokio::test]
async fn a_loop_that_panics_or_fails_is_driven_on_and_its_trouble_is_seen() {
    let driver = driver();
    let rounds = Arc::new(AtomicU32::new(0));
    let counted = rounds.clone();
    let (seen, health) = (Arc::new(parking_lot::Mutex::new(Vec::new())), driver.health.clone());
    let watched = seen.clone();
    driver.start("shaky", NEVER, Arc::new(Notify::new()), move |_| {
        let status = health.all()["shaky"].clone();
        watched.lock().push((status.failures, status.last_error));
        let round = counted.fetch_add(1, Ordering::Relaxed);
        async move {
            match round {
                0 => panic!("out of luck"),
                1 => Err(StoreError::Unavailable("away".into()).into()),
                _ => Ok(Round::done(7)),
            }
        }
    });
    eventually("a good round", async || (driver.health.all()["shaky"].handled == 7).then_some(())).await;
    assert_eq!(
        *seen.lock(),
        [
            (0, None),
            (1, Some("panic: out of luck".to_owned())),
            (2, Some("the database is not available: away".to_owned())),
        ]
    );
    let status = driver.health.all()["shaky"].clone();
    assert_eq!((status.failures, status.last_error), (0, None), "a good round wipes the slate clean");
}

#[tokio::test]
async fn a_nudge_brings_a_round_and_none_is_lost_while_one_is_under_way() {
    let driver = driver();
    let (nudge, gate, rounds) = (Arc::new(Notify::new()), Arc::new(Notify::new()), Arc::new(AtomicU32::new(0)));
    let (held, counted) = (gate.clone(), rounds.clone());
    driver.start("nudged", NEVER, nudge.clone(), move |_| {
        let (held, counted) = (held.clone(), counted.clone());
        async move {
            held.notified().await;
            counted.fetch_add(1, Ordering::Relaxed);
            Ok(Round::default())
        }
    });
    eventually("the first round is under way", async || driver.health.all()["nudged"].busy_since).await;
    nudge.notify_one();
    gate.notify_one();
    eventually("the first round is over", async || (rounds.load(Ordering::Relaxed) == 1).then_some(())).await;
    gate.notify_one();
    eventually("the nudge is heard", async || (rounds.load(Ordering::Relaxed) == 2).then_some(())).await;
}

#[tokio::test]
async fn more_means_at_once_and_a_next_time_is_kept() {
    let driver = driver();
    let times = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let kept = times.clone();
    driver.start("busy", NEVER, Arc::new(Notify::new()), move |now| {
        let round = kept.lock().len();
        kept.lock().push(now);
        async move {
            match round {
                0..3 => Ok(Round { handled: 1, more: true, next_at: None }),
                3 => Ok(Round { handled: 0, more: false, next_at: Some(now.plus_ms(50)) }),
                _ => Ok(Round::default()),
            }
        }
    });
    eventually("five rounds", async || (times.lock().len() == 5).then_some(())).await;
    let times = times.lock().clone();
    assert!(times[4].ms_since(times[3]) >= 50, "no timer early: {times:?}");
    driver.stop.cancel();
    driver.tasks.close();
    driver.tasks.wait().await;
    assert!(driver.health.all()["busy"].stopped, "a loop that has ended is seen");
}
