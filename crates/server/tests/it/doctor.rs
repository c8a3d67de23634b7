//! `faena doctor` with a running server, without a server, and on files that are not databases.

use std::path::Path;

use serde_json::{Value, json};

use crate::{
    faena::{Faena, run},
    postgres::{Database, connect},
    shell::output_parts,
};

/// Runs `faena doctor`. Returns the exit code, stdout and stderr.
fn doctor(folder: &Path, environment: &[(&str, &str)], flags: &[&str]) -> (i32, String, String) {
    output_parts(&run(folder, environment, &[&["doctor"], flags].concat()))
}

/// Returns the codes of all findings, except for the disk space of the machine that runs the tests.
fn codes(json: &str) -> Vec<String> {
    let report: Value = serde_json::from_str(json).unwrap_or_else(|error| panic!("{error}: {json}"));
    let code = |finding: &Value| finding["code"].as_str().unwrap().to_owned();
    report["findings"].as_array().unwrap().iter().map(code).filter(|code| code != "disk-space").collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sqlite_file_is_checked_while_its_server_runs_and_repaired_after_it_ends() {
    let folder = tempfile::tempdir().unwrap();
    let mut faena = Faena::start(folder.path(), &[]).await;
    let url = faena.url.clone();
    let (host, port) = url.trim_start_matches("http://").rsplit_once(':').unwrap();
    let server = [("HOST", host), ("PORT", port)];
    for _ in 0..20 {
        faena.submit(json!({"name": "noop", "type": "noop"})).await;
    }
    let running = faena.submit(json!({"name": "sleep", "type": "sleep", "payload": {"ms": 600_000}})).await;
    faena.wait_for_state(&running, "PROCESSING").await;
    let (code, stdout, stderr) = doctor(folder.path(), &server, &["--json"]);
    assert_eq!((code, stderr.as_str(), codes(&stdout).len()), (0, "", 0), "{stdout}");
    let report: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((&report["engine"], &report["jobs"], &report["errors"]), (&json!("sqlite"), &json!(21), &json!(0)));

    let file = folder.path().join("faena-data/faena.db");
    let database = rusqlite::Connection::open(&file).unwrap();
    database.busy_timeout(std::time::Duration::from_secs(5)).unwrap();
    database.execute("UPDATE counter SET n = n + 2 WHERE tally = 4", []).unwrap();
    let (code, stdout, _) = doctor(folder.path(), &server, &[]);
    assert_eq!(code, 1, "{stdout}");
    assert!(stdout.starts_with("error    counter-drift  1 counter differs"), "{stdout}");
    assert!(stdout.contains("default/noop completed: counter 22, rows 20 → run \"faena doctor --fix\""), "{stdout}");
    assert!(stdout.contains("1 error") && stdout.contains(": 21 jobs checked in "), "{stdout}");
    assert!(stdout.trim_end().ends_with(&format!(", in use by process {}", faena.process_id())), "{stdout}");
    let (code, stdout, stderr) = doctor(folder.path(), &server, &["--fix"]);
    assert_eq!((code, stdout.as_str()), (2, ""));
    assert!(stderr.contains("in use by another faena; stop that one"), "{stderr}");

    faena.kill();
    let (code, stdout, _) = doctor(folder.path(), &server, &["--json"]);
    assert_eq!((code, codes(&stdout)), (1, vec!["counter-drift".to_owned(), "node-dead".to_owned()]), "{stdout}");
    let (code, stdout, _) = doctor(folder.path(), &server, &["--fix"]);
    assert_eq!(code, 0, "{stdout}");
    assert!(stdout.contains("fixed    counter-drift  1 counter recounted"), "{stdout}");
    assert!(stdout.contains("fixed    node-dead  1 job released"), "{stdout}");
    let (code, stdout, _) = doctor(folder.path(), &server, &["--json"]);
    assert_eq!((code, codes(&stdout).len()), (0, 0), "{stdout}");

    // The next server runs the job that doctor released.
    let faena = Faena::start(folder.path(), &[]).await;
    assert_eq!(faena.count("").await, 21);
    faena.wait_for_state(&running, "PROCESSING").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_or_foreign_database_is_reported_and_not_changed() {
    let folder = tempfile::tempdir().unwrap();
    let (code, stdout, stderr) = doctor(folder.path(), &[], &[]);
    assert_eq!((code, stdout.as_str()), (2, ""));
    assert!(stderr.contains("there is no Faena database in faena-data/faena.db"), "{stderr}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "a file was created");

    let notes = folder.path().join("notes.txt");
    std::fs::write(&notes, "not a database, but as long as one ".repeat(40)).unwrap();
    let (code, _, stderr) = doctor(folder.path(), &[], &["--database-url", "sqlite:notes.txt"]);
    assert_eq!(code, 2);
    assert!(stderr.contains("not a SQLite database"), "{stderr}");
    let (code, _, stderr) = doctor(folder.path(), &[], &["--database-url", "postgres://user@127.0.0.1:1/missing"]);
    assert_eq!(code, 2);
    assert!(stderr.contains("cannot use the PostgreSQL database"), "{stderr}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_postgres_database_is_checked_and_repaired_while_its_servers_run() {
    let folder = tempfile::tempdir().unwrap();
    let database = Database::create().await;
    let environment = [("DATABASE_URL", database.url.as_str())];
    let (code, _, stderr) = doctor(folder.path(), &environment, &[]);
    assert_eq!(code, 2, "an empty database: {stderr}");
    let faena = Faena::start(folder.path(), &environment).await;
    for _ in 0..20 {
        let id = faena.submit(json!({"name": "noop", "type": "noop"})).await;
        faena.wait_for_state(&id, "COMPLETED").await;
    }
    let (code, stdout, _) = doctor(folder.path(), &environment, &["--json"]);
    assert_eq!((code, codes(&stdout).len()), (0, 0), "{stdout}");
    let client = connect(&database.url).await;
    client.batch_execute("UPDATE faena.counter SET n = n + 2 WHERE tally = 4").await.unwrap();
    let (code, stdout, _) = doctor(folder.path(), &environment, &["--fix", "--json"]);
    assert_eq!((code, codes(&stdout).len()), (0, 0), "{stdout}");
    let report: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(report["fixed"][0]["code"], "counter-drift", "{stdout}");
    assert_eq!(faena.count("status=COMPLETED").await, 20);
}
