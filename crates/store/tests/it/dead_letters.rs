//! Dead letters: their content, how they are found, actions on them.

use faena_domain::{ErrorReason, JobId, JobState, NewJob};
use faena_store::{AuditFilter, Filter, Page, RunOutcome, StoreError, Tally};

use crate::support::{World, failed};

/// A failed job of this type and queue with this error.
async fn dead_letter(world: &World, kind: &str, queue: &str, error: &str, reason: ErrorReason, ms: i64) -> JobId {
    let id = world.submit(NewJob { queue: queue.into(), ..world.job(kind, ms) }).await;
    let job = world.claim_one(ms + 1).await;
    assert_eq!(job.id, id);
    world.end(&job, RunOutcome::Failed { error: error.into(), reason }, ms + 2).await;
    id
}

fn dead_letters() -> Filter {
    Filter { states: vec![JobState::Failed], ..Filter::default() }
}

fn error(text: &str) -> Filter {
    Filter { error: Some(text.into()), ..dead_letters() }
}

pub async fn dead_letters_are_found_by_error_and_reason(world: &World) {
    let smtp = dead_letter(world, "mail", "a", "SMTP: Connection refused", ErrorReason::Error, 0).await;
    let slow = dead_letter(world, "mail", "b", "took too long", ErrorReason::Timeout, 10).await;
    let http = dead_letter(world, "http", "a", "connection REFUSED by host_1", ErrorReason::Error, 20).await;
    assert_eq!(world.list(error("connection refused")).await, [http, smtp]);
    assert_eq!(world.list(error("host_1")).await, [http]);
    assert_eq!(world.list(error("host%")).await, [], "no signs have a meaning");
    let reason = |reason| Filter { reason: Some(reason), ..dead_letters() };
    assert_eq!(world.list(reason(ErrorReason::Timeout)).await, [slow]);
    assert_eq!(world.list(reason(ErrorReason::Orphaned)).await, []);
    assert_eq!(world.list(Filter { kind: Some("mail".into()), ..error("refused") }).await, [smtp]);
    assert_eq!(world.list(Filter { queue: Some("b".into()), ..error("o") }).await, [slow]);
    assert_eq!(world.list(Filter { q: Some("HTT".into()), ..error("refused") }).await, [http]);
    assert_eq!(world.list(Filter { q: Some(smtp.to_string()), ..error("refused") }).await, [smtp]);
    assert_eq!(world.list(Filter { created_after: Some(world.at(15)), ..error("o") }).await, [http]);
    assert_eq!(world.list(dead_letters()).await, [http, slow, smtp]);
}

pub async fn pages_of_a_search_show_every_dead_letter_once(world: &World) {
    let mut ids = Vec::new();
    for n in 0..7 {
        let text = if n % 2 == 0 { "even" } else { "odd" };
        ids.push(dead_letter(world, &format!("kind {}", n % 3), "q", text, ErrorReason::Error, n * 10).await);
    }
    let even: Vec<JobId> = ids.iter().copied().step_by(2).rev().collect();
    let mut seen = Vec::new();
    let mut cursor = None;
    loop {
        let page = world.store.job_list(&error("even"), Page::After { id: cursor, limit: 2 }).await.unwrap();
        assert_eq!((page.total, page.total_is_exact), (4, true));
        seen.extend(page.jobs.iter().map(|job| job.id));
        cursor = page.next;
        if cursor.is_none() {
            break;
        }
    }
    assert_eq!(seen, even);
    let second = world.store.job_list(&error("even"), Page::Offset { offset: 2, limit: 2 }).await.unwrap();
    assert_eq!(second.jobs.iter().map(|job| job.id).collect::<Vec<_>>(), even[2..]);
}

pub async fn only_failed_jobs_are_searched_by_error(world: &World) {
    for states in [vec![], vec![JobState::Cancelled], vec![JobState::Failed, JobState::Queued]] {
        let filter = Filter { states, ..error("x") };
        let answer = world.store.job_list(&filter, Page::After { id: None, limit: 1 }).await;
        assert!(matches!(answer, Err(StoreError::Invalid(faults)) if faults[0].path == "error"));
    }
}

pub async fn jobs_are_listed_upwards_from_the_oldest(world: &World) {
    let ids = world.submit_all((0..5).map(|n| world.job("a", n)).collect()).await;
    world.complete(&world.claim_one(10).await, 11).await;
    let later = world.submit(world.job("a", 20)).await;
    let find = async |filter: &Filter, after, upto, limit| {
        let found = world.store.job_find(filter, after, upto, limit).await.unwrap();
        (found.ids, found.next)
    };
    let any = Filter::default();
    assert_eq!(find(&any, None, ids[4], 2).await, (vec![ids[0], ids[1]], Some(ids[1])));
    assert_eq!(find(&any, Some(ids[1]), ids[4], 9).await, (vec![ids[2], ids[3], ids[4]], None), "up to, not beyond");
    assert_eq!(find(&any, Some(ids[4]), later, 9).await, (vec![later], None));
    assert_eq!(find(&any, Some(later), later, 9).await, (vec![], None));
    let queued = Filter { states: vec![JobState::Queued], ..Filter::default() };
    assert_eq!(find(&queued, None, ids[2], 9).await, (vec![ids[1], ids[2]], None), "the first has completed");
    let tagged = NewJob {
        options: faena_domain::JobOptions { tags: vec!["t".into()], ..Default::default() },
        ..world.job("b", 30)
    };
    let tagged = world.submit(tagged).await;
    let by_tag = Filter { tag: Some("t".into()), ..Filter::default() };
    assert_eq!(find(&by_tag, None, tagged, 9).await, (vec![tagged], None));
    assert_eq!(find(&by_tag, Some(tagged), tagged, 9).await, (vec![], None));
    let held = world.claim_one(31).await.id;
    let held_only = Filter { states: vec![JobState::Assigned], ..Filter::default() };
    assert_eq!(find(&held_only, None, tagged, 9).await, (vec![held], None));
}

pub async fn the_attempts_of_all_runs_are_listed(world: &World) {
    let id = world.submit(world.job("mail", 0)).await;
    let first = world.claim_one(1).await;
    world.begin(&first, 2).await;
    world.retry_at(&first, 10, 3).await;
    world.promote(10).await;
    let second = world.claim_one(11).await;
    world.end(&second, RunOutcome::Failed { error: "no more".into(), reason: ErrorReason::Timeout }, 12).await;
    let attempts = world.store.job_attempts(id).await.unwrap();
    let reported: Vec<_> = attempts
        .iter()
        .map(|a| (a.run, a.status, a.error.as_deref(), a.error_reason, a.finished_at.ms_since(world.start)))
        .collect();
    assert_eq!(reported.len(), 2, "{attempts:?}");
    assert_eq!((reported[0].0, reported[0].1, reported[0].4), (Some(first.run), JobState::Retrying, 3));
    assert!(reported[0].2.is_some());
    assert_eq!(reported[1], (Some(second.run), JobState::Failed, Some("no more"), Some(ErrorReason::Timeout), 12));
    assert_eq!(attempts[0].worker_id, Some(world.worker.to_string()));
    assert_eq!(world.store.job_attempts(JobId::new()).await.unwrap(), []);
}

pub async fn a_dead_letter_is_retried_and_its_log_names_the_actor(world: &World) {
    let id = dead_letter(world, "mail", "q", "boom", ErrorReason::Error, 0).await;
    world.store.dead_letter_retry(id, "ana", world.at(10)).await.unwrap();
    assert_eq!(world.state(id).await, JobState::Pending);
    let log = world.get(id).await.execution_log;
    let line = log.iter().find(|entry| entry.event.as_str() == "retried").unwrap();
    assert_eq!(line.details, "by ana");
    let entries = world.store.audit_list(AuditFilter::default(), 9).await.unwrap();
    assert_eq!((entries[0].action.as_str(), entries[0].target.clone()), ("dead_letter.retry", id.to_string()));
    world.promote(11).await;
    let job = world.claim_one(12).await;
    assert_eq!((job.id, job.retry_count), (id, 0), "it has all its tries again");
}

pub async fn only_dead_letters_are_retried_and_deleted_as_such(world: &World) {
    let waiting = world.submit(world.job("mail", 0)).await;
    let cancelled = world.submit(world.job("mail", 1)).await;
    world.cancel(cancelled, 2).await;
    for (id, state) in [(waiting, JobState::Queued), (cancelled, JobState::Cancelled)] {
        for answer in [
            world.store.dead_letter_retry(id, "ana", world.at(3)).await,
            world.store.dead_letter_delete(id, "ana", world.at(3)).await,
        ] {
            assert!(matches!(answer, Err(StoreError::InvalidTransition { from, .. }) if from == state));
        }
        assert_eq!(world.state(id).await, state);
    }
    let unknown = world.store.dead_letter_delete(JobId::new(), "ana", world.at(3)).await;
    assert!(matches!(unknown, Err(StoreError::NotFound(_))));
    assert_eq!(world.store.audit_list(AuditFilter::default(), 9).await.unwrap(), []);
    world.cancel(waiting, 4).await;
    let id = dead_letter(world, "mail", "q", "boom", ErrorReason::Error, 10).await;
    world.store.dead_letter_delete(id, "ana", world.at(20)).await.unwrap();
    assert!(world.store.job_get(id).await.unwrap().is_none());
    assert_eq!(world.total(Tally::Failed).await, 0);
}

pub async fn dead_letters_are_counted_by_reason_and_age(world: &World) {
    let none = world.store.dead_letter_stats().await.unwrap();
    assert_eq!((none.looked_at, none.oldest, none.newest), (0, None, None));
    let first = dead_letter(world, "a", "q", "x", ErrorReason::Timeout, 0).await;
    dead_letter(world, "b", "q", "x", ErrorReason::Error, 10).await;
    let last = dead_letter(world, "a", "r", "x", ErrorReason::Timeout, 20).await;
    let stats = world.store.dead_letter_stats().await.unwrap();
    assert_eq!((stats.looked_at, stats.oldest, stats.newest), (3, Some(first), Some(last)));
    assert_eq!(stats.by_reason.into_iter().collect::<Vec<_>>(), [("error".into(), 1), ("timeout".into(), 2)]);
}

pub async fn the_first_ready_time_of_each_lane_is_returned(world: &World) {
    assert_eq!(world.store.ready_since().await.unwrap(), []);
    let a = world.submit_all(vec![world.job("a", 5), world.job("a", 3)]).await;
    let b = world.submit(world.job("b", 7)).await;
    let (lane_a, lane_b) = (world.lane_of(a[0]).await.id, world.lane_of(b).await.id);
    let mut since = world.store.ready_since().await.unwrap();
    since.sort();
    let first_a = [world.get(a[0]).await.queued_at, world.get(a[1]).await.queued_at].into_iter().flatten().min();
    let mut wanted = vec![(lane_a, first_a.unwrap()), (lane_b, world.get(b).await.queued_at.unwrap())];
    wanted.sort();
    assert_eq!(since, wanted);
    let job = world.claim_one(8).await;
    world.end(&job, failed("x"), 9).await;
    assert!(world.store.ready_since().await.unwrap().len() <= 2);
}
