//! Stores machines and tasks.

use std::{collections::BTreeMap, time::Instant};

use async_trait::async_trait;
use deadpool_postgres::Object;
use faena_domain::{JobId, NewJob, TaskId, Timestamp};
use faena_machine::{Input, Record};
use tokio_postgres::{Row, types::ToSql};
use uuid::Uuid;

use super::{
    Postgres, Shared,
    batch::{Answer, Weight},
    events,
    lanes::lane_of,
    machines::{definition, from_version_number, machine, machines, register},
    submit,
    task_creates::CreateCall,
    task_keys, task_limits, task_lists,
    task_writes::{BEGIN, TaskWrites, TransactionControl},
    webhooks,
};
use crate::{
    KeyedTask, LaneId, MachineStatus, NewMachine, NewTask, Registered, Result, Signal, StateCount, StoreError,
    StoredMachine, TaskAnswer, TaskFigures, TaskFilter, TaskInput, TaskKey, TaskMeasures, TaskPosition, TaskStore,
    TaskView, TasksFired,
    lanes::LaneName,
    schedules::rejection,
    sql::sql,
    task_limits::affects_queue,
    tasks::{Batch, COLUMNS, JobEnd, Plan, TASKS, TaskJob, TaskRow, event_ids, job_end, task_ids},
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
        self.creates.call(|answer| CreateCall { task, now, answer }).await
    }

    async fn task_create_once(&self, key: TaskKey, task: NewTask, now: Timestamp) -> Result<Option<KeyedTask>> {
        self.shared.retrying(|| task_keys::create_once(&self.shared, &key, &task, now)).await
    }

    async fn task_apply(&self, inputs: Vec<TaskInput>, now: Timestamp) -> Result<Vec<Option<TaskAnswer>>> {
        let started = Instant::now();
        // Calls for one task use the same batcher, so they keep their order and do not wait for each other's locks.
        let writer = inputs.first().map_or(0, |input| usize::from(input.task.0.as_bytes()[15]) % self.tasks.len());
        let answers = self.tasks[writer].call(|answer| Call { inputs, now, answer }).await?;
        self.shared.task_meter.count(&answers, started.elapsed());
        Ok(answers)
    }

    async fn task_fire(&self, limit: usize, now: Timestamp) -> Result<TasksFired> {
        let fired = self.shared.retrying(|| fire(&self.shared, limit, now)).await?;
        self.shared.task_meter.count_fired(&fired);
        Ok(fired)
    }

    async fn task_counts(&self) -> Result<BTreeMap<String, u64>> {
        self.shared.retrying(|| task_lists::counts(&self.shared)).await
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

    async fn task_position(&self, machine: &str, id: TaskId) -> Result<TaskPosition> {
        self.shared.retrying(|| task_limits::position(&self.shared, machine, id)).await
    }

    async fn task_history(&self, id: TaskId, after: u64, limit: usize) -> Result<Vec<Record>> {
        self.shared.retrying(|| history(&self.shared, id, after, limit)).await
    }

    async fn task_prune(&self, before: Timestamp, limit: usize) -> Result<usize> {
        self.shared.retrying(|| prune(&self.shared, before, limit)).await
    }
}

/// Signals and effects that follow the commit.
#[derive(Default)]
pub struct AfterCommit {
    submission: submit::NestedSubmission,
    /// The earliest due time among the tasks that became due earlier than before.
    new_due: Option<Timestamp>,
    affects_queue: bool,
    has_events: bool,
    has_webhooks: bool,
    deadlines_missed: usize,
}

impl AfterCommit {
    pub fn add(&mut self, shared: &Shared, batch: &Batch, plan: &Plan) {
        self.affects_queue |= affects_queue(&shared.rules.current(), batch);
        self.new_due = self.new_due.into_iter().chain(batch.new_due()).min();
        self.has_events |= !plan.events.is_empty();
        self.has_webhooks |= !plan.webhooks.is_empty();
        self.deadlines_missed += plan.deadlines_missed();
    }

    pub fn send(self, shared: &Shared) {
        self.submission.signal(shared);
        shared.signal(self.new_due.map(Signal::TaskDue));
        if self.affects_queue {
            shared.signal([Signal::TaskQueue]);
        }
        if self.has_events {
            shared.signal([Signal::Event]);
        }
        if self.has_webhooks {
            shared.signal([Signal::Webhook]);
        }
    }
}

pub async fn put_webhooks(client: &Object, plan: &Plan) -> Result<()> {
    if plan.webhooks.is_empty() { Ok(()) } else { webhooks::put(client, &plan.webhooks).await }
}

pub async fn submit_jobs(
    shared: &Shared,
    client: &Object,
    jobs: Vec<NewJob>,
    lanes: Vec<LaneId>,
    after_commit: &mut AfterCommit,
    now: Timestamp,
) -> Result<()> {
    if !jobs.is_empty() {
        events::set_actor(client, TASKS).await?;
        after_commit.submission.store(client, shared.own_shard(), jobs, lanes, now).await?;
    }
    Ok(())
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

    fn is_abandoned(&self) -> bool {
        self.answer.is_closed()
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
    let client = shared.client().await?;
    let mut after_commit = AfterCommit::default();
    let answers =
        match apply_with(shared, &client, calls, None, TransactionControl::BeginAndCommit, &mut after_commit).await {
            Ok(answers) => client.return_to_pool(Ok(answers))?,
            Err(error) => return client.end(Err(error)).await,
        };
    after_commit.send(shared);
    Ok(answers)
}

/// Applies inputs to those tasks that match `only`, if it is given, in a transaction that the caller commits. Returns
/// the answers.
pub async fn apply_to(
    shared: &Shared,
    client: &Object,
    calls: &[TimedInputs],
    only: Option<TaskFilter>,
    after_commit: &mut AfterCommit,
) -> Result<Vec<Option<TaskAnswer>>> {
    apply_with(shared, client, calls, only, TransactionControl::ByCaller, after_commit).await
}

/// Applies inputs: one round trip to lock and read, one to write.
async fn apply_with(
    shared: &Shared,
    client: &Object,
    calls: &[TimedInputs],
    only: Option<TaskFilter>,
    control: TransactionControl,
    after_commit: &mut AfterCommit,
) -> Result<Vec<Option<TaskAnswer>>> {
    let mut batch = Batch { only, ..Batch::default() };
    read_batch(shared, client, calls, &mut batch, control).await?;
    let mut plan = Plan::default();
    for (inputs, now) in calls {
        batch.plan(&mut plan, inputs.clone(), *now);
    }
    let now = calls.iter().map(|(_, now)| *now).max().unwrap_or_default();
    let lanes = check_jobs(shared, &mut batch, &mut plan, now).await?;
    after_commit.add(shared, &batch, &plan);
    put_webhooks(client, &plan).await?;
    submit_jobs(shared, client, std::mem::take(&mut plan.jobs), lanes, after_commit, now).await?;
    let control = if control == TransactionControl::BeginAndCommit { TransactionControl::CommitOnly } else { control };
    TaskWrites::of_changed(&mut batch, &plan, now)?.send(client, control).await?;
    Ok(plan.answers)
}

/// Locks the tasks in the order of their ids, and reads them and the answers to events that have arrived before.
async fn read_batch(
    shared: &Shared,
    client: &Object,
    calls: &[TimedInputs],
    batch: &mut Batch,
    control: TransactionControl,
) -> Result<()> {
    let all: Vec<&TaskInput> = calls.iter().flat_map(|(inputs, _)| inputs).collect();
    let ids: Vec<Uuid> = task_ids(&all).into_iter().map(|id| id.0).collect();
    let (tasks, events): (Vec<Uuid>, Vec<String>) =
        event_ids(&all).into_iter().map(|(id, event)| (id.0, event)).unzip();
    let lock = client.prepare_cached(&lock_sql()).await?;
    let find = client.prepare_cached(FIND_ANSWERS).await?;
    let (lock_parameters, find_parameters): ([&(dyn ToSql + Sync); 1], [&(dyn ToSql + Sync); 2]) =
        ([&ids], [&tasks, &events]);
    // PostgreSQL: each statement sees what was committed before it began. So the answers, which are read after the tasks are locked,
    // are complete.
    let (begun, locked, found) = futures_util::join!(
        async {
            if control == TransactionControl::BeginAndCommit { client.batch_execute(BEGIN).await } else { Ok(()) }
        },
        client.query(&lock, &lock_parameters),
        async { if tasks.is_empty() { Ok(Vec::new()) } else { client.query(&find, &find_parameters).await } },
    );
    begun?;
    for row in locked? {
        let row = task_row(&row);
        let (id, body_bytes) = (TaskId(row.id), row.body.len());
        let view = row.view()?;
        let definition = definition(client, shared, &view.machine, view.version).await?;
        batch.add(id, view, definition, body_bytes);
    }
    let answers = found?.into_iter().filter_map(|row| {
        let answer = serde_json::from_str(row.get(2)).ok()?;
        Some(((TaskId(row.get(0)), row.get(1)), answer))
    });
    batch.known.extend(answers);
    Ok(())
}

/// Rejects the jobs that cannot be submitted, and returns the lanes of the others.
pub async fn check_jobs(shared: &Shared, batch: &mut Batch, plan: &mut Plan, now: Timestamp) -> Result<Vec<LaneId>> {
    let mut lanes = Vec::new();
    while let Some(job) = plan.jobs.get(lanes.len()) {
        match lane_of(shared, LaneName::of(job)).await {
            Ok(lane) => lanes.push(lane),
            Err(error) => batch.reject(plan, lanes.len(), rejection(error)?, now),
        }
    }
    Ok(lanes)
}

/// Notifies tasks of ended jobs, fires timers, and starts queued tasks, each in a transaction of its own: firing locks due tasks in
/// any order, without waiting, and must not hold these locks while another step waits for its tasks.
async fn fire(shared: &Shared, limit: usize, now: Timestamp) -> Result<TasksFired> {
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let notified = notify_of_ended_jobs(shared, limit, now).await?;
    let (mut fired, has_queued) = fire_timers(shared, limit, now).await?;
    fired.jobs = notified.jobs;
    fired.deadlines_missed += notified.deadlines_missed;
    if has_queued {
        fired.started = task_limits::start_queued(shared, limit, now).await?;
    }
    Ok(fired)
}

async fn notify_of_ended_jobs(shared: &Shared, limit: i64, now: Timestamp) -> Result<TasksFired> {
    let client = shared.begin().await?;
    let mut after_commit = AfterCommit::default();
    let result = async {
        let inputs = ended_jobs(&client, limit, now).await?;
        let jobs = inputs.len();
        if jobs > 0 {
            apply_to(shared, &client, &[(inputs, now)], None, &mut after_commit).await?;
        }
        Ok(jobs)
    };
    let result = result.await;
    let jobs = client.end(result).await?;
    let deadlines_missed = after_commit.deadlines_missed;
    after_commit.send(shared);
    Ok(TasksFired { jobs, deadlines_missed, ..TasksFired::default() })
}

/// Fires the timers of due tasks. Also returns whether tasks are queued.
async fn fire_timers(shared: &Shared, limit: i64, now: Timestamp) -> Result<(TasksFired, bool)> {
    let client = shared.begin().await?;
    let mut after_commit = AfterCommit::default();
    let result = fire_timers_in(shared, &client, limit, &mut after_commit, now).await;
    let (fired, has_queued) = client.end(result).await?;
    let deadlines_missed = after_commit.deadlines_missed;
    after_commit.send(shared);
    Ok((TasksFired { deadlines_missed, ..fired }, has_queued))
}

async fn fire_timers_in(
    shared: &Shared,
    client: &Object,
    limit: i64,
    after_commit: &mut AfterCommit,
    now: Timestamp,
) -> Result<(TasksFired, bool)> {
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
        apply_to(shared, client, &[(inputs, now)], None, after_commit).await?;
    }
    let statement = client
        .prepare_cached(
            "SELECT (SELECT min(due_at) FROM faena.task WHERE due_at IS NOT NULL),
                 EXISTS (SELECT FROM faena.task WHERE status = 'queued')",
        )
        .await?;
    let row = client.query_one(&statement, &[]).await?;
    let next_at = row.get::<_, Option<i64>>(0).map(Timestamp::from_ms);
    Ok((TasksFired { tasks, next_at, ..TasksFired::default() }, row.get(1)))
}

/// Returns the statement that locks the tasks of a batch.
pub fn lock_sql() -> String {
    format!("SELECT {COLUMNS} FROM faena.task WHERE id = ANY($1) ORDER BY id FOR UPDATE")
}

/// Finds the answers to events that the tasks have received before.
pub const FIND_ANSWERS: &str =
    "SELECT i.task, i.event_id, i.answer FROM unnest($1::uuid[], $2::text[]) AS g(task, event_id)
     JOIN faena.task_inbox i ON i.task = g.task AND i.event_id = g.event_id";

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

/// Deletes the links to ended jobs, and returns the inputs for their tasks.
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
        events: row.get(8),
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
    for table in ["task_record", "task_inbox", "task_job", "task_tag", "task_key", "task_usage"] {
        client.execute(&format!("DELETE FROM faena.{table} WHERE task = ANY($1)"), &[&ids]).await?;
    }
    webhooks::remove(client, &ids).await?;
    Ok(ids.len())
}
