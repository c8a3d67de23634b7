-- Derives events from where rows go. Temporary: they hold for the one connection that writes, and are gone with it.

CREATE TEMP TABLE event_actor (actor TEXT NOT NULL);
INSERT INTO event_actor VALUES ('system');

-- Where the ids of a block stand in it.
CREATE TEMP TABLE place (n INTEGER PRIMARY KEY);
INSERT INTO place
WITH RECURSIVE number (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM number WHERE n < 65535) SELECT n FROM number;

-- One event. Only what somebody wants is kept.
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

-- One event of a job: everything but its type and state is looked up.
CREATE TEMP VIEW put_job_event AS
SELECT NULL AS type, NULL AS id, NULL AS state, NULL AS was, NULL AS at, NULL AS run, NULL AS worker, NULL AS retry_count, NULL AS error,
       NULL AS reason;
CREATE TEMP TRIGGER put_job_event INSTEAD OF INSERT ON put_job_event
BEGIN
    INSERT INTO put_event (type, subject, at, correlation, actor, traceparent, data)
    SELECT NEW.type, NEW.id, NEW.at,
           coalesce(j.correlation, lower(substr(hex(j.id), 1, 8) || '-' || substr(hex(j.id), 9, 4) || '-' || substr(hex(j.id), 13, 4) || '-'
               || substr(hex(j.id), 17, 4) || '-' || substr(hex(j.id), 21))),
           CASE WHEN NEW.reason IN ('orphaned', 'timeout', 'expired', 'no_handler') THEN 'system:guardian'
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
               'retryCount', NEW.retry_count,
               'error', substr(NEW.error, 1, 8192),
               'errorReason', NEW.reason,
               'scheduleId', j.options ->> 'scheduleId',
               'scheduleDue', j.options ->> 'scheduleDue'))
    FROM job j JOIN lane l ON l.id = j.lane WHERE j.id = NEW.id;
END;

-- A job stands somewhere else now. What it passed through on the way is told first.
CREATE TEMP VIEW put_state AS
SELECT NULL AS id, NULL AS state, NULL AS at, NULL AS run, NULL AS worker, NULL AS retry_count, NULL AS error, NULL AS reason,
       NULL AS started_at;
CREATE TEMP TRIGGER put_state INSTEAD OF INSERT ON put_state
WHEN NEW.state IS NOT (SELECT state FROM event_head WHERE subject = NEW.id)
BEGIN
    INSERT OR IGNORE INTO event_head (subject) VALUES (NEW.id);
    INSERT INTO put_job_event (type, id, state, was, at, run, worker, retry_count)
    SELECT 'job.status.changed', NEW.id, 4, h.state, NEW.started_at, NEW.run, NEW.worker, NEW.retry_count FROM event_head h
    WHERE h.subject = NEW.id AND h.state IN (1, 2, 3) AND NEW.state IN (5, 6, 7, 8) AND NEW.started_at IS NOT NULL;
    UPDATE event_head SET state = 4
    WHERE subject = NEW.id AND state IN (1, 2, 3) AND NEW.state IN (5, 6, 7, 8) AND NEW.started_at IS NOT NULL;
    INSERT INTO put_job_event (type, id, state, was, at, run, worker, retry_count, error, reason)
    SELECT CASE NEW.state WHEN 6 THEN 'job.completed' WHEN 7 THEN 'job.failed' ELSE 'job.status.changed' END,
           NEW.id, NEW.state, h.state, NEW.at, NEW.run, NEW.worker, NEW.retry_count, NEW.error, NEW.reason
    FROM event_head h WHERE h.subject = NEW.id;
    INSERT INTO put_job_event (type, id, state, was, at, run, worker, retry_count, error, reason)
    SELECT 'job.dead_lettered', NEW.id, 7, 7, NEW.at, NEW.run, NEW.worker, NEW.retry_count, NEW.error, NEW.reason WHERE NEW.state = 7;
    UPDATE event_head SET state = NEW.state WHERE subject = NEW.id;
END;

CREATE TEMP TRIGGER event_job AFTER INSERT ON main.job
BEGIN
    INSERT OR IGNORE INTO event_head (subject, state) VALUES (NEW.id, 0);
    INSERT INTO put_job_event (type, id, state, at, retry_count)
    VALUES ('job.created', NEW.id, 0, CAST(unixepoch('subsec') * 1000 AS INTEGER), 0);
END;

CREATE TEMP TRIGGER event_job_gone AFTER DELETE ON main.job
BEGIN
    DELETE FROM event_head WHERE subject = OLD.id;
END;

CREATE TEMP TRIGGER event_worker_gone AFTER DELETE ON main.worker
BEGIN
    DELETE FROM event_head WHERE subject = OLD.id;
END;

CREATE TEMP TRIGGER event_schedule_gone AFTER DELETE ON main.schedule
BEGIN
    DELETE FROM event_head WHERE subject = OLD.id;
END;

CREATE TEMP TRIGGER event_ready AFTER INSERT ON main.ready
BEGIN
    INSERT INTO put_state (id, state, at, retry_count)
    VALUES (NEW.id, 1, CAST(unixepoch('subsec') * 1000 AS INTEGER), NEW.retry_count);
END;

-- What it waits for after a run that was not the last word is told with that.
CREATE TEMP TRIGGER event_waiting AFTER INSERT ON main.waiting
BEGIN
    INSERT INTO put_state (id, state, at, retry_count, run, worker, error, reason, started_at)
    SELECT NEW.id, NEW.state, CAST(unixepoch('subsec') * 1000 AS INTEGER), NEW.retry_count, a.run, a.worker, a.error, a.reason, a.started_at
    FROM (SELECT 1) LEFT JOIN (SELECT * FROM attempt WHERE id = NEW.id AND NEW.state = 5 ORDER BY run DESC LIMIT 1) a;
END;

-- SCHEDULED while the worker's process is being started.
CREATE TEMP TRIGGER event_claim AFTER INSERT ON main.claim
BEGIN
    INSERT INTO put_state (id, state, at, run, retry_count)
    SELECT substr(NEW.ids, 16 * place.n + 1, 16),
           CASE WHEN EXISTS (SELECT 1 FROM worker w WHERE w.id = NEW.owner AND w.ended_at IS NULL AND w.state < 2) THEN 2 ELSE 3 END,
           NEW.claimed_at, NEW.run,
           -- Two bytes each, the lower one first; without any, all are 0.
           coalesce((SELECT sum((instr('0123456789ABCDEF', substr(hex(substr(NEW.retries, 2 * place.n + 1, 2)), digit.at, 1)) - 1) * digit.worth)
               FROM (SELECT 1 AS at, 16 AS worth UNION ALL SELECT 2, 1 UNION ALL SELECT 3, 4096 UNION ALL SELECT 4, 256) digit
               WHERE NEW.retries IS NOT NULL), 0)
    FROM place WHERE place.n < length(NEW.ids) / 16;
END;

CREATE TEMP TRIGGER event_worker_connected AFTER UPDATE OF state ON main.worker WHEN OLD.state < 2 AND NEW.state >= 2 AND NEW.ended_at IS NULL
BEGIN
    INSERT INTO put_state (id, state, at, run)
    SELECT h.subject, 3, CAST(unixepoch('subsec') * 1000 AS INTEGER), b.run
    FROM claim b JOIN place ON place.n < length(b.ids) / 16
    JOIN event_head h ON h.subject = substr(b.ids, 16 * place.n + 1, 16) AND h.state = 2
    WHERE b.owner = NEW.id;
END;

CREATE TEMP TRIGGER event_running AFTER INSERT ON main.running
BEGIN
    INSERT INTO put_state (id, state, at, run, worker, retry_count)
    VALUES (NEW.id, 4, NEW.started_at, NEW.run, NEW.worker, NEW.retry_count);
END;

CREATE TEMP TRIGGER event_done AFTER INSERT ON main.done
BEGIN
    INSERT INTO put_state (id, state, at, run, worker, retry_count, started_at)
    VALUES (NEW.id, 6, NEW.finished_at, NEW.run, NEW.worker, NEW.retry_count, NEW.started_at);
END;

CREATE TEMP TRIGGER event_ended AFTER INSERT ON main.ended
BEGIN
    INSERT INTO put_state (id, state, at, run, worker, retry_count, error, reason, started_at)
    VALUES (NEW.id, NEW.state, NEW.finished_at, NEW.run, NEW.worker, NEW.retry_count, NEW.error, NEW.reason, NEW.started_at);
END;

CREATE TEMP TRIGGER event_worker AFTER INSERT ON main.worker_change
BEGIN
    INSERT INTO put_event (type, subject, at, correlation, actor, data)
    SELECT CASE NEW.state WHEN 6 THEN 'worker.terminated' ELSE 'worker.status.changed' END, NEW.worker, NEW.at, w.key,
           (SELECT actor FROM event_actor),
           json_patch('{}', json_object('workerId', w.key, 'state', json_extract(
               '["Creating","Connecting","Ready","Busy","Draining","Terminating","Terminated"]', '$[' || NEW.state || ']'),
               'reason', NEW.reason))
    FROM worker w WHERE w.id = NEW.worker;
END;

CREATE TEMP TRIGGER event_tick AFTER INSERT ON main.tick
BEGIN
    INSERT INTO put_event (type, subject, at, correlation, actor, data)
    SELECT CASE WHEN NEW.outcome IN (0, 3) THEN 'schedule.fired' ELSE 'schedule.missed' END, NEW.schedule, NEW.at,
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
