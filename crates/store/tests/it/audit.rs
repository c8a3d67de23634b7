//! Every action of a caller has an audit entry, written in the transaction of the action.

use faena_domain::{AuditRow, JobId, Limit, Pause, Scope};
use faena_store::{AuditEntry, AuditFilter, JobPatch, QueuePatch, Retention};
use serde_json::json;

use crate::support::Fixture;

async fn entries(fixture: &Fixture) -> Vec<AuditRow> {
    fixture.store.audit_list(AuditFilter::default(), 100).await.unwrap()
}

/// Returns `actor action target details count` for each entry, oldest first.
async fn audit_entries(fixture: &Fixture) -> Vec<String> {
    let entries = entries(fixture).await;
    let line = |row: &AuditRow| format!("{} {} {} {} {}", row.actor, row.action, row.target, row.details, row.count);
    entries.iter().rev().map(line).collect()
}

pub async fn every_action_has_an_audit_entry_with_its_actor(fixture: &Fixture) {
    let (store, ana) = (&fixture.store, Some("ana"));
    let id = fixture.submit(fixture.job("mail", 0)).await;
    let patch = JobPatch { max_retries: Some(7), payload: Some("{}".into()), ..JobPatch::default() };
    store.job_patch(id, patch, ana, fixture.at(1)).await.unwrap();
    store.job_cancel(id, "no need", ana, fixture.at(2)).await.unwrap();
    store.job_retry(id, ana, fixture.at(3)).await.unwrap();
    store.job_cancel(id, "by the system", None, fixture.at(4)).await.unwrap();
    store.job_delete(id, ana, fixture.at(5)).await.unwrap();
    fixture.admit(fixture.worker("w"), 0).await;
    store.worker_drain("w", true, ana, fixture.at(6)).await.unwrap();
    store.worker_drain("w", false, ana, fixture.at(7)).await.unwrap();
    let pause = Pause { at: fixture.at(8), by: "ana".into(), reason: Some("stop".into()) };
    let pause = QueuePatch { paused: Some(Some(pause)), ..QueuePatch::default() };
    store.queue_set("mail", pause, "ana", fixture.at(8)).await.unwrap();
    let limit = Limit { concurrency: Some(2), rate: None };
    store.limit_set(Scope::System, limit, "ana", fixture.at(9)).await.unwrap();

    assert_eq!(
        audit_entries(fixture).await,
        [
            format!("ana job.patch {id} {} 1", json!({ "changed": "payload, maxRetries 7" })),
            format!("ana job.cancel {id} {} 1", json!({ "reason": "no need" })),
            format!("ana job.retry {id} {{}} 1"),
            format!("ana job.delete {id} {{}} 1"),
            "ana worker.drain w {} 1".into(),
            "ana worker.resume w {} 1".into(),
            format!("ana queue.pause mail {} 1", json!({ "reason": "stop" })),
            format!("ana limit.set system {} 1", json!({ "concurrency": 2, "rate": null })),
        ]
    );
    let times: Vec<i64> = entries(fixture).await.iter().rev().map(|row| row.at.ms_since(fixture.start)).collect();
    assert_eq!(times, [1, 2, 3, 5, 6, 7, 8, 9]);
}

pub async fn a_rejected_action_leaves_no_audit_entry(fixture: &Fixture) {
    let (store, ana, at) = (&fixture.store, Some("ana"), fixture.at(9));
    let id = fixture.submit(fixture.job("mail", 0)).await;
    store.job_retry(id, ana, at).await.unwrap_err();
    fixture.cancel(id, 1).await;
    store.job_cancel(id, "", ana, at).await.unwrap_err();
    store.job_patch(id, JobPatch::default(), ana, at).await.unwrap_err();
    let unknown = JobId::new();
    store.job_cancel(unknown, "", ana, at).await.unwrap_err();
    store.job_retry(unknown, ana, at).await.unwrap_err();
    store.job_delete(unknown, ana, at).await.unwrap_err();
    let in_flight = fixture.submit(fixture.job("mail", 0)).await;
    fixture.claim(1, 2).await;
    store.job_delete(in_flight, ana, at).await.unwrap_err();
    assert_eq!(store.worker_drain("unknown", true, ana, at).await.unwrap(), None);
    assert_eq!(audit_entries(fixture).await, Vec::<String>::new());
}

pub async fn entries_are_listed_latest_first_by_filter_and_in_pages(fixture: &Fixture) {
    for n in 0..5 {
        let entry = AuditEntry {
            actor: if n % 2 == 0 { "ana" } else { "luis" }.into(),
            action: if n < 3 { "job.cancel" } else { "job.retry" }.into(),
            target: format!("job {n}"),
            details: json!({}),
            count: n,
        };
        fixture.store.audit_add(entry, fixture.at(1)).await.unwrap();
    }
    let find = async |filter: AuditFilter, limit| {
        let rows = fixture.store.audit_list(filter, limit).await.unwrap();
        rows.iter().map(|row| row.count).collect::<Vec<_>>()
    };
    let none = AuditFilter::default;
    assert_eq!(find(none(), 100).await, [4, 3, 2, 1, 0]);
    assert_eq!(find(AuditFilter { actor: Some("luis".into()), ..none() }, 100).await, [3, 1]);
    assert_eq!(find(AuditFilter { action: Some("job.retry".into()), ..none() }, 100).await, [4, 3]);
    assert_eq!(find(AuditFilter { target: Some("job 2".into()), ..none() }, 100).await, [2]);
    let first = fixture.store.audit_list(none(), 2).await.unwrap();
    assert_eq!(find(AuditFilter { before: Some(first[1].sequence), ..none() }, 2).await, [2, 1]);
}

pub async fn old_entries_are_deleted(fixture: &Fixture) {
    for ms in [0, 10, 20] {
        let entry = AuditEntry {
            actor: "ana".into(),
            action: "job.cancel".into(),
            target: ms.to_string(),
            details: json!({}),
            count: 1,
        };
        fixture.store.audit_add(entry, fixture.at(ms)).await.unwrap();
    }
    let retention = Retention { audit_ms: 1_000, ..Retention::default() };
    fixture.store.job_prune(&retention, 10, fixture.at(1_010)).await.unwrap();
    let left: Vec<String> = entries(fixture).await.into_iter().map(|row| row.target).collect();
    assert_eq!(left, ["20", "10"]);
}
