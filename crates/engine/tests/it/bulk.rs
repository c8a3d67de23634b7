//! Actions on many jobs, at simulated times.

use std::sync::Arc;

use faena_domain::{BulkId, JobId, JobState, NewJob, Timestamp};
use faena_engine::{Round, bulk};
use faena_store::{Bulk, BulkAction, BulkWork, Filter, NewBulk, Store};

use crate::fixture::{open_postgres, open_sqlite, reopened};

async fn submit(store: &dyn Store, count: usize, now: Timestamp) -> Vec<JobId> {
    let jobs = (0..count).map(|_| NewJob { id: JobId::at(now), ..NewJob::new("unhandled.type") }).collect();
    store.job_submit(jobs, None, now).await.unwrap().iter().map(|job| job.id).collect()
}

async fn begin(
    store: &dyn Store,
    action: BulkAction,
    state: JobState,
    up_to: JobId,
    rate: Option<u32>,
    now: Timestamp,
) -> BulkId {
    let id = BulkId::new();
    let filter = Filter { states: vec![state], ..Filter::default() };
    let work = BulkWork::Jobs { action, filter };
    let bulk = NewBulk { id, work, actor: "ana".into(), per_second: rate, up_to: up_to.0, matched: 0 };
    let due_at = if rate.is_some() { now } else { now.plus_ms(5_000) };
    store.bulk_begin(bulk, due_at, now).await.unwrap();
    id
}

async fn get(store: &dyn Store, id: BulkId) -> Bulk {
    store.bulk_get(id).await.unwrap().unwrap()
}

async fn count_in_state(store: &dyn Store, ids: &[JobId], state: JobState) -> usize {
    let mut count = 0;
    for id in ids {
        count += usize::from(store.job_get(*id).await.unwrap().unwrap().status == state);
    }
    count
}

#[tokio::test(flavor = "multi_thread")]
async fn a_throttled_action_keeps_its_rate_and_finishes() {
    let (store, _database) = open_sqlite().await;
    let now = Timestamp::now();
    let ids = submit(&*store, 25, now).await;
    let id = begin(&*store, BulkAction::Cancel, JobState::Queued, ids[24], Some(10), now).await;
    assert_eq!(bulk::run_once(&*store, now).await.unwrap(), Round { handled: 1, more: true, next_at: None });
    let wait = bulk::run_once(&*store, now.plus_ms(60)).await.unwrap();
    assert_eq!(wait, Round { handled: 0, more: false, next_at: Some(now.plus_ms(100)) });
    for ms in (10..=990).step_by(10) {
        bulk::run_once(&*store, now.plus_ms(ms)).await.unwrap();
    }
    assert_eq!(get(&*store, id).await.done, 10, "in the first second");
    for ms in (1_000..=3_000).step_by(10) {
        bulk::run_once(&*store, now.plus_ms(ms)).await.unwrap();
    }
    let finished = get(&*store, id).await;
    assert_eq!((finished.done, finished.skipped, finished.finished_at), (25, 0, Some(now.plus_ms(2_400))));
    assert_eq!(count_in_state(&*store, &ids, JobState::Cancelled).await, 25);
    assert_eq!(bulk::run_once(&*store, now.plus_ms(9_000)).await.unwrap(), Round::default());
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_submitted_later_are_not_touched() {
    let (store, _database) = open_sqlite().await;
    let now = Timestamp::now();
    let ids = submit(&*store, 3, now).await;
    let id = begin(&*store, BulkAction::Cancel, JobState::Queued, ids[2], Some(10_000), now).await;
    let later = submit(&*store, 3, now.plus_ms(5)).await;
    bulk::run_once(&*store, now.plus_ms(10)).await.unwrap();
    assert!(get(&*store, id).await.finished_at.is_some());
    assert_eq!(count_in_state(&*store, &ids, JobState::Cancelled).await, 3);
    assert_eq!(count_in_state(&*store, &later, JobState::Queued).await, 3);
}

/// Retries cancelled jobs and cancels each again immediately: a job that was processed twice would be counted twice.
async fn run_round_and_cancel(store: &dyn Store, ids: &[JobId], now: Timestamp) {
    bulk::run_once(store, now).await.unwrap();
    for id in ids {
        if store.job_get(*id).await.unwrap().unwrap().status == JobState::Pending {
            store.job_cancel(*id, "again", None, now).await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_action_continues_after_its_process_has_died_and_processes_no_job_twice() {
    let (store, database) = open_sqlite().await;
    let now = Timestamp::now();
    let ids = submit(&*store, 6, now).await;
    for id in &ids {
        store.job_cancel(*id, "", None, now).await.unwrap();
    }
    let id = begin(&*store, BulkAction::Retry, JobState::Cancelled, ids[5], Some(1), now).await;
    for second in 0..3 {
        run_round_and_cancel(&*store, &ids, now.plus_ms(second * 1_000)).await;
    }
    assert_eq!(get(&*store, id).await.done, 3);
    let (store, _database) = reopened(store, database).await;
    for second in 3..20 {
        run_round_and_cancel(&*store, &ids, now.plus_ms(second * 1_000)).await;
    }
    let finished = get(&*store, id).await;
    assert_eq!((finished.done, finished.skipped), (6, 0));
    for id in &ids {
        let log = store.job_get(*id).await.unwrap().unwrap().execution_log;
        assert_eq!(log.iter().filter(|entry| entry.event.as_str() == "retried").count(), 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_rounds_share_an_action_without_doing_it_twice_on_postgres() {
    let (store, _database) = open_postgres().await;
    let now = Timestamp::now();
    let ids = submit(&*store, 40, now).await;
    let id = begin(&*store, BulkAction::Cancel, JobState::Queued, ids[39], Some(100), now).await;
    let other: Arc<dyn Store> = store.clone();
    for ms in (0..2_000).step_by(20) {
        let at = now.plus_ms(ms);
        let (a, b) = tokio::join!(bulk::run_once(&*store, at), bulk::run_once(&*other, at));
        a.unwrap();
        b.unwrap();
    }
    let finished = get(&*store, id).await;
    assert_eq!((finished.done, finished.skipped), (40, 0));
    assert_eq!(count_in_state(&*store, &ids, JobState::Cancelled).await, 40);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_action_whose_caller_died_is_finished_by_a_loop() {
    let (store, _database) = open_sqlite().await;
    let now = Timestamp::now();
    let ids = submit(&*store, 130, now).await;
    let id = begin(&*store, BulkAction::Delete, JobState::Queued, ids[129], None, now).await;
    let early = bulk::run_once(&*store, now.plus_ms(4_999)).await.unwrap();
    assert_eq!((early.handled, early.next_at), (0, Some(now.plus_ms(5_000))), "its caller may still run it");
    assert_eq!(bulk::run_once(&*store, now.plus_ms(5_000)).await.unwrap().handled, 130);
    assert_eq!(get(&*store, id).await.finished_at, Some(now.plus_ms(5_000)));
}
