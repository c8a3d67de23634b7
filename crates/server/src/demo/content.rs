//! Creates the initial data of the demo: settings, schedules, a machine with tasks, and jobs that do not run.

use std::time::Duration;

use faena_domain::Timestamp;
use serde_json::{Value, json};

use super::api::Api;

const MACHINE: &str = include_str!("refund.yaml");
const MINUTE_MS: i64 = 60_000;

pub async fn create(api: &Api) -> anyhow::Result<()> {
    create_limits(api).await?;
    create_schedules(api).await?;
    create_waiting_jobs(api).await?;
    create_tasks(api).await
}

async fn create_limits(api: &Api) -> anyhow::Result<()> {
    for limit in [
        json!({"scope": "type", "name": "video.render", "concurrency": 1}),
        json!({"scope": "key", "name": "customer-*", "concurrency": 1}),
        json!({"scope": "queue", "name": "mail", "rate": "5/1s"}),
    ] {
        api.patch("/limits", limit).await?;
    }
    api.post("/queues/newsletter/pause", json!({"reason": "the new design is not approved yet"})).await?;
    Ok(())
}

async fn create_schedules(api: &Api) -> anyhow::Result<()> {
    for schedule in [
        json!({"name": "ping the warehouse", "intervalMs": 10_000, "jobType": "noop", "queue": "maintenance"}),
        json!({"name": "clean up carts", "intervalMs": 30_000, "jobType": "sleep", "jobPayload": {"ms": 700}, "queue": "maintenance"}),
        json!({
            "name": "nightly report", "cronExpression": "30 2 * * *", "timezone": "Europe/Madrid",
            "jobType": "report.nightly", "jobPayload": {"day": "{{due.date}}"}, "queue": "reports",
        }),
        json!({"name": "old import", "cronExpression": "@hourly", "jobType": "noop", "isActive": false}),
    ] {
        api.post("/schedules", schedule).await?;
    }
    Ok(())
}

/// Creates jobs that do not run: in a paused queue, of a type without a worker, scheduled for later, cancelled.
async fn create_waiting_jobs(api: &Api) -> anyhow::Result<()> {
    for n in 1..=3 {
        let job = json!({"type": "email.send", "queue": "newsletter", "payload": {"n": n}, "tags": ["newsletter"]});
        api.post("/jobs", job).await?;
    }
    api.post("/jobs", json!({"type": "fax.send", "name": "Fax of the contract", "queue": "mail"})).await?;
    let later = Timestamp::now().plus_ms(20 * MINUTE_MS).to_string();
    api.post("/jobs", json!({"type": "email.send", "name": "Reminder", "queue": "mail", "scheduledAt": later})).await?;
    let unwanted = api.post("/jobs", json!({"type": "fax.send", "queue": "mail"})).await?;
    api.post(&format!("/jobs/{}/cancel", text(&unwanted["id"])), json!({"reason": "nobody has a fax"})).await?;
    Ok(())
}

async fn create_tasks(api: &Api) -> anyhow::Result<()> {
    api.post("/machines", json!({"definition": MACHINE})).await?;
    let first = create_refund(api, 0).await?;
    for n in 1..=3 {
        create_refund(api, n).await?;
    }
    // Approves one refund, so that one task has ended.
    let path = format!("/tasks/{}", text(&first["id"]));
    while api.get(&path).await?["state"] == "CHECKING" {
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    api.post(&format!("{path}/approve"), json!({"comment": "the parcel never arrived"})).await?;
    Ok(())
}

pub async fn create_refund(api: &Api, n: u64) -> anyhow::Result<Value> {
    const CUSTOMERS: [&str; 4] = ["Ada", "Grace", "Edsger", "Barbara"];
    let customer = CUSTOMERS[usize::try_from(n).unwrap_or(0) % CUSTOMERS.len()];
    let amount = 20 + n * 13 % 90;
    let data = json!({"customer": customer, "amount": amount, "hook": *api.receiver.working});
    let title = format!("Refund {amount} € to {customer}");
    api.post("/tasks", json!({"machine": "refund", "title": title, "data": data, "tags": ["refund"]})).await
}

pub fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}
