//! The writer thread. Calls that arrive while it commits share the next commit.
//!
//! A call that can fail after it has begun to write runs in a savepoint of the shared transaction, so that its failure undoes only
//! its own writes. Answers and signals are sent after the commit.
//!
//! When the disk rejects a write or does not confirm it, the writer stops forever (`storage.rs`): what was written before may be
//! lost too.
//!
//! A transaction ends when its calls have written enough. A large call has a transaction of its own. Between two large
//! calls the writer commits all waiting small calls, so that a small call waits for at most one large call.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    panic::AssertUnwindSafe,
    sync::{Arc, atomic::Ordering},
    thread,
    time::Duration,
};

use parking_lot::Mutex;
use rusqlite::Connection;
use tokio::sync::{
    broadcast,
    mpsc::{self, error::TryRecvError},
    oneshot,
};

use super::{Shared, checkpoint::Checkpoints, signals::Signals};
use crate::{
    Cause, Lane, LaneId, QueueChange, Result, Signal, StoreError, Tally, dependents::EDGES_PER_SLICE, plan::Deltas,
};

/// Maximum number of calls that wait for the writer; further callers wait until there is room.
const MAX_WAITING_CALLS: usize = 4_096;
/// Maximum number of large calls that wait. It is small, because their jobs are in memory.
const MAX_WAITING_LARGE_CALLS: usize = 32;
/// Maximum number of calls that share one commit.
const MAX_GROUP_CALLS: usize = 512;
/// Approximate number of rows that the calls of one commit write together: 10 000 rows take 30 to 50 ms.
const GROUP_WEIGHT: usize = 10_000;
/// A call that writes more has a transaction of its own.
const LARGE_WEIGHT: usize = 2_500;

/// Whether the transaction can continue, or why it cannot.
type Outcome = std::result::Result<(), Cause>;
type Answer = Box<dyn FnOnce(Outcome) + Send>;
/// Receives `None` if the transaction was lost before this call. Returns whether its writes are kept, and how to answer the caller.
type Work = Box<dyn FnOnce(Option<&Tx>) -> (Kept, Answer) + Send>;

/// Whether the writes of a call are kept.
enum Kept {
    Yes,
    No(Option<Cause>),
    /// The call was skipped, because the caller no longer waits.
    Abandoned,
}

struct Call {
    run: Work,
    /// Whether it runs in a savepoint, so that it can fail after it has begun to write without failing the other calls.
    has_savepoint: bool,
    /// Approximate number of rows it writes.
    weight: usize,
}
type GroupAnswers = (Vec<Answer>, Outcome);

pub struct Writer {
    /// Limit for one call, including the wait for its turn.
    timeout: Duration,
    calls: Mutex<Option<Senders>>,
    thread: Mutex<Option<thread::JoinHandle<()>>>,
}

#[derive(Clone)]
struct Senders {
    small: mpsc::Sender<Call>,
    large: mpsc::Sender<Call>,
    /// Dropped last, because it is the last field: the writer wakes after the channels were closed.
    _wake: WakeOnDrop,
}

/// Wakes the writer, which sleeps while nothing waits.
#[derive(Clone)]
struct WakeOnDrop(thread::Thread);

impl Drop for WakeOnDrop {
    fn drop(&mut self) {
        self.0.unpark();
    }
}

struct Waiting {
    small: mpsc::Receiver<Call>,
    large: mpsc::Receiver<Call>,
}

/// The shared transaction as a call sees it: the connection, and what happens after the commit.
pub struct Tx<'a> {
    pub connection: &'a Connection,
    pub shared: &'a Shared,
    new_lanes: RefCell<NewLanes>,
    signals: RefCell<Signals>,
    /// Answers to callers that do not wait for one of the calls in this transaction, but for its commit.
    answers: RefCell<Vec<Answer>>,
    /// Whether the current call has put tasks into the cache. If its writes are undone, the cache must drop them.
    pub has_cached_tasks: Cell<bool>,
    /// Lanes that this transaction deletes. Only a call that has a transaction of its own may delete lanes: the calls after it find
    /// lanes by their names in the cache, which forgets them after the commit.
    pub removed_lanes: RefCell<Vec<LaneId>>,
    /// How many edges of graphs this transaction may still remove.
    pub dependents_left: Cell<usize>,
    /// Changes of the counters by the current call, and by the calls before it. Written once, before the commit.
    pub deltas: RefCell<Deltas>,
    all_deltas: RefCell<Deltas>,
}

/// Lanes that this transaction has created, in order. A batch may create thousands.
#[derive(Default)]
struct NewLanes {
    lanes: Vec<Lane>,
    keyed: HashMap<LaneId, bool>,
}

impl NewLanes {
    fn truncate(&mut self, len: usize) {
        for lane in self.lanes.drain(len..) {
            self.keyed.remove(&lane.id);
        }
    }
}

impl<'a> Tx<'a> {
    fn new(connection: &'a Connection, shared: &'a Shared) -> Tx<'a> {
        Tx {
            connection,
            shared,
            new_lanes: RefCell::default(),
            signals: RefCell::default(),
            answers: RefCell::default(),
            has_cached_tasks: Cell::default(),
            removed_lanes: RefCell::default(),
            dependents_left: Cell::new(EDGES_PER_SLICE),
            deltas: RefCell::default(),
            all_deltas: RefCell::default(),
        }
    }

    pub fn signal(&self, signal: Signal) {
        self.signals.borrow_mut().add(signal);
    }

    /// Announces to the external queue, if there is one, that a job is ready, waits for a time, or has left its lane.
    pub fn queue_changed(&self, change: QueueChange) {
        if self.shared.queue_feed.is_on() {
            self.signals.borrow_mut().queue_changes.push(change);
        }
    }

    /// Calls `answer` with the outcome of the commit.
    pub fn answer(&self, answer: impl FnOnce(Outcome) + Send + 'static) {
        self.answers.borrow_mut().push(Box::new(answer));
    }

    /// Runs `work` so that its failure undoes only its own writes. The outer error means that the whole transaction is
    /// lost.
    pub fn attempt<T>(&self, work: impl FnOnce(&Tx) -> Result<T>) -> Result<Result<T>> {
        let (lanes, signals) = (self.new_lanes.borrow().lanes.len(), self.signals.borrow().position());
        let deltas = self.deltas.take();
        let has_cached_tasks = self.has_cached_tasks.replace(false);
        execute(self.connection, "SAVEPOINT attempt").map_err(StoreError::Unavailable)?;
        let result = work(self);
        if let Err(StoreError::Unavailable(cause)) = &result
            && (cause.is_storage_failure() || cause.is_disk_full())
        {
            return Err(StoreError::Unavailable(cause.clone()));
        }
        if self.connection.is_autocommit() {
            return Err(StoreError::Unavailable("the write failed (is the disk full?)".into()));
        }
        if result.is_err() {
            if self.has_cached_tasks.get() {
                self.shared.task_cache.lock().clear();
            }
            self.deltas.take();
            self.new_lanes.borrow_mut().truncate(lanes);
            self.signals.borrow_mut().truncate(signals);
            execute(self.connection, "ROLLBACK TO attempt").map_err(StoreError::Unavailable)?;
        }
        self.deltas.borrow_mut().merge(deltas);
        self.has_cached_tasks.set(self.has_cached_tasks.get() || has_cached_tasks);
        execute(self.connection, "RELEASE attempt").map_err(StoreError::Unavailable)?;
        Ok(result)
    }

    /// Registers a lane that this transaction has created.
    pub fn add_lane(&self, lane: Lane) {
        let mut new = self.new_lanes.borrow_mut();
        new.keyed.insert(lane.id, lane.keyed);
        new.lanes.push(lane);
    }

    /// Returns the number of lanes, including those that this transaction has created.
    pub fn lane_count(&self) -> usize {
        self.shared.lanes.len() + self.new_lanes.borrow().lanes.len()
    }

    /// Returns by how much this transaction has changed a counter. The changes are written before the commit.
    pub fn counter_delta(&self, lane: LaneId, tally: Tally) -> i64 {
        let change = |deltas: &RefCell<Deltas>| deltas.borrow().0.get(&(lane, tally)).copied().unwrap_or(0);
        change(&self.deltas) + change(&self.all_deltas)
    }

    /// Returns whether a lane has one key queue per key.
    pub fn is_keyed(&self, lane: LaneId) -> bool {
        let new = self.new_lanes.borrow().keyed.get(&lane).copied();
        new.unwrap_or_else(|| self.shared.lanes.any_keyed([lane]))
    }
}

impl Writer {
    pub fn start(
        connection: Connection,
        checkpoints: Checkpoints,
        shared: Arc<Shared>,
        signals: broadcast::Sender<Signal>,
        timeout: Duration,
    ) -> Result<Writer> {
        let (small, small_calls) = mpsc::channel(MAX_WAITING_CALLS);
        let (large, large_calls) = mpsc::channel(MAX_WAITING_LARGE_CALLS);
        let waiting = Waiting { small: small_calls, large: large_calls };
        // A task of the runtime sends the answers: waking a hundred callers from this thread one by one costs more
        // than their writes.
        let (committed_sender, mut committed) = mpsc::unbounded_channel::<GroupAnswers>();
        tokio::runtime::Handle::current().spawn(async move {
            while let Some((answers, outcome)) = committed.recv().await {
                for answer in answers {
                    answer(outcome.clone());
                }
            }
        });
        let thread = thread::Builder::new()
            .name("sqlite-writer".into())
            .spawn(move || run(connection, checkpoints, &shared, &signals, waiting, &committed_sender))
            .expect("a thread can be started");
        let senders = Senders { small, large, _wake: WakeOnDrop(thread.thread().clone()) };
        Ok(Writer { timeout, calls: Mutex::new(Some(senders)), thread: Mutex::new(Some(thread)) })
    }

    /// Runs `work` in the next shared transaction, and answers after its commit.
    pub async fn call<T: Send + 'static>(&self, work: impl FnOnce(&Tx) -> Result<T> + Send + 'static) -> Result<T> {
        self.send(work, true, 1).await
    }

    /// Runs work in a transaction of its own.
    pub async fn call_alone<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Tx) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.send(work, true, LARGE_WEIGHT + 1).await
    }

    /// Runs work that writes about `weight` rows.
    pub async fn call_with_weight<T: Send + 'static>(
        &self,
        weight: usize,
        work: impl FnOnce(&Tx) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.send(work, true, weight).await
    }

    /// Runs work that never fails once it has begun to write. It needs no savepoint; if it fails anyway, the whole
    /// transaction is rolled back, unless nothing was written.
    pub async fn call_without_savepoint<T: Send + 'static>(
        &self,
        weight: usize,
        work: impl FnOnce(&Tx) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.send(work, false, weight).await
    }

    async fn send<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Tx) -> Result<T> + Send + 'static,
        has_savepoint: bool,
        weight: usize,
    ) -> Result<T> {
        let (sender, receiver) = oneshot::channel();
        let run = Box::new(move |tx: Option<&Tx>| {
            // A caller that no longer waits has already received an error, so its work is not begun.
            let result = tx.filter(|_| !sender.is_closed()).map(work);
            let kept = match &result {
                Some(Ok(_)) => Kept::Yes,
                Some(Err(StoreError::Unavailable(cause))) => Kept::No(Some(cause.clone())),
                Some(Err(_)) => Kept::No(None),
                None => Kept::Abandoned,
            };
            let answer: Answer = Box::new(move |commit| {
                let answer = match (commit, result) {
                    (Ok(()), Some(result)) => result,
                    (Ok(()), None) => Err(closed()),
                    (Err(cause), _) => Err(StoreError::Unavailable(cause)),
                };
                // The caller may have stopped waiting while its work ran; the work is committed anyway.
                let _ = sender.send(answer);
            });
            (kept, answer)
        });
        let calls = self.calls.lock().clone().ok_or_else(closed)?;
        self.with_timeout(async {
            let queue = if weight > LARGE_WEIGHT { &calls.large } else { &calls.small };
            queue.send(Call { run, has_savepoint, weight }).await.map_err(|_| closed())?;
            drop(calls);
            receiver.await.map_err(|_| closed())?
        })
        .await
    }

    /// Waits for a call until the timeout.
    pub async fn with_timeout<T>(&self, call: impl Future<Output = Result<T>>) -> Result<T> {
        tokio::time::timeout(self.timeout, call).await.unwrap_or_else(|_| Err(StoreError::timed_out(self.timeout)))
    }

    /// Runs `work` in the next shared transaction, without waiting for it. Calls `before` once the queue has room for
    /// it.
    pub async fn wake(
        &self,
        before: impl FnOnce() + Send,
        work: impl FnOnce(Option<&Tx>) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let run: Work = Box::new(move |tx: Option<&Tx>| {
            let kept = match work(tx) {
                Ok(()) => Kept::Yes,
                Err(StoreError::Unavailable(cause)) => Kept::No(Some(cause)),
                Err(_) => Kept::No(None),
            };
            (kept, Box::new(|_| ()) as Answer)
        });
        let calls = self.calls.lock().clone().ok_or_else(closed)?;
        let permit = calls.small.reserve().await.map_err(|_| closed())?;
        before();
        permit.send(Call { run, has_savepoint: false, weight: 1 });
        Ok(())
    }

    pub async fn stop(&self) {
        self.calls.lock().take();
        let thread = self.thread.lock().take();
        if let Some(thread) = thread {
            let _ = tokio::task::spawn_blocking(move || thread.join()).await;
        }
    }
}

fn closed() -> StoreError {
    StoreError::Unavailable("the store is closed".into())
}

fn run(
    connection: Connection,
    mut checkpoints: Checkpoints,
    shared: &Shared,
    signals: &broadcast::Sender<Signal>,
    mut waiting: Waiting,
    committed_sender: &mpsc::UnboundedSender<GroupAnswers>,
) {
    let mut commit = |first: Call, followers: Option<&mut mpsc::Receiver<Call>>| {
        if let Some(cause) = shared.storage.failure() {
            let _ = committed_sender.send((vec![(first.run)(None).1], Err(cause)));
            return;
        }
        // A panic fails the calls of the group (their answers are dropped), not the writer.
        let group = AssertUnwindSafe(|| commit_group(&connection, shared, signals, first, followers));
        match std::panic::catch_unwind(group) {
            Ok(committed) => {
                // An error means that the runtime has ended, and with it the callers.
                let _ = committed_sender.send(committed);
                checkpoints.after_commit(&connection, shared);
            }
            Err(_) => {
                tracing::error!("database calls failed because of a panic, report this as a bug");
                shared.task_cache.lock().clear();
                if !connection.is_autocommit() {
                    let _ = connection.execute_batch("ROLLBACK");
                }
            }
        }
    };
    loop {
        // Small calls first, then one large call, so that neither waits for all of the others.
        let small = waiting.small.try_recv();
        let is_closed = matches!(small, Err(TryRecvError::Disconnected));
        let is_idle = small.is_err();
        if let Ok(first) = small {
            commit(first, Some(&mut waiting.small));
        }
        match waiting.large.try_recv() {
            Ok(call) => commit(call, None),
            Err(TryRecvError::Disconnected) if is_closed => break,
            // A caller drops its senders after it has sent, which unparks this thread: a call that arrives now ends the
            // sleep.
            Err(_) if is_idle => thread::park(),
            Err(_) => {}
        }
    }
    checkpoints.stop();
    if shared.storage.failure().is_some() {
        // Closing the last connection would copy the log into the file. The next start does that, after a check.
        std::mem::forget(connection);
        return;
    }
    // Leaves a file without a write-ahead log; not needed for safety.
    let _ = connection.execute_batch("PRAGMA wal_checkpoint(TRUNCATE)");
}

/// Commits `first` and those of `followers` that already wait, up to the bounds of a group.
fn commit_group(
    connection: &Connection,
    shared: &Shared,
    signals: &broadcast::Sender<Signal>,
    first: Call,
    mut followers: Option<&mut mpsc::Receiver<Call>>,
) -> GroupAnswers {
    let tx = Tx::new(connection, shared);
    let mut weight = 0;
    let mut answers = Vec::new();
    let mut outcome = execute(connection, "BEGIN IMMEDIATE").and_then(|()| check_file(&tx));
    let has_begun = outcome.is_ok();
    let mut next = Some(first);
    while let Some(call) = next {
        weight += call.weight;
        match outcome {
            Ok(()) => {
                let (answer, state) =
                    if call.has_savepoint { in_savepoint(&tx, call) } else { run_in_group(&tx, call) };
                answers.push(answer);
                outcome = state;
            }
            Err(_) => answers.push((call.run)(None).1),
        }
        let has_room = answers.len() < MAX_GROUP_CALLS && weight < GROUP_WEIGHT;
        // After a call has lost the transaction, those that wait are run in the next one. If it could not begin, they fail too:
        // each of them would wait again as long as this one for the lock of the file.
        let is_lost = has_begun && outcome.is_err();
        next = followers.as_mut().filter(|_| has_room && !is_lost).and_then(|calls| calls.try_recv().ok());
    }
    if outcome.is_ok() {
        outcome = write_counters(&tx).and_then(|()| execute(connection, "COMMIT"));
    }
    if let Err(cause) = outcome {
        shared.task_cache.lock().clear();
        outcome = Err(shared.storage.record(cause));
        if !connection.is_autocommit() {
            let _ = connection.execute_batch("ROLLBACK");
        }
    }
    if outcome.is_ok() {
        shared.lanes.insert(tx.new_lanes.take().lanes);
        shared.lanes.remove(&tx.removed_lanes.take());
    }
    if outcome.is_ok() {
        tx.signals.take().send(shared, signals);
        if shared.events_on.load(Ordering::Relaxed) {
            let _ = signals.send(Signal::Event);
        }
    }
    answers.append(&mut tx.answers.borrow_mut());
    (answers, outcome)
}

/// Clears the task cache if another connection has changed the file, such as an operator's `sqlite3` shell.
fn check_file(tx: &Tx) -> Outcome {
    let version = tx
        .connection
        .prepare_cached("PRAGMA data_version")
        .and_then(|mut pragma| pragma.query_row([], |row| row.get(0)));
    tx.shared.task_cache.lock().set_file_version(version.map_err(cause)?);
    Ok(())
}

fn write_counters(tx: &Tx) -> Outcome {
    let write = || -> rusqlite::Result<()> {
        let mut statement = tx.connection.prepare_cached(
            "INSERT INTO counter (lane, tally, n) VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET n = n + excluded.n",
        )?;
        for ((lane, tally), n) in tx.all_deltas.borrow().0.iter().filter(|(_, n)| **n != 0) {
            statement.execute((lane, *tally as i16, n))?;
        }
        Ok(())
    };
    write().map_err(cause)
}

/// Runs one call whose failure fails the whole group.
fn run_in_group(tx: &Tx, call: Call) -> (Answer, Outcome) {
    tx.has_cached_tasks.set(false);
    let before = tx.connection.total_changes();
    let (kept, answer) = (call.run)(Some(tx));
    let has_written = tx.connection.total_changes() != before;
    let deltas = tx.deltas.take();
    let is_broken = matches!(&kept, Kept::No(Some(cause)) if cause.is_storage_failure() || cause.is_disk_full());
    let is_failed = matches!(kept, Kept::No(_));
    if is_broken || tx.connection.is_autocommit() || is_failed && has_written {
        return (answer, Err(kept.failure()));
    }
    if matches!(kept, Kept::Yes) {
        tx.all_deltas.borrow_mut().merge(deltas);
    } else if tx.has_cached_tasks.get() {
        tx.shared.task_cache.lock().clear();
    }
    (answer, Ok(()))
}

/// Runs one call so that its failure undoes only its own writes.
///
/// The second value is an error if the whole transaction is lost, as happens on a full disk.
fn in_savepoint(tx: &Tx, call: Call) -> (Answer, Outcome) {
    let lanes = tx.new_lanes.borrow().lanes.len();
    let signals = tx.signals.borrow().position();
    tx.has_cached_tasks.set(false);
    let state = execute(tx.connection, "SAVEPOINT call");
    let (kept, answer) = (call.run)(Some(tx));
    let deltas = tx.deltas.take();
    let is_broken = matches!(&kept, Kept::No(Some(cause)) if cause.is_storage_failure() || cause.is_disk_full());
    if is_broken || tx.connection.is_autocommit() {
        return (answer, Err(kept.failure()));
    }
    let end = if matches!(kept, Kept::Yes) {
        tx.all_deltas.borrow_mut().merge(deltas);
        execute(tx.connection, "RELEASE call")
    } else {
        if tx.has_cached_tasks.get() {
            tx.shared.task_cache.lock().clear();
        }
        tx.new_lanes.borrow_mut().truncate(lanes);
        tx.signals.borrow_mut().truncate(signals);
        tx.removed_lanes.borrow_mut().clear();
        execute(tx.connection, "ROLLBACK TO call").and_then(|()| execute(tx.connection, "RELEASE call"))
    };
    (answer, state.and(end))
}

impl Kept {
    /// Returns why the transaction is lost.
    fn failure(self) -> Cause {
        match self {
            Kept::No(Some(cause)) => cause,
            _ => "the write failed (is the disk full?)".into(),
        }
    }
}

fn execute(connection: &Connection, sql: &str) -> Outcome {
    connection.prepare_cached(sql).and_then(|mut statement| statement.execute([])).map(|_| ()).map_err(cause)
}

pub fn cause(error: rusqlite::Error) -> Cause {
    match StoreError::from(error) {
        StoreError::Unavailable(cause) | StoreError::Internal(cause) => cause,
        other => other.to_string().into(),
    }
}

#[cfg(test)]
mod tests;
