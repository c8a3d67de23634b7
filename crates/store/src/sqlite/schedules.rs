//! Schedules: definitions, due times and ticks.

use async_trait::async_trait;
use faena_domain::{
    JobId, ScheduleId, Timestamp,
    schedule::{JobStates, Schedule, TickOutcome, TickRow},
};
use rusqlite::{Connection, OptionalExtension, Row};

use super::{Sqlite, audit, change, events, lanes::lane_of, read, submit::submit, writer::Tx};
use crate::{
    COUNT_LIMIT, Fired, Result, ScheduleChange, ScheduleCounts, ScheduleFilter, SchedulePage, ScheduleStore, Signal,
    StoreError,
    events::SCHEDULER,
    lanes::LaneName,
    schedules::{self, CANCEL_REASON, COLUMNS, RejectedSchedules, ScheduleRow, UnreadableSchedules},
};

#[async_trait]
impl ScheduleStore for Sqlite {
    async fn schedule_create(&self, schedule: Schedule, by: &str, now: Timestamp) -> Result<()> {
        let by = by.to_owned();
        self.writer.call(move |tx| create(tx, &schedule, &by, now)).await
    }

    async fn schedule_patch(
        &self,
        id: ScheduleId,
        change: ScheduleChange,
        by: &str,
        now: Timestamp,
    ) -> Result<Option<Schedule>> {
        let by = by.to_owned();
        self.writer.call(move |tx| patch(tx, id, &change, &by, now)).await
    }

    async fn schedule_delete(&self, id: ScheduleId, by: &str, now: Timestamp) -> Result<bool> {
        let by = by.to_owned();
        self.writer.call(move |tx| delete(tx, id, &by, now)).await
    }

    async fn schedule_trigger(&self, id: ScheduleId, by: &str, now: Timestamp) -> Result<Option<JobId>> {
        let by = by.to_owned();
        self.writer.call(move |tx| trigger(tx, id, &by, now)).await
    }

    async fn schedule_fire(&self, limit: usize, now: Timestamp) -> Result<Fired> {
        self.writer.call(move |tx| fire(tx, limit, now)).await
    }

    async fn schedule_get(&self, id: ScheduleId) -> Result<Option<Schedule>> {
        self.read(move |connection, _| get(connection, id)).await
    }

    async fn schedule_list(&self, filter: ScheduleFilter, page: SchedulePage) -> Result<(Vec<Schedule>, u64)> {
        self.read(move |connection, _| list(connection, &filter, page)).await
    }

    async fn schedule_ticks(&self, id: ScheduleId, before: Option<Timestamp>, limit: usize) -> Result<Vec<TickRow>> {
        self.read(move |connection, _| ticks(connection, id, before, limit)).await
    }

    async fn schedule_tick_total(&self, id: ScheduleId, before: Option<Timestamp>) -> Result<u64> {
        self.read(move |connection, _| tick_total(connection, id, before)).await
    }

    async fn schedule_counts(&self) -> Result<ScheduleCounts> {
        self.read(|connection, _| counts(connection)).await
    }
}

pub fn create(tx: &Tx, schedule: &Schedule, by: &str, now: Timestamp) -> Result<()> {
    tx.connection
        .prepare_cached(
            "INSERT INTO schedule (id, name, spec, active, anchor_at, cursor_at, next_at, created_at, updated_at)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?8)",
        )?
        .execute((
            schedule.id.0,
            &schedule.spec.name,
            schedules::stored_spec(&schedule.spec),
            schedule.is_active,
            schedule.anchor_at.as_ms(),
            schedule.cursor_at.as_ms(),
            schedule.next_at.map(Timestamp::as_ms),
            schedule.created_at.as_ms(),
        ))?;
    audit::add(tx, &schedules::audit_entry(by, "schedule.create", schedule), now)?;
    tx.signal(Signal::Schedule);
    Ok(())
}

pub fn patch(tx: &Tx, id: ScheduleId, change: &ScheduleChange, by: &str, now: Timestamp) -> Result<Option<Schedule>> {
    let Some(mut schedule) = get(tx.connection, id)? else { return Ok(None) };
    if schedule.is_active {
        // Due times up to now follow the old definition.
        let (mut processed, _) = fire_due(tx, vec![schedule], now)?;
        schedule = processed.swap_remove(0);
    }
    let schedule = schedules::apply_change(schedule, change, now)?;
    tx.connection
        .prepare_cached("UPDATE schedule SET name = ?2, spec = ?3, anchor_at = ?4, updated_at = ?5 WHERE id = ?1")?
        .execute((
            schedule.id.0,
            &schedule.spec.name,
            schedules::stored_spec(&schedule.spec),
            schedule.anchor_at.as_ms(),
            schedule.updated_at.as_ms(),
        ))?;
    update_progress(tx, &schedule)?;
    audit::add(tx, &schedules::audit_entry(by, change.action, &schedule), now)?;
    tx.signal(Signal::Schedule);
    Ok(Some(schedule))
}

/// Updates the progress columns of a schedule (cursor, next due time, run count, recent jobs) but not its definition.
fn update_progress(tx: &Tx, schedule: &Schedule) -> Result<()> {
    tx.connection
        .prepare_cached(
            "UPDATE schedule SET active = ?2, cursor_at = ?3, next_at = ?4, runs = ?5, last_due_at = ?6, last_run_at = ?7,
                 last_job = ?8, recent = ?9, queued = ?10, finished = ?11
             WHERE id = ?1",
        )?
        .execute((
            schedule.id.0,
            schedule.is_active,
            schedule.cursor_at.as_ms(),
            schedule.next_at.map(Timestamp::as_ms),
            i64::try_from(schedule.runs).unwrap_or(i64::MAX),
            schedule.last_due_at.map(Timestamp::as_ms),
            schedule.last_run_at.map(Timestamp::as_ms),
            schedule.last_job.map(|job| job.0),
            schedules::stored_recent(schedule),
            schedule.queued.map(|job| job.0),
            &schedule.finished,
        ))?;
    Ok(())
}

pub fn delete(tx: &Tx, id: ScheduleId, by: &str, now: Timestamp) -> Result<bool> {
    let Some(name) = name_of(tx.connection, id)? else { return Ok(false) };
    tx.connection.prepare_cached("DELETE FROM tick WHERE schedule = ?")?.execute([id.0])?;
    tx.connection.prepare_cached("DELETE FROM schedule WHERE id = ?")?.execute([id.0])?;
    audit::add(tx, &schedules::delete_audit_entry(by, id, &name), now)?;
    Ok(true)
}

fn name_of(connection: &Connection, id: ScheduleId) -> Result<Option<String>> {
    Ok(connection
        .prepare_cached("SELECT name FROM schedule WHERE id = ?")?
        .query_row([id.0], |row| row.get(0))
        .optional()?)
}

pub fn trigger(tx: &Tx, id: ScheduleId, by: &str, now: Timestamp) -> Result<Option<JobId>> {
    let Some(schedule) = get(tx.connection, id)? else { return Ok(None) };
    let at = next_free_time(tx.connection, id, now)?;
    let mut compiled = schedule.compile().map_err(StoreError::Invalid)?;
    let (job, tick) = compiled.trigger(at);
    let job_id = job.id;
    update_progress(tx, &compiled.schedule)?;
    events::with_actor(tx, by, |tx| {
        submit(tx, vec![job], now)?;
        put_tick(tx, &tick)
    })?;
    audit::add(tx, &schedules::trigger_audit_entry(by, job_id, &compiled.schedule), now)?;
    Ok(Some(job_id))
}

/// Returns the first time from `now` on without a manual tick, so that two manual runs in one millisecond get separate ticks.
fn next_free_time(connection: &Connection, id: ScheduleId, now: Timestamp) -> Result<Timestamp> {
    let taken: Option<i64> = connection
        .prepare_cached("SELECT max(due_at) FROM tick WHERE schedule = ? AND due_at >= ? AND manual")?
        .query_row((id.0, now.as_ms()), |row| row.get(0))?;
    Ok(taken.map_or(now, |taken| Timestamp::from_ms(taken + 1)))
}

fn job_states(connection: &Connection, schedules: &[Schedule]) -> Result<JobStates> {
    let mut states = JobStates::new();
    for id in schedules::jobs_to_check(schedules) {
        if let Some(state) = read::state_of(connection, id)? {
            states.insert(id, state);
        }
    }
    Ok(states)
}

pub fn fire(tx: &Tx, limit: usize, now: Timestamp) -> Result<Fired> {
    let (due, unreadable) = due(tx.connection, limit, now)?;
    let (processed, ticks) = fire_due(tx, due, now)?;
    let count = processed.len() + unreadable.len();
    for (id, reason) in unreadable {
        tx.connection
            .prepare_cached("UPDATE schedule SET active = 0, next_at = NULL, finished = ? WHERE id = ?")?
            .execute((reason, id.0))?;
    }
    let next_at: Option<i64> = tx
        .connection
        .prepare_cached("SELECT min(next_at) FROM schedule WHERE next_at IS NOT NULL")?
        .query_row([], |row| row.get(0))?;
    Ok(Fired { schedules: count, ticks, next_at: next_at.map(Timestamp::from_ms) })
}

/// Fires due schedules: writes their jobs, ticks and progress. Stops early when the round is full, and returns the schedules
/// it processed.
fn fire_due(tx: &Tx, due: Vec<Schedule>, now: Timestamp) -> Result<(Vec<Schedule>, Vec<TickRow>)> {
    let mut rejected = RejectedSchedules::new();
    for schedule in &due {
        if let Err(error) = lane_of(tx, LaneName::of_template(&schedule.spec.job)) {
            rejected.insert(schedule.id, schedules::rejection(error)?);
        }
    }
    let states = job_states(tx.connection, &due)?;
    let round = schedules::plan_round(due, &states, &rejected, now);
    for id in round.cancels {
        events::with_actor(tx, SCHEDULER, |tx| change::cancel(tx, id, CANCEL_REASON, now))?;
    }
    for schedule in &round.schedules {
        update_progress(tx, schedule)?;
    }
    events::with_actor(tx, SCHEDULER, |tx| {
        submit(tx, round.jobs, now)?;
        round.ticks.iter().try_for_each(|tick| put_tick(tx, tick))
    })?;
    Ok((round.schedules, round.ticks))
}

fn due(connection: &Connection, limit: usize, now: Timestamp) -> Result<(Vec<Schedule>, UnreadableSchedules)> {
    let mut statement = connection
        .prepare_cached(&format!("SELECT {COLUMNS} FROM schedule WHERE next_at <= ? ORDER BY next_at LIMIT ?"))?;
    let rows = statement
        .query_map((now.as_ms(), i64::try_from(limit).unwrap_or(i64::MAX)), row)?
        .collect::<rusqlite::Result<Vec<ScheduleRow>>>()?;
    Ok(schedules::split_rows(rows))
}

fn put_tick(tx: &Tx, tick: &TickRow) -> Result<()> {
    tx.connection
        .prepare_cached(
            "INSERT INTO tick (schedule, due_at, manual, outcome, reason, job, at, through_at, count)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
        )?
        .execute((
            tick.schedule_id.0,
            tick.due_at.as_ms(),
            tick.outcome == TickOutcome::Triggered,
            tick.outcome.code(),
            &tick.reason,
            tick.job_id.map(|job| job.0),
            tick.at.as_ms(),
            tick.through_at.map(Timestamp::as_ms),
            tick.count.map(|count| i64::try_from(count).unwrap_or(i64::MAX)),
        ))?;
    Ok(())
}

pub fn get(connection: &Connection, id: ScheduleId) -> Result<Option<Schedule>> {
    connection
        .prepare_cached(&format!("SELECT {COLUMNS} FROM schedule WHERE id = ?"))?
        .query_row([id.0], row)
        .optional()?
        .map(|found| found.map_err(|(_, error)| error))
        .transpose()
}

pub fn list(connection: &Connection, filter: &ScheduleFilter, page: SchedulePage) -> Result<(Vec<Schedule>, u64)> {
    let (is_active, pattern, name) = (filter.is_active, filter.q.as_deref().map(schedules::like), &filter.name);
    let condition =
        "(?1 IS NULL OR active = ?1) AND (?2 IS NULL OR name LIKE ?2 ESCAPE '\\') AND (?3 IS NULL OR name = ?3)";
    let total: i64 = connection
        .prepare_cached(&format!("SELECT count(*) FROM schedule WHERE {condition}"))?
        .query_row((is_active, &pattern, name), |row| row.get(0))?;
    let mut statement = connection.prepare_cached(&format!(
        "SELECT {COLUMNS} FROM schedule WHERE {condition} ORDER BY name, id LIMIT ?4 OFFSET ?5"
    ))?;
    let (limit, offset) =
        (i64::try_from(page.limit).unwrap_or(i64::MAX), i64::try_from(page.offset).unwrap_or(i64::MAX));
    let rows = statement
        .query_map((is_active, &pattern, name, limit, offset), row)?
        .collect::<rusqlite::Result<Vec<ScheduleRow>>>()?;
    Ok((schedules::readable(rows), u64::try_from(total).unwrap_or(0)))
}

pub fn ticks(connection: &Connection, id: ScheduleId, before: Option<Timestamp>, limit: usize) -> Result<Vec<TickRow>> {
    let mut statement = connection.prepare_cached(
        "SELECT due_at, outcome, reason, job, at, through_at, count FROM tick
         WHERE schedule = ?1 AND due_at < ?2 ORDER BY due_at DESC, manual DESC LIMIT ?3",
    )?;
    let before = before.map_or(i64::MAX, Timestamp::as_ms);
    let rows = statement.query_map((id.0, before, i64::try_from(limit).unwrap_or(i64::MAX)), |row| {
        Ok(TickRow {
            schedule_id: id,
            due_at: Timestamp::from_ms(row.get(0)?),
            outcome: TickOutcome::from_code(row.get(1)?).unwrap_or(TickOutcome::Missed),
            reason: row.get(2)?,
            job_id: row.get::<_, Option<uuid::Uuid>>(3)?.map(JobId),
            at: Timestamp::from_ms(row.get(4)?),
            through_at: row.get::<_, Option<i64>>(5)?.map(Timestamp::from_ms),
            count: row.get::<_, Option<i64>>(6)?.map(i64::unsigned_abs),
        })
    })?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}

fn tick_total(connection: &Connection, id: ScheduleId, before: Option<Timestamp>) -> Result<u64> {
    let sql =
        format!("SELECT count(*) FROM (SELECT 1 FROM tick WHERE schedule = ? AND due_at < ? LIMIT {COUNT_LIMIT})");
    let before = before.map_or(i64::MAX, Timestamp::as_ms);
    Ok(connection.prepare_cached(&sql)?.query_row((id.0, before), |row| row.get::<_, i64>(0))?.unsigned_abs())
}

pub fn counts(connection: &Connection) -> Result<ScheduleCounts> {
    let row: (i64, i64, i64, Option<i64>) = connection
        .prepare_cached(
            "SELECT count(*) FILTER (WHERE active), count(*) FILTER (WHERE NOT active), total(runs),
                    min(next_at) FILTER (WHERE active) FROM schedule",
        )?
        .query_row([], |row| Ok((row.get(0)?, row.get(1)?, row.get::<_, f64>(2)? as i64, row.get(3)?)))?;
    Ok(ScheduleCounts {
        active: row.0.unsigned_abs(),
        inactive: row.1.unsigned_abs(),
        runs: row.2.unsigned_abs(),
        next_at: row.3.map(Timestamp::from_ms),
    })
}

/// Deletes up to `limit` ticks recorded before `before`: ticks are kept as long as finished jobs with the longest
/// retention.
pub fn prune(tx: &Tx, before: Timestamp, limit: usize) -> Result<()> {
    tx.connection
        .prepare_cached(
            "DELETE FROM tick WHERE (schedule, due_at, manual) IN
                 (SELECT schedule, due_at, manual FROM tick WHERE at < ? ORDER BY at LIMIT ?)",
        )?
        .execute((before.as_ms(), i64::try_from(limit).unwrap_or(i64::MAX)))?;
    Ok(())
}

fn row(row: &Row) -> rusqlite::Result<ScheduleRow> {
    let at = |column: usize| Ok::<_, rusqlite::Error>(row.get::<_, Option<i64>>(column)?.map(Timestamp::from_ms));
    let job = |column: usize| Ok::<_, rusqlite::Error>(row.get::<_, Option<uuid::Uuid>>(column)?.map(JobId));
    let id = ScheduleId(row.get(0)?);
    let spec = match schedules::parse_spec(id, &row.get::<_, String>(1)?) {
        Ok(spec) => spec,
        Err(unreadable) => return Ok(Err(unreadable)),
    };
    Ok(Ok(Schedule {
        id,
        spec,
        is_active: row.get(2)?,
        anchor_at: Timestamp::from_ms(row.get(3)?),
        cursor_at: Timestamp::from_ms(row.get(4)?),
        next_at: at(5)?,
        runs: row.get::<_, i64>(6)?.unsigned_abs(),
        last_due_at: at(7)?,
        last_run_at: at(8)?,
        last_job: job(9)?,
        recent: schedules::parse_recent(&row.get::<_, String>(10)?),
        queued: job(11)?,
        finished: row.get(12)?,
        created_at: Timestamp::from_ms(row.get(13)?),
        updated_at: Timestamp::from_ms(row.get(14)?),
    }))
}
