//! Claims of ready jobs.

use std::collections::HashSet;

use faena_domain::{JobId, LogEvent, NewJob, NodeId, Priority};
use faena_store::{ClaimRequest, Owner};

use crate::support::*;

fn ids(jobs: &[faena_store::ClaimedJob]) -> Vec<JobId> {
    jobs.iter().map(|job| job.id).collect()
}

pub async fn a_claim_orders_by_score_so_waiting_outweighs_priority(fixture: &Fixture) {
    let at = |ms, priority| fixture.job("a", ms).priority(priority);
    let old_low = fixture.submit(at(0, Priority::Low)).await;
    let normal = fixture.submit(at(1_000_001, Priority::Normal)).await;
    let high = fixture.submit(at(1_999_999, Priority::High)).await;
    let critical = fixture.submit(at(2_999_998, Priority::Critical)).await;

    // Scores: low 3 000 000, normal 3 000 001, high 2 999 999, critical 2 999 998. The lowest score is claimed first.
    assert_eq!(ids(&fixture.claim(2, 3_000_000).await), [critical, high]);
    assert_eq!(ids(&fixture.claim(2, 3_000_000).await), [old_low, normal]);
}

pub async fn a_strict_queue_never_prefers_a_lower_priority(fixture: &Fixture) {
    make_strict(fixture, "strict").await;
    let low = fixture.submit(fixture.job("a", 0).queue("strict").priority(Priority::Low)).await;
    let low_2 = fixture.submit(fixture.job("a", 1).queue("strict").priority(Priority::Low)).await;
    let critical = fixture.submit(fixture.job("a", 99_000_000).queue("strict").priority(Priority::Critical)).await;
    assert_eq!(ids(&fixture.claim(3, 99_000_000).await), [critical, low, low_2]);
    fixture.store.close().await;
}

pub async fn equal_scores_are_ordered_by_id(fixture: &Fixture) {
    let jobs: Vec<NewJob> = (0..50).map(|n| fixture.job(["a", "b"][n % 2], 7)).collect();
    let wanted: Vec<JobId> = jobs.iter().map(|job| job.id).collect();
    let mut shuffled = jobs;
    shuffled.reverse();
    fixture.submit_all(shuffled).await;
    assert_eq!(ids(&fixture.claim(50, 8).await), wanted);
}

pub async fn queues_are_served_round_robin(fixture: &Fixture) {
    fixture.submit_all((0..20).map(|_| fixture.job("a", 0).queue("long")).collect()).await;
    fixture.submit_all((0..3).map(|_| fixture.job("a", 9).queue("short")).collect()).await;
    let mut queues = Vec::new();
    for job in fixture.claim(8, 10).await {
        queues.push(fixture.get(job.id).await.queue);
    }
    assert_eq!(queues.iter().filter(|queue| *queue == "short").count(), 3, "{queues:?}");
    assert_ne!(queues[0], queues[1]);
    assert_ne!(queues[2], queues[3]);
    let mut firsts = HashSet::new();
    fixture.submit_all((0..20).map(|_| fixture.job("a", 9).queue("short")).collect()).await;
    for _ in 0..4 {
        firsts.insert(fixture.get(fixture.claim_one(10).await.id).await.queue);
    }
    assert_eq!(firsts.len(), 2, "claims of one job serve both queues");
}

pub async fn a_claim_returns_only_jobs_of_the_requested_lanes(fixture: &Fixture) {
    let a = fixture.submit_all((0..5).map(|_| fixture.job("a", 0)).collect()).await;
    fixture.submit_all((0..5).map(|_| fixture.job("b", 0)).collect()).await;
    let lane = fixture.lane_of(a[0]).await.id;
    let claim = async |limit| ids(&fixture.claim_lanes(fixture.node, vec![lane], limit, 1).await);
    assert_eq!(claim(0).await, []);
    assert_eq!(claim(2).await, a[..2]);
    assert_eq!(claim(9).await, a[2..]);
    assert_eq!(claim(9).await, []);
    assert_eq!(ids(&fixture.claim_lanes(fixture.node, vec![], 9, 1).await), []);
    assert_eq!(ids(&fixture.claim_lanes(fixture.node, vec![99_999], 9, 1).await), [], "an unknown lane");
    assert_eq!(fixture.claim(3, 1).await.len(), 3);
}

pub async fn a_lane_requested_twice_gives_its_jobs_once(fixture: &Fixture) {
    let all = fixture.submit_all((0..5).map(|_| fixture.job("a", 0)).collect()).await;
    let lane = fixture.lane_of(all[0]).await.id;
    assert_eq!(ids(&fixture.claim_lanes(fixture.node, vec![lane, lane], 3, 1).await), all[..3]);
}

pub async fn a_claimed_job_has_everything_a_worker_needs(fixture: &Fixture) {
    let job = NewJob { payload: "{\"x\":1}".into(), ..fixture.job("a", 3).correlation("c").retries(9) };
    let id = fixture.submit(job.clone()).await;
    let claimed = fixture.claim_one(5).await;
    assert_eq!((claimed.id, claimed.lane, claimed.ready_at), (id, fixture.lane_of(id).await.id, fixture.at(3)));
    assert_eq!((claimed.retry_count, claimed.must_record_start), (0, false));
    assert_eq!((claimed.payload.as_str(), claimed.correlation_id.as_deref()), ("{\"x\":1}", Some("c")));
    assert_eq!(claimed.options, job.options);
    let view = fixture.get(id).await;
    assert_eq!((view.status, view.run), (faena_domain::JobState::Assigned, Some(claimed.run)));
    assert_eq!(fixture.events(id).await, ["created", "queued", "assigned"]);
}

pub async fn a_job_is_claimed_by_one_worker_only(fixture: &Fixture) {
    const JOBS: usize = 5_000;
    let kinds = ["a", "b", "c"];
    fixture.submit_all((0..JOBS).map(|n| fixture.job(kinds[n % 3], 0)).collect()).await;
    let lanes = fixture.lanes().await;
    let tasks: Vec<_> = (0..4)
        .map(|_| {
            let (store, lanes, node, now) = (fixture.store.clone(), lanes.clone(), fixture.node, fixture.at(1));
            tokio::spawn(async move {
                let mut mine = Vec::new();
                loop {
                    let request = ClaimRequest {
                        owner: Owner::Node(node),
                        lanes: lanes.clone(),
                        limit: 37,
                        idle_slots: 37,
                        candidates: None,
                    };
                    let jobs = store.job_claim(vec![request], now).await.unwrap().remove(0).jobs;
                    if jobs.is_empty() {
                        return mine;
                    }
                    mine.extend(jobs.into_iter().map(|job| (job.id, job.run)));
                }
            })
        })
        .collect();
    let mut all = Vec::new();
    for task in tasks {
        all.extend(task.await.unwrap());
    }
    // A task stops at an empty claim, which may only mean that other claims had locked the rows; the last claim finds the rest.
    all.extend(fixture.claim(JOBS, 2).await.into_iter().map(|job| (job.id, job.run)));
    assert_eq!(all.len(), JOBS);
    assert_eq!(all.iter().map(|(id, _)| *id).collect::<HashSet<_>>().len(), JOBS);
}

pub async fn a_job_that_becomes_ready_before_the_last_claimed_one_is_found(fixture: &Fixture) {
    fixture.submit_all((0..10).map(|n| fixture.job("a", 1_000 + n)).collect()).await;
    fixture.claim(5, 2_000).await;
    let early = fixture.submit(fixture.job("a", 10)).await;
    assert_eq!(fixture.claim_one(2_000).await.id, early, "added by a submit");
    let delayed = fixture.submit(fixture.job("a", 20).scheduled(fixture.at(30))).await;
    fixture.claim(2, 2_000).await;
    fixture.promote(2_000).await;
    let found = fixture.claim_one(2_000).await;
    assert_eq!(found.id, delayed, "added by a promotion");
    fixture.claim(1, 2_000).await;
    fixture.release(&found, 2_001).await;
    assert_eq!(fixture.claim_one(2_002).await.id, delayed, "requeued by a release");
}

pub async fn run_numbers_only_grow(fixture: &Fixture) {
    let id = fixture.submit(fixture.job("a", 0)).await;
    let mut runs = Vec::new();
    let first = fixture.claim_one(1).await;
    fixture.retry_at(&first, 10, 2).await;
    fixture.promote(10).await;
    let second = fixture.claim_one(11).await;
    fixture.release(&second, 12).await;
    let third = fixture.claim_one(13).await;
    fixture.fail(&third, 14).await;
    fixture.retry_manually(id, 15).await;
    fixture.promote(16).await;
    let fourth = fixture.claim_one(17).await;
    runs.extend([first.run, second.run, third.run, fourth.run]);
    assert!(runs.is_sorted_by(|a, b| a < b), "{runs:?}");
    assert_eq!([first.retry_count, second.retry_count, third.retry_count, fourth.retry_count], [0, 1, 1, 0]);
    assert_eq!(fixture.get(id).await.run, Some(fourth.run));
}

/// The clock of the server that died was ahead, or the clock was set back after its death.
pub async fn a_log_keeps_its_order_if_clocks_go_back(fixture: &Fixture) {
    for (claimed_ms, recovered_ms) in [(2_000, 10), (2_000, 2_010)] {
        let id = fixture.submit(fixture.job("a", 0)).await;
        let lost = fixture.claim_as(NodeId::new(), 1, claimed_ms).await.remove(0);
        assert_eq!(fixture.recover(0, recovered_ms).await.returned, 1);
        let job = fixture.claim_one(20).await;
        assert!(fixture.end(&job, completed(), 30).await);
        let log = fixture.get(id).await.execution_log;
        let assigned = log.iter().filter(|entry| entry.event == LogEvent::Assigned);
        assert_eq!(assigned.map(|entry| entry.run).collect::<Vec<_>>(), [Some(lost.run), Some(job.run)], "{log:?}");
        assert_eq!(log.first().map(|entry| &entry.event), Some(&LogEvent::Created), "{log:?}");
        assert_eq!(log.last().map(|entry| &entry.event), Some(&LogEvent::Completed), "{log:?}");
    }
}
