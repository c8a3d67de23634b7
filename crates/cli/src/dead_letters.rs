//! `faena dlq …`: dead-lettered jobs.

use std::{convert::Infallible, process::ExitCode};

use clap::{Args, Subcommand};
use faena::{ApiRequest, Job};
use faena_wire::{BulkResponse, DeadLetterStats};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::{
    Api, CommandError, Connection,
    api::segment,
    complete, ids, jobs,
    output::{age, count, exact_and_relative, print, shorten, terminal_width, wrap},
    progress,
    table::table,
};

#[derive(Subcommand)]
pub enum Command {
    /// List dead-lettered jobs, latest submission first
    #[command(after_help = "Example:\n  faena dlq list --type email.send --error 'connection refused'")]
    List(List),
    /// Show a dead-lettered job with the errors of all its runs
    #[command(after_help = "Example:\n  faena dlq show 0199a3c4-7e1b-7c51-9d3e-5a7c2f6b8d10")]
    Show(JobArguments),
    /// Retry a dead-lettered job, or all that match a filter
    #[command(after_help = "Example:\n  faena dlq retry --type email.send --error 'connection refused' --dry-run")]
    Retry(Selection),
    /// Delete a dead-lettered job, or all that match a filter
    #[command(after_help = "Example:\n  faena dlq delete --queue reports --reason expired")]
    Delete(Selection),
    /// Count dead-lettered jobs by type, queue and reason
    #[command(after_help = "Example:\n  faena dlq stats")]
    Stats(Stats),
}

#[derive(Args)]
pub struct Filter {
    /// Only jobs of this type
    #[arg(long = "type", value_name = "TYPE", add = complete::types())]
    kind: Option<String>,
    /// Only jobs with this name
    #[arg(long)]
    name: Option<String>,
    /// Only jobs in this queue
    #[arg(long, add = complete::queues())]
    queue: Option<String>,
    /// Only jobs with these priorities: LOW, NORMAL, HIGH, CRITICAL
    #[arg(long, value_name = "PRIORITY,…", value_parser = uppercase)]
    priority: Option<String>,
    /// Only jobs that this worker had when they failed
    #[arg(long, value_name = "ID")]
    worker_id: Option<String>,
    /// Only jobs with this text in their error
    #[arg(long, value_name = "TEXT")]
    error: Option<String>,
    /// Only jobs that failed for this reason: error, timeout, orphaned, cancelled, expired or no_handler
    #[arg(long)]
    reason: Option<String>,
    /// Only jobs with this text in their name, type or queue, or with this id or key
    #[arg(short = 'q', long, value_name = "TEXT")]
    search: Option<String>,
}

/// Converts names of priorities to upper case.
fn uppercase(text: &str) -> Result<String, Infallible> {
    Ok(text.to_uppercase())
}

impl Filter {
    fn pairs(&self) -> Vec<(&'static str, &String)> {
        let pairs = [
            ("type", &self.kind),
            ("name", &self.name),
            ("queue", &self.queue),
            ("priority", &self.priority),
            ("workerId", &self.worker_id),
            ("error", &self.error),
            ("reason", &self.reason),
            ("q", &self.search),
        ];
        pairs.into_iter().filter_map(|(name, value)| Some((name, value.as_ref()?))).collect()
    }
}

#[derive(Args)]
pub struct List {
    #[command(flatten)]
    filter: Filter,
    /// Maximum number of jobs, up to 100
    #[arg(long, default_value_t = 20, value_name = "N")]
    limit: u32,
    /// Cursor from the previous page
    #[arg(long)]
    cursor: Option<String>,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct JobArguments {
    /// Job id, or the beginning of one
    #[arg(add = complete::dead_letters())]
    id: String,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct Selection {
    /// Job id, or the beginning of one; omit it to use a filter
    #[arg(add = complete::dead_letters())]
    id: Option<String>,
    #[command(flatten)]
    filter: Filter,
    /// Every dead-lettered job
    #[arg(long)]
    all: bool,
    /// Only show how many jobs match, with examples
    #[arg(long)]
    dry_run: bool,
    /// Maximum number of jobs per second; the server continues in the background
    #[arg(long, value_name = "N")]
    per_second: Option<u32>,
    /// With --per-second: wait until the server has finished, with a progress bar
    #[arg(long, requires = "per_second")]
    watch: bool,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct Stats {
    #[command(flatten)]
    connection: Connection,
}

/// A page of dead-lettered jobs.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct DeadLetterList {
    data: Vec<Job>,
    total: u64,
    next_cursor: Option<String>,
}

#[derive(Clone, Copy, PartialEq)]
enum Action {
    Retry,
    Delete,
}

impl Action {
    fn path(self) -> &'static str {
        match self {
            Action::Retry => "retry",
            Action::Delete => "delete",
        }
    }

    fn participle(self) -> &'static str {
        match self {
            Action::Retry => "retried",
            Action::Delete => "deleted",
        }
    }
}

pub async fn run(command: Command) -> Result<ExitCode, CommandError> {
    match command {
        Command::List(list) => show_list(list).await,
        Command::Show(job) => {
            let api = Api::new(&job.connection)?;
            let id = ids::resolve(&api, &ids::DEAD_LETTER, &job.id).await?;
            api.show(api.get(&path(&id, "")), describe).await
        }
        Command::Retry(selection) => act(selection, Action::Retry).await,
        Command::Delete(selection) => act(selection, Action::Delete).await,
        Command::Stats(stats) => {
            let api = Api::new(&stats.connection)?;
            api.show(api.get("/api/v1/dead-letter/stats"), describe_stats).await
        }
    }
}

fn path(id: &str, rest: &str) -> String {
    format!("/api/v1/dead-letter/{}{rest}", segment(id))
}

async fn show_list(list: List) -> Result<ExitCode, CommandError> {
    let api = Api::new(&list.connection)?.with_options(&[("q", "--search")]);
    let is_filtered = !list.filter.pairs().is_empty() || list.cursor.is_some();
    let mut request = api.get("/api/v1/dead-letter").query("limit", list.limit).query_opt("cursor", list.cursor);
    for (name, value) in list.filter.pairs() {
        request = request.query(name, value);
    }
    let empty = if is_filtered { "no dead letters match" } else { "no dead letters" };
    api.show(request, |page| listed(page, empty)).await
}

fn listed(list: &DeadLetterList, empty: &str) -> String {
    if list.data.is_empty() {
        return empty.to_owned();
    }
    let mut table = table(["id", "failed", "reason", "type", "error", "queue", "created"]);
    for job in &list.data {
        table.add_row([
            job.id.to_string(),
            job.completed_at.map(age).unwrap_or_default(),
            job.error_reason.as_ref().map(ToString::to_string).unwrap_or_default(),
            job.kind.clone(),
            shorten(job.error.as_deref().unwrap_or(""), 60),
            job.queue.clone(),
            age(job.created_at),
        ]);
    }
    let more = list.next_cursor.as_ref().map(|cursor| format!("; next page: --cursor {cursor}")).unwrap_or_default();
    let summary = wrap(&format!("{} of {}{more}", list.data.len(), count(list.total, "dead letter")));
    format!("{table}\n{summary}")
}

fn describe(job: &Job) -> String {
    let mut text = jobs::describe(job);
    text.push_str("\n  runs");
    for attempt in &job.attempts {
        let run = attempt.run.map_or("no run".to_owned(), |run| format!("run {run}"));
        let worker = attempt.worker_id.as_deref().map(|worker| format!(" by {worker}")).unwrap_or_default();
        let reason = jobs::reason_note(attempt.error_reason.as_ref());
        let error = attempt.error.as_deref().unwrap_or("");
        text.push_str(&format!("\n    {}  {run}{worker}  {}{reason}  {error}", attempt.finished_at, attempt.status));
    }
    text
}

async fn act(selection: Selection, action: Action) -> Result<ExitCode, CommandError> {
    let api = Api::new(&selection.connection)?;
    let filter = selection.filter.pairs();
    match &selection.id {
        Some(_) if !filter.is_empty() || selection.all || selection.dry_run || selection.per_second.is_some() => {
            Err(CommandError::Usage("pass a job id or a filter (--type, --queue, --error …), not both".into()))
        }
        Some(id) => act_on_one(&api, id, action).await,
        None if filter.is_empty() && !selection.all => Err(CommandError::Usage(
            "missing a job id or a filter: --type, --queue, --error, --reason, --search, or --all".into(),
        )),
        None => {
            let filter: Map<String, Value> =
                filter.into_iter().map(|(name, text)| (name.into(), json!(text))).collect();
            let mut body = json!({ "filter": filter, "all": selection.all, "dryRun": selection.dry_run });
            if let Some(n) = selection.per_second {
                body["perSecond"] = json!(n);
            }
            let request = api.post_bulk(&format!("/api/v1/dead-letter/bulk/{}", action.path())).json(&body);
            if selection.watch && !selection.dry_run {
                return watch_bulk(&api, request, action).await;
            }
            let what = format!("waiting until dead letters are {}", action.participle());
            api.show_long(request, what, |answer: &BulkResponse| describe_bulk(answer, action.participle())).await
        }
    }
}

/// Follows a bulk action that has a rate.
async fn watch_bulk(api: &Api, request: ApiRequest<'_>, action: Action) -> Result<ExitCode, CommandError> {
    let answer: BulkResponse = request.send().await.map_err(|error| api.name_options(error))?;
    let Some(id) = answer.id else {
        print(&describe_bulk(&answer, action.participle()));
        return Ok(ExitCode::SUCCESS);
    };
    let ended = progress::follow_bulk(api, &id.to_string(), answer.matched, action.participle()).await?;
    if let Some(error) = &ended.error {
        return Err(CommandError::Other(format!("the server stopped the action after {} jobs: {error}", ended.done)));
    }
    print(&if api.json {
        serde_json::to_string(&ended).map_err(|error| CommandError::Other(error.to_string()))?
    } else {
        done_text(ended.done, ended.skipped, action.participle())
    });
    Ok(ExitCode::SUCCESS)
}

async fn act_on_one(api: &Api, id: &str, action: Action) -> Result<ExitCode, CommandError> {
    let id = &ids::resolve(api, &ids::DEAD_LETTER, id).await?;
    match action {
        Action::Retry => api.show(api.post(&path(id, "/retry")), jobs::retried_text).await,
        Action::Delete => {
            // The answer has no body.
            api.delete(&path(id, "")).text().await?;
            print(&if api.json {
                json!({ "id": id, "deleted": true }).to_string()
            } else {
                format!("{id} was deleted")
            });
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn describe_bulk(answer: &BulkResponse, participle: &str) -> String {
    let at_least = if answer.matched_is_exact { "" } else { "at least " };
    let matched = format!("{at_least}{}", count(answer.matched, "dead letter"));
    if answer.dry_run {
        if answer.matched == 0 {
            return "no dead letters match (dry run)".into();
        }
        let mut table = table(["id", "type", "queue", "error"]);
        for job in &answer.examples {
            let error = shorten(job.error.as_deref().unwrap_or(""), 60);
            table.add_row([job.id.to_string(), job.kind.clone(), job.queue.clone(), error]);
        }
        return format!("{table}\n{matched} would be {participle} (dry run)");
    }
    if answer.matched == 0 {
        return "no dead letters match".into();
    }
    if let (Some(id), Some(n)) = (answer.id, answer.per_second) {
        let verb = if answer.matched == 1 { "is" } else { "are" };
        return format!("{matched} {verb} being {participle}, {n} per second (bulk action {id})");
    }
    done_text(answer.done, answer.skipped, participle)
}

fn done_text(done: u64, skipped: u64, participle: &str) -> String {
    let skipped = match skipped {
        0 => String::new(),
        n => format!("; {n} skipped (changed meanwhile)"),
    };
    format!("{} {participle}{skipped}", count(done, "dead letter"))
}

fn describe_stats(stats: &DeadLetterStats) -> String {
    let sample = match stats.reason_sample_size < stats.total {
        true => format!(" (of the newest {})", stats.reason_sample_size),
        false => String::new(),
    };
    let width = terminal_width().unwrap_or(usize::MAX);
    let mut lines = vec![count(stats.total, "dead letter")];
    let mut add = |title: String, counts: Vec<(&str, u64)>| {
        if !counts.is_empty() {
            lines.push(title);
            lines.extend(counts.iter().map(|(name, n)| shorten(&format!("  {n:>8}  {name}"), width)));
        }
    };
    add("by type".into(), stats.by_type.iter().map(|group| (group.job_type.as_str(), group.count)).collect());
    add("by queue".into(), stats.by_queue.iter().map(|group| (group.queue.as_str(), group.count)).collect());
    let reasons = stats.by_reason.iter().map(|group| (group.reason.as_str(), group.count)).collect();
    add(format!("by reason{sample}"), reasons);
    lines.extend(stats.oldest.map(|at| wrap(&format!("oldest: created {}", exact_and_relative(at)))));
    lines.extend(stats.newest.map(|at| wrap(&format!("newest: created {}", exact_and_relative(at)))));
    lines.join("\n")
}
