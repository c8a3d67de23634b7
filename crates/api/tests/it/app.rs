//! The API under test: a router and an engine with their own database.

use std::{
    fmt::Write,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    Router,
    body::{Body, HttpBody},
    http::{HeaderMap, Request, StatusCode},
};
use faena_api::{Api, CertificateExpiry, Doctor, Parts, Traffic, TrafficConfig};
use faena_auth::Policy;
use faena_domain::{JobLimits, Timestamp};
use faena_engine::{Engine, EngineConfig, RedisQueueConfig};
use faena_store::StoreOptions;
use serde_json::Value;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use crate::conformance::Exchange;

pub struct App {
    pub api: Api,
    pub router: Router,
    pub engine: Arc<Engine>,
    pub closing: CancellationToken,
    _database: TestDatabase,
    redis_queue: Option<RedisQueueConfig>,
}

/// Returns a queue in Redis with a prefix of its own, if the tests run with `FAENA_TEST_QUEUE=redis`.
fn redis_queue() -> Option<RedisQueueConfig> {
    if std::env::var("FAENA_TEST_QUEUE").as_deref() != Ok("redis") {
        return None;
    }
    let url = std::env::var("FAENA_TEST_REDIS").expect("FAENA_TEST_REDIS is not set: run this test with ./test");
    let prefix = format!("test-{}", uuid::Uuid::new_v4().simple());
    Some(RedisQueueConfig { address: url.parse().unwrap(), prefix, fallback: false })
}

/// Database of a test, deleted with it.
enum TestDatabase {
    Folder(#[expect(dead_code, reason = "deletes the folder on drop")] tempfile::TempDir),
    Database(String),
    /// Another app deletes it.
    Shared,
}

pub const BODY_BYTES: usize = 64 << 10;
pub const BATCH_BYTES: usize = 2 << 20;

impl App {
    pub async fn start() -> App {
        App::start_with(EngineConfig::default()).await
    }

    /// Starts on SQLite, or on PostgreSQL if the tests run with `FAENA_TEST_DATABASE=postgres`.
    pub async fn start_with(config: EngineConfig) -> App {
        if std::env::var("FAENA_TEST_DATABASE").as_deref() == Ok("postgres") {
            return App::start_on_postgres_with(config).await;
        }
        let folder = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", folder.path().join("faena.db").display());
        App::open(&url, TestDatabase::Folder(folder), config).await
    }

    /// Starts as with `--insecure-no-auth`: callers on other machines need no key.
    pub async fn start_without_auth() -> App {
        App::start_with_policy(Policy { allow_anonymous: true, ..Policy::default() }, Traffic::default()).await
    }

    /// Starts with these limits and origins. The network 10.0.0.0/24 has trusted proxies.
    pub async fn start_with_traffic(config: TrafficConfig) -> App {
        let policy = Policy { trusted_proxies: vec!["10.0.0.0/24".parse().unwrap()], ..Policy::default() };
        App::start_with_policy(policy, Traffic::new(config)).await
    }

    /// Starts an app that callers on other machines can reach.
    pub async fn start_with_policy(policy: Policy, traffic: Traffic) -> App {
        let mut app = App::start().await;
        app.api = Api::new(Parts {
            engine: app.engine.clone(),
            loopback_only: false,
            closing: app.closing.clone(),
            policy,
            access_log: false,
            certificate: CertificateExpiry::default(),
            traffic,
            doctor: Doctor::default(),
        });
        app.router = faena_api::router(app.api.clone());
        app
    }

    /// Starts on a new database of the PostgreSQL server that `./test` has started.
    pub async fn start_on_postgres() -> App {
        App::start_on_postgres_with(EngineConfig::default()).await
    }

    pub async fn start_on_postgres_with(config: EngineConfig) -> App {
        let name = format!("faena_api_{}", uuid::Uuid::new_v4().simple());
        run_sql(&format!("CREATE DATABASE {name}")).await;
        let server = postgres_server();
        let (base, _) = server.rsplit_once('/').unwrap();
        App::open(&format!("{base}/{name}"), TestDatabase::Database(name), config).await
    }

    /// Starts another node on the database of this app.
    pub async fn another_node(&self) -> App {
        let TestDatabase::Database(name) = &self._database else { panic!("only PostgreSQL has several nodes") };
        let server = postgres_server();
        let (base, _) = server.rsplit_once('/').unwrap();
        let config = EngineConfig { redis_queue: self.redis_queue.clone(), ..EngineConfig::default() };
        App::open(&format!("{base}/{name}"), TestDatabase::Shared, config).await
    }

    /// Deletes the database while the node is running.
    pub async fn drop_database(&self) {
        let TestDatabase::Database(name) = &self._database else { panic!("only a PostgreSQL database can be lost") };
        run_sql(&format!("DROP DATABASE {name} WITH (FORCE)")).await;
    }

    async fn open(url: &str, database: TestDatabase, config: EngineConfig) -> App {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let store = faena_store::open(url, StoreOptions::default()).await.unwrap();
        let job_limits =
            JobLimits { max_body_bytes: BODY_BYTES, max_batch_bytes: BATCH_BYTES, ..config.job_limits.clone() };
        let redis_queue = config.redis_queue.clone().or_else(redis_queue);
        let config = EngineConfig { job_limits, redis_queue: redis_queue.clone(), ..config };
        let engine = Engine::start(store, config).await.unwrap();
        let closing = CancellationToken::new();
        let policy = Policy::default();
        let api = Api::new(Parts {
            engine: engine.clone(),
            loopback_only: true,
            closing: closing.clone(),
            policy,
            access_log: false,
            certificate: CertificateExpiry::default(),
            traffic: Traffic::default(),
            doctor: Doctor::default(),
        });
        App { router: faena_api::router(api.clone()), api, engine, closing, _database: database, redis_queue }
    }

    /// Sends a request, and compares it and its answer with the OpenAPI document.
    pub async fn send(&self, request: Request<Body>) -> TestResponse {
        let (parts, mut body) = request.into_parts();
        let (method, uri) = (parts.method.clone(), parts.uri.clone());
        let mut request_body = None;
        // A body of unknown size arrives in parts, perhaps never completely, so it is not read here.
        if body.size_hint().exact().is_some() {
            let bytes = axum::body::to_bytes(body, usize::MAX).await.unwrap();
            request_body = Some(bytes.clone());
            body = Body::from(bytes);
        }
        let response = self.router.clone().oneshot(Request::from_parts(parts, body)).await.unwrap();
        let (parts, body) = response.into_parts();
        let (status, headers) = (parts.status, parts.headers);
        let body = axum::body::to_bytes(body, usize::MAX).await.unwrap();
        let text = String::from_utf8(body.to_vec()).unwrap();
        let request_body = request_body.as_deref();
        Exchange { method: &method, uri: &uri, request_body, status, headers: &headers, text: &text }.check();
        TestResponse { status, headers, text }
    }

    pub async fn call(&self, method: &str, path: &str, body: impl Into<Body>) -> TestResponse {
        self.send(Request::builder().method(method).uri(path).body(body.into()).unwrap()).await
    }

    /// Sends a request of a worker with its session token.
    pub async fn call_as(&self, token: &str, method: &str, path: &str, body: impl Into<Body>) -> TestResponse {
        let request = Request::builder().method(method).uri(path).header("x-session-token", token);
        self.send(request.body(body.into()).unwrap()).await
    }

    /// Registers a worker over plain HTTP and returns its session token.
    pub async fn register(&self, worker: Value) -> String {
        let response = self.post("/api/v1/workers/register", worker.to_string()).await;
        assert_eq!(response.status, StatusCode::CREATED, "{}", response.text);
        response.json()["sessionToken"].as_str().unwrap().to_owned()
    }

    /// Claims one job as a worker, and returns its run.
    pub async fn claim(&self, token: &str, worker: &str) -> i64 {
        let path = format!("/api/v1/workers/{worker}/claim");
        let claimed = self.call_as(token, "POST", &path, r#"{"max": 1, "waitMs": 5000}"#).await;
        claimed.json()["jobs"][0]["run"].as_i64().unwrap_or_else(|| panic!("no job: {}", claimed.text))
    }

    pub async fn get(&self, path: &str) -> TestResponse {
        self.call("GET", path, "").await
    }

    pub async fn post(&self, path: &str, body: impl Into<Body>) -> TestResponse {
        self.call("POST", path, body).await
    }

    /// Submits a job and returns its id.
    pub async fn create(&self, body: &str) -> String {
        let response = self.post("/api/v1/jobs", body.to_owned()).await;
        assert_eq!(response.status, StatusCode::CREATED, "{}", response.text);
        response.json()["id"].as_str().unwrap().to_owned()
    }

    pub async fn job(&self, id: &str) -> Value {
        let response = self.get(&format!("/api/v1/jobs/{id}")).await;
        assert_eq!(response.status, StatusCode::OK, "{}", response.text);
        response.json()
    }

    pub async fn wait_for_state(&self, id: &str, state: &str) -> Value {
        let began = Instant::now();
        loop {
            let job = self.job(id).await;
            if job["status"] == state {
                return job;
            }
            assert!(began.elapsed() < Duration::from_secs(60), "waited for {state}: {job:#}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    pub async fn total(&self) -> u64 {
        self.get("/api/v1/jobs").await.json()["total"].as_u64().unwrap()
    }
}

impl Drop for TestDatabase {
    fn drop(&mut self) {
        let TestDatabase::Database(name) = self else { return };
        let sql = format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)");
        // A panicking test cannot block on its own runtime, so another thread drops the database.
        let dropped = std::thread::spawn(move || {
            tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(run_sql(&sql));
        });
        if dropped.join().is_err() {
            eprintln!("a test database was not deleted");
        }
    }
}

fn postgres_server() -> String {
    std::env::var("FAENA_TEST_POSTGRES").expect("FAENA_TEST_POSTGRES is not set: run this test with ./test")
}

async fn run_sql(sql: &str) {
    let (client, connection) = tokio_postgres::connect(&postgres_server(), tokio_postgres::NoTls).await.unwrap();
    let connection = tokio::spawn(connection);
    client.batch_execute(sql).await.unwrap();
    drop(client);
    let _ = connection.await;
}

pub struct TestResponse {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub text: String,
}

impl TestResponse {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).unwrap_or_else(|| panic!("no {name}: {:?}", self.headers)).to_str().unwrap()
    }

    /// Returns the status and the body, with placeholders for ids and times.
    pub fn snapshot(&self) -> String {
        format!("{}\n{}", self.status, redacted(&self.json()))
    }

    /// Returns the status, code and message of an error, then one line per invalid field.
    pub fn error_snapshot(&self) -> String {
        let body = self.json();
        let error = &body["error"];
        let mut text = format!(
            "{} {}: {}",
            self.status.as_u16(),
            error["code"].as_str().unwrap(),
            error["message"].as_str().unwrap()
        );
        for error in error["details"].as_array().into_iter().flatten() {
            write!(text, "\n{}: {}", error["path"].as_str().unwrap(), error["message"].as_str().unwrap()).unwrap();
        }
        assert_eq!(error["requestId"], self.header("x-request-id"), "{body}");
        redact(&text)
    }
}

pub fn redacted(value: &Value) -> String {
    redact(&serde_json::to_string_pretty(value).unwrap())
}

/// Replaces ids by `<id 1>`, `<id 2>` … in order of appearance, and times by `<time>`.
fn redact(text: &str) -> String {
    let mut out = String::new();
    let mut ids: Vec<&str> = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        if let Some(id) = rest.get(..36).filter(|part| part.as_bytes()[8] == b'-' && part.parse::<uuid::Uuid>().is_ok())
        {
            let number = ids.iter().position(|known| *known == id).unwrap_or_else(|| {
                ids.push(id);
                ids.len() - 1
            });
            write!(out, "<id {}>", number + 1).unwrap();
            rest = &rest[36..];
        } else if let Some(time) = rest.get(..24).filter(|part| Timestamp::parse(part).is_some()) {
            out.push_str("<time>");
            rest = &rest[time.len()..];
        } else {
            out.push(first);
            rest = &rest[first.len_utf8()..];
        }
    }
    out
}
