//! Lists, totals and counters.

use std::collections::HashSet;

use faena_domain::{JobId, JobState, JobView, NewJob, Priority};
use faena_store::{COUNT_LIMIT, Cursor, Filter, Order, Page, RunEnd, Sort, SortBy, Start, StoreError, Tally};

use crate::support::*;

/// Sorts ids, newest first.
fn newest_first(ids: &[JobId]) -> Vec<JobId> {
    let mut ids = ids.to_vec();
    ids.sort_unstable_by(|a, b| b.cmp(a));
    ids
}

fn with_states(states: &[JobState]) -> Filter {
    Filter { states: states.to_vec(), ..Filter::default() }
}

pub async fn every_filter_finds_its_jobs(fixture: &Fixture) {
    use JobState::*;
    let completed = fixture.submit_and_claim(fixture.job("email.send", 0).tag("red").schedule("nightly")).await;
    fixture.complete(&completed, 1).await;
    let failed = fixture.submit_and_claim(fixture.job("email.send", 2).queue("bulk").tag("red").tag("blue")).await;
    fixture.fail(&failed, 3).await;
    let retrying = fixture.submit_and_claim(fixture.job("report", 4).schedule("nightly")).await;
    fixture.retry_at(&retrying, 9_999, 5).await;
    let processing = fixture.submit_and_claim(fixture.job("report", 6).correlation("order-7")).await;
    fixture.report_start(&processing, 7).await;
    let assigned = fixture.submit_and_claim(fixture.job("report", 8).priority(Priority::Critical)).await;
    let queued = fixture.submit(fixture.job("report", 10).correlation("order-7")).await;
    let pending = fixture.submit(fixture.job("report", 12).scheduled(fixture.at(9_999))).await;
    let cancelled = fixture.submit(fixture.job("email.send", 14)).await;
    fixture.cancel(cancelled, 15).await;
    let all =
        newest_first(&[completed.id, failed.id, retrying.id, processing.id, assigned.id, queued, pending, cancelled]);
    let text = |text: &str| Some(text.to_owned());

    assert_eq!(fixture.list(Filter::default()).await, all);
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
        assert_eq!(fixture.list(with_states(&[state])).await, [id], "{state}");
    }
    assert_eq!(fixture.list(with_states(&[Scheduled])).await, []);
    assert_eq!(fixture.list(with_states(&[Assigned, Processing])).await, newest_first(&[assigned.id, processing.id]));
    assert_eq!(
        fixture.list(with_states(&[Failed, Cancelled, Queued])).await,
        newest_first(&[failed.id, cancelled, queued])
    );
    let found = fixture.list(Filter { priorities: vec![Priority::Critical], ..Filter::default() }).await;
    assert_eq!(found, [assigned.id]);
    let found = fixture.list(Filter { kind: text("email.send"), ..Filter::default() }).await;
    assert_eq!(found, newest_first(&[completed.id, failed.id, cancelled]));
    assert_eq!(fixture.list(Filter { queue: text("bulk"), ..Filter::default() }).await, [failed.id]);
    assert_eq!(
        fixture.list(Filter { tag: text("red"), ..Filter::default() }).await,
        newest_first(&[completed.id, failed.id])
    );
    assert_eq!(fixture.list(Filter { tag: text("blue"), ..Filter::default() }).await, [failed.id]);
    let found = fixture.list(Filter { schedule_id: text("nightly"), ..Filter::default() }).await;
    assert_eq!(found, newest_first(&[completed.id, retrying.id]));
    let found = fixture.list(Filter { correlation_id: text("order-7"), ..Filter::default() }).await;
    assert_eq!(found, newest_first(&[processing.id, queued]));
    for nothing in [
        Filter { kind: text("email"), ..Filter::default() },
        Filter { queue: text("none"), ..Filter::default() },
        Filter { tag: text("nightly"), ..Filter::default() },
        Filter { correlation_id: text("order"), ..Filter::default() },
    ] {
        assert_eq!(fixture.list(nothing).await, []);
    }
    let view = &fixture.store.job_list(&with_states(&[Processing]), Page::after(None, 5)).await.unwrap().jobs[0];
    assert_eq!((view.status, view.started_at), (Processing, Some(fixture.at(7))));
    assert!(view.execution_log.is_empty());
}

pub async fn filters_work_together(fixture: &Fixture) {
    let make = |ms: i64, kind: &str, tag: &str, correlation: &str, schedule: &str| {
        fixture.job(kind, ms).tag(tag).correlation(correlation).schedule(schedule)
    };
    let wanted = fixture.submit(make(0, "alpha", "t", "c", "s")).await;
    for other in [
        make(1, "b", "t", "c", "s"),
        make(2, "alpha", "u", "c", "s"),
        make(3, "alpha", "t", "d", "s"),
        make(4, "alpha", "t", "c", "z"),
    ] {
        fixture.submit(other).await;
    }
    let cancelled = fixture.submit(make(5, "alpha", "t", "c", "s")).await;
    fixture.cancel(cancelled, 6).await;
    let filter = Filter {
        states: vec![JobState::Queued],
        kind: Some("alpha".into()),
        tag: Some("t".into()),
        correlation_id: Some("c".into()),
        schedule_id: Some("s".into()),
        ..Filter::default()
    };
    assert_eq!(fixture.list(filter.clone()).await, [wanted]);
    assert_eq!(fixture.list(Filter { states: vec![], ..filter.clone() }).await, [cancelled, wanted]);
    assert_eq!(fixture.list(Filter { q: Some("LPH".into()), kind: None, ..filter.clone() }).await, [wanted]);
    assert_eq!(fixture.list(Filter { q: Some("nothing".into()), ..filter.clone() }).await, []);
    assert_eq!(fixture.list(Filter { created_after: Some(fixture.at(1)), ..filter }).await, []);
}

pub async fn a_search_finds_names_ids_and_keys(fixture: &Fixture) {
    let search = async |text: &str| fixture.list(Filter { q: Some(text.into()), ..Filter::default() }).await;
    let email = fixture.submit(fixture.job("Email.Send", 0)).await;
    let bulk = fixture.submit(fixture.job("other", 1).queue("bulk-email")).await;
    let keyed =
        fixture.submit(fixture.job("other", 2).unique("uk-1").idempotent("ik-1", 1).correlation("corr-1")).await;
    let same = fixture.submit(fixture.job("other", 3).unique("email").correlation("corr-1")).await;
    assert_eq!(search("email").await, [same, bulk, email], "a part of a type or queue, and a whole key");
    assert_eq!(search("SEND").await, [email]);
    assert_eq!(search(&email.to_string()).await, [email]);
    assert_eq!(search("uk-1").await, [keyed]);
    assert_eq!(search("ik-1").await, [keyed]);
    assert_eq!(search("corr-1").await, [same, keyed]);
    assert_eq!(search("uk").await, [], "keys are not searched by parts");
    assert_eq!(search("100%").await, []);
}

pub async fn the_default_correlation_id_is_the_job_id(fixture: &Fixture) {
    let parent = fixture.submit(fixture.job("a", 0)).await;
    let child = fixture.submit(fixture.job("b", 1).correlation(&parent.to_string())).await;
    let same = fixture.job("c", 2);
    let same = fixture.submit(same.clone().correlation(&same.id.to_string())).await;
    assert_eq!(fixture.get(parent).await.correlation_id, parent.to_string());
    let found =
        async |id: JobId| fixture.list(Filter { correlation_id: Some(id.to_string()), ..Filter::default() }).await;
    assert_eq!(found(parent).await, [child, parent]);
    assert_eq!(found(same).await, [same]);
    assert_eq!(found(child).await, [], "the child has another correlation id");
}

pub async fn time_filters_apply_to_the_creation_time(fixture: &Fixture) {
    let mut ids = Vec::new();
    for ms in [0, 10, 20, 30] {
        ids.push(fixture.submit(fixture.job("a", ms)).await);
    }
    let between = |after: Option<i64>, before: Option<i64>| Filter {
        created_after: after.map(|ms| fixture.at(ms)),
        created_before: before.map(|ms| fixture.at(ms)),
        ..Filter::default()
    };
    assert_eq!(fixture.list(between(Some(10), None)).await, [ids[3], ids[2], ids[1]]);
    assert_eq!(fixture.list(between(None, Some(20))).await, [ids[1], ids[0]]);
    assert_eq!(fixture.list(between(Some(10), Some(30))).await, [ids[2], ids[1]]);
    assert_eq!(fixture.list(between(Some(31), None)).await, []);
    fixture.claim(2, 40).await;
    assert_eq!(fixture.list(between(Some(10), Some(30))).await, [ids[2], ids[1]], "also for jobs in flight");
}

/// Submits jobs of several lanes and brings them into different states. Returns their ids, newest first.
async fn submit_in_all_states(fixture: &Fixture, count: usize) -> Vec<JobId> {
    let jobs = (0..count)
        .map(|n| {
            let job = fixture.job(["a", "b", "c"][n % 3], i64::try_from(n / 4).unwrap()).tag("listed");
            if n % 5 == 0 { job.scheduled(fixture.at(9_999)) } else { job }
        })
        .collect();
    let ids = fixture.submit_all(jobs).await;
    for (n, job) in fixture.claim(count / 2, 100).await.iter().enumerate() {
        match n % 5 {
            0 => fixture.complete(job, 101).await,
            1 => fixture.fail(job, 101).await,
            2 => fixture.retry_at(job, 9_999, 101).await,
            3 => fixture.report_start(job, 101).await,
            _ => {}
        }
    }
    newest_first(&ids)
}

pub async fn pages_and_cursors_show_every_job_once(fixture: &Fixture) {
    let all = submit_in_all_states(fixture, 97).await;
    let tagged = Filter { tag: Some("listed".into()), ..Filter::default() };
    let bounded = Filter { created_after: Some(fixture.at(0)), ..Filter::default() };
    for filter in [Filter::default(), tagged, bounded] {
        for limit in [1, 10, 97, 200] {
            let mut by_page = Vec::new();
            for offset in (0..97).step_by(limit) {
                let page = fixture.store.job_list(&filter, Page::offset(offset, limit)).await.unwrap();
                by_page.extend(page.jobs.iter().map(|job| job.id));
            }
            assert_eq!(by_page, all, "pages of {limit}");
            let (mut by_cursor, mut id) = (Vec::new(), None);
            loop {
                let page = fixture.store.job_list(&filter, Page::after(id, limit)).await.unwrap();
                by_cursor.extend(page.jobs.iter().map(|job| job.id));
                id = page.next.map(|cursor| cursor.id);
                if id.is_none() {
                    break;
                }
            }
            assert_eq!(by_cursor, all, "by cursor, {limit} each");
        }
    }
}

pub async fn totals_do_not_depend_on_the_page(fixture: &Fixture) {
    let all = submit_in_all_states(fixture, 60).await;
    let in_flight = [JobState::Assigned, JobState::Processing];
    let filters = [
        Filter::default(),
        with_states(&[JobState::Processing]),
        with_states(&in_flight),
        Filter { tag: Some("listed".into()), ..Filter::default() },
        Filter { tag: Some("listed".into()), ..with_states(&[JobState::Failed, JobState::Processing]) },
        Filter { kind: Some("b".into()), ..Filter::default() },
        Filter { created_after: Some(fixture.at(2)), created_before: Some(fixture.at(9)), ..Filter::default() },
    ];
    for filter in filters {
        let everything = fixture.list(filter.clone()).await;
        for page in [Page::offset(7, 3), Page::after(Some(all[20]), 3)] {
            let found = fixture.store.job_list(&filter, page).await.unwrap();
            assert_eq!(found.total, everything.len() as u64, "{filter:?} {page:?}");
            assert!(found.total_is_exact);
        }
    }
}

pub async fn a_list_shows_the_same_as_a_single_job(fixture: &Fixture) {
    let mut ids = submit_in_all_states(fixture, 60).await;
    for job in fixture.claim(3, 200).await {
        fixture.retry_at(&job, 201, 200).await;
    }
    fixture.promote(201).await;
    let failed = fixture.list(with_states(&[JobState::Failed])).await;
    fixture.retry_manually(failed[0], 300).await;
    ids.push(fixture.submit(fixture.job("late", 301)).await);
    let page = fixture.store.job_list(&Filter::default(), Page::offset(0, 100)).await.unwrap();
    assert_eq!(page.jobs.len(), ids.len());
    let shown = |job: &JobView| {
        let errors = (job.error.clone(), job.error_reason, job.run, job.retry_count);
        (job.status, errors, job.next_attempt_at, job.worker_id.clone(), job.updated_at)
    };
    let mut with_error = HashSet::new();
    for job in &page.jobs {
        let single = fixture.get(job.id).await;
        assert_eq!(shown(job), shown(&single), "{}", job.id);
        if single.error.is_some() {
            with_error.insert(single.status);
        }
    }
    for state in [JobState::Queued, JobState::Retrying, JobState::Failed, JobState::Pending] {
        assert!(with_error.contains(&state), "{state} is covered");
    }
}

pub async fn jobs_are_found_by_their_payload(fixture: &Fixture) {
    let with = |payload: &str, ms: i64| NewJob { payload: payload.into(), ..fixture.job("mail", ms) };
    let first = fixture.submit(with(r#"{"to": "Ada@example.com", "order": 7}"#, 0).tag("eu")).await;
    let second = fixture.submit(with(r#"{"to": "ada@example.com", "order": 8}"#, 1).queue("bulk")).await;
    let long = format!(r#"{{"text": "{}", "to": "ada@example.com"}}"#, "x".repeat(5_000));
    fixture.submit(with(&long, 2)).await;
    let with_payload = |text: &str| Filter { payload: Some(text.into()), ..Filter::default() };
    assert_eq!(fixture.list(with_payload("ADA@")).await, [second, first], "its beginning is searched");
    assert_eq!(fixture.list(with_payload("\"order\": 8")).await, [second]);
    assert_eq!(fixture.list(Filter { tag: Some("eu".into()), ..with_payload("ada") }).await, [first]);
    assert_eq!(fixture.list(Filter { q: Some("bulk".into()), ..with_payload("ada") }).await, [second]);
    assert_eq!(fixture.list(Filter { states: vec![JobState::Failed], ..with_payload("ada") }).await, []);
    assert_eq!(fixture.list(with_payload("%")).await, [], "there are no wildcards");
    let failed = fixture.claim_one(3).await;
    fixture.fail(&failed, 4).await;
    let both = Filter { error: Some("".into()), states: vec![JobState::Failed], ..with_payload("ada") };
    assert_eq!(fixture.list(both).await, [failed.id]);
    let oldest = Page { sort: Sort { by: SortBy::Updated, order: Order::Asc }, ..Page::after(None, 5) };
    let page = fixture.store.job_list(&with_payload("ada"), oldest).await.unwrap();
    assert_eq!((page.total, page.jobs.len()), (2, 2));
}

pub async fn jobs_are_found_by_name_worker_and_several_priorities(fixture: &Fixture) {
    let (worker, jobs) = fixture.worker_with_jobs("billing-1", 2, 0).await;
    let end = RunEnd { worker: worker.id, ..fixture.run_end(&jobs[0], completed(), 2) };
    assert!(fixture.report_end(end).await);
    let plain = fixture.submit(fixture.job("invoice", 10)).await;
    let own = fixture.submit(fixture.job("mail", 11).named("invoice").priority(Priority::High)).await;
    let other = fixture.submit(fixture.job("invoice", 12).named("Reminder 7").priority(Priority::Low)).await;
    let name = |text: &str| Filter { name: Some(text.into()), ..Filter::default() };
    assert_eq!(fixture.list(name("invoice")).await, [own, plain], "the type is the name of a job without one");
    assert_eq!(fixture.list(name("Reminder 7")).await, [other]);
    assert_eq!(fixture.list(name("Reminder")).await, []);
    assert_eq!(fixture.list(Filter { kind: Some("mail".into()), ..name("invoice") }).await, [own]);
    let q = |text: &str| Filter { q: Some(text.into()), ..Filter::default() };
    assert_eq!(fixture.list(q("REMIND")).await, [other]);
    assert_eq!(fixture.list(q("invoice")).await, [other, own, plain], "types and names");
    assert_eq!(fixture.list(Filter { tag: Some("t".into()), ..q("remind") }).await, []);
    let by_worker = |key: &str| Filter { worker_id: Some(key.into()), ..Filter::default() };
    assert_eq!(fixture.list(by_worker("billing-1")).await, newest_first(&[jobs[0].id, jobs[1].id]));
    let in_state = |state| Filter { states: vec![state], ..by_worker("billing-1") };
    assert_eq!(fixture.list(in_state(JobState::Completed)).await, [jobs[0].id]);
    assert_eq!(fixture.list(in_state(JobState::Queued)).await, []);
    assert_eq!(fixture.list(by_worker("billing-2")).await, []);
    let priorities = vec![Priority::High, Priority::Low];
    assert_eq!(fixture.list(Filter { priorities, ..Filter::default() }).await, [other, own]);
}

/// Reads a sorted list by pages and by cursors, and checks that both show the same.
async fn sorted(fixture: &Fixture, filter: &Filter, by: SortBy, order: Order) -> Vec<JobId> {
    let (mut by_page, mut by_cursor, mut cursor) = (Vec::new(), Vec::new(), None);
    loop {
        let page = Page::offset(by_page.len(), 7).sorted(by, order);
        let found = fixture.store.job_list(filter, page).await.unwrap();
        assert!(found.sort_is_exact && !found.is_partial);
        by_page.extend(found.jobs.iter().map(|job| job.id));
        if found.jobs.len() < 7 {
            break;
        }
    }
    loop {
        let page = Page { start: Start::After(cursor), ..Page::offset(0, 5).sorted(by, order) };
        let found = fixture.store.job_list(filter, page).await.unwrap();
        by_cursor.extend(found.jobs.iter().map(|job| job.id));
        cursor = found.next.map(|next| next.to_string().parse().unwrap());
        if cursor.is_none() {
            break;
        }
    }
    assert_eq!(by_page, by_cursor, "{by:?} {order:?}");
    by_page
}

pub async fn lists_are_sorted_by_every_key_in_both_orders(fixture: &Fixture) {
    submit_in_all_states(fixture, 40).await;
    for (n, priority) in [Priority::Critical, Priority::Low, Priority::High, Priority::Critical].into_iter().enumerate()
    {
        let job = fixture.job("d", 50).priority(priority).tag("listed").named(&format!("own {n}"));
        fixture.submit(job.scheduled(fixture.at(5_000 - i64::try_from(n).unwrap()))).await;
    }
    let tagged = Filter { tag: Some("listed".into()), ..Filter::default() };
    let search = Filter { q: Some("o".into()), ..Filter::default() };
    for filter in [Filter::default(), tagged, search] {
        let views = fixture.store.job_list(&filter, Page::offset(0, 100)).await.unwrap().jobs;
        for (by, key) in [
            (SortBy::Created, (|job: &JobView| job.created_at.as_ms()) as fn(&JobView) -> i64),
            (SortBy::Updated, |job| job.updated_at.as_ms()),
            (SortBy::Scheduled, |job| job.scheduled_at.unwrap_or(job.created_at).as_ms()),
            (SortBy::Priority, |job| -i64::from(job.priority.rank())),
        ] {
            let mut expected: Vec<(i64, JobId)> = views.iter().map(|job| (key(job), job.id)).collect();
            expected.sort_unstable();
            let mut expected: Vec<JobId> = expected.into_iter().map(|(_, id)| id).collect();
            assert_eq!(sorted(fixture, &filter, by, Order::Asc).await, expected, "{by:?}");
            expected.reverse();
            assert_eq!(sorted(fixture, &filter, by, Order::Desc).await, expected, "{by:?}");
        }
    }
}

pub async fn a_cursor_of_another_sort_is_rejected(fixture: &Fixture) {
    let id = fixture.submit(fixture.job("a", 0)).await;
    let first = Page::offset(0, 1).sorted(SortBy::Updated, Order::Desc);
    let cursor = Cursor { by: SortBy::Updated, key: 0, id };
    for by in [SortBy::Created, SortBy::Priority, SortBy::Scheduled] {
        let page = Page { start: Start::After(Some(cursor)), ..first.sorted(by, Order::Desc) };
        let answer = fixture.store.job_list(&Filter::default(), page).await;
        assert!(matches!(answer, Err(StoreError::Invalid(errors)) if errors[0].path == "cursor"), "{by:?}");
    }
}

pub async fn searches_and_sorts_stop_at_their_bound_and_say_so(fixture: &Fixture) {
    let old = fixture.submit(fixture.job("first", 0).named("needle 1").scheduled(fixture.at(1))).await;
    let many = (0..COUNT_LIMIT).map(|n| fixture.job("a", 2).named(&format!("hay {n}")).priority(Priority::Low));
    for part in many.collect::<Vec<_>>().chunks(2_500) {
        fixture.submit_all(part.to_vec()).await;
    }
    let new = fixture.submit(fixture.job("b", 3).named("needle 2").priority(Priority::Low)).await;
    let search = Filter { q: Some("NEEDLE".into()), ..Filter::default() };
    let first = fixture.store.job_list(&search, Page::after(None, 5)).await.unwrap();
    assert_eq!(first.jobs.iter().map(|job| job.id).collect::<Vec<_>>(), [new]);
    assert!(first.is_partial && !first.total_is_exact);
    let rest = fixture.store.job_list(&search, Page::after(first.next.map(|next| next.id), 5)).await.unwrap();
    assert_eq!(rest.jobs.iter().map(|job| job.id).collect::<Vec<_>>(), [old], "the cursor continues the search");
    assert!(!rest.is_partial);

    let by_time = Page::offset(0, 1).sorted(SortBy::Scheduled, Order::Asc);
    let found = fixture.store.job_list(&Filter::default(), by_time).await.unwrap();
    assert_eq!((found.total, found.total_is_exact, found.sort_is_exact), (COUNT_LIMIT as u64 + 2, true, false));
    assert_ne!(found.jobs[0].id, old, "only the newest are sorted");
    for (by, order) in [(SortBy::Created, Order::Asc), (SortBy::Priority, Order::Desc)] {
        let found = fixture.store.job_list(&Filter::default(), Page::offset(0, 1).sorted(by, order)).await.unwrap();
        assert_eq!((found.jobs[0].id, found.sort_is_exact), (old, true), "{by:?} comes from an index");
    }
}

pub async fn pages_beyond_the_limit_are_rejected(fixture: &Fixture) {
    let far = Page::offset(9_990, 20);
    assert!(matches!(fixture.store.job_list(&Filter::default(), far).await, Err(StoreError::Invalid(_))));
    let endless = Page::offset(usize::MAX, 20);
    assert!(matches!(fixture.store.job_list(&Filter::default(), endless).await, Err(StoreError::Invalid(_))));
}

pub async fn counters_follow_the_jobs(fixture: &Fixture) {
    let ids = submit_in_all_states(fixture, 50).await;
    let counts = fixture.store.counts().await.unwrap();
    let mut sum = 0;
    for tally in Tally::ALL.into_iter().filter(|tally| *tally < Tally::Ran) {
        let states: Vec<JobState> = JobState::ALL.into_iter().filter(|state| Tally::of(*state) == tally).collect();
        let listed = fixture.list(with_states(&states)).await.len();
        assert_eq!(counts.total(tally), i64::try_from(listed).unwrap(), "{tally:?}");
        sum += listed;
    }
    assert_eq!(sum, ids.iter().collect::<HashSet<_>>().len());
}
