//! Actions of people on jobs: cancel, retry, patch, delete.

use faena_domain::{JobId, JobState, Priority};
use faena_store::{CancelOutcome, ClaimedJob, JobPatch, RunEnd, RunOutcome, StoreError, Tally};

use crate::support::*;

fn refused<T: std::fmt::Debug>(answer: Result<T, StoreError>) -> JobState {
    match answer {
        Err(StoreError::InvalidTransition { from, .. }) => from,
        other => panic!("an invalid transition was expected, not {other:?}"),
    }
}

pub async fn a_waiting_job_is_cancelled_immediately(world: &World) {
    let parent = world.running(world.job("parent", 0)).await;
    let retrying = world.running(world.job("r", 0)).await;
    world.retry_at(&retrying, 100, 1).await;
    let ready = world.submit(world.job("a", 1)).await;
    let delayed = world.submit(world.job("a", 1).scheduled(world.at(50))).await;
    let blocked = world.submit(world.job("a", 1).after(&[parent.id])).await;
    for id in [ready, delayed, blocked, retrying.id] {
        assert_eq!(world.cancel(id, 2).await, CancelOutcome::Cancelled);
        let view = world.get(id).await;
        assert_eq!((view.status, view.error.as_deref()), (JobState::Cancelled, Some("not wanted")));
    }
    assert_eq!(world.events(ready).await, ["created", "queued", "cancelled"]);
    assert_eq!(world.events(delayed).await, ["created", "cancelled"]);
    assert_eq!(world.get(retrying.id).await.retry_count, 1);
    world.promote(1_000).await;
    assert!(world.claim(10, 1_000).await.is_empty());
}

pub async fn cancelling_a_running_job_requests_its_cancellation(world: &World) {
    let assigned = world.running(world.job("a", 0)).await;
    let started = world.running(world.job("b", 0)).await;
    world.begin(&started, 1).await;
    for (job, state) in [(&assigned, JobState::Assigned), (&started, JobState::Processing)] {
        assert_eq!(world.cancel(job.id, 2).await, CancelOutcome::Asked { state });
        assert_eq!(world.cancel(job.id, 3).await, CancelOutcome::Asked { state }, "asked again");
        assert_eq!(world.state(job.id).await, state);
        assert!(world.end(job, cancelled(), 4).await);
        assert_eq!(world.state(job.id).await, JobState::Cancelled);
        assert!(world.events(job.id).await.contains(&"cancel_requested"));
    }
    assert!(world.store.poll(world.node, world.at(0)).await.unwrap().cancels.is_empty());
}

pub async fn a_job_with_a_cancel_request_is_not_requeued(world: &World) {
    for outcome in [world.retry(50), RunOutcome::HandedBack] {
        let job = world.running(world.job("a", 0).unique("k")).await;
        world.cancel(job.id, 1).await;
        // The reporter does not know about the cancel request yet.
        let end = RunEnd { on_record: false, ..world.an_end(&job, outcome, 2) };
        assert!(world.report_end(end.clone()).await);
        let view = world.get(job.id).await;
        assert_eq!((view.status, view.error.as_deref()), (JobState::Cancelled, Some("not wanted")));
        assert!(world.report_end(end).await, "reported again");
        assert_eq!(world.events(job.id).await.last(), Some(&"cancelled"));
    }
    world.promote(100).await;
    assert!(world.claim(10, 100).await.is_empty());
}

pub async fn a_job_may_complete_despite_a_cancel_request(world: &World) {
    let job = world.running(world.job("a", 0)).await;
    world.cancel(job.id, 1).await;
    world.complete(&job, 2).await;
    assert_eq!(world.state(job.id).await, JobState::Completed);
}

async fn finished(world: &World) -> [(JobId, JobState); 3] {
    let completed = world.running(world.job("a", 0)).await;
    world.complete(&completed, 1).await;
    let failed = world.running(world.job("a", 2)).await;
    world.fail(&failed, 3).await;
    let cancelled = world.submit(world.job("a", 4)).await;
    world.cancel(cancelled, 5).await;
    [(completed.id, JobState::Completed), (failed.id, JobState::Failed), (cancelled, JobState::Cancelled)]
}

pub async fn a_finished_job_cannot_be_cancelled(world: &World) {
    for (id, state) in finished(world).await {
        assert_eq!(refused(world.store.job_cancel(id, "late", None, world.at(9)).await), state);
        assert_eq!(world.state(id).await, state);
    }
}

pub async fn a_manual_retry_gives_new_attempts_and_keeps_the_log(world: &World) {
    let first = world.running(world.job("a", 0).retries(1)).await;
    world.retry_at(&first, 10, 1).await;
    world.promote(10).await;
    let second = world.claim_one(11).await;
    world.fail(&second, 12).await;
    let before = world.events(first.id).await;

    world.retry_by_person(first.id, 20).await;

    let view = world.get(first.id).await;
    assert_eq!((view.status, view.retry_count, view.completed_at), (JobState::Pending, 0, None));
    assert_eq!(view.run, Some(second.run), "the last run is still known");
    world.promote(21).await;
    let third = world.claim_one(22).await;
    assert_eq!((third.id, third.retry_count), (first.id, 0));
    world.complete(&third, 23).await;
    let after = world.events(first.id).await;
    assert_eq!(after[..before.len()], before);
    assert_eq!(after[before.len()..], ["retried", "queued", "assigned", "started", "completed"]);
}

pub async fn a_cancelled_job_can_be_retried(world: &World) {
    let waiting = world.submit(world.job("a", 0)).await;
    world.cancel(waiting, 1).await;
    let asked = world.running(world.job("a", 2)).await;
    world.cancel(asked.id, 3).await;
    assert!(world.end(&asked, cancelled(), 4).await);
    for id in [waiting, asked.id] {
        world.retry_by_person(id, 5).await;
        world.promote(6).await;
        let job = world.claim_one(7).await;
        assert_eq!(job.id, id);
        world.complete(&job, 8).await;
        assert!(world.events(id).await.contains(&"cancelled"), "the cancellation stays in the log");
    }
}

pub async fn an_old_cancel_request_does_not_stop_a_retried_job(world: &World) {
    let job = world.running(world.job("a", 0)).await;
    world.cancel(job.id, 1).await;
    let end = RunEnd { on_record: false, ..world.an_end(&job, failed("no"), 2) };
    assert!(world.report_end(end).await);
    world.retry_by_person(job.id, 3).await;
    world.promote(4).await;
    let again = world.claim_one(5).await;
    assert!(world.store.poll(world.node, world.at(0)).await.unwrap().cancels.is_empty());
    world.retry_at(&again, 100, 6).await;
    assert_eq!(world.state(job.id).await, JobState::Retrying);
}

pub async fn only_failed_and_cancelled_jobs_can_be_retried(world: &World) {
    let [(completed, _), ..] = finished(world).await;
    let ready = world.submit(world.job("r", 10)).await;
    let delayed = world.submit(world.job("d", 10).scheduled(world.at(99))).await;
    let again = |id| world.store.job_retry(id, None, world.at(11));
    assert_eq!(refused(again(completed).await), JobState::Completed);
    assert_eq!(refused(again(ready).await), JobState::Queued);
    assert_eq!(refused(again(delayed).await), JobState::Pending);
    let running = world.claim_one(12).await;
    assert_eq!(refused(again(running.id).await), JobState::Assigned);
}

pub async fn a_patch_of_the_priority_moves_the_job(world: &World) {
    let first = world.submit(world.job("a", 0)).await;
    let second = world.submit(world.job("a", 1)).await;
    let later = world.submit(world.job("a", 2).scheduled(world.at(50))).await;
    let urgent = || JobPatch { priority: Some(Priority::Critical), ..JobPatch::default() };
    world.patch(second, urgent(), 3).await;
    world.patch(later, urgent(), 3).await;
    assert_eq!(world.get(second).await.priority, Priority::Critical);
    assert_eq!(world.get(second).await.queued_at, Some(world.at(1)), "it keeps its time");
    assert!(world.events(second).await.contains(&"patched"));
    let order: Vec<JobId> = world.claim(2, 4).await.iter().map(|job| job.id).collect();
    assert_eq!(order, [second, first]);
    world.promote(50).await;
    assert_eq!(world.claim_one(51).await.lane, world.lane_of(second).await.id);
}

pub async fn a_patch_of_the_payload_and_limits_is_seen_by_the_worker(world: &World) {
    let id = world.submit(world.job("a", 0).retries(1)).await;
    let patch = JobPatch {
        payload: Some("{\"new\":true}".into()),
        max_retries: Some(5),
        retry_delay_ms: Some(777),
        timeout_ms: Some(888),
        ..JobPatch::default()
    };
    world.patch(id, patch, 1).await;
    let job = world.claim_one(2).await;
    assert_eq!(job.payload, "{\"new\":true}");
    assert_eq!((job.options.retry.max_retries, job.options.retry.retry_delay_ms), (5, 777));
    assert_eq!(job.options.timeout_ms, Some(888));
}

pub async fn a_patch_of_the_time_moves_the_job(world: &World) {
    let to = |when| JobPatch { scheduled_at: Some(when), ..JobPatch::default() };
    let id = world.submit(world.job("a", 0).scheduled(world.at(500))).await;
    world.patch(id, to(Some(world.at(900))), 1).await;
    assert_eq!(world.promote(500).await.promoted, 0, "later");
    world.patch(id, to(Some(world.at(700))), 501).await;
    assert_eq!(world.promote(700).await.promoted, 1, "earlier");
    world.patch(id, to(Some(world.at(2_000))), 701).await;
    assert_eq!(world.state(id).await, JobState::Pending, "a ready job is put off");
    assert!(world.claim(1, 702).await.is_empty());
    world.patch(id, to(None), 703).await;
    let view = world.get(id).await;
    assert_eq!((view.status, view.scheduled_at, view.queued_at), (JobState::Queued, None, Some(world.at(703))));
    assert_eq!(world.claim_one(704).await.id, id, "as soon as possible");
}

pub async fn a_patch_changes_the_expiry(world: &World) {
    let to = |when| JobPatch { expires_at: Some(when), ..JobPatch::default() };
    let [later, never, sooner] = [
        world.submit(world.job("a", 0).expires(world.at(100))).await,
        world.submit(world.job("a", 0).expires(world.at(100))).await,
        world.submit(world.job("a", 0)).await,
    ];
    world.patch(later, to(Some(world.at(200))), 1).await;
    world.patch(never, to(None), 1).await;
    world.patch(sooner, to(Some(world.at(50))), 1).await;
    assert_eq!(world.promote(50).await.expired, 1);
    assert_eq!(world.promote(100).await.expired, 0);
    assert_eq!(world.promote(200).await.expired, 1);
    assert_eq!(world.states([later, never, sooner]).await, [JobState::Failed, JobState::Queued, JobState::Failed]);
}

pub async fn a_patch_of_a_blocked_job_keeps_it_blocked(world: &World) {
    let parent = world.running(world.job("parent", 0)).await;
    let child = world.submit(world.job("child", 1).after(&[parent.id]).scheduled(world.at(50))).await;
    let patch = JobPatch { scheduled_at: Some(None), priority: Some(Priority::High), ..JobPatch::default() };
    world.patch(child, patch, 2).await;
    assert_eq!(world.state(child).await, JobState::Pending);
    assert!(world.claim(1, 3).await.is_empty());
    world.complete(&parent, 4).await;
    assert_eq!(world.state(child).await, JobState::Queued, "its time is gone, and its parent is done");
    assert_eq!(world.get(child).await.priority, Priority::High);
}

pub async fn a_patch_of_a_retrying_job_keeps_it_retrying(world: &World) {
    let job = world.running(world.job("a", 0)).await;
    world.retry_at(&job, 100, 1).await;
    let patch = JobPatch { priority: Some(Priority::High), payload: Some("{\"b\":2}".into()), ..JobPatch::default() };
    world.patch(job.id, patch, 2).await;
    let view = world.get(job.id).await;
    assert_eq!((view.status, view.next_retry_at), (JobState::Retrying, Some(world.at(100))));
    world.promote(100).await;
    let again = world.claim_one(101).await;
    assert_eq!((again.payload.as_str(), again.retry_count), ("{\"b\":2}", 1));
    world.complete(&again, 102).await;
}

pub async fn running_and_finished_jobs_cannot_be_patched(world: &World) {
    let patch =
        |id| world.store.job_patch(id, JobPatch { max_retries: Some(1), ..JobPatch::default() }, None, world.at(9));
    for (id, state) in finished(world).await {
        assert_eq!(refused(patch(id).await), state);
    }
    let job = world.running(world.job("a", 6)).await;
    assert_eq!(refused(patch(job.id).await), JobState::Assigned);
    world.begin(&job, 7).await;
    assert_eq!(refused(patch(job.id).await), JobState::Processing);
    assert_eq!(world.get(job.id).await.max_retries, 3);
}

pub async fn a_deleted_job_leaves_nothing(world: &World) {
    let mark = |n: u8| {
        let key = format!("k{n}");
        let job = world.job("a", 0).tag("t").tag("u").schedule("s").unique(&key).idempotent(&key, n);
        job.expires(world.at(1_000_000))
    };
    let parent = world.running(world.job("parent", 0)).await;
    let ready = world.submit(mark(1)).await;
    world.store.job_delete(ready, None, world.at(1_000)).await.unwrap();
    let delayed = world.submit(mark(2).scheduled(world.at(50))).await;
    world.store.job_delete(delayed, None, world.at(1_000)).await.unwrap();
    let blocked = world.submit(mark(3).after(&[parent.id])).await;
    world.store.job_delete(blocked, None, world.at(1_000)).await.unwrap();
    let rich = async |n| -> ClaimedJob {
        let job = world.running(mark(n)).await;
        world.begin(&job, 1).await;
        world.note(&job, percent(1.0, "x"), 1).await;
        world.note(&job, step("E1", "1"), 1).await;
        world.retry_at(&job, 2, 2).await;
        world.promote(2).await;
        let job = world.claim_one(3).await;
        world.begin(&job, 3).await;
        world.cancel(job.id, 3).await;
        job
    };
    let mut gone = vec![ready, delayed, blocked];
    for (n, outcome) in [(4, completed()), (5, failed("no")), (6, cancelled())] {
        let job = rich(n).await;
        assert!(world.end(&job, outcome, 4).await);
        world.store.job_delete(job.id, None, world.at(1_000)).await.unwrap();
        gone.push(job.id);
    }
    for id in gone {
        assert_eq!(world.ledger.tables_with(id).await, [""; 0]);
        assert!(world.store.job_get(id).await.unwrap().is_none());
    }
    assert_eq!([world.total(Tally::Queued).await, world.total(Tally::InFlight).await], [0, 1]);
    world.submit(mark(1)).await;
}

pub async fn a_running_job_cannot_be_deleted(world: &World) {
    let job = world.running(world.job("a", 0)).await;
    assert_eq!(refused(world.store.job_delete(job.id, None, world.at(1_000)).await), JobState::Assigned);
    world.begin(&job, 1).await;
    assert_eq!(refused(world.store.job_delete(job.id, None, world.at(1_000)).await), JobState::Processing);
    world.complete(&job, 2).await;
    world.store.job_delete(job.id, None, world.at(1_000)).await.unwrap();
}

pub async fn changes_of_unknown_jobs_are_refused(world: &World) {
    let id = JobId::new();
    let now = world.at(0);
    for answer in [
        world.store.job_cancel(id, "", None, now).await.map(|_| ()),
        world.store.job_retry(id, None, now).await,
        world.store.job_patch(id, JobPatch::default(), None, now).await,
        world.store.job_delete(id, None, world.at(1_000)).await,
    ] {
        assert!(matches!(answer, Err(StoreError::NotFound(missing)) if missing == id), "{answer:?}");
    }
}
