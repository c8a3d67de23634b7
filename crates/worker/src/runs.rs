//! The runs that a worker has in its hands: starting them, stopping them, noticing those that do not stop.

use std::{collections::HashMap, panic::AssertUnwindSafe, sync::Arc, time::Duration};

use faena_domain::{JobId, Run};
use futures_util::FutureExt;
use tokio::{sync::mpsc, task::AbortHandle, time::Instant};

use crate::{
    Context, JobError,
    context::Note,
    handler::{Handlers, Next, Outcome},
    ledger::{Key, Of},
    outgoing,
};

/// A handler that still runs so long after it was told to stop is spoken of.
const STOP_PATIENCE: Duration = Duration::from_secs(10);

pub(crate) struct Runs {
    runs: HashMap<Key, Running>,
    /// Those that were given to others are not counted.
    held: usize,
    /// No run needs a look before this time. May be early, never late, so that a job costs one comparison and no timer.
    look_at: Option<Instant>,
}

struct Running {
    context: Context,
    task: AbortHandle,
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
    pub fn new() -> Runs {
        Runs { runs: HashMap::new(), held: 0, look_at: None }
    }

    /// Runs the handler on a task of its own: one that computes, or blocks, must not keep the connection from its heartbeat.
    pub fn start(&mut self, context: Context, handlers: &Arc<Handlers>, notes: &mpsc::Sender<Note>, now: Instant) {
        let key = context.key();
        let deadline = Some(context.time_left()).filter(|left| !left.is_zero()).and_then(|left| now.checked_add(left));
        let task = tokio::spawn(run(context.clone(), handlers.clone(), notes.clone())).abort_handle();
        self.runs.insert(key, Running { context, task, deadline, warn_at: None, given_away: false });
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
            running.task.abort();
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
        self.look_at
    }

    /// Stops what is past its deadline, and speaks of what does not stop.
    pub fn look(&mut self, now: Instant) {
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
            running.task.abort();
        }
    }
}

async fn run(context: Context, handlers: Arc<Handlers>, notes: mpsc::Sender<Note>) {
    let key = context.key();
    let (of, text) = match outcome(context, handlers).await {
        Ok(result) => (Of::Complete, outgoing::complete(key, &result)),
        Err(error) => (Of::Fail, outgoing::fail(key, &error)),
    };
    // Nobody listens only when the worker has stopped, and it has given the job back then.
    let _ = notes.send(Note::End { key, of, text }).await;
}

/// Runs the handler, and what stands around it. A panic is a failure like others.
pub(crate) async fn outcome(context: Context, handlers: Arc<Handlers>) -> Outcome {
    let work = async move { Next::new(handlers).run(context).await };
    AssertUnwindSafe(work).catch_unwind().await.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
        Err(JobError::retry(format!("the handler panicked: {}", text.as_deref().unwrap_or("no text"))))
    })
}
