//! Jobs that depend on others.

use faena_domain::{JobId, JobState, NewJob};
use faena_store::{StoreError, Tally};

use crate::support::*;

const CANCELLED: JobState = JobState::Cancelled;
const PENDING: JobState = JobState::Pending;
const QUEUED: JobState = JobState::Queued;

pub async fn an_unknown_parent_is_refused_and_nothing_is_stored(world: &World) {
    let unknown = JobId::new();
    let batch = vec![world.job("a", 0), world.job("b", 0).after(&[unknown])];
    match world.try_submit(batch, 0).await {
        Err(StoreError::Invalid(faults)) => {
            assert_eq!(faults.len(), 1);
            assert_eq!(faults[0].path, "jobs[1].dependsOn");
            assert!(faults[0].message.contains(&unknown.to_string()));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(world.ledger.number("SELECT count(*) FROM job").await, 0);
}

pub async fn a_child_waits_for_all_its_parents(world: &World) {
    let a = world.running(world.job("a", 0)).await;
    let b = world.running(world.job("b", 1)).await;
    let child = world.submit(world.job("child", 2).after(&[a.id, b.id])).await;
    assert_eq!(world.state(child).await, PENDING);

    world.complete(&a, 3).await;
    assert_eq!(world.state(child).await, PENDING);
    world.complete(&b, 4).await;

    assert_eq!(world.state(child).await, QUEUED);
    assert_eq!(world.events(child).await, ["created", "parents_done", "queued"]);
    assert_eq!(world.claim_one(5).await.id, child);
}

pub async fn a_child_of_a_finished_and_an_open_parent_waits_for_the_open_one_only(world: &World) {
    let done = world.running(world.job("a", 0)).await;
    world.complete(&done, 1).await;
    let failed = world.running(world.job("a", 2)).await;
    world.fail(&failed, 3).await;
    let open = world.running(world.job("b", 4)).await;
    let child = world.submit(world.job("child", 5).after(&[done.id, open.id])).await;
    let anyway = world.submit(world.job("child", 5).after(&[done.id, failed.id, open.id]).runs_anyway()).await;
    assert_eq!(world.states([child, anyway]).await, [PENDING; 2]);
    world.complete(&open, 6).await;
    assert_eq!(world.states([child, anyway]).await, [QUEUED; 2]);
}

pub async fn a_child_of_finished_parents_is_ready_immediately(world: &World) {
    let parent = world.running(world.job("parent", 0)).await;
    world.complete(&parent, 1).await;
    let child = world.submit(world.job("child", 2).after(&[parent.id])).await;
    assert_eq!(world.state(child).await, QUEUED);
}

pub async fn a_child_of_a_failed_or_cancelled_parent_is_cancelled_immediately(world: &World) {
    let failed = world.running(world.job("parent", 0)).await;
    world.fail(&failed, 1).await;
    let cancelled = world.submit(world.job("parent", 2)).await;
    world.cancel(cancelled, 3).await;
    for (parent, word) in [(failed.id, "FAILED"), (cancelled, "CANCELLED")] {
        let child = world.submit(world.job("child", 4).after(&[parent])).await;
        let view = world.get(child).await;
        assert_eq!(view.status, CANCELLED);
        let cause = view.error.unwrap();
        assert!(cause.contains(&parent.to_string()) && cause.contains(word), "{cause}");
        let anyway = world.submit(world.job("child", 4).after(&[parent]).runs_anyway()).await;
        assert_eq!(world.state(anyway).await, QUEUED);
    }
}

pub async fn a_failed_parent_cancels_its_children_down_the_chain(world: &World) {
    let parent = world.running(world.job("parent", 0)).await;
    let child = world.submit(world.job("child", 1).after(&[parent.id]).unique("k")).await;
    let grandchild = world.submit(world.job("grandchild", 2).after(&[child])).await;
    let last = world.submit(world.job("last", 3).after(&[grandchild])).await;
    let anyway = world.submit(world.job("anyway", 3).after(&[grandchild]).runs_anyway()).await;

    world.fail(&parent, 4).await;

    assert_eq!(world.states([child, grandchild, last, anyway]).await, [CANCELLED, CANCELLED, CANCELLED, QUEUED]);
    for (id, cause) in [(child, parent.id), (grandchild, child), (last, grandchild)] {
        assert!(world.get(id).await.error.unwrap().contains(&cause.to_string()));
    }
    world.submit(world.job("child", 5).unique("k")).await;
}

pub async fn a_child_that_runs_anyway_runs_after_a_failed_parent(world: &World) {
    let a = world.running(world.job("a", 0)).await;
    let b = world.running(world.job("b", 1)).await;
    let child = world.submit(world.job("child", 2).after(&[a.id, b.id]).runs_anyway()).await;
    world.fail(&a, 3).await;
    assert_eq!(world.state(child).await, PENDING);
    world.complete(&b, 4).await;
    assert_eq!(world.state(child).await, QUEUED);
}

pub async fn a_child_with_a_scheduled_time_waits_for_it_after_its_parents(world: &World) {
    let parent = world.running(world.job("parent", 0)).await;
    let child = world.submit(world.job("child", 1).after(&[parent.id]).scheduled(world.at(5_000))).await;
    world.complete(&parent, 2).await;
    assert_eq!(world.state(child).await, PENDING);
    assert_eq!(world.promote(4_999).await.promoted, 0);
    assert_eq!(world.promote(5_000).await.promoted, 1);
    assert_eq!(world.state(child).await, QUEUED);
}

pub async fn two_parents_that_end_concurrently_release_their_child_once(world: &World) {
    for round in 0..20 {
        let parents = world.submit_all(vec![world.job("a", round), world.job("b", round)]).await;
        let jobs: Vec<_> = world.claim(2, round).await;
        let child = world.submit(world.job("child", round).after(&parents)).await;
        let (a, b) = tokio::join!(world.end(&jobs[0], completed(), round), world.end(&jobs[1], completed(), round));
        assert!(a && b);
        assert_eq!(world.state(child).await, QUEUED, "in round {round}");
        world.complete(&world.claim_one(round).await, round).await;
    }
    assert_eq!(world.total(Tally::Completed).await, 60);
}

pub async fn a_deleted_parent_cancels_its_child(world: &World) {
    let parent = world.submit(world.job("parent", 0)).await;
    let child = world.submit(world.job("child", 1).after(&[parent])).await;
    let anyway = world.submit(world.job("child", 1).after(&[parent]).runs_anyway()).await;
    world.store.job_delete(parent, None, world.at(1_000)).await.unwrap();
    assert_eq!(world.states([child, anyway]).await, [CANCELLED, QUEUED]);
    assert!(world.get(child).await.error.unwrap().contains("deleted"));
}

pub async fn a_cancelled_parent_cancels_its_child(world: &World) {
    let parent = world.submit(world.job("parent", 0)).await;
    let child = world.submit(world.job("child", 1).after(&[parent])).await;
    world.cancel(parent, 2).await;
    assert_eq!(world.state(child).await, CANCELLED);
}

pub async fn an_expired_parent_cancels_its_child(world: &World) {
    let parent = world.submit(world.job("parent", 0).expires(world.at(100))).await;
    let child = world.submit(world.job("child", 1).after(&[parent])).await;
    world.promote(100).await;
    assert_eq!(world.states([parent, child]).await, [JobState::Failed, CANCELLED]);
}

pub async fn a_permanently_lost_parent_cancels_its_child(world: &World) {
    let parent = world.submit(world.job("parent", 0).retries(0)).await;
    let claimed = world.claim_as(faena_domain::NodeId::new(), 1, 1).await.remove(0);
    let child = world.submit(world.job("child", 1).after(&[parent])).await;
    world.begin(&claimed, 2).await;
    world.recover(0, 3).await;
    assert_eq!(world.states([parent, child]).await, [JobState::Failed, CANCELLED]);
}

/// Ends a parent without releasing its children: the edge is hidden meanwhile.
async fn end_unheard(world: &World, parent: &faena_store::ClaimedJob, children: &[JobId], ms: i64) {
    world.ledger.run("DELETE FROM dependency").await;
    world.complete(parent, ms).await;
    let (parent, ledger) = (world.ledger.literal(parent.id), &world.ledger);
    for child in children {
        ledger
            .run(&format!("INSERT INTO dependency (parent, child) VALUES ({parent}, {})", ledger.literal(*child)))
            .await;
    }
}

pub async fn a_child_whose_release_was_missed_is_released_by_the_next_check(world: &World) {
    let parent = world.running(world.job("parent", 0)).await;
    let child = world.submit(world.job("child", 1).after(&[parent.id])).await;
    end_unheard(world, &parent, &[child], 2).await;
    assert_eq!(world.state(child).await, PENDING);

    assert_eq!(world.promote(1_000).await.unblocked, 0, "it does not look all the time");
    let due = world.promote(2_001).await;

    assert_eq!((due.unblocked, due.promoted), (1, 0));
    assert_eq!(world.state(child).await, QUEUED);
}

pub async fn checking_parents_again_does_not_release_a_delayed_sibling(world: &World) {
    let parent = world.running(world.job("parent", 0)).await;
    let later = world.at(1_000_000);
    let children = [
        world.submit(world.job("child", 1).after(&[parent.id])).await,
        world.submit(world.job("child", 1).after(&[parent.id]).scheduled(later)).await,
        world.submit(world.job("child", 1).after(&[parent.id]).scheduled(later)).await,
    ];
    end_unheard(world, &parent, &children, 2).await;
    world.promote(2_001).await;
    assert_eq!(world.states(children).await, [QUEUED, PENDING, PENDING]);
    world.promote(999_999).await;
    assert_eq!(world.states(children).await, [QUEUED, PENDING, PENDING], "not before its time");
    world.promote(1_000_000).await;
    assert_eq!(world.states(children).await, [QUEUED; 3]);
}

pub async fn a_graph_in_one_batch_runs_in_order(world: &World) {
    let root = world.job("root", 0);
    let left = world.job("left", 0).after(&[root.id]);
    let right = world.job("right", 0).after(&[root.id]);
    let leaf = world.job("leaf", 0).after(&[left.id, right.id]);
    let ids = [leaf.id, right.id, left.id, root.id];
    let answers = world.try_submit([leaf, right, left, root].to_vec(), 0).await.unwrap();
    assert_eq!(answers.iter().map(|a| a.status).collect::<Vec<_>>(), [PENDING, PENDING, PENDING, QUEUED]);

    let mut order: Vec<Vec<String>> = Vec::new();
    for ms in 1..4 {
        let jobs = world.claim(10, ms).await;
        let mut kinds = Vec::new();
        for job in &jobs {
            kinds.push(world.get(job.id).await.kind);
            world.complete(job, ms).await;
        }
        kinds.sort();
        order.push(kinds);
    }
    assert_eq!(order, [vec!["root"], vec!["left", "right"], vec!["leaf"]]);
    assert_eq!(world.states(ids).await, [JobState::Completed; 4]);
}

pub async fn a_child_cancelled_by_a_person_leaves_its_parents_alone(world: &World) {
    let parent = world.running(world.job("parent", 0)).await;
    let child: NewJob = world.job("child", 1).after(&[parent.id]);
    let child = world.submit(child).await;
    world.cancel(child, 2).await;
    world.complete(&parent, 3).await;
    assert_eq!(world.states([parent.id, child]).await, [JobState::Completed, CANCELLED]);
    world.retry_by_person(child, 4).await;
    world.promote(5).await;
    assert_eq!(world.state(child).await, QUEUED);
}

pub async fn a_retried_child_waits_for_a_parent_that_was_retried_before_it(world: &World) {
    let parent = world.submit(world.job("a", 0)).await;
    let child = world.submit(world.job("b", 0).after(&[parent])).await;
    world.cancel(parent, 1).await;
    assert_eq!(world.state(child).await, JobState::Cancelled);

    world.store.job_retry(parent, None, world.at(2)).await.unwrap();
    world.store.job_retry(child, None, world.at(3)).await.unwrap();
    world.promote(4).await;
    assert_eq!(world.states([parent, child]).await, [JobState::Queued, JobState::Pending]);

    let job = world.claim_one(5).await;
    assert_eq!(job.id, parent);
    world.complete(&job, 6).await;
    world.promote(7).await;
    assert_eq!(world.state(child).await, JobState::Queued);
}
