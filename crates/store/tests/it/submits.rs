//! Submits.

use faena_domain::{JobId, JobState, NewJob, Priority, RetryOn};

use crate::support::*;

pub async fn a_submitted_job_can_be_read_back(world: &World) {
    let job = world.job("email.send", 0);
    let answer = world.try_submit(vec![job.clone()], 0).await.unwrap().remove(0);

    assert_eq!((answer.id, answer.status, answer.existed), (job.id, JobState::Queued, false));
    assert_eq!(answer.created_at, world.at(0));
    let view = world.get(job.id).await;
    assert_eq!((view.kind.as_str(), view.name.as_str(), view.queue.as_str()), ("email.send", "email.send", "default"));
    assert_eq!((view.status, view.retry_count, view.run), (JobState::Queued, 0, None));
    assert_eq!((view.created_at, view.queued_at), (world.at(0), Some(world.at(0))));
    assert_eq!(world.events(job.id).await, ["created", "queued"]);
}

pub async fn a_batch_is_answered_in_its_order(world: &World) {
    let jobs: Vec<NewJob> = (0..500).map(|n| world.job(["a", "b", "c"][n % 3], 0)).collect();
    let wanted: Vec<JobId> = jobs.iter().map(|job| job.id).collect();

    assert_eq!(world.submit_all(jobs).await, wanted);
    assert_eq!(world.total(faena_store::Tally::Queued).await, 500);
    assert!(world.try_submit(Vec::new(), 0).await.unwrap().is_empty(), "nothing is as good as anything");
}

pub async fn a_payload_is_kept_byte_for_byte(world: &World) {
    let payloads = [
        r#"{"n":18446744073709551615,"m":-9223372036854775808}"#,
        r#"{"big":123456789012345678901234567890,"small":1e-400,"f":1.10}"#,
        r#"{"z":1,"a":2,"m":{"y":1,"b":2}}"#,
        r#"{"text":"ñandú 🦤 \u0000 \ud83e\udda4 \"quoted\" \\ \n","тест":"値"}"#,
        "{ \"spaces\" :  [ 1,\t2 ] }",
        "{}",
    ];
    for payload in payloads {
        let id = world.submit(NewJob { payload: payload.into(), ..world.job("p", 0) }).await;
        assert_eq!(world.get(id).await.payload.get(), payload);
        let claimed = world.claim_one(1).await;
        assert_eq!(claimed.payload, payload);
        world.complete(&claimed, 2).await;
        assert_eq!(world.get(id).await.payload.get(), payload, "when it is done, too");
    }
}

fn full(world: &World, parent: JobId, mark: &str) -> NewJob {
    let mut job = world
        .job("report.make", 5)
        .queue("reports")
        .priority(Priority::High)
        .unique(&format!("u-{mark}"))
        .idempotent(&format!("i-{mark}"), 9)
        .after(&[parent])
        .runs_anyway()
        .scheduled(world.at(60_000))
        .expires(world.at(90_000))
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

pub async fn every_option_survives_alone_and_in_a_batch(world: &World) {
    let parent = world.submit(world.job("parent", 0)).await;
    let alone = full(world, parent, "alone");
    let in_batch = full(world, parent, "batch");
    world.submit(alone.clone()).await;
    world.submit_all(vec![world.job("other", 5), in_batch.clone(), world.job("other", 5)]).await;
    for (job, mark) in [(&alone, "alone"), (&in_batch, "batch")] {
        let view = serde_json::to_value(world.get(job.id).await).unwrap();
        let wanted = serde_json::json!({
            "id": job.id, "name": "The report", "type": "report.make", "queue": "reports", "status": "PENDING",
            "priority": "HIGH", "payload": {"a": 1}, "maxRetries": 7, "retryCount": 0, "retryDelay": 2500,
            "backoffMultiplier": 1.5, "maxDelay": 9000, "retryDelays": [10, 20], "jitter": 0.25, "retryOn": ["time*out"],
            "timeoutMs": 1234, "createdAt": world.at(5), "scheduledAt": world.at(60_000), "expiresAt": world.at(90_000),
            "scheduleId": "nightly", "webhookUrl": "https://example.org/hook", "correlationId": "c-1",
            "idempotencyKey": format!("i-{mark}"), "uniqueKey": format!("u-{mark}"), "concurrencyKey": "customer-7",
            "dependsOn": [parent], "tags": ["red", "blue"],
        });
        for (field, value) in wanted.as_object().unwrap() {
            assert_eq!(&view[field], value, "{field} of the one {mark}");
        }
    }

    let claimed = world.claim(10, 6).await;
    let claimed = claimed.iter().find(|job| job.id == parent).unwrap();
    world.fail(claimed, 6).await;
    world.promote(60_000).await;
    for job in world.claim(10, 60_001).await {
        let submitted = if job.id == alone.id { &alone } else { &in_batch };
        assert_eq!(job.options, submitted.options, "a worker gets every option");
        assert_eq!((job.payload.as_str(), job.correlation_id.as_deref()), (r#"{"a":1}"#, Some("c-1")));
    }
}

pub async fn a_job_with_a_future_time_waits(world: &World) {
    let job = world.job("later", 0).scheduled(world.at(5_000));
    let answer = world.try_submit(vec![job.clone()], 0).await.unwrap().remove(0);

    assert_eq!(answer.status, JobState::Pending);
    assert_eq!(world.state(job.id).await, JobState::Pending);
    assert!(world.claim(10, 4_999).await.is_empty());
    assert_eq!(world.promote(4_999).await.promoted, 0);
    assert_eq!(world.promote(5_000).await.promoted, 1);
    assert_eq!(world.claim_one(5_000).await.id, job.id);
}

pub async fn a_job_whose_time_has_passed_is_ready(world: &World) {
    let id = world.submit(world.job("now", 1_000).scheduled(world.at(1_000))).await;
    assert_eq!(world.state(id).await, JobState::Queued);
}

pub async fn an_unknown_job_is_not_found(world: &World) {
    assert!(world.store.job_get(JobId::new()).await.unwrap().is_none());
}

pub async fn strings_that_look_like_sql_or_keys_are_just_strings(world: &World) {
    let nasty = ["'; DROP TABLE job; --", "{a,b}", "null", "\\", "\"", "%_", "0", "ñ\u{202e}x", "a\\u0000b"];
    for text in nasty {
        let mut job =
            world.job(text, 0).queue(text).tag(text).schedule(text).correlation(text).unique(text).idempotent(text, 1);
        job.options.name = Some(text.into());
        job.options.retry.retry_on = RetryOn::Patterns(vec!["\0".into()]);
        let id = world.submit(job).await;
        let view = world.get(id).await;
        assert_eq!(
            [&view.kind, &view.queue, &view.name, &view.correlation_id, &view.tags[0]],
            [text; 5].map(|t| t).each_ref()
        );
        assert_eq!(world.list(faena_store::Filter { tag: Some(text.into()), ..Default::default() }).await, [id]);
        let claimed = world.claim_one(1).await;
        world.complete(&claimed, 2).await;
        world.store.job_delete(id, None, world.at(1_000)).await.unwrap();
        assert!(world.ledger.tables_with(id).await.is_empty(), "{text} leaves nothing");
    }
}
