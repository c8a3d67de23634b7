//! Faults that doctor reports but does not repair, and faults of the environment, of schedules and of claims.

use faena_domain::{NodeId, Timestamp};
use faena_store::{
    AuditFilter, ClaimRequest, Owner, StoreOptions,
    doctor::{self, Severity},
};

use crate::{
    doctor::{assert_findings, assert_repairs, assert_reported_only, fill, literal},
    schedules,
    support::*,
};

pub async fn overdue_rows_are_reported(fixture: &Fixture) {
    let jobs = fill(fixture).await;
    let child = fixture.database.literal(jobs.child);
    let due_at = fixture.at(5_000).as_ms();
    assert_reported_only(
        fixture,
        &format!("UPDATE waiting SET due_at = 1000 WHERE id = {child}"),
        &format!("UPDATE waiting SET due_at = {due_at} WHERE id = {child}"),
        &["waiting-overdue"],
    )
    .await;
    assert_reported_only(
        fixture,
        "UPDATE worker SET deadline = 1000 WHERE key = 'busy'",
        "UPDATE worker SET deadline = NULL WHERE key = 'busy'",
        &["worker-overdue"],
    )
    .await;
    assert_reported_only(
        fixture,
        "UPDATE webhook SET due_at = 1000 WHERE state = 0; UPDATE bulk SET due_at = 1000",
        &format!("UPDATE webhook SET due_at = {due_at} WHERE state = 0; UPDATE bulk SET due_at = {due_at}"),
        &["webhook-overdue", "bulk-overdue"],
    )
    .await;
}

pub async fn unknown_states_are_reported(fixture: &Fixture) {
    let jobs = fill(fixture).await;
    let failed = fixture.database.literal(jobs.failed);
    assert_reported_only(
        fixture,
        &format!("UPDATE ended SET state = 4 WHERE id = {failed}"),
        &format!("UPDATE ended SET state = 7 WHERE id = {failed}"),
        // The job counts as cancelled then, and nothing shows that its run has ended.
        &["illegal-state", "counter-drift", "job-with-two-states"],
    )
    .await;
    assert_reported_only(
        fixture,
        "UPDATE webhook SET state = 9 WHERE state = 2",
        "UPDATE webhook SET state = 2 WHERE state = 9",
        &["illegal-state"],
    )
    .await;
    assert_reported_only(
        fixture,
        "UPDATE worker SET state = 2 WHERE key = 'lost'",
        "UPDATE worker SET state = 6 WHERE key = 'lost'",
        &["worker-state", "worker-history"],
    )
    .await;
    let worker = "(SELECT id FROM worker WHERE key = 'lost')";
    assert_reported_only(
        fixture,
        &format!("INSERT INTO worker_change (worker, sequence, at, state) VALUES ({worker}, 900, 5, 0), ({worker}, 901, 5, 6)"),
        "DELETE FROM worker_change WHERE sequence >= 900",
        &["worker-history"],
    )
    .await;
}

pub async fn a_missing_lane_is_reported(fixture: &Fixture) {
    let jobs = fill(fixture).await;
    let lane = fixture.lane_of(jobs.other_lane).await.id;
    let move_all = |from: i32, to: i32| {
        ["job", "ready", "counter"]
            .map(|table| format!("UPDATE {table} SET lane = {to} WHERE lane = {from}"))
            .join("; ")
    };
    assert_reported_only(fixture, &move_all(lane, 9_999), &move_all(9_999, lane), &["lane-missing"]).await;
}

pub async fn an_unreadable_job_is_reported(fixture: &Fixture) {
    let jobs = fill(fixture).await;
    let ready = fixture.database.literal(jobs.other_lane);
    assert_reported_only(
        fixture,
        &format!("UPDATE job SET options = 'nonsense' WHERE id = {ready}"),
        &format!("UPDATE job SET options = NULL WHERE id = {ready}"),
        &["job-unreadable"],
    )
    .await;
}

pub async fn a_log_that_is_damaged_or_has_gaps_is_reported(fixture: &Fixture) {
    let jobs = fill(fixture).await;
    let done = fixture.database.literal(jobs.done);
    let intact = fixture.database.rows(&format!("SELECT log FROM done WHERE id = {done}")).await.remove(0).remove(0);
    let undo = format!("UPDATE done SET log = '{intact}' WHERE id = {done}");
    for (log, code) in [
        ("[1,\"queued\"", "log-unreadable"),
        ("[1,\"queued\"],[2,\"assigned\"]", "log-incomplete"),
        ("[1,\"assigned\"],[2,\"completed\"]", "log-incomplete"),
        ("[90000,\"queued\"],[2,\"completed\"]", "log-time"),
    ] {
        assert_reported_only(fixture, &format!("UPDATE done SET log = '{log}' WHERE id = {done}"), &undo, &[code])
            .await;
    }
    let retried = fixture.database.literal(jobs.retried_done);
    assert_reported_only(
        fixture,
        &format!("UPDATE attempt SET retry_count = 7 WHERE id = {retried}"),
        &format!("UPDATE attempt SET retry_count = 0 WHERE id = {retried}"),
        &["attempts-missing"],
    )
    .await;
}

pub async fn a_finding_lists_twenty_jobs_and_counts_the_rest(fixture: &Fixture) {
    fixture.submit_all((0..50).map(|_| fixture.job("a", 0)).collect()).await;
    fixture.database.run("DELETE FROM ready").await;
    let found = assert_findings(fixture, &["job-without-state", "counter-drift"]).await.findings.remove(0);
    assert_eq!((found.severity, found.count), (Severity::Error, 50));
    assert_eq!(found.text.matches("-7000-").count(), 20, "{}", found.text);
    assert!(found.text.ends_with("and 30 more"), "{}", found.text);
    assert_repairs(fixture, &[], &["job-without-state", "counter-drift"]).await;
    let ready = fixture.database.number("SELECT count(*) FROM ready").await;
    assert_eq!(ready, 50);
}

pub async fn a_repair_has_an_audit_entry(fixture: &Fixture) {
    fixture.submit(fixture.job("a", 0)).await;
    assert_repairs(fixture, &["UPDATE counter SET n = 7".into()], &["counter-drift"]).await;
    let fixture = fixture.reopen(StoreOptions::default()).await;
    let target = Some("counter-drift".into());
    let filter = AuditFilter { action: Some("doctor.fix".into()), target, ..AuditFilter::default() };
    let row = fixture.store.audit_list(filter, 10).await.unwrap().remove(0);
    assert_eq!((row.actor.as_str(), row.target.as_str(), row.count), ("cli", "counter-drift", 1));
    assert_eq!(row.details, serde_json::json!({"code": "counter-drift", "count": 1}));
    fixture.store.close().await;
}

/// Only PostgreSQL has sessions and partitions.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_keeps_old_rows_and_missing_partitions_are_reported_on_postgres() {
    on_postgres(async |fixture: &Fixture| {
        let (idle_session, connection) = tokio_postgres::connect(&fixture.url, tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        idle_session.batch_execute("SET application_name = 'idle-app'; BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM faena.job").await.unwrap();
        let pid: i32 = idle_session.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
        assert_findings(fixture, &[]).await;
        let soon = Timestamp::now().plus_ms(600_000);
        let inspection = doctor::inspect(&fixture.url, soon, &|_, _, _| {}).await.unwrap();
        let found = inspection.findings.iter().find(|finding| finding.code == "xmin-held").expect("the session is reported");
        assert!(found.text.contains(&format!("pid {pid} (idle-app, idle in transaction) since 20")), "{}", found.text);
        assert!(!found.text.contains("SELECT"), "no query is shown: {}", found.text);
        assert!(inspection.findings.iter().any(|finding| finding.code == "clock-skew"), "ten minutes ahead");
        idle_session.batch_execute("COMMIT").await.unwrap();

        let job = fixture.submit_and_claim(fixture.job("a", 0)).await;
        fixture.complete(&job, 30 * 24 * 3_600_000).await;
        let found = assert_findings(fixture, &["default-partition"]).await.findings.remove(0);
        assert!(found.text.starts_with("1 completed job"), "{}", found.text);
        fixture.database.run("DELETE FROM done; DELETE FROM job; DELETE FROM counter").await;
        let last = fixture.database.rows("SELECT max(relname) FROM pg_class WHERE relname ~ '^done_[0-9]{8}$'").await.remove(0).remove(0);
        assert_repairs(fixture, &[format!("DROP TABLE {last}")], &["partition-missing"]).await;
    })
    .await;
}

/// Only SQLite has a file.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_is_inspected_while_its_server_runs_but_repaired_only_without_it() {
    on_sqlite(async |fixture: &Fixture| {
        fill(fixture).await;
        fixture.database.run("UPDATE counter SET n = n + 1").await;
        let options = StoreOptions { migrate: false, ..StoreOptions::default() };
        let rejected =
            doctor::repair(&fixture.url, options, GRACE_PERIODS, Timestamp::now(), &|_, _, _| {}).await.unwrap_err();
        assert!(rejected.to_string().contains("in use by another faena; stop that one"), "{rejected}");
        assert_findings(fixture, &["counter-drift"]).await;
        assert_repairs(fixture, &[], &["counter-drift"]).await;

        let RawDatabase::Sqlite(path) = &fixture.database else { panic!("a file") };
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666)).unwrap();
        assert_findings(fixture, &["file-open-to-all"]).await;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
        fixture.database.run("DELETE FROM faena_schema WHERE version = (SELECT max(version) FROM faena_schema)").await;
        assert_findings(fixture, &["schema-old"]).await;
        fixture.database.run("INSERT INTO faena_schema VALUES (99, 'future', 0)").await;
        let newer = doctor::inspect(&fixture.url, Timestamp::now(), &|_, _, _| {}).await.unwrap_err();
        assert!(newer.to_string().contains("schema version 99"), "{newer}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_file_is_reported_and_not_written_to() {
    on_sqlite(async |fixture: &Fixture| {
        fill(fixture).await;
        fixture.database.run("UPDATE counter SET n = n + 1").await;
        fixture.store.close().await;
        let page = fixture.database.number("SELECT rootpage FROM sqlite_master WHERE name = 'job_log'").await;
        let RawDatabase::Sqlite(path) = &fixture.database else { panic!("a file") };
        let intact = std::fs::read(path).unwrap();
        let mut damaged = intact.clone();
        let at = usize::try_from(page - 1).unwrap() * 4_096;
        damaged[at..at + 64].fill(0xff);
        std::fs::write(path, &damaged).unwrap();
        let (repaired, after) =
            doctor::repair(&fixture.url, StoreOptions::default(), GRACE_PERIODS, Timestamp::now(), &|_, _, _| {})
                .await
                .unwrap();
        assert!(repaired.is_empty(), "{repaired:?}");
        assert!(after.findings.iter().any(|found| found.code == "file-damaged"), "{:#?}", after.findings);
        assert_eq!(std::fs::read(path).unwrap(), damaged);
        std::fs::write(path, &intact).unwrap();
        assert_repairs(fixture, &[], &["counter-drift", "node-dead"]).await;
    })
    .await;
}

/// Claims of a node that has not joined have no owner.
pub async fn a_claim_of_an_unknown_node_is_found(fixture: &Fixture) {
    fixture.submit(fixture.job("a", 0)).await;
    let request = ClaimRequest {
        owner: Owner::Node(NodeId::new()),
        lanes: fixture.lanes().await,
        limit: 1,
        idle_slots: 1,
        candidates: None,
    };
    fixture.store.job_claim(vec![request], fixture.start).await.unwrap();
    let found = assert_findings(fixture, &["claim-without-owner"]).await.findings.remove(0);
    assert!(found.text.contains("(1 job)"), "{}", found.text);
    assert_repairs(fixture, &[], &["claim-without-owner"]).await;
}

pub async fn an_active_schedule_without_a_due_time_gets_one(fixture: &Fixture) {
    let spec = schedules::every(3_600_000, "hourly");
    let id = schedules::create(fixture, spec.clone()).await;
    let mut ending = spec;
    ending.timing.end_at = Some(fixture.at(7_200_000));
    let ended_schedule = schedules::create(fixture, ending).await;
    fixture.store.schedule_fire(10, fixture.at(0)).await.unwrap();
    let damage = [
        "UPDATE schedule SET next_at = NULL".to_owned(),
        format!(
            "UPDATE schedule SET cursor_at = {} WHERE id = {}",
            fixture.at(7_200_000).as_ms(),
            literal(fixture, ended_schedule.0)
        ),
    ];
    assert_repairs(fixture, &damage, &["schedule-stuck"]).await;
    let fixture = fixture.reopen(StoreOptions::default()).await;
    let get = async |id| fixture.store.schedule_get(id).await.unwrap().unwrap();
    assert_eq!(get(id).await.next_at, Some(fixture.at(3_600_000)));
    let ended_schedule = get(ended_schedule).await;
    assert!(!ended_schedule.is_active && ended_schedule.finished.is_some());
    fixture.store.close().await;
}

pub async fn overdue_and_unreadable_schedules_are_reported(fixture: &Fixture) {
    let id = literal(fixture, schedules::create(fixture, schedules::every(3_600_000, "hourly")).await.0);
    let next = fixture.at(3_600_000).as_ms();
    assert_reported_only(
        fixture,
        &format!("UPDATE schedule SET next_at = {} WHERE id = {id}", fixture.at(-400_000).as_ms()),
        &format!("UPDATE schedule SET next_at = {next} WHERE id = {id}"),
        &["schedule-overdue"],
    )
    .await;
    assert_reported_only(
        fixture,
        "UPDATE schedule SET spec = replace(spec, '\"UTC\"', '\"Nowhere\"')",
        "UPDATE schedule SET spec = replace(spec, '\"Nowhere\"', '\"UTC\"')",
        &["schedule-unreadable"],
    )
    .await;
}

pub async fn due_times_with_no_job_or_two_jobs_are_reported(fixture: &Fixture) {
    let id = schedules::create(fixture, schedules::every(3_600_000, "hourly")).await;
    fixture.store.schedule_trigger(id, "ana", fixture.start).await.unwrap();
    fixture.store.schedule_trigger(id, "ana", fixture.start).await.unwrap();
    fixture.store.schedule_fire(10, fixture.at(3_600_000)).await.unwrap();
    assert_findings(fixture, &[]).await;
    let fired = fixture.database.rows("SELECT options FROM job WHERE options LIKE '%scheduledAt%'").await;
    assert_eq!(fired.len(), 1);
    let (triggered, options) = ("options NOT LIKE '%scheduledAt%'", fired[0][0].replace('\'', "''"));
    let before = fixture.database.rows(&format!("SELECT options FROM job WHERE {triggered}")).await[0][0].clone();
    let triggered_options = before.replace('\'', "''");
    fixture.database.run(&format!("UPDATE job SET options = '{options}' WHERE options = '{triggered_options}'")).await;
    assert_findings(fixture, &["due-twice"]).await;
    let undo = format!("UPDATE job SET options = '{triggered_options}' WHERE options = '{options}'");
    fixture.database.run(&undo).await;
    fixture.database.run("UPDATE tick SET job = schedule WHERE manual").await;
    assert_findings(fixture, &["tick-without-job"]).await;
    fixture.database.run("UPDATE tick SET job = NULL").await;
}
