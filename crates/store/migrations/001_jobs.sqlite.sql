-- A job's state is where its id stands: ready, waiting, a block (with or without a running row), done, ended.

CREATE TABLE lane (
    id       INTEGER PRIMARY KEY,
    queue    TEXT NOT NULL,
    type     TEXT NOT NULL,
    priority INTEGER NOT NULL,
    UNIQUE (queue, type, priority)
);

-- Written once, at submit. The creation time is in the id (UUIDv7). Absent correlation: the job's own id.
CREATE TABLE job (
    id          BLOB PRIMARY KEY,
    lane        INTEGER NOT NULL,
    correlation TEXT,
    options     TEXT,
    payload     TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX job_correlation ON job (correlation) WHERE correlation IS NOT NULL;

-- The primary key is the claim order.
CREATE TABLE ready (
    lane        INTEGER NOT NULL,
    ready_at    INTEGER NOT NULL,
    id          BLOB NOT NULL,
    retry_count INTEGER NOT NULL,
    start_first INTEGER NOT NULL,
    PRIMARY KEY (lane, ready_at, id)
) WITHOUT ROWID;
CREATE INDEX ready_id ON ready (lane, id);

-- state: 0 PENDING, 5 RETRYING. blocked: 1 when it waits for parents; due_at is then the next look.
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

-- One row per hand-out: these jobs are out under this run, in the hands of this node. ids: 16 bytes each; retries: 2 bytes
-- each, absent when all are 0. strict: one of them has ended otherwise than completed, or was deleted, so that each further
-- end has to be looked at closely.
CREATE TABLE claim (
    run            INTEGER PRIMARY KEY,
    owner          BLOB NOT NULL,
    claimed_at     INTEGER NOT NULL,
    first_ready_at INTEGER NOT NULL,
    ids            BLOB NOT NULL,
    retries        BLOB,
    strict         INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE run_sequence (last INTEGER NOT NULL);
INSERT INTO run_sequence VALUES (0);

-- Only of jobs that run for a while or tell something.
CREATE TABLE running (
    id          BLOB PRIMARY KEY,
    lane        INTEGER NOT NULL,
    run         INTEGER NOT NULL,
    node        BLOB NOT NULL,
    worker      BLOB NOT NULL,
    retry_count INTEGER NOT NULL,
    ready_at    INTEGER NOT NULL,
    started_at  INTEGER NOT NULL,
    updated_at  INTEGER NOT NULL,
    progress    TEXT
) WITHOUT ROWID;

-- COMPLETED.
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

-- state: 7 FAILED, 8 CANCELLED. run is 0 when it never ran.
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

-- How each run ended that was not the last word. state: what the job became.
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

-- Lines of the execution log that belong to no ended run.
CREATE TABLE job_log (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    id       BLOB NOT NULL,
    run      INTEGER,
    log      TEXT NOT NULL
);
CREATE INDEX job_log_id ON job_log (id, sequence);

CREATE TABLE step (
    id     BLOB NOT NULL,
    name   TEXT NOT NULL,
    run    INTEGER NOT NULL,
    at     INTEGER NOT NULL,
    result TEXT NOT NULL,
    PRIMARY KEY (id, name)
) WITHOUT ROWID;

-- kind: 0 tag, 1 schedule.
CREATE TABLE label (
    kind  INTEGER NOT NULL,
    value TEXT NOT NULL,
    id    BLOB NOT NULL,
    PRIMARY KEY (kind, value, id)
) WITHOUT ROWID;

-- kind: 0 idempotency key, 1 unique key (until the job has finished).
CREATE TABLE job_key (
    kind        INTEGER NOT NULL,
    key         TEXT NOT NULL,
    id          BLOB NOT NULL,
    fingerprint BLOB,
    PRIMARY KEY (kind, key)
) WITHOUT ROWID;

CREATE TABLE dependency (
    parent BLOB NOT NULL,
    child  BLOB NOT NULL,
    PRIMARY KEY (parent, child)
) WITHOUT ROWID;
CREATE INDEX dependency_child ON dependency (child, parent);

CREATE TABLE expiry (
    expires_at INTEGER NOT NULL,
    id         BLOB NOT NULL,
    PRIMARY KEY (expires_at, id)
) WITHOUT ROWID;

CREATE TABLE cancel_request (
    id     BLOB PRIMARY KEY,
    reason TEXT NOT NULL,
    at     INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TABLE node (
    id          BLOB PRIMARY KEY,
    name        TEXT NOT NULL,
    started_at  INTEGER NOT NULL,
    lease_until INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TABLE counter (
    lane  INTEGER NOT NULL,
    tally INTEGER NOT NULL,
    n     INTEGER NOT NULL,
    PRIMARY KEY (lane, tally)
) WITHOUT ROWID;
