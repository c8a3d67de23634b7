//! PostgreSQL: events that are committed late are not skipped, and a broken connection between nodes is noticed and replaced.

use std::{
    net::Ipv4Addr,
    time::{Duration, Instant},
};

use faena_domain::Timestamp;
use faena_store::{Signal, StoreOptions};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::{broadcast, watch},
};
use uuid::Uuid;

use crate::{
    following::{Follower, mode, told_by, write},
    support::*,
};

async fn session(url: &str) -> tokio_postgres::Client {
    let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

const PUT: &str =
    "SELECT faena.put_events(ARRAY['late.event'], ARRAY[$1::uuid], ARRAY[0::bigint], ARRAY['late'], ARRAY['x'],
                       ARRAY[NULL::text], ARRAY['{}'])";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_waits_for_assigned_positions_that_are_not_committed() {
    on_postgres(async |world: &World| {
        world.store.event_subscribe(vec![mode(Timestamp::MAX)], world.at(0)).await.unwrap();
        let mut follower = Follower::at_the_end(&*world.store).await;
        let late = session(&world.url).await;
        late.batch_execute("BEGIN").await.unwrap();
        late.execute(PUT, &[&Uuid::new_v4()]).await.unwrap();
        world.submit(world.job("mail", 0)).await;
        follower.read(&*world.store).await;
        assert_eq!(follower.seen.len(), 0, "the later ones are committed, an earlier one is not");
        late.batch_execute("COMMIT").await.unwrap();
        follower.read(&*world.store).await;
        let kinds: Vec<&str> = follower.seen.iter().map(|event| event.kind.as_str()).collect();
        assert_eq!(kinds, ["late.event", "job.created", "job.status.changed"]);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_event_committed_late_is_skipped_while_many_nodes_write() {
    on_postgres(async |world: &World| {
        world.store.event_subscribe(vec![mode(Timestamp::MAX)], world.at(0)).await.unwrap();
        let other = world.reopen(StoreOptions::default()).await;
        let mut follower = Follower::at_the_end(&*other.store).await;
        let mut late = Vec::new();
        for seed in 1..=4 {
            let client = session(&world.url).await;
            late.push(tokio::spawn(async move {
                let mut dice = Dice(seed);
                let mut committed = 0;
                for _ in 0..40 {
                    client.batch_execute("BEGIN").await.unwrap();
                    for _ in 0..1 + dice.below(3) {
                        client.execute(PUT, &[&Uuid::new_v4()]).await.unwrap();
                        committed += 1;
                    }
                    // It has positions, and other transactions commit behind it.
                    client
                        .execute(&format!("SELECT pg_sleep({})", dice.below(30) as f64 / 1_000.0), &[])
                        .await
                        .unwrap();
                    if dice.chance(30) {
                        client.batch_execute("ROLLBACK").await.unwrap();
                    } else {
                        client.batch_execute("COMMIT").await.unwrap();
                    }
                }
                committed
            }));
        }
        let writers = [(&world.store, 1), (&other.store, 2), (&world.store, 3)]
            .map(|(store, writer)| tokio::spawn(write(store.clone(), writer, 40)));
        while !(late.iter().all(|task| task.is_finished()) && writers.iter().all(|task| task.is_finished())) {
            follower.read(&*other.store).await;
        }
        for task in late {
            assert!(task.await.unwrap() > 40);
        }
        for task in writers {
            task.await.unwrap();
        }
        let stored = world.ledger.number("SELECT count(*) FROM event").await as usize;
        follower.read_until(&*other.store, stored).await;
        assert!(stored > 3 * told_by(40));
        let positions = world.ledger.rows("SELECT position FROM event ORDER BY position").await;
        let seen: Vec<Vec<String>> = follower.seen.iter().map(|event| vec![event.position.to_string()]).collect();
        assert_eq!(seen, positions, "each once, in the order of their places");
        follower.prove();
        other.store.close().await;
    })
    .await;
}

async fn missed(signals: &mut broadcast::Receiver<Signal>, within: Duration) {
    let heard = async { while !matches!(signals.recv().await.unwrap(), Signal::Missed) {} };
    tokio::time::timeout(within, heard).await.expect("every listener is notified");
}

async fn until_both_listen(world: &World) {
    let listening = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
                     AND application_name = 'faena listener' AND query = 'LISTEN faena' AND state = 'idle'";
    while world.ledger.number(listening).await < 2 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Nodes receive signals by NOTIFY, and not by polling.
async fn hears(world: &World, signals: &mut broadcast::Receiver<Signal>) {
    let heard = async { while !matches!(signals.recv().await.unwrap(), Signal::Event) {} };
    world.submit(world.job("mail", 0)).await;
    tokio::time::timeout(Duration::from_secs(20), heard).await.expect("word of the other node");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_listening_session_that_is_ended_under_load_reconnects_and_signals_every_loop() {
    on_postgres(async |world: &World| {
        world.store.event_subscribe(vec![mode(Timestamp::MAX)], world.at(0)).await.unwrap();
        let other = world.reopen(StoreOptions::default()).await;
        let mut signals = other.store.signals();
        until_both_listen(world).await;
        world.store.poll(world.node, world.at(0)).await.unwrap();
        hears(world, &mut signals).await;
        let mut follower = Follower::at_the_end(&*other.store).await;
        signals = signals.resubscribe();
        let load = tokio::spawn(write(world.store.clone(), 1, 60));
        let began = Instant::now();
        for _ in 0..3 {
            let ended = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
                         WHERE datname = current_database() AND application_name = 'faena listener'";
            assert!(world.ledger.number(ended).await > 0);
            missed(&mut signals, Duration::from_secs(30)).await;
        }
        assert!(began.elapsed() < Duration::from_secs(30), "1 s, 2 s, 4 s: {:?}", began.elapsed());
        load.await.unwrap();
        hears(world, &mut signals).await;
        follower.read_until(&*other.store, told_by(60) + 2).await;
        follower.prove();
        other.store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silently_broken_connection_is_noticed() {
    on_postgres(async |world: &World| {
        world.store.event_subscribe(vec![mode(Timestamp::MAX)], world.at(0)).await.unwrap();
        let (port, cut) = proxy(&world.url).await;
        let far = through(&world.url, port);
        let other = World::open(far, world.ledger.clone(), StoreOptions::default()).await;
        let mut signals = other.store.signals();
        until_both_listen(world).await;
        signals = signals.resubscribe();
        let began = Instant::now();
        cut.send_modify(|cuts| *cuts += 1);
        missed(&mut signals, Duration::from_secs(40)).await;
        assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
        world.store.poll(world.node, world.at(0)).await.unwrap();
        hears(world, &mut signals).await;
        other.store.close().await;
    })
    .await;
}

fn through(url: &str, port: u16) -> String {
    let mut far = url::Url::parse(url).unwrap();
    far.set_host(Some("127.0.0.1")).unwrap();
    far.set_port(Some(port)).unwrap();
    far.to_string()
}

/// A proxy to the database. With each cut the existing connections fall silent for ever; new ones work.
async fn proxy(url: &str) -> (u16, watch::Sender<u32>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let cut = watch::Sender::new(0);
    let cuts = cut.clone();
    let far = url::Url::parse(url).unwrap();
    let address = (far.host_str().unwrap().to_owned(), far.port().unwrap_or(5432));
    tokio::spawn(async move {
        while let Ok((near, _)) = listener.accept().await {
            let far = TcpStream::connect((address.0.as_str(), address.1)).await.unwrap();
            tokio::spawn(carry(near, far, cuts.subscribe()));
        }
    });
    (port, cut)
}

async fn carry(mut near: TcpStream, mut far: TcpStream, mut cut: watch::Receiver<u32>) {
    let (mut up, mut down) = (vec![0; 16 << 10], vec![0; 16 << 10]);
    loop {
        tokio::select! {
            // Both ends stay open, and nothing gets through any more.
            _ = cut.changed() => std::future::pending().await,
            read = near.read(&mut up) => match read {
                Ok(count @ 1..) => far.write_all(&up[..count]).await.unwrap(),
                _ => return,
            },
            read = far.read(&mut down) => match read {
                Ok(count @ 1..) => if near.write_all(&down[..count]).await.is_err() { return },
                _ => return,
            },
        }
    }
}
