//! Submits a few jobs per second until the demo stops.
//!
//! The load is bounded: no job is submitted while `MAX_UNFINISHED` jobs are unfinished, no refund is created while
//! `MAX_APPROVALS` tasks wait for a decision, and finished jobs are deleted after an hour.

use std::time::Duration;

use serde_json::{Value, json};

use super::{api::Api, content::create_refund};

const PERIOD: Duration = Duration::from_secs(1);
const MAX_UNFINISHED: u64 = 60;
const MAX_APPROVALS: usize = 4;
const UNFINISHED: &str = "/jobs?limit=1&status=PENDING,QUEUED,SCHEDULED,ASSIGNED,PROCESSING,RETRYING";

/// Submits jobs every second, and never returns. If the server is too busy to answer, tries again in the next second.
pub async fn run(api: &Api) -> anyhow::Result<()> {
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
    let mut n = 0;
    loop {
        ticks.tick().await;
        if let Err(error) = submit(api, n).await {
            tracing::warn!(error = format!("{error:#}"), "sample jobs not submitted");
            continue;
        }
        n += 1;
    }
}

async fn submit(api: &Api, n: u64) -> anyhow::Result<()> {
    if api.get(UNFINISHED).await?["total"].as_u64().unwrap_or(0) < MAX_UNFINISHED {
        api.post("/jobs/batch", json!({ "jobs": jobs(api, n) })).await?;
    }
    if n % 30 == 29 {
        let waiting = api.get("/tasks?approval=true").await?;
        if waiting["tasks"].as_array().is_some_and(|tasks| tasks.len() < MAX_APPROVALS) {
            create_refund(api, n).await?;
        }
    }
    Ok(())
}

/// Returns the jobs of second `n`.
fn jobs(api: &Api, n: u64) -> Vec<Value> {
    let mut jobs = vec![json!({
        "type": "email.send", "queue": "mail", "payload": {"n": n, "to": format!("customer-{}@demo.example", n % 4)},
        "concurrencyKey": format!("customer-{}", n % 4), "tags": ["order"], "maxRetries": 3,
    })];
    if n.is_multiple_of(2) {
        let receiver = if n % 20 == 8 { &api.receiver.broken } else { &api.receiver.working };
        let priority = if n.is_multiple_of(8) { "HIGH" } else { "NORMAL" };
        jobs.push(json!({
            "type": "payment.charge", "name": format!("Charge order {n}"), "queue": "payments", "priority": priority,
            "payload": {"n": n, "amount": 5 + n % 40}, "webhookUrl": **receiver, "maxRetries": 1, "retryDelay": 2_000,
            "uniqueKey": format!("order-{n}"),
        }));
    }
    if n % 30 == 1 {
        // The limit of the type lets one of them run; the other waits.
        let render =
            |n: u64| json!({"type": "video.render", "queue": "media", "payload": {"n": n}, "timeoutMs": 120_000});
        jobs.extend([render(n), render(n + 1)]);
    }
    if n % 15 == 2 {
        jobs.extend(report(n / 15 + 1));
    }
    jobs
}

/// Returns a small graph: two extracts, a conversion of both, and a publication that waits for the conversion.
fn report(n: u64) -> [Value; 4] {
    let correlation = format!("report-{n}");
    let job = |kind: &str, name: &str, parents: &[&str]| {
        json!({
            "type": kind, "ref": name, "dependsOn": parents, "queue": "reports", "payload": {"n": n},
            "correlationId": correlation, "tags": ["report"],
        })
    };
    [
        job("report.extract", "orders", &[]),
        job("report.extract", "customers", &[]),
        job("report.convert", "convert", &["orders", "customers"]),
        job("report.publish", "publish", &["convert"]),
    ]
}
