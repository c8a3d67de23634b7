//! The reference of jobs and events: states, fields, execution log, event types.

use std::fmt::Write;

use faena_domain::{ErrorReason, JobState, LogEvent};

use super::{escape_cell, generated_notice};

/// A field of a JSON object.
struct Field(&'static str, &'static str, &'static str);

/// The fields of a job, in the order in which the API writes them.
const JOB: &[Field] = &[
    Field("id", "UUID", "Id of the job, a UUIDv7."),
    Field("name", "text, 1–255", "Display name; defaults to `type`."),
    Field("type", "text, 1–100", "Type of the job, which selects the handler."),
    Field("queue", "text, 1–100", "Queue; `default` if not given."),
    Field("status", "state", "Current state, see [States](#states)."),
    Field("priority", "`LOW`, `NORMAL`, `HIGH`, `CRITICAL`", "Priority; `NORMAL` if not given."),
    Field("payload", "JSON object", "Input of the handler, stored unchanged."),
    Field("maxRetries", "number", "Retries after the first attempt."),
    Field("retryCount", "number", "Retries so far."),
    Field("retryDelay", "ms", "Delay before the first retry."),
    Field("backoffMultiplier", "number", "Factor by which the delay grows with each retry."),
    Field("maxDelay", "ms", "Upper bound of the delay."),
    Field("retryDelays", "list of ms", "Explicit delays instead of the computed backoff."),
    Field("jitter", "0–1", "Random part of the delay."),
    Field("retryOn", "text or list", "Which errors are retried."),
    Field("timeoutMs", "ms", "Time limit of one run; `null`: the server's default."),
    Field("createdAt", "time", "Time of the submission."),
    Field("updatedAt", "time", "Time of the last change."),
    Field("scheduledAt", "time", "Earliest start."),
    Field("expiresAt", "time", "The job fails if it has not started by then."),
    Field("queuedAt", "time", "Time at which it last became ready."),
    Field("startedAt", "time", "Start of the latest run."),
    Field("completedAt", "time", "Time at which it finished, in any final state."),
    Field("nextAttemptAt", "time", "Time of the next attempt, while it is `RETRYING`."),
    Field("result", "JSON", "Result of the handler."),
    Field("error", "text", "Error of the latest failed run."),
    Field("errorReason", "reason", "Why it failed, see [Error reasons](#error-reasons)."),
    Field("progress", "object", "Last progress that a run reported. It stays until the next run reports something."),
    Field("steps", "list", "Finished durable steps with their results."),
    Field("attempts", "list", "Runs of a dead-lettered job with their errors."),
    Field(
        "executionLog",
        "list",
        "What happened to the job: the newest 200 entries, see [Execution log](#execution-log).",
    ),
    Field("executionLogOmitted", "number", "Older entries that executionLog leaves out; absent if none."),
    Field("scheduleId", "UUID", "Schedule that created it."),
    Field("scheduleDue", "time", "Due time of the schedule for which it was created."),
    Field("workerId", "text", "Worker of the latest run."),
    Field(
        "run",
        "number",
        "Run number of the latest claim. It only increases; reports with an older number are rejected.",
    ),
    Field(
        "attempt",
        "number",
        "Attempts so far, see [Attempts](../concepts/life-cycle.md#attempts); 0 if it never ran.",
    ),
    Field("webhookUrl", "URL", "URL to notify when the job finishes."),
    Field("correlationId", "text", "Id that groups related jobs, tasks and events; defaults to the job's id."),
    Field("idempotencyKey", "text", "A repeated submission with this key returns the existing job."),
    Field("uniqueKey", "text", "At most one unfinished job has this key."),
    Field("concurrencyKey", "text", "Jobs with the same key share a concurrency limit."),
    Field("dependsOn", "list of UUIDs", "Jobs that must complete first."),
    Field("onParentFailure", "`cancel`, `run`", "What happens if one of them does not complete."),
    Field("tags", "list of text", "Labels to search for."),
];

const EVENTS: &[(&str, &str)] = &[
    ("job.created", "A job was submitted."),
    ("job.status.changed", "A job changed its state, except to `COMPLETED` and `FAILED`."),
    ("job.completed", "A job completed."),
    ("job.failed", "A job failed permanently."),
    ("job.dead_lettered", "A failed job was added to the dead letters."),
    ("worker.status.changed", "A worker changed its state."),
    ("worker.terminated", "A worker was terminated."),
    ("schedule.fired", "A due time of a schedule created a job."),
    ("schedule.missed", "A due time of a schedule was skipped."),
    ("task.created", "A task was created, or a queued task started."),
    ("task.queued", "A task was created and waits, because its machine has reached its limit on running tasks."),
    ("task.state.changed", "A task changed its state."),
    ("task.ended", "A task ended."),
    ("task.deadline_missed", "A task was silent, made no progress, or stayed in one state for too long."),
    ("task.approval.requested", "A task waits for a decision."),
    ("task.approval.reminder", "A task still waits for a decision."),
    ("task.approval.escalated", "More groups may decide on a task."),
    ("task.approval.expired", "No decision on a task came in time."),
];

pub fn render() -> String {
    let mut text = String::from("# Jobs and events\n\n");
    text.push_str(&generated_notice("jobs"));
    text.push_str("\nJSON fields are written in camelCase, times in RFC 3339 with milliseconds, in UTC.\n");
    text.push_str("\n## Fields of a job\n| Field | Type | Description |\n|---|---|---|\n");
    for Field(name, kind, description) in JOB {
        let _ = writeln!(text, "| `{name}` | {} | {} |", escape_cell(kind), escape_cell(description));
    }
    text.push_str("\nOptional fields that are not set are `null` or absent.\n");
    text.push_str("\n## States\n| State | May become | Final |\n|---|---|---|\n");
    for state in JobState::ALL {
        let next = JobState::ALL.into_iter().filter(|next| state.can_transition_to(*next));
        let next: Vec<String> = next.map(|next| format!("`{next}`")).collect();
        let is_final = if state.is_terminal() { "yes" } else { "" };
        let _ = writeln!(text, "| `{state}` | {} | {is_final} |", next.join(" "));
    }
    text.push_str("\nA final state changes only by a manual retry.\n");
    text.push_str("\n## Error reasons\n| Reason | Meaning |\n|---|---|\n");
    for reason in ErrorReason::ALL {
        let _ = writeln!(text, "| `{}` | {} |", reason.as_str(), reason_text(reason));
    }
    text.push_str("\n## Execution log\nEach entry has `timestamp`, `event`, `details` and `run`.\n");
    text.push_str("Newer versions may add events, and a worker may name events of its own;");
    text.push_str(" a client ignores those it does not know.\n\n");
    let events: Vec<String> = LogEvent::ALL.iter().map(|event| format!("`{}`", event.as_str())).collect();
    let _ = writeln!(text, "{}", events.join(" "));
    text.push_str("\n## Event types\n| Type | Meaning |\n|---|---|\n");
    for (name, meaning) in EVENTS {
        let _ = writeln!(text, "| `{name}` | {meaning} |");
    }
    text.push_str("\nTasks also publish the events that their machine emits, under the names that it gives them.\n");
    text.push_str("\nThe envelope is described in [Publish events to a broker](../guides/events.md).\n");
    text
}

fn reason_text(reason: ErrorReason) -> &'static str {
    match reason {
        ErrorReason::Error => "The handler failed.",
        ErrorReason::Timeout => "The run exceeded its time limit, or did not start in time.",
        ErrorReason::Orphaned => "The worker or the node that ran the job was lost.",
        ErrorReason::Cancelled => "The job was cancelled.",
        ErrorReason::Expired => "The job did not start before `expiresAt`.",
        ErrorReason::NoHandler => "No worker that runs this type connected in time.",
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Reads the fields from the source of `JobView`, because a serialised job leaves out fields that are not set.
    #[test]
    fn every_field_of_a_job_is_described() {
        let source = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../domain/src/job.rs"));
        let view = source.split("pub struct JobView {").nth(1).expect("the view of a job");
        let view = view.split("\n}").next().expect("the end of the struct");
        let fields = view.lines().filter_map(|line| line.trim().strip_prefix("pub ")?.split(':').next());
        let fields: BTreeSet<String> =
            fields.map(|field| if field == "kind" { "type".into() } else { camel_case(field) }).collect();
        let described: BTreeSet<String> = JOB.iter().map(|Field(name, ..)| (*name).to_owned()).collect();
        assert_eq!(fields, described);
    }

    #[test]
    fn every_event_type_is_described() {
        let described: BTreeSet<&str> = EVENTS.iter().map(|(name, _)| *name).collect();
        let known = faena_domain::EVENT_TYPES.into_iter().chain(faena_domain::TASK_EVENT_TYPES);
        assert_eq!(described, known.collect());
    }

    fn camel_case(name: &str) -> String {
        let mut words = name.split('_');
        let first = words.next().unwrap_or_default().to_owned();
        words.fold(first, |text, word| text + &word[..1].to_uppercase() + &word[1..])
    }
}
