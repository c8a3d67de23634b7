//! Bulk actions: processed in steps, each job once, even if a node dies.

use faena_domain::{BulkId, JobId, JobOptions, JobState, NewJob};
use faena_store::{AuditFilter, Bulk, BulkAction, BulkStep, BulkWork, Filter, NewBulk, Retention};

use crate::support::Fixture;

async fn begin(
    fixture: &Fixture,
    action: BulkAction,
    states: Vec<JobState>,
    up_to: JobId,
    per_second: Option<u32>,
) -> Bulk {
    let id = BulkId::new();
    let filter = Filter { states, queue: Some("default".into()), ..Filter::default() };
    let work = BulkWork::Jobs { action, filter };
    let new = NewBulk { id, work, actor: "ana".into(), per_second, up_to: up_to.0, matched: 9 };
    fixture.store.bulk_begin(new, fixture.at(100), fixture.at(100)).await.unwrap();
    get(fixture, id).await
}

async fn get(fixture: &Fixture, id: BulkId) -> Bulk {
    fixture.store.bulk_get(id).await.unwrap().unwrap()
}

/// Returns a step that processes these jobs, after which the action continues at `due_ms`, or is finished.
fn step(fixture: &Fixture, bulk: &Bulk, ids: &[JobId], due_ms: Option<i64>) -> BulkStep {
    let due_at = due_ms.map(|ms| fixture.at(ms));
    let ids: Vec<uuid::Uuid> = ids.iter().map(|id| id.0).collect();
    BulkStep { bulk: bulk.clone(), last: ids.last().copied(), ids, due_at }
}

async fn audit(fixture: &Fixture) -> Vec<(String, u64)> {
    let rows = fixture.store.audit_list(AuditFilter::default(), 99).await.unwrap();
    rows.into_iter().rev().map(|row| (format!("{} {}", row.actor, row.action), row.count)).collect()
}

pub async fn an_action_proceeds_step_by_step_to_its_end(fixture: &Fixture) {
    let ids = fixture.submit_all((0..4).map(|n| fixture.job("a", n)).collect()).await;
    let bulk = begin(fixture, BulkAction::Cancel, vec![JobState::Queued], ids[3], Some(5)).await;
    assert_eq!(fixture.store.bulk_due().await.unwrap(), Some(bulk.clone()));
    assert_eq!((bulk.per_second, bulk.matched, bulk.last, bulk.due_at), (Some(5), 9, None, Some(fixture.at(100))));
    assert!(fixture.store.bulk_step(step(fixture, &bulk, &ids[..2], Some(500)), fixture.at(100)).await.unwrap());
    assert_eq!(
        fixture.states([ids[0], ids[1], ids[2]]).await,
        [JobState::Cancelled, JobState::Cancelled, JobState::Queued]
    );
    let bulk = get(fixture, bulk.id).await;
    assert_eq!((bulk.done, bulk.skipped, bulk.last, bulk.due_at), (2, 0, Some(ids[1].0), Some(fixture.at(500))));
    assert!(fixture.store.bulk_step(step(fixture, &bulk, &ids[2..], None), fixture.at(500)).await.unwrap());
    let finished = get(fixture, bulk.id).await;
    assert_eq!((finished.done, finished.due_at, finished.finished_at), (4, None, Some(fixture.at(500))));
    assert_eq!(fixture.store.bulk_due().await.unwrap(), None);
    assert_eq!(fixture.store.bulk_list(9).await.unwrap(), [finished]);
    assert_eq!(audit(fixture).await, [("ana bulk.cancel".into(), 9), ("ana bulk.cancel.end".into(), 4)]);
}

pub async fn an_action_without_a_rate_has_its_audit_entry_at_the_end(fixture: &Fixture) {
    let id = fixture.submit(fixture.job("a", 0)).await;
    let bulk = begin(fixture, BulkAction::Delete, vec![JobState::Queued], id, None).await;
    assert_eq!(audit(fixture).await, []);
    assert!(fixture.store.bulk_step(step(fixture, &bulk, &[id], None), fixture.at(101)).await.unwrap());
    assert!(fixture.store.job_get(id).await.unwrap().is_none());
    assert_eq!(audit(fixture).await, [("ana bulk.delete".into(), 1)]);
    let entry = &fixture.store.audit_list(AuditFilter::default(), 1).await.unwrap()[0];
    assert_eq!(entry.details["filter"], serde_json::json!({ "queue": "default", "status": ["QUEUED"] }));
}

pub async fn a_step_is_processed_once_whichever_node_takes_it(fixture: &Fixture) {
    let ids = fixture.submit_all((0..2).map(|n| fixture.job("a", n)).collect()).await;
    for id in &ids {
        fixture.cancel(*id, 10).await;
    }
    let bulk = begin(fixture, BulkAction::Retry, vec![JobState::Cancelled], ids[1], Some(1)).await;
    let first = step(fixture, &bulk, &ids[..1], Some(500));
    assert!(fixture.store.bulk_step(first.clone(), fixture.at(100)).await.unwrap());
    // The job is cancelled again immediately. The same step of another node must not retry it a second time.
    fixture.cancel(ids[0], 101).await;
    assert!(!fixture.store.bulk_step(first, fixture.at(102)).await.unwrap());
    assert_eq!(fixture.states([ids[0], ids[1]]).await, [JobState::Cancelled, JobState::Cancelled]);
    assert_eq!(get(fixture, bulk.id).await.done, 1);
}

pub async fn concurrent_steps_count_once(fixture: &Fixture) {
    let ids = fixture.submit_all((0..20).map(|n| fixture.job("a", n)).collect()).await;
    let bulk = begin(fixture, BulkAction::Cancel, vec![JobState::Queued], ids[19], Some(5)).await;
    let take_step = || fixture.store.bulk_step(step(fixture, &bulk, &ids, None), fixture.at(100));
    let (a, b, c) = tokio::join!(take_step(), take_step(), take_step());
    let processed = [a.unwrap(), b.unwrap(), c.unwrap()].into_iter().filter(|processed| *processed).count();
    assert_eq!(processed, 1);
    assert_eq!(get(fixture, bulk.id).await.done, 20);
    assert_eq!(audit(fixture).await.len(), 2);
}

pub async fn jobs_that_changed_their_state_are_skipped(fixture: &Fixture) {
    let ids = fixture.submit_all((0..4).map(|n| fixture.job("a", n)).collect()).await;
    let bulk = begin(fixture, BulkAction::Delete, vec![JobState::Queued], ids[3], Some(5)).await;
    fixture.cancel(ids[1], 5).await;
    fixture.store.job_delete(ids[2], None, fixture.at(6)).await.unwrap();
    assert!(fixture.store.bulk_step(step(fixture, &bulk, &ids, None), fixture.at(100)).await.unwrap());
    let finished = get(fixture, bulk.id).await;
    assert_eq!((finished.done, finished.skipped), (2, 2));
    assert_eq!(fixture.state(ids[1]).await, JobState::Cancelled, "it no longer matches the filter");
}

pub async fn a_retry_that_a_unique_key_forbids_is_skipped(fixture: &Fixture) {
    let unique = || JobOptions { unique_key: Some("u".into()), ..JobOptions::default() };
    let first = fixture.submit(NewJob { options: unique(), ..fixture.job("a", 0) }).await;
    fixture.cancel(first, 1).await;
    let plain = fixture.submit(fixture.job("a", 2)).await;
    fixture.cancel(plain, 3).await;
    let key_owner = fixture.submit(NewJob { options: unique(), ..fixture.job("a", 4) }).await;
    let bulk = begin(fixture, BulkAction::Retry, vec![JobState::Cancelled], plain, None).await;
    assert!(fixture.store.bulk_step(step(fixture, &bulk, &[first, plain], None), fixture.at(100)).await.unwrap());
    let finished = get(fixture, bulk.id).await;
    assert_eq!((finished.done, finished.skipped), (1, 1));
    assert_eq!(
        fixture.states([first, plain, key_owner]).await,
        [JobState::Cancelled, JobState::Pending, JobState::Queued]
    );
}

pub async fn a_bulk_cancel_requests_cancellation_of_running_jobs_and_cancels_children_of_queued_ones(
    fixture: &Fixture,
) {
    let running = fixture.submit_and_claim(fixture.job("a", 0)).await.id;
    let parent = fixture.submit(fixture.job("b", 1)).await;
    let child =
        NewJob { options: JobOptions { depends_on: vec![parent], ..JobOptions::default() }, ..fixture.job("c", 2) };
    let child = fixture.submit(child).await;
    let bulk = begin(fixture, BulkAction::Cancel, JobState::ALL[..6].to_vec(), parent, None).await;
    assert!(fixture.store.bulk_step(step(fixture, &bulk, &[running, parent], None), fixture.at(100)).await.unwrap());
    assert_eq!(
        fixture.states([running, parent, child]).await,
        [JobState::Assigned, JobState::Cancelled, JobState::Cancelled]
    );
    assert!(fixture.events(running).await.contains(&"cancel_requested".into()));
    assert_eq!(get(fixture, bulk.id).await.done, 2);
}

pub async fn a_stopped_action_processes_nothing_more(fixture: &Fixture) {
    let ids = fixture.submit_all((0..2).map(|n| fixture.job("a", n)).collect()).await;
    let bulk = begin(fixture, BulkAction::Cancel, vec![JobState::Queued], ids[1], Some(1)).await;
    fixture.store.bulk_step(step(fixture, &bulk, &ids[..1], Some(500)), fixture.at(100)).await.unwrap();
    let bulk = get(fixture, bulk.id).await;
    assert!(fixture.store.bulk_stop(bulk.id, "luis", fixture.at(200)).await.unwrap());
    assert!(!fixture.store.bulk_stop(bulk.id, "luis", fixture.at(201)).await.unwrap(), "it has already stopped");
    assert!(!fixture.store.bulk_stop(BulkId::new(), "luis", fixture.at(201)).await.unwrap());
    assert!(!fixture.store.bulk_step(step(fixture, &bulk, &ids[1..], None), fixture.at(500)).await.unwrap());
    let finished = get(fixture, bulk.id).await;
    assert_eq!((finished.done, finished.error.as_deref()), (1, Some("stopped by luis")));
    assert_eq!((finished.due_at, finished.finished_at), (None, Some(fixture.at(200))));
    assert_eq!(fixture.state(ids[1]).await, JobState::Queued);
    assert_eq!(audit(fixture).await, [("ana bulk.cancel".into(), 9), ("luis bulk.stop".into(), 1)]);
}

pub async fn old_finished_actions_are_deleted(fixture: &Fixture) {
    let id = fixture.submit(fixture.job("a", 0)).await;
    let finished = begin(fixture, BulkAction::Cancel, vec![JobState::Queued], id, None).await;
    let open = begin(fixture, BulkAction::Cancel, vec![JobState::Queued], id, None).await;
    fixture.store.bulk_step(step(fixture, &finished, &[], None), fixture.at(100)).await.unwrap();
    let retention = Retention { audit_ms: 60_000, ..Retention::default() };
    fixture.store.job_prune(&retention, 10, fixture.at(50_000)).await.unwrap();
    assert_eq!(fixture.store.bulk_list(9).await.unwrap().len(), 2);
    fixture.store.job_prune(&retention, 10, fixture.at(200_000)).await.unwrap();
    assert_eq!(fixture.store.bulk_list(9).await.unwrap(), [open]);
}

pub async fn an_unreadable_action_does_not_delay_others(fixture: &Fixture) {
    let id = fixture.submit(fixture.job("a", 0)).await;
    begin(fixture, BulkAction::Cancel, vec![JobState::Queued], id, Some(1)).await;
    fixture.database.rows("UPDATE bulk SET filter = '{\"status\": [\"ASLEEP\"]}' RETURNING 1").await;
    assert_eq!(fixture.store.bulk_due().await.unwrap(), None);
    let good = begin(fixture, BulkAction::Cancel, vec![JobState::Queued], id, Some(1)).await;
    assert_eq!(fixture.store.bulk_due().await.unwrap(), Some(good.clone()));
    assert_eq!(fixture.store.bulk_list(9).await.unwrap(), [good]);
}
