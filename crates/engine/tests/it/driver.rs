//! The driver keeps every loop running, whatever happens in a round.

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

use crate::fixture::eventually;

fn driver() -> Driver {
    Driver { tasks: TaskTracker::new(), stop: CancellationToken::new(), health: LoopHealth::default() }
}

const NEVER: Duration = Duration::from_secs(3_600);

#[tokio::test]
async fn a_loop_that_panics_or_fails_runs_again_and_its_error_is_visible() {
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
    eventually("a successful round", async || (driver.health.all()["shaky"].handled == 7).then_some(())).await;
    assert_eq!(
        *seen.lock(),
        [
            (0, None),
            (1, Some("panic: out of luck".to_owned())),
            (2, Some("the database is not available: away".to_owned())),
        ]
    );
    let status = driver.health.all()["shaky"].clone();
    assert_eq!((status.failures, status.last_error), (0, None), "a successful round clears the failures");
}

#[tokio::test]
async fn a_wake_up_starts_a_round_and_none_is_lost_during_a_round() {
    let driver = driver();
    let (wakeup, gate, rounds) = (Arc::new(Notify::new()), Arc::new(Notify::new()), Arc::new(AtomicU32::new(0)));
    let (barrier, counted) = (gate.clone(), rounds.clone());
    driver.start("woken", NEVER, wakeup.clone(), move |_| {
        let (barrier, counted) = (barrier.clone(), counted.clone());
        async move {
            barrier.notified().await;
            counted.fetch_add(1, Ordering::Relaxed);
            Ok(Round::default())
        }
    });
    eventually("the first round has started", async || driver.health.all()["woken"].busy_since).await;
    wakeup.notify_one();
    gate.notify_one();
    eventually("the first round has ended", async || (rounds.load(Ordering::Relaxed) == 1).then_some(())).await;
    gate.notify_one();
    eventually("the wake-up starts a round", async || (rounds.load(Ordering::Relaxed) == 2).then_some(())).await;
}

#[tokio::test]
async fn more_work_starts_a_round_immediately_and_a_due_time_is_kept() {
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
    assert!(times[4].ms_since(times[3]) >= 50, "a timer fired early: {times:?}");
    driver.stop.cancel();
    driver.tasks.close();
    driver.tasks.wait().await;
    assert!(driver.health.all()["busy"].stopped, "a loop that has ended is visible");
}
