-- The schema of Faena on SQLite. src/sqlite/events_on.sql has the triggers that create events.
--
-- A job's state is the table its id is in:
--
--   waiting               PENDING or RETRYING
--   ready                 QUEUED
--   claim                 ASSIGNED (SCHEDULED while the worker's process is being started)
--   claim and running     PROCESSING
--   done                  COMPLETED
--   ended                 FAILED or CANCELLED
--
-- Times are milliseconds since 1970, ids are UUIDs (a job's id contains its creation time). Columns that have a number for each
-- variant of an enum are named after it; names in braces stand for these numbers and are filled in by src/sql.rs.

-- ---------------------------------------------------------------------------------------------------------------------------- jobs

-- A lane is one queue, type and priority, with or without concurrency keys. Claims, counters and lists work by lane.
-- keyed: its jobs have a concurrencyKey and form one key queue per key. The id of a reclaimed lane is not used again.
CREATE TABLE lane (
    id       INTEGER PRIMARY KEY AUTOINCREMENT,
    queue    TEXT NOT NULL,
    type     TEXT NOT NULL,
    priority INTEGER NOT NULL,
    keyed    INTEGER NOT NULL DEFAULT 0,
    UNIQUE (queue, type, priority, keyed)
);

-- What was submitted. Written once; only a patch changes it.
-- correlation: absent if it is the job's own id. options: JSON, only what differs from the defaults.
CREATE TABLE job (
    id          BLOB PRIMARY KEY,
    lane        INTEGER NOT NULL,
    correlation TEXT,
    options     TEXT,
    payload     TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX job_correlation ON job (correlation) WHERE correlation IS NOT NULL;

-- Jobs that a worker may claim. The primary key is the claim order.
-- must_record_start: its start must be recorded before it runs.
-- key: in keyed lanes, the first eight bytes of the SHA-256 of its concurrencyKey.
CREATE TABLE ready (
    lane        INTEGER NOT NULL,
    ready_at    INTEGER NOT NULL,
    id          BLOB NOT NULL,
    retry_count INTEGER NOT NULL,
    must_record_start INTEGER NOT NULL,
    key         INTEGER,
    PRIMARY KEY (lane, ready_at, id)
) WITHOUT ROWID;
CREATE INDEX ready_id ON ready (lane, id);
CREATE INDEX ready_key ON ready (lane, key, ready_at, id) WHERE key IS NOT NULL;

-- Jobs that wait for their time, their next attempt or their parents.
-- state: {PENDING} or {RETRYING}. blocked: waits for parents; due_at is then the time of the next check.
CREATE TABLE waiting (
    lane        INTEGER NOT NULL,
    state       INTEGER NOT NULL,
    id          BLOB NOT NULL,
    due_at      INTEGER NOT NULL,
    blocked     INTEGER NOT NULL,
    retry_count INTEGER NOT NULL,
    PRIMARY KEY (lane, state, id)
) WITHOUT ROWID;
CREATE INDEX waiting_due ON waiting (due_at, id);

-- One row per claim: the jobs that one worker received under one run number. Deleting the row fences off late reports.
-- owner: a node or a worker. ids: 16 bytes per job. retries: the retry counts, 2 bytes each, little endian; absent if all are 0.
-- check_each: one of its jobs did not simply complete, so further reports are checked one by one.
CREATE TABLE claim (
    run            INTEGER PRIMARY KEY,
    owner          BLOB NOT NULL,
    claimed_at     INTEGER NOT NULL,
    first_ready_at INTEGER NOT NULL,
    ids            BLOB NOT NULL,
    retries        BLOB,
    check_each     INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX claim_owner ON claim (owner);

-- The last run number that was assigned. Run numbers only grow.
CREATE TABLE run_sequence (last INTEGER NOT NULL);
INSERT INTO run_sequence VALUES (0);

-- Jobs that are known to have started: those that have run for 100 ms, or have reported something.
CREATE TABLE running (
    id          BLOB PRIMARY KEY,
    lane        INTEGER NOT NULL,
    run         INTEGER NOT NULL,
    node        BLOB NOT NULL,
    worker      BLOB NOT NULL,
    retry_count INTEGER NOT NULL,
    ready_at    INTEGER NOT NULL,
    started_at  INTEGER NOT NULL,
    updated_at  INTEGER NOT NULL
) WITHOUT ROWID;

-- The last progress of a job, in whatever state the job is. run: the run that reported it. progress: JSON.
CREATE TABLE progress (
    id       BLOB PRIMARY KEY,
    run      INTEGER NOT NULL,
    progress TEXT NOT NULL
) WITHOUT ROWID;

-- Completed jobs, with the log of their last run.
CREATE TABLE done (
    lane        INTEGER NOT NULL,
    id          BLOB NOT NULL,
    finished_at INTEGER NOT NULL,
    run         INTEGER NOT NULL,
    retry_count INTEGER NOT NULL,
    started_at  INTEGER,
    worker      BLOB,
    result      TEXT,
    log         TEXT NOT NULL,
    PRIMARY KEY (lane, id)
) WITHOUT ROWID;

-- Failed and cancelled jobs. state: {FAILED} or {CANCELLED}. run: 0 if it never ran.
CREATE TABLE ended (
    lane        INTEGER NOT NULL,
    state       INTEGER NOT NULL,
    id          BLOB NOT NULL,
    finished_at INTEGER NOT NULL,
    run         INTEGER NOT NULL,
    retry_count INTEGER NOT NULL,
    started_at  INTEGER,
    worker      BLOB,
    error       TEXT,
    reason      TEXT,
    log         TEXT NOT NULL,
    PRIMARY KEY (lane, state, id)
) WITHOUT ROWID;

-- Runs that ended without finishing their job. state: the job's state after the run.
CREATE TABLE attempt (
    id          BLOB NOT NULL,
    run         INTEGER NOT NULL,
    state       INTEGER NOT NULL,
    retry_count INTEGER NOT NULL,
    finished_at INTEGER NOT NULL,
    started_at  INTEGER,
    worker      BLOB,
    error       TEXT,
    reason      TEXT,
    log         TEXT NOT NULL,
    PRIMARY KEY (id, run)
) WITHOUT ROWID;

-- Entries of the execution log that do not belong to a run that has ended. A job keeps its first and its newest entries.
-- dropped: the number of entries that were deleted just before this one. The index is enough to count the entries and bytes of a job.
CREATE TABLE job_log (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    id       BLOB NOT NULL,
    run      INTEGER,
    log      TEXT NOT NULL,
    dropped  INTEGER NOT NULL DEFAULT 0,
    bytes    INTEGER GENERATED ALWAYS AS (octet_length(log)) VIRTUAL
);
CREATE INDEX job_log_id ON job_log (id, sequence, bytes);

-- Reports about a job that were rejected because they came too late or from the wrong worker: how many, and the last of them.
CREATE TABLE stale_report (
    id    BLOB PRIMARY KEY,
    run   INTEGER NOT NULL,
    at    INTEGER NOT NULL,
    count INTEGER NOT NULL,
    text  TEXT NOT NULL
) WITHOUT ROWID;

-- Finished steps of a job. total: the number of steps, if the worker reported it.
CREATE TABLE step (
    id     BLOB NOT NULL,
    name   TEXT NOT NULL,
    run    INTEGER NOT NULL,
    at     INTEGER NOT NULL,
    result TEXT NOT NULL,
    total  INTEGER,
    PRIMARY KEY (id, name)
) WITHOUT ROWID;

-- Labels by which jobs are listed. kind: {TAG_LABEL} tag, {SCHEDULE_LABEL} schedule, {NAME_LABEL} a name that differs from the type,
-- {PARENT_LABEL} the id of a job that it depends on.
CREATE TABLE label (
    kind  INTEGER NOT NULL,
    value TEXT NOT NULL,
    id    BLOB NOT NULL,
    PRIMARY KEY (kind, value, id)
) WITHOUT ROWID;
-- A search for a part of a name reads the newest names.
CREATE INDEX label_name ON label (id) WHERE kind = {NAME_LABEL};

-- Keys that name at most one job each. kind: {IDEMPOTENCY_KEY} idempotency key, {UNIQUE_KEY} unique key (until the job has finished).
CREATE TABLE job_key (
    kind        INTEGER NOT NULL,
    key         TEXT NOT NULL,
    id          BLOB NOT NULL,
    fingerprint BLOB,
    PRIMARY KEY (kind, key)
) WITHOUT ROWID;

-- Parents that a job still waits for.
CREATE TABLE dependency (
    parent BLOB NOT NULL,
    child  BLOB NOT NULL,
    PRIMARY KEY (parent, child)
) WITHOUT ROWID;
CREATE INDEX dependency_child ON dependency (child, parent);

-- Finished jobs with dependents that are still to be released or cancelled: the rest of a large graph, which is processed in slices.
CREATE TABLE unreleased (
    parent BLOB PRIMARY KEY
) WITHOUT ROWID;

-- Jobs that fail if they have not started by this time.
CREATE TABLE expiry (
    expires_at INTEGER NOT NULL,
    id         BLOB NOT NULL,
    PRIMARY KEY (expires_at, id)
) WITHOUT ROWID;

-- Requests to cancel jobs that are in flight.
CREATE TABLE cancel_request (
    id     BLOB PRIMARY KEY,
    reason TEXT NOT NULL,
    at     INTEGER NOT NULL
) WITHOUT ROWID;

-- The number of jobs per lane and tally (states that are counted together; see Tally in src/jobs.rs).
CREATE TABLE counter (
    lane  INTEGER NOT NULL,
    tally INTEGER NOT NULL,
    n     INTEGER NOT NULL,
    PRIMARY KEY (lane, tally)
) WITHOUT ROWID;

-- ------------------------------------------------------------------------------------------------------------------------- history

-- What happened to the jobs of a queue in a minute, an hour or a day. period: 0 hour, 1 day (UTC), 2 minute.
-- measure: see HistoryMeasure in src/history.rs. bucket: for a measured time, the index of its bound; for completed jobs, their priority;
-- otherwise 0.
CREATE TABLE history (
    period    INTEGER NOT NULL,
    starts_at INTEGER NOT NULL,
    queue     TEXT NOT NULL,
    measure   INTEGER NOT NULL,
    bucket    INTEGER NOT NULL,
    n         INTEGER NOT NULL,
    PRIMARY KEY (period, starts_at, queue, measure, bucket)
) WITHOUT ROWID;

-- How much of the counters of a lane is in the history.
CREATE TABLE history_mark (
    lane    INTEGER NOT NULL,
    measure INTEGER NOT NULL,
    n       INTEGER NOT NULL,
    PRIMARY KEY (lane, measure)
) WITHOUT ROWID;

-- --------------------------------------------------------------------------------------------------------------- nodes and workers

-- Server processes that are alive. seen_at: the last renewal of the lease.
CREATE TABLE node (
    id          BLOB PRIMARY KEY,
    name        TEXT NOT NULL,
    started_at  INTEGER NOT NULL,
    lease_until INTEGER NOT NULL,
    seen_at     INTEGER NOT NULL,
    version     TEXT NOT NULL,
    inputs      TEXT NOT NULL DEFAULT '[]'
) WITHOUT ROWID;

-- One row per registration of a worker. Only one registration per key is alive.
-- key: the name the worker gave itself. version: that of its program, if it sent one.
-- kind: {BUILT_IN_WORKER} built in, {REMOTE_WORKER} remote, {POOL_WORKER} of a pool.
-- node: the server it is connected to. session: grows with each connection; connected_at: start of the current one.
-- state: {WORKER_CREATING} to {WORKER_TERMINATED}. capabilities, queues: JSON arrays. drain: it gets no more jobs.
-- deadline: when it is declared lost; absent while its node watches it. api_key: the key it registered with.
CREATE TABLE worker (
    id            BLOB PRIMARY KEY,
    key           TEXT NOT NULL,
    name          TEXT,
    version       TEXT,
    kind          INTEGER NOT NULL,
    transport     TEXT NOT NULL,
    node          BLOB,
    session       INTEGER NOT NULL,
    state         INTEGER NOT NULL,
    reason        TEXT,
    capabilities  TEXT NOT NULL,
    queues        TEXT NOT NULL,
    concurrency   INTEGER NOT NULL,
    pool          TEXT,
    registered_at INTEGER NOT NULL,
    connected_at  INTEGER NOT NULL,
    seen_at       INTEGER NOT NULL,
    ended_at      INTEGER,
    deadline      INTEGER,
    drain         INTEGER NOT NULL DEFAULT 0,
    completed     INTEGER NOT NULL DEFAULT 0,
    failed        INTEGER NOT NULL DEFAULT 0,
    breaker       TEXT NOT NULL DEFAULT 'closed',
    api_key       BLOB,
    token         BLOB NOT NULL
) WITHOUT ROWID;
CREATE UNIQUE INDEX worker_alive ON worker (key) WHERE ended_at IS NULL;
CREATE INDEX worker_key ON worker (key, registered_at);
CREATE INDEX worker_node ON worker (node) WHERE ended_at IS NULL;
CREATE INDEX worker_deadline ON worker (deadline) WHERE deadline IS NOT NULL AND ended_at IS NULL;
CREATE INDEX worker_ended ON worker (ended_at) WHERE ended_at IS NOT NULL;
-- Workers that are not connected yet: their jobs are SCHEDULED.
CREATE INDEX worker_starting ON worker (state) WHERE ended_at IS NULL AND state < {WORKER_READY};

-- The newest 200 changes of state of each registration.
CREATE TABLE worker_change (
    worker   BLOB NOT NULL,
    sequence INTEGER NOT NULL,
    at       INTEGER NOT NULL,
    state    INTEGER NOT NULL,
    reason   TEXT,
    PRIMARY KEY (worker, sequence)
) WITHOUT ROWID;

-- --------------------------------------------------------------------------------------------------------------- queues and limits

-- Settings of a queue. fairness: {FAIRNESS_NONE} by waiting time, {FAIRNESS_KEY} round robin over the keys. origin: config or api.
CREATE TABLE queue (
    name         TEXT PRIMARY KEY,
    strict       INTEGER,
    fairness     INTEGER,
    origin       TEXT NOT NULL,
    paused_at    INTEGER,
    paused_by    TEXT,
    pause_reason TEXT
) WITHOUT ROWID;

-- Limits. scope: {SCOPE_SYSTEM} the whole system (name ''), {SCOPE_QUEUE} a queue, {SCOPE_TYPE} a type, {SCOPE_KEY} a key, or each key
-- with this prefix if the name ends with *, {SCOPE_MACHINE} the running tasks of a machine. rate_count starts per rate_period_ms.
-- tokens: starts left at tokens_at (for keys: in bucket). reached_at: when it last delayed a job.
-- origin: config, api or machine (its definition); limits set through the API outlive the configuration.
CREATE TABLE limit_rule (
    scope          INTEGER NOT NULL,
    name           TEXT NOT NULL,
    concurrency    INTEGER,
    rate_count     INTEGER,
    rate_period_ms INTEGER,
    tokens         REAL,
    tokens_at      INTEGER,
    origin         TEXT NOT NULL,
    changed_at     INTEGER NOT NULL,
    changed_by     TEXT NOT NULL,
    reached_at     INTEGER,
    PRIMARY KEY (scope, name)
) WITHOUT ROWID;

-- Starts left of the rate of a key.
CREATE TABLE bucket (
    key    INTEGER PRIMARY KEY,
    tokens REAL NOT NULL,
    at     INTEGER NOT NULL
);

-- One row per concurrency key with ready jobs in a keyed lane.
-- rank: the order of the key queues of a lane: the ready time of the first job or, in a fair queue, the time it was last served.
-- open: 0 while the key is at its limit. opens_at: when its rate allows the next start.
-- limited_at, limited_by: since when its first job has waited, and for which limit.
CREATE TABLE key_queue (
    lane       INTEGER NOT NULL,
    key        INTEGER NOT NULL,
    rank       INTEGER NOT NULL,
    open       INTEGER NOT NULL DEFAULT 1,
    opens_at   INTEGER,
    limited_at INTEGER,
    limited_by TEXT,
    PRIMARY KEY (lane, key)
) WITHOUT ROWID;
CREATE INDEX key_queue_open ON key_queue (lane, rank, key) WHERE open = 1;
CREATE INDEX key_queue_opens ON key_queue (opens_at) WHERE opens_at IS NOT NULL;
CREATE INDEX key_queue_key ON key_queue (key);

-- Jobs with a concurrency key that are in flight. They count for the limit of their key.
CREATE TABLE key_in_flight (
    key INTEGER NOT NULL,
    id  BLOB NOT NULL,
    PRIMARY KEY (key, id)
) WITHOUT ROWID;

-- ----------------------------------------------------------------------------------------------------------- webhooks, audit, bulk

-- Notifications about finished jobs and approvals of tasks. subject: the job (event job.status) or the task.
-- host: with its port; a slow host does not delay the webhooks of other hosts.
-- state: {WEBHOOK_WAITING} waiting, {WEBHOOK_SENDING} sending, {WEBHOOK_DELIVERED} delivered, {WEBHOOK_FAILED} failed.
-- due_at: when to send it or, while it is being sent, when the sender's lease ends; absent when it is settled.
-- attempts: all that were started; spent: those before the last manual redelivery; lost: those since then without a known outcome.
CREATE TABLE webhook (
    id          BLOB PRIMARY KEY,
    subject     BLOB NOT NULL,
    event       TEXT NOT NULL,
    correlation TEXT NOT NULL,
    traceparent TEXT,
    url         TEXT NOT NULL,
    host        TEXT NOT NULL,
    body        TEXT NOT NULL,
    created_at  INTEGER NOT NULL,
    state       INTEGER NOT NULL,
    attempts    INTEGER NOT NULL DEFAULT 0,
    spent       INTEGER NOT NULL DEFAULT 0,
    lost        INTEGER NOT NULL DEFAULT 0,
    due_at      INTEGER,
    node        BLOB,
    settled_at  INTEGER
) WITHOUT ROWID;
CREATE INDEX webhook_due ON webhook (host, due_at, id) WHERE due_at IS NOT NULL;
CREATE INDEX webhook_subject ON webhook (subject, id);
CREATE INDEX webhook_state ON webhook (state, id);
CREATE INDEX webhook_host ON webhook (host, id);
CREATE INDEX webhook_settled ON webhook (settled_at) WHERE settled_at IS NOT NULL;

-- Attempts to send a webhook. answer: the first KiB of the response.
CREATE TABLE webhook_attempt (
    webhook BLOB NOT NULL,
    number  INTEGER NOT NULL,
    at      INTEGER NOT NULL,
    took_ms INTEGER NOT NULL,
    status  INTEGER,
    error   TEXT,
    answer  TEXT,
    PRIMARY KEY (webhook, number)
) WITHOUT ROWID;

-- Every action of a person or API key. details: JSON.
CREATE TABLE audit (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    at       INTEGER NOT NULL,
    actor    TEXT NOT NULL,
    action   TEXT NOT NULL,
    target   TEXT NOT NULL,
    details  TEXT NOT NULL,
    count    INTEGER NOT NULL
);

-- An action on every job or task that matches a filter, carried out step by step. filter: JSON.
-- action: cancel, retry or delete for jobs; tasks.send, tasks.cancel, tasks.pause, tasks.resume or tasks.migrate.
-- last: the job or task that was processed last; those after it, up to up_to, remain.
-- due_at: time of the next step or, while a node works on a step, when its lease ends; absent when it is finished.
CREATE TABLE bulk (
    id          BLOB PRIMARY KEY,
    action      TEXT NOT NULL,
    filter      TEXT NOT NULL,
    actor       TEXT NOT NULL,
    per_second  INTEGER NOT NULL,
    created_at  INTEGER NOT NULL,
    up_to        BLOB NOT NULL,
    last        BLOB,
    matched     INTEGER NOT NULL,
    done        INTEGER NOT NULL DEFAULT 0,
    skipped     INTEGER NOT NULL DEFAULT 0,
    due_at      INTEGER,
    finished_at INTEGER,
    error       TEXT
) WITHOUT ROWID;
CREATE INDEX bulk_due ON bulk (due_at) WHERE due_at IS NOT NULL;

-- Tokens of language models that are used or reserved, by day since 1970 in UTC.
CREATE TABLE token_usage (
    day    INTEGER PRIMARY KEY,
    tokens INTEGER NOT NULL
);

-- Tokens of language models that are used or reserved by a task whose machine limits them.
CREATE TABLE task_usage (
    task   BLOB PRIMARY KEY,
    tokens INTEGER NOT NULL
) WITHOUT ROWID;

-- API keys. lookup: the public part of the key's text. scopes: names, separated by spaces. queues: JSON, absent: all queues.
-- groups: JSON, the groups that the key belongs to, for approvals of tasks.
-- hash: SHA-256 of the key's text. previous_hash: of the text before the last rotation, accepted until previous_valid_until.
CREATE TABLE api_key (
    id                   BLOB PRIMARY KEY,
    lookup               TEXT NOT NULL UNIQUE,
    name                 TEXT NOT NULL,
    scopes               TEXT NOT NULL,
    queues               TEXT,
    groups               TEXT NOT NULL DEFAULT '[]',
    without_payloads     INTEGER NOT NULL DEFAULT 0,
    hash                 BLOB NOT NULL,
    previous_hash        BLOB,
    previous_valid_until INTEGER,
    created_at           INTEGER NOT NULL,
    created_by           TEXT NOT NULL,
    expires_at           INTEGER,
    rotated_at           INTEGER,
    revoked_at           INTEGER,
    last_used_at         INTEGER
) WITHOUT ROWID;

-- ----------------------------------------------------------------------------------------------------------------------- schedules

-- spec: JSON, as the caller wrote it. anchor_at: start of interval schedules. cursor_at: every due time up to here is processed.
-- next_at: the next due time; absent if it is not active. last_job: the job it created last.
-- recent: JSON, created jobs that may still be unfinished. queued: the job that waits for them. finished: why it no longer fires.
CREATE TABLE schedule (
    id          BLOB PRIMARY KEY,
    name        TEXT NOT NULL,
    spec        TEXT NOT NULL,
    active      INTEGER NOT NULL,
    anchor_at   INTEGER NOT NULL,
    cursor_at   INTEGER NOT NULL,
    next_at     INTEGER,
    runs        INTEGER NOT NULL DEFAULT 0,
    last_due_at INTEGER,
    last_run_at INTEGER,
    last_job    BLOB,
    recent      TEXT NOT NULL DEFAULT '[]',
    queued      BLOB,
    finished    TEXT,
    created_at  INTEGER NOT NULL,
    updated_at  INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX schedule_next ON schedule (next_at) WHERE next_at IS NOT NULL;
CREATE INDEX schedule_name ON schedule (name);

-- Due times that were processed. manual: 1 for runs that a person triggered.
-- outcome: {TICK_FIRED} fired, {TICK_MISSED} missed, {TICK_SKIPPED} skipped, {TICK_TRIGGERED} triggered.
-- through_at, count: the row covers count due times up to through_at (count absent: too many to count).
CREATE TABLE tick (
    schedule   BLOB NOT NULL,
    due_at     INTEGER NOT NULL,
    manual     INTEGER NOT NULL,
    outcome    INTEGER NOT NULL,
    reason     TEXT,
    job        BLOB,
    at         INTEGER NOT NULL,
    through_at INTEGER,
    count      INTEGER,
    PRIMARY KEY (schedule, due_at, manual)
) WITHOUT ROWID;
CREATE INDEX tick_at ON tick (at);

-- ---------------------------------------------------------------------------------------------------------------------------- tasks

-- Definitions of machines. A registered version never changes. definition: JSON, as it was written.
CREATE TABLE machine (
    name       TEXT NOT NULL,
    version    INTEGER NOT NULL,
    hash       TEXT NOT NULL,
    definition TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    created_by TEXT NOT NULL,
    PRIMARY KEY (name, version)
) WITHOUT ROWID;

-- Tasks. tags: JSON, absent: none. state: the active states, joined by dots. entered_at: when it entered the innermost of them.
-- due_at: when its next timer fires; absent while it is paused and after its end. approval: it waits for a decision.
-- events: the number of events that it has published; the next event gets the next number. body: JSON, everything that the next step needs.
CREATE TABLE task (
    id          BLOB PRIMARY KEY,
    machine     TEXT NOT NULL,
    version     INTEGER NOT NULL,
    status      TEXT NOT NULL,
    state       TEXT NOT NULL,
    title       TEXT,
    correlation TEXT NOT NULL,
    tags        TEXT,
    entered_at  INTEGER NOT NULL,
    updated_at  INTEGER NOT NULL,
    ended_at    INTEGER,
    due_at      INTEGER,
    approval    INTEGER NOT NULL,
    events      INTEGER NOT NULL,
    body        TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX task_due ON task (due_at) WHERE due_at IS NOT NULL;
CREATE INDEX task_machine ON task (machine, version, status, state, entered_at);
CREATE INDEX task_queued ON task (machine, id) WHERE status = 'queued';
CREATE INDEX task_approval ON task (id) WHERE approval = 1;
CREATE INDEX task_correlation ON task (correlation);
CREATE INDEX task_ended ON task (ended_at) WHERE ended_at IS NOT NULL;

-- The tags of tasks, to search for them.
CREATE TABLE task_tag (
    tag  TEXT NOT NULL,
    task BLOB NOT NULL,
    PRIMARY KEY (tag, task)
) WITHOUT ROWID;
CREATE INDEX task_tag_task ON task_tag (task);

-- The idempotency keys of tasks, as long as their tasks exist. fingerprint: SHA-256 of the request.
CREATE TABLE task_key (
    key         TEXT NOT NULL PRIMARY KEY,
    task        BLOB NOT NULL,
    fingerprint BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX task_key_task ON task_key (task);

-- The history of tasks, without gaps. record: JSON.
CREATE TABLE task_record (
    task     BLOB NOT NULL,
    sequence INTEGER NOT NULL,
    record   TEXT NOT NULL,
    PRIMARY KEY (task, sequence)
) WITHOUT ROWID;

-- Events that a task has received, so that a second delivery gets the answer of the first. answer: JSON.
CREATE TABLE task_inbox (
    task     BLOB NOT NULL,
    event_id TEXT NOT NULL,
    answer   TEXT NOT NULL,
    PRIMARY KEY (task, event_id)
) WITHOUT ROWID;

-- Jobs whose end a task waits for. state, epoch: the stay in a state that submitted the job. ended: the job has ended or was deleted,
-- written with its end, and the task does not know it yet.
CREATE TABLE task_job (
    job   BLOB PRIMARY KEY,
    task  BLOB NOT NULL,
    name  TEXT NOT NULL,
    state TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    ended INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE INDEX task_job_task ON task_job (task);
CREATE INDEX task_job_ended ON task_job (job) WHERE ended = 1;

-- --------------------------------------------------------------------------------------------------------------- events and outbox

-- Events in commit order. Those of tasks are always recorded, all others only if a subscription matches them.
-- subject: the job, task, worker or schedule. sequence: counts per subject. data: JSON.
-- docs/decisions/004-events-from-rows.md explains how triggers create events.
-- id: random. It has no index, because random values would make almost every event write another page of that index.
CREATE TABLE event (
    position    INTEGER PRIMARY KEY AUTOINCREMENT,
    id          BLOB NOT NULL,
    type        TEXT NOT NULL,
    subject     BLOB NOT NULL,
    sequence    INTEGER NOT NULL,
    at          INTEGER NOT NULL,
    correlation TEXT NOT NULL,
    actor       TEXT NOT NULL,
    traceparent TEXT,
    data        TEXT NOT NULL
);
CREATE INDEX event_at ON event (at);
CREATE INDEX event_subject ON event (subject, sequence);
CREATE INDEX event_correlation ON event (correlation, position);

-- The last event of each subject. state: of a job, as its last event reported it.
CREATE TABLE event_head (
    subject  BLOB PRIMARY KEY,
    sequence INTEGER NOT NULL DEFAULT 0,
    state    INTEGER
) WITHOUT ROWID;

-- Subscriptions to events. queued: it is a sink; its events wait in the outbox until it confirms them. Otherwise they are only kept.
-- park: events of a subject wait for a rejected one before them. until: when the subscription expires unless it is renewed.
-- since: events after this position are kept. sent: number of confirmed events. down_since, down_reason: the sink is unusable.
CREATE TABLE subscription (
    id          INTEGER PRIMARY KEY,
    name        TEXT NOT NULL UNIQUE,
    queued      INTEGER NOT NULL,
    park        INTEGER NOT NULL,
    until       INTEGER NOT NULL,
    since       INTEGER NOT NULL DEFAULT 0,
    sent        INTEGER NOT NULL DEFAULT 0,
    down_since  INTEGER,
    down_reason TEXT
);

-- Event types of a subscription, as patterns for GLOB.
CREATE TABLE subscription_pattern (
    subscription INTEGER NOT NULL,
    pattern      TEXT NOT NULL,
    PRIMARY KEY (subscription, pattern)
) WITHOUT ROWID;

-- Events to be published. sink: id of the subscription. partition: 0 to 15, derived from the subject.
-- attempts: how often the sink rejected this event. due_at: not before this time.
CREATE TABLE outbox (
    sink      INTEGER NOT NULL,
    partition INTEGER NOT NULL,
    position  INTEGER NOT NULL,
    subject   BLOB NOT NULL,
    attempts  INTEGER NOT NULL DEFAULT 0,
    due_at    INTEGER NOT NULL DEFAULT 0,
    error     TEXT,
    PRIMARY KEY (sink, partition, position)
) WITHOUT ROWID;
CREATE INDEX outbox_late ON outbox (sink, subject, position) WHERE due_at > 0;
CREATE INDEX outbox_due ON outbox (sink, due_at) WHERE due_at > 0;
CREATE INDEX outbox_position ON outbox (position);

-- The node that publishes a partition. epoch: grows with each owner.
CREATE TABLE outbox_lease (
    sink      INTEGER NOT NULL,
    partition INTEGER NOT NULL,
    node      BLOB,
    epoch     INTEGER NOT NULL DEFAULT 0,
    until     INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (sink, partition)
) WITHOUT ROWID;

-- The nodes that share the partitions of a sink. until: when a silent node is left out.
CREATE TABLE outbox_node (
    sink  INTEGER NOT NULL,
    node  BLOB NOT NULL,
    until INTEGER NOT NULL,
    PRIMARY KEY (sink, node)
) WITHOUT ROWID;

-- Events that a sink rejected too often. sink: name of the subscription.
CREATE TABLE outbox_dlq (
    id                  BLOB PRIMARY KEY,
    sink                TEXT NOT NULL,
    position            INTEGER NOT NULL,
    original_event_id   BLOB NOT NULL,
    aggregate_id        BLOB NOT NULL,
    aggregate_type      TEXT NOT NULL,
    event_type          TEXT NOT NULL,
    payload             TEXT NOT NULL,
    metadata            TEXT,
    error_message       TEXT NOT NULL,
    retry_count         INTEGER NOT NULL DEFAULT 0,
    original_created_at INTEGER NOT NULL,
    moved_at            INTEGER NOT NULL,
    resolved_at         INTEGER,
    resolved_by         TEXT,
    resolution_notes    TEXT
) WITHOUT ROWID;
CREATE INDEX outbox_dlq_moved ON outbox_dlq (moved_at);
CREATE INDEX outbox_dlq_open ON outbox_dlq (sink, aggregate_id) WHERE resolved_at IS NULL;
CREATE INDEX outbox_dlq_position ON outbox_dlq (position);

-- Messages from brokers that were processed, once per consumer.
CREATE TABLE inbox (
    consumer TEXT NOT NULL,
    id       TEXT NOT NULL,
    at       INTEGER NOT NULL,
    PRIMARY KEY (consumer, id)
) WITHOUT ROWID;
CREATE INDEX inbox_at ON inbox (at);
