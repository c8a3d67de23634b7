//! On a full disk no acknowledged job is lost, callers get an error, and the server recovers when space is free again.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::{BufRead, BufReader, Write},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use reqwest::StatusCode;
use serde_json::{Value, json};

use crate::{
    faena::{Faena, eventually},
    load::assert_all_completed_once,
};

/// A disk of a few megabytes. Only processes started through [`SmallDisk::program`] see it.
struct SmallDisk {
    mount_owner: Child,
    folder: PathBuf,
    is_unprivileged: bool,
}

impl SmallDisk {
    fn mount(folder: &Path) -> SmallDisk {
        fs::create_dir(folder).unwrap();
        let is_unprivileged = Path::new("/proc/self").metadata().unwrap().uid() != 0;
        let mut command = Command::new("unshare");
        if is_unprivileged {
            command.args(["--user", "--map-root-user"]);
        }
        let script = format!("mount -t tmpfs -o size=4m tmpfs {} && echo mounted && exec sleep 3600", folder.display());
        command.args(["--mount", "sh", "-c", &script]);
        let mut mount_owner = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(mount_owner.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "mounted\n", "cannot mount a tmpfs; this test needs root or user namespaces");
        SmallDisk { mount_owner, folder: folder.to_owned(), is_unprivileged }
    }

    /// Returns a command that runs the binary in the mount namespace of the disk.
    fn program(&self) -> Command {
        let mut command = Command::new("nsenter");
        command.env_clear().env("PATH", std::env::var_os("PATH").unwrap());
        command.args(["--target", &self.mount_owner.id().to_string(), "--mount"]);
        if self.is_unprivileged {
            command.args(["--user", "--preserve-credentials"]);
        }
        command.arg("--").arg(env!("CARGO_BIN_EXE_faena"));
        command
    }

    fn filler(&self) -> PathBuf {
        let root = PathBuf::from(format!("/proc/{}/root", self.mount_owner.id()));
        root.join(self.folder.strip_prefix("/").unwrap()).join("filler")
    }

    /// Writes until the disk is full.
    fn fill(&self) {
        let mut file = File::options().create(true).append(true).open(self.filler()).unwrap();
        for size in [64 << 10, 4 << 10, 1] {
            while file.write(&vec![b'x'; size]).is_ok_and(|written| written > 0) {}
        }
    }

    fn free(&self) {
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
        assert!(retry_after, "missing Retry-After");
        return accepted;
    }
    panic!("2 000 jobs of 20 kB were accepted on a disk of 4 MB");
}

#[tokio::test(flavor = "multi_thread")]
async fn on_a_full_disk_requests_get_503_no_job_is_lost_and_the_server_recovers_with_free_space() {
    let folder = tempfile::tempdir().unwrap();
    let disk = SmallDisk::mount(&folder.path().join("disk"));
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
    let disk = SmallDisk::mount(&folder.path().join("disk"));
    disk.fill();
    let url = format!("sqlite:{}/faena.db", disk.folder.display());
    let mut faena = Faena::spawn_with(disk.program(), folder.path(), &[("DATABASE_URL", &url)], &[]);
    let status = faena.wait_for_exit().await;
    let log = faena.log();
    assert_eq!(status.code(), Some(2), "{log}");
    assert_eq!(log.lines().count(), 1, "{log}");
    assert!(log.contains("full") || log.contains("space"), "{log}");
}
