//! A server for tests: it says what the test wants and shows what it hears.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use faena::{JobId, Worker};
use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Notify,
    task::JoinHandle,
    time::timeout,
};
use tokio_tungstenite::{WebSocketStream, accept_async, tungstenite::Message};

/// Nothing that is waited for takes so long.
const LIMIT: Duration = Duration::from_secs(10);

pub struct FarEnd {
    listener: TcpListener,
}

/// One connection of a worker.
pub struct Peer {
    socket: WebSocketStream<TcpStream>,
    /// Heard while something else was waited for.
    heard: VecDeque<Value>,
    pub registration: Value,
}

/// A worker that runs.
pub struct Running {
    task: JoinHandle<Result<(), faena::Error>>,
    shutdown: Arc<Notify>,
}

impl Running {
    pub fn stop(&self) {
        self.shutdown.notify_one();
    }

    pub async fn end(self) -> Result<(), faena::Error> {
        timeout(LIMIT, self.task).await.expect("it ends").expect("no panic")
    }
}

impl FarEnd {
    pub async fn new() -> FarEnd {
        FarEnd { listener: TcpListener::bind("127.0.0.1:0").await.expect("a port") }
    }

    pub fn start(&self, worker: Worker) -> Running {
        let url = format!("http://{}", self.listener.local_addr().expect("an address"));
        let shutdown = Arc::new(Notify::new());
        let told = shutdown.clone();
        let worker = worker.url(url).run_until(async move { told.notified().await });
        Running { task: tokio::spawn(worker), shutdown }
    }

    /// The next connection, and its registration, which is not answered yet.
    pub async fn accept(&self) -> Peer {
        let (stream, _) = timeout(LIMIT, self.listener.accept()).await.expect("it connects").expect("a stream");
        let socket = accept_async(stream).await.expect("a handshake");
        let mut peer = Peer { socket, heard: VecDeque::new(), registration: Value::Null };
        peer.registration = peer.expect("register").await;
        peer
    }

    /// The next connection, registered.
    pub async fn accept_as(&self, resumed: bool) -> Peer {
        let mut peer = self.accept().await;
        peer.say(json!({"type": "registered", "heartbeatIntervalMs": 30_000, "resumed": resumed})).await;
        peer
    }
}

impl Peer {
    pub async fn say(&mut self, frame: Value) {
        self.socket.send(Message::text(frame.to_string())).await.expect("it listens");
    }

    pub async fn give(&mut self, job: JobId, kind: &str) {
        self.give_with(job, kind, json!({})).await;
    }

    /// A job under run 1, with fields of its own.
    pub async fn give_with(&mut self, job: JobId, kind: &str, fields: Value) {
        let mut frame = json!({
            "id": job, "name": kind, "type": kind, "queue": "default", "payload": {}, "run": 1, "retryCount": 0,
            "maxRetries": 3, "correlationId": "c", "deadline": "2099-01-01T00:00:00Z", "steps": [],
        });
        for (key, value) in fields.as_object().expect("fields") {
            frame[key] = value.clone();
        }
        self.say(json!({"type": "job", "job": frame})).await;
    }

    pub async fn ack(&mut self, report: &Value) {
        self.say(
            json!({"type": "ack", "jobId": report["jobId"], "run": report["run"], "of": report["type"], "ok": true}),
        )
        .await;
    }

    /// Returns when the worker has read everything that was said to it.
    pub async fn settled(&mut self) {
        self.socket.send(Message::Ping("settled".into())).await.expect("it listens");
        loop {
            match timeout(LIMIT, self.socket.next()).await.expect("it answers") {
                Some(Ok(Message::Pong(_))) => return,
                Some(Ok(Message::Text(text))) => self.heard.push_back(serde_json::from_str(&text).expect("JSON")),
                other => panic!("instead of an answer: {other:?}"),
            }
        }
    }

    pub async fn hear(&mut self) -> Value {
        if let Some(frame) = self.heard.pop_front() {
            return frame;
        }
        loop {
            let message = timeout(LIMIT, self.socket.next()).await.expect("it says something");
            match message.expect("it is there").expect("a frame") {
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
            let frame = self.hear().await;
            assert_eq!(frame["type"], kind, "at {caller}: {frame}");
            frame
        }
    }

    /// Cuts the connection without a word.
    pub fn cut(self) {
        drop(self);
    }
}
