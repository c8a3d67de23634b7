//! `faena schedules …`.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use faena_domain::{
    Timestamp,
    schedule::{Misfire, ScheduleView, ScheduledRun, TickRow},
};
use faena_wire::{CreatedSchedule, RunList, ScheduleList, Success, TickList, Triggered, ValidSchedule};
use reqwest::Method;

use crate::{
    Client, Connection, Problem, print,
    schedule_flags::Flags,
    table,
    workers::{escaped, shorten},
};

#[derive(Subcommand)]
pub enum Command {
    /// List schedules, by name
    List(List),
    /// Make a schedule
    #[command(
        after_help = "Example:\n  faena schedules create --name nightly --cron '0 2 * * *' --timezone Europe/Madrid --job report \\\n    \
                      --payload '{\"day\": \"{{due.date}}\"}' --overlap skip"
    )]
    Create(Create),
    /// Show one: when it is due, in words; the next runs; what became of the last due times
    Show(One),
    /// Change one; what is not said stays
    #[command(
        after_help = "`none` takes away what may be absent: the description, start, end, except, tags, webhook, key, timeout, jitter, max-runs.\n\nExample:\n  faena schedules edit nightly --cron '30 3 * * MON-FRI' --end none"
    )]
    Edit(Edit),
    /// Let it fire from now on; what was due while it was off is not made up for
    Enable(One),
    /// Let it not fire until it is enabled again
    Disable(One),
    /// Make a job of it now, whatever is due
    Trigger(One),
    /// Show the next runs, with a note where daylight saving bites
    Preview(Preview),
    /// Show what became of its due times, the latest first
    Ticks(Ticks),
    /// Say what `create` would say, and the next ten runs, without storing anything
    #[command(
        after_help = "Example:\n  faena schedules validate --name x --cron '0 9 * * 1#1' --timezone America/New_York --job noop"
    )]
    Validate(Create),
    /// Remove it; the jobs that it made stay
    Delete(One),
}

#[derive(Args)]
pub struct One {
    /// Its id, or its name
    #[arg(value_name = "ID|NAME")]
    schedule: String,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct List {
    /// Only those that fire
    #[arg(long, conflicts_with = "inactive")]
    active: bool,
    /// Only those that do not
    #[arg(long)]
    inactive: bool,
    /// Part of the name
    #[arg(short, long)]
    q: Option<String>,
    #[arg(long, default_value_t = 1)]
    page: u64,
    #[arg(long, default_value_t = 20)]
    limit: u32,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct Create {
    #[command(flatten)]
    flags: Box<Flags>,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct Edit {
    /// Its id, or its name
    #[arg(value_name = "ID|NAME")]
    schedule: String,
    #[command(flatten)]
    flags: Box<Flags>,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct Preview {
    /// Its id, or its name
    #[arg(value_name = "ID|NAME")]
    schedule: String,
    #[arg(long, default_value_t = 10)]
    count: u32,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct Ticks {
    /// Its id, or its name
    #[arg(value_name = "ID|NAME")]
    schedule: String,
    #[arg(long, default_value_t = 20)]
    limit: u32,
    /// Only what was due before this time, like 2026-11-15T20:00:00Z
    #[arg(long, value_name = "TIME")]
    before: Option<String>,
    #[command(flatten)]
    connection: Connection,
}

pub async fn run(command: Command) -> Result<ExitCode, Problem> {
    match command {
        Command::List(list) => show_list(list).await?,
        Command::Create(create) => {
            let client = Client::new(&create.connection)?;
            let request = post(&client, "/api/v1/schedules", create.flags.whole_body()?);
            client.show(request, created).await?;
        }
        Command::Validate(create) => {
            let client = Client::new(&create.connection)?;
            let request = post(&client, "/api/v1/schedules/validate", create.flags.whole_body()?);
            client
                .show(request, |valid: &ValidSchedule| format!("{}\n{}", valid.explanation, runs(&valid.next_runs)))
                .await?;
        }
        Command::Show(one) => show(one).await?,
        Command::Edit(edit) => {
            let body = edit.flags.patch_body()?;
            let client = Client::new(&edit.connection)?;
            let request = client.request(Method::PATCH, &path(&client, &edit.schedule, "").await?);
            client.show(request.header("content-type", "application/json").body(body), stands).await?;
        }
        Command::Enable(one) => change(one, Method::POST, "/enable", stands).await?,
        Command::Disable(one) => change(one, Method::POST, "/disable", stands).await?,
        Command::Trigger(one) => {
            change(one, Method::POST, "/trigger", |triggered: &Triggered| triggered.job_id.to_string()).await?;
        }
        Command::Delete(one) => {
            let gone = format!("{} is gone; its jobs stay", one.schedule);
            change(one, Method::DELETE, "", |_: &Success| gone).await?;
        }
        Command::Preview(preview) => {
            let client = Client::new(&preview.connection)?;
            let request = client.request(Method::GET, &path(&client, &preview.schedule, "/preview").await?);
            let words = |list: &RunList| format!("{}\n{}", list.explanation, runs(&list.runs));
            client.show(request.query(&[("count", preview.count)]), words).await?;
        }
        Command::Ticks(ask) => {
            let client = Client::new(&ask.connection)?;
            let request = client.request(Method::GET, &path(&client, &ask.schedule, "/ticks").await?);
            let mut query = vec![("limit", ask.limit.to_string())];
            query.extend(ask.before.map(|before| ("before", before)));
            client.show(request.query(&query), |list: &TickList| ticks(&list.ticks)).await?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn post(client: &Client, path: &str, body: String) -> reqwest::RequestBuilder {
    client.request(Method::POST, path).header("content-type", "application/json").body(body)
}

async fn change<T: serde::de::DeserializeOwned>(
    one: One,
    method: Method,
    rest: &str,
    words: impl FnOnce(&T) -> String,
) -> Result<(), Problem> {
    let client = Client::new(&one.connection)?;
    let request = client.request(method, &path(&client, &one.schedule, rest).await?);
    client.show(request, words).await
}

/// The path of a schedule that is called by its id, or by a name that no other has.
async fn path(client: &Client, said: &str, rest: &str) -> Result<String, Problem> {
    if said.parse::<faena_domain::ScheduleId>().is_ok() {
        return Ok(format!("/api/v1/schedules/{}{rest}", escaped(said)));
    }
    let request = client.request(Method::GET, "/api/v1/schedules").query(&[("name", said), ("limit", "100")]);
    let found: ScheduleList = client.call(request).await?;
    match found.schedules.as_slice() {
        [] => Err(Problem::Other(format!("there is no schedule {said}; `faena schedules list` shows them"))),
        [one] => Ok(format!("/api/v1/schedules/{}{rest}", one.id)),
        several => {
            let lines = several.iter().map(|one| format!("\n  {}  {}", one.id, one.explanation));
            let lines: String = lines.collect();
            Err(Problem::Other(format!("{} schedules are called {said}; say which by its id:{lines}", found.total)))
        }
    }
}

async fn show_list(list: List) -> Result<(), Problem> {
    let client = Client::new(&list.connection)?;
    let mut query = vec![("page", list.page.to_string()), ("limit", list.limit.to_string())];
    query.extend(list.q.map(|q| ("q", q)));
    if list.active || list.inactive {
        query.push(("isActive", list.active.to_string()));
    }
    let request = client.request(Method::GET, "/api/v1/schedules").query(&query);
    client.show(request, listed).await
}

fn listed(found: &ScheduleList) -> String {
    let mut table = table(["id", "name", "due", "job", "next run", "last run", "runs"]);
    for schedule in &found.schedules {
        table.add_row([
            schedule.id.to_string(),
            shorten(&schedule.name, 40),
            shorten(&schedule.explanation, 60),
            schedule.job_type.clone(),
            next_run(schedule),
            time(schedule.last_run_at),
            schedule.run_count.to_string(),
        ]);
    }
    let pages = found.total.div_ceil(found.limit.max(1));
    let more = if found.page < pages { format!("; more with --page {}", found.page + 1) } else { String::new() };
    format!("{table}\n{} of {} schedules{more}", found.schedules.len(), found.total)
}

fn time(at: Option<Timestamp>) -> String {
    at.map(|at| at.to_string()).unwrap_or_default()
}

fn next_run(schedule: &ScheduleView) -> String {
    match (&schedule.next_run_at, &schedule.finished) {
        (Some(at), _) => at.to_string(),
        (None, Some(_)) => "finished".into(),
        (None, None) => "disabled".into(),
    }
}

fn created(schedule: &CreatedSchedule) -> String {
    match schedule.next_run_at {
        Some(at) => format!("{}  {}  runs next at {at}", schedule.id, schedule.name),
        None => format!("{}  {}  is disabled", schedule.id, schedule.name),
    }
}

fn stands(schedule: &ScheduleView) -> String {
    match schedule.next_run_at {
        Some(at) => format!("{}  {}  runs next at {at}: {}", schedule.id, schedule.name, schedule.explanation),
        None => format!("{}  {}  is disabled", schedule.id, schedule.name),
    }
}

/// How many coming runs and past due times are shown with a schedule.
const A_FEW: u32 = 5;

async fn show(one: One) -> Result<(), Problem> {
    let client = Client::new(&one.connection)?;
    let path = path(&client, &one.schedule, "").await?;
    let request = client.request(Method::GET, &path);
    if one.connection.json {
        print(&client.text(request).await?);
        return Ok(());
    }
    let schedule: ScheduleView = client.call(request).await?;
    let coming = client.request(Method::GET, &format!("{path}/preview")).query(&[("count", A_FEW)]);
    let coming: RunList = client.call(coming).await?;
    let past = client.request(Method::GET, &format!("{path}/ticks")).query(&[("limit", A_FEW)]);
    let past: TickList = client.call(past).await?;
    print(&describe(&schedule, &coming.runs, &past.ticks));
    Ok(())
}

fn describe(schedule: &ScheduleView, coming: &[ScheduledRun], past: &[TickRow]) -> String {
    let mut lines = vec![format!("schedule       {}", schedule.id)];
    let mut line = |name: &str, value: String| {
        if !value.is_empty() {
            lines.push(format!("{name:<15}{value}"));
        }
    };
    line("name", schedule.name.clone());
    line("description", schedule.description.clone().unwrap_or_default());
    line("due", schedule.explanation.clone());
    line("cron", schedule.cron_expression.clone().unwrap_or_default());
    line("every", schedule.interval_ms.map(|ms| format!("{ms} ms")).unwrap_or_default());
    line("start", time(schedule.start_at));
    line("end", time(schedule.end_at));
    line("except", schedule.except.join(", "));
    let name = if schedule.job_name == schedule.job_type { String::new() } else { format!(" ({})", schedule.job_name) };
    line("job", format!("{}{name}, queue {}, {}", schedule.job_type, schedule.queue, schedule.job_priority));
    line("payload", shorten(schedule.job_payload.get(), 200));
    let timeout = schedule.timeout_ms.map(|ms| format!(", timeout {ms} ms")).unwrap_or_default();
    line("retries", format!("{}, the first after {} ms{timeout}", schedule.max_retries, schedule.retry_delay));
    line("key", schedule.concurrency_key.clone().unwrap_or_default());
    line("webhook", schedule.webhook_url.clone().unwrap_or_default());
    line("tags", schedule.tags.join(", "));
    let limit = match schedule.misfire {
        Misfire::CatchUp => format!(" up to {}", schedule.catch_up_limit),
        Misfire::RunOnce | Misfire::Skip => String::new(),
    };
    line("misfire", format!("{}{limit}; grace {} ms", word(&schedule.misfire), schedule.misfire_grace_ms));
    if schedule.cron_expression.is_some() {
        line("clock changes", format!("gap {}, overlap {}", word(&schedule.dst_gap), word(&schedule.dst_overlap)));
    }
    line("overlap", word(&schedule.overlap));
    line("jitter", if schedule.jitter_ms > 0 { format!("up to {} ms", schedule.jitter_ms) } else { String::new() });
    let most = schedule.max_runs.map(|most| format!(" of {most}")).unwrap_or_default();
    line("runs", format!("{}{most}", schedule.run_count));
    line("next run", next_run(schedule));
    line("finished", schedule.finished.clone().unwrap_or_default());
    line("last run", time(schedule.last_run_at));
    if !coming.is_empty() {
        lines.push(if schedule.is_active { "next runs" } else { "next runs, if it were enabled" }.into());
        lines.push(runs(coming));
    }
    if !past.is_empty() {
        lines.push("last due times".into());
        lines.push(ticks(past));
    }
    lines.join("\n")
}

/// The name by which it stands in JSON.
fn word(choice: &impl serde::Serialize) -> String {
    serde_json::to_value(choice).ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}

fn runs(runs: &[ScheduledRun]) -> String {
    let mut table = table(["at", "local time", "note"]);
    for run in runs {
        table.add_row([run.at.to_string(), run.local.clone(), run.note.clone().unwrap_or_default()]);
    }
    table.to_string()
}

fn ticks(ticks: &[TickRow]) -> String {
    let mut table = table(["due", "outcome", "job", "decided", "why"]);
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
            tick.at.to_string(),
            tick.reason.clone().unwrap_or_default(),
        ]);
    }
    table.to_string()
}
