//! `faena demo`: every page soon has content, and nothing is left behind.

use std::{
    fs::{self, File},
    net::TcpListener,
    path::Path,
    process::{Child, Command, Stdio},
};

use reqwest::Client;
use serde_json::Value;

use crate::faena::{command, eventually, http};

/// A demo whose temporary folder is in `folder`. Dropping it kills it.
struct Demo {
    child: Child,
    url: String,
    http: Client,
}

impl Demo {
    async fn start(folder: &Path) -> Demo {
        let (output, temporary) = (folder.join("stdout"), folder.join("tmp"));
        fs::create_dir(&temporary).unwrap();
        let mut child = command(folder)
            .args(["demo", "--port", "0"])
            .env("TMPDIR", &temporary)
            // The demo must neither touch the database of its caller nor send the caller's API key.
            .env("FAENA_TOKEN", "fna_000000000000_0000000000000000000000000000000000000000000")
            .env("DATABASE_URL", "sqlite:/nonexistent/mine.db")
            .stdin(Stdio::null())
            .stdout(File::create(&output).unwrap())
            .stderr(File::create(folder.join("stderr")).unwrap())
            .spawn()
            .unwrap();
        let url = eventually("the demo prints its address", async || {
            assert_eq!(child.try_wait().unwrap(), None, "{}", fs::read_to_string(folder.join("stderr")).unwrap());
            let text = fs::read_to_string(&output).unwrap();
            let line = text.lines().next()?.strip_prefix("Faena's demo runs at ")?.to_owned();
            text.contains("Ctrl-C").then_some(line)
        })
        .await;
        Demo { child, url, http: http() }
    }

    async fn get(&self, path: &str) -> Value {
        let answer = self.http.get(format!("{}/api/v1{path}", self.url)).send().await.unwrap();
        assert!(answer.status().is_success(), "{path}: {}", answer.status());
        answer.json().await.unwrap()
    }

    /// Waits until a list has a row that contains every text.
    async fn wait_for(&self, path: &str, texts: &[&str]) {
        let mut last = Value::Null;
        let has_row = |rows: &Value| {
            let lists = rows.as_object().into_iter().flat_map(|fields| fields.values());
            let mut rows = lists.filter_map(Value::as_array).flatten();
            rows.any(|row| texts.iter().all(|text| row.to_string().contains(text)))
        };
        eventually(&format!("{path} has {texts:?}"), async || {
            last = self.get(path).await;
            has_row(&last).then_some(())
        })
        .await;
    }

    fn signal(&self, name: &str) {
        let process = self.child.id().to_string();
        assert!(Command::new("kill").args(["-s", name, &process]).status().unwrap().success());
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_page_of_the_demo_has_content_and_ctrl_c_removes_everything() {
    let folder = tempfile::tempdir().unwrap();
    let mut demo = Demo::start(folder.path()).await;
    for (path, texts) in [
        ("/jobs?status=COMPLETED", &["email.send"][..]),
        ("/jobs?status=PROCESSING", &["video.render", "percentage"]),
        ("/jobs?status=QUEUED", &["newsletter"]),
        ("/jobs?status=PENDING", &["Reminder"]),
        ("/jobs?status=CANCELLED", &["fax.send"]),
        ("/jobs?correlationId=report-1", &["report.publish", "dependsOn"]),
        ("/dead-letter", &["card declined"]),
        ("/queues", &["newsletter", "the new design is not approved yet"]),
        ("/limits", &["video.render"]),
        ("/limits", &["customer-*"]),
        ("/schedules", &["nightly report", "Europe/Madrid"]),
        ("/workers", &["renderer"]),
        ("/webhooks?state=delivered", &["127.0.0.1"]),
        ("/webhooks?state=waiting", &["127.0.0.1"]),
        ("/machines", &["refund"]),
        ("/tasks?approval=true", &["WAITING_FOR_APPROVAL"]),
        ("/tasks", &["PAID"]),
        ("/audit", &["queue.pause"]),
        ("/outbox", &["archive"]),
    ] {
        demo.wait_for(path, texts).await;
    }
    for page in ["/", "/jobs", "/approvals", "/trace?id=report-1"] {
        let answer = demo.http.get(format!("{}{page}", demo.url)).send().await.unwrap();
        assert!(answer.status().is_success(), "{page}: {}", answer.status());
    }
    let temporary = folder.path().join("tmp");
    assert_eq!(fs::read_dir(&temporary).unwrap().count(), 1);
    demo.signal("INT");
    let status = eventually("the demo ends", async || demo.child.try_wait().unwrap()).await;
    let errors = fs::read_to_string(folder.path().join("stderr")).unwrap();
    assert!(status.success(), "{status}: {errors}");
    assert_eq!(errors, "", "the demo logs only what a person must know");
    assert_eq!(fs::read_dir(&temporary).unwrap().count(), 0, "something is left");
    assert!(fs::read_to_string(folder.path().join("stdout")).unwrap().ends_with("stopped; everything was removed\n"));
    assert!(!Path::new("/nonexistent").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_removes_everything_too() {
    let folder = tempfile::tempdir().unwrap();
    let mut demo = Demo::start(folder.path()).await;
    demo.signal("TERM");
    assert!(eventually("the demo ends", async || demo.child.try_wait().unwrap()).await.success());
    assert_eq!(fs::read_dir(folder.path().join("tmp")).unwrap().count(), 0, "something is left");
}

#[test]
fn a_demo_that_cannot_start_says_why_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let start = |port: &str, temporary: &Path| {
        let output = command(folder.path()).args(["demo", "--port", port]).env("TMPDIR", temporary).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let busy = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = busy.local_addr().unwrap().port().to_string();
    let temporary = folder.path().join("tmp");
    fs::create_dir(&temporary).unwrap();
    let error = start(&port, &temporary);
    assert!(error.contains(&port) && error.contains("in use"), "{error}");
    assert_eq!(fs::read_dir(&temporary).unwrap().count(), 0, "something is left");
    let error = start("0", &folder.path().join("missing"));
    assert!(error.contains("set TMPDIR to one that can be written"), "{error}");
}
