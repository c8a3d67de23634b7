//! A PostgreSQL with a synchronous standby fails over: the nodes find the new primary by themselves and lose no acknowledged job.

use std::time::{Duration, Instant};

use reqwest::StatusCode;
use serde_json::json;

use crate::{
    faena::{Faena, eventually},
    load::{Load, assert_all_completed_once},
    postgres::{Server, connect},
};

/// The promise is 10 s after the promotion; the rest is for a busy machine.
const LIMIT: Duration = Duration::from_secs(20);

/// What happens to the primary before the standby is promoted.
enum Fault {
    Killed,
    Frozen,
    ReadOnly,
}

async fn assert_survives(fault: Fault) {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let primary = tokio::task::block_in_place(Server::start);
    let standby = primary.synchronous_standby().await;
    let url = format!("postgres://faena@127.0.0.1:{},127.0.0.1:{}/postgres", primary.port, standby.port);
    let environment = [
        ("DATABASE_URL", url.as_str()),
        ("FAENA_ORPHAN_DELAY", "50ms"),
        ("FAENA_NODE_LEASE", "5s"),
        ("WORKER_CONCURRENCY", "20"),
    ];
    let mut nodes = Faena::start_two([folders[0].path(), folders[1].path()], &environment).await;
    let mut loads = [7, 8].map(|seed| Load::start(seed, 2, Duration::from_millis(20)));
    for (load, node) in loads.iter().zip(&nodes) {
        load.aim_at(node);
    }
    until_more_are_accepted(&loads).await;

    match fault {
        Fault::Killed => tokio::task::block_in_place(|| primary.stop_immediately()),
        Fault::Frozen => tokio::task::block_in_place(|| primary.freeze()),
        Fault::ReadOnly => {
            let client = connect(&primary.url).await;
            client.batch_execute("ALTER SYSTEM SET default_transaction_read_only = on").await.unwrap();
            client.batch_execute("SELECT pg_reload_conf()").await.unwrap();
        }
    }
    tokio::task::block_in_place(|| standby.promote());
    let promoted_at = Instant::now();
    until_more_are_accepted(&loads).await;
    for node in &nodes {
        let probe = node.submit(json!({"name": "noop"})).await;
        node.wait_for_state(&probe, "COMPLETED").await;
        eventually("the node listens on the new primary and is healthy", async || {
            let (status, health) = node.get("/health/ready").await;
            (status == StatusCode::OK && health["checks"]["database"].get("signalProblem").is_none()).then_some(())
        })
        .await;
    }
    let took = promoted_at.elapsed();
    println!("everything worked again {took:?} after the promotion");
    assert!(took < LIMIT, "{took:?}");

    // The nodes stay on the new primary when the old one is resumed.
    primary.thaw();
    until_more_are_accepted(&loads).await;
    let mut acknowledged = std::collections::BTreeSet::new();
    for load in &mut loads {
        acknowledged.extend(load.stop().await);
        load.assert_rejections_are_503();
    }
    assert!(nodes.iter_mut().all(|node| node.exit_status().is_none()), "a node has exited");
    assert_all_completed_once(&nodes[0], &acknowledged).await;
}

/// Waits until both nodes have accepted further jobs.
async fn until_more_are_accepted(loads: &[Load]) {
    let before: Vec<usize> = loads.iter().map(Load::count).collect();
    eventually("both nodes accept jobs", async || {
        loads.iter().zip(&before).all(|(load, before)| load.count() > before + 20).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn when_the_primary_is_killed_the_nodes_work_with_the_promoted_postgres_standby() {
    assert_survives(Fault::Killed).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn when_the_primary_hangs_the_nodes_work_with_the_promoted_postgres_standby() {
    assert_survives(Fault::Frozen).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn when_the_primary_becomes_read_only_the_nodes_work_with_the_promoted_postgres_standby() {
    assert_survives(Fault::ReadOnly).await;
}
