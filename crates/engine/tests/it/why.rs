//! Every reason that explains the state of a job, with its facts.

use std::sync::Arc;

use faena_domain::{
    Explanation, Failure, JobId, JobState, Limit, NewJob, NodeId, Pause, Progress, Rate, Reason, Scope, Timestamp,
    WorkerState,
};
use faena_engine::{
    EngineConfig, Roles,
    workers::{ConnectedWorker, Delivery, Registration, Report, ReportKind, Transport, WorkerCommand},
};
use faena_store::{ClaimRequest, NodeInfo, Owner, QueuePatch};

use crate::fixture::{Fixture, eventually, job, once, open_postgres};

const KIND: &str = "elsewhere";

/// Returns the configuration of a server without the built-in worker.
fn without_worker() -> EngineConfig {
    EngineConfig { roles: Roles { worker: false, ..Roles::ALL }, ..EngineConfig::default() }
}

async fn connect(fixture: &Fixture, key: &str, concurrency: u32) -> Arc<ConnectedWorker> {
    let registration = Registration {
        worker_id: Some(key.into()),
        capabilities: vec![KIND.into()],
        concurrency: Some(concurrency),
        ..Registration::default()
    };
    fixture.engine.register_worker(registration, Transport::WebSocket, Timestamp::now()).await.unwrap().worker
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

async fn report(fixture: &Fixture, worker: &Arc<ConnectedWorker>, id: JobId, kind: ReportKind) {
    let report = Report { job_id: id, run: None, kind };
    fixture.engine.reports.handler.handle_one(worker, report, Timestamp::now()).await.unwrap().unwrap();
}

async fn why(fixture: &Fixture, id: JobId) -> Explanation {
    why_at(fixture, id, Timestamp::now()).await
}

async fn why_at(fixture: &Fixture, id: JobId, now: Timestamp) -> Explanation {
    fixture.engine.why(&fixture.job(id).await, now).await.unwrap().unwrap()
}

fn codes(why: &Explanation) -> Vec<&str> {
    why.reasons.iter().map(|reason| reason.code.as_str()).collect()
}

/// Returns the reason with this code.
fn reason<'a>(why: &'a Explanation, code: &str) -> &'a Reason {
    why.reasons.iter().find(|reason| reason.code == code).unwrap_or_else(|| panic!("no {code} in {why:#?}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delayed_job_says_when_it_is_due() {
    let fixture = Fixture::new().await;
    let until = Timestamp::now().plus_ms(3_600_000);
    let mut later = NewJob::new("noop");
    later.options.scheduled_at = Some(until);
    let id = fixture.submit(later).await;
    let why = why(&fixture, id).await;
    assert_eq!((why.status, codes(&why)), (JobState::Pending, vec!["waits_until"]));
    assert_eq!(why.reasons[0].facts["until"], until.to_string());
    assert_eq!(why.summary, format!("it is scheduled for {until}"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_child_names_the_parents_that_have_not_completed() {
    let fixture = Fixture::with(without_worker()).await;
    let parent = fixture.submit(NewJob::new(KIND)).await;
    let mut child = NewJob::new(KIND);
    child.options.depends_on = vec![parent];
    let why = why(&fixture, fixture.submit(child).await).await;
    assert_eq!(codes(&why), ["depends_on"]);
    assert_eq!(why.reasons[0].facts["jobs"][0]["id"], parent.to_string());
    assert_eq!(why.reasons[0].facts["jobs"][0]["status"], "QUEUED");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_queue_says_who_paused_it_and_when() {
    let fixture = Fixture::new().await;
    let at = Timestamp::now();
    let pause = Pause { at, by: "ana".into(), reason: Some("the mail server is down".into()) };
    let patch = QueuePatch { paused: Some(Some(pause)), ..QueuePatch::default() };
    fixture.store.queue_set("default", patch, "ana", at).await.unwrap();
    let id = fixture.submit(NewJob::new("noop")).await;
    let why = why(&fixture, id).await;
    let facts = &reason(&why, "queue_paused").facts;
    assert_eq!((facts["by"].as_str(), facts["since"].as_str()), (Some("ana"), Some(at.to_string().as_str())));
    assert!(why.summary.contains("the mail server is down"), "{why:#?}");
    let resume = QueuePatch { paused: Some(None), ..QueuePatch::default() };
    fixture.store.queue_set("default", resume, "ana", at).await.unwrap();
    fixture.wait_for_state(id, JobState::Completed).await;
}

async fn limited_by(scope: Scope, key: Option<&str>) {
    let fixture = Fixture::with(without_worker()).await;
    let limit = Limit { concurrency: Some(1), rate: None };
    fixture.store.limit_set(scope.clone(), limit, "test", Timestamp::now()).await.unwrap();
    let worker = connect(&fixture, "w", 5).await;
    let mut one = NewJob::new(KIND);
    one.options.concurrency_key = key.map(str::to_owned);
    let first = fixture.submit(one.clone()).await;
    let holder = next_delivery(&worker).await.job.id();
    assert_eq!(holder, first);
    let second = fixture.submit(NewJob { id: JobId::new(), ..one }).await;
    let why = why(&fixture, second).await;
    assert_eq!(codes(&why), ["limit_reached"], "{why:#?}");
    let facts = &why.reasons[0].facts;
    assert_eq!(facts["scope"], scope.kind());
    assert_eq!(facts["name"].as_str(), Some(key.unwrap_or(scope.parts().1)));
    assert_eq!((facts["limit"].as_u64(), facts["inFlight"].as_u64()), (Some(1), Some(1)));
    assert_eq!(facts["jobs"][0], first.to_string());
    report(&fixture, &worker, first, ReportKind::Complete { result: None }).await;
    assert_eq!(next_delivery(&worker).await.job.id(), second, "the next job starts by itself");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_of_the_whole_system_lists_the_running_jobs() {
    limited_by(Scope::System, None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_of_a_queue_lists_the_running_jobs() {
    limited_by(Scope::Queue("default".into()), None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_of_a_type_lists_the_running_jobs() {
    limited_by(Scope::Type(KIND.into()), None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_of_a_key_lists_the_running_jobs() {
    limited_by(Scope::Key("tenant-*".into()), Some("tenant-7")).await;
}

async fn rate_limited_by(scope: Scope, key: Option<&str>) {
    let fixture = Fixture::with(without_worker()).await;
    let limit = Limit { concurrency: None, rate: Some(Rate { count: 1, period_ms: 3_600_000 }) };
    fixture.store.limit_set(scope.clone(), limit, "test", Timestamp::now()).await.unwrap();
    let worker = connect(&fixture, "w", 5).await;
    let mut one = NewJob::new(KIND);
    one.options.concurrency_key = key.map(str::to_owned);
    let first = fixture.submit(one.clone()).await;
    next_delivery(&worker).await;
    let started = Timestamp::now();
    report(&fixture, &worker, first, ReportKind::Complete { result: None }).await;
    let second = fixture.submit(NewJob { id: JobId::new(), ..one }).await;
    let why = eventually("the rate is used up", async || {
        let why = why(&fixture, second).await;
        (codes(&why) == ["rate_reached"]).then_some(why)
    })
    .await;
    let next = why.reasons[0].facts["nextAt"].as_str().and_then(Timestamp::parse).unwrap();
    let wait_ms = next.ms_since(started);
    assert!((3_500_000..=3_600_001).contains(&wait_ms), "the next slot of the rate is in about an hour: {wait_ms}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rate_of_a_queue_says_when_the_next_job_may_start() {
    rate_limited_by(Scope::Queue("default".into()), None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rate_of_a_key_says_when_the_next_job_may_start() {
    rate_limited_by(Scope::Key("tenant-7".into()), Some("tenant-7")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_type_that_no_worker_can_run_is_named() {
    let fixture = Fixture::new().await;
    let why = why(&fixture, fixture.submit(NewJob::new("fly.to.the.moon")).await).await;
    assert_eq!(codes(&why), ["no_worker"]);
    assert_eq!(why.reasons[0].facts["type"], "fly.to.the.moon");
    assert!(why.summary.contains("noop"), "the known types are listed: {}", why.summary);
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_ahead_are_counted() {
    let fixture = Fixture::with(without_worker()).await;
    let worker = connect(&fixture, "w", 1).await;
    fixture.submit(NewJob::new(KIND)).await;
    next_delivery(&worker).await;
    for _ in 0..3 {
        fixture.submit(NewJob::new(KIND)).await;
    }
    for _ in 0..5 {
        fixture.submit(NewJob::new("no.worker.runs.this")).await;
    }
    let last = fixture.submit(NewJob::new(KIND)).await;
    let why = why(&fixture, last).await;
    assert_eq!(codes(&why), ["workers_busy", "jobs_ahead"], "jobs that cannot run do not count: {why:#?}");
    let facts = &reason(&why, "jobs_ahead").facts;
    assert_eq!((facts["jobs"].as_u64(), facts["exact"].as_bool()), (Some(3), Some(true)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draining_worker_is_named() {
    let fixture = Fixture::with(without_worker()).await;
    let worker = connect(&fixture, "leaving", 1).await;
    assert!(fixture.engine.set_worker_drain("leaving", true, None, Timestamp::now()).await.unwrap());
    eventually("it drains", async || (worker.state() == WorkerState::Draining).then_some(())).await;
    let id = fixture.submit(NewJob::new(KIND)).await;
    let why = eventually("it is stored", async || {
        let why = why(&fixture, id).await;
        (codes(&why) == ["worker_draining"]).then_some(why)
    })
    .await;
    assert_eq!(why.reasons[0].facts["workers"][0], "leaving");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_breaker_is_named_with_its_time() {
    let fixture = Fixture::with(without_worker()).await;
    let worker = connect(&fixture, "flaky", 10).await;
    for _ in 0..5 {
        fixture.engine.workers.record_dispatch_failure(&worker, Timestamp::now());
    }
    let id = fixture.submit(NewJob::new(KIND)).await;
    let why = eventually("the breaker is stored", async || {
        let why = why(&fixture, id).await;
        (codes(&why) == ["breaker_open"]).then_some(why)
    })
    .await;
    let facts = &why.reasons[0].facts;
    assert_eq!(facts["workers"][0], "flaky");
    let until = facts["until"].as_str().and_then(Timestamp::parse).unwrap();
    assert!(until > Timestamp::now().plus_ms(20_000), "{until}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_of_a_disconnected_worker_says_when_it_is_recovered() {
    let fixture = Fixture::with(without_worker()).await;
    let worker = connect(&fixture, "cut", 1).await;
    let id = fixture.submit(NewJob::new(KIND)).await;
    next_delivery(&worker).await;
    let cut_at = Timestamp::now();
    fixture.engine.disconnect_worker(&worker, false, cut_at).await;
    let why = eventually("its disconnection is stored", async || {
        let why = why(&fixture, id).await;
        codes(&why).contains(&"worker_lost").then_some(why)
    })
    .await;
    let facts = &reason(&why, "worker_lost").facts;
    assert_eq!(facts["workerId"], "cut");
    let at = facts["recoveryAt"].as_str().and_then(Timestamp::parse).unwrap();
    assert!(at >= cut_at.plus_ms(10_000), "{at}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_of_a_dead_server_says_so_on_postgres() {
    let fixture = Fixture::over(open_postgres().await, without_worker()).await;
    let id = fixture.submit(NewJob::new(KIND)).await;
    let now = Timestamp::now();
    let dead = NodeId::new();
    fixture.store.node_join(NodeInfo { id: dead, name: "gone:1".into() }, 60_000, now).await.unwrap();
    let lanes = fixture.store.lanes().await.unwrap().iter().map(|lane| lane.id).collect();
    let request = ClaimRequest { owner: Owner::Node(dead), lanes, limit: 1, idle_slots: 1, candidates: None };
    fixture.store.job_claim(vec![request], now).await.unwrap();
    assert_eq!(codes(&why_at(&fixture, id, now.plus_ms(50_000)).await), ["assigned"]);
    let silent = why_at(&fixture, id, now.plus_ms(59_000)).await;
    assert_eq!(codes(&silent), ["server_lost", "assigned"], "it should have renewed its lease");
    assert_eq!(silent.reasons[0].facts["recoveryAt"], now.plus_ms(60_000).to_string());
    let why = why_at(&fixture, id, now.plus_ms(61_000)).await;
    assert_eq!(codes(&why), ["server_lost", "assigned"]);
    assert_eq!(why.reasons[0].facts["server"], "gone:1");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_job_says_its_progress_and_deadline() {
    let fixture = Fixture::with(without_worker()).await;
    let worker = connect(&fixture, "busy", 1).await;
    let mut job = NewJob::new(KIND);
    job.options.timeout_ms = Some(600_000);
    let id = fixture.submit(job).await;
    next_delivery(&worker).await;
    let progress = Progress { percentage: Some(40.0), phase: Some("upload".into()), ..Progress::default() };
    report(&fixture, &worker, id, ReportKind::Progress(progress)).await;
    let why = why(&fixture, id).await;
    assert_eq!((why.status, codes(&why)), (JobState::Processing, vec!["running"]));
    let facts = &why.reasons[0].facts;
    assert_eq!((facts["workerId"].as_str(), facts["progress"]["phase"].as_str()), (Some("busy"), Some("upload")));
    let time = |name: &str| facts[name].as_str().and_then(Timestamp::parse).unwrap();
    assert_eq!(time("deadline").ms_since(time("since")), 600_000);
    assert!(why.summary.contains("40 %, upload"), "{}", why.summary);

    fixture.store.job_cancel(id, "not wanted any more", None, Timestamp::now()).await.unwrap();
    let why = why_at(&fixture, id, Timestamp::now()).await;
    assert_eq!(codes(&why), ["cancel_requested", "running"]);
    assert_eq!(why.reasons[0].facts["reason"], "not wanted any more");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retrying_job_says_when_and_why() {
    let fixture = Fixture::with(without_worker()).await;
    let worker = connect(&fixture, "w", 1).await;
    let mut job = NewJob::new(KIND);
    job.options.retry.retry_delay_ms = 60_000;
    let id = fixture.submit(job).await;
    next_delivery(&worker).await;
    report(&fixture, &worker, id, ReportKind::Fail(Failure::error("no route to host"))).await;
    fixture.wait_for_state(id, JobState::Retrying).await;
    let why = why(&fixture, id).await;
    assert_eq!(codes(&why), ["waits_until"]);
    let facts = &why.reasons[0].facts;
    assert_eq!((facts["attempt"].as_u64(), facts["attempts"].as_u64()), (Some(2), Some(4)));
    assert_eq!(facts["error"], "no route to host");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_finished_job_says_how_it_ended() {
    let fixture = Fixture::new().await;
    let done = fixture.run_to(NewJob::new("noop"), JobState::Completed).await.id;
    assert_eq!(codes(&why(&fixture, done).await), ["completed"]);

    let failed = fixture.run_to(once("sleep", r#"{"ms":"long"}"#), JobState::Failed).await;
    let why_failed = why(&fixture, failed.id).await;
    assert_eq!(codes(&why_failed), ["failed"]);
    assert_eq!(why_failed.reasons[0].facts["error"].as_str(), failed.error.as_deref());
    assert!(why_failed.summary.starts_with("its only attempt failed"), "{}", why_failed.summary);

    fixture.engine.retry(failed.id, "ana", Timestamp::now()).await.unwrap();
    let again = eventually("it has failed again", async || {
        Some(fixture.job(failed.id).await).filter(|job| job.status == JobState::Failed && job.attempt == 2)
    })
    .await;
    let why_again = why(&fixture, again.id).await;
    assert!(why_again.summary.starts_with("the last of 2 attempts failed: "), "{}", why_again.summary);
    assert_eq!(why_again.reasons[0].facts["attempt"], 2, "as the job itself counts");

    let mut later = NewJob::new("noop");
    later.options.scheduled_at = Some(Timestamp::now().plus_ms(3_600_000));
    let id = fixture.submit(later).await;
    fixture.store.job_cancel(id, "a mistake", None, Timestamp::now()).await.unwrap();
    let why = why(&fixture, id).await;
    assert_eq!((codes(&why), why.reasons[0].facts["cause"].as_str()), (vec!["cancelled"], Some("a mistake")));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_job_says_that_no_worker_started_it() {
    let fixture = Fixture::with(without_worker()).await;
    let mut job = job(KIND, "{}");
    let expiry = Timestamp::now().plus_ms(50);
    job.options.expires_at = Some(expiry);
    let id = fixture.submit(job).await;
    fixture.wait_for_state(id, JobState::Failed).await;
    let why = why(&fixture, id).await;
    assert_eq!(why.reasons[0].facts["errorReason"], "expired");
    assert!(why.summary.starts_with("no worker started it before its expiry"), "{}", why.summary);
}
