//! Limits of running tasks over REST: queued tasks, why they wait, and changes by an operator.

use serde_json::{Value, json};

use crate::app::App;

const BATCH: &str = "
machine: batch
version: 1
limits: {running: 1}
events: {finish: {}}
initial: WORK
states:
  WORK: {forever: true, on: {finish: DONE}}
  DONE: {final: true}
";

async fn start() -> App {
    let app = App::start().await;
    app.post("/api/v1/machines", json!({ "definition": BATCH }).to_string()).await;
    app
}

async fn create(app: &App) -> Value {
    app.post("/api/v1/tasks", json!({"machine": "batch"}).to_string()).await.json()
}

async fn wait_for_status(app: &App, id: &Value, status: &str) -> Value {
    let began = std::time::Instant::now();
    loop {
        let task = app.get(&format!("/api/v1/tasks/{}", id.as_str().unwrap())).await.json();
        if task["status"] == status {
            return task;
        }
        assert!(began.elapsed() < std::time::Duration::from_secs(60), "never {status}: {task}");
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queued_task_says_why_it_waits_and_starts_when_another_ends() {
    let app = start().await;
    let (first, second, third) = (create(&app).await, create(&app).await, create(&app).await);
    let shown = |task: &Value| (task["status"].clone(), task["state"].clone());
    assert_eq!(shown(&first), (json!("running"), json!("WORK")));
    assert_eq!(shown(&third), (json!("queued"), json!("")));
    let path = |task: &Value, rest: &str| format!("/api/v1/tasks/{}{rest}", task["id"].as_str().unwrap());
    let why = app.get(&path(&third, "/why")).await.json();
    let expected = "it is queued: 1 of at most 1 tasks of batch run, and 1 start before it; raise the limit with \
                    \"faena limits set --machine batch --concurrency N\"";
    assert_eq!((&why["reasons"][0]["code"], &why["summary"]), (&json!("queued"), &json!(expected)));
    let queued = app.get("/api/v1/tasks?status=queued").await.json();
    assert_eq!(queued["tasks"].as_array().unwrap().len(), 2);
    let sent = app.post(&path(&second, "/events"), json!({"type": "finish"}).to_string()).await.json();
    assert_eq!((&sent["outcome"], &sent["reason"]), (&json!("deferred"), &json!("the task is queued")));
    app.post(&path(&first, "/events"), json!({"type": "finish"}).to_string()).await;
    wait_for_status(&app, &second["id"], "completed").await;
    wait_for_status(&app, &third["id"], "running").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_raises_and_resets_the_limit_of_a_machine() {
    let app = start().await;
    create(&app).await;
    let waiting = create(&app).await;
    let limit = |list: Value| {
        let limit = list["limits"][0].clone();
        ["scope", "name", "concurrency", "inFlight", "origin"].map(|field| limit[field].clone())
    };
    let of_machine = limit(app.get("/api/v1/limits").await.json());
    assert_eq!(of_machine, [json!("machine"), json!("batch"), json!(1), json!(1), json!("machine")]);
    let set = app.call("PATCH", "/api/v1/limits", r#"{"scope": "machine", "name": "batch", "concurrency": 2}"#).await;
    assert_eq!(limit(set.json())[2], json!(2), "{}", set.text);
    wait_for_status(&app, &waiting["id"], "running").await;
    let reset = app.post("/api/v1/limits/reset", r#"{"scope": "machine", "name": "batch"}"#).await;
    let of_machine = limit(reset.json());
    assert_eq!(of_machine, [json!("machine"), json!("batch"), json!(1), json!(2), json!("machine")], "none is stopped");
    assert_eq!(create(&app).await["status"], "queued");
}
