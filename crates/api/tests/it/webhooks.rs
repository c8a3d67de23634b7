//! `/webhooks`, and the addresses that are rejected before anything is sent.

use std::time::{Duration, Instant};

use axum::http::{Request, StatusCode};
use faena_domain::KeyScope;
use faena_engine::{EngineConfig, WebhookConfig};
use serde_json::{Value, json};

use crate::{
    access::key,
    app::{App, redacted},
};

/// A port on which no server listens.
const URL: &str = "http://127.0.0.1:9/hook";

async fn start() -> App {
    let webhooks = WebhookConfig { attempts: 1, ..WebhookConfig::default() };
    let allowed_networks = vec!["127.0.0.0/8".parse().unwrap()];
    App::start_with(EngineConfig { allowed_networks, webhooks, ..EngineConfig::default() }).await
}

/// Returns a job and its failed webhook.
async fn failed(app: &App) -> (String, Value) {
    let job = app.create(&json!({"name": "noop", "webhookUrl": URL, "correlationId": "order-7"}).to_string()).await;
    let began = Instant::now();
    loop {
        let found = app.get(&format!("/api/v1/webhooks?state=failed&jobId={job}")).await.json();
        if let Some(webhook) = found["webhooks"].get(0) {
            return (job, webhook.clone());
        }
        assert!(began.elapsed() < Duration::from_secs(60), "no failed webhook in time");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn path(webhook: &Value, rest: &str) -> String {
    format!("/api/v1/webhooks/{}{rest}", webhook["id"].as_str().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_webhook_is_shown_with_its_attempts_and_listed_without_them() {
    let app = start().await;
    let (_, webhook) = failed(&app).await;
    let mut shown = app.get(&path(&webhook, "")).await.json();
    shown["history"][0]["tookMs"] = json!(0);
    insta::assert_snapshot!(redacted(&shown), @r#"
    {
      "attempts": 1,
      "body": {
        "completedAt": "<time>",
        "jobId": "<id 1>",
        "jobType": "noop",
        "status": "completed"
      },
      "correlationId": "order-7",
      "createdAt": "<time>",
      "event": "job.status",
      "history": [
        {
          "at": "<time>",
          "error": "cannot connect: connection refused",
          "number": 1,
          "tookMs": 0
        }
      ],
      "id": "<id 2>",
      "jobId": "<id 1>",
      "settledAt": "<time>",
      "state": "FAILED",
      "url": "http://127.0.0.1:9/hook"
    }
    "#);
    let list = app.get("/api/v1/webhooks?host=127.0.0.1:9").await;
    insta::assert_snapshot!(list.snapshot(), @r#"
    200 OK
    {
      "limit": 20,
      "page": 1,
      "total": 1,
      "totalPages": 1,
      "webhooks": [
        {
          "attempts": 1,
          "correlationId": "order-7",
          "createdAt": "<time>",
          "event": "job.status",
          "id": "<id 1>",
          "jobId": "<id 2>",
          "settledAt": "<time>",
          "state": "FAILED",
          "url": "http://127.0.0.1:9/hook"
        }
      ]
    }
    "#);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_continues_from_a_cursor() {
    let app = start().await;
    let (first, _) = failed(&app).await;
    let (second, _) = failed(&app).await;
    let page = app.get("/api/v1/webhooks?limit=1&cursor=").await.json();
    assert_eq!(page["webhooks"][0]["jobId"], second);
    let rest = app.get(&format!("/api/v1/webhooks?limit=1&cursor={}", page["nextCursor"].as_str().unwrap())).await;
    assert_eq!(rest.json()["webhooks"][0]["jobId"], first);
    assert_eq!(app.get("/api/v1/webhooks?state=delivered").await.json()["webhooks"], json!([]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_webhook_is_redelivered() {
    let app = start().await;
    let (job, webhook) = failed(&app).await;
    let again = app.post(&path(&webhook, "/redeliver"), "").await;
    assert_eq!(again.status, StatusCode::OK, "{}", again.text);
    assert_eq!(again.json()["id"], webhook["id"]);
    let began = Instant::now();
    loop {
        let shown = app.get(&path(&webhook, "")).await.json();
        if shown["state"] == "FAILED" && shown["attempts"] == 2 {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "{shown:#}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let log = app.job(&job).await["executionLog"].clone();
    let failures = log.as_array().unwrap().iter().filter(|entry| entry["event"] == "webhook_failed").count();
    assert_eq!(failures, 2, "{log:#}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiting_webhook_is_not_redelivered() {
    let webhooks = WebhookConfig { base_delay: Duration::from_secs(600), ..WebhookConfig::default() };
    let allowed_networks = vec!["127.0.0.0/8".parse().unwrap()];
    let app = App::start_with(EngineConfig { allowed_networks, webhooks, ..EngineConfig::default() }).await;
    let job = app.create(&json!({"name": "noop", "webhookUrl": URL}).to_string()).await;
    let began = Instant::now();
    let webhook = loop {
        let found = app.get(&format!("/api/v1/webhooks?jobId={job}")).await.json()["webhooks"][0].clone();
        if found["attempts"] == 1 && found["state"] == "WAITING" {
            break found;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "{found:#}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    let rejected = app.post(&path(&webhook, "/redeliver"), "").await;
    insta::assert_snapshot!(rejected.error_snapshot(), @"409 CONFLICT: webhook <id 1> is WAITING and will be sent anyway");
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_webhooks_and_invalid_parameters_are_reported() {
    let app = App::start().await;
    let unknown = "/api/v1/webhooks/0199f000-0000-7000-8000-000000000000";
    for response in [app.get(unknown).await, app.post(&format!("{unknown}/redeliver"), "").await] {
        insta::allow_duplicates! {
            insta::assert_snapshot!(response.error_snapshot(), @"404 NOT_FOUND: no webhook <id 1>; a webhook is deleted together with its job or task");
        }
    }
    insta::assert_snapshot!(app.get("/api/v1/webhooks/nonsense").await.error_snapshot(), @"
    400 VALIDATION_ERROR: id: must be a UUID
    id: must be a UUID
    ");
    let query = "state=lost&jobId=7&limit=101&cursor=x&colour=red&host=%00";
    insta::assert_snapshot!(app.get(&format!("/api/v1/webhooks?{query}")).await.error_snapshot(), @"
    400 VALIDATION_ERROR: 6 fields are not valid
    state: must be one of WAITING, SENDING, DELIVERED, FAILED
    jobId: must be a UUID
    limit: must be a number from 1 to 100
    cursor: must be the nextCursor of the previous page, or empty for the first page
    colour: unknown parameter
    host: must not contain control characters
    ");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forbidden_webhook_address_is_rejected_with_its_field() {
    let app = App::start().await;
    let urls = [
        "https://user:s3cret@example.org/",
        "ftp://example.org/",
        "http://",
        "http://10.0.0.1/",
        "http://[::1]:8080/",
        "http://0x7f.1/",
        "http://169.254.169.254/latest/meta-data",
    ];
    let mut errors = Vec::new();
    for url in urls {
        let response = app.post("/api/v1/jobs", json!({"name": "noop", "webhookUrl": url}).to_string()).await;
        assert!(!response.text.contains("s3cret"), "{}", response.text);
        errors.push(response.error_snapshot().lines().next().unwrap().to_owned());
    }
    insta::assert_snapshot!(errors.join("\n"), @r#"
    400 VALIDATION_ERROR: webhookUrl: the URL must not contain a user name or password
    400 VALIDATION_ERROR: webhookUrl: must start with http:// or https://
    400 VALIDATION_ERROR: webhookUrl: is not a URL: empty host
    400 VALIDATION_ERROR: webhookUrl: "10.0.0.1" is a private or reserved address; allow its network with FAENA_WEBHOOK_ALLOW
    400 VALIDATION_ERROR: webhookUrl: "::1" is a private or reserved address; allow its network with FAENA_WEBHOOK_ALLOW
    400 VALIDATION_ERROR: webhookUrl: "127.0.0.1" is a private or reserved address; allow its network with FAENA_WEBHOOK_ALLOW
    400 VALIDATION_ERROR: webhookUrl: "169.254.169.254" is a private or reserved address; allow its network with FAENA_WEBHOOK_ALLOW
    "#);
    let batch = json!({"jobs": [{"name": "noop"}, {"name": "noop", "webhookUrl": "http://127.0.0.1/"}]});
    let response = app.post("/api/v1/jobs/batch", batch.to_string()).await;
    assert_eq!(response.json()["error"]["details"][0]["path"], "jobs[1].webhookUrl", "{}", response.text);
    assert_eq!(app.total().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_metrics_show_webhooks() {
    let app = start().await;
    failed(&app).await;
    let metrics = app.get("/metrics").await.text;
    for line in [
        r#"faena_webhooks_in_state{state="FAILED"} 1"#,
        r#"faena_webhooks_in_state{state="WAITING"} 0"#,
        r#"faena_webhook_attempts_total{outcome="failed"} 1"#,
        r#"faena_webhook_attempts_total{outcome="delivered"} 0"#,
    ] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restricted_key_reaches_webhooks_of_its_queues_only() {
    let app = start().await;
    // The job is in the queue `default`.
    let (job, webhook) = failed(&app).await;
    let mine = key(&app, &[KeyScope::Write], Some(&["default", "mail"])).await;
    let other = key(&app, &[KeyScope::Write], Some(&["mail"])).await;
    let reader = key(&app, &[KeyScope::Read], None).await;
    for (text, show, redeliver) in [(&mine, 200, 200), (&other, 404, 404), (&reader, 200, 403)] {
        for (method, rest, expected) in [("GET", "", show), ("POST", "/redeliver", redeliver)] {
            let request =
                Request::builder().method(method).uri(path(&webhook, rest)).header("x-api-key", text.reveal());
            let response = app.send(request.body("".into()).unwrap()).await;
            assert_eq!(response.status.as_u16(), expected, "{method}{rest}: {}", response.text);
            let tells_nothing = response.text.contains("no webhook") && !response.text.contains(&job);
            assert!(expected != 404 || tells_nothing, "{}", response.text);
        }
    }
}
