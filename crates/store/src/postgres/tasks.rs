//! Machines and tasks.

use std::{collections::HashMap, time::Instant};

use async_trait::async_trait;
use deadpool_postgres::Object;
use faena_domain::{JobId, TaskId, Timestamp};
use faena_machine::{Input, Record};
use tokio_postgres::{Row, types::ToSql};
use uuid::Uuid;

use super::{
    Postgres, Shared, audit,
    batch::{Answer, Weight},
    end::storable,
    events,
    machines::{definition, from_version_number, machine, machines, register, version_number},
    submit::{self, lane_of},
    task_lists,
};
use crate::{
    LaneId, MachineStatus, NewMachine, NewTask, Registered, Result, Signal, StateCount, StoreError, StoredMachine,
    TaskAnswer, TaskFigures, TaskFilter, TaskInput, TaskMeasures, TaskStore, TaskView, TasksFired,
    lanes::LaneName,
    schedules::rejection,
    sql::sql,
    tasks::{
        Batch, COLUMNS, JobEnd, Plan, TASKS, TaskEvent, TaskJob, TaskRow, entered_at, event_ids, job_end, status_text,
        tags_text, task_ids, to_text,
    },
};

#[async_trait]
impl TaskStore for Postgres {
    async fn machine_register(&self, machine: NewMachine, by: &str, now: Timestamp) -> Result<Registered> {
        self.shared.retrying(|| register(&self.shared, &machine.definition, by, now)).await
    }

    async fn machine_list(&self) -> Result<Vec<MachineStatus>> {
        self.shared.retrying(|| machines(&self.shared)).await
    }

    async fn machine_get(&self, name: &str, version: Option<u32>) -> Result<Option<StoredMachine>> {
        self.shared
            .retrying(|| async {
                let client = self.shared.client().await?;
                let found = machine(&client, &self.shared, name, version).await;
                client.return_to_pool(found)
            })
            .await
    }

    async fn task_create(&self, task: NewTask, now: Timestamp) -> Result<()> {
        self.shared.retrying(|| create(&self.shared, &task, now)).await
    }

    async fn task_apply(&self, inputs: Vec<TaskInput>, now: Timestamp) -> Result<Vec<Option<TaskAnswer>>> {
        let started = Instant::now();
        let answers = self.tasks.call(|answer| Call { inputs, now, answer }).await?;
        self.shared.task_meter.count(&answers, started.elapsed());
        Ok(answers)
    }

    async fn task_fire(&self, limit: usize, now: Timestamp) -> Result<TasksFired> {
        let fired = self.shared.retrying(|| fire(&self.shared, limit, now)).await?;
        self.shared.task_meter.count_fired(&fired);
        Ok(fired)
    }

    async fn task_figures(&self) -> Result<TaskFigures> {
        self.shared.retrying(|| task_lists::figures(&self.shared)).await
    }

    fn task_measures(&self) -> TaskMeasures {
        self.shared.task_meter.measures()
    }

    async fn task_get(&self, id: TaskId) -> Result<Option<TaskView>> {
        self.shared.retrying(|| get(&self.shared, id)).await
    }

    async fn task_list(
        &self,
        filter: TaskFilter,
        before: Option<TaskId>,
        limit: usize,
    ) -> Result<(Vec<TaskView>, u64)> {
        self.shared.retrying(|| task_lists::list(&self.shared, &filter, before, limit)).await
    }

    async fn task_find(
        &self,
        filter: &TaskFilter,
        after: Option<TaskId>,
        up_to: TaskId,
        limit: usize,
    ) -> Result<Vec<TaskId>> {
        self.shared.retrying(|| task_lists::find(&self.shared, filter, after, up_to, limit)).await
    }

    async fn task_states(&self, machine: &str, version: u32) -> Result<Vec<StateCount>> {
        self.shared.retrying(|| task_lists::states(&self.shared, machine, version)).await
    }

    async fn task_history(&self, id: TaskId, after: u64, limit: usize) -> Result<Vec<Record>> {
        self.shared.retrying(|| history(&self.shared, id, after, limit)).await
    }

    async fn task_prune(&self, before: Timestamp, limit: usize) -> Result<usize> {
        self.shared.retrying(|| prune(&self.shared, before, limit)).await
    }
}

/// What follows a commit.
#[derive(Default)]
pub struct AfterCommit {
    put: submit::NestedSubmission,
    /// The earliest time at which a task is due now and was not due before.
    new_due: Option<Timestamp>,
    has_events: bool,
    deadlines_missed: usize,
}

impl AfterCommit {
    pub fn send(self, shared: &Shared) {
        self.put.signal(shared);
        shared.signal(self.new_due.map(Signal::TaskDue));
        if self.has_events {
            shared.signal([Signal::Event]);
        }
    }
}

async fn create(shared: &Shared, new: &NewTask, now: Timestamp) -> Result<()> {
    let client = shared.begin().await?;
    let mut after_commit = AfterCommit::default();
    let result = create_in(shared, &client, new, &mut after_commit, now).await;
    client.end(result).await?;
    after_commit.send(shared);
    Ok(())
}

pub async fn create_in(
    shared: &Shared,
    client: &Object,
    new: &NewTask,
    after_commit: &mut AfterCommit,
    now: Timestamp,
) -> Result<()> {
    let mut batch = Batch::default();
    let mut plan = batch.plan_new(new, now);
    let lanes = check_jobs(shared, &mut batch, &mut plan, now).await?;
    let columns = TaskColumns::of(&batch)?;
    let changed: Vec<&TaskView> = batch.changed().map(|(_, view)| view).collect();
    let machines: Vec<&str> = changed.iter().map(|view| view.machine.as_str()).collect();
    let titles: Vec<Option<String>> =
        changed.iter().map(|view| view.title.as_deref().map(|title| storable(title).into_owned())).collect();
    let correlations: Vec<String> = changed.iter().map(|view| storable(&view.correlation).into_owned()).collect();
    let tags = changed
        .iter()
        .map(|view| Ok(tags_text(&view.tags)?.map(|tags| storable(&tags).into_owned())))
        .collect::<Result<Vec<Option<String>>>>()?;
    let mut parameters = columns.parameters().to_vec();
    parameters.extend([&machines as &(dyn ToSql + Sync), &titles, &correlations, &tags]);
    client
        .execute(
            "INSERT INTO faena.task (id, status, state, updated_at, ended_at, due_at, approval, body, version, entered_at, machine, title, correlation, tags)
             SELECT * FROM unnest($1::uuid[], $2::text[], $3::text[], $4::int8[], $5::int8[], $6::int8[], $7::bool[], $8::text[],
                 $9::int4[], $10::int8[], $11::text[], $12::text[], $13::text[], $14::text[])",
            &parameters,
        )
        .await?;
    if !new.tags.is_empty() {
        let tags: Vec<String> = new.tags.iter().map(|tag| storable(tag).into_owned()).collect();
        let sql = "INSERT INTO faena.task_tag (tag, task) SELECT unnest($1::text[]), $2 ON CONFLICT DO NOTHING";
        client.execute(sql, &[&tags, &new.id.0]).await?;
    }
    if let Some(entry) = &new.audit {
        audit::add(client, entry, now).await?;
    }
    after_commit.new_due = batch.new_due();
    write(shared, client, plan, lanes, after_commit, now).await.map(|_| ())
}

/// The changing columns of the tasks of a batch.
#[derive(Default)]
struct TaskColumns {
    ids: Vec<Uuid>,
    statuses: Vec<&'static str>,
    states: Vec<String>,
    updated_at: Vec<i64>,
    ended_at: Vec<Option<i64>>,
    due_at: Vec<Option<i64>>,
    approvals: Vec<bool>,
    bodies: Vec<String>,
    versions: Vec<i32>,
    entered_at: Vec<i64>,
}

impl TaskColumns {
    fn of(batch: &Batch) -> Result<TaskColumns> {
        let mut columns = TaskColumns::default();
        for (id, view) in batch.changed() {
            columns.ids.push(id.0);
            columns.statuses.push(status_text(view.task.status));
            columns.states.push(view.task.state());
            columns.updated_at.push(view.updated_at.as_ms());
            columns.ended_at.push(view.task.ended_at.map(Timestamp::as_ms));
            columns.due_at.push(view.task.due().map(Timestamp::as_ms));
            columns.approvals.push(view.task.approval.is_some());
            columns.bodies.push(to_text(&view.task)?);
            columns.versions.push(version_number(view.version));
            columns.entered_at.push(entered_at(&view.task).as_ms());
        }
        Ok(columns)
    }

    fn parameters(&self) -> [&(dyn ToSql + Sync); 10] {
        [
            &self.ids,
            &self.statuses,
            &self.states,
            &self.updated_at,
            &self.ended_at,
            &self.due_at,
            &self.approvals,
            &self.bodies,
            &self.versions,
            &self.entered_at,
        ]
    }
}

/// Inputs of one caller.
pub struct Call {
    inputs: Vec<TaskInput>,
    now: Timestamp,
    answer: Answer<Vec<Option<TaskAnswer>>>,
}

impl Weight for Call {
    fn weight(&self) -> usize {
        self.inputs.len()
    }
}

/// Applies the inputs of all `calls` in one transaction.
pub async fn run(shared: &Shared, calls: Vec<Call>) {
    let (inputs, answers): (Vec<TimedInputs>, Vec<_>) =
        calls.into_iter().map(|call| ((call.inputs, call.now), call.answer)).unzip();
    let mut results = match shared.retrying(|| apply(shared, &inputs)).await {
        Ok(results) => results.into_iter(),
        Err(error) => {
            for answer in answers {
                let _ = answer.send(Err(error.clone_for_caller()));
            }
            return;
        }
    };
    for ((inputs, _), answer) in inputs.iter().zip(answers) {
        let _ = answer.send(Ok(results.by_ref().take(inputs.len()).collect()));
    }
}

/// Inputs of one caller, with its time.
pub type TimedInputs = (Vec<TaskInput>, Timestamp);

async fn apply(shared: &Shared, calls: &[TimedInputs]) -> Result<Vec<Option<TaskAnswer>>> {
    let client = shared.begin().await?;
    let mut after_commit = AfterCommit::default();
    let result = apply_in(shared, &client, calls, &mut after_commit).await;
    let answers = client.end(result).await?;
    after_commit.send(shared);
    Ok(answers)
}

async fn apply_in(
    shared: &Shared,
    client: &Object,
    calls: &[TimedInputs],
    after_commit: &mut AfterCommit,
) -> Result<Vec<Option<TaskAnswer>>> {
    apply_to(shared, client, calls, None, after_commit).await
}

/// Applies inputs to those tasks that match `only`.
pub async fn apply_to(
    shared: &Shared,
    client: &Object,
    calls: &[TimedInputs],
    only: Option<TaskFilter>,
    after_commit: &mut AfterCommit,
) -> Result<Vec<Option<TaskAnswer>>> {
    let all: Vec<&TaskInput> = calls.iter().flat_map(|(inputs, _)| inputs).collect();
    let ids: Vec<Uuid> = task_ids(&all).into_iter().map(|id| id.0).collect();
    let sql = format!("SELECT {COLUMNS} FROM faena.task WHERE id = ANY($1) ORDER BY id FOR UPDATE");
    let statement = client.prepare_cached(&sql).await?;
    let mut batch = Batch { only, ..Batch::default() };
    for row in client.query(&statement, &[&ids]).await? {
        let row = task_row(&row);
        let id = TaskId(row.id);
        let view = row.view()?;
        let definition = definition(client, shared, &view.machine, view.version).await?;
        batch.add(id, view, definition);
    }
    batch.known = known_answers(client, &all).await?;
    let mut plan = Plan::default();
    for (inputs, now) in calls {
        batch.plan(&mut plan, inputs.clone(), *now);
    }
    let now = calls.iter().map(|(_, now)| *now).max().unwrap_or_default();
    let lanes = check_jobs(shared, &mut batch, &mut plan, now).await?;
    after_commit.deadlines_missed += plan.deadlines_missed();
    let columns = TaskColumns::of(&batch)?;
    if !columns.ids.is_empty() {
        let statement = client
            .prepare_cached(
                "UPDATE faena.task t SET status = c.status, state = c.state, updated_at = c.updated_at, ended_at = c.ended_at,
                     due_at = c.due_at, approval = c.approval, body = c.body, version = c.version,
                     entered_at = c.entered_at
                 FROM unnest($1::uuid[], $2::text[], $3::text[], $4::int8[], $5::int8[], $6::int8[], $7::bool[], $8::text[],
                     $9::int4[], $10::int8[]) AS c(id, status, state, updated_at, ended_at, due_at, approval, body, version, entered_at)
                 WHERE t.id = c.id",
            )
            .await?;
        client.execute(&statement, &columns.parameters()).await?;
        after_commit.new_due = after_commit.new_due.into_iter().chain(batch.new_due()).min();
    }
    write(shared, client, plan, lanes, after_commit, now).await
}

async fn known_answers(client: &Object, inputs: &[&TaskInput]) -> Result<HashMap<(TaskId, String), TaskAnswer>> {
    let (tasks, events): (Vec<Uuid>, Vec<String>) =
        event_ids(inputs).into_iter().map(|(id, event)| (id.0, event)).unzip();
    if tasks.is_empty() {
        return Ok(HashMap::new());
    }
    let statement = client
        .prepare_cached(
            "SELECT i.task, i.event_id, i.answer FROM unnest($1::uuid[], $2::text[]) AS g(task, event_id)
             JOIN faena.task_inbox i ON i.task = g.task AND i.event_id = g.event_id",
        )
        .await?;
    let rows = client.query(&statement, &[&tasks, &events]).await?;
    let answers = rows.iter().filter_map(|row| {
        let answer = serde_json::from_str(row.get(2)).ok()?;
        Some(((TaskId(row.get(0)), row.get(1)), answer))
    });
    Ok(answers.collect())
}

/// Refuses the jobs that cannot be submitted, and returns the lanes of the others.
async fn check_jobs(shared: &Shared, batch: &mut Batch, plan: &mut Plan, now: Timestamp) -> Result<Vec<LaneId>> {
    let mut lanes = Vec::new();
    while let Some(job) = plan.jobs.get(lanes.len()) {
        match lane_of(shared, LaneName::of(job)).await {
            Ok(lane) => lanes.push(lane),
            Err(error) => batch.refuse(plan, lanes.len(), rejection(error)?, now),
        }
    }
    Ok(lanes)
}

/// Writes everything but the tasks themselves.
async fn write(
    shared: &Shared,
    client: &Object,
    plan: Plan,
    lanes: Vec<LaneId>,
    after_commit: &mut AfterCommit,
    now: Timestamp,
) -> Result<Vec<Option<TaskAnswer>>> {
    write_records(client, &plan).await?;
    if !plan.jobs.is_empty() {
        events::set_actor(client, TASKS).await?;
        after_commit.put.jobs(client, shared.own_shard(), plan.jobs, lanes, now).await?;
    }
    write_links(client, &plan.links).await?;
    if !plan.events.is_empty() {
        put_events(client, &plan.events, now).await?;
        after_commit.has_events = true;
    }
    Ok(plan.answers)
}

async fn write_records(client: &Object, plan: &Plan) -> Result<()> {
    if !plan.records.is_empty() {
        let tasks: Vec<Uuid> = plan.records.iter().map(|(task, _)| task.0).collect();
        let sequences: Vec<i64> =
            plan.records.iter().map(|(_, record)| i64::try_from(record.sequence).unwrap_or(i64::MAX)).collect();
        let records = plan.records.iter().map(|(_, record)| to_text(record)).collect::<Result<Vec<String>>>()?;
        let statement = client
            .prepare_cached(
                "INSERT INTO faena.task_record (task, sequence, record) SELECT * FROM unnest($1::uuid[], $2::int8[], $3::text[])",
            )
            .await?;
        client.execute(&statement, &[&tasks, &sequences, &records]).await?;
    }
    if !plan.inbox.is_empty() {
        let tasks: Vec<Uuid> = plan.inbox.iter().map(|(task, _, _)| task.0).collect();
        let events: Vec<&str> = plan.inbox.iter().map(|(_, event, _)| event.as_str()).collect();
        let answers = plan.inbox.iter().map(|(_, _, answer)| to_text(answer)).collect::<Result<Vec<String>>>()?;
        let statement = client
            .prepare_cached(
                "INSERT INTO faena.task_inbox (task, event_id, answer) SELECT * FROM unnest($1::uuid[], $2::text[], $3::text[])",
            )
            .await?;
        client.execute(&statement, &[&tasks, &events, &answers]).await?;
    }
    Ok(())
}

async fn write_links(client: &Object, links: &[TaskJob]) -> Result<()> {
    if links.is_empty() {
        return Ok(());
    }
    let jobs: Vec<Uuid> = links.iter().map(|link| link.job.0).collect();
    let tasks: Vec<Uuid> = links.iter().map(|link| link.task.0).collect();
    let names: Vec<&str> = links.iter().map(|link| link.name.as_str()).collect();
    let states: Vec<&str> = links.iter().map(|link| link.state.as_str()).collect();
    let epochs: Vec<i64> = links.iter().map(|link| i64::try_from(link.epoch).unwrap_or(i64::MAX)).collect();
    let statement = client
        .prepare_cached(
            "INSERT INTO faena.task_job (job, task, name, state, epoch)
             SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::int8[])",
        )
        .await?;
    client.execute(&statement, &[&jobs, &tasks, &names, &states, &epochs]).await?;
    Ok(())
}

async fn put_events(client: &Object, given: &[TaskEvent], now: Timestamp) -> Result<()> {
    let ids: Vec<Uuid> = given.iter().map(|event| event.id).collect();
    let kinds: Vec<&str> = given.iter().map(|event| event.kind.as_str()).collect();
    let subjects: Vec<Uuid> = given.iter().map(|event| event.task.0).collect();
    let times: Vec<i64> = given.iter().map(|_| now.as_ms()).collect();
    let correlations: Vec<String> = given.iter().map(|event| storable(&event.correlation).into_owned()).collect();
    let actors: Vec<String> = given.iter().map(|event| storable(&event.actor).into_owned()).collect();
    let data: Vec<&str> = given.iter().map(|event| event.data.as_str()).collect();
    let statement = client.prepare_cached("SELECT faena.put_events($2, $3, $4, $5, $6, NULL, $7, $1, true)").await?;
    client.query(&statement, &[&ids, &kinds, &subjects, &times, &correlations, &actors, &data]).await?;
    Ok(())
}

/// Tells tasks about ended jobs, then fires timers. Two transactions: this one locks due tasks in no order, without waiting, and must
/// not hold them while the other waits for its tasks.
async fn fire(shared: &Shared, limit: usize, now: Timestamp) -> Result<TasksFired> {
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let told = tell_of_jobs(shared, limit, now).await?;
    let fired = fire_timers(shared, limit, now).await?;
    let deadlines_missed = told.deadlines_missed + fired.deadlines_missed;
    Ok(TasksFired { jobs: told.jobs, deadlines_missed, ..fired })
}

async fn tell_of_jobs(shared: &Shared, limit: i64, now: Timestamp) -> Result<TasksFired> {
    let client = shared.begin().await?;
    let mut after_commit = AfterCommit::default();
    let result = async {
        let inputs = ended_jobs(&client, limit, now).await?;
        let jobs = inputs.len();
        if jobs > 0 {
            apply_in(shared, &client, &[(inputs, now)], &mut after_commit).await?;
        }
        Ok(jobs)
    };
    let result = result.await;
    let jobs = client.end(result).await?;
    let deadlines_missed = after_commit.deadlines_missed;
    after_commit.send(shared);
    Ok(TasksFired { jobs, deadlines_missed, ..TasksFired::default() })
}

async fn fire_timers(shared: &Shared, limit: i64, now: Timestamp) -> Result<TasksFired> {
    let client = shared.begin().await?;
    let mut after_commit = AfterCommit::default();
    let result = fire_timers_in(shared, &client, limit, &mut after_commit, now).await;
    let fired = client.end(result).await?;
    let deadlines_missed = after_commit.deadlines_missed;
    after_commit.send(shared);
    Ok(TasksFired { deadlines_missed, ..fired })
}

async fn fire_timers_in(
    shared: &Shared,
    client: &Object,
    limit: i64,
    after_commit: &mut AfterCommit,
    now: Timestamp,
) -> Result<TasksFired> {
    // Another node that fires at the same time takes other tasks.
    let statement = client
        .prepare_cached("SELECT id FROM faena.task WHERE due_at <= $1 ORDER BY due_at LIMIT $2 FOR UPDATE SKIP LOCKED")
        .await?;
    let due: Vec<Uuid> =
        client.query(&statement, &[&now.as_ms(), &limit]).await?.iter().map(|row| row.get(0)).collect();
    let tasks = due.len();
    let inputs: Vec<TaskInput> =
        due.into_iter().map(|id| TaskInput { task: TaskId(id), input: Input::Timers }).collect();
    if tasks > 0 {
        apply_in(shared, client, &[(inputs, now)], after_commit).await?;
    }
    let statement = client.prepare_cached("SELECT min(due_at) FROM faena.task WHERE due_at IS NOT NULL").await?;
    let next_at: Option<i64> = client.query_one(&statement, &[]).await?.get(0);
    Ok(TasksFired { tasks, next_at: next_at.map(Timestamp::from_ms), ..TasksFired::default() })
}

const ENDED_JOBS: &str = sql!(
    "DELETE FROM faena.task_job t USING (
         SELECT t.job, d.id IS NOT NULL AS completed, d.result, e.error, coalesce(e.reason, 'deleted') AS reason
         FROM faena.task_job t
         LEFT JOIN faena.job j ON j.id = t.job
         LEFT JOIN faena.done d ON d.lane = j.lane AND d.id = j.id
         LEFT JOIN faena.ended e ON e.lane = j.lane AND e.state IN ({FAILED}, {CANCELLED}) AND e.id = j.id
         WHERE t.ended ORDER BY t.task LIMIT $1 FOR UPDATE OF t SKIP LOCKED) AS f
     WHERE t.job = f.job
     RETURNING t.job, t.task, t.name, t.state, t.epoch, f.completed, f.result, f.error, f.reason"
);

/// Takes the links of ended jobs, and returns what to tell their tasks.
async fn ended_jobs(client: &Object, limit: i64, now: Timestamp) -> Result<Vec<TaskInput>> {
    let statement = client.prepare_cached(ENDED_JOBS).await?;
    let rows = client.query(&statement, &[&limit]).await?;
    Ok(rows.iter().map(|row| job_end(&link(row), row_end(row), now)).collect())
}

fn link(row: &Row) -> TaskJob {
    TaskJob {
        job: JobId(row.get(0)),
        task: TaskId(row.get(1)),
        name: row.get(2),
        state: row.get(3),
        epoch: u64::try_from(row.get::<_, i64>(4)).unwrap_or_default(),
    }
}

fn row_end(row: &Row) -> JobEnd {
    match row.get(5) {
        true => JobEnd::Completed { result: row.get(6) },
        false => JobEnd::Failed { error: row.get(7), reason: row.get(8) },
    }
}

pub fn task_row(row: &Row) -> TaskRow {
    TaskRow {
        id: row.get(0),
        machine: row.get(1),
        version: from_version_number(row.get(2)),
        title: row.get(3),
        correlation: row.get(4),
        tags: row.get(5),
        updated_at: row.get(6),
        body: row.get(7),
    }
}

async fn get(shared: &Shared, id: TaskId) -> Result<Option<TaskView>> {
    let client = shared.client().await?;
    let sql = format!("SELECT {COLUMNS} FROM faena.task WHERE id = $1");
    let row = client.query_opt(&sql, &[&id.0]).await.map_err(Into::into);
    client.return_to_pool(row)?.map(|row| task_row(&row).view()).transpose()
}

async fn history(shared: &Shared, id: TaskId, after: u64, limit: usize) -> Result<Vec<Record>> {
    let client = shared.client().await?;
    let (after, limit) = (i64::try_from(after).unwrap_or(i64::MAX), i64::try_from(limit).unwrap_or(i64::MAX));
    let sql = "SELECT record FROM faena.task_record WHERE task = $1 AND sequence > $2 ORDER BY sequence LIMIT $3";
    let rows = client.query(sql, &[&id.0, &after, &limit]).await.map_err(Into::into);
    let rows = client.return_to_pool(rows)?;
    let parse = |text: &str| serde_json::from_str(text).map_err(|error| StoreError::Internal(error.to_string().into()));
    rows.iter().map(|row| parse(row.get(0))).collect()
}

async fn prune(shared: &Shared, before: Timestamp, limit: usize) -> Result<usize> {
    let client = shared.begin().await?;
    let result = prune_in(&client, before, limit).await;
    client.end(result).await
}

async fn prune_in(client: &Object, before: Timestamp, limit: usize) -> Result<usize> {
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let sql = "DELETE FROM faena.task WHERE id IN (
                   SELECT id FROM faena.task WHERE ended_at < $1 ORDER BY ended_at LIMIT $2 FOR UPDATE SKIP LOCKED)
               RETURNING id";
    let ids: Vec<Uuid> = client.query(sql, &[&before.as_ms(), &limit]).await?.iter().map(|row| row.get(0)).collect();
    for (table, column) in [
        ("task_record", "task"),
        ("task_inbox", "task"),
        ("task_job", "task"),
        ("task_tag", "task"),
        ("event_head", "subject"),
    ] {
        client.execute(&format!("DELETE FROM faena.{table} WHERE {column} = ANY($1)"), &[&ids]).await?;
    }
    Ok(ids.len())
}
