//! Claims of jobs that the external queue has chosen, and what that queue learns from the database.

use faena_domain::{JobId, JobState, Priority, Scope, Timestamp};
use faena_store::{
    ClaimCandidate, ClaimRequest, ClaimResult, JobPatch, LaneId, Owner, QueueChangeKind, QueueLocation, QueuePatch,
    QueuePosition,
};

use crate::support::*;

async fn candidate(fixture: &Fixture, id: JobId) -> ClaimCandidate {
    ClaimCandidate { lane: fixture.lane_of(id).await.id, ready_at: id.created_at(), id }
}

async fn candidates(fixture: &Fixture, ids: &[JobId]) -> Vec<ClaimCandidate> {
    let mut all = Vec::new();
    for id in ids {
        all.push(candidate(fixture, *id).await);
    }
    all
}

async fn claim(fixture: &Fixture, chosen: Vec<ClaimCandidate>, limit: usize, ms: i64) -> ClaimResult {
    let request = ClaimRequest {
        owner: Owner::Node(fixture.node),
        lanes: fixture.lanes().await,
        limit,
        idle_slots: limit,
        candidates: Some(chosen),
    };
    fixture.store.job_claim(vec![request], fixture.at(ms)).await.unwrap().remove(0)
}

fn ids(claim: &ClaimResult) -> Vec<JobId> {
    claim.jobs.iter().map(|job| job.id).collect()
}

pub async fn a_claim_with_candidates_takes_only_those_that_are_ready_there(fixture: &Fixture) {
    let all = fixture.submit_all((0..6).map(|n| fixture.job(["a", "b"][n % 2], 7)).collect()).await;
    let mut chosen = candidates(fixture, &[all[4], all[2], all[3]]).await;
    // These three are not claimed: a wrong ready time, a wrong lane, and an unknown job.
    chosen.push(ClaimCandidate { ready_at: fixture.at(8), ..candidate(fixture, all[0]).await });
    chosen.push(ClaimCandidate { lane: fixture.lane_of(all[0]).await.id, ..candidate(fixture, all[1]).await });
    chosen.push(ClaimCandidate { id: JobId::new(), ..candidate(fixture, all[1]).await });
    let claimed = claim(fixture, chosen.clone(), 9, 10).await;
    assert_eq!(ids(&claimed), [all[2], all[3], all[4]]);
    let runs: std::collections::HashSet<i64> = claimed.jobs.iter().map(|job| job.run).collect();
    assert_eq!(runs.len(), 1, "they form one claim");
    assert_eq!(ids(&claim(fixture, chosen, 9, 11).await), [], "nothing is claimed twice");
    assert_eq!(fixture.claim(9, 12).await.len(), 3, "the others are ready");
    for job in claimed.jobs {
        fixture.complete(&job, 13).await;
    }
}

pub async fn a_claim_with_candidates_takes_no_more_than_its_limit(fixture: &Fixture) {
    let all = fixture.submit_all((0..5).map(|n| fixture.job("a", n)).collect()).await;
    let chosen = candidates(fixture, &all).await;
    assert_eq!(ids(&claim(fixture, chosen.clone(), 2, 10).await), all[..2]);
    assert_eq!(ids(&claim(fixture, chosen, 0, 11).await), []);
}

pub async fn candidates_wait_for_limits_and_pauses(fixture: &Fixture) {
    fixture.limit(Scope::System, Some(3), 0).await;
    let mail = fixture.submit_all((0..2).map(|n| fixture.job("a", n).queue("mail")).collect()).await;
    let other = fixture.submit_all((0..4).map(|n| fixture.job(["a", "b"][n % 2], 10 + n as i64)).collect()).await;
    let pause = faena_domain::Pause { at: fixture.at(0), by: "test".into(), reason: None };
    let patch = QueuePatch { paused: Some(Some(pause)), ..QueuePatch::default() };
    fixture.store.queue_set("mail", patch, "test", fixture.at(0)).await.unwrap();
    let chosen = candidates(fixture, &[mail.clone(), other.clone()].concat()).await;
    let claimed = claim(fixture, chosen.clone(), 9, 20).await;
    assert_eq!(ids(&claimed), other[..3], "three may run, none of them of the paused queue");
    let limited: std::collections::HashSet<_> = claimed.limited.iter().map(|limited| limited.lane).collect();
    assert!(
        limited.contains(&fixture.lane_of(mail[0]).await.id) && limited.contains(&fixture.lane_of(other[3]).await.id)
    );
    assert_eq!(ids(&claim(fixture, chosen.clone(), 9, 21).await), []);
    fixture.complete(&claimed.jobs[0], 22).await;
    assert_eq!(ids(&claim(fixture, chosen, 9, 23).await), other[3..]);
}

pub async fn jobs_with_keys_are_chosen_by_the_store_beside_candidates(fixture: &Fixture) {
    fixture.limit(Scope::Key("*".into()), Some(1), 0).await;
    let keyed = fixture.submit_all((0..3).map(|n| fixture.job("a", n).concurrency_key("k")).collect()).await;
    let plain = fixture.submit_all((0..2).map(|n| fixture.job("a", 10 + n)).collect()).await;
    let claimed = claim(fixture, candidates(fixture, &plain[..1]).await, 9, 20).await;
    assert_eq!(ids(&claimed), [keyed[0], plain[0]]);
    assert_eq!(fixture.state(keyed[1]).await, JobState::Queued);
}

pub async fn a_worker_that_has_ended_gets_no_candidates(fixture: &Fixture) {
    let id = fixture.submit(fixture.job("a", 0)).await;
    let chosen = vec![candidate(fixture, id).await];
    for limited in [false, true] {
        if limited {
            fixture.limit(Scope::System, Some(5), 1).await;
        }
        let owner = Owner::Worker { id: faena_domain::WorkerId::new(), session: 1 };
        let lanes = fixture.lanes().await;
        let request = ClaimRequest { owner, lanes, limit: 1, idle_slots: 1, candidates: Some(chosen.clone()) };
        let claimed = fixture.store.job_claim(vec![request], fixture.at(2)).await.unwrap().remove(0);
        assert!(claimed.rejected && claimed.jobs.is_empty(), "limited: {limited}");
    }
    assert_eq!(fixture.claim_one(3).await.id, id);
}

pub async fn the_queue_feed_announces_what_becomes_ready_or_waits(fixture: &Fixture) {
    fixture.submit(fixture.job("a", 0)).await;
    let feed = fixture.store.queue_feed();
    assert!(feed.is_empty(), "it is off");
    fixture.claim_one(0).await;
    feed.switch_on();
    let announced = || -> Vec<(JobId, QueueChangeKind, Timestamp)> {
        feed.take(100).iter().map(|change| (change.id, change.kind, change.at)).collect()
    };
    let ready = fixture.submit(fixture.job("a", 1)).await;
    let delayed = fixture.submit(fixture.job("a", 2).scheduled(fixture.at(30))).await;
    assert_eq!(
        announced(),
        [(ready, QueueChangeKind::Ready, fixture.at(1)), (delayed, QueueChangeKind::Delayed, fixture.at(30))]
    );
    let claimed = fixture.claim_one(5).await;
    assert_eq!(announced(), [], "a claim is not announced to the queue that made it");
    fixture.retry_at(&claimed, 40, 6).await;
    assert_eq!(announced(), [(ready, QueueChangeKind::Delayed, fixture.at(40))]);
    fixture.promote(50).await;
    let mut promoted = announced();
    promoted.sort_by_key(|(_, _, at)| *at);
    assert_eq!(
        promoted,
        [(delayed, QueueChangeKind::Ready, fixture.at(30)), (ready, QueueChangeKind::Ready, fixture.at(40))]
    );
    let claimed = fixture.claim_one(51).await;
    fixture.release(&claimed, 52).await;
    assert_eq!(announced(), [(claimed.id, QueueChangeKind::Ready, claimed.ready_at)]);
    let stamps: Vec<u64> = (0..3).map(|_| feed.stamp()).collect();
    assert!(stamps.is_sorted());
}

pub async fn the_queue_feed_announces_what_leaves_without_a_claim(fixture: &Fixture) {
    let all = fixture.submit_all((0..5).map(|n| fixture.job("a", n)).collect()).await;
    let expiring = fixture.submit(fixture.job("a", 5).expires(fixture.at(20))).await;
    let waiting = fixture.submit(fixture.job("a", 6).scheduled(fixture.at(90))).await;
    let (store, lane) = (&fixture.store, fixture.lane_of(all[0]).await.id);
    let feed = store.queue_feed();
    feed.switch_on();
    let announced = || -> Vec<(JobId, LaneId, QueueChangeKind)> {
        feed.take(100).iter().map(|change| (change.id, change.lane, change.kind)).collect()
    };
    store.job_cancel(all[0], "not needed", None, fixture.at(10)).await.unwrap();
    assert_eq!(announced(), [(all[0], lane, QueueChangeKind::Left)]);
    store.job_delete(all[1], None, fixture.at(10)).await.unwrap();
    assert_eq!(announced(), [(all[1], lane, QueueChangeKind::Left)]);
    let patch = JobPatch { priority: Some(Priority::High), ..JobPatch::default() };
    store.job_patch(all[2], patch, None, fixture.at(10)).await.unwrap();
    let high = fixture.lane_of(all[2]).await.id;
    assert_eq!(announced(), [(all[2], lane, QueueChangeKind::Left), (all[2], high, QueueChangeKind::Ready)]);
    for (id, until, becomes) in
        [(all[3], Some(fixture.at(80)), QueueChangeKind::Delayed), (waiting, None, QueueChangeKind::Ready)]
    {
        let patch = JobPatch { scheduled_at: Some(until), ..JobPatch::default() };
        store.job_patch(id, patch, None, fixture.at(10)).await.unwrap();
        assert_eq!(announced(), [(id, lane, QueueChangeKind::Left), (id, lane, becomes)]);
    }
    store.job_expire(100, fixture.at(21)).await.unwrap();
    assert_eq!(announced(), [(expiring, lane, QueueChangeKind::Left)]);
    store.job_fail_unhandled(vec![lane], fixture.at(7), 100, fixture.at(30)).await.unwrap();
    assert_eq!(announced(), [(all[4], lane, QueueChangeKind::Left)]);
}

pub async fn the_queue_of_the_database_can_be_read_in_pages(fixture: &Fixture) {
    let all = fixture.submit_all((0..5).map(|n| fixture.job("a", n / 2)).collect()).await;
    let lane = fixture.lane_of(all[0]).await.id;
    let mut after = None;
    let mut read = Vec::new();
    loop {
        let page = fixture.store.ready_page(lane, after, 2).await.unwrap();
        after = page.last().copied().or(after);
        if page.is_empty() {
            break;
        }
        read.extend(page.iter().map(|position| position.id));
    }
    assert_eq!(read, all);
    let late = fixture.submit(fixture.job("a", 0).scheduled(fixture.at(99))).await;
    let waiting = fixture.store.delayed_page(None, 10).await.unwrap();
    assert_eq!(waiting, [(lane, QueuePosition { at: fixture.at(99), id: late })]);
    let running = fixture.claim_one(10).await;
    let failed = fixture.claim_one(10).await;
    fixture.fail(&failed, 11).await;
    let dead = fixture.store.dead_page(lane, None, 10).await.unwrap();
    assert_eq!(dead.iter().map(|job| job.id).collect::<Vec<_>>(), [failed.id]);
    let requested = vec![all[4], late, running.id, failed.id, JobId::new()];
    let locations = fixture.store.queue_locations(requested).await.unwrap();
    let failed_at = dead[0].at;
    assert_eq!(
        locations,
        [
            QueueLocation::Ready { lane, ready_at: fixture.at(2) },
            QueueLocation::Delayed { lane, due_at: fixture.at(99) },
            QueueLocation::InFlight,
            QueueLocation::Failed { at: failed_at },
            QueueLocation::Elsewhere,
        ]
    );
}
