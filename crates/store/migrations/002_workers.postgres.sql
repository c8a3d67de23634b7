-- Workers have a life of their own: a hand-out belongs to a node or to one of them, so `claim.owner` is the owner's id, whoever it is.
-- The meaning of every column stands in the SQLite twin of this file.

CREATE TABLE faena.worker (
    id            uuid PRIMARY KEY,
    key           text NOT NULL,
    name          text,
    kind          smallint NOT NULL,
    transport          text NOT NULL,
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
    breaker       text NOT NULL DEFAULT 'closed'
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0);
CREATE UNIQUE INDEX worker_living ON faena.worker (key) WHERE ended_at IS NULL;
CREATE INDEX worker_key ON faena.worker (key, registered_at);
CREATE INDEX worker_node ON faena.worker (node) WHERE ended_at IS NULL;
CREATE INDEX worker_deadline ON faena.worker (deadline) WHERE deadline IS NOT NULL AND ended_at IS NULL;
CREATE INDEX worker_ended ON faena.worker (ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX worker_coming ON faena.worker (state) WHERE ended_at IS NULL AND state < 2;

CREATE TABLE faena.worker_change (
    worker   uuid NOT NULL,
    sequence bigint NOT NULL,
    at       bigint NOT NULL,
    state    smallint NOT NULL,
    reason   text,
    PRIMARY KEY (worker, sequence)
);

ALTER TABLE faena.step ADD COLUMN total integer;

CREATE INDEX claim_owner ON faena.claim (owner);
