//! Jobs that depend on others.

use faena_domain::{JobId, JobState, NewJob};
use faena_store::{StoreError, Tally};

use crate::support::*;

const CANCELLED: JobState = JobState::Cancelled;
const PENDING: JobState = JobState::Pending;
const QUEUED: JobState = JobState::Queued;

pub async fn an_unknown_parent_is_rejected_and_nothing_is_stored(fixture: &Fixture) {
    let unknown = JobId::new();
    let batch = vec![fixture.job("a", 0), fixture.job("b", 0).after(&[unknown])];
    match fixture.try_submit(batch, 0).await {
        Err(StoreError::Invalid(errors)) => {
            assert_eq!(errors.len(), 1);
            assert_eq!(errors[0].path, "jobs[1].dependsOn");
            assert!(errors[0].message.contains(&unknown.to_string()));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(fixture.database.number("SELECT count(*) FROM job").await, 0);
}

pub async fn a_child_waits_for_all_its_parents(fixture: &Fixture) {
    let a = fixture.submit_and_claim(fixture.job("a", 0)).await;
    let b = fixture.submit_and_claim(fixture.job("b", 1)).await;
    let child = fixture.submit(fixture.job("child", 2).after(&[a.id, b.id])).await;
    assert_eq!(fixture.state(child).await, PENDING);

    fixture.complete(&a, 3).await;
    assert_eq!(fixture.state(child).await, PENDING);
    fixture.complete(&b, 4).await;

    assert_eq!(fixture.state(child).await, QUEUED);
    assert_eq!(fixture.events(child).await, ["created", "parents_done", "queued"]);
    assert_eq!(fixture.claim_one(5).await.id, child);
}

pub async fn a_child_of_a_finished_and_an_open_parent_waits_for_the_open_one_only(fixture: &Fixture) {
    let done = fixture.submit_and_claim(fixture.job("a", 0)).await;
    fixture.complete(&done, 1).await;
    let failed = fixture.submit_and_claim(fixture.job("a", 2)).await;
    fixture.fail(&failed, 3).await;
    let open = fixture.submit_and_claim(fixture.job("b", 4)).await;
    let child = fixture.submit(fixture.job("child", 5).after(&[done.id, open.id])).await;
    let anyway =
        fixture.submit(fixture.job("child", 5).after(&[done.id, failed.id, open.id]).run_on_parent_failure()).await;
    assert_eq!(fixture.states([child, anyway]).await, [PENDING; 2]);
    fixture.complete(&open, 6).await;
    assert_eq!(fixture.states([child, anyway]).await, [QUEUED; 2]);
}

pub async fn a_child_of_finished_parents_is_ready_immediately(fixture: &Fixture) {
    let parent = fixture.submit_and_claim(fixture.job("parent", 0)).await;
    fixture.complete(&parent, 1).await;
    let child = fixture.submit(fixture.job("child", 2).after(&[parent.id])).await;
    assert_eq!(fixture.state(child).await, QUEUED);
}

pub async fn a_child_of_a_failed_or_cancelled_parent_is_cancelled_immediately(fixture: &Fixture) {
    let failed = fixture.submit_and_claim(fixture.job("parent", 0)).await;
    fixture.fail(&failed, 1).await;
    let cancelled = fixture.submit(fixture.job("parent", 2)).await;
    fixture.cancel(cancelled, 3).await;
    for (parent, state) in [(failed.id, "FAILED"), (cancelled, "CANCELLED")] {
        let child = fixture.submit(fixture.job("child", 4).after(&[parent])).await;
        let view = fixture.get(child).await;
        assert_eq!(view.status, CANCELLED);
        let cause = view.error.unwrap();
        assert!(cause.contains(&parent.to_string()) && cause.contains(state), "{cause}");
        let anyway = fixture.submit(fixture.job("child", 4).after(&[parent]).run_on_parent_failure()).await;
        assert_eq!(fixture.state(anyway).await, QUEUED);
    }
}

pub async fn a_failed_parent_cancels_its_children_down_the_chain(fixture: &Fixture) {
    let parent = fixture.submit_and_claim(fixture.job("parent", 0)).await;
    let child = fixture.submit(fixture.job("child", 1).after(&[parent.id]).unique("k")).await;
    let grandchild = fixture.submit(fixture.job("grandchild", 2).after(&[child])).await;
    let last = fixture.submit(fixture.job("last", 3).after(&[grandchild])).await;
    let anyway = fixture.submit(fixture.job("anyway", 3).after(&[grandchild]).run_on_parent_failure()).await;

    fixture.fail(&parent, 4).await;

    assert_eq!(fixture.states([child, grandchild, last, anyway]).await, [CANCELLED, CANCELLED, CANCELLED, QUEUED]);
    for (id, cause) in [(child, parent.id), (grandchild, child), (last, grandchild)] {
        assert!(fixture.get(id).await.error.unwrap().contains(&cause.to_string()));
    }
    fixture.submit(fixture.job("child", 5).unique("k")).await;
}

pub async fn a_child_set_to_run_anyway_runs_although_a_parent_failed(fixture: &Fixture) {
    let a = fixture.submit_and_claim(fixture.job("a", 0)).await;
    let b = fixture.submit_and_claim(fixture.job("b", 1)).await;
    let child = fixture.submit(fixture.job("child", 2).after(&[a.id, b.id]).run_on_parent_failure()).await;
    fixture.fail(&a, 3).await;
    assert_eq!(fixture.state(child).await, PENDING);
    fixture.complete(&b, 4).await;
    assert_eq!(fixture.state(child).await, QUEUED);
}

pub async fn a_child_with_a_scheduled_time_waits_for_it_after_its_parents(fixture: &Fixture) {
    let parent = fixture.submit_and_claim(fixture.job("parent", 0)).await;
    let child = fixture.submit(fixture.job("child", 1).after(&[parent.id]).scheduled(fixture.at(5_000))).await;
    fixture.complete(&parent, 2).await;
    assert_eq!(fixture.state(child).await, PENDING);
    assert_eq!(fixture.promote(4_999).await.promoted, 0);
    assert_eq!(fixture.promote(5_000).await.promoted, 1);
    assert_eq!(fixture.state(child).await, QUEUED);
}

pub async fn two_parents_that_end_concurrently_release_their_child_once(fixture: &Fixture) {
    for round in 0..20 {
        let parents = fixture.submit_all(vec![fixture.job("a", round), fixture.job("b", round)]).await;
        let jobs: Vec<_> = fixture.claim(2, round).await;
        let child = fixture.submit(fixture.job("child", round).after(&parents)).await;
        let (a, b) = tokio::join!(fixture.end(&jobs[0], completed(), round), fixture.end(&jobs[1], completed(), round));
        assert!(a && b);
        assert_eq!(fixture.state(child).await, QUEUED, "in round {round}");
        fixture.complete(&fixture.claim_one(round).await, round).await;
    }
    assert_eq!(fixture.total(Tally::Completed).await, 60);
}

pub async fn a_deleted_parent_cancels_its_child(fixture: &Fixture) {
    let parent = fixture.submit(fixture.job("parent", 0)).await;
    let child = fixture.submit(fixture.job("child", 1).after(&[parent])).await;
    let anyway = fixture.submit(fixture.job("child", 1).after(&[parent]).run_on_parent_failure()).await;
    fixture.store.job_delete(parent, None, fixture.at(1_000)).await.unwrap();
    assert_eq!(fixture.states([child, anyway]).await, [CANCELLED, QUEUED]);
    assert!(fixture.get(child).await.error.unwrap().contains("deleted"));
}

pub async fn a_cancelled_parent_cancels_its_child(fixture: &Fixture) {
    let parent = fixture.submit(fixture.job("parent", 0)).await;
    let child = fixture.submit(fixture.job("child", 1).after(&[parent])).await;
    fixture.cancel(parent, 2).await;
    assert_eq!(fixture.state(child).await, CANCELLED);
}

pub async fn an_expired_parent_cancels_its_child(fixture: &Fixture) {
    let parent = fixture.submit(fixture.job("parent", 0).expires(fixture.at(100))).await;
    let child = fixture.submit(fixture.job("child", 1).after(&[parent])).await;
    fixture.promote(100).await;
    assert_eq!(fixture.states([parent, child]).await, [JobState::Failed, CANCELLED]);
}

pub async fn a_permanently_lost_parent_cancels_its_child(fixture: &Fixture) {
    let parent = fixture.submit(fixture.job("parent", 0).retries(0)).await;
    let claimed = fixture.claim_as(faena_domain::NodeId::new(), 1, 1).await.remove(0);
    let child = fixture.submit(fixture.job("child", 1).after(&[parent])).await;
    fixture.report_start(&claimed, 2).await;
    fixture.recover(0, 3).await;
    assert_eq!(fixture.states([parent, child]).await, [JobState::Failed, CANCELLED]);
}

/// Completes a parent without releasing its children: its dependency rows are absent meanwhile.
async fn complete_without_release(fixture: &Fixture, parent: &faena_store::ClaimedJob, children: &[JobId], ms: i64) {
    fixture.database.run("DELETE FROM dependency").await;
    fixture.complete(parent, ms).await;
    let (parent, database) = (fixture.database.literal(parent.id), &fixture.database);
    for child in children {
        database
            .run(&format!("INSERT INTO dependency (parent, child) VALUES ({parent}, {})", database.literal(*child)))
            .await;
    }
}

pub async fn a_child_whose_release_was_missed_is_released_by_the_next_check(fixture: &Fixture) {
    let parent = fixture.submit_and_claim(fixture.job("parent", 0)).await;
    let child = fixture.submit(fixture.job("child", 1).after(&[parent.id])).await;
    complete_without_release(fixture, &parent, &[child], 2).await;
    assert_eq!(fixture.state(child).await, PENDING);

    assert_eq!(fixture.promote(1_000).await.unblocked, 0, "its next check is not due yet");
    let due = fixture.promote(2_001).await;

    assert_eq!((due.unblocked, due.promoted), (1, 0));
    assert_eq!(fixture.state(child).await, QUEUED);
}

pub async fn checking_parents_again_does_not_release_a_delayed_sibling(fixture: &Fixture) {
    let parent = fixture.submit_and_claim(fixture.job("parent", 0)).await;
    let later = fixture.at(1_000_000);
    let children = [
        fixture.submit(fixture.job("child", 1).after(&[parent.id])).await,
        fixture.submit(fixture.job("child", 1).after(&[parent.id]).scheduled(later)).await,
        fixture.submit(fixture.job("child", 1).after(&[parent.id]).scheduled(later)).await,
    ];
    complete_without_release(fixture, &parent, &children, 2).await;
    fixture.promote(2_001).await;
    assert_eq!(fixture.states(children).await, [QUEUED, PENDING, PENDING]);
    fixture.promote(999_999).await;
    assert_eq!(fixture.states(children).await, [QUEUED, PENDING, PENDING], "not before its time");
    fixture.promote(1_000_000).await;
    assert_eq!(fixture.states(children).await, [QUEUED; 3]);
}

pub async fn a_graph_in_one_batch_runs_in_order(fixture: &Fixture) {
    let root = fixture.job("root", 0);
    let left = fixture.job("left", 0).after(&[root.id]);
    let right = fixture.job("right", 0).after(&[root.id]);
    let leaf = fixture.job("leaf", 0).after(&[left.id, right.id]);
    let ids = [leaf.id, right.id, left.id, root.id];
    let results = fixture.try_submit([leaf, right, left, root].to_vec(), 0).await.unwrap();
    assert_eq!(results.iter().map(|a| a.status).collect::<Vec<_>>(), [PENDING, PENDING, PENDING, QUEUED]);

    let mut order: Vec<Vec<String>> = Vec::new();
    for ms in 1..4 {
        let jobs = fixture.claim(10, ms).await;
        let mut kinds = Vec::new();
        for job in &jobs {
            kinds.push(fixture.get(job.id).await.kind);
            fixture.complete(job, ms).await;
        }
        kinds.sort();
        order.push(kinds);
    }
    assert_eq!(order, [vec!["root"], vec!["left", "right"], vec!["leaf"]]);
    assert_eq!(fixture.states(ids).await, [JobState::Completed; 4]);
}

pub async fn cancelling_a_child_does_not_change_its_parents(fixture: &Fixture) {
    let parent = fixture.submit_and_claim(fixture.job("parent", 0)).await;
    let child: NewJob = fixture.job("child", 1).after(&[parent.id]);
    let child = fixture.submit(child).await;
    fixture.cancel(child, 2).await;
    fixture.complete(&parent, 3).await;
    assert_eq!(fixture.states([parent.id, child]).await, [JobState::Completed, CANCELLED]);
    fixture.retry_manually(child, 4).await;
    fixture.promote(5).await;
    assert_eq!(fixture.state(child).await, QUEUED);
}

pub async fn a_retried_child_waits_for_a_parent_that_was_retried_before_it(fixture: &Fixture) {
    let parent = fixture.submit(fixture.job("a", 0)).await;
    let child = fixture.submit(fixture.job("b", 0).after(&[parent])).await;
    fixture.cancel(parent, 1).await;
    assert_eq!(fixture.state(child).await, JobState::Cancelled);

    fixture.store.job_retry(parent, None, fixture.at(2)).await.unwrap();
    fixture.store.job_retry(child, None, fixture.at(3)).await.unwrap();
    fixture.promote(4).await;
    assert_eq!(fixture.states([parent, child]).await, [JobState::Queued, JobState::Pending]);

    let job = fixture.claim_one(5).await;
    assert_eq!(job.id, parent);
    fixture.complete(&job, 6).await;
    fixture.promote(7).await;
    assert_eq!(fixture.state(child).await, JobState::Queued);
}
