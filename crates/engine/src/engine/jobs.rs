//! Changes of jobs that callers request: submit, cancel, retry, trigger.
//!
//! Each change is stored and then announced on the bus, here and nowhere else, so no caller has to remember it. The
//! loops are woken by the signal that the store emits after the commit.

use std::time::Duration;

use faena_domain::{JobId, JobState, NewJob, ScheduleId, Timestamp};
use faena_store::{CancelOutcome, Retried, RunEnd, StoreError, Submitted};

use super::Engine;
use crate::{EngineError, in_flight::InFlightJob};

/// How long a cancel call waits for the worker to stop before it answers.
const CANCEL_WAIT: Duration = Duration::from_secs(2);
/// How often a waiting cancel call checks whether another node has reported the end.
const CANCEL_POLL: Duration = Duration::from_millis(100);

/// Result of a request to cancel a job.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CancelResult {
    Cancelled,
    /// The worker was asked to stop and has not stopped yet.
    Requested {
        state: JobState,
    },
}

impl Engine {
    /// Stores all jobs or none, and announces those that are new. `by`: the caller.
    pub async fn submit(&self, jobs: Vec<NewJob>, by: &str, now: Timestamp) -> Result<Vec<Submitted>, EngineError> {
        let submitted = self.store.job_submit(jobs, Some(by), now).await?;
        for job in submitted.iter().filter(|job| !job.existed) {
            self.bus.changed(job.id, job.status, None, job.created_at);
        }
        Ok(submitted)
    }

    /// Cancels a job. A running job is asked to stop and has a moment to do so before this returns.
    ///
    /// # Errors
    /// `StoreError::InvalidTransition` if the job has finished otherwise.
    pub async fn cancel(&self, id: JobId, reason: &str, by: &str, now: Timestamp) -> Result<CancelResult, EngineError> {
        let state = match self.store.job_cancel(id, reason, Some(by), now).await? {
            CancelOutcome::Cancelled => {
                self.bus.changed(id, JobState::Cancelled, None, now);
                return Ok(CancelResult::Cancelled);
            }
            CancelOutcome::Requested { state } => state,
        };
        let mut changes = self.bus.subscribe();
        self.request_stop(id, reason, now);
        let timeout = tokio::time::sleep(CANCEL_WAIT);
        tokio::pin!(timeout);
        loop {
            let current = self.store.job_get(id).await?.map(|job| job.status);
            match current {
                Some(JobState::Cancelled) => return Ok(CancelResult::Cancelled),
                Some(from) if from.is_terminal() => {
                    return Err(StoreError::InvalidTransition { from, wanted: "be cancelled" }.into());
                }
                _ => {}
            }
            tokio::select! {
                () = &mut timeout => return Ok(CancelResult::Requested { state: current.unwrap_or(state) }),
                // An end on this node is announced; an end on another node is found by polling.
                _ = async { while changes.recv().await.is_ok_and(|event| event.job_id != id) {} } => {}
                () = tokio::time::sleep(CANCEL_POLL) => {}
            }
        }
    }

    /// Retries a failed or cancelled job, which may use all its attempts again, or starts the next attempt of a
    /// retrying job now.
    pub async fn retry(&self, id: JobId, by: &str, now: Timestamp) -> Result<Retried, EngineError> {
        let retried = self.store.job_retry(id, Some(by), now).await?;
        self.bus.changed(id, retried.state, None, now);
        Ok(retried)
    }

    /// Retries a dead-lettered job. Returns its new state: it is ready, or waits for a parent that was retried before.
    pub async fn retry_dead_letter(&self, id: JobId, by: &str, now: Timestamp) -> Result<JobState, EngineError> {
        self.store.dead_letter_retry(id, by, now).await?;
        let mut state = JobState::Queued;
        for parent in self.store.job_get(id).await?.map(|job| job.depends_on).unwrap_or_default() {
            if self.store.job_get(parent).await?.is_some_and(|parent| !parent.status.is_terminal()) {
                state = JobState::Pending;
            }
        }
        self.bus.changed(id, state, None, now);
        Ok(state)
    }

    /// Creates a job of a schedule now. Returns `None` if there is no such schedule.
    pub async fn trigger_schedule(
        &self,
        id: ScheduleId,
        by: &str,
        now: Timestamp,
    ) -> Result<Option<JobId>, EngineError> {
        let Some(job) = self.store.schedule_trigger(id, by, now).await? else { return Ok(None) };
        self.schedules.record_trigger();
        self.bus.changed(job, JobState::Queued, None, now);
        Ok(Some(job))
    }

    /// Ends a job of this process and passes its end to the reporter.
    pub(crate) fn finish_job(&self, job: &InFlightJob, end: RunEnd) {
        self.dispatch.in_flight.finish(job, end, |end| self.reports.reporter.push(job, end, None));
    }

    /// Asks the worker that runs this job here to stop it; the guardian ends the job if the worker does not.
    pub(crate) fn request_stop(&self, id: JobId, reason: &str, now: Timestamp) {
        if let Some(job) = self.dispatch.in_flight.find(id) {
            job.request_stop(reason, now);
            self.wakeups.deadline_changed();
        }
    }
}
