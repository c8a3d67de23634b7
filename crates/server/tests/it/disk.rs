//! A full disk: nothing that was acknowledged is lost, callers are told, and it works again when there is space.

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

/// A disk of a few megabytes, seen only by those who are started through it.
struct SmallDisk {
    holder: Child,
    folder: PathBuf,
    as_user: bool,
}

impl SmallDisk {
    fn mount(folder: &Path) -> SmallDisk {
        fs::create_dir(folder).unwrap();
        let as_user = Path::new("/proc/self").metadata().unwrap().uid() != 0;
        let mut command = Command::new("unshare");
        if as_user {
            command.args(["--user", "--map-root-user"]);
        }
        let script = format!("mount -t tmpfs -o size=4m tmpfs {} && echo mounted && exec sleep 3600", folder.display());
        command.args(["--mount", "sh", "-c", &script]);
        let mut holder = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(holder.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "mounted\n", "a tmpfs cannot be mounted here: this test needs root or user namespaces");
        SmallDisk { holder, folder: folder.to_owned(), as_user }
    }

    /// What runs the binary where the disk is.
    fn program(&self) -> Command {
        let mut command = Command::new("nsenter");
        command.env_clear().env("PATH", std::env::var_os("PATH").unwrap());
        command.args(["--target", &self.holder.id().to_string(), "--mount"]);
        if self.as_user {
            command.args(["--user", "--preserve-credentials"]);
        }
        command.arg("--").arg(env!("CARGO_BIN_EXE_faena"));
        command
    }

    fn filler(&self) -> PathBuf {
        let root = PathBuf::from(format!("/proc/{}/root", self.holder.id()));
        root.join(self.folder.strip_prefix("/").unwrap()).join("filler")
    }

    /// Writes until nothing more fits.
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
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

/// InFlight in jobs until one is refused for lack of space; the ids of those that were taken.
async fn submit_until_refused(faena: &Faena) -> BTreeSet<String> {
    let mut taken = BTreeSet::new();
    let payload = "y".repeat(20_000);
    for _ in 0..2_000 {
        let body = json!({"name": "noop", "payload": {"text": payload}});
        let answer = faena.http.post(format!("{}/api/v1/jobs", faena.url)).json(&body).send().await.unwrap();
        let (status, retry_after) = (answer.status(), answer.headers().contains_key("retry-after"));
        let answer: Value = answer.json().await.unwrap();
        if status == StatusCode::CREATED {
            taken.insert(answer["id"].as_str().unwrap().to_owned());
            continue;
        }
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{answer}\n{}", faena.log());
        assert_eq!(answer["error"]["code"], "UNAVAILABLE");
        assert!(retry_after, "when to come again");
        return taken;
    }
    panic!("2 000 jobs of 20 kB were taken on a disk of 4 MB");
}

#[tokio::test(flavor = "multi_thread")]
async fn on_a_full_disk_requests_get_503_nothing_is_lost_and_it_works_again_when_there_is_space() {
    let folder = tempfile::tempdir().unwrap();
    let disk = SmallDisk::mount(&folder.path().join("disk"));
    let url = format!("sqlite:{}/faena.db", disk.folder.display());
    let environment = [("DATABASE_URL", url.as_str())];
    let mut faena = Faena::spawn_with(disk.program(), folder.path(), &environment, &[]);
    faena.listening().await;

    let mut acknowledged = BTreeSet::from([faena.submit(json!({"name": "noop"})).await]);
    disk.fill();
    acknowledged.extend(submit_until_refused(&faena).await);
    disk.free();
    let after = eventually("jobs are taken again", async || {
        let (status, answer) = faena.post("/api/v1/jobs", json!({"name": "noop"})).await;
        (status == StatusCode::CREATED).then(|| answer["id"].as_str().unwrap().to_owned())
    })
    .await;
    acknowledged.insert(after);
    assert_all_completed_once(&faena, &acknowledged).await;

    // Full again, and killed while it is.
    disk.fill();
    acknowledged.extend(submit_until_refused(&faena).await);
    faena.kill();
    disk.free();
    let mut faena = Faena::spawn_with(disk.program(), folder.path(), &environment, &[]);
    faena.listening().await;
    assert_all_completed_once(&faena, &acknowledged).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn on_a_disk_that_is_full_from_the_start_it_says_so_and_ends() {
    let folder = tempfile::tempdir().unwrap();
    let disk = SmallDisk::mount(&folder.path().join("disk"));
    disk.fill();
    let url = format!("sqlite:{}/faena.db", disk.folder.display());
    let mut faena = Faena::spawn_with(disk.program(), folder.path(), &[("DATABASE_URL", &url)], &[]);
    let status = faena.ended().await;
    let said = faena.log();
    assert_eq!(status.code(), Some(2), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(said.contains("full") || said.contains("space"), "{said}");
}
