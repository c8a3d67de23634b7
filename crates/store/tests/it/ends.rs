//! Updates and outcomes that a run reports.

use faena_domain::{ErrorReason, JobState, LogEvent, LogLine, Progress};
use faena_store::{ClaimedJob, RunEnd, RunOutcome, RunUpdateKind, Tally};

use crate::support::*;

pub async fn a_completed_job_shows_its_result(fixture: &Fixture) {
    let job = fixture.submit_and_claim(fixture.job("a", 0)).await;
    let result = r#"{"n":12345678901234567890,"z":1,"a":"ñ"}"#;
    assert!(fixture.end(&job, RunOutcome::Completed { result: Some(result.into()) }, 5).await);
    let view = fixture.get(job.id).await;
    assert_eq!((view.status, view.completed_at, view.run), (JobState::Completed, Some(fixture.at(5)), Some(job.run)));
    assert_eq!(view.result.unwrap().get(), result);
    assert_eq!(view.worker_id, Some(fixture.worker.to_string()));
    assert_eq!((view.error, view.error_reason), (None, None));

    let without_result = fixture.submit_and_claim(fixture.job("a", 6)).await;
    assert!(fixture.end(&without_result, RunOutcome::Completed { result: None }, 7).await);
    assert!(fixture.get(without_result.id).await.result.is_none());
}

pub async fn the_results_of_many_ends_in_one_call_are_in_order(fixture: &Fixture) {
    fixture.submit_all((0..60).map(|n| fixture.job(["a", "b", "c"][n % 3], 0)).collect()).await;
    let mut jobs = Vec::new();
    for ms in 1..4 {
        jobs.extend(fixture.claim(20, ms).await);
    }
    let ends: Vec<RunEnd> = jobs
        .iter()
        .enumerate()
        .map(|(n, job)| {
            let outcome = match n % 4 {
                0 => completed(),
                1 => failed("no"),
                2 => fixture.retry(99),
                _ => RunOutcome::Released,
            };
            let mut end = fixture.run_end(job, outcome, 10);
            if n % 5 == 0 {
                end.run += 1_000_000;
            }
            end
        })
        .collect();
    let results = fixture.store.job_end(ends, fixture.at(10)).await.unwrap();
    assert_eq!(results, (0..60).map(|n| n % 5 != 0).collect::<Vec<_>>());
    assert_eq!(fixture.total(Tally::InFlight).await, 12);
    let in_flight = fixture.list(faena_store::Filter { states: vec![JobState::Assigned], ..Default::default() }).await;
    assert_eq!(in_flight.len(), 12);
}

pub async fn a_started_job_is_processing(fixture: &Fixture) {
    let job = fixture.submit_and_claim(fixture.job("a", 0)).await;
    fixture.report_start(&job, 3).await;
    let view = fixture.get(job.id).await;
    assert_eq!((view.status, view.started_at), (JobState::Processing, Some(fixture.at(3))));
    assert_eq!((view.run, view.worker_id), (Some(job.run), Some(fixture.worker.to_string())));
    assert_eq!(fixture.events(job.id).await, ["created", "queued", "assigned", "started"]);
}

pub async fn progress_messages_and_steps_are_kept_and_shown(fixture: &Fixture) {
    let job = fixture.submit_and_claim(fixture.job("a", 0)).await;
    fixture.report_start(&job, 1).await;
    assert!(fixture.report_update(&job, percent(12.5, "reading"), 2).await);
    assert!(fixture.report_update(&job, message("line \"one\"\n"), 3).await);
    assert!(fixture.report_update(&job, step("E1", r#"{"rows":3}"#), 4).await);
    assert!(fixture.report_update(&job, percent(50.0, "half"), 5).await);

    let view = fixture.get(job.id).await;
    let progress = view.progress.unwrap();
    assert_eq!((progress.percentage, progress.message.as_deref()), (Some(50.0), Some("half")));
    assert_eq!((view.steps[0].name.as_str(), view.steps[0].result.get()), ("E1", r#"{"rows":3}"#));
    assert_eq!((view.steps[0].at, view.steps[0].run), (fixture.at(4), job.run));
    assert_eq!(
        fixture.events(job.id).await,
        ["created", "queued", "assigned", "started", "progress", "message", "step_completed", "progress"]
    );
    let message = &view.execution_log[5];
    assert_eq!((message.details.as_str(), message.run), ("line \"one\"\n", Some(job.run)));

    assert!(fixture.end(&job, completed(), 6).await);
    assert_eq!(
        fixture.events(job.id).await.iter().filter(|event| *event == "progress").count(),
        2,
        "kept after the end"
    );
}

pub async fn the_last_progress_stays_in_every_later_state(fixture: &Fixture) {
    let shown = async |id| fixture.get(id).await.progress.map(|progress| progress.message.unwrap());
    let some = |text: &str| Some(text.to_owned());
    for (at, outcome) in [completed(), failed("no"), cancelled()].into_iter().enumerate() {
        let job = fixture.submit_and_claim(fixture.job("a", 0)).await;
        assert!(fixture.report_update(&job, percent(40.0, "nearly half"), 1).await);
        assert!(fixture.end(&job, outcome, 2).await);
        assert_eq!(shown(job.id).await, some("nearly half"), "end {at}");
        let listed =
            fixture.store.job_list(&faena_store::Filter::default(), first_page()).await.unwrap().jobs.remove(0);
        assert_eq!((listed.id, listed.progress.unwrap().percentage), (job.id, Some(40.0)), "end {at}");
    }

    let first = fixture.submit_and_claim(fixture.job("b", 3)).await;
    let id = first.id;
    assert!(fixture.report_update(&first, percent(60.0, "first run"), 4).await);
    fixture.retry_at(&first, 10, 5).await;
    assert_eq!(shown(id).await, some("first run"), "RETRYING");
    fixture.promote(10).await;
    assert_eq!(shown(id).await, some("first run"), "QUEUED");
    let second = fixture.claim_one(11).await;
    assert_eq!(shown(id).await, some("first run"), "ASSIGNED");
    fixture.report_start(&second, 12).await;
    assert_eq!(shown(id).await, some("first run"), "until the next run reports something");
    assert!(fixture.report_update(&second, step("E1", "1"), 13).await);
    let progress = fixture.get(id).await.progress.unwrap();
    assert_eq!((progress.current_step.as_deref(), progress.message), (Some("E1"), None), "nothing of the first run");
    assert!(fixture.report_update(&second, percent(10.0, "second run"), 14).await);
    assert!(!fixture.report_update(&first, percent(99.0, "late"), 15).await);
    fixture.release(&second, 16).await;
    assert_eq!(shown(id).await, some("second run"), "released");
    fixture.cancel(id, 17).await;
    fixture.retry_manually(id, 18).await;
    assert_eq!(shown(id).await, some("second run"), "retried manually");
    fixture.store.job_delete(id, None, fixture.at(19)).await.unwrap();
    assert!(fixture.database.tables_with(id).await.is_empty(), "deleted with the job");

    let without_progress = fixture.submit_and_claim(fixture.job("c", 20)).await;
    fixture.complete(&without_progress, 21).await;
    assert_eq!(fixture.get(without_progress.id).await.progress, None);
}

pub async fn a_custom_event_of_a_worker_is_an_entry_of_the_log(fixture: &Fixture) {
    let job = fixture.submit_and_claim(fixture.job("a", 0)).await;
    let event = LogEvent::custom("training_started").unwrap();
    let named = RunUpdateKind::Message { event: event.clone(), text: "10 epochs".into() };
    assert!(fixture.report_update(&job, named, 1).await);
    fixture.complete(&job, 2).await;
    let log = fixture.get(job.id).await.execution_log;
    let entry = log.iter().find(|entry| entry.event == event).unwrap();
    assert_eq!((entry.details.as_str(), entry.run, entry.timestamp), ("10 epochs", Some(job.run), fixture.at(1)));
}

pub async fn a_step_is_kept_once_and_survives_the_run(fixture: &Fixture) {
    let step = |result| step("E1", result);
    let first = fixture.submit_and_claim(fixture.job("a", 0)).await;
    assert!(fixture.report_update(&first, step("1"), 1).await);
    assert!(fixture.report_update(&first, step("2"), 2).await, "reported again");
    fixture.retry_at(&first, 10, 3).await;
    fixture.promote(10).await;
    let second = fixture.claim_one(11).await;
    let steps = fixture.get(first.id).await.steps;
    assert_eq!((steps.len(), steps[0].result.get(), steps[0].run), (1, "1", first.run));
    fixture.complete(&second, 12).await;
    assert_eq!(fixture.get(first.id).await.steps.len(), 1);
}

pub async fn completed_steps_update_the_progress(fixture: &Fixture) {
    let named_step = |name: &str, total| RunUpdateKind::Step { name: name.into(), result: "1".into(), total };
    let job = fixture.submit_and_claim(fixture.job("a", 0)).await;
    let shown = async || {
        let progress = fixture.get(job.id).await.progress.unwrap();
        (progress.current_step, progress.completed_steps, progress.total_steps, progress.percentage)
    };
    let some = |name: &str| Some(name.to_owned());
    assert!(fixture.report_update(&job, named_step("read", None), 1).await);
    assert_eq!(shown().await, (some("read"), Some(1), None, None), "the total is unknown");
    assert!(fixture.report_update(&job, named_step("sort", Some(4)), 2).await);
    assert_eq!(shown().await, (some("sort"), Some(2), Some(4), Some(50.0)));
    assert!(fixture.report_update(&job, named_step("write", None), 3).await);
    assert_eq!(shown().await, (some("write"), Some(3), Some(4), Some(75.0)), "the total is remembered");
    assert!(fixture.report_update(&job, named_step("sort", None), 4).await, "reported again");
    assert_eq!(shown().await.1, Some(3));
    let listed = fixture.store.job_list(&faena_store::Filter::default(), first_page()).await.unwrap().jobs.remove(0);
    assert_eq!(listed.progress.unwrap().percentage, Some(75.0));

    fixture.retry_at(&job, 100, 5).await;
    assert_eq!(
        shown().await,
        (some("sort"), Some(3), Some(4), Some(75.0)),
        "the next attempt keeps the completed steps"
    );
    fixture.promote(100).await;
    let reclaimed = fixture.claim_one(101).await;
    fixture.report_start(&reclaimed, 102).await;
    assert_eq!(shown().await.3, Some(75.0));
    assert!(fixture.report_update(&reclaimed, named_step("send", None), 103).await);
    assert_eq!(shown().await, (some("send"), Some(4), Some(4), Some(100.0)));
    fixture.complete(&reclaimed, 104).await;
    assert_eq!(shown().await, (some("send"), Some(4), Some(4), Some(100.0)));
    let names: Vec<_> = fixture.get(job.id).await.steps.into_iter().map(|step| step.name).collect();
    assert_eq!(names, ["read", "sort", "write", "send"]);
}

fn first_page() -> faena_store::Page {
    faena_store::Page::offset(0, 10)
}

pub async fn reported_progress_wins_over_counted_steps(fixture: &Fixture) {
    let job = fixture.submit_and_claim(fixture.job("a", 0)).await;
    let total = |total| RunUpdateKind::Step { name: "one".into(), result: "1".into(), total };
    assert!(fixture.report_update(&job, percent(12.0, "reading"), 1).await);
    assert_eq!(
        fixture.get(job.id).await.progress.unwrap().completed_steps,
        None,
        "steps are not counted before the first one"
    );
    assert!(fixture.report_update(&job, total(Some(5)), 2).await);
    let progress = fixture.get(job.id).await.progress.unwrap();
    assert_eq!((progress.message.as_deref(), progress.percentage), (Some("reading"), Some(20.0)));
    assert!(fixture.report_update(&job, percent(33.0, "half way"), 3).await);
    let progress = fixture.get(job.id).await.progress.unwrap();
    assert_eq!((progress.percentage, progress.completed_steps, progress.total_steps), (Some(33.0), Some(1), Some(5)));
    let reported = Progress { completed_steps: Some(7), total_steps: Some(9), ..Progress::default() };
    assert!(fixture.report_update(&job, RunUpdateKind::Progress(reported.clone()), 4).await);
    assert_eq!(fixture.get(job.id).await.progress, Some(reported));
}

pub async fn the_steps_of_several_jobs_are_read_together(fixture: &Fixture) {
    let [a, b, c] = [0, 1, 2].map(|n| fixture.submit_and_claim(fixture.job("a", n)));
    let (a, b, c) = (a.await, b.await, c.await);
    for (job, name, ms) in [(&a, "z", 3), (&b, "x", 4), (&a, "y", 5)] {
        assert!(fixture.report_update(job, step(name, "{\"n\":1}"), ms).await);
    }
    let steps = fixture.store.job_steps(vec![b.id, c.id, a.id]).await.unwrap();
    let seen: Vec<_> = steps.iter().map(|(id, step)| (*id, step.name.as_str(), step.at)).collect();
    assert_eq!(seen, [(b.id, "x", fixture.at(4)), (a.id, "z", fixture.at(3)), (a.id, "y", fixture.at(5))]);
    assert_eq!((steps[0].1.result.get(), steps[0].1.run), ("{\"n\":1}", b.run));
    assert!(fixture.store.job_steps(Vec::new()).await.unwrap().is_empty());
}

pub async fn a_late_report_is_recorded_in_the_log(fixture: &Fixture) {
    let first = fixture.submit_and_claim(fixture.job("a", 0)).await;
    fixture.retry_at(&first, 10, 1).await;
    fixture.promote(10).await;
    let second = fixture.claim_one(11).await;
    let late = || RunUpdateKind::Stale("complete of an old run".into());
    assert!(fixture.report_update(&first, late(), 12).await);
    let view = fixture.get(first.id).await;
    assert_eq!((view.status, view.run), (JobState::Assigned, Some(second.run)), "it changes nothing");
    let line = view.execution_log.iter().find(|entry| entry.event == LogEvent::StaleReport).unwrap();
    assert_eq!(
        (line.details.as_str(), line.run, line.timestamp),
        ("complete of an old run", Some(first.run), fixture.at(12))
    );
    fixture.complete(&second, 13).await;
    assert!(fixture.report_update(&second, late(), 14).await, "a late report of a finished job is recorded too");
    assert_eq!(fixture.database.number("SELECT count(*) FROM running").await, 0);
    fixture.store.job_delete(first.id, None, fixture.at(1_000)).await.unwrap();
    assert!(!fixture.report_update(&first, late(), 15).await, "the job was deleted");
}

pub async fn updates_of_a_stale_run_change_nothing(fixture: &Fixture) {
    let first = fixture.submit_and_claim(fixture.job("a", 0)).await;
    fixture.retry_at(&first, 10, 1).await;
    let assert_updates_ignored = async |job: &ClaimedJob, ms| {
        let message = message("stale");
        for kind in [RunUpdateKind::Started, percent(99.0, "stale"), message, step("E9", "9")] {
            assert!(!fixture.report_update(job, kind, ms).await);
        }
    };
    let before = serde_json::to_value(fixture.get(first.id).await).unwrap();
    assert_updates_ignored(&first, 2).await;
    assert_eq!(serde_json::to_value(fixture.get(first.id).await).unwrap(), before);

    fixture.promote(10).await;
    let second = fixture.claim_one(11).await;
    assert_updates_ignored(&first, 12).await;
    assert_eq!(fixture.state(first.id).await, JobState::Assigned);
    fixture.complete(&second, 13).await;
    assert_updates_ignored(&second, 14).await;
    let view = fixture.get(first.id).await;
    assert!(view.steps.is_empty() && view.progress.is_none());
    assert!(!fixture.events(first.id).await.contains(&"message".into()));
}

pub async fn the_same_end_reported_again_counts_once(fixture: &Fixture) {
    let outcomes = [completed(), failed("no"), fixture.retry(50), RunOutcome::Released, cancelled()];
    for (n, outcome) in outcomes.into_iter().enumerate() {
        // Each outcome once for the last job of its claim, and once for a claim that stays open.
        for closes_claim in [true, false] {
            let job = fixture.submit_and_claim(fixture.job(&format!("k{n}{closes_claim}"), 0)).await;
            let end = RunEnd { closes_claim, ..fixture.run_end(&job, outcome.clone(), 5) };
            assert!(fixture.report_end(end.clone()).await);
            let (state, counts) = (fixture.state(job.id).await, fixture.store.counts().await.unwrap());
            assert_eq!(state, outcome.state());
            let late = RunEnd { at: fixture.at(6), ..end.clone() };
            assert!(fixture.report_end(end).await, "{outcome:?} reported again, claim closed: {closes_claim}");
            assert!(!fixture.report_end(late).await, "{outcome:?} reported at another time is another end");
            assert_eq!((fixture.state(job.id).await, fixture.store.counts().await.unwrap()), (state, counts));
            assert_eq!(fixture.get(job.id).await.updated_at, fixture.at(5));
            fixture.store.job_delete(job.id, None, fixture.at(1_000)).await.unwrap();
        }
    }
}

pub async fn the_same_end_twice_in_one_call_counts_once(fixture: &Fixture) {
    for outcome in [completed(), failed("no"), fixture.retry(50), RunOutcome::Released, cancelled()] {
        let job = fixture.submit_and_claim(fixture.job("a", 0)).await;
        let end = fixture.run_end(&job, outcome.clone(), 5);
        let repeated = RunEnd { closes_claim: true, ..end.clone() };
        let late = RunEnd { at: fixture.at(6), ..end.clone() };
        let results = fixture.store.job_end(vec![end, late, repeated], fixture.at(6)).await.unwrap();
        assert_eq!(results, [true, false, true], "{outcome:?}");
        assert_eq!(fixture.state(job.id).await, outcome.state());
        fixture.store.job_delete(job.id, None, fixture.at(1_000)).await.unwrap();
    }
}

pub async fn another_end_of_an_ended_run_changes_nothing(fixture: &Fixture) {
    let outcomes = [completed(), failed("no"), fixture.retry(50), RunOutcome::Released, cancelled()];
    for first in &outcomes {
        for second in outcomes.iter().filter(|second| second.state() != first.state()) {
            let job = fixture.submit_and_claim(fixture.job("a", 0)).await;
            assert!(fixture.end(&job, first.clone(), 5).await);
            fixture.end(&job, second.clone(), 6).await;
            assert_eq!(fixture.state(job.id).await, first.state(), "{second:?} after {first:?}");
            fixture.database.assert_consistent().await;
            fixture.store.job_delete(job.id, None, fixture.at(1_000)).await.unwrap();
        }
    }
}

pub async fn an_end_after_its_claim_was_closed_is_stale_unless_it_is_a_repetition(fixture: &Fixture) {
    fixture.submit_all(vec![fixture.job("a", 0), fixture.job("a", 0)]).await;
    let jobs = fixture.claim(2, 1).await;
    fixture.complete(&jobs[0], 2).await;
    let last = RunEnd { closes_claim: true, ..fixture.run_end(&jobs[1], fixture.retry(50), 3) };
    assert!(fixture.report_end(last).await);
    assert_eq!(fixture.database.number("SELECT count(*) FROM claim").await, 0);

    assert!(fixture.end(&jobs[0], completed(), 2).await, "reported before");
    assert!(!fixture.end(&jobs[0], failed("no"), 4).await, "a different outcome of the same run");
    fixture.promote(50).await;
    let reclaimed = fixture.claim_one(51).await;
    let stale = ClaimedJob { run: jobs[1].run + 1_000, ..jobs[1].clone() };
    assert!(!fixture.end(&stale, completed(), 52).await, "a run number that was never assigned");
    fixture.complete(&reclaimed, 53).await;
}

pub async fn a_report_of_a_deleted_job_changes_nothing(fixture: &Fixture) {
    fixture.submit_all((0..6).map(|_| fixture.job("a", 0)).collect()).await;
    let jobs = fixture.claim(6, 1).await;
    for (job, outcome) in
        jobs.iter().zip([completed(), failed("no"), fixture.retry(50), RunOutcome::Released, cancelled()])
    {
        assert!(fixture.end(job, outcome, 2).await);
        fixture.store.job_delete(job.id, None, fixture.at(1_000)).await.unwrap();
        for late in [completed(), failed("no"), fixture.retry(50), RunOutcome::Released, cancelled()] {
            assert!(!fixture.end(job, late, 3).await);
        }
        assert!(!fixture.report_update(job, message("late"), 3).await);
        assert_eq!(fixture.database.tables_with(job.id).await, [""; 0]);
    }
    fixture.complete(&jobs[5], 4).await;
}

pub async fn a_job_with_a_failed_attempt_waits_and_keeps_its_retry_count(fixture: &Fixture) {
    let first = fixture.submit_and_claim(fixture.job("a", 0)).await;
    fixture.report_start(&first, 1).await;
    fixture.retry_at(&first, 5_000, 2).await;

    let view = fixture.get(first.id).await;
    assert_eq!((view.status, view.retry_count), (JobState::Retrying, 1));
    assert_eq!(view.next_attempt_at, Some(fixture.at(5_000)));
    assert_eq!((view.error.as_deref(), view.error_reason), (Some("not now"), Some(ErrorReason::Error)));
    assert_eq!(fixture.promote(4_999).await.promoted, 0);
    assert_eq!(fixture.promote(5_000).await.promoted, 1);
    let view = fixture.get(first.id).await;
    assert_eq!((view.status, view.retry_count, view.next_attempt_at), (JobState::Queued, 1, None));
    let second = fixture.claim_one(5_001).await;
    assert_eq!((second.id, second.retry_count, second.ready_at), (first.id, 1, fixture.at(5_000)));
    assert_eq!(fixture.get(first.id).await.retry_count, 1, "while it is in flight");
    fixture.complete(&second, 5_002).await;
    let view = fixture.get(first.id).await;
    assert_eq!((view.status, view.retry_count, view.error), (JobState::Completed, 1, None));
}

pub async fn a_job_without_attempts_left_is_dead_lettered(fixture: &Fixture) {
    let job = fixture.submit_and_claim(fixture.job("a", 0)).await;
    let outcome = RunOutcome::Failed { error: "timed out".into(), reason: ErrorReason::Timeout };
    assert!(fixture.end(&job, outcome, 5).await);
    let view = fixture.get(job.id).await;
    assert_eq!((view.status, view.completed_at), (JobState::Failed, Some(fixture.at(5))));
    assert_eq!((view.error.as_deref(), view.error_reason), (Some("timed out"), Some(ErrorReason::Timeout)));
    assert!(fixture.claim(1, 6).await.is_empty());
}

pub async fn a_released_job_keeps_its_retry_count_and_ready_time(fixture: &Fixture) {
    let first = fixture.submit_and_claim(fixture.job("a", 0)).await;
    fixture.retry_at(&first, 10, 1).await;
    fixture.promote(10).await;
    let job = fixture.claim_one(11).await;
    fixture.submit(fixture.job("a", 12)).await;
    fixture.report_start(&job, 13).await;
    fixture.release(&job, 14).await;

    let view = fixture.get(job.id).await;
    assert_eq!((view.status, view.retry_count, view.queued_at), (JobState::Queued, 1, Some(fixture.at(10))));
    let reclaimed = fixture.claim_one(15).await;
    assert_eq!((reclaimed.id, reclaimed.retry_count, reclaimed.ready_at), (job.id, 1, fixture.at(10)));
}

pub async fn a_job_without_updates_leaves_only_its_job_and_done_rows(fixture: &Fixture) {
    let job = fixture.submit_and_claim(fixture.job("a", 0)).await;
    let end = RunEnd { may_have_other_rows: false, closes_claim: true, ..fixture.run_end(&job, completed(), 1) };
    assert!(fixture.report_end(end).await);
    assert_eq!(fixture.database.tables_with(job.id).await, ["job", "done"]);
    assert_eq!(fixture.database.number("SELECT count(*) FROM claim").await, 0);
}

pub async fn text_that_the_database_cannot_store_does_not_stop_other_jobs(fixture: &Fixture) {
    let good = fixture.submit_and_claim(fixture.job("a", 0)).await;
    fixture.submit_all((0..3).map(|_| fixture.job("b", 1)).collect()).await;
    let bad = fixture.claim(3, 1).await;
    let nul = "broken \0 pipe";
    assert!(fixture.report_update(&bad[0], message(nul), 2).await);
    assert!(fixture.report_update(&bad[0], percent(1.0, nul), 2).await);
    assert!(fixture.report_update(&bad[0], step(nul, "1"), 2).await);
    fixture.store.job_cancel(bad[1].id, nul, None, fixture.at(3)).await.unwrap();
    let retry = RunOutcome::Retry { due_at: fixture.at(9), error: nul.into(), reason: ErrorReason::Error };
    let ends = vec![
        fixture.run_end(&good, completed(), 4),
        fixture.run_end(&bad[0], failed(nul), 4),
        fixture.run_end(&bad[1], RunOutcome::Cancelled { cause: nul.into() }, 4),
        fixture.run_end(&bad[2], retry, 4),
    ];
    assert_eq!(fixture.store.job_end(ends, fixture.at(4)).await.unwrap(), [true; 4]);
    assert_eq!(fixture.state(good.id).await, JobState::Completed);
    for (job, state) in bad.iter().zip([JobState::Failed, JobState::Cancelled, JobState::Retrying]) {
        let view = fixture.get(job.id).await;
        assert_eq!(view.status, state);
        assert!(view.error.unwrap().starts_with("broken"));
    }
}

pub async fn the_log_of_a_plain_job_is_complete(fixture: &Fixture) {
    let job = fixture.submit_and_claim(fixture.job("a", 0)).await;
    let log = LogLine::chunk(&[
        LogLine::new(fixture.at(0), LogEvent::Queued, ""),
        LogLine::new(fixture.at(0), LogEvent::Assigned, ""),
        LogLine::new(fixture.at(0), LogEvent::Started, ""),
        LogLine::new(fixture.at(0), LogEvent::Completed, ""),
    ]);
    assert!(fixture.report_end(RunEnd { log, at: fixture.at(0), ..fixture.run_end(&job, completed(), 0) }).await);
    assert_eq!(
        fixture.events(job.id).await,
        ["created", "queued", "assigned", "started", "completed"],
        "in one millisecond"
    );
    let view = fixture.get(job.id).await;
    assert_eq!(view.execution_log[1].run, None, "waiting belongs to no run");
    assert!(view.execution_log[2..].iter().all(|entry| entry.run == Some(job.run)));
    assert_eq!(view.queued_at, Some(fixture.at(0)));
}

pub async fn the_log_of_a_retried_job_is_complete(fixture: &Fixture) {
    let first = fixture.submit_and_claim(fixture.job("a", 0)).await;
    fixture.retry_at(&first, 100, 10).await;
    fixture.promote(100).await;
    let second = fixture.claim_one(110).await;
    fixture.release(&second, 120).await;
    let third = fixture.claim_one(130).await;
    fixture.complete(&third, 140).await;
    let log = fixture.get(first.id).await.execution_log;
    let seen: Vec<(&str, i64)> = log.iter().map(|entry| (entry.event.as_str(), entry.run.unwrap_or(0))).collect();
    let [a, b, c] = [first.run, second.run, third.run];
    #[rustfmt::skip]
    assert_eq!(seen, [
        ("created", 0),
        ("queued", 0), ("assigned", a), ("started", a), ("retry_scheduled", a),
        ("queued", 0), ("assigned", b), ("started", b), ("released", b),
        ("queued", 0), ("assigned", c), ("started", c), ("completed", c),
    ]);
}

pub async fn four_concurrent_reporters_keep_the_counters_exact(fixture: &Fixture) {
    fixture.submit_all((0..400).map(|n| fixture.job(["a", "b"][n % 2], 0)).collect()).await;
    let mut jobs = Vec::new();
    for _ in 0..8 {
        jobs.extend(fixture.claim(50, 1).await);
    }
    let report = async |part: usize| {
        for (n, job) in jobs.iter().enumerate().filter(|(n, _)| n % 4 == part) {
            let outcome = if n % 7 == 0 { fixture.retry(50) } else { completed() };
            assert!(fixture.end(job, outcome, 2).await);
        }
    };
    tokio::join!(report(0), report(1), report(2), report(3));
    assert_eq!([fixture.total(Tally::Completed).await, fixture.total(Tally::Retrying).await], [342, 58]);
    assert_eq!(fixture.total(Tally::InFlight).await, 0);
}
