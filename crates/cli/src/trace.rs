//! `faena trace`: everything with one correlation id, as one timeline.

use std::process::ExitCode;

use clap::Args;
use faena_domain::{JobId, Trace, TraceEntry};
use reqwest::Method;

use crate::{Client, Connection, Problem, table, workers::shorten};

#[derive(Args)]
pub struct Arguments {
    /// The correlation id; that of a job which was given none is its own id
    id: String,
    #[command(flatten)]
    connection: Connection,
}

pub async fn run(arguments: Arguments) -> Result<ExitCode, Problem> {
    let client = Client::new(&arguments.connection)?;
    let id: String = arguments.id.bytes().map(segment).collect();
    let request = client.request(Method::GET, &format!("/api/v1/trace/{id}"));
    client.show(request, shown).await?;
    Ok(ExitCode::SUCCESS)
}

/// One byte of a path's segment.
fn segment(byte: u8) -> String {
    if byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) {
        char::from(byte).to_string()
    } else {
        format!("%{byte:02X}")
    }
}

fn shown(trace: &Trace) -> String {
    let mut jobs = table(["job", "name", "queue", "status", "waits for"]);
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
    let mut lines = vec![jobs.to_string()];
    if let Some(first) = trace.timeline.first() {
        lines.push(format!("began {}", first.at));
        lines.extend(trace.timeline.iter().map(|entry| line(trace, entry, entry.at.ms_since(first.at))));
    }
    lines.extend(trace.omitted.iter().map(|omitted| format!("-- {omitted}")));
    lines.join("\n")
}

fn line(trace: &Trace, entry: &TraceEntry, ms: i64) -> String {
    let job = entry.job_id.map(|id| label(trace, id)).unwrap_or_default();
    let mut line = format!("{:>10}  {job:<4} {:<8} {:<18}", since(ms), entry.kind.as_str(), entry.what);
    if let Some(run) = entry.run {
        line.push_str(&format!(" run {run}"));
    }
    if let Some(who) = entry.worker_id.as_ref().or(entry.actor.as_ref()) {
        line.push_str(&format!(" by {who}"));
    }
    if !entry.details.is_empty() {
        line.push_str(&format!("  {}", shorten(&entry.details, 100)));
    }
    line.trim_end().to_owned()
}

/// `#2`: the second job of the list above.
fn label(trace: &Trace, id: JobId) -> String {
    match trace.jobs.iter().position(|job| job.id == id) {
        Some(n) => format!("#{}", n + 1),
        None => id.to_string(),
    }
}

/// `+0.012 s`, `+3 m 20 s`, `+2 h 05 m`.
fn since(ms: i64) -> String {
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
    fn times_are_told_from_the_beginning_in_the_unit_that_fits() {
        let shown = [0, 12, 59_999, 60_000, 3_599_000, 3_600_000, 86_400_000 * 2 + 3_600_000].map(since);
        assert_eq!(shown, ["+0.000 s", "+0.012 s", "+59.999 s", "+1 m 00 s", "+59 m 59 s", "+1 h 00 m", "+2 d 01 h"]);
    }

    #[test]
    fn a_correlation_id_goes_into_the_address_whatever_it_is() {
        let text: String = "order/7 ñ".bytes().map(segment).collect();
        assert_eq!(text, "order%2F7%20%C3%B1");
    }
}
