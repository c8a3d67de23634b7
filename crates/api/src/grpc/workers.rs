//! `faena.v1.WorkerService.Connect`: a worker on a gRPC stream, with the same meaning as on a WebSocket.

use std::{pin::Pin, time::Duration};

use faena_domain::{ErrorCode, Progress, Timestamp};
use faena_engine::workers::{Connection, Order, Refusal, Registration, ReportKind, Transport};
use faena_wire::v1::{
    Ack, CancelOrder, Drain, Error, Heartbeat, JobDelivery, Register, Registered, Resume, ServerMessage, Step,
    WorkerMessage, server_message::Message as Told, worker_message::Message as Says,
    worker_service_server::WorkerService,
};
use futures_util::Stream;
use tokio::sync::mpsc;
use tonic::{Request, Response, Status, Streaming};

use crate::{
    Api, ApiError,
    workers::{
        report,
        session::{self, Ending, INTRODUCTION, Line, Next, READING, Said},
    },
};

pub struct Workers(pub Api);

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
                Ok(connection) => {
                    let limit = api.parser().limits.max_body_bytes;
                    session::serve(api, connection.worker, Messages { incoming, sender, limit }).await;
                }
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
    let registration = registration(told).map_err(|refusal| Status::from(ApiError::from(refusal)))?;
    let admitted = api.engine.worker_connect(registration, Transport::Grpc, Timestamp::now()).await;
    let connection = admitted.map_err(|error| Status::from(ApiError::from(error)))?;
    let registered = Registered {
        worker_id: connection.worker.key.clone(),
        heartbeat_interval_ms: u64::try_from(api.engine.config.worker_heartbeat.as_millis()).unwrap_or(u64::MAX),
        resumed: connection.resumed,
    };
    send(sender, Told::Registered(registered)).await;
    Ok(connection)
}

fn registration(told: Register) -> Result<Registration, Refusal> {
    let holds = told.holds.map(|holds| {
        let jobs = holds.jobs.into_iter().map(|held| Some((held.job_id.parse().ok()?, held.run)));
        jobs.collect::<Option<Vec<_>>>()
    });
    if holds == Some(None) {
        return Err(Refusal::new(ErrorCode::ValidationError, "holds: every job_id must be a UUID"));
    }
    Ok(Registration {
        worker_id: told.worker_id,
        name: told.name,
        capabilities: told.capabilities,
        queues: told.queues,
        concurrency: told.concurrency,
        tells_starts: told.tells_starts,
        holds: holds.flatten(),
    })
}

async fn send(sender: &Outgoing, message: Told) -> bool {
    let message = Ok(ServerMessage { message: Some(message) });
    matches!(tokio::time::timeout(READING, sender.send(message)).await, Ok(Ok(())))
}

struct Messages {
    incoming: Streaming<WorkerMessage>,
    sender: Outgoing,
    /// The largest message that is read.
    limit: usize,
}

impl Line for Messages {
    async fn next(&mut self) -> Next {
        let Ok(Some(message)) = self.incoming.message().await else { return Next::Over };
        match read(message, self.limit) {
            Ok(said) => Next::Said(said),
            Err(refusal) => Next::Refused(refusal),
        }
    }

    async fn tell(&mut self, orders: Vec<Order>) -> bool {
        for order in orders {
            if !send(&self.sender, told(order)).await {
                return false;
            }
        }
        true
    }

    async fn refuse(&mut self, refusals: Vec<Refusal>) -> bool {
        for Refusal { code, message } in refusals {
            if !send(&self.sender, Told::Error(Error { code: code.to_string(), message })).await {
                return false;
            }
        }
        true
    }

    async fn beat(&mut self) -> bool {
        send(&self.sender, Told::Heartbeat(Heartbeat {})).await
    }

    async fn close(self, ending: Ending) {
        let status = match &ending {
            Ending::Goodbye => return,
            Ending::Closed(reason) => Status::unavailable(reason),
            Ending::Deaf | Ending::Flood => Status::resource_exhausted(ending.reason()),
        };
        let _ = tokio::time::timeout(Duration::from_secs(2), self.sender.send(Err(status))).await;
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

fn read(message: WorkerMessage, limit: usize) -> Result<Said, Refusal> {
    let invalid = |text: &str| Refusal::new(ErrorCode::ValidationError, text);
    if prost_len(&message) > limit {
        return Err(Refusal::new(ErrorCode::PayloadTooLarge, format!("the message is larger than {limit} bytes")));
    }
    let message = message.message.ok_or_else(|| invalid("the message says nothing that is known here"))?;
    let (job_id, run, kind) = match message {
        Says::Heartbeat(_) => return Ok(Said::Heartbeat),
        Says::Drain(_) => return Ok(Said::Drain),
        Says::Leave(_) => return Ok(Said::Leave),
        Says::Register(told) => return registration(told).map(Said::Register),
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
    };
    let job_id = job_id.parse().map_err(|_| invalid("job_id: must be a UUID"))?;
    report::about(Some(job_id), run, kind).map(Said::Report)
}

/// Unlike on a WebSocket, this JSON was not read as part of anything: it must be JSON at all.
fn json<'a>(field: &str, text: Option<&'a str>) -> Result<Option<&'a str>, Refusal> {
    let Some(text) = text.filter(|text| !text.is_empty()) else { return Ok(None) };
    match serde_json::from_str::<&serde_json::value::RawValue>(text) {
        Ok(raw) => Ok(Some(raw.get())),
        Err(error) => Err(Refusal::new(ErrorCode::ValidationError, format!("{field}: is not valid JSON: {error}"))),
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
                schedule_id: job.options.schedule_id.clone(),
                schedule_due_ms: job.options.schedule_due.map(Timestamp::as_ms),
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
            error: ack.refusal.map(|refusal| Error { code: refusal.code.to_string(), message: refusal.message }),
        }),
        Order::Cancel { job_id, run, reason } => Told::Cancel(CancelOrder { job_id: job_id.to_string(), run, reason }),
        Order::Drain => Told::Drain(Drain {}),
        Order::Resume => Told::Resume(Resume {}),
    }
}
