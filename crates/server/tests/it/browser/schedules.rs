//! Tests the form that edits a schedule, in a browser.

use super::chrome::{Chrome, with_chrome};
use crate::shell::Shell;
use serde_json::json;

#[tokio::test(flavor = "multi_thread")]
async fn a_person_edits_a_schedule_and_reads_its_explanation_while_typing() {
    let shell = Shell::start(&[]).await;
    let body = json!({"name": "nightly", "cronExpression": "30 2 * * *", "timezone": "UTC", "jobName": "noop", "queue": "reports"});
    let (_, created) = shell.faena.post("/api/v1/schedules", body).await;
    let id = created["id"].as_str().unwrap().to_owned();
    with_chrome(&shell.faena.url, async |chrome| {
        chrome.open("/schedules").await;
        chrome.follow("tbody tr a").await;
        chrome.follow("a[href$='/edit']").await;
        change_timing(chrome).await;
        chrome.fill("textarea[name=jobPayload]", "{\"all\": true}").await;
        chrome.js("document.querySelector('select[name=overlap]').value = 'skip'").await;
        chrome.follow("form button.primary").await;
        assert!(chrome.text(".notice").await.contains("saved"));
        assert!(chrome.text("#jobPayload").await.contains("\"all\": true"));
        chrome.assert_no_errors("the form").await;

        chrome.command("Emulation.setScriptExecutionDisabled", json!({"value": true})).await;
        chrome.open(&format!("/schedules/{id}/edit")).await;
        chrome.fill("input[name=queue]", "other").await;
        chrome.follow("form button.primary").await;
    })
    .await;
    let (_, schedule) = shell.faena.get(&format!("/api/v1/schedules/{id}")).await;
    let shown = ["timezone", "overlap", "queue", "jobPayload", "cronExpression"].map(|name| &schedule[name]);
    let expected = [json!("Europe/Madrid"), json!("skip"), json!("other"), json!({"all": true}), json!("30 2 * 3 *")];
    assert_eq!(shown, expected.each_ref());
}

async fn change_timing(chrome: &Chrome) {
    assert!(chrome.text("#explained").await.contains("At 02:30"));
    chrome.fill("input[name=timezone]", "Europe/Madrid").await;
    chrome.fill("input[name=cronExpression]", "30 2 * 3").await;
    chrome.until("document.querySelector('#explained .failed')").await;
    chrome.fill("input[name=cronExpression]", "30 2 * 3 *").await;
    chrome.until("document.querySelector('#explained').textContent.includes('Europe/Madrid')").await;
    let choose = "const gap = document.querySelector('select[name=dstGap]'); gap.value = 'skip'; gap.dispatchEvent(new Event('input', {bubbles: true}))";
    chrome.js(choose).await;
    chrome
        .until(
            "!document.querySelector('#explained .failed') && document.querySelectorAll('#explained li').length === 5",
        )
        .await;
    assert_eq!(chrome.js("return document.querySelector('select[name=dstGap]').value").await, "skip");
    chrome.js("document.querySelector('select[name=dstGap]').value = 'next'").await;
}
