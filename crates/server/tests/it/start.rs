//! What is wrong with the set-up is said in one line, with exit code 2, and nothing is started or touched.

use std::{net::TcpListener, path::Path, process::Output};

use crate::{
    faena::{Faena, command, run},
    postgres::{Database, connect},
};

/// Exit code 2 and one line on stderr, which is returned.
fn complaint(output: &Output) -> String {
    let stderr = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "one line: {stderr}");
    assert!(stderr.starts_with("faena: "), "{stderr}");
    assert!(output.stdout.is_empty());
    stderr.trim_end().to_owned()
}

fn refused(folder: &Path, environment: &[(&str, &str)], arguments: &[&str]) -> String {
    let arguments = [&["serve", "--port", "0"], arguments].concat();
    complaint(&run(folder, environment, &arguments))
}

fn assert_nothing_made(folder: &Path) {
    let left: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_database_address_that_is_not_understood_is_named() {
    let folder = tempfile::tempdir().unwrap();
    for url in ["mysql://root@localhost/x", "faena.db", "postgres://user:geheim@host:port/x", "sqlite:", " "] {
        let said = refused(folder.path(), &[("DATABASE_URL", url)], &[]);
        assert!(said.contains("DATABASE_URL") || said.contains("database.url"), "{url}: {said}");
        assert!(!said.contains("geheim"), "{said}");
    }
    assert_nothing_made(folder.path());
}

#[test]
fn a_postgres_that_cannot_be_reached_is_named_and_its_password_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let url = format!("postgres://user:geheim@{free}/faena");
    let said = refused(folder.path(), &[("DATABASE_URL", &url)], &[]);
    assert!(said.contains("Connection refused") && said.contains("check"), "{said}");
    assert!(!said.contains("geheim"), "{said}");
}

#[test]
fn a_postgres_that_takes_the_call_and_never_answers_is_given_up() {
    let folder = tempfile::tempdir().unwrap();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("postgres://user@{}/faena", silent.local_addr().unwrap());
    let said = refused(folder.path(), &[("DATABASE_URL", &url)], &[]);
    assert!(said.contains("PostgreSQL"), "{said}");
}

#[tokio::test]
async fn a_postgres_database_that_does_not_exist_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let database = Database::create().await;
    let said = refused(folder.path(), &[("DATABASE_URL", &format!("{}_not", database.url))], &[]);
    assert!(said.contains("does not exist"), "{said}");
}

#[tokio::test]
async fn a_postgres_schema_that_is_newer_than_the_binary_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let database = Database::create().await;
    let environment = [("DATABASE_URL", database.url.as_str())];
    assert!(run(folder.path(), &environment, &["migrate"]).status.success());
    let client = connect(&database.url).await;
    client.batch_execute("INSERT INTO faena.faena_schema VALUES (999, 'from the future', 0)").await.unwrap();
    let said = refused(folder.path(), &environment, &[]);
    assert!(said.contains("schema version 999") && said.contains("newer faena"), "{said}");
    assert_eq!(complaint(&run(folder.path(), &environment, &["migrate"])), said);
    let nodes: i64 = client.query_one("SELECT count(*) FROM faena.node", &[]).await.unwrap().get(0);
    assert_eq!(nodes, 0);
}

#[test]
fn a_sqlite_schema_that_is_newer_than_the_binary_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    assert!(run(folder.path(), &[], &["migrate"]).status.success());
    let file = folder.path().join("faena-data/faena.db");
    let database = rusqlite::Connection::open(&file).unwrap();
    database.execute("INSERT INTO faena_schema VALUES (999, 'from the future', 0)", []).unwrap();
    database.close().unwrap();
    let before = std::fs::read(&file).unwrap();
    let said = refused(folder.path(), &[], &[]);
    assert!(said.contains("schema version 999") && said.contains("newer faena"), "{said}");
    assert_eq!(std::fs::read(&file).unwrap(), before, "the file was touched");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_leave_to_migrate_an_old_schema_is_refused_until_it_is_migrated_on_sqlite() {
    needs_to_be_migrated(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_leave_to_migrate_an_old_schema_is_refused_until_it_is_migrated_on_postgres() {
    let database = Database::create().await;
    needs_to_be_migrated(&[("DATABASE_URL", database.url.as_str())]).await;
}

async fn needs_to_be_migrated(environment: &[(&str, &str)]) {
    let folder = tempfile::tempdir().unwrap();
    let said = refused(folder.path(), environment, &["--no-migrate"]);
    assert!(said.contains("faena migrate"), "{said}");
    let migrated = run(folder.path(), environment, &["migrate"]);
    assert!(migrated.status.success());
    assert_eq!(String::from_utf8_lossy(&migrated.stdout), "the schema is up to date\n");
    assert!(run(folder.path(), environment, &["migrate"]).status.success(), "a second time changes nothing");
    let mut faena = Faena::spawn_with(command(folder.path()), folder.path(), environment, &["--no-migrate"]);
    faena.listening().await;
}

#[test]
fn a_folder_that_cannot_be_made_is_named() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("file"), "").unwrap();
    let said = refused(folder.path(), &[("DATABASE_URL", "sqlite:file/data/faena.db")], &[]);
    assert!(said.contains("file/data") && said.contains("DATABASE_URL"), "{said}");
}

#[test]
fn a_file_that_is_no_database_is_named_and_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("letter.txt");
    let letter = "Dear database, ".repeat(1_000);
    std::fs::write(&file, &letter).unwrap();
    let said = refused(folder.path(), &[("DATABASE_URL", "sqlite:letter.txt")], &[]);
    assert!(said.contains("letter.txt") && said.contains("DATABASE_URL"), "{said}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), letter);
}

#[test]
fn a_port_that_is_taken_is_named_before_anything_is_made() {
    let folder = tempfile::tempdir().unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let said = complaint(&run(folder.path(), &[("PORT", &port)], &["serve"]));
    assert!(said.contains(&port) && said.contains("--port"), "{said}");
    assert_nothing_made(folder.path());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_server_on_the_same_sqlite_file_is_refused_and_the_first_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let mut first = Faena::start(folder.path(), &[]).await;
    let said = refused(folder.path(), &[], &[]);
    assert!(said.contains("in use by another faena"), "{said}");
    let id = first.submit(serde_json::json!({"name": "noop"})).await;
    first.job_is(&id, "COMPLETED").await;
    first.kill();
    let second = Faena::start(folder.path(), &[]).await;
    second.job_is(&id, "COMPLETED").await;
}

#[test]
fn without_keys_only_this_machine_may_be_listened_to() {
    let folder = tempfile::tempdir().unwrap();
    for host in ["0.0.0.0", "::", "192.0.2.1", "::ffff:0.0.0.0"] {
        let said = refused(folder.path(), &[("HOST", host)], &[]);
        assert!(said.contains("--insecure-no-auth"), "{said}");
    }
    let said = refused(folder.path(), &[("HOST", "no-such-host.invalid")], &[]);
    assert!(said.contains("HOST"), "{said}");
    assert_nothing_made(folder.path());
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_insists_may_listen_to_everybody() {
    let folder = tempfile::tempdir().unwrap();
    let mut faena =
        Faena::spawn_with(command(folder.path()), folder.path(), &[("HOST", "0.0.0.0")], &["--insecure-no-auth"]);
    faena.listening().await;
    assert!(faena.url.starts_with("http://0.0.0.0:"), "{}", faena.url);
}

#[test]
fn an_unknown_key_and_a_wrong_value_are_named_with_their_place() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("faena.toml");
    for (content, expected) in [
        (
            "[server]\nprot = 1\n",
            "faena: faena.toml, line 2: server.prot is not a known key; `faena config` lists them",
        ),
        ("[node]\nlease = \"soon\"\n", "faena: faena.toml, line 2: node.lease: \"soon\" must be a duration like"),
        ("port = 1\n", "faena: faena.toml: port must be a section: [port]"),
        ("[server\n", "faena: faena.toml, line 1:"),
    ] {
        std::fs::write(&file, content).unwrap();
        let said = refused(folder.path(), &[], &[]);
        assert!(said.starts_with(expected), "{said}");
        assert_eq!(complaint(&run(folder.path(), &[], &["config"])), said);
    }
    std::fs::remove_file(&file).unwrap();
    for (name, value) in
        [("FAENA_NOD_LEASE", "1s"), ("FAENA_NODE_LEASE", "-1s"), ("PORT", "65536"), ("LOG_LEVEL", "loud")]
    {
        let said = refused(folder.path(), &[(name, value)], &[]);
        assert!(said.starts_with(&format!("faena: environment {name}: ")), "{said}");
    }
    let said = complaint(&run(folder.path(), &[], &["serve", "--config", "missing.toml"]));
    assert!(said.contains("missing.toml"), "{said}");
    assert_nothing_made(folder.path());
}
