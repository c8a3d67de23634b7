//! A worker on a stream, whichever: what it says is sorted, counted and passed on; what it is told leaves at once.
//!
//! One task per worker. What has arrived is taken together, what there is to tell leaves together. What is not understood is
//! answered and changes nothing; who floods or never reads is sent away with a reason.

use std::{ops::ControlFlow, sync::Arc, time::Duration};

use faena_domain::{ErrorCode, Timestamp};
use faena_engine::workers::{ConnectedWorker, Order, Refusal, Registration, Report, ReportKind};
use futures_util::FutureExt;

use super::flow::Flow;
use crate::{Api, ApiError};

/// How long a connection may be open before the worker says who it is.
pub const INTRODUCTION: Duration = Duration::from_secs(10);
/// How long a worker may take to read what it was told.
pub const READING: Duration = Duration::from_secs(20);
/// Messages that are taken at a time.
const TOGETHER: usize = 512;

/// What a message says.
pub enum Said {
    Register(Registration),
    Report(Report),
    Heartbeat,
    Drain,
    Leave,
}

/// What comes next from a worker.
pub enum Next {
    Said(Said),
    /// A message that is not understood, or not sound.
    Refused(Refusal),
    /// A sign of life, and no more.
    Alive,
    Over,
}

/// Why we end a stream.
pub enum Ending {
    /// The connection is not wanted any more.
    Closed(String),
    Deaf,
    Flood,
    /// The worker has said goodbye.
    Goodbye,
}

pub const SERVER_STOPS: &str = "the server stops; connect again";

impl Ending {
    pub fn reason(&self) -> &str {
        match self {
            Ending::Closed(reason) => reason,
            Ending::Deaf => "it does not read what it is told",
            Ending::Flood => "too many messages",
            Ending::Goodbye => "goodbye",
        }
    }
}

/// The two kinds of streams. Each `bool`: the worker reads.
pub trait Line: Send {
    /// Safe to be dropped while it waits.
    fn next(&mut self) -> impl Future<Output = Next> + Send;
    fn tell(&mut self, orders: Vec<Order>) -> impl Future<Output = bool> + Send;
    fn refuse(&mut self, refusals: Vec<Refusal>) -> impl Future<Output = bool> + Send;
    fn beat(&mut self) -> impl Future<Output = bool> + Send;
    fn close(self, ending: Ending) -> impl Future<Output = ()> + Send;
}

/// Until the stream ends, whoever ends it.
pub async fn serve(api: Api, worker: Arc<ConnectedWorker>, mut line: impl Line) {
    let mut session = Session { flow: Flow::new(worker.concurrency), api, worker, left: false };
    let ending = session.talk(&mut line).await;
    let Session { api, worker, left, .. } = session;
    match ending {
        Some(ending) => {
            if let Ending::Deaf | Ending::Flood = ending {
                tracing::warn!(worker = worker.key, reason = ending.reason(), "a worker is sent away");
                worker.close(ending.reason());
            }
            line.close(ending).await;
        }
        None => drop(line),
    }
    api.engine.worker_gone(&worker, left, Timestamp::now()).await;
}

struct Session {
    api: Api,
    worker: Arc<ConnectedWorker>,
    flow: Flow,
    /// It has said goodbye.
    left: bool,
}

/// What was heard at one go.
#[derive(Default)]
struct Heard {
    reports: Vec<Report>,
    refusals: Vec<Refusal>,
    drains: bool,
}

impl Session {
    async fn talk(&mut self, line: &mut impl Line) -> Option<Ending> {
        let mut beat = tokio::time::interval(self.api.engine.config.worker_heartbeat);
        beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        beat.tick().await;
        loop {
            let worker = self.worker.clone();
            let reads = tokio::select! {
                () = worker.closing.cancelled() => {
                    return Some(Ending::Closed(worker.close_reason().unwrap_or_else(|| SERVER_STOPS.into())));
                }
                () = self.api.closing.cancelled() => return Some(Ending::Closed(SERVER_STOPS.into())),
                next = line.next() => match self.hear(line, next).await {
                    ControlFlow::Continue(reads) => reads,
                    ControlFlow::Break(ending) => return ending,
                },
                orders = worker.orders() => line.tell(orders).await,
                _ = beat.tick() => line.beat().await,
            };
            if !reads {
                return Some(Ending::Deaf);
            }
        }
    }

    /// Takes what has arrived. `Break`: the stream ends, by us if there is an ending to tell.
    async fn hear(&mut self, line: &mut impl Line, first: Next) -> ControlFlow<Option<Ending>, bool> {
        let now = Timestamp::now();
        self.worker.seen(now);
        let mut heard = Heard::default();
        let mut next = Some(first);
        let mut ended = None;
        for _ in 0..TOGETHER {
            let Some(message) = next else { break };
            if let ControlFlow::Break(ending) = self.sort(message, &mut heard) {
                ended = Some(ending);
                break;
            }
            next = line.next().now_or_never();
        }
        let refusals = self.pass_on(heard, now).await;
        let reads = refusals.is_empty() || line.refuse(refusals).await;
        ended.map_or(ControlFlow::Continue(reads), ControlFlow::Break)
    }

    fn sort(&mut self, message: Next, heard: &mut Heard) -> ControlFlow<Option<Ending>> {
        let drops = match &message {
            Next::Over => return ControlFlow::Break(None),
            Next::Said(Said::Leave) => {
                self.left = true;
                return ControlFlow::Break(Some(Ending::Goodbye));
            }
            Next::Said(Said::Report(report)) if self.is_free(report) => 0.0,
            Next::Said(Said::Register(_)) | Next::Refused(_) => 10.0,
            Next::Said(_) | Next::Alive => 1.0,
        };
        if drops > 0.0 && !self.flow.take(drops) {
            return ControlFlow::Break(Some(Ending::Flood));
        }
        match message {
            Next::Said(Said::Report(report)) => heard.reports.push(report),
            Next::Said(Said::Drain) => heard.drains = true,
            Next::Said(Said::Register(_)) => {
                let text = "this worker is registered already on this connection";
                heard.refusals.push(Refusal::new(ErrorCode::Conflict, text));
            }
            Next::Refused(refusal) => heard.refusals.push(refusal),
            Next::Said(Said::Heartbeat | Said::Leave) | Next::Alive | Next::Over => {}
        }
        ControlFlow::Continue(())
    }

    /// The end of a job in hand costs nothing: there are only so many.
    fn is_free(&self, report: &Report) -> bool {
        let end = matches!(report.kind, ReportKind::Complete { .. } | ReportKind::Fail(_) | ReportKind::Release);
        end && self.worker.holds(report.job_id)
    }

    /// Answers with what is to be refused.
    async fn pass_on(&self, heard: Heard, now: Timestamp) -> Vec<Refusal> {
        let Heard { reports, mut refusals, drains } = heard;
        if drains && let Err(error) = self.api.engine.worker_drain(&self.worker.key, true, None, now).await {
            refusals.push(Refusal::new(ErrorCode::Unavailable, ApiError::from(error).message));
        }
        if !reports.is_empty() {
            self.api.engine.report_handler.take(&self.worker, reports, now).await;
        }
        refusals
    }
}
