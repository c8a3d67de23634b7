//! Tests of handlers without a server.

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
async fn steps_are_recorded_and_completed_ones_do_not_run_again() {
    let run = testing::run(&pipeline(), "pipeline", &json!({})).await;
    assert_eq!((run.result::<u32>(), run.step_names()), (6, vec!["E1", "E2", "E3"]));
    let run = TestJob::new("pipeline", &json!({})).completed_step("E1", &100).run(&pipeline()).await;
    assert_eq!((run.result::<u32>(), run.step_names()), (105, vec!["E2", "E3"]));
}

#[tokio::test]
async fn a_rejected_step_ends_the_handler() {
    let run = TestJob::new("pipeline", &json!({})).rejected_step("E2").run(&pipeline()).await;
    assert_eq!(
        run.error().message(),
        "step \"E2\": rejected by the server: the job was assigned to another worker (STALE_RUN)"
    );
    assert_eq!(run.step_names(), ["E1"]);
}

#[tokio::test]
async fn no_step_starts_after_a_cancellation() {
    let job = TestJob::new("pipeline", &json!({}));
    job.token().cancel();
    let run = job.run(&pipeline()).await;
    assert_eq!(run.error().message(), JobError::cancelled().message());
    assert!(run.steps.is_empty());
}

#[tokio::test]
async fn a_stored_result_that_does_not_match_the_handler_is_not_retried() {
    let run = TestJob::new("pipeline", &json!({})).completed_step("E1", &"text").run(&pipeline()).await;
    assert!(!run.error().is_retryable(), "{:?}", run.error());
}

#[tokio::test]
async fn a_step_of_the_same_name_runs_once() {
    let worker = Worker::new().handle("twice", |job: Context, _: Value| async move {
        let first = job.step("E1", || async { Ok(1) }).await?;
        let second = job.step("E1", || async { Ok(2) }).await?;
        Ok((first, second))
    });
    let run = testing::run(&worker, "twice", &json!({})).await;
    assert_eq!((run.result::<(u32, u32)>(), run.steps.len()), ((1, 1), 1));
}

#[tokio::test]
async fn a_handler_sees_its_attempt_and_names_events() {
    let worker = Worker::new().handle("train", |job: Context, _: Value| async move {
        job.log("loading");
        job.log_event("training_started", "10 epochs");
        Ok(job.attempt())
    });
    let run = TestJob::new("train", &json!({})).retry_count(2).run(&worker).await;
    assert_eq!(run.result::<u32>(), 3);
    assert_eq!(run.logs, ["loading"]);
    assert_eq!(run.events, [("training_started".to_owned(), "10 epochs".to_owned())]);
}

#[tokio::test]
async fn middleware_sees_the_job_and_may_change_its_outcome() {
    let worker = Worker::new()
        .middleware(|job, next| async move {
            job.log(format!("outer before {}", job.kind()));
            let outcome = next.run(job.clone()).await;
            job.log("outer after");
            outcome.map_err(|error| error.context("outer"))
        })
        .middleware(|job, next| async move {
            job.log("inner before");
            next.run(job).await.map_err(|_| JobError::fail("changed"))
        })
        .handle("bad", |_, _: Value| async { Err::<(), _>(JobError::retry("original")) });
    let run = testing::run(&worker, "bad", &json!({})).await;
    assert_eq!(run.logs, ["outer before bad", "inner before", "outer after"]);
    assert_eq!(format!("{:?}", run.error()), r#"fail("outer: changed")"#);
}

#[tokio::test]
async fn a_panic_and_a_type_without_a_handler_are_retryable_errors() {
    let worker = Worker::new().handle("boom", |_, number: u32| async move { Ok(10 / (number - 1)) });
    let run = testing::run(&worker, "boom", &1).await;
    assert!(run.error().is_retryable() && run.error().message().starts_with("the handler panicked: "));
    assert!(testing::run(&worker, "other", &1).await.error().message().contains("no handler"));
    let run = testing::run(&worker, "boom", &"text").await;
    assert!(!run.error().is_retryable(), "a payload that does not match");
}
