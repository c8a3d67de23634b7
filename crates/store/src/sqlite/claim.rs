//! Claims ready jobs.

use std::collections::{BTreeSet, HashSet};

use async_trait::async_trait;
use faena_domain::{Fairness, JobId, Rules, Timestamp};
use rusqlite::OptionalExtension;
use uuid::Uuid;

use super::{Sqlite, end, limited_claim, run_updates, submit::apply, writer::Tx};
use crate::{
    ClaimCandidate, ClaimRequest, ClaimResult, ClaimStore, ClaimedJob, LaneId, Owner, Result, RunEnd, RunUpdate, Tally,
    UpdateResult,
    admit::{self, LimitedClaim},
    assemble::parse_options,
    fair_share::{Candidate, select_fairly},
    plan::Deltas,
};

#[async_trait]
impl ClaimStore for Sqlite {
    async fn job_claim(&self, requests: Vec<ClaimRequest>, now: Timestamp) -> Result<Vec<ClaimResult>> {
        self.writer.call(move |tx| claim(tx, requests, now)).await
    }

    async fn run_update(&self, updates: Vec<RunUpdate>, _now: Timestamp) -> Result<Vec<UpdateResult>> {
        self.writer.call_with_weight(2 * updates.len(), move |tx| run_updates::write_updates(tx, updates)).await
    }

    async fn job_end(&self, ends: Vec<RunEnd>, now: Timestamp) -> Result<Vec<bool>> {
        self.writer.call_with_weight(ends.len(), move |tx| end::end(tx, ends, now)).await
    }
}

pub struct ReadyRow {
    pub lane: LaneId,
    pub key: Option<i64>,
    pub retry_count: u32,
    pub must_record_start: bool,
}

/// Serves one request after the other, and skips the lanes that an earlier one has emptied: a thousand idle workers must not search a
/// thousand times for one job.
pub fn claim(tx: &Tx, requests: Vec<ClaimRequest>, now: Timestamp) -> Result<Vec<ClaimResult>> {
    let mut empty = HashSet::new();
    let rules = tx.shared.rules.current();
    requests
        .into_iter()
        .map(|mut request| {
            request.lanes.retain(|lane| !empty.contains(lane));
            if request.lanes.is_empty() {
                return Ok(ClaimResult::default());
            }
            let (lanes, limit, takes_any_job) = (request.lanes.clone(), request.limit, request.candidates.is_none());
            let LimitedClaim { claim, prefetch_limited } = claim_by_rules(tx, request, &rules, now)?;
            if takes_any_job && claim.jobs.len() < limit && !claim.rejected {
                empty.extend(lanes.into_iter().filter(|lane| !prefetch_limited.contains(lane)));
            }
            Ok(claim)
        })
        .collect()
}

/// Claims jobs, with a fast path for lanes without limits.
fn claim_by_rules(tx: &Tx, mut request: ClaimRequest, rules: &Rules, now: Timestamp) -> Result<LimitedClaim> {
    if rules.limits.is_empty() && rules.queues.is_empty() && !tx.shared.lanes.any_keyed(request.lanes.iter().copied()) {
        return Ok(claim_one(tx, request, now)?.into());
    }
    let lanes = admit::distinct(request.lanes).into_iter().filter_map(|lane| tx.shared.lanes.get(lane)).collect();
    let (lanes, mut limited) = admit::split_paused(rules, lanes);
    let mut claim: LimitedClaim = if admit::has_limits_or_keys(rules, &lanes) {
        request.lanes = Vec::new();
        limited_claim::claim(tx, request, &lanes, rules, now)?
    } else {
        request.lanes = lanes.into_iter().map(|lane| lane.id).collect();
        claim_one(tx, request, now)?.into()
    };
    claim.claim.limited.append(&mut limited);
    Ok(claim)
}

fn claim_one(tx: &Tx, request: ClaimRequest, now: Timestamp) -> Result<ClaimResult> {
    if !may_claim(tx, request.owner)? {
        return Ok(ClaimResult { rejected: true, ..ClaimResult::default() });
    }
    let mut candidates = Vec::new();
    let lanes: BTreeSet<LaneId> = request.lanes.iter().copied().collect();
    match &request.candidates {
        Some(chosen) => {
            for candidate in chosen.iter().filter(|candidate| lanes.contains(&candidate.lane)) {
                candidates.extend(if_ready(tx, candidate)?);
            }
        }
        None => {
            for lane in &lanes {
                add_first_ready(tx, *lane, request.limit, &mut candidates)?;
            }
        }
    }
    if candidates.is_empty() {
        return Ok(ClaimResult::default());
    }
    let run = next_run(tx)?;
    let one_lane = lanes.len() == 1;
    let first_queue = usize::try_from(run).unwrap_or(0);
    candidates.truncate(if request.candidates.is_some() { request.limit } else { usize::MAX });
    let selected = if one_lane { candidates } else { select_fairly(candidates, request.limit, first_queue) };
    let rows = selected.into_iter().map(|candidate| (candidate.id, candidate.ready_at, candidate.row));
    Ok(ClaimResult { jobs: write_claim(tx, run, request.owner, rows, now)?, ..ClaimResult::default() })
}

pub fn next_run(tx: &Tx) -> Result<i64> {
    Ok(tx
        .connection
        .prepare_cached("UPDATE run_sequence SET last = last + 1 RETURNING last")?
        .query_row([], |row| row.get(0))?)
}

/// Writes the claim of these jobs.
pub fn write_claim(
    tx: &Tx,
    run: i64,
    owner: Owner,
    rows: impl ExactSizeIterator<Item = (JobId, Timestamp, ReadyRow)>,
    now: Timestamp,
) -> Result<Vec<ClaimedJob>> {
    let mut jobs = Vec::with_capacity(rows.len());
    let mut deltas = Deltas::default();
    let mut ids = Vec::with_capacity(rows.len() * 16);
    let mut retries = Vec::new();
    let mut first_ready_at = now;
    {
        let mut delete =
            tx.connection.prepare_cached("DELETE FROM ready WHERE lane = ? AND ready_at = ? AND id = ?")?;
        let mut payload = tx.connection.prepare_cached("SELECT correlation, options, payload FROM job WHERE id = ?")?;
        for (id, ready_at, row) in rows {
            delete.execute((row.lane, ready_at.as_ms(), id.0))?;
            deltas.moved(row.lane, Tally::Queued, Tally::InFlight, 1);
            let found =
                payload.query_row([id.0], |r| Ok((r.get(0)?, r.get::<_, Option<String>>(1)?, r.get(2)?))).optional()?;
            let Some((correlation_id, options, payload)) = found else {
                continue;
            };
            if let Some(key) = row.key {
                tx.connection
                    .prepare_cached("INSERT OR IGNORE INTO key_in_flight (key, id) VALUES (?, ?)")?
                    .execute((key, id.0))?;
            }
            ids.extend_from_slice(id.0.as_bytes());
            retries.extend_from_slice(&u16::try_from(row.retry_count).unwrap_or(u16::MAX).to_le_bytes());
            first_ready_at = first_ready_at.min(ready_at);
            jobs.push(ClaimedJob {
                id,
                run,
                lane: row.lane,
                ready_at,
                retry_count: row.retry_count,
                must_record_start: row.must_record_start,
                limited: None,
                correlation_id,
                options: parse_options(options.as_deref())?,
                payload,
            });
        }
    }
    let retries = retries.iter().any(|byte| *byte != 0).then_some(retries);
    tx.connection
        .prepare_cached(
            "INSERT INTO claim (run, owner, claimed_at, first_ready_at, ids, retries) VALUES (?, ?, ?, ?, ?, ?)",
        )?
        .execute((run, owner.uuid(), now.as_ms(), first_ready_at.as_ms(), ids, retries))?;
    apply(tx, deltas);
    Ok(jobs)
}

/// Returns whether an owner may claim: a node always, a worker only while it is alive and has not reconnected.
pub fn may_claim(tx: &Tx, owner: Owner) -> Result<bool> {
    let Owner::Worker { id, session } = owner else { return Ok(true) };
    Ok(tx
        .connection
        .prepare_cached("SELECT 1 FROM worker WHERE id = ? AND session = ? AND ended_at IS NULL")?
        .exists((id.0, session))?)
}

/// Adds the first ready jobs of a lane to `into`.
fn add_first_ready(tx: &Tx, lane: LaneId, limit: usize, into: &mut Vec<Candidate<ReadyRow>>) -> Result<()> {
    let known = match tx.shared.lanes.get(lane) {
        Some(lane) => lane,
        None => return Ok(()),
    };
    let claim_order = tx.shared.rules.current().claim_order(&known.queue);
    let mut statement = tx.connection.prepare_cached(
        "SELECT ready_at, id, retry_count, must_record_start FROM ready WHERE lane = ? ORDER BY ready_at, id LIMIT ?",
    )?;
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let mut rows = statement.query((lane, limit))?;
    while let Some(row) = rows.next()? {
        into.push(Candidate {
            queue: known.queue.clone(),
            claim_order,
            fairness: Fairness::None,
            key: None,
            last_served_at: 0,
            priority: known.priority,
            ready_at: Timestamp::from_ms(row.get(0)?),
            id: JobId(row.get::<_, Uuid>(1)?),
            row: ReadyRow { lane, key: None, retry_count: row.get(2)?, must_record_start: row.get(3)? },
        });
    }
    Ok(())
}

/// Returns the candidate if it is still ready in its lane.
fn if_ready(tx: &Tx, candidate: &ClaimCandidate) -> Result<Option<Candidate<ReadyRow>>> {
    let Some(known) = tx.shared.lanes.get(candidate.lane) else { return Ok(None) };
    let Some((retry_count, must_record_start)) = ready_row(tx, candidate)? else { return Ok(None) };
    Ok(Some(Candidate {
        claim_order: tx.shared.rules.current().claim_order(&known.queue),
        queue: known.queue,
        fairness: Fairness::None,
        key: None,
        last_served_at: 0,
        priority: known.priority,
        ready_at: candidate.ready_at,
        id: candidate.id,
        row: ReadyRow { lane: candidate.lane, key: None, retry_count, must_record_start },
    }))
}

/// Returns the retry count of a ready job and whether its start must be recorded.
pub fn ready_row(tx: &Tx, candidate: &ClaimCandidate) -> Result<Option<(u32, bool)>> {
    Ok(tx
        .connection
        .prepare_cached("SELECT retry_count, must_record_start FROM ready WHERE lane = ? AND ready_at = ? AND id = ?")?
        .query_row((candidate.lane, candidate.ready_at.as_ms(), candidate.id.0), |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?)
}

/// Decodes the columns `ids` and `retries` of a claim: its jobs with their retry counts.
pub fn decode_claimed_jobs(ids: &[u8], retries: Option<&[u8]>) -> Vec<(JobId, u32)> {
    ids.chunks_exact(16)
        .enumerate()
        .filter_map(|(at, bytes)| {
            let id = JobId(Uuid::from_slice(bytes).ok()?);
            let retry =
                retries.and_then(|all| all.get(at * 2..at * 2 + 2)).map_or(0, |b| u16::from_le_bytes([b[0], b[1]]));
            Some((id, u32::from(retry)))
        })
        .collect()
}
