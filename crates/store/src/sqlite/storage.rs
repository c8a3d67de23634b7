//! The disk below the database: whether it is full, and whether it has failed.
//!
//! After a failed `fsync` the kernel forgets which pages it could not write, so a second `fsync` succeeds although data is lost. No
//! later answer of the disk can be trusted then. So, as PostgreSQL does, the store accepts no more writes, the process ends, and a
//! file next to the database makes the next process check the database before it uses it.

use std::{
    fs,
    io::Write,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
};

use rusqlite::Connection;
use tokio::sync::watch;

use crate::{Cause, Result, StoreError};

/// Space that must be free again before a full disk counts as usable: enough for a few transactions.
const SPACE_BYTES: usize = 256 << 10;

pub struct Storage {
    path: PathBuf,
    is_full: AtomicBool,
    failure: watch::Sender<Option<Cause>>,
}

impl Storage {
    pub fn new(path: &Path) -> Storage {
        Storage { path: path.to_owned(), is_full: AtomicBool::default(), failure: watch::Sender::new(None) }
    }

    /// Returns why nothing can be written any more.
    pub fn failure(&self) -> Option<Cause> {
        self.failure.borrow().clone()
    }

    /// Waits until the disk has failed, and returns why.
    pub async fn failed(&self) -> String {
        let mut failure = self.failure.subscribe();
        // The sender lives as long as this value.
        let _ = failure.wait_for(Option::is_some).await;
        self.failure().map(|cause| cause.to_string()).unwrap_or_default()
    }

    /// Records a write error that means the disk is full or has failed. Returns the error for the callers.
    pub fn record(&self, cause: Cause) -> Cause {
        if cause.is_disk_full() {
            self.is_full.store(true, Ordering::Relaxed);
        }
        if !cause.is_storage_failure() {
            return cause;
        }
        tracing::error!(error = %cause, "disk failed, no more writes are accepted");
        if let Err(error) = self.mark(&cause) {
            tracing::error!(%error, "failure not recorded, check the database with \"faena doctor\" before the next start");
        }
        let public = cause.with_public_reason("the disk of the database has failed; the server is shutting down");
        self.failure.send_replace(Some(public.clone()));
        public
    }

    fn mark(&self, cause: &Cause) -> std::io::Result<()> {
        let mut file =
            fs::OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(marker(&self.path))?;
        writeln!(file, "{cause}")?;
        // If the disk does not confirm it, nothing more can be done. Usually the file only has to survive this process.
        let _ = file.sync_all();
        Ok(())
    }

    /// Checks that the disk accepts writes, if it was full. Blocks.
    ///
    /// A small transaction proves nothing: it often succeeds on a full disk, because the write-ahead log reuses its
    /// space.
    pub fn check_space(&self) -> Result<()> {
        if !self.is_full.load(Ordering::Relaxed) {
            return Ok(());
        }
        let path = with_suffix(&self.path, "space");
        let write = || {
            let mut file = fs::OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(&path)?;
            file.write_all(&vec![b'x'; SPACE_BYTES])?;
            file.sync_all()
        };
        let written = write();
        let _ = fs::remove_file(&path);
        match written {
            Ok(()) => {
                self.is_full.store(false, Ordering::Relaxed);
                Ok(())
            }
            Err(_) => Err(StoreError::Unavailable(Cause::disk_full())),
        }
    }
}

/// Checks a database that the last process left after the disk had failed.
///
/// # Errors
/// `StoreError::Setup` if the database is damaged. It is checked again at the next start.
pub fn check_after_failure(path: &Path, connection: &Connection) -> Result<()> {
    let Ok(reason) = fs::read_to_string(marker(path)) else { return Ok(()) };
    let problem: String = connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0))?;
    if problem != "ok" {
        return Err(StoreError::Setup(format!(
            "{} is damaged after the disk failed ({}): {problem}; restore a backup, and remove {} once the file is repaired",
            path.display(),
            reason.trim_end(),
            marker(path).display()
        )));
    }
    tracing::warn!(reason = reason.trim_end(), "database checked after the disk failed, it is intact");
    fs::remove_file(marker(path)).map_err(|e| StoreError::Internal(Cause::of(e)))
}

fn marker(path: &Path) -> PathBuf {
    with_suffix(path, "failed")
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    PathBuf::from(format!("{}.{suffix}", path.display()))
}
