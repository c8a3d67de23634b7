//! `faena schedules …`.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use faena_domain::{
    ScheduleId,
    schedule::{Misfire, ScheduleView, ScheduledRun, TickRow},
};
use faena_wire::{CreatedSchedule, RunList, ScheduleList, Success, TickList, Triggered, ValidSchedule};

use crate::{
    Api, CommandError, Connection,
    api::segment,
    complete, ids,
    output::{Details, count, exact_duration, print, relative, shorten, wrap},
    schedule_options::{FIELD_OPTIONS, ScheduleOptions, without_defaults},
    table::table,
};

#[derive(Subcommand)]
pub enum Command {
    /// List schedules, sorted by name
    #[command(after_help = "Example:\n  faena schedules list --active")]
    List(List),
    /// Create a schedule
    #[command(
        after_help = "Example:\n  faena schedules create --name nightly --cron '0 2 * * *' \\\n    --timezone Europe/Madrid --job report \\\n    \
                      --payload '{\"day\": \"{{due.date}}\"}' --overlap skip"
    )]
    Create(Create),
    /// Show a schedule with its next and latest due times
    #[command(after_help = "Example:\n  faena schedules show nightly")]
    Show(ScheduleArguments),
    /// Update a schedule; omitted fields are kept
    #[command(
        mut_args(without_defaults),
        after_help = "\"none\" removes an optional field: description, start, end, except, tag, webhook, concurrency-key, timeout, jitter, max-runs.\n\nExample:\n  faena schedules edit nightly --cron '30 3 * * MON-FRI' --end none"
    )]
    Edit(Edit),
    /// Enable a schedule; due times missed while it was disabled are not caught up
    #[command(after_help = "Example:\n  faena schedules enable nightly")]
    Enable(ScheduleArguments),
    /// Disable a schedule
    #[command(after_help = "Example:\n  faena schedules disable nightly")]
    Disable(ScheduleArguments),
    /// Create a job from a schedule now
    #[command(after_help = "Example:\n  faena schedules trigger nightly")]
    Trigger(ScheduleArguments),
    /// Show the next due times, with a note where daylight saving applies
    #[command(after_help = "Example:\n  faena schedules preview nightly --count 3")]
    Preview(Preview),
    /// List the due times of a schedule and their outcomes, latest first
    #[command(after_help = "Example:\n  faena schedules ticks nightly --limit 5")]
    Ticks(Ticks),
    /// Check a schedule and show its next due times, without creating it
    #[command(
        after_help = "Example:\n  faena schedules validate --name x --cron '0 9 * * 1#1' \\\n    --timezone America/New_York --job noop"
    )]
    Validate(Create),
    /// Delete a schedule; its jobs are kept
    #[command(after_help = "Example:\n  faena schedules delete nightly")]
    Delete(ScheduleArguments),
}

#[derive(Args)]
pub struct ScheduleArguments {
    /// Schedule id, the beginning of one, or name
    #[arg(value_name = "ID|NAME", add = complete::schedules())]
    schedule: String,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct List {
    /// Only enabled schedules
    #[arg(long, conflicts_with = "inactive")]
    active: bool,
    /// Only disabled or finished schedules
    #[arg(long)]
    inactive: bool,
    /// Only schedules with this text in their name
    #[arg(short = 'q', long, value_name = "TEXT")]
    search: Option<String>,
    /// Page number
    #[arg(long, default_value_t = 1, value_name = "N")]
    page: u64,
    /// Maximum number of schedules per page, up to 100
    #[arg(long, default_value_t = 20, value_name = "N")]
    limit: u32,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct Create {
    #[command(flatten)]
    options: Box<ScheduleOptions>,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct Edit {
    /// Schedule id, the beginning of one, or name
    #[arg(value_name = "ID|NAME", add = complete::schedules())]
    schedule: String,
    #[command(flatten)]
    options: Box<ScheduleOptions>,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct Preview {
    /// Schedule id, the beginning of one, or name
    #[arg(value_name = "ID|NAME", add = complete::schedules())]
    schedule: String,
    /// Number of due times
    #[arg(long, default_value_t = 10, value_name = "N")]
    count: u32,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct Ticks {
    /// Schedule id, the beginning of one, or name
    #[arg(value_name = "ID|NAME", add = complete::schedules())]
    schedule: String,
    /// Maximum number of due times
    #[arg(long, default_value_t = 20, value_name = "N")]
    limit: u32,
    /// Only due times before this time, like 2026-11-15T20:00:00Z
    #[arg(long, value_name = "TIME")]
    before: Option<String>,
    #[command(flatten)]
    connection: Connection,
}

pub async fn run(command: Command) -> Result<ExitCode, CommandError> {
    match command {
        Command::List(list) => show_list(list).await,
        Command::Create(create) => {
            let api = Api::new(&create.connection)?.with_options(FIELD_OPTIONS);
            api.show(api.post("/api/v1/schedules").json_text(create.options.create_body()?), created).await
        }
        Command::Validate(create) => {
            let api = Api::new(&create.connection)?.with_options(FIELD_OPTIONS);
            let request = api.post("/api/v1/schedules/validate").json_text(create.options.create_body()?);
            let describe = |valid: &ValidSchedule| format!("{}\n{}", wrap(&valid.explanation), runs(&valid.next_runs));
            api.show(request, describe).await
        }
        Command::Show(arguments) => show(arguments).await,
        Command::Edit(edit) => {
            let body = edit.options.update_body()?;
            let api = Api::new(&edit.connection)?.with_options(FIELD_OPTIONS);
            let path = path(&api, &edit.schedule, "").await?;
            api.show(api.patch(&path).json_text(body), changed).await
        }
        Command::Enable(arguments) => set_active(arguments, "/enable").await,
        Command::Disable(arguments) => set_active(arguments, "/disable").await,
        Command::Trigger(arguments) => {
            let api = Api::new(&arguments.connection)?;
            let path = path(&api, &arguments.schedule, "/trigger").await?;
            api.show(api.post(&path), |triggered: &Triggered| triggered.job_id.to_string()).await
        }
        Command::Delete(arguments) => {
            let api = Api::new(&arguments.connection)?;
            let path = path(&api, &arguments.schedule, "").await?;
            let message = format!("{} was deleted; its jobs are kept", arguments.schedule);
            api.show(api.delete(&path), |_: &Success| message).await
        }
        Command::Preview(preview) => {
            let api = Api::new(&preview.connection)?;
            let path = path(&api, &preview.schedule, "/preview").await?;
            let describe = |list: &RunList| format!("{}\n{}", wrap(&list.explanation), runs(&list.next_runs));
            api.show(api.get(&path).query("count", preview.count), describe).await
        }
        Command::Ticks(arguments) => {
            let api = Api::new(&arguments.connection)?;
            let path = path(&api, &arguments.schedule, "/ticks").await?;
            let request = api.get(&path).query("limit", arguments.limit).query_opt("before", arguments.before);
            api.show(request, |list: &TickList| ticks(&list.ticks)).await
        }
    }
}

async fn set_active(arguments: ScheduleArguments, rest: &str) -> Result<ExitCode, CommandError> {
    let api = Api::new(&arguments.connection)?;
    let path = path(&api, &arguments.schedule, rest).await?;
    api.show(api.post(&path), changed).await
}

/// Returns the path of a schedule, given its id or a unique name.
async fn path(api: &Api, schedule: &str, rest: &str) -> Result<String, CommandError> {
    if schedule.parse::<ScheduleId>().is_ok() {
        return Ok(format!("/api/v1/schedules/{}{rest}", segment(schedule)));
    }
    let request = api.get("/api/v1/schedules").query("name", schedule).query("limit", 100);
    let found: ScheduleList = request.send().await?;
    match found.schedules.as_slice() {
        [] => Ok(format!("/api/v1/schedules/{}{rest}", by_beginning(api, schedule).await?)),
        [schedule] => Ok(format!("/api/v1/schedules/{}{rest}", schedule.id)),
        several => {
            let lines = several.iter().map(|one| format!("\n  {}  {}", one.id, one.explanation));
            let lines: String = lines.collect();
            let total = found.total;
            Err(CommandError::Other(format!("{total} schedules have the name \"{schedule}\"; pass an id:{lines}")))
        }
    }
}

/// How many pages of schedules are searched for the beginning of an id. The list is not sorted by id.
const SEARCHED_PAGES: u64 = 10;

/// Returns the id of the only schedule whose id begins with a text.
async fn by_beginning(api: &Api, text: &str) -> Result<ScheduleId, CommandError> {
    let unknown = || CommandError::Other(format!("no schedule \"{text}\"; list them with \"faena schedules list\""));
    if !ids::is_beginning(text) {
        return Err(unknown());
    }
    let mut found: Vec<ScheduleView> = Vec::new();
    for page in 1..=SEARCHED_PAGES {
        let list: ScheduleList = api.get("/api/v1/schedules").query("page", page).query("limit", 100).send().await?;
        let pages = list.total_pages;
        found.extend(list.schedules.into_iter().filter(|one| ids::has_beginning(&one.id.to_string(), text)));
        if page >= pages {
            break;
        }
    }
    match found.as_slice() {
        [] => Err(unknown()),
        [one] => Ok(one.id),
        several => {
            let lines: String = several.iter().map(|one| format!("\n  {}  {}", one.id, one.name)).collect();
            let message = format!("several schedules have an id that begins with \"{text}\"; pass more characters:");
            Err(CommandError::Other(format!("{message}{lines}")))
        }
    }
}

async fn show_list(list: List) -> Result<ExitCode, CommandError> {
    let api = Api::new(&list.connection)?;
    let is_active = (list.active || list.inactive).then_some(list.active);
    let empty = match is_active.is_some() || list.search.is_some() || list.page > 1 {
        true => "no schedules match",
        false => "no schedules; create one with \"faena schedules create\"",
    };
    let request = api
        .get("/api/v1/schedules")
        .query("page", list.page)
        .query("limit", list.limit)
        .query_opt("q", list.search)
        .query_opt("isActive", is_active);
    api.show(request, |page| listed(page, empty)).await
}

fn listed(list: &ScheduleList, empty: &str) -> String {
    if list.schedules.is_empty() {
        return wrap(empty);
    }
    let mut table = table(["id", "name", "next", "due", "type", "last", "runs"]);
    for schedule in &list.schedules {
        table.add_row([
            schedule.id.to_string(),
            schedule.name.clone(),
            schedule.next_run_at.map_or_else(|| inactive(schedule), relative),
            schedule.explanation.clone(),
            schedule.job_type.clone(),
            schedule.last_run_at.map(relative).unwrap_or_default(),
            schedule.run_count.to_string(),
        ]);
    }
    let next = list.page.map(|page| page + 1).filter(|next| *next <= list.total_pages);
    let more = next.map(|page| format!("; next page: --page {page}")).unwrap_or_default();
    let summary = wrap(&format!("{} of {}{more}", list.schedules.len(), count(list.total, "schedule")));
    format!("{table}\n{summary}")
}

/// Returns why a schedule has no next run.
fn inactive(schedule: &ScheduleView) -> String {
    if schedule.finished.is_some() { "finished".into() } else { "disabled".into() }
}

fn created(schedule: &CreatedSchedule) -> String {
    match schedule.next_run_at {
        Some(at) => format!("{}  {}  next run at {at}", schedule.id, schedule.name),
        None => format!("{}  {}  disabled", schedule.id, schedule.name),
    }
}

fn changed(schedule: &ScheduleView) -> String {
    match schedule.next_run_at {
        Some(at) => format!("{}  {}  next run at {at}: {}", schedule.id, schedule.name, schedule.explanation),
        None => format!("{}  {}  {}", schedule.id, schedule.name, inactive(schedule)),
    }
}

/// How many due times, next and latest, are shown with a schedule.
const SHOWN_DUE_TIMES: u32 = 5;

async fn show(arguments: ScheduleArguments) -> Result<ExitCode, CommandError> {
    let api = Api::new(&arguments.connection)?;
    let path = path(&api, &arguments.schedule, "").await?;
    if api.json {
        print(&api.get(&path).text().await?);
        return Ok(ExitCode::SUCCESS);
    }
    let schedule: ScheduleView = api.get(&path).send().await?;
    let next: RunList = api.get(&format!("{path}/preview")).query("count", SHOWN_DUE_TIMES).send().await?;
    let latest: TickList = api.get(&format!("{path}/ticks")).query("limit", SHOWN_DUE_TIMES).send().await?;
    print(&describe(&schedule, &next.next_runs, &latest.ticks));
    Ok(ExitCode::SUCCESS)
}

fn describe(schedule: &ScheduleView, next: &[ScheduledRun], latest: &[TickRow]) -> String {
    let mut details = Details::new(17);
    details.add("schedule", schedule.id.to_string());
    details.add("name", schedule.name.clone());
    details.add_opt("description", schedule.description.as_ref());
    details.add("due", schedule.explanation.clone());
    details.add_opt("cron", schedule.cron_expression.as_ref());
    details.add_opt("every", schedule.interval_ms.map(exact_duration));
    details.add_opt("start", schedule.start_at);
    details.add_opt("end", schedule.end_at);
    details.add("except", schedule.except.join(", "));
    let name = if schedule.job_name == schedule.job_type { String::new() } else { format!(" ({})", schedule.job_name) };
    details.add("job", format!("{}{name}, queue {}, {}", schedule.job_type, schedule.queue, schedule.job_priority));
    details.add("payload", shorten(schedule.job_payload.get(), 200));
    details.add("retries", format!("{}, first after {}", schedule.max_retries, exact_duration(schedule.retry_delay)));
    details.add_opt("timeout", schedule.timeout_ms.map(exact_duration));
    details.add_opt("concurrency key", schedule.concurrency_key.as_ref());
    details.add_opt("webhook", schedule.webhook_url.as_ref());
    details.add("tags", schedule.tags.join(", "));
    let limit = match schedule.misfire {
        Misfire::CatchUp => format!(" up to {}", schedule.catch_up_limit),
        Misfire::RunOnce | Misfire::Skip => String::new(),
    };
    let grace = exact_duration(schedule.misfire_grace_ms);
    details.add("misfire", format!("{}{limit}, after {grace}", json_name(&schedule.misfire)));
    if schedule.cron_expression.is_some() {
        let (gap, overlap) = (json_name(&schedule.dst_gap), json_name(&schedule.dst_overlap));
        details.add("daylight saving", format!("gap {gap}, overlap {overlap}"));
    }
    details.add("overlap", json_name(&schedule.overlap));
    details.add_opt(
        "jitter",
        Some(schedule.jitter_ms).filter(|ms| *ms > 0).map(|ms| format!("up to {}", exact_duration(ms))),
    );
    let max = schedule.max_runs.map(|max| format!(" of {max}")).unwrap_or_default();
    details.add("runs", format!("{}{max}", schedule.run_count));
    details.add("next run", schedule.next_run_at.map_or_else(|| inactive(schedule), |at| at.to_string()));
    details.add_opt("finished", schedule.finished.as_ref());
    details.add_opt("last run", schedule.last_run_at);
    if !next.is_empty() {
        details.line(if schedule.is_active { "next due times" } else { "next due times, if it were enabled" });
        details.line(runs(next));
    }
    if !latest.is_empty() {
        details.line("latest due times");
        details.line(ticks(latest));
    }
    details.text()
}

/// Returns the name of a choice in JSON.
fn json_name(choice: &impl serde::Serialize) -> String {
    serde_json::to_value(choice).ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}

fn runs(runs: &[ScheduledRun]) -> String {
    let mut table = table(["time", "local time", "note"]);
    for run in runs {
        table.add_row([run.at.to_string(), run.local.clone(), run.note.clone().unwrap_or_default()]);
    }
    table.to_string()
}

fn ticks(ticks: &[TickRow]) -> String {
    let mut table = table(["due", "outcome", "job", "reason", "recorded"]);
    for tick in ticks {
        let due = match (tick.through_at, tick.count) {
            (Some(last), Some(count)) => format!("{} to {last} ({count})", tick.due_at),
            (Some(last), None) => format!("{} to {last} (many)", tick.due_at),
            (None, _) => tick.due_at.to_string(),
        };
        table.add_row([
            due,
            tick.outcome.as_str().to_owned(),
            tick.job_id.map(|id| id.to_string()).unwrap_or_default(),
            tick.reason.clone().unwrap_or_default(),
            relative(tick.at),
        ]);
    }
    table.or_text("no due times yet")
}
