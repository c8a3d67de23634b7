//! Guarantees of the worker protocol that concern a single transport.

use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio_tungstenite::tungstenite::Message;

use crate::{faena::Faena, load::assert_completed_once, workers::within_timeout};

/// The client knows `register`, `job`, `complete`, `fail` and `heartbeat`, and no run numbers.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_uses_only_the_five_basic_frames_works() {
    let settings =
        [("FAENA_ASSIGNED_TIMEOUT", "1s"), ("FAENA_WORKER_HEARTBEAT", "300ms"), ("FAENA_WORKER_SILENCE", "3s")];
    let folder = tempfile::tempdir().unwrap();
    let faena = Faena::start(folder.path(), &settings).await;
    let url = format!("{}/api/v1/workers/connect", faena.url.replacen("http", "ws", 1));
    let (mut socket, _) = tokio_tungstenite::connect_async(url).await.unwrap();
    let text = |frame: Value| Message::text(frame.to_string());
    socket.send(text(json!({"type": "register", "capabilities": ["mail"]}))).await.unwrap();
    let (quick, failing, long) = (
        faena.submit(json!({"name": "mail"})).await,
        faena.submit(json!({"name": "mail", "maxRetries": 0})).await,
        faena.submit(json!({"name": "mail"})).await,
    );
    let conversation = async {
        let mut received_ids = Vec::new();
        while let Some(Ok(message)) = socket.next().await {
            let Message::Text(received) = message else { continue };
            let frame: Value = serde_json::from_str(&received).unwrap();
            match frame["type"].as_str().unwrap() {
                "heartbeat" => socket.send(text(json!({"type": "heartbeat"}))).await.unwrap(),
                "job" => {
                    let id = frame["job"]["id"].as_str().unwrap().to_owned();
                    received_ids.push(id.clone());
                    if id == quick {
                        socket.send(text(json!({"type": "complete", "jobId": id, "result": {"n": 1}}))).await.unwrap();
                    } else if id == failing {
                        socket.send(text(json!({"type": "fail", "jobId": id, "error": "no"}))).await.unwrap();
                    }
                }
                "registered" | "ack" => assert_ne!(frame["ok"], false, "{frame}"),
                _ => {}
            }
            // The last job runs longer than FAENA_ASSIGNED_TIMEOUT, although the client never reports a start.
            let job = faena.job(&long).await;
            let Some(started) = job["startedAt"].as_str() else { continue };
            let running_for = jiff::Timestamp::now().duration_since(started.parse().unwrap());
            if received_ids.contains(&long) && running_for.as_millis() > 1_800 {
                socket.send(text(json!({"type": "complete", "jobId": long, "result": "done"}))).await.unwrap();
                return received_ids;
            }
        }
        panic!("the connection was closed");
    };
    let received_ids = within_timeout("the client completes all three jobs", conversation).await;
    assert_eq!(received_ids, [quick.clone(), failing.clone(), long.clone()], "each once");
    assert_completed_once(&faena.wait_for_state(&quick, "COMPLETED").await);
    assert_eq!(faena.wait_for_state(&failing, "FAILED").await["error"], "no");
    let done = faena.wait_for_state(&long, "COMPLETED").await;
    assert_completed_once(&done);
    assert_eq!((&done["retryCount"], &done["result"]), (&json!(0), &json!("done")));
    assert!(!faena.log().contains("panicked"), "{}", faena.log());
}

/// A claim may wait longer than FAENA_WORKER_SILENCE; the worker is not lost meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiting_claim_request_counts_as_a_heartbeat() {
    let settings = [
        ("FAENA_WORKER_HEARTBEAT", "200ms"),
        ("FAENA_WORKER_SILENCE", "1s"),
        ("FAENA_GUARDIAN_INTERVAL", "200ms"),
        ("FAENA_RECONNECT_GRACE", "300ms"),
    ];
    let folder = tempfile::tempdir().unwrap();
    let faena = Faena::start(folder.path(), &settings).await;
    let (_, answer) =
        faena.post("/api/v1/workers/register", json!({"workerId": "ada", "capabilities": ["mail"]})).await;
    assert_eq!(answer["workerId"], "ada", "{answer}");
    let later = (jiff::Timestamp::now() + std::time::Duration::from_millis(2_500)).to_string();
    let id = faena.submit(json!({"name": "mail", "scheduledAt": later})).await;
    let (status, claimed) = faena.post("/api/v1/workers/ada/claim", json!({"waitMs": 15_000})).await;
    assert!(status.is_success(), "{claimed}");
    assert_eq!(claimed["jobs"][0]["id"], id.as_str(), "{claimed}");
}
