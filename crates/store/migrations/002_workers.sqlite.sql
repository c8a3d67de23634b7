-- Workers have a life of their own: a hand-out belongs to a node or to one of them, so `claim.owner` is the owner's id, whoever it is.

-- One row per life of a worker, from its registration to its end. key: what it calls itself; one living row per key.
-- kind: 0 built in, 1 remote, 2 of a pool. node: the server it is connected to. session: grows with each connection.
-- state: 0 Creating … 6 Terminated. capabilities, queues: JSON arrays. connected_at: since when it has this session.
-- deadline: when it is given up for lost; absent while its node looks after it. drain: somebody wants it to take no more jobs.
CREATE TABLE worker (
    id            BLOB PRIMARY KEY,
    key           TEXT NOT NULL,
    name          TEXT,
    kind          INTEGER NOT NULL,
    transport          TEXT NOT NULL,
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
    breaker       TEXT NOT NULL DEFAULT 'closed'
) WITHOUT ROWID;
CREATE UNIQUE INDEX worker_living ON worker (key) WHERE ended_at IS NULL;
CREATE INDEX worker_key ON worker (key, registered_at);
CREATE INDEX worker_node ON worker (node) WHERE ended_at IS NULL;
CREATE INDEX worker_deadline ON worker (deadline) WHERE deadline IS NOT NULL AND ended_at IS NULL;
CREATE INDEX worker_ended ON worker (ended_at) WHERE ended_at IS NOT NULL;
-- Those that are not connected yet: what they hold shows as SCHEDULED.
CREATE INDEX worker_coming ON worker (state) WHERE ended_at IS NULL AND state < 2;

-- Its states, the newest 200 of them.
CREATE TABLE worker_change (
    worker   BLOB NOT NULL,
    sequence INTEGER NOT NULL,
    at       INTEGER NOT NULL,
    state    INTEGER NOT NULL,
    reason   TEXT,
    PRIMARY KEY (worker, sequence)
) WITHOUT ROWID;

-- How many steps there are, if the worker knew.
ALTER TABLE step ADD COLUMN total INTEGER;

CREATE INDEX claim_owner ON claim (owner);
