//! Tests of editing jobs and of creating keys in the dashboard.

use reqwest::StatusCode;
use serde_json::json;

use super::{Browser, schedules::original};
use crate::shell::Shell;

#[tokio::test(flavor = "multi_thread")]
async fn a_job_is_edited_and_only_what_changed_is_sent() {
    let shell = Shell::start(&[]).await;
    let body = json!({
        "name": "Send <7>", "type": "invoice.send", "maxRetries": 7, "retryDelay": 5000, "timeoutMs": 90_000, "tags": ["a"],
        "scheduledAt": "2099-01-01T00:00:00Z", "payload": {"order": 7},
    });
    let id = shell.faena.submit(body).await;
    let mut browser = Browser::new(&shell.faena);
    let path = format!("/jobs/{id}/edit");
    let html = browser.text(&path).await;
    for shown in ["value=\"Send &#60;7&#62;\"", "value=\"90s\"", "value=\"7\"", "value=\"2099-01-01T00:00:00.000Z\""] {
        assert!(html.contains(shown), "{shown}: {html}");
    }
    let original = original(&html);
    // Another person changes the payload while the form is open.
    let changed = json!({"payload": {"order": 8}});
    let patch = reqwest::Client::new().patch(format!("{}/api/v1/jobs/{id}", shell.faena.url)).json(&changed);
    assert_eq!(patch.send().await.unwrap().status(), StatusCode::OK);
    let entries: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&original).unwrap();
    let mut fields: Vec<(&str, &str)> =
        entries.iter().map(|(name, text)| (name.as_str(), text.as_str().unwrap())).collect();
    fields.retain(|(name, _)| !["maxRetries", "scheduledAt"].contains(name));
    fields.extend([("original", original.as_str()), ("maxRetries", "2"), ("scheduledAt", "2098-01-01T00:00:00Z")]);
    let saved = browser.submit(&path, &fields).await;
    assert_eq!(saved.status(), StatusCode::SEE_OTHER);
    let (_, job) = shell.faena.get(&format!("/api/v1/jobs/{id}")).await;
    assert_eq!((&job["maxRetries"], &job["payload"]["order"], &job["tags"]), (&json!(2), &json!(8), &json!(["a"])));
    assert!(job["scheduledAt"].as_str().unwrap().starts_with("2098"), "{job}");

    let rejected = [("original", original.as_str()), ("name", "x"), ("maxRetries", "900"), ("timeoutMs", "soon")];
    let answer = browser.submit(&path, &rejected).await;
    assert_eq!(answer.status(), StatusCode::BAD_REQUEST);
    let html = answer.text().await.unwrap();
    for shown in ["value=\"900\"", "value=\"soon\"", "Time limit: must be a duration", "aria-invalid"] {
        assert!(html.contains(shown), "{shown}: {html}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_is_created_with_an_expiry() {
    let shell = Shell::start(&[]).await;
    let mut browser = Browser::new(&shell.faena);
    let fields = [("name", "ci"), ("scope", "read"), ("expiresAt", "yesterday")];
    let answer = browser.submit("/keys", &fields).await;
    assert_eq!(answer.status(), StatusCode::BAD_REQUEST);
    assert!(answer.text().await.unwrap().contains("expiresAt"));
    let fields = [("name", "ops"), ("scope", "admin"), ("expiresAt", "2099-01-01T00:00:00Z")];
    let answer = browser.submit("/keys", &fields).await;
    assert_eq!(answer.status(), StatusCode::OK, "the first key is shown although the viewer has none yet");
    let html = answer.text().await.unwrap();
    let key = html.split("id=\"new-key\">").nth(1).unwrap().split('<').next().unwrap();
    let client = reqwest::Client::new().get(format!("{}/api/v1/api-keys", shell.faena.url)).bearer_auth(key);
    let keys: serde_json::Value = client.send().await.unwrap().json().await.unwrap();
    assert!(keys["apiKeys"][0]["expiresAt"].as_str().unwrap().starts_with("2099-01-01"), "{keys}");
}
