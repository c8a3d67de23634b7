//! The invariants, as SQL that finds the rows that violate them.
//!
//! Each query returns `code, id, detail, x, y, z`; the code's entry in `CODES` says how to describe a row. The queries
//! read each table once from end to end: a lookup per job took four times as long on a million finished jobs.

use super::{
    Cell, Collector, Dialect, EXAMPLES, Finding, Severity, collector,
    fixes::{Fix, fix_of},
    tasks,
};
use crate::sql::sql;

/// A kind of finding.
pub(crate) struct Code {
    pub code: &'static str,
    severity: Severity,
    /// The problem, after the number of rows: `{job is|jobs are}` agrees with it.
    summary: &'static str,
    /// Description of a row: `{id}`, `{detail}`, `{x}`, `{y}`, `{z}`; `{x:state}` is the name of a state, `{x:s}`
    /// seconds, `{x:jobs}` a number of jobs.
    example: &'static str,
    advice: &'static str,
    /// What a repair did, after the number of rows: `{job|jobs}` agrees with it.
    fixed: &'static str,
}

impl Code {
    pub fn finding(&self, count: u64, text: String) -> Finding {
        let fixable = !matches!(fix_of(self.code), Fix::None);
        Finding { code: self.code, severity: self.severity, count, text, advice: self.advice, fixable }
    }

    /// Returns the finding for `count` rows, of which `examples` are named.
    pub fn found(&self, count: u64, examples: &[String]) -> Finding {
        let mut text = format!("{count} {}: {}", agree(self.summary, count), examples.join(", "));
        let more = count.saturating_sub(examples.len() as u64);
        if more > 0 {
            text.push_str(&format!(" and {more} more"));
        }
        self.finding(count, text)
    }

    /// Says what a repair did with `count` rows, without their number.
    pub fn fixed(&self, count: u64) -> String {
        agree(self.fixed, count)
    }

    /// Describes a row of a query.
    pub fn describe(&self, row: &[Cell]) -> String {
        let mut text = self.example.to_owned();
        for (index, name) in ["id", "detail", "x", "y", "z"].into_iter().enumerate() {
            let cell = row.get(index + 1).unwrap_or(&Cell::Null);
            text = text.replace(&format!("{{{name}}}"), &cell.to_string());
            text = text.replace(&format!("{{{name}:state}}"), tally_name(cell.number()));
            text = text.replace(&format!("{{{name}:s}}"), &format!("{} s", cell.number() / 1_000));
            let jobs = if cell.number() == 1 { "job" } else { "jobs" };
            text = text.replace(&format!("{{{name}:jobs}}"), &format!("{} {jobs}", cell.number()));
        }
        text
    }
}

/// Replaces each `{one|many}` by the form that agrees with `count`.
fn agree(text: &str, count: u64) -> String {
    let mut agreed = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, forms, after)) = next_forms(rest) {
        agreed.push_str(before);
        agreed.push_str(if count == 1 { forms.0 } else { forms.1 });
        rest = after;
    }
    agreed + rest
}

fn next_forms(text: &str) -> Option<(&str, (&str, &str), &str)> {
    let (before, rest) = text.split_once('{')?;
    let (forms, after) = rest.split_once('}')?;
    Some((before, forms.split_once('|')?, after))
}

fn tally_name(tally: i64) -> &'static str {
    match tally {
        0 => "pending",
        1 => "queued",
        2 => "in flight",
        3 => "retrying",
        4 => "completed",
        5 => "failed",
        6 => "cancelled",
        _ => "?",
    }
}

pub(crate) fn code_of(code: &str) -> &'static Code {
    CODES.iter().chain(tasks::CODES).find(|known| known.code == code).unwrap_or(&UNKNOWN)
}

const UNKNOWN: Code =
    warning("unknown", "{problem|problems} of an unknown kind", "{id} {detail}", "report this as a bug");

pub(super) const FIX: &str = "run \"faena doctor --fix\"";
pub(super) const SERVE: &str =
    "start a server (\"faena serve\"), which repairs this; if one is running, check its loops in /health/ready";
pub(super) const RESTORE: &str = "no automatic repair is safe: inspect the rows, and restore a backup if you need them";

pub(super) const fn error(
    code: &'static str,
    summary: &'static str,
    example: &'static str,
    advice: &'static str,
) -> Code {
    Code { code, severity: Severity::Error, summary, example, advice, fixed: "" }
}

pub(super) const fn warning(
    code: &'static str,
    summary: &'static str,
    example: &'static str,
    advice: &'static str,
) -> Code {
    Code { code, severity: Severity::Warning, summary, example, advice, fixed: "" }
}

impl Code {
    pub(super) const fn repaired(self, fixed: &'static str) -> Code {
        Code { fixed, ..self }
    }
}

const CODES: &[Code] = &[
    error("job-without-state", "{job has|jobs have} no state, so {it|they} will never run", "{id}", FIX)
        .repaired("{job|jobs} queued again"),
    error("job-with-two-states", "{job has|jobs have} more than one state", "{id} ({x:state}, {y:state})", FIX)
        .repaired("surplus {state|states} deleted"),
    error("wrong-lane", "{job is|jobs are} in the wrong lane", "{id} ({x:state})", FIX)
        .repaired("{row|rows} moved to the lane of the job"),
    warning(
        "lanes-near-limit",
        "{database has|databases have} nearly reached the maximum number of lanes",
        "{x} of {y} combinations of queue, type and priority",
        "put ids into the payload instead of the names of types and queues; lanes without jobs are reclaimed",
    ),
    error("lane-missing", "{lane is|lanes are} used by jobs but missing", "lane {x}", RESTORE),
    error(
        "orphaned-rows",
        "{row belongs|rows belong} to a job, webhook or worker that does not exist",
        "{detail} of {id}",
        FIX,
    )
    .repaired("orphaned {row|rows} deleted"),
    error(
        "counter-drift",
        "{counter differs|counters differ} from the number of rows",
        "{detail} {x:state}: counter {y}, rows {z}",
        FIX,
    )
    .repaired("{counter|counters} recounted"),
    error("job-unreadable", "{job has|jobs have} invalid options, which make claims fail", "{id}", RESTORE),
    error("claim-without-owner", "{claim has|claims have} no live owner", "run {x} of owner {id} ({y:jobs})", SERVE)
        .repaired("{job|jobs} released from dead owners"),
    warning(
        "node-dead",
        "{node|nodes} stopped without releasing {its|their} jobs",
        "{detail} ({x:jobs} in flight)",
        SERVE,
    )
    .repaired("{job|jobs} released from dead nodes"),
    error("worker-unwatched", "live {worker has|workers have} neither a live node nor a deadline", "{detail}", FIX)
        .repaired("{worker|workers} given a deadline"),
    warning(
        "worker-overdue",
        "{worker has|workers have} not been declared lost although {its|their} deadline has passed",
        "{detail} ({x:s} ago)",
        SERVE,
    ),
    error(
        "worker-state",
        "{worker has|workers have} a state that contradicts {its|their} end",
        "{detail} (state {x})",
        RESTORE,
    ),
    error("worker-history", "illegal {transition|transitions} of workers", "{detail}", RESTORE),
    error("outbox-without-event", "{message|messages} in the outbox without an event", "event {x} of {id}", FIX)
        .repaired("{message|messages} without an event deleted from the outbox"),
    error(
        "outbox-unknown-sink",
        "{message|messages} in the outbox for a sink that does not exist",
        "event {x} for sink {y}",
        FIX,
    )
    .repaired("{message|messages} for unknown sinks deleted from the outbox"),
    warning("lease-unknown-sink", "{lease|leases} of a sink that does not exist", "partition {x} of sink {y}", FIX)
        .repaired("{lease|leases} of unknown sinks deleted"),
    error("running-without-claim", "{job is|jobs are} marked as running but not claimed", "{id} (run {x})", FIX)
        .repaired("{mark|marks} of running jobs deleted"),
    error("blocked-without-parents", "{job waits|jobs wait} for parents but {has|have} none left", "{id}", FIX)
        .repaired("{job|jobs} unblocked"),
    error(
        "recheck-too-late",
        "{job|jobs} waiting for parents will be checked again only in more than a day",
        "{id}",
        FIX,
    )
    .repaired("{job|jobs} scheduled for a check now"),
    warning("waiting-overdue", "{job is|jobs are} overdue", "{id} ({x:s} ago)", SERVE),
    error("illegal-state", "{row has|rows have} an unknown state", "{detail} of {id}: {x}", RESTORE),
    error("rule-illegal", "{setting|settings} of queues or limits {is|are} invalid", "{detail}: {x}", RESTORE),
    error("run-behind", "run {number is|numbers are} in use but not assigned yet", "{x}, assigned up to {y}", FIX)
        .repaired("run {sequence|sequences} moved forward"),
    error("unique-key-held", "unique {key is|keys are} held by a finished job", "{detail} ({id})", FIX)
        .repaired("unique {key|keys} released"),
    warning(
        "attempts-missing",
        "{job has|jobs have} fewer recorded attempts than retries",
        "{id} ({x} retries, {y} recorded)",
        RESTORE,
    ),
    error("log-unreadable", "{log is|logs are} unreadable", "{detail} of {id}", RESTORE),
    warning(
        "log-time",
        "{log goes|logs go} back in time by more than clocks may differ",
        "{detail} of {id}",
        "compare the clocks of the servers",
    ),
    warning("log-incomplete", "{log is|logs are} incomplete", "{detail} of {id}", RESTORE),
    error("key-missing", "ready {job|jobs} without a key in a keyed lane, or with a key in another lane", "{id}", FIX)
        .repaired("{key|keys} set"),
    error(
        "key-queue-missing",
        "{key has|keys have} ready jobs but no key queue, so the jobs cannot be claimed",
        "key {x} of lane {y}",
        FIX,
    )
    .repaired("key {queue|queues} created"),
    error("key-queue-closed", "key {queue is|queues are} closed and will never open", "key {x} of lane {y}", FIX)
        .repaired("key {queue|queues} opened"),
    warning("key-queue-overdue", "key {queue|queues} should have opened long ago", "key {x} of lane {y}", SERVE),
    error(
        "key-in-flight-stale",
        "{job counts|jobs count} towards the limit of a key but {is|are} not in flight",
        "{id}",
        FIX,
    )
    .repaired("stale {job|jobs} removed from the limit of a key"),
    error(
        "key-in-flight-missing",
        "{job is|jobs are} in flight but {does|do} not count towards the limit of {its|their} key",
        "{id}",
        FIX,
    )
    .repaired("{job|jobs} counted towards the limit of a key"),
    error("webhook-stuck", "unsent {webhook has|webhooks have} no due time", "{id}", FIX)
        .repaired("{webhook|webhooks} given a due time"),
    warning("webhook-overdue", "{webhook is|webhooks are} overdue", "{id} ({x:s} ago)", SERVE),
    error("bulk-stuck", "unfinished bulk {action has|actions have} no due time", "{id}", FIX)
        .repaired("bulk {action|actions} given a due time"),
    warning("bulk-overdue", "bulk {action is|actions are} overdue", "{id} ({x:s} ago)", SERVE),
    error("schedule-stuck", "active {schedule has|schedules have} no next due time", "{detail} ({id})", FIX)
        .repaired("{schedule|schedules} given {its|their} next due time, or deactivated"),
    warning("schedule-overdue", "{schedule is|schedules are} overdue", "{detail} ({id}, {x:s} ago)", SERVE),
    error(
        "schedule-unreadable",
        "{schedule has|schedules have} an invalid timing and {does|do} not fire",
        "{detail} ({id})",
        "delete it (\"faena schedules delete\") and create it again",
    ),
    warning(
        "tick-without-job",
        "{due time created a job|due times created jobs} that no longer {exists|exist}, although no user deleted jobs",
        "{id} of {detail}",
        "expected if \"retention\" is shorter than an hour; otherwise inspect the rows",
    ),
    error("due-twice", "{job was|jobs were} created for a due time that already had one", "{id} ({detail})", RESTORE),
    error("schema-old", "", "", "run \"faena migrate\", or start a server of this version"),
    // Configuration of PostgreSQL.
    error("postgres-old", "", "", "upgrade to PostgreSQL 13 or newer"),
    warning("clock-skew", "", "", "synchronise the clocks of both machines with NTP"),
    warning(
        "partition-missing",
        "future {day has|days have} no partition for completed jobs",
        "{detail}",
        "start a server, which creates them, or run \"faena doctor --fix\"",
    )
    .repaired("{partition|partitions} created"),
    warning(
        "default-partition",
        "",
        "",
        "harmless; retention deletes them. If their number grows, look for \"partition\" in the logs of the servers",
    ),
    warning(
        "xmin-held",
        "{session prevents|sessions prevent} the removal of old row versions, which slows down claims",
        "{detail}",
        "end the transaction, or the session: SELECT pg_terminate_backend(pid)",
    ),
    warning(
        "slot-held",
        "replication {slot retains|slots retain} old row versions or WAL",
        "{detail}",
        "let the consumer catch up, or drop the slot: SELECT pg_drop_replication_slot(name)",
    ),
    warning(
        "vacuum-behind",
        "{table has|tables have} many dead rows",
        "{detail}",
        "check xmin-held above; otherwise VACUUM them and give autovacuum more workers",
    ),
    warning(
        "listen-impossible",
        "",
        "",
        "harmless, because servers poll; for immediate notifications connect without PgBouncer's transaction mode",
    ),
    // Configuration of SQLite.
    error(
        "file-damaged",
        "{error|errors} in the database file",
        "{detail}",
        "stop the server, copy the file, then restore a backup or try \"sqlite3 FILE .recover\"",
    ),
    warning("wal-large", "", "", "end the long-running reader, or restart the server"),
    error("file-read-only", "", "", "give the user that runs the server write access to the file and its directory"),
    warning("file-open-to-all", "", "", "run \"chmod o-w\" on the file"),
];

/// Relations that a query can use: `claimed`, every job of every claim; `in_flight`, those of them whose run has not ended;
/// `job_states`, the state of every job, with the tally that counts it.
pub(crate) const WITH: &str = sql!("WITH RECURSIVE {claimed},
in_flight (id, lane, run, owner) AS MATERIALIZED (
    SELECT h.id, j.lane, h.run, h.owner FROM claimed h CROSS JOIN job j WHERE j.id = h.id
       AND NOT EXISTS (SELECT 1 FROM done d WHERE d.lane = j.lane AND d.id = h.id AND d.run = h.run)
       AND NOT EXISTS (SELECT 1 FROM ended e WHERE e.lane = j.lane AND e.state IN ({FAILED}, {CANCELLED}) AND e.id = h.id AND e.run = h.run)
       AND NOT EXISTS (SELECT 1 FROM attempt a WHERE a.id = h.id AND a.run = h.run)),
job_states (id, lane, tally) AS (
    SELECT id, lane, {TALLY_QUEUED} FROM ready
    UNION ALL SELECT id, lane, CASE state WHEN {PENDING} THEN {TALLY_PENDING} ELSE {TALLY_RETRYING} END FROM waiting
    UNION ALL SELECT id, lane, {TALLY_IN_FLIGHT} FROM in_flight
    UNION ALL SELECT id, lane, {TALLY_COMPLETED} FROM done
    UNION ALL SELECT id, lane, CASE state WHEN {FAILED} THEN {TALLY_FAILED} ELSE {TALLY_CANCELLED} END FROM ended)");

/// One step of an inspection: a query, and the function that checks its rows.
pub(crate) struct Step {
    pub name: &'static str,
    pub sql: String,
    pub take: fn(&mut Collector, &[Cell]),
}

pub(crate) fn steps(dialect: &Dialect) -> Vec<Step> {
    let query = |name, sql: &str| Step { name, sql: dialect.sql(&wrapped(sql)), take: Collector::row };
    let scan = |name, sql: &str, take| Step { name, sql: dialect.sql(sql), take };
    let mut steps = vec![
        scan("jobs", "SELECT CAST(count(*) AS bigint) FROM job", collector::jobs),
        query("states of jobs", JOB_STATES),
    ];
    steps.extend(
        [("counters", COUNTERS), ("lanes", LANES), ("orphaned rows", ORPHANS), ("owners", OWNERS)]
            .map(|(n, s)| query(n, s)),
    );
    steps.extend(
        [("waiting jobs", WAITING), ("state numbers", STATES), ("keys", KEYS), ("limits", LIMITS)]
            .map(|(n, s)| query(n, s)),
    );
    steps.extend(
        [
            ("deliveries", DELIVERIES),
            ("run numbers", RUNS),
            ("rules", RULES),
            ("attempts", ATTEMPTS),
            ("outbox", OUTBOX),
        ]
        .map(|(n, s)| query(n, s)),
    );
    steps.extend([
        scan("options", "SELECT id, options FROM job WHERE options IS NOT NULL", collector::options),
        scan("logs of completed jobs", "SELECT 'completed', id, CAST(6 AS bigint), run, log FROM done", collector::log),
        scan("logs of other ends", "SELECT 'ended', id, state, run, log FROM ended", collector::log),
        scan("logs of attempts", "SELECT 'attempt', id, state, run, log FROM attempt", collector::log),
        scan("job log", "SELECT 'job_log', id, CAST(-1 AS bigint), run, log FROM job_log", collector::log),
        scan(
            "worker histories",
            "SELECT worker, state FROM worker_change ORDER BY worker, sequence",
            collector::history,
        ),
        scan("workers", "SELECT id, state, key FROM worker", collector::worker),
        query("schedules", SCHEDULES),
        scan("schedule timings", "SELECT id, anchor_at, spec, name FROM schedule", collector::schedule),
        scan(
            "jobs of schedules",
            sql!("SELECT l.value, j.id, j.options FROM label l CROSS JOIN job j WHERE l.kind = {SCHEDULE_LABEL} AND j.id = l.id ORDER BY l.value"),
            collector::due,
        ),
        scan("machines", tasks::MACHINES, tasks::machine),
        scan("tasks", tasks::TASKS, tasks::task),
        query("timers of tasks", tasks::OVERDUE),
    ]);
    steps
}

/// Counts the rows of each code and keeps a few of them.
fn wrapped(sql: &str) -> String {
    format!(
        "{{with}} SELECT code, id, detail, x, y, z, n, r FROM (
             SELECT q.*, CAST(count(*) OVER (PARTITION BY code) AS bigint) AS n, row_number() OVER (PARTITION BY code) AS r
             FROM ({sql}) q) t WHERE r <= {EXAMPLES}"
    )
}

/// Every job has exactly one state, in its lane, and every state belongs to a job.
const JOB_STATES: &str = "
    SELECT CASE WHEN jobs = 0 THEN 'orphaned-rows' WHEN n = 0 THEN 'job-without-state' WHEN n > 1 THEN 'job-with-two-states' ELSE 'wrong-lane' END
               AS code, id, 'state' AS detail, CAST(first AS bigint) AS x, CAST(last AS bigint) AS y, CAST(NULL AS bigint) AS z
    FROM (SELECT id, sum(job) AS jobs, count(*) - sum(job) AS n, min(lane) AS low, max(lane) AS high,
                 min(tally) AS first, max(tally) AS last
          FROM (SELECT id, lane, 1 AS job, CAST(NULL AS integer) AS tally FROM job UNION ALL SELECT id, lane, 0, tally FROM job_states) r
          GROUP BY id) g
    WHERE jobs <> 1 OR n <> 1 OR low <> high";

const COUNTERS: &str = sql!(
    "
    SELECT 'counter-drift' AS code, CAST(NULL AS uuid) AS id, coalesce(l.queue || '/' || l.type, 'no lane') AS detail,
           CAST(d.tally AS bigint) AS x, d.stored AS y, d.counted AS z
    FROM (SELECT lane, tally, CAST(sum(stored) AS bigint) AS stored, CAST(sum(counted) AS bigint) AS counted
          FROM (SELECT lane, tally, n AS stored, 0 AS counted FROM counter WHERE tally < {TALLY_RAN}
                UNION ALL SELECT lane, tally, 0, count(*) FROM job_states GROUP BY lane, tally) c
          GROUP BY lane, tally HAVING sum(stored) <> sum(counted)) d LEFT JOIN lane l ON l.id = d.lane"
);

const LANES: &str = "
    SELECT 'lane-missing' AS code, CAST(NULL AS uuid) AS id, '' AS detail, CAST(lane AS bigint) AS x, CAST(NULL AS bigint) AS y,
           CAST(NULL AS bigint) AS z
    FROM (SELECT lane FROM job GROUP BY lane) u WHERE lane NOT IN (SELECT id FROM lane)
    UNION ALL
    SELECT 'lanes-near-limit', CAST(NULL AS uuid), '', n, CAST(20000 AS bigint), CAST(NULL AS bigint)
    FROM (SELECT CAST(count(*) AS bigint) AS n FROM lane) c WHERE n >= 16000";

macro_rules! orphans {
    ($($table:literal $column:literal $owner:literal),+ $(,)?) => {
        concat!("SELECT 'orphaned-rows' AS code, o.id, o.detail, CAST(NULL AS bigint) AS x, CAST(NULL AS bigint) AS y,
                        CAST(NULL AS bigint) AS z FROM (SELECT CAST(NULL AS uuid) AS id, '' AS detail WHERE 1 = 0",
            $(" UNION ALL SELECT t.", $column, ", '", $table, "' FROM ", $table, " t WHERE NOT EXISTS (SELECT 1 FROM ",
              $owner, " j WHERE j.id = t.", $column, ")"),+, ") o")
    };
}

const ORPHANS: &str = orphans!(
    "running" "id" "job", "attempt" "id" "job", "job_log" "id" "job", "stale_report" "id" "job", "step" "id" "job", "progress" "id" "job", "label" "id" "job", "job_key" "id" "job",
    "dependency" "child" "job", "expiry" "id" "job", "cancel_request" "id" "job", "key_in_flight" "id" "job", "webhook_attempt" "webhook" "webhook",
    "worker_change" "worker" "worker", "task_record" "task" "task", "task_inbox" "task" "task", "task_job" "task" "task",
    "task_tag" "task" "task", "task_key" "task" "task", "task_usage" "task" "task",
);

/// Every claim belongs to a live node or worker.
const OWNERS: &str = sql!("
    SELECT 'claim-without-owner' AS code, c.owner AS id, '' AS detail, c.run AS x,
           CAST((SELECT count(*) FROM in_flight h WHERE h.run = c.run) AS bigint) AS y, CAST(NULL AS bigint) AS z
    FROM claim c WHERE NOT EXISTS (SELECT 1 FROM node n WHERE n.id = c.owner)
      AND NOT EXISTS (SELECT 1 FROM worker w WHERE w.id = c.owner AND w.ended_at IS NULL)
    UNION ALL
    SELECT 'node-dead', n.id, n.name, CAST((SELECT count(*) FROM in_flight h WHERE h.owner = n.id) AS bigint), NULL, NULL
    FROM node n WHERE {dead}
    UNION ALL
    SELECT 'worker-unwatched', w.id, w.key, NULL, NULL, NULL FROM worker w
    WHERE w.ended_at IS NULL AND w.deadline IS NULL AND NOT EXISTS (SELECT 1 FROM node n WHERE n.id = w.node)
    UNION ALL
    SELECT 'worker-overdue', w.id, w.key, {now} - w.deadline, NULL, NULL FROM worker w
    WHERE w.ended_at IS NULL AND w.deadline < {now} - 300000
    UNION ALL
    SELECT 'worker-state', w.id, w.key, w.state, NULL, NULL FROM worker w
    WHERE (w.ended_at IS NULL) = (w.state = {WORKER_TERMINATED}) OR (w.ended_at IS NOT NULL AND w.deadline IS NOT NULL)
    UNION ALL
    SELECT 'running-without-claim', r.id, '', r.run, NULL, NULL FROM running r
    WHERE NOT EXISTS (SELECT 1 FROM in_flight h WHERE h.id = r.id AND h.run = r.run)");

/// Every waiting job is due in time.
const WAITING: &str = "
    SELECT 'blocked-without-parents' AS code, w.id, '' AS detail, CAST(NULL AS bigint) AS x, CAST(NULL AS bigint) AS y,
           CAST(NULL AS bigint) AS z
    FROM waiting w WHERE w.blocked AND NOT EXISTS (SELECT 1 FROM dependency d WHERE d.child = w.id)
    UNION ALL
    SELECT 'recheck-too-late', w.id, '', NULL, NULL, NULL FROM waiting w WHERE w.blocked AND w.due_at > {now} + 86400000
    UNION ALL
    SELECT 'waiting-overdue', w.id, '', {now} - w.due_at, NULL, NULL FROM waiting w WHERE w.due_at < {now} - 300000
    UNION ALL
    SELECT 'waiting-overdue', e.id, '', {now} - e.expires_at, NULL, NULL FROM expiry e WHERE e.expires_at < {now} - 300000";

const STATES: &str = sql!(
    "
    SELECT 'illegal-state' AS code, s.id, s.detail, CAST(s.state AS bigint) AS x, CAST(NULL AS bigint) AS y, CAST(NULL AS bigint) AS z
    FROM (SELECT id, 'waiting' AS detail, state FROM waiting WHERE state NOT IN ({PENDING}, {RETRYING})
          UNION ALL SELECT id, 'ended', state FROM ended WHERE state NOT IN ({FAILED}, {CANCELLED})
          UNION ALL SELECT id, 'attempt', state FROM attempt WHERE state NOT IN ({QUEUED}, {RETRYING}, {FAILED}, {CANCELLED})
          UNION ALL SELECT id, 'worker', state FROM worker WHERE state NOT BETWEEN {WORKER_CREATING} AND {WORKER_TERMINATED}
          UNION ALL SELECT worker, 'worker_change', state FROM worker_change WHERE state NOT BETWEEN {WORKER_CREATING} AND {WORKER_TERMINATED}
          UNION ALL SELECT id, 'webhook', state FROM webhook WHERE state NOT BETWEEN {WEBHOOK_WAITING} AND {WEBHOOK_FAILED}) s"
);

const KEYS: &str = sql!("
    SELECT 'unique-key-held' AS code, k.id, k.key AS detail, CAST(NULL AS bigint) AS x, CAST(NULL AS bigint) AS y,
           CAST(NULL AS bigint) AS z
    FROM job_key k CROSS JOIN job j WHERE k.kind = {UNIQUE_KEY} AND j.id = k.id
      AND (EXISTS (SELECT 1 FROM done d WHERE d.lane = j.lane AND d.id = j.id)
           OR EXISTS (SELECT 1 FROM ended e WHERE e.lane = j.lane AND e.state IN ({FAILED}, {CANCELLED}) AND e.id = j.id))");

/// Key queues and jobs in flight of keyed lanes. A closed key queue opens at its time, or when a job in flight of its key ends.
const LIMITS: &str = "
    SELECT 'key-missing' AS code, r.id, '' AS detail, CAST(NULL AS bigint) AS x, CAST(NULL AS bigint) AS y, CAST(NULL AS bigint) AS z
    FROM ready r JOIN lane l ON l.id = r.lane WHERE (r.key IS NULL) = l.keyed
    UNION ALL
    SELECT 'key-queue-missing', CAST(NULL AS uuid), '', u.key, u.lane, NULL FROM (SELECT DISTINCT lane, key FROM ready WHERE key IS NOT NULL) u
    WHERE NOT EXISTS (SELECT 1 FROM key_queue n WHERE n.lane = u.lane AND n.key = u.key)
    UNION ALL
    SELECT 'key-queue-closed', CAST(NULL AS uuid), '', n.key, n.lane, NULL FROM key_queue n
    WHERE NOT n.open AND n.opens_at IS NULL AND NOT EXISTS (SELECT 1 FROM key_in_flight h WHERE h.key = n.key)
    UNION ALL
    SELECT 'key-queue-overdue', CAST(NULL AS uuid), '', n.key, n.lane, NULL FROM key_queue n WHERE NOT n.open AND n.opens_at < {now} - 300000
    UNION ALL
    SELECT 'key-in-flight-stale', h.id, '', NULL, NULL, NULL FROM key_in_flight h
    WHERE NOT EXISTS (SELECT 1 FROM in_flight d WHERE d.id = h.id) AND EXISTS (SELECT 1 FROM job j WHERE j.id = h.id)
    UNION ALL
    SELECT 'key-in-flight-missing', d.id, '', NULL, NULL, NULL FROM in_flight d JOIN lane l ON l.id = d.lane
    WHERE l.keyed AND NOT EXISTS (SELECT 1 FROM key_in_flight h WHERE h.id = d.id)";

const DELIVERIES: &str = sql!("
    SELECT 'webhook-stuck' AS code, id, '' AS detail, CAST(NULL AS bigint) AS x, CAST(NULL AS bigint) AS y, CAST(NULL AS bigint) AS z
    FROM webhook WHERE state IN ({WEBHOOK_WAITING}, {WEBHOOK_SENDING}) AND due_at IS NULL
    UNION ALL
    SELECT 'webhook-overdue', id, '', {now} - due_at, NULL, NULL FROM webhook WHERE state IN ({WEBHOOK_WAITING}, {WEBHOOK_SENDING}) AND due_at < {now} - 300000
    UNION ALL
    SELECT 'bulk-stuck', id, '', NULL, NULL, NULL FROM bulk WHERE due_at IS NULL AND finished_at IS NULL
    UNION ALL
    SELECT 'bulk-overdue', id, '', {now} - due_at, NULL, NULL FROM bulk WHERE finished_at IS NULL AND due_at < {now} - 300000");

/// Every job of a schedule exists, unless a user has deleted jobs since.
const SCHEDULES: &str = "
    SELECT 'schedule-stuck' AS code, id, name AS detail, CAST(NULL AS bigint) AS x, CAST(NULL AS bigint) AS y, CAST(NULL AS bigint) AS z
    FROM schedule WHERE active AND next_at IS NULL
    UNION ALL
    SELECT 'schedule-overdue', id, name, {now} - next_at, NULL, NULL FROM schedule WHERE next_at < {now} - 300000
    UNION ALL
    SELECT 'tick-without-job', t.job, s.name, NULL, NULL, NULL FROM tick t JOIN schedule s ON s.id = t.schedule
    WHERE t.job IS NOT NULL AND t.at > {now} - 3600000 AND NOT EXISTS (SELECT 1 FROM job j WHERE j.id = t.job)
      AND NOT EXISTS (SELECT 1 FROM audit a WHERE a.action LIKE '%delete%' AND a.at >= t.at)";

const RUNS: &str = "
    SELECT 'run-behind' AS code, CAST(NULL AS uuid) AS id, '' AS detail, coalesce(m.run, 0) AS x, s.last AS y, CAST(NULL AS bigint) AS z
    FROM (SELECT max(run) AS run FROM (
              SELECT max(run) AS run FROM claim UNION ALL SELECT max(run) FROM running UNION ALL SELECT max(run) FROM attempt
              UNION ALL SELECT max(run) FROM ended UNION ALL SELECT max(run) FROM done) u) m
    CROSS JOIN (SELECT coalesce(CAST({last_run} AS bigint), -1) AS last) s WHERE coalesce(m.run, 0) > s.last";

const RULES: &str = "
    SELECT 'rule-illegal' AS code, CAST(NULL AS uuid) AS id, 'limit ' || name AS detail,
        CAST(coalesce(concurrency, rate_count, rate_period_ms) AS bigint) AS x, CAST(NULL AS bigint) AS y, CAST(NULL AS bigint) AS z
    FROM limit_rule WHERE concurrency < 1 OR rate_count < 1 OR rate_period_ms < 1 OR scope NOT IN (0, 1, 2, 3, 4)
        OR (scope = 4 AND rate_count IS NOT NULL)
    UNION ALL
    SELECT 'rule-illegal', CAST(NULL AS uuid), 'fairness of queue ' || name, CAST(fairness AS bigint), NULL, NULL
    FROM queue WHERE fairness NOT IN (0, 1)";

/// Every attempt but the last is recorded. After a manual retry the attempts are counted from the beginning.
const ATTEMPTS: &str = sql!("
    SELECT 'attempts-missing' AS code, t.id, '' AS detail, CAST(t.retry_count AS bigint) AS x, CAST(t.known AS bigint) AS y,
           CAST(NULL AS bigint) AS z
    FROM (SELECT p.id, p.retry_count, (SELECT count(DISTINCT a.retry_count) FROM attempt a
                                       WHERE a.id = p.id AND a.state = {RETRYING} AND a.retry_count < p.retry_count) AS known
          FROM (SELECT id, retry_count FROM ready WHERE retry_count > 0
                UNION ALL SELECT id, retry_count FROM waiting WHERE retry_count > 0
                UNION ALL SELECT id, retry_count FROM running WHERE retry_count > 0
                UNION ALL SELECT id, retry_count FROM done WHERE retry_count > 0
                UNION ALL SELECT id, retry_count FROM ended WHERE retry_count > 0) p) t
    WHERE t.known < t.retry_count");

/// Every outbox row has an event and a sink.
const OUTBOX: &str = "
    SELECT 'outbox-without-event' AS code, o.subject AS id, '' AS detail, CAST(o.position AS bigint) AS x, CAST(NULL AS bigint) AS y,
           CAST(NULL AS bigint) AS z
    FROM outbox o WHERE NOT EXISTS (SELECT 1 FROM event e WHERE e.position = o.position)
    UNION ALL
    SELECT 'outbox-unknown-sink', o.subject, '', o.position, o.sink, NULL FROM outbox o
    WHERE NOT EXISTS (SELECT 1 FROM subscription s WHERE s.id = o.sink)
    UNION ALL
    SELECT 'lease-unknown-sink', l.node, '', l.partition, l.sink, NULL FROM outbox_lease l
    WHERE NOT EXISTS (SELECT 1 FROM subscription s WHERE s.id = l.sink)";

#[cfg(test)]
mod tests {
    use super::LANES;
    use crate::lanes::MAX_LANES;

    #[test]
    fn the_warning_about_lanes_comes_at_four_fifths_of_their_limit() {
        assert!(LANES.contains(&format!("CAST({MAX_LANES} AS bigint)")));
        assert!(LANES.ends_with(&format!("n >= {}", MAX_LANES / 10 * 8)));
    }
}
