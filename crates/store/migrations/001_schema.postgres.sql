-- The schema of Faena on PostgreSQL. The functions and triggers that create events are at the end.
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
--
-- Tables that change all the time are vacuumed early and without pauses: their dead rows slow down claims.

-- ---------------------------------------------------------------------------------------------------------------------------- jobs

-- A lane is one queue, type and priority, with or without concurrency keys. Claims, counters and lists work by lane.
-- keyed: its jobs have a concurrencyKey and form one key queue per key.
-- retired: it had no jobs and will be deleted; no job may enter it. fence: transactions before this one may still have seen it in use.
CREATE TABLE faena.lane (
    id       integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue    text NOT NULL,
    type     text NOT NULL,
    priority smallint NOT NULL,
    keyed    boolean NOT NULL DEFAULT false,
    retired  boolean NOT NULL DEFAULT false,
    fence    xid8,
    UNIQUE (queue, type, priority, keyed)
);
CREATE INDEX lane_retired ON faena.lane (id) WHERE retired;

-- Returns the ids of lanes, in the order of their names. Creates those that do not exist, and takes retired ones back into use.
-- Everything that adds or removes lanes takes this lock, so there are never more than `most`.
CREATE FUNCTION faena.put_lanes(queues text[], types text[], priorities smallint[], keyeds boolean[], most bigint) RETURNS SETOF integer
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(x'6661656e62'::bigint);
    UPDATE faena.lane l SET retired = false, fence = NULL
    FROM unnest(queues, types, priorities, keyeds) AS n(queue, type, priority, keyed)
    WHERE l.queue = n.queue AND l.type = n.type AND l.priority = n.priority AND l.keyed = n.keyed AND l.retired;
    INSERT INTO faena.lane (queue, type, priority, keyed)
    SELECT * FROM unnest(queues, types, priorities, keyeds) ON CONFLICT DO NOTHING;
    IF (SELECT count(*) FROM faena.lane WHERE NOT retired) > most THEN
        RAISE EXCEPTION 'too many lanes' USING ERRCODE = 'FA002';
    END IF;
    RETURN QUERY SELECT l.id FROM unnest(queues, types, priorities, keyeds) WITH ORDINALITY AS n(queue, type, priority, keyed, at)
        JOIN faena.lane l ON l.queue = n.queue AND l.type = n.type AND l.priority = n.priority AND l.keyed = n.keyed ORDER BY n.at;
END $$;

-- Fails if jobs may not enter one of these lanes, because it was reclaimed after the caller had loaded it. Takes a transaction id
-- before the check, so a reclaim that this check has not seen waits for the end of this transaction.
CREATE FUNCTION faena.require_lanes(lanes integer[]) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_current_xact_id();
    IF (SELECT count(*) FROM faena.lane WHERE id = ANY(lanes) AND NOT retired) < cardinality(lanes) THEN
        RAISE EXCEPTION 'a lane was reclaimed' USING ERRCODE = 'FA001';
    END IF;
    RETURN true;
END $$;

-- What was submitted. Written once; only a patch changes it.
-- correlation: absent if it is the job's own id. options: JSON, only what differs from the defaults.
CREATE TABLE faena.job (
    id          uuid PRIMARY KEY,
    lane        integer NOT NULL,
    correlation text,
    options     text,
    payload     text NOT NULL
);
CREATE INDEX job_correlation ON faena.job (correlation) WHERE correlation IS NOT NULL;

-- Jobs that a worker may claim. The primary key is the claim order.
-- must_record_start: its start must be recorded before it runs.
-- key: in keyed lanes, the first eight bytes of the SHA-256 of its concurrencyKey.
CREATE TABLE faena.ready (
    lane        integer NOT NULL,
    ready_at    bigint NOT NULL,
    id          uuid NOT NULL,
    retry_count smallint NOT NULL,
    must_record_start boolean NOT NULL,
    key         bigint,
    PRIMARY KEY (lane, ready_at, id)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000, autovacuum_vacuum_cost_delay = 0,
        autovacuum_vacuum_insert_scale_factor = 0.5);
CREATE INDEX ready_id ON faena.ready (lane, id);
CREATE INDEX ready_key ON faena.ready (lane, key, ready_at, id) WHERE key IS NOT NULL;

-- Jobs that wait for their time, their next attempt or their parents.
-- state: {PENDING} or {RETRYING}. blocked: waits for parents; due_at is then the time of the next check.
CREATE TABLE faena.waiting (
    lane        integer NOT NULL,
    state       smallint NOT NULL,
    id          uuid NOT NULL,
    due_at      bigint NOT NULL,
    blocked     boolean NOT NULL,
    retry_count smallint NOT NULL,
    PRIMARY KEY (lane, state, id)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX waiting_due ON faena.waiting (due_at, id);

-- One row per claim: the jobs that one worker received under one run number. Deleting the row fences off late reports.
-- owner: a node or a worker. retries: the retry count of each job; absent if all are 0.
-- check_each: one of its jobs did not simply complete, so further reports are checked one by one.
CREATE TABLE faena.claim (
    run            bigint PRIMARY KEY,
    owner          uuid NOT NULL,
    claimed_at     bigint NOT NULL,
    first_ready_at bigint NOT NULL,
    ids            uuid[] NOT NULL,
    retries        smallint[],
    check_each     boolean NOT NULL DEFAULT false
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_cost_delay = 0);
-- Ids do not compress; trying to costs time at every claim.
ALTER TABLE faena.claim ALTER COLUMN ids SET STORAGE EXTERNAL;
CREATE INDEX claim_owner ON faena.claim (owner);

-- Run numbers. They only grow.
CREATE SEQUENCE faena.run;

-- Jobs that are known to have started: those that have run for 100 ms, or have reported something.
CREATE TABLE faena.running (
    id          uuid PRIMARY KEY,
    lane        integer NOT NULL,
    run         bigint NOT NULL,
    node        uuid NOT NULL,
    worker      uuid NOT NULL,
    retry_count smallint NOT NULL,
    ready_at    bigint NOT NULL,
    started_at  bigint NOT NULL,
    updated_at  bigint NOT NULL
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);

-- The last progress of a job, in whatever state the job is. run: the run that reported it. progress: JSON.
CREATE TABLE faena.progress (
    id       uuid PRIMARY KEY,
    run      bigint NOT NULL,
    progress text NOT NULL
) WITH (fillfactor = 70);

-- Completed jobs, with the log of their last run. Daily partitions are created ahead; rows without one go to the default partition.
CREATE TABLE faena.done (
    lane        integer NOT NULL,
    id          uuid NOT NULL,
    finished_at bigint NOT NULL,
    run         bigint NOT NULL,
    retry_count smallint NOT NULL,
    started_at  bigint,
    worker      uuid,
    result      text,
    log         text NOT NULL
) PARTITION BY RANGE (finished_at);
-- Each partition has its own primary key. It is narrower than one over all partitions, which would have to contain the time,
-- and it makes reporting a completion twice harmless.
CREATE TABLE faena.done_default PARTITION OF faena.done (PRIMARY KEY (lane, id)) DEFAULT;

-- Failed and cancelled jobs. state: {FAILED} or {CANCELLED}. run: 0 if it never ran.
CREATE TABLE faena.ended (
    lane        integer NOT NULL,
    state       smallint NOT NULL,
    id          uuid NOT NULL,
    finished_at bigint NOT NULL,
    run         bigint NOT NULL,
    retry_count smallint NOT NULL,
    started_at  bigint,
    worker      uuid,
    error       text,
    reason      text,
    log         text NOT NULL,
    PRIMARY KEY (lane, state, id)
);

-- Runs that ended without finishing their job. state: the job's state after the run.
CREATE TABLE faena.attempt (
    id          uuid NOT NULL,
    run         bigint NOT NULL,
    state       smallint NOT NULL,
    retry_count smallint NOT NULL,
    finished_at bigint NOT NULL,
    started_at  bigint,
    worker      uuid,
    error       text,
    reason      text,
    log         text NOT NULL,
    PRIMARY KEY (id, run)
);

-- Entries of the execution log that do not belong to a run that has ended. A job keeps its first and its newest entries.
-- dropped: the number of entries that were deleted just before this one. The index is enough to count the entries and bytes of a job.
CREATE TABLE faena.job_log (
    sequence bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id       uuid NOT NULL,
    run      bigint,
    log      text NOT NULL,
    dropped  bigint NOT NULL DEFAULT 0,
    bytes    integer GENERATED ALWAYS AS (octet_length(log)) STORED
);
CREATE INDEX job_log_id ON faena.job_log (id, sequence, bytes);

-- Reports about a job that were rejected because they came too late or from the wrong worker: how many, and the last of them.
CREATE TABLE faena.stale_report (
    id    uuid PRIMARY KEY,
    run   bigint NOT NULL,
    at    bigint NOT NULL,
    count bigint NOT NULL,
    text  text NOT NULL
) WITH (fillfactor = 70);

-- Finished steps of a job. total: the number of steps, if the worker reported it.
CREATE TABLE faena.step (
    id     uuid NOT NULL,
    name   text NOT NULL,
    run    bigint NOT NULL,
    at     bigint NOT NULL,
    result text NOT NULL,
    total  integer,
    PRIMARY KEY (id, name)
);

-- Labels by which jobs are listed. kind: {TAG_LABEL} tag, {SCHEDULE_LABEL} schedule, {NAME_LABEL} a name that differs from the type,
-- {PARENT_LABEL} the id of a job that it depends on.
CREATE TABLE faena.label (
    kind  smallint NOT NULL,
    value text NOT NULL,
    id    uuid NOT NULL,
    PRIMARY KEY (kind, value, id)
);
-- A search for a part of a name reads the newest names.
CREATE INDEX label_name ON faena.label (id) WHERE kind = {NAME_LABEL};

-- Keys that name at most one job each. kind: {IDEMPOTENCY_KEY} idempotency key, {UNIQUE_KEY} unique key (until the job has finished).
CREATE TABLE faena.job_key (
    kind        smallint NOT NULL,
    key         text NOT NULL,
    id          uuid NOT NULL,
    fingerprint bytea,
    PRIMARY KEY (kind, key)
);

-- Parents that a job still waits for.
CREATE TABLE faena.dependency (
    parent uuid NOT NULL,
    child  uuid NOT NULL,
    PRIMARY KEY (parent, child)
);
CREATE INDEX dependency_child ON faena.dependency (child, parent);

-- Finished jobs with dependents that are still to be released or cancelled: the rest of a large graph, which is processed in slices.
CREATE TABLE faena.unreleased (
    parent uuid PRIMARY KEY
);

-- Jobs that fail if they have not started by this time.
CREATE TABLE faena.expiry (
    expires_at bigint NOT NULL,
    id         uuid NOT NULL,
    PRIMARY KEY (expires_at, id)
);

-- Requests to cancel jobs that are in flight.
CREATE TABLE faena.cancel_request (
    id     uuid PRIMARY KEY,
    reason text NOT NULL,
    at     bigint NOT NULL
);

-- The number of jobs per lane and tally (states that are counted together; see Tally in src/jobs.rs).
-- shard: one row per writer, so that writers never wait for each other; the count is the sum over the shards.
CREATE TABLE faena.counter (
    shard smallint NOT NULL,
    lane  integer NOT NULL,
    tally smallint NOT NULL,
    n     bigint NOT NULL,
    PRIMARY KEY (shard, lane, tally)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0);
-- The number of jobs in flight per lane. A count changes no indexed column, so updates stay cheap.
CREATE INDEX counter_in_flight ON faena.counter (lane) WHERE tally = {TALLY_IN_FLIGHT};

-- ------------------------------------------------------------------------------------------------------------------------- history

-- What happened to the jobs of a queue in a minute, an hour or a day. period: 0 hour, 1 day (UTC), 2 minute.
-- measure: see HistoryMeasure in src/history.rs. bucket: for a measured time, the index of its bound; for completed jobs, their priority;
-- otherwise 0.
CREATE TABLE faena.history (
    period    smallint NOT NULL,
    starts_at bigint NOT NULL,
    queue     text NOT NULL,
    measure   smallint NOT NULL,
    bucket    smallint NOT NULL,
    n         bigint NOT NULL,
    PRIMARY KEY (period, starts_at, queue, measure, bucket)
) WITH (fillfactor = 70);

-- How much of the counters of a lane is in the history.
CREATE TABLE faena.history_mark (
    lane    integer NOT NULL,
    measure smallint NOT NULL,
    n       bigint NOT NULL,
    PRIMARY KEY (lane, measure)
) WITH (fillfactor = 50);

-- The node whose /metrics has the figures of the whole database: one row.
CREATE TABLE faena.metrics_lease (
    id    smallint PRIMARY KEY DEFAULT 1 CHECK (id = 1),
    node  uuid NOT NULL,
    until bigint NOT NULL
) WITH (fillfactor = 50);

-- --------------------------------------------------------------------------------------------------------------- nodes and workers

-- Server processes that are alive. seen_at: the last renewal of the lease.
CREATE TABLE faena.node (
    id          uuid PRIMARY KEY,
    name        text NOT NULL,
    started_at  bigint NOT NULL,
    lease_until bigint NOT NULL,
    seen_at     bigint NOT NULL,
    version     text NOT NULL,
    inputs      text NOT NULL DEFAULT '[]'
) WITH (fillfactor = 50);

-- One row per registration of a worker. Only one registration per key is alive.
-- key: the name the worker gave itself. version: that of its program, if it sent one.
-- kind: {BUILT_IN_WORKER} built in, {REMOTE_WORKER} remote, {POOL_WORKER} of a pool.
-- node: the server it is connected to. session: grows with each connection; connected_at: start of the current one.
-- state: {WORKER_CREATING} to {WORKER_TERMINATED}. capabilities, queues: JSON arrays. drain: it gets no more jobs.
-- deadline: when it is declared lost; absent while its node watches it. api_key: the key it registered with.
CREATE TABLE faena.worker (
    id            uuid PRIMARY KEY,
    key           text NOT NULL,
    name          text,
    version       text,
    kind          smallint NOT NULL,
    transport     text NOT NULL,
    node          uuid,
    session       bigint NOT NULL,
    state         smallint NOT NULL,
    reason        text,
    capabilities  text NOT NULL,
    queues        text NOT NULL,
    concurrency   integer NOT NULL,
    pool          text,
    registered_at bigint NOT NULL,
    connected_at  bigint NOT NULL,
    seen_at       bigint NOT NULL,
    ended_at      bigint,
    deadline      bigint,
    drain         boolean NOT NULL DEFAULT false,
    completed     bigint NOT NULL DEFAULT 0,
    failed        bigint NOT NULL DEFAULT 0,
    breaker       text NOT NULL DEFAULT 'closed',
    api_key       uuid,
    token         bytea NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0);
CREATE UNIQUE INDEX worker_alive ON faena.worker (key) WHERE ended_at IS NULL;
CREATE INDEX worker_key ON faena.worker (key, registered_at);
CREATE INDEX worker_node ON faena.worker (node) WHERE ended_at IS NULL;
CREATE INDEX worker_deadline ON faena.worker (deadline) WHERE deadline IS NOT NULL AND ended_at IS NULL;
CREATE INDEX worker_ended ON faena.worker (ended_at) WHERE ended_at IS NOT NULL;
-- Workers that are not connected yet: their jobs are SCHEDULED.
CREATE INDEX worker_starting ON faena.worker (state) WHERE ended_at IS NULL AND state < {WORKER_READY};

-- The newest 200 changes of state of each registration.
CREATE TABLE faena.worker_change (
    worker   uuid NOT NULL,
    sequence bigint NOT NULL,
    at       bigint NOT NULL,
    state    smallint NOT NULL,
    reason   text,
    PRIMARY KEY (worker, sequence)
);

-- --------------------------------------------------------------------------------------------------------------- queues and limits

-- Settings of a queue. fairness: {FAIRNESS_NONE} by waiting time, {FAIRNESS_KEY} round robin over the keys. origin: config or api.
CREATE TABLE faena.queue (
    name         text PRIMARY KEY,
    strict       boolean,
    fairness     smallint,
    origin       text NOT NULL,
    paused_at    bigint,
    paused_by    text,
    pause_reason text
);

-- Limits. scope: {SCOPE_SYSTEM} the whole system (name ''), {SCOPE_QUEUE} a queue, {SCOPE_TYPE} a type, {SCOPE_KEY} a key, or each key
-- with this prefix if the name ends with *, {SCOPE_MACHINE} the running tasks of a machine. rate_count starts per rate_period_ms.
-- tokens: starts left at tokens_at (for keys: in bucket). reached_at: when it last delayed a job.
-- origin: config, api or machine (its definition); limits set through the API outlive the configuration.
CREATE TABLE faena.limit_rule (
    scope          smallint NOT NULL,
    name           text NOT NULL,
    concurrency    bigint,
    rate_count     bigint,
    rate_period_ms bigint,
    tokens         double precision,
    tokens_at      bigint,
    origin         text NOT NULL,
    changed_at     bigint NOT NULL,
    changed_by     text NOT NULL,
    reached_at     bigint,
    PRIMARY KEY (scope, name)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0);

-- Starts left of the rate of a key.
CREATE TABLE faena.bucket (
    key    bigint PRIMARY KEY,
    tokens double precision NOT NULL,
    at     bigint NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0);

-- One row per concurrency key with ready jobs in a keyed lane.
-- rank: the order of the key queues of a lane: the ready time of the first job or, in a fair queue, the time it was last served.
-- open: false while the key is at its limit. opens_at: when its rate allows the next start.
-- limited_at, limited_by: since when its first job has waited, and for which limit.
CREATE TABLE faena.key_queue (
    lane       integer NOT NULL,
    key        bigint NOT NULL,
    rank       bigint NOT NULL,
    open       boolean NOT NULL DEFAULT true,
    opens_at   bigint,
    limited_at bigint,
    limited_by text,
    PRIMARY KEY (lane, key)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX key_queue_open ON faena.key_queue (lane, rank, key) WHERE open;
CREATE INDEX key_queue_opens ON faena.key_queue (opens_at) WHERE opens_at IS NOT NULL;
CREATE INDEX key_queue_key ON faena.key_queue (key);

-- Jobs with a concurrency key that are in flight. They count for the limit of their key.
CREATE TABLE faena.key_in_flight (
    key bigint NOT NULL,
    id  uuid NOT NULL,
    PRIMARY KEY (key, id)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0);

-- ----------------------------------------------------------------------------------------------------------- webhooks, audit, bulk

-- Notifications about finished jobs and approvals of tasks. subject: the job (event job.status) or the task.
-- host: with its port; a slow host does not delay the webhooks of other hosts.
-- state: {WEBHOOK_WAITING} waiting, {WEBHOOK_SENDING} sending, {WEBHOOK_DELIVERED} delivered, {WEBHOOK_FAILED} failed.
-- due_at: when to send it or, while it is being sent, when the sender's lease ends; absent when it is settled.
-- attempts: all that were started; spent: those before the last manual redelivery; lost: those since then without a known outcome.
CREATE TABLE faena.webhook (
    id          uuid PRIMARY KEY,
    subject     uuid NOT NULL,
    event       text NOT NULL,
    correlation text NOT NULL,
    traceparent text,
    url         text NOT NULL,
    host        text NOT NULL,
    body        text NOT NULL,
    created_at  bigint NOT NULL,
    state       smallint NOT NULL,
    attempts    integer NOT NULL DEFAULT 0,
    spent       integer NOT NULL DEFAULT 0,
    lost        integer NOT NULL DEFAULT 0,
    due_at      bigint,
    node        uuid,
    settled_at  bigint
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX webhook_due ON faena.webhook (host, due_at, id) WHERE due_at IS NOT NULL;
CREATE INDEX webhook_subject ON faena.webhook (subject, id);
CREATE INDEX webhook_state ON faena.webhook (state, id);
CREATE INDEX webhook_host ON faena.webhook (host, id);
CREATE INDEX webhook_settled ON faena.webhook (settled_at) WHERE settled_at IS NOT NULL;

-- Attempts to send a webhook. answer: the first KiB of the response.
CREATE TABLE faena.webhook_attempt (
    webhook uuid NOT NULL,
    number  integer NOT NULL,
    at      bigint NOT NULL,
    took_ms bigint NOT NULL,
    status  integer,
    error   text,
    answer  text,
    PRIMARY KEY (webhook, number)
);

-- Every action of a person or API key. details: JSON.
CREATE TABLE faena.audit (
    sequence bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at       bigint NOT NULL,
    actor    text NOT NULL,
    action   text NOT NULL,
    target   text NOT NULL,
    details  text NOT NULL,
    count    bigint NOT NULL
);

-- An action on every job or task that matches a filter, carried out step by step. filter: JSON.
-- action: cancel, retry or delete for jobs; tasks.send, tasks.cancel, tasks.pause, tasks.resume or tasks.migrate.
-- last: the job or task that was processed last; those after it, up to up_to, remain.
-- due_at: time of the next step or, while a node works on a step, when its lease ends; absent when it is finished.
CREATE TABLE faena.bulk (
    id          uuid PRIMARY KEY,
    action      text NOT NULL,
    filter      text NOT NULL,
    actor       text NOT NULL,
    per_second  bigint NOT NULL,
    created_at  bigint NOT NULL,
    up_to        uuid NOT NULL,
    last        uuid,
    matched     bigint NOT NULL,
    done        bigint NOT NULL DEFAULT 0,
    skipped     bigint NOT NULL DEFAULT 0,
    due_at      bigint,
    finished_at bigint,
    error       text
);
CREATE INDEX bulk_due ON faena.bulk (due_at) WHERE due_at IS NOT NULL;

-- Tokens of language models that are used or reserved, by day since 1970 in UTC.
CREATE TABLE faena.token_usage (
    day    int8 PRIMARY KEY,
    tokens int8 NOT NULL
);

-- Tokens of language models that are used or reserved by a task whose machine limits them.
CREATE TABLE faena.task_usage (
    task   uuid PRIMARY KEY,
    tokens int8 NOT NULL
);

-- API keys. lookup: the public part of the key's text. scopes: names, separated by spaces. queues: JSON, absent: all queues.
-- groups: JSON, the groups that the key belongs to, for approvals of tasks.
-- hash: SHA-256 of the key's text. previous_hash: of the text before the last rotation, accepted until previous_valid_until.
CREATE TABLE faena.api_key (
    id                   uuid PRIMARY KEY,
    lookup               text NOT NULL UNIQUE,
    name                 text NOT NULL,
    scopes               text NOT NULL,
    queues               text,
    groups               text NOT NULL DEFAULT '[]',
    without_payloads     boolean NOT NULL DEFAULT false,
    hash                 bytea NOT NULL,
    previous_hash        bytea,
    previous_valid_until int8,
    created_at           int8 NOT NULL,
    created_by           text NOT NULL,
    expires_at           int8,
    rotated_at           int8,
    revoked_at           int8,
    last_used_at         int8
);

-- ----------------------------------------------------------------------------------------------------------------------- schedules

-- spec: JSON, as the caller wrote it. anchor_at: start of interval schedules. cursor_at: every due time up to here is processed.
-- next_at: the next due time; absent if it is not active. last_job: the job it created last.
-- recent: JSON, created jobs that may still be unfinished. queued: the job that waits for them. finished: why it no longer fires.
CREATE TABLE faena.schedule (
    id          uuid PRIMARY KEY,
    name        text NOT NULL,
    spec        text NOT NULL,
    active      boolean NOT NULL,
    anchor_at   bigint NOT NULL,
    cursor_at   bigint NOT NULL,
    next_at     bigint,
    runs        bigint NOT NULL DEFAULT 0,
    last_due_at bigint,
    last_run_at bigint,
    last_job    uuid,
    recent      text NOT NULL DEFAULT '[]',
    queued      uuid,
    finished    text,
    created_at  bigint NOT NULL,
    updated_at  bigint NOT NULL
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX schedule_next ON faena.schedule (next_at) WHERE next_at IS NOT NULL;
CREATE INDEX schedule_name ON faena.schedule (name);

-- Due times that were processed. manual: true for runs that a person triggered.
-- outcome: {TICK_FIRED} fired, {TICK_MISSED} missed, {TICK_SKIPPED} skipped, {TICK_TRIGGERED} triggered.
-- through_at, count: the row covers count due times up to through_at (count absent: too many to count).
CREATE TABLE faena.tick (
    schedule   uuid NOT NULL,
    due_at     bigint NOT NULL,
    manual     boolean NOT NULL,
    outcome    smallint NOT NULL,
    reason     text,
    job        uuid,
    at         bigint NOT NULL,
    through_at bigint,
    count      bigint,
    PRIMARY KEY (schedule, due_at, manual)
);
CREATE INDEX tick_at ON faena.tick (at);

-- ---------------------------------------------------------------------------------------------------------------------------- tasks

-- Definitions of machines. A registered version never changes. definition: JSON, as it was written.
CREATE TABLE faena.machine (
    name       text NOT NULL,
    version    integer NOT NULL,
    hash       text NOT NULL,
    definition text NOT NULL,
    created_at bigint NOT NULL,
    created_by text NOT NULL,
    PRIMARY KEY (name, version)
);

-- Tasks. tags: JSON, absent: none. state: the active states, joined by dots. entered_at: when it entered the innermost of them.
-- due_at: when its next timer fires; absent while it is paused and after its end. approval: it waits for a decision.
-- events: the number of events that it has published; the next event gets the next number. body: JSON, everything that the next step needs.
CREATE TABLE faena.task (
    id          uuid PRIMARY KEY,
    machine     text NOT NULL,
    version     integer NOT NULL,
    status      text NOT NULL,
    state       text NOT NULL,
    title       text,
    correlation text NOT NULL,
    tags        text,
    entered_at  bigint NOT NULL,
    updated_at  bigint NOT NULL,
    ended_at    bigint,
    due_at      bigint,
    approval    boolean NOT NULL,
    events      bigint NOT NULL,
    body        text NOT NULL
);
CREATE INDEX task_due ON faena.task (due_at) WHERE due_at IS NOT NULL;
CREATE INDEX task_machine ON faena.task (machine, version, status, state, entered_at);
CREATE INDEX task_queued ON faena.task (machine, id) WHERE status = 'queued';
CREATE INDEX task_approval ON faena.task (id) WHERE approval;
CREATE INDEX task_correlation ON faena.task (correlation);
CREATE INDEX task_ended ON faena.task (ended_at) WHERE ended_at IS NOT NULL;

-- The tags of tasks, to search for them.
CREATE TABLE faena.task_tag (
    tag  text NOT NULL,
    task uuid NOT NULL,
    PRIMARY KEY (tag, task)
);
CREATE INDEX task_tag_task ON faena.task_tag (task);

-- The idempotency keys of tasks, as long as their tasks exist. fingerprint: SHA-256 of the request.
CREATE TABLE faena.task_key (
    key         text NOT NULL PRIMARY KEY,
    task        uuid NOT NULL,
    fingerprint bytea NOT NULL
);
CREATE INDEX task_key_task ON faena.task_key (task);

-- The history of tasks, without gaps. record: JSON.
CREATE TABLE faena.task_record (
    task     uuid NOT NULL,
    sequence bigint NOT NULL,
    record   text NOT NULL,
    PRIMARY KEY (task, sequence)
);

-- Events that a task has received, so that a second delivery gets the answer of the first. answer: JSON.
CREATE TABLE faena.task_inbox (
    task     uuid NOT NULL,
    event_id text NOT NULL,
    answer   text NOT NULL,
    PRIMARY KEY (task, event_id)
);

-- Jobs whose end a task waits for. state, epoch: the stay in a state that submitted the job. ended: the job has ended or was deleted,
-- written with its end, and the task does not know it yet.
CREATE TABLE faena.task_job (
    job   uuid PRIMARY KEY,
    task  uuid NOT NULL,
    name  text NOT NULL,
    state text NOT NULL,
    epoch bigint NOT NULL,
    ended boolean NOT NULL DEFAULT false
);
CREATE INDEX task_job_task ON faena.task_job (task);
CREATE INDEX task_job_ended ON faena.task_job (task) WHERE ended;

-- --------------------------------------------------------------------------------------------------------------- events and outbox

-- Events in commit order. Those of tasks are always recorded, all others only if a subscription matches them.
-- subject: the job, task, worker or schedule. sequence: counts per subject. data: JSON.
-- docs/decisions/004-events-from-rows.md explains how triggers create events.
-- id: random. It has no index, because random values would make almost every event write another page of that index.
CREATE TABLE faena.event (
    position    bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id          uuid NOT NULL,
    type        text NOT NULL,
    subject     uuid NOT NULL,
    sequence    bigint NOT NULL,
    at          bigint NOT NULL,
    correlation text NOT NULL,
    actor       text NOT NULL,
    traceparent text,
    data        text NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX event_at ON faena.event (at);
CREATE INDEX event_subject ON faena.event (subject, sequence);
CREATE INDEX event_correlation ON faena.event (correlation, position);

-- The last event of each subject. state: of a job, as its last event reported it.
CREATE TABLE faena.event_head (
    subject  uuid PRIMARY KEY,
    sequence bigint NOT NULL DEFAULT 0,
    state    smallint
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);

-- Subscriptions to events. queued: it is a sink; its events wait in the outbox until it confirms them. Otherwise they are only kept.
-- park: events of a subject wait for a rejected one before them. until: when the subscription expires unless it is renewed.
-- since: events after this position are kept. sent: number of confirmed events. down_since, down_reason: the sink is unusable.
CREATE TABLE faena.subscription (
    id          smallint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name        text NOT NULL UNIQUE,
    queued      boolean NOT NULL,
    park        boolean NOT NULL,
    until       bigint NOT NULL,
    since       bigint NOT NULL DEFAULT 0,
    sent        bigint NOT NULL DEFAULT 0,
    down_since  bigint,
    down_reason text
);

-- Event types of a subscription, as patterns for LIKE.
CREATE TABLE faena.subscription_pattern (
    subscription smallint NOT NULL,
    pattern      text NOT NULL,
    PRIMARY KEY (subscription, pattern)
);

-- Events to be published. sink: id of the subscription. partition: 0 to 15, derived from the subject.
-- attempts: how often the sink rejected this event. due_at: not before this time.
CREATE TABLE faena.outbox (
    sink      smallint NOT NULL,
    partition smallint NOT NULL,
    position  bigint NOT NULL,
    subject   uuid NOT NULL,
    attempts  smallint NOT NULL DEFAULT 0,
    due_at    bigint NOT NULL DEFAULT 0,
    error     text,
    PRIMARY KEY (sink, partition, position)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX outbox_late ON faena.outbox (sink, subject, position) WHERE due_at > 0;
CREATE INDEX outbox_due ON faena.outbox (sink, due_at) WHERE due_at > 0;
CREATE INDEX outbox_position ON faena.outbox (position);

-- The node that publishes a partition. epoch: grows with each owner.
CREATE TABLE faena.outbox_lease (
    sink      smallint NOT NULL,
    partition smallint NOT NULL,
    node      uuid,
    epoch     bigint NOT NULL DEFAULT 0,
    until     bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (sink, partition)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_cost_delay = 0);

-- The nodes that share the partitions of a sink. until: when a silent node is left out.
CREATE TABLE faena.outbox_node (
    sink  smallint NOT NULL,
    node  uuid NOT NULL,
    until bigint NOT NULL,
    PRIMARY KEY (sink, node)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_cost_delay = 0);

-- Events that a sink rejected too often. sink: name of the subscription.
CREATE TABLE faena.outbox_dlq (
    id                  uuid PRIMARY KEY,
    sink                text NOT NULL,
    position            bigint NOT NULL,
    original_event_id   uuid NOT NULL,
    aggregate_id        uuid NOT NULL,
    aggregate_type      text NOT NULL,
    event_type          text NOT NULL,
    payload             text NOT NULL,
    metadata            text,
    error_message       text NOT NULL,
    retry_count         integer NOT NULL DEFAULT 0,
    original_created_at timestamptz NOT NULL,
    moved_at            timestamptz NOT NULL,
    resolved_at         timestamptz,
    resolved_by         text,
    resolution_notes    text
);
CREATE INDEX outbox_dlq_moved ON faena.outbox_dlq (moved_at);
CREATE INDEX outbox_dlq_open ON faena.outbox_dlq (sink, aggregate_id) WHERE resolved_at IS NULL;
CREATE INDEX outbox_dlq_position ON faena.outbox_dlq (position);

-- Messages from brokers that were processed, once per consumer.
CREATE TABLE faena.inbox (
    consumer text NOT NULL,
    id       text NOT NULL,
    at       bigint NOT NULL,
    PRIMARY KEY (consumer, id)
);
CREATE INDEX inbox_at ON faena.inbox (at);

-- ----------------------------------------------------------------------------------------------------------------- event functions

-- Event positions are assigned before the commit, so a reader that only looks at visible rows would skip what is committed late.
-- A transaction that is about to take positions therefore announces the last position before its own by a shared advisory lock
-- (0x6661 in the upper 16 bits) until it ends. Every position up to the lowest announced one, and up to the last one assigned before
-- the check, is settled. SECURITY DEFINER: a role that may write events need not be allowed to read their sequence.
CREATE FUNCTION faena.announce_events() RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog AS $$
DECLARE
    transaction text := pg_current_xact_id()::text;
BEGIN
    IF current_setting('faena.announced', true) IS DISTINCT FROM transaction THEN
        PERFORM pg_advisory_xact_lock_shared((x'6661'::bigint << 48) | (SELECT last_value FROM faena.event_position_seq));
        PERFORM set_config('faena.announced', transaction, true);
    END IF;
END $$;

-- Returns the position up to which every event is committed or will never exist.
CREATE FUNCTION faena.settled_events() RETURNS bigint LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog AS $$
DECLARE
    assigned bigint;
    announced bigint;
BEGIN
    SELECT CASE WHEN is_called THEN last_value ELSE 0 END INTO assigned FROM faena.event_position_seq;
    SELECT min((l.classid::bigint << 32 | l.objid::bigint) & x'ffffffffffff'::bigint) INTO announced FROM pg_locks l
    WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.classid::bigint >> 16 = x'6661'::bigint
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database());
    RETURN least(assigned, coalesce(announced, assigned));
END $$;

-- Records the events of a batch that match a subscription, and queues them for the sinks whose patterns they match.
-- The row of a subject in event_head stays locked until the commit, so its next event gets a later sequence and a later position.
-- Tasks write their events themselves: the row of a task is locked, and numbers its events.
CREATE FUNCTION faena.put_events(
    types text[], subjects uuid[], ats bigint[], correlations text[], actors text[], traceparents text[], datas text[]) RETURNS void
LANGUAGE plpgsql SET enable_hashjoin = on SET enable_sort = on AS $$
BEGIN
    PERFORM faena.announce_events();
    INSERT INTO faena.event_head (subject) SELECT DISTINCT s FROM unnest(subjects) AS s ORDER BY s ON CONFLICT DO NOTHING;
    PERFORM FROM faena.event_head WHERE subject = ANY(subjects) ORDER BY subject FOR UPDATE;
    WITH wanted AS MATERIALIZED (
        SELECT g.*, row_number() OVER (PARTITION BY g.subject ORDER BY g.n) AS step
        FROM unnest(types, subjects, ats, correlations, actors, traceparents, datas)
             WITH ORDINALITY AS g(type, subject, at, correlation, actor, traceparent, data, n)
        WHERE EXISTS (SELECT FROM faena.subscription_pattern p WHERE g.type LIKE p.pattern)),
    put AS (
        INSERT INTO faena.event (id, type, subject, sequence, at, correlation, actor, traceparent, data)
        SELECT gen_random_uuid(), w.type, w.subject, h.sequence + w.step, w.at, w.correlation, w.actor, w.traceparent, w.data
        FROM wanted w JOIN faena.event_head h ON h.subject = w.subject ORDER BY w.n
        RETURNING position, type, subject),
    queued AS (
        INSERT INTO faena.outbox (sink, partition, position, subject)
        SELECT s.id, get_byte(uuid_send(put.subject), 15) & 15, put.position, put.subject
        FROM put JOIN faena.subscription s
            ON s.queued AND EXISTS (SELECT FROM faena.subscription_pattern p WHERE p.subscription = s.id AND put.type LIKE p.pattern))
    UPDATE faena.event_head h SET sequence = h.sequence + c.steps
    FROM (SELECT subject, count(*) AS steps FROM wanted GROUP BY subject) AS c WHERE h.subject = c.subject;
END $$;

-- Records that jobs have moved to other states. Adds the events of intermediate states before: that the job was created (in the same
-- transaction), and that its run had started.
CREATE FUNCTION faena.put_states(
    ids uuid[], states smallint[], ats bigint[], runs bigint[], workers uuid[], retries smallint[], errors text[], reasons text[],
    starts bigint[]) RETURNS void
LANGUAGE plpgsql SET enable_hashjoin = on SET enable_sort = on AS $$
DECLARE
    state_names CONSTANT text[] := ARRAY['PENDING', 'QUEUED', 'SCHEDULED', 'ASSIGNED', 'PROCESSING', 'RETRYING', 'COMPLETED', 'FAILED', 'CANCELLED'];
    actor_of_session text := coalesce(nullif(current_setting('faena.actor', true), ''), 'system');
    clock bigint := (extract(epoch FROM clock_timestamp()) * 1000)::bigint;
    events record;
    new_subjects uuid[];
BEGIN
    WITH added AS (
        INSERT INTO faena.event_head (subject) SELECT s FROM unnest(ids) AS s ORDER BY s ON CONFLICT DO NOTHING RETURNING subject)
    SELECT array_agg(subject) INTO new_subjects FROM added;
    PERFORM FROM faena.event_head WHERE subject = ANY(ids) ORDER BY subject FOR UPDATE;
    WITH moved AS MATERIALIZED (
        SELECT g.id, g.state, coalesce(g.at, clock) AS at, g.run, g.retry_count, g.error, g.reason, g.started_at, g.n, h.state AS was,
               coalesce(g.id = ANY(new_subjects), false) AND j.xmin = pg_current_xact_id()::xid AS is_new,
               h.state IN ({QUEUED}, {SCHEDULED}, {ASSIGNED})
                   AND g.state IN ({RETRYING}, {COMPLETED}, {FAILED}, {CANCELLED}) AND g.started_at IS NOT NULL AS has_run,
               -- A run that has started counts, and one that failed. A job that waits for its next attempt counts its last run as a retry.
               g.retry_count + coalesce((j.options::json ->> 'earlierAttempts')::integer, 0)
                   + (g.state IN ({PROCESSING}, {COMPLETED}) OR g.state IN ({FAILED}, {CANCELLED}) AND g.run > 0
                       AND (g.started_at IS NOT NULL OR g.state = {FAILED}))::integer AS attempt,
               coalesce(j.correlation, g.id::text) AS correlation, j.options::json AS options, l.type AS kind, l.queue,
               g.reason IN ('orphaned', 'timeout', 'expired', 'no_handler') OR actor_of_session = 'system:guardian' AS by_guardian,
               CASE WHEN g.worker IS NULL THEN actor_of_session
                    ELSE 'worker:' || coalesce((SELECT w.key FROM faena.worker w WHERE w.id = g.worker), 'unknown') END AS actor
        FROM unnest(ids, states, ats, runs, workers, retries, errors, reasons, starts)
             WITH ORDINALITY AS g(id, state, at, run, worker, retry_count, error, reason, started_at, n)
        JOIN faena.event_head h ON h.subject = g.id
        JOIN faena.job j ON j.id = g.id
        JOIN faena.lane l ON l.id = j.lane
        WHERE h.state IS DISTINCT FROM g.state),
    due AS (
        SELECT m.*, s.*
        FROM moved m CROSS JOIN LATERAL (VALUES
            (1, 'job.created', {PENDING}::smallint, NULL::smallint, m.at, m.is_new),
            (2, 'job.status.changed', {PROCESSING}::smallint, m.was, m.started_at, m.has_run),
            (3, CASE m.state WHEN {COMPLETED} THEN 'job.completed' WHEN {FAILED} THEN 'job.failed' ELSE 'job.status.changed' END, m.state,
                CASE WHEN m.has_run THEN {PROCESSING}::smallint WHEN m.is_new THEN {PENDING}::smallint ELSE m.was END, m.at,
                NOT (m.is_new AND m.state = {PENDING})),
            (4, 'job.dead_lettered', {FAILED}::smallint, {FAILED}::smallint, m.at, m.state = {FAILED})) AS s(part, type, status, previous, since, applies)
        WHERE s.applies)
    SELECT array_agg(type ORDER BY n, part) AS types, array_agg(id ORDER BY n, part) AS subjects,
           array_agg(since ORDER BY n, part) AS ats, array_agg(correlation ORDER BY n, part) AS correlations,
           -- The actor of a start is the worker, even if the guardian ends the run.
           array_agg(CASE WHEN by_guardian AND status <> {PROCESSING} THEN 'system:guardian' ELSE actor END ORDER BY n, part) AS actors, array_agg(options ->> 'traceparent' ORDER BY n, part) AS traceparents,
           array_agg(json_strip_nulls(json_build_object(
               'jobId', id, 'name', coalesce(options ->> 'name', kind), 'type', kind, 'queue', queue, 'status', state_names[status + 1],
               'previousStatus', state_names[previous + 1], 'run', CASE WHEN part > 1 THEN nullif(run, 0) END,
               'attempt', CASE WHEN part > 1 THEN attempt ELSE 0 END, 'retryCount', retry_count,
               'error', CASE WHEN part > 2 THEN left(error, 8192) END, 'errorReason', CASE WHEN part > 2 THEN reason END,
               'scheduleId', options ->> 'scheduleId', 'scheduleDue', options ->> 'scheduleDue'))::text ORDER BY n, part) AS datas
    INTO events FROM due;
    IF events.types IS NOT NULL THEN
        PERFORM faena.put_events(events.types, events.subjects, events.ats, events.correlations, events.actors, events.traceparents,
            events.datas);
    END IF;
    UPDATE faena.event_head h SET state = g.state FROM unnest(ids, states) AS g(id, state)
    WHERE h.subject = g.id AND h.state IS DISTINCT FROM g.state;
END $$;

-- The trigger functions of the tables in which jobs move, one per table.
CREATE FUNCTION faena.event_ready() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM faena.put_states(array_agg(id), array_agg({QUEUED}::smallint), array_agg(NULL::bigint), array_agg(NULL::bigint), array_agg(NULL::uuid),
        array_agg(retry_count), array_agg(NULL::text), array_agg(NULL::text), array_agg(NULL::bigint))
    FROM added HAVING count(*) > 0;
    RETURN NULL;
END $$;

-- A job that waits for its next attempt: the event includes how the last run ended.
CREATE FUNCTION faena.event_waiting() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM faena.put_states(array_agg(w.id), array_agg(w.state), array_agg(NULL::bigint), array_agg(a.run), array_agg(a.worker),
        array_agg(w.retry_count), array_agg(a.error), array_agg(a.reason), array_agg(a.started_at))
    FROM added w LEFT JOIN LATERAL (
        SELECT * FROM faena.attempt a WHERE a.id = w.id AND w.state = {RETRYING} ORDER BY a.run DESC LIMIT 1) AS a ON true
    HAVING count(*) > 0;
    RETURN NULL;
END $$;

-- A claim: SCHEDULED while the worker's process is being started, otherwise ASSIGNED.
CREATE FUNCTION faena.event_claim() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM faena.put_states(array_agg(i.id), array_agg(i.state), array_agg(i.claimed_at), array_agg(i.run), array_agg(NULL::uuid),
        array_agg(i.retry_count), array_agg(NULL::text), array_agg(NULL::text), array_agg(NULL::bigint))
    FROM (SELECT u.id, c.claimed_at, c.run, coalesce(c.retries[u.n], 0::smallint) AS retry_count,
                 CASE WHEN EXISTS (SELECT FROM faena.worker w WHERE w.id = c.owner AND w.ended_at IS NULL AND w.state < {WORKER_READY})
                      THEN {SCHEDULED}::smallint ELSE {ASSIGNED}::smallint END AS state
          FROM added c, unnest(c.ids) WITH ORDINALITY AS u(id, n)) AS i
    HAVING count(*) > 0;
    RETURN NULL;
END $$;

-- The process of a worker has connected: its jobs are ASSIGNED now.
CREATE FUNCTION faena.event_worker_connected() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM faena.put_states(array_agg(i.id), array_agg({ASSIGNED}::smallint), array_agg(NULL::bigint), array_agg(i.run), array_agg(NULL::uuid),
        array_agg(i.retry_count), array_agg(NULL::text), array_agg(NULL::text), array_agg(NULL::bigint))
    FROM (SELECT h.subject AS id, c.run, coalesce(c.retries[u.n], 0::smallint) AS retry_count
          FROM faena.claim c, unnest(c.ids) WITH ORDINALITY AS u(id, n) JOIN faena.event_head h ON h.subject = u.id
          WHERE c.owner = NEW.id AND h.state = {SCHEDULED}) AS i
    HAVING count(*) > 0;
    RETURN NULL;
END $$;

CREATE FUNCTION faena.event_running() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM faena.put_states(array_agg(id), array_agg({PROCESSING}::smallint), array_agg(started_at), array_agg(run), array_agg(worker),
        array_agg(retry_count), array_agg(NULL::text), array_agg(NULL::text), array_agg(NULL::bigint))
    FROM added HAVING count(*) > 0;
    RETURN NULL;
END $$;

CREATE FUNCTION faena.event_done() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM faena.put_states(array_agg(id), array_agg({COMPLETED}::smallint), array_agg(finished_at), array_agg(run), array_agg(worker),
        array_agg(retry_count), array_agg(NULL::text), array_agg(NULL::text), array_agg(started_at))
    FROM added HAVING count(*) > 0;
    RETURN NULL;
END $$;

CREATE FUNCTION faena.event_ended() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM faena.put_states(array_agg(id), array_agg(state), array_agg(finished_at), array_agg(run), array_agg(worker),
        array_agg(retry_count), array_agg(error), array_agg(reason), array_agg(started_at))
    FROM added HAVING count(*) > 0;
    RETURN NULL;
END $$;

CREATE FUNCTION faena.event_subject_deleted() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM faena.event_head WHERE subject IN (SELECT id FROM removed);
    RETURN NULL;
END $$;

-- A job whose row was changed is not new: it gets its row in event_head before it moves.
CREATE FUNCTION faena.event_job_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO faena.event_head (subject) SELECT id FROM changed ORDER BY id ON CONFLICT DO NOTHING;
    RETURN NULL;
END $$;

CREATE FUNCTION faena.event_worker() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM faena.put_events(
        array_agg(CASE c.state WHEN {WORKER_TERMINATED} THEN 'worker.terminated' ELSE 'worker.status.changed' END ORDER BY c.sequence),
        array_agg(c.worker ORDER BY c.sequence), array_agg(c.at ORDER BY c.sequence), array_agg(w.key ORDER BY c.sequence),
        array_agg(coalesce(nullif(current_setting('faena.actor', true), ''), 'system')), array_agg(NULL::text),
        array_agg(json_strip_nulls(json_build_object('workerId', w.key, 'state',
            (ARRAY['Creating', 'Connecting', 'Ready', 'Busy', 'Draining', 'Terminating', 'Terminated'])[c.state + 1],
            'reason', c.reason))::text ORDER BY c.sequence))
    FROM added c JOIN faena.worker w ON w.id = c.worker HAVING count(*) > 0;
    RETURN NULL;
END $$;

CREATE FUNCTION faena.event_tick() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM faena.put_events(
        array_agg(CASE WHEN t.outcome IN ({TICK_FIRED}, {TICK_TRIGGERED}) THEN 'schedule.fired' ELSE 'schedule.missed' END ORDER BY t.due_at),
        array_agg(t.schedule ORDER BY t.due_at), array_agg(t.at ORDER BY t.due_at),
        array_agg(coalesce(t.job, t.schedule)::text ORDER BY t.due_at),
        array_agg(coalesce(nullif(current_setting('faena.actor', true), ''), 'system')), array_agg(NULL::text),
        array_agg(json_strip_nulls(json_build_object('scheduleId', t.schedule, 'name', s.name,
            'dueAt', to_char(to_timestamp(t.due_at / 1000.0) AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"'),
            'outcome', (ARRAY['fired', 'missed', 'skipped', 'triggered'])[t.outcome + 1], 'reason', t.reason, 'jobId', t.job,
            'throughAt', to_char(to_timestamp(t.through_at / 1000.0) AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"'),
            'count', t.count))::text ORDER BY t.due_at))
    FROM added t LEFT JOIN faena.schedule s ON s.id = t.schedule HAVING count(*) > 0;
    RETURN NULL;
END $$;

-- Switches events on. Until then they cost nothing. SECURITY DEFINER: a role that may only read and write the tables can switch.
CREATE FUNCTION faena.events_on() RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog AS $$
DECLARE
    name text;
BEGIN
    IF EXISTS (SELECT FROM pg_trigger WHERE tgrelid = 'faena.job'::regclass AND tgname = 'event_job_deleted') THEN
        RETURN;
    END IF;
    FOREACH name IN ARRAY ARRAY['ready', 'waiting', 'claim', 'running', 'done', 'ended', 'tick'] LOOP
        EXECUTE format('CREATE TRIGGER event_%1$s AFTER INSERT ON faena.%1$s REFERENCING NEW TABLE AS added
                        FOR EACH STATEMENT EXECUTE FUNCTION faena.event_%1$s()', name);
    END LOOP;
    CREATE TRIGGER event_worker AFTER INSERT ON faena.worker_change REFERENCING NEW TABLE AS added
        FOR EACH STATEMENT EXECUTE FUNCTION faena.event_worker();
    CREATE TRIGGER event_worker_connected AFTER UPDATE OF state ON faena.worker FOR EACH ROW
        WHEN (OLD.state < {WORKER_READY} AND NEW.state >= {WORKER_READY} AND NEW.ended_at IS NULL) EXECUTE FUNCTION faena.event_worker_connected();
    CREATE TRIGGER event_job_changed AFTER UPDATE ON faena.job REFERENCING NEW TABLE AS changed
        FOR EACH STATEMENT EXECUTE FUNCTION faena.event_job_changed();
    FOREACH name IN ARRAY ARRAY['job', 'worker', 'schedule'] LOOP
        EXECUTE format('CREATE TRIGGER event_%1$s_deleted AFTER DELETE ON faena.%1$s REFERENCING OLD TABLE AS removed
                        FOR EACH STATEMENT EXECUTE FUNCTION faena.event_subject_deleted()', name);
    END LOOP;
END $$;

-- Switches events off again, when no subscription is left.
CREATE FUNCTION faena.events_off() RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog AS $$
DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['ready', 'waiting', 'claim', 'running', 'done', 'ended', 'tick'] LOOP
        EXECUTE format('DROP TRIGGER IF EXISTS event_%1$s ON faena.%1$s', name);
    END LOOP;
    DROP TRIGGER IF EXISTS event_worker ON faena.worker_change;
    DROP TRIGGER IF EXISTS event_worker_connected ON faena.worker;
    DROP TRIGGER IF EXISTS event_job_changed ON faena.job;
    FOREACH name IN ARRAY ARRAY['job', 'worker', 'schedule'] LOOP
        EXECUTE format('DROP TRIGGER IF EXISTS event_%1$s_deleted ON faena.%1$s', name);
    END LOOP;
    DELETE FROM faena.event_head;
END $$;
