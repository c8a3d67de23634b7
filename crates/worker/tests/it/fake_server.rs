//! A server for tests: it sends what the test wants and shows what it receives.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use faena::{Context, JobId, Worker};
use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Notify,
    task::JoinHandle,
    time::timeout,
};
use tokio_tungstenite::{WebSocketStream, accept_async, tungstenite::Message};
use uuid::Uuid;

/// Fails a test that waits longer than this.
const LIMIT: Duration = Duration::from_secs(10);

pub struct FakeServer {
    listener: TcpListener,
}

/// Returns a new id for a job.
pub fn new_id() -> JobId {
    Uuid::now_v7().into()
}

/// Returns a worker whose jobs of the type `work` finish when the test opens the gate.
fn gated(gate: Arc<Notify>) -> Worker {
    Worker::new().handle("work", move |job: Context, _: Value| {
        let gate = gate.clone();
        async move {
            gate.notified().await;
            Ok(json!({ "cancelled": job.is_cancelled() }))
        }
    })
}

/// Starts a server and a gated worker that is connected to it.
pub async fn start_gated() -> (FakeServer, Arc<Notify>, Running, Peer) {
    let (server, gate) = (FakeServer::new().await, Arc::new(Notify::new()));
    let worker = server.start(gated(gate.clone()));
    let peer = server.accept_new().await;
    (server, gate, worker, peer)
}

/// One connection of a worker.
pub struct Peer {
    socket: WebSocketStream<TcpStream>,
    /// Frames that were received while the test waited for something else.
    received: VecDeque<Value>,
    pub registration: Value,
}

/// A running worker.
pub struct Running {
    task: JoinHandle<Result<(), faena::Error>>,
    shutdown: Arc<Notify>,
}

impl Running {
    pub fn stop(&self) {
        self.shutdown.notify_one();
    }

    /// Waits until the worker has stopped.
    pub async fn wait(self) -> Result<(), faena::Error> {
        timeout(LIMIT, self.task).await.expect("it ends").expect("no panic")
    }

    /// Waits until the worker has left the server and has stopped.
    pub async fn leave(self, peer: &mut Peer) {
        peer.expect("leave").await;
        self.wait().await.expect("a clean shutdown");
    }
}

impl FakeServer {
    pub async fn new() -> FakeServer {
        FakeServer { listener: TcpListener::bind("127.0.0.1:0").await.expect("a port") }
    }

    pub fn start(&self, worker: Worker) -> Running {
        let url = format!("http://{}", self.listener.local_addr().expect("an address"));
        let shutdown = Arc::new(Notify::new());
        let stopped = shutdown.clone();
        let worker = worker.url(url).run_until(async move { stopped.notified().await });
        Running { task: tokio::spawn(worker), shutdown }
    }

    /// Accepts the next connection and reads its registration, without an answer.
    pub async fn accept(&self) -> Peer {
        let (stream, _) = timeout(LIMIT, self.listener.accept()).await.expect("it connects").expect("a stream");
        let socket = accept_async(stream).await.expect("a handshake");
        let mut peer = Peer { socket, received: VecDeque::new(), registration: Value::Null };
        peer.registration = peer.expect("register").await;
        peer
    }

    /// Accepts the next connection and answers its registration as a new one.
    pub async fn accept_new(&self) -> Peer {
        self.accept_registered(false).await
    }

    /// Accepts the next connection and answers its registration as a resumed one.
    pub async fn accept_resumed(&self) -> Peer {
        self.accept_registered(true).await
    }

    async fn accept_registered(&self, resumed: bool) -> Peer {
        let mut peer = self.accept().await;
        let registered = json!({
            "type": "registered", "sessionToken": "fst_fake", "heartbeatIntervalMs": 30_000, "resumed": resumed,
        });
        peer.send(registered).await;
        peer
    }
}

impl Peer {
    pub async fn send(&mut self, frame: Value) {
        self.socket.send(Message::text(frame.to_string())).await.expect("the worker reads");
    }

    pub async fn assign(&mut self, job: JobId, kind: &str) {
        self.assign_with(job, kind, json!({})).await;
    }

    /// Assigns a job under run 1, with additional fields.
    pub async fn assign_with(&mut self, job: JobId, kind: &str, fields: Value) {
        let mut frame = json!({
            "id": job, "name": kind, "type": kind, "queue": "default", "payload": {}, "run": 1, "retryCount": 0,
            "attempt": 1, "maxRetries": 3, "correlationId": "c", "deadline": "2099-01-01T00:00:00Z", "steps": [],
        });
        for (key, value) in fields.as_object().expect("fields") {
            frame[key] = value.clone();
        }
        self.send(json!({"type": "job", "job": frame})).await;
    }

    pub async fn ack(&mut self, report: &Value) {
        self.send(
            json!({"type": "ack", "jobId": report["jobId"], "run": report["run"], "of": report["type"], "ok": true}),
        )
        .await;
    }

    /// Returns when the worker has read everything that was sent to it.
    pub async fn wait_until_read(&mut self) {
        self.socket.send(Message::Ping("read".into())).await.expect("the worker reads");
        loop {
            match timeout(LIMIT, self.socket.next()).await.expect("the worker answers") {
                Some(Ok(Message::Pong(_))) => return,
                Some(Ok(Message::Text(text))) => self.received.push_back(serde_json::from_str(&text).expect("JSON")),
                other => panic!("instead of an answer: {other:?}"),
            }
        }
    }

    pub async fn receive(&mut self) -> Value {
        if let Some(frame) = self.received.pop_front() {
            return frame;
        }
        loop {
            let message = timeout(LIMIT, self.socket.next()).await.expect("the worker sends something");
            match message.expect("the worker is connected").expect("a frame") {
                Message::Text(text) => return serde_json::from_str(&text).expect("JSON"),
                Message::Close(_) => return json!({"type": "close"}),
                _ => {}
            }
        }
    }

    #[track_caller]
    pub fn expect<'a>(&'a mut self, kind: &'a str) -> impl Future<Output = Value> + 'a {
        let caller = std::panic::Location::caller();
        async move {
            let frame = self.receive().await;
            assert_eq!(frame["type"], kind, "at {caller}: {frame}");
            frame
        }
    }

    /// Closes the connection without a closing frame.
    pub fn disconnect(self) {
        drop(self);
    }
}
