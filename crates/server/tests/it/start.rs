//! A wrong configuration is reported in one line with exit code 2, and no file or database is changed.

use std::{net::TcpListener, path::Path, process::Output};

use crate::{
    faena::{Faena, command, run},
    ports::free_port,
    postgres::{Database, connect},
};

/// Checks for exit code 2 and a single line on stderr, and returns that line.
fn configuration_error(output: &Output) -> String {
    let stderr = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "more than one line: {stderr}");
    assert!(stderr.starts_with("faena: "), "{stderr}");
    assert!(output.stdout.is_empty());
    stderr.trim_end().to_owned()
}

/// Runs `faena serve` and returns its configuration error.
fn serve_error(folder: &Path, environment: &[(&str, &str)], arguments: &[&str]) -> String {
    let arguments = [&["serve", "--port", "0"], arguments].concat();
    configuration_error(&run(folder, environment, &arguments))
}

fn assert_is_empty(folder: &Path) {
    let left: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn an_invalid_database_url_is_named() {
    let folder = tempfile::tempdir().unwrap();
    for url in ["mysql://root@localhost/x", "faena.db", "postgres://user:hunter2@host:port/x", "sqlite:", " "] {
        let error = serve_error(folder.path(), &[("DATABASE_URL", url)], &[]);
        assert!(error.contains("database URL") || error.contains("database.url"), "{url}: {error}");
        assert!(!error.contains("hunter2"), "{error}");
    }
    assert_is_empty(folder.path());
}

#[test]
fn an_unreachable_postgres_is_reported_without_its_password() {
    let folder = tempfile::tempdir().unwrap();
    let free = format!("127.0.0.1:{}", free_port());
    let url = format!("postgres://user:hunter2@{free}/faena");
    let error = serve_error(folder.path(), &[("DATABASE_URL", &url)], &[]);
    assert!(error.contains("connection refused") && error.contains("check"), "{error}");
    assert!(!error.contains("hunter2"), "{error}");
}

#[test]
fn connecting_to_a_postgres_that_never_answers_times_out() {
    let folder = tempfile::tempdir().unwrap();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("postgres://user@{}/faena", silent.local_addr().unwrap());
    let error = serve_error(folder.path(), &[("DATABASE_URL", &url)], &[]);
    assert!(error.contains("PostgreSQL"), "{error}");
}

#[tokio::test]
async fn a_postgres_database_that_does_not_exist_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let database = Database::create().await;
    let error = serve_error(folder.path(), &[("DATABASE_URL", &format!("{}_not", database.url))], &[]);
    assert!(error.contains("does not exist"), "{error}");
}

#[tokio::test]
async fn a_postgres_schema_newer_than_the_binary_is_rejected_and_not_changed() {
    let folder = tempfile::tempdir().unwrap();
    let database = Database::create().await;
    let environment = [("DATABASE_URL", database.url.as_str())];
    assert!(run(folder.path(), &environment, &["migrate"]).status.success());
    let client = connect(&database.url).await;
    client.batch_execute("INSERT INTO faena.faena_schema VALUES (999, 'from the future', 0)").await.unwrap();
    let error = serve_error(folder.path(), &environment, &[]);
    assert!(error.contains("schema version 999") && error.contains("newer version"), "{error}");
    assert_eq!(configuration_error(&run(folder.path(), &environment, &["migrate"])), error);
    let nodes: i64 = client.query_one("SELECT count(*) FROM faena.node", &[]).await.unwrap().get(0);
    assert_eq!(nodes, 0);
}

#[test]
fn a_sqlite_schema_newer_than_the_binary_is_rejected_and_not_changed() {
    let folder = tempfile::tempdir().unwrap();
    assert!(run(folder.path(), &[], &["migrate"]).status.success());
    let file = folder.path().join("faena-data/faena.db");
    let database = rusqlite::Connection::open(&file).unwrap();
    database.execute("INSERT INTO faena_schema VALUES (999, 'from the future', 0)", []).unwrap();
    database.close().unwrap();
    let before = std::fs::read(&file).unwrap();
    let error = serve_error(folder.path(), &[], &[]);
    assert!(error.contains("schema version 999") && error.contains("newer version"), "{error}");
    assert_eq!(std::fs::read(&file).unwrap(), before, "the file has changed");
}

#[tokio::test(flavor = "multi_thread")]
async fn with_no_migrate_an_old_schema_is_rejected_until_it_is_migrated_on_sqlite() {
    assert_no_migrate_requires_a_migrated_schema(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_no_migrate_an_old_schema_is_rejected_until_it_is_migrated_on_postgres() {
    let database = Database::create().await;
    assert_no_migrate_requires_a_migrated_schema(&[("DATABASE_URL", database.url.as_str())]).await;
}

async fn assert_no_migrate_requires_a_migrated_schema(environment: &[(&str, &str)]) {
    let folder = tempfile::tempdir().unwrap();
    let error = serve_error(folder.path(), environment, &["--no-migrate"]);
    assert!(error.contains("faena migrate"), "{error}");
    let migrated = run(folder.path(), environment, &["migrate"]);
    assert!(migrated.status.success());
    assert_eq!(String::from_utf8_lossy(&migrated.stdout), "schema is up to date\n");
    assert!(run(folder.path(), environment, &["migrate"]).status.success(), "a second migration fails");
    let mut faena = Faena::spawn_with(command(folder.path()), folder.path(), environment, &["--no-migrate"]);
    faena.wait_until_listening().await;
}

#[test]
fn a_folder_that_cannot_be_created_is_named() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("file"), "").unwrap();
    let error = serve_error(folder.path(), &[("DATABASE_URL", "sqlite:file/data/faena.db")], &[]);
    assert!(error.contains("file/data") && error.contains("DATABASE_URL"), "{error}");
}

#[test]
fn a_file_that_is_not_a_database_is_named_and_not_changed() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("notes.txt");
    let notes = "not a database, ".repeat(1_000);
    std::fs::write(&file, &notes).unwrap();
    let error = serve_error(folder.path(), &[("DATABASE_URL", "sqlite:notes.txt")], &[]);
    assert!(error.contains("notes.txt") && error.contains("DATABASE_URL"), "{error}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), notes);
}

#[test]
fn a_port_in_use_is_named_before_any_file_is_created() {
    let folder = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let error = configuration_error(&run(folder.path(), &[("PORT", &port)], &["serve"]));
    assert!(error.contains(&port) && error.contains("--port"), "{error}");
    assert_is_empty(folder.path());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_server_on_the_same_sqlite_file_is_rejected_and_the_first_keeps_running() {
    let folder = tempfile::tempdir().unwrap();
    let mut first = Faena::start(folder.path(), &[]).await;
    let error = serve_error(folder.path(), &[], &[]);
    assert!(error.contains("in use by another faena"), "{error}");
    let id = first.submit(serde_json::json!({"name": "noop"})).await;
    first.wait_for_state(&id, "COMPLETED").await;
    first.kill();
    let second = Faena::start(folder.path(), &[]).await;
    second.wait_for_state(&id, "COMPLETED").await;
}

#[test]
fn without_api_keys_the_server_listens_on_loopback_only() {
    let folder = tempfile::tempdir().unwrap();
    for host in ["0.0.0.0", "::", "192.0.2.1", "::ffff:0.0.0.0"] {
        let error = serve_error(folder.path(), &[("HOST", host)], &[]);
        assert!(error.contains("--insecure-no-auth"), "{error}");
    }
    let error = serve_error(folder.path(), &[("HOST", "no-such-host.invalid")], &[]);
    assert!(error.contains("HOST"), "{error}");
    assert_is_empty(folder.path());
}

#[tokio::test(flavor = "multi_thread")]
async fn insecure_no_auth_allows_listening_on_every_address() {
    let folder = tempfile::tempdir().unwrap();
    let mut faena =
        Faena::spawn_with(command(folder.path()), folder.path(), &[("HOST", "0.0.0.0")], &["--insecure-no-auth"]);
    faena.wait_until_listening().await;
    assert!(faena.url.starts_with("http://0.0.0.0:"), "{}", faena.url);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_variables_of_a_task_scheduler_service_start_a_server() {
    let folder = tempfile::tempdir().unwrap();
    let environment = [
        ("NODE_ENV", "production"),
        ("REDIS_URL", "redis://redis:6379"),
        ("QUEUE_PREFIX", "scheduler"),
        ("WORKER_CONCURRENCY", "5"),
        ("LOG_LEVEL", "info"),
    ];
    let faena = Faena::start(folder.path(), &environment).await;
    let id = faena.submit(serde_json::json!({"name": "noop"})).await;
    faena.wait_for_state(&id, "COMPLETED").await;
}

#[test]
fn unknown_keys_and_invalid_values_are_named_with_their_position() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("faena.toml");
    for (content, expected) in [
        (
            "[server]\nprot = 1\n",
            "faena: faena.toml, line 2: server.prot is not a known key; \"faena config\" lists all keys",
        ),
        ("[node]\nlease = \"soon\"\n", "faena: faena.toml, line 2: node.lease: \"soon\" must be a duration like"),
        ("port = 1\n", "faena: faena.toml, line 1: port must be a section: [port]"),
        ("[server\n", "faena: faena.toml, line 1:"),
    ] {
        std::fs::write(&file, content).unwrap();
        let error = serve_error(folder.path(), &[], &[]);
        assert!(error.starts_with(expected), "{error}");
        assert_eq!(configuration_error(&run(folder.path(), &[], &["config"])), error);
    }
    std::fs::remove_file(&file).unwrap();
    for (name, value, problem) in [
        ("FAENA_NOD_LEASE", "1s", " is not a known key"),
        ("FAENA_NODE_LEASE", "-1s", ": node.lease: "),
        ("PORT", "65536", ": server.port: "),
        ("LOG_LEVEL", "loud", ": log.level: "),
    ] {
        let error = serve_error(folder.path(), &[(name, value)], &[]);
        assert!(error.starts_with(&format!("faena: environment {name}{problem}")), "{error}");
    }
    let error = configuration_error(&run(folder.path(), &[], &["serve", "--config", "missing.toml"]));
    assert!(error.contains("missing.toml"), "{error}");
    assert_is_empty(folder.path());
}
