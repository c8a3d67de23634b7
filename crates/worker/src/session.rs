//! A worker's side of the talk with the server: what comes in, what it changes, what is to be sent.
//!
//! It knows no socket. The link brings frames and notes in and takes frames out; connections come and go, the session stays,
//! and with it the running jobs and the reports that nobody has acknowledged.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use faena_wire::frames::{HeldRun, JobFrame, ServerFrame};
use tokio::{sync::mpsc, time::Instant};
use tokio_tungstenite::tungstenite::Utf8Bytes;

use crate::{
    Context, Error,
    context::{Note, Refusal, Waiter},
    definition::Definition,
    ledger::{Key, Ledger, Of},
    outgoing,
    runs::Runs,
    stopping::Phase,
};

/// What is told between two connections is kept up to this number.
const MOST_TELLINGS: usize = 1_000;
const DEFAULT_HEARTBEAT: Duration = Duration::from_secs(30);
/// A heartbeat is answered, but no faster than so many times per interval, or two sides that answer would never stop.
const ANSWERS_PER_INTERVAL: u32 = 4;
/// After so many intervals without a word from the server the connection counts as dead.
const SILENT_INTERVALS: u32 = 3;

pub(crate) struct Session {
    pub(crate) definition: Arc<Definition>,
    pub(crate) phase: Phase,
    pub(crate) runs: Runs,
    pub(crate) ledger: Ledger<Waiter>,
    notes: mpsc::Sender<Note>,
    worker_id: String,
    /// To be sent, in this order. Emptied when the connection is lost: what matters of it stands in the ledger.
    pub(crate) outbox: VecDeque<Utf8Bytes>,
    /// What was told while there was no connection.
    tellings: VecDeque<Utf8Bytes>,
    registered: Option<Registered>,
    /// It was registered once, so this server takes it.
    pub(crate) was_registered: bool,
    /// Of an ephemeral worker: it has had its job.
    pub(crate) had_its_job: bool,
    pub(crate) verdict: Option<Verdict>,
}

/// What is known of the connection that is registered.
struct Registered {
    interval: Duration,
    heard_at: Instant,
    sent_beat_at: Instant,
    /// Looked at when it has come; what was heard since moves it on.
    silent_at: Instant,
}

/// Why a connection must end.
#[derive(Debug)]
pub(crate) enum Verdict {
    Silent,
    Refused(Error),
}

impl Session {
    pub fn new(definition: Arc<Definition>, notes: mpsc::Sender<Note>) -> Session {
        Session {
            worker_id: definition.worker_id.clone(),
            runs: Runs::new(definition.handlers.clone(), definition.handlers_on.clone(), notes.clone()),
            definition,
            phase: Phase::Working,
            ledger: Ledger::new(),
            notes,
            outbox: VecDeque::new(),
            tellings: VecDeque::new(),
            registered: None,
            was_registered: false,
            had_its_job: false,
            verdict: None,
        }
    }

    /// A connection stands: says who this is and what it has in its hands.
    pub fn connected(&mut self) {
        let held = self.runs.held().chain(self.ledger.ended());
        let holds = held.map(|key| HeldRun { job_id: key.job, run: key.run }).collect();
        self.verdict = None;
        self.outbox.clear();
        self.outbox.push_back(outgoing::register(&self.definition, &self.worker_id, holds));
    }

    pub fn disconnected(&mut self) {
        self.registered = None;
        self.outbox.clear();
    }

    pub fn is_registered(&self) -> bool {
        self.registered.is_some()
    }

    pub fn on_frame(&mut self, text: &str, now: Instant) {
        if let Some(registered) = &mut self.registered {
            registered.heard_at = now;
        }
        let frame: ServerFrame<'_> = match serde_json::from_str(text) {
            Ok(frame) => frame,
            Err(error) => {
                tracing::warn!(%error, "a frame of the server was not understood");
                return;
            }
        };
        match frame.kind.as_ref() {
            "job" => {
                if let Some(job) = frame.job {
                    self.on_job(job, now);
                }
            }
            "ack" => self.on_ack(&frame, now),
            "registered" => self.on_registered(&frame, now),
            "cancel" => {
                if let Some(job) = frame.job_id {
                    for key in self.runs.of_job(job, frame.run) {
                        tracing::debug!(job = %job, reason = frame.reason.as_deref(), "told to stop");
                        self.runs.cancel(key, now);
                    }
                }
            }
            "drain" => self.told_to_drain(),
            "resume" => self.told_to_resume(),
            "heartbeat" => self.answer_heartbeat(now),
            "error" => self.on_error(&frame),
            // A newer server may say more.
            _ => {}
        }
    }

    fn on_registered(&mut self, frame: &ServerFrame<'_>, now: Instant) {
        let interval = frame.heartbeat_interval_ms.map_or(DEFAULT_HEARTBEAT, |ms| Duration::from_millis(ms.max(10)));
        self.registered = Some(Registered {
            interval,
            heard_at: now,
            sent_beat_at: now,
            silent_at: now + interval * SILENT_INTERVALS,
        });
        self.was_registered = true;
        if let Some(id) = frame.worker_id.as_deref().filter(|id| *id != self.worker_id) {
            self.worker_id = id.to_owned();
        }
        if frame.resumed != Some(true) {
            for key in self.runs.all() {
                tracing::warn!(job = %key.job, run = key.run, "was away too long; the job has been given to another worker");
                self.runs.give_away(key, now);
            }
        }
        if self.phase.is_stopping() || self.had_its_job {
            self.outbox.push_back(outgoing::plain("drain"));
        }
        self.outbox.extend(self.tellings.drain(..));
        self.outbox.extend(self.ledger.unsettled());
    }

    fn on_job(&mut self, job: JobFrame<'_>, now: Instant) {
        let key = Key { job: job.id, run: job.run };
        if self.runs.contains(key) || self.ledger.has_end_of(key) {
            return;
        }
        let definition = &self.definition;
        let full = self.runs.held_count() >= definition.concurrency as usize;
        if full || self.had_its_job || !self.phase.takes_jobs() {
            // It was on its way when this worker said that it drains.
            self.report(key, Of::Release, outgoing::release(key), None);
            return;
        }
        self.had_its_job = definition.ephemeral;
        self.runs.start(Context::new(job, self.notes.clone()), now);
    }

    fn on_ack(&mut self, frame: &ServerFrame<'_>, now: Instant) {
        let Some(job) = frame.job_id else { return };
        let Some(report) = self.ledger.settle(job, frame.run, frame.of.as_deref()) else { return };
        if frame.ok == Some(true) {
            if let Some(waiter) = report.waiter {
                let _ = waiter.send(Ok(()));
            }
            return;
        }
        let (code, message) = match &frame.error {
            Some(error) => (error.code.as_ref(), error.message.as_ref()),
            None => ("UNKNOWN", "no reason was given"),
        };
        tracing::warn!(%job, run = report.run, of = report.of.as_str(), code, message, "a report was refused");
        if matches!(code, "STALE_RUN" | "NOT_FOUND") {
            self.runs.give_away(Key { job, run: report.run }, now);
        }
        if let Some(waiter) = report.waiter {
            let _ = waiter.send(Err(Refusal { code: code.to_owned(), message: message.to_owned() }));
        }
    }

    fn on_error(&mut self, frame: &ServerFrame<'_>) {
        let Some(error) = &frame.error else { return };
        if self.registered.is_some() {
            tracing::warn!(code = %error.code, message = %error.message, "the server did not understand a frame");
            return;
        }
        let (code, message) = (error.code.to_string(), error.message.to_string());
        let status = status_of(&code);
        self.verdict = Some(Verdict::Refused(Error::Refused { status, code, message, details: Vec::new() }));
    }

    pub fn on_note(&mut self, note: Note) {
        match note {
            Note::Tell { text } if self.registered.is_some() => self.outbox.push_back(text),
            Note::Tell { text } => {
                if self.tellings.len() == MOST_TELLINGS {
                    self.tellings.pop_front();
                }
                self.tellings.push_back(text);
            }
            // A run that was given up has nobody to answer to; dropping the waiter tells it.
            Note::Step { key, text, waiter } if self.runs.contains(key) => {
                self.report(key, Of::Step, text, Some(waiter));
            }
            Note::Step { .. } => {}
            Note::End { key, of, text } => self.on_end(key, of, text),
            Note::Shelf => self.clear_shelf(),
        }
    }

    /// Reports what the lanes have done.
    pub fn clear_shelf(&mut self) {
        for note in self.runs.take_done() {
            self.on_note(note);
        }
    }

    fn on_end(&mut self, key: Key, of: Of, text: Utf8Bytes) {
        let Some(ended) = self.runs.end(key) else { return };
        if of == Of::Fail && ended.given_away {
            // It failed because it was stopped. A result, though, the server may still want.
            return;
        }
        if self.definition.ephemeral && self.registered.is_some() {
            // Said before the end, so that no second job can follow it.
            self.outbox.push_back(outgoing::plain("drain"));
        }
        if of == Of::Fail && self.phase.cancels() {
            // It failed because this worker stops: that must not cost the job a try.
            return self.give_back(key);
        }
        self.report(key, of, text, None);
    }

    pub(crate) fn give_back(&mut self, key: Key) {
        self.ledger.drop_steps(key);
        self.report(key, Of::Release, outgoing::release(key), None);
    }

    fn report(&mut self, key: Key, of: Of, text: Utf8Bytes, waiter: Option<Waiter>) {
        if self.registered.is_some() {
            self.outbox.push_back(text.clone());
        }
        self.ledger.add(key, of, text, waiter);
    }

    fn answer_heartbeat(&mut self, now: Instant) {
        let Some(registered) = &mut self.registered else { return };
        if now - registered.sent_beat_at >= registered.interval / ANSWERS_PER_INTERVAL {
            registered.sent_beat_at = now;
            self.outbox.push_back(outgoing::plain("heartbeat"));
        }
    }

    /// Does what is due. To be called no later than `wake_at` says.
    pub fn tick(&mut self, now: Instant) {
        if self.runs.look(now) {
            self.clear_shelf();
        }
        self.move_phase(now);
        let Some(registered) = &mut self.registered else { return };
        if now >= registered.sent_beat_at + registered.interval {
            registered.sent_beat_at = now;
            self.outbox.push_back(outgoing::plain("heartbeat"));
        }
        if now >= registered.silent_at {
            registered.silent_at = registered.heard_at + registered.interval * SILENT_INTERVALS;
            if now >= registered.silent_at {
                self.verdict = Some(Verdict::Silent);
            }
        }
    }

    pub fn wake_at(&self) -> Option<Instant> {
        let registered = self.registered.as_ref();
        let beat = registered.map(|registered| registered.sent_beat_at + registered.interval);
        let silent = registered.map(|registered| registered.silent_at);
        [beat, silent, self.runs.look_at(), self.phase.until()].into_iter().flatten().min()
    }
}

fn status_of(code: &str) -> u16 {
    match code {
        "VALIDATION_ERROR" => 400,
        "UNAUTHORIZED" => 401,
        "FORBIDDEN" => 403,
        "NOT_FOUND" => 404,
        "CONFLICT" | "STALE_RUN" | "INVALID_TRANSITION" => 409,
        "PAYLOAD_TOO_LARGE" => 413,
        "RATE_LIMITED" => 429,
        "INTERNAL_ERROR" => 500,
        _ => 503,
    }
}
