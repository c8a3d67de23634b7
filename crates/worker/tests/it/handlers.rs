//! Handlers without a server.

use faena::{
    Context, JobError, Worker,
    testing::{self, TestJob},
};
use serde_json::{Value, json};

fn pipeline() -> Worker {
    Worker::new().handle("pipeline", |job: Context, _: Value| async move {
        let mut sum = 0;
        for number in 1..=3_u32 {
            sum += job.step(&format!("E{number}"), || async { Ok(number) }).await?;
        }
        Ok(sum)
    })
}

#[tokio::test]
async fn steps_are_recorded_and_finished_ones_do_not_run_again() {
    let ran = testing::run(&pipeline(), "pipeline", &json!({})).await;
    assert_eq!((ran.result::<u32>(), ran.step_names()), (6, vec!["E1", "E2", "E3"]));
    let ran = TestJob::new("pipeline", &json!({})).finished_step("E1", &100).run(&pipeline()).await;
    assert_eq!((ran.result::<u32>(), ran.step_names()), (105, vec!["E2", "E3"]));
}

#[tokio::test]
async fn a_step_that_is_refused_ends_the_handler() {
    let ran = TestJob::new("pipeline", &json!({})).refused_step("E2").run(&pipeline()).await;
    assert_eq!(ran.error().message(), "step E2 was refused: another worker has it (STALE_RUN)");
    assert_eq!(ran.step_names(), ["E1"]);
}

#[tokio::test]
async fn no_step_begins_when_the_run_is_to_stop() {
    let job = TestJob::new("pipeline", &json!({}));
    job.token().cancel();
    let ran = job.run(&pipeline()).await;
    assert_eq!(ran.error().message(), JobError::cancelled().message());
    assert!(ran.steps.is_empty());
}

#[tokio::test]
async fn a_stored_result_that_does_not_fit_any_more_is_not_tried_again() {
    let ran = TestJob::new("pipeline", &json!({})).finished_step("E1", &"text").run(&pipeline()).await;
    assert!(!ran.error().is_retryable(), "{:?}", ran.error());
}

#[tokio::test]
async fn a_step_of_the_same_name_runs_once() {
    let worker = Worker::new().handle("twice", |job: Context, _: Value| async move {
        let first = job.step("E1", || async { Ok(1) }).await?;
        let second = job.step("E1", || async { Ok(2) }).await?;
        Ok((first, second))
    });
    let ran = testing::run(&worker, "twice", &json!({})).await;
    assert_eq!((ran.result::<(u32, u32)>(), ran.steps.len()), ((1, 1), 1));
}

#[tokio::test]
async fn what_stands_around_sees_the_job_and_may_change_its_outcome() {
    let worker = Worker::new()
        .around(|job, next| async move {
            job.log(format!("outer before {}", job.kind()));
            let outcome = next.run(job.clone()).await;
            job.log("outer after");
            outcome.map_err(|error| error.context("outer"))
        })
        .around(|job, next| async move {
            job.log("inner before");
            next.run(job).await.map_err(|_| JobError::fail("changed"))
        })
        .handle("bad", |_, _: Value| async { Err::<(), _>(JobError::retry("original")) });
    let ran = testing::run(&worker, "bad", &json!({})).await;
    assert_eq!(ran.logs, ["outer before bad", "inner before", "outer after"]);
    assert_eq!(format!("{:?}", ran.error()), r#"fail("outer: changed")"#);
}

#[tokio::test]
async fn a_panic_and_a_type_without_handler_are_failures_that_are_tried_again() {
    let worker = Worker::new().handle("boom", |_, number: u32| async move { Ok(10 / (number - 1)) });
    let ran = testing::run(&worker, "boom", &1).await;
    assert!(ran.error().is_retryable() && ran.error().message().starts_with("the handler panicked: "));
    assert!(testing::run(&worker, "other", &1).await.error().message().contains("no handler"));
    let ran = testing::run(&worker, "boom", &"text").await;
    assert!(!ran.error().is_retryable(), "a payload that does not fit");
}
