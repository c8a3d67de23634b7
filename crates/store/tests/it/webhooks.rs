//! Webhooks: written in the transaction that ends a job, sent by one node at a time, never lost.

use std::collections::HashSet;

use faena_domain::{
    ErrorReason, JobId, JobState, NewJob, NodeId, Timestamp, WebhookId, WebhookState, WebhookSubject, WebhookView,
};
use faena_store::{
    AuditFilter, Delivery, Retention, RunOutcome, Signal, StoreError, WebhookFilter, WebhookNext, WebhookResult,
    WebhookTakeRequest, WebhookTaken,
};
use serde_json::{Value, json};

use crate::support::{Fixture, GRACE_PERIODS, JobBuilder, cancelled, completed, failed};

const URL: &str = "https://example.org/hook?token=s3cret";
const HOST: &str = "example.org:443";
const LEASE_MS: i64 = 30_000;

trait WithWebhook {
    fn with_webhook(self, url: &str) -> Self;
}

impl WithWebhook for NewJob {
    fn with_webhook(mut self, url: &str) -> Self {
        self.options.webhook_url = Some(url.into());
        self
    }
}

impl Fixture {
    fn job_with_webhook(&self, ms: i64) -> NewJob {
        self.job("mail.send", ms).with_webhook(URL).retries(0)
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
        self.store.webhook_get(id).await.unwrap().expect("the webhook exists")
    }

    /// Returns the body of the webhook of this job, without the fields that every webhook has. The webhook must be due
    /// at `ms`.
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

    fn take_request(&self) -> WebhookTakeRequest {
        WebhookTakeRequest {
            node: self.node,
            limit: 100,
            per_host: 100,
            host_capacities: Vec::new(),
            allowed: 3,
            lease_ms: LEASE_MS,
        }
    }

    async fn take(&self, ms: i64) -> Vec<Delivery> {
        self.take_as(self.take_request(), ms).await.deliveries
    }

    async fn take_as(&self, request: WebhookTakeRequest, ms: i64) -> WebhookTaken {
        self.store.webhook_take(request, self.at(ms)).await.unwrap()
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
            answer: Some("not \0 found".into()),
            next,
        };
        self.store.webhook_settle(vec![result], self.at(ms)).await.unwrap()[0]
    }

    fn retry_later(&self, ms: i64) -> WebhookNext {
        WebhookNext::Again { due_at: self.at(ms) }
    }

    /// Completes a job with a webhook URL. Returns the job and its webhook.
    async fn finish_job_with_webhook(&self, ms: i64) -> (JobId, WebhookId) {
        let job = self.submit_and_claim(self.job_with_webhook(ms)).await;
        self.complete(&job, ms).await;
        (job.id, self.webhook_of(job.id).await.id)
    }
}

// ---- every end of a job

pub async fn the_webhook_of_a_completed_job_contains_its_result(fixture: &Fixture) {
    let job = fixture.submit_and_claim(fixture.job_with_webhook(0)).await;
    let mut signals = fixture.store.signals();
    fixture.complete(&job, 7).await;
    assert_eq!(fixture.body_of(job.id, 7).await, json!({"status": "completed", "result": {"ok": true}}));
    let mut signalled = false;
    while let Ok(signal) = signals.try_recv() {
        signalled |= signal == Signal::Webhook;
    }
    assert!(signalled, "the sender is notified after the commit");
    let bare = fixture.submit_and_claim(fixture.job_with_webhook(8)).await;
    fixture.end(&bare, RunOutcome::Completed { result: None }, 9).await;
    assert_eq!(fixture.body_of(bare.id, 9).await, json!({"status": "completed"}));
}

pub async fn a_result_is_sent_byte_for_byte(fixture: &Fixture) {
    let job = fixture.submit_and_claim(fixture.job_with_webhook(0)).await;
    let result = r#"{"n":12345678901234567890123,"x":1.0,"nul":"\u0000"}"#;
    fixture.end(&job, RunOutcome::Completed { result: Some(result.into()) }, 1).await;
    let body = fixture.webhook_of(job.id).await.body.unwrap();
    assert!(body.get().contains(result), "{}", body.get());
}

pub async fn the_webhook_of_a_failed_job_contains_its_error(fixture: &Fixture) {
    let job = fixture.submit_and_claim(fixture.job_with_webhook(0)).await;
    fixture.end(&job, failed("said \"no\""), 7).await;
    assert_eq!(fixture.body_of(job.id, 7).await, json!({"status": "failed", "error": "said \"no\""}));
}

pub async fn a_job_cancelled_in_its_queue_sends_its_webhook(fixture: &Fixture) {
    let id = fixture.submit(fixture.job_with_webhook(0)).await;
    let mut signals = fixture.store.signals();
    fixture.cancel(id, 7).await;
    assert_eq!(fixture.body_of(id, 7).await, json!({"status": "cancelled", "error": "not wanted"}));
    let mut signalled = false;
    while let Ok(signal) = signals.try_recv() {
        signalled |= signal == Signal::Webhook;
    }
    assert!(signalled);
}

pub async fn a_job_cancelled_in_flight_sends_its_webhook(fixture: &Fixture) {
    let job = fixture.submit_and_claim(fixture.job_with_webhook(0)).await;
    fixture.cancel(job.id, 5).await;
    assert_eq!(fixture.webhooks_of(job.id).await.len(), 0, "it has not ended yet");
    fixture.end(&job, cancelled(), 7).await;
    assert_eq!(fixture.body_of(job.id, 7).await, json!({"status": "cancelled", "error": "as requested"}));
    // A job that would have been retried is cancelled instead.
    let job = fixture.submit_and_claim(fixture.job_with_webhook(10)).await;
    fixture.cancel(job.id, 11).await;
    fixture.end(&job, fixture.retry(99), 12).await;
    assert_eq!(fixture.body_of(job.id, 12).await["status"], "cancelled");
}

pub async fn an_expired_job_sends_its_webhook(fixture: &Fixture) {
    let id = fixture.submit(fixture.job_with_webhook(0).expires(fixture.at(5))).await;
    fixture.promote(7).await;
    let body = fixture.body_of(id, 7).await;
    assert_eq!(body, json!({"status": "failed", "error": format!("expired at {}", fixture.at(5))}));
}

pub async fn a_job_without_a_handler_sends_its_webhook(fixture: &Fixture) {
    let id = fixture.submit(fixture.job_with_webhook(0)).await;
    let lanes = fixture.lanes().await;
    assert_eq!(fixture.store.job_fail_unhandled(lanes, fixture.at(5), 10, fixture.at(7)).await.unwrap(), 1);
    assert_eq!(fixture.body_of(id, 7).await["status"], "failed");
}

pub async fn a_permanently_lost_job_sends_its_webhook(fixture: &Fixture) {
    let worker = fixture.admit(fixture.worker("w"), 0).await;
    let id = fixture.submit(fixture.job_with_webhook(0)).await;
    assert_eq!(fixture.claim_by(&worker, 1, 1).await[0].id, id);
    fixture.end_as_lost(&worker, 0, 7).await;
    assert_eq!(fixture.state(id).await, JobState::Failed);
    assert_eq!(fixture.get(id).await.error_reason, Some(ErrorReason::Orphaned));
    assert_eq!(fixture.body_of(id, 7).await["status"], "failed");
}

pub async fn a_lost_job_with_a_cancel_request_sends_its_webhook(fixture: &Fixture) {
    let worker = fixture.admit(fixture.worker("w"), 0).await;
    let id = fixture.submit(fixture.job_with_webhook(0)).await;
    fixture.claim_by(&worker, 1, 1).await;
    fixture.cancel(id, 2).await;
    fixture.end_as_lost(&worker, 0, 7).await;
    assert_eq!(fixture.body_of(id, 7).await, json!({"status": "cancelled", "error": "not wanted"}));
}

pub async fn a_cancelled_child_of_a_failed_parent_sends_its_webhook(fixture: &Fixture) {
    let parent = fixture.submit_and_claim(fixture.job("a", 0).retries(0)).await;
    let id = fixture.submit(fixture.job_with_webhook(1).after(&[parent.id])).await;
    fixture.fail(&parent, 7).await;
    assert_eq!(fixture.body_of(id, 7).await["status"], "cancelled");
}

pub async fn a_job_cancelled_at_submit_sends_its_webhook(fixture: &Fixture) {
    let parent = fixture.submit_and_claim(fixture.job("a", 0).retries(0)).await;
    fixture.fail(&parent, 1).await;
    let id = fixture.submit(fixture.job_with_webhook(7).after(&[parent.id])).await;
    assert_eq!(fixture.body_of(id, 7).await["status"], "cancelled");
}

pub async fn a_job_that_is_not_finished_sends_no_webhook(fixture: &Fixture) {
    let id = fixture.submit(fixture.job_with_webhook(0).retries(3)).await;
    let job = fixture.claim_one(0).await;
    fixture.retry_at(&job, 5, 1).await;
    fixture.promote(5).await;
    let job = fixture.claim_one(6).await;
    fixture.release(&job, 7).await;
    assert_eq!(fixture.webhooks_of(id).await.len(), 0);
    fixture.store.job_delete(id, None, fixture.at(99)).await.unwrap();
    assert_eq!(fixture.database.number("SELECT count(*) FROM webhook").await, 0, "a deleted job has not ended");
}

pub async fn a_job_without_a_webhook_url_sends_nothing(fixture: &Fixture) {
    let job = fixture.submit_and_claim(fixture.job("a", 0)).await;
    fixture.complete(&job, 1).await;
    assert_eq!(fixture.database.number("SELECT count(*) FROM webhook").await, 0);
}

pub async fn a_repeated_end_sends_one_webhook(fixture: &Fixture) {
    let job = fixture.submit_and_claim(fixture.job_with_webhook(0)).await;
    let end = fixture.run_end(&job, completed(), 1);
    assert!(fixture.report_end(end.clone()).await);
    assert!(fixture.report_end(end).await);
    fixture.webhook_of(job.id).await;
}

pub async fn a_retried_job_sends_another_webhook_when_it_ends(fixture: &Fixture) {
    let job = fixture.submit_and_claim(fixture.job_with_webhook(0)).await;
    fixture.fail(&job, 1).await;
    fixture.retry_manually(job.id, 2).await;
    fixture.promote(2).await;
    let reclaimed = fixture.claim_one(3).await;
    fixture.complete(&reclaimed, 4).await;
    let states: Vec<String> = {
        let mut statuses = Vec::new();
        for webhook in fixture.webhooks_of(job.id).await {
            let body = fixture.webhook(webhook.id).await.body.unwrap();
            statuses.push(serde_json::from_str::<Value>(body.get()).unwrap()["status"].as_str().unwrap().to_owned());
        }
        statuses
    };
    assert_eq!(states, ["completed", "failed"], "newest first");
}

// ---- sending

pub async fn a_delivery_has_everything_a_sender_needs(fixture: &Fixture) {
    let mut job = fixture.job_with_webhook(0).correlation("order-7");
    job.options.traceparent = Some("00-trace".into());
    let job = fixture.submit_and_claim(job).await;
    fixture.complete(&job, 1).await;
    let taken = fixture.take_one(1).await;
    assert_eq!((taken.subject.job(), taken.url.as_str(), taken.host.as_str()), (Some(job.id), URL, HOST));
    assert_eq!((taken.correlation_id.as_str(), taken.traceparent.as_deref()), ("order-7", Some("00-trace")));
    assert_eq!((taken.number, taken.attempt), (1, 1));
    assert_eq!(taken.body, fixture.webhook(taken.id).await.body.unwrap().get());
    let plain = fixture.finish_job_with_webhook(10).await;
    assert_eq!(fixture.take_one(10).await.correlation_id, plain.0.to_string(), "the job's id by default");
}

pub async fn a_webhook_is_sent_until_it_is_delivered(fixture: &Fixture) {
    let (job, id) = fixture.finish_job_with_webhook(0).await;
    let first = fixture.take_one(5).await;
    let sending = fixture.webhook(id).await;
    assert_eq!((sending.state, sending.due_at), (WebhookState::Sending, Some(fixture.at(5 + LEASE_MS))));
    assert_eq!(fixture.take(6).await.len(), 0, "another sender has it");
    assert!(fixture.settle(&first, 500, fixture.retry_later(1_000), 20).await);
    assert_eq!(fixture.take(999).await.len(), 0, "it waits for its time");
    assert_eq!(fixture.take_as(fixture.take_request(), 998).await.next_at, Some(fixture.at(1_000)));
    let second = fixture.take_one(1_000).await;
    assert_eq!((second.id, second.number, second.attempt), (id, 2, 2));
    assert!(fixture.settle(&second, 200, WebhookNext::Delivered, 1_010).await);
    let settled = fixture.webhook(id).await;
    assert_eq!(
        (settled.state, settled.due_at, settled.settled_at),
        (WebhookState::Delivered, None, Some(fixture.at(1_010)))
    );
    let history: Vec<_> =
        settled.history.iter().map(|attempt| (attempt.number, attempt.at, attempt.took_ms, attempt.status)).collect();
    assert_eq!(history, [(1, fixture.at(20), 12, Some(500)), (2, fixture.at(1_010), 12, Some(200))]);
    assert_eq!(settled.history[0].error.as_deref(), Some("HTTP 500"));
    assert!(settled.history[1].answer.as_ref().unwrap().starts_with("not "));
    let log: Vec<(String, String)> = fixture
        .get(job)
        .await
        .execution_log
        .into_iter()
        .filter(|entry| entry.event.as_str().starts_with("webhook"))
        .map(|entry| (entry.event.as_str().to_owned(), entry.details))
        .collect();
    let failed = format!("https://example.org/hook: HTTP 500, attempt 1 of 3; again at {}", fixture.at(1_000));
    let sent = "https://example.org/hook: HTTP 200 in 12 ms, attempt 2 of 3".to_owned();
    assert_eq!(log, [("webhook_failed".into(), failed), ("webhook_sent".into(), sent)]);
}

pub async fn the_outcome_of_a_webhook_follows_the_end_in_the_jobs_log(fixture: &Fixture) {
    let (job, _) = fixture.finish_job_with_webhook(5).await;
    let taken = fixture.take_one(5).await;
    assert!(fixture.settle(&taken, 200, WebhookNext::Delivered, 5).await);
    assert_eq!(fixture.events(job).await[3..], ["started", "completed", "webhook_sent"], "in the same millisecond too");
}

pub async fn a_webhook_that_failed_too_often_is_settled(fixture: &Fixture) {
    let (job, id) = fixture.finish_job_with_webhook(0).await;
    let taken = fixture.take_one(0).await;
    assert!(fixture.settle(&taken, 500, WebhookNext::Failed, 1).await);
    assert_eq!(fixture.take(i64::from(i32::MAX)).await.len(), 0);
    assert_eq!(fixture.webhook(id).await.state, WebhookState::Failed);
    let last = fixture.get(job).await.execution_log.pop().unwrap();
    assert_eq!(last.details, "https://example.org/hook: HTTP 500, attempt 1 of 3; abandoned");
}

pub async fn a_webhook_is_taken_by_one_sender_only(fixture: &Fixture) {
    let jobs: Vec<NewJob> =
        (0..40).map(|n| fixture.job_with_webhook(0).with_webhook(&format!("http://host{}/", n % 4))).collect();
    let ids = fixture.submit_all(jobs).await;
    for job in fixture.claim(40, 0).await {
        fixture.complete(&job, 1).await;
    }
    let taken = futures_util::future::join_all((0..8).map(|_| {
        let request = WebhookTakeRequest { node: NodeId::new(), limit: 3, ..fixture.take_request() };
        fixture.take_as(request, 2)
    }))
    .await;
    let all: Vec<WebhookId> =
        taken.iter().flat_map(|taken| taken.deliveries.iter().map(|delivery| delivery.id)).collect();
    assert_eq!(all.iter().collect::<HashSet<_>>().len(), all.len(), "no webhook is taken twice");
    let mut total = all.len();
    loop {
        let more = fixture.take_as(WebhookTakeRequest { limit: 3, ..fixture.take_request() }, 3).await.deliveries.len();
        total += more;
        if more == 0 {
            break;
        }
    }
    assert_eq!(total, ids.len(), "every webhook is taken");
}

pub async fn a_slow_host_does_not_delay_other_hosts(fixture: &Fixture) {
    let slow = (0..30).map(|_| fixture.job_with_webhook(0).with_webhook("http://slow/"));
    let good = (0..3).map(|_| fixture.job_with_webhook(0).with_webhook("http://good/"));
    fixture.submit_all(slow.chain(good).collect()).await;
    for job in fixture.claim(33, 0).await {
        fixture.complete(&job, 1).await;
    }
    let hosts = |taken: &WebhookTaken| -> Vec<String> {
        let mut hosts: Vec<String> = taken.deliveries.iter().map(|delivery| delivery.host.clone()).collect();
        hosts.sort();
        hosts
    };
    let request = WebhookTakeRequest { limit: 4, per_host: 2, ..fixture.take_request() };
    assert_eq!(hosts(&fixture.take_as(request.clone(), 2).await), ["good:80", "good:80", "slow:80", "slow:80"]);
    let full = WebhookTakeRequest { host_capacities: vec![("slow:80".into(), 0), ("else:1".into(), 0)], ..request };
    assert_eq!(hosts(&fixture.take_as(full.clone(), 3).await), ["good:80"]);
    assert_eq!(hosts(&fixture.take_as(full, 4).await), Vec::<String>::new());
    let one = WebhookTakeRequest { host_capacities: vec![("slow:80".into(), 1)], ..fixture.take_request() };
    assert_eq!(hosts(&fixture.take_as(one, 5).await), ["slow:80"]);
    assert_eq!(fixture.database.number("SELECT max(attempts) FROM webhook").await, 1, "waiting costs no attempt");
}

pub async fn the_longest_due_webhook_is_sent_first(fixture: &Fixture) {
    let (_, late) = fixture.finish_job_with_webhook(0).await;
    let taken = fixture.take_one(0).await;
    fixture.settle(&taken, 500, fixture.retry_later(100), 1).await;
    let (_, early) = fixture.finish_job_with_webhook(50).await;
    let ids = |taken: Vec<Delivery>| taken.into_iter().map(|delivery| delivery.id).collect::<Vec<_>>();
    assert_eq!(ids(fixture.take(200).await), [early, late]);
}

// ---- senders die

pub async fn a_webhook_whose_sender_died_is_sent_by_another(fixture: &Fixture) {
    let (_, id) = fixture.finish_job_with_webhook(0).await;
    let lost = fixture.take_one(0).await;
    assert_eq!(fixture.take(LEASE_MS - 1).await.len(), 0, "the lease has not ended");
    let other = WebhookTakeRequest { node: NodeId::new(), ..fixture.take_request() };
    let mut redelivery = fixture.take_as(other, LEASE_MS).await.deliveries;
    let redelivery = redelivery.remove(0);
    assert_eq!((redelivery.id, redelivery.number, redelivery.attempt), (id, 2, 2));
    assert!(!fixture.settle(&lost, 200, WebhookNext::Delivered, LEASE_MS + 1).await, "the lease had ended");
    assert!(fixture.settle(&redelivery, 200, WebhookNext::Delivered, LEASE_MS + 2).await);
    assert!(!fixture.settle(&redelivery, 500, WebhookNext::Failed, LEASE_MS + 3).await, "reported twice");
    let history = fixture.webhook(id).await.history;
    assert_eq!(history.len(), 2);
    assert_eq!((history[0].number, history[0].status), (1, None));
    assert!(history[0].error.as_ref().unwrap().contains("no outcome was reported"), "{:?}", history[0]);
}

pub async fn webhooks_of_a_dead_sender_are_due_immediately(fixture: &Fixture) {
    let (_, first) = fixture.finish_job_with_webhook(0).await;
    let dead = WebhookTakeRequest { node: NodeId::new(), ..fixture.take_request() };
    assert_eq!(fixture.take_as(dead, 0).await.deliveries.len(), 1);
    let (_, second) = fixture.finish_job_with_webhook(1).await;
    assert_eq!(fixture.take_one(1).await.id, second);
    fixture.recover(0, 5).await;
    assert_eq!(fixture.take_one(5).await.id, first, "the webhook of a live node is not touched");
    fixture.store.node_leave(fixture.node, GRACE_PERIODS, fixture.at(6)).await.unwrap();
    assert_eq!(fixture.take(6).await.len(), 2, "a node that leaves releases its webhooks");
}

pub async fn a_webhook_whose_senders_keep_dying_fails_after_a_few_extra_attempts(fixture: &Fixture) {
    let (job, id) = fixture.finish_job_with_webhook(0).await;
    let mut now = 0;
    for number in 1..=4 {
        let request = WebhookTakeRequest { allowed: 1, ..fixture.take_request() };
        let taken = fixture.take_as(request, now).await.deliveries;
        assert_eq!(taken.iter().map(|delivery| delivery.number).collect::<Vec<_>>(), [number]);
        now += LEASE_MS;
    }
    let request = WebhookTakeRequest { allowed: 1, ..fixture.take_request() };
    assert_eq!(fixture.take_as(request, now).await.deliveries.len(), 0);
    let settled = fixture.webhook(id).await;
    assert_eq!((settled.state, settled.attempts, settled.history.len()), (WebhookState::Failed, 4, 4));
    assert_eq!(settled.settled_at, Some(fixture.at(now)));
    assert_eq!(fixture.events(job).await.pop().unwrap(), "webhook_failed");
}

// ---- actions

pub async fn a_settled_webhook_can_be_redelivered(fixture: &Fixture) {
    let (job, id) = fixture.finish_job_with_webhook(0).await;
    let taken = fixture.take_one(0).await;
    for (at, state) in [(1, "WAITING"), (3, "SENDING")] {
        if at == 1 {
            fixture.settle(&taken, 500, fixture.retry_later(2), 1).await;
        } else {
            fixture.take_one(2).await;
        }
        let rejected = fixture.store.webhook_redeliver(id, "ana", fixture.at(at)).await;
        let Err(StoreError::Conflict { message, .. }) = rejected else { panic!("{rejected:?}") };
        assert!(message.contains(state), "{message}");
    }
    let second = Delivery { number: 2, ..taken };
    assert!(fixture.settle(&second, 500, WebhookNext::Failed, 4).await);
    assert_eq!(
        fixture.store.webhook_redeliver(id, "ana", fixture.at(5)).await.unwrap(),
        Some(WebhookSubject::Job(job))
    );
    let redelivery = fixture.take_one(5).await;
    assert_eq!((redelivery.number, redelivery.attempt), (3, 1), "with new attempts, in the same history");
    assert!(fixture.settle(&redelivery, 200, WebhookNext::Delivered, 6).await);
    assert_eq!(
        fixture.store.webhook_redeliver(id, "ana", fixture.at(7)).await.unwrap(),
        Some(WebhookSubject::Job(job)),
        "a delivered webhook too"
    );
    assert_eq!(fixture.webhook(id).await.settled_at, None);
    assert_eq!(fixture.store.webhook_redeliver(WebhookId::new(), "ana", fixture.at(8)).await.unwrap(), None);
    let audit = fixture.store.audit_list(AuditFilter::default(), 10).await.unwrap();
    assert_eq!(audit.len(), 2, "rejected actions have no entry");
    assert_eq!((audit[1].actor.as_str(), audit[1].action.as_str()), ("ana", "webhook.redeliver"));
    assert_eq!((audit[1].target.clone(), audit[1].at, audit[1].count), (id.to_string(), fixture.at(5), 1));
    let details = json!({"jobId": job, "url": "https://example.org/hook", "was": "FAILED"});
    assert_eq!(audit[1].details, details);
}

pub async fn webhooks_are_found_by_state_job_and_host(fixture: &Fixture) {
    let (first, _) = fixture.finish_job_with_webhook(0).await;
    let taken = fixture.take_one(0).await;
    fixture.settle(&taken, 500, WebhookNext::Failed, 1).await;
    let (second, _) = fixture.finish_job_with_webhook(2).await;
    let third = fixture.submit_and_claim(fixture.job_with_webhook(3).with_webhook("http://else:81/")).await;
    fixture.complete(&third, 4).await;
    let find = async |filter: WebhookFilter| -> Vec<JobId> {
        let found = fixture.store.webhook_list(filter, None, 10).await.unwrap();
        assert!(found.iter().all(|webhook| webhook.body.is_none() && webhook.history.is_empty()));
        found.into_iter().filter_map(|webhook| webhook.job_id).collect()
    };
    let all = WebhookFilter::default();
    assert_eq!(find(all.clone()).await, [third.id, second, first], "newest first");
    assert_eq!(find(WebhookFilter { job: Some(second), ..all.clone() }).await, [second]);
    assert_eq!(find(WebhookFilter { host: Some("else:81".into()), ..all.clone() }).await, [third.id]);
    let failed = WebhookFilter { state: Some(WebhookState::Failed), ..all.clone() };
    assert_eq!(find(failed.clone()).await, [first]);
    assert_eq!(find(WebhookFilter { host: Some("else:81".into()), ..failed }).await, []);
    let page = fixture.store.webhook_list(all.clone(), None, 2).await.unwrap();
    let rest = fixture.store.webhook_list(all, Some(page[1].id), 2).await.unwrap();
    assert_eq!(rest.iter().map(|webhook| webhook.job_id).collect::<Vec<_>>(), [Some(first)]);
    let counts = fixture.store.webhook_counts().await.unwrap();
    assert_eq!(counts, [(WebhookState::Waiting, 2), (WebhookState::Sending, 0), (WebhookState::Failed, 1)]);
}

// ---- deleting

pub async fn deleting_a_job_deletes_its_settled_webhooks(fixture: &Fixture) {
    let (job, id) = fixture.finish_job_with_webhook(0).await;
    let taken = fixture.take_one(0).await;
    fixture.settle(&taken, 200, WebhookNext::Delivered, 1).await;
    fixture.store.job_delete(job, None, fixture.at(99)).await.unwrap();
    assert!(fixture.store.webhook_get(id).await.unwrap().is_none());
    assert_eq!(fixture.database.number("SELECT count(*) FROM webhook_attempt").await, 0);
}

pub async fn a_webhook_still_to_be_delivered_survives_its_job(fixture: &Fixture) {
    const DAY_MS: i64 = 24 * 3_600_000;
    let prune = async |ms| fixture.store.job_prune(&Retention::default(), 100, fixture.at(ms)).await.unwrap();
    let (deleted, _) = fixture.finish_job_with_webhook(0).await;
    fixture.store.job_delete(deleted, None, fixture.at(99)).await.unwrap();
    let (pruned, _) = fixture.finish_job_with_webhook(5).await;
    assert_eq!(prune(8 * DAY_MS).await, 1);
    assert!(fixture.store.job_get(pruned).await.unwrap().is_none());
    let taken = fixture.take(8 * DAY_MS).await;
    assert_eq!(taken.iter().map(|delivery| delivery.subject.job()).collect::<Vec<_>>(), [Some(deleted), Some(pruned)]);
    for delivery in &taken {
        assert!(fixture.settle(delivery, 200, WebhookNext::Delivered, 8 * DAY_MS + 1).await);
    }
    assert_eq!(fixture.database.number("SELECT count(*) FROM job_log").await, 0, "a deleted job has no log");
    prune(38 * DAY_MS).await;
    assert_eq!(fixture.database.number("SELECT count(*) FROM webhook").await, 2);
    prune(38 * DAY_MS + 2).await;
    assert_eq!(fixture.database.number("SELECT count(*) FROM webhook").await, 0, "webhooks are pruned too");
    assert_eq!(fixture.database.number("SELECT count(*) FROM webhook_attempt").await, 0);
}

pub async fn pruning_a_job_deletes_its_settled_webhooks(fixture: &Fixture) {
    let (_, id) = fixture.finish_job_with_webhook(0).await;
    let taken = fixture.take_one(0).await;
    fixture.settle(&taken, 200, WebhookNext::Delivered, 1).await;
    let later: Timestamp = fixture.at(8 * 24 * 3_600_000);
    assert_eq!(fixture.store.job_prune(&Retention::default(), 100, later).await.unwrap(), 1);
    assert!(fixture.store.webhook_get(id).await.unwrap().is_none());
}
