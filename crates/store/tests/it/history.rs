//! History: what happened to jobs is counted once, and outlives the jobs, restarts and lost nodes.

use std::collections::BTreeMap;

use faena_domain::{ErrorReason, JobState, NewJob, NodeId, Priority, Timestamp, WorkerState};
use faena_store::{
    HistoryCutoffs, HistoryEntry, HistoryMeasure, HistoryPeriod, HistoryQuery, JobPatch, JobTotal, NodeInfo, Retention,
    RunOutcome, StoreOptions, TimingCount, WorkerEntry,
};

use crate::support::{Fixture, JobBuilder, LEASE_MS, RawDatabase};

const HOUR: i64 = 3_600_000;
const DAY: i64 = 24 * HOUR;

async fn totals(fixture: &Fixture) -> BTreeMap<JobTotal, i64> {
    let counts = fixture.store.counts().await.unwrap();
    JobTotal::ALL
        .into_iter()
        .map(|total| (total, counts.lanes().map(|lane| counts.so_far(lane, total)).sum()))
        .collect()
}

async fn record(fixture: &Fixture, ms: i64) -> usize {
    fixture.store.history_record(Vec::new(), fixture.at(ms)).await.unwrap()
}

async fn list(fixture: &Fixture, period: HistoryPeriod, queues: Option<Vec<String>>) -> Vec<HistoryEntry> {
    let query =
        HistoryQuery { period, from: Timestamp::from_ms(0), until: fixture.at(1_000 * DAY), queues, by_queue: true };
    fixture.store.history_list(query).await.unwrap()
}

/// Returns the sum of a total over the whole history.
async fn recorded(fixture: &Fixture, period: HistoryPeriod, total: JobTotal) -> i64 {
    let all = list(fixture, period, None).await;
    all.iter().filter(|entry| entry.measure == HistoryMeasure::Total(total)).map(|entry| entry.n).sum()
}

fn timeout() -> RunOutcome {
    RunOutcome::Failed { error: "too slow".into(), reason: ErrorReason::Timeout }
}

pub async fn totals_count_every_event_once_and_outlive_the_jobs(fixture: &Fixture) {
    // One completes, one fails, one fails after a retry by timeout, one is cancelled, one expires, one is deleted.
    fixture.complete(&fixture.submit_and_claim(fixture.job("a", 0)).await, 1).await;
    fixture.fail(&fixture.submit_and_claim(fixture.job("a", 0)).await, 1).await;
    let slow = fixture.submit_and_claim(fixture.job("a", 0)).await;
    fixture.retry_at(&slow, 5, 1).await;
    fixture.promote(5).await;
    let again = fixture.claim_one(5).await;
    assert!(fixture.end(&again, timeout(), 6).await);
    let cancelled = fixture.submit(fixture.job("a", 0)).await;
    fixture.cancel(cancelled, 1).await;
    let mut expiring = fixture.job("a", 0);
    expiring.options.expires_at = Some(fixture.at(10));
    fixture.submit(expiring).await;
    fixture.promote(20).await;
    let deleted = fixture.submit(fixture.job("a", 0)).await;
    fixture.store.job_delete(deleted, None, fixture.at(21)).await.unwrap();
    let expected: BTreeMap<JobTotal, i64> = [
        (JobTotal::Created, 6),
        (JobTotal::Completed, 1),
        (JobTotal::Failed, 3),
        (JobTotal::Cancelled, 1),
        (JobTotal::TimedOut, 2),
        (JobTotal::RunFailed, 3),
    ]
    .into();
    assert_eq!(totals(fixture).await, expected);
    let retention = Retention { completed_ms: 0, failed_ms: 0, cancelled_ms: 0, ..Retention::default() };
    fixture.store.job_prune(&retention, 100, fixture.at(1_000)).await.unwrap();
    assert_eq!(fixture.list(Default::default()).await, []);
    assert_eq!(totals(fixture).await, expected);
}

pub async fn a_retried_job_fails_twice_and_is_created_once(fixture: &Fixture) {
    let job = fixture.submit_and_claim(fixture.job("a", 0)).await;
    fixture.fail(&job, 1).await;
    fixture.retry_manually(job.id, 2).await;
    fixture.promote(3).await;
    fixture.fail(&fixture.claim_one(4).await, 5).await;
    let totals = totals(fixture).await;
    assert_eq!((totals[&JobTotal::Created], totals[&JobTotal::Failed]), (1, 2));
}

pub async fn the_history_counts_by_hour_and_by_day(fixture: &Fixture) {
    let first = HistoryPeriod::Day.start(fixture.at(0)).plus_ms(2 * DAY).ms_since(fixture.start);
    fixture.submit(NewJob { queue: "mail".into(), ..fixture.job("a", first) }).await;
    record(fixture, first + 10).await;
    fixture.submit_all((0..2).map(|_| NewJob { queue: "mail".into(), ..fixture.job("a", first) }).collect()).await;
    record(fixture, first + HOUR).await;
    fixture.submit(NewJob { queue: "mail".into(), ..fixture.job("a", first) }).await;
    record(fixture, first + DAY).await;
    let shown = |entries: Vec<HistoryEntry>| -> Vec<(i64, i64)> {
        entries.iter().map(|entry| (entry.starts_at.ms_since(fixture.at(first)), entry.n)).collect()
    };
    assert_eq!(shown(list(fixture, HistoryPeriod::Hour, None).await), [(0, 1), (HOUR, 2), (DAY, 1)]);
    assert_eq!(shown(list(fixture, HistoryPeriod::Day, None).await), [(0, 3), (DAY, 1)]);
}

pub async fn minutes_have_totals_and_no_measured_times(fixture: &Fixture) {
    let first = HistoryPeriod::Day.start(fixture.at(0)).plus_ms(2 * DAY).ms_since(fixture.start);
    let minute = HistoryPeriod::Minute.ms();
    fixture.complete(&fixture.submit_and_claim(fixture.job("a", first)).await, first + 1).await;
    let lane = fixture.store.lanes().await.unwrap()[0].id;
    let timings = vec![TimingCount { lane, measure: HistoryMeasure::Run, bucket: 3, n: 1 }];
    fixture.store.history_record(timings, fixture.at(first + minute - 1)).await.unwrap();
    fixture.submit(fixture.job("a", first + minute)).await;
    record(fixture, first + minute).await;
    let entries = list(fixture, HistoryPeriod::Minute, None).await;
    let shown: Vec<_> =
        entries.iter().map(|entry| (entry.starts_at.ms_since(fixture.at(first)), entry.measure, entry.n)).collect();
    let total = HistoryMeasure::Total;
    let expected = [(0, total(JobTotal::Created), 1), (0, total(JobTotal::Completed), 1)];
    assert_eq!(shown[..2], expected);
    assert_eq!(shown[2..], [(minute, total(JobTotal::Created), 1)]);
    let hours = list(fixture, HistoryPeriod::Hour, None).await;
    assert!(hours.iter().any(|entry| entry.measure == HistoryMeasure::Run), "hours have them");
}

pub async fn completed_jobs_are_recorded_by_priority(fixture: &Fixture) {
    for priority in [Priority::Low, Priority::Critical, Priority::Critical] {
        let job = fixture.submit_and_claim(fixture.job("a", 0).priority(priority)).await;
        fixture.complete(&job, 1).await;
    }
    let patched = fixture.submit(fixture.job("a", 0)).await;
    record(fixture, 2).await;
    fixture.patch(patched, JobPatch { priority: Some(Priority::High), ..JobPatch::default() }, 3).await;
    record(fixture, 4).await;
    let completed = HistoryMeasure::Total(JobTotal::Completed);
    let entries = list(fixture, HistoryPeriod::Day, None).await.into_iter();
    let by_priority: BTreeMap<i16, i64> =
        entries.filter(|entry| entry.measure == completed).map(|entry| (entry.bucket, entry.n)).collect();
    assert_eq!(by_priority, [(Priority::Low.rank(), 1), (Priority::Critical.rank(), 2)].into());
    assert_eq!(recorded(fixture, HistoryPeriod::Day, JobTotal::Created).await, 4, "a changed priority creates no job");
}

pub async fn an_idle_recording_writes_nothing(fixture: &Fixture) {
    fixture.submit(fixture.job("a", 0)).await;
    assert!(record(fixture, 1).await > 0);
    assert_eq!(record(fixture, 2).await, 0);
}

pub async fn measured_times_are_added_up(fixture: &Fixture) {
    let lane = fixture.submit_and_claim(fixture.job("a", 0)).await.lane;
    let timing = |measure, bucket, n| TimingCount { lane, measure, bucket, n };
    let timings = vec![timing(HistoryMeasure::Wait, 3, 2), timing(HistoryMeasure::WaitMs, 0, 25)];
    for ms in [1, 2] {
        fixture.store.history_record(timings.clone(), fixture.at(ms)).await.unwrap();
    }
    let entries = list(fixture, HistoryPeriod::Hour, None).await.into_iter();
    let times: Vec<_> = entries
        .filter(|entry| !matches!(entry.measure, HistoryMeasure::Total(_)))
        .map(|entry| (entry.measure, entry.bucket, entry.n))
        .collect();
    assert_eq!(times, [(HistoryMeasure::Wait, 3, 4), (HistoryMeasure::WaitMs, 0, 50)]);
}

pub async fn a_restart_neither_loses_nor_repeats_history(fixture: &Fixture) {
    fixture.submit(fixture.job("a", 0)).await;
    record(fixture, 1).await;
    fixture.submit(fixture.job("a", 2)).await;
    let next = fixture.reopen(StoreOptions::default()).await;
    record(&next, 3).await;
    record(&next, 4).await;
    assert_eq!(recorded(&next, HistoryPeriod::Hour, JobTotal::Created).await, 2);
    next.store.close().await;
}

pub async fn nodes_that_record_at_the_same_time_count_once(fixture: &Fixture) {
    let other = fixture.reopen(StoreOptions::default()).await;
    for ms in 0..20 {
        other.submit(other.job("a", ms)).await;
        let both = [other.store.clone(), if is_shared(fixture) { fixture.store.clone() } else { other.store.clone() }];
        let [one, two] = both.map(|store| async move { store.history_record(Vec::new(), fixture.at(ms)).await });
        let (one, two) = tokio::join!(one, two);
        assert_eq!(one.unwrap() + two.unwrap(), 1, "one of them recorded it");
    }
    assert_eq!(recorded(&other, HistoryPeriod::Day, JobTotal::Created).await, 20);
    other.store.close().await;
}

fn is_shared(fixture: &Fixture) -> bool {
    matches!(fixture.database, RawDatabase::Postgres { .. })
}

pub async fn the_history_outlives_the_jobs_until_its_own_retention(fixture: &Fixture) {
    fixture.complete(&fixture.submit_and_claim(fixture.job("a", 0)).await, 1).await;
    record(fixture, 2).await;
    let retention = Retention { completed_ms: 0, ..Retention::default() };
    fixture.store.job_prune(&retention, 100, fixture.at(DAY)).await.unwrap();
    record(fixture, DAY).await;
    assert_eq!(recorded(fixture, HistoryPeriod::Hour, JobTotal::Completed).await, 1);
    let prune = |minutes: i64, hours: i64, days: i64| {
        let [minutes, hours, days] = [minutes, hours, days].map(|at| fixture.at(at));
        fixture.store.history_prune(HistoryCutoffs { minutes, hours, days }, 100)
    };
    assert_eq!(prune(-DAY, -DAY, -DAY).await.unwrap(), 0);
    assert_eq!(prune(DAY, -DAY, -DAY).await.unwrap(), 2, "created and completed");
    assert_eq!(recorded(fixture, HistoryPeriod::Minute, JobTotal::Completed).await, 0);
    assert_eq!(recorded(fixture, HistoryPeriod::Hour, JobTotal::Completed).await, 1, "hours are kept longer");
    assert_eq!(prune(DAY, DAY, -DAY).await.unwrap(), 2, "created and completed");
    assert_eq!(recorded(fixture, HistoryPeriod::Hour, JobTotal::Completed).await, 0);
    assert_eq!(recorded(fixture, HistoryPeriod::Day, JobTotal::Completed).await, 1, "days are kept longer");
    prune(2 * DAY, 2 * DAY, 2 * DAY).await.unwrap();
    assert_eq!(list(fixture, HistoryPeriod::Day, None).await, []);
}

pub async fn the_history_of_some_queues_contains_no_others(fixture: &Fixture) {
    for queue in ["mail", "billing"] {
        fixture.submit(NewJob { queue: queue.into(), ..fixture.job("a", 0) }).await;
    }
    record(fixture, 1).await;
    let entries = list(fixture, HistoryPeriod::Hour, Some(vec!["mail".into(), "none".into()])).await;
    assert_eq!(entries.iter().map(|entry| entry.queue.as_str()).collect::<Vec<_>>(), ["mail"]);
    let (period, from, until) = (HistoryPeriod::Hour, Timestamp::from_ms(0), fixture.at(DAY));
    let sum = HistoryQuery { period, from, until, queues: None, by_queue: false };
    let sum = fixture.store.history_list(sum).await.unwrap();
    assert_eq!(sum.iter().map(|entry| (entry.queue.as_str(), entry.n)).collect::<Vec<_>>(), [("", 2)]);
}

pub async fn jobs_in_flight_are_counted_by_state(fixture: &Fixture) {
    fixture.submit_all((0..5).map(|_| fixture.job("a", 0)).collect()).await;
    let started = fixture.claim(2, 1).await;
    fixture.report_start(&started[0], 2).await;
    let starting = WorkerEntry { state: WorkerState::Creating, ..fixture.worker("starting") };
    let starting = fixture.admit(starting, 3).await;
    assert_eq!(fixture.claim_by(&starting, 2, 4).await.len(), 2);
    let counts = fixture.store.in_flight_counts().await.unwrap();
    let count = |state| counts.iter().filter(|count| count.state == state).map(|count| count.count).sum::<i64>();
    assert_eq!((count(JobState::Processing), count(JobState::Scheduled)), (1, 2));
    let by_state = fixture.store.worker_counts().await.unwrap();
    assert_eq!(by_state, [(WorkerState::Creating, 1)].into());
}

pub async fn one_node_has_the_lease_of_the_metrics(fixture: &Fixture) {
    const LEASE: i64 = 10_000;
    let lease = |node: NodeId, ms: i64| fixture.store.metrics_lease(node, LEASE, fixture.at(ms));
    assert!(lease(fixture.node, 0).await.unwrap());
    if !is_shared(fixture) {
        return;
    }
    let other = NodeId::new();
    fixture.store.node_join(NodeInfo { id: other, name: "b".into() }, 10 * LEASE_MS, fixture.at(0)).await.unwrap();
    assert!(!lease(other, 1).await.unwrap());
    assert!(lease(fixture.node, 6_000).await.unwrap(), "renewed");
    assert!(!lease(other, 15_000).await.unwrap());
    assert!(lease(other, 16_001).await.unwrap(), "the lease has ended");
    assert!(!lease(fixture.node, 16_002).await.unwrap());
    let grace = crate::support::GRACE_PERIODS;
    fixture.store.node_leave(other, grace, fixture.at(16_003)).await.unwrap();
    assert!(lease(fixture.node, 16_004).await.unwrap(), "the other node has left");
}
