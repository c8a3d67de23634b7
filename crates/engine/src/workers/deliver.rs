//! Sends jobs to connected workers.

use std::{
    collections::HashMap,
    sync::{Arc, atomic::Ordering},
};

use faena_domain::{ErrorReason, Failure, JobId, JobState, Step, Timestamp, WorkerState};

use super::{ConnectedWorker, Delivery, PollGuard, ReportKind, WorkerCommand};
use crate::{Engine, EngineError, config::ms, in_flight::InFlightJob, traces::traceparent_of};

/// Jobs to send, by worker.
type Assignments = Vec<(Arc<ConnectedWorker>, Vec<Arc<InFlightJob>>)>;

impl Engine {
    /// Marks that a polling worker waits for up to `count` jobs until the guard is dropped, and wakes the dispatcher.
    pub fn wait_for_jobs(&self, worker: &Arc<ConnectedWorker>, count: usize) -> PollGuard {
        let guard = worker.begin_poll(count);
        self.wakeups.slot_freed();
        guard
    }

    /// Resends jobs whose delivery was lost.
    pub async fn redeliver(&self, worker: &Arc<ConnectedWorker>, jobs: Vec<Arc<InFlightJob>>, now: Timestamp) {
        self.deliver(vec![(worker.clone(), jobs)], now).await;
    }

    /// Sends claimed jobs to their workers. Jobs that cannot be sent are released.
    pub(crate) async fn deliver(&self, assignments: Assignments, now: Timestamp) {
        let ids: Vec<JobId> = assignments.iter().flat_map(|(_, jobs)| jobs.iter().map(|job| job.id())).collect();
        if ids.is_empty() {
            return;
        }
        let mut steps = match self.prepare_delivery(&assignments, ids).await {
            Ok(steps) => steps,
            Err(error) => {
                tracing::warn!(%error, "jobs not sent, releasing them");
                return self.release_undelivered(&assignments, now);
            }
        };
        if !self.holds_lease(now).await {
            // From now on other nodes watch these workers and their jobs; a report of an older claim is rejected.
            return self.release_undelivered(&assignments, now);
        }
        for (worker, jobs) in assignments {
            if !worker.state().is_operational() && worker.state() != WorkerState::Draining {
                // Its process is started now and receives the jobs when it has connected.
                jobs.iter().for_each(|job| job.schedule());
                self.wakeups.pool_changed();
                continue;
            }
            let commands: Vec<WorkerCommand> = jobs
                .into_iter()
                .filter_map(|job| {
                    let steps = steps.remove(&job.id()).unwrap_or_default();
                    self.delivery(&worker, job, steps, now).map(WorkerCommand::Job)
                })
                .collect();
            worker.send(commands);
        }
        self.wakeups.job_started();
    }

    fn release_undelivered(&self, assignments: &Assignments, now: Timestamp) {
        for (worker, jobs) in assignments {
            jobs.iter().for_each(|job| self.reports.handler.end(worker, job, ReportKind::Release, None, now));
        }
    }

    /// Loads the lanes of jobs (a job from another node may be of a lane unknown here) and their finished steps, without
    /// which they would repeat their work.
    async fn prepare_delivery(
        &self,
        assignments: &Assignments,
        ids: Vec<JobId>,
    ) -> Result<HashMap<JobId, Vec<Step>>, EngineError> {
        let jobs = assignments.iter().flat_map(|(_, jobs)| jobs.iter());
        let lanes: Vec<_> = jobs.map(|job| job.claimed.lane).collect();
        self.dispatch.lanes.load(&*self.store, &lanes).await?;
        let mut steps: HashMap<JobId, Vec<Step>> = HashMap::new();
        for (id, step) in self.store.job_steps(ids).await? {
            steps.entry(id).or_default().push(step);
        }
        Ok(steps)
    }

    /// Returns the delivery of a job. Ends the run and returns `None` if the job has expired or was cancelled, or its lane is
    /// unknown.
    fn delivery(
        &self,
        worker: &Arc<ConnectedWorker>,
        job: Arc<InFlightJob>,
        steps: Vec<Step>,
        now: Timestamp,
    ) -> Option<Delivery> {
        let fail = |failure| self.reports.handler.end(worker, &job, ReportKind::Fail(failure), None, now);
        if job.claimed.options.expires_at.is_some_and(|at| at <= now) {
            fail(Failure::fatal("expired before it could start").with_reason(ErrorReason::Expired));
            return None;
        }
        if let Some(cause) = job.cancel_reason() {
            fail(Failure::fatal(cause).with_reason(ErrorReason::Cancelled));
            return None;
        }
        let Some(lane) = self.dispatch.lanes.lane(job.claimed.lane) else {
            self.reports.handler.end(worker, &job, ReportKind::Release, None, now);
            return None;
        };
        job.deliver_to(worker.session);
        if !worker.reports_starts {
            job.start(now);
            self.bus.changed(job.id(), JobState::Processing, Some(job.run()), now);
        }
        let deadline = self.deadline_of(&job, now);
        let check_at =
            if worker.reports_starts { deadline.min(now.plus_ms(ms(self.config.assigned_timeout))) } else { deadline };
        if check_at.as_ms() < self.guardian.next_check_at.load(Ordering::Acquire) {
            self.wakeups.deadline_changed();
        }
        let traceparent = traceparent_of(self.tracer.as_deref(), &job);
        Some(Delivery { job, lane, deadline, steps, traceparent })
    }

    /// Returns when a job times out if it starts at `start`.
    pub(crate) fn deadline_of(&self, job: &InFlightJob, start: Timestamp) -> Timestamp {
        let limit_ms = job
            .claimed
            .options
            .timeout_ms
            .map_or(ms(self.config.processing_timeout), |limit| i64::try_from(limit).unwrap_or(i64::MAX));
        job.started_at().unwrap_or(start).plus_ms(limit_ms)
    }
}
