//! Inspects and repairs a PostgreSQL database.
//!
//! An inspection reads one REPEATABLE READ snapshot while the servers work. A repair blocks their writes for its duration.

use std::time::Instant;

use deadpool_postgres::Object;
use faena_domain::Timestamp;
use futures_util::TryStreamExt;
use tokio_postgres::{Row, types::Type};
use uuid::Uuid;

use super::{Postgres, Shared, audit, connect, due, hosts::Hosts};
use crate::{
    AuditEntry, AuditStore, GracePeriods, NodeStore, Result, StoreError, StoreOptions,
    doctor::{
        Cell, Collector, Dialect, Finding, Fix, Inspection, Progress, QueueEntries, Statement, check_schema, code_of,
        fixes, no_database, queue_steps, steps,
        tasks::{self, TaskRepair},
    },
};

const CLAIMED: &str = "claimed (run, owner, id) AS MATERIALIZED (SELECT run, owner, unnest(ids) FROM claim)";

const MAX_CLOCK_SKEW_MS: i64 = 2_000;
/// Age of a transaction from which it is reported: it prevents vacuum from removing old row versions.
const OLD_TRANSACTION_MS: i64 = 300_000;
/// Maximum number of times a repair is retried after a lock conflict with a server.
const MAX_RETRIES: usize = 5;
/// Shard of the counters that repairs add to. Servers use 0 and above.
const SHARD: i16 = -1;

fn dialect(now: Timestamp) -> Dialect {
    Dialect {
        claimed: CLAIMED,
        // A lease that has just expired is left to the servers.
        dead: format!("n.lease_until < {} - 30000", now.as_ms()),
        last_run: "(SELECT last_value FROM run)",
        literal: |id| format!("'{id}'::uuid"),
        now,
    }
}

/// Checks the whole database and changes nothing.
pub async fn inspect(url: &str, now: Timestamp, progress: Progress<'_>) -> Result<Inspection> {
    let started = Instant::now();
    let pool = connect::pool(url, &Hosts::new(url)?, StoreOptions::default().timeout())?;
    let client = pool.get().await.map_err(|error| connect::unusable(&connect::no_connection(error).to_string()))?;
    let mut findings = Vec::new();
    if let Some(old) = check_server(&client, now.plus_ms(ms(started.elapsed())), &mut findings).await? {
        return Ok(old);
    }
    client.batch_execute("LISTEN faena_doctor").await?;
    // Checked before the snapshot begins, because a long inspection is an old transaction itself.
    check_sessions(&client, now, &mut findings).await?;
    client
        .batch_execute(
            "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET LOCAL search_path = faena; SET LOCAL jit = off;
             SET LOCAL work_mem = '64MB'",
        )
        .await?;
    let mut collector = Collector::default();
    let steps = steps(&dialect(now));
    for (at, step) in steps.iter().enumerate() {
        progress(step.name, at, steps.len());
        for_each(&client, &step.sql, |row| (step.take)(&mut collector, row)).await?;
    }
    check_partitions(&client, now, &mut collector, &mut findings).await?;
    client.batch_execute("COMMIT").await?;
    if rows(&client, "SELECT 1 FROM pg_listening_channels() c WHERE c = 'faena_doctor'").await?.is_empty() {
        let text = "LISTEN does not survive the end of a statement, so servers do not receive signals of other servers";
        findings.push(code_of("listen-impossible").finding(1, text.into()));
    }
    // Not returned to the pool, because it listens.
    drop(Object::take(client));
    let jobs = collector.jobs;
    let mut all = collector.findings();
    all.append(&mut findings);
    Ok(Inspection { database_kind: "postgres", jobs, in_use_by: None, findings: all })
}

/// Reads the jobs that wait, on one snapshot.
pub async fn queue_entries(url: &str) -> Result<QueueEntries> {
    let pool = connect::pool(url, &Hosts::new(url)?, StoreOptions::default().timeout())?;
    let client = pool.get().await.map_err(|error| connect::unusable(&connect::no_connection(error).to_string()))?;
    client.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET LOCAL search_path = faena").await?;
    let mut entries = QueueEntries::default();
    for (sql, take) in queue_steps() {
        for_each(&client, &sql, |row| take(&mut entries, row)).await?;
    }
    client.batch_execute("COMMIT").await?;
    Ok(entries)
}

/// Checks version, clock and schema of the server. Returns `Some` if the schema is too old for the other checks.
async fn check_server(client: &Object, now: Timestamp, findings: &mut Vec<Finding>) -> Result<Option<Inspection>> {
    let sql =
        "SELECT current_setting('server_version_num')::int8, (extract(epoch FROM clock_timestamp()) * 1000)::int8,
                      (to_regclass('faena.faena_schema') IS NOT NULL)::int::int8";
    let row = cells(&client.query_one(sql, &[]).await?);
    let (version, clock, known) = (row[0].number(), row[1].number(), row[2].number() == 1);
    if !known {
        return Err(no_database("the PostgreSQL database"));
    }
    let schema = client.query_one("SELECT coalesce(max(version), 0) FROM faena.faena_schema", &[]).await?.get(0);
    if let Some(old) = check_schema(schema, "postgres")? {
        return Ok(Some(old));
    }
    connect::require_complete(&***client).await?;
    if version < 130_000 {
        findings.push(code_of("postgres-old").finding(1, format!("PostgreSQL has version {}", version / 10_000)));
    }
    let skew = now.as_ms() - clock;
    if skew.abs() > MAX_CLOCK_SKEW_MS {
        let text = format!(
            "this machine's clock is {:.1} s {} the database's",
            skew.abs() as f64 / 1e3,
            if skew > 0 { "ahead of" } else { "behind" }
        );
        findings.push(code_of("clock-skew").finding(1, text));
    }
    Ok(None)
}

/// Finds the sessions and replication slots that retain old row versions, and the tables that have too many of them.
async fn check_sessions(client: &Object, now: Timestamp, findings: &mut Vec<Finding>) -> Result<()> {
    let since = now.plus_ms(-OLD_TRANSACTION_MS).as_ms();
    for (code, sql) in [
        (
            "xmin-held",
            format!(
                "SELECT format('pid %s (%s, %s) since %s, last query at %s', pid, coalesce(nullif(application_name, ''), 'no name'),
                               coalesce(state, 'unknown'), to_char(xact_start AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"'),
                               to_char(query_start AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"'))
                 FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
                   AND backend_type = 'client backend' AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)
                   AND extract(epoch FROM xact_start) * 1000 < {since} ORDER BY xact_start LIMIT 20"
            ),
        ),
        (
            "slot-held",
            "SELECT format('%s (%s, keeps %s of WAL)', slot_name, CASE WHEN active THEN 'active' ELSE 'not active' END,
                           pg_size_pretty(pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)))
             FROM pg_replication_slots
             WHERE CASE WHEN pg_is_in_recovery() THEN false
                        ELSE pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn) > 1073741824
                             OR (NOT active AND coalesce(age(xmin), age(catalog_xmin)) > 1000000) END
             ORDER BY 1 LIMIT 20"
                .into(),
        ),
        (
            "vacuum-behind",
            "SELECT format('%s (%s dead rows, %s live)', relname, n_dead_tup, n_live_tup) FROM pg_stat_user_tables
             WHERE schemaname = 'faena' AND n_dead_tup > 200000 AND n_dead_tup > n_live_tup ORDER BY n_dead_tup DESC LIMIT 20"
                .into(),
        ),
    ] {
        let found: Vec<String> = rows(client, &sql).await?.iter().map(|row| row[0].to_string()).collect();
        if !found.is_empty() {
            findings.push(code_of(code).found(found.len() as u64, &found));
        }
    }
    Ok(())
}

async fn check_partitions(
    client: &Object,
    now: Timestamp,
    collector: &mut Collector,
    findings: &mut Vec<Finding>,
) -> Result<()> {
    for name in due::coming_partitions(now) {
        if rows(client, &format!("SELECT 1 WHERE to_regclass('faena.{name}') IS NULL")).await?.len() == 1 {
            collector.add("partition-missing", Uuid::nil(), &name);
        }
    }
    let rows = rows(client, "SELECT count(*) FROM faena.done_default").await?;
    let count = rows.first().map_or(0, |row| row[0].number());
    if count > 0 {
        let jobs = if count == 1 { "job is" } else { "jobs are" };
        let text = format!("{count} completed {jobs} in the default partition");
        findings.push(code_of("default-partition").finding(u64::try_from(count).unwrap_or(0), text));
    }
    Ok(())
}

/// Calls `take` with each row. Streams the rows, so that a million logs are never in memory together.
async fn for_each(client: &Object, sql: &str, mut take: impl FnMut(&[Cell])) -> Result<()> {
    let none: [&(dyn tokio_postgres::types::ToSql + Sync); 0] = [];
    let stream = client.query_raw(sql, none).await?;
    tokio::pin!(stream);
    while let Some(row) = stream.try_next().await? {
        take(&cells(&row));
    }
    Ok(())
}

async fn rows(client: &Object, sql: &str) -> Result<Vec<Vec<Cell>>> {
    Ok(client.query(sql, &[]).await?.iter().map(cells).collect())
}

fn cells(row: &Row) -> Vec<Cell> {
    let cell = |at: usize| match *row.columns()[at].type_() {
        Type::UUID => row.get::<_, Option<Uuid>>(at).map_or(Cell::Null, Cell::Id),
        Type::INT2 => row.get::<_, Option<i16>>(at).map_or(Cell::Null, |n| Cell::Number(n.into())),
        Type::INT4 => row.get::<_, Option<i32>>(at).map_or(Cell::Null, |n| Cell::Number(n.into())),
        Type::INT8 => row.get::<_, Option<i64>>(at).map_or(Cell::Null, Cell::Number),
        _ => row.try_get::<_, Option<String>>(at).ok().flatten().map_or(Cell::Null, Cell::Text),
    };
    (0..row.len()).map(cell).collect()
}

fn ms(duration: std::time::Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

impl Postgres {
    /// Repairs the findings of one code. Returns the number of repairs.
    pub async fn doctor_fix(
        &self,
        code: &'static str,
        fix: Fix,
        found: u64,
        grace_periods: GracePeriods,
        now: Timestamp,
    ) -> Result<u64> {
        match fix {
            Fix::None => Ok(0),
            Fix::Recover => {
                let mut count = 0;
                loop {
                    let recovered = self.node_recover(grace_periods, now).await?;
                    let changed = recovered.orphaned + recovered.returned + recovered.nodes;
                    count += changed as u64;
                    if changed == 0 {
                        break;
                    }
                }
                self.audit_add(entry(code, count), now).await?;
                Ok(count)
            }
            Fix::MakePartitions => {
                // Opening the store has already created them, or has logged why it could not.
                due::make_partitions(&self.shared, now).await?;
                self.audit_add(entry(code, found), now).await?;
                Ok(found)
            }
            fix => {
                // Not with `retrying`: a repair may take long without the database being unavailable.
                for _ in 0..MAX_RETRIES {
                    match fix_alone(&self.shared, code, &fix, now).await {
                        Err(StoreError::Contended(_)) => {}
                        result => return result,
                    }
                }
                fix_alone(&self.shared, code, &fix, now).await
            }
        }
    }
}

fn entry(code: &str, count: u64) -> AuditEntry {
    AuditEntry {
        actor: "cli".into(),
        action: "doctor.fix".into(),
        target: code.into(),
        details: serde_json::json!({"code": code, "count": count}),
        count,
    }
}

/// Applies a repair. Servers may be running; their writes wait, so that nothing changes between the reads and writes of
/// the repair.
async fn fix_alone(shared: &Shared, code: &str, fix: &Fix, now: Timestamp) -> Result<u64> {
    let client = shared.client().await?;
    client
        .batch_execute(
            "BEGIN ISOLATION LEVEL REPEATABLE READ; SET LOCAL search_path = faena; SET LOCAL lock_timeout = '10s'; SET LOCAL jit = off;
             SET LOCAL statement_timeout = '10min';
             LOCK TABLE job, ready, waiting, claim, ended, done, key_in_flight, key_queue, task IN SHARE ROW EXCLUSIVE MODE",
        )
        .await?;
    let result = async {
        let count = fix_in(&client, fix, now).await?;
        if count > 0 {
            audit::add(&client, &entry(code, count), now).await?;
        }
        Ok(count)
    }
    .await;
    client.end(result).await
}

async fn fix_in(client: &Object, fix: &Fix, now: Timestamp) -> Result<u64> {
    let dialect = dialect(now);
    match fix {
        Fix::Sql(statements) => {
            let mut count = 0;
            for statement in *statements {
                match statement {
                    Statement::Counted(sql) => count += client.execute(&dialect.sql(sql), &[]).await?,
                    Statement::Uncounted(sql) => {
                        client.execute(&dialect.sql(sql), &[]).await?;
                    }
                }
            }
            Ok(count)
        }
        Fix::Rows { select, make } => {
            let mut count = 0;
            for row in rows(client, &dialect.sql(select)).await? {
                let statements = make(&dialect, &row);
                count += u64::from(!statements.is_empty());
                for sql in statements {
                    client.execute(&sql, &[]).await?;
                }
            }
            Ok(count)
        }
        Fix::Tasks => {
            let (mut repair, mut statements) = (TaskRepair::default(), Vec::new());
            for_each(client, tasks::MACHINES, |row| repair.add_machine(row)).await?;
            for_each(client, tasks::ALL_TASKS, |row| statements.extend(repair.statement(&dialect, row))).await?;
            for sql in &statements {
                client.execute(sql, &[]).await?;
            }
            Ok(statements.len() as u64)
        }
        Fix::Recount => {
            let sql = format!(
                "INSERT INTO counter (shard, lane, tally, n) SELECT {SHARD}, d.lane, d.tally, d.n FROM ({}) d
                 ON CONFLICT (shard, lane, tally) DO UPDATE SET n = counter.n + excluded.n",
                fixes::DRIFT
            );
            Ok(client.execute(&dialect.sql(&sql), &[]).await?)
        }
        Fix::MoveSequence => {
            let sql = format!(
                "SELECT setval('run', m.run) FROM ({}) AS m(run) WHERE m.run > (SELECT last_value FROM run)",
                fixes::LARGEST_RUN
            );
            Ok(client.execute(&dialect.sql(&sql), &[]).await?)
        }
        Fix::None | Fix::Recover | Fix::MakePartitions => Ok(0),
    }
}
