//! From a body to jobs. Parsing is the validation.

use std::collections::HashMap;

use faena_domain::{FieldError, JobId, JobLimits, NewJob, OnParentFailure, Priority, RetryOn, RetryPolicy};
use faena_engine::{JobReader, address::AddressRule};
use serde::Deserialize;
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};

use crate::{
    ApiError,
    fields::{Fields, body_object},
};

/// One job from its fields. Everything that is wrong with it goes into `faults`.
pub fn read_job(
    mut fields: Fields<'_>,
    id: JobId,
    limits: &JobLimits,
    rule: &AddressRule,
    faults: &mut Vec<FieldError>,
) -> NewJob {
    let name = fields.text("name");
    let kind = fields.text("type");
    let named_only = kind.is_none() && name.is_some();
    let mut job = NewJob { id, ..NewJob::new(String::new()) };
    match (name, kind) {
        (None, None) => {
            if !fields.faults.iter().any(|fault| fault.path.ends_with("name")) {
                fields.fault("name", "is required (or type)");
            }
            job.kind = "?".into();
        }
        (Some(name), None) => job.kind = name,
        (None, Some(kind)) => job.kind = kind,
        (Some(name), Some(kind)) => {
            job.options.name = (name != kind).then_some(name);
            job.kind = kind;
        }
    }
    if let Some(queue) = fields.text("queue") {
        job.queue = queue;
    }
    if let Some(payload) = fields.object("payload") {
        job.payload = payload;
    }
    job.priority = fields.take::<Priority>("priority", "LOW, NORMAL, HIGH or CRITICAL").unwrap_or_default();
    job.correlation_id = fields.text("correlationId");
    job.reference = fields.text("ref");
    let options = &mut job.options;
    read_retry(&mut fields, &mut options.retry);
    if let Some(jitter) = fields.take::<Jitter>("jitter", "true, false or a number from 0 to 1") {
        options.retry.jitter = jitter.part();
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
    for parent in fields.list::<String>("dependsOn", "a list of job ids or refs") {
        match parent.parse::<JobId>() {
            Ok(id) => options.depends_on.push(id),
            Err(_) => job.depends_on_refs.push(parent),
        }
    }
    check_webhook(&mut fields, job.options.webhook_url.as_deref(), rule);
    let prefix = fields.prefix().to_owned();
    let own = fields.finish();
    // A field that could not be read is named once, not again for its default's sake.
    let checked = job.check(limits).into_iter().map(|fault| {
        // Without a type the name is the type.
        let path = if named_only && fault.path == "type" { "name" } else { &fault.path };
        FieldError::new(format!("{prefix}{path}"), fault.message)
    });
    let checked: Vec<FieldError> = checked.filter(|fault| !own.iter().any(|known| known.path == fault.path)).collect();
    faults.extend(own);
    faults.extend(checked);
    job
}

/// One job that comes alone.
pub fn read_single(
    fields: Fields<'_>,
    id: JobId,
    limits: &JobLimits,
    rule: &AddressRule,
    faults: &mut Vec<FieldError>,
) -> NewJob {
    let job = read_job(fields, id, limits, rule, faults);
    if job.reference.is_some() || !job.depends_on_refs.is_empty() {
        let path = if job.reference.is_some() { "ref" } else { "dependsOn" };
        faults.push(FieldError::new(path, "refs are for batches; a single job depends on job ids"));
    }
    job
}

/// Reads jobs that come by other ways than a request, by the same rules.
pub fn job_reader(limits: JobLimits, rule: AddressRule, body_bytes: usize) -> JobReader {
    JobReader::new(move |body| {
        let fields = body_object(body.as_bytes(), body_bytes).map_err(|error| {
            if error.details.is_empty() { vec![FieldError::new("body", error.message)] } else { error.details }
        })?;
        let mut faults = Vec::new();
        let mut job = read_single(fields, JobId::new(), &limits, &rule, &mut faults);
        if job.options.idempotency_key.is_some() {
            job.fingerprint = Some(Sha256::digest(body).into());
        }
        if faults.is_empty() { Ok(job) } else { Err(faults) }
    })
}

/// How often a job is tried again, and when. `null` is the default.
pub fn read_retry(fields: &mut Fields<'_>, retry: &mut RetryPolicy) {
    let default = RetryPolicy::default();
    let number = "a whole number, not negative";
    let mut retries = u64::from(retry.max_retries);
    fields.change("maxRetries", number, &mut retries, u64::from(default.max_retries));
    retry.max_retries = u32::try_from(retries).unwrap_or(u32::MAX);
    fields.change("retryDelay", number, &mut retry.retry_delay_ms, default.retry_delay_ms);
    fields.change("backoffMultiplier", "a number", &mut retry.backoff_multiplier, default.backoff_multiplier);
    fields.change("maxDelay", number, &mut retry.max_delay_ms, default.max_delay_ms);
    fields.change("retryDelays", "a list of milliseconds", &mut retry.retry_delays_ms, Vec::new());
    if fields.is_present("retryOn") {
        let when = fields.take::<RetryWhen>("retryOn", "\"all\", \"transient\" or a list of patterns");
        retry.retry_on = when.map_or(default.retry_on, Into::into);
    }
}

/// What can be said of an address before anything is sent to it; the rest is seen when it is connected to.
pub fn check_webhook(fields: &mut Fields<'_>, url: Option<&str>, rule: &AddressRule) {
    let Some(url) = url.filter(|url| url.starts_with("http")) else { return };
    let checked = url.parse::<url::Url>().map_err(|error| format!("is not a URL: {error}"));
    if let Err(message) = checked.and_then(|url| rule.check_url(&url)) {
        fields.fault("webhookUrl", message);
    }
}

/// Several jobs, which may refer to each other by `ref`.
pub fn read_batch(mut body: Fields<'_>, limits: &JobLimits, rule: &AddressRule) -> Result<Vec<NewJob>, ApiError> {
    let raw = body.raw("jobs");
    let mut faults = body.finish();
    let list: Vec<&RawValue> = match raw.map(|raw| serde_json::from_str::<Vec<&RawValue>>(raw.get())) {
        Some(Ok(list)) if list.len() > limits.max_batch => {
            faults.push(FieldError::new(
                "jobs",
                format!("must have at most {} jobs, has {}", limits.max_batch, list.len()),
            ));
            Vec::new()
        }
        Some(Ok(list)) if list.is_empty() => {
            faults.push(FieldError::new("jobs", "must not be empty"));
            Vec::new()
        }
        Some(Ok(list)) => list,
        _ => {
            faults.push(FieldError::new("jobs", "must be a list of jobs"));
            Vec::new()
        }
    };
    let mut jobs = Vec::with_capacity(list.len());
    for (index, raw) in list.into_iter().enumerate() {
        match Fields::inner(raw, format!("jobs[{index}].")) {
            Ok(fields) => jobs.push(read_job(fields, JobId::new(), limits, rule, &mut faults)),
            Err(fault) => faults.push(fault),
        }
        if faults.len() >= MOST_FAULTS {
            break;
        }
    }
    if faults.is_empty() {
        faults = resolve(&mut jobs);
    }
    if faults.is_empty() { Ok(jobs) } else { Err(ApiError::invalid(faults)) }
}

/// A batch that is wrong throughout is not answered with a megabyte of faults.
const MOST_FAULTS: usize = 100;

/// KeyLocks refs into ids. Says which refs are unknown, given twice, or go in a circle.
fn resolve(jobs: &mut [NewJob]) -> Vec<FieldError> {
    let mut faults = Vec::new();
    let mut by_ref: HashMap<String, usize> = HashMap::new();
    for (index, job) in jobs.iter().enumerate() {
        if let Some(name) = &job.reference
            && by_ref.insert(name.clone(), index).is_some()
        {
            faults.push(FieldError::new(format!("jobs[{index}].ref"), format!("{name} is used twice")));
        }
    }
    let mut parents: Vec<Vec<usize>> = Vec::with_capacity(jobs.len());
    for (index, job) in jobs.iter().enumerate() {
        let mut known = Vec::new();
        for name in &job.depends_on_refs {
            match by_ref.get(name) {
                Some(parent) => known.push(*parent),
                None => faults.push(FieldError::new(
                    format!("jobs[{index}].dependsOn"),
                    format!("{name} is neither a job id nor a ref of this batch"),
                )),
            }
        }
        parents.push(known);
    }
    if let Some(index) = find_circle(&parents) {
        faults.push(FieldError::new(format!("jobs[{index}].dependsOn"), "goes in a circle"));
    }
    if faults.is_empty() {
        let ids: Vec<JobId> = jobs.iter().map(|job| job.id).collect();
        for (job, parents) in jobs.iter_mut().zip(parents) {
            job.options.depends_on.extend(parents.into_iter().map(|parent| ids[parent]));
        }
    }
    faults
}

/// Takes away what depends on nothing, again and again; what cannot be taken away is part of a circle or behind one.
fn find_circle(parents: &[Vec<usize>]) -> Option<usize> {
    let mut open: Vec<usize> = parents.iter().map(Vec::len).collect();
    let mut children: Vec<Vec<usize>> = vec![Vec::new(); parents.len()];
    for (child, list) in parents.iter().enumerate() {
        for parent in list {
            children[*parent].push(child);
        }
    }
    let mut free: Vec<usize> = (0..parents.len()).filter(|index| open[*index] == 0).collect();
    while let Some(parent) = free.pop() {
        for child in &children[parent] {
            open[*child] -= 1;
            if open[*child] == 0 {
                free.push(*child);
            }
        }
    }
    open.iter().position(|count| *count > 0)
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Jitter {
    Flag(bool),
    Part(f64),
}

impl Jitter {
    fn part(self) -> f64 {
        match self {
            Jitter::Flag(true) => 0.2,
            Jitter::Flag(false) => 0.0,
            Jitter::Part(part) => part,
        }
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum RetryWhen {
    Named(Named),
    Patterns(Vec<String>),
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Named {
    All,
    Transient,
}

impl From<RetryWhen> for RetryOn {
    fn from(when: RetryWhen) -> RetryOn {
        match when {
            RetryWhen::Named(Named::All) => RetryOn::All,
            RetryWhen::Named(Named::Transient) => RetryOn::Transient,
            RetryWhen::Patterns(patterns) => RetryOn::Patterns(patterns),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(body: &str) -> Vec<String> {
        let fields = body_object(body.as_bytes(), 1 << 20).expect("an object");
        match read_batch(fields, &JobLimits::default(), &AddressRule::default()) {
            Ok(_) => Vec::new(),
            Err(error) => error.details.into_iter().map(|fault| format!("{}: {}", fault.path, fault.message)).collect(),
        }
    }

    #[test]
    fn refs_become_ids() {
        let body = r#"{"jobs":[{"name":"noop","ref":"a"},{"name":"noop","dependsOn":["a"]}]}"#;
        let fields = body_object(body.as_bytes(), 1 << 20).expect("an object");
        let jobs = read_batch(fields, &JobLimits::default(), &AddressRule::default()).expect("a good batch");
        assert_eq!(jobs[1].options.depends_on, [jobs[0].id]);
    }

    #[test]
    fn circles_unknown_and_double_refs_are_refused() {
        assert_eq!(
            faults(r#"{"jobs":[{"name":"a","ref":"a","dependsOn":["b"]},{"name":"b","ref":"b","dependsOn":["a"]}]}"#),
            ["jobs[0].dependsOn: goes in a circle"]
        );
        assert_eq!(
            faults(r#"{"jobs":[{"name":"a","ref":"a","dependsOn":["a"]}]}"#),
            ["jobs[0].dependsOn: goes in a circle"]
        );
        assert_eq!(
            faults(r#"{"jobs":[{"name":"a","ref":"x"},{"name":"b","ref":"x","dependsOn":["y"]}]}"#),
            ["jobs[1].ref: x is used twice", "jobs[1].dependsOn: y is neither a job id nor a ref of this batch"]
        );
    }

    #[test]
    fn a_long_chain_is_no_circle() {
        let jobs: Vec<String> = (0..5_000)
            .map(|n| {
                if n == 0 {
                    r#"{"name":"a","ref":"r0"}"#.into()
                } else {
                    format!(r#"{{"name":"a","ref":"r{n}","dependsOn":["r{}"]}}"#, n - 1)
                }
            })
            .collect();
        assert_eq!(faults(&format!(r#"{{"jobs":[{}]}}"#, jobs.join(","))), Vec::<String>::new());
    }
}
