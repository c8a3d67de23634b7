//! The worker's side of the protocol: handles frames from the server and queues frames to send.
//!
//! A session has no socket. The connection passes frames and handler messages in and takes frames out. Connections are
//! lost and replaced; the session stays, and with it the running jobs and the unacknowledged reports.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use tokio::{sync::mpsc, time::Instant};
use tokio_tungstenite::tungstenite::Utf8Bytes;

use crate::{
    Context, Error, ErrorCode,
    context::{HandlerMessage, StepAck, StepRejection},
    frames::{FrameError, JobFrame, ReportKind, RunKey, ServerFrame, ServerFrameKind},
    outgoing,
    reports::PendingReports,
    runs::Runs,
    settings::Settings,
    shutdown::Phase,
};

/// How many updates of handlers are kept while there is no connection. The oldest ones are dropped.
const MAX_BUFFERED_UPDATES: usize = 1_000;
const DEFAULT_HEARTBEAT: Duration = Duration::from_secs(30);
/// Heartbeats are answered at most this often per interval, or two sides that answer each other would never stop.
const ANSWERS_PER_INTERVAL: u32 = 4;
/// After this many intervals without a frame from the server the connection counts as dead.
const SILENT_INTERVALS: u32 = 3;

pub(crate) struct Session {
    pub(crate) settings: Arc<Settings>,
    pub(crate) phase: Phase,
    pub(crate) runs: Runs,
    pub(crate) reports: PendingReports<StepAck>,
    messages: mpsc::Sender<HandlerMessage>,
    worker_id: String,
    /// Lets this worker resume its registration, with its jobs.
    session_token: Option<String>,
    /// Frames to send, in this order. Cleared when the connection is lost: reports are kept in `reports`.
    pub(crate) outbox: VecDeque<Utf8Bytes>,
    /// Progress and log lines that handlers wrote while there was no connection.
    buffered_updates: VecDeque<Utf8Bytes>,
    registration: Option<Registration>,
    /// Whether the server has accepted this worker before.
    pub(crate) was_registered: bool,
    /// Whether an ephemeral worker has received its one job.
    pub(crate) has_taken_only_job: bool,
    pub(crate) close_reason: Option<CloseReason>,
}

/// The state of a registered connection.
struct Registration {
    heartbeat_interval: Duration,
    last_frame_at: Instant,
    last_heartbeat_at: Instant,
    /// When to check whether the server is silent. Set again at each check, not with every frame.
    silence_check_at: Instant,
}

/// Why the session closes its connection.
#[derive(Debug)]
pub(crate) enum CloseReason {
    Silence,
    Rejected(Error),
}

impl Session {
    pub fn new(settings: Arc<Settings>, messages: mpsc::Sender<HandlerMessage>) -> Session {
        Session {
            worker_id: settings.worker_id.clone(),
            session_token: settings.session_token.clone(),
            runs: Runs::new(settings.handlers.clone(), settings.handler_runtime.clone(), messages.clone()),
            settings,
            phase: Phase::Working,
            reports: PendingReports::new(),
            messages,
            outbox: VecDeque::new(),
            buffered_updates: VecDeque::new(),
            registration: None,
            was_registered: false,
            has_taken_only_job: false,
            close_reason: None,
        }
    }

    /// Starts a new connection: registers the worker with the runs it still works on.
    pub fn on_connected(&mut self) {
        let in_flight = self.runs.in_flight().chain(self.reports.finished_runs()).collect();
        self.close_reason = None;
        self.outbox.clear();
        let token = self.session_token.as_deref();
        self.outbox.push_back(outgoing::register(&self.settings, &self.worker_id, token, in_flight));
    }

    pub fn on_disconnected(&mut self) {
        self.registration = None;
        self.outbox.clear();
    }

    pub fn is_registered(&self) -> bool {
        self.registration.is_some()
    }

    pub fn on_frame(&mut self, text: &str, now: Instant) {
        if let Some(registration) = &mut self.registration {
            registration.last_frame_at = now;
        }
        let frame: ServerFrame<'_> = match serde_json::from_str(text) {
            Ok(frame) => frame,
            Err(error) => {
                tracing::warn!(%error, "invalid frame from the server");
                return;
            }
        };
        match frame.kind {
            ServerFrameKind::Job => {
                if let Some(job) = frame.job {
                    self.on_job(job, now);
                }
            }
            ServerFrameKind::Ack => self.on_ack(frame, now),
            ServerFrameKind::Registered => self.on_registered(&frame, now),
            ServerFrameKind::Cancel => self.on_cancel(&frame, now),
            ServerFrameKind::Drain => self.on_drain(),
            ServerFrameKind::Resume => self.on_resume(),
            ServerFrameKind::Heartbeat => self.answer_heartbeat(now),
            ServerFrameKind::Error => {
                if let Some(error) = frame.error {
                    self.on_error(error);
                }
            }
            ServerFrameKind::Unknown => {}
        }
    }

    fn on_registered(&mut self, frame: &ServerFrame<'_>, now: Instant) {
        let interval = frame.heartbeat_interval_ms.map_or(DEFAULT_HEARTBEAT, |ms| Duration::from_millis(ms.max(10)));
        self.registration = Some(Registration {
            heartbeat_interval: interval,
            last_frame_at: now,
            last_heartbeat_at: now,
            silence_check_at: now + interval * SILENT_INTERVALS,
        });
        self.was_registered = true;
        let (worker, types) = (frame.worker_id.as_deref().unwrap_or(&self.worker_id), self.settings.handlers.names());
        tracing::info!(url = ?self.settings.address, worker, types = types.join(","), "connected, waiting for jobs");
        if let Some(id) = frame.worker_id.as_deref().filter(|id| *id != self.worker_id) {
            self.worker_id = id.to_owned();
        }
        if let Some(token) = &frame.session_token {
            self.session_token = Some(token.0.to_string());
        }
        if frame.resumed != Some(true) {
            for key in self.runs.all() {
                tracing::warn!(job = %key.job, run = %key.run, "job reassigned after a long disconnection");
                self.runs.mark_reassigned(key, now);
            }
        }
        if self.phase.is_shutting_down() || self.has_taken_only_job {
            self.outbox.push_back(outgoing::drain());
        }
        self.outbox.extend(self.buffered_updates.drain(..));
        self.outbox.extend(self.reports.frames());
    }

    fn on_job(&mut self, job: JobFrame<'_>, now: Instant) {
        let key = RunKey { job: job.id, run: job.run };
        if self.runs.contains(key) || self.reports.contains_end_of(key) {
            return;
        }
        let is_full = self.runs.in_flight_count() >= self.settings.concurrency as usize;
        if is_full || self.has_taken_only_job || !self.phase.accepts_jobs() {
            // Returns the job: the server may have sent it before it knew that this worker drains.
            self.report(key, ReportKind::Release, outgoing::release(key), None);
            return;
        }
        self.has_taken_only_job = self.settings.ephemeral;
        self.runs.start(Context::new(job, self.messages.clone()), now);
    }

    fn on_cancel(&mut self, frame: &ServerFrame<'_>, now: Instant) {
        let Some(job) = frame.job_id else { return };
        for key in self.runs.of_job(job, frame.run) {
            tracing::debug!(%job, run = %key.run, reason = frame.reason.as_deref(), "run cancelled");
            self.runs.cancel(key, now);
        }
    }

    fn on_ack(&mut self, frame: ServerFrame<'_>, now: Instant) {
        let Some(job) = frame.job_id else { return };
        let Some(report) = self.reports.acknowledge(job, frame.run, frame.of) else { return };
        if frame.ok == Some(true) {
            if let Some(waiter) = report.waiter {
                let _ = waiter.send(Ok(()));
            }
            return;
        }
        let no_reason = || FrameError { code: ErrorCode::from("UNKNOWN"), message: "no reason given".into() };
        let FrameError { code, message } = frame.error.unwrap_or_else(no_reason);
        tracing::warn!(%job, run = %report.run, report = ?report.kind, %code, message, "report rejected");
        if matches!(code, ErrorCode::StaleRun | ErrorCode::NotFound) {
            self.runs.mark_reassigned(RunKey { job, run: report.run }, now);
        }
        if let Some(waiter) = report.waiter {
            let _ = waiter.send(Err(StepRejection { code, message }));
        }
    }

    fn on_error(&mut self, FrameError { code, message }: FrameError) {
        if self.registration.is_some() {
            tracing::warn!(%code, message, "frame rejected by the server");
            return;
        }
        let status = code.status();
        self.close_reason = Some(CloseReason::Rejected(Error::Response {
            status,
            code,
            message,
            details: Vec::new(),
            retry_after: None,
        }));
    }

    pub fn on_message(&mut self, message: HandlerMessage) {
        match message {
            HandlerMessage::Update { frame } if self.registration.is_some() => self.outbox.push_back(frame),
            HandlerMessage::Update { frame } => {
                if self.buffered_updates.len() == MAX_BUFFERED_UPDATES {
                    self.buffered_updates.pop_front();
                }
                self.buffered_updates.push_back(frame);
            }
            HandlerMessage::Step { key, frame, waiter } if self.runs.contains(key) => {
                self.report(key, ReportKind::Step, frame, Some(waiter));
            }
            // The run was aborted. Dropping the waiter ends the step with an error.
            HandlerMessage::Step { .. } => {}
            HandlerMessage::Finished { key, kind, frame } => self.on_finished(key, kind, frame),
            HandlerMessage::Completed => self.report_completed(),
        }
    }

    /// Reports the jobs that the executor has completed.
    pub fn report_completed(&mut self) {
        for message in self.runs.take_completed() {
            self.on_message(message);
        }
    }

    fn on_finished(&mut self, key: RunKey, kind: ReportKind, frame: Utf8Bytes) {
        let Some(ended) = self.runs.end(key) else { return };
        if kind == ReportKind::Fail && ended.was_reassigned {
            // It failed because it was cancelled. A result is still reported: the server may accept it.
            return;
        }
        if self.settings.ephemeral && self.registration.is_some() {
            // Drains before it reports the end of the run, so that the server assigns no second job.
            self.outbox.push_back(outgoing::drain());
        }
        if kind == ReportKind::Fail && self.phase.cancels_runs() {
            // It failed because this worker shuts down: that must not use an attempt of the job.
            return self.release(key);
        }
        self.report(key, kind, frame, None);
    }

    pub(crate) fn release(&mut self, key: RunKey) {
        self.reports.remove_steps(key);
        self.report(key, ReportKind::Release, outgoing::release(key), None);
    }

    fn report(&mut self, key: RunKey, kind: ReportKind, frame: Utf8Bytes, waiter: Option<StepAck>) {
        if self.registration.is_some() {
            self.outbox.push_back(frame.clone());
        }
        self.reports.add(key, kind, frame, waiter);
    }

    fn answer_heartbeat(&mut self, now: Instant) {
        let Some(registration) = &mut self.registration else { return };
        if now - registration.last_heartbeat_at >= registration.heartbeat_interval / ANSWERS_PER_INTERVAL {
            registration.last_heartbeat_at = now;
            self.outbox.push_back(outgoing::heartbeat());
        }
    }

    /// Does everything that is due. Must be called no later than `wake_at`.
    pub fn tick(&mut self, now: Instant) {
        if self.runs.check(now) {
            self.report_completed();
        }
        self.advance_phase(now);
        let Some(registration) = &mut self.registration else { return };
        if now >= registration.last_heartbeat_at + registration.heartbeat_interval {
            registration.last_heartbeat_at = now;
            self.outbox.push_back(outgoing::heartbeat());
        }
        if now >= registration.silence_check_at {
            registration.silence_check_at =
                registration.last_frame_at + registration.heartbeat_interval * SILENT_INTERVALS;
            if now >= registration.silence_check_at {
                self.close_reason = Some(CloseReason::Silence);
            }
        }
    }

    pub fn wake_at(&self) -> Option<Instant> {
        let registration = self.registration.as_ref();
        let heartbeat = registration.map(|it| it.last_heartbeat_at + it.heartbeat_interval);
        let silence = registration.map(|it| it.silence_check_at);
        [heartbeat, silence, self.runs.next_check_at(), self.phase.until()].into_iter().flatten().min()
    }
}
