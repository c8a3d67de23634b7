//! Idempotency keys and unique keys.

use faena_domain::{JobId, JobState, NewJob};
use faena_store::{StoreError, Submitted, Tally};
use futures_util::future::join_all;

use crate::support::*;

/// Returns the existing job that a conflict names.
fn conflicting_job(result: Result<Vec<Submitted>, StoreError>) -> Option<JobId> {
    match result {
        Err(StoreError::Conflict { existing_job, .. }) => existing_job,
        other => panic!("a conflict was expected, not {other:?}"),
    }
}

pub async fn a_repeated_idempotency_key_returns_the_first_job(fixture: &Fixture) {
    let first = fixture.submit(fixture.job("pay", 0).idempotent("k", 1)).await;
    let repeated = fixture.try_submit(vec![fixture.job("pay", 5).idempotent("k", 1)], 5).await.unwrap().remove(0);

    assert_eq!((repeated.id, repeated.existed, repeated.status), (first, true, JobState::Queued));
    assert_eq!(repeated.created_at, fixture.at(0));
    let claimed = fixture.claim_one(6).await;
    fixture.complete(&claimed, 7).await;
    let repeated = fixture.try_submit(vec![fixture.job("pay", 8).idempotent("k", 1)], 8).await.unwrap().remove(0);
    assert_eq!((repeated.id, repeated.existed, repeated.status), (first, true, JobState::Completed));
    assert!(fixture.claim(10, 9).await.is_empty(), "nothing new was stored");
}

pub async fn an_idempotency_key_with_another_body_is_rejected(fixture: &Fixture) {
    let first = fixture.submit(fixture.job("pay", 0).idempotent("k", 1)).await;
    assert_eq!(
        conflicting_job(fixture.try_submit(vec![fixture.job("pay", 1).idempotent("k", 2)], 1).await),
        Some(first)
    );
    assert_eq!(fixture.total(Tally::Queued).await, 1);
}

pub async fn twenty_concurrent_submits_with_one_idempotency_key_create_one_job(fixture: &Fixture) {
    let calls = (0..20).map(|_| fixture.try_submit(vec![fixture.job("pay", 0).idempotent("k", 1)], 0));
    let results: Vec<Submitted> = join_all(calls).await.into_iter().map(|result| result.unwrap().remove(0)).collect();

    assert_eq!(results.iter().filter(|result| !result.existed).count(), 1);
    assert!(results.iter().all(|result| result.id == results[0].id && result.status == JobState::Queued));
    assert_eq!(fixture.total(Tally::Queued).await, 1);
}

pub async fn a_batch_repeated_under_its_idempotency_keys_creates_no_jobs(fixture: &Fixture) {
    let batch = || (0..5).map(|n| fixture.job("pay", 0).idempotent(&format!("k{n}"), n)).collect::<Vec<NewJob>>();
    let first = fixture.submit_all(batch()).await;
    let mut more = batch();
    more.push(fixture.job("pay", 0).idempotent("k5", 5));
    let results = fixture.try_submit(more, 1).await.unwrap();

    assert_eq!(results[..5].iter().map(|result| result.id).collect::<Vec<_>>(), first);
    assert_eq!(results.iter().map(|result| result.existed).collect::<Vec<_>>(), [true, true, true, true, true, false]);
    assert_eq!(fixture.total(Tally::Queued).await, 6);
}

pub async fn one_idempotency_key_twice_in_a_batch_creates_one_job(fixture: &Fixture) {
    let (a, b) = (fixture.job("pay", 0).idempotent("k", 1), fixture.job("pay", 0).idempotent("k", 1));
    let child = fixture.job("child", 0).after(&[b.id]);
    let results = fixture.try_submit(vec![a.clone(), b, child.clone()], 0).await.unwrap();

    assert_eq!([results[0].id, results[1].id], [a.id, a.id]);
    assert_eq!(results.iter().map(|result| result.existed).collect::<Vec<_>>(), [false, true, false]);
    assert_eq!(results[1].status, JobState::Queued);
    assert_eq!(fixture.state(child.id).await, JobState::Pending);
    let claimed = fixture.claim_one(1).await;
    fixture.complete(&claimed, 2).await;
    assert_eq!(fixture.state(child.id).await, JobState::Queued);
}

pub async fn one_idempotency_key_for_two_bodies_in_a_batch_is_rejected(fixture: &Fixture) {
    let batch = vec![fixture.job("pay", 0).idempotent("k", 1), fixture.job("pay", 0).idempotent("k", 2)];
    conflicting_job(fixture.try_submit(batch, 0).await);
    assert_eq!(fixture.total(Tally::Queued).await, 0);
}

pub async fn a_child_of_a_repeated_job_depends_on_the_first_one(fixture: &Fixture) {
    let first = fixture.submit_and_claim(fixture.job("parent", 0).idempotent("k", 1)).await;
    let repeated = fixture.job("parent", 1).idempotent("k", 1);
    let child = fixture.job("child", 1).after(&[repeated.id]);
    fixture.submit_all(vec![repeated, child.clone()]).await;
    assert_eq!(fixture.state(child.id).await, JobState::Pending);

    fixture.complete(&first, 2).await;

    assert_eq!(fixture.state(child.id).await, JobState::Queued);
    assert_eq!(fixture.get(child.id).await.depends_on, [first.id]);
    let repeated = fixture.job("parent", 3).idempotent("k", 1);
    let late = fixture.job("child", 3).after(&[repeated.id]);
    fixture.submit_all(vec![repeated, late.clone()]).await;
    assert_eq!(fixture.state(late.id).await, JobState::Queued, "the first one has already completed");
}

pub async fn a_unique_key_is_taken_until_its_job_has_finished(fixture: &Fixture) {
    let first = fixture.submit(fixture.job("sync", 0).unique("k")).await;
    let try_again = async |ms| fixture.try_submit(vec![fixture.job("sync", ms).unique("k")], ms).await;

    assert_eq!(conflicting_job(try_again(1).await), Some(first), "while it is ready");
    let claimed = fixture.claim_one(2).await;
    assert_eq!(conflicting_job(try_again(3).await), Some(first), "while it is in flight");
    fixture.report_start(&claimed, 3).await;
    assert_eq!(conflicting_job(try_again(4).await), Some(first), "while it runs");
    fixture.retry_at(&claimed, 100, 5).await;
    assert_eq!(conflicting_job(try_again(6).await), Some(first), "while it waits for its next attempt");
    fixture.promote(100).await;
    let claimed = fixture.claim_one(101).await;
    fixture.complete(&claimed, 102).await;
    assert!(!try_again(103).await.unwrap()[0].existed);
}

pub async fn a_unique_key_twice_in_a_batch_is_rejected(fixture: &Fixture) {
    conflicting_job(
        fixture.try_submit(vec![fixture.job("a", 0).unique("k"), fixture.job("b", 0).unique("k")], 0).await,
    );
    assert_eq!(fixture.total(Tally::Queued).await, 0);
    fixture.submit(fixture.job("a", 1).unique("k")).await;
}

pub async fn twenty_concurrent_submits_with_one_unique_key_leave_one_job(fixture: &Fixture) {
    let calls = (0..20).map(|_| fixture.try_submit(vec![fixture.job("sync", 0).unique("k")], 0));
    let (stored, rejected): (Vec<_>, Vec<_>) = join_all(calls).await.into_iter().partition(Result::is_ok);

    assert_eq!(stored.len(), 1);
    let stored = stored.into_iter().next().unwrap().unwrap()[0].id;
    assert!(rejected.into_iter().all(|result| conflicting_job(result) == Some(stored)));
}

pub async fn a_repeated_request_with_both_keys_returns_the_first_job(fixture: &Fixture) {
    let first = fixture.submit(fixture.job("sync", 0).unique("u").idempotent("i", 1)).await;
    let repeated =
        fixture.try_submit(vec![fixture.job("sync", 1).unique("u").idempotent("i", 1)], 1).await.unwrap().remove(0);
    assert_eq!((repeated.id, repeated.existed), (first, true));
    let claimed = fixture.claim_one(2).await;
    fixture.complete(&claimed, 3).await;
    fixture.try_submit(vec![fixture.job("sync", 4).unique("u").idempotent("i", 1)], 4).await.unwrap();
    fixture.submit(fixture.job("sync", 5).unique("u")).await;
}

pub async fn a_unique_key_is_free_again_however_its_job_finishes(fixture: &Fixture) {
    let job = |ms| fixture.job("sync", ms).unique("k").expires(fixture.at(1_000));
    fixture.complete(&fixture.submit_and_claim(job(0)).await, 1).await;
    fixture.fail(&fixture.submit_and_claim(job(2)).await, 3).await;
    let to_cancel = fixture.submit_and_claim(job(4)).await;
    fixture.cancel(to_cancel.id, 5).await;
    assert!(fixture.end(&to_cancel, cancelled(), 6).await);
    let waiting = fixture.submit(job(7)).await;
    fixture.cancel(waiting, 8).await;
    let expired = fixture.submit(job(9)).await;
    assert_eq!(fixture.promote(1_000).await.expired, 1);
    assert_eq!(fixture.state(expired).await, JobState::Failed);
    let deleted = fixture.submit(fixture.job("sync", 1_001).unique("k")).await;
    fixture.store.job_delete(deleted, None, fixture.at(1_000)).await.unwrap();
    fixture.submit(fixture.job("sync", 1_002).unique("k")).await;
}

pub async fn a_manual_retry_takes_the_unique_key_again(fixture: &Fixture) {
    let job = fixture.submit_and_claim(fixture.job("sync", 0).unique("k")).await;
    fixture.fail(&job, 1).await;
    fixture.retry_manually(job.id, 2).await;
    assert_eq!(conflicting_job(fixture.try_submit(vec![fixture.job("sync", 3).unique("k")], 3).await), Some(job.id));
}

pub async fn a_manual_retry_is_rejected_while_another_job_has_the_unique_key(fixture: &Fixture) {
    let job = fixture.submit_and_claim(fixture.job("sync", 0).unique("k")).await;
    fixture.fail(&job, 1).await;
    let other = fixture.submit(fixture.job("sync", 2).unique("k")).await;

    match fixture.store.job_retry(job.id, None, fixture.at(3)).await {
        Err(StoreError::Conflict { existing_job, .. }) => assert_eq!(existing_job, Some(other)),
        result => panic!("{result:?}"),
    }
    assert_eq!(fixture.state(job.id).await, JobState::Failed);
}

pub async fn a_rejected_batch_leaves_no_key(fixture: &Fixture) {
    fixture.submit(fixture.job("sync", 0).unique("taken")).await;
    let batch = vec![fixture.job("a", 1).unique("free").idempotent("free", 1), fixture.job("b", 1).unique("taken")];
    conflicting_job(fixture.try_submit(batch, 1).await);
    let unknown =
        vec![fixture.job("a", 2).unique("free").idempotent("free", 1), fixture.job("b", 2).after(&[JobId::new()])];
    assert!(matches!(fixture.try_submit(unknown, 2).await, Err(StoreError::Invalid(_))));

    let result = fixture.try_submit(vec![fixture.job("a", 3).unique("free").idempotent("free", 2)], 3).await.unwrap();
    assert!(!result[0].existed);
}

pub async fn a_job_that_is_cancelled_at_submit_does_not_take_its_unique_key(fixture: &Fixture) {
    let parent = fixture.submit_and_claim(fixture.job("parent", 0)).await;
    fixture.fail(&parent, 1).await;
    let child = fixture.submit(fixture.job("child", 2).after(&[parent.id]).unique("k").expires(fixture.at(50))).await;
    assert_eq!(fixture.state(child).await, JobState::Cancelled);
    fixture.submit(fixture.job("child", 3).unique("k")).await;
}
