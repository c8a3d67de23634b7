//! The embedded file: which process may open it, what happens when it cannot be written, and that callers share commits.

use std::path::Path;

use faena_domain::{JobState, NewJob, Scope, Timestamp};
use faena_store::{StoreError, StoreOptions, plan_probe};
use futures_util::future::join_all;

use crate::support::*;

async fn setup_error(url: &str, options: StoreOptions) -> String {
    match faena_store::open(url, options).await.err() {
        Some(StoreError::Setup(text)) => text,
        other => panic!("a set-up error was expected, not {other:?}"),
    }
}

fn url(path: &Path) -> String {
    format!("sqlite:{}", path.display())
}

#[tokio::test]
async fn a_file_in_use_is_rejected() {
    on_sqlite(async |fixture: &Fixture| {
        let text = setup_error(&fixture.url, StoreOptions::default()).await;
        assert!(text.contains("in use by another faena"), "{text}");
        fixture.submit(fixture.job("a", 0)).await;
    })
    .await;
}

#[tokio::test]
async fn a_closed_file_can_be_opened_again_and_is_complete() {
    on_sqlite(async |fixture: &Fixture| {
        let done = fixture.submit_and_claim(fixture.job("a", 0)).await;
        fixture.complete(&done, 1).await;
        let lost = fixture.submit_and_claim(fixture.job("b", 2)).await;
        let started = fixture.submit_and_claim(fixture.job("c", 3)).await;
        fixture.report_start(&started, 4).await;

        let next = fixture.reopen(StoreOptions::default()).await;

        assert!(
            !next.store.node_renew(fixture.node, LEASE_MS, next.at(5)).await.unwrap(),
            "the old node no longer exists"
        );
        assert!(next.store.node_renew(next.node, LEASE_MS, next.at(5)).await.unwrap());
        let released = next.recover(100, 5).await;
        assert_eq!((released.orphaned, released.returned), (1, 1));
        assert_eq!(
            next.states([done.id, lost.id, started.id]).await,
            [JobState::Completed, JobState::Queued, JobState::Retrying]
        );
        assert!(next.claim_one(6).await.must_record_start);
        assert!(!next.end(&started, completed(), 7).await);
        next.store.close().await;
        assert!(matches!(next.try_submit(vec![next.job("a", 8)], 8).await, Err(StoreError::Unavailable(_))));
    })
    .await;
}

#[tokio::test]
async fn a_file_that_is_not_a_database_is_rejected_and_left_unchanged() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notes.txt");
    let content = "not a database, but long enough to be read as one ".repeat(40);
    std::fs::write(&path, &content).unwrap();
    let text = setup_error(&url(&path), StoreOptions::default()).await;
    assert!(text.contains("not a SQLite database"), "{text}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), content);
}

#[tokio::test]
async fn a_database_of_another_application_is_rejected_and_left_unchanged() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("other.db");
    rusqlite::Connection::open(&path).unwrap().execute_batch("CREATE TABLE theirs (x)").unwrap();
    let text = setup_error(&url(&path), StoreOptions::default()).await;
    assert!(text.contains("another application"), "{text}");
    let tables: i64 = rusqlite::Connection::open(&path)
        .unwrap()
        .query_row("SELECT count(*) FROM sqlite_master", [], |row| row.get(0))
        .unwrap();
    assert_eq!(tables, 1);
}

#[tokio::test]
async fn a_folder_that_cannot_be_created_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a-file");
    std::fs::write(&file, "").unwrap();
    let text = setup_error(&url(&file.join("below").join("faena.db")), StoreOptions::default()).await;
    assert!(text.contains("cannot create the folder") && text.contains("DATABASE_URL"), "{text}");
    let text = setup_error(&url(folder.path()), StoreOptions::default()).await;
    assert!(text.contains("cannot open"), "a folder is not a file: {text}");
    for bad in ["sqlite:", "mysql://x", ""] {
        assert!(setup_error(bad, StoreOptions::default()).await.contains("database URL"), "{bad}");
    }
}

#[tokio::test]
async fn a_newer_or_older_schema_is_rejected_and_left_unchanged() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("faena.db");
    let no_migrate = || StoreOptions { migrate: false, ..StoreOptions::default() };
    assert!(setup_error(&url(&path), no_migrate()).await.contains("faena migrate"));
    faena_store::open(&url(&path), StoreOptions::default()).await.unwrap().close().await;
    faena_store::open(&url(&path), no_migrate()).await.unwrap().close().await;
    let database = RawDatabase::Sqlite(path.clone());
    database.run("INSERT INTO faena_schema VALUES (999, 'future', 0)").await;
    let text = setup_error(&url(&path), StoreOptions::default()).await;
    assert!(text.contains("999") && text.contains("newer version"), "{text}");
    assert_eq!(database.number("SELECT max(version) FROM faena_schema").await, 999);
}

/// Counts the commits in the write-ahead log: each of them appends a frame that ends a transaction.
fn commits(path: &Path) -> usize {
    let log = std::fs::read(format!("{}-wal", path.display())).unwrap();
    let page = usize::try_from(u32::from_be_bytes(log[8..12].try_into().unwrap())).unwrap();
    log[32..].chunks_exact(24 + page).filter(|frame| frame[4..8] != [0; 4]).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_submits_share_commits() {
    on_sqlite(async |fixture: &Fixture| {
        let RawDatabase::Sqlite(path) = &fixture.database else { unreachable!() };
        let before = commits(path);
        let calls = (0..200).map(|_| fixture.try_submit(vec![fixture.job("a", 0)], 0));
        assert!(join_all(calls).await.into_iter().all(|answer| answer.is_ok()));
        let took = commits(path) - before;
        assert!(took < 100, "200 calls took {took} commits");
    })
    .await;
}

/// A small file system that is unmounted when the value is dropped. Needs root, which the test machines have.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn new(size: &str) -> SmallDisk {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_str().unwrap();
        let mounted = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs", path])
            .status()
            .unwrap();
        assert!(mounted.success(), "this test mounts a small disk, for which it must be root");
        SmallDisk(folder)
    }

    fn grow(&self, size: &str) {
        let path = self.0.path().to_str().unwrap();
        let grown =
            std::process::Command::new("mount").args(["-o", &format!("remount,size={size}"), path]).status().unwrap();
        assert!(grown.success());
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").args(["-l"]).arg(self.0.path()).status();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_loses_nothing_that_was_acknowledged() {
    let disk = SmallDisk::new("3m");
    let path = disk.0.path().join("faena.db");
    let fixture = Fixture::open(url(&path), RawDatabase::Sqlite(path.clone()), StoreOptions::default()).await;
    let large = |n: i64| NewJob { payload: format!("{{\"x\":\"{}\"}}", "y".repeat(20_000)), ..fixture.job("a", n) };
    let mut stored = Vec::new();
    let mut rejected = 0;
    for round in 0..40 {
        let calls = (0..8).map(|_| fixture.try_submit(vec![large(round)], round));
        for answer in join_all(calls).await {
            match answer {
                Ok(answer) => stored.push(answer[0].id),
                Err(StoreError::Unavailable(_)) => rejected += 1,
                Err(other) => panic!("{other:?}"),
            }
        }
    }
    assert!(!stored.is_empty() && rejected > 0, "{} stored, {rejected} rejected", stored.len());

    disk.grow("64m");
    stored.push(fixture.submit(large(50)).await);
    let mut claimed: Vec<_> = fixture.claim(1_000, 51).await.into_iter().map(|job| job.id).collect();
    claimed.sort_unstable();
    stored.sort_unstable();
    assert_eq!(claimed, stored, "all acknowledged jobs, and no others");
    fixture.database.assert_consistent().await;
    let next = fixture.reopen(StoreOptions::default()).await;
    assert_eq!(next.recover(0, 60).await.returned, stored.len());
    assert!(next.start <= Timestamp::now());
    next.store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_thousand_limited_jobs_in_front_are_not_read() {
    on_sqlite(async |fixture: &Fixture| {
        fixture.limit(Scope::Key("*".into()), Some(1), 0).await;
        for part in 0..10_i64 {
            let one = (0..1_000).map(|_| fixture.job("a", part).concurrency_key("busy"));
            let many =
                (0..1_000).map(|n| fixture.job("a", part).concurrency_key(&format!("k{}", (part * 1_000 + n) / 2)));
            fixture.submit_all(one.chain(many).collect()).await;
        }
        let first = fixture.claim(10_000, 20).await.len();
        assert_eq!(first + fixture.claim(10_000, 20).await.len(), 5_001, "one of each, in bounded claims");
        assert!(fixture.claim(10, 30).await.is_empty());
        assert_eq!(
            fixture.database.number("SELECT count(*) FROM key_queue WHERE open = 1").await,
            0,
            "the next claim reads no key queue"
        );
        let last = fixture.submit(fixture.job("a", 40).concurrency_key("last")).await;
        assert_eq!(fixture.database.number("SELECT count(*) FROM key_queue WHERE open = 1").await, 1, "and then one");
        let statement = plan_probe::OPEN_KEY_QUEUES.replace("lane = ?", "lane = 1").replace("LIMIT ?", "LIMIT 16");
        let plan = fixture.database.rows(&format!("EXPLAIN QUERY PLAN {statement}")).await;
        assert_eq!(plan.len(), 1, "no sort: {plan:?}");
        assert!(plan[0][3].contains("USING INDEX key_queue_open (lane=?)"), "{plan:?}");
        assert_eq!(fixture.claim_one(50).await.id, last);
    })
    .await;
}

#[tokio::test]
async fn only_the_owner_can_read_the_files() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    let store = faena_store::open(&url(&data.join("faena.db")), StoreOptions::default()).await.unwrap();
    store.job_submit(vec![NewJob::new("a")], None, Timestamp::now()).await.unwrap();
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&data), 0o700);
    let files: Vec<_> = std::fs::read_dir(&data).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(files.len() >= 3, "the database, its log and its lock: {files:?}");
    for file in files {
        assert_eq!(mode(&file), 0o600, "{}", file.display());
    }
    store.close().await;
}
