//! Bulk actions on jobs and dead letters, and `/bulk`.

use faena_domain::parse::schema::{one_of, uuid};
use faena_wire::{BulkList, BulkResponse, BulkView};
use serde_json::json;

use crate::openapi::{
    operation::{Operation, Tag},
    requests,
};

const ABOUT: &str = "Acts on the jobs that match now. Without `perSecond` the answer waits until the action has finished, at most five \
    minutes. A filter that matches every job needs `all`.";

fn started(operation: Operation) -> Operation {
    operation
        .about(ABOUT)
        .ok::<BulkResponse>("The action has finished, or there was nothing to do.")
        .json::<BulkResponse>(202, "The action continues in the background.")
        .with_header("Location")
        .link("getBulkAction", "id", "/id")
        .link("cancelBulkAction", "id", "/id")
}

pub fn jobs() -> Operation {
    let operation = Operation::new(Tag::BulkActions, "startBulkAction", "Act on every job that a filter matches")
        .path("action", one_of(["cancel", "retry", "delete"]), "What to do.")
        .body(
            "BulkAction",
            requests::bulk_jobs,
            json!({"filter": {"queue": "mail", "status": "QUEUED"}, "dryRun": true}),
        );
    started(operation)
}

pub fn dead_letters() -> Operation {
    let operation =
        Operation::new(Tag::DeadLetters, "startDeadLetterAction", "Act on every dead letter that a filter matches")
            .path("action", one_of(["retry", "delete"]), "What to do.")
            .body(
                "DeadLetterAction",
                requests::bulk_dead_letters,
                json!({"filter": {"reason": "timeout"}, "perSecond": 50}),
            );
    started(operation)
}

pub fn list() -> Operation {
    Operation::new(Tag::BulkActions, "listBulkActions", "List bulk actions, newest first")
        .list::<BulkList>("A page of actions.")
}

fn on_action(id: &'static str, summary: &'static str) -> Operation {
    Operation::new(Tag::BulkActions, id, summary).path("id", uuid(), "Id of the action.")
}

pub fn show() -> Operation {
    on_action("getBulkAction", "Show the progress of a bulk action").ok::<BulkView>("The action.")
}

pub fn cancel() -> Operation {
    on_action("cancelBulkAction", "Stop a bulk action")
        .ok::<BulkView>("The stopped action.")
        .conflict("It has already finished.")
}
