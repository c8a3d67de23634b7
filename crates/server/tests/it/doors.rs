//! Whatever door a worker comes in by, the same things happen. Each story is told for all of them.
//!
//! What cannot be told by a door is said where it happens: the SDK keeps answers to itself, and a worker that calls has no
//! connection that could be seen to close.

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{
    faena::{Faena, events, eventually},
    hands::{Away, Failure, Frames, Grpc, Hand, Http, Sdk, WebSocket, failure, in_time, who},
    load::assert_completed_once,
    postgres::Database,
};

#[derive(Clone, Copy)]
enum Engine {
    Sqlite,
    Postgres,
}

/// A server of one story.
struct Stage {
    faena: Faena,
    _folder: TempDir,
    _database: Option<Database>,
}

/// Quick to notice, and still slow enough for a busy machine.
const QUICK: [(&str, &str); 5] = [
    ("FAENA_WORKER_HEARTBEAT", "300ms"),
    ("FAENA_WORKER_SILENCE", "2s"),
    ("FAENA_RECONNECT_GRACE", "400ms"),
    ("FAENA_ORPHAN_DELAY", "100ms"),
    ("FAENA_GUARDIAN_INTERVAL", "500ms"),
];

impl Stage {
    async fn open(engine: Engine, environment: &[(&str, &str)]) -> Stage {
        let folder = tempfile::tempdir().unwrap();
        let database = match engine {
            Engine::Sqlite => None,
            Engine::Postgres => Some(Database::create().await),
        };
        let mut environment = environment.to_vec();
        if let Some(database) = &database {
            environment.push(("DATABASE_URL", &database.url));
        }
        let faena = Faena::start(folder.path(), &environment).await;
        Stage { faena, _folder: folder, _database: database }
    }

    async fn submit(&self, kind: &str) -> String {
        self.faena.submit(json!({"name": kind, "retryDelay": 100})).await
    }

    /// Waits until a job shows this.
    async fn job_shows(&self, id: &str, what: &str, shows: impl Fn(&Value) -> bool) -> Value {
        eventually(what, async || Some(self.faena.job(id).await).filter(&shows)).await
    }

    async fn worker_shows(&self, id: &str, what: &str, shows: impl Fn(&Value) -> bool) -> Value {
        eventually(what, async || {
            let (_, worker) = self.faena.get(&format!("/api/v1/workers/{id}")).await;
            shows(&worker).then_some(worker)
        })
        .await
    }

    /// A whole job went through, so whatever could have been handed out before was.
    async fn something_else_is_done(&self) {
        let id = self.faena.submit(json!({"name": "noop"})).await;
        self.faena.job_is(&id, "COMPLETED").await;
    }

    fn assert_no_panic(&self) {
        assert!(!self.faena.log().contains("panick"), "{}", self.faena.log());
    }
}

fn details<'a>(job: &'a Value, event: &str) -> Vec<&'a str> {
    let log = job["executionLog"].as_array().unwrap();
    log.iter().filter(|entry| entry["event"] == event).map(|entry| entry["details"].as_str().unwrap_or("")).collect()
}

async fn a_job_is_handed_over_done_and_its_result_stored<H: Hand>(engine: Engine) {
    let stage = Stage::open(engine, &QUICK).await;
    let mut hand = H::connect(&stage.faena, who("ada", &["mail"])).await;
    let id = stage.faena.submit(json!({"name": "mail", "payload": {"to": "grace", "n": 12_345_678_901_u64}})).await;
    let job = hand.next_job().await;
    assert_eq!((&job.id, job.kind.as_str(), job.queue.as_str(), job.retry_count), (&id, "mail", "default", 0));
    assert_eq!(job.payload, json!({"to": "grace", "n": 12_345_678_901_u64}));
    hand.started(&job).await.unwrap();
    hand.log(&job, "half way").await.unwrap();
    hand.complete(&job, json!({"sent": [1, 2]})).await.unwrap();
    let done = stage.faena.job_is(&id, "COMPLETED").await;
    assert_completed_once(&done);
    assert_eq!(
        (&done["result"], &done["workerId"], &done["run"]),
        (&json!({"sent": [1, 2]}), &json!(hand.id()), &json!(job.run))
    );
    assert_eq!(events(&done), ["created", "queued", "assigned", "started", "message", "completed"]);
    assert_eq!(details(&done, "message"), ["half way"]);
    let id = hand.id().to_owned();
    stage.worker_shows(&id, "one job done", |worker| worker["completed"] == 1 && worker["state"] == "Ready").await;
    hand.leave().await;
    let gone = stage.worker_shows(&id, "it has left", |worker| worker["state"] == "Terminated").await;
    assert!(!gone["endedAt"].is_null(), "{gone:#}");
    assert_ne!(gone["reason"], "lost", "{gone:#}");
    stage.assert_no_panic();
}

async fn a_failed_job_is_tried_again_and_one_that_is_not_retryable_is_not<H: Hand>(engine: Engine) {
    let stage = Stage::open(engine, &QUICK).await;
    let mut hand = H::connect(&stage.faena, who("ada", &["mail"])).await;
    let id = stage.submit("mail").await;
    let first = hand.next_job().await;
    hand.fail(&first, failure("the line is busy")).await.unwrap();
    let second = hand.next_job().await;
    assert_eq!((&second.id, second.retry_count), (&id, 1));
    assert!(second.run > first.run);
    hand.complete(&second, json!(null)).await.unwrap();
    let done = stage.faena.job_is(&id, "COMPLETED").await;
    assert_completed_once(&done);
    assert_eq!(done["retryCount"], 1);

    let id = stage.submit("mail").await;
    let job = hand.next_job().await;
    hand.fail(&job, Failure { retryable: Some(false), ..failure("no such address") }).await.unwrap();
    let failed = stage.faena.job_is(&id, "FAILED").await;
    assert_eq!(
        (&failed["error"], &failed["errorReason"], &failed["retryCount"]),
        (&json!("no such address"), &json!("error"), &json!(0))
    );
    stage.assert_no_panic();
}

async fn a_worker_that_says_when_to_come_again_is_heeded<H: Hand>(engine: Engine) {
    let stage = Stage::open(engine, &QUICK).await;
    let mut hand = H::connect(&stage.faena, who("ada", &["mail"])).await;
    let id = stage.faena.submit(json!({"name": "mail", "retryDelay": 3_600_000})).await;
    let first = hand.next_job().await;
    hand.fail(&first, Failure { retry_after_ms: Some(700), ..failure("429") }).await.unwrap();
    let second = hand.next_job().await;
    assert_eq!(second.id, id);
    hand.complete(&second, json!(1)).await.unwrap();
    let done = stage.faena.job_is(&id, "COMPLETED").await;
    let at = |event: &str, number: usize| -> jiff::Timestamp {
        let log = done["executionLog"].as_array().unwrap();
        let entry = log.iter().filter(|entry| entry["event"] == event).nth(number).unwrap();
        entry["timestamp"].as_str().unwrap().parse().unwrap()
    };
    let waited = at("assigned", 1).duration_since(at("failed", 0));
    assert!(waited.as_millis() >= 700, "it was handed out again after {waited}: {done:#}");
}

async fn the_job_of_a_worker_that_dies_is_done_by_another<H: Hand>(engine: Engine) {
    let stage = Stage::open(engine, &QUICK).await;
    let mut doomed = H::connect(&stage.faena, who("doomed", &["mail"])).await;
    let id = stage.submit("mail").await;
    let first = doomed.next_job().await;
    doomed.started(&first).await.unwrap();
    stage.faena.job_is(&id, "PROCESSING").await;
    let name = doomed.id().to_owned();
    doomed.cut().await;
    let orphan = stage.job_shows(&id, "it is orphaned", |job| job["retryCount"] == 1).await;
    assert_eq!(orphan["errorReason"], "orphaned", "{orphan:#}");
    assert!(["RETRYING", "QUEUED"].contains(&orphan["status"].as_str().unwrap()), "{orphan:#}");
    let lost = stage.worker_shows(&name, "it is lost", |worker| worker["state"] == "Terminated").await;
    assert!(!lost["reason"].is_null(), "{lost:#}");
    let mut other = H::connect(&stage.faena, who("other", &["mail"])).await;
    let second = other.next_job().await;
    assert!(second.id == id && second.run > first.run && second.retry_count == 1, "{second:?}");
    other.complete(&second, json!("by the other")).await.unwrap();
    let done = stage.faena.job_is(&id, "COMPLETED").await;
    assert_completed_once(&done);
    assert_eq!(done["workerId"], other.id());
    assert!(events(&done).contains(&"orphaned"), "{done:#}");
    stage.assert_no_panic();
}

async fn a_job_that_kills_each_of_its_workers_fails_as_orphaned<H: Hand>(engine: Engine) {
    let stage = Stage::open(engine, &QUICK).await;
    let id = stage.faena.submit(json!({"name": "poison", "maxRetries": 2})).await;
    let mut last_run = 0;
    for name in ["first", "second", "third"] {
        let mut hand = H::connect(&stage.faena, who(name, &["poison"])).await;
        let job = hand.next_job().await;
        assert!(job.run > last_run);
        last_run = job.run;
        hand.cut().await;
    }
    let failed = stage.faena.job_is(&id, "FAILED").await;
    assert_eq!((&failed["errorReason"], &failed["run"]), (&json!("orphaned"), &json!(last_run)), "{failed:#}");
    assert_eq!(events(&failed).iter().filter(|event| **event == "orphaned").count(), 3, "{failed:#}");
}

async fn a_worker_that_comes_back_in_time_has_its_jobs_still<H: Hand>(engine: Engine) {
    let stage = Stage::open(engine, &[("FAENA_WORKER_HEARTBEAT", "300ms"), ("FAENA_WORKER_SILENCE", "20s")]).await;
    let mut hand = H::connect(&stage.faena, who("ada", &["mail"])).await;
    let id = stage.submit("mail").await;
    let job = hand.next_job().await;
    hand.log(&job, "before").await.unwrap();
    stage.job_shows(&id, "it is told", |job| events(job).contains(&"message")).await;
    let life =
        stage.worker_shows(hand.id(), "it is busy", |worker| worker["state"] == "Busy").await["registrationId"].clone();
    hand.away(Away::Closed).await;
    if H::HAS_A_CONNECTION {
        stage.worker_shows(hand.id(), "it is known to be away", |worker| !worker["deadline"].is_null()).await;
    }
    assert_ne!(hand.back().await, Some(false));
    hand.log(&job, "after").await.unwrap();
    hand.complete(&job, json!("the same run")).await.unwrap();
    let done = stage.faena.job_is(&id, "COMPLETED").await;
    assert_completed_once(&done);
    assert_eq!((&done["run"], &done["retryCount"]), (&json!(job.run), &json!(0)));
    assert_eq!(details(&done, "message"), ["before", "after"]);
    assert_eq!(events(&done).iter().filter(|event| **event == "assigned").count(), 1, "{done:#}");
    let worker = stage.worker_shows(hand.id(), "it is ready", |worker| worker["state"] == "Ready").await;
    assert_eq!(worker["registrationId"], life, "it has one life");
    // And it gets more.
    let id = stage.submit("mail").await;
    let next = hand.next_job().await;
    assert_eq!(next.id, id);
    hand.complete(&next, json!(null)).await.unwrap();
    stage.faena.job_is(&id, "COMPLETED").await;
    stage.assert_no_panic();
}

async fn an_end_that_is_told_twice_counts_once_and_is_answered_twice<H: Hand>(engine: Engine) {
    let stage = Stage::open(engine, &[]).await;
    let mut hand = H::connect(&stage.faena, who("ada", &["mail"])).await;
    let id = stage.submit("mail").await;
    let job = hand.next_job().await;
    assert_eq!(hand.complete_twice(&job, json!({"n": 1})).await, [Ok(()), Ok(())]);
    let done = stage.faena.job_is(&id, "COMPLETED").await;
    assert_completed_once(&done);
    // Another job, so that whatever the repetition could spoil is spoiled by now.
    let id = stage.submit("mail").await;
    let next = hand.next_job().await;
    assert_eq!(next.id, id, "the first is not handed out again");
    hand.complete(&next, json!(null)).await.unwrap();
    stage.faena.job_is(&id, "COMPLETED").await;
    assert_eq!(stage.faena.job(&job.id).await, done);
    // The SDK's connection was cut while it had nothing in hand: its life began anew, and with it the count.
    let counted = if H::HEARS_ANSWERS { 2 } else { 1 };
    stage.worker_shows(hand.id(), "each job is counted once", |worker| worker["completed"] == counted).await;
    stage.assert_no_panic();
}

async fn a_report_that_comes_after_the_job_went_elsewhere_is_refused<H: Hand>(engine: Engine) {
    let stage = Stage::open(engine, &QUICK).await;
    let mut late = H::connect(&stage.faena, who("late", &["mail"])).await;
    let id = stage.submit("mail").await;
    let first = late.next_job().await;
    late.away(Away::Silent).await;
    stage.job_shows(&id, "its worker is taken for lost", |job| job["retryCount"] == 1).await;
    let mut other = H::connect(&stage.faena, who("other", &["mail"])).await;
    let second = other.next_job().await;
    assert_eq!(second.id, id);
    stage.faena.job_is(&id, "PROCESSING").await;
    assert_ne!(late.back().await, Some(true), "that life is over");
    let answer = late.complete(&first, json!("too late")).await;
    if H::HEARS_ANSWERS {
        assert_eq!(answer, Err("STALE_RUN".into()));
    }
    let refused = stage.job_shows(&id, "the refusal is in the log", |job| events(job).contains(&"stale_report")).await;
    assert_eq!((&refused["status"], &refused["run"]), (&json!("PROCESSING"), &json!(second.run)), "{refused:#}");
    other.complete(&second, json!("in time")).await.unwrap();
    let done = stage.faena.job_is(&id, "COMPLETED").await;
    assert_completed_once(&done);
    assert_eq!((&done["result"], &done["workerId"]), (&json!("in time"), &json!(other.id())));
    stage.assert_no_panic();
}

async fn a_worker_that_is_drained_gets_no_more_jobs_until_that_is_called_off<H: Hand>(engine: Engine) {
    let stage = Stage::open(engine, &QUICK).await;
    let mut hand = H::connect(&stage.faena, who("ada", &["mail"])).await;
    let running = stage.submit("mail").await;
    let first = hand.next_job().await;
    let drain = format!("/api/v1/workers/{}/drain", hand.id());
    let (status, answer) = stage.faena.post(&drain, json!({})).await;
    assert!(status.is_success(), "{answer}");
    stage.worker_shows(hand.id(), "it drains", |worker| worker["state"] == "Draining").await;
    let waiting = stage.submit("mail").await;
    stage.something_else_is_done().await;
    assert_eq!(stage.faena.job(&waiting).await["status"], "QUEUED");
    hand.log(&first, "goes on").await.unwrap();
    let answer = stage.faena.http.delete(format!("{}{drain}", stage.faena.url)).send().await.unwrap();
    assert!(answer.status().is_success());
    let second = hand.next_job().await;
    assert_eq!(second.id, waiting);
    hand.complete(&first, json!(null)).await.unwrap();
    stage.faena.job_is(&running, "COMPLETED").await;
    // Once more, and now what runs is finished.
    stage.faena.post(&drain, json!({})).await;
    stage.worker_shows(hand.id(), "it drains", |worker| worker["state"] == "Draining").await;
    hand.complete(&second, json!(null)).await.unwrap();
    assert_completed_once(&stage.faena.job_is(&waiting, "COMPLETED").await);
    let left = stage.submit("mail").await;
    stage.something_else_is_done().await;
    assert_eq!(stage.faena.job(&left).await["status"], "QUEUED");
    stage.assert_no_panic();
}

async fn a_cancelled_job_is_stopped_in_its_worker<H: Hand>(engine: Engine) {
    let stage = Stage::open(engine, &QUICK).await;
    let mut hand = H::connect(&stage.faena, who("ada", &["mail"])).await;
    let id = stage.submit("mail").await;
    let job = hand.next_job().await;
    let (status, answer) = stage.faena.post(&format!("/api/v1/jobs/{id}/cancel"), json!({})).await;
    assert!(status.is_success(), "{answer}");
    assert_eq!(answer["cancelRequested"], true, "{answer}");
    assert_eq!(hand.next_cancel().await, (id.clone(), job.run));
    hand.fail(&job, failure("stopped because it was told to")).await.unwrap();
    let cancelled = stage.faena.job_is(&id, "CANCELLED").await;
    assert_eq!(
        (&cancelled["errorReason"], &cancelled["retryCount"]),
        (&json!("cancelled"), &json!(0)),
        "{cancelled:#}"
    );
    assert!(events(&cancelled).contains(&"cancelled"), "{cancelled:#}");
}

async fn a_job_that_takes_too_long_is_stopped_and_tried_again<H: Hand>(engine: Engine) {
    let stage = Stage::open(engine, &QUICK).await;
    let mut hand = H::connect(&stage.faena, who("ada", &["slow"])).await;
    let id = stage.faena.submit(json!({"name": "slow", "timeoutMs": 700, "retryDelay": 100})).await;
    let first = hand.next_job().await;
    assert_eq!(hand.next_cancel().await, (id.clone(), first.run));
    let second = hand.next_job().await;
    assert!(second.id == id && second.run > first.run && second.retry_count == 1, "{second:?}");
    let answer = hand.complete(&first, json!("too late")).await;
    if H::HEARS_ANSWERS {
        assert_eq!(answer, Err("STALE_RUN".into()));
    }
    hand.complete(&second, json!("quick")).await.unwrap();
    let done = stage.faena.job_is(&id, "COMPLETED").await;
    assert_completed_once(&done);
    assert_eq!(done["result"], "quick");
    assert!(events(&done).contains(&"timeout"), "{done:#}");
}

async fn progress_is_seen_while_the_job_runs<H: Hand>(engine: Engine) {
    let stage = Stage::open(engine, &QUICK).await;
    let mut hand = H::connect(&stage.faena, who("ada", &["film"])).await;
    let id = stage.submit("film").await;
    let job = hand.next_job().await;
    for (percentage, phase) in [(25.0, "reading"), (75.5, "writing")] {
        let told = json!({"phase": phase, "percentage": percentage, "message": "on it"});
        hand.progress(&job, told).await.unwrap();
        let seen = stage.job_shows(&id, "its progress", |job| job["progress"]["phase"] == phase).await;
        assert_eq!((&seen["status"], &seen["progress"]["percentage"]), (&json!("PROCESSING"), &json!(percentage)));
        assert_eq!(seen["progress"]["message"], "on it");
    }
    hand.complete(&job, json!(null)).await.unwrap();
    stage.faena.job_is(&id, "COMPLETED").await;
}

async fn steps_that_a_dead_worker_has_finished_are_not_done_again<H: Hand>(engine: Engine) {
    let stage = Stage::open(engine, &QUICK).await;
    let id = stage.faena.submit(json!({"name": "pipeline"})).await;
    let mut doomed = H::connect(&stage.faena, who("doomed", &["pipeline"])).await;
    let job = doomed.next_job().await;
    for n in 1..=4 {
        let result = doomed.step(&job, &format!("E{n}"), json!({"by": "doomed", "n": n}), Some(9)).await.unwrap();
        assert_eq!(result["n"], n);
    }
    let seen = stage.job_shows(&id, "four steps", |job| job["progress"]["completedSteps"] == 4).await;
    assert_eq!(
        (&seen["progress"]["totalSteps"], &seen["progress"]["currentStep"]),
        (&json!(9), &json!("E4")),
        "{seen:#}"
    );
    doomed.cut().await;
    let mut other = H::connect(&stage.faena, who("other", &["pipeline"])).await;
    let job = other.next_job().await;
    assert_eq!((&job.id, job.retry_count), (&id, 1));
    let mut by = Vec::new();
    for n in 1..=9 {
        let result = other.step(&job, &format!("E{n}"), json!({"by": "other", "n": n}), Some(9)).await.unwrap();
        assert_eq!(result["n"], n);
        by.push(result["by"].as_str().unwrap().to_owned());
    }
    assert_eq!(by[..4], ["doomed"; 4]);
    assert_eq!(by[4..], ["other"; 5]);
    other.complete(&job, json!(by)).await.unwrap();
    let done = stage.faena.job_is(&id, "COMPLETED").await;
    assert_completed_once(&done);
    assert_eq!(events(&done).iter().filter(|event| **event == "step_completed").count(), 9, "{done:#}");
    assert_eq!(done["progress"]["completedSteps"], 9, "{done:#}");
}

async fn jobs_go_to_those_who_can_do_them_and_take_from_their_queue<H: Hand>(engine: Engine) {
    let stage = Stage::open(engine, &QUICK).await;
    let mut fast = H::connect(&stage.faena, who("fast", &["image.*"])).await;
    fast.leave().await;
    fast =
        H::connect(&stage.faena, crate::hands::Who { queues: vec!["fast"], ..who("fast-again", &["image.*"]) }).await;
    let mut plain = H::connect(&stage.faena, who("plain", &["mail"])).await;
    let image = stage.faena.submit(json!({"name": "image.crop", "queue": "fast"})).await;
    let mail = stage.faena.submit(json!({"name": "mail", "queue": "any"})).await;
    let slow = stage.faena.submit(json!({"name": "image.crop", "queue": "slow"})).await;
    let nobody = stage.faena.submit(json!({"name": "mailing"})).await;
    let job = fast.next_job().await;
    assert_eq!((&job.id, job.kind.as_str(), job.queue.as_str()), (&image, "image.crop", "fast"));
    fast.complete(&job, json!(null)).await.unwrap();
    let job = plain.next_job().await;
    assert_eq!((&job.id, job.queue.as_str()), (&mail, "any"));
    plain.complete(&job, json!(null)).await.unwrap();
    stage.faena.job_is(&image, "COMPLETED").await;
    stage.faena.job_is(&mail, "COMPLETED").await;
    for id in [&slow, &nobody] {
        assert_eq!(stage.faena.job(id).await["status"], "QUEUED");
    }
    let mut all = H::connect(&stage.faena, who("all", &["image.*", "mailing"])).await;
    let mut got = vec![all.next_job().await.id, all.next_job().await.id];
    let mut left = vec![slow, nobody];
    got.sort();
    left.sort();
    assert_eq!(got, left);
}

async fn a_worker_is_told_where_a_job_comes_from<H: Hand>(engine: Engine) {
    let stage = Stage::open(engine, &QUICK).await;
    let mut hand = H::connect(&stage.faena, who("ada", &["mail"])).await;
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let answer = stage
        .faena
        .http
        .post(format!("{}/api/v1/jobs", stage.faena.url))
        .header("x-correlation-id", "order-4711")
        .header("traceparent", trace)
        .json(&json!({"name": "mail"}))
        .send()
        .await
        .unwrap();
    assert!(answer.status().is_success());
    let job = hand.next_job().await;
    assert_eq!((job.correlation_id.as_str(), job.traceparent.as_deref()), ("order-4711", Some(trace)));
    hand.complete(&job, json!(null)).await.unwrap();
    assert_eq!(stage.faena.job_is(&job.id, "COMPLETED").await["correlationId"], "order-4711");
}

async fn a_worker_is_told_which_schedule_made_a_job<H: Hand>(engine: Engine) {
    let stage = Stage::open(engine, &QUICK).await;
    let mut hand = H::connect(&stage.faena, who("ada", &["mail"])).await;
    let (_, schedule) = stage
        .faena
        .post("/api/v1/schedules", json!({"name": "nightly", "intervalMs": 86_400_000, "jobName": "mail"}))
        .await;
    let id = schedule["id"].as_str().unwrap();
    let (_, answer) = stage.faena.post(&format!("/api/v1/schedules/{id}/trigger"), json!({})).await;
    let job = hand.next_job().await;
    let stored = stage.faena.job(answer["jobId"].as_str().unwrap()).await;
    let due = stored["scheduleDue"].as_str().unwrap().to_owned();
    assert_eq!((job.id.as_str(), job.schedule.clone()), (stored["id"].as_str().unwrap(), Some((id.to_owned(), due))));
    hand.complete(&job, json!(null)).await.unwrap();
}

async fn a_worker_gets_as_many_jobs_at_once_as_it_said<H: Hand>(engine: Engine) {
    let stage = Stage::open(engine, &QUICK).await;
    let mut hand = H::connect(&stage.faena, crate::hands::Who { concurrency: 3, ..who("ada", &["mail"]) }).await;
    for _ in 0..5 {
        stage.submit("mail").await;
    }
    let mut jobs = Vec::new();
    for _ in 0..3 {
        jobs.push(hand.next_job().await);
    }
    stage.something_else_is_done().await;
    assert_eq!(stage.faena.count("status=QUEUED").await, 2);
    for _ in 0..2 {
        let done = jobs.remove(0);
        hand.complete(&done, json!(null)).await.unwrap();
        jobs.push(hand.next_job().await);
    }
    for job in &jobs {
        hand.complete(job, json!(null)).await.unwrap();
    }
    stage.faena.everything_ended().await;
    assert_eq!(stage.faena.count("status=COMPLETED&type=mail").await, 5);
}

macro_rules! stories {
    ($($story:ident)*) => {
        stories!(@on websocket Frames<WebSocket>, Sqlite: $($story)*);
        stories!(@on grpc Frames<Grpc>, Sqlite: $($story)*);
        stories!(@on http Http, Sqlite: $($story)*);
        stories!(@on sdk Sdk, Sqlite: $($story)*);
        stories!(@on websocket_postgres Frames<WebSocket>, Postgres: $($story)*);
    };
    (@on $transport:ident $hand:ty, $engine:ident: $($story:ident)*) => {
        mod $transport {
            use super::*;
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $story() {
                    super::$story::<$hand>(Engine::$engine).await;
                }
            )*
        }
    };
}

stories! {
    a_job_is_handed_over_done_and_its_result_stored
    a_worker_is_told_which_schedule_made_a_job
    a_failed_job_is_tried_again_and_one_that_is_not_retryable_is_not
    a_worker_that_says_when_to_come_again_is_heeded
    the_job_of_a_worker_that_dies_is_done_by_another
    a_job_that_kills_each_of_its_workers_fails_as_orphaned
    a_worker_that_comes_back_in_time_has_its_jobs_still
    an_end_that_is_told_twice_counts_once_and_is_answered_twice
    a_report_that_comes_after_the_job_went_elsewhere_is_refused
    a_worker_that_is_drained_gets_no_more_jobs_until_that_is_called_off
    a_cancelled_job_is_stopped_in_its_worker
    a_job_that_takes_too_long_is_stopped_and_tried_again
    progress_is_seen_while_the_job_runs
    steps_that_a_dead_worker_has_finished_are_not_done_again
    jobs_go_to_those_who_can_do_them_and_take_from_their_queue
    a_worker_is_told_where_a_job_comes_from
    a_worker_gets_as_many_jobs_at_once_as_it_said
}

/// Seed 004: it knows `register`, `job`, `complete`, `fail` and `heartbeat`, and no run numbers.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_knows_only_the_five_first_frames_works() {
    use futures_util::{SinkExt, StreamExt};
    use tokio_tungstenite::tungstenite::Message;
    let settings =
        [("FAENA_ASSIGNED_TIMEOUT", "1s"), ("FAENA_WORKER_HEARTBEAT", "300ms"), ("FAENA_WORKER_SILENCE", "3s")];
    let stage = Stage::open(Engine::Sqlite, &settings).await;
    let url = format!("{}/api/v1/workers/connect", stage.faena.url.replacen("http", "ws", 1));
    let (mut socket, _) = tokio_tungstenite::connect_async(url).await.unwrap();
    let say = |frame: Value| Message::text(frame.to_string());
    socket.send(say(json!({"type": "register", "capabilities": ["mail"]}))).await.unwrap();
    let (quick, bad, long) = (
        stage.submit("mail").await,
        stage.faena.submit(json!({"name": "mail", "maxRetries": 0})).await,
        stage.submit("mail").await,
    );
    let talk = async {
        let mut given = Vec::new();
        while let Some(Ok(message)) = socket.next().await {
            let Message::Text(text) = message else { continue };
            let frame: Value = serde_json::from_str(&text).unwrap();
            match frame["type"].as_str().unwrap() {
                "heartbeat" => socket.send(say(json!({"type": "heartbeat"}))).await.unwrap(),
                "job" => {
                    let id = frame["job"]["id"].as_str().unwrap().to_owned();
                    given.push(id.clone());
                    if id == quick {
                        socket.send(say(json!({"type": "complete", "jobId": id, "result": {"n": 1}}))).await.unwrap();
                    } else if id == bad {
                        socket.send(say(json!({"type": "fail", "jobId": id, "error": "no"}))).await.unwrap();
                    }
                }
                "registered" | "ack" => assert_ne!(frame["ok"], false, "{frame}"),
                _ => {}
            }
            // The last one takes longer than an assigned job may wait for its start.
            let job = stage.faena.job(&long).await;
            let Some(started) = job["startedAt"].as_str() else { continue };
            let runs_since = jiff::Timestamp::now().duration_since(started.parse().unwrap());
            if given.contains(&long) && runs_since.as_millis() > 1_800 {
                socket.send(say(json!({"type": "complete", "jobId": long, "result": "done"}))).await.unwrap();
                return given;
            }
        }
        panic!("the connection was closed");
    };
    let given = in_time("the client does all three", talk).await;
    assert_eq!(given, [quick.clone(), bad.clone(), long.clone()], "each once");
    assert_completed_once(&stage.faena.job_is(&quick, "COMPLETED").await);
    assert_eq!(stage.faena.job_is(&bad, "FAILED").await["error"], "no");
    let done = stage.faena.job_is(&long, "COMPLETED").await;
    assert_completed_once(&done);
    assert_eq!((&done["retryCount"], &done["result"]), (&json!(0), &json!("done")));
    stage.assert_no_panic();
}

/// A claim may wait longer than a worker may be silent: while it waits it is there.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_waits_in_a_claim_is_not_silent() {
    let settings = [
        ("FAENA_WORKER_HEARTBEAT", "200ms"),
        ("FAENA_WORKER_SILENCE", "1s"),
        ("FAENA_GUARDIAN_INTERVAL", "200ms"),
        ("FAENA_RECONNECT_GRACE", "300ms"),
    ];
    let stage = Stage::open(Engine::Sqlite, &settings).await;
    let (_, answer) =
        stage.faena.post("/api/v1/workers/register", json!({"workerId": "ada", "capabilities": ["mail"]})).await;
    assert_eq!(answer["workerId"], "ada", "{answer}");
    let later = (jiff::Timestamp::now() + std::time::Duration::from_millis(2_500)).to_string();
    let id = stage.faena.submit(json!({"name": "mail", "scheduledAt": later})).await;
    let (status, claimed) = stage.faena.post("/api/v1/workers/ada/claim", json!({"waitMs": 15_000})).await;
    assert!(status.is_success(), "{claimed}");
    assert_eq!(claimed["jobs"][0]["id"], id.as_str(), "{claimed}");
}
