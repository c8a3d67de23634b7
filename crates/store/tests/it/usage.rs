//! Budgets of tokens.

use crate::support::Fixture;

const DAY_MS: i64 = 86_400_000;

pub async fn reservations_never_exceed_the_budget_of_a_day(fixture: &Fixture) {
    let store = &fixture.store;
    let calls = (0..20).map(|_| store.tokens_reserve(30, 100, fixture.at(0)));
    let reserved = futures_util::future::join_all(calls).await;
    assert_eq!(reserved.into_iter().filter(|reserved| *reserved.as_ref().unwrap()).count(), 3);
    assert_eq!(store.tokens_used(fixture.at(0)).await.unwrap(), 90);
    assert!(!store.tokens_reserve(11, 100, fixture.at(0)).await.unwrap());
    assert!(store.tokens_reserve(10, 100, fixture.at(0)).await.unwrap(), "up to the limit");
    assert!(!store.tokens_reserve(101, 100, fixture.at(DAY_MS)).await.unwrap(), "more than a whole day has");
    assert!(store.tokens_reserve(100, 100, fixture.at(DAY_MS)).await.unwrap(), "the next day has its own budget");
}

pub async fn a_settled_reservation_counts_what_was_used(fixture: &Fixture) {
    let store = &fixture.store;
    assert!(store.tokens_reserve(100, 100, fixture.at(0)).await.unwrap());
    store.tokens_settle(100, 40, fixture.at(0)).await.unwrap();
    assert_eq!(store.tokens_used(fixture.at(0)).await.unwrap(), 40);
    assert!(store.tokens_reserve(60, 100, fixture.at(1)).await.unwrap());
    store.tokens_settle(60, 90, fixture.at(1)).await.unwrap();
    assert_eq!(store.tokens_used(fixture.at(2)).await.unwrap(), 130, "a server may use more than was asked for");
    assert!(!store.tokens_reserve(1, 100, fixture.at(3)).await.unwrap());
    store.tokens_settle(500, 0, fixture.at(4)).await.unwrap();
    assert_eq!(store.tokens_used(fixture.at(4)).await.unwrap(), 0, "never below nothing");
    assert!(store.tokens_reserve(u64::MAX, u64::MAX, fixture.at(40 * DAY_MS)).await.unwrap());
    assert_eq!(store.tokens_used(fixture.at(0)).await.unwrap(), 0, "old days are deleted");
}
