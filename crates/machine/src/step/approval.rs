//! Approvals: who may decide, how many must, and about what exactly.

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::{Answer, Run};
use faena_domain::LogDetails;

use crate::{
    definition::{ApprovalRule, MAX_RECEIVERS, StateIndex},
    expression::Variables,
    parse::canonical,
    task::{Approval, ApprovalNotice, Caller, Decision, Effect, Event, Outcome, Timer, TimerKind},
};

/// Longest URL of a receiver, in bytes.
const MAX_URL_BYTES: usize = 2_048;

/// Returns the receivers of webhooks about an approval, each once.
fn receivers(rule: &ApprovalRule, variables: &Variables) -> Result<Vec<String>, String> {
    let mut urls: Vec<String> = Vec::new();
    for template in &rule.webhooks {
        let given = match template.evaluate(variables)? {
            Value::Array(items) => items,
            Value::Null => Vec::new(),
            other => vec![other],
        };
        for url in given {
            match url {
                Value::String(url) if !url.is_empty() && url.len() <= MAX_URL_BYTES => {
                    if !urls.contains(&url) {
                        urls.push(url);
                    }
                }
                Value::String(url) if url.is_empty() => {}
                Value::String(_) => {
                    return Err(format!("the URL of a webhook has more than {MAX_URL_BYTES} bytes"));
                }
                other => return Err(format!("a receiver of webhooks is {other}, not a URL")),
            }
        }
    }
    if urls.len() > MAX_RECEIVERS {
        return Err(format!("an approval has {} receivers of webhooks; the limit is {MAX_RECEIVERS}", urls.len()));
    }
    Ok(urls)
}

/// Returns what is published about an approval: everything but the URLs of its receivers, which may contain secrets.
pub(super) fn published(approval: &Approval) -> Value {
    json!(Approval { webhooks: Vec::new(), ..approval.clone() })
}

impl Run<'_> {
    /// Opens the approval of a state that the task has just entered.
    pub(super) fn open_approval(&mut self, event: &Event, index: StateIndex) -> Result<(), String> {
        let state = &self.definition.states[index];
        let Some(rule) = &state.approval else { return Ok(()) };
        let subject = rule.subject.evaluate(&self.variables(event))?;
        let digest = Sha256::digest(canonical(&subject).as_bytes());
        let webhooks = receivers(rule, &self.variables(event))?;
        let approval = Approval {
            state: state.name.clone(),
            epoch: self.task.epoch,
            since: self.now,
            hash: digest.iter().map(|byte| format!("{byte:02x}")).collect(),
            subject,
            quorum: rule.quorum,
            groups: rule.groups.clone(),
            decisions: Vec::new(),
            webhooks,
        };
        self.notice("approval.requested", json!({"approval": published(&approval)}));
        self.task.approval = Some(approval);
        self.notify_receivers("task.approval.requested");
        Ok(())
    }

    /// Notifies the receivers of the open approval that it has changed.
    pub(super) fn notify_receivers(&mut self, event: &'static str) {
        let Some(approval) = self.task.approval.as_ref().filter(|approval| !approval.webhooks.is_empty()) else {
            return;
        };
        let rule =
            self.definition.state(&approval.state).and_then(|index| self.definition.states[index].approval.as_ref());
        let is_expiry = |timer: &&Timer| timer.kind == TimerKind::Expire && timer.state == approval.state;
        self.effects.push(Effect::Webhook(ApprovalNotice {
            event,
            approval: approval.clone(),
            state: self.task.state(),
            allows_creator: rule.is_some_and(|rule| rule.allow_creator),
            expires_at: self.task.timers.iter().find(is_expiry).map(|timer| timer.due),
        }));
    }

    /// Notifies the receivers how the approval ended. They get no further notices.
    pub(super) fn notify_end(&mut self, event: &'static str) {
        self.notify_receivers(event);
        if let Some(approval) = &mut self.task.approval {
            approval.webhooks.clear();
        }
    }

    /// Closes the approval. Notifies receivers that wait for its end that there will be no decision.
    pub(super) fn close_approval(&mut self) {
        self.notify_end("task.approval.withdrawn");
        self.task.approval = None;
    }

    /// Counts a decision. The last one that is needed becomes the event `approval.granted` or `approval.denied`.
    pub(super) fn decide(
        &mut self,
        caller: &Caller,
        approve: bool,
        hash: Option<&str>,
        comment: Option<String>,
    ) -> Result<Answer, String> {
        let reject = |reason: String| Ok((Outcome::Rejected, Some(reason)));
        let forbid = |reason: String| Ok((Outcome::Forbidden, Some(reason)));
        let Some(approval) = &self.task.approval else { return reject("no approval is open".into()) };
        if self.task.paused_at.is_some() {
            return reject("the task is paused".into());
        }
        if let Some(hash) = hash.filter(|hash| *hash != approval.hash) {
            return reject(format!("the approval is about {}, not {hash}", approval.hash));
        }
        let rule = self.definition.states[self.state_index(&approval.state)?].approval.as_ref();
        if caller.identity == self.task.creator && !rule.is_some_and(|rule| rule.allow_creator) {
            return forbid("the creator of a task cannot decide about it; another caller must".into());
        }
        if !approval.groups.is_empty() && !caller.groups.iter().any(|group| approval.groups.contains(group)) {
            return forbid(format!("only {} may decide", approval.groups.join(", ")));
        }
        let earlier = approval.decisions.iter().find(|decision| decision.caller == caller.identity);
        if let Some(earlier) = earlier {
            return match earlier.approve == approve {
                true => Ok((Outcome::Ignored, Some(format!("{} has decided this already", caller.actor)))),
                false => reject(format!("{} has decided already, and differently", caller.actor)),
            };
        }
        self.record_decision(caller, approve, comment);
        Ok((Outcome::Applied, None))
    }

    fn record_decision(&mut self, caller: &Caller, approve: bool, comment: Option<String>) {
        let Some(approval) = &mut self.task.approval else { return };
        let Caller { actor, identity, .. } = caller.clone();
        let (at, comment) = (self.now, comment.clone());
        approval.decisions.push(Decision {
            actor: actor.clone(),
            caller: identity,
            approve,
            at,
            comment: comment.clone(),
        });
        let actor = actor.as_str();
        let approvals = approval.decisions.iter().filter(|decision| decision.approve).count();
        let is_granted = approvals >= usize::try_from(approval.quorum).unwrap_or(usize::MAX);
        let payload = json!({"decisions": approval.decisions, "hash": approval.hash, "comment": comment});
        let reason = match approve {
            true => LogDetails::Approvals { given: approvals as u64, needed: approval.quorum.into() }.to_string(),
            false => "denied".to_owned(),
        };
        self.record(&self.faena_event("approval.decided", actor), Outcome::Applied, None, Vec::new(), Some(reason));
        self.task.last_seen = self.task.last_seen.max(self.now);
        if is_granted || !approve {
            let kind = if approve { "approval.granted" } else { "approval.denied" };
            self.created.push(Event { payload, ..self.faena_event(kind, actor) });
            self.notify_end(if approve { "task.approval.granted" } else { "task.approval.denied" });
        }
    }
}
