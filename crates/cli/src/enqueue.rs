//! `faena enqueue`.

use std::{io::Read, process::ExitCode};

use clap::Args;
use faena_wire::Created;
use reqwest::Method;
use serde_json::{Map, Value, value::RawValue};

use crate::{Client, Connection, Problem, print, watch};

#[derive(Args)]
pub struct Arguments {
    /// What to do: noop, sleep, http.request, or a type that one of your workers knows
    #[arg(value_name = "TYPE")]
    kind: String,
    /// A JSON object; `-` reads it from standard input
    #[arg(default_value = "{}", value_name = "PAYLOAD")]
    payload: String,
    /// A name for people [default: the type]
    #[arg(long)]
    name: Option<String>,
    #[arg(long)]
    queue: Option<String>,
    /// LOW, NORMAL, HIGH or CRITICAL
    #[arg(long)]
    priority: Option<String>,
    /// Not before this time, like 2026-11-15T20:00:00Z
    #[arg(long, value_name = "TIME")]
    at: Option<String>,
    /// Not before this many milliseconds from now
    #[arg(long, value_name = "MS", conflicts_with = "at")]
    delay_ms: Option<i64>,
    #[arg(long, value_name = "N")]
    max_retries: Option<u32>,
    #[arg(long, value_name = "MS")]
    timeout_ms: Option<u64>,
    #[arg(long = "tag", value_name = "TAG")]
    tags: Vec<String>,
    /// Ids of jobs that have to complete first
    #[arg(long = "after", value_name = "ID")]
    after: Vec<String>,
    #[arg(long)]
    unique_key: Option<String>,
    /// Jobs with the same key run one at a time, or as many as a limit says
    #[arg(long)]
    concurrency_key: Option<String>,
    /// Where to tell how it ended
    #[arg(long, value_name = "URL")]
    webhook_url: Option<String>,
    /// Fail it if nobody has taken it by then, like 2026-11-15T20:00:00Z
    #[arg(long, value_name = "TIME")]
    expires_at: Option<String>,
    #[arg(long)]
    idempotency_key: Option<String>,
    #[arg(long)]
    correlation_id: Option<String>,
    /// Follow the job to its end
    #[arg(long)]
    watch: bool,
    #[command(flatten)]
    connection: Connection,
}

pub async fn run(arguments: Arguments) -> Result<ExitCode, Problem> {
    let client = Client::new(&arguments.connection)?;
    let body = body(&arguments)?;
    let mut request =
        client.request(Method::POST, "/api/v1/jobs").header("content-type", "application/json").body(body);
    if let Some(key) = &arguments.idempotency_key {
        request = request.header("idempotency-key", key);
    }
    let created: Created = client.call(request).await?;
    if arguments.watch {
        return watch::watch(&client, &created.id.to_string(), arguments.connection.json).await;
    }
    if arguments.connection.json {
        print(&serde_json::to_string(&created).map_err(|e| Problem::Other(e.to_string()))?);
    } else {
        print(&created.id.to_string());
    }
    Ok(ExitCode::SUCCESS)
}

/// The body with the payload as it was given: no number in it is touched.
fn body(arguments: &Arguments) -> Result<String, Problem> {
    let text = if arguments.payload == "-" {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).map_err(|e| Problem::Other(format!("standard input: {e}")))?;
        text
    } else {
        arguments.payload.clone()
    };
    let payload: Box<RawValue> =
        serde_json::from_str(text.trim()).map_err(|e| Problem::Usage(format!("the payload is not valid JSON: {e}")))?;
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
    let mut body = serde_json::to_string(&fields).map_err(|e| Problem::Other(e.to_string()))?;
    body.truncate(body.len() - 1);
    body.push_str(",\"payload\":");
    body.push_str(payload.get());
    body.push('}');
    Ok(body)
}
