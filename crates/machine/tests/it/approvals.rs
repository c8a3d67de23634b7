//! Approvals: quorum, groups, no self-approval, reminders, escalation, expiry, and the hash of the subject.

use faena_machine::{Caller, Event, Input, Outcome, Task, create, step, why};
use serde_json::json;

use crate::support::{START, Trial, caller, definition};

const REVIEW: &str = "
machine: review
version: 1
events: {revise: {}}
initial: REVIEW
counters: {rounds: {max: 2, exceeded: REJECTED}}
states:
  REVIEW:
    approval:
      subject: ctx.text
      quorum: 2
      groups: [reviewers]
      remind: [1h, 24h]
      escalate: {after: 2d, groups: [managers]}
      expires: {after: 7d, to: REJECTED}
    on:
      approval.granted: {to: PUBLISHED, set: {by: \"event.decisions.map(one, one.actor)\"}}
      approval.denied: {to: REVIEW, loop: rounds, set: {text: \"ctx.text + '!'\"}}
  PUBLISHED: {final: true}
  REJECTED: {final: true, ends: failure}
";

#[test]
fn the_quorum_counts_each_person_once() {
    let definition = definition(REVIEW);
    let mut trial = Trial::new(&definition, json!({"text": "a"}));
    assert_eq!(trial.notices(), ["approval.requested"]);
    assert_eq!(trial.decide("key:bob", &["reviewers"], true).outcome, Outcome::Applied);
    assert_eq!(trial.decide("key:bob", &["reviewers"], true).outcome, Outcome::Ignored);
    assert_eq!(trial.decide("key:bob", &["reviewers"], false).outcome, Outcome::Rejected);
    assert_eq!(trial.task.state(), "REVIEW");
    trial.decide("key:carol", &["reviewers"], true);
    assert_eq!((trial.task.state().as_str(), &trial.task.data["by"]), ("PUBLISHED", &json!(["key:bob", "key:carol"])));
}

#[test]
fn neither_the_creator_nor_another_group_may_decide() {
    let definition = definition(REVIEW);
    let mut trial = Trial::new(&definition, json!({"text": "a"}));
    for (actor, groups, part) in [
        ("key:alice", &["reviewers"] as &[&str], "the creator"),
        ("key:dave", &["managers"], "only reviewers may decide"),
        ("key:erin", &[], "only reviewers may decide"),
    ] {
        let step = trial.decide(actor, groups, true);
        assert!(step.outcome == Outcome::Forbidden && step.reason.unwrap().contains(part));
    }
    trial.wait("2d");
    assert_eq!(trial.decide("key:dave", &["managers"], true).outcome, Outcome::Applied, "after the escalation");
}

#[test]
fn an_approval_is_about_exactly_one_subject() {
    let definition = definition(REVIEW);
    let mut trial = Trial::new(&definition, json!({"text": "a"}));
    let first = trial.task.approval.clone().unwrap().hash;
    trial.decide("key:bob", &["reviewers"], false);
    let second = trial.task.approval.clone().unwrap();
    assert_ne!(first, second.hash);
    assert!(second.decisions.is_empty(), "decisions about the old text do not count for the new one");
    let decision = |hash: String| Input::Decision {
        caller: caller("key:carol", &["reviewers"]),
        approve: true,
        hash: Some(hash),
        comment: None,
    };
    let step = trial.apply(decision(first));
    assert_eq!(step.outcome, Outcome::Rejected);
    assert_eq!(trial.apply(decision(second.hash)).outcome, Outcome::Applied);
}

#[test]
fn reminders_are_sent_and_expiry_never_approves() {
    let definition = definition(REVIEW);
    let mut trial = Trial::new(&definition, json!({"text": "a"}));
    trial.decide("key:bob", &["reviewers"], true);
    trial.wait("3d");
    assert_eq!(trial.notices(), ["approval.requested", "approval.reminder", "approval.reminder", "approval.escalated"]);
    trial.wait("4d");
    assert_eq!(trial.task.state(), "REJECTED");
    assert_eq!(trial.decide("key:carol", &["reviewers"], true).outcome, Outcome::Rejected);
}

#[test]
fn callers_are_distinguished_by_their_identity_and_not_by_their_name() {
    let definition = definition(REVIEW);
    let key = |identity: &str| {
        let (actor, groups) = ("key ci (abc)".to_owned(), vec!["reviewers".to_owned()]);
        Caller { actor, identity: identity.to_owned(), groups }
    };
    let first = create(&definition, "task-1".into(), key("key:1"), json!({"text": "a"}), START).unwrap();
    let decide = |task: &Task, identity: &str| {
        let input = Input::Decision { caller: key(identity), approve: true, hash: None, comment: None };
        step(&definition, task, input, START)
    };
    assert_eq!(decide(&first.task, "key:1").outcome, Outcome::Forbidden, "the creator");
    let second = decide(&first.task, "key:2");
    assert_eq!(second.outcome, Outcome::Applied, "another key with the name of the creator");
    assert_eq!(decide(&second.task, "key:2").outcome, Outcome::Ignored, "the same caller counts once");
    let renamed = Caller { actor: "another name".into(), ..key("key:2") };
    let input = Input::Decision { caller: renamed, approve: true, hash: None, comment: None };
    assert_eq!(step(&definition, &second.task, input, START).outcome, Outcome::Ignored, "also under another name");
    assert_eq!(decide(&second.task, "key:3").task.state(), "PUBLISHED");
}

const VOTE: &str = "
machine: vote
version: 1
events: {yes: {}, go: {}}
initial: DRAFT
states:
  DRAFT: {forever: true, on: {go: VOTE}}
  VOTE:
    approval: {subject: ctx, groups: [reviewers], expires: {after: 7d, to: REJECTED}}
    on: {yes: {approve: true}, approval.granted: DONE, approval.denied: REJECTED}
  DONE: {final: true}
  REJECTED: {final: true, ends: failure}
";

#[test]
fn an_event_decides_only_for_a_sender_that_may_decide() {
    let definition = definition(VOTE);
    let mut trial = Trial::new(&definition, json!({}));
    trial.event("go", json!({}));
    let yes = |decider: Option<Caller>| {
        Input::Event(Event {
            id: String::new(),
            kind: "yes".into(),
            payload: json!({}),
            actor: "key:x".into(),
            decider,
            at: START,
        })
    };
    let before = trial.task.clone();
    for (decider, part) in [
        (None, "its sender may not"),
        (Some(caller("key:x", &[])), "only reviewers may decide"),
        (Some(caller("key:alice", &["reviewers"])), "the creator"),
    ] {
        let step = trial.apply(yes(decider));
        assert!(step.outcome == Outcome::Forbidden && step.reason.unwrap().contains(part), "{part}");
        assert_eq!((&trial.task, step.records.len()), (&before, 0), "nothing changed");
    }
    trial.apply(Input::Pause { actor: "key:x".into() });
    assert_eq!(
        trial.apply(yes(Some(caller("key:x", &["reviewers"])))).outcome,
        Outcome::Rejected,
        "while it is paused"
    );
    trial.apply(Input::Resume { actor: "key:x".into() });
    assert_eq!(trial.apply(yes(Some(caller("key:x", &["reviewers"])))).outcome, Outcome::Applied);
    assert_eq!(trial.task.state(), "DONE");
}

#[test]
fn an_event_that_was_deferred_never_decides() {
    let definition = definition(VOTE);
    let mut trial = Trial::new(&definition, json!({}));
    assert_eq!(trial.event("yes", json!({})), Outcome::Deferred, "nothing is to be decided yet");
    assert_eq!(trial.event("go", json!({})), Outcome::Applied, "the early decision does not stop the task");
    assert_eq!(trial.task.state(), "VOTE");
    let reasons = why(&definition, &trial.task, trial.now);
    let deferred = reasons.iter().find(|reason| reason.code == "deferred").unwrap();
    assert!(deferred.message.contains("cannot decide about an approval; send it again"), "{}", deferred.message);
    trial.wait("7d");
    assert_eq!(trial.task.state(), "REJECTED");
}
