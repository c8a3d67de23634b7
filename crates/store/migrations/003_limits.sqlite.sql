-- Limits, queues' settings, webhooks, audit, bulk actions.

-- keyed: its jobs have a concurrencyKey and stand in one line per key. Jobs from before this schema stay in lanes without.
CREATE TABLE lane_with_keyed (
    id       INTEGER PRIMARY KEY,
    queue    TEXT NOT NULL,
    type     TEXT NOT NULL,
    priority INTEGER NOT NULL,
    keyed    INTEGER NOT NULL DEFAULT 0,
    UNIQUE (queue, type, priority, keyed)
);
INSERT INTO lane_with_keyed (id, queue, type, priority) SELECT id, queue, type, priority FROM lane;
DROP TABLE lane;
ALTER TABLE lane_with_keyed RENAME TO lane;

-- key: the first eight bytes of the SHA-256 of the concurrencyKey; present in keyed lanes and only there.
ALTER TABLE ready ADD COLUMN key INTEGER;
CREATE INDEX ready_key ON ready (lane, key, ready_at, id) WHERE key IS NOT NULL;

-- One row per key with ready jobs in a keyed lane. turn: the order of the lines of a lane: the ready time of its first job, or, in
-- a queue that is fair, when it was served last. open: 0 while the key is at its limit; opens_at: when a rate lets it go on.
-- limited_at, limited_by: since when its first job has waited for which limit, the last time.
CREATE TABLE key_queue (
    lane       INTEGER NOT NULL,
    key        INTEGER NOT NULL,
    turn       INTEGER NOT NULL,
    open       INTEGER NOT NULL DEFAULT 1,
    opens_at   INTEGER,
    limited_at INTEGER,
    limited_by TEXT,
    PRIMARY KEY (lane, key)
) WITHOUT ROWID;
CREATE INDEX key_queue_open ON key_queue (lane, turn, key) WHERE open = 1;
CREATE INDEX key_queue_opens ON key_queue (opens_at) WHERE opens_at IS NOT NULL;
CREATE INDEX key_queue_key ON key_queue (key);

-- The jobs with a concurrencyKey that are in somebody's hands.
CREATE TABLE key_in_flight (
    key INTEGER NOT NULL,
    id  BLOB NOT NULL,
    PRIMARY KEY (key, id)
) WITHOUT ROWID;

-- scope: 0 the whole system (name ''), 1 a queue, 2 a type, 3 a key (or, with * at its end, each key that begins so).
-- rate_count starts per rate_period_ms; tokens: what is left of them at tokens_at (of a key: in bucket).
-- origin: config or api; what was set at run time outlives the configuration. reached_at: when it last held a job back.
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

CREATE TABLE bucket (
    key    INTEGER PRIMARY KEY,
    tokens REAL NOT NULL,
    at     INTEGER NOT NULL
);

-- What was said about a queue. fairness: 0 by waiting time, 1 in turn by key.
CREATE TABLE queue (
    name         TEXT PRIMARY KEY,
    strict       INTEGER,
    fairness     INTEGER,
    origin       TEXT NOT NULL,
    paused_at    INTEGER,
    paused_by    TEXT,
    pause_reason TEXT
) WITHOUT ROWID;

-- Webhooks. state: 0 waiting, 1 sending, 2 delivered, 3 failed. due_at: when it is to be sent, or, while it is being sent, until
-- when the sender must have told how it went; absent when it is over. attempts: begun so far; spent: those of them that were
-- begun before somebody asked for it again; lost: those since then of which nobody told how they went.
-- host: with its port. Each host has a line of its own, so that one that does not answer stands in nobody's way.
CREATE TABLE webhook (
    id          BLOB PRIMARY KEY,
    job         BLOB NOT NULL,
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
CREATE INDEX webhook_line ON webhook (host, due_at, id) WHERE due_at IS NOT NULL;
CREATE INDEX webhook_job ON webhook (job, id);
CREATE INDEX webhook_state ON webhook (state, id);
CREATE INDEX webhook_host ON webhook (host, id);
CREATE INDEX webhook_settled ON webhook (settled_at) WHERE settled_at IS NOT NULL;

-- answer: the first KiB of it.
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

-- Every act of a person or key. details: JSON.
CREATE TABLE audit (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    at       INTEGER NOT NULL,
    actor    TEXT NOT NULL,
    action   TEXT NOT NULL,
    target   TEXT NOT NULL,
    details  TEXT NOT NULL,
    count    INTEGER NOT NULL
);

-- One action on every job that a filter finds, done little by little. action: cancel, retry or delete. filter: JSON.
-- last: the job that was acted on last; only jobs after it, up to `upto`, are still to come. due_at: when it goes on, or, while a node is at it,
-- until when that must have told; absent when it is over.
CREATE TABLE bulk (
    id          BLOB PRIMARY KEY,
    action      TEXT NOT NULL,
    filter      TEXT NOT NULL,
    actor       TEXT NOT NULL,
    per_second  INTEGER NOT NULL,
    created_at  INTEGER NOT NULL,
    upto        BLOB NOT NULL,
    last        BLOB,
    matched     INTEGER NOT NULL,
    done        INTEGER NOT NULL DEFAULT 0,
    skipped     INTEGER NOT NULL DEFAULT 0,
    due_at      INTEGER,
    finished_at INTEGER,
    error       TEXT
) WITHOUT ROWID;
CREATE INDEX bulk_due ON bulk (due_at) WHERE due_at IS NOT NULL;
