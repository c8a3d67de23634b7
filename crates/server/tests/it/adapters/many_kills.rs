//! Runs 200 tasks at the same time, and kills the server, the smith, the sandbox and the gateway at random moments.
//!
//! Git, the commands and the WebSocket are real. The tests of each task pass the first time, and the sandbox shares the network of
//! the machine: `crashes.rs` has the corrections, `limits.rs` the isolation.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, RwLock},
    time::{Duration, Instant},
};

use futures_util::{SinkExt, StreamExt, stream};
use serde_json::{Value, json};
use tokio_tungstenite::{connect_async, tungstenite::Message};

use super::{Adapter, Workshop, gateway, text};
use crate::{
    faena::{Faena, TIMEOUT},
    load::Random,
    proxy::Proxy,
};

const TASKS: usize = 200;
/// Tasks that one connection of the gateway follows.
const FOLLOWED: usize = 100;
/// Commands that an adapter runs concurrently.
const CONCURRENCY: usize = 4;
/// FAENA_TEST_KILLS overrides the number of kills, FAENA_TEST_SEED the seed of the random moments.
const KILLS: u64 = 8;
const SEED: u64 = 20_261_118;

// Only built-in commands of the shell, because starting processes takes most of the time of this test.
const PLAN: &str = "echo \"$FAENA_TASK_ID\" >>\"$HOME/plans\"\necho a plan\n";
const CODE: &str = "echo \"$FAENA_TASK_ID\" >>\"$HOME/codes\"\necho hello >greeting\n";
const TEST: &str = "read -r line <greeting\n[ \"$line\" = hello ]\n";

#[derive(Clone, Copy, Debug, PartialEq)]
enum Victim {
    Server,
    Smith,
    Sandbox,
    Gateway,
}

/// Everything that can be killed.
struct Scene {
    workshop: Workshop,
    proxy: Proxy,
    gateway: Adapter,
    gateway_url: Arc<RwLock<String>>,
}

impl Scene {
    async fn start() -> Scene {
        let mut workshop = Workshop::start().await;
        // The adapters find a restarted server under the same address.
        let proxy = Proxy::start(&workshop.faena.url).await;
        workshop.url.clone_from(&proxy.url);
        workshop.script("plan.sh", PLAN);
        workshop.script("code.sh", CODE);
        workshop.script("test.sh", TEST);
        let (gateway, url) = start_gateway(&workshop).await;
        let mut scene = Scene { workshop, proxy, gateway, gateway_url: Arc::new(RwLock::new(url)) };
        scene.start_smith();
        scene.start_sandbox();
        scene
    }

    fn start_smith(&mut self) {
        let concurrency = CONCURRENCY.to_string();
        self.workshop.start_smith("plan.sh", "code.sh", &["--reconcile", "2s", "--concurrency", &concurrency]);
    }

    fn start_sandbox(&mut self) {
        let concurrency = CONCURRENCY.to_string();
        let options = ["--reconcile", "2s", "--concurrency", &concurrency, "--network", "on"];
        self.workshop.start_sandbox("test.sh", &options);
    }

    async fn kill(&mut self, victim: Victim) {
        match victim {
            Victim::Server => {
                self.workshop.faena.kill();
                self.workshop.faena = Faena::start(self.workshop.folder.path(), &[]).await;
                self.proxy.retarget(&self.workshop.faena.url);
                self.proxy.disconnect_all();
            }
            Victim::Smith => {
                self.workshop.smith.as_mut().unwrap().kill();
                self.start_smith();
            }
            Victim::Sandbox => {
                self.workshop.sandbox.as_mut().unwrap().kill();
                self.start_sandbox();
            }
            Victim::Gateway => {
                self.gateway.kill();
                let (gateway, url) = start_gateway(&self.workshop).await;
                self.gateway = gateway;
                *self.gateway_url.write().unwrap() = url;
            }
        }
    }

    /// Returns how far all tasks are: commands that have started, and tasks that have completed.
    async fn progress(&self) -> (usize, usize) {
        let (_, completed) = self.workshop.faena.get("/api/v1/tasks?status=completed&limit=1").await;
        (self.workshop.lines("codes").len(), usize::try_from(completed["total"].as_u64().unwrap()).unwrap())
    }

    /// Waits for a number of completed tasks. Fails if nothing moves for [`TIMEOUT`], not if the machine is slow.
    async fn wait_for_completed(&self, wanted: usize) {
        let (mut last, mut moved_at) = ((0, 0), Instant::now());
        loop {
            let progress = self.progress().await;
            if progress.1 >= wanted {
                return;
            }
            if progress != last {
                (last, moved_at) = (progress, Instant::now());
            }
            assert!(moved_at.elapsed() < TIMEOUT, "the tasks do not advance: {progress:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

async fn start_gateway(workshop: &Workshop) -> (Adapter, String) {
    gateway::start_at(workshop, &workshop.url, &[], &["--progress", "30s"]).await
}

/// Follows tasks like a web page, and connects again whenever the gateway has stopped. Counts in `reported` how often
/// the end of each task was reported.
async fn follow(url: Arc<RwLock<String>>, ids: Vec<String>, reported: Arc<Mutex<BTreeMap<String, usize>>>) {
    let mut open: BTreeSet<String> = ids.into_iter().collect();
    while !open.is_empty() {
        let url = url.read().unwrap().clone();
        if let Ok((mut socket, _)) = connect_async(&url).await {
            for id in &open {
                let request = json!({"tipo": "SEGUIR_TAREA", "payload": {"taskId": id}});
                if socket.send(Message::text(request.to_string())).await.is_err() {
                    break;
                }
            }
            while let Some(Ok(message)) = socket.next().await {
                let Message::Text(body) = message else { continue };
                let message: Value = serde_json::from_str(&body).unwrap();
                if message["tipo"] == "ERROR" {
                    // The server does not answer the gateway now.
                    break;
                }
                if message["tipo"] == "TAREA_FINALIZADA" {
                    assert_eq!(message["payload"]["exito"], true, "{message}");
                    let id = text(&message, "taskId");
                    *reported.lock().unwrap().entry(id.clone()).or_default() += 1;
                    open.remove(&id);
                    if open.is_empty() {
                        return;
                    }
                }
            }
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Returns each victim once, and then others at random.
fn victims(kills: u64, random: &mut Random) -> Vec<Victim> {
    let all = [Victim::Smith, Victim::Gateway, Victim::Server, Victim::Sandbox];
    (0..kills).map(|kill| all[usize::try_from(if kill < 4 { kill } else { random.below(4) }).unwrap()]).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_tasks_survive_kills_of_the_server_and_of_every_adapter() {
    let number = |name: &str, default: u64| std::env::var(name).map_or(default, |text| text.parse().unwrap());
    let (kills, seed) = (number("FAENA_TEST_KILLS", KILLS), number("FAENA_TEST_SEED", SEED));
    println!("FAENA_TEST_SEED={seed}");
    let mut random = Random(seed);
    let mut scene = Scene::start().await;
    let workshop = &scene.workshop;
    let ids: Vec<String> =
        stream::iter(0..TASKS).map(|_| workshop.create("coding-task", false)).buffered(16).collect().await;
    let reported = Arc::new(Mutex::new(BTreeMap::new()));
    let pages = ids.chunks(FOLLOWED).map(|ids| follow(scene.gateway_url.clone(), ids.to_vec(), reported.clone()));
    let pages: Vec<_> = pages.map(tokio::spawn).collect();

    let victims = victims(kills, &mut random);
    for (kill, victim) in victims.iter().enumerate() {
        // One kill at a random moment within each of several equal parts of the run.
        let part = TASKS / (victims.len() + 1);
        let offset = usize::try_from(random.below(part as u64)).unwrap();
        scene.wait_for_completed((kill * part + offset).min(TASKS - 1)).await;
        println!("kill {kill}: {victim:?} at {:?}", scene.progress().await);
        scene.kill(*victim).await;
    }
    scene.wait_for_completed(TASKS).await;
    for page in pages {
        page.await.unwrap();
    }
    let reported = reported.lock().unwrap().clone();
    assert_eq!(reported.keys().collect::<BTreeSet<_>>(), ids.iter().collect(), "every end was reported to every page");
    assert!(reported.values().all(|times| *times == 1), "no end was reported twice: {reported:?}");

    let workshop = &scene.workshop;
    stream::iter(&ids).for_each_concurrent(16, |id| assert_task(workshop, id)).await;
    assert_commits(workshop, &ids);
    // A run that was killed starts again; any other command ran once.
    let smith_kills = victims.iter().filter(|victim| **victim == Victim::Smith).count();
    for name in ["plans", "codes"] {
        let runs = workshop.lines(name);
        assert!(runs.len() <= TASKS + smith_kills * CONCURRENCY, "{} runs of {name}", runs.len());
        assert_eq!(runs.iter().collect::<BTreeSet<_>>().len(), TASKS, "{name}");
    }
}

async fn assert_task(workshop: &Workshop, id: &str) {
    let history = workshop.history(id).await;
    let numbers: Vec<u64> = history.iter().map(|record| record["sequence"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (1..=numbers.len() as u64).collect::<Vec<_>>(), "the history of {id} has a gap");
    let mut state = String::new();
    for record in &history {
        assert_eq!(text(record, "from"), state, "each record starts where the one before ended: {history:#?}");
        state = record["to"].as_str().map_or(state, str::to_owned);
    }
    assert_eq!(state, "COMPLETADA", "{history:#?}");
    let (_, events) = workshop.faena.get(&format!("/api/v1/tasks/{id}/events?limit=1000")).await;
    let events = events["events"].as_array().unwrap();
    let sequences: Vec<String> = events.iter().map(|event| text(event, "sequence")).collect();
    assert_eq!(sequences, (1..=events.len()).map(|number| number.to_string()).collect::<Vec<_>>(), "events of {id}");
    let count = |kind: &str| events.iter().filter(|event| event["type"] == kind).count();
    let moved = |kind: &str| history.iter().filter(|record| record["event"] == kind && !record["to"].is_null()).count();
    for once in ["task.created", "tarea.generar_plan", "tarea.aprobar_plan", "tarea.probar_integracion", "task.ended"] {
        assert_eq!(count(once), 1, "{once} of {id}: {events:#?}");
    }
    for once in ["resultado.plan_generado", "resultado.pr_generada", "resultado.integracion_finalizada"] {
        assert_eq!(moved(once), 1, "{once} of {id}: {history:#?}");
    }
}

/// Asserts that the repository has one branch per task, with one commit each.
fn assert_commits(workshop: &Workshop, ids: &[String]) {
    let git = |arguments: &[&str]| workshop.git(&[&["-C", "git/origin.git"], arguments].concat());
    let branches = git(&["for-each-ref", "--format=%(refname:lstrip=3)", "refs/heads/faena"]);
    let branches: BTreeSet<&str> = branches.lines().collect();
    assert_eq!(branches, ids.iter().map(String::as_str).collect());
    let main = git(&["rev-parse", "main"]);
    let commits = git(&["rev-list", "--parents", "--branches=faena", "--not", "main"]);
    let parents: Vec<&str> =
        commits.lines().filter_map(|line| line.split_once(' ')).map(|(_, parent)| parent).collect();
    assert_eq!(parents.len(), TASKS, "one commit per task");
    assert!(parents.iter().all(|parent| *parent == main), "the parent of every commit is main");
}
