//! Each move changes all sets together, and may be repeated.

use faena_queue::{
    FinishedJob, GrantedJob, LaneTake, Move, Placement, QueueError, QueueSet, ReadyEntry, RedisQueue, RunResult,
    TakeRequest,
};
use uuid::Uuid;

use crate::servers::shared;

const LANES: [i32; 3] = [1, 2, 3];

async fn prepared() -> (RedisQueue, String) {
    let (queue, prefix) = shared();
    let prepared = queue.prepare(&LANES, 1).await.unwrap();
    assert!(prepared.must_fill && prepared.found.is_none());
    (queue, prefix)
}

fn job(lane: i32, score: i64) -> ReadyEntry {
    ReadyEntry { id: Uuid::now_v7(), lane, score }
}

fn request(limit: usize, lanes: &[(i32, usize, i64)]) -> TakeRequest {
    let lanes = lanes.iter().map(|(lane, queue, bias)| LaneTake { lane: *lane, queue: *queue, bias: *bias }).collect();
    TakeRequest { owner: Uuid::nil(), limit, first_queue: 0, lanes }
}

async fn put(queue: &RedisQueue, jobs: &[ReadyEntry]) -> u64 {
    let moves: Vec<Move> = jobs.iter().copied().map(Move::Put).collect();
    queue.apply(&moves, Placement::Now).await.unwrap()
}

async fn counts(queue: &RedisQueue) -> (u64, u64, u64, u64) {
    let stats = queue.stats(&LANES).await.unwrap();
    assert_eq!(
        stats.lanes.values().sum::<u64>(),
        stats.priority,
        "each ready job is in the set of its lane and in the set of all"
    );
    (stats.priority, stats.delayed, stats.processing, stats.dead_letters)
}

#[tokio::test]
async fn a_job_is_taken_once_and_is_in_flight_from_that_moment() {
    let (queue, _) = prepared().await;
    let jobs = [job(1, 10), job(1, 20)];
    assert_eq!(put(&queue, &jobs).await, 2);
    assert_eq!(put(&queue, &jobs).await, 0, "putting it again changes nothing");
    let taken = queue.take(&[request(1, &[(1, 0, 0)]), request(5, &[(1, 0, 0)])], 1_000).await.unwrap();
    assert_eq!(taken, [vec![jobs[0]], vec![jobs[1]]]);
    assert_eq!(counts(&queue).await, (0, 0, 2, 0));
    assert!(queue.expired(999, 10).await.unwrap().is_empty());
    assert_eq!(queue.expired(1_000, 10).await.unwrap().len(), 2, "Redis knows the jobs that were taken");
}

#[tokio::test]
async fn jobs_leave_by_score_and_queues_take_turns() {
    let (queue, _) = prepared().await;
    let [a, b, c, d] = [job(1, 30), job(2, 10), job(2, 40), job(3, 99)];
    put(&queue, &[a, b, c, d]).await;
    // Lanes 1 and 2 belong to one queue, lane 3 to another.
    let lanes = [(1, 0, 0), (2, 0, 0), (3, 1, 0)];
    let taken = queue.take(&[request(10, &lanes)], 1).await.unwrap();
    assert_eq!(taken[0], [b, d, a, c]);
}

#[tokio::test]
async fn a_bias_puts_a_lane_behind_another_however_long_its_jobs_waited() {
    let (queue, _) = prepared().await;
    let (old, new) = (job(1, 5), job(2, 1_000_000));
    put(&queue, &[old, new]).await;
    let taken = queue.take(&[request(2, &[(1, 0, 1 << 48), (2, 0, 0)])], 1).await.unwrap();
    assert_eq!(taken[0], [new, old]);
}

#[tokio::test]
async fn many_jobs_leave_a_lane_in_order() {
    let (queue, _) = prepared().await;
    let jobs: Vec<ReadyEntry> = (0..2_500).map(|at| job(1, at)).collect();
    assert_eq!(put(&queue, &jobs).await, 2_500);
    let requests = [request(1_000, &[(1, 0, 0)]), request(700, &[(1, 0, 0), (2, 0, 0)]), request(1_000, &[(1, 0, 0)])];
    let taken = queue.take(&requests, 1).await.unwrap().concat();
    assert_eq!(taken, jobs);
    assert_eq!(counts(&queue).await, (0, 0, 2_500, 0));
}

#[tokio::test]
async fn a_job_moves_from_set_to_set_during_its_life() {
    let (queue, _) = prepared().await;
    let entry = job(1, 10);
    queue.apply(&[Move::Delay(ReadyEntry { score: 500, ..entry })], Placement::Now).await.unwrap();
    assert_eq!(counts(&queue).await, (0, 1, 0, 0));
    put(&queue, &[entry]).await;
    assert_eq!(counts(&queue).await, (1, 0, 0, 0), "promoted in one step");
    queue.take(&[request(1, &[(1, 0, 0)])], 10).await.unwrap();
    let granted = GrantedJob { id: entry.id, lane: 1, owner: Uuid::nil(), run: 7, was_taken: true, lease_until_ms: 50 };
    let finished = FinishedJob { id: entry.id, run: 6, result: RunResult::Other, at_ms: 60 };
    queue.apply(&[Move::Grant(granted), Move::Finish(finished)], Placement::Now).await.unwrap();
    assert_eq!(counts(&queue).await, (0, 0, 1, 0), "the end of an earlier run changes nothing");
    let finished = FinishedJob { run: 7, result: RunResult::Failed, ..finished };
    queue.apply(&[Move::Finish(finished)], Placement::Now).await.unwrap();
    assert_eq!(counts(&queue).await, (0, 0, 0, 1));
    put(&queue, &[entry]).await;
    assert_eq!(counts(&queue).await, (1, 0, 0, 0), "a retried job is no longer a dead letter");
    queue.apply(&[Move::Remove { id: entry.id, lane: 1 }], Placement::Now).await.unwrap();
    assert_eq!(counts(&queue).await, (0, 0, 0, 0));
}

#[tokio::test]
async fn a_job_that_the_database_chose_leaves_the_ready_sets_with_its_run() {
    let (queue, _) = prepared().await;
    let [taken, chosen] = [job(1, 10), job(1, 20)];
    put(&queue, &[taken, chosen]).await;
    queue.take(&[request(1, &[(1, 0, 0)])], 10).await.unwrap();
    let granted = [(taken.id, true), (chosen.id, false)].map(|(id, was_taken)| {
        Move::Grant(GrantedJob { id, lane: 1, owner: Uuid::nil(), run: 7, was_taken, lease_until_ms: 50 })
    });
    queue.apply(&granted, Placement::Now).await.unwrap();
    assert_eq!(counts(&queue).await, (0, 0, 2, 0));
    assert_eq!(queue.expired(50, 10).await.unwrap().len(), 2);
    assert!(queue.expired(49, 10).await.unwrap().is_empty(), "both count until the end of their leases");
}

#[tokio::test]
async fn filling_leaves_jobs_in_flight_alone() {
    let (queue, _) = prepared().await;
    let (running, lost) = (job(1, 10), job(1, 20));
    put(&queue, &[running]).await;
    queue.take(&[request(1, &[(1, 0, 0)])], 10).await.unwrap();
    let moves = [Move::Put(running), Move::Put(lost)];
    assert_eq!(queue.apply(&moves, Placement::Fill).await.unwrap(), 1);
    assert_eq!(counts(&queue).await, (1, 0, 1, 0));
}

#[tokio::test]
async fn operations_fail_until_the_queue_is_filled() {
    let (queue, _) = shared();
    assert_eq!(queue.take(&[request(1, &[(1, 0, 0)])], 1).await, Err(QueueError::NotFilled));
    assert_eq!(queue.stats(&LANES).await, Err(QueueError::NotFilled));
    assert_eq!(queue.apply(&[Move::Put(job(1, 1))], Placement::Fill).await, Err(QueueError::NotFilled));
}

#[tokio::test]
async fn an_older_format_is_replaced_and_a_newer_format_is_refused() {
    let (queue, prefix) = prepared().await;
    put(&queue, &[job(1, 1)]).await;
    assert!(!queue.prepare(&LANES, 2).await.unwrap().must_fill, "nothing to do for the current format");
    let url = std::env::var("FAENA_TEST_REDIS").unwrap();
    crate::servers::command(&url, &["HSET", &format!("{prefix}:faena"), "format", "0"]).await;
    assert_eq!(queue.stats(&LANES).await, Err(QueueError::NotFilled));
    assert!(queue.prepare(&LANES, 3).await.unwrap().must_fill);
    assert_eq!(counts(&queue).await, (0, 0, 0, 0));
    crate::servers::command(&url, &["HSET", &format!("{prefix}:faena"), "format", "99"]).await;
    assert_eq!(queue.prepare(&LANES, 4).await, Err(QueueError::NewerFormat { found: 99, known: 1 }));
}

#[tokio::test]
async fn a_key_of_another_program_is_reported_and_replaced() {
    let (queue, prefix) = prepared().await;
    put(&queue, &[job(1, 1)]).await;
    let url = std::env::var("FAENA_TEST_REDIS").unwrap();
    crate::servers::command(&url, &["SET", &format!("{prefix}:queue:priority"), "mine"]).await;
    let error = queue.apply(&[Move::Put(job(1, 2))], Placement::Now).await.unwrap_err();
    assert!(matches!(error, QueueError::ForeignKey { .. }), "{error}");
    let prepared = queue.prepare(&LANES, 2).await.unwrap();
    assert!(prepared.had_foreign_keys && prepared.must_fill, "{prepared:?}");
    assert_eq!(put(&queue, &[job(1, 3)]).await, 1);
}

#[tokio::test]
async fn members_of_other_programs_are_read_as_they_are() {
    let (queue, prefix) = prepared().await;
    let url = std::env::var("FAENA_TEST_REDIS").unwrap();
    crate::servers::command(&url, &["ZADD", &format!("{prefix}:queue:priority"), "1.5", "hello"]).await;
    assert_eq!(queue.page(QueueSet::Priority, 0, 10).await.unwrap(), [("hello".to_owned(), 1)]);
    queue.remove_members(QueueSet::Priority, &["hello".into()]).await.unwrap();
    assert!(queue.page(QueueSet::Priority, 0, 10).await.unwrap().is_empty());
}

#[tokio::test]
async fn one_node_at_a_time_is_the_reconciler() {
    let (queue, _) = prepared().await;
    let (one, other) = (Uuid::now_v7(), Uuid::now_v7());
    let long = std::time::Duration::from_secs(60);
    assert!(queue.become_reconciler(one, long).await.unwrap());
    assert!(!queue.become_reconciler(other, long).await.unwrap());
    assert!(queue.become_reconciler(one, long).await.unwrap());
}
