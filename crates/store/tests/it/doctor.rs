//! Doctor: a healthy database has no findings, also under load; each fault is found, and repaired where that is promised.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use faena_domain::{JobId, Limit, NewJob, NodeId, Scope, Timestamp, WorkerState};
use faena_store::{
    NoteKind, RunOutcome, StoreOptions,
    doctor::{self, Inspection},
};

use crate::support::*;

/// The jobs of a database with rows in every table.
pub struct Cast {
    pub ready: JobId,
    pub other_lane: JobId,
    pub retrying: JobId,
    pub held: JobId,
    pub keyed_held: JobId,
    pub processing: JobId,
    pub done: JobId,
    pub retried_done: JobId,
    pub failed: JobId,
    pub child: JobId,
    pub keyed: JobId,
    pub run: i64,
}

fn yes_no(world: &World) -> (&'static str, &'static str) {
    if world.store.engine() == "sqlite" { ("1", "0") } else { ("true", "false") }
}

pub fn literal(world: &World, id: uuid::Uuid) -> String {
    world.ledger.literal(JobId(id))
}

/// Creates jobs in all states, workers in all states, keys, labels, limits, webhooks.
pub async fn fill(world: &World) -> Cast {
    let later = world.at(3_600_000);
    let held = world.running(world.job("held", 0)).await;
    let mut keyed_held = world.job("keyed_held", 0);
    keyed_held.options.concurrency_key = Some("c".into());
    let keyed_held = world.running(keyed_held).await;
    let processing = world.running(world.job("processing", 0)).await;
    world.begin(&processing, 1).await;
    world.note(&processing, percent(20.0, "on its way"), 2).await;
    world.note(&processing, step("E1", "1"), 3).await;
    world.note(&processing, NoteKind::Message("hello".into()), 4).await;
    let asked = world.running(world.job("asked", 0)).await;
    world.cancel(asked.id, 2).await;
    let done = world.running(world.job("done", 0).idempotent("i", 1).tag("t").schedule("s")).await;
    world.complete(&done, 5).await;
    let retried = world.running(world.job("retried", 0)).await;
    world.retry_at(&retried, 10, 6).await;
    world.promote(11).await;
    let retried_done = world.claim_one(12).await;
    world.complete(&retried_done, 13).await;
    let failed = world.running(world.job("failed", 0).unique("free")).await;
    world.fail(&failed, 7).await;
    let again = world.running(world.job("again", 0)).await;
    world.fail(&again, 7).await;
    world.retry_by_person(again.id, 8).await;
    world.promote(9).await;
    let back = world.claim_one(9).await;
    world.hand_back(&back, 10).await;
    let back = world.claim_one(10).await;
    assert!(world.end(&back, cancelled(), 11).await);
    let retrying = world.running(world.job("retrying", 0)).await;
    world.retry_at(&retrying, 3_600_000, 6).await;
    let cancelled = world.submit(world.job("cancelled", 0).scheduled(later)).await;
    world.cancel(cancelled, 3).await;
    let (lost, _) = world.holding("lost", 1, 14).await;
    world.lose(&lost, 3_600_000, 15).await;
    let (busy, _) = world.holding("busy", 2, 16).await;
    world.send_update(world.worker_update(&busy, &[WorkerState::Busy], 17)).await;
    let ready = world.submit(world.job("ready", 18).unique("u").expires(later)).await;
    let other_lane = world.submit(world.job("other", 18)).await;
    world.submit(world.job("delayed", 18).scheduled(later)).await;
    let child = world.submit(world.job("child", 18).after(&[ready])).await;
    let keyed = fill_limits_and_deliveries(world, done.id).await;
    Cast {
        ready,
        other_lane,
        retrying: retrying.id,
        held: held.id,
        keyed_held: keyed_held.id,
        processing: processing.id,
        done: done.id,
        retried_done: retried_done.id,
        failed: failed.id,
        child,
        keyed,
        run: held.run,
    }
}

/// Rows of a keyed lane, webhooks and bulk actions, as their verbs leave them.
async fn fill_limits_and_deliveries(world: &World, done: JobId) -> JobId {
    let now = world.start.as_ms();
    let id = world.submit(world.job("keyed", 19).queue("limited").of("d")).await;
    let done = world.ledger.literal(done);
    let hook = |n: u128| literal(world, uuid::Uuid::from_u128(n));
    for sql in [
        format!(
            "INSERT INTO webhook (id, job, correlation, url, host, body, created_at, state, due_at, settled_at, attempts) VALUES
             ({}, {done}, 'c', 'http://x/', 'x', '{{}}', {now}, 0, {now}, NULL, 0),
             ({}, {done}, 'c', 'http://x/', 'x', '{{}}', {now}, 2, NULL, {now}, 1)",
            hook(1),
            hook(2)
        ),
        format!(
            "INSERT INTO webhook_attempt (webhook, number, at, took_ms, status) VALUES ({}, 1, {now}, 3, 200)",
            hook(2)
        ),
        format!(
            "INSERT INTO bulk (id, action, filter, actor, per_second, created_at, upto, matched, due_at) VALUES
             ({}, 'cancel', '{{}}', 'p', 10, {now}, {done}, 1, {now})",
            hook(3)
        ),
    ] {
        world.ledger.run(&sql).await;
    }
    id
}

async fn inspect(world: &World) -> Inspection {
    doctor::inspect(&world.url, Timestamp::now(), &|_, _, _| {}).await.unwrap()
}

fn codes(inspection: &Inspection) -> Vec<&'static str> {
    let mut codes: Vec<_> = inspection.findings.iter().map(|finding| finding.code).collect();
    codes.sort_unstable();
    codes
}

pub async fn finds(world: &World, expected: &[&str]) -> Inspection {
    let inspection = inspect(world).await;
    let mut expected = expected.to_vec();
    expected.sort_unstable();
    assert_eq!(codes(&inspection), expected, "{:#?}", inspection.findings);
    inspection
}

/// Damages a database: the fault is found; after the repair the database is healthy, no job is missing, and the audit log has
/// an entry.
pub async fn assert_repairs(world: &World, damage: &[String], expected: &[&str]) {
    let jobs = world.ledger.number("SELECT count(*) FROM job").await;
    for sql in damage {
        world.ledger.run(sql).await;
    }
    let inspection = finds(world, expected).await;
    assert!(inspection.findings.iter().all(|finding| finding.fixable), "{:#?}", inspection.findings);
    let sqlite = world.store.engine() == "sqlite";
    if sqlite {
        world.store.close().await;
    }
    let options = StoreOptions { migrate: false, ..StoreOptions::default() };
    let (repaired, after) =
        doctor::repair(&world.url, options, GRACE_PERIODS, Timestamp::now(), &|_, _, _| {}).await.unwrap();
    assert_eq!(codes(&after), Vec::<&str>::new(), "{:#?} after {repaired:?}", after.findings);
    finds(world, &[]).await;
    assert_eq!(world.ledger.number("SELECT count(*) FROM job").await, jobs, "no job was lost");
    for code in expected {
        let reported = world
            .ledger
            .number(&format!(
                "SELECT count(*) FROM audit WHERE action = 'doctor.fix' AND actor = 'cli' AND target = '{code}'"
            ))
            .await;
        // A fault that another repair has fixed has no entry of its own.
        assert!(
            reported > 0 || !repaired.iter().any(|done| done.code == *code),
            "{code} in the audit log: {repaired:?}"
        );
    }
    assert!(repaired.iter().any(|done| done.code == expected[0] && done.count > 0), "{repaired:?}");
}

/// Damages a database in a way that is only reported.
pub async fn is_told(world: &World, damage: &str, undo: &str, expected: &[&str]) {
    world.ledger.run(damage).await;
    let inspection = finds(world, expected).await;
    let first = inspection.findings.iter().find(|finding| finding.code == expected[0]).unwrap();
    assert!(!first.fixable, "{first:?}");
    world.ledger.run(undo).await;
    finds(world, &[]).await;
}

pub async fn a_healthy_database_with_rows_in_every_table_has_no_finding(world: &World) {
    finds(world, &[]).await;
    fill(world).await;
    let inspection = finds(world, &[]).await;
    assert_eq!(inspection.jobs, u64::try_from(world.ledger.number("SELECT count(*) FROM job").await).unwrap());
}

/// Submits, runs and ends jobs until it is stopped.
async fn work(world: &World, stop: &AtomicBool, ended: &AtomicUsize) {
    let mut last: Vec<JobId> = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let ms = Timestamp::now().ms_since(world.start);
        let mut jobs: Vec<NewJob> = (0..20).map(|n| world.job(["a", "b"][n % 2], ms)).collect();
        let parent = jobs[0].id;
        jobs[1] = world.job("c", ms).after(&[parent]);
        last = world.submit_all(jobs).await.into_iter().chain(last).take(40).collect();
        let lanes = world.store.lanes().await.unwrap();
        let own = lanes.into_iter().filter(|lane| ["a", "b", "c"].contains(&lane.kind.as_str())).map(|lane| lane.id);
        let claimed = world.claim_lanes(world.node, own.collect(), 15, ms).await;
        let mut ends = Vec::new();
        for (n, job) in claimed.iter().enumerate() {
            if n % 5 == 0 {
                world.begin(job, ms).await;
            }
            let outcome = match n % 4 {
                0 => world.retry(ms + 1),
                1 => failed("no"),
                2 => RunOutcome::HandedBack,
                _ => completed(),
            };
            ends.push(world.an_end(job, outcome, ms));
        }
        ended.fetch_add(ends.len(), Ordering::Relaxed);
        world.store.job_end(ends, world.at(ms)).await.unwrap();
        world.promote(ms).await;
        let _ = world.store.job_cancel(last[0], "not wanted", None, world.at(ms)).await;
    }
}

pub async fn a_busy_healthy_server_has_no_finding(world: &World) {
    fill(world).await;
    let (stop, ended) = (AtomicBool::new(false), AtomicUsize::new(0));
    let look = async {
        let mut looks = 0;
        while looks < 10 || ended.load(Ordering::Relaxed) < 600 {
            finds(world, &[]).await;
            looks += 1;
        }
        stop.store(true, Ordering::Relaxed);
    };
    tokio::join!(look, work(world, &stop, &ended), work(world, &stop, &ended));
    assert!(finds(world, &[]).await.jobs > 600);
}

pub async fn a_job_in_no_table_is_made_ready_again(world: &World) {
    let cast = fill(world).await;
    let ready = world.ledger.literal(cast.ready);
    assert_repairs(world, &[format!("DELETE FROM ready WHERE id = {ready}")], &["job-nowhere", "counter-drift"]).await;
    let world = world.reopen(StoreOptions::default()).await;
    assert_eq!(world.events(cast.ready).await, ["created", "queued", "recovered"]);
    assert!(world.claim(100, 60_000).await.iter().any(|job| job.id == cast.ready && job.start_first));
    world.store.close().await;
}

pub async fn a_job_in_no_table_keeps_its_retry_count(world: &World) {
    let cast = fill(world).await;
    let retrying = world.ledger.literal(cast.retrying);
    assert_repairs(world, &[format!("DELETE FROM waiting WHERE id = {retrying}")], &["job-nowhere", "counter-drift"])
        .await;
    assert_eq!(world.ledger.number(&format!("SELECT retry_count FROM ready WHERE id = {retrying}")).await, 1);
}

pub async fn a_job_ready_and_waiting_stays_ready(world: &World) {
    let cast = fill(world).await;
    let (_, no) = yes_no(world);
    let id = world.ledger.literal(cast.ready);
    let second = format!(
        "INSERT INTO waiting (lane, state, id, due_at, blocked, retry_count) SELECT lane, 0, id, 4000000000000, {no}, 0 FROM ready WHERE id = {id}"
    );
    assert_repairs(world, &[second], &["job-twice", "counter-drift"]).await;
    assert_eq!(world.ledger.number(&format!("SELECT count(*) FROM ready WHERE id = {id}")).await, 1);
}

pub async fn a_finished_job_that_is_also_ready_stays_finished(world: &World) {
    let cast = fill(world).await;
    let (_, no) = yes_no(world);
    let mut damage = Vec::new();
    for (table, id) in [("done", cast.done), ("ended", cast.failed)] {
        damage.push(format!(
            "INSERT INTO ready (lane, ready_at, id, retry_count, start_first) SELECT lane, 5, id, 0, {no} FROM {table} WHERE id = {}",
            world.ledger.literal(id)
        ));
    }
    assert_repairs(world, &damage, &["job-twice", "counter-drift"]).await;
    assert_eq!(
        world.ledger.number(&format!("SELECT count(*) FROM done WHERE id = {}", world.ledger.literal(cast.done))).await,
        1
    );
}

pub async fn a_job_in_flight_that_is_also_ready_is_not_claimed_twice(world: &World) {
    let cast = fill(world).await;
    let (_, no) = yes_no(world);
    let held = world.ledger.literal(cast.held);
    let second = format!(
        "INSERT INTO ready (lane, ready_at, id, retry_count, start_first) SELECT lane, 5, id, 0, {no} FROM job WHERE id = {held}"
    );
    assert_repairs(world, &[second], &["job-twice", "counter-drift"]).await;
}

pub async fn a_job_in_the_wrong_lane_is_moved(world: &World) {
    let cast = fill(world).await;
    let (ready, other) = (world.ledger.literal(cast.ready), world.ledger.literal(cast.other_lane));
    let moved = format!("UPDATE ready SET lane = (SELECT lane FROM job WHERE id = {other}) WHERE id = {ready}");
    assert_repairs(world, &[moved], &["wrong-lane", "counter-drift"]).await;
}

pub async fn rows_of_jobs_that_do_not_exist_are_removed(world: &World) {
    let cast = fill(world).await;
    let gone = literal(world, uuid::Uuid::from_u128(99));
    let damage = [
        format!("INSERT INTO job_log (id, run, log) VALUES ({gone}, NULL, '[1,\"message\"]')"),
        format!("INSERT INTO step (id, name, run, at, result) VALUES ({gone}, 'E1', 1, 1, '1')"),
        format!("INSERT INTO label (kind, value, id) VALUES (0, 'x', {gone})"),
        format!("INSERT INTO job_key (kind, key, id) VALUES (0, 'x', {gone})"),
        format!("INSERT INTO expiry (expires_at, id) VALUES (4000000000000, {gone})"),
        format!("INSERT INTO cancel_request (id, reason, at) VALUES ({gone}, 'x', 1)"),
        format!("INSERT INTO dependency (parent, child) VALUES ({}, {gone})", world.ledger.literal(cast.ready)),
        format!("INSERT INTO key_in_flight (key, id) VALUES (1, {gone})"),
        format!("INSERT INTO webhook_attempt (webhook, number, at, took_ms) VALUES ({gone}, 1, 1, 1)"),
    ];
    for sql in &damage {
        world.ledger.run(sql).await;
    }
    let found = finds(world, &["orphaned-rows"]).await.findings.remove(0);
    assert_eq!(found.count, 9, "{}", found.text);
    for table in [
        "job_log",
        "step",
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
    assert_repairs(world, &[], &["orphaned-rows"]).await;
}

pub async fn a_wrong_counter_is_counted_again(world: &World) {
    fill(world).await;
    let lane = "(SELECT id FROM lane WHERE type = 'ready')";
    let wrong = format!("UPDATE counter SET n = n + 3 WHERE tally = 1 AND lane = {lane}");
    world.ledger.run(&wrong).await;
    let found = finds(world, &["counter-drift"]).await.findings.remove(0);
    assert!(found.text.contains("default/ready queued: counter 4, rows 1"), "{}", found.text);
    assert_repairs(world, &[format!("DELETE FROM counter WHERE lane = {lane}")], &["counter-drift"]).await;
}

pub async fn a_claim_without_an_owner_is_released(world: &World) {
    let cast = fill(world).await;
    let nobody = literal(world, NodeId::new().0);
    assert_repairs(
        world,
        &[format!("UPDATE claim SET owner = {nobody} WHERE run = {}", cast.run)],
        &["claim-without-owner"],
    )
    .await;
    let held = world.ledger.literal(cast.held);
    assert_eq!(world.ledger.number(&format!("SELECT count(*) FROM ready WHERE id = {held}")).await, 1);
}

pub async fn the_claims_of_a_dead_server_are_released(world: &World) {
    let cast = fill(world).await;
    if world.store.engine() == "sqlite" {
        world.store.close().await;
    }
    assert_repairs(world, &["UPDATE node SET lease_until = 5".into()], &["node-dead"]).await;
    let processing = world.ledger.literal(cast.processing);
    assert_eq!(world.ledger.number(&format!("SELECT count(*) FROM waiting WHERE id = {processing}")).await, 1);
}

pub async fn an_unwatched_worker_gets_a_deadline(world: &World) {
    fill(world).await;
    let unwatched = "UPDATE worker SET node = NULL, deadline = NULL WHERE key = 'busy'";
    assert_repairs(world, &[unwatched.into()], &["worker-unwatched"]).await;
    assert_eq!(world.ledger.number("SELECT count(*) FROM worker WHERE key = 'busy' AND deadline > 0").await, 1);
}

pub async fn a_running_row_without_a_claim_is_removed(world: &World) {
    let cast = fill(world).await;
    let nobody = literal(world, NodeId::new().0);
    let mark = format!(
        "INSERT INTO running (id, lane, run, node, worker, retry_count, ready_at, started_at, updated_at)
         SELECT id, lane, 1, {nobody}, {nobody}, 0, 1, 1, 1 FROM ready WHERE id = {}",
        world.ledger.literal(cast.ready)
    );
    assert_repairs(world, &[mark], &["running-without-claim"]).await;
}

pub async fn a_blocked_job_without_parents_is_released(world: &World) {
    let cast = fill(world).await;
    let child = world.ledger.literal(cast.child);
    assert_repairs(world, &[format!("DELETE FROM dependency WHERE child = {child}")], &["blocked-without-parents"])
        .await;
    let world = world.reopen(StoreOptions::default()).await;
    world.promote(Timestamp::now().ms_since(world.start)).await;
    assert_eq!(world.state(cast.child).await, faena_domain::JobState::Queued);
    world.store.close().await;
}

pub async fn a_blocked_job_with_a_distant_check_is_checked_now(world: &World) {
    let cast = fill(world).await;
    let child = world.ledger.literal(cast.child);
    assert_repairs(
        world,
        &[format!("UPDATE waiting SET due_at = 9000000000000 WHERE id = {child}")],
        &["look-too-far"],
    )
    .await;
}

pub async fn run_numbers_in_use_are_skipped(world: &World) {
    fill(world).await;
    let (back, last) = if world.store.engine() == "sqlite" {
        ("UPDATE run_sequence SET last = 1", "SELECT last FROM run_sequence")
    } else {
        ("SELECT setval('faena.run', 1)", "SELECT last_value FROM faena.run")
    };
    assert_repairs(world, &[back.into()], &["run-behind"]).await;
    assert!(world.ledger.number(last).await > 5);
}

pub async fn a_missing_run_sequence_is_recreated(world: &World) {
    fill(world).await;
    if world.store.engine() == "sqlite" {
        assert_repairs(world, &["DELETE FROM run_sequence".into()], &["run-behind"]).await;
        assert!(world.ledger.number("SELECT last FROM run_sequence").await > 5);
    }
}

pub async fn an_illegal_setting_is_reported(world: &World) {
    let limit = Limit { concurrency: Some(3), rate: None };
    world.store.limit_set(Scope::Queue("q".into()), limit, "test", world.start).await.unwrap();
    world.ledger.run("UPDATE limit_rule SET concurrency = -5").await;
    let found = finds(world, &["rule-illegal"]).await;
    assert!(found.findings[0].text.contains("limit q: -5"), "{:#?}", found.findings);
    world.ledger.run("UPDATE limit_rule SET concurrency = 3").await;
}

pub async fn a_unique_key_of_a_finished_job_is_freed(world: &World) {
    let cast = fill(world).await;
    let done = world.ledger.literal(cast.done);
    assert_repairs(
        world,
        &[format!("INSERT INTO job_key (kind, key, id) VALUES (1, 'stuck', {done})")],
        &["unique-key-held"],
    )
    .await;
}

pub async fn a_ready_job_without_its_key_gets_it(world: &World) {
    let cast = fill(world).await;
    let keyed = world.ledger.literal(cast.keyed);
    assert_repairs(world, &[format!("UPDATE ready SET key = NULL WHERE id = {keyed}")], &["key-missing"]).await;
}

pub async fn a_key_with_ready_jobs_gets_its_key_queue(world: &World) {
    fill(world).await;
    assert_repairs(world, &["DELETE FROM key_queue".into()], &["key-queue-missing"]).await;
}

pub async fn a_closed_key_queue_that_nothing_opens_is_opened(world: &World) {
    fill(world).await;
    let (_, no) = yes_no(world);
    assert_repairs(world, &[format!("UPDATE key_queue SET open = {no}")], &["key-queue-closed"]).await;
}

pub async fn a_stale_row_of_a_key_in_flight_is_removed(world: &World) {
    let cast = fill(world).await;
    assert_repairs(
        world,
        &[format!(
            "INSERT INTO key_in_flight SELECT key, id FROM ready WHERE id = {}",
            world.ledger.literal(cast.keyed)
        )],
        &["key-in-flight-stale"],
    )
    .await;
}

pub async fn a_job_in_flight_counts_for_the_limit_of_its_key_again(world: &World) {
    let cast = fill(world).await;
    let held = world.ledger.literal(cast.keyed_held);
    let key = world.ledger.number(&format!("SELECT key FROM key_in_flight WHERE id = {held}")).await;
    world.ledger.run(&format!("DELETE FROM key_in_flight WHERE id = {held}")).await;
    finds(world, &["key-in-flight-missing"]).await;
    if world.store.engine() == "postgres" {
        assert_repairs(world, &[], &["key-in-flight-missing"]).await;
        assert_eq!(world.ledger.number(&format!("SELECT count(*) FROM key_in_flight WHERE id = {held}")).await, 1);
    } else {
        // SQLite: a repair opens the file, which releases every claim; so this is only reported.
        world.ledger.run(&format!("INSERT INTO key_in_flight (key, id) VALUES ({key}, {held})")).await;
    }
}

pub async fn a_webhook_and_a_bulk_action_without_a_due_time_get_one(world: &World) {
    fill(world).await;
    let damage = ["UPDATE webhook SET due_at = NULL".to_owned(), "UPDATE bulk SET due_at = NULL".to_owned()];
    assert_repairs(world, &damage, &["webhook-stuck", "bulk-stuck"]).await;
}

pub async fn outbox_rows_without_an_event_or_a_sink_are_removed(world: &World) {
    crate::outbox::sink(world, "s", &["job.*"], faena_store::OnRejected::Skip).await;
    fill(world).await;
    finds(world, &[]).await;
    let one = "(SELECT min(position) FROM event)";
    assert_repairs(world, &[format!("DELETE FROM event WHERE position = {one}")], &["outbox-without-event"]).await;
    let stray =
        "INSERT INTO outbox (sink, partition, position, subject) SELECT 99, partition, position, subject FROM outbox";
    assert_repairs(world, &[stray.into()], &["outbox-unknown-sink"]).await;
    let lease = "INSERT INTO outbox_lease (sink, partition) VALUES (99, 3)";
    assert_repairs(world, &[lease.into()], &["lease-unknown-sink"]).await;
    assert!(world.ledger.number("SELECT count(*) FROM outbox").await > 0, "the rest still waits");
}
