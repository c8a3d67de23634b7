//! Tests of `GET /jobs/:id/log`.

use axum::http::StatusCode;

use crate::app::App;

#[tokio::test(flavor = "multi_thread")]
async fn the_log_of_a_job_is_read_page_by_page() {
    let app = App::start().await;
    let id = app.create(r#"{"name": "unhandled.type"}"#).await;
    let path = format!("/api/v1/jobs/{id}");
    for n in 1..=250 {
        let patched = app.call("PATCH", &path, format!(r#"{{"timeoutMs": {n}}}"#)).await;
        assert_eq!(patched.status, StatusCode::OK, "{}", patched.text);
    }
    let job = app.job(&id).await;
    let shown = job["executionLog"].as_array().unwrap().len();
    let omitted = job["executionLogOmitted"].as_u64().unwrap() as usize;
    assert_eq!((shown, shown + omitted), (200, 252));

    let (mut entries, mut cursor, mut pages) = (0, String::new(), 0);
    loop {
        let page = app.get(&format!("{path}/log?limit=100{cursor}")).await;
        assert_eq!(page.status, StatusCode::OK, "{}", page.text);
        let page = page.json();
        entries += page["entries"].as_array().unwrap().len();
        pages += 1;
        let Some(next) = page["nextCursor"].as_str() else { break };
        cursor = format!("&cursor={next}");
    }
    assert_eq!((entries, pages), (252, 3));
    let wrong = app.get(&format!("{path}/log?cursor=x")).await;
    assert_eq!(wrong.status, StatusCode::BAD_REQUEST, "{}", wrong.text);
}
