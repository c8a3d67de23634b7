//! Where handlers run.
//!
//! Lanes take jobs from one queue and poll each handler once; a handler that waits for something moves to a task of its own. So
//! a handler that never waits costs no task, and a burst of short jobs does not wake the other threads of the runtime for
//! each. A task per job was measured first: 7.7 µs of processor time per empty job on two threads (connection and all), against 5.3 µs so.
//!
//! A handler that computes holds up its lane and no other: there are as many lanes as the runtime has threads when several jobs
//! wait, unless handlers have shown to be quick, when one lane does it with less ado; and while jobs stand in the queue the session looks once a millisecond and opens more if nothing moves. What blocks a
//! thread for long belongs on `spawn_blocking` all the same: on a thread that is blocked tokio may have left the timers and sockets of
//! other handlers. The connection is not among them: it has a thread of its own.
//!
//! A lane puts what it has done on a shelf and says so only when it pauses. To say it after each job would put the session next
//! in line on the lane's own thread, where no other thread can take it, and a handler that then blocks would hold it up.

use std::{collections::VecDeque, future::poll_fn, panic::AssertUnwindSafe, sync::Arc, task::Poll, time::Duration};

use futures_util::FutureExt;
use parking_lot::Mutex;
use tokio::{runtime::Handle, sync::mpsc, time::Instant};

use crate::{
    Context, JobError,
    context::Note,
    handler::{Handlers, Next, Outcome},
    ledger::Of,
    outgoing,
};

const LOOK_AGAIN: Duration = Duration::from_millis(1);
/// While a handler blocks and no job waits.
const LOOK_RARELY: Duration = Duration::from_millis(16);
/// A handler that takes so long before it first waits is worth another thread.
const SLOW: Duration = Duration::from_micros(100);
/// After so many in a row that are not slow, one lane is enough to begin with.
const QUICK_JOBS: u32 = 64;
/// Then the others have their turn.
const JOBS_PER_TURN: u32 = 32;

pub(crate) struct Floor {
    shared: Arc<Shared>,
    look_at: Option<Instant>,
    taken_at_last_look: u64,
}

struct Shared {
    /// As much as the runtime can do at once.
    threads: usize,
    on: Handle,
    handlers: Arc<Handlers>,
    notes: mpsc::Sender<Note>,
    state: Mutex<State>,
}

/// The queue is as long as the worker's concurrency at most.
#[derive(Default)]
struct State {
    queue: VecDeque<Context>,
    lanes: usize,
    taken: u64,
    shelf: Vec<Note>,
    /// How many in a row have not held up their lane.
    quick_jobs: u32,
}

impl Floor {
    pub fn new(handlers: Arc<Handlers>, on: Handle, notes: mpsc::Sender<Note>) -> Floor {
        let threads = on.metrics().num_workers();
        let shared = Arc::new(Shared { threads, on, handlers, notes, state: Mutex::default() });
        Floor { shared, look_at: None, taken_at_last_look: 0 }
    }

    /// Runs the handler of this job soon.
    pub fn start(&mut self, context: Context, now: Instant) {
        let mut state = self.shared.state.lock();
        state.queue.push_back(context);
        let one_is_enough = state.quick_jobs >= QUICK_JOBS || state.queue.len() == 1;
        if state.lanes == 0 || (!one_is_enough && state.lanes < self.shared.threads) {
            self.shared.open_lane(&mut state);
        }
        let soon = now + LOOK_AGAIN;
        self.look_at = Some(self.look_at.map_or(soon, |at| at.min(soon)));
    }

    /// What the lanes have done.
    pub fn take_done(&mut self) -> Vec<Note> {
        std::mem::take(&mut self.shared.state.lock().shelf)
    }

    pub fn look_at(&self) -> Option<Instant> {
        self.look_at
    }

    /// Opens another lane if jobs have to wait. `true`: something may stand on the shelf.
    pub fn look(&mut self, now: Instant) -> bool {
        if self.look_at.is_none_or(|at| now < at) {
            return false;
        }
        let mut state = self.shared.state.lock();
        let moved = state.taken != self.taken_at_last_look;
        self.taken_at_last_look = state.taken;
        if !state.queue.is_empty() && (state.lanes < self.shared.threads || !moved) {
            self.shared.open_lane(&mut state);
        }
        let next = if moved || !state.queue.is_empty() { LOOK_AGAIN } else { LOOK_RARELY };
        // A lane that found no room to say it has closed with something on the shelf.
        self.look_at = (state.lanes > 0 || !state.shelf.is_empty()).then(|| now + next);
        !state.shelf.is_empty()
    }
}

impl Drop for Floor {
    fn drop(&mut self) {
        self.shared.state.lock().queue.clear();
    }
}

impl Shared {
    fn open_lane(self: &Arc<Self>, state: &mut State) {
        state.lanes += 1;
        self.on.spawn(lane(self.clone()));
    }

    /// A handler has held up its lane for so long, and has ended with this, or waits.
    fn put(self: &Arc<Self>, note: Option<Note>, took: Duration) {
        let mut state = self.state.lock();
        state.shelf.extend(note);
        if took < SLOW {
            state.quick_jobs = state.quick_jobs.saturating_add(1);
            return;
        }
        state.quick_jobs = 0;
        if !state.queue.is_empty() && state.lanes < self.threads {
            self.open_lane(&mut state);
        }
    }

    fn next(&self) -> Option<Context> {
        let mut state = self.state.lock();
        let next = state.queue.pop_front();
        match next {
            Some(_) => state.taken += 1,
            None => state.lanes -= 1,
        }
        next
    }

    fn say_done(&self) {
        // When there is no room, the session finds it at its next look.
        let _ = self.notes.try_send(Note::Shelf);
    }
}

async fn lane(shared: Arc<Shared>) {
    let mut jobs = 0;
    while let Some(context) = shared.next() {
        let mut work = Box::pin(run(context.clone(), shared.handlers.clone()));
        let began = Instant::now();
        let polled = poll_fn(|task| Poll::Ready(work.as_mut().poll(task))).await;
        let took = began.elapsed();
        match polled {
            Poll::Ready(note) => shared.put(Some(note), took),
            Poll::Pending => {
                shared.put(None, took);
                let notes = shared.notes.clone();
                // Nobody listens only when the worker has stopped, and it has given the job back then.
                let task = tokio::spawn(async move { drop(notes.send(work.await).await) });
                context.runs_as(task.abort_handle());
            }
        }
        jobs += 1;
        if jobs % JOBS_PER_TURN == 0 {
            shared.say_done();
            tokio::task::yield_now().await;
        }
    }
    shared.say_done();
}

async fn run(context: Context, handlers: Arc<Handlers>) -> Note {
    let key = context.key();
    // Told to stop before it began: then it does not begin.
    let outcome = if context.is_cancelled() { Err(JobError::cancelled()) } else { outcome(context, handlers).await };
    match outcome {
        Ok(result) => Note::End { key, of: Of::Complete, text: outgoing::complete(key, &result) },
        Err(error) => Note::End { key, of: Of::Fail, text: outgoing::fail(key, &error) },
    }
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

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;
    use crate::{handler::typed, testing::TestJob};

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn handlers_that_hold_up_their_lane_run_side_by_side() {
        // Nobody passes before two are there.
        let barrier = Arc::new(Barrier::new(2));
        let mut handlers = Handlers::default();
        let meet = move |_: Context, (): ()| {
            let barrier = barrier.clone();
            async move {
                barrier.wait();
                Ok(())
            }
        };
        handlers.add("meet".into(), typed(meet));
        let (sender, mut notes) = mpsc::channel(16);
        let mut floor = Floor::new(Arc::new(handlers), Handle::current(), sender.clone());
        for _ in 0..4 {
            floor.start(Context::new(TestJob::new("meet", &()).frame(), sender.clone()), Instant::now());
        }
        let mut done = 0;
        while done < 4 {
            notes.recv().await;
            done += floor.take_done().len();
        }
    }
}
