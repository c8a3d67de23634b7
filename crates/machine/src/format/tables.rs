//! The keys of a definition, one table per kind of object.

use super::{
    Key, Object, Rule,
    Shape::{self, Count, Flag, List, Named, Part, Text},
};

const fn required(name: &'static str, shape: Shape, about: &'static str) -> Key {
    Key { name, about, shape, is_required: true }
}

const fn optional(name: &'static str, shape: Shape, about: &'static str) -> Key {
    Key { name, about, shape, is_required: false }
}

pub(crate) const DEFINITION: Object = Object {
    name: "definition",
    about: "A machine: the states of a task, the events it reacts to, and the limits that end it.",
    keys: &[
        required("machine", Part("name"), "Name of the machine."),
        required("version", Count, "Version of the machine. A registered version never changes."),
        optional("title", Text, "Display name."),
        optional("description", Text, "What the machine is for."),
        optional(
            "input",
            Part("jsonSchema"),
            "JSON Schema of the data that a new task starts with. Expressions are checked against it.",
        ),
        optional("start", Part("eventName"), "Event that a new task receives first, with its data as payload."),
        optional("cancel", Part("stateName"), "State that a cancelled task moves to. Without one it ends where it is."),
        optional("events", Named("event"), "Every event that the machine receives or publishes, by name."),
        optional(
            "unexpected",
            Part("policy"),
            "What happens to an event that no active state handles. An event or a state can say otherwise.",
        ),
        optional("limits", Part("limits"), "Limits of a task."),
        optional("counters", Named("counter"), "Limits of loops. A transition counts with `loop`."),
        required("initial", Part("stateName"), "State of a new task."),
        required("states", Named("state"), "The states by name. Names are unique in the whole machine."),
    ],
    rule: Rule::None,
};

pub(crate) const EVENT: Object = Object {
    name: "event",
    about: "An event that the machine receives or publishes.",
    keys: &[
        optional("description", Text, "What has happened."),
        optional("schema", Part("jsonSchema"), "JSON Schema of the payload. An event that does not match is rejected."),
        optional("heartbeat", Flag, "Where no state handles the event, it only shows that its sender is alive."),
        optional(
            "progress",
            Part("expression"),
            "Value that has to change to count as progress, for the deadline `no_progress`.",
        ),
        optional("unexpected", Part("policy"), "What happens to this event where no active state handles it."),
    ],
    rule: Rule::None,
};

pub(crate) const LIMITS: Object = Object {
    name: "limits",
    about: "Limits of a task.",
    keys: &[
        optional("transitions", Count, "Number of transitions in the life of a task. Default: 500."),
        optional("lifetime", Part("duration"), "Age of a task. Default: 30d."),
        optional("context", Part("size"), "Size of a task's data as JSON. Default: 256KiB."),
        optional(
            "to",
            Part("stateName"),
            "Final state of a task that exceeds a limit. Without one it ends as failed where it is.",
        ),
        optional(
            "llm_tokens",
            Count,
            "Tokens of language models that one task may use in its life. Beyond them a call fails, and `job.NAME.failed` arrives.",
        ),
        optional(
            "running",
            Part("runningTasks"),
            "Tasks of the machine that run concurrently; further ones are queued. The limit of the newest version applies to all versions together.",
        ),
    ],
    rule: Rule::None,
};

pub(crate) const COUNTER: Object = Object {
    name: "counterRule",
    about: "A limit of a loop.",
    keys: &[
        required("max", Count, "How often the counted transitions may be taken."),
        optional("exceeded", Part("stateName"), "State that a task moves to instead of counting beyond `max`."),
    ],
    rule: Rule::None,
};

pub(crate) const STATE: Object = Object {
    name: "state",
    about: "A state of a task. Unless it is final it needs a way out, and a deadline or `forever`.",
    keys: &[
        optional("title", Text, "Display name."),
        optional("description", Text, "What the task does or waits for in this state."),
        optional("initial", Part("stateName"), "Inner state that is entered with this one."),
        optional("states", Named("state"), "States inside this one. The inner state sees an event first."),
        optional("final", Flag, "The task ends here."),
        optional("ends", Part("ending"), "How the task ends in a final state. Default: success."),
        optional("forever", Flag, "The state may last without a limit."),
        optional("entry", List("action"), "Actions on entering the state."),
        optional("exit", List("action"), "Actions on leaving the state."),
        optional(
            "on",
            Part("transitions"),
            "Transitions by event. Besides declared events: `approval.granted`, `approval.denied`, `timer.NAME`, `job.NAME.completed` and `job.NAME.failed`.",
        ),
        optional("deadline", Part("deadline"), "How long the task may stay in this state."),
        optional("poll", Part("poll"), "Question that is published regularly while the task is in this state."),
        optional("approval", Part("approval"), "Decision of people that this state waits for."),
        optional(
            "timers",
            Named("timer"),
            "Timers that run while the task is in this state. Each arrives as `timer.NAME`.",
        ),
        optional(
            "unexpected",
            Part("statePolicy"),
            "What happens to events that this state does not handle: one policy, or one per event.",
        ),
    ],
    rule: Rule::State,
};

const SET: Key =
    optional("set", Part("values"), "Values to store in the task's data. All are computed before the first is stored.");
const EMIT: Key = optional("emit", Part("eventName"), "Event to publish, with `data` as payload.");
const JOB: Key = optional(
    "job",
    Text,
    "Type of a job to submit, with `data` as payload. Its end arrives as `job.NAME.completed` or `job.NAME.failed`.",
);
const LLM: Key = optional(
    "llm",
    Part("jobName"),
    "Name of a call to a language model, with `prompt` and `system` in `data`. Its end arrives like that of a job.",
);
const NAME: Key = optional("name", Part("jobName"), "Name of the job in this machine.");
const DATA: Key = optional("data", Part("template"), "Payload of the event or the job.");
const OPTIONS: Key = optional("options", Part("jobOptions"), "Further fields of the job.");

pub(crate) const ACTION: Object = Object {
    name: "action",
    about: "Something to do: `set`, and one of `emit`, `job` and `llm`.",
    keys: &[SET, EMIT, JOB, LLM, NAME, DATA, OPTIONS],
    rule: Rule::WholeAction,
};

pub(crate) const TRANSITION: Object = Object {
    name: "transitionRule",
    about: "What an event does. If there are several transitions, the first whose `if` is true is taken.",
    keys: &[
        optional("if", Part("expression"), "Condition. Without one the transition is always taken."),
        optional(
            "to",
            Part("stateName"),
            "State to enter. Without one the task stays, and nothing is entered or left.",
        ),
        optional("loop", Part("counterName"), "Counter that counts this transition."),
        optional(
            "exceeded",
            Part("stateName"),
            "State to enter when the counter of `loop` is used up. Overrides that of the counter.",
        ),
        optional("reset", List("counterName"), "Counters that start again at zero."),
        optional("approve", Flag, "The event is a decision of its sender about the open approval: yes or no."),
        SET,
        EMIT,
        JOB,
        LLM,
        NAME,
        DATA,
        OPTIONS,
        optional("do", List("action"), "Further actions, in this order."),
    ],
    rule: Rule::Action,
};

pub(crate) const DEADLINE: Object = Object {
    name: "deadline",
    about: "How long a task may stay in a state.",
    keys: &[
        optional(
            "silence",
            Part("duration"),
            "Longest time without a message about the task. At least twice `poll.every`.",
        ),
        optional("no_progress", Part("duration"), "Longest time in which no event shows progress."),
        optional("total", Part("duration"), "Longest time in the state."),
        required("to", Part("stateName"), "The state that a missed deadline leads to."),
    ],
    rule: Rule::AnyOf(&["silence", "no_progress", "total"]),
};

pub(crate) const POLL: Object = Object {
    name: "poll",
    about: "A question that is published regularly.",
    keys: &[
        required("every", Part("duration"), "Time between two questions, at least 1s."),
        required("emit", Part("eventName"), "Event to publish."),
        optional("data", Part("template"), "Payload of the event."),
    ],
    rule: Rule::None,
};

pub(crate) const TIMER: Object = Object {
    name: "timer",
    about: "A timer that starts when its state is entered.",
    keys: &[
        optional("after", Part("duration"), "Fires once, after this time."),
        optional("every", Part("duration"), "Fires again and again, at least 1s apart."),
    ],
    rule: Rule::OneOf(&["after", "every"]),
};

pub(crate) const APPROVAL: Object = Object {
    name: "approval",
    about: "A decision of people. One denial is enough to deny.",
    keys: &[
        required("subject", Part("template"), "What is approved, as in ctx.plan. Its hash identifies it."),
        optional("quorum", Count, "Number of people who must approve. Default: 1."),
        optional("self", Flag, "Whether the creator of the task may decide. Default: false."),
        optional("groups", List("groupName"), "Groups that may decide. Default: everyone who may write."),
        optional("remind", List("duration"), "Times after the request at which a reminder is published."),
        optional("escalate", Part("escalation"), "When other groups may decide as well."),
        optional(
            "expires",
            Part("expiry"),
            "When the request ends without a decision. An expired request is never an approval.",
        ),
        optional(
            "webhook",
            List("receiver"),
            "Receivers of a webhook when the request opens, at each reminder, at its escalation and at its end.",
        ),
    ],
    rule: Rule::None,
};

pub(crate) const ESCALATION: Object = Object {
    name: "escalation",
    about: "Other groups that may decide after some time.",
    keys: &[
        required("after", Part("duration"), "Time after the request."),
        required("groups", List("groupName"), "Groups that may decide as well from then on."),
    ],
    rule: Rule::None,
};

pub(crate) const EXPIRY: Object = Object {
    name: "expiry",
    about: "The end of a request without a decision.",
    keys: &[
        required("after", Part("duration"), "Time after the request."),
        required("to", Part("stateName"), "State that the task moves to."),
    ],
    rule: Rule::None,
};

/// Every table except that of the whole definition.
pub(crate) const OBJECTS: [&Object; 12] = [
    &EVENT,
    &LIMITS,
    &COUNTER,
    &STATE,
    &ACTION,
    &TRANSITION,
    &DEADLINE,
    &POLL,
    &TIMER,
    &APPROVAL,
    &ESCALATION,
    &EXPIRY,
];
