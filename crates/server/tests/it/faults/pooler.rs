//! Tests of a server behind PgBouncer. In transaction mode, lost prepared statements stop the start, and lost
//! notifications are noticed and replaced by polling.

use std::{
    fs,
    os::unix::fs::chown,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::json;

use crate::{
    faena::{Faena, eventually, run},
    ports::free_port,
    postgres::{Database, as_user, service_user},
    shell::output_parts,
};

/// A PgBouncer in front of a database. Dropping it ends the process.
struct PgBouncer {
    child: Child,
    url: String,
    _folder: tempfile::TempDir,
}

impl PgBouncer {
    async fn start(database: &Database, mode: &str) -> PgBouncer {
        let folder = tempfile::tempdir().unwrap();
        let port = free_port();
        let (front, name) = database.url.rsplit_once('/').unwrap();
        let (user, address) = front.strip_prefix("postgres://").unwrap().rsplit_once('@').unwrap();
        let (host, server_port) = address.rsplit_once(':').unwrap();
        let settings = format!(
            "[databases]\n{name} = host={host} port={server_port} user={user}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
             listen_port = {port}\nunix_socket_dir =\nauth_type = any\npool_mode = {mode}\n"
        );
        let file = folder.path().join("pgbouncer.ini");
        fs::write(&file, settings).unwrap();
        let mut words: Vec<String> = service_user().into_iter().flat_map(as_user).collect();
        if let Some(user) = service_user() {
            chown(folder.path(), Some(user), None).unwrap();
            chown(&file, Some(user), None).unwrap();
        }
        let program = if fs::exists("/usr/sbin/pgbouncer").unwrap() { "/usr/sbin/pgbouncer" } else { "pgbouncer" };
        words.extend([program.to_owned(), file.display().to_string()]);
        let child = Command::new(&words[0])
            .args(&words[1..])
            .stdin(Stdio::null())
            .stderr(fs::File::create(folder.path().join("log")).unwrap())
            .spawn()
            .expect("missing: pgbouncer; run this test with ./test, which installs it");
        let url = format!("postgres://{user}@127.0.0.1:{port}/{name}");
        let mut pooler = PgBouncer { child, url, _folder: folder };
        eventually("PgBouncer listens", async || {
            assert!(pooler.child.try_wait().unwrap().is_none(), "{}", pooler.log());
            tokio::net::TcpStream::connect(("127.0.0.1", port)).await.ok().map(drop)
        })
        .await;
        pooler
    }

    fn log(&self) -> String {
        fs::read_to_string(self._folder.path().join("log")).unwrap_or_default()
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pgbouncer_that_loses_prepared_statements_is_named_and_stops_the_start_on_postgres() {
    let folder = tempfile::tempdir().unwrap();
    let database = Database::create().await;
    let pooler = PgBouncer::start(&database, "transaction").await;
    let mut faena = Faena::spawn(folder.path(), &[("DATABASE_URL", &pooler.url)]);
    let status = faena.wait_for_exit().await;
    let log = faena.log();
    assert_eq!(status.code(), Some(2), "{log}");
    assert!(log.contains("use PgBouncer 1.21 or newer with max_prepared_statements"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_postgres_node_behind_a_pgbouncer_in_session_mode_receives_notifications() {
    let folder = tempfile::tempdir().unwrap();
    let database = Database::create().await;
    let pooler = PgBouncer::start(&database, "session").await;
    let faena = Faena::start(folder.path(), &[("DATABASE_URL", &pooler.url)]).await;
    let id = faena.submit(json!({"name": "noop"})).await;
    faena.wait_for_state(&id, "COMPLETED").await;
    let (_, health) = faena.get("/health/ready").await;
    assert_eq!(health["checks"]["database"].get("signalProblem"), None, "{health:#}");
}

#[tokio::test(flavor = "multi_thread")]
async fn notifications_lost_by_a_pgbouncer_are_reported_and_the_postgres_nodes_poll_faster() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let database = Database::create().await;
    let pooler = PgBouncer::start(&database, "transaction").await;
    // Only the listening session is behind the pooler, because the pooler loses prepared statements too.
    let environment = [("DATABASE_URL", database.url.as_str()), ("FAENA_DATABASE_LISTEN_URL", pooler.url.as_str())];
    let api = [&environment[..], &[("FAENA_SERVER_ROLES", "api,engine")]].concat();
    let api_node = Faena::start(folders[0].path(), &api).await;
    let worker_node = Faena::start(folders[1].path(), &environment).await;
    for node in [&api_node, &worker_node] {
        eventually("the node notices", async || {
            let (_, health) = node.get("/health/ready").await;
            let problem = health["checks"]["database"]["signalProblem"].as_str()?;
            problem.contains("a connection pooler in transaction mode loses LISTEN").then_some(())
        })
        .await;
        assert!(node.log().contains("WARN not listening to other nodes, polling instead"), "{}", node.log());
    }
    let port = api_node.url.rsplit_once(':').unwrap().1;
    let doctor = run(folders[0].path(), &[environment[0], ("PORT", port)], &["doctor"]);
    let (_, report, _) = output_parts(&doctor);
    assert!(report.contains("signals-lost"), "{report}");

    // Each job is submitted when the one before it has completed. With one poll per second each would take a second.
    let mut times = Vec::new();
    for _ in 0..15 {
        let started_at = Instant::now();
        let id = api_node.submit(json!({"name": "noop"})).await;
        api_node.wait_for_state(&id, "COMPLETED").await;
        times.push(started_at.elapsed());
    }
    times.sort();
    println!("median {:?}, longest {:?}", times[7], times[14]);
    assert!(times[7] < Duration::from_millis(700), "{times:?}");
}
