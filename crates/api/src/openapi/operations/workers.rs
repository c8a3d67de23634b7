//! Operations below `/workers`.

use faena_domain::{
    WorkerState, WorkerView,
    parse::schema::{one_of, uuid},
};
use faena_wire::{
    Registered, Reported, Success, WorkerList,
    frames::{Claimed, WorkerNotices},
};
use serde_json::json;

use crate::openapi::{
    operation::{BodySchema, Content, Operation, Tag},
    requests,
};

fn on_worker(tag: Tag, id: &'static str, summary: &'static str) -> Operation {
    Operation::new(tag, id, summary).path("id", json!({"type": "string"}), "Id of the worker.")
}

const TOKEN: &str =
    "`sessionToken` of the registration. Without it the answer is 401; with the token of another worker it is 403.";

/// A call of a worker that is registered over plain HTTP.
fn by_worker(id: &'static str, summary: &'static str) -> Operation {
    on_worker(Tag::WorkerProtocol, id, summary).required_header("X-Session-Token", json!({"type": "string"}), TOKEN)
}

pub fn list() -> Operation {
    let states = json!({"type": "array", "items": one_of(WorkerState::ALL.map(WorkerState::as_str))});
    Operation::new(Tag::Workers, "listWorkers", "List workers, live ones first")
        .query("state", states, "One or several: repeat the parameter, or separate the values with commas.")
        .short_list::<WorkerList>("A page of workers.")
}

pub fn show() -> Operation {
    on_worker(Tag::Workers, "getWorker", "Show a worker with its jobs in flight and its history")
        .ok::<WorkerView>("The worker.")
}

pub fn drain() -> Operation {
    on_worker(Tag::Workers, "drainWorker", "Stop assigning jobs to a worker")
        .ok::<Success>("The worker finishes its jobs.")
}

pub fn resume() -> Operation {
    on_worker(Tag::Workers, "resumeWorker", "Cancel a drain").ok::<Success>("The worker receives jobs again.")
}

pub fn connect() -> Operation {
    Operation::new(Tag::WorkerProtocol, "connectWorker", "Connect a worker over a WebSocket")
        .about("The frames are JSON text, see the worker protocol. The API key is in a header or in the `register` frame, and needs the scope `worker`.")
        .answer(101, "The connection is a WebSocket now.", Content::Empty)
        .error(400, "The request is not an upgrade to a WebSocket.")
}

pub fn register() -> Operation {
    Operation::new(Tag::WorkerProtocol, "registerWorker", "Register a worker")
        .about("For workers without a WebSocket: register, then claim, report and send heartbeats. Every further call needs `sessionToken` of the answer.")
        .body(
            "WorkerRegistration",
            requests::registration,
            json!({"workerId": "mailer-1", "capabilities": ["email.*"], "concurrency": 4}),
        )
        .json::<Registered>(201, "The worker is registered.")
        .link("claimJobs", "id", "/workerId")
        .link("sendHeartbeat", "id", "/workerId")
        .link("deregisterWorker", "id", "/workerId")
        .conflict("A worker with this id is active, and the request has neither its session token nor its API key.")
}

pub fn deregister() -> Operation {
    by_worker("deregisterWorker", "End a worker's registration")
        .about("Its jobs return to their queues without using an attempt.")
        .ok::<Success>("The worker has left.")
}

pub fn claim() -> Operation {
    by_worker("claimJobs", "Claim jobs")
        .about("Waits until there is a job, at most `waitMs`. Counts as a heartbeat.")
        .optional_body("Claim", requests::claim, json!({"max": 4, "waitMs": 20000}))
        .ok::<Claimed>("The jobs to run; none if there was none in time.")
}

pub fn heartbeat() -> Operation {
    by_worker("sendHeartbeat", "Send a heartbeat").ok::<WorkerNotices>("Which jobs to stop, and whether to drain.")
}

fn report(id: &'static str, summary: &'static str) -> Operation {
    by_worker(id, summary)
        .path("job", uuid(), "Id of the job.")
        .ok::<Reported>("The report is stored.")
        .conflict("The run has ended, or another run has the job.")
}

fn plain_report(id: &'static str, summary: &'static str) -> Operation {
    report(id, summary).body("Report", requests::report_without_fields, json!({"run": 42}))
}

pub fn started() -> Operation {
    plain_report("reportStart", "Report that a job has started")
}

pub fn released() -> Operation {
    plain_report("releaseJob", "Return a job to its queue").about("Uses no attempt.")
}

fn full_report(
    id: &'static str,
    summary: &'static str,
    body: (&'static str, BodySchema),
    example: serde_json::Value,
) -> Operation {
    report(id, summary).body(body.0, body.1, example)
}

pub fn progress() -> Operation {
    let example = json!({"run": 42, "progress": {"percentage": 50, "message": "half of the recipients"}});
    full_report(
        "reportProgress",
        "Report the progress of a job",
        ("ProgressReport", requests::report_progress),
        example,
    )
}

pub fn log() -> Operation {
    let example = json!({"run": 42, "message": "connected to the mail server"});
    full_report("reportLog", "Add a line to the execution log", ("LogReport", requests::report_log), example)
}

pub fn step() -> Operation {
    let example = json!({"run": 42, "name": "render", "result": {"pages": 3}});
    full_report("reportStep", "Store a completed step", ("StepReport", requests::report_step), example)
        .about("Later runs of the job receive its result and skip the step.")
}

pub fn complete() -> Operation {
    report("completeJob", "Report that a job has completed").body(
        "CompletionReport",
        requests::report_completion,
        json!({"run": 42, "result": {"sent": 1}}),
    )
}

pub fn fail() -> Operation {
    report("failJob", "Report that a job has failed")
        .about("The job is retried according to its settings, unless `retryable` is `false`.")
        .body(
            "FailureReport",
            requests::report_failure,
            json!({"run": 42, "error": "mailbox full", "retryAfterMs": 60000}),
        )
}
