//! Explains what a task waits for.

use faena_domain::Timestamp;
use schemars::JsonSchema;
use serde::Serialize;

use super::Run;
use crate::{
    definition::Definition,
    task::{Status, Task, TimerKind},
};

/// One thing that a task waits for, or that keeps it from moving.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct WaitReason {
    /// `event`, `approval`, `timer`, `deferred`, `queued`, `paused` or `ended`.
    pub code: &'static str,
    pub message: String,
}

/// Returns everything that a task waits for: events, decisions, timers, and why deferred events do not apply.
pub fn why(definition: &Definition, task: &Task, now: Timestamp) -> Vec<WaitReason> {
    let reason = |code, message| WaitReason { code, message };
    if task.status.has_ended() {
        let fault = task.fault.as_ref().map(|fault| format!(": {fault}")).unwrap_or_default();
        return vec![reason("ended", format!("it has ended in {}{fault}", task.state()))];
    }
    let mut reasons = Vec::new();
    if task.status == Status::Queued {
        let message = format!("it starts when fewer tasks of {} run than its limit allows", definition.machine);
        reasons.push(reason("queued", message));
        for event in &task.deferred {
            let message = format!("{} from {} is deferred: the task is queued", event.kind, event.actor);
            reasons.push(reason("deferred", message));
        }
        return reasons;
    }
    if task.status == Status::Paused {
        reasons.push(reason("paused", "it is paused; resume it".to_owned()));
    }
    if let Some(approval) = &task.approval {
        let given = approval.decisions.iter().filter(|decision| decision.approve).count();
        let who = match approval.groups.is_empty() {
            true => "a person".to_owned(),
            false => approval.groups.join(" or "),
        };
        let message = format!("it waits for {who} to approve {}: {given} of {}", approval.hash, approval.quorum);
        reasons.push(reason("approval", message));
    }
    let events = awaited_events(definition, task);
    if !events.is_empty() {
        reasons.push(reason("event", format!("it waits for {}", events.join(", "))));
    }
    let mut timers: Vec<_> = task.timers.iter().collect();
    timers.sort_by_key(|timer| timer.due);
    for timer in timers {
        reasons.push(reason("timer", format!("{} at {}", describe(&timer.kind), timer.due)));
    }
    let run = Run::new(definition, task, now);
    for event in &task.deferred {
        let rejections = run.rejections(event).join("; ");
        reasons.push(reason("deferred", format!("{} from {} is deferred: {rejections}", event.kind, event.actor)));
    }
    reasons
}

fn awaited_events(definition: &Definition, task: &Task) -> Vec<String> {
    let states = task.active.iter().rev().filter_map(|active| definition.state(&active.state));
    let names = states.flat_map(|index| definition.states[index].on.iter().map(|(event, _)| event.clone()));
    let mut events: Vec<String> = Vec::new();
    for name in names {
        if !events.contains(&name) {
            events.push(name);
        }
    }
    events
}

fn describe(kind: &TimerKind) -> String {
    match kind {
        TimerKind::Silence => "its silence deadline passes".into(),
        TimerKind::NoProgress => "its no-progress deadline passes".into(),
        TimerKind::Total => "its total deadline in this state passes".into(),
        TimerKind::Lifetime => "its lifetime ends".into(),
        TimerKind::Poll => "it asks the service for its status".into(),
        TimerKind::Named(name) => format!("timer {name} fires"),
        TimerKind::Remind => "a reminder is sent".into(),
        TimerKind::Escalate => "the approval is escalated".into(),
        TimerKind::Expire => "the approval expires".into(),
    }
}
