//! A worker on a connection that stays open. WebSocket and gRPC carry the same frames; this file handles them as JSON.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use serde_json::{Value, json};
use tokio::{sync::mpsc, task::AbortHandle};
use tokio_util::sync::CancellationToken;

use super::{Interruption, Job, ReportResult, TestWorker, WorkerOptions, heartbeat_period, within_timeout};
use crate::faena::Faena;

/// An open connection. It ends when the task is aborted or the server closes it; then `received` ends, after a frame
/// `{type: "closed", reason}` if the server gave a reason.
pub struct Connection {
    pub sender: mpsc::UnboundedSender<Value>,
    pub received: mpsc::UnboundedReceiver<Value>,
    pub task: AbortHandle,
    /// Once cancelled, the connection stays open but transfers nothing in either direction.
    pub mute: CancellationToken,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub trait Transport: Send {
    async fn open(url: &str) -> Connection;
}

/// A worker on a WebSocket or a gRPC stream.
pub struct StreamWorker<T: Transport> {
    url: String,
    register: Value,
    connection: Connection,
    jobs: VecDeque<Job>,
    cancels: VecDeque<(String, i64)>,
    is_silent: Arc<AtomicBool>,
    heartbeats: AbortHandle,
    transport: std::marker::PhantomData<T>,
}

impl<T: Transport> StreamWorker<T> {
    async fn open(url: &str, mut register: Value) -> (StreamWorker<T>, bool) {
        let mut connection = T::open(url).await;
        connection.sender.send(register.clone()).unwrap();
        let answer = within_timeout("the answer to register", connection.received.recv()).await.unwrap();
        assert_eq!(answer["type"], "registered", "{answer}");
        assert_eq!(answer["workerId"], register["workerId"]);
        register["sessionToken"] = answer["sessionToken"].clone();
        let is_silent = Arc::new(AtomicBool::new(false));
        let interval_ms = answer["heartbeatIntervalMs"].as_u64().unwrap();
        let heartbeats = send_heartbeats(connection.sender.clone(), is_silent.clone(), heartbeat_period(interval_ms));
        let heartbeats = tokio::spawn(heartbeats).abort_handle();
        let worker = StreamWorker {
            url: url.into(),
            register,
            connection,
            jobs: VecDeque::new(),
            cancels: VecDeque::new(),
            is_silent,
            heartbeats,
            transport: std::marker::PhantomData,
        };
        (worker, answer["resumed"] == true)
    }

    /// Receives a frame and returns it unless it is a job, a cancel or a heartbeat. Stores jobs and cancels for later.
    async fn receive(&mut self, what: &str) -> Option<Value> {
        let frame = within_timeout(what, self.connection.received.recv())
            .await
            .unwrap_or_else(|| panic!("connection closed, expected {what}"));
        match frame["type"].as_str().unwrap() {
            "job" => self.jobs.push_back(Job::from_frame(&frame["job"])),
            "cancel" => {
                self.cancels.push_back((frame["jobId"].as_str().unwrap().into(), frame["run"].as_i64().unwrap()))
            }
            "heartbeat" | "drain" | "resume" => {}
            _ => return Some(frame),
        }
        None
    }
}

async fn send_heartbeats(sender: mpsc::UnboundedSender<Value>, is_silent: Arc<AtomicBool>, period: Duration) {
    loop {
        tokio::time::sleep(period).await;
        if !is_silent.load(Ordering::Relaxed) && sender.send(json!({"type": "heartbeat"})).is_err() {
            return;
        }
    }
}

impl<T: Transport> TestWorker for StreamWorker<T> {
    async fn connect(faena: &Faena, options: WorkerOptions) -> Self {
        let mut register = options.registration();
        register["type"] = "register".into();
        StreamWorker::open(&faena.url, register).await.0
    }

    fn id(&self) -> &str {
        self.register["workerId"].as_str().unwrap()
    }

    fn session_token(&self) -> Option<String> {
        self.register["sessionToken"].as_str().map(str::to_owned)
    }

    async fn next_job(&mut self) -> Job {
        loop {
            if let Some(job) = self.jobs.pop_front() {
                return job;
            }
            self.receive("a job").await;
        }
    }

    async fn report(&mut self, job: &Job, of: &str, mut frame: Value) -> ReportResult {
        frame["type"] = of.into();
        frame["jobId"] = job.id.as_str().into();
        frame["run"] = job.run.into();
        self.connection.sender.send(frame).unwrap();
        loop {
            let Some(answer) = self.receive(&format!("the answer to {of}")).await else { continue };
            if answer["type"] == "error" {
                return Err(answer["error"]["code"].as_str().unwrap().to_owned());
            }
            assert_eq!(answer["type"], "ack", "{answer}");
            if answer["of"] == of && answer["jobId"] == job.id.as_str() {
                return match answer["ok"].as_bool().unwrap() {
                    true => Ok(()),
                    false => Err(answer["error"]["code"].as_str().unwrap().to_owned()),
                };
            }
        }
    }

    async fn next_cancel(&mut self) -> (String, i64) {
        loop {
            if let Some(cancel) = self.cancels.pop_front() {
                return cancel;
            }
            self.receive("a cancel").await;
        }
    }

    async fn interrupt(&mut self, how: Interruption) {
        self.is_silent.store(true, Ordering::Relaxed);
        match how {
            Interruption::Closed => {
                self.connection.task.abort();
                // A gRPC stream stays open as long as a sender exists.
                self.heartbeats.abort();
                self.connection.sender = mpsc::unbounded_channel().0;
            }
            Interruption::Silent => self.connection.mute.cancel(),
        }
    }

    async fn reconnect(&mut self) -> Option<bool> {
        let (worker, resumed) = StreamWorker::open(&self.url, self.register.clone()).await;
        *self = worker;
        Some(resumed)
    }

    async fn crash(self) {
        self.connection.task.abort();
    }

    async fn leave(mut self) {
        self.connection.sender.send(json!({"type": "leave"})).unwrap();
        let end = async { while self.connection.received.recv().await.is_some() {} };
        within_timeout("the connection ends after leave", end).await;
    }
}

impl<T: Transport> Drop for StreamWorker<T> {
    fn drop(&mut self) {
        self.heartbeats.abort();
    }
}
