//! Claims jobs that the external queue has chosen. Skips jobs that are no longer ready, or
//! that became ready again at another time.

use std::collections::{HashMap, HashSet};

use deadpool_postgres::Object;
use faena_domain::{JobId, Timestamp};
use futures_util::future::{join3, try_join_all};
use tokio_postgres::{Row, types::ToSql};
use uuid::Uuid;

use super::{
    Shared,
    claim::{BEGIN_CLAIM, Group, claimed_job, in_claim_order, may_claim},
    limited_claim::TAKE,
};
use crate::{
    ClaimCandidate, ClaimRequest, ClaimResult, ClaimedJob, Lane, LaneId, Owner, Result,
    admit::{Admission, ReadyJob},
};

/// Claims for several requests in one transaction, in one round trip. Their lanes have neither limits nor keys.
pub async fn claim_group(
    shared: &Shared,
    requests: &[ClaimRequest],
    group: &Group,
    now: Timestamp,
) -> Result<Vec<ClaimResult>> {
    let client = shared.client().await?;
    let statement = client.prepare_cached(TAKE).await?;
    let shard = shared.own_shard();
    let chosen: Vec<Columns> =
        group.requests.iter().map(|(at, lanes)| Columns::of_request(&requests[*at], lanes)).collect();
    let claims = group.requests.iter().zip(&chosen).map(|((at, _), columns)| {
        let (statement, shard, client) = (&statement, &shard, &client);
        async move {
            let owner = requests[*at].owner;
            let session = match owner {
                Owner::Node(_) => None,
                Owner::Worker { session, .. } => Some(session),
            };
            let (id, now_ms) = (owner.uuid(), now.as_ms());
            let parameters: [&(dyn ToSql + Sync); 7] =
                [&columns.lanes, &columns.times, &columns.ids, &id, &now_ms, shard, &session];
            client.query(statement, &parameters).await
        }
    });
    let (begun, claimed, committed) =
        join3(client.batch_execute(BEGIN_CLAIM), try_join_all(claims), client.batch_execute("COMMIT")).await;
    begun?;
    let claimed = claimed?;
    committed?;
    let mut results = Vec::with_capacity(claimed.len());
    for ((at, _), rows) in group.requests.iter().zip(claimed) {
        let jobs = rows.iter().map(|row| claimed_job(row.get(8), row)).collect::<Result<Vec<_>>>()?;
        let rejected = jobs.is_empty() && !may_claim(&client, requests[*at].owner).await?;
        results.push(ClaimResult { jobs: in_claim_order(shared, jobs), rejected, ..ClaimResult::default() });
    }
    client.return_to_pool(Ok(results))
}

/// The candidates of a request as parameters.
#[derive(Default)]
struct Columns {
    lanes: Vec<LaneId>,
    times: Vec<i64>,
    ids: Vec<Uuid>,
}

impl Columns {
    fn push(&mut self, lane: LaneId, ready_at: Timestamp, id: JobId) {
        self.lanes.push(lane);
        self.times.push(ready_at.as_ms());
        self.ids.push(id.0);
    }

    fn of_request(request: &ClaimRequest, lanes: &[LaneId]) -> Columns {
        let mut columns = Columns::default();
        let candidates = request.candidates.iter().flatten().filter(|candidate| lanes.contains(&candidate.lane));
        for candidate in candidates.take(request.limit) {
            columns.push(candidate.lane, candidate.ready_at, candidate.id);
        }
        columns
    }
}

/// Adds the candidates that are ready to the admission, as many of each lane as it wants. Locks nothing.
pub async fn read_candidates(
    client: &Object,
    admission: &mut Admission<'_>,
    lanes: &[Lane],
    candidates: &[ClaimCandidate],
) -> Result<()> {
    let mut left: HashMap<LaneId, usize> =
        lanes.iter().map(|lane| (lane.id, admission.plain_jobs_wanted(lane.id))).collect();
    let mut columns = Columns::default();
    for candidate in candidates.iter().filter(|candidate| left.contains_key(&candidate.lane)) {
        columns.push(candidate.lane, candidate.ready_at, candidate.id);
    }
    if columns.ids.is_empty() {
        return Ok(());
    }
    let statement = client
        .prepare_cached(
            "SELECT r.id FROM unnest($1::int4[], $2::int8[], $3::uuid[]) AS c(lane, ready_at, id)
             CROSS JOIN LATERAL (
                 SELECT id FROM faena.ready WHERE lane = c.lane AND ready_at = c.ready_at AND id = c.id) AS r",
        )
        .await?;
    let rows = client.query(&statement, &[&columns.lanes, &columns.times, &columns.ids]).await?;
    let ready: HashSet<Uuid> = rows.iter().map(|row| row.get(0)).collect();
    for candidate in candidates.iter().filter(|candidate| ready.contains(&candidate.id.0)) {
        let Some(left) = left.get_mut(&candidate.lane).filter(|left| **left > 0) else { continue };
        *left -= 1;
        admission.add_plain_job(candidate.lane, candidate.ready_at, candidate.id);
    }
    Ok(())
}

/// Claims exactly the chosen jobs, with and without keys, and updates the key queues.
pub async fn claim_chosen(
    shared: &Shared,
    client: &Object,
    admission: &mut Admission<'_>,
    owner: Owner,
    now: Timestamp,
) -> Result<Vec<ClaimedJob>> {
    let chosen = admission.chosen().to_vec();
    let mut jobs = take_jobs(shared, client, &chosen, owner, now).await?;
    for (job, key) in &mut jobs {
        job.limited = admission.wait_cause(job.lane, *key, job.ready_at);
    }
    let taken: HashSet<JobId> = jobs.iter().map(|(job, _)| job.id).collect();
    admission.remove_missed(|ready_job| !taken.contains(&ready_job.id));
    super::key_queues::write_key_queues(client, admission).await?;
    let order: HashMap<JobId, usize> = chosen.iter().enumerate().map(|(index, job)| (job.id, index)).collect();
    let mut jobs: Vec<ClaimedJob> = jobs.into_iter().map(|(job, _)| job).collect();
    jobs.sort_by_key(|job| order.get(&job.id).copied().unwrap_or(usize::MAX));
    Ok(jobs)
}

/// Claims the given jobs inside a transaction that has locked the worker. Returns them with their keys.
pub async fn take_jobs(
    shared: &Shared,
    client: &Object,
    chosen: &[ReadyJob],
    owner: Owner,
    now: Timestamp,
) -> Result<Vec<(ClaimedJob, Option<i64>)>> {
    if chosen.is_empty() {
        return Ok(Vec::new());
    }
    let mut columns = Columns::default();
    for ready_job in chosen {
        columns.push(ready_job.lane, ready_job.ready_at, ready_job.id);
    }
    let session = match owner {
        Owner::Node(_) => None,
        Owner::Worker { session, .. } => Some(session),
    };
    let statement = client.prepare_cached(TAKE).await?;
    let shard = shared.own_shard();
    let (id, now_ms) = (owner.uuid(), now.as_ms());
    let parameters: [&(dyn ToSql + Sync); 7] =
        [&columns.lanes, &columns.times, &columns.ids, &id, &now_ms, &shard, &session];
    let rows: Vec<Row> = client.query(&statement, &parameters).await?;
    rows.iter().map(|row| Ok((claimed_job(row.get(8), row)?, row.get(9)))).collect()
}
