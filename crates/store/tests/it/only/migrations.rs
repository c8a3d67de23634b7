//! A database with an older schema is migrated without losing a row.

use faena_domain::JobState;
use faena_store::{MIGRATIONS, Migration, StoreOptions};

use crate::support::*;

/// A migration that only these tests know.
const SECOND: Migration = Migration {
    version: 2,
    name: "second",
    sqlite: "ALTER TABLE job_log ADD COLUMN colour TEXT NOT NULL DEFAULT 'blue';
             CREATE TABLE second (id INTEGER PRIMARY KEY)",
    postgres: "ALTER TABLE faena.job_log ADD COLUMN colour text NOT NULL DEFAULT 'blue';
               CREATE TABLE faena.second (id integer PRIMARY KEY)",
};

const TWO: &[Migration] = &[MIGRATIONS[0], SECOND];

/// The first statement succeeds, the second fails.
const BROKEN: &[Migration] = &[
    MIGRATIONS[0],
    Migration {
        sqlite: "CREATE TABLE second (id INTEGER PRIMARY KEY); INSERT INTO missing VALUES (1)",
        postgres: "CREATE TABLE faena.second (id integer PRIMARY KEY); INSERT INTO faena.missing VALUES (1)",
        ..SECOND
    },
];

fn with(migrations: &'static [Migration]) -> StoreOptions {
    StoreOptions { migrations, ..StoreOptions::default() }
}

/// The rows that a migration must keep.
async fn rows(ledger: &Ledger) -> Vec<Vec<Vec<String>>> {
    let mut all = Vec::new();
    for (table, columns) in [
        ("lane", "id, queue, type, priority, keyed"),
        ("job", "id, lane, correlation, options, payload"),
        ("ready", "lane, ready_at, id, retry_count, start_first, key"),
        ("waiting", "lane, state, id, due_at, blocked, retry_count"),
        ("claim", "run, owner, claimed_at, first_ready_at, ids, retries, strict"),
        ("done", "lane, id, finished_at, run, retry_count, started_at, worker, result, log"),
        ("ended", "lane, state, id, finished_at, run, retry_count, started_at, worker, error, reason, log"),
        ("job_log", "sequence, id, run, log"),
        ("counter", "lane, tally, n"),
    ] {
        let rows = ledger.rows(&format!("SELECT {columns} FROM {table} ORDER BY 1, 2")).await;
        assert!(!rows.is_empty(), "{table} has rows");
        all.push(rows);
    }
    all
}

async fn version(ledger: &Ledger) -> i64 {
    ledger.number("SELECT max(version) FROM faena_schema").await
}

async fn is_migrated_without_losing_a_row(url: &str, ledger: Ledger) {
    let world = World::open(url.to_owned(), ledger.clone(), StoreOptions::default()).await;
    assert_eq!(version(&ledger).await, 1);
    let completed = world.submit(world.job("a", 0)).await;
    let job = world.claim(1, 1).await.remove(0);
    world.complete(&job, 2).await;
    let cancelled = world.submit(world.job("a", 3)).await;
    world.store.job_cancel(cancelled, "not wanted", None, world.at(4)).await.unwrap();
    let assigned = world.submit(world.job("a", 5)).await;
    world.claim(1, 6).await;
    world.store.job_cancel(assigned, "not wanted", None, world.at(7)).await.unwrap();
    let delayed = world.submit(world.job("a", 8).scheduled(world.at(3_600_000))).await;
    let queued = world.submit(world.job("a", 9)).await;
    let before = rows(&ledger).await;
    world.store.close().await;

    let refused = StoreOptions { migrate: false, ..with(TWO) };
    assert!(faena_store::open(url, refused).await.is_err(), "migrations are not allowed");
    assert!(faena_store::open(url, with(BROKEN)).await.is_err(), "the migration fails");
    assert_eq!(
        (version(&ledger).await, rows(&ledger).await),
        (1, before.clone()),
        "a failed migration changes nothing"
    );

    let world = World::open(url.to_owned(), ledger.clone(), with(TWO)).await;
    assert_eq!((version(&ledger).await, rows(&ledger).await), (2, before));
    assert_eq!(ledger.number("SELECT count(*) FROM job_log WHERE colour <> 'blue'").await, 0);
    use JobState::*;
    let states = world.states([completed, cancelled, assigned, delayed, queued]).await;
    assert_eq!(states, [Completed, Cancelled, Assigned, Pending, Queued]);
    assert_eq!(world.claim(9, 20).await.len(), 1);
    world.store.close().await;

    assert!(faena_store::open(url, StoreOptions::default()).await.is_err(), "the schema is newer than this version");
    let again = StoreOptions { migrate: false, ..with(TWO) };
    faena_store::open(url, again).await.unwrap().close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_with_an_older_schema_is_migrated() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("faena.db");
    is_migrated_without_losing_a_row(&format!("sqlite:{}", path.display()), Ledger::Sqlite(path)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_postgres_database_with_an_older_schema_is_migrated() {
    on_empty_postgres(async |url: &str, ledger: &Ledger| {
        is_migrated_without_losing_a_row(url, ledger.clone()).await;
    })
    .await;
}
