//! Doctor: a healthy database has no findings, even under load; each fault is found, and repaired if doctor can repair it.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use faena_domain::{JobId, Limit, NewJob, NodeId, Scope, Timestamp, WorkerState};
use faena_store::{
    RunOutcome, StoreOptions,
    doctor::{self, Inspection},
};

use crate::support::*;

/// The jobs of a database with rows in every table.
pub struct SampleJobs {
    pub ready: JobId,
    pub other_lane: JobId,
    pub retrying: JobId,
    pub in_flight: JobId,
    pub keyed_in_flight: JobId,
    pub processing: JobId,
    pub done: JobId,
    pub retried_done: JobId,
    pub failed: JobId,
    pub child: JobId,
    pub keyed: JobId,
    pub run: i64,
}

/// Returns the SQL literals of true and false.
fn bool_literals(fixture: &Fixture) -> (&'static str, &'static str) {
    if fixture.store.database_kind() == "sqlite" { ("1", "0") } else { ("true", "false") }
}

pub fn literal(fixture: &Fixture, id: uuid::Uuid) -> String {
    fixture.database.literal(JobId(id))
}

/// Creates jobs in all states, workers in several states, keys, labels, webhooks and a bulk action.
pub async fn fill(fixture: &Fixture) -> SampleJobs {
    let later = fixture.at(3_600_000);
    let in_flight = fixture.submit_and_claim(fixture.job("in-flight", 0)).await;
    let mut keyed_in_flight = fixture.job("keyed-in-flight", 0);
    keyed_in_flight.options.concurrency_key = Some("c".into());
    let keyed_in_flight = fixture.submit_and_claim(keyed_in_flight).await;
    let processing = fixture.submit_and_claim(fixture.job("processing", 0)).await;
    fixture.report_start(&processing, 1).await;
    fixture.report_update(&processing, percent(20.0, "on its way"), 2).await;
    fixture.report_update(&processing, step("E1", "1"), 3).await;
    fixture.report_update(&processing, message("hello"), 4).await;
    let cancel_requested = fixture.submit_and_claim(fixture.job("cancel-requested", 0)).await;
    fixture.cancel(cancel_requested.id, 2).await;
    let done = fixture.submit_and_claim(fixture.job("done", 0).idempotent("i", 1).tag("t").schedule("s")).await;
    fixture.complete(&done, 5).await;
    let retried = fixture.submit_and_claim(fixture.job("retried", 0)).await;
    fixture.retry_at(&retried, 10, 6).await;
    fixture.promote(11).await;
    let retried_done = fixture.claim_one(12).await;
    fixture.complete(&retried_done, 13).await;
    let failed = fixture.submit_and_claim(fixture.job("failed", 0).unique("free")).await;
    fixture.fail(&failed, 7).await;
    let retried_manually = fixture.submit_and_claim(fixture.job("retried-manually", 0)).await;
    fixture.fail(&retried_manually, 7).await;
    fixture.retry_manually(retried_manually.id, 8).await;
    fixture.promote(9).await;
    let claimed = fixture.claim_one(9).await;
    fixture.release(&claimed, 10).await;
    let claimed = fixture.claim_one(10).await;
    assert!(fixture.end(&claimed, cancelled(), 11).await);
    let retrying = fixture.submit_and_claim(fixture.job("retrying", 0)).await;
    fixture.retry_at(&retrying, 3_600_000, 6).await;
    let cancelled = fixture.submit(fixture.job("cancelled", 0).scheduled(later)).await;
    fixture.cancel(cancelled, 3).await;
    let (lost, _) = fixture.worker_with_jobs("lost", 1, 14).await;
    fixture.end_as_lost(&lost, 3_600_000, 15).await;
    let (busy, _) = fixture.worker_with_jobs("busy", 2, 16).await;
    fixture.send_update(fixture.worker_update(&busy, &[WorkerState::Busy], 17)).await;
    let ready = fixture.submit(fixture.job("ready", 18).unique("u").expires(later)).await;
    let other_lane = fixture.submit(fixture.job("other", 18)).await;
    fixture.submit(fixture.job("delayed", 18).scheduled(later)).await;
    let child = fixture.submit(fixture.job("child", 18).after(&[ready])).await;
    let keyed = fill_key_queue_and_webhooks(fixture, done.id).await;
    SampleJobs {
        ready,
        other_lane,
        retrying: retrying.id,
        in_flight: in_flight.id,
        keyed_in_flight: keyed_in_flight.id,
        processing: processing.id,
        done: done.id,
        retried_done: retried_done.id,
        failed: failed.id,
        child,
        keyed,
        run: in_flight.run,
    }
}

/// Submits a job with a key, and inserts webhooks and a bulk action as the store methods write them. Returns the job.
async fn fill_key_queue_and_webhooks(fixture: &Fixture, done: JobId) -> JobId {
    let now = fixture.start.as_ms();
    let id = fixture.submit(fixture.job("keyed", 19).queue("limited").concurrency_key("d")).await;
    let done = fixture.database.literal(done);
    let id_literal = |n: u128| literal(fixture, uuid::Uuid::from_u128(n));
    for sql in [
        format!(
            "INSERT INTO webhook (id, subject, event, correlation, url, host, body, created_at, state, due_at, settled_at, attempts) VALUES
             ({}, {done}, 'job.status', 'c', 'http://x/', 'x', '{{}}', {now}, 0, {now}, NULL, 0),
             ({}, {done}, 'job.status', 'c', 'http://x/', 'x', '{{}}', {now}, 2, NULL, {now}, 1)",
            id_literal(1),
            id_literal(2)
        ),
        format!(
            "INSERT INTO webhook_attempt (webhook, number, at, took_ms, status) VALUES ({}, 1, {now}, 3, 200)",
            id_literal(2)
        ),
        format!(
            "INSERT INTO bulk (id, action, filter, actor, per_second, created_at, up_to, matched, due_at) VALUES
             ({}, 'cancel', '{{}}', 'p', 10, {now}, {done}, 1, {now})",
            id_literal(3)
        ),
    ] {
        fixture.database.run(&sql).await;
    }
    id
}

async fn inspect(fixture: &Fixture) -> Inspection {
    doctor::inspect(&fixture.url, Timestamp::now(), &|_, _, _| {}).await.unwrap()
}

fn codes(inspection: &Inspection) -> Vec<&'static str> {
    let mut codes: Vec<_> = inspection.findings.iter().map(|finding| finding.code).collect();
    codes.sort_unstable();
    codes
}

/// Checks that doctor finds exactly the faults with these codes.
pub async fn assert_findings(fixture: &Fixture, expected: &[&str]) -> Inspection {
    let inspection = inspect(fixture).await;
    let mut expected = expected.to_vec();
    expected.sort_unstable();
    assert_eq!(codes(&inspection), expected, "{:#?}", inspection.findings);
    inspection
}

/// Damages a database, and checks that doctor finds the fault and repairs it without losing a job, and that the audit log has
/// an entry.
pub async fn assert_repairs(fixture: &Fixture, damage: &[String], expected: &[&str]) {
    let jobs = fixture.database.number("SELECT count(*) FROM job").await;
    for sql in damage {
        fixture.database.run(sql).await;
    }
    let inspection = assert_findings(fixture, expected).await;
    assert!(inspection.findings.iter().all(|finding| finding.fixable), "{:#?}", inspection.findings);
    let sqlite = fixture.store.database_kind() == "sqlite";
    if sqlite {
        fixture.store.close().await;
    }
    let options = StoreOptions { migrate: false, ..StoreOptions::default() };
    let (repaired, after) =
        doctor::repair(&fixture.url, options, GRACE_PERIODS, Timestamp::now(), &|_, _, _| {}).await.unwrap();
    assert_eq!(codes(&after), Vec::<&str>::new(), "{:#?} after {repaired:?}", after.findings);
    assert_findings(fixture, &[]).await;
    assert_eq!(fixture.database.number("SELECT count(*) FROM job").await, jobs, "no job was lost");
    for code in expected {
        let entries = fixture
            .database
            .number(&format!(
                "SELECT count(*) FROM audit WHERE action = 'doctor.fix' AND actor = 'cli' AND target = '{code}'"
            ))
            .await;
        // A fault that another repair has fixed has no entry of its own.
        assert!(
            entries > 0 || !repaired.iter().any(|done| done.code == *code),
            "{code} in the audit log: {repaired:?}"
        );
    }
    assert!(repaired.iter().any(|done| done.code == expected[0] && done.count > 0), "{repaired:?}");
}

/// Damages a database, and checks that doctor reports the fault as one that it cannot repair. Then undoes the damage.
pub async fn assert_reported_only(fixture: &Fixture, damage: &str, undo: &str, expected: &[&str]) {
    fixture.database.run(damage).await;
    let inspection = assert_findings(fixture, expected).await;
    let first = inspection.findings.iter().find(|finding| finding.code == expected[0]).unwrap();
    assert!(!first.fixable, "{first:?}");
    fixture.database.run(undo).await;
    assert_findings(fixture, &[]).await;
}

pub async fn a_healthy_database_with_rows_in_every_table_has_no_finding(fixture: &Fixture) {
    assert_findings(fixture, &[]).await;
    fill(fixture).await;
    let inspection = assert_findings(fixture, &[]).await;
    assert_eq!(inspection.jobs, u64::try_from(fixture.database.number("SELECT count(*) FROM job").await).unwrap());
}

/// Submits, runs and ends jobs until it is stopped.
async fn work(fixture: &Fixture, stop: &AtomicBool, ended: &AtomicUsize) {
    let mut last: Vec<JobId> = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let ms = Timestamp::now().ms_since(fixture.start);
        let mut jobs: Vec<NewJob> = (0..20).map(|n| fixture.job(["a", "b"][n % 2], ms)).collect();
        let parent = jobs[0].id;
        jobs[1] = fixture.job("c", ms).after(&[parent]);
        last = fixture.submit_all(jobs).await.into_iter().chain(last).take(40).collect();
        let lanes = fixture.store.lanes().await.unwrap();
        let own = lanes.into_iter().filter(|lane| ["a", "b", "c"].contains(&lane.kind.as_str())).map(|lane| lane.id);
        let claimed = fixture.claim_lanes(fixture.node, own.collect(), 15, ms).await;
        let mut ends = Vec::new();
        for (n, job) in claimed.iter().enumerate() {
            if n % 5 == 0 {
                fixture.report_start(job, ms).await;
            }
            let outcome = match n % 4 {
                0 => fixture.retry(ms + 1),
                1 => failed("no"),
                2 => RunOutcome::Released,
                _ => completed(),
            };
            ends.push(fixture.run_end(job, outcome, ms));
        }
        ended.fetch_add(ends.len(), Ordering::Relaxed);
        fixture.store.job_end(ends, fixture.at(ms)).await.unwrap();
        fixture.promote(ms).await;
        let _ = fixture.store.job_cancel(last[0], "not wanted", None, fixture.at(ms)).await;
    }
}

pub async fn a_busy_healthy_server_has_no_finding(fixture: &Fixture) {
    fill(fixture).await;
    let (stop, ended) = (AtomicBool::new(false), AtomicUsize::new(0));
    let inspections = async {
        let mut count = 0;
        while count < 10 || ended.load(Ordering::Relaxed) < 600 {
            assert_findings(fixture, &[]).await;
            count += 1;
        }
        stop.store(true, Ordering::Relaxed);
    };
    tokio::join!(inspections, work(fixture, &stop, &ended), work(fixture, &stop, &ended));
    assert!(assert_findings(fixture, &[]).await.jobs > 600);
}

pub async fn a_job_in_no_table_is_made_ready_again(fixture: &Fixture) {
    let jobs = fill(fixture).await;
    let ready = fixture.database.literal(jobs.ready);
    assert_repairs(
        fixture,
        &[format!("DELETE FROM ready WHERE id = {ready}")],
        &["job-without-state", "counter-drift"],
    )
    .await;
    let fixture = fixture.reopen(StoreOptions::default()).await;
    assert_eq!(fixture.events(jobs.ready).await, ["created", "queued", "recovered"]);
    assert!(fixture.claim(100, 60_000).await.iter().any(|job| job.id == jobs.ready && job.must_record_start));
    fixture.store.close().await;
}

pub async fn a_job_in_no_table_keeps_its_retry_count(fixture: &Fixture) {
    let jobs = fill(fixture).await;
    let retrying = fixture.database.literal(jobs.retrying);
    assert_repairs(
        fixture,
        &[format!("DELETE FROM waiting WHERE id = {retrying}")],
        &["job-without-state", "counter-drift"],
    )
    .await;
    assert_eq!(fixture.database.number(&format!("SELECT retry_count FROM ready WHERE id = {retrying}")).await, 1);
}

pub async fn a_job_ready_and_waiting_stays_ready(fixture: &Fixture) {
    let jobs = fill(fixture).await;
    let (_, false_literal) = bool_literals(fixture);
    let id = fixture.database.literal(jobs.ready);
    let second = format!(
        "INSERT INTO waiting (lane, state, id, due_at, blocked, retry_count) SELECT lane, 0, id, 4000000000000, {false_literal}, 0 FROM ready WHERE id = {id}"
    );
    assert_repairs(fixture, &[second], &["job-with-two-states", "counter-drift"]).await;
    assert_eq!(fixture.database.number(&format!("SELECT count(*) FROM ready WHERE id = {id}")).await, 1);
}

pub async fn a_finished_job_that_is_also_ready_stays_finished(fixture: &Fixture) {
    let jobs = fill(fixture).await;
    let (_, false_literal) = bool_literals(fixture);
    let mut damage = Vec::new();
    for (table, id) in [("done", jobs.done), ("ended", jobs.failed)] {
        damage.push(format!(
            "INSERT INTO ready (lane, ready_at, id, retry_count, must_record_start) SELECT lane, 5, id, 0, {false_literal} FROM {table} WHERE id = {}",
            fixture.database.literal(id)
        ));
    }
    assert_repairs(fixture, &damage, &["job-with-two-states", "counter-drift"]).await;
    assert_eq!(
        fixture
            .database
            .number(&format!("SELECT count(*) FROM done WHERE id = {}", fixture.database.literal(jobs.done)))
            .await,
        1
    );
}

pub async fn a_job_in_flight_that_is_also_ready_is_not_claimed_twice(fixture: &Fixture) {
    let jobs = fill(fixture).await;
    let (_, false_literal) = bool_literals(fixture);
    let in_flight = fixture.database.literal(jobs.in_flight);
    let second = format!(
        "INSERT INTO ready (lane, ready_at, id, retry_count, must_record_start) SELECT lane, 5, id, 0, {false_literal} FROM job WHERE id = {in_flight}"
    );
    assert_repairs(fixture, &[second], &["job-with-two-states", "counter-drift"]).await;
}

pub async fn a_job_in_the_wrong_lane_is_moved(fixture: &Fixture) {
    let jobs = fill(fixture).await;
    let (ready, other) = (fixture.database.literal(jobs.ready), fixture.database.literal(jobs.other_lane));
    let moved = format!("UPDATE ready SET lane = (SELECT lane FROM job WHERE id = {other}) WHERE id = {ready}");
    assert_repairs(fixture, &[moved], &["wrong-lane", "counter-drift"]).await;
}

pub async fn rows_of_jobs_that_do_not_exist_are_removed(fixture: &Fixture) {
    let jobs = fill(fixture).await;
    let unknown_job = literal(fixture, uuid::Uuid::from_u128(99));
    let damage = [
        format!("INSERT INTO job_log (id, run, log) VALUES ({unknown_job}, NULL, '[1,\"message\"]')"),
        format!("INSERT INTO step (id, name, run, at, result) VALUES ({unknown_job}, 'E1', 1, 1, '1')"),
        format!("INSERT INTO progress (id, run, progress) VALUES ({unknown_job}, 1, '{{}}')"),
        format!("INSERT INTO label (kind, value, id) VALUES (0, 'x', {unknown_job})"),
        format!("INSERT INTO job_key (kind, key, id) VALUES (0, 'x', {unknown_job})"),
        format!("INSERT INTO expiry (expires_at, id) VALUES (4000000000000, {unknown_job})"),
        format!("INSERT INTO cancel_request (id, reason, at) VALUES ({unknown_job}, 'x', 1)"),
        format!(
            "INSERT INTO dependency (parent, child) VALUES ({}, {unknown_job})",
            fixture.database.literal(jobs.ready)
        ),
        format!("INSERT INTO key_in_flight (key, id) VALUES (1, {unknown_job})"),
        format!("INSERT INTO webhook_attempt (webhook, number, at, took_ms) VALUES ({unknown_job}, 1, 1, 1)"),
    ];
    for sql in &damage {
        fixture.database.run(sql).await;
    }
    let found = assert_findings(fixture, &["orphaned-rows"]).await.findings.remove(0);
    assert_eq!(found.count, 10, "{}", found.text);
    for table in [
        "job_log",
        "step",
        "progress",
        "label",
        "job_key",
        "expiry",
        "cancel_request",
        "dependency",
        "key_in_flight",
        "webhook_attempt",
    ] {
        assert!(found.text.contains(&format!("{table} of 00000000-")), "{table}: {}", found.text);
    }
    assert_repairs(fixture, &[], &["orphaned-rows"]).await;
}

pub async fn a_wrong_counter_is_counted_again(fixture: &Fixture) {
    fill(fixture).await;
    let lane = "(SELECT id FROM lane WHERE type = 'ready')";
    let wrong = format!("UPDATE counter SET n = n + 3 WHERE tally = 1 AND lane = {lane}");
    fixture.database.run(&wrong).await;
    let found = assert_findings(fixture, &["counter-drift"]).await.findings.remove(0);
    assert!(found.text.contains("default/ready queued: counter 4, rows 1"), "{}", found.text);
    assert_repairs(fixture, &[format!("DELETE FROM counter WHERE lane = {lane}")], &["counter-drift"]).await;
}

pub async fn a_claim_without_an_owner_is_released(fixture: &Fixture) {
    let jobs = fill(fixture).await;
    let unknown_owner = literal(fixture, NodeId::new().0);
    assert_repairs(
        fixture,
        &[format!("UPDATE claim SET owner = {unknown_owner} WHERE run = {}", jobs.run)],
        &["claim-without-owner"],
    )
    .await;
    let in_flight = fixture.database.literal(jobs.in_flight);
    assert_eq!(fixture.database.number(&format!("SELECT count(*) FROM ready WHERE id = {in_flight}")).await, 1);
}

pub async fn the_claims_of_a_dead_server_are_released(fixture: &Fixture) {
    let jobs = fill(fixture).await;
    if fixture.store.database_kind() == "sqlite" {
        fixture.store.close().await;
    }
    assert_repairs(fixture, &["UPDATE node SET lease_until = 5".into()], &["node-dead"]).await;
    let processing = fixture.database.literal(jobs.processing);
    assert_eq!(fixture.database.number(&format!("SELECT count(*) FROM waiting WHERE id = {processing}")).await, 1);
}

pub async fn an_unwatched_worker_gets_a_deadline(fixture: &Fixture) {
    fill(fixture).await;
    let unwatched = "UPDATE worker SET node = NULL, deadline = NULL WHERE key = 'busy'";
    assert_repairs(fixture, &[unwatched.into()], &["worker-unwatched"]).await;
    assert_eq!(fixture.database.number("SELECT count(*) FROM worker WHERE key = 'busy' AND deadline > 0").await, 1);
}

pub async fn a_running_row_without_a_claim_is_removed(fixture: &Fixture) {
    let jobs = fill(fixture).await;
    let unknown_owner = literal(fixture, NodeId::new().0);
    let stray = format!(
        "INSERT INTO running (id, lane, run, node, worker, retry_count, ready_at, started_at, updated_at)
         SELECT id, lane, 1, {unknown_owner}, {unknown_owner}, 0, 1, 1, 1 FROM ready WHERE id = {}",
        fixture.database.literal(jobs.ready)
    );
    assert_repairs(fixture, &[stray], &["running-without-claim"]).await;
}

pub async fn a_blocked_job_without_parents_is_released(fixture: &Fixture) {
    let jobs = fill(fixture).await;
    let child = fixture.database.literal(jobs.child);
    assert_repairs(fixture, &[format!("DELETE FROM dependency WHERE child = {child}")], &["blocked-without-parents"])
        .await;
    let fixture = fixture.reopen(StoreOptions::default()).await;
    fixture.promote(Timestamp::now().ms_since(fixture.start)).await;
    assert_eq!(fixture.state(jobs.child).await, faena_domain::JobState::Queued);
    fixture.store.close().await;
}

pub async fn a_blocked_job_whose_next_check_is_too_late_is_checked_now(fixture: &Fixture) {
    let jobs = fill(fixture).await;
    let child = fixture.database.literal(jobs.child);
    assert_repairs(
        fixture,
        &[format!("UPDATE waiting SET due_at = 9000000000000 WHERE id = {child}")],
        &["recheck-too-late"],
    )
    .await;
}

pub async fn run_numbers_in_use_are_skipped(fixture: &Fixture) {
    fill(fixture).await;
    let (reset, last) = if fixture.store.database_kind() == "sqlite" {
        ("UPDATE run_sequence SET last = 1", "SELECT last FROM run_sequence")
    } else {
        ("SELECT setval('faena.run', 1)", "SELECT last_value FROM faena.run")
    };
    assert_repairs(fixture, &[reset.into()], &["run-behind"]).await;
    assert!(fixture.database.number(last).await > 5);
}

pub async fn a_missing_run_sequence_is_recreated(fixture: &Fixture) {
    fill(fixture).await;
    if fixture.store.database_kind() == "sqlite" {
        assert_repairs(fixture, &["DELETE FROM run_sequence".into()], &["run-behind"]).await;
        assert!(fixture.database.number("SELECT last FROM run_sequence").await > 5);
    }
}

pub async fn an_invalid_setting_is_reported(fixture: &Fixture) {
    let limit = Limit { concurrency: Some(3), rate: None };
    fixture.store.limit_set(Scope::Queue("q".into()), limit, "test", fixture.start).await.unwrap();
    fixture.database.run("UPDATE limit_rule SET concurrency = -5").await;
    let found = assert_findings(fixture, &["rule-illegal"]).await;
    assert!(found.findings[0].text.contains("limit q: -5"), "{:#?}", found.findings);
    fixture.database.run("UPDATE limit_rule SET concurrency = 3").await;
}

pub async fn a_unique_key_of_a_finished_job_is_freed(fixture: &Fixture) {
    let jobs = fill(fixture).await;
    let done = fixture.database.literal(jobs.done);
    assert_repairs(
        fixture,
        &[format!("INSERT INTO job_key (kind, key, id) VALUES (1, 'stuck', {done})")],
        &["unique-key-held"],
    )
    .await;
}

pub async fn a_ready_job_without_its_key_gets_it(fixture: &Fixture) {
    let jobs = fill(fixture).await;
    let keyed = fixture.database.literal(jobs.keyed);
    assert_repairs(fixture, &[format!("UPDATE ready SET key = NULL WHERE id = {keyed}")], &["key-missing"]).await;
}

pub async fn a_key_with_ready_jobs_gets_its_key_queue(fixture: &Fixture) {
    fill(fixture).await;
    assert_repairs(fixture, &["DELETE FROM key_queue".into()], &["key-queue-missing"]).await;
}

pub async fn a_closed_key_queue_that_nothing_opens_is_opened(fixture: &Fixture) {
    fill(fixture).await;
    let (_, false_literal) = bool_literals(fixture);
    assert_repairs(fixture, &[format!("UPDATE key_queue SET open = {false_literal}")], &["key-queue-closed"]).await;
}

pub async fn a_stale_row_of_a_key_in_flight_is_removed(fixture: &Fixture) {
    let jobs = fill(fixture).await;
    assert_repairs(
        fixture,
        &[format!(
            "INSERT INTO key_in_flight SELECT key, id FROM ready WHERE id = {}",
            fixture.database.literal(jobs.keyed)
        )],
        &["key-in-flight-stale"],
    )
    .await;
}

pub async fn a_job_in_flight_counts_for_the_limit_of_its_key_again(fixture: &Fixture) {
    let jobs = fill(fixture).await;
    let in_flight = fixture.database.literal(jobs.keyed_in_flight);
    let key = fixture.database.number(&format!("SELECT key FROM key_in_flight WHERE id = {in_flight}")).await;
    fixture.database.run(&format!("DELETE FROM key_in_flight WHERE id = {in_flight}")).await;
    assert_findings(fixture, &["key-in-flight-missing"]).await;
    if fixture.store.database_kind() == "postgres" {
        assert_repairs(fixture, &[], &["key-in-flight-missing"]).await;
        assert_eq!(
            fixture.database.number(&format!("SELECT count(*) FROM key_in_flight WHERE id = {in_flight}")).await,
            1
        );
    } else {
        // SQLite: a repair opens the file, which releases every claim; so this is only reported.
        fixture.database.run(&format!("INSERT INTO key_in_flight (key, id) VALUES ({key}, {in_flight})")).await;
    }
}

pub async fn a_webhook_and_a_bulk_action_without_a_due_time_get_one(fixture: &Fixture) {
    fill(fixture).await;
    let damage = ["UPDATE webhook SET due_at = NULL".to_owned(), "UPDATE bulk SET due_at = NULL".to_owned()];
    assert_repairs(fixture, &damage, &["webhook-stuck", "bulk-stuck"]).await;
}

pub async fn outbox_rows_without_an_event_or_a_sink_are_removed(fixture: &Fixture) {
    crate::outbox::sink(fixture, "s", &["job.*"], faena_store::OnRejected::Skip).await;
    fill(fixture).await;
    assert_findings(fixture, &[]).await;
    let oldest = "(SELECT min(position) FROM event)";
    assert_repairs(fixture, &[format!("DELETE FROM event WHERE position = {oldest}")], &["outbox-without-event"]).await;
    let stray =
        "INSERT INTO outbox (sink, partition, position, subject) SELECT 99, partition, position, subject FROM outbox";
    assert_repairs(fixture, &[stray.into()], &["outbox-unknown-sink"]).await;
    let lease = "INSERT INTO outbox_lease (sink, partition) VALUES (99, 3)";
    assert_repairs(fixture, &[lease.into()], &["lease-unknown-sink"]).await;
    assert!(fixture.database.number("SELECT count(*) FROM outbox").await > 0, "the other events are still queued");
}
