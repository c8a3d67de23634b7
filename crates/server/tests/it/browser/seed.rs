//! Starts a server with data for every page of the dashboard.

use serde_json::{Value, json};

use crate::{
    dashboard::PAGES,
    faena::{Faena, eventually},
    shell::Shell,
};

/// Pages that need no id, besides those of [`PAGES`].
const MORE_PAGES: [&str; 3] = ["/jobs?q=type:invoice.send+state:failed", "/trace?id=order-7", "/login"];

/// Id of a task that waits for approval, and the paths of all pages.
pub struct Seed {
    pub task: String,
    pub pages: Vec<String>,
}

/// Starts a server with data for every page.
pub async fn seeded() -> (Shell, Seed) {
    let shell = Shell::start(&[("FAENA_WEBHOOK_ALLOW", "127.0.0.0/8")]).await;
    let seed = seed(&shell.faena).await;
    (shell, seed)
}

/// Creates jobs in most states, with runs, steps, a log, dependencies and webhooks, and also a schedule, a limit, a
/// worker, and a task that waits for approval.
async fn seed(faena: &Faena) -> Seed {
    let (worker, failed) = run_jobs(faena).await;
    let parent = faena.submit(json!({"name": "extract", "queue": "etl", "scheduledAt": "2099-01-01T00:00:00Z"})).await;
    let child = faena.submit(json!({"name": "load", "queue": "etl", "dependsOn": [parent]})).await;
    let cancelled = faena.submit(json!({"name": "export", "queue": "etl"})).await;
    faena.post(&format!("/api/v1/jobs/{cancelled}/cancel"), json!({})).await;
    faena.post("/api/v1/queues/etl/pause", json!({})).await;
    for priority in ["LOW", "NORMAL", "HIGH", "CRITICAL"] {
        faena
            .submit(json!({"name": "sync.customer", "queue": "sync", "priority": priority, "tags": ["eu", "crm"]}))
            .await;
    }
    let limit = json!({"scope": "type", "name": "report.build", "concurrency": 1});
    let answer = faena.http.patch(format!("{}/api/v1/limits", faena.url)).json(&limit).send().await.unwrap();
    assert!(answer.status().is_success(), "{}", answer.text().await.unwrap());
    let schedule = json!({"name": "nightly-report", "cronExpression": "30 2 * * *", "timezone": "Europe/Madrid", "jobName": "noop"});
    let (_, schedule) = faena.post("/api/v1/schedules", schedule).await;
    let schedule = schedule["id"].as_str().unwrap().to_owned();
    faena.post(&format!("/api/v1/schedules/{schedule}/trigger"), json!({})).await;
    let task = task(faena, "Add retry to the exporter", "1. Wrap the upload in a retry.\n2. Test it.").await;
    let webhook = eventually("a webhook", async || {
        let (_, list) = faena.get("/api/v1/webhooks").await;
        list["webhooks"][0]["id"].as_str().map(str::to_owned)
    })
    .await;
    let mut pages: Vec<String> = PAGES.iter().chain(&MORE_PAGES).map(ToString::to_string).collect();
    pages.extend([
        format!("/jobs/{failed}"),
        format!("/jobs/{child}"),
        format!("/jobs/{child}/edit"),
        format!("/jobs/{cancelled}"),
        format!("/schedules/{schedule}"),
        format!("/schedules/{schedule}/edit"),
        "/queues/billing".to_owned(),
        "/queues/sync".to_owned(),
        format!("/tasks/{task}"),
        format!("/workers/{worker}"),
        format!("/webhooks/{webhook}"),
    ]);
    Seed { task, pages }
}

/// Lets a worker complete a job, fail another after one step, and work on a third. Returns the worker and the failed
/// job.
async fn run_jobs(faena: &Faena) -> (String, String) {
    for number in 0..3 {
        let body = json!({
            "name": "invoice.send", "queue": "billing", "maxRetries": 0, "correlationId": "order-7", "tags": ["invoice"],
            "payload": {"orderId": number}, "webhookUrl": "http://127.0.0.1:9/hook",
        });
        faena.submit(body).await;
    }
    let body = json!({"name": "billing-2", "capabilities": ["invoice.send"], "queues": ["billing"], "concurrency": 3});
    let (_, worker) = faena.post("/api/v1/workers/register", body).await;
    let worker = worker["workerId"].as_str().unwrap().to_owned();
    let (_, claimed) = faena.post(&format!("/api/v1/workers/{worker}/claim"), json!({"max": 3, "waitMs": 5000})).await;
    let jobs = claimed["jobs"].as_array().unwrap();
    assert_eq!(jobs.len(), 3, "{claimed}");
    let report = async |job: &Value, what: &str, mut body: Value| {
        body["run"] = job["run"].clone();
        let path = format!("/api/v1/workers/{worker}/jobs/{}/{what}", job["id"].as_str().unwrap());
        let (status, answer) = faena.post(&path, body).await;
        assert!(status.is_success(), "{path}: {answer}");
    };
    for job in jobs {
        report(job, "started", json!({})).await;
    }
    report(&jobs[0], "complete", json!({"result": {"sent": true}})).await;
    report(&jobs[1], "step", json!({"name": "load order", "result": {"lines": 3}, "totalSteps": 3})).await;
    report(&jobs[1], "log", json!({"message": "charging the card"})).await;
    report(&jobs[1], "fail", json!({"error": "503 Service Unavailable"})).await;
    report(&jobs[2], "progress", json!({"progress": {"percentage": 62, "message": "page 31 of 50"}})).await;
    let failed = jobs[1]["id"].as_str().unwrap().to_owned();
    (worker, failed)
}

/// Creates a task that waits for the approval of a plan.
pub async fn task(faena: &Faena, title: &str, plan: &str) -> String {
    let data = json!({"prompt": "x", "repositorioOrigen": "/tmp/r", "reglas": {"requiereAprobacionPlan": true}});
    let (_, task) = faena.post("/api/v1/tasks", json!({"machine": "coding-task", "data": data, "title": title})).await;
    let id = task["id"].as_str().unwrap().to_owned();
    let event = json!({"type": "resultado.plan_generado", "payload": {"planId": "p", "plan": plan}});
    let (status, answer) = faena.post(&format!("/api/v1/tasks/{id}/events"), event).await;
    assert!(status.is_success(), "{answer}");
    id
}
