//! `faena.v1.WorkerService`: serves a worker over a gRPC stream. Messages mean the same as on a WebSocket.

use std::{pin::Pin, time::Duration};

use faena_domain::{ErrorCode, Progress, SecretText, Timestamp};
use faena_engine::workers::{
    CloseReason, Connection, Delivery, Registration, Rejection, ReportKind, Transport, WorkerCommand,
};
use faena_wire::v1::{
    Ack, CancelRun, ConnectRequest, ConnectResponse, Drain, Error, Heartbeat, JobDelivery, Register, Registered,
    ReportProgress, Resume, connect_request::Message as Incoming, connect_response::Message as Outgoing,
    worker_service_server::WorkerService,
};
use futures_util::Stream;
use serde_json::value::RawValue;
use tokio::sync::mpsc;
use tonic::{Request, Response, Status, Streaming};

use super::convert;
use crate::{
    Api, ApiError, access,
    context::{self, Caller},
    traffic::HasRegistered,
    workers::{
        report,
        session::{self, REGISTER_TIMEOUT, Received, SEND_TIMEOUT, WorkerMessage, WorkerStream},
    },
};

pub struct Workers(pub Api);

/// Number of messages that may wait for a worker to read them.
const MAX_UNREAD: usize = 1_024;

type Sender = mpsc::Sender<Result<ConnectResponse, Status>>;

#[tonic::async_trait]
impl WorkerService for Workers {
    type ConnectStream = Pin<Box<dyn Stream<Item = Result<ConnectResponse, Status>> + Send>>;

    async fn connect(
        &self,
        request: Request<Streaming<ConnectRequest>>,
    ) -> Result<Response<Self::ConnectStream>, Status> {
        let caller = context::caller();
        let registered = request.extensions().get::<HasRegistered>().cloned().unwrap_or_default();
        let mut incoming = request.into_inner();
        let (sender, receiver) = mpsc::channel(MAX_UNREAD);
        let api = self.0.clone();
        tokio::spawn(async move {
            match register(&api, &caller, &mut incoming, &sender).await {
                Ok(connection) => {
                    registered.set();
                    let max_bytes = api.parser().limits.max_body_bytes;
                    session::serve(api, connection.worker, GrpcStream { incoming, sender, max_bytes }).await;
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

/// Registers the worker with its first message. A first message other than `register` ends the call.
async fn register(
    api: &Api,
    caller: &Caller,
    incoming: &mut Streaming<ConnectRequest>,
    sender: &Sender,
) -> Result<Connection, Status> {
    let first = tokio::time::timeout(REGISTER_TIMEOUT, incoming.message()).await;
    let first = first.map_err(|_| Status::deadline_exceeded("no register message arrived in time"))??;
    let Some(Incoming::Register(message)) = first.and_then(|message| message.message) else {
        return Err(Status::invalid_argument("the first message must be register"));
    };
    let token = message.token.clone().filter(|token| !token.is_empty()).map(SecretText::from);
    let registration = registration(message).map_err(|rejection| Status::from(ApiError::from(rejection)))?;
    let registration = access::authorize_registration(api, caller, registration, token.as_ref())?;
    let connected = api.engine.register_worker(registration, Transport::Grpc, Timestamp::now()).await;
    let connection = connected.map_err(|error| Status::from(ApiError::from(error)))?;
    let heartbeat_ms = u64::try_from(api.engine.config.worker_heartbeat.as_millis()).unwrap_or(u64::MAX);
    let registered = Registered {
        worker_id: connection.worker.key.clone(),
        heartbeat_interval: Some(convert::duration(heartbeat_ms)),
        resumed: connection.resumed,
        session_token: connection.session_token.reveal().to_owned(),
    };
    send(sender, Outgoing::Registered(registered)).await;
    Ok(connection)
}

fn registration(message: Register) -> Result<Registration, Rejection> {
    let in_flight = message.in_flight.map(|in_flight| {
        let runs = in_flight.runs.into_iter().map(|run| Some((run.job_id.parse().ok()?, run.run)));
        runs.collect::<Option<Vec<_>>>()
    });
    if in_flight == Some(None) {
        return Err(invalid("in_flight: every job_id must be a UUID"));
    }
    Ok(Registration {
        worker_id: message.worker_id,
        session_token: message.session_token.filter(|token| !token.is_empty()).map(SecretText::from),
        name: message.name,
        version: message.version,
        capabilities: message.capabilities,
        queues: message.queues,
        concurrency: message.concurrency,
        reports_starts: message.reports_starts,
        api_key: None,
        in_flight: in_flight.flatten(),
    })
}

fn invalid(message: impl Into<String>) -> Rejection {
    Rejection::new(ErrorCode::ValidationError, message)
}

/// Sends a message. Returns `false` if the stream is closed or the worker does not read within `SEND_TIMEOUT`.
async fn send(sender: &Sender, message: Outgoing) -> bool {
    let message = Ok(ConnectResponse { message: Some(message) });
    matches!(tokio::time::timeout(SEND_TIMEOUT, sender.send(message)).await, Ok(Ok(())))
}

struct GrpcStream {
    incoming: Streaming<ConnectRequest>,
    sender: Sender,
    /// Size above which a message is rejected.
    max_bytes: usize,
}

impl WorkerStream for GrpcStream {
    async fn receive(&mut self) -> Received {
        let Ok(Some(message)) = self.incoming.message().await else { return Received::Closed };
        match decode(message, self.max_bytes) {
            Ok(message) => Received::Message(message),
            Err(rejection) => Received::Rejected(rejection),
        }
    }

    async fn send_commands(&mut self, commands: Vec<WorkerCommand>) -> bool {
        for command in commands {
            if !send(&self.sender, encode(command)).await {
                return false;
            }
        }
        true
    }

    async fn send_errors(&mut self, rejections: Vec<Rejection>) -> bool {
        for rejection in rejections {
            if !send(&self.sender, Outgoing::Error(error(rejection))).await {
                return false;
            }
        }
        true
    }

    async fn send_heartbeat(&mut self) -> bool {
        send(&self.sender, Outgoing::Heartbeat(Heartbeat {})).await
    }

    async fn close(self, reason: CloseReason) {
        let status = match reason {
            CloseReason::Left => return,
            CloseReason::NotReading | CloseReason::TooManyMessages => Status::resource_exhausted(reason.as_str()),
            CloseReason::KeyEnded => Status::unauthenticated(reason.as_str()),
            _ => Status::unavailable(reason.as_str()),
        };
        let _ = tokio::time::timeout(Duration::from_secs(2), self.sender.send(Err(status))).await;
    }
}

/// Returns the size of the text in a message that has no limit of its own, so that only `max_bytes` limits it.
fn content_bytes(message: &ConnectRequest) -> usize {
    match &message.message {
        Some(Incoming::Complete(report)) => report.result_json.as_ref().map_or(0, String::len),
        Some(Incoming::Step(report)) => report.result_json.len(),
        Some(Incoming::Fail(report)) => report.error.len(),
        Some(Incoming::Log(report)) => report.message.len(),
        _ => 0,
    }
}

fn decode(message: ConnectRequest, max_bytes: usize) -> Result<WorkerMessage, Rejection> {
    if content_bytes(&message) > max_bytes {
        return Err(Rejection::new(
            ErrorCode::PayloadTooLarge,
            format!("the message is larger than {max_bytes} bytes"),
        ));
    }
    let message = message.message.ok_or_else(|| invalid("the message is empty or of an unknown kind"))?;
    let (job_id, run, kind) = match message {
        Incoming::Heartbeat(_) => return Ok(WorkerMessage::Heartbeat),
        Incoming::Drain(_) => return Ok(WorkerMessage::Drain),
        Incoming::Leave(_) => return Ok(WorkerMessage::Leave),
        Incoming::Register(message) => return Ok(WorkerMessage::Register(registration(message)?, None)),
        Incoming::Started(report) => (report.job_id, report.run, ReportKind::Started),
        Incoming::Release(report) => (report.job_id, report.run, ReportKind::Release),
        Incoming::Progress(report) => decode_progress(report)?,
        Incoming::Log(report) => {
            let kind = report::log(Some(report.message), report.event.as_deref())?;
            (report.job_id, report.run, kind)
        }
        Incoming::Step(report) => {
            let result = check_json_text("result_json", Some(&report.result_json))?;
            (report.job_id, report.run, report::step(Some(report.name), result, report.total_steps)?)
        }
        Incoming::Complete(report) => {
            let result = check_json_text("result_json", report.result_json.as_deref())?;
            (report.job_id, report.run, report::complete(result)?)
        }
        Incoming::Fail(report) => {
            let retry_after_ms = report.retry_after.map(convert::milliseconds).map(u64::try_from).transpose();
            let retry_after_ms = retry_after_ms.map_err(|_| invalid("retry_after: must not be negative"))?;
            (report.job_id, report.run, report::fail(report.error, report.retryable, retry_after_ms))
        }
    };
    let job_id = job_id.parse().map_err(|_| invalid("job_id: must be a UUID"))?;
    if run.is_none() {
        return Err(invalid("run: is required; it is in the delivered job"));
    }
    report::new(Some(job_id), run, kind).map(WorkerMessage::Report)
}

fn decode_progress(report: ReportProgress) -> Result<(String, Option<i64>, ReportKind), Rejection> {
    let progress = report.progress.map(|progress| Progress {
        phase: progress.phase,
        current_step: progress.current_step,
        completed_steps: progress.completed_steps,
        total_steps: progress.total_steps,
        percentage: progress.percentage,
        message: progress.message,
    });
    Ok((report.job_id, report.run, report::progress(progress)?))
}

/// Checks that a field contains valid JSON. Returns `None` for an empty field.
///
/// On a WebSocket, parsing the frame has already checked it.
fn check_json_text<'a>(field: &str, text: Option<&'a str>) -> Result<Option<&'a str>, Rejection> {
    let Some(text) = text.filter(|text| !text.is_empty()) else { return Ok(None) };
    match serde_json::from_str::<&RawValue>(text) {
        Ok(raw) => Ok(Some(raw.get())),
        Err(error) => Err(invalid(format!("{field}: is not valid JSON: {error}"))),
    }
}

fn encode(command: WorkerCommand) -> Outgoing {
    match command {
        WorkerCommand::Job(delivery) => Outgoing::Job(job(delivery)),
        WorkerCommand::Ack(ack) => Outgoing::Ack(Ack {
            job_id: ack.job_id.to_string(),
            run: ack.run,
            of: convert::report_kind(ack.report),
            ok: ack.rejection.is_none(),
            error: ack.rejection.map(error),
        }),
        WorkerCommand::Cancel { job_id, run, reason } => {
            Outgoing::Cancel(CancelRun { job_id: job_id.to_string(), run, reason })
        }
        WorkerCommand::Drain => Outgoing::Drain(Drain {}),
        WorkerCommand::Resume => Outgoing::Resume(Resume {}),
    }
}

fn error(rejection: Rejection) -> Error {
    Error { code: rejection.code.to_string(), message: rejection.message }
}

fn job(delivery: Delivery) -> JobDelivery {
    let job = &delivery.job.claimed;
    JobDelivery {
        id: job.id.to_string(),
        name: job.options.name.clone().unwrap_or_else(|| delivery.lane.kind.clone()),
        r#type: delivery.lane.kind.clone(),
        queue: delivery.lane.queue.clone(),
        payload_json: job.payload.clone(),
        run: job.run,
        attempt: job.attempt(),
        retry_count: job.retry_count,
        max_retries: job.options.retry.max_retries,
        correlation_id: delivery.job.correlation_id(),
        traceparent: delivery.traceparent.clone(),
        schedule_id: job.options.schedule_id.clone(),
        schedule_due: job.options.schedule_due.map(convert::timestamp),
        deadline: Some(convert::timestamp(delivery.deadline)),
        steps: delivery.steps.into_iter().map(convert::step).collect(),
    }
}
