//! Operations below `/outbox`.

use faena_domain::parse::schema::{boolean, time, uuid};
use faena_store::DeadEvent;
use serde_json::json;

use crate::{
    openapi::{
        operation::{Operation, Tag},
        requests::{self, filter_text},
    },
    rest::outbox::{DeadList, OutboxOverview, Replayed, Republished, Resolved},
};

fn operation(id: &'static str, summary: &'static str) -> Operation {
    Operation::new(Tag::Outbox, id, summary)
}

pub fn overview() -> Operation {
    operation("listSinks", "List the sinks, and the sources and inboxes of every node")
        .short_list::<OutboxOverview>("A page of sinks, with all sources and inboxes.")
}

pub fn dead() -> Operation {
    operation("listRejectedEvents", "List events that a sink rejected, latest first")
        .query("sink", filter_text(), "Exactly this sink.")
        .query("type", filter_text(), "A type, or a pattern with `*`.")
        .query("aggregateId", uuid(), "Events about this job, worker or schedule.")
        .query("movedAfter", time(), "Events rejected at this time or later.")
        .query("movedBefore", time(), "Events rejected before this time.")
        .query("resolved", boolean(), "Only resolved or only unresolved ones.")
        .list::<DeadList>("A page of rejected events.")
}

fn on_event(id: &'static str, summary: &'static str) -> Operation {
    operation(id, summary).path("id", uuid(), "Id of the rejected event.")
}

pub fn show() -> Operation {
    on_event("getRejectedEvent", "Show a rejected event").ok::<DeadEvent>("The rejected event.")
}

pub fn replay() -> Operation {
    on_event("replayRejectedEvent", "Publish a rejected event again")
        .ok::<DeadEvent>("It is queued.")
        .conflict("It is already resolved.")
}

pub fn resolve() -> Operation {
    on_event("resolveRejectedEvent", "Mark a rejected event as resolved")
        .optional_body("Resolution", requests::resolve_event, json!({"notes": "the receiver has the data"}))
        .ok::<DeadEvent>("It is resolved.")
        .conflict("It is already resolved.")
}

pub fn replay_many() -> Operation {
    operation("replayRejectedEvents", "Publish rejected events again")
        .about("At most 100 000 per call. A filter that matches every rejected event needs `all`.")
        .body("EventReplay", requests::replay_events, json!({"filter": {"sink": "orders"}, "perSecond": 100}))
        .ok::<Replayed>("They are queued.")
}

pub fn resolve_many() -> Operation {
    operation("resolveRejectedEvents", "Mark rejected events as resolved")
        .about("A filter that matches every rejected event needs `all`.")
        .body("EventResolution", requests::resolve_events, json!({"filter": {"type": "job.*"}, "notes": "not needed"}))
        .ok::<Resolved>("They are resolved.")
}

pub fn republish() -> Operation {
    let example = json!({"sink": "orders", "from": "2026-11-20T00:00:00Z", "to": "2026-11-21T00:00:00Z"});
    operation("republishEvents", "Republish events of a time range")
        .about("At most 250 000 per call.")
        .body("Republication", requests::republish, example)
        .ok::<Republished>("They are queued.")
        .error(404, "There is no such sink.")
}
