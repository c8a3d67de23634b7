//! What can be said of a schedule on a command line, and the body that says the same.

use clap::Args;
use faena_domain::parse_duration;
use serde_json::{Map, Value, json, value::RawValue};

use crate::Problem;

/// `none` takes away what may be absent.
#[derive(Args)]
pub struct Flags {
    #[arg(long)]
    name: Option<String>,
    #[arg(long)]
    description: Option<String>,
    /// When, as a cron expression of 5 or 6 fields, or @daily and the like
    #[arg(long, value_name = "EXPRESSION", conflicts_with = "every")]
    cron: Option<String>,
    /// When, as a distance: 90s, 15m, 6h
    #[arg(long, value_name = "DURATION")]
    every: Option<String>,
    /// The zone whose clocks count, like Europe/Madrid [default: UTC]
    #[arg(long, value_name = "ZONE")]
    timezone: Option<String>,
    /// The type of the job: noop, http.request, or one that a worker of yours knows
    #[arg(long, value_name = "TYPE")]
    job: Option<String>,
    /// A name of the job for people [default: its type]
    #[arg(long, value_name = "NAME")]
    job_name: Option<String>,
    /// A JSON object, or @FILE; its texts may use {{due}}, {{due.date}}, {{run}} and others
    #[arg(long, value_name = "JSON|@FILE")]
    payload: Option<String>,
    /// LOW, NORMAL, HIGH or CRITICAL
    #[arg(long)]
    priority: Option<String>,
    #[arg(long)]
    queue: Option<String>,
    #[arg(long, value_name = "N")]
    max_retries: Option<u32>,
    /// How long a job may take: 30s, 5m
    #[arg(long, value_name = "DURATION")]
    timeout: Option<String>,
    /// Where to tell how each job ended
    #[arg(long, value_name = "URL")]
    webhook: Option<String>,
    /// Jobs with the same key run one at a time, or as many as a limit says
    #[arg(long, value_name = "KEY")]
    concurrency_key: Option<String>,
    #[arg(long = "tag", value_name = "TAG")]
    tags: Vec<String>,
    /// After an outage: run_once, skip or catch_up [default: run_once]
    #[arg(long)]
    misfire: Option<String>,
    /// How late the oldest due time may be met before it counts as an outage [default: 1m]
    #[arg(long, value_name = "DURATION")]
    misfire_grace: Option<String>,
    /// How many due times catch_up makes up for at most [default: 100]
    #[arg(long, value_name = "N")]
    catch_up_limit: Option<u32>,
    /// While the last job is still going: allow, skip, queue_one or cancel_previous [default: allow]
    #[arg(long)]
    overlap: Option<String>,
    /// Each job waits a while of its own, up to this: 30s
    #[arg(long, value_name = "DURATION")]
    jitter: Option<String>,
    /// Nothing before this time, like 2026-11-15T20:00:00Z
    #[arg(long, value_name = "TIME")]
    start: Option<String>,
    /// Nothing after this time
    #[arg(long, value_name = "TIME")]
    end: Option<String>,
    /// A day (2026-12-25), a span (2026-12-24/2027-01-06) or a cron expression in which nothing fires; may be given several times
    #[arg(long, value_name = "WHEN")]
    except: Vec<String>,
    /// So many jobs, then no more
    #[arg(long, value_name = "N|none")]
    max_runs: Option<String>,
    /// Times that the clocks skip: next or skip
    #[arg(long, value_name = "CHOICE")]
    dst_gap: Option<String>,
    /// Times that come twice: first or both
    #[arg(long, value_name = "CHOICE")]
    dst_overlap: Option<String>,
    /// Let it not fire until it is enabled
    #[arg(long)]
    disabled: bool,
}

impl Flags {
    /// The body of a new schedule.
    pub fn whole_body(&self) -> Result<String, Problem> {
        let missing = [
            (self.name.is_none(), "--name NAME"),
            (self.cron.is_none() && self.every.is_none(), "--cron EXPRESSION or --every DURATION"),
            (self.job.is_none() && self.job_name.is_none(), "--job TYPE"),
        ];
        let missing: Vec<&str> = missing.into_iter().filter(|(gone, _)| *gone).map(|(_, flag)| flag).collect();
        match missing.is_empty() {
            true => self.body(),
            false => Err(Problem::Usage(format!("say also {}", missing.join(", ")))),
        }
    }

    /// The body of a change: what is not said stays.
    pub fn patch_body(&self) -> Result<String, Problem> {
        match self.body()? {
            nothing if nothing == "{}" => Err(Problem::Usage("say what shall be different; --help lists it".into())),
            body => Ok(body),
        }
    }

    fn body(&self) -> Result<String, Problem> {
        let mut fields: Map<String, Value> = Map::new();
        let mut put = |name: &str, value: Option<Value>| {
            if let Some(value) = value {
                fields.insert(name.into(), value);
            }
        };
        // One replaces the other.
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
            put(name, text.as_deref().map(or_none));
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

/// The payload as it was given: no number in it is touched.
fn with_payload(mut body: String, said: &str) -> Result<String, Problem> {
    let text = match said.strip_prefix('@') {
        Some(file) => std::fs::read_to_string(file).map_err(|error| Problem::Usage(format!("{file}: {error}")))?,
        None => said.to_owned(),
    };
    let payload: Box<RawValue> =
        serde_json::from_str(text.trim()).map_err(|e| Problem::Usage(format!("the payload is not valid JSON: {e}")))?;
    body.pop();
    let comma = if body.len() > 1 { "," } else { "" };
    Ok(format!("{body}{comma}\"jobPayload\":{}}}", payload.get()))
}

fn or_none(text: &str) -> Value {
    if text == "none" { Value::Null } else { json!(text) }
}

fn milliseconds(flag: &str, text: Option<&str>) -> Result<Option<Value>, Problem> {
    let Some(text) = text else { return Ok(None) };
    if text == "none" {
        return Ok(Some(Value::Null));
    }
    let wrong = || Problem::Usage(format!("{flag} {text} is no duration; write 90s, 15m, 6h or 1d"));
    let ms = u64::try_from(parse_duration(text).ok_or_else(wrong)?.as_millis()).map_err(|_| wrong())?;
    Ok(Some(json!(ms)))
}

fn number(flag: &str, text: Option<&str>) -> Result<Option<Value>, Problem> {
    let Some(text) = text else { return Ok(None) };
    if text == "none" {
        return Ok(Some(Value::Null));
    }
    let number =
        text.parse::<u64>().map_err(|_| Problem::Usage(format!("{flag} {text} is neither a number nor none")))?;
    Ok(Some(json!(number)))
}

/// `none` alone empties the list.
fn list(entries: &[String]) -> Option<Value> {
    match entries {
        [] => None,
        [one] if one == "none" => Some(Value::Null),
        entries => Some(json!(entries)),
    }
}
