//! A worker of the SDK: its handlers follow the test's commands, behind a proxy that the test can interrupt.

use std::{collections::HashMap, time::Duration};

use ::faena::{Context, JobError, Progress, Worker};
use serde_json::Value;
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
};
use tokio_util::sync::CancellationToken;

use super::{Interruption, Job, ReportResult, TestWorker, WorkerOptions, within_timeout};
use crate::{
    faena::{Faena, eventually},
    proxy::Proxy,
};

pub struct SdkWorker {
    id: String,
    proxy: Proxy,
    server: (reqwest::Client, String),
    work: JoinHandle<Result<(), ::faena::Error>>,
    stop: CancellationToken,
    jobs: mpsc::UnboundedReceiver<(Job, mpsc::UnboundedSender<HandlerCommand>)>,
    cancels: mpsc::UnboundedReceiver<(String, i64)>,
    handlers: HashMap<(String, i64), mpsc::UnboundedSender<HandlerCommand>>,
}

/// The next action of a handler.
enum HandlerCommand {
    Progress(Progress),
    Log(String),
    LogEvent(String, String),
    Step { name: String, result: Value, total: Option<u32>, done: oneshot::Sender<Result<Value, String>> },
    Complete(Value),
    Fail(JobError),
}

/// What a handler reports to the test: the job it received, and its cancellation.
#[derive(Clone)]
struct HandlerEvents {
    jobs: mpsc::UnboundedSender<(Job, mpsc::UnboundedSender<HandlerCommand>)>,
    cancels: mpsc::UnboundedSender<(String, i64)>,
}

async fn handler(events: HandlerEvents, context: Context, payload: Value) -> Result<Value, JobError> {
    let job = Job {
        id: context.id().to_string(),
        run: context.run().as_i64(),
        kind: context.kind().into(),
        queue: context.queue().into(),
        payload,
        attempt: context.attempt().into(),
        retry_count: context.retry_count().into(),
        correlation_id: context.correlation_id().into(),
        traceparent: context.traceparent().map(str::to_owned),
        schedule: context.schedule_id().map(|id| (id.to_owned(), context.schedule_due().unwrap().to_string())),
        steps: Vec::new(),
    };
    let key = (job.id.clone(), job.run);
    let (sender, mut commands) = mpsc::unbounded_channel();
    let _ = events.jobs.send((job, sender));
    let mut is_cancelled = false;
    loop {
        let command = tokio::select! {
            command = commands.recv() => command,
            () = context.cancelled(), if !is_cancelled => {
                is_cancelled = true;
                let _ = events.cancels.send(key.clone());
                continue;
            }
        };
        match command {
            Some(HandlerCommand::Progress(progress)) => context.progress(progress),
            Some(HandlerCommand::Log(message)) => context.log(message),
            Some(HandlerCommand::LogEvent(event, message)) => context.log_event(&event, message),
            Some(HandlerCommand::Step { name, result, total, done }) => {
                if let Some(total) = total {
                    context.set_total_steps(total);
                }
                let stored = context.step(&name, async || Ok(result)).await;
                let _ = done.send(stored.map_err(|error| error.message().to_owned()));
            }
            Some(HandlerCommand::Complete(result)) => return Ok(result),
            Some(HandlerCommand::Fail(error)) => return Err(error),
            None => return Err(JobError::cancelled()),
        }
    }
}

impl SdkWorker {
    fn command(&self, job: &Job, command: HandlerCommand) -> ReportResult {
        self.handlers[&(job.id.clone(), job.run)].send(command).map_err(|_| "the handler has ended".into())
    }

    /// Returns the connected worker with this name.
    async fn find(http: &reqwest::Client, url: &str, name: &str) -> Option<Value> {
        let list = http.get(format!("{url}/api/v1/workers?state=Ready,Busy")).send().await.ok()?;
        let list: Value = list.json().await.ok()?;
        list["workers"].as_array()?.iter().find(|worker| worker["name"] == name).cloned()
    }
}

impl TestWorker for SdkWorker {
    const RETURNS_ANSWERS: bool = false;

    async fn connect(faena: &Faena, options: WorkerOptions) -> Self {
        let proxy = Proxy::start(&faena.url).await;
        let (job_sender, jobs) = mpsc::unbounded_channel();
        let (cancel_sender, cancels) = mpsc::unbounded_channel();
        let events = HandlerEvents { jobs: job_sender, cancels: cancel_sender };
        let mut worker =
            Worker::new().url(&proxy.url).name(&options.id).concurrency(options.concurrency).queues(options.queues);
        if let Some(version) = options.version {
            worker = worker.version(version);
        }
        for kind in options.capabilities {
            let events = events.clone();
            worker = worker.handle(kind, move |context, payload: Value| handler(events.clone(), context, payload));
        }
        let stop = CancellationToken::new();
        let work = tokio::spawn(worker.run_until(stop.clone().cancelled_owned()));
        let found =
            eventually("the worker is connected", async || SdkWorker::find(&faena.http, &faena.url, &options.id).await)
                .await;
        let id = found["id"].as_str().unwrap().to_owned();
        let server = (faena.http.clone(), faena.url.clone());
        SdkWorker { id, proxy, server, work, stop, jobs, cancels, handlers: HashMap::new() }
    }

    fn id(&self) -> &str {
        &self.id
    }

    async fn next_job(&mut self) -> Job {
        let (job, handler) = within_timeout("a job", self.jobs.recv()).await.expect("the worker has ended");
        self.handlers.insert((job.id.clone(), job.run), handler);
        job
    }

    async fn report(&mut self, job: &Job, report: &str, mut body: Value) -> ReportResult {
        let text = |name: &str| body[name].as_str().unwrap().to_owned();
        let command = match report {
            // The SDK reports the start itself.
            "started" => return Ok(()),
            "progress" => HandlerCommand::Progress(serde_json::from_value(body["progress"].take()).unwrap()),
            "log" if body["event"].is_string() => HandlerCommand::LogEvent(text("event"), text("message")),
            "log" => HandlerCommand::Log(text("message")),
            "complete" => HandlerCommand::Complete(body["result"].take()),
            "fail" => {
                let is_final = body["retryable"] == false;
                let error = if is_final { JobError::fail(text("error")) } else { JobError::retry(text("error")) };
                HandlerCommand::Fail(match body["retryAfterMs"].as_u64() {
                    Some(ms) => error.after(Duration::from_millis(ms)),
                    None => error,
                })
            }
            other => panic!("a handler does not report {other:?}"),
        };
        self.command(job, command)
    }

    async fn step(&mut self, job: &Job, name: &str, result: Value, total: Option<u32>) -> Result<Value, String> {
        let (done, answer) = oneshot::channel();
        self.command(job, HandlerCommand::Step { name: name.into(), result, total, done })?;
        within_timeout("a step is stored", answer).await.unwrap()
    }

    /// Drops the answer and then the connection, after which the SDK reports the result again.
    async fn complete_twice(&mut self, job: &Job, result: Value) -> [ReportResult; 2] {
        self.proxy.drop_answers();
        let first = self.complete(job, result).await;
        let url = format!("{}/api/v1/jobs/{}", self.server.1, job.id);
        eventually("the result is stored", async || {
            let found: Value = self.server.0.get(&url).send().await.ok()?.json().await.ok()?;
            (found["status"] == "COMPLETED").then_some(())
        })
        .await;
        let url = format!("{}/api/v1/workers/{}", self.server.1, self.id);
        let fetch = async || self.server.0.get(&url).send().await.ok()?.json::<Value>().await.ok();
        let registration = fetch().await.unwrap()["registrationId"].clone();
        self.proxy.forward();
        self.proxy.disconnect_all();
        // The worker had no job in flight, so the server creates a new registration.
        eventually("the worker has reconnected", async || {
            fetch().await.filter(|worker| worker["registrationId"] != registration)
        })
        .await;
        [first, Ok(())]
    }

    async fn next_cancel(&mut self) -> (String, i64) {
        within_timeout("a cancel", self.cancels.recv()).await.expect("the worker has ended")
    }

    async fn interrupt(&mut self, how: Interruption) {
        match how {
            Interruption::Closed => self.proxy.refuse(),
            Interruption::Silent => self.proxy.drop_all(),
        }
    }

    async fn reconnect(&mut self) -> Option<bool> {
        self.proxy.forward();
        self.proxy.disconnect_all();
        let (http, url) = &self.server;
        // A resumed registration is visible only through its deadline; a lost worker gets a new registration.
        eventually("the worker has reconnected", async || {
            let worker: Value =
                http.get(format!("{url}/api/v1/workers/{}", self.id)).send().await.ok()?.json().await.ok()?;
            (worker["deadline"].is_null() && worker["endedAt"].is_null()).then_some(())
        })
        .await;
        None
    }

    /// Aborts the whole worker immediately, like a killed process.
    async fn crash(self) {
        self.work.abort();
    }

    async fn leave(self) {
        self.stop.cancel();
        let SdkWorker { work, proxy, .. } = self;
        within_timeout("the worker ends", work).await.unwrap().unwrap();
        drop(proxy);
    }
}
