//! Tests of actions on a group of dead letters in the dashboard.

use reqwest::StatusCode;
use serde_json::json;

use super::Browser;
use crate::{faena::eventually, shell::Shell};

#[tokio::test(flavor = "multi_thread")]
async fn a_group_of_dead_letters_is_deleted_after_a_dry_run() {
    let shell = Shell::start(&[]).await;
    for host in ["10.0.0.1", "10.0.0.1", "10.0.0.2"] {
        let payload = json!({"method": "GET", "url": format!("http://{host}/")});
        shell.faena.submit(json!({"name": "http.request", "payload": payload, "maxRetries": 0})).await;
    }
    let mut browser = Browser::new(&shell.faena);
    let total = async || shell.faena.get("/api/v1/dead-letter").await.1["total"].clone();
    // The page reads its list before the number in its navigation, so that number does not show what is in the list.
    eventually("three dead letters", async || (total().await == 3).then_some(())).await;
    let page = browser.text("/dead-letters").await;
    assert!(page.contains("<span class=\"n urgent\">3</span>"), "{page}");
    let links: Vec<String> = page
        .split("href=\"/dead-letters/bulk/delete")
        .skip(1)
        .map(|rest| rest.split('"').next().unwrap().replace("&#38;", "&"))
        .collect();
    assert_eq!(links.len(), 2, "two groups: {page}");
    let path = format!("/dead-letters/bulk/delete{}", links[0]);
    let question = browser.text(&path).await;
    assert!(question.contains("<h1>Delete: 2 dead letters</h1>") && question.contains("10.0.0.1"), "{question}");
    assert!(question.contains("Type: <b>http.request</b>, Error: <b>"), "the page says what is deleted: {question}");
    assert_eq!(total().await, 3, "nothing is deleted before it is confirmed");
    let answer = browser.submit(&path, &[]).await;
    assert_eq!(answer.headers()["location"], "/dead-letters");
    assert_eq!(total().await, 1, "the other group is still there");
    let page = browser.text("/dead-letters").await;
    assert!(page.contains("2 jobs changed") && page.contains("10.0.0.2") && !page.contains("10.0.0.1"), "{page}");

    // A dead letter is not running, so it cannot be cancelled. Without a filter nothing is deleted.
    assert_eq!(browser.get("/dead-letters/bulk/cancel").await.status(), StatusCode::NOT_FOUND);
    assert_eq!(browser.get("/dead-letters/bulk/delete").await.status(), StatusCode::BAD_REQUEST);
    browser.submit("/dead-letters/bulk/delete", &[]).await;
    assert_eq!(total().await, 1);
    browser.language = "es";
    assert!(
        browser.text(&format!("/dead-letters/bulk/delete{}", links[1])).await.contains("Eliminar: 1 trabajo fallido")
    );
}
