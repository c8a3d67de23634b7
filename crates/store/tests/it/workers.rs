//! Workers register, move, reconnect and send updates. A node that never joined counts as dead on both databases.

use std::time::Duration;

use faena_domain::{
    ApiKeyId, JobState, KeyHash, NewJob, NodeId, WorkerCapabilities, WorkerChange, WorkerId, WorkerKind, WorkerState,
};
use faena_store::{
    CancelOutcome, ClaimRequest, Filter, Owner, RunEnd, Signal, StoreError, Tally, WorkerAdmitted, WorkerEnd,
    WorkerEntry, WorkerUpdate,
};

use crate::support::*;

/// A time before every registration. A sweep that deletes registrations that ended before this time deletes none.
pub const LONG_AGO: i64 = -1_000_000;

pub async fn states(fixture: &Fixture, key: &str) -> Vec<WorkerState> {
    fixture.worker_view(key).await.history.iter().map(|change| change.state).collect()
}

pub fn named(key: &str, fixture: &Fixture, kind: WorkerKind, node: NodeId) -> WorkerEntry {
    WorkerEntry { kind, node, ..fixture.worker(key) }
}

pub async fn a_new_worker_passes_through_creating_and_connecting_to_ready(fixture: &Fixture) {
    use WorkerState::*;
    let capabilities = WorkerCapabilities { types: vec!["a".into(), "b.*".into()], queues: vec!["q".into()] };
    let entry = WorkerEntry {
        name: Some("Billing \"1\"".into()),
        capabilities: capabilities.clone(),
        ..fixture.worker("billing-1")
    };
    let admitted = fixture.admit(entry.clone(), 5).await;
    assert_eq!((admitted.id, admitted.session, admitted.was), (entry.id, 1, None));
    assert_eq!(fixture.store.worker_session(admitted.id).await.unwrap(), Some(1));
    assert_eq!(fixture.store.worker_session(WorkerId::new()).await.unwrap(), None);
    assert!(admitted.jobs.is_empty());
    let view = fixture.worker_view("billing-1").await;
    assert_eq!((view.id.as_str(), view.registration_id, view.name), ("billing-1", entry.id.to_string(), entry.name));
    assert_eq!((view.kind, view.transport.as_str(), view.state), (WorkerKind::Remote, "websocket", Ready));
    assert_eq!((view.category.as_str(), view.breaker.as_str()), ("available", "closed"));
    assert_eq!((view.capabilities, view.queues, view.concurrency), (capabilities.types, capabilities.queues, 10));
    assert_eq!((view.node, view.registered_at), (Some(fixture.node.to_string()), fixture.at(5)));
    assert_eq!((view.last_seen_at, view.ended_at, view.deadline), (fixture.at(5), None, None));
    assert_eq!(states(fixture, "billing-1").await, [Creating, Connecting, Ready]);
    assert!(fixture.store.worker_get("unknown").await.unwrap().is_none());
}

pub async fn a_worker_whose_process_starts_becomes_ready_when_it_connects(fixture: &Fixture) {
    use WorkerState::*;
    let entry = WorkerEntry {
        kind: WorkerKind::Pool,
        state: Creating,
        pool: Some("small".into()),
        deadline: Some(fixture.at(100)),
        ..fixture.worker("small-1")
    };
    let made = fixture.admit(entry.clone(), 0).await;
    assert_eq!(states(fixture, "small-1").await, [Creating]);
    let connected = fixture.admit(fixture.worker("small-1"), 10).await;
    assert_eq!((connected.id, connected.session, connected.was), (made.id, 2, Some(Creating)));
    let view = fixture.worker_view("small-1").await;
    assert_eq!((view.kind, view.pool.as_deref()), (WorkerKind::Pool, Some("small")), "a worker of a pool stays one");
    assert_eq!((view.state, view.deadline), (Ready, None));
    assert_eq!(states(fixture, "small-1").await, [Creating, Connecting, Ready]);
}

pub async fn a_worker_that_reconnects_keeps_its_jobs(fixture: &Fixture) {
    let (worker, jobs) = fixture.worker_with_jobs("w", 5, 0).await;
    fixture.report_start(&jobs[1], 3).await;
    fixture.complete(&jobs[2], 4).await;
    fixture.retry_at(&jobs[3], 1_000, 4).await;
    let later = fixture.submit(fixture.job("b", 5).retries(7)).await;
    fixture.claim_by(&worker, 1, 6).await;
    assert!(fixture.send_update(fixture.worker_update(&worker, &[WorkerState::Busy], 7)).await.connected);
    fixture.store.worker_drain("w", true, None, fixture.at(7)).await.unwrap();
    assert_eq!(fixture.worker_view("w").await.jobs.len(), 4);

    let entry = WorkerEntry { transport: "grpc".into(), concurrency: 3, ..fixture.worker("w") };
    let reconnected = fixture.admit(entry, 8).await;

    assert_eq!((reconnected.id, reconnected.session, reconnected.was), (worker.id, 2, Some(WorkerState::Busy)));
    let resumed: Vec<_> = reconnected.jobs.iter().map(|resumed| (resumed.job.id, resumed.job.run)).collect();
    let own = |n: usize| (jobs[n].id, jobs[n].run);
    assert_eq!(resumed[..3], [own(0), own(1), own(4)]);
    let last = &reconnected.jobs[3];
    assert_eq!((last.job.id, last.kind.as_str(), last.job.options.retry.max_retries), (later, "b", 7));
    assert!(last.job.run > jobs[0].run, "oldest run first");
    assert_eq!((last.job.ready_at, last.claimed_at, last.started_at), (fixture.at(5), fixture.at(6), None));
    assert_eq!((reconnected.jobs[1].started_at, reconnected.jobs[1].job.payload.as_str()), (Some(fixture.at(3)), "{}"));
    let view = fixture.worker_view("w").await;
    assert_eq!((view.state, view.transport.as_str(), view.concurrency), (WorkerState::Busy, "grpc", 3));
    assert!(fixture.send_update(fixture.worker_update(&reconnected, &[], 9)).await.drain, "it is still asked to drain");
    fixture.complete(&jobs[0], 10).await;
}

pub async fn a_worker_that_resumes_shows_the_version_of_its_new_program(fixture: &Fixture) {
    let with = |version: Option<&str>| WorkerEntry { version: version.map(Into::into), ..fixture.worker("w") };
    for (ms, version) in [Some("1.4.2"), Some("1.5.0-β+\"7\""), None].into_iter().enumerate() {
        let admitted = fixture.admit(with(version), ms as i64).await;
        assert_eq!(admitted.session, ms as i64 + 1, "one registration");
        assert_eq!(fixture.worker_view("w").await.version.as_deref(), version);
        let listed = fixture.store.worker_list(Vec::new(), 10).await.unwrap();
        assert_eq!((listed.len(), listed[0].version.as_deref()), (1, version));
    }
    let starting = WorkerEntry { kind: WorkerKind::Pool, state: WorkerState::Creating, ..fixture.worker("process") };
    fixture.admit(starting, 3).await;
    assert_eq!(fixture.worker_view("process").await.version, None);
    fixture.admit(WorkerEntry { version: Some("2".into()), ..fixture.worker("process") }, 4).await;
    assert_eq!(fixture.worker_view("process").await.version.as_deref(), Some("2"), "it registers later");
}

pub async fn jobs_in_flight_are_counted_per_worker(fixture: &Fixture) {
    let built_in = fixture.admit(named("built-in", fixture, WorkerKind::BuiltIn, fixture.node), 0).await;
    let elsewhere = fixture.admit(named("elsewhere", fixture, WorkerKind::BuiltIn, NodeId::new()), 0).await;
    let idle = fixture.admit(fixture.worker("idle"), 0).await;
    let (busy, jobs) = fixture.worker_with_jobs("busy", 6, 0).await;
    fixture.report_start(&jobs[0], 1).await;
    fixture.complete(&jobs[1], 2).await;
    fixture.retry_at(&jobs[2], 1_000, 2).await;
    fixture.submit_all((0..2).map(|_| fixture.job("a", 3)).collect()).await;
    fixture.claim_for(Owner::Node(fixture.node), fixture.lanes().await, 2, 3).await;
    let all = [built_in.id, elsewhere.id, idle.id, busy.id, WorkerId::new()];
    let count = async || fixture.store.worker_in_flight_counts(all.to_vec()).await.unwrap();

    assert_eq!(count().await, [(built_in.id, 2), (busy.id, 4)].into(), "without those that have ended");
    assert_eq!(fixture.store.worker_in_flight_counts(vec![idle.id]).await.unwrap(), [].into(), "only those asked for");
    let left = WorkerEnd::Left { reason: "x".into() };
    fixture.store.worker_end(busy.id, busy.session, left, fixture.at(4)).await.unwrap();
    assert_eq!(count().await, [(built_in.id, 2)].into());
}

pub async fn a_worker_that_moves_signals_its_old_node(fixture: &Fixture) {
    let mut signals = fixture.store.signals();
    let worker = fixture.admit(named("w", fixture, WorkerKind::Remote, NodeId::new()), 0).await;
    fixture.admit(fixture.worker("w"), 1).await;
    let signal = tokio::time::timeout(Duration::from_secs(10), signals.recv()).await.unwrap().unwrap();
    assert_eq!(signal, Signal::Worker(worker.id));
}

pub async fn twenty_concurrent_connections_under_one_key_are_one_worker(fixture: &Fixture) {
    let tasks = (0..20).map(|_| {
        let (store, entry, now) = (fixture.store.clone(), fixture.worker("w"), fixture.at(0));
        tokio::spawn(async move { store.worker_admit(entry, now).await.unwrap() })
    });
    let all: Vec<WorkerAdmitted> =
        futures_util::future::join_all(tasks).await.into_iter().map(|admitted| admitted.unwrap()).collect();
    assert!(all.iter().all(|admitted| admitted.id == all[0].id));
    let mut sessions: Vec<i64> = all.iter().map(|admitted| admitted.session).collect();
    sessions.sort_unstable();
    assert_eq!(sessions, (1..=20).collect::<Vec<i64>>());
}

pub async fn nothing_is_claimed_through_an_old_session(fixture: &Fixture) {
    let old = fixture.admit(fixture.worker("w"), 0).await;
    let new = fixture.admit(fixture.worker("w"), 1).await;
    let ids = fixture.submit_all((0..2).map(|_| fixture.job("a", 2)).collect()).await;
    assert!(fixture.claim_by(&old, 5, 3).await.is_empty());
    let unknown = WorkerAdmitted { id: WorkerId::new(), ..new.clone() };
    assert!(fixture.claim_by(&unknown, 5, 3).await.is_empty(), "an unknown worker");
    assert_eq!(fixture.claim_by(&new, 1, 4).await[0].id, ids[0]);
    fixture.end_as_lost(&new, 0, 5).await.unwrap();
    assert!(fixture.claim_by(&new, 5, 6).await.is_empty(), "the worker has ended");
    assert_eq!(fixture.claim_one(7).await.id, ids[1]);
}

pub async fn several_requests_are_answered_in_their_order(fixture: &Fixture) {
    let worker = fixture.admit(fixture.worker("w"), 0).await;
    let a = fixture.submit_all((0..4).map(|_| fixture.job("a", 0)).collect()).await;
    let b = fixture.submit_all((0..2).map(|_| fixture.job("b", 0)).collect()).await;
    let (lane_a, lane_b) = (fixture.lane_of(a[0]).await.id, fixture.lane_of(b[0]).await.id);
    let mine = Owner::Worker { id: worker.id, session: worker.session };
    let stale = Owner::Worker { id: worker.id, session: 99 };
    let request =
        |owner, lane, limit| ClaimRequest { owner, lanes: vec![lane], limit, idle_slots: limit, candidates: None };
    let requests = vec![
        request(mine, lane_a, 1),
        request(stale, lane_a, 1),
        request(Owner::Node(fixture.node), lane_a, 2),
        request(mine, lane_b, 5),
        request(mine, lane_b, 5),
    ];
    let claims = fixture.store.job_claim(requests, fixture.at(1)).await.unwrap();
    let ids: Vec<Vec<_>> = claims.iter().map(|claim| claim.jobs.iter().map(|job| job.id).collect()).collect();
    assert_eq!(ids, [vec![a[0]], vec![], vec![a[1], a[2]], b.clone(), vec![]]);
    assert_eq!(fixture.worker_view("w").await.jobs, [a[0], b[0], b[1]].map(|id| id.to_string()));
    assert!(fixture.store.job_claim(Vec::new(), fixture.at(2)).await.unwrap().is_empty());
}

pub async fn a_job_is_scheduled_while_its_worker_starts(fixture: &Fixture) {
    let creating =
        WorkerEntry { state: WorkerState::Creating, deadline: Some(fixture.at(1_000)), ..fixture.worker("starting") };
    let starting = fixture.admit(creating, 0).await;
    let id = fixture.submit(fixture.job("a", 1).tag("t")).await;
    fixture.claim_by(&starting, 1, 2).await;
    let other = fixture.submit_and_claim(fixture.job("a", 3).tag("t")).await;

    let view = fixture.get(id).await;
    assert_eq!((view.status, view.worker_id.as_deref()), (JobState::Scheduled, Some("starting")));
    assert_eq!(fixture.events(id).await, ["created", "queued", "scheduled"]);
    let with = |state| Filter { states: vec![state], ..Filter::default() };
    let tagged = |state| Filter { tag: Some("t".into()), ..with(state) };
    for filter in [with(JobState::Scheduled), tagged(JobState::Scheduled)] {
        assert_eq!(fixture.list(filter).await, [id]);
    }
    for filter in [with(JobState::Assigned), tagged(JobState::Assigned)] {
        assert_eq!(fixture.list(filter).await, [other.id]);
    }
    let in_flight =
        Filter { states: vec![JobState::Scheduled, JobState::Assigned, JobState::Processing], ..Filter::default() };
    assert_eq!(fixture.list(in_flight).await.len(), 2);
    assert_eq!(fixture.list(Filter::default()).await.len(), 2);
    assert_eq!(fixture.cancel(id, 4).await, CancelOutcome::Requested { state: JobState::Scheduled });

    fixture.admit(fixture.worker("starting"), 5).await;
    assert_eq!(fixture.state(id).await, JobState::Assigned);
    assert!(fixture.list(with(JobState::Scheduled)).await.is_empty());
    assert!(fixture.events(id).await.contains(&"assigned".into()));
    assert_eq!(fixture.list(with(JobState::Assigned)).await.len(), 2);
}

pub async fn jobs_name_their_worker(fixture: &Fixture) {
    let (worker, jobs) = fixture.worker_with_jobs("billing-1", 3, 0).await;
    let reported = |end: RunEnd| RunEnd { worker: worker.id, ..end };
    fixture
        .store
        .run_update(
            vec![faena_store::RunUpdate {
                worker: worker.id,
                ..fixture.run_update(&jobs[1], faena_store::RunUpdateKind::Started, 1)
            }],
            fixture.at(1),
        )
        .await
        .unwrap();
    assert!(fixture.report_end(reported(fixture.run_end(&jobs[2], completed(), 2))).await);
    for job in &jobs {
        assert_eq!(fixture.get(job.id).await.worker_id.as_deref(), Some("billing-1"));
    }
    let page = fixture.store.job_list(&Filter::default(), faena_store::Page::offset(0, 9)).await.unwrap();
    assert!(page.jobs.iter().all(|job| job.worker_id.as_deref() == Some("billing-1")));
    fixture.end_as_lost(&worker, 0, 3).await.unwrap();
    fixture.sweep(1_000, 1_000).await;
    assert_eq!(
        fixture.get(jobs[2].id).await.worker_id,
        Some(worker.id.to_string()),
        "the registration is deleted, but its id is kept"
    );
    let mine = fixture.submit_and_claim(fixture.job("b", 2_000)).await;
    assert_eq!(fixture.get(mine.id).await.worker_id, None, "a job that a node has claimed has no worker yet");
}

pub async fn a_poll_returns_cancel_requests_for_the_nodes_workers(fixture: &Fixture) {
    let (_, jobs) = fixture.worker_with_jobs("w", 1, 0).await;
    fixture.cancel(jobs[0].id, 1).await;
    let cancels = fixture.store.poll(fixture.node, fixture.at(2)).await.unwrap().cancel_requests;
    assert_eq!(cancels, [(jobs[0].id, "not wanted".to_owned())]);
    assert!(fixture.end(&jobs[0], cancelled(), 3).await);
    assert!(fixture.store.poll(fixture.node, fixture.at(4)).await.unwrap().cancel_requests.is_empty());
}

pub async fn status_updates_of_workers_are_recorded(fixture: &Fixture) {
    use WorkerState::*;
    let worker = fixture.admit(fixture.worker("w"), 0).await;
    let other = fixture.admit(fixture.worker("other"), 0).await;
    let first = WorkerUpdate {
        completed: 3,
        failed: 1,
        breaker: "open",
        deadline: Some(fixture.at(90)),
        ..fixture.worker_update(&worker, &[Busy, Creating, Busy, Ready, Busy], 5)
    };
    let second = WorkerUpdate { completed: 2, ..fixture.worker_update(&worker, &[Draining], 6) };
    let stale = WorkerUpdate { session: 7, completed: 100, ..fixture.worker_update(&other, &[Busy], 6) };
    let unknown = WorkerUpdate { id: WorkerId::new(), ..fixture.worker_update(&other, &[], 6) };
    let results = fixture.store.worker_update(vec![first, stale, second, unknown], fixture.at(6)).await.unwrap();
    assert_eq!(results.iter().map(|answer| answer.connected).collect::<Vec<_>>(), [true, false, true, false]);
    let view = fixture.worker_view("w").await;
    assert_eq!((view.state, view.completed, view.failed), (Draining, 5, 1));
    assert_eq!((view.breaker.as_str(), view.deadline, view.last_seen_at), ("closed", None, fixture.at(6)));
    assert_eq!(states(fixture, "w").await, [Creating, Connecting, Ready, Busy, Ready, Busy, Draining]);
    let view = fixture.worker_view("other").await;
    assert_eq!((view.state, view.completed), (Ready, 0));
    let reason = Some("drain cancelled".to_owned());
    let change = WorkerChange { at: fixture.at(8), state: Ready, reason: reason.clone() };
    fixture.send_update(WorkerUpdate { changes: vec![change.clone()], ..fixture.worker_update(&worker, &[], 8) }).await;
    let view = fixture.worker_view("w").await;
    assert_eq!((view.reason, view.history.last()), (reason, Some(&change)));
    fixture.end_as_lost(&worker, 0, 9).await.unwrap();
    assert!(!fixture.send_update(fixture.worker_update(&worker, &[Busy], 10)).await.connected);
    assert!(fixture.store.worker_update(Vec::new(), fixture.at(10)).await.unwrap().is_empty());
}

pub async fn only_the_newest_changes_are_kept(fixture: &Fixture) {
    let worker = fixture.admit(fixture.worker("w"), 0).await;
    for round in 0..3 {
        let changes = [WorkerState::Busy, WorkerState::Ready].repeat(50);
        fixture.send_update(fixture.worker_update(&worker, &changes, round + 1)).await;
    }
    let history = fixture.worker_view("w").await.history;
    assert_eq!((history.len(), history[0].at), (200, fixture.at(2)));
}

pub async fn a_worker_is_drained_by_its_key(fixture: &Fixture) {
    let worker = fixture.admit(fixture.worker("w"), 0).await;
    let mut signals = fixture.store.signals();
    let drain_worker =
        async |key: &str, drain| fixture.store.worker_drain(key, drain, None, fixture.at(1)).await.unwrap();
    assert_eq!(drain_worker("unknown", true).await, None);
    assert_eq!(drain_worker("w", true).await, Some(worker.id));
    let signal = tokio::time::timeout(Duration::from_secs(10), signals.recv()).await.unwrap().unwrap();
    assert_eq!(signal, Signal::Worker(worker.id));
    assert!(fixture.send_update(fixture.worker_update(&worker, &[], 2)).await.drain);
    drain_worker("w", false).await;
    assert!(!fixture.send_update(fixture.worker_update(&worker, &[], 3)).await.drain);
    fixture.end_as_lost(&worker, 0, 4).await.unwrap();
    assert_eq!(drain_worker("w", true).await, None, "no live worker has this key");
}

pub async fn live_workers_are_listed_first(fixture: &Fixture) {
    let gone = fixture.admit(fixture.worker("gone"), 3).await;
    fixture.admit(fixture.worker("old"), 1).await;
    let new = fixture.admit(fixture.worker("new"), 2).await;
    fixture.end_as_lost(&gone, 0, 4).await.unwrap();
    fixture.send_update(fixture.worker_update(&new, &[WorkerState::Busy], 4)).await;
    let list = async |states: &[WorkerState], limit| -> Vec<String> {
        let workers = fixture.store.worker_list(states.to_vec(), limit).await.unwrap();
        workers.into_iter().map(|worker| worker.id).collect()
    };
    assert_eq!(list(&[], 9).await, ["new", "old", "gone"]);
    assert_eq!(list(&[], 2).await, ["new", "old"]);
    assert_eq!(list(&[WorkerState::Busy, WorkerState::Terminated], 9).await, ["new", "gone"]);
}

pub async fn capabilities_are_those_of_workers_that_accept_jobs(fixture: &Fixture) {
    use WorkerState::*;
    let able = |name: &str| WorkerCapabilities { types: vec![name.into()], queues: vec![format!("q-{name}")] };
    let with = |name: &str, state| WorkerEntry { capabilities: able(name), state, ..fixture.worker(name) };
    fixture.admit(WorkerEntry { deadline: Some(fixture.at(99)), ..with("starting", Creating) }, 0).await;
    fixture.admit(with("ready", Ready), 0).await;
    let draining = fixture.admit(with("draining", Ready), 0).await;
    fixture.send_update(fixture.worker_update(&draining, &[Draining], 1)).await;
    let leaving = fixture.admit(with("leaving", Ready), 0).await;
    fixture.send_update(fixture.worker_update(&leaving, &[Terminating], 1)).await;
    let lost = fixture.admit(with("lost", Ready), 0).await;
    fixture.end_as_lost(&lost, 0, 1).await.unwrap();
    let mut known = fixture.store.worker_capabilities().await.unwrap();
    known.sort_by(|a, b| a.types.cmp(&b.types));
    assert_eq!(known, [able("ready"), able("starting")]);
}

pub async fn workers_of_all_nodes_that_are_ready_or_busy_are_counted(fixture: &Fixture) {
    use WorkerState::*;
    assert_eq!(fixture.store.worker_total(vec![Ready, Busy]).await.unwrap(), 0);
    let starting = WorkerEntry { state: Creating, deadline: Some(fixture.at(99)), ..fixture.worker("starting") };
    fixture.admit(starting, 0).await;
    fixture.admit(fixture.worker("ready"), 0).await;
    fixture.admit(WorkerEntry { node: NodeId::new(), ..fixture.worker("elsewhere") }, 0).await;
    let busy = fixture.admit(fixture.worker("busy"), 0).await;
    fixture.send_update(fixture.worker_update(&busy, &[Busy], 1)).await;
    let draining = fixture.admit(fixture.worker("draining"), 0).await;
    fixture.send_update(fixture.worker_update(&draining, &[Draining], 1)).await;
    let lost = fixture.admit(fixture.worker("lost"), 0).await;
    fixture.end_as_lost(&lost, 0, 1).await.unwrap();
    let working = fixture.store.worker_total(vec![Ready, Busy]).await.unwrap();
    assert_eq!(working, 3, "ready, elsewhere and busy");
}

pub async fn counters_follow_the_jobs_of_workers(fixture: &Fixture) {
    let (worker, jobs) = fixture.worker_with_jobs("w", 3, 0).await;
    assert_eq!([fixture.total(Tally::InFlight).await, fixture.total(Tally::Queued).await], [3, 0]);
    fixture.complete(&jobs[0], 1).await;
    fixture.end_as_lost(&worker, 10, 2).await.unwrap();
    let tallies = [Tally::InFlight, Tally::Retrying, Tally::Completed];
    let mut counted = Vec::new();
    for tally in tallies {
        counted.push(fixture.total(tally).await);
    }
    assert_eq!(counted, [0, 2, 1]);
}

pub async fn many_requests_in_one_call_share_the_ready_jobs(fixture: &Fixture) {
    // Some requests name one lane and some name two. One request has a session that is not the current one.
    let kinds = |n: usize| if n.is_multiple_of(3) { "b" } else { "a" };
    fixture.submit_all((0..150).map(|n| fixture.job(kinds(n), 0)).collect()).await;
    let lanes = fixture.lanes().await;
    assert_eq!(lanes.len(), 2);
    let mut requests = Vec::new();
    for n in 0..200usize {
        let worker = fixture.admit(fixture.worker(&format!("w{n}")), 1).await;
        let session = if n == 7 { worker.session + 1 } else { worker.session };
        let lanes = if n.is_multiple_of(5) { lanes.clone() } else { vec![lanes[n % 2]] };
        requests.push(ClaimRequest {
            owner: Owner::Worker { id: worker.id, session },
            lanes,
            limit: 1,
            idle_slots: 1,
            candidates: None,
        });
    }
    let claims = fixture.store.job_claim(requests.clone(), fixture.at(2)).await.unwrap();
    assert_eq!(claims.len(), 200);
    assert!(claims[7].rejected && claims[7].jobs.is_empty());
    assert!(claims.iter().enumerate().all(|(n, claim)| claim.rejected == (n == 7) && claim.jobs.len() <= 1));
    let mut ids: Vec<_> = claims.iter().flat_map(|claim| claim.jobs.iter().map(|job| job.id)).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 150, "every job was claimed once");
    assert_eq!((fixture.total(Tally::Queued).await, fixture.total(Tally::InFlight).await), (0, 150));
    let second = fixture.store.job_claim(requests, fixture.at(3)).await.unwrap();
    assert!(second.iter().all(|claim| claim.jobs.is_empty()));
    for job in claims.iter().flat_map(|claim| &claim.jobs) {
        fixture.complete(job, 5).await;
    }
}

pub async fn a_live_registration_is_resumed_only_with_its_token_or_api_key(fixture: &Fixture) {
    let (own, wrong) = (Some(KeyHash([1; 32])), Some(KeyHash([2; 32])));
    let (mine, other) = (Some(ApiKeyId::new()), Some(ApiKeyId::new()));
    let with = |key: &str, api_key, presented_token| WorkerEntry {
        token: KeyHash([1; 32]),
        api_key,
        presented_token,
        ..fixture.worker(key)
    };
    let admit = async |entry, ms| fixture.store.worker_admit(entry, fixture.at(ms)).await;
    let first = fixture.admit(with("w", mine, None), 0).await;
    fixture.submit(NewJob::new("mail")).await;
    let job = fixture.claim_by(&first, 1, 1).await.remove(0);
    for (api_key, token) in [(other, None), (None, None), (None, wrong), (mine, wrong), (other, wrong)] {
        let refused = admit(with("w", api_key, token), 2).await;
        assert!(matches!(refused, Err(StoreError::WorkerActive { deadline: None })), "{refused:?}");
    }
    assert_eq!(fixture.store.worker_session(first.id).await.unwrap(), Some(1), "a rejection changes nothing");
    let resumed = admit(with("w", other, own), 3).await.unwrap();
    assert_eq!((resumed.id, resumed.session, resumed.jobs.len()), (first.id, 2, 1), "the token is enough");
    assert_eq!(resumed.jobs[0].job.run, job.run);
    assert!(admit(with("w", mine, None), 4).await.is_err(), "the registration belongs to the key that used it last");
    let renewed = WorkerEntry { token: KeyHash([3; 32]), ..with("w", other, None) };
    assert!(admit(renewed, 5).await.unwrap().token.matches(&KeyHash([3; 32])), "its key replaces a token that is lost");
    assert!(admit(with("w", other, own), 6).await.is_err(), "the old token is not valid any more");
    fixture.admit(with("open", None, None), 0).await;
    assert!(
        admit(with("open", None, None), 1).await.is_err(),
        "two callers without an API key do not have the same key"
    );
    let process = WorkerEntry { kind: WorkerKind::Pool, ..with("process", None, None) };
    fixture.admit(process, 0).await;
    assert!(
        admit(with("process", mine, None), 1).await.is_err(),
        "only the process that the server started may resume it"
    );
    assert_eq!(admit(with("process", None, own), 2).await.unwrap().session, 2);
}

pub async fn a_rejected_registration_returns_the_deadline_of_the_live_worker(fixture: &Fixture) {
    let entry = WorkerEntry { deadline: Some(fixture.at(500)), ..fixture.worker("w") };
    fixture.admit(entry, 0).await;
    let stranger = || WorkerEntry { presented_token: None, ..fixture.worker("w") };
    let refused = fixture.store.worker_admit(stranger(), fixture.at(1)).await;
    assert!(matches!(refused, Err(StoreError::WorkerActive { deadline: Some(at) }) if at == fixture.at(500)));
    fixture.sweep(LONG_AGO, 501).await;
    let begun = fixture.admit(stranger(), 502).await;
    assert_eq!((begun.was, begun.session), (None, 1), "the id is free when its worker is lost");
}
