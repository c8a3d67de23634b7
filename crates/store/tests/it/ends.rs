//! Reports of runs, and their ends.

use faena_domain::{ErrorReason, JobState, LogEvent, LogLine, Progress};
use faena_store::{ClaimedJob, NoteKind, RunEnd, RunOutcome, Tally};

use crate::support::*;

pub async fn a_completed_job_shows_its_result(world: &World) {
    let job = world.running(world.job("a", 0)).await;
    let result = r#"{"n":12345678901234567890,"z":1,"a":"ñ"}"#;
    assert!(world.end(&job, RunOutcome::Completed { result: Some(result.into()) }, 5).await);
    let view = world.get(job.id).await;
    assert_eq!((view.status, view.completed_at, view.run), (JobState::Completed, Some(world.at(5)), Some(job.run)));
    assert_eq!(view.result.unwrap().get(), result);
    assert_eq!(view.worker_id, Some(world.worker.to_string()));
    assert_eq!((view.error, view.error_reason), (None, None));

    let silent = world.running(world.job("a", 6)).await;
    assert!(world.end(&silent, RunOutcome::Completed { result: None }, 7).await);
    assert!(world.get(silent.id).await.result.is_none());
}

pub async fn many_ends_in_one_call_are_answered_in_order(world: &World) {
    world.submit_all((0..60).map(|n| world.job(["a", "b", "c"][n % 3], 0)).collect()).await;
    let mut jobs = Vec::new();
    for ms in 1..4 {
        jobs.extend(world.claim(20, ms).await);
    }
    let ends: Vec<RunEnd> = jobs
        .iter()
        .enumerate()
        .map(|(n, job)| {
            let outcome = match n % 4 {
                0 => completed(),
                1 => failed("no"),
                2 => world.retry(99),
                _ => RunOutcome::HandedBack,
            };
            let mut end = world.an_end(job, outcome, 10);
            if n % 5 == 0 {
                end.run += 1_000_000;
            }
            end
        })
        .collect();
    let answers = world.store.job_end(ends, world.at(10)).await.unwrap();
    assert_eq!(answers, (0..60).map(|n| n % 5 != 0).collect::<Vec<_>>());
    assert_eq!(world.total(Tally::InFlight).await, 12);
    let held = world.list(faena_store::Filter { states: vec![JobState::Assigned], ..Default::default() }).await;
    assert_eq!(held.len(), 12);
}

pub async fn a_started_job_is_processing(world: &World) {
    let job = world.running(world.job("a", 0)).await;
    world.begin(&job, 3).await;
    let view = world.get(job.id).await;
    assert_eq!((view.status, view.started_at), (JobState::Processing, Some(world.at(3))));
    assert_eq!((view.run, view.worker_id), (Some(job.run), Some(world.worker.to_string())));
    assert_eq!(world.events(job.id).await, ["created", "queued", "assigned", "started"]);
}

pub async fn progress_messages_and_steps_are_kept_and_shown(world: &World) {
    let job = world.running(world.job("a", 0)).await;
    world.begin(&job, 1).await;
    assert!(world.note(&job, percent(12.5, "reading"), 2).await);
    assert!(world.note(&job, NoteKind::Message("line \"one\"\n".into()), 3).await);
    assert!(world.note(&job, step("E1", r#"{"rows":3}"#), 4).await);
    assert!(world.note(&job, percent(50.0, "half"), 5).await);

    let view = world.get(job.id).await;
    let progress = view.progress.unwrap();
    assert_eq!((progress.percentage, progress.message.as_deref()), (Some(50.0), Some("half")));
    assert_eq!((view.steps[0].name.as_str(), view.steps[0].result.get()), ("E1", r#"{"rows":3}"#));
    assert_eq!((view.steps[0].at, view.steps[0].run), (world.at(4), job.run));
    assert_eq!(
        world.events(job.id).await,
        ["created", "queued", "assigned", "started", "progress", "message", "step_completed", "progress"]
    );
    let message = &view.execution_log[5];
    assert_eq!((message.details.as_str(), message.run), ("line \"one\"\n", Some(job.run)));

    assert!(world.end(&job, completed(), 6).await);
    assert_eq!(
        world.events(job.id).await.iter().filter(|event| **event == "progress").count(),
        2,
        "kept after the end"
    );
}

pub async fn a_step_is_kept_once_and_survives_the_run(world: &World) {
    let step = |result| step("E1", result);
    let first = world.running(world.job("a", 0)).await;
    assert!(world.note(&first, step("1"), 1).await);
    assert!(world.note(&first, step("2"), 2).await, "reported again");
    world.retry_at(&first, 10, 3).await;
    world.promote(10).await;
    let second = world.claim_one(11).await;
    let steps = world.get(first.id).await.steps;
    assert_eq!((steps.len(), steps[0].result.get(), steps[0].run), (1, "1", first.run));
    world.complete(&second, 12).await;
    assert_eq!(world.get(first.id).await.steps.len(), 1);
}

pub async fn steps_move_the_progress(world: &World) {
    let of = |name: &str, total| NoteKind::Step { name: name.into(), result: "1".into(), total };
    let job = world.running(world.job("a", 0)).await;
    let shown = async || {
        let progress = world.get(job.id).await.progress.unwrap();
        (progress.current_step, progress.completed_steps, progress.total_steps, progress.percentage)
    };
    let some = |name: &str| Some(name.to_owned());
    assert!(world.note(&job, of("read", None), 1).await);
    assert_eq!(shown().await, (some("read"), Some(1), None, None), "the total is unknown");
    assert!(world.note(&job, of("sort", Some(4)), 2).await);
    assert_eq!(shown().await, (some("sort"), Some(2), Some(4), Some(50.0)));
    assert!(world.note(&job, of("write", None), 3).await);
    assert_eq!(shown().await, (some("write"), Some(3), Some(4), Some(75.0)), "the total is remembered");
    assert!(world.note(&job, of("sort", None), 4).await, "reported again");
    assert_eq!(shown().await.1, Some(3));
    let listed = world.store.job_list(&faena_store::Filter::default(), OFFSET).await.unwrap().jobs.remove(0);
    assert_eq!(listed.progress.unwrap().percentage, Some(75.0));

    world.retry_at(&job, 100, 5).await;
    assert_eq!(shown().await, (None, Some(3), Some(4), Some(75.0)), "the next try begins with them");
    world.promote(100).await;
    let again = world.claim_one(101).await;
    world.begin(&again, 102).await;
    assert_eq!(shown().await.3, Some(75.0));
    assert!(world.note(&again, of("send", None), 103).await);
    assert_eq!(shown().await, (some("send"), Some(4), Some(4), Some(100.0)));
    world.complete(&again, 104).await;
    assert_eq!(shown().await, (None, Some(4), Some(4), Some(100.0)));
    let names: Vec<_> = world.get(job.id).await.steps.into_iter().map(|step| step.name).collect();
    assert_eq!(names, ["read", "sort", "write", "send"]);
}

const OFFSET: faena_store::Page = faena_store::Page::Offset { offset: 0, limit: 10 };

pub async fn reported_progress_wins_over_counted_steps(world: &World) {
    let job = world.running(world.job("a", 0)).await;
    let total = |total| NoteKind::Step { name: "one".into(), result: "1".into(), total };
    assert!(world.note(&job, percent(12.0, "reading"), 1).await);
    assert_eq!(world.get(job.id).await.progress.unwrap().completed_steps, None, "no steps, nothing about steps");
    assert!(world.note(&job, total(Some(5)), 2).await);
    let progress = world.get(job.id).await.progress.unwrap();
    assert_eq!((progress.message.as_deref(), progress.percentage), (Some("reading"), Some(20.0)));
    assert!(world.note(&job, percent(33.0, "half way"), 3).await);
    let progress = world.get(job.id).await.progress.unwrap();
    assert_eq!((progress.percentage, progress.completed_steps, progress.total_steps), (Some(33.0), Some(1), Some(5)));
    let reported = Progress { completed_steps: Some(7), total_steps: Some(9), ..Progress::default() };
    assert!(world.note(&job, NoteKind::Progress(reported.clone()), 4).await);
    assert_eq!(world.get(job.id).await.progress, Some(reported));
}

pub async fn the_steps_of_several_jobs_are_read_together(world: &World) {
    let [a, b, c] = [0, 1, 2].map(|n| world.running(world.job("a", n)));
    let (a, b, c) = (a.await, b.await, c.await);
    for (job, name, ms) in [(&a, "z", 3), (&b, "x", 4), (&a, "y", 5)] {
        assert!(world.note(job, step(name, "{\"n\":1}"), ms).await);
    }
    let steps = world.store.job_steps(vec![b.id, c.id, a.id]).await.unwrap();
    let seen: Vec<_> = steps.iter().map(|(id, step)| (*id, step.name.as_str(), step.at)).collect();
    assert_eq!(seen, [(b.id, "x", world.at(4)), (a.id, "z", world.at(3)), (a.id, "y", world.at(5))]);
    assert_eq!((steps[0].1.result.get(), steps[0].1.run), ("{\"n\":1}", b.run));
    assert!(world.store.job_steps(Vec::new()).await.unwrap().is_empty());
}

pub async fn a_late_report_is_recorded_in_the_log(world: &World) {
    let first = world.running(world.job("a", 0)).await;
    world.retry_at(&first, 10, 1).await;
    world.promote(10).await;
    let second = world.claim_one(11).await;
    let late = || NoteKind::Stale("complete of an old run".into());
    assert!(world.note(&first, late(), 12).await);
    let view = world.get(first.id).await;
    assert_eq!((view.status, view.run), (JobState::Assigned, Some(second.run)), "it changes nothing");
    let line = view.execution_log.iter().find(|entry| entry.event == LogEvent::StaleReport).unwrap();
    assert_eq!(
        (line.details.as_str(), line.run, line.timestamp),
        ("complete of an old run", Some(first.run), world.at(12))
    );
    world.complete(&second, 13).await;
    assert!(world.note(&second, late(), 14).await, "of a finished job too");
    assert_eq!(world.ledger.number("SELECT count(*) FROM running").await, 0);
    world.store.job_delete(first.id, None, world.at(1_000)).await.unwrap();
    assert!(!world.note(&first, late(), 15).await, "the job is not there");
}

pub async fn notes_of_a_stale_run_change_nothing(world: &World) {
    let first = world.running(world.job("a", 0)).await;
    world.retry_at(&first, 10, 1).await;
    let every_note = async |job: &ClaimedJob, ms| {
        let message = NoteKind::Message("zombie".into());
        for kind in [NoteKind::Started, percent(99.0, "zombie"), message, step("E9", "9")] {
            assert!(!world.note(job, kind, ms).await);
        }
    };
    let before = serde_json::to_value(world.get(first.id).await).unwrap();
    every_note(&first, 2).await;
    assert_eq!(serde_json::to_value(world.get(first.id).await).unwrap(), before);

    world.promote(10).await;
    let second = world.claim_one(11).await;
    every_note(&first, 12).await;
    assert_eq!(world.state(first.id).await, JobState::Assigned);
    world.complete(&second, 13).await;
    every_note(&second, 14).await;
    let view = world.get(first.id).await;
    assert!(view.steps.is_empty() && view.progress.is_none());
    assert!(!world.events(first.id).await.contains(&"message"));
}

pub async fn the_same_end_reported_again_counts_once(world: &World) {
    let outcomes = [completed(), failed("no"), world.retry(50), RunOutcome::HandedBack, cancelled()];
    for (n, outcome) in outcomes.into_iter().enumerate() {
        // Each as the last of its claim, and with another job left in it.
        for closes_claim in [true, false] {
            let job = world.running(world.job(&format!("k{n}{closes_claim}"), 0)).await;
            let end = RunEnd { closes_claim, ..world.an_end(&job, outcome.clone(), 5) };
            assert!(world.report_end(end.clone()).await);
            let (state, counts) = (world.state(job.id).await, world.store.counts().await.unwrap());
            assert_eq!(state, outcome.state());
            let late = RunEnd { at: world.at(6), ..end.clone() };
            assert!(world.report_end(end).await, "{outcome:?} reported again, claim closed: {closes_claim}");
            assert!(!world.report_end(late).await, "{outcome:?} reported at another time is another end");
            assert_eq!((world.state(job.id).await, world.store.counts().await.unwrap()), (state, counts));
            assert_eq!(world.get(job.id).await.updated_at, world.at(5));
            world.store.job_delete(job.id, None, world.at(1_000)).await.unwrap();
        }
    }
}

pub async fn the_same_end_twice_in_one_call_counts_once(world: &World) {
    for outcome in [completed(), failed("no"), world.retry(50), RunOutcome::HandedBack, cancelled()] {
        let job = world.running(world.job("a", 0)).await;
        let end = world.an_end(&job, outcome.clone(), 5);
        let again = RunEnd { closes_claim: true, ..end.clone() };
        let late = RunEnd { at: world.at(6), ..end.clone() };
        let answers = world.store.job_end(vec![end, late, again], world.at(6)).await.unwrap();
        assert_eq!(answers, [true, false, true], "{outcome:?}");
        assert_eq!(world.state(job.id).await, outcome.state());
        world.store.job_delete(job.id, None, world.at(1_000)).await.unwrap();
    }
}

pub async fn another_end_of_an_ended_run_changes_nothing(world: &World) {
    let outcomes = [completed(), failed("no"), world.retry(50), RunOutcome::HandedBack, cancelled()];
    for first in &outcomes {
        for second in outcomes.iter().filter(|second| second.state() != first.state()) {
            let job = world.running(world.job("a", 0)).await;
            assert!(world.end(&job, first.clone(), 5).await);
            world.end(&job, second.clone(), 6).await;
            assert_eq!(world.state(job.id).await, first.state(), "{second:?} after {first:?}");
            world.ledger.prove().await;
            world.store.job_delete(job.id, None, world.at(1_000)).await.unwrap();
        }
    }
}

pub async fn an_end_after_its_claim_was_closed_is_stale_unless_it_is_a_repetition(world: &World) {
    world.submit_all(vec![world.job("a", 0), world.job("a", 0)]).await;
    let jobs = world.claim(2, 1).await;
    world.complete(&jobs[0], 2).await;
    let last = RunEnd { closes_claim: true, ..world.an_end(&jobs[1], world.retry(50), 3) };
    assert!(world.report_end(last).await);
    assert_eq!(world.ledger.number("SELECT count(*) FROM claim").await, 0);

    assert!(world.end(&jobs[0], completed(), 2).await, "reported before");
    assert!(!world.end(&jobs[0], failed("no"), 4).await, "another end of it");
    world.promote(50).await;
    let again = world.claim_one(51).await;
    let stale = ClaimedJob { run: jobs[1].run + 1_000, ..jobs[1].clone() };
    assert!(!world.end(&stale, completed(), 52).await, "a run that never was");
    world.complete(&again, 53).await;
}

pub async fn a_report_of_a_deleted_job_changes_nothing(world: &World) {
    world.submit_all((0..6).map(|_| world.job("a", 0)).collect()).await;
    let jobs = world.claim(6, 1).await;
    for (job, outcome) in
        jobs.iter().zip([completed(), failed("no"), world.retry(50), RunOutcome::HandedBack, cancelled()])
    {
        assert!(world.end(job, outcome, 2).await);
        world.store.job_delete(job.id, None, world.at(1_000)).await.unwrap();
        for late in [completed(), failed("no"), world.retry(50), RunOutcome::HandedBack, cancelled()] {
            assert!(!world.end(job, late, 3).await);
        }
        assert!(!world.note(job, NoteKind::Message("late".into()), 3).await);
        assert_eq!(world.ledger.tables_with(job.id).await, [""; 0]);
    }
    world.complete(&jobs[5], 4).await;
}

pub async fn a_failed_attempt_waits_and_keeps_its_retry_count(world: &World) {
    let first = world.running(world.job("a", 0)).await;
    world.begin(&first, 1).await;
    world.retry_at(&first, 5_000, 2).await;

    let view = world.get(first.id).await;
    assert_eq!((view.status, view.retry_count), (JobState::Retrying, 1));
    assert_eq!(view.next_retry_at, Some(world.at(5_000)));
    assert_eq!((view.error.as_deref(), view.error_reason), (Some("not now"), Some(ErrorReason::Error)));
    assert_eq!(world.promote(4_999).await.promoted, 0);
    assert_eq!(world.promote(5_000).await.promoted, 1);
    let view = world.get(first.id).await;
    assert_eq!((view.status, view.retry_count, view.next_retry_at), (JobState::Queued, 1, None));
    let second = world.claim_one(5_001).await;
    assert_eq!((second.id, second.retry_count, second.ready_at), (first.id, 1, world.at(5_000)));
    assert_eq!(world.get(first.id).await.retry_count, 1, "while it is handed out");
    world.complete(&second, 5_002).await;
    let view = world.get(first.id).await;
    assert_eq!((view.status, view.retry_count, view.error), (JobState::Completed, 1, None));
}

pub async fn a_job_without_attempts_left_is_dead_lettered(world: &World) {
    let job = world.running(world.job("a", 0)).await;
    let outcome = RunOutcome::Failed { error: "timed out".into(), reason: ErrorReason::Timeout };
    assert!(world.end(&job, outcome, 5).await);
    let view = world.get(job.id).await;
    assert_eq!((view.status, view.completed_at), (JobState::Failed, Some(world.at(5))));
    assert_eq!((view.error.as_deref(), view.error_reason), (Some("timed out"), Some(ErrorReason::Timeout)));
    assert!(world.claim(1, 6).await.is_empty());
}

pub async fn a_returned_job_keeps_its_retry_count_and_ready_time(world: &World) {
    let first = world.running(world.job("a", 0)).await;
    world.retry_at(&first, 10, 1).await;
    world.promote(10).await;
    let job = world.claim_one(11).await;
    world.submit(world.job("a", 12)).await;
    world.begin(&job, 13).await;
    world.hand_back(&job, 14).await;

    let view = world.get(job.id).await;
    assert_eq!((view.status, view.retry_count, view.queued_at), (JobState::Queued, 1, Some(world.at(10))));
    let again = world.claim_one(15).await;
    assert_eq!((again.id, again.retry_count, again.ready_at), (job.id, 1, world.at(10)));
}

pub async fn a_plain_job_leaves_no_side_rows(world: &World) {
    let job = world.running(world.job("a", 0)).await;
    let end = RunEnd { on_record: false, closes_claim: true, ..world.an_end(&job, completed(), 1) };
    assert!(world.report_end(end).await);
    assert_eq!(world.ledger.tables_with(job.id).await, ["job", "done"]);
    assert_eq!(world.ledger.number("SELECT count(*) FROM claim").await, 0);
}

pub async fn text_that_the_database_cannot_store_does_not_stop_other_jobs(world: &World) {
    let good = world.running(world.job("a", 0)).await;
    world.submit_all((0..3).map(|_| world.job("b", 1)).collect()).await;
    let bad = world.claim(3, 1).await;
    let nul = "broken \0 pipe";
    assert!(world.note(&bad[0], NoteKind::Message(nul.into()), 2).await);
    assert!(world.note(&bad[0], percent(1.0, nul), 2).await);
    assert!(world.note(&bad[0], step(nul, "1"), 2).await);
    world.store.job_cancel(bad[1].id, nul, None, world.at(3)).await.unwrap();
    let retry = RunOutcome::Retry { due_at: world.at(9), error: nul.into(), reason: ErrorReason::Error };
    let ends = vec![
        world.an_end(&good, completed(), 4),
        world.an_end(&bad[0], failed(nul), 4),
        world.an_end(&bad[1], RunOutcome::Cancelled { cause: nul.into() }, 4),
        world.an_end(&bad[2], retry, 4),
    ];
    assert_eq!(world.store.job_end(ends, world.at(4)).await.unwrap(), [true; 4]);
    assert_eq!(world.state(good.id).await, JobState::Completed);
    for (job, state) in bad.iter().zip([JobState::Failed, JobState::Cancelled, JobState::Retrying]) {
        let view = world.get(job.id).await;
        assert_eq!(view.status, state);
        assert!(view.error.unwrap().starts_with("broken"));
    }
}

pub async fn the_log_of_a_plain_job_is_complete(world: &World) {
    let job = world.running(world.job("a", 0)).await;
    let log = LogLine::chunk(&[
        LogLine::new(world.at(0), LogEvent::Queued, ""),
        LogLine::new(world.at(0), LogEvent::Assigned, ""),
        LogLine::new(world.at(0), LogEvent::Started, ""),
        LogLine::new(world.at(0), LogEvent::Completed, ""),
    ]);
    assert!(world.report_end(RunEnd { log, at: world.at(0), ..world.an_end(&job, completed(), 0) }).await);
    assert_eq!(
        world.events(job.id).await,
        ["created", "queued", "assigned", "started", "completed"],
        "in one millisecond"
    );
    let view = world.get(job.id).await;
    assert_eq!(view.execution_log[1].run, None, "waiting belongs to no run");
    assert!(view.execution_log[2..].iter().all(|entry| entry.run == Some(job.run)));
    assert_eq!(view.queued_at, Some(world.at(0)));
}

pub async fn the_log_of_a_retried_job_is_complete(world: &World) {
    let first = world.running(world.job("a", 0)).await;
    world.retry_at(&first, 100, 10).await;
    world.promote(100).await;
    let second = world.claim_one(110).await;
    world.hand_back(&second, 120).await;
    let third = world.claim_one(130).await;
    world.complete(&third, 140).await;
    let log = world.get(first.id).await.execution_log;
    let seen: Vec<(&str, i64)> = log.iter().map(|entry| (entry.event.as_str(), entry.run.unwrap_or(0))).collect();
    let [a, b, c] = [first.run, second.run, third.run];
    #[rustfmt::skip]
    assert_eq!(seen, [
        ("created", 0),
        ("queued", 0), ("assigned", a), ("started", a), ("retry_scheduled", a),
        ("queued", 0), ("assigned", b), ("started", b), ("handed_back", b),
        ("queued", 0), ("assigned", c), ("started", c), ("completed", c),
    ]);
}

pub async fn four_concurrent_reporters_keep_the_counters_exact(world: &World) {
    world.submit_all((0..400).map(|n| world.job(["a", "b"][n % 2], 0)).collect()).await;
    let mut jobs = Vec::new();
    for _ in 0..8 {
        jobs.extend(world.claim(50, 1).await);
    }
    let tell = async |part: usize| {
        for (n, job) in jobs.iter().enumerate().filter(|(n, _)| n % 4 == part) {
            let outcome = if n % 7 == 0 { world.retry(50) } else { completed() };
            assert!(world.end(job, outcome, 2).await);
        }
    };
    tokio::join!(tell(0), tell(1), tell(2), tell(3));
    assert_eq!([world.total(Tally::Completed).await, world.total(Tally::Retrying).await], [342, 58]);
    assert_eq!(world.total(Tally::InFlight).await, 0);
}
