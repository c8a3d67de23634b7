//! Jobs of connected workers, at simulated times.

use std::sync::Arc;

use faena_domain::{ErrorCode, ErrorReason, Failure, JobId, JobState, JobView, NewJob, Timestamp, WorkerState};
use faena_engine::{
    CancelResult, EngineConfig, EngineError, PoolConfig,
    breaker::BreakerState,
    workers::{ConnectedWorker, Delivery, Registration, Report, ReportKind, Transport, WorkerCommand},
};

use crate::world::{World, eventually};

const KIND: &str = "elsewhere";

fn registration(key: &str) -> Registration {
    Registration {
        worker_id: Some(key.into()),
        capabilities: vec![KIND.into()],
        concurrency: Some(2),
        ..Registration::default()
    }
}

async fn connect(world: &World, registration: Registration) -> Arc<ConnectedWorker> {
    world.engine.register_worker(registration, Transport::WebSocket, Timestamp::now()).await.unwrap().worker
}

/// Submits a job and waits until it is delivered.
async fn delivered(world: &World, worker: &ConnectedWorker, job: NewJob) -> Delivery {
    world.submit(job).await;
    next_delivery(worker).await
}

async fn next_delivery(worker: &ConnectedWorker) -> Delivery {
    loop {
        for order in worker.next_commands().await {
            if let WorkerCommand::Job(delivery) = order {
                return delivery;
            }
        }
    }
}

fn cancels(worker: &ConnectedWorker) -> Vec<String> {
    let commands = worker.drain_commands().into_iter();
    commands
        .filter_map(|command| if let WorkerCommand::Cancel { reason, .. } = command { Some(reason) } else { None })
        .collect()
}

async fn report(world: &World, worker: &Arc<ConnectedWorker>, id: JobId, kind: ReportKind) -> Result<(), ErrorCode> {
    let report = Report { job_id: id, run: None, kind };
    world
        .engine
        .reports
        .handler
        .handle_one(worker, report, Timestamp::now())
        .await
        .unwrap()
        .map_err(|refusal| refusal.code)
}

async fn watch(world: &World, now: Timestamp) -> usize {
    world.engine.watch_workers(now).await.unwrap().handled
}

fn details<'a>(job: &'a JobView, event: &str) -> Vec<&'a str> {
    let lines = job.execution_log.iter().filter(|line| line.event.as_str() == event);
    lines.map(|line| line.details.as_str()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_worker_is_lost_at_its_deadline_and_not_before() {
    let world = World::new().await;
    let worker = connect(&world, registration("quiet")).await;
    let id = delivered(&world, &worker, NewJob::new(KIND)).await.job.id();
    let heard_at = worker.seen_at();
    assert_eq!(watch(&world, heard_at.plus_ms(89_999)).await, 0);
    assert_eq!(world.job(id).await.worker_id.as_deref(), Some("quiet"));
    let late = heard_at.plus_ms(90_000);
    assert_eq!(watch(&world, late).await, 1);
    let job = world.job(id).await;
    assert_eq!((job.status, job.retry_count, job.error_reason), (JobState::Retrying, 1, Some(ErrorReason::Orphaned)));
    assert_eq!(job.next_retry_at, Some(late.plus_ms(5_000)));
    let record = world.store.worker_get("quiet").await.unwrap().unwrap();
    assert_eq!((record.state, record.ended_at), (WorkerState::Terminated, Some(late)));
    assert!(record.reason.unwrap().contains("no heartbeat for"));
    assert_eq!(
        report(&world, &worker, id, ReportKind::Complete { result: None }).await,
        Err(ErrorCode::Conflict),
        "it has no run to name"
    );
    assert_eq!(watch(&world, late.plus_ms(1)).await, 0, "it was removed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disconnected_worker_has_the_grace_period() {
    let world = World::new().await;
    let worker = connect(&world, registration("cut")).await;
    let first = delivered(&world, &worker, NewJob::new(KIND)).await.job;
    let cut_at = Timestamp::now();
    world.engine.disconnect_worker(&worker, false, cut_at).await;
    assert_eq!(watch(&world, cut_at.plus_ms(9_999)).await, 0);
    let back = world.engine.register_worker(registration("cut"), Transport::WebSocket, Timestamp::now()).await.unwrap();
    assert!(back.resumed && back.worker.id == worker.id);
    assert_eq!(watch(&world, cut_at.plus_ms(10_000)).await, 0, "it has reconnected");
    assert_eq!(report(&world, &back.worker, first.id(), ReportKind::Complete { result: None }).await, Ok(()));
    let job = world.job_is(first.id(), JobState::Completed).await;
    assert_eq!(job.run, Some(first.run()), "the same run");

    let sent = delivered(&world, &back.worker, NewJob::new(KIND)).await.job;
    world.engine.disconnect_worker(&back.worker, false, cut_at).await;
    assert_eq!(watch(&world, cut_at.plus_ms(10_000)).await, 1, "it has not reconnected");
    let job = world.job(sent.id()).await;
    assert_eq!((job.status, job.retry_count), (JobState::Retrying, 1));
    assert!(details(&job, "orphaned")[0].contains("did not reconnect within 10s"), "{job:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_its_worker_does_not_have_is_released_without_using_an_attempt() {
    let world = World::new().await;
    let worker = connect(&world, registration("forgetful")).await;
    let id = delivered(&world, &worker, NewJob::new(KIND)).await.job.id();
    let without_jobs = Registration { in_flight: Some(Vec::new()), ..registration("forgetful") };
    let back = connect(&world, without_jobs).await;
    let again = next_delivery(&back).await.job;
    assert_eq!((again.id(), again.claimed.retry_count), (id, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_its_worker_does_not_start_in_time_is_retried() {
    let world = World::new().await;
    let worker = connect(&world, Registration { reports_starts: true, ..registration("slow") }).await;
    let sent = delivered(&world, &worker, NewJob::new(KIND)).await.job;
    worker.seen(Timestamp::now().plus_ms(600_000));
    assert_eq!(world.job(sent.id()).await.status, JobState::Assigned);
    assert_eq!(watch(&world, sent.claimed_at.plus_ms(299_999)).await, 0);
    assert_eq!(watch(&world, sent.claimed_at.plus_ms(300_000)).await, 1);
    let job = world.job_is(sent.id(), JobState::Retrying).await;
    assert_eq!((job.retry_count, job.error_reason), (1, Some(ErrorReason::Timeout)));
    assert!(job.error.unwrap().contains("did not start it within 300s"));
    assert_eq!(cancels(&worker).len(), 1, "it is asked to stop");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_started_in_time_may_run_until_its_timeout() {
    let world = World::new().await;
    let worker = connect(&world, Registration { reports_starts: true, ..registration("steady") }).await;
    let sent = delivered(&world, &worker, NewJob::new(KIND)).await.job;
    worker.seen(Timestamp::now().plus_ms(600_000));
    assert_eq!(report(&world, &worker, sent.id(), ReportKind::Started).await, Ok(()));
    assert_eq!(world.job(sent.id()).await.status, JobState::Processing);
    assert_eq!(watch(&world, sent.claimed_at.plus_ms(400_000)).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_timed_out_job_ends_immediately_and_frees_its_slot_when_the_handler_stops() {
    let world = World::new().await;
    let worker = connect(&world, registration("deaf")).await;
    let mut job = NewJob::new(KIND);
    job.options.timeout_ms = Some(1_000_000);
    let sent = delivered(&world, &worker, job).await.job;
    let started_at = sent.started_at().unwrap();
    worker.seen(Timestamp::now().plus_ms(2_000_000));
    assert_eq!(watch(&world, started_at.plus_ms(999_999)).await, 0);
    assert_eq!(watch(&world, started_at.plus_ms(1_000_000)).await, 1);
    let job = world.job_is(sent.id(), JobState::Retrying).await;
    assert_eq!((job.retry_count, job.error_reason), (1, Some(ErrorReason::Timeout)));
    assert_eq!(cancels(&worker), ["took longer than its limit of 1000000 ms"]);
    assert_eq!(worker.free(), 1, "its handler is still running");

    assert_eq!(watch(&world, started_at.plus_ms(1_009_999)).await, 0);
    assert!(details(&world.job(sent.id()).await, "stale_report").is_empty());
    for _ in 0..2 {
        watch(&world, started_at.plus_ms(1_010_000)).await;
    }
    let job = world.job(sent.id()).await;
    assert_eq!(
        details(&job, "stale_report"),
        ["worker deaf was asked to stop it and its handler is still running"],
        "logged once"
    );

    let run = Some(sent.run());
    let report = Report { job_id: sent.id(), run, kind: ReportKind::Complete { result: None } };
    let answer = world.engine.reports.handler.handle_one(&worker, report, Timestamp::now()).await.unwrap();
    assert_eq!(answer.unwrap_err().code, ErrorCode::StaleRun);
    assert_eq!(worker.free(), 2, "it has stopped");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_job_ends_when_its_worker_stops_or_after_ten_seconds() {
    let world = World::new().await;
    let worker = connect(&world, registration("polite")).await;
    let polite = delivered(&world, &worker, NewJob::new(KIND)).await.job;
    let cancel = world.engine.cancel(polite.id(), "cancelled by request", "test", Timestamp::now());
    let stop = async {
        eventually("it is asked to stop", async || (!cancels(&worker).is_empty()).then_some(())).await;
        report(&world, &worker, polite.id(), ReportKind::Fail(Failure::error("stopped"))).await.unwrap();
    };
    let (answer, ()) = tokio::join!(cancel, stop);
    assert_eq!(answer.unwrap(), CancelResult::Cancelled);
    let job = world.job(polite.id()).await;
    assert_eq!((job.status, job.error.as_deref()), (JobState::Cancelled, Some("cancelled by request")));

    let stubborn = delivered(&world, &worker, NewJob::new(KIND)).await.job;
    let answer = world.engine.cancel(stubborn.id(), "cancelled by request", "test", Timestamp::now()).await.unwrap();
    assert_eq!(answer, CancelResult::Asked { state: JobState::Processing });
    for _ in 0..2 {
        let to_stop: Vec<_> = worker.jobs_to_stop().into_iter().map(|(id, run, _)| (id, run)).collect();
        assert_eq!(to_stop, [(stubborn.id(), stubborn.run())], "a polling worker receives it with each call");
    }
    let asked_at = stubborn.stop_requested_at().unwrap();
    assert_eq!(watch(&world, asked_at.plus_ms(9_999)).await, 0);
    assert_eq!(watch(&world, asked_at.plus_ms(10_000)).await, 1);
    world.job_is(stubborn.id(), JobState::Cancelled).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_releases_every_job_opens_its_circuit() {
    let world = World::new().await;
    let worker = connect(&world, registration("unwilling")).await;
    let id = world.submit(NewJob::new(KIND)).await;
    for _ in 0..5 {
        assert_eq!(worker.breaker_state(Timestamp::now()), BreakerState::Closed);
        assert_eq!(next_delivery(&worker).await.job.id(), id);
        assert_eq!(report(&world, &worker, id, ReportKind::Release).await, Ok(()));
    }
    assert_eq!(worker.breaker_state(Timestamp::now()), BreakerState::Open);
    assert_eq!(worker.breaker_state(Timestamp::now().plus_ms(30_000)), BreakerState::HalfOpen);
    let willing = connect(&world, registration("willing")).await;
    let sent = next_delivery(&willing).await.job;
    assert_eq!((sent.id(), sent.claimed.retry_count), (id, 0), "another worker has it, and no attempt was used");
    assert_eq!(world.engine.workers.dispatch_failures.load(std::sync::atomic::Ordering::Relaxed), 5);
    eventually("its record contains it", async || {
        let record = world.store.worker_get("unwilling").await.unwrap().unwrap();
        (record.breaker == "open").then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_id_of_a_built_in_worker_is_refused() {
    let world = World::new().await;
    let name = world.engine.worker_id().to_string();
    let refused = world.engine.register_worker(registration(&name), Transport::Http, Timestamp::now()).await;
    assert!(matches!(refused, Err(EngineError::InvalidRegistration(faults)) if faults[0].path == "workerId"));
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_that_no_worker_can_run_fail_after_their_timeout() {
    let config = EngineConfig {
        no_handler_timeout: std::time::Duration::from_millis(1),
        guardian_interval: std::time::Duration::from_millis(20),
        ..EngineConfig::default()
    };
    let world = World::with(config).await;
    let _worker = connect(&world, Registration { concurrency: Some(1), ..registration("there") }).await;
    let (mine, waiting) = (world.submit(NewJob::new(KIND)).await, world.submit(NewJob::new(KIND)).await);
    let unhandled = world.submit(NewJob::new("unknown.type")).await;
    let job = world.job_is(unhandled, JobState::Failed).await;
    assert_eq!(job.error_reason, Some(ErrorReason::NoHandler));
    assert!(job.error.unwrap().contains("unknown.type"));
    let states = [world.job(mine).await.status, world.job(waiting).await.status];
    assert!(!states.contains(&JobState::Failed), "{states:?}: a worker can run them");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopping_server_leaves_jobs_with_their_workers() {
    let world = World::new().await;
    let worker = connect(&world, registration("patient")).await;
    let sent = delivered(&world, &worker, NewJob::new(KIND)).await.job;
    let world = world.restarted(EngineConfig::default()).await;
    assert!(worker.closing.is_cancelled(), "it is asked to reconnect");
    assert_eq!(world.job(sent.id()).await.worker_id.as_deref(), Some("patient"));
    let back =
        world.engine.register_worker(registration("patient"), Transport::WebSocket, Timestamp::now()).await.unwrap();
    assert!(back.resumed);
    assert_eq!(report(&world, &back.worker, sent.id(), ReportKind::Complete { result: None }).await, Ok(()));
    let job = world.job_is(sent.id(), JobState::Completed).await;
    assert_eq!((job.run, job.retry_count), (Some(sent.run()), 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn five_jobs_that_a_worker_does_not_start_open_its_breaker() {
    let world = World::new().await;
    let sleepy = Registration { reports_starts: true, concurrency: Some(10), ..registration("sleepy") };
    let worker = connect(&world, sleepy).await;
    for _ in 0..5 {
        assert_eq!(worker.breaker_state(Timestamp::now()), BreakerState::Closed);
        let sent = delivered(&world, &worker, NewJob::new(KIND)).await.job;
        worker.seen(sent.claimed_at.plus_ms(300_000));
        assert_eq!(watch(&world, sent.claimed_at.plus_ms(300_000)).await, 1);
    }
    let much_later = Timestamp::now().plus_ms(300_000);
    assert_eq!(worker.breaker_state(much_later), BreakerState::Open);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_waits_for_its_process_is_cancelled_immediately_and_never_delivered() {
    let pool = PoolConfig {
        name: "slow".into(),
        // A process that never connects.
        command: vec!["sleep".into(), "600".into()],
        capabilities: vec![KIND.into()],
        queues: Vec::new(),
        concurrency: 1,
        min: 0,
        max: 2,
        ephemeral: true,
        idle: std::time::Duration::from_secs(60),
        env: Default::default(),
        cwd: None,
    };
    let world = World::with(EngineConfig { pools: vec![pool], ..EngineConfig::default() }).await;
    let id = world.submit(NewJob::new(KIND)).await;
    world.job_is(id, JobState::Scheduled).await;
    let answer = world.engine.cancel(id, "cancelled by request", "test", Timestamp::now()).await.unwrap();
    assert_eq!(answer, CancelResult::Cancelled);
    let job = world.job(id).await;
    assert_eq!((job.status, job.started_at), (JobState::Cancelled, None));
    let log: Vec<_> = job.execution_log.iter().map(|line| line.event.as_str()).collect();
    assert_eq!(log, ["created", "queued", "scheduled", "cancel_requested", "cancelled"]);
    // Its process ends with the engine.
    world.stop().await;
}
