//! PostgreSQL: events that are committed late are not skipped, and a broken listener connection is detected and
//! replaced.

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
    following::{Follower, event_count, subscription, write},
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
async fn a_reader_waits_for_assigned_positions_that_are_not_committed_on_postgres() {
    on_postgres(async |fixture: &Fixture| {
        fixture.store.event_subscribe(vec![subscription(Timestamp::MAX)], fixture.at(0)).await.unwrap();
        let mut follower = Follower::at_last_position(&*fixture.store).await;
        let late = session(&fixture.url).await;
        late.batch_execute("BEGIN").await.unwrap();
        late.execute(PUT, &[&Uuid::new_v4()]).await.unwrap();
        fixture.submit(fixture.job("mail", 0)).await;
        follower.read(&*fixture.store).await;
        assert_eq!(follower.seen.len(), 0, "later events are committed, but an earlier one is not");
        late.batch_execute("COMMIT").await.unwrap();
        follower.read(&*fixture.store).await;
        let kinds: Vec<&str> = follower.seen.iter().map(|event| event.kind.as_str()).collect();
        assert_eq!(kinds, ["late.event", "job.created", "job.status.changed"]);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_event_committed_late_is_skipped_while_many_nodes_write_on_postgres() {
    on_postgres(async |fixture: &Fixture| {
        fixture.store.event_subscribe(vec![subscription(Timestamp::MAX)], fixture.at(0)).await.unwrap();
        let other = fixture.reopen(StoreOptions::default()).await;
        let mut follower = Follower::at_last_position(&*other.store).await;
        let mut late = Vec::new();
        for seed in 1..=4 {
            let client = session(&fixture.url).await;
            late.push(tokio::spawn(async move {
                let mut random = SeededRandom(seed);
                let mut written = 0;
                for _ in 0..40 {
                    client.batch_execute("BEGIN").await.unwrap();
                    for _ in 0..1 + random.below(3) {
                        client.execute(PUT, &[&Uuid::new_v4()]).await.unwrap();
                        written += 1;
                    }
                    // The transaction has its positions now, and transactions with later positions commit before it.
                    client
                        .execute(&format!("SELECT pg_sleep({})", random.below(30) as f64 / 1_000.0), &[])
                        .await
                        .unwrap();
                    if random.chance(30) {
                        client.batch_execute("ROLLBACK").await.unwrap();
                    } else {
                        client.batch_execute("COMMIT").await.unwrap();
                    }
                }
                written
            }));
        }
        let writers = [(&fixture.store, 1), (&other.store, 2), (&fixture.store, 3)]
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
        let stored = fixture.database.number("SELECT count(*) FROM event").await as usize;
        follower.read_until(&*other.store, stored).await;
        assert!(stored > 3 * event_count(40));
        let positions = fixture.database.rows("SELECT position FROM event ORDER BY position").await;
        let seen: Vec<Vec<String>> = follower.seen.iter().map(|event| vec![event.position.to_string()]).collect();
        assert_eq!(seen, positions, "every event exactly once, in the order of positions");
        follower.assert_consistent();
        other.store.close().await;
    })
    .await;
}

async fn until_missed_signal(signals: &mut broadcast::Receiver<Signal>, within: Duration) {
    let received = async { while !matches!(signals.recv().await.unwrap(), Signal::Missed) {} };
    tokio::time::timeout(within, received).await.expect("every listener is notified");
}

async fn until_both_listen(fixture: &Fixture) {
    let listening = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
                     AND application_name = 'faena listener' AND query = 'LISTEN faena' AND state = 'idle'";
    while fixture.database.number(listening).await < 2 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Checks that a node receives a signal by NOTIFY, not by polling.
async fn assert_receives_signal(fixture: &Fixture, signals: &mut broadcast::Receiver<Signal>) {
    let received = async { while !matches!(signals.recv().await.unwrap(), Signal::Event) {} };
    fixture.submit(fixture.job("mail", 0)).await;
    tokio::time::timeout(Duration::from_secs(20), received).await.expect("a signal of the other node");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_listening_session_that_is_ended_under_load_reconnects_and_signals_every_loop_on_postgres() {
    on_postgres(async |fixture: &Fixture| {
        fixture.store.event_subscribe(vec![subscription(Timestamp::MAX)], fixture.at(0)).await.unwrap();
        let other = fixture.reopen(StoreOptions::default()).await;
        let mut signals = other.store.signals();
        until_both_listen(fixture).await;
        fixture.store.poll(fixture.node, fixture.at(0)).await.unwrap();
        assert_receives_signal(fixture, &mut signals).await;
        let mut follower = Follower::at_last_position(&*other.store).await;
        signals = signals.resubscribe();
        let load = tokio::spawn(write(fixture.store.clone(), 1, 60));
        let began = Instant::now();
        for _ in 0..3 {
            let terminate = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
                             WHERE datname = current_database() AND application_name = 'faena listener'";
            assert!(fixture.database.number(terminate).await > 0);
            until_missed_signal(&mut signals, Duration::from_secs(30)).await;
        }
        assert!(began.elapsed() < Duration::from_secs(30), "the delays are 1 s, 2 s and 4 s: {:?}", began.elapsed());
        load.await.unwrap();
        assert_receives_signal(fixture, &mut signals).await;
        follower.read_until(&*other.store, event_count(60) + 2).await;
        follower.assert_consistent();
        other.store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_listener_connection_is_detected_on_postgres() {
    on_postgres(async |fixture: &Fixture| {
        fixture.store.event_subscribe(vec![subscription(Timestamp::MAX)], fixture.at(0)).await.unwrap();
        let (port, cut) = proxy(&fixture.url).await;
        let proxy_url = via_port(&fixture.url, port);
        let other = Fixture::open(proxy_url, fixture.database.clone(), StoreOptions::default()).await;
        let mut signals = other.store.signals();
        until_both_listen(fixture).await;
        signals = signals.resubscribe();
        let began = Instant::now();
        cut.send_modify(|cuts| *cuts += 1);
        until_missed_signal(&mut signals, Duration::from_secs(40)).await;
        assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
        fixture.store.poll(fixture.node, fixture.at(0)).await.unwrap();
        assert_receives_signal(fixture, &mut signals).await;
        other.store.close().await;
    })
    .await;
}

fn via_port(url: &str, port: u16) -> String {
    let mut url = url::Url::parse(url).unwrap();
    url.set_host(Some("127.0.0.1")).unwrap();
    url.set_port(Some(port)).unwrap();
    url.to_string()
}

/// Starts a proxy to the database. Each cut silences the existing connections forever; new ones work.
async fn proxy(url: &str) -> (u16, watch::Sender<u32>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let cut = watch::Sender::new(0);
    let cuts = cut.clone();
    let url = url::Url::parse(url).unwrap();
    let address = (url.host_str().unwrap().to_owned(), url.port().unwrap_or(5432));
    tokio::spawn(async move {
        while let Ok((near, _)) = listener.accept().await {
            let far = TcpStream::connect((address.0.as_str(), address.1)).await.unwrap();
            tokio::spawn(forward(near, far, cuts.subscribe()));
        }
    });
    (port, cut)
}

async fn forward(mut near: TcpStream, mut far: TcpStream, mut cut: watch::Receiver<u32>) {
    let (mut up, mut down) = (vec![0; 16 << 10], vec![0; 16 << 10]);
    loop {
        tokio::select! {
            // Both sockets stay open, but no data is forwarded any more.
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
