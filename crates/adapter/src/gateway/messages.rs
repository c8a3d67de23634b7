//! JSON messages of web clients: requests `{tipo, id, ref, payload}`, and answers `{tipo, taskId, ref, payload}`.

use serde_json::{Map, Value, json};

use crate::task::TaskSnapshot;

/// Largest message from a client.
pub const MAX_BYTES: usize = 256 << 10;

/// What a client asks for.
#[derive(Debug, PartialEq)]
pub enum Request {
    Create {
        data: Value,
        title: Option<String>,
        /// Id of the message. The same message again creates no second task.
        id: Option<String>,
    },
    Decide {
        task: String,
        plan: String,
        approve: bool,
        comment: Option<String>,
    },
    Follow {
        task: String,
    },
}

/// Reads a message. The second value is the `ref` of the client, which the answer repeats.
pub fn parse(text: &str) -> (Result<Request, String>, Option<String>) {
    let message: Value = match serde_json::from_str(text) {
        Ok(message @ Value::Object(_)) => message,
        Ok(_) => return (Err("the message must be a JSON object".into()), None),
        Err(error) => return (Err(format!("the message is not JSON: {error}")), None),
    };
    let reference = message["ref"].as_str().filter(|text| text.len() <= 200).map(str::to_owned);
    (parse_request(&message), reference)
}

fn parse_request(message: &Value) -> Result<Request, String> {
    for name in message.as_object().into_iter().flatten().map(|(name, _)| name) {
        if !["tipo", "id", "ref", "payload"].contains(&name.as_str()) {
            return Err(format!("{name}: unknown field"));
        }
    }
    let id = match &message["id"] {
        Value::Null => None,
        Value::String(id) if (1..=200).contains(&id.chars().count()) && !id.contains(char::is_control) => {
            Some(id.clone())
        }
        _ => return Err("id: must be a string of 1 to 200 characters without control characters".into()),
    };
    let empty = Map::new();
    let payload = match &message["payload"] {
        Value::Object(payload) => payload,
        Value::Null => &empty,
        _ => return Err("payload: must be an object".into()),
    };
    let kind = message["tipo"].as_str().ok_or("tipo: is required")?;
    let known: &[&str] = match kind {
        "CREAR_TAREA" => &["prompt", "repositorioOrigen", "reglas", "titulo"],
        "APROBAR_PLAN" => &["taskId", "planId", "aprobado", "comentario"],
        "SEGUIR_TAREA" => &["taskId"],
        _ => return Err("tipo: must be CREAR_TAREA, APROBAR_PLAN or SEGUIR_TAREA".into()),
    };
    if let Some(name) = payload.keys().find(|name| !known.contains(&name.as_str())) {
        return Err(format!("payload.{name}: unknown field"));
    }
    let optional = |name: &str| match payload.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(format!("payload.{name}: must be a string")),
    };
    let text = |name: &str| optional(name)?.ok_or_else(|| format!("payload.{name}: is required"));
    let task = || {
        let id = text("taskId")?;
        let id = uuid::Uuid::parse_str(&id).map_err(|_| "payload.taskId: must be a UUID".to_owned())?;
        Ok::<String, String>(id.to_string())
    };
    Ok(match kind {
        "CREAR_TAREA" => {
            let mut data = json!({"prompt": text("prompt")?, "repositorioOrigen": text("repositorioOrigen")?});
            if let Some(rules) = payload.get("reglas").filter(|rules| !rules.is_null()) {
                data["reglas"] = rules.clone();
            }
            Request::Create { data, title: optional("titulo")?, id }
        }
        "APROBAR_PLAN" => {
            let approve = match payload.get("aprobado") {
                None | Some(Value::Null) => true,
                Some(Value::Bool(approve)) => *approve,
                Some(_) => return Err("payload.aprobado: must be true or false".into()),
            };
            Request::Decide { task: task()?, plan: text("planId")?, approve, comment: optional("comentario")? }
        }
        _ => Request::Follow { task: task()? },
    })
}

/// Returns the message about a task: its progress, or its end.
pub fn about(task: &TaskSnapshot, reference: Option<&str>) -> Value {
    let data = &task.data;
    let mut payload = json!({"estado": task.state});
    let mut copy = |names: &[&str]| {
        for name in names.iter().filter(|name| !data[**name].is_null()) {
            payload[*name] = data[*name].clone();
        }
    };
    let kind = if task.has_ended() {
        copy(&["planId", "pullRequestUrl", "log", "error"]);
        payload["exito"] = json!(task.status == "completed");
        if let Some(fault) = &task.fault {
            payload["error"] = json!(fault);
        }
        "TAREA_FINALIZADA"
    } else {
        copy(&["planId", "pullRequestUrl"]);
        if task.approval.is_some() {
            payload["plan"] = data["plan"].clone();
        }
        if !task.progress.is_null() {
            payload["progreso"] = task.progress.clone();
        }
        "ACTUALIZACION_PROGRESO"
    };
    let mut message = json!({"tipo": kind, "taskId": task.id, "payload": payload});
    if let Some(reference) = reference {
        message["ref"] = json!(reference);
    }
    message
}

pub fn error(message: &str, task: Option<&str>, reference: Option<&str>) -> Value {
    let mut answer = json!({"tipo": "ERROR", "payload": {"mensaje": message}});
    if let Some(task) = task {
        answer["taskId"] = json!(task);
    }
    if let Some(reference) = reference {
        answer["ref"] = json!(reference);
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "018f3c5e-7b1a-7000-8000-0000000000aa";

    #[test]
    fn requests_are_read_and_everything_else_is_an_error_that_names_the_field() {
        let decide = format!(r#"{{"tipo":"APROBAR_PLAN","ref":"7","payload":{{"taskId":"{ID}","planId":"p"}}}}"#);
        let (request, reference) = parse(&decide);
        let approve = Request::Decide { task: ID.into(), plan: "p".into(), approve: true, comment: None };
        assert_eq!((request, reference.as_deref()), (Ok(approve), Some("7")));
        for (text, part) in [
            ("", "not JSON"),
            ("[]", "JSON object"),
            ("{}", "tipo: is required"),
            (r#"{"tipo":"CREAR_TAREA","id":7}"#, "id: must be a string"),
            (r#"{"tipo":"CREAR_TAREA","id":""}"#, "id: must be a string"),
            (r#"{"tipo":"BORRAR"}"#, "tipo: must be"),
            (r#"{"tipo":"CREAR_TAREA"}"#, "payload.prompt: is required"),
            (r#"{"tipo":"CREAR_TAREA","payload":7}"#, "payload: must be an object"),
            (r#"{"tipo":"CREAR_TAREA","payload":{"prompt":1}}"#, "payload.prompt: must be a string"),
            (r#"{"tipo":"CREAR_TAREA","payload":{"x":1}}"#, "payload.x: unknown field"),
            (r#"{"tipo":"SEGUIR_TAREA","payload":{"taskId":"../x"}}"#, "payload.taskId: must be a UUID"),
            (r#"{"tipo":"SEGUIR_TAREA","other":1}"#, "other: unknown field"),
        ] {
            assert!(parse(text).0.is_err_and(|error| error.contains(part)), "{text}: {part}");
        }
    }
}
