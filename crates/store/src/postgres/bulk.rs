//! Bulk actions, step by step.

use async_trait::async_trait;
use deadpool_postgres::Object;
use faena_domain::{BulkId, JobId, Timestamp};
use tokio_postgres::{Row, types::ToSql};

use super::{
    Postgres, Shared, Writes, audit, change, dependents, end::storable, events, machines::definition, read, tasks,
};
use crate::{
    Bulk, BulkAction, BulkStep, BulkStore, BulkWork, COUNT_LIMIT, CancelOutcome, Filter, NewBulk, Result, Signal,
    StoreError, TaskBulk,
    audit::retried_by,
    bulk::{
        BulkRow, BulkStepCounts, CANCEL_REASON, COLUMNS, MAX_CANDIDATES, begin_audit, end_audit, first_readable,
        is_unchanged, stop_audit,
    },
};

#[async_trait]
impl BulkStore for Postgres {
    async fn bulk_begin(&self, bulk: NewBulk, due_at: Timestamp, now: Timestamp) -> Result<()> {
        self.shared.retrying(|| begin(&self.shared, &bulk, due_at, now)).await
    }

    async fn bulk_due(&self) -> Result<Option<Bulk>> {
        self.shared.retrying(|| due(&self.shared)).await
    }

    async fn bulk_step(&self, step: BulkStep, now: Timestamp) -> Result<bool> {
        self.shared.retrying(|| self::step(&self.shared, &step, now)).await
    }

    async fn bulk_stop(&self, id: BulkId, by: &str, now: Timestamp) -> Result<bool> {
        self.shared.retrying(|| stop(&self.shared, id, by, now)).await
    }

    async fn bulk_get(&self, id: BulkId) -> Result<Option<Bulk>> {
        self.shared.retrying(|| get(&self.shared, id)).await
    }

    async fn bulk_list(&self, limit: usize) -> Result<Vec<Bulk>> {
        self.shared.retrying(|| list(&self.shared, limit)).await
    }

    async fn bulk_total(&self) -> Result<u64> {
        self.shared.retrying(|| total(&self.shared)).await
    }
}

pub async fn begin(shared: &Shared, bulk: &NewBulk, due_at: Timestamp, now: Timestamp) -> Result<()> {
    let client = shared.begin().await?;
    let result = begin_in(&client, bulk, due_at, now).await;
    client.end(result).await
}

async fn begin_in(client: &Object, bulk: &NewBulk, due_at: Timestamp, now: Timestamp) -> Result<()> {
    client
        .execute(
            "INSERT INTO faena.bulk (id, action, filter, actor, per_second, created_at, up_to, matched, due_at)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)",
            &[
                &bulk.id.0,
                &bulk.work.name(),
                &bulk.work.to_api_json().to_string(),
                &storable(&bulk.actor),
                &bulk.per_second.map_or(0, i64::from),
                &now.as_ms(),
                &bulk.up_to,
                &i64::try_from(bulk.matched).unwrap_or(i64::MAX),
                &due_at.as_ms(),
            ],
        )
        .await?;
    if let Some(entry) = begin_audit(bulk) {
        audit::add(client, &entry, now).await?;
    }
    Ok(())
}

pub async fn due(shared: &Shared) -> Result<Option<Bulk>> {
    let client = shared.client().await?;
    let bulk = due_in(&client).await;
    client.return_to_pool(bulk)
}

async fn due_in(client: &Object) -> Result<Option<Bulk>> {
    let sql =
        format!("SELECT {COLUMNS} FROM faena.bulk WHERE due_at IS NOT NULL ORDER BY due_at, id LIMIT {MAX_CANDIDATES}");
    Ok(first_readable(client.query(&sql, &[]).await?.iter().map(row).collect()))
}

async fn one(client: &Object, which: &str, parameters: &[&(dyn ToSql + Sync)]) -> Result<Option<Bulk>> {
    let sql = format!("SELECT {COLUMNS} FROM faena.bulk WHERE {which}");
    client.query_opt(&sql, parameters).await?.as_ref().map(|found| row(found).bulk()).transpose()
}

/// What to do after the commit of a step: send signals, and release the dependents of ended jobs.
#[derive(Default)]
struct AfterCommit {
    ended: Vec<JobId>,
    cancel_requested: Vec<JobId>,
    jobs: change::AfterCommit,
    tasks: tasks::AfterCommit,
}

pub async fn step(shared: &Shared, step: &BulkStep, now: Timestamp) -> Result<bool> {
    let client = shared.begin().await?;
    let mut after_commit = AfterCommit::default();
    let result = step_in(&client, shared, step, &mut after_commit, now).await;
    let done = client.end(result).await?;
    shared.signal(after_commit.cancel_requested.into_iter().map(Signal::Cancel));
    after_commit.jobs.send(shared);
    after_commit.tasks.send(shared);
    if matches!(step.bulk.work, BulkWork::Jobs { action: BulkAction::Retry, .. }) {
        shared.signal([Signal::Waiting]);
    }
    if !after_commit.ended.is_empty() {
        dependents::release_dependents(shared, &after_commit.ended, now).await?;
    }
    Ok(done)
}

async fn step_in(
    client: &Object,
    shared: &Shared,
    step: &BulkStep,
    after_commit: &mut AfterCommit,
    now: Timestamp,
) -> Result<bool> {
    let id = step.bulk.id.0;
    let row = client.query_opt("SELECT last, due_at FROM faena.bulk WHERE id = $1 FOR UPDATE", &[&id]).await?;
    if !row.is_some_and(|row| is_unchanged(step, row.get(0), row.get(1))) {
        return Ok(false);
    }
    events::set_actor(client, &step.bulk.actor).await?;
    let counts = match &step.bulk.work {
        BulkWork::Jobs { action, filter } => {
            let mut counts = BulkStepCounts::default();
            for id in &step.ids {
                let job = BulkJob { writes: shared.bulk_writes(), action: *action, filter, id: JobId(*id) };
                counts.add(act_on(client, job, after_commit, now).await)?;
            }
            counts
        }
        BulkWork::Tasks(work) => act_on_tasks(client, shared, step, work, &mut after_commit.tasks, now).await?,
    };
    let row = client
        .query_one(
            "UPDATE faena.bulk SET last = coalesce($2, last), done = done + $3, skipped = skipped + $4, due_at = $5,
                 finished_at = CASE WHEN $5::int8 IS NULL THEN $6::int8 END
             WHERE id = $1 RETURNING done, skipped",
            &[&id, &step.last, &counts.done, &counts.skipped, &step.due_at.map(Timestamp::as_ms), &now.as_ms()],
        )
        .await?;
    if step.due_at.is_none() {
        let (done, skipped): (i64, i64) = (row.get(0), row.get(1));
        audit::add(client, &end_audit(&step.bulk, done.unsigned_abs(), skipped.unsigned_abs()), now).await?;
    }
    Ok(true)
}

/// Applies the action to tasks that still match.
async fn act_on_tasks(
    client: &Object,
    shared: &Shared,
    step: &BulkStep,
    work: &TaskBulk,
    after_commit: &mut tasks::AfterCommit,
    now: Timestamp,
) -> Result<BulkStepCounts> {
    let target = match work.target() {
        Some((machine, version)) => Some(definition(client, shared, machine, version).await?),
        None => None,
    };
    let inputs = work.inputs(&step.bulk, &step.ids, target, now);
    let answers = tasks::apply_to(shared, client, &[(inputs, now)], Some(work.filter.clone()), after_commit).await?;
    Ok(BulkStepCounts::of(answers))
}

/// A job to process, and the action.
struct BulkJob<'a> {
    writes: Writes,
    action: BulkAction,
    filter: &'a Filter,
    id: JobId,
}

/// Processes one job: rejects it before anything is written, or applies the whole action.
async fn act_on(client: &Object, job: BulkJob<'_>, after_commit: &mut AfterCommit, now: Timestamp) -> Result<()> {
    let BulkJob { writes, action, filter, id } = job;
    // Locks the row first, as every change does: what is read afterwards does not change.
    client
        .query_opt("SELECT 1 FROM faena.job WHERE id = $1 FOR UPDATE", &[&id.0])
        .await?
        .ok_or(StoreError::NotFound(id))?;
    let state = *read::states_of(client, &[id]).await?.get(&id).ok_or(StoreError::NotFound(id))?;
    if !filter.states.contains(&state) {
        return Err(StoreError::InvalidTransition { from: state, wanted: "be acted on" });
    }
    match action {
        BulkAction::Cancel => {
            let (outcome, after_cancel) = change::cancel_in(client, writes, id, CANCEL_REASON, now).await?;
            after_commit.jobs.extend(after_cancel);
            match outcome {
                CancelOutcome::Cancelled => after_commit.ended.push(id),
                CancelOutcome::Requested { .. } => after_commit.cancel_requested.push(id),
            }
        }
        BulkAction::Retry => {
            change::retry_in(client, writes, id, retried_by(None), now).await?;
        }
        BulkAction::Delete => {
            after_commit.jobs.extend(change::delete_in(client, writes.shard, id).await?);
            after_commit.ended.push(id);
        }
    }
    Ok(())
}

pub async fn stop(shared: &Shared, id: BulkId, by: &str, now: Timestamp) -> Result<bool> {
    let client = shared.begin().await?;
    let result = stop_in(&client, id, by, now).await;
    client.end(result).await
}

async fn stop_in(client: &Object, id: BulkId, by: &str, now: Timestamp) -> Result<bool> {
    let Some(bulk) = one(client, "id = $1 AND due_at IS NOT NULL FOR UPDATE", &[&id.0]).await? else {
        return Ok(false);
    };
    client
        .execute(
            "UPDATE faena.bulk SET due_at = NULL, finished_at = $1, error = $2 WHERE id = $3",
            &[&now.as_ms(), &storable(&format!("stopped by {by}")), &id.0],
        )
        .await?;
    audit::add(client, &stop_audit(&bulk, by), now).await?;
    Ok(true)
}

pub async fn get(shared: &Shared, id: BulkId) -> Result<Option<Bulk>> {
    let client = shared.client().await?;
    let bulk = one(&client, "id = $1", &[&id.0]).await;
    client.return_to_pool(bulk)
}

pub async fn list(shared: &Shared, limit: usize) -> Result<Vec<Bulk>> {
    let client = shared.client().await?;
    let rows = list_in(&client, limit).await;
    client.return_to_pool(rows)
}

async fn list_in(client: &Object, limit: usize) -> Result<Vec<Bulk>> {
    let sql = format!("SELECT {COLUMNS} FROM faena.bulk ORDER BY id DESC LIMIT $1");
    let rows = client.query(&sql, &[&i64::try_from(limit).unwrap_or(i64::MAX)]).await?;
    Ok(rows.iter().filter_map(|found| row(found).bulk().ok()).collect())
}

async fn total(shared: &Shared) -> Result<u64> {
    let sql = format!("SELECT count(*) FROM (SELECT 1 FROM faena.bulk LIMIT {COUNT_LIMIT}) x");
    let client = shared.client().await?;
    let row = client.query_one(&sql, &[]).await.map_err(Into::into);
    Ok(client.return_to_pool(row)?.get::<_, i64>(0).unsigned_abs())
}

fn row(row: &Row) -> BulkRow {
    BulkRow {
        id: row.get(0),
        action: row.get(1),
        filter: row.get(2),
        actor: row.get(3),
        per_second: row.get(4),
        created_at: row.get(5),
        up_to: row.get(6),
        last: row.get(7),
        matched: row.get(8),
        done: row.get(9),
        skipped: row.get(10),
        due_at: row.get(11),
        finished_at: row.get(12),
        error: row.get(13),
    }
}
