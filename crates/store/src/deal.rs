//! Who goes first when a claim sees ready jobs of several lanes: by score inside a queue, in turn between queues.

use std::collections::BTreeMap;

use faena_domain::{JobId, Ordering, Priority, Timestamp};

#[derive(Clone, Debug)]
pub struct Candidate<T> {
    pub queue: String,
    pub ordering: Ordering,
    pub priority: Priority,
    pub ready_at: Timestamp,
    pub id: JobId,
    pub row: T,
}

/// The first `limit` of `candidates`. `turn` chooses which queue is served first, so that with few slots all get theirs.
pub fn deal<T>(candidates: Vec<Candidate<T>>, limit: usize, turn: usize) -> Vec<Candidate<T>> {
    let mut queues: BTreeMap<String, Vec<Candidate<T>>> = BTreeMap::new();
    for candidate in candidates {
        queues.entry(candidate.queue.clone()).or_default().push(candidate);
    }
    let mut lines: Vec<_> = queues
        .into_values()
        .map(|mut line| {
            line.sort_by_key(|c| (c.ordering.score(c.priority, c.ready_at), c.id));
            line.into_iter()
        })
        .collect();
    if !lines.is_empty() {
        let first = turn % lines.len();
        lines.rotate_left(first);
    }
    let mut dealt = Vec::new();
    while dealt.len() < limit && !lines.is_empty() {
        lines.retain_mut(|line| match line.next() {
            Some(candidate) if dealt.len() < limit => {
                dealt.push(candidate);
                true
            }
            _ => false,
        });
    }
    dealt
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(queue: &str, ordering: Ordering, priority: Priority, ready_ms: i64) -> Candidate<()> {
        Candidate {
            queue: queue.into(),
            ordering,
            priority,
            ready_at: Timestamp::from_ms(ready_ms),
            id: JobId::new(),
            row: (),
        }
    }

    #[test]
    fn a_queue_goes_by_score_and_equal_scores_by_id() {
        let all = vec![
            candidate("a", Ordering::Aging, Priority::Normal, 2_000_000),
            candidate("a", Ordering::Aging, Priority::Normal, 0),
            candidate("a", Ordering::Aging, Priority::Critical, 1_999_999),
            candidate("a", Ordering::Aging, Priority::Normal, 0),
        ];
        let ids: Vec<_> = all.iter().map(|c| c.id).collect();
        let dealt: Vec<_> = deal(all, 4, 0).into_iter().map(|c| c.id).collect();
        assert_eq!(dealt, [ids[2], ids[1], ids[3], ids[0]]);
    }

    #[test]
    fn a_strict_queue_lets_nothing_pass_a_higher_priority() {
        let all = vec![
            candidate("a", Ordering::Strict, Priority::Low, 0),
            candidate("a", Ordering::Strict, Priority::High, 9_000_000_000),
        ];
        assert_eq!(deal(all, 1, 0)[0].priority, Priority::High);
    }

    #[test]
    fn queues_take_turns_and_a_short_one_gives_way() {
        let all: Vec<_> = (0..10)
            .map(|n| candidate("long", Ordering::Aging, Priority::Normal, n))
            .chain([candidate("short", Ordering::Aging, Priority::Normal, 99)])
            .collect();
        let queues: Vec<_> = deal(all.clone(), 4, 0).into_iter().map(|c| c.queue).collect();
        assert_eq!(queues, ["long", "short", "long", "long"]);
        let queues: Vec<_> = deal(all, 1, 1).into_iter().map(|c| c.queue).collect();
        assert_eq!(queues, ["short"], "another turn, another first");
    }
}
