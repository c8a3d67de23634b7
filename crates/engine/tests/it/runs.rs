//! Runs of the built-in worker: success, failure, timeout, expiry, cancellation, and the order of starts.

use std::time::Duration;

use faena_domain::{ErrorReason, JobId, JobState, LogEvent, NewJob, NodeId, Priority, RetryOn, Run, Timestamp};
use faena_engine::{CancelResult, EngineConfig};
use faena_store::{ClaimRequest, Filter, NodeInfo, Owner, Page, Store, Tally};

use crate::fixture::{Fixture, count, events, eventually, job, once, open_postgres, open_sqlite, reopened, submit};

fn one_slot() -> EngineConfig {
    EngineConfig { concurrency: 1, ..EngineConfig::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn noop_and_sleep_jobs_complete() {
    let fixture = Fixture::new().await;
    for kind in [job("noop", "{}"), job("sleep", r#"{"ms": 1}"#)] {
        let job = fixture.run_to(kind, JobState::Completed).await;
        assert_eq!(events(&job), ["created", "queued", "assigned", "started", "completed"]);
        assert_eq!(job.worker_id, Some(fixture.engine.worker_id().to_string()));
        assert!(job.result.is_none() && job.error.is_none());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_with_an_invalid_payload_is_not_retried() {
    let fixture = Fixture::new().await;
    for payload in ["{}", r#"{"ms": -1}"#, r#"{"ms": 1, "more": 2}"#, r#"{"ms": 1, "steps": 1001}"#] {
        let job = fixture.run_to(job("sleep", payload), JobState::Failed).await;
        assert!(job.error.unwrap().starts_with("the payload is not valid"));
        assert_eq!((job.retry_count, job.error_reason), (0, Some(ErrorReason::Error)));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn progress_is_reported_while_the_job_runs() {
    let fixture = Fixture::new().await;
    let id = fixture.submit(job("sleep", r#"{"ms": 400, "steps": 4}"#)).await;
    let mut seen = Vec::new();
    eventually("the job completes", async || {
        let job = fixture.job(id).await;
        seen.extend(job.progress.as_ref().and_then(|progress| progress.completed_steps));
        (job.status == JobState::Completed).then_some(())
    })
    .await;
    seen.dedup();
    assert!(seen.is_sorted() && seen.iter().all(|step| (1..=4).contains(step)), "{seen:?}");
    assert!(!seen.is_empty());
    let job = fixture.job(id).await;
    assert_eq!(count(&job, LogEvent::Progress), 4, "{:?}", events(&job));
}

#[tokio::test(flavor = "multi_thread")]
async fn when_all_attempts_are_used_the_last_error_is_kept() {
    let fixture = Fixture::with(EngineConfig { is_shell_allowed: true, ..EngineConfig::default() }).await;
    let mut failing = job("shell.run", r#"{"argv": ["sh", "-c", "echo broken >&2; exit 3"]}"#);
    failing.options.retry.max_retries = 2;
    failing.options.retry.retry_delays_ms = vec![1];
    let job = fixture.run_to(failing, JobState::Failed).await;
    assert_eq!(job.error.as_deref(), Some("sh ended with exit code 3: broken"));
    assert_eq!((job.retry_count, job.error_reason), (2, Some(ErrorReason::Error)));
    assert_eq!((count(&job, LogEvent::Failed), count(&job, LogEvent::RetryScheduled)), (3, 2), "{:?}", events(&job));
    let runs: Vec<_> = job.execution_log.iter().filter(|e| e.event == LogEvent::Assigned).map(|e| e.run).collect();
    assert!(runs.len() == 3 && runs.is_sorted_by(|a, b| a < b), "{runs:?}");
    assert!(job.completed_at.is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_success_after_failed_attempts_is_logged() {
    let folder = tempfile::tempdir().unwrap();
    let fixture = Fixture::with(EngineConfig { is_shell_allowed: true, ..EngineConfig::default() }).await;
    // Fails if the file does not exist, and creates it.
    let script = "test -e marker || { touch marker; exit 1; }";
    let payload = serde_json::json!({"argv": ["sh", "-c", script], "cwd": folder.path()});
    let mut job = job("shell.run", payload.to_string());
    job.options.retry.retry_delays_ms = vec![1];
    let job = fixture.run_to(job, JobState::Completed).await;
    assert_eq!(job.retry_count, 1);
    assert_eq!((count(&job, LogEvent::Failed), count(&job, LogEvent::RetryScheduled)), (1, 1), "{:?}", events(&job));
    assert_eq!(events(&job)[6..], ["queued", "assigned", "started", "retry_success", "completed"]);
    assert_eq!((job.error, job.error_reason), (None, None), "a completed job has no error");
}

#[tokio::test(flavor = "multi_thread")]
async fn with_retry_on_transient_only_transient_failures_are_retried() {
    let fixture = Fixture::with(EngineConfig { is_shell_allowed: true, ..EngineConfig::default() }).await;
    let failing = |text: &str| {
        let mut job =
            job("shell.run", serde_json::json!({"argv": ["sh", "-c", format!("echo {text} >&2; exit 1")]}).to_string());
        job.options.retry.retry_on = RetryOn::Transient;
        job.options.retry.retry_delays_ms = vec![1];
        job
    };
    assert_eq!(fixture.run_to(failing("no such user"), JobState::Failed).await.retry_count, 0);
    assert_eq!(fixture.run_to(failing("rate limit exceeded"), JobState::Failed).await.retry_count, 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_exceeds_its_timeout_is_stopped_with_reason_timeout() {
    let fixture = Fixture::with(one_slot()).await;
    let mut slow = once("sleep", r#"{"ms": 3600000}"#);
    slow.options.timeout_ms = Some(20);
    let job = fixture.run_to(slow, JobState::Failed).await;
    assert_eq!(job.error_reason, Some(ErrorReason::Timeout));
    assert_eq!(job.error.as_deref(), Some("took longer than its limit of 20ms"));
    assert_eq!(events(&job).last(), Some(&"timeout"));
    fixture.run_to(once("sleep", r#"{"ms": 1}"#), JobState::Completed).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_without_a_timeout_has_that_of_the_server() {
    let config = EngineConfig { processing_timeout: Duration::from_millis(20), ..EngineConfig::default() };
    let fixture = Fixture::with(config).await;
    let job = fixture.run_to(once("sleep", r#"{"ms": 3600000}"#), JobState::Failed).await;
    assert_eq!(job.error_reason, Some(ErrorReason::Timeout));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_is_not_started_in_time_expires() {
    let fixture = Fixture::with(one_slot()).await;
    let blocker = fixture.submit(job("sleep", r#"{"ms": 600000}"#)).await;
    fixture.wait_for_state(blocker, JobState::Processing).await;
    for kind in ["noop", "unhandled.type"] {
        let mut late = job(kind, "{}");
        late.options.expires_at = Some(Timestamp::now().plus_ms(50));
        let job = fixture.run_to(late, JobState::Failed).await;
        assert_eq!(job.error_reason, Some(ErrorReason::Expired), "{kind}");
        assert_eq!(count(&job, LogEvent::Started), 0, "{kind}");
        assert_eq!(count(&job, LogEvent::Expired), 1, "{kind}: {:?}", events(&job));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delayed_job_starts_when_it_is_due_and_not_before() {
    let fixture = Fixture::new().await;
    let due = Timestamp::now().plus_ms(300);
    let mut delayed = job("noop", "{}");
    delayed.options.scheduled_at = Some(due);
    let id = fixture.submit(delayed).await;
    assert_eq!(fixture.job(id).await.status, JobState::Pending);
    let job = fixture.wait_for_state(id, JobState::Completed).await;
    assert!(job.started_at.unwrap() >= due, "{job:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_is_cancelled_while_it_waits_for_a_slot_never_starts() {
    let fixture = Fixture::with(one_slot()).await;
    let blocker = fixture.submit(job("sleep", r#"{"ms": 600000}"#)).await;
    fixture.wait_for_state(blocker, JobState::Processing).await;
    let id = fixture.submit(job("sleep", r#"{"ms": 1}"#)).await;
    let answer = fixture.engine.cancel(id, "changed my mind", "test", Timestamp::now()).await.unwrap();
    assert_eq!(answer, CancelResult::Cancelled);
    let answer = fixture.engine.cancel(blocker, "cancelled by request", "test", Timestamp::now()).await.unwrap();
    assert_eq!(answer, CancelResult::Cancelled);
    fixture.run_to(job("sleep", r#"{"ms": 1}"#), JobState::Completed).await;
    for (id, reason, started) in [(id, "changed my mind", 0), (blocker, "cancelled by request", 1)] {
        let job = fixture.job(id).await;
        assert_eq!((job.status, job.error_reason), (JobState::Cancelled, Some(ErrorReason::Cancelled)));
        assert_eq!(job.error.as_deref(), Some(reason));
        assert_eq!(count(&job, LogEvent::Started), started, "{:?}", events(&job));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_free_slot_is_filled_immediately_and_jobs_keep_their_order() {
    let fixture = Fixture::with(one_slot()).await;
    let jobs: Vec<NewJob> = (0..50).map(|_| job("sleep", r#"{"ms": 1}"#)).collect();
    let stored = fixture.store.job_submit(jobs, None, Timestamp::now()).await.unwrap();
    let mut ended = Vec::new();
    for job in &stored {
        ended.push(fixture.wait_for_state(job.id, JobState::Completed).await);
    }
    let starts: Vec<Timestamp> = ended.iter().map(|job| job.started_at.unwrap()).collect();
    assert!(starts.is_sorted(), "jobs start in the order of submission");
    for pair in ended.windows(2) {
        assert!(pair[0].completed_at <= pair[1].started_at, "one slot runs one job at a time");
    }
    // None of them waited for a poll or a fallback round: the longest pause is far below every period.
    let pauses = ended.windows(2).map(|pair| pair[1].started_at.unwrap().ms_since(pair[0].completed_at.unwrap()));
    assert!(pauses.max().unwrap() < 5_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn higher_priorities_start_first_and_equal_ones_in_order() {
    let fixture = Fixture::with(one_slot()).await;
    let blocker = fixture.submit(job("sleep", r#"{"ms": 300}"#)).await;
    fixture.wait_for_state(blocker, JobState::Processing).await;
    let mut ids = Vec::new();
    for (name, priority) in [
        ("low", Priority::Low),
        ("normal 1", Priority::Normal),
        ("high", Priority::High),
        ("normal 2", Priority::Normal),
        ("critical", Priority::Critical),
    ] {
        let mut job = job("sleep", r#"{"ms": 3}"#);
        job.priority = priority;
        ids.push((name, fixture.submit(job).await));
    }
    let mut started = Vec::new();
    for (name, id) in ids {
        started.push((fixture.wait_for_state(id, JobState::Completed).await.started_at.unwrap(), name));
    }
    started.sort();
    let order: Vec<&str> = started.into_iter().map(|(_, name)| name).collect();
    assert_eq!(order, ["critical", "high", "normal 1", "normal 2", "low"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_no_worker_can_run_stays_queued_and_blocks_no_other() {
    let fixture = Fixture::with(one_slot()).await;
    let mut unknown = Vec::new();
    for n in 0..300 {
        let mut job = job(&format!("elsewhere.{}", n % 10), "{}");
        job.priority = Priority::Critical;
        unknown.push(fixture.submit(job).await);
    }
    for _ in 0..20 {
        fixture.run_to(job("sleep", r#"{"ms": 0}"#), JobState::Completed).await;
    }
    for id in unknown {
        let job = fixture.job(id).await;
        assert_eq!((job.status, count(&job, LogEvent::Assigned)), (JobState::Queued, 0));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn many_queues_share_one_slot() {
    let fixture = Fixture::with(one_slot()).await;
    let jobs: Vec<NewJob> =
        (0..200).map(|n| NewJob { queue: format!("queue {}", n % 20), ..job("sleep", r#"{"ms": 0}"#) }).collect();
    for stored in fixture.store.job_submit(jobs, None, Timestamp::now()).await.unwrap() {
        fixture.wait_for_state(stored.id, JobState::Completed).await;
    }
}

/// Claims the job for a server that is dead.
async fn claim_as_dead_server(store: &dyn Store, id: JobId) -> Run {
    let long_ago = Timestamp::now().plus_ms(-3_600_000);
    let dead = NodeId::new();
    store.node_join(NodeInfo { id: dead, name: "dead".into() }, 1_000, long_ago).await.unwrap();
    let lanes = store.lanes().await.unwrap().into_iter().map(|lane| lane.id).collect();
    let request = ClaimRequest { owner: Owner::Node(dead), lanes, limit: 10, idle_slots: 10, candidates: None };
    let claim = store.job_claim(vec![request], Timestamp::now()).await.unwrap().remove(0);
    assert_eq!(claim.jobs.iter().map(|job| job.id).collect::<Vec<_>>(), [id]);
    claim.jobs[0].run
}

async fn assert_runs_again_with_its_start_recorded(fixture: Fixture, id: JobId, lost: Run) {
    let running = fixture.wait_for_state(id, JobState::Processing).await;
    assert!(running.run > Some(lost));
    assert_eq!(running.retry_count, 0, "its start was not recorded");
    let done = fixture.wait_for_state(id, JobState::Completed).await;
    assert_eq!((count(&done, LogEvent::Recovered), count(&done, LogEvent::Started)), (1, 1), "{:?}", events(&done));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_of_a_dead_server_runs_again_with_its_start_recorded_on_sqlite() {
    let (store, database) = open_sqlite().await;
    let id = submit(&*store, job("sleep", r#"{"ms": 300}"#)).await;
    let lost = claim_as_dead_server(&*store, id).await;
    // The next process opens the file, so the process before it is dead.
    let fixture = Fixture::over(reopened(store, database).await, EngineConfig::default()).await;
    assert_runs_again_with_its_start_recorded(fixture, id, lost).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_of_a_dead_server_runs_again_with_its_start_recorded_on_postgres() {
    let (store, database) = open_postgres().await;
    let id = submit(&*store, job("sleep", r#"{"ms": 300}"#)).await;
    let lost = claim_as_dead_server(&*store, id).await;
    let config = EngineConfig { node_lease: Duration::from_millis(300), ..EngineConfig::default() };
    let fixture = Fixture::over((store, database), config).await;
    assert_runs_again_with_its_start_recorded(fixture, id, lost).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_job_of_a_backlog_runs_once_on_postgres() {
    let fixture = Fixture::over(open_postgres().await, EngineConfig::default()).await;
    let jobs: Vec<NewJob> = (0..3_000).map(|_| job("noop", "{}")).collect();
    let stored = fixture.store.job_submit(jobs, None, Timestamp::now()).await.unwrap();
    for job in &stored {
        let job = fixture.wait_for_state(job.id, JobState::Completed).await;
        assert_eq!(events(&job), ["created", "queued", "assigned", "started", "completed"]);
    }
    assert_eq!(fixture.engine.load().0, 0, "no job is in flight");
}

#[tokio::test(flavor = "multi_thread")]
async fn prefetched_jobs_are_released_when_they_wait_behind_a_long_job() {
    // How many jobs are prefetched depends on how fast they run, and so on the load of this machine.
    let mut found = None;
    for _ in 0..20 {
        let fixture = start_with_a_long_job().await;
        if in_flight(&fixture).await > 1 {
            found = Some(fixture);
            break;
        }
    }
    let fixture = found.expect("no job was ever prefetched");
    let now = Timestamp::now();
    fixture.engine.run_guardian(now.plus_ms(9_000)).await.unwrap();
    assert!(in_flight(&fixture).await > 1, "they are not released early");
    fixture.engine.run_guardian(now.plus_ms(10_500)).await.unwrap();
    eventually("only the long job is in flight", async || (in_flight(&fixture).await == 1).then_some(())).await;
    let (_, idle) = fixture.engine.load();
    assert_eq!((in_flight(&fixture).await, idle), (1, 0), "they are not claimed again");
}

async fn in_flight(fixture: &Fixture) -> i64 {
    fixture.store.counts().await.unwrap().total(Tally::InFlight)
}

/// Starts a server with one slot, in which a long job runs among many short ones.
async fn start_with_a_long_job() -> Fixture {
    let fixture = Fixture::with(EngineConfig { concurrency: 1, ..EngineConfig::default() }).await;
    let short = |_| job("noop", "{}");
    let long = job("sleep", r#"{"ms": 600000}"#);
    let (before, after) = ((0..2_000).map(short), (0..2_000).map(short));
    fixture.store.job_submit(before.chain([long]).chain(after).collect(), None, Timestamp::now()).await.unwrap();
    eventually("the long job has started", async || {
        let running = Filter { states: vec![JobState::Processing], kind: Some("sleep".into()), ..Filter::default() };
        let page = fixture.store.job_list(&running, Page::after(None, 1)).await.unwrap();
        (page.total == 1).then_some(())
    })
    .await;
    fixture
}
