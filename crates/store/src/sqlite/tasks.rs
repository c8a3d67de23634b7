//! Stores machines and tasks.

use std::{collections::BTreeMap, sync::atomic::Ordering, time::Instant};

use async_trait::async_trait;
use faena_domain::{JobId, TaskId, Timestamp};
use faena_machine::{Input, Record, Status};
use rusqlite::{Connection, OptionalExtension, Row, params, params_from_iter, types::Value};

use super::{
    Sqlite, audit, events,
    lanes::lane_of,
    machines::{definition, machine, machines, register},
    submit::submit,
    task_keys, task_limits,
    task_queue::TimedInputs,
    webhooks,
    writer::Tx,
};
use crate::{
    COUNT_LIMIT, KeyedTask, MachineStatus, NewMachine, NewTask, QueuedTasks, Registered, Result, Signal, StateCount,
    StoreError, StoredMachine, TaskAnswer, TaskFigures, TaskFilter, TaskInput, TaskKey, TaskMeasures, TaskPosition,
    TaskStore, TaskView, TasksFired, TasksInState,
    lanes::LaneName,
    schedules::rejection,
    sql::sql,
    task_cache::CachedTask,
    task_limits::affects_queue,
    tasks::{
        Batch, COLUMNS, ChangedTask, JobEnd, Plan, TASKS, TaskColumns, TaskEvent, TaskJob, TaskRow, event_ids, job_end,
        tags_text, task_ids, to_text,
    },
};

#[async_trait]
impl TaskStore for Sqlite {
    async fn machine_register(&self, machine: NewMachine, by: &str, now: Timestamp) -> Result<Registered> {
        let by = by.to_owned();
        self.writer.call(move |tx| register(tx, &machine.definition, &by, now)).await
    }

    async fn machine_list(&self) -> Result<Vec<MachineStatus>> {
        self.read(|connection, _| machines(connection)).await
    }

    async fn machine_get(&self, name: &str, version: Option<u32>) -> Result<Option<StoredMachine>> {
        let name = name.to_owned();
        self.read(move |connection, shared| machine(connection, shared, &name, version)).await
    }

    async fn task_create(&self, task: NewTask, now: Timestamp) -> Result<()> {
        self.writer.call(move |tx| create(tx, &task, now)).await
    }

    async fn task_create_once(&self, key: TaskKey, task: NewTask, now: Timestamp) -> Result<Option<KeyedTask>> {
        self.writer.call(move |tx| task_keys::create_once(tx, &key, &task, now)).await
    }

    async fn task_apply(&self, inputs: Vec<TaskInput>, now: Timestamp) -> Result<Vec<Option<TaskAnswer>>> {
        let started = Instant::now();
        let answers = self.apply_queued(inputs, now).await?;
        self.shared.task_meter.count(&answers, started.elapsed());
        Ok(answers)
    }

    async fn task_fire(&self, limit: usize, now: Timestamp) -> Result<TasksFired> {
        let fired = self.writer.call(move |tx| fire(tx, limit, now)).await?;
        self.shared.task_meter.count_fired(&fired);
        Ok(fired)
    }

    async fn task_counts(&self) -> Result<BTreeMap<String, u64>> {
        self.read(|connection, _| counts(connection)).await
    }

    async fn task_figures(&self) -> Result<TaskFigures> {
        self.read(|connection, _| figures(connection)).await
    }

    fn task_measures(&self) -> TaskMeasures {
        self.shared.task_meter.measures()
    }

    async fn task_get(&self, id: TaskId) -> Result<Option<TaskView>> {
        self.read(move |connection, _| get(connection, id)).await
    }

    async fn task_list(
        &self,
        filter: TaskFilter,
        before: Option<TaskId>,
        limit: usize,
    ) -> Result<(Vec<TaskView>, u64)> {
        self.read(move |connection, _| list(connection, &filter, before, limit)).await
    }

    async fn task_find(
        &self,
        filter: &TaskFilter,
        after: Option<TaskId>,
        up_to: TaskId,
        limit: usize,
    ) -> Result<Vec<TaskId>> {
        let filter = filter.clone();
        self.read(move |connection, _| find(connection, &filter, after, up_to, limit)).await
    }

    async fn task_states(&self, machine: &str, version: u32) -> Result<Vec<StateCount>> {
        let machine = machine.to_owned();
        self.read(move |connection, _| states(connection, &machine, version)).await
    }

    async fn task_position(&self, machine: &str, id: TaskId) -> Result<TaskPosition> {
        let machine = machine.to_owned();
        self.read(move |connection, _| task_limits::position(connection, &machine, id)).await
    }

    async fn task_history(&self, id: TaskId, after: u64, limit: usize) -> Result<Vec<Record>> {
        self.read(move |connection, _| history(connection, id, after, limit)).await
    }

    async fn task_prune(&self, before: Timestamp, limit: usize) -> Result<usize> {
        self.writer.call(move |tx| prune(tx, before, limit)).await
    }
}

pub fn create(tx: &Tx, new: &NewTask, now: Timestamp) -> Result<()> {
    let (mut batch, mut plan) = (Batch::default(), Plan::default());
    let admission = task_limits::capacity(tx, &new.definition)?.admit(&new.definition.machine);
    batch.plan_new(&mut plan, new, admission, now);
    check_jobs(tx, &mut batch, &mut plan, now)?;
    for (id, task) in batch.changed() {
        insert_task(tx, id, task)?;
        let mut insert = tx.connection.prepare_cached("INSERT OR IGNORE INTO task_tag (tag, task) VALUES (?, ?)")?;
        for tag in &task.view.tags {
            insert.execute((tag, id.0))?;
        }
    }
    signal_changes(tx, &batch);
    if let Some(entry) = &new.audit {
        audit::add(tx, entry, now)?;
    }
    write(tx, plan, now)?;
    cache_tasks(tx, batch);
    Ok(())
}

fn insert_task(tx: &Tx, id: TaskId, task: &mut ChangedTask) -> Result<()> {
    let (view, columns, body) = (&task.view, TaskColumns::of(&task.view), to_text(&task.view.task)?);
    let sql = "INSERT INTO task (id, machine, version, title, correlation, tags, status, state, updated_at, ended_at, due_at, approval, body, entered_at, events)
         VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)";
    tx.connection.prepare_cached(sql)?.execute(params![
        id.0,
        view.machine,
        view.version,
        view.title,
        view.correlation,
        tags_text(&view.tags)?,
        columns.status,
        columns.state,
        view.updated_at.as_ms(),
        columns.ended_at,
        columns.due_at,
        columns.is_approval,
        body,
        columns.entered_at,
        view.events as i64,
    ])?;
    task.body_bytes = body.len();
    Ok(())
}

fn update_task(tx: &Tx, id: TaskId, task: &mut ChangedTask) -> Result<()> {
    let (view, body) = (&task.view, to_text(&task.view.task)?);
    let (updated_at, events) = (view.updated_at.as_ms(), view.events as i64);
    if task.changes_indexed_columns() {
        let columns = TaskColumns::of(view);
        let sql = "UPDATE task SET status = ?, state = ?, updated_at = ?, ended_at = ?, due_at = ?, approval = ?, body = ?, version = ?,
                       entered_at = ?, events = ? WHERE id = ?";
        tx.connection.prepare_cached(sql)?.execute(params![
            columns.status,
            columns.state,
            updated_at,
            columns.ended_at,
            columns.due_at,
            columns.is_approval,
            body,
            columns.version,
            columns.entered_at,
            events,
            id.0,
        ])?;
    } else {
        // SQLite: a statement writes the entries of every index whose columns it names, even if no value changes.
        let sql = "UPDATE task SET updated_at = ?, body = ?, events = ? WHERE id = ?";
        tx.connection.prepare_cached(sql)?.execute(params![updated_at, body, events, id.0])?;
    }
    task.body_bytes = body.len();
    Ok(())
}

/// Stores the tasks of a batch in the cache. Must be the last step of a call that succeeds.
fn cache_tasks(tx: &Tx, batch: Batch) {
    let mut cache = tx.shared.task_cache.lock();
    for (id, ChangedTask { view, definition, body_bytes, .. }) in batch.tasks {
        cache.put(id, CachedTask { view, definition, body_bytes });
    }
    tx.has_cached_tasks.set(true);
}

fn signal_changes(tx: &Tx, batch: &Batch) {
    if let Some(at) = batch.new_due() {
        tx.signal(Signal::TaskDue(at));
    }
    if affects_queue(&tx.shared.rules.current(), batch) {
        tx.signal(Signal::TaskQueue);
    }
}

/// Applies inputs to those tasks that match `only`, if it is given. Returns the answers, and how many deadlines were
/// missed.
pub fn apply_to(tx: &Tx, calls: &[TimedInputs], only: Option<TaskFilter>) -> Result<(Vec<Option<TaskAnswer>>, usize)> {
    let mut batch = Batch { only, ..Batch::default() };
    let all: Vec<&TaskInput> = calls.iter().flat_map(|(inputs, _)| inputs).collect();
    for id in task_ids(&all) {
        let cached = tx.shared.task_cache.lock().take(id);
        let task = match cached {
            Some(cached) => Some(cached),
            None => read(tx, id)?,
        };
        if let Some(CachedTask { view, definition, body_bytes }) = task {
            batch.add(id, view, definition, body_bytes);
        }
    }
    let mut find = tx.connection.prepare_cached("SELECT answer FROM task_inbox WHERE task = ? AND event_id = ?")?;
    for (id, event) in event_ids(&all) {
        let answer: Option<String> = find.query_row((id.0, &event), |row| row.get(0)).optional()?;
        if let Some(answer) = answer.and_then(|text| serde_json::from_str(&text).ok()) {
            batch.known.insert((id, event), answer);
        }
    }
    let mut plan = Plan::default();
    for (inputs, now) in calls {
        batch.plan(&mut plan, inputs.clone(), *now);
    }
    let now = calls.iter().map(|(_, now)| *now).max().unwrap_or_default();
    check_jobs(tx, &mut batch, &mut plan, now)?;
    for (id, task) in batch.changed() {
        update_task(tx, id, task)?;
    }
    signal_changes(tx, &batch);
    let deadlines_missed = plan.deadlines_missed();
    let answers = write(tx, plan, now)?;
    cache_tasks(tx, batch);
    Ok((answers, deadlines_missed))
}

fn read(tx: &Tx, id: TaskId) -> Result<Option<CachedTask>> {
    let mut statement = tx.connection.prepare_cached(&format!("SELECT {COLUMNS} FROM task WHERE id = ?"))?;
    let Some(row) = statement.query_row([id.0], task_row).optional()? else { return Ok(None) };
    let body_bytes = row.body.len();
    let view = row.view()?;
    let definition = definition(tx, &view.machine, view.version)?;
    Ok(Some(CachedTask { view, definition, body_bytes }))
}

/// Rejects the jobs that cannot be submitted.
fn check_jobs(tx: &Tx, batch: &mut Batch, plan: &mut Plan, now: Timestamp) -> Result<()> {
    let mut checked = 0;
    while let Some(job) = plan.jobs.get(checked) {
        match lane_of(tx, LaneName::of(job)) {
            Ok(_) => checked += 1,
            Err(error) => batch.reject(plan, checked, rejection(error)?, now),
        }
    }
    Ok(())
}

/// Writes everything but the tasks themselves.
fn write(tx: &Tx, plan: Plan, now: Timestamp) -> Result<Vec<Option<TaskAnswer>>> {
    let mut insert =
        tx.connection.prepare_cached("INSERT INTO task_record (task, sequence, record) VALUES (?, ?, ?)")?;
    for (task, record) in &plan.records {
        insert.execute((task.0, record.sequence as i64, to_text(record)?))?;
    }
    let mut insert =
        tx.connection.prepare_cached("INSERT INTO task_inbox (task, event_id, answer) VALUES (?, ?, ?)")?;
    for (task, event, answer) in &plan.inbox {
        insert.execute((task.0, event, to_text(answer)?))?;
    }
    if !plan.jobs.is_empty() {
        events::with_actor(tx, TASKS, |tx| submit(tx, plan.jobs, now).map(|_| ()))?;
    }
    let mut insert =
        tx.connection.prepare_cached("INSERT INTO task_job (job, task, name, state, epoch) VALUES (?, ?, ?, ?, ?)")?;
    for link in &plan.links {
        insert.execute((link.job.0, link.task.0, &link.name, &link.state, link.epoch as i64))?;
    }
    for event in &plan.events {
        put_event(tx, event, now)?;
    }
    if !plan.events.is_empty() {
        tx.signal(Signal::Event);
    }
    for webhook in plan.webhooks {
        webhooks::put(tx, webhook)?;
    }
    Ok(plan.answers)
}

/// Records an event of a task, whether or not a subscription matches it: a service that connects later must still find it.
fn put_event(tx: &Tx, event: &TaskEvent, now: Timestamp) -> Result<()> {
    let connection = tx.connection;
    connection
        .prepare_cached(
            "INSERT INTO event (id, type, subject, sequence, at, correlation, actor, data) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        )?
        .execute((
            event.id,
            &event.kind,
            event.task.0,
            event.sequence as i64,
            now.as_ms(),
            &event.correlation,
            &event.actor,
            &event.data,
        ))?;
    if !tx.shared.events_on.load(Ordering::Relaxed) {
        return Ok(());
    }
    let position = connection.last_insert_rowid();
    let partition = i64::from(event.task.0.as_bytes()[15] & 15);
    connection
        .prepare_cached(
            "INSERT INTO outbox (sink, partition, position, subject)
             SELECT s.id, ?1, ?2, ?3 FROM subscription s
             WHERE s.queued AND EXISTS (SELECT 1 FROM subscription_pattern p WHERE p.subscription = s.id AND ?4 GLOB p.pattern)",
        )?
        .execute((partition, position, event.task.0, &event.kind))?;
    Ok(())
}

fn fire(tx: &Tx, limit: usize, now: Timestamp) -> Result<TasksFired> {
    let jobs = ended_jobs(tx, limit, now)?;
    let mut statement =
        tx.connection.prepare_cached("SELECT id FROM task WHERE due_at <= ? ORDER BY due_at LIMIT ?")?;
    let due: Vec<TaskId> = statement
        .query_map((now.as_ms(), limit as i64), |row| Ok(TaskId(row.get(0)?)))?
        .collect::<rusqlite::Result<_>>()?;
    let (tasks, ended) = (due.len(), jobs.len());
    let timers = due.into_iter().map(|task| TaskInput { task, input: Input::Timers });
    let (_, deadlines_missed) = apply_to(tx, &[(jobs.into_iter().chain(timers).collect(), now)], None)?;
    let started = task_limits::start_queued(tx, limit, now)?;
    let next_at: Option<i64> = tx
        .connection
        .prepare_cached("SELECT min(due_at) FROM task WHERE due_at IS NOT NULL")?
        .query_row([], |row| row.get(0))?;
    let next_at = next_at.map(Timestamp::from_ms);
    Ok(TasksFired { tasks, jobs: ended, started, deadlines_missed, next_at })
}

const ENDED_JOBS: &str = sql!(
    "SELECT t.job, t.task, t.name, t.state, t.epoch, d.id IS NOT NULL, d.result, e.error, coalesce(e.reason, 'deleted')
         FROM task_job t
         LEFT JOIN job j ON j.id = t.job
         LEFT JOIN done d ON d.lane = j.lane AND d.id = j.id
         LEFT JOIN ended e ON e.lane = j.lane AND e.state IN ({FAILED}, {CANCELLED}) AND e.id = j.id
         WHERE t.ended = 1 LIMIT ?"
);

/// Deletes the links to ended jobs, and returns the inputs for their tasks.
fn ended_jobs(tx: &Tx, limit: usize, now: Timestamp) -> Result<Vec<TaskInput>> {
    let mut statement = tx.connection.prepare_cached(ENDED_JOBS)?;
    let rows = statement.query_map([limit as i64], |row| Ok((link(row)?, row_end(row)?)))?;
    let ended = rows.collect::<rusqlite::Result<Vec<_>>>()?;
    let mut delete = tx.connection.prepare_cached("DELETE FROM task_job WHERE job = ?")?;
    let mut inputs = Vec::new();
    for (link, end) in ended {
        delete.execute([link.job.0])?;
        inputs.push(job_end(&link, end, now));
    }
    Ok(inputs)
}

fn link(row: &Row<'_>) -> rusqlite::Result<TaskJob> {
    Ok(TaskJob {
        job: JobId(row.get(0)?),
        task: TaskId(row.get(1)?),
        name: row.get(2)?,
        state: row.get(3)?,
        epoch: row.get::<_, i64>(4)? as u64,
    })
}

fn row_end(row: &Row<'_>) -> rusqlite::Result<JobEnd> {
    match row.get(5)? {
        true => Ok(JobEnd::Completed { result: row.get(6)? }),
        false => Ok(JobEnd::Failed { error: row.get(7)?, reason: row.get(8)? }),
    }
}

fn counts(connection: &Connection) -> Result<BTreeMap<String, u64>> {
    let sql = format!(
        "SELECT coalesce(sum((SELECT count(*) FROM (SELECT 1 FROM task t
             WHERE t.machine = m.name AND t.version = m.version AND t.status = ?1 LIMIT {COUNT_LIMIT}))), 0) FROM machine m"
    );
    let mut count = connection.prepare_cached(&sql)?;
    let mut counts = BTreeMap::new();
    for status in Status::ALL.map(Status::as_str) {
        let tasks: i64 = count.query_row([status], |row| row.get(0))?;
        counts.insert(status.to_owned(), tasks as u64);
    }
    Ok(counts)
}

fn figures(connection: &Connection) -> Result<TaskFigures> {
    // SQLite: the order of the tables makes it read only tasks that have not ended.
    let mut statement = connection.prepare_cached(
        "SELECT t.machine, t.state, count(*), min(t.entered_at) FROM machine m CROSS JOIN task t
         ON t.machine = m.name AND t.version = m.version AND t.status IN ('running', 'paused') GROUP BY t.machine, t.state",
    )?;
    let rows = statement.query_map([], |row| {
        let (tasks, since) = (row.get::<_, i64>(2)? as u64, Timestamp::from_ms(row.get(3)?));
        Ok(TasksInState { machine: row.get(0)?, state: row.get(1)?, tasks, since })
    })?;
    let states = rows.collect::<rusqlite::Result<_>>()?;
    let (approvals, oldest, next): (i64, Option<i64>, Option<i64>) = connection
        .prepare_cached(
            "SELECT count(*), min(entered_at), (SELECT min(due_at) FROM task WHERE due_at IS NOT NULL)
             FROM task WHERE approval = 1",
        )?
        .query_row([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?;
    let mut statement = connection.prepare_cached(
        "SELECT machine, count(*), min(entered_at) FROM task WHERE status = 'queued' GROUP BY machine ORDER BY machine",
    )?;
    let rows = statement.query_map([], |row| {
        let (tasks, since) = (row.get::<_, i64>(1)? as u64, Timestamp::from_ms(row.get(2)?));
        Ok(QueuedTasks { machine: row.get(0)?, tasks, since })
    })?;
    let queued = rows.collect::<rusqlite::Result<_>>()?;
    let (oldest_approval_at, next_at) = (oldest.map(Timestamp::from_ms), next.map(Timestamp::from_ms));
    Ok(TaskFigures { states, queued, approvals: approvals as u64, oldest_approval_at, next_at })
}

fn task_row(row: &Row<'_>) -> rusqlite::Result<TaskRow> {
    Ok(TaskRow {
        id: row.get(0)?,
        machine: row.get(1)?,
        version: row.get(2)?,
        title: row.get(3)?,
        correlation: row.get(4)?,
        tags: row.get(5)?,
        updated_at: row.get(6)?,
        body: row.get(7)?,
        events: row.get(8)?,
    })
}

fn get(connection: &Connection, id: TaskId) -> Result<Option<TaskView>> {
    let mut statement = connection.prepare_cached(&format!("SELECT {COLUMNS} FROM task WHERE id = ?"))?;
    statement.query_row([id.0], task_row).optional()?.map(TaskRow::view).transpose()
}

const CONDITION: &str = "(?1 IS NULL OR machine = ?1) AND (?2 IS NULL OR version = ?2) AND (?3 IS NULL OR status = ?3)
     AND (?4 IS NULL OR state = ?4 OR state LIKE ?4 || '.%' OR state LIKE '%.' || ?4 OR state LIKE '%.' || ?4 || '.%')
     AND (?5 IS NULL OR correlation = ?5) AND (NOT ?6 OR approval = 1)
     AND (?7 IS NULL OR EXISTS (SELECT 1 FROM task_tag g WHERE g.tag = ?7 AND g.task = task.id)) AND (NOT ?8 OR ended_at IS NULL)";

/// Returns the parameters of [`CONDITION`].
fn condition_values(filter: &TaskFilter) -> Vec<Value> {
    let text = |text: Option<&str>| text.map_or(Value::Null, |text| text.to_owned().into());
    vec![
        text(filter.machine.as_deref()),
        filter.version.map_or(Value::Null, Value::from),
        text(filter.status.map(Status::as_str)),
        text(filter.state.as_deref()),
        text(filter.correlation.as_deref()),
        i64::from(filter.approval).into(),
        text(filter.tag.as_deref()),
        i64::from(filter.open).into(),
    ]
}

fn id_value(id: Option<TaskId>) -> Value {
    id.map_or(Value::Null, |id| Value::Blob(id.0.as_bytes().to_vec()))
}

fn list(
    connection: &Connection,
    filter: &TaskFilter,
    before: Option<TaskId>,
    limit: usize,
) -> Result<(Vec<TaskView>, u64)> {
    let mut values = condition_values(filter);
    let count = format!("SELECT count(*) FROM (SELECT 1 FROM task WHERE {CONDITION} LIMIT {COUNT_LIMIT})");
    let total: i64 = connection.prepare_cached(&count)?.query_row(params_from_iter(&values), |row| row.get(0))?;
    let sql =
        format!("SELECT {COLUMNS} FROM task WHERE {CONDITION} AND (?9 IS NULL OR id < ?9) ORDER BY id DESC LIMIT ?10");
    let mut statement = connection.prepare_cached(&sql)?;
    values.extend([id_value(before), (limit as i64).into()]);
    let rows = statement.query_map(params_from_iter(&values), task_row)?;
    let tasks: Result<Vec<TaskView>> = rows.map(|row| row?.view()).collect();
    Ok((tasks?, total as u64))
}

fn find(
    connection: &Connection,
    filter: &TaskFilter,
    after: Option<TaskId>,
    up_to: TaskId,
    limit: usize,
) -> Result<Vec<TaskId>> {
    let sql = format!(
        "SELECT id FROM task WHERE {CONDITION} AND (?9 IS NULL OR id > ?9) AND id <= ?10 ORDER BY id LIMIT ?11"
    );
    let mut values = condition_values(filter);
    values.extend([id_value(after), id_value(Some(up_to)), (limit as i64).into()]);
    let mut statement = connection.prepare_cached(&sql)?;
    let ids = statement.query_map(params_from_iter(&values), |row| Ok(TaskId(row.get(0)?)))?;
    Ok(ids.collect::<rusqlite::Result<_>>()?)
}

fn states(connection: &Connection, machine: &str, version: u32) -> Result<Vec<StateCount>> {
    let mut statement = connection.prepare_cached(
        "SELECT state, count(*) FROM task WHERE machine = ? AND version = ? AND status IN ('running', 'paused')
         GROUP BY state ORDER BY state",
    )?;
    let rows = statement.query_map((machine, version), |row| {
        Ok(StateCount { state: row.get(0)?, tasks: row.get::<_, i64>(1)? as u64 })
    })?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}

fn history(connection: &Connection, id: TaskId, after: u64, limit: usize) -> Result<Vec<Record>> {
    let mut statement = connection
        .prepare_cached("SELECT record FROM task_record WHERE task = ? AND sequence > ? ORDER BY sequence LIMIT ?")?;
    let rows = statement.query_map((id.0, after as i64, limit as i64), |row| row.get::<_, String>(0))?;
    rows.map(|row| serde_json::from_str(&row?).map_err(|error| StoreError::Internal(error.to_string().into())))
        .collect()
}

fn prune(tx: &Tx, before: Timestamp, limit: usize) -> Result<usize> {
    let mut statement =
        tx.connection.prepare_cached("SELECT id FROM task WHERE ended_at < ? ORDER BY ended_at LIMIT ?")?;
    let ids: Vec<TaskId> = statement
        .query_map((before.as_ms(), limit as i64), |row| Ok(TaskId(row.get(0)?)))?
        .collect::<rusqlite::Result<_>>()?;
    for id in &ids {
        webhooks::remove(tx, id.0)?;
        for sql in [
            "DELETE FROM task_record WHERE task = ?",
            "DELETE FROM task_inbox WHERE task = ?",
            "DELETE FROM task_job WHERE task = ?",
            "DELETE FROM task_tag WHERE task = ?",
            "DELETE FROM task_key WHERE task = ?",
            "DELETE FROM task_usage WHERE task = ?",
            "DELETE FROM task WHERE id = ?",
        ] {
            tx.connection.prepare_cached(sql)?.execute([id.0])?;
        }
    }
    Ok(ids.len())
}
