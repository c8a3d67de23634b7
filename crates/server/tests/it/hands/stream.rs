//! A worker on a connection that stays open. WebSocket and gRPC carry the same frames; here they are JSON.

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

use super::{Answer, Away, Failure, Hand, Job, Who, beat, in_time};
use crate::faena::Faena;

/// An open connection: what is put in is sent, what comes out was received. It ends when the task is aborted or the far end
/// closes it; then `heard` ends, after a frame `{type: "closed", reason}` if there was a reason.
pub struct Wire {
    pub say: mpsc::UnboundedSender<Value>,
    pub heard: mpsc::UnboundedReceiver<Value>,
    pub task: AbortHandle,
    /// Once cancelled, nothing is read or sent any more, and the connection stays open.
    pub hush: CancellationToken,
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub trait Transport: Send {
    async fn open(url: &str) -> Wire;
}

/// Frames in and out, sorted.
pub struct Frames<T: Transport> {
    url: String,
    register: Value,
    wire: Wire,
    jobs: VecDeque<Job>,
    cancels: VecDeque<(String, i64)>,
    silent: Arc<AtomicBool>,
    beats: AbortHandle,
    transport: std::marker::PhantomData<T>,
}

impl<T: Transport> Frames<T> {
    async fn open(url: &str, register: Value) -> (Frames<T>, bool) {
        let mut wire = T::open(url).await;
        wire.say.send(register.clone()).unwrap();
        let answer = in_time("the answer to register", wire.heard.recv()).await.unwrap();
        assert_eq!(answer["type"], "registered", "{answer}");
        assert_eq!(answer["workerId"], register["workerId"]);
        let silent = Arc::new(AtomicBool::new(false));
        let interval_ms = answer["heartbeatIntervalMs"].as_u64().unwrap();
        let beats = tokio::spawn(beats(wire.say.clone(), silent.clone(), beat(interval_ms))).abort_handle();
        let frames = Frames {
            url: url.into(),
            register,
            wire,
            jobs: VecDeque::new(),
            cancels: VecDeque::new(),
            silent,
            beats,
            transport: std::marker::PhantomData,
        };
        (frames, answer["resumed"] == true)
    }

    /// The next frame that is neither a job, nor an order to stop, nor a heartbeat: those are put aside.
    async fn hear(&mut self, what: &str) -> Option<Value> {
        let frame = in_time(what, self.wire.heard.recv()).await.unwrap_or_else(|| panic!("closed: {what}"));
        match frame["type"].as_str().unwrap() {
            "job" => self.jobs.push_back(Job::of_frame(&frame["job"])),
            "cancel" => {
                self.cancels.push_back((frame["jobId"].as_str().unwrap().into(), frame["run"].as_i64().unwrap()))
            }
            "heartbeat" | "drain" | "resume" => {}
            _ => return Some(frame),
        }
        None
    }

    async fn report(&mut self, job: &Job, of: &str, mut frame: Value) -> Answer {
        frame["type"] = of.into();
        frame["jobId"] = job.id.as_str().into();
        frame["run"] = job.run.into();
        self.wire.say.send(frame).unwrap();
        loop {
            let Some(answer) = self.hear(&format!("the answer to {of}")).await else { continue };
            assert_eq!(answer["type"], "ack", "{answer}");
            if answer["of"] == of && answer["jobId"] == job.id.as_str() {
                return match answer["ok"].as_bool().unwrap() {
                    true => Ok(()),
                    false => Err(answer["error"]["code"].as_str().unwrap().to_owned()),
                };
            }
        }
    }
}

async fn beats(say: mpsc::UnboundedSender<Value>, silent: Arc<AtomicBool>, every: Duration) {
    loop {
        tokio::time::sleep(every).await;
        if !silent.load(Ordering::Relaxed) && say.send(json!({"type": "heartbeat"})).is_err() {
            return;
        }
    }
}

impl<T: Transport> Hand for Frames<T> {
    async fn connect(faena: &Faena, who: Who) -> Self {
        let mut register = json!({
            "type": "register", "workerId": who.id, "capabilities": who.capabilities, "concurrency": who.concurrency,
        });
        if !who.queues.is_empty() {
            register["queues"] = who.queues.into();
        }
        Frames::open(&faena.url, register).await.0
    }

    fn id(&self) -> &str {
        self.register["workerId"].as_str().unwrap()
    }

    async fn next_job(&mut self) -> Job {
        loop {
            if let Some(job) = self.jobs.pop_front() {
                return job;
            }
            self.hear("a job").await;
        }
    }

    async fn started(&mut self, job: &Job) -> Answer {
        self.report(job, "started", json!({})).await
    }

    async fn progress(&mut self, job: &Job, progress: Value) -> Answer {
        self.report(job, "progress", json!({ "progress": progress })).await
    }

    async fn log(&mut self, job: &Job, message: &str) -> Answer {
        self.report(job, "log", json!({ "message": message })).await
    }

    async fn step(&mut self, job: &Job, name: &str, result: Value, total: Option<u32>) -> Result<Value, String> {
        if let Some((_, stored)) = job.steps.iter().find(|(known, _)| known == name) {
            return Ok(stored.clone());
        }
        let mut frame = json!({"name": name, "result": result});
        if let Some(total) = total {
            frame["totalSteps"] = total.into();
        }
        self.report(job, "step", frame).await.map(|()| result)
    }

    async fn complete(&mut self, job: &Job, result: Value) -> Answer {
        self.report(job, "complete", json!({ "result": result })).await
    }

    async fn fail(&mut self, job: &Job, failure: Failure) -> Answer {
        let mut frame = json!({"error": failure.error});
        if let Some(retryable) = failure.retryable {
            frame["retryable"] = retryable.into();
        }
        if let Some(ms) = failure.retry_after_ms {
            frame["retryAfterMs"] = ms.into();
        }
        self.report(job, "fail", frame).await
    }

    async fn next_cancel(&mut self) -> (String, i64) {
        loop {
            if let Some(cancel) = self.cancels.pop_front() {
                return cancel;
            }
            self.hear("an order to stop").await;
        }
    }

    async fn away(&mut self, how: Away) {
        self.silent.store(true, Ordering::Relaxed);
        match how {
            Away::Closed => {
                self.wire.task.abort();
                // A gRPC stream lasts as long as somebody may still say something on it.
                self.beats.abort();
                self.wire.say = mpsc::unbounded_channel().0;
            }
            Away::Silent => self.wire.hush.cancel(),
        }
    }

    async fn back(&mut self) -> Option<bool> {
        let (frames, resumed) = Frames::open(&self.url, self.register.clone()).await;
        *self = frames;
        Some(resumed)
    }

    async fn cut(self) {
        self.wire.task.abort();
    }

    async fn leave(mut self) {
        self.wire.say.send(json!({"type": "leave"})).unwrap();
        let end = async { while self.wire.heard.recv().await.is_some() {} };
        in_time("the connection ends after leave", end).await;
    }
}

impl<T: Transport> Drop for Frames<T> {
    fn drop(&mut self) {
        self.beats.abort();
    }
}
