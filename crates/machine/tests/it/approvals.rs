//! Approvals: quorum, groups, no self-approval, reminders, escalation, expiry, and the hash of the subject.

use faena_machine::{Input, Outcome};
use serde_json::json;

use crate::support::{Trial, definition};

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
        assert!(step.outcome == Outcome::Rejected && step.reason.unwrap().contains(part));
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
        actor: "key:carol".into(),
        groups: vec!["reviewers".into()],
        approve: true,
        hash: Some(hash),
        comment: None,
    };
    let step = trial.apply(decision(first));
    assert_eq!(step.outcome, Outcome::Rejected);
    assert_eq!(trial.apply(decision(second.hash)).outcome, Outcome::Applied);
}

#[test]
fn reminders_are_sent_and_expiry_never_means_yes() {
    let definition = definition(REVIEW);
    let mut trial = Trial::new(&definition, json!({"text": "a"}));
    trial.decide("key:bob", &["reviewers"], true);
    trial.wait("3d");
    assert_eq!(trial.notices(), ["approval.requested", "approval.reminder", "approval.reminder", "approval.escalated"]);
    trial.wait("4d");
    assert_eq!(trial.task.state(), "REJECTED");
    assert_eq!(trial.decide("key:carol", &["reviewers"], true).outcome, Outcome::Rejected);
}
