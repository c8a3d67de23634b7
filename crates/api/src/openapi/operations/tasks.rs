//! Operations below `/machines` and `/tasks`.

use faena_domain::parse::schema::{boolean, integer, one_of, text, uuid, with_default};
use faena_store::TaskAnswer;
use serde_json::json;

use crate::{
    openapi::{
        operation::{Content, Operation, Tag},
        requests::{self, filter_text},
    },
    rest::{
        machines::{MachineList, MachineView, RegisteredMachine},
        task_bulk::{MigrationResponse, TaskBulkResponse},
        task_views::{HistoryView, TaskEvents, TaskList, TaskView, TaskWhy},
    },
};

pub fn register() -> Operation {
    Operation::new(Tag::Machines, "registerMachine", "Register a version of a machine")
        .about("A registered version never changes. Registering the same definition again returns 200.")
        .body(
            "MachineRequest",
            requests::machine,
            json!({"definition": "machine: order\nversion: 1\nevents: {pay: {}}\ninitial: NEW\nstates:\n  NEW: {forever: true, on: {pay: DONE}}\n  DONE: {final: true}\n"}),
        )
        .created::<RegisteredMachine>("The version is registered.")
        .ok::<RegisteredMachine>("The same definition was registered before.")
        .with_header("Location")
        .conflict("The version exists with another definition.")
}

pub fn machines() -> Operation {
    Operation::new(Tag::Machines, "listMachines", "List machines with their task counts")
        .ok::<MachineList>("All versions of all machines.")
        .error(400, "A parameter is unknown.")
}

fn on_machine(id: &'static str, summary: &'static str) -> Operation {
    Operation::new(Tag::Machines, id, summary).path("name", text(100), "Name of the machine.").query(
        "version",
        integer(1, 2_147_483_647),
        "Version. The newest if it is absent.",
    )
}

pub fn machine() -> Operation {
    on_machine("getMachine", "Show the definition of a machine").ok::<MachineView>("The machine.")
}

pub fn diagram() -> Operation {
    on_machine("drawMachine", "Draw a machine").answer(200, "The drawing.", Content::Text(&["image/svg+xml"]))
}

pub fn migrate() -> Operation {
    Operation::new(Tag::Machines, "migrateTasks", "Move the tasks of one version to another")
        .about(
            "A state that is not in `map` keeps its name. Each task enters its new state: its epoch grows, so that old timers, approvals and \
             jobs are stale. With `dryRun` nothing changes. Tasks that cannot move keep their version; repeat the request to try them again.",
        )
        .path("name", text(100), "Name of the machine.")
        .body("MigrationRequest", requests::migration, json!({"from": 1, "to": 2, "map": {"NEW": "OPEN"}, "dryRun": true}))
        .ok::<MigrationResponse>("The migration has finished, or there was nothing to do.")
        .json::<MigrationResponse>(202, "The migration continues in the background.")
        .with_header("Location")
        .link("getBulkAction", "id", "/id")
        .error(404, "There is no such version.")
}

pub fn bulk() -> Operation {
    Operation::new(Tag::Tasks, "startTaskBulkAction", "Act on every task that a filter matches")
        .about(
            "Acts on the tasks that match now and have not ended. `send` needs `type` and `filter.machine`. Without `perSecond` the answer \
             waits until the action has finished, at most five minutes. A filter that matches every task needs `all`.",
        )
        .path("action", one_of(["send", "cancel", "pause", "resume"]), "What to do.")
        .body(
            "TaskBulkAction",
            requests::bulk_tasks,
            json!({"type": "pay", "payload": {"amount": 5}, "filter": {"machine": "order", "state": "NEW"}, "dryRun": true}),
        )
        .ok::<TaskBulkResponse>("The action has finished, or there was nothing to do.")
        .json::<TaskBulkResponse>(202, "The action continues in the background.")
        .with_header("Location")
        .link("getBulkAction", "id", "/id")
        .error(404, "There is no such machine.")
}

pub fn create() -> Operation {
    Operation::new(Tag::Tasks, "createTask", "Create a task")
        .idempotency_key()
        .body("TaskRequest", requests::task, json!({"machine": "order", "data": {"amount": 5}, "title": "Order 7"}))
        .created::<TaskView>("The task.")
        .link("getTask", "id", "/id")
        .ok::<TaskView>("A task with this idempotency key exists and was created with the same body.")
        .with_header("Location")
        .error(404, "There is no such machine.")
        .conflict("The idempotency key was used with another body. `details` has the id of that task.")
}

pub fn list() -> Operation {
    Operation::new(Tag::Tasks, "listTasks", "List tasks, newest first")
        .query("machine", filter_text(), "Only tasks of this machine.")
        .query("version", integer(1, 2_147_483_647), "Only tasks of this version.")
        .query("state", filter_text(), "Only tasks in this state, or in a state inside it.")
        .query(
            "status",
            one_of(["queued", "running", "paused", "completed", "failed", "cancelled"]),
            "Only tasks of this status.",
        )
        .query("tag", filter_text(), "Only tasks with this tag.")
        .query("correlationId", filter_text(), "Only tasks with this correlation id.")
        .query("approval", with_default(boolean(), false), "Only tasks that wait for a decision.")
        .list::<TaskList>("A page of tasks.")
}

fn on_task(id: &'static str, summary: &'static str) -> Operation {
    Operation::new(Tag::Tasks, id, summary).path("id", uuid(), "Id of the task.")
}

pub fn show() -> Operation {
    on_task("getTask", "Show a task").ok::<TaskView>("The task.")
}

pub fn history() -> Operation {
    on_task("getTaskHistory", "Show what happened to a task")
        .query("after", integer(0, 9_007_199_254_740_991), "Only records after this one.")
        .query("limit", with_default(integer(1, 1_000), 100), "Number of records.")
        .ok::<HistoryView>("The records, oldest first.")
}

pub fn why() -> Operation {
    on_task("explainTask", "Explain what a task waits for").ok::<TaskWhy>("What it waits for.")
}

pub fn events() -> Operation {
    on_task("listTaskEvents", "List the events about a task")
        .about("`GET /api/v1/events?taskId=…` streams them.")
        .query("after", integer(0, 9_007_199_254_740_991), "Only events after this sequence.")
        .query("limit", with_default(integer(1, 1_000), 100), "Number of events.")
        .ok::<TaskEvents>("The stored events, oldest first.")
}

pub fn fork() -> Operation {
    on_task("forkTask", "Start a new task from a point in the history of a task")
        .about("The new task starts in the state, and with the data and counters, that the original task had after the record `at`. It has the same correlation id.")
        .optional_body("TaskFork", requests::task_fork, json!({"at": 3, "data": {"amount": 7}}))
        .created::<TaskView>("The new task.")
        .link("getTask", "id", "/id")
}

pub fn send() -> Operation {
    on_task("sendTaskEvent", "Send an event to a task")
        .about("`metadata.traceId` is the id of the event: a second delivery gets the answer of the first.")
        .body("TaskEventRequest", requests::task_event, json!({"type": "pay", "payload": {"amount": 5}}))
        .ok::<TaskAnswer>("What the event did.")
        .conflict("The state of the task refuses the event.")
}

pub fn approve() -> Operation {
    decision("approveTask", "Approve what a task waits for")
}

pub fn reject() -> Operation {
    decision("rejectTask", "Reject what a task waits for")
}

fn decision(id: &'static str, summary: &'static str) -> Operation {
    on_task(id, summary)
        .about("With `hash`, a decision is refused if the subject has changed since the caller read that hash.")
        .optional_body("TaskDecision", requests::task_decision, json!({"comment": "go ahead"}))
        .ok::<TaskAnswer>("What the decision did.")
        .conflict(
            "No approval is open, it is about another subject, the task is paused, or the caller decided the opposite.",
        )
}

pub fn cancel() -> Operation {
    on_task("cancelTask", "Cancel a task")
        .optional_body("TaskCancellation", requests::task_cancellation, json!({"reason": "not needed any more"}))
        .ok::<TaskAnswer>("The task is cancelled.")
        .conflict("The task has ended.")
}

pub fn pause() -> Operation {
    on_task("pauseTask", "Pause a task")
        .about("Events wait, and the pause does not count towards any deadline.")
        .ok::<TaskAnswer>("The task is paused.")
        .conflict("The task is already paused, or has ended.")
}

pub fn resume() -> Operation {
    on_task("resumeTask", "Resume a paused task")
        .ok::<TaskAnswer>("The task continues.")
        .conflict("The task is not paused.")
}
