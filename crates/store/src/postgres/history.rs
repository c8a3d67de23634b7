//! Records, lists and prunes the history: counts of what happened to jobs, per queue and period.

use async_trait::async_trait;
use deadpool_postgres::Object;
use faena_domain::Timestamp;

use super::{Postgres, Shared, read};
use crate::{
    HistoryCutoffs, HistoryEntry, HistoryPeriod, HistoryQuery, HistoryStore, LaneId, Result, TimingCount,
    history::{Marks, Recording},
};

#[async_trait]
impl HistoryStore for Postgres {
    async fn history_record(&self, timings: Vec<TimingCount>, now: Timestamp) -> Result<usize> {
        // Other nodes create lanes too.
        self.shared.retrying(|| self.shared.load_lanes()).await?;
        self.shared.retrying(|| record(&self.shared, &timings, now)).await
    }

    async fn history_list(&self, query: HistoryQuery) -> Result<Vec<HistoryEntry>> {
        self.shared.retrying(|| list(&self.shared, &query)).await
    }

    async fn history_prune(&self, before: HistoryCutoffs, limit: usize) -> Result<usize> {
        self.shared.retrying(|| prune(&self.shared, before, limit)).await
    }
}

/// Takes the lock under which one node at a time records. Its key is "hist" in ASCII.
const LOCK: &str = "SELECT pg_advisory_xact_lock(x'68697374'::bigint)";

async fn record(shared: &Shared, timings: &[TimingCount], now: Timestamp) -> Result<usize> {
    let client = shared.begin().await?;
    let result = record_in(shared, &client, timings, now).await;
    client.end(result).await
}

async fn plan(shared: &Shared, client: &Object, timings: &[TimingCount]) -> Result<Recording> {
    let statement = client.prepare_cached("SELECT lane, measure, n FROM faena.history_mark").await?;
    let rows = client.query(&statement, &[]).await?;
    let marks: Marks = rows.iter().map(|row| ((row.get(0), row.get(1)), row.get(2))).collect();
    Ok(Recording::plan(&read::counts_in(client).await?, &marks, &shared.lanes.all(), timings))
}

async fn record_in(shared: &Shared, client: &Object, timings: &[TimingCount], now: Timestamp) -> Result<usize> {
    // PostgreSQL: without the lock two nodes would record the same difference.
    client.batch_execute(LOCK).await?;
    let recording = plan(shared, client, timings).await?;
    if recording.is_empty() {
        return Ok(0);
    }
    let add = client
        .prepare_cached(
            "INSERT INTO faena.history AS h (period, starts_at, queue, measure, bucket, n)
             SELECT $1, $2, e.queue, e.measure, e.bucket, e.n
             FROM unnest($3::text[], $4::int2[], $5::int2[], $6::int8[]) AS e(queue, measure, bucket, n)
             ON CONFLICT (period, starts_at, queue, measure, bucket) DO UPDATE SET n = h.n + excluded.n",
        )
        .await?;
    for period in HistoryPeriod::ALL {
        let queues: Vec<&str> = recording.rows(period).map(|(queue, ..)| queue).collect();
        let measures: Vec<i16> = recording.rows(period).map(|(_, measure, ..)| measure).collect();
        let buckets: Vec<i16> = recording.rows(period).map(|(_, _, bucket, _)| bucket).collect();
        let numbers: Vec<i64> = recording.rows(period).map(|(.., n)| n).collect();
        let starts_at = period.start(now).as_ms();
        client.execute(&add, &[&(period as i16), &starts_at, &queues, &measures, &buckets, &numbers]).await?;
    }
    set_marks(client, &recording).await?;
    Ok(recording.add.len())
}

async fn set_marks(client: &Object, recording: &Recording) -> Result<()> {
    let lanes: Vec<LaneId> = recording.marks.iter().map(|(lane, _, _)| *lane).collect();
    let measures: Vec<i16> = recording.marks.iter().map(|(_, measure, _)| *measure).collect();
    let numbers: Vec<i64> = recording.marks.iter().map(|(_, _, n)| *n).collect();
    let mark = client
        .prepare_cached(
            "INSERT INTO faena.history_mark (lane, measure, n)
             SELECT * FROM unnest($1::int4[], $2::int2[], $3::int8[])
             ON CONFLICT (lane, measure) DO UPDATE SET n = excluded.n",
        )
        .await?;
    client.execute(&mark, &[&lanes, &measures, &numbers]).await?;
    Ok(())
}

async fn list(shared: &Shared, query: &HistoryQuery) -> Result<Vec<HistoryEntry>> {
    let client = shared.client().await?;
    let rows = client
        .query(
            "SELECT starts_at, CASE WHEN $5 THEN queue ELSE '' END AS shown, measure, bucket, sum(n)::int8 FROM faena.history
             WHERE period = $1 AND starts_at >= $2 AND starts_at < $3 AND ($4::text[] IS NULL OR queue = ANY($4))
             GROUP BY starts_at, shown, measure, bucket ORDER BY starts_at, shown, measure, bucket",
            &[&(query.period as i16), &query.from.as_ms(), &query.until.as_ms(), &query.queues, &query.by_queue],
        )
        .await
        .map_err(Into::into);
    let rows = client.return_to_pool(rows)?;
    Ok(rows
        .iter()
        .filter_map(|row| HistoryEntry::of_row(row.get(0), row.get(1), row.get(2), row.get(3), row.get(4)))
        .collect())
}

async fn prune(shared: &Shared, before: HistoryCutoffs, limit: usize) -> Result<usize> {
    let client = shared.client().await?;
    let result = async {
        let mut pruned = 0;
        for period in HistoryPeriod::ALL {
            pruned += client
                .execute(
                    "DELETE FROM faena.history WHERE ctid = ANY (ARRAY(
                         SELECT ctid FROM faena.history WHERE period = $1 AND starts_at < $2 ORDER BY starts_at LIMIT $3))",
                    &[&(period as i16), &before.of(period).as_ms(), &i64::try_from(limit).unwrap_or(i64::MAX)],
                )
                .await?;
        }
        Ok(usize::try_from(pruned).unwrap_or(usize::MAX))
    }
    .await;
    client.return_to_pool(result)
}
