//! `/outbox`: sinks and their dead letters. The tests act as the relay and decide what the sink accepts.

use axum::http::StatusCode;
use faena_domain::{NodeId, Timestamp};
use faena_store::{EventSubscription, MAX_ATTEMPTS, OnRejected, OutboxResult, OutboxTakeRequest, SubscriptionMode};
use serde_json::{Value, json};

use crate::app::App;

async fn start() -> App {
    let app = App::start().await;
    let subscription = EventSubscription {
        name: "broker".into(),
        types: vec!["job.created".into()],
        mode: SubscriptionMode::Queue(OnRejected::Park),
        until: Timestamp::MAX,
    };
    app.engine.store.event_subscribe(vec![subscription], Timestamp::now()).await.unwrap();
    app
}

/// Relays waiting events; the sink rejects or accepts them.
async fn relay(app: &App, rejected: Option<&str>) -> usize {
    let (store, now) = (&app.engine.store, Timestamp::now());
    let request =
        OutboxTakeRequest { sink: "broker".into(), node: NodeId(uuid::Uuid::nil()), lease_ms: 60_000, limit: 100 };
    let taken = store.outbox_take(request, now).await.unwrap();
    let results = taken.events.iter().map(|event| OutboxResult {
        partition: event.partition,
        position: event.event.position,
        rejected: rejected.map(str::to_owned),
        retry_at: now,
    });
    store.outbox_settle("broker", taken.partitions.clone(), results.collect(), now).await.unwrap();
    taken.events.len()
}

/// Submits `count` jobs, whose `job.created` events the sink rejects until they are dead letters.
async fn app_with_dead_letters(count: usize) -> (App, Vec<Value>) {
    let app = start().await;
    for _ in 0..count {
        app.create(r#"{"name": "unhandled.type"}"#).await;
    }
    for _ in 0..MAX_ATTEMPTS {
        assert_eq!(relay(&app, Some("no such exchange")).await, count);
    }
    let dead_letters = app.get("/api/v1/outbox/dead-letter").await.json()["data"].as_array().unwrap().clone();
    assert_eq!(dead_letters.len(), count);
    (app, dead_letters)
}

fn path(dead_letter: &Value, rest: &str) -> String {
    format!("/api/v1/outbox/dead-letter/{}{rest}", dead_letter["id"].as_str().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn sinks_show_their_state_and_so_do_the_metrics() {
    let (app, _) = app_with_dead_letters(2).await;
    app.create(r#"{"name": "unhandled.type"}"#).await;
    assert_eq!(relay(&app, None).await, 1);
    app.create(r#"{"name": "unhandled.type"}"#).await;
    app.engine.store.outbox_down("broker", Some("connection refused".into()), Timestamp::now()).await.unwrap();
    let mut sink = app.get("/api/v1/outbox").await.json()["sinks"][0].clone();
    assert!(sink["oldestPendingAt"].is_string() && sink["downSince"].is_string(), "{sink}");
    for name in ["oldestPendingAt", "downSince"] {
        sink.as_object_mut().unwrap().remove(name);
    }
    assert_eq!(
        sink,
        json!({ "name": "broker", "types": ["job.created"], "onRejected": "park", "pending": 1, "dead": 2, "sent": 1,
                "downReason": "connection refused", "nodes": [{ "nodeId": "00000000-0000-0000-0000-000000000000", "partitions": 16 }] })
    );
    let metrics = app.get("/metrics").await.text;
    for line in [
        "outbox_queue_size 1\n",
        "dlq_size 2\n",
        r#"faena_outbox_pending{sink="broker"} 1"#,
        r#"faena_outbox_dead{sink="broker"} 2"#,
        r#"faena_outbox_sent_total{sink="broker"} 1"#,
        r#"faena_outbox_sink_up{sink="broker"} 0"#,
        r#"faena_outbox_oldest_seconds{sink="broker"} "#,
    ] {
        assert!(metrics.contains(line), "{line} is missing in {metrics}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_are_listed_in_pages_and_shown_one_by_one() {
    let (app, dead_letters) = app_with_dead_letters(3).await;
    let first = app.get("/api/v1/outbox/dead-letter?limit=2&sink=broker&type=job.*&resolved=false").await.json();
    assert_eq!(first["data"], json!(dead_letters[..2]));
    let next = first["nextCursor"].as_str().unwrap();
    let second = app.get(&format!("/api/v1/outbox/dead-letter?limit=2&cursor={next}")).await.json();
    assert_eq!((&second["data"], &second["nextCursor"]), (&json!(dead_letters[2..]), &Value::Null));
    let shown = app.get(&path(&dead_letters[0], "")).await.json();
    assert_eq!(shown, dead_letters[0]);
    assert_eq!(
        (&shown["eventType"], &shown["errorMessage"], &shown["retryCount"]),
        (&json!("job.created"), &json!("no such exchange"), &json!(MAX_ATTEMPTS))
    );
    assert_eq!(shown["payload"]["jobId"], shown["aggregateId"]);
    let by_aggregate = format!("/api/v1/outbox/dead-letter?aggregateId={}", shown["aggregateId"].as_str().unwrap());
    assert_eq!(app.get(&by_aggregate).await.json()["data"], json!([shown]));
    assert_eq!(app.get("/api/v1/outbox/dead-letter?movedAfter=2100-01-01T00:00:00Z").await.json()["data"], json!([]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_is_replayed_or_resolved_once() {
    let (app, dead_letters) = app_with_dead_letters(2).await;
    let replayed = app.post(&path(&dead_letters[0], "/replay"), "").await.json();
    assert_eq!((&replayed["resolutionNotes"], replayed["resolvedBy"].is_string()), (&json!("replayed"), true));
    assert_eq!(relay(&app, None).await, 1);
    let resolved = app.post(&path(&dead_letters[1], "/resolve"), r#"{"notes": "sent by hand"}"#).await.json();
    assert_eq!(resolved["resolutionNotes"], "sent by hand");
    for action in ["/replay", "/resolve"] {
        assert_eq!(app.post(&path(&dead_letters[1], action), "").await.status, StatusCode::CONFLICT);
    }
    let actions = app.get("/api/v1/audit").await.json();
    let actions: Vec<&Value> = actions["entries"].as_array().unwrap().iter().map(|entry| &entry["action"]).collect();
    assert_eq!(actions, ["outbox.resolve", "outbox.replay"]);
    let unknown = app.get("/api/v1/outbox/dead-letter/00000000-0000-0000-0000-000000000000").await;
    assert_eq!(unknown.status, StatusCode::NOT_FOUND);
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_are_replayed_and_resolved_by_a_filter() {
    let (app, _) = app_with_dead_letters(3).await;
    let nothing = app.post("/api/v1/outbox/dead-letter/replay", r#"{"filter": {"sink": "other"}}"#).await.json();
    assert_eq!(nothing, json!({ "replayed": 0 }));
    let all =
        app.post("/api/v1/outbox/dead-letter/replay", r#"{"filter": {"sink": "broker"}, "perSecond": 10000}"#).await;
    assert_eq!(all.json(), json!({ "replayed": 3 }));
    let (app, _) = app_with_dead_letters(2).await;
    let all = app.post("/api/v1/outbox/dead-letter/resolve", r#"{"all": true, "notes": "n"}"#).await;
    assert_eq!(all.json(), json!({ "resolved": 2 }));
}

#[tokio::test(flavor = "multi_thread")]
async fn sent_events_are_republished() {
    let app = start().await;
    app.create(r#"{"name": "unhandled.type"}"#).await;
    assert_eq!((relay(&app, None).await, relay(&app, None).await), (1, 0));
    let body =
        json!({ "sink": "broker", "from": "2020-01-01T00:00:00Z", "to": "2100-01-01T00:00:00Z", "type": "job.*" });
    let response = app.post("/api/v1/outbox/republish", body.to_string()).await;
    assert_eq!(response.json(), json!({ "republished": 1 }));
    assert_eq!(relay(&app, None).await, 1);
    let body = json!({ "sink": "unknown", "from": "2020-01-01T00:00:00Z", "to": "2100-01-01T00:00:00Z" });
    let response = app.post("/api/v1/outbox/republish", body.to_string()).await;
    assert_eq!(response.error_snapshot(), "404 NOT_FOUND: no sink \"unknown\"");
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_requests_are_rejected_with_every_error() {
    let app = start().await;
    let errors = async |path: &str, body: &str| {
        let response = if body.is_empty() {
            app.get(&format!("/api/v1/outbox/{path}")).await
        } else {
            app.post(&format!("/api/v1/outbox/{path}"), body.to_owned()).await
        };
        assert_eq!(response.status.as_u16() / 100, 4);
        response.error_snapshot().lines().skip(1).collect::<Vec<_>>().join("\n")
    };
    insta::assert_snapshot!(errors("dead-letter?limit=0&sink=a&movedAfter=x&resolved=maybe&cursor=1&aggregateId=2&other=3", "").await, @r"
    limit: must be a number from 1 to 100
    movedAfter: must be a time like 2026-11-15T20:00:00Z, a date, or milliseconds since 1970
    resolved: must be true or false
    cursor: must be the nextCursor of the previous page, or empty for the first page
    aggregateId: must be a UUID
    other: unknown parameter
    ");
    insta::assert_snapshot!(errors("dead-letter/replay", "{}").await, @r#"filter: matches every dead letter; set "all": true to confirm"#);
    insta::assert_snapshot!(errors("dead-letter/replay", r#"{"perSecond": 0, "filter": {"sink": 1, "x": "y"}, "z": 1}"#).await, @r"
    perSecond: must be between 1 and 100000, got 0
    z: unknown field
    filter.sink: must be a string
    filter.x: unknown parameter
    ");
    insta::assert_snapshot!(errors("republish", r#"{"from": "2026-01-02T00:00:00Z", "to": "2026-01-01T00:00:00Z"}"#).await, @r"
    sink: is required
    to: must be later than from
    ");
    insta::assert_snapshot!(errors("dead-letter/x", "").await, @"id: must be a UUID");
}
