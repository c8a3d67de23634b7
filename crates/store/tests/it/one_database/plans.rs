//! Query plans of the hot statements on PostgreSQL: they use their indexes with fresh, stale and missing statistics.

use faena_domain::{NodeId, Scope};
use faena_store::plan_probe;

use crate::{schedules, support::*};

/// Returns the plans of the statements of a claim, under the settings of a claim.
async fn claim_plans(fixture: &Fixture) -> Vec<String> {
    let client = fixture.database.client().await;
    let node = NodeId::new();
    let mut plans = Vec::new();
    for (sql, arguments) in [
        (plan_probe::CLAIM, format!("1, 0, 100, '{}', 0, 0", node.0)),
        (plan_probe::CLAIM_FOR_WORKER, format!("1, 0, 100, '{}', 0, 0, 1", node.0)),
        (plan_probe::CLAIM_FOR_MANY, format!("1, 0, '{{{0},{0}}}', '{{1,1}}', '{{1,1}}', 0, 0", node.0)),
        (plan_probe::HEADS, "1, 0, 100".to_owned()),
    ] {
        client.batch_execute(plan_probe::BEGIN_CLAIM).await.unwrap();
        client.batch_execute(&format!("PREPARE probe AS {sql}")).await.unwrap();
        for mode in ["force_custom_plan", "force_generic_plan"] {
            client.batch_execute(&format!("SET LOCAL plan_cache_mode = {mode}")).await.unwrap();
            let rows = client.query(&format!("EXPLAIN EXECUTE probe ({arguments})"), &[]).await.unwrap();
            plans.push(rows.iter().map(|row| row.get::<_, String>(0)).collect::<Vec<_>>().join("\n"));
        }
        client.batch_execute("ROLLBACK; DEALLOCATE probe").await.unwrap();
    }
    plans
}

async fn assert_claims_use_indexes(fixture: &Fixture, when: &str) {
    for plan in claim_plans(fixture).await {
        assert!(plan.contains("ready_pkey on ready"), "{when}:\n{plan}");
        // Jobs picked for many workers are sorted to distribute them; they are never more than requested.
        let may_sort = plan.contains("WindowAgg");
        for slow in ["Sort", "Seq Scan on ready", "Seq Scan on job", "Hash Join", "Merge Join", "Bitmap"] {
            assert!(may_sort && slow == "Sort" || !plan.contains(slow), "{slow} {when}:\n{plan}");
        }
    }
}

/// Returns the plans of the statements of a claim under limits.
async fn limited_plans(fixture: &Fixture) -> Vec<(&'static str, String)> {
    let client = fixture.database.client().await;
    let mut plans = Vec::new();
    let id = NodeId::new().0;
    for (name, sql, arguments) in [
        ("key queues", plan_probe::KEY_QUEUES, "1, 16".to_owned()),
        ("keys", plan_probe::KEYS, "'{1,1}', '{7,8}', 2".to_owned()),
        ("heads", plan_probe::KEY_QUEUE_HEADS, "'{1,1}', '{7,8}', '{4,4}'".to_owned()),
        ("take", plan_probe::TAKE, format!("'{{1}}', '{{1}}', '{{{id}}}', '{id}', 0, 0, NULL")),
        ("in flight", plan_probe::IN_FLIGHT, "'{0,1}', '{x,default}'".to_owned()),
    ] {
        client.batch_execute(plan_probe::BEGIN_CLAIM).await.unwrap();
        client.batch_execute(&format!("PREPARE probe AS {sql}")).await.unwrap();
        for mode in ["force_custom_plan", "force_generic_plan"] {
            client.batch_execute(&format!("SET LOCAL plan_cache_mode = {mode}")).await.unwrap();
            let rows = client.query(&format!("EXPLAIN EXECUTE probe ({arguments})"), &[]).await.unwrap();
            plans.push((name, rows.iter().map(|row| row.get::<_, String>(0)).collect::<Vec<_>>().join("\n")));
        }
        client.batch_execute("ROLLBACK; DEALLOCATE probe").await.unwrap();
    }
    plans
}

async fn assert_limited_claims_use_indexes(fixture: &Fixture, when: &str) {
    for (name, plan) in limited_plans(fixture).await {
        let index = match name {
            "key queues" => "key_queue_open on key_queue",
            "keys" | "heads" => "ready_key on ready",
            // By its primary key or by lane and id: each finds one row.
            "take" => " on ready r",
            _ => "counter_in_flight on counter",
        };
        assert!(plan.contains(index), "{name} {when}:\n{plan}");
        for slow in ["Seq Scan on", "Hash Join", "Merge Join", "Bitmap"] {
            assert!(!plan.contains(slow), "{slow} in {name} {when}:\n{plan}");
        }
    }
}

/// Returns how many pages a statement of a claim touches.
async fn pages_touched(fixture: &Fixture, sql: &str, arguments: &str) -> i64 {
    let client = fixture.database.client().await;
    client.batch_execute(plan_probe::BEGIN_CLAIM).await.unwrap();
    client.batch_execute(&format!("PREPARE probe AS {sql}")).await.unwrap();
    let explain = format!("EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) EXECUTE probe ({arguments})");
    let rows = fixture.database.rows(&explain).await;
    client.batch_execute("ROLLBACK; DEALLOCATE probe").await.unwrap();
    let plan: serde_json::Value = rows[0][0].parse().unwrap();
    let top = &plan[0]["Plan"];
    top["Shared Hit Blocks"].as_i64().unwrap() + top["Shared Read Blocks"].as_i64().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_behind_fifteen_thousand_blocked_jobs_touches_few_pages_on_postgres() {
    on_postgres(async |fixture: &Fixture| {
        assert_limited_claims_use_indexes(fixture, "on fresh tables").await;
        fixture.limit(Scope::Key("*".into()), Some(1), 0).await;
        fixture
            .database
            .run("ALTER TABLE ready SET (autovacuum_enabled = off); ALTER TABLE key_queue SET (autovacuum_enabled = off)")
            .await;
        // One key with very many jobs, and many keys with two each.
        for at in 0..10_i64 {
            let one = (0..1_000).map(|_| fixture.job("a", at).concurrency_key("busy"));
            let many = (0..1_000).map(|n| fixture.job("a", at).concurrency_key(&format!("k{}", (at * 1_000 + n) / 2)));
            fixture.submit_all(one.chain(many).collect()).await;
        }
        let first = fixture.claim(10_000, 20).await.len();
        assert_eq!(first + fixture.claim(10_000, 20).await.len(), 5_001, "one job per key; one claim returns a bounded number");
        assert_limited_claims_use_indexes(fixture, "after a burst without ANALYZE").await;
        let lane = fixture.lanes().await[0];
        assert!(fixture.claim_lanes(fixture.node, vec![lane], 10, 30).await.is_empty());
        let last = fixture.submit(fixture.job("a", 40).concurrency_key("last")).await;
        let key = fixture.database.number("SELECT key FROM key_queue WHERE open").await;
        let (lane_text, key_text) = (format!("'{{{lane}}}'"), format!("'{{{key}}}'"));
        let pages = [
            pages_touched(fixture, plan_probe::KEY_QUEUES, &format!("{lane}, 20")).await,
            pages_touched(fixture, plan_probe::KEYS, &format!("{lane_text}, {key_text}, 1")).await,
            pages_touched(fixture, plan_probe::KEY_QUEUE_HEADS, &format!("{lane_text}, {key_text}, '{{4}}'")).await,
        ];
        assert!(pages.iter().all(|pages| *pages < 100), "behind 15 000 blocked jobs a claim touches {pages:?} pages");
        assert_eq!(fixture.claim_lanes(fixture.node, vec![lane], 10, 50).await.remove(0).id, last);
        fixture.database.run("ANALYZE").await;
        assert_limited_claims_use_indexes(fixture, "with statistics").await;
    })
    .await;
}

/// Inserts many ready rows with their jobs, as a burst of submits leaves them.
const BURST: &str = "INSERT INTO job (id, lane, payload)
         SELECT ('018f0000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid, 1, '{}' FROM generate_series(1, 50000) AS n;
     INSERT INTO ready (lane, ready_at, id, retry_count, must_record_start) SELECT lane, 1000, id, 0, false FROM job;
     INSERT INTO counter (shard, lane, tally, n) VALUES (0, 1, 1, 50000)";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_uses_the_index_with_fresh_stale_or_missing_statistics_on_postgres() {
    on_postgres(async |fixture: &Fixture| {
        assert_claims_use_indexes(fixture, "on fresh tables").await;
        fixture.database.run("INSERT INTO lane (queue, type, priority) VALUES ('default', 'a', 2)").await;
        fixture
            .database
            .run("ALTER TABLE ready SET (autovacuum_enabled = off); ALTER TABLE job SET (autovacuum_enabled = off)")
            .await;
        fixture.database.run(BURST).await;
        assert_claims_use_indexes(fixture, "after a burst without ANALYZE").await;

        let (reader, connection) = tokio_postgres::connect(&fixture.url, tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        reader.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM faena.job").await.unwrap();
        for _ in 0..20 {
            assert_eq!(fixture.claim_lanes(fixture.node, vec![1], 1_000, 0).await.len(), 1_000);
        }
        assert_claims_use_indexes(fixture, "under a held snapshot").await;
        reader.batch_execute("COMMIT").await.unwrap();
        fixture.database.run("ANALYZE").await;
        assert_claims_use_indexes(fixture, "with statistics").await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn due_schedules_are_found_by_index_among_a_hundred_thousand_on_postgres() {
    on_postgres(async |fixture: &Fixture| {
        let client = fixture.database.client().await;
        schedules::create(fixture, schedules::every(60_000, "minutely")).await;
        let plans = async |when: &str| {
            for (sql, arguments) in
                [(plan_probe::due_schedules(), "(9999999999999, 1000)"), (plan_probe::NEXT_AT.into(), "")]
            {
                client.batch_execute(&format!("BEGIN; PREPARE probe AS {sql}")).await.unwrap();
                for mode in ["force_custom_plan", "force_generic_plan"] {
                    client.batch_execute(&format!("SET LOCAL plan_cache_mode = {mode}")).await.unwrap();
                    let rows = client.query(&format!("EXPLAIN EXECUTE probe {arguments}"), &[]).await.unwrap();
                    let plan = rows.iter().map(|row| row.get::<_, String>(0)).collect::<Vec<_>>().join("\n");
                    assert!(plan.contains("schedule_next on schedule"), "{when}:\n{plan}");
                    assert!(!plan.contains("Sort") && !plan.contains("Seq Scan"), "{when}:\n{plan}");
                }
                client.batch_execute("ROLLBACK; DEALLOCATE probe").await.unwrap();
            }
        };
        fixture
            .database
            .run(
                "ALTER TABLE schedule SET (autovacuum_enabled = off);
                 INSERT INTO schedule (id, name, spec, active, anchor_at, cursor_at, next_at, created_at, updated_at)
                 SELECT gen_random_uuid(), name, spec, active, anchor_at, cursor_at, next_at + n, created_at, updated_at
                 FROM schedule, generate_series(1, 100000) n",
            )
            .await;
        plans("without ANALYZE").await;
        client.batch_execute("ANALYZE schedule").await.unwrap();
        plans("after ANALYZE").await;
    })
    .await;
}

/// Inserts many tasks and answers.
const TASKS: &str = "INSERT INTO task (id, machine, version, status, state, correlation, entered_at, updated_at, approval, events, body)
         SELECT ('018f0000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid, 'm', 1, 'active', 's', 'c', 0, 0, false, 1, '{}'
         FROM generate_series(1, 50000) AS n;
     INSERT INTO task_inbox (task, event_id, answer) SELECT id, 'e', '{}' FROM task";

/// The statements of a batch of task events are planned once per connection, often while the tables are empty. That plan must still be good
/// when they have grown.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plan_for_task_events_that_was_made_on_empty_tables_uses_the_index_when_they_have_grown_on_postgres() {
    on_postgres(async |fixture: &Fixture| {
        let client = fixture.database.client().await;
        let columns = ["active", "s", "0", "0", "0", "f", "body", "1", "0", "1"].map(|value| format!("'{{{value}}}'"));
        let id = "018f0000-0000-7000-8000-000000000007";
        let statements = [
            ("lock_tasks", plan_probe::lock_tasks(), format!("'{{{id}}}'"), "task_pkey"),
            ("find_answers", plan_probe::FIND_ANSWERS.into(), format!("'{{{id}}}', '{{e}}'"), "task_inbox_pkey"),
            (
                "update_tasks",
                plan_probe::UPDATE_TASKS.into(),
                format!("'{{{id}}}', {}", columns.join(", ")),
                "task_pkey",
            ),
        ];
        for (name, sql, ..) in &statements {
            client.batch_execute(&format!("PREPARE {name} AS {sql}")).await.unwrap();
        }
        let plans = async |when: &str| {
            for (name, _, arguments, index) in &statements {
                client.batch_execute(plan_probe::BEGIN_TASKS).await.unwrap();
                let rows = client.query(&format!("EXPLAIN EXECUTE {name} ({arguments})"), &[]).await.unwrap();
                let plan = rows.iter().map(|row| row.get::<_, String>(0)).collect::<Vec<_>>().join("\n");
                client.batch_execute("ROLLBACK").await.unwrap();
                assert!(plan.contains(index) && plan.contains("Index Cond"), "{name} {when}:\n{plan}");
                for slow in ["Seq Scan on task", "Hash Join", "Merge Join"] {
                    assert!(!plan.contains(slow), "{slow} in {name} {when}:\n{plan}");
                }
            }
        };
        plans("on empty tables").await;
        fixture
            .database
            .run("ALTER TABLE task SET (autovacuum_enabled = off); ALTER TABLE task_inbox SET (autovacuum_enabled = off)")
            .await;
        plans("on empty tables, planned again").await;
        fixture.database.run(TASKS).await;
        plans("with the plan of the empty tables").await;
        fixture.database.run("ANALYZE task, task_inbox").await;
        plans("with statistics").await;
    })
    .await;
}
