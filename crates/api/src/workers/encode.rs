//! Encodes messages to workers as JSON.
//!
//! Writes the JSON text directly, so that a payload is copied unchanged and not parsed again.

use std::fmt::Write;

use faena_engine::workers::{Ack, Delivery, Rejection};

/// Appends a field with a string value.
fn string_field(json: &mut String, name: &str, value: &str) {
    json.push_str(",\"");
    json.push_str(name);
    json.push_str("\":");
    string(json, value);
}

/// Appends a string. Most strings need no escapes and are copied.
fn string(json: &mut String, value: &str) {
    if value.bytes().all(|byte| byte >= 0x20 && byte != b'"' && byte != b'\\') {
        json.push('"');
        json.push_str(value);
        json.push('"');
    } else {
        json.push_str(&serde_json::to_string(value).expect("a string is JSON"));
    }
}

/// Appends a job as an object.
pub fn job(json: &mut String, delivery: &Delivery) {
    let Delivery { job, lane, deadline, steps, traceparent } = delivery;
    let job = &job.claimed;
    json.reserve(job.payload.len() + 320);
    let _ = write!(json, "{{\"id\":\"{}\"", job.id);
    string_field(json, "name", job.options.name.as_deref().unwrap_or(&lane.kind));
    string_field(json, "type", &lane.kind);
    string_field(json, "queue", &lane.queue);
    json.push_str(",\"payload\":");
    json.push_str(&job.payload);
    let (retries, max_retries) = (job.retry_count, job.options.retry.max_retries);
    let (run, attempt) = (job.run, job.attempt());
    let _ = write!(json, ",\"run\":{run},\"attempt\":{attempt},\"retryCount\":{retries},\"maxRetries\":{max_retries}");
    match &job.correlation_id {
        Some(correlation_id) => string_field(json, "correlationId", correlation_id),
        None => {
            let _ = write!(json, ",\"correlationId\":\"{}\"", job.id);
        }
    }
    if let Some(traceparent) = traceparent {
        string_field(json, "traceparent", traceparent);
    }
    if let Some(schedule) = &job.options.schedule_id {
        string_field(json, "scheduleId", schedule);
    }
    if let Some(due) = job.options.schedule_due {
        let _ = write!(json, ",\"scheduleDue\":\"{due}\"");
    }
    let _ = write!(json, ",\"deadline\":\"{deadline}\",\"steps\":[");
    for (index, step) in steps.iter().enumerate() {
        json.push_str(if index > 0 { ",{\"name\":" } else { "{\"name\":" });
        string(json, &step.name);
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
    json.push_str(ack.report);
    json.push_str(if ack.rejection.is_none() { "\",\"ok\":true" } else { "\",\"ok\":false" });
    if let Some(rejection) = &ack.rejection {
        json.push_str(",\"error\":");
        json.push_str(&error(rejection));
    }
    json.push('}');
    json
}

pub fn error(rejection: &Rejection) -> String {
    let message = serde_json::to_string(&rejection.message).expect("a string is JSON");
    format!("{{\"code\":\"{}\",\"message\":{message}}}", rejection.code)
}
