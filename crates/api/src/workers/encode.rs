//! Writes what a worker is told, as JSON. By hand: a payload passes through to the letter without being read again.

use std::fmt::Write;

use faena_engine::workers::{Ack, Delivery, Refusal};

/// A field whose value is a text.
fn text(into: &mut String, name: &str, value: &str) {
    into.push_str(",\"");
    into.push_str(name);
    into.push_str("\":");
    quoted(into, value);
}

/// Most texts need no escape and are copied.
fn quoted(into: &mut String, value: &str) {
    if value.bytes().all(|byte| byte >= 0x20 && byte != b'"' && byte != b'\\') {
        into.push('"');
        into.push_str(value);
        into.push('"');
    } else {
        into.push_str(&serde_json::to_string(value).expect("a string is JSON"));
    }
}

/// Appends the job, as an object.
pub fn job(json: &mut String, delivery: &Delivery) {
    let Delivery { held, lane, deadline, steps } = delivery;
    let job = &held.job;
    json.reserve(job.payload.len() + 320);
    let _ = write!(json, "{{\"id\":\"{}\"", job.id);
    text(json, "name", job.options.name.as_deref().unwrap_or(&lane.kind));
    text(json, "type", &lane.kind);
    text(json, "queue", &lane.queue);
    json.push_str(",\"payload\":");
    json.push_str(&job.payload);
    let (retries, most) = (job.retry_count, job.options.retry.max_retries);
    let _ = write!(json, ",\"run\":{},\"retryCount\":{retries},\"maxRetries\":{most}", job.run);
    match &job.correlation_id {
        Some(correlation) => text(json, "correlationId", correlation),
        None => {
            let _ = write!(json, ",\"correlationId\":\"{}\"", job.id);
        }
    }
    if let Some(traceparent) = &job.options.traceparent {
        text(json, "traceparent", traceparent);
    }
    if let Some(schedule) = &job.options.schedule_id {
        text(json, "scheduleId", schedule);
    }
    if let Some(due) = job.options.schedule_due {
        let _ = write!(json, ",\"scheduleDue\":\"{due}\"");
    }
    let _ = write!(json, ",\"deadline\":\"{deadline}\",\"steps\":[");
    for (index, step) in steps.iter().enumerate() {
        json.push_str(if index > 0 { ",{\"name\":" } else { "{\"name\":" });
        quoted(json, &step.name);
        json.push_str(",\"result\":");
        json.push_str(step.result.get());
        json.push('}');
    }
    json.push_str("]}");
}

pub fn ack(ack: &Ack) -> String {
    let mut json = String::with_capacity(112);
    let _ = write!(json, "{{\"type\":\"ack\",\"jobId\":\"{}\"", ack.job_id);
    if let Some(run) = ack.run {
        let _ = write!(json, ",\"run\":{run}");
    }
    json.push_str(",\"of\":\"");
    json.push_str(ack.of);
    json.push_str(if ack.refusal.is_none() { "\",\"ok\":true" } else { "\",\"ok\":false" });
    if let Some(refusal) = &ack.refusal {
        json.push_str(",\"error\":");
        json.push_str(&error(refusal));
    }
    json.push('}');
    json
}

pub fn error(refusal: &Refusal) -> String {
    let message = serde_json::to_string(&refusal.message).expect("a string is JSON");
    format!("{{\"code\":\"{}\",\"message\":{message}}}", refusal.code)
}
