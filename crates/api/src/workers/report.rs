//! Validates what workers report about jobs, with the same rules for every transport.

use faena_domain::{ErrorCode, Failure, JobId, LogEvent, Progress, Run, parse::check_json};
use faena_engine::workers::{Rejection, Report, ReportKind};

/// Maximum length of a log line and of a text in a progress report.
const MAX_LINE_BYTES: usize = 16 << 10;
const MAX_ERROR_BYTES: usize = 64 << 10;

type ReportResult<T> = Result<T, Rejection>;

fn invalid(field: &str, message: &str) -> Rejection {
    Rejection::new(ErrorCode::ValidationError, format!("{field}: {message}"))
}

/// Returns a report about a job. Fails if it names no job.
pub fn new(job_id: Option<JobId>, run: Option<Run>, kind: ReportKind) -> ReportResult<Report> {
    let job_id = job_id.ok_or_else(|| invalid("jobId", "is required"))?;
    Ok(Report { job_id, run, kind })
}

pub fn complete(result: Option<&str>) -> ReportResult<ReportKind> {
    let result = result.filter(|json| *json != "null");
    if let Some(json) = result {
        check_json(json).map_err(|message| invalid("result", &message))?;
    }
    Ok(ReportKind::Complete { result: result.map(str::to_owned) })
}

pub fn fail(error: String, retryable: Option<bool>, retry_after_ms: Option<u64>) -> ReportKind {
    let error = if error.is_empty() { "the worker gave no reason".into() } else { error };
    let message = clean(error, MAX_ERROR_BYTES);
    ReportKind::Fail(Failure { retryable: retryable.unwrap_or(true), retry_after_ms, ..Failure::error(message) })
}

/// Returns the text of an error: a string's content, or any other JSON as it was written.
pub fn error_text(raw: Option<&str>) -> String {
    let Some(raw) = raw else { return String::new() };
    serde_json::from_str::<String>(raw).unwrap_or_else(|_| raw.to_owned())
}

pub fn step(name: Option<String>, result: Option<&str>, total: Option<u32>) -> ReportResult<ReportKind> {
    let name = name.unwrap_or_default();
    let length = name.chars().count();
    if length == 0 || length > 100 || name.chars().any(char::is_control) {
        return Err(invalid("name", "must have 1 to 100 characters and no control characters"));
    }
    let result = result.unwrap_or("null");
    check_json(result).map_err(|message| invalid("result", &message))?;
    if total.is_some_and(|total| total == 0 || total > 100_000) {
        return Err(invalid("totalSteps", "must be between 1 and 100000"));
    }
    Ok(ReportKind::Step { name, result: result.to_owned(), total })
}

pub fn progress(progress: Option<Progress>) -> ReportResult<ReportKind> {
    let mut progress = progress.ok_or_else(|| invalid("progress", "must be an object"))?;
    if progress.percentage.is_some_and(|part| !(0.0..=100.0).contains(&part)) {
        return Err(invalid("progress.percentage", "must be between 0 and 100"));
    }
    for text in [&mut progress.phase, &mut progress.current_step, &mut progress.message] {
        *text = text.take().map(|text| clean(text, MAX_LINE_BYTES));
    }
    Ok(ReportKind::Progress(progress))
}

/// Returns a log line. `event` is the name of its entry in the execution log, `message` if it is absent.
pub fn log(message: Option<String>, event: Option<&str>) -> ReportResult<ReportKind> {
    let message = message.filter(|text| !text.is_empty());
    let message = message.ok_or_else(|| invalid("message", "must be a string that is not empty"))?;
    let event = event.map_or(Ok(LogEvent::Message), LogEvent::custom).map_err(|reason| invalid("event", &reason))?;
    Ok(ReportKind::Log { event, text: clean(message, MAX_LINE_BYTES) })
}

/// Cuts a text to `max_bytes` and replaces the one character that PostgreSQL cannot store in a text.
fn clean(mut text: String, max_bytes: usize) -> String {
    if text.len() > max_bytes {
        let end = (0..=max_bytes).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
    if text.contains('\0') { text.replace('\0', "\u{fffd}") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_and_unstorable_texts_are_cleaned() {
        let line = log(Some("ä".repeat(MAX_LINE_BYTES)), None).expect("a valid line");
        let ReportKind::Log { event: LogEvent::Message, text } = line else { panic!() };
        assert!(text.len() <= MAX_LINE_BYTES + 3 && text.ends_with('…'));
        let ReportKind::Fail(failure) = fail("a\0b".into(), None, None) else { panic!() };
        assert_eq!(failure.message, "a\u{fffd}b");
    }

    #[test]
    fn an_error_may_be_any_json() {
        assert_eq!(error_text(Some("\"broken\"")), "broken");
        assert_eq!(error_text(Some("{\"code\":7}")), "{\"code\":7}");
    }
}
