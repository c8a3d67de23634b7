//! Parses the fields of a schedule. The same rules apply to creating and to changing a schedule.

use faena_domain::{
    FieldError, Priority, Timestamp,
    parse::{Fields, JobParser, parse_retry_policy},
    schedule::{JobTemplate, Misfire, Overlap, ScheduleSpec, Timing},
};

/// Settings of a schedule after the fields of a request were applied.
pub struct ParsedSchedule {
    pub spec: ScheduleSpec,
    pub is_active: Option<bool>,
    /// Fields that could not be read. The domain checks the values of the others.
    pub errors: Vec<FieldError>,
}

impl ParsedSchedule {
    /// Returns all errors, including those of the domain. A field that could not be read is reported once.
    pub fn merge_errors(&self, domain_errors: Vec<FieldError>) -> Vec<FieldError> {
        let is_known = |path: &str| self.errors.iter().any(|error| error.path == path);
        let others = domain_errors.into_iter().filter(|error| !is_known(&error.path));
        self.errors.iter().cloned().chain(others).collect()
    }
}

const NUMBER: &str = "a non-negative integer";
const TIME: &str = Timestamp::EXPECTED;

/// Applies the fields to `spec`. `null` removes a value or restores its default; an absent field changes nothing.
pub fn parse_schedule(mut fields: Fields<'_>, mut spec: ScheduleSpec, parser: &JobParser) -> ParsedSchedule {
    fields.alias("cronExpr", "cronExpression");
    fields.alias("enabled", "isActive");
    let default = ScheduleSpec::default();
    let errors_before = fields.errors.len();
    fields.update("name", "a string", &mut spec.name, default.name);
    if spec.name.is_empty() && fields.errors.len() == errors_before {
        fields.reject("name", "is required");
    }
    fields.update("description", "a string", &mut spec.description, None);
    parse_timing(&mut fields, &mut spec.timing);
    parse_template(&mut fields, &mut spec.job, parser);
    fields.update("misfire", "run_once, skip or catch_up", &mut spec.misfire, Misfire::default());
    fields.update("misfireGraceMs", NUMBER, &mut spec.misfire_grace_ms, default.misfire_grace_ms);
    let mut catch_up = u64::from(spec.catch_up_limit);
    fields.update("catchUpLimit", NUMBER, &mut catch_up, u64::from(default.catch_up_limit));
    spec.catch_up_limit = u32::try_from(catch_up).unwrap_or(u32::MAX);
    fields.update("overlap", "allow, skip, queue_one or cancel_previous", &mut spec.overlap, Overlap::default());
    fields.update("jitterMs", NUMBER, &mut spec.jitter_ms, default.jitter_ms);
    fields.update("maxRuns", NUMBER, &mut spec.max_runs, None);
    let is_active = fields.take("isActive", "true or false");
    ParsedSchedule { spec, is_active, errors: fields.finish() }
}

fn parse_timing(fields: &mut Fields<'_>, timing: &mut Timing) {
    let default = Timing::default();
    let errors_before = fields.errors.len();
    fields.update("cronExpression", "a string", &mut timing.cron_expression, None);
    fields.update("intervalMs", NUMBER, &mut timing.interval_ms, None);
    if fields.errors.len() > errors_before && timing.cron_expression.is_none() && timing.interval_ms.is_none() {
        // A placeholder for the value that could not be read, so that it is not also reported as missing.
        timing.interval_ms = Some(60_000);
    }
    fields.update("timezone", "the name of a time zone, like Europe/Madrid", &mut timing.timezone, default.timezone);
    fields.update("dstGap", "next or skip", &mut timing.dst_gap, None);
    fields.update("dstOverlap", "first or both", &mut timing.dst_overlap, None);
    fields.update("startAt", TIME, &mut timing.start_at, None);
    fields.update("endAt", TIME, &mut timing.end_at, None);
    fields.update("except", "a list of strings", &mut timing.except, Vec::new());
}

fn parse_template(fields: &mut Fields<'_>, job: &mut JobTemplate, parser: &JobParser) {
    let default = JobTemplate::default();
    parse_names(fields, job);
    if fields.is_present("jobPayload") {
        job.payload = fields.object("jobPayload").unwrap_or(default.payload);
    }
    fields.update("jobPriority", "LOW, NORMAL, HIGH or CRITICAL", &mut job.priority, Priority::default());
    fields.update("queue", "a string", &mut job.queue, default.queue);
    parse_retry_policy(fields, &mut job.options.retry);
    fields.update("timeoutMs", NUMBER, &mut job.options.timeout_ms, None);
    if fields.is_present("webhookUrl") {
        job.options.webhook_url = fields.text("webhookUrl");
        parser.check_webhook_url(fields, job.options.webhook_url.as_deref());
    }
    fields.update("concurrencyKey", "a string", &mut job.options.concurrency_key, None);
    fields.update("tags", "a list of strings", &mut job.options.tags, Vec::new());
}

/// Parses the name and the type of the jobs.
///
/// If a new schedule sets no type, the name is also the type. Changing the name later does not change the type.
fn parse_names(fields: &mut Fields<'_>, job: &mut JobTemplate) {
    let errors_before = fields.errors.len();
    let mut name = job.options.name.take();
    fields.update("jobName", "a string", &mut name, None);
    if fields.is_present("jobType") || job.kind.is_empty() {
        job.kind = fields.text("jobType").or_else(|| name.clone()).unwrap_or_default();
    }
    job.options.name = name.filter(|name| *name != job.kind);
    if job.kind.is_empty() {
        if fields.errors.len() == errors_before {
            fields.reject("jobName", "is required unless jobType is set");
        }
        // A placeholder, so that the domain does not report the type a second time.
        job.kind = "?".into();
    }
}
