-- Events, and the outbox that brings them to sinks. docs/decisions/004-events-from-rows.md says how they come to be.

-- What happened, in the order in which it was committed. subject: the job, worker, schedule … it happened to. sequence: counts per subject.
-- data: JSON.
CREATE TABLE event (
    position    INTEGER PRIMARY KEY AUTOINCREMENT,
    id          BLOB NOT NULL UNIQUE,
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

-- How far the events of a subject have come. state: of a job, as it was last told.
CREATE TABLE event_head (
    subject  BLOB PRIMARY KEY,
    sequence INTEGER NOT NULL DEFAULT 0,
    state    INTEGER
) WITHOUT ROWID;

-- Who wants events. queued: they wait in the outbox until it has confirmed them; without, they are only kept. until: the mode is forgotten
-- unless it is repeated. park: what follows a bad message of the same subject waits for it. sent: how many were confirmed.
-- down_since, down_reason: the sink as a whole is unusable. since: everything that happened after this
-- position is kept; before, nobody wanted it, or it was removed as old.
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

-- Of which types: SQLite: a pattern for GLOB.
CREATE TABLE subscription_pattern (
    subscription INTEGER NOT NULL,
    pattern TEXT NOT NULL,
    PRIMARY KEY (subscription, pattern)
) WITHOUT ROWID;

-- Events on their way. partition: 0 to 15, of the subject. attempts: how often the sink refused this very message. due_at: not before.
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

-- Which node publishes a partition to a sink, until when. epoch: grows with each holder.
CREATE TABLE outbox_lease (
    sink      INTEGER NOT NULL,
    partition INTEGER NOT NULL,
    node      BLOB,
    epoch     INTEGER NOT NULL DEFAULT 0,
    until     INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (sink, partition)
) WITHOUT ROWID;

-- Which nodes ask for parts of a sink, whether they have any or not: they share. until: of who is silent since then, nobody thinks any more.
CREATE TABLE outbox_node (
    sink  INTEGER NOT NULL,
    node  BLOB NOT NULL,
    until INTEGER NOT NULL,
    PRIMARY KEY (sink, node)
) WITHOUT ROWID;

-- Messages that a sink would not take.
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

-- What came in from outside and was dealt with, each once per consumer.
CREATE TABLE inbox (
    consumer TEXT NOT NULL,
    id       TEXT NOT NULL,
    at       INTEGER NOT NULL,
    PRIMARY KEY (consumer, id)
) WITHOUT ROWID;
CREATE INDEX inbox_at ON inbox (at);
