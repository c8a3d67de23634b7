//! Budgets of tokens.

use std::sync::Arc;

use faena_domain::{JobId, TaskId};
use faena_machine::Definition;
use faena_store::{Filter, Page, TaskTokens};
use serde_json::json;

use crate::{
    support::Fixture,
    tasks::{new_task, register},
};

const DAY_MS: i64 = 86_400_000;

pub async fn reservations_never_exceed_the_budget_of_a_day(fixture: &Fixture) {
    let store = &fixture.store;
    let calls = (0..20).map(|_| store.tokens_reserve(30, 100, fixture.at(0)));
    let reserved = futures_util::future::join_all(calls).await;
    assert_eq!(reserved.into_iter().filter(|reserved| *reserved.as_ref().unwrap()).count(), 3);
    assert_eq!(store.tokens_used(fixture.at(0)).await.unwrap(), 90);
    assert!(!store.tokens_reserve(11, 100, fixture.at(0)).await.unwrap());
    assert!(store.tokens_reserve(10, 100, fixture.at(0)).await.unwrap(), "up to the limit");
    assert!(!store.tokens_reserve(101, 100, fixture.at(DAY_MS)).await.unwrap(), "more than a whole day has");
    assert!(store.tokens_reserve(100, 100, fixture.at(DAY_MS)).await.unwrap(), "the next day has its own budget");
}

pub async fn a_settled_reservation_counts_what_was_used(fixture: &Fixture) {
    let store = &fixture.store;
    assert!(store.tokens_reserve(100, 100, fixture.at(0)).await.unwrap());
    store.tokens_settle(100, 40, fixture.at(0)).await.unwrap();
    assert_eq!(store.tokens_used(fixture.at(0)).await.unwrap(), 40);
    assert!(store.tokens_reserve(60, 100, fixture.at(1)).await.unwrap());
    store.tokens_settle(60, 90, fixture.at(1)).await.unwrap();
    assert_eq!(store.tokens_used(fixture.at(2)).await.unwrap(), 130, "a call may use more than was reserved");
    assert!(!store.tokens_reserve(1, 100, fixture.at(3)).await.unwrap());
    store.tokens_settle(500, 0, fixture.at(4)).await.unwrap();
    assert_eq!(store.tokens_used(fixture.at(4)).await.unwrap(), 0, "never below zero");
    assert!(store.tokens_reserve(u64::MAX, u64::MAX, fixture.at(40 * DAY_MS)).await.unwrap());
    assert_eq!(store.tokens_used(fixture.at(0)).await.unwrap(), 0, "old days are deleted");
}

const ASKING: &str = "
machine: asking
version: 1
limits: {llm_tokens: 100}
events: {again: {}}
initial: ASKING
states:
  ASKING: {deadline: {total: 1h, to: DONE}, entry: [{llm: answer, data: {prompt: \"'hello'\"}}], on: {job.answer.completed: DONE, job.answer.failed: DONE}}
  DONE: {final: true}
";

/// Creates a task, and returns it with the job that it waits for.
async fn asking_task(fixture: &Fixture, definition: &Arc<Definition>) -> (TaskId, JobId) {
    let task = new_task(fixture, definition, json!({}), 0).await;
    let filter = Filter { correlation_id: Some(format!("c-{task}")), ..Filter::default() };
    let page = fixture.store.job_list(&filter, Page::after(None, 10)).await.unwrap();
    (task, page.jobs[0].id)
}

pub async fn reservations_never_exceed_the_budget_of_a_task(fixture: &Fixture) {
    let definition = Arc::new(Definition::parse(ASKING).unwrap());
    register(fixture, &definition).await;
    let (task, job) = asking_task(fixture, &definition).await;
    let (other, other_job) = asking_task(fixture, &definition).await;
    let store = &fixture.store;
    let calls = futures_util::future::join_all((0..8).map(|_| store.task_tokens_reserve(job, 30))).await;
    let reserved = calls.iter().filter(|call| *call.as_ref().unwrap() == TaskTokens::Reserved(task)).count();
    assert_eq!(reserved, 3);
    let refused = store.task_tokens_reserve(job, 11).await.unwrap();
    assert_eq!(refused, TaskTokens::Exceeded { task, limit: 100, used: 90 });
    store.task_tokens_settle(task, 30, 7).await.unwrap();
    assert_eq!(
        store.task_tokens_reserve(job, 33).await.unwrap(),
        TaskTokens::Reserved(task),
        "what was not used is free"
    );
    assert_eq!(
        store.task_tokens_reserve(other_job, 100).await.unwrap(),
        TaskTokens::Reserved(other),
        "each task has its own budget"
    );
    assert_eq!(
        store.task_tokens_reserve(other_job, u64::MAX).await.unwrap(),
        TaskTokens::Exceeded { task: other, limit: 100, used: 100 }
    );
    assert_eq!(
        store.task_tokens_reserve(JobId::new(), 1_000).await.unwrap(),
        TaskTokens::Unlimited,
        "a job without a task"
    );
}
