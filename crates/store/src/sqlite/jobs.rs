//! Operations on jobs. Their SQL statements are in the modules that each operation calls.

use async_trait::async_trait;
use faena_domain::{Attempt, JobGraph, JobId, JobView, NewJob, Step, Timestamp};
use serde_json::json;

use super::{Sqlite, audit, change, dead_letters, due, events, graph, list, position, read, submit, writer::Tx};
use crate::{
    CancelOutcome, Counts, DueResult, Filter, InFlightCount, JobCountStore, JobIdPage, JobPage, JobPatch, JobPosition,
    JobStore, LaneId, LogCursor, LogPage, Page, Result, Retention, Retried, Submitted, audit::audit_entry,
    audit::retried_by, events::SYSTEM, lanes::LaneName, lists::Span, plan,
};

#[async_trait]
impl JobStore for Sqlite {
    async fn job_submit(&self, jobs: Vec<NewJob>, by: Option<&str>, now: Timestamp) -> Result<Vec<Submitted>> {
        // A job in a new lane may exceed the limit of lanes, so submitting it can fail.
        let known = |job: &NewJob| self.shared.lanes.id_of(LaneName::of(job)).is_some();
        let is_plain = jobs.iter().all(|job| plan::is_plain(job) && known(job));
        let (weight, by) = (plan::weight(&jobs), by.unwrap_or(SYSTEM).to_owned());
        let work = move |tx: &Tx| events::with_actor(tx, &by, |tx| submit::submit(tx, jobs, now));
        if is_plain {
            self.writer.call_without_savepoint(weight, work).await
        } else {
            self.writer.call_with_weight(weight, work).await
        }
    }

    async fn job_cancel(&self, id: JobId, reason: &str, by: Option<&str>, now: Timestamp) -> Result<CancelOutcome> {
        let reason = reason.to_owned();
        let entry = audit_entry(by, "job.cancel", id, json!({ "reason": reason }));
        self.writer.call(move |tx| audit::run_audited(tx, entry, now, |tx| change::cancel(tx, id, &reason, now))).await
    }

    async fn job_retry(&self, id: JobId, by: Option<&str>, now: Timestamp) -> Result<Retried> {
        let (entry, by) = (audit_entry(by, "job.retry", id, json!({})), retried_by(by));
        self.writer.call(move |tx| audit::run_audited(tx, entry, now, |tx| change::retry(tx, id, &by, now))).await
    }

    async fn job_patch(&self, id: JobId, patch: JobPatch, by: Option<&str>, now: Timestamp) -> Result<()> {
        let entry = audit_entry(by, "job.patch", id, json!({ "changed": patch.describe() }));
        self.writer.call(move |tx| audit::run_audited(tx, entry, now, |tx| change::patch(tx, id, patch, now))).await
    }

    async fn job_delete(&self, id: JobId, by: Option<&str>, now: Timestamp) -> Result<()> {
        let entry = audit_entry(by, "job.delete", id, json!({}));
        self.writer.call(move |tx| audit::run_audited(tx, entry, now, |tx| change::delete(tx, id, now))).await
    }

    async fn job_promote(&self, limit: usize, now: Timestamp) -> Result<DueResult> {
        self.writer.call(move |tx| due::promote(tx, limit, now)).await
    }

    async fn job_expire(&self, limit: usize, now: Timestamp) -> Result<DueResult> {
        // SQLite: usually nothing is due, and reading is enough to know that and when to check again.
        let next_at = self.read(|connection, _| read::next_expiry_at(connection)).await?;
        if next_at.is_none_or(|at| at > now) {
            return Ok(DueResult { next_at, ..DueResult::default() });
        }
        self.writer.call(move |tx| due::expire(tx, limit, now)).await
    }

    async fn job_fail_unhandled(
        &self,
        lanes: Vec<LaneId>,
        before: Timestamp,
        limit: usize,
        now: Timestamp,
    ) -> Result<usize> {
        self.writer.call(move |tx| due::fail_unhandled(tx, &lanes, before, limit, now)).await
    }

    async fn job_prune(&self, retention: &Retention, limit: usize, now: Timestamp) -> Result<usize> {
        let retention = retention.clone();
        // SQLite: the search takes long if there are many lanes, so the writer only deletes what a reader has found.
        let search = retention.clone();
        let old = self.read(move |connection, _| due::old_jobs(connection, &search, limit, now)).await?;
        self.writer.call_with_weight(10 * old.len() + 1, move |tx| due::prune(tx, old, &retention, limit, now)).await
    }

    async fn job_get(&self, id: JobId) -> Result<Option<JobView>> {
        self.read(move |connection, shared| read::get(connection, shared, id)).await
    }

    async fn job_log(&self, id: JobId, after: Option<LogCursor>, limit: usize) -> Result<Option<LogPage>> {
        let log = self.read(move |connection, shared| read::log(connection, shared, id)).await?;
        Ok(log.map(|log| LogPage::of(log, after, limit)))
    }

    async fn job_position(&self, id: JobId, without: Vec<LaneId>) -> Result<Option<JobPosition>> {
        self.read(move |connection, shared| position::position(connection, shared, id, &without)).await
    }

    async fn job_graph(&self, id: JobId, queues: Option<Vec<String>>, limit: usize) -> Result<Option<JobGraph>> {
        self.read(move |connection, shared| graph::graph(connection, shared, id, queues.as_deref(), limit)).await
    }

    async fn job_list(&self, filter: &Filter, page: Page) -> Result<JobPage> {
        let filter = filter.clone();
        self.read(move |connection, shared| list::list(connection, shared, &filter, page)).await
    }

    async fn job_find(&self, filter: &Filter, after: Option<JobId>, up_to: JobId, limit: usize) -> Result<JobIdPage> {
        let filter = filter.clone();
        let span = Span::upward(after, up_to, limit);
        self.read(move |connection, shared| list::find(connection, shared, &filter, span)).await
    }

    async fn job_attempts(&self, id: JobId) -> Result<Vec<Attempt>> {
        self.read(move |connection, _| dead_letters::attempts(connection, id)).await
    }

    async fn job_steps(&self, ids: Vec<JobId>) -> Result<Vec<(JobId, Step)>> {
        self.read(move |connection, _| read::steps(connection, &ids)).await
    }
}

#[async_trait]
impl JobCountStore for Sqlite {
    async fn ready_since(&self) -> Result<Vec<(LaneId, Timestamp)>> {
        self.read(|connection, _| read::ready_since(connection)).await
    }

    async fn counts(&self) -> Result<Counts> {
        self.read(|connection, _| read::counts(connection)).await
    }

    async fn in_flight_counts(&self) -> Result<Vec<InFlightCount>> {
        self.read(|connection, _| read::in_flight_counts(connection)).await
    }
}
