//! The server is killed with SIGKILL at random moments while 200 tasks wait for events, timers, jobs and approvals: every task
//! ends, and nothing happens twice.

use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
    sync::{
        Arc, RwLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use ::faena_store as store;
use faena_domain::{JobState, TaskId};
use faena_machine::{Outcome, Record};
use futures_util::{StreamExt, future::join_all, stream};
use reqwest::{Client, StatusCode};
use serde_json::{Value, json};
use store::{EventQuery, Filter, Page, Start, Store, StoreOptions, TaskView};

use crate::{
    faena::{Faena, TIMEOUT, eventually, http},
    load::Random,
    postgres::Database,
};

const MACHINE: &str = "
machine: delivery
version: 1
events: {begin: {}, note: {}, accept: {}, finish: {}, delivery.done: {}}
initial: NEW
states:
  NEW: {deadline: {total: 1h, to: LATE}, on: {begin: WORKING}}
  WORKING:
    deadline: {total: 1h, to: LATE}
    entry: [{job: sleep, name: work, data: {ms: ctx.ms}, options: {maxRetries: 10, retryDelay: 100}}]
    on: {job.work.completed: REVIEW, job.work.failed: LATE}
  REVIEW:
    approval: {subject: ctx.number, self: true, expires: {after: 1h, to: LATE}}
    on: {accept: {approve: true}, approval.granted: COOLING, approval.denied: LATE}
  COOLING:
    deadline: {total: 1h, to: LATE}
    timers: {cool: {after: 300ms}}
    on: {timer.cool: PACKING}
  PACKING:
    deadline: {total: 1h, to: LATE}
    entry: [{job: noop, name: pack, options: {maxRetries: 10, retryDelay: 100}}]
    on: {job.pack.completed: READY, job.pack.failed: LATE}
  READY:
    deadline: {total: 1h, to: LATE}
    on: {note: {set: {notes: ctx.notes + 1}}, finish: DONE}
  DONE: {final: true, entry: [{emit: delivery.done, data: {notes: ctx.notes}}]}
  LATE: {final: true, ends: failure}
";
const TIMER_MS: i64 = 300;
const TASKS: u64 = 200;
const NOTES: u64 = 3;
/// FAENA_TEST_KILLS overrides the number of kills, FAENA_TEST_SEED the seed of the random moments.
const KILLS: u64 = 8;
const SEED: u64 = 20_261_117;

const SETTINGS: [(&str, &str); 3] =
    [("FAENA_ORPHAN_DELAY", "50ms"), ("FAENA_NODE_LEASE", "1s"), ("WORKER_CONCURRENCY", "20")];

/// A client that repeats every request until it is answered, by whichever server runs then.
#[derive(Clone)]
struct Participant {
    http: Client,
    url: Arc<RwLock<String>>,
    acknowledged: Arc<AtomicU64>,
}

impl Participant {
    /// Sends a request once. `None` if no complete answer arrived, or the answer was 503.
    async fn ask(&self, path: &str, body: Option<&Value>) -> Option<(StatusCode, Value)> {
        let url = format!("{}{path}", self.url.read().unwrap());
        let request = match body {
            Some(body) => self.http.post(url).json(body),
            None => self.http.get(url),
        };
        let answer = request.send().await.ok()?;
        let status = answer.status();
        let body = answer.json().await.ok()?;
        (status != StatusCode::SERVICE_UNAVAILABLE).then_some((status, body))
    }

    async fn ask_until_answered(&self, path: &str, body: Option<&Value>) -> (StatusCode, Value) {
        let started_at = Instant::now();
        loop {
            if let Some(answer) = self.ask(path, body).await {
                return answer;
            }
            assert!(started_at.elapsed() < TIMEOUT, "no answer within {TIMEOUT:?}: {path}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Creates a task. If the answer is lost, checks whether the task exists before it creates another.
    async fn create(&self, correlation: &str, data: &Value) -> String {
        let body = json!({"machine": "delivery", "correlationId": correlation, "data": data});
        loop {
            if let Some((status, task)) = self.ask("/api/v1/tasks", Some(&body)).await {
                assert_eq!(status, StatusCode::CREATED, "{task}");
                self.acknowledged.fetch_add(1, Ordering::Relaxed);
                return task["id"].as_str().unwrap().to_owned();
            }
            let path = format!("/api/v1/tasks?correlationId={correlation}");
            let (_, list) = self.ask_until_answered(&path, None).await;
            if let Some(task) = list["tasks"].get(0) {
                return task["id"].as_str().unwrap().to_owned();
            }
        }
    }

    /// Sends an event until it is acknowledged.
    async fn send(&self, task: &str, kind: &str, number: u64) -> Value {
        let event = json!({"type": kind, "metadata": {"traceId": format!("{kind}-{number}"), "originator": "test"}});
        let (status, answer) = self.ask_until_answered(&format!("/api/v1/tasks/{task}/events"), Some(&event)).await;
        assert_eq!(status, StatusCode::OK, "{kind}: {answer}");
        self.acknowledged.fetch_add(1, Ordering::Relaxed);
        answer
    }

    /// Sends an event once or, at random, twice concurrently. Both answers must be the same.
    async fn send_once_or_twice(&self, task: &str, kind: &str, number: u64, random: &mut Random) {
        if random.below(2) == 0 {
            self.send(task, kind, number).await;
            return;
        }
        let (first, second) = tokio::join!(self.send(task, kind, number), self.send(task, kind, number));
        assert_eq!((&first["outcome"], &first["state"]), (&second["outcome"], &second["state"]), "{first} {second}");
        assert!(first["duplicate"] == true || second["duplicate"] == true, "{first} {second}");
    }

    /// Creates a task and sends all its events. Some arrive before the task waits for them.
    async fn drive(self, number: u64, mut random: Random) {
        let data = json!({"number": number, "ms": random.below(60), "notes": 0});
        let task = self.create(&format!("delivery-{number}"), &data).await;
        let early = random.below(NOTES + 1);
        for note in 0..early {
            self.send_once_or_twice(&task, "note", note, &mut random).await;
        }
        self.send_once_or_twice(&task, "begin", 0, &mut random).await;
        for note in early..NOTES {
            tokio::time::sleep(Duration::from_millis(random.below(400))).await;
            self.send_once_or_twice(&task, "note", note, &mut random).await;
        }
        self.send_once_or_twice(&task, "finish", 0, &mut random).await;
    }

    /// Approves every open request, through the approval route or with an event, until all tasks have ended.
    async fn approve_until_all_tasks_end(self) {
        let (mut progress, mut progress_at) = ((0, 0), Instant::now());
        loop {
            let (_, waiting) = self.ask_until_answered("/api/v1/tasks?approval=true&limit=100", None).await;
            let open = waiting["tasks"].as_array().unwrap().clone();
            stream::iter(open).for_each_concurrent(10, |task| self.approve(task)).await;
            let (_, running) = self.ask_until_answered("/api/v1/tasks?status=running&limit=1", None).await;
            let (_, all) = self.ask_until_answered("/api/v1/tasks?limit=1", None).await;
            if running["total"] == 0 && all["total"] == TASKS {
                return;
            }
            let now = (self.acknowledged.load(Ordering::Relaxed), running["total"].as_u64().unwrap());
            if now != progress {
                (progress, progress_at) = (now, Instant::now());
            }
            assert!(progress_at.elapsed() < TIMEOUT, "not all tasks end, for example {running:#}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn approve(&self, task: Value) {
        let id = task["id"].as_str().unwrap();
        if task["data"]["number"].as_u64().unwrap().is_multiple_of(2) {
            self.send(id, "accept", 0).await;
            return;
        }
        let decision = json!({"hash": task["approval"]["hash"], "comment": "go ahead"});
        let (status, answer) = self.ask_until_answered(&format!("/api/v1/tasks/{id}/approve"), Some(&decision)).await;
        // A conflict: the decision was counted, but the answer was lost.
        assert!([StatusCode::OK, StatusCode::CONFLICT].contains(&status), "{answer}");
        self.acknowledged.fetch_add(1, Ordering::Relaxed);
    }
}

async fn assert_tasks_survive_kills(folder: &Path, environment: &[(&str, &str)], database_url: &str) {
    let number = |name: &str, default: u64| std::env::var(name).map_or(default, |text| text.parse().unwrap());
    let (kills, seed) = (number("FAENA_TEST_KILLS", KILLS), number("FAENA_TEST_SEED", SEED));
    println!("FAENA_TEST_SEED={seed}");
    let mut random = Random(seed);
    let mut faena = Faena::start(folder, environment).await;
    let (status, answer) = faena.post("/api/v1/machines", json!({"definition": MACHINE})).await;
    assert_eq!(status, StatusCode::CREATED, "{answer}");
    let participant =
        Participant { http: http(), url: Arc::new(RwLock::new(faena.url.clone())), acknowledged: Arc::default() };
    let drivers = (0..TASKS).map(|n| tokio::spawn(participant.clone().drive(n, Random(seed.wrapping_add(n * 7_919)))));
    let drivers: Vec<_> = drivers.collect();
    let approver = tokio::spawn(participant.clone().approve_until_all_tasks_end());
    for _ in 0..kills {
        let wanted = participant.acknowledged.load(Ordering::Relaxed) + 20 + random.below(120);
        eventually("the tasks advance", async || {
            let enough = participant.acknowledged.load(Ordering::Relaxed) >= wanted;
            (enough || approver.is_finished()).then_some(())
        })
        .await;
        tokio::time::sleep(Duration::from_millis(random.below(40))).await;
        faena.kill();
        if random.below(4) == 0 {
            // This server is killed before it listens: while it opens the database, joins the cluster or recovers jobs.
            let mut starting = Faena::spawn(folder, environment);
            tokio::time::sleep(Duration::from_millis(random.below(150))).await;
            starting.kill();
        }
        faena = Faena::start(folder, environment).await;
        participant.url.write().unwrap().clone_from(&faena.url);
    }
    for driver in drivers {
        driver.await.unwrap();
    }
    approver.await.unwrap();
    faena.wait_until_all_jobs_end().await;
    assert!(!faena.log().contains("panicked"));
    faena.kill();
    let store = store::open(database_url, StoreOptions::default()).await.unwrap();
    assert_nothing_happens_twice(&*store).await;
    store.close().await;
}

async fn assert_nothing_happens_twice(store: &dyn Store) {
    let (tasks, total) = store.task_list(Default::default(), None, 1_000).await.unwrap();
    assert_eq!(total, TASKS, "each task exists once");
    let mut jobs: HashMap<String, Vec<String>> = HashMap::new();
    let page = Page { start: Start::Offset(0), ..Page::offset(0, 2_000) };
    for job in store.job_list(&Filter::default(), page).await.unwrap().jobs {
        assert_eq!(job.status, JobState::Completed, "{}", job.id);
        jobs.entry(job.correlation_id.clone()).or_default().push(job.kind.to_string());
    }
    let mut published: HashMap<uuid::Uuid, Vec<(i64, String)>> = HashMap::new();
    let mut position = 0;
    loop {
        let events = store.event_list(EventQuery::After(position), 1_000).await.unwrap();
        let Some(last) = events.last() else { break };
        position = last.position;
        for event in events {
            published.entry(event.subject).or_default().push((event.sequence, event.kind));
        }
    }
    let checks = tasks.iter().map(|view| async {
        let id: TaskId = view.task.id.parse().unwrap();
        let history = store.task_history(id, 0, 1_000).await.unwrap();
        assert_task(view, &history);
        let kinds = &mut jobs.get(&view.correlation).cloned().unwrap_or_default();
        kinds.sort_unstable();
        assert_eq!(*kinds, ["noop", "sleep"], "each job was submitted once: {history:#?}");
        let events = &published[&id.0];
        let sequences: Vec<i64> = events.iter().map(|(sequence, _)| *sequence).collect();
        assert_eq!(sequences, (1..=i64::try_from(events.len()).unwrap()).collect::<Vec<_>>(), "{events:?}");
        for once in ["task.created", "delivery.done", "task.ended"] {
            assert_eq!(events.iter().filter(|(_, kind)| kind == once).count(), 1, "{once}: {events:?}");
        }
    });
    join_all(checks).await;
}

fn assert_task(view: &TaskView, history: &[Record]) {
    assert_eq!(view.task.state(), "DONE", "{history:#?}");
    assert_eq!(view.task.data["notes"], NOTES, "each note was applied once: {history:#?}");
    let sequences: Vec<u64> = history.iter().map(|record| record.sequence).collect();
    assert_eq!(sequences, (1..=history.len() as u64).collect::<Vec<_>>(), "the history has no gap");
    let mut state = String::new();
    for record in history {
        assert_eq!(record.from, state, "each record starts where the one before ended: {history:#?}");
        state = record.to.clone().unwrap_or(state);
    }
    let mut applied: BTreeMap<&str, usize> = BTreeMap::new();
    for record in history.iter().filter(|record| record.outcome == Outcome::Applied && !record.event_id.is_empty()) {
        *applied.entry(&record.event_id).or_default() += 1;
    }
    let ids: Vec<&str> = applied.keys().copied().filter(|id| *id != "accept-0").collect();
    assert_eq!(ids, ["begin-0", "finish-0", "note-0", "note-1", "note-2"], "{history:#?}");
    assert!(applied.values().all(|count| *count == 1), "each event was applied once: {history:#?}");
    let moves: Vec<&str> = history.iter().filter_map(|record| record.to.as_deref()).collect();
    assert_eq!(moves, ["NEW", "WORKING", "REVIEW", "COOLING", "PACKING", "READY", "DONE"]);
    let entered = |name: &str| history.iter().find(|record| record.to.as_deref() == Some(name)).unwrap().at;
    assert!(entered("PACKING").ms_since(entered("COOLING")) >= TIMER_MS, "the timer was early: {history:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_task_ends_and_nothing_happens_twice_although_the_server_is_killed_repeatedly_on_sqlite() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", folder.path().join("tasks.db").display());
    let environment = [&SETTINGS[..], &[("DATABASE_URL", url.as_str())]].concat();
    assert_tasks_survive_kills(folder.path(), &environment, &url).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_task_ends_and_nothing_happens_twice_although_the_server_is_killed_repeatedly_on_postgres() {
    let folder = tempfile::tempdir().unwrap();
    let database = Database::create().await;
    let environment = [&SETTINGS[..], &[("DATABASE_URL", database.url.as_str())]].concat();
    assert_tasks_survive_kills(folder.path(), &environment, &database.url).await;
}
