-- Schedules and what became of their due times.

-- spec: JSON, what people said. anchor_at: what intervals are counted from. cursor_at: every due time up to here has been dealt with.
-- next_at: the next due time; absent when it is not active. last_job: the job that it made last.
-- recent: JSON, jobs that it made and that are not known to be over. queued: the job that waits for those.
-- finished: why it will not fire any more by itself.
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

-- One row per due time that has been dealt with, at most. manual: 1 for runs that a person wanted. outcome: 0 fired, 1 missed, 2 skipped,
-- 3 triggered. through_at, count: it stands for that many due times, up to there (count absent: more than were counted).
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
