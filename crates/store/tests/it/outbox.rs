//! The outbox: no partition belongs to two nodes, the order per subject is kept, no event is lost, and dead letters can be
//! replayed or resolved.

use std::collections::HashSet;

use faena_domain::{JobId, NodeId, Timestamp};
use faena_store::{
    AuditFilter, DeadEvent, DeadFilter, EventSubscription, MAX_ATTEMPTS, OnRejected, OutboxEvent, OutboxResult,
    OutboxTakeRequest, OutboxTaken, PARTITIONS, PublishingNode, Republish, SinkView, StoreError, SubscriptionMode,
};

use crate::support::Fixture;

const LEASE_MS: i64 = 10_000;

pub async fn sink(fixture: &Fixture, name: &str, types: &[&str], on_rejected: OnRejected) {
    let subscription = EventSubscription {
        name: name.into(),
        types: types.iter().map(|kind| (*kind).to_owned()).collect(),
        mode: SubscriptionMode::Queue(on_rejected),
        until: Timestamp::MAX,
    };
    fixture.store.event_subscribe(vec![subscription], fixture.at(0)).await.unwrap();
}

async fn take_as(fixture: &Fixture, node: NodeId, limit: usize, ms: i64) -> OutboxTaken {
    let request = OutboxTakeRequest { sink: "s".into(), node, lease_ms: LEASE_MS, limit };
    fixture.store.outbox_take(request, fixture.at(ms)).await.unwrap()
}

async fn take(fixture: &Fixture, ms: i64) -> OutboxTaken {
    take_as(fixture, fixture.node, 1_000, ms).await
}

fn confirmed(event: &OutboxEvent) -> OutboxResult {
    OutboxResult {
        partition: event.partition,
        position: event.event.position,
        rejected: None,
        retry_at: Timestamp::from_ms(0),
    }
}

fn rejected(fixture: &Fixture, event: &OutboxEvent, retry_ms: i64) -> OutboxResult {
    OutboxResult { rejected: Some("too large".into()), retry_at: fixture.at(retry_ms), ..confirmed(event) }
}

async fn settle(fixture: &Fixture, taken: &OutboxTaken, results: Vec<OutboxResult>, ms: i64) {
    fixture.store.outbox_settle("s", taken.partitions.clone(), results, fixture.at(ms)).await.unwrap();
}

/// Confirms every due event.
async fn send_all(fixture: &Fixture, ms: i64) -> Vec<OutboxEvent> {
    let taken = take(fixture, ms).await;
    settle(fixture, &taken, taken.events.iter().map(confirmed).collect(), ms).await;
    taken.events
}

/// Rejects the first event of a subject until it becomes a dead letter.
async fn make_dead_letter(fixture: &Fixture, subject: JobId, ms: i64) {
    for n in 0..i64::from(MAX_ATTEMPTS) {
        let taken = take(fixture, ms + n).await;
        let first = taken.events.iter().find(|event| event.event.subject == subject.0).unwrap();
        assert_eq!(i64::from(first.attempts), n);
        settle(fixture, &taken, vec![rejected(fixture, first, ms + n + 1)], ms + n).await;
    }
}

async fn view(fixture: &Fixture, ms: i64) -> SinkView {
    fixture.store.outbox_sinks(fixture.at(ms)).await.unwrap().remove(0)
}

async fn dead(fixture: &Fixture) -> Vec<DeadEvent> {
    fixture.store.outbox_dead(DeadFilter::default(), None, 100).await.unwrap()
}

fn unresolved() -> DeadFilter {
    DeadFilter { is_resolved: Some(false), ..DeadFilter::default() }
}

fn subjects(events: &[OutboxEvent]) -> Vec<JobId> {
    events.iter().map(|event| JobId(event.event.subject)).collect()
}

fn numbers(taken: &OutboxTaken) -> HashSet<i16> {
    taken.partitions.iter().map(|partition| partition.number).collect()
}

pub async fn events_wait_for_their_sink_in_order_until_they_are_confirmed(fixture: &Fixture) {
    sink(fixture, "s", &["job.*"], OnRejected::Skip).await;
    let job = fixture.submit_and_claim(fixture.job("mail", 0)).await;
    fixture.complete(&job, 5).await;
    let taken = take(fixture, 10).await;
    assert_eq!(taken.partitions.len(), PARTITIONS as usize, "one node owns all partitions");
    let kinds: Vec<&str> = taken.events.iter().map(|event| event.event.kind.as_str()).collect();
    assert_eq!(
        kinds,
        ["job.created", "job.status.changed", "job.status.changed", "job.status.changed", "job.completed"]
    );
    assert!(taken.events.iter().all(|event| event.event.subject == job.id.0 && event.attempts == 0));
    assert_eq!(take(fixture, 11).await.events.len(), 5, "until it is confirmed");
    settle(fixture, &taken, taken.events[..2].iter().map(confirmed).collect(), 12).await;
    let left = take(fixture, 13).await;
    assert_eq!(left.events[0].event, taken.events[2].event);
    settle(fixture, &left, left.events.iter().map(confirmed).collect(), 14).await;
    let view = view(fixture, 15).await;
    assert_eq!((view.sent, view.pending, view.dead, view.oldest_pending_at), (5, 0, 0, None));
    assert_eq!((view.types, view.on_rejected), (vec!["job.*".to_owned()], "skip".to_owned()));
    assert_eq!(view.nodes, [PublishingNode { node_id: fixture.node, partitions: 16 }]);
}

pub async fn a_sink_takes_events_up_to_the_limit(fixture: &Fixture) {
    sink(fixture, "s", &["job.created"], OnRejected::Skip).await;
    fixture.submit_all((0..50).map(|n| fixture.job("mail", n)).collect()).await;
    let taken = take_as(fixture, fixture.node, 20, 100).await;
    assert_eq!(taken.events.len(), 20);
    assert!(taken.events.is_sorted_by_key(|event| event.event.position));
    // All events are in one partition, whose share of the limit would be too small.
    let job = fixture.job("mail", 200);
    sink(fixture, "s", &["job.*"], OnRejected::Skip).await;
    send_all(fixture, 300).await;
    for n in 0..5 {
        let id = fixture.submit(job.clone()).await;
        fixture.cancel(id, 400 + n).await;
        fixture.store.job_delete(id, None, fixture.at(400 + n)).await.unwrap();
    }
    assert_eq!(take_as(fixture, fixture.node, 12, 500).await.events.len(), 12);
}

pub async fn two_nodes_share_the_partitions_and_never_both_own_one(fixture: &Fixture) {
    sink(fixture, "s", &["job.created"], OnRejected::Skip).await;
    fixture.submit_all((0..100).map(|n| fixture.job("mail", n)).collect()).await;
    let (one, two, three) = (NodeId::new(), NodeId::new(), NodeId::new());
    assert_eq!(take_as(fixture, one, 1_000, 0).await.events.len(), 100);
    assert_eq!(take_as(fixture, two, 1_000, 1).await.partitions, [], "all are leased, but the node is now registered");
    let (first, second) = (take_as(fixture, one, 1_000, 2).await, take_as(fixture, two, 1_000, 3).await);
    assert_eq!((numbers(&first).len(), numbers(&second).len()), (8, 8));
    assert!(numbers(&first).is_disjoint(&numbers(&second)));
    let mut seen: Vec<i64> = first.events.iter().chain(&second.events).map(|event| event.event.position).collect();
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), 100, "all events, none twice");
    assert_eq!(first.events.len() + second.events.len(), 100);
    for n in 0..3 {
        for node in [one, two, three] {
            take_as(fixture, node, 1, 10 + n).await;
        }
    }
    let view = view(fixture, 20).await;
    let mut parts: Vec<u32> = view.nodes.iter().map(|node| node.partitions).collect();
    parts.sort_unstable();
    assert_eq!(parts, [4, 6, 6]);
}

pub async fn concurrent_nodes_never_both_lease_a_partition(fixture: &Fixture) {
    sink(fixture, "s", &["job.created"], OnRejected::Skip).await;
    let nodes: Vec<NodeId> = (0..5).map(|_| NodeId::new()).collect();
    for round in 0..8 {
        let calls = nodes.iter().map(|node| take_as(fixture, *node, 10, round));
        let taken = futures_util::future::join_all(calls).await;
        let mut owners: std::collections::HashMap<(i16, i64), usize> = Default::default();
        for partition in taken.iter().flat_map(|taken| &taken.partitions) {
            *owners.entry((partition.number, partition.epoch)).or_default() += 1;
        }
        assert!(owners.values().all(|count| *count == 1), "an epoch has one owner: {owners:?}");
    }
    let owned: u32 = view(fixture, 10).await.nodes.iter().map(|node| node.partitions).sum();
    assert_eq!(owned, 16);
}

pub async fn a_dead_node_is_replaced_after_its_lease_and_a_stopped_one_immediately(fixture: &Fixture) {
    sink(fixture, "s", &["job.created"], OnRejected::Skip).await;
    let (one, two, three) = (NodeId::new(), NodeId::new(), NodeId::new());
    let before = take_as(fixture, one, 1, 0).await;
    assert_eq!(take_as(fixture, two, 1, LEASE_MS - 1).await.partitions, []);
    let after = take_as(fixture, two, 1, LEASE_MS).await;
    assert_eq!(numbers(&after).len(), 16, "the dead node has no share");
    assert!(after.partitions.iter().zip(&before.partitions).all(|(new, old)| new.epoch > old.epoch));
    fixture.store.outbox_leave(two).await.unwrap();
    assert_eq!(numbers(&take_as(fixture, three, 1, LEASE_MS + 1).await).len(), 16);
}

pub async fn a_lease_is_renewed_by_a_request(fixture: &Fixture) {
    sink(fixture, "s", &["job.created"], OnRejected::Skip).await;
    let (one, two) = (NodeId::new(), NodeId::new());
    let first = take_as(fixture, one, 1, 0).await;
    let renewed = take_as(fixture, one, 1, LEASE_MS * 2 / 3).await;
    assert_eq!(renewed.partitions, first.partitions, "the same, under the same epochs");
    assert_eq!(take_as(fixture, two, 1, LEASE_MS + 1).await.partitions, []);
    let late = take_as(fixture, one, 1, 3 * LEASE_MS).await;
    assert!(late.partitions.iter().all(|partition| first.partitions.contains(partition)), "no other node had taken it");
}

pub async fn a_sink_without_a_subscription_has_no_events(fixture: &Fixture) {
    assert_eq!(take(fixture, 0).await.partitions, []);
    sink(fixture, "s", &["job.created"], OnRejected::Skip).await;
    let until = fixture.at(1_000);
    let subscription = EventSubscription {
        name: "t".into(),
        types: vec!["*".into()],
        mode: SubscriptionMode::Queue(OnRejected::Skip),
        until,
    };
    fixture.store.event_subscribe(vec![subscription], fixture.at(0)).await.unwrap();
    fixture.submit(fixture.job("mail", 0)).await;
    let take_t = |ms| {
        let request = OutboxTakeRequest { sink: "t".into(), node: fixture.node, lease_ms: LEASE_MS, limit: 9 };
        fixture.store.outbox_take(request, fixture.at(ms))
    };
    assert_eq!(take_t(999).await.unwrap().events.len(), 2);
    assert_eq!(take_t(1_000).await.unwrap().events.len(), 0);
    fixture.store.event_prune(fixture.at(0), 100, fixture.at(1_000)).await.unwrap();
    let names: Vec<String> =
        fixture.store.outbox_sinks(fixture.at(1_001)).await.unwrap().into_iter().map(|view| view.name).collect();
    assert_eq!(names, ["s"]);
    for table in ["outbox_node", "outbox_lease", "outbox"] {
        let strays = fixture
            .database
            .rows(&format!("SELECT count(*) FROM {table} WHERE sink NOT IN (SELECT id FROM subscription)"))
            .await;
        assert_eq!(strays, [["0"]], "{table}");
    }
}

pub async fn a_rejected_event_delays_only_its_subject(fixture: &Fixture) {
    for on_rejected in [OnRejected::Park, OnRejected::Skip] {
        sink(fixture, "s", &["job.*"], on_rejected).await;
        let bad = fixture.submit(fixture.job("mail", 0)).await;
        let good = fixture.submit(fixture.job("mail", 0)).await;
        let taken = take(fixture, 1).await;
        assert_eq!(subjects(&taken.events), [bad, bad, good, good]);
        settle(fixture, &taken, vec![rejected(fixture, &taken.events[0], 100)], 1).await;
        let later = take(fixture, 2).await;
        assert_eq!(subjects(&later.events), [good, good], "the later one of the same subject waits");
        assert_eq!(later.next_at, Some(fixture.at(100)));
        settle(fixture, &later, later.events.iter().map(confirmed).collect(), 3).await;
        let retaken = take(fixture, 100).await;
        assert_eq!(subjects(&retaken.events), [bad], "only the first, because it may be rejected again");
        assert_eq!((retaken.events[0].attempts, retaken.events[0].event.id), (1, taken.events[0].event.id));
        settle(fixture, &retaken, vec![confirmed(&retaken.events[0])], 101).await;
        assert_eq!(subjects(&send_all(fixture, 102).await), [bad], "then the later event");
        assert_eq!(view(fixture, 103).await.pending, 0);
    }
}

pub async fn five_rejections_make_a_dead_letter_with_all_details(fixture: &Fixture) {
    sink(fixture, "s", &["job.created"], OnRejected::Skip).await;
    let mut job = fixture.job("mail", 0);
    job.correlation_id = Some("order-7".into());
    job.options.traceparent = Some("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".into());
    let id = fixture.submit(job).await;
    let event = take(fixture, 0).await.events.remove(0).event;
    make_dead_letter(fixture, id, 10).await;
    assert_eq!(take(fixture, 50).await.events.len(), 0);
    let dead_letter = dead(fixture).await.remove(0);
    assert_eq!(
        (dead_letter.sink.as_str(), dead_letter.original_event_id, dead_letter.aggregate_id),
        ("s", event.id, id.0)
    );
    assert_eq!((dead_letter.aggregate_type.as_str(), dead_letter.event_type.as_str()), ("job", "job.created"));
    assert_eq!(dead_letter.payload, serde_json::from_str::<serde_json::Value>(&event.data).unwrap());
    let metadata = serde_json::json!({
        "type": "job.created", "correlationId": "order-7", "sequence": 1, "actor": "system",
        "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    });
    assert_eq!(dead_letter.metadata, Some(metadata));
    assert_eq!((dead_letter.error_message.as_str(), dead_letter.retry_count), ("too large", MAX_ATTEMPTS));
    assert_eq!((dead_letter.original_created_at, dead_letter.moved_at), (event.at, fixture.at(14)));
    assert_eq!((dead_letter.resolved_at, dead_letter.resolved_by, dead_letter.resolution_notes), (None, None, None));
    let view = view(fixture, 50).await;
    assert_eq!((view.dead, view.pending, view.sent), (1, 0, 0));
}

pub async fn a_sink_that_skips_continues_behind_a_dead_letter_and_one_that_parks_waits_for_it(fixture: &Fixture) {
    for (on_rejected, ms) in [(OnRejected::Skip, 0), (OnRejected::Park, 1_000)] {
        sink(fixture, "s", &["job.*"], on_rejected).await;
        let bad = fixture.submit(fixture.job("mail", ms)).await;
        let good = fixture.submit(fixture.job("mail", ms)).await;
        make_dead_letter(fixture, bad, ms + 10).await;
        let sent = subjects(&send_all(fixture, ms + 20).await);
        match on_rejected {
            OnRejected::Skip => assert_eq!(sent, [bad, good, good]),
            OnRejected::Park => {
                assert_eq!(sent, [good, good]);
                assert_eq!(
                    fixture
                        .store
                        .outbox_resolve(unresolved(), "reported by phone", "ana", fixture.at(ms + 30))
                        .await
                        .unwrap(),
                    1
                );
                assert_eq!(subjects(&send_all(fixture, ms + 40).await), [bad], "the parked event is published");
            }
        }
        fixture.store.outbox_resolve(unresolved(), "done", "ana", fixture.at(ms + 50)).await.unwrap();
    }
}

pub async fn a_resolved_dead_letter_names_the_actor_and_the_reason(fixture: &Fixture) {
    sink(fixture, "s", &["job.created"], OnRejected::Park).await;
    let id = fixture.submit(fixture.job("mail", 0)).await;
    make_dead_letter(fixture, id, 10).await;
    let dead_letter = dead(fixture).await.remove(0);
    let this = DeadFilter { ids: vec![dead_letter.id], ..DeadFilter::default() };
    assert_eq!(
        fixture.store.outbox_resolve(this.clone(), "reported by phone", "ana", fixture.at(30)).await.unwrap(),
        1
    );
    assert_eq!(fixture.store.outbox_resolve(this.clone(), "again", "eva", fixture.at(31)).await.unwrap(), 0);
    assert_eq!(fixture.store.outbox_replay(this, None, "eva", fixture.at(32)).await.unwrap(), 0, "it is resolved");
    let dead_letter = dead(fixture).await.remove(0);
    assert_eq!(
        (dead_letter.resolved_at, dead_letter.resolved_by.as_deref(), dead_letter.resolution_notes.as_deref()),
        (Some(fixture.at(30)), Some("ana"), Some("reported by phone"))
    );
    let entries = fixture.store.audit_list(AuditFilter::default(), 9).await.unwrap();
    assert_eq!(entries.len(), 1, "a call that changed nothing has no entry");
    assert_eq!(
        (entries[0].actor.as_str(), entries[0].action.as_str(), entries[0].target.clone(), entries[0].count),
        ("ana", "outbox.resolve", dead_letter.id.to_string(), 1)
    );
    assert_eq!(entries[0].details["notes"], "reported by phone");
}

pub async fn dead_letters_are_replayed_in_order_under_their_own_ids_at_a_rate(fixture: &Fixture) {
    sink(fixture, "s", &["job.created"], OnRejected::Skip).await;
    let ids = fixture.submit_all((0..4).map(|n| fixture.job("mail", n)).collect()).await;
    let first: Vec<_> = take(fixture, 5).await.events.into_iter().map(|event| event.event.id).collect();
    for (n, id) in ids.iter().enumerate().rev() {
        make_dead_letter(fixture, *id, 100 * n as i64 + 10).await;
    }
    assert_eq!(fixture.store.outbox_replay(unresolved(), Some(2), "ana", fixture.at(10_000)).await.unwrap(), 4);
    let mut seen = Vec::new();
    for (ms, count) in [(10_000, 1), (10_499, 1), (10_500, 2), (11_000, 3), (11_500, 4)] {
        let taken = take(fixture, ms).await;
        assert_eq!(taken.events.len(), count, "at {ms}");
        seen = taken.events.iter().map(|event| (event.event.id, event.attempts)).collect();
    }
    assert_eq!(seen, first.iter().map(|id| (*id, 0)).collect::<Vec<_>>(), "in the order in which they happened");
    assert_eq!(send_all(fixture, 11_600).await.len(), 4);
    let dead_letters = dead(fixture).await;
    assert!(dead_letters.iter().all(|dead_letter| dead_letter.resolved_by.as_deref() == Some("ana")));
    assert!(dead_letters.iter().all(|dead_letter| dead_letter.resolution_notes.as_deref() == Some("replayed")));
    let entry = fixture.store.audit_list(AuditFilter::default(), 9).await.unwrap().remove(0);
    assert_eq!((entry.actor.as_str(), entry.action.as_str(), entry.count), ("ana", "outbox.replay", 4));
    assert_eq!(fixture.store.outbox_replay(unresolved(), None, "ana", fixture.at(12_000)).await.unwrap(), 0);
}

pub async fn a_replayed_dead_letter_precedes_the_events_parked_behind_it(fixture: &Fixture) {
    sink(fixture, "s", &["job.*"], OnRejected::Park).await;
    let id = fixture.submit(fixture.job("mail", 0)).await;
    make_dead_letter(fixture, id, 10).await;
    assert_eq!(take(fixture, 20).await.events.len(), 0);
    fixture.store.outbox_replay(unresolved(), Some(1), "ana", fixture.at(30)).await.unwrap();
    let kinds: Vec<String> = send_all(fixture, 31).await.into_iter().map(|event| event.event.kind).collect();
    assert_eq!(kinds, ["job.created", "job.status.changed"]);
}

pub async fn dead_letters_are_found_by_filter_and_in_pages(fixture: &Fixture) {
    sink(fixture, "s", &["job.created"], OnRejected::Skip).await;
    let ids = fixture.submit_all((0..3).map(|n| fixture.job("mail", n)).collect()).await;
    for (n, id) in ids.iter().enumerate() {
        make_dead_letter(fixture, *id, 100 * n as i64 + 10).await;
    }
    let find = async |filter: DeadFilter, after, limit| {
        let found = fixture.store.outbox_dead(filter, after, limit).await.unwrap();
        found.into_iter().map(|dead_letter| JobId(dead_letter.aggregate_id)).collect::<Vec<_>>()
    };
    let any = DeadFilter::default;
    assert_eq!(find(any(), None, 9).await, [ids[2], ids[1], ids[0]]);
    let second = dead(fixture).await[1].id;
    assert_eq!(find(any(), Some(second), 9).await, [ids[0]]);
    assert_eq!(find(any(), None, 1).await, [ids[2]]);
    assert_eq!(find(DeadFilter { aggregate_id: Some(ids[1].0), ..any() }, None, 9).await, [ids[1]]);
    assert_eq!(find(DeadFilter { sink: Some("other".into()), ..any() }, None, 9).await, []);
    assert_eq!(find(DeadFilter { event_type: Some("job.*".into()), ..any() }, None, 9).await.len(), 3);
    assert_eq!(find(DeadFilter { event_type: Some("job_created".into()), ..any() }, None, 9).await, []);
    let times = DeadFilter { moved_after: Some(fixture.at(100)), moved_before: Some(fixture.at(200)), ..any() };
    assert_eq!(find(times, None, 9).await, [ids[1]]);
    assert_eq!(find(DeadFilter { ids: vec![second], ..any() }, None, 9).await, [ids[1]]);
    fixture.store.outbox_resolve(DeadFilter { ids: vec![second], ..any() }, "", "ana", fixture.at(500)).await.unwrap();
    assert_eq!(find(DeadFilter { is_resolved: Some(true), ..any() }, None, 9).await, [ids[1]]);
    assert_eq!(find(unresolved(), None, 9).await, [ids[2], ids[0]]);
}

pub async fn sent_events_of_a_time_range_are_republished_but_not_waiting_ones(fixture: &Fixture) {
    sink(fixture, "s", &["job.*"], OnRejected::Skip).await;
    let ids = fixture.submit_all((0..3).map(|_| fixture.job("mail", 0)).collect()).await;
    let sent = send_all(fixture, 5).await;
    assert_eq!(sent.len(), 6);
    let pending = fixture.submit(fixture.job("mail", 10)).await;
    let request = Republish {
        sink: "s".into(),
        from: Timestamp::from_ms(0),
        to: Timestamp::MAX,
        event_type: Some("job.created".into()),
    };
    let answer = fixture.store.outbox_republish(request.clone(), Some(1), "ana", fixture.at(20)).await.unwrap();
    assert_eq!(answer, Some(3));
    let now = take(fixture, 20).await;
    assert_eq!(subjects(&now.events), [ids[0], pending, pending], "the others follow at the rate");
    let retaken = take(fixture, 10_000).await.events;
    let republished: Vec<_> = retaken[..3].iter().map(|event| event.event.clone()).collect();
    let before: Vec<_> =
        sent.iter().filter(|event| event.event.kind == "job.created").map(|e| e.event.clone()).collect();
    assert_eq!(republished, before, "in order, under their own ids");
    let at_first = retaken.len();
    let repeated = fixture.store.outbox_republish(request.clone(), None, "ana", fixture.at(10_001)).await.unwrap();
    assert_eq!(repeated, Some(0), "they are still waiting");
    assert_eq!(take(fixture, 10_002).await.events.len(), at_first);
    let nothing = Republish { to: Timestamp::from_ms(1), ..request.clone() };
    assert_eq!(fixture.store.outbox_republish(nothing, None, "ana", fixture.at(10_003)).await.unwrap(), Some(0));
    let unknown = Republish { sink: "unknown".into(), ..request };
    assert_eq!(fixture.store.outbox_republish(unknown, None, "ana", fixture.at(10_004)).await.unwrap(), None);
    let entries = fixture.store.audit_list(AuditFilter::default(), 9).await.unwrap();
    let first = entries.last().unwrap();
    assert_eq!((first.action.as_str(), first.target.as_str(), first.count), ("outbox.republish", "s", 3));
}

pub async fn a_sink_that_is_down_shows_since_when_and_why_and_uses_no_attempt(fixture: &Fixture) {
    sink(fixture, "s", &["job.created"], OnRejected::Skip).await;
    fixture.submit(fixture.job("mail", 0)).await;
    let down = async |reason: Option<&str>, ms| {
        fixture.store.outbox_down("s", reason.map(str::to_owned), fixture.at(ms)).await.unwrap();
        let view = view(fixture, ms).await;
        (view.down_since, view.down_reason)
    };
    assert_eq!(down(Some("refused"), 10).await, (Some(fixture.at(10)), Some("refused".into())));
    assert_eq!(down(Some("no route"), 20).await, (Some(fixture.at(10)), Some("no route".into())));
    assert_eq!(take(fixture, 25).await.events[0].attempts, 0);
    assert_eq!(down(None, 30).await, (None, None));
    assert_eq!(down(Some("refused"), 40).await.0, Some(fixture.at(40)));
}

pub async fn late_results_of_a_lost_partition_count_if_they_are_confirmations(fixture: &Fixture) {
    sink(fixture, "s", &["job.created"], OnRejected::Skip).await;
    fixture.submit_all((0..2).map(|n| fixture.job("mail", n)).collect()).await;
    let (one, two) = (NodeId::new(), NodeId::new());
    let old = take_as(fixture, one, 9, 0).await;
    let new = take_as(fixture, two, 9, LEASE_MS).await;
    assert_eq!((old.events.len(), new.events.len()), (2, 2));
    let late = vec![confirmed(&old.events[0]), rejected(fixture, &old.events[1], LEASE_MS * 9)];
    settle(fixture, &old, late, LEASE_MS + 1).await;
    let left = take_as(fixture, two, 9, LEASE_MS + 2).await;
    assert_eq!(left.events.len(), 1);
    assert_eq!((left.events[0].event.id, left.events[0].attempts), (old.events[1].event.id, 0));
    assert_eq!(view(fixture, LEASE_MS + 2).await.sent, 1);
    settle(fixture, &new, new.events.iter().map(confirmed).collect(), LEASE_MS + 3).await;
    assert_eq!(view(fixture, LEASE_MS + 3).await.sent, 2, "an event that was confirmed twice counts once");
}

pub async fn every_event_is_sent_or_waiting_or_dead(fixture: &Fixture) {
    sink(fixture, "s", &["job.*"], OnRejected::Park).await;
    let mut random = crate::support::SeededRandom(11);
    let nodes = [NodeId::new(), NodeId::new(), NodeId::new()];
    for n in 0..150 {
        let ms = n * 100;
        match random.below(3) {
            0 => drop(fixture.submit(fixture.job("mail", ms)).await),
            1 => {
                for job in fixture.claim(2, ms).await {
                    fixture.complete(&job, ms).await;
                }
            }
            _ => {
                let node = *random.pick(&nodes).unwrap();
                let taken = take_as(fixture, node, 5, ms).await;
                let result_of = |event: &OutboxEvent| match random.below(3) {
                    0 => rejected(fixture, event, ms + 50),
                    _ => confirmed(event),
                };
                let results: Vec<OutboxResult> = taken.events.iter().map(result_of).collect();
                settle(fixture, &taken, results, ms).await;
            }
        }
    }
    let recorded: u64 = fixture.database.rows("SELECT count(*) FROM event").await[0][0].parse().unwrap();
    let view = view(fixture, 15_000).await;
    assert!(view.sent > 0 && recorded > 50);
    assert_eq!(recorded, view.sent + view.pending + view.dead);
}

pub async fn waiting_and_dead_events_are_not_pruned(fixture: &Fixture) {
    sink(fixture, "s", &["job.created"], OnRejected::Skip).await;
    let ids = fixture.submit_all((0..3).map(|n| fixture.job("mail", n)).collect()).await;
    make_dead_letter(fixture, ids[0], 10).await;
    let taken = take(fixture, 20).await;
    settle(fixture, &taken, vec![confirmed(&taken.events[0])], 20).await;
    let far = Timestamp::MAX;
    assert_eq!(fixture.store.event_prune(far, 100, fixture.at(30)).await.unwrap(), 1, "only what was sent");
    assert_eq!(subjects(&send_all(fixture, 40).await), [ids[2]]);
    fixture.store.outbox_replay(unresolved(), None, "ana", fixture.at(50)).await.unwrap();
    assert_eq!(fixture.store.event_prune(far, 100, fixture.at(60)).await.unwrap(), 1);
    assert_eq!(subjects(&send_all(fixture, 70).await), [ids[0]]);
    assert_eq!(fixture.store.event_prune(far, 100, fixture.at(80)).await.unwrap(), 1);
    assert_eq!(dead(fixture).await[0].payload["jobId"], ids[0].to_string(), "the dead letter itself is kept");
}

pub async fn a_message_creates_its_jobs_once_per_consumer(fixture: &Fixture) {
    let submit = async |consumer: &str, message: &str, jobs| {
        fixture.store.inbox_submit(consumer, message, jobs, fixture.at(5)).await
    };
    let created = submit("orders", "m1", vec![fixture.job("mail", 0), fixture.job("mail", 0)]).await.unwrap();
    assert_eq!(created.unwrap().len(), 2);
    assert!(submit("orders", "m1", vec![fixture.job("mail", 1)]).await.unwrap().is_none());
    assert!(submit("other", "m1", vec![fixture.job("mail", 2)]).await.unwrap().is_some());
    assert!(submit("orders", "m2", vec![]).await.unwrap().is_some(), "also a message without jobs");
    assert_eq!(fixture.list(Default::default()).await.len(), 3);
    assert_eq!(fixture.claim(9, 10).await.len(), 3, "they are ready");
}

pub async fn a_message_that_arrives_twice_concurrently_creates_its_jobs_once(fixture: &Fixture) {
    let calls = (0..8).map(|n| fixture.store.inbox_submit("orders", "m", vec![fixture.job("mail", n)], fixture.at(n)));
    let results = futures_util::future::join_all(calls).await;
    assert_eq!(results.into_iter().filter(|answer| answer.as_ref().unwrap().is_some()).count(), 1);
    assert_eq!(fixture.list(Default::default()).await.len(), 1);
}

pub async fn a_message_whose_jobs_are_rejected_is_not_processed(fixture: &Fixture) {
    let mut orphan = fixture.job("mail", 0);
    orphan.options.depends_on = vec![JobId::new()];
    let answer = fixture.store.inbox_submit("orders", "m", vec![fixture.job("mail", 0), orphan], fixture.at(1)).await;
    assert!(matches!(answer, Err(StoreError::Invalid(_))), "{answer:?}");
    assert_eq!(fixture.list(Default::default()).await, []);
    let second = fixture.store.inbox_submit("orders", "m", vec![fixture.job("mail", 2)], fixture.at(3)).await.unwrap();
    assert_eq!(second.unwrap().len(), 1);
}

pub async fn old_processed_messages_are_deleted(fixture: &Fixture) {
    sink(fixture, "s", &["job.created"], OnRejected::Skip).await;
    fixture.store.inbox_submit("orders", "m", vec![], fixture.at(0)).await.unwrap();
    let month = 30 * 24 * 3_600_000;
    fixture.store.event_prune(fixture.at(0), 100, fixture.at(month)).await.unwrap();
    assert!(fixture.store.inbox_submit("orders", "m", vec![], fixture.at(1)).await.unwrap().is_none());
    fixture.store.event_prune(fixture.at(0), 100, fixture.at(month + 1)).await.unwrap();
    assert!(fixture.store.inbox_submit("orders", "m", vec![], fixture.at(2)).await.unwrap().is_some());
}
