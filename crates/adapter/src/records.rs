//! What a service keeps on disk: one folder per task with a record of its latest work, and the position in the event stream.
//!
//! A record is written to another file, synced and renamed, so a reader finds the old one or the new one.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{
    CannotStart,
    outgoing::Outgoing,
    private,
    task::{Known, WorkItem},
};

/// The latest work of a task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    pub item: WorkItem,
    #[serde(default)]
    pub known: Known,
    /// The commit from which the work starts again if it is interrupted.
    #[serde(default)]
    pub start: Option<String>,
    /// Commit of the finished change, whether or not it is pushed.
    #[serde(default)]
    pub commit: Option<String>,
    #[serde(default)]
    pub result: Option<Outgoing>,
    /// Whether the server or the broker has received the result.
    #[serde(default)]
    pub is_delivered: bool,
    /// Ids of earlier work, to ignore messages that a broker delivers again.
    #[serde(default)]
    pub past: Vec<String>,
}

/// How many ids of earlier work a record keeps. The built-in machine has at most seven rounds.
const MAX_PAST: usize = 100;

impl Record {
    pub fn new(item: WorkItem, previous: Option<Record>) -> Record {
        let (mut known, mut past, mut start) = (Known::default(), Vec::new(), None);
        if let Some(previous) = previous {
            (known, past) = (previous.known, previous.past);
            past.push(previous.item.id);
            past.drain(..past.len().saturating_sub(MAX_PAST));
            // The next round starts from the change of the last one. A plan changes nothing, so it keeps the start.
            start = previous.commit.or(previous.start);
        }
        known.update(&item.work);
        Record { item, known, start, commit: None, result: None, is_delivered: false, past }
    }
}

/// The folder of one service. No other process may use it at the same time.
pub struct Records {
    folder: PathBuf,
    _lock: File,
}

impl Records {
    pub fn open(folder: &Path) -> Result<Records, CannotStart> {
        let cannot = |error: io::Error| CannotStart(format!("--workdir {}: {error}", folder.display()));
        private::create_folder(&folder.join("tasks")).map_err(cannot)?;
        let folder = folder.canonicalize().map_err(cannot)?;
        let lock = private::create_file(&folder.join("lock")).map_err(cannot)?;
        match lock.try_lock() {
            Ok(()) => Ok(Records { folder, _lock: lock }),
            Err(fs::TryLockError::WouldBlock) => Err(CannotStart(format!(
                "--workdir {}: another adapter uses this folder; give each adapter its own",
                folder.display()
            ))),
            Err(fs::TryLockError::Error(error)) => Err(cannot(error)),
        }
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the folder of a task.
    pub fn task_folder(&self, task: &str) -> PathBuf {
        self.folder.join("tasks").join(task)
    }

    pub fn load(&self, task: &str) -> Option<Record> {
        let path = self.task_folder(task).join("record.json");
        let text = fs::read(&path).ok()?;
        match serde_json::from_slice(&text) {
            Ok(record) => Some(record),
            Err(error) => {
                tracing::warn!(task, %error, "cannot read the record of a task, starting its work again");
                None
            }
        }
    }

    pub fn save(&self, record: &Record) -> io::Result<()> {
        let folder = self.task_folder(&record.item.task);
        private::create_folder(&folder)?;
        write_atomically(&folder.join("record.json"), &serde_json::to_vec_pretty(record)?)
    }

    /// Deletes the record of a task and everything in its folder.
    pub fn remove(&self, task: &str) -> io::Result<()> {
        match fs::remove_dir_all(self.task_folder(task)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Returns the ids of the tasks that have a folder.
    pub fn tasks(&self) -> Vec<String> {
        let entries = fs::read_dir(self.folder.join("tasks")).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
    }

    pub fn position(&self) -> Option<String> {
        let text = fs::read_to_string(self.folder.join("position")).ok()?;
        Some(text.trim().to_owned()).filter(|position| !position.is_empty())
    }

    pub fn save_position(&self, position: &str) -> io::Result<()> {
        write_atomically(&self.folder.join("position"), position.as_bytes())
    }
}

fn write_atomically(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let temporary = path.with_extension("new");
    let mut file = private::create_file(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&temporary, path)?;
    match path.parent() {
        Some(folder) => File::open(folder)?.sync_all(),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::Work;

    #[test]
    fn a_record_survives_and_the_next_round_starts_from_its_change() {
        let folder = tempfile::tempdir().expect("a folder");
        let records = Records::open(folder.path()).expect("a folder of records");
        assert!(Records::open(folder.path()).is_err(), "a second service is refused");
        let item = |id: &str| WorkItem {
            task: "t".into(),
            id: id.into(),
            work: Work::Plan { repository: "/r".into(), prompt: "p".into() },
        };
        assert_eq!(records.load("t"), None);
        let record = Record { commit: Some("abc".into()), ..Record::new(item("1"), None) };
        records.save(&record).expect("saved");
        assert_eq!(records.load("t"), Some(record.clone()));
        let next = Record::new(item("2"), Some(record));
        assert_eq!((next.start.as_deref(), next.known.prompt.as_deref()), (Some("abc"), Some("p")));
        assert_eq!(records.tasks(), ["t"]);
        records.save_position("7").expect("saved");
        assert_eq!(records.position().as_deref(), Some("7"));
        records.remove("t").expect("removed");
        records.remove("t").expect("removed again");
        assert!(records.tasks().is_empty());
    }
}
