//! Runs the engine on Redis with Sentinel and on a Redis cluster while their servers fail.

use std::{
    path::Path,
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU16, Ordering},
    time::Duration,
};

use faena_domain::{JobId, JobState, Timestamp};
use faena_engine::{EngineConfig, RedisQueueConfig};

use crate::fixture::{Fixture, eventually, job, open_postgres, open_sqlite};

/// A Redis process of one test.
struct Process {
    child: Child,
    port: u16,
    _folder: tempfile::TempDir,
}

impl Process {
    fn start(arguments: &[&str]) -> Process {
        let port = free_port();
        Process::run(port, |command| command.args(["--save", "", "--appendonly", "no"]).args(arguments))
    }

    fn sentinel(file: &Path) -> Process {
        Process::run(free_port(), |command| command.arg(file).arg("--sentinel"))
    }

    fn run(port: u16, arguments: impl Fn(&mut Command) -> &mut Command) -> Process {
        let program = std::env::var("FAENA_TEST_REDIS_BIN").unwrap_or_else(|_| "redis-server".into());
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new(program);
        arguments(&mut command);
        command.args(["--bind", "127.0.0.1", "--port", &port.to_string()]).arg("--dir").arg(folder.path());
        let mut child = command.stdout(Stdio::null()).spawn().unwrap();
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert_eq!(child.try_wait().unwrap(), None, "the server ended at its start");
            std::thread::sleep(Duration::from_millis(5));
        }
        Process { child, port, _folder: folder }
    }

    async fn ask(&self, words: &[&str]) -> String {
        let client = redis::Client::open(format!("redis://127.0.0.1:{}", self.port)).unwrap();
        let mut connection = client.get_multiplexed_async_connection().await.unwrap();
        let mut command = redis::cmd(words[0]);
        for word in &words[1..] {
            command.arg(*word);
        }
        let answer: redis::Value = command.query_async(&mut connection).await.unwrap();
        format!("{answer:?}")
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Returns a free port. The port 10 000 above it, which a cluster uses for its bus, is free too.
///
/// Both are below the ports that the system gives to outgoing connections, of which other tests open many.
fn free_port() -> u16 {
    static TRIED: AtomicU16 = AtomicU16::new(0);
    loop {
        let offset = std::process::id().wrapping_add(u32::from(TRIED.fetch_add(1, Ordering::Relaxed)));
        let port = 10_000 + u16::try_from(offset % 10_000).unwrap();
        let is_free = |port: u16| std::net::TcpListener::bind(("127.0.0.1", port)).is_ok();
        if is_free(port) && is_free(port + 10_000) {
            return port;
        }
    }
}

fn config(url: &str) -> EngineConfig {
    let queue = RedisQueueConfig { address: url.parse().unwrap(), prefix: "scheduler".into(), fallback: false };
    EngineConfig {
        redis_queue: Some(queue),
        guardian_interval: Duration::from_millis(500),
        concurrency: 20,
        ..EngineConfig::default()
    }
}

async fn submit(fixture: &Fixture, count: usize) -> Vec<JobId> {
    let jobs = (0..count).map(|_| job("sleep", r#"{"ms": 5}"#)).collect();
    fixture.store.job_submit(jobs, None, Timestamp::now()).await.unwrap().iter().map(|job| job.id).collect()
}

async fn assert_all_complete_once(fixture: &Fixture, ids: &[JobId]) {
    for id in ids {
        let job = fixture.wait_for_state(*id, JobState::Completed).await;
        assert_eq!(job.retry_count, 0, "{job:#?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_continue_on_the_master_that_sentinels_promote() {
    let mut master = Process::start(&[]);
    let replica = Process::start(&["--replicaof", "127.0.0.1", &master.port.to_string()]);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("sentinel.conf");
    let settings = format!(
        "sentinel monitor main 127.0.0.1 {} 1\nsentinel down-after-milliseconds main 300\nsentinel failover-timeout main 2000\n",
        master.port
    );
    std::fs::write(&file, settings).unwrap();
    let sentinel = Process::sentinel(&file);
    // A sentinel promotes only a replica that it knows and that is in sync.
    eventually("the replica is known and in sync", async || {
        let known = sentinel.ask(&["SENTINEL", "replicas", "main"]).await;
        let synced = replica.ask(&["INFO", "replication"]).await;
        (known.contains(&replica.port.to_string()) && synced.contains("master_link_status:up")).then_some(())
    })
    .await;
    let url = format!("redis+sentinel://127.0.0.1:{}/main", sentinel.port);
    let fixture = Fixture::over(open_postgres().await, config(&url)).await;
    let mut ids = submit(&fixture, 300).await;
    fixture.wait_for_state(ids[20], JobState::Completed).await;
    master.kill();
    ids.extend(submit(&fixture, 100).await);
    assert_all_complete_once(&fixture, &ids).await;
    assert!(replica.ask(&["ROLE"]).await.contains("master"));
    fixture.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_continue_on_the_replica_that_a_cluster_promotes() {
    // A replica calls another election after every election that slow disks or busy cores made fail. By default it stops when its data
    // is 20 s old.
    let settings =
        ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--cluster-replica-validity-factor", "0"];
    let mut nodes: Vec<Process> = (0..4).map(|_| Process::start(&settings)).collect();
    let thirds = [("0", "5460"), ("5461", "10922"), ("10923", "16383")];
    for (at, node) in nodes.iter().enumerate() {
        if let Some((first, last)) = thirds.get(at) {
            node.ask(&["CLUSTER", "ADDSLOTSRANGE", first, last]).await;
        }
        nodes[0].ask(&["CLUSTER", "MEET", "127.0.0.1", &node.port.to_string()]).await;
    }
    for node in &nodes {
        eventually("the cluster is ready", async || {
            let info = node.ask(&["CLUSTER", "INFO"]).await;
            (info.contains("cluster_state:ok") && info.contains("cluster_known_nodes:4")).then_some(())
        })
        .await;
    }
    // The slot of {scheduler} belongs to one of the first three nodes; the fourth node becomes its replica.
    let slot = nodes[0].ask(&["CLUSTER", "KEYSLOT", "{scheduler}:faena"]).await;
    let slot: u16 = slot.trim_matches(|c: char| !c.is_ascii_digit()).parse().unwrap();
    let owner = thirds.iter().position(|(_, last)| slot <= last.parse().unwrap()).unwrap();
    let id = nodes[owner].ask(&["CLUSTER", "MYID"]).await;
    let id: String = id.chars().filter(char::is_ascii_hexdigit).collect();
    let id = &id[id.len() - 40..];
    eventually("the fourth node becomes a replica", async || {
        let client = redis::Client::open(format!("redis://127.0.0.1:{}", nodes[3].port)).unwrap();
        let mut connection = client.get_multiplexed_async_connection().await.unwrap();
        redis::cmd("CLUSTER").arg("REPLICATE").arg(id).query_async::<()>(&mut connection).await.ok()
    })
    .await;
    eventually("the replica is in sync", async || {
        let is_synced = nodes[3].ask(&["INFO", "replication"]).await.contains("master_link_status:up");
        (is_synced && nodes[owner].ask(&["CLUSTER", "INFO"]).await.contains("cluster_state:ok")).then_some(())
    })
    .await;
    let seeds: Vec<String> = nodes.iter().map(|node| format!("127.0.0.1:{}", node.port)).collect();
    let fixture = Fixture::over(open_sqlite().await, config(&format!("redis://{}", seeds.join(",")))).await;
    let mut ids = submit(&fixture, 300).await;
    fixture.wait_for_state(ids[20], JobState::Completed).await;
    nodes[owner].kill();
    ids.extend(submit(&fixture, 100).await);
    assert_all_complete_once(&fixture, &ids).await;
    assert!(nodes[3].ask(&["ROLE"]).await.contains("master"));
    fixture.stop().await;
}
