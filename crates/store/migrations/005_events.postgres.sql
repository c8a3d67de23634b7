-- Events, and the outbox that brings them to sinks. The meaning of every column stands in the SQLite twin of this file.

CREATE TABLE faena.event (
    position    bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id          uuid NOT NULL UNIQUE,
    type        text NOT NULL,
    subject     uuid NOT NULL,
    sequence    bigint NOT NULL,
    at          bigint NOT NULL,
    correlation text NOT NULL,
    actor       text NOT NULL,
    traceparent text,
    data        text NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX event_at ON faena.event (at);
CREATE INDEX event_subject ON faena.event (subject, sequence);
CREATE INDEX event_correlation ON faena.event (correlation, position);

CREATE TABLE faena.event_head (
    subject  uuid PRIMARY KEY,
    sequence bigint NOT NULL DEFAULT 0,
    state    smallint
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);

CREATE TABLE faena.subscription (
    id          smallint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name        text NOT NULL UNIQUE,
    queued      boolean NOT NULL,
    park        boolean NOT NULL,
    until       bigint NOT NULL,
    since       bigint NOT NULL DEFAULT 0,
    sent        bigint NOT NULL DEFAULT 0,
    down_since  bigint,
    down_reason text
);

-- PostgreSQL: a pattern for LIKE.
CREATE TABLE faena.subscription_pattern (
    subscription smallint NOT NULL,
    pattern text NOT NULL,
    PRIMARY KEY (subscription, pattern)
);

CREATE TABLE faena.outbox (
    sink      smallint NOT NULL,
    partition smallint NOT NULL,
    position  bigint NOT NULL,
    subject   uuid NOT NULL,
    attempts  smallint NOT NULL DEFAULT 0,
    due_at    bigint NOT NULL DEFAULT 0,
    error     text,
    PRIMARY KEY (sink, partition, position)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX outbox_late ON faena.outbox (sink, subject, position) WHERE due_at > 0;
CREATE INDEX outbox_due ON faena.outbox (sink, due_at) WHERE due_at > 0;
CREATE INDEX outbox_position ON faena.outbox (position);

CREATE TABLE faena.outbox_lease (
    sink      smallint NOT NULL,
    partition smallint NOT NULL,
    node      uuid,
    epoch     bigint NOT NULL DEFAULT 0,
    until     bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (sink, partition)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_cost_delay = 0);

CREATE TABLE faena.outbox_node (
    sink  smallint NOT NULL,
    node  uuid NOT NULL,
    until bigint NOT NULL,
    PRIMARY KEY (sink, node)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_cost_delay = 0);

CREATE TABLE faena.outbox_dlq (
    id                  uuid PRIMARY KEY,
    sink                text NOT NULL,
    position            bigint NOT NULL,
    original_event_id   uuid NOT NULL,
    aggregate_id        uuid NOT NULL,
    aggregate_type      text NOT NULL,
    event_type          text NOT NULL,
    payload             text NOT NULL,
    metadata            text,
    error_message       text NOT NULL,
    retry_count         integer NOT NULL DEFAULT 0,
    original_created_at bigint NOT NULL,
    moved_at            bigint NOT NULL,
    resolved_at         bigint,
    resolved_by         text,
    resolution_notes    text
);
CREATE INDEX outbox_dlq_moved ON faena.outbox_dlq (moved_at);
CREATE INDEX outbox_dlq_open ON faena.outbox_dlq (sink, aggregate_id) WHERE resolved_at IS NULL;
CREATE INDEX outbox_dlq_position ON faena.outbox_dlq (position);

CREATE TABLE faena.inbox (
    consumer text NOT NULL,
    id       text NOT NULL,
    at       bigint NOT NULL,
    PRIMARY KEY (consumer, id)
);
CREATE INDEX inbox_at ON faena.inbox (at);

-- Positions are given out before the commit, so a reader who goes by what it sees alone would pass by what is committed late. Who is about
-- to take positions says so before, by a lock that tells above which one (0x6661 in the upper 16 bits), until the end of the
-- transaction. Every position up to the lowest of these, and up to the last one given out before looking, is settled. As the owner: who may
-- write events need not be allowed to look at their counter.
CREATE FUNCTION faena.announce_events() RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog AS $$
DECLARE
    transaction text := pg_current_xact_id()::text;
BEGIN
    IF current_setting('faena.announced', true) IS DISTINCT FROM transaction THEN
        PERFORM pg_advisory_xact_lock_shared((x'6661'::bigint << 48) | (SELECT last_value FROM faena.event_position_seq));
        PERFORM set_config('faena.announced', transaction, true);
    END IF;
END $$;

CREATE FUNCTION faena.settled_events() RETURNS bigint LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog AS $$
DECLARE
    given bigint;
    low bigint;
BEGIN
    SELECT CASE WHEN is_called THEN last_value ELSE 0 END INTO given FROM faena.event_position_seq;
    SELECT min((l.classid::bigint << 32 | l.objid::bigint) & x'ffffffffffff'::bigint) INTO low FROM pg_locks l
    WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.classid::bigint >> 16 = x'6661'::bigint
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database());
    RETURN least(given, coalesce(low, given));
END $$;

-- Events, all at once. Only what somebody wants is kept. A subject's head is locked until the commit: what happens to it next has a later
-- sequence and a later position.
CREATE FUNCTION faena.put_events(
    types text[], subjects uuid[], ats bigint[], correlations text[], actors text[], traceparents text[], datas text[]) RETURNS void
LANGUAGE plpgsql SET enable_hashjoin = on SET enable_sort = on AS $$
BEGIN
    PERFORM faena.announce_events();
    INSERT INTO faena.event_head (subject) SELECT DISTINCT s FROM unnest(subjects) AS s ORDER BY s ON CONFLICT DO NOTHING;
    PERFORM FROM faena.event_head WHERE subject = ANY(subjects) ORDER BY subject FOR UPDATE;
    WITH wanted AS MATERIALIZED (
        SELECT g.*, row_number() OVER (PARTITION BY g.subject ORDER BY g.n) AS step
        FROM unnest(types, subjects, ats, correlations, actors, traceparents, datas)
             WITH ORDINALITY AS g(type, subject, at, correlation, actor, traceparent, data, n)
        WHERE EXISTS (SELECT FROM faena.subscription_pattern p WHERE g.type LIKE p.pattern)),
    put AS (
        INSERT INTO faena.event (id, type, subject, sequence, at, correlation, actor, traceparent, data)
        SELECT gen_random_uuid(), w.type, w.subject, h.sequence + w.step, w.at, w.correlation, w.actor, w.traceparent, w.data
        FROM wanted w JOIN faena.event_head h ON h.subject = w.subject ORDER BY w.n
        RETURNING position, type, subject),
    queued AS (
        INSERT INTO faena.outbox (sink, partition, position, subject)
        SELECT s.id, get_byte(uuid_send(put.subject), 15) & 15, put.position, put.subject
        FROM put JOIN faena.subscription s
            ON s.queued AND EXISTS (SELECT FROM faena.subscription_pattern p WHERE p.subscription = s.id AND put.type LIKE p.pattern))
    UPDATE faena.event_head h SET sequence = h.sequence + c.steps
    FROM (SELECT subject, count(*) AS steps FROM wanted GROUP BY subject) AS c WHERE h.subject = c.subject;
END $$;

-- Jobs stand somewhere else now. What they passed through on the way is told first: that they were made (in this very transaction), that
-- a run had started.
CREATE FUNCTION faena.put_states(
    ids uuid[], states smallint[], ats bigint[], runs bigint[], workers uuid[], retries smallint[], errors text[], reasons text[],
    starts bigint[]) RETURNS void
LANGUAGE plpgsql SET enable_hashjoin = on SET enable_sort = on AS $$
DECLARE
    names CONSTANT text[] := ARRAY['PENDING', 'QUEUED', 'SCHEDULED', 'ASSIGNED', 'PROCESSING', 'RETRYING', 'COMPLETED', 'FAILED', 'CANCELLED'];
    whoever text := coalesce(nullif(current_setting('faena.actor', true), ''), 'system');
    clock bigint := (extract(epoch FROM clock_timestamp()) * 1000)::bigint;
    told record;
    fresh uuid[];
BEGIN
    WITH made AS (
        INSERT INTO faena.event_head (subject) SELECT s FROM unnest(ids) AS s ORDER BY s ON CONFLICT DO NOTHING RETURNING subject)
    SELECT array_agg(subject) INTO fresh FROM made;
    PERFORM FROM faena.event_head WHERE subject = ANY(ids) ORDER BY subject FOR UPDATE;
    WITH moved AS MATERIALIZED (
        SELECT g.id, g.state, coalesce(g.at, clock) AS at, g.run, g.retry_count, g.error, g.reason, g.started_at, g.n, h.state AS was,
               coalesce(g.id = ANY(fresh), false) AND j.xmin = pg_current_xact_id()::xid AS is_new,
               h.state IN (1, 2, 3) AND g.state IN (5, 6, 7, 8) AND g.started_at IS NOT NULL AS has_run,
               coalesce(j.correlation, g.id::text) AS correlation, j.options::json AS options, l.type AS kind, l.queue,
               CASE WHEN g.reason IN ('orphaned', 'timeout', 'expired', 'no_handler') THEN 'system:guardian'
                    WHEN g.worker IS NULL THEN whoever
                    ELSE 'worker:' || coalesce((SELECT w.key FROM faena.worker w WHERE w.id = g.worker), 'unknown') END AS actor
        FROM unnest(ids, states, ats, runs, workers, retries, errors, reasons, starts)
             WITH ORDINALITY AS g(id, state, at, run, worker, retry_count, error, reason, started_at, n)
        JOIN faena.event_head h ON h.subject = g.id
        JOIN faena.job j ON j.id = g.id
        JOIN faena.lane l ON l.id = j.lane
        WHERE h.state IS DISTINCT FROM g.state),
    said AS (
        SELECT m.*, s.*
        FROM moved m CROSS JOIN LATERAL (VALUES
            (1, 'job.created', 0::smallint, NULL::smallint, m.at, m.is_new),
            (2, 'job.status.changed', 4::smallint, m.was, m.started_at, m.has_run),
            (3, CASE m.state WHEN 6 THEN 'job.completed' WHEN 7 THEN 'job.failed' ELSE 'job.status.changed' END, m.state,
                CASE WHEN m.has_run THEN 4::smallint WHEN m.is_new THEN 0::smallint ELSE m.was END, m.at, NOT (m.is_new AND m.state = 0)),
            (4, 'job.dead_lettered', 7::smallint, 7::smallint, m.at, m.state = 7)) AS s(part, type, status, before, since, holds)
        WHERE s.holds)
    SELECT array_agg(type ORDER BY n, part) AS types, array_agg(id ORDER BY n, part) AS subjects,
           array_agg(since ORDER BY n, part) AS ats, array_agg(correlation ORDER BY n, part) AS correlations,
           array_agg(actor ORDER BY n, part) AS actors, array_agg(options ->> 'traceparent' ORDER BY n, part) AS traceparents,
           array_agg(json_strip_nulls(json_build_object(
               'jobId', id, 'name', coalesce(options ->> 'name', kind), 'type', kind, 'queue', queue, 'status', names[status + 1],
               'previousStatus', names[before + 1], 'run', CASE WHEN part > 1 THEN nullif(run, 0) END, 'retryCount', retry_count,
               'error', CASE WHEN part > 2 THEN left(error, 8192) END, 'errorReason', CASE WHEN part > 2 THEN reason END,
               'scheduleId', options ->> 'scheduleId', 'scheduleDue', options ->> 'scheduleDue'))::text ORDER BY n, part) AS datas
    INTO told FROM said;
    IF told.types IS NOT NULL THEN
        PERFORM faena.put_events(told.types, told.subjects, told.ats, told.correlations, told.actors, told.traceparents, told.datas);
    END IF;
    UPDATE faena.event_head h SET state = g.state FROM unnest(ids, states) AS g(id, state)
    WHERE h.subject = g.id AND h.state IS DISTINCT FROM g.state;
END $$;

CREATE FUNCTION faena.event_ready() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM faena.put_states(array_agg(id), array_agg(1::smallint), array_agg(NULL::bigint), array_agg(NULL::bigint), array_agg(NULL::uuid),
        array_agg(retry_count), array_agg(NULL::text), array_agg(NULL::text), array_agg(NULL::bigint))
    FROM added HAVING count(*) > 0;
    RETURN NULL;
END $$;

-- What it waits for after a run that was not the last word is told with that.
CREATE FUNCTION faena.event_waiting() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM faena.put_states(array_agg(w.id), array_agg(w.state), array_agg(NULL::bigint), array_agg(a.run), array_agg(a.worker),
        array_agg(w.retry_count), array_agg(a.error), array_agg(a.reason), array_agg(a.started_at))
    FROM added w LEFT JOIN LATERAL (
        SELECT * FROM faena.attempt a WHERE a.id = w.id AND w.state = 5 ORDER BY a.run DESC LIMIT 1) AS a ON true
    HAVING count(*) > 0;
    RETURN NULL;
END $$;

-- SCHEDULED while the worker's process is being started.
CREATE FUNCTION faena.event_claim() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM faena.put_states(array_agg(i.id), array_agg(i.state), array_agg(i.claimed_at), array_agg(i.run), array_agg(NULL::uuid),
        array_agg(i.retry_count), array_agg(NULL::text), array_agg(NULL::text), array_agg(NULL::bigint))
    FROM (SELECT u.id, b.claimed_at, b.run, coalesce(b.retries[u.n], 0::smallint) AS retry_count,
                 CASE WHEN EXISTS (SELECT FROM faena.worker w WHERE w.id = b.owner AND w.ended_at IS NULL AND w.state < 2)
                      THEN 2::smallint ELSE 3::smallint END AS state
          FROM added b, unnest(b.ids) WITH ORDINALITY AS u(id, n)) AS i
    HAVING count(*) > 0;
    RETURN NULL;
END $$;

CREATE FUNCTION faena.event_worker_connected() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM faena.put_states(array_agg(i.id), array_agg(3::smallint), array_agg(NULL::bigint), array_agg(i.run), array_agg(NULL::uuid),
        array_agg(NULL::smallint), array_agg(NULL::text), array_agg(NULL::text), array_agg(NULL::bigint))
    FROM (SELECT h.subject AS id, b.run FROM faena.claim b, unnest(b.ids) AS u(id) JOIN faena.event_head h ON h.subject = u.id
          WHERE b.owner = NEW.id AND h.state = 2) AS i
    HAVING count(*) > 0;
    RETURN NULL;
END $$;

CREATE FUNCTION faena.event_running() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM faena.put_states(array_agg(id), array_agg(4::smallint), array_agg(started_at), array_agg(run), array_agg(worker),
        array_agg(retry_count), array_agg(NULL::text), array_agg(NULL::text), array_agg(NULL::bigint))
    FROM added HAVING count(*) > 0;
    RETURN NULL;
END $$;

CREATE FUNCTION faena.event_done() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM faena.put_states(array_agg(id), array_agg(6::smallint), array_agg(finished_at), array_agg(run), array_agg(worker),
        array_agg(retry_count), array_agg(NULL::text), array_agg(NULL::text), array_agg(started_at))
    FROM added HAVING count(*) > 0;
    RETURN NULL;
END $$;

CREATE FUNCTION faena.event_ended() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM faena.put_states(array_agg(id), array_agg(state), array_agg(finished_at), array_agg(run), array_agg(worker),
        array_agg(retry_count), array_agg(error), array_agg(reason), array_agg(started_at))
    FROM added HAVING count(*) > 0;
    RETURN NULL;
END $$;

CREATE FUNCTION faena.event_subject_gone() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM faena.event_head WHERE subject IN (SELECT id FROM removed);
    RETURN NULL;
END $$;

-- A job whose row was changed is not new: its head says so before it moves.
CREATE FUNCTION faena.event_job_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO faena.event_head (subject) SELECT id FROM changed ORDER BY id ON CONFLICT DO NOTHING;
    RETURN NULL;
END $$;

CREATE FUNCTION faena.event_worker() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM faena.put_events(
        array_agg(CASE c.state WHEN 6 THEN 'worker.terminated' ELSE 'worker.status.changed' END ORDER BY c.sequence),
        array_agg(c.worker ORDER BY c.sequence), array_agg(c.at ORDER BY c.sequence), array_agg(w.key ORDER BY c.sequence),
        array_agg(coalesce(nullif(current_setting('faena.actor', true), ''), 'system')), array_agg(NULL::text),
        array_agg(json_strip_nulls(json_build_object('workerId', w.key, 'state',
            (ARRAY['Creating', 'Connecting', 'Ready', 'Busy', 'Draining', 'Terminating', 'Terminated'])[c.state + 1],
            'reason', c.reason))::text ORDER BY c.sequence))
    FROM added c JOIN faena.worker w ON w.id = c.worker HAVING count(*) > 0;
    RETURN NULL;
END $$;

CREATE FUNCTION faena.event_tick() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM faena.put_events(
        array_agg(CASE WHEN t.outcome IN (0, 3) THEN 'schedule.fired' ELSE 'schedule.missed' END ORDER BY t.due_at),
        array_agg(t.schedule ORDER BY t.due_at), array_agg(t.at ORDER BY t.due_at),
        array_agg(coalesce(t.job, t.schedule)::text ORDER BY t.due_at),
        array_agg(coalesce(nullif(current_setting('faena.actor', true), ''), 'system')), array_agg(NULL::text),
        array_agg(json_strip_nulls(json_build_object('scheduleId', t.schedule, 'name', s.name,
            'dueAt', to_char(to_timestamp(t.due_at / 1000.0) AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"'),
            'outcome', (ARRAY['fired', 'missed', 'skipped', 'triggered'])[t.outcome + 1], 'reason', t.reason, 'jobId', t.job,
            'throughAt', to_char(to_timestamp(t.through_at / 1000.0) AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"'),
            'count', t.count))::text ORDER BY t.due_at))
    FROM added t LEFT JOIN faena.schedule s ON s.id = t.schedule HAVING count(*) > 0;
    RETURN NULL;
END $$;

-- Switches events on: until then they cost nothing. As the owner of the tables, so that a server that may only read and write them can.
CREATE FUNCTION faena.events_on() RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog AS $$
DECLARE
    name text;
BEGIN
    IF EXISTS (SELECT FROM pg_trigger WHERE tgrelid = 'faena.job'::regclass AND tgname = 'event_job_gone') THEN
        RETURN;
    END IF;
    FOREACH name IN ARRAY ARRAY['ready', 'waiting', 'claim', 'running', 'done', 'ended', 'tick'] LOOP
        EXECUTE format('CREATE TRIGGER event_%1$s AFTER INSERT ON faena.%1$s REFERENCING NEW TABLE AS added
                        FOR EACH STATEMENT EXECUTE FUNCTION faena.event_%1$s()', name);
    END LOOP;
    CREATE TRIGGER event_worker AFTER INSERT ON faena.worker_change REFERENCING NEW TABLE AS added
        FOR EACH STATEMENT EXECUTE FUNCTION faena.event_worker();
    CREATE TRIGGER event_worker_connected AFTER UPDATE OF state ON faena.worker FOR EACH ROW
        WHEN (OLD.state < 2 AND NEW.state >= 2 AND NEW.ended_at IS NULL) EXECUTE FUNCTION faena.event_worker_connected();
    CREATE TRIGGER event_job_changed AFTER UPDATE ON faena.job REFERENCING NEW TABLE AS changed
        FOR EACH STATEMENT EXECUTE FUNCTION faena.event_job_changed();
    FOREACH name IN ARRAY ARRAY['job', 'worker', 'schedule'] LOOP
        EXECUTE format('CREATE TRIGGER event_%1$s_gone AFTER DELETE ON faena.%1$s REFERENCING OLD TABLE AS removed
                        FOR EACH STATEMENT EXECUTE FUNCTION faena.event_subject_gone()', name);
    END LOOP;
END $$;

CREATE FUNCTION faena.events_off() RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog AS $$
DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['ready', 'waiting', 'claim', 'running', 'done', 'ended', 'tick'] LOOP
        EXECUTE format('DROP TRIGGER IF EXISTS event_%1$s ON faena.%1$s', name);
    END LOOP;
    DROP TRIGGER IF EXISTS event_worker ON faena.worker_change;
    DROP TRIGGER IF EXISTS event_worker_connected ON faena.worker;
    DROP TRIGGER IF EXISTS event_job_changed ON faena.job;
    FOREACH name IN ARRAY ARRAY['job', 'worker', 'schedule'] LOOP
        EXECUTE format('DROP TRIGGER IF EXISTS event_%1$s_gone ON faena.%1$s', name);
    END LOOP;
    DELETE FROM faena.event_head;
END $$;
