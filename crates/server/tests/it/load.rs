//! Producers that submit jobs during faults, and the checks that no job was lost.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{
        Arc, Mutex, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::{StreamExt, stream};
use reqwest::{Client, StatusCode};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::faena::{Faena, http};

/// A generator of random numbers that only depend on the seed (splitmix64).
#[derive(Clone)]
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }
}

/// Answers of the server to the producers.
#[derive(Default)]
pub struct Acknowledged {
    pub ids: BTreeSet<String>,
    /// Job id by idempotency key. Every answer to a key must name the same job.
    by_key: HashMap<String, String>,
    /// Number of answers by status, other than 200 and 201; `None` counts requests without an answer.
    pub rejections: HashMap<Option<u16>, usize>,
    pub unavailable_without_retry_after: usize,
}

pub struct Load {
    pub url: Arc<RwLock<String>>,
    pub acknowledged: Arc<Mutex<Acknowledged>>,
    stop: Arc<AtomicBool>,
    producers: Vec<JoinHandle<()>>,
}

impl Load {
    /// Starts producers that submit jobs one by one and in batches to the server that `url` names at that moment.
    pub fn start(seed: u64, producers: u64, pause: Duration) -> Load {
        let mut load =
            Load { url: Arc::default(), acknowledged: Arc::default(), stop: Arc::default(), producers: Vec::new() };
        static LOADS: AtomicU64 = AtomicU64::new(0);
        let id = LOADS.fetch_add(1, Ordering::Relaxed);
        for number in 0..producers {
            let producer = Producer {
                random: Random(seed.wrapping_mul(1_000).wrapping_add(number)),
                load: id,
                number,
                pause,
                http: http(),
                url: load.url.clone(),
                acknowledged: load.acknowledged.clone(),
                stop: load.stop.clone(),
            };
            load.producers.push(tokio::spawn(producer.run()));
        }
        load
    }

    pub fn aim_at(&self, faena: &Faena) {
        self.url.write().unwrap().clone_from(&faena.url);
    }

    pub fn count(&self) -> usize {
        self.acknowledged.lock().unwrap().ids.len()
    }

    /// Checks that every answer that rejected a request was a 503 with Retry-After.
    pub fn assert_rejections_are_503(&self) {
        let acknowledged = self.acknowledged.lock().unwrap();
        let unexpected: Vec<_> =
            acknowledged.rejections.iter().filter(|(status, _)| !matches!(status, None | Some(503))).collect();
        assert!(unexpected.is_empty(), "{unexpected:?}");
        assert_eq!(acknowledged.unavailable_without_retry_after, 0);
    }

    /// Stops the producers after their current request and returns the acknowledged ids. Needs a running server.
    pub async fn stop(&mut self) -> BTreeSet<String> {
        self.stop.store(true, Ordering::Relaxed);
        for producer in self.producers.drain(..) {
            producer.await.unwrap();
        }
        self.acknowledged.lock().unwrap().ids.clone()
    }
}

struct Producer {
    random: Random,
    /// Distinguishes loads of the same seed that run at the same time.
    load: u64,
    number: u64,
    pause: Duration,
    http: Client,
    url: Arc<RwLock<String>>,
    acknowledged: Arc<Mutex<Acknowledged>>,
    stop: Arc<AtomicBool>,
}

impl Producer {
    async fn run(mut self) {
        let mut round = 0_u64;
        while !self.stop.load(Ordering::Relaxed) {
            round += 1;
            match self.random.below(5) {
                0 => {
                    let graph = self.graph();
                    self.send("/api/v1/jobs/batch", graph, None).await;
                }
                1 => {
                    let jobs: Vec<Value> = (0..1 + self.random.below(30)).map(|_| self.job()).collect();
                    self.send("/api/v1/jobs/batch", json!({ "jobs": jobs }), None).await;
                }
                2 => {
                    // Repeats the request with the same key until the server answers.
                    let key = format!("key-{}-{}-{round}", self.load, self.number);
                    let job = self.job();
                    while !self.send("/api/v1/jobs", job.clone(), Some(&key)).await {
                        tokio::time::sleep(self.pause).await;
                    }
                }
                _ => {
                    let job = self.job();
                    self.send("/api/v1/jobs", job, None).await;
                }
            }
            tokio::time::sleep(self.pause).await;
        }
    }

    /// Returns a random job: mostly short, sometimes long enough for its start to be stored, sometimes scheduled for later.
    fn job(&mut self) -> Value {
        let priority = ["LOW", "NORMAL", "HIGH", "CRITICAL"][self.random.below(4) as usize];
        let ms = if self.random.below(20) == 0 { 120 + self.random.below(80) } else { self.random.below(31) };
        let mut job = match self.random.below(3) {
            0 => json!({"name": "noop"}),
            _ => json!({"name": "sleep", "payload": {"ms": ms}}),
        };
        job["maxRetries"] = 10.into();
        job["priority"] = priority.into();
        if self.random.below(10) == 0 {
            let later = jiff::Timestamp::now() + Duration::from_millis(self.random.below(500));
            job["scheduledAt"] = later.to_string().into();
        }
        job
    }

    /// Returns a batch of one job, three that depend on it, and one that depends on those.
    fn graph(&mut self) -> Value {
        let mut jobs: Vec<Value> = (0..5).map(|_| self.job()).collect();
        jobs[0]["ref"] = "first".into();
        for (number, job) in jobs[1..4].iter_mut().enumerate() {
            job["ref"] = format!("middle {number}").into();
            job["dependsOn"] = json!(["first"]);
        }
        jobs[4]["dependsOn"] = json!(["middle 0", "middle 1", "middle 2"]);
        json!({ "jobs": jobs })
    }

    /// Sends a request. Returns whether the server acknowledged it.
    async fn send(&self, path: &str, body: Value, key: Option<&str>) -> bool {
        let url = self.url.read().unwrap().clone();
        if url.is_empty() {
            return false;
        }
        let mut request = self.http.post(format!("{url}{path}")).json(&body);
        if let Some(key) = key {
            request = request.header("idempotency-key", key);
        }
        let Ok(answer) = request.send().await else {
            *self.acknowledged.lock().unwrap().rejections.entry(None).or_default() += 1;
            return false;
        };
        let status = answer.status();
        let retry_after = answer.headers().contains_key("retry-after");
        // The connection broke inside the answer: the status had arrived, the ids had not.
        let Ok(answer) = answer.json::<Value>().await else { return false };
        let mut acknowledged = self.acknowledged.lock().unwrap();
        if !matches!(status, StatusCode::OK | StatusCode::CREATED) {
            *acknowledged.rejections.entry(Some(status.as_u16())).or_default() += 1;
            if status == StatusCode::SERVICE_UNAVAILABLE && !retry_after {
                acknowledged.unavailable_without_retry_after += 1;
            }
            assert!(status.is_server_error(), "a valid request was rejected: {status} {answer}");
            return false;
        }
        if let Some(id) = answer["id"].as_str() {
            acknowledged.ids.insert(id.to_owned());
            if let Some(key) = key {
                let first = acknowledged.by_key.entry(key.to_owned()).or_insert_with(|| id.to_owned());
                assert_eq!(first, id, "two jobs have the key {key}");
            }
        }
        for id in answer["ids"].as_array().into_iter().flatten() {
            acknowledged.ids.insert(id.as_str().unwrap().to_owned());
        }
        true
    }
}

/// Checks that every acknowledged job exists, is completed once, has growing run numbers, and started after its parents
/// had completed. Jobs that were stored and whose acknowledgement was lost must be completed too.
pub async fn assert_all_completed_once(faena: &Faena, acknowledged: &BTreeSet<String>) -> Vec<Value> {
    let jobs = assert_each_completed_once(faena, acknowledged).await;
    let by_id: HashMap<&str, &Value> = jobs.iter().map(|job| (job["id"].as_str().unwrap(), job)).collect();
    for job in &jobs {
        for parent in job["dependsOn"].as_array().into_iter().flatten() {
            let parent = by_id[parent.as_str().unwrap()];
            assert!(
                parent["completedAt"].as_str() <= job["startedAt"].as_str(),
                "started before its parent completed: {job:#}"
            );
        }
    }
    jobs
}

/// Like `assert_all_completed_once`, but does not compare the times of jobs, because the clocks of the nodes may differ.
pub async fn assert_each_completed_once(faena: &Faena, acknowledged: &BTreeSet<String>) -> Vec<Value> {
    faena.wait_until_all_jobs_end().await;
    let jobs: Vec<Value> = stream::iter(acknowledged).map(|id| faena.job(id)).buffer_unordered(8).collect().await;
    for job in &jobs {
        assert_completed_once(job);
    }
    let completed = faena.count("status=COMPLETED").await;
    assert_eq!(faena.count("").await, completed, "some jobs are not completed");
    assert!(
        completed >= acknowledged.len() as u64,
        "{completed} completed jobs of {} acknowledged ones",
        acknowledged.len()
    );
    jobs
}

pub fn assert_completed_once(job: &Value) {
    assert_eq!(job["status"], "COMPLETED", "{job:#}");
    let log = job["executionLog"].as_array().unwrap();
    let count = |event: &str| log.iter().filter(|entry| entry["event"] == event).count();
    assert_eq!(count("completed"), 1, "{job:#}");
    assert_eq!(count("created"), 1, "{job:#}");
    // Each claim has a greater run number than the one before.
    let assigned = log.iter().filter(|entry| entry["event"] == "assigned");
    let runs: Vec<i64> = assigned.map(|entry| entry["run"].as_i64().unwrap()).collect();
    assert!(runs.is_sorted_by(|a, b| a < b), "the run numbers do not grow: {job:#}");
    assert_eq!(runs.last().copied(), job["run"].as_i64(), "{job:#}");
    let last_run: Vec<&Value> = log.iter().filter(|entry| entry["run"] == job["run"]).collect();
    for event in ["assigned", "started", "completed"] {
        let times = last_run.iter().filter(|entry| entry["event"] == event).count();
        assert_eq!(times, 1, "{event} under the last run: {job:#}");
    }
    let attempts = count("orphaned") + count("failed") + count("timeout");
    assert_eq!(job["retryCount"].as_u64().unwrap(), attempts as u64, "each attempt is in the log: {job:#}");
}
