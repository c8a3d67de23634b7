//! Webhooks about approvals: who receives them, when, and with which content.

use faena_domain::Timestamp;
use faena_machine::{ApprovalNotice, Definition, Effect, Input, Outcome};
use serde_json::{Value, json};

use crate::support::{START, Trial, definition};

const REVIEW: &str = "
machine: review
version: 1
events: {skip: {}}
initial: REVIEW
states:
  REVIEW:
    approval:
      subject: ctx.text
      quorum: 2
      remind: [1h]
      escalate: {after: 2h, groups: [managers]}
      groups: [reviewers]
      expires: {after: 3h, to: REJECTED}
      webhook: ['https://example.org/approvals?token=s3cret', ctx.receiver]
    on:
      approval.granted: PUBLISHED
      approval.denied: REJECTED
      skip: PUBLISHED
  PUBLISHED: {final: true}
  REJECTED: {final: true, ends: failure}
";

const FIXED: &str = "https://example.org/approvals?token=s3cret";

fn notices<'a>(trial: &'a Trial) -> Vec<&'a ApprovalNotice> {
    let notices = trial.effects.iter().filter_map(|effect| match effect {
        Effect::Webhook(notice) => Some(notice),
        _ => None,
    });
    notices.collect()
}

fn events(trial: &Trial) -> Vec<&'static str> {
    notices(trial).iter().map(|notice| notice.event.strip_prefix("task.approval.").unwrap()).collect()
}

fn trial(definition: &Definition, receiver: Value) -> Trial<'_> {
    Trial::new(definition, json!({"text": "a", "receiver": receiver}))
}

#[test]
fn receivers_are_notified_of_the_request_reminders_escalation_and_expiry() {
    let definition = definition(REVIEW);
    let mut trial = trial(&definition, json!("https://example.net/"));
    trial.wait("4h");
    assert_eq!(events(&trial), ["requested", "reminder", "escalated", "expired"]);
    let notices = notices(&trial);
    assert!(notices.iter().all(|notice| notice.approval.webhooks == [FIXED, "https://example.net/"]));
    assert!(notices.iter().all(|notice| notice.state == "REVIEW" && !notice.allows_creator));
    let due = START.plus_ms(3 * 3_600_000);
    let expiries: Vec<Option<Timestamp>> = notices.iter().map(|notice| notice.expires_at).collect();
    assert_eq!(expiries, [Some(due), Some(due), Some(due), None]);
    assert_eq!(notices[0].approval.groups, ["reviewers"]);
    assert_eq!(notices[2].approval.groups, ["reviewers", "managers"]);
}

#[test]
fn receivers_are_notified_of_the_decision_once_with_those_who_decided() {
    let definition = definition(REVIEW);
    for (approve, end, state) in [(true, "granted", "PUBLISHED"), (false, "denied", "REJECTED")] {
        let mut trial = trial(&definition, json!(null));
        if approve {
            trial.decide("key:bob", &["reviewers"], true);
            assert_eq!(events(&trial), ["requested"], "the quorum is not reached");
        }
        trial.decide("key:carol", &["reviewers"], approve);
        assert_eq!((events(&trial), trial.task.state().as_str()), (vec!["requested", end], state));
        let decisions = &notices(&trial)[1].approval.decisions;
        assert_eq!(
            decisions.last().map(|decision| (decision.actor.as_str(), decision.approve)),
            Some(("key:carol", approve))
        );
    }
}

#[test]
fn receivers_are_notified_when_no_decision_will_come() {
    let definition = definition(REVIEW);
    let mut skipped = trial(&definition, json!(null));
    skipped.event("skip", json!({}));
    assert_eq!(events(&skipped), ["requested", "withdrawn"]);
    let mut cancelled = trial(&definition, json!(null));
    cancelled.apply(Input::Cancel { actor: "key:ops".into(), reason: None });
    assert_eq!(events(&cancelled), ["requested", "withdrawn"]);
}

#[test]
fn each_receiver_is_notified_once_and_an_expression_may_give_none_or_many() {
    let definition = definition(REVIEW);
    let receivers = |given: Value| trial(&definition, given).task.approval.unwrap().webhooks;
    assert_eq!(receivers(json!(null)), [FIXED]);
    assert_eq!(receivers(json!("")), [FIXED]);
    assert_eq!(receivers(json!([FIXED, "https://a.example/", "https://a.example/"])), [FIXED, "https://a.example/"]);
}

#[test]
fn events_about_an_approval_do_not_name_its_receivers() {
    let definition = definition(REVIEW);
    let mut trial = trial(&definition, json!(null));
    trial.wait("4h");
    let published = trial.effects.iter().filter(|effect| matches!(effect, Effect::Notice { .. }));
    assert!(published.clone().count() >= 4);
    assert!(published.into_iter().all(|effect| !format!("{effect:?}").contains("s3cret")));
}

#[test]
fn an_expression_that_gives_no_url_is_refused() {
    let text = REVIEW.replace("initial: REVIEW\n", "initial: DRAFT\n").replace(
        "states:\n  REVIEW:",
        "states:\n  DRAFT: {forever: true, on: {skip: {to: REVIEW, set: {receiver: event.receiver}}}}\n  REVIEW:",
    );
    let definition = definition(&text);
    let many: Vec<String> = (0..11).map(|number| format!("https://example.org/{number}")).collect();
    for (given, part) in [
        (json!(7), "a receiver of webhooks is 7, not a URL"),
        (json!([{"url": "https://example.org/"}]), "not a URL"),
        (json!(format!("https://example.org/{}", "x".repeat(3_000))), "more than 2048 bytes"),
        (json!(many), "has 12 receivers of webhooks; the limit is 10"),
    ] {
        let mut trial = Trial::new(&definition, json!({"text": "a"}));
        let step = trial.event_from("key:bob", "skip", json!({"receiver": given}));
        assert_eq!((step.outcome, trial.task.state().as_str()), (Outcome::Rejected, "DRAFT"));
        assert!(step.reason.as_deref().is_some_and(|reason| reason.contains(part)), "{:?}", step.reason);
    }
}

#[test]
fn an_obviously_invalid_receiver_is_an_error_of_the_definition() {
    for (receiver, part) in [
        ("'https://user:s3cret@example.org/'", "must not contain a user name or password"),
        ("'http://'", "is not a URL"),
        ("7", "text"),
        ("ctx.", "ctx."),
        ("nobody.url", "the variables are"),
    ] {
        let text = REVIEW.replace("['https://example.org/approvals?token=s3cret', ctx.receiver]", receiver);
        let findings = Definition::parse(&text).unwrap_err();
        let lines: Vec<String> = findings.iter().map(ToString::to_string).collect();
        assert!(lines.iter().any(|line| line.contains(part) && line.contains("webhook")), "{receiver}: {lines:?}");
    }
    let many = format!("[{}]", ["'https://example.org/'"; 11].join(", "));
    let text = REVIEW.replace("['https://example.org/approvals?token=s3cret', ctx.receiver]", &many);
    assert!(Definition::parse(&text).unwrap_err()[0].to_string().contains("at most 10 receivers"));
    let text =
        REVIEW.replace("['https://example.org/approvals?token=s3cret', ctx.receiver]", "'http://10.0.0.1:8080/x'");
    assert!(Definition::parse(&text).is_ok(), "the server decides which addresses it calls");
}
