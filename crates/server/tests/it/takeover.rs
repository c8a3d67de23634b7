//! The id of a worker is not a secret. Without its session token no other process gets its jobs, its connection or its name.

use reqwest::StatusCode;
use serde_json::{Value, json};

use crate::{
    faena::{Faena, http},
    load::assert_completed_once,
    postgres::Database,
    worker_failover::two_nodes,
    workers::{
        Grpc, HttpWorker, Interruption, StreamWorker, TestWorker, Transport, WebSocket, WorkerOptions, within_timeout,
    },
};

/// Registers over plain HTTP, without the help of `Faena::post`, which remembers session tokens.
async fn register(faena: &Faena, body: &Value) -> (StatusCode, Value) {
    let answer = http().post(format!("{}/api/v1/workers/register", faena.url)).json(body).send().await.unwrap();
    (answer.status(), answer.json().await.unwrap())
}

/// Returns the answer to `frame`, as text.
async fn first_answer<T: Transport>(faena: &Faena, frame: &Value) -> String {
    let mut connection = T::open(&faena.url).await;
    connection.sender.send(frame.clone()).unwrap();
    within_timeout("an answer", connection.received.recv()).await.unwrap().to_string()
}

/// Asserts that every attempt to register as `victim` without its token is refused on every transport.
async fn assert_refused_everywhere(faena: &Faena) {
    for token in [Value::Null, json!("fst_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA")] {
        let mut body = json!({"workerId": "victim", "capabilities": ["*"], "concurrency": 10});
        if !token.is_null() {
            body["sessionToken"] = token;
        }
        let (status, answer) = register(faena, &body).await;
        assert_eq!((status, &answer["error"]["code"]), (StatusCode::CONFLICT, &json!("CONFLICT")), "{answer}");
        body["type"] = json!("register");
        for answer in [first_answer::<WebSocket>(faena, &body).await, first_answer::<Grpc>(faena, &body).await] {
            assert!(answer.contains("resume it with its sessionToken"), "{answer}");
        }
    }
}

async fn assert_not_taken_over<W: TestWorker>() {
    let folder = tempfile::tempdir().unwrap();
    let faena = Faena::start(folder.path(), &[]).await;
    let mut victim = W::connect(&faena, WorkerOptions::new("victim", &["mail"])).await;
    let id = faena.submit(json!({"name": "mail"})).await;
    let job = victim.next_job().await;
    assert_refused_everywhere(&faena).await;
    // Its connection, its job and its token are still valid.
    victim.interrupt(Interruption::Closed).await;
    assert_eq!(victim.reconnect().await, Some(true), "it resumes with its token");
    assert_eq!(victim.complete(&job, json!("mine")).await, Ok(()));
    let done = faena.wait_for_state(&id, "COMPLETED").await;
    assert_completed_once(&done);
    assert_eq!((&done["result"], &done["retryCount"]), (&json!("mine"), &json!(0)));
    let token = victim.session_token().unwrap();
    let (_, list) = faena.get("/api/v1/workers").await;
    let (_, shown) = faena.get("/api/v1/workers/victim").await;
    for text in [list.to_string(), shown.to_string(), faena.log()] {
        assert!(!text.contains(&token) && !text.contains("fst_"), "the token is shown: {text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_websocket_worker_is_not_taken_over() {
    assert_not_taken_over::<StreamWorker<WebSocket>>().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grpc_worker_is_not_taken_over() {
    assert_not_taken_over::<StreamWorker<Grpc>>().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_http_worker_is_not_taken_over() {
    assert_not_taken_over::<HttpWorker>().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_on_postgres_is_not_taken_over_through_another_node() {
    let (first_folder, second_folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let database = Database::create().await;
    let [first, second] = two_nodes(&database, [first_folder.path(), second_folder.path()]).await;
    let mut victim = StreamWorker::<WebSocket>::connect(&first, WorkerOptions::new("victim", &["mail"])).await;
    let id = first.submit(json!({"name": "mail"})).await;
    let job = victim.next_job().await;
    assert_refused_everywhere(&second).await;
    assert_eq!(victim.complete(&job, Value::Null).await, Ok(()));
    assert_completed_once(&second.wait_for_state(&id, "COMPLETED").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_keeps_its_jobs_across_a_restart_of_the_server_and_strangers_do_not_get_them() {
    let folder = tempfile::tempdir().unwrap();
    let mut faena = Faena::start(folder.path(), &[("FAENA_RECONNECT_GRACE", "60s")]).await;
    let victim = StreamWorker::<WebSocket>::connect(&faena, WorkerOptions::new("victim", &["mail"])).await;
    let id = faena.submit(json!({"name": "mail"})).await;
    let mut victim = victim;
    let job = victim.next_job().await;
    let options = WorkerOptions { session_token: victim.session_token(), ..WorkerOptions::new("victim", &["mail"]) };
    faena.kill();
    let faena = Faena::start(folder.path(), &[("FAENA_RECONNECT_GRACE", "60s")]).await;
    assert_refused_everywhere(&faena).await;
    let (_, answer) = register(&faena, &json!({"workerId": "victim", "capabilities": ["*"]})).await;
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains("keeps its jobs until 20"), "it says until when: {message}");
    let mut victim = StreamWorker::<WebSocket>::connect(&faena, options).await;
    assert_eq!(victim.complete(&job, Value::Null).await, Ok(()));
    assert_completed_once(&faena.wait_for_state(&id, "COMPLETED").await);
}

/// A client that uses only the basic frames knows no run numbers. It may omit the run on the connection that received the job.
#[tokio::test(flavor = "multi_thread")]
async fn a_report_without_a_run_counts_only_on_the_connection_that_received_the_job() {
    let folder = tempfile::tempdir().unwrap();
    let faena = Faena::start(folder.path(), &[]).await;
    let mut worker = StreamWorker::<WebSocket>::connect(&faena, WorkerOptions::new("victim", &["mail"])).await;
    let id = faena.submit(json!({"name": "mail"})).await;
    let job = worker.next_job().await;
    let complete = json!({"type": "complete", "jobId": id, "result": "stolen"});
    let mut other = WebSocket::open(&faena.url).await;
    for frame in [json!({"type": "register", "workerId": "other", "capabilities": ["none"]}), complete.clone()] {
        other.sender.send(frame).unwrap();
    }
    let rejected = async {
        loop {
            let frame = other.received.recv().await.unwrap();
            if frame["type"] == "ack" {
                return frame;
            }
        }
    };
    let answer = within_timeout("the answer of the other worker", rejected).await;
    assert_eq!((&answer["ok"], &answer["error"]["code"]), (&json!(false), &json!("CONFLICT")), "{answer}");
    let token = worker.session_token().unwrap();
    let mut again = WebSocket::open(&faena.url).await;
    let register = json!({"type": "register", "workerId": "victim", "sessionToken": token, "capabilities": ["mail"]});
    for frame in [register, complete] {
        again.sender.send(frame).unwrap();
    }
    let registered = within_timeout("registered", again.received.recv()).await.unwrap();
    assert_eq!(registered["resumed"], true, "{registered}");
    let answer = within_timeout("an ack", again.received.recv()).await.unwrap();
    assert_eq!((&answer["ok"], &answer["error"]["code"]), (&json!(false), &json!("VALIDATION_ERROR")), "{answer}");
    again.sender.send(json!({"type": "complete", "jobId": id, "run": job.run, "result": "mine"})).unwrap();
    assert_eq!(faena.wait_for_state(&id, "COMPLETED").await["result"], "mine");
}
