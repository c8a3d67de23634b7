//! `faena webhooks …`.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use faena_domain::{WebhookAttempt, WebhookView};
use faena_wire::WebhookList;

use crate::{
    Api, CommandError, Connection,
    api::segment,
    complete, ids,
    output::{Details, relative},
    table::table,
};

#[derive(Subcommand)]
pub enum Command {
    /// List webhooks, newest first
    #[command(after_help = "Example:\n  faena webhooks list --state failed --host example.org:443")]
    List(List),
    /// Show a webhook with its body and every attempt
    #[command(after_help = "Example:\n  faena webhooks show 0199a3c4-7e1b-7c51-9d3e-5a7c2f6b8d10")]
    Show(WebhookArguments),
    /// Redeliver a webhook
    #[command(after_help = "Example:\n  faena webhooks redeliver 0199a3c4-7e1b-7c51-9d3e-5a7c2f6b8d10")]
    Redeliver(WebhookArguments),
}

#[derive(Args)]
pub struct WebhookArguments {
    /// Webhook id, or the beginning of one
    #[arg(add = complete::webhooks())]
    id: String,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct List {
    /// Only webhooks in this state: waiting, sending, delivered or failed
    #[arg(long)]
    state: Option<String>,
    /// Only webhooks of this job
    #[arg(long, value_name = "ID", add = complete::jobs())]
    job: Option<String>,
    /// Only webhooks about the approvals of this task
    #[arg(long, value_name = "ID", add = complete::tasks())]
    task: Option<String>,
    /// Only webhooks to this host and port, like example.org:443
    #[arg(long)]
    host: Option<String>,
    /// Maximum number of webhooks, up to 100
    #[arg(long, default_value_t = 20, value_name = "N")]
    limit: u32,
    /// Cursor from the previous page
    #[arg(long)]
    cursor: Option<String>,
    #[command(flatten)]
    connection: Connection,
}

pub async fn run(command: Command) -> Result<ExitCode, CommandError> {
    match command {
        Command::List(list) => {
            let api = Api::new(&list.connection)?.with_options(&[("jobId", "--job"), ("taskId", "--task")]);
            let is_filtered =
                [&list.state, &list.job, &list.task, &list.host, &list.cursor].into_iter().any(Option::is_some);
            let empty = match is_filtered {
                true => "no webhooks match",
                false => "no webhooks; a job with --webhook-url creates one when it finishes",
            };
            let request = api
                .get("/api/v1/webhooks")
                .query("limit", list.limit)
                .query_opt("state", list.state)
                .query_opt("jobId", ids::resolve_opt(&api, &ids::JOB, list.job).await?)
                .query_opt("taskId", ids::resolve_opt(&api, &ids::TASK, list.task).await?)
                .query_opt("host", list.host)
                .query_opt("cursor", list.cursor);
            api.show(request, |list| listed(list, empty)).await
        }
        Command::Show(webhook) => {
            let api = Api::new(&webhook.connection)?;
            let id = ids::resolve(&api, &ids::WEBHOOK, &webhook.id).await?;
            api.show(api.get(&path(&id, "")), describe).await
        }
        Command::Redeliver(webhook) => {
            let api = Api::new(&webhook.connection)?;
            let describe = |webhook: &WebhookView| format!("{} is being redelivered to {}", webhook.id, webhook.url);
            let id = ids::resolve(&api, &ids::WEBHOOK, &webhook.id).await?;
            api.show(api.post(&path(&id, "/redeliver")), describe).await
        }
    }
}

fn path(id: &str, rest: &str) -> String {
    format!("/api/v1/webhooks/{}{rest}", segment(id))
}

fn listed(list: &WebhookList, empty: &str) -> String {
    let mut table = table(["id", "event", "state", "attempts", "created", "due", "url", "subject"]);
    for webhook in &list.webhooks {
        table.add_row([
            webhook.id.to_string(),
            webhook.event.clone(),
            webhook.state.as_str().to_owned(),
            webhook.attempts.to_string(),
            relative(webhook.created_at),
            webhook.due_at.map(relative).unwrap_or_default(),
            webhook.url.clone(),
            subject(webhook),
        ]);
    }
    let more = list.next_cursor.as_ref().map(|cursor| format!("\nnext page: --cursor {cursor}")).unwrap_or_default();
    format!("{}{more}", table.or_text(empty))
}

/// Returns the id of the job or task that a webhook is about.
fn subject(webhook: &WebhookView) -> String {
    let job = webhook.job_id.map(|id| id.to_string());
    job.or_else(|| webhook.task_id.map(|id| id.to_string())).unwrap_or_default()
}

fn describe(webhook: &WebhookView) -> String {
    let mut details = Details::new(14);
    details.add("webhook", webhook.id.to_string());
    details.add("event", webhook.event.clone());
    details.add_opt("job", webhook.job_id);
    details.add_opt("task", webhook.task_id);
    details.add("correlation", webhook.correlation_id.clone());
    details.add("state", webhook.state.as_str());
    details.add("url", webhook.url.clone());
    details.add("created", webhook.created_at.to_string());
    details.add_opt("due", webhook.due_at);
    details.add_opt("delayed", webhook.delay_reason.as_ref());
    details.add_opt("finished", webhook.settled_at);
    details.add("attempts", webhook.attempts.to_string());
    details.add_opt("body", webhook.body.as_ref().map(|body| body.get().to_owned()));
    for attempt in &webhook.history {
        details.line(describe_attempt(attempt));
    }
    details.text()
}

fn describe_attempt(attempt: &WebhookAttempt) -> String {
    let outcome = match (&attempt.error, attempt.status) {
        (Some(error), _) => error.clone(),
        (None, Some(status)) => format!("HTTP {status}"),
        (None, None) => String::new(),
    };
    let answer = attempt.answer.as_deref().map(|answer| format!("  {answer:?}")).unwrap_or_default();
    format!("  {}  {}  {outcome}, {} ms{answer}", attempt.number, attempt.at, attempt.took_ms)
}
