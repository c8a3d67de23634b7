//! Workers live, move, fall silent and come back. A node that never joined is a dead one on both engines.

use std::time::Duration;

use faena_domain::{
    ErrorReason, JobState, NodeId, WorkerCapabilities, WorkerChange, WorkerId, WorkerKind, WorkerState,
};
use faena_store::{
    CancelOutcome, ClaimRequest, Filter, NodeInfo, Owner, Recovered, RunEnd, RunOutcome, Signal, Tally, WorkerAdmitted,
    WorkerEnd, WorkerEntry, WorkerUpdate,
};

use crate::support::*;

/// Nobody ended so long ago: nobody is forgotten.
const NEVER: i64 = -1_000_000;

async fn states(world: &World, key: &str) -> Vec<WorkerState> {
    world.shown(key).await.history.iter().map(|change| change.state).collect()
}

fn named(key: &str, world: &World, kind: WorkerKind, node: NodeId) -> WorkerEntry {
    WorkerEntry { kind, node, ..world.worker(key) }
}

// ---- they come

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
    assert!(world.tell(world.news(&worker, &[WorkerState::Busy], 7)).await.connected);
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
    assert!(world.tell(world.news(&again, &[], 9)).await.drain, "what was asked of it before still holds");
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

// ---- they are handed jobs

pub async fn nothing_is_claimed_through_an_old_session(world: &World) {
    let old = world.admit(world.worker("w"), 0).await;
    let new = world.admit(world.worker("w"), 1).await;
    let ids = world.submit_all((0..2).map(|_| world.job("a", 2)).collect()).await;
    assert!(world.claim_by(&old, 5, 3).await.is_empty());
    let strange = WorkerAdmitted { id: WorkerId::new(), ..new.clone() };
    assert!(world.claim_by(&strange, 5, 3).await.is_empty(), "a worker that nobody knows");
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
    let told = |end: RunEnd| RunEnd { worker: worker.id, ..end };
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
    assert!(world.tell_end(told(world.an_end(&jobs[2], completed(), 2))).await);
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

// ---- they go

pub async fn the_jobs_of_a_lost_worker_use_an_attempt_started_or_not(world: &World) {
    let (worker, jobs) = world.holding("billing-1", 6, 0).await;
    world.begin(&jobs[0], 1).await;
    world.complete(&jobs[2], 2).await;
    world.cancel(jobs[3].id, 2).await;
    world.hand_back(&jobs[4], 2).await;
    let last = world.submit(world.job("a", 3).retries(0).unique("k")).await;
    let child = world.submit(world.job("c", 3).after(&[last]).priority(faena_domain::Priority::Low)).await;
    let both = world.claim_by(&worker, 2, 4).await;
    assert_eq!(both.len(), 2, "the one handed back, and the last one");

    let freed = world.lose(&worker, 700, 10).await.unwrap();

    assert_eq!((freed.orphaned, freed.returned), (5, 0));
    use JobState::*;
    let all = [jobs[0].id, jobs[1].id, jobs[2].id, jobs[3].id, jobs[4].id, last, child];
    assert_eq!(world.states(all).await, [Retrying, Retrying, Completed, Cancelled, Retrying, Failed, Cancelled]);
    let text = "worker billing-1 was lost: its connection closed";
    for job in [&jobs[0], &jobs[1]] {
        let view = world.get(job.id).await;
        assert_eq!((view.retry_count, view.next_retry_at), (1, Some(world.at(710))));
        assert_eq!((view.error.as_deref(), view.error_reason), (Some(text), Some(ErrorReason::Orphaned)));
        let line = view.execution_log.iter().find(|entry| entry.event.as_str() == "orphaned").unwrap();
        assert_eq!((line.details.as_str(), line.run), (text, Some(job.run)));
    }
    assert_eq!(
        world.events(jobs[0].id).await,
        ["created", "queued", "assigned", "started", "orphaned", "retry_scheduled"]
    );
    assert_eq!(world.events(jobs[1].id).await, ["created", "queued", "assigned", "orphaned", "retry_scheduled"]);
    let view = world.get(last).await;
    assert_eq!((view.error_reason, view.worker_id.as_deref()), (Some(ErrorReason::Orphaned), Some("billing-1")));
    world.submit(world.job("a", 11).unique("k")).await;

    let view = world.shown("billing-1").await;
    assert_eq!((view.state, view.ended_at), (WorkerState::Terminated, Some(world.at(10))));
    assert_eq!((view.reason.as_deref(), view.jobs.len()), (Some("lost: its connection closed"), 0));
    assert!(!world.orphans(11).await);
}

pub async fn a_worker_that_leaves_returns_its_jobs_without_using_an_attempt(world: &World) {
    let (worker, jobs) = world.holding("w", 3, 0).await;
    world.begin(&jobs[0], 1).await;
    world.cancel(jobs[1].id, 1).await;
    let end = WorkerEnd::Left { reason: "it was stopped".into() };
    let freed = world.store.worker_end(worker.id, worker.session, end, world.at(2)).await.unwrap().unwrap();
    assert_eq!((freed.orphaned, freed.returned), (0, 2));
    use JobState::*;
    assert_eq!(world.states([0, 1, 2].map(|n: usize| jobs[n].id)).await, [Queued, Cancelled, Queued]);
    let log = world.get(jobs[0].id).await.execution_log;
    let line = log.iter().find(|entry| entry.event.as_str() == "handed_back").unwrap();
    assert_eq!(line.details, "worker w left: it was stopped");
    let again = world.claim(5, 3).await;
    assert!(again.len() == 2 && again.iter().all(|job| job.retry_count == 0 && !job.start_first));
    assert!(!world.end(&jobs[0], completed(), 4).await);
    use WorkerState::*;
    assert_eq!(self::states(world, "w").await, [Creating, Connecting, Ready, Terminating, Terminated]);
}

pub async fn a_registration_ends_once_and_only_through_its_session(world: &World) {
    let (old, jobs) = world.holding("w", 1, 0).await;
    let new = world.admit(world.worker("w"), 1).await;
    assert_eq!(world.lose(&old, 0, 2).await, None, "it has connected anew");
    assert_eq!(world.state(jobs[0].id).await, JobState::Assigned);
    assert_eq!(world.lose(&new, 0, 3).await.unwrap().orphaned, 1);
    assert_eq!(world.lose(&new, 0, 4).await, None);
    assert_eq!(world.get(jobs[0].id).await.retry_count, 1);
}

pub async fn a_worker_that_reconnects_after_its_end_has_a_new_registration(world: &World) {
    let (first, jobs) = world.holding("w", 1, 0).await;
    world.lose(&first, 100, 1).await.unwrap();
    let second = world.admit(world.worker("w"), 2).await;
    assert!(second.id != first.id && second.session == 1 && second.was.is_none() && second.jobs.is_empty());
    assert!(!world.tell(world.news(&first, &[], 3)).await.connected);
    assert!(!world.end(&jobs[0], completed(), 3).await, "its first life's report is stale");
    assert_eq!(world.shown("w").await.registration_id, second.id.to_string());
    let before = world.shown(&first.id.to_string()).await;
    assert_eq!((before.id.as_str(), before.state), ("w", WorkerState::Terminated));
    world.lose(&second, 0, 4).await.unwrap();
    assert_eq!(world.shown("w").await.registration_id, second.id.to_string(), "the latest one");
}

pub async fn a_completion_after_the_loss_and_another_claim_changes_nothing(world: &World) {
    for started in [true, false] {
        let (worker, jobs) = world.holding("w", 1, 0).await;
        let zombie = &jobs[0];
        if started {
            world.begin(zombie, 1).await;
        }
        world.lose(&worker, 100, 10).await.unwrap();
        assert!(!world.end(zombie, completed(), 11).await);
        world.promote(110).await;
        let other = world.admit(world.worker("other"), 110).await;
        let again = world.claim_by(&other, 1, 111).await.remove(0);
        assert_eq!(again.id, zombie.id);
        for outcome in [completed(), failed("no"), world.retry(50), RunOutcome::HandedBack] {
            assert!(!world.end(zombie, outcome, 113).await, "the zombie hears that it is stale");
        }
        let view = world.get(again.id).await;
        assert_eq!((view.status, view.run), (JobState::Assigned, Some(again.run)));
        world.complete(&again, 114).await;
        assert_eq!(world.get(again.id).await.run, Some(again.run));
    }
}

pub async fn concurrent_loss_and_completion_never_both_count(world: &World) {
    for round in 0..30 {
        let (worker, jobs) = world.holding("w", 1, round).await;
        let end = RunEnd { closes_claim: true, ..world.an_end(&jobs[0], completed(), round) };
        let (counted, freed) = tokio::join!(world.tell_end(end), world.lose(&worker, 0, round));
        let completed = world.state(jobs[0].id).await == JobState::Completed;
        assert_eq!(completed, freed.unwrap().orphaned == 0, "in round {round}");
        assert_eq!(completed, counted, "in round {round}");
        world.store.job_delete(jobs[0].id, None, world.at(1_000)).await.unwrap();
    }
}

pub async fn concurrent_loss_and_claim_leave_no_job_with_a_lost_worker(world: &World) {
    let mut seen = [0, 0];
    for round in 0..30 {
        let worker = world.admit(world.worker("w"), round).await;
        let id = world.submit(world.job("a", round)).await;
        let (claimed, freed) = tokio::join!(world.claim_by(&worker, 1, round), world.lose(&worker, 0, round));
        assert_eq!(claimed.len(), freed.unwrap().orphaned, "what was handed out is freed, in round {round}");
        let state = if claimed.is_empty() { JobState::Queued } else { JobState::Retrying };
        assert_eq!(world.state(id).await, state, "in round {round}");
        world.ledger.prove().await;
        seen[claimed.len()] += 1;
        world.store.job_delete(id, None, world.at(1_000)).await.unwrap();
    }
    assert_eq!(seen[0] + seen[1], 30);
}

pub async fn concurrent_reconnection_and_claim_lose_no_job(world: &World) {
    for round in 0..30 {
        let old = world.admit(world.worker("w"), round).await;
        let id = world.submit(world.job("a", round)).await;
        let (claimed, again) = tokio::join!(world.claim_by(&old, 1, round), world.admit(world.worker("w"), round));
        let held: Vec<_> = again.jobs.iter().map(|held| held.job.id).collect();
        assert_eq!(held, claimed.iter().map(|job| job.id).collect::<Vec<_>>(), "in round {round}");
        world.lose(&again, 0, round).await.unwrap();
        world.store.job_delete(id, None, world.at(1_000)).await.unwrap();
    }
}

pub async fn a_job_that_kills_its_worker_runs_out_of_attempts(world: &World) {
    let id = world.submit(world.job("poison", 0).retries(2)).await;
    for life in 0..3 {
        assert_ne!(world.state(id).await, JobState::Failed);
        let worker = world.admit(world.worker(&format!("w{life}")), life * 10).await;
        assert_eq!(world.claim_by(&worker, 1, life * 10).await[0].id, id);
        world.lose(&worker, 1, life * 10 + 1).await.unwrap();
        world.promote(life * 10 + 5).await;
    }
    let view = world.get(id).await;
    assert_eq!((view.status, view.error_reason), (JobState::Failed, Some(ErrorReason::Orphaned)));
    assert_eq!(world.events(id).await.iter().filter(|event| **event == "orphaned").count(), 3);
}

// ---- their servers go

pub async fn a_worker_keeps_its_jobs_when_its_server_dies(world: &World) {
    let worker = world.admit(named("w", world, WorkerKind::Remote, NodeId::new()), 0).await;
    world.submit_all((0..2).map(|_| world.job("a", 0)).collect()).await;
    let jobs = world.claim_by(&worker, 2, 1).await;
    world.begin(&jobs[0], 2).await;
    assert!(world.orphans(3).await);

    assert_eq!(world.recover(0, 3).await, Recovered::default());

    assert!(!world.orphans(4).await, "there is nothing left to recover");
    assert_eq!(world.states([jobs[0].id, jobs[1].id]).await, [JobState::Processing, JobState::Assigned]);
    let view = world.shown("w").await;
    assert_eq!((view.node, view.deadline, view.state), (None, Some(world.at(10_003)), WorkerState::Ready));
    assert!(world.sweep(NEVER, 10_002).await.lost.is_empty());
    let again = world.admit(world.worker("w"), 5_000).await;
    assert_eq!((again.id, again.session, again.jobs.len()), (worker.id, 2, 2));
    let view = world.shown("w").await;
    assert_eq!((view.node, view.deadline, view.reason), (Some(world.node.to_string()), None, None));
    assert!(world.sweep(NEVER, 20_000).await.lost.is_empty());
    for job in &jobs {
        world.complete(job, 20_001).await;
    }
}

pub async fn a_worker_that_does_not_reconnect_is_declared_lost(world: &World) {
    let worker = world.admit(named("w", world, WorkerKind::Remote, NodeId::new()), 0).await;
    let id = world.submit(world.job("a", 0)).await;
    let job = world.claim_by(&worker, 1, 1).await.remove(0);
    world.recover(0, 3).await;
    // A server that was taken for dead and is not still has news; that does not make the worker watched.
    assert!(world.tell(world.news(&worker, &[WorkerState::Busy], 4)).await.connected);
    assert_eq!(world.sweep(NEVER, 5).await.next_at, Some(world.at(10_003)));

    let swept = world.sweep(NEVER, 10_003).await;

    assert_eq!((swept.lost.len(), swept.lost[0].id, swept.lost[0].key.as_str()), (1, worker.id, "w"));
    assert_eq!((swept.lost[0].freed.orphaned, swept.next_at, swept.more), (1, None, false));
    let view = world.get(id).await;
    assert_eq!((view.status, view.retry_count, view.next_retry_at), (JobState::Retrying, 1, Some(world.at(10_503))));
    assert_eq!(view.error.as_deref(), Some("worker w was lost: no heartbeat"));
    assert!(!world.end(&job, completed(), 10_004).await);
    assert!(world.sweep(NEVER, 10_005).await.lost.is_empty());
}

pub async fn the_workers_inside_a_dead_server_end_with_it(world: &World) {
    let dead = NodeId::new();
    world.admit(named("server-9", world, WorkerKind::BuiltIn, dead), 0).await;
    world.submit(world.job("a", 0)).await;
    let job = world.claim_as(dead, 1, 1).await.remove(0);
    world.begin(&job, 2).await;
    assert_eq!(world.recover(50, 3).await.orphaned, 1);
    let view = world.shown("server-9").await;
    assert_eq!((view.state, view.ended_at), (WorkerState::Terminated, Some(world.at(3))));
    assert_eq!(view.reason.as_deref(), Some("its server died"));
    assert!(!world.orphans(4).await);
}

pub async fn the_deadline_of_a_worker_depends_on_its_transport(world: &World) {
    let dead = NodeId::new();
    let with = |key, transport: &str, deadline: Option<i64>| WorkerEntry {
        transport: transport.into(),
        deadline: deadline.map(|ms| world.at(ms)),
        ..named(key, world, WorkerKind::Remote, dead)
    };
    world.admit(with("calls", "http", Some(9)), 0).await;
    world.admit(with("soon", "grpc", Some(500)), 0).await;
    world.admit(with("later", "grpc", Some(99_000)), 0).await;
    world.recover(0, 100).await;
    for (key, ms) in [("calls", 60_100), ("soon", 500), ("later", 10_100)] {
        assert_eq!(world.shown(key).await.deadline, Some(world.at(ms)), "{key}");
    }
}

pub async fn a_server_that_leaves_detaches_its_workers(world: &World) {
    let other = NodeInfo { id: NodeId::new(), name: "other".into() };
    world.store.node_join(other.clone(), LEASE_MS, world.at(0)).await.unwrap();
    world.admit(named("inside", world, WorkerKind::BuiltIn, other.id), 0).await;
    let outside = world.admit(named("outside", world, WorkerKind::Remote, other.id), 0).await;
    let elsewhere = world.admit(world.worker("elsewhere"), 0).await;
    let ids = world.submit_all((0..3).map(|_| world.job("a", 0)).collect()).await;
    world.claim_as(other.id, 1, 1).await;
    world.claim_by(&outside, 1, 1).await;
    world.claim_by(&elsewhere, 1, 1).await;

    assert_eq!(world.store.node_leave(other.id, PATIENCE, world.at(2)).await.unwrap(), 1);

    use JobState::*;
    assert_eq!(world.states([ids[0], ids[1], ids[2]]).await, [Queued, Assigned, Assigned]);
    let inside = world.shown("inside").await;
    assert_eq!((inside.state, inside.reason.as_deref()), (WorkerState::Terminated, Some("its server stopped")));
    let view = world.shown("outside").await;
    assert_eq!((view.node, view.deadline, view.jobs.len()), (None, Some(world.at(10_002)), 1));
    assert_eq!(world.shown("elsewhere").await.deadline, None);
    assert!(!world.orphans(3).await);
    let lost = world.sweep(NEVER, 10_002).await.lost;
    assert_eq!(lost.len(), 1);
    let error = world.get(ids[1]).await.error.unwrap();
    assert_eq!(error, "worker outside was lost: its server stopped, and it has not reconnected");
}

pub async fn a_sweep_is_bounded_and_reports_that_more_is_due(world: &World) {
    for n in 0..105 {
        let entry = WorkerEntry { deadline: Some(world.at(n)), ..world.worker(&format!("w{n}")) };
        world.admit(entry, 0).await;
    }
    let entry = WorkerEntry { deadline: Some(world.at(900)), ..world.worker("later") };
    world.admit(entry, 0).await;
    let first = world.sweep(NEVER, 500).await;
    assert_eq!((first.lost.len(), first.more), (100, true));
    let second = world.sweep(NEVER, 500).await;
    assert_eq!((second.lost.len(), second.more, second.next_at), (5, false, Some(world.at(900))));
    assert_eq!(world.store.worker_list(vec![], 500).await.unwrap().len(), 106);
    world.sweep(NEVER, 501).await;
    assert_eq!(world.store.worker_list(vec![], 500).await.unwrap().len(), 106);
    world.sweep(501, 502).await;
    assert_eq!(world.store.worker_list(vec![], 500).await.unwrap().len(), 1, "the ended ones are forgotten");
    assert_eq!(world.ledger.number("SELECT count(DISTINCT worker) FROM worker_change").await, 1);
}

pub async fn a_claim_without_an_owner_is_found_however_its_owner_ended(world: &World) {
    let (kept, jobs) = world.holding("kept", 1, 0).await;
    let (gone, more) = world.holding("gone", 1, 0).await;
    // As if an end had forgotten them: one owner has ended, the row of the other is not even there.
    let ended = "UPDATE worker SET ended_at = 1, state = 6, deadline = NULL";
    world.ledger.run(ended).await;
    world.ledger.run("INSERT INTO worker_change SELECT id, 9, 1, 5, NULL FROM worker").await;
    world.ledger.run("INSERT INTO worker_change SELECT id, 10, 1, 6, NULL FROM worker").await;
    world.sweep(1_000, 1_000).await;
    assert_eq!(world.store.worker_list(vec![], 9).await.unwrap().len(), 2, "whose blocks are there is not forgotten");
    world.ledger.run("DELETE FROM worker_change WHERE worker IN (SELECT id FROM worker WHERE key = 'gone')").await;
    world.ledger.run("DELETE FROM worker WHERE key = 'gone'").await;
    assert!(world.orphans(1_001).await);
    assert_eq!(world.recover(0, 1_001).await.returned, 2);
    assert_eq!(world.states([jobs[0].id, more[0].id]).await, [JobState::Queued; 2]);
    assert!(!world.orphans(1_002).await);
    assert_ne!(kept.id, gone.id);
}

pub async fn a_claim_of_a_worker_whose_answer_was_lost_is_released(world: &World) {
    let (worker, known) = world.holding("w", 1, 0).await;
    world.submit(world.job("a", 1)).await;
    let lost = world.claim_by(&worker, 1, 2).await.remove(0);
    let reconcile =
        |before, now| world.store.node_reconcile(world.node, vec![known[0].run], world.at(before), world.at(now));
    assert_eq!(reconcile(2, 3).await.unwrap(), 0, "it may still be on its way");
    world.admit(world.worker("w"), 9).await;
    assert_eq!(reconcile(9, 10).await.unwrap(), 0, "it has just brought what it has; that may not be known yet");
    assert_eq!(reconcile(10, 11).await.unwrap(), 1);
    assert_eq!(world.states([known[0].id, lost.id]).await, [JobState::Assigned, JobState::Queued]);
    let other = NodeInfo { id: NodeId::new(), name: "other".into() };
    world.store.node_join(other.clone(), LEASE_MS, world.at(0)).await.unwrap();
    let answer = world.store.node_reconcile(other.id, Vec::new(), world.at(99), world.at(99)).await;
    assert_eq!(answer.unwrap(), 0, "it is not connected there");
}

pub async fn a_poll_returns_cancel_requests_for_the_nodes_workers(world: &World) {
    let (_, jobs) = world.holding("w", 1, 0).await;
    world.cancel(jobs[0].id, 1).await;
    let cancels = world.store.poll(world.node, world.at(2)).await.unwrap().cancels;
    assert_eq!(cancels, [(jobs[0].id, "not wanted".to_owned())]);
    assert!(world.end(&jobs[0], cancelled(), 3).await);
    assert!(world.store.poll(world.node, world.at(4)).await.unwrap().cancels.is_empty());
}

// ---- how they are

pub async fn status_updates_of_workers_are_recorded(world: &World) {
    use WorkerState::*;
    let worker = world.admit(world.worker("w"), 0).await;
    let other = world.admit(world.worker("other"), 0).await;
    let first = WorkerUpdate {
        completed: 3,
        failed: 1,
        breaker: "open",
        deadline: Some(world.at(90)),
        ..world.news(&worker, &[Busy, Creating, Busy, Ready, Busy], 5)
    };
    let second = WorkerUpdate { completed: 2, ..world.news(&worker, &[Draining], 6) };
    let stale = WorkerUpdate { session: 7, completed: 100, ..world.news(&other, &[Busy], 6) };
    let unknown = WorkerUpdate { id: WorkerId::new(), ..world.news(&other, &[], 6) };
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
    world.tell(WorkerUpdate { changes: vec![change.clone()], ..world.news(&worker, &[], 8) }).await;
    let view = world.shown("w").await;
    assert_eq!((view.reason, view.history.last()), (reason, Some(&change)));
    world.lose(&worker, 0, 9).await.unwrap();
    assert!(!world.tell(world.news(&worker, &[Busy], 10)).await.connected);
    assert!(world.store.worker_update(Vec::new(), world.at(10)).await.unwrap().is_empty());
}

pub async fn only_the_newest_changes_are_kept(world: &World) {
    let worker = world.admit(world.worker("w"), 0).await;
    for round in 0..3 {
        let turns = [WorkerState::Busy, WorkerState::Ready].repeat(50);
        world.tell(world.news(&worker, &turns, round + 1)).await;
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
    assert!(world.tell(world.news(&worker, &[], 2)).await.drain);
    ask("w", false).await;
    assert!(!world.tell(world.news(&worker, &[], 3)).await.drain);
    world.lose(&worker, 0, 4).await.unwrap();
    assert_eq!(ask("w", true).await, None, "no such worker lives");
}

pub async fn live_workers_are_listed_first(world: &World) {
    let gone = world.admit(world.worker("gone"), 3).await;
    world.admit(world.worker("old"), 1).await;
    let new = world.admit(world.worker("new"), 2).await;
    world.lose(&gone, 0, 4).await.unwrap();
    world.tell(world.news(&new, &[WorkerState::Busy], 4)).await;
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
    world.tell(world.news(&draining, &[Draining], 1)).await;
    let leaving = world.admit(with("leaving", Ready), 0).await;
    world.tell(world.news(&leaving, &[Terminating], 1)).await;
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
    // Two lanes, so that some asks have one and some have two; one worker is connected elsewhere by now.
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
