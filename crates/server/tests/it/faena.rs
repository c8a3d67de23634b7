//! A `faena serve` process and the calls that tests make to it.

use std::{
    collections::HashMap,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Output, Stdio},
    sync::{Arc, Mutex, Once},
    time::{Duration, Instant},
};

use reqwest::{Client, StatusCode};
use serde_json::Value;

/// Time after which a wait fails. It is generous because it only decides how long a failure takes.
pub const TIMEOUT: Duration = Duration::from_secs(120);

/// Returns the binary under test, isolated from the developer's environment.
pub fn command(folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_faena"));
    command.current_dir(folder).env_clear().env("PATH", std::env::var_os("PATH").unwrap()).env("HOME", folder);
    command
}

/// Runs the binary until it exits.
pub fn run(folder: &Path, environment: &[(&str, &str)], arguments: &[&str]) -> Output {
    command(folder).envs(environment.iter().copied()).args(arguments).stdin(Stdio::null()).output().unwrap()
}

/// Starts a program with its log in a new file of `folder`. Returns the process and the file.
pub fn spawn_with_log(program: &mut Command, folder: &Path, name: &str) -> (Child, PathBuf) {
    let log = (0..).map(|n| folder.join(format!("{name}-{n}.log"))).find(|path| !path.exists()).unwrap();
    program.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&log).unwrap());
    (program.spawn().unwrap(), log)
}

/// Prints the last lines of the log of a program if the test has failed.
pub fn print_log_after_panic(log: &Path) {
    if std::thread::panicking() {
        let text = fs::read_to_string(log).unwrap_or_default();
        let tail: Vec<&str> = text.lines().rev().take(40).collect();
        eprintln!("--- last lines of {}", log.display());
        tail.iter().rev().for_each(|line| eprintln!("{line}"));
    }
}

pub fn http() -> Client {
    static CRYPTO: Once = Once::new();
    CRYPTO.call_once(|| rustls::crypto::aws_lc_rs::default_provider().install_default().unwrap());
    Client::builder().no_proxy().timeout(Duration::from_secs(20)).build().unwrap()
}

/// Calls `check` until it returns a value. Panics with `what` after [`TIMEOUT`].
pub async fn eventually<T>(what: &str, mut check: impl AsyncFnMut() -> Option<T>) -> T {
    let started_at = Instant::now();
    loop {
        if let Some(found) = check().await {
            return found;
        }
        assert!(started_at.elapsed() < TIMEOUT, "not within {TIMEOUT:?}: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Returns the settings of a queue in Redis if `FAENA_TEST_QUEUE=redis` is set and the test does not choose its queue.
///
/// Servers of one database get the same prefix.
fn redis_queue(folder: &Path, environment: &[(&str, &str)]) -> Vec<(&'static str, String)> {
    let is_chosen =
        environment.iter().any(|(name, _)| ["FAENA_QUEUE_BACKEND", "REDIS_URL", "QUEUE_PREFIX"].contains(name));
    if is_chosen || std::env::var("FAENA_TEST_QUEUE").as_deref() != Ok("redis") {
        return Vec::new();
    }
    let url = std::env::var("FAENA_TEST_REDIS").expect("FAENA_TEST_REDIS is not set: run this test with ./test");
    let database = environment.iter().find(|(name, value)| *name == "DATABASE_URL" && value.starts_with("postgres"));
    // Tests reach one database by several addresses, but its name is unique.
    let database = match database.and_then(|(_, url)| url.rsplit_once('/')) {
        Some((_, name)) => name.split('?').next().unwrap().to_owned(),
        None => folder.display().to_string().replace('/', ":"),
    };
    vec![("FAENA_QUEUE_BACKEND", "redis".into()), ("REDIS_URL", url), ("QUEUE_PREFIX", format!("test-{database}"))]
}

/// A server process. Dropping it kills the process.
pub struct Faena {
    child: Child,
    log: PathBuf,
    pub url: String,
    pub http: Client,
    /// Session tokens of the workers that [`Faena::post`] has registered, by worker id.
    sessions: Arc<Mutex<HashMap<String, String>>>,
}

impl Faena {
    /// Starts a server on a free port and waits until it listens.
    pub async fn start(folder: &Path, environment: &[(&str, &str)]) -> Faena {
        let mut faena = Faena::spawn(folder, environment);
        faena.wait_until_listening().await;
        faena
    }

    /// Starts two servers concurrently and waits until both listen.
    pub async fn start_two(folders: [&Path; 2], environment: &[(&str, &str)]) -> [Faena; 2] {
        let mut nodes = folders.map(|folder| Faena::spawn(folder, environment));
        nodes[1].sessions = nodes[0].sessions.clone();
        for node in &mut nodes {
            node.wait_until_listening().await;
        }
        nodes
    }

    /// Starts a server without waiting.
    pub fn spawn(folder: &Path, environment: &[(&str, &str)]) -> Faena {
        Faena::spawn_with(command(folder), folder, environment, &[])
    }

    /// Starts a server through `program`: the binary, or a program that runs it. Passes `flags` to `serve`.
    pub fn spawn_with(mut program: Command, folder: &Path, environment: &[(&str, &str)], flags: &[&str]) -> Faena {
        program
            .args(["serve", "--port", "0"])
            .args(flags)
            .envs(redis_queue(folder, environment))
            .envs(environment.iter().copied());
        let (child, log) = spawn_with_log(&mut program, folder, "faena");
        Faena { child, log, url: String::new(), http: http(), sessions: Arc::default() }
    }

    pub async fn wait_until_listening(&mut self) {
        self.url = self.announced("url").await;
    }

    /// Waits until the server listens, and returns the address that its log names in this field.
    pub async fn announced(&mut self, field: &str) -> String {
        let (pretty, json) = (format!("{field}="), format!("\"{field}\":"));
        eventually("the server listens", async || {
            let log = self.log();
            if let Some(status) = self.child.try_wait().unwrap() {
                panic!("the server exited with {status}:\n{log}");
            }
            let url = log.split(&pretty).nth(1).or_else(|| log.split(&json).nth(1))?;
            Some(url[..url.find([' ', ','])?].trim_matches('"').to_owned())
        })
        .await
    }

    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub fn process_id(&self) -> u32 {
        self.child.id()
    }

    /// Kills the process with SIGKILL.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-s", name, &pid]).status().unwrap().success());
    }

    /// Returns the exit status, or `None` while the process runs.
    pub fn exit_status(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }

    pub async fn wait_for_exit(&mut self) -> ExitStatus {
        eventually("the server ends", async || self.child.try_wait().unwrap()).await
    }

    pub async fn get(&self, path: &str) -> (StatusCode, Value) {
        let answer = self.http.get(format!("{}{path}", self.url)).send().await.unwrap();
        (answer.status(), answer.json().await.unwrap())
    }

    /// Sends a request. Adds the session token to requests of a worker that was registered with this method.
    pub async fn post(&self, path: &str, mut body: Value) -> (StatusCode, Value) {
        let is_registration = path == "/api/v1/workers/register";
        if let Some(token) = body["workerId"].as_str().and_then(|id| self.session_token(id)).filter(|_| is_registration)
        {
            body["sessionToken"] = token.into();
        }
        let mut request = self.http.post(format!("{}{path}", self.url)).json(&body);
        let worker = path.strip_prefix("/api/v1/workers/").and_then(|rest| rest.split('/').next());
        if let Some(token) = worker.and_then(|id| self.session_token(id)) {
            request = request.header("x-session-token", token);
        }
        let answer = request.send().await.unwrap();
        let (status, answer) = (answer.status(), answer.json::<Value>().await.unwrap());
        if let (true, Some(token)) = (is_registration, answer["sessionToken"].as_str()) {
            self.sessions.lock().unwrap().insert(answer["workerId"].as_str().unwrap().into(), token.into());
        }
        (status, answer)
    }

    pub fn session_token(&self, worker: &str) -> Option<String> {
        self.sessions.lock().unwrap().get(worker).cloned()
    }

    /// Submits a job and returns its id.
    pub async fn submit(&self, body: Value) -> String {
        let (status, answer) = self.post("/api/v1/jobs", body).await;
        assert_eq!(status, StatusCode::CREATED, "{answer}");
        answer["id"].as_str().unwrap().to_owned()
    }

    pub async fn job(&self, id: &str) -> Value {
        let (status, job) = self.get(&format!("/api/v1/jobs/{id}")).await;
        assert_eq!(status, StatusCode::OK, "{job}");
        job
    }

    /// Waits until the job is in this state. Tolerates a database outage; panics if the job ends in another state.
    pub async fn wait_for_state(&self, id: &str, state: &str) -> Value {
        eventually(&format!("{id} is {state}"), async || {
            let (status, job) = self.get(&format!("/api/v1/jobs/{id}")).await;
            if status == StatusCode::SERVICE_UNAVAILABLE {
                return None;
            }
            assert_eq!(status, StatusCode::OK, "{job}");
            let found = job["status"].as_str().unwrap();
            if found != state && ["COMPLETED", "FAILED", "CANCELLED"].contains(&found) {
                panic!("expected {state}, but the job ended: {job:#}");
            }
            (found == state).then_some(job)
        })
        .await
    }

    /// Returns the number of jobs that match the query.
    pub async fn count(&self, query: &str) -> u64 {
        let (status, list) = self.get(&format!("/api/v1/jobs?limit=1&{query}")).await;
        assert_eq!(status, StatusCode::OK, "{list}");
        list["total"].as_u64().unwrap()
    }

    /// Waits until every job has ended.
    pub async fn wait_until_all_jobs_end(&self) {
        let mut last = String::new();
        let started_at = Instant::now();
        loop {
            let (status, list) =
                self.get("/api/v1/jobs?limit=5&status=PENDING,QUEUED,SCHEDULED,ASSIGNED,PROCESSING,RETRYING").await;
            if status == StatusCode::OK && list["total"] == 0 {
                return;
            }
            last.clear();
            last.push_str(&format!("{list:#}"));
            assert!(started_at.elapsed() < TIMEOUT, "some jobs are stuck: {last}\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

impl Drop for Faena {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        print_log_after_panic(&self.log);
    }
}

/// Returns the events of a job's log, in order.
pub fn events(job: &Value) -> Vec<&str> {
    job["executionLog"].as_array().unwrap().iter().map(|entry| entry["event"].as_str().unwrap()).collect()
}
