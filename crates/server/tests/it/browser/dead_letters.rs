//! Tests of deleting a group of dead letters in a browser.

use serde_json::json;

use super::chrome::with_chrome;
use crate::shell::Shell;

#[tokio::test(flavor = "multi_thread")]
async fn a_person_deletes_a_group_of_dead_letters() {
    let shell = Shell::start(&[]).await;
    for host in ["10.0.0.1", "10.0.0.1", "10.0.0.2"] {
        let payload = json!({"method": "GET", "url": format!("http://{host}/")});
        let id = shell.faena.submit(json!({"name": "http.request", "payload": payload, "maxRetries": 0})).await;
        shell.faena.wait_for_state(&id, "FAILED").await;
    }
    with_chrome(&shell.faena.url, async |chrome| {
        chrome.set_width(360).await;
        chrome.open("/dead-letters").await;
        chrome.assert_fits("/dead-letters").await;
        chrome.follow(".groups tbody tr a.danger").await;
        assert_eq!(chrome.text("h1").await, "Delete: 2 dead letters");
        chrome.assert_fits("the question").await;
        chrome.follow("button.danger").await;
        assert!(chrome.text(".notice").await.contains("2 jobs changed"));
        assert_eq!(chrome.js("return document.querySelectorAll('.groups tbody tr').length").await, 1);
        chrome.assert_no_errors("dead letters").await;
    })
    .await;
}
