//! The options that describe a schedule, and the body they become.

use clap::Args;
use faena_domain::parse_duration;
use serde_json::{Map, Value, json};

use crate::{CommandError, api::FieldOptions, enqueue::parse_json};

#[derive(Args)]
pub struct ScheduleOptions {
    /// Name of the schedule
    #[arg(long)]
    name: Option<String>,
    /// Description, shown in lists
    #[arg(long, value_name = "TEXT")]
    description: Option<String>,
    /// Cron expression with 5 or 6 fields, or a shortcut like @daily
    #[arg(long, value_name = "EXPRESSION", conflicts_with = "every")]
    cron: Option<String>,
    /// Interval between due times, like 90s, 15m or 6h
    #[arg(long, value_name = "DURATION")]
    every: Option<String>,
    /// Time zone, like Europe/Madrid [default: UTC]
    #[arg(long, value_name = "ZONE")]
    timezone: Option<String>,
    /// Job type: noop, http.request, or a type that one of your workers handles
    #[arg(long, value_name = "TYPE")]
    job: Option<String>,
    /// Display name of the jobs [default: the type]
    #[arg(long, value_name = "NAME")]
    job_name: Option<String>,
    /// Payload, a JSON object or @FILE; its strings may use {{due}}, {{due.date}}, {{run}} and others
    #[arg(long, value_name = "JSON|@FILE")]
    payload: Option<String>,
    /// Priority: LOW, NORMAL, HIGH or CRITICAL [default: NORMAL]
    #[arg(long)]
    priority: Option<String>,
    /// Queue [default: default]
    #[arg(long)]
    queue: Option<String>,
    /// Maximum number of retries of each job [default: 3]
    #[arg(long, value_name = "N")]
    max_retries: Option<u32>,
    /// Maximum duration of one run, like 30s or 5m
    #[arg(long, value_name = "DURATION")]
    timeout: Option<String>,
    /// URL to notify when a job finishes
    #[arg(long, value_name = "URL")]
    webhook: Option<String>,
    /// Key whose jobs share a concurrency limit, 1 unless a limit is set
    #[arg(long, value_name = "KEY")]
    concurrency_key: Option<String>,
    /// Tag of each job; repeat for several
    #[arg(long = "tag", value_name = "TAG")]
    tags: Vec<String>,
    /// What happens to due times missed in an outage: run_once, skip or catch_up [default: run_once]
    #[arg(long, value_name = "POLICY")]
    misfire: Option<String>,
    /// Delay after which a due time counts as missed [default: 1m]
    #[arg(long, value_name = "DURATION")]
    misfire_grace: Option<String>,
    /// Maximum number of missed due times that catch_up runs [default: 100]
    #[arg(long, value_name = "N")]
    catch_up_limit: Option<u32>,
    /// What happens while the previous job is unfinished: allow, skip, queue_one or cancel_previous [default: allow]
    #[arg(long, value_name = "POLICY")]
    overlap: Option<String>,
    /// Maximum random delay of each job, like 30s
    #[arg(long, value_name = "DURATION")]
    jitter: Option<String>,
    /// No due times before this time, like 2026-11-15T20:00:00Z
    #[arg(long, value_name = "TIME")]
    start: Option<String>,
    /// No due times after this time
    #[arg(long, value_name = "TIME")]
    end: Option<String>,
    /// No due times on a day (2026-12-25), in a range (2026-12-24/2027-01-06) or when a cron expression matches; repeat for several
    #[arg(long, value_name = "WHEN")]
    except: Vec<String>,
    /// Stop after N runs
    #[arg(long, value_name = "N|none")]
    max_runs: Option<String>,
    /// Due times in the hour that daylight saving skips: next or skip [default: next]
    #[arg(long, value_name = "POLICY")]
    dst_gap: Option<String>,
    /// Due times in the hour that daylight saving repeats: first or both [default: first]
    #[arg(long, value_name = "POLICY")]
    dst_overlap: Option<String>,
    /// Disable the schedule; it creates no jobs until you enable it
    #[arg(long)]
    disabled: bool,
}

pub const FIELD_OPTIONS: FieldOptions = &[
    ("cronExpression", "--cron"),
    ("intervalMs", "--every"),
    ("jobType", "--job"),
    ("jobPayload", "--payload"),
    ("jobPriority", "--priority"),
    ("timeoutMs", "--timeout"),
    ("webhookUrl", "--webhook"),
    ("misfireGraceMs", "--misfire-grace"),
    ("jitterMs", "--jitter"),
    ("startAt", "--start"),
    ("endAt", "--end"),
    ("tags", "--tag"),
    ("isActive", "--disabled"),
];

/// Removes the defaults from the help of an option: a field that an update omits is kept.
pub fn without_defaults(option: clap::Arg) -> clap::Arg {
    let help = option.get_help().map(ToString::to_string).unwrap_or_default();
    match help.find(" [default: ") {
        Some(start) if !help[start..].contains("FAENA_URL") => option.help(help[..start].to_owned()),
        _ => option,
    }
}

impl ScheduleOptions {
    /// Returns the body of a new schedule.
    pub fn create_body(&self) -> Result<String, CommandError> {
        let required = [
            (self.name.is_none(), "--name NAME"),
            (self.cron.is_none() && self.every.is_none(), "--cron EXPRESSION or --every DURATION"),
            (self.job.is_none() && self.job_name.is_none(), "--job TYPE"),
        ];
        let missing: Vec<&str> =
            required.into_iter().filter(|(is_missing, _)| *is_missing).map(|(_, name)| name).collect();
        match missing.is_empty() {
            true => self.body(),
            false => Err(CommandError::Usage(format!("missing {}", missing.join(", ")))),
        }
    }

    /// Returns the body of an update. Omitted fields are kept.
    pub fn update_body(&self) -> Result<String, CommandError> {
        match self.body()? {
            body if body == "{}" => {
                Err(CommandError::Usage("nothing to change; pass an option, --help lists them".into()))
            }
            body => Ok(body),
        }
    }

    fn body(&self) -> Result<String, CommandError> {
        let mut fields: Map<String, Value> = Map::new();
        let mut put = |name: &str, value: Option<Value>| {
            if let Some(value) = value {
                fields.insert(name.into(), value);
            }
        };
        // A cron expression replaces an interval, and an interval a cron expression.
        if self.cron.is_some() {
            put("intervalMs", Some(Value::Null));
        }
        if self.every.is_some() {
            put("cronExpression", Some(Value::Null));
        }
        for (name, text) in [
            ("name", &self.name),
            ("cronExpression", &self.cron),
            ("timezone", &self.timezone),
            ("jobType", &self.job),
            ("queue", &self.queue),
            ("misfire", &self.misfire),
            ("overlap", &self.overlap),
        ] {
            put(name, text.clone().map(Value::from));
        }
        for (name, text) in [
            ("description", &self.description),
            ("jobName", &self.job_name),
            ("webhookUrl", &self.webhook),
            ("concurrencyKey", &self.concurrency_key),
            ("startAt", &self.start),
            ("endAt", &self.end),
            ("dstGap", &self.dst_gap),
            ("dstOverlap", &self.dst_overlap),
        ] {
            put(name, text.as_deref().map(null_if_none));
        }
        put("jobPriority", self.priority.as_ref().map(|text| text.to_uppercase().into()));
        put("maxRetries", self.max_retries.map(Value::from));
        put("catchUpLimit", self.catch_up_limit.map(Value::from));
        put("intervalMs", milliseconds("--every", self.every.as_deref())?);
        put("timeoutMs", milliseconds("--timeout", self.timeout.as_deref())?);
        put("misfireGraceMs", milliseconds("--misfire-grace", self.misfire_grace.as_deref())?);
        put("jitterMs", milliseconds("--jitter", self.jitter.as_deref())?);
        put("maxRuns", number("--max-runs", self.max_runs.as_deref())?);
        put("tags", list(&self.tags));
        put("except", list(&self.except));
        put("isActive", self.disabled.then_some(Value::Bool(false)));
        let body = Value::Object(fields).to_string();
        match &self.payload {
            Some(text) => with_payload(body, text),
            None => Ok(body),
        }
    }
}

/// Inserts the payload unchanged, so no number in it loses digits.
fn with_payload(mut body: String, argument: &str) -> Result<String, CommandError> {
    let text = match argument.strip_prefix('@') {
        Some(file) => std::fs::read_to_string(file)
            .map_err(|error| CommandError::Usage(format!("--payload: cannot read \"{file}\": {error}")))?,
        None => argument.to_owned(),
    };
    let payload = parse_json("--payload", &text)?;
    body.pop();
    let comma = if body.len() > 1 { "," } else { "" };
    Ok(format!("{body}{comma}\"jobPayload\":{}}}", payload.get()))
}

fn null_if_none(text: &str) -> Value {
    if text == "none" { Value::Null } else { json!(text) }
}

fn milliseconds(option: &str, text: Option<&str>) -> Result<Option<Value>, CommandError> {
    let Some(text) = text else { return Ok(None) };
    if text == "none" {
        return Ok(Some(Value::Null));
    }
    let invalid =
        || CommandError::Usage(format!("{option}: not a valid duration: \"{text}\"; write it like 90s, 15m, 6h or 1d"));
    let ms = u64::try_from(parse_duration(text).ok_or_else(invalid)?.as_millis()).map_err(|_| invalid())?;
    Ok(Some(json!(ms)))
}

fn number(option: &str, text: Option<&str>) -> Result<Option<Value>, CommandError> {
    let Some(text) = text else { return Ok(None) };
    if text == "none" {
        return Ok(Some(Value::Null));
    }
    let invalid = |_| CommandError::Usage(format!("{option}: not a number or \"none\": \"{text}\""));
    Ok(Some(json!(text.parse::<u64>().map_err(invalid)?)))
}

/// Returns the entries; `none` alone empties the list.
fn list(entries: &[String]) -> Option<Value> {
    match entries {
        [] => None,
        [entry] if entry == "none" => Some(Value::Null),
        entries => Some(json!(entries)),
    }
}
