//! `faena jobs …`.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use faena::{ChangedJob, ErrorReason, Job, JobState, LogEntry};
use faena_domain::{Explanation, GraphJob, JobGraph};
use serde::Deserialize;

use crate::{
    Api, CommandError, Connection,
    api::segment,
    complete, ids,
    output::{Details, age, count, wrap},
    table::table,
    watch,
};

#[derive(Subcommand)]
pub enum Command {
    /// List jobs, newest first unless sorted
    #[command(
        after_help = "Examples:\n  faena jobs list --status FAILED,RETRYING --queue mail\n  faena jobs list --error 'connection refused' --sort updated"
    )]
    List(Box<List>),
    /// Show a job's details and log
    #[command(after_help = "Example:\n  faena jobs show 0199a3c4-7e1b-7c51-9d3e-5a7c2f6b8d10")]
    Show(JobArguments),
    /// Show a job's log page by page, oldest entry first
    #[command(after_help = "Example:\n  faena jobs log 0199a3c4-7e1b-7c51-9d3e-5a7c2f6b8d10 --limit 1000")]
    Log(LogArguments),
    /// Follow a job until it finishes
    #[command(
        after_help = "Exits with 0 if the job completes, with 1 if it fails or is cancelled.\n\nExample:\n  faena jobs watch 0199a3c4-7e1b-7c51-9d3e-5a7c2f6b8d10"
    )]
    Watch(JobArguments),
    /// Explain why a job is not running, what it is doing, or how it finished
    #[command(after_help = "Example:\n  faena jobs why 0199a3c4-7e1b-7c51-9d3e-5a7c2f6b8d10")]
    Why(JobArguments),
    /// List the jobs that a job depends on, and those that depend on it
    #[command(after_help = "Example:\n  faena jobs dependencies 0199a3c4-7e1b-7c51-9d3e-5a7c2f6b8d10")]
    Dependencies(JobArguments),
    /// Cancel a job; the worker of a running job is asked to stop
    #[command(after_help = "Example:\n  faena jobs cancel 0199a3c4-7e1b-7c51-9d3e-5a7c2f6b8d10")]
    Cancel(JobArguments),
    /// Retry a failed or cancelled job, or start the next attempt of a retrying job now
    #[command(after_help = "Example:\n  faena jobs retry 0199a3c4-7e1b-7c51-9d3e-5a7c2f6b8d10")]
    Retry(JobArguments),
}

#[derive(Args)]
pub struct JobArguments {
    /// Job id, or the beginning of one
    #[arg(add = complete::jobs())]
    id: String,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct LogArguments {
    /// Job id, or the beginning of one
    #[arg(add = complete::jobs())]
    id: String,
    /// Maximum number of entries, up to 1000
    #[arg(long, default_value_t = 100, value_name = "N")]
    limit: u32,
    /// Cursor from the previous page
    #[arg(long)]
    cursor: Option<String>,
    #[command(flatten)]
    connection: Connection,
}

/// A page of a log.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct JobLog {
    entries: Vec<LogEntry>,
    next_cursor: Option<String>,
}

#[derive(Args)]
pub struct List {
    /// Only jobs in these states: PENDING, QUEUED, SCHEDULED, ASSIGNED, PROCESSING, RETRYING, COMPLETED, FAILED, CANCELLED
    #[arg(long, value_name = "STATE,…")]
    status: Option<String>,
    /// Only jobs of this type
    #[arg(long = "type", value_name = "TYPE", add = complete::types())]
    kind: Option<String>,
    /// Only jobs in this queue
    #[arg(long, add = complete::queues())]
    queue: Option<String>,
    /// Only jobs with this name
    #[arg(long)]
    name: Option<String>,
    /// Only jobs with these priorities: LOW, NORMAL, HIGH, CRITICAL
    #[arg(long, value_name = "PRIORITY,…")]
    priority: Option<String>,
    /// Only jobs that this worker has, or had when they finished
    #[arg(long, value_name = "ID", add = complete::workers())]
    worker_id: Option<String>,
    /// Only jobs with this text in their error
    #[arg(long, value_name = "TEXT")]
    error: Option<String>,
    /// Only jobs with this text in their payload
    #[arg(long, value_name = "TEXT")]
    payload: Option<String>,
    /// Only jobs with this tag
    #[arg(long)]
    tag: Option<String>,
    /// Only jobs with this correlation id
    #[arg(long, value_name = "ID")]
    correlation_id: Option<String>,
    /// Only jobs with this text in their name, type or queue, or with this id or key
    #[arg(short = 'q', long, value_name = "TEXT")]
    search: Option<String>,
    /// Maximum number of jobs, up to 100
    #[arg(long, default_value_t = 20, value_name = "N")]
    limit: u32,
    /// Sort by created, updated, scheduled or priority
    #[arg(long, default_value = "created", value_name = "KEY")]
    sort: String,
    /// Order of the list: desc or asc
    #[arg(long, default_value = "desc")]
    order: String,
    /// Cursor from the previous page
    #[arg(long)]
    cursor: Option<String>,
    #[command(flatten)]
    connection: Connection,
}

/// A page of jobs.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct JobList {
    pub jobs: Vec<Job>,
    pub total: u64,
    next_cursor: Option<String>,
    #[serde(default)]
    is_partial: bool,
    #[serde(default = "default_true")]
    sort_is_exact: bool,
}

fn default_true() -> bool {
    true
}

pub async fn run(command: Command) -> Result<ExitCode, CommandError> {
    match command {
        Command::List(list) => show_list(*list).await,
        Command::Show(job) => {
            let (api, path) = job.open("").await?;
            api.show(api.get(&path), describe).await
        }
        Command::Log(log) => {
            let api = Api::new(&log.connection)?;
            let id = ids::resolve(&api, &ids::JOB, &log.id).await?;
            let request = api.get(&path(&id, "/log")).query("limit", log.limit).query_opt("cursor", log.cursor);
            api.show(request, log_text).await
        }
        Command::Watch(job) => {
            let api = Api::new(&job.connection)?;
            let id = ids::resolve(&api, &ids::JOB, &job.id).await?;
            watch::watch(&api, &id).await
        }
        Command::Why(job) => {
            let (api, path) = job.open("/why").await?;
            api.show(api.get(&path), explain).await
        }
        Command::Dependencies(job) => {
            let (api, path) = job.open("/dependencies").await?;
            api.show(api.get(&path), dependencies_text).await
        }
        Command::Cancel(job) => {
            let (api, path) = job.open("/cancel").await?;
            api.show(api.post(&path), cancelled_text).await
        }
        Command::Retry(job) => {
            let (api, path) = job.open("/retry").await?;
            api.show(api.post(&path), retried_text).await
        }
    }
}

impl JobArguments {
    /// Returns the server, and the path of the job there.
    async fn open(&self, rest: &str) -> Result<(Api, String), CommandError> {
        let api = Api::new(&self.connection)?;
        let id = ids::resolve(&api, &ids::JOB, &self.id).await?;
        Ok((api, path(&id, rest)))
    }
}

/// Returns the path of a job in the API.
pub fn path(id: &str, rest: &str) -> String {
    format!("/api/v1/jobs/{}{rest}", segment(id))
}

pub fn cancelled_text(job: &ChangedJob) -> String {
    if job.cancel_requested {
        format!("{} is {}; its worker was asked to stop", job.id, job.status)
    } else {
        format!("{} was cancelled", job.id)
    }
}

/// Returns the message after a retry.
pub fn retried_text(job: &ChangedJob) -> String {
    match &job.status {
        JobState::Retrying => format!("{} starts its next attempt now", job.id),
        status => format!("{} will run again; it is {status} now", job.id),
    }
}

async fn show_list(list: List) -> Result<ExitCode, CommandError> {
    let api = Api::new(&list.connection)?.with_options(&[("q", "--search")]);
    let empty = if list.has_filter() { "no jobs match" } else { "no jobs; submit one with \"faena enqueue TYPE\"" };
    let request = api
        .get("/api/v1/jobs")
        .query_opt("status", list.status.map(|text| text.to_uppercase()))
        .query_opt("type", list.kind)
        .query_opt("queue", list.queue)
        .query_opt("priority", list.priority.map(|text| text.to_uppercase()))
        .query_opt("name", list.name)
        .query_opt("workerId", list.worker_id)
        .query_opt("error", list.error)
        .query_opt("payload", list.payload)
        .query_opt("tag", list.tag)
        .query_opt("correlationId", list.correlation_id)
        .query_opt("q", list.search)
        .query_opt("cursor", list.cursor)
        .query("sort", list.sort)
        .query("order", list.order)
        .query("limit", list.limit);
    api.show(request, |page| list_text(page, empty)).await
}

impl List {
    fn has_filter(&self) -> bool {
        [
            &self.status,
            &self.kind,
            &self.queue,
            &self.name,
            &self.priority,
            &self.worker_id,
            &self.error,
            &self.payload,
            &self.tag,
            &self.correlation_id,
            &self.search,
            &self.cursor,
        ]
        .into_iter()
        .any(Option::is_some)
    }
}

fn list_text(list: &JobList, empty: &str) -> String {
    if list.jobs.is_empty() && !list.is_partial {
        return wrap(empty);
    }
    let mut table = table(["id", "status", "created", "type", "queue", "attempt"]);
    for job in &list.jobs {
        table.add_row([
            job.id.to_string(),
            job.status.to_string(),
            age(job.created_at),
            job.kind.clone(),
            job.queue.clone(),
            job.attempt.to_string(),
        ]);
    }
    let mut notes = String::new();
    if !list.sort_is_exact {
        notes.push_str("; only the newest 10000 jobs are sorted");
    }
    if list.is_partial {
        notes.push_str("; the search stopped early and continues on the next page");
    }
    if let Some(cursor) = &list.next_cursor {
        notes.push_str(&format!("; next page: --cursor {cursor}"));
    }
    let summary = wrap(&format!("{} of {}{notes}", list.jobs.len(), count(list.total, "job")));
    format!("{table}\n{summary}")
}

/// Lists the reasons, one per line.
fn explain(why: &Explanation) -> String {
    let mut lines = vec![format!("{} is {}", why.job_id, why.status)];
    lines.extend(why.reasons.iter().map(|reason| format!("  {:<16} {}", reason.code, reason.message)));
    lines.join("\n")
}

/// Lists what a job depends on first, then the job, then what depends on it.
fn dependencies_text(graph: &JobGraph) -> String {
    let mut jobs: Vec<&GraphJob> = graph.jobs.iter().collect();
    jobs.sort_by_key(|job| job.depth);
    let mut table = table(["id", "depth", "status", "type", "queue"]);
    for job in jobs {
        table.add_row([
            job.id.to_string(),
            format!("{:+}", job.depth),
            job.status.map_or("deleted".to_owned(), |status| status.to_string()),
            job.kind.clone().unwrap_or_default(),
            job.queue.clone().unwrap_or_default(),
        ]);
    }
    let at_least = if graph.hidden_is_exact { "" } else { "at least " };
    let summary = match (graph.jobs.len(), graph.hidden) {
        (1, 0) => "it depends on no job, and no job depends on it".to_owned(),
        (_, 0) => "below 0: jobs it depends on; above 0: jobs that depend on it".to_owned(),
        (_, hidden) => format!(
            "below 0: jobs it depends on; above 0: jobs that depend on it; {at_least}{hidden} more links to other jobs"
        ),
    };
    format!("{table}\n{}", wrap(&summary))
}

/// Describes a job: what it is, its state, and what happened to it.
pub fn describe(job: &Job) -> String {
    let mut details = Details::new(19);
    details.line(format!("{}  {}  {}", job.id, job.kind, job.status));
    details.add_opt("  name", (job.name != job.kind).then_some(&job.name));
    details.add("  queue", format!("{} ({})", job.queue, job.priority));
    let shown = |field: &str, text: Option<String>| match job.hidden.iter().any(|name| name == field) {
        true => Some("hidden from this API key".to_owned()),
        false => text,
    };
    details.add_opt("  payload", shown("payload", Some(truncated(job.payload.get()))));
    details.add("  attempt", job.attempt.to_string());
    details.add("  retries", format!("{} of {}", job.retry_count, job.max_retries));
    details.add("  created", job.created_at.to_string());
    details.add_opt("  schedule", job.schedule_id.as_ref());
    details.add_opt("  schedule due", job.schedule_due);
    details.add_opt("  not before", job.scheduled_at);
    details.add_opt("  started", job.started_at);
    details.add_opt("  finished", job.completed_at);
    details.add_opt("  next attempt", job.next_attempt_at);
    details.add_opt("  expires", job.expires_at);
    details.add("  correlation", job.correlation_id.clone());
    details.add("  tags", job.tags.join(", "));
    details.add_opt("  idempotency key", job.idempotency_key.as_ref());
    details.add_opt("  unique key", job.unique_key.as_ref());
    details.add_opt("  concurrency key", job.concurrency_key.as_ref());
    details.add_opt("  webhook", job.webhook_url.as_ref());
    let parents: Vec<String> = job.depends_on.iter().map(ToString::to_string).collect();
    details.add("  depends on", parents.join(", "));
    details.add_opt("  run", job.run);
    details.add_opt("  worker", job.worker_id.as_ref());
    details.add_opt("  progress", job.progress.as_ref().map(watch::progress_text));
    details.add_opt("  result", shown("result", job.result.as_ref().map(|result| truncated(result.get()))));
    if job.status != JobState::Completed {
        let reason = reason_note(job.error_reason.as_ref());
        details.add_opt("  error", shown("error", job.error.as_ref().map(|error| format!("{error}{reason}"))));
    }
    details.line("  log");
    if job.execution_log_omitted > 0 {
        details.line(format!("    {} earlier entries: faena jobs log {}", job.execution_log_omitted, job.id));
    }
    for entry in &job.execution_log {
        details.line(format!("    {}", log_line(entry)));
    }
    details.text()
}

fn log_line(entry: &LogEntry) -> String {
    let run = entry.run.map(|run| format!("[run {run}]")).unwrap_or_default();
    let gap = if entry.details.is_empty() { "" } else { " " };
    format!("{}  {:<16} {}{gap}{run}", entry.timestamp, entry.event, entry.details).trim_end().to_owned()
}

/// Returns the text of a page of a log.
fn log_text(page: &JobLog) -> String {
    let mut lines: Vec<String> = page.entries.iter().map(log_line).collect();
    if let Some(cursor) = &page.next_cursor {
        lines.push(format!("more entries: add --cursor {cursor}"));
    }
    lines.join("\n")
}

/// Returns why a run did not complete. Empty if its handler reported an error, because that already says why.
pub fn reason_note(reason: Option<&ErrorReason>) -> String {
    reason.filter(|reason| **reason != ErrorReason::Error).map(|reason| format!(" ({reason})")).unwrap_or_default()
}

fn truncated(text: &str) -> String {
    if text.chars().count() <= 200 {
        text.to_owned()
    } else {
        format!("{}… (use --json to see all of it)", text.chars().take(200).collect::<String>())
    }
}
