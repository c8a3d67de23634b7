//! The jobs that this process has in its hands: handed out to it and not yet ended.
//!
//! A run is ended once: whoever takes it out of here reports it. The database's block is the fence for everybody else.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI64, Ordering},
    },
};

use faena_domain::{JobId, LogEvent, LogLine, Run, Timestamp, WorkerId};
use faena_store::{ClaimedJob, RunEnd, RunOutcome};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use crate::workers::{ConnectedWorker, Order};

const WAITS_FOR_PROCESS: i64 = -1;

/// One job in hand.
pub struct InFlightJob {
    pub job: ClaimedJob,
    pub kind: Arc<str>,
    pub claimed_at: Timestamp,
    /// In whose hands.
    pub worker: WorkerId,
    /// The connection to that worker; none for the one inside this process.
    connection: Mutex<Option<Arc<ConnectedWorker>>>,
    /// Told to stop.
    pub cancel: CancellationToken,
    cancel_asked: Mutex<Option<(String, Timestamp)>>,
    /// Milliseconds; 0 while it waits for a slot.
    started_at: AtomicI64,
    /// Its start is written down, or about to be.
    recorded: AtomicBool,
    /// Its worker has said something about it.
    heard_of: AtomicBool,
    /// Milliseconds; when it was given to the process that was started for it. 0: to one that was there; `WAITS_FOR_PROCESS`: it
    /// waits for it.
    assigned_at: AtomicI64,
}

#[derive(Default)]
pub struct InFlight {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    jobs: HashMap<JobId, Arc<InFlightJob>>,
    /// Waiting for a slot, first come first served.
    line: VecDeque<Arc<InFlightJob>>,
    /// How many jobs of each hand-out are still here.
    open: HashMap<Run, usize>,
}

impl Inner {
    fn hold(&mut self, held: InFlightJob) -> Arc<InFlightJob> {
        let held = Arc::new(held);
        *self.open.entry(held.job.run).or_default() += 1;
        self.jobs.insert(held.job.id, held.clone());
        held
    }

    /// Whether that was the last job of its hand-out.
    fn count_down(&mut self, run: Run) -> bool {
        let Some(open) = self.open.get_mut(&run) else { return false };
        *open -= 1;
        let last = *open == 0;
        if last {
            self.open.remove(&run);
        }
        last
    }
}

impl InFlightJob {
    fn new(job: ClaimedJob, kind: Arc<str>, worker: WorkerId, claimed_at: Timestamp) -> InFlightJob {
        InFlightJob {
            // It may have become ready after the round began that claimed it.
            claimed_at: claimed_at.max(job.ready_at),
            job,
            kind,
            worker,
            connection: Mutex::new(None),
            cancel: CancellationToken::new(),
            cancel_asked: Mutex::new(None),
            started_at: AtomicI64::new(0),
            recorded: AtomicBool::new(false),
            heard_of: AtomicBool::new(false),
            assigned_at: AtomicI64::new(0),
        }
    }

    pub fn correlation_id(&self) -> String {
        self.job.correlation_id.clone().unwrap_or_else(|| self.job.id.to_string())
    }

    pub fn start(&self, now: Timestamp) {
        self.started_at.store(now.as_ms().max(1), Ordering::Release);
    }

    pub fn started_at(&self) -> Option<Timestamp> {
        match self.started_at.load(Ordering::Acquire) {
            0 => None,
            ms => Some(Timestamp::from_ms(ms)),
        }
    }

    pub fn ask_to_stop(&self, reason: &str, now: Timestamp) {
        {
            let mut asked = self.cancel_asked.lock();
            if asked.is_some() {
                return;
            }
            *asked = Some((reason.to_owned(), now));
        }
        self.cancel.cancel();
        self.tell_to_stop(reason);
    }

    /// Tells a worker elsewhere; the one inside this process looks at the token.
    pub fn tell_to_stop(&self, reason: &str) {
        if let Some(connection) = self.connection() {
            connection.order([Order::Cancel { job_id: self.job.id, run: self.job.run, reason: reason.to_owned() }]);
        }
    }

    pub fn cancel_reason(&self) -> Option<String> {
        self.cancel_asked.lock().as_ref().map(|(reason, _)| reason.clone())
    }

    pub fn cancel_asked_at(&self) -> Option<Timestamp> {
        self.cancel_asked.lock().as_ref().map(|(_, at)| *at)
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

    /// A process is started for it.
    pub fn schedule(&self) {
        self.assigned_at.store(WAITS_FOR_PROCESS, Ordering::Release);
    }

    /// A process was started for it, and has come for it now.
    pub fn assign(&self, now: Timestamp) {
        self.assigned_at.store(now.as_ms().max(1), Ordering::Release);
    }

    pub fn hear(&self) {
        self.heard_of.store(true, Ordering::Release);
    }

    pub fn was_heard_of(&self) -> bool {
        self.heard_of.load(Ordering::Acquire)
    }

    /// From here on an end of this run has to look for what was written about it.
    pub fn mark_recorded(&self) -> bool {
        !self.recorded.swap(true, Ordering::AcqRel)
    }

    /// The report of this run's end, with its log.
    pub fn end(&self, outcome: RunOutcome, lines: Vec<LogLine>, at: Timestamp) -> RunEnd {
        let job = &self.job;
        let mut log = String::with_capacity(128);
        LogLine::new(job.ready_at, LogEvent::Queued, "").append_to(&mut log);
        if let Some((since, by)) = &job.limited {
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
        let started_at = self.started_at();
        if let Some(started_at) = started_at {
            LogLine::new(started_at, LogEvent::Started, "").append_to(&mut log);
        }
        for line in lines {
            line.append_to(&mut log);
        }
        let options = &job.options;
        let on_record = self.recorded.load(Ordering::Acquire)
            || self.cancel.is_cancelled()
            || options.unique_key.is_some()
            || options.concurrency_key.is_some()
            || options.webhook_url.is_some()
            || options.expires_at.is_some();
        RunEnd {
            id: job.id,
            run: job.run,
            lane: job.lane,
            retry_count: job.retry_count,
            ready_at: job.ready_at,
            worker: self.worker,
            started_at,
            at,
            log,
            outcome,
            on_record,
            closes_claim: false,
        }
    }
}

impl InFlight {
    /// Jobs for the worker inside this process: they stand in line for a slot.
    pub fn add(&self, jobs: impl IntoIterator<Item = (ClaimedJob, Arc<str>)>, worker: WorkerId, claimed_at: Timestamp) {
        let mut inner = self.inner.lock();
        for (job, kind) in jobs {
            let held = inner.hold(InFlightJob::new(job, kind, worker, claimed_at));
            inner.line.push_back(held);
        }
    }

    /// Jobs that a worker elsewhere has, or is about to be handed.
    pub fn add_for(
        &self,
        connection: &Arc<ConnectedWorker>,
        jobs: impl IntoIterator<Item = (ClaimedJob, Arc<str>, Timestamp)>,
    ) -> Vec<Arc<InFlightJob>> {
        let mut inner = self.inner.lock();
        jobs.into_iter()
            .map(|(job, kind, claimed_at)| {
                // A worker that comes back has its jobs here already.
                let known = inner.jobs.get(&job.id).filter(|known| known.job.run == job.run).cloned();
                let held = known.unwrap_or_else(|| inner.hold(InFlightJob::new(job, kind, connection.id, claimed_at)));
                held.connect(connection.clone());
                held
            })
            .collect()
    }

    /// Not this process's business any more, and nothing is told about it.
    pub fn forget(&self, held: &InFlightJob) {
        let mut inner = self.inner.lock();
        if inner.jobs.get(&held.job.id).is_some_and(|known| known.job.run == held.job.run) {
            inner.jobs.remove(&held.job.id);
            inner.count_down(held.job.run);
        }
    }

    pub fn next_in_line(&self) -> Option<Arc<InFlightJob>> {
        self.inner.lock().line.pop_front()
    }

    /// Takes out of the line what has stood there since `before`, and says since when the next has.
    pub fn late_in_line(&self, before: Timestamp) -> (Vec<Arc<InFlightJob>>, Option<Timestamp>) {
        let mut inner = self.inner.lock();
        let late = inner.line.iter().take_while(|held| held.claimed_at <= before).count();
        let late = inner.line.drain(..late).collect();
        (late, inner.line.front().map(|held| held.claimed_at))
    }

    pub fn waiting(&self) -> usize {
        self.inner.lock().line.len()
    }

    pub fn count(&self) -> usize {
        self.inner.lock().jobs.len()
    }

    /// Whether the worker inside this process has anything to do.
    pub fn is_idle_here(&self) -> bool {
        self.inner.lock().jobs.values().all(|held| held.is_remote())
    }

    /// The hand-outs of which jobs are here.
    pub fn runs(&self) -> Vec<Run> {
        self.inner.lock().open.keys().copied().collect()
    }

    pub fn find(&self, id: JobId) -> Option<Arc<InFlightJob>> {
        self.inner.lock().jobs.get(&id).cloned()
    }

    /// Lets a job go and hands its end on, marked if it is the last of its hand-out. `send` runs under the lock, so that ends
    /// are told in the order in which they were counted: the one that closes the block is the last. `false`: it is not here
    /// any more, and its end is nobody's business.
    pub fn finish(&self, held: &InFlightJob, mut end: RunEnd, send: impl FnOnce(RunEnd)) -> bool {
        let mut inner = self.inner.lock();
        match inner.jobs.get(&held.job.id) {
            Some(known) if known.job.run == held.job.run => {}
            _ => return false,
        }
        inner.jobs.remove(&held.job.id);
        end.closes_claim = inner.count_down(held.job.run);
        send(end);
        true
    }

    /// Everything that has begun before `before` and is not on record yet; marks it.
    pub fn to_record(&self, before: Timestamp) -> (Vec<Arc<InFlightJob>>, Option<Timestamp>) {
        let inner = self.inner.lock();
        let mut due = Vec::new();
        let mut next: Option<Timestamp> = None;
        for held in inner.jobs.values() {
            if held.recorded.load(Ordering::Acquire) {
                continue;
            }
            match held.started_at() {
                Some(at) if at <= before => {
                    held.mark_recorded();
                    due.push(held.clone());
                }
                Some(at) => next = Some(next.map_or(at, |known: Timestamp| known.min(at))),
                None => {}
            }
        }
        (due, next)
    }

    /// Whoever waits for a slot.
    pub fn empty_line(&self) -> Vec<Arc<InFlightJob>> {
        self.inner.lock().line.drain(..).collect()
    }

    pub fn all(&self) -> Vec<Arc<InFlightJob>> {
        self.inner.lock().jobs.values().cloned().collect()
    }

    /// This process was taken for dead: nothing of this is its own any more.
    pub fn drop_all(&self) -> Vec<Arc<InFlightJob>> {
        let mut inner = self.inner.lock();
        inner.line.clear();
        inner.open.clear();
        inner.jobs.drain().map(|(_, held)| held).collect()
    }
}
