//! Follows jobs for watchers. Server-sent events (`rest/job_events.rs`) and gRPC (`grpc/jobs.rs`) share this code.
//!
//! All watchers of one job share one reader. It reads the job when this process changes it, and once a second to find the
//! changes of other nodes. A watcher remembers only fingerprints of what it has sent, so a client that reads slowly
//! does not make the server keep copies of the job.

use std::{
    collections::{BTreeMap, HashMap},
    hash::{DefaultHasher, Hash, Hasher},
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::Duration,
};

use axum::body::Bytes;
use faena_domain::{Event, EventKind, JobId, JobState, JobView, LogEntry, LogEvent, Timestamp};
use faena_store::StoreError;
use serde_json::value::RawValue;
use tokio::sync::{broadcast, watch};

use crate::{Api, ApiResult, KeyEnd, context, traffic::StreamPermit};

const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Fields to which entries are only added. A change has the new entries only.
const GROWING_FIELDS: [&str; 3] = ["executionLog", "steps", "attempts"];

/// The jobs that are watched, each with its reader.
#[derive(Clone, Default)]
pub struct JobWatches(Arc<Mutex<HashMap<JobId, watch::Sender<Arc<Snapshot>>>>>);

/// A job at one moment.
pub struct Snapshot {
    pub job: JobView,
    /// The whole job as the data of a server-sent event. All watchers that begin with this snapshot share its memory.
    whole: OnceLock<Bytes>,
    fields: Vec<(String, Field)>,
}

enum Field {
    Value(u64, Box<RawValue>),
    Entries(Vec<(u64, Box<RawValue>)>),
}

/// One watcher of a job.
pub struct JobWatcher {
    api: Api,
    snapshots: watch::Receiver<Arc<Snapshot>>,
    key_end: KeyEnd,
    sent: Option<Sent>,
    _permit: StreamPermit,
}

/// What a watcher has sent.
struct Sent {
    state: JobState,
    fields: HashMap<String, SentField>,
}

enum SentField {
    Value(u64),
    /// Number of entries, and the fingerprint of the last one.
    Entries(usize, Option<u64>),
}

/// A new version of a job for one watcher.
pub struct Change {
    pub kind: EventKind,
    pub snapshot: Arc<Snapshot>,
    /// The data of a server-sent event: the whole job in the first change, then its id, its status and what differs from
    /// the previous change.
    pub data: Bytes,
}

impl JobWatches {
    /// Starts to watch a job. Fails if it does not exist, or the caller or the server has too many streams.
    pub async fn open(api: &Api, id: JobId) -> ApiResult<JobWatcher> {
        let permit = api.traffic.admit_stream()?;
        let key_end = api.key_end(context::access()?.key());
        let snapshots = match api.watches().subscribe(id) {
            Some(snapshots) => snapshots,
            None => {
                // Subscribed before the job is read, so that no change in between is missed.
                let changes = api.engine.bus.subscribe();
                let job = api.engine.store.job_get(id).await?.ok_or(StoreError::NotFound(id))?;
                api.watches().start_reader(api, job, changes)
            }
        };
        Ok(JobWatcher { api: api.clone(), snapshots, key_end, sent: None, _permit: permit })
    }

    fn subscribe(&self, id: JobId) -> Option<watch::Receiver<Arc<Snapshot>>> {
        self.lock().get(&id).map(watch::Sender::subscribe)
    }

    /// Starts the reader of a job, unless another watcher has started it.
    fn start_reader(
        &self,
        api: &Api,
        job: JobView,
        changes: broadcast::Receiver<Event>,
    ) -> watch::Receiver<Arc<Snapshot>> {
        let mut readers = self.lock();
        let id = job.id;
        if let Some(sender) = readers.get(&id) {
            return sender.subscribe();
        }
        let (sender, receiver) = watch::channel(Arc::new(Snapshot::new(api.with_default_timeout(job))));
        if !receiver.borrow().job.status.is_terminal() {
            readers.insert(id, sender.clone());
            tokio::spawn(follow(api.clone(), id, sender, changes));
        }
        receiver
    }

    /// Removes the reader of a job if it has no watchers. Returns whether it has none.
    fn remove_unwatched(&self, id: JobId) -> bool {
        let mut readers = self.lock();
        let is_unwatched = readers.get(&id).is_none_or(|sender| sender.receiver_count() == 0);
        if is_unwatched {
            readers.remove(&id);
        }
        is_unwatched
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<JobId, watch::Sender<Arc<Snapshot>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Distinguishes two versions of a job.
#[derive(PartialEq)]
struct Version {
    updated_at: Timestamp,
    log_entries: u64,
    last_entry_at: Option<Timestamp>,
    state: JobState,
}

impl Version {
    fn of(job: &JobView) -> Version {
        Version {
            updated_at: job.updated_at,
            log_entries: job.execution_log_omitted + job.execution_log.len() as u64,
            last_entry_at: job.execution_log.last().map(|entry| entry.timestamp),
            state: job.status,
        }
    }
}

/// Reads a job after each change until it has finished or is deleted, has no watchers, or the server stops.
async fn follow(api: Api, id: JobId, sender: watch::Sender<Arc<Snapshot>>, mut changes: broadcast::Receiver<Event>) {
    let mut current = Version::of(&sender.borrow().job);
    loop {
        tokio::select! {
            () = api.closing.cancelled() => break,
            () = sender.closed() => if api.watches().remove_unwatched(id) { return },
            () = wait_for_change(&mut changes, id) => {}
            () = tokio::time::sleep(POLL_INTERVAL) => {}
        }
        match api.engine.store.job_get(id).await {
            Ok(Some(job)) => {
                let version = Version::of(&job);
                if version != current {
                    current = version;
                    let _ = sender.send(Arc::new(Snapshot::new(api.with_default_timeout(job))));
                }
            }
            Ok(None) => break,
            // The database is not available; the next poll may succeed.
            Err(_) => {}
        }
        if current.state.is_terminal() {
            break;
        }
    }
    // The watchers end after the last snapshot, because no sender is left.
    api.watches().lock().remove(&id);
}

/// Waits until this process changes the job, or until the channel has dropped changes that may be about it.
async fn wait_for_change(changes: &mut broadcast::Receiver<Event>, id: JobId) {
    loop {
        match changes.recv().await {
            Ok(event) if event.job_id != id => {}
            Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
            _ => return,
        }
    }
}

impl Snapshot {
    fn new(mut job: JobView) -> Snapshot {
        // The log entry of a claim has no worker until the job starts. Entries are sent once, so it is held back until
        // then.
        while job.execution_log.last().is_some_and(is_incomplete) {
            job.execution_log.pop();
        }
        let text = serde_json::to_string(&job).expect("a job is JSON");
        let raw: BTreeMap<String, Box<RawValue>> = serde_json::from_str(&text).expect("a job is an object");
        let fields = raw.into_iter().map(|(name, value)| {
            let field = Field::new(&name, value);
            (name, field)
        });
        let fields = fields.collect();
        Snapshot { job, whole: OnceLock::new(), fields }
    }

    fn whole(&self) -> Bytes {
        self.whole.get_or_init(|| event_data(&serde_json::to_string(&self.job).expect("a job is JSON"))).clone()
    }
}

/// Returns JSON as the lines `data: …` of a server-sent event. Payloads are kept byte for byte and can have several lines.
fn event_data(json: &str) -> Bytes {
    let mut text = String::with_capacity(json.len() + 8);
    for line in json.split(['\n', '\r']) {
        text.push_str("data: ");
        text.push_str(line);
        text.push('\n');
    }
    Bytes::from(text)
}

fn is_incomplete(entry: &LogEntry) -> bool {
    matches!(entry.event, LogEvent::Assigned | LogEvent::Scheduled) && entry.details.is_empty()
}

impl Field {
    fn new(name: &str, value: Box<RawValue>) -> Field {
        if GROWING_FIELDS.contains(&name)
            && let Ok(entries) = serde_json::from_str::<Vec<Box<RawValue>>>(value.get())
        {
            return Field::Entries(entries.into_iter().map(|entry| (fingerprint(&entry), entry)).collect());
        }
        Field::Value(fingerprint(&value), value)
    }

    fn sent(&self) -> SentField {
        match self {
            Field::Value(fingerprint, _) => SentField::Value(*fingerprint),
            Field::Entries(entries) => SentField::Entries(entries.len(), entries.last().map(|(last, _)| *last)),
        }
    }

    /// Returns the JSON of what is new in this field, or `None` if nothing is.
    fn difference(&self, sent: Option<&SentField>) -> Option<String> {
        match (self, sent) {
            (Field::Value(fingerprint, _), Some(SentField::Value(sent))) if fingerprint == sent => None,
            (Field::Value(_, value), _) => Some(value.get().to_owned()),
            (Field::Entries(entries), sent) => {
                let (count, last) = match sent {
                    Some(SentField::Entries(count, last)) => (*count, *last),
                    _ => (0, None),
                };
                let new = &entries[new_entries_start(entries, count, last)..];
                let texts: Vec<&str> = new.iter().map(|(_, entry)| entry.get()).collect();
                (!new.is_empty()).then(|| format!("[{}]", texts.join(",")))
            }
        }
    }
}

/// Returns the index of the first entry that was not sent. Entries in the middle may have been dropped since.
fn new_entries_start(entries: &[(u64, Box<RawValue>)], count: usize, last: Option<u64>) -> usize {
    let Some(last) = last else { return 0 };
    if entries.get(count - 1).is_some_and(|(fingerprint, _)| *fingerprint == last) {
        return count;
    }
    entries.iter().rposition(|(fingerprint, _)| *fingerprint == last).map_or(0, |index| index + 1)
}

fn fingerprint(value: &RawValue) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.get().hash(&mut hasher);
    hasher.finish()
}

impl Sent {
    fn new(snapshot: &Snapshot) -> Sent {
        let fields = snapshot.fields.iter().map(|(name, field)| (name.clone(), field.sent())).collect();
        Sent { state: snapshot.job.status, fields }
    }

    /// Returns an object with the id, the status and what differs. A field that no longer exists is `null`.
    fn difference(&self, snapshot: &Snapshot) -> String {
        let mut text = format!("{{\"id\":\"{}\",\"status\":\"{}\"", snapshot.job.id, snapshot.job.status.as_str());
        let mut put = |name: &str, value: &str| {
            if name != "id" && name != "status" {
                text.push_str(&format!(",\"{name}\":{value}"));
            }
        };
        for (name, field) in &snapshot.fields {
            if let Some(value) = field.difference(self.fields.get(name)) {
                put(name, &value);
            }
        }
        for name in self.fields.keys() {
            if snapshot.fields.iter().all(|(present, _)| present != name) {
                put(name, "null");
            }
        }
        text.push('}');
        text
    }
}

impl JobWatcher {
    /// Waits for the next change; `None` after the job has finished or is deleted, when the server stops, or when the
    /// caller's key is no longer valid.
    pub async fn next(&mut self) -> Option<Change> {
        if self.sent.is_some() {
            tokio::select! {
                () = self.api.closing.cancelled() => return None,
                () = &mut self.key_end => return None,
                changed = self.snapshots.changed() => changed.ok()?,
            }
        }
        let snapshot = self.snapshots.borrow_and_update().clone();
        let state = snapshot.job.status;
        let is_progress = state == JobState::Processing && self.sent.as_ref().is_some_and(|sent| sent.state == state);
        let kind = if is_progress { EventKind::JobProgress } else { EventKind::of_state(state) };
        let data = match &self.sent {
            Some(sent) => event_data(&sent.difference(&snapshot)),
            None => snapshot.whole(),
        };
        self.sent = Some(Sent::new(&snapshot));
        Some(Change { kind, snapshot, data })
    }
}
