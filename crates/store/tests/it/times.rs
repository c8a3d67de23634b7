//! What becomes due: due, expired and old jobs, and what a node learns about it.

use std::collections::HashSet;

use faena_domain::{ErrorReason, JobId, JobState};
use faena_store::{Retention, Signal};

use crate::support::*;

const MINUTE_MS: i64 = 60_000;

pub async fn delayed_jobs_become_ready_in_the_order_of_their_times(world: &World) {
    let mut wanted: Vec<(i64, JobId)> = Vec::new();
    for (n, due) in [700, 300, 900, 100, 500].into_iter().enumerate() {
        let job = world.job("later", i64::try_from(n).unwrap()).scheduled(world.at(due));
        wanted.push((due, world.submit(job).await));
    }
    wanted.sort_unstable();
    assert_eq!(world.promote(750).await.promoted, 4);
    let order: Vec<JobId> = world.claim(10, 750).await.iter().map(|job| job.id).collect();
    assert_eq!(order, wanted[..4].iter().map(|(_, id)| *id).collect::<Vec<_>>());
}

pub async fn a_promotion_is_bounded_and_reports_that_more_is_due(world: &World) {
    let jobs = (0..25).map(|n| world.job("later", 0).scheduled(world.at(100 + n))).collect();
    world.submit_all(jobs).await;
    let mut handled = Vec::new();
    loop {
        let due = world.store.job_promote(10, world.at(1_000)).await.unwrap();
        handled.push(due.promoted);
        if !due.more {
            break;
        }
    }
    assert_eq!(handled, [10, 10, 5]);
}

pub async fn the_next_due_time_is_returned(world: &World) {
    assert_eq!(world.promote(0).await.next_at, None);
    world.submit(world.job("a", 0).scheduled(world.at(500))).await;
    assert_eq!(world.promote(1).await.next_at, Some(world.at(500)));
    let expiring = world.submit(world.job("b", 0).expires(world.at(300))).await;
    assert_eq!(world.promote(1).await.next_at, Some(world.at(300)));
    assert_eq!(world.store.poll(world.node, world.at(0)).await.unwrap().next_due_at, Some(world.at(300)));
    world.cancel(expiring, 2).await;
    assert_eq!(world.promote(3).await.next_at, Some(world.at(500)), "nothing is left to expire");
    assert_eq!(world.promote(500).await.next_at, None);
}

pub async fn a_ready_job_expires(world: &World) {
    let id = world.submit(world.job("a", 0).expires(world.at(100))).await;
    assert_eq!(world.promote(99).await.expired, 0);
    assert_eq!(world.promote(100).await.expired, 1);
    let view = world.get(id).await;
    assert_eq!((view.status, view.error_reason), (JobState::Failed, Some(ErrorReason::Expired)));
    assert_eq!(world.events(id).await, ["created", "queued", "expired"]);
    assert!(world.claim(1, 101).await.is_empty());
}

pub async fn a_waiting_job_expires(world: &World) {
    let parent = world.running(world.job("parent", 0)).await;
    let delayed = world.submit(world.job("a", 1).scheduled(world.at(1_000)).expires(world.at(100))).await;
    let blocked = world.submit(world.job("b", 1).after(&[parent.id]).expires(world.at(100))).await;
    let retrying = world.running(world.job("c", 1).expires(world.at(100))).await;
    world.retry_at(&retrying, 500, 2).await;

    assert_eq!(world.promote(100).await.expired, 3);

    assert_eq!(world.states([delayed, blocked, retrying.id]).await, [JobState::Failed; 3]);
    world.complete(&parent, 101).await;
    assert_eq!(world.state(blocked).await, JobState::Failed, "its parent has nothing to say to it any more");
}

pub async fn a_running_job_does_not_expire_while_it_runs(world: &World) {
    let assigned = world.running(world.job("a", 0).expires(world.at(100))).await;
    let started = world.running(world.job("b", 1).expires(world.at(100))).await;
    world.begin(&started, 2).await;
    assert_eq!(world.promote(200).await.expired, 0);
    assert_eq!(world.states([assigned.id, started.id]).await, [JobState::Assigned, JobState::Processing]);
    world.complete(&assigned, 201).await;
    world.complete(&started, 201).await;
    assert_eq!(world.promote(300).await.next_at, None);
}

pub async fn a_job_that_is_requeued_after_its_expiry_expires(world: &World) {
    let retried = world.running(world.job("a", 0).expires(world.at(100))).await;
    let returned = world.running(world.job("b", 1).expires(world.at(100))).await;
    let lost = world.submit(world.job("c", 2).expires(world.at(100))).await;
    world.claim_as(faena_domain::NodeId::new(), 1, 2).await;
    assert_eq!(world.promote(200).await.expired, 0);
    world.retry_at(&retried, 1_000, 201).await;
    world.hand_back(&returned, 201).await;
    world.recover(1_000, 201).await;

    assert_eq!(world.promote(202).await.expired, 3);
    assert_eq!(world.states([retried.id, returned.id, lost]).await, [JobState::Failed; 3]);
}

pub async fn a_retried_expired_job_runs(world: &World) {
    let expired = world.submit(world.job("a", 0).expires(world.at(100))).await;
    world.promote(100).await;
    world.retry_by_person(expired, 200).await;
    assert_eq!(world.get(expired).await.expires_at, None, "it cannot be in time any more");
    world.promote(201).await;
    let claimed = world.claim_one(202).await;
    world.retry_at(&claimed, 300, 203).await;
    world.promote(300).await;
    assert_eq!(world.state(expired).await, JobState::Queued);

    let early =
        world.running(world.job("b", 400).priority(faena_domain::Priority::Critical).expires(world.at(1_000))).await;
    world.fail(&early, 401).await;
    world.retry_by_person(early.id, 402).await;
    assert_eq!(world.promote(1_000).await.expired, 1, "an expiry that is still to come holds");
}

pub async fn a_finished_job_does_not_expire(world: &World) {
    let done = world.running(world.job("a", 0).expires(world.at(100))).await;
    world.complete(&done, 1).await;
    assert_eq!(world.promote(100).await.expired, 0);
    assert_eq!(world.state(done.id).await, JobState::Completed);
}

pub async fn jobs_that_no_worker_can_run_fail(world: &World) {
    let ids = world.submit_all((0..3).map(|n| world.job("odd", n).unique(&format!("k{n}"))).collect()).await;
    let other = world.submit(world.job("known", 0)).await;
    let child = world.submit(world.job("known", 5).after(&[ids[0]])).await;
    let retried = world.submit(world.job("odd", 100)).await;
    let lane = world.lane_of(ids[0]).await.id;
    let give_up = async |lanes, before, limit, now| {
        world.store.job_fail_unhandled(lanes, world.at(before), limit, world.at(now)).await.unwrap()
    };
    assert_eq!(give_up(vec![lane], 0, 10, 10).await, 0, "none has waited for so long");
    assert_eq!(give_up(vec![], 99, 10, 10).await, 0);
    assert_eq!(give_up(vec![lane, 99_999], 50, 2, 60).await, 2, "bounded");
    assert_eq!(give_up(vec![lane], 50, 2, 61).await, 1);
    assert_eq!(give_up(vec![lane], 50, 2, 62).await, 0);

    let view = world.get(ids[0]).await;
    assert_eq!((view.status, view.error_reason), (JobState::Failed, Some(ErrorReason::NoHandler)));
    assert_eq!(view.error.as_deref(), Some("no worker can run type odd (queue default)"));
    assert_eq!(world.events(ids[0]).await, ["created", "queued", "failed"]);
    use JobState::*;
    assert_eq!(
        world.states([ids[1], ids[2], other, child, retried]).await,
        [Failed, Failed, Queued, Cancelled, Queued]
    );
    world.submit(world.job("odd", 70).unique("k0")).await;
    world.retry_by_person(ids[1], 80).await;
    assert_eq!(world.state(ids[1]).await, Pending);
}

pub async fn old_finished_jobs_are_pruned_by_state_and_leave_nothing(world: &World) {
    let retention = Retention {
        completed_ms: 10 * MINUTE_MS,
        failed_ms: 30 * MINUTE_MS,
        cancelled_ms: 20 * MINUTE_MS,
        ..Retention::default()
    };
    let rich = |ms| {
        let mark = format!("{ms}-{}", JobId::new());
        world.job("a", ms).tag("t").schedule("s").unique(&mark).idempotent(&mark, 1).expires(world.at(99 * MINUTE_MS))
    };
    let completed = world.running(rich(0)).await;
    world.begin(&completed, 1).await;
    world.note(&completed, percent(5.0, "x"), 1).await;
    world.note(&completed, step("E1", "1"), 1).await;
    world.retry_at(&completed, 3, 2).await;
    world.promote(3).await;
    let again = world.claim_one(4).await;
    world.complete(&again, 5).await;
    let failed = world.running(rich(10)).await;
    world.fail(&failed, 11).await;
    let cancelled = world.submit(rich(20)).await;
    world.cancel(cancelled, 21).await;
    let open = world.submit(rich(30)).await;
    let late = world.running(rich(9 * MINUTE_MS).priority(faena_domain::Priority::Critical)).await;
    world.complete(&late, 9 * MINUTE_MS).await;
    let all = [completed.id, failed.id, cancelled, open, late.id];
    let left = async |minutes: i64| {
        world.store.job_prune(&retention, 100, world.at(minutes * MINUTE_MS)).await.unwrap();
        let mut left = Vec::new();
        for id in all {
            if world.store.job_get(id).await.unwrap().is_some() {
                left.push(id);
            } else {
                assert_eq!(world.ledger.tables_with(id).await, [""; 0]);
            }
        }
        left
    };
    assert_eq!(left(9).await, all);
    assert_eq!(left(11).await, [failed.id, cancelled, open, late.id]);
    assert_eq!(left(21).await, [failed.id, open]);
    assert_eq!(left(31).await, [open]);
}

pub async fn pruning_is_bounded(world: &World) {
    world.submit_all((0..25).map(|_| world.job("a", 0)).collect()).await;
    let jobs = world.claim(25, 1).await;
    let ends = jobs.iter().map(|job| world.an_end(job, completed(), 2)).collect();
    world.store.job_end(ends, world.at(2)).await.unwrap();
    let retention = Retention { completed_ms: MINUTE_MS, ..Retention::default() };
    let mut rounds = Vec::new();
    for _ in 0..4 {
        rounds.push(world.store.job_prune(&retention, 10, world.at(2 * MINUTE_MS)).await.unwrap());
    }
    assert_eq!(rounds, [10, 10, 5, 0]);
}

pub async fn pruning_deletes_old_cancel_requests_but_not_of_running_jobs(world: &World) {
    let mut held = Vec::new();
    for ms in 0..3 {
        let job = world.running(world.job("a", ms)).await;
        world.cancel(job.id, 10).await;
        held.push(job);
    }
    // It ended at the same moment, and the reporter did not know about the cancel request.
    let mut end = world.an_end(&held[2], completed(), 11);
    end.on_record = false;
    assert!(world.report_end(end).await);
    world.store.job_prune(&Retention::default(), 100, world.at(61 * MINUTE_MS)).await.unwrap();
    let asked: HashSet<JobId> =
        world.store.poll(world.node, world.at(0)).await.unwrap().cancels.into_iter().map(|(id, _)| id).collect();
    assert_eq!(asked, HashSet::from([held[0].id, held[1].id]));
}

pub async fn a_poll_returns_pending_work(world: &World) {
    let poll = world.store.poll(world.node, world.at(0)).await.unwrap();
    assert!(poll.ready_lanes.is_empty() && poll.cancels.is_empty() && poll.next_due_at.is_none());
    assert_eq!(poll.nodes, 1);

    let running = world.running(world.job("run", 0)).await;
    let ready = world.submit(world.job("ready", 1)).await;
    world.submit(world.job("ready", 1)).await;
    world.submit(world.job("later", 1).scheduled(world.at(700))).await;
    world.cancel(running.id, 2).await;

    let poll = world.store.poll(world.node, world.at(0)).await.unwrap();
    assert_eq!(poll.ready_lanes, [world.lane_of(ready).await.id]);
    assert_eq!(poll.cancels, [(running.id, "not wanted".to_owned())]);
    assert_eq!(poll.next_due_at, Some(world.at(700)));
    assert!(world.end(&running, cancelled(), 3).await);
    assert!(world.store.poll(world.node, world.at(0)).await.unwrap().cancels.is_empty());
}

pub async fn signals_follow_ready_waiting_and_cancelled_jobs(world: &World) {
    let mut signals = world.store.signals();
    let mut next =
        async || tokio::time::timeout(std::time::Duration::from_secs(10), signals.recv()).await.unwrap().unwrap();
    let ready = world.submit(world.job("a", 0)).await;
    let lane = world.lane_of(ready).await.id;
    assert_eq!(next().await, Signal::Ready(lane));
    world.submit(world.job("a", 0).scheduled(world.at(100))).await;
    assert_eq!(next().await, Signal::Waiting);
    let claimed = world.claim_one(1).await;
    world.cancel(claimed.id, 2).await;
    assert_eq!(next().await, Signal::Cancel(ready));
    world.promote(100).await;
    assert_eq!(next().await, Signal::Ready(lane));
}
