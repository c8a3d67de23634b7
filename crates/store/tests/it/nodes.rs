//! Nodes die, leave, and report too late. A node that never joined counts as dead on both databases.

use faena_domain::{ErrorReason, JobState, NodeId};
use faena_store::{ClaimedJob, InputKind, InputState, InputView, NodeInfo, RecoveryCounts, RunEnd, RunOutcome, Tally};

use crate::support::*;

/// Submits jobs and claims them for a dead node.
async fn claimed_by_dead_node(fixture: &Fixture, count: usize, ms: i64) -> Vec<ClaimedJob> {
    fixture.submit_all((0..count).map(|_| fixture.job("a", ms)).collect()).await;
    let jobs = fixture.claim_as(NodeId::new(), count, ms).await;
    assert_eq!(jobs.len(), count);
    jobs
}

pub async fn started_jobs_of_a_dead_node_use_an_attempt(fixture: &Fixture) {
    let job = claimed_by_dead_node(fixture, 1, 0).await.remove(0);
    fixture.report_start(&job, 1).await;

    let released = fixture.recover(5_000, 10).await;

    assert_eq!((released.orphaned, released.returned), (1, 0));
    let view = fixture.get(job.id).await;
    assert_eq!((view.status, view.retry_count), (JobState::Retrying, 1));
    assert_eq!(view.next_attempt_at, Some(fixture.at(5_010)));
    assert_eq!(view.error_reason, Some(ErrorReason::Orphaned));
    fixture.promote(5_010).await;
    let reclaimed = fixture.claim_one(5_011).await;
    assert_eq!((reclaimed.id, reclaimed.retry_count, reclaimed.must_record_start), (job.id, 1, false));
    assert!(reclaimed.run > job.run);
}

pub async fn a_started_job_without_attempts_left_fails_when_its_node_dies(fixture: &Fixture) {
    fixture.submit(fixture.job("a", 0).retries(0).unique("k")).await;
    let job = fixture.claim_as(NodeId::new(), 1, 0).await.remove(0);
    fixture.report_start(&job, 1).await;
    fixture.recover(5_000, 10).await;
    let view = fixture.get(job.id).await;
    assert_eq!((view.status, view.error_reason), (JobState::Failed, Some(ErrorReason::Orphaned)));
    fixture.submit(fixture.job("a", 11).unique("k")).await;
}

pub async fn jobs_that_had_not_started_are_ready_again(fixture: &Fixture) {
    let jobs = claimed_by_dead_node(fixture, 3, 0).await;
    let released = fixture.recover(5_000, 10).await;
    assert_eq!((released.orphaned, released.returned), (0, 3));
    let reclaimed = fixture.claim(5, 11).await;
    assert_eq!(
        reclaimed.iter().map(|job| job.id).collect::<Vec<_>>(),
        jobs.iter().map(|job| job.id).collect::<Vec<_>>()
    );
    assert!(reclaimed.iter().all(|job| job.must_record_start && job.retry_count == 0 && job.run > jobs[0].run));
    fixture.release(&reclaimed[0], 12).await;
    assert!(!fixture.claim_one(13).await.must_record_start, "a live node has claimed it since");
}

pub async fn ended_jobs_of_a_dead_node_stay_ended(fixture: &Fixture) {
    let jobs = claimed_by_dead_node(fixture, 6, 0).await;
    for job in &jobs {
        fixture.report_start(job, 1).await;
    }
    for (job, outcome) in
        jobs.iter().zip([completed(), failed("no"), cancelled(), fixture.retry(100), RunOutcome::Released])
    {
        assert!(fixture.end(job, outcome, 2).await);
    }
    let released = fixture.recover(5_000, 10).await;
    assert_eq!((released.orphaned, released.returned), (1, 0));
    let states = fixture.states([0, 1, 2, 3, 4, 5].map(|n: usize| jobs[n].id)).await;
    use JobState::*;
    assert_eq!(states, [Completed, Failed, Cancelled, Retrying, Queued, Retrying]);
    assert_eq!(fixture.get(jobs[3].id).await.next_attempt_at, Some(fixture.at(100)));
}

pub async fn a_job_with_a_cancel_request_is_cancelled_when_its_node_dies(fixture: &Fixture) {
    let jobs = claimed_by_dead_node(fixture, 2, 0).await;
    fixture.report_start(&jobs[0], 1).await;
    for job in &jobs {
        fixture.cancel(job.id, 2).await;
    }
    fixture.recover(5_000, 10).await;
    assert_eq!(fixture.states([jobs[0].id, jobs[1].id]).await, [JobState::Cancelled; 2]);
    assert!(fixture.store.poll(fixture.node, fixture.at(0)).await.unwrap().cancel_requests.is_empty());
}

pub async fn a_completion_after_recovery_is_stale(fixture: &Fixture) {
    let jobs = claimed_by_dead_node(fixture, 2, 0).await;
    fixture.report_start(&jobs[0], 1).await;
    fixture.recover(5_000, 10).await;
    for job in &jobs {
        let before = serde_json::to_value(fixture.get(job.id).await).unwrap();
        for outcome in [completed(), failed("no"), fixture.retry(50), RunOutcome::Released, cancelled()] {
            // Recovery ended the run, so a late report must change nothing.
            fixture.end(job, outcome, 11).await;
            assert_eq!(serde_json::to_value(fixture.get(job.id).await).unwrap(), before);
        }
    }
}

pub async fn a_completion_before_recovery_stays(fixture: &Fixture) {
    let jobs = claimed_by_dead_node(fixture, 2, 0).await;
    fixture.report_start(&jobs[0], 1).await;
    fixture.complete(&jobs[0], 2).await;
    assert!(fixture.report_end(RunEnd { closes_claim: true, ..fixture.run_end(&jobs[1], completed(), 3) }).await);
    assert_eq!(fixture.recover(5_000, 10).await, RecoveryCounts::default());
    assert_eq!(fixture.total(Tally::Completed).await, 2);
}

pub async fn a_completion_after_recovery_and_another_claim_changes_nothing(fixture: &Fixture) {
    for started in [true, false] {
        let stale = claimed_by_dead_node(fixture, 1, 0).await.remove(0);
        if started {
            fixture.report_start(&stale, 1).await;
        }
        fixture.recover(100, 10).await;
        fixture.promote(110).await;
        let reclaimed = fixture.claim_one(111).await;
        assert_eq!(reclaimed.id, stale.id);
        fixture.report_start(&reclaimed, 112).await;

        for outcome in [completed(), failed("no"), fixture.retry(50), RunOutcome::Released] {
            assert!(!fixture.end(&stale, outcome, 113).await, "the report is rejected as stale");
        }
        let view = fixture.get(reclaimed.id).await;
        assert_eq!((view.status, view.run), (JobState::Processing, Some(reclaimed.run)));
        fixture.complete(&reclaimed, 114).await;
        assert!(!fixture.end(&stale, failed("no"), 115).await);
        assert_eq!(fixture.get(reclaimed.id).await.run, Some(reclaimed.run));
    }
}

pub async fn concurrent_recovery_and_completion_never_both_count(fixture: &Fixture) {
    let mut seen = [0, 0];
    for round in 0..30 {
        let job = claimed_by_dead_node(fixture, 1, round).await.remove(0);
        let end = RunEnd { closes_claim: true, ..fixture.run_end(&job, completed(), round) };
        let (counted, released) = tokio::join!(fixture.report_end(end), fixture.recover(0, round));
        let completed = fixture.state(job.id).await == JobState::Completed;
        assert_eq!(completed, released.returned == 0, "in round {round}");
        assert_eq!(completed, counted, "in round {round}");
        seen[usize::from(completed)] += 1;
        fixture.store.job_delete(job.id, None, fixture.at(1_000)).await.unwrap();
    }
    assert_eq!(seen[0] + seen[1], 30);
}

pub async fn a_node_that_leaves_returns_its_jobs_without_using_an_attempt(fixture: &Fixture) {
    fixture.submit_all((0..4).map(|n| fixture.job("a", n)).collect()).await;
    let jobs = fixture.claim(4, 5).await;
    fixture.report_start(&jobs[0], 6).await;
    fixture.complete(&jobs[1], 6).await;
    fixture.cancel(jobs[2].id, 6).await;

    assert_eq!(fixture.store.node_leave(fixture.node, GRACE_PERIODS, fixture.at(7)).await.unwrap(), 2);

    use JobState::*;
    let states = fixture.states([0, 1, 2, 3].map(|n: usize| jobs[n].id)).await;
    assert_eq!(states, [Queued, Completed, Cancelled, Queued]);
    assert_eq!(fixture.get(jobs[0].id).await.retry_count, 0);
    let reclaimed = fixture.claim(4, 8).await;
    assert!(reclaimed.iter().all(|job| job.retry_count == 0 && !job.must_record_start));
    assert!(!fixture.end(&jobs[0], completed(), 9).await, "a report after it left is stale");
}

pub async fn recovery_happens_once(fixture: &Fixture) {
    let jobs = claimed_by_dead_node(fixture, 2, 0).await;
    fixture.report_start(&jobs[0], 1).await;
    fixture.recover(5_000, 10).await;
    assert_eq!(fixture.recover(5_000, 11).await, RecoveryCounts::default());
    let mine = fixture.claim_one(12).await;
    assert_eq!(fixture.recover(5_000, 13).await, RecoveryCounts::default(), "claims of a live node are kept");
    fixture.complete(&mine, 14).await;
}

pub async fn claims_beyond_one_recovery_round_are_released_in_later_rounds(fixture: &Fixture) {
    fixture.submit_all((0..45).map(|_| fixture.job("a", 0)).collect()).await;
    let dead = NodeId::new();
    for _ in 0..45 {
        fixture.claim_as(dead, 1, 1).await;
    }
    let mut released = 0;
    for _ in 0..10 {
        released += fixture.recover(0, 2).await.returned;
    }
    assert_eq!(released, 45);
    assert_eq!(fixture.total(Tally::Queued).await, 45);
}

pub async fn the_log_of_a_lost_run_is_complete(fixture: &Fixture) {
    let jobs = claimed_by_dead_node(fixture, 2, 0).await;
    fixture.report_start(&jobs[0], 1).await;
    fixture.recover(50, 10).await;
    let first = ["created", "queued", "assigned", "started", "orphaned", "retry_scheduled"];
    assert_eq!(fixture.events(jobs[0].id).await, first);
    assert_eq!(fixture.events(jobs[1].id).await[..2], ["created", "queued"]);
    assert!(fixture.events(jobs[1].id).await.contains(&"recovered".into()));

    let other = NodeInfo { id: NodeId::new(), name: "other".into() };
    fixture.store.node_join(other.clone(), LEASE_MS, fixture.at(11)).await.unwrap();
    let job = fixture.claim_as(other.id, 1, 12).await.remove(0);
    fixture.store.node_leave(other.id, GRACE_PERIODS, fixture.at(13)).await.unwrap();
    assert!(fixture.events(job.id).await.contains(&"released".into()));
}

pub async fn a_live_node_shows_the_state_of_its_sources_and_inboxes(fixture: &Fixture) {
    let input = |name: &str, state, down_since| InputView {
        name: name.into(),
        kind: InputKind::Source,
        state,
        down_since,
        down_reason: down_since.map(|_| "no \"route\" \0".into()),
        pending: Some(7),
        oldest_pending_at: down_since,
        processed: [("sent".to_owned(), 3)].into(),
    };
    let reports = async |ms| fixture.store.node_reports(fixture.at(ms)).await.unwrap();
    assert_eq!(reports(1).await.into_iter().map(|report| report.inputs).collect::<Vec<_>>(), [vec![]]);
    let other = NodeInfo { id: NodeId::new(), name: "other".into() };
    fixture.store.node_join(other.clone(), LEASE_MS, fixture.at(1)).await.unwrap();
    let inputs = vec![input("a", InputState::Down, Some(fixture.at(2))), input("b", InputState::Up, None)];
    fixture.store.node_report(other.id, inputs.clone()).await.unwrap();
    let reported = reports(3).await.pop().unwrap();
    assert_eq!((reported.node, reported.name.as_str(), reported.inputs), (other.id, "other", inputs));
    fixture.store.node_report(other.id, vec![input("b", InputState::Up, None)]).await.unwrap();
    assert_eq!(reports(4).await.pop().unwrap().inputs.len(), 1, "the latest report counts");
    fixture.store.node_leave(other.id, GRACE_PERIODS, fixture.at(5)).await.unwrap();
    assert_eq!(reports(6).await.len(), 1, "a node that has left shows nothing");
}

pub async fn a_live_node_shows_its_version_and_when_it_was_last_seen(fixture: &Fixture) {
    let other = NodeInfo { id: NodeId::new(), name: "other".into() };
    fixture.store.node_join(other.clone(), LEASE_MS, fixture.at(1)).await.unwrap();
    assert!(fixture.store.node_renew(other.id, LEASE_MS, fixture.at(100)).await.unwrap());
    let report = fixture.store.node_reports(fixture.at(100)).await.unwrap().pop().unwrap();
    assert_eq!((report.node, report.version.as_str()), (other.id, env!("CARGO_PKG_VERSION")));
    assert_eq!((report.started_at, report.seen_at), (fixture.at(1), fixture.at(100)));
}

pub async fn a_claim_whose_response_was_lost_is_released(fixture: &Fixture) {
    fixture.submit_all((0..3).map(|_| fixture.job("a", 0)).collect()).await;
    let known = fixture.claim_one(1).await;
    let lost = fixture.claim(2, 2).await;
    let reconcile = |before, now| {
        fixture.store.node_reconcile(fixture.node, vec![known.run], cutoff(fixture.at(before)), fixture.at(now))
    };

    assert_eq!(reconcile(2, 3).await.unwrap(), 0, "the response may still be on its way");
    assert_eq!(reconcile(10, 11).await.unwrap(), 2);
    assert_eq!(reconcile(10, 12).await.unwrap(), 0);

    use JobState::*;
    assert_eq!(fixture.states([known.id, lost[0].id, lost[1].id]).await, [Assigned, Queued, Queued]);
    assert!(!fixture.end(&lost[0], completed(), 13).await, "the report is too late");
    assert!(fixture.end(&known, completed(), 13).await);
}
