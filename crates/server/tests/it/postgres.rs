//! PostgreSQL for one test: a database on the server that `./test` started, or a whole server that the test can restart.

use std::{
    os::unix::fs::{MetadataExt, chown},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use tokio_postgres::{Client, NoTls};

use crate::{faena::eventually, ports::free_port};

/// An empty database. Dropping the value drops the database.
pub struct Database {
    pub url: String,
    name: String,
}

fn server_url() -> String {
    std::env::var("FAENA_TEST_POSTGRES").expect("FAENA_TEST_POSTGRES is not set: run this test with ./test")
}

impl Database {
    pub async fn create() -> Database {
        let name = format!("faena_test_{}", uuid::Uuid::new_v4().simple());
        let client = connect(&server_url()).await;
        client.batch_execute(&format!("CREATE DATABASE {name}")).await.unwrap();
        let (base, _) = server_url().rsplit_once('/').map(|(a, b)| (a.to_owned(), b.to_owned())).unwrap();
        Database { url: format!("{base}/{name}"), name }
    }
}

impl Database {
    /// Ends all connections and accepts no more.
    pub async fn refuse_connections(&self) {
        let client = connect(&server_url()).await;
        let sql = format!(
            "ALTER DATABASE {0} WITH ALLOW_CONNECTIONS false; \
             SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{0}'",
            self.name
        );
        client.batch_execute(&sql).await.unwrap();
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let sql = format!("DROP DATABASE IF EXISTS {} WITH (FORCE)", self.name);
        // A panicking test cannot block on its own runtime, so another thread drops the database.
        let dropped = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async { connect(&server_url()).await.batch_execute(&sql).await })
        })
        .join();
        if !matches!(dropped, Ok(Ok(()))) {
            eprintln!("cannot drop database {}: {dropped:?}", self.name);
        }
    }
}

pub async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

/// A PostgreSQL server of one test.
pub struct Server {
    folder: tempfile::TempDir,
    programs: PathBuf,
    prefix: Vec<String>,
    pub port: u16,
    pub url: String,
}

impl Server {
    pub fn start() -> Server {
        Server::start_through(Vec::new())
    }

    /// Starts PostgreSQL through another program, such as `nsenter` with its options.
    pub fn start_through(prefix: Vec<String>) -> Server {
        let server = Server::new(prefix);
        server.run("initdb", &["--username", "faena", "--auth", "trust", "--no-locale", "--encoding", "UTF8"]);
        server.launch();
        server
    }

    fn new(prefix: Vec<String>) -> Server {
        let programs = std::env::var("FAENA_TEST_PG_BIN")
            .expect("FAENA_TEST_PG_BIN is not set: run this test with ./test, on a machine with PostgreSQL's programs");
        let folder = tempfile::tempdir().unwrap();
        let port = free_port();
        let url = format!("postgres://faena@127.0.0.1:{port}/postgres");
        let server = Server { folder, programs: programs.into(), prefix, port, url };
        if let Some(owner) = server.owner() {
            chown(server.folder.path(), Some(owner), None).unwrap();
        }
        server
    }

    fn launch(&self) {
        let options = format!("-p {} -c listen_addresses=127.0.0.1 -c unix_socket_directories=", self.port);
        self.run("pg_ctl", &["start", "--wait", "--silent", "--options", &options]);
    }

    /// Starts a standby. From then on every commit of this server waits for it.
    pub async fn synchronous_standby(&self) -> Server {
        let standby = Server::new(Vec::new());
        let port = self.port.to_string();
        let source = ["--host", "127.0.0.1", "--port", &port, "--username", "faena"];
        let options = ["--write-recovery-conf", "--checkpoint", "fast"];
        tokio::task::block_in_place(|| {
            standby.run("pg_basebackup", &[&source[..], &options[..]].concat());
            standby.launch();
        });
        let client = connect(&self.url).await;
        client.batch_execute("ALTER SYSTEM SET synchronous_standby_names = '*'").await.unwrap();
        client.batch_execute("SELECT pg_reload_conf()").await.unwrap();
        eventually("the standby is synchronous", async || {
            let sql = "SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'";
            client.query_opt(sql, &[]).await.unwrap().map(drop)
        })
        .await;
        standby
    }

    /// Makes a standby the primary.
    pub fn promote(&self) {
        self.run("pg_ctl", &["promote", "--wait", "--silent"]);
    }

    /// Stops all processes of the server with SIGSTOP: it accepts connections and answers nothing.
    pub fn freeze(&self) {
        self.signal("STOP");
    }

    pub fn thaw(&self) {
        self.signal("CONT");
    }

    fn signal(&self, name: &str) {
        let Ok(file) = std::fs::read_to_string(self.data().join("postmaster.pid")) else { return };
        let postmaster = file.lines().next().unwrap().to_owned();
        // The postmaster gets the signal first, so that it starts no further process.
        let mut processes = vec![postmaster.clone()];
        let output = Command::new("ps").args(["-o", "pid=", "--ppid", &postmaster]).output().unwrap();
        processes.extend(String::from_utf8(output.stdout).unwrap().split_whitespace().map(str::to_owned));
        let _ = Command::new("kill").args(["-s", name]).args(&processes).stderr(Stdio::null()).status().unwrap();
    }

    /// Restarts as after a power failure: no shutdown checkpoint, all connections closed, recovery at the start.
    pub fn restart_immediately(&self) {
        self.run("pg_ctl", &["restart", "--wait", "--silent", "--mode", "immediate"]);
    }

    pub fn stop_immediately(&self) {
        self.run("pg_ctl", &["stop", "--wait", "--silent", "--mode", "immediate"]);
    }

    pub fn start_again(&self) {
        // Only `restart` reads postmaster.opts, which has the options of the first start.
        self.run("pg_ctl", &["restart", "--wait", "--silent"]);
    }

    fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    fn owner(&self) -> Option<u32> {
        service_user()
    }

    fn run(&self, program: &str, arguments: &[&str]) {
        let log = self.folder.path().join("log");
        let program = self.programs.join(program);
        let mut words = self.prefix.clone();
        words.extend(self.owner().into_iter().flat_map(as_user));
        words.push(program.display().to_string());
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        command.args(arguments).arg("--pgdata").arg(self.data()).current_dir(self.folder.path());
        if program.ends_with("pg_ctl") && arguments[0] != "stop" {
            command.arg("--log").arg(&log);
        }
        let status = command.stdin(Stdio::null()).stdout(Stdio::null()).status().unwrap();
        let log = std::fs::read_to_string(&log).unwrap_or_default();
        assert!(status.success(), "{program:?} {arguments:?} failed:\n{log}");
    }
}

/// Returns the user that runs PostgreSQL and PgBouncer if the test runs as root, which both refuse.
pub fn service_user() -> Option<u32> {
    if Path::new("/proc/self").metadata().unwrap().uid() != 0 {
        return None;
    }
    let users = std::fs::read_to_string("/etc/passwd").unwrap();
    let line = users
        .lines()
        .find(|line| line.starts_with("postgres:"))
        .or(users.lines().find(|line| line.starts_with("nobody:")));
    Some(line.unwrap().split(':').nth(2).unwrap().parse().unwrap())
}

/// Returns the command prefix that runs a program as another user.
pub fn as_user(user: u32) -> Vec<String> {
    ["setpriv", "--reuid", &user.to_string(), "--clear-groups"].map(str::to_owned).to_vec()
}

impl Drop for Server {
    fn drop(&mut self) {
        self.thaw();
        if self.data().join("postmaster.pid").exists() {
            self.stop_immediately();
        }
    }
}
