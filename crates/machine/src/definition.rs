//! The definition of a machine, as it is after parsing: states by index, durations in milliseconds, compiled expressions.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    expression::{Expression, Template},
    node::Position,
};

/// Position of a state in [`Definition::states`].
pub type StateIndex = usize;

/// A machine: immutable, and known by its name, version and hash.
#[derive(Debug)]
pub struct Definition {
    pub machine: String,
    pub version: u32,
    pub title: Option<String>,
    pub description: Option<String>,
    /// JSON Schema of the data that a new task starts with.
    pub input: Option<Schema>,
    /// The event that a new task receives first, with its data as payload.
    pub start: Option<String>,
    /// The state that a cancelled task moves to. Without one it ends where it is.
    pub cancel: Option<StateIndex>,
    pub events: BTreeMap<String, EventType>,
    pub unexpected: Unexpected,
    pub limits: Limits,
    pub counters: BTreeMap<String, Counter>,
    pub initial: StateIndex,
    /// A state comes before the states inside it.
    pub states: Vec<State>,
    /// SHA-256 of the definition as canonical JSON, in hexadecimal.
    pub hash: String,
    /// The definition as JSON, as it was written.
    pub source: Value,
}

/// A compiled JSON Schema.
pub struct Schema {
    pub source: Value,
    pub validator: jsonschema::Validator,
}

impl std::fmt::Debug for Schema {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Schema({})", self.source)
    }
}

#[derive(Debug, Default)]
pub struct EventType {
    pub description: Option<String>,
    /// JSON Schema of the payload.
    pub schema: Option<Schema>,
    /// If no state handles it, the event only shows that the sender is alive.
    pub heartbeat: bool,
    /// Value of the event that has to change to count as progress.
    pub progress: Option<Expression>,
    pub unexpected: Option<Unexpected>,
}

/// What happens to an event that no active state handles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Unexpected {
    /// Kept, and offered again after each transition.
    #[default]
    Defer,
    /// Recorded, without effect.
    Ignore,
    /// Rejected: the sender gets an error.
    Reject,
}

#[derive(Debug)]
pub struct Limits {
    /// Number of transitions in the life of a task.
    pub transitions: u32,
    /// Age of a task in milliseconds.
    pub lifetime_ms: i64,
    /// Bytes of a task's data as JSON.
    pub context: usize,
    /// The state that a task moves to when it exceeds one of these limits. Without one it ends where it is.
    pub to: Option<StateIndex>,
    /// Tasks of the machine that run concurrently. Further ones are queued.
    pub running: Option<u32>,
    /// Tokens of language models that one task may use in its life.
    pub llm_tokens: Option<u32>,
}

/// Largest limit of running tasks of a machine. Before a task starts, the running tasks are counted up to this number.
pub const MAX_RUNNING: u32 = 10_000;

#[derive(Debug)]
pub struct Counter {
    pub position: Position,
    pub max: u32,
    /// The state that a task moves to instead of counting beyond `max`.
    pub exceeded: Option<StateIndex>,
}

#[derive(Debug, Default)]
pub struct State {
    pub name: String,
    pub position: Position,
    pub title: Option<String>,
    pub description: Option<String>,
    pub parent: Option<StateIndex>,
    /// The inner state that is entered with this one.
    pub initial: Option<StateIndex>,
    /// Set if the task ends here.
    pub ends: Option<Ending>,
    /// The state may last without a limit.
    pub forever: bool,
    pub entry: Vec<Action>,
    pub exit: Vec<Action>,
    /// Transitions by event, in the order of the definition.
    pub on: Vec<(String, Vec<Transition>)>,
    pub deadline: Option<Deadline>,
    pub poll: Option<Poll>,
    pub approval: Option<ApprovalRule>,
    pub timers: Vec<TimerRule>,
    /// Policy for every event that this state does not handle.
    pub unexpected: Option<Unexpected>,
    /// Policies for single events, which take precedence.
    pub unexpected_events: BTreeMap<String, Unexpected>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ending {
    #[default]
    Success,
    Failure,
    Cancelled,
}

#[derive(Debug, Default)]
pub struct Transition {
    pub position: Position,
    pub guard: Option<Expression>,
    /// Without a target the task stays in its state, and nothing is entered or left.
    pub to: Option<StateIndex>,
    /// Counted by this counter.
    pub counter: Option<String>,
    /// Overrides the `exceeded` state of the counter.
    pub exceeded: Option<StateIndex>,
    /// Counters that start again at zero.
    pub reset: Vec<String>,
    /// The event is a decision of its sender about the open approval.
    pub decision: Option<bool>,
    pub actions: Vec<Action>,
}

#[derive(Debug)]
pub enum Action {
    /// Changes the task's data. All values are computed before the first is stored.
    Set(Vec<(String, Template)>),
    /// Publishes an event.
    Emit { event: String, data: Template },
    /// Submits a job. Its end arrives as `job.NAME.completed` or `job.NAME.failed`.
    Job(JobAction),
}

#[derive(Debug)]
pub struct JobAction {
    pub name: String,
    pub job_type: String,
    /// Payload of the job.
    pub payload: Template,
    /// Further fields of the job, such as `queue`, `priority` or `timeoutMs`, as in a request.
    pub options: serde_json::Map<String, Value>,
}

#[derive(Debug)]
pub struct Deadline {
    pub silence_ms: Option<i64>,
    pub no_progress_ms: Option<i64>,
    pub total_ms: Option<i64>,
    pub to: StateIndex,
}

#[derive(Debug)]
pub struct Poll {
    pub position: Position,
    pub every_ms: i64,
    pub event: String,
    pub data: Template,
}

#[derive(Debug)]
pub struct TimerRule {
    pub name: String,
    pub after_ms: i64,
    pub repeats: bool,
}

#[derive(Debug)]
pub struct ApprovalRule {
    pub position: Position,
    /// The thing that is approved. Its hash identifies it.
    pub subject: Template,
    /// Number of approvals that are needed. One denial is enough.
    pub quorum: u32,
    /// Whether the creator of the task may decide.
    pub allow_creator: bool,
    /// Groups that may decide. Empty: everyone with write access.
    pub groups: Vec<String>,
    /// Times after the start at which a reminder is published.
    pub remind_ms: Vec<i64>,
    pub escalate: Option<Escalation>,
    pub expires: Option<Expiry>,
    /// Receivers of webhooks about the approval: URLs, and expressions that return one or several.
    pub webhooks: Vec<Template>,
}

/// Maximum number of receivers of webhooks about one approval.
pub const MAX_RECEIVERS: usize = 10;

#[derive(Debug)]
pub struct Escalation {
    pub after_ms: i64,
    /// Groups that may decide as well from then on.
    pub groups: Vec<String>,
}

#[derive(Debug)]
pub struct Expiry {
    pub after_ms: i64,
    pub to: StateIndex,
}

impl Definition {
    pub fn state(&self, name: &str) -> Option<StateIndex> {
        self.states.iter().position(|state| state.name == name)
    }

    /// Returns the state and the states around it, the innermost first.
    pub fn ancestors(&self, state: StateIndex) -> impl Iterator<Item = StateIndex> {
        std::iter::successors(Some(state), |&inner| self.states[inner].parent)
    }

    /// Returns the names of a state and of the states around it, joined by dots, the outermost first.
    pub fn path(&self, state: StateIndex) -> String {
        let mut names: Vec<&str> = self.ancestors(state).map(|index| self.states[index].name.as_str()).collect();
        names.reverse();
        names.join(".")
    }

    /// Returns the state that is active after `state` has been entered.
    pub fn innermost_initial(&self, state: StateIndex) -> StateIndex {
        let mut innermost = state;
        while let Some(inner) = self.states[innermost].initial {
            innermost = inner;
        }
        innermost
    }
}

impl State {
    pub fn transitions(&self, event: &str) -> &[Transition] {
        self.on.iter().find(|(name, _)| name == event).map_or(&[], |(_, transitions)| transitions)
    }

    /// Returns the entry and exit actions of the state and the actions of its transitions.
    pub fn actions(&self) -> impl Iterator<Item = &Action> {
        let transitions = self.on.iter().flat_map(|(_, transitions)| transitions);
        self.entry.iter().chain(&self.exit).chain(transitions.flat_map(|transition| &transition.actions))
    }

    /// Returns every state that this one can lead to, with the position of the edge.
    pub fn targets(&self) -> Vec<(StateIndex, Position)> {
        let mut targets = Vec::new();
        for transition in self.on.iter().flat_map(|(_, transitions)| transitions) {
            targets.extend(transition.to.map(|to| (to, transition.position)));
            targets.extend(transition.exceeded.map(|to| (to, transition.position)));
        }
        targets.extend(self.deadline.iter().map(|deadline| (deadline.to, self.position)));
        let expiry = self.approval.as_ref().and_then(|approval| approval.expires.as_ref());
        targets.extend(expiry.map(|expiry| (expiry.to, self.position)));
        targets
    }
}
