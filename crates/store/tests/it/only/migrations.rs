//! A database that an older Faena made goes forward without losing a row.

use faena_domain::{JobId, JobState};
use faena_store::StoreOptions;

use crate::support::*;

/// Every table of schema 1, with its columns then.
const TABLES: [(&str, &str); 18] = [
    ("lane", "id, queue, type, priority"),
    ("job", "id, lane, correlation, options, payload"),
    ("ready", "lane, ready_at, id, retry_count, start_first"),
    ("waiting", "lane, state, id, due_at, blocked, retry_count"),
    ("claim", "run, owner, claimed_at, first_ready_at, ids, retries, strict"),
    ("running", "id, lane, run, node, worker, retry_count, ready_at, started_at, updated_at, progress"),
    ("done", "lane, id, finished_at, run, retry_count, started_at, worker, result, log"),
    ("ended", "lane, state, id, finished_at, run, retry_count, started_at, worker, error, reason, log"),
    ("attempt", "id, run, state, retry_count, finished_at, started_at, worker, error, reason, log"),
    ("job_log", "sequence, id, run, log"),
    ("step", "id, name, run, at, result"),
    ("label", "kind, value, id"),
    ("job_key", "kind, key, id, fingerprint"),
    ("dependency", "parent, child"),
    ("expiry", "expires_at, id"),
    ("cancel_request", "id, reason, at"),
    ("counter", "lane, tally, n"),
    ("faena_schema", "version, name, applied_at"),
];

fn id(n: u128) -> JobId {
    JobId(uuid::Uuid::from_u128((1_763_236_800_000 << 80) | (7 << 76) | (2 << 62) | n))
}

/// Jobs in all places, in a hand-out of a server that is gone, as schema 1 keeps them.
async fn fill(ledger: &Ledger) {
    let sqlite = matches!(ledger, Ledger::Sqlite(_));
    let j: Vec<String> = (0..10).map(|n| ledger.literal(id(n))).collect();
    let (shard, ids, run) = if sqlite {
        ("lane, tally, n", format!("x'{}{}'", id(4).0.simple(), id(5).0.simple()), "UPDATE run_sequence SET last = 7")
    } else {
        ("lane, tally, shard, n", format!("ARRAY[{}, {}]", j[4], j[5]), "SELECT setval('run', 7)")
    };
    let (yes, no) = if sqlite { ("1", "0") } else { ("true", "false") };
    let node = ledger.literal(id(99));
    let counter = |tally: i64, n: i64| {
        let zero = if sqlite { "" } else { "0, " };
        format!("INSERT INTO counter ({shard}) VALUES (1, {tally}, {zero}{n})")
    };
    ledger.run("INSERT INTO lane (queue, type, priority) VALUES ('default', 'a', 1)").await;
    for (n, job) in j.iter().enumerate().skip(1) {
        let options = if n == 1 {
            r#"'{"tags":["t"],"idempotencyKey":"k","concurrencyKey":"c","expiresAt":"2999-01-01T00:00:00Z"}'"#
        } else {
            "NULL"
        };
        let sql = format!("INSERT INTO job VALUES ({}, 1, NULL, {options}, '{{\"n\":{n}}}')", job);
        ledger.run(&sql).await;
    }
    for sql in [
        format!("INSERT INTO ready VALUES (1, 1763236800000, {}, 0, {no})", j[1]),
        format!("INSERT INTO waiting VALUES (1, 0, {}, 4000000000000, {yes}, 0)", j[2]),
        format!("INSERT INTO waiting VALUES (1, 5, {}, 4000000000000, {no}, 1)", j[3]),
        format!("INSERT INTO claim (run, owner, claimed_at, first_ready_at, ids) VALUES (7, {node}, 2, 1, {ids})"),
        format!("INSERT INTO running VALUES ({}, 1, 7, {node}, {node}, 0, 1, 3, 3, NULL)", j[4]),
        format!("INSERT INTO done VALUES (1, {}, 1000, 5, 0, NULL, {node}, '1', '[1000,\"completed\"]')", j[6]),
        format!(
            "INSERT INTO ended VALUES (1, 7, {}, 9, 4, 3, NULL, NULL, 'no', 'error', '[9,\"failed\",\"no\"]')",
            j[7]
        ),
        format!(
            "INSERT INTO ended VALUES (1, 8, {}, 9, 0, 0, NULL, NULL, 'not wanted', 'cancelled', '[9,\"cancelled\"]')",
            j[8]
        ),
        format!("INSERT INTO done VALUES (1, {}, 1000, 6, 0, NULL, {node}, '1', '[1000,\"completed\"]')", j[9]),
        format!(
            "INSERT INTO attempt VALUES ({}, 3, 5, 0, 8, NULL, NULL, 'no', 'error', '[8,\"failed\",\"no\"]')",
            j[3]
        ),
        format!("INSERT INTO job_log (id, run, log) VALUES ({}, 3, '[8,\"message\",\"on\"]')", j[3]),
        format!("INSERT INTO step VALUES ({}, 'E1', 7, 4, '1')", j[4]),
        format!("INSERT INTO label VALUES (0, 't', {})", j[1]),
        format!("INSERT INTO job_key VALUES (0, 'k', {}, NULL)", j[1]),
        format!("INSERT INTO dependency VALUES ({}, {})", j[1], j[2]),
        format!("INSERT INTO expiry VALUES (32472144000000, {})", j[1]),
        format!("INSERT INTO cancel_request VALUES ({}, 'not wanted', 5)", j[5]),
        run.to_owned(),
    ] {
        ledger.run(&sql).await;
    }
    for (tally, n) in [(0, 1), (1, 1), (2, 2), (3, 1), (4, 2), (5, 1), (6, 1)] {
        ledger.run(&counter(tally, n)).await;
    }
}

async fn rows(ledger: &Ledger) -> Vec<(&'static str, Vec<Vec<String>>)> {
    let mut all = Vec::new();
    for (table, columns) in TABLES {
        let old = if table == "faena_schema" { "WHERE version = 1" } else { "" };
        let rows = ledger.rows(&format!("SELECT {columns} FROM {table} {old} ORDER BY 1, 2")).await;
        assert!(!rows.is_empty(), "{table} has rows");
        all.push((table, rows));
    }
    all
}

async fn goes_forward(url: &str, ledger: Ledger) {
    let before = rows(&ledger).await;

    let world = World::open(url.to_owned(), ledger.clone(), StoreOptions::default()).await;

    assert_eq!(rows(&ledger).await, before);
    assert_eq!(ledger.number("SELECT max(version) FROM faena_schema").await, 5);
    ledger.prove().await;
    use JobState::*;
    let states = [1, 2, 3, 4, 5, 6, 7, 8, 9].map(id);
    let wanted = [Queued, Pending, Retrying, Processing, Assigned, Completed, Failed, Cancelled, Completed];
    assert_eq!(world.states(states).await, wanted);
    assert_eq!(world.get(id(4)).await.progress.unwrap().completed_steps, Some(1));
    let freed = world.recover(1_000, 1).await;
    assert_eq!((freed.orphaned, freed.returned), (1, 0));
    assert_eq!(world.states([id(4), id(5)]).await, [Retrying, Cancelled]);
    world.admit(world.worker("w"), 2).await;
    let job = world.claim_by(&world.admit(world.worker("w"), 3).await, 1, 3).await.remove(0);
    assert!(job.id == id(1) && job.run > 7);
    world.complete(&job, 4).await;
    ledger.prove().await;
    world.store.close().await;
}

/// Every schema that was released, with what makes it of the one before.
const RELEASED: [(&str, &str, &str); 5] = [
    (
        "jobs",
        include_str!("../../../migrations/001_jobs.sqlite.sql"),
        include_str!("../../../migrations/001_jobs.postgres.sql"),
    ),
    (
        "workers",
        include_str!("../../../migrations/002_workers.sqlite.sql"),
        include_str!("../../../migrations/002_workers.postgres.sql"),
    ),
    (
        "limits",
        include_str!("../../../migrations/003_limits.sqlite.sql"),
        include_str!("../../../migrations/003_limits.postgres.sql"),
    ),
    (
        "schedules",
        include_str!("../../../migrations/004_schedules.sqlite.sql"),
        include_str!("../../../migrations/004_schedules.postgres.sql"),
    ),
    (
        "events",
        include_str!("../../../migrations/005_events.sqlite.sql"),
        include_str!("../../../migrations/005_events.postgres.sql"),
    ),
];

/// A database of this version, with jobs that were made under schema 1.
async fn make(ledger: &Ledger, version: usize) {
    for (n, (name, sqlite, postgres)) in RELEASED[..version].iter().enumerate() {
        ledger.run(if matches!(ledger, Ledger::Sqlite(_)) { sqlite } else { postgres }).await;
        ledger.run(&format!("INSERT INTO faena_schema VALUES ({}, '{name}', 1)", n + 1)).await;
        if n == 0 {
            fill(ledger).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_of_every_released_schema_goes_forward() {
    for version in 1..=RELEASED.len() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("faena.db");
        let ledger = Ledger::Sqlite(path.clone());
        ledger
            .run("CREATE TABLE faena_schema (version INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at INTEGER NOT NULL)")
            .await;
        make(&ledger, version).await;
        goes_forward(&format!("sqlite:{}", path.display()), ledger).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_postgres_database_of_every_released_schema_goes_forward() {
    for version in 1..=RELEASED.len() {
        on_empty_postgres(async |url: &str, ledger: &Ledger| {
            ledger.run("CREATE SCHEMA faena").await;
            ledger
                .run("CREATE TABLE faena_schema (version int PRIMARY KEY, name text NOT NULL, applied_at bigint NOT NULL)")
                .await;
            make(ledger, version).await;
            goes_forward(url, ledger.clone()).await;
        })
        .await;
    }
}
