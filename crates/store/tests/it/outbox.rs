//! The outbox: no partition belongs to two nodes, the order per subject is kept, nothing is lost, and people can handle dead
//! letters.

use std::collections::HashSet;

use faena_domain::{JobId, NodeId, Timestamp};
use faena_store::{
    AuditFilter, DeadEvent, DeadFilter, EventSubscription, MAX_ATTEMPTS, OnRejected, OutboxEvent, OutboxResult,
    OutboxTakeRequest, OutboxTaken, PARTITIONS, Republish, SinkView, StoreError, SubscriptionMode,
};

use crate::support::World;

const LEASE_MS: i64 = 10_000;

pub async fn sink(world: &World, name: &str, types: &[&str], on_rejected: OnRejected) {
    let want = EventSubscription {
        name: name.into(),
        types: types.iter().map(|kind| (*kind).to_owned()).collect(),
        mode: SubscriptionMode::Queue(on_rejected),
        until: Timestamp::MAX,
    };
    world.store.event_subscribe(vec![want], world.at(0)).await.unwrap();
}

async fn take_as(world: &World, node: NodeId, limit: usize, ms: i64) -> OutboxTaken {
    let ask = OutboxTakeRequest { sink: "s".into(), node, lease_ms: LEASE_MS, limit };
    world.store.outbox_take(ask, world.at(ms)).await.unwrap()
}

async fn take(world: &World, ms: i64) -> OutboxTaken {
    take_as(world, world.node, 1_000, ms).await
}

fn confirmed(event: &OutboxEvent) -> OutboxResult {
    OutboxResult {
        partition: event.partition,
        position: event.event.position,
        refused: None,
        again_at: Timestamp::from_ms(0),
    }
}

fn refused(world: &World, event: &OutboxEvent, again_ms: i64) -> OutboxResult {
    OutboxResult { refused: Some("too large".into()), again_at: world.at(again_ms), ..confirmed(event) }
}

async fn settle(world: &World, taken: &OutboxTaken, results: Vec<OutboxResult>, ms: i64) {
    world.store.outbox_settle("s", taken.partitions.clone(), results, world.at(ms)).await.unwrap();
}

/// Confirms every due event.
async fn send_all(world: &World, ms: i64) -> Vec<OutboxEvent> {
    let taken = take(world, ms).await;
    settle(world, &taken, taken.events.iter().map(confirmed).collect(), ms).await;
    taken.events
}

/// Rejects the first event of a subject until it is dead.
async fn kill(world: &World, subject: JobId, ms: i64) {
    for n in 0..i64::from(MAX_ATTEMPTS) {
        let taken = take(world, ms + n).await;
        let first = taken.events.iter().find(|event| event.event.subject == subject.0).unwrap();
        assert_eq!(i64::from(first.attempts), n);
        settle(world, &taken, vec![refused(world, first, ms + n + 1)], ms + n).await;
    }
}

async fn view(world: &World, ms: i64) -> SinkView {
    world.store.outbox_sinks(world.at(ms)).await.unwrap().remove(0)
}

async fn dead(world: &World) -> Vec<DeadEvent> {
    world.store.outbox_dead(DeadFilter::default(), None, 100).await.unwrap()
}

fn open() -> DeadFilter {
    DeadFilter { is_resolved: Some(false), ..DeadFilter::default() }
}

fn subjects(events: &[OutboxEvent]) -> Vec<JobId> {
    events.iter().map(|event| JobId(event.event.subject)).collect()
}

fn numbers(taken: &OutboxTaken) -> HashSet<i16> {
    taken.partitions.iter().map(|partition| partition.number).collect()
}

pub async fn events_wait_for_their_sink_in_order_until_they_are_confirmed(world: &World) {
    sink(world, "s", &["job.*"], OnRejected::Skip).await;
    let job = world.running(world.job("mail", 0)).await;
    world.complete(&job, 5).await;
    let taken = take(world, 10).await;
    assert_eq!(taken.partitions.len(), PARTITIONS as usize, "one node has all");
    let kinds: Vec<&str> = taken.events.iter().map(|event| event.event.kind.as_str()).collect();
    assert_eq!(
        kinds,
        ["job.created", "job.status.changed", "job.status.changed", "job.status.changed", "job.completed"]
    );
    assert!(taken.events.iter().all(|event| event.event.subject == job.id.0 && event.attempts == 0));
    assert_eq!(take(world, 11).await.events.len(), 5, "until it is confirmed");
    settle(world, &taken, taken.events[..2].iter().map(confirmed).collect(), 12).await;
    let left = take(world, 13).await;
    assert_eq!(left.events[0].event, taken.events[2].event);
    settle(world, &left, left.events.iter().map(confirmed).collect(), 14).await;
    let view = view(world, 15).await;
    assert_eq!((view.sent, view.pending, view.dead, view.oldest_pending_at), (5, 0, 0, None));
    assert_eq!((view.types, view.on_rejected), (vec!["job.*".to_owned()], "skip".to_owned()));
    assert_eq!(view.holders, [(world.node, 16)]);
}

pub async fn up_to_the_limit_is_taken(world: &World) {
    sink(world, "s", &["job.created"], OnRejected::Skip).await;
    world.submit_all((0..50).map(|n| world.job("mail", n)).collect()).await;
    let taken = take_as(world, world.node, 20, 100).await;
    assert_eq!(taken.events.len(), 20);
    assert!(taken.events.is_sorted_by_key(|event| event.event.position));
    // All in one partition: half of a share would be one.
    let one = world.job("mail", 200);
    sink(world, "s", &["job.*"], OnRejected::Skip).await;
    send_all(world, 300).await;
    for n in 0..5 {
        let id = world.submit(one.clone()).await;
        world.cancel(id, 400 + n).await;
        world.store.job_delete(id, None, world.at(400 + n)).await.unwrap();
    }
    assert_eq!(take_as(world, world.node, 12, 500).await.events.len(), 12);
}

pub async fn two_nodes_share_the_partitions_and_never_both_own_one(world: &World) {
    sink(world, "s", &["job.created"], OnRejected::Skip).await;
    world.submit_all((0..100).map(|n| world.job("mail", n)).collect()).await;
    let (one, two, three) = (NodeId::new(), NodeId::new(), NodeId::new());
    assert_eq!(take_as(world, one, 1_000, 0).await.events.len(), 100);
    assert_eq!(take_as(world, two, 1_000, 1).await.partitions, [], "all are taken, but it has asked");
    let (first, second) = (take_as(world, one, 1_000, 2).await, take_as(world, two, 1_000, 3).await);
    assert_eq!((numbers(&first).len(), numbers(&second).len()), (8, 8));
    assert!(numbers(&first).is_disjoint(&numbers(&second)));
    let mut seen: Vec<i64> = first.events.iter().chain(&second.events).map(|event| event.event.position).collect();
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), 100, "together everything, nothing twice");
    assert_eq!(first.events.len() + second.events.len(), 100);
    for n in 0..3 {
        for node in [one, two, three] {
            take_as(world, node, 1, 10 + n).await;
        }
    }
    let view = view(world, 20).await;
    let mut parts: Vec<u32> = view.holders.iter().map(|(_, parts)| *parts).collect();
    parts.sort_unstable();
    assert_eq!(parts, [4, 6, 6]);
}

pub async fn concurrent_nodes_never_both_lease_a_partition(world: &World) {
    sink(world, "s", &["job.created"], OnRejected::Skip).await;
    let nodes: Vec<NodeId> = (0..5).map(|_| NodeId::new()).collect();
    for round in 0..8 {
        let asks = nodes.iter().map(|node| take_as(world, *node, 10, round));
        let taken = futures_util::future::join_all(asks).await;
        let mut holders: std::collections::HashMap<(i16, i64), usize> = Default::default();
        for partition in taken.iter().flat_map(|taken| &taken.partitions) {
            *holders.entry((partition.number, partition.epoch)).or_default() += 1;
        }
        assert!(holders.values().all(|count| *count == 1), "an epoch has one holder: {holders:?}");
    }
    let held: u32 = view(world, 10).await.holders.iter().map(|(_, parts)| parts).sum();
    assert_eq!(held, 16);
}

pub async fn a_dead_node_is_replaced_after_its_lease_and_a_stopped_one_immediately(world: &World) {
    sink(world, "s", &["job.created"], OnRejected::Skip).await;
    let (one, two, three) = (NodeId::new(), NodeId::new(), NodeId::new());
    let before = take_as(world, one, 1, 0).await;
    assert_eq!(take_as(world, two, 1, LEASE_MS - 1).await.partitions, []);
    let after = take_as(world, two, 1, LEASE_MS).await;
    assert_eq!(numbers(&after).len(), 16, "the dead one does not count");
    assert!(after.partitions.iter().zip(&before.partitions).all(|(new, old)| new.epoch > old.epoch));
    world.store.outbox_leave(two).await.unwrap();
    assert_eq!(numbers(&take_as(world, three, 1, LEASE_MS + 1).await).len(), 16);
}

pub async fn a_lease_is_renewed_by_a_request(world: &World) {
    sink(world, "s", &["job.created"], OnRejected::Skip).await;
    let (one, two) = (NodeId::new(), NodeId::new());
    let first = take_as(world, one, 1, 0).await;
    let again = take_as(world, one, 1, LEASE_MS * 2 / 3).await;
    assert_eq!(again.partitions, first.partitions, "the same, under the same epochs");
    assert_eq!(take_as(world, two, 1, LEASE_MS + 1).await.partitions, []);
    let late = take_as(world, one, 1, 3 * LEASE_MS).await;
    assert!(late.partitions.iter().all(|partition| first.partitions.contains(partition)), "no other node had taken it");
}

pub async fn a_sink_without_a_subscription_has_no_events(world: &World) {
    assert_eq!(take(world, 0).await.partitions, []);
    sink(world, "s", &["job.created"], OnRejected::Skip).await;
    let until = world.at(1_000);
    let want = EventSubscription {
        name: "t".into(),
        types: vec!["*".into()],
        mode: SubscriptionMode::Queue(OnRejected::Skip),
        until,
    };
    world.store.event_subscribe(vec![want], world.at(0)).await.unwrap();
    world.submit(world.job("mail", 0)).await;
    let ask = |ms| {
        let ask = OutboxTakeRequest { sink: "t".into(), node: world.node, lease_ms: LEASE_MS, limit: 9 };
        world.store.outbox_take(ask, world.at(ms))
    };
    assert_eq!(ask(999).await.unwrap().events.len(), 2);
    assert_eq!(ask(1_000).await.unwrap().events.len(), 0);
    world.store.event_settle(world.at(0), 100, world.at(1_000)).await.unwrap();
    let names: Vec<String> =
        world.store.outbox_sinks(world.at(1_001)).await.unwrap().into_iter().map(|view| view.name).collect();
    assert_eq!(names, ["s"]);
    for table in ["outbox_node", "outbox_lease", "outbox"] {
        let strays = world
            .ledger
            .rows(&format!("SELECT count(*) FROM {table} WHERE sink NOT IN (SELECT id FROM subscription)"))
            .await;
        assert_eq!(strays, [["0"]], "{table}");
    }
}

pub async fn a_rejected_event_delays_only_its_subject(world: &World) {
    for on_rejected in [OnRejected::Park, OnRejected::Skip] {
        sink(world, "s", &["job.*"], on_rejected).await;
        let bad = world.submit(world.job("mail", 0)).await;
        let good = world.submit(world.job("mail", 0)).await;
        let taken = take(world, 1).await;
        assert_eq!(subjects(&taken.events), [bad, bad, good, good]);
        settle(world, &taken, vec![refused(world, &taken.events[0], 100)], 1).await;
        let later = take(world, 2).await;
        assert_eq!(subjects(&later.events), [good, good], "the later one of the same subject waits");
        assert_eq!(later.next_at, Some(world.at(100)));
        settle(world, &later, later.events.iter().map(confirmed).collect(), 3).await;
        let again = take(world, 100).await;
        assert_eq!(subjects(&again.events), [bad], "alone: it may be refused again");
        assert_eq!((again.events[0].attempts, again.events[0].event.id), (1, taken.events[0].event.id));
        settle(world, &again, vec![confirmed(&again.events[0])], 101).await;
        assert_eq!(subjects(&send_all(world, 102).await), [bad], "and the rest follows");
        assert_eq!(view(world, 103).await.pending, 0);
    }
}

pub async fn five_rejections_make_a_dead_letter_with_all_details(world: &World) {
    sink(world, "s", &["job.created"], OnRejected::Skip).await;
    let mut job = world.job("mail", 0);
    job.correlation_id = Some("order-7".into());
    job.options.traceparent = Some("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".into());
    let id = world.submit(job).await;
    let event = take(world, 0).await.events.remove(0).event;
    kill(world, id, 10).await;
    assert_eq!(take(world, 50).await.events.len(), 0);
    let letter = dead(world).await.remove(0);
    assert_eq!((letter.sink.as_str(), letter.original_event_id, letter.aggregate_id), ("s", event.id, id.0));
    assert_eq!((letter.aggregate_type.as_str(), letter.event_type.as_str()), ("job", "job.created"));
    assert_eq!(letter.payload, serde_json::from_str::<serde_json::Value>(&event.data).unwrap());
    let metadata = serde_json::json!({
        "type": "job.created", "correlationId": "order-7", "sequence": 1, "actor": "system",
        "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    });
    assert_eq!(letter.metadata, Some(metadata));
    assert_eq!((letter.error_message.as_str(), letter.retry_count), ("too large", MAX_ATTEMPTS));
    assert_eq!((letter.original_created_at, letter.moved_at), (event.at, world.at(14)));
    assert_eq!((letter.resolved_at, letter.resolved_by, letter.resolution_notes), (None, None, None));
    let view = view(world, 50).await;
    assert_eq!((view.dead, view.pending, view.sent), (1, 0, 0));
}

pub async fn a_sink_that_skips_continues_behind_a_dead_letter_and_one_that_parks_waits_for_it(world: &World) {
    for (on_rejected, ms) in [(OnRejected::Skip, 0), (OnRejected::Park, 1_000)] {
        sink(world, "s", &["job.*"], on_rejected).await;
        let bad = world.submit(world.job("mail", ms)).await;
        let good = world.submit(world.job("mail", ms)).await;
        kill(world, bad, ms + 10).await;
        let sent = subjects(&send_all(world, ms + 20).await);
        match on_rejected {
            OnRejected::Skip => assert_eq!(sent, [bad, good, good]),
            OnRejected::Park => {
                assert_eq!(sent, [good, good]);
                assert_eq!(
                    world.store.outbox_resolve(open(), "told by phone", "ana", world.at(ms + 30)).await.unwrap(),
                    1
                );
                assert_eq!(subjects(&send_all(world, ms + 40).await), [bad], "what was parked goes on");
            }
        }
        world.store.outbox_resolve(open(), "over", "ana", world.at(ms + 50)).await.unwrap();
    }
}

pub async fn a_resolved_dead_letter_names_the_actor_and_the_reason(world: &World) {
    sink(world, "s", &["job.created"], OnRejected::Park).await;
    let id = world.submit(world.job("mail", 0)).await;
    kill(world, id, 10).await;
    let letter = dead(world).await.remove(0);
    let this = DeadFilter { ids: vec![letter.id], ..DeadFilter::default() };
    assert_eq!(world.store.outbox_resolve(this.clone(), "told by phone", "ana", world.at(30)).await.unwrap(), 1);
    assert_eq!(world.store.outbox_resolve(this.clone(), "again", "eva", world.at(31)).await.unwrap(), 0);
    assert_eq!(world.store.outbox_replay(this, None, "eva", world.at(32)).await.unwrap(), 0, "it is dealt with");
    let letter = dead(world).await.remove(0);
    assert_eq!(
        (letter.resolved_at, letter.resolved_by.as_deref(), letter.resolution_notes.as_deref()),
        (Some(world.at(30)), Some("ana"), Some("told by phone"))
    );
    let entries = world.store.audit_list(AuditFilter::default(), 9).await.unwrap();
    assert_eq!(entries.len(), 1, "what changed nothing left no entry");
    assert_eq!(
        (entries[0].actor.as_str(), entries[0].action.as_str(), entries[0].target.clone(), entries[0].count),
        ("ana", "outbox.resolve", letter.id.to_string(), 1)
    );
    assert_eq!(entries[0].details["notes"], "told by phone");
}

pub async fn dead_letters_are_replayed_in_order_under_their_own_ids_at_a_rate(world: &World) {
    sink(world, "s", &["job.created"], OnRejected::Skip).await;
    let ids = world.submit_all((0..4).map(|n| world.job("mail", n)).collect()).await;
    let first: Vec<_> = take(world, 5).await.events.into_iter().map(|event| event.event.id).collect();
    for (n, id) in ids.iter().enumerate().rev() {
        kill(world, *id, 100 * n as i64 + 10).await;
    }
    assert_eq!(world.store.outbox_replay(open(), Some(2), "ana", world.at(10_000)).await.unwrap(), 4);
    let mut seen = Vec::new();
    for (ms, count) in [(10_000, 1), (10_499, 1), (10_500, 2), (11_000, 3), (11_500, 4)] {
        let taken = take(world, ms).await;
        assert_eq!(taken.events.len(), count, "at {ms}");
        seen = taken.events.iter().map(|event| (event.event.id, event.attempts)).collect();
    }
    assert_eq!(seen, first.iter().map(|id| (*id, 0)).collect::<Vec<_>>(), "in the order in which they happened");
    assert_eq!(send_all(world, 11_600).await.len(), 4);
    let letters = dead(world).await;
    assert!(letters.iter().all(|letter| letter.resolved_by.as_deref() == Some("ana")));
    assert!(letters.iter().all(|letter| letter.resolution_notes.as_deref() == Some("replayed")));
    let entry = world.store.audit_list(AuditFilter::default(), 9).await.unwrap().remove(0);
    assert_eq!((entry.actor.as_str(), entry.action.as_str(), entry.count), ("ana", "outbox.replay", 4));
    assert_eq!(world.store.outbox_replay(open(), None, "ana", world.at(12_000)).await.unwrap(), 0);
}

pub async fn a_replayed_dead_letter_precedes_the_events_parked_behind_it(world: &World) {
    sink(world, "s", &["job.*"], OnRejected::Park).await;
    let id = world.submit(world.job("mail", 0)).await;
    kill(world, id, 10).await;
    assert_eq!(take(world, 20).await.events.len(), 0);
    world.store.outbox_replay(open(), Some(1), "ana", world.at(30)).await.unwrap();
    let kinds: Vec<String> = send_all(world, 31).await.into_iter().map(|event| event.event.kind).collect();
    assert_eq!(kinds, ["job.created", "job.status.changed"]);
}

pub async fn dead_letters_are_found_by_filter_and_in_pages(world: &World) {
    sink(world, "s", &["job.created"], OnRejected::Skip).await;
    let ids = world.submit_all((0..3).map(|n| world.job("mail", n)).collect()).await;
    for (n, id) in ids.iter().enumerate() {
        kill(world, *id, 100 * n as i64 + 10).await;
    }
    let find = async |filter: DeadFilter, after, limit| {
        let found = world.store.outbox_dead(filter, after, limit).await.unwrap();
        found.into_iter().map(|letter| JobId(letter.aggregate_id)).collect::<Vec<_>>()
    };
    let any = DeadFilter::default;
    assert_eq!(find(any(), None, 9).await, [ids[2], ids[1], ids[0]]);
    let second = dead(world).await[1].id;
    assert_eq!(find(any(), Some(second), 9).await, [ids[0]]);
    assert_eq!(find(any(), None, 1).await, [ids[2]]);
    assert_eq!(find(DeadFilter { aggregate_id: Some(ids[1].0), ..any() }, None, 9).await, [ids[1]]);
    assert_eq!(find(DeadFilter { sink: Some("other".into()), ..any() }, None, 9).await, []);
    assert_eq!(find(DeadFilter { event_type: Some("job.*".into()), ..any() }, None, 9).await.len(), 3);
    assert_eq!(find(DeadFilter { event_type: Some("job_created".into()), ..any() }, None, 9).await, []);
    let times = DeadFilter { moved_after: Some(world.at(100)), moved_before: Some(world.at(200)), ..any() };
    assert_eq!(find(times, None, 9).await, [ids[1]]);
    assert_eq!(find(DeadFilter { ids: vec![second], ..any() }, None, 9).await, [ids[1]]);
    world.store.outbox_resolve(DeadFilter { ids: vec![second], ..any() }, "", "ana", world.at(500)).await.unwrap();
    assert_eq!(find(DeadFilter { is_resolved: Some(true), ..any() }, None, 9).await, [ids[1]]);
    assert_eq!(find(open(), None, 9).await, [ids[2], ids[0]]);
}

pub async fn sent_events_of_a_time_range_are_republished_but_not_waiting_ones(world: &World) {
    sink(world, "s", &["job.*"], OnRejected::Skip).await;
    let ids = world.submit_all((0..3).map(|_| world.job("mail", 0)).collect()).await;
    let sent = send_all(world, 5).await;
    assert_eq!(sent.len(), 6);
    let waits = world.submit(world.job("mail", 10)).await;
    let what = Republish {
        sink: "s".into(),
        from: Timestamp::from_ms(0),
        to: Timestamp::MAX,
        event_type: Some("job.created".into()),
    };
    let answer = world.store.outbox_republish(what.clone(), Some(1), "ana", world.at(20)).await.unwrap();
    assert_eq!(answer, Some(3));
    let now = take(world, 20).await;
    assert_eq!(subjects(&now.events), [ids[0], waits, waits], "the others at their pace");
    let again = take(world, 10_000).await.events;
    let made: Vec<_> = again[..3].iter().map(|event| event.event.clone()).collect();
    let before: Vec<_> =
        sent.iter().filter(|event| event.event.kind == "job.created").map(|e| e.event.clone()).collect();
    assert_eq!(made, before, "in order, under their own ids");
    let at_first = again.len();
    assert_eq!(world.store.outbox_republish(what.clone(), None, "ana", world.at(10_001)).await.unwrap(), Some(0));
    assert_eq!(take(world, 10_002).await.events.len(), at_first);
    let nothing = Republish { to: Timestamp::from_ms(1), ..what.clone() };
    assert_eq!(world.store.outbox_republish(nothing, None, "ana", world.at(10_003)).await.unwrap(), Some(0));
    let nobody = Republish { sink: "nobody".into(), ..what };
    assert_eq!(world.store.outbox_republish(nobody, None, "ana", world.at(10_004)).await.unwrap(), None);
    let entries = world.store.audit_list(AuditFilter::default(), 9).await.unwrap();
    let first = entries.last().unwrap();
    assert_eq!((first.action.as_str(), first.target.as_str(), first.count), ("outbox.republish", "s", 3));
}

pub async fn a_sink_that_is_down_shows_since_when_and_why_and_uses_no_attempt(world: &World) {
    sink(world, "s", &["job.created"], OnRejected::Skip).await;
    world.submit(world.job("mail", 0)).await;
    let down = async |reason: Option<&str>, ms| {
        world.store.outbox_down("s", reason.map(str::to_owned), world.at(ms)).await.unwrap();
        let view = view(world, ms).await;
        (view.down_since, view.down_reason)
    };
    assert_eq!(down(Some("refused"), 10).await, (Some(world.at(10)), Some("refused".into())));
    assert_eq!(down(Some("no route"), 20).await, (Some(world.at(10)), Some("no route".into())));
    assert_eq!(take(world, 25).await.events[0].attempts, 0);
    assert_eq!(down(None, 30).await, (None, None));
    assert_eq!(down(Some("refused"), 40).await.0, Some(world.at(40)));
}

pub async fn late_results_of_a_lost_partition_count_if_they_are_confirmations(world: &World) {
    sink(world, "s", &["job.created"], OnRejected::Skip).await;
    world.submit_all((0..2).map(|n| world.job("mail", n)).collect()).await;
    let (one, two) = (NodeId::new(), NodeId::new());
    let old = take_as(world, one, 9, 0).await;
    let new = take_as(world, two, 9, LEASE_MS).await;
    assert_eq!((old.events.len(), new.events.len()), (2, 2));
    let late = vec![confirmed(&old.events[0]), refused(world, &old.events[1], LEASE_MS * 9)];
    settle(world, &old, late, LEASE_MS + 1).await;
    let left = take_as(world, two, 9, LEASE_MS + 2).await;
    assert_eq!(left.events.len(), 1);
    assert_eq!((left.events[0].event.id, left.events[0].attempts), (old.events[1].event.id, 0));
    assert_eq!(view(world, LEASE_MS + 2).await.sent, 1);
    settle(world, &new, new.events.iter().map(confirmed).collect(), LEASE_MS + 3).await;
    assert_eq!(view(world, LEASE_MS + 3).await.sent, 2, "what was confirmed twice counts once");
}

pub async fn every_event_is_sent_or_waiting_or_dead(world: &World) {
    sink(world, "s", &["job.*"], OnRejected::Park).await;
    let mut dice = crate::support::Dice(11);
    let nodes = [NodeId::new(), NodeId::new(), NodeId::new()];
    for n in 0..150 {
        let ms = n * 100;
        match dice.below(3) {
            0 => drop(world.submit(world.job("mail", ms)).await),
            1 => {
                for job in world.claim(2, ms).await {
                    world.complete(&job, ms).await;
                }
            }
            _ => {
                let node = *dice.pick(&nodes).unwrap();
                let taken = take_as(world, node, 5, ms).await;
                let said = |event: &OutboxEvent| match dice.below(3) {
                    0 => refused(world, event, ms + 50),
                    _ => confirmed(event),
                };
                let results: Vec<OutboxResult> = taken.events.iter().map(said).collect();
                settle(world, &taken, results, ms).await;
            }
        }
    }
    let made: u64 = world.ledger.rows("SELECT count(*) FROM event").await[0][0].parse().unwrap();
    let view = view(world, 15_000).await;
    assert!(view.sent > 0 && made > 50);
    assert_eq!(made, view.sent + view.pending + view.dead);
}

pub async fn waiting_and_dead_events_are_not_pruned(world: &World) {
    sink(world, "s", &["job.created"], OnRejected::Skip).await;
    let ids = world.submit_all((0..3).map(|n| world.job("mail", n)).collect()).await;
    kill(world, ids[0], 10).await;
    let taken = take(world, 20).await;
    settle(world, &taken, vec![confirmed(&taken.events[0])], 20).await;
    let far = Timestamp::MAX;
    assert_eq!(world.store.event_settle(far, 100, world.at(30)).await.unwrap(), 1, "only what was sent");
    assert_eq!(subjects(&send_all(world, 40).await), [ids[2]]);
    world.store.outbox_replay(open(), None, "ana", world.at(50)).await.unwrap();
    assert_eq!(world.store.event_settle(far, 100, world.at(60)).await.unwrap(), 1);
    assert_eq!(subjects(&send_all(world, 70).await), [ids[0]]);
    assert_eq!(world.store.event_settle(far, 100, world.at(80)).await.unwrap(), 1);
    assert_eq!(dead(world).await[0].payload["jobId"], ids[0].to_string(), "the letter itself is kept");
}

pub async fn a_message_creates_its_jobs_once_per_consumer(world: &World) {
    let submit = async |consumer: &str, message: &str, jobs| {
        world.store.inbox_submit(consumer, message, jobs, world.at(5)).await
    };
    let made = submit("orders", "m1", vec![world.job("mail", 0), world.job("mail", 0)]).await.unwrap().unwrap();
    assert_eq!(made.len(), 2);
    assert!(submit("orders", "m1", vec![world.job("mail", 1)]).await.unwrap().is_none());
    assert!(submit("other", "m1", vec![world.job("mail", 2)]).await.unwrap().is_some());
    assert!(submit("orders", "m2", vec![]).await.unwrap().is_some(), "also one that makes no job");
    assert_eq!(world.list(Default::default()).await.len(), 3);
    assert_eq!(world.claim(9, 10).await.len(), 3, "they are ready");
}

pub async fn a_message_that_arrives_twice_concurrently_creates_its_jobs_once(world: &World) {
    let comes = (0..8).map(|n| world.store.inbox_submit("orders", "m", vec![world.job("mail", n)], world.at(n)));
    let answers = futures_util::future::join_all(comes).await;
    assert_eq!(answers.into_iter().filter(|answer| answer.as_ref().unwrap().is_some()).count(), 1);
    assert_eq!(world.list(Default::default()).await.len(), 1);
}

pub async fn a_message_whose_jobs_are_rejected_is_not_processed(world: &World) {
    let mut orphan = world.job("mail", 0);
    orphan.options.depends_on = vec![JobId::new()];
    let answer = world.store.inbox_submit("orders", "m", vec![world.job("mail", 0), orphan], world.at(1)).await;
    assert!(matches!(answer, Err(StoreError::Invalid(_))), "{answer:?}");
    assert_eq!(world.list(Default::default()).await, []);
    let again = world.store.inbox_submit("orders", "m", vec![world.job("mail", 2)], world.at(3)).await.unwrap();
    assert_eq!(again.unwrap().len(), 1);
}

pub async fn old_processed_messages_are_deleted(world: &World) {
    sink(world, "s", &["job.created"], OnRejected::Skip).await;
    world.store.inbox_submit("orders", "m", vec![], world.at(0)).await.unwrap();
    let month = 30 * 24 * 3_600_000;
    world.store.event_settle(world.at(0), 100, world.at(month)).await.unwrap();
    assert!(world.store.inbox_submit("orders", "m", vec![], world.at(1)).await.unwrap().is_none());
    world.store.event_settle(world.at(0), 100, world.at(month + 1)).await.unwrap();
    assert!(world.store.inbox_submit("orders", "m", vec![], world.at(2)).await.unwrap().is_some());
}
