//! Tests of `GET /jobs/:id/dependencies`.

use axum::http::StatusCode;
use serde_json::json;

use crate::app::App;

#[tokio::test(flavor = "multi_thread")]
async fn a_job_shows_what_it_depends_on_and_what_depends_on_it() {
    let app = App::start().await;
    let parent = app.create(r#"{"name": "extract", "scheduledAt": "2099-01-01T00:00:00Z"}"#).await;
    let job = app.create(&json!({"name": "load", "queue": "etl", "dependsOn": [parent]}).to_string()).await;
    for number in 0..3 {
        let name = format!("report {number}");
        app.create(&json!({"name": name, "type": "report", "dependsOn": [job]}).to_string()).await;
    }
    let some = app.get(&format!("/api/v1/jobs/{job}/dependencies?limit=3")).await.json();
    let shown: Vec<_> =
        some["jobs"].as_array().unwrap().iter().map(|job| (&job["name"], &job["depth"], &job["dependsOn"])).collect();
    assert_eq!(
        shown,
        [
            (&json!("load"), &json!(0), &json!([parent])),
            (&json!("extract"), &json!(-1), &json!([])),
            (&json!("report 0"), &json!(1), &json!([job])),
        ]
    );
    assert_eq!((&some["hidden"], &some["hiddenIsExact"]), (&json!(2), &json!(true)));
    let first = &some["jobs"][0];
    assert_eq!((&first["queue"], &first["type"], &first["status"]), (&json!("etl"), &json!("load"), &json!("PENDING")));
    assert_eq!((&first["hiddenParents"], &first["hiddenChildren"]), (&json!(0), &json!(2)));
    let all = app.get(&format!("/api/v1/jobs/{job}/dependencies")).await.json();
    assert_eq!((all["jobs"].as_array().unwrap().len(), &all["hidden"]), (5, &json!(0)));
}

#[tokio::test(flavor = "multi_thread")]
async fn dependencies_reject_an_unknown_job_and_a_wrong_limit() {
    let app = App::start().await;
    let unknown = app.get("/api/v1/jobs/01900000-0000-7000-8000-000000000000/dependencies").await;
    assert_eq!(unknown.status, StatusCode::NOT_FOUND);
    let job = app.create(r#"{"name": "noop"}"#).await;
    for wrong in ["limit=0", "limit=201", "limit=x", "depth=1"] {
        let answer = app.get(&format!("/api/v1/jobs/{job}/dependencies?{wrong}")).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{wrong}: {}", answer.text);
    }
}
