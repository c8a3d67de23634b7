//! `faena top` in a pseudo-terminal.

use serde_json::json;

use crate::{
    faena::{Faena, command, eventually},
    proxy::Proxy,
    shell::Shell,
    terminal::Terminal,
    workers::{HttpWorker, Job, TestWorker, WorkerOptions},
};

const SIZES: [(u16, u16); 2] = [(80, 24), (200, 50)];

fn top(shell: &Shell, url: &str, (columns, rows): (u16, u16)) -> Terminal {
    let mut command = command(shell.folder.path());
    command.env("FAENA_URL", url).arg("top");
    Terminal::start(command, columns, rows)
}

/// Starts a job that reports progress.
async fn run_with_progress(faena: &Faena, message: &str) -> (HttpWorker, Job) {
    let mut worker = HttpWorker::connect(faena, WorkerOptions::new("press-1", &["print"])).await;
    faena.submit(json!({"type": "print", "queue": "paper", "payload": {"pages": 9}})).await;
    let job = worker.next_job().await;
    worker.started(&job).await.unwrap();
    worker.progress(&job, json!({"percentage": 40, "message": message})).await.unwrap();
    (worker, job)
}

#[tokio::test(flavor = "multi_thread")]
async fn top_shows_and_changes_queues_workers_and_jobs_at_every_size() {
    for size in SIZES {
        let shell = Shell::start(&[]).await;
        let (_worker, job) = run_with_progress(&shell.faena, "page 4").await;
        let body =
            json!({"type": "http.request", "queue": "web", "payload": {"url": "http://127.0.0.1/"}, "maxRetries": 0});
        let dead = shell.faena.submit(body).await;
        shell.faena.wait_for_state(&dead, "FAILED").await;
        let mut top = top(&shell, &shell.faena.url, size);
        let shown =
            ["queues (2)", "paper", "web", "finished/min", "press-1", "running jobs (1)", &job.id, "====", "40 %"];
        top.wait_for(&shown).await;
        top.wait_for(&["1 running", "1 dead letters", "1 failed"]).await;
        top.assert_nothing_wraps();

        // The queues are sorted by name: "paper" is selected.
        top.send("p");
        top.wait_for(&["paused by"]).await;
        assert!(shell.json(&["queues", "show", "paper", "--json"])["paused"].is_object());
        top.send("p");
        eventually("the queue is resumed", async || {
            shell.json(&["queues", "show", "paper", "--json"])["paused"].is_null().then_some(())
        })
        .await;
        top.send("\x1b[B\r");
        top.wait_for(&["jobs of queue web", &dead, "FAILED"]).await;
        top.send("\x1b");
        top.wait_for(&["running jobs (1)"]).await;

        top.send("\r");
        top.wait_for(&[&format!("job {}", job.id), "PROCESSING", "40 %", r#"{"pages":9}"#, "queue", "c cancel"]).await;
        top.send("c");
        top.wait_for(&[&format!("cancel job {}?", job.id)]).await;
        top.send("n");
        top.wait_for(&["Esc back"]).await;
        top.send("c");
        top.wait_for(&["y: yes"]).await;
        top.send("y");
        top.wait_for(&["its worker was asked to stop"]).await;
        assert_eq!(shell.faena.job(&job.id).await["status"], "PROCESSING", "its worker decides");
        top.send("\x1b");
        top.wait_for(&["running jobs (1)"]).await;

        top.send("f");
        top.wait_for(&["dead letters, newest first (1)", &dead]).await;
        top.send("r");
        top.wait_for(&["will run again"]).await;
        top.send("?");
        top.wait_for(&["press any key to close", "drain or resume the worker"]).await;
        top.send(" a\t\t\tq");
        assert_eq!(top.wait_for_exit().await, 0);
        top.assert_is_restored();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn top_follows_an_open_job_and_the_size_of_the_terminal() {
    let shell = Shell::start(&[]).await;
    let (mut worker, job) = run_with_progress(&shell.faena, "page 4").await;
    let top = top(&shell, &shell.faena.url, (80, 24));
    top.wait_for(&["press-1", &job.id]).await;
    top.send("\t");
    top.send("p");
    top.wait_for(&["press-1 drains", "Draining"]).await;
    top.send("\t\r");
    top.wait_for(&["▸ PROCESSING", "40 %"]).await;
    worker.progress(&job, json!({"percentage": 70, "message": "page 7"})).await.unwrap();
    top.wait_for(&["70 %", "page 7"]).await;
    worker.complete(&job, json!({"printed": 9})).await.unwrap();
    top.wait_for(&["✓ COMPLETED", r#"{"printed":9}"#]).await;
    top.resize(200, 50);
    top.wait_for(&["completed", "▶ job"]).await;
    top.resize(20, 5);
    top.send("\x1b");
    top.wait_for(&["running jobs (0)"]).await;
    top.resize(80, 24);
    top.wait_for(&["running jobs (0)", "no job is running"]).await;
    top.assert_nothing_wraps();
}

#[tokio::test(flavor = "multi_thread")]
async fn top_leaves_the_terminal_clean() {
    let shell = Shell::start(&[]).await;
    for (how, code) in [("q", 0), ("\x03", 0), ("TERM", 143), ("HUP", 129)] {
        let mut top = top(&shell, &shell.faena.url, (80, 24));
        top.wait_for(&["queues (0)", "no job is running"]).await;
        assert!(top.bytes().contains("\x1b[?1049h"), "it uses the alternate screen");
        match how {
            "TERM" | "HUP" => top.signal(how),
            key => top.send(key),
        }
        assert_eq!(top.wait_for_exit().await, code, "{how:?}");
        top.assert_is_restored();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn top_recovers_when_the_server_returns() {
    let mut shell = Shell::start(&[]).await;
    let proxy = Proxy::start(&shell.faena.url).await;
    let mut top = top(&shell, &proxy.url, (80, 24));
    top.wait_for(&["queues (0)"]).await;
    shell.faena.kill();
    proxy.refuse();
    proxy.disconnect_all();
    top.wait_for(&["no new data for", "queues (0)"]).await;
    shell.restart_after_kill(&[]).await;
    proxy.retarget(&shell.faena.url);
    proxy.forward();
    shell.faena.submit(json!({"type": "unknown.type", "queue": "after"})).await;
    let screen = top.wait_for(&["queues (1)", "after", "up "]).await;
    assert!(!screen.contains("no new data"), "{screen}");
    top.send("q");
    assert_eq!(top.wait_for_exit().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_text_does_not_reach_the_terminal() {
    let shell = Shell::start(&[]).await;
    let hostile = "\u{1b}]0;owned\u{7}\u{1b}[2J\u{9b}31m\u{202e}gnp.exe";
    let (mut worker, job) = run_with_progress(&shell.faena, hostile).await;
    let mut top = top(&shell, &shell.faena.url, (200, 50));
    top.wait_for(&[&job.id, r"\u001b]0;owned\u0007\u001b[2J\u009b31m\u202egnp.exe"]).await;
    let failure = crate::workers::failure("\u{1b}[?1049l\u{1b}[31mbroken");
    worker.fail(&job, failure).await.unwrap();
    top.send("\t\tf");
    top.wait_for(&["dead letters"]).await;
    let other = shell
        .faena
        .submit(json!({"type": "noop", "queue": "paper", "tags": ["\u{1f469}\u{200d}\u{1f4bb}", "e\u{301}\u{301}"]}))
        .await;
    shell.faena.wait_for_state(&other, "COMPLETED").await;
    top.send("a\t\r");
    top.wait_for(&["jobs of queue paper", &job.id, &other]).await;
    top.send("q");
    assert_eq!(top.wait_for_exit().await, 0);
    let bytes = top.bytes();
    for sequence in ["\x1b]0;", "\x1b[2J\u{9b}", "\u{9b}", "\u{202e}"] {
        assert!(!bytes.contains(sequence), "{sequence:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn top_says_what_is_missing() {
    let shell = Shell::start(&[]).await;
    let (code, _, stderr) = shell.run(&["top"]);
    assert_eq!((code, stderr.contains("needs a terminal")), (2, true), "{stderr}");
    let reading = shell.json(&["top", "--json"]);
    assert_eq!(reading["queues"]["queues"], json!([]));
    assert_eq!(reading["metrics"]["queues"]["dlq"], 0);
    assert_eq!(reading["running"]["total"], 0);
    assert!(reading["workers"]["workers"].is_array());
    let mut top = top(&shell, "http://127.0.0.1:9", (80, 24));
    assert_eq!(top.wait_for_exit().await, 3);
    top.assert_is_restored();
    assert!(top.screen().contains("cannot reach"), "{}", top.screen());
}
