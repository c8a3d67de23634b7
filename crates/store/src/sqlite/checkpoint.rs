//! Copies the write-ahead log into the database file, most of it without blocking the writer.
//!
//! A thread with a connection of its own copies the pages while the writer continues. Then the writer copies the few that were added
//! meanwhile, after which the log begins again at its start. A log that grows faster than it is copied makes the writer wait.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI32, Ordering},
        mpsc,
    },
    thread,
};

use rusqlite::{Connection, hooks::Wal};

use super::{Shared, writer::cause};
use crate::Result;

/// Number of pages in the log at which a copy starts: 32 MiB. That is enough to copy a page that changes often only
/// once, and small enough for the log to stay in the page cache.
const PAGES: i32 = 8_192;
/// Number of pages in the log at which the writer waits for the copy.
const MAX_PAGES: i32 = 2 * PAGES;
/// The thread stops when no more than this number of pages is left for the writer to copy.
const LAST_PAGES: i32 = 256;
/// How many copies the thread makes in a row at most. Each one copies what was added during the previous one.
const ROUNDS: usize = 4;

pub struct Checkpoints {
    /// Number of pages in the log after the last commit.
    log_pages: Arc<AtomicI32>,
    /// Number of pages at which the next copy starts.
    next_at: i32,
    requests: mpsc::SyncSender<()>,
    copied: mpsc::Receiver<()>,
    is_copying: bool,
    thread: thread::JoinHandle<()>,
}

impl Checkpoints {
    /// Starts the thread, which uses `connection`.
    pub fn start(writer: &mut Connection, connection: Connection, shared: Arc<Shared>) -> Result<Checkpoints> {
        // Replaces SQLite's automatic checkpoints, which ignore their errors.
        let log_pages = Arc::new(AtomicI32::new(0));
        let counted = log_pages.clone();
        writer.wal_hook(Some(move |_: &mut Wal, pages| {
            counted.store(pages, Ordering::Relaxed);
            Ok(())
        }))?;
        let (requests, received) = mpsc::sync_channel(1);
        let (done, copied) = mpsc::sync_channel(1);
        let pages = log_pages.clone();
        let thread = thread::Builder::new()
            .name("sqlite-checkpoint".into())
            .spawn(move || {
                while received.recv().is_ok() {
                    copy_most(&connection, &shared, &pages);
                    let _ = done.send(());
                }
                if shared.storage.failure().is_some() {
                    // Closing the last connection would copy the log into the file.
                    std::mem::forget(connection);
                }
            })
            .expect("a thread can be started");
        Ok(Checkpoints { log_pages, next_at: PAGES, requests, copied, is_copying: false, thread })
    }

    /// Starts or ends a copy if it is time. The writer calls this after each commit.
    pub fn after_commit(&mut self, writer: &Connection, shared: &Shared) {
        let pages = self.log_pages.load(Ordering::Relaxed);
        if !self.is_copying {
            if pages >= self.next_at && shared.storage.failure().is_none() {
                self.is_copying = self.requests.send(()).is_ok();
            }
            return;
        }
        let is_copied = if pages < MAX_PAGES { self.copied.try_recv().is_ok() } else { self.copied.recv().is_ok() };
        if is_copied {
            self.is_copying = false;
            let left = copy(writer, shared).map_or(0, |copied| pages - copied);
            // Pages that a reader still needs stay in the log.
            self.next_at = if left > 0 { pages + PAGES / 4 } else { PAGES };
        }
    }

    /// Waits until the thread has ended.
    pub fn stop(self) {
        drop((self.requests, self.copied));
        let _ = self.thread.join();
    }
}

/// Copies until few pages are left, or until another copy would not help.
fn copy_most(connection: &Connection, shared: &Shared, log_pages: &AtomicI32) {
    let mut before = 0;
    for _ in 0..ROUNDS {
        if shared.storage.failure().is_some() {
            return;
        }
        let Some(copied) = copy(connection, shared).filter(|copied| *copied > before) else { return };
        if log_pages.load(Ordering::Relaxed) - copied <= LAST_PAGES {
            return;
        }
        before = copied;
    }
}

/// Copies as many pages as it can without waiting for readers. Returns how many pages of the log have been copied so
/// far.
fn copy(connection: &Connection, shared: &Shared) -> Option<i32> {
    match connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |row| row.get(2)) {
        Ok(copied) => Some(copied),
        Err(error) => {
            shared.storage.record(cause(error));
            None
        }
    }
}
