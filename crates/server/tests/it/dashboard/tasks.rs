//! Tests of the list of tasks in the dashboard.

use serde_json::json;

use super::Browser;
use crate::shell::Shell;

#[tokio::test(flavor = "multi_thread")]
async fn tasks_are_filtered_by_status_and_machine() {
    let shell = Shell::start(&[]).await;
    let data = json!({"prompt": "p", "repositorioOrigen": "r", "reglas": {"requiereAprobacionPlan": true}});
    let mut ids = Vec::new();
    for title in ["first", "second", "third"] {
        let body = json!({"machine": "coding-task", "title": title, "data": data});
        let (_, created) = shell.faena.post("/api/v1/tasks", body).await;
        ids.push(created["id"].as_str().unwrap().to_owned());
    }
    shell.faena.post(&format!("/api/v1/tasks/{}/cancel", ids[0]), json!({})).await;
    let mut browser = Browser::new(&shell.faena);
    let all = browser.text("/tasks").await;
    for shown in ["Running 2", "Cancelled 1", "href=\"/tasks?status=cancelled\"", "first", "second"] {
        assert!(all.contains(shown), "{shown}: {all}");
    }
    assert!(!all.contains("status=paused"), "a status without tasks is left out: {all}");
    let cancelled = browser.text("/tasks?status=cancelled&machine=coding-task").await;
    assert!(cancelled.contains("first") && !cancelled.contains("second"), "{cancelled}");
    assert!(cancelled.contains("<code>Machine: coding-task</code>"), "{cancelled}");
    assert!(cancelled.contains("href=\"/tasks?machine=coding-task\""), "the chip removes its filter: {cancelled}");
    assert!(cancelled.contains("href=\"/tasks?status=cancelled\""), "the other filters can be cleared: {cancelled}");
    browser.language = "es";
    assert!(browser.text("/tasks").await.contains("Cancelada 1"));
}
