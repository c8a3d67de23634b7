//! Claims of ready jobs.

use std::collections::HashSet;

use faena_domain::{JobId, NewJob, Priority};
use faena_store::{ClaimRequest, Owner};

use crate::support::*;

fn ids(jobs: &[faena_store::ClaimedJob]) -> Vec<JobId> {
    jobs.iter().map(|job| job.id).collect()
}

pub async fn a_claim_orders_by_score_so_waiting_outweighs_priority(world: &World) {
    let at = |ms, priority| world.job("a", ms).priority(priority);
    let old_low = world.submit(at(0, Priority::Low)).await;
    let normal = world.submit(at(1_000_001, Priority::Normal)).await;
    let high = world.submit(at(1_999_999, Priority::High)).await;
    let critical = world.submit(at(2_999_998, Priority::Critical)).await;

    // low 3 000 000, normal 3 000 001, high 2 999 999, critical 2 999 998
    assert_eq!(ids(&world.claim(2, 3_000_000).await), [critical, high]);
    assert_eq!(ids(&world.claim(2, 3_000_000).await), [old_low, normal]);
}

pub async fn a_strict_queue_never_prefers_a_lower_priority(world: &World) {
    make_strict(world, "line").await;
    let low = world.submit(world.job("a", 0).queue("line").priority(Priority::Low)).await;
    let low_2 = world.submit(world.job("a", 1).queue("line").priority(Priority::Low)).await;
    let critical = world.submit(world.job("a", 99_000_000).queue("line").priority(Priority::Critical)).await;
    assert_eq!(ids(&world.claim(3, 99_000_000).await), [critical, low, low_2]);
    world.store.close().await;
}

pub async fn equal_scores_are_ordered_by_id(world: &World) {
    let jobs: Vec<NewJob> = (0..50).map(|n| world.job(["a", "b"][n % 2], 7)).collect();
    let wanted: Vec<JobId> = jobs.iter().map(|job| job.id).collect();
    let mut shuffled = jobs;
    shuffled.reverse();
    world.submit_all(shuffled).await;
    assert_eq!(ids(&world.claim(50, 8).await), wanted);
}

pub async fn queues_take_turns(world: &World) {
    world.submit_all((0..20).map(|_| world.job("a", 0).queue("long")).collect()).await;
    world.submit_all((0..3).map(|_| world.job("a", 9).queue("short")).collect()).await;
    let mut queues = Vec::new();
    for job in world.claim(8, 10).await {
        queues.push(world.get(job.id).await.queue);
    }
    assert_eq!(queues.iter().filter(|queue| *queue == "short").count(), 3, "{queues:?}");
    assert_ne!(queues[0], queues[1]);
    assert_ne!(queues[2], queues[3]);
    let mut firsts = HashSet::new();
    world.submit_all((0..20).map(|_| world.job("a", 9).queue("short")).collect()).await;
    for _ in 0..4 {
        firsts.insert(world.get(world.claim_one(10).await.id).await.queue);
    }
    assert_eq!(firsts.len(), 2, "with one slot both are served");
}

pub async fn a_claim_returns_only_jobs_of_the_requested_lanes(world: &World) {
    let a = world.submit_all((0..5).map(|_| world.job("a", 0)).collect()).await;
    world.submit_all((0..5).map(|_| world.job("b", 0)).collect()).await;
    let lane = world.lane_of(a[0]).await.id;
    let ask = async |limit| ids(&world.claim_lanes(world.node, vec![lane], limit, 1).await);
    assert_eq!(ask(0).await, []);
    assert_eq!(ask(2).await, a[..2]);
    assert_eq!(ask(9).await, a[2..]);
    assert_eq!(ask(9).await, []);
    assert_eq!(ids(&world.claim_lanes(world.node, vec![], 9, 1).await), []);
    assert_eq!(ids(&world.claim_lanes(world.node, vec![99_999], 9, 1).await), [], "an unknown lane");
    assert_eq!(world.claim(3, 1).await.len(), 3);
}

pub async fn a_lane_requested_twice_gives_its_jobs_once(world: &World) {
    let all = world.submit_all((0..5).map(|_| world.job("a", 0)).collect()).await;
    let lane = world.lane_of(all[0]).await.id;
    assert_eq!(ids(&world.claim_lanes(world.node, vec![lane, lane], 3, 1).await), all[..3]);
}

pub async fn a_claimed_job_has_everything_a_worker_needs(world: &World) {
    let job = NewJob { payload: "{\"x\":1}".into(), ..world.job("a", 3).correlation("c").retries(9) };
    let id = world.submit(job.clone()).await;
    let claimed = world.claim_one(5).await;
    assert_eq!((claimed.id, claimed.lane, claimed.ready_at), (id, world.lane_of(id).await.id, world.at(3)));
    assert_eq!((claimed.retry_count, claimed.start_first), (0, false));
    assert_eq!((claimed.payload.as_str(), claimed.correlation_id.as_deref()), ("{\"x\":1}", Some("c")));
    assert_eq!(claimed.options, job.options);
    let view = world.get(id).await;
    assert_eq!((view.status, view.run), (faena_domain::JobState::Assigned, Some(claimed.run)));
    assert_eq!(world.events(id).await, ["created", "queued", "assigned"]);
}

pub async fn a_job_is_claimed_by_one_worker_only(world: &World) {
    const JOBS: usize = 5_000;
    let kinds = ["a", "b", "c"];
    world.submit_all((0..JOBS).map(|n| world.job(kinds[n % 3], 0)).collect()).await;
    let lanes = world.lanes().await;
    let tasks: Vec<_> = (0..4)
        .map(|_| {
            let (store, lanes, node, now) = (world.store.clone(), lanes.clone(), world.node, world.at(1));
            tokio::spawn(async move {
                let mut mine = Vec::new();
                loop {
                    let ask = ClaimRequest { owner: Owner::Node(node), lanes: lanes.clone(), limit: 37, at_once: 37 };
                    let jobs = store.job_claim(vec![ask], now).await.unwrap().remove(0).jobs;
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
    // A claim that found only rows locked by another may have stopped early; the next one finds the rest.
    all.extend(world.claim(JOBS, 2).await.into_iter().map(|job| (job.id, job.run)));
    assert_eq!(all.len(), JOBS);
    assert_eq!(all.iter().map(|(id, _)| *id).collect::<HashSet<_>>().len(), JOBS);
}

pub async fn a_job_that_becomes_ready_before_the_last_claimed_one_is_found(world: &World) {
    world.submit_all((0..10).map(|n| world.job("a", 1_000 + n)).collect()).await;
    world.claim(5, 2_000).await;
    let early = world.submit(world.job("a", 10)).await;
    assert_eq!(world.claim_one(2_000).await.id, early, "put in by a submit");
    let delayed = world.submit(world.job("a", 20).scheduled(world.at(30))).await;
    world.claim(2, 2_000).await;
    world.promote(2_000).await;
    let found = world.claim_one(2_000).await;
    assert_eq!(found.id, delayed, "put in by a promotion");
    world.claim(1, 2_000).await;
    world.hand_back(&found, 2_001).await;
    assert_eq!(world.claim_one(2_002).await.id, delayed, "put in by a hand-back");
}

pub async fn run_numbers_only_grow(world: &World) {
    let id = world.submit(world.job("a", 0)).await;
    let mut runs = Vec::new();
    let first = world.claim_one(1).await;
    world.retry_at(&first, 10, 2).await;
    world.promote(10).await;
    let second = world.claim_one(11).await;
    world.hand_back(&second, 12).await;
    let third = world.claim_one(13).await;
    world.fail(&third, 14).await;
    world.retry_by_person(id, 15).await;
    world.promote(16).await;
    let fourth = world.claim_one(17).await;
    runs.extend([first.run, second.run, third.run, fourth.run]);
    assert!(runs.is_sorted_by(|a, b| a < b), "{runs:?}");
    assert_eq!([first.retry_count, second.retry_count, third.retry_count, fourth.retry_count], [0, 1, 1, 0]);
    assert_eq!(world.get(id).await.run, Some(fourth.run));
}
