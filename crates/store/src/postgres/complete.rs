//! Fast path for run ends: stores completions of jobs that only need a row in `done`.
//!
//! The SQLite counterpart is `complete_plainly` in `sqlite/end.rs`.

use std::collections::{HashMap, HashSet};

use faena_domain::{JobId, Run, Timestamp};
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use super::{
    PooledClient,
    end::{Work, key, saturating_i16, stored_ends},
};
use crate::{LaneId, Result, RunEnd, RunOutcome, UpdateResult, lanes::LaneCache, sql::sql};

/// Returns the run ends of all calls if every one can take the fast path: a completion, of a distinct job, without a
/// concurrency key and with no other rows to clean up. Returns `None` otherwise.
pub fn plain_completions<'a>(works: &'a [Work], lanes: &LaneCache) -> Option<Vec<&'a RunEnd>> {
    let mut ends = Vec::new();
    let mut seen = HashSet::new();
    for work in works {
        let Work::Ends(list) = work else { return None };
        for end in list {
            let plain = matches!(end.outcome, RunOutcome::Completed { .. }) && !end.may_have_other_rows;
            if !plain || !seen.insert(end.id) {
                return None;
            }
            ends.push(end);
        }
    }
    // A job with a concurrency key also changes the counts of its key, which the fast path does not.
    (!lanes.any_keyed(ends.iter().map(|end| end.lane))).then_some(ends)
}

/// Stores completions with one statement, pipelined with the commit.
///
/// Returns, per call, whether each end was accepted, and the completed jobs that other jobs depend on. A completion that is
/// already stored (reported again because the response was lost) is skipped by the primary key.
pub async fn complete(
    client: PooledClient,
    shard: i16,
    works: &[Work],
    ends: &[&RunEnd],
) -> Result<(Vec<Vec<UpdateResult>>, Vec<JobId>)> {
    let columns = DoneColumns::of(ends.iter().copied());
    let closed_claims: Vec<Run> = ends.iter().filter(|end| end.closes_claim).map(|end| end.run).collect();
    let put = client
        .prepare_cached(
            sql!("WITH put AS (
                 INSERT INTO faena.done (lane, id, finished_at, run, retry_count, started_at, worker, result, log)
                 SELECT * FROM unnest($1::int4[], $2::uuid[], $3::int8[], $4::int8[], $5::int2[], $6::int8[], $7::uuid[],
                                      $8::text[], $9::text[])
                 ON CONFLICT DO NOTHING RETURNING lane),
             sums AS (SELECT lane, count(*) AS n FROM put GROUP BY lane),
             counted AS (
                 INSERT INTO faena.counter AS c (shard, lane, tally, n)
                 SELECT $10, sums.lane, t.tally, t.sign * sums.n FROM sums, (VALUES ({TALLY_IN_FLIGHT}::int2, -1), ({TALLY_COMPLETED}::int2, 1), ({TALLY_RAN}::int2, 1)) AS t(tally, sign)
                 ON CONFLICT (shard, lane, tally) DO UPDATE SET n = c.n + excluded.n)
             SELECT coalesce(sum(n), 0)::int8 FROM sums"),
        )
        .await?;
    let close = client.prepare_cached("DELETE FROM faena.claim WHERE run = ANY($1)").await?;
    let parents = client.prepare_cached("SELECT DISTINCT parent FROM faena.dependency WHERE parent = ANY($1)").await?;
    let mut parameters = columns.parameters();
    parameters.push(&shard);
    let close_parameters: [&(dyn ToSql + Sync); 1] = [&closed_claims];
    let parent_parameters: [&(dyn ToSql + Sync); 1] = [&columns.ids];
    let (put, closed, parents, committed) = futures_util::future::join4(
        client.query_one(&put, &parameters),
        client.execute(&close, &close_parameters),
        client.query(&parents, &parent_parameters),
        client.batch_execute("COMMIT"),
    )
    .await;
    let written: i64 = put?.get(0);
    closed?;
    committed?;
    let parents = parents?.iter().map(|row| JobId(row.get(0))).collect();
    let all_inserted = usize::try_from(written) == Ok(ends.len());
    let stored = if all_inserted {
        HashMap::new()
    } else {
        let keys: Vec<_> = ends.iter().map(|end| (end.lane, end.id.0, end.run)).collect();
        stored_ends(&client, &keys).await?
    };
    client.return_to_pool(Ok(()))?;
    let is_accepted = |end: &RunEnd| {
        all_inserted || stored.get(&key(end)).is_some_and(|(state, at_ms)| end.is_stored_as(*state, *at_ms))
    };
    let results = works
        .iter()
        .map(|work| match work {
            Work::Ends(list) => list.iter().map(|end| UpdateResult::of(is_accepted(end))).collect(),
            Work::Updates(_) => Vec::new(),
        })
        .collect();
    Ok((results, parents))
}

/// The rows of completions, column by column.
pub struct DoneColumns<'a> {
    lanes: Vec<LaneId>,
    ids: Vec<Uuid>,
    finished: Vec<i64>,
    runs: Vec<Run>,
    retries: Vec<i16>,
    started: Vec<Option<i64>>,
    workers: Vec<Uuid>,
    results: Vec<Option<&'a str>>,
    logs: Vec<&'a str>,
}

impl<'a> DoneColumns<'a> {
    pub fn of(ends: impl Iterator<Item = &'a RunEnd> + Clone) -> DoneColumns<'a> {
        DoneColumns {
            lanes: ends.clone().map(|end| end.lane).collect(),
            ids: ends.clone().map(|end| end.id.0).collect(),
            finished: ends.clone().map(|end| end.at.as_ms()).collect(),
            runs: ends.clone().map(|end| end.run).collect(),
            retries: ends.clone().map(|end| saturating_i16(end.retry_count)).collect(),
            started: ends.clone().map(|end| end.started_at.map(Timestamp::as_ms)).collect(),
            workers: ends.clone().map(|end| end.worker.0).collect(),
            results: ends
                .clone()
                .map(|end| match &end.outcome {
                    RunOutcome::Completed { result } => result.as_deref(),
                    _ => None,
                })
                .collect(),
            logs: ends.map(|end| end.log.as_str()).collect(),
        }
    }

    pub fn parameters(&self) -> Vec<&(dyn ToSql + Sync)> {
        vec![
            &self.lanes,
            &self.ids,
            &self.finished,
            &self.runs,
            &self.retries,
            &self.started,
            &self.workers,
            &self.results,
            &self.logs,
        ]
    }
}
