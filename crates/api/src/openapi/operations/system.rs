//! Health, metrics and this documentation.

use faena_wire::{Alive, DoctorReport, NodeList, Ready};
use schemars::SchemaGenerator;
use serde_json::{Value, json};

use crate::openapi::operation::{Content, Operation, Tag};

fn operation(id: &'static str, summary: &'static str) -> Operation {
    Operation::new(Tag::System, id, summary)
}

pub fn live() -> Operation {
    operation("getLiveness", "Check that the process answers").ok::<Alive>("It answers.")
}

pub fn ready() -> Operation {
    readiness("getReadiness")
}

pub fn health() -> Operation {
    readiness("getHealth")
}

fn readiness(id: &'static str) -> Operation {
    operation(id, "Check that the server can process jobs")
        .about("`/health` and `/health/ready` are the same.")
        .ok::<Ready>("The server can process jobs. `degraded` means that something needs attention.")
        .json::<Ready>(
            503,
            "The database, or Redis without a fallback, does not respond, or a loop is late or has stopped.",
        )
}

pub fn nodes() -> Operation {
    operation("listNodes", "List the server processes that are alive")
        .about("The health of their loops is in `/health/ready` of each node.")
        .ok::<NodeList>("The nodes, oldest first.")
}

pub fn doctor() -> Operation {
    operation("getDoctorReport", "Show what the last check has found")
        .about("The checks of `faena doctor`, as this node last made them.")
        .ok::<DoctorReport>("The report. `checkedAt` is `null` if nothing was checked yet.")
}

pub fn start_doctor() -> Operation {
    operation("startDoctor", "Check the database and the configuration")
        .about(
            "Starts the checks of `faena doctor` in the background, unless they are running or ended less than a minute ago. They \
             read the whole database and change nothing.",
        )
        .ok::<DoctorReport>("The report of the previous check.")
}

pub fn metrics() -> Operation {
    operation("getMetrics", "Show metrics for Prometheus")
        .about("OpenMetrics if the caller accepts it, otherwise the Prometheus text format.")
        .answer(200, "The metrics.", Content::Text(&["text/plain", "application/openmetrics-text"]))
}

fn any_object(_: &mut SchemaGenerator) -> Value {
    json!({"type": "object"})
}

pub fn document() -> Operation {
    operation("getOpenApi", "Show this document").answer(200, "OpenAPI 3.1.", Content::Json(any_object))
}

pub fn machine_schema() -> Operation {
    operation("getMachineSchema", "Show the JSON Schema of machine definitions").answer(
        200,
        "JSON Schema, draft 7, for editors.",
        Content::Json(any_object),
    )
}

pub fn page() -> Operation {
    operation("getDocs", "Show this document as a page").answer(
        200,
        "A page without scripts.",
        Content::Text(&["text/html"]),
    )
}

pub fn style() -> Operation {
    operation("getDocsStyle", "Show the stylesheet of the page").answer(
        200,
        "The stylesheet.",
        Content::Text(&["text/css"]),
    )
}
