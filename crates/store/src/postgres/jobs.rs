//! Operations on jobs. Their SQL statements are in the modules that each operation calls.

use async_trait::async_trait;
use faena_domain::{Attempt, JobGraph, JobId, JobView, NewJob, Step, Timestamp};

use super::{Postgres, change, dead_letters, due, graph, list, position, read, submit};
use crate::{
    CancelOutcome, Counts, DueResult, Filter, InFlightCount, JobCountStore, JobIdPage, JobPage, JobPatch, JobPosition,
    JobStore, LaneId, LogCursor, LogPage, Page, Result, Retention, Retried, Submitted, events::SYSTEM, lists::Span,
};

#[async_trait]
impl JobStore for Postgres {
    async fn job_submit(&self, jobs: Vec<NewJob>, by: Option<&str>, now: Timestamp) -> Result<Vec<Submitted>> {
        let by = by.unwrap_or(SYSTEM).to_owned();
        self.submits.call(|answer| submit::Call { jobs, by, now, answer }).await
    }

    async fn job_cancel(&self, id: JobId, reason: &str, by: Option<&str>, now: Timestamp) -> Result<CancelOutcome> {
        self.shared.retrying(|| change::cancel(&self.shared, id, reason, by, now)).await
    }

    async fn job_retry(&self, id: JobId, by: Option<&str>, now: Timestamp) -> Result<Retried> {
        self.shared.retrying(|| change::retry(&self.shared, id, by, now)).await
    }

    async fn job_patch(&self, id: JobId, patch: JobPatch, by: Option<&str>, now: Timestamp) -> Result<()> {
        self.shared.retrying(|| change::patch(&self.shared, id, &patch, by, now)).await
    }

    async fn job_delete(&self, id: JobId, by: Option<&str>, now: Timestamp) -> Result<()> {
        self.shared.retrying(|| change::delete(&self.shared, id, by, now)).await
    }

    async fn job_promote(&self, limit: usize, now: Timestamp) -> Result<DueResult> {
        self.shared.retrying(|| due::promote(&self.shared, limit, now)).await
    }

    async fn job_expire(&self, limit: usize, now: Timestamp) -> Result<DueResult> {
        self.shared.retrying(|| due::expire(&self.shared, limit, now)).await
    }

    async fn job_fail_unhandled(
        &self,
        lanes: Vec<LaneId>,
        before: Timestamp,
        limit: usize,
        now: Timestamp,
    ) -> Result<usize> {
        self.shared.retrying(|| due::fail_unhandled(&self.shared, &lanes, before, limit, now)).await
    }

    async fn job_prune(&self, retention: &Retention, limit: usize, now: Timestamp) -> Result<usize> {
        self.shared.retrying(|| due::prune(&self.shared, retention, limit, now)).await
    }

    async fn job_get(&self, id: JobId) -> Result<Option<JobView>> {
        self.shared.retrying(|| read::get(&self.shared, id)).await
    }

    async fn job_log(&self, id: JobId, after: Option<LogCursor>, limit: usize) -> Result<Option<LogPage>> {
        let log = self.shared.retrying(|| read::log(&self.shared, id)).await?;
        Ok(log.map(|log| LogPage::of(log, after, limit)))
    }

    async fn job_position(&self, id: JobId, without: Vec<LaneId>) -> Result<Option<JobPosition>> {
        self.shared.retrying(|| position::position(&self.shared, id, &without)).await
    }

    async fn job_graph(&self, id: JobId, queues: Option<Vec<String>>, limit: usize) -> Result<Option<JobGraph>> {
        self.shared.retrying(|| graph::graph(&self.shared, id, queues.as_deref(), limit)).await
    }

    async fn job_list(&self, filter: &Filter, page: Page) -> Result<JobPage> {
        self.shared.retrying(|| list::list(&self.shared, filter, page)).await
    }

    async fn job_find(&self, filter: &Filter, after: Option<JobId>, up_to: JobId, limit: usize) -> Result<JobIdPage> {
        self.shared.retrying(|| list::find(&self.shared, filter, Span::upward(after, up_to, limit))).await
    }

    async fn job_attempts(&self, id: JobId) -> Result<Vec<Attempt>> {
        self.shared.retrying(|| dead_letters::attempts(&self.shared, id)).await
    }

    async fn job_steps(&self, ids: Vec<JobId>) -> Result<Vec<(JobId, Step)>> {
        self.shared.retrying(|| read::steps(&self.shared, &ids)).await
    }
}

#[async_trait]
impl JobCountStore for Postgres {
    async fn ready_since(&self) -> Result<Vec<(LaneId, Timestamp)>> {
        self.shared.retrying(|| read::ready_since(&self.shared)).await
    }

    async fn counts(&self) -> Result<Counts> {
        self.shared.retrying(|| read::counts(&self.shared)).await
    }

    async fn in_flight_counts(&self) -> Result<Vec<InFlightCount>> {
        self.shared.retrying(|| read::in_flight_counts(&self.shared)).await
    }
}
