//! Approvals: who may decide, how many must, and about what exactly.

use serde_json::json;
use sha2::{Digest, Sha256};

use super::{Answer, Run};
use crate::{
    definition::StateIndex,
    parse::canonical,
    task::{Approval, Caller, Decision, Event, Outcome},
};

impl Run<'_> {
    /// Opens the approval of a state that was entered now.
    pub(super) fn open_approval(&mut self, event: &Event, index: StateIndex) -> Result<(), String> {
        let state = &self.definition.states[index];
        let Some(rule) = &state.approval else { return Ok(()) };
        let subject = rule.subject.evaluate(&self.variables(event))?;
        let digest = Sha256::digest(canonical(&subject).as_bytes());
        let approval = Approval {
            state: state.name.clone(),
            epoch: self.task.epoch,
            since: self.now,
            hash: digest.iter().map(|byte| format!("{byte:02x}")).collect(),
            subject,
            quorum: rule.quorum,
            groups: rule.groups.clone(),
            decisions: Vec::new(),
        };
        self.notice("approval.requested", json!({"approval": approval}));
        self.task.approval = Some(approval);
        Ok(())
    }

    /// Counts a decision. The last one that is needed becomes the event `approval.granted` or `approval.denied`.
    pub(super) fn decide(
        &mut self,
        caller: &Caller,
        approve: bool,
        hash: Option<&str>,
        comment: Option<String>,
    ) -> Result<Answer, String> {
        let refuse = |reason: String| Ok((Outcome::Rejected, Some(reason)));
        let forbid = |reason: String| Ok((Outcome::Forbidden, Some(reason)));
        let Some(approval) = &self.task.approval else { return refuse("no approval is open".into()) };
        if self.task.paused_at.is_some() {
            return refuse("the task is paused".into());
        }
        if let Some(hash) = hash.filter(|hash| *hash != approval.hash) {
            return refuse(format!("the approval is about {}, not {hash}", approval.hash));
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
                false => refuse(format!("{} has decided already, and differently", caller.actor)),
            };
        }
        self.count(caller, approve, comment);
        Ok((Outcome::Applied, None))
    }

    fn count(&mut self, caller: &Caller, approve: bool, comment: Option<String>) {
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
            true => format!("approved: {approvals} of {}", approval.quorum),
            false => "denied".to_owned(),
        };
        self.record(&self.own_event("approval.decided", actor), Outcome::Applied, None, Vec::new(), Some(reason));
        self.task.last_seen = self.task.last_seen.max(self.now);
        if is_granted || !approve {
            let kind = if approve { "approval.granted" } else { "approval.denied" };
            self.created.push(Event { payload, ..self.own_event(kind, actor) });
        }
    }
}
