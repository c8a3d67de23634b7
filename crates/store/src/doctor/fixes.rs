//! The repair of each finding that can be repaired safely.
//!
//! Every statement is guarded by the condition that it repairs, so it can be run again and changes nothing else.
//! `Dialect::sql` replaces the placeholders: `{with}` by the common table expressions `in_flight` and `job_states`, `{now}` by
//! the current time in ms.

use faena_domain::Timestamp;

use super::{Cell, Dialect, collector::compile_timing};
use crate::sql::{PENDING, sql};
use crate::{assemble::parse_options, plan::key_number};

/// Repair of the findings of one code.
pub(crate) enum Fix {
    /// No repair is safe.
    None,
    /// Runs statements in one transaction. The number of repairs is the number of rows that `Counted` statements change.
    Sql(&'static [Statement]),
    /// Reads rows, and runs statements for each of them.
    Rows { select: &'static str, make: fn(&Dialect, &[Cell]) -> Vec<String> },
    /// Repairs the timers and columns of tasks, with [`super::tasks::TaskRepair`].
    Tasks,
    /// Calls `node_recover` until nothing is left.
    Recover,
    /// Corrects the counters.
    Recount,
    /// Moves the sequence of run numbers forward.
    MoveSequence,
    /// Creates missing partitions.
    MakePartitions,
}

pub(crate) enum Statement {
    Counted(&'static str),
    Uncounted(&'static str),
}

use Statement::{Counted, Uncounted};

pub(crate) fn fix_of(code: &str) -> Fix {
    match code {
        "job-without-state" => Fix::Sql(JOB_WITHOUT_STATE),
        "job-with-two-states" => Fix::Sql(JOB_WITH_TWO_STATES),
        "wrong-lane" => Fix::Sql(WRONG_LANE),
        "orphaned-rows" => Fix::Sql(ORPHANS),
        "counter-drift" => Fix::Recount,
        "claim-without-owner" | "node-dead" => Fix::Recover,
        "worker-unwatched" => Fix::Sql(&[Counted(
            "UPDATE worker SET deadline = {now} + 60000 WHERE ended_at IS NULL AND deadline IS NULL
                 AND NOT EXISTS (SELECT 1 FROM node n WHERE n.id = worker.node)",
        )]),
        "running-without-claim" => Fix::Sql(&[Counted(
            "{with} DELETE FROM running WHERE NOT EXISTS (SELECT 1 FROM in_flight h WHERE h.id = running.id AND h.run = running.run)",
        )]),
        "blocked-without-parents" => Fix::Rows {
            select: "SELECT w.lane, w.id, j.options FROM waiting w JOIN job j ON j.id = w.id
                     WHERE w.blocked AND NOT EXISTS (SELECT 1 FROM dependency d WHERE d.child = w.id)",
            make: unblock,
        },
        "recheck-too-late" => Fix::Sql(&[Counted(
            "UPDATE waiting SET due_at = {now} WHERE blocked AND due_at > {now} + 86400000",
        )]),
        "run-behind" => Fix::MoveSequence,
        "unique-key-held" => Fix::Sql(&[Counted(
            sql!("DELETE FROM job_key WHERE kind = {UNIQUE_KEY} AND EXISTS (
                 SELECT 1 FROM job j WHERE j.id = job_key.id
                   AND (EXISTS (SELECT 1 FROM done d WHERE d.lane = j.lane AND d.id = j.id)
                        OR EXISTS (SELECT 1 FROM ended e WHERE e.lane = j.lane AND e.state IN ({FAILED}, {CANCELLED}) AND e.id = j.id)))"),
        )]),
        "key-missing" => Fix::Rows {
            select: "SELECT r.lane, r.id, j.options, CAST(CASE WHEN l.keyed THEN 1 ELSE 0 END AS bigint)
                     FROM ready r JOIN lane l ON l.id = r.lane JOIN job j ON j.id = r.id WHERE (r.key IS NULL) = l.keyed",
            make: write_key,
        },
        "key-queue-missing" => Fix::Sql(&[Counted(
            "INSERT INTO key_queue (lane, key, rank) SELECT r.lane, r.key, min(r.ready_at) FROM ready r
             WHERE r.key IS NOT NULL AND NOT EXISTS (SELECT 1 FROM key_queue n WHERE n.lane = r.lane AND n.key = r.key)
             GROUP BY r.lane, r.key",
        )]),
        "key-queue-closed" => Fix::Sql(&[Counted(
            "UPDATE key_queue SET open = TRUE WHERE NOT open AND opens_at IS NULL
                 AND NOT EXISTS (SELECT 1 FROM key_in_flight h WHERE h.key = key_queue.key)",
        )]),
        "key-in-flight-stale" => Fix::Sql(&[Counted(
            "{with} DELETE FROM key_in_flight WHERE NOT EXISTS (SELECT 1 FROM in_flight d WHERE d.id = key_in_flight.id)",
        )]),
        "key-in-flight-missing" => Fix::Rows {
            select: "{with} SELECT d.lane, d.id, j.options FROM in_flight d JOIN lane l ON l.id = d.lane JOIN job j ON j.id = d.id
                     WHERE l.keyed AND NOT EXISTS (SELECT 1 FROM key_in_flight h WHERE h.id = d.id)",
            make: add_in_flight,
        },
        "webhook-stuck" => {
            Fix::Sql(&[Counted(sql!("UPDATE webhook SET due_at = {now} WHERE state IN ({WEBHOOK_WAITING}, {WEBHOOK_SENDING}) AND due_at IS NULL"))])
        }
        "bulk-stuck" => {
            Fix::Sql(&[Counted("UPDATE bulk SET due_at = {now} WHERE due_at IS NULL AND finished_at IS NULL")])
        }
        "schedule-stuck" => Fix::Rows {
            select: "SELECT id, anchor_at, spec, cursor_at FROM schedule WHERE active AND next_at IS NULL",
            make: next_time,
        },
        "outbox-without-event" => Fix::Sql(&[Counted(
            "DELETE FROM outbox WHERE NOT EXISTS (SELECT 1 FROM event e WHERE e.position = outbox.position)",
        )]),
        "outbox-unknown-sink" => {
            Fix::Sql(&[Counted("DELETE FROM outbox WHERE NOT EXISTS (SELECT 1 FROM subscription s WHERE s.id = outbox.sink)")])
        }
        "lease-unknown-sink" => Fix::Sql(&[
            Counted("DELETE FROM outbox_lease WHERE NOT EXISTS (SELECT 1 FROM subscription s WHERE s.id = outbox_lease.sink)"),
            Uncounted("DELETE FROM outbox_node WHERE NOT EXISTS (SELECT 1 FROM subscription s WHERE s.id = outbox_node.sink)"),
        ]),
        "task-timers" | "task-columns" => Fix::Tasks,
        "partition-missing" => Fix::MakePartitions,
        _ => Fix::None,
    }
}

/// Queues the job again. Its retries continue after the recorded attempts. It may have started before, so
/// `must_record_start` is set: its next start is stored before it runs. In a keyed lane the repair of `key-missing` sets its key
/// in the next pass of doctor.
const JOB_WITHOUT_STATE: &[Statement] = &[
    Uncounted(
        "INSERT INTO job_log (id, run, log) {with}
         SELECT u.id, NULL, '[{now},\"recovered\",\"faena doctor found the job without a state\"]'
         FROM (SELECT id FROM job EXCEPT SELECT id FROM job_states) u",
    ),
    Counted(
        sql!("INSERT INTO ready (lane, ready_at, id, retry_count, must_record_start) {with}
         SELECT j.lane, {now}, j.id, CAST(coalesce((
                    SELECT CASE a.state WHEN {RETRYING} THEN a.retry_count + 1 WHEN {QUEUED} THEN a.retry_count ELSE 0 END
                    FROM attempt a WHERE a.id = j.id ORDER BY a.run DESC LIMIT 1), 0) AS smallint), TRUE
         FROM job j WHERE j.id IN (SELECT id FROM job EXCEPT SELECT id FROM job_states)"),
    ),
];

/// Keeps one state. Finished precedes in flight, in flight precedes queued, queued precedes waiting. Completed precedes failed and
/// cancelled, which stay recorded as an attempt. Of two ready rows the earlier stays. A finished job that is also in flight
/// under a later run is not changed: that run decides its state.
const JOB_WITH_TWO_STATES: &[Statement] = &[
    Counted(
        sql!("{with} DELETE FROM waiting WHERE id IN (SELECT id FROM job_states GROUP BY id HAVING count(*) > 1)
             AND id IN (SELECT id FROM job_states WHERE tally IN ({TALLY_QUEUED}, {TALLY_IN_FLIGHT}, {TALLY_COMPLETED}, {TALLY_FAILED}, {TALLY_CANCELLED}))"),
    ),
    Counted(
        sql!("{with} DELETE FROM ready WHERE id IN (SELECT id FROM job_states GROUP BY id HAVING count(*) > 1)
             AND id IN (SELECT id FROM job_states WHERE tally IN ({TALLY_IN_FLIGHT}, {TALLY_COMPLETED}, {TALLY_FAILED}, {TALLY_CANCELLED}))"),
    ),
    Counted(
        "DELETE FROM ready WHERE EXISTS (SELECT 1 FROM ready o WHERE o.lane = ready.lane AND o.id = ready.id
             AND o.ready_at < ready.ready_at)",
    ),
    Uncounted(
        "INSERT INTO attempt (id, run, state, retry_count, finished_at, started_at, worker, error, reason, log)
         SELECT e.id, e.run, e.state, e.retry_count, e.finished_at, e.started_at, e.worker, e.error, e.reason, e.log
         FROM ended e WHERE e.run > 0 AND EXISTS (SELECT 1 FROM done d WHERE d.lane = e.lane AND d.id = e.id)
           AND NOT EXISTS (SELECT 1 FROM attempt a WHERE a.id = e.id AND a.run = e.run)",
    ),
    Counted("DELETE FROM ended WHERE EXISTS (SELECT 1 FROM done d WHERE d.lane = ended.lane AND d.id = ended.id)"),
];

macro_rules! to_lane_of_job {
    ($($table:literal),+) => {
        &[$(Counted(concat!("UPDATE ", $table, " SET lane = (SELECT j.lane FROM job j WHERE j.id = ", $table, ".id)
             WHERE EXISTS (SELECT 1 FROM job j WHERE j.id = ", $table, ".id AND j.lane <> ", $table, ".lane)"))),+]
    };
}

const WRONG_LANE: &[Statement] = to_lane_of_job!("ready", "waiting", "running", "done", "ended");

macro_rules! delete_orphans {
    ($($table:literal $column:literal $owner:literal),+ $(,)?) => {
        &[$(Counted(concat!("DELETE FROM ", $table, " WHERE NOT EXISTS (SELECT 1 FROM ", $owner, " j WHERE j.id = ", $table, ".",
                            $column, ")"))),+]
    };
}

const ORPHANS: &[Statement] = delete_orphans!(
    "ready" "id" "job", "waiting" "id" "job", "done" "id" "job", "ended" "id" "job",
    "running" "id" "job", "attempt" "id" "job", "job_log" "id" "job", "stale_report" "id" "job", "step" "id" "job", "progress" "id" "job", "label" "id" "job", "job_key" "id" "job",
    "dependency" "child" "job", "expiry" "id" "job", "cancel_request" "id" "job", "key_in_flight" "id" "job", "webhook_attempt" "webhook" "webhook",
    "worker_change" "worker" "worker", "task_record" "task" "task", "task_inbox" "task" "task", "task_job" "task" "task",
    "task_tag" "task" "task", "task_key" "task" "task", "task_usage" "task" "task",
);

/// Selects the difference between the counted rows and each counter. The repair adds it to the counter, so that concurrent
/// changes are kept.
pub(crate) const DRIFT: &str = sql!(
    "{with} SELECT lane, tally, CAST(sum(n) AS bigint) AS n FROM (
        SELECT lane, CAST(tally AS smallint) AS tally, count(*) AS n FROM job_states GROUP BY lane, tally
        UNION ALL SELECT lane, tally, -n FROM counter WHERE tally < {TALLY_RAN}) c
    GROUP BY lane, tally HAVING sum(n) <> 0"
);

pub(crate) const LARGEST_RUN: &str = "SELECT max(run) FROM (
    SELECT max(run) AS run FROM claim UNION ALL SELECT max(run) FROM running UNION ALL SELECT max(run) FROM attempt
    UNION ALL SELECT max(run) FROM ended UNION ALL SELECT max(run) FROM done) u";

/// Makes a job without parents wait only for its scheduled time.
fn unblock(dialect: &Dialect, row: &[Cell]) -> Vec<String> {
    let Ok(options) = parse_options(options_of(row)) else { return Vec::new() };
    let due_at = options.scheduled_at.unwrap_or(dialect.now).max(dialect.now).as_ms();
    let (lane, id) = (row[0].number(), (dialect.literal)(row[1].id()));
    vec![
        format!(
            "UPDATE waiting SET blocked = FALSE, due_at = {due_at} WHERE lane = {lane} AND state = {PENDING} AND id = {id} AND blocked"
        ),
        log_entry(&id, dialect.now, "faena doctor found it waiting for parents that no longer exist"),
    ]
}

fn write_key(dialect: &Dialect, row: &[Cell]) -> Vec<String> {
    let Ok(options) = parse_options(options_of(row)) else { return Vec::new() };
    let key = match options.concurrency_key {
        Some(key) if row[3].number() == 1 => key_number(&key).to_string(),
        // A job without a concurrency key has no key queue, so nothing is changed.
        None if row[3].number() == 1 => return Vec::new(),
        _ => "NULL".into(),
    };
    let (lane, id) = (row[0].number(), (dialect.literal)(row[1].id()));
    vec![format!("UPDATE ready SET key = {key} WHERE lane = {lane} AND id = {id}")]
}

/// Adds a job in flight to the count of its concurrency key.
fn add_in_flight(dialect: &Dialect, row: &[Cell]) -> Vec<String> {
    let Some(key) = parse_options(options_of(row)).ok().and_then(|options| options.concurrency_key) else {
        return Vec::new();
    };
    let id = (dialect.literal)(row[1].id());
    vec![format!("INSERT INTO key_in_flight (key, id) VALUES ({}, {id}) ON CONFLICT DO NOTHING", key_number(&key))]
}

/// Computes the next due time after the cursor; missed due times are then treated as after an outage. Deactivates a schedule
/// whose timing is invalid or has no due time left.
fn next_time(dialect: &Dialect, row: &[Cell]) -> Vec<String> {
    let id = (dialect.literal)(row[0].id());
    let next = compile_timing(row[1].number(), row[2].text())
        .and_then(|timing| timing.next(Timestamp::from_ms(row[3].number())));
    let change = match next {
        Some(tick) => format!("next_at = {}", tick.due.as_ms()),
        None => "active = FALSE, finished = 'faena doctor found no remaining due time'".into(),
    };
    vec![format!("UPDATE schedule SET {change} WHERE id = {id} AND active AND next_at IS NULL")]
}

fn options_of(row: &[Cell]) -> Option<&str> {
    if let Cell::Text(text) = &row[2] { Some(text) } else { None }
}

fn log_entry(id: &str, now: Timestamp, text: &str) -> String {
    format!("INSERT INTO job_log (id, run, log) VALUES ({id}, NULL, '[{},\"recovered\",\"{text}\"]')", now.as_ms())
}
