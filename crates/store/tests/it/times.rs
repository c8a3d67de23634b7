//! Time: jobs that become due, expire or are pruned, and how nodes learn about them.

use std::collections::HashSet;

use faena_domain::{ErrorReason, JobId, JobState};
use faena_store::{Retention, Signal};

use crate::support::*;

const MINUTE_MS: i64 = 60_000;

pub async fn delayed_jobs_become_ready_in_the_order_of_their_times(fixture: &Fixture) {
    let mut wanted: Vec<(i64, JobId)> = Vec::new();
    for (n, due) in [700, 300, 900, 100, 500].into_iter().enumerate() {
        let job = fixture.job("later", i64::try_from(n).unwrap()).scheduled(fixture.at(due));
        wanted.push((due, fixture.submit(job).await));
    }
    wanted.sort_unstable();
    assert_eq!(fixture.promote(750).await.promoted, 4);
    let order: Vec<JobId> = fixture.claim(10, 750).await.iter().map(|job| job.id).collect();
    assert_eq!(order, wanted[..4].iter().map(|(_, id)| *id).collect::<Vec<_>>());
}

pub async fn a_promotion_is_bounded_and_reports_that_more_is_due(fixture: &Fixture) {
    let jobs = (0..25).map(|n| fixture.job("later", 0).scheduled(fixture.at(100 + n))).collect();
    fixture.submit_all(jobs).await;
    let mut handled = Vec::new();
    loop {
        let due = fixture.store.job_promote(10, fixture.at(1_000)).await.unwrap();
        handled.push(due.promoted);
        if !due.more {
            break;
        }
    }
    assert_eq!(handled, [10, 10, 5]);
}

pub async fn the_next_due_time_is_returned(fixture: &Fixture) {
    assert_eq!(fixture.promote(0).await.next_at, None);
    fixture.submit(fixture.job("a", 0).scheduled(fixture.at(500))).await;
    assert_eq!(fixture.promote(1).await.next_at, Some(fixture.at(500)));
    let expiring = fixture.submit(fixture.job("b", 0).expires(fixture.at(300))).await;
    assert_eq!(fixture.promote(1).await.next_at, Some(fixture.at(300)));
    assert_eq!(fixture.store.poll(fixture.node, fixture.at(0)).await.unwrap().next_due_at, Some(fixture.at(300)));
    fixture.cancel(expiring, 2).await;
    assert_eq!(fixture.promote(3).await.next_at, Some(fixture.at(500)), "nothing is left to expire");
    assert_eq!(fixture.promote(500).await.next_at, None);
}

pub async fn a_ready_job_expires(fixture: &Fixture) {
    let id = fixture.submit(fixture.job("a", 0).expires(fixture.at(100))).await;
    assert_eq!(fixture.promote(99).await.expired, 0);
    assert_eq!(fixture.promote(100).await.expired, 1);
    let view = fixture.get(id).await;
    assert_eq!((view.status, view.error_reason), (JobState::Failed, Some(ErrorReason::Expired)));
    assert_eq!(fixture.events(id).await, ["created", "queued", "expired"]);
    assert!(fixture.claim(1, 101).await.is_empty());
}

pub async fn a_waiting_job_expires(fixture: &Fixture) {
    let parent = fixture.submit_and_claim(fixture.job("parent", 0)).await;
    let delayed = fixture.submit(fixture.job("a", 1).scheduled(fixture.at(1_000)).expires(fixture.at(100))).await;
    let blocked = fixture.submit(fixture.job("b", 1).after(&[parent.id]).expires(fixture.at(100))).await;
    let retrying = fixture.submit_and_claim(fixture.job("c", 1).expires(fixture.at(100))).await;
    fixture.retry_at(&retrying, 500, 2).await;

    assert_eq!(fixture.promote(100).await.expired, 3);

    assert_eq!(fixture.states([delayed, blocked, retrying.id]).await, [JobState::Failed; 3]);
    fixture.complete(&parent, 101).await;
    assert_eq!(fixture.state(blocked).await, JobState::Failed, "its parent does not release it any more");
}

pub async fn a_running_job_does_not_expire_while_it_runs(fixture: &Fixture) {
    let assigned = fixture.submit_and_claim(fixture.job("a", 0).expires(fixture.at(100))).await;
    let started = fixture.submit_and_claim(fixture.job("b", 1).expires(fixture.at(100))).await;
    fixture.report_start(&started, 2).await;
    assert_eq!(fixture.promote(200).await.expired, 0);
    assert_eq!(fixture.states([assigned.id, started.id]).await, [JobState::Assigned, JobState::Processing]);
    fixture.complete(&assigned, 201).await;
    fixture.complete(&started, 201).await;
    assert_eq!(fixture.promote(300).await.next_at, None);
}

pub async fn a_job_that_is_requeued_after_its_expiry_expires(fixture: &Fixture) {
    let retried = fixture.submit_and_claim(fixture.job("a", 0).expires(fixture.at(100))).await;
    let returned = fixture.submit_and_claim(fixture.job("b", 1).expires(fixture.at(100))).await;
    let lost = fixture.submit(fixture.job("c", 2).expires(fixture.at(100))).await;
    fixture.claim_as(faena_domain::NodeId::new(), 1, 2).await;
    assert_eq!(fixture.promote(200).await.expired, 0);
    fixture.retry_at(&retried, 1_000, 201).await;
    fixture.release(&returned, 201).await;
    fixture.recover(1_000, 201).await;

    assert_eq!(fixture.promote(202).await.expired, 3);
    assert_eq!(fixture.states([retried.id, returned.id, lost]).await, [JobState::Failed; 3]);
}

pub async fn a_retried_expired_job_runs(fixture: &Fixture) {
    let expired = fixture.submit(fixture.job("a", 0).expires(fixture.at(100))).await;
    fixture.promote(100).await;
    fixture.retry_manually(expired, 200).await;
    assert_eq!(fixture.get(expired).await.expires_at, None, "an expiry in the past is removed");
    fixture.promote(201).await;
    let claimed = fixture.claim_one(202).await;
    fixture.retry_at(&claimed, 300, 203).await;
    fixture.promote(300).await;
    assert_eq!(fixture.state(expired).await, JobState::Queued);

    let early = fixture
        .submit_and_claim(fixture.job("b", 400).priority(faena_domain::Priority::Critical).expires(fixture.at(1_000)))
        .await;
    fixture.fail(&early, 401).await;
    fixture.retry_manually(early.id, 402).await;
    assert_eq!(fixture.promote(1_000).await.expired, 1, "an expiry in the future is kept");
}

pub async fn a_finished_job_does_not_expire(fixture: &Fixture) {
    let done = fixture.submit_and_claim(fixture.job("a", 0).expires(fixture.at(100))).await;
    fixture.complete(&done, 1).await;
    assert_eq!(fixture.promote(100).await.expired, 0);
    assert_eq!(fixture.state(done.id).await, JobState::Completed);
}

pub async fn jobs_that_no_worker_can_run_fail(fixture: &Fixture) {
    let ids = fixture.submit_all((0..3).map(|n| fixture.job("odd", n).unique(&format!("k{n}"))).collect()).await;
    let other = fixture.submit(fixture.job("known", 0)).await;
    let child = fixture.submit(fixture.job("known", 5).after(&[ids[0]])).await;
    let recent = fixture.submit(fixture.job("odd", 100)).await;
    let lane = fixture.lane_of(ids[0]).await.id;
    let fail_unhandled = async |lanes, before, limit, now| {
        fixture.store.job_fail_unhandled(lanes, fixture.at(before), limit, fixture.at(now)).await.unwrap()
    };
    assert_eq!(fail_unhandled(vec![lane], 0, 10, 10).await, 0, "none has waited long enough");
    assert_eq!(fail_unhandled(vec![], 99, 10, 10).await, 0);
    assert_eq!(fail_unhandled(vec![lane, 99_999], 50, 2, 60).await, 2, "bounded");
    assert_eq!(fail_unhandled(vec![lane], 50, 2, 61).await, 1);
    assert_eq!(fail_unhandled(vec![lane], 50, 2, 62).await, 0);

    let view = fixture.get(ids[0]).await;
    assert_eq!((view.status, view.error_reason), (JobState::Failed, Some(ErrorReason::NoHandler)));
    assert_eq!(view.error.as_deref(), Some("no worker can run type odd (queue default)"));
    assert_eq!(fixture.events(ids[0]).await, ["created", "queued", "failed"]);
    use JobState::*;
    assert_eq!(
        fixture.states([ids[1], ids[2], other, child, recent]).await,
        [Failed, Failed, Queued, Cancelled, Queued]
    );
    fixture.submit(fixture.job("odd", 70).unique("k0")).await;
    fixture.retry_manually(ids[1], 80).await;
    assert_eq!(fixture.state(ids[1]).await, Pending);
}

pub async fn old_finished_jobs_are_pruned_by_state_and_leave_nothing(fixture: &Fixture) {
    let retention = Retention {
        completed_ms: 10 * MINUTE_MS,
        failed_ms: 30 * MINUTE_MS,
        cancelled_ms: 20 * MINUTE_MS,
        ..Retention::default()
    };
    let with_all_options = |ms| {
        let key = format!("{ms}-{}", JobId::new());
        fixture.job("a", ms).tag("t").schedule("s").unique(&key).idempotent(&key, 1).expires(fixture.at(99 * MINUTE_MS))
    };
    let completed = fixture.submit_and_claim(with_all_options(0)).await;
    fixture.report_start(&completed, 1).await;
    fixture.report_update(&completed, percent(5.0, "x"), 1).await;
    fixture.report_update(&completed, step("E1", "1"), 1).await;
    fixture.retry_at(&completed, 3, 2).await;
    fixture.promote(3).await;
    let reclaimed = fixture.claim_one(4).await;
    fixture.complete(&reclaimed, 5).await;
    let failed = fixture.submit_and_claim(with_all_options(10)).await;
    fixture.fail(&failed, 11).await;
    let cancelled = fixture.submit(with_all_options(20)).await;
    fixture.cancel(cancelled, 21).await;
    let open = fixture.submit(with_all_options(30)).await;
    let late =
        fixture.submit_and_claim(with_all_options(9 * MINUTE_MS).priority(faena_domain::Priority::Critical)).await;
    fixture.complete(&late, 9 * MINUTE_MS).await;
    let all = [completed.id, failed.id, cancelled, open, late.id];
    let left = async |minutes: i64| {
        fixture.store.job_prune(&retention, 100, fixture.at(minutes * MINUTE_MS)).await.unwrap();
        let mut left = Vec::new();
        for id in all {
            if fixture.store.job_get(id).await.unwrap().is_some() {
                left.push(id);
            } else {
                assert_eq!(fixture.database.tables_with(id).await, [""; 0]);
            }
        }
        left
    };
    assert_eq!(left(9).await, all);
    assert_eq!(left(11).await, [failed.id, cancelled, open, late.id]);
    assert_eq!(left(21).await, [failed.id, open]);
    assert_eq!(left(31).await, [open]);
}

pub async fn pruning_is_bounded(fixture: &Fixture) {
    fixture.submit_all((0..25).map(|_| fixture.job("a", 0)).collect()).await;
    let jobs = fixture.claim(25, 1).await;
    let ends = jobs.iter().map(|job| fixture.run_end(job, completed(), 2)).collect();
    fixture.store.job_end(ends, fixture.at(2)).await.unwrap();
    let retention = Retention { completed_ms: MINUTE_MS, ..Retention::default() };
    let mut rounds = Vec::new();
    for _ in 0..4 {
        rounds.push(fixture.store.job_prune(&retention, 10, fixture.at(2 * MINUTE_MS)).await.unwrap());
    }
    assert_eq!(rounds, [10, 10, 5, 0]);
}

pub async fn pruning_deletes_old_cancel_requests_but_not_those_of_running_jobs(fixture: &Fixture) {
    let mut claimed = Vec::new();
    for ms in 0..3 {
        let job = fixture.submit_and_claim(fixture.job("a", ms)).await;
        fixture.cancel(job.id, 10).await;
        claimed.push(job);
    }
    // The third job ended at the same moment, and its reporter did not know about the cancel request.
    let mut end = fixture.run_end(&claimed[2], completed(), 11);
    end.may_have_other_rows = false;
    assert!(fixture.report_end(end).await);
    fixture.store.job_prune(&Retention::default(), 100, fixture.at(61 * MINUTE_MS)).await.unwrap();
    let cancel_requested: HashSet<JobId> = fixture
        .store
        .poll(fixture.node, fixture.at(0))
        .await
        .unwrap()
        .cancel_requests
        .into_iter()
        .map(|(id, _)| id)
        .collect();
    assert_eq!(cancel_requested, HashSet::from([claimed[0].id, claimed[1].id]));
}

pub async fn a_poll_returns_pending_work(fixture: &Fixture) {
    let poll = fixture.store.poll(fixture.node, fixture.at(0)).await.unwrap();
    assert!(poll.ready_lanes.is_empty() && poll.cancel_requests.is_empty() && poll.next_due_at.is_none());
    assert_eq!(poll.nodes, 1);

    let running = fixture.submit_and_claim(fixture.job("run", 0)).await;
    let ready = fixture.submit(fixture.job("ready", 1)).await;
    fixture.submit(fixture.job("ready", 1)).await;
    fixture.submit(fixture.job("later", 1).scheduled(fixture.at(700))).await;
    fixture.cancel(running.id, 2).await;

    let poll = fixture.store.poll(fixture.node, fixture.at(0)).await.unwrap();
    assert_eq!(poll.ready_lanes, [fixture.lane_of(ready).await.id]);
    assert_eq!(poll.cancel_requests, [(running.id, "not wanted".to_owned())]);
    assert_eq!(poll.next_due_at, Some(fixture.at(700)));
    assert!(fixture.end(&running, cancelled(), 3).await);
    assert!(fixture.store.poll(fixture.node, fixture.at(0)).await.unwrap().cancel_requests.is_empty());
}

pub async fn ready_waiting_and_cancelled_jobs_emit_signals(fixture: &Fixture) {
    let mut signals = fixture.store.signals();
    // PostgreSQL: `Missed` follows whenever the listening session has connected, which takes a moment on a busy machine.
    let mut next = async || loop {
        match tokio::time::timeout(std::time::Duration::from_secs(10), signals.recv()).await.unwrap().unwrap() {
            Signal::Missed => {}
            signal => return signal,
        }
    };
    let ready = fixture.submit(fixture.job("a", 0)).await;
    let lane = fixture.lane_of(ready).await.id;
    assert_eq!(next().await, Signal::Ready(lane));
    fixture.submit(fixture.job("a", 0).scheduled(fixture.at(100))).await;
    assert_eq!(next().await, Signal::Waiting);
    let claimed = fixture.claim_one(1).await;
    fixture.cancel(claimed.id, 2).await;
    assert_eq!(next().await, Signal::Cancel(ready));
    fixture.promote(100).await;
    assert_eq!(next().await, Signal::Ready(lane));
}

/// The signals wake the loops that make these calls. If a call without effect sent a signal, its loop would never rest.
pub async fn calls_that_find_nothing_emit_no_signal(fixture: &Fixture) {
    let now = fixture.at(1_000);
    // PostgreSQL: the first poll loads the rules and emits a signal.
    fixture.store.poll(fixture.node, now).await.unwrap();
    let mut signals = fixture.store.signals();
    fixture.store.job_promote(10, now).await.unwrap();
    fixture.store.job_expire(10, now).await.unwrap();
    fixture.store.task_fire(10, now).await.unwrap();
    fixture.store.poll(fixture.node, now).await.unwrap();
    while let Ok(signal) = signals.try_recv() {
        // PostgreSQL: the listening session has connected.
        assert_eq!(signal, Signal::Missed);
    }
}
