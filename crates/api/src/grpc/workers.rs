//! `faena.v1.WorkerService.Connect`: a worker on a gRPC stream, with the same meaning as on a WebSocket.

use std::{ops::ControlFlow, pin::Pin, sync::Arc, time::Duration};

use faena_domain::{Progress, Timestamp};
use faena_engine::workers::{Connected, Connection, Door, Order, Refusal, Registration, Report, ReportKind};
use faena_wire::v1::{
    Ack, CancelOrder, Drain, Error, Heartbeat, JobDelivery, Registered, Resume, ServerMessage, Step, WorkerMessage,
    server_message::Message as Told, worker_message::Message as Says, worker_service_server::WorkerService,
};
use futures_util::{FutureExt, Stream};
use tokio::sync::mpsc;
use tonic::{Request, Response, Status, Streaming};

use crate::{
    Api, ApiError,
    workers::{flow::Flow, report},
};

pub struct Workers(pub Api);

/// See the WebSocket's bounds of the same names.
const INTRODUCTION: Duration = Duration::from_secs(10);
const READING: Duration = Duration::from_secs(20);
const TOGETHER: usize = 512;
/// Messages on their way to a worker.
const ON_THE_WAY: usize = 1_024;

type Outgoing = mpsc::Sender<Result<ServerMessage, Status>>;

#[tonic::async_trait]
impl WorkerService for Workers {
    type ConnectStream = Pin<Box<dyn Stream<Item = Result<ServerMessage, Status>> + Send>>;

    async fn connect(
        &self,
        request: Request<Streaming<WorkerMessage>>,
    ) -> Result<Response<Self::ConnectStream>, Status> {
        let mut incoming = request.into_inner();
        let (sender, receiver) = mpsc::channel(ON_THE_WAY);
        let api = self.0.clone();
        tokio::spawn(async move {
            match introduce(&api, &mut incoming, &sender).await {
                Ok(connection) => serve(api, connection.worker, incoming, sender).await,
                Err(status) => {
                    let _ = sender.send(Err(status)).await;
                }
            }
        });
        let stream = futures_util::stream::unfold(receiver, |mut receiver| async move {
            let message = receiver.recv().await?;
            Some((message, receiver))
        });
        Ok(Response::new(Box::pin(stream)))
    }
}

/// The first message is `register`; one that is not good ends the call with the reason.
async fn introduce(
    api: &Api,
    incoming: &mut Streaming<WorkerMessage>,
    sender: &Outgoing,
) -> Result<Connection, Status> {
    let first = tokio::time::timeout(INTRODUCTION, incoming.message()).await;
    let first = first.map_err(|_| Status::deadline_exceeded("no register message came"))??;
    let Some(Says::Register(told)) = first.and_then(|message| message.message) else {
        return Err(Status::invalid_argument("the first message must be register"));
    };
    let holds = match told.holds {
        Some(holds) => {
            let jobs = holds.jobs.into_iter().map(|held| Some((held.job_id.parse().ok()?, held.run)));
            let jobs: Option<Vec<_>> = jobs.collect();
            Some(jobs.ok_or_else(|| Status::invalid_argument("holds: every job_id must be a UUID"))?)
        }
        None => None,
    };
    let registration = Registration {
        worker_id: told.worker_id,
        name: told.name,
        capabilities: told.capabilities,
        queues: told.queues,
        concurrency: told.concurrency,
        tells_starts: told.tells_starts,
        holds,
    };
    let admitted = api.engine.worker_connect(registration, Door::Grpc, Timestamp::now()).await;
    let connection = admitted.map_err(|error| Status::from(ApiError::from(error)))?;
    let registered = Registered {
        worker_id: connection.worker.key.clone(),
        heartbeat_interval_ms: u64::try_from(api.engine.config.worker_heartbeat.as_millis()).unwrap_or(u64::MAX),
        resumed: connection.resumed,
    };
    send(sender, Told::Registered(registered)).await;
    Ok(connection)
}

async fn send(sender: &Outgoing, message: Told) -> bool {
    let message = Ok(ServerMessage { message: Some(message) });
    matches!(tokio::time::timeout(READING, sender.send(message)).await, Ok(Ok(())))
}

async fn serve(api: Api, worker: Arc<Connected>, incoming: Streaming<WorkerMessage>, sender: Outgoing) {
    let mut session = Session { flow: Flow::new(worker.concurrency), api, worker, incoming, sender, left: false };
    let ending = session.talk().await;
    let Session { api, worker, sender, left, incoming, .. } = session;
    if let Some(status) = ending {
        let _ = tokio::time::timeout(Duration::from_secs(2), sender.send(Err(status))).await;
    }
    drop((sender, incoming));
    api.engine.worker_gone(&worker, left, Timestamp::now()).await;
}

struct Session {
    api: Api,
    worker: Arc<Connected>,
    incoming: Streaming<WorkerMessage>,
    sender: Outgoing,
    flow: Flow,
    left: bool,
}

impl Session {
    /// Until the stream ends; by us, if there is a status to tell.
    async fn talk(&mut self) -> Option<Status> {
        let mut beat = tokio::time::interval(self.api.engine.config.worker_heartbeat);
        beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        beat.tick().await;
        let deaf = || Some(Status::resource_exhausted("it does not read what it is told"));
        loop {
            let worker = self.worker.clone();
            tokio::select! {
                () = worker.closing.cancelled() => {
                    let reason = worker.close_reason().unwrap_or_else(|| "the server stops; connect again".into());
                    return Some(Status::unavailable(reason));
                }
                () = self.api.closing.cancelled() => return Some(Status::unavailable("the server stops; connect again")),
                message = self.incoming.message() => {
                    if let ControlFlow::Break(status) = self.hear(message).await {
                        return status;
                    }
                }
                orders = worker.orders() => {
                    for order in orders {
                        if !send(&self.sender, told(order)).await {
                            return deaf();
                        }
                    }
                }
                _ = beat.tick() => {
                    if !send(&self.sender, Told::Heartbeat(Heartbeat {})).await {
                        return deaf();
                    }
                }
            }
        }
    }

    async fn hear(&mut self, first: Result<Option<WorkerMessage>, Status>) -> ControlFlow<Option<Status>> {
        let now = Timestamp::now();
        self.worker.seen(now);
        let mut next = first;
        let mut reports = Vec::new();
        let mut ended = None;
        for _ in 0..TOGETHER {
            let Ok(Some(message)) = next else {
                ended = Some(None);
                break;
            };
            if let Err(status) = self.take(message, &mut reports).await {
                ended = Some(status);
                break;
            }
            next = match self.incoming.message().now_or_never() {
                Some(next) => next,
                None => break,
            };
        }
        if !reports.is_empty() {
            self.api.engine.desk.take(&self.worker, reports, now).await;
        }
        ended.map_or(ControlFlow::Continue(()), ControlFlow::Break)
    }

    /// `Err`: the stream ends, with a status if there is one to tell.
    async fn take(&mut self, message: WorkerMessage, reports: &mut Vec<Report>) -> Result<(), Option<Status>> {
        let flood = || Some(Status::resource_exhausted("too many messages"));
        let size = prost_len(&message);
        let read = if size > self.api.body_bytes {
            let text = format!("the message is larger than {} bytes", self.api.body_bytes);
            Err(Refusal::new("PAYLOAD_TOO_LARGE", text))
        } else {
            match message.message {
                Some(Says::Heartbeat(_)) => return if self.flow.take(1.0) { Ok(()) } else { Err(flood()) },
                Some(Says::Leave(_)) => {
                    self.left = true;
                    return Err(None);
                }
                Some(Says::Drain(_)) if !self.flow.take(1.0) => return Err(flood()),
                Some(Says::Drain(_)) => {
                    let drained = self.api.engine.worker_drain(&self.worker.key, true, Timestamp::now()).await;
                    match drained {
                        Ok(_) => return Ok(()),
                        Err(error) => Err(Refusal::new("UNAVAILABLE", ApiError::from(error).message)),
                    }
                }
                message => read(message),
            }
        };
        match read {
            Ok(report) => {
                let end =
                    matches!(report.kind, ReportKind::Complete { .. } | ReportKind::Fail(_) | ReportKind::Release);
                let free = end && self.worker.holds(report.job_id);
                if !free && !self.flow.take(1.0) {
                    return Err(flood());
                }
                reports.push(report);
                Ok(())
            }
            Err(Refusal { code, message }) => {
                if !self.flow.take(10.0) {
                    return Err(flood());
                }
                let error = Error { code: code.into(), message };
                if send(&self.sender, Told::Error(error)).await { Ok(()) } else { Err(None) }
            }
        }
    }
}

fn prost_len(message: &WorkerMessage) -> usize {
    match &message.message {
        Some(Says::Complete(told)) => told.result_json.as_ref().map_or(0, String::len),
        Some(Says::Step(told)) => told.result_json.len(),
        Some(Says::Fail(told)) => told.error.len(),
        Some(Says::Log(told)) => told.message.len(),
        _ => 0,
    }
}

fn read(message: Option<Says>) -> Result<Report, Refusal> {
    let invalid = |text: &str| Refusal::new("VALIDATION_ERROR", text);
    let (job_id, run, kind) = match message.ok_or_else(|| invalid("the message says nothing that is known here"))? {
        Says::Started(told) => (told.job_id, told.run, ReportKind::Started),
        Says::Release(told) => (told.job_id, told.run, ReportKind::Release),
        Says::Progress(told) => {
            let progress = told.progress.map(|progress| Progress {
                phase: progress.phase,
                current_step: progress.current_step,
                completed_steps: progress.completed_steps,
                total_steps: progress.total_steps,
                percentage: progress.percentage,
                message: progress.message,
            });
            (told.job_id, told.run, report::progress(progress)?)
        }
        Says::Log(told) => (told.job_id, told.run, report::log(Some(told.message))?),
        Says::Step(told) => {
            let result = json("result_json", Some(&told.result_json))?;
            (told.job_id, told.run, report::step(Some(told.name), result, told.total_steps)?)
        }
        Says::Complete(told) => {
            let result = json("result_json", told.result_json.as_deref())?;
            (told.job_id, told.run, report::complete(result)?)
        }
        Says::Fail(told) => (told.job_id, told.run, report::fail(told.error, told.retryable, told.retry_after_ms)),
        _ => return Err(Refusal::new("CONFLICT", "this worker is registered already on this stream")),
    };
    let job_id = job_id.parse().map_err(|_| invalid("job_id: must be a UUID"))?;
    report::about(Some(job_id), run, kind)
}

/// Unlike on a WebSocket, this JSON was not read as part of anything: it must be JSON at all.
fn json<'a>(field: &str, text: Option<&'a str>) -> Result<Option<&'a str>, Refusal> {
    let Some(text) = text.filter(|text| !text.is_empty()) else { return Ok(None) };
    match serde_json::from_str::<&serde_json::value::RawValue>(text) {
        Ok(raw) => Ok(Some(raw.get())),
        Err(error) => Err(Refusal::new("VALIDATION_ERROR", format!("{field}: is not valid JSON: {error}"))),
    }
}

fn told(order: Order) -> Told {
    match order {
        Order::Job(delivery) => {
            let job = &delivery.held.job;
            Told::Job(JobDelivery {
                id: job.id.to_string(),
                name: job.options.name.clone().unwrap_or_else(|| delivery.lane.kind.clone()),
                r#type: delivery.lane.kind.clone(),
                queue: delivery.lane.queue.clone(),
                payload_json: job.payload.clone(),
                run: job.run,
                retry_count: job.retry_count,
                max_retries: job.options.retry.max_retries,
                correlation_id: delivery.held.correlation_id(),
                traceparent: job.options.traceparent.clone(),
                deadline_ms: delivery.deadline.as_ms(),
                steps: delivery
                    .steps
                    .into_iter()
                    .map(|step| Step { name: step.name, result_json: step.result.get().into() })
                    .collect(),
            })
        }
        Order::Ack(ack) => Told::Ack(Ack {
            job_id: ack.job_id.to_string(),
            run: ack.run,
            of: ack.of.into(),
            ok: ack.refusal.is_none(),
            error: ack.refusal.map(|refusal| Error { code: refusal.code.into(), message: refusal.message }),
        }),
        Order::Cancel { job_id, run, reason } => Told::Cancel(CancelOrder { job_id: job_id.to_string(), run, reason }),
        Order::Drain => Told::Drain(Drain {}),
        Order::Resume => Told::Resume(Resume {}),
    }
}
