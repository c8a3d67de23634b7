//! An engine and a store for each test.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use faena_domain::{JobId, JobState, JobView, LogEvent, NewJob, Timestamp};
use faena_engine::{Engine, EngineConfig, RedisQueueConfig};
use faena_store::{Store, StoreOptions};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tokio_util::sync::CancellationToken;

pub struct Fixture {
    pub store: Arc<dyn Store>,
    pub engine: Arc<Engine>,
    _database: TestDatabase,
    /// The queue in Redis, if the tests run with one.
    redis_queue: Option<RedisQueueConfig>,
}

/// Returns a queue in Redis with a prefix of its own, if the tests run again with `FAENA_TEST_QUEUE=redis`.
pub fn redis_queue() -> Option<RedisQueueConfig> {
    (std::env::var("FAENA_TEST_QUEUE").as_deref() == Ok("redis")).then(new_redis_queue)
}

/// Returns a queue with a prefix of its own on the Redis that `./test` has started.
pub fn new_redis_queue() -> RedisQueueConfig {
    let url = std::env::var("FAENA_TEST_REDIS").expect("FAENA_TEST_REDIS is not set: run this test with ./test");
    let prefix = format!("test-{}", uuid::Uuid::new_v4().simple());
    RedisQueueConfig { address: url.parse().unwrap(), prefix, fallback: false }
}

/// Storage of a test, deleted at its end.
pub enum TestDatabase {
    File(tempfile::TempDir),
    Postgres(String),
}

/// How long to wait for a condition. Generous: it only decides how long a failure takes.
const TIMEOUT: Duration = Duration::from_secs(60);

pub async fn open_sqlite() -> (Arc<dyn Store>, TestDatabase) {
    let folder = tempfile::tempdir().unwrap();
    (open(&sqlite_url(&folder)).await, TestDatabase::File(folder))
}

/// Opens the same SQLite file again.
pub async fn reopened(store: Arc<dyn Store>, database: TestDatabase) -> (Arc<dyn Store>, TestDatabase) {
    store.close().await;
    drop(store);
    let TestDatabase::File(folder) = &database else { panic!("only a SQLite file is used by one process at a time") };
    (open(&sqlite_url(folder)).await, database)
}

fn sqlite_url(folder: &tempfile::TempDir) -> String {
    format!("sqlite:{}", folder.path().join("faena.db").display())
}

/// Creates a database on the server that `./test` has started, and opens it.
pub async fn open_postgres() -> (Arc<dyn Store>, TestDatabase) {
    let (url, database) = create_database().await;
    (open(&url).await, database)
}

/// Creates an empty database and returns its URL.
pub async fn create_database() -> (String, TestDatabase) {
    let name = format!("faena_engine_{}", uuid::Uuid::new_v4().simple());
    run_sql(&format!("CREATE DATABASE {name}")).await;
    let database = TestDatabase::Postgres(name);
    (postgres_url(&database), database)
}

impl TestDatabase {
    /// Rejects new connections and ends the existing ones.
    pub async fn reject_connections(&self) {
        let TestDatabase::Postgres(name) = self else { panic!("only PostgreSQL can reject connections") };
        run_sql(&format!("ALTER DATABASE {name} ALLOW_CONNECTIONS false")).await;
        run_sql(&format!("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")).await;
    }

    pub async fn accept_connections(&self) {
        let TestDatabase::Postgres(name) = self else { panic!("only PostgreSQL can reject connections") };
        run_sql(&format!("ALTER DATABASE {name} ALLOW_CONNECTIONS true")).await;
    }
}

/// Opens the same PostgreSQL database for another node.
pub async fn open_database_for_another_node(database: &TestDatabase) -> Arc<dyn Store> {
    let TestDatabase::Postgres(name) = database else { panic!("a SQLite file is used by one process at a time") };
    let server = postgres_server();
    let (base, _) = server.rsplit_once('/').unwrap();
    open(&format!("{base}/{name}")).await
}

/// Ends every connection to the database.
pub async fn cut_connections(database: &TestDatabase) {
    let TestDatabase::Postgres(name) = database else { panic!("a file has no connections") };
    run_sql(&format!("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")).await;
}

/// Opens the same PostgreSQL database for another node.
pub async fn open_for_another_node(fixture: &Fixture) -> Arc<dyn Store> {
    open(&address(fixture)).await
}

fn address(fixture: &Fixture) -> String {
    postgres_url(&fixture._database)
}

/// Returns the URL of a test's database.
pub fn postgres_url(database: &TestDatabase) -> String {
    let TestDatabase::Postgres(name) = database else { panic!("only PostgreSQL has an address") };
    let server = postgres_server();
    let (base, _) = server.rsplit_once('/').unwrap();
    format!("{base}/{name}")
}

/// Ends the sessions that receive notifications of other nodes.
pub async fn end_listening(fixture: &Fixture) {
    let TestDatabase::Postgres(name) = &fixture._database else { panic!("only a server has sessions") };
    let sql = format!(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}' AND application_name = 'faena listener'"
    );
    run_sql(&sql).await;
}

/// Opens the same database behind a proxy that refuses listeners, as transaction-mode poolers do.
pub async fn open_without_listener(fixture: &Fixture) -> Arc<dyn Store> {
    let mut url = url::Url::parse(&address(fixture)).unwrap();
    let server = format!("{}:{}", url.host_str().unwrap(), url.port().unwrap_or(5432));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let server = server.clone();
            tokio::spawn(async move { forward_all_but_listeners(client, &server).await });
        }
    });
    url.set_host(Some("127.0.0.1")).unwrap();
    url.set_port(Some(port)).unwrap();
    open(url.as_str()).await
}

async fn forward_all_but_listeners(mut client: TcpStream, server: &str) -> Option<()> {
    let mut first = vec![0; 4_096];
    let count = client.read(&mut first).await.ok()?;
    // A client names its application first.
    if String::from_utf8_lossy(&first[..count]).contains("faena listener") {
        return None;
    }
    let mut server = TcpStream::connect(server).await.ok()?;
    server.write_all(&first[..count]).await.ok()?;
    tokio::io::copy_bidirectional(&mut client, &mut server).await.ok().map(drop)
}

pub async fn open(url: &str) -> Arc<dyn Store> {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    faena_store::open(url, StoreOptions::default()).await.unwrap()
}

impl Fixture {
    pub async fn new() -> Fixture {
        Fixture::with(EngineConfig::default()).await
    }

    /// Starts on SQLite, or on PostgreSQL if the tests run again with `FAENA_TEST_DATABASE=postgres`.
    pub async fn with(config: EngineConfig) -> Fixture {
        let database = match std::env::var("FAENA_TEST_DATABASE").as_deref() {
            Ok("postgres") => open_postgres().await,
            _ => open_sqlite().await,
        };
        Fixture::over(database, config).await
    }

    pub async fn over((store, database): (Arc<dyn Store>, TestDatabase), config: EngineConfig) -> Fixture {
        let redis_queue = config.redis_queue.clone().or_else(redis_queue);
        let config = EngineConfig { redis_queue: redis_queue.clone(), ..config };
        let engine = Engine::start(store.clone(), config).await.unwrap();
        Fixture { store, engine, _database: database, redis_queue }
    }

    /// Stops the engine and starts another on the same store.
    pub async fn restarted(self, config: EngineConfig) -> Fixture {
        self.stop().await;
        let config = EngineConfig { redis_queue: self.redis_queue.clone(), ..config };
        let engine = Engine::start(self.store.clone(), config).await.unwrap();
        Fixture { engine, ..self }
    }

    pub async fn stop(&self) {
        self.engine.stop(CancellationToken::new()).await;
    }

    pub async fn submit(&self, job: NewJob) -> JobId {
        submit(&*self.store, job).await
    }

    pub async fn job(&self, id: JobId) -> JobView {
        self.store.job_get(id).await.unwrap().unwrap()
    }

    pub async fn wait_for_state(&self, id: JobId, state: JobState) -> JobView {
        let began = Instant::now();
        loop {
            let job = self.job(id).await;
            if job.status == state {
                return job;
            }
            assert!(!job.status.is_terminal(), "expected {state}, but it ended otherwise: {job:#?}");
            assert!(began.elapsed() < TIMEOUT, "waited for {state}: {job:#?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Submits a job and waits until it is in this state.
    pub async fn run_to(&self, job: NewJob, state: JobState) -> JobView {
        let id = self.submit(job).await;
        self.wait_for_state(id, state).await
    }
}

pub async fn submit(store: &dyn Store, job: NewJob) -> JobId {
    store.job_submit(vec![job], None, Timestamp::now()).await.unwrap()[0].id
}

/// Repeats `look` until it returns a value.
pub async fn eventually<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(began.elapsed() < TIMEOUT, "timed out: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Starts an HTTP server on loopback and returns its URL.
pub async fn serve(router: axum::Router) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    url
}

/// Returns a name that no other test uses on the shared broker.
pub fn unique(name: &str) -> String {
    format!("{name}-{}", uuid::Uuid::now_v7().simple())
}

pub fn job(kind: &str, payload: impl Into<String>) -> NewJob {
    NewJob { payload: payload.into(), ..NewJob::new(kind) }
}

/// Returns a job without retries.
pub fn once(kind: &str, payload: impl Into<String>) -> NewJob {
    let mut job = job(kind, payload);
    job.options.retry.max_retries = 0;
    job
}

pub fn events(job: &JobView) -> Vec<&str> {
    job.execution_log.iter().map(|entry| entry.event.as_str()).collect()
}

pub fn count(job: &JobView, event: LogEvent) -> usize {
    job.execution_log.iter().filter(|entry| entry.event == event).count()
}

pub fn result(job: &JobView) -> serde_json::Value {
    serde_json::from_str(job.result.as_ref().unwrap().get()).unwrap()
}

impl Drop for TestDatabase {
    fn drop(&mut self) {
        let TestDatabase::Postgres(name) = self else { return };
        let sql = format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)");
        // The runtime of a test cannot wait while it unwinds.
        let dropped = std::thread::spawn(move || {
            tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(run_sql(&sql));
        });
        if dropped.join().is_err() {
            eprintln!("a database is left behind");
        }
    }
}

fn postgres_server() -> String {
    std::env::var("FAENA_TEST_POSTGRES").expect("FAENA_TEST_POSTGRES is not set: run this test with ./test")
}

pub async fn run_sql(sql: &str) {
    let (client, connection) = tokio_postgres::connect(&postgres_server(), tokio_postgres::NoTls).await.unwrap();
    let connection = tokio::spawn(connection);
    client.batch_execute(sql).await.unwrap();
    drop(client);
    let _ = connection.await;
}
