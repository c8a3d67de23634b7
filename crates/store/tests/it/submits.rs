//! Submitting jobs.

use faena_domain::{JobId, JobState, NewJob, Priority, RetryOn};
use faena_store::Tally;
use futures_util::future::join_all;

use crate::support::*;

pub async fn a_submitted_job_can_be_read_back(fixture: &Fixture) {
    let job = fixture.job("email.send", 0);
    let answer = fixture.try_submit(vec![job.clone()], 0).await.unwrap().remove(0);

    assert_eq!((answer.id, answer.status, answer.existed), (job.id, JobState::Queued, false));
    assert_eq!(answer.created_at, fixture.at(0));
    let view = fixture.get(job.id).await;
    assert_eq!((view.kind.as_str(), view.name.as_str(), view.queue.as_str()), ("email.send", "email.send", "default"));
    assert_eq!((view.status, view.retry_count, view.run), (JobState::Queued, 0, None));
    assert_eq!((view.created_at, view.queued_at), (fixture.at(0), Some(fixture.at(0))));
    assert_eq!(fixture.events(job.id).await, ["created", "queued"]);
}

pub async fn a_batch_returns_its_ids_in_order(fixture: &Fixture) {
    let jobs: Vec<NewJob> = (0..500).map(|n| fixture.job(["a", "b", "c"][n % 3], 0)).collect();
    let wanted: Vec<JobId> = jobs.iter().map(|job| job.id).collect();

    assert_eq!(fixture.submit_all(jobs).await, wanted);
    assert_eq!(fixture.total(Tally::Queued).await, 500);
    assert!(fixture.try_submit(Vec::new(), 0).await.unwrap().is_empty(), "an empty batch is accepted");
}

pub async fn a_payload_is_kept_byte_for_byte(fixture: &Fixture) {
    let payloads = [
        r#"{"n":18446744073709551615,"m":-9223372036854775808}"#,
        r#"{"big":123456789012345678901234567890,"small":1e-400,"f":1.10}"#,
        r#"{"z":1,"a":2,"m":{"y":1,"b":2}}"#,
        r#"{"text":"ñandú 🦤 \u0000 \ud83e\udda4 \"quoted\" \\ \n","тест":"値"}"#,
        "{ \"spaces\" :  [ 1,\t2 ] }",
        "{}",
    ];
    for payload in payloads {
        let id = fixture.submit(NewJob { payload: payload.into(), ..fixture.job("p", 0) }).await;
        assert_eq!(fixture.get(id).await.payload.get(), payload);
        let claimed = fixture.claim_one(1).await;
        assert_eq!(claimed.payload, payload);
        fixture.complete(&claimed, 2).await;
        assert_eq!(fixture.get(id).await.payload.get(), payload, "also after it has completed");
    }
}

/// Returns a job with every option. `mark` makes its keys different from those of other jobs.
fn with_all_options(fixture: &Fixture, parent: JobId, mark: &str) -> NewJob {
    let mut job = fixture
        .job("report.make", 5)
        .queue("reports")
        .priority(Priority::High)
        .unique(&format!("u-{mark}"))
        .idempotent(&format!("i-{mark}"), 9)
        .after(&[parent])
        .run_on_parent_failure()
        .scheduled(fixture.at(60_000))
        .expires(fixture.at(90_000))
        .tag("red")
        .tag("blue")
        .schedule("nightly")
        .correlation("c-1");
    job.payload = r#"{"a":1}"#.into();
    let options = &mut job.options;
    options.name = Some("The report".into());
    options.timeout_ms = Some(1_234);
    options.webhook_url = Some("https://example.org/hook".into());
    options.concurrency_key = Some("customer-7".into());
    options.traceparent = Some("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".into());
    options.retry.max_retries = 7;
    options.retry.retry_delay_ms = 2_500;
    options.retry.backoff_multiplier = 1.5;
    options.retry.max_delay_ms = 9_000;
    options.retry.retry_delays_ms = vec![10, 20];
    options.retry.jitter = 0.25;
    options.retry.retry_on = RetryOn::Patterns(vec!["time*out".into()]);
    job
}

pub async fn every_option_is_stored_for_a_single_job_and_in_a_batch(fixture: &Fixture) {
    let parent = fixture.submit(fixture.job("parent", 0)).await;
    let alone = with_all_options(fixture, parent, "alone");
    let in_batch = with_all_options(fixture, parent, "batch");
    fixture.submit(alone.clone()).await;
    fixture.submit_all(vec![fixture.job("other", 5), in_batch.clone(), fixture.job("other", 5)]).await;
    for (job, mark) in [(&alone, "alone"), (&in_batch, "batch")] {
        let view = serde_json::to_value(fixture.get(job.id).await).unwrap();
        let wanted = serde_json::json!({
            "id": job.id, "name": "The report", "type": "report.make", "queue": "reports", "status": "PENDING",
            "priority": "HIGH", "payload": {"a": 1}, "maxRetries": 7, "retryCount": 0, "retryDelay": 2500,
            "backoffMultiplier": 1.5, "maxDelay": 9000, "retryDelays": [10, 20], "jitter": 0.25, "retryOn": ["time*out"],
            "timeoutMs": 1234, "createdAt": fixture.at(5), "scheduledAt": fixture.at(60_000), "expiresAt": fixture.at(90_000),
            "scheduleId": "nightly", "webhookUrl": "https://example.org/hook", "correlationId": "c-1",
            "idempotencyKey": format!("i-{mark}"), "uniqueKey": format!("u-{mark}"), "concurrencyKey": "customer-7",
            "dependsOn": [parent], "tags": ["red", "blue"],
        });
        for (field, value) in wanted.as_object().unwrap() {
            assert_eq!(&view[field], value, "{field} of the job `{mark}`");
        }
    }

    let claimed = fixture.claim(10, 6).await;
    let claimed = claimed.iter().find(|job| job.id == parent).unwrap();
    fixture.fail(claimed, 6).await;
    fixture.promote(60_000).await;
    for job in fixture.claim(10, 60_001).await {
        let submitted = if job.id == alone.id { &alone } else { &in_batch };
        assert_eq!(job.options, submitted.options, "a worker gets every option");
        assert_eq!((job.payload.as_str(), job.correlation_id.as_deref()), (r#"{"a":1}"#, Some("c-1")));
    }
}

pub async fn a_job_with_a_future_time_waits(fixture: &Fixture) {
    let job = fixture.job("later", 0).scheduled(fixture.at(5_000));
    let answer = fixture.try_submit(vec![job.clone()], 0).await.unwrap().remove(0);

    assert_eq!(answer.status, JobState::Pending);
    assert_eq!(fixture.state(job.id).await, JobState::Pending);
    assert!(fixture.claim(10, 4_999).await.is_empty());
    assert_eq!(fixture.promote(4_999).await.promoted, 0);
    assert_eq!(fixture.promote(5_000).await.promoted, 1);
    assert_eq!(fixture.claim_one(5_000).await.id, job.id);
}

pub async fn a_job_whose_time_has_passed_is_ready(fixture: &Fixture) {
    let id = fixture.submit(fixture.job("now", 1_000).scheduled(fixture.at(1_000))).await;
    assert_eq!(fixture.state(id).await, JobState::Queued);
}

pub async fn an_unknown_job_is_not_found(fixture: &Fixture) {
    assert!(fixture.store.job_get(JobId::new()).await.unwrap().is_none());
}

pub async fn strings_that_look_like_sql_or_keys_are_just_strings(fixture: &Fixture) {
    let nasty = ["'; DROP TABLE job; --", "{a,b}", "null", "\\", "\"", "%_", "0", "ñ\u{202e}x", "a\\u0000b"];
    for text in nasty {
        let mut job = fixture
            .job(text, 0)
            .queue(text)
            .tag(text)
            .schedule(text)
            .correlation(text)
            .unique(text)
            .idempotent(text, 1);
        job.options.name = Some(text.into());
        job.options.retry.retry_on = RetryOn::Patterns(vec!["\0".into()]);
        let id = fixture.submit(job).await;
        let view = fixture.get(id).await;
        assert_eq!(
            [&view.kind, &view.queue, &view.name, &view.correlation_id, &view.tags[0]],
            [text; 5].map(|t| t).each_ref()
        );
        assert_eq!(fixture.list(faena_store::Filter { tag: Some(text.into()), ..Default::default() }).await, [id]);
        let claimed = fixture.claim_one(1).await;
        fixture.complete(&claimed, 2).await;
        fixture.store.job_delete(id, None, fixture.at(1_000)).await.unwrap();
        assert!(fixture.database.tables_with(id).await.is_empty(), "{text} leaves nothing");
    }
}

pub async fn a_failing_submit_does_not_undo_others_of_its_group(fixture: &Fixture) {
    fixture.submit(fixture.job("a", 0).unique("k")).await;
    let calls = (0..100).map(|n| {
        let job = if n % 3 == 0 { fixture.job("a", 1).unique("k") } else { fixture.job(&format!("kind-{n}"), 1) };
        fixture.try_submit(vec![fixture.job("b", 1), job], 1)
    });
    let results = join_all(calls).await;
    assert_eq!(results.iter().filter(|answer| answer.is_ok()).count(), 66);
    assert_eq!(fixture.total(Tally::Queued).await, 1 + 2 * 66);
    assert_eq!(fixture.claim(1_000, 2).await.len(), 133, "the lanes of all stored jobs are known");
}
