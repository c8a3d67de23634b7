//! What a caller whose key has `withoutPayloads` sees, besides numbers, times, ids and values of enums.
//!
//! Names, types, tags, keys, titles and URLs identify jobs and tasks, so they are shown. Their content is
//! not: payloads, results, data, events, progress, log lines and errors.

/// Texts and values of any form that are shown: the name of a field in JSON, or `Schema.field` where the same name has other
/// content elsewhere. Fields of gRPC messages have the names that they have in JSON.
const FIELDS: &[&str] = &[
    "action",
    "actor",
    "aggregateType",
    "by",
    "byStatus",
    "caller",
    "capabilities",
    "category",
    "changedBy",
    "code",
    "completedByPriority",
    "concurrencyKey",
    "correlationId",
    "counters",
    "createdBy",
    "cronExpression",
    "delayReason",
    "dependsOn",
    "downReason",
    "engine",
    "eventId",
    "eventType",
    "except",
    "explanation",
    "finished",
    "groups",
    "id",
    "idempotencyKey",
    "jobId",
    "jobName",
    "jobType",
    "lastJobId",
    "local",
    "lookup",
    "machine",
    "name",
    "named",
    "nextCursor",
    "nextPageToken",
    "node",
    "nodeName",
    "note",
    "omitted",
    "onRejected",
    "period",
    "pool",
    "processed",
    "queue",
    "queues",
    "registrationId",
    "resolvedBy",
    "retryOn",
    "scheduleId",
    "sink",
    "source",
    "state",
    "status",
    "tags",
    "taskId",
    "timezone",
    "title",
    "traceparent",
    "transport",
    "type",
    "types",
    "uniqueKey",
    "url",
    "webhookUrl",
    "workerId",
    "Approval.webhooks",
    "CheckMachineResponse.hash",
    "CloudEvent.correlationid",
    "CloudEvent.message",
    "CloudEvent.sequence",
    "CloudEvent.subject",
    "Event.subject",
    "Explanation.summary",
    "ExplainTaskResponse.summary",
    "GetMachineDiagramResponse.diagram",
    "GetMachineResponse.definitionJson",
    "GetMachineSchemaResponse.schemaJson",
    "LogEntry.event",
    "Machine.hash",
    "MachineFinding.message",
    "MachineFinding.path",
    "MachineStatus.hash",
    "MachineStatus.tasks",
    "MachineView.definition",
    "MachineView.hash",
    "NodeView.version",
    "Pause.reason",
    "Reason.message",
    "Record.actions",
    "Record.event",
    "Record.from",
    "Record.to",
    "RetryPolicy.errorPatterns",
    "RunNote.day",
    "RunNote.from",
    "RunNote.to",
    "Schedule.description",
    "ScheduleSpec.description",
    "ScheduleTick.reason",
    "ScheduleView.description",
    "TaskApproval.webhooks",
    "TaskRecord.actions",
    "TaskRecord.event",
    "TaskRecord.from",
    "TaskRecord.to",
    "TaskWaitReason.message",
    "TaskWhy.summary",
    "TickRow.reason",
    "TraceEntry.what",
    "WaitReason.message",
    "WebhookView.event",
    "WorkerChange.reason",
    "WorkerView.jobs",
    "WorkerView.reason",
    "WorkerView.version",
];

/// Media types of answers that never have a payload: metrics, and drawings of machines.
pub const MEDIA_TYPES: [&str; 3] = ["text/plain", "application/openmetrics-text", "image/svg+xml"];

/// Returns whether a text or a value of any form is shown.
pub fn is_visible(schema: &str, field: &str) -> bool {
    let is_listed = |listed: &&str| match listed.split_once('.') {
        Some((owner, name)) => owner == schema && name == field,
        None => *listed == field,
    };
    FIELDS.iter().any(is_listed)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A new text of a job is hidden from keys without payloads until it is listed above, so its author must decide.
    /// Reads the fields from the source of `JobView`, because a serialised job leaves out fields that are not set.
    #[test]
    fn every_text_of_a_job_is_shown_or_hidden_on_purpose() {
        const HIDDEN: [&str; 3] = ["payload", "result", "error"];
        let source = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../domain/src/job.rs"));
        let view = source.split("pub struct JobView {").nth(1).expect("the view of a job");
        let view = view.split("\n}").next().expect("the end of the struct");
        let fields = view.lines().filter_map(|line| line.trim().strip_prefix("pub ")?.split_once(": "));
        let is_text = |kind: &str| kind.contains("String") || kind.contains("Value");
        let texts: Vec<&str> = fields.filter(|(_, kind)| is_text(kind)).map(|(name, _)| name).collect();
        assert!(texts.contains(&"name") && texts.contains(&"payload"), "{texts:?}");
        for name in texts {
            let mut words = name.split('_');
            let first = words.next().unwrap_or_default().to_owned();
            let field = words.fold(first, |text, word| text + &word[..1].to_uppercase() + &word[1..]);
            let field = if field == "kind" { "type" } else { &field };
            assert!(is_visible("Job", field) != HIDDEN.contains(&field), "list {field} in FIELDS, or here as hidden");
        }
    }
}
