//! Runs a task on a clock that the test sets.

use faena_domain::Timestamp;
use faena_machine::{BUILT_IN, Caller, Definition, Effect, Event, Input, Outcome, Record, Step, Task, create, step};
use serde_json::{Value, json};

pub const START: Timestamp = Timestamp::from_ms(1_800_000_000_000);

pub fn definition(text: &str) -> Definition {
    Definition::parse(text).unwrap_or_else(|findings| {
        let lines: Vec<String> = findings.iter().map(ToString::to_string).collect();
        panic!("{}", lines.join("\n"));
    })
}

pub fn coding_task() -> Definition {
    definition(BUILT_IN[0].1)
}

pub fn caller(actor: &str, groups: &[&str]) -> Caller {
    Caller { groups: groups.iter().map(ToString::to_string).collect(), ..Caller::from(actor) }
}

/// The machines in `examples/machines`.
pub const EXAMPLES: [&str; 3] = ["order-saga", "onboarding", "content-review"];

pub fn example_text(name: &str) -> String {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/machines");
    std::fs::read_to_string(format!("{folder}/{name}.yaml")).expect("the example is there")
}

pub fn example(name: &str) -> Definition {
    definition(&example_text(name))
}

/// A task with everything that its steps did.
pub struct Trial<'a> {
    pub definition: &'a Definition,
    pub task: Task,
    pub now: Timestamp,
    pub records: Vec<Record>,
    pub effects: Vec<Effect>,
    pub ids: u32,
}

impl<'a> Trial<'a> {
    pub fn new(definition: &'a Definition, data: Value) -> Trial<'a> {
        let first = create(definition, "task-1".into(), "key:alice".into(), data, START).expect("valid data");
        let Step { task, records, effects, .. } = first;
        Trial { definition, task, now: START, records, effects, ids: 0 }
    }

    pub fn apply(&mut self, input: Input) -> Step {
        let step = step(self.definition, &self.task, input, self.now);
        self.task = step.task.clone();
        self.records.extend(step.records.clone());
        self.effects.extend(step.effects.clone());
        step
    }

    pub fn event(&mut self, kind: &str, payload: Value) -> Outcome {
        self.event_from("key:service", kind, payload).outcome
    }

    pub fn event_from(&mut self, actor: &str, kind: &str, payload: Value) -> Step {
        self.ids += 1;
        let id = format!("event-{}", self.ids);
        let decider = Some(Caller::from(actor));
        let event = Event { id, kind: kind.into(), payload, actor: actor.into(), decider, at: self.now };
        self.apply(Input::Event(event))
    }

    pub fn decide(&mut self, actor: &str, groups: &[&str], approve: bool) -> Step {
        self.apply(Input::Decision { caller: caller(actor, groups), approve, hash: None, comment: None })
    }

    /// Lets time pass, and fires every timer at its time.
    pub fn wait(&mut self, text: &str) {
        let end = self.now.plus_ms(faena_domain::parse_duration(text).expect("a duration").as_millis() as i64);
        while let Some(due) = self.task.due().filter(|due| *due <= end) {
            self.now = self.now.max(due);
            self.apply(Input::Timers);
        }
        self.now = end;
    }

    pub fn job_ended(&mut self, name: &str, end: &str, payload: Value) -> Step {
        let job = self.effects.iter().rev().find_map(|effect| match effect {
            Effect::Job(job) if job.name == name => Some(job.clone()),
            _ => None,
        });
        let job = job.expect("the job was submitted");
        let kind = format!("job.{name}.{end}");
        let event =
            Event { id: String::new(), kind, payload, actor: "system:jobs".into(), decider: None, at: self.now };
        self.apply(Input::JobEnded { state: job.state, epoch: job.epoch, event })
    }

    /// Returns the names of the emitted events.
    pub fn emitted(&self) -> Vec<&str> {
        let emits = self.effects.iter().filter_map(|effect| match effect {
            Effect::Emit { event, .. } => Some(event.as_str()),
            _ => None,
        });
        emits.collect()
    }

    pub fn notices(&self) -> Vec<&str> {
        let notices = self.effects.iter().filter_map(|effect| match effect {
            Effect::Notice { event, .. } => Some(*event),
            _ => None,
        });
        notices.collect()
    }

    pub fn last_payload(&self, name: &str) -> Value {
        let emits = self.effects.iter().rev().find_map(|effect| match effect {
            Effect::Emit { event, payload } if event == name => Some(payload.clone()),
            _ => None,
        });
        emits.unwrap_or_else(|| panic!("{name} was not emitted"))
    }
}

pub fn request() -> Value {
    json!({"prompt": "add a test", "repositorioOrigen": "/srv/git/demo.git"})
}
