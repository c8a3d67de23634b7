//! One worker connected to this node: its identity, its status and the commands that wait for it.

use std::{
    collections::{HashMap, VecDeque},
    ops::Deref,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use faena_domain::{
    ApiKeyId, JobId, KeyHash, NodeId, Run, Step, Timestamp, WorkerCapabilities, WorkerId, WorkerKind, WorkerState,
};
use faena_store::{Lane, LaneId, WorkerEntry};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::{Rejection, status::WorkerStatus};
use crate::{
    breaker::{Breaker, BreakerState},
    in_flight::InFlightJob,
    measure::Measures,
};

/// How a worker is connected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Transport {
    WebSocket,
    Grpc,
    /// The worker polls; between two calls nothing can be sent to it.
    Http,
    /// Not connected yet: its process is about to start.
    None,
}

impl Transport {
    pub fn as_str(self) -> &'static str {
        match self {
            Transport::WebSocket => "websocket",
            Transport::Grpc => "grpc",
            Transport::Http => "http",
            Transport::None => "",
        }
    }
}

/// A message to a worker.
pub enum WorkerCommand {
    Job(Delivery),
    Ack(Ack),
    Cancel { job_id: JobId, run: Run, reason: String },
    Drain,
    Resume,
}

/// Why the server closes a worker's connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CloseReason {
    ServerStopping,
    /// Other nodes have declared this one dead and reassigned its jobs.
    ServerDeclaredDead,
    WorkerLost,
    /// The same worker has opened another connection.
    Reconnected,
    /// The database has another registration for this worker.
    RegisteredElsewhere,
    NotReading,
    TooManyMessages,
    /// The API key that registered the worker is revoked or has expired.
    KeyEnded,
    Left,
}

impl CloseReason {
    pub fn as_str(self) -> &'static str {
        match self {
            CloseReason::ServerStopping => "the server is stopping; reconnect",
            CloseReason::ServerDeclaredDead => "the server was declared dead; reconnect",
            CloseReason::WorkerLost => "the worker was declared lost",
            CloseReason::Reconnected => "the worker has reconnected",
            CloseReason::RegisteredElsewhere => "the worker is connected to another node or was declared lost",
            CloseReason::NotReading => "the worker does not read its messages",
            CloseReason::TooManyMessages => "too many messages",
            CloseReason::KeyEnded => "the API key of the worker is no longer valid; use another key",
            CloseReason::Left => "the worker has left",
        }
    }
}

/// A job that is sent to a worker.
pub struct Delivery {
    pub job: Arc<InFlightJob>,
    pub lane: Arc<Lane>,
    /// When the worker is asked to stop it.
    pub deadline: Timestamp,
    pub steps: Vec<Step>,
    /// Trace context of the run, or of the job if this node creates no spans.
    pub traceparent: Option<String>,
}

/// The answer to a report: it is stored, or why it was rejected.
pub struct Ack {
    pub job_id: JobId,
    pub run: Option<Run>,
    /// Name of the report.
    pub report: &'static str,
    pub rejection: Option<Rejection>,
}

pub struct ConnectedWorker {
    identity: WorkerIdentity,
    /// Cancelled when the connection has to close.
    pub closing: CancellationToken,
    close_reason: Mutex<Option<CloseReason>>,
    pub(crate) status: Mutex<WorkerStatus>,
    commands: Mutex<VecDeque<WorkerCommand>>,
    /// Notified when there is something in `commands`.
    commands_added: Notify,
    /// Number of jobs that the waiting requests of a polling worker ask for.
    requested_jobs: AtomicUsize,
    served_lanes: Mutex<HashMap<LaneId, bool>>,
}

/// How many commands may wait for a worker, beyond what its slots need. A worker with more is not reading its messages.
const MAX_COMMANDS: usize = 20_000;

/// For how many lanes a connection remembers whether the worker serves them.
const MAX_SERVED_LANES: usize = 1_000;

/// Identity of a connected worker. It does not change during a connection.
pub struct WorkerIdentity {
    /// Id of its registration.
    pub id: WorkerId,
    /// The id that the worker gave itself.
    pub key: String,
    /// Version of its program, if it sent one.
    pub version: Option<String>,
    pub kind: WorkerKind,
    /// Number of its connection, which grows each time it connects.
    pub session: i64,
    pub transport: Transport,
    pub capabilities: WorkerCapabilities,
    pub concurrency: usize,
    /// The worker reports when it starts a job. Otherwise a job counts as started when it is sent.
    pub reports_starts: bool,
    pub pool: Option<String>,
    /// API key that it registered with.
    pub api_key: Option<ApiKeyId>,
    /// Hash of its session token.
    pub token: KeyHash,
    /// It runs one job and ends.
    pub ephemeral: bool,
}

impl Deref for ConnectedWorker {
    type Target = WorkerIdentity;

    fn deref(&self) -> &WorkerIdentity {
        &self.identity
    }
}

impl WorkerIdentity {
    /// Returns the row to store when the worker registers.
    ///
    /// `presented_token`: the session token that it sent to resume a registration.
    pub fn entry(&self, name: Option<String>, node: NodeId, presented_token: Option<KeyHash>) -> WorkerEntry {
        let state = if self.transport == Transport::None { WorkerState::Creating } else { WorkerState::Ready };
        WorkerEntry {
            id: self.id,
            key: self.key.clone(),
            name,
            version: self.version.clone(),
            kind: self.kind,
            transport: self.transport.as_str().into(),
            node,
            state,
            capabilities: self.capabilities.clone(),
            concurrency: u32::try_from(self.concurrency).unwrap_or(u32::MAX),
            pool: self.pool.clone(),
            api_key: self.api_key,
            token: self.token,
            presented_token,
            deadline: None,
        }
    }
}

impl ConnectedWorker {
    pub(crate) fn new(
        identity: WorkerIdentity,
        state: WorkerState,
        breaker: Breaker,
        measures: Arc<Measures>,
        now: Timestamp,
    ) -> ConnectedWorker {
        let status = WorkerStatus::new(state, breaker, identity.ephemeral, measures, now);
        ConnectedWorker {
            identity,
            closing: CancellationToken::new(),
            close_reason: Mutex::new(None),
            status: Mutex::new(status),
            commands: Mutex::default(),
            commands_added: Notify::new(),
            requested_jobs: AtomicUsize::new(0),
            served_lanes: Mutex::default(),
        }
    }

    /// Records a heartbeat.
    pub fn record_heartbeat(&self, now: Timestamp) {
        let mut status = self.status.lock();
        status.seen_at = status.seen_at.max(now);
    }

    /// Closes the connection. The worker stays registered. The first reason counts.
    pub fn close(&self, reason: CloseReason) {
        self.close_reason.lock().get_or_insert(reason);
        self.closing.cancel();
    }

    pub fn close_reason(&self) -> Option<CloseReason> {
        *self.close_reason.lock()
    }

    /// Queues commands. Closes the connection if the worker does not read them.
    pub(crate) fn send(&self, commands: impl IntoIterator<Item = WorkerCommand>) {
        let is_full = {
            let mut queue = self.commands.lock();
            queue.extend(commands);
            queue.len() > MAX_COMMANDS + 2 * self.concurrency
        };
        self.commands_added.notify_one();
        if is_full {
            self.close(CloseReason::NotReading);
        }
    }

    /// Takes the queued commands; waits until there are some. Dropping the future loses nothing.
    pub async fn next_commands(&self) -> Vec<WorkerCommand> {
        loop {
            let added = self.commands_added.notified();
            let commands = self.drain_commands();
            if !commands.is_empty() {
                return commands;
            }
            added.await;
        }
    }

    /// Takes the queued commands.
    pub fn drain_commands(&self) -> Vec<WorkerCommand> {
        self.commands.lock().drain(..).collect()
    }

    /// Takes the queued commands except jobs.
    pub fn drain_control_commands(&self) -> Vec<WorkerCommand> {
        let mut commands = self.commands.lock();
        let (jobs, control): (Vec<_>, Vec<_>) =
            commands.drain(..).partition(|command| matches!(command, WorkerCommand::Job(_)));
        commands.extend(jobs);
        control
    }

    pub(crate) fn serves(&self, lane: &Lane) -> bool {
        let mut known = self.served_lanes.lock();
        if known.len() >= MAX_SERVED_LANES {
            known.clear();
        }
        *known.entry(lane.id).or_insert_with(|| self.capabilities.covers(&lane.queue, &lane.kind))
    }

    /// Returns how many jobs it can be sent now.
    pub(crate) fn capacity(&self, now: Timestamp) -> usize {
        let status = self.status.lock();
        let accepts_jobs = match status.state {
            // The process of an ephemeral worker starts when it has a job.
            WorkerState::Creating => self.ephemeral,
            state => state.is_operational(),
        };
        if !accepts_jobs
            || (self.ephemeral && status.used)
            || status.drain
            || status.disconnected_at.is_some()
            || self.closing.is_cancelled()
        {
            return 0;
        }
        let free = self.concurrency.saturating_sub(status.in_flight.len() + status.stopping.len());
        let wanted = match self.transport {
            Transport::Http => free.min(self.requested_jobs.load(Ordering::Acquire)),
            _ => free,
        };
        status.breaker.capacity(wanted, now)
    }

    /// Adds jobs that were claimed for this worker.
    pub(crate) fn assign(&self, jobs: &[Arc<InFlightJob>], now: Timestamp) {
        let mut status = self.status.lock();
        status.in_flight.extend(jobs.iter().map(|job| (job.id(), job.clone())));
        status.breaker.record_sent(jobs.len(), now);
        status.used |= !jobs.is_empty();
        status.update_state(now);
    }

    pub(crate) fn has_received_jobs(&self) -> bool {
        self.status.lock().used
    }

    pub(crate) fn transition(&self, state: WorkerState, now: Timestamp) {
        self.status.lock().transition(state, None, now);
    }

    /// Returns whether this is an ephemeral worker whose only job has ended.
    pub(crate) fn has_finished_only_job(&self) -> bool {
        let status = self.status.lock();
        self.ephemeral && status.used && status.in_flight.is_empty() && status.state.is_operational()
    }

    pub fn state(&self) -> WorkerState {
        self.status.lock().state
    }

    pub fn has_job(&self, id: JobId) -> bool {
        self.status.lock().in_flight.contains_key(&id)
    }

    /// Returns the jobs it has to stop. A polling worker receives them with each call until it has answered.
    pub fn jobs_to_stop(&self) -> Vec<(JobId, Run, String)> {
        let status = self.status.lock();
        let requested = status.in_flight.values().filter_map(|job| Some((job.id(), job.run(), job.cancel_reason()?)));
        let ended = status.stopping.iter().map(|(id, stopping)| (*id, stopping.run, stopping.reason.clone()));
        requested.chain(ended).collect()
    }

    pub fn seen_at(&self) -> Timestamp {
        self.status.lock().seen_at
    }

    pub fn is_draining(&self) -> bool {
        self.status.lock().drain
    }

    /// Marks that a polling worker waits for up to `count` jobs, until the guard is dropped.
    pub(crate) fn begin_poll(self: &Arc<Self>, count: usize) -> PollGuard {
        self.requested_jobs.fetch_add(count, Ordering::AcqRel);
        PollGuard(self.clone(), count)
    }

    /// Returns the number of free slots, as far as this node knows.
    pub fn free_slots(&self) -> usize {
        let status = self.status.lock();
        self.concurrency.saturating_sub(status.in_flight.len() + status.stopping.len())
    }

    /// Returns up to `count` jobs that were sent and never acknowledged, oldest first.
    ///
    /// Called if the worker reports more free slots than this node knows of: the delivery of these jobs was lost.
    pub fn unacknowledged(&self, count: usize) -> Vec<Arc<InFlightJob>> {
        let status = self.status.lock();
        let mut jobs: Vec<Arc<InFlightJob>> =
            status.in_flight.values().filter(|job| !job.is_acknowledged()).cloned().collect();
        jobs.sort_by_key(|job| (job.claimed_at, job.id()));
        jobs.truncate(count);
        jobs
    }

    pub fn breaker_state(&self, now: Timestamp) -> BreakerState {
        self.status.lock().breaker.state(now)
    }

    /// Returns when its breaker lets jobs pass again, if it does not now.
    pub fn breaker_retry_at(&self, now: Timestamp) -> Option<Timestamp> {
        self.status.lock().breaker.retry_at(now)
    }

    /// Returns whether its connection failed repeatedly.
    pub(crate) fn is_flapping(&self, now: Timestamp) -> bool {
        self.transport != Transport::Http && self.breaker_state(now) != BreakerState::Closed
    }

    /// Returns the number of jobs in flight and the number of slots occupied by handlers that do not stop.
    pub fn load(&self) -> (usize, usize) {
        let status = self.status.lock();
        (status.in_flight.len(), status.stopping.len())
    }
}

/// While this value exists, the polling worker counts as waiting for jobs.
pub struct PollGuard(Arc<ConnectedWorker>, usize);

impl Drop for PollGuard {
    fn drop(&mut self) {
        self.0.requested_jobs.fetch_sub(self.1, Ordering::AcqRel);
    }
}
