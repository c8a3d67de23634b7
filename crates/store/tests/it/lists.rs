//! Lists, totals and counters.

use std::collections::HashSet;

use faena_domain::{JobId, JobState, Priority};
use faena_store::{Filter, Page, StoreError, Tally};

use crate::support::*;

/// Newest first.
fn newest(ids: &[JobId]) -> Vec<JobId> {
    let mut ids = ids.to_vec();
    ids.sort_unstable_by(|a, b| b.cmp(a));
    ids
}

fn with_states(states: &[JobState]) -> Filter {
    Filter { states: states.to_vec(), ..Filter::default() }
}

pub async fn every_filter_finds_its_jobs(world: &World) {
    use JobState::*;
    let completed = world.running(world.job("email.send", 0).tag("red").schedule("nightly")).await;
    world.complete(&completed, 1).await;
    let failed = world.running(world.job("email.send", 2).queue("bulk").tag("red").tag("blue")).await;
    world.fail(&failed, 3).await;
    let retrying = world.running(world.job("report", 4).schedule("nightly")).await;
    world.retry_at(&retrying, 9_999, 5).await;
    let processing = world.running(world.job("report", 6).correlation("order-7")).await;
    world.begin(&processing, 7).await;
    let assigned = world.running(world.job("report", 8).priority(Priority::Critical)).await;
    let queued = world.submit(world.job("report", 10).correlation("order-7")).await;
    let pending = world.submit(world.job("report", 12).scheduled(world.at(9_999))).await;
    let cancelled = world.submit(world.job("email.send", 14)).await;
    world.cancel(cancelled, 15).await;
    let all = newest(&[completed.id, failed.id, retrying.id, processing.id, assigned.id, queued, pending, cancelled]);
    let text = |text: &str| Some(text.to_owned());

    assert_eq!(world.list(Filter::default()).await, all);
    for (state, id) in [
        (Completed, completed.id),
        (Failed, failed.id),
        (Retrying, retrying.id),
        (Processing, processing.id),
        (Assigned, assigned.id),
        (Queued, queued),
        (Pending, pending),
        (Cancelled, cancelled),
    ] {
        assert_eq!(world.list(with_states(&[state])).await, [id], "{state}");
    }
    assert_eq!(world.list(with_states(&[Scheduled])).await, []);
    assert_eq!(world.list(with_states(&[Assigned, Processing])).await, newest(&[assigned.id, processing.id]));
    assert_eq!(world.list(with_states(&[Failed, Cancelled, Queued])).await, newest(&[failed.id, cancelled, queued]));
    let found = world.list(Filter { priority: Some(Priority::Critical), ..Filter::default() }).await;
    assert_eq!(found, [assigned.id]);
    let found = world.list(Filter { kind: text("email.send"), ..Filter::default() }).await;
    assert_eq!(found, newest(&[completed.id, failed.id, cancelled]));
    assert_eq!(world.list(Filter { queue: text("bulk"), ..Filter::default() }).await, [failed.id]);
    assert_eq!(world.list(Filter { tag: text("red"), ..Filter::default() }).await, newest(&[completed.id, failed.id]));
    assert_eq!(world.list(Filter { tag: text("blue"), ..Filter::default() }).await, [failed.id]);
    let found = world.list(Filter { schedule_id: text("nightly"), ..Filter::default() }).await;
    assert_eq!(found, newest(&[completed.id, retrying.id]));
    let found = world.list(Filter { correlation_id: text("order-7"), ..Filter::default() }).await;
    assert_eq!(found, newest(&[processing.id, queued]));
    for nothing in [
        Filter { kind: text("email"), ..Filter::default() },
        Filter { queue: text("none"), ..Filter::default() },
        Filter { tag: text("nightly"), ..Filter::default() },
        Filter { correlation_id: text("order"), ..Filter::default() },
    ] {
        assert_eq!(world.list(nothing).await, []);
    }
    let view =
        &world.store.job_list(&with_states(&[Processing]), Page::After { id: None, limit: 5 }).await.unwrap().jobs[0];
    assert_eq!((view.status, view.started_at), (Processing, Some(world.at(7))));
    assert!(view.execution_log.is_empty());
}

pub async fn filters_work_together(world: &World) {
    let make = |ms: i64, kind: &str, tag: &str, correlation: &str, schedule: &str| {
        world.job(kind, ms).tag(tag).correlation(correlation).schedule(schedule)
    };
    let wanted = world.submit(make(0, "alpha", "t", "c", "s")).await;
    for other in [
        make(1, "b", "t", "c", "s"),
        make(2, "alpha", "u", "c", "s"),
        make(3, "alpha", "t", "d", "s"),
        make(4, "alpha", "t", "c", "z"),
    ] {
        world.submit(other).await;
    }
    let cancelled = world.submit(make(5, "alpha", "t", "c", "s")).await;
    world.cancel(cancelled, 6).await;
    let filter = Filter {
        states: vec![JobState::Queued],
        kind: Some("alpha".into()),
        tag: Some("t".into()),
        correlation_id: Some("c".into()),
        schedule_id: Some("s".into()),
        ..Filter::default()
    };
    assert_eq!(world.list(filter.clone()).await, [wanted]);
    assert_eq!(world.list(Filter { states: vec![], ..filter.clone() }).await, [cancelled, wanted]);
    assert_eq!(world.list(Filter { q: Some("LPH".into()), kind: None, ..filter.clone() }).await, [wanted]);
    assert_eq!(world.list(Filter { q: Some("nothing".into()), ..filter.clone() }).await, []);
    assert_eq!(world.list(Filter { created_after: Some(world.at(1)), ..filter }).await, []);
}

pub async fn a_search_finds_names_ids_and_keys(world: &World) {
    let search = async |text: &str| world.list(Filter { q: Some(text.into()), ..Filter::default() }).await;
    let email = world.submit(world.job("Email.Send", 0)).await;
    let bulk = world.submit(world.job("other", 1).queue("bulk-email")).await;
    let keyed = world.submit(world.job("other", 2).unique("uk-1").idempotent("ik-1", 1).correlation("corr-1")).await;
    let same = world.submit(world.job("other", 3).unique("email").correlation("corr-1")).await;
    assert_eq!(search("email").await, [same, bulk, email], "a part of a type or queue, and a whole key");
    assert_eq!(search("SEND").await, [email]);
    assert_eq!(search(&email.to_string()).await, [email]);
    assert_eq!(search("uk-1").await, [keyed]);
    assert_eq!(search("ik-1").await, [keyed]);
    assert_eq!(search("corr-1").await, [same, keyed]);
    assert_eq!(search("uk").await, [], "keys are not searched by parts");
    assert_eq!(search("100%").await, []);
}

pub async fn the_default_correlation_id_is_the_job_id(world: &World) {
    let parent = world.submit(world.job("a", 0)).await;
    let child = world.submit(world.job("b", 1).correlation(&parent.to_string())).await;
    let same = world.job("c", 2);
    let same = world.submit(same.clone().correlation(&same.id.to_string())).await;
    assert_eq!(world.get(parent).await.correlation_id, parent.to_string());
    let found =
        async |id: JobId| world.list(Filter { correlation_id: Some(id.to_string()), ..Filter::default() }).await;
    assert_eq!(found(parent).await, [child, parent]);
    assert_eq!(found(same).await, [same]);
    assert_eq!(found(child).await, [], "the child has another one");
}

pub async fn time_bounds_are_by_creation(world: &World) {
    let mut ids = Vec::new();
    for ms in [0, 10, 20, 30] {
        ids.push(world.submit(world.job("a", ms)).await);
    }
    let between = |after: Option<i64>, before: Option<i64>| Filter {
        created_after: after.map(|ms| world.at(ms)),
        created_before: before.map(|ms| world.at(ms)),
        ..Filter::default()
    };
    assert_eq!(world.list(between(Some(10), None)).await, [ids[3], ids[2], ids[1]]);
    assert_eq!(world.list(between(None, Some(20))).await, [ids[1], ids[0]]);
    assert_eq!(world.list(between(Some(10), Some(30))).await, [ids[2], ids[1]]);
    assert_eq!(world.list(between(Some(31), None)).await, []);
    world.claim(2, 40).await;
    assert_eq!(world.list(between(Some(10), Some(30))).await, [ids[2], ids[1]], "held or not");
}

/// Jobs of several lanes in all states.
async fn a_crowd(world: &World, count: usize) -> Vec<JobId> {
    let jobs = (0..count)
        .map(|n| {
            let job = world.job(["a", "b", "c"][n % 3], i64::try_from(n / 4).unwrap()).tag("crowd");
            if n % 5 == 0 { job.scheduled(world.at(9_999)) } else { job }
        })
        .collect();
    let ids = world.submit_all(jobs).await;
    for (n, job) in world.claim(count / 2, 100).await.iter().enumerate() {
        match n % 5 {
            0 => world.complete(job, 101).await,
            1 => world.fail(job, 101).await,
            2 => world.retry_at(job, 9_999, 101).await,
            3 => world.begin(job, 101).await,
            _ => {}
        }
    }
    newest(&ids)
}

pub async fn pages_and_cursors_show_every_job_once(world: &World) {
    let all = a_crowd(world, 97).await;
    let tagged = Filter { tag: Some("crowd".into()), ..Filter::default() };
    let bounded = Filter { created_after: Some(world.at(0)), ..Filter::default() };
    for filter in [Filter::default(), tagged, bounded] {
        for limit in [1, 10, 97, 200] {
            let mut by_page = Vec::new();
            for offset in (0..97).step_by(limit) {
                let page = world.store.job_list(&filter, Page::Offset { offset, limit }).await.unwrap();
                by_page.extend(page.jobs.iter().map(|job| job.id));
            }
            assert_eq!(by_page, all, "pages of {limit}");
            let (mut by_cursor, mut id) = (Vec::new(), None);
            loop {
                let page = world.store.job_list(&filter, Page::After { id, limit }).await.unwrap();
                by_cursor.extend(page.jobs.iter().map(|job| job.id));
                id = page.next;
                if id.is_none() {
                    break;
                }
            }
            assert_eq!(by_cursor, all, "by cursor, {limit} each");
        }
    }
}

pub async fn totals_do_not_depend_on_the_page(world: &World) {
    let all = a_crowd(world, 60).await;
    let held = [JobState::Assigned, JobState::Processing];
    let filters = [
        Filter::default(),
        with_states(&[JobState::Processing]),
        with_states(&held),
        Filter { tag: Some("crowd".into()), ..Filter::default() },
        Filter { tag: Some("crowd".into()), ..with_states(&[JobState::Failed, JobState::Processing]) },
        Filter { kind: Some("b".into()), ..Filter::default() },
        Filter { created_after: Some(world.at(2)), created_before: Some(world.at(9)), ..Filter::default() },
    ];
    for filter in filters {
        let everything = world.list(filter.clone()).await;
        for page in [Page::Offset { offset: 7, limit: 3 }, Page::After { id: Some(all[20]), limit: 3 }] {
            let found = world.store.job_list(&filter, page).await.unwrap();
            assert_eq!(found.total, everything.len() as u64, "{filter:?} {page:?}");
            assert!(found.total_is_exact);
        }
    }
}

pub async fn pages_beyond_the_bound_are_refused(world: &World) {
    let far = Page::Offset { offset: 9_990, limit: 20 };
    assert!(matches!(world.store.job_list(&Filter::default(), far).await, Err(StoreError::Invalid(_))));
    let endless = Page::Offset { offset: usize::MAX, limit: 20 };
    assert!(matches!(world.store.job_list(&Filter::default(), endless).await, Err(StoreError::Invalid(_))));
}

pub async fn counters_follow_the_jobs(world: &World) {
    let ids = a_crowd(world, 50).await;
    let counts = world.store.counts().await.unwrap();
    let mut sum = 0;
    for tally in Tally::ALL.into_iter().filter(|tally| *tally != Tally::Ran) {
        let states: Vec<JobState> = JobState::ALL.into_iter().filter(|state| Tally::of(*state) == tally).collect();
        let listed = world.list(with_states(&states)).await.len();
        assert_eq!(counts.total(tally), i64::try_from(listed).unwrap(), "{tally:?}");
        sum += listed;
    }
    assert_eq!(sum, ids.iter().collect::<HashSet<_>>().len());
}
