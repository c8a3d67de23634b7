//! Random faults of nodes and databases: no acknowledged job is lost, completed twice or stuck, and work resumes after each fault.
//!
//! The seed decides the faults and their order; when exactly they hit depends on the machine. FAENA_TEST_SEEDS=10 runs that many
//! seeds, FAENA_TEST_SEED=7 begins with that one. A failure prints the seed and the ledger.

mod failover;
mod pooler;
mod stalls;
mod storage;

use std::{
    collections::BTreeSet,
    fmt::Write,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use ::faena::{Context, JobError, Worker};
use reqwest::StatusCode;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::{
    disk::SmallDisk,
    faena::{Faena, command, eventually},
    load::{Load, Random, assert_each_completed_once},
    postgres::Server,
    proxy::Proxy,
};

const FIRST_SEED: u64 = 1;
const FAULTS_PER_SEED: u64 = 6;
/// Work should resume within 10 s; the rest allows for a busy machine.
const RESUME_LIMIT: Duration = Duration::from_secs(25);
const SETTINGS: [(&str, &str); 8] = [
    ("FAENA_ORPHAN_DELAY", "50ms"),
    ("FAENA_NODE_LEASE", "2s"),
    ("FAENA_DATABASE_TIMEOUT", "3s"),
    ("FAENA_WORKER_HEARTBEAT", "500ms"),
    ("FAENA_WORKER_SILENCE", "4s"),
    ("FAENA_RECONNECT_GRACE", "4s"),
    ("FAENA_GUARDIAN_INTERVAL", "500ms"),
    ("WORKER_CONCURRENCY", "10"),
];

/// Starts a proxy in front of a database. Returns it with the URL that leads through it.
pub async fn database_proxy(database: &str) -> (Proxy, String) {
    let (front, name) = database.rsplit_once('/').unwrap();
    let (user, address) = front.rsplit_once('@').unwrap();
    let proxy = Proxy::start(&format!("http://{address}")).await;
    let url = format!("{user}@{}/{name}", proxy.url.strip_prefix("http://").unwrap());
    (proxy, url)
}

#[derive(Clone, Copy, Debug)]
enum Fault {
    /// SIGKILL and a new start.
    KillNode,
    /// SIGSTOP for longer than a lease.
    FreezeNode,
    /// All connections to the database are closed.
    CutDatabase,
    /// The database accepts connections and answers nothing.
    StallDatabase,
    /// PostgreSQL restarts as after a power failure.
    RestartDatabase,
    /// The clock of one node jumps.
    StepClock,
    FillDisk,
}

const ON_POSTGRES: [Fault; 6] = [
    Fault::KillNode,
    Fault::FreezeNode,
    Fault::CutDatabase,
    Fault::StallDatabase,
    Fault::RestartDatabase,
    Fault::StepClock,
];
const ON_SQLITE: [Fault; 4] = [Fault::KillNode, Fault::FreezeNode, Fault::FillDisk, Fault::StepClock];

/// What happened so far. Printed if the test fails.
struct Ledger {
    seed: u64,
    started_at: Instant,
    text: String,
    acknowledged: BTreeSet<String>,
}

impl Ledger {
    fn add(&mut self, line: &str) {
        writeln!(self.text, "{:>8.3} s  {line}", self.started_at.elapsed().as_secs_f64()).unwrap();
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- ledger of seed {} (run it alone with FAENA_TEST_SEED={0} ./test faults)", self.seed);
            eprint!("{}", self.text);
            eprintln!("{} acknowledged probes: {:?}", self.acknowledged.len(), self.acknowledged);
        }
    }
}

/// A server with its own folder, clock and disk, its producers, and a worker of the SDK behind a proxy.
struct Node {
    faena: Faena,
    environment: Vec<(String, String)>,
    folder: tempfile::TempDir,
    load: Load,
    proxy: Proxy,
    stop_worker: CancellationToken,
    worker: JoinHandle<Result<(), ::faena::Error>>,
}

impl Node {
    async fn start(environment: &[(&str, &str)], disk: Option<&SmallDisk>, seed: u64) -> Node {
        let folder = tempfile::tempdir().unwrap();
        let mut all: Vec<(String, String)> =
            SETTINGS.iter().chain(environment).map(|(a, b)| ((*a).into(), (*b).into())).collect();
        all.extend(clock(folder.path()));
        set_clock(folder.path(), 0);
        let mut faena = spawn(folder.path(), &all, disk);
        faena.wait_until_listening().await;
        let load = Load::start(seed, 2, Duration::from_millis(25));
        load.aim_at(&faena);
        let proxy = Proxy::start(&faena.url).await;
        let stop_worker = CancellationToken::new();
        let worker = Worker::new()
            .url(&proxy.url)
            .name(format!("worker-{seed}"))
            .concurrency(4)
            .handle("faults.work", |_: Context, payload: Value| async move { Ok::<_, JobError>(payload) });
        let worker = tokio::spawn(worker.run_until(stop_worker.clone().cancelled_owned()));
        Node { faena, environment: all, folder, load, proxy, stop_worker, worker }
    }

    async fn restart(&mut self, disk: Option<&SmallDisk>) {
        self.faena.kill();
        self.faena = spawn(self.folder.path(), &self.environment, disk);
        self.faena.wait_until_listening().await;
        self.load.aim_at(&self.faena);
        self.proxy.retarget(&self.faena.url);
        self.proxy.disconnect_all();
    }

    /// Submits a job until it is accepted, and returns its id.
    async fn submit(&self, kind: &str) -> String {
        eventually("a job is accepted", async || {
            let body = json!({"name": kind, "maxRetries": 10});
            let answer =
                self.faena.http.post(format!("{}/api/v1/jobs", self.faena.url)).json(&body).send().await.ok()?;
            let is_accepted = answer.status() == StatusCode::CREATED;
            let answer: Value = answer.json().await.ok()?;
            is_accepted.then(|| answer["id"].as_str().unwrap().to_owned())
        })
        .await
    }
}

fn spawn(folder: &Path, environment: &[(String, String)], disk: Option<&SmallDisk>) -> Faena {
    let program = disk.map_or_else(
        || command(folder),
        |disk| {
            let mut program = disk.program();
            program.current_dir(folder);
            program
        },
    );
    let environment: Vec<(&str, &str)> =
        environment.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    Faena::spawn_with(program, folder, &environment, &[])
}

/// Returns the variables that let a test change the clock of a process. The monotonic clock is not changed.
fn clock(folder: &Path) -> Vec<(String, String)> {
    let output = Command::new("sh").args(["-c", "ls /usr/lib/*/faketime/libfaketimeMT.so.1"]).output().unwrap();
    let library = String::from_utf8(output.stdout).unwrap().lines().next().map(str::to_owned);
    let library =
        library.expect("missing: libfaketime (Debian: faketime); run this test with ./test, which installs it");
    let variables = [
        ("LD_PRELOAD", library),
        ("FAKETIME_TIMESTAMP_FILE", folder.join("clock").display().to_string()),
        ("FAKETIME_NO_CACHE", "1".into()),
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1".into()),
    ];
    variables.map(|(name, value)| (name.to_owned(), value)).to_vec()
}

fn set_clock(folder: &Path, seconds: i64) {
    let fresh = folder.join("clock.new");
    std::fs::write(&fresh, format!("{seconds:+}\n")).unwrap();
    std::fs::rename(fresh, folder.join("clock")).unwrap();
}

/// Everything that a fault can hit.
struct World {
    nodes: Vec<Node>,
    database: Option<(Server, Proxy)>,
    disk: Option<SmallDisk>,
}

impl World {
    async fn inject(&mut self, fault: Fault, random: &mut Random) {
        let at = random.below(self.nodes.len() as u64) as usize;
        let pause = Duration::from_millis(500 + random.below(3_500));
        match fault {
            Fault::KillNode => self.nodes[at].restart(self.disk.as_ref()).await,
            Fault::FreezeNode => {
                self.nodes[at].faena.signal("STOP");
                tokio::time::sleep(pause).await;
                self.nodes[at].faena.signal("CONT");
            }
            Fault::CutDatabase => self.proxy().disconnect_all(),
            Fault::StallDatabase => {
                self.proxy().drop_all();
                tokio::time::sleep(pause).await;
                self.proxy().forward();
                self.proxy().disconnect_all();
            }
            Fault::RestartDatabase => {
                tokio::task::block_in_place(|| self.database.as_ref().unwrap().0.restart_immediately());
            }
            Fault::StepClock => {
                let seconds = i64::try_from(random.below(7)).unwrap() - 3;
                set_clock(self.nodes[at].folder.path(), seconds);
            }
            Fault::FillDisk => {
                let disk = self.disk.as_ref().unwrap();
                tokio::task::block_in_place(|| disk.fill());
                tokio::time::sleep(pause).await;
                disk.free();
            }
        }
    }

    fn proxy(&self) -> &Proxy {
        &self.database.as_ref().unwrap().1
    }

    /// Checks that every node accepts jobs, and that built-in and connected workers complete them.
    async fn assert_resumes(&self, ledger: &mut Ledger) -> Duration {
        let started_at = Instant::now();
        for node in &self.nodes {
            for kind in ["noop", "faults.work"] {
                let id = node.submit(kind).await;
                node.faena.wait_for_state(&id, "COMPLETED").await;
                ledger.acknowledged.insert(id);
            }
        }
        let took = started_at.elapsed();
        ledger.add(&format!("resumed after {took:?}, {} acknowledged", self.acknowledged()));
        assert!(took < RESUME_LIMIT, "work resumed {took:?} after the end of the fault");
        took
    }

    fn acknowledged(&self) -> usize {
        self.nodes.iter().map(|node| node.load.count()).sum()
    }
}

async fn run_seed(mut world: World, faults: &[Fault], seed: u64) {
    let mut random = Random(seed);
    let mut ledger = Ledger { seed, started_at: Instant::now(), text: String::new(), acknowledged: BTreeSet::new() };
    let mut longest = world.assert_resumes(&mut ledger).await;
    for _ in 0..FAULTS_PER_SEED {
        let fault = faults[random.below(faults.len() as u64) as usize];
        ledger.add(&format!("{fault:?}"));
        world.inject(fault, &mut random).await;
        longest = longest.max(world.assert_resumes(&mut ledger).await);
    }
    for node in &mut world.nodes {
        let produced = node.load.stop().await;
        ledger.acknowledged.extend(produced);
        node.load.assert_rejections_are_503();
        assert!(node.faena.exit_status().is_none(), "a server has exited");
    }
    assert_each_completed_once(&world.nodes[0].faena, &ledger.acknowledged).await;
    println!(
        "seed {seed}: {} jobs acknowledged and completed once, work resumed within {longest:?} of the end of each fault, {:?} in total",
        ledger.acknowledged.len(),
        ledger.started_at.elapsed()
    );
    for node in world.nodes {
        node.stop_worker.cancel();
        let _ = node.worker.await;
    }
}

fn seeds() -> impl Iterator<Item = u64> {
    let number = |name| std::env::var(name).ok().map(|text: String| text.parse::<u64>().unwrap());
    let first = number("FAENA_TEST_SEED").unwrap_or(FIRST_SEED);
    first..first + number("FAENA_TEST_SEEDS").unwrap_or(1)
}

#[tokio::test(flavor = "multi_thread")]
async fn random_faults_of_two_nodes_on_postgres_lose_no_job() {
    for seed in seeds() {
        let server = tokio::task::block_in_place(Server::start);
        let (proxy, url) = database_proxy(&server.url).await;
        let environment = [("DATABASE_URL", url.as_str())];
        let nodes =
            vec![Node::start(&environment, None, 2 * seed).await, Node::start(&environment, None, 2 * seed + 1).await];
        let world = World { nodes, database: Some((server, proxy)), disk: None };
        run_seed(world, &ON_POSTGRES, seed).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn random_faults_of_a_node_on_sqlite_lose_no_job() {
    for seed in seeds() {
        let folder = tempfile::tempdir().unwrap();
        let disk = SmallDisk::mount(&folder.path().join("disk"), 64);
        let url = format!("sqlite:{}/faena.db", disk.folder.display());
        let node = Node::start(&[("DATABASE_URL", &url)], Some(&disk), seed).await;
        run_seed(World { nodes: vec![node], database: None, disk: Some(disk) }, &ON_SQLITE, seed).await;
    }
}
