//! Records, lists and prunes the history: counts of what happened to jobs, per queue and period.

use async_trait::async_trait;
use faena_domain::Timestamp;
use rusqlite::Connection;

use super::{Sqlite, read, writer::Tx};
use crate::{
    HistoryCutoffs, HistoryEntry, HistoryPeriod, HistoryQuery, HistoryStore, Result, TimingCount,
    history::{Marks, Recording},
};

#[async_trait]
impl HistoryStore for Sqlite {
    async fn history_record(&self, timings: Vec<TimingCount>, now: Timestamp) -> Result<usize> {
        // SQLite: a reader checks first, so that an idle server does not use the writer.
        let planned = timings.clone();
        let is_empty = self
            .read(move |connection, shared| Ok(plan(connection, &shared.lanes.all(), &planned)?.is_empty()))
            .await?;
        if is_empty {
            return Ok(0);
        }
        self.writer.call(move |tx| record(tx, &timings, now)).await
    }

    async fn history_list(&self, query: HistoryQuery) -> Result<Vec<HistoryEntry>> {
        self.read(move |connection, _| list(connection, &query)).await
    }

    async fn history_prune(&self, before: HistoryCutoffs, limit: usize) -> Result<usize> {
        self.writer.call(move |tx| prune(tx, before, limit)).await
    }
}

fn plan(connection: &Connection, lanes: &[crate::Lane], timings: &[TimingCount]) -> Result<Recording> {
    let mut statement = connection.prepare_cached("SELECT lane, measure, n FROM history_mark")?;
    let rows = statement.query_map([], |row| Ok(((row.get(0)?, row.get(1)?), row.get(2)?)))?;
    let marks = rows.collect::<rusqlite::Result<Marks>>()?;
    Ok(Recording::plan(&read::counts(connection)?, &marks, lanes, timings))
}

fn record(tx: &Tx, timings: &[TimingCount], now: Timestamp) -> Result<usize> {
    let recording = plan(tx.connection, &tx.shared.lanes.all(), timings)?;
    let mut add = tx.connection.prepare_cached(
        "INSERT INTO history (period, starts_at, queue, measure, bucket, n) VALUES (?, ?, ?, ?, ?, ?)
         ON CONFLICT DO UPDATE SET n = n + excluded.n",
    )?;
    for period in HistoryPeriod::ALL {
        for (queue, measure, bucket, n) in recording.rows(period) {
            add.execute((period as i16, period.start(now).as_ms(), queue, measure, bucket, n))?;
        }
    }
    let mut mark = tx.connection.prepare_cached(
        "INSERT INTO history_mark (lane, measure, n) VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET n = excluded.n",
    )?;
    for row in &recording.marks {
        mark.execute(*row)?;
    }
    Ok(recording.add.len())
}

fn list(connection: &Connection, query: &HistoryQuery) -> Result<Vec<HistoryEntry>> {
    let queues = query.queues.as_ref().map(|queues| serde_json::to_string(queues).expect("names are JSON"));
    let mut statement = connection.prepare_cached(
        "SELECT starts_at, iif(?5, queue, '') AS shown, measure, bucket, sum(n) FROM history
         WHERE period = ?1 AND starts_at >= ?2 AND starts_at < ?3
           AND (?4 IS NULL OR queue IN (SELECT value FROM json_each(?4)))
         GROUP BY starts_at, shown, measure, bucket ORDER BY starts_at, shown, measure, bucket",
    )?;
    let rows = statement
        .query_map((query.period as i16, query.from.as_ms(), query.until.as_ms(), queues, query.by_queue), |row| {
            Ok(HistoryEntry::of_row(row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?))
        })?
        .collect::<rusqlite::Result<Vec<_>>>()?;
    Ok(rows.into_iter().flatten().collect())
}

fn prune(tx: &Tx, before: HistoryCutoffs, limit: usize) -> Result<usize> {
    let mut pruned = 0;
    for period in HistoryPeriod::ALL {
        pruned += tx
            .connection
            .prepare_cached(
                "DELETE FROM history WHERE (period, starts_at, queue, measure, bucket) IN (
                     SELECT period, starts_at, queue, measure, bucket FROM history
                     WHERE period = ?1 AND starts_at < ?2 ORDER BY starts_at LIMIT ?3)",
            )?
            .execute((period as i16, before.of(period).as_ms(), i64::try_from(limit).unwrap_or(i64::MAX)))?;
    }
    Ok(pruned)
}
