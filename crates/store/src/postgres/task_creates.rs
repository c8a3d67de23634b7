//! Creates tasks. Those of several callers share a transaction.

use std::collections::BTreeSet;

use deadpool_postgres::Object;
use faena_domain::Timestamp;

use super::{
    Shared, audit,
    batch::{Answer, Weight},
    task_limits,
    task_writes::{BEGIN, TaskWrites, TransactionControl},
    tasks::{AfterCommit, check_jobs, put_webhooks, submit_jobs},
};
use crate::{
    LaneId, NewTask, Result, StoreError,
    task_limits::{TaskCapacity, may_be_limited},
    tasks::{Batch, Plan},
};

/// A task of one caller.
pub struct CreateCall {
    pub task: NewTask,
    pub now: Timestamp,
    pub answer: Answer<()>,
}

impl Weight for CreateCall {
    fn weight(&self) -> usize {
        1
    }

    fn is_abandoned(&self) -> bool {
        self.answer.is_closed()
    }
}

/// Stores the tasks of all `calls` in one transaction. If that fails, each is stored alone, so that none fails because of another.
pub async fn run_creates(shared: &Shared, calls: Vec<CreateCall>) {
    let (tasks, answers): (Vec<TimedTask>, Vec<_>) =
        calls.into_iter().map(|call| ((call.task, call.now), call.answer)).unzip();
    let stored = shared.retrying(|| create(shared, &tasks)).await;
    for (task, answer) in tasks.iter().zip(answers) {
        let result = match &stored {
            Err(StoreError::Unavailable(_)) | Ok(()) => stored.as_ref().copied().map_err(StoreError::clone_for_caller),
            Err(error) if tasks.len() == 1 => Err(error.clone_for_caller()),
            Err(_) => shared.retrying(|| create(shared, std::slice::from_ref(task))).await,
        };
        let _ = answer.send(result);
    }
}

/// A task to store, with the time of its caller.
type TimedTask = (NewTask, Timestamp);

async fn create(shared: &Shared, tasks: &[TimedTask]) -> Result<()> {
    let client = shared.client().await?;
    let mut after_commit = AfterCommit::default();
    match create_all(shared, &client, tasks, &mut after_commit).await {
        Ok(()) => client.return_to_pool(Ok(()))?,
        Err(error) => return client.end(Err(error)).await,
    }
    after_commit.send(shared);
    Ok(())
}

async fn create_all(
    shared: &Shared,
    client: &Object,
    tasks: &[TimedTask],
    after_commit: &mut AfterCommit,
) -> Result<()> {
    let limited = limited_machines(shared, tasks);
    if limited.is_empty() {
        let mut planned = Planned::new(shared, tasks, TaskCapacity::default(), after_commit).await?;
        let is_plain = planned.plan.jobs.is_empty() && planned.plan.webhooks.is_empty();
        if is_plain && tasks.iter().all(|(task, _)| task.audit.is_none()) {
            return planned.writes.send(client, TransactionControl::BeginAndCommit).await;
        }
        client.batch_execute(BEGIN).await?;
        planned.write_first(shared, client, tasks, after_commit).await?;
        return planned.writes.send(client, TransactionControl::CommitOnly).await;
    }
    client.batch_execute(BEGIN).await?;
    let capacity = task_limits::locked_capacity(client, &limited).await?;
    let mut planned = Planned::new(shared, tasks, capacity, after_commit).await?;
    planned.write_first(shared, client, tasks, after_commit).await?;
    planned.writes.send(client, TransactionControl::CommitOnly).await
}

/// Returns the machines of new tasks that may have a limit, in the order in which their limits are locked.
fn limited_machines<'a>(shared: &Shared, tasks: &'a [TimedTask]) -> BTreeSet<&'a str> {
    let rules = shared.rules.current();
    let definitions = tasks.iter().map(|(task, _)| &task.definition);
    definitions.filter(|found| may_be_limited(&rules, found)).map(|found| found.machine.as_str()).collect()
}

/// What has to be written for new tasks.
struct Planned {
    plan: Plan,
    lanes: Vec<LaneId>,
    writes: TaskWrites,
    now: Timestamp,
}

impl Planned {
    async fn new(
        shared: &Shared,
        tasks: &[TimedTask],
        mut capacity: TaskCapacity,
        after_commit: &mut AfterCommit,
    ) -> Result<Planned> {
        let (mut batch, mut plan) = (Batch::default(), Plan::default());
        for (task, now) in tasks {
            batch.plan_new(&mut plan, task, capacity.admit(&task.definition.machine), *now);
        }
        let now = tasks.iter().map(|(_, now)| *now).max().unwrap_or_default();
        let lanes = check_jobs(shared, &mut batch, &mut plan, now).await?;
        let writes = TaskWrites::of_new(&mut batch, &plan, now)?;
        after_commit.add(shared, &batch, &plan);
        Ok(Planned { plan, lanes, writes, now })
    }

    /// Writes what needs more than one statement: jobs, webhooks, and entries in the audit log.
    async fn write_first(
        &mut self,
        shared: &Shared,
        client: &Object,
        tasks: &[TimedTask],
        after_commit: &mut AfterCommit,
    ) -> Result<()> {
        for (task, now) in tasks {
            if let Some(entry) = &task.audit {
                audit::add(client, entry, *now).await?;
            }
        }
        put_webhooks(client, &self.plan).await?;
        let (jobs, lanes) = (std::mem::take(&mut self.plan.jobs), std::mem::take(&mut self.lanes));
        submit_jobs(shared, client, jobs, lanes, after_commit, self.now).await
    }
}

/// Stores a task in the caller's transaction, which the caller commits.
pub async fn create_in(
    shared: &Shared,
    client: &Object,
    new: &NewTask,
    after_commit: &mut AfterCommit,
    now: Timestamp,
) -> Result<()> {
    let tasks = [(new.clone(), now)];
    let capacity = task_limits::locked_capacity(client, &limited_machines(shared, &tasks)).await?;
    let mut planned = Planned::new(shared, &tasks, capacity, after_commit).await?;
    planned.write_first(shared, client, &tasks, after_commit).await?;
    planned.writes.send(client, TransactionControl::ByCaller).await
}
