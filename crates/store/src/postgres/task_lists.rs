//! Lists of tasks.

use std::collections::BTreeMap;

use deadpool_postgres::Object;
use faena_domain::{TaskId, Timestamp};
use faena_machine::Status;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use super::{Shared, machines::version_number, tasks::task_row};
use crate::{
    COUNT_LIMIT, QueuedTasks, Result, StateCount, TaskFigures, TaskFilter, TaskView, TasksInState, tasks::COLUMNS,
};

const CONDITION: &str =
    "($1::text IS NULL OR machine = $1) AND ($2::int4 IS NULL OR version = $2) AND ($3::text IS NULL OR status = $3)
     AND ($4::text IS NULL OR $4 = ANY(string_to_array(state, '.')) OR state = $4 OR state LIKE $4 || '.%')
     AND ($5::text IS NULL OR correlation = $5) AND (NOT $6::bool OR approval)
     AND ($7::text IS NULL OR EXISTS (SELECT FROM faena.task_tag g WHERE g.tag = $7 AND g.task = task.id))
     AND (NOT $8::bool OR ended_at IS NULL)";

/// The parameters of [`CONDITION`].
struct Conditions<'a> {
    filter: &'a TaskFilter,
    version: Option<i32>,
    status: Option<&'static str>,
}

impl<'a> Conditions<'a> {
    fn new(filter: &'a TaskFilter) -> Conditions<'a> {
        Conditions { filter, version: filter.version.map(version_number), status: filter.status.map(Status::as_str) }
    }

    fn parameters(&self) -> Vec<&(dyn ToSql + Sync)> {
        let filter = self.filter;
        vec![
            &filter.machine,
            &self.version,
            &self.status,
            &filter.state,
            &filter.correlation,
            &filter.approval,
            &filter.tag,
            &filter.open,
        ]
    }
}

pub async fn list(
    shared: &Shared,
    filter: &TaskFilter,
    before: Option<TaskId>,
    limit: usize,
) -> Result<(Vec<TaskView>, u64)> {
    let client = shared.client().await?;
    let result = list_in(&client, filter, before, limit).await;
    client.return_to_pool(result)
}

async fn list_in(
    client: &Object,
    filter: &TaskFilter,
    before: Option<TaskId>,
    limit: usize,
) -> Result<(Vec<TaskView>, u64)> {
    let conditions = Conditions::new(filter);
    let mut parameters = conditions.parameters();
    let sql =
        format!("SELECT count(*) FROM (SELECT FROM faena.task WHERE {CONDITION} LIMIT {COUNT_LIMIT}) AS matching");
    let total: i64 = client.query_one(&sql, &parameters).await?.get(0);
    let sql = format!(
        "SELECT {COLUMNS} FROM faena.task WHERE {CONDITION} AND ($9::uuid IS NULL OR id < $9) ORDER BY id DESC LIMIT $10"
    );
    let (before, limit) = (before.map(|id| id.0), i64::try_from(limit).unwrap_or(i64::MAX));
    parameters.extend([&before as &(dyn ToSql + Sync), &limit]);
    let rows = client.query(&sql, &parameters).await?;
    let tasks: Result<Vec<TaskView>> = rows.iter().map(|row| task_row(row).view()).collect();
    Ok((tasks?, u64::try_from(total).unwrap_or_default()))
}

pub async fn find(
    shared: &Shared,
    filter: &TaskFilter,
    after: Option<TaskId>,
    up_to: TaskId,
    limit: usize,
) -> Result<Vec<TaskId>> {
    let conditions = Conditions::new(filter);
    let (after, limit) = (after.map(|id| id.0), i64::try_from(limit).unwrap_or(i64::MAX));
    let mut parameters = conditions.parameters();
    parameters.extend([&after as &(dyn ToSql + Sync), &up_to.0, &limit]);
    let sql = format!(
        "SELECT id FROM faena.task WHERE {CONDITION} AND ($9::uuid IS NULL OR id > $9) AND id <= $10 ORDER BY id LIMIT $11"
    );
    let client = shared.client().await?;
    let rows = client.query(&sql, &parameters).await.map_err(Into::into);
    let rows = client.return_to_pool(rows)?;
    Ok(rows.iter().map(|row| TaskId(row.get::<_, Uuid>(0))).collect())
}

pub async fn states(shared: &Shared, machine: &str, version: u32) -> Result<Vec<StateCount>> {
    let client = shared.client().await?;
    let sql =
        "SELECT state, count(*) FROM faena.task WHERE machine = $1 AND version = $2 AND status IN ('running', 'paused')
               GROUP BY state ORDER BY state";
    let rows = client.query(sql, &[&machine, &version_number(version)]).await.map_err(Into::into);
    let rows = client.return_to_pool(rows)?;
    let count = |row: &tokio_postgres::Row| StateCount {
        state: row.get(0),
        tasks: u64::try_from(row.get::<_, i64>(1)).unwrap_or_default(),
    };
    Ok(rows.iter().map(count).collect())
}

pub async fn counts(shared: &Shared) -> Result<BTreeMap<String, u64>> {
    let client = shared.client().await?;
    let statuses = Status::ALL.map(Status::as_str).to_vec();
    let limit = i64::try_from(COUNT_LIMIT).unwrap_or(i64::MAX);
    let sql = "SELECT s.status, coalesce(sum(c.tasks), 0)::int8 FROM unnest($1::text[]) AS s(status)
               LEFT JOIN faena.machine m ON true
               LEFT JOIN LATERAL (SELECT count(*) AS tasks FROM (
                   SELECT FROM faena.task t WHERE t.machine = m.name AND t.version = m.version AND t.status = s.status
                   LIMIT $2) AS counted) AS c ON true
               GROUP BY s.status";
    let rows = client.query(sql, &[&statuses, &limit]).await.map_err(Into::into);
    let rows = client.return_to_pool(rows)?;
    Ok(rows.iter().map(|row| (row.get(0), u64::try_from(row.get::<_, i64>(1)).unwrap_or_default())).collect())
}

pub async fn figures(shared: &Shared) -> Result<TaskFigures> {
    let client = shared.client().await?;
    let result = figures_in(&client).await;
    client.return_to_pool(result)
}

async fn figures_in(client: &Object) -> Result<TaskFigures> {
    let sql = "SELECT t.machine, t.state, count(*), min(t.entered_at) FROM faena.machine m JOIN faena.task t
                   ON t.machine = m.name AND t.version = m.version AND t.status IN ('running', 'paused')
               GROUP BY t.machine, t.state";
    let statement = client.prepare_cached(sql).await?;
    let rows = client.query(&statement, &[]).await?;
    let count = |number: i64| u64::try_from(number).unwrap_or_default();
    let states = rows.iter().map(|row| TasksInState {
        machine: row.get(0),
        state: row.get(1),
        tasks: count(row.get(2)),
        since: Timestamp::from_ms(row.get(3)),
    });
    let states = states.collect();
    let sql = "SELECT count(*), min(entered_at), (SELECT min(due_at) FROM faena.task WHERE due_at IS NOT NULL)
               FROM faena.task WHERE approval";
    let statement = client.prepare_cached(sql).await?;
    let row = client.query_one(&statement, &[]).await?;
    let time = |column: usize| row.get::<_, Option<i64>>(column).map(Timestamp::from_ms);
    let (approvals, oldest_approval_at, next_at) = (count(row.get(0)), time(1), time(2));
    let sql = "SELECT machine, count(*), min(entered_at) FROM faena.task WHERE status = 'queued' GROUP BY machine ORDER BY machine";
    let rows = client.query(&client.prepare_cached(sql).await?, &[]).await?;
    let queued = rows.iter().map(|row| QueuedTasks {
        machine: row.get(0),
        tasks: count(row.get(1)),
        since: Timestamp::from_ms(row.get(2)),
    });
    Ok(TaskFigures { states, queued: queued.collect(), approvals, oldest_approval_at, next_at })
}
