//! Who is alive, and what the dead held.

use std::collections::HashMap;

use deadpool_postgres::Object;
use faena_domain::{ErrorReason, JobId, JobState, LogEvent, LogLine, NodeId, Run, Timestamp};
use uuid::Uuid;

use super::{
    Shared,
    end::{Line, ended, forget},
    family,
    submit::apply,
};
use crate::{
    LaneId, NodeInfo, Recovered, Result, Signal, Tally,
    assemble::parse_options,
    plan::Deltas,
    types::{CANCELLED, FAILED, RETRYING, state_code},
};

pub async fn join(shared: &Shared, node: &NodeInfo, lease_ms: i64, now: Timestamp) -> Result<()> {
    let client = shared.client().await?;
    let joined = client
        .execute(
            "INSERT INTO faena.node (id, name, started_at, lease_until) VALUES ($1, $2, $3, $4)",
            &[&node.id.0, &node.name, &now.as_ms(), &now.plus_ms(lease_ms).as_ms()],
        )
        .await;
    client.keep(joined.map(|_| ()).map_err(Into::into))
}

/// The row itself is the lease: whoever takes a node for dead deletes it first.
pub async fn renew(shared: &Shared, node: NodeId, lease_ms: i64, now: Timestamp) -> Result<bool> {
    let client = shared.client().await?;
    let renewed = client
        .execute("UPDATE faena.node SET lease_until = $2 WHERE id = $1", &[&node.0, &now.plus_ms(lease_ms).as_ms()])
        .await;
    client.keep(renewed.map(|rows| rows == 1).map_err(Into::into))
}

pub async fn leave(shared: &Shared, node: NodeId, now: Timestamp) -> Result<usize> {
    let client = shared.client().await?;
    let rows = client.query("SELECT run FROM faena.block WHERE node = $1", &[&node.0]).await?;
    client.keep(Ok(()))?;
    let runs: Vec<Run> = rows.iter().map(|row| row.get(0)).collect();
    let returned = give_back(shared, &runs, now).await?;
    let client = shared.client().await?;
    client.execute("DELETE FROM faena.node WHERE id = $1", &[&node.0]).await?;
    client.keep(Ok(returned))
}

pub async fn reconcile(
    shared: &Shared,
    node: NodeId,
    known: &[Run],
    before: Timestamp,
    now: Timestamp,
) -> Result<usize> {
    let client = shared.client().await?;
    let rows = client
        .query(
            "SELECT run FROM faena.block WHERE node = $1 AND claimed_at < $2 AND NOT (run = ANY($3))",
            &[&node.0, &before.as_ms(), &known],
        )
        .await?;
    client.keep(Ok(()))?;
    let runs: Vec<Run> = rows.iter().map(|row| row.get(0)).collect();
    give_back(shared, &runs, now).await
}

async fn give_back(shared: &Shared, runs: &[Run], now: Timestamp) -> Result<usize> {
    let mut returned = 0;
    for run in runs {
        let freed = free_block(shared, *run, Why::Left, now).await?;
        returned += freed.returned + freed.orphaned;
    }
    Ok(returned)
}

pub async fn recover(shared: &Shared, delay_ms: i64, now: Timestamp) -> Result<Recovered> {
    let client = shared.client().await?;
    let dead = client.execute("DELETE FROM faena.node WHERE lease_until < $1", &[&now.as_ms()]).await?;
    // Blocks are found by the absence of their node, so it does not matter who removed it, or when.
    let rows = client
        .query(
            "SELECT run FROM faena.block b WHERE NOT EXISTS (SELECT FROM faena.node n WHERE n.id = b.node)
             ORDER BY run LIMIT 20",
            &[],
        )
        .await?;
    client.keep(Ok(()))?;
    let mut all = Recovered { nodes: usize::try_from(dead).unwrap_or(0), ..Recovered::default() };
    for row in rows {
        let freed = free_block(shared, row.get(0), Why::Died { delay_ms }, now).await?;
        all.orphaned += freed.orphaned;
        all.returned += freed.returned;
    }
    Ok(all)
}

#[derive(Clone, Copy)]
enum Why {
    /// It said goodbye: nothing costs a try.
    Left,
    Died {
        delay_ms: i64,
    },
}

struct Lost {
    id: JobId,
    lane: LaneId,
    max_retries: u32,
    retry_count: u32,
    ready_at: Timestamp,
    started_at: Option<i64>,
    worker: Option<Uuid>,
    cancel: Option<String>,
}

struct Block {
    run: Run,
    claimed_at: Timestamp,
    first_ready_at: Timestamp,
    lost: Vec<Lost>,
}

/// Takes the block away first, so that a late report finds none, then puts each of its jobs where it belongs.
async fn free_block(shared: &Shared, run: Run, why: Why, now: Timestamp) -> Result<Recovered> {
    let client = shared.begin().await?;
    let result = free_in(&client, shared.own_shard(), run, why, now).await;
    let Some(freed) = client.end(result).await? else {
        return Ok(Recovered::default());
    };
    for (lane, ready_at) in freed.lanes {
        shared.cursors.lower(lane, ready_at);
        shared.tell([Signal::Ready(lane)]);
    }
    shared.tell([Signal::Waiting]);
    if !freed.finished.is_empty() {
        family::tell_children(shared, &freed.finished, now).await?;
    }
    Ok(freed.count)
}

#[derive(Default)]
struct Freed {
    count: Recovered,
    finished: Vec<JobId>,
    lanes: Vec<(LaneId, i64)>,
}

async fn free_in(client: &Object, shard: i16, run: Run, why: Why, now: Timestamp) -> Result<Option<Freed>> {
    let Some(block) = take_block(client, run).await? else { return Ok(None) };
    let mut freed = Freed::default();
    let mut deltas = Deltas::default();
    let mut retrying = Line::default();
    let mut ready = Line::default();
    let mut attempts = Ended::default();
    let mut over = Ended::default();
    let mut records = Vec::new();
    let died = matches!(why, Why::Died { .. });
    let orphaned = ErrorReason::Orphaned.as_str();
    for job in &block.lost {
        let tally = if let Some(reason) = &job.cancel {
            let log = block.log(job, &[LogLine::new(now, LogEvent::Cancelled, reason.clone())]);
            over.push(&block, job, CANCELLED, Some(reason), Some("cancelled"), log, now);
            Tally::Cancelled
        } else if let (Why::Died { delay_ms }, Some(_)) = (why, job.started_at) {
            freed.count.orphaned += 1;
            let line = LogLine::new(now, LogEvent::Orphaned, LOST);
            if job.retry_count < job.max_retries {
                let next = LogLine::new(now, LogEvent::RetryScheduled, format!("in {delay_ms} ms"));
                attempts.push(&block, job, RETRYING, Some(LOST), Some(orphaned), block.log(job, &[line, next]), now);
                retrying.push(job.lane, job.id, now.plus_ms(delay_ms), job.retry_count + 1);
                Tally::Retrying
            } else {
                over.push(&block, job, FAILED, Some(LOST), Some(orphaned), block.log(job, &[line]), now);
                Tally::Failed
            }
        } else {
            freed.count.returned += 1;
            let line = if died {
                LogLine::new(now, LogEvent::Recovered, "its server died before it is known to have started")
            } else {
                LogLine::new(now, LogEvent::HandedBack, "its server stopped")
            };
            attempts.push(&block, job, state_code(JobState::Queued), None, None, block.log(job, &[line]), now);
            ready.push(job.lane, job.id, block.first_ready_at, job.retry_count);
            freed.lanes.push((job.lane, block.first_ready_at.as_ms()));
            Tally::Queued
        };
        let finished = matches!(tally, Tally::Cancelled | Tally::Failed);
        if finished {
            freed.finished.push(job.id);
        }
        records.push((job.id.0, finished));
        deltas.moved(job.lane, Tally::Held, tally, 1);
    }
    freed.lanes.dedup();
    attempts.put(client, "attempt").await?;
    over.put(client, "ended").await?;
    retrying.put_waiting(client, RETRYING).await?;
    ready.put_ready(client, died).await?;
    if !records.is_empty() {
        forget(client, &records).await?;
    }
    apply(client, shard, &deltas).await?;
    Ok(Some(freed))
}

async fn take_block(client: &Object, run: Run) -> Result<Option<Block>> {
    let row = client
        .query_opt("DELETE FROM faena.block WHERE run = $1 RETURNING claimed_at, first_ready_at, ids, retries", &[&run])
        .await?;
    let Some(row) = row else { return Ok(None) };
    let ids: Vec<Uuid> = row.get(2);
    let retries: Option<Vec<i16>> = row.get(3);
    let retries: HashMap<Uuid, i16> = ids.iter().copied().zip(retries.unwrap_or_default()).collect();
    let rows = client
        .query(
            "SELECT j.id, j.lane, j.options, r.started_at, r.worker, c.reason, r.ready_at FROM faena.job j
             LEFT JOIN faena.running r ON r.id = j.id AND r.run = $2
             LEFT JOIN faena.cancel c ON c.id = j.id
             WHERE j.id = ANY($1) ORDER BY j.id",
            &[&ids, &run],
        )
        .await?;
    let keys: Vec<(LaneId, Uuid, Run)> = rows.iter().map(|row| (row.get(1), row.get(0), run)).collect();
    let over = ended(client, &keys).await?;
    let mut lost = Vec::new();
    for line in rows.iter().filter(|line| !over.contains_key(&(line.get(0), run))) {
        let id: Uuid = line.get(0);
        let ready_at = line.get::<_, Option<i64>>(6).unwrap_or(row.get(1));
        lost.push(Lost {
            id: JobId(id),
            lane: line.get(1),
            max_retries: parse_options(line.get(2))?.retry.max_retries,
            retry_count: u32::try_from(retries.get(&id).copied().unwrap_or(0)).unwrap_or(0),
            ready_at: Timestamp::from_ms(ready_at).max(JobId(id).created_at()),
            started_at: line.get(3),
            worker: line.get(4),
            cancel: line.get(5),
        });
    }
    Ok(Some(Block {
        run,
        claimed_at: Timestamp::from_ms(row.get(0)),
        first_ready_at: Timestamp::from_ms(row.get(1)),
        lost,
    }))
}

const LOST: &str = "the server that ran it died";

impl Block {
    fn log(&self, job: &Lost, last: &[LogLine]) -> String {
        let mut lines = vec![
            LogLine::new(job.ready_at, LogEvent::Queued, ""),
            LogLine::new(self.claimed_at, LogEvent::Assigned, ""),
        ];
        if let Some(started_at) = job.started_at {
            lines.push(LogLine::new(Timestamp::from_ms(started_at), LogEvent::Started, ""));
        }
        lines.extend_from_slice(last);
        LogLine::chunk(&lines)
    }
}

/// Rows for `attempt` or `ended`.
#[derive(Default)]
struct Ended {
    lanes: Vec<LaneId>,
    states: Vec<i16>,
    ids: Vec<Uuid>,
    runs: Vec<Run>,
    times: Vec<i64>,
    retries: Vec<i16>,
    started: Vec<Option<i64>>,
    workers: Vec<Option<Uuid>>,
    errors: Vec<Option<String>>,
    reasons: Vec<Option<String>>,
    logs: Vec<String>,
}

impl Ended {
    #[expect(clippy::too_many_arguments, reason = "one row, one argument per column")]
    fn push(
        &mut self,
        block: &Block,
        job: &Lost,
        state: i16,
        error: Option<&str>,
        reason: Option<&str>,
        log: String,
        now: Timestamp,
    ) {
        self.lanes.push(job.lane);
        self.states.push(state);
        self.ids.push(job.id.0);
        self.runs.push(block.run);
        self.times.push(now.as_ms());
        self.retries.push(super::end::small(job.retry_count));
        self.started.push(job.started_at);
        self.workers.push(job.worker);
        self.errors.push(error.map(str::to_owned));
        self.reasons.push(reason.map(str::to_owned));
        self.logs.push(log);
    }

    async fn put(&self, client: &Object, table: &str) -> Result<()> {
        if self.ids.is_empty() {
            return Ok(());
        }
        let lane = if table == "ended" { "lane, " } else { "" };
        let columns = format!("{lane}state, id, run, finished_at, retry_count, started_at, worker, error, reason, log");
        client
            .execute(
                &format!(
                    "INSERT INTO faena.{table} ({columns}) SELECT {columns}
                     FROM unnest($1::int4[], $2::int2[], $3::uuid[], $4::int8[], $5::int8[], $6::int2[], $7::int8[],
                                 $8::uuid[], $9::text[], $10::text[], $11::text[])
                     AS e(lane, state, id, run, finished_at, retry_count, started_at, worker, error, reason, log)"
                ),
                &[
                    &self.lanes,
                    &self.states,
                    &self.ids,
                    &self.runs,
                    &self.times,
                    &self.retries,
                    &self.started,
                    &self.workers,
                    &self.errors,
                    &self.reasons,
                    &self.logs,
                ],
            )
            .await?;
        Ok(())
    }
}
