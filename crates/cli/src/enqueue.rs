//! `faena enqueue`.

use std::{io::Read, process::ExitCode};

use clap::Args;
use faena::SubmittedJob;
use serde_json::{Map, Value, value::RawValue};

use crate::{Api, CommandError, Connection, api::FieldOptions, complete, ids, output::print, watch};

#[derive(Args)]
pub struct Arguments {
    /// Job type: noop, sleep, http.request, or a type that one of your workers handles
    #[arg(value_name = "TYPE", add = complete::types())]
    kind: String,
    /// Payload, a JSON object; - reads it from standard input
    #[arg(default_value = "{}", value_name = "PAYLOAD")]
    payload: String,
    /// Display name [default: the type]
    #[arg(long)]
    name: Option<String>,
    /// Queue [default: default]
    #[arg(long, add = complete::queues())]
    queue: Option<String>,
    /// Priority: LOW, NORMAL, HIGH or CRITICAL [default: NORMAL]
    #[arg(long)]
    priority: Option<String>,
    /// Earliest start, like 2026-11-15T20:00:00Z
    #[arg(long, value_name = "TIME")]
    at: Option<String>,
    /// Earliest start, in milliseconds from now
    #[arg(long, value_name = "MS", conflicts_with = "at")]
    delay_ms: Option<i64>,
    /// Maximum number of retries [default: 3]
    #[arg(long, value_name = "N")]
    max_retries: Option<u32>,
    /// Maximum duration of one run, in milliseconds
    #[arg(long, value_name = "MS")]
    timeout_ms: Option<u64>,
    /// Tag to find the job by; repeat for several
    #[arg(long = "tag", value_name = "TAG")]
    tags: Vec<String>,
    /// Job that has to complete first; repeat for several
    #[arg(long = "after", value_name = "ID", add = complete::jobs())]
    after: Vec<String>,
    /// Reject the job while an unfinished job has the same key
    #[arg(long, value_name = "KEY")]
    unique_key: Option<String>,
    /// Key whose jobs share a concurrency limit, 1 unless a limit is set
    #[arg(long, value_name = "KEY")]
    concurrency_key: Option<String>,
    /// URL to notify when the job finishes
    #[arg(long, value_name = "URL")]
    webhook_url: Option<String>,
    /// Fail the job unless it has started by then, like 2026-11-15T20:00:00Z
    #[arg(long, value_name = "TIME")]
    expires_at: Option<String>,
    /// Return the existing job if the same one was submitted with this key
    #[arg(long, value_name = "KEY")]
    idempotency_key: Option<String>,
    /// Id that groups related jobs, tasks and events [default: the job id]
    #[arg(long, value_name = "ID")]
    correlation_id: Option<String>,
    /// Follow the job until it finishes
    #[arg(long)]
    watch: bool,
    #[command(flatten)]
    connection: Connection,
}

const FIELD_OPTIONS: FieldOptions =
    &[("type", "TYPE"), ("payload", "PAYLOAD"), ("scheduledAt", "--at"), ("tags", "--tag"), ("dependsOn", "--after")];

pub async fn run(mut arguments: Arguments) -> Result<ExitCode, CommandError> {
    let api = Api::new(&arguments.connection)?.with_options(FIELD_OPTIONS);
    arguments.after = ids::resolve_all(&api, &ids::JOB, arguments.after).await?;
    let mut request = api.post("/api/v1/jobs").json_text(body(&arguments)?);
    if let Some(key) = &arguments.idempotency_key {
        request = request.header("idempotency-key", key);
    }
    let submitted: SubmittedJob = request.send().await.map_err(|error| api.name_options(error))?;
    if arguments.watch {
        return watch::watch(&api, &submitted.id.to_string()).await;
    }
    if api.json {
        print(&serde_json::to_string(&submitted).map_err(|error| CommandError::Other(error.to_string()))?);
    } else {
        print(&submitted.id.to_string());
    }
    Ok(ExitCode::SUCCESS)
}

/// Reads a text that must be JSON, without changing it.
pub fn parse_json(argument: &str, text: &str) -> Result<Box<RawValue>, CommandError> {
    serde_json::from_str(text.trim()).map_err(|error| {
        let place = format!("line {}, column {}", error.line(), error.column());
        CommandError::Usage(format!("{argument}: not valid JSON at {place}; write it like '{{\"name\": \"Ada\"}}'"))
    })
}

/// Returns the body. The payload is inserted unchanged, so no number in it loses digits.
fn body(arguments: &Arguments) -> Result<String, CommandError> {
    let text = if arguments.payload == "-" {
        let mut text = String::new();
        let read = std::io::stdin().read_to_string(&mut text);
        read.map_err(|error| CommandError::Other(format!("cannot read standard input: {error}")))?;
        text
    } else {
        arguments.payload.clone()
    };
    let payload = parse_json("PAYLOAD", &text)?;
    let mut fields: Map<String, Value> = Map::new();
    let mut put = |name: &str, value: Option<Value>| {
        if let Some(value) = value {
            fields.insert(name.into(), value);
        }
    };
    let at = arguments
        .delay_ms
        .map(|ms| faena_domain::Timestamp::now().plus_ms(ms).to_string())
        .or_else(|| arguments.at.clone());
    put("type", Some(arguments.kind.clone().into()));
    put("name", arguments.name.clone().map(Value::from));
    put("queue", arguments.queue.clone().map(Value::from));
    put("priority", arguments.priority.clone().map(|text| text.to_uppercase().into()));
    put("scheduledAt", at.map(Value::from));
    put("maxRetries", arguments.max_retries.map(Value::from));
    put("timeoutMs", arguments.timeout_ms.map(Value::from));
    put("uniqueKey", arguments.unique_key.clone().map(Value::from));
    put("concurrencyKey", arguments.concurrency_key.clone().map(Value::from));
    put("webhookUrl", arguments.webhook_url.clone().map(Value::from));
    put("expiresAt", arguments.expires_at.clone().map(Value::from));
    put("correlationId", arguments.correlation_id.clone().map(Value::from));
    put("tags", (!arguments.tags.is_empty()).then(|| arguments.tags.clone().into()));
    put("dependsOn", (!arguments.after.is_empty()).then(|| arguments.after.clone().into()));
    let mut body = serde_json::to_string(&fields).map_err(|error| CommandError::Other(error.to_string()))?;
    body.truncate(body.len() - 1);
    body.push_str(",\"payload\":");
    body.push_str(payload.get());
    body.push('}');
    Ok(body)
}
