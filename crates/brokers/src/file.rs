//! Appends messages to a log file: one JSON object per line, rotated by size.
//!
//! A message is confirmed once it is on disk. A batch is written with one call. If the write fails, the file is
//! truncated to its previous length. If that fails too, or the process dies during the write, the next open ends the
//! incomplete line with a line break, so that a reader loses only that line.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Read, Seek, SeekFrom, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use faena_domain::Timestamp;
use serde::Serialize;
use serde_json::value::RawValue;

use crate::{BrokerError, DEFAULT_TIMEOUT, Message, PublishOutcome, PublishReport, Sink};

/// Settings of a [`FileSink`].
#[derive(Clone, Debug)]
pub struct FileSinkOptions {
    pub path: PathBuf,
    /// Size limit; a file that would exceed it is renamed to `<path>.1`. A single line may be longer.
    pub max_bytes: u64,
    /// Number of rotated files to keep. With 0 the file is truncated instead.
    pub keep: usize,
    /// Time limit for one call to `publish`.
    pub timeout: Duration,
}

impl FileSinkOptions {
    pub fn new(path: impl Into<PathBuf>) -> Self {
        FileSinkOptions { path: path.into(), max_bytes: 100 * 1024 * 1024, keep: 5, timeout: DEFAULT_TIMEOUT }
    }
}

/// A publisher to a log file.
pub struct FileSink {
    log: Arc<Mutex<RotatingLog>>,
    path: PathBuf,
    timeout: Duration,
}

/// The log file and its rotated predecessors.
struct RotatingLog {
    options: FileSinkOptions,
    current: Option<OpenFile>,
}

struct OpenFile {
    file: File,
    bytes: u64,
    /// Device and inode, which identify the file even after it was renamed.
    identity: (u64, u64),
}

/// One line of the file.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct LogRecord<'a> {
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
        FileSink { log: Arc::new(Mutex::new(RotatingLog { options, current: None })), path, timeout }
    }

    /// Writes the lines on a blocking thread, within the timeout.
    async fn append(&self, lines: Vec<Vec<u8>>) -> Result<(), BrokerError> {
        let (log, path) = (self.log.clone(), self.path.display());
        let writing =
            tokio::task::spawn_blocking(move || log.lock().unwrap_or_else(PoisonError::into_inner).append(&lines));
        match tokio::time::timeout(self.timeout, writing).await {
            Ok(Ok(Ok(()))) => Ok(()),
            Ok(Ok(Err(error))) => Err(BrokerError::new(format!("cannot write \"{path}\"")).with_source(&error)),
            Ok(Err(error)) => Err(BrokerError::new(format!("writing \"{path}\" was aborted")).with_source(&error)),
            Err(_) => Err(BrokerError::new(format!("writing \"{path}\" took longer than {:?}", self.timeout))),
        }
    }
}

#[async_trait]
impl Sink for FileSink {
    async fn publish(&self, messages: &[Message]) -> PublishReport {
        let mut lines = Vec::with_capacity(messages.len());
        let mut outcomes = Vec::with_capacity(messages.len());
        for message in messages {
            match encode(message) {
                Ok(line) => {
                    lines.push(line);
                    outcomes.push(Some(PublishOutcome::Confirmed));
                }
                Err(reason) => outcomes.push(Some(PublishOutcome::Rejected(reason))),
            }
        }
        let outage = self.append(lines).await.err();
        if outage.is_some() {
            // Rejected messages stay rejected; the outcome of the others is unknown.
            for outcome in outcomes.iter_mut().filter(|outcome| **outcome == Some(PublishOutcome::Confirmed)) {
                *outcome = None;
            }
        }
        PublishReport { outcomes, outage }
    }

    async fn close(&self) {
        let log = self.log.clone();
        let closing =
            tokio::task::spawn_blocking(move || log.lock().unwrap_or_else(PoisonError::into_inner).current = None);
        let _ = tokio::time::timeout(self.timeout, closing).await;
    }
}

fn encode(message: &Message) -> Result<Vec<u8>, String> {
    let text = std::str::from_utf8(&message.body).map_err(|_| "body is not UTF-8 text")?;
    // In valid JSON a raw line break is always whitespace: strings must escape it.
    let flat = if text.contains(['\n', '\r']) { text.replace(['\n', '\r'], " ") } else { text.to_owned() };
    let body = match serde_json::from_str::<&RawValue>(&flat) {
        Ok(json) => Body::Json(json),
        Err(_) => Body::Text(text),
    };
    let record = LogRecord {
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
    let mut line = serde_json::to_vec(&record).map_err(|error| error.to_string())?;
    line.push(b'\n');
    Ok(line)
}

impl RotatingLog {
    fn append(&mut self, lines: &[Vec<u8>]) -> io::Result<()> {
        let mut current = match self.current.take() {
            Some(current) if self.is_unchanged(&current) => current,
            _ => self.open()?,
        };
        let mut batch = Vec::new();
        for line in lines {
            let new_bytes = current.bytes + (batch.len() + line.len()) as u64;
            if new_bytes > self.options.max_bytes && (current.bytes > 0 || !batch.is_empty()) {
                current.write(&batch)?;
                batch.clear();
                current = self.rotate(current)?;
            }
            batch.extend_from_slice(line);
        }
        current.write(&batch)?;
        self.current = Some(current);
        Ok(())
    }

    /// Returns whether the path still refers to the open file: another process may have moved, deleted or changed it.
    fn is_unchanged(&self, current: &OpenFile) -> bool {
        fs::metadata(&self.options.path).is_ok_and(|metadata| {
            (metadata.dev(), metadata.ino()) == current.identity && metadata.len() == current.bytes
        })
    }

    fn open(&self) -> io::Result<OpenFile> {
        let path = &self.options.path;
        // Only the owner can read a new file. To let another user read it, create the file before the server opens it.
        let mut file = OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(path)?;
        file.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => io::Error::other("another process is writing to it"),
            TryLockError::Error(error) => error,
        })?;
        sync_parent(path)?;
        let metadata = file.metadata()?;
        let mut opened =
            OpenFile { bytes: metadata.len(), identity: (metadata.dev(), metadata.ino()), file: file.try_clone()? };
        if metadata.is_file() && metadata.len() > 0 {
            let mut last = [0];
            file.seek(SeekFrom::End(-1))?;
            file.read_exact(&mut last)?;
            if last != *b"\n" {
                opened.write(b"\n")?;
            }
        }
        Ok(opened)
    }

    /// Renames the file to `.1`, `.1` to `.2` and so on, replacing the oldest.
    fn rotate(&self, current: OpenFile) -> io::Result<OpenFile> {
        let rotated_path = |number: usize| PathBuf::from(format!("{}.{number}", self.options.path.display()));
        if self.options.keep == 0 {
            current.file.set_len(0)?;
            return Ok(OpenFile { bytes: 0, ..current });
        }
        for number in (1..self.options.keep).rev() {
            match fs::rename(rotated_path(number), rotated_path(number + 1)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        fs::rename(&self.options.path, rotated_path(1))?;
        drop(current);
        self.open()
    }
}

impl OpenFile {
    fn write(&mut self, batch: &[u8]) -> io::Result<()> {
        if batch.is_empty() {
            return Ok(());
        }
        if let Err(error) = self.file.write_all(batch) {
            // If truncating fails too, the next open ends the incomplete line.
            let _ = self.file.set_len(self.bytes);
            return Err(error);
        }
        self.file.sync_data()?;
        self.bytes += batch.len() as u64;
        Ok(())
    }
}

/// Syncs the directory of a file: a new name survives a crash only once its directory is on disk.
fn sync_parent(path: &Path) -> io::Result<()> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(directory)?.sync_all()
}
