//! The runs that a worker has in its hands: which they are, stopping them, noticing those that do not stop.

use std::{collections::HashMap, sync::Arc, time::Duration};

use faena_domain::{JobId, Run};
use tokio::{runtime::Handle, sync::mpsc, time::Instant};

use crate::{Context, context::Note, floor::Floor, handler::Handlers, ledger::Key};

/// A handler that still runs so long after it was told to stop is spoken of.
const STOP_PATIENCE: Duration = Duration::from_secs(10);

/// The server is the one to say that a job's time is up; a worker says so itself only when nothing is heard of it.
const AFTER_THE_SERVER: Duration = Duration::from_secs(1);

pub(crate) struct Runs {
    runs: HashMap<Key, Running>,
    floor: Floor,
    /// Those that were given to others are not counted.
    held: usize,
    /// No run needs a look before this time. May be early, never late, so that a job costs one comparison and no timer.
    look_at: Option<Instant>,
}

struct Running {
    context: Context,
    /// `None`: passed, or already past when the job came, which means that the clocks differ: then the server has to tell.
    deadline: Option<Instant>,
    /// `None`: not told to stop, or spoken of.
    warn_at: Option<Instant>,
    given_away: bool,
}

/// What was known of a run that ended.
pub(crate) struct Ended {
    pub given_away: bool,
}

impl Runs {
    pub fn new(handlers: Arc<Handlers>, on: Handle, notes: mpsc::Sender<Note>) -> Runs {
        Runs { runs: HashMap::new(), floor: Floor::new(handlers, on, notes), held: 0, look_at: None }
    }

    pub fn start(&mut self, context: Context, now: Instant) {
        let deadline = Some(context.time_left())
            .filter(|left| !left.is_zero())
            .and_then(|left| now.checked_add(left + AFTER_THE_SERVER));
        self.floor.start(context.clone(), now);
        self.runs.insert(context.key(), Running { context, deadline, warn_at: None, given_away: false });
        self.held += 1;
        self.look_no_later_than(deadline);
    }

    /// Takes out a run that has ended. `None`: it is not known any more.
    pub fn end(&mut self, key: Key) -> Option<Ended> {
        let running = self.runs.remove(&key)?;
        self.held -= usize::from(!running.given_away);
        Some(Ended { given_away: running.given_away })
    }

    /// Tells it to stop.
    pub fn cancel(&mut self, key: Key, now: Instant) {
        if let Some(running) = self.runs.get_mut(&key) {
            running.stop(now);
            self.look_no_later_than(Some(now + STOP_PATIENCE));
        }
    }

    /// The job is somebody else's now; what this run still does is of no use.
    pub fn give_away(&mut self, key: Key, now: Instant) {
        if let Some(running) = self.runs.get_mut(&key).filter(|running| !running.given_away) {
            running.given_away = true;
            self.held -= 1;
            self.cancel(key, now);
        }
    }

    /// Stops waiting for a run and ends its task where it next waits.
    pub fn abort(&mut self, key: Key) {
        if let Some(running) = self.runs.get(&key) {
            let context = &running.context;
            tracing::warn!(job = %context.id(), kind = context.kind(), "the handler ignored its cancellation; it was given back");
            context.abort();
            self.end(key);
        }
    }

    pub fn contains(&self, key: Key) -> bool {
        self.runs.contains_key(&key)
    }

    pub fn is_held(&self, key: Key) -> bool {
        self.runs.get(&key).is_some_and(|running| !running.given_away)
    }

    /// All runs of a job, or the one that is named.
    pub fn of_job(&self, job: JobId, run: Option<Run>) -> Vec<Key> {
        match run {
            Some(run) => vec![Key { job, run }],
            None => self.runs.keys().filter(|key| key.job == job).copied().collect(),
        }
    }

    pub fn all(&self) -> Vec<Key> {
        self.runs.keys().copied().collect()
    }

    /// Those that are this worker's.
    pub fn held(&self) -> impl Iterator<Item = Key> + '_ {
        self.runs.iter().filter(|(_, running)| !running.given_away).map(|(key, _)| *key)
    }

    pub fn held_count(&self) -> usize {
        self.held
    }

    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    pub fn look_at(&self) -> Option<Instant> {
        [self.look_at, self.floor.look_at()].into_iter().flatten().min()
    }

    pub fn take_done(&mut self) -> Vec<Note> {
        self.floor.take_done()
    }

    /// Stops what is past its deadline, and speaks of what does not stop. `true`: something may be done.
    pub fn look(&mut self, now: Instant) -> bool {
        self.look_at_runs(now);
        self.floor.look(now)
    }

    fn look_at_runs(&mut self, now: Instant) {
        if self.look_at.is_none_or(|at| now < at) {
            return;
        }
        self.look_at = None;
        let mut next: Option<Instant> = None;
        for running in self.runs.values_mut() {
            if running.deadline.is_some_and(|deadline| deadline <= now) {
                running.stop(now);
            }
            if running.warn_at.is_some_and(|at| at <= now) {
                running.warn_at = None;
                let context = &running.context;
                tracing::warn!(job = %context.id(), kind = context.kind(), "the handler ignores its cancellation");
            }
            next = [next, running.deadline, running.warn_at].into_iter().flatten().min();
        }
        self.look_at = next;
    }

    fn look_no_later_than(&mut self, at: Option<Instant>) {
        self.look_at = [self.look_at, at].into_iter().flatten().min();
    }
}

impl Running {
    fn stop(&mut self, now: Instant) {
        self.deadline = None;
        if !self.context.is_cancelled() {
            self.context.token().cancel();
            self.warn_at = Some(now + STOP_PATIENCE);
        }
    }
}

impl Drop for Runs {
    /// Whoever drops the worker's future wants it to end.
    fn drop(&mut self) {
        for running in self.runs.values() {
            running.context.token().cancel();
            running.context.abort();
        }
    }
}
