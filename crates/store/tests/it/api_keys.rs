//! API keys: created, rotated with an overlap, revoked, and never stored in the clear.

use faena_domain::{ApiKey, ApiKeyId, ApiKeyText, KeyScope, NewApiKey, StoredApiKey, Timestamp};
use faena_store::{AuditFilter, KeyRotation, StoreError, StoreOptions};

use crate::support::Fixture;

fn text(seed: u8) -> ApiKeyText {
    ApiKeyText::from_random([seed; 12], [seed; 43])
}

/// Returns another secret for the key of `seed`.
fn rotated(seed: u8, secret: u8) -> ApiKeyText {
    ApiKeyText::with_lookup(text(seed).lookup(), [secret; 43])
}

fn new_key(seed: u8, now: Timestamp) -> StoredApiKey {
    let new = NewApiKey {
        name: format!("key {seed}"),
        scopes: vec![KeyScope::Write, KeyScope::Worker],
        queues: Some(vec!["mail".into(), "two words".into()]),
        groups: vec!["managers".into(), "two words".into()],
        without_payloads: true,
        expires_at: None,
    };
    StoredApiKey::new(new, &text(seed), "ana", now)
}

async fn create(fixture: &Fixture, seed: u8) -> ApiKey {
    let key = new_key(seed, fixture.at(0));
    fixture.store.api_key_create(key.clone(), "ana", fixture.at(0)).await.unwrap();
    key.key
}

/// Returns whether the store accepts this text at `ms`.
fn is_accepted(fixture: &Fixture, text: &ApiKeyText, ms: i64) -> bool {
    let keys = fixture.store.api_keys();
    keys.get(text.lookup()).is_some_and(|stored| stored.matches(&text.hash(), fixture.at(ms)))
}

async fn rotate(fixture: &Fixture, id: ApiKeyId, to: &ApiKeyText, valid_until: i64, ms: i64) -> ApiKey {
    let rotation = KeyRotation { hash: to.hash(), previous_valid_until: fixture.at(valid_until) };
    fixture.store.api_key_rotate(id, rotation, "ana", fixture.at(ms)).await.unwrap().unwrap()
}

pub async fn a_created_key_is_found_by_its_lookup_part(fixture: &Fixture) {
    let key = create(fixture, 1).await;
    create(fixture, 2).await;
    let keys = fixture.store.api_keys();
    assert_eq!(keys.len(), 2);
    assert_eq!(keys[text(1).lookup()].key, key, "every field is stored");
    assert!(is_accepted(fixture, &text(1), 1));
    assert!(!is_accepted(fixture, &rotated(1, 9), 1), "another secret with the same lookup part");
}

pub async fn a_rotated_key_keeps_its_id_and_accepts_both_secrets_until_the_overlap_ends(fixture: &Fixture) {
    let key = create(fixture, 1).await;
    let new = rotated(1, 9);
    let after = rotate(fixture, key.id, &new, 1_000, 10).await;
    assert_eq!((after.id, after.rotated_at), (key.id, Some(fixture.at(10))));
    assert_eq!((after.groups, after.scopes), (key.groups, key.scopes));
    assert!(after.without_payloads, "a rotation does not let the key see payloads");
    assert_eq!(after.previous_valid_until, Some(fixture.at(1_000)));
    assert!(is_accepted(fixture, &text(1), 999) && is_accepted(fixture, &new, 999));
    assert!(!is_accepted(fixture, &text(1), 1_000) && is_accepted(fixture, &new, 1_000));
}

pub async fn a_second_rotation_ends_the_overlap_of_the_first(fixture: &Fixture) {
    let key = create(fixture, 1).await;
    rotate(fixture, key.id, &rotated(1, 8), 1_000, 10).await;
    rotate(fixture, key.id, &rotated(1, 9), 1_000, 20).await;
    assert!(!is_accepted(fixture, &text(1), 30), "the first secret is two rotations old");
    assert!(is_accepted(fixture, &rotated(1, 8), 30) && is_accepted(fixture, &rotated(1, 9), 30));
}

pub async fn a_revoked_key_stays_revoked_and_cannot_be_rotated(fixture: &Fixture) {
    let key = create(fixture, 1).await;
    let revoked = fixture.store.api_key_revoke(key.id, "ana", fixture.at(5)).await.unwrap().unwrap();
    assert_eq!(revoked.revoked_at, Some(fixture.at(5)));
    let again = fixture.store.api_key_revoke(key.id, "ana", fixture.at(6)).await.unwrap().unwrap();
    assert_eq!(again.revoked_at, Some(fixture.at(5)), "the first time counts");
    let rotation = KeyRotation { hash: text(3).hash(), previous_valid_until: fixture.at(9) };
    let error = fixture.store.api_key_rotate(key.id, rotation, "ana", fixture.at(7)).await.unwrap_err();
    assert_eq!(error.to_string(), "this API key was revoked; create a new one");
    assert!(matches!(error, StoreError::Conflict { .. }));
    assert_eq!(
        fixture.store.api_keys()[text(1).lookup()].key.rejection(fixture.at(8)),
        Some("this API key was revoked")
    );
}

pub async fn an_expired_key_cannot_be_rotated(fixture: &Fixture) {
    let mut key = new_key(1, fixture.at(0));
    key.key.expires_at = Some(fixture.at(100));
    let id = key.key.id;
    fixture.store.api_key_create(key, "ana", fixture.at(0)).await.unwrap();
    let rotation = KeyRotation { hash: text(3).hash(), previous_valid_until: fixture.at(200) };
    let error = fixture.store.api_key_rotate(id, rotation, "ana", fixture.at(100)).await.unwrap_err();
    assert_eq!(error.to_string(), "this API key has expired; create a new one");
    assert!(is_accepted(fixture, &text(1), 99), "nothing was changed");
}

pub async fn every_change_of_a_key_has_an_audit_entry_without_secrets(fixture: &Fixture) {
    let key = create(fixture, 1).await;
    rotate(fixture, key.id, &rotated(1, 9), 1_000, 10).await;
    fixture.store.api_key_revoke(key.id, "eva", fixture.at(20)).await.unwrap();
    fixture.store.api_key_revoke(key.id, "eva", fixture.at(21)).await.unwrap();
    let entries = fixture.store.audit_list(AuditFilter::default(), 100).await.unwrap();
    let actions: Vec<_> = entries.iter().rev().map(|row| format!("{} {}", row.actor, row.action)).collect();
    assert_eq!(actions, ["ana key.create", "ana key.rotate", "eva key.revoke"]);
    assert!(entries.iter().all(|row| row.target == key.id.to_string()));
    for row in entries {
        let shown = row.details.to_string();
        assert!(!shown.contains("fna_") && !shown.contains("hash"), "{shown}");
    }
}

pub async fn the_last_use_of_a_key_never_moves_back(fixture: &Fixture) {
    let (one, two) = (create(fixture, 1).await, create(fixture, 2).await);
    fixture.store.api_keys_used(vec![(one.id, fixture.at(50)), (two.id, fixture.at(10))]).await.unwrap();
    fixture.store.api_keys_used(vec![(one.id, fixture.at(40)), (ApiKeyId::new(), fixture.at(60))]).await.unwrap();
    let used = |seed| fixture.store.api_keys()[text(seed).lookup()].key.last_used_at;
    assert_eq!((used(1), used(2)), (Some(fixture.at(50)), Some(fixture.at(10))));
}

pub async fn an_unknown_key_is_reported_as_such(fixture: &Fixture) {
    let rotation = KeyRotation { hash: text(3).hash(), previous_valid_until: fixture.at(9) };
    let id = ApiKeyId::new();
    assert!(fixture.store.api_key_rotate(id, rotation, "ana", fixture.at(1)).await.unwrap().is_none());
    assert!(fixture.store.api_key_revoke(id, "ana", fixture.at(1)).await.unwrap().is_none());
    assert!(fixture.store.audit_list(AuditFilter::default(), 100).await.unwrap().is_empty());
}

pub async fn keys_survive_a_restart(fixture: &Fixture) {
    create(fixture, 1).await;
    let other = fixture.reopen(StoreOptions::default()).await;
    assert!(is_accepted(&other, &text(1), 1), "the keys are read when the store is opened");
    other.store.close().await;
}
