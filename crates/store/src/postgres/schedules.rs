//! Schedules: definitions, due times and ticks.

use std::collections::HashMap;

use async_trait::async_trait;
use deadpool_postgres::Object;
use faena_domain::{
    JobId, ScheduleId, Timestamp,
    schedule::{Schedule, TickOutcome, TickRow},
};
use tokio_postgres::{Row, types::ToSql};
use uuid::Uuid;

use super::{Postgres, Shared, audit, change, dependents, end::storable, events, lanes::lane_of, read, submit};
use crate::{
    COUNT_LIMIT, CancelOutcome, Fired, LaneId, Result, ScheduleChange, ScheduleCounts, ScheduleFilter, SchedulePage,
    ScheduleStore, Signal, StoreError,
    events::SCHEDULER,
    lanes::LaneName,
    schedules::{self, CANCEL_REASON, COLUMNS, RejectedSchedules, ScheduleRow, UnreadableSchedules},
};

#[async_trait]
impl ScheduleStore for Postgres {
    async fn schedule_create(&self, schedule: Schedule, by: &str, now: Timestamp) -> Result<()> {
        self.shared.retrying(|| create(&self.shared, &schedule, by, now)).await
    }

    async fn schedule_patch(
        &self,
        id: ScheduleId,
        change: ScheduleChange,
        by: &str,
        now: Timestamp,
    ) -> Result<Option<Schedule>> {
        self.shared.retrying(|| patch(&self.shared, id, &change, by, now)).await
    }

    async fn schedule_delete(&self, id: ScheduleId, by: &str, now: Timestamp) -> Result<bool> {
        self.shared.retrying(|| delete(&self.shared, id, by, now)).await
    }

    async fn schedule_trigger(&self, id: ScheduleId, by: &str, now: Timestamp) -> Result<Option<JobId>> {
        self.shared.retrying(|| trigger(&self.shared, id, by, now)).await
    }

    async fn schedule_fire(&self, limit: usize, now: Timestamp) -> Result<Fired> {
        self.shared.retrying(|| fire(&self.shared, limit, now)).await
    }

    async fn schedule_get(&self, id: ScheduleId) -> Result<Option<Schedule>> {
        self.shared.retrying(|| get(&self.shared, id)).await
    }

    async fn schedule_list(&self, filter: ScheduleFilter, page: SchedulePage) -> Result<(Vec<Schedule>, u64)> {
        self.shared.retrying(|| list(&self.shared, &filter, page)).await
    }

    async fn schedule_ticks(&self, id: ScheduleId, before: Option<Timestamp>, limit: usize) -> Result<Vec<TickRow>> {
        self.shared.retrying(|| ticks(&self.shared, id, before, limit)).await
    }

    async fn schedule_tick_total(&self, id: ScheduleId, before: Option<Timestamp>) -> Result<u64> {
        self.shared.retrying(|| tick_total(&self.shared, id, before)).await
    }

    async fn schedule_counts(&self) -> Result<ScheduleCounts> {
        self.shared.retrying(|| counts(&self.shared)).await
    }
}

pub async fn create(shared: &Shared, schedule: &Schedule, by: &str, now: Timestamp) -> Result<()> {
    let client = shared.begin().await?;
    let result = create_in(&client, schedule, by, now).await;
    client.end(result).await?;
    shared.signal([Signal::Schedule]);
    Ok(())
}

async fn create_in(client: &Object, schedule: &Schedule, by: &str, now: Timestamp) -> Result<()> {
    client
        .execute(
            "INSERT INTO faena.schedule (id, name, spec, active, anchor_at, cursor_at, next_at, created_at, updated_at)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $8)",
            &[
                &schedule.id.0,
                &storable(&schedule.spec.name),
                &schedules::stored_spec(&schedule.spec),
                &schedule.is_active,
                &schedule.anchor_at.as_ms(),
                &schedule.cursor_at.as_ms(),
                &schedule.next_at.map(Timestamp::as_ms),
                &schedule.created_at.as_ms(),
            ],
        )
        .await?;
    audit::add(client, &schedules::audit_entry(by, "schedule.create", schedule), now).await
}

pub async fn patch(
    shared: &Shared,
    id: ScheduleId,
    change: &ScheduleChange,
    by: &str,
    now: Timestamp,
) -> Result<Option<Schedule>> {
    let client = shared.begin().await?;
    let mut after_commit = AfterCommit::default();
    let result = patch_in(shared, &client, id, change, by, &mut after_commit, now).await;
    let schedule = client.end(result).await?;
    after_commit.send(shared, now).await?;
    shared.signal([Signal::Schedule]);
    Ok(schedule)
}

async fn patch_in(
    shared: &Shared,
    client: &Object,
    id: ScheduleId,
    change: &ScheduleChange,
    by: &str,
    after_commit: &mut AfterCommit,
    now: Timestamp,
) -> Result<Option<Schedule>> {
    let Some(mut schedule) = locked(client, id).await? else { return Ok(None) };
    if schedule.is_active {
        // Due times up to now follow the old definition.
        let (mut processed, _) = fire_due(shared, client, vec![schedule], after_commit, now).await?;
        schedule = processed.swap_remove(0);
    }
    let schedule = schedules::apply_change(schedule, change, now)?;
    client
        .execute(
            "UPDATE faena.schedule SET name = $2, spec = $3, anchor_at = $4, updated_at = $5 WHERE id = $1",
            &[
                &schedule.id.0,
                &storable(&schedule.spec.name),
                &schedules::stored_spec(&schedule.spec),
                &schedule.anchor_at.as_ms(),
                &schedule.updated_at.as_ms(),
            ],
        )
        .await?;
    update_progress(client, std::slice::from_ref(&schedule)).await?;
    audit::add(client, &schedules::audit_entry(by, change.action, &schedule), now).await?;
    Ok(Some(schedule))
}

async fn locked(client: &Object, id: ScheduleId) -> Result<Option<Schedule>> {
    let sql = format!("SELECT {COLUMNS} FROM faena.schedule WHERE id = $1 FOR UPDATE");
    client.query_opt(&sql, &[&id.0]).await?.as_ref().map(|found| row(found).map_err(|(_, error)| error)).transpose()
}

/// Updates the progress columns of schedules (cursor, next due time, run count, recent jobs) but not their definitions.
async fn update_progress(client: &Object, processed: &[Schedule]) -> Result<()> {
    let ms = |at: Option<Timestamp>| at.map(Timestamp::as_ms);
    let column = |value: fn(&Schedule) -> Option<Timestamp>| processed.iter().map(|s| ms(value(s))).collect::<Vec<_>>();
    let ids: Vec<Uuid> = processed.iter().map(|schedule| schedule.id.0).collect();
    let active: Vec<bool> = processed.iter().map(|schedule| schedule.is_active).collect();
    let cursors: Vec<i64> = processed.iter().map(|schedule| schedule.cursor_at.as_ms()).collect();
    let nexts = column(|schedule| schedule.next_at);
    let runs: Vec<i64> = processed.iter().map(|schedule| i64::try_from(schedule.runs).unwrap_or(i64::MAX)).collect();
    let dues = column(|schedule| schedule.last_due_at);
    let ran = column(|schedule| schedule.last_run_at);
    let jobs: Vec<Option<Uuid>> = processed.iter().map(|schedule| schedule.last_job.map(|job| job.0)).collect();
    let recent: Vec<String> = processed.iter().map(schedules::stored_recent).collect();
    let queued: Vec<Option<Uuid>> = processed.iter().map(|schedule| schedule.queued.map(|job| job.0)).collect();
    let finished: Vec<Option<String>> = processed.iter().map(|schedule| schedule.finished.clone()).collect();
    let statement = client
        .prepare_cached(
            "UPDATE faena.schedule s SET active = m.active, cursor_at = m.cursor_at, next_at = m.next_at, runs = m.runs,
                 last_due_at = m.last_due_at, last_run_at = m.last_run_at, last_job = m.last_job, recent = m.recent, queued = m.queued,
                 finished = m.finished
             FROM unnest($1::uuid[], $2::bool[], $3::int8[], $4::int8[], $5::int8[], $6::int8[], $7::int8[], $8::uuid[], $9::text[], $10::uuid[],
                     $11::text[])
                 AS m(id, active, cursor_at, next_at, runs, last_due_at, last_run_at, last_job, recent, queued, finished)
             WHERE s.id = m.id",
        )
        .await?;
    let parameters: [&(dyn ToSql + Sync); 11] =
        [&ids, &active, &cursors, &nexts, &runs, &dues, &ran, &jobs, &recent, &queued, &finished];
    client.execute(&statement, &parameters).await?;
    Ok(())
}

pub async fn delete(shared: &Shared, id: ScheduleId, by: &str, now: Timestamp) -> Result<bool> {
    let client = shared.begin().await?;
    let result = delete_in(&client, id, by, now).await;
    client.end(result).await
}

async fn delete_in(client: &Object, id: ScheduleId, by: &str, now: Timestamp) -> Result<bool> {
    // The row is deleted first. This waits for a node that is firing the schedule, so that its ticks are visible below.
    let Some(row) = client.query_opt("DELETE FROM faena.schedule WHERE id = $1 RETURNING name", &[&id.0]).await? else {
        return Ok(false);
    };
    client.execute("DELETE FROM faena.tick WHERE schedule = $1", &[&id.0]).await?;
    audit::add(client, &schedules::delete_audit_entry(by, id, row.get(0)), now).await?;
    Ok(true)
}

pub async fn trigger(shared: &Shared, id: ScheduleId, by: &str, now: Timestamp) -> Result<Option<JobId>> {
    let client = shared.begin().await?;
    let mut submission = submit::NestedSubmission::default();
    let result = trigger_in(shared, &client, id, by, &mut submission, now).await;
    let job = client.end(result).await?;
    submission.signal(shared);
    Ok(job)
}

async fn trigger_in(
    shared: &Shared,
    client: &Object,
    id: ScheduleId,
    by: &str,
    submission: &mut submit::NestedSubmission,
    now: Timestamp,
) -> Result<Option<JobId>> {
    let Some(schedule) = locked(client, id).await? else { return Ok(None) };
    events::set_actor(client, by).await?;
    let at = next_free_time(client, id, now).await?;
    let mut compiled = schedule.compile().map_err(StoreError::Invalid)?;
    let lane = lane_of(shared, LaneName::of_template(&compiled.schedule.spec.job)).await?;
    let (job, tick) = compiled.trigger(at);
    let job_id = job.id;
    submission.store(client, shared.own_shard(), vec![job], vec![lane], now).await?;
    update_progress(client, std::slice::from_ref(&compiled.schedule)).await?;
    put_ticks(client, &[tick]).await?;
    audit::add(client, &schedules::trigger_audit_entry(by, job_id, &compiled.schedule), now).await?;
    Ok(Some(job_id))
}

/// Returns the first time from `now` on without a manual tick, so that two manual runs in one millisecond get separate ticks.
async fn next_free_time(client: &Object, id: ScheduleId, now: Timestamp) -> Result<Timestamp> {
    let sql = "SELECT max(due_at) FROM faena.tick WHERE schedule = $1 AND due_at >= $2 AND manual";
    let taken: Option<i64> = client.query_one(sql, &[&id.0, &now.as_ms()]).await?.get(0);
    Ok(taken.map_or(now, |taken| Timestamp::from_ms(taken + 1)))
}

/// What to do after the commit of a round: send signals, and release the dependents of ended jobs.
#[derive(Default)]
struct AfterCommit {
    submission: submit::NestedSubmission,
    ended: Vec<JobId>,
    cancel_requested: Vec<JobId>,
    jobs: change::AfterCommit,
}

impl AfterCommit {
    /// Sends the signals and releases dependents. Must be called after the commit.
    async fn send(self, shared: &Shared, now: Timestamp) -> Result<()> {
        self.submission.signal(shared);
        shared.signal(self.cancel_requested.into_iter().map(Signal::Cancel));
        self.jobs.send(shared);
        if !self.ended.is_empty() {
            dependents::release_dependents(shared, &self.ended, now).await?;
        }
        Ok(())
    }
}

pub async fn fire(shared: &Shared, limit: usize, now: Timestamp) -> Result<Fired> {
    let client = shared.begin().await?;
    let mut after_commit = AfterCommit::default();
    let result = fire_in(shared, &client, limit, &mut after_commit, now).await;
    let fired = client.end(result).await?;
    after_commit.send(shared, now).await?;
    Ok(fired)
}

async fn fire_in(
    shared: &Shared,
    client: &Object,
    limit: usize,
    after_commit: &mut AfterCommit,
    now: Timestamp,
) -> Result<Fired> {
    let (due, unreadable) = due(client, limit, now).await?;
    let (processed, ticks) = fire_due(shared, client, due, after_commit, now).await?;
    let count = processed.len() + unreadable.len();
    for (id, reason) in unreadable {
        client
            .execute(
                "UPDATE faena.schedule SET active = false, next_at = NULL, finished = $1 WHERE id = $2",
                &[&storable(&reason), &id.0],
            )
            .await?;
    }
    let next = client.query_one(NEXT_AT, &[]).await?;
    let next_at = next.get::<_, Option<i64>>(0).map(Timestamp::from_ms);
    Ok(Fired { schedules: count, ticks, next_at })
}

/// Fires due schedules: writes their jobs, ticks and progress. Stops early when the round is full, and returns the schedules
/// it processed.
async fn fire_due(
    shared: &Shared,
    client: &Object,
    due: Vec<Schedule>,
    after_commit: &mut AfterCommit,
    now: Timestamp,
) -> Result<(Vec<Schedule>, Vec<TickRow>)> {
    let mut lanes: HashMap<ScheduleId, LaneId> = HashMap::new();
    let mut rejected = RejectedSchedules::new();
    for schedule in &due {
        match lane_of(shared, LaneName::of_template(&schedule.spec.job)).await {
            Ok(lane) => drop(lanes.insert(schedule.id, lane)),
            Err(error) => drop(rejected.insert(schedule.id, schedules::rejection(error)?)),
        }
    }
    let states = read::states_of(client, &schedules::jobs_to_check(&due)).await?;
    events::set_actor(client, SCHEDULER).await?;
    let round = schedules::plan_round(due, &states, &rejected, now);
    for id in round.cancels {
        match change::cancel_in(client, shared.bulk_writes(), id, CANCEL_REASON, now).await {
            Ok((CancelOutcome::Cancelled, after_cancel)) => {
                after_commit.ended.push(id);
                after_commit.jobs.extend(after_cancel);
            }
            Ok((CancelOutcome::Requested { .. }, _)) => after_commit.cancel_requested.push(id),
            // The job has just ended, or was deleted.
            Err(StoreError::InvalidTransition { .. } | StoreError::NotFound(_)) => {}
            Err(error) => return Err(error),
        }
    }
    if !round.jobs.is_empty() {
        let lanes = round.job_schedules.iter().map(|id| lanes[id]).collect();
        after_commit.submission.store(client, shared.bulk_shard(), round.jobs, lanes, now).await?;
    }
    if !round.schedules.is_empty() {
        update_progress(client, &round.schedules).await?;
        put_ticks(client, &round.ticks).await?;
    }
    Ok((round.schedules, round.ticks))
}

/// Returns the statement that reads due schedules, the most overdue first. PostgreSQL: those that another node is
/// processing are skipped.
pub fn due_sql() -> String {
    format!("SELECT {COLUMNS} FROM faena.schedule WHERE next_at <= $1 ORDER BY next_at LIMIT $2 FOR UPDATE SKIP LOCKED")
}

pub const NEXT_AT: &str = "SELECT min(next_at) FROM faena.schedule WHERE next_at IS NOT NULL";

async fn due(client: &Object, limit: usize, now: Timestamp) -> Result<(Vec<Schedule>, UnreadableSchedules)> {
    let statement = client.prepare_cached(&due_sql()).await?;
    let rows = client.query(&statement, &[&now.as_ms(), &i64::try_from(limit).unwrap_or(i64::MAX)]).await?;
    Ok(schedules::split_rows(rows.iter().map(row).collect()))
}

async fn put_ticks(client: &Object, ticks: &[TickRow]) -> Result<()> {
    let ids: Vec<Uuid> = ticks.iter().map(|tick| tick.schedule_id.0).collect();
    let dues: Vec<i64> = ticks.iter().map(|tick| tick.due_at.as_ms()).collect();
    let manual: Vec<bool> = ticks.iter().map(|tick| tick.outcome == TickOutcome::Triggered).collect();
    let outcomes: Vec<i16> = ticks.iter().map(|tick| tick.outcome.code()).collect();
    let reasons: Vec<Option<String>> =
        ticks.iter().map(|tick| tick.reason.as_deref().map(|text| storable(text).into_owned())).collect();
    let jobs: Vec<Option<Uuid>> = ticks.iter().map(|tick| tick.job_id.map(|job| job.0)).collect();
    let ats: Vec<i64> = ticks.iter().map(|tick| tick.at.as_ms()).collect();
    let through: Vec<Option<i64>> = ticks.iter().map(|tick| tick.through_at.map(Timestamp::as_ms)).collect();
    let counts: Vec<Option<i64>> =
        ticks.iter().map(|tick| tick.count.map(|count| i64::try_from(count).unwrap_or(i64::MAX))).collect();
    let statement = client
        .prepare_cached(
            "INSERT INTO faena.tick (schedule, due_at, manual, outcome, reason, job, at, through_at, count)
             SELECT * FROM unnest($1::uuid[], $2::int8[], $3::bool[], $4::int2[], $5::text[], $6::uuid[], $7::int8[], $8::int8[],
                 $9::int8[])
             ON CONFLICT DO NOTHING",
        )
        .await?;
    let parameters: [&(dyn ToSql + Sync); 9] =
        [&ids, &dues, &manual, &outcomes, &reasons, &jobs, &ats, &through, &counts];
    client.execute(&statement, &parameters).await?;
    Ok(())
}

pub async fn get(shared: &Shared, id: ScheduleId) -> Result<Option<Schedule>> {
    let client = shared.client().await?;
    let found = get_in(&client, id).await;
    client.return_to_pool(found)
}

async fn get_in(client: &Object, id: ScheduleId) -> Result<Option<Schedule>> {
    let sql = format!("SELECT {COLUMNS} FROM faena.schedule WHERE id = $1");
    client.query_opt(&sql, &[&id.0]).await?.as_ref().map(|found| row(found).map_err(|(_, error)| error)).transpose()
}

pub async fn list(shared: &Shared, filter: &ScheduleFilter, page: SchedulePage) -> Result<(Vec<Schedule>, u64)> {
    let client = shared.client().await?;
    let found = list_in(&client, filter, page).await;
    client.return_to_pool(found)
}

async fn list_in(client: &Object, filter: &ScheduleFilter, page: SchedulePage) -> Result<(Vec<Schedule>, u64)> {
    let q = filter.q.as_deref().map(schedules::like);
    let name = filter.name.as_deref().map(storable);
    let which = "($1::bool IS NULL OR active = $1) AND ($2::text IS NULL OR name ILIKE $2 ESCAPE '\\')
                 AND ($3::text IS NULL OR name = $3)";
    let wanted: [&(dyn ToSql + Sync); 3] = [&filter.is_active, &q, &name];
    let total: i64 =
        client.query_one(&format!("SELECT count(*) FROM faena.schedule WHERE {which}"), &wanted).await?.get(0);
    let (limit, offset) =
        (i64::try_from(page.limit).unwrap_or(i64::MAX), i64::try_from(page.offset).unwrap_or(i64::MAX));
    let sql = format!(
        "SELECT {COLUMNS} FROM faena.schedule WHERE {which} ORDER BY name COLLATE \"C\", id LIMIT $4 OFFSET $5"
    );
    let rows = client.query(&sql, &[wanted[0], wanted[1], wanted[2], &limit, &offset]).await?;
    Ok((schedules::readable(rows.iter().map(row).collect()), u64::try_from(total).unwrap_or(0)))
}

pub async fn ticks(shared: &Shared, id: ScheduleId, before: Option<Timestamp>, limit: usize) -> Result<Vec<TickRow>> {
    let client = shared.client().await?;
    let found = ticks_in(&client, id, before, limit).await;
    client.return_to_pool(found)
}

async fn ticks_in(client: &Object, id: ScheduleId, before: Option<Timestamp>, limit: usize) -> Result<Vec<TickRow>> {
    let before = before.map_or(i64::MAX, Timestamp::as_ms);
    let rows = client
        .query(
            "SELECT due_at, outcome, reason, job, at, through_at, count FROM faena.tick
             WHERE schedule = $1 AND due_at < $2 ORDER BY due_at DESC, manual DESC LIMIT $3",
            &[&id.0, &before, &i64::try_from(limit).unwrap_or(i64::MAX)],
        )
        .await?;
    let tick = |row: &Row| TickRow {
        schedule_id: id,
        due_at: Timestamp::from_ms(row.get(0)),
        outcome: TickOutcome::from_code(row.get(1)).unwrap_or(TickOutcome::Missed),
        reason: row.get(2),
        job_id: row.get::<_, Option<Uuid>>(3).map(JobId),
        at: Timestamp::from_ms(row.get(4)),
        through_at: row.get::<_, Option<i64>>(5).map(Timestamp::from_ms),
        count: row.get::<_, Option<i64>>(6).map(i64::unsigned_abs),
    };
    Ok(rows.iter().map(tick).collect())
}

async fn tick_total(shared: &Shared, id: ScheduleId, before: Option<Timestamp>) -> Result<u64> {
    let sql = format!(
        "SELECT count(*) FROM (SELECT 1 FROM faena.tick WHERE schedule = $1 AND due_at < $2 LIMIT {COUNT_LIMIT}) x"
    );
    let before = before.map_or(i64::MAX, Timestamp::as_ms);
    let client = shared.client().await?;
    let row = client.query_one(&sql, &[&id.0, &before]).await.map_err(Into::into);
    Ok(client.return_to_pool(row)?.get::<_, i64>(0).unsigned_abs())
}

pub async fn counts(shared: &Shared) -> Result<ScheduleCounts> {
    let client = shared.client().await?;
    let row = client
        .query_one(
            "SELECT count(*) FILTER (WHERE active), count(*) FILTER (WHERE NOT active), coalesce(sum(runs), 0)::int8,
                    min(next_at) FILTER (WHERE active)
             FROM faena.schedule",
            &[],
        )
        .await
        .map_err(StoreError::from);
    let row = client.return_to_pool(row)?;
    let number = |column: usize| row.get::<_, i64>(column).unsigned_abs();
    Ok(ScheduleCounts {
        active: number(0),
        inactive: number(1),
        runs: number(2),
        next_at: row.get::<_, Option<i64>>(3).map(Timestamp::from_ms),
    })
}

/// Deletes up to `limit` ticks recorded before `before`: ticks are kept as long as finished jobs with the longest
/// retention.
pub async fn prune(client: &Object, before: Timestamp, limit: usize) -> Result<()> {
    client
        .execute(
            "DELETE FROM faena.tick WHERE ctid = ANY(ARRAY(SELECT ctid FROM faena.tick WHERE at < $1 ORDER BY at LIMIT $2))",
            &[&before.as_ms(), &i64::try_from(limit).unwrap_or(i64::MAX)],
        )
        .await?;
    Ok(())
}

fn row(row: &Row) -> ScheduleRow {
    let at = |column: usize| row.get::<_, Option<i64>>(column).map(Timestamp::from_ms);
    let job = |column: usize| row.get::<_, Option<Uuid>>(column).map(JobId);
    let id = ScheduleId(row.get(0));
    Ok(Schedule {
        id,
        spec: schedules::parse_spec(id, row.get(1))?,
        is_active: row.get(2),
        anchor_at: Timestamp::from_ms(row.get(3)),
        cursor_at: Timestamp::from_ms(row.get(4)),
        next_at: at(5),
        runs: row.get::<_, i64>(6).unsigned_abs(),
        last_due_at: at(7),
        last_run_at: at(8),
        last_job: job(9),
        recent: schedules::parse_recent(row.get(10)),
        queued: job(11),
        finished: row.get(12),
        created_at: Timestamp::from_ms(row.get(13)),
        updated_at: Timestamp::from_ms(row.get(14)),
    })
}
