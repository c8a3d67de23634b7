//! Operations below `/dead-letter`.

use faena_domain::parse::schema::uuid;
use faena_wire::{Changed, DeadLetterList, DeadLetterStats, DeadLetterView};

use super::jobs::with_filters;
use crate::openapi::{
    operation::{Content, Operation, Tag},
    requests::filter_text,
};

fn operation(id: &'static str, summary: &'static str) -> Operation {
    Operation::new(Tag::DeadLetters, id, summary)
}

fn on_dead_letter(id: &'static str, summary: &'static str) -> Operation {
    operation(id, summary).path("id", uuid(), "Id of the job.")
}

pub fn list() -> Operation {
    with_filters(operation("listDeadLetters", "List dead letters, newest first").query(
        "jobType",
        filter_text(),
        "The same as `type`.",
    ))
    .list::<DeadLetterList>("A page of dead letters.")
    .link("getDeadLetter", "id", "/data/0/id")
    .link("retryDeadLetter", "id", "/data/0/id")
}

pub fn stats() -> Operation {
    operation("getDeadLetterStats", "Count dead letters by type, queue and reason").ok::<DeadLetterStats>("The counts.")
}

pub fn show() -> Operation {
    on_dead_letter("getDeadLetter", "Show a dead letter with its attempts").ok::<DeadLetterView>("The dead letter.")
}

pub fn delete() -> Operation {
    on_dead_letter("deleteDeadLetter", "Delete a dead letter").answer(204, "It is deleted.", Content::Empty)
}

pub fn retry() -> Operation {
    on_dead_letter("retryDeadLetter", "Retry a dead letter")
        .ok::<Changed>("The job starts over.")
        .conflict("Its unique key is in use.")
}
