//! Many nodes on one PostgreSQL: group commit, schema, partitions, leases, and a database that becomes unavailable.

use std::time::Duration;

use faena_domain::{JobState, NodeId, Timestamp};
use faena_store::{ClaimRequest, NodeInfo, Owner, Retention, Signal, Store, StoreError, StoreOptions, plan_probe};
use futures_util::future::join_all;

use crate::{schedules, support::*};

const DAY_MS: i64 = 24 * 3_600_000;

async fn setup_error(url: &str, options: StoreOptions) -> String {
    match faena_store::open(url, options).await.err() {
        Some(StoreError::Setup(text)) => text,
        other => panic!("a set-up error was expected, not {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_submits_share_transactions() {
    on_postgres(async |fixture: &Fixture| {
        fixture.submit(fixture.job("a", 0)).await;
        let calls = (0..200).map(|_| fixture.try_submit(vec![fixture.job("a", 0)], 0));
        assert!(join_all(calls).await.into_iter().all(|answer| answer.is_ok()));
        // All rows that one transaction has written have the same `xmin`.
        let took = fixture.database.number("SELECT count(DISTINCT xmin::text) FROM job").await;
        assert!(took < 60, "201 submits took {took} transactions");
        let jobs = fixture.claim(201, 1).await;
        join_all(jobs.iter().map(|job| fixture.end(job, completed(), 2))).await;
        let took = fixture.database.number("SELECT count(DISTINCT xmin::text) FROM done").await;
        assert!(took < 60, "201 ends took {took} transactions");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stores_that_open_concurrently_on_an_empty_database_all_work() {
    on_empty_postgres(async |url: &str, database: &RawDatabase| {
        let stores = join_all((0..4).map(|_| faena_store::open(url, StoreOptions::default()))).await;
        let stores: Vec<_> = stores.into_iter().map(|store| store.unwrap()).collect();
        assert_eq!(database.number("SELECT count(*) FROM faena_schema").await, 1, "each migration once");
        for store in stores {
            store.ping().await.unwrap();
            store.close().await;
            assert!(matches!(store.ping().await, Err(StoreError::Unavailable(_))));
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_newer_or_older_schema_is_rejected_and_left_unchanged() {
    on_empty_postgres(async |url: &str, database: &RawDatabase| {
        let no_migrate = || StoreOptions { migrate: false, ..StoreOptions::default() };
        assert!(setup_error(url, no_migrate()).await.contains("faena migrate"));
        let schemas = "SELECT count(*) FROM pg_namespace WHERE nspname = 'faena'";
        assert_eq!(database.number(schemas).await, 0, "no schema was created");
        faena_store::open(url, StoreOptions::default()).await.unwrap().close().await;
        faena_store::open(url, no_migrate()).await.unwrap().close().await;
        database.run("INSERT INTO faena_schema VALUES (999, 'future', 0)").await;
        let tables = "SELECT count(*) FROM pg_class";
        let before = database.number(tables).await;
        let text = setup_error(url, StoreOptions::default()).await;
        assert!(text.contains("999") && text.contains("newer version"), "{text}");
        assert_eq!(database.number(tables).await, before);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_cannot_be_reached_is_a_set_up_error_without_the_password() {
    let text = setup_error("postgres://me:secret-word@127.0.0.1:1/none", StoreOptions::default()).await;
    assert!(text.contains("check that it is running") && !text.contains("secret-word"), "{text}");
    let text = setup_error("postgres://me:secret-word@host:notaport/none", StoreOptions::default()).await;
    assert!(!text.contains("secret-word"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_second_host_is_used_while_the_first_accepts_connections_and_answers_nothing() {
    on_empty_postgres(async |url: &str, _: &RawDatabase| {
        let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (user, rest) = url.rsplit_once('@').unwrap();
        let several = format!("{user}@{},{rest}", silent.local_addr().unwrap());
        let store = faena_store::open(&several, StoreOptions::default()).await.unwrap();
        store.ping().await.unwrap();
        store.close().await;
    })
    .await;
}

async fn partitions(fixture: &Fixture) -> Vec<String> {
    let sql = "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
               WHERE i.inhparent = 'faena.done'::regclass ORDER BY 1";
    fixture.database.rows(sql).await.into_iter().map(|mut row| row.remove(0)).collect()
}

fn day(at: Timestamp) -> String {
    format!("done_{}", at.to_string()[..10].replace('-', ""))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finished_jobs_are_partitioned_by_day_and_old_partitions_are_dropped() {
    on_postgres(async |fixture: &Fixture| {
        let names = partitions(fixture).await;
        for ahead in 0..4 {
            assert!(names.contains(&day(fixture.at(ahead * DAY_MS))), "{names:?}");
        }
        let today = fixture.submit_and_claim(fixture.job("a", 0)).await;
        fixture.complete(&today, 1).await;
        let in_ten_days = fixture.submit_and_claim(fixture.job("a", 10 * DAY_MS)).await;
        fixture.complete(&in_ten_days, 10 * DAY_MS + 1).await;
        let in_table = async |table: &str| fixture.database.number(&format!("SELECT count(*) FROM {table}")).await;
        assert_eq!(in_table(&day(fixture.at(0))).await, 1);
        assert_eq!(in_table("done_default").await, 1, "the job of a day without a partition");
        assert_eq!(fixture.states([today.id, in_ten_days.id]).await, [JobState::Completed; 2]);

        let retention = Retention { completed_ms: 5 * DAY_MS, ..Retention::default() };
        assert_eq!(fixture.store.job_prune(&retention, 100, fixture.at(3 * DAY_MS)).await.unwrap(), 0);
        assert!(
            partitions(fixture).await.contains(&day(fixture.at(6 * DAY_MS))),
            "partitions of the next days are created"
        );
        assert!(
            partitions(fixture).await.contains(&day(fixture.at(0))),
            "a partition is not dropped before its retention ends"
        );
        assert_eq!(fixture.store.job_prune(&retention, 100, fixture.at(7 * DAY_MS)).await.unwrap(), 1);
        let names = partitions(fixture).await;
        assert!(!names.contains(&day(fixture.at(0))), "{names:?}");
        assert!(names.contains(&"done_default".to_owned()));
        assert_eq!(
            fixture.store.job_prune(&retention, 100, fixture.at(16 * DAY_MS)).await.unwrap(),
            1,
            "the job in the default partition is deleted"
        );
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_with_jobs_is_not_dropped() {
    on_postgres(async |fixture: &Fixture| {
        let old = fixture.submit_and_claim(fixture.job("a", 0)).await;
        fixture.complete(&old, 1).await;
        // Its retention has ended, but the limit of this round is zero.
        let retention = Retention { completed_ms: DAY_MS, ..Retention::default() };
        assert_eq!(fixture.store.job_prune(&retention, 0, fixture.at(9 * DAY_MS)).await.unwrap(), 0);
        assert_eq!(fixture.state(old.id).await, JobState::Completed);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_whose_lease_has_ended_is_declared_dead() {
    on_postgres(async |fixture: &Fixture| {
        let other = NodeInfo { id: NodeId::new(), name: "other".into() };
        fixture.store.node_join(other.clone(), 1_000, fixture.at(0)).await.unwrap();
        assert_eq!(fixture.store.poll(fixture.node, fixture.at(0)).await.unwrap().nodes, 2);
        fixture.submit(fixture.job("a", 0)).await;
        let job = fixture.claim_as(other.id, 1, 1).await.remove(0);
        assert!(fixture.store.node_renew(other.id, 1_000, fixture.at(900)).await.unwrap());

        assert_eq!(fixture.recover(0, 1_500).await.nodes, 0, "its lease was renewed");
        let released = fixture.recover(0, 1_901).await;

        assert_eq!((released.nodes, released.returned), (1, 1));
        assert!(!fixture.store.node_renew(other.id, 1_000, fixture.at(1_902)).await.unwrap());
        assert!(fixture.store.node_renew(fixture.node, LEASE_MS, fixture.at(1_902)).await.unwrap());
        assert!(!fixture.end(&job, completed(), 1_903).await);
        assert_eq!(fixture.state(job.id).await, JobState::Queued);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancel_request_is_for_the_node_that_owns_the_job() {
    on_postgres(async |fixture: &Fixture| {
        let other = NodeInfo { id: NodeId::new(), name: "other".into() };
        fixture.store.node_join(other.clone(), LEASE_MS, fixture.at(0)).await.unwrap();
        let mine = fixture.submit_and_claim(fixture.job("a", 0)).await;
        fixture.cancel(mine.id, 1).await;
        assert!(fixture.store.poll(other.id, fixture.at(0)).await.unwrap().cancel_requests.is_empty());
        assert_eq!(fixture.store.poll(fixture.node, fixture.at(0)).await.unwrap().cancel_requests.len(), 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_receive_each_others_signals_and_see_the_same_jobs() {
    on_postgres(async |fixture: &Fixture| {
        let other = fixture.reopen(StoreOptions::default()).await;
        // A node learns from its poll that there are other nodes. The listener may still be connecting, so jobs are
        // submitted until a signal arrives.
        fixture.store.poll(fixture.node, fixture.at(0)).await.unwrap();
        let mut signals = other.store.signals();
        let lane = loop {
            let id = fixture.submit(fixture.job("a", 0)).await;
            let received = tokio::time::timeout(Duration::from_millis(200), signals.recv()).await;
            if let Ok(Ok(Signal::Ready(lane))) = received {
                assert_eq!(lane, fixture.lane_of(id).await.id);
                break lane;
            }
        };
        let request = ClaimRequest {
            owner: Owner::Node(other.node),
            lanes: vec![lane],
            limit: 1,
            idle_slots: 1,
            candidates: None,
        };
        let job = other.store.job_claim(vec![request], other.at(1)).await.unwrap().remove(0).jobs.remove(0);
        assert_eq!(other.get(job.id).await.kind, "a", "a lane that the other node created");
        let in_new_lane = fixture.submit(fixture.job("made-elsewhere", 0)).await;
        assert!(!other.store.poll(other.node, fixture.at(0)).await.unwrap().ready_lanes.is_empty());
        let lane = fixture.lane_of(in_new_lane).await.id;
        assert_eq!(other.claim_lanes(other.node, vec![lane], 1, 2).await.len(), 1);
        other.store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_strict_queue_is_strict_on_several_lanes() {
    on_postgres(async |fixture: &Fixture| {
        let strict = fixture.reopen(StoreOptions::default()).await;
        make_strict(&strict, "strict").await;
        for (kind, ms) in [("a", 0), ("b", 1), ("c", 2)] {
            strict.submit(strict.job(kind, ms).queue("strict")).await;
        }
        let kinds: Vec<_> = join_all(strict.claim(3, 5).await.iter().map(|job| strict.get(job.id))).await;
        assert_eq!(kinds.iter().map(|job| job.kind.as_str()).collect::<Vec<_>>(), ["a", "b", "c"]);
        strict.store.close().await;
    })
    .await;
}

async fn until_a_submit_succeeds(fixture: &Fixture, ms: i64) -> u32 {
    for tries in 0..200 {
        match fixture.try_submit(vec![fixture.job("a", ms)], ms).await {
            Ok(_) => return tries,
            Err(StoreError::Unavailable(_)) => tokio::time::sleep(Duration::from_millis(20)).await,
            Err(other) => panic!("{other:?}"),
        }
    }
    panic!("no submit succeeded");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_becomes_unavailable_and_returns_loses_nothing() {
    on_postgres(async |fixture: &Fixture| {
        let server = std::env::var("FAENA_TEST_POSTGRES").unwrap();
        let name = fixture.database.rows("SELECT current_database()").await[0][0].clone();
        let kill = format!(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}' AND application_name = 'faena'"
        );
        let job = fixture.submit_and_claim(fixture.job("a", 0)).await;

        run_on(&server, &kill).await;
        until_a_submit_succeeds(fixture, 1).await;
        run_on(&server, &format!("ALTER DATABASE {name} ALLOW_CONNECTIONS false")).await;
        run_on(&server, &kill).await;
        let store: &dyn Store = &*fixture.store;
        let end = fixture.run_end(&job, completed(), 2);
        // The first call may still meet a broken connection; none may take long or fail in another way.
        for _ in 0..2 {
            let results = [
                store.ping().await.err(),
                store.job_get(job.id).await.err(),
                store.job_end(vec![end.clone()], fixture.at(2)).await.err(),
                store.job_promote(10, fixture.at(2)).await.err(),
                fixture.try_submit(vec![fixture.job("a", 2)], 2).await.err(),
            ];
            assert!(results.iter().all(|answer| matches!(answer, Some(StoreError::Unavailable(_)))), "{results:?}");
        }
        run_on(&server, &format!("ALTER DATABASE {name} ALLOW_CONNECTIONS true")).await;

        until_a_submit_succeeds(fixture, 3).await;
        assert!(fixture.report_end(end).await, "the end that could not be reported is reported again");
        assert_eq!(fixture.state(job.id).await, JobState::Completed);
    })
    .await;
}

/// Opens a separate connection and begins a transaction.
async fn begin_on_own_connection(fixture: &Fixture) -> tokio_postgres::Client {
    let (client, connection) = tokio_postgres::connect(&fixture.url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    client.batch_execute(plan_probe::BEGIN_CLAIM).await.unwrap();
    client
}

/// Waits until a session waits for a lock on this database.
async fn until_a_session_waits(fixture: &Fixture) {
    let waiting =
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    while fixture.database.number(waiting).await == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_a_worker_waits_for_its_uncommitted_claim_and_status_updates_do_not() {
    on_postgres(async |fixture: &Fixture| {
        let worker = fixture.admit(fixture.worker("w"), 0).await;
        let id = fixture.submit(fixture.job("a", 0)).await;
        let lane = fixture.lane_of(id).await.id;
        let claim = begin_on_own_connection(fixture).await;
        let rows = claim
            .query(
                plan_probe::CLAIM_FOR_WORKER,
                &[&lane, &0_i64, &10_i64, &worker.id.0, &1_i64, &0_i16, &worker.session],
            )
            .await
            .unwrap();
        assert_eq!(rows.len(), 1);
        assert!(
            fixture.send_update(fixture.worker_update(&worker, &[], 1)).await.connected,
            "while the claim is not committed"
        );

        let commit = async {
            until_a_session_waits(fixture).await;
            claim.batch_execute("COMMIT").await.unwrap();
        };
        let (released, ()) = tokio::join!(fixture.end_as_lost(&worker, 0, 2), commit);

        assert_eq!(released.unwrap().orphaned, 1);
        assert_eq!(fixture.state(id).await, JobState::Retrying);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_waits_for_an_uncommitted_reconnection_of_its_worker_and_is_rejected() {
    on_postgres(async |fixture: &Fixture| {
        let worker = fixture.admit(fixture.worker("w"), 0).await;
        let id = fixture.submit(fixture.job("a", 0)).await;
        let reconnection = begin_on_own_connection(fixture).await;
        reconnection.query("SELECT FROM faena.worker WHERE id = $1 FOR UPDATE", &[&worker.id.0]).await.unwrap();
        reconnection.execute("UPDATE faena.worker SET session = 2 WHERE id = $1", &[&worker.id.0]).await.unwrap();
        let commit = async {
            until_a_session_waits(fixture).await;
            reconnection.batch_execute("COMMIT").await.unwrap();
        };
        let (claimed, ()) = tokio::join!(fixture.claim_by(&worker, 1, 1), commit);
        assert!(claimed.is_empty(), "the worker has reconnected");
        assert_eq!(fixture.state(id).await, JobState::Queued);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancel_request_goes_to_the_node_of_the_worker() {
    on_postgres(async |fixture: &Fixture| {
        let other = NodeInfo { id: NodeId::new(), name: "other".into() };
        fixture.store.node_join(other.clone(), LEASE_MS, fixture.at(0)).await.unwrap();
        let (_, jobs) = fixture.worker_with_jobs("w", 1, 0).await;
        fixture.cancel(jobs[0].id, 1).await;
        let received = async |node| fixture.store.poll(node, fixture.at(1)).await.unwrap().cancel_requests.len();
        assert_eq!([received(fixture.node).await, received(other.id).await], [1, 0]);
        fixture.admit(faena_store::WorkerEntry { node: other.id, ..fixture.worker("w") }, 2).await;
        assert_eq!([received(fixture.node).await, received(other.id).await], [0, 1]);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_workers_of_a_server_whose_lease_has_ended_keep_their_jobs() {
    on_postgres(async |fixture: &Fixture| {
        let other = NodeInfo { id: NodeId::new(), name: "other".into() };
        fixture.store.node_join(other.clone(), 1_000, fixture.at(0)).await.unwrap();
        let worker = fixture.admit(faena_store::WorkerEntry { node: other.id, ..fixture.worker("w") }, 0).await;
        let id = fixture.submit(fixture.job("a", 0)).await;
        fixture.claim_by(&worker, 1, 1).await;
        assert!(!fixture.needs_recovery(500).await);
        assert!(fixture.needs_recovery(1_001).await);
        let released = fixture.recover(0, 1_001).await;
        assert_eq!((released.nodes, released.orphaned, released.returned), (1, 0, 0));
        assert!(!fixture.needs_recovery(1_002).await);
        assert_eq!(fixture.worker_view("w").await.deadline, Some(fixture.at(11_001)));
        assert_eq!(fixture.state(id).await, JobState::Assigned);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_sweeps_declare_each_worker_lost_once() {
    on_postgres(async |fixture: &Fixture| {
        for n in 0..20 {
            let entry = faena_store::WorkerEntry { deadline: Some(fixture.at(5)), ..fixture.worker(&format!("w{n}")) };
            let worker = fixture.admit(entry, 0).await;
            fixture.submit(fixture.job("a", 0)).await;
            assert_eq!(fixture.claim_by(&worker, 1, 1).await.len(), 1);
        }
        let others = [fixture.reopen(StoreOptions::default()).await, fixture.reopen(StoreOptions::default()).await];
        let sweeps = [fixture, &others[0], &others[1]].map(|node| node.sweep(-1, 10));
        let lost: Vec<_> = join_all(sweeps).await.into_iter().flat_map(|swept| swept.lost).collect();
        assert_eq!(lost.len(), 20);
        assert_eq!(lost.iter().map(|lost| lost.released.orphaned).sum::<usize>(), 20);
        for other in others {
            other.store.close().await;
        }
    })
    .await;
}

/// PostgreSQL has room for a few thousand locks across all sessions. Ending thousands of jobs with keys must not hold a
/// lock for each key at the same time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ends_of_many_keys_take_few_locks_at_a_time() {
    on_postgres(async |fixture: &Fixture| {
        fixture.submit_all((0..1_500).map(|n| fixture.job("a", 0).concurrency_key(&format!("key-{n}"))).collect()).await;
        let mut jobs = Vec::new();
        while jobs.len() < 1_500 {
            jobs.extend(fixture.claim(1_500, 1).await);
        }
        fixture
            .database
            .run(
                "CREATE TABLE seen (locks bigint);
                 CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                     INSERT INTO faena.seen SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid();
                     RETURN NULL; END $$;
                 CREATE TRIGGER see AFTER DELETE ON key_in_flight FOR EACH STATEMENT EXECUTE FUNCTION see()",
            )
            .await;
        let end = |job| faena_store::RunEnd { may_have_other_rows: true, ..fixture.run_end(job, completed(), 2) };
        let results = fixture.store.job_end(jobs.iter().map(end).collect(), fixture.at(2)).await.unwrap();
        assert!(results.len() == 1_500 && results.iter().all(|accepted| *accepted));
        let most = fixture.database.number("SELECT max(locks) FROM seen").await;
        assert!((1..=250).contains(&most), "{most} locks at the same time");
        assert_eq!(fixture.database.number("SELECT count(*) FROM key_in_flight").await, 0);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_dies_while_firing_changes_nothing() {
    on_postgres(async |fixture: &Fixture| {
        let id = schedules::create(fixture, schedules::every(60_000, "minutely")).await;
        let due = fixture.at(60_000);
        // Jobs and the schedule are written before the ticks: the server dies between them.
        let (locking_session, connection) = tokio_postgres::connect(&fixture.url, tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        locking_session.batch_execute("BEGIN; LOCK TABLE faena.tick IN ACCESS EXCLUSIVE MODE").await.unwrap();
        let stuck = tokio::spawn({
            let store = fixture.store.clone();
            async move { store.schedule_fire(10, due).await }
        });
        let blocked = "FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
        while fixture.database.number(&format!("SELECT count(*) {blocked}")).await == 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!(fixture.store.schedule_fire(10, due).await.unwrap().schedules, 0, "another node is firing it");
        fixture.database.rows(&format!("SELECT pg_terminate_backend(pid) {blocked}")).await;
        let error = stuck.await.unwrap().unwrap_err();
        assert!(matches!(error, StoreError::Unavailable(_)), "{error:?}");
        locking_session.batch_execute("ROLLBACK").await.unwrap();

        assert_eq!(fixture.database.number("SELECT count(*) FROM job").await, 0);
        assert_eq!(fixture.database.number("SELECT count(*) FROM tick").await, 0);
        assert_eq!(fixture.store.schedule_get(id).await.unwrap().unwrap().next_at, Some(due));
        // The dead session is reported to its client before its locks are released.
        let fired = loop {
            let fired = fixture.store.schedule_fire(10, due).await.unwrap();
            if fired.schedules > 0 {
                break fired;
            }
        };
        assert_eq!((fired.schedules, fired.ticks[0].due_at), (1, due), "the next call fires it");
        assert_eq!(fixture.database.number("SELECT count(*) FROM job").await, 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_time_columns_of_dead_events_have_the_type_of_a_timestamp() {
    on_postgres(async |fixture: &Fixture| {
        let sql = "SELECT count(*) FROM information_schema.columns WHERE table_name = 'outbox_dlq'
                   AND column_name IN ('original_created_at', 'moved_at', 'resolved_at') AND data_type = 'timestamp with time zone'";
        assert_eq!(fixture.database.number(sql).await, 3);
    })
    .await;
}
