//! Measures the baseline of PostgreSQL: a bare loop with two connections, batches of 1 000 and default durability.

use std::time::Instant;

use anyhow::Result;
use tokio_postgres::Client;
use uuid::Uuid;

use super::{
    baseline_sqlite::{Baseline, LOG, PAYLOAD, rate},
    scratch::{Scratch, connect},
};

const BATCH: usize = 1_000;

pub async fn run(server: &str, jobs: usize) -> Result<Baseline> {
    let mut scratch = Scratch::postgres(server).await?;
    let url = scratch.fresh().await?;
    let result = measure(&url, jobs).await;
    scratch.remove().await?;
    result
}

async fn measure(url: &str, jobs: usize) -> Result<Baseline> {
    let client = connect(url).await?;
    client
        .batch_execute(
            "CREATE TABLE job (id uuid PRIMARY KEY, queue text, type text, priority int2, created_at int8, correlation text,
                               options text, payload text);
             CREATE TABLE ready (queue text, score int8, id uuid, PRIMARY KEY (queue, score, id));
             CREATE SEQUENCE run;
             CREATE TABLE claim (run int8 PRIMARY KEY, node uuid, ids uuid[]);
             CREATE TABLE done (id uuid PRIMARY KEY, run int8, state int2, finished_at int8, result text, error text, log text)",
        )
        .await?;
    let started = Instant::now();
    tokio::try_join!(insert(url, jobs / 2), insert(url, jobs - jobs / 2))?;
    let insert = rate(jobs, started);
    let started = Instant::now();
    let (a, b) = tokio::try_join!(drain(url), drain(url))?;
    anyhow::ensure!(a + b == jobs, "the baseline lost jobs");
    Ok(Baseline { insert, drain: rate(jobs, started) })
}

async fn insert(url: &str, jobs: usize) -> Result<()> {
    let client = connect(url).await?;
    let statement = client
        .prepare(
            "WITH j AS (INSERT INTO job SELECT id, 'default', 'noop', 2, 1763236800123, NULL, NULL, payload
                        FROM unnest($1::uuid[], $2::text[]) AS n(id, payload))
             INSERT INTO ready SELECT 'default', score, id FROM unnest($3::int8[], $1::uuid[]) AS n(score, id)",
        )
        .await?;
    let mut remaining = jobs;
    while remaining > 0 {
        let count = remaining.min(BATCH);
        let ids: Vec<Uuid> = (0..count).map(|_| Uuid::now_v7()).collect();
        let payloads = vec![PAYLOAD; count];
        let now = faena_domain::Timestamp::now().as_ms();
        client.execute(&statement, &[&ids, &payloads, &vec![now; count]]).await?;
        remaining -= count;
    }
    Ok(())
}

async fn drain(url: &str) -> Result<usize> {
    let client: Client = connect(url).await?;
    client
        .batch_execute(
            "SET enable_seqscan = off; SET enable_sort = off; SET enable_hashjoin = off; SET enable_mergejoin = off; SET jit = off",
        )
        .await?;
    let claim = client
        .prepare(
            "WITH picked AS (
                 DELETE FROM ready WHERE ctid = ANY (ARRAY(
                     SELECT ctid FROM ready WHERE queue = 'default' AND score >= $1 ORDER BY score, id LIMIT 1000
                     FOR UPDATE SKIP LOCKED))
                 RETURNING score, id),
             c AS (INSERT INTO claim SELECT nextval('run'), NULL, array_agg(id) FROM picked HAVING count(*) > 0 RETURNING run)
             SELECT c.run, picked.score, picked.id, job.payload FROM picked JOIN job USING (id) CROSS JOIN c",
        )
        .await?;
    let finish = client
        .prepare(
            "WITH locked AS MATERIALIZED (SELECT run FROM claim WHERE run = $1 FOR KEY SHARE),
             put AS (INSERT INTO done SELECT id, $1, 6, 1763236800125, NULL, NULL, log
                     FROM unnest($2::uuid[], $3::text[]) AS n(id, log) WHERE EXISTS (SELECT FROM locked))
             DELETE FROM claim WHERE run IN (SELECT run FROM locked)",
        )
        .await?;
    let mut total = 0;
    let mut reached = 0_i64;
    loop {
        let rows = client.query(&claim, &[&reached]).await?;
        let Some(first) = rows.first() else {
            if reached == 0 {
                return Ok(total);
            }
            reached = 0;
            continue;
        };
        let run: i64 = first.get(0);
        reached = rows.iter().map(|row| row.get::<_, i64>(1)).max().unwrap_or(0);
        let ids: Vec<Uuid> = rows.iter().map(|row| row.get(2)).collect();
        client.execute(&finish, &[&run, &ids, &vec![LOG; ids.len()]]).await?;
        total += ids.len();
    }
}
