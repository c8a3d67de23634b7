//! Operations below `/queues` and `/limits`.

use faena_domain::parse::schema::text;
use faena_wire::{LimitList, QueueList, QueueView};
use serde_json::json;

use crate::openapi::{
    operation::{Operation, Tag},
    requests,
};

fn on_queue(id: &'static str, summary: &'static str) -> Operation {
    Operation::new(Tag::Queues, id, summary).path("name", text(100), "Name of the queue.")
}

pub fn list() -> Operation {
    Operation::new(Tag::Queues, "listQueues", "List queues by name").short_list::<QueueList>("A page of queues.")
}

pub fn show() -> Operation {
    on_queue("getQueue", "Show the depth, counts, throughput and settings of a queue").ok::<QueueView>("The queue.")
}

pub fn patch() -> Operation {
    on_queue("patchQueue", "Change the settings of a queue")
        .about("An absent field is not changed; `null` removes a limit.")
        .body("QueuePatch", requests::queue_patch, json!({"concurrency": 10, "rate": "100/1m"}))
        .ok::<QueueView>("The changed queue.")
}

pub fn pause() -> Operation {
    on_queue("pauseQueue", "Pause a queue")
        .about("Jobs in flight finish; no other job of the queue starts.")
        .optional_body("PauseRequest", requests::pause, json!({"reason": "maintenance of the mail server"}))
        .ok::<QueueView>("The paused queue.")
}

pub fn resume() -> Operation {
    on_queue("resumeQueue", "Resume a queue").ok::<QueueView>("The queue.")
}

pub fn limits() -> Operation {
    Operation::new(Tag::Limits, "listLimits", "List limits with their usage")
        .short_list::<LimitList>("A page of limits.")
}

pub fn set_limit() -> Operation {
    Operation::new(Tag::Limits, "setLimit", "Set a limit")
        .about("An absent field is not changed; `null` removes it.")
        .body("LimitPatch", requests::limit_patch, json!({"scope": "type", "name": "email.send", "concurrency": 5}))
        .listed::<LimitList>("All limits.")
}

pub fn reset_limit() -> Operation {
    Operation::new(Tag::Limits, "resetLimit", "Remove a limit that was set at run time")
        .about("The server's configuration or the machine's definition applies again.")
        .body("LimitScope", requests::limit_reset, json!({"scope": "queue", "name": "mail"}))
        .listed::<LimitList>("All limits.")
        .error(404, "There is no such limit.")
}
