//! The machines in `examples/machines`, on a clock that the test moves.

use faena_machine::{Definition, Effect, Outcome, Status, Step};
use serde_json::{Value, json};

use crate::support::{Trial, caller, definition, example};

fn submitted(effects: &[Effect]) -> Vec<&str> {
    let jobs = effects.iter().filter_map(|effect| match effect {
        Effect::Job(job) => Some(job.job_type.as_str()),
        _ => None,
    });
    jobs.collect()
}

/// Returns the templates of the mails so far.
fn mails(trial: &Trial<'_>) -> Vec<String> {
    let jobs = trial.effects.iter().filter_map(|effect| match effect {
        Effect::Job(job) => Some(job.payload["template"].as_str().unwrap().to_owned()),
        _ => None,
    });
    jobs.collect()
}

mod order_saga {
    use super::*;

    const STEPS: [(&str, &str); 3] =
        [("reserve", "stock.reserve"), ("charge", "payment.charge"), ("ship", "parcel.ship")];
    const UNDO: [(&str, &str); 3] =
        [("recall", "parcel.recall"), ("refund", "payment.refund"), ("release", "stock.release")];

    fn order(definition: &Definition) -> Trial<'_> {
        Trial::new(definition, json!({"orderId": "o-7", "amount": 5}))
    }

    fn complete(trial: &mut Trial<'_>, name: &str) -> Step {
        trial.job_ended(name, "completed", json!({"result": null}))
    }

    fn fail(trial: &mut Trial<'_>, name: &str) -> Step {
        trial.job_ended(name, "failed", json!({"error": {"message": "no answer"}}))
    }

    fn undo(trial: &mut Trial<'_>, from: usize) {
        for (name, _) in &UNDO[from..] {
            complete(trial, name);
        }
    }

    #[test]
    fn an_order_is_reserved_charged_and_shipped() {
        let definition = example("order-saga");
        let mut trial = order(&definition);
        for (name, _) in STEPS {
            assert_eq!(complete(&mut trial, name).outcome, Outcome::Applied);
        }
        assert_eq!((trial.task.state().as_str(), trial.task.status), ("SHIPPED", Status::Completed));
        assert_eq!(submitted(&trial.effects), STEPS.map(|(_, kind)| kind));
        assert_eq!(trial.last_payload("order.shipped"), json!({"orderId": "o-7"}));
    }

    #[test]
    fn a_failed_step_undoes_the_steps_so_far_in_reverse_order() {
        let definition = example("order-saga");
        for (failing, (name, _)) in STEPS.into_iter().enumerate() {
            let mut trial = order(&definition);
            for (before, _) in &STEPS[..failing] {
                complete(&mut trial, before);
            }
            fail(&mut trial, name);
            assert_eq!(trial.task.status, Status::Running);
            undo(&mut trial, 2 - failing);
            assert_eq!((trial.task.state().as_str(), trial.task.status), ("UNDONE", Status::Cancelled), "{name}");
            let expected: Vec<&str> =
                STEPS[..=failing].iter().chain(&UNDO[2 - failing..]).map(|(_, kind)| *kind).collect();
            assert_eq!(submitted(&trial.effects), expected);
            let reason = trial.last_payload("order.undone")["reason"].as_str().unwrap().to_owned();
            assert!(reason.ends_with("no answer"), "{reason}");
        }
    }

    #[test]
    fn a_declined_card_is_not_refunded() {
        let definition = example("order-saga");
        let mut trial = order(&definition);
        complete(&mut trial, "reserve");
        trial.job_ended("charge", "completed", json!({"result": {"declined": true}}));
        assert_eq!(trial.task.state(), "COMPENSATING.RELEASING");
        undo(&mut trial, 2);
        assert_eq!(trial.last_payload("order.undone")["reason"], "the payment was declined");
        assert!(!submitted(&trial.effects).contains(&"payment.refund"));
    }

    #[test]
    fn a_step_that_times_out_is_undone_and_its_late_end_changes_nothing() {
        let definition = example("order-saga");
        let mut trial = order(&definition);
        complete(&mut trial, "reserve");
        trial.wait("1h");
        assert_eq!(trial.task.state(), "COMPENSATING.REFUNDING");
        assert_eq!(complete(&mut trial, "charge").outcome, Outcome::Stale);
        assert_eq!(trial.task.state(), "COMPENSATING.REFUNDING");
        undo(&mut trial, 1);
        assert_eq!(trial.task.state(), "UNDONE");
    }

    #[test]
    fn a_cancelled_order_is_undone_from_the_last_step_on() {
        let definition = example("order-saga");
        let mut trial = order(&definition);
        complete(&mut trial, "reserve");
        trial.apply(faena_machine::Input::Cancel { actor: "key:alice".into(), reason: None });
        undo(&mut trial, 0);
        assert_eq!(trial.task.state(), "UNDONE");
        assert!(submitted(&trial.effects).ends_with(&UNDO.map(|(_, kind)| kind)));
    }

    #[test]
    fn a_failed_compensation_waits_for_a_person_and_may_be_repeated_five_times() {
        let definition = example("order-saga");
        let mut trial = order(&definition);
        fail(&mut trial, "reserve");
        fail(&mut trial, "release");
        assert_eq!(trial.task.state(), "STUCK");
        trial.wait("3d");
        assert_eq!(trial.emitted(), ["order.stuck"; 4], "immediately and every day");
        for _ in 0..5 {
            trial.event("undo.again", json!({}));
            fail(&mut trial, "recall");
        }
        assert_eq!(trial.task.state(), "STUCK");
        let mut finished = order(&definition);
        finished.task = trial.task.clone();
        finished.event("undo.finished", json!({}));
        assert_eq!(finished.task.state(), "UNDONE");
        trial.event("undo.again", json!({}));
        assert_eq!((trial.task.state().as_str(), trial.task.status), ("ABANDONED", Status::Failed));
    }

    #[test]
    fn a_compensation_that_never_ends_gets_stuck_and_is_abandoned_after_sixty_days() {
        let definition = example("order-saga");
        let mut trial = order(&definition);
        fail(&mut trial, "reserve");
        trial.wait("3d");
        assert_eq!(trial.task.state(), "STUCK");
        trial.wait("57d");
        assert_eq!(trial.task.state(), "ABANDONED");
    }
}

mod onboarding {
    use super::*;

    fn customer(definition: &Definition) -> Trial<'_> {
        Trial::new(definition, json!({"email": "ada@example.com"}))
    }

    #[test]
    fn a_customer_who_completes_every_step_gets_only_the_mails_that_were_due_before() {
        let definition = example("onboarding");
        let mut trial = customer(&definition);
        trial.wait("1d");
        trial.event("account.activated", json!({}));
        trial.wait("8d");
        trial.event("profile.completed", json!({}));
        assert_eq!(trial.task.state(), "JOURNEY.SETTING_UP.PROJECT");
        trial.event("project.created", json!({}));
        trial.wait("13d");
        assert_eq!(trial.event("plan.subscribed", json!({"plan": "gold"})), Outcome::Invalid);
        trial.event("plan.subscribed", json!({"plan": "small"}));
        assert_eq!((trial.task.state().as_str(), &trial.task.data["plan"]), ("CUSTOMER", &json!("small")));
        assert_eq!(mails(&trial), ["invitation", "set-up", "halfway", "trial-ends"]);
        assert_eq!(trial.task.due(), None, "no timer runs after the end");
    }

    #[test]
    fn an_invitation_is_followed_by_two_reminders_and_expires_after_three_weeks() {
        let definition = example("onboarding");
        let mut trial = customer(&definition);
        for (wait, count) in [("2d", 1), ("1d", 2), ("6d", 2), ("1d", 3), ("10d", 3)] {
            trial.wait(wait);
            assert_eq!(mails(&trial).len(), count);
        }
        assert_eq!(trial.task.status, Status::Running);
        trial.wait("1d");
        assert_eq!((trial.task.state().as_str(), trial.task.status), ("LOST", Status::Failed));
        assert_eq!(mails(&trial), ["invitation", "reminder", "last-reminder"]);
    }

    #[test]
    fn the_weekly_mail_says_what_is_missing_and_its_interval_does_not_depend_on_the_inner_state() {
        let definition = example("onboarding");
        let mut trial = customer(&definition);
        trial.event("account.activated", json!({}));
        trial.wait("10d");
        trial.event("profile.completed", json!({}));
        trial.wait("4d");
        let missing: Vec<Value> = trial
            .effects
            .iter()
            .filter_map(|effect| match effect {
                Effect::Job(job) => job.payload.get("missing").cloned(),
                _ => None,
            })
            .collect();
        assert_eq!(missing, ["profile", "project"]);
    }

    #[test]
    fn a_customer_gets_at_most_five_weekly_mails() {
        let definition = example("onboarding");
        let mut trial = customer(&definition);
        trial.event("account.activated", json!({}));
        trial.wait("22d");
        trial.event("profile.completed", json!({}));
        trial.event("project.created", json!({}));
        trial.wait("14d");
        assert_eq!(trial.task.state(), "JOURNEY.TRIAL_OVER");
        trial.wait("21d");
        assert_eq!(trial.task.state(), "LOST", "three mails during the set-up, two after the trial");
        assert_eq!(mails(&trial).iter().filter(|mail| ["set-up", "come-back"].contains(&mail.as_str())).count(), 5);
    }

    #[test]
    fn a_customer_can_leave_from_every_state() {
        let definition = example("onboarding");
        for events in [&[] as &[&str], &["account.activated"], &["account.activated", "profile.completed"]] {
            let mut trial = customer(&definition);
            for event in events {
                trial.event(event, json!({}));
            }
            trial.event("mails.stopped", json!({}));
            let sent = mails(&trial).len();
            trial.wait("100d");
            assert_eq!((trial.task.state().as_str(), mails(&trial).len()), ("LEFT", sent), "after {events:?}");
        }
    }

    #[test]
    fn an_outage_of_weeks_sends_each_mail_once() {
        let definition = example("onboarding");
        let mut trial = customer(&definition);
        trial.event("account.activated", json!({}));
        trial.now = trial.now.plus_ms(23 * 86_400_000);
        trial.apply(faena_machine::Input::Timers);
        assert_eq!(mails(&trial), ["invitation", "set-up"], "one mail for three missed weeks");
    }
}

mod content_review {
    use super::*;

    const REVIEWER: &[&str] = &["reviewers"];

    fn text(definition: &Definition) -> Trial<'_> {
        Trial::new(definition, json!({"title": "News", "text": "first"}))
    }

    #[test]
    fn two_reviewers_publish_exactly_what_they_approved() {
        let definition = example("content-review");
        let mut trial = text(&definition);
        let hash = trial.task.approval.clone().unwrap().hash;
        trial.decide("key:bob", REVIEWER, true);
        assert_eq!(trial.decide("key:bob", REVIEWER, true).outcome, Outcome::Ignored, "one person, one vote");
        assert_eq!((trial.task.state().as_str(), trial.task.approval.clone().unwrap().hash), ("IN_REVIEW", hash));
        trial.decide("key:carol", REVIEWER, true);
        trial.job_ended("publish", "completed", json!({"result": null}));
        assert_eq!(trial.task.state(), "PUBLISHED");
        assert_eq!(
            trial.last_payload("text.published"),
            json!({"title": "News", "approvedBy": ["key:bob", "key:carol"]})
        );
    }

    #[test]
    fn the_author_and_other_groups_cannot_decide() {
        let definition = example("content-review");
        let mut trial = text(&definition);
        for (actor, groups) in [("key:alice", REVIEWER), ("key:dave", &["editors"]), ("key:erin", &[])] {
            assert_eq!(trial.decide(actor, groups, true).outcome, Outcome::Forbidden, "{actor}");
        }
        assert!(trial.task.approval.unwrap().decisions.is_empty());
    }

    #[test]
    fn editors_may_decide_after_two_days_but_the_author_never() {
        let definition = example("content-review");
        let mut trial = text(&definition);
        trial.decide("key:bob", REVIEWER, true);
        trial.wait("2d");
        assert_eq!(
            trial.notices(),
            ["approval.requested", "approval.reminder", "approval.reminder", "approval.escalated"]
        );
        assert_eq!(trial.decide("key:alice", &["editors"], true).outcome, Outcome::Forbidden);
        trial.decide("key:dave", &["editors"], true);
        assert_eq!(trial.task.state(), "PUBLISHING");
    }

    #[test]
    fn an_expired_request_does_not_approve_the_text() {
        let definition = example("content-review");
        let mut trial = text(&definition);
        trial.decide("key:bob", REVIEWER, true);
        trial.wait("5d");
        assert_eq!((trial.task.state().as_str(), trial.task.status), ("EXPIRED", Status::Failed));
    }

    #[test]
    fn one_denial_asks_for_a_revision_and_the_fourth_revision_is_refused() {
        let definition = example("content-review");
        let mut trial = text(&definition);
        for revision in 1..=4 {
            trial.decide("key:bob", REVIEWER, true);
            trial.decide("key:carol", REVIEWER, false);
            assert_eq!(trial.task.state(), "CHANGES_REQUESTED");
            trial.event("text.revised", json!({"text": format!("revision {revision}")}));
        }
        assert_eq!((trial.task.state().as_str(), trial.task.counters["revisions"]), ("REFUSED", 3));
    }

    #[test]
    fn approvals_of_an_old_text_do_not_count_for_the_new_one() {
        let definition = example("content-review");
        let mut trial = text(&definition);
        let first = trial.task.approval.clone().unwrap().hash;
        trial.decide("key:bob", REVIEWER, true);
        trial.decide("key:carol", REVIEWER, false);
        trial.event("text.revised", json!({"text": "second"}));
        let approval = trial.task.approval.clone().unwrap();
        assert!(approval.decisions.is_empty() && approval.hash != first);
        let stale = faena_machine::Input::Decision {
            caller: caller("key:dave", &["reviewers"]),
            approve: true,
            hash: Some(first),
            comment: None,
        };
        assert_eq!(trial.apply(stale).outcome, Outcome::Rejected);
    }

    #[test]
    fn a_revision_during_the_review_waits_and_an_idle_author_loses_the_text() {
        let definition = example("content-review");
        let mut trial = text(&definition);
        assert_eq!(trial.event("text.revised", json!({"text": "early"})), Outcome::Deferred);
        trial.decide("key:bob", REVIEWER, false);
        assert_eq!((trial.task.state().as_str(), &trial.task.data["text"]), ("IN_REVIEW", &json!("early")));
        trial.decide("key:bob", REVIEWER, false);
        trial.wait("14d");
        assert_eq!(trial.task.state(), "EXPIRED");
    }
}

#[test]
fn the_examples_have_the_same_hash_as_yaml_and_as_json() {
    for name in crate::support::EXAMPLES {
        let machine = example(name);
        assert_eq!(definition(&machine.source.to_string()).hash, machine.hash, "{name}");
        assert_eq!(machine.machine, name);
    }
}
