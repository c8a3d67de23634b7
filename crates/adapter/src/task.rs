//! What a task needs from a service, read from the task itself or from a message that contains everything.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The fields of a task that services need, as the API shows them.
#[derive(Clone, Debug, Deserialize)]
pub struct TaskSnapshot {
    pub id: String,
    pub machine: String,
    pub status: String,
    pub state: String,
    pub data: Value,
    /// The active states, the outermost first.
    #[serde(default)]
    pub active: Vec<ActiveState>,
    #[serde(default)]
    pub progress: Value,
    #[serde(default)]
    pub approval: Option<Approval>,
    #[serde(default)]
    pub fault: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct ActiveState {
    pub state: String,
    /// Identifies this stay in the state.
    pub epoch: u64,
}

#[derive(Clone, Debug, Deserialize)]
pub struct Approval {
    pub hash: String,
    pub subject: Value,
}

impl TaskSnapshot {
    pub fn has_ended(&self) -> bool {
        ["completed", "failed", "cancelled"].contains(&self.status.as_str())
    }
}

/// Work that a task waits for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Work {
    Plan { repository: String, prompt: String },
    Code { repository: String, prompt: String, plan: String, correction: Option<String> },
    Test { pull_request: String },
}

impl Work {
    /// Returns the state in which a task waits for this.
    pub fn state(&self) -> &'static str {
        match self {
            Work::Plan { .. } => PLANNING,
            Work::Code { .. } => CODING,
            Work::Test { .. } => TESTING,
        }
    }
}

/// The states of `coding-task` in which a task waits for a service.
pub const PLANNING: &str = "PLANIFICANDO";
pub const CODING: &str = "EJECUTANDO_CODIGO";
pub const TESTING: &str = "PROBANDO_INTEGRACION";

/// One piece of work for a task, with its id.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkItem {
    pub task: String,
    /// Stays the same when the task asks for the same work again; the next round has another id.
    pub id: String,
    pub work: Work,
}

impl WorkItem {
    /// Returns what the task waits for, or `None` if it waits for no service.
    pub fn of_task(task: &TaskSnapshot) -> Result<Option<WorkItem>, String> {
        let Some(active) = task.active.first().filter(|_| task.status == "running") else { return Ok(None) };
        let text = |name: &str| match &task.data[name] {
            Value::String(text) => Ok(text.clone()),
            _ => Err(format!("task {} has no string \"{name}\" in its data", task.id)),
        };
        let work = match active.state.as_str() {
            PLANNING => {
                let prompt = match &task.data["comentario"] {
                    Value::String(comment) => format!("{}\n\n{comment}", text("prompt")?),
                    _ => text("prompt")?,
                };
                Work::Plan { repository: text("repositorioOrigen")?, prompt }
            }
            CODING => Work::Code {
                repository: text("repositorioOrigen")?,
                prompt: text("prompt")?,
                plan: plan_text(&task.data["plan"]),
                correction: text("correccion").ok(),
            },
            TESTING => Work::Test { pull_request: text("pullRequestUrl")? },
            _ => return Ok(None),
        };
        Ok(Some(WorkItem { task: task.id.clone(), id: format!("epoch-{}", active.epoch), work }))
    }

    /// Returns what a message asks for. Fields that it lacks come from earlier messages about the task.
    pub fn of_message(message: &TaskMessage, known: &Known) -> Result<Option<WorkItem>, String> {
        let field = |name: &str, earlier: Option<&String>| match (&message.payload[name], earlier) {
            (Value::String(text), _) => Ok(text.clone()),
            (_, Some(text)) => Ok(text.clone()),
            _ => Err(format!("{} has no string \"payload.{name}\"", message.kind)),
        };
        let repository = || field("repositorioOrigen", known.repository.as_ref());
        let prompt = || field("prompt", known.prompt.as_ref());
        let plan = || match &message.payload["plan"] {
            Value::Null => known.plan.clone().unwrap_or_default(),
            plan => plan_text(plan),
        };
        let work = match message.kind.as_str() {
            GENERATE_PLAN => Work::Plan { repository: repository()?, prompt: prompt()? },
            APPROVE_PLAN => Work::Code { repository: repository()?, prompt: prompt()?, plan: plan(), correction: None },
            SEND_FEEDBACK => Work::Code {
                repository: repository()?,
                prompt: prompt()?,
                plan: plan(),
                correction: Some(field("promptCorreccion", None)?),
            },
            TEST => Work::Test { pull_request: field("pullRequestUrl", None)? },
            _ => return Ok(None),
        };
        Ok(Some(WorkItem { task: message.task.clone(), id: message.trace.clone(), work }))
    }
}

pub const GENERATE_PLAN: &str = "tarea.generar_plan";
pub const APPROVE_PLAN: &str = "tarea.aprobar_plan";
pub const SEND_FEEDBACK: &str = "tarea.enviar_feedback";
pub const ASK_STATE: &str = "tarea.consultar_estado";
pub const TEST: &str = "tarea.probar_integracion";
pub const STATE_CHANGED: &str = "task.state.changed";
pub const ENDED: &str = "task.ended";

fn plan_text(plan: &Value) -> String {
    match plan {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        plan => format!("{plan:#}"),
    }
}

/// Fields of a task that earlier messages contained.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Known {
    pub repository: Option<String>,
    pub prompt: Option<String>,
    pub plan: Option<String>,
}

impl Known {
    pub fn update(&mut self, work: &Work) {
        match work {
            Work::Plan { repository, prompt } => {
                (self.repository, self.prompt) = (Some(repository.clone()), Some(prompt.clone()));
            }
            Work::Code { repository, prompt, plan, .. } => {
                (self.repository, self.prompt) = (Some(repository.clone()), Some(prompt.clone()));
                self.plan = Some(plan.clone());
            }
            Work::Test { .. } => {}
        }
    }
}

/// A message about a task: `{metadata: {taskId, traceId, …}, payload}`, alone or as the data of a CloudEvent.
#[derive(Clone, Debug, PartialEq)]
pub struct TaskMessage {
    pub kind: String,
    pub task: String,
    pub trace: String,
    pub payload: Value,
}

impl TaskMessage {
    /// Reads a message. `kind` is the type that its transport names, if the body names none.
    pub fn parse(kind: &str, body: &[u8]) -> Result<TaskMessage, String> {
        let body: Value = serde_json::from_slice(body).map_err(|error| format!("not JSON: {error}"))?;
        let (kind, envelope) = match (&body["specversion"], &body["type"]) {
            (Value::String(_), Value::String(kind)) => (kind.clone(), &body["data"]),
            _ => (kind.to_owned(), &body),
        };
        let text = |name: &str| match &envelope["metadata"][name] {
            Value::String(text) if (1..=200).contains(&text.len()) => Ok(text.clone()),
            _ => Err(format!("metadata.{name} must be a string of 1 to 200 bytes")),
        };
        let task = text("taskId")?;
        // The id becomes the name of a folder.
        let task = uuid::Uuid::parse_str(&task).map_err(|_| "metadata.taskId must be a UUID".to_owned())?.to_string();
        Ok(TaskMessage { kind, task, trace: text("traceId")?, payload: envelope["payload"].clone() })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const ID: &str = "018f3c5e-7b1a-7000-8000-0000000000aa";

    fn task(state: &str, data: Value) -> TaskSnapshot {
        let value = json!({"id": ID, "machine": "coding-task", "status": "running", "state": state, "data": data,
                           "active": [{"state": state, "epoch": 7}]});
        serde_json::from_value(value).expect("a task")
    }

    #[test]
    fn a_task_names_its_work_in_its_state() {
        let mut data = json!({"prompt": "p", "repositorioOrigen": "/r", "plan": ["a"]});
        let item = |state: &str, data: &Value| WorkItem::of_task(&task(state, data.clone())).expect("readable");
        let repository = || "/r".to_owned();
        let plan = Work::Plan { repository: repository(), prompt: "p".into() };
        assert_eq!(item(PLANNING, &data), Some(WorkItem { task: ID.into(), id: "epoch-7".into(), work: plan }));
        data["comentario"] = json!("smaller");
        let again = Work::Plan { repository: repository(), prompt: "p\n\nsmaller".into() };
        assert_eq!(item(PLANNING, &data).map(|item| item.work), Some(again));
        data["correccion"] = json!("fix it");
        let code = Work::Code {
            repository: repository(),
            prompt: "p".into(),
            plan: "[\n  \"a\"\n]".into(),
            correction: Some("fix it".into()),
        };
        assert_eq!(item(CODING, &data).map(|item| item.work), Some(code));
        assert_eq!(item("ESPERANDO_APROBACION_PLAN", &data), None);
        assert!(WorkItem::of_task(&task(TESTING, data.clone())).is_err(), "there is no pull request");
        let mut paused = task(PLANNING, data);
        paused.status = "paused".into();
        assert_eq!(WorkItem::of_task(&paused).expect("readable"), None);
    }

    #[test]
    fn a_message_may_be_a_cloud_event_or_the_envelope_alone() {
        let envelope = json!({"metadata": {"taskId": ID, "traceId": "t1", "timestamp": "x", "originator": "faena"},
                              "payload": {"prompt": "p", "repositorioOrigen": "/r"}});
        let event = json!({"specversion": "1.0", "type": GENERATE_PLAN, "data": envelope});
        let alone = TaskMessage::parse(GENERATE_PLAN, envelope.to_string().as_bytes()).expect("a message");
        assert_eq!(TaskMessage::parse("another", event.to_string().as_bytes()), Ok(alone.clone()));
        let item = WorkItem::of_message(&alone, &Known::default()).expect("readable").expect("work");
        assert_eq!(item.id, "t1");
        let mut known = Known::default();
        known.update(&item.work);
        let approval = TaskMessage { kind: APPROVE_PLAN.into(), payload: json!({"planId": "x"}), ..alone.clone() };
        assert!(WorkItem::of_message(&approval, &Known::default()).is_err());
        let code = WorkItem::of_message(&approval, &known).expect("readable").expect("work");
        assert!(matches!(code.work, Work::Code { prompt, .. } if prompt == "p"));
        for body in ["", "7", "{}", r#"{"metadata": {"taskId": "../x", "traceId": "t"}}"#] {
            assert!(TaskMessage::parse(GENERATE_PLAN, body.as_bytes()).is_err(), "{body}");
        }
    }
}
