//! Bulk actions: step by step, no job twice, whichever node dies.

use faena_domain::{BulkId, JobId, JobOptions, JobState, NewJob};
use faena_store::{AuditFilter, Bulk, BulkAction, BulkStep, Filter, NewBulk, Retention};

use crate::support::World;

async fn begin(world: &World, action: BulkAction, states: Vec<JobState>, upto: JobId, per_second: Option<u32>) -> Bulk {
    let id = BulkId::new();
    let filter = Filter { states, queue: Some("default".into()), ..Filter::default() };
    let new = NewBulk { id, action, filter, actor: "ana".into(), per_second, upto, matched: 9 };
    world.store.bulk_begin(new, world.at(100), world.at(100)).await.unwrap();
    get(world, id).await
}

async fn get(world: &World, id: BulkId) -> Bulk {
    world.store.bulk_get(id).await.unwrap().unwrap()
}

/// A step over these jobs, after which the action continues at `due_ms`, or is finished.
fn step(world: &World, bulk: &Bulk, ids: &[JobId], due_ms: Option<i64>) -> BulkStep {
    let due_at = due_ms.map(|ms| world.at(ms));
    BulkStep { bulk: bulk.clone(), ids: ids.to_vec(), last: ids.last().copied(), due_at }
}

async fn audit(world: &World) -> Vec<(String, u64)> {
    let rows = world.store.audit_list(AuditFilter::default(), 99).await.unwrap();
    rows.into_iter().rev().map(|row| (format!("{} {}", row.actor, row.action), row.count)).collect()
}

pub async fn an_action_proceeds_step_by_step_to_its_end(world: &World) {
    let ids = world.submit_all((0..4).map(|n| world.job("a", n)).collect()).await;
    let bulk = begin(world, BulkAction::Cancel, vec![JobState::Queued], ids[3], Some(5)).await;
    assert_eq!(world.store.bulk_due().await.unwrap(), Some(bulk.clone()));
    assert_eq!((bulk.per_second, bulk.matched, bulk.last, bulk.due_at), (Some(5), 9, None, Some(world.at(100))));
    assert!(world.store.bulk_step(step(world, &bulk, &ids[..2], Some(500)), world.at(100)).await.unwrap());
    assert_eq!(
        world.states([ids[0], ids[1], ids[2]]).await,
        [JobState::Cancelled, JobState::Cancelled, JobState::Queued]
    );
    let bulk = get(world, bulk.id).await;
    assert_eq!((bulk.done, bulk.skipped, bulk.last, bulk.due_at), (2, 0, Some(ids[1]), Some(world.at(500))));
    assert!(world.store.bulk_step(step(world, &bulk, &ids[2..], None), world.at(500)).await.unwrap());
    let over = get(world, bulk.id).await;
    assert_eq!((over.done, over.due_at, over.finished_at), (4, None, Some(world.at(500))));
    assert_eq!(world.store.bulk_due().await.unwrap(), None);
    assert_eq!(world.store.bulk_list(9).await.unwrap(), [over]);
    assert_eq!(audit(world).await, [("ana bulk.cancel".into(), 9), ("ana bulk.cancel.end".into(), 4)]);
}

pub async fn an_action_without_a_rate_has_its_audit_entry_at_the_end(world: &World) {
    let id = world.submit(world.job("a", 0)).await;
    let bulk = begin(world, BulkAction::Delete, vec![JobState::Queued], id, None).await;
    assert_eq!(audit(world).await, []);
    assert!(world.store.bulk_step(step(world, &bulk, &[id], None), world.at(101)).await.unwrap());
    assert!(world.store.job_get(id).await.unwrap().is_none());
    assert_eq!(audit(world).await, [("ana bulk.delete".into(), 1)]);
    let entry = &world.store.audit_list(AuditFilter::default(), 1).await.unwrap()[0];
    assert_eq!(entry.details["filter"], serde_json::json!({ "queue": "default", "status": ["QUEUED"] }));
}

pub async fn a_step_is_processed_once_whichever_node_takes_it(world: &World) {
    let ids = world.submit_all((0..2).map(|n| world.job("a", n)).collect()).await;
    for id in &ids {
        world.cancel(*id, 10).await;
    }
    let bulk = begin(world, BulkAction::Retry, vec![JobState::Cancelled], ids[1], Some(1)).await;
    let first = step(world, &bulk, &ids[..1], Some(500));
    assert!(world.store.bulk_step(first.clone(), world.at(100)).await.unwrap());
    // It fails again immediately; a concurrent reader must not retry it a second time.
    world.cancel(ids[0], 101).await;
    assert!(!world.store.bulk_step(first, world.at(102)).await.unwrap());
    assert_eq!(world.states([ids[0], ids[1]]).await, [JobState::Cancelled, JobState::Cancelled]);
    assert_eq!(get(world, bulk.id).await.done, 1);
}

pub async fn two_concurrent_steps_count_once(world: &World) {
    let ids = world.submit_all((0..20).map(|n| world.job("a", n)).collect()).await;
    let bulk = begin(world, BulkAction::Cancel, vec![JobState::Queued], ids[19], Some(5)).await;
    let again = || world.store.bulk_step(step(world, &bulk, &ids, None), world.at(100));
    let (a, b, c) = tokio::join!(again(), again(), again());
    let made = [a.unwrap(), b.unwrap(), c.unwrap()].into_iter().filter(|made| *made).count();
    assert_eq!(made, 1);
    assert_eq!(get(world, bulk.id).await.done, 20);
    assert_eq!(audit(world).await.len(), 2);
}

pub async fn jobs_that_changed_their_state_are_skipped(world: &World) {
    let ids = world.submit_all((0..4).map(|n| world.job("a", n)).collect()).await;
    let bulk = begin(world, BulkAction::Delete, vec![JobState::Queued], ids[3], Some(5)).await;
    world.cancel(ids[1], 5).await;
    world.store.job_delete(ids[2], None, world.at(6)).await.unwrap();
    assert!(world.store.bulk_step(step(world, &bulk, &ids, None), world.at(100)).await.unwrap());
    let over = get(world, bulk.id).await;
    assert_eq!((over.done, over.skipped), (2, 2));
    assert_eq!(world.state(ids[1]).await, JobState::Cancelled, "it was not waiting any more, so it is not meant");
}

pub async fn a_retry_that_a_unique_key_forbids_is_skipped(world: &World) {
    let unique = || JobOptions { unique_key: Some("u".into()), ..JobOptions::default() };
    let first = world.submit(NewJob { options: unique(), ..world.job("a", 0) }).await;
    world.cancel(first, 1).await;
    let plain = world.submit(world.job("a", 2)).await;
    world.cancel(plain, 3).await;
    let holder = world.submit(NewJob { options: unique(), ..world.job("a", 4) }).await;
    let bulk = begin(world, BulkAction::Retry, vec![JobState::Cancelled], plain, None).await;
    assert!(world.store.bulk_step(step(world, &bulk, &[first, plain], None), world.at(100)).await.unwrap());
    let over = get(world, bulk.id).await;
    assert_eq!((over.done, over.skipped), (1, 1));
    assert_eq!(world.states([first, plain, holder]).await, [JobState::Cancelled, JobState::Pending, JobState::Queued]);
}

pub async fn cancelling_running_jobs_requests_it_and_cancels_their_children(world: &World) {
    let running = world.running(world.job("a", 0)).await.id;
    let parent = world.submit(world.job("b", 1)).await;
    let child =
        NewJob { options: JobOptions { depends_on: vec![parent], ..JobOptions::default() }, ..world.job("c", 2) };
    let child = world.submit(child).await;
    let bulk = begin(world, BulkAction::Cancel, JobState::ALL[..6].to_vec(), parent, None).await;
    assert!(world.store.bulk_step(step(world, &bulk, &[running, parent], None), world.at(100)).await.unwrap());
    assert_eq!(
        world.states([running, parent, child]).await,
        [JobState::Assigned, JobState::Cancelled, JobState::Cancelled]
    );
    assert!(world.events(running).await.contains(&"cancel_requested"));
    assert_eq!(get(world, bulk.id).await.done, 2);
}

pub async fn a_stopped_action_processes_nothing_more(world: &World) {
    let ids = world.submit_all((0..2).map(|n| world.job("a", n)).collect()).await;
    let bulk = begin(world, BulkAction::Cancel, vec![JobState::Queued], ids[1], Some(1)).await;
    world.store.bulk_step(step(world, &bulk, &ids[..1], Some(500)), world.at(100)).await.unwrap();
    let bulk = get(world, bulk.id).await;
    assert!(world.store.bulk_stop(bulk.id, "luis", world.at(200)).await.unwrap());
    assert!(!world.store.bulk_stop(bulk.id, "luis", world.at(201)).await.unwrap(), "it is over");
    assert!(!world.store.bulk_stop(BulkId::new(), "luis", world.at(201)).await.unwrap());
    assert!(!world.store.bulk_step(step(world, &bulk, &ids[1..], None), world.at(500)).await.unwrap());
    let over = get(world, bulk.id).await;
    assert_eq!((over.done, over.error.as_deref()), (1, Some("stopped by luis")));
    assert_eq!((over.due_at, over.finished_at), (None, Some(world.at(200))));
    assert_eq!(world.state(ids[1]).await, JobState::Queued);
    assert_eq!(audit(world).await, [("ana bulk.cancel".into(), 9), ("luis bulk.stop".into(), 1)]);
}

pub async fn old_finished_actions_are_deleted(world: &World) {
    let id = world.submit(world.job("a", 0)).await;
    let over = begin(world, BulkAction::Cancel, vec![JobState::Queued], id, None).await;
    let open = begin(world, BulkAction::Cancel, vec![JobState::Queued], id, None).await;
    world.store.bulk_step(step(world, &over, &[], None), world.at(100)).await.unwrap();
    let retention = Retention { audit_ms: 60_000, ..Retention::default() };
    world.store.job_prune(&retention, 10, world.at(50_000)).await.unwrap();
    assert_eq!(world.store.bulk_list(9).await.unwrap().len(), 2);
    world.store.job_prune(&retention, 10, world.at(200_000)).await.unwrap();
    assert_eq!(world.store.bulk_list(9).await.unwrap(), [open]);
}

pub async fn an_unreadable_action_does_not_delay_others(world: &World) {
    let id = world.submit(world.job("a", 0)).await;
    begin(world, BulkAction::Cancel, vec![JobState::Queued], id, Some(1)).await;
    world.ledger.rows("UPDATE bulk SET filter = '{\"status\": [\"ASLEEP\"]}' RETURNING 1").await;
    assert_eq!(world.store.bulk_due().await.unwrap(), None);
    let good = begin(world, BulkAction::Cancel, vec![JobState::Queued], id, Some(1)).await;
    assert_eq!(world.store.bulk_due().await.unwrap(), Some(good.clone()));
    assert_eq!(world.store.bulk_list(9).await.unwrap(), [good]);
}
