//! Parses the fields of one job.

use serde::Deserialize;

use super::{Fields, JobParser};
use crate::{FieldError, JobId, JobOptions, NewJob, OnParentFailure, Priority, RetryOn, RetryPolicy};

impl JobParser {
    /// Parses one job. Appends everything that is wrong with it to `errors`.
    pub(super) fn parse_job(&self, mut fields: Fields<'_>, id: JobId, errors: &mut Vec<FieldError>) -> NewJob {
        let mut job = NewJob { id, ..NewJob::new(String::new()) };
        let type_path = parse_type(&mut fields, &mut job);
        if let Some(queue) = fields.text("queue") {
            job.queue = queue;
        }
        if let Some(payload) = fields.object("payload") {
            job.payload = payload;
        }
        job.priority = fields.take::<Priority>("priority", "LOW, NORMAL, HIGH or CRITICAL").unwrap_or_default();
        job.correlation_id = fields.text("correlationId");
        job.reference = fields.text("ref");
        parse_options(&mut fields, &mut job.options);
        for parent in fields.list::<String>("dependsOn", "a list of job ids or refs") {
            match parent.parse::<JobId>() {
                Ok(id) => job.options.depends_on.push(id),
                Err(_) => job.depends_on_refs.push(parent),
            }
        }
        self.check_webhook_url(&mut fields, job.options.webhook_url.as_deref());
        let prefix = fields.prefix().to_owned();
        let own = fields.finish();
        let checked = job.check(&self.limits).into_iter().map(|error| {
            let path = if error.path == "type" { type_path } else { &error.path };
            FieldError::new(format!("{prefix}{path}"), error.message)
        });
        // A field that could not be read has its default value here. Its error is in `own` already, so a second one is dropped.
        let checked: Vec<FieldError> =
            checked.filter(|error| !own.iter().any(|known| known.path == error.path)).collect();
        errors.extend(own);
        errors.extend(checked);
        job
    }

    /// Rejects a webhook URL that cannot work. The addresses of a host name are checked when Faena connects.
    pub fn check_webhook_url(&self, fields: &mut Fields<'_>, url: Option<&str>) {
        // A URL with another scheme is rejected by `NewJob::check`.
        let Some(url) = url.filter(|url| url.starts_with("http")) else { return };
        match url.parse::<url::Url>() {
            Err(error) => fields.reject("webhookUrl", format!("is not a URL: {error}")),
            Ok(url) => {
                if let Err(error) = self.addresses.check_url(&url) {
                    fields.reject("webhookUrl", error.to_string());
                }
            }
        }
    }
}

/// Parses the name and the type. Returns the field that holds the type: without a `type`, it is `name`.
fn parse_type(fields: &mut Fields<'_>, job: &mut NewJob) -> &'static str {
    let errors_before = fields.errors.len();
    let name = fields.text("name");
    let name_is_readable = fields.errors.len() == errors_before;
    match (name, fields.text("type")) {
        (None, None) => {
            if name_is_readable {
                fields.reject("name", "is required unless type is set");
            }
            job.kind = "?".into();
        }
        (Some(name), None) => {
            job.kind = name;
            return "name";
        }
        (None, Some(kind)) => job.kind = kind,
        (Some(name), Some(kind)) => {
            job.options.name = (name != kind).then_some(name);
            job.kind = kind;
        }
    }
    "type"
}

fn parse_options(fields: &mut Fields<'_>, options: &mut JobOptions) {
    parse_retry_policy(fields, &mut options.retry);
    if let Some(jitter) = fields.take::<Jitter>("jitter", "true, false or a number from 0 to 1") {
        options.retry.jitter = jitter.factor();
    }
    options.timeout_ms = fields.number("timeoutMs");
    options.scheduled_at = fields.time("scheduledAt");
    options.expires_at = fields.time("expiresAt");
    options.webhook_url = fields.text("webhookUrl");
    options.idempotency_key = fields.text("idempotencyKey");
    options.unique_key = fields.text("uniqueKey");
    options.concurrency_key = fields.text("concurrencyKey");
    options.tags = fields.list("tags", "a list of strings");
    if let Some(choice) = fields.take::<OnParentFailure>("onParentFailure", "\"cancel\" or \"run\"") {
        options.on_parent_failure = choice;
    }
}

/// Parses the fields of a retry policy into `retry`. `null` restores a default; an absent field changes nothing.
pub fn parse_retry_policy(fields: &mut Fields<'_>, retry: &mut RetryPolicy) {
    let default = RetryPolicy::default();
    let number = "a non-negative integer";
    let mut retries = u64::from(retry.max_retries);
    fields.update("maxRetries", number, &mut retries, u64::from(default.max_retries));
    retry.max_retries = u32::try_from(retries).unwrap_or(u32::MAX);
    fields.update("retryDelay", number, &mut retry.retry_delay_ms, default.retry_delay_ms);
    fields.update("backoffMultiplier", "a number", &mut retry.backoff_multiplier, default.backoff_multiplier);
    fields.update("maxDelay", number, &mut retry.max_delay_ms, default.max_delay_ms);
    fields.update("retryDelays", "a list of milliseconds", &mut retry.retry_delays_ms, Vec::new());
    if fields.is_present("retryOn") {
        let retry_on = fields.take::<RetryOnField>("retryOn", "\"all\", \"transient\" or a list of patterns");
        retry.retry_on = retry_on.map_or(default.retry_on, Into::into);
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Jitter {
    Flag(bool),
    Factor(f64),
}

impl Jitter {
    fn factor(self) -> f64 {
        match self {
            Jitter::Flag(true) => 0.2,
            Jitter::Flag(false) => 0.0,
            Jitter::Factor(factor) => factor,
        }
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum RetryOnField {
    Named(RetryOnName),
    Patterns(Vec<String>),
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum RetryOnName {
    All,
    Transient,
}

impl From<RetryOnField> for RetryOn {
    fn from(field: RetryOnField) -> RetryOn {
        match field {
            RetryOnField::Named(RetryOnName::All) => RetryOn::All,
            RetryOnField::Named(RetryOnName::Transient) => RetryOn::Transient,
            RetryOnField::Patterns(patterns) => RetryOn::Patterns(patterns),
        }
    }
}
