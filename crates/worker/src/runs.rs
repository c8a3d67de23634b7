//! The runs that a worker works on: starts them, cancels them, and warns about those that ignore their cancellation.

use std::{collections::HashMap, sync::Arc, time::Duration};

use tokio::{runtime::Handle, sync::mpsc, time::Instant};

use crate::{
    Context, JobId, RunNumber, context::HandlerMessage, executor::Executor, frames::RunKey, handler::Handlers,
};

/// A handler that still runs this long after its cancellation is logged.
const CANCEL_WARNING_AFTER: Duration = Duration::from_secs(10);

/// How long after the deadline of a run the worker cancels it itself, in case the server has not done so at the
/// deadline.
const DEADLINE_MARGIN: Duration = Duration::from_secs(1);

pub(crate) struct Runs {
    runs: HashMap<RunKey, ActiveRun>,
    executor: Executor,
    /// How many runs have not been reassigned to another worker.
    in_flight: usize,
    /// No run needs a check before this time. It may be too early, never too late. One time for all runs is cheaper than a timer
    /// for each.
    next_check_at: Option<Instant>,
}

struct ActiveRun {
    context: Context,
    /// `None` once it has passed. Also `None` if it had passed when the job arrived: then the clocks differ, and only the
    /// server knows whether it has passed.
    deadline: Option<Instant>,
    /// `None` if the run is not cancelled, or was already logged.
    warn_at: Option<Instant>,
    is_reassigned: bool,
}

/// What was known about a run that has ended.
pub(crate) struct EndedRun {
    pub was_reassigned: bool,
}

impl Runs {
    pub fn new(handlers: Arc<Handlers>, runtime: Handle, messages: mpsc::Sender<HandlerMessage>) -> Runs {
        let executor = Executor::new(handlers, runtime, messages);
        Runs { runs: HashMap::new(), executor, in_flight: 0, next_check_at: None }
    }

    pub fn start(&mut self, context: Context, now: Instant) {
        let deadline = Some(context.time_left())
            .filter(|left| !left.is_zero())
            .and_then(|left| now.checked_add(left + DEADLINE_MARGIN));
        self.executor.start(context.clone(), now);
        self.runs.insert(context.key(), ActiveRun { context, deadline, warn_at: None, is_reassigned: false });
        self.in_flight += 1;
        self.check_no_later_than(deadline);
    }

    /// Removes a run that has ended. Returns `None` if it was already removed.
    pub fn end(&mut self, key: RunKey) -> Option<EndedRun> {
        let run = self.runs.remove(&key)?;
        self.in_flight -= usize::from(!run.is_reassigned);
        Some(EndedRun { was_reassigned: run.is_reassigned })
    }

    /// Cancels the context of a run. Its handler decides when to stop.
    pub fn cancel(&mut self, key: RunKey, now: Instant) {
        if let Some(run) = self.runs.get_mut(&key) {
            run.cancel(now);
            self.check_no_later_than(Some(now + CANCEL_WARNING_AFTER));
        }
    }

    /// Cancels a run whose job has been assigned to another worker.
    pub fn mark_reassigned(&mut self, key: RunKey, now: Instant) {
        if let Some(run) = self.runs.get_mut(&key).filter(|run| !run.is_reassigned) {
            run.is_reassigned = true;
            self.in_flight -= 1;
            self.cancel(key, now);
        }
    }

    /// Removes a run and aborts its task at its next await.
    pub fn abort(&mut self, key: RunKey) {
        if let Some(run) = self.runs.get(&key) {
            let context = &run.context;
            tracing::warn!(job = %context.id(), job_type = context.kind(), "handler aborted after it ignored its cancellation");
            context.abort();
            self.end(key);
        }
    }

    pub fn contains(&self, key: RunKey) -> bool {
        self.runs.contains_key(&key)
    }

    pub fn is_in_flight(&self, key: RunKey) -> bool {
        self.runs.get(&key).is_some_and(|run| !run.is_reassigned)
    }

    /// Returns the run with this number, or every run of the job if no number is given.
    pub fn of_job(&self, job: JobId, run: Option<RunNumber>) -> Vec<RunKey> {
        match run {
            Some(run) => vec![RunKey { job, run }],
            None => self.runs.keys().filter(|key| key.job == job).copied().collect(),
        }
    }

    /// Returns all runs whose handlers have not ended, including reassigned ones.
    pub fn all(&self) -> Vec<RunKey> {
        self.runs.keys().copied().collect()
    }

    /// Returns the runs that belong to this worker.
    pub fn in_flight(&self) -> impl Iterator<Item = RunKey> + '_ {
        self.runs.iter().filter(|(_, run)| !run.is_reassigned).map(|(key, _)| *key)
    }

    pub fn in_flight_count(&self) -> usize {
        self.in_flight
    }

    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    pub fn next_check_at(&self) -> Option<Instant> {
        [self.next_check_at, self.executor.next_check_at()].into_iter().flatten().min()
    }

    pub fn take_completed(&mut self) -> Vec<HandlerMessage> {
        self.executor.take_completed()
    }

    /// Cancels runs past their deadline and logs those that ignore it. Returns `true` if there are completed jobs to take.
    pub fn check(&mut self, now: Instant) -> bool {
        self.check_runs(now);
        self.executor.check(now)
    }

    fn check_runs(&mut self, now: Instant) {
        if self.next_check_at.is_none_or(|at| now < at) {
            return;
        }
        self.next_check_at = None;
        let mut next: Option<Instant> = None;
        for run in self.runs.values_mut() {
            if run.deadline.is_some_and(|deadline| deadline <= now) {
                run.cancel(now);
            }
            if run.warn_at.is_some_and(|at| at <= now) {
                run.warn_at = None;
                let context = &run.context;
                tracing::warn!(job = %context.id(), job_type = context.kind(), "handler ignores its cancellation");
            }
            next = [next, run.deadline, run.warn_at].into_iter().flatten().min();
        }
        self.next_check_at = next;
    }

    fn check_no_later_than(&mut self, at: Option<Instant>) {
        self.next_check_at = [self.next_check_at, at].into_iter().flatten().min();
    }
}

impl ActiveRun {
    fn cancel(&mut self, now: Instant) {
        self.deadline = None;
        if !self.context.is_cancelled() {
            self.context.token().cancel();
            self.warn_at = Some(now + CANCEL_WARNING_AFTER);
        }
    }
}

impl Drop for Runs {
    /// Dropping the future of the worker ends its handlers.
    fn drop(&mut self) {
        for run in self.runs.values() {
            run.context.token().cancel();
            run.context.abort();
        }
    }
}
