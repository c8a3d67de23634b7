//! What stays on a page while the server sends it again.

use serde_json::json;

use super::chrome::{Chrome, with_chrome};
use crate::shell::Shell;

#[tokio::test(flavor = "multi_thread")]
async fn results_entries_and_new_keys_stay_while_pages_are_updated() {
    let shell = Shell::start(&[]).await;
    shell.faena.submit(json!({"name": "first.job", "queue": "sync"})).await;
    with_chrome(&shell.faena.url, async |chrome| {
        chrome.open("/queues/sync").await;
        chrome.follow("button[value=pause]").await;
        assert!(chrome.text(".notice").await.contains("sync: paused"));
        chrome.fill("input[name=concurrency]", "7").await;
        chrome.js("document.querySelector('button[value=resume]').focus()").await;
        shell.faena.submit(json!({"name": "second.job", "queue": "sync"})).await;
        chrome.until("document.querySelector('main').textContent.includes('second.job')").await;
        assert_eq!(chrome.js("return document.activeElement.value").await, "resume", "the focus stays in the page");
        assert!(chrome.text(".notice").await.contains("sync: paused"), "the result of the action stays");
        assert_eq!(chrome.js("return document.querySelector('input[name=concurrency]').value").await, "7");
        chrome.js("document.querySelector('#navigation a[href=\\'/jobs\\']').focus()").await;
        shell.faena.submit(json!({"name": "third.job", "queue": "sync"})).await;
        chrome.until("document.querySelector('#navigation a[href=\\'/jobs\\']').textContent.includes('3')").await;
        assert_eq!(chrome.js("return document.activeElement.getAttribute('href')").await, "/jobs", "the focus stays");
        create_the_first_key(chrome).await;
        chrome.assert_no_errors("the keys").await;
    })
    .await;
}

/// Creates the first key, which the page keeps showing, and logs in with it.
async fn create_the_first_key(chrome: &Chrome) {
    chrome.open("/keys").await;
    chrome.fill("input[name=name]", "ops").await;
    chrome.click("input[value=admin]").await;
    chrome.follow("form button.primary").await;
    let key = chrome.text("#new-key").await;
    assert!(key.starts_with("fna_"), "{key}");
    assert_eq!(chrome.js("return document.documentElement.dataset.live || 'still'").await, "still");
    chrome.follow("a[href*='/login']").await;
    chrome.fill("input[name=key]", &key).await;
    chrome.follow("form button.primary").await;
    assert!(chrome.text("tbody").await.contains("ops"));
}
