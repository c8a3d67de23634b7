//! A log file: one JSON line per message, on disk when it is confirmed, rotated by size.
//!
//! A batch is written in one go. If that fails half-way the file is cut back to where it was, and if that fails too, or the process died in the middle, the
//! torn line is closed with a line break before the next one, so that a reader loses no line but that one.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Read, Seek, SeekFrom, Write},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use faena_domain::Timestamp;
use serde::Serialize;
use serde_json::value::RawValue;

use crate::{DEFAULT_TIMEOUT, Message, Published, Sink, Verdict};

#[derive(Clone, Debug)]
pub struct FileSinkOptions {
    pub path: PathBuf,
    /// A file that would grow beyond this becomes `<path>.1`. A single line may be longer.
    pub max_bytes: u64,
    /// How many old files are kept; with 0 the file is emptied.
    pub keep: usize,
    /// How long one call to `publish` waits for the disk.
    pub timeout: Duration,
}

impl FileSinkOptions {
    pub fn new(path: impl Into<PathBuf>) -> Self {
        FileSinkOptions { path: path.into(), max_bytes: 100 * 1024 * 1024, keep: 5, timeout: DEFAULT_TIMEOUT }
    }
}

pub struct FileSink {
    log: Arc<Mutex<Log>>,
    path: PathBuf,
    timeout: Duration,
}

struct Log {
    options: FileSinkOptions,
    open: Option<Open>,
}

struct Open {
    file: File,
    bytes: u64,
    /// Device and inode: which file it is, whatever it is called by now.
    identity: (u64, u64),
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Line<'a> {
    id: &'a str,
    r#type: &'a str,
    key: &'a str,
    sequence: i64,
    at: Timestamp,
    #[serde(skip_serializing_if = "Option::is_none")]
    correlation_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    traceparent: Option<&'a str>,
    content_type: &'a str,
    body: Body<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Body<'a> {
    Json(&'a RawValue),
    Text(&'a str),
}

impl FileSink {
    pub fn new(options: FileSinkOptions) -> Self {
        let (path, timeout) = (options.path.clone(), options.timeout);
        FileSink { log: Arc::new(Mutex::new(Log { options, open: None })), path, timeout }
    }
}

#[async_trait]
impl Sink for FileSink {
    async fn publish(&self, messages: &[Message]) -> Published {
        let mut lines = Vec::with_capacity(messages.len());
        let mut verdicts = Vec::with_capacity(messages.len());
        for message in messages {
            match line(message) {
                Ok(line) => {
                    lines.push(line);
                    verdicts.push(Some(Verdict::Confirmed));
                }
                Err(reason) => verdicts.push(Some(Verdict::Refused(reason))),
            }
        }
        let log = self.log.clone();
        let writing =
            tokio::task::spawn_blocking(move || log.lock().unwrap_or_else(PoisonError::into_inner).append(&lines));
        let down = match tokio::time::timeout(self.timeout, writing).await {
            Ok(Ok(Ok(()))) => return Published { verdicts, down: None },
            Ok(Ok(Err(error))) => format!("cannot write {}: {error}", self.path.display()),
            Ok(Err(_)) => format!("writing {} broke off", self.path.display()),
            Err(_) => format!("the disk of {} did not answer within {:?}", self.path.display(), self.timeout),
        };
        // What is bad stays bad; of the rest nothing is known.
        for verdict in verdicts.iter_mut().filter(|verdict| **verdict == Some(Verdict::Confirmed)) {
            *verdict = None;
        }
        Published { verdicts, down: Some(down) }
    }

    async fn close(&self) {
        let log = self.log.clone();
        let closing =
            tokio::task::spawn_blocking(move || log.lock().unwrap_or_else(PoisonError::into_inner).open = None);
        let _ = tokio::time::timeout(self.timeout, closing).await;
    }
}

fn line(message: &Message) -> Result<Vec<u8>, String> {
    let text = std::str::from_utf8(&message.body).map_err(|_| "its body is no text")?;
    // A line break inside JSON can only be white space.
    let flat = if text.contains(['\n', '\r']) { text.replace(['\n', '\r'], " ") } else { text.to_owned() };
    let body = match serde_json::from_str::<&RawValue>(&flat) {
        Ok(json) => Body::Json(json),
        Err(_) => Body::Text(text),
    };
    let line = Line {
        id: &message.id,
        r#type: &message.kind,
        key: &message.key,
        sequence: message.sequence,
        at: message.at,
        correlation_id: message.correlation_id.as_deref(),
        traceparent: message.traceparent.as_deref(),
        content_type: &message.content_type,
        body,
    };
    let mut line = serde_json::to_vec(&line).map_err(|error| error.to_string())?;
    line.push(b'\n');
    Ok(line)
}

impl Log {
    fn append(&mut self, lines: &[Vec<u8>]) -> io::Result<()> {
        let mut open = match self.open.take() {
            Some(open) if self.still_there(&open) => open,
            _ => self.open()?,
        };
        let mut batch = Vec::new();
        for line in lines {
            let grown = open.bytes + (batch.len() + line.len()) as u64;
            if grown > self.options.max_bytes && (open.bytes > 0 || !batch.is_empty()) {
                open.write(&batch)?;
                batch.clear();
                open = self.rotate(open)?;
            }
            batch.extend_from_slice(line);
        }
        open.write(&batch)?;
        self.open = Some(open);
        Ok(())
    }

    /// Somebody may have moved or removed it.
    fn still_there(&self, open: &Open) -> bool {
        fs::metadata(&self.options.path)
            .is_ok_and(|now| (now.dev(), now.ino()) == open.identity && now.len() == open.bytes)
    }

    fn open(&self) -> io::Result<Open> {
        let path = &self.options.path;
        let mut file = OpenOptions::new().read(true).append(true).create(true).open(path)?;
        file.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => io::Error::other("another process writes it"),
            TryLockError::Error(error) => error,
        })?;
        sync_folder(path)?;
        let known = file.metadata()?;
        let mut open = Open { bytes: known.len(), identity: (known.dev(), known.ino()), file: file.try_clone()? };
        if known.is_file() && known.len() > 0 {
            let mut last = [0];
            file.seek(SeekFrom::End(-1))?;
            file.read_exact(&mut last)?;
            if last != *b"\n" {
                open.write(b"\n")?;
            }
        }
        Ok(open)
    }

    /// The file becomes `.1`, `.1` becomes `.2`, the oldest goes.
    fn rotate(&self, open: Open) -> io::Result<Open> {
        let named = |number: usize| PathBuf::from(format!("{}.{number}", self.options.path.display()));
        if self.options.keep == 0 {
            open.file.set_len(0)?;
            return Ok(Open { bytes: 0, ..open });
        }
        for number in (1..self.options.keep).rev() {
            match fs::rename(named(number), named(number + 1)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        fs::rename(&self.options.path, named(1))?;
        drop(open);
        self.open()
    }
}

impl Open {
    fn write(&mut self, batch: &[u8]) -> io::Result<()> {
        if batch.is_empty() {
            return Ok(());
        }
        if let Err(error) = self.file.write_all(batch) {
            // If even this fails, the torn line is closed when the file is opened next.
            let _ = self.file.set_len(self.bytes);
            return Err(error);
        }
        self.file.sync_data()?;
        self.bytes += batch.len() as u64;
        Ok(())
    }
}

/// A new name in a folder is only safe once the folder is on disk.
fn sync_folder(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder)?.sync_all()
}
