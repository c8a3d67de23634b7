//! Runs random sequences of store methods and compares the result with a model that has one small record per job.
//!
//! After each step every job must be in the state of the model, a claim must return exactly the jobs that the model puts
//! first, and a report of an old run must change nothing.

mod jobs;

use std::collections::BTreeMap;

use faena_domain::{JobId, JobState, NodeId, Priority, Scope};
use faena_store::{
    CancelOutcome, ClaimedJob, Filter, JobPatch, Owner, Page, Retention, Retried, RunEnd, RunOutcome, RunUpdateKind,
    StoreError, WorkerAdmitted, WorkerEnd, WorkerEntry,
};

use jobs::{ClaimOwner, Job, Model, ModelClaim};

use crate::support::*;

const SEEDS: [u64; 4] = [1, 20, 300, 4_000];
const STEPS: usize = 150;

struct ModelTest<'a> {
    fixture: &'a Fixture,
    model: Model,
    random: SeededRandom,
    now: i64,
    dead: NodeId,
    worker: WorkerAdmitted,
    action: String,
}

pub async fn any_sequence_of_operations_agrees_with_the_model(fixture: &Fixture) {
    let worker = fixture.admit(fixture.worker("w"), 0).await;
    let model = Model::default();
    let mut test = ModelTest {
        fixture,
        model,
        random: SeededRandom(0),
        now: 0,
        dead: NodeId::new(),
        worker,
        action: String::new(),
    };
    for (round, seed) in SEEDS.into_iter().enumerate() {
        test.random = SeededRandom(seed);
        // Every other round begins with limits.
        if round % 2 == 1 {
            for _ in 0..6 {
                test.set_limit().await;
            }
        }
        for step in 0..STEPS {
            test.now += i64::try_from(test.random.below(300)).unwrap() + 1;
            fixture.store.node_renew(fixture.node, LEASE_MS, fixture.at(test.now)).await.unwrap();
            test.step().await;
            test.compare(&format!("seed {seed}, step {step}")).await;
            if step % 10 == 0 {
                fixture.database.assert_consistent().await;
            }
        }
    }
    assert!(test.model.ended_claims.len() > 50, "enough runs have ended");
}

impl ModelTest<'_> {
    async fn step(&mut self) {
        match self.random.below(100) {
            0..20 => self.submit().await,
            20..40 => self.claim().await,
            40..48 => self.start().await,
            48..65 => self.end().await,
            65..70 => self.late_report().await,
            70..76 => self.cancel().await,
            76..80 => self.retry().await,
            80..85 => self.patch().await,
            85..87 => self.delete().await,
            87..92 => self.promote().await,
            92..95 => self.recover().await,
            95 => self.prune().await,
            96 => self.reconnect().await,
            97 => self.set_limit().await,
            _ => self.end_worker().await,
        }
    }

    async fn compare(&mut self, when: &str) {
        let page = self.fixture.store.job_list(&Filter::default(), Page::offset(0, 2_000)).await.unwrap();
        let seen: BTreeMap<JobId, (JobState, u32)> =
            page.jobs.iter().map(|job| (job.id, (job.status, job.retry_count))).collect();
        let wanted: BTreeMap<JobId, (JobState, u32)> =
            self.model.jobs.iter().map(|(id, job)| (*id, (job.state, job.retries))).collect();
        for (id, wanted) in &wanted {
            assert_eq!(seen.get(id), Some(wanted), "{when}: job {id} after {}: {:?}", self.action, self.model.jobs[id]);
        }
        assert_eq!(seen.len(), wanted.len(), "{when}: after {}", self.action);
        assert_eq!(page.total, wanted.len() as u64, "{when}: after {}", self.action);
    }

    fn pick_in_flight(&mut self) -> Option<(JobId, ClaimedJob)> {
        let in_flight = self.model.ids_where(|job| job.claim.is_some());
        let id = *self.random.pick(&in_flight)?;
        Some((id, self.model.jobs[&id].claim.as_ref()?.claimed.clone()))
    }

    fn pick_any(&mut self) -> Option<JobId> {
        let all = self.model.ids_where(|_| true);
        self.random.pick(&all).copied()
    }

    async fn submit(&mut self) {
        let now = self.now;
        let mut jobs = Vec::new();
        for _ in 0..=self.random.below(3) {
            let priority = Priority::ALL[self.random.below(4)];
            let kind = ["a", "b"][self.random.below(2)];
            let mut job = self.fixture.job(kind, now).priority(priority);
            job = job.retries(u32::try_from(self.random.below(3)).unwrap());
            let mut model = Job {
                state: JobState::Queued,
                priority,
                retries: 0,
                max_retries: job.options.retry.max_retries,
                ready_at: now,
                due_at: 0,
                scheduled_at: None,
                expires_at: None,
                finished_at: 0,
                parents: Vec::new(),
                depends_on: Vec::new(),
                run_on_parent_failure: false,
                unique: None,
                kind,
                key: None,
                claim: None,
            };
            if self.random.chance(40) {
                let key = format!("tenant-{}", self.random.below(3));
                job = job.concurrency_key(&key);
                model.key = Some(key);
            }
            if self.random.chance(20) {
                model.scheduled_at = Some(now + 500);
                job = job.scheduled(self.fixture.at(now + 500));
            }
            if self.random.chance(20) {
                model.expires_at = Some(now + 2_000);
                job = job.expires(self.fixture.at(now + 2_000));
            }
            if self.random.chance(30) {
                let parents: Vec<JobId> = (0..=self.random.below(2)).filter_map(|_| self.pick_any()).collect();
                if self.random.chance(30) {
                    model.run_on_parent_failure = true;
                    job = job.run_on_parent_failure();
                }
                model.parents = parents.clone();
                model.depends_on = parents.clone();
                job = job.after(&parents);
            }
            if self.random.chance(15) {
                let key = format!("key-{}", self.random.below(3));
                model.unique = Some(key.clone());
                job = job.unique(&key);
            }
            jobs.push((job, model));
        }
        let keys: Vec<&String> = jobs.iter().filter_map(|(_, model)| model.unique.as_ref()).collect();
        let taken = |key: &String| {
            let holds = |job: &Job| !job.state.is_terminal() && job.unique.as_ref() == Some(key);
            self.model.jobs.values().any(holds)
        };
        let rejected = keys.iter().any(|key| taken(key) || keys.iter().filter(|other| other == &key).count() > 1);
        let answer = self.fixture.try_submit(jobs.iter().map(|(job, _)| job.clone()).collect(), now).await;
        self.action = format!("submit of {} at {now}", jobs.len());
        if rejected {
            assert!(matches!(answer, Err(StoreError::Conflict { .. })), "{answer:?}");
            return;
        }
        answer.unwrap();
        for (job, model) in jobs {
            let parents = model.parents.clone();
            self.model.jobs.insert(job.id, model);
            let state_of = |id: &JobId| self.model.jobs[id].state;
            let open: Vec<JobId> = parents.iter().copied().filter(|id| !state_of(id).is_terminal()).collect();
            let has_failed_parent =
                parents.iter().any(|id| state_of(id).is_terminal() && state_of(id) != JobState::Completed);
            let is_cancelled = has_failed_parent && !self.model.jobs[&job.id].run_on_parent_failure;
            self.model.job(job.id).parents = open.clone();
            if is_cancelled {
                self.model.finish(job.id, JobState::Cancelled, now);
            } else if open.is_empty() {
                self.model.delay_or_make_ready(job.id, now);
            } else {
                self.model.job(job.id).state = JobState::Pending;
            }
        }
    }

    async fn claim(&mut self) {
        let limit = 1 + self.random.below(4);
        let model_owner =
            [ClaimOwner::Node, ClaimOwner::Node, ClaimOwner::DeadNode, ClaimOwner::Worker][self.random.below(4)];
        let owner = match model_owner {
            ClaimOwner::Node => Owner::Node(self.fixture.node),
            ClaimOwner::DeadNode => Owner::Node(self.dead),
            ClaimOwner::Worker => Owner::Worker { id: self.worker.id, session: self.worker.session },
        };
        let wanted = self.model.first(limit, self.fixture.start.as_ms());
        let jobs = self.fixture.claim_for(owner, self.fixture.lanes().await, limit, self.now).await;
        self.action = format!("claim of {limit} at {}", self.now);
        assert_eq!(jobs.iter().map(|job| job.id).collect::<Vec<_>>(), wanted, "{}", self.action);
        for claimed in jobs {
            assert!(
                self.model.ended_claims.iter().all(|ended| ended.id != claimed.id || ended.run < claimed.run),
                "run numbers only grow"
            );
            let job = self.model.job(claimed.id);
            assert_eq!(claimed.retry_count, job.retries);
            job.state = JobState::Assigned;
            job.claim = Some(ModelClaim { claimed, owner: model_owner, cancel_requested: false });
        }
    }

    async fn set_limit(&mut self) {
        let index = self.random.below(3);
        let limit = self.random.chance(80).then(|| 1 + self.random.below([8, 4, 2][index]));
        self.action = format!("limit {index} becomes {limit:?}");
        let scope = [Scope::System, Scope::Type("b".into()), Scope::Key("tenant-*".into())][index].clone();
        self.fixture.limit(scope, limit.map(|limit| u32::try_from(limit).unwrap()), self.now).await;
        self.model.limits[index] = limit;
    }

    async fn start(&mut self) {
        let Some((id, claimed)) = self.pick_in_flight() else { return };
        self.action = format!("start of {id}");
        let kind = if self.random.chance(50) { RunUpdateKind::Started } else { percent(1.0, "on") };
        assert!(self.fixture.report_update(&claimed, kind, self.now).await, "{}", self.action);
        self.model.job(id).state = JobState::Processing;
    }

    fn outcome(&mut self) -> (RunOutcome, i64) {
        let due = self.now + i64::try_from(self.random.below(800)).unwrap();
        let outcome = match self.random.below(10) {
            0..4 => completed(),
            4..6 => failed("no"),
            6..8 => self.fixture.retry(due),
            8 => RunOutcome::Released,
            _ => cancelled(),
        };
        (outcome, due)
    }

    async fn end(&mut self) {
        let Some((id, claimed)) = self.pick_in_flight() else { return };
        let (outcome, due) = self.outcome();
        self.action = format!("end of {id} by {outcome:?}");
        let job = &self.model.jobs[&id];
        let plain = job.state == JobState::Assigned
            && job.unique.is_none()
            && job.expires_at.is_none()
            && job.claim.as_ref().is_some_and(|claim| !claim.cancel_requested);
        let others_of_its_claim = self.model.ids_where(|job| {
            job.claim.as_ref().is_some_and(|claim| claim.claimed.run == claimed.run && claim.claimed.id != id)
        });
        let end = RunEnd {
            may_have_other_rows: !plain,
            closes_claim: others_of_its_claim.is_empty(),
            ..self.fixture.run_end(&claimed, outcome.clone(), self.now)
        };
        let repeats = 1 + self.random.below(2);
        for _ in 0..repeats {
            assert!(self.fixture.report_end(end.clone()).await, "{}", self.action);
        }
        if outcome.state().is_terminal() {
            self.model.finish(id, outcome.state(), self.now);
        } else {
            self.model.requeue(id, &outcome, self.now, due);
        }
    }

    async fn late_report(&mut self) {
        let Some(claimed) = self.random.pick(&self.model.ended_claims).cloned() else { return };
        let (outcome, _) = self.outcome();
        self.action = format!("late {outcome:?} of {} under {}", claimed.id, claimed.run);
        assert!(!self.fixture.end(&claimed, outcome, self.now).await, "{}", self.action);
        assert!(!self.fixture.report_update(&claimed, RunUpdateKind::Started, self.now).await, "{}", self.action);
    }

    async fn cancel(&mut self) {
        let Some(id) = self.pick_any() else { return };
        self.action = format!("cancel of {id}");
        let answer = self.fixture.store.job_cancel(id, "no", None, self.fixture.at(self.now)).await;
        let job = self.model.job(id);
        if job.state.is_terminal() {
            assert!(matches!(answer, Err(StoreError::InvalidTransition { .. })));
        } else if let Some(claim) = &mut job.claim {
            claim.cancel_requested = true;
            assert_eq!(answer.unwrap(), CancelOutcome::Requested { state: job.state });
        } else {
            assert_eq!(answer.unwrap(), CancelOutcome::Cancelled);
            self.model.finish(id, JobState::Cancelled, self.now);
        }
    }

    async fn retry(&mut self) {
        let Some(id) = self.pick_any() else { return };
        self.action = format!("retry of {id}");
        let answer = self.fixture.store.job_retry(id, None, self.fixture.at(self.now)).await;
        let job = &self.model.jobs[&id];
        if job.state == JobState::Retrying {
            assert_eq!(answer.unwrap(), Retried { state: JobState::Retrying, retry_count: job.retries });
            let now = self.now;
            let job = self.model.job(id);
            job.due_at = job.due_at.min(now);
            return;
        }
        if !matches!(job.state, JobState::Failed | JobState::Cancelled) {
            assert!(matches!(answer, Err(StoreError::InvalidTransition { .. })), "{answer:?}");
            return;
        }
        let other = |other: &Job| !other.state.is_terminal() && other.unique == job.unique;
        if job.unique.is_some() && self.model.jobs.values().any(other) {
            assert!(matches!(answer, Err(StoreError::Conflict { .. })), "{answer:?}");
            return;
        }
        answer.unwrap();
        let now = self.now;
        let is_open = |id: &JobId| self.model.jobs.get(id).is_some_and(|parent| !parent.state.is_terminal());
        let open = job.depends_on.iter().copied().filter(is_open).collect();
        let job = self.model.job(id);
        (job.state, job.retries, job.due_at, job.parents) = (JobState::Pending, 0, now, open);
        job.expires_at = job.expires_at.filter(|at| *at > now);
    }

    async fn patch(&mut self) {
        let Some(id) = self.pick_any() else { return };
        let priority = Priority::ALL[self.random.below(4)];
        let time = self.random.chance(40).then(|| self.random.chance(50).then_some(self.now + 700));
        self.action = format!("patch of {id} to {priority}, {time:?}");
        let scheduled_at = time.map(|time| time.map(|ms| self.fixture.at(ms)));
        let patch = JobPatch { priority: Some(priority), scheduled_at, ..JobPatch::default() };
        let answer = self.fixture.store.job_patch(id, patch, None, self.fixture.at(self.now)).await;
        let now = self.now;
        let job = self.model.job(id);
        if job.state.is_terminal() || job.claim.is_some() {
            assert!(matches!(answer, Err(StoreError::InvalidTransition { .. })), "{answer:?}");
            return;
        }
        answer.unwrap();
        job.priority = priority;
        if let Some(time) = time {
            job.scheduled_at = time;
            if job.state == JobState::Retrying {
                job.due_at = time.unwrap_or(now);
            } else if job.parents.is_empty() {
                self.model.delay_or_make_ready(id, now);
            }
        }
    }

    async fn delete(&mut self) {
        let Some(id) = self.pick_any() else { return };
        self.action = format!("delete of {id}");
        let answer = self.fixture.store.job_delete(id, None, self.fixture.at(self.now)).await;
        if self.model.jobs[&id].claim.is_some() {
            assert!(matches!(answer, Err(StoreError::InvalidTransition { .. })));
            return;
        }
        answer.unwrap();
        self.model.jobs.remove(&id);
        let dependents = self.model.ids_where(|job| !job.parents.is_empty());
        self.model.release_dependents(id, None, self.now);
        self.learn_times(&dependents).await;
    }

    /// Copies the times that the model does not compute from the store.
    async fn learn_times(&mut self, ids: &[JobId]) {
        for id in ids {
            let seen = self.fixture.get(*id).await;
            let ms = |at: Option<faena_domain::Timestamp>| at.unwrap().ms_since(self.fixture.start);
            let job = self.model.job(*id);
            match job.state {
                JobState::Queued => job.ready_at = ms(seen.queued_at),
                state if state.is_terminal() => job.finished_at = ms(seen.completed_at),
                _ => {}
            }
        }
    }

    async fn promote(&mut self) {
        self.action = format!("promotion at {}", self.now);
        self.fixture.promote(self.now).await;
        let now = self.now;
        let waits = |job: &Job| !job.state.is_terminal() && job.claim.is_none();
        loop {
            let expired = self.model.ids_where(|job| waits(job) && job.expires_at.is_some_and(|at| at <= now));
            let Some(id) = expired.first() else { break };
            self.model.finish(*id, JobState::Failed, now);
        }
        for (_, job) in self.model.jobs.iter_mut() {
            let waiting = matches!(job.state, JobState::Pending | JobState::Retrying) && job.parents.is_empty();
            if waiting && job.due_at <= now {
                (job.state, job.ready_at) = (JobState::Queued, job.due_at);
            }
        }
    }

    async fn recover(&mut self) {
        let (now, delay) = (self.now, 200);
        self.action = format!("recovery at {now}");
        loop {
            let released = self.fixture.recover(delay, now).await;
            if released.orphaned + released.returned == 0 {
                break;
            }
        }
        let lost = self.model.in_flight(ClaimOwner::DeadNode);
        for id in &lost {
            let uses_attempt = self.model.jobs[id].state == JobState::Processing;
            self.release(*id, uses_attempt, delay);
        }
        self.learn_times(&lost).await;
    }

    fn release(&mut self, id: JobId, uses_attempt: bool, delay: i64) {
        let now = self.now;
        let job = &self.model.jobs[&id];
        if job.claim.as_ref().is_some_and(|claim| claim.cancel_requested) {
            self.model.finish(id, JobState::Cancelled, now);
        } else if !uses_attempt {
            self.model.requeue(id, &RunOutcome::Released, now, 0);
        } else if job.retries < job.max_retries {
            self.model.requeue(id, &self.fixture.retry(0), now, now + delay);
        } else {
            self.model.finish(id, JobState::Failed, now);
        }
    }

    /// Reconnects the worker, to a live node or to a dead one. It keeps its jobs.
    async fn reconnect(&mut self) {
        self.action = format!("reconnection at {}", self.now);
        let node = if self.random.chance(50) { self.fixture.node } else { self.dead };
        let entry = WorkerEntry { node, ..self.fixture.worker("w") };
        let reconnected = self.fixture.admit(entry, self.now).await;
        assert_eq!((reconnected.id, reconnected.session), (self.worker.id, self.worker.session + 1), "{}", self.action);
        self.worker = reconnected;
        self.compare_in_flight();
    }

    fn compare_in_flight(&self) {
        let reported: BTreeMap<JobId, i64> =
            self.worker.jobs.iter().map(|resumed| (resumed.job.id, resumed.job.run)).collect();
        let in_flight = self.model.in_flight(ClaimOwner::Worker);
        let run_of = |id: &JobId| self.model.jobs[id].claim.as_ref().map(|claim| (*id, claim.claimed.run));
        assert_eq!(reported, in_flight.iter().filter_map(run_of).collect(), "{}", self.action);
    }

    async fn end_worker(&mut self) {
        let (now, delay_ms, lost) = (self.now, 200, self.random.chance(70));
        self.action = format!("end of the worker at {now}, lost: {lost}");
        let reason = "test".to_owned();
        let end = if lost { WorkerEnd::Lost { reason, delay_ms } } else { WorkerEnd::Left { reason } };
        let released =
            self.fixture.store.worker_end(self.worker.id, self.worker.session, end, self.fixture.at(now)).await;
        released.unwrap().expect("the worker is registered");
        let in_flight = self.model.in_flight(ClaimOwner::Worker);
        for id in &in_flight {
            self.release(*id, lost, delay_ms);
        }
        self.learn_times(&in_flight).await;
        self.worker = self.fixture.admit(self.fixture.worker("w"), now).await;
        assert_eq!(self.worker.session, 1, "a new registration");
    }

    async fn prune(&mut self) {
        self.action = format!("pruning at {}", self.now);
        let keep_ms = 5_000;
        let retention =
            Retention { completed_ms: keep_ms, failed_ms: keep_ms, cancelled_ms: keep_ms, ..Retention::default() };
        self.fixture.store.job_prune(&retention, 1_000, self.fixture.at(self.now)).await.unwrap();
        let cutoff = self.now - keep_ms;
        self.model.jobs.retain(|_, job| !(job.state.is_terminal() && job.finished_at < cutoff));
    }
}
