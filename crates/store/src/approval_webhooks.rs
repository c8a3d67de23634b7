//! Webhooks about approvals: the body contains everything that a person needs to decide.

use faena_domain::{TaskId, Timestamp, WebhookId, WebhookSubject};
use faena_machine::ApprovalNotice;
use serde_json::{Value, json};

use crate::{
    TaskView,
    webhooks::{NewWebhook, host_of},
};

/// Largest subject in a body, in bytes of JSON. A larger one is identified by its hash only; `GET /tasks/ID` returns it.
const MAX_SUBJECT_BYTES: usize = 16 << 10;

/// Returns a webhook for each receiver of an approval.
pub(crate) fn webhooks(
    id: TaskId,
    view: &TaskView,
    notice: &ApprovalNotice,
    now: Timestamp,
) -> impl Iterator<Item = NewWebhook> {
    let body = body(id, view, notice, now).to_string();
    let (event, correlation) = (notice.event, view.correlation.clone());
    notice.approval.webhooks.clone().into_iter().map(move |url| NewWebhook {
        id: WebhookId::new(),
        subject: WebhookSubject::Task(id),
        event: event.to_owned(),
        correlation: correlation.clone(),
        traceparent: None,
        host: host_of(&url),
        url,
        body: body.clone(),
        created_at: now,
    })
}

fn body(id: TaskId, view: &TaskView, notice: &ApprovalNotice, now: Timestamp) -> Value {
    let approval = &notice.approval;
    let approvals = approval.decisions.iter().filter(|decision| decision.approve).count();
    let mut about = json!({
        "hash": approval.hash,
        "quorum": approval.quorum,
        "approvals": approvals,
        "groups": approval.groups,
        "creatorMayDecide": notice.allows_creator,
        "since": approval.since,
        "expiresAt": notice.expires_at,
        "decisions": approval.decisions.iter().map(|decision| json!({
            "actor": decision.actor, "approve": decision.approve, "at": decision.at, "comment": decision.comment,
        })).collect::<Vec<Value>>(),
    });
    let bytes = approval.subject.to_string().len();
    match bytes <= MAX_SUBJECT_BYTES {
        true => about["subject"] = approval.subject.clone(),
        false => about["subjectBytes"] = json!(bytes),
    }
    let mut body = json!({
        "event": notice.event,
        "at": now,
        "taskId": id,
        "machine": view.machine,
        "version": view.version,
        "title": view.title,
        "state": notice.state,
        "correlationId": view.correlation,
        "createdBy": view.task.created_by,
        "approval": about,
    });
    if matches!(notice.event, "task.approval.requested" | "task.approval.reminder" | "task.approval.escalated") {
        body["decide"] = json!({
            "approve": format!("POST /api/v1/tasks/{id}/approve"),
            "reject": format!("POST /api/v1/tasks/{id}/reject"),
            "body": {"hash": approval.hash, "comment": ""},
            "command": format!("faena tasks approve {id} --hash {}", approval.hash),
        });
    }
    body
}
