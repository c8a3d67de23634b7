//! Operations below `/jobs`.

use faena_domain::{
    Explanation, JobGraph, JobView, LogEntry,
    parse::schema::{self, error_reason, job_state, priority, time, uuid, with_default},
};
use faena_wire::{Changed, Created, CreatedBatch, JobList, JobLog, Success};
use serde_json::{Value, json};

use crate::openapi::{
    operation::{Content, Operation, Tag, schema_of},
    requests::{filter_text, search_text},
};

fn operation(id: &'static str, summary: &'static str) -> Operation {
    Operation::new(Tag::Jobs, id, summary)
}

/// An operation on one job.
fn on_job(id: &'static str, summary: &'static str) -> Operation {
    operation(id, summary).path("id", uuid(), "Id of the job.")
}

pub fn create() -> Operation {
    operation("createJob", "Submit a job")
        .about("A job needs a `type`, or a `name` that is also its type. It is stored before the answer is sent.")
        .idempotency_key()
        .header("traceparent", json!({"type": "string"}), "W3C trace context, passed to the worker and the webhook.")
        .body("NewJob", schema::job, json!({"type": "email.send", "queue": "mail", "payload": {"to": "ada@example.org"}}))
        .created::<Created>("The job is stored.")
        .link("getJob", "id", "/id")
        .link("patchJob", "id", "/id")
        .link("cancelJob", "id", "/id")
        .link("retryJob", "id", "/id")
        .link("explainJob", "id", "/id")
        .link("deleteJob", "id", "/id")
        .ok::<Created>("A job with this idempotency key exists and was submitted with the same body.")
        .with_header("Location")
        .conflict("The unique key is in use, or the idempotency key was used with another body. `details` has the id of that job.")
}

pub fn create_batch() -> Operation {
    let example = json!({"jobs": [
        {"type": "report.build", "ref": "build"},
        {"type": "report.send", "dependsOn": ["build"]},
    ]});
    operation("createJobs", "Submit several jobs, all or none")
        .about("Jobs of a batch may depend on each other by `ref`.")
        .body("NewJobs", schema::batch, example)
        .json::<CreatedBatch>(201, "All jobs are stored; the ids are in the order of the request.")
        .link("getJob", "id", "/ids/0")
        .conflict("A unique or idempotency key is in use. `details` has the id of that job.")
}

/// Adds the filters that all lists of jobs share.
pub fn with_filters(operation: Operation) -> Operation {
    let several = |values: Value| json!({"type": "array", "items": values});
    operation
        .query(
            "priority",
            several(priority()),
            "One or several: repeat the parameter, or separate the values with commas.",
        )
        .query("type", filter_text(), "Exactly this type.")
        .query("name", filter_text(), "Exactly this name.")
        .query("queue", filter_text(), "Exactly this queue.")
        .query("tag", filter_text(), "Jobs with this tag.")
        .query("correlationId", filter_text(), "Exactly this correlation id.")
        .query("scheduleId", filter_text(), "Jobs that this schedule created.")
        .query("workerId", filter_text(), "The worker that has the job, or had it when it finished.")
        .query("error", search_text(), "A part of the error that the job shows; case-insensitive.")
        .query("reason", error_reason(), "Reason of that error.")
        .query(
            "payload",
            search_text(),
            "A part of the payload as it was submitted, in its first 4000 characters; case-insensitive.",
        )
        .query("createdAfter", time(), "Jobs created at this time or later.")
        .query("createdBefore", time(), "Jobs created before this time.")
        .query("q", search_text(), "A part of a name, type or queue, or an exact id, correlation id or key.")
        .query("sort", with_default(schema::one_of(SORTS), "created"), "What the list is sorted by.")
        .query("order", with_default(schema::one_of(["asc", "desc"]), "desc"), "Direction of the sort.")
}

const SORTS: [&str; 7] = ["created", "updated", "scheduled", "priority", "createdAt", "updatedAt", "scheduledAt"];

pub fn list() -> Operation {
    let states = json!({"type": "array", "items": job_state()});
    with_filters(operation("listJobs", "List jobs, newest first").query(
        "status",
        states,
        "One or several: repeat the parameter, or separate the values with commas.",
    ))
    .list::<JobList>("A page of jobs, without their execution logs.")
    .link("getJob", "id", "/jobs/0/id")
}

pub fn show() -> Operation {
    on_job("getJob", "Show a job with the newest entries of its execution log").ok::<JobView>("The job.")
}

pub fn patch() -> Operation {
    on_job("patchJob", "Change a waiting job")
        .about("An absent field is not changed.")
        .body("JobPatch", schema::job_patch, json!({"priority": "HIGH"}))
        .ok::<JobView>("The changed job.")
        .conflict("The job is in flight or has finished.")
}

pub fn delete() -> Operation {
    on_job("deleteJob", "Delete a job")
        .ok::<Success>("The job is deleted.")
        .conflict("The job is running; cancel it first.")
}

pub fn why() -> Operation {
    on_job("explainJob", "Explain why a job is in its state").ok::<Explanation>("The reasons, most important first.")
}

pub fn dependencies() -> Operation {
    let limit = json!({"type": "integer", "minimum": 1, "maximum": 200, "default": 60});
    on_job("getJobDependencies", "Show the jobs that a job depends on, and those that depend on it")
        .about("Includes indirect dependencies, nearest first, up to `limit` jobs. Jobs that are left out are counted, up to 10000 dependents of the job itself and 1000 of each other job.")
        .query("limit", limit, "Maximum number of jobs, including the job itself.")
        .ok::<JobGraph>("The job and the jobs around it.")
}

pub fn cancel() -> Operation {
    on_job("cancelJob", "Cancel a job")
        .about("Waits up to two seconds for the worker of a running job.")
        .ok::<Changed>("The job is cancelled.")
        .json::<Changed>(202, "The worker was asked to stop the job and has not done so yet.")
        .conflict("The job has finished.")
}

pub fn retry() -> Operation {
    on_job("retryJob", "Retry a job")
        .about("A failed or cancelled job starts over; a retrying job starts its next attempt now.")
        .ok::<Changed>("The job is ready.")
        .conflict("The job has not failed.")
}

pub fn log() -> Operation {
    let limit = json!({"type": "integer", "minimum": 1, "maximum": 1_000, "default": 100});
    on_job("getJobLog", "Page through the execution log of a job, oldest entry first")
        .about("`GET /jobs/{id}` has only the newest entries. An entry `dropped` says how many entries are not kept.")
        .query("limit", limit, "Maximum number of entries.")
        .query("cursor", json!({"type": "string", "pattern": "^[0-9]+-[0-9]+$"}), "`nextCursor` of the previous page.")
        .ok::<JobLog<LogEntry>>("A page of the log.")
}

pub fn events() -> Operation {
    on_job("watchJob", "Follow a job")
        .about("Server-sent events until the job finishes: first the whole job, then its id, its status and the fields that changed. `executionLog`, `steps` and `attempts` of a change have the new entries only; a field that no longer has a value is `null`. The name of an event is its type, such as `job.completed`.")
        .answer(200, "The stream.", Content::Events(schema_of::<JobView>))
}
