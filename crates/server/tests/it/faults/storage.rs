//! The disk of an SQLite database fails: the server says so, stops accepting jobs and ends, and the next start checks the database.
//!
//! `strace` makes system calls of the running server fail.

use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead, BufReader, Seek, SeekFrom, Write},
    process::{Child, Command, Stdio},
};

use reqwest::StatusCode;
use serde_json::{Value, json};

use crate::{faena::Faena, load::assert_all_completed_once};

/// Exit code of a server whose disk failed.
const STORAGE_FAILED: i32 = 74;

/// Makes these system calls of a running server fail with EIO, until the value is dropped.
struct Injection(Child);

impl Injection {
    fn start(faena: &Faena, calls: &str, when: &str) -> Injection {
        let mut child = Command::new("strace")
            .args(["--follow-forks", "--output", "/dev/null", "-e", &format!("trace={calls}")])
            .args(["-e", &format!("inject={calls}:error=EIO{when}"), "-p", &faena.process_id().to_string()])
            .stderr(Stdio::piped())
            .spawn()
            .expect("missing: strace; run this test with ./test, which installs it");
        let mut printed = String::new();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        while !printed.contains("attached") {
            match lines.next() {
                Some(line) => printed.push_str(&line.unwrap()),
                None => panic!("strace cannot trace another process here; this test needs that: {printed}"),
            }
        }
        // Reads the rest and drops it, so that strace does not block on a full pipe.
        std::thread::spawn(move || lines.for_each(drop));
        Injection(child)
    }
}

impl Drop for Injection {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Submits batches until one fails. Returns the acknowledged ids, and the answer to the failed one if there was an answer.
async fn submit_until_failure(faena: &Faena) -> (BTreeSet<String>, Option<(StatusCode, Value)>) {
    let mut accepted = BTreeSet::new();
    let payload = "z".repeat(20_000);
    for _ in 0..500 {
        let jobs = vec![json!({"name": "noop", "payload": {"text": payload}}); 20];
        let request = faena.http.post(format!("{}/api/v1/jobs/batch", faena.url)).json(&json!({ "jobs": jobs }));
        let Ok(answer) = request.send().await else { return (accepted, None) };
        let status = answer.status();
        let Ok(answer) = answer.json::<Value>().await else { return (accepted, None) };
        if status != StatusCode::CREATED {
            return (accepted, Some((status, answer)));
        }
        accepted.extend(answer["ids"].as_array().unwrap().iter().map(|id| id.as_str().unwrap().to_owned()));
    }
    panic!("10 000 jobs were accepted although the disk fails");
}

/// Makes system calls fail while jobs are submitted. Checks how the server ends, and its next start.
async fn assert_ends_and_starts_again(calls: &str, when: &str) -> Option<(StatusCode, Value)> {
    let folder = tempfile::tempdir().unwrap();
    let mut faena = Faena::start(folder.path(), &[]).await;
    let mut acknowledged = BTreeSet::from([faena.submit(json!({"name": "noop"})).await]);
    let injection = Injection::start(&faena, calls, when);
    let (accepted, rejection) = submit_until_failure(&faena).await;
    acknowledged.extend(accepted);
    let status = faena.wait_for_exit().await;
    drop(injection);
    let log = faena.log();
    assert_eq!(status.code(), Some(STORAGE_FAILED), "{log}");
    assert!(log.contains("ERROR disk failed, no more writes are accepted"), "{log}");
    assert!(log.contains("the next start checks the database"), "{log}");
    let marker = folder.path().join("faena-data/faena.db.failed");
    assert!(marker.exists(), "{log}");

    let faena = Faena::start(folder.path(), &[]).await;
    assert!(faena.log().contains("database checked after the disk failed, it is intact"), "{}", faena.log());
    assert!(!marker.exists());
    assert_all_completed_once(&faena, &acknowledged).await;
    rejection
}

#[tokio::test(flavor = "multi_thread")]
async fn when_a_sync_fails_the_server_ends_and_the_next_start_checks_the_database() {
    if let Some((status, answer)) = assert_ends_and_starts_again("fsync,fdatasync", "").await {
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{answer}");
        let expected = "the disk of the database has failed; the server is shutting down";
        assert_eq!(answer["error"]["message"], expected, "{answer}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn when_one_later_sync_fails_the_server_ends_although_the_next_would_succeed() {
    assert_ends_and_starts_again("fsync,fdatasync", ":when=25").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn when_a_write_fails_the_server_ends_and_the_next_start_checks_the_database() {
    assert_ends_and_starts_again("pwrite64", ":when=7").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn when_a_checkpoint_fails_the_server_ends_and_the_next_start_checks_the_database() {
    assert_ends_and_starts_again("ftruncate", "").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_is_damaged_after_the_disk_failed_is_not_used() {
    let folder = tempfile::tempdir().unwrap();
    let mut faena = Faena::start(folder.path(), &[]).await;
    faena.submit(json!({"name": "unhandled.type", "payload": {"text": "x".repeat(200_000)}})).await;
    faena.signal("TERM");
    faena.wait_for_exit().await;
    let database = folder.path().join("faena-data/faena.db");
    fs::write(folder.path().join("faena-data/faena.db.failed"), "disk I/O error\n").unwrap();
    // The last pages contain the payload. A start that does not check the database would not read them.
    let mut file = fs::File::options().write(true).open(&database).unwrap();
    let length = file.metadata().unwrap().len();
    file.seek(SeekFrom::Start(length - 20 * 4_096)).unwrap();
    file.write_all(&vec![0xff; 18 * 4_096]).unwrap();
    drop(file);
    for _ in 0..2 {
        let mut faena = Faena::spawn(folder.path(), &[]);
        let status = faena.wait_for_exit().await;
        assert_eq!(status.code(), Some(2), "{}", faena.log());
        assert!(faena.log().contains("is damaged after the disk failed (disk I/O error)"), "{}", faena.log());
    }
}
