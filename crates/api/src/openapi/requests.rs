//! Schemas of the bodies that handlers of this crate read field by field. Those of jobs are in `faena_domain::parse::schema`.

use faena_domain::{
    JobLimits,
    parse::schema::{
        Object, about, any_object, boolean, error_reason, integer, job_state, list, one_of, priority, text, time, uuid,
        webhook_url, with_default, with_retry_policy,
    },
};
use faena_machine::MAX_RUNNING;
use serde_json::{Value, json};

const DAY_MS: u64 = 86_400_000;

/// Schema of a text that a filter compares with.
pub fn filter_text() -> Value {
    json!({"type": "string", "pattern": "^[^\\u0000-\\u001f\\u007f-\\u009f]*$"})
}

/// Schema of a text to search for. It must not be blank.
pub fn search_text() -> Value {
    json!({"type": "string", "pattern": "^[^\\u0000-\\u001f\\u007f-\\u009f]*[^\\s\\u0000-\\u001f\\u007f-\\u009f][^\\u0000-\\u001f\\u007f-\\u009f]*$"})
}

/// Schema of one value, several values separated by commas, or a list of values.
fn one_or_several(value: Value) -> Value {
    let names: Vec<&str> = value["enum"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let any = names.join("|");
    let separated = json!({"type": "string", "pattern": format!("^({any})(,({any}))*$")});
    json!({"anyOf": [separated, {"type": "array", "items": separated}]})
}

/// Returns the fields of a job filter in a body, except the status.
fn job_filter() -> Vec<(&'static str, Value)> {
    vec![
        ("priority", one_or_several(priority())),
        ("type", filter_text()),
        ("name", filter_text()),
        ("queue", filter_text()),
        ("tag", filter_text()),
        ("correlationId", filter_text()),
        ("scheduleId", filter_text()),
        ("workerId", filter_text()),
        ("error", about(search_text(), "A part of the error.")),
        ("payload", about(search_text(), "A part of the payload.")),
        ("reason", error_reason()),
        ("createdAfter", time()),
        ("createdBefore", time()),
        ("q", about(search_text(), "A part of a name, type or queue, or an exact id, correlation id or key.")),
    ]
}

/// Schema of a filter. Its values must not be `null`, unlike those of other optional fields.
fn filter_object(fields: Vec<(&'static str, Value)>, description: &str) -> Value {
    let properties: serde_json::Map<String, Value> =
        fields.into_iter().map(|(name, schema)| (name.to_owned(), schema)).collect();
    let schema = json!({"type": "object", "properties": properties, "additionalProperties": false});
    about(schema, description)
}

fn bulk(filter: Vec<(&'static str, Value)>) -> Value {
    Object::new()
        .optional("filter", filter_object(filter, "The jobs to act on: the filters of `GET /api/v1/jobs`."))
        .optional("all", with_default(about(boolean(), "Confirms a filter that matches every job."), false))
        .optional("dryRun", with_default(about(boolean(), "Only counts the jobs and shows examples."), false))
        .optional(
            "perSecond",
            about(integer(1, 10_000), "Maximum rate per second. With it, the action runs in the background."),
        )
        .build()
}

pub fn bulk_jobs(_: &JobLimits) -> Value {
    let mut filter = job_filter();
    filter.push(("status", one_or_several(job_state())));
    bulk(filter)
}

pub fn bulk_dead_letters(_: &JobLimits) -> Value {
    let mut filter = job_filter();
    filter.push(("jobType", about(filter_text(), "The same as `type`.")));
    bulk(filter)
}

pub fn new_schedule(limits: &JobLimits) -> Value {
    schedule_fields(
        limits,
        Object::new().required("name", about(text(255), "Display name; several schedules may have the same name.")),
    )
    .any_of(["jobName", "jobType"])
    .build()
}

pub fn schedule_patch(limits: &JobLimits) -> Value {
    schedule_fields(limits, Object::new().optional("name", text(255))).not_empty().build()
}

fn schedule_fields(limits: &JobLimits, object: Object) -> Object {
    let description = json!({"type": "string", "minLength": 1, "maxLength": 2_000, "pattern": "^[^\\u0000-\\u0009\\u000b-\\u001f\\u007f-\\u009f]*$"});
    let cron =
        about(json!({"type": "string"}), "Five or six fields, or a nickname such as `@daily`. This or `intervalMs`.");
    let blackouts = list(json!({"type": "string"}), 0, 100);
    let object = object
        .optional("description", description)
        .optional("cronExpression", cron)
        .optional("cronExpr", about(json!({"type": "string"}), "The same as `cronExpression`."))
        .optional(
            "intervalMs",
            about(integer(1_000, 3_650 * DAY_MS), "Time between two due times. This or `cronExpression`."),
        )
        .optional(
            "timezone",
            with_default(about(json!({"type": "string"}), "An IANA name such as `Europe/Madrid`."), "UTC"),
        )
        .optional("dstGap", about(one_of(["next", "skip"]), "What to do with local times that the clocks skip."))
        .optional("dstOverlap", about(one_of(["first", "both"]), "What to do with local times that occur twice."))
        .optional("startAt", about(time(), "Earliest due time. Intervals are counted from it."))
        .optional("endAt", about(time(), "Latest due time."))
        .optional(
            "except",
            about(blackouts, "Days, ranges and cron expressions in local time, in which nothing fires."),
        )
        .optional(
            "misfire",
            with_default(
                about(
                    one_of(["run_once", "skip", "catch_up"]),
                    "What to do with due times that passed while no server ran.",
                ),
                "run_once",
            ),
        )
        .optional(
            "misfireGraceMs",
            with_default(about(integer(1_000, DAY_MS), "How late a due time may be processed."), 60_000),
        )
        .optional(
            "catchUpLimit",
            with_default(about(integer(1, 10_000), "Maximum number of jobs that `catch_up` creates."), 100),
        )
        .optional(
            "overlap",
            with_default(
                about(
                    one_of(["allow", "skip", "queue_one", "cancel_previous"]),
                    "What to do while an earlier job is unfinished.",
                ),
                "allow",
            ),
        )
        .optional(
            "jitterMs",
            with_default(about(integer(0, DAY_MS), "Upper bound of the random delay of each job."), 0),
        )
        .optional(
            "maxRuns",
            about(integer(1, i64::MAX.unsigned_abs()), "Number of jobs after which the schedule ends."),
        )
        .optional("isActive", with_default(boolean(), true))
        .optional("enabled", about(boolean(), "The same as `isActive`."));
    with_template(limits, object)
}

/// Adds the fields of the jobs that a schedule creates.
fn with_template(limits: &JobLimits, object: Object) -> Object {
    let payload = about(any_object(), "Placeholders such as `{{due}}` in its strings are replaced for each job.");
    let object = object
        .optional(
            "jobName",
            about(
                text(255),
                "Name of the jobs. Without `jobType` it is also the type, and has at most 100 characters.",
            ),
        )
        .optional("jobType", text(100))
        .optional("jobPayload", with_default(payload, json!({})))
        .optional("jobPriority", with_default(priority(), "NORMAL"))
        .optional("queue", with_default(text(100), "default"));
    with_retry_policy(object, limits)
        .optional("timeoutMs", integer(1, 30 * DAY_MS))
        .optional("webhookUrl", webhook_url())
        .optional("concurrencyKey", text(255))
        .optional("tags", list(text(100), 0, limits.max_tags))
}

/// Schema of the notes about a resolved dead letter.
fn notes() -> Value {
    with_default(json!({"type": "string", "maxLength": 2_000}), "")
}

fn with_event_filter(object: Object) -> Object {
    let filter = vec![
        ("sink", filter_text()),
        ("type", about(filter_text(), "A type, or a pattern with `*`.")),
        ("aggregateId", uuid()),
        ("movedAfter", time()),
        ("movedBefore", time()),
    ];
    object
        .optional("filter", filter_object(filter, "The rejected events to act on."))
        .optional("all", with_default(about(boolean(), "Confirms a filter that matches every rejected event."), false))
}

pub fn replay_events(_: &JobLimits) -> Value {
    with_event_filter(Object::new()).optional("perSecond", about(integer(1, 100_000), "Events per second.")).build()
}

pub fn resolve_events(_: &JobLimits) -> Value {
    with_event_filter(Object::new()).optional("notes", notes()).build()
}

pub fn resolve_event(_: &JobLimits) -> Value {
    Object::new().optional("notes", notes()).build()
}

pub fn republish(_: &JobLimits) -> Value {
    Object::new()
        .required("sink", about(json!({"type": "string"}), "Name of a sink."))
        .required("from", time())
        .required("to", about(time(), "Later than `from`."))
        .optional("type", about(json!({"type": "string"}), "A type, or a pattern with `*`."))
        .optional("perSecond", about(integer(1, 100_000), "Events per second."))
        .build()
}

fn with_limit(object: Object) -> Object {
    let rate = json!({"anyOf": [
        {"type": "string", "pattern": "^[0-9]+/([0-9]+(ms|s|m|h|d))+$", "description": "Such as `100/1m`."},
        {
            "type": "object",
            "properties": {"count": integer(1, 10_000_000), "periodMs": integer(1, 31 * DAY_MS)},
            "required": ["count", "periodMs"],
            "additionalProperties": false,
        },
    ]});
    object
        .optional("concurrency", about(integer(1, 1_000_000), "Jobs in flight. `null`: no limit."))
        .optional("rate", about(rate, "Starts per period. `null`: no limit."))
}

pub fn queue_patch(_: &JobLimits) -> Value {
    with_limit(Object::new())
        .optional("strict", about(boolean(), "Jobs of a higher priority always go first."))
        .optional("fairness", about(one_of(["none", "key"]), "`key`: round robin over the concurrency keys."))
        .not_empty()
        .build()
}

pub fn pause(_: &JobLimits) -> Value {
    Object::new().optional("reason", about(text(255), "Reason shown to other people.")).build()
}

fn limit_scope() -> Object {
    Object::new()
        .required("scope", one_of(["system", "queue", "type", "key", "machine"]))
        .optional(
            "name",
            about(text(255), "The queue, type, key or machine; absent for `system`. A key may end with `*`."),
        )
        .one_of_cases(vec![
            json!({"properties": {"scope": {"const": "system"}, "name": {"type": "null"}, "rate": {"type": "null"}}}),
            json!({
                "properties": {"scope": {"enum": ["queue", "type"]}, "name": {"type": "string", "maxLength": 100}},
                "required": ["name"],
            }),
            json!({"properties": {"scope": {"const": "key"}, "name": {"type": "string"}}, "required": ["name"]}),
            json!({
                "properties": {
                    "scope": {"const": "machine"}, "name": {"type": "string", "maxLength": 100},
                    "rate": {"type": "null"}, "concurrency": {"type": ["integer", "null"], "maximum": MAX_RUNNING},
                },
                "required": ["name"],
            }),
        ])
}

pub fn limit_patch(_: &JobLimits) -> Value {
    with_limit(limit_scope()).build()
}

pub fn limit_reset(_: &JobLimits) -> Value {
    limit_scope().build()
}

pub fn rotation(_: &JobLimits) -> Value {
    let overlap = json!({"type": "string", "pattern": "^([0-9]+(ms|s|m|h|d))+$"});
    let overlap = about(overlap, "How long the old secret stays valid, `0s` to `30d`.");
    Object::new().optional("overlap", with_default(overlap, "24h")).build()
}

pub fn registration(_: &JobLimits) -> Value {
    let names = |min| list(text(100), min, 1_000);
    Object::new()
        .required("capabilities", about(names(1), "Job types, or prefixes followed by `*`."))
        .optional(
            "workerId",
            about(text(100), "One per start of the process, the same after a reconnect. Default: a new id."),
        )
        .optional(
            "sessionToken",
            about(text(100), "`sessionToken` of an earlier registration under this id. The worker resumes that registration and keeps its jobs."),
        )
        .optional("name", text(255))
        .optional("version", about(text(100), "Version of the worker's program, which operators see."))
        .optional("queues", about(names(0), "Default: all queues that the key permits."))
        .optional(
            "concurrency",
            with_default(about(integer(1, 10_000), "Maximum number of jobs that run concurrently."), 1),
        )
        .optional("reportsStarts", with_default(about(boolean(), "Whether the worker reports `started`."), false))
        .optional("token", about(json!({"type": "string"}), "API key of the registration. Takes precedence over the key in the header, which is still required."))
        .build()
}

pub fn claim(_: &JobLimits) -> Value {
    Object::new()
        .optional("max", about(integer(1, u64::MAX), "Maximum number of jobs to receive. Default: all free slots."))
        .optional("waitMs", with_default(about(integer(0, 60_000), "How long to wait for a job."), 20_000))
        .build()
}

/// Schema that every report shares: the run that it is about.
fn report() -> Object {
    let run = json!({"type": "integer", "minimum": i64::MIN, "maximum": i64::MAX});
    Object::new()
        .required("run", about(run, "Run number from the claim. A report for another run is rejected with 409."))
}

pub fn report_without_fields(_: &JobLimits) -> Value {
    report().build()
}

pub fn report_progress(_: &JobLimits) -> Value {
    let count = || json!({"type": "integer", "minimum": 0, "maximum": u32::MAX});
    let progress = Object::new()
        .optional("phase", json!({"type": "string"}))
        .optional("currentStep", json!({"type": "string"}))
        .optional("completedSteps", count())
        .optional("totalSteps", count())
        .optional("percentage", json!({"type": "number", "minimum": 0, "maximum": 100}))
        .optional("message", json!({"type": "string"}));
    report().required("progress", progress.build()).build()
}

pub fn report_log(_: &JobLimits) -> Value {
    let event = json!({"type": "string", "pattern": "^[a-z0-9_.]{1,64}$"});
    report()
        .required("message", json!({"type": "string", "minLength": 1}))
        .optional("event", about(event, "Name of the entry in the execution log; not that of a built-in event."))
        .build()
}

pub fn report_step(_: &JobLimits) -> Value {
    report()
        .required("name", text(100))
        .optional("result", about(json!({}), "Any JSON, returned to later runs."))
        .optional("totalSteps", about(integer(1, 100_000), "Total number of steps, if the worker knows it."))
        .build()
}

pub fn report_completion(_: &JobLimits) -> Value {
    report().optional("result", about(json!({}), "Any JSON.")).build()
}

pub fn report_failure(_: &JobLimits) -> Value {
    report()
        .optional("error", about(json!({}), "A string, or any other JSON, which is stored as a string."))
        .optional("retryable", with_default(boolean(), true))
        .optional("retryAfterMs", about(integer(0, u64::MAX), "Delay before the next attempt."))
        .build()
}

pub fn machine(_: &JobLimits) -> Value {
    let definition = json!({"anyOf": [{"type": "object"}, {"type": "string"}]});
    Object::new()
        .required("definition", about(definition, "The definition: an object, or text in YAML or JSON."))
        .build()
}

pub fn task(_: &JobLimits) -> Value {
    Object::new()
        .required("machine", about(text(100), "Name of the machine."))
        .optional("version", about(integer(1, 2_147_483_647), "Version. The newest if it is absent."))
        .optional("data", about(any_object(), "The data that the task starts with."))
        .optional("title", about(text(200), "Display title."))
        .optional("correlationId", about(text(200), "Correlation id. The id of the task if it is absent."))
        .optional("tags", about(list(text(100), 0, 32), "Labels to search for."))
        .optional("idempotencyKey", about(text(255), "A repeated creation with this key returns the existing task."))
        .build()
}

pub fn task_fork(_: &JobLimits) -> Value {
    Object::new()
        .optional(
            "at",
            about(
                integer(1, 9_007_199_254_740_991),
                "Number of a record. The last one before the end of the task if it is absent.",
            ),
        )
        .optional("data", about(any_object(), "Fields of the data to replace."))
        .build()
}

pub fn bulk_tasks(_: &JobLimits) -> Value {
    let statuses = one_of(["queued", "running", "paused", "completed", "failed", "cancelled"]);
    let filter = vec![
        ("machine", filter_text()),
        ("version", integer(1, 2_147_483_647)),
        ("state", filter_text()),
        ("status", statuses),
        ("tag", filter_text()),
        ("correlationId", filter_text()),
        ("approval", boolean()),
    ];
    Object::new()
        .optional("type", about(filter_text(), "Type of the event to send."))
        .optional("payload", about(any_object(), "Payload of the event to send."))
        .optional("reason", about(json!({"type": "string"}), "Reason for a cancellation."))
        .optional("filter", filter_object(filter, "The tasks to act on: the filters of `GET /api/v1/tasks`."))
        .optional("all", with_default(about(boolean(), "Confirms a filter that matches every task."), false))
        .optional("dryRun", with_default(about(boolean(), "Only counts the tasks and shows examples."), false))
        .optional(
            "perSecond",
            about(integer(1, 10_000), "Maximum rate per second. With it, the action runs in the background."),
        )
        .build()
}

pub fn migration(_: &JobLimits) -> Value {
    let map = json!({"type": "object", "additionalProperties": {"type": "string"}});
    Object::new()
        .required("from", about(integer(1, 2_147_483_647), "Version that tasks move from."))
        .required("to", about(integer(1, 2_147_483_647), "Version that tasks move to."))
        .optional("map", about(map, "The new state for each old state. A state that is not listed keeps its name."))
        .optional(
            "entry",
            with_default(about(one_of(["run", "skip"]), "Whether the entry actions of the new state run."), "run"),
        )
        .optional("dryRun", with_default(about(boolean(), "Only reports what would happen."), false))
        .optional(
            "perSecond",
            about(integer(1, 10_000), "Maximum rate per second. With it, the action runs in the background."),
        )
        .build()
}

pub fn task_event(_: &JobLimits) -> Value {
    let metadata = Object::new()
        .optional("taskId", about(uuid(), "The task in the path."))
        .optional("traceId", about(text(200), "Id of the event. A new one if it is absent."))
        .optional("timestamp", json!({}))
        .optional("originator", json!({}))
        .build();
    Object::new()
        .required("type", about(filter_text(), "Type of the event."))
        .optional("payload", any_object())
        .optional("metadata", metadata)
        .build()
}

pub fn task_decision(_: &JobLimits) -> Value {
    Object::new()
        .optional("hash", about(filter_text(), "Hash of the subject that was read."))
        .optional(
            "comment",
            about(
                json!({"type": "string", "maxLength": 2_000}),
                "Comment, shown in the history and passed to the machine.",
            ),
        )
        .build()
}

pub fn task_cancellation(_: &JobLimits) -> Value {
    Object::new().optional("reason", json!({"type": "string"})).build()
}
