//! The frames that a worker sends, as text.

use std::{borrow::Cow, time::Duration};

use faena_domain::Progress;
use faena_wire::frames::{HeldRun, WorkerFrame};
use serde_json::value::{RawValue, to_raw_value};
use tokio_tungstenite::tungstenite::Utf8Bytes;

use crate::{JobError, definition::Definition, ledger::Key};

pub(crate) fn register(definition: &Definition, worker_id: &str, holds: Vec<HeldRun>) -> Utf8Bytes {
    text(&WorkerFrame {
        worker_id: Some(Cow::Borrowed(worker_id)),
        name: definition.name.as_deref().map(Cow::Borrowed),
        capabilities: Some(definition.handlers.names()),
        queues: (!definition.queues.is_empty()).then(|| definition.queues.clone()),
        concurrency: Some(definition.concurrency),
        token: definition.address.token().map(Cow::Borrowed),
        holds: Some(holds),
        ..named("register")
    })
}

/// One that is about no job: `heartbeat`, `drain`, `leave`.
pub(crate) fn plain(kind: &'static str) -> Utf8Bytes {
    text(&named(kind))
}

pub(crate) fn progress(key: Key, progress: Progress) -> Utf8Bytes {
    text(&WorkerFrame { progress: Some(progress), ..about(key, "progress") })
}

pub(crate) fn log(key: Key, message: &str) -> Utf8Bytes {
    text(&WorkerFrame { message: Some(Cow::Borrowed(message)), ..about(key, "log") })
}

pub(crate) fn step(key: Key, name: &str, result: &RawValue, total_steps: Option<u32>) -> Utf8Bytes {
    let name = Some(Cow::Borrowed(name));
    text(&WorkerFrame { name, result: Some(result), total_steps, ..about(key, "step") })
}

pub(crate) fn complete(key: Key, result: &RawValue) -> Utf8Bytes {
    let result = (result.get() != "null").then_some(result);
    text(&WorkerFrame { result, ..about(key, "complete") })
}

pub(crate) fn fail(key: Key, error: &JobError) -> Utf8Bytes {
    let message = to_raw_value(error.message()).expect("a text is JSON");
    text(&WorkerFrame {
        error: Some(&message),
        retryable: Some(error.is_retryable()),
        retry_after_ms: error.retry_after().map(ms),
        ..about(key, "fail")
    })
}

pub(crate) fn release(key: Key) -> Utf8Bytes {
    text(&about(key, "release"))
}

fn named(kind: &'static str) -> WorkerFrame<'static> {
    WorkerFrame { kind: Cow::Borrowed(kind), ..WorkerFrame::default() }
}

fn about(key: Key, kind: &'static str) -> WorkerFrame<'static> {
    WorkerFrame { job_id: Some(key.job), run: Some(key.run), ..named(kind) }
}

fn text(frame: &WorkerFrame<'_>) -> Utf8Bytes {
    // Large enough for a report without a result, so that the buffer grows rarely.
    let mut bytes = Vec::with_capacity(128);
    serde_json::to_writer(&mut bytes, frame).expect("a frame has text keys only");
    String::from_utf8(bytes).expect("JSON is UTF-8").into()
}

fn ms(delay: Duration) -> u64 {
    u64::try_from(delay.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use faena_domain::JobId;

    use super::*;

    #[test]
    fn a_report_has_what_it_needs_and_no_more() {
        let key = Key { job: JobId("0199a3c4-0000-7000-8000-000000000001".parse().expect("an id")), run: 7 };
        let job = r#""jobId":"0199a3c4-0000-7000-8000-000000000001","run":7"#;
        let raw = |text: &str| RawValue::from_string(text.into()).expect("json");
        assert_eq!(complete(key, &raw("null")).as_str(), format!(r#"{{"type":"complete",{job}}}"#));
        assert_eq!(
            step(key, "E1", &raw("[1.0]"), Some(9)).as_str(),
            format!(r#"{{"type":"step","name":"E1",{job},"result":[1.0],"totalSteps":9}}"#)
        );
        let error = JobError::retry("\"busy\"").after(Duration::from_secs(2));
        assert_eq!(
            fail(key, &error).as_str(),
            format!(r#"{{"type":"fail",{job},"error":"\"busy\"","retryable":true,"retryAfterMs":2000}}"#)
        );
    }
}
