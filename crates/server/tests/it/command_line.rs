//! The command line against a real server.
//!
//! Exit codes: 0 success, 1 rejected by the server or job failed, 2 wrong usage, 3 server unreachable.

use std::{io::Write, path::Path, process::Stdio};

use serde_json::{Value, json};

use crate::{
    faena::{Faena, command, eventually, run},
    ports::free_port,
    shell::{Shell, output_parts},
};

#[tokio::test(flavor = "multi_thread")]
async fn a_job_is_submitted_watched_and_shown() {
    let shell = Shell::start(&[]).await;
    let id =
        shell.stdout(&["enqueue", "sleep", r#"{"ms": 1}"#, "--queue", "quiet", "--priority", "high", "--tag", "a"]);
    let id = id.trim();
    shell.faena.wait_for_state(id, "COMPLETED").await;
    let shown = shell.stdout(&["jobs", "show", id]);
    for part in [
        id,
        "sleep  COMPLETED",
        "quiet (HIGH)",
        r#"{"ms": 1}"#,
        "attempt          1\n",
        "0 of 3",
        "created",
        "completed",
    ] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    let second = shell.stdout(&[
        "enqueue",
        "unknown.type",
        "--tag",
        "red",
        "--tag",
        "blue",
        "--after",
        id,
        "--unique-key",
        "u-1",
        "--concurrency-key",
        "c-1",
        "--idempotency-key",
        "i-1",
        "--webhook-url",
        "https://example.org/hook",
    ]);
    let shown = shell.stdout(&["jobs", "show", second.trim()]);
    for part in ["red, blue", id, "u-1", "c-1", "i-1", "https://example.org/hook"] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    let watched = shell.stdout(&["jobs", "watch", id]);
    assert!(watched.ends_with(&format!("{id} COMPLETED\n")), "{watched}");

    let created = shell.json(&["enqueue", "noop", "--json", "--correlation-id", "abc"]);
    assert_eq!(created["correlationId"], "abc");
    let watched = shell.stdout(&["enqueue", "noop", "--watch", "--json"]);
    let last: Value = serde_json::from_str(watched.lines().last().unwrap()).unwrap();
    assert_eq!(last["status"], "COMPLETED");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_exit_code_of_watching_a_job_says_how_it_finished() {
    let shell = Shell::start(&[]).await;
    let (code, stdout, stderr) = shell.run(&["enqueue", "http.request", r#"{"url": "http://127.0.0.1/"}"#, "--watch"]);
    assert_eq!((code, stderr.as_str()), (1, ""), "{stdout}");
    assert!(stdout.contains("FAILED: the payload is not valid: url: \"127.0.0.1\" is a private"), "{stdout}");
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_are_listed_as_a_table_or_as_json() {
    let shell = Shell::start(&[]).await;
    assert_eq!(shell.stdout(&["jobs", "list"]), "no jobs; submit one with \"faena enqueue TYPE\"\n");
    assert_eq!(shell.stdout(&["jobs", "list", "--queue", "x"]), "no jobs match\n");
    for n in 0..3 {
        shell.stdout(&["enqueue", "unknown.type", "--queue", &format!("q{n}")]);
    }
    let table = shell.stdout(&["jobs", "list", "--limit", "2"]);
    assert!(table.contains("unknown.type") && table.contains("QUEUED") && table.contains("q2"), "{table}");
    assert!(!table.contains("q0"), "newest first: {table}");
    let cursor = table.rsplit("--cursor ").next().unwrap().trim();
    let rest = shell.stdout(&["jobs", "list", "--cursor", cursor]);
    assert!(rest.contains("q0") && !rest.contains("q1"), "{rest}");
    let list = shell.json(&["jobs", "list", "--json", "--status", "queued", "--queue", "q1"]);
    assert_eq!((&list["total"], &list["jobs"][0]["queue"]), (&json!(1), &json!("q1")));
    shell.faena.submit(json!({"type": "unknown.type", "name": "Own name", "priority": "LOW"})).await;
    let sorted = shell.json(&["jobs", "list", "--json", "--sort", "priority", "--order", "asc", "--limit", "2"]);
    let order: Vec<&Value> = sorted["jobs"].as_array().unwrap().iter().map(|job| &job["queue"]).collect();
    assert_eq!(order, ["default", "q0"], "the lowest priority first, then the oldest");
    assert_eq!(shell.json(&["jobs", "list", "--json", "--name", "Own name"])["total"], 1);
    assert_eq!(shell.json(&["jobs", "list", "--json", "--priority", "low,normal", "-q", "own name"])["total"], 1);
    assert_eq!(shell.json(&["jobs", "list", "--json", "--worker-id", "w", "--error", "x"])["total"], 0);
    let (code, _, stderr) = shell.run(&["jobs", "list", "--status", "asleep"]);
    assert_eq!(code, 1);
    assert!(stderr.starts_with("faena: --status: must be one of PENDING"), "{stderr}");
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_are_cancelled_and_retried() {
    let shell = Shell::start(&[]).await;
    let id = shell.stdout(&["enqueue", "unknown.type"]);
    let id = id.trim();
    assert_eq!(shell.stdout(&["jobs", "cancel", id]), format!("{id} was cancelled\n"));
    let (code, stdout, stderr) = shell.run(&["jobs", "cancel", id]);
    assert_eq!((code, stdout.as_str()), (1, ""));
    assert!(stderr.starts_with("faena: ") && stderr.contains("(INVALID_TRANSITION)"), "{stderr}");
    let retried = shell.json(&["jobs", "retry", id, "--json"]);
    assert_eq!(retried, json!({"id": id, "status": "PENDING", "retryCount": 0}));
    shell.faena.wait_for_state(id, "QUEUED").await;
    let body = json!({"type": "sleep", "payload": {"ms": 600000}, "timeoutMs": 20, "retryDelay": 3600000, "maxDelay": 3600000});
    let retrying = shell.faena.submit(body).await;
    shell.faena.wait_for_state(&retrying, "RETRYING").await;
    assert!(shell.stdout(&["jobs", "show", &retrying]).contains("next attempt"));
    assert_eq!(shell.stdout(&["jobs", "retry", &retrying]), format!("{retrying} starts its next attempt now\n"));
    eventually("the second attempt fails", async || {
        (shell.faena.job(&retrying).await["retryCount"] == 2).then_some(())
    })
    .await;
    let running = shell.stdout(&["enqueue", "sleep", r#"{"ms": 600000}"#]);
    shell.faena.wait_for_state(running.trim(), "PROCESSING").await;
    assert_eq!(shell.stdout(&["jobs", "cancel", running.trim()]), format!("{} was cancelled\n", running.trim()));
}

#[tokio::test(flavor = "multi_thread")]
async fn webhooks_are_listed_shown_and_redelivered() {
    let shell = Shell::start(&[("FAENA_WEBHOOK_ALLOW", "127.0.0.0/8"), ("FAENA_WEBHOOK_ATTEMPTS", "1")]).await;
    let free = format!("127.0.0.1:{}", free_port());
    let body = json!({"name": "noop", "webhookUrl": format!("http://{free}/hook")});
    let request = shell.faena.http.post(format!("{}/api/v1/jobs", shell.faena.url)).json(&body);
    let job = request.send().await.unwrap().json::<Value>().await.unwrap()["id"].as_str().unwrap().to_owned();
    let failed = eventually("the webhook has failed", async || {
        let list = shell.json(&["webhooks", "list", "--json", "--state", "failed", "--job", &job]);
        Some(list["webhooks"].get(0)?["id"].as_str()?.to_owned())
    })
    .await;
    let table = shell.stdout(&["webhooks", "list", "--host", &free.to_string()]);
    assert!(table.contains(&failed) && table.contains("FAILED") && table.contains(&format!("{free}/hook")), "{table}");
    let shown = shell.stdout(&["webhooks", "show", &failed]);
    for part in [&job, "FAILED", "connection refused", r#""status":"completed""#] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    let printed = shell.stdout(&["webhooks", "redeliver", &failed]);
    assert_eq!(printed, format!("{failed} is being redelivered to http://{free}/hook\n"));
    eventually("it was redelivered", async || {
        let shown = shell.json(&["webhooks", "show", "--json", &failed]);
        (shown["attempts"] == 2 && shown["state"] == "FAILED").then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_go_to_stderr_with_their_exit_code() {
    let shell = Shell::start(&[]).await;
    let unknown = "018f0000-0000-7000-8000-000000000000";
    let free = format!("127.0.0.1:{}", free_port());
    let unreachable = format!("http://{free}");
    let with_tls = shell.faena.url.replace("http://", "https://");
    for (arguments, code, part) in [
        (vec!["jobs", "show", unknown], 1, "NOT_FOUND"),
        (vec!["jobs", "show", "abc"], 2, "is not the id of a job; pass the id, or at least its first 4 characters"),
        (vec!["jobs", "watch", unknown], 1, "NOT_FOUND"),
        (vec!["webhooks", "show", unknown], 1, "NOT_FOUND"),
        (vec!["webhooks", "redeliver", unknown], 1, "NOT_FOUND"),
        (vec!["jobs", "retry", unknown], 1, "NOT_FOUND"),
        (vec!["enqueue", "noop", "--priority", "huge"], 1, "--priority: must be LOW"),
        (vec!["enqueue", "noop", "[1]"], 1, "PAYLOAD: must be a JSON object"),
        (vec!["enqueue", "noop", "{"], 2, "PAYLOAD: not valid JSON at line 1, column 1"),
        (vec!["enqueue"], 2, "Usage"),
        (vec!["jobs"], 2, "Usage"),
        (vec!["no-such-command"], 2, "unrecognized subcommand"),
        (vec!["jobs", "list", "--limit", "many"], 2, "invalid value"),
        (vec!["jobs", "list", "--url", "localhost:3000"], 2, "not a valid server URL: \"localhost:3000\""),
        (vec!["jobs", "list", "--url", &unreachable], 3, "connection refused; start the server with \"faena serve\""),
        (vec!["jobs", "list", "--url", "http://no-such-host.invalid"], 3, "cannot resolve the host name"),
        (vec!["jobs", "list", "--url", &with_tls], 3, "the server does not use TLS; write http:// instead of https://"),
        (vec!["enqueue", "noop", "--at", "soon"], 1, "--at: must be a time like"),
        (vec!["limits", "reset", "--queue", "nope"], 1, "there is no limit for queue nope"),
        (vec!["queues", "resume", "nope"], 1, "no queue \"nope\""),
        (vec!["enqueue", "noop", "--url", &unreachable], 3, "faena serve"),
    ] {
        let (found, stdout, stderr) = shell.run(&arguments);
        assert_eq!((found, stdout.as_str()), (code, ""), "{arguments:?}: {stderr}");
        assert!(stderr.contains(part), "{arguments:?}: {stderr}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_payload_is_stored_unchanged() {
    let shell = Shell::start(&[]).await;
    let payload = r#"{"z":1,"a":12345678901234567890123,"exact":0.10,"text":"ñ \u0000"}"#;
    let mut child = command(shell.folder.path())
        .args(["enqueue", "unknown.type", "-", "--url", &shell.faena.url])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(payload.as_bytes()).unwrap();
    let (code, id, _) = output_parts(&child.wait_with_output().unwrap());
    assert_eq!(code, 0);
    let shown = shell.stdout(&["jobs", "show", id.trim(), "--json"]);
    assert!(shown.contains(payload), "{shown}");
    let listed = shell.stdout(&["jobs", "list", "--json"]);
    assert!(listed.contains(payload), "{listed}");
}

#[test]
fn the_effective_configuration_is_shown_with_its_sources() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("faena.toml"), "[server]\nport = 4000\n").unwrap();
    let environment = [
        ("LOG_LEVEL", "debug"),
        ("DATABASE_URL", "postgres://user:hunter2@127.0.0.1/faena"),
        ("FAENA_NODE_LEASE", "1m30s"),
    ];
    let (code, text, stderr) = output_parts(&run(folder.path(), &environment, &["config", "--json"]));
    assert_eq!((code, stderr.as_str()), (0, ""));
    let config: Value = serde_json::from_str(&text).unwrap();
    for (key, value, source) in [
        ("server.port", "4000", "faena.toml, line 2"),
        ("server.host", "127.0.0.1", "default"),
        ("log.level", "debug", "environment LOG_LEVEL"),
        ("node.lease", "1m30s", "environment FAENA_NODE_LEASE"),
        ("database.url", "postgres://user:***@127.0.0.1/faena", "environment DATABASE_URL"),
    ] {
        assert_eq!(config[key], json!({"value": value, "source": source}), "{key}");
    }
    let (code, table, _) =
        output_parts(&run(folder.path(), &environment, &["config", "--database-url", "sqlite:x.db"]));
    assert_eq!(code, 0);
    assert!(table.contains("sqlite:x.db") && table.contains("--database-url"), "{table}");
    assert!(!text.contains("hunter2") && !table.contains("hunter2"));
    assert!(!folder.path().join("x.db").exists(), "a file was created");
}

#[test]
fn the_example_configuration_is_valid() {
    let folder = tempfile::tempdir().unwrap();
    let (code, text, _) = output_parts(&run(folder.path(), &[], &["config", "--example"]));
    assert_eq!(code, 0);
    let stored = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../faena.example.toml");
    assert_eq!(text, std::fs::read_to_string(stored).unwrap());
    std::fs::write(folder.path().join("faena.toml"), text).unwrap();
    assert_eq!(run(folder.path(), &[], &["config"]).status.code(), Some(0));
}

#[test]
fn completions_are_printed_for_every_shell() {
    let folder = tempfile::tempdir().unwrap();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let (code, text, stderr) = output_parts(&run(folder.path(), &[], &["completions", shell]));
        assert_eq!((code, stderr.as_str()), (0, ""), "{shell}");
        assert!(text.contains("FAENA_COMPLETE") && text.contains("faena"), "{shell}");
    }
    let (code, _, stderr) = output_parts(&run(folder.path(), &[], &["completions", "cobol"]));
    assert_eq!(code, 2, "{stderr}");
    let script = folder.path().join("faena.bash");
    std::fs::write(&script, run(folder.path(), &[], &["completions", "bash"]).stdout).unwrap();
    assert!(std::process::Command::new("bash").arg("-n").arg(&script).status().unwrap().success());
}

#[test]
fn help_and_version_go_to_stdout_with_exit_code_0() {
    let folder = tempfile::tempdir().unwrap();
    for (arguments, part) in [(["--help"], "Durable job server"), (["--version"], "faena ")] {
        let (code, stdout, stderr) = output_parts(&run(folder.path(), &[], &arguments));
        assert_eq!((code, stderr.as_str()), (0, ""));
        assert!(stdout.contains(part), "{stdout}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_empty_list_prints_a_message() {
    let shell = Shell::start(&[]).await;
    for (arguments, text) in [
        (vec!["schedules", "list"], "no schedules; create one with \"faena schedules create\""),
        (vec!["schedules", "list", "-q", "x"], "no schedules match"),
        (vec!["webhooks", "list"], "no webhooks; a job with --webhook-url creates one when it finishes"),
        (vec!["queues", "list"], "no queues; a queue exists as soon as a job or a setting names it"),
        (vec!["dlq", "list"], "no dead letters"),
        (vec!["dlq", "retry", "--search", "x", "--dry-run"], "no dead letters match (dry run)"),
        (vec!["outbox", "sinks"], "no sinks; add a [[sink]] to the configuration of the server"),
        (vec!["outbox", "dead"], "no rejected events"),
        (vec!["audit"], "no actions yet"),
        (vec!["audit", "--actor", "ana"], "no actions match"),
    ] {
        assert_eq!(shell.stdout(&arguments), format!("{text}\n"), "{arguments:?}");
    }
    assert!(shell.stdout(&["keys", "list"]).starts_with("no API keys, so every caller on this machine"));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_audit_log_counts_jobs_only_for_actions_on_jobs() {
    let shell = Shell::start(&[]).await;
    let id = shell.stdout(&["enqueue", "unknown.type"]);
    shell.stdout(&["queues", "pause", "mail"]);
    shell.stdout(&["jobs", "cancel", id.trim()]);
    let table = shell.stdout(&["audit"]);
    let line = |action: &str| table.lines().find(|line| line.contains(action)).unwrap().to_owned();
    assert!(line("queue.pause").ends_with("mail"), "{table}");
    assert!(line("job.cancel").contains(&format!("{}  1 ", id.trim())), "{table}");
}

#[test]
fn a_closed_pipe_is_not_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let script = format!("set -o pipefail; '{}' config --example | head -n 1", env!("CARGO_BIN_EXE_faena"));
    let output = std::process::Command::new("bash").args(["-c", &script]).current_dir(folder.path()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(output.stderr.is_empty(), "{output:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_as_a_worker_keeps_its_whole_result_and_leaves_no_process_behind() {
    let folder = tempfile::tempdir().unwrap();
    let faena = Faena::start(folder.path(), &[]).await;
    let scripts = [
        ("small", "cat"),
        ("large", "head -c 600000 /dev/zero | tr '\\0' x"),
        ("late", "sleep 3600 & echo $! >pid.tmp; mv pid.tmp pid; wait"),
    ];
    let mut workers = scripts.map(|(kind, script)| {
        let mut worker = command(folder.path());
        worker.args(["worker", "--url", &faena.url, "--type", kind, "--", "sh", "-c", script]).stderr(Stdio::null());
        worker.spawn().unwrap()
    });
    let small = faena.submit(json!({"name": "small", "payload": {"n": 1}})).await;
    assert_eq!(faena.wait_for_state(&small, "COMPLETED").await["result"], json!({"n": 1}));
    let large = faena.submit(json!({"name": "large"})).await;
    let job = faena.wait_for_state(&large, "FAILED").await;
    assert_eq!((&job["error"], &job["retryCount"]), (&json!("the output is larger than 524288 bytes"), &json!(0)));
    let late = faena.submit(json!({"name": "late", "timeoutMs": 1_500, "maxRetries": 0})).await;
    let pid = folder.path().join("pid");
    let pid = eventually("the command runs", async || std::fs::read_to_string(&pid).ok()).await;
    let job = faena.wait_for_state(&late, "FAILED").await;
    assert_eq!(job["errorReason"], "timeout", "{job:#}");
    let child = std::path::PathBuf::from(format!("/proc/{}", pid.trim()));
    eventually("its child has ended", async || crate::stop::has_ended(&child).then_some(())).await;
    for worker in &mut workers {
        worker.kill().unwrap();
        worker.wait().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_as_a_worker_reports_its_connection() {
    let folder = tempfile::tempdir().unwrap();
    let mut faena = Faena::start(folder.path(), &[]).await;
    let log = folder.path().join("worker.log");
    let mut worker = command(folder.path());
    worker.args(["worker", "--url", &faena.url, "--type", "greet", "--", "cat"]).stdin(Stdio::null());
    let mut worker = worker.stderr(std::fs::File::create(&log).unwrap()).spawn().unwrap();
    let logged = async |part: &str| {
        let read = async || std::fs::read_to_string(&log).ok().filter(|text| text.contains(part));
        eventually(part, read).await
    };
    let text = logged("connected, waiting for jobs").await;
    assert!(text.contains("types=\"greet\"") && text.contains(&faena.url), "{text}");
    faena.kill();
    logged("WARN connection lost, reconnecting").await;
    logged("WARN cannot connect, retrying").await;
    assert!(std::process::Command::new("kill").arg(worker.id().to_string()).status().unwrap().success());
    assert!(worker.wait().unwrap().success());
    logged("INFO stopped").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_are_shown_with_their_version() {
    let shell = Shell::start(&[]).await;
    let mut worker = command(shell.folder.path());
    worker.args([
        "worker",
        "--url",
        &shell.faena.url,
        "--type",
        "greet",
        "--worker-version",
        "1.4.2-rc.1",
        "--",
        "cat",
    ]);
    let mut worker = worker.stderr(Stdio::null()).spawn().unwrap();
    let list = eventually("both workers are listed", async || {
        Some(shell.stdout(&["workers", "list"])).filter(|list| list.lines().count() == 3)
    })
    .await;
    let line = |part: &str| list.lines().find(|line| line.contains(part)).unwrap().trim_end();
    assert!(list.lines().next().unwrap().ends_with("version"), "{list}");
    assert!(
        line("websocket").ends_with("1.4.2-rc.1") && line("built-in").ends_with(env!("CARGO_PKG_VERSION")),
        "{list}"
    );
    let id = line("websocket").split(' ').next().unwrap();
    let shown = shell.stdout(&["workers", "show", id]);
    assert!(shown.contains("version       1.4.2-rc.1"), "{shown}");
    worker.kill().unwrap();
    worker.wait().unwrap();
    let silent = json!({"workerId": "silent", "capabilities": ["x"]});
    shell.faena.post("/api/v1/workers/register", silent).await;
    assert!(shell.stdout(&["workers", "show", "silent"]).contains("version       unknown"));
}

#[tokio::test(flavor = "multi_thread")]
async fn queues_are_listed_changed_paused_and_resumed() {
    let shell = Shell::start(&[]).await;
    shell.stdout(&["enqueue", "unknown.type", "--queue", "mail", "--priority", "high"]);
    let set = shell.stdout(&["queues", "set", "mail", "--concurrency", "2", "--rate", "100/1m", "--fairness", "key"]);
    for part in
        ["queue         mail", "1 (0 critical, 1 high", "concurrency   2", "100 starts per 1 min", "round robin"]
    {
        assert!(set.contains(part), "{part}: {set}");
    }
    let paused = shell.stdout(&["queues", "pause", "mail", "--reason", "the SMTP server is down"]);
    assert!(
        paused.contains("paused        by loopback since") && paused.contains(": the SMTP server is down"),
        "{paused}"
    );
    let table = shell.stdout(&["queues", "list"]);
    assert!(table.contains("mail") && table.contains("paused by loopback, concurrency 2"), "{table}");
    assert!(!shell.stdout(&["queues", "resume", "mail"]).contains("paused"));
    let queue = shell.json(&["queues", "show", "mail", "--json"]);
    assert_eq!(
        (&queue["depth"]["HIGH"], &queue["paused"], &queue["concurrency"]),
        (&json!(1), &Value::Null, &json!(2))
    );
    shell.stdout(&["queues", "set", "mail", "--concurrency", "none"]);
    assert_eq!(shell.json(&["queues", "show", "mail", "--json"])["concurrency"], Value::Null);

    let (code, _, stderr) = shell.run(&["queues", "set", "mail", "--concurrency", "0"]);
    assert!(code == 1 && stderr.contains("to stop a queue, pause it"), "{stderr}");
    let (code, _, stderr) = shell.run(&["queues", "set", "mail", "--concurrency", "many"]);
    assert!(code == 2 && stderr.contains("--concurrency: not a number or \"none\": \"many\""), "{stderr}");
    let (code, _, stderr) = shell.run(&["queues", "show", "nowhere"]);
    assert!(code == 1 && stderr.contains("(NOT_FOUND)"), "{stderr}");
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_are_listed_and_changed() {
    let shell = Shell::start(&[]).await;
    let table = shell.stdout(&["limits", "set", "--key", "tenant-*", "--concurrency", "3", "--rate", "30/10s"]);
    assert!(table.starts_with("scope") && table.contains("30 starts per 10 s"), "{table}");
    assert!(table.contains("tenant-*") && table.contains("loopback"), "{table}");
    shell.stdout(&["limits", "set", "--system", "--concurrency", "2"]);
    let limits = shell.json(&["limits", "list", "--json"]);
    let system = limits["limits"].as_array().unwrap().iter().find(|limit| limit["scope"] == "system").unwrap();
    assert_eq!((&system["concurrency"], &system["origin"]), (&json!(2), &json!("api")));
    let (code, _, stderr) = shell.run(&["limits", "set", "--system"]);
    assert!(code == 2 && stderr.contains("nothing to change; pass --concurrency or --rate"), "{stderr}");
    let (code, _, _) = shell.run(&["limits", "set", "--system", "--key", "a", "--concurrency", "2"]);
    assert_eq!(code, 2, "two scopes");
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_are_listed_retried_and_deleted() {
    let shell = Shell::start(&[]).await;
    let mut ids = Vec::new();
    for queue in ["a", "a", "b"] {
        let id = shell.stdout(&["enqueue", "http.request", r#"{"url": "http://127.0.0.1/"}"#, "--queue", queue]);
        shell.faena.wait_for_state(id.trim(), "FAILED").await;
        ids.push(id.trim().to_owned());
    }
    let table = shell.stdout(&["dlq", "list"]);
    assert!(table.contains(&ids[0]) && table.ends_with("3 of 3 dead letters\n"), "{table}");
    assert_eq!(shell.json(&["dlq", "list", "--error", "PRIVATE", "--queue", "b", "--json"])["total"], 1);
    assert_eq!(shell.json(&["dlq", "list", "--name", "http.request", "--priority", "low", "--json"])["total"], 0);
    let shown = shell.stdout(&["dlq", "show", &ids[0]]);
    assert!(shown.contains("  runs\n") && shown.contains("FAILED  the payload is not valid"), "{shown}");
    let stats = shell.stdout(&["dlq", "stats"]);
    assert!(stats.starts_with("3 dead letters\nby type\n         3  http.request\n"), "{stats}");

    assert_eq!(shell.stdout(&["dlq", "retry", &ids[0]]), format!("{} will run again; it is QUEUED now\n", ids[0]));
    shell.faena.wait_for_state(&ids[0], "FAILED").await;
    let dry = shell.stdout(&["dlq", "delete", "--queue", "a", "--dry-run"]);
    assert!(dry.ends_with("2 dead letters would be deleted (dry run)\n"), "{dry}");
    assert_eq!(shell.stdout(&["dlq", "delete", "--queue", "a"]), "2 dead letters deleted\n");
    let slow = shell.stdout(&["dlq", "retry", "--all", "--per-second", "10"]);
    assert!(slow.starts_with("1 dead letter is being retried, 10 per second (bulk action "), "{slow}");
    eventually("the job is retried", async || {
        let job = shell.faena.job(&ids[2]).await;
        let is_retried = job["executionLog"].to_string().contains("by a bulk action");
        (is_retried && job["status"] == "FAILED").then_some(())
    })
    .await;
    assert_eq!(shell.stdout(&["dlq", "delete", &ids[2]]), format!("{} was deleted\n", ids[2]));
    assert_eq!(shell.stdout(&["dlq", "list"]), "no dead letters\n");

    let (code, _, stderr) = shell.run(&["dlq", "retry"]);
    assert!(code == 2 && stderr.contains("missing a job id or a filter"), "{stderr}");
    let (code, _, stderr) = shell.run(&["dlq", "delete", &ids[2], "--all"]);
    assert!(code == 2 && stderr.contains("not both"), "{stderr}");
    let (code, _, stderr) = shell.run(&["dlq", "show", &ids[2]]);
    assert!(code == 1 && stderr.contains("(NOT_FOUND)"), "{stderr}");

    let audit = shell.stdout(&["audit"]);
    for part in ["dead_letter.retry", "bulk.delete", "bulk.retry.end", "dead_letter.delete", "loopback"] {
        assert!(audit.contains(part), "{part}: {audit}");
    }
    let entries = shell.json(&["audit", "--action", "dead_letter.delete", "--json"]);
    assert_eq!(entries["entries"][0]["target"], ids[2]);
    assert!(shell.stdout(&["audit", "--limit", "1"]).contains("next page: --cursor"));
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_dependencies_lists_the_parents_and_children_of_a_job() {
    let shell = Shell::start(&[]).await;
    let parent = shell.faena.submit(json!({"name": "extract", "scheduledAt": "2099-01-01T00:00:00Z"})).await;
    let job = shell.faena.submit(json!({"name": "load", "dependsOn": [parent]})).await;
    let child = shell.faena.submit(json!({"name": "report", "dependsOn": [job]})).await;
    let printed = shell.stdout(&["jobs", "dependencies", &job]);
    let positions = [&parent, &job, &child].map(|id| printed.find(id.as_str()));
    assert!(positions.is_sorted() && positions[0].is_some(), "{printed}");
    assert!(printed.contains("-1") && printed.contains("+1") && printed.contains("extract"), "{printed}");
    let printed = shell.json(&["jobs", "dependencies", &job, "--json"]);
    assert_eq!((printed["jobs"].as_array().unwrap().len(), &printed["hidden"]), (3, &json!(0)));
    let alone = shell.faena.submit(json!({"name": "noop", "payload": {"to": "Ada"}})).await;
    assert!(shell.stdout(&["jobs", "dependencies", &alone]).contains("depends on no job"));
    let found = shell.json(&["jobs", "list", "--payload", "ada", "--json"]);
    assert_eq!((&found["total"], &found["jobs"][0]["id"]), (&json!(1), &json!(alone)));
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_why_explains_a_job() {
    let shell = Shell::start(&[]).await;
    shell.stdout(&["queues", "pause", "mail", "--reason", "the SMTP server is down"]);
    let id = shell.stdout(&["enqueue", "noop", "--queue", "mail"]);
    let id = id.trim();
    let printed = shell.stdout(&["jobs", "why", id]);
    assert!(
        printed.starts_with(&format!("{id} is QUEUED\n  queue_paused     queue \"mail\" was paused by loopback")),
        "{printed}"
    );
    assert!(printed.contains("(the SMTP server is down)"), "{printed}");
    assert_eq!(shell.json(&["jobs", "why", id, "--json"])["reasons"][0]["code"], "queue_paused");
    shell.stdout(&["queues", "resume", "mail"]);
    shell.faena.wait_for_state(id, "COMPLETED").await;
    assert!(shell.stdout(&["jobs", "why", id]).contains("it completed at"));
    assert_eq!(shell.run(&["jobs", "why", "01900000-0000-7000-8000-000000000000"]).0, 1);
}
