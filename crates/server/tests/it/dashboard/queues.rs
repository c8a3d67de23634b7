//! The page of a queue.

use reqwest::StatusCode;
use serde_json::{Value, json};

use super::Browser;
use crate::shell::Shell;

#[tokio::test(flavor = "multi_thread")]
async fn the_page_of_a_queue_shows_what_is_in_it_and_changes_its_settings() {
    let shell = Shell::start(&[]).await;
    let mut ids = Vec::new();
    for (name, priority) in [("old", "NORMAL"), ("new", "NORMAL"), ("urgent", "CRITICAL")] {
        ids.push(shell.faena.submit(json!({"name": name, "queue": "sync", "priority": priority})).await);
    }
    let schedule = json!({"name": "nightly", "cronExpression": "0 2 * * *", "jobName": "noop", "queue": "sync"});
    let (_, schedule) = shell.faena.post("/api/v1/schedules", schedule).await;
    let limit = json!({"scope": "type", "name": "urgent", "concurrency": 4});
    shell.faena.http.patch(format!("{}/api/v1/limits", shell.faena.url)).json(&limit).send().await.unwrap();
    let mut browser = Browser::new(&shell.faena);
    let html = browser.text("/queues/sync").await;
    let at = |text: &str| html.find(text).unwrap_or_else(|| panic!("{text}: {html}"));
    let [old, new, urgent] = [0, 1, 2].map(|n| at(&format!("href=\"/jobs/{}\"", ids[n])));
    assert!(urgent < old && old < new, "by priority, then the oldest first");
    for shown in [
        "href=\"/jobs?queue=sync\"",
        "href=\"/dead-letters?queue=sync\"",
        "type urgent",
        "0 of 4",
        "No job is running.",
    ] {
        at(shown);
    }
    for path in [
        "/".to_owned(),
        "/queues".into(),
        format!("/jobs/{}", ids[0]),
        format!("/schedules/{}", schedule["id"].as_str().unwrap()),
    ] {
        assert!(browser.text(&path).await.contains("href=\"/queues/sync\""), "{path} links to the queue");
    }
    let settings = [
        ("name", "sync"),
        ("action", "save"),
        ("concurrency", "3"),
        ("rate", "100/1m"),
        ("fairness", "key"),
        ("strict", "true"),
    ];
    let answer = browser.submit("/queues", &settings).await;
    assert_eq!(answer.headers()["location"], "/queues/sync");
    let (_, queue) = shell.faena.get("/api/v1/queues/sync").await;
    assert_eq!((&queue["concurrency"], &queue["strict"], &queue["fairness"]), (&json!(3), &json!(true), &json!("key")));
    assert_eq!(queue["rate"]["periodMs"], 60_000, "{queue}");
    let html = browser.text("/queues/sync").await;
    assert!(html.contains("value=\"100/1m\"") && html.contains("0 of 3, 100 per minute"), "{html}");
    let answer = browser.submit("/queues", &[("name", "sync"), ("action", "save"), ("rate", "often")]).await;
    assert!(answer.status().is_redirection());
    assert!(browser.text("/queues/sync").await.contains("class=\"notice error\""));
    let reason = json!({"reason": "<i>repair</i>"});
    shell.faena.post("/api/v1/queues/sync/pause", reason).await;
    let html = browser.text("/queues/sync").await;
    assert!(html.contains("paused since") && html.contains(": &#60;i&#62;repair"), "{html}");
    assert_eq!(browser.get("/queues/no-such-queue").await.status(), StatusCode::NOT_FOUND);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_with_a_hostile_name_has_a_page_and_can_be_paused() {
    let shell = Shell::start(&[]).await;
    let mut browser = Browser::new(&shell.faena);
    for name in ["..", ".", "../../api", "a/b", "/", "ñ 日本", "<b>\"q\"</b>", "%2e%2e", "a?b#c&d=e", "new", "\\x", "+"]
    {
        let id = shell.faena.submit(json!({"name": "noop.wait", "queue": name})).await;
        let html = browser.text(&format!("/jobs/{id}")).await;
        let link = html.split("href=\"/queues").nth(2).unwrap().split('"').next().unwrap().replace("&#38;", "&");
        let html = browser.text(&format!("/queues{link}")).await;
        assert!(html.contains(&id) && !html.contains("<b>\"q"), "{name}: {html}");
        let answer = browser.submit("/queues", &[("name", name), ("action", "pause")]).await;
        let location = answer.headers()["location"].to_str().unwrap().to_owned();
        assert!(browser.text(&location).await.contains("value=\"resume\""), "{name}: {location}");
        let list = browser.text("/queues").await;
        assert!(list.contains(&format!("href=\"/queues{}\"", link.replace('&', "&#38;"))), "{name}: {list}");
    }
    let (_, list) = shell.faena.get("/api/v1/queues?limit=100").await;
    let paused = list["queues"].as_array().unwrap().iter().filter(|queue| queue["paused"] != Value::Null);
    assert_eq!(paused.count(), 12);
}
