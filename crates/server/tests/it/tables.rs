//! Lists on a terminal: they fit its width, have colours and relative times; ids can be shortened.

use serde_json::json;

use crate::{
    faena::{command, eventually},
    ports::free_port,
    postgres::Database,
    shell::Shell,
    terminal::Terminal,
};

/// Arguments of commands that print a table, among them every command that ends with `list`.
const LISTS: [&str; 19] = [
    "jobs list",
    "dlq list",
    "dlq stats",
    "dlq retry --all --dry-run",
    "workers list",
    "queues list",
    "limits list",
    "schedules list",
    "schedules ticks nightly",
    "schedules preview nightly",
    "tasks list",
    "tasks bulk pause --all --dry-run",
    "machines list",
    "webhooks list",
    "keys list",
    "audit",
    "outbox sinks",
    "outbox sources",
    "outbox dead",
];

const MACHINE: &str = "\
machine: order
version: 1
initial: NEW
events:
  pay: {}
states:
  NEW:
    forever: true
    on:
      pay: DONE
  DONE:
    final: true
";

/// Runs a command in a terminal with this number of columns. Returns the terminal after the command has ended.
async fn in_terminal(shell: &Shell, arguments: &str, columns: u16) -> Terminal {
    let mut command = command(shell.folder.path());
    command.env("FAENA_URL", &shell.faena.url).args(arguments.split(' '));
    let mut terminal = Terminal::start(command, columns, 200);
    let code = terminal.wait_for_exit().await;
    terminal.read_to_end();
    assert_eq!(code, 0, "{arguments}:\n{}", terminal.screen());
    terminal
}

/// Fills a server with long texts.
async fn fill(shell: &Shell) {
    let hook = format!("http://127.0.0.1:{}/{}", free_port(), "long/".repeat(20));
    let failing = json!({"type": "http.request", "queue": "a-queue-with-a-rather-long-name", "name": "n".repeat(255),
        "payload": {"url": "http://127.0.0.1/"}, "maxRetries": 0, "webhookUrl": hook});
    let failed = shell.faena.submit(failing).await;
    for n in 0..30 {
        shell
            .faena
            .submit(json!({"type": format!("日本語の種類.{}", "x".repeat(80)), "queue": format!("queue-{n}")}))
            .await;
    }
    shell.faena.wait_for_state(&failed, "FAILED").await;
    let schedule = ["schedules", "create", "--name", "nightly", "--cron", "*/7 2,3,4 * * MON-FRI", "--timezone"];
    shell.stdout(&[&schedule[..], &["Europe/Madrid", "--job", "a.rather.long.type.of.a.job"]].concat());
    shell.stdout(&["schedules", "trigger", "nightly"]);
    shell.stdout(&["queues", "pause", "a-queue-with-a-rather-long-name", "--reason", &"because ".repeat(20)]);
    shell.stdout(&["limits", "set", "--key", &format!("{}*", "tenant".repeat(20)), "--concurrency", "3"]);
    let machine = shell.folder.path().join("order.yaml");
    std::fs::write(&machine, MACHINE).unwrap();
    shell.stdout(&["machines", "register", machine.to_str().unwrap()]);
    shell.stdout(&["tasks", "create", "order", "{}", "--title", &"title ".repeat(30)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_list_fits_a_terminal_and_is_whole_elsewhere() {
    let shell = Shell::start(&[("FAENA_WEBHOOK_ALLOW", "127.0.0.0/8")]).await;
    fill(&shell).await;
    let reference = include_str!("../../../../docs/reference/cli.md");
    for heading in reference.lines().filter_map(|line| line.strip_prefix("## faena ")) {
        assert!(!heading.ends_with(" list") || LISTS.contains(&heading), "{heading} is not tested");
    }
    for list in LISTS {
        for columns in [80, 40, 132] {
            let terminal = in_terminal(&shell, list, columns).await;
            terminal.assert_nothing_wraps();
            assert!(!terminal.screen().trim().is_empty(), "{list}");
        }
        let arguments: Vec<&str> = list.split(' ').collect();
        assert!(!shell.stdout(&arguments).contains('\x1b'), "{list}: colours are only for terminals");
        shell.json(&[&arguments[..], &["--json"]].concat());
    }
    let whole = shell.stdout(&["jobs", "list"]);
    assert!(whole.contains(&format!("日本語の種類.{}", "x".repeat(80))), "{whole}");
    let id = shell.json(&["jobs", "list", "--json"])["jobs"][0]["id"].as_str().unwrap().to_owned();
    assert!(in_terminal(&shell, "jobs list", 80).await.screen().contains(&id), "ids are not shortened");
    in_terminal(&shell, "config", 80).await.assert_nothing_wraps();
    in_terminal(&shell, &format!("trace {id}"), 80).await.assert_nothing_wraps();
}

#[tokio::test(flavor = "multi_thread")]
async fn empty_lists_fit_a_terminal() {
    let shell = Shell::start(&[]).await;
    for list in LISTS.into_iter().filter(|list| !list.contains("nightly")) {
        in_terminal(&shell, list, 60).await.assert_nothing_wraps();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn states_have_colours_on_a_terminal_unless_refused() {
    let shell = Shell::start(&[]).await;
    shell.faena.submit(json!({"type": "unknown.type"})).await;
    let coloured = in_terminal(&shell, "jobs list", 80).await.bytes();
    assert!(coloured.contains("\x1b[36mQUEUED\x1b[0m"), "{coloured}");
    for (name, value) in [("NO_COLOR", "1"), ("TERM", "dumb")] {
        let mut command = command(shell.folder.path());
        command.env("FAENA_URL", &shell.faena.url).args(["jobs", "list"]);
        let mut terminal = Terminal::start_with(command, 80, 24, &[(name, value)]);
        terminal.wait_for_exit().await;
        terminal.read_to_end();
        assert!(terminal.bytes().contains("QUEUED") && !terminal.bytes().contains('\x1b'), "{}", terminal.bytes());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn times_are_relative_or_exact() {
    let shell = Shell::start(&[]).await;
    let id = shell.faena.submit(json!({"type": "unknown.type"})).await;
    let created_at = shell.faena.job(&id).await["createdAt"].as_str().unwrap().to_owned();
    assert!(!shell.stdout(&["jobs", "list"]).contains(&created_at));
    assert!(shell.stdout(&["jobs", "list", "--utc"]).contains(&created_at));
    assert!(shell.stdout(&["queues", "list"]).contains(" ago"));
    assert!(shell.stdout(&["queues", "list", "--utc"]).contains("Z "));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_id_can_be_shortened_to_a_unique_beginning() {
    let database = Database::create().await;
    for environment in [vec![], vec![("DATABASE_URL", database.url.as_str())]] {
        check_shortened_ids(&Shell::start(&environment).await).await;
    }
}

/// Returns how many bytes at the beginning of two texts are equal.
pub fn common_beginning(a: &str, b: &str) -> usize {
    a.bytes().zip(b.bytes()).take_while(|(a, b)| a == b).count()
}

/// Checks that the whole history of a task is listed if it is longer than the page that one request returns.
async fn check_long_history(shell: &Shell, task: &str) {
    for _ in 0..250 {
        shell.faena.post(&format!("/api/v1/tasks/{task}/events"), json!({"type": "pay"})).await;
    }
    let (_, last) = shell.faena.get(&format!("/api/v1/tasks/{task}/history?after=250")).await;
    assert!(!last["history"].as_array().unwrap().is_empty(), "{last}");
    let listed = shell.json(&["tasks", "history", task, "--json"]);
    assert_eq!(listed["history"].as_array().unwrap().last(), last["history"].as_array().unwrap().last());
}

async fn check_shortened_ids(shell: &Shell) {
    let submit = async |kind: &str| shell.faena.submit(json!({"type": kind})).await;
    let (first, second) = (submit("a.type").await, submit("b.type").await);
    let common = common_beginning(&first, &second);
    let unique = &first[..=common];
    assert!(shell.stdout(&["jobs", "show", unique]).contains(&first));
    assert_eq!(shell.json(&["jobs", "why", &unique.to_uppercase(), "--json"])["jobId"], json!(first));
    let (code, stdout, stderr) = shell.run(&["jobs", "cancel", &first[..common]]);
    assert_eq!((code, stdout.as_str()), (1, ""));
    assert!(
        stderr.contains("pass more characters") && stderr.contains(&first) && stderr.contains("b.type"),
        "{stderr}"
    );
    let (code, _, stderr) = shell.run(&["jobs", "show", "ffff-nothing"]);
    assert_eq!(code, 2, "{stderr}");
    let (code, _, stderr) = shell.run(&["jobs", "show", "ffffffff"]);
    assert_eq!((code, stderr.as_str()), (1, "faena: no job has an id that begins with \"ffffffff\"\n"));
    assert_eq!(shell.stdout(&["jobs", "cancel", unique]), format!("{first} was cancelled\n"));
    let third = shell.stdout(&["enqueue", "noop", "--after", &second[..=common]]);
    assert_eq!(shell.faena.job(third.trim()).await["dependsOn"], json!([second]));

    let machine = shell.folder.path().join("order.yaml");
    std::fs::write(&machine, MACHINE).unwrap();
    shell.stdout(&["machines", "register", machine.to_str().unwrap()]);
    let task = shell.json(&["tasks", "create", "order", "{}", "--json"])["id"].as_str().unwrap().to_owned();
    assert!(shell.stdout(&["tasks", "show", &task[..14]]).contains(&task));
    assert!(shell.stdout(&["tasks", "send", &task[..14], "pay"]).contains("applied"));
    check_long_history(shell, &task).await;
    let schedule = ["schedules", "create", "--name", "nightly", "--cron", "0 2 * * *", "--job", "noop", "--json"];
    let schedule = shell.json(&schedule)["id"].as_str().unwrap().to_owned();
    assert!(shell.stdout(&["schedules", "show", &schedule[..20]]).contains("nightly"));
    let failing = json!({"type": "http.request", "payload": {"url": "http://127.0.0.1/"}, "maxRetries": 0});
    let failed = shell.faena.submit(failing).await;
    shell.faena.wait_for_state(&failed, "FAILED").await;
    assert_eq!(shell.stdout(&["dlq", "delete", &failed[..13]]), format!("{failed} was deleted\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn long_work_has_a_progress_bar_on_a_terminal_only() {
    let shell = Shell::start(&[]).await;
    for _ in 0..4 {
        let failing = json!({"type": "http.request", "payload": {"url": "http://127.0.0.1/"}, "maxRetries": 0});
        let id = shell.faena.submit(failing).await;
        shell.faena.wait_for_state(&id, "FAILED").await;
    }
    let retried = in_terminal(&shell, "dlq retry --all --per-second 2 --watch", 80).await;
    assert!(retried.bytes().contains(" of 4  retried"), "{}", retried.bytes());
    assert_eq!(retried.screen().trim(), "4 dead letters retried", "the bar is removed");
    eventually("all have failed again", async || (shell.faena.count("status=FAILED").await == 4).then_some(())).await;
    let (code, stdout, stderr) = shell.run(&["dlq", "retry", "--all", "--per-second", "100", "--watch"]);
    assert_eq!((code, stdout.as_str(), stderr.as_str()), (0, "4 dead letters retried\n", ""));
    let watched = in_terminal(&shell, r#"enqueue sleep {"ms":500,"steps":4} --watch"#, 80).await;
    assert!(watched.bytes().contains("50 %") && watched.screen().contains("COMPLETED"), "{}", watched.bytes());
    shell.faena.signal("TERM");
    let doctor = in_terminal(&shell, "doctor", 80).await;
    assert!(doctor.bytes().contains("[="), "{}", doctor.bytes());
}

/// Returns what a shell offers after these words, the last of which is being typed, and what the command prints as
/// errors.
fn complete(shell: &Shell, url: &str, words: &[&str]) -> (String, String) {
    let mut command = command(shell.folder.path());
    let index = (words.len() - 1).to_string();
    command.env("FAENA_URL", url).env("FAENA_COMPLETE", "bash").env("_CLAP_COMPLETE_INDEX", index);
    command.env("_CLAP_IFS", "\n").arg("--").args(words);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn completions_know_ids_queues_and_types_of_the_server() {
    let shell = Shell::start(&[]).await;
    let id = shell.faena.submit(json!({"type": "unknown.type", "queue": "paper"})).await;
    shell.faena.submit(json!({"type": "noop", "queue": "$(touch owned)"})).await;
    let offered = |words: &[&str]| complete(&shell, &shell.faena.url, words).0;
    assert_eq!(offered(&["faena", "jobs", "show", &id[..20]]).trim(), id);
    assert!(offered(&["faena", "jobs", "show", ""]).contains(&id));
    assert_eq!(offered(&["faena", "queues", "pause", "pa"]).trim(), "paper");
    assert!(!offered(&["faena", "queues", "pause", ""]).contains('$'), "a name that a shell would run is not offered");
    assert_eq!(offered(&["faena", "jobs", "list", "--type", "unk"]).trim(), "unknown.type");
    assert!(offered(&["faena", "enqueue", ""]).contains("http.request"), "types that workers can run");
    assert_eq!(offered(&["faena", "comple"]).trim(), "completions");
    let nowhere = "http://127.0.0.1:9";
    let (offered, errors) = complete(&shell, nowhere, &["faena", "queues", "show", "--url", &shell.faena.url, "pa"]);
    assert_eq!((offered.trim(), errors.as_str()), ("paper", ""));
    assert_eq!(complete(&shell, nowhere, &["faena", "queues", "show", "pa"]), (String::new(), String::new()));
    for name in ["bash", "zsh", "fish"] {
        assert!(shell.stdout(&["completions", name]).contains("FAENA_COMPLETE"), "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bash_completes_with_the_printed_script() {
    let shell = Shell::start(&[]).await;
    let id = shell.faena.submit(json!({"type": "unknown.type"})).await;
    let binary = std::path::Path::new(env!("CARGO_BIN_EXE_faena")).parent().unwrap();
    let script = format!(
        r#"source <(faena completions bash); COMP_WORDS=(faena jobs show {0}); COMP_CWORD=3
           _clap_complete_faena faena {0} show; printf '%s\n' "${{COMPREPLY[@]}}""#,
        &id[..9]
    );
    let mut bash = std::process::Command::new("bash");
    let path = format!("{}:{}", binary.display(), std::env::var("PATH").unwrap());
    let output = bash.args(["-c", &script]).env("PATH", path).env("FAENA_URL", &shell.faena.url).output().unwrap();
    let offered = String::from_utf8(output.stdout).unwrap();
    assert_eq!(offered.trim(), id, "{}", String::from_utf8_lossy(&output.stderr));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_command_has_a_manual_page() {
    let folder = tempfile::tempdir().unwrap();
    let output = crate::faena::run(folder.path(), &[], &["man", "pages/man1"]);
    assert!(output.status.success(), "{output:?}");
    let page = |name: &str| std::fs::read_to_string(folder.path().join(format!("pages/man1/{name}.1"))).unwrap();
    assert!(page("faena").contains("Durable job server"));
    assert!(page("faena-jobs-list").contains("Only jobs in this queue"));
    let reference = include_str!("../../../../docs/reference/cli.md");
    for heading in reference.lines().filter_map(|line| line.strip_prefix("## faena ")) {
        page(&format!("faena-{}", heading.replace(' ', "-")));
    }
    assert!(!folder.path().join("pages/man1/faena-guard.1").exists(), "it is hidden");
    let output = crate::faena::run(folder.path(), &[], &["man", "/dev/null/pages"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot write manual pages to /dev/null/pages"));
}
