//! Several relays on one PostgreSQL.

use std::{collections::BTreeSet, time::Duration};

use faena_engine::{EngineConfig, OutboxConfig};
use faena_store::{PARTITIONS, Store};

use super::{
    EVENTS_PER_JOB, KillableServer, all_sent, assert_all_arrived, config,
    destination::{Destination, Queue},
    eventually_long, rabbitmq, sink, stored_events, submit_many,
    support::required_variable,
    unique, view, wait_for_completed,
};
use crate::fixture::{TestDatabase, open_postgres, postgres_url, run_sql};

const JOBS: usize = 6_000;

/// Returns a configuration with which the death of a server is noticed within seconds.
fn with_short_lease(exchange: &str) -> EngineConfig {
    let base = config(vec![sink("bus", rabbitmq::target(&required_variable("FAENA_TEST_RABBITMQ"), exchange))]);
    let outbox = OutboxConfig { lease: Duration::from_secs(8), batch: 200, ..base.outbox.clone() };
    EngineConfig { outbox, ..base }
}

async fn partitions_per_node(store: &dyn Store) -> Vec<u32> {
    let mut parts: Vec<u32> = view(store, "bus").await.nodes.iter().map(|node| node.partitions).collect();
    parts.sort_unstable();
    parts
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_relays_share_the_work_and_the_death_of_one_loses_and_reorders_nothing_on_postgres() {
    let exchange = unique("three");
    let queue = Queue::bound(&required_variable("FAENA_TEST_RABBITMQ"), &exchange, "#").await;
    let (store, database) = open_postgres().await;
    let url = postgres_url(&database);
    let mut servers = Vec::new();
    for _ in 0..3 {
        servers.push(KillableServer::start(&url, with_short_lease(&exchange)).await);
    }
    eventually_long("each has its share", async || {
        let parts = partitions_per_node(&*store).await;
        (parts.len() == 3 && parts.iter().sum::<u32>() == PARTITIONS as u32 && parts[0] >= 4).then_some(())
    })
    .await;

    submit_many(&*store, JOBS).await;
    let sent = async || view(&*store, "bus").await.sent;
    eventually_long("events flow", async || (sent().await > 2_000).then_some(())).await;
    // One server is killed during its work; then all servers lose their database sessions.
    let victim = uuid::Uuid::new_v4().as_u128() as usize % 3;
    servers[victim].kill();
    let TestDatabase::Postgres(name) = &database else { unreachable!() };
    run_sql(&format!(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}' AND pid <> pg_backend_pid()"
    ))
    .await;

    eventually_long("the others have its share", async || {
        let parts = partitions_per_node(&*store).await;
        (parts.len() == 2 && parts.iter().sum::<u32>() == PARTITIONS as u32).then_some(())
    })
    .await;
    // Other servers run the dead server's jobs, some of them again.
    wait_for_completed(&*store, JOBS).await;
    all_sent(&*store, "bus").await;
    let stored = stored_events(&*store).await;
    assert!(stored.len() >= JOBS * EVENTS_PER_JOB);
    assert_all_arrived(&stored, &queue.arrived().await);
    assert_eq!(view(&*store, "bus").await.dead, 0);
}

#[tokio::test]
async fn a_stopping_relay_releases_its_partitions_immediately_on_postgres() {
    let exchange = unique("leaving");
    let queue = Queue::bound(&required_variable("FAENA_TEST_RABBITMQ"), &exchange, "#").await;
    let (store, database) = open_postgres().await;
    let url = postgres_url(&database);
    // The lease is an hour: a relay that does not release its partitions keeps them for the whole test.
    let mut config = with_short_lease(&exchange);
    config.outbox.lease = Duration::from_secs(3_600);
    let (one, other) = (KillableServer::start(&url, config.clone()).await, KillableServer::start(&url, config).await);
    eventually_long("both have partitions", async || (partitions_per_node(&*store).await.len() == 2).then_some(()))
        .await;
    let engine = one.engine.clone();
    let runtime = one.runtime.as_ref().unwrap().handle().clone();
    runtime.spawn(async move { engine.stop(tokio_util::sync::CancellationToken::new()).await }).await.unwrap();
    eventually_long("the other has all of them", async || {
        (partitions_per_node(&*store).await == [PARTITIONS as u32]).then_some(())
    })
    .await;
    submit_many(&*store, 20).await;
    wait_for_completed(&*store, 20).await;
    all_sent(&*store, "bus").await;
    let arrived: BTreeSet<String> = queue.arrived().await.into_iter().map(|message| message.message_id).collect();
    assert_eq!(arrived.len(), stored_events(&*store).await.len());
    drop(other);
}
