//! The limits of the sandbox, and the configurations with which the adapters refuse to start.

use serde_json::json;

use super::{Adapter, Workshop, text};

/// Runs `test` in the sandbox, for a task whose plan and change are made up. Returns whether the test passed, and its log.
async fn run_test(test: &str, options: &[&str]) -> (bool, String) {
    let mut workshop = Workshop::start().await;
    workshop.script("test.sh", test);
    let heartbeat = ["--heartbeat", "1s"];
    workshop.start_sandbox("test.sh", &[options, &heartbeat].concat());
    let id = workshop.create("coding-task", false).await;
    let pull_request = format!("{}#main", workshop.repository());
    for (event, payload) in [
        ("resultado.plan_generado", json!({"planId": "p", "plan": "x"})),
        ("resultado.pr_generada", json!({"pullRequestUrl": pull_request})),
    ] {
        let (status, answer) = workshop
            .faena
            .post(&format!("/api/v1/tasks/{id}/events"), json!({"type": event, "payload": payload}))
            .await;
        assert_eq!(status.as_u16(), 200, "{answer}");
    }
    let task = crate::faena::eventually("the tests have ended", async || {
        let task = workshop.task(&id).await;
        let state = text(&task, "state");
        (state == "COMPLETADA" || !task["data"]["log"].is_null()).then_some(task)
    })
    .await;
    (text(&task, "state") == "COMPLETADA", text(&task["data"], "log"))
}

#[tokio::test(flavor = "multi_thread")]
async fn tests_that_take_too_long_are_killed_and_fail() {
    let (passed, log) = run_test("echo begin\nsleep 600\n", &["--time-limit", "2s"]).await;
    assert!(!passed && log.starts_with("begin\n") && log.contains("killed: it took longer than 2s"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn tests_that_write_too_much_are_killed_and_the_log_keeps_both_ends() {
    let (passed, log) = run_test("echo begin\nyes output\n", &["--max-output", "1MiB", "--max-log", "4KiB"]).await;
    assert!(!passed && log.starts_with("begin\n") && log.contains("bytes left out"), "{log}");
    assert!(log.ends_with("[killed: it wrote more than 1048576 bytes]") && log.len() < 5_000, "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn tests_that_use_too_much_memory_fail() {
    // One process that doubles a text until the limit stops it.
    let (passed, log) =
        run_test("x=x\nwhile :; do x=\"$x$x\"; done\n", &["--max-memory", "64MiB", "--time-limit", "60s"]).await;
    assert!(!passed, "{log}");
    assert!(!log.contains("took longer"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn tests_with_too_many_processes_are_killed() {
    let test = "for n in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do sleep 600 & done\nwait\n";
    let (passed, log) = run_test(test, &["--max-processes", "10", "--time-limit", "60s"]).await;
    assert!(!passed && log.contains("processes, more than the 10 allowed"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn tests_see_no_secret_and_no_network() {
    let mut workshop = Workshop::start().await;
    let environment = [("FAENA_URL", workshop.faena.url.as_str()), ("FAENA_WORKER_TOKEN", "fna_secret")];
    let test = workshop.script("test.sh", "[ -z \"${FAENA_WORKER_TOKEN:-}\" ]\n[ -z \"$(ls -A \"$HOME\")\" ]\n! cat /proc/net/route 2>/dev/null | grep -q 00000000\n");
    let allowed = workshop.path("git").display().to_string();
    let arguments = ["--workdir", "sandbox", "--allow-repository", &allowed, "--test-command", &test];
    let mut sandbox = Adapter::start_with(workshop.folder.path(), &environment, "sandbox", &arguments);
    sandbox.wait_for_log("isolated").await;
    let is_network_off = sandbox.log().contains("network=\"off\"");
    workshop.sandbox = Some(sandbox);
    let id = workshop.create("coding-task", false).await;
    let pull_request = format!("{}#main", workshop.repository());
    for (event, payload) in [
        ("resultado.plan_generado", json!({"planId": "p", "plan": "x"})),
        ("resultado.pr_generada", json!({"pullRequestUrl": pull_request})),
    ] {
        workshop.faena.post(&format!("/api/v1/tasks/{id}/events"), json!({"type": event, "payload": payload})).await;
    }
    // The script passes if there is no route out of the machine.
    if is_network_off {
        workshop.wait_for(&id, "COMPLETADA").await;
    }
    assert!(!workshop.sandbox.as_ref().unwrap().log().contains("fna_secret"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_adapter_with_a_wrong_configuration_says_what_to_do() {
    let workshop = Workshop::start().await;
    let allowed = workshop.path("git").display().to_string();
    let good =
        ["--workdir", "smith", "--allow-repository", &allowed, "--plan-command", "true", "--code-command", "true"];
    for (arguments, part) in [
        (&["smith"][..], "--allow-repository"),
        (
            &[
                "smith",
                "--workdir",
                "w",
                "--allow-repository",
                "relative",
                "--plan-command",
                "x",
                "--code-command",
                "x",
            ],
            "absolute path",
        ),
        (
            &["smith", "--workdir", "w", "--allow-repository", "/x", "--plan-command", "'x", "--code-command", "x"],
            "is not closed",
        ),
        (&[&["smith"][..], &good, &["--transport", "rabbitmq"]].concat(), "FAENA_BROKER_URL is not set"),
        (&[&["smith"][..], &good, &["--url", "nonsense"]].concat(), "not a valid server URL"),
        (&["gateway", "--listen", "0.0.0.0:0"], "set FAENA_GATEWAY_TOKEN"),
    ] {
        let output = crate::faena::run(workshop.folder.path(), &[], &[&["adapter"][..], arguments].concat());
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {stderr}");
        assert!(stderr.contains(part), "{arguments:?}: {stderr}");
    }
    let mut first = Adapter::start(workshop.folder.path(), &workshop.faena.url, "smith", &good);
    first.wait_for_log("connected").await;
    let mut second = Adapter::start(workshop.folder.path(), &workshop.faena.url, "smith", &good);
    assert_eq!(second.wait_for_exit().await, 2);
    assert!(second.log().contains("another adapter uses this folder"), "{}", second.log());
}
