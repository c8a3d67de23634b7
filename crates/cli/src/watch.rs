//! Follows a job until it finishes, with a progress bar.

use std::{collections::BTreeMap, process::ExitCode, time::Duration};

use faena::{Job, JobState, Progress};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::value::RawValue;

use crate::{
    Api, CommandError,
    jobs::path,
    output::{one_line, print},
};

const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// How many times in a row the stream may fail to open.
const MAX_FAILURES: u32 = 30;

pub async fn watch(api: &Api, id: &str) -> Result<ExitCode, CommandError> {
    let mut display = Display::new(api.json);
    until_finished(async || Ok(follow(api, id, &mut display).await?.map(|state| state == JobState::Completed))).await
}

/// Calls `follow` until it returns whether the job or task completed. `follow` returns `None` if its stream ends before
/// that, for example because the server restarts, and is then called again.
pub async fn until_finished(
    mut follow: impl AsyncFnMut() -> Result<Option<bool>, CommandError>,
) -> Result<ExitCode, CommandError> {
    let mut failures = 0;
    loop {
        let retry_after = match follow().await {
            Ok(Some(true)) => return Ok(ExitCode::SUCCESS),
            Ok(Some(false)) => return Ok(ExitCode::FAILURE),
            Ok(None) => {
                failures = 0;
                None
            }
            Err(error) if failures < MAX_FAILURES && is_temporary(&error) => {
                failures += 1;
                error.retry_after()
            }
            Err(error) => return Err(error),
        };
        tokio::time::sleep(RETRY_INTERVAL.max(retry_after.unwrap_or_default())).await;
    }
}

/// Returns whether the server is unreachable, or asks to try again later.
fn is_temporary(error: &CommandError) -> bool {
    matches!(error, CommandError::Api(faena::Error::Unreachable { .. })) || error.retry_after().is_some()
}

/// Follows the stream of a job. Returns its final state, or `None` if the stream ends before that.
async fn follow(api: &Api, id: &str, display: &mut Display) -> Result<Option<JobState>, CommandError> {
    let mut stream = api.get(&path(id, "/events")).stream().await?;
    let mut known = KnownFields::default();
    while let Some(event) = stream.next().await {
        if event.data.is_empty() {
            continue;
        }
        let is_first = known.0.is_empty();
        let job = known
            .apply(&event.data)
            .map_err(|error| CommandError::Other(format!("cannot read an event of the job: {error}")))?;
        if is_first {
            display.skip_printed(&job);
        }
        display.update(&job, &event.data);
        if job.is_finished() {
            return Ok(Some(job.status));
        }
    }
    Ok(None)
}

/// The fields of a job: the first event of a stream has all of them, later ones those that have changed.
#[derive(Default)]
pub struct KnownFields(BTreeMap<String, Box<RawValue>>);

impl KnownFields {
    /// Applies an event. Returns the job with the log entries that are new in this event.
    pub fn apply(&mut self, data: &str) -> serde_json::Result<Job> {
        let change: BTreeMap<String, Box<RawValue>> = serde_json::from_str(data)?;
        self.0.remove("executionLog");
        for (name, value) in change {
            match value.get() {
                "null" => self.0.remove(&name),
                _ => self.0.insert(name, value),
            };
        }
        serde_json::from_str(&serde_json::to_string(&self.0)?)
    }
}

struct Display {
    json: bool,
    bar: ProgressBar,
    /// How many log entries were printed.
    printed: usize,
    /// How many log entries of the next event were printed before the connection was lost.
    to_skip: usize,
}

impl Display {
    fn new(json: bool) -> Display {
        let bar = if json { ProgressBar::hidden() } else { ProgressBar::new(100) };
        if let Ok(style) = ProgressStyle::with_template("{spinner} {prefix:<10} [{bar:30}] {percent:>3} %  {msg}") {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.enable_steady_tick(Duration::from_millis(120));
        Display { json, bar, printed: 0, to_skip: 0 }
    }

    /// Skips the log entries that were printed before, because the first event of a stream repeats the whole log.
    fn skip_printed(&mut self, job: &Job) {
        self.to_skip = self.printed.min(job.execution_log.len());
        self.printed -= self.to_skip;
    }

    fn update(&mut self, job: &Job, data: &str) {
        if self.json {
            print(data);
            return;
        }
        for entry in job.execution_log.iter().skip(std::mem::take(&mut self.to_skip)) {
            self.bar.suspend(|| {
                print(format!("{}  {:<16} {}", entry.timestamp, entry.event, entry.details).trim_end());
            });
        }
        self.printed += job.execution_log.len();
        self.bar.set_prefix(job.status.to_string());
        if let Some(progress) = &job.progress {
            if let Some(percentage) = percentage(progress) {
                self.bar.set_position(percentage.clamp(0.0, 100.0) as u64);
            }
            self.bar.set_message(one_line(&progress_text(progress)));
        }
        if job.is_finished() {
            self.bar.finish_and_clear();
            let error = job.error.as_ref().filter(|_| job.status != JobState::Completed);
            let result = job.result.as_ref().map(|result| result.get().to_owned());
            let ending = error.cloned().or(result).map(|text| format!(": {text}")).unwrap_or_default();
            print(&format!("{} {}{ending}", job.id, job.status));
        }
    }
}

pub fn percentage(progress: &Progress) -> Option<f64> {
    progress.percentage.or_else(|| {
        let total = progress.total_steps.filter(|total| *total > 0)?;
        Some(f64::from(progress.completed_steps?) * 100.0 / f64::from(total))
    })
}

/// Describes progress in one line: `upload  E4  3 of 9 steps, 33 %  almost there`.
pub fn progress_text(progress: &Progress) -> String {
    let steps = progress.completed_steps.zip(progress.total_steps);
    let steps = steps.map(|(completed, total)| format!("{completed} of {total} steps"));
    let percent = percentage(progress).map(|percentage| format!("{percentage:.0} %"));
    let amount: Vec<String> = [steps, percent].into_iter().flatten().collect();
    let amount = Some(amount.join(", ")).filter(|amount| !amount.is_empty());
    let parts: Vec<String> = [progress.phase.clone(), progress.current_step.clone(), amount, progress.message.clone()]
        .into_iter()
        .flatten()
        .collect();
    parts.join("  ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_applied_to_the_first_event_of_a_stream() {
        let whole = r#"{"id":"01a1e1b6-d8d7-7007-820a-3ff640398a18","name":"n","type":"t","queue":"q","status":"QUEUED",
            "priority":"NORMAL","payload":{},"maxRetries":0,"retryCount":0,"retryDelay":0,"backoffMultiplier":1.0,
            "maxDelay":0,"jitter":0.0,"retryOn":[],"createdAt":"2026-11-17T00:00:00.000Z",
            "updatedAt":"2026-11-17T00:00:00.000Z","workerId":"w","correlationId":"c","tags":[],"dependsOn":[],
            "executionLog":[{"timestamp":"2026-11-17T00:00:00.000Z","event":"created"}]}"#;
        let mut known = KnownFields::default();
        assert_eq!(known.apply(whole).expect("a job").execution_log.len(), 1);
        let job = known.apply(r#"{"id":"01a1e1b6-d8d7-7007-820a-3ff640398a18","status":"PROCESSING","workerId":null}"#);
        let job = job.expect("a job");
        assert_eq!((job.status, job.worker_id, job.execution_log.len()), (JobState::Processing, None, 0));
        assert_eq!(job.name, "n", "what has not changed is kept");
    }

    #[test]
    fn progress_is_one_line_with_whole_percent() {
        let progress = Progress::new().phase("upload").steps(3, 9).message("soon");
        assert_eq!(progress_text(&progress), "upload  3 of 9 steps, 33 %  soon");
        assert_eq!(progress_text(&Progress::new().percentage(40.0)), "40 %");
        assert_eq!(progress_text(&Progress::new()), "");
    }
}
