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
const FAILING: &[Migration] = &[
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

/// Returns the rows that a migration must keep.
async fn rows(database: &RawDatabase) -> Vec<Vec<Vec<String>>> {
    let mut all = Vec::new();
    for (table, columns) in [
        ("lane", "id, queue, type, priority, keyed"),
        ("job", "id, lane, correlation, options, payload"),
        ("ready", "lane, ready_at, id, retry_count, must_record_start, key"),
        ("waiting", "lane, state, id, due_at, blocked, retry_count"),
        ("claim", "run, owner, claimed_at, first_ready_at, ids, retries, check_each"),
        ("done", "lane, id, finished_at, run, retry_count, started_at, worker, result, log"),
        ("ended", "lane, state, id, finished_at, run, retry_count, started_at, worker, error, reason, log"),
        ("job_log", "sequence, id, run, log"),
        ("counter", "lane, tally, n"),
    ] {
        let rows = database.rows(&format!("SELECT {columns} FROM {table} ORDER BY 1, 2")).await;
        assert!(!rows.is_empty(), "{table} has rows");
        all.push(rows);
    }
    all
}

async fn version(database: &RawDatabase) -> i64 {
    database.number("SELECT max(version) FROM faena_schema").await
}

async fn assert_migrates_without_losing_rows(url: &str, database: RawDatabase) {
    let fixture = Fixture::open(url.to_owned(), database.clone(), StoreOptions::default()).await;
    assert_eq!(version(&database).await, 1);
    let completed = fixture.submit(fixture.job("a", 0)).await;
    let job = fixture.claim(1, 1).await.remove(0);
    fixture.complete(&job, 2).await;
    let cancelled = fixture.submit(fixture.job("a", 3)).await;
    fixture.store.job_cancel(cancelled, "not wanted", None, fixture.at(4)).await.unwrap();
    let assigned = fixture.submit(fixture.job("a", 5)).await;
    fixture.claim(1, 6).await;
    fixture.store.job_cancel(assigned, "not wanted", None, fixture.at(7)).await.unwrap();
    let delayed = fixture.submit(fixture.job("a", 8).scheduled(fixture.at(3_600_000))).await;
    let queued = fixture.submit(fixture.job("a", 9)).await;
    let before = rows(&database).await;
    fixture.store.close().await;

    let rejected = StoreOptions { migrate: false, ..with(TWO) };
    assert!(faena_store::open(url, rejected).await.is_err(), "migrations are not allowed");
    assert!(faena_store::open(url, with(FAILING)).await.is_err(), "the migration fails");
    assert_eq!(
        (version(&database).await, rows(&database).await),
        (1, before.clone()),
        "a failed migration changes nothing"
    );

    let fixture = Fixture::open(url.to_owned(), database.clone(), with(TWO)).await;
    assert_eq!((version(&database).await, rows(&database).await), (2, before));
    assert_eq!(database.number("SELECT count(*) FROM job_log WHERE colour <> 'blue'").await, 0);
    use JobState::*;
    let states = fixture.states([completed, cancelled, assigned, delayed, queued]).await;
    assert_eq!(states, [Completed, Cancelled, Assigned, Pending, Queued]);
    assert_eq!(fixture.claim(9, 20).await.len(), 1);
    fixture.store.close().await;

    assert!(faena_store::open(url, StoreOptions::default()).await.is_err(), "the schema is newer than this version");
    let again = StoreOptions { migrate: false, ..with(TWO) };
    faena_store::open(url, again).await.unwrap().close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_with_an_older_schema_is_migrated() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("faena.db");
    assert_migrates_without_losing_rows(&format!("sqlite:{}", path.display()), RawDatabase::Sqlite(path)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_postgres_database_with_an_older_schema_is_migrated() {
    on_empty_postgres(async |url: &str, database: &RawDatabase| {
        assert_migrates_without_losing_rows(url, database.clone()).await;
    })
    .await;
}
