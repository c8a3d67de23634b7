//! Tests that every field of an HTTP answer also exists in the gRPC messages.

use std::collections::BTreeSet;

use faena_domain::{Attempt, JobView, LogEntry, Progress, Step};
use faena_machine::{Active, Approval, Decision, Event, Origin, Record, Timer};
use faena_store::{MachineStatus, TaskAnswer};
use faena_wire::{BulkView, v1::DESCRIPTOR};
use prost::Message;
use prost_types::FileDescriptorSet;
use schemars::{JsonSchema, schema_for};

use crate::rest::{
    machines::MachineView,
    task_bulk::{MigratedState, MigrationResponse, Refusal, TaskBulkResponse, TaskExample},
    task_views::{TaskView, TaskWhy},
};

/// Fields with another name in gRPC: a string with JSON, a state instead of a status, or a message that groups several
/// fields.
const RENAMED: [(&str, &[&str]); 15] = [
    ("Job", &["status=state", "payload=payloadJson", "result=resultJson", "timeoutMs=timeout"]),
    ("Job", &["retryDelay=retryPolicy", "backoffMultiplier=retryPolicy", "maxDelay=retryPolicy"]),
    ("Job", &["retryDelays=retryPolicy", "jitter=retryPolicy", "retryOn=retryPolicy"]),
    ("JobAttempt", &["status=state"]),
    ("Step", &["result=resultJson", "at=completedAt"]),
    ("Task", &["data=dataJson", "progress=progressJson"]),
    ("TaskTimer", &["due=dueAt"]),
    ("TaskApproval", &["subject=subjectJson"]),
    ("TaskDecision", &["at=decidedAt"]),
    ("DeferredTaskEvent", &["payload=payloadJson", "at=receivedAt"]),
    ("TaskRecord", &["at=recordedAt", "set=setJson"]),
    ("MachineStatus", &["name=machine", "version=machine", "hash=machine", "createdAt=machine", "createdBy=machine"]),
    ("GetMachineResponse", &["name=machine", "version=machine", "hash=machine", "createdAt=machine"]),
    ("GetMachineResponse", &["createdBy=machine", "definition=definitionJson"]),
    ("BulkAction", &["filter=filterJson"]),
];

/// Returns the fields of a type that a message does not have.
fn missing<T: JsonSchema>(message: &str) -> Vec<String> {
    let files = FileDescriptorSet::decode(DESCRIPTOR).expect("the descriptors come from the build");
    let mut messages = files.file.iter().flat_map(|file| &file.message_type);
    let found = messages.find(|found| found.name() == message).expect(message);
    let known: BTreeSet<&str> = found.field.iter().map(|field| field.json_name()).collect();
    let renamed = RENAMED.iter().filter(|(of, _)| *of == message).flat_map(|(_, names)| *names);
    let renamed: Vec<(&str, &str)> = renamed.map(|names| names.split_once('=').expect("two names")).collect();
    let schema = schema_for!(T).to_value();
    let fields = schema["properties"].as_object().expect("an object");
    let name =
        |field: &str| renamed.iter().find(|(from, _)| *from == field).map_or(field.to_owned(), |(_, to)| (*to).into());
    fields
        .keys()
        .filter(|field| !known.contains(name(field).as_str()))
        .map(|field| format!("{message}.{field}"))
        .collect()
}

#[test]
fn every_field_of_http_exists_in_grpc() {
    let missing: Vec<String> = [
        missing::<JobView>("Job"),
        missing::<Attempt>("JobAttempt"),
        missing::<Step>("Step"),
        missing::<Progress>("Progress"),
        missing::<LogEntry>("LogEntry"),
        missing::<TaskView>("Task"),
        missing::<Active>("ActiveTaskState"),
        missing::<Origin>("TaskOrigin"),
        missing::<Timer>("TaskTimer"),
        missing::<Approval>("TaskApproval"),
        missing::<Decision>("TaskDecision"),
        missing::<Event>("DeferredTaskEvent"),
        missing::<Record>("TaskRecord"),
        missing::<TaskAnswer>("TaskAnswer"),
        missing::<TaskWhy>("ExplainTaskResponse"),
        missing::<MachineStatus>("MachineStatus"),
        missing::<MachineView>("GetMachineResponse"),
        missing::<TaskBulkResponse>("TaskBulkResult"),
        missing::<TaskExample>("TaskExample"),
        missing::<MigratedState>("MigratedState"),
        missing::<Refusal>("MigrationRefusal"),
        missing::<BulkView>("BulkAction"),
    ]
    .concat();
    assert!(missing.is_empty(), "add these to the .proto files: {missing:?}");
    // `from` is a keyword in some languages.
    let versions = ["MigrateTasksResponse.from".to_owned(), "MigrateTasksResponse.to".to_owned()];
    assert_eq!(
        self::missing::<MigrationResponse>("MigrateTasksResponse"),
        versions,
        "they are from_version and to_version"
    );
}
