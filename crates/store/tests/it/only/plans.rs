//! Plans of the busy statements on PostgreSQL, whatever the planner knows about their tables.

use faena_domain::{NodeId, Scope};
use faena_store::plan_probe;

use crate::{schedules, support::*};

/// The plans of the statements of a claim, under the settings of a claim.
async fn claim_plans(world: &World) -> Vec<String> {
    let client = world.ledger.client().await;
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

async fn claims_go_by_index(world: &World, when: &str) {
    for plan in claim_plans(world).await {
        assert!(plan.contains("ready_pkey on ready"), "{when}:\n{plan}");
        // Jobs picked for many workers are sorted to be shared out; they are never more than requested.
        let deals = plan.contains("WindowAgg");
        for slow in ["Sort", "Seq Scan on ready", "Seq Scan on job", "Hash Join", "Merge Join", "Bitmap"] {
            assert!(deals && slow == "Sort" || !plan.contains(slow), "{slow} {when}:\n{plan}");
        }
        for slow in ["Seq Scan on ready", "Seq Scan on job"] {
            assert!(!plan.contains(slow), "{slow} {when}:\n{plan}");
        }
    }
}

/// The plans of the statements of a claim under limits.
async fn limited_plans(world: &World) -> Vec<(&'static str, String)> {
    let client = world.ledger.client().await;
    let mut plans = Vec::new();
    let id = NodeId::new().0;
    for (name, sql, arguments) in [
        ("key queues", plan_probe::KEY_QUEUES, "1, 16".to_owned()),
        ("keys", plan_probe::KEYS, "'{1,1}', '{7,8}', 2".to_owned()),
        ("heads", plan_probe::KEY_QUEUE_HEADS, "'{1,1}', '{7,8}', '{4,4}'".to_owned()),
        ("take", plan_probe::TAKE, format!("'{{1}}', '{{1}}', '{{{id}}}', '{id}', 0, 0")),
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

async fn limited_claims_go_by_index(world: &World, when: &str) {
    for (name, plan) in limited_plans(world).await {
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
async fn pages_touched(world: &World, sql: &str, arguments: &str) -> i64 {
    let client = world.ledger.client().await;
    client.batch_execute(plan_probe::BEGIN_CLAIM).await.unwrap();
    client.batch_execute(&format!("PREPARE probe AS {sql}")).await.unwrap();
    let explain = format!("EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) EXECUTE probe ({arguments})");
    let rows = world.ledger.rows(&explain).await;
    client.batch_execute("ROLLBACK; DEALLOCATE probe").await.unwrap();
    let plan: serde_json::Value = rows[0][0].parse().unwrap();
    let top = &plan[0]["Plan"];
    top["Shared Hit Blocks"].as_i64().unwrap() + top["Shared Read Blocks"].as_i64().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_thousand_limited_jobs_in_front_cost_a_claim_nothing() {
    on_postgres(async |world: &World| {
        limited_claims_go_by_index(world, "on fresh tables").await;
        world.limit(Scope::Key("*".into()), Some(1), 0).await;
        world
            .ledger
            .run("ALTER TABLE ready SET (autovacuum_enabled = off); ALTER TABLE key_queue SET (autovacuum_enabled = off)")
            .await;
        // One key with very many jobs, and many keys with two each.
        for part in 0..10_i64 {
            let one = (0..1_000).map(|_| world.job("a", part).of("busy"));
            let many = (0..1_000).map(|n| world.job("a", part).of(&format!("k{}", (part * 1_000 + n) / 2)));
            world.submit_all(one.chain(many).collect()).await;
        }
        let first = world.claim(10_000, 20).await.len();
        assert_eq!(first + world.claim(10_000, 20).await.len(), 5_001, "one of each, in bounded claims");
        limited_claims_go_by_index(world, "after a burst without ANALYZE").await;
        let lane = world.lanes().await[0];
        assert!(world.claim_lanes(world.node, vec![lane], 10, 30).await.is_empty());
        let last = world.submit(world.job("a", 40).of("last")).await;
        let key = world.ledger.number("SELECT key FROM key_queue WHERE open").await;
        let (lane_text, key_text) = (format!("'{{{lane}}}'"), format!("'{{{key}}}'"));
        let pages = [
            pages_touched(world, plan_probe::KEY_QUEUES, &format!("{lane}, 20")).await,
            pages_touched(world, plan_probe::KEYS, &format!("{lane_text}, {key_text}, 1")).await,
            pages_touched(world, plan_probe::KEY_QUEUE_HEADS, &format!("{lane_text}, {key_text}, '{{4}}'")).await,
        ];
        assert!(pages.iter().all(|pages| *pages < 100), "behind 15 000 blocked jobs a claim touches {pages:?} pages");
        assert_eq!(world.claim_lanes(world.node, vec![lane], 10, 50).await.remove(0).id, last);
        world.ledger.run("ANALYZE").await;
        limited_claims_go_by_index(world, "with statistics").await;
    })
    .await;
}

/// Many ready rows at once, with their jobs, as a burst of submits leaves them.
const BURST: &str = "INSERT INTO job (id, lane, payload)
         SELECT ('018f0000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid, 1, '{}' FROM generate_series(1, 50000) AS n;
     INSERT INTO ready (lane, ready_at, id, retry_count, start_first) SELECT lane, 1000, id, 0, false FROM job;
     INSERT INTO counter (shard, lane, tally, n) VALUES (0, 1, 1, 50000)";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_uses_the_index_whatever_the_planner_knows() {
    on_postgres(async |world: &World| {
        claims_go_by_index(world, "on fresh tables").await;
        world.ledger.run("INSERT INTO lane (queue, type, priority) VALUES ('default', 'a', 2)").await;
        world
            .ledger
            .run("ALTER TABLE ready SET (autovacuum_enabled = off); ALTER TABLE job SET (autovacuum_enabled = off)")
            .await;
        world.ledger.run(BURST).await;
        claims_go_by_index(world, "after a burst without ANALYZE").await;

        let (reader, connection) = tokio_postgres::connect(&world.url, tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        reader.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM faena.job").await.unwrap();
        for _ in 0..20 {
            assert_eq!(world.claim_lanes(world.node, vec![1], 1_000, 0).await.len(), 1_000);
        }
        claims_go_by_index(world, "under a held snapshot").await;
        reader.batch_execute("COMMIT").await.unwrap();
        world.ledger.run("ANALYZE").await;
        claims_go_by_index(world, "with statistics").await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn due_schedules_are_found_by_index_among_a_hundred_thousand() {
    on_postgres(async |world: &World| {
        let client = world.ledger.client().await;
        schedules::make(world, schedules::every(60_000, "minutely")).await;
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
        world
            .ledger
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
