//! What a worker says about a job, made sound: the same rules whichever door it comes through.

use faena_domain::{ErrorCode, Failure, JobId, Progress, Run, parse::check_json};
use faena_engine::workers::{Refusal, Report, ReportKind};

/// The longest line of log, and the longest error, that is kept.
const LONGEST_LINE: usize = 16 << 10;
const LONGEST_ERROR: usize = 64 << 10;

pub type Sound<T> = Result<T, Refusal>;

fn invalid(field: &str, message: &str) -> Refusal {
    Refusal::new(ErrorCode::ValidationError, format!("{field}: {message}"))
}

pub fn about(job_id: Option<JobId>, run: Option<Run>, kind: ReportKind) -> Sound<Report> {
    let job_id = job_id.ok_or_else(|| invalid("jobId", "must name the job"))?;
    Ok(Report { job_id, run, kind })
}

pub fn complete(result: Option<&str>) -> Sound<ReportKind> {
    let result = result.filter(|text| *text != "null");
    if let Some(text) = result {
        check_json(text).map_err(|what| invalid("result", &what))?;
    }
    Ok(ReportKind::Complete { result: result.map(str::to_owned) })
}

pub fn fail(error: String, retryable: Option<bool>, retry_after_ms: Option<u64>) -> ReportKind {
    let message = clean(if error.is_empty() { "failed without saying why".into() } else { error }, LONGEST_ERROR);
    ReportKind::Fail(Failure { retryable: retryable.unwrap_or(true), retry_after_ms, ..Failure::error(message) })
}

/// An error is a text, or any JSON, which is kept as it was written.
pub fn error_text(raw: Option<&str>) -> String {
    let Some(raw) = raw else { return String::new() };
    serde_json::from_str::<String>(raw).unwrap_or_else(|_| raw.to_owned())
}

pub fn step(name: Option<String>, result: Option<&str>, total: Option<u32>) -> Sound<ReportKind> {
    let name = name.unwrap_or_default();
    let length = name.chars().count();
    if length == 0 || length > 100 || name.chars().any(char::is_control) {
        return Err(invalid("name", "must have 1 to 100 characters, none of them a control character"));
    }
    let result = result.unwrap_or("null");
    check_json(result).map_err(|what| invalid("result", &what))?;
    if total.is_some_and(|total| total == 0 || total > 100_000) {
        return Err(invalid("totalSteps", "must be from 1 to 100000"));
    }
    Ok(ReportKind::Step { name, result: result.to_owned(), total })
}

pub fn progress(progress: Option<Progress>) -> Sound<ReportKind> {
    let mut progress = progress.ok_or_else(|| invalid("progress", "must be an object"))?;
    if progress.percentage.is_some_and(|part| !(0.0..=100.0).contains(&part)) {
        return Err(invalid("progress.percentage", "must be from 0 to 100"));
    }
    for text in [&mut progress.phase, &mut progress.current_step, &mut progress.message] {
        *text = text.take().map(|text| clean(text, LONGEST_LINE));
    }
    Ok(ReportKind::Progress(progress))
}

pub fn log(message: Option<String>) -> Sound<ReportKind> {
    let message = message.filter(|text| !text.is_empty()).ok_or_else(|| invalid("message", "must be a text"))?;
    Ok(ReportKind::Log(clean(message, LONGEST_LINE)))
}

/// Cut to a bound, and without the one character that no PostgreSQL text can hold.
fn clean(mut text: String, longest: usize) -> String {
    if text.len() > longest {
        let end = (0..=longest).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
    if text.contains('\0') { text.replace('\0', "\u{fffd}") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_and_unstorable_texts_are_made_sound() {
        let ReportKind::Log(text) = log(Some("ä".repeat(LONGEST_LINE))).expect("sound") else { panic!() };
        assert!(text.len() <= LONGEST_LINE + 3 && text.ends_with('…'));
        let ReportKind::Fail(failure) = fail("a\0b".into(), None, None) else { panic!() };
        assert_eq!(failure.message, "a\u{fffd}b");
    }

    #[test]
    fn an_error_may_be_any_json() {
        assert_eq!(error_text(Some("\"broken\"")), "broken");
        assert_eq!(error_text(Some("{\"code\":7}")), "{\"code\":7}");
    }
}
