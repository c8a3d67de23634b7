//! Checks a stored task against its definition. `faena doctor` uses it to check that no task is stuck.

use faena_domain::Timestamp;

use crate::{
    definition::{Definition, State},
    task::{Status, Task, Timer, TimerKind},
};

/// Returns the contradictions within a task, or between it and its definition. Missing timers are not among them; [`with_timers`]
/// adds those.
pub fn contradictions(definition: &Definition, task: &Task) -> Vec<String> {
    let mut contradictions = path_contradictions(definition, task);
    let epochs: Vec<u64> = task.active.iter().map(|active| active.epoch).collect();
    if epochs.windows(2).any(|pair| pair[0] >= pair[1]) || epochs.last().is_some_and(|last| *last != task.epoch) {
        contradictions.push(format!("its states have the epochs {epochs:?}, and it has {}", task.epoch));
    }
    if task.status.has_ended() != task.ended_at.is_some() {
        contradictions.push("its status contradicts its end".to_owned());
    }
    if (task.status == Status::Paused) != task.paused_at.is_some() {
        contradictions.push("its status contradicts its pause".to_owned());
    }
    if task.status.has_ended() && (!task.timers.is_empty() || task.approval.is_some()) {
        contradictions.push("it has ended with a timer or an open approval".to_owned());
    }
    if let Some(approval) = &task.approval
        && !task.is_active(&approval.state, approval.epoch)
    {
        contradictions.push(format!("its approval belongs to an earlier stay in {}", approval.state));
    }
    contradictions
}

/// Checks that the active states lead from a top-level state to an innermost one.
fn path_contradictions(definition: &Definition, task: &Task) -> Vec<String> {
    let mut parent = None;
    for active in &task.active {
        match definition.state(&active.state) {
            None => return vec![format!("its machine has no state {}", active.state)],
            Some(index) if definition.states[index].parent != parent => {
                return vec![format!("{} is not a path of its machine", task.state())];
            }
            found => parent = found,
        }
    }
    // A task that was cancelled before it started has ended in no state.
    let is_in_no_state = task.status == Status::Queued || (task.status.has_ended() && task.epoch == 0);
    let innermost = parent.map(|index| &definition.states[index]);
    match innermost {
        None if is_in_no_state => Vec::new(),
        None => vec!["it is in no state".to_owned()],
        Some(_) if task.status == Status::Queued => vec!["it is queued and in a state".to_owned()],
        Some(state) if state.initial.is_some() => vec![format!("it is in no state inside {}", state.name)],
        Some(state) if state.ends.is_some() && !task.status.has_ended() => {
            vec![format!("it is in the final state {} and has not ended", state.name)]
        }
        Some(_) => Vec::new(),
    }
}

/// Returns the task with exactly the timers that its states need, or `None` if it has them.
///
/// A task that has not ended always has the timer of its lifetime, and those of the deadlines, polls, repeated timers and open
/// approvals of its states: without one of them it could wait forever. Limits that are added are due as if they had been there all
/// along; polls and repeated timers begin now.
pub fn with_timers(definition: &Definition, task: &Task, now: Timestamp) -> Option<Task> {
    if task.status.has_ended() {
        return None;
    }
    let is_active = |name: &str| task.active.iter().any(|active| active.state == name);
    let (kept, stale): (Vec<Timer>, Vec<Timer>) =
        task.timers.iter().cloned().partition(|timer| timer.state.is_empty() || is_active(&timer.state));
    let mut timers = kept;
    let known = timers.len();
    for timer in needed_timers(definition, task, now) {
        if !timers.iter().any(|one| one.kind == timer.kind && one.state == timer.state) {
            timers.push(timer);
        }
    }
    let is_right = stale.is_empty() && timers.len() == known;
    (!is_right).then(|| Task { timers, ..task.clone() })
}

fn needed_timers(definition: &Definition, task: &Task, now: Timestamp) -> Vec<Timer> {
    let lifetime = task.started_at.unwrap_or(task.created_at).plus_ms(definition.limits.lifetime_ms);
    let mut timers = vec![Timer { kind: TimerKind::Lifetime, state: String::new(), due: lifetime }];
    for active in &task.active {
        let Some(index) = definition.state(&active.state) else { continue };
        let state = &definition.states[index];
        let is_open = task.approval.as_ref().is_some_and(|approval| approval.state == state.name);
        let needed = needed_by(state, task, active.since, is_open, now);
        timers.extend(needed.into_iter().map(|(kind, due)| Timer { kind, state: state.name.clone(), due }));
    }
    timers
}

fn needed_by(
    state: &State,
    task: &Task,
    since: Timestamp,
    has_open_approval: bool,
    now: Timestamp,
) -> Vec<(TimerKind, Timestamp)> {
    let mut needed = Vec::new();
    if let Some(deadline) = &state.deadline {
        let limits = [
            (TimerKind::Silence, deadline.silence_ms, task.last_seen.max(since)),
            (TimerKind::NoProgress, deadline.no_progress_ms, task.progress_at.max(since)),
            (TimerKind::Total, deadline.total_ms, since),
        ];
        needed.extend(limits.into_iter().filter_map(|(kind, limit, from)| Some((kind, from.plus_ms(limit?)))));
    }
    needed.extend(state.poll.iter().map(|poll| (TimerKind::Poll, now.plus_ms(poll.every_ms))));
    let repeated = state.timers.iter().filter(|timer| timer.repeats);
    needed.extend(repeated.map(|timer| (TimerKind::Named(timer.name.clone()), now.plus_ms(timer.after_ms))));
    let expiry = state.approval.as_ref().and_then(|approval| approval.expires.as_ref()).filter(|_| has_open_approval);
    needed.extend(expiry.map(|expiry| (TimerKind::Expire, since.plus_ms(expiry.after_ms))));
    needed
}
