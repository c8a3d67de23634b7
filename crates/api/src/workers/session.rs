//! Serves a worker over a stream: WebSocket or gRPC.
//!
//! Each worker has one task. The task handles all messages that have arrived as one batch, and sends all commands that
//! wait as one batch. It answers an invalid message with an error and changes nothing. It disconnects a worker that
//! sends too many messages or does not read, and tells it the reason.

use std::{ops::ControlFlow, sync::Arc, time::Duration};

use faena_domain::{ErrorCode, SecretText, Timestamp};
use faena_engine::workers::{CloseReason, ConnectedWorker, Registration, Rejection, Report, ReportKind, WorkerCommand};
use futures_util::FutureExt;

use super::message_budget::MessageBudget;
use crate::{Api, ApiError};

/// Time within which a worker must register after it has connected.
pub const REGISTER_TIMEOUT: Duration = Duration::from_secs(5);
/// Time within which a worker must read what the server sends.
pub const SEND_TIMEOUT: Duration = Duration::from_secs(20);
/// Largest number of messages in one batch.
const MAX_BATCH: usize = 512;

// Tokens that a message costs, see `MessageBudget`.
const FREE: f64 = 0.0;
const MESSAGE_COST: f64 = 1.0;
const INVALID_MESSAGE_COST: f64 = 10.0;

/// Message from a worker.
pub enum WorkerMessage {
    /// With the API key, if it is in the message.
    Register(Registration, Option<SecretText>),
    Report(Report),
    Heartbeat,
    Drain,
    Leave,
}

/// Input from the stream of a worker.
pub enum Received {
    Message(WorkerMessage),
    /// A message that is not understood or not valid.
    Rejected(Rejection),
    /// A keep-alive without content, such as a WebSocket pong.
    KeepAlive,
    Closed,
}

/// Stream of one worker. Every `send_…` returns `false` if the worker does not read within [`SEND_TIMEOUT`].
pub trait WorkerStream: Send {
    /// Waits for the next message. Dropping the future loses no message.
    fn receive(&mut self) -> impl Future<Output = Received> + Send;
    fn send_commands(&mut self, commands: Vec<WorkerCommand>) -> impl Future<Output = bool> + Send;
    fn send_errors(&mut self, rejections: Vec<Rejection>) -> impl Future<Output = bool> + Send;
    fn send_heartbeat(&mut self) -> impl Future<Output = bool> + Send;
    fn close(self, reason: CloseReason) -> impl Future<Output = ()> + Send;
}

/// Serves a registered worker until its stream ends.
pub async fn serve(api: Api, worker: Arc<ConnectedWorker>, mut stream: impl WorkerStream) {
    let mut session = Session { budget: MessageBudget::new(worker.concurrency), api, worker, has_left: false };
    let reason = session.run(&mut stream).await;
    let Session { api, worker, has_left, .. } = session;
    if has_left {
        // The registration ends before the stream, so that the worker's id is free when the worker sees the end.
        api.engine.disconnect_worker(&worker, true, Timestamp::now()).await;
    }
    match reason {
        Some(reason) => {
            if let CloseReason::NotReading | CloseReason::TooManyMessages | CloseReason::KeyEnded = reason {
                tracing::warn!(worker = worker.key, reason = reason.as_str(), "worker disconnected by server");
                worker.close(reason);
            }
            stream.close(reason).await;
        }
        None => drop(stream),
    }
    if !has_left {
        api.engine.disconnect_worker(&worker, false, Timestamp::now()).await;
    }
}

fn contains_job(commands: &[WorkerCommand]) -> bool {
    commands.iter().any(|command| matches!(command, WorkerCommand::Job(_)))
}

struct Session {
    api: Api,
    worker: Arc<ConnectedWorker>,
    budget: MessageBudget,
    has_left: bool,
}

/// Messages that have arrived together.
#[derive(Default)]
struct Batch {
    reports: Vec<Report>,
    rejections: Vec<Rejection>,
    drains: bool,
}

impl Session {
    /// Runs until the stream ends. Returns why the server ends it, or `None` if the worker has closed it.
    async fn run(&mut self, stream: &mut impl WorkerStream) -> Option<CloseReason> {
        let mut heartbeat = tokio::time::interval(self.api.engine.config.worker_heartbeat);
        heartbeat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        heartbeat.tick().await;
        let mut key_end = self.api.key_end(self.worker.api_key);
        loop {
            let worker = self.worker.clone();
            let is_reading = tokio::select! {
                () = worker.closing.cancelled() => {
                    return Some(worker.close_reason().unwrap_or(CloseReason::ServerStopping));
                }
                () = self.api.closing.cancelled() => return Some(CloseReason::ServerStopping),
                () = &mut key_end => return Some(CloseReason::KeyEnded),
                received = stream.receive() => match self.handle(stream, received).await {
                    ControlFlow::Continue(is_reading) => is_reading,
                    ControlFlow::Break(reason) => return reason,
                },
                commands = worker.next_commands() => {
                    if contains_job(&commands) && !self.api.engine.holds_lease(Timestamp::now()).await {
                        // This server was suspended: its jobs may have been assigned again meanwhile.
                        return Some(CloseReason::ServerDeclaredDead);
                    }
                    stream.send_commands(commands).await
                }
                _ = heartbeat.tick() => stream.send_heartbeat().await,
            };
            if !is_reading {
                return Some(CloseReason::NotReading);
            }
        }
    }

    /// Handles everything that has arrived.
    ///
    /// Returns whether the worker reads, or breaks with the reason why the stream ends.
    async fn handle(
        &mut self,
        stream: &mut impl WorkerStream,
        first: Received,
    ) -> ControlFlow<Option<CloseReason>, bool> {
        let now = Timestamp::now();
        self.worker.record_heartbeat(now);
        let mut batch = Batch::default();
        let mut next = Some(first);
        let mut ended = None;
        for _ in 0..MAX_BATCH {
            let Some(received) = next else { break };
            if let ControlFlow::Break(reason) = self.add(received, &mut batch) {
                ended = Some(reason);
                break;
            }
            next = stream.receive().now_or_never();
        }
        let rejections = self.apply(batch, now).await;
        let is_reading = rejections.is_empty() || stream.send_errors(rejections).await;
        ended.map_or(ControlFlow::Continue(is_reading), ControlFlow::Break)
    }

    fn add(&mut self, received: Received, batch: &mut Batch) -> ControlFlow<Option<CloseReason>> {
        let cost = match &received {
            Received::Closed => return ControlFlow::Break(None),
            Received::Message(WorkerMessage::Leave) => {
                self.has_left = true;
                return ControlFlow::Break(Some(CloseReason::Left));
            }
            Received::Message(WorkerMessage::Report(report)) if self.is_exempt_from_budget(report) => FREE,
            Received::Message(WorkerMessage::Register(..)) | Received::Rejected(_) => INVALID_MESSAGE_COST,
            Received::Message(_) | Received::KeepAlive => MESSAGE_COST,
        };
        if cost > FREE && !self.budget.take(cost) {
            return ControlFlow::Break(Some(CloseReason::TooManyMessages));
        }
        match received {
            Received::Message(WorkerMessage::Report(report)) => batch.reports.push(report),
            Received::Message(WorkerMessage::Drain) => batch.drains = true,
            Received::Message(WorkerMessage::Register(..)) => {
                let message = "the worker is already registered on this connection";
                batch.rejections.push(Rejection::new(ErrorCode::Conflict, message));
            }
            Received::Rejected(rejection) => batch.rejections.push(rejection),
            Received::Message(WorkerMessage::Heartbeat | WorkerMessage::Leave)
            | Received::KeepAlive
            | Received::Closed => {}
        }
        ControlFlow::Continue(())
    }

    /// Returns whether a report costs no token: it ends a job in flight, and the number of these jobs is limited.
    fn is_exempt_from_budget(&self, report: &Report) -> bool {
        let ends_run = matches!(report.kind, ReportKind::Complete { .. } | ReportKind::Fail(_) | ReportKind::Release);
        ends_run && self.worker.has_job(report.job_id)
    }

    /// Passes a batch on to the engine. Returns the errors to send back.
    async fn apply(&self, batch: Batch, now: Timestamp) -> Vec<Rejection> {
        let Batch { reports, mut rejections, drains } = batch;
        if drains && let Err(error) = self.api.engine.set_worker_drain(&self.worker.key, true, None, now).await {
            rejections.push(Rejection::new(ErrorCode::Unavailable, ApiError::from(error).message));
        }
        if !reports.is_empty() {
            self.api.engine.reports.handler.handle(&self.worker, reports, now).await;
        }
        rejections
    }
}
