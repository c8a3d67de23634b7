//! Writes the frames that a worker sends.

use std::{borrow::Cow, time::Duration};

use serde_json::value::RawValue;
use tokio_tungstenite::tungstenite::Utf8Bytes;

use crate::{
    JobError, Progress,
    frames::{RunKey, Secret, WorkerFrame, WorkerFrameKind},
    settings::Settings,
};

pub(crate) fn register(
    settings: &Settings,
    worker_id: &str,
    session_token: Option<&str>,
    in_flight: Vec<RunKey>,
) -> Utf8Bytes {
    let secret = |text| Secret(Cow::Borrowed(text));
    encode(&WorkerFrame {
        worker_id: Some(worker_id),
        name: settings.name.as_deref(),
        version: settings.version.as_deref(),
        capabilities: Some(settings.handlers.names()),
        queues: (!settings.queues.is_empty()).then_some(&settings.queues),
        concurrency: Some(settings.concurrency),
        token: settings.address.token().map(secret),
        session_token: session_token.map(secret),
        in_flight: Some(in_flight),
        ..WorkerFrame::new(WorkerFrameKind::Register)
    })
}

pub(crate) fn heartbeat() -> Utf8Bytes {
    encode(&WorkerFrame::new(WorkerFrameKind::Heartbeat))
}

pub(crate) fn drain() -> Utf8Bytes {
    encode(&WorkerFrame::new(WorkerFrameKind::Drain))
}

pub(crate) fn leave() -> Utf8Bytes {
    encode(&WorkerFrame::new(WorkerFrameKind::Leave))
}

pub(crate) fn progress(key: RunKey, progress: Progress) -> Utf8Bytes {
    encode(&WorkerFrame { progress: Some(progress), ..report(key, WorkerFrameKind::Progress) })
}

pub(crate) fn log(key: RunKey, event: Option<&str>, message: &str) -> Utf8Bytes {
    encode(&WorkerFrame { message: Some(message), event, ..report(key, WorkerFrameKind::Log) })
}

pub(crate) fn step(key: RunKey, name: &str, result: &RawValue, total_steps: Option<u32>) -> Utf8Bytes {
    let frame = report(key, WorkerFrameKind::Step);
    encode(&WorkerFrame { name: Some(name), result: Some(result), total_steps, ..frame })
}

pub(crate) fn complete(key: RunKey, result: &RawValue) -> Utf8Bytes {
    let result = (result.get() != "null").then_some(result);
    encode(&WorkerFrame { result, ..report(key, WorkerFrameKind::Complete) })
}

pub(crate) fn fail(key: RunKey, error: &JobError) -> Utf8Bytes {
    encode(&WorkerFrame {
        error: Some(error.message()),
        retryable: Some(error.is_retryable()),
        retry_after_ms: error.retry_after().map(as_millis),
        ..report(key, WorkerFrameKind::Fail)
    })
}

pub(crate) fn release(key: RunKey) -> Utf8Bytes {
    encode(&report(key, WorkerFrameKind::Release))
}

fn report(key: RunKey, kind: WorkerFrameKind) -> WorkerFrame<'static> {
    WorkerFrame { job_id: Some(key.job), run: Some(key.run), ..WorkerFrame::new(kind) }
}

fn encode(frame: &WorkerFrame<'_>) -> Utf8Bytes {
    // Large enough for a report without a result, so that the buffer rarely grows.
    let mut bytes = Vec::with_capacity(128);
    serde_json::to_writer(&mut bytes, frame).expect("a frame has text keys only");
    String::from_utf8(bytes).expect("JSON is UTF-8").into()
}

fn as_millis(delay: Duration) -> u64 {
    u64::try_from(delay.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_contains_only_the_fields_it_needs() {
        let job = "0199a3c4-0000-7000-8000-000000000001".parse().expect("an id");
        let key = RunKey { job, run: 7.into() };
        let job = r#""jobId":"0199a3c4-0000-7000-8000-000000000001","run":7"#;
        let raw = |text: &str| RawValue::from_string(text.into()).expect("json");
        assert_eq!(heartbeat().as_str(), r#"{"type":"heartbeat"}"#);
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
