//! A server that dies after it stored the answer of a language model does not ask again.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use axum::{Json, Router, extract::State};
use serde_json::{Value, json};

use crate::{
    faena::{Faena, eventually},
    postgres::{Database, connect},
};

/// Makes the end of every job wait for a lock, and takes the lock.
const HOLD_ENDS: &str = "
    CREATE FUNCTION faena.hold_end() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM pg_advisory_xact_lock(4242);
        RETURN NEW;
    END $$;
    CREATE TRIGGER hold_end BEFORE INSERT ON faena.done FOR EACH ROW EXECUTE FUNCTION faena.hold_end();
    SELECT pg_advisory_lock(4242)";

const KEY: &str = "sk-very-secret-0123456789";

async fn answer(State(calls): State<Arc<AtomicUsize>>) -> Json<Value> {
    let call = calls.fetch_add(1, Ordering::SeqCst) + 1;
    let message = json!({"role": "assistant", "content": format!("answer {call}")});
    Json(json!({"choices": [{"message": message}], "usage": {"total_tokens": 9}}))
}

/// Starts a language model. Returns its address and the number of its calls.
async fn start_model() -> (String, Arc<AtomicUsize>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    let calls = Arc::new(AtomicUsize::new(0));
    let router = Router::new().fallback(answer).with_state(calls.clone());
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    (url, calls)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_server_does_not_repeat_a_call_whose_answer_was_stored() {
    let (folder, database) = (tempfile::tempdir().unwrap(), Database::create().await);
    let (model, calls) = start_model().await;
    let headers = format!("authorization=Bearer%20{KEY}");
    let environment = [
        ("DATABASE_URL", database.url.as_str()),
        ("FAENA_LLM_BASE_URL", model.as_str()),
        ("FAENA_LLM_MODEL", "small"),
        ("FAENA_LLM_HEADERS", headers.as_str()),
        ("FAENA_LLM_DAILY_TOKENS", "100000"),
        ("FAENA_NODE_LEASE", "5s"),
        ("FAENA_ORPHAN_DELAY", "50ms"),
        ("LOG_LEVEL", "debug"),
    ];
    let mut first = Faena::start(folder.path(), &environment).await;
    // No job can end while this session has the lock.
    let lock = connect(&database.url).await;
    lock.batch_execute(HOLD_ENDS).await.unwrap();
    let id = first.submit(json!({"type": "llm.chat", "payload": {"prompt": "why?"}})).await;
    let path = format!("/api/v1/jobs/{id}");
    eventually("the answer is stored", async || {
        let job = first.get(&path).await.1;
        (job["steps"][0]["name"] == "answer").then_some(())
    })
    .await;
    first.kill();
    // PostgreSQL would still execute what the server had sent before it died.
    let own: i32 = lock.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
    let admin = connect(&database.url).await;
    eventually("the sessions of the first server have ended", async || {
        let sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                   WHERE datname = current_database() AND pid NOT IN ($1, pg_backend_pid())";
        admin.query(sql, &[&own]).await.unwrap().is_empty().then_some(())
    })
    .await;
    lock.batch_execute("SELECT pg_advisory_unlock(4242)").await.unwrap();
    let second = Faena::start(folder.path(), &environment).await;
    let job = second.wait_for_state(&id, "COMPLETED").await;
    assert_eq!(job["result"]["text"], "answer 1", "{job}");
    assert_ne!(job["run"], 1, "the second server ran it again: {job}");
    assert_eq!(calls.load(Ordering::SeqCst), 1, "the answer was paid for once");
    assert!(!first.log().contains(KEY) && !second.log().contains(KEY), "the key is in no log");
}
