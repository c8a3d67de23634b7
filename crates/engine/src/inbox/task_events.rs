//! Delivers messages from a broker to tasks, as events.
//!
//! All events of a round are applied in one call, in the order of their arrival. A task recognises an event that arrives again
//! by its id. A message that starts a task creates it in the transaction that records the message, so that its redelivery
//! creates no second one.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use faena_brokers::Delivery;
use faena_domain::{TaskId, Timestamp};
use faena_machine::{Caller, Definition, Envelope, Event, Input, Outcome as EventOutcome, create};
use faena_store::{NewTask, Store, TaskAnswer, TaskInput};
use futures_util::{StreamExt, stream};
use serde_json::Value;

use super::{CONCURRENT_SUBMITS, DeliveryOutcome, Inbox, Stopped, storable_id};

/// How messages become events of tasks.
#[derive(Clone, Debug, Default)]
pub struct TaskEvents {
    /// The machine whose start event creates a task, if the message names no task.
    pub machine: Option<String>,
    /// Prefix of a message's subject. The type of the event follows it.
    pub subject_prefix: String,
}

/// Number of messages by what they did to tasks.
#[derive(Debug, Default)]
pub struct TaskCounts {
    /// Messages that created a task.
    pub created: AtomicU64,
    pub applied: AtomicU64,
    pub deferred: AtomicU64,
    pub ignored: AtomicU64,
    pub stale: AtomicU64,
    /// Messages that Faena published itself.
    pub own: AtomicU64,
}

/// Longest correlation id of a task, in characters.
const MAX_CORRELATION: usize = 200;

/// A message that could be parsed.
enum Received {
    Event(TaskInput),
    /// Without a task: it may start one.
    Start(Start),
    Own,
}

struct Start {
    id: String,
    kind: String,
    payload: Value,
    correlation: String,
}

/// What to do with a message.
enum MessageAction {
    /// Acknowledge and count it.
    Acknowledge(Effect),
    Reject(String),
    Defer(Stopped),
}

/// What a message did.
#[derive(Clone, Copy)]
enum Effect {
    Created,
    Applied,
    Deferred,
    Ignored,
    Stale,
    Duplicate,
    Own,
}

impl Inbox {
    /// Delivers messages, and acknowledges or rejects each one that does not have to wait.
    pub(super) async fn deliver_events(
        &self,
        store: &dyn Store,
        rule: &TaskEvents,
        messages: Vec<Delivery>,
        now: Timestamp,
    ) -> Vec<DeliveryOutcome> {
        let (mut events, mut inputs, mut starts, mut decided) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for message in messages {
            match self.read_event(rule, &message, now) {
                Ok(Received::Event(input)) => {
                    events.push(message);
                    inputs.push(input);
                }
                Ok(Received::Start(start)) => starts.push((message, start)),
                Ok(Received::Own) => decided.push((message, MessageAction::Acknowledge(Effect::Own))),
                Err(reason) => decided.push((message, MessageAction::Reject(reason))),
            }
        }
        decided.extend(self.create_tasks(store, rule, starts, now).await);
        decided.extend(events.into_iter().zip(self.apply(store, inputs, now).await));
        // Keeps the order: messages that have to wait are applied later, in the order of their arrival.
        stream::iter(decided)
            .map(|(message, action)| self.settle(message, action))
            .buffered(CONCURRENT_SUBMITS)
            .collect()
            .await
    }

    fn read_event(&self, rule: &TaskEvents, message: &Delivery, now: Timestamp) -> Result<Received, String> {
        let (bytes, limit) = (message.body.len(), self.parser.limits.max_body_bytes);
        if bytes > limit {
            return Err(format!("the message has {bytes} bytes; the limit is {limit}"));
        }
        let envelope = Envelope::parse(&message.body)?;
        if envelope.is_own() {
            return Ok(Received::Own);
        }
        let kind = rule.event_type(message, &envelope)?;
        let id = event_id(message, &envelope)?;
        let payload = envelope.payload;
        let Some(task) = envelope.task else {
            let correlation = message.correlation_id.clone().filter(|id| is_correlation(id));
            let correlation = correlation.unwrap_or_else(|| id.clone());
            return Ok(Received::Start(Start { id, kind, payload, correlation }));
        };
        let event = Event {
            id,
            kind,
            payload,
            actor: self.name.clone(),
            decider: Some(Caller::from(self.name.as_str())),
            at: now,
        };
        Ok(Received::Event(TaskInput { task, input: Input::Event(event) }))
    }

    /// Creates the tasks of messages that name none. If the machine is not registered, the messages wait until it is.
    async fn create_tasks(
        &self,
        store: &dyn Store,
        rule: &TaskEvents,
        starts: Vec<(Delivery, Start)>,
        now: Timestamp,
    ) -> Vec<(Delivery, MessageAction)> {
        if starts.is_empty() {
            return Vec::new();
        }
        let Some(machine) = &rule.machine else {
            let reason =
                "metadata.taskId: is required, because the inbox names no machine whose tasks a message may create";
            return starts.into_iter().map(|(message, _)| (message, MessageAction::Reject(reason.into()))).collect();
        };
        let definition = match store.machine_get(machine, None).await {
            Ok(Some(stored)) => Ok(stored.definition),
            Ok(None) => {
                let advice =
                    format!("machine {machine:?} is not registered; register it with \"faena machines register\"");
                Err(Stopped { dependency: "machine", reason: advice })
            }
            Err(error) => Err(Stopped::of(&error)),
        };
        let definition = match definition {
            Ok(definition) => definition,
            Err(stopped) => {
                return starts
                    .into_iter()
                    .map(|(message, _)| (message, MessageAction::Defer(stopped.clone())))
                    .collect();
            }
        };
        stream::iter(starts)
            .map(async |(message, start)| (message, self.create_task(store, &definition, start, now).await))
            .buffered(CONCURRENT_SUBMITS)
            .collect()
            .await
    }

    async fn create_task(
        &self,
        store: &dyn Store,
        definition: &Arc<Definition>,
        start: Start,
        now: Timestamp,
    ) -> MessageAction {
        if definition.start.as_ref() != Some(&start.kind) {
            let machine = &definition.machine;
            return MessageAction::Reject(match &definition.start {
                Some(first) => {
                    format!("metadata.taskId: is required; only the event {first} of {machine} creates a task")
                }
                None => format!("metadata.taskId: is required; {machine} has no start event that creates a task"),
            });
        }
        let id = TaskId::new();
        let first = match create(definition, id.to_string(), Caller::from(self.name.as_str()), start.payload, now) {
            Ok(first) => first,
            Err(reason) => return MessageAction::Reject(reason),
        };
        let task = NewTask {
            id,
            definition: definition.clone(),
            title: None,
            correlation: start.correlation,
            tags: Vec::new(),
            first,
            audit: None,
        };
        match store.inbox_task(&self.name, &start.id, task, now).await {
            Ok(true) => MessageAction::Acknowledge(Effect::Created),
            Ok(false) => MessageAction::Acknowledge(Effect::Duplicate),
            Err(error) => MessageAction::Defer(Stopped::of(&error)),
        }
    }

    /// Applies events in one call.
    async fn apply(&self, store: &dyn Store, inputs: Vec<TaskInput>, now: Timestamp) -> Vec<MessageAction> {
        if inputs.is_empty() {
            return Vec::new();
        }
        let tasks: Vec<TaskId> = inputs.iter().map(|input| input.task).collect();
        match store.task_apply(inputs, now).await {
            Ok(answers) => tasks.into_iter().zip(answers).map(|(task, answer)| action_for(task, answer)).collect(),
            Err(error) => {
                let stopped = Stopped::of(&error);
                tasks.iter().map(|_| MessageAction::Defer(stopped.clone())).collect()
            }
        }
    }

    fn counter(&self, effect: Effect) -> &AtomicU64 {
        let counts = &self.task_counts;
        match effect {
            Effect::Created => &counts.created,
            Effect::Applied => &counts.applied,
            Effect::Deferred => &counts.deferred,
            Effect::Ignored => &counts.ignored,
            Effect::Stale => &counts.stale,
            Effect::Duplicate => &self.duplicates,
            Effect::Own => &counts.own,
        }
    }

    async fn settle(&self, message: Delivery, action: MessageAction) -> DeliveryOutcome {
        match action {
            MessageAction::Acknowledge(effect) => {
                self.counter(effect).fetch_add(1, Ordering::Relaxed);
                self.acknowledge(message).await
            }
            MessageAction::Reject(reason) => self.reject(message, &reason).await,
            MessageAction::Defer(stopped) => DeliveryOutcome::Deferred(Box::new(message), stopped),
        }
    }
}

impl TaskEvents {
    /// Returns the type of an event: the header `Type`, else that of the CloudEvent, else the subject without the prefix.
    fn event_type(&self, message: &Delivery, envelope: &Envelope) -> Result<String, String> {
        let given = message.has_kind.then_some(&message.kind).or(envelope.kind.as_ref());
        if let Some(kind) = given.filter(|kind| !kind.is_empty()) {
            return Ok(kind.clone());
        }
        let (subject, prefix) = (&message.subject, &self.subject_prefix);
        if prefix.is_empty() {
            return Ok(subject.clone());
        }
        let kind = subject.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('.'));
        kind.map(str::to_owned).ok_or_else(|| {
            format!(
                "the message has no type: set the header Type, or publish it under a subject that begins with {prefix}."
            )
        })
    }
}

/// Returns the id of an event: the trace id, else that of the CloudEvent, else that of the message.
fn event_id(message: &Delivery, envelope: &Envelope) -> Result<String, String> {
    let id = envelope.trace_id.as_ref().or(envelope.message_id.as_ref()).or(message.id.as_ref());
    match id.filter(|id| !id.is_empty()) {
        Some(id) => Ok(storable_id(id)),
        // Without an id, a redelivery cannot be distinguished from another event with the same content.
        None => Err("metadata.traceId: is required, because the message has no id of its own".into()),
    }
}

fn is_correlation(id: &str) -> bool {
    (1..=MAX_CORRELATION).contains(&id.chars().count()) && !id.contains(char::is_control)
}

fn action_for(task: TaskId, answer: Option<TaskAnswer>) -> MessageAction {
    let Some(answer) = answer else { return MessageAction::Reject(format!("there is no task {task}")) };
    match answer.outcome {
        EventOutcome::Rejected | EventOutcome::Invalid | EventOutcome::Forbidden => {
            MessageAction::Reject(answer.reason.unwrap_or_default())
        }
        _ if answer.duplicate => MessageAction::Acknowledge(Effect::Duplicate),
        EventOutcome::Applied => MessageAction::Acknowledge(Effect::Applied),
        EventOutcome::Deferred => MessageAction::Acknowledge(Effect::Deferred),
        EventOutcome::Ignored => MessageAction::Acknowledge(Effect::Ignored),
        EventOutcome::Stale => MessageAction::Acknowledge(Effect::Stale),
    }
}
