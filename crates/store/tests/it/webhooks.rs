//! Webhooks: written with the end of a job, taken by one sender at a time, never lost.

use std::collections::HashSet;

use faena_domain::{ErrorReason, JobId, JobState, NewJob, NodeId, Timestamp, WebhookId, WebhookState, WebhookView};
use faena_store::{
    AuditFilter, Delivery, Retention, RunOutcome, Signal, StoreError, WebhookFilter, WebhookNext, WebhookResult,
    WebhookTakeRequest, WebhookTaken,
};
use serde_json::{Value, json};

use crate::support::{Build, GRACE_PERIODS, World, cancelled, completed, failed};

const URL: &str = "https://example.org/hook?token=geheim";
const HOST: &str = "example.org:443";
const LEASE_MS: i64 = 30_000;

trait Hooked {
    fn hooked(self, url: &str) -> Self;
}

impl Hooked for NewJob {
    fn hooked(mut self, url: &str) -> Self {
        self.options.webhook_url = Some(url.into());
        self
    }
}

impl World {
    fn hooked(&self, ms: i64) -> NewJob {
        self.job("mail.send", ms).hooked(URL).retries(0)
    }

    async fn webhooks_of(&self, job: JobId) -> Vec<WebhookView> {
        let filter = WebhookFilter { job: Some(job), ..WebhookFilter::default() };
        self.store.webhook_list(filter, None, 100).await.unwrap()
    }

    async fn webhook_of(&self, job: JobId) -> WebhookView {
        let webhooks = self.webhooks_of(job).await;
        assert_eq!(webhooks.len(), 1, "one webhook of {job}");
        self.webhook(webhooks[0].id).await
    }

    async fn webhook(&self, id: WebhookId) -> WebhookView {
        self.store.webhook_get(id).await.unwrap().expect("the webhook is there")
    }

    /// The body of the webhook of this job, which must be due at `ms`.
    async fn body_of(&self, job: JobId, ms: i64) -> Value {
        let webhook = self.webhook_of(job).await;
        assert_eq!((webhook.state, webhook.due_at, webhook.attempts), (WebhookState::Waiting, Some(self.at(ms)), 0));
        assert_eq!((webhook.url.as_str(), webhook.created_at), (URL, self.at(ms)));
        let mut body: Value = serde_json::from_str(webhook.body.unwrap().get()).unwrap();
        let body_fields = body.as_object_mut().unwrap();
        assert_eq!(body_fields.remove("jobId"), Some(json!(job)));
        assert_eq!(body_fields.remove("jobType"), Some(json!("mail.send")));
        assert_eq!(body_fields.remove("completedAt"), Some(json!(self.at(ms))));
        body
    }

    fn ask(&self) -> WebhookTakeRequest {
        WebhookTakeRequest {
            node: self.node,
            limit: 100,
            per_host: 100,
            rooms: Vec::new(),
            allowed: 3,
            lease_ms: LEASE_MS,
        }
    }

    async fn take(&self, ms: i64) -> Vec<Delivery> {
        self.take_as(self.ask(), ms).await.deliveries
    }

    async fn take_as(&self, ask: WebhookTakeRequest, ms: i64) -> WebhookTaken {
        self.store.webhook_take(ask, self.at(ms)).await.unwrap()
    }

    async fn take_one(&self, ms: i64) -> Delivery {
        let mut taken = self.take(ms).await;
        assert_eq!(taken.len(), 1, "one webhook is due at {ms}");
        taken.remove(0)
    }

    async fn settle(&self, delivery: &Delivery, status: u16, next: WebhookNext, ms: i64) -> bool {
        let result = WebhookResult {
            id: delivery.id,
            number: delivery.number,
            attempt: delivery.attempt,
            allowed: 3,
            at: self.at(ms),
            took_ms: 12,
            status: Some(status),
            error: (status >= 300).then(|| format!("HTTP {status}")),
            answer: Some("so \0 what".into()),
            next,
        };
        self.store.webhook_settle(vec![result], self.at(ms)).await.unwrap()[0]
    }

    fn again(&self, ms: i64) -> WebhookNext {
        WebhookNext::Again { due_at: self.at(ms) }
    }

    /// A completed job and its webhook.
    async fn finish_job_with_webhook(&self, ms: i64) -> (JobId, WebhookId) {
        let job = self.running(self.hooked(ms)).await;
        self.complete(&job, ms).await;
        (job.id, self.webhook_of(job.id).await.id)
    }
}

// ---- every way to end

pub async fn the_webhook_of_a_completed_job_contains_its_result(world: &World) {
    let job = world.running(world.hooked(0)).await;
    let mut signals = world.store.signals();
    world.complete(&job, 7).await;
    assert_eq!(world.body_of(job.id, 7).await, json!({"status": "completed", "result": {"ok": true}}));
    let mut signalled = false;
    while let Ok(signal) = signals.try_recv() {
        signalled |= signal == Signal::Webhook;
    }
    assert!(signalled, "the sender is notified after the commit");
    let bare = world.running(world.hooked(8)).await;
    world.end(&bare, RunOutcome::Completed { result: None }, 9).await;
    assert_eq!(world.body_of(bare.id, 9).await, json!({"status": "completed"}));
}

pub async fn a_result_is_sent_byte_for_byte(world: &World) {
    let job = world.running(world.hooked(0)).await;
    let result = r#"{"n":12345678901234567890123,"x":1.0,"nul":"\u0000"}"#;
    world.end(&job, RunOutcome::Completed { result: Some(result.into()) }, 1).await;
    let body = world.webhook_of(job.id).await.body.unwrap();
    assert!(body.get().contains(result), "{}", body.get());
}

pub async fn the_webhook_of_a_failed_job_contains_its_error(world: &World) {
    let job = world.running(world.hooked(0)).await;
    world.end(&job, failed("said \"no\""), 7).await;
    assert_eq!(world.body_of(job.id, 7).await, json!({"status": "failed", "error": "said \"no\""}));
}

pub async fn a_job_cancelled_in_its_queue_sends_its_webhook(world: &World) {
    let id = world.submit(world.hooked(0)).await;
    let mut signals = world.store.signals();
    world.cancel(id, 7).await;
    assert_eq!(world.body_of(id, 7).await, json!({"status": "cancelled", "error": "not wanted"}));
    let mut signalled = false;
    while let Ok(signal) = signals.try_recv() {
        signalled |= signal == Signal::Webhook;
    }
    assert!(signalled);
}

pub async fn a_job_cancelled_in_flight_sends_its_webhook(world: &World) {
    let job = world.running(world.hooked(0)).await;
    world.cancel(job.id, 5).await;
    assert_eq!(world.webhooks_of(job.id).await.len(), 0, "it has not ended yet");
    world.end(&job, cancelled(), 7).await;
    assert_eq!(world.body_of(job.id, 7).await, json!({"status": "cancelled", "error": "as asked"}));
    // One that would have been retried.
    let job = world.running(world.hooked(10)).await;
    world.cancel(job.id, 11).await;
    world.end(&job, world.retry(99), 12).await;
    assert_eq!(world.body_of(job.id, 12).await["status"], "cancelled");
}

pub async fn an_expired_job_sends_its_webhook(world: &World) {
    let id = world.submit(world.hooked(0).expires(world.at(5))).await;
    world.promote(7).await;
    let body = world.body_of(id, 7).await;
    assert_eq!(body, json!({"status": "failed", "error": format!("expired at {}", world.at(5))}));
}

pub async fn a_job_without_a_handler_sends_its_webhook(world: &World) {
    let id = world.submit(world.hooked(0)).await;
    let lanes = world.lanes().await;
    assert_eq!(world.store.job_fail_unhandled(lanes, world.at(5), 10, world.at(7)).await.unwrap(), 1);
    assert_eq!(world.body_of(id, 7).await["status"], "failed");
}

pub async fn a_permanently_lost_job_sends_its_webhook(world: &World) {
    let worker = world.admit(world.worker("w"), 0).await;
    let id = world.submit(world.hooked(0)).await;
    assert_eq!(world.claim_by(&worker, 1, 1).await[0].id, id);
    world.lose(&worker, 0, 7).await;
    assert_eq!(world.state(id).await, JobState::Failed);
    assert_eq!(world.get(id).await.error_reason, Some(ErrorReason::Orphaned));
    assert_eq!(world.body_of(id, 7).await["status"], "failed");
}

pub async fn a_lost_job_with_a_cancel_request_sends_its_webhook(world: &World) {
    let worker = world.admit(world.worker("w"), 0).await;
    let id = world.submit(world.hooked(0)).await;
    world.claim_by(&worker, 1, 1).await;
    world.cancel(id, 2).await;
    world.lose(&worker, 0, 7).await;
    assert_eq!(world.body_of(id, 7).await, json!({"status": "cancelled", "error": "not wanted"}));
}

pub async fn a_cancelled_child_of_a_failed_parent_sends_its_webhook(world: &World) {
    let parent = world.running(world.job("a", 0).retries(0)).await;
    let id = world.submit(world.hooked(1).after(&[parent.id])).await;
    world.fail(&parent, 7).await;
    assert_eq!(world.body_of(id, 7).await["status"], "cancelled");
}

pub async fn a_job_cancelled_at_submit_sends_its_webhook(world: &World) {
    let parent = world.running(world.job("a", 0).retries(0)).await;
    world.fail(&parent, 1).await;
    let id = world.submit(world.hooked(7).after(&[parent.id])).await;
    assert_eq!(world.body_of(id, 7).await["status"], "cancelled");
}

pub async fn a_job_that_is_not_finished_sends_no_webhook(world: &World) {
    let id = world.submit(world.hooked(0).retries(3)).await;
    let job = world.claim_one(0).await;
    world.retry_at(&job, 5, 1).await;
    world.promote(5).await;
    let job = world.claim_one(6).await;
    world.hand_back(&job, 7).await;
    assert_eq!(world.webhooks_of(id).await.len(), 0);
    world.store.job_delete(id, None, world.at(99)).await.unwrap();
    assert_eq!(world.ledger.number("SELECT count(*) FROM webhook").await, 0, "to be deleted is not to end");
}

pub async fn a_job_without_a_webhook_url_sends_nothing(world: &World) {
    let job = world.running(world.job("a", 0)).await;
    world.complete(&job, 1).await;
    assert_eq!(world.ledger.number("SELECT count(*) FROM webhook").await, 0);
}

pub async fn a_repeated_end_sends_one_webhook(world: &World) {
    let job = world.running(world.hooked(0)).await;
    let end = world.an_end(&job, completed(), 1);
    assert!(world.report_end(end.clone()).await);
    assert!(world.report_end(end).await);
    world.webhook_of(job.id).await;
}

pub async fn a_retried_job_sends_another_webhook_when_it_ends(world: &World) {
    let job = world.running(world.hooked(0)).await;
    world.fail(&job, 1).await;
    world.retry_by_person(job.id, 2).await;
    world.promote(2).await;
    let again = world.claim_one(3).await;
    world.complete(&again, 4).await;
    let states: Vec<String> = {
        let mut statuses = Vec::new();
        for webhook in world.webhooks_of(job.id).await {
            let body = world.webhook(webhook.id).await.body.unwrap();
            statuses.push(serde_json::from_str::<Value>(body.get()).unwrap()["status"].as_str().unwrap().to_owned());
        }
        statuses
    };
    assert_eq!(states, ["completed", "failed"], "newest first");
}

// ---- sending

pub async fn a_delivery_has_everything_a_sender_needs(world: &World) {
    let mut job = world.hooked(0).correlation("order-7");
    job.options.traceparent = Some("00-trace".into());
    let job = world.running(job).await;
    world.complete(&job, 1).await;
    let taken = world.take_one(1).await;
    assert_eq!((taken.job, taken.url.as_str(), taken.host.as_str()), (job.id, URL, HOST));
    assert_eq!((taken.correlation_id.as_str(), taken.traceparent.as_deref()), ("order-7", Some("00-trace")));
    assert_eq!((taken.number, taken.attempt), (1, 1));
    assert_eq!(taken.body, world.webhook(taken.id).await.body.unwrap().get());
    let plain = world.finish_job_with_webhook(10).await;
    assert_eq!(world.take_one(10).await.correlation_id, plain.0.to_string(), "the job's id where it has none");
}

pub async fn a_webhook_is_sent_until_it_is_delivered(world: &World) {
    let (job, id) = world.finish_job_with_webhook(0).await;
    let first = world.take_one(5).await;
    let sending = world.webhook(id).await;
    assert_eq!((sending.state, sending.due_at), (WebhookState::Sending, Some(world.at(5 + LEASE_MS))));
    assert_eq!(world.take(6).await.len(), 0, "another sender has it");
    assert!(world.settle(&first, 500, world.again(1_000), 20).await);
    assert_eq!(world.take(999).await.len(), 0, "it waits for its time");
    assert_eq!(world.take_as(world.ask(), 998).await.next_at, Some(world.at(1_000)));
    let second = world.take_one(1_000).await;
    assert_eq!((second.id, second.number, second.attempt), (id, 2, 2));
    assert!(world.settle(&second, 200, WebhookNext::Delivered, 1_010).await);
    let over = world.webhook(id).await;
    assert_eq!((over.state, over.due_at, over.settled_at), (WebhookState::Delivered, None, Some(world.at(1_010))));
    let history: Vec<_> = over.history.iter().map(|one| (one.number, one.at, one.took_ms, one.status)).collect();
    assert_eq!(history, [(1, world.at(20), 12, Some(500)), (2, world.at(1_010), 12, Some(200))]);
    assert_eq!(over.history[0].error.as_deref(), Some("HTTP 500"));
    assert!(over.history[1].answer.as_ref().unwrap().starts_with("so "));
    let log: Vec<(String, String)> = world
        .get(job)
        .await
        .execution_log
        .into_iter()
        .filter(|entry| entry.event.as_str().starts_with("webhook"))
        .map(|entry| (entry.event.as_str().to_owned(), entry.details))
        .collect();
    let failed = format!("https://example.org/hook: HTTP 500, attempt 1 of 3; again at {}", world.at(1_000));
    let sent = "https://example.org/hook: HTTP 200 in 12 ms, attempt 2 of 3".to_owned();
    assert_eq!(log, [("webhook_failed".into(), failed), ("webhook_sent".into(), sent)]);
}

pub async fn the_outcome_of_a_webhook_follows_the_end_in_the_jobs_log(world: &World) {
    let (job, _) = world.finish_job_with_webhook(5).await;
    let taken = world.take_one(5).await;
    assert!(world.settle(&taken, 200, WebhookNext::Delivered, 5).await);
    assert_eq!(world.events(job).await[3..], ["started", "completed", "webhook_sent"], "in the same millisecond too");
}

pub async fn a_webhook_that_failed_too_often_is_settled(world: &World) {
    let (job, id) = world.finish_job_with_webhook(0).await;
    let taken = world.take_one(0).await;
    assert!(world.settle(&taken, 500, WebhookNext::Failed, 1).await);
    assert_eq!(world.take(i64::from(i32::MAX)).await.len(), 0);
    assert_eq!(world.webhook(id).await.state, WebhookState::Failed);
    let last = world.get(job).await.execution_log.pop().unwrap();
    assert_eq!(last.details, "https://example.org/hook: HTTP 500, attempt 1 of 3; abandoned");
}

pub async fn a_webhook_is_taken_by_one_sender_only(world: &World) {
    let jobs: Vec<NewJob> = (0..40).map(|n| world.hooked(0).hooked(&format!("http://host{}/", n % 4))).collect();
    let ids = world.submit_all(jobs).await;
    for job in world.claim(40, 0).await {
        world.complete(&job, 1).await;
    }
    let taken = futures_util::future::join_all((0..8).map(|_| {
        let ask = WebhookTakeRequest { node: NodeId::new(), limit: 3, ..world.ask() };
        world.take_as(ask, 2)
    }))
    .await;
    let all: Vec<WebhookId> = taken.iter().flat_map(|taken| taken.deliveries.iter().map(|one| one.id)).collect();
    assert_eq!(all.iter().collect::<HashSet<_>>().len(), all.len(), "none twice");
    let mut total = all.len();
    loop {
        let more = world.take_as(WebhookTakeRequest { limit: 3, ..world.ask() }, 3).await.deliveries.len();
        total += more;
        if more == 0 {
            break;
        }
    }
    assert_eq!(total, ids.len(), "and none is left out");
}

pub async fn a_slow_host_does_not_delay_other_hosts(world: &World) {
    let slow = (0..30).map(|_| world.hooked(0).hooked("http://slow/"));
    let good = (0..3).map(|_| world.hooked(0).hooked("http://good/"));
    world.submit_all(slow.chain(good).collect()).await;
    for job in world.claim(33, 0).await {
        world.complete(&job, 1).await;
    }
    let hosts = |taken: &WebhookTaken| -> Vec<String> {
        let mut hosts: Vec<String> = taken.deliveries.iter().map(|one| one.host.clone()).collect();
        hosts.sort();
        hosts
    };
    let ask = WebhookTakeRequest { limit: 4, per_host: 2, ..world.ask() };
    assert_eq!(hosts(&world.take_as(ask.clone(), 2).await), ["good:80", "good:80", "slow:80", "slow:80"]);
    let full = WebhookTakeRequest { rooms: vec![("slow:80".into(), 0), ("else:1".into(), 0)], ..ask };
    assert_eq!(hosts(&world.take_as(full.clone(), 3).await), ["good:80"]);
    assert_eq!(hosts(&world.take_as(full, 4).await), Vec::<String>::new());
    let one = WebhookTakeRequest { rooms: vec![("slow:80".into(), 1)], ..world.ask() };
    assert_eq!(hosts(&world.take_as(one, 5).await), ["slow:80"]);
    assert_eq!(world.ledger.number("SELECT max(attempts) FROM webhook").await, 1, "waiting costs no attempt");
}

pub async fn the_longest_due_webhook_is_sent_first(world: &World) {
    let (_, late) = world.finish_job_with_webhook(0).await;
    let taken = world.take_one(0).await;
    world.settle(&taken, 500, world.again(100), 1).await;
    let (_, early) = world.finish_job_with_webhook(50).await;
    let ids = |taken: Vec<Delivery>| taken.into_iter().map(|one| one.id).collect::<Vec<_>>();
    assert_eq!(ids(world.take(200).await), [early, late]);
}

// ---- senders die

pub async fn a_webhook_whose_sender_died_is_sent_by_another(world: &World) {
    let (_, id) = world.finish_job_with_webhook(0).await;
    let lost = world.take_one(0).await;
    assert_eq!(world.take(LEASE_MS - 1).await.len(), 0, "not early");
    let other = WebhookTakeRequest { node: NodeId::new(), ..world.ask() };
    let mut again = world.take_as(other, LEASE_MS).await.deliveries;
    let again = again.remove(0);
    assert_eq!((again.id, again.number, again.attempt), (id, 2, 2));
    assert!(!world.settle(&lost, 200, WebhookNext::Delivered, LEASE_MS + 1).await, "too late");
    assert!(world.settle(&again, 200, WebhookNext::Delivered, LEASE_MS + 2).await);
    assert!(!world.settle(&again, 500, WebhookNext::Failed, LEASE_MS + 3).await, "reported twice");
    let history = world.webhook(id).await.history;
    assert_eq!(history.len(), 2);
    assert_eq!((history[0].number, history[0].status), (1, None));
    assert!(history[0].error.as_ref().unwrap().contains("no outcome was reported"), "{:?}", history[0]);
}

pub async fn webhooks_of_a_dead_sender_are_due_immediately(world: &World) {
    let (_, first) = world.finish_job_with_webhook(0).await;
    let dead = WebhookTakeRequest { node: NodeId::new(), ..world.ask() };
    assert_eq!(world.take_as(dead, 0).await.deliveries.len(), 1);
    let (_, second) = world.finish_job_with_webhook(1).await;
    assert_eq!(world.take_one(1).await.id, second);
    world.recover(0, 5).await;
    assert_eq!(world.take_one(5).await.id, first, "and that of a living one is not touched");
    world.store.node_leave(world.node, GRACE_PERIODS, world.at(6)).await.unwrap();
    assert_eq!(world.take(6).await.len(), 2, "nor does one that takes leave keep anything");
}

pub async fn dying_senders_do_not_use_up_the_last_attempt_up_to_a_limit(world: &World) {
    let (job, id) = world.finish_job_with_webhook(0).await;
    let mut now = 0;
    for number in 1..=4 {
        let ask = WebhookTakeRequest { allowed: 1, ..world.ask() };
        let taken = world.take_as(ask, now).await.deliveries;
        assert_eq!(taken.iter().map(|one| one.number).collect::<Vec<_>>(), [number]);
        now += LEASE_MS;
    }
    let ask = WebhookTakeRequest { allowed: 1, ..world.ask() };
    assert_eq!(world.take_as(ask, now).await.deliveries.len(), 0);
    let over = world.webhook(id).await;
    assert_eq!((over.state, over.attempts, over.history.len()), (WebhookState::Failed, 4, 4));
    assert_eq!(over.settled_at, Some(world.at(now)));
    assert_eq!(world.events(job).await.pop(), Some("webhook_failed"));
}

// ---- actions

pub async fn a_settled_webhook_can_be_redelivered(world: &World) {
    let (job, id) = world.finish_job_with_webhook(0).await;
    let taken = world.take_one(0).await;
    for (at, state) in [(1, "WAITING"), (3, "SENDING")] {
        if at == 1 {
            world.settle(&taken, 500, world.again(2), 1).await;
        } else {
            world.take_one(2).await;
        }
        let refused = world.store.webhook_redeliver(id, "ana", world.at(at)).await;
        let Err(StoreError::Conflict { message, .. }) = refused else { panic!("{refused:?}") };
        assert!(message.contains(state), "{message}");
    }
    let second = Delivery { number: 2, ..taken };
    assert!(world.settle(&second, 500, WebhookNext::Failed, 4).await);
    assert_eq!(world.store.webhook_redeliver(id, "ana", world.at(5)).await.unwrap(), Some(job));
    let again = world.take_one(5).await;
    assert_eq!((again.number, again.attempt), (3, 1), "with new attempts, in the same history");
    assert!(world.settle(&again, 200, WebhookNext::Delivered, 6).await);
    assert_eq!(world.store.webhook_redeliver(id, "ana", world.at(7)).await.unwrap(), Some(job), "a delivered one too");
    assert_eq!(world.webhook(id).await.settled_at, None);
    assert_eq!(world.store.webhook_redeliver(WebhookId::new(), "ana", world.at(8)).await.unwrap(), None);
    let audit = world.store.audit_list(AuditFilter::default(), 10).await.unwrap();
    assert_eq!(audit.len(), 2, "what was refused did not happen");
    assert_eq!((audit[1].actor.as_str(), audit[1].action.as_str()), ("ana", "webhook.redeliver"));
    assert_eq!((audit[1].target.clone(), audit[1].at, audit[1].count), (id.to_string(), world.at(5), 1));
    let details = json!({"jobId": job, "url": "https://example.org/hook", "was": "FAILED"});
    assert_eq!(audit[1].details, details);
}

pub async fn webhooks_are_found_by_state_job_and_host(world: &World) {
    let (first, _) = world.finish_job_with_webhook(0).await;
    let taken = world.take_one(0).await;
    world.settle(&taken, 500, WebhookNext::Failed, 1).await;
    let (second, _) = world.finish_job_with_webhook(2).await;
    let third = world.running(world.hooked(3).hooked("http://else:81/")).await;
    world.complete(&third, 4).await;
    let find = async |filter: WebhookFilter| -> Vec<JobId> {
        let found = world.store.webhook_list(filter, None, 10).await.unwrap();
        assert!(found.iter().all(|one| one.body.is_none() && one.history.is_empty()));
        found.into_iter().map(|one| one.job_id).collect()
    };
    let all = WebhookFilter::default();
    assert_eq!(find(all.clone()).await, [third.id, second, first], "newest first");
    assert_eq!(find(WebhookFilter { job: Some(second), ..all.clone() }).await, [second]);
    assert_eq!(find(WebhookFilter { host: Some("else:81".into()), ..all.clone() }).await, [third.id]);
    let failed = WebhookFilter { state: Some(WebhookState::Failed), ..all.clone() };
    assert_eq!(find(failed.clone()).await, [first]);
    assert_eq!(find(WebhookFilter { host: Some("else:81".into()), ..failed }).await, []);
    let page = world.store.webhook_list(all.clone(), None, 2).await.unwrap();
    let rest = world.store.webhook_list(all, Some(page[1].id), 2).await.unwrap();
    assert_eq!(rest.iter().map(|one| one.job_id).collect::<Vec<_>>(), [first]);
    let counts = world.store.webhook_counts().await.unwrap();
    assert_eq!(counts, [(WebhookState::Waiting, 2), (WebhookState::Sending, 0), (WebhookState::Failed, 1)]);
}

// ---- deleting

pub async fn a_deleted_job_takes_its_settled_webhooks_along(world: &World) {
    let (job, id) = world.finish_job_with_webhook(0).await;
    let taken = world.take_one(0).await;
    world.settle(&taken, 200, WebhookNext::Delivered, 1).await;
    world.store.job_delete(job, None, world.at(99)).await.unwrap();
    assert!(world.store.webhook_get(id).await.unwrap().is_none());
    assert_eq!(world.ledger.number("SELECT count(*) FROM webhook_attempt").await, 0);
}

pub async fn a_webhook_still_to_be_delivered_survives_its_job(world: &World) {
    const DAY_MS: i64 = 24 * 3_600_000;
    let prune = async |ms| world.store.job_prune(&Retention::default(), 100, world.at(ms)).await.unwrap();
    let (deleted, _) = world.finish_job_with_webhook(0).await;
    world.store.job_delete(deleted, None, world.at(99)).await.unwrap();
    let (pruned, _) = world.finish_job_with_webhook(5).await;
    assert_eq!(prune(8 * DAY_MS).await, 1);
    assert!(world.store.job_get(pruned).await.unwrap().is_none());
    let taken = world.take(8 * DAY_MS).await;
    assert_eq!(taken.iter().map(|one| one.job).collect::<Vec<_>>(), [deleted, pruned]);
    for delivery in &taken {
        assert!(world.settle(delivery, 200, WebhookNext::Delivered, 8 * DAY_MS + 1).await);
    }
    assert_eq!(world.ledger.number("SELECT count(*) FROM job_log").await, 0, "no log is left to write into");
    prune(38 * DAY_MS).await;
    assert_eq!(world.ledger.number("SELECT count(*) FROM webhook").await, 2);
    prune(38 * DAY_MS + 2).await;
    assert_eq!(world.ledger.number("SELECT count(*) FROM webhook").await, 0, "nor do they stay for ever");
    assert_eq!(world.ledger.number("SELECT count(*) FROM webhook_attempt").await, 0);
}

pub async fn a_pruned_job_takes_its_settled_webhooks_along(world: &World) {
    let (_, id) = world.finish_job_with_webhook(0).await;
    let taken = world.take_one(0).await;
    world.settle(&taken, 200, WebhookNext::Delivered, 1).await;
    let later: Timestamp = world.at(8 * 24 * 3_600_000);
    assert_eq!(world.store.job_prune(&Retention::default(), 100, later).await.unwrap(), 1);
    assert!(world.store.webhook_get(id).await.unwrap().is_none());
}
