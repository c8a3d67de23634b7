//! Applies changes of the database to Redis, many in one round trip.

use std::collections::{BTreeSet, HashSet};

use faena_queue::{Move, Placement, ReadyEntry};
use faena_store::{LaneId, QueueChange, QueueChangeKind};
use uuid::Uuid;

use super::{RedisDispatch, score};
use crate::{Engine, EngineError, Round};

/// Maximum number of changes in one round trip.
const BATCH: usize = 1_000;

pub async fn run_once(engine: &Engine) -> Result<Round, EngineError> {
    let Some(redis) = &engine.queue.redis else { return Ok(Round::default()) };
    let feed = engine.store.queue_feed();
    if feed.take_overflow() {
        redis.request_comparison();
    }
    // A move waits until every change with an earlier stamp is applied, so it may belong to a later batch.
    let mut until = feed.stamp();
    let changes = feed.take(BATCH);
    if changes.len() == BATCH {
        until = changes.last().map_or(until, |last| last.stamp.min(until));
    }
    let (moves, has_more_moves) = redis.take_moves(BATCH, until);
    let more = changes.len() == BATCH || has_more_moves;
    if moves.is_empty() && changes.is_empty() {
        return Ok(Round { more, ..Round::default() });
    }
    let handled = moves.len() + changes.len();
    let ready_lanes: BTreeSet<LaneId> =
        changes.iter().filter(|change| change.kind == QueueChangeKind::Ready).map(|change| change.lane).collect();
    let lanes: Vec<LaneId> = changes.iter().map(|change| change.lane).collect();
    engine.dispatch.lanes.load(&*engine.store, &lanes).await?;
    let mut ordered: Vec<(u64, Move)> = changes.iter().filter_map(|change| stamped_move(engine, change)).collect();
    ordered.extend(moves);
    ordered.sort_by_key(|(stamp, _)| *stamp);
    let moves = without_ended_grants(ordered.into_iter().map(|(_, queue_move)| queue_move).collect());
    match redis.redis.apply(&moves, Placement::Now).await {
        Ok(_) => engine.store.signal_ready(&ready_lanes.into_iter().collect::<Vec<_>>()),
        // The next comparison with the database restores all of them.
        Err(error) => redis.record_failure(&error),
    }
    Ok(Round { handled, more, next_at: None })
}

/// Removes the grants of runs that end in the same batch: the end removes the job's entries anyway.
fn without_ended_grants(moves: Vec<Move>) -> Vec<Move> {
    let ended: HashSet<(Uuid, i64)> = moves
        .iter()
        .filter_map(|queue_move| if let Move::Finish(job) = queue_move { Some((job.id, job.run)) } else { None })
        .collect();
    let is_ended_grant =
        |candidate: &Move| matches!(candidate, Move::Grant(job) if job.was_taken && ended.contains(&(job.id, job.run)));
    moves.into_iter().filter(|queue_move| !is_ended_grant(queue_move)).collect()
}

/// Returns the move that applies a change, with the stamp of the change. Returns `None` if the lane is unknown.
fn stamped_move(engine: &Engine, change: &QueueChange) -> Option<(u64, Move)> {
    let lane = engine.dispatch.lanes.lane(change.lane)?;
    let entry = |score| ReadyEntry { id: change.id.0, lane: change.lane, score };
    let queue_move = match change.kind {
        QueueChangeKind::Ready => Move::Put(entry(score(&lane, change.at))),
        QueueChangeKind::Delayed => Move::Delay(entry(change.at.as_ms())),
        QueueChangeKind::Left => Move::Remove { id: change.id.0, lane: change.lane },
    };
    Some((change.stamp, queue_move))
}

impl RedisDispatch {
    /// Takes moves up to a stamp. Returns whether there are more.
    fn take_moves(&self, limit: usize, until: u64) -> (Vec<(u64, Move)>, bool) {
        let mut waiting = self.moves.lock();
        let count = waiting.iter().take(limit).take_while(|(stamp, _)| *stamp <= until).count();
        let taken = waiting.drain(..count).collect();
        (taken, !waiting.is_empty())
    }
}
