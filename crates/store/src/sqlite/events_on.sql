-- The triggers that create events when jobs, workers and schedules change. They are temporary: they exist only on the connection of
-- the writer thread, and only while a subscription exists. Names in braces stand for numbers and are filled in by src/sql.rs.

-- The actor of the current transaction.
CREATE TEMP TABLE event_actor (actor TEXT NOT NULL);
INSERT INTO event_actor VALUES ('system');

-- The indexes of ids in a claim.
CREATE TEMP TABLE claim_index (n INTEGER PRIMARY KEY);
INSERT INTO claim_index
WITH RECURSIVE number (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM number WHERE n < 65535) SELECT n FROM number;

-- The jobs of claims.
CREATE TEMP VIEW claim_job AS
SELECT claim.run, claim.owner, claim.claimed_at, substr(claim.ids, 16 * claim_index.n + 1, 16) AS id,
       -- Two bytes each, little endian; absent if all are 0.
       coalesce((SELECT sum((instr('0123456789ABCDEF', substr(hex(substr(claim.retries, 2 * claim_index.n + 1, 2)), digit.at, 1)) - 1) * digit.worth)
           FROM (SELECT 1 AS at, 16 AS worth UNION ALL SELECT 2, 1 UNION ALL SELECT 3, 4096 UNION ALL SELECT 4, 256) digit
           WHERE claim.retries IS NOT NULL), 0) AS retry_count
FROM main.claim JOIN claim_index ON claim_index.n < length(claim.ids) / 16;

-- Records one event if a subscription matches it.
CREATE TEMP VIEW put_event AS
SELECT NULL AS type, NULL AS subject, NULL AS at, NULL AS correlation, NULL AS actor, NULL AS traceparent, NULL AS data;
CREATE TEMP TRIGGER put_event INSTEAD OF INSERT ON put_event
WHEN EXISTS (SELECT 1 FROM subscription_pattern p WHERE NEW.type GLOB p.pattern)
BEGIN
    INSERT OR IGNORE INTO event_head (subject) VALUES (NEW.subject);
    UPDATE event_head SET sequence = sequence + 1 WHERE subject = NEW.subject;
    INSERT INTO event (id, type, subject, sequence, at, correlation, actor, traceparent, data)
    SELECT unhex(hex(randomblob(6)) || '4' || substr(hex(randomblob(2)), 2) || '8' || substr(hex(randomblob(8)), 2)),
           NEW.type, NEW.subject, h.sequence, NEW.at, NEW.correlation, NEW.actor, NEW.traceparent, NEW.data
    FROM event_head h WHERE h.subject = NEW.subject;
    INSERT INTO outbox (sink, partition, position, subject)
    SELECT s.id, instr('0123456789ABCDEF', substr(hex(NEW.subject), 32)) - 1, last_insert_rowid(), NEW.subject
    FROM subscription s
    WHERE s.queued AND EXISTS (SELECT 1 FROM subscription_pattern p WHERE p.subscription = s.id AND NEW.type GLOB p.pattern);
END;

-- Records one event of a job. Looks up what the row does not have: its correlation id, name, type, queue and trace context.
CREATE TEMP VIEW put_job_event AS
SELECT NULL AS type, NULL AS id, NULL AS state, NULL AS was, NULL AS at, NULL AS run, NULL AS worker, NULL AS retry_count, NULL AS attempt,
       NULL AS error, NULL AS reason;
CREATE TEMP TRIGGER put_job_event INSTEAD OF INSERT ON put_job_event
BEGIN
    INSERT INTO put_event (type, subject, at, correlation, actor, traceparent, data)
    SELECT NEW.type, NEW.id, NEW.at,
           coalesce(j.correlation, lower(substr(hex(j.id), 1, 8) || '-' || substr(hex(j.id), 9, 4) || '-' || substr(hex(j.id), 13, 4) || '-'
               || substr(hex(j.id), 17, 4) || '-' || substr(hex(j.id), 21))),
           -- The actor of a start is the worker, even if the guardian ends the run.
           CASE WHEN NEW.state <> {PROCESSING} AND (NEW.reason IN ('orphaned', 'timeout', 'expired', 'no_handler')
                         OR (SELECT actor FROM event_actor) = 'system:guardian') THEN 'system:guardian'
                WHEN NEW.worker IS NULL THEN (SELECT actor FROM event_actor)
                ELSE 'worker:' || coalesce((SELECT key FROM worker WHERE id = NEW.worker), 'unknown') END,
           j.options ->> 'traceparent',
           json_patch('{}', json_object(
               'jobId', lower(substr(hex(j.id), 1, 8) || '-' || substr(hex(j.id), 9, 4) || '-' || substr(hex(j.id), 13, 4) || '-'
                   || substr(hex(j.id), 17, 4) || '-' || substr(hex(j.id), 21)),
               'name', coalesce(j.options ->> 'name', l.type),
               'type', l.type,
               'queue', l.queue,
               'status', json_extract('["PENDING","QUEUED","SCHEDULED","ASSIGNED","PROCESSING","RETRYING","COMPLETED","FAILED","CANCELLED"]',
                   '$[' || NEW.state || ']'),
               'previousStatus', CASE WHEN NEW.was IS NOT NULL THEN
                   json_extract('["PENDING","QUEUED","SCHEDULED","ASSIGNED","PROCESSING","RETRYING","COMPLETED","FAILED","CANCELLED"]',
                       '$[' || NEW.was || ']') END,
               'run', nullif(NEW.run, 0),
               'attempt', NEW.attempt + coalesce(j.options ->> 'earlierAttempts', 0),
               'retryCount', NEW.retry_count,
               'error', substr(NEW.error, 1, 8192),
               'errorReason', NEW.reason,
               'scheduleId', j.options ->> 'scheduleId',
               'scheduleDue', j.options ->> 'scheduleDue'))
    FROM job j JOIN lane l ON l.id = j.lane WHERE j.id = NEW.id;
END;

-- Records that a job has moved to another state. If the start of its run was not recorded, adds the event of that start first.
-- attempt: without the attempts before the last manual retry.
CREATE TEMP VIEW put_state AS
SELECT NULL AS id, NULL AS state, NULL AS at, NULL AS run, NULL AS worker, NULL AS retry_count, NULL AS attempt, NULL AS error,
       NULL AS reason, NULL AS started_at;
CREATE TEMP TRIGGER put_state INSTEAD OF INSERT ON put_state
WHEN NEW.state IS NOT (SELECT state FROM event_head WHERE subject = NEW.id)
BEGIN
    INSERT OR IGNORE INTO event_head (subject) VALUES (NEW.id);
    INSERT INTO put_job_event (type, id, state, was, at, run, worker, retry_count, attempt)
    SELECT 'job.status.changed', NEW.id, {PROCESSING}, h.state, NEW.started_at, NEW.run, NEW.worker, NEW.retry_count, NEW.attempt
    FROM event_head h
    WHERE h.subject = NEW.id AND h.state IN ({QUEUED}, {SCHEDULED}, {ASSIGNED})
      AND NEW.state IN ({RETRYING}, {COMPLETED}, {FAILED}, {CANCELLED}) AND NEW.started_at IS NOT NULL;
    UPDATE event_head SET state = {PROCESSING}
    WHERE subject = NEW.id AND state IN ({QUEUED}, {SCHEDULED}, {ASSIGNED})
      AND NEW.state IN ({RETRYING}, {COMPLETED}, {FAILED}, {CANCELLED}) AND NEW.started_at IS NOT NULL;
    INSERT INTO put_job_event (type, id, state, was, at, run, worker, retry_count, attempt, error, reason)
    SELECT CASE NEW.state WHEN {COMPLETED} THEN 'job.completed' WHEN {FAILED} THEN 'job.failed' ELSE 'job.status.changed' END,
           NEW.id, NEW.state, h.state, NEW.at, NEW.run, NEW.worker, NEW.retry_count, NEW.attempt, NEW.error, NEW.reason
    FROM event_head h WHERE h.subject = NEW.id;
    INSERT INTO put_job_event (type, id, state, was, at, run, worker, retry_count, attempt, error, reason)
    SELECT 'job.dead_lettered', NEW.id, {FAILED}, {FAILED}, NEW.at, NEW.run, NEW.worker, NEW.retry_count, NEW.attempt, NEW.error, NEW.reason
    WHERE NEW.state = {FAILED};
    UPDATE event_head SET state = NEW.state WHERE subject = NEW.id;
END;

-- Does what put_job_event and put_event would do, but without the views, which halves the time for a batch of 10 000 jobs.
CREATE TEMP TRIGGER event_job AFTER INSERT ON main.job
BEGIN
    INSERT INTO event_head (subject, sequence, state)
    VALUES (NEW.id, EXISTS (SELECT 1 FROM subscription_pattern p WHERE 'job.created' GLOB p.pattern), {PENDING})
    ON CONFLICT (subject) DO UPDATE SET sequence = sequence + excluded.sequence;
    INSERT INTO event (id, type, subject, sequence, at, correlation, actor, traceparent, data)
    SELECT unhex(hex(randomblob(6)) || '4' || substr(hex(randomblob(2)), 2) || '8' || substr(hex(randomblob(8)), 2)),
           'job.created', NEW.id, (SELECT sequence FROM event_head WHERE subject = NEW.id), CAST(unixepoch('subsec') * 1000 AS INTEGER),
           coalesce(NEW.correlation, j.text), (SELECT actor FROM event_actor), NEW.options ->> 'traceparent',
           json_patch('{}', json_object(
               'jobId', j.text,
               'name', coalesce(NEW.options ->> 'name', l.type),
               'type', l.type,
               'queue', l.queue,
               'status', 'PENDING',
               'attempt', coalesce(NEW.options ->> 'earlierAttempts', 0),
               'retryCount', 0,
               'scheduleId', NEW.options ->> 'scheduleId',
               'scheduleDue', NEW.options ->> 'scheduleDue'))
    FROM lane l,
         (SELECT lower(substr(hex(NEW.id), 1, 8) || '-' || substr(hex(NEW.id), 9, 4) || '-' || substr(hex(NEW.id), 13, 4) || '-'
              || substr(hex(NEW.id), 17, 4) || '-' || substr(hex(NEW.id), 21)) AS text) j
    WHERE l.id = NEW.lane AND EXISTS (SELECT 1 FROM subscription_pattern p WHERE 'job.created' GLOB p.pattern);
    INSERT INTO outbox (sink, partition, position, subject)
    SELECT s.id, instr('0123456789ABCDEF', substr(hex(NEW.id), 32)) - 1, last_insert_rowid(), NEW.id
    FROM subscription s
    WHERE s.queued AND EXISTS (SELECT 1 FROM subscription_pattern p WHERE p.subscription = s.id AND 'job.created' GLOB p.pattern);
END;

CREATE TEMP TRIGGER event_job_deleted AFTER DELETE ON main.job
BEGIN
    DELETE FROM event_head WHERE subject = OLD.id;
END;

CREATE TEMP TRIGGER event_worker_deleted AFTER DELETE ON main.worker
BEGIN
    DELETE FROM event_head WHERE subject = OLD.id;
END;

CREATE TEMP TRIGGER event_schedule_deleted AFTER DELETE ON main.schedule
BEGIN
    DELETE FROM event_head WHERE subject = OLD.id;
END;

CREATE TEMP TRIGGER event_ready AFTER INSERT ON main.ready
BEGIN
    INSERT INTO put_state (id, state, at, retry_count, attempt)
    VALUES (NEW.id, {QUEUED}, CAST(unixepoch('subsec') * 1000 AS INTEGER), NEW.retry_count, NEW.retry_count);
END;

-- A job that waits for its next attempt: the event includes how the last run ended.
CREATE TEMP TRIGGER event_waiting AFTER INSERT ON main.waiting
WHEN NEW.state IS NOT (SELECT state FROM event_head WHERE subject = NEW.id)
BEGIN
    INSERT INTO put_state (id, state, at, retry_count, attempt, run, worker, error, reason, started_at)
    SELECT NEW.id, NEW.state, CAST(unixepoch('subsec') * 1000 AS INTEGER), NEW.retry_count, NEW.retry_count, a.run, a.worker, a.error,
           a.reason, a.started_at
    FROM (SELECT 1) LEFT JOIN (SELECT * FROM attempt WHERE id = NEW.id AND NEW.state = {RETRYING} ORDER BY run DESC LIMIT 1) a;
END;

-- A claim: SCHEDULED while the worker's process is being started, otherwise ASSIGNED.
CREATE TEMP TRIGGER event_claim AFTER INSERT ON main.claim
BEGIN
    INSERT INTO put_state (id, state, at, run, retry_count, attempt)
    SELECT c.id,
           CASE WHEN EXISTS (SELECT 1 FROM worker w WHERE w.id = NEW.owner AND w.ended_at IS NULL AND w.state < {WORKER_READY})
                THEN {SCHEDULED} ELSE {ASSIGNED} END,
           c.claimed_at, c.run, c.retry_count, c.retry_count
    FROM claim_job c WHERE c.run = NEW.run;
END;

CREATE TEMP TRIGGER event_worker_connected AFTER UPDATE OF state ON main.worker 
WHEN OLD.state < {WORKER_READY} AND NEW.state >= {WORKER_READY} AND NEW.ended_at IS NULL
BEGIN
    INSERT INTO put_state (id, state, at, run, retry_count, attempt)
    SELECT c.id, {ASSIGNED}, CAST(unixepoch('subsec') * 1000 AS INTEGER), c.run, c.retry_count, c.retry_count
    FROM claim_job c JOIN event_head h ON h.subject = c.id AND h.state = {SCHEDULED}
    WHERE c.owner = NEW.id;
END;

CREATE TEMP TRIGGER event_running AFTER INSERT ON main.running
BEGIN
    INSERT INTO put_state (id, state, at, run, worker, retry_count, attempt)
    VALUES (NEW.id, {PROCESSING}, NEW.started_at, NEW.run, NEW.worker, NEW.retry_count, NEW.retry_count + 1);
END;

CREATE TEMP TRIGGER event_done AFTER INSERT ON main.done
BEGIN
    INSERT INTO put_state (id, state, at, run, worker, retry_count, attempt, started_at)
    VALUES (NEW.id, {COMPLETED}, NEW.finished_at, NEW.run, NEW.worker, NEW.retry_count, NEW.retry_count + 1, NEW.started_at);
END;

CREATE TEMP TRIGGER event_ended AFTER INSERT ON main.ended
BEGIN
    INSERT INTO put_state (id, state, at, run, worker, retry_count, attempt, error, reason, started_at)
    VALUES (NEW.id, NEW.state, NEW.finished_at, NEW.run, NEW.worker, NEW.retry_count,
            NEW.retry_count + (NEW.run > 0 AND (NEW.started_at IS NOT NULL OR NEW.state = {FAILED})), NEW.error, NEW.reason, NEW.started_at);
END;

CREATE TEMP TRIGGER event_worker AFTER INSERT ON main.worker_change
BEGIN
    INSERT INTO put_event (type, subject, at, correlation, actor, data)
    SELECT CASE NEW.state WHEN {WORKER_TERMINATED} THEN 'worker.terminated' ELSE 'worker.status.changed' END, NEW.worker, NEW.at, w.key,
           (SELECT actor FROM event_actor),
           json_patch('{}', json_object('workerId', w.key, 'state', json_extract(
               '["Creating","Connecting","Ready","Busy","Draining","Terminating","Terminated"]', '$[' || NEW.state || ']'),
               'reason', NEW.reason))
    FROM worker w WHERE w.id = NEW.worker;
END;

CREATE TEMP TRIGGER event_tick AFTER INSERT ON main.tick
BEGIN
    INSERT INTO put_event (type, subject, at, correlation, actor, data)
    SELECT CASE WHEN NEW.outcome IN ({TICK_FIRED}, {TICK_TRIGGERED}) THEN 'schedule.fired' ELSE 'schedule.missed' END, NEW.schedule, NEW.at,
           coalesce(job.text, schedule.text), (SELECT actor FROM event_actor),
           json_patch('{}', json_object('scheduleId', schedule.text, 'name', (SELECT name FROM schedule WHERE id = NEW.schedule),
               'dueAt', strftime('%Y-%m-%dT%H:%M:%fZ', NEW.due_at / 1000.0, 'unixepoch'),
               'outcome', json_extract('["fired","missed","skipped","triggered"]', '$[' || NEW.outcome || ']'), 'reason', NEW.reason,
               'jobId', job.text, 'throughAt', strftime('%Y-%m-%dT%H:%M:%fZ', NEW.through_at / 1000.0, 'unixepoch'), 'count', NEW.count))
    FROM (SELECT lower(substr(hex(NEW.schedule), 1, 8) || '-' || substr(hex(NEW.schedule), 9, 4) || '-' || substr(hex(NEW.schedule), 13, 4)
              || '-' || substr(hex(NEW.schedule), 17, 4) || '-' || substr(hex(NEW.schedule), 21)) AS text) schedule,
         (SELECT lower(substr(hex(NEW.job), 1, 8) || '-' || substr(hex(NEW.job), 9, 4) || '-' || substr(hex(NEW.job), 13, 4)
              || '-' || substr(hex(NEW.job), 17, 4) || '-' || substr(hex(NEW.job), 21)) AS text) job;
END;
