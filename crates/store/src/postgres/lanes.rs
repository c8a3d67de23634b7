//! Creates and reclaims lanes.
//!
//! Each node caches lanes, so a reclaimed lane may be in use by another node. Every transaction that adds jobs to lanes
//! checks that they are not retired (`faena.require_lanes`), and fails otherwise; the node loads the lanes again and
//! repeats the transaction. A lane is deleted when every transaction that may have made this check before the lane was
//! retired has ended, and has left no job in it.

use std::collections::HashSet;

use async_trait::async_trait;
use deadpool_postgres::Object;
use faena_domain::NewJob;

use super::{Postgres, Shared, read};
use crate::{
    Lane, LaneId, LaneStore, LaneUsage, Result, StoreError,
    lanes::{LaneName, empty_lanes, successors, too_many_lanes},
    sql::sql,
};

#[async_trait]
impl LaneStore for Postgres {
    async fn lanes(&self) -> Result<Vec<Lane>> {
        // Other nodes create lanes too.
        self.shared.retrying(|| self.shared.load_lanes()).await?;
        Ok(self.shared.lanes.all())
    }

    async fn lane_usage(&self) -> Result<LaneUsage> {
        let used = self.shared.retrying(|| used(&self.shared)).await?;
        Ok(LaneUsage { used, max: self.shared.options.max_lanes })
    }

    async fn lane_reclaim(&self, limit: usize) -> Result<usize> {
        let deleted = self.shared.retrying(|| reclaim(&self.shared, limit)).await?;
        self.shared.retrying(|| self.shared.load_lanes()).await?;
        Ok(deleted)
    }
}

/// How many times more lanes one call retires than it deletes: a lane is deleted minutes after it is retired, and
/// retiring takes one statement for any number of lanes.
const RETIRED_AHEAD: usize = 10;

async fn used(shared: &Shared) -> Result<usize> {
    let client = shared.client().await?;
    let row = client.query_one("SELECT count(*) FROM faena.lane WHERE NOT retired", &[]).await;
    let count: i64 = client.return_to_pool(row.map_err(Into::into))?.get(0);
    Ok(usize::try_from(count).unwrap_or(0))
}

async fn reclaim(shared: &Shared, limit: usize) -> Result<usize> {
    let client = shared.begin().await?;
    let result = reclaim_in(shared, &client, limit).await;
    let deleted = client.end(result).await?;
    for lane in &deleted {
        shared.cursors.forget(*lane);
    }
    Ok(deleted.len())
}

/// Retires and deletes empty lanes. Returns the lanes that were deleted.
async fn reclaim_in(shared: &Shared, client: &Object, limit: usize) -> Result<Vec<LaneId>> {
    // Everything that adds or removes lanes takes this lock. If another node has it, that node reclaims.
    let locked: bool = client.query_one("SELECT pg_try_advisory_xact_lock(x'6661656e62'::bigint)", &[]).await?.get(0);
    if !locked {
        return Ok(Vec::new());
    }
    let (lanes, retired) = read::lanes(client).await?;
    let mut empty = empty_lanes(&lanes, &read::counts_in(client).await?);
    let is_retired: HashSet<LaneId> = retired.iter().copied().collect();
    let is_empty: HashSet<LaneId> = empty.iter().copied().collect();
    // In these lanes, a transaction that had made its check before the lane was retired has left jobs.
    let used: Vec<LaneId> = retired.iter().copied().filter(|id| !is_empty.contains(id)).collect();
    client.execute("UPDATE faena.lane SET retired = false, fence = NULL WHERE id = ANY($1)", &[&used]).await?;
    let deleted = delete(client, &lanes, limit).await?;
    // The last step comes first, so that one transaction takes a lane through one step only. The fence is read after
    // the commit that retired the lane, so every transaction that still saw the lane in use has an id below the fence.
    client
        .execute(
            "UPDATE faena.lane SET fence = pg_snapshot_xmax(pg_current_snapshot()) WHERE retired AND fence IS NULL",
            &[],
        )
        .await?;
    empty.retain(|id| !is_retired.contains(id));
    // This also bounds the number of lanes that wait for their deletion.
    empty.truncate((RETIRED_AHEAD * limit).min(shared.options.max_lanes.saturating_sub(retired.len())));
    client.execute("UPDATE faena.lane SET retired = true, fence = NULL WHERE id = ANY($1)", &[&empty]).await?;
    Ok(deleted)
}

/// Deletes retired lanes that no transaction can have in use and that have no jobs.
async fn delete(client: &Object, lanes: &[Lane], limit: usize) -> Result<Vec<LaneId>> {
    let rows = client
        .query(
            sql!("SELECT id FROM faena.lane l WHERE retired AND fence <= pg_snapshot_xmin(pg_current_snapshot())
               AND coalesce((SELECT max(abs(n)) FROM (SELECT sum(n) AS n FROM faena.counter c WHERE c.lane = l.id AND c.tally < {TALLY_RAN}
                                                      GROUP BY tally) t), 0) = 0
               AND NOT EXISTS (SELECT FROM faena.ready WHERE lane = l.id) AND NOT EXISTS (SELECT FROM faena.waiting WHERE lane = l.id)
               AND NOT EXISTS (SELECT FROM faena.done WHERE lane = l.id) AND NOT EXISTS (SELECT FROM faena.ended WHERE lane = l.id)
             LIMIT $1"),
            &[&i64::try_from(limit).unwrap_or(i64::MAX)],
        )
        .await?;
    let deleted: Vec<LaneId> = rows.iter().map(|row| row.get(0)).collect();
    if deleted.is_empty() {
        return Ok(deleted);
    }
    let (from, to): (Vec<LaneId>, Vec<LaneId>) = successors(lanes, &deleted).into_iter().unzip();
    client
        .execute(
            "WITH removed AS (DELETE FROM faena.counter WHERE lane = ANY($1) RETURNING shard, lane, tally, n)
             INSERT INTO faena.counter AS c (shard, lane, tally, n)
             SELECT min(r.shard), h.successor, r.tally, sum(r.n) FROM removed r JOIN unnest($1::int4[], $2::int4[]) AS h(lane, successor) USING (lane)
             GROUP BY h.successor, r.tally HAVING sum(r.n) <> 0
             ON CONFLICT (shard, lane, tally) DO UPDATE SET n = c.n + excluded.n",
            &[&from, &to],
        )
        .await?;
    client
        .execute(
            "WITH removed AS (DELETE FROM faena.history_mark WHERE lane = ANY($1) RETURNING lane, measure, n)
             INSERT INTO faena.history_mark AS m (lane, measure, n)
             SELECT h.successor, r.measure, sum(r.n) FROM removed r JOIN unnest($1::int4[], $2::int4[]) AS h(lane, successor) USING (lane)
             GROUP BY h.successor, r.measure
             ON CONFLICT (lane, measure) DO UPDATE SET n = m.n + excluded.n",
            &[&from, &to],
        )
        .await?;
    client.execute("DELETE FROM faena.key_queue WHERE lane = ANY($1)", &[&deleted]).await?;
    client.execute("DELETE FROM faena.lane WHERE id = ANY($1)", &[&deleted]).await?;
    Ok(deleted)
}

/// Returns the lane of each job, and creates those that do not exist.
pub async fn lanes_of(shared: &Shared, jobs: &[NewJob]) -> Result<Vec<LaneId>> {
    let mut unknown: Vec<LaneName> = Vec::new();
    let mut ids = Vec::with_capacity(jobs.len());
    let mut last: Option<(LaneName, LaneId)> = None;
    for job in jobs {
        let name = LaneName::of(job);
        // Consecutive jobs mostly have the same lane.
        let known = last.filter(|(last, _)| *last == name).map(|(_, id)| id).or_else(|| shared.lanes.id_of(name));
        match known {
            Some(id) => {
                last = Some((name, id));
                ids.push(id);
            }
            None => unknown.push(name),
        }
    }
    if unknown.is_empty() {
        return Ok(ids);
    }
    create(shared, unknown).await?;
    let id = |job: &NewJob| {
        let id = shared.lanes.id_of(LaneName::of(job));
        id.ok_or_else(|| StoreError::Contended("lanes were just reclaimed".into()))
    };
    jobs.iter().map(id).collect()
}

/// Returns the lane with this name, and creates it if it does not exist.
pub async fn lane_of(shared: &Shared, name: LaneName<'_>) -> Result<LaneId> {
    if let Some(id) = shared.lanes.id_of(name) {
        return Ok(id);
    }
    create(shared, vec![name]).await?;
    shared.lanes.id_of(name).ok_or_else(|| StoreError::Contended("a lane was just reclaimed".into()))
}

async fn create(shared: &Shared, names: Vec<LaneName<'_>>) -> Result<()> {
    let mut seen = HashSet::new();
    let names: Vec<LaneName> = names.into_iter().filter(|name| seen.insert(*name)).collect();
    let queues: Vec<&str> = names.iter().map(|name| name.queue).collect();
    let kinds: Vec<&str> = names.iter().map(|name| name.kind).collect();
    let priorities: Vec<i16> = names.iter().map(|name| name.priority.rank()).collect();
    let keyed: Vec<bool> = names.iter().map(|name| name.keyed).collect();
    let max = shared.options.max_lanes;
    let max_lanes = i64::try_from(max).unwrap_or(i64::MAX);
    let client = shared.client().await?;
    let rows = client
        .query("SELECT faena.put_lanes($1, $2, $3, $4, $5)", &[&queues, &kinds, &priorities, &keyed, &max_lanes])
        .await
        .map_err(|error| match error.code() {
            Some(code) if code.code() == TOO_MANY_LANES => too_many_lanes(max),
            _ => error.into(),
        });
    let rows = client.return_to_pool(rows)?;
    shared.lanes.insert(names.iter().zip(&rows).map(|(name, row)| name.with_id(row.get(0))));
    Ok(())
}

/// SQLSTATE with which `faena.put_lanes` fails if there would be too many lanes.
const TOO_MANY_LANES: &str = "FA002";
