//! Jobs of connected workers, at simulated times.

use std::{sync::Arc, time::Duration};

use faena_domain::{
    ErrorCode, ErrorReason, Failure, JobId, JobState, JobView, NewJob, Run, SecretText, Timestamp, WorkerState,
};
use faena_engine::{
    CancelResult, EngineConfig, EngineError, PoolConfig,
    breaker::BreakerState,
    guardian::Check,
    workers::{ConnectedWorker, Delivery, Registration, Report, ReportKind, Transport, WorkerCommand},
};

use faena_store::Store;

use crate::fixture::{Fixture, TestDatabase, events, eventually, open_postgres, open_sqlite};

const KIND: &str = "elsewhere";

fn registration(key: &str) -> Registration {
    Registration {
        worker_id: Some(key.into()),
        capabilities: vec![KIND.into()],
        concurrency: Some(2),
        ..Registration::default()
    }
}

/// Registers a worker. Also returns the registration with which it reconnects.
async fn connect_first(fixture: &Fixture, first: Registration) -> (Arc<ConnectedWorker>, Registration) {
    let connected =
        fixture.engine.register_worker(first.clone(), Transport::WebSocket, Timestamp::now()).await.unwrap();
    (connected.worker, Registration { session_token: Some(connected.session_token), ..first })
}

async fn connect(fixture: &Fixture, registration: Registration) -> Arc<ConnectedWorker> {
    fixture.engine.register_worker(registration, Transport::WebSocket, Timestamp::now()).await.unwrap().worker
}

#[tokio::test(flavor = "multi_thread")]
async fn a_version_has_1_to_100_characters_and_no_control_characters() {
    let errors = |version: &str| {
        let errors = Registration { version: Some(version.into()), ..registration("w") }.validate();
        errors.iter().map(|error| format!("{}: {}", error.path, error.message)).collect::<Vec<_>>()
    };
    assert!(errors("1").is_empty() && errors(&"é".repeat(100)).is_empty());
    assert_eq!(errors(""), ["version: must have 1 to 100 characters, has 0"]);
    assert_eq!(errors(&"1".repeat(101)), ["version: must have 1 to 100 characters, has 101"]);
    assert_eq!(errors("1\u{1b}[2J"), ["version: must not contain control characters"]);
}

/// Submits a job and waits until it is delivered.
async fn delivered(fixture: &Fixture, worker: &ConnectedWorker, job: NewJob) -> Delivery {
    fixture.submit(job).await;
    next_delivery(worker).await
}

async fn next_delivery(worker: &ConnectedWorker) -> Delivery {
    loop {
        for command in worker.next_commands().await {
            if let WorkerCommand::Job(delivery) = command {
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

/// Reports without a run, as a worker may on the connection that received the job.
async fn report(
    fixture: &Fixture,
    worker: &Arc<ConnectedWorker>,
    id: JobId,
    kind: ReportKind,
) -> Result<(), ErrorCode> {
    report_run(fixture, worker, id, None, kind).await
}

async fn report_run(
    fixture: &Fixture,
    worker: &Arc<ConnectedWorker>,
    id: JobId,
    run: Option<Run>,
    kind: ReportKind,
) -> Result<(), ErrorCode> {
    let report = Report { job_id: id, run, kind };
    fixture
        .engine
        .reports
        .handler
        .handle_one(worker, report, Timestamp::now())
        .await
        .unwrap()
        .map_err(|rejection| rejection.code)
}

async fn watch(fixture: &Fixture, now: Timestamp) -> usize {
    fixture.engine.watch_workers(now).await.unwrap().handled
}

fn details<'a>(job: &'a JobView, event: &str) -> Vec<&'a str> {
    let lines = job.execution_log.iter().filter(|line| line.event.as_str() == event);
    lines.map(|line| line.details.as_str()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_worker_is_lost_at_its_deadline_and_not_before() {
    let fixture = Fixture::new().await;
    let worker = connect(&fixture, registration("quiet")).await;
    let id = delivered(&fixture, &worker, NewJob::new(KIND)).await.job.id();
    let heard_at = worker.seen_at();
    assert_eq!(watch(&fixture, heard_at.plus_ms(89_999)).await, 0);
    assert_eq!(fixture.job(id).await.worker_id.as_deref(), Some("quiet"));
    let late = heard_at.plus_ms(90_000);
    assert_eq!(watch(&fixture, late).await, 1);
    let job = fixture.job(id).await;
    assert_eq!((job.status, job.retry_count, job.error_reason), (JobState::Retrying, 1, Some(ErrorReason::Orphaned)));
    assert_eq!(job.next_attempt_at, Some(late.plus_ms(5_000)));
    let record = fixture.store.worker_get("quiet").await.unwrap().unwrap();
    assert_eq!((record.state, record.ended_at), (WorkerState::Terminated, Some(late)));
    assert!(record.reason.unwrap().contains("no heartbeat for"));
    assert_eq!(
        report(&fixture, &worker, id, ReportKind::Complete { result: None }).await,
        Err(ErrorCode::Conflict),
        "the job is not in flight, and the report names no run"
    );
    assert_eq!(watch(&fixture, late.plus_ms(1)).await, 0, "it was removed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disconnected_worker_can_reconnect_within_the_grace_period() {
    let fixture = Fixture::new().await;
    let (worker, again) = connect_first(&fixture, registration("cut")).await;
    let first = delivered(&fixture, &worker, NewJob::new(KIND)).await.job;
    let cut_at = Timestamp::now();
    fixture.engine.disconnect_worker(&worker, false, cut_at).await;
    assert_eq!(watch(&fixture, cut_at.plus_ms(9_999)).await, 0);
    let back = fixture.engine.register_worker(again, Transport::WebSocket, Timestamp::now()).await.unwrap();
    assert!(back.resumed && back.worker.id == worker.id);
    assert_eq!(watch(&fixture, cut_at.plus_ms(10_000)).await, 0, "it has reconnected");
    let done = ReportKind::Complete { result: None };
    assert_eq!(
        report(&fixture, &back.worker, first.id(), done.clone()).await,
        Err(ErrorCode::ValidationError),
        "without a run only on the connection that received the job"
    );
    assert_eq!(report_run(&fixture, &back.worker, first.id(), Some(first.run()), done).await, Ok(()));
    let job = fixture.wait_for_state(first.id(), JobState::Completed).await;
    assert_eq!(job.run, Some(first.run()), "the same run");

    let sent = delivered(&fixture, &back.worker, NewJob::new(KIND)).await.job;
    fixture.engine.disconnect_worker(&back.worker, false, cut_at).await;
    assert_eq!(watch(&fixture, cut_at.plus_ms(10_000)).await, 1, "it has not reconnected");
    let job = fixture.job(sent.id()).await;
    assert_eq!((job.status, job.retry_count), (JobState::Retrying, 1));
    assert!(details(&job, "orphaned")[0].contains("did not reconnect within 10s"), "{job:#?}");
}

/// A caller without the session token neither gets the worker's jobs nor ends its connection.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_alive_is_not_taken_over() {
    let fixture = Fixture::new().await;
    let (worker, again) = connect_first(&fixture, registration("mine")).await;
    let job = delivered(&fixture, &worker, NewJob::new(KIND)).await.job;
    let wrong = Some(SecretText::session_token([1; 43]));
    for transport in [Transport::WebSocket, Transport::Grpc, Transport::Http] {
        for session_token in [None, wrong.clone()] {
            let stranger = Registration { session_token, ..registration("mine") };
            let refused = fixture.engine.register_worker(stranger, transport, Timestamp::now()).await.err().unwrap();
            assert!(matches!(refused, EngineError::WorkerActive { deadline: None, .. }), "{refused}");
        }
    }
    assert!(!worker.closing.is_cancelled(), "its connection stays open");
    let cut_at = Timestamp::now();
    fixture.engine.disconnect_worker(&worker, false, cut_at).await;
    let refused =
        fixture.engine.register_worker(registration("mine"), Transport::WebSocket, cut_at).await.err().unwrap();
    let free_at = cut_at.plus_ms(10_000).to_string();
    assert!(refused.to_string().contains(&free_at), "the error says when the id is free: {refused}");
    let back = fixture.engine.register_worker(again.clone(), Transport::WebSocket, Timestamp::now()).await.unwrap();
    assert!(back.resumed && back.worker.has_job(job.id()));
    assert_eq!(back.session_token.reveal(), again.session_token.unwrap().reveal(), "it stays the same");
    assert!(!format!("{:?}", registration("mine")).contains("fst_"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_its_worker_does_not_have_is_released_without_using_an_attempt() {
    let fixture = Fixture::new().await;
    let (worker, again) = connect_first(&fixture, registration("forgetful")).await;
    let id = delivered(&fixture, &worker, NewJob::new(KIND)).await.job.id();
    let without_jobs = Registration { in_flight: Some(Vec::new()), ..again };
    let back = connect(&fixture, without_jobs).await;
    let again = next_delivery(&back).await.job;
    assert_eq!((again.id(), again.claimed.retry_count), (id, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_its_worker_does_not_start_in_time_is_retried() {
    let fixture = Fixture::new().await;
    let worker = connect(&fixture, Registration { reports_starts: true, ..registration("slow") }).await;
    let sent = delivered(&fixture, &worker, NewJob::new(KIND)).await.job;
    worker.record_heartbeat(Timestamp::now().plus_ms(600_000));
    assert_eq!(fixture.job(sent.id()).await.status, JobState::Assigned);
    assert_eq!(watch(&fixture, sent.claimed_at.plus_ms(299_999)).await, 0);
    assert_eq!(watch(&fixture, sent.claimed_at.plus_ms(300_000)).await, 1);
    let job = fixture.wait_for_state(sent.id(), JobState::Retrying).await;
    assert_eq!((job.retry_count, job.error_reason), (1, Some(ErrorReason::Timeout)));
    assert!(job.error.unwrap().contains("did not start it within 300s"));
    assert_eq!(cancels(&worker).len(), 1, "it is asked to stop");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_started_in_time_may_run_until_its_timeout() {
    let fixture = Fixture::new().await;
    let worker = connect(&fixture, Registration { reports_starts: true, ..registration("steady") }).await;
    let sent = delivered(&fixture, &worker, NewJob::new(KIND)).await.job;
    worker.record_heartbeat(Timestamp::now().plus_ms(600_000));
    assert_eq!(report(&fixture, &worker, sent.id(), ReportKind::Started).await, Ok(()));
    assert_eq!(fixture.job(sent.id()).await.status, JobState::Processing);
    assert_eq!(watch(&fixture, sent.claimed_at.plus_ms(400_000)).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_timed_out_job_ends_immediately_and_frees_its_slot_when_the_handler_stops() {
    let fixture = Fixture::new().await;
    let worker = connect(&fixture, registration("deaf")).await;
    let mut job = NewJob::new(KIND);
    job.options.timeout_ms = Some(1_000_000);
    let sent = delivered(&fixture, &worker, job).await.job;
    let started_at = sent.started_at().unwrap();
    worker.record_heartbeat(Timestamp::now().plus_ms(2_000_000));
    assert_eq!(watch(&fixture, started_at.plus_ms(999_999)).await, 0);
    assert_eq!(watch(&fixture, started_at.plus_ms(1_000_000)).await, 1);
    let job = fixture.wait_for_state(sent.id(), JobState::Retrying).await;
    assert_eq!((job.retry_count, job.error_reason), (1, Some(ErrorReason::Timeout)));
    assert_eq!(cancels(&worker), ["took longer than its limit of 1000s"]);
    assert_eq!(worker.free_slots(), 1, "its handler is still running");

    assert_eq!(watch(&fixture, started_at.plus_ms(1_009_999)).await, 0);
    assert!(details(&fixture.job(sent.id()).await, "stale_report").is_empty());
    for _ in 0..2 {
        watch(&fixture, started_at.plus_ms(1_010_000)).await;
    }
    let job = fixture.job(sent.id()).await;
    assert_eq!(
        details(&job, "stale_report"),
        ["worker deaf was asked to stop it and its handler is still running"],
        "logged once"
    );

    let run = Some(sent.run());
    let report = Report { job_id: sent.id(), run, kind: ReportKind::Complete { result: None } };
    let answer = fixture.engine.reports.handler.handle_one(&worker, report, Timestamp::now()).await.unwrap();
    assert_eq!(answer.unwrap_err().code, ErrorCode::StaleRun);
    assert_eq!(worker.free_slots(), 2, "it has stopped");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_job_ends_when_its_worker_stops_or_after_ten_seconds() {
    let fixture = Fixture::new().await;
    let worker = connect(&fixture, registration("polite")).await;
    let polite = delivered(&fixture, &worker, NewJob::new(KIND)).await.job;
    let cancel = fixture.engine.cancel(polite.id(), "cancelled by request", "test", Timestamp::now());
    let stop = async {
        eventually("it is asked to stop", async || (!cancels(&worker).is_empty()).then_some(())).await;
        report(&fixture, &worker, polite.id(), ReportKind::Fail(Failure::error("stopped"))).await.unwrap();
    };
    let (answer, ()) = tokio::join!(cancel, stop);
    assert_eq!(answer.unwrap(), CancelResult::Cancelled);
    let job = fixture.job(polite.id()).await;
    assert_eq!((job.status, job.error.as_deref()), (JobState::Cancelled, Some("cancelled by request")));

    let stubborn = delivered(&fixture, &worker, NewJob::new(KIND)).await.job;
    let answer = fixture.engine.cancel(stubborn.id(), "cancelled by request", "test", Timestamp::now()).await.unwrap();
    assert_eq!(answer, CancelResult::Requested { state: JobState::Processing });
    for _ in 0..2 {
        let to_stop: Vec<_> = worker.jobs_to_stop().into_iter().map(|(id, run, _)| (id, run)).collect();
        assert_eq!(to_stop, [(stubborn.id(), stubborn.run())], "a polling worker receives it with each call");
    }
    let asked_at = stubborn.stop_requested_at().unwrap();
    assert_eq!(watch(&fixture, asked_at.plus_ms(9_999)).await, 0);
    assert_eq!(watch(&fixture, asked_at.plus_ms(10_000)).await, 1);
    fixture.wait_for_state(stubborn.id(), JobState::Cancelled).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_releases_every_job_opens_its_circuit() {
    let fixture = Fixture::new().await;
    let worker = connect(&fixture, registration("unwilling")).await;
    let id = fixture.submit(NewJob::new(KIND)).await;
    for _ in 0..5 {
        assert_eq!(worker.breaker_state(Timestamp::now()), BreakerState::Closed);
        assert_eq!(next_delivery(&worker).await.job.id(), id);
        assert_eq!(report(&fixture, &worker, id, ReportKind::Release).await, Ok(()));
    }
    assert_eq!(worker.breaker_state(Timestamp::now()), BreakerState::Open);
    assert_eq!(worker.breaker_state(Timestamp::now().plus_ms(30_000)), BreakerState::HalfOpen);
    let willing = connect(&fixture, registration("willing")).await;
    let sent = next_delivery(&willing).await.job;
    assert_eq!((sent.id(), sent.claimed.retry_count), (id, 0), "another worker has it, and no attempt was used");
    assert_eq!(fixture.engine.workers.dispatch_failures.load(std::sync::atomic::Ordering::Relaxed), 5);
    eventually("the open breaker is stored", async || {
        let record = fixture.store.worker_get("unwilling").await.unwrap().unwrap();
        (record.breaker == "open").then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_dispatcher_wakes_when_the_open_period_of_a_breaker_ends() {
    let fixture = Fixture::new().await;
    let worker = connect(&fixture, registration("unwilling")).await;
    let id = fixture.submit(NewJob::new(KIND)).await;
    for _ in 0..5 {
        assert_eq!(next_delivery(&worker).await.job.id(), id);
        assert_eq!(report(&fixture, &worker, id, ReportKind::Release).await, Ok(()));
    }
    assert_eq!(worker.breaker_state(Timestamp::now()), BreakerState::Open);
    let rounds = || fixture.engine.loops.health.all()["dispatcher"].rounds;
    // The last release has woken the dispatcher too.
    let mut before = rounds();
    eventually("the dispatcher is idle", async || {
        let last = std::mem::replace(&mut before, rounds());
        (last == before).then_some(())
    })
    .await;
    watch(&fixture, Timestamp::now().plus_ms(30_000)).await;
    eventually("the dispatcher looks for jobs again", async || (rounds() > before).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_id_of_a_built_in_worker_is_rejected() {
    let fixture = Fixture::new().await;
    let name = fixture.engine.worker_id().to_string();
    let rejected = fixture.engine.register_worker(registration(&name), Transport::Http, Timestamp::now()).await;
    assert!(matches!(rejected, Err(EngineError::InvalidRegistration(errors)) if errors[0].path == "workerId"));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_built_in_worker_shows_its_runs_and_its_last_heartbeat() {
    let fixture = Fixture::new().await;
    let key = fixture.engine.worker_id().to_string();
    for _ in 0..3 {
        fixture.run_to(NewJob::new("noop"), JobState::Completed).await;
    }
    let mut invalid = NewJob::new("sleep");
    invalid.options.retry.max_retries = 0;
    fixture.run_to(invalid, JobState::Failed).await;
    let now = Timestamp::now().plus_ms(30_000);
    fixture.engine.persist_worker_status(now).await.unwrap();
    let stored = fixture.store.worker_get(&key).await.unwrap().unwrap();
    assert_eq!((stored.completed, stored.failed, stored.last_seen_at), (3, 1, now));
    fixture.engine.persist_worker_status(now.plus_ms(1)).await.unwrap();
    let again = fixture.store.worker_get(&key).await.unwrap().unwrap();
    assert_eq!((again.completed, again.last_seen_at), (3, now), "nothing is written while nothing changes");

    // Its own node shows the current numbers without a write.
    fixture.run_to(NewJob::new("noop"), JobState::Completed).await;
    let mut view = fixture.store.worker_get(&key).await.unwrap().unwrap();
    fixture.engine.refresh_worker(&mut view, now.plus_ms(2));
    assert_eq!((view.completed, view.failed, view.last_seen_at), (4, 1, now.plus_ms(2)));
    fixture.stop().await;
    let last = fixture.store.worker_get(&key).await.unwrap().unwrap();
    assert_eq!((last.completed, last.failed, last.state), (4, 1, WorkerState::Terminated));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_has_stopped_registers_no_worker() {
    let fixture = Fixture::new().await;
    let polling = Registration { worker_id: Some("polling".into()), ..registration("polling") };
    let polling = fixture.engine.register_worker(polling, Transport::Http, Timestamp::now()).await.unwrap();
    fixture.stop().await;
    let now = Timestamp::now();
    for transport in [Transport::WebSocket, Transport::Grpc, Transport::Http] {
        let refused = fixture.engine.register_worker(registration("late"), transport, now).await;
        assert!(matches!(refused, Err(EngineError::Stopping)));
    }
    let refused = fixture.engine.find_polling_worker("polling", Some(polling.session_token), None, now).await;
    assert!(matches!(refused, Err(EngineError::Stopping)), "its call must not connect it to a server that has left");
    let known = fixture.store.worker_get("polling").await.unwrap().unwrap();
    assert_eq!((known.ended_at, known.node), (None, None), "it may call another server");
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_that_no_worker_can_run_fail_after_their_timeout() {
    let config = EngineConfig {
        no_handler_timeout: std::time::Duration::from_millis(1),
        guardian_interval: std::time::Duration::from_millis(20),
        ..EngineConfig::default()
    };
    let fixture = Fixture::with(config).await;
    let _worker = connect(&fixture, Registration { concurrency: Some(1), ..registration("there") }).await;
    let (mine, waiting) = (fixture.submit(NewJob::new(KIND)).await, fixture.submit(NewJob::new(KIND)).await);
    let unhandled = fixture.submit(NewJob::new("unknown.type")).await;
    let job = fixture.wait_for_state(unhandled, JobState::Failed).await;
    assert_eq!(job.error_reason, Some(ErrorReason::NoHandler));
    assert!(job.error.unwrap().contains("unknown.type"));
    let states = [fixture.job(mine).await.status, fixture.job(waiting).await.status];
    assert!(!states.contains(&JobState::Failed), "{states:?}: a worker can run them");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopping_server_leaves_jobs_with_their_workers() {
    let fixture = Fixture::new().await;
    let (worker, again) = connect_first(&fixture, registration("patient")).await;
    let sent = delivered(&fixture, &worker, NewJob::new(KIND)).await.job;
    let fixture = fixture.restarted(EngineConfig::default()).await;
    assert!(worker.closing.is_cancelled(), "it is asked to reconnect");
    assert_eq!(fixture.job(sent.id()).await.worker_id.as_deref(), Some("patient"));
    let back = fixture.engine.register_worker(again, Transport::WebSocket, Timestamp::now()).await.unwrap();
    assert!(back.resumed);
    let done = ReportKind::Complete { result: None };
    assert_eq!(report_run(&fixture, &back.worker, sent.id(), Some(sent.run()), done).await, Ok(()));
    let job = fixture.wait_for_state(sent.id(), JobState::Completed).await;
    assert_eq!((job.run, job.retry_count), (Some(sent.run()), 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn five_jobs_that_a_worker_does_not_start_open_its_breaker() {
    let fixture = Fixture::new().await;
    let sleepy = Registration { reports_starts: true, concurrency: Some(10), ..registration("sleepy") };
    let worker = connect(&fixture, sleepy).await;
    for _ in 0..5 {
        assert_eq!(worker.breaker_state(Timestamp::now()), BreakerState::Closed);
        let sent = delivered(&fixture, &worker, NewJob::new(KIND)).await.job;
        worker.record_heartbeat(sent.claimed_at.plus_ms(300_000));
        assert_eq!(watch(&fixture, sent.claimed_at.plus_ms(300_000)).await, 1);
    }
    let much_later = Timestamp::now().plus_ms(300_000);
    assert_eq!(worker.breaker_state(much_later), BreakerState::Open);
}

/// Returns a pool whose processes never connect.
fn pool_without_connections() -> PoolConfig {
    PoolConfig {
        name: "slow".into(),
        command: vec!["sleep".into(), "600".into()],
        capabilities: vec![KIND.into()],
        queues: Vec::new(),
        concurrency: 1,
        min: 0,
        max: 2,
        ephemeral: true,
        idle: Duration::from_secs(60),
        env: Default::default(),
        cwd: None,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_whose_process_does_not_connect_in_time_times_out() {
    let config = EngineConfig {
        pools: vec![pool_without_connections()],
        scheduled_timeout: Duration::from_millis(200),
        ..EngineConfig::default()
    };
    let fixture = Fixture::with(config).await;
    let mut job = NewJob::new(KIND);
    job.options.retry.max_retries = 0;
    let id = fixture.submit(job).await;
    let job = fixture.wait_for_state(id, JobState::Failed).await;
    assert_eq!((job.error_reason, job.started_at), (Some(ErrorReason::Timeout), None));
    assert_eq!(events(&job), ["created", "queued", "scheduled", "timeout"]);
    let worker = job.worker_id.unwrap();
    assert_eq!(job.error.unwrap(), format!("the process of worker {worker} did not connect within 200ms"));
    let reason = eventually("its worker has ended", async || {
        let worker = fixture.store.worker_get(&worker).await.unwrap().unwrap();
        worker.ended_at.and(worker.reason)
    })
    .await;
    assert_eq!(reason, "lost: process did not connect within 200ms", "and not how the killed process ended");
    assert!(fixture.engine.guardian.actions.of(Check::Jobs) >= 1);
    fixture.stop().await;
}

/// Asserts that the jobs of two workers without a server time out: one worker has started its job, one has not.
async fn assert_time_limits_apply_without_a_server(database: (Arc<dyn Store>, TestDatabase)) {
    // The grace period for reconnecting is longer than the time limits of the jobs.
    let config = EngineConfig { reconnect_grace: Duration::from_secs(7_200), ..EngineConfig::default() };
    let fixture = Fixture::over(database, config.clone()).await;
    let one_slot = Registration { concurrency: Some(1), ..registration("away") };
    let (worker, again) = connect_first(&fixture, one_slot).await;
    let mut job = NewJob::new(KIND);
    job.options.timeout_ms = Some(3_600_000);
    let started = delivered(&fixture, &worker, job).await.job;
    assert_eq!(report(&fixture, &worker, started.id(), ReportKind::Started).await, Ok(()));
    let reports_starts = Registration { reports_starts: true, concurrency: Some(1), ..registration("idle") };
    let worker = connect(&fixture, reports_starts).await;
    let assigned = delivered(&fixture, &worker, NewJob::new(KIND)).await.job;

    let fixture = fixture.restarted(config).await;
    let state = async |id| fixture.job(id).await.status;
    let assigned_until = assigned.claimed_at.plus_ms(300_000);
    fixture.engine.run_guardian(assigned_until.plus_ms(-1)).await.unwrap();
    assert_eq!(state(assigned.id()).await, JobState::Assigned);
    fixture.engine.run_guardian(assigned_until).await.unwrap();
    let job = fixture.job(assigned.id()).await;
    assert_eq!((job.status, job.error_reason), (JobState::Retrying, Some(ErrorReason::Timeout)));
    assert_eq!(details(&job, "timeout"), ["worker idle did not start it within 300s"]);

    let until = started.started_at().unwrap().plus_ms(3_600_000);
    fixture.engine.run_guardian(until.plus_ms(-1)).await.unwrap();
    assert_eq!(state(started.id()).await, JobState::Processing);
    fixture.engine.run_guardian(until).await.unwrap();
    let job = fixture.job(started.id()).await;
    assert_eq!((job.status, job.retry_count, job.attempt), (JobState::Retrying, 1, 1));
    assert_eq!(job.error_reason, Some(ErrorReason::Timeout));
    assert_eq!(
        events(&job),
        ["created", "queued", "assigned", "started", "timeout", "retry_scheduled"],
        "{:#?}",
        job.execution_log
    );

    let back = fixture.engine.register_worker(again, Transport::WebSocket, Timestamp::now()).await.unwrap();
    let late = Report { job_id: job.id, run: job.run, kind: ReportKind::Complete { result: None } };
    let answer = fixture.engine.reports.handler.handle_one(&back.worker, late, Timestamp::now()).await.unwrap();
    assert_eq!(answer.unwrap_err().code, ErrorCode::StaleRun);
    fixture.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn time_limits_apply_to_workers_without_a_server() {
    assert_time_limits_apply_without_a_server(open_sqlite().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn time_limits_on_postgres_apply_to_workers_without_a_server() {
    assert_time_limits_apply_without_a_server(open_postgres().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_waits_for_its_process_is_cancelled_immediately_and_never_delivered() {
    let pool = pool_without_connections();
    let fixture = Fixture::with(EngineConfig { pools: vec![pool], ..EngineConfig::default() }).await;
    let id = fixture.submit(NewJob::new(KIND)).await;
    fixture.wait_for_state(id, JobState::Scheduled).await;
    let answer = fixture.engine.cancel(id, "cancelled by request", "test", Timestamp::now()).await.unwrap();
    assert_eq!(answer, CancelResult::Cancelled);
    let job = fixture.job(id).await;
    assert_eq!((job.status, job.started_at), (JobState::Cancelled, None));
    let log: Vec<_> = job.execution_log.iter().map(|line| line.event.as_str()).collect();
    assert_eq!(log, ["created", "queued", "scheduled", "cancel_requested", "cancelled"]);
    // Its process ends with the engine.
    fixture.stop().await;
}
