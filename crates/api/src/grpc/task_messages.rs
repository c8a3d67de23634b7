//! Converts tasks and machines into protobuf messages.

use std::collections::BTreeMap;

use faena_machine::{Active, Approval, Decision, Event, Finding, Origin, Outcome, Record, Status, Timer, TimerKind};
use faena_store::{MachineStatus, TaskAnswer};
use faena_wire::v1;
use serde_json::Value;

use super::convert::{self, timestamp};
use crate::rest::{
    task_bulk::{MigratedState, MigrationResponse, Refusal, Started, TaskBulkResponse, TaskExample},
    task_views::TaskView,
};

pub fn task_status(status: Status) -> i32 {
    convert::task_status(status.as_str())
}

fn task_outcome(outcome: Outcome) -> i32 {
    convert::task_outcome(outcome.as_str())
}

pub fn machine_status(status: MachineStatus) -> v1::MachineStatus {
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

pub fn message(task: TaskView) -> v1::Task {
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
        counters: counters(task.counters),
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
        tags: task.tags,
        forked_from: task.forked_from.map(origin),
        active: task.active.into_iter().map(active).collect(),
        progress_json: Some(task.progress).filter(|progress| !progress.is_null()).map(|progress| progress.to_string()),
    }
}

fn counters(counters: BTreeMap<String, u32>) -> Vec<v1::TaskCounter> {
    counters.into_iter().map(|(name, count)| v1::TaskCounter { name, count }).collect()
}

fn origin(origin: Origin) -> v1::TaskOrigin {
    v1::TaskOrigin { task_id: origin.task_id, record: origin.record }
}

fn active(active: Active) -> v1::ActiveTaskState {
    v1::ActiveTaskState { state: active.state, epoch: active.epoch, since: Some(timestamp(active.since)) }
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
        epoch: approval.epoch,
        webhooks: approval.webhooks,
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

pub fn record(record: Record) -> v1::TaskRecord {
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
        set_json: if record.set.is_empty() { String::new() } else { Value::Object(record.set).to_string() },
        counters: record.counters.map(counters).unwrap_or_default(),
        version: record.version,
    }
}

pub fn task_answer(answer: TaskAnswer) -> v1::TaskAnswer {
    v1::TaskAnswer {
        outcome: task_outcome(answer.outcome),
        state: answer.state,
        reason: answer.reason,
        duplicate: answer.duplicate,
    }
}

pub fn finding(finding: Finding) -> v1::MachineFinding {
    let number = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
    v1::MachineFinding {
        path: finding.path,
        line: number(finding.position.line),
        column: number(finding.position.column),
        message: finding.message,
    }
}

pub fn bulk_result(started: Started<TaskBulkResponse>) -> v1::TaskBulkResult {
    let response = started.response;
    v1::TaskBulkResult {
        id: response.id.map(|id| id.to_string()),
        dry_run: response.dry_run,
        matched: response.matched,
        matched_is_exact: response.matched_is_exact,
        per_second: response.per_second,
        done: response.done,
        skipped: response.skipped,
        sample: response.sample.into_iter().map(example).collect(),
        in_background: started.in_background.is_some(),
    }
}

fn example(task: TaskExample) -> v1::TaskExample {
    v1::TaskExample {
        id: task.id,
        machine: task.machine,
        version: task.version,
        state: task.state,
        status: task_status(task.status),
        title: task.title,
    }
}

pub fn migration(started: Started<MigrationResponse>) -> v1::MigrateTasksResponse {
    let response = started.response;
    let state = |state: MigratedState| v1::MigratedState {
        state: state.state,
        tasks: state.tasks,
        to: state.to,
        reason: state.reason,
    };
    let refusal =
        |refusal: Refusal| v1::MigrationRefusal { id: refusal.id, state: refusal.state, reason: refusal.reason };
    v1::MigrateTasksResponse {
        id: response.id.map(|id| id.to_string()),
        dry_run: response.dry_run,
        from_version: response.from,
        to_version: response.to,
        matched: response.matched,
        per_second: response.per_second,
        states: response.states.into_iter().map(state).collect(),
        tried: response.tried,
        refused: response.refused,
        refusals: response.refusals.into_iter().map(refusal).collect(),
        done: response.done,
        skipped: response.skipped,
        in_background: started.in_background.is_some(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_status_and_outcome_of_a_task_has_a_value_in_the_protocol() {
        for status in Status::ALL {
            assert_ne!(task_status(status), 0, "{status:?}");
            assert_eq!(convert::task_status_name(task_status(status)), Some(json!(status)));
        }
        // The others are errors: they change nothing, so no record has them.
        for outcome in [Outcome::Applied, Outcome::Deferred, Outcome::Ignored, Outcome::Stale] {
            assert_ne!(task_outcome(outcome), 0, "{outcome:?}");
        }
    }
}
