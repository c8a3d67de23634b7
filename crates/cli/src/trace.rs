//! `faena trace`: everything with one correlation id, as one timeline.

use std::process::ExitCode;

use clap::Args;
use faena_domain::{JobId, TaskId, Trace, TraceEntry};

use crate::{
    Api, CommandError, Connection,
    api::segment,
    output::{shorten, terminal_width},
    table::table,
};

#[derive(Args)]
pub struct Arguments {
    /// Correlation id; for a job or task created without one, its own id
    id: String,
    #[command(flatten)]
    connection: Connection,
}

pub async fn run(arguments: Arguments) -> Result<ExitCode, CommandError> {
    let api = Api::new(&arguments.connection)?;
    api.show(api.get(&format!("/api/v1/trace/{}", segment(&arguments.id))), describe).await
}

fn describe(trace: &Trace) -> String {
    let mut jobs = table(["job", "name", "queue", "status", "depends on"]);
    for (n, job) in trace.jobs.iter().enumerate() {
        let parents: Vec<String> = job.depends_on.iter().map(|parent| label(trace, *parent)).collect();
        jobs.add_row([
            format!("#{} {}", n + 1, job.id),
            job.name.clone(),
            job.queue.clone(),
            job.status.to_string(),
            parents.join(" "),
        ]);
    }
    let mut lines = Vec::new();
    if !trace.tasks.is_empty() {
        let mut tasks = table(["task", "machine", "state", "status", "title"]);
        for (n, task) in trace.tasks.iter().enumerate() {
            tasks.add_row([
                format!("T{} {}", n + 1, task.id),
                format!("{} {}", task.machine, task.version),
                task.state.clone(),
                task.status.clone(),
                task.title.clone().unwrap_or_default(),
            ]);
        }
        lines.push(tasks.to_string());
    }
    if !trace.jobs.is_empty() || trace.tasks.is_empty() {
        lines.push(jobs.to_string());
    }
    if let Some(first) = trace.timeline.first() {
        lines.push(format!("started {}", first.at));
        lines.extend(trace.timeline.iter().map(|entry| timeline_entry(trace, entry, entry.at.ms_since(first.at))));
    }
    lines.extend(trace.omitted.iter().map(|omitted| format!("-- {omitted}")));
    lines.join("\n")
}

fn timeline_entry(trace: &Trace, entry: &TraceEntry, ms: i64) -> String {
    let task = entry.task_id.map(|id| task_label(trace, id));
    let subject = task.or(entry.job_id.map(|id| label(trace, id))).unwrap_or_default();
    let mut line = format!("{:>10}  {subject:<4} {:<8} {:<18}", offset(ms), entry.kind.as_str(), entry.what);
    if let Some(run) = entry.run {
        line.push_str(&format!(" run {run}"));
    }
    if let Some(actor) = entry.worker_id.as_ref().or(entry.actor.as_ref()) {
        line.push_str(&format!(" by {actor}"));
    }
    if !entry.details.is_empty() {
        line.push_str(&format!("  {}", shorten(&entry.details, 100)));
    }
    // Longer lines would wrap.
    shorten(line.trim_end(), terminal_width().unwrap_or(usize::MAX))
}

/// Returns `#2` for the second job of the list.
fn label(trace: &Trace, id: JobId) -> String {
    match trace.jobs.iter().position(|job| job.id == id) {
        Some(n) => format!("#{}", n + 1),
        None => id.to_string(),
    }
}

/// Returns `T2` for the second task of the list.
fn task_label(trace: &Trace, id: TaskId) -> String {
    match trace.tasks.iter().position(|task| task.id == id) {
        Some(n) => format!("T{}", n + 1),
        None => id.to_string(),
    }
}

/// Formats an offset like `+0.012 s`, `+3 m 20 s` or `+2 h 05 m`.
fn offset(ms: i64) -> String {
    let seconds = ms / 1_000;
    match seconds {
        ..60 => format!("+{seconds}.{:03} s", ms % 1_000),
        60..3_600 => format!("+{} m {:02} s", seconds / 60, seconds % 60),
        3_600..86_400 => format!("+{} h {:02} m", seconds / 3_600, seconds / 60 % 60),
        _ => format!("+{} d {:02} h", seconds / 86_400, seconds / 3_600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_from_the_first_entry_use_a_suitable_unit() {
        let shown = [0, 12, 59_999, 60_000, 3_599_000, 3_600_000, 86_400_000 * 2 + 3_600_000].map(offset);
        assert_eq!(shown, ["+0.000 s", "+0.012 s", "+59.999 s", "+1 m 00 s", "+59 m 59 s", "+1 h 00 m", "+2 d 01 h"]);
    }
}
