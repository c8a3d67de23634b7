//! The target of a move: an empty PostgreSQL database, filled chunk by chunk.
//!
//! The table `move` has one row: the source, and the process that moves it. `move_progress` has the number of rows of each table
//! that were copied, written in the transaction of the rows; it exists until the move is complete, and servers do not start before that.
//!
//! Every transaction locks the row of `move`. So a move that continues waits until the last transaction of a killed
//! process is committed or rolled back, and only the process that started last moves rows.

use std::{collections::HashMap, pin::pin, sync::Arc};

use deadpool_postgres::Object;
use faena_domain::Timestamp;
use futures_util::TryStreamExt;
use tokio_postgres::{
    binary_copy::BinaryCopyInWriter,
    types::{ToSql, Type},
};
use uuid::Uuid;

use super::{connect, due, events, hosts::Hosts};
use crate::{
    Cause, Result, StoreError, StoreOptions,
    transfer::{
        Identity, Sequences,
        shape::{FoundColumn, Table, quoted},
        value::{Checksum, Value},
    },
};

/// Number of rows after which a reader reports its progress.
const REPORT_ROWS: u64 = 20_000;

/// What the target contains.
#[derive(Debug)]
pub enum Found {
    Empty,
    /// A part of this source, with the number of rows of each table. If the map is empty, `begin` discards the contents.
    Part(HashMap<String, u64>),
    /// Everything. The move was completed at this time.
    Moved(Timestamp),
}

/// What to do with the partial copy of an earlier move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Resume {
    Continue,
    Discard,
}

pub struct Target {
    client: Object,
    owner: Uuid,
}

impl Target {
    /// Connects, begins a transaction, and migrates the schema in it.
    pub async fn open(url: &str) -> Result<Target> {
        let pool = connect::pool(url, &Hosts::new(url)?, StoreOptions::default().timeout())?;
        let client = pool.get().await.map_err(|error| connect::unusable(&connect::no_connection(error).to_string()))?;
        client.batch_execute("BEGIN; SET LOCAL lock_timeout = '60s'").await?;
        let target = Target { client, owner: Uuid::new_v4() };
        target.reject_foreign_schema().await?;
        connect::migrate_in(&**target.client, &StoreOptions::default()).await?;
        Ok(target)
    }

    async fn reject_foreign_schema(&self) -> Result<()> {
        let sql = "SELECT to_regclass('faena.faena_schema') IS NULL AND EXISTS (
                       SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'faena')";
        if self.client.query_one(sql, &[]).await?.get(0) {
            let text = "the schema \"faena\" of the target belongs to another application; choose another database";
            return Err(StoreError::Setup(text.into()));
        }
        Ok(())
    }

    pub async fn columns(&self) -> Result<Vec<FoundColumn>> {
        let sql = "SELECT c.relname, a.attname, t.typname FROM pg_class c
                   JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_attribute a ON a.attrelid = c.oid
                   JOIN pg_type t ON t.oid = a.atttypid
                   WHERE n.nspname = 'faena' AND c.relkind IN ('r', 'p') AND NOT c.relispartition
                     AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
                   ORDER BY c.relname, a.attnum";
        let rows = self.client.query(sql, &[]).await?;
        let column = |row: &tokio_postgres::Row| FoundColumn {
            table: row.get(0),
            name: row.get(1),
            kind: Some(row.get(2)),
            key: 0,
        };
        Ok(rows.iter().map(column).collect())
    }

    /// Decides whether this source can be moved here. Runs in the transaction of `open`.
    pub async fn inspect(&self, tables: &[Arc<Table>], identity: &Identity, resume: Resume) -> Result<Found> {
        let known = self.client.query_one("SELECT to_regclass('faena.move') IS NOT NULL", &[]).await?;
        if known.get(0) {
            let sql = "SELECT source, state, finished_at FROM faena.move FOR UPDATE";
            let row = self.client.query_one(sql, &[]).await.map_err(still_locked)?;
            let (source, state): (String, String) = (row.get(0), row.get(1));
            return match row.get::<_, Option<i64>>(2) {
                Some(at) if source == identity.source => Ok(Found::Moved(Timestamp::from_ms(at))),
                Some(_) => Err(not_empty("a database that was moved here from another file")),
                None if resume == Resume::Discard => Ok(Found::Part(HashMap::new())),
                None if source != identity.source => Err(StoreError::Setup(
                    "the target contains a part of another source; move that one, or pass --restart to discard the part"
                        .into(),
                )),
                None if state != identity.state => Err(StoreError::Setup(
                    "the source has changed since the move began; pass --restart to discard what was copied and begin again"
                        .into(),
                )),
                None => Ok(Found::Part(self.progress().await?)),
            };
        }
        self.require_empty(tables).await?;
        Ok(Found::Empty)
    }

    async fn require_empty(&self, tables: &[Arc<Table>]) -> Result<()> {
        let node = "SELECT name FROM faena.node ORDER BY lease_until DESC LIMIT 1";
        if let Some(node) = self.client.query_opt(node, &[]).await? {
            let name: String = node.get(0);
            return Err(not_empty(&format!("a database that the server {name:?} uses")));
        }
        let checks = tables
            .iter()
            .map(|table| format!("SELECT '{0}' WHERE EXISTS (SELECT FROM faena.{1})", table.name, quoted(&table.name)));
        let sql = checks.collect::<Vec<_>>().join(" UNION ALL ");
        let found: Vec<String> = self.client.query(&sql, &[]).await?.iter().map(|row| row.get(0)).collect();
        if found.is_empty() { Ok(()) } else { Err(not_empty(&format!("rows in {}", found.join(", ")))) }
    }

    async fn progress(&self) -> Result<HashMap<String, u64>> {
        let rows = self.client.query("SELECT name, rows FROM faena.move_progress", &[]).await?;
        Ok(rows.iter().map(|row| (row.get(0), row.get::<_, i64>(1).unsigned_abs())).collect())
    }

    /// Undoes everything since `open`, so that nothing is changed.
    pub async fn roll_back(self) -> Result<()> {
        Ok(self.client.batch_execute("ROLLBACK").await?)
    }

    /// Makes this process the owner of the move, and commits.
    pub async fn begin(&self, tables: &[Arc<Table>], identity: &Identity, found: &Found, now: Timestamp) -> Result<()> {
        match found {
            Found::Empty => {
                let sql = "CREATE TABLE faena.move (source text NOT NULL, state text NOT NULL, owner uuid NOT NULL,
                               started_at bigint NOT NULL, finished_at bigint);
                           CREATE TABLE faena.move_progress (name text PRIMARY KEY, rows bigint NOT NULL)";
                self.client.batch_execute(sql).await?;
                let sql = "INSERT INTO faena.move (source, state, owner, started_at) VALUES ($1, $2, $3, $4)";
                let values: [&(dyn ToSql + Sync); 4] = [&identity.source, &identity.state, &self.owner, &now.as_ms()];
                self.client.execute(sql, &values).await?;
            }
            Found::Part(progress) => {
                if progress.is_empty() {
                    self.discard(tables).await?;
                }
                let sql = "UPDATE faena.move SET source = $1, state = $2, owner = $3";
                self.client.execute(sql, &[&identity.source, &identity.state, &self.owner]).await?;
            }
            Found::Moved(_) => {}
        }
        Ok(self.client.batch_execute("COMMIT").await?)
    }

    async fn discard(&self, tables: &[Arc<Table>]) -> Result<()> {
        let names: Vec<String> = tables.iter().map(|table| format!("faena.{}", quoted(&table.name))).collect();
        let sql = format!("TRUNCATE {}; DELETE FROM faena.move_progress", names.join(", "));
        Ok(self.client.batch_execute(&sql).await?)
    }

    /// Creates the partitions of completed jobs, so that none goes to the default partition.
    pub async fn make_partitions(&self, days: &[i64], now: Timestamp) -> Result<()> {
        for day in days {
            due::make_partition(&self.client, *day).await?;
        }
        due::make_coming_partitions(&self.client, now).await
    }

    /// Adds rows to a table that already has `before` rows.
    pub async fn copy(&self, table: &Table, rows: &[Vec<Value>], before: u64) -> Result<()> {
        // A crash of PostgreSQL may undo the last transactions. Rows and their progress are in the same one, so they stay consistent.
        self.begin_as_owner("SET LOCAL synchronous_commit = off").await?;
        let sink = self.client.copy_in(&table.postgres_copy()).await?;
        let types: Vec<Type> = table.columns.iter().map(|column| column.kind.postgres()).collect();
        let mut writer = pin!(BinaryCopyInWriter::new(sink, &types));
        for row in rows {
            let values: Vec<&(dyn ToSql + Sync)> = row.iter().map(|value| value as &(dyn ToSql + Sync)).collect();
            writer.as_mut().write(&values).await?;
        }
        writer.finish().await?;
        let sql = "INSERT INTO faena.move_progress VALUES ($1, $2) ON CONFLICT (name) DO UPDATE SET rows = $2";
        let after = i64::try_from(before + rows.len() as u64).unwrap_or(i64::MAX);
        self.client.execute(sql, &[&table.name, &after]).await?;
        Ok(self.client.batch_execute("COMMIT").await?)
    }

    async fn begin_as_owner(&self, settings: &str) -> Result<()> {
        self.client.batch_execute(&format!("BEGIN; SET LOCAL lock_timeout = '60s'; {settings}")).await?;
        let sql = "SELECT owner FROM faena.move WHERE finished_at IS NULL FOR UPDATE";
        let row = self.client.query_opt(sql, &[]).await.map_err(still_locked)?;
        // No time limit from here on: the copy itself may have to wait for a vacuum.
        self.client.batch_execute("SET LOCAL lock_timeout = 0").await?;
        match row.map(|row| row.get::<_, Uuid>(0)) {
            Some(owner) if owner == self.owner => Ok(()),
            _ => Err(StoreError::Setup("another \"faena move\" continues this move; wait until it is complete".into())),
        }
    }

    /// Begins the transaction in which everything is verified.
    pub async fn begin_snapshot(&self) -> Result<()> {
        Ok(self.client.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await?)
    }

    pub async fn end_snapshot(&self) -> Result<()> {
        Ok(self.client.batch_execute("COMMIT").await?)
    }

    /// Computes the checksum of a whole table. `report` gets the number of rows so far.
    pub async fn checksum(&self, table: &Table, report: &(dyn Fn(u64) + Sync)) -> Result<Checksum> {
        let none: [&(dyn ToSql + Sync); 0] = [];
        let mut stream = pin!(self.client.query_raw(&table.postgres_select(), none).await?);
        let (mut sum, mut buffer, mut values) = (Checksum::default(), Vec::new(), Vec::new());
        while let Some(row) = stream.try_next().await? {
            values.clear();
            for (at, column) in table.columns.iter().enumerate() {
                values.push(Value::from_postgres(column.kind, &row, at)?);
            }
            sum.add(&values, &mut buffer);
            if sum.rows.is_multiple_of(REPORT_ROWS) {
                report(sum.rows);
            }
        }
        Ok(sum)
    }

    /// Completes the move: new numbers follow the moved ones, events are created from now on, and servers may start.
    pub async fn finish(&self, sequences: &Sequences, now: Timestamp) -> Result<()> {
        self.begin_as_owner("").await?;
        self.client
            .execute("SELECT setval('faena.run', greatest($1::bigint, 1), $1::bigint > 0)", &[&sequences.last_run])
            .await?;
        let identities = "SELECT c.relname, a.attname FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
                          JOIN pg_namespace n ON n.oid = c.relnamespace
                          WHERE n.nspname = 'faena' AND a.attidentity <> '' AND NOT c.relispartition";
        for row in self.client.query(identities, &[]).await? {
            let (table, column): (String, String) = (row.get(0), row.get(1));
            // For tables whose numbers are never reused, SQLite remembers the last number even after its row was deleted.
            let known = sequences.last_values.iter().find(|(name, _)| *name == table).map_or(0, |(_, last)| *last);
            let sql = format!(
                "SELECT setval(pg_get_serial_sequence('faena.{0}', '{column}'), greatest(last, 1), last > 0)
                 FROM (SELECT greatest($1::bigint, coalesce(max({1}), 0)) AS last FROM faena.{0}) m",
                quoted(&table),
                quoted(&column)
            );
            self.client.execute(&sql, &[&known]).await?;
        }
        events::switch(&self.client, now).await?;
        self.client.execute("UPDATE faena.move SET finished_at = $1", &[&now.as_ms()]).await?;
        self.client.batch_execute("DROP TABLE faena.move_progress; COMMIT").await?;
        Ok(())
    }

    /// Updates the statistics of the planner, which autovacuum would do only later.
    pub async fn analyze(&self, tables: &[Arc<Table>]) -> Result<()> {
        let names: Vec<String> = tables.iter().map(|table| format!("faena.{}", quoted(&table.name))).collect();
        Ok(self.client.batch_execute(&format!("ANALYZE {}", names.join(", "))).await?)
    }
}

fn not_empty(what: &str) -> StoreError {
    StoreError::Setup(format!(
        "the target is not empty: it contains {what}; choose an empty database (nothing was changed)"
    ))
}

fn still_locked(error: tokio_postgres::Error) -> StoreError {
    match StoreError::from(error) {
        StoreError::Contended(_) => StoreError::Unavailable(Cause::from(
            "PostgreSQL is still working for an earlier \"faena move\"; try again when its session has ended",
        )),
        other => other,
    }
}
