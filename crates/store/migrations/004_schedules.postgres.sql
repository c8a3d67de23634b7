-- Schedules and what became of their due times. The meaning of every column stands in the SQLite twin of this file.

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
