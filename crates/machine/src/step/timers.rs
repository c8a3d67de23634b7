//! Deadlines, polls and timers.

use faena_domain::Timestamp;
use serde_json::json;

use super::{Run, approval::published};
use crate::{
    definition::{State, StateIndex},
    task::{Effect, Outcome, Status, Timer, TimerKind},
};

/// Actor of the changes that Faena itself makes to a task.
const ACTOR: &str = "system:tasks";

impl Run<'_> {
    /// Starts the timers of a state that the task has just entered.
    pub(super) fn start_timers(&mut self, index: StateIndex) {
        let state = &self.definition.states[index];
        let mut start = |kind: TimerKind, after_ms: i64| {
            self.task.timers.push(Timer { kind, state: state.name.clone(), due: self.now.plus_ms(after_ms) });
        };
        if let Some(deadline) = &state.deadline {
            let limits = [
                (TimerKind::Silence, deadline.silence_ms),
                (TimerKind::NoProgress, deadline.no_progress_ms),
                (TimerKind::Total, deadline.total_ms),
            ];
            for (kind, limit) in limits {
                limit.into_iter().for_each(|limit| start(kind.clone(), limit));
            }
        }
        if let Some(poll) = &state.poll {
            start(TimerKind::Poll, poll.every_ms);
        }
        for timer in &state.timers {
            start(TimerKind::Named(timer.name.clone()), timer.after_ms);
        }
        if let Some(approval) = &state.approval {
            approval.remind_ms.iter().for_each(|after| start(TimerKind::Remind, *after));
            approval.escalate.iter().for_each(|escalate| start(TimerKind::Escalate, escalate.after_ms));
            approval.expires.iter().for_each(|expiry| start(TimerKind::Expire, expiry.after_ms));
        }
    }

    /// Handles every timer that is due, the earliest first.
    pub(super) fn fire_timers(&mut self) -> Result<(), String> {
        while self.task.status == Status::Running {
            let timers = self.task.timers.iter().enumerate().filter(|(_, timer)| timer.due <= self.now);
            let Some((position, _)) = timers.min_by_key(|(_, timer)| timer.due) else { return Ok(()) };
            let timer = self.task.timers.remove(position);
            self.fire(timer)?;
            self.settle()?;
        }
        Ok(())
    }

    fn fire(&mut self, timer: Timer) -> Result<(), String> {
        if timer.kind == TimerKind::Lifetime {
            let event = self.faena_event("deadline.lifetime", ACTOR);
            return self
                .limit_exceeded(&event, format!("{} s of lifetime", self.definition.limits.lifetime_ms / 1_000));
        }
        let index = self.state_index(&timer.state)?;
        let state = &self.definition.states[index];
        match &timer.kind {
            TimerKind::Silence | TimerKind::NoProgress | TimerKind::Total => self.deadline(timer, index, state),
            TimerKind::Poll => self.poll(timer, state),
            TimerKind::Named(name) => {
                let event = self.faena_event(&format!("timer.{name}"), ACTOR);
                if let Some(rule) = state.timers.iter().find(|rule| rule.name == *name && rule.repeats) {
                    let due = next_after(timer.due, rule.after_ms, self.now);
                    self.task.timers.push(Timer { due, ..timer });
                }
                self.offer(&event).map(|_| ())
            }
            TimerKind::Remind => {
                let approval = self.task.approval.as_ref().map(published);
                self.notice("approval.reminder", json!({"approval": approval}));
                self.notify_receivers("task.approval.reminder");
                Ok(())
            }
            TimerKind::Escalate => {
                self.escalate(state);
                Ok(())
            }
            TimerKind::Expire => {
                let expiry = state.approval.as_ref().and_then(|approval| approval.expires.as_ref());
                let Some(target) = expiry.map(|expiry| expiry.to) else { return Ok(()) };
                let event = self.faena_event("approval.expired", ACTOR);
                self.notice("approval.expired", json!({}));
                self.notify_end("task.approval.expired");
                self.go_to(&event, Some(index), target, Vec::new(), Some("no decision in time".into()))
            }
            TimerKind::Lifetime => Ok(()),
        }
    }

    /// Moves the deadline if a message or progress arrived since the timer was set; otherwise leaves the state.
    fn deadline(&mut self, timer: Timer, index: StateIndex, state: &State) -> Result<(), String> {
        let Some(deadline) = &state.deadline else { return Ok(()) };
        let entered_at = self.task.active.iter().find(|active| active.state == state.name).map(|active| active.since);
        let (name, limit, counted_from) = match timer.kind {
            TimerKind::Silence => ("silence", deadline.silence_ms, Some(self.task.last_seen)),
            TimerKind::NoProgress => ("no_progress", deadline.no_progress_ms, Some(self.task.progress_at)),
            _ => ("total", deadline.total_ms, None),
        };
        let (Some(limit), Some(entered_at)) = (limit, entered_at) else { return Ok(()) };
        if let Some(from) = counted_from {
            let due = from.max(entered_at).plus_ms(limit);
            if due > self.now {
                self.task.timers.push(Timer { due, ..timer });
                return Ok(());
            }
        }
        let event = self.faena_event(&format!("deadline.{name}"), ACTOR);
        let reason = match name {
            "silence" => format!("no message for {}", seconds(limit)),
            "no_progress" => format!("no progress for {}", seconds(limit)),
            _ => format!("not finished within {}", seconds(limit)),
        };
        self.notice("task.deadline_missed", json!({"deadline": name, "reason": reason}));
        self.go_to(&event, Some(index), deadline.to, Vec::new(), Some(reason))
    }

    fn poll(&mut self, timer: Timer, state: &State) -> Result<(), String> {
        let Some(poll) = &state.poll else { return Ok(()) };
        let event = self.faena_event("timer.poll", ACTOR);
        let payload = poll.data.evaluate(&self.variables(&event))?;
        self.effects.push(Effect::Emit { event: poll.event.clone(), payload });
        let due = next_after(timer.due, poll.every_ms, self.now);
        self.task.timers.push(Timer { due, ..timer });
        Ok(())
    }

    fn escalate(&mut self, state: &State) {
        let escalation = state.approval.as_ref().and_then(|approval| approval.escalate.as_ref());
        let (Some(escalation), Some(approval)) = (escalation, &mut self.task.approval) else { return };
        // An approval that everyone may decide stays open to everyone.
        if !approval.groups.is_empty() {
            approval.groups.extend(escalation.groups.iter().cloned());
        }
        let event = self.faena_event("approval.escalated", ACTOR);
        self.record(&event, Outcome::Applied, None, Vec::new(), Some(format!("to {}", escalation.groups.join(", "))));
        let approval = self.task.approval.as_ref().map(published);
        self.notice("approval.escalated", json!({"approval": approval, "groups": escalation.groups}));
        self.notify_receivers("task.approval.escalated");
    }
}

/// Returns the next time of a repeated timer after `now`. Skips times that have passed.
fn next_after(due: Timestamp, every_ms: i64, now: Timestamp) -> Timestamp {
    let missed = now.ms_since(due).max(0) / every_ms;
    due.plus_ms((missed + 1).saturating_mul(every_ms))
}

fn seconds(ms: i64) -> String {
    if ms % 1_000 == 0 { format!("{} s", ms / 1_000) } else { format!("{ms} ms") }
}
