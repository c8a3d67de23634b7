//! The repair of each finding, where one is safe.
//!
//! Every statement is guarded by the condition that it repairs, so it can be run again and changes nothing else.

use faena_domain::Timestamp;

use super::{Cell, Dialect, collector::compile_timing};
use crate::sql::{PENDING, sql};
use crate::{assemble::parse_options, plan::key_number};

/// Repair of the findings of one code.
pub(crate) enum Fix {
    /// No repair is safe.
    None,
    /// Runs statements in one transaction. The rows that `Counted` statements change are the number of repairs.
    Sql(&'static [Statement]),
    /// Reads rows, and runs statements for each of them.
    Rows { select: &'static str, make: fn(&Dialect, &[Cell]) -> Vec<String> },
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
    Also(&'static str),
}

use Statement::{Also, Counted};

pub(crate) fn fix_of(code: &str) -> Fix {
    match code {
        "job-nowhere" => Fix::Sql(JOB_NOWHERE),
        "job-twice" => Fix::Sql(JOB_TWICE),
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
        "look-too-far" => Fix::Sql(&[Counted(
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
            "INSERT INTO key_queue (lane, key, turn) SELECT r.lane, r.key, min(r.ready_at) FROM ready r
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
            Also("DELETE FROM outbox_node WHERE NOT EXISTS (SELECT 1 FROM subscription s WHERE s.id = outbox_node.sink)"),
        ]),
        "partition-missing" => Fix::MakePartitions,
        _ => Fix::None,
    }
}

/// Queues the job again. Its retries continue after the recorded attempts. It may have started before, so its next start is
/// recorded before it happens. In a keyed lane the next pass sets its key.
const JOB_NOWHERE: &[Statement] = &[
    Also(
        "INSERT INTO job_log (id, run, log) {with}
         SELECT u.id, NULL, '[{now},\"recovered\",\"faena doctor found it in no state\"]'
         FROM (SELECT id FROM job EXCEPT SELECT id FROM job_states) u",
    ),
    Counted(
        sql!("INSERT INTO ready (lane, ready_at, id, retry_count, start_first) {with}
         SELECT j.lane, {now}, j.id, CAST(coalesce((
                    SELECT CASE a.state WHEN {RETRYING} THEN a.retry_count + 1 WHEN {QUEUED} THEN a.retry_count ELSE 0 END
                    FROM attempt a WHERE a.id = j.id ORDER BY a.run DESC LIMIT 1), 0) AS smallint), TRUE
         FROM job j WHERE j.id IN (SELECT id FROM job EXCEPT SELECT id FROM job_states)"),
    ),
];

/// Keeps one state. Finished precedes in flight, in flight precedes queued, queued precedes waiting. Completed precedes failed and
/// cancelled, which stay recorded as an attempt. Of two ready rows the earlier stays. A job that is finished and in flight under
/// a later run is left to that run.
const JOB_TWICE: &[Statement] = &[
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
    Also(
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
    "running" "id" "job", "attempt" "id" "job", "job_log" "id" "job", "step" "id" "job", "label" "id" "job", "job_key" "id" "job",
    "dependency" "child" "job", "expiry" "id" "job", "cancel_request" "id" "job", "key_in_flight" "id" "job", "webhook_attempt" "webhook" "webhook",
    "worker_change" "worker" "worker",
);

/// Returns the error of each counter. It is added to the counter, so that concurrent changes are kept.
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
        note(&id, dialect.now, "faena doctor found it waiting for parents that no longer exist"),
    ]
}

fn write_key(dialect: &Dialect, row: &[Cell]) -> Vec<String> {
    let Ok(options) = parse_options(options_of(row)) else { return Vec::new() };
    let key = match options.concurrency_key {
        Some(key) if row[3].number() == 1 => key_number(&key).to_string(),
        // A job without a key in a keyed lane: no key queue fits.
        None if row[3].number() == 1 => return Vec::new(),
        _ => "NULL".into(),
    };
    let (lane, id) = (row[0].number(), (dialect.literal)(row[1].id()));
    vec![format!("UPDATE ready SET key = {key} WHERE lane = {lane} AND id = {id}")]
}

/// Counts a job in flight for its key.
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
        None => "active = FALSE, finished = 'faena doctor found no due time that is left'".into(),
    };
    vec![format!("UPDATE schedule SET {change} WHERE id = {id} AND active AND next_at IS NULL")]
}

fn options_of(row: &[Cell]) -> Option<&str> {
    if let Cell::Text(text) = &row[2] { Some(text) } else { None }
}

fn note(id: &str, now: Timestamp, text: &str) -> String {
    format!("INSERT INTO job_log (id, run, log) VALUES ({id}, NULL, '[{},\"recovered\",\"{text}\"]')", now.as_ms())
}
