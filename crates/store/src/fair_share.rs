//! Decides the order when a claim reads ready jobs of several lanes: by score inside a queue, round robin between queues.
//!
//! In a fair queue the keys take turns: one job of each, the key that was served longest ago first, so that a key with many
//! jobs does not delay the others.

use std::collections::BTreeMap;

use faena_domain::{Fairness, JobId, Ordering, Priority, Timestamp};

#[derive(Clone, Debug)]
pub struct Candidate<T> {
    pub queue: String,
    pub ordering: Ordering,
    pub fairness: Fairness,
    /// Jobs without a key take turns as if they had one.
    pub key: Option<i64>,
    /// In a fair queue: when its key was last served.
    pub turn: i64,
    pub priority: Priority,
    pub ready_at: Timestamp,
    pub id: JobId,
    pub row: T,
}

/// Returns the first `limit` of `candidates`. `turn` chooses the queue that is served first, so that every queue gets its
/// share of a few slots.
pub fn share_out<T>(candidates: Vec<Candidate<T>>, limit: usize, turn: usize) -> Vec<Candidate<T>> {
    let mut queues: BTreeMap<String, Vec<Candidate<T>>> = BTreeMap::new();
    for candidate in candidates {
        queues.entry(candidate.queue.clone()).or_default().push(candidate);
    }
    let mut shares: Vec<_> = queues
        .into_values()
        .map(|mut jobs| {
            jobs.sort_by_key(|c| (c.ordering.score(c.priority, c.ready_at), c.id));
            if jobs.first().is_some_and(|c| c.fairness == Fairness::Key) { in_run_order(jobs) } else { jobs }
                .into_iter()
        })
        .collect();
    if !shares.is_empty() {
        let first = turn % shares.len();
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

/// Returns one job of each key per round. `jobs` has the jobs of each key in their order.
fn in_run_order<T>(jobs: Vec<Candidate<T>>) -> Vec<Candidate<T>> {
    struct KeyTurn {
        served_at: i64,
        /// Index of its first job.
        index: usize,
        jobs: usize,
    }
    let mut round_robin: BTreeMap<Option<i64>, KeyTurn> = BTreeMap::new();
    let mut rounds = Vec::with_capacity(jobs.len());
    for (index, candidate) in jobs.iter().enumerate() {
        let turn = round_robin.entry(candidate.key).or_insert(KeyTurn { served_at: candidate.turn, index, jobs: 0 });
        // A key has a key queue in each lane; what counts is when any of them was served.
        turn.served_at = turn.served_at.max(candidate.turn);
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

    fn candidate(queue: &str, ordering: Ordering, priority: Priority, ready_ms: i64) -> Candidate<()> {
        Candidate {
            queue: queue.into(),
            ordering,
            fairness: Fairness::None,
            key: None,
            turn: 0,
            priority,
            ready_at: Timestamp::from_ms(ready_ms),
            id: JobId::new(),
            row: (),
        }
    }

    #[test]
    fn a_queue_is_ordered_by_score_and_then_by_id() {
        let all = vec![
            candidate("a", Ordering::Aging, Priority::Normal, 2_000_000),
            candidate("a", Ordering::Aging, Priority::Normal, 0),
            candidate("a", Ordering::Aging, Priority::Critical, 1_999_999),
            candidate("a", Ordering::Aging, Priority::Normal, 0),
        ];
        let ids: Vec<_> = all.iter().map(|c| c.id).collect();
        let chosen: Vec<_> = share_out(all, 4, 0).into_iter().map(|c| c.id).collect();
        assert_eq!(chosen, [ids[2], ids[1], ids[3], ids[0]]);
    }

    #[test]
    fn a_strict_queue_prefers_the_higher_priority() {
        let all = vec![
            candidate("a", Ordering::Strict, Priority::Low, 0),
            candidate("a", Ordering::Strict, Priority::High, 9_000_000_000),
        ];
        assert_eq!(share_out(all, 1, 0)[0].priority, Priority::High);
    }

    #[test]
    fn queues_take_turns_and_a_short_one_leaves_its_share() {
        let all: Vec<_> = (0..10)
            .map(|n| candidate("long", Ordering::Aging, Priority::Normal, n))
            .chain([candidate("short", Ordering::Aging, Priority::Normal, 99)])
            .collect();
        let queues: Vec<_> = share_out(all.clone(), 4, 0).into_iter().map(|c| c.queue).collect();
        assert_eq!(queues, ["long", "short", "long", "long"]);
        let queues: Vec<_> = share_out(all, 1, 1).into_iter().map(|c| c.queue).collect();
        assert_eq!(queues, ["short"], "another turn, another first");
    }

    fn of_key(key: Option<i64>, turn: i64, ready_ms: i64) -> Candidate<()> {
        let plain = candidate("fair", Ordering::Aging, Priority::Normal, ready_ms);
        Candidate { fairness: Fairness::Key, key, turn, ..plain }
    }

    #[test]
    fn in_a_fair_queue_each_key_has_its_turn_however_many_jobs_it_has() {
        let all: Vec<_> = (0..100)
            .map(|n| of_key(Some(1), 0, n))
            .chain([of_key(Some(2), 0, 500), of_key(Some(2), 0, 501), of_key(None, 0, 600), of_key(None, 0, 601)])
            .collect();
        let keys: Vec<_> = share_out(all, 8, 0).into_iter().map(|c| c.key).collect();
        let (one, two) = (Some(1), Some(2));
        assert_eq!(keys, [one, two, None, one, two, None, one, one]);
    }

    #[test]
    fn in_a_fair_queue_the_key_served_longest_ago_goes_first() {
        let all = vec![of_key(Some(1), 90, 0), of_key(Some(2), 50, 10), of_key(Some(3), 70, 5)];
        let keys: Vec<_> = share_out(all, 3, 0).into_iter().filter_map(|c| c.key).collect();
        assert_eq!(keys, [2, 3, 1]);
        // Its key queue in another lane was not served, but the key was.
        let all = vec![of_key(Some(1), 90, 0), of_key(Some(1), 1, 2), of_key(Some(2), 50, 10)];
        let keys: Vec<_> = share_out(all, 3, 0).into_iter().filter_map(|c| c.key).collect();
        assert_eq!(keys, [2, 1, 1]);
    }
}
