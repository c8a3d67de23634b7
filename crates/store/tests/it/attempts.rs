//! The number of a job's attempts, in every view and event.

use faena_domain::{JobId, JobState};
use faena_store::{EventQuery, EventSubscription, Filter, Page, RunEnd, SubscriptionMode};
use serde_json::Value;

use crate::support::*;

/// Returns the number of attempts of a job. Asserts that a list shows the same number.
async fn attempts(fixture: &Fixture, id: JobId) -> u32 {
    let page = Page::offset(0, 100);
    let listed = fixture.store.job_list(&Filter::default(), page).await.unwrap().jobs;
    let listed = listed.into_iter().find(|job| job.id == id).unwrap();
    let view = fixture.get(id).await;
    assert_eq!((listed.attempt, listed.status), (view.attempt, view.status));
    view.attempt
}

pub async fn the_attempt_counts_runs_that_started_and_continues_after_a_manual_retry(fixture: &Fixture) {
    let subscription = EventSubscription {
        name: "watcher".into(),
        types: vec!["*".into()],
        mode: SubscriptionMode::Keep,
        until: faena_domain::Timestamp::MAX,
    };
    fixture.store.event_subscribe(vec![subscription], fixture.at(0)).await.unwrap();
    let id = fixture.submit(fixture.job("a", 0)).await;
    assert_eq!(attempts(fixture, id).await, 0, "it never ran");
    let first = fixture.claim_one(1).await;
    assert_eq!((first.attempt(), attempts(fixture, id).await), (1, 0), "assigned, not started");
    fixture.report_start(&first, 2).await;
    assert_eq!(attempts(fixture, id).await, 1);
    fixture.retry_at(&first, 10, 3).await;
    assert_eq!(attempts(fixture, id).await, 1);
    fixture.promote(10).await;

    let released = fixture.claim_one(11).await;
    fixture.report_start(&released, 12).await;
    assert_eq!((released.attempt(), attempts(fixture, id).await), (2, 2));
    fixture.release(&released, 13).await;
    assert_eq!(attempts(fixture, id).await, 1, "a released run is not an attempt");

    let second = fixture.claim_one(14).await;
    assert_eq!(second.attempt(), 2);
    fixture.end(&second, failed("no"), 15).await;
    assert_eq!(attempts(fixture, id).await, 2);
    fixture.retry_manually(id, 16).await;
    assert_eq!((attempts(fixture, id).await, fixture.get(id).await.retry_count), (2, 0));
    fixture.promote(17).await;
    let third = fixture.claim_one(18).await;
    assert_eq!((third.attempt(), third.retry_count), (3, 0));
    fixture.complete(&third, 19).await;
    assert_eq!(attempts(fixture, id).await, 3);

    let events = fixture.store.event_list(EventQuery::After(0), 100).await.unwrap();
    let counted = events.iter().filter(|event| event.subject == id.0).map(|event| {
        let data: Value = serde_json::from_str(&event.data).unwrap();
        format!("{} {}", data["status"].as_str().unwrap(), data["attempt"])
    });
    assert_eq!(
        counted.collect::<Vec<_>>(),
        [
            "PENDING 0",
            "QUEUED 0",
            "ASSIGNED 0",
            "PROCESSING 1",
            "RETRYING 1",
            "QUEUED 1",
            "ASSIGNED 1",
            "PROCESSING 2",
            "QUEUED 1",
            "ASSIGNED 1",
            "PROCESSING 2",
            "FAILED 2",
            "FAILED 2",
            "PENDING 2",
            "QUEUED 2",
            "ASSIGNED 2",
            "PROCESSING 3",
            "COMPLETED 3",
        ]
    );
}

pub async fn a_run_that_did_not_start_is_an_attempt_only_if_it_failed(fixture: &Fixture) {
    let cancelled_job = fixture.submit_and_claim(fixture.job("a", 0)).await;
    let end = RunEnd { started_at: None, ..fixture.run_end(&cancelled_job, cancelled(), 1) };
    assert!(fixture.report_end(end).await);
    assert_eq!(attempts(fixture, cancelled_job.id).await, 0);

    let expired = fixture.submit(fixture.job("a", 2).expires(fixture.at(5))).await;
    fixture.promote(5).await;
    assert_eq!((fixture.state(expired).await, attempts(fixture, expired).await), (JobState::Failed, 0));

    let (worker, jobs) = fixture.worker_with_jobs("w", 1, 10).await;
    fixture.end_as_lost(&worker, 0, 11).await;
    assert_eq!(attempts(fixture, jobs[0].id).await, 1, "a lost run uses an attempt, started or not");
    let last = fixture.submit(fixture.job("last", 12).retries(0)).await;
    let worker = fixture.admit(fixture.worker("v"), 12).await;
    let lanes = vec![fixture.lane_of(last).await.id];
    let owner = faena_store::Owner::Worker { id: worker.id, session: worker.session };
    assert_eq!(fixture.claim_for(owner, lanes, 1, 13).await.len(), 1);
    fixture.end_as_lost(&worker, 0, 14).await;
    assert_eq!((fixture.state(last).await, attempts(fixture, last).await), (JobState::Failed, 1));
    fixture.retry_manually(last, 15).await;
    assert_eq!(attempts(fixture, last).await, 1);
}
