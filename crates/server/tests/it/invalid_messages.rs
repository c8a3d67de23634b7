//! Invalid messages from workers: the sender gets an error, and other workers are not affected.

mod grpc;
mod http;
mod random_frames;
mod websocket;

use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpStream;
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async, tungstenite::Message};

use crate::{
    faena::Faena,
    load::assert_completed_once,
    workers::{Job, StreamWorker, TestWorker, WebSocket, WorkerOptions, failure, within_timeout},
};

const UNKNOWN_JOB: &str = "01a1e1d5-1161-725e-af1b-3dd571b21dd7";

/// A server with a well-behaved worker that runs a job during the test.
struct Fixture {
    faena: Faena,
    healthy: StreamWorker<WebSocket>,
    /// The job in flight at the well-behaved worker.
    job: Job,
    _folder: TempDir,
}

impl Fixture {
    async fn start(environment: &[(&str, &str)]) -> Fixture {
        let folder = tempfile::tempdir().unwrap();
        let faena = Faena::start(folder.path(), environment).await;
        let mut healthy = StreamWorker::connect(&faena, WorkerOptions::new("healthy", &["healthy"])).await;
        faena.submit(json!({"name": "healthy"})).await;
        let job = healthy.next_job().await;
        healthy.log(&job, "at work").await.unwrap();
        Fixture { faena, healthy, job, _folder: folder }
    }

    /// Completes the well-behaved worker's job and checks that nothing has disturbed it.
    async fn assert_undisturbed(mut self) {
        self.healthy.complete(&self.job, json!("undisturbed")).await.unwrap();
        let done = self.faena.wait_for_state(&self.job.id, "COMPLETED").await;
        assert_completed_once(&done);
        assert_eq!((&done["result"], &done["run"]), (&json!("undisturbed"), &json!(self.job.run)));
        assert_eq!(done["retryCount"], 0);
        assert!(!self.faena.log().contains("panicked"), "{}", self.faena.log());
    }

    /// Submits a job, fails its first run and completes its second. Returns the second run.
    async fn complete_in_second_run(&self, worker: &mut StreamWorker<WebSocket>, kind: &str) -> Job {
        self.faena.submit(json!({"name": kind, "retryDelay": 100})).await;
        let first = worker.next_job().await;
        worker.fail(&first, failure("retry")).await.unwrap();
        let second = worker.next_job().await;
        worker.complete(&second, json!(1)).await.unwrap();
        second
    }
}

/// A WebSocket that sends any message, valid or not.
struct RawSocket(WebSocketStream<MaybeTlsStream<TcpStream>>);

impl RawSocket {
    async fn connect(faena: &Faena) -> RawSocket {
        let url = format!("{}/api/v1/workers/connect", faena.url.replacen("http", "ws", 1));
        RawSocket(connect_async(url).await.unwrap().0)
    }

    async fn register(faena: &Faena, id: &str, kind: &str) -> RawSocket {
        RawSocket::resume(faena, id, kind, Value::Null).await.0
    }

    /// Registers with the session token of an earlier registration, or `null`. Also returns the token.
    async fn resume(faena: &Faena, id: &str, kind: &str, token: Value) -> (RawSocket, Value) {
        let mut socket = RawSocket::connect(faena).await;
        let frame = json!({"type": "register", "workerId": id, "sessionToken": token, "capabilities": [kind]});
        let answer = socket.call(frame.to_string()).await;
        assert_eq!(answer["type"], "registered", "{answer}");
        (socket, answer["sessionToken"].clone())
    }

    async fn send(&mut self, message: impl Into<Message>) {
        self.0.send(message.into()).await.unwrap();
    }

    /// Returns the next frame, skipping heartbeats. Returns `{"type": "closed", "reason": …}` for a closed connection.
    async fn receive(&mut self) -> Value {
        loop {
            match within_timeout("an answer", self.0.next()).await {
                Some(Ok(Message::Text(text))) => {
                    let frame: Value = serde_json::from_str(&text).unwrap();
                    if frame["type"] != "heartbeat" {
                        return frame;
                    }
                }
                Some(Ok(Message::Close(end))) => {
                    return json!({"type": "closed", "reason": end.map(|end| end.reason.to_string())});
                }
                Some(Ok(_)) => {}
                Some(Err(_)) | None => return json!({"type": "closed", "reason": null}),
            }
        }
    }

    async fn call(&mut self, message: impl Into<Message>) -> Value {
        self.send(message).await;
        self.receive().await
    }

    /// Sends the same frame until the server closes the connection. Returns the `closed` frame.
    async fn flood(&mut self, text: &str) -> Value {
        let flooding = async {
            for round in 0..2_000 {
                for _ in 0..50 {
                    if self.0.feed(Message::text(text)).await.is_err() {
                        return self.wait_until_closed().await;
                    }
                }
                if self.0.flush().await.is_err() {
                    return self.wait_until_closed().await;
                }
                // A client that does not read the answers would be disconnected for another reason.
                if round % 2 == 0 {
                    while let Ok(frame) = tokio::time::timeout(std::time::Duration::ZERO, self.receive()).await {
                        if frame["type"] == "closed" {
                            return frame;
                        }
                    }
                }
            }
            json!({"type": "never closed"})
        };
        within_timeout("the server stops the flood", flooding).await
    }

    async fn wait_until_closed(&mut self) -> Value {
        loop {
            let frame = self.receive().await;
            if frame["type"] == "closed" {
                return frame;
            }
        }
    }
}

fn code(answer: &Value) -> &str {
    answer["error"]["code"].as_str().unwrap_or_else(|| panic!("not an error: {answer}"))
}
