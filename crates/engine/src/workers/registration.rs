//! Lets workers in, and sees them off.

use std::{
    collections::HashMap,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use faena_domain::{
    ErrorReason, Failure, FieldError, JobId, JobState, Run, Step, Timestamp, WorkerCapabilities, WorkerId, WorkerKind,
    WorkerState,
};
use faena_store::{ResumedJob, StoreError, WorkerAdmitted, WorkerEnd};

use super::status_writer;
use super::{CloseReason, ConnectedWorker, Delivery, Order, ReportKind, Transport, WorkerIdentity};
use crate::{
    Engine,
    breaker::{Breaker, BreakerRule},
    config::ms,
    in_flight::InFlightJob,
};

/// How a worker introduces itself.
#[derive(Clone, Debug, Default)]
pub struct Registration {
    /// What it calls itself. One name per start of a process; the same again after a broken connection.
    pub worker_id: Option<String>,
    pub name: Option<String>,
    pub capabilities: Vec<String>,
    pub queues: Vec<String>,
    pub concurrency: Option<u32>,
    pub tells_starts: bool,
    /// What it has in its hands, if it says so.
    pub holds: Option<Vec<(JobId, Run)>>,
}

/// A worker that was let in.
pub struct Connection {
    pub worker: Arc<ConnectedWorker>,
    /// It lives since before, and has its jobs still.
    pub resumed: bool,
}

pub const MOST_CONCURRENCY: u32 = 10_000;
const MOST_NAMES: usize = 1_000;

impl Registration {
    /// Everything that is wrong with it.
    pub fn check(&self) -> Vec<FieldError> {
        let mut faults = Vec::new();
        let mut text = |path: String, value: &str, max: usize| {
            let length = value.chars().count();
            if length == 0 || length > max {
                faults.push(FieldError::new(path, format!("must have 1 to {max} characters, has {length}")));
            } else if value.chars().any(char::is_control) {
                faults.push(FieldError::new(path, "must not contain control characters"));
            }
        };
        if let Some(id) = &self.worker_id {
            text("workerId".into(), id, 100);
        }
        if let Some(name) = &self.name {
            text("name".into(), name, 255);
        }
        for (path, list) in [("capabilities", &self.capabilities), ("queues", &self.queues)] {
            for (index, value) in list.iter().take(MOST_NAMES).enumerate() {
                text(format!("{path}[{index}]"), value, 100);
            }
        }
        if self.capabilities.is_empty() {
            faults.push(FieldError::new(
                "capabilities",
                "must name at least one job type (a name, or a prefix with * behind it)",
            ));
        }
        for (path, list) in [("capabilities", &self.capabilities), ("queues", &self.queues)] {
            if list.len() > MOST_NAMES {
                faults.push(FieldError::new(path, format!("must have at most {MOST_NAMES} names, has {}", list.len())));
            }
        }
        if let Some(concurrency) = self.concurrency
            && !(1..=MOST_CONCURRENCY).contains(&concurrency)
        {
            faults.push(FieldError::new(
                "concurrency",
                format!("must be from 1 to {MOST_CONCURRENCY}, is {concurrency}"),
            ));
        }
        faults
    }
}

impl Engine {
    /// Lets a worker in, under a new life or the one it has.
    pub async fn worker_connect(
        &self,
        registration: Registration,
        transport: Transport,
        now: Timestamp,
    ) -> Result<Connection, StoreError> {
        let faults = registration.check();
        if !faults.is_empty() {
            return Err(StoreError::Invalid(faults));
        }
        let Some(key) = registration.worker_id.clone() else {
            return self.register_worker(WorkerId::new().to_string(), registration, transport, now).await;
        };
        // Two connections under one name come in one after the other.
        let _turn = self.turns.of(&key).lock().await;
        if self.workers.find_by_key(&key).is_none() {
            self.refuse_built_in(&key).await?;
        }
        self.register_worker(key, registration, transport, now).await
    }

    async fn register_worker(
        &self,
        key: String,
        registration: Registration,
        transport: Transport,
        now: Timestamp,
    ) -> Result<Connection, StoreError> {
        let before = self.workers.find_by_key(&key);
        if let Some(before) = &before {
            before.close(CloseReason::Reconnected);
            // What it has reported on the old connection is stored first: it is not in its hands any more.
            let settled = self.report_handler.reporter.settled_for(before.id);
            let _ = tokio::time::timeout(Duration::from_secs(5), settled).await;
        }
        let pool = before.as_ref().and_then(|worker| worker.pool.clone());
        // A process that names no queues takes from those that its pool is for.
        let queues = match &before {
            Some(before) if registration.queues.is_empty() && pool.is_some() => before.capabilities.queues.clone(),
            _ => registration.queues,
        };
        let mut identity = WorkerIdentity {
            id: WorkerId::new(),
            key,
            kind: if pool.is_some() { WorkerKind::Pool } else { WorkerKind::Remote },
            session: 0,
            transport,
            capabilities: WorkerCapabilities { types: registration.capabilities, queues },
            concurrency: registration.concurrency.unwrap_or(1) as usize,
            tells_starts: registration.tells_starts,
            ephemeral: before.as_ref().is_some_and(|before| before.ephemeral),
            pool,
        };
        let admitted = self.store.worker_admit(identity.entry(registration.name, self.node_id()), now).await?;
        (identity.id, identity.session) = (admitted.id, admitted.session);
        let before = before.filter(|before| before.id == admitted.id);
        let resumed =
            identity.session > 1 && !matches!(admitted.was, Some(WorkerState::Creating | WorkerState::Connecting));
        let worker = self.seat(identity, &admitted, before.as_deref(), now);
        self.hand_over(&worker, admitted, before.as_deref(), registration.holds, now).await;
        if let Some(before) = &before {
            let handed: Vec<Arc<InFlightJob>> = before.standing.lock().held.drain().map(|(_, held)| held).collect();
            // What it does not have any more ended at another node.
            handed.iter().filter(|held| !worker.holds(held.job.id)).for_each(|held| self.in_flight.forget(held));
        }
        self.lanes.reconsider();
        self.workers.news.notify_one();
        self.workers.watch.notify_one();
        tracing::info!(
            worker = worker.key,
            transport = transport.as_str(),
            concurrency = worker.concurrency,
            capabilities = ?worker.capabilities.types,
            "{}",
            if resumed { "a worker is back" } else { "a worker has connected" }
        );
        Ok(Connection { worker, resumed })
    }

    /// The worker inside a server does not connect, so nobody may come in under its name.
    async fn refuse_built_in(&self, key: &str) -> Result<(), StoreError> {
        let known = self.store.worker_get(key).await?;
        match known.filter(|known| known.kind == WorkerKind::BuiltIn && known.ended_at.is_none()) {
            Some(_) => Err(StoreError::Invalid(vec![FieldError::new("workerId", "is the name of a built-in worker")])),
            None => Ok(()),
        }
    }

    fn seat(
        &self,
        identity: WorkerIdentity,
        admitted: &WorkerAdmitted,
        before: Option<&ConnectedWorker>,
        now: Timestamp,
    ) -> Arc<ConnectedWorker> {
        let state = match admitted.was {
            Some(state @ (WorkerState::Ready | WorkerState::Busy | WorkerState::Draining)) => state,
            _ => WorkerState::Ready,
        };
        // Who flaps does not get a fresh start by coming back.
        let breaker = before.map(|before| before.standing.lock().breaker.clone());
        let breaker = breaker.unwrap_or_else(|| Breaker::new(BreakerRule::default()));
        let worker = Arc::new(ConnectedWorker::new(identity, state, breaker, now));
        {
            let mut standing = worker.standing.lock();
            standing.drain = state == WorkerState::Draining;
            standing.used = before.is_some_and(|before| before.standing.lock().used);
        }
        self.workers.put(worker.clone());
        worker
    }

    /// The worker of that name, for one that calls now and then and may call any node: if it lives and is connected elsewhere, or
    /// was before this process started, it is connected here from now on. `None`: no such worker lives.
    pub async fn worker_calling(&self, key: &str, now: Timestamp) -> Result<Option<Arc<ConnectedWorker>>, StoreError> {
        // One that has come by another door speaks there, and only there.
        let calls =
            |worker: &Arc<ConnectedWorker>| worker.transport == Transport::Http && !worker.closing.is_cancelled();
        let here = || self.workers.find_by_key(key).filter(calls);
        if let Some(worker) = here()
            && self.is_latest(&worker).await?
        {
            worker.seen(now);
            return Ok(Some(worker));
        }
        // Two calls at once move it once.
        let _turn = self.turns.of(key).lock().await;
        if let Some(worker) = here()
            && self.is_latest(&worker).await?
        {
            return Ok(Some(worker));
        }
        let Some(known) = self.store.worker_get(key).await?.filter(|known| known.ended_at.is_none()) else {
            return Ok(None);
        };
        if known.transport != Transport::Http.as_str() {
            return Ok(None);
        }
        let registration = Registration {
            name: known.name,
            capabilities: known.capabilities,
            queues: known.queues,
            concurrency: Some(known.concurrency),
            ..Registration::default()
        };
        Ok(Some(self.register_worker(key.to_owned(), registration, Transport::Http, now).await?.worker))
    }

    /// Whether a worker that calls has not called another node in the meantime. Without others there is nothing to ask.
    async fn is_latest(&self, worker: &ConnectedWorker) -> Result<bool, StoreError> {
        Ok(self.store.engine() == "sqlite" || self.store.worker_session(worker.id).await? == Some(worker.session))
    }

    /// Sends these jobs once more: their delivery got lost.
    pub async fn deliver_again(&self, worker: &Arc<ConnectedWorker>, jobs: Vec<Arc<InFlightJob>>, now: Timestamp) {
        self.deliver(vec![(worker.clone(), jobs)], now).await;
    }

    /// A worker that calls now and then waits for jobs from here on.
    pub fn worker_waits(&self) {
        self.lanes.nudge.notify_one();
    }

    /// Puts into a worker's hands what it has according to the store. What it says it does not have goes to others; a process
    /// that was started for a job gets it now.
    async fn hand_over(
        &self,
        worker: &Arc<ConnectedWorker>,
        admitted: WorkerAdmitted,
        before: Option<&ConnectedWorker>,
        holds: Option<Vec<(JobId, Run)>>,
        now: Timestamp,
    ) {
        let starting = matches!(admitted.was, Some(WorkerState::Creating | WorkerState::Connecting));
        let mut jobs = Vec::with_capacity(admitted.jobs.len());
        let mut started = Vec::new();
        for ResumedJob { job, kind, claimed_at, started_at } in admitted.jobs {
            started.push(started_at);
            jobs.push((job, kind.into(), claimed_at));
        }
        let held = self.in_flight.add_for(worker, jobs);
        {
            let mut standing = worker.standing.lock();
            for (held, started_at) in held.iter().zip(started) {
                if let Some(at) = started_at.filter(|_| held.started_at().is_none()) {
                    held.start(at);
                    held.mark_recorded();
                } else if held.started_at().is_none() && !starting && !worker.tells_starts {
                    held.start(held.claimed_at);
                }
                standing.held.insert(held.job.id, held.clone());
            }
            if let Some(before) = before {
                standing.stopping = std::mem::take(&mut before.standing.lock().stopping);
            }
            standing.settle(now);
        }
        if starting {
            held.iter().for_each(|held| held.assign(now));
            self.deliver(vec![(worker.clone(), held)], now).await;
            return;
        }
        for held in held {
            let has_it = holds.as_ref().is_none_or(|holds| holds.contains(&(held.job.id, held.job.run)));
            if !has_it {
                self.report_handler.end(worker, &held, ReportKind::Release, None, now);
            } else if let Some(reason) = held.cancel_reason() {
                // It may not have heard it.
                held.tell_to_stop(&reason);
            }
        }
    }

    /// Sends jobs to the workers in whose hands they are.
    pub(crate) async fn deliver(&self, jobs: Vec<(Arc<ConnectedWorker>, Vec<Arc<InFlightJob>>)>, now: Timestamp) {
        let ids: Vec<JobId> = jobs.iter().flat_map(|(_, jobs)| jobs.iter().map(|held| held.job.id)).collect();
        if ids.is_empty() {
            return;
        }
        let Ok(mut steps) = self.before_delivery(&jobs, ids).await else {
            for (worker, held) in jobs.iter().flat_map(|(worker, jobs)| jobs.iter().map(move |held| (worker, held))) {
                self.report_handler.end(worker, held, ReportKind::Release, None, now);
            }
            return;
        };
        for (worker, jobs) in jobs {
            if !worker.state().is_operational() && worker.state() != WorkerState::Draining {
                // Its process is started now, and gets the jobs when it has connected.
                jobs.iter().for_each(|held| held.schedule());
                self.workers.pools.notify_one();
                continue;
            }
            let orders: Vec<Order> = jobs
                .into_iter()
                .filter_map(|held| {
                    let steps = steps.remove(&held.job.id).unwrap_or_default();
                    self.delivery(&worker, held, steps, now).map(Order::Job)
                })
                .collect();
            worker.order(orders);
        }
        self.recorder_nudge.notify_one();
    }

    /// What has to be known before jobs are sent: their lanes (a job from another node may be of one that was never met here) and
    /// their finished steps, without which they would do their work again.
    async fn before_delivery(
        &self,
        jobs: &[(Arc<ConnectedWorker>, Vec<Arc<InFlightJob>>)],
        ids: Vec<JobId>,
    ) -> Result<HashMap<JobId, Vec<Step>>, StoreError> {
        let known = async {
            let lanes: Vec<_> = jobs.iter().flat_map(|(_, jobs)| jobs.iter().map(|held| held.job.lane)).collect();
            self.lanes.learn(&*self.store, &lanes).await?;
            self.store.job_steps(ids).await
        };
        let all = known.await.inspect_err(|error| tracing::warn!(%error, "jobs cannot be sent; they go back"))?;
        let mut steps: HashMap<JobId, Vec<Step>> = HashMap::new();
        all.into_iter().for_each(|(id, step)| steps.entry(id).or_default().push(step));
        Ok(steps)
    }

    /// A job made ready to be sent, unless it is too late for it.
    fn delivery(
        &self,
        worker: &Arc<ConnectedWorker>,
        held: Arc<InFlightJob>,
        steps: Vec<Step>,
        now: Timestamp,
    ) -> Option<Delivery> {
        if held.job.options.expires_at.is_some_and(|at| at <= now) {
            let failure = Failure::fatal("expired before it could start").with_reason(ErrorReason::Expired);
            self.report_handler.end(worker, &held, ReportKind::Fail(failure), None, now);
            return None;
        }
        if let Some(cause) = held.cancel_reason() {
            // Nobody wants it any more, and it has not started.
            let failure = Failure::fatal(cause).with_reason(ErrorReason::Cancelled);
            self.report_handler.end(worker, &held, ReportKind::Fail(failure), None, now);
            return None;
        }
        let Some(lane) = self.lanes.lane(held.job.lane) else {
            self.report_handler.end(worker, &held, ReportKind::Release, None, now);
            return None;
        };
        if !worker.tells_starts {
            held.start(now);
            self.bus.changed(held.job.id, JobState::Processing, Some(held.job.run), now);
        }
        let deadline = self.deadline_of(&held, now);
        let due =
            if worker.tells_starts { deadline.min(now.plus_ms(ms(self.config.assigned_timeout))) } else { deadline };
        if due.as_ms() < self.next_check_at.load(Ordering::Acquire) {
            self.workers.watch.notify_one();
        }
        Some(Delivery { held, lane, deadline, steps })
    }

    /// Until when it may run, if it starts at `start`.
    pub(crate) fn deadline_of(&self, held: &InFlightJob, start: Timestamp) -> Timestamp {
        let limit_ms = held
            .job
            .options
            .timeout_ms
            .map_or(ms(self.config.processing_timeout), |limit| i64::try_from(limit).unwrap_or(i64::MAX));
        held.started_at().unwrap_or(start).plus_ms(limit_ms)
    }

    /// A stream has ended. `left`: the worker said that it goes.
    pub async fn worker_gone(&self, worker: &Arc<ConnectedWorker>, left: bool, now: Timestamp) {
        if !self.workers.find(worker.id).is_some_and(|known| Arc::ptr_eq(&known, worker)) {
            return;
        }
        // What was not even sent is given back; nobody has to wait for it.
        for order in worker.take_orders() {
            if let Order::Job(delivery) = order {
                self.report_handler.end(worker, &delivery.held, ReportKind::Release, None, now);
            }
        }
        let nothing_held = worker.standing.lock().held.is_empty();
        if left || (nothing_held && worker.close_reason().is_none() && !worker.is_flapping(now)) {
            let reason = if left { "it left" } else { "its connection closed" };
            return self.worker_leave(worker, reason, now).await;
        }
        worker.standing.lock().away_since = Some(now);
        if worker.load().0 > 0 {
            self.workers.dispatch_failed(worker, now);
        }
        tracing::info!(
            worker = worker.key,
            "the connection to a worker is gone; it has {:?} to come back",
            self.config.reconnect_grace
        );
        self.workers.news.notify_one();
        self.workers.watch.notify_one();
    }

    /// Writes down the last there is to say about a worker, and ends its life.
    pub(crate) async fn worker_ends(
        &self,
        worker: &Arc<ConnectedWorker>,
        end: WorkerEnd,
        reason: &str,
        now: Timestamp,
    ) -> Result<(), StoreError> {
        let settled = self.report_handler.reporter.settled_for(worker.id);
        let _ = tokio::time::timeout(Duration::from_secs(5), settled).await;
        status_writer::tell_last(&*self.store, worker, now).await?;
        let lost = matches!(end, WorkerEnd::Lost { .. });
        let freed = self.store.worker_end(worker.id, worker.session, end, now).await?;
        worker.close(if lost { CloseReason::WorkerLost } else { CloseReason::Left });
        self.workers.drop_worker(worker, &self.in_flight);
        self.lanes.nudge.notify_one();
        let Some(freed) = freed else { return Ok(()) };
        let jobs = freed.orphaned + freed.returned;
        if lost {
            tracing::warn!(worker = worker.key, reason, jobs, "a worker is lost");
        } else {
            tracing::info!(worker = worker.key, reason, jobs, "a worker has left");
        }
        Ok(())
    }

    /// Ends a worker's life in peace; what it still has goes back without costing a try.
    pub async fn worker_leave(&self, worker: &Arc<ConnectedWorker>, reason: &str, now: Timestamp) {
        let end = WorkerEnd::Left { reason: reason.into() };
        if let Err(error) = self.worker_ends(worker, end, reason, now).await {
            // It has a deadline instead.
            tracing::warn!(worker = worker.key, %error, "a worker's end could not be stored yet");
            worker.standing.lock().away_since = Some(now);
            self.workers.watch.notify_one();
        }
    }
}
