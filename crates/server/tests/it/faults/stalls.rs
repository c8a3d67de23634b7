//! The database stalls: every request is answered within `database.timeout`, wherever it waits.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use reqwest::StatusCode;
use serde_json::json;

use super::database_proxy;
use crate::{
    faena::{Faena, eventually},
    postgres::Database,
};

const TIMEOUT: (&str, &str) = ("FAENA_DATABASE_TIMEOUT", "2s");
/// Four times `TIMEOUT`, for a busy machine. If each wait had a timeout of its own, a request could take 35 s.
const LIMIT: Duration = Duration::from_secs(8);

/// Submits jobs concurrently, and checks that each is rejected in time.
async fn assert_rejected_in_time(faena: &Faena) {
    let started_at = Instant::now();
    let answers = join_all((0..40).map(|_| faena.post("/api/v1/jobs", json!({"name": "noop"})))).await;
    let took = started_at.elapsed();
    assert!(took < LIMIT, "{took:?}");
    for (status, answer) in answers {
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{answer}");
        assert_eq!(answer["error"]["code"], "UNAVAILABLE");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn while_postgres_does_not_answer_requests_are_rejected_within_the_database_timeout() {
    let folder = tempfile::tempdir().unwrap();
    let database = Database::create().await;
    let (proxy, url) = database_proxy(&database.url).await;
    let faena = Faena::start(folder.path(), &[("DATABASE_URL", &url), TIMEOUT]).await;
    faena.submit(json!({"name": "unhandled.type"})).await;
    proxy.drop_all();
    // The second round finds no connection in the pool.
    assert_rejected_in_time(&faena).await;
    assert_rejected_in_time(&faena).await;
    proxy.forward();
    proxy.disconnect_all();
    eventually("jobs are accepted again", async || {
        let (status, _) = faena.post("/api/v1/jobs", json!({"name": "unhandled.type"})).await;
        (status == StatusCode::CREATED).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn while_the_sqlite_writer_is_blocked_requests_are_rejected_in_time_and_are_not_stored_later() {
    let folder = tempfile::tempdir().unwrap();
    let faena = Faena::start(folder.path(), &[TIMEOUT]).await;
    faena.submit(json!({"name": "unhandled.type"})).await;
    let other = rusqlite::Connection::open(folder.path().join("faena-data/faena.db")).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    assert_rejected_in_time(&faena).await;
    other.execute_batch("ROLLBACK").unwrap();
    eventually("jobs are accepted again", async || {
        let (status, _) = faena.post("/api/v1/jobs", json!({"name": "unhandled.type"})).await;
        (status == StatusCode::CREATED).then_some(())
    })
    .await;
    assert_eq!(faena.count("").await, 2, "a rejected job was stored");
}
