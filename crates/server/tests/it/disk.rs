//! On a full disk no acknowledged job is lost, callers get an error, and the server recovers when space is free again.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::{BufRead, BufReader, Write},
    os::unix::fs::{MetadataExt, chown},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use reqwest::StatusCode;
use serde_json::{Value, json};

use crate::{
    faena::{Faena, eventually},
    load::assert_all_completed_once,
    postgres::{Server, connect, service_user},
};

/// A disk of a few megabytes. Only processes started through [`SmallDisk::program`] see it.
pub struct SmallDisk {
    mount_owner: Child,
    pub folder: PathBuf,
    is_unprivileged: bool,
}

impl SmallDisk {
    /// Mounts a disk of this many mebibytes.
    pub fn mount(folder: &Path, mebibytes: u32) -> SmallDisk {
        fs::create_dir(folder).unwrap();
        let is_unprivileged = Path::new("/proc/self").metadata().unwrap().uid() != 0;
        let mut command = Command::new("unshare");
        if is_unprivileged {
            command.args(["--user", "--map-root-user"]);
        }
        let script = format!(
            "mount -t tmpfs -o size={mebibytes}m tmpfs {} && echo mounted && exec sleep 3600",
            folder.display()
        );
        command.args(["--mount", "sh", "-c", &script]);
        let mut mount_owner = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(mount_owner.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "mounted\n", "cannot mount a tmpfs; this test needs root or user namespaces");
        SmallDisk { mount_owner, folder: folder.to_owned(), is_unprivileged }
    }

    /// Returns a command that runs the binary in the mount namespace of the disk.
    pub fn program(&self) -> Command {
        let words = self.enter();
        let mut command = Command::new(&words[0]);
        command.env_clear().env("PATH", std::env::var_os("PATH").unwrap());
        command.args(&words[1..]).arg(env!("CARGO_BIN_EXE_faena"));
        command
    }

    /// Returns the command prefix that runs a program in the mount namespace of the disk.
    pub fn enter(&self) -> Vec<String> {
        let mut words = vec!["nsenter".into(), "--target".into(), self.mount_owner.id().to_string(), "--mount".into()];
        if self.is_unprivileged {
            words.extend(["--user".into(), "--preserve-credentials".into()]);
        }
        words.push("--".into());
        words
    }

    /// Returns the path under which the test itself sees the disk.
    pub fn outside_path(&self) -> PathBuf {
        let root = PathBuf::from(format!("/proc/{}/root", self.mount_owner.id()));
        root.join(self.folder.strip_prefix("/").unwrap())
    }

    fn filler(&self) -> PathBuf {
        self.outside_path().join("filler")
    }

    /// Writes until the disk is full.
    pub fn fill(&self) {
        let mut file = File::options().create(true).append(true).open(self.filler()).unwrap();
        for size in [64 << 10, 4 << 10, 1] {
            while file.write(&vec![b'x'; size]).is_ok_and(|written| written > 0) {}
        }
    }

    pub fn free(&self) {
        fs::remove_file(self.filler()).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = self.mount_owner.kill();
        let _ = self.mount_owner.wait();
    }
}

/// Submits jobs until one is rejected for lack of space. Returns the ids of the accepted ones.
async fn submit_until_rejected(faena: &Faena) -> BTreeSet<String> {
    let mut accepted = BTreeSet::new();
    let payload = "y".repeat(20_000);
    for _ in 0..2_000 {
        let body = json!({"name": "noop", "payload": {"text": payload}});
        let answer = faena.http.post(format!("{}/api/v1/jobs", faena.url)).json(&body).send().await.unwrap();
        let (status, retry_after) = (answer.status(), answer.headers().contains_key("retry-after"));
        let answer: Value = answer.json().await.unwrap();
        if status == StatusCode::CREATED {
            accepted.insert(answer["id"].as_str().unwrap().to_owned());
            continue;
        }
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{answer}\n{}", faena.log());
        assert_eq!(answer["error"]["code"], "UNAVAILABLE");
        assert_eq!(answer["error"]["message"], "the disk of the database is full; free some space");
        assert!(retry_after, "missing Retry-After");
        assert_unready(faena).await;
        return accepted;
    }
    panic!("2 000 jobs of 20 kB were accepted on a disk of 4 MB");
}

/// Checks that readiness reports the full disk, although the database can be read.
async fn assert_unready(faena: &Faena) {
    let (status, health) = faena.get("/health/ready").await;
    assert_eq!((status, &health["status"]), (StatusCode::SERVICE_UNAVAILABLE, &json!("unhealthy")), "{health:#}");
    let error = health["checks"]["database"]["error"].as_str().unwrap();
    assert!(error.contains("the disk of the database is full"), "{health:#}");
}

/// Waits until readiness reports a database that accepts writes.
async fn wait_until_ready(faena: &Faena) {
    eventually("the database is healthy", async || {
        let (status, health) = faena.get("/health/ready").await;
        (status == StatusCode::OK && health["checks"]["database"]["status"] == "healthy").then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn on_a_full_disk_requests_get_503_no_job_is_lost_and_the_server_recovers_with_free_space() {
    let folder = tempfile::tempdir().unwrap();
    let disk = SmallDisk::mount(&folder.path().join("disk"), 4);
    let url = format!("sqlite:{}/faena.db", disk.folder.display());
    let environment = [("DATABASE_URL", url.as_str())];
    let mut faena = Faena::spawn_with(disk.program(), folder.path(), &environment, &[]);
    faena.wait_until_listening().await;

    let mut acknowledged = BTreeSet::from([faena.submit(json!({"name": "noop"})).await]);
    disk.fill();
    acknowledged.extend(submit_until_rejected(&faena).await);
    disk.free();
    let after = eventually("jobs are accepted again", async || {
        let (status, answer) = faena.post("/api/v1/jobs", json!({"name": "noop"})).await;
        (status == StatusCode::CREATED).then(|| answer["id"].as_str().unwrap().to_owned())
    })
    .await;
    acknowledged.insert(after);
    wait_until_ready(&faena).await;
    assert_all_completed_once(&faena, &acknowledged).await;

    // Fill the disk again, and kill the server while it is full.
    disk.fill();
    acknowledged.extend(submit_until_rejected(&faena).await);
    faena.kill();
    disk.free();
    let mut faena = Faena::spawn_with(disk.program(), folder.path(), &environment, &[]);
    faena.wait_until_listening().await;
    assert_all_completed_once(&faena, &acknowledged).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_is_full_at_the_start_is_reported_and_ends_the_server() {
    let folder = tempfile::tempdir().unwrap();
    let disk = SmallDisk::mount(&folder.path().join("disk"), 4);
    disk.fill();
    let url = format!("sqlite:{}/faena.db", disk.folder.display());
    let mut faena = Faena::spawn_with(disk.program(), folder.path(), &[("DATABASE_URL", &url)], &[]);
    let status = faena.wait_for_exit().await;
    let log = faena.log();
    assert_eq!(status.code(), Some(2), "{log}");
    assert_eq!(log.lines().count(), 1, "{log}");
    assert!(log.contains("full") || log.contains("space"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn when_the_disk_of_postgres_is_full_requests_name_the_reason_and_the_server_recovers_with_free_space() {
    let folder = tempfile::tempdir().unwrap();
    let disk = SmallDisk::mount(&folder.path().join("disk"), 24);
    let tables = disk.outside_path().join("tables");
    fs::create_dir(&tables).unwrap();
    chown(&tables, service_user(), None).unwrap();
    let server = tokio::task::block_in_place(|| Server::start_through(disk.enter()));
    // Only the tables are on the small disk: PostgreSQL would stop if its write-ahead log had no space.
    let client = connect(&server.url).await;
    client
        .batch_execute(&format!("CREATE TABLESPACE small LOCATION '{}/tables'", disk.folder.display()))
        .await
        .unwrap();
    client.batch_execute("ALTER DATABASE postgres SET default_tablespace = 'small'").await.unwrap();
    let faena = Faena::start(folder.path(), &[("DATABASE_URL", &server.url)]).await;
    let mut acknowledged = BTreeSet::from([faena.submit(json!({"name": "noop"})).await]);
    disk.fill();
    acknowledged.extend(submit_until_rejected(&faena).await);
    disk.free();
    wait_until_ready(&faena).await;
    acknowledged.insert(faena.submit(json!({"name": "noop"})).await);
    assert_all_completed_once(&faena, &acknowledged).await;
}
