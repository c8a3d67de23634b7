//! Workers register, move, reconnect and report. A node that never joined counts as dead on both engines.

use std::time::Duration;

use faena_domain::{JobState, NodeId, WorkerCapabilities, WorkerChange, WorkerId, WorkerKind, WorkerState};
use faena_store::{
    CancelOutcome, ClaimRequest, Filter, Owner, RunEnd, Signal, Tally, WorkerAdmitted, WorkerEntry, WorkerUpdate,
};

use crate::support::*;

/// No registration ended so long ago, so none is deleted.
pub const NEVER: i64 = -1_000_000;

pub async fn states(world: &World, key: &str) -> Vec<WorkerState> {
    world.shown(key).await.history.iter().map(|change| change.state).collect()
}

pub fn named(key: &str, world: &World, kind: WorkerKind, node: NodeId) -> WorkerEntry {
    WorkerEntry { kind, node, ..world.worker(key) }
}

pub async fn a_registration_begins_through_allowed_states(world: &World) {
    use WorkerState::*;
    let capabilities = WorkerCapabilities { types: vec!["a".into(), "b.*".into()], queues: vec!["q".into()] };
    let entry = WorkerEntry {
        name: Some("Billing \"1\"".into()),
        capabilities: capabilities.clone(),
        ..world.worker("billing-1")
    };
    let admitted = world.admit(entry.clone(), 5).await;
    assert_eq!((admitted.id, admitted.session, admitted.was), (entry.id, 1, None));
    assert_eq!(world.store.worker_session(admitted.id).await.unwrap(), Some(1));
    assert_eq!(world.store.worker_session(WorkerId::new()).await.unwrap(), None);
    assert!(admitted.jobs.is_empty());
    let view = world.shown("billing-1").await;
    assert_eq!((view.id.as_str(), view.registration_id, view.name), ("billing-1", entry.id.to_string(), entry.name));
    assert_eq!((view.kind, view.transport.as_str(), view.state), (WorkerKind::Remote, "websocket", Ready));
    assert_eq!((view.category.as_str(), view.breaker.as_str()), ("available", "closed"));
    assert_eq!((view.capabilities, view.queues, view.concurrency), (capabilities.types, capabilities.queues, 10));
    assert_eq!((view.node, view.registered_at), (Some(world.node.to_string()), world.at(5)));
    assert_eq!((view.last_seen_at, view.ended_at, view.deadline), (world.at(5), None, None));
    assert_eq!(states(world, "billing-1").await, [Creating, Connecting, Ready]);
    assert!(world.store.worker_get("nobody").await.unwrap().is_none());
}

pub async fn a_worker_whose_process_starts_becomes_ready_when_it_connects(world: &World) {
    use WorkerState::*;
    let entry = WorkerEntry {
        kind: WorkerKind::Pool,
        state: Creating,
        pool: Some("small".into()),
        deadline: Some(world.at(100)),
        ..world.worker("small-1")
    };
    let made = world.admit(entry.clone(), 0).await;
    assert_eq!(states(world, "small-1").await, [Creating]);
    let connected = world.admit(world.worker("small-1"), 10).await;
    assert_eq!((connected.id, connected.session, connected.was), (made.id, 2, Some(Creating)));
    let view = world.shown("small-1").await;
    assert_eq!((view.kind, view.pool.as_deref()), (WorkerKind::Pool, Some("small")), "a worker of a pool stays one");
    assert_eq!((view.state, view.deadline), (Ready, None));
    assert_eq!(states(world, "small-1").await, [Creating, Connecting, Ready]);
}

pub async fn a_worker_that_reconnects_keeps_its_jobs(world: &World) {
    let (worker, jobs) = world.holding("w", 5, 0).await;
    world.begin(&jobs[1], 3).await;
    world.complete(&jobs[2], 4).await;
    world.retry_at(&jobs[3], 1_000, 4).await;
    let later = world.submit(world.job("b", 5).retries(7)).await;
    world.claim_by(&worker, 1, 6).await;
    assert!(world.send_update(world.worker_update(&worker, &[WorkerState::Busy], 7)).await.connected);
    world.store.worker_drain("w", true, None, world.at(7)).await.unwrap();
    assert_eq!(world.shown("w").await.jobs.len(), 4);

    let entry = WorkerEntry { transport: "grpc".into(), concurrency: 3, ..world.worker("w") };
    let again = world.admit(entry, 8).await;

    assert_eq!((again.id, again.session, again.was), (worker.id, 2, Some(WorkerState::Busy)));
    let held: Vec<_> = again.jobs.iter().map(|held| (held.job.id, held.job.run)).collect();
    let own = |n: usize| (jobs[n].id, jobs[n].run);
    assert_eq!(held[..3], [own(0), own(1), own(4)]);
    let last = &again.jobs[3];
    assert_eq!((last.job.id, last.kind.as_str(), last.job.options.retry.max_retries), (later, "b", 7));
    assert!(last.job.run > jobs[0].run, "oldest run first");
    assert_eq!((last.job.ready_at, last.claimed_at, last.started_at), (world.at(5), world.at(6), None));
    assert_eq!((again.jobs[1].started_at, again.jobs[1].job.payload.as_str()), (Some(world.at(3)), "{}"));
    let view = world.shown("w").await;
    assert_eq!((view.state, view.transport.as_str(), view.concurrency), (WorkerState::Busy, "grpc", 3));
    assert!(
        world.send_update(world.worker_update(&again, &[], 9)).await.drain,
        "what was asked of it before still holds"
    );
    world.complete(&jobs[0], 10).await;
}

pub async fn a_worker_that_moves_signals_its_old_node(world: &World) {
    let mut signals = world.store.signals();
    let worker = world.admit(named("w", world, WorkerKind::Remote, NodeId::new()), 0).await;
    world.admit(world.worker("w"), 1).await;
    let heard = tokio::time::timeout(Duration::from_secs(10), signals.recv()).await.unwrap().unwrap();
    assert_eq!(heard, Signal::Worker(worker.id));
}

pub async fn twenty_concurrent_connections_under_one_key_are_one_worker(world: &World) {
    let tasks = (0..20).map(|_| {
        let (store, entry, now) = (world.store.clone(), world.worker("w"), world.at(0));
        tokio::spawn(async move { store.worker_admit(entry, now).await.unwrap() })
    });
    let all: Vec<WorkerAdmitted> =
        futures_util::future::join_all(tasks).await.into_iter().map(|admitted| admitted.unwrap()).collect();
    assert!(all.iter().all(|admitted| admitted.id == all[0].id));
    let mut sessions: Vec<i64> = all.iter().map(|admitted| admitted.session).collect();
    sessions.sort_unstable();
    assert_eq!(sessions, (1..=20).collect::<Vec<i64>>());
}

pub async fn nothing_is_claimed_through_an_old_session(world: &World) {
    let old = world.admit(world.worker("w"), 0).await;
    let new = world.admit(world.worker("w"), 1).await;
    let ids = world.submit_all((0..2).map(|_| world.job("a", 2)).collect()).await;
    assert!(world.claim_by(&old, 5, 3).await.is_empty());
    let strange = WorkerAdmitted { id: WorkerId::new(), ..new.clone() };
    assert!(world.claim_by(&strange, 5, 3).await.is_empty(), "an unknown worker");
    assert_eq!(world.claim_by(&new, 1, 4).await[0].id, ids[0]);
    world.lose(&new, 0, 5).await.unwrap();
    assert!(world.claim_by(&new, 5, 6).await.is_empty(), "its life is over");
    assert_eq!(world.claim_one(7).await.id, ids[1]);
}

pub async fn several_requests_are_answered_in_their_order(world: &World) {
    let worker = world.admit(world.worker("w"), 0).await;
    let a = world.submit_all((0..4).map(|_| world.job("a", 0)).collect()).await;
    let b = world.submit_all((0..2).map(|_| world.job("b", 0)).collect()).await;
    let (lane_a, lane_b) = (world.lane_of(a[0]).await.id, world.lane_of(b[0]).await.id);
    let mine = Owner::Worker { id: worker.id, session: worker.session };
    let stale = Owner::Worker { id: worker.id, session: 99 };
    let ask = |owner, lane, limit| ClaimRequest { owner, lanes: vec![lane], limit, at_once: limit };
    let asks = vec![
        ask(mine, lane_a, 1),
        ask(stale, lane_a, 1),
        ask(Owner::Node(world.node), lane_a, 2),
        ask(mine, lane_b, 5),
        ask(mine, lane_b, 5),
    ];
    let claims = world.store.job_claim(asks, world.at(1)).await.unwrap();
    let ids: Vec<Vec<_>> = claims.iter().map(|claim| claim.jobs.iter().map(|job| job.id).collect()).collect();
    assert_eq!(ids, [vec![a[0]], vec![], vec![a[1], a[2]], b.clone(), vec![]]);
    assert_eq!(world.shown("w").await.jobs, [a[0], b[0], b[1]].map(|id| id.to_string()));
    assert!(world.store.job_claim(Vec::new(), world.at(2)).await.unwrap().is_empty());
}

pub async fn a_job_is_scheduled_while_its_worker_starts(world: &World) {
    let creating =
        WorkerEntry { state: WorkerState::Creating, deadline: Some(world.at(1_000)), ..world.worker("coming") };
    let coming = world.admit(creating, 0).await;
    let id = world.submit(world.job("a", 1).tag("t")).await;
    world.claim_by(&coming, 1, 2).await;
    let other = world.running(world.job("a", 3).tag("t")).await;

    let view = world.get(id).await;
    assert_eq!((view.status, view.worker_id.as_deref()), (JobState::Scheduled, Some("coming")));
    assert_eq!(world.events(id).await, ["created", "queued", "scheduled"]);
    let with = |state| Filter { states: vec![state], ..Filter::default() };
    let tagged = |state| Filter { tag: Some("t".into()), ..with(state) };
    for filter in [with(JobState::Scheduled), tagged(JobState::Scheduled)] {
        assert_eq!(world.list(filter).await, [id]);
    }
    for filter in [with(JobState::Assigned), tagged(JobState::Assigned)] {
        assert_eq!(world.list(filter).await, [other.id]);
    }
    let held =
        Filter { states: vec![JobState::Scheduled, JobState::Assigned, JobState::Processing], ..Filter::default() };
    assert_eq!(world.list(held).await.len(), 2);
    assert_eq!(world.list(Filter::default()).await.len(), 2);
    assert_eq!(world.cancel(id, 4).await, CancelOutcome::Asked { state: JobState::Scheduled });

    world.admit(world.worker("coming"), 5).await;
    assert_eq!(world.state(id).await, JobState::Assigned);
    assert!(world.list(with(JobState::Scheduled)).await.is_empty());
    assert!(world.events(id).await.contains(&"assigned"));
    assert_eq!(world.list(with(JobState::Assigned)).await.len(), 2);
}

pub async fn jobs_name_their_worker(world: &World) {
    let (worker, jobs) = world.holding("billing-1", 3, 0).await;
    let reported = |end: RunEnd| RunEnd { worker: worker.id, ..end };
    world
        .store
        .job_note(
            vec![faena_store::RunNote {
                worker: worker.id,
                ..world.a_note(&jobs[1], faena_store::NoteKind::Started, 1)
            }],
            world.at(1),
        )
        .await
        .unwrap();
    assert!(world.report_end(reported(world.an_end(&jobs[2], completed(), 2))).await);
    for job in &jobs {
        assert_eq!(world.get(job.id).await.worker_id.as_deref(), Some("billing-1"));
    }
    let page =
        world.store.job_list(&Filter::default(), faena_store::Page::Offset { offset: 0, limit: 9 }).await.unwrap();
    assert!(page.jobs.iter().all(|job| job.worker_id.as_deref() == Some("billing-1")));
    world.lose(&worker, 0, 3).await.unwrap();
    world.sweep(1_000, 1_000).await;
    assert_eq!(world.get(jobs[2].id).await.worker_id, Some(worker.id.to_string()), "forgotten, but not its life's id");
    let mine = world.running(world.job("b", 2_000)).await;
    assert_eq!(world.get(mine.id).await.worker_id, None, "what a node has is not in a worker's hands yet");
}

pub async fn a_poll_returns_cancel_requests_for_the_nodes_workers(world: &World) {
    let (_, jobs) = world.holding("w", 1, 0).await;
    world.cancel(jobs[0].id, 1).await;
    let cancels = world.store.poll(world.node, world.at(2)).await.unwrap().cancels;
    assert_eq!(cancels, [(jobs[0].id, "not wanted".to_owned())]);
    assert!(world.end(&jobs[0], cancelled(), 3).await);
    assert!(world.store.poll(world.node, world.at(4)).await.unwrap().cancels.is_empty());
}

pub async fn status_updates_of_workers_are_recorded(world: &World) {
    use WorkerState::*;
    let worker = world.admit(world.worker("w"), 0).await;
    let other = world.admit(world.worker("other"), 0).await;
    let first = WorkerUpdate {
        completed: 3,
        failed: 1,
        breaker: "open",
        deadline: Some(world.at(90)),
        ..world.worker_update(&worker, &[Busy, Creating, Busy, Ready, Busy], 5)
    };
    let second = WorkerUpdate { completed: 2, ..world.worker_update(&worker, &[Draining], 6) };
    let stale = WorkerUpdate { session: 7, completed: 100, ..world.worker_update(&other, &[Busy], 6) };
    let unknown = WorkerUpdate { id: WorkerId::new(), ..world.worker_update(&other, &[], 6) };
    let answers = world.store.worker_update(vec![first, stale, second, unknown], world.at(6)).await.unwrap();
    assert_eq!(answers.iter().map(|answer| answer.connected).collect::<Vec<_>>(), [true, false, true, false]);
    let view = world.shown("w").await;
    assert_eq!((view.state, view.completed, view.failed), (Draining, 5, 1));
    assert_eq!((view.breaker.as_str(), view.deadline, view.last_seen_at), ("closed", None, world.at(6)));
    assert_eq!(states(world, "w").await, [Creating, Connecting, Ready, Busy, Ready, Busy, Draining]);
    let view = world.shown("other").await;
    assert_eq!((view.state, view.completed), (Ready, 0));
    let reason = Some("called off".to_owned());
    let change = WorkerChange { at: world.at(8), state: Ready, reason: reason.clone() };
    world.send_update(WorkerUpdate { changes: vec![change.clone()], ..world.worker_update(&worker, &[], 8) }).await;
    let view = world.shown("w").await;
    assert_eq!((view.reason, view.history.last()), (reason, Some(&change)));
    world.lose(&worker, 0, 9).await.unwrap();
    assert!(!world.send_update(world.worker_update(&worker, &[Busy], 10)).await.connected);
    assert!(world.store.worker_update(Vec::new(), world.at(10)).await.unwrap().is_empty());
}

pub async fn only_the_newest_changes_are_kept(world: &World) {
    let worker = world.admit(world.worker("w"), 0).await;
    for round in 0..3 {
        let turns = [WorkerState::Busy, WorkerState::Ready].repeat(50);
        world.send_update(world.worker_update(&worker, &turns, round + 1)).await;
    }
    let history = world.shown("w").await.history;
    assert_eq!((history.len(), history[0].at), (200, world.at(2)));
}

pub async fn a_worker_is_drained_by_its_key(world: &World) {
    let worker = world.admit(world.worker("w"), 0).await;
    let mut signals = world.store.signals();
    let ask = async |key: &str, drain| world.store.worker_drain(key, drain, None, world.at(1)).await.unwrap();
    assert_eq!(ask("nobody", true).await, None);
    assert_eq!(ask("w", true).await, Some(worker.id));
    let heard = tokio::time::timeout(Duration::from_secs(10), signals.recv()).await.unwrap().unwrap();
    assert_eq!(heard, Signal::Worker(worker.id));
    assert!(world.send_update(world.worker_update(&worker, &[], 2)).await.drain);
    ask("w", false).await;
    assert!(!world.send_update(world.worker_update(&worker, &[], 3)).await.drain);
    world.lose(&worker, 0, 4).await.unwrap();
    assert_eq!(ask("w", true).await, None, "no such worker lives");
}

pub async fn live_workers_are_listed_first(world: &World) {
    let gone = world.admit(world.worker("gone"), 3).await;
    world.admit(world.worker("old"), 1).await;
    let new = world.admit(world.worker("new"), 2).await;
    world.lose(&gone, 0, 4).await.unwrap();
    world.send_update(world.worker_update(&new, &[WorkerState::Busy], 4)).await;
    let list = async |states: &[WorkerState], limit| -> Vec<String> {
        let workers = world.store.worker_list(states.to_vec(), limit).await.unwrap();
        workers.into_iter().map(|worker| worker.id).collect()
    };
    assert_eq!(list(&[], 9).await, ["new", "old", "gone"]);
    assert_eq!(list(&[], 2).await, ["new", "old"]);
    assert_eq!(list(&[WorkerState::Busy, WorkerState::Terminated], 9).await, ["new", "gone"]);
}

pub async fn capabilities_are_those_of_workers_that_accept_jobs(world: &World) {
    use WorkerState::*;
    let able = |name: &str| WorkerCapabilities { types: vec![name.into()], queues: vec![format!("q-{name}")] };
    let with = |name: &str, state| WorkerEntry { capabilities: able(name), state, ..world.worker(name) };
    world.admit(WorkerEntry { deadline: Some(world.at(99)), ..with("coming", Creating) }, 0).await;
    world.admit(with("ready", Ready), 0).await;
    let draining = world.admit(with("draining", Ready), 0).await;
    world.send_update(world.worker_update(&draining, &[Draining], 1)).await;
    let leaving = world.admit(with("leaving", Ready), 0).await;
    world.send_update(world.worker_update(&leaving, &[Terminating], 1)).await;
    let lost = world.admit(with("lost", Ready), 0).await;
    world.lose(&lost, 0, 1).await.unwrap();
    let mut known = world.store.worker_capabilities().await.unwrap();
    known.sort_by(|a, b| a.types.cmp(&b.types));
    assert_eq!(known, [able("coming"), able("ready")]);
}

pub async fn counters_follow_the_jobs_of_workers(world: &World) {
    let (worker, jobs) = world.holding("w", 3, 0).await;
    assert_eq!([world.total(Tally::InFlight).await, world.total(Tally::Queued).await], [3, 0]);
    world.complete(&jobs[0], 1).await;
    world.lose(&worker, 10, 2).await.unwrap();
    let tallies = [Tally::InFlight, Tally::Retrying, Tally::Completed];
    let mut counted = Vec::new();
    for tally in tallies {
        counted.push(world.total(tally).await);
    }
    assert_eq!(counted, [0, 2, 1]);
}

pub async fn many_requests_in_one_call_share_the_ready_jobs(world: &World) {
    // Two lanes, so that some requests have one and some have two; one worker has connected to another node.
    let kinds = |n: usize| if n.is_multiple_of(3) { "b" } else { "a" };
    world.submit_all((0..150).map(|n| world.job(kinds(n), 0)).collect()).await;
    let lanes = world.lanes().await;
    assert_eq!(lanes.len(), 2);
    let mut asks = Vec::new();
    for n in 0..200usize {
        let worker = world.admit(world.worker(&format!("w{n}")), 1).await;
        let session = if n == 7 { worker.session + 1 } else { worker.session };
        let lanes = if n.is_multiple_of(5) { lanes.clone() } else { vec![lanes[n % 2]] };
        asks.push(ClaimRequest { owner: Owner::Worker { id: worker.id, session }, lanes, limit: 1, at_once: 1 });
    }
    let claims = world.store.job_claim(asks.clone(), world.at(2)).await.unwrap();
    assert_eq!(claims.len(), 200);
    assert!(claims[7].refused && claims[7].jobs.is_empty());
    assert!(claims.iter().enumerate().all(|(n, claim)| claim.refused == (n == 7) && claim.jobs.len() <= 1));
    let mut ids: Vec<_> = claims.iter().flat_map(|claim| claim.jobs.iter().map(|job| job.id)).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 150, "everything was handed out, each job once");
    assert_eq!((world.total(Tally::Queued).await, world.total(Tally::InFlight).await), (0, 150));
    let again = world.store.job_claim(asks, world.at(3)).await.unwrap();
    assert!(again.iter().all(|claim| claim.jobs.is_empty()));
    for job in claims.iter().flat_map(|claim| &claim.jobs) {
        world.complete(job, 5).await;
    }
}
