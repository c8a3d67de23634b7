//! The jobs in flight in this process: claimed and not yet ended.
//!
//! A run is ended once: only the caller that removes it from here reports its end. Between processes, the claim in the
//! database decides whose report counts.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI64, Ordering},
    },
};

use faena_domain::{JobId, LogEvent, LogLine, Run, Timestamp, WorkerId};
use faena_store::{ClaimedJob, ResumedJob, RunEnd, RunOutcome, RunTiming, RunTrace, UnattendedJob};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use crate::workers::{ConnectedWorker, WorkerCommand};

/// Value of `assigned_at` while the process for the job is being started.
const WAITS_FOR_PROCESS: i64 = -1;

/// One job in flight.
pub struct InFlightJob {
    pub claimed: ClaimedJob,
    pub kind: Arc<str>,
    pub claimed_at: Timestamp,
    pub worker: WorkerId,
    /// The worker that runs it, if it is connected from outside. `None` for the built-in worker.
    connection: Mutex<Option<Arc<ConnectedWorker>>>,
    /// Cancelled when the job has to stop.
    pub cancel: CancellationToken,
    /// Reason and time of the request to stop.
    stop_request: Mutex<Option<(String, Timestamp)>>,
    /// In milliseconds; 0 until it starts.
    started_at: AtomicI64,
    /// Its start is stored, or about to be.
    recorded: AtomicBool,
    /// Its worker has reported something about it.
    acknowledged: AtomicBool,
    /// When the process that was started for it received it, in milliseconds. 0 if it went to a worker that was already
    /// running, `WAITS_FOR_PROCESS` while the process is being started.
    assigned_at: AtomicI64,
    /// When its last finished step ended, in milliseconds; 0 if it has none.
    step_ended_at: AtomicI64,
    /// Session of its worker that received it; 0 if none has in this process.
    received_by: AtomicI64,
}

#[derive(Default)]
pub struct InFlight {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    jobs: HashMap<JobId, Arc<InFlightJob>>,
    /// Jobs that wait for a slot of the built-in worker, first in, first out.
    slot_queue: VecDeque<Arc<InFlightJob>>,
    /// Number of jobs of each claim that have not ended.
    open: HashMap<Run, usize>,
}

impl Inner {
    fn add(&mut self, job: InFlightJob) -> Arc<InFlightJob> {
        let job = Arc::new(job);
        *self.open.entry(job.run()).or_default() += 1;
        self.jobs.insert(job.id(), job.clone());
        job
    }

    /// Removes a job. Returns whether it was the last of its claim, or `None` if this run is not here.
    fn remove(&mut self, job: &InFlightJob) -> Option<bool> {
        self.jobs.get(&job.id()).filter(|known| known.run() == job.run())?;
        self.jobs.remove(&job.id());
        let Some(open) = self.open.get_mut(&job.run()) else { return Some(false) };
        *open -= 1;
        let is_last = *open == 0;
        if is_last {
            self.open.remove(&job.run());
        }
        Some(is_last)
    }
}

impl InFlightJob {
    fn new(claimed: ClaimedJob, kind: Arc<str>, worker: WorkerId, claimed_at: Timestamp) -> InFlightJob {
        InFlightJob {
            // It may have become ready after the start of the round that claimed it.
            claimed_at: claimed_at.max(claimed.ready_at),
            claimed,
            kind,
            worker,
            connection: Mutex::new(None),
            cancel: CancellationToken::new(),
            stop_request: Mutex::new(None),
            started_at: AtomicI64::new(0),
            recorded: AtomicBool::new(false),
            acknowledged: AtomicBool::new(false),
            assigned_at: AtomicI64::new(0),
            step_ended_at: AtomicI64::new(0),
            received_by: AtomicI64::new(0),
        }
    }

    /// Returns a job of a worker without a server. It is not in flight in this process.
    pub fn unattended(unattended: UnattendedJob) -> InFlightJob {
        let ResumedJob { job, kind, claimed_at, started_at } = unattended.job;
        let job = InFlightJob::new(job, kind.into(), unattended.worker, claimed_at);
        if unattended.is_starting {
            job.schedule();
        }
        if let Some(at) = started_at {
            job.start(at);
        }
        job
    }

    pub fn id(&self) -> JobId {
        self.claimed.id
    }

    pub fn run(&self) -> Run {
        self.claimed.run
    }

    pub fn correlation_id(&self) -> String {
        self.claimed.correlation_id.clone().unwrap_or_else(|| self.id().to_string())
    }

    pub fn start(&self, now: Timestamp) {
        // The clocks of two nodes differ by some milliseconds, and the times in a log must not go backwards.
        let at = now.max(self.claimed_at);
        self.started_at.store(at.as_ms().max(1), Ordering::Release);
    }

    pub fn started_at(&self) -> Option<Timestamp> {
        match self.started_at.load(Ordering::Acquire) {
            0 => None,
            ms => Some(Timestamp::from_ms(ms)),
        }
    }

    /// Marks that a step ends now, and returns when it began: at the end of the step before it, else at the start of the run.
    pub fn end_step(&self, now: Timestamp) -> Timestamp {
        match self.step_ended_at.swap(now.as_ms().max(1), Ordering::AcqRel) {
            0 => self.started_at().unwrap_or(self.claimed_at),
            ms => Timestamp::from_ms(ms),
        }
    }

    /// Asks the job to stop. The first reason counts.
    pub fn request_stop(&self, reason: &str, now: Timestamp) {
        {
            let mut request = self.stop_request.lock();
            if request.is_some() {
                return;
            }
            *request = Some((reason.to_owned(), now));
        }
        self.cancel.cancel();
        self.send_stop(reason);
    }

    /// Sends the request to stop to a connected worker. The built-in worker watches the token instead.
    pub fn send_stop(&self, reason: &str) {
        if let Some(connection) = self.connection() {
            connection.send([WorkerCommand::Cancel { job_id: self.id(), run: self.run(), reason: reason.to_owned() }]);
        }
    }

    pub fn cancel_reason(&self) -> Option<String> {
        self.stop_request.lock().as_ref().map(|(reason, _)| reason.clone())
    }

    pub fn stop_requested_at(&self) -> Option<Timestamp> {
        self.stop_request.lock().as_ref().map(|(_, at)| *at)
    }

    pub fn connection(&self) -> Option<Arc<ConnectedWorker>> {
        self.connection.lock().clone()
    }

    pub fn is_remote(&self) -> bool {
        self.connection.lock().is_some()
    }

    pub fn connect(&self, connection: Arc<ConnectedWorker>) {
        *self.connection.lock() = Some(connection);
    }

    /// Marks that a process is being started for it.
    pub fn schedule(&self) {
        self.assigned_at.store(WAITS_FOR_PROCESS, Ordering::Release);
    }

    /// Marks that the process started for it has connected and receives it now.
    pub fn assign(&self, now: Timestamp) {
        self.assigned_at.store(now.as_ms().max(1), Ordering::Release);
    }

    /// Marks that this session of its worker receives it.
    pub fn deliver_to(&self, session: i64) {
        self.received_by.store(session, Ordering::Release);
    }

    /// Returns whether its worker received it in this session, and not before a reconnect.
    pub fn was_delivered_to(&self, session: i64) -> bool {
        self.received_by.load(Ordering::Acquire) == session
    }

    /// Marks that its worker has reported something about it.
    pub fn acknowledge(&self) {
        self.acknowledged.store(true, Ordering::Release);
    }

    pub fn is_acknowledged(&self) -> bool {
        self.acknowledged.load(Ordering::Acquire)
    }

    /// Marks that rows about this run may exist, so that its end has to look for them. Returns whether this is new.
    pub fn mark_recorded(&self) -> bool {
        !self.recorded.swap(true, Ordering::AcqRel)
    }

    /// Returns the report of this run's end, with its log.
    pub fn end(&self, outcome: RunOutcome, lines: Vec<LogLine>, at: Timestamp) -> RunEnd {
        let claimed = &self.claimed;
        let options = &claimed.options;
        let may_have_other_rows = self.recorded.load(Ordering::Acquire)
            || self.cancel.is_cancelled()
            || options.unique_key.is_some()
            || options.concurrency_key.is_some()
            || options.webhook_url.is_some()
            || options.expires_at.is_some()
            || options.task_id.is_some();
        RunEnd {
            id: claimed.id,
            run: claimed.run,
            lane: claimed.lane,
            retry_count: claimed.retry_count,
            ready_at: claimed.ready_at,
            worker: self.worker,
            started_at: self.started_at(),
            at,
            log: self.log(lines),
            outcome,
            may_have_other_rows,
            closes_claim: false,
            by_guardian: false,
            timing: self.timing(),
        }
    }

    fn timing(&self) -> RunTiming {
        let assigned_at = self.assigned_at.load(Ordering::Acquire);
        RunTiming {
            claimed_at: Some(self.claimed_at),
            was_scheduled: assigned_at != 0,
            assigned_at: (assigned_at > 0).then(|| Timestamp::from_ms(assigned_at)),
            trace: self.trace(),
        }
    }

    /// Returns the id of its trace, or the correlation id that its caller gave. Most jobs have neither.
    fn trace(&self) -> Option<RunTrace> {
        let trace_id = self.claimed.options.traceparent.as_deref().and_then(|text| text.split('-').nth(1));
        match trace_id.filter(|id| id.len() == 32) {
            Some(id) => Some(RunTrace::Trace(id.to_owned())),
            None => self.claimed.correlation_id.clone().map(RunTrace::Correlation),
        }
    }

    /// Returns the log of this run from becoming ready to its start, followed by `lines`.
    fn log(&self, lines: Vec<LogLine>) -> String {
        let mut log = String::with_capacity(128);
        LogLine::new(self.claimed.ready_at, LogEvent::Queued, "").append_to(&mut log);
        if let Some((since, by)) = &self.claimed.limited {
            LogLine::new(*since, LogEvent::Limited, by.as_str()).append_to(&mut log);
        }
        match self.assigned_at.load(Ordering::Acquire) {
            0 => LogLine::new(self.claimed_at, LogEvent::Assigned, "").append_to(&mut log),
            WAITS_FOR_PROCESS => LogLine::new(self.claimed_at, LogEvent::Scheduled, "").append_to(&mut log),
            ms => {
                LogLine::new(self.claimed_at, LogEvent::Scheduled, "").append_to(&mut log);
                LogLine::new(Timestamp::from_ms(ms), LogEvent::Assigned, "").append_to(&mut log);
            }
        }
        if let Some(started_at) = self.started_at() {
            LogLine::new(started_at, LogEvent::Started, "").append_to(&mut log);
        }
        for line in lines {
            line.append_to(&mut log);
        }
        log
    }
}

impl InFlight {
    /// Adds jobs for the built-in worker and queues them for a slot.
    pub fn add(&self, jobs: impl IntoIterator<Item = (ClaimedJob, Arc<str>)>, worker: WorkerId, claimed_at: Timestamp) {
        let mut inner = self.inner.lock();
        for (job, kind) in jobs {
            let job = inner.add(InFlightJob::new(job, kind, worker, claimed_at));
            inner.slot_queue.push_back(job);
        }
    }

    /// Adds jobs that a connected worker has, or is about to receive.
    pub fn add_for(
        &self,
        connection: &Arc<ConnectedWorker>,
        jobs: impl IntoIterator<Item = (ClaimedJob, Arc<str>, Timestamp)>,
    ) -> Vec<Arc<InFlightJob>> {
        let mut inner = self.inner.lock();
        jobs.into_iter()
            .map(|(claimed, kind, claimed_at)| {
                // The jobs of a worker that reconnects are here already.
                let known = inner.jobs.get(&claimed.id).filter(|known| known.run() == claimed.run).cloned();
                let job =
                    known.unwrap_or_else(|| inner.add(InFlightJob::new(claimed, kind, connection.id, claimed_at)));
                job.connect(connection.clone());
                job
            })
            .collect()
    }

    /// Removes a job without reporting an end: another node is responsible for it.
    pub fn forget(&self, job: &InFlightJob) {
        self.inner.lock().remove(job);
    }

    /// Takes the next job for a slot.
    pub fn next_queued(&self) -> Option<Arc<InFlightJob>> {
        self.inner.lock().slot_queue.pop_front()
    }

    /// Takes the jobs that have waited for a slot since `before` or longer. Also returns when the next one began to
    /// wait.
    pub fn take_late(&self, before: Timestamp) -> (Vec<Arc<InFlightJob>>, Option<Timestamp>) {
        let mut inner = self.inner.lock();
        let late = inner.slot_queue.iter().take_while(|job| job.claimed_at <= before).count();
        let late = inner.slot_queue.drain(..late).collect();
        (late, inner.slot_queue.front().map(|job| job.claimed_at))
    }

    /// Takes all jobs that wait for a slot.
    pub fn take_queued(&self) -> Vec<Arc<InFlightJob>> {
        self.inner.lock().slot_queue.drain(..).collect()
    }

    /// Returns how many jobs wait for a slot.
    pub fn queued(&self) -> usize {
        self.inner.lock().slot_queue.len()
    }

    pub fn count(&self) -> usize {
        self.inner.lock().jobs.len()
    }

    /// Returns whether the built-in worker has no jobs.
    pub fn is_built_in_idle(&self) -> bool {
        self.inner.lock().jobs.values().all(|job| job.is_remote())
    }

    /// Returns the run numbers of all claims with jobs here.
    pub fn runs(&self) -> Vec<Run> {
        self.inner.lock().open.keys().copied().collect()
    }

    pub fn find(&self, id: JobId) -> Option<Arc<InFlightJob>> {
        self.inner.lock().jobs.get(&id).cloned()
    }

    /// Removes a job and passes its end to `send`, marked if it is the last of its claim.
    ///
    /// `send` runs under the lock, so ends are sent in the order in which they are counted and the end that closes the
    /// claim is the last. Returns `false` if the run is no longer here; then its end must not be reported.
    pub fn finish(&self, job: &InFlightJob, mut end: RunEnd, send: impl FnOnce(RunEnd)) -> bool {
        let mut inner = self.inner.lock();
        let Some(is_last) = inner.remove(job) else { return false };
        end.closes_claim = is_last;
        send(end);
        true
    }

    /// Returns all jobs that started before `before` and are not recorded, and marks them as recorded. Also returns the
    /// start of the next one.
    pub fn take_unrecorded(&self, before: Timestamp) -> (Vec<Arc<InFlightJob>>, Option<Timestamp>) {
        let inner = self.inner.lock();
        let mut due = Vec::new();
        let mut next: Option<Timestamp> = None;
        for job in inner.jobs.values() {
            if job.recorded.load(Ordering::Acquire) {
                continue;
            }
            match job.started_at() {
                Some(at) if at <= before => {
                    job.mark_recorded();
                    due.push(job.clone());
                }
                Some(at) => next = Some(next.map_or(at, |known: Timestamp| known.min(at))),
                None => {}
            }
        }
        (due, next)
    }

    pub fn all(&self) -> Vec<Arc<InFlightJob>> {
        self.inner.lock().jobs.values().cloned().collect()
    }

    /// Removes everything: this node was declared dead and its jobs belong to other nodes.
    pub fn drop_all(&self) -> Vec<Arc<InFlightJob>> {
        let mut inner = self.inner.lock();
        inner.slot_queue.clear();
        inner.open.clear();
        inner.jobs.drain().map(|(_, job)| job).collect()
    }
}
