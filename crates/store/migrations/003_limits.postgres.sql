-- Limits, queues' settings, webhooks, audit, bulk actions. The meaning of every column stands in the SQLite twin of this file.

ALTER TABLE faena.lane ADD COLUMN keyed boolean NOT NULL DEFAULT false;
ALTER TABLE faena.lane DROP CONSTRAINT lane_queue_type_priority_key;
ALTER TABLE faena.lane ADD UNIQUE (queue, type, priority, keyed);

ALTER TABLE faena.ready ADD COLUMN key bigint;
CREATE INDEX ready_key ON faena.ready (lane, key, ready_at, id) WHERE key IS NOT NULL;

CREATE TABLE faena.key_queue (
    lane       integer NOT NULL,
    key        bigint NOT NULL,
    turn       bigint NOT NULL,
    open       boolean NOT NULL DEFAULT true,
    opens_at   bigint,
    limited_at bigint,
    limited_by text,
    PRIMARY KEY (lane, key)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX key_queue_open ON faena.key_queue (lane, turn, key) WHERE open;
CREATE INDEX key_queue_opens ON faena.key_queue (opens_at) WHERE opens_at IS NOT NULL;
CREATE INDEX key_queue_key ON faena.key_queue (key);

CREATE TABLE faena.key_in_flight (
    key bigint NOT NULL,
    id  uuid NOT NULL,
    PRIMARY KEY (key, id)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0);

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

CREATE TABLE faena.bucket (
    key    bigint PRIMARY KEY,
    tokens double precision NOT NULL,
    at     bigint NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0);

-- How many jobs of a lane are in somebody's hands. No column of it changes with a count, so updates stay cheap.
CREATE INDEX counter_in_flight ON faena.counter (lane) WHERE tally = 2;

CREATE TABLE faena.queue (
    name         text PRIMARY KEY,
    strict       boolean,
    fairness     smallint,
    origin       text NOT NULL,
    paused_at    bigint,
    paused_by    text,
    pause_reason text
);

CREATE TABLE faena.webhook (
    id          uuid PRIMARY KEY,
    job         uuid NOT NULL,
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
CREATE INDEX webhook_line ON faena.webhook (host, due_at, id) WHERE due_at IS NOT NULL;
CREATE INDEX webhook_job ON faena.webhook (job, id);
CREATE INDEX webhook_state ON faena.webhook (state, id);
CREATE INDEX webhook_host ON faena.webhook (host, id);
CREATE INDEX webhook_settled ON faena.webhook (settled_at) WHERE settled_at IS NOT NULL;

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

CREATE TABLE faena.audit (
    sequence bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at       bigint NOT NULL,
    actor    text NOT NULL,
    action   text NOT NULL,
    target   text NOT NULL,
    details  text NOT NULL,
    count    bigint NOT NULL
);

CREATE TABLE faena.bulk (
    id          uuid PRIMARY KEY,
    action      text NOT NULL,
    filter      text NOT NULL,
    actor       text NOT NULL,
    per_second  bigint NOT NULL,
    created_at  bigint NOT NULL,
    upto        uuid NOT NULL,
    last        uuid,
    matched     bigint NOT NULL,
    done        bigint NOT NULL DEFAULT 0,
    skipped     bigint NOT NULL DEFAULT 0,
    due_at      bigint,
    finished_at bigint,
    error       text
);
CREATE INDEX bulk_due ON faena.bulk (due_at) WHERE due_at IS NOT NULL;
