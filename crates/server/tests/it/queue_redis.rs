//! The real binary with its queue in Redis: what it shows, and what it survives.

use std::{
    io::{Read, Write},
    net::TcpStream,
    path::Path,
    time::Duration,
};

use rcgen::{CertificateParams, KeyPair};
use serde_json::{Value, json};

use crate::{
    broker_support::Broker,
    faena::{Faena, eventually, run},
    load::{Load, Random, assert_all_completed_once},
    postgres::Database,
    shell::output_parts,
};

const ROUNDS: u64 = 18;
const SEED: u64 = 20_261_117;

/// Sends one command to Redis and returns the beginning of its answer.
fn redis(url: &str, command: &str) -> String {
    let mut stream = TcpStream::connect(url.trim_start_matches("redis://")).unwrap();
    stream.write_all(format!("{command}\r\n").as_bytes()).unwrap();
    let mut answer = [0; 4_096];
    let count = stream.read(&mut answer).unwrap();
    String::from_utf8_lossy(&answer[..count]).into_owned()
}

fn with_redis<'a>(url: &'a str, more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    [&[("FAENA_QUEUE_BACKEND", "redis"), ("REDIS_URL", url), ("FAENA_GUARDIAN_INTERVAL", "1s")], more].concat()
}

/// Kills Faena, kills Redis, and flushes Redis at random, while jobs are submitted and run.
async fn assert_no_job_is_lost(folder: &Path, environment: &[(&str, &str)]) {
    let mut broker = Broker::redis("").await;
    let url = broker.url();
    let settings = [("FAENA_ORPHAN_DELAY", "50ms"), ("FAENA_NODE_LEASE", "500ms"), ("WORKER_CONCURRENCY", "20")];
    let environment = with_redis(&url, &[&settings, environment].concat());
    let mut random = Random(SEED);
    let mut load = Load::start(SEED, 3, Duration::from_millis(8));
    let mut faena = Faena::start(folder, &environment).await;
    for round in 0..ROUNDS {
        load.aim_at(&faena);
        tokio::time::sleep(Duration::from_millis(200 + random.below(500))).await;
        match round % 3 {
            0 => drop(redis(&url, "FLUSHALL")),
            1 => {
                faena.kill();
                faena = Faena::start(folder, &environment).await;
            }
            _ => {
                broker.kill();
                tokio::time::sleep(Duration::from_millis(random.below(300))).await;
                broker.start().await;
            }
        }
    }
    load.aim_at(&faena);
    let acknowledged = load.stop().await;
    assert!(acknowledged.len() as u64 > ROUNDS * 5, "too few jobs were submitted: {}", acknowledged.len());
    assert_all_completed_once(&faena, &acknowledged).await;
    load.assert_rejections_are_503();
    let empty = eventually("Redis has no jobs", async || {
        let counts = ["ZCARD scheduler:queue:priority", "HLEN scheduler:processing"].map(|ask| redis(&url, ask));
        (counts == [":0\r\n", ":0\r\n"]).then_some(counts)
    });
    empty.await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_job_completes_once_although_redis_is_flushed_and_both_are_killed_on_sqlite() {
    let folder = tempfile::tempdir().unwrap();
    assert_no_job_is_lost(folder.path(), &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_job_completes_once_although_redis_is_flushed_and_both_are_killed_on_postgres() {
    let folder = tempfile::tempdir().unwrap();
    let database = Database::create().await;
    assert_no_job_is_lost(folder.path(), &[("DATABASE_URL", database.url.as_str())]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_postgres_nodes_dispatch_from_one_redis() {
    let broker = Broker::redis("").await;
    let (url, database) = (broker.url(), Database::create().await);
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let environment = with_redis(&url, &[("DATABASE_URL", &database.url)]);
    let nodes = Faena::start_two([one.path(), two.path()], &environment).await;
    let jobs: Vec<Value> = (0..300).map(|_| json!({"name": "sleep", "payload": {"ms": 20}})).collect();
    let (_, batch) = nodes[0].post("/api/v1/jobs/batch", json!({ "jobs": jobs })).await;
    let mut workers = std::collections::HashSet::new();
    for id in batch["ids"].as_array().unwrap() {
        let job = nodes[1].wait_for_state(id.as_str().unwrap(), "COMPLETED").await;
        assert_eq!(job["retryCount"], 0, "{job:#}");
        workers.insert(job["workerId"].as_str().unwrap().to_owned());
    }
    assert_eq!(workers.len(), 2, "both nodes run jobs");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_with_tls_checks_the_certificate() {
    let folder = tempfile::tempdir().unwrap();
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new(vec!["127.0.0.1".into()]).unwrap().self_signed(&key).unwrap();
    let [certificate_file, key_file] = ["redis.crt", "redis.key"].map(|name| folder.path().join(name));
    std::fs::write(&certificate_file, certificate.pem()).unwrap();
    std::fs::write(&key_file, key.serialize_pem()).unwrap();
    let port = crate::ports::free_port();
    let [certificate_file, key_file] = [&certificate_file, &key_file].map(|path| path.to_str().unwrap());
    let settings =
        format!("tls-port {port}\ntls-cert-file {certificate_file}\ntls-key-file {key_file}\ntls-auth-clients no\n");
    let _broker = Broker::redis(&settings).await;
    let url = format!("rediss://127.0.0.1:{port}");
    let environment = with_redis(&url, &[("PORT", "0")]);
    let (code, _, error) = output_parts(&run(folder.path(), &environment, &["serve"]));
    assert!(code == 2 && error.contains("is not available"), "no trusted authority signed the certificate: {error}");
    let trusting = with_redis(&url, &[("SSL_CERT_FILE", certificate_file)]);
    let faena = Faena::start(folder.path(), &trusting).await;
    let id = faena.submit(json!({"name": "noop"})).await;
    faena.wait_for_state(&id, "COMPLETED").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn evicted_entries_are_restored() {
    let broker = Broker::redis("").await;
    let (url, folder) = (broker.url(), tempfile::tempdir().unwrap());
    let environment = with_redis(&url, &[("WORKER_CONCURRENCY", "1")]);
    let faena = Faena::start(folder.path(), &environment).await;
    let blocker = faena.submit(json!({"name": "sleep", "payload": {"ms": 600_000}})).await;
    faena.wait_for_state(&blocker, "PROCESSING").await;
    let jobs: Vec<Value> = (0..200).map(|_| json!({"name": "noop"})).collect();
    let (_, batch) = faena.post("/api/v1/jobs/batch", json!({ "jobs": jobs })).await;
    eventually("the entries", async || (redis(&url, "ZCARD scheduler:queue:priority") == ":200\r\n").then_some(()))
        .await;
    // Simulates an eviction, which removes whole keys.
    redis(&url, "EVAL \"for _, k in ipairs(redis.call('KEYS', 'scheduler:queue:*')) do redis.call('DEL', k) end\" 0");
    eventually("the restored entries", async || {
        (redis(&url, "ZCARD scheduler:queue:priority") == ":200\r\n").then_some(())
    })
    .await;
    faena.post(&format!("/api/v1/jobs/{blocker}/cancel"), json!({})).await;
    for id in batch["ids"].as_array().unwrap() {
        faena.wait_for_state(id.as_str().unwrap(), "COMPLETED").await;
    }
    assert!(faena.log().contains("queue in Redis differed from the database"), "{}", faena.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_of_redis_is_shown_everywhere() {
    let mut broker = Broker::redis("").await;
    let url = broker.url();
    let folder = tempfile::tempdir().unwrap();
    let environment = with_redis(&url, &[("QUEUE_PREFIX", "jobs")]);
    let faena = Faena::start(folder.path(), &environment).await;
    let id = faena.submit(json!({"name": "noop"})).await;
    faena.wait_for_state(&id, "COMPLETED").await;
    let (status, ready) = faena.get("/health/ready").await;
    assert_eq!((status.as_u16(), &ready["checks"]["redis"]["status"]), (200, &json!("healthy")), "{ready:#}");
    let metrics = async || faena.http.get(format!("{}/metrics", faena.url)).send().await.unwrap().text().await.unwrap();
    assert!(metrics().await.contains("\nfaena_queue_redis_up 1\n"));
    let doctor = || output_parts(&run(folder.path(), &environment, &["doctor", "--json"]));
    assert!(!doctor().1.contains("redis-"), "{}", doctor().1);
    redis(&url, "CONFIG SET maxmemory-policy allkeys-lru");
    assert!(doctor().1.contains("redis-eviction"), "{}", doctor().1);

    broker.kill();
    let waiting = faena.submit(json!({"name": "noop"})).await;
    let why = eventually("the reason", async || {
        let (_, why) = faena.get(&format!("/api/v1/jobs/{waiting}/why")).await;
        let codes = why["reasons"].as_array()?.iter().map(|reason| reason["code"].clone());
        codes.into_iter().any(|code| code == "redis_unavailable").then_some(why)
    })
    .await;
    assert!(!why.to_string().contains("password"), "{why:#}");
    let (status, ready) = faena.get("/health/ready").await;
    assert_eq!((status.as_u16(), &ready["checks"]["redis"]["status"]), (503, &json!("unhealthy")), "{ready:#}");
    assert!(metrics().await.contains("\nfaena_queue_redis_up 0\n"));
    let (code, report, _) = doctor();
    assert!(code == 1 && report.contains("redis-unavailable"), "{report}");

    broker.start().await;
    faena.wait_for_state(&waiting, "COMPLETED").await;
    let (status, _) = faena.get("/health/ready").await;
    assert_eq!(status.as_u16(), 200);
}

/// Stops a server that has waiting jobs, and checks what `faena doctor` reports after each change of Redis.
async fn assert_doctor_reports_drift(folder: &Path, more: &[(&str, &str)]) {
    let broker = Broker::redis("").await;
    let url = broker.url();
    let environment = with_redis(&url, more);
    let mut faena = Faena::start(folder, &environment).await;
    let (status, _) = faena.post("/api/v1/queues/default/pause", json!({})).await;
    assert!(status.is_success());
    let ids = [faena.submit(json!({"name": "noop"})).await, faena.submit(json!({"name": "noop"})).await];
    let later = faena.submit(json!({"name": "noop", "scheduledAt": "2099-01-01T00:00:00Z"})).await;
    eventually("the entries", async || {
        let counts = ["ZCARD scheduler:queue:priority", "ZCARD scheduler:queue:delayed"].map(|ask| redis(&url, ask));
        (counts == [":2\r\n", ":1\r\n"]).then_some(())
    })
    .await;
    let findings = || -> Vec<(String, String, Value)> {
        let (_, report, error) = output_parts(&run(folder, &environment, &["doctor", "--json"]));
        let report: Value = serde_json::from_str(&report).unwrap_or_else(|_| panic!("{report}{error}"));
        let found = report["findings"].as_array().unwrap().iter();
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        found
            .filter(|finding| text(&finding["code"]).starts_with("redis-"))
            .map(|finding| (text(&finding["code"]), text(&finding["text"]), finding["count"].clone()))
            .collect()
    };
    assert_eq!(findings(), [], "a server is running");
    faena.kill();
    assert_eq!(findings(), []);

    redis(&url, &format!("ZREM scheduler:queue:priority {}", ids[0]));
    redis(&url, &format!("ZREM scheduler:queue:delayed {later}"));
    let found = findings();
    assert_eq!((found.len(), found[0].0.as_str(), &found[0].2), (1, "redis-missing", &json!(2)), "{found:?}");
    assert!(found[0].1.contains(&format!("{} in queue:priority", ids[0])), "{found:?}");
    assert!(found[0].1.contains(&format!("{later} in queue:delayed")), "{found:?}");
    redis(&url, "ZADD scheduler:queue:priority 7 foreign-member");
    redis(&url, "SET scheduler:cache:1 mine");
    let codes = || -> Vec<String> { findings().into_iter().map(|(code, ..)| code).collect() };
    assert_eq!(codes(), ["redis-missing", "redis-extra", "redis-foreign-key"]);
    redis(&url, "HSET scheduler:faena format 2");
    assert_eq!(codes(), ["redis-format", "redis-foreign-key"]);
    redis(&url, "HSET scheduler:faena format 0");
    assert_eq!(codes(), ["redis-format", "redis-foreign-key"]);
    redis(&url, "FLUSHALL");
    assert_eq!(codes(), ["redis-not-filled"]);
    redis(&url, "SET scheduler:queue:priority mine");
    redis(&url, "HSET scheduler:faena format 1");
    assert_eq!(codes(), ["redis-foreign-key"]);

    // The server repairs all of it.
    let faena = Faena::start(folder, &environment).await;
    eventually("the repaired queue", async || findings().is_empty().then_some(())).await;
    faena.post("/api/v1/queues/default/resume", json!({})).await;
    for id in &ids {
        faena.wait_for_state(id, "COMPLETED").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_reports_what_differs_between_redis_and_the_database_on_sqlite() {
    let folder = tempfile::tempdir().unwrap();
    assert_doctor_reports_drift(folder.path(), &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_reports_what_differs_between_redis_and_the_database_on_postgres() {
    let folder = tempfile::tempdir().unwrap();
    let database = Database::create().await;
    assert_doctor_reports_drift(folder.path(), &[("DATABASE_URL", database.url.as_str())]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_its_redis_says_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let port = crate::ports::free_port();
    let url = format!("redis://me:s3cret-word@127.0.0.1:{port}/0");
    let environment = with_redis(&url, &[("PORT", "0")]);
    let (code, _, error) = output_parts(&run(folder.path(), &environment, &["serve"]));
    assert_eq!(code, 2, "{error}");
    assert!(error.contains("is not available") && error.contains("queue.fallback = true"), "{error}");
    assert!(!error.contains("s3cret"), "{error}");
    let fallback = with_redis(&url, &[("FAENA_QUEUE_FALLBACK", "true")]);
    let faena = Faena::start(folder.path(), &fallback).await;
    let id = faena.submit(json!({"name": "noop"})).await;
    faena.wait_for_state(&id, "COMPLETED").await;
    let (status, ready) = faena.get("/health/ready").await;
    assert_eq!((status.as_u16(), &ready["checks"]["redis"]["status"]), (200, &json!("degraded")), "{ready:#}");
    assert!(!faena.log().contains("s3cret") && !ready.to_string().contains("s3cret"), "{}", faena.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_of_redis_without_effect_are_warned_about_and_wrong_ones_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let unused = [("REDIS_URL", "redis://:s3cret-word@redis:6379"), ("QUEUE_PREFIX", "jobs")];
    let faena = Faena::start(folder.path(), &unused).await;
    for variable in ["REDIS_URL", "QUEUE_PREFIX"] {
        let log = faena.log();
        let line = log.lines().find(|line| line.contains(variable)).unwrap_or_else(|| panic!("{variable}: {log}"));
        assert!(line.contains("WARN") && line.contains("no effect") && !line.contains("s3cret"), "{line}");
    }
    for (name, value, expected) in [
        ("REDIS_URL", "http://s3cret-word", "queue.redis_url: not a Redis URL"),
        ("REDIS_URL", "redis+sentinel://host", "queue.redis_url: no master name"),
        ("QUEUE_PREFIX", "a b", "queue.prefix: \"a b\" must be"),
        ("FAENA_QUEUE_BACKEND", "kafka", "queue.backend: \"kafka\" must be one of store, redis"),
    ] {
        let (code, _, error) = output_parts(&run(folder.path(), &[(name, value)], &["config"]));
        assert!(code == 2 && error.contains(expected) && !error.contains("s3cret"), "{error}");
    }
    let shown = output_parts(&run(folder.path(), &unused, &["config"])).1;
    assert!(shown.contains("queue.redis_url") && !shown.contains("s3cret"), "{shown}");
}
