//! Faults that doctor reports and does not repair, and faults of the set-up.

use faena_domain::{NodeId, Timestamp};
use faena_store::{
    AuditFilter, ClaimRequest, Owner, StoreOptions,
    doctor::{self, Severity},
};

use crate::{
    doctor::{assert_repairs, fill, finds, is_told, literal},
    schedules,
    support::*,
};

pub async fn overdue_rows_are_reported(world: &World) {
    let cast = fill(world).await;
    let child = world.ledger.literal(cast.child);
    let due_at = world.at(5_000).as_ms();
    is_told(
        world,
        &format!("UPDATE waiting SET due_at = 1000 WHERE id = {child}"),
        &format!("UPDATE waiting SET due_at = {due_at} WHERE id = {child}"),
        &["waiting-overdue"],
    )
    .await;
    is_told(
        world,
        "UPDATE worker SET deadline = 1000 WHERE key = 'busy'",
        "UPDATE worker SET deadline = NULL WHERE key = 'busy'",
        &["worker-overdue"],
    )
    .await;
    is_told(
        world,
        "UPDATE webhook SET due_at = 1000 WHERE state = 0; UPDATE bulk SET due_at = 1000",
        &format!("UPDATE webhook SET due_at = {due_at} WHERE state = 0; UPDATE bulk SET due_at = {due_at}"),
        &["webhook-overdue", "bulk-overdue"],
    )
    .await;
}

pub async fn unknown_states_are_reported(world: &World) {
    let cast = fill(world).await;
    let failed = world.ledger.literal(cast.failed);
    is_told(
        world,
        &format!("UPDATE ended SET state = 4 WHERE id = {failed}"),
        &format!("UPDATE ended SET state = 7 WHERE id = {failed}"),
        // It would be counted as cancelled, and nothing would show that its run has ended.
        &["illegal-state", "counter-drift", "job-twice"],
    )
    .await;
    is_told(
        world,
        "UPDATE webhook SET state = 9 WHERE state = 2",
        "UPDATE webhook SET state = 2 WHERE state = 9",
        &["illegal-state"],
    )
    .await;
    is_told(
        world,
        "UPDATE worker SET state = 2 WHERE key = 'lost'",
        "UPDATE worker SET state = 6 WHERE key = 'lost'",
        &["worker-state", "worker-history"],
    )
    .await;
    let change = "(SELECT id FROM worker WHERE key = 'lost')";
    is_told(
        world,
        &format!("INSERT INTO worker_change (worker, sequence, at, state) VALUES ({change}, 900, 5, 0), ({change}, 901, 5, 6)"),
        "DELETE FROM worker_change WHERE sequence >= 900",
        &["worker-history"],
    )
    .await;
}

pub async fn a_missing_lane_is_reported(world: &World) {
    let cast = fill(world).await;
    let lane = world.lane_of(cast.other_lane).await.id;
    let move_all = |from: i32, to: i32| {
        ["job", "ready", "counter"]
            .map(|table| format!("UPDATE {table} SET lane = {to} WHERE lane = {from}"))
            .join("; ")
    };
    is_told(world, &move_all(lane, 9_999), &move_all(9_999, lane), &["lane-missing"]).await;
}

pub async fn an_unreadable_job_is_reported(world: &World) {
    let cast = fill(world).await;
    let ready = world.ledger.literal(cast.other_lane);
    is_told(
        world,
        &format!("UPDATE job SET options = 'nonsense' WHERE id = {ready}"),
        &format!("UPDATE job SET options = NULL WHERE id = {ready}"),
        &["job-unreadable"],
    )
    .await;
}

pub async fn a_log_that_is_damaged_or_has_gaps_is_reported(world: &World) {
    let cast = fill(world).await;
    let done = world.ledger.literal(cast.done);
    let whole = world.ledger.rows(&format!("SELECT log FROM done WHERE id = {done}")).await.remove(0).remove(0);
    let undo = format!("UPDATE done SET log = '{whole}' WHERE id = {done}");
    for (log, code) in [
        ("[1,\"queued\"", "log-unreadable"),
        ("[1,\"queued\"],[2,\"assigned\"]", "log-incomplete"),
        ("[1,\"assigned\"],[2,\"completed\"]", "log-incomplete"),
        ("[90000,\"queued\"],[2,\"completed\"]", "log-time"),
    ] {
        is_told(world, &format!("UPDATE done SET log = '{log}' WHERE id = {done}"), &undo, &[code]).await;
    }
    let retried = world.ledger.literal(cast.retried_done);
    is_told(
        world,
        &format!("UPDATE attempt SET retry_count = 7 WHERE id = {retried}"),
        &format!("UPDATE attempt SET retry_count = 0 WHERE id = {retried}"),
        &["attempts-missing"],
    )
    .await;
}

pub async fn a_finding_names_twenty_and_counts_the_rest(world: &World) {
    world.submit_all((0..50).map(|_| world.job("a", 0)).collect()).await;
    world.ledger.run("DELETE FROM ready").await;
    let found = finds(world, &["job-nowhere", "counter-drift"]).await.findings.remove(0);
    assert_eq!((found.severity, found.count), (Severity::Error, 50));
    assert_eq!(found.text.matches("-7000-").count(), 20, "{}", found.text);
    assert!(found.text.ends_with("and 30 more"), "{}", found.text);
    assert_repairs(world, &[], &["job-nowhere", "counter-drift"]).await;
    let lanes = world.ledger.number("SELECT count(*) FROM ready").await;
    assert_eq!(lanes, 50);
}

pub async fn a_repair_has_an_audit_entry(world: &World) {
    world.submit(world.job("a", 0)).await;
    assert_repairs(world, &["UPDATE counter SET n = 7".into()], &["counter-drift"]).await;
    let world = world.reopen(StoreOptions::default()).await;
    let target = Some("counter-drift".into());
    let filter = AuditFilter { action: Some("doctor.fix".into()), target, ..AuditFilter::default() };
    let row = world.store.audit_list(filter, 10).await.unwrap().remove(0);
    assert_eq!((row.actor.as_str(), row.target.as_str(), row.count), ("cli", "counter-drift", 1));
    assert_eq!(row.details, serde_json::json!({"code": "counter-drift", "count": 1}));
    world.store.close().await;
}

/// Only PostgreSQL has sessions and partitions.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_keeps_old_rows_and_missing_partitions_are_reported() {
    on_postgres(async |world: &World| {
        let (holder, connection) = tokio_postgres::connect(&world.url, tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        holder.batch_execute("SET application_name = 'sleepy'; BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM faena.job").await.unwrap();
        let pid: i32 = holder.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
        finds(world, &[]).await;
        let soon = Timestamp::now().plus_ms(600_000);
        let inspection = doctor::inspect(&world.url, soon, &|_, _, _| {}).await.unwrap();
        let found = inspection.findings.iter().find(|finding| finding.code == "xmin-held").expect("a session is named");
        assert!(found.text.contains(&format!("pid {pid} (sleepy, idle in transaction) since 20")), "{}", found.text);
        assert!(!found.text.contains("SELECT"), "no query is shown: {}", found.text);
        assert!(inspection.findings.iter().any(|finding| finding.code == "clock-skew"), "ten minutes ahead");
        holder.batch_execute("COMMIT").await.unwrap();

        let job = world.running(world.job("a", 0)).await;
        world.complete(&job, 30 * 24 * 3_600_000).await;
        let found = finds(world, &["default-partition"]).await.findings.remove(0);
        assert!(found.text.starts_with("1 completed job"), "{}", found.text);
        world.ledger.run("DELETE FROM done; DELETE FROM job; DELETE FROM counter").await;
        let last = world.ledger.rows("SELECT max(relname) FROM pg_class WHERE relname ~ '^done_[0-9]{8}$'").await.remove(0).remove(0);
        assert_repairs(world, &[format!("DROP TABLE {last}")], &["partition-missing"]).await;
    })
    .await;
}

/// Only SQLite has a file.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_is_inspected_beside_its_server_and_repaired_only_without() {
    on_sqlite(async |world: &World| {
        fill(world).await;
        world.ledger.run("UPDATE counter SET n = n + 1").await;
        let options = StoreOptions { migrate: false, ..StoreOptions::default() };
        let refused =
            doctor::repair(&world.url, options, GRACE_PERIODS, Timestamp::now(), &|_, _, _| {}).await.unwrap_err();
        assert!(refused.to_string().contains("in use by another faena; stop that one"), "{refused}");
        finds(world, &["counter-drift"]).await;
        assert_repairs(world, &[], &["counter-drift"]).await;

        let Ledger::Sqlite(path) = &world.ledger else { panic!("a file") };
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666)).unwrap();
        finds(world, &["file-open-to-all"]).await;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
        world.ledger.run("DELETE FROM faena_schema WHERE version = (SELECT max(version) FROM faena_schema)").await;
        finds(world, &["schema-old"]).await;
        world.ledger.run("INSERT INTO faena_schema VALUES (99, 'future', 0)").await;
        let newer = doctor::inspect(&world.url, Timestamp::now(), &|_, _, _| {}).await.unwrap_err();
        assert!(newer.to_string().contains("schema version 99"), "{newer}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_file_is_reported_and_not_written_to() {
    on_sqlite(async |world: &World| {
        fill(world).await;
        world.ledger.run("UPDATE counter SET n = n + 1").await;
        world.store.close().await;
        let page = world.ledger.number("SELECT rootpage FROM sqlite_master WHERE name = 'job_log'").await;
        let Ledger::Sqlite(path) = &world.ledger else { panic!("a file") };
        let whole = std::fs::read(path).unwrap();
        let mut damaged = whole.clone();
        let at = usize::try_from(page - 1).unwrap() * 4_096;
        damaged[at..at + 64].fill(0xff);
        std::fs::write(path, &damaged).unwrap();
        let (repaired, after) =
            doctor::repair(&world.url, StoreOptions::default(), GRACE_PERIODS, Timestamp::now(), &|_, _, _| {})
                .await
                .unwrap();
        assert!(repaired.is_empty(), "{repaired:?}");
        assert!(after.findings.iter().any(|found| found.code == "file-damaged"), "{:#?}", after.findings);
        assert_eq!(std::fs::read(path).unwrap(), damaged);
        std::fs::write(path, &whole).unwrap();
        assert_repairs(world, &[], &["counter-drift", "node-dead"]).await;
    })
    .await;
}

/// Claims of a node that has not joined have no owner.
pub async fn a_claim_of_an_unknown_node_is_found(world: &World) {
    world.submit(world.job("a", 0)).await;
    let ask = ClaimRequest { owner: Owner::Node(NodeId::new()), lanes: world.lanes().await, limit: 1, at_once: 1 };
    world.store.job_claim(vec![ask], world.start).await.unwrap();
    let found = finds(world, &["claim-without-owner"]).await.findings.remove(0);
    assert!(found.text.contains("(1 job)"), "{}", found.text);
    assert_repairs(world, &[], &["claim-without-owner"]).await;
}

pub async fn an_active_schedule_without_a_due_time_gets_one(world: &World) {
    let spec = schedules::every(3_600_000, "hourly");
    let id = schedules::make(world, spec.clone()).await;
    let mut ended = spec;
    ended.timing.end_at = Some(world.at(7_200_000));
    let over = schedules::make(world, ended).await;
    world.store.schedule_fire(10, world.at(0)).await.unwrap();
    let damage = [
        "UPDATE schedule SET next_at = NULL".to_owned(),
        format!(
            "UPDATE schedule SET cursor_at = {} WHERE id = {}",
            world.at(7_200_000).as_ms(),
            literal(world, over.0)
        ),
    ];
    assert_repairs(world, &damage, &["schedule-stuck"]).await;
    let world = world.reopen(StoreOptions::default()).await;
    let get = async |id| world.store.schedule_get(id).await.unwrap().unwrap();
    assert_eq!(get(id).await.next_at, Some(world.at(3_600_000)));
    let over = get(over).await;
    assert!(!over.is_active && over.finished.is_some());
    world.store.close().await;
}

pub async fn overdue_and_unreadable_schedules_are_reported(world: &World) {
    let id = literal(world, schedules::make(world, schedules::every(3_600_000, "hourly")).await.0);
    let next = world.at(3_600_000).as_ms();
    is_told(
        world,
        &format!("UPDATE schedule SET next_at = {} WHERE id = {id}", world.at(-400_000).as_ms()),
        &format!("UPDATE schedule SET next_at = {next} WHERE id = {id}"),
        &["schedule-overdue"],
    )
    .await;
    is_told(
        world,
        "UPDATE schedule SET spec = replace(spec, '\"UTC\"', '\"Nowhere\"')",
        "UPDATE schedule SET spec = replace(spec, '\"Nowhere\"', '\"UTC\"')",
        &["schedule-unreadable"],
    )
    .await;
}

pub async fn due_times_with_no_job_or_two_jobs_are_reported(world: &World) {
    let id = schedules::make(world, schedules::every(3_600_000, "hourly")).await;
    world.store.schedule_trigger(id, "ana", world.start).await.unwrap();
    world.store.schedule_trigger(id, "ana", world.start).await.unwrap();
    world.store.schedule_fire(10, world.at(3_600_000)).await.unwrap();
    finds(world, &[]).await;
    let fired = world.ledger.rows("SELECT options FROM job WHERE options LIKE '%scheduledAt%'").await;
    assert_eq!(fired.len(), 1);
    let (triggered, options) = ("options NOT LIKE '%scheduledAt%'", fired[0][0].replace('\'', "''"));
    let before = world.ledger.rows(&format!("SELECT options FROM job WHERE {triggered}")).await[0][0].clone();
    let mark = before.replace('\'', "''");
    world.ledger.run(&format!("UPDATE job SET options = '{options}' WHERE options = '{mark}'")).await;
    finds(world, &["due-twice"]).await;
    let unmark = format!("UPDATE job SET options = '{mark}' WHERE options = '{options}'");
    world.ledger.run(&unmark).await;
    world.ledger.run("UPDATE tick SET job = schedule WHERE manual").await;
    finds(world, &["tick-without-job"]).await;
    world.ledger.run("UPDATE tick SET job = NULL").await;
}
