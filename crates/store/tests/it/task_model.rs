//! Sends random events, repeated and out of order, with crashes, restarts and a clock that jumps, and compares the
//! tasks with a model written by hand.

#[path = "../../../machine/tests/it/reference.rs"]
mod reference;

use std::{collections::BTreeMap, future::poll_fn, task::Poll};

use faena_domain::TaskId;
use faena_machine::{Definition, Input, Outcome};
use faena_store::{ClaimedJob, StoreOptions, TaskAnswer, TaskInput};
use serde_json::json;

use crate::{
    support::{Fixture, SeededRandom},
    tasks::{apply, coding_task, event, fire, history, new_task, register},
};
use reference::{Answer, Message, Model};

const TASKS: usize = 6;
const ROUNDS: usize = 250;
const SEED: u64 = 20_261_117;

/// A store that restarts now and then, and a model of each task in it.
struct World<'a> {
    first: &'a Fixture,
    restarted: Option<Fixture>,
    definition: std::sync::Arc<Definition>,
    random: SeededRandom,
    models: Vec<(TaskId, Model)>,
    /// Jobs in flight with the number of their task.
    jobs: Vec<(ClaimedJob, usize)>,
    ms: i64,
}

pub async fn random_events_crashes_and_clock_jumps_agree_with_a_model(fixture: &Fixture) {
    let definition = coding_task();
    register(fixture, &definition).await;
    let mut world = World {
        first: fixture,
        restarted: None,
        definition,
        random: SeededRandom(SEED),
        models: Vec::new(),
        jobs: Vec::new(),
        ms: 0,
    };
    world.run().await;
    if let Some(restarted) = world.restarted {
        restarted.store.close().await;
    }
}

impl World<'_> {
    fn fixture(&self) -> &Fixture {
        self.restarted.as_ref().unwrap_or(self.first)
    }

    async fn run(&mut self) {
        for _ in 0..TASKS {
            let data = json!({"prompt": "p", "repositorioOrigen": "r"});
            let id = new_task(self.fixture(), &self.definition, data, 0).await;
            self.models.push((id, Model::new(self.fixture().at(0).as_ms())));
        }
        for round in 0..ROUNDS {
            self.move_the_clock();
            match self.random.below(20) {
                0 => self.restart().await,
                1 | 2 => self.apply_deadlines().await,
                3 | 4 => self.decide().await,
                5 | 6 => self.end_a_job().await,
                7 if self.random.chance(10) => self.cancel().await,
                8 | 9 => self.crash_while_sending(round).await,
                _ => self.send_several(round).await,
            }
            self.claim_jobs().await;
            self.compare().await;
        }
        self.check_histories().await;
    }

    fn move_the_clock(&mut self) {
        let (forward, back) = (self.random.below(90_000) as i64, self.random.below(600_000) as i64);
        match self.random.below(12) {
            0 => self.ms = (self.ms - back).max(0),
            1 => self.ms += 10 * forward,
            _ => self.ms += forward / 2,
        }
    }

    fn now_ms(&self) -> i64 {
        self.fixture().at(self.ms).as_ms()
    }

    async fn restart(&mut self) {
        self.restarted = Some(self.fixture().reopen(StoreOptions::default()).await);
    }

    async fn apply_deadlines(&mut self) {
        fire(self.fixture(), self.ms).await;
        let now_ms = self.now_ms();
        self.models.iter_mut().for_each(|(_, model)| model.apply_deadlines(now_ms));
    }

    async fn decide(&mut self) {
        let (task, approve) = (self.random.below(TASKS), self.random.chance(60));
        let caller = format!("person {}", self.random.below(3)).as_str().into();
        let input = Input::Decision { caller, approve, hash: None, comment: None };
        let answer = apply(self.fixture(), self.models[task].0, input, self.ms).await;
        let now_ms = self.now_ms();
        assert_answer(&answer, self.models[task].1.decide(approve, now_ms));
    }

    async fn cancel(&mut self) {
        let task = self.random.below(TASKS);
        let input = Input::Cancel { actor: "ana".into(), reason: None };
        let answer = apply(self.fixture(), self.models[task].0, input, self.ms).await;
        let now_ms = self.now_ms();
        assert_answer(&answer, self.models[task].1.cancel(now_ms));
    }

    async fn claim_jobs(&mut self) {
        for job in self.fixture().claim(10, self.ms).await {
            let correlation = self.fixture().get(job.id).await.correlation_id;
            let task = self.models.iter().position(|(id, _)| format!("c-{id}") == correlation).expect("a task");
            self.jobs.push((job, task));
        }
    }

    /// Ends a job. Its end is applied after the timers of the same moment.
    async fn end_a_job(&mut self) {
        self.apply_deadlines().await;
        if self.jobs.is_empty() {
            return;
        }
        let (job, task) = self.jobs.swap_remove(self.random.below(self.jobs.len()));
        self.fixture().fail(&job, self.ms).await;
        fire(self.fixture(), self.ms).await;
        let now_ms = self.now_ms();
        self.models[task].1.review(now_ms);
    }

    /// Returns a message: a new one, or one of the last rounds again.
    fn message(&mut self, round: usize) -> (usize, Message) {
        let of_round = round.saturating_sub(self.random.below(4));
        let mut random = SeededRandom(of_round as u64 * 7_919);
        let kinds: Vec<&String> = self.definition.events.keys().collect();
        let likely = ["resultado.plan_generado", "resultado.pr_generada", "resultado.integracion_finalizada"];
        let kind = match random.chance(60) {
            true => likely[random.below(3)].to_owned(),
            false => kinds[random.below(kinds.len())].clone(),
        };
        let message = Message {
            id: format!("e{of_round}"),
            kind,
            plan: ["p1", "p1", "p2"][random.below(3)],
            passed: random.chance(30),
            log: ["failure a", "failure b", "failure c"][random.below(3)],
            progress: random.below(3),
        };
        (self.random.below(TASKS), message)
    }

    async fn send_several(&mut self, round: usize) {
        let now = self.fixture().at(self.ms);
        let (mut inputs, mut expected) = (Vec::new(), Vec::new());
        for _ in 0..=self.random.below(5) {
            let (task, message) = self.message(round);
            let input = event(&message.id, &message.kind, message.payload(), now);
            inputs.push(TaskInput { task: self.models[task].0, input });
            expected.push(self.models[task].1.receive(&message, now.as_ms()));
        }
        let answers = self.fixture().store.task_apply(inputs, now).await.unwrap();
        for (answer, expected) in answers.iter().zip(expected) {
            assert_answer(answer.as_ref().unwrap(), expected);
        }
    }

    /// Sends an event whose sender dies before it has the answer, and sends the event again until there is an answer.
    async fn crash_while_sending(&mut self, round: usize) {
        let (task, message) = self.message(round);
        let now = self.fixture().at(self.ms);
        let expected = self.models[task].1.receive(&message, now.as_ms());
        let input = event(&message.id, &message.kind, message.payload(), now);
        let id = self.models[task].0;
        for polls in [self.random.below(3), self.random.below(40)] {
            let lost = self.fixture().store.task_apply(vec![TaskInput { task: id, input: input.clone() }], now);
            tokio::select! {
                biased;
                () = pending_for(polls) => {}
                _ = lost => {}
            }
        }
        if self.random.chance(50) {
            self.restart().await;
        }
        assert_answer(&apply(self.fixture(), id, input, self.ms).await, expected);
    }

    async fn compare(&self) {
        for (id, model) in &self.models {
            let task = self.fixture().store.task_get(*id).await.unwrap().unwrap().task;
            assert_eq!((task.state().as_str(), task.status.has_ended()), (model.state, model.has_ended()), "{id}");
            let waiting: Vec<&str> = model.waiting.iter().map(|message| message.id.as_str()).collect();
            assert_eq!(task.deferred.iter().map(|event| event.id.as_str()).collect::<Vec<_>>(), waiting, "{id}");
            let count = |name: &str| task.counters.get(name).copied().unwrap_or(0);
            assert_eq!((count("correcciones"), count("replanes")), (model.corrections, model.plans_again), "{id}");
            assert!(model.has_ended() || task.due().is_some(), "an open task has a deadline: {id}");
        }
    }

    async fn check_histories(&self) {
        for (id, model) in &self.models {
            let records = history(self.fixture(), *id).await;
            let sequence: Vec<u64> = records.iter().map(|record| record.sequence).collect();
            assert_eq!(sequence, (1..=records.len() as u64).collect::<Vec<_>>(), "a history has no gap");
            let mut state = String::new();
            let mut applied: BTreeMap<&str, usize> = BTreeMap::new();
            for record in &records {
                assert_eq!(record.from, state, "each record starts where the one before ended");
                state = record.to.clone().unwrap_or(state);
                if record.outcome == Outcome::Applied && !record.event_id.is_empty() {
                    *applied.entry(&record.event_id).or_default() += 1;
                }
            }
            assert_eq!(state, model.state);
            // The approval of a plan is recorded with the event that decides.
            assert!(applied.values().all(|times| *times == 1), "an event is applied once: {applied:?}");
        }
    }
}

fn assert_answer(answer: &TaskAnswer, expected: Answer) {
    assert_eq!(format!("{:?}", answer.outcome), format!("{expected:?}"), "{answer:?}");
}

/// Completes after it was polled `polls` times.
async fn pending_for(mut polls: usize) {
    poll_fn(|context| {
        if polls == 0 {
            return Poll::Ready(());
        }
        polls -= 1;
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
