//! Idempotency keys and unique keys.

use faena_domain::{JobId, JobState, NewJob};
use faena_store::{StoreError, Submitted, Tally};
use futures_util::future::join_all;

use crate::support::*;

fn holder(result: Result<Vec<Submitted>, StoreError>) -> Option<JobId> {
    match result {
        Err(StoreError::Conflict { holder, .. }) => holder,
        other => panic!("a conflict was expected, not {other:?}"),
    }
}

pub async fn a_repeated_idempotency_key_returns_the_first_job(world: &World) {
    let first = world.submit(world.job("pay", 0).idempotent("k", 1)).await;
    let again = world.try_submit(vec![world.job("pay", 5).idempotent("k", 1)], 5).await.unwrap().remove(0);

    assert_eq!((again.id, again.existed, again.status), (first, true, JobState::Queued));
    assert_eq!(again.created_at, world.at(0));
    let claimed = world.claim_one(6).await;
    world.complete(&claimed, 7).await;
    let again = world.try_submit(vec![world.job("pay", 8).idempotent("k", 1)], 8).await.unwrap().remove(0);
    assert_eq!((again.id, again.existed, again.status), (first, true, JobState::Completed));
    assert!(world.claim(10, 9).await.is_empty(), "nothing new was stored");
}

pub async fn an_idempotency_key_with_another_body_is_refused(world: &World) {
    let first = world.submit(world.job("pay", 0).idempotent("k", 1)).await;
    assert_eq!(holder(world.try_submit(vec![world.job("pay", 1).idempotent("k", 2)], 1).await), Some(first));
    assert_eq!(world.total(Tally::Queued).await, 1);
}

pub async fn twenty_concurrent_submits_with_one_idempotency_key_create_one_job(world: &World) {
    let calls = (0..20).map(|_| world.try_submit(vec![world.job("pay", 0).idempotent("k", 1)], 0));
    let answers: Vec<Submitted> = join_all(calls).await.into_iter().map(|answer| answer.unwrap().remove(0)).collect();

    assert_eq!(answers.iter().filter(|answer| !answer.existed).count(), 1);
    assert!(answers.iter().all(|answer| answer.id == answers[0].id && answer.status == JobState::Queued));
    assert_eq!(world.total(Tally::Queued).await, 1);
}

pub async fn a_batch_repeated_under_its_idempotency_keys_makes_nothing_new(world: &World) {
    let batch = || (0..5).map(|n| world.job("pay", 0).idempotent(&format!("k{n}"), n)).collect::<Vec<NewJob>>();
    let first = world.submit_all(batch()).await;
    let mut more = batch();
    more.push(world.job("pay", 0).idempotent("k5", 5));
    let answers = world.try_submit(more, 1).await.unwrap();

    assert_eq!(answers[..5].iter().map(|answer| answer.id).collect::<Vec<_>>(), first);
    assert_eq!(answers.iter().map(|answer| answer.existed).collect::<Vec<_>>(), [true, true, true, true, true, false]);
    assert_eq!(world.total(Tally::Queued).await, 6);
}

pub async fn one_idempotency_key_twice_in_a_batch_makes_one_job(world: &World) {
    let (a, b) = (world.job("pay", 0).idempotent("k", 1), world.job("pay", 0).idempotent("k", 1));
    let child = world.job("child", 0).after(&[b.id]);
    let answers = world.try_submit(vec![a.clone(), b, child.clone()], 0).await.unwrap();

    assert_eq!([answers[0].id, answers[1].id], [a.id, a.id]);
    assert_eq!(answers.iter().map(|answer| answer.existed).collect::<Vec<_>>(), [false, true, false]);
    assert_eq!(answers[1].status, JobState::Queued);
    assert_eq!(world.state(child.id).await, JobState::Pending);
    let claimed = world.claim_one(1).await;
    world.complete(&claimed, 2).await;
    assert_eq!(world.state(child.id).await, JobState::Queued);
}

pub async fn one_idempotency_key_for_two_bodies_in_a_batch_is_refused(world: &World) {
    let batch = vec![world.job("pay", 0).idempotent("k", 1), world.job("pay", 0).idempotent("k", 2)];
    holder(world.try_submit(batch, 0).await);
    assert_eq!(world.total(Tally::Queued).await, 0);
}

pub async fn a_child_of_a_repeated_job_depends_on_the_first_one(world: &World) {
    let first = world.running(world.job("parent", 0).idempotent("k", 1)).await;
    let again = world.job("parent", 1).idempotent("k", 1);
    let child = world.job("child", 1).after(&[again.id]);
    world.submit_all(vec![again, child.clone()]).await;
    assert_eq!(world.state(child.id).await, JobState::Pending);

    world.complete(&first, 2).await;

    assert_eq!(world.state(child.id).await, JobState::Queued);
    assert_eq!(world.get(child.id).await.depends_on, [first.id]);
    let again = world.job("parent", 3).idempotent("k", 1);
    let late = world.job("child", 3).after(&[again.id]);
    world.submit_all(vec![again, late.clone()]).await;
    assert_eq!(world.state(late.id).await, JobState::Queued, "the first one is done already");
}

pub async fn a_unique_key_is_held_until_its_job_has_finished(world: &World) {
    let first = world.submit(world.job("sync", 0).unique("k")).await;
    let try_again = async |ms| world.try_submit(vec![world.job("sync", ms).unique("k")], ms).await;

    assert_eq!(holder(try_again(1).await), Some(first), "while it is ready");
    let claimed = world.claim_one(2).await;
    assert_eq!(holder(try_again(3).await), Some(first), "while it is handed out");
    world.begin(&claimed, 3).await;
    assert_eq!(holder(try_again(4).await), Some(first), "while it runs");
    world.retry_at(&claimed, 100, 5).await;
    assert_eq!(holder(try_again(6).await), Some(first), "while it waits for its next try");
    world.promote(100).await;
    let claimed = world.claim_one(101).await;
    world.complete(&claimed, 102).await;
    assert!(!try_again(103).await.unwrap()[0].existed);
}

pub async fn a_unique_key_twice_in_a_batch_is_refused(world: &World) {
    holder(world.try_submit(vec![world.job("a", 0).unique("k"), world.job("b", 0).unique("k")], 0).await);
    assert_eq!(world.total(Tally::Queued).await, 0);
    world.submit(world.job("a", 1).unique("k")).await;
}

pub async fn twenty_concurrent_submits_with_one_unique_key_leave_one_job(world: &World) {
    let calls = (0..20).map(|_| world.try_submit(vec![world.job("sync", 0).unique("k")], 0));
    let (stored, refused): (Vec<_>, Vec<_>) = join_all(calls).await.into_iter().partition(Result::is_ok);

    assert_eq!(stored.len(), 1);
    let stored = stored.into_iter().next().unwrap().unwrap()[0].id;
    assert!(refused.into_iter().all(|answer| holder(answer) == Some(stored)));
}

pub async fn a_repeated_request_with_both_keys_returns_the_first_job(world: &World) {
    let first = world.submit(world.job("sync", 0).unique("u").idempotent("i", 1)).await;
    let again = world.try_submit(vec![world.job("sync", 1).unique("u").idempotent("i", 1)], 1).await.unwrap().remove(0);
    assert_eq!((again.id, again.existed), (first, true));
    let claimed = world.claim_one(2).await;
    world.complete(&claimed, 3).await;
    world.try_submit(vec![world.job("sync", 4).unique("u").idempotent("i", 1)], 4).await.unwrap();
    world.submit(world.job("sync", 5).unique("u")).await;
}

pub async fn a_unique_key_is_free_however_its_job_finishes(world: &World) {
    let job = |ms| world.job("sync", ms).unique("k").expires(world.at(1_000));
    world.complete(&world.running(job(0)).await, 1).await;
    world.fail(&world.running(job(2)).await, 3).await;
    let asked = world.running(job(4)).await;
    world.cancel(asked.id, 5).await;
    assert!(world.end(&asked, cancelled(), 6).await);
    let waiting = world.submit(job(7)).await;
    world.cancel(waiting, 8).await;
    let expired = world.submit(job(9)).await;
    assert_eq!(world.promote(1_000).await.expired, 1);
    assert_eq!(world.state(expired).await, JobState::Failed);
    let deleted = world.submit(world.job("sync", 1_001).unique("k")).await;
    world.store.job_delete(deleted, None, world.at(1_000)).await.unwrap();
    world.submit(world.job("sync", 1_002).unique("k")).await;
}

pub async fn a_manual_retry_takes_the_unique_key_again(world: &World) {
    let job = world.running(world.job("sync", 0).unique("k")).await;
    world.fail(&job, 1).await;
    world.retry_by_person(job.id, 2).await;
    assert_eq!(holder(world.try_submit(vec![world.job("sync", 3).unique("k")], 3).await), Some(job.id));
}

pub async fn a_manual_retry_is_refused_while_another_job_has_the_unique_key(world: &World) {
    let job = world.running(world.job("sync", 0).unique("k")).await;
    world.fail(&job, 1).await;
    let other = world.submit(world.job("sync", 2).unique("k")).await;

    match world.store.job_retry(job.id, None, world.at(3)).await {
        Err(StoreError::Conflict { holder, .. }) => assert_eq!(holder, Some(other)),
        answer => panic!("{answer:?}"),
    }
    assert_eq!(world.state(job.id).await, JobState::Failed);
}

pub async fn a_rejected_batch_leaves_no_key(world: &World) {
    world.submit(world.job("sync", 0).unique("taken")).await;
    let batch = vec![world.job("a", 1).unique("free").idempotent("free", 1), world.job("b", 1).unique("taken")];
    holder(world.try_submit(batch, 1).await);
    let unknown =
        vec![world.job("a", 2).unique("free").idempotent("free", 1), world.job("b", 2).after(&[JobId::new()])];
    assert!(matches!(world.try_submit(unknown, 2).await, Err(StoreError::Invalid(_))));

    let answer = world.try_submit(vec![world.job("a", 3).unique("free").idempotent("free", 2)], 3).await.unwrap();
    assert!(!answer[0].existed);
}

pub async fn a_job_that_is_cancelled_at_submit_holds_no_unique_key(world: &World) {
    let parent = world.running(world.job("parent", 0)).await;
    world.fail(&parent, 1).await;
    let child = world.submit(world.job("child", 2).after(&[parent.id]).unique("k").expires(world.at(50))).await;
    assert_eq!(world.state(child).await, JobState::Cancelled);
    world.submit(world.job("child", 3).unique("k")).await;
}
