//! Tests the page of a queue in a browser, also for names that a browser could misread.

use serde_json::json;

use super::chrome::{Chrome, with_chrome};
use crate::shell::Shell;

#[tokio::test(flavor = "multi_thread")]
async fn a_person_opens_and_pauses_queues_with_hostile_names() {
    let shell = Shell::start(&[]).await;
    let names = ["..", ".", "../jobs", "a/b", "<img src=x onerror=alert(1)>", "ñ 日本", "%2e%2e", "\\x?y#z"];
    for name in names {
        shell.faena.submit(json!({"name": "noop.wait", "queue": name})).await;
    }
    with_chrome(&shell.faena.url, async |chrome| {
        for name in names {
            chrome.open("/queues").await;
            let mark = "const link = [...document.querySelectorAll('td.main a')].find((link) => link.textContent === arguments[0]);
                 link.id = 'wanted'";
            chrome.js_with(mark, json!([name])).await;
            chrome.follow("#wanted").await;
            assert_eq!(chrome.text("h1").await, name);
            assert!(chrome.text("#ready").await.contains("noop.wait"), "{name}");
            chrome.follow("button[value=pause]").await;
            assert_eq!(chrome.text("h1").await, name, "the same page");
            assert!(chrome.text("main .st").await.contains("paused"), "{name}");
            chrome.fill("input[name=rate]", "7/1s").await;
            chrome.follow("button[value=save]").await;
            assert!(chrome.text("#limits").await.contains("7 per second"), "{name}");
            chrome.until("document.documentElement.classList.contains('is-live')").await;
        }
        chrome.assert_no_errors("the queues").await;
        keep_what_is_typed(chrome, &shell).await;
    })
    .await;
}

/// Checks that typed settings stay while the page is updated.
async fn keep_what_is_typed(chrome: &Chrome, shell: &Shell) {
    shell.faena.submit(json!({"name": "noop.wait", "queue": "mail"})).await;
    chrome.open("/queues/mail").await;
    chrome.fill("input[name=concurrency]", "5").await;
    chrome.click("input[name=strict]").await;
    shell.faena.submit(json!({"name": "noop.wait", "queue": "mail"})).await;
    chrome.until("document.querySelector('.kpis .v').textContent === '2'").await;
    chrome.follow("button[value=save]").await;
    let (_, queue) = shell.faena.get("/api/v1/queues/mail").await;
    assert_eq!((&queue["concurrency"], &queue["strict"]), (&json!(5), &json!(true)), "{queue}");
}
