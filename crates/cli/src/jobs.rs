//! `faena jobs …`.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use comfy_table::{Table, presets};
use faena_domain::{JobState, JobView, Timestamp, Why};
use faena_wire::{Changed, JobList};
use reqwest::Method;

use crate::{Client, Connection, Problem, print, watch};

#[derive(Subcommand)]
pub enum Command {
    /// List jobs, newest first
    List(List),
    /// Show one job whole, with its log
    Show(One),
    /// Follow one job to its end
    Watch(One),
    /// Say why a job is not running, what it is doing, or how it ended
    Why(One),
    /// Cancel a job; one that runs is told to stop
    Cancel(One),
    /// Give a failed or cancelled job new tries
    Retry(One),
}

#[derive(Args)]
pub struct One {
    id: String,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct List {
    /// PENDING, QUEUED, ASSIGNED, PROCESSING, RETRYING, COMPLETED, FAILED or CANCELLED; several with commas
    #[arg(long)]
    status: Option<String>,
    #[arg(long = "type", value_name = "TYPE")]
    kind: Option<String>,
    #[arg(long)]
    queue: Option<String>,
    #[arg(long)]
    priority: Option<String>,
    #[arg(long)]
    tag: Option<String>,
    #[arg(long)]
    correlation_id: Option<String>,
    /// Part of a type or queue name, or an id or key
    #[arg(short, long)]
    q: Option<String>,
    #[arg(long, default_value_t = 20)]
    limit: u32,
    /// Where another list ended
    #[arg(long)]
    cursor: Option<String>,
    #[command(flatten)]
    connection: Connection,
}

pub async fn run(command: Command) -> Result<ExitCode, Problem> {
    match command {
        Command::List(list) => show_list(list).await,
        Command::Show(one) => {
            let client = Client::new(&one.connection)?;
            let request = client.request(Method::GET, &format!("/api/v1/jobs/{}", one.id));
            client.show(request, describe).await?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Watch(one) => watch::watch(&Client::new(&one.connection)?, &one.id, one.connection.json).await,
        Command::Why(one) => {
            let client = Client::new(&one.connection)?;
            let request = client.request(Method::GET, &format!("/api/v1/jobs/{}/why", one.id));
            client.show(request, explain).await?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Cancel(one) => change(one, "cancel").await,
        Command::Retry(one) => change(one, "retry").await,
    }
}

async fn change(one: One, action: &str) -> Result<ExitCode, Problem> {
    let client = Client::new(&one.connection)?;
    let request = client.request(Method::POST, &format!("/api/v1/jobs/{}/{action}", one.id));
    if one.connection.json {
        print(&client.text(request).await?);
        return Ok(ExitCode::SUCCESS);
    }
    let changed: Changed = client.call(request).await?;
    if changed.cancel_requested {
        print(&format!("{} is {}; its worker has been told to stop", changed.id, changed.status));
    } else {
        print(&format!("{} is {}", changed.id, changed.status));
    }
    Ok(ExitCode::SUCCESS)
}

async fn show_list(list: List) -> Result<ExitCode, Problem> {
    let client = Client::new(&list.connection)?;
    let limit = list.limit.to_string();
    let status = list.status.map(|text| text.to_uppercase());
    let priority = list.priority.map(|text| text.to_uppercase());
    let query: Vec<(&str, &String)> = [
        ("status", &status),
        ("type", &list.kind),
        ("queue", &list.queue),
        ("priority", &priority),
        ("tag", &list.tag),
        ("correlationId", &list.correlation_id),
        ("q", &list.q),
        ("cursor", &list.cursor),
    ]
    .into_iter()
    .filter_map(|(name, value)| Some((name, value.as_ref()?)))
    .chain([("limit", &limit)])
    .collect();
    let request = client.request(Method::GET, "/api/v1/jobs").query(&query);
    if list.connection.json {
        print(&client.text(request).await?);
        return Ok(ExitCode::SUCCESS);
    }
    let found: JobList = client.call(request).await?;
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header(["id", "type", "queue", "status", "priority", "tries", "created"]);
    for job in &found.jobs {
        table.add_row([
            job.id.to_string(),
            job.kind.clone(),
            job.queue.clone(),
            job.status.to_string(),
            job.priority.to_string(),
            format!("{}/{}", job.retry_count + 1, job.max_retries + 1),
            job.created_at.to_string(),
        ]);
    }
    print(&table.to_string());
    let more = found.next_cursor.map(|id| format!("; more with --cursor {id}")).unwrap_or_default();
    print(&format!("{} of {} jobs{more}", found.jobs.len(), found.total));
    Ok(ExitCode::SUCCESS)
}

/// The reasons, one per line.
fn explain(why: &Why) -> String {
    let mut lines = vec![format!("{} is {}", why.job_id, why.status)];
    lines.extend(why.reasons.iter().map(|reason| format!("  {:<16} {}", reason.code, reason.message)));
    lines.join("\n")
}

/// A job for people: what it is, how it stands, what happened.
pub fn describe(job: &JobView) -> String {
    let mut lines = vec![format!("{}  {}  {}", job.id, job.kind, job.status)];
    let mut put = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            lines.push(format!("  {name:<12} {value}"));
        }
    };
    let time = |at: Option<Timestamp>| at.map(|at| at.to_string());
    put("name", (job.name != job.kind).then(|| job.name.clone()));
    put("queue", Some(format!("{} ({})", job.queue, job.priority)));
    put("payload", Some(shorten(job.payload.get())));
    put("tries", Some(format!("{} of {}", job.retry_count + 1, job.max_retries + 1)));
    put("created", time(Some(job.created_at)));
    put("schedule", job.schedule_id.clone());
    put("due", time(job.schedule_due));
    put("scheduled", time(job.scheduled_at));
    put("started", time(job.started_at));
    put("completed", time(job.completed_at));
    put("next try", time(job.next_retry_at));
    put("correlation", Some(job.correlation_id.clone()));
    put("run", job.run.map(|run| run.to_string()));
    put("worker", job.worker_id.clone());
    put("progress", job.progress.as_ref().map(watch::progress_text));
    put("result", job.result.as_ref().map(|result| shorten(result.get())));
    if job.status != JobState::Completed {
        let reason = job.error_reason.map(|reason| format!(" ({})", reason.as_str())).unwrap_or_default();
        put("error", job.error.as_ref().map(|error| format!("{error}{reason}")));
    }
    lines.push("  log".into());
    for entry in &job.execution_log {
        let run = entry.run.map(|run| format!(" [run {run}]")).unwrap_or_default();
        let line = format!("    {}  {:<16} {}{run}", entry.timestamp, entry.event.as_str(), entry.details);
        lines.push(line.trim_end().to_owned());
    }
    lines.join("\n")
}

fn shorten(text: &str) -> String {
    if text.chars().count() <= 200 {
        text.to_owned()
    } else {
        format!("{}… (--json shows all)", text.chars().take(200).collect::<String>())
    }
}
