//! Decides the order of ready jobs when a claim reads several lanes: by score inside a queue, round robin between queues.
//!
//! In a fair queue the order is a round robin over the keys: one job of each key, starting with the key that was served
//! longest ago. A key with many jobs does not delay the other keys.

use std::collections::BTreeMap;

use faena_domain::{ClaimOrder, Fairness, JobId, Priority, Timestamp};

/// A ready job that a claim may choose.
#[derive(Clone, Debug)]
pub struct Candidate<T> {
    pub queue: String,
    pub claim_order: ClaimOrder,
    pub fairness: Fairness,
    /// `None`: the jobs without a key; the round robin treats them as one more key.
    pub key: Option<i64>,
    /// In a fair queue: when its key queue was last served, in milliseconds.
    pub last_served_at: i64,
    pub priority: Priority,
    pub ready_at: Timestamp,
    pub id: JobId,
    pub row: T,
}

/// Returns the first `limit` of `candidates`, in claim order.
///
/// `first_queue` chooses the queue that is served first. The caller changes it with each claim, so that every queue gets its
/// share even if there are fewer slots than queues.
pub fn select_fairly<T>(candidates: Vec<Candidate<T>>, limit: usize, first_queue: usize) -> Vec<Candidate<T>> {
    let mut queues: BTreeMap<String, Vec<Candidate<T>>> = BTreeMap::new();
    for candidate in candidates {
        queues.entry(candidate.queue.clone()).or_default().push(candidate);
    }
    let mut shares: Vec<_> = queues
        .into_values()
        .map(|mut jobs| {
            jobs.sort_by_key(|c| (c.claim_order.score(c.priority, c.ready_at), c.id));
            if jobs.first().is_some_and(|c| c.fairness == Fairness::Key) { interleave_by_key(jobs) } else { jobs }
                .into_iter()
        })
        .collect();
    if !shares.is_empty() {
        let first = first_queue % shares.len();
        shares.rotate_left(first);
    }
    let mut chosen = Vec::new();
    while chosen.len() < limit && !shares.is_empty() {
        shares.retain_mut(|jobs| match jobs.next() {
            Some(candidate) if chosen.len() < limit => {
                chosen.push(candidate);
                true
            }
            _ => false,
        });
    }
    chosen
}

/// Reorders jobs so that each round has one job of each key. Keeps the order of the jobs of one key.
fn interleave_by_key<T>(jobs: Vec<Candidate<T>>) -> Vec<Candidate<T>> {
    struct KeyTurn {
        served_at: i64,
        /// Index of its first job.
        index: usize,
        jobs: usize,
    }
    let mut round_robin: BTreeMap<Option<i64>, KeyTurn> = BTreeMap::new();
    let mut rounds = Vec::with_capacity(jobs.len());
    for (index, candidate) in jobs.iter().enumerate() {
        let turn =
            round_robin.entry(candidate.key).or_insert(KeyTurn { served_at: candidate.last_served_at, index, jobs: 0 });
        // A key has a key queue in each lane; the latest of their times counts.
        turn.served_at = turn.served_at.max(candidate.last_served_at);
        rounds.push(turn.jobs);
        turn.jobs += 1;
    }
    let mut jobs: Vec<_> = jobs
        .into_iter()
        .zip(rounds)
        .map(|(candidate, round)| {
            let turn = &round_robin[&candidate.key];
            ((round, turn.served_at, turn.index), candidate)
        })
        .collect();
    jobs.sort_by_key(|(index, _)| *index);
    jobs.into_iter().map(|(_, candidate)| candidate).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(queue: &str, claim_order: ClaimOrder, priority: Priority, ready_ms: i64) -> Candidate<()> {
        Candidate {
            queue: queue.into(),
            claim_order,
            fairness: Fairness::None,
            key: None,
            last_served_at: 0,
            priority,
            ready_at: Timestamp::from_ms(ready_ms),
            id: JobId::new(),
            row: (),
        }
    }

    #[test]
    fn a_queue_is_ordered_by_score_and_then_by_id() {
        let all = vec![
            candidate("a", ClaimOrder::Aging, Priority::Normal, 2_000_000),
            candidate("a", ClaimOrder::Aging, Priority::Normal, 0),
            candidate("a", ClaimOrder::Aging, Priority::Critical, 1_999_999),
            candidate("a", ClaimOrder::Aging, Priority::Normal, 0),
        ];
        let ids: Vec<_> = all.iter().map(|c| c.id).collect();
        let chosen: Vec<_> = select_fairly(all, 4, 0).into_iter().map(|c| c.id).collect();
        assert_eq!(chosen, [ids[2], ids[1], ids[3], ids[0]]);
    }

    #[test]
    fn a_strict_queue_prefers_the_higher_priority() {
        let all = vec![
            candidate("a", ClaimOrder::Strict, Priority::Low, 0),
            candidate("a", ClaimOrder::Strict, Priority::High, 9_000_000_000),
        ];
        assert_eq!(select_fairly(all, 1, 0)[0].priority, Priority::High);
    }

    #[test]
    fn queues_are_served_round_robin_and_a_long_one_uses_the_rest() {
        let all: Vec<_> = (0..10)
            .map(|n| candidate("long", ClaimOrder::Aging, Priority::Normal, n))
            .chain([candidate("short", ClaimOrder::Aging, Priority::Normal, 99)])
            .collect();
        let queues: Vec<_> = select_fairly(all.clone(), 4, 0).into_iter().map(|c| c.queue).collect();
        assert_eq!(queues, ["long", "short", "long", "long"]);
        let queues: Vec<_> = select_fairly(all, 1, 1).into_iter().map(|c| c.queue).collect();
        assert_eq!(queues, ["short"], "another queue goes first");
    }

    fn of_key(key: Option<i64>, last_served_at: i64, ready_ms: i64) -> Candidate<()> {
        let plain = candidate("fair", ClaimOrder::Aging, Priority::Normal, ready_ms);
        Candidate { fairness: Fairness::Key, key, last_served_at, ..plain }
    }

    #[test]
    fn in_a_fair_queue_keys_are_served_round_robin_regardless_of_their_number_of_jobs() {
        let all: Vec<_> = (0..100)
            .map(|n| of_key(Some(1), 0, n))
            .chain([of_key(Some(2), 0, 500), of_key(Some(2), 0, 501), of_key(None, 0, 600), of_key(None, 0, 601)])
            .collect();
        let keys: Vec<_> = select_fairly(all, 8, 0).into_iter().map(|c| c.key).collect();
        let (one, two) = (Some(1), Some(2));
        assert_eq!(keys, [one, two, None, one, two, None, one, one]);
    }

    #[test]
    fn in_a_fair_queue_the_key_served_longest_ago_goes_first() {
        let all = vec![of_key(Some(1), 90, 0), of_key(Some(2), 50, 10), of_key(Some(3), 70, 5)];
        let keys: Vec<_> = select_fairly(all, 3, 0).into_iter().filter_map(|c| c.key).collect();
        assert_eq!(keys, [2, 3, 1]);
        // Its key queue in another lane was not served, but the key was.
        let all = vec![of_key(Some(1), 90, 0), of_key(Some(1), 1, 2), of_key(Some(2), 50, 10)];
        let keys: Vec<_> = select_fairly(all, 3, 0).into_iter().filter_map(|c| c.key).collect();
        assert_eq!(keys, [2, 1, 1]);
    }
}
