//! Health checks and metrics of nodes with and without the API, and `faena health`.

use std::path::Path;

use reqwest::StatusCode;
use serde_json::{Value, json};

use crate::{
    faena::{Faena, eventually, run},
    postgres::Database,
    shell::output_parts,
};

/// Starts a node without the API. Its `url` is that of its health checks.
async fn start_without_api(folder: &Path, roles: &str, environment: &[(&str, &str)]) -> Faena {
    let roles = [("FAENA_SERVER_ROLES", roles), ("FAENA_HEALTH_PORT", "0")];
    let mut node = Faena::spawn(folder, &[&roles, environment].concat());
    node.url = node.announced("health").await;
    node
}

fn port(url: &str) -> &str {
    url.rsplit_once(':').unwrap().1
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_without_the_api_serves_health_and_metrics_on_its_own_port() {
    let folder = tempfile::tempdir().unwrap();
    let mut node = start_without_api(folder.path(), "engine,worker", &[]).await;
    assert_eq!(node.get("/health/live").await, (StatusCode::OK, json!({"status": "ok"})));
    for path in ["/health", "/health/ready"] {
        let (status, health) = node.get(path).await;
        assert_eq!((status, &health["status"]), (StatusCode::OK, &json!("healthy")), "{health:#}");
        let loops = health["checks"]["loops"].as_array().unwrap();
        assert!(loops.iter().any(|check| check["name"] == "scheduler"), "{health:#}");
    }
    let metrics = node.http.get(format!("{}/metrics", node.url)).send().await.unwrap().text().await.unwrap();
    assert!(metrics.contains("# TYPE jobs_in_state gauge"), "{metrics}");
    assert_eq!(node.get("/api/v1/jobs").await.0, StatusCode::NOT_FOUND, "the API is not served here");
    assert_eq!(node.post("/api/v1/jobs", json!({"name": "noop"})).await.0, StatusCode::NOT_FOUND);

    let url = node.url.clone();
    let environment = [("FAENA_SERVER_ROLES", "worker"), ("FAENA_HEALTH_PORT", port(&url))];
    let (code, stdout, stderr) = output_parts(&run(folder.path(), &environment, &["health"]));
    assert_eq!((code, stdout.as_str()), (0, "healthy\n"), "{stderr}");
    let (code, stdout, _) = output_parts(&run(folder.path(), &environment, &["health", "--json"]));
    let shown: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((code, &shown["status"]), (0, &json!("healthy")));
    let (code, stdout, _) = output_parts(&run(folder.path(), &[], &["health", "--live", "--url", &node.url]));
    assert_eq!((code, stdout.as_str()), (0, "alive\n"));
    node.kill();
    let (code, _, stderr) = output_parts(&run(folder.path(), &environment, &["health"]));
    assert!(code == 1 && stderr.contains("cannot reach"), "{stderr}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_postgres_node_without_workers_is_healthy_while_another_node_has_one() {
    let (folder, other_folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let database = Database::create().await;
    let environment = [("DATABASE_URL", database.url.as_str())];
    let engine = start_without_api(folder.path(), "engine", &environment).await;
    let (status, health) = engine.get("/health/ready").await;
    assert_eq!((status, &health["status"]), (StatusCode::OK, &json!("degraded")), "{health:#}");
    let health_port = [environment[0], ("FAENA_SERVER_ROLES", "engine"), ("FAENA_HEALTH_PORT", port(&engine.url))];
    let (code, stdout, _) = output_parts(&run(folder.path(), &health_port, &["health"]));
    assert!(code == 0 && stdout.starts_with("degraded\nworkers degraded: no node has"), "{stdout}");
    let _worker = start_without_api(other_folder.path(), "worker", &environment).await;
    eventually("the worker of the other node counts", async || {
        let (_, health) = engine.get("/health/ready").await;
        (health["status"] == "healthy" && health["checks"]["workers"]["activeCount"] == 1).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_on_the_second_port_need_a_key_and_health_checks_do_not() {
    let folder = tempfile::tempdir().unwrap();
    let public =
        [("FAENA_SERVER_ROLES", "engine,worker"), ("FAENA_HEALTH_HOST", "0.0.0.0"), ("FAENA_HEALTH_PORT", "0")];
    let (code, _, stderr) = output_parts(&run(folder.path(), &public, &["serve"]));
    assert!(code == 2 && stderr.contains("there are no API keys"), "{stderr}");
    let created = run(folder.path(), &[], &["keys", "create", "ops", "--scopes", "admin", "--offline", "--json"]);
    let created: Value = serde_json::from_slice(&created.stdout).unwrap();
    let mut node = start_without_api(folder.path(), "engine,worker", &public[1..]).await;
    node.url = node.url.replace("0.0.0.0", "127.0.0.1");
    assert_eq!(node.get("/health/ready").await.0, StatusCode::OK);
    let metrics = || node.http.get(format!("{}/metrics", node.url));
    assert_eq!(metrics().send().await.unwrap().status(), StatusCode::UNAUTHORIZED);
    let key = created["key"].as_str().unwrap();
    assert_eq!(metrics().bearer_auth(key).send().await.unwrap().status(), StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_with_the_api_can_have_the_second_port_too() {
    let folder = tempfile::tempdir().unwrap();
    let mut faena = Faena::spawn(folder.path(), &[("FAENA_HEALTH_MODE", "always"), ("FAENA_HEALTH_PORT", "0")]);
    faena.wait_until_listening().await;
    assert_eq!(faena.get("/health/live").await.0, StatusCode::OK);
    assert_eq!(faena.get("/api/v1/jobs").await.0, StatusCode::OK);
    let taken = faena.announced("health").await;
    faena.url = taken.clone();
    assert_eq!(faena.get("/health/ready").await.0, StatusCode::OK);
    assert_eq!(faena.get("/api/v1/jobs").await.0, StatusCode::NOT_FOUND);

    let other = tempfile::tempdir().unwrap();
    let environment = [("FAENA_SERVER_ROLES", "worker"), ("FAENA_HEALTH_PORT", port(&taken))];
    let (code, _, stderr) = output_parts(&run(other.path(), &environment, &["serve"]));
    assert!(code == 2 && stderr.contains("choose another port with FAENA_HEALTH_PORT"), "{stderr}");
    let never = [("FAENA_SERVER_ROLES", "worker"), ("FAENA_HEALTH_MODE", "never")];
    let (code, _, stderr) = output_parts(&run(other.path(), &never, &["health"]));
    assert!(code == 2 && stderr.contains("health.mode"), "{stderr}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sink_that_is_down_makes_its_node_degraded_and_not_unhealthy() {
    let folder = tempfile::tempdir().unwrap();
    let sink = "[[sink]]\nname = \"broker\"\nkind = \"nats\"\nurl = \"nats://127.0.0.1:1\"\nstream = \"S\"\n";
    std::fs::write(folder.path().join("faena.toml"), sink).unwrap();
    let faena = Faena::start(folder.path(), &[]).await;
    let (_, health) = faena.get("/health/ready").await;
    assert_eq!(health["checks"]["sinks"], json!([{"name": "sink:broker", "status": "healthy"}]), "{health:#}");
    faena.submit(json!({"name": "noop"})).await;
    let (status, health) = eventually("the sink is down", async || {
        let (status, health) = faena.get("/health/ready").await;
        (health["status"] == "degraded").then_some((status, health))
    })
    .await;
    assert_eq!(status, StatusCode::OK);
    let check = &health["checks"]["sinks"][0];
    assert!(check["status"] == "degraded" && check["downSince"].is_string() && check["error"].is_string(), "{check:#}");
    let environment = [("PORT", port(&faena.url))];
    let (_, stdout, stderr) = output_parts(&run(folder.path(), &environment, &["doctor"]));
    assert!(stdout.contains("warning  sink-down  sink:broker of "), "{stdout}{stderr}");
}
