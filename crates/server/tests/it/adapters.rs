//! The whole loop of a coding task: the real server, the real adapters, real git, and a scripted agent.

mod agent;
mod brokers;
mod crashes;
mod gateway;
mod loops;
mod limits;
mod many_kills;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command},
};

use reqwest::StatusCode;
use serde_json::{Value, json};

use crate::faena::{Faena, command, eventually, print_log_after_panic, spawn_with_log};
use agent::write_script;

/// A server with the adapters around it, a repository, and the scripts of an agent and of tests.
pub struct Workshop {
    pub folder: tempfile::TempDir,
    pub faena: Faena,
    /// Where the adapters find the server.
    pub url: String,
    /// API key of the adapters.
    pub key: Option<String>,
    /// URL of the broker of the adapters.
    pub broker: Option<String>,
    pub smith: Option<Adapter>,
    pub sandbox: Option<Adapter>,
}

/// An adapter process. Dropping it kills the process.
pub struct Adapter {
    child: Child,
    log: PathBuf,
}

impl Adapter {
    /// Starts `faena adapter NAME`.
    pub fn start(folder: &Path, url: &str, name: &str, arguments: &[&str]) -> Adapter {
        Adapter::start_with(folder, &[("FAENA_URL", url)], name, arguments)
    }

    pub fn start_with(folder: &Path, environment: &[(&str, &str)], name: &str, arguments: &[&str]) -> Adapter {
        let mut program = command(folder);
        program.args(["adapter", name]).args(arguments).envs(environment.iter().copied());
        let (child, log) = spawn_with_log(&mut program, folder, name);
        Adapter { child, log }
    }

    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub async fn wait_for_log(&mut self, text: &str) -> String {
        eventually(&format!("the log has {text:?}"), async || {
            let log = self.log();
            if let Some(line) = log.lines().find(|line| line.contains(text)) {
                return Some(line.to_owned());
            }
            if let Some(status) = self.child.try_wait().unwrap() {
                panic!("the adapter exited with {status}:\n{log}");
            }
            None
        })
        .await
    }

    /// Kills the process with SIGKILL.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Stops the process with SIGTERM and returns its exit code.
    pub async fn stop(&mut self) -> i32 {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-s", "TERM", &pid]).status().unwrap().success());
        eventually("the adapter stops", async || self.child.try_wait().unwrap()).await.code().unwrap()
    }

    pub async fn wait_for_exit(&mut self) -> i32 {
        eventually("the adapter ends", async || self.child.try_wait().unwrap()).await.code().unwrap()
    }
}

impl Drop for Adapter {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        print_log_after_panic(&self.log);
    }
}

impl Workshop {
    /// Starts a server and creates a repository with one commit, and the scripts of an agent and of tests that succeed.
    pub async fn start() -> Workshop {
        Workshop::start_with("").await
    }

    /// Starts with a configuration file.
    pub async fn start_with(config: &str) -> Workshop {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("faena.toml"), config).unwrap();
        let faena = Faena::start(folder.path(), &[]).await;
        let url = faena.url.clone();
        let workshop = Workshop { folder, faena, url, key: None, broker: None, smith: None, sandbox: None };
        workshop.git(&["init", "--quiet", "--bare", "--initial-branch=main", "git/origin.git"]);
        workshop.git(&["clone", "--quiet", "git/origin.git", "seed"]);
        fs::write(workshop.path("seed/README"), "a program\n").unwrap();
        let identity = ["-C", "seed", "-c", "user.name=Ada", "-c", "user.email=ada@example.org"];
        workshop.git(&["-C", "seed", "add", "README"]);
        workshop.git(&[&identity[..], &["commit", "--quiet", "--message", "begin"]].concat());
        workshop.git(&["-C", "seed", "push", "--quiet", "origin", "HEAD:main"]);
        for (name, code) in [("plan.sh", agent::PLAN), ("code.sh", agent::CODE), ("test.sh", agent::TEST)] {
            workshop.script(name, code);
        }
        workshop
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn repository(&self) -> String {
        self.path("git/origin.git").display().to_string()
    }

    /// Runs git in the folder and returns its output.
    pub fn git(&self, arguments: &[&str]) -> String {
        let output = Command::new("git").args(arguments).current_dir(self.folder.path()).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "git {arguments:?}: {stderr}");
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    /// Writes an executable script and returns its path.
    pub fn script(&self, name: &str, code: &str) -> String {
        write_script(&self.path(name), code)
    }

    /// Starts a smith with these two scripts.
    pub fn start_smith(&mut self, plan: &str, code: &str, more: &[&str]) {
        self.start_smith_in("smith", plan, code, more);
    }

    pub fn start_smith_in(&mut self, workdir: &str, plan: &str, code: &str, more: &[&str]) {
        let (plan, code) = (self.path(plan).display().to_string(), self.path(code).display().to_string());
        let allowed = self.path("git").display().to_string();
        let arguments = ["--workdir", workdir, "--allow-repository", &allowed, "--plan-command", &plan];
        let more = [&arguments[..], &["--code-command", &code], more].concat();
        self.smith = Some(self.start_adapter("smith", &more));
    }

    pub fn start_sandbox(&mut self, test: &str, more: &[&str]) {
        let test = self.path(test).display().to_string();
        let allowed = self.path("git").display().to_string();
        let arguments = ["--workdir", "sandbox", "--allow-repository", &allowed, "--test-command", &test];
        let more = [&arguments[..], more].concat();
        self.sandbox = Some(self.start_adapter("sandbox", &more));
    }

    fn start_adapter(&self, name: &str, arguments: &[&str]) -> Adapter {
        let mut environment = vec![("FAENA_URL", self.url.as_str())];
        environment.extend(self.key.as_deref().map(|key| ("FAENA_TOKEN", key)));
        environment.extend(self.broker.as_deref().map(|url| ("FAENA_BROKER_URL", url)));
        Adapter::start_with(self.folder.path(), &environment, name, arguments)
    }

    /// Creates an API key for this test and one with a scope for the adapters.
    pub async fn require_keys(&mut self, scope: &str) {
        let create = async |workshop: &Workshop, scope: &str| {
            let body = json!({"name": scope, "scopes": [scope]});
            let (status, created) = workshop.faena.post("/api/v1/api-keys", body).await;
            assert_eq!(status, StatusCode::CREATED, "{created}");
            text(&created, "key")
        };
        let admin = create(self, "admin").await;
        let headers = [(reqwest::header::AUTHORIZATION, format!("Bearer {admin}").parse().unwrap())];
        self.faena.http =
            reqwest::Client::builder().no_proxy().default_headers(headers.into_iter().collect()).build().unwrap();
        self.key = Some(create(self, scope).await);
    }

    /// Registers a variant of the coding task, with some texts replaced.
    pub async fn register_variant(&self, name: &str, changes: &[(&str, &str)]) {
        let built_in = concat!(env!("CARGO_MANIFEST_DIR"), "/../machine/machines/coding-task.yaml");
        let mut text = fs::read_to_string(built_in).unwrap();
        text = text.replacen("machine: coding-task", &format!("machine: {name}"), 1);
        for (from, to) in changes {
            assert!(text.contains(from), "the machine has no {from:?}");
            text = text.replace(from, to);
        }
        fs::write(self.path("variant.yaml"), text).unwrap();
        let output = crate::faena::run(
            self.folder.path(),
            &[("FAENA_URL", &self.faena.url)],
            &["machines", "register", "variant.yaml"],
        );
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    /// Creates a task and returns its id.
    pub async fn create(&self, machine: &str, needs_approval: bool) -> String {
        let data = json!({
            "prompt": "add a greeting", "repositorioOrigen": self.repository(),
            "reglas": {"requiereAprobacionPlan": needs_approval},
        });
        self.create_with(machine, data).await
    }

    pub async fn create_with(&self, machine: &str, data: Value) -> String {
        let (status, task) = self.faena.post("/api/v1/tasks", json!({"machine": machine, "data": data})).await;
        assert_eq!(status, StatusCode::CREATED, "{task}");
        task["id"].as_str().unwrap().to_owned()
    }

    pub async fn task(&self, id: &str) -> Value {
        let (status, task) = self.faena.get(&format!("/api/v1/tasks/{id}")).await;
        assert_eq!(status, StatusCode::OK, "{task}");
        task
    }

    /// Waits until the task is in a state. Panics if it ends in another.
    pub async fn wait_for(&self, id: &str, state: &str) -> Value {
        eventually(&format!("task {id} is {state}"), async || {
            let task = self.task(id).await;
            let found = task["state"].as_str().unwrap();
            if found == state || found.starts_with(&format!("{state}.")) {
                return Some(task);
            }
            assert!(task["endedAt"].is_null(), "expected {state}, but the task ended: {task:#}");
            None
        })
        .await
    }

    /// Waits for a plan other than the last, and returns its id.
    pub async fn wait_for_plan(&self, id: &str, last: &str) -> String {
        eventually("a plan waits for approval", async || {
            let task = self.task(id).await;
            assert!(task["endedAt"].is_null(), "the task ended: {task:#}");
            let plan = task["approval"]["subject"]["planId"].as_str().unwrap_or_default();
            (!plan.is_empty() && plan != last).then(|| plan.to_owned())
        })
        .await
    }

    pub async fn decide(&self, id: &str, decision: &str, comment: &str) {
        let (status, answer) =
            self.faena.post(&format!("/api/v1/tasks/{id}/{decision}"), json!({"comment": comment})).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
    }

    /// Returns the events of a task that changed its state, in order.
    pub async fn transitions(&self, id: &str) -> Vec<String> {
        self.history(id)
            .await
            .into_iter()
            .filter(|record| !record["to"].is_null())
            .map(|record| text(&record, "event"))
            .collect()
    }

    pub async fn history(&self, id: &str) -> Vec<Value> {
        let (status, history) = self.faena.get(&format!("/api/v1/tasks/{id}/history?limit=1000")).await;
        assert_eq!(status, StatusCode::OK, "{history}");
        history["history"].as_array().unwrap().clone()
    }

    /// Returns the lines that scripts have written to a file.
    pub fn lines(&self, name: &str) -> Vec<String> {
        fs::read_to_string(self.path(name)).unwrap_or_default().lines().map(str::to_owned).collect()
    }

    pub async fn wait_for_lines(&self, name: &str, count: usize) -> Vec<String> {
        eventually(&format!("{name} has {count} lines"), async || {
            Some(self.lines(name)).filter(|lines| lines.len() >= count)
        })
        .await
    }
}

pub fn text(value: &Value, name: &str) -> String {
    value[name].as_str().unwrap_or_default().to_owned()
}

/// Waits until no process with this id is left.
pub async fn wait_until_gone(process: &str) {
    eventually("the process ends", async || {
        let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok();
        // A zombie has ended; its new parent has not collected it yet.
        stat.is_none_or(|stat| stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim().starts_with('Z')))
            .then_some(())
    })
    .await;
}
