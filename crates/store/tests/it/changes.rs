//! Manual actions on jobs: cancel, retry, patch, delete.

use faena_domain::{JobId, JobState, Priority};
use faena_store::{CancelOutcome, ClaimedJob, Filter, JobPatch, Retried, RunEnd, RunOutcome, StoreError, Tally};

use crate::support::*;

/// Returns the state because of which an action was rejected.
fn rejected<T: std::fmt::Debug>(answer: Result<T, StoreError>) -> JobState {
    match answer {
        Err(StoreError::InvalidTransition { from, .. }) => from,
        other => panic!("an invalid transition was expected, not {other:?}"),
    }
}

pub async fn a_waiting_job_is_cancelled_immediately(fixture: &Fixture) {
    let parent = fixture.submit_and_claim(fixture.job("parent", 0)).await;
    let retrying = fixture.submit_and_claim(fixture.job("r", 0)).await;
    fixture.retry_at(&retrying, 100, 1).await;
    let ready = fixture.submit(fixture.job("a", 1)).await;
    let delayed = fixture.submit(fixture.job("a", 1).scheduled(fixture.at(50))).await;
    let blocked = fixture.submit(fixture.job("a", 1).after(&[parent.id])).await;
    for id in [ready, delayed, blocked, retrying.id] {
        assert_eq!(fixture.cancel(id, 2).await, CancelOutcome::Cancelled);
        let view = fixture.get(id).await;
        assert_eq!((view.status, view.error.as_deref()), (JobState::Cancelled, Some("not wanted")));
    }
    assert_eq!(fixture.events(ready).await, ["created", "queued", "cancelled"]);
    assert_eq!(fixture.events(delayed).await, ["created", "cancelled"]);
    assert_eq!(fixture.get(retrying.id).await.retry_count, 1);
    fixture.promote(1_000).await;
    assert!(fixture.claim(10, 1_000).await.is_empty());
}

pub async fn cancelling_a_running_job_requests_its_cancellation(fixture: &Fixture) {
    let assigned = fixture.submit_and_claim(fixture.job("a", 0)).await;
    let started = fixture.submit_and_claim(fixture.job("b", 0)).await;
    fixture.report_start(&started, 1).await;
    for (job, state) in [(&assigned, JobState::Assigned), (&started, JobState::Processing)] {
        assert_eq!(fixture.cancel(job.id, 2).await, CancelOutcome::Requested { state });
        assert_eq!(fixture.cancel(job.id, 3).await, CancelOutcome::Requested { state }, "requested again");
        assert_eq!(fixture.state(job.id).await, state);
        assert!(fixture.end(job, cancelled(), 4).await);
        assert_eq!(fixture.state(job.id).await, JobState::Cancelled);
        assert!(fixture.events(job.id).await.contains(&"cancel_requested".into()));
    }
    assert!(fixture.store.poll(fixture.node, fixture.at(0)).await.unwrap().cancel_requests.is_empty());
}

pub async fn a_job_with_a_cancel_request_is_not_requeued(fixture: &Fixture) {
    for outcome in [fixture.retry(50), RunOutcome::Released] {
        let job = fixture.submit_and_claim(fixture.job("a", 0).unique("k")).await;
        fixture.cancel(job.id, 1).await;
        // The reporter does not know about the cancel request yet.
        let end = RunEnd { may_have_other_rows: false, ..fixture.run_end(&job, outcome, 2) };
        assert!(fixture.report_end(end.clone()).await);
        let view = fixture.get(job.id).await;
        assert_eq!((view.status, view.error.as_deref()), (JobState::Cancelled, Some("not wanted")));
        assert!(fixture.report_end(end).await, "reported again");
        assert_eq!(fixture.events(job.id).await.last().unwrap(), "cancelled");
    }
    fixture.promote(100).await;
    assert!(fixture.claim(10, 100).await.is_empty());
}

pub async fn a_job_may_complete_despite_a_cancel_request(fixture: &Fixture) {
    let job = fixture.submit_and_claim(fixture.job("a", 0)).await;
    fixture.cancel(job.id, 1).await;
    fixture.complete(&job, 2).await;
    assert_eq!(fixture.state(job.id).await, JobState::Completed);
}

async fn finished(fixture: &Fixture) -> [(JobId, JobState); 3] {
    let completed = fixture.submit_and_claim(fixture.job("a", 0)).await;
    fixture.complete(&completed, 1).await;
    let failed = fixture.submit_and_claim(fixture.job("a", 2)).await;
    fixture.fail(&failed, 3).await;
    let cancelled = fixture.submit(fixture.job("a", 4)).await;
    fixture.cancel(cancelled, 5).await;
    [(completed.id, JobState::Completed), (failed.id, JobState::Failed), (cancelled, JobState::Cancelled)]
}

pub async fn a_finished_job_cannot_be_cancelled(fixture: &Fixture) {
    for (id, state) in finished(fixture).await {
        assert_eq!(rejected(fixture.store.job_cancel(id, "late", None, fixture.at(9)).await), state);
        assert_eq!(fixture.state(id).await, state);
    }
}

pub async fn a_manual_retry_gives_new_attempts_and_keeps_the_log(fixture: &Fixture) {
    let first = fixture.submit_and_claim(fixture.job("a", 0).retries(1)).await;
    fixture.retry_at(&first, 10, 1).await;
    fixture.promote(10).await;
    let second = fixture.claim_one(11).await;
    fixture.fail(&second, 12).await;
    let before = fixture.events(first.id).await;

    fixture.retry_manually(first.id, 20).await;

    let view = fixture.get(first.id).await;
    assert_eq!((view.status, view.retry_count, view.completed_at), (JobState::Pending, 0, None));
    assert_eq!(view.run, Some(second.run), "the last run is still known");
    fixture.promote(21).await;
    let third = fixture.claim_one(22).await;
    assert_eq!((third.id, third.retry_count), (first.id, 0));
    fixture.complete(&third, 23).await;
    let after = fixture.events(first.id).await;
    assert_eq!(after[..before.len()], before);
    assert_eq!(after[before.len()..], ["retried", "queued", "assigned", "started", "completed"]);
}

pub async fn a_cancelled_job_can_be_retried(fixture: &Fixture) {
    let waiting = fixture.submit(fixture.job("a", 0)).await;
    fixture.cancel(waiting, 1).await;
    let cancel_requested = fixture.submit_and_claim(fixture.job("a", 2)).await;
    fixture.cancel(cancel_requested.id, 3).await;
    assert!(fixture.end(&cancel_requested, cancelled(), 4).await);
    for id in [waiting, cancel_requested.id] {
        fixture.retry_manually(id, 5).await;
        fixture.promote(6).await;
        let job = fixture.claim_one(7).await;
        assert_eq!(job.id, id);
        fixture.complete(&job, 8).await;
        assert!(fixture.events(id).await.contains(&"cancelled".into()), "the cancellation stays in the log");
    }
}

pub async fn an_old_cancel_request_does_not_stop_a_retried_job(fixture: &Fixture) {
    let job = fixture.submit_and_claim(fixture.job("a", 0)).await;
    fixture.cancel(job.id, 1).await;
    let end = RunEnd { may_have_other_rows: false, ..fixture.run_end(&job, failed("no"), 2) };
    assert!(fixture.report_end(end).await);
    fixture.retry_manually(job.id, 3).await;
    fixture.promote(4).await;
    let reclaimed = fixture.claim_one(5).await;
    assert!(fixture.store.poll(fixture.node, fixture.at(0)).await.unwrap().cancel_requests.is_empty());
    fixture.retry_at(&reclaimed, 100, 6).await;
    assert_eq!(fixture.state(job.id).await, JobState::Retrying);
}

pub async fn only_failed_and_cancelled_jobs_can_be_retried(fixture: &Fixture) {
    let [(completed, _), ..] = finished(fixture).await;
    let ready = fixture.submit(fixture.job("r", 10)).await;
    let delayed = fixture.submit(fixture.job("d", 10).scheduled(fixture.at(99))).await;
    let retry = |id| fixture.store.job_retry(id, None, fixture.at(11));
    assert_eq!(rejected(retry(completed).await), JobState::Completed);
    assert_eq!(rejected(retry(ready).await), JobState::Queued);
    assert_eq!(rejected(retry(delayed).await), JobState::Pending);
    let running = fixture.claim_one(12).await;
    assert_eq!(rejected(retry(running.id).await), JobState::Assigned);
}

pub async fn a_retry_of_a_retrying_job_starts_its_next_attempt_now(fixture: &Fixture) {
    let job = fixture.submit_and_claim(fixture.job("a", 0).concurrency_key("k")).await;
    fixture.retry_at(&job, 60_000, 1).await;
    let retried = fixture.store.job_retry(job.id, Some("ana"), fixture.at(10)).await.unwrap();
    assert_eq!(retried, Retried { state: JobState::Retrying, retry_count: 1 });
    let view = fixture.get(job.id).await;
    assert_eq!((view.next_attempt_at, view.error.as_deref()), (Some(fixture.at(10)), Some("not now")));
    assert!(fixture.events(job.id).await.contains(&"retried".to_owned()));
    fixture.promote(10).await;
    let reclaimed = fixture.claim_one(11).await;
    assert_eq!((reclaimed.id, reclaimed.retry_count), (job.id, 1), "the attempt counts as before");
    fixture.complete(&reclaimed, 12).await;
}

pub async fn a_patch_of_the_priority_moves_the_job(fixture: &Fixture) {
    let first = fixture.submit(fixture.job("a", 0)).await;
    let second = fixture.submit(fixture.job("a", 1)).await;
    let later = fixture.submit(fixture.job("a", 2).scheduled(fixture.at(50))).await;
    let urgent = || JobPatch { priority: Some(Priority::Critical), ..JobPatch::default() };
    fixture.patch(second, urgent(), 3).await;
    fixture.patch(later, urgent(), 3).await;
    assert_eq!(fixture.get(second).await.priority, Priority::Critical);
    assert_eq!(fixture.get(second).await.queued_at, Some(fixture.at(1)), "its ready time is unchanged");
    assert!(fixture.events(second).await.contains(&"patched".into()));
    let order: Vec<JobId> = fixture.claim(2, 4).await.iter().map(|job| job.id).collect();
    assert_eq!(order, [second, first]);
    fixture.promote(50).await;
    assert_eq!(fixture.claim_one(51).await.lane, fixture.lane_of(second).await.id);
}

pub async fn a_patch_of_the_payload_and_limits_is_seen_by_the_worker(fixture: &Fixture) {
    let id = fixture.submit(fixture.job("a", 0).retries(1)).await;
    let patch = JobPatch {
        payload: Some("{\"new\":true}".into()),
        max_retries: Some(5),
        retry_delay_ms: Some(777),
        timeout_ms: Some(888),
        ..JobPatch::default()
    };
    fixture.patch(id, patch, 1).await;
    let job = fixture.claim_one(2).await;
    assert_eq!(job.payload, "{\"new\":true}");
    assert_eq!((job.options.retry.max_retries, job.options.retry.retry_delay_ms), (5, 777));
    assert_eq!(job.options.timeout_ms, Some(888));
}

pub async fn a_patch_of_the_time_moves_the_job(fixture: &Fixture) {
    let to = |when| JobPatch { scheduled_at: Some(when), ..JobPatch::default() };
    let id = fixture.submit(fixture.job("a", 0).scheduled(fixture.at(500))).await;
    fixture.patch(id, to(Some(fixture.at(900))), 1).await;
    assert_eq!(fixture.promote(500).await.promoted, 0, "the patch moved it to a later time");
    fixture.patch(id, to(Some(fixture.at(700))), 501).await;
    assert_eq!(fixture.promote(700).await.promoted, 1, "the patch moved it to an earlier time");
    fixture.patch(id, to(Some(fixture.at(2_000))), 701).await;
    assert_eq!(fixture.state(id).await, JobState::Pending, "a ready job is delayed");
    assert!(fixture.claim(1, 702).await.is_empty());
    fixture.patch(id, to(None), 703).await;
    let view = fixture.get(id).await;
    assert_eq!((view.status, view.scheduled_at, view.queued_at), (JobState::Queued, None, Some(fixture.at(703))));
    assert_eq!(fixture.claim_one(704).await.id, id, "without a scheduled time it is ready immediately");
}

pub async fn a_patch_changes_the_expiry(fixture: &Fixture) {
    let to = |when| JobPatch { expires_at: Some(when), ..JobPatch::default() };
    let [later, never, sooner] = [
        fixture.submit(fixture.job("a", 0).expires(fixture.at(100))).await,
        fixture.submit(fixture.job("a", 0).expires(fixture.at(100))).await,
        fixture.submit(fixture.job("a", 0)).await,
    ];
    fixture.patch(later, to(Some(fixture.at(200))), 1).await;
    fixture.patch(never, to(None), 1).await;
    fixture.patch(sooner, to(Some(fixture.at(50))), 1).await;
    assert_eq!(fixture.promote(50).await.expired, 1);
    assert_eq!(fixture.promote(100).await.expired, 0);
    assert_eq!(fixture.promote(200).await.expired, 1);
    assert_eq!(fixture.states([later, never, sooner]).await, [JobState::Failed, JobState::Queued, JobState::Failed]);
}

pub async fn a_patch_of_a_blocked_job_keeps_it_blocked(fixture: &Fixture) {
    let parent = fixture.submit_and_claim(fixture.job("parent", 0)).await;
    let child = fixture.submit(fixture.job("child", 1).after(&[parent.id]).scheduled(fixture.at(50))).await;
    let patch = JobPatch { scheduled_at: Some(None), priority: Some(Priority::High), ..JobPatch::default() };
    fixture.patch(child, patch, 2).await;
    assert_eq!(fixture.state(child).await, JobState::Pending);
    assert!(fixture.claim(1, 3).await.is_empty());
    fixture.complete(&parent, 4).await;
    assert_eq!(
        fixture.state(child).await,
        JobState::Queued,
        "it has no scheduled time any more, and its parent has completed"
    );
    assert_eq!(fixture.get(child).await.priority, Priority::High);
}

pub async fn a_patch_of_a_retrying_job_keeps_it_retrying(fixture: &Fixture) {
    let job = fixture.submit_and_claim(fixture.job("a", 0)).await;
    fixture.retry_at(&job, 100, 1).await;
    let patch = JobPatch { priority: Some(Priority::High), payload: Some("{\"b\":2}".into()), ..JobPatch::default() };
    fixture.patch(job.id, patch, 2).await;
    let view = fixture.get(job.id).await;
    assert_eq!((view.status, view.next_attempt_at), (JobState::Retrying, Some(fixture.at(100))));
    fixture.promote(100).await;
    let reclaimed = fixture.claim_one(101).await;
    assert_eq!((reclaimed.payload.as_str(), reclaimed.retry_count), ("{\"b\":2}", 1));
    fixture.complete(&reclaimed, 102).await;
}

pub async fn the_next_attempt_of_a_retrying_job_can_be_moved(fixture: &Fixture) {
    let job = fixture.submit_and_claim(fixture.job("a", 0)).await;
    fixture.retry_at(&job, 100, 1).await;
    let at = |ms: Option<i64>| JobPatch { scheduled_at: Some(ms.map(|ms| fixture.at(ms))), ..JobPatch::default() };
    fixture.patch(job.id, at(Some(5_000)), 2).await;
    let view = fixture.get(job.id).await;
    assert_eq!((view.status, view.next_attempt_at), (JobState::Retrying, Some(fixture.at(5_000))));
    assert_eq!(fixture.promote(4_999).await.promoted, 0);
    fixture.patch(job.id, at(None), 5).await;
    assert_eq!(fixture.get(job.id).await.next_attempt_at, Some(fixture.at(5)));
    fixture.promote(5).await;
    assert_eq!(fixture.claim_one(6).await.retry_count, 1);
}

pub async fn a_patch_of_name_and_tags_changes_how_the_job_is_found(fixture: &Fixture) {
    let id = fixture.submit(fixture.job("a", 0).named("before").tag("red").tag("blue")).await;
    let patch = JobPatch {
        name: Some(Some("after".into())),
        tags: Some(vec!["blue".into(), "green".into()]),
        webhook_url: Some(Some("https://example.org/hook".into())),
        ..JobPatch::default()
    };
    fixture.patch(id, patch, 1).await;
    let view = fixture.get(id).await;
    assert_eq!((view.name.as_str(), view.tags.join(" ").as_str()), ("after", "blue green"));
    assert_eq!(view.webhook_url.as_deref(), Some("https://example.org/hook"));
    let tag = |text: &str| Filter { tag: Some(text.into()), ..Filter::default() };
    let name = |text: &str| Filter { name: Some(text.into()), ..Filter::default() };
    for filter in [tag("blue"), tag("green"), name("after")] {
        assert_eq!(fixture.list(filter).await, [id]);
    }
    for filter in [tag("red"), name("before"), name("a")] {
        assert_eq!(fixture.list(filter).await, []);
    }
    let cleared = JobPatch { name: Some(None), tags: Some(vec![]), webhook_url: Some(None), ..JobPatch::default() };
    fixture.patch(id, cleared, 2).await;
    let view = fixture.get(id).await;
    assert_eq!((view.name.as_str(), view.tags.len(), view.webhook_url), ("a", 0, None));
    assert_eq!(fixture.list(name("a")).await, [id]);
    assert_eq!(fixture.list(tag("blue")).await, []);
    let own = JobPatch { name: Some(Some("a".into())), ..JobPatch::default() };
    fixture.patch(id, own, 3).await;
    assert_eq!(fixture.list(name("a")).await, [id], "a name equal to the type is not stored as a separate name");
    fixture.store.job_delete(id, None, fixture.at(4)).await.unwrap();
    assert_eq!(fixture.database.tables_with(id).await, [""; 0]);
}

pub async fn running_and_finished_jobs_cannot_be_patched(fixture: &Fixture) {
    let patch =
        |id| fixture.store.job_patch(id, JobPatch { max_retries: Some(1), ..JobPatch::default() }, None, fixture.at(9));
    for (id, state) in finished(fixture).await {
        assert_eq!(rejected(patch(id).await), state);
    }
    let job = fixture.submit_and_claim(fixture.job("a", 6)).await;
    assert_eq!(rejected(patch(job.id).await), JobState::Assigned);
    fixture.report_start(&job, 7).await;
    assert_eq!(rejected(patch(job.id).await), JobState::Processing);
    assert_eq!(fixture.get(job.id).await.max_retries, 3);
}

pub async fn a_deleted_job_leaves_nothing(fixture: &Fixture) {
    let with_all_options = |n: u8| {
        let key = format!("k{n}");
        let job = fixture.job("a", 0).tag("t").tag("u").named("n").schedule("s").unique(&key).idempotent(&key, n);
        job.expires(fixture.at(1_000_000))
    };
    let parent = fixture.submit_and_claim(fixture.job("parent", 0)).await;
    let ready = fixture.submit(with_all_options(1)).await;
    fixture.store.job_delete(ready, None, fixture.at(1_000)).await.unwrap();
    let delayed = fixture.submit(with_all_options(2).scheduled(fixture.at(50))).await;
    fixture.store.job_delete(delayed, None, fixture.at(1_000)).await.unwrap();
    let blocked = fixture.submit(with_all_options(3).after(&[parent.id])).await;
    fixture.store.job_delete(blocked, None, fixture.at(1_000)).await.unwrap();
    let run_with_all_rows = async |n| -> ClaimedJob {
        let job = fixture.submit_and_claim(with_all_options(n)).await;
        fixture.report_start(&job, 1).await;
        fixture.report_update(&job, percent(1.0, "x"), 1).await;
        fixture.report_update(&job, step("E1", "1"), 1).await;
        fixture.retry_at(&job, 2, 2).await;
        fixture.promote(2).await;
        let job = fixture.claim_one(3).await;
        fixture.report_start(&job, 3).await;
        fixture.cancel(job.id, 3).await;
        job
    };
    let mut deleted = vec![ready, delayed, blocked];
    for (n, outcome) in [(4, completed()), (5, failed("no")), (6, cancelled())] {
        let job = run_with_all_rows(n).await;
        assert!(fixture.end(&job, outcome, 4).await);
        fixture.store.job_delete(job.id, None, fixture.at(1_000)).await.unwrap();
        deleted.push(job.id);
    }
    for id in deleted {
        assert_eq!(fixture.database.tables_with(id).await, [""; 0]);
        assert!(fixture.store.job_get(id).await.unwrap().is_none());
    }
    assert_eq!([fixture.total(Tally::Queued).await, fixture.total(Tally::InFlight).await], [0, 1]);
    fixture.submit(with_all_options(1)).await;
}

pub async fn a_running_job_cannot_be_deleted(fixture: &Fixture) {
    let job = fixture.submit_and_claim(fixture.job("a", 0)).await;
    assert_eq!(rejected(fixture.store.job_delete(job.id, None, fixture.at(1_000)).await), JobState::Assigned);
    fixture.report_start(&job, 1).await;
    assert_eq!(rejected(fixture.store.job_delete(job.id, None, fixture.at(1_000)).await), JobState::Processing);
    fixture.complete(&job, 2).await;
    fixture.store.job_delete(job.id, None, fixture.at(1_000)).await.unwrap();
}

pub async fn changes_of_unknown_jobs_are_rejected(fixture: &Fixture) {
    let id = JobId::new();
    let now = fixture.at(0);
    for answer in [
        fixture.store.job_cancel(id, "", None, now).await.map(|_| ()),
        fixture.store.job_retry(id, None, now).await.map(|_| ()),
        fixture.store.job_patch(id, JobPatch::default(), None, now).await,
        fixture.store.job_delete(id, None, fixture.at(1_000)).await,
    ] {
        assert!(matches!(answer, Err(StoreError::NotFound(missing)) if missing == id), "{answer:?}");
    }
}
