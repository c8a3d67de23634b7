//! Tests that programs of jobs cannot survive their job, read the secrets of the server, or work in its folder.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, chown},
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{
    faena::{Faena, command, eventually},
    stop::has_ended,
};

const SECRET: &str = "whsec_c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0";
const ALLOWED: [(&str, &str); 2] = [("FAENA_WORKER_SHELL", "true"), ("FAENA_WEBHOOK_SECRETS", SECRET)];
/// The user `nobody`.
const NOBODY: u32 = 65_534;

/// Starts processes that try to survive: in the group, in a session of their own, as a daemon, and with all signals ignored. Writes
/// their ids to `pids`.
const ESCAPES: &str = r#"
sleep 3600 & echo $! >>list
setsid sh -c 'echo $$ >>list; exec sleep 3600' &
(setsid sh -c 'setsid sh -c "echo \$\$ >>list; exec sleep 3600" & exit' &)
(trap "" HUP INT QUIT TERM; setsid sh -c 'echo $$ >>list; while :; do sleep 3600; done' &)
while [ "$(wc -l <list)" -lt 4 ]; do sleep 0.01; done
mv list pids
"#;

struct ShellServer {
    faena: Faena,
    folder: TempDir,
}

impl ShellServer {
    async fn start() -> ShellServer {
        let folder = tempfile::tempdir().unwrap();
        ShellServer { faena: Faena::start(folder.path(), &ALLOWED).await, folder }
    }

    /// Submits a script that runs in the folder of the test.
    async fn submit(&self, script: &str, options: Value) -> String {
        let payload = json!({"argv": ["sh", "-c", script], "cwd": self.folder.path()});
        let mut body = json!({"name": "shell.run", "maxRetries": 0, "payload": payload});
        body.as_object_mut().unwrap().extend(options.as_object().unwrap().clone());
        self.faena.submit(body).await
    }

    /// Runs a program to its end and returns its job.
    async fn run(&self, payload: Value, state: &str) -> Value {
        let id = self.faena.submit(json!({"name": "shell.run", "maxRetries": 0, "payload": payload})).await;
        self.faena.wait_for_state(&id, state).await
    }

    /// Waits until the processes of `ESCAPES` run.
    async fn escaped(&self) -> Vec<PathBuf> {
        let pids = self.folder.path().join("pids");
        let text = eventually("the processes run", async || fs::read_to_string(&pids).ok()).await;
        let processes: Vec<PathBuf> = text.lines().map(|pid| PathBuf::from(format!("/proc/{pid}"))).collect();
        assert_eq!(processes.len(), 4, "{text}");
        processes
    }
}

fn survivors(processes: &[PathBuf]) -> Vec<String> {
    let living = processes.iter().filter(|process| !has_ended(process));
    living.map(|process| fs::read_to_string(process.join("stat")).unwrap_or_default()).collect()
}

async fn all_end(processes: &[PathBuf]) {
    eventually("all processes have ended", async || survivors(processes).is_empty().then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_that_a_program_has_started_survives_its_job() {
    let server = ShellServer::start().await;
    let id = server.submit(ESCAPES, json!({})).await;
    let job = server.faena.wait_for_state(&id, "COMPLETED").await;
    assert_eq!(job["result"]["exitCode"], 0);
    let processes = server.escaped().await;
    assert_eq!(survivors(&processes), [""; 0], "they ended before the job was reported as completed");
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_survives_a_cancelled_job() {
    let server = ShellServer::start().await;
    let id = server.submit(&format!("{ESCAPES} sleep 3600"), json!({})).await;
    let processes = server.escaped().await;
    assert_eq!(survivors(&processes).len(), 4);
    server.faena.post(&format!("/api/v1/jobs/{id}/cancel"), json!({})).await;
    server.faena.wait_for_state(&id, "CANCELLED").await;
    all_end(&processes).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_survives_a_server_that_is_killed() {
    let mut server = ShellServer::start().await;
    server.submit(&format!("{ESCAPES} sleep 3600"), json!({})).await;
    let processes = server.escaped().await;
    server.faena.kill();
    all_end(&processes).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_survives_if_the_program_kills_its_guard() {
    let server = ShellServer::start().await;
    let id = server.submit(&format!("{ESCAPES} kill -9 $PPID; sleep 3600"), json!({})).await;
    let processes = server.escaped().await;
    let job = server.faena.wait_for_state(&id, "FAILED").await;
    assert_eq!(job["error"], "sh was killed because its guard process was killed");
    assert_eq!(survivors(&processes), [""; 0]);
    // Other programs are not affected.
    server.run(json!({"argv": ["true"]}), "COMPLETED").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_survives_if_the_program_stops_its_guard() {
    let mut server = ShellServer::start().await;
    let id = server.submit(&format!("kill -STOP $PPID; {ESCAPES} sleep 3600"), json!({})).await;
    let processes = server.escaped().await;
    server.faena.post(&format!("/api/v1/jobs/{id}/cancel"), json!({})).await;
    all_end(&processes).await;
    fs::remove_file(server.folder.path().join("pids")).unwrap();
    server.submit(&format!("kill -STOP $PPID; {ESCAPES} sleep 3600"), json!({})).await;
    let processes = server.escaped().await;
    server.faena.kill();
    all_end(&processes).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_keeps_starting_new_sessions_does_not_survive() {
    let server = ShellServer::start().await;
    let script = server.folder.path().join("hop.sh");
    fs::write(&script, format!("setsid sh {} &\n", script.display())).unwrap();
    let payload = json!({"argv": ["sh", "-c", format!("sh {} & sleep 0.2", script.display())]});
    server.run(payload, "COMPLETED").await;
    let is_hop = |process: &Path| fs::read(process.join("cmdline")).is_ok_and(|line| contains(&line, "hop.sh"));
    let processes = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
    let hops: Vec<PathBuf> = processes
        .filter(|process| is_hop(process))
        .filter(|process| {
            fs::read(process.join("cmdline")).is_ok_and(|line| contains(&line, &script.display().to_string()))
        })
        .collect();
    assert!(hops.is_empty(), "{hops:?}");
}

fn contains(bytes: &[u8], text: &str) -> bool {
    String::from_utf8_lossy(bytes).contains(text)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_variables_of_a_job_do_not_reach_its_guard() {
    let server = ShellServer::start().await;
    let library = "/no/such/library.so";
    let env = json!({"LD_PRELOAD": library, "RUST_LOG": "trace"});
    let job = server.run(json!({"argv": ["sh", "-c", ":"], "env": env}), "COMPLETED").await;
    let stderr = job["result"]["stderr"].as_str().unwrap();
    // The loader of each program that has the variable complains: that of `sh`, not that of the guard.
    assert_eq!(stderr.matches(library).count(), 1, "{stderr}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_runs_in_a_folder_of_its_own_which_is_removed() {
    let server = ShellServer::start().await;
    let script = "pwd; stat -c %a .; ls -A | wc -l; mkdir -p a/b; touch a/b/c; chmod 500 a/b a";
    let mut folders = Vec::new();
    for _ in 0..2 {
        let job = server.run(json!({"argv": ["sh", "-c", script]}), "COMPLETED").await;
        let stdout = job["result"]["stdout"].as_str().unwrap().to_owned();
        let lines: Vec<&str> = stdout.lines().collect();
        assert_eq!(lines[1..], ["700", "0"], "{stdout}");
        folders.push(PathBuf::from(lines[0]));
    }
    assert_ne!(folders[0], folders[1]);
    let data = server.folder.path().canonicalize().unwrap();
    assert!(folders.iter().all(|folder| !folder.exists() && !folder.starts_with(&data)), "{folders:?}");
    let job = server.run(json!({"argv": ["true"], "cwd": "faena-data"}), "FAILED").await;
    assert_eq!(job["error"], "the payload is not valid: cwd must be an absolute path");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_folder_of_a_program_is_removed_if_the_server_or_the_guard_is_killed() {
    let mut server = ShellServer::start().await;
    let own = server.folder.path().join("own");
    let script = |then: &str| format!("pwd >{0}.tmp; mv {0}.tmp {0}; {then}", own.display());
    let payload = json!({"argv": ["sh", "-c", script("kill -9 $PPID; sleep 3600")]});
    server.run(payload, "FAILED").await;
    assert!(!Path::new(fs::read_to_string(&own).unwrap().trim()).exists());
    fs::remove_file(&own).unwrap();
    let payload = json!({"argv": ["sh", "-c", script("sleep 3600")]});
    server.faena.submit(json!({"name": "shell.run", "payload": payload})).await;
    let folder = eventually("the program runs", async || fs::read_to_string(&own).ok()).await;
    server.faena.kill();
    let folder = PathBuf::from(folder.trim());
    eventually("its folder is removed", async || (!folder.exists()).then_some(())).await;
}

/// Runs a program that tries to read the environment of the server and of the guard.
async fn assert_secrets_are_unreadable(faena: &Faena, folder: &Path) {
    let script = "for p in $$ $SERVER $PPID; do echo \"process $p:\"; tr '\\0' '\\n' </proc/$p/environ; done; head -c 1 /proc/$SERVER/mem";
    let payload =
        json!({"argv": ["sh", "-c", script], "cwd": folder, "env": {"SERVER": faena.process_id().to_string()}});
    let id = faena.submit(json!({"name": "shell.run", "maxRetries": 0, "payload": payload})).await;
    let job = faena.wait_for_state(&id, "FAILED").await;
    let error = job["error"].as_str().unwrap();
    assert_eq!(
        error.matches("Permission denied").count(),
        3,
        "environments of server and guard, memory of the server: {error}"
    );
    assert!(!job.to_string().contains(SECRET), "{job:#}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_cannot_read_the_secrets_of_its_server() {
    let folder = tempfile::tempdir().unwrap();
    let own = command(folder.path());
    // Root can read everything, so the server runs as another user.
    let mut program = if rustix::process::geteuid().is_root() {
        chown(folder.path(), Some(NOBODY), Some(NOBODY)).unwrap();
        let mut program = Command::new("setpriv");
        program.args(["--reuid", &NOBODY.to_string(), "--regid", &NOBODY.to_string(), "--clear-groups", "--"]);
        program.arg(own.get_program());
        program
    } else {
        Command::new(own.get_program())
    };
    program.current_dir(folder.path()).env_clear();
    program.env("PATH", std::env::var_os("PATH").unwrap()).env("HOME", folder.path());
    let mut faena = Faena::spawn_with(program, folder.path(), &ALLOWED, &[]);
    faena.wait_until_listening().await;
    assert_secrets_are_unreadable(&faena, folder.path()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_to_start_a_program_differs_from_a_program_that_prints_the_same_error() {
    let server = ShellServer::start().await;
    let job = server.run(json!({"argv": ["no-such-program"]}), "FAILED").await;
    assert!(job["error"].as_str().unwrap().starts_with("cannot start no-such-program: "), "{job:#}");
    let pretend = "echo 'cannot start sh: really' >&2; exit 127";
    let id = server.submit(pretend, json!({"maxRetries": 1, "retryDelays": [1]})).await;
    let job = server.faena.wait_for_state(&id, "FAILED").await;
    assert_eq!(
        (&job["retryCount"], &job["error"]),
        (&json!(1), &json!("sh ended with exit code 127: cannot start sh: really"))
    );
    let job = server.run(json!({"argv": ["sh", "-c", "kill -9 $$"]}), "FAILED").await;
    assert_eq!(job["error"], "sh was killed by signal 9");
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_survives_a_pool_process_or_its_killed_server() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("worker.sh"), format!("{ESCAPES} sleep 3600")).unwrap();
    let mode = fs::Permissions::from_mode(0o700);
    fs::set_permissions(folder.path().join("worker.sh"), mode).unwrap();
    let pool = "[[pool]]\nname = \"escaping\"\ncapabilities = [\"work\"]\ncommand = [\"sh\", \"worker.sh\"]\nmin = 1\nmax = 1\n";
    fs::write(folder.path().join("faena.toml"), pool).unwrap();
    let mut server = ShellServer { faena: Faena::start(folder.path(), &ALLOWED).await, folder };
    let processes = server.escaped().await;
    server.faena.kill();
    all_end(&processes).await;
}
