//! Follows a job to its end, with a bar that shows what its worker tells.

use std::{process::ExitCode, time::Duration};

use faena_domain::{JobState, JobView, Progress};
use indicatif::{ProgressBar, ProgressStyle};
use reqwest::Method;

use crate::{
    Client, Problem, print,
    sse::{Message, Messages},
};

/// How often a broken stream is taken up again before giving up.
const PATIENCE: u32 = 30;

pub async fn watch(client: &Client, id: &str, json: bool) -> Result<ExitCode, Problem> {
    let mut show = Show::new(json);
    let mut failures = 0;
    loop {
        match follow(client, id, &mut show).await {
            Ok(Some(state)) => {
                return Ok(if state == JobState::Completed { ExitCode::SUCCESS } else { ExitCode::FAILURE });
            }
            // The stream ended before the job, as when the server restarts: take it up again.
            Ok(None) => failures = 0,
            Err(problem @ (Problem::Refused { .. } | Problem::Usage(_))) => return Err(problem),
            Err(problem) => {
                failures += 1;
                if failures > PATIENCE {
                    return Err(problem);
                }
            }
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// `Some`: how the job ended.
async fn follow(client: &Client, id: &str, show: &mut Show) -> Result<Option<JobState>, Problem> {
    let request = client.request(Method::GET, &format!("/api/v1/jobs/{id}/events"));
    let mut messages = Messages::new(client.send(request).await?.bytes_stream());
    while let Some(Message { data, .. }) = messages.next().await {
        if data.is_empty() {
            continue;
        }
        let job: JobView =
            serde_json::from_str(&data).map_err(|e| Problem::Other(format!("the stream was not understood: {e}")))?;
        show.update(&job, &data);
        if job.status.is_terminal() {
            return Ok(Some(job.status));
        }
    }
    Ok(None)
}

struct Show {
    json: bool,
    bar: ProgressBar,
    lines: usize,
}

impl Show {
    fn new(json: bool) -> Show {
        let bar = if json { ProgressBar::hidden() } else { ProgressBar::new(100) };
        if let Ok(style) = ProgressStyle::with_template("{spinner} {prefix:<10} [{bar:30}] {percent:>3} %  {msg}") {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.enable_steady_tick(Duration::from_millis(120));
        Show { json, bar, lines: 0 }
    }

    fn update(&mut self, job: &JobView, data: &str) {
        if self.json {
            print(data);
            return;
        }
        for entry in job.execution_log.iter().skip(self.lines) {
            self.bar.suspend(|| {
                print(format!("{}  {:<16} {}", entry.timestamp, entry.event.as_str(), entry.details).trim_end());
            });
        }
        self.lines = job.execution_log.len().max(self.lines);
        self.bar.set_prefix(job.status.to_string());
        if let Some(progress) = &job.progress {
            if let Some(percentage) = percentage(progress) {
                self.bar.set_position(percentage.clamp(0.0, 100.0) as u64);
            }
            self.bar.set_message(progress_text(progress));
        }
        if job.status.is_terminal() {
            self.bar.finish_and_clear();
            let error = job.error.as_ref().filter(|_| job.status != JobState::Completed);
            let result = job.result.as_ref().map(|result| result.get().to_owned());
            let ending = error.cloned().or(result).map(|text| format!(": {text}")).unwrap_or_default();
            print(&format!("{} {}{ending}", job.id, job.status));
        }
    }
}

fn percentage(progress: &Progress) -> Option<f64> {
    progress.percentage.or_else(|| {
        let total = progress.total_steps.filter(|total| *total > 0)?;
        Some(f64::from(progress.completed_steps?) * 100.0 / f64::from(total))
    })
}

pub fn progress_text(progress: &Progress) -> String {
    let steps = progress.completed_steps.zip(progress.total_steps).map(|(done, total)| format!("{done}/{total}"));
    let parts: Vec<String> = [progress.phase.clone(), progress.current_step.clone(), steps, progress.message.clone()]
        .into_iter()
        .flatten()
        .collect();
    parts.join("  ")
}
