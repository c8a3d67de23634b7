//! A move from SQLite to PostgreSQL: every row of every table, once, also if it is interrupted.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use faena_domain::{JobState, Timestamp};
use faena_store::{
    EventQuery, StoreError, StoreOptions, SubscriptionMode,
    doctor::inspect,
    transfer::{self, Moved, Phase, Resume, Step},
};
use tokio::sync::Notify;

use crate::{
    events::subscription,
    support::{Fixture, JobBuilder, RawDatabase, on_empty_postgres},
};

/// Tables that are not moved: the versions of each schema, run numbers (a sequence on PostgreSQL), a lease that only
/// PostgreSQL has, and the record of the move itself.
const NOT_MOVED: [&str; 4] = ["faena_schema", "run_sequence", "metrics_lease", "move"];
/// Columns that only PostgreSQL has, with their values after a move.
const POSTGRES_ONLY: [(&str, &str, &str); 3] =
    [("lane", "retired", "false"), ("lane", "fence", ""), ("counter", "shard", "0")];
/// A column that both databases compute.
const GENERATED: (&str, &str) = ("job_log", "bytes");
const DAY_MS: i64 = 86_400_000;

struct Source {
    _folder: tempfile::TempDir,
    path: PathBuf,
    url: String,
    database: RawDatabase,
}

impl Source {
    fn new() -> Source {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("faena.db");
        let url = format!("sqlite:{}", path.display());
        Source { _folder: folder, database: RawDatabase::Sqlite(path.clone()), path, url }
    }

    async fn open(&self) -> Fixture {
        Fixture::open(self.url.clone(), self.database.clone(), StoreOptions::default()).await
    }

    /// Creates jobs in several states, and stops the server that did so.
    async fn fill(&self, jobs: i64) {
        let fixture = self.open().await;
        fixture.submit_all((0..jobs).map(|_| fixture.job("many", 0)).collect()).await;
        fixture.submit(fixture.job("a", 1)).await;
        let done = fixture.claim_one(2).await;
        fixture.complete(&done, 3).await;
        fixture.submit(fixture.job("a", 8).scheduled(fixture.at(3_600_000))).await;
        fixture.submit(fixture.job("a", 9).concurrency_key("customer")).await;
        fixture.store.node_leave(fixture.node, crate::support::GRACE_PERIODS, fixture.at(10)).await.unwrap();
        fixture.store.close().await;
    }
}

async fn move_to(source: &Source, url: &str, resume: Resume) -> Result<Moved, StoreError> {
    transfer::run(&source.url, url, resume, Timestamp::now(), &|_| {}).await
}

/// Runs a move until `is_reached` returns true for a step, and drops it there.
async fn interrupt_at(source: &Source, url: &str, is_reached: impl Fn(&Step<'_>) -> bool + Send + Sync) {
    let reached = Arc::new(Notify::new());
    let notify = reached.clone();
    let progress = move |step: Step<'_>| {
        if is_reached(&step) {
            notify.notify_one();
        }
    };
    tokio::select! {
        biased;
        () = reached.notified() => {}
        moved = transfer::run(&source.url, url, Resume::Continue, Timestamp::now(), &progress) => {
            panic!("the move ended before it was interrupted: {moved:?}")
        }
    }
}

async fn columns_of_postgres(database: &RawDatabase) -> BTreeMap<String, Vec<(String, String)>> {
    let sql = "SELECT table_name, column_name, udt_name FROM information_schema.columns
               WHERE table_schema = 'faena' AND table_name NOT LIKE 'done\\_%' ORDER BY 1, ordinal_position";
    let mut tables: BTreeMap<String, Vec<(String, String)>> = BTreeMap::new();
    for row in database.rows(sql).await {
        tables.entry(row[0].clone()).or_default().push((row[1].clone(), row[2].clone()));
    }
    tables.retain(|name, _| !NOT_MOVED.contains(&name.as_str()));
    tables
}

async fn columns_of_sqlite(database: &RawDatabase) -> BTreeMap<String, Vec<String>> {
    let sql = "SELECT t.name, c.name FROM sqlite_master t JOIN pragma_table_xinfo(t.name) c
               WHERE t.type = 'table' AND t.name <> 'sqlite_sequence' ORDER BY t.name, c.cid";
    let mut tables: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for row in database.rows(sql).await {
        tables.entry(row[0].clone()).or_default().push(row[1].clone());
    }
    tables.retain(|name, _| !NOT_MOVED.contains(&name.as_str()));
    tables
}

/// Returns a value for a column, different in each row.
fn literal(kind: &str, row: i64, column: usize) -> String {
    match kind {
        "bool" => (row % 2).to_string(),
        "int2" => (row * 100 + i64::try_from(column).unwrap()).to_string(),
        "int4" => (row * 100_000).to_string(),
        "int8" | "timestamptz" => (1_700_000_000_000 + row * DAY_MS + i64::try_from(column).unwrap()).to_string(),
        "float8" => format!("{row}.125"),
        "uuid" => "randomblob(16)".to_owned(),
        "bytea" => "randomblob(33)".to_owned(),
        "_uuid" => format!("randomblob({})", 16 * row),
        "_int2" => "x'0100ff7f'".to_owned(),
        "text" => format!("'job.*_[[]é\\t\\N''\"{column} ' || char(9, 10, 13) || '{row}'"),
        other => panic!("a column has the type {other}, which no test knows"),
    }
}

/// Inserts three rows into every table, with a value in every column. The third row has NULL in every column that
/// allows it.
async fn fill_every_column(source: &Source, types: &BTreeMap<String, Vec<(String, String)>>) {
    let sql = "SELECT t.name || '.' || c.name FROM sqlite_master t JOIN pragma_table_info(t.name) c
               WHERE c.\"notnull\" = 0 AND c.pk = 0";
    let optional: Vec<String> = source.database.rows(sql).await.into_iter().map(|row| row[0].clone()).collect();
    for (table, columns) in columns_of_sqlite(&source.database).await {
        let columns: Vec<String> =
            columns.into_iter().filter(|column| (table.as_str(), column.as_str()) != GENERATED).collect();
        for row in 1..=3 {
            let value = |(at, column): (usize, &String)| {
                if row == 3 && optional.contains(&format!("{table}.{column}")) {
                    return "NULL".to_owned();
                }
                let kind = types[&table].iter().find(|(name, _)| name == column).map(|(_, kind)| kind.as_str());
                literal(kind.unwrap_or_else(|| panic!("PostgreSQL has no {table}.{column}")), row, at)
            };
            let values: Vec<String> = columns.iter().enumerate().map(value).collect();
            let names: Vec<String> = columns.iter().map(|name| format!("\"{name}\"")).collect();
            let sql = format!("INSERT INTO {table} ({}) VALUES ({})", names.join(", "), values.join(", "));
            source.database.run(&sql).await;
        }
    }
}

/// Returns the rows of a table as texts that are the same for both databases.
async fn texts(database: &RawDatabase, table: &str, columns: &[(String, String)]) -> Vec<Vec<String>> {
    let is_sqlite = matches!(database, RawDatabase::Sqlite(_));
    let expression = |(name, kind): &(String, String)| {
        let text = match (kind.as_str(), is_sqlite) {
            ("uuid" | "bytea" | "_uuid" | "_int2", true) => format!("lower(hex(\"{name}\"))"),
            (_, true) => format!("CAST(\"{name}\" AS TEXT)"),
            ("bool", false) => format!("\"{name}\"::int::text"),
            ("uuid", false) => format!("replace(\"{name}\"::text, '-', '')"),
            ("bytea", false) => format!("encode(\"{name}\", 'hex')"),
            ("_uuid", false) => format!("replace(array_to_string(\"{name}\", ''), '-', '')"),
            ("_int2", false) => format!(
                "(SELECT string_agg(lpad(to_hex(x & 255), 2, '0') || lpad(to_hex(x >> 8), 2, '0'), '')
                  FROM unnest(\"{name}\"::int[]) x)"
            ),
            ("timestamptz", false) => format!("(extract(epoch FROM \"{name}\") * 1000)::int8::text"),
            (_, false) => format!("\"{name}\"::text"),
        };
        // SQLite returns the hex of NULL as an empty text.
        format!("CASE WHEN \"{name}\" IS NULL THEN 'absent' ELSE {text} END")
    };
    let expressions: Vec<String> = columns.iter().map(expression).collect();
    let mut rows = database.rows(&format!("SELECT {} FROM {table}", expressions.join(", "))).await;
    rows.sort();
    rows
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_column_of_every_table_is_moved_on_postgres() {
    on_empty_postgres(async |url: &str, target: &RawDatabase| {
        let source = Source::new();
        source.open().await.store.close().await;
        source.database.run("DELETE FROM node; UPDATE run_sequence SET last = 76").await;
        faena_store::open(url, StoreOptions::default()).await.unwrap().close().await;
        let types = columns_of_postgres(target).await;
        fill_every_column(&source, &types).await;
        let last: i64 = source.database.number("SELECT max(position) FROM event").await;
        source.database.run(&format!("UPDATE sqlite_sequence SET seq = {} WHERE name = 'event'", last + 5)).await;

        let moved = move_to(&source, url, Resume::Continue).await.unwrap();
        let tables = columns_of_sqlite(&source.database).await;
        let names: Vec<&String> = moved.tables.iter().map(|table| &table.name).collect();
        assert_eq!(names, tables.keys().collect::<Vec<_>>());
        assert_eq!(types.keys().collect::<Vec<_>>(), names, "PostgreSQL has the same tables");
        for (table, columns) in &types {
            let only = |name: &str| POSTGRES_ONLY.iter().find(|known| (known.0, known.1) == (table, name));
            for (name, _) in columns {
                if let Some((_, _, value)) = only(name) {
                    let sql = format!("SELECT count(*) FROM {table} WHERE coalesce(\"{name}\"::text, '') <> '{value}'");
                    assert_eq!(target.number(&sql).await, 0, "{table}.{name}");
                }
            }
            let shared: Vec<(String, String)> =
                columns.iter().filter(|(name, _)| only(name).is_none()).cloned().collect();
            let of_sqlite: Vec<&String> = shared.iter().map(|(name, _)| name).collect();
            assert_eq!(tables[table].iter().collect::<Vec<_>>(), of_sqlite, "columns of {table}");
            let mut expected = texts(&source.database, table, &shared).await;
            if table == "subscription_pattern" {
                for row in &mut expected {
                    row[1] = row[1].replace('\\', "\\\\").replace('_', "\\_").replace('*', "%").replace("[[]", "[");
                }
                expected.sort();
            }
            assert_eq!(expected.len(), 3, "{table}");
            assert_eq!(texts(target, table, &shared).await, expected, "{table}");
        }
        let partitions = target.rows("SELECT DISTINCT tableoid::regclass::text FROM done ORDER BY 1").await.concat();
        assert_eq!(partitions, ["done_20231115", "done_20231116", "done_20231117"], "one partition per day");
        for (sequence, expected) in
            [("run", 77), ("event_position_seq", last + 6), ("lane_id_seq", 300_001), ("subscription_id_seq", 301)]
        {
            assert_eq!(target.number(&format!("SELECT nextval('{sequence}')")).await, expected, "{sequence}");
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_table_or_column_that_only_one_database_has_stops_the_move_on_postgres() {
    on_empty_postgres(async |url: &str, target: &RawDatabase| {
        let source = Source::new();
        source.fill(1).await;
        source
            .database
            .run("ALTER TABLE job ADD COLUMN extra TEXT; CREATE TABLE further (id INTEGER PRIMARY KEY)")
            .await;
        let error = move_to(&source, url, Resume::Continue).await.unwrap_err().to_string();
        assert!(error.contains("column job.extra is missing on PostgreSQL"), "{error}");
        assert!(error.contains("table further is missing on PostgreSQL"), "{error}");
        assert_eq!(target.number("SELECT count(*) FROM pg_namespace WHERE nspname = 'faena'").await, 0);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_interrupted_move_continues_and_no_server_starts_before_its_end_on_postgres() {
    on_empty_postgres(async |url: &str, target: &RawDatabase| {
        let source = Source::new();
        source.fill(12_000).await;
        let file_before = std::fs::read(&source.path).unwrap();
        let survey = transfer::survey(&source.url, url, Resume::Continue).await.unwrap();
        let jobs = survey.tables.iter().find(|table| table.name == "job").unwrap();
        assert_eq!((jobs.rows, survey.copied, survey.moved_at, &survey.in_use_by), (12_003, 0, None, &None));
        assert_eq!(target.number("SELECT count(*) FROM pg_namespace WHERE nspname = 'faena'").await, 0, "a dry run");

        let mut copied = 0;
        for rows in [0, 5_000, 10_000, 15_000, 20_000] {
            interrupt_at(&source, url, |step| step.phase == Phase::Copy && step.done >= rows).await;
            let survey = transfer::survey(&source.url, url, Resume::Continue).await.unwrap();
            assert!(survey.copied >= copied && survey.copied >= rows, "{rows}: {}", survey.copied);
            copied = survey.copied;
            let error = faena_store::open(url, StoreOptions::default()).await.err().unwrap().to_string();
            assert!(error.contains("is not complete; run the same \"faena move\" again"), "{error}");
            let error = inspect(url, Timestamp::now(), &|_, _, _| {}).await.err().unwrap().to_string();
            assert!(error.contains("is not complete"), "{error}");
        }
        let moved = move_to(&source, url, Resume::Continue).await.unwrap();
        assert_eq!((moved.resumed, moved.rows()), (copied, survey.rows()));
        assert!(file_before == std::fs::read(&source.path).unwrap(), "the source has changed");

        let inspection = inspect(url, Timestamp::now(), &|_, _, _| {}).await.unwrap();
        assert_eq!((inspection.jobs, inspection.findings), (12_003, Vec::new()));
        let again = move_to(&source, url, Resume::Continue).await.unwrap();
        assert!(again.moved_at.is_some() && again.tables.is_empty(), "{again:?}");

        let fixture = Fixture::open(url.to_owned(), target.clone(), StoreOptions::default()).await;
        let job = fixture.claim_one(20).await;
        fixture.complete(&job, 21).await;
        assert_eq!(fixture.get(job.id).await.status, JobState::Completed);
        target.assert_consistent().await;
        fixture.store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_difference_is_noticed_and_the_copy_can_be_discarded_on_postgres() {
    on_empty_postgres(async |url: &str, target: &RawDatabase| {
        let source = Source::new();
        source.fill(10).await;
        interrupt_at(&source, url, |step| step.phase == Phase::Verify).await;
        target.run("UPDATE job SET payload = '{\"changed\":1}' WHERE id = (SELECT id FROM job LIMIT 1)").await;
        let error = move_to(&source, url, Resume::Continue).await.unwrap_err().to_string();
        assert!(
            error.starts_with("table job is not the same in both databases: some of its 13 rows differ"),
            "{error}"
        );
        target.run("DELETE FROM ready").await;
        let moved = move_to(&source, url, Resume::Discard).await;
        assert!(moved.is_ok(), "the copied rows are discarded: {moved:?}");
        assert_eq!(target.number("SELECT count(*) FROM job WHERE payload LIKE '%changed%'").await, 0);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_that_has_changed_is_moved_only_from_the_beginning_on_postgres() {
    on_empty_postgres(async |url: &str, _: &RawDatabase| {
        let (source, other) = (Source::new(), Source::new());
        source.fill(10).await;
        other.fill(10).await;
        interrupt_at(&source, url, |step| step.phase == Phase::Verify).await;
        let error = move_to(&other, url, Resume::Continue).await.unwrap_err().to_string();
        assert!(error.contains("contains a part of another source"), "{error}");
        source.fill(1).await;
        let error = move_to(&source, url, Resume::Continue).await.unwrap_err().to_string();
        assert!(error.contains("the source has changed since the move began; pass --restart"), "{error}");
        let moved = move_to(&source, url, Resume::Discard).await.unwrap();
        assert_eq!(moved.tables.iter().find(|table| table.name == "job").unwrap().rows, 17);
        let error = move_to(&other, url, Resume::Continue).await.unwrap_err().to_string();
        assert!(error.contains("the target is not empty"), "{error}");
        let error = move_to(&other, url, Resume::Discard).await.unwrap_err().to_string();
        assert!(error.contains("the target is not empty"), "a finished move is never discarded: {error}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn databases_in_use_or_of_other_applications_are_rejected_and_not_changed_on_postgres() {
    on_empty_postgres(async |url: &str, target: &RawDatabase| {
        let source = Source::new();
        let refused = async |source: &Source, url: &str| match move_to(source, url, Resume::Continue).await {
            Err(StoreError::Setup(text)) => text,
            other => panic!("{other:?}"),
        };
        assert!(refused(&source, url).await.contains("there is no Faena database in"));
        assert!(!Path::new(&format!("{}.lock", source.path.display())).exists(), "a file was created");
        let fixture = source.open().await;
        let text = refused(&source, url).await;
        assert!(text.contains(&format!("in use by process {}", std::process::id())), "{text}");
        let survey = transfer::survey(&source.url, url, Resume::Continue).await.unwrap();
        assert_eq!(survey.in_use_by, Some(format!("process {}", std::process::id())));
        fixture.store.close().await;

        target.run("CREATE SCHEMA faena; CREATE TABLE faena.theirs (id int)").await;
        assert!(refused(&source, url).await.contains("belongs to another application"));
        target.run("DROP SCHEMA faena CASCADE").await;
        let server = Fixture::open(url.to_owned(), target.clone(), StoreOptions::default()).await;
        assert!(refused(&source, url).await.contains("a database that the server \"test\" uses"));
        server.submit(server.job("a", 0)).await;
        server.store.node_leave(server.node, crate::support::GRACE_PERIODS, server.at(1)).await.unwrap();
        server.store.close().await;
        let text = refused(&source, url).await;
        assert!(text.contains("it contains rows in counter, job, lane, ready"), "{text}");
        assert_eq!(target.number("SELECT count(*) FROM pg_class WHERE relname = 'move_progress'").await, 0);
        assert!(refused(&source, "sqlite:other.db").await.contains("pass --to postgres://"));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_copy_creates_no_event_and_the_next_change_does_on_postgres() {
    on_empty_postgres(async |url: &str, target: &RawDatabase| {
        let source = Source::new();
        let fixture = source.open().await;
        let subscription = subscription(&["*"], SubscriptionMode::Keep);
        fixture.store.event_subscribe(vec![subscription], fixture.at(0)).await.unwrap();
        let id = fixture.submit(fixture.job("a", 0)).await;
        let before = fixture.store.event_list(EventQuery::After(0), 100).await.unwrap();
        assert_eq!(before.len(), 2, "created and queued");
        fixture.store.close().await;
        move_to(&source, url, Resume::Continue).await.unwrap();
        let fixture = Fixture::open(url.to_owned(), target.clone(), StoreOptions::default()).await;
        assert!(fixture.store.has_event_subscriptions());
        assert_eq!(fixture.store.event_list(EventQuery::After(0), 100).await.unwrap(), before);
        fixture.store.job_cancel(id, "not wanted", None, fixture.at(1)).await.unwrap();
        let after = fixture.store.event_list(EventQuery::Subject { id: id.0, after: 2 }, 100).await.unwrap();
        assert_eq!(after.iter().map(|event| event.sequence).collect::<Vec<_>>(), [3]);
        assert!(after[0].position > before[1].position, "{after:?}");
        fixture.store.close().await;
    })
    .await;
}
