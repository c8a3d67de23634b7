//! Workers that end or are lost, and what happens to their jobs.

use faena_domain::{ErrorReason, JobState, NodeId, WorkerKind, WorkerState};
use faena_store::{NodeInfo, Recovered, RunEnd, RunOutcome, WorkerEnd, WorkerEntry};

use crate::{
    support::*,
    workers::{NEVER, named},
};

pub async fn the_jobs_of_a_lost_worker_use_an_attempt_started_or_not(world: &World) {
    let (worker, jobs) = world.holding("billing-1", 6, 0).await;
    world.begin(&jobs[0], 1).await;
    world.complete(&jobs[2], 2).await;
    world.cancel(jobs[3].id, 2).await;
    world.hand_back(&jobs[4], 2).await;
    let last = world.submit(world.job("a", 3).retries(0).unique("k")).await;
    let child = world.submit(world.job("c", 3).after(&[last]).priority(faena_domain::Priority::Low)).await;
    let both = world.claim_by(&worker, 2, 4).await;
    assert_eq!(both.len(), 2, "the one handed back, and the last one");

    let freed = world.lose(&worker, 700, 10).await.unwrap();

    assert_eq!((freed.orphaned, freed.returned), (5, 0));
    use JobState::*;
    let all = [jobs[0].id, jobs[1].id, jobs[2].id, jobs[3].id, jobs[4].id, last, child];
    assert_eq!(world.states(all).await, [Retrying, Retrying, Completed, Cancelled, Retrying, Failed, Cancelled]);
    let text = "worker billing-1 was lost: its connection closed";
    for job in [&jobs[0], &jobs[1]] {
        let view = world.get(job.id).await;
        assert_eq!((view.retry_count, view.next_retry_at), (1, Some(world.at(710))));
        assert_eq!((view.error.as_deref(), view.error_reason), (Some(text), Some(ErrorReason::Orphaned)));
        let line = view.execution_log.iter().find(|entry| entry.event.as_str() == "orphaned").unwrap();
        assert_eq!((line.details.as_str(), line.run), (text, Some(job.run)));
    }
    assert_eq!(
        world.events(jobs[0].id).await,
        ["created", "queued", "assigned", "started", "orphaned", "retry_scheduled"]
    );
    assert_eq!(world.events(jobs[1].id).await, ["created", "queued", "assigned", "orphaned", "retry_scheduled"]);
    let view = world.get(last).await;
    assert_eq!((view.error_reason, view.worker_id.as_deref()), (Some(ErrorReason::Orphaned), Some("billing-1")));
    world.submit(world.job("a", 11).unique("k")).await;

    let view = world.shown("billing-1").await;
    assert_eq!((view.state, view.ended_at), (WorkerState::Terminated, Some(world.at(10))));
    assert_eq!((view.reason.as_deref(), view.jobs.len()), (Some("lost: its connection closed"), 0));
    assert!(!world.orphans(11).await);
}

pub async fn a_worker_that_leaves_returns_its_jobs_without_using_an_attempt(world: &World) {
    let (worker, jobs) = world.holding("w", 3, 0).await;
    world.begin(&jobs[0], 1).await;
    world.cancel(jobs[1].id, 1).await;
    let end = WorkerEnd::Left { reason: "it was stopped".into() };
    let freed = world.store.worker_end(worker.id, worker.session, end, world.at(2)).await.unwrap().unwrap();
    assert_eq!((freed.orphaned, freed.returned), (0, 2));
    use JobState::*;
    assert_eq!(world.states([0, 1, 2].map(|n: usize| jobs[n].id)).await, [Queued, Cancelled, Queued]);
    let log = world.get(jobs[0].id).await.execution_log;
    let line = log.iter().find(|entry| entry.event.as_str() == "handed_back").unwrap();
    assert_eq!(line.details, "worker w left: it was stopped");
    let again = world.claim(5, 3).await;
    assert!(again.len() == 2 && again.iter().all(|job| job.retry_count == 0 && !job.start_first));
    assert!(!world.end(&jobs[0], completed(), 4).await);
    use WorkerState::*;
    assert_eq!(crate::workers::states(world, "w").await, [Creating, Connecting, Ready, Terminating, Terminated]);
}

pub async fn a_registration_ends_once_and_only_through_its_session(world: &World) {
    let (old, jobs) = world.holding("w", 1, 0).await;
    let new = world.admit(world.worker("w"), 1).await;
    assert_eq!(world.lose(&old, 0, 2).await, None, "it has connected anew");
    assert_eq!(world.state(jobs[0].id).await, JobState::Assigned);
    assert_eq!(world.lose(&new, 0, 3).await.unwrap().orphaned, 1);
    assert_eq!(world.lose(&new, 0, 4).await, None);
    assert_eq!(world.get(jobs[0].id).await.retry_count, 1);
}

pub async fn a_worker_that_reconnects_after_its_end_has_a_new_registration(world: &World) {
    let (first, jobs) = world.holding("w", 1, 0).await;
    world.lose(&first, 100, 1).await.unwrap();
    let second = world.admit(world.worker("w"), 2).await;
    assert!(second.id != first.id && second.session == 1 && second.was.is_none() && second.jobs.is_empty());
    assert!(!world.send_update(world.worker_update(&first, &[], 3)).await.connected);
    assert!(!world.end(&jobs[0], completed(), 3).await, "its first life's report is stale");
    assert_eq!(world.shown("w").await.registration_id, second.id.to_string());
    let before = world.shown(&first.id.to_string()).await;
    assert_eq!((before.id.as_str(), before.state), ("w", WorkerState::Terminated));
    world.lose(&second, 0, 4).await.unwrap();
    assert_eq!(world.shown("w").await.registration_id, second.id.to_string(), "the latest one");
}

pub async fn a_completion_after_the_loss_and_another_claim_changes_nothing(world: &World) {
    for started in [true, false] {
        let (worker, jobs) = world.holding("w", 1, 0).await;
        let zombie = &jobs[0];
        if started {
            world.begin(zombie, 1).await;
        }
        world.lose(&worker, 100, 10).await.unwrap();
        assert!(!world.end(zombie, completed(), 11).await);
        world.promote(110).await;
        let other = world.admit(world.worker("other"), 110).await;
        let again = world.claim_by(&other, 1, 111).await.remove(0);
        assert_eq!(again.id, zombie.id);
        for outcome in [completed(), failed("no"), world.retry(50), RunOutcome::HandedBack] {
            assert!(!world.end(zombie, outcome, 113).await, "the zombie hears that it is stale");
        }
        let view = world.get(again.id).await;
        assert_eq!((view.status, view.run), (JobState::Assigned, Some(again.run)));
        world.complete(&again, 114).await;
        assert_eq!(world.get(again.id).await.run, Some(again.run));
    }
}

pub async fn concurrent_loss_and_completion_never_both_count(world: &World) {
    for round in 0..30 {
        let (worker, jobs) = world.holding("w", 1, round).await;
        let end = RunEnd { closes_claim: true, ..world.an_end(&jobs[0], completed(), round) };
        let (counted, freed) = tokio::join!(world.report_end(end), world.lose(&worker, 0, round));
        let completed = world.state(jobs[0].id).await == JobState::Completed;
        assert_eq!(completed, freed.unwrap().orphaned == 0, "in round {round}");
        assert_eq!(completed, counted, "in round {round}");
        world.store.job_delete(jobs[0].id, None, world.at(1_000)).await.unwrap();
    }
}

pub async fn concurrent_loss_and_claim_leave_no_job_with_a_lost_worker(world: &World) {
    let mut seen = [0, 0];
    for round in 0..30 {
        let worker = world.admit(world.worker("w"), round).await;
        let id = world.submit(world.job("a", round)).await;
        let (claimed, freed) = tokio::join!(world.claim_by(&worker, 1, round), world.lose(&worker, 0, round));
        assert_eq!(claimed.len(), freed.unwrap().orphaned, "what was handed out is freed, in round {round}");
        let state = if claimed.is_empty() { JobState::Queued } else { JobState::Retrying };
        assert_eq!(world.state(id).await, state, "in round {round}");
        world.ledger.prove().await;
        seen[claimed.len()] += 1;
        world.store.job_delete(id, None, world.at(1_000)).await.unwrap();
    }
    assert_eq!(seen[0] + seen[1], 30);
}

pub async fn concurrent_reconnection_and_claim_lose_no_job(world: &World) {
    for round in 0..30 {
        let old = world.admit(world.worker("w"), round).await;
        let id = world.submit(world.job("a", round)).await;
        let (claimed, again) = tokio::join!(world.claim_by(&old, 1, round), world.admit(world.worker("w"), round));
        let held: Vec<_> = again.jobs.iter().map(|held| held.job.id).collect();
        assert_eq!(held, claimed.iter().map(|job| job.id).collect::<Vec<_>>(), "in round {round}");
        world.lose(&again, 0, round).await.unwrap();
        world.store.job_delete(id, None, world.at(1_000)).await.unwrap();
    }
}

pub async fn a_job_that_kills_its_worker_runs_out_of_attempts(world: &World) {
    let id = world.submit(world.job("poison", 0).retries(2)).await;
    for life in 0..3 {
        assert_ne!(world.state(id).await, JobState::Failed);
        let worker = world.admit(world.worker(&format!("w{life}")), life * 10).await;
        assert_eq!(world.claim_by(&worker, 1, life * 10).await[0].id, id);
        world.lose(&worker, 1, life * 10 + 1).await.unwrap();
        world.promote(life * 10 + 5).await;
    }
    let view = world.get(id).await;
    assert_eq!((view.status, view.error_reason), (JobState::Failed, Some(ErrorReason::Orphaned)));
    assert_eq!(world.events(id).await.iter().filter(|event| **event == "orphaned").count(), 3);
}

pub async fn a_worker_keeps_its_jobs_when_its_server_dies(world: &World) {
    let worker = world.admit(named("w", world, WorkerKind::Remote, NodeId::new()), 0).await;
    world.submit_all((0..2).map(|_| world.job("a", 0)).collect()).await;
    let jobs = world.claim_by(&worker, 2, 1).await;
    world.begin(&jobs[0], 2).await;
    assert!(world.orphans(3).await);

    assert_eq!(world.recover(0, 3).await, Recovered::default());

    assert!(!world.orphans(4).await, "there is nothing left to recover");
    assert_eq!(world.states([jobs[0].id, jobs[1].id]).await, [JobState::Processing, JobState::Assigned]);
    let view = world.shown("w").await;
    assert_eq!((view.node, view.deadline, view.state), (None, Some(world.at(10_003)), WorkerState::Ready));
    assert!(world.sweep(NEVER, 10_002).await.lost.is_empty());
    let again = world.admit(world.worker("w"), 5_000).await;
    assert_eq!((again.id, again.session, again.jobs.len()), (worker.id, 2, 2));
    let view = world.shown("w").await;
    assert_eq!((view.node, view.deadline, view.reason), (Some(world.node.to_string()), None, None));
    assert!(world.sweep(NEVER, 20_000).await.lost.is_empty());
    for job in &jobs {
        world.complete(job, 20_001).await;
    }
}

pub async fn a_worker_that_does_not_reconnect_is_declared_lost(world: &World) {
    let worker = world.admit(named("w", world, WorkerKind::Remote, NodeId::new()), 0).await;
    let id = world.submit(world.job("a", 0)).await;
    let job = world.claim_by(&worker, 1, 1).await.remove(0);
    world.recover(0, 3).await;
    // A server that was declared dead and is alive still sends updates; the worker is not watched by that.
    assert!(world.send_update(world.worker_update(&worker, &[WorkerState::Busy], 4)).await.connected);
    assert_eq!(world.sweep(NEVER, 5).await.next_at, Some(world.at(10_003)));

    let swept = world.sweep(NEVER, 10_003).await;

    assert_eq!((swept.lost.len(), swept.lost[0].id, swept.lost[0].key.as_str()), (1, worker.id, "w"));
    assert_eq!((swept.lost[0].freed.orphaned, swept.next_at, swept.more), (1, None, false));
    let view = world.get(id).await;
    assert_eq!((view.status, view.retry_count, view.next_retry_at), (JobState::Retrying, 1, Some(world.at(10_503))));
    assert_eq!(view.error.as_deref(), Some("worker w was lost: no heartbeat"));
    assert!(!world.end(&job, completed(), 10_004).await);
    assert!(world.sweep(NEVER, 10_005).await.lost.is_empty());
}

pub async fn the_workers_inside_a_dead_server_end_with_it(world: &World) {
    let dead = NodeId::new();
    world.admit(named("server-9", world, WorkerKind::BuiltIn, dead), 0).await;
    world.submit(world.job("a", 0)).await;
    let job = world.claim_as(dead, 1, 1).await.remove(0);
    world.begin(&job, 2).await;
    assert_eq!(world.recover(50, 3).await.orphaned, 1);
    let view = world.shown("server-9").await;
    assert_eq!((view.state, view.ended_at), (WorkerState::Terminated, Some(world.at(3))));
    assert_eq!(view.reason.as_deref(), Some("its server died"));
    assert!(!world.orphans(4).await);
}

pub async fn the_deadline_of_a_worker_depends_on_its_transport(world: &World) {
    let dead = NodeId::new();
    let with = |key, transport: &str, deadline: Option<i64>| WorkerEntry {
        transport: transport.into(),
        deadline: deadline.map(|ms| world.at(ms)),
        ..named(key, world, WorkerKind::Remote, dead)
    };
    world.admit(with("calls", "http", Some(9)), 0).await;
    world.admit(with("soon", "grpc", Some(500)), 0).await;
    world.admit(with("later", "grpc", Some(99_000)), 0).await;
    world.recover(0, 100).await;
    for (key, ms) in [("calls", 60_100), ("soon", 500), ("later", 10_100)] {
        assert_eq!(world.shown(key).await.deadline, Some(world.at(ms)), "{key}");
    }
}

pub async fn a_server_that_leaves_detaches_its_workers(world: &World) {
    let other = NodeInfo { id: NodeId::new(), name: "other".into() };
    world.store.node_join(other.clone(), LEASE_MS, world.at(0)).await.unwrap();
    world.admit(named("inside", world, WorkerKind::BuiltIn, other.id), 0).await;
    let outside = world.admit(named("outside", world, WorkerKind::Remote, other.id), 0).await;
    let elsewhere = world.admit(world.worker("elsewhere"), 0).await;
    let ids = world.submit_all((0..3).map(|_| world.job("a", 0)).collect()).await;
    world.claim_as(other.id, 1, 1).await;
    world.claim_by(&outside, 1, 1).await;
    world.claim_by(&elsewhere, 1, 1).await;

    assert_eq!(world.store.node_leave(other.id, GRACE_PERIODS, world.at(2)).await.unwrap(), 1);

    use JobState::*;
    assert_eq!(world.states([ids[0], ids[1], ids[2]]).await, [Queued, Assigned, Assigned]);
    let inside = world.shown("inside").await;
    assert_eq!((inside.state, inside.reason.as_deref()), (WorkerState::Terminated, Some("its server stopped")));
    let view = world.shown("outside").await;
    assert_eq!((view.node, view.deadline, view.jobs.len()), (None, Some(world.at(10_002)), 1));
    assert_eq!(world.shown("elsewhere").await.deadline, None);
    assert!(!world.orphans(3).await);
    let lost = world.sweep(NEVER, 10_002).await.lost;
    assert_eq!(lost.len(), 1);
    let error = world.get(ids[1]).await.error.unwrap();
    assert_eq!(error, "worker outside was lost: its server stopped, and it has not reconnected");
}

pub async fn a_sweep_is_bounded_and_reports_that_more_is_due(world: &World) {
    for n in 0..105 {
        let entry = WorkerEntry { deadline: Some(world.at(n)), ..world.worker(&format!("w{n}")) };
        world.admit(entry, 0).await;
    }
    let entry = WorkerEntry { deadline: Some(world.at(900)), ..world.worker("later") };
    world.admit(entry, 0).await;
    let first = world.sweep(NEVER, 500).await;
    assert_eq!((first.lost.len(), first.more), (100, true));
    let second = world.sweep(NEVER, 500).await;
    assert_eq!((second.lost.len(), second.more, second.next_at), (5, false, Some(world.at(900))));
    assert_eq!(world.store.worker_list(vec![], 500).await.unwrap().len(), 106);
    world.sweep(NEVER, 501).await;
    assert_eq!(world.store.worker_list(vec![], 500).await.unwrap().len(), 106);
    world.sweep(501, 502).await;
    assert_eq!(world.store.worker_list(vec![], 500).await.unwrap().len(), 1, "the ended ones are forgotten");
    assert_eq!(world.ledger.number("SELECT count(DISTINCT worker) FROM worker_change").await, 1);
}

pub async fn a_claim_without_an_owner_is_found_however_its_owner_ended(world: &World) {
    let (kept, jobs) = world.holding("kept", 1, 0).await;
    let (gone, more) = world.holding("gone", 1, 0).await;
    // As if an end had missed them: one owner has ended, the row of the other does not exist.
    let ended = "UPDATE worker SET ended_at = 1, state = 6, deadline = NULL";
    world.ledger.run(ended).await;
    world.ledger.run("INSERT INTO worker_change SELECT id, 9, 1, 5, NULL FROM worker").await;
    world.ledger.run("INSERT INTO worker_change SELECT id, 10, 1, 6, NULL FROM worker").await;
    world.sweep(1_000, 1_000).await;
    assert_eq!(world.store.worker_list(vec![], 9).await.unwrap().len(), 2, "whose blocks are there is not forgotten");
    world.ledger.run("DELETE FROM worker_change WHERE worker IN (SELECT id FROM worker WHERE key = 'gone')").await;
    world.ledger.run("DELETE FROM worker WHERE key = 'gone'").await;
    assert!(world.orphans(1_001).await);
    assert_eq!(world.recover(0, 1_001).await.returned, 2);
    assert_eq!(world.states([jobs[0].id, more[0].id]).await, [JobState::Queued; 2]);
    assert!(!world.orphans(1_002).await);
    assert_ne!(kept.id, gone.id);
}

pub async fn a_claim_of_a_worker_whose_answer_was_lost_is_released(world: &World) {
    let (worker, known) = world.holding("w", 1, 0).await;
    world.submit(world.job("a", 1)).await;
    let lost = world.claim_by(&worker, 1, 2).await.remove(0);
    let reconcile =
        |before, now| world.store.node_reconcile(world.node, vec![known[0].run], world.at(before), world.at(now));
    assert_eq!(reconcile(2, 3).await.unwrap(), 0, "it may still be on its way");
    world.admit(world.worker("w"), 9).await;
    assert_eq!(reconcile(9, 10).await.unwrap(), 0, "it has just brought what it has; that may not be known yet");
    assert_eq!(reconcile(10, 11).await.unwrap(), 1);
    assert_eq!(world.states([known[0].id, lost.id]).await, [JobState::Assigned, JobState::Queued]);
    let other = NodeInfo { id: NodeId::new(), name: "other".into() };
    world.store.node_join(other.clone(), LEASE_MS, world.at(0)).await.unwrap();
    let answer = world.store.node_reconcile(other.id, Vec::new(), world.at(99), world.at(99)).await;
    assert_eq!(answer.unwrap(), 0, "it is not connected there");
}
