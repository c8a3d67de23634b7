//! Dead letters: their content, how they are found, actions on them.

use faena_domain::{ErrorReason, JobId, JobState, NewJob};
use faena_store::{AuditFilter, Filter, Page, RunOutcome, StoreError, Tally};

use crate::support::{Fixture, failed};

/// Creates a failed job of this type and queue with this error.
async fn dead_letter(fixture: &Fixture, kind: &str, queue: &str, error: &str, reason: ErrorReason, ms: i64) -> JobId {
    let id = fixture.submit(NewJob { queue: queue.into(), ..fixture.job(kind, ms) }).await;
    let job = fixture.claim_one(ms + 1).await;
    assert_eq!(job.id, id);
    fixture.end(&job, RunOutcome::Failed { error: error.into(), reason }, ms + 2).await;
    id
}

fn dead_letters() -> Filter {
    Filter { states: vec![JobState::Failed], ..Filter::default() }
}

fn error(text: &str) -> Filter {
    Filter { error: Some(text.into()), ..dead_letters() }
}

pub async fn dead_letters_are_found_by_error_and_reason(fixture: &Fixture) {
    let smtp = dead_letter(fixture, "mail", "a", "SMTP: Connection refused", ErrorReason::Error, 0).await;
    let slow = dead_letter(fixture, "mail", "b", "took too long", ErrorReason::Timeout, 10).await;
    let http = dead_letter(fixture, "http", "a", "connection REFUSED by host_1", ErrorReason::Error, 20).await;
    assert_eq!(fixture.list(error("connection refused")).await, [http, smtp]);
    assert_eq!(fixture.list(error("host_1")).await, [http]);
    assert_eq!(fixture.list(error("host%")).await, [], "there are no wildcards");
    let reason = |reason| Filter { reason: Some(reason), ..dead_letters() };
    assert_eq!(fixture.list(reason(ErrorReason::Timeout)).await, [slow]);
    assert_eq!(fixture.list(reason(ErrorReason::Orphaned)).await, []);
    assert_eq!(fixture.list(Filter { kind: Some("mail".into()), ..error("refused") }).await, [smtp]);
    assert_eq!(fixture.list(Filter { queue: Some("b".into()), ..error("o") }).await, [slow]);
    assert_eq!(fixture.list(Filter { q: Some("HTT".into()), ..error("refused") }).await, [http]);
    assert_eq!(fixture.list(Filter { q: Some(smtp.to_string()), ..error("refused") }).await, [smtp]);
    assert_eq!(fixture.list(Filter { created_after: Some(fixture.at(15)), ..error("o") }).await, [http]);
    assert_eq!(fixture.list(dead_letters()).await, [http, slow, smtp]);
}

pub async fn pages_of_a_search_show_every_dead_letter_once(fixture: &Fixture) {
    let mut ids = Vec::new();
    for n in 0..7 {
        let text = if n % 2 == 0 { "even" } else { "odd" };
        ids.push(dead_letter(fixture, &format!("kind {}", n % 3), "q", text, ErrorReason::Error, n * 10).await);
    }
    let even: Vec<JobId> = ids.iter().copied().step_by(2).rev().collect();
    let mut seen = Vec::new();
    let mut cursor = None;
    loop {
        let page = fixture.store.job_list(&error("even"), Page::after(cursor, 2)).await.unwrap();
        assert_eq!((page.total, page.total_is_exact), (4, true));
        seen.extend(page.jobs.iter().map(|job| job.id));
        cursor = page.next.map(|cursor| cursor.id);
        if cursor.is_none() {
            break;
        }
    }
    assert_eq!(seen, even);
    let second = fixture.store.job_list(&error("even"), Page::offset(2, 2)).await.unwrap();
    assert_eq!(second.jobs.iter().map(|job| job.id).collect::<Vec<_>>(), even[2..]);
}

pub async fn jobs_of_every_state_are_found_by_their_error(fixture: &Fixture) {
    let failed = fixture.submit_and_claim(fixture.job("a", 0)).await;
    fixture.end(&failed, crate::support::failed("Refused by peer"), 1).await;
    let cancelled = fixture.submit(fixture.job("b", 2)).await;
    fixture.cancel(cancelled, 3).await;
    let retrying = fixture.submit_and_claim(fixture.job("c", 4)).await;
    fixture.retry_at(&retrying, 9_999, 5).await;
    let completed = fixture.submit_and_claim(fixture.job("d", 6)).await;
    fixture.retry_at(&completed, 8, 7).await;
    fixture.promote(8).await;
    fixture.complete(&fixture.claim_one(9).await, 10).await;
    let requeued = fixture.submit_and_claim(fixture.job("e", 11)).await;
    let refused = RunOutcome::Retry { due_at: fixture.at(13), error: "refused".into(), reason: ErrorReason::Timeout };
    fixture.end(&requeued, refused, 12).await;
    fixture.promote(13).await;

    let any = |text: &str| Filter { states: vec![], ..error(text) };
    assert_eq!(fixture.list(any("REFUSED")).await, [requeued.id, failed.id], "a requeued job shows its error");
    assert_eq!(fixture.list(any("not wanted")).await, [cancelled]);
    assert_eq!(fixture.list(any("not now")).await, [retrying.id], "a completed job shows no error");
    let timeout = Filter { reason: Some(ErrorReason::Timeout), ..Filter::default() };
    assert_eq!(fixture.list(timeout).await, [requeued.id]);
    let only = |state| Filter { states: vec![state], ..error("refused") };
    assert_eq!(fixture.list(only(JobState::Failed)).await, [failed.id]);
    assert_eq!(fixture.list(only(JobState::Completed)).await, []);
    let found = fixture.store.job_find(&any("refused"), None, requeued.id, 9).await.unwrap();
    assert_eq!(found.ids, [failed.id, requeued.id], "for bulk actions, oldest first");
}

pub async fn jobs_are_found_oldest_first(fixture: &Fixture) {
    let ids = fixture.submit_all((0..5).map(|n| fixture.job("a", n)).collect()).await;
    fixture.complete(&fixture.claim_one(10).await, 11).await;
    let later = fixture.submit(fixture.job("a", 20)).await;
    let find = async |filter: &Filter, after, up_to, limit| {
        let found = fixture.store.job_find(filter, after, up_to, limit).await.unwrap();
        (found.ids, found.next)
    };
    let any = Filter::default();
    assert_eq!(find(&any, None, ids[4], 2).await, (vec![ids[0], ids[1]], Some(ids[1])));
    assert_eq!(find(&any, Some(ids[1]), ids[4], 9).await, (vec![ids[2], ids[3], ids[4]], None), "up_to is inclusive");
    assert_eq!(find(&any, Some(ids[4]), later, 9).await, (vec![later], None));
    assert_eq!(find(&any, Some(later), later, 9).await, (vec![], None));
    let queued = Filter { states: vec![JobState::Queued], ..Filter::default() };
    assert_eq!(find(&queued, None, ids[2], 9).await, (vec![ids[1], ids[2]], None), "the first has completed");
    let tagged = NewJob {
        options: faena_domain::JobOptions { tags: vec!["t".into()], ..Default::default() },
        ..fixture.job("b", 30)
    };
    let tagged = fixture.submit(tagged).await;
    let by_tag = Filter { tag: Some("t".into()), ..Filter::default() };
    assert_eq!(find(&by_tag, None, tagged, 9).await, (vec![tagged], None));
    assert_eq!(find(&by_tag, Some(tagged), tagged, 9).await, (vec![], None));
    let in_flight = fixture.claim_one(31).await.id;
    let in_flight_only = Filter { states: vec![JobState::Assigned], ..Filter::default() };
    assert_eq!(find(&in_flight_only, None, tagged, 9).await, (vec![in_flight], None));
}

pub async fn the_attempts_of_all_runs_are_listed(fixture: &Fixture) {
    let id = fixture.submit(fixture.job("mail", 0)).await;
    let first = fixture.claim_one(1).await;
    fixture.report_start(&first, 2).await;
    fixture.retry_at(&first, 10, 3).await;
    fixture.promote(10).await;
    let second = fixture.claim_one(11).await;
    fixture.end(&second, RunOutcome::Failed { error: "no more".into(), reason: ErrorReason::Timeout }, 12).await;
    let attempts = fixture.store.job_attempts(id).await.unwrap();
    let reported: Vec<_> = attempts
        .iter()
        .map(|a| (a.run, a.status, a.error.as_deref(), a.error_reason, a.finished_at.ms_since(fixture.start)))
        .collect();
    assert_eq!(reported.len(), 2, "{attempts:?}");
    assert_eq!((reported[0].0, reported[0].1, reported[0].4), (Some(first.run), JobState::Retrying, 3));
    assert!(reported[0].2.is_some());
    assert_eq!(reported[1], (Some(second.run), JobState::Failed, Some("no more"), Some(ErrorReason::Timeout), 12));
    assert_eq!(attempts[0].worker_id, Some(fixture.worker.to_string()));
    assert_eq!(fixture.store.job_attempts(JobId::new()).await.unwrap(), []);
}

pub async fn a_dead_letter_is_retried_and_its_log_names_the_actor(fixture: &Fixture) {
    let id = dead_letter(fixture, "mail", "q", "boom", ErrorReason::Error, 0).await;
    fixture.store.dead_letter_retry(id, "ana", fixture.at(10)).await.unwrap();
    assert_eq!(fixture.state(id).await, JobState::Pending);
    let log = fixture.get(id).await.execution_log;
    let line = log.iter().find(|entry| entry.event.as_str() == "retried").unwrap();
    assert_eq!(line.details, "by ana");
    let entries = fixture.store.audit_list(AuditFilter::default(), 9).await.unwrap();
    assert_eq!((entries[0].action.as_str(), entries[0].target.clone()), ("dead_letter.retry", id.to_string()));
    fixture.promote(11).await;
    let job = fixture.claim_one(12).await;
    assert_eq!((job.id, job.retry_count), (id, 0), "it has all its attempts again");
}

pub async fn only_dead_letters_are_retried_and_deleted_as_such(fixture: &Fixture) {
    let waiting = fixture.submit(fixture.job("mail", 0)).await;
    let cancelled = fixture.submit(fixture.job("mail", 1)).await;
    fixture.cancel(cancelled, 2).await;
    for (id, state) in [(waiting, JobState::Queued), (cancelled, JobState::Cancelled)] {
        for answer in [
            fixture.store.dead_letter_retry(id, "ana", fixture.at(3)).await,
            fixture.store.dead_letter_delete(id, "ana", fixture.at(3)).await,
        ] {
            assert!(matches!(answer, Err(StoreError::InvalidTransition { from, .. }) if from == state));
        }
        assert_eq!(fixture.state(id).await, state);
    }
    let unknown = fixture.store.dead_letter_delete(JobId::new(), "ana", fixture.at(3)).await;
    assert!(matches!(unknown, Err(StoreError::NotFound(_))));
    assert_eq!(fixture.store.audit_list(AuditFilter::default(), 9).await.unwrap(), []);
    fixture.cancel(waiting, 4).await;
    let id = dead_letter(fixture, "mail", "q", "boom", ErrorReason::Error, 10).await;
    fixture.store.dead_letter_delete(id, "ana", fixture.at(20)).await.unwrap();
    assert!(fixture.store.job_get(id).await.unwrap().is_none());
    assert_eq!(fixture.total(Tally::Failed).await, 0);
}

pub async fn dead_letter_stats_have_reasons_and_the_oldest_and_newest(fixture: &Fixture) {
    let none = fixture.store.dead_letter_stats().await.unwrap();
    assert_eq!((none.reason_sample_size, none.oldest, none.newest), (0, None, None));
    let first = dead_letter(fixture, "a", "q", "x", ErrorReason::Timeout, 0).await;
    dead_letter(fixture, "b", "q", "x", ErrorReason::Error, 10).await;
    let last = dead_letter(fixture, "a", "r", "x", ErrorReason::Timeout, 20).await;
    let stats = fixture.store.dead_letter_stats().await.unwrap();
    assert_eq!((stats.reason_sample_size, stats.oldest, stats.newest), (3, Some(first), Some(last)));
    assert_eq!(stats.by_reason.into_iter().collect::<Vec<_>>(), [("error".into(), 1), ("timeout".into(), 2)]);
}

pub async fn the_first_ready_time_of_each_lane_is_returned(fixture: &Fixture) {
    assert_eq!(fixture.store.ready_since().await.unwrap(), []);
    let a = fixture.submit_all(vec![fixture.job("a", 5), fixture.job("a", 3)]).await;
    let b = fixture.submit(fixture.job("b", 7)).await;
    let (lane_a, lane_b) = (fixture.lane_of(a[0]).await.id, fixture.lane_of(b).await.id);
    let mut since = fixture.store.ready_since().await.unwrap();
    since.sort();
    let first_a = [fixture.get(a[0]).await.queued_at, fixture.get(a[1]).await.queued_at].into_iter().flatten().min();
    let mut wanted = vec![(lane_a, first_a.unwrap()), (lane_b, fixture.get(b).await.queued_at.unwrap())];
    wanted.sort();
    assert_eq!(since, wanted);
    let job = fixture.claim_one(8).await;
    fixture.end(&job, failed("x"), 9).await;
    assert!(fixture.store.ready_since().await.unwrap().len() <= 2);
}
