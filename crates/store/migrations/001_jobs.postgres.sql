-- A job's state is where its id stands: ready, waiting, a block (with or without a running row), done, ended.
-- The meaning of every column stands in the SQLite twin of this file.

CREATE TABLE faena.lane (
    id       integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue    text NOT NULL,
    type     text NOT NULL,
    priority smallint NOT NULL,
    UNIQUE (queue, type, priority)
);

CREATE TABLE faena.job (
    id          uuid PRIMARY KEY,
    lane        integer NOT NULL,
    correlation text,
    options     text,
    payload     text NOT NULL
);
CREATE INDEX job_correlation ON faena.job (correlation) WHERE correlation IS NOT NULL;

-- The hot tables are vacuumed early and without pauses: their dead rows stand in the way of claims.
CREATE TABLE faena.ready (
    lane        integer NOT NULL,
    ready_at    bigint NOT NULL,
    id          uuid NOT NULL,
    retry_count smallint NOT NULL,
    start_first boolean NOT NULL,
    PRIMARY KEY (lane, ready_at, id)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000, autovacuum_vacuum_cost_delay = 0,
        autovacuum_vacuum_insert_scale_factor = 0.5);
CREATE INDEX ready_id ON faena.ready (lane, id);

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

CREATE SEQUENCE faena.run;
CREATE TABLE faena.claim (
    run            bigint PRIMARY KEY,
    owner          uuid NOT NULL,
    claimed_at     bigint NOT NULL,
    first_ready_at bigint NOT NULL,
    ids            uuid[] NOT NULL,
    retries        smallint[],
    strict         boolean NOT NULL DEFAULT false
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_cost_delay = 0);
-- Ids do not compress; trying to costs time at every claim.
ALTER TABLE faena.claim ALTER COLUMN ids SET STORAGE EXTERNAL;

CREATE TABLE faena.running (
    id          uuid PRIMARY KEY,
    lane        integer NOT NULL,
    run         bigint NOT NULL,
    node        uuid NOT NULL,
    worker      uuid NOT NULL,
    retry_count smallint NOT NULL,
    ready_at    bigint NOT NULL,
    started_at  bigint NOT NULL,
    updated_at  bigint NOT NULL,
    progress    text
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);

-- Daily partitions are made ahead; what has none yet falls into the default one.
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
-- Each partition has its own key: narrower than one over all of them, which would have to contain the time, and it makes
-- telling a completion twice harmless.
CREATE TABLE faena.done_default PARTITION OF faena.done (PRIMARY KEY (lane, id)) DEFAULT;

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

CREATE TABLE faena.job_log (
    sequence bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id       uuid NOT NULL,
    run      bigint,
    log      text NOT NULL
);
CREATE INDEX job_log_id ON faena.job_log (id, sequence);

CREATE TABLE faena.step (
    id     uuid NOT NULL,
    name   text NOT NULL,
    run    bigint NOT NULL,
    at     bigint NOT NULL,
    result text NOT NULL,
    PRIMARY KEY (id, name)
);

CREATE TABLE faena.label (
    kind  smallint NOT NULL,
    value text NOT NULL,
    id    uuid NOT NULL,
    PRIMARY KEY (kind, value, id)
);

CREATE TABLE faena.job_key (
    kind        smallint NOT NULL,
    key         text NOT NULL,
    id          uuid NOT NULL,
    fingerprint bytea,
    PRIMARY KEY (kind, key)
);

CREATE TABLE faena.dependency (
    parent uuid NOT NULL,
    child  uuid NOT NULL,
    PRIMARY KEY (parent, child)
);
CREATE INDEX dependency_child ON faena.dependency (child, parent);

CREATE TABLE faena.expiry (
    expires_at bigint NOT NULL,
    id         uuid NOT NULL,
    PRIMARY KEY (expires_at, id)
);

CREATE TABLE faena.cancel_request (
    id     uuid PRIMARY KEY,
    reason text NOT NULL,
    at     bigint NOT NULL
);

CREATE TABLE faena.node (
    id          uuid PRIMARY KEY,
    name        text NOT NULL,
    started_at  bigint NOT NULL,
    lease_until bigint NOT NULL
) WITH (fillfactor = 50);

-- One row per writer (shard), so that writers never wait for each other; a count is the sum over the shards.
CREATE TABLE faena.counter (
    shard smallint NOT NULL,
    lane  integer NOT NULL,
    tally smallint NOT NULL,
    n     bigint NOT NULL,
    PRIMARY KEY (shard, lane, tally)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0);
