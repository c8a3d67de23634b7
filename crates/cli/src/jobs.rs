//! `faena jobs …`.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use faena::{ChangedJob, Job, JobId, JobState};
use faena_domain::Why;
use serde::Deserialize;

use crate::{
    Api, CommandError, Connection,
    api::segment,
    output::{Details, age, count, table},
    watch,
};

#[derive(Subcommand)]
pub enum Command {
    /// List jobs, newest first
    #[command(after_help = "Example:\n  faena jobs list --status FAILED,RETRYING --queue mail")]
    List(List),
    /// Show a job's details and log
    #[command(after_help = "Example:\n  faena jobs show 0199a3c4-7e1b-7c51-9d3e-5a7c2f6b8d10")]
    Show(JobArguments),
    /// Follow a job until it finishes
    #[command(
        after_help = "Exits with 0 if the job completes, with 1 if it fails or is cancelled.\n\nExample:\n  faena jobs watch 0199a3c4-7e1b-7c51-9d3e-5a7c2f6b8d10"
    )]
    Watch(JobArguments),
    /// Explain why a job is not running, what it is doing, or how it finished
    #[command(after_help = "Example:\n  faena jobs why 0199a3c4-7e1b-7c51-9d3e-5a7c2f6b8d10")]
    Why(JobArguments),
    /// Cancel a job; the worker of a running job is asked to stop
    #[command(after_help = "Example:\n  faena jobs cancel 0199a3c4-7e1b-7c51-9d3e-5a7c2f6b8d10")]
    Cancel(JobArguments),
    /// Retry a failed or cancelled job
    #[command(after_help = "Example:\n  faena jobs retry 0199a3c4-7e1b-7c51-9d3e-5a7c2f6b8d10")]
    Retry(JobArguments),
}

#[derive(Args)]
pub struct JobArguments {
    /// Job id
    id: String,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct List {
    /// Only jobs in these states: PENDING, QUEUED, SCHEDULED, ASSIGNED, PROCESSING, RETRYING, COMPLETED, FAILED, CANCELLED
    #[arg(long, value_name = "STATE,…")]
    status: Option<String>,
    /// Only jobs of this type
    #[arg(long = "type", value_name = "TYPE")]
    kind: Option<String>,
    /// Only jobs in this queue
    #[arg(long)]
    queue: Option<String>,
    /// Only jobs with this priority: LOW, NORMAL, HIGH or CRITICAL
    #[arg(long)]
    priority: Option<String>,
    /// Only jobs with this tag
    #[arg(long)]
    tag: Option<String>,
    /// Only jobs with this correlation id
    #[arg(long, value_name = "ID")]
    correlation_id: Option<String>,
    /// Only jobs with this text in their type or queue, or with this id or key
    #[arg(short, long, value_name = "TEXT")]
    q: Option<String>,
    /// Maximum number of jobs, up to 100
    #[arg(long, default_value_t = 20, value_name = "N")]
    limit: u32,
    /// Cursor from the previous page
    #[arg(long)]
    cursor: Option<String>,
    #[command(flatten)]
    connection: Connection,
}

/// A page of jobs.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct JobList {
    jobs: Vec<Job>,
    total: u64,
    next_cursor: Option<JobId>,
}

pub async fn run(command: Command) -> Result<ExitCode, CommandError> {
    match command {
        Command::List(list) => show_list(list).await,
        Command::Show(job) => {
            let api = Api::new(&job.connection)?;
            api.show(api.get(&path(&job.id, "")), describe).await
        }
        Command::Watch(job) => watch::watch(&Api::new(&job.connection)?, &job.id).await,
        Command::Why(job) => {
            let api = Api::new(&job.connection)?;
            api.show(api.get(&path(&job.id, "/why")), explain).await
        }
        Command::Cancel(job) => {
            let api = Api::new(&job.connection)?;
            api.show(api.post(&path(&job.id, "/cancel")), cancelled).await
        }
        Command::Retry(job) => {
            let api = Api::new(&job.connection)?;
            api.show(api.post(&path(&job.id, "/retry")), retried).await
        }
    }
}

/// The path of a job.
pub fn path(id: &str, rest: &str) -> String {
    format!("/api/v1/jobs/{}{rest}", segment(id))
}

fn cancelled(job: &ChangedJob) -> String {
    if job.cancel_requested {
        format!("{} is {}; its worker was asked to stop", job.id, job.status)
    } else {
        format!("{} was cancelled ({})", job.id, job.status)
    }
}

/// The message after a retry.
pub fn retried(job: &ChangedJob) -> String {
    format!("{} was retried ({})", job.id, job.status)
}

async fn show_list(list: List) -> Result<ExitCode, CommandError> {
    let api = Api::new(&list.connection)?;
    let request = api
        .get("/api/v1/jobs")
        .query_opt("status", list.status.map(|text| text.to_uppercase()))
        .query_opt("type", list.kind)
        .query_opt("queue", list.queue)
        .query_opt("priority", list.priority.map(|text| text.to_uppercase()))
        .query_opt("tag", list.tag)
        .query_opt("correlationId", list.correlation_id)
        .query_opt("q", list.q)
        .query_opt("cursor", list.cursor)
        .query("limit", list.limit);
    api.show(request, listed).await
}

fn listed(list: &JobList) -> String {
    let mut table = table(["id", "status", "age", "attempt", "queue", "type"]);
    for job in &list.jobs {
        table.add_row([
            job.id.to_string(),
            job.status.to_string(),
            age(job.created_at),
            format!("{}/{}", job.retry_count + 1, job.max_retries + 1),
            job.queue.clone(),
            job.kind.clone(),
        ]);
    }
    let more = list.next_cursor.map(|id| format!("; next page: --cursor {id}")).unwrap_or_default();
    format!("{table}\n{} of {}{more}", list.jobs.len(), count(list.total, "job"))
}

/// Lists the reasons, one per line.
fn explain(why: &Why) -> String {
    let mut lines = vec![format!("{} is {}", why.job_id, why.status)];
    lines.extend(why.reasons.iter().map(|reason| format!("  {:<16} {}", reason.code, reason.message)));
    lines.join("\n")
}

/// Describes a job: what it is, its state, and what happened to it.
pub fn describe(job: &Job) -> String {
    let mut details = Details::new(15);
    details.line(format!("{}  {}  {}", job.id, job.kind, job.status));
    details.add_opt("  name", (job.name != job.kind).then_some(&job.name));
    details.add("  queue", format!("{} ({})", job.queue, job.priority));
    details.add("  payload", shortened(job.payload.get()));
    details.add("  attempt", format!("{} of {}", job.retry_count + 1, job.max_retries + 1));
    details.add("  created", job.created_at.to_string());
    details.add_opt("  schedule", job.schedule_id.as_ref());
    details.add_opt("  due", job.schedule_due);
    details.add_opt("  scheduled", job.scheduled_at);
    details.add_opt("  started", job.started_at);
    details.add_opt("  finished", job.completed_at);
    details.add_opt("  next retry", job.next_retry_at);
    details.add("  correlation", job.correlation_id.clone());
    details.add_opt("  run", job.run);
    details.add_opt("  worker", job.worker_id.as_ref());
    details.add_opt("  progress", job.progress.as_ref().map(watch::progress_text));
    details.add_opt("  result", job.result.as_ref().map(|result| shortened(result.get())));
    if job.status != JobState::Completed {
        let reason = job.error_reason.as_ref().map(|reason| format!(" ({reason})")).unwrap_or_default();
        details.add_opt("  error", job.error.as_ref().map(|error| format!("{error}{reason}")));
    }
    details.line("  log");
    for entry in &job.execution_log {
        let run = entry.run.map(|run| format!(" [run {run}]")).unwrap_or_default();
        let line = format!("    {}  {:<16} {}{run}", entry.timestamp, entry.event, entry.details);
        details.line(line.trim_end());
    }
    details.text()
}

fn shortened(text: &str) -> String {
    if text.chars().count() <= 200 {
        text.to_owned()
    } else {
        format!("{}… (use --json to see all of it)", text.chars().take(200).collect::<String>())
    }
}
