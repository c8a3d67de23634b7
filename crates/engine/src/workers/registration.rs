//! Registers and deregisters workers.

use std::{sync::Arc, time::Duration};

use faena_domain::{
    ApiKeyId, FieldError, JobId, KeyHash, Run, SecretText, Timestamp, WorkerCapabilities, WorkerId, WorkerKind,
    WorkerState,
};
use faena_store::{GUARDIAN, ResumedJob, StoreError, WorkerAdmitted, WorkerEnd};

use super::{CloseReason, ConnectedWorker, ReportKind, Transport, WorkerCommand, WorkerIdentity, status_writer};
use crate::{
    Engine, EngineError,
    breaker::{Breaker, BreakerRule},
    config::ms,
    in_flight::InFlightJob,
};

/// The fields with which a worker registers.
#[derive(Clone, Debug, Default)]
pub struct Registration {
    /// The id that the worker gives itself: one per start of its process, the same after a reconnect.
    pub worker_id: Option<String>,
    /// The token from its first registration, which lets it resume that registration with its jobs.
    pub session_token: Option<SecretText>,
    pub name: Option<String>,
    /// Version of the worker's program.
    pub version: Option<String>,
    pub capabilities: Vec<String>,
    pub queues: Vec<String>,
    pub concurrency: Option<u32>,
    pub reports_starts: bool,
    /// API key of the caller. With the same key, it may resume its registration without the session token.
    pub api_key: Option<ApiKeyId>,
    /// The jobs that the worker has, if it reports them. Its other jobs are released.
    pub in_flight: Option<Vec<(JobId, Run)>>,
}

/// A registered worker.
pub struct Connection {
    pub worker: Arc<ConnectedWorker>,
    /// It was registered before and keeps its jobs.
    pub resumed: bool,
    /// What the worker needs to resume the registration, and to report over plain HTTP.
    pub session_token: SecretText,
}

pub const MAX_CONCURRENCY: u32 = 10_000;
const MAX_NAMES: usize = 1_000;
/// How long to wait until the reports of a connection that has ended are stored.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);

impl Registration {
    /// Returns everything that is wrong with it.
    pub fn validate(&self) -> Vec<FieldError> {
        let mut errors = Vec::new();
        let mut text = |path: String, value: &str, max: usize| {
            let length = value.chars().count();
            if length == 0 || length > max {
                errors.push(FieldError::new(path, format!("must have 1 to {max} characters, has {length}")));
            } else if value.chars().any(char::is_control) {
                errors.push(FieldError::new(path, "must not contain control characters"));
            }
        };
        if let Some(id) = &self.worker_id {
            text("workerId".into(), id, 100);
        }
        if let Some(token) = &self.session_token {
            text("sessionToken".into(), token.reveal(), 100);
        }
        if let Some(name) = &self.name {
            text("name".into(), name, 255);
        }
        if let Some(version) = &self.version {
            text("version".into(), version, 100);
        }
        let lists = [("capabilities", &self.capabilities), ("queues", &self.queues)];
        for (path, list) in lists {
            for (index, value) in list.iter().take(MAX_NAMES).enumerate() {
                text(format!("{path}[{index}]"), value, 100);
            }
        }
        if self.capabilities.is_empty() {
            let message = "must contain at least one job type (a name, or a prefix followed by *)";
            errors.push(FieldError::new("capabilities", message));
        }
        for (path, list) in lists.into_iter().filter(|(_, list)| list.len() > MAX_NAMES) {
            errors.push(FieldError::new(path, format!("must have at most {MAX_NAMES} names, has {}", list.len())));
        }
        if let Some(concurrency) = self.concurrency.filter(|value| !(1..=MAX_CONCURRENCY).contains(value)) {
            let message = format!("must be between 1 and {MAX_CONCURRENCY}, got {concurrency}");
            errors.push(FieldError::new("concurrency", message));
        }
        errors
    }
}

impl Engine {
    /// Registers a worker, or resumes its registration after a reconnect.
    ///
    /// # Errors
    /// `EngineError::InvalidRegistration` if a field is invalid or the id is that of a built-in worker;
    /// `EngineError::WorkerActive` if the id is that of another worker; `EngineError::Stopping` if this server stops.
    pub async fn register_worker(
        &self,
        registration: Registration,
        transport: Transport,
        now: Timestamp,
    ) -> Result<Connection, EngineError> {
        let errors = registration.validate();
        if !errors.is_empty() {
            return Err(EngineError::InvalidRegistration(errors));
        }
        if self.workers.is_closed() {
            return Err(EngineError::Stopping);
        }
        let Some(key) = registration.worker_id.clone() else {
            return self.register_as(WorkerId::new().to_string(), registration, transport, now).await;
        };
        // Two connections under one id register one after another.
        let _lock = self.workers.registration_locks.lock_for(&key).lock().await;
        if self.workers.find_by_key(&key).is_none() {
            self.refuse_built_in(&key).await?;
        }
        self.register_as(key, registration, transport, now).await
    }

    async fn register_as(
        &self,
        key: String,
        registration: Registration,
        transport: Transport,
        now: Timestamp,
    ) -> Result<Connection, EngineError> {
        let previous = self.workers.find_by_key(&key);
        self.check_admits(previous.as_deref())?;
        let sent_token = registration.session_token.clone();
        let presented = sent_token.as_ref().map(SecretText::hash);
        // Another caller must not end the connection of this worker.
        let resumable = |known: &&Arc<ConnectedWorker>| may_resume(known, presented.as_ref(), registration.api_key);
        if let Some(previous) = previous.as_ref().filter(resumable) {
            previous.close(CloseReason::Reconnected);
            // Waits until its reports on the old connection are stored, so that it does not resume jobs that have
            // ended.
            let _ =
                tokio::time::timeout(FLUSH_TIMEOUT, self.reports.reporter.wait_until_worker_flushed(previous.id)).await;
        }
        let (name, in_flight) = (registration.name.clone(), registration.in_flight.clone());
        let new_token = SecretText::session_token(rand::random());
        let mut identity = identify(key, registration, transport, new_token.hash(), previous.as_deref());
        let entry = identity.entry(name, self.node_id(), presented);
        let admitted = self.store.worker_admit(entry, now).await;
        let admitted = admitted.map_err(|error| self.explain_refusal(error, &identity.key, previous.as_deref()))?;
        (identity.id, identity.session, identity.token) = (admitted.id, admitted.session, admitted.token);
        let session_token = sent_token.filter(|sent| sent.hash().matches(&admitted.token)).unwrap_or(new_token);
        self.measures.workers.record_registration(admitted.was, true, now);
        let previous = previous.filter(|previous| previous.id == admitted.id);
        let resumed =
            identity.session > 1 && !matches!(admitted.was, Some(WorkerState::Creating | WorkerState::Connecting));
        let worker = self.add_connected(identity, &admitted, previous.as_deref(), now);
        self.resume_jobs(&worker, admitted, previous.as_deref(), in_flight, now).await;
        if let Some(previous) = &previous {
            previous.close(CloseReason::Reconnected);
            let before: Vec<_> = previous.status.lock().in_flight.drain().map(|(_, job)| job).collect();
            // The jobs that the worker no longer has were ended through another node.
            let ended = before.iter().filter(|job| !worker.has_job(job.id()));
            ended.for_each(|job| self.dispatch.in_flight.forget(job));
        }
        self.dispatch.lanes.reconsider();
        self.wakeups.connection_changed();
        tracing::info!(
            worker = worker.key,
            transport = transport.as_str(),
            concurrency = worker.concurrency,
            types = worker.capabilities.types.join(","),
            resumed,
            "worker connected"
        );
        Ok(Connection { worker, resumed, session_token })
    }

    /// Returns the error of a registration that the store refused. This node knows of a disconnection before the store
    /// does.
    fn explain_refusal(&self, error: StoreError, key: &str, previous: Option<&ConnectedWorker>) -> EngineError {
        let StoreError::WorkerActive { deadline } = error else { return error.into() };
        let disconnected_at = previous.and_then(|previous| previous.status.lock().disconnected_at);
        let deadline = disconnected_at.map(|at| at.plus_ms(ms(self.config.reconnect_grace))).or(deadline);
        EngineError::WorkerActive { worker: key.to_owned(), deadline, silence: self.config.worker_silence }
    }

    /// Fails if this server stops. While running jobs finish, a worker of this server may still reconnect to report them.
    fn check_admits(&self, previous: Option<&ConnectedWorker>) -> Result<(), EngineError> {
        if self.workers.is_closed() || (self.is_stopping() && previous.is_none()) {
            return Err(EngineError::Stopping);
        }
        Ok(())
    }

    /// Rejects the id of a built-in worker, which never connects.
    async fn refuse_built_in(&self, key: &str) -> Result<(), EngineError> {
        let known = self.store.worker_get(key).await?;
        match known.filter(|known| known.kind == WorkerKind::BuiltIn && known.ended_at.is_none()) {
            Some(_) => {
                let error = FieldError::new("workerId", "is the id of a built-in worker; choose another");
                Err(EngineError::InvalidRegistration(vec![error]))
            }
            None => Ok(()),
        }
    }

    fn add_connected(
        &self,
        identity: WorkerIdentity,
        admitted: &WorkerAdmitted,
        previous: Option<&ConnectedWorker>,
        now: Timestamp,
    ) -> Arc<ConnectedWorker> {
        let state = match admitted.was {
            Some(state @ (WorkerState::Ready | WorkerState::Busy | WorkerState::Draining)) => state,
            _ => WorkerState::Ready,
        };
        // A worker whose connection flaps keeps its breaker.
        let breaker = previous.map(|previous| previous.status.lock().breaker.clone());
        let breaker = breaker.unwrap_or_else(|| Breaker::new(BreakerRule::default()));
        let worker = Arc::new(ConnectedWorker::new(identity, state, breaker, self.measures.clone(), now));
        {
            let mut status = worker.status.lock();
            status.drain = state == WorkerState::Draining;
            status.used = previous.is_some_and(|previous| previous.status.lock().used);
            if let Some(previous) = previous {
                status.continue_state(previous.status.lock().state_since());
            }
        }
        self.workers.add(worker.clone());
        worker
    }

    /// Adds the jobs that the worker has according to the store. If the worker reported its jobs, all others are
    /// released. A process that was started for a job receives it now.
    async fn resume_jobs(
        &self,
        worker: &Arc<ConnectedWorker>,
        admitted: WorkerAdmitted,
        previous: Option<&ConnectedWorker>,
        in_flight: Option<Vec<(JobId, Run)>>,
        now: Timestamp,
    ) {
        let is_starting = matches!(admitted.was, Some(WorkerState::Creating | WorkerState::Connecting));
        let jobs = self.add_resumed(worker, admitted.jobs, is_starting, previous, now);
        if is_starting {
            jobs.iter().for_each(|job| job.assign(now));
            self.deliver(vec![(worker.clone(), jobs)], now).await;
            return;
        }
        for job in jobs {
            let has_job = in_flight.as_ref().is_none_or(|known| known.contains(&(job.id(), job.run())));
            if !has_job {
                self.reports.handler.end(worker, &job, ReportKind::Release, None, now);
            } else if let Some(reason) = job.cancel_reason() {
                // The first request may have been lost.
                job.send_stop(&reason);
            }
        }
    }

    fn add_resumed(
        &self,
        worker: &Arc<ConnectedWorker>,
        resumed: Vec<ResumedJob>,
        is_starting: bool,
        previous: Option<&ConnectedWorker>,
        now: Timestamp,
    ) -> Vec<Arc<InFlightJob>> {
        let started: Vec<_> = resumed.iter().map(|resumed| resumed.started_at).collect();
        let jobs = resumed.into_iter().map(|ResumedJob { job, kind, claimed_at, .. }| (job, kind.into(), claimed_at));
        let jobs = self.dispatch.in_flight.add_for(worker, jobs);
        let mut status = worker.status.lock();
        for (job, started_at) in jobs.iter().zip(started) {
            if let Some(at) = started_at.filter(|_| job.started_at().is_none()) {
                job.start(at);
                job.mark_recorded();
            } else if job.started_at().is_none() && !is_starting && !worker.reports_starts {
                job.start(job.claimed_at);
            }
            status.in_flight.insert(job.id(), job.clone());
        }
        if let Some(previous) = previous {
            status.stopping = std::mem::take(&mut previous.status.lock().stopping);
        }
        status.update_state(now);
        jobs
    }

    /// Finds a worker that polls and may call any node. If it is connected to another node, or was before this process
    /// started, it is connected here from now on. Returns `None` if no such worker is registered.
    ///
    /// # Errors
    /// `EngineError::SessionTokenMissing` or `EngineError::WrongSessionToken` if the caller does not prove that it is
    /// this worker; `EngineError::Stopping` if this server stops.
    pub async fn find_polling_worker(
        &self,
        key: &str,
        session_token: Option<SecretText>,
        api_key: Option<ApiKeyId>,
        now: Timestamp,
    ) -> Result<Option<Arc<ConnectedWorker>>, EngineError> {
        // A worker that is connected by another transport uses only that.
        let polls =
            |worker: &Arc<ConnectedWorker>| worker.transport == Transport::Http && !worker.closing.is_cancelled();
        // The store rejects the token of another worker below.
        let presented = session_token.as_ref().map(SecretText::hash);
        let is_own = |worker: &Arc<ConnectedWorker>| presented.is_some_and(|token| token.matches(&worker.token));
        let here = || self.workers.find_by_key(key).filter(polls).filter(is_own);
        if self.workers.is_closed() {
            // This server no longer accepts connections. The worker's next call reaches another server, or this one
            // after its restart.
            return Err(EngineError::Stopping);
        }
        if presented.is_none() {
            return Err(EngineError::SessionTokenMissing(key.to_owned()));
        }
        if let Some(worker) = here()
            && self.is_latest(&worker).await?
        {
            worker.record_heartbeat(now);
            return Ok(Some(worker));
        }
        // Two concurrent calls move the worker once.
        let _lock = self.workers.registration_locks.lock_for(key).lock().await;
        if let Some(worker) = here()
            && self.is_latest(&worker).await?
        {
            return Ok(Some(worker));
        }
        let known = self.store.worker_get(key).await?.filter(|known| known.ended_at.is_none());
        let Some(known) = known.filter(|known| known.transport == Transport::Http.as_str()) else { return Ok(None) };
        let registration = Registration {
            name: known.name,
            version: known.version,
            capabilities: known.capabilities,
            queues: known.queues,
            concurrency: Some(known.concurrency),
            session_token,
            api_key,
            ..Registration::default()
        };
        match self.register_as(key.to_owned(), registration, Transport::Http, now).await {
            Err(EngineError::WorkerActive { worker, .. }) => Err(EngineError::WrongSessionToken(worker)),
            connection => Ok(Some(connection?.worker)),
        }
    }

    /// Returns whether this is the worker's latest session: it has not called another node meanwhile.
    async fn is_latest(&self, worker: &ConnectedWorker) -> Result<bool, EngineError> {
        Ok(!self.store.is_shared() || self.store.worker_session(worker.id).await? == Some(worker.session))
    }

    /// Handles the end of a connection. `left`: the worker deregistered before it closed.
    pub async fn disconnect_worker(&self, worker: &Arc<ConnectedWorker>, left: bool, now: Timestamp) {
        if !self.workers.find(worker.id).is_some_and(|known| Arc::ptr_eq(&known, worker)) {
            return;
        }
        // Jobs that were not sent yet are released immediately.
        for command in worker.drain_commands() {
            if let WorkerCommand::Job(delivery) = command {
                self.reports.handler.end(worker, &delivery.job, ReportKind::Release, None, now);
            }
        }
        let has_no_jobs = worker.status.lock().in_flight.is_empty();
        if left || (has_no_jobs && worker.close_reason().is_none() && !worker.is_flapping(now)) {
            let reason = if left { "deregistered" } else { "connection closed" };
            return self.deregister_worker(worker, reason, now).await;
        }
        worker.status.lock().disconnected_at = Some(now);
        let (jobs, _) = worker.load();
        if jobs > 0 {
            self.workers.record_dispatch_failure(worker, now);
        }
        let grace = self.config.reconnect_grace;
        match worker.close_reason() {
            // This server closes all connections when it stops.
            Some(CloseReason::ServerStopping) => tracing::debug!(worker = worker.key, jobs, "worker disconnected"),
            _ => tracing::info!(worker = worker.key, jobs, ?grace, "worker disconnected"),
        }
        self.wakeups.connection_changed();
    }

    /// Ends the registration of a worker and logs that it left or was lost.
    pub(crate) async fn end_worker(
        &self,
        worker: &Arc<ConnectedWorker>,
        end: WorkerEnd,
        reason: &str,
        now: Timestamp,
    ) -> Result<(), EngineError> {
        let is_lost = matches!(end, WorkerEnd::Lost { .. });
        let Some(jobs) = self.end_registration(worker, end, now).await? else { return Ok(()) };
        if is_lost {
            tracing::warn!(actor = GUARDIAN, worker = worker.key, reason, jobs, "worker lost");
        } else {
            tracing::info!(worker = worker.key, reason, jobs, "worker left");
        }
        Ok(())
    }

    /// Stores the last status of a worker and ends its registration. Returns how many jobs it had, or `None` if the
    /// registration had already ended.
    pub(crate) async fn end_registration(
        &self,
        worker: &Arc<ConnectedWorker>,
        end: WorkerEnd,
        now: Timestamp,
    ) -> Result<Option<usize>, EngineError> {
        let _ = tokio::time::timeout(FLUSH_TIMEOUT, self.reports.reporter.wait_until_worker_flushed(worker.id)).await;
        status_writer::store_last(&*self.store, worker, now).await?;
        let is_lost = matches!(end, WorkerEnd::Lost { .. });
        let released = self.store.worker_end(worker.id, worker.session, end, now).await?;
        worker.close(if is_lost { CloseReason::WorkerLost } else { CloseReason::Left });
        self.workers.drop_worker(worker, &self.dispatch.in_flight);
        self.wakeups.lanes_ready();
        let Some(released) = released else { return Ok(None) };
        self.measures.workers.record_end(Some(worker.status.lock().state_since()), now);
        Ok(Some(released.orphaned + released.returned))
    }

    /// Deregisters a worker. Its jobs are released without using an attempt.
    pub async fn deregister_worker(&self, worker: &Arc<ConnectedWorker>, reason: &str, now: Timestamp) {
        let end = WorkerEnd::Left { reason: reason.into() };
        if let Err(error) = self.end_worker(worker, end, reason, now).await {
            // The guardian ends it when its grace period is over.
            tracing::warn!(worker = worker.key, %error, "worker not deregistered, it is removed after its grace period");
            worker.status.lock().disconnected_at = Some(now);
            self.wakeups.deadline_changed();
        }
    }

    /// Returns the end of a worker that was lost without deregistering.
    pub(crate) fn lost(&self, reason: &str) -> WorkerEnd {
        WorkerEnd::Lost { reason: reason.to_owned(), delay_ms: ms(self.config.orphan_delay) }
    }
}

/// Returns whether a caller may resume a connected worker. The store decides the same for workers of other nodes.
fn may_resume(worker: &ConnectedWorker, presented_token: Option<&KeyHash>, api_key: Option<ApiKeyId>) -> bool {
    match presented_token {
        Some(token) => token.matches(&worker.token),
        None => api_key.is_some() && api_key == worker.api_key,
    }
}

/// Returns the identity of a worker before the store has assigned its id and session.
fn identify(
    key: String,
    registration: Registration,
    transport: Transport,
    token: KeyHash,
    previous: Option<&ConnectedWorker>,
) -> WorkerIdentity {
    let pool = previous.and_then(|worker| worker.pool.clone());
    // A process of a pool that names no queues serves those of its pool.
    let queues = match previous {
        Some(previous) if registration.queues.is_empty() && pool.is_some() => previous.capabilities.queues.clone(),
        _ => registration.queues,
    };
    WorkerIdentity {
        id: WorkerId::new(),
        key,
        version: registration.version,
        kind: if pool.is_some() { WorkerKind::Pool } else { WorkerKind::Remote },
        session: 0,
        transport,
        capabilities: WorkerCapabilities { types: registration.capabilities, queues },
        concurrency: registration.concurrency.unwrap_or(1) as usize,
        reports_starts: registration.reports_starts,
        ephemeral: previous.is_some_and(|previous| previous.ephemeral),
        pool,
        api_key: registration.api_key,
        token,
    }
}
