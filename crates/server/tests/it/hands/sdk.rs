//! The SDK: handlers that do what the story says, behind a line that the story may cut.

use std::{collections::HashMap, time::Duration};

use ::faena::{Context, JobError, Progress, Worker};
use serde_json::Value;
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
};
use tokio_util::sync::CancellationToken;

use super::{Answer, Away, Failure, Hand, Job, Who, in_time};
use crate::{
    faena::{Faena, eventually},
    line::Line,
};

pub struct Sdk {
    id: String,
    line: Line,
    server: (reqwest::Client, String),
    work: JoinHandle<Result<(), ::faena::Error>>,
    stop: CancellationToken,
    given: mpsc::UnboundedReceiver<(Job, mpsc::UnboundedSender<Do>)>,
    cancels: mpsc::UnboundedReceiver<(String, i64)>,
    handlers: HashMap<(String, i64), mpsc::UnboundedSender<Do>>,
}

/// What a handler is to do next.
enum Do {
    Progress(Progress),
    Log(String),
    Step { name: String, result: Value, total: Option<u32>, done: oneshot::Sender<Result<Value, String>> },
    Complete(Value),
    Fail(JobError),
}

#[derive(Clone)]
struct ReportHandler {
    give: mpsc::UnboundedSender<(Job, mpsc::UnboundedSender<Do>)>,
    cancelled: mpsc::UnboundedSender<(String, i64)>,
}

async fn handler(desk: ReportHandler, context: Context, payload: Value) -> Result<Value, JobError> {
    let job = Job {
        id: context.id().to_string(),
        run: context.run().as_i64(),
        kind: context.kind().into(),
        queue: context.queue().into(),
        payload,
        retry_count: context.retry_count().into(),
        correlation_id: context.correlation_id().into(),
        traceparent: context.traceparent().map(str::to_owned),
        schedule: context.schedule_id().map(|id| (id.to_owned(), context.schedule_due().unwrap().to_string())),
        steps: Vec::new(),
    };
    let key = (job.id.clone(), job.run);
    let (sender, mut orders) = mpsc::unbounded_channel();
    let _ = desk.give.send((job, sender));
    let mut told = false;
    loop {
        let order = tokio::select! {
            order = orders.recv() => order,
            () = context.cancelled(), if !told => {
                told = true;
                let _ = desk.cancelled.send(key.clone());
                continue;
            }
        };
        match order {
            Some(Do::Progress(progress)) => context.progress(progress),
            Some(Do::Log(message)) => context.log(message),
            Some(Do::Step { name, result, total, done }) => {
                if let Some(total) = total {
                    context.set_total_steps(total);
                }
                let stored = context.step(&name, async || Ok(result)).await;
                let _ = done.send(stored.map_err(|error| error.message().to_owned()));
            }
            Some(Do::Complete(result)) => return Ok(result),
            Some(Do::Fail(error)) => return Err(error),
            None => return Err(JobError::cancelled()),
        }
    }
}

impl Sdk {
    fn order(&self, job: &Job, order: Do) -> Answer {
        self.handlers[&(job.id.clone(), job.run)].send(order).map_err(|_| "the handler has ended".into())
    }

    /// The worker under this name, if it is connected.
    async fn find(http: &reqwest::Client, url: &str, name: &str) -> Option<Value> {
        let list = http.get(format!("{url}/api/v1/workers?state=Ready,Busy")).send().await.ok()?;
        let list: Value = list.json().await.ok()?;
        list["workers"].as_array()?.iter().find(|worker| worker["name"] == name).cloned()
    }
}

impl Hand for Sdk {
    const HEARS_ANSWERS: bool = false;

    async fn connect(faena: &Faena, who: Who) -> Self {
        let line = Line::to(&faena.url).await;
        let (give, given) = mpsc::unbounded_channel();
        let (cancelled, cancels) = mpsc::unbounded_channel();
        let desk = ReportHandler { give, cancelled };
        let mut worker = Worker::new().url(&line.url).name(&who.id).concurrency(who.concurrency).queues(who.queues);
        for kind in who.capabilities {
            let desk = desk.clone();
            worker = worker.handle(kind, move |context, payload: Value| handler(desk.clone(), context, payload));
        }
        let stop = CancellationToken::new();
        let work = tokio::spawn(worker.run_until(stop.clone().cancelled_owned()));
        let found =
            eventually("the worker is connected", async || Sdk::find(&faena.http, &faena.url, &who.id).await).await;
        let id = found["id"].as_str().unwrap().to_owned();
        let server = (faena.http.clone(), faena.url.clone());
        Sdk { id, line, server, work, stop, given, cancels, handlers: HashMap::new() }
    }

    fn id(&self) -> &str {
        &self.id
    }

    async fn next_job(&mut self) -> Job {
        let (job, handler) = in_time("a job", self.given.recv()).await.expect("the worker is there");
        self.handlers.insert((job.id.clone(), job.run), handler);
        job
    }

    /// It says so itself.
    async fn started(&mut self, _job: &Job) -> Answer {
        Ok(())
    }

    async fn progress(&mut self, job: &Job, progress: Value) -> Answer {
        self.order(job, Do::Progress(serde_json::from_value(progress).unwrap()))
    }

    async fn log(&mut self, job: &Job, message: &str) -> Answer {
        self.order(job, Do::Log(message.into()))
    }

    async fn step(&mut self, job: &Job, name: &str, result: Value, total: Option<u32>) -> Result<Value, String> {
        let (done, answer) = oneshot::channel();
        self.order(job, Do::Step { name: name.into(), result, total, done })?;
        in_time("a step is stored", answer).await.unwrap()
    }

    async fn complete(&mut self, job: &Job, result: Value) -> Answer {
        self.order(job, Do::Complete(result))
    }

    async fn fail(&mut self, job: &Job, failure: Failure) -> Answer {
        let error = match failure.retryable {
            Some(false) => JobError::fail(failure.error),
            _ => JobError::retry(failure.error),
        };
        let error = match failure.retry_after_ms {
            Some(ms) => error.after(Duration::from_millis(ms)),
            None => error,
        };
        self.order(job, Do::Fail(error))
    }

    /// The answer gets lost, then the connection: it says the end again by itself.
    async fn complete_twice(&mut self, job: &Job, result: Value) -> [Answer; 2] {
        self.line.swallow_answers();
        let first = self.complete(job, result).await;
        let url = format!("{}/api/v1/jobs/{}", self.server.1, job.id);
        eventually("the result is stored", async || {
            let found: Value = self.server.0.get(&url).send().await.ok()?.json().await.ok()?;
            (found["status"] == "COMPLETED").then_some(())
        })
        .await;
        let url = format!("{}/api/v1/workers/{}", self.server.1, self.id);
        let shown = async || self.server.0.get(&url).send().await.ok()?.json::<Value>().await.ok();
        let life = shown().await.unwrap()["registrationId"].clone();
        self.line.open();
        self.line.cut();
        // It had nothing in hand, so this is a new life.
        eventually("the worker is back", async || shown().await.filter(|worker| worker["registrationId"] != life))
            .await;
        [first, Ok(())]
    }

    async fn next_cancel(&mut self) -> (String, i64) {
        in_time("an order to stop", self.cancels.recv()).await.expect("the worker is there")
    }

    async fn away(&mut self, how: Away) {
        match how {
            Away::Closed => self.line.shut(),
            Away::Silent => self.line.swallow(),
        }
    }

    async fn back(&mut self) -> Option<bool> {
        self.line.open();
        self.line.cut();
        let (http, url) = &self.server;
        // The same life with a new connection is seen at its sign of life only; who was lost has a new one.
        eventually("the worker is back", async || {
            let worker: Value =
                http.get(format!("{url}/api/v1/workers/{}", self.id)).send().await.ok()?.json().await.ok()?;
            (worker["deadline"].is_null() && worker["endedAt"].is_null()).then_some(())
        })
        .await;
        None
    }

    /// As its process would: all of it at once.
    async fn cut(self) {
        self.work.abort();
    }

    async fn leave(self) {
        self.stop.cancel();
        let Sdk { work, line, .. } = self;
        in_time("the worker ends", work).await.unwrap().unwrap();
        drop(line);
    }
}
