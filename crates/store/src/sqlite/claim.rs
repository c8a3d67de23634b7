//! Claim: ready jobs become a block.

use std::collections::{BTreeSet, HashSet};

use faena_domain::{JobId, Timestamp};
use rusqlite::OptionalExtension;
use uuid::Uuid;

use super::{submit::apply, writer::Tx};
use crate::{
    Claim, ClaimAsk, ClaimedJob, LaneId, Owner, Result, Tally,
    assemble::parse_options,
    deal::{Candidate, deal},
    plan::Deltas,
};

struct ReadyRow {
    lane: LaneId,
    retry_count: u32,
    start_first: bool,
}

/// One ask after the other. A thousand idle workers must not look a thousand times for one job.
pub fn claim(tx: &Tx, asks: Vec<ClaimAsk>, now: Timestamp) -> Result<Vec<Claim>> {
    let mut empty = HashSet::new();
    asks.into_iter()
        .map(|mut ask| {
            ask.lanes.retain(|lane| !empty.contains(lane));
            if ask.lanes.is_empty() {
                return Ok(Claim::default());
            }
            let (lanes, limit) = (ask.lanes.clone(), ask.limit);
            let claim = claim_one(tx, ask, now)?;
            if claim.jobs.len() < limit && !claim.refused {
                empty.extend(lanes);
            }
            Ok(claim)
        })
        .collect()
}

fn claim_one(tx: &Tx, ask: ClaimAsk, now: Timestamp) -> Result<Claim> {
    if !may_claim(tx, ask.owner)? {
        return Ok(Claim { refused: true, ..Claim::default() });
    }
    let mut candidates = Vec::new();
    let lanes: BTreeSet<LaneId> = ask.lanes.iter().copied().collect();
    for lane in &lanes {
        heads(tx, *lane, ask.limit, &mut candidates)?;
    }
    if candidates.is_empty() {
        return Ok(Claim::default());
    }
    let run: i64 = tx
        .connection
        .prepare_cached("UPDATE run_sequence SET last = last + 1 RETURNING last")?
        .query_row([], |row| row.get(0))?;
    let one_lane = lanes.len() == 1;
    let turn = usize::try_from(run).unwrap_or(0);
    let dealt = if one_lane { candidates } else { deal(candidates, ask.limit, turn) };

    let mut jobs = Vec::with_capacity(dealt.len());
    let mut deltas = Deltas::default();
    let mut ids = Vec::with_capacity(dealt.len() * 16);
    let mut retries = Vec::new();
    let mut first_ready_at = now;
    {
        let mut delete =
            tx.connection.prepare_cached("DELETE FROM ready WHERE lane = ? AND ready_at = ? AND id = ?")?;
        let mut payload = tx.connection.prepare_cached("SELECT correlation, options, payload FROM job WHERE id = ?")?;
        for candidate in dealt {
            let Candidate { id, ready_at, row, .. } = candidate;
            delete.execute((row.lane, ready_at.as_ms(), id.0))?;
            deltas.moved(row.lane, Tally::Queued, Tally::Held, 1);
            let found =
                payload.query_row([id.0], |r| Ok((r.get(0)?, r.get::<_, Option<String>>(1)?, r.get(2)?))).optional()?;
            let Some((correlation_id, options, payload)) = found else {
                continue;
            };
            ids.extend_from_slice(id.0.as_bytes());
            retries.extend_from_slice(&u16::try_from(row.retry_count).unwrap_or(u16::MAX).to_le_bytes());
            first_ready_at = first_ready_at.min(ready_at);
            jobs.push(ClaimedJob {
                id,
                run,
                lane: row.lane,
                ready_at,
                retry_count: row.retry_count,
                start_first: row.start_first,
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
            "INSERT INTO block (run, node, claimed_at, first_ready_at, ids, retries) VALUES (?, ?, ?, ?, ?, ?)",
        )?
        .execute((run, ask.owner.uuid(), now.as_ms(), first_ready_at.as_ms(), ids, retries))?;
    apply(tx, deltas);
    Ok(Claim { jobs, ..Claim::default() })
}

/// A worker that has ended, or has connected anew since, is handed nothing.
fn may_claim(tx: &Tx, owner: Owner) -> Result<bool> {
    let Owner::Worker { id, session } = owner else { return Ok(true) };
    Ok(tx
        .connection
        .prepare_cached("SELECT 1 FROM worker WHERE id = ? AND session = ? AND ended_at IS NULL")?
        .exists((id.0, session))?)
}

fn heads(tx: &Tx, lane: LaneId, limit: usize, into: &mut Vec<Candidate<ReadyRow>>) -> Result<()> {
    let known = match tx.shared.lanes.get(lane) {
        Some(lane) => lane,
        None => return Ok(()),
    };
    let ordering = tx.shared.rules.current().ordering(&known.queue);
    let mut statement = tx.connection.prepare_cached(
        "SELECT ready_at, id, retry_count, start_first FROM ready WHERE lane = ? ORDER BY ready_at, id LIMIT ?",
    )?;
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let mut rows = statement.query((lane, limit))?;
    while let Some(row) = rows.next()? {
        into.push(Candidate {
            queue: known.queue.clone(),
            ordering,
            priority: known.priority,
            ready_at: Timestamp::from_ms(row.get(0)?),
            id: JobId(row.get::<_, Uuid>(1)?),
            row: ReadyRow { lane, retry_count: row.get(2)?, start_first: row.get(3)? },
        });
    }
    Ok(())
}

/// The ids of a block with their retry counts.
pub fn block_jobs(ids: &[u8], retries: Option<&[u8]>) -> Vec<(JobId, u32)> {
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
