//! `faena.v1.TaskService`.
//!
//! A request becomes a body or query of the HTTP API, so that the same rules apply to both.

use faena_machine::{Approval, Decision, Event, Outcome, Record, Status, Timer, TimerKind};
use faena_store::{MachineStatus, TaskAnswer};
use faena_wire::v1::{
    self, ApproveTaskRequest, ApproveTaskResponse, CancelTaskRequest, CancelTaskResponse, CreateTaskRequest,
    CreateTaskResponse, ExplainTaskRequest, ExplainTaskResponse, GetMachineRequest, GetMachineResponse, GetTaskRequest,
    GetTaskResponse, ListMachinesRequest, ListMachinesResponse, ListTaskHistoryRequest, ListTaskHistoryResponse,
    ListTasksRequest, ListTasksResponse, PauseTaskRequest, PauseTaskResponse, RegisterMachineRequest,
    RegisterMachineResponse, RejectTaskRequest, RejectTaskResponse, ResumeTaskRequest, ResumeTaskResponse,
    SendTaskEventRequest, SendTaskEventResponse, TaskWaitReason, task_service_server::TaskService,
};
use serde_json::{Value, json};
use tonic::{Request, Response};

use super::{
    GrpcResult,
    convert::{self, JsonBody, timestamp},
    query,
};
use crate::{
    Api,
    rest::{machines, task_views::TaskView, tasks},
};

pub struct Tasks(pub Api);

#[tonic::async_trait]
impl TaskService for Tasks {
    async fn register_machine(&self, request: Request<RegisterMachineRequest>) -> GrpcResult<RegisterMachineResponse> {
        let body = json!({"definition": request.into_inner().definition}).to_string();
        let (machine, existed) = machines::register_from(&self.0, body.as_bytes()).await?;
        let machines::RegisteredMachine { name, version, hash } = machine;
        Ok(Response::new(RegisterMachineResponse { name, version, hash, existed }))
    }

    async fn get_machine(&self, request: Request<GetMachineRequest>) -> GrpcResult<GetMachineResponse> {
        let GetMachineRequest { name, version } = request.into_inner();
        let query = query([("version", version.map(|version| version.to_string()))]);
        let shown = machines::shown(&self.0, &name, Some(&query)).await?;
        Ok(Response::new(GetMachineResponse {
            definition_json: shown.definition.to_string(),
            versions: shown.versions,
            machine: Some(v1::Machine {
                name: shown.name,
                version: shown.version,
                hash: shown.hash,
                created_at: Some(timestamp(shown.created_at)),
                created_by: shown.created_by,
            }),
        }))
    }

    async fn list_machines(&self, _: Request<ListMachinesRequest>) -> GrpcResult<ListMachinesResponse> {
        let machines = machines::find(&self.0).await?;
        Ok(Response::new(ListMachinesResponse { machines: machines.into_iter().map(machine_status).collect() }))
    }

    async fn create_task(&self, request: Request<CreateTaskRequest>) -> GrpcResult<CreateTaskResponse> {
        let request = request.into_inner();
        let mut body = JsonBody::default();
        body.put("machine", Some(request.machine));
        body.put("version", request.version);
        body.put("title", request.title);
        body.put("correlationId", request.correlation_id);
        let task = tasks::create_from(&self.0, body.into_text("data", &request.data_json).as_bytes()).await?;
        Ok(Response::new(CreateTaskResponse { task: Some(message(task)) }))
    }

    async fn get_task(&self, request: Request<GetTaskRequest>) -> GrpcResult<GetTaskResponse> {
        let task = tasks::shown(&self.0, &request.into_inner().id).await?;
        Ok(Response::new(GetTaskResponse { task: Some(message(task)) }))
    }

    async fn list_tasks(&self, request: Request<ListTasksRequest>) -> GrpcResult<ListTasksResponse> {
        let request = request.into_inner();
        let status = convert::task_status_name(request.status);
        let query = query([
            ("machine", request.machine),
            ("version", request.version.map(|version| version.to_string())),
            ("state", request.state),
            ("status", status.map(|status| status.as_str().map_or(status.to_string(), str::to_owned))),
            ("correlationId", request.correlation_id),
            ("approval", request.approval.then(|| "true".to_owned())),
            ("limit", request.page_size.map(|size| size.to_string())),
            ("cursor", Some(request.page_token)),
        ]);
        let (tasks, page_info) = tasks::find(&self.0, Some(&query)).await?;
        Ok(Response::new(ListTasksResponse {
            tasks: tasks.into_iter().map(message).collect(),
            total_size: page_info.total,
            next_page_token: page_info.next_cursor.unwrap_or_default(),
        }))
    }

    async fn list_task_history(&self, request: Request<ListTaskHistoryRequest>) -> GrpcResult<ListTaskHistoryResponse> {
        let ListTaskHistoryRequest { id, after, page_size } = request.into_inner();
        let query = query([("after", Some(after.to_string())), ("limit", page_size.map(|size| size.to_string()))]);
        let history = tasks::history_of(&self.0, &id, Some(&query)).await?;
        Ok(Response::new(ListTaskHistoryResponse { records: history.into_iter().map(record).collect() }))
    }

    async fn explain_task(&self, request: Request<ExplainTaskRequest>) -> GrpcResult<ExplainTaskResponse> {
        let why = tasks::explained(&self.0, &request.into_inner().id).await?;
        let reason = |reason: faena_machine::WaitReason| TaskWaitReason {
            code: reason.code.to_owned(),
            message: reason.message,
        };
        Ok(Response::new(ExplainTaskResponse {
            state: why.state,
            status: task_status(why.status),
            summary: why.summary,
            reasons: why.reasons.into_iter().map(reason).collect(),
        }))
    }

    async fn send_task_event(&self, request: Request<SendTaskEventRequest>) -> GrpcResult<SendTaskEventResponse> {
        let request = request.into_inner();
        let mut body = JsonBody::default();
        body.put("type", Some(request.r#type).filter(|kind| !kind.is_empty()));
        body.put("metadata", request.trace_id.map(|id| json!({ "traceId": id })));
        let body = body.into_text("payload", &request.payload_json);
        let answer = tasks::send_from(&self.0, &request.id, body.as_bytes()).await?;
        Ok(Response::new(SendTaskEventResponse { answer: Some(task_answer(answer)) }))
    }

    async fn approve_task(&self, request: Request<ApproveTaskRequest>) -> GrpcResult<ApproveTaskResponse> {
        let ApproveTaskRequest { id, hash, comment } = request.into_inner();
        let answer = tasks::decide_from(&self.0, &id, &texts([("hash", hash), ("comment", comment)]), true).await?;
        Ok(Response::new(ApproveTaskResponse { answer: Some(task_answer(answer)) }))
    }

    async fn reject_task(&self, request: Request<RejectTaskRequest>) -> GrpcResult<RejectTaskResponse> {
        let RejectTaskRequest { id, hash, comment } = request.into_inner();
        let answer = tasks::decide_from(&self.0, &id, &texts([("hash", hash), ("comment", comment)]), false).await?;
        Ok(Response::new(RejectTaskResponse { answer: Some(task_answer(answer)) }))
    }

    async fn cancel_task(&self, request: Request<CancelTaskRequest>) -> GrpcResult<CancelTaskResponse> {
        let CancelTaskRequest { id, reason } = request.into_inner();
        let answer = tasks::cancel_from(&self.0, &id, &texts([("reason", reason)])).await?;
        Ok(Response::new(CancelTaskResponse { answer: Some(task_answer(answer)) }))
    }

    async fn pause_task(&self, request: Request<PauseTaskRequest>) -> GrpcResult<PauseTaskResponse> {
        let answer = tasks::paused(&self.0, &request.into_inner().id).await?;
        Ok(Response::new(PauseTaskResponse { answer: Some(task_answer(answer)) }))
    }

    async fn resume_task(&self, request: Request<ResumeTaskRequest>) -> GrpcResult<ResumeTaskResponse> {
        let answer = tasks::resumed(&self.0, &request.into_inner().id).await?;
        Ok(Response::new(ResumeTaskResponse { answer: Some(task_answer(answer)) }))
    }
}

/// Returns the body of a request whose fields are texts.
fn texts<const N: usize>(fields: [(&str, Option<String>); N]) -> Vec<u8> {
    let mut body = JsonBody::default();
    for (name, text) in fields {
        body.put(name, text);
    }
    Value::Object(body.0).to_string().into_bytes()
}

/// Returns the name of a value of an enum, as JSON has it.
fn json_name(value: &impl serde::Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(Value::String(name)) => name,
        _ => String::new(),
    }
}

fn task_status(status: Status) -> i32 {
    convert::task_status(&json_name(&status))
}

fn task_outcome(outcome: Outcome) -> i32 {
    convert::task_outcome(&json_name(&outcome))
}

fn machine_status(status: MachineStatus) -> v1::MachineStatus {
    let count = |(name, count): (String, u64)| v1::TaskCount { status: convert::task_status(&name), count };
    v1::MachineStatus {
        machine: Some(v1::Machine {
            name: status.name,
            version: status.version,
            hash: status.hash,
            created_at: Some(timestamp(status.created_at)),
            created_by: status.created_by,
        }),
        tasks: status.tasks.into_iter().map(count).collect(),
    }
}

fn message(task: TaskView) -> v1::Task {
    let counter = |(name, count)| v1::TaskCounter { name, count };
    v1::Task {
        id: task.id,
        machine: task.machine,
        version: task.version,
        title: task.title,
        correlation_id: task.correlation_id,
        status: task_status(task.status),
        state: task.state,
        fault: task.fault,
        data_json: task.data.to_string(),
        counters: task.counters.into_iter().map(counter).collect(),
        timers: task.timers.into_iter().map(timer).collect(),
        approval: task.approval.map(approval),
        deferred: task.deferred.into_iter().map(deferred).collect(),
        epoch: task.epoch,
        transitions: task.transitions,
        created_at: Some(timestamp(task.created_at)),
        created_by: task.created_by,
        updated_at: Some(timestamp(task.updated_at)),
        ended_at: task.ended_at.map(timestamp),
        due_at: task.due_at.map(timestamp),
    }
}

fn timer(timer: Timer) -> v1::TaskTimer {
    let (kind, name) = match timer.kind {
        TimerKind::Silence => (v1::TaskTimerKind::Silence, String::new()),
        TimerKind::NoProgress => (v1::TaskTimerKind::NoProgress, String::new()),
        TimerKind::Total => (v1::TaskTimerKind::Total, String::new()),
        TimerKind::Lifetime => (v1::TaskTimerKind::Lifetime, String::new()),
        TimerKind::Poll => (v1::TaskTimerKind::Poll, String::new()),
        TimerKind::Named(name) => (v1::TaskTimerKind::Named, name),
        TimerKind::Remind => (v1::TaskTimerKind::Remind, String::new()),
        TimerKind::Escalate => (v1::TaskTimerKind::Escalate, String::new()),
        TimerKind::Expire => (v1::TaskTimerKind::Expire, String::new()),
    };
    v1::TaskTimer { kind: kind.into(), name, state: timer.state, due_at: Some(timestamp(timer.due)) }
}

fn approval(approval: Approval) -> v1::TaskApproval {
    let decision = |decision: Decision| v1::TaskDecision {
        actor: decision.actor,
        caller: decision.caller,
        approve: decision.approve,
        decided_at: Some(timestamp(decision.at)),
        comment: decision.comment,
    };
    v1::TaskApproval {
        state: approval.state,
        since: Some(timestamp(approval.since)),
        hash: approval.hash,
        subject_json: approval.subject.to_string(),
        quorum: approval.quorum,
        groups: approval.groups,
        decisions: approval.decisions.into_iter().map(decision).collect(),
    }
}

fn deferred(event: Event) -> v1::DeferredTaskEvent {
    v1::DeferredTaskEvent {
        id: event.id,
        r#type: event.kind,
        payload_json: event.payload.to_string(),
        actor: event.actor,
        received_at: Some(timestamp(event.at)),
    }
}

fn record(record: Record) -> v1::TaskRecord {
    v1::TaskRecord {
        sequence: record.sequence,
        recorded_at: Some(timestamp(record.at)),
        event: record.event,
        event_id: record.event_id,
        actor: record.actor,
        outcome: task_outcome(record.outcome),
        from: record.from,
        to: record.to,
        actions: record.actions,
        reason: record.reason,
    }
}

fn task_answer(answer: TaskAnswer) -> v1::TaskAnswer {
    v1::TaskAnswer {
        outcome: task_outcome(answer.outcome),
        state: answer.state,
        reason: answer.reason,
        duplicate: answer.duplicate,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_and_outcome_of_a_task_has_a_value_in_the_protocol() {
        for status in [Status::Running, Status::Paused, Status::Completed, Status::Failed, Status::Cancelled] {
            assert_ne!(task_status(status), 0, "{status:?}");
            assert_eq!(convert::task_status_name(task_status(status)), Some(json!(status)));
        }
        // The others are errors: they change nothing, so no record has them.
        for outcome in [Outcome::Applied, Outcome::Deferred, Outcome::Ignored, Outcome::Stale] {
            assert_ne!(task_outcome(outcome), 0, "{outcome:?}");
        }
    }
}
