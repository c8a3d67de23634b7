//! Compares Redis with the database and repairs Redis: at the start, after each reconnection, when Redis turns out to
//! be empty, and with each round of the guardian.
//!
//! A comparison adds missing entries, removes entries that no longer match a job, and puts back jobs that were taken
//! and never claimed. A round of the guardian reads only sets whose sizes differ; the other comparisons read all sets.
//! A comparison is safe while jobs are dispatched: if a concurrent change makes it add or remove an entry wrongly, that
//! costs one refused claim, or the next comparison repairs it.

use std::{
    collections::{HashMap, HashSet},
    sync::atomic::Ordering,
    time::Duration,
};

use faena_domain::{JobId, Timestamp, WorkerState};
use faena_queue::{Move, Placement, QueueSet, QueueStats, ReadyEntry, WorkerEntry};
use faena_store::{Counts, Lane, LaneId, QueueLocation, Tally};
use uuid::Uuid;

use super::{RedisDispatch, score};
use crate::{Engine, EngineError, Round, config::ms};

/// Rows or entries per page.
const PAGE: usize = 1_000;
/// Maximum number of pages of delayed jobs that one comparison reads if nothing was lost. The count of delayed jobs
/// also includes jobs that wait for their parents, so it may differ forever.
const DELAYED_PAGES: usize = 20;
/// Number of entries at which a lane counts as long.
const LONG_LANE: u64 = 20_000;
/// A comparison adds jobs that became ready up to this long after it began, because the clocks of nodes differ.
const OVERLAP_MS: i64 = 500;
/// Number of repaired entries that is worth a warning. Fewer may be changes that happened during the comparison.
const NOTABLE_DRIFT: u64 = 100;
/// Maximum number of workers that are written to Redis.
const MAX_WORKERS: usize = 1_000;

pub async fn run_once(engine: &Engine, now: Timestamp) -> Result<Round, EngineError> {
    let Some(redis) = &engine.queue.redis else { return Ok(Round::default()) };
    let lanes = engine.store.lanes().await?;
    let lane_ids: Vec<LaneId> = lanes.iter().map(|lane| lane.id).collect();
    engine.dispatch.lanes.load(&*engine.store, &lane_ids).await?;
    let result = redis.reconcile(engine, lanes, &lane_ids, now).await;
    if result.is_err() {
        redis.must_compare.store(true, Ordering::Release);
    }
    result
}

impl RedisDispatch {
    async fn reconcile(
        &self,
        engine: &Engine,
        lanes: Vec<Lane>,
        lane_ids: &[LaneId],
        now: Timestamp,
    ) -> Result<Round, EngineError> {
        let prepared = self.redis.prepare(lane_ids, now.as_ms()).await?;
        let connection = self.redis.connections();
        if prepared.had_foreign_keys {
            tracing::error!(
                "keys of the queue in Redis had values of another program and were deleted, set another queue.prefix"
            );
        }
        let is_new = self.compared_connection.swap(connection, Ordering::AcqRel) != connection;
        let is_requested = self.must_compare.swap(false, Ordering::AcqRel);
        let interval = engine.config.guardian_interval;
        let must_fill = prepared.must_fill || is_new || is_requested;
        if !must_fill
            && !self.redis.become_reconciler(engine.node_id().0, interval.min(Duration::from_secs(60))).await?
        {
            return Ok(Round::default());
        }
        let counts = engine.store.counts().await?;
        let stats = self.redis.stats(lane_ids).await?;
        let mut comparison =
            Comparison { engine, dispatch: self, full: must_fill, began_at: now, drift: 0, filled: HashSet::new() };
        comparison.compare_expired_leases(now).await?;
        comparison.compare_ready(lanes, &counts, &stats).await?;
        comparison.compare_delayed(&counts, &stats).await?;
        comparison.compare_dead_letters(lane_ids, &counts, &stats).await?;
        self.publish_workers(engine).await?;
        let Comparison { drift, filled, .. } = comparison;
        self.measures.last_drift.store(drift, Ordering::Relaxed);
        self.measures.repaired.fetch_add(drift, Ordering::Relaxed);
        if prepared.must_fill {
            self.measures.fills.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(entries = drift, "queue in Redis was empty, filled it from the database");
        } else if drift >= NOTABLE_DRIFT {
            tracing::warn!(entries = drift, "queue in Redis differed from the database, repaired");
        } else if drift > 0 {
            tracing::info!(entries = drift, "queue in Redis repaired");
        }
        let mut wake: Vec<LaneId> = filled.into_iter().collect();
        if must_fill {
            wake.extend(
                counts
                    .by_lane
                    .iter()
                    .filter(|((_, tally), n)| *tally == Tally::Queued && **n > 0)
                    .map(|((lane, _), _)| *lane),
            );
        }
        engine.store.signal_ready(&wake);
        Ok(Round::done(usize::try_from(drift).unwrap_or(usize::MAX)))
    }

    /// Writes the live workers to Redis, for programs that read them there.
    async fn publish_workers(&self, engine: &Engine) -> Result<(), EngineError> {
        let states = vec![WorkerState::Ready, WorkerState::Busy, WorkerState::Draining];
        let workers = engine.store.worker_list(states, MAX_WORKERS).await?;
        // The jobs of workers on other nodes are in `processing`.
        let jobs = engine.dispatch.in_flight.all();
        let current: HashMap<String, JobId> = jobs.iter().map(|job| (job.worker.to_string(), job.id())).collect();
        let entries: Vec<WorkerEntry> = workers
            .into_iter()
            .map(|worker| {
                let description = serde_json::json!({
                    "lastHeartbeat": worker.last_seen_at,
                    "capabilities": worker.capabilities,
                    "currentJob": current.get(&worker.registration_id),
                });
                WorkerEntry { id: worker.registration_id, description: description.to_string() }
            })
            .collect();
        Ok(self.redis.set_workers(&entries).await?)
    }
}

/// One comparison.
struct Comparison<'a> {
    engine: &'a Engine,
    dispatch: &'a RedisDispatch,
    /// Whether every set is read, even if its size matches.
    full: bool,
    began_at: Timestamp,
    /// Entries added or removed.
    drift: u64,
    /// Lanes to which entries were added.
    filled: HashSet<LaneId>,
}

impl Comparison<'_> {
    /// Compares ready jobs, those of high priority first.
    async fn compare_ready(
        &mut self,
        mut lanes: Vec<Lane>,
        counts: &Counts,
        stats: &QueueStats,
    ) -> Result<(), EngineError> {
        lanes.sort_by_key(|lane| (lane.priority.rank(), lane.id));
        // The same scripts change the set of all ready jobs and the sets of the lanes, so their sizes differ only if
        // another program has changed one of them.
        let sizes_differ = stats.priority != stats.lanes.values().sum::<u64>();
        let mut is_compared = false;
        for lane in &lanes {
            let in_database = tally(counts, lane.id, Tally::Queued);
            let in_redis = stats.lanes.get(&lane.id).copied().unwrap_or(0);
            if self.full || sizes_differ || differ(in_database, in_redis) {
                is_compared = true;
                let new = self.fill_lane(lane).await?;
                if has_too_many(in_database, in_redis, new) {
                    self.purge(QueueSet::Lane(lane.id), in_redis + new).await?;
                }
            }
        }
        if is_compared {
            let lane_ids: Vec<LaneId> = lanes.iter().map(|lane| lane.id).collect();
            let stats = self.dispatch.redis.stats(&lane_ids).await?;
            if stats.priority > stats.lanes.values().sum::<u64>() {
                self.purge(QueueSet::Priority, stats.priority).await?;
            }
        }
        Ok(())
    }

    /// Adds the ready jobs of a lane, and returns how many were missing.
    async fn fill_lane(&mut self, lane: &Lane) -> Result<u64, EngineError> {
        let mut after = None;
        let mut added = 0;
        loop {
            let mut page = self.engine.store.ready_page(lane.id, after, PAGE).await?;
            // `follow.rs` adds jobs that became ready later. If they were added here too, they would reappear after
            // they have run.
            page.retain(|position| position.at <= self.began_at.plus_ms(OVERLAP_MS));
            let entry = |at, id: JobId| Move::Put(ReadyEntry { id: id.0, lane: lane.id, score: score(lane, at) });
            let moves: Vec<Move> = page.iter().map(|position| entry(position.at, position.id)).collect();
            let new = self.dispatch.redis.apply(&moves, Placement::Fill).await?;
            if new > 0 {
                added += new;
                self.drift += new;
                self.filled.insert(lane.id);
                // The dispatcher need not wait for the other pages.
                self.engine.dispatch.lanes.add(lane.id);
            }
            after = page.last().copied();
            if page.len() < PAGE {
                return Ok(added);
            }
        }
    }

    /// Removes members of a set that do not belong there.
    ///
    /// Reads at most `counted` members, the size of the set at the last count. If jobs were submitted faster than this
    /// reads, it would otherwise never reach the end, and its queries would slow down the claims.
    async fn purge(&mut self, set: QueueSet, counted: u64) -> Result<(), EngineError> {
        let (mut from, mut read) = (0, 0);
        loop {
            let page = self.dispatch.redis.page(set, from, PAGE).await?;
            read += page.len() as u64;
            let ids: Vec<JobId> = page.iter().filter_map(|(member, _)| parse(member)).collect();
            let locations = self.engine.store.queue_locations(ids.clone()).await?;
            let locations: HashMap<JobId, QueueLocation> = ids.into_iter().zip(locations).collect();
            let mut wrong = Vec::new();
            let mut misplaced = Vec::new();
            for (member, _) in &page {
                let id = parse(member);
                match (set, id.and_then(|id| locations.get(&id).copied())) {
                    (QueueSet::Lane(lane), Some(QueueLocation::Ready { lane: actual, .. })) if lane == actual => {}
                    // The job is ready, so the entry belongs here. If the set of its lane lacks it, as when another program
                    // has added it here, it is added there too.
                    (QueueSet::Priority, Some(QueueLocation::Ready { lane, ready_at })) => {
                        misplaced.extend(id.zip(self.engine.dispatch.lanes.lane(lane)).map(|(id, known)| {
                            Move::Put(ReadyEntry { id: id.0, lane, score: score(&known, ready_at) })
                        }));
                    }
                    (QueueSet::Delayed, Some(QueueLocation::Delayed { .. })) => {}
                    (QueueSet::DeadLetters, Some(QueueLocation::Failed { .. })) => {}
                    _ => wrong.push(member.clone()),
                }
            }
            from += page.len() - wrong.len();
            self.dispatch.redis.remove_members(set, &wrong).await?;
            if let QueueSet::Lane(_) = set {
                self.dispatch.redis.remove_members(QueueSet::Priority, &wrong).await?;
            }
            misplaced.sort_by_key(|one| if let Move::Put(entry) = one { entry.lane } else { 0 });
            self.drift += wrong.len() as u64 + self.dispatch.redis.apply(&misplaced, Placement::Fill).await?;
            if page.len() < PAGE || read >= counted {
                return Ok(());
            }
        }
    }

    /// Compares jobs that wait for a time.
    async fn compare_delayed(&mut self, counts: &Counts, stats: &QueueStats) -> Result<(), EngineError> {
        let waiting = total(counts, Tally::Pending) + total(counts, Tally::Retrying);
        if !self.full && waiting == stats.delayed {
            return Ok(());
        }
        let mut after = None;
        for number in 1.. {
            let page = self.engine.store.delayed_page(after, PAGE).await?;
            let mut moves: Vec<Move> = page
                .iter()
                .map(|(lane, position)| {
                    Move::Delay(ReadyEntry { id: position.id.0, lane: *lane, score: position.at.as_ms() })
                })
                .collect();
            moves.sort_by_key(|one| if let Move::Delay(entry) = one { entry.lane } else { 0 });
            self.drift += self.dispatch.redis.apply(&moves, Placement::Fill).await?;
            after = page.last().map(|(_, position)| *position);
            if page.len() < PAGE || (!self.full && number == DELAYED_PAGES) {
                break;
            }
        }
        if self.full || stats.delayed > waiting {
            // The entries that this comparison has added may be anywhere in the set.
            let counted = self.dispatch.redis.stats(&[]).await?.delayed;
            self.purge(QueueSet::Delayed, counted).await?;
        }
        Ok(())
    }

    async fn compare_dead_letters(
        &mut self,
        lanes: &[LaneId],
        counts: &Counts,
        stats: &QueueStats,
    ) -> Result<(), EngineError> {
        if !self.full && total(counts, Tally::Failed) == stats.dead_letters {
            return Ok(());
        }
        for lane in lanes.iter().filter(|lane| tally(counts, **lane, Tally::Failed) > 0) {
            let mut after = None;
            loop {
                let page = self.engine.store.dead_page(*lane, after, PAGE).await?;
                let jobs: Vec<(Uuid, i64)> = page.iter().map(|job| (job.id.0, job.at.as_ms())).collect();
                self.drift += self.dispatch.redis.add_dead_letters(&jobs).await?;
                after = page.last().map(|job| job.id);
                if page.len() < PAGE {
                    break;
                }
            }
        }
        let counted = self.dispatch.redis.stats(&[]).await?.dead_letters;
        self.purge(QueueSet::DeadLetters, counted).await
    }

    /// Compares jobs in flight whose lease has ended: in the database they may be in another state.
    async fn compare_expired_leases(&mut self, now: Timestamp) -> Result<(), EngineError> {
        let redis = &self.dispatch.redis;
        let lease_until = now.plus_ms(ms(self.engine.config.guardian_interval) * 2).as_ms();
        loop {
            let members = redis.expired(now.as_ms(), PAGE).await?;
            let (known, foreign): (Vec<String>, Vec<String>) =
                members.iter().cloned().partition(|member| parse(member).is_some());
            redis.remove_processing(&foreign).await?;
            let ids: Vec<JobId> = known.iter().filter_map(|member| parse(member)).collect();
            let locations = self.engine.store.queue_locations(ids.clone()).await?;
            let mut running = Vec::new();
            let mut moves = Vec::new();
            for (id, location) in ids.into_iter().zip(locations) {
                match location {
                    QueueLocation::InFlight => running.push(id.0),
                    QueueLocation::Ready { lane, ready_at } => {
                        let Some(known) = self.engine.dispatch.lanes.lane(lane) else { continue };
                        moves.push(Move::Put(ReadyEntry { id: id.0, lane, score: score(&known, ready_at) }));
                        self.filled.insert(lane);
                    }
                    QueueLocation::Delayed { lane, due_at } => {
                        moves.push(Move::Delay(ReadyEntry { id: id.0, lane, score: due_at.as_ms() }));
                    }
                    QueueLocation::Failed { .. } | QueueLocation::Elsewhere => {
                        moves.push(Move::Remove { id: id.0, lane: 0 })
                    }
                }
            }
            self.drift += (moves.len() + foreign.len()) as u64;
            redis.renew(&running, lease_until).await?;
            redis.apply(&moves, Placement::Now).await?;
            if members.len() < PAGE {
                return Ok(());
            }
        }
    }
}

/// Returns whether a lane must be compared.
fn differ(in_database: u64, in_redis: u64) -> bool {
    in_database.abs_diff(in_redis) > tolerance(in_database.max(in_redis))
}

/// Returns whether a lane has entries that do not belong there.
///
/// For a long lane the entries that were just added do not count: some of these jobs may have been submitted meanwhile.
/// If the lane does have too many entries, the next comparison finds them.
fn has_too_many(in_database: u64, in_redis: u64, new: u64) -> bool {
    match tolerance(in_database.max(in_redis)) {
        0 => in_redis + new > in_database,
        tolerance => in_redis > in_database + tolerance,
    }
}

/// Returns by how many entries the two counts of a lane may differ.
///
/// They are not taken at the same moment, so those of a busy long lane differ. Reading the lane each time would cost
/// more than a wrong entry that stays until the lane is shorter.
fn tolerance(entries: u64) -> u64 {
    if entries >= LONG_LANE { LONG_LANE / 4 } else { 0 }
}

fn parse(member: &str) -> Option<JobId> {
    member.parse::<Uuid>().ok().map(JobId)
}

fn tally(counts: &Counts, lane: LaneId, tally: Tally) -> u64 {
    counts.by_lane.get(&(lane, tally)).map_or(0, |n| u64::try_from(*n).unwrap_or(0))
}

fn total(counts: &Counts, wanted: Tally) -> u64 {
    counts.by_lane.iter().filter(|((_, tally), _)| *tally == wanted).map(|(_, n)| u64::try_from(*n).unwrap_or(0)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_long_lanes_may_differ_while_jobs_come_and_go() {
        assert!(differ(0, 1) && differ(10, 9) && !differ(7, 7));
        assert!(!differ(100_000, 95_000) && differ(100_000, 94_999));
        assert!(has_too_many(10, 11, 0) && has_too_many(10, 8, 3) && !has_too_many(10, 8, 2));
        assert!(!has_too_many(100_000, 60_000, 90_000), "jobs that were submitted meanwhile are not too many");
        assert!(!has_too_many(100_000, 105_000, 0) && has_too_many(100_000, 105_001, 0));
    }
}
