//! The queue in Redis: jobs are taken from Redis, the database grants their claims, and whatever Redis loses is
//! restored.

use std::{
    collections::HashSet,
    process::{Child, Command, Stdio},
    sync::Arc,
    time::Duration,
};

use faena_domain::{JobId, JobState, Limit, NewJob, Pause, Priority, Scope, Timestamp};
use faena_engine::{Engine, EngineConfig, EngineError, RedisQueueConfig};
use faena_store::{JobPatch, QueuePatch, Store};
use redis::Value;

use crate::fixture::{Fixture, TestDatabase, eventually, job, new_redis_queue, once, open_postgres, open_sqlite};

/// Short, so that the regular comparison repairs Redis soon.
const INTERVAL: Duration = Duration::from_millis(500);

fn config(queue: RedisQueueConfig) -> EngineConfig {
    EngineConfig { redis_queue: Some(queue), guardian_interval: INTERVAL, ..EngineConfig::default() }
}

fn shared_url() -> String {
    std::env::var("FAENA_TEST_REDIS").unwrap()
}

async fn command(url: &str, words: &[&str]) -> Value {
    let mut connection = redis::Client::open(url).unwrap().get_multiplexed_async_connection().await.unwrap();
    let mut command = redis::cmd(words[0]);
    for word in &words[1..] {
        command.arg(*word);
    }
    command.query_async(&mut connection).await.unwrap()
}

async fn strings(url: &str, words: &[&str]) -> Vec<String> {
    redis::from_redis_value(command(url, words).await).unwrap()
}

/// A Redis server of one test.
struct Server {
    child: Child,
    port: u16,
    _folder: tempfile::TempDir,
}

impl Server {
    fn start() -> Server {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        Server::on(port)
    }

    fn on(port: u16) -> Server {
        let program = std::env::var("FAENA_TEST_REDIS_BIN").unwrap_or_else(|_| "redis-server".into());
        let folder = tempfile::tempdir().unwrap();
        let child = Command::new(program)
            .args(["--bind", "127.0.0.1", "--port", &port.to_string(), "--save", "", "--appendonly", "no", "--dir"])
            .arg(folder.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            std::thread::sleep(Duration::from_millis(5));
        }
        Server { child, port, _folder: folder }
    }

    fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    fn queue(&self) -> RedisQueueConfig {
        RedisQueueConfig { address: self.url().parse().unwrap(), prefix: "scheduler".into(), fallback: false }
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

async fn submit_many(fixture: &Fixture, kind: &str, payload: &str, count: usize) -> Vec<JobId> {
    let jobs = (0..count).map(|_| job(kind, payload)).collect();
    fixture.store.job_submit(jobs, None, Timestamp::now()).await.unwrap().iter().map(|job| job.id).collect()
}

/// Waits until all jobs are completed, and checks that each ran once.
async fn all_completed(fixture: &Fixture, ids: &[JobId]) {
    let mut runs = HashSet::new();
    for id in ids {
        let job = fixture.wait_for_state(*id, JobState::Completed).await;
        assert_eq!(job.retry_count, 0, "{job:#?}");
        runs.insert((job.id, job.run));
    }
    assert_eq!(runs.len(), ids.len());
}

async fn pause(fixture: &Fixture, paused: Option<Pause>) {
    let patch = QueuePatch { paused: Some(paused), ..QueuePatch::default() };
    fixture.store.queue_set("default", patch, "test", Timestamp::now()).await.unwrap();
}

fn of_priority(priority: Priority) -> NewJob {
    NewJob { priority, ..job("noop", "{}") }
}

async fn seen_by_a_client_of_the_task_scheduler_service(fixture: Fixture, server: Server) {
    let url = server.url();
    pause(&fixture, Some(Pause { at: Timestamp::now(), by: "test".into(), reason: None })).await;
    let low = fixture.submit(of_priority(Priority::Low)).await;
    let critical = fixture.submit(of_priority(Priority::Critical)).await;
    let mut later = job("noop", "{}");
    later.options.scheduled_at = Some(Timestamp::now().plus_ms(3_600_000));
    let due_at = later.options.scheduled_at.unwrap();
    let later = fixture.submit(later).await;
    let found = eventually("both ready jobs", async || {
        let found = strings(&url, &["ZRANGE", "scheduler:queue:priority", "0", "-1", "WITHSCORES"]).await;
        (found.len() == 4).then_some(found)
    })
    .await;
    assert_eq!((found[0].clone(), found[2].clone()), (critical.to_string(), low.to_string()));
    let ready_at = critical.created_at().as_ms();
    assert_eq!(found[1].parse::<i64>().unwrap(), ready_at, "the score of CRITICAL is the ready time");
    assert_eq!(found[3].parse::<i64>().unwrap(), low.created_at().as_ms() + 3_000_000);
    let delayed = eventually("the delayed job", async || {
        let found = strings(&url, &["ZRANGE", "scheduler:queue:delayed", "0", "-1", "WITHSCORES"]).await;
        (!found.is_empty()).then_some(found)
    })
    .await;
    assert_eq!(delayed, [later.to_string(), due_at.as_ms().to_string()]);
    pause(&fixture, None).await;
    all_completed(&fixture, &[low, critical]).await;
    let running = fixture.submit(job("sleep", r#"{"ms": 600000}"#)).await;
    fixture.wait_for_state(running, JobState::Processing).await;
    let processing = eventually("the running job", async || {
        let found = strings(&url, &["HGETALL", "scheduler:processing"]).await;
        (found.len() == 2).then_some(found)
    })
    .await;
    assert_eq!(processing, [running.to_string(), fixture.engine.worker_id().to_string()]);
    let worker = eventually("the worker", async || {
        strings(&url, &["HGETALL", "scheduler:workers"]).await.chunks(2).next().map(<[String]>::to_vec)
    })
    .await;
    assert_eq!(worker[0], fixture.engine.worker_id().to_string());
    for field in ["lastHeartbeat", "capabilities", "currentJob"] {
        assert!(worker[1].contains(field), "{worker:?}");
    }
    let dead = fixture.run_to(once("sleep", "[]"), JobState::Failed).await;
    eventually("the dead letter", async || {
        (strings(&url, &["ZRANGE", "scheduler:queue:dlq", "0", "-1"]).await == [dead.id.to_string()]).then_some(())
    })
    .await;
    eventually("the counters", async || {
        let counted = strings(&url, &["MGET", "scheduler:metrics:processed", "scheduler:metrics:failed"]).await;
        (counted == ["2", "1"]).then_some(())
    })
    .await;
    fixture.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_of_the_task_scheduler_service_sees_its_keys_on_sqlite() {
    let server = Server::start();
    let fixture = Fixture::over(open_sqlite().await, config(server.queue())).await;
    seen_by_a_client_of_the_task_scheduler_service(fixture, server).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_of_the_task_scheduler_service_sees_its_keys_on_postgres() {
    let server = Server::start();
    let fixture = Fixture::over(open_postgres().await, config(server.queue())).await;
    seen_by_a_client_of_the_task_scheduler_service(fixture, server).await;
}

/// Flushes and kills Redis while jobs are submitted and run.
async fn under_faults(fixture: Fixture, mut server: Server) {
    let mut ids = Vec::new();
    for round in 0..6 {
        ids.extend(submit_many(&fixture, "sleep", r#"{"ms": 2}"#, 150).await);
        fixture.wait_for_state(ids[ids.len() - 150], JobState::Completed).await;
        match round % 3 {
            0 => drop(command(&server.url(), &["FLUSHALL"]).await),
            1 => drop(command(&server.url(), &["SCRIPT", "FLUSH"]).await),
            _ => {
                server.kill();
                ids.extend(submit_many(&fixture, "sleep", r#"{"ms": 2}"#, 50).await);
                server = Server::on(server.port);
            }
        }
    }
    all_completed(&fixture, &ids).await;
    let status = fixture.engine.queue.status().unwrap();
    assert!(status.fills >= 3, "{status:?}");
    fixture.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_job_ends_once_while_redis_is_flushed_and_killed_on_sqlite() {
    let server = Server::start();
    under_faults(Fixture::over(open_sqlite().await, config(server.queue())).await, server).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_job_ends_once_while_redis_is_flushed_and_killed_on_postgres() {
    let server = Server::start();
    under_faults(Fixture::over(open_postgres().await, config(server.queue())).await, server).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_redis_the_start_fails_and_with_a_fallback_the_database_dispatches() {
    let mut server = Server::start();
    server.kill();
    let (store, _database) = open_sqlite().await;
    let error = Engine::start(store.clone(), config(server.queue())).await.err().unwrap();
    assert!(matches!(&error, EngineError::Queue(error) if error.is_unavailable()), "{error}");
    store.close().await;
    let queue = RedisQueueConfig { fallback: true, ..server.queue() };
    let fixture = Fixture::over(open_sqlite().await, config(queue)).await;
    let ids = submit_many(&fixture, "noop", "{}", 20).await;
    all_completed(&fixture, &ids).await;
    let status = fixture.engine.queue.status().unwrap();
    assert!(status.fallback_claims > 0 && status.outage.is_some(), "{status:?}");
    // Redis starts, and dispatches from then on.
    let server = Server::on(server.port);
    eventually("Redis in use", async || fixture.engine.queue.status().unwrap().outage.is_none().then_some(())).await;
    let ids = submit_many(&fixture, "noop", "{}", 20).await;
    all_completed(&fixture, &ids).await;
    eventually("the counter", async || {
        let counted: Option<u64> =
            redis::from_redis_value(command(&server.url(), &["GET", "scheduler:metrics:processed"]).await).unwrap();
        (counted >= Some(1)).then_some(())
    })
    .await;
    fixture.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn entries_that_are_missing_wrong_or_foreign_are_repaired_with_each_round_of_the_guardian() {
    let queue = new_redis_queue();
    let prefix = queue.prefix.clone();
    let fixture = Fixture::over(open_sqlite().await, config(queue)).await;
    fixture
        .store
        .limit_set(Scope::System, Limit { concurrency: Some(1), rate: None }, "test", Timestamp::now())
        .await
        .unwrap();
    let blocker = fixture.submit(job("sleep", r#"{"ms": 600000}"#)).await;
    fixture.wait_for_state(blocker, JobState::Processing).await;
    let ids = submit_many(&fixture, "noop", "{}", 30).await;
    let (url, key) = (shared_url(), format!("{prefix}:queue:priority"));
    let members = async || strings(&url, &["ZRANGE", &key, "0", "-1"]).await;
    eventually("all entries", async || (members().await.len() == 30).then_some(())).await;
    let lane = fixture.store.lanes().await.unwrap().into_iter().find(|lane| lane.kind == "noop").unwrap().id;
    let lane_key = format!("{prefix}:queue:lane:{lane}");
    command(&url, &["ZREM", &key, &ids[0].to_string()]).await;
    command(&url, &["ZREM", &lane_key, &ids[0].to_string()]).await;
    command(&url, &["ZADD", &key, "5", "not-a-job"]).await;
    command(&url, &["ZADD", &key, "5", &JobId::new().to_string()]).await;
    let expected: HashSet<String> = ids.iter().map(JobId::to_string).collect();
    eventually("the repaired set", async || {
        let found: HashSet<String> = members().await.into_iter().collect();
        (found == expected).then_some(())
    })
    .await;
    // Another program uses the name of a key.
    command(&url, &["SET", &key, "mine"]).await;
    eventually("the replaced key", async || {
        let kind: String = redis::from_redis_value(command(&url, &["TYPE", &key]).await).unwrap();
        if kind == "zset" && members().await.len() == 30 { Some(()) } else { None }
    })
    .await;
    fixture.engine.cancel(blocker, "enough", "test", Timestamp::now()).await.unwrap();
    all_completed(&fixture, &ids).await;
    assert!(fixture.engine.queue.status().unwrap().repaired >= 3, "one was missing, two were foreign");
    fixture.stop().await;
}

/// Checks that changes reach Redis without a comparison: none is due for an hour.
async fn leaves_or_moves_immediately(database: (Arc<dyn Store>, TestDatabase)) {
    let queue = new_redis_queue();
    let (url, prefix) = (shared_url(), queue.prefix.clone());
    let config = EngineConfig { guardian_interval: Duration::from_secs(3_600), ..config(queue) };
    let fixture = Fixture::over(database, config).await;
    pause(&fixture, Some(Pause { at: Timestamp::now(), by: "test".into(), reason: None })).await;
    let ids = submit_many(&fixture, "noop", "{}", 5).await;
    let [priority, delayed] = ["priority", "delayed"].map(|name| format!("{prefix}:queue:{name}"));
    let members = async |key: &str| -> Vec<JobId> {
        strings(&url, &["ZRANGE", key, "0", "-1"]).await.iter().map(|id| JobId(id.parse().unwrap())).collect()
    };
    eventually("all entries", async || (members(&priority).await.len() == 5).then_some(())).await;
    let (store, now) = (&fixture.store, Timestamp::now());
    store.job_cancel(ids[0], "not needed", None, now).await.unwrap();
    store.job_delete(ids[1], None, now).await.unwrap();
    let urgent = JobPatch { priority: Some(Priority::Critical), ..JobPatch::default() };
    store.job_patch(ids[4], urgent, None, now).await.unwrap();
    let later = JobPatch { scheduled_at: Some(Some(now.plus_ms(3_600_000))), ..JobPatch::default() };
    store.job_patch(ids[2], later, None, now).await.unwrap();
    eventually("the changed queue", async || {
        let found = (members(&priority).await, members(&delayed).await);
        (found == (vec![ids[4], ids[3]], vec![ids[2]])).then_some(())
    })
    .await;
    for lane in store.lanes().await.unwrap().iter().filter(|lane| lane.kind == "noop") {
        let expected = if lane.priority == Priority::Critical { ids[4] } else { ids[3] };
        assert_eq!(members(&format!("{prefix}:queue:lane:{}", lane.id)).await, [expected], "{lane:?}");
    }
    pause(&fixture, None).await;
    all_completed(&fixture, &[ids[3], ids[4]]).await;
    assert_eq!(fixture.engine.queue.status().unwrap().stale, 0, "every job that was taken was still ready");
    fixture.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queued_job_that_is_cancelled_deleted_or_changed_leaves_or_moves_immediately_on_sqlite() {
    leaves_or_moves_immediately(open_sqlite().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queued_job_that_is_cancelled_deleted_or_changed_leaves_or_moves_immediately_on_postgres() {
    leaves_or_moves_immediately(open_postgres().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_was_taken_by_a_server_that_died_is_put_back() {
    let queue = new_redis_queue();
    let prefix = queue.prefix.clone();
    let (url, database) = (shared_url(), open_sqlite().await);
    // The state that a server leaves behind if it dies between taking a job and claiming it.
    let id = crate::fixture::submit(&*database.0, job("noop", "{}")).await;
    command(&url, &["HSET", &format!("{prefix}:faena"), "format", "1"]).await;
    command(&url, &["HSET", &format!("{prefix}:processing"), &id.to_string(), "other-server"]).await;
    command(&url, &["HSET", &format!("{prefix}:processing:run"), &id.to_string(), "0"]).await;
    let soon = Timestamp::now().plus_ms(1_000).as_ms().to_string();
    command(&url, &["ZADD", &format!("{prefix}:processing:lease"), &soon, &id.to_string()]).await;
    let fixture = Fixture::over(database, config(queue)).await;
    fixture.wait_for_state(id, JobState::Completed).await;
    fixture.stop().await;
}
