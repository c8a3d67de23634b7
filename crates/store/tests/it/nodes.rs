//! Nodes die, leave, and report too late. A node that never joined counts as dead on both engines.

use faena_domain::{ErrorReason, JobState, NodeId};
use faena_store::{ClaimedJob, NodeInfo, Recovered, RunEnd, RunOutcome, Tally};

use crate::support::*;

/// Jobs claimed by a dead node.
async fn in_dead_hands(world: &World, count: usize, ms: i64) -> Vec<ClaimedJob> {
    world.submit_all((0..count).map(|_| world.job("a", ms)).collect()).await;
    let jobs = world.claim_as(NodeId::new(), count, ms).await;
    assert_eq!(jobs.len(), count);
    jobs
}

pub async fn started_jobs_of_a_dead_node_use_an_attempt(world: &World) {
    let job = in_dead_hands(world, 1, 0).await.remove(0);
    world.begin(&job, 1).await;

    let freed = world.recover(5_000, 10).await;

    assert_eq!((freed.orphaned, freed.returned), (1, 0));
    let view = world.get(job.id).await;
    assert_eq!((view.status, view.retry_count), (JobState::Retrying, 1));
    assert_eq!(view.next_retry_at, Some(world.at(5_010)));
    assert_eq!(view.error_reason, Some(ErrorReason::Orphaned));
    world.promote(5_010).await;
    let again = world.claim_one(5_011).await;
    assert_eq!((again.id, again.retry_count, again.start_first), (job.id, 1, false));
    assert!(again.run > job.run);
}

pub async fn a_started_job_without_attempts_left_fails_when_its_node_dies(world: &World) {
    world.submit(world.job("a", 0).retries(0).unique("k")).await;
    let job = world.claim_as(NodeId::new(), 1, 0).await.remove(0);
    world.begin(&job, 1).await;
    world.recover(5_000, 10).await;
    let view = world.get(job.id).await;
    assert_eq!((view.status, view.error_reason), (JobState::Failed, Some(ErrorReason::Orphaned)));
    world.submit(world.job("a", 11).unique("k")).await;
}

pub async fn jobs_that_had_not_started_are_ready_again(world: &World) {
    let jobs = in_dead_hands(world, 3, 0).await;
    let freed = world.recover(5_000, 10).await;
    assert_eq!((freed.orphaned, freed.returned), (0, 3));
    let again = world.claim(5, 11).await;
    assert_eq!(again.iter().map(|job| job.id).collect::<Vec<_>>(), jobs.iter().map(|job| job.id).collect::<Vec<_>>());
    assert!(again.iter().all(|job| job.start_first && job.retry_count == 0 && job.run > jobs[0].run));
    world.hand_back(&again[0], 12).await;
    assert!(!world.claim_one(13).await.start_first, "a live owner has had it since");
}

pub async fn ended_jobs_of_a_dead_node_stay_ended(world: &World) {
    let jobs = in_dead_hands(world, 6, 0).await;
    for job in &jobs {
        world.begin(job, 1).await;
    }
    for (job, outcome) in
        jobs.iter().zip([completed(), failed("no"), cancelled(), world.retry(100), RunOutcome::HandedBack])
    {
        assert!(world.end(job, outcome, 2).await);
    }
    let freed = world.recover(5_000, 10).await;
    assert_eq!((freed.orphaned, freed.returned), (1, 0));
    let states = world.states([0, 1, 2, 3, 4, 5].map(|n: usize| jobs[n].id)).await;
    use JobState::*;
    assert_eq!(states, [Completed, Failed, Cancelled, Retrying, Queued, Retrying]);
    assert_eq!(world.get(jobs[3].id).await.next_retry_at, Some(world.at(100)));
}

pub async fn a_job_with_a_cancel_request_is_cancelled_when_its_node_dies(world: &World) {
    let jobs = in_dead_hands(world, 2, 0).await;
    world.begin(&jobs[0], 1).await;
    for job in &jobs {
        world.cancel(job.id, 2).await;
    }
    world.recover(5_000, 10).await;
    assert_eq!(world.states([jobs[0].id, jobs[1].id]).await, [JobState::Cancelled; 2]);
    assert!(world.store.poll(world.node, world.at(0)).await.unwrap().cancels.is_empty());
}

pub async fn a_completion_after_recovery_is_stale(world: &World) {
    let jobs = in_dead_hands(world, 2, 0).await;
    world.begin(&jobs[0], 1).await;
    world.recover(5_000, 10).await;
    for job in &jobs {
        let before = serde_json::to_value(world.get(job.id).await).unwrap();
        for outcome in [completed(), failed("no"), world.retry(50), RunOutcome::HandedBack, cancelled()] {
            // Recovery ended the run, so a late report must change nothing.
            world.end(job, outcome, 11).await;
            assert_eq!(serde_json::to_value(world.get(job.id).await).unwrap(), before);
        }
    }
}

pub async fn a_completion_before_recovery_stays(world: &World) {
    let jobs = in_dead_hands(world, 2, 0).await;
    world.begin(&jobs[0], 1).await;
    world.complete(&jobs[0], 2).await;
    assert!(world.report_end(RunEnd { closes_claim: true, ..world.an_end(&jobs[1], completed(), 3) }).await);
    assert_eq!(world.recover(5_000, 10).await, Recovered::default());
    assert_eq!(world.total(Tally::Completed).await, 2);
}

pub async fn a_completion_after_recovery_and_another_claim_changes_nothing(world: &World) {
    for started in [true, false] {
        let zombie = in_dead_hands(world, 1, 0).await.remove(0);
        if started {
            world.begin(&zombie, 1).await;
        }
        world.recover(100, 10).await;
        world.promote(110).await;
        let again = world.claim_one(111).await;
        assert_eq!(again.id, zombie.id);
        world.begin(&again, 112).await;

        for outcome in [completed(), failed("no"), world.retry(50), RunOutcome::HandedBack] {
            assert!(!world.end(&zombie, outcome, 113).await, "the zombie hears that it is stale");
        }
        let view = world.get(again.id).await;
        assert_eq!((view.status, view.run), (JobState::Processing, Some(again.run)));
        world.complete(&again, 114).await;
        assert!(!world.end(&zombie, failed("no"), 115).await);
        assert_eq!(world.get(again.id).await.run, Some(again.run));
    }
}

pub async fn concurrent_recovery_and_completion_never_both_count(world: &World) {
    let mut seen = [0, 0];
    for round in 0..30 {
        let job = in_dead_hands(world, 1, round).await.remove(0);
        let end = RunEnd { closes_claim: true, ..world.an_end(&job, completed(), round) };
        let (counted, freed) = tokio::join!(world.report_end(end), world.recover(0, round));
        let completed = world.state(job.id).await == JobState::Completed;
        assert_eq!(completed, freed.returned == 0, "in round {round}");
        assert_eq!(completed, counted, "in round {round}");
        seen[usize::from(completed)] += 1;
        world.store.job_delete(job.id, None, world.at(1_000)).await.unwrap();
    }
    assert_eq!(seen[0] + seen[1], 30);
}

pub async fn a_node_that_leaves_returns_its_jobs_without_using_an_attempt(world: &World) {
    world.submit_all((0..4).map(|n| world.job("a", n)).collect()).await;
    let jobs = world.claim(4, 5).await;
    world.begin(&jobs[0], 6).await;
    world.complete(&jobs[1], 6).await;
    world.cancel(jobs[2].id, 6).await;

    assert_eq!(world.store.node_leave(world.node, GRACE_PERIODS, world.at(7)).await.unwrap(), 2);

    use JobState::*;
    let states = world.states([0, 1, 2, 3].map(|n: usize| jobs[n].id)).await;
    assert_eq!(states, [Queued, Completed, Cancelled, Queued]);
    assert_eq!(world.get(jobs[0].id).await.retry_count, 0);
    let again = world.claim(4, 8).await;
    assert!(again.iter().all(|job| job.retry_count == 0 && !job.start_first));
    assert!(!world.end(&jobs[0], completed(), 9).await, "what it says after it left is stale");
}

pub async fn recovery_happens_once(world: &World) {
    let jobs = in_dead_hands(world, 2, 0).await;
    world.begin(&jobs[0], 1).await;
    world.recover(5_000, 10).await;
    assert_eq!(world.recover(5_000, 11).await, Recovered::default());
    let mine = world.claim_one(12).await;
    assert_eq!(world.recover(5_000, 13).await, Recovered::default(), "what a living node holds is left alone");
    world.complete(&mine, 14).await;
}

pub async fn more_claims_than_one_round_takes_are_all_released(world: &World) {
    world.submit_all((0..45).map(|_| world.job("a", 0)).collect()).await;
    let dead = NodeId::new();
    for _ in 0..45 {
        world.claim_as(dead, 1, 1).await;
    }
    let mut freed = 0;
    for _ in 0..10 {
        freed += world.recover(0, 2).await.returned;
    }
    assert_eq!(freed, 45);
    assert_eq!(world.total(Tally::Queued).await, 45);
}

pub async fn the_log_of_a_lost_run_is_complete(world: &World) {
    let jobs = in_dead_hands(world, 2, 0).await;
    world.begin(&jobs[0], 1).await;
    world.recover(50, 10).await;
    let first = ["created", "queued", "assigned", "started", "orphaned", "retry_scheduled"];
    assert_eq!(world.events(jobs[0].id).await, first);
    assert_eq!(world.events(jobs[1].id).await[..2], ["created", "queued"]);
    assert!(world.events(jobs[1].id).await.contains(&"recovered"));

    let other = NodeInfo { id: NodeId::new(), name: "other".into() };
    world.store.node_join(other.clone(), LEASE_MS, world.at(11)).await.unwrap();
    let job = world.claim_as(other.id, 1, 12).await.remove(0);
    world.store.node_leave(other.id, GRACE_PERIODS, world.at(13)).await.unwrap();
    assert!(world.events(job.id).await.contains(&"handed_back"));
}

pub async fn a_claim_whose_answer_was_lost_is_released(world: &World) {
    world.submit_all((0..3).map(|_| world.job("a", 0)).collect()).await;
    let known = world.claim_one(1).await;
    let lost = world.claim(2, 2).await;
    let reconcile =
        |before, now| world.store.node_reconcile(world.node, vec![known.run], world.at(before), world.at(now));

    assert_eq!(reconcile(2, 3).await.unwrap(), 0, "it may still be on its way");
    assert_eq!(reconcile(10, 11).await.unwrap(), 2);
    assert_eq!(reconcile(10, 12).await.unwrap(), 0);

    use JobState::*;
    assert_eq!(world.states([known.id, lost[0].id, lost[1].id]).await, [Assigned, Queued, Queued]);
    assert!(!world.end(&lost[0], completed(), 13).await, "the report is too late");
    assert!(world.end(&known, completed(), 13).await);
}
