//! What must hold, as SQL that finds the rows for which it does not.
//!
//! Each query returns `code, id, words, x, y, z`; the entry of the code in `CODES` says how a row is shown. Each table is
//! read once from end to end: probing per job took four times as long on a million finished jobs.

use super::{
    Cell, Dialect, EXAMPLES, Finding, Judge, Severity,
    fixes::{Fix, fix_of},
    judge,
};
use crate::sql::sql;

pub(crate) struct Code {
    pub code: &'static str,
    severity: Severity,
    /// What is wrong with all of them, after their number.
    summary: &'static str,
    /// How one of them is shown: `{id}`, `{words}`, `{x}`, `{y}`, `{z}`; `{x:place}` is the name of a tally.
    example: &'static str,
    advice: &'static str,
    /// What a repair has done with them.
    pub fixed: &'static str,
}

impl Code {
    pub fn finding(&self, count: u64, text: String) -> Finding {
        let fixable = !matches!(fix_of(self.code), Fix::None);
        Finding { code: self.code, severity: self.severity, count, text, advice: self.advice, fixable }
    }

    /// Returns the finding about these examples of `count`.
    pub fn found(&self, count: u64, examples: &[String]) -> Finding {
        let mut text = format!("{count} {}: {}", self.summary, examples.join(", "));
        let more = count.saturating_sub(examples.len() as u64);
        if more > 0 {
            text.push_str(&format!(" and {more} more"));
        }
        self.finding(count, text)
    }

    /// Returns how a row of a query is shown.
    pub fn read(&self, row: &[Cell]) -> String {
        let mut text = self.example.to_owned();
        for (at, name) in ["id", "words", "x", "y", "z"].into_iter().enumerate() {
            let cell = row.get(at + 1).unwrap_or(&Cell::Null);
            text = text.replace(&format!("{{{name}}}"), &cell.to_string());
            text = text.replace(&format!("{{{name}:place}}"), tally_name(cell.number()));
            text = text.replace(&format!("{{{name}:s}}"), &format!("{} s", cell.number() / 1_000));
        }
        text
    }
}

fn tally_name(tally: i64) -> &'static str {
    match tally {
        0 => "pending",
        1 => "ready",
        2 => "in flight",
        3 => "retrying",
        4 => "done",
        5 => "failed",
        6 => "cancelled",
        _ => "?",
    }
}

pub(crate) fn code_of(code: &str) -> &'static Code {
    CODES.iter().find(|known| known.code == code).unwrap_or(&UNKNOWN)
}

const UNKNOWN: Code = warning("unknown", "unknown findings", "{id} {words}", "report this as a bug");

const FIX: &str = "run `faena doctor --fix`";
const SERVE: &str =
    "start a server (`faena serve`), which handles it; if one is running, check its loops in /health/ready";
const BY_HAND: &str = "no repair is safe, nothing is lost; check the rows, and restore a backup if they matter";

const fn error(code: &'static str, summary: &'static str, example: &'static str, advice: &'static str) -> Code {
    Code { code, severity: Severity::Error, summary, example, advice, fixed: "" }
}

const fn warning(code: &'static str, summary: &'static str, example: &'static str, advice: &'static str) -> Code {
    Code { code, severity: Severity::Warning, summary, example, advice, fixed: "" }
}

impl Code {
    const fn fixed(self, fixed: &'static str) -> Code {
        Code { fixed, ..self }
    }
}

const CODES: &[Code] = &[
    error("job-nowhere", "jobs are in no table, so they will never run", "{id}", FIX).fixed("jobs made ready again"),
    error("job-twice", "jobs are in more than one table", "{id} ({x:place}, {y:place})", FIX)
        .fixed("duplicate rows removed"),
    error("wrong-lane", "rows are in another lane than their job", "{id} ({x:place})", FIX)
        .fixed("rows moved to the lane of their job"),
    error("lane-missing", "lanes that jobs name do not exist", "lane {x}", BY_HAND),
    error("orphaned-rows", "rows belong to jobs, webhooks or workers that do not exist", "{words} of {id}", FIX)
        .fixed("orphaned rows removed"),
    error("counter-drift", "counters differ from the rows", "{words} {x:place}: says {y}, counted {z}", FIX)
        .fixed("counters counted again"),
    error("job-unreadable", "jobs have unreadable options, so claims that meet them fail", "{id}", BY_HAND),
    error("claim-without-owner", "claims have no live owner", "run {x} of owner {id} ({y} jobs)", SERVE)
        .fixed("jobs of dead owners released"),
    warning("node-dead", "servers ended without leaving", "{words} ({x} jobs in flight)", SERVE)
        .fixed("jobs of dead servers released"),
    error("worker-unwatched", "live workers have neither a live server nor a deadline", "{words}", FIX)
        .fixed("workers detached or given a deadline"),
    warning("worker-overdue", "workers should have been declared lost long ago", "{words} ({x:s} ago)", SERVE),
    error("worker-state", "workers are terminated by one field and alive by another", "{words} (state {x})", BY_HAND),
    error("worker-history", "workers changed their state in a way that is not allowed", "{words}", BY_HAND),
    error("outbox-without-event", "outbox rows have no event", "event {x} of {id}", FIX)
        .fixed("outbox rows without an event removed"),
    error("outbox-unknown-sink", "outbox rows have no sink", "event {x} for sink {y}", FIX)
        .fixed("outbox rows without a sink removed"),
    warning("lease-unknown-sink", "leases have no sink", "partition {x} of sink {y}", FIX)
        .fixed("leases without a sink removed"),
    error("running-without-claim", "jobs are marked as running and not in flight", "{id} (run {x})", FIX)
        .fixed("marks removed"),
    error("blocked-without-parents", "jobs wait for parents and have none left", "{id}", FIX).fixed("jobs released"),
    error("look-too-far", "jobs that wait for parents are checked only in days", "{id}", FIX)
        .fixed("jobs are checked now"),
    warning("waiting-overdue", "jobs are due and no server has moved them", "{id} ({x:s} ago)", SERVE),
    error("illegal-state", "rows have a state that does not exist", "{words} of {id}: {x}", BY_HAND),
    error("rule-illegal", "settings of queues or limits are not valid", "{words}: {x}", BY_HAND),
    error("run-behind", "run numbers are in use that were not assigned yet", "{x}, assigned up to {y}", FIX)
        .fixed("run sequence moved forward"),
    error("unique-key-held", "unique keys are held by jobs that have finished", "{words} ({id})", FIX)
        .fixed("unique keys freed"),
    warning(
        "attempts-missing",
        "jobs have more attempts than are recorded",
        "{id} (attempt {x}, {y} recorded)",
        BY_HAND,
    ),
    error("log-unreadable", "logs cannot be read", "{words} of {id}", BY_HAND),
    warning(
        "log-time",
        "logs go back in time by more than clocks may differ",
        "{words} of {id}",
        "compare the clocks of the servers",
    ),
    warning("log-incomplete", "logs are incomplete", "{words} of {id}", BY_HAND),
    error("key-missing", "ready jobs of a keyed lane have no key, or others have one", "{id}", FIX)
        .fixed("keys written"),
    error(
        "key-queue-missing",
        "keys have ready jobs and no key queue, so they cannot be claimed",
        "key {x} of lane {y}",
        FIX,
    )
    .fixed("key queues created"),
    error("key-queue-closed", "key queues are closed, and nothing will open them", "key {x} of lane {y}", FIX)
        .fixed("key queues opened"),
    warning("key-queue-overdue", "key queues should have been opened long ago", "key {x} of lane {y}", SERVE),
    error("key-in-flight-stale", "jobs that are not in flight count for the limit of their key", "{id}", FIX)
        .fixed("stale rows removed"),
    error("key-in-flight-missing", "jobs in flight do not count for the limit of their key", "{id}", FIX)
        .fixed("jobs counted for their key"),
    error("webhook-stuck", "unsettled webhooks have no due time", "{id}", FIX).fixed("webhooks given a due time"),
    warning("webhook-overdue", "webhooks should have been sent long ago", "{id} ({x:s} ago)", SERVE),
    error("bulk-stuck", "unfinished bulk actions have no due time", "{id}", FIX).fixed("bulk actions given a due time"),
    warning("bulk-overdue", "bulk actions should have continued long ago", "{id} ({x:s} ago)", SERVE),
    error("schedule-stuck", "active schedules have no next due time", "{words} ({id})", FIX)
        .fixed("schedules given their next due time, or ended"),
    warning("schedule-overdue", "schedules are due and no server fires them", "{words} ({id}, {x:s} ago)", SERVE),
    error(
        "schedule-unreadable",
        "schedules are unreadable, and do not fire",
        "{words} ({id})",
        "delete it (`faena schedules delete`) and create it again",
    ),
    warning(
        "tick-without-job",
        "due times became jobs that do not exist, although no job was deleted",
        "{id} of {words}",
        "expected if `retention` is shorter than an hour; otherwise check the rows",
    ),
    error("due-twice", "due times of schedules have more than one job", "{id} ({words})", BY_HAND),
    error("schema-old", "", "", "run `faena migrate`, or start a server of this version"),
    // Set-up: PostgreSQL.
    error("postgres-old", "", "", "move to PostgreSQL 13 or newer"),
    warning("clock-skew", "", "", "synchronise both clocks by NTP"),
    warning(
        "partition-missing",
        "coming days have no partition for finished jobs",
        "{words}",
        "start a server, which creates them, or run `faena doctor --fix`",
    )
    .fixed("partitions created"),
    warning(
        "default-partition",
        "",
        "",
        "harmless; retention deletes them. If their number grows, search the server logs for `partition`",
    ),
    warning(
        "xmin-held",
        "sessions keep old row versions from being removed, which slows claims down",
        "{words}",
        "end their transaction, or the session: SELECT pg_terminate_backend(pid)",
    ),
    warning(
        "slot-held",
        "replication slots keep old row versions or WAL",
        "{words}",
        "let their consumer catch up, or drop them: SELECT pg_drop_replication_slot(name)",
    ),
    warning(
        "vacuum-behind",
        "tables have many dead rows",
        "{words}",
        "check for xmin-held above; otherwise VACUUM them and give autovacuum more workers",
    ),
    warning(
        "listen-impossible",
        "",
        "",
        "servers poll, nothing is lost; connect without a transaction-mode pooler for immediate signals",
    ),
    // Set-up: SQLite.
    error(
        "file-damaged",
        "faults of the file",
        "{words}",
        "stop the server, copy the file, restore a backup or try `sqlite3 FILE .recover`",
    ),
    warning("wal-large", "", "", "a reader keeps it; end the reader, or restart the server"),
    error("file-read-only", "", "", "give the file and its folder to the user who runs the server"),
    warning("file-open-to-all", "", "", "chmod o-w the file"),
];

/// What a query may refer to: `claimed`, every id of every claim; `in_flight`, those of them whose run has not ended;
/// `places`, where ids are, with the tally they are counted under.
pub(crate) const WITH: &str = sql!("WITH RECURSIVE {claimed},
in_flight (id, lane, run, owner) AS MATERIALIZED (
    SELECT h.id, j.lane, h.run, h.owner FROM claimed h CROSS JOIN job j WHERE j.id = h.id
       AND NOT EXISTS (SELECT 1 FROM done d WHERE d.lane = j.lane AND d.id = h.id AND d.run = h.run)
       AND NOT EXISTS (SELECT 1 FROM ended e WHERE e.lane = j.lane AND e.state IN ({FAILED}, {CANCELLED}) AND e.id = h.id AND e.run = h.run)
       AND NOT EXISTS (SELECT 1 FROM attempt a WHERE a.id = h.id AND a.run = h.run)),
places (id, lane, place) AS (
    SELECT id, lane, {TALLY_QUEUED} FROM ready
    UNION ALL SELECT id, lane, CASE state WHEN {PENDING} THEN {TALLY_PENDING} ELSE {TALLY_RETRYING} END FROM waiting
    UNION ALL SELECT id, lane, {TALLY_IN_FLIGHT} FROM in_flight
    UNION ALL SELECT id, lane, {TALLY_COMPLETED} FROM done
    UNION ALL SELECT id, lane, CASE state WHEN {FAILED} THEN {TALLY_FAILED} ELSE {TALLY_CANCELLED} END FROM ended)");

/// One step of the inspection: what is read, and which function checks the rows.
pub(crate) struct Step {
    pub name: &'static str,
    pub sql: String,
    pub take: fn(&mut Judge, &[Cell]),
}

pub(crate) fn steps(dialect: &Dialect) -> Vec<Step> {
    let query = |name, sql: &str| Step { name, sql: dialect.sql(&wrapped(sql)), take: Judge::row };
    let walk = |name, sql: &str, take| Step { name, sql: dialect.sql(sql), take };
    let mut steps =
        vec![walk("jobs", "SELECT CAST(count(*) AS bigint) FROM job", judge::jobs), query("places", PLACES)];
    steps.extend(
        [("counters", COUNTERS), ("lanes", LANES), ("orphaned rows", ORPHANS), ("owners", OWNERS)]
            .map(|(n, s)| query(n, s)),
    );
    steps.extend(
        [("waiting jobs", WAITING), ("states", STATES), ("keys", KEYS), ("limits", LIMITS)].map(|(n, s)| query(n, s)),
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
        walk("options", "SELECT id, options FROM job WHERE options IS NOT NULL", judge::options),
        walk("logs of completed jobs", "SELECT 'completed', id, CAST(6 AS bigint), run, log FROM done", judge::log),
        walk("logs of other ends", "SELECT 'ended', id, state, run, log FROM ended", judge::log),
        walk("logs of attempts", "SELECT 'attempt', id, state, run, log FROM attempt", judge::log),
        walk("notes", "SELECT 'job_log', id, CAST(-1 AS bigint), run, log FROM job_log", judge::log),
        walk(
            "histories of workers",
            "SELECT worker, state FROM worker_change ORDER BY worker, sequence",
            judge::history,
        ),
        walk("workers", "SELECT id, state, key FROM worker", judge::worker),
        query("schedules", SCHEDULES),
        walk("timings of schedules", "SELECT id, anchor_at, spec, name FROM schedule", judge::schedule),
        walk(
            "jobs of schedules",
            sql!("SELECT l.value, j.id, j.options FROM label l CROSS JOIN job j WHERE l.kind = {SCHEDULE_LABEL} AND j.id = l.id ORDER BY l.value"),
            judge::due,
        ),
    ]);
    steps
}

/// Counts the rows of each code and keeps a few of them.
fn wrapped(sql: &str) -> String {
    format!(
        "{{with}} SELECT code, id, words, x, y, z, n, r FROM (
             SELECT q.*, CAST(count(*) OVER (PARTITION BY code) AS bigint) AS n, row_number() OVER (PARTITION BY code) AS r
             FROM ({sql}) q) t WHERE r <= {EXAMPLES}"
    )
}

/// Every job is in exactly one table, in its lane, and every row belongs to a job.
const PLACES: &str = "
    SELECT CASE WHEN jobs = 0 THEN 'orphaned-rows' WHEN n = 0 THEN 'job-nowhere' WHEN n > 1 THEN 'job-twice' ELSE 'wrong-lane' END
               AS code, id, 'place' AS words, CAST(first AS bigint) AS x, CAST(last AS bigint) AS y, CAST(NULL AS bigint) AS z
    FROM (SELECT id, sum(job) AS jobs, count(*) - sum(job) AS n, min(lane) AS low, max(lane) AS high,
                 min(place) AS first, max(place) AS last
          FROM (SELECT id, lane, 1 AS job, CAST(NULL AS integer) AS place FROM job UNION ALL SELECT id, lane, 0, place FROM places) r
          GROUP BY id) g
    WHERE jobs <> 1 OR n <> 1 OR low <> high";

const COUNTERS: &str = sql!(
    "
    SELECT 'counter-drift' AS code, CAST(NULL AS uuid) AS id, coalesce(l.queue || '/' || l.type, 'no lane') AS words,
           CAST(d.tally AS bigint) AS x, d.says AS y, d.counted AS z
    FROM (SELECT lane, tally, CAST(sum(says) AS bigint) AS says, CAST(sum(counted) AS bigint) AS counted
          FROM (SELECT lane, tally, n AS says, 0 AS counted FROM counter WHERE tally < {TALLY_RAN}
                UNION ALL SELECT lane, place, 0, count(*) FROM places GROUP BY lane, place) c
          GROUP BY lane, tally HAVING sum(says) <> sum(counted)) d LEFT JOIN lane l ON l.id = d.lane"
);

const LANES: &str = "
    SELECT 'lane-missing' AS code, CAST(NULL AS uuid) AS id, '' AS words, CAST(lane AS bigint) AS x, CAST(NULL AS bigint) AS y,
           CAST(NULL AS bigint) AS z
    FROM (SELECT lane FROM job GROUP BY lane) u WHERE lane NOT IN (SELECT id FROM lane)";

macro_rules! orphans {
    ($($table:literal $column:literal $owner:literal),+ $(,)?) => {
        concat!("SELECT 'orphaned-rows' AS code, o.id, o.words, CAST(NULL AS bigint) AS x, CAST(NULL AS bigint) AS y,
                        CAST(NULL AS bigint) AS z FROM (SELECT CAST(NULL AS uuid) AS id, '' AS words WHERE 1 = 0",
            $(" UNION ALL SELECT t.", $column, ", '", $table, "' FROM ", $table, " t WHERE NOT EXISTS (SELECT 1 FROM ",
              $owner, " j WHERE j.id = t.", $column, ")"),+, ") o")
    };
}

const ORPHANS: &str = orphans!(
    "running" "id" "job", "attempt" "id" "job", "job_log" "id" "job", "step" "id" "job", "label" "id" "job", "job_key" "id" "job",
    "dependency" "child" "job", "expiry" "id" "job", "cancel_request" "id" "job", "key_in_flight" "id" "job", "webhook_attempt" "webhook" "webhook",
    "worker_change" "worker" "worker",
);

/// Every claim has a live owner.
const OWNERS: &str = sql!("
    SELECT 'claim-without-owner' AS code, b.owner AS id, '' AS words, b.run AS x,
           CAST((SELECT count(*) FROM in_flight h WHERE h.run = b.run) AS bigint) AS y, CAST(NULL AS bigint) AS z
    FROM claim b WHERE NOT EXISTS (SELECT 1 FROM node n WHERE n.id = b.owner)
      AND NOT EXISTS (SELECT 1 FROM worker w WHERE w.id = b.owner AND w.ended_at IS NULL)
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

/// Everything that waits is checked in time.
const WAITING: &str = "
    SELECT 'blocked-without-parents' AS code, w.id, '' AS words, CAST(NULL AS bigint) AS x, CAST(NULL AS bigint) AS y,
           CAST(NULL AS bigint) AS z
    FROM waiting w WHERE w.blocked AND NOT EXISTS (SELECT 1 FROM dependency d WHERE d.child = w.id)
    UNION ALL
    SELECT 'look-too-far', w.id, '', NULL, NULL, NULL FROM waiting w WHERE w.blocked AND w.due_at > {now} + 86400000
    UNION ALL
    SELECT 'waiting-overdue', w.id, '', {now} - w.due_at, NULL, NULL FROM waiting w WHERE w.due_at < {now} - 300000
    UNION ALL
    SELECT 'waiting-overdue', e.id, '', {now} - e.expires_at, NULL, NULL FROM expiry e WHERE e.expires_at < {now} - 300000";

const STATES: &str = "
    SELECT 'illegal-state' AS code, s.id, s.words, CAST(s.state AS bigint) AS x, CAST(NULL AS bigint) AS y, CAST(NULL AS bigint) AS z
    FROM (SELECT id, 'waiting' AS words, state FROM waiting WHERE state NOT IN (0, 5)
          UNION ALL SELECT id, 'ended', state FROM ended WHERE state NOT IN (7, 8)
          UNION ALL SELECT id, 'attempt', state FROM attempt WHERE state NOT IN (1, 5, 7, 8)
          UNION ALL SELECT id, 'worker', state FROM worker WHERE state NOT BETWEEN 0 AND 6
          UNION ALL SELECT worker, 'worker_change', state FROM worker_change WHERE state NOT BETWEEN 0 AND 6
          UNION ALL SELECT id, 'webhook', state FROM webhook WHERE state NOT BETWEEN 0 AND 3) s";

const KEYS: &str = sql!("
    SELECT 'unique-key-held' AS code, k.id, k.key AS words, CAST(NULL AS bigint) AS x, CAST(NULL AS bigint) AS y,
           CAST(NULL AS bigint) AS z
    FROM job_key k CROSS JOIN job j WHERE k.kind = {UNIQUE_KEY} AND j.id = k.id
      AND (EXISTS (SELECT 1 FROM done d WHERE d.lane = j.lane AND d.id = j.id)
           OR EXISTS (SELECT 1 FROM ended e WHERE e.lane = j.lane AND e.state IN ({FAILED}, {CANCELLED}) AND e.id = j.id))");

/// Key queues of keyed lanes. A closed key queue is opened by its time, or when a job of its key ends.
const LIMITS: &str = "
    SELECT 'key-missing' AS code, r.id, '' AS words, CAST(NULL AS bigint) AS x, CAST(NULL AS bigint) AS y, CAST(NULL AS bigint) AS z
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
    SELECT 'webhook-stuck' AS code, id, '' AS words, CAST(NULL AS bigint) AS x, CAST(NULL AS bigint) AS y, CAST(NULL AS bigint) AS z
    FROM webhook WHERE state IN ({WEBHOOK_WAITING}, {WEBHOOK_SENDING}) AND due_at IS NULL
    UNION ALL
    SELECT 'webhook-overdue', id, '', {now} - due_at, NULL, NULL FROM webhook WHERE state IN ({WEBHOOK_WAITING}, {WEBHOOK_SENDING}) AND due_at < {now} - 300000
    UNION ALL
    SELECT 'bulk-stuck', id, '', NULL, NULL, NULL FROM bulk WHERE due_at IS NULL AND finished_at IS NULL
    UNION ALL
    SELECT 'bulk-overdue', id, '', {now} - due_at, NULL, NULL FROM bulk WHERE finished_at IS NULL AND due_at < {now} - 300000");

/// A job that a person deleted is missing for a good reason.
const SCHEDULES: &str = "
    SELECT 'schedule-stuck' AS code, id, name AS words, CAST(NULL AS bigint) AS x, CAST(NULL AS bigint) AS y, CAST(NULL AS bigint) AS z
    FROM schedule WHERE active AND next_at IS NULL
    UNION ALL
    SELECT 'schedule-overdue', id, name, {now} - next_at, NULL, NULL FROM schedule WHERE next_at < {now} - 300000
    UNION ALL
    SELECT 'tick-without-job', t.job, s.name, NULL, NULL, NULL FROM tick t JOIN schedule s ON s.id = t.schedule
    WHERE t.job IS NOT NULL AND t.at > {now} - 3600000 AND NOT EXISTS (SELECT 1 FROM job j WHERE j.id = t.job)
      AND NOT EXISTS (SELECT 1 FROM audit a WHERE a.action LIKE '%delete%' AND a.at >= t.at)";

const RUNS: &str = "
    SELECT 'run-behind' AS code, CAST(NULL AS uuid) AS id, '' AS words, coalesce(m.run, 0) AS x, s.last AS y, CAST(NULL AS bigint) AS z
    FROM (SELECT max(run) AS run FROM (
              SELECT max(run) AS run FROM claim UNION ALL SELECT max(run) FROM running UNION ALL SELECT max(run) FROM attempt
              UNION ALL SELECT max(run) FROM ended UNION ALL SELECT max(run) FROM done) u) m
    CROSS JOIN (SELECT coalesce(CAST({last_run} AS bigint), -1) AS last) s WHERE coalesce(m.run, 0) > s.last";

const RULES: &str = "
    SELECT 'rule-illegal' AS code, CAST(NULL AS uuid) AS id, 'limit ' || name AS words,
        CAST(coalesce(concurrency, rate_count, rate_period_ms) AS bigint) AS x, CAST(NULL AS bigint) AS y, CAST(NULL AS bigint) AS z
    FROM limit_rule WHERE concurrency < 1 OR rate_count < 1 OR rate_period_ms < 1 OR scope NOT IN (0, 1, 2, 3)
    UNION ALL
    SELECT 'rule-illegal', CAST(NULL AS uuid), 'fairness of queue ' || name, CAST(fairness AS bigint), NULL, NULL
    FROM queue WHERE fairness NOT IN (0, 1)";

/// Each attempt before the last one is recorded. A manual retry counts from the beginning.
const ATTEMPTS: &str = sql!("
    SELECT 'attempts-missing' AS code, t.id, '' AS words, CAST(t.retry_count AS bigint) AS x, CAST(t.known AS bigint) AS y,
           CAST(NULL AS bigint) AS z
    FROM (SELECT p.id, p.retry_count, (SELECT count(DISTINCT a.retry_count) FROM attempt a
                                       WHERE a.id = p.id AND a.state = {RETRYING} AND a.retry_count < p.retry_count) AS known
          FROM (SELECT id, retry_count FROM ready WHERE retry_count > 0
                UNION ALL SELECT id, retry_count FROM waiting WHERE retry_count > 0
                UNION ALL SELECT id, retry_count FROM running WHERE retry_count > 0
                UNION ALL SELECT id, retry_count FROM done WHERE retry_count > 0
                UNION ALL SELECT id, retry_count FROM ended WHERE retry_count > 0) p) t
    WHERE t.known < t.retry_count");

/// Every row of the outbox has an event and a sink.
const OUTBOX: &str = "
    SELECT 'outbox-without-event' AS code, o.subject AS id, '' AS words, CAST(o.position AS bigint) AS x, CAST(NULL AS bigint) AS y,
           CAST(NULL AS bigint) AS z
    FROM outbox o WHERE NOT EXISTS (SELECT 1 FROM event e WHERE e.position = o.position)
    UNION ALL
    SELECT 'outbox-unknown-sink', o.subject, '', o.position, o.sink, NULL FROM outbox o
    WHERE NOT EXISTS (SELECT 1 FROM subscription s WHERE s.id = o.sink)
    UNION ALL
    SELECT 'lease-unknown-sink', l.node, '', l.partition, l.sink, NULL FROM outbox_lease l
    WHERE NOT EXISTS (SELECT 1 FROM subscription s WHERE s.id = l.sink)";
