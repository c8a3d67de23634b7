//! Reads what a job waits for, for `faena jobs why`.

use deadpool_postgres::Object;
use faena_domain::{Bucket, JobId, JobState, Timestamp};

use super::{Shared, read};
use crate::{ClaimOwner, JobPosition, Lane, LaneId, Result};

pub async fn position(shared: &Shared, id: JobId, without: &[LaneId]) -> Result<Option<JobPosition>> {
    let client = shared.client().await?;
    let result = position_in(shared, &client, id, without).await;
    client.return_to_pool(result)
}

async fn position_in(shared: &Shared, client: &Object, id: JobId, without: &[LaneId]) -> Result<Option<JobPosition>> {
    let Some(row) = client.query_opt("SELECT lane FROM faena.job WHERE id = $1", &[&id.0]).await? else {
        return Ok(None);
    };
    let lane: LaneId = row.get(0);
    let mut position = JobPosition { parents: parents(client, id).await?, ..JobPosition::default() };
    if let Some((ready_at, key)) = ready_row(client, lane, id).await? {
        if !shared.lanes.contains(lane) {
            shared.load_lanes().await?;
        }
        let lane = shared.lanes.require(lane)?;
        position.ahead = ahead(client, shared, &lane, ready_at, id, without).await?;
        if let Some(key) = key {
            (position.key_in_flight, position.key_jobs) = in_flight_of_key(client, key).await?;
            position.key_bucket = client
                .query_opt("SELECT tokens, at FROM faena.bucket WHERE key = $1", &[&key])
                .await?
                .map(|row| Bucket { tokens: row.get(0), at: Timestamp::from_ms(row.get(1)) });
        }
    } else if read::states_of(client, &[id]).await?.get(&id).is_some_and(|state| state.is_in_flight()) {
        position.owner = owner(client, id).await?;
        position.cancel = client
            .query_opt("SELECT at, reason FROM faena.cancel_request WHERE id = $1", &[&id.0])
            .await?
            .map(|row| (Timestamp::from_ms(row.get(0)), row.get(1)));
    }
    Ok(Some(position))
}

async fn ready_row(client: &Object, lane: LaneId, id: JobId) -> Result<Option<(i64, Option<i64>)>> {
    let row =
        client.query_opt("SELECT ready_at, key FROM faena.ready WHERE lane = $1 AND id = $2", &[&lane, &id.0]).await?;
    Ok(row.map(|row| (row.get(0), row.get(1))))
}

async fn parents(client: &Object, id: JobId) -> Result<Vec<(JobId, Option<JobState>)>> {
    let rows = client.query("SELECT parent FROM faena.dependency WHERE child = $1 ORDER BY parent", &[&id.0]).await?;
    let parents: Vec<JobId> = rows.iter().map(|row| JobId(row.get(0))).collect();
    let states = read::states_of(client, &parents).await?;
    Ok(parents.into_iter().map(|parent| (parent, states.get(&parent).copied())).collect())
}

/// Counts the ready jobs of the queue that come before this one. In each lane, those are the jobs that became ready before a
/// certain time.
async fn ahead(
    client: &Object,
    shared: &Shared,
    own: &Lane,
    ready_at: i64,
    id: JobId,
    without: &[LaneId],
) -> Result<u64> {
    let claim_order = shared.rules.current().claim_order(&own.queue);
    let score = claim_order.score(own.priority, Timestamp::from_ms(ready_at));
    let count = client
        .prepare_cached(
            "SELECT count(*) FROM (
                 SELECT 1 FROM faena.ready WHERE lane = $1 AND (ready_at, id) < ($2::int8, $3::uuid) LIMIT $4) AS r",
        )
        .await?;
    let mut ahead = 0;
    for lane in shared.lanes.all().into_iter().filter(|lane| lane.queue == own.queue && !without.contains(&lane.id)) {
        let before = score - claim_order.score(lane.priority, Timestamp::from_ms(0));
        let left = i64::try_from(JobPosition::MAX_AHEAD - ahead).unwrap_or(0);
        let found: i64 = client.query_one(&count, &[&lane.id, &before, &id.0, &left]).await?.get(0);
        ahead += u64::try_from(found).unwrap_or(0);
        if ahead >= JobPosition::MAX_AHEAD {
            break;
        }
    }
    Ok(ahead)
}

async fn in_flight_of_key(client: &Object, key: i64) -> Result<(u64, Vec<JobId>)> {
    let count: i64 = client.query_one("SELECT count(*) FROM faena.key_in_flight WHERE key = $1", &[&key]).await?.get(0);
    let max = JobPosition::MAX_NAMED as i64;
    let named =
        client.query("SELECT id FROM faena.key_in_flight WHERE key = $1 ORDER BY id LIMIT $2", &[&key, &max]).await?;
    Ok((u64::try_from(count).unwrap_or(0), named.iter().map(|row| JobId(row.get(0))).collect()))
}

/// Returns the claim of a job and its owner.
async fn owner(client: &Object, id: JobId) -> Result<Option<ClaimOwner>> {
    let row = client
        .query_opt(
            "SELECT c.claimed_at, n.name, n.lease_until, w.deadline FROM faena.claim c
             LEFT JOIN faena.worker w ON w.id = c.owner AND w.ended_at IS NULL
             LEFT JOIN faena.node n ON n.id = coalesce(w.node, c.owner)
             WHERE c.ids @> ARRAY[$1::uuid] ORDER BY c.run DESC LIMIT 1",
            &[&id.0],
        )
        .await?;
    Ok(row.map(|row| ClaimOwner {
        claimed_at: Timestamp::from_ms(row.get(0)),
        server: row.get(1),
        lease_until: row.get::<_, Option<i64>>(2).or(row.get(3)).map(Timestamp::from_ms),
    }))
}
