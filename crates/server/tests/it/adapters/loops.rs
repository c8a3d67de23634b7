//! The loop of a coding task: plan, approval, code, tests, corrections.

use serde_json::json;

use super::{Workshop, agent, text, wait_until_gone};
use crate::faena::eventually;

#[tokio::test(flavor = "multi_thread")]
async fn smith_and_sandbox_need_only_a_key_of_the_scope_worker() {
    let mut workshop = Workshop::start().await;
    workshop.require_keys("worker").await;
    workshop.start_smith("plan.sh", "code.sh", &[]);
    workshop.start_sandbox("test.sh", &[]);
    let id = workshop.create("coding-task", true).await;
    workshop.wait_for_plan(&id, "").await;
    workshop.decide(&id, "approve", "go").await;
    workshop.wait_for(&id, "COMPLETADA").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_goes_from_the_plan_through_a_rejection_and_a_failed_test_to_the_end() {
    let mut workshop = Workshop::start().await;
    // The tests of the sandbox have an empty home folder, so only the scripts of the smith count their runs.
    workshop.start_smith("plan.sh", "code.sh", &[]);
    workshop.start_sandbox("test.sh", &[]);
    let id = workshop.create("coding-task", true).await;

    let first = workshop.wait_for_plan(&id, "").await;
    workshop.decide(&id, "reject", "in smaller steps").await;
    workshop.wait_for_plan(&id, &first).await;
    let task = workshop.task(&id).await;
    let plan = text(&task["data"], "plan");
    assert!(plan.contains("add a greeting") && plan.ends_with("in smaller steps"), "{plan}");
    workshop.decide(&id, "approve", "go").await;

    let task = workshop.wait_for(&id, "COMPLETADA").await;
    assert_eq!(task["counters"], json!({"correcciones": 1, "replanes": 1}));
    let branch = format!("faena/{id}");
    assert_eq!(text(&task["data"], "pullRequestUrl"), format!("{}#{branch}", workshop.repository()));
    assert_eq!(workshop.lines("plans").len(), 2);
    assert_eq!(workshop.lines("codes"), ["written", "corrected"]);
    let request = workshop.lines("last-request").join("\n");
    assert!(request.contains("# Correction") && request.contains("the greeting is helo"), "{request}");
    let transitions = workshop.transitions(&id).await;
    for (event, count) in [
        ("resultado.plan_generado", 2),
        ("resultado.pr_generada", 2),
        ("resultado.integracion_finalizada", 2),
        ("approval.denied", 1),
        ("approval.granted", 1),
    ] {
        assert_eq!(transitions.iter().filter(|found| *found == event).count(), count, "{event}: {transitions:?}");
    }
    // Both rounds are commits of one branch, and the original is unchanged.
    assert_eq!(workshop.git(&["-C", "git/origin.git", "rev-list", "--count", &format!("main..{branch}")]), "2");
    assert_eq!(workshop.git(&["-C", "git/origin.git", "show", &format!("{branch}:greeting")]), "hello");
    assert_eq!(workshop.git(&["-C", "git/origin.git", "ls-tree", "--name-only", "main"]), "README");
    let message = workshop.git(&["-C", "git/origin.git", "log", "-1", "--format=%B", &branch]);
    assert!(message.starts_with("add a greeting") && message.contains(&format!("Faena-Task: {id}")), "{message}");
    // Nothing is left of a task that has ended.
    eventually("the files of the task are removed", async || {
        let is_gone = |name: &str| !workshop.path(&format!("{name}/tasks/{id}")).exists();
        (is_gone("smith") && is_gone("sandbox")).then_some(())
    })
    .await;
    assert_eq!(workshop.smith.as_mut().unwrap().stop().await, 0);
    assert_eq!(workshop.sandbox.as_mut().unwrap().stop().await, 0);
}

/// The checkout around the workdir has the same commits, so git could take it for the worktree of the task.
#[tokio::test(flavor = "multi_thread")]
async fn a_workdir_inside_a_checkout_of_the_same_repository_leaves_the_checkout_alone() {
    let mut workshop = Workshop::start().await;
    std::fs::write(workshop.path("seed/README"), "changed and not committed\n").unwrap();
    std::fs::write(workshop.path("seed/notes"), "not even added\n").unwrap();
    let before = workshop.git(&["-C", "seed", "symbolic-ref", "HEAD"]);
    workshop.start_smith_in("seed/smith", "plan.sh", "code.sh", &[]);
    workshop.start_sandbox("test.sh", &[]);
    let id = workshop.create("coding-task", false).await;
    workshop.wait_for(&id, "COMPLETADA").await;
    assert_eq!(workshop.lines("seed/README"), ["changed and not committed"]);
    assert_eq!(workshop.lines("seed/notes"), ["not even added"]);
    assert_eq!(workshop.git(&["-C", "seed", "symbolic-ref", "HEAD"]), before);
}

#[tokio::test(flavor = "multi_thread")]
async fn corrections_that_do_not_help_end_in_a_logical_failure() {
    let mut workshop = Workshop::start().await;
    // Fails with another text each time: the same failure twice would end the loop early.
    workshop.script("code.sh", "cat >>greeting\necho x >>\"$HOME/codes\"\n");
    workshop.script("test.sh", "wc -l <greeting | tr '0-9' 'a-j'\nexit 1\n");
    workshop.start_smith("plan.sh", "code.sh", &[]);
    workshop.start_sandbox("test.sh", &[]);
    let id = workshop.create("coding-task", false).await;
    let task = workshop.wait_for(&id, "FALLIDA_LOGICA").await;
    assert_eq!(task["status"], "failed");
    assert_eq!(workshop.lines("codes").len(), 4, "one change and three corrections");
}

#[tokio::test(flavor = "multi_thread")]
async fn heartbeats_keep_a_long_run_alive_and_questions_are_answered() {
    let mut workshop = Workshop::start().await;
    let short = [("silence: 5m", "silence: 20s"), ("every: 2m", "every: 5s")];
    workshop.register_variant("short-silence", &short).await;
    // Longer than two silence limits. It prints nothing, so only heartbeats keep it alive.
    workshop.script("code.sh", "sleep 45\necho hello >greeting\n");
    workshop.start_smith("plan.sh", "code.sh", &["--machine", "short-silence", "--heartbeat", "2s"]);
    workshop.start_sandbox("test.sh", &["--machine", "short-silence", "--heartbeat", "2s"]);
    let id = workshop.create("short-silence", false).await;
    workshop.wait_for(&id, "EJECUTANDO_CODIGO.MONITOREANDO_EJECUCION").await;
    workshop.wait_for(&id, "COMPLETADA").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_agent_and_one_without_progress_end_in_a_failure_of_infrastructure() {
    let mut workshop = Workshop::start().await;
    let no_progress = [("no_progress: 45m", "no_progress: 4s")];
    workshop.register_variant("stuck", &no_progress).await;
    workshop.register_variant("total", &[("total: 6h", "total: 4s"), ("no_progress: 45m, ", "")]).await;
    workshop.register_variant("silent", &[("silence: 5m", "silence: 4s"), ("every: 2m", "every: 2s")]).await;
    workshop.script("code.sh", "echo $$ >>\"$HOME/codes\"\nexec sleep 600\n");
    let machines = ["--machine", "stuck", "--machine", "total", "--machine", "silent"];
    workshop.start_smith("plan.sh", "code.sh", &[&machines[..], &["--heartbeat", "1s", "--concurrency", "4"]].concat());
    // Heartbeats arrive, but nothing else changes: the machine sees no progress.
    let stuck = workshop.create("stuck", false).await;
    let total = workshop.create("total", false).await;
    for (id, event) in [(&stuck, "deadline.no_progress"), (&total, "deadline.total")] {
        workshop.wait_for(id, "FALLIDA_INFRAESTRUCTURA").await;
        assert_eq!(workshop.transitions(id).await.last().unwrap(), event);
    }
    // The commands of ended tasks are killed.
    for process in workshop.lines("codes") {
        wait_until_gone(&process).await;
    }
    // A smith that does not answer at all.
    workshop.smith.as_mut().unwrap().kill();
    let silent = workshop.create("silent", false).await;
    workshop.wait_for(&silent, "FALLIDA_INFRAESTRUCTURA").await;
    assert_eq!(workshop.transitions(&silent).await.last().unwrap(), "deadline.silence");
}

#[tokio::test(flavor = "multi_thread")]
async fn cancelling_a_task_kills_its_command_with_its_children() {
    let mut workshop = Workshop::start().await;
    workshop.script("code.sh", "sleep 600 & echo $! >>\"$HOME/codes\"\necho $$ >>\"$HOME/codes\"\nwait\n");
    workshop.start_smith("plan.sh", "code.sh", &[]);
    let id = workshop.create("coding-task", false).await;
    let processes = workshop.wait_for_lines("codes", 2).await;
    let (status, answer) = workshop.faena.post(&format!("/api/v1/tasks/{id}/cancel"), json!({})).await;
    assert_eq!((status.as_u16(), text(&answer, "state").as_str()), (200, "CANCELADA"), "{answer}");
    for process in &processes {
        wait_until_gone(process).await;
    }
    eventually("the worktree is removed", async || {
        (!workshop.path(&format!("smith/tasks/{id}")).exists()).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repository_that_is_not_allowed_is_refused_before_anything_runs() {
    let mut workshop = Workshop::start().await;
    workshop.git(&["init", "--quiet", "--bare", "secret.git"]);
    workshop.start_smith("plan.sh", "code.sh", &[]);
    let secret = workshop.path("secret.git").display().to_string();
    for repository in [secret.as_str(), "--upload-pack=touch${IFS}owned", "ext::sh -c touch% owned", "/etc"] {
        let data = json!({"prompt": "x", "repositorioOrigen": repository});
        let id = workshop.create_with("coding-task", data).await;
        let task = workshop.wait_for(&id, "FALLIDA_INFRAESTRUCTURA").await;
        assert!(text(&task["data"], "error").contains("is refused"), "{task:#}");
    }
    assert!(workshop.lines("plans").is_empty() && !workshop.path("owned").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_fails_is_tried_again_and_then_fails_the_task_with_the_reason() {
    let mut workshop = Workshop::start().await;
    workshop.script("plan.sh", "echo x >>\"$HOME/plans\"\necho 'no credit left' >&2\nexit 3\n");
    workshop.start_smith("plan.sh", "code.sh", &["--attempts", "3"]);
    let id = workshop.create("coding-task", false).await;
    let task = workshop.wait_for(&id, "FALLIDA_INFRAESTRUCTURA").await;
    assert_eq!(text(&task["data"], "error"), "the plan command ended with exit code 3: no credit left");
    assert_eq!(workshop.lines("plans").len(), 3);
    // A code command that changes nothing has failed as well.
    workshop.script("plan.sh", agent::PLAN);
    workshop.script("code.sh", "true\n");
    let id = workshop.create("coding-task", false).await;
    let task = workshop.wait_for(&id, "FALLIDA_INFRAESTRUCTURA").await;
    assert_eq!(text(&task["data"], "error"), "the code command changed nothing");
}
