//! `faena webhooks …`.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use comfy_table::{Table, presets};
use faena_domain::{WebhookAttempt, WebhookView};
use faena_wire::WebhookList;
use reqwest::Method;

use crate::{Client, Connection, Problem, print};

#[derive(Subcommand)]
pub enum Command {
    /// List webhooks, the newest first
    List(List),
    /// Show one webhook whole, with its body and every attempt
    Show(One),
    /// Send one that was delivered, or has failed, again
    Redeliver(One),
}

#[derive(Args)]
pub struct One {
    id: String,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct List {
    /// waiting, sending, delivered or failed
    #[arg(long)]
    state: Option<String>,
    /// Of this job
    #[arg(long)]
    job: Option<String>,
    /// To this host, with its port: example.org:443
    #[arg(long)]
    host: Option<String>,
    #[arg(long, default_value_t = 20)]
    limit: u32,
    /// The next cursor of another list
    #[arg(long)]
    cursor: Option<String>,
    #[command(flatten)]
    connection: Connection,
}

pub async fn run(command: Command) -> Result<ExitCode, Problem> {
    match command {
        Command::List(list) => show_list(list).await?,
        Command::Show(one) => {
            let client = Client::new(&one.connection)?;
            let request = client.request(Method::GET, &path(&one.id, ""));
            client.show(request, describe).await?;
        }
        Command::Redeliver(one) => {
            let client = Client::new(&one.connection)?;
            let request = client.request(Method::POST, &path(&one.id, "/redeliver"));
            let words = |webhook: &WebhookView| format!("{} is sent again to {}", webhook.id, webhook.url);
            client.show(request, words).await?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn path(id: &str, rest: &str) -> String {
    format!(
        "/api/v1/webhooks/{}{rest}",
        id.replace('%', "%25").replace('/', "%2F").replace('?', "%3F").replace('#', "%23")
    )
}

async fn show_list(list: List) -> Result<(), Problem> {
    let client = Client::new(&list.connection)?;
    let mut query = vec![("limit", list.limit.to_string())];
    let filters = [("state", list.state), ("jobId", list.job), ("host", list.host), ("cursor", list.cursor)];
    query.extend(filters.into_iter().filter_map(|(name, value)| Some((name, value?))));
    let request = client.request(Method::GET, "/api/v1/webhooks").query(&query);
    if list.connection.json {
        print(&client.text(request).await?);
        return Ok(());
    }
    let found: WebhookList = client.call(request).await?;
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header(["id", "job", "state", "attempts", "created", "due", "url"]);
    for webhook in &found.webhooks {
        table.add_row([
            webhook.id.to_string(),
            webhook.job_id.to_string(),
            webhook.state.as_str().to_owned(),
            webhook.attempts.to_string(),
            webhook.created_at.to_string(),
            webhook.due_at.map(|at| at.to_string()).unwrap_or_default(),
            webhook.url.clone(),
        ]);
    }
    print(&table.to_string());
    if let Some(cursor) = found.next_cursor {
        print(&format!("there may be more: --cursor {cursor}"));
    }
    Ok(())
}

fn describe(webhook: &WebhookView) -> String {
    let mut lines = vec![format!("webhook       {}", webhook.id)];
    let mut line = |name: &str, value: String| {
        if !value.is_empty() {
            lines.push(format!("{name:<14}{value}"));
        }
    };
    line("job", webhook.job_id.to_string());
    line("correlation", webhook.correlation_id.clone());
    line("state", webhook.state.as_str().to_owned());
    line("url", webhook.url.clone());
    line("created", webhook.created_at.to_string());
    line("due", webhook.due_at.map(|at| at.to_string()).unwrap_or_default());
    line("held back", webhook.held_back.clone().unwrap_or_default());
    line("settled", webhook.settled_at.map(|at| at.to_string()).unwrap_or_default());
    line("attempts", webhook.attempts.to_string());
    line("body", webhook.body.as_ref().map(|body| body.get().to_owned()).unwrap_or_default());
    lines.extend(webhook.history.iter().map(describe_attempt));
    lines.join("\n")
}

fn describe_attempt(attempt: &WebhookAttempt) -> String {
    let what = match (&attempt.error, attempt.status) {
        (Some(error), _) => error.clone(),
        (None, Some(status)) => format!("HTTP {status}"),
        (None, None) => String::new(),
    };
    let answer = attempt.answer.as_deref().map(|answer| format!("  {answer:?}")).unwrap_or_default();
    format!("  {}  {}  {what}, {} ms{answer}", attempt.number, attempt.at, attempt.took_ms)
}
