//! The model: one small record per job.

use std::collections::BTreeMap;

use faena_domain::{ClaimOrder, JobId, JobState, Priority};
use faena_store::{ClaimedJob, RunOutcome};

#[derive(Debug)]
pub struct Job {
    pub state: JobState,
    pub priority: Priority,
    pub retries: u32,
    pub max_retries: u32,
    pub ready_at: i64,
    pub due_at: i64,
    pub scheduled_at: Option<i64>,
    pub expires_at: Option<i64>,
    pub finished_at: i64,
    /// The parents it still waits for.
    pub parents: Vec<JobId>,
    pub depends_on: Vec<JobId>,
    pub run_on_parent_failure: bool,
    pub unique: Option<String>,
    pub kind: &'static str,
    pub key: Option<String>,
    pub claim: Option<ModelClaim>,
}

#[derive(Debug)]
pub struct ModelClaim {
    pub claimed: ClaimedJob,
    pub owner: ClaimOwner,
    pub cancel_requested: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ClaimOwner {
    Node,
    DeadNode,
    Worker,
}

#[derive(Default)]
pub struct Model {
    pub jobs: BTreeMap<JobId, Job>,
    /// Claimed jobs whose run has ended.
    pub ended_claims: Vec<ClaimedJob>,
    /// Limits on jobs in flight: of the system, of type `b`, of each key.
    pub limits: [Option<usize>; 3],
}

impl Model {
    pub fn ids_where(&self, matches: impl Fn(&Job) -> bool) -> Vec<JobId> {
        self.jobs.iter().filter(|(_, job)| matches(job)).map(|(id, _)| *id).collect()
    }

    pub fn job(&mut self, id: JobId) -> &mut Job {
        self.jobs.get_mut(&id).unwrap()
    }

    /// Returns the first `limit` ready jobs of the only queue.
    pub fn first(&self, limit: usize, start: i64) -> Vec<JobId> {
        let mut ready: Vec<(i64, JobId)> = self
            .jobs
            .iter()
            .filter(|(_, job)| job.state == JobState::Queued)
            .map(|(id, job)| {
                let at = faena_domain::Timestamp::from_ms(start + job.ready_at);
                (ClaimOrder::Aging.score(job.priority, at), *id)
            })
            .collect();
        ready.sort_unstable();
        let mut first: Vec<JobId> = Vec::new();
        for (_, id) in ready {
            if first.len() < limit && self.has_room(id, &first) {
                first.push(id);
            }
        }
        first
    }

    /// Returns whether the limits allow one more job, besides those in flight and those before it.
    pub fn has_room(&self, id: JobId, before: &[JobId]) -> bool {
        let job = &self.jobs[&id];
        let running = |counts: &dyn Fn(&Job) -> bool| {
            self.ids_where(|job| job.claim.is_some() && counts(job)).len()
                + before.iter().filter(|id| counts(&self.jobs[id])).count()
        };
        let [system, kind, key] = self.limits.map(|limit| limit.unwrap_or(usize::MAX));
        running(&|_| true) < system
            && (job.kind != "b" || running(&|other| other.kind == "b") < kind)
            && (job.key.is_none() || running(&|other| other.key == job.key) < key)
    }

    pub fn finish(&mut self, id: JobId, state: JobState, now: i64) {
        let job = self.job(id);
        job.state = state;
        job.finished_at = now;
        job.parents.clear();
        self.release(id);
        self.release_dependents(id, Some(state), now);
    }

    pub fn release(&mut self, id: JobId) {
        if let Some(claim) = self.job(id).claim.take() {
            self.ended_claims.push(claim.claimed);
        }
    }

    pub fn release_dependents(&mut self, parent: JobId, state: Option<JobState>, now: i64) {
        for child in self.ids_where(|job| job.parents.contains(&parent)) {
            let job = self.job(child);
            if state == Some(JobState::Completed) || job.run_on_parent_failure {
                job.parents.retain(|id| *id != parent);
                if job.parents.is_empty() {
                    self.delay_or_make_ready(child, now);
                }
            } else {
                self.finish(child, JobState::Cancelled, now);
            }
        }
    }

    pub fn delay_or_make_ready(&mut self, id: JobId, now: i64) {
        let job = self.job(id);
        match job.scheduled_at.filter(|at| *at > now) {
            Some(at) => (job.state, job.due_at) = (JobState::Pending, at),
            None => (job.state, job.ready_at) = (JobState::Queued, now),
        }
    }

    pub fn in_flight(&self, owner: ClaimOwner) -> Vec<JobId> {
        self.ids_where(|job| job.claim.as_ref().is_some_and(|claim| claim.owner == owner))
    }

    pub fn requeue(&mut self, id: JobId, outcome: &RunOutcome, now: i64, due_ms: i64) {
        if self.job(id).claim.as_ref().is_some_and(|claim| claim.cancel_requested) {
            return self.finish(id, JobState::Cancelled, now);
        }
        self.release(id);
        let job = self.job(id);
        if matches!(outcome, RunOutcome::Released) {
            job.state = JobState::Queued;
        } else {
            (job.state, job.due_at) = (JobState::Retrying, due_ms);
            job.retries += 1;
        }
    }
}
