//! Sources and inboxes that are down are visible wherever an operator looks.

use std::path::Path;

use reqwest::StatusCode;
use serde_json::{Value, json};

use crate::{
    faena::{Faena, eventually, run},
    postgres::{Database, connect},
    shell::output_parts,
};

/// Writes a configuration with one source for the application's database, and one inbox for a broker that does not exist.
fn configure(folder: &Path, application: &Database) {
    let source = format!("[[outbox.source]]\nname = \"tickets\"\nurl = \"{}\"\nevery = \"100ms\"\n", application.url);
    let inbox = "[[inbox]]\nname = \"orders\"\nkind = \"nats\"\nurl = \"nats://127.0.0.1:1\"\nstream = \"S\"\nsubject = \"orders.>\"\njob_type = \"noop\"\n";
    std::fs::write(folder.join("faena.toml"), source + inbox).unwrap();
}

/// Returns the source or inbox `name` from the outbox overview.
fn find<'a>(overview: &'a Value, list: &str, name: &str) -> &'a Value {
    overview[list].as_array().unwrap().iter().find(|input| input["name"] == name).unwrap_or(&Value::Null)
}

async fn wait_until_down(faena: &Faena) -> Value {
    eventually("the source and the inbox are down", async || {
        let (_, overview) = faena.get("/api/v1/outbox").await;
        let is_down = |list, name| find(&overview, list, name)["state"] == "down";
        (is_down("sources", "tickets") && is_down("inboxes", "orders")).then_some(overview)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_and_an_inbox_that_are_down_are_reported_everywhere_on_postgres() {
    let (folder, application) = (tempfile::tempdir().unwrap(), Database::create().await);
    configure(folder.path(), &application);
    let faena = Faena::start(folder.path(), &[]).await;
    let overview = wait_until_down(&faena).await;
    let source = find(&overview, "sources", "tickets");
    let reason = source["downReason"].as_str().unwrap();
    assert!(reason.starts_with("table of the source: the table \"OutboxMessages\" does not exist"), "{source:#}");
    assert!(source["downSince"].is_string() && source["nodeName"].is_string(), "{source:#}");
    let inbox = find(&overview, "inboxes", "orders");
    assert!(inbox["downReason"].as_str().unwrap().starts_with("broker: "), "{inbox:#}");

    let (status, health) = faena.get("/health/ready").await;
    assert_eq!((status, &health["status"]), (StatusCode::OK, &json!("degraded")));
    let inputs = health["checks"]["inputs"].as_array().unwrap();
    let names: Vec<(&str, &str)> =
        inputs.iter().map(|input| (input["name"].as_str().unwrap(), input["status"].as_str().unwrap())).collect();
    assert_eq!(names, [("source:tickets", "degraded"), ("inbox:orders", "degraded")]);
    assert_eq!((&inputs[0]["downSince"], &inputs[0]["error"]), (&source["downSince"], &source["downReason"]));

    let server = [("FAENA_URL", faena.url.as_str())];
    let (code, stdout, stderr) = output_parts(&run(folder.path(), &server, &["outbox", "sources"]));
    assert_eq!(code, 0, "{stderr}");
    assert!(stdout.contains("tickets") && stdout.contains("orders") && stdout.contains("down"), "{stdout}");
    assert!(stdout.contains("does not exist"), "{stdout}");
    let (host, port) = faena.url.trim_start_matches("http://").rsplit_once(':').unwrap();
    let (_, stdout, stderr) = output_parts(&run(folder.path(), &[("HOST", host), ("PORT", port)], &["doctor"]));
    assert!(stdout.contains("warning  input-down  source:tickets of "), "{stdout}{stderr}");
    let metrics = async || faena.http.get(format!("{}/metrics", faena.url)).send().await.unwrap().text().await.unwrap();
    let text = metrics().await;
    assert!(text.contains("faena_source_up{source=\"tickets\"} 0\n"), "{text}");
    assert!(text.contains("faena_inbox_up{inbox=\"orders\"} 0\n"), "{text}");

    // The operator creates the tables, and the source recovers.
    let (_, init, _) = output_parts(&run(folder.path(), &[], &["outbox", "init-sql"]));
    connect(&application.url).await.batch_execute(&init).await.unwrap();
    eventually("the source is up", async || {
        let (_, overview) = faena.get("/api/v1/outbox").await;
        let source = find(&overview, "sources", "tickets");
        (source["state"] == "up" && source["downSince"].is_null() && source["pending"] == 0).then_some(())
    })
    .await;
    let text = metrics().await;
    for line in ["faena_source_up{source=\"tickets\"} 1", "faena_source_pending{source=\"tickets\"} 0"] {
        assert!(text.contains(line), "{line} is missing in {text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rejected_row_is_logged_once_per_attempt_on_postgres() {
    let (folder, application) = (tempfile::tempdir().unwrap(), Database::create().await);
    configure(folder.path(), &application);
    let client = connect(&application.url).await;
    let (_, init, _) = output_parts(&run(folder.path(), &[], &["outbox", "init-sql"]));
    client.batch_execute(&init).await.unwrap();
    let insert = "INSERT INTO \"OutboxMessages\" (\"Type\", \"PayloadJson\") VALUES ('faena.job', '{\"type\": 7}') RETURNING \"Id\"::text";
    let id: String = client.query_one(insert, &[]).await.unwrap().get(0);
    let faena = Faena::start(folder.path(), &[]).await;
    eventually("the row is rejected twice", async || {
        let row = client.query_one("SELECT \"Attempts\" FROM \"OutboxMessages\"", &[]).await.unwrap();
        (row.get::<_, i32>(0) >= 2).then_some(())
    })
    .await;
    let log = eventually("the second attempt is logged", async || {
        Some(faena.log()).filter(|log| log.contains("attempts=2 max_attempts=5"))
    })
    .await;
    let lines: Vec<&str> = log.lines().filter(|line| line.contains(&id)).collect();
    assert_eq!(lines.len(), 2, "{lines:#?}");
    for (line, attempt) in lines.iter().zip(["attempts=1 max_attempts=5", "attempts=2 max_attempts=5"]) {
        assert!(line.contains("WARN outbox row rejected source=\"tickets\"") && line.contains(attempt), "{line}");
    }
    let (_, overview) = faena.get("/api/v1/outbox").await;
    let source = find(&overview, "sources", "tickets");
    assert_eq!((&source["pending"], &source["processed"]["rejected"]), (&json!(1), &json!(2)), "{source:#}");
    assert!(source["oldestPendingAt"].is_string(), "{source:#}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_of_another_postgres_node_is_visible_through_every_node() {
    let (folder, other_folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (database, application) = (Database::create().await, Database::create().await);
    configure(folder.path(), &application);
    let environment = [("DATABASE_URL", database.url.as_str()), ("FAENA_NODE_LEASE", "1s")];
    let mut with_source = Faena::start(folder.path(), &environment).await;
    let other = Faena::start(other_folder.path(), &environment).await;
    let seen = wait_until_down(&other).await;
    let (_, own) = with_source.get("/api/v1/outbox").await;
    assert_eq!(find(&seen, "sources", "tickets")["nodeId"], find(&own, "sources", "tickets")["nodeId"]);
    let (_, health) = other.get("/health/ready").await;
    assert!(health["checks"]["inputs"].is_null(), "readiness is about the node itself: {health}");
    with_source.kill();
    eventually("a dead node shows nothing", async || {
        let (_, overview) = other.get("/api/v1/outbox").await;
        (overview["sources"] == json!([])).then_some(())
    })
    .await;
}
