//! Workers that end or are lost, and what happens to their jobs.

use faena_domain::{ErrorReason, JobState, NodeId, WorkerKind, WorkerState};
use faena_store::{NodeInfo, RecoveryCounts, RunEnd, RunOutcome, WorkerEnd, WorkerEntry};

use crate::{
    support::*,
    workers::{LONG_AGO, named},
};

pub async fn the_jobs_of_a_lost_worker_use_an_attempt_started_or_not(fixture: &Fixture) {
    let (worker, jobs) = fixture.worker_with_jobs("billing-1", 6, 0).await;
    fixture.report_start(&jobs[0], 1).await;
    fixture.complete(&jobs[2], 2).await;
    fixture.cancel(jobs[3].id, 2).await;
    fixture.release(&jobs[4], 2).await;
    let last = fixture.submit(fixture.job("a", 3).retries(0).unique("k")).await;
    let child = fixture.submit(fixture.job("c", 3).after(&[last]).priority(faena_domain::Priority::Low)).await;
    let both = fixture.claim_by(&worker, 2, 4).await;
    assert_eq!(both.len(), 2, "the released job and the last one");

    let released = fixture.end_as_lost(&worker, 700, 10).await.unwrap();

    assert_eq!((released.orphaned, released.returned), (5, 0));
    use JobState::*;
    let all = [jobs[0].id, jobs[1].id, jobs[2].id, jobs[3].id, jobs[4].id, last, child];
    assert_eq!(fixture.states(all).await, [Retrying, Retrying, Completed, Cancelled, Retrying, Failed, Cancelled]);
    let text = "worker billing-1 was lost: its connection closed";
    for job in [&jobs[0], &jobs[1]] {
        let view = fixture.get(job.id).await;
        assert_eq!((view.retry_count, view.next_attempt_at), (1, Some(fixture.at(710))));
        assert_eq!((view.error.as_deref(), view.error_reason), (Some(text), Some(ErrorReason::Orphaned)));
        let line = view.execution_log.iter().find(|entry| entry.event.as_str() == "orphaned").unwrap();
        assert_eq!((line.details.as_str(), line.run), (text, Some(job.run)));
    }
    assert_eq!(
        fixture.events(jobs[0].id).await,
        ["created", "queued", "assigned", "started", "orphaned", "retry_scheduled"]
    );
    assert_eq!(fixture.events(jobs[1].id).await, ["created", "queued", "assigned", "orphaned", "retry_scheduled"]);
    let view = fixture.get(last).await;
    assert_eq!((view.error_reason, view.worker_id.as_deref()), (Some(ErrorReason::Orphaned), Some("billing-1")));
    fixture.submit(fixture.job("a", 11).unique("k")).await;

    let view = fixture.worker_view("billing-1").await;
    assert_eq!((view.state, view.ended_at), (WorkerState::Terminated, Some(fixture.at(10))));
    assert_eq!((view.reason.as_deref(), view.jobs.len()), (Some("lost: its connection closed"), 0));
    assert!(!fixture.needs_recovery(11).await);
}

pub async fn a_worker_that_leaves_returns_its_jobs_without_using_an_attempt(fixture: &Fixture) {
    let (worker, jobs) = fixture.worker_with_jobs("w", 3, 0).await;
    fixture.report_start(&jobs[0], 1).await;
    fixture.cancel(jobs[1].id, 1).await;
    let end = WorkerEnd::Left { reason: "it was stopped".into() };
    let released = fixture.store.worker_end(worker.id, worker.session, end, fixture.at(2)).await.unwrap().unwrap();
    assert_eq!((released.orphaned, released.returned), (0, 2));
    use JobState::*;
    assert_eq!(fixture.states([0, 1, 2].map(|n: usize| jobs[n].id)).await, [Queued, Cancelled, Queued]);
    let log = fixture.get(jobs[0].id).await.execution_log;
    let line = log.iter().find(|entry| entry.event.as_str() == "released").unwrap();
    assert_eq!(line.details, "worker w left: it was stopped");
    let reclaimed = fixture.claim(5, 3).await;
    assert!(reclaimed.len() == 2 && reclaimed.iter().all(|job| job.retry_count == 0 && !job.must_record_start));
    assert!(!fixture.end(&jobs[0], completed(), 4).await);
    use WorkerState::*;
    assert_eq!(crate::workers::states(fixture, "w").await, [Creating, Connecting, Ready, Terminating, Terminated]);
}

pub async fn a_registration_ends_once_and_only_through_its_session(fixture: &Fixture) {
    let (old, jobs) = fixture.worker_with_jobs("w", 1, 0).await;
    let new = fixture.admit(fixture.worker("w"), 1).await;
    assert_eq!(fixture.end_as_lost(&old, 0, 2).await, None, "it has reconnected");
    assert_eq!(fixture.state(jobs[0].id).await, JobState::Assigned);
    assert_eq!(fixture.end_as_lost(&new, 0, 3).await.unwrap().orphaned, 1);
    assert_eq!(fixture.end_as_lost(&new, 0, 4).await, None);
    assert_eq!(fixture.get(jobs[0].id).await.retry_count, 1);
}

pub async fn a_worker_that_reconnects_after_its_end_has_a_new_registration(fixture: &Fixture) {
    let (first, jobs) = fixture.worker_with_jobs("w", 1, 0).await;
    fixture.end_as_lost(&first, 100, 1).await.unwrap();
    let second = fixture.admit(fixture.worker("w"), 2).await;
    assert!(second.id != first.id && second.session == 1 && second.was.is_none() && second.jobs.is_empty());
    assert!(!fixture.send_update(fixture.worker_update(&first, &[], 3)).await.connected);
    assert!(!fixture.end(&jobs[0], completed(), 3).await, "a report of the first registration is stale");
    assert_eq!(fixture.worker_view("w").await.registration_id, second.id.to_string());
    let before = fixture.worker_view(&first.id.to_string()).await;
    assert_eq!((before.id.as_str(), before.state), ("w", WorkerState::Terminated));
    fixture.end_as_lost(&second, 0, 4).await.unwrap();
    assert_eq!(fixture.worker_view("w").await.registration_id, second.id.to_string(), "the latest one");
}

pub async fn a_completion_after_the_loss_and_another_claim_changes_nothing(fixture: &Fixture) {
    for started in [true, false] {
        let (worker, jobs) = fixture.worker_with_jobs("w", 1, 0).await;
        let stale = &jobs[0];
        if started {
            fixture.report_start(stale, 1).await;
        }
        fixture.end_as_lost(&worker, 100, 10).await.unwrap();
        assert!(!fixture.end(stale, completed(), 11).await);
        fixture.promote(110).await;
        let other = fixture.admit(fixture.worker("other"), 110).await;
        let reclaimed = fixture.claim_by(&other, 1, 111).await.remove(0);
        assert_eq!(reclaimed.id, stale.id);
        for outcome in [completed(), failed("no"), fixture.retry(50), RunOutcome::Released] {
            assert!(!fixture.end(stale, outcome, 113).await, "the report is rejected as stale");
        }
        let view = fixture.get(reclaimed.id).await;
        assert_eq!((view.status, view.run), (JobState::Assigned, Some(reclaimed.run)));
        fixture.complete(&reclaimed, 114).await;
        assert_eq!(fixture.get(reclaimed.id).await.run, Some(reclaimed.run));
    }
}

pub async fn concurrent_loss_and_completion_never_both_count(fixture: &Fixture) {
    for round in 0..30 {
        let (worker, jobs) = fixture.worker_with_jobs("w", 1, round).await;
        let end = RunEnd { closes_claim: true, ..fixture.run_end(&jobs[0], completed(), round) };
        let (counted, released) = tokio::join!(fixture.report_end(end), fixture.end_as_lost(&worker, 0, round));
        let completed = fixture.state(jobs[0].id).await == JobState::Completed;
        assert_eq!(completed, released.unwrap().orphaned == 0, "in round {round}");
        assert_eq!(completed, counted, "in round {round}");
        fixture.store.job_delete(jobs[0].id, None, fixture.at(1_000)).await.unwrap();
    }
}

pub async fn concurrent_loss_and_claim_leave_no_job_with_a_lost_worker(fixture: &Fixture) {
    let mut seen = [0, 0];
    for round in 0..30 {
        let worker = fixture.admit(fixture.worker("w"), round).await;
        let id = fixture.submit(fixture.job("a", round)).await;
        let (claimed, released) =
            tokio::join!(fixture.claim_by(&worker, 1, round), fixture.end_as_lost(&worker, 0, round));
        assert_eq!(claimed.len(), released.unwrap().orphaned, "claimed jobs are released, in round {round}");
        let state = if claimed.is_empty() { JobState::Queued } else { JobState::Retrying };
        assert_eq!(fixture.state(id).await, state, "in round {round}");
        fixture.database.assert_consistent().await;
        seen[claimed.len()] += 1;
        fixture.store.job_delete(id, None, fixture.at(1_000)).await.unwrap();
    }
    assert_eq!(seen[0] + seen[1], 30);
}

pub async fn concurrent_reconnection_and_claim_lose_no_job(fixture: &Fixture) {
    for round in 0..30 {
        let old = fixture.admit(fixture.worker("w"), round).await;
        let id = fixture.submit(fixture.job("a", round)).await;
        let (claimed, reconnected) =
            tokio::join!(fixture.claim_by(&old, 1, round), fixture.admit(fixture.worker("w"), round));
        let resumed: Vec<_> = reconnected.jobs.iter().map(|resumed| resumed.job.id).collect();
        assert_eq!(resumed, claimed.iter().map(|job| job.id).collect::<Vec<_>>(), "in round {round}");
        fixture.end_as_lost(&reconnected, 0, round).await.unwrap();
        fixture.store.job_delete(id, None, fixture.at(1_000)).await.unwrap();
    }
}

pub async fn a_job_that_kills_its_worker_runs_out_of_attempts(fixture: &Fixture) {
    let id = fixture.submit(fixture.job("poison", 0).retries(2)).await;
    for attempt in 0..3 {
        assert_ne!(fixture.state(id).await, JobState::Failed);
        let worker = fixture.admit(fixture.worker(&format!("w{attempt}")), attempt * 10).await;
        assert_eq!(fixture.claim_by(&worker, 1, attempt * 10).await[0].id, id);
        fixture.end_as_lost(&worker, 1, attempt * 10 + 1).await.unwrap();
        fixture.promote(attempt * 10 + 5).await;
    }
    let view = fixture.get(id).await;
    assert_eq!((view.status, view.error_reason), (JobState::Failed, Some(ErrorReason::Orphaned)));
    assert_eq!(fixture.events(id).await.iter().filter(|event| **event == "orphaned").count(), 3);
}

pub async fn a_worker_keeps_its_jobs_when_its_server_dies(fixture: &Fixture) {
    let worker = fixture.admit(named("w", fixture, WorkerKind::Remote, NodeId::new()), 0).await;
    fixture.submit_all((0..2).map(|_| fixture.job("a", 0)).collect()).await;
    let jobs = fixture.claim_by(&worker, 2, 1).await;
    fixture.report_start(&jobs[0], 2).await;
    assert!(fixture.needs_recovery(3).await);

    assert_eq!(fixture.recover(0, 3).await, RecoveryCounts::default());

    assert!(!fixture.needs_recovery(4).await, "there is nothing left to recover");
    assert_eq!(fixture.states([jobs[0].id, jobs[1].id]).await, [JobState::Processing, JobState::Assigned]);
    let view = fixture.worker_view("w").await;
    assert_eq!((view.node, view.deadline, view.state), (None, Some(fixture.at(10_003)), WorkerState::Ready));
    assert!(fixture.sweep(LONG_AGO, 10_002).await.lost.is_empty());
    let reconnected = fixture.admit(fixture.worker("w"), 5_000).await;
    assert_eq!((reconnected.id, reconnected.session, reconnected.jobs.len()), (worker.id, 2, 2));
    let view = fixture.worker_view("w").await;
    assert_eq!((view.node, view.deadline, view.reason), (Some(fixture.node.to_string()), None, None));
    assert!(fixture.sweep(LONG_AGO, 20_000).await.lost.is_empty());
    for job in &jobs {
        fixture.complete(job, 20_001).await;
    }
}

pub async fn a_worker_that_does_not_reconnect_is_declared_lost(fixture: &Fixture) {
    let worker = fixture.admit(named("w", fixture, WorkerKind::Remote, NodeId::new()), 0).await;
    let id = fixture.submit(fixture.job("a", 0)).await;
    let job = fixture.claim_by(&worker, 1, 1).await.remove(0);
    fixture.recover(0, 3).await;
    // A server that was wrongly declared dead still sends updates, but they do not remove the deadline of the worker.
    assert!(fixture.send_update(fixture.worker_update(&worker, &[WorkerState::Busy], 4)).await.connected);
    assert_eq!(fixture.sweep(LONG_AGO, 5).await.next_at, Some(fixture.at(10_003)));

    let swept = fixture.sweep(LONG_AGO, 10_003).await;

    assert_eq!((swept.lost.len(), swept.lost[0].id, swept.lost[0].key.as_str()), (1, worker.id, "w"));
    assert_eq!((swept.lost[0].released.orphaned, swept.next_at, swept.more), (1, None, false));
    let view = fixture.get(id).await;
    assert_eq!(
        (view.status, view.retry_count, view.next_attempt_at),
        (JobState::Retrying, 1, Some(fixture.at(10_503)))
    );
    assert_eq!(view.error.as_deref(), Some("worker w was lost: no heartbeat"));
    assert!(!fixture.end(&job, completed(), 10_004).await);
    assert!(fixture.sweep(LONG_AGO, 10_005).await.lost.is_empty());
}

pub async fn the_built_in_worker_of_a_dead_server_ends_with_it(fixture: &Fixture) {
    let dead = NodeId::new();
    fixture.admit(named("server-9", fixture, WorkerKind::BuiltIn, dead), 0).await;
    fixture.submit(fixture.job("a", 0)).await;
    let job = fixture.claim_as(dead, 1, 1).await.remove(0);
    fixture.report_start(&job, 2).await;
    assert_eq!(fixture.recover(50, 3).await.orphaned, 1);
    let view = fixture.worker_view("server-9").await;
    assert_eq!((view.state, view.ended_at), (WorkerState::Terminated, Some(fixture.at(3))));
    assert_eq!(view.reason.as_deref(), Some("its server died"));
    assert!(!fixture.needs_recovery(4).await);
}

pub async fn the_deadline_of_a_worker_depends_on_its_transport(fixture: &Fixture) {
    let dead = NodeId::new();
    let with = |key, transport: &str, deadline: Option<i64>| WorkerEntry {
        transport: transport.into(),
        deadline: deadline.map(|ms| fixture.at(ms)),
        ..named(key, fixture, WorkerKind::Remote, dead)
    };
    fixture.admit(with("calls", "http", Some(9)), 0).await;
    fixture.admit(with("soon", "grpc", Some(500)), 0).await;
    fixture.admit(with("later", "grpc", Some(99_000)), 0).await;
    fixture.recover(0, 100).await;
    for (key, ms) in [("calls", 60_100), ("soon", 500), ("later", 10_100)] {
        assert_eq!(fixture.worker_view(key).await.deadline, Some(fixture.at(ms)), "{key}");
    }
}

pub async fn the_jobs_of_workers_without_a_server_are_listed_with_their_times(fixture: &Fixture) {
    let dead = NodeId::new();
    let unattended_worker = fixture.admit(named("unattended_worker", fixture, WorkerKind::Remote, dead), 0).await;
    let starting = WorkerEntry { state: WorkerState::Creating, ..named("starting", fixture, WorkerKind::Pool, dead) };
    let starting = fixture.admit(starting, 0).await;
    let (_, attended) = fixture.worker_with_jobs("attended", 1, 0).await;
    fixture.submit_all((0..4).map(|_| fixture.job("a", 1).timeout(3_000)).collect()).await;
    let jobs = fixture.claim_by(&unattended_worker, 3, 2).await;
    let scheduled = fixture.claim_by(&starting, 1, 3).await.remove(0);
    assert!(fixture.store.worker_unattended_jobs().await.unwrap().is_empty(), "their server may be alive");
    fixture.report_start(&jobs[0], 5).await;
    fixture.complete(&jobs[2], 6).await;

    fixture.recover(0, 10).await;

    let mut unattended = fixture.store.worker_unattended_jobs().await.unwrap();
    unattended.sort_by_key(|unattended| unattended.job.job.run);
    let shown: Vec<_> = unattended
        .iter()
        .map(|job| (job.job.job.id, job.worker_key.as_str(), job.is_starting, job.job.claimed_at, job.job.started_at))
        .collect();
    assert_eq!(
        shown,
        [
            (jobs[0].id, "unattended_worker", false, fixture.at(2), Some(fixture.at(5))),
            (jobs[1].id, "unattended_worker", false, fixture.at(2), None),
            (scheduled.id, "starting", true, fixture.at(3), None),
        ]
    );
    assert!(unattended.iter().all(|job| job.job.job.options.timeout_ms == Some(3_000)));
    fixture.admit(named("unattended_worker", fixture, WorkerKind::Remote, fixture.node), 11).await;
    let left = fixture.store.worker_unattended_jobs().await.unwrap();
    assert_eq!(left.len(), 1, "a worker that reconnects has a server again");
    assert!(left.iter().all(|job| job.job.job.id != attended[0].id));
}

pub async fn a_worker_lost_before_it_connected_was_never_assigned_its_job(fixture: &Fixture) {
    let starting = WorkerEntry { state: WorkerState::Creating, ..fixture.worker("starting") };
    let worker = fixture.admit(starting, 0).await;
    let id = fixture.submit(fixture.job("a", 1)).await;
    assert_eq!(fixture.claim_by(&worker, 1, 2).await.len(), 1);
    assert_eq!(fixture.state(id).await, JobState::Scheduled);
    fixture.end_as_lost(&worker, 700, 3).await;
    assert_eq!(fixture.events(id).await, ["created", "queued", "scheduled", "orphaned", "retry_scheduled"]);
}

pub async fn a_server_that_leaves_detaches_its_workers(fixture: &Fixture) {
    let other = NodeInfo { id: NodeId::new(), name: "other".into() };
    fixture.store.node_join(other.clone(), LEASE_MS, fixture.at(0)).await.unwrap();
    fixture.admit(named("inside", fixture, WorkerKind::BuiltIn, other.id), 0).await;
    let outside = fixture.admit(named("outside", fixture, WorkerKind::Remote, other.id), 0).await;
    let elsewhere = fixture.admit(fixture.worker("elsewhere"), 0).await;
    let ids = fixture.submit_all((0..3).map(|_| fixture.job("a", 0)).collect()).await;
    fixture.claim_as(other.id, 1, 1).await;
    fixture.claim_by(&outside, 1, 1).await;
    fixture.claim_by(&elsewhere, 1, 1).await;

    assert_eq!(fixture.store.node_leave(other.id, GRACE_PERIODS, fixture.at(2)).await.unwrap(), 1);

    use JobState::*;
    assert_eq!(fixture.states([ids[0], ids[1], ids[2]]).await, [Queued, Assigned, Assigned]);
    let inside = fixture.worker_view("inside").await;
    assert_eq!((inside.state, inside.reason.as_deref()), (WorkerState::Terminated, Some("its server stopped")));
    let view = fixture.worker_view("outside").await;
    assert_eq!((view.node, view.deadline, view.jobs.len()), (None, Some(fixture.at(10_002)), 1));
    assert_eq!(fixture.worker_view("elsewhere").await.deadline, None);
    assert!(!fixture.needs_recovery(3).await);
    let lost = fixture.sweep(LONG_AGO, 10_002).await.lost;
    assert_eq!(lost.len(), 1);
    let error = fixture.get(ids[1]).await.error.unwrap();
    assert_eq!(error, "worker outside was lost: its server stopped, and it has not reconnected");
}

pub async fn a_sweep_is_bounded_and_reports_that_more_is_due(fixture: &Fixture) {
    for n in 0..105 {
        let entry = WorkerEntry { deadline: Some(fixture.at(n)), ..fixture.worker(&format!("w{n}")) };
        fixture.admit(entry, 0).await;
    }
    let entry = WorkerEntry { deadline: Some(fixture.at(900)), ..fixture.worker("later") };
    fixture.admit(entry, 0).await;
    let first = fixture.sweep(LONG_AGO, 500).await;
    assert_eq!((first.lost.len(), first.more), (100, true));
    let second = fixture.sweep(LONG_AGO, 500).await;
    assert_eq!((second.lost.len(), second.more, second.next_at), (5, false, Some(fixture.at(900))));
    assert_eq!(fixture.store.worker_list(vec![], 500).await.unwrap().len(), 106);
    fixture.sweep(LONG_AGO, 501).await;
    assert_eq!(fixture.store.worker_list(vec![], 500).await.unwrap().len(), 106);
    fixture.sweep(501, 502).await;
    assert_eq!(fixture.store.worker_list(vec![], 500).await.unwrap().len(), 1, "ended workers are deleted");
    assert_eq!(fixture.database.number("SELECT count(DISTINCT worker) FROM worker_change").await, 1);
}

pub async fn a_claim_without_an_owner_is_found_however_its_owner_ended(fixture: &Fixture) {
    let (kept, jobs) = fixture.worker_with_jobs("kept", 1, 0).await;
    let (deleted, more) = fixture.worker_with_jobs("deleted", 1, 0).await;
    // Simulates claims that the end of their owner did not release: one owner has ended, the row of the other does not
    // exist.
    let ended = "UPDATE worker SET ended_at = 1, state = 6, deadline = NULL";
    fixture.database.run(ended).await;
    fixture.database.run("INSERT INTO worker_change SELECT id, 9, 1, 5, NULL FROM worker").await;
    fixture.database.run("INSERT INTO worker_change SELECT id, 10, 1, 6, NULL FROM worker").await;
    fixture.sweep(1_000, 1_000).await;
    assert_eq!(
        fixture.store.worker_list(vec![], 9).await.unwrap().len(),
        2,
        "a worker that still owns claims is not deleted"
    );
    fixture
        .database
        .run("DELETE FROM worker_change WHERE worker IN (SELECT id FROM worker WHERE key = 'deleted')")
        .await;
    fixture.database.run("DELETE FROM worker WHERE key = 'deleted'").await;
    assert!(fixture.needs_recovery(1_001).await);
    assert_eq!(fixture.recover(0, 1_001).await.returned, 2);
    assert_eq!(fixture.states([jobs[0].id, more[0].id]).await, [JobState::Queued; 2]);
    assert!(!fixture.needs_recovery(1_002).await);
    assert_ne!(kept.id, deleted.id);
}

pub async fn a_workers_claim_whose_response_was_lost_is_released(fixture: &Fixture) {
    let (worker, known) = fixture.worker_with_jobs("w", 1, 0).await;
    fixture.submit(fixture.job("a", 1)).await;
    let lost = fixture.claim_by(&worker, 1, 2).await.remove(0);
    let reconcile = |before, now| {
        fixture.store.node_reconcile(fixture.node, vec![known[0].run], cutoff(fixture.at(before)), fixture.at(now))
    };
    assert_eq!(reconcile(2, 3).await.unwrap(), 0, "the response may still be on its way");
    fixture.admit(fixture.worker("w"), 9).await;
    assert_eq!(reconcile(9, 10).await.unwrap(), 0, "it has just reconnected; its jobs may not be known here yet");
    assert_eq!(reconcile(10, 11).await.unwrap(), 1);
    assert_eq!(fixture.states([known[0].id, lost.id]).await, [JobState::Assigned, JobState::Queued]);
    let other = NodeInfo { id: NodeId::new(), name: "other".into() };
    fixture.store.node_join(other.clone(), LEASE_MS, fixture.at(0)).await.unwrap();
    let answer = fixture.store.node_reconcile(other.id, Vec::new(), cutoff(fixture.at(99)), fixture.at(99)).await;
    assert_eq!(answer.unwrap(), 0, "it is not connected there");
}
