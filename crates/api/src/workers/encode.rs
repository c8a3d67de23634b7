//! Writes what a worker is told, as JSON. By hand: a payload passes through to the letter without being read again.

use std::fmt::Write;

use faena_engine::workers::{Ack, Delivery, Refusal};

fn text(into: &mut String, name: &str, value: &str) {
    let quoted = serde_json::to_string(value).expect("a string is JSON");
    let _ = write!(into, ",\"{name}\":{quoted}");
}

/// The job as an object.
pub fn job(delivery: &Delivery) -> String {
    let Delivery { held, lane, deadline, steps } = delivery;
    let job = &held.job;
    let mut json = String::with_capacity(job.payload.len() + 320);
    let _ = write!(json, "{{\"id\":\"{}\"", job.id);
    text(&mut json, "name", job.options.name.as_deref().unwrap_or(&lane.kind));
    text(&mut json, "type", &lane.kind);
    text(&mut json, "queue", &lane.queue);
    let _ = write!(json, ",\"payload\":{},\"run\":{}", job.payload, job.run);
    let _ = write!(json, ",\"retryCount\":{},\"maxRetries\":{}", job.retry_count, job.options.retry.max_retries);
    text(&mut json, "correlationId", &held.correlation_id());
    if let Some(traceparent) = &job.options.traceparent {
        text(&mut json, "traceparent", traceparent);
    }
    let _ = write!(json, ",\"deadline\":\"{deadline}\",\"steps\":[");
    for (index, step) in steps.iter().enumerate() {
        let name = serde_json::to_string(&step.name).expect("a string is JSON");
        let comma = if index > 0 { "," } else { "" };
        let _ = write!(json, "{comma}{{\"name\":{name},\"result\":{}}}", step.result.get());
    }
    json.push_str("]}");
    json
}

pub fn ack(ack: &Ack) -> String {
    let mut json = format!("{{\"type\":\"ack\",\"jobId\":\"{}\"", ack.job_id);
    if let Some(run) = ack.run {
        let _ = write!(json, ",\"run\":{run}");
    }
    let _ = write!(json, ",\"of\":\"{}\",\"ok\":{}", ack.of, ack.refusal.is_none());
    if let Some(refusal) = &ack.refusal {
        let _ = write!(json, ",\"error\":{}", error(refusal));
    }
    json.push('}');
    json
}

pub fn error(refusal: &Refusal) -> String {
    let message = serde_json::to_string(&refusal.message).expect("a string is JSON");
    format!("{{\"code\":\"{}\",\"message\":{message}}}", refusal.code)
}
