//! The writer thread. Calls that arrive while it commits share the next commit.
//!
//! Each call runs in a savepoint of the shared transaction, so that a failing call undoes only its own writes. Answers and
//! signals leave after the commit.
//!
//! When the disk rejects a write or does not confirm it, the writer stops for ever (`storage.rs`): what was written before may be
//! lost too.

use std::{
    cell::{Cell, RefCell},
    panic::AssertUnwindSafe,
    sync::{
        Arc,
        atomic::{AtomicI32, Ordering},
    },
    thread,
    time::Duration,
};

use parking_lot::Mutex;
use rusqlite::{Connection, hooks::Wal};
use tokio::sync::{broadcast, mpsc, oneshot};

use super::Shared;
use crate::{Cause, Lane, LaneId, Result, Signal, StoreError, Tally, plan::Deltas};

/// Number of calls that may wait for the writer; further callers wait for a place.
const QUEUE: usize = 4_096;
/// Number of calls that share one commit.
const GROUP: usize = 512;
/// Pages of the write-ahead log after which they are copied into the file. 16 MiB are large enough to write each page once per
/// burst, small enough to stay in cache.
const CHECKPOINT_PAGES: i32 = 4_096;

/// Whether the transaction can go on, or why it cannot.
type Outcome = std::result::Result<(), Cause>;
type Answer = Box<dyn FnOnce(Outcome) + Send>;
/// Gets no transaction if that was lost before its turn. Returns the error of the database if the call failed with one.
type Work = Box<dyn FnOnce(Option<&Tx>) -> (Kept, Answer) + Send>;

/// What becomes of the writes of a call.
enum Kept {
    Yes,
    No(Option<Cause>),
    /// It was not made, because the caller no longer waits.
    Abandoned,
}

struct Call {
    run: Work,
    /// Whether it may fail after it has begun to write without failing the other calls.
    undoable: bool,
}
type GroupAnswers = (Vec<Answer>, Outcome);

pub struct Writer {
    /// Limit for one call, including the wait for its turn.
    timeout: Duration,
    calls: Mutex<Option<mpsc::Sender<Call>>>,
    thread: Mutex<Option<thread::JoinHandle<()>>>,
}

/// What a call uses: the connection inside the shared transaction, and what follows after the commit.
pub struct Tx<'a> {
    pub connection: &'a Connection,
    pub shared: &'a Shared,
    pub new_lanes: RefCell<Vec<Lane>>,
    pub signals: RefCell<Vec<Signal>>,
    /// Answers to callers that this transaction serves besides those of its own calls.
    answers: RefCell<Vec<Answer>>,
    /// Whether the current call has put tasks into the cache. If its writes are undone, they must leave it.
    pub has_cached_tasks: Cell<bool>,
    /// Changes of the counters: of the current call, and of those before it. Written once, before the commit.
    pub deltas: RefCell<Deltas>,
    all_deltas: RefCell<Deltas>,
}

impl Tx<'_> {
    pub fn signal(&self, signal: Signal) {
        signal.add_to(&mut self.signals.borrow_mut());
    }

    /// Calls `answer` with the outcome of the commit.
    pub fn answer(&self, answer: impl FnOnce(Outcome) + Send + 'static) {
        self.answers.borrow_mut().push(Box::new(answer));
    }

    /// Runs work so that its failure undoes only its own writes. The outer error means that the whole transaction is lost.
    pub fn attempt<T>(&self, work: impl FnOnce(&Tx) -> Result<T>) -> Result<Result<T>> {
        let (lanes, signals) = (self.new_lanes.borrow().len(), self.signals.borrow().len());
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

    /// Returns how the calls of this transaction have changed a counter that is not written yet.
    pub fn uncounted(&self, lane: LaneId, tally: Tally) -> i64 {
        let change = |deltas: &RefCell<Deltas>| deltas.borrow().0.get(&(lane, tally)).copied().unwrap_or(0);
        change(&self.deltas) + change(&self.all_deltas)
    }

    /// Returns whether a lane has one key queue per key.
    pub fn is_keyed(&self, lane: LaneId) -> bool {
        let new = self.new_lanes.borrow();
        match new.iter().find(|new| new.id == lane) {
            Some(new) => new.keyed,
            None => self.shared.lanes.any_keyed([lane]),
        }
    }
}

impl Writer {
    pub fn start(
        mut connection: Connection,
        shared: Arc<Shared>,
        signals: broadcast::Sender<Signal>,
        timeout: Duration,
    ) -> Result<Writer> {
        let (sender, receiver) = mpsc::channel(QUEUE);
        // SQLite ignores the errors of its automatic checkpoints, so the writer makes them itself.
        let log_pages = Arc::new(AtomicI32::new(0));
        let counted = log_pages.clone();
        connection.wal_hook(Some(move |_: &mut Wal, pages| {
            counted.store(pages, Ordering::Relaxed);
            Ok(())
        }))?;
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
            .spawn(move || run(connection, &shared, &signals, receiver, &committed_sender, &log_pages))
            .expect("a thread can be started");
        Ok(Writer { timeout, calls: Mutex::new(Some(sender)), thread: Mutex::new(Some(thread)) })
    }

    /// Runs `work` in the next shared transaction, and answers after its commit.
    pub async fn call<T: Send + 'static>(&self, work: impl FnOnce(&Tx) -> Result<T> + Send + 'static) -> Result<T> {
        self.send(work, true).await
    }

    /// Runs work that never fails once it has begun to write. Saves the savepoint; if the work fails anyway, the whole
    /// transaction is rolled back.
    pub async fn call_without_savepoint<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Tx) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.send(work, false).await
    }

    async fn send<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Tx) -> Result<T> + Send + 'static,
        undoable: bool,
    ) -> Result<T> {
        let (sender, receiver) = oneshot::channel();
        let run = Box::new(move |tx: Option<&Tx>| {
            // A caller that no longer waits was told that nothing was changed.
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
                // The caller may have left while its work was done; it is committed anyway.
                let _ = sender.send(answer);
            });
            (kept, answer)
        });
        let calls = self.calls.lock().clone().ok_or_else(closed)?;
        self.in_time(async {
            calls.send(Call { run, undoable }).await.map_err(|_| closed())?;
            receiver.await.map_err(|_| closed())?
        })
        .await
    }

    /// Waits for a call for no longer than it may take.
    pub async fn in_time<T>(&self, call: impl Future<Output = Result<T>>) -> Result<T> {
        tokio::time::timeout(self.timeout, call).await.unwrap_or_else(|_| Err(StoreError::timed_out(self.timeout)))
    }

    /// Runs `work` in the next shared transaction, without waiting for it. Calls `before` when that is certain.
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
        let place = calls.reserve().await.map_err(|_| closed())?;
        before();
        place.send(Call { run, undoable: false });
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
    shared: &Shared,
    signals: &broadcast::Sender<Signal>,
    mut calls: mpsc::Receiver<Call>,
    committed_sender: &mpsc::UnboundedSender<GroupAnswers>,
    log_pages: &AtomicI32,
) {
    while let Some(first) = calls.blocking_recv() {
        if let Some(cause) = shared.storage.failure() {
            let _ = committed_sender.send((vec![(first.run)(None).1], Err(cause)));
            continue;
        }
        // A panic fails the calls of the group (their answers are dropped), not the writer.
        let group = AssertUnwindSafe(|| commit_group(&connection, shared, signals, first, &mut calls));
        match std::panic::catch_unwind(group) {
            Ok(committed) => {
                // An error means that the runtime has ended, and with it the callers.
                let _ = committed_sender.send(committed);
                checkpoint(&connection, shared, log_pages);
            }
            Err(_) => {
                tracing::error!("database calls panicked");
                shared.task_cache.lock().clear();
                if !connection.is_autocommit() {
                    let _ = connection.execute_batch("ROLLBACK");
                }
            }
        }
    }
    if shared.storage.failure().is_some() {
        // Closing the last connection would copy the log into the file. The next start does that, after a check.
        std::mem::forget(connection);
        return;
    }
    // Leaves a file without a write-ahead log; not needed for safety.
    let _ = connection.execute_batch("PRAGMA wal_checkpoint(TRUNCATE)");
}

/// Copies a log that has grown into the file. Readers that still need the log are left alone.
fn checkpoint(connection: &Connection, shared: &Shared, log_pages: &AtomicI32) {
    if log_pages.load(Ordering::Relaxed) < CHECKPOINT_PAGES || shared.storage.failure().is_some() {
        return;
    }
    match connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(())) {
        // The next commit counts the pages that readers kept in the log.
        Ok(()) => log_pages.store(0, Ordering::Relaxed),
        Err(error) => drop(shared.storage.record(cause(error))),
    }
}

fn commit_group(
    connection: &Connection,
    shared: &Shared,
    signals: &broadcast::Sender<Signal>,
    first: Call,
    calls: &mut mpsc::Receiver<Call>,
) -> GroupAnswers {
    let tx = Tx {
        connection,
        shared,
        new_lanes: RefCell::default(),
        signals: RefCell::default(),
        answers: RefCell::default(),
        has_cached_tasks: Cell::default(),
        deltas: RefCell::default(),
        all_deltas: RefCell::default(),
    };
    let mut answers = Vec::new();
    let mut outcome = execute(connection, "BEGIN IMMEDIATE").and_then(|()| check_file(&tx));
    let mut next = Some(first);
    while let Some(call) = next {
        match outcome {
            Ok(()) => {
                let (answer, state) = if call.undoable { in_savepoint(&tx, call) } else { run_in_group(&tx, call) };
                answers.push(answer);
                outcome = state;
            }
            Err(_) => answers.push((call.run)(None).1),
        }
        next = if answers.len() < GROUP { calls.try_recv().ok() } else { None };
    }
    if outcome.is_ok() {
        outcome = count(&tx).and_then(|()| execute(connection, "COMMIT"));
    }
    if let Err(cause) = outcome {
        shared.task_cache.lock().clear();
        outcome = Err(shared.storage.record(cause));
        if !connection.is_autocommit() {
            let _ = connection.execute_batch("ROLLBACK");
        }
    }
    if outcome.is_ok() {
        shared.lanes.insert(tx.new_lanes.take());
    }
    if outcome.is_ok() {
        for signal in tx.signals.take() {
            let _ = signals.send(signal);
        }
        if shared.events_on.load(Ordering::Relaxed) {
            let _ = signals.send(Signal::Event);
        }
    }
    answers.append(&mut tx.answers.borrow_mut());
    (answers, outcome)
}

/// Forgets cached tasks if another connection has changed the file, as a person with a shell can.
fn check_file(tx: &Tx) -> Outcome {
    let version = tx
        .connection
        .prepare_cached("PRAGMA data_version")
        .and_then(|mut pragma| pragma.query_row([], |row| row.get(0)));
    tx.shared.task_cache.lock().at_version(version.map_err(cause)?);
    Ok(())
}

fn count(tx: &Tx) -> Outcome {
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
    let (kept, answer) = (call.run)(Some(tx));
    tx.all_deltas.borrow_mut().merge(tx.deltas.take());
    match kept {
        Kept::Yes | Kept::Abandoned if !tx.connection.is_autocommit() => (answer, Ok(())),
        kept => (answer, Err(kept.failure())),
    }
}

/// Runs one call so that its failure undoes only its own writes.
///
/// The second value is an error if the whole transaction is lost, as happens on a full disk.
fn in_savepoint(tx: &Tx, call: Call) -> (Answer, Outcome) {
    let lanes = tx.new_lanes.borrow().len();
    let signals = tx.signals.borrow().len();
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

fn cause(error: rusqlite::Error) -> Cause {
    match StoreError::from(error) {
        StoreError::Unavailable(cause) | StoreError::Internal(cause) => cause,
        other => other.to_string().into(),
    }
}
