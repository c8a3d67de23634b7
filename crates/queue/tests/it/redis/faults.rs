//! Faults of the server: restarts, failovers, a cluster, passwords.

use faena_queue::{LaneTake, Move, Placement, QueueError, ReadyEntry, RedisQueue, TakeRequest};
use uuid::Uuid;

use crate::servers::{Server, command, eventually, free_port, queue};

fn entry() -> ReadyEntry {
    ReadyEntry { id: Uuid::now_v7(), lane: 1, score: 1 }
}

/// Puts a job into the queue and takes it out again.
async fn put_and_take(queue: &RedisQueue) -> Result<(), QueueError> {
    queue.prepare(&[1], 1).await?;
    queue.apply(&[Move::Put(entry())], Placement::Now).await?;
    let lanes = vec![LaneTake { lane: 1, queue: 0, bias: 0 }];
    let taken = queue.take(&[TakeRequest { owner: Uuid::nil(), limit: 1, first_queue: 0, lanes }], 1).await?;
    assert_eq!(taken[0].len(), 1);
    Ok(())
}

#[tokio::test]
async fn a_killed_server_is_found_again_and_known_to_be_empty() {
    let mut server = Server::start(&[]);
    let queue = queue(&server.url(), "scheduler");
    put_and_take(&queue).await.unwrap();
    server.kill();
    assert!(put_and_take(&queue).await.unwrap_err().is_unavailable());
    assert!(queue.outage().is_some());
    let (port, before) = (server.port, queue.connections());
    let _server = Server::on(port, &[]);
    let error = eventually("a connection", async || match queue.stats(&[1]).await {
        Err(error) if error.is_unavailable() => None,
        other => Some(other),
    })
    .await;
    assert_eq!(error, Err(QueueError::NotFilled));
    assert!(queue.connections() > before && queue.outage().is_none());
    put_and_take(&queue).await.unwrap();
}

#[tokio::test]
async fn a_flushed_server_and_forgotten_scripts_are_noticed() {
    let server = Server::start(&[]);
    let queue = queue(&server.url(), "scheduler");
    put_and_take(&queue).await.unwrap();
    command(&server.url(), &["SCRIPT", "FLUSH"]).await;
    put_and_take(&queue).await.unwrap();
    command(&server.url(), &["FLUSHALL"]).await;
    assert_eq!(queue.stats(&[1]).await, Err(QueueError::NotFilled));
    put_and_take(&queue).await.unwrap();
}

#[tokio::test]
async fn a_password_and_an_acl_user_are_used_and_never_shown() {
    let server = Server::start(&["--requirepass", "s3cret-one"]);
    let port = server.port;
    let wrong = queue(&format!("redis://:wr0ng-one@127.0.0.1:{port}"), "scheduler");
    let error = wrong.ping().await.unwrap_err();
    assert!(error.is_unavailable() && !format!("{error} {error:?}").contains("wr0ng"), "{error:?}");
    let none = queue(&server.url(), "scheduler");
    assert!(none.ping().await.unwrap_err().is_unavailable());
    let right = format!("redis://:s3cret-one@127.0.0.1:{port}");
    put_and_take(&queue(&right, "scheduler")).await.unwrap();
    // This user may access only its own keys, and may not run commands that Faena does not need.
    let rules = ["ACL", "SETUSER", "faena", "on", ">s3cret-two", "~jobs:*", "+@all", "-@dangerous", "-keys"];
    command(&right, &rules).await;
    put_and_take(&queue(&format!("redis://faena:s3cret-two@127.0.0.1:{port}"), "jobs")).await.unwrap();
    let denied = queue(&format!("redis://faena:s3cret-two@127.0.0.1:{port}"), "other");
    assert!(matches!(put_and_take(&denied).await.unwrap_err(), QueueError::Rejected { .. }));
}

#[tokio::test]
async fn a_master_that_becomes_a_replica_is_abandoned() {
    let (master, replica) = (Server::start(&[]), Server::start(&[]));
    let (first, second) = (master.port.to_string(), replica.port.to_string());
    command(&replica.url(), &["REPLICAOF", "127.0.0.1", &first]).await;
    let url = format!("redis://127.0.0.1:{first},127.0.0.1:{second}");
    let queue = queue(&url, "scheduler");
    put_and_take(&queue).await.unwrap();
    command(&replica.url(), &["REPLICAOF", "NO", "ONE"]).await;
    command(&master.url(), &["REPLICAOF", "127.0.0.1", &second]).await;
    // The first write is answered with READONLY, the next one goes to the new master.
    eventually("the new master", async || put_and_take(&queue).await.ok()).await;
}

#[tokio::test]
async fn a_sentinel_names_the_master_after_a_failover() {
    let mut master = Server::start(&[]);
    let replica = Server::start(&["--replicaof", "127.0.0.1", &master.port.to_string()]);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("sentinel.conf");
    let port = master.port;
    let settings = format!(
        "sentinel monitor main 127.0.0.1 {port} 1\nsentinel down-after-milliseconds main 300\nsentinel failover-timeout main 2000\n"
    );
    std::fs::write(&file, settings).unwrap();
    let sentinel_port = free_port();
    let sentinel = Sentinel::start(&file, sentinel_port);
    let queue = queue(&format!("redis+sentinel://127.0.0.1:{sentinel_port}/main"), "scheduler");
    eventually("the sentinel", async || put_and_take(&queue).await.ok()).await;
    // A sentinel promotes only a replica that it knows and that is in sync.
    let (sentinel_url, replica_port) = (format!("redis://127.0.0.1:{sentinel_port}"), replica.port.to_string());
    eventually("the replica in the list of the sentinel", async || {
        let known = format!("{:?}", command(&sentinel_url, &["SENTINEL", "replicas", "main"]).await);
        let synced = format!("{:?}", command(&replica.url(), &["INFO", "replication"]).await);
        (known.contains(&replica_port) && synced.contains("master_link_status:up")).then_some(())
    })
    .await;
    master.kill();
    eventually("the promoted replica", async || put_and_take(&queue).await.ok()).await;
    assert!(format!("{:?}", command(&replica.url(), &["ROLE"]).await).contains("master"));
    drop(sentinel);
}

struct Sentinel(std::process::Child);

impl Sentinel {
    fn start(file: &std::path::Path, port: u16) -> Sentinel {
        let program = std::env::var("FAENA_TEST_REDIS_BIN").unwrap_or_else(|_| "redis-server".into());
        let child = std::process::Command::new(program)
            .arg(file)
            .args(["--sentinel", "--bind", "127.0.0.1", "--port", &port.to_string()])
            .stdout(std::process::Stdio::null())
            .spawn();
        Sentinel(child.unwrap())
    }
}

impl Drop for Sentinel {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn a_cluster_of_three_nodes_has_all_keys_in_one_slot() {
    let nodes: Vec<Server> = (0..3).map(|_| cluster_node()).collect();
    let thirds = [("0", "5460"), ("5461", "10922"), ("10923", "16383")];
    for (node, (first, last)) in nodes.iter().zip(thirds) {
        command(&node.url(), &["CLUSTER", "ADDSLOTSRANGE", first, last]).await;
        command(&nodes[0].url(), &["CLUSTER", "MEET", "127.0.0.1", &node.port.to_string()]).await;
    }
    for node in &nodes {
        eventually("the cluster", async || {
            let info = format!("{:?}", command(&node.url(), &["CLUSTER", "INFO"]).await);
            (info.contains("cluster_state:ok") && info.contains("cluster_known_nodes:3")).then_some(())
        })
        .await;
    }
    for (at, prefix) in ["scheduler", "{jobs}:eu", "other"].into_iter().enumerate() {
        // Every node redirects to the node that has the slot.
        let queue = queue(&nodes[at].url(), prefix);
        eventually("a connection", async || put_and_take(&queue).await.ok()).await;
        assert!(queue.info().await.unwrap().is_cluster);
    }
    let mut keys = Vec::new();
    for node in &nodes {
        keys.push(format!("{:?}", command(&node.url(), &["KEYS", "{scheduler}:*"]).await));
    }
    assert_eq!(keys.iter().filter(|keys| keys.contains("{scheduler}:processing")).count(), 1, "{keys:?}");
}

/// Starts a node of a cluster. It uses a second port, 10 000 above the first.
fn cluster_node() -> Server {
    let port = loop {
        let port = free_port();
        if port < 55_000 && std::net::TcpListener::bind(("127.0.0.1", port + 10_000)).is_ok() {
            break port;
        }
    };
    Server::on(port, &["--cluster-enabled", "yes", "--cluster-node-timeout", "2000"])
}
