//! Webhooks: notifications about finished jobs and about approvals of tasks.

use async_trait::async_trait;
use faena_domain::{
    JobId, JobOptions, NodeId, Timestamp, WebhookAttempt, WebhookId, WebhookState, WebhookSubject, WebhookView,
};
use rusqlite::{Connection, OptionalExtension, Row};
use uuid::Uuid;

use super::{Sqlite, audit, job_log::add_log_entry, writer::Tx};
use crate::{
    COUNT_LIMIT, Delivery, LaneId, Result, Retention, Signal, WebhookFilter, WebhookNext, WebhookResult, WebhookStore,
    WebhookTakeRequest, WebhookTaken,
    jobs::state_of_code,
    sql::sql,
    webhooks::{
        AfterLoss, COUNTED, COUNTED_STATES, Ended, KEPT_ATTEMPTS, LOST, NewWebhook, lost_line, raw, redeliver_audit,
        state_of, unsettled,
    },
};

#[async_trait]
impl WebhookStore for Sqlite {
    async fn webhook_take(&self, request: WebhookTakeRequest, now: Timestamp) -> Result<WebhookTaken> {
        self.writer.call(move |tx| take(tx, &request, now)).await
    }

    async fn webhook_settle(&self, results: Vec<WebhookResult>, now: Timestamp) -> Result<Vec<bool>> {
        self.writer.call(move |tx| settle(tx, &results, now)).await
    }

    async fn webhook_redeliver(&self, id: WebhookId, by: &str, now: Timestamp) -> Result<Option<WebhookSubject>> {
        let by = by.to_owned();
        self.writer.call(move |tx| redeliver(tx, id, &by, now)).await
    }

    async fn webhook_get(&self, id: WebhookId) -> Result<Option<WebhookView>> {
        self.read(move |connection, _| get(connection, id)).await
    }

    async fn webhook_list(
        &self,
        filter: WebhookFilter,
        after: Option<WebhookId>,
        limit: usize,
    ) -> Result<Vec<WebhookView>> {
        self.read(move |connection, _| list(connection, &filter, after, limit)).await
    }

    async fn webhook_total(&self, filter: WebhookFilter) -> Result<u64> {
        self.read(move |connection, _| total(connection, &filter)).await
    }

    async fn webhook_counts(&self) -> Result<Vec<(WebhookState, u64)>> {
        self.read(|connection, _| counts(connection)).await
    }
}

/// Writes the webhook of a finished job. Its row in `done` or `ended` must exist.
pub fn create(tx: &Tx, lane: LaneId, id: JobId, url: String, options: &JobOptions) -> Result<()> {
    let ended = tx
        .connection
        .prepare_cached(
            sql!("SELECT l.type, e.state, e.finished_at, e.result, e.error, j.correlation
             FROM (SELECT {COMPLETED} AS state, finished_at, result, NULL AS error FROM done WHERE lane = ?1 AND id = ?2
                   UNION ALL
                   SELECT state, finished_at, NULL, error FROM ended WHERE lane = ?1 AND state IN ({FAILED}, {CANCELLED}) AND id = ?2) e
             CROSS JOIN job j ON j.id = ?2 CROSS JOIN lane l ON l.id = ?1 LIMIT 1"),
        )?
        .query_row((lane, id.0), |row| {
            Ok(Ended {
                id,
                kind: row.get(0)?,
                state: state_of_code(row.get(1)?),
                finished_at: Timestamp::from_ms(row.get(2)?),
                result: row.get(3)?,
                error: row.get(4)?,
                correlation: row.get(5)?,
            })
        })
        .optional()?;
    let Some(ended) = ended else { return Ok(()) };
    put(tx, NewWebhook::new(ended, url, options)?)
}

/// Writes a webhook that is due now.
pub fn put(tx: &Tx, webhook: NewWebhook) -> Result<()> {
    tx.connection
        .prepare_cached(
            sql!("INSERT INTO webhook (id, subject, event, correlation, traceparent, url, host, body, created_at, state, due_at)
             VALUES (?1, ?2, ?9, ?3, ?4, ?5, ?6, ?7, ?8, {WEBHOOK_WAITING}, ?8)"),
        )?
        .execute((
            webhook.id.0,
            webhook.subject.id(),
            webhook.correlation,
            webhook.traceparent,
            webhook.url,
            webhook.host,
            webhook.body,
            webhook.created_at.as_ms(),
            webhook.event,
        ))?;
    tx.signal(Signal::Webhook);
    Ok(())
}

/// A webhook that is due.
struct DueWebhook {
    delivery: Delivery,
    state: WebhookState,
    lost: u32,
    due_at: i64,
}

pub fn take(tx: &Tx, request: &WebhookTakeRequest, now: Timestamp) -> Result<WebhookTaken> {
    let hosts = hosts(tx.connection)?;
    let mut webhooks_due = Vec::new();
    for host in &hosts {
        let room =
            request.host_capacities.iter().find(|(known, _)| known == host).map_or(request.per_host, |(_, room)| *room);
        webhooks_due.extend(due(tx.connection, host, room, now)?);
    }
    webhooks_due.sort_by_key(|due_webhook| (due_webhook.due_at, due_webhook.delivery.id));
    webhooks_due.truncate(request.limit);
    let mut taken = WebhookTaken::default();
    for mut due_webhook in webhooks_due {
        if due_webhook.state == WebhookState::Sending
            && !record_lost_attempt(tx, &mut due_webhook, request.allowed, now)?
        {
            continue;
        }
        due_webhook.delivery.number += 1;
        due_webhook.delivery.attempt += 1;
        put_taken(tx, &due_webhook, request.node, now.plus_ms(request.lease_ms))?;
        taken.deliveries.push(due_webhook.delivery);
    }
    taken.next_at = next_at(tx.connection, &hosts, now)?;
    Ok(taken)
}

/// Returns the hosts of unsettled webhooks. Reads one index entry per host, however many webhooks it has.
fn hosts(connection: &Connection) -> Result<Vec<String>> {
    let mut statement = connection
        .prepare_cached("SELECT host FROM webhook WHERE due_at IS NOT NULL AND host > ? ORDER BY host LIMIT 1")?;
    let has_empty_host =
        connection.prepare_cached("SELECT 1 FROM webhook WHERE due_at IS NOT NULL AND host = '' LIMIT 1")?.exists([])?;
    let mut hosts: Vec<String> = has_empty_host.then(String::new).into_iter().collect();
    let mut last = String::new();
    while let Some(host) = statement.query_row([&last], |row| row.get::<_, String>(0)).optional()? {
        last.clone_from(&host);
        hosts.push(host);
    }
    Ok(hosts)
}

fn due(connection: &Connection, host: &str, room: usize, now: Timestamp) -> Result<Vec<DueWebhook>> {
    let mut statement = connection.prepare_cached(
        "SELECT id, subject, correlation, traceparent, url, body, attempts, spent, state, lost, due_at, event FROM webhook
         WHERE host = ?1 AND due_at <= ?2 ORDER BY due_at, id LIMIT ?3",
    )?;
    let rows = statement.query_map((host, now.as_ms(), i64::try_from(room).unwrap_or(i64::MAX)), |row| {
        let (attempts, spent): (u32, u32) = (row.get(6)?, row.get(7)?);
        let event: String = row.get(11)?;
        let delivery = Delivery {
            id: WebhookId(row.get(0)?),
            subject: WebhookSubject::of(&event, row.get(1)?),
            event,
            correlation_id: row.get(2)?,
            traceparent: row.get(3)?,
            url: row.get(4)?,
            host: host.to_owned(),
            body: row.get(5)?,
            number: attempts,
            attempt: attempts.saturating_sub(spent),
        };
        Ok((delivery, row.get::<_, i16>(8)?, row.get(9)?, row.get(10)?))
    })?;
    rows.map(|row| {
        let (delivery, state, lost, due_at) = row?;
        Ok(DueWebhook { delivery, state: state_of(state)?, lost, due_at })
    })
    .collect()
}

/// Records that the previous attempt had no outcome. Returns `false` if that was the last allowed one.
fn record_lost_attempt(tx: &Tx, due_webhook: &mut DueWebhook, allowed: u32, now: Timestamp) -> Result<bool> {
    let delivery = &due_webhook.delivery;
    due_webhook.lost += 1;
    tx.connection
        .prepare_cached(
            "INSERT OR IGNORE INTO webhook_attempt (webhook, number, at, took_ms, error) VALUES (?, ?, ?, 0, ?)",
        )?
        .execute((delivery.id.0, delivery.number, due_webhook.due_at, LOST))?;
    if AfterLoss::of(delivery.attempt, due_webhook.lost, allowed) == AfterLoss::SendAgain {
        return Ok(true);
    }
    tx.connection
        .prepare_cached(
            sql!("UPDATE webhook SET state = {WEBHOOK_FAILED}, due_at = NULL, node = NULL, settled_at = ?, lost = ? WHERE id = ?"),
        )?
        .execute((now.as_ms(), due_webhook.lost, delivery.id.0))?;
    if let Some(job) = delivery.subject.job()
        && has_job(tx, job)?
    {
        add_log_entry(tx, job, None, lost_line(&delivery.url, now))?;
    }
    Ok(false)
}

fn put_taken(tx: &Tx, due_webhook: &DueWebhook, node: NodeId, until: Timestamp) -> Result<()> {
    tx.connection
        .prepare_cached(sql!(
            "UPDATE webhook SET state = {WEBHOOK_SENDING}, attempts = ?, lost = ?, due_at = ?, node = ? WHERE id = ?"
        ))?
        .execute((due_webhook.delivery.number, due_webhook.lost, until.as_ms(), node.0, due_webhook.delivery.id.0))?;
    Ok(())
}

fn next_at(connection: &Connection, hosts: &[String], now: Timestamp) -> Result<Option<Timestamp>> {
    let mut statement = connection.prepare_cached("SELECT min(due_at) FROM webhook WHERE host = ? AND due_at > ?")?;
    let mut next: Option<i64> = None;
    for host in hosts {
        let due_at: Option<i64> = statement.query_row((host, now.as_ms()), |row| row.get(0))?;
        next = next.into_iter().chain(due_at).min();
    }
    Ok(next.map(Timestamp::from_ms))
}

pub fn settle(tx: &Tx, results: &[WebhookResult], now: Timestamp) -> Result<Vec<bool>> {
    results.iter().map(|result| settle_one(tx, result, now)).collect()
}

fn settle_one(tx: &Tx, result: &WebhookResult, now: Timestamp) -> Result<bool> {
    let settled_at = (result.next.state() != WebhookState::Waiting).then_some(now.as_ms());
    let row: Option<(Uuid, String)> = tx
        .connection
        .prepare_cached(sql!(
            "UPDATE webhook SET state = ?1, due_at = ?2, settled_at = ?3, node = NULL
             WHERE id = ?4 AND attempts = ?5 AND state = {WEBHOOK_SENDING} RETURNING subject, url"
        ))?
        .query_row(
            (result.next.state().code(), result.next.due_at_ms(), settled_at, result.id.0, result.number),
            |row| Ok((row.get(0)?, row.get(1)?)),
        )
        .optional()?;
    let Some((subject, url)) = row else { return Ok(false) };
    tx.connection
        .prepare_cached(
            "INSERT INTO webhook_attempt (webhook, number, at, took_ms, status, error, answer) VALUES (?, ?, ?, ?, ?, ?, ?)",
        )?
        .execute((
            result.id.0,
            result.number,
            result.at.as_ms(),
            i64::try_from(result.took_ms).unwrap_or(i64::MAX),
            result.status,
            &result.error,
            &result.answer,
        ))?;
    if result.number > KEPT_ATTEMPTS {
        tx.connection
            .prepare_cached("DELETE FROM webhook_attempt WHERE webhook = ? AND number <= ?")?
            .execute((result.id.0, result.number - KEPT_ATTEMPTS))?;
    }
    // The job may be deleted before its webhook is delivered, and a webhook about a task has no job.
    if has_job(tx, JobId(subject))? {
        add_log_entry(tx, JobId(subject), None, result.log_line(&url))?;
    }
    if let WebhookNext::Again { .. } = result.next {
        tx.signal(Signal::Webhook);
    }
    Ok(true)
}

fn has_job(tx: &Tx, job: JobId) -> Result<bool> {
    Ok(tx.connection.prepare_cached("SELECT 1 FROM job WHERE id = ?")?.exists([job.0])?)
}

/// Makes the webhooks that a dead node was sending due again, because that node will report no outcome.
pub fn release_abandoned(tx: &Tx, now: Timestamp) -> Result<()> {
    let released = tx
        .connection
        .prepare_cached(
            sql!("UPDATE webhook SET due_at = ?1 WHERE state = {WEBHOOK_SENDING} AND due_at > ?1 AND node NOT IN (SELECT id FROM node)"),
        )?
        .execute([now.as_ms()])?;
    if released > 0 {
        tx.signal(Signal::Webhook);
    }
    Ok(())
}

pub fn redeliver(tx: &Tx, id: WebhookId, by: &str, now: Timestamp) -> Result<Option<WebhookSubject>> {
    let row: Option<(Uuid, String, i16, String)> = tx
        .connection
        .prepare_cached("SELECT subject, url, state, event FROM webhook WHERE id = ?")?
        .query_row([id.0], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?)))
        .optional()?;
    let Some((subject, url, state, event)) = row else { return Ok(None) };
    let (subject, was) = (WebhookSubject::of(&event, subject), state_of(state)?);
    if !was.is_terminal() {
        return Err(unsettled(id, was));
    }
    tx.connection
        .prepare_cached(
            sql!("UPDATE webhook SET state = {WEBHOOK_WAITING}, due_at = ?, settled_at = NULL, spent = attempts, lost = 0 WHERE id = ?"),
        )?
        .execute((now.as_ms(), id.0))?;
    audit::add(tx, &redeliver_audit(id, subject, &url, was, by), now)?;
    tx.signal(Signal::Webhook);
    Ok(Some(subject))
}

/// Deletes the webhooks of a deleted job or task, except those that are still to be delivered.
pub fn remove(tx: &Tx, subject: Uuid) -> Result<()> {
    let settled: Vec<Uuid> = tx
        .connection
        .prepare_cached("SELECT id FROM webhook WHERE subject = ? AND settled_at IS NOT NULL")?
        .query_map([subject], |row| row.get(0))?
        .collect::<rusqlite::Result<_>>()?;
    remove_all(tx, &settled)
}

fn remove_all(tx: &Tx, ids: &[Uuid]) -> Result<()> {
    for id in ids {
        tx.connection.prepare_cached("DELETE FROM webhook_attempt WHERE webhook = ?")?.execute([id])?;
        tx.connection.prepare_cached("DELETE FROM webhook WHERE id = ?")?.execute([id])?;
    }
    Ok(())
}

/// Deletes webhooks that were settled longer ago than any finished job is kept, unless their task still exists.
pub fn prune(tx: &Tx, retention: &Retention, limit: usize, now: Timestamp) -> Result<()> {
    let cutoff = now.plus_ms(-retention.longest_ms()).as_ms();
    let old: Vec<Uuid> = tx
        .connection
        .prepare_cached("SELECT id FROM webhook WHERE settled_at < ? AND subject NOT IN (SELECT id FROM task) ORDER BY settled_at LIMIT ?")?
        .query_map((cutoff, i64::try_from(limit).unwrap_or(i64::MAX)), |row| row.get(0))?
        .collect::<rusqlite::Result<_>>()?;
    remove_all(tx, &old)
}

const COLUMNS: &str = "id, subject, event, correlation, url, state, created_at, due_at, settled_at, attempts";

pub fn get(connection: &Connection, id: WebhookId) -> Result<Option<WebhookView>> {
    let row = connection
        .prepare_cached(&format!("SELECT {COLUMNS}, body FROM webhook WHERE id = ?"))?
        .query_row([id.0], |row| Ok((view(row)?, row.get::<_, String>(10)?)))
        .optional()?;
    let Some((mut view, body)) = row else { return Ok(None) };
    view.body = Some(raw(body)?);
    let mut statement = connection.prepare_cached(
        "SELECT number, at, took_ms, status, error, answer FROM webhook_attempt WHERE webhook = ? ORDER BY number",
    )?;
    let rows = statement.query_map([id.0], |row| {
        Ok(WebhookAttempt {
            number: row.get(0)?,
            at: Timestamp::from_ms(row.get(1)?),
            took_ms: u64::try_from(row.get::<_, i64>(2)?).unwrap_or(0),
            status: row.get(3)?,
            error: row.get(4)?,
            answer: row.get(5)?,
        })
    })?;
    view.history = rows.collect::<rusqlite::Result<_>>()?;
    Ok(Some(view))
}

pub fn list(
    connection: &Connection,
    filter: &WebhookFilter,
    after: Option<WebhookId>,
    limit: usize,
) -> Result<Vec<WebhookView>> {
    let (condition, parameters) = condition(filter, after);
    let sql = format!("SELECT {COLUMNS} FROM webhook WHERE {condition} ORDER BY id DESC LIMIT {limit}");
    let mut statement = connection.prepare_cached(&sql)?;
    let rows = statement.query_map(rusqlite::params_from_iter(parameters), view)?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}

fn total(connection: &Connection, filter: &WebhookFilter) -> Result<u64> {
    let (condition, parameters) = condition(filter, None);
    let sql = format!("SELECT count(*) FROM (SELECT 1 FROM webhook WHERE {condition} LIMIT {COUNT_LIMIT})");
    let total: i64 =
        connection.prepare_cached(&sql)?.query_row(rusqlite::params_from_iter(parameters), |row| row.get(0))?;
    Ok(total.unsigned_abs())
}

/// Returns the condition for matching webhooks whose id is below `after`, and its parameters.
fn condition(filter: &WebhookFilter, after: Option<WebhookId>) -> (String, Vec<Box<dyn rusqlite::ToSql>>) {
    let mut sql = "id < ?1".to_owned();
    let mut parameters: Vec<Box<dyn rusqlite::ToSql>> = vec![Box::new(after.map_or(Uuid::max(), |id| id.0))];
    let mut add = |column: &str, value: Box<dyn rusqlite::ToSql>| {
        parameters.push(value);
        sql.push_str(&format!(" AND {column} = ?{}", parameters.len()));
    };
    for subject in filter.job.map(|id| id.0).into_iter().chain(filter.task.map(|id| id.0)) {
        add("subject", Box::new(subject));
    }
    if let Some(state) = filter.state {
        add("state", Box::new(state.code()));
    }
    if let Some(host) = &filter.host {
        add("host", Box::new(host.clone()));
    }
    (sql, parameters)
}

fn view(row: &Row) -> rusqlite::Result<WebhookView> {
    let at = |column: usize| Ok::<_, rusqlite::Error>(row.get::<_, Option<i64>>(column)?.map(Timestamp::from_ms));
    let event: String = row.get(2)?;
    let subject = WebhookSubject::of(&event, row.get(1)?);
    Ok(WebhookView {
        id: WebhookId(row.get(0)?),
        event,
        job_id: subject.job(),
        task_id: subject.task(),
        correlation_id: row.get(3)?,
        url: row.get(4)?,
        state: WebhookState::from_code(row.get(5)?).unwrap_or(WebhookState::Failed),
        created_at: Timestamp::from_ms(row.get(6)?),
        due_at: at(7)?,
        settled_at: at(8)?,
        delay_reason: None,
        attempts: row.get(9)?,
        body: None,
        history: Vec::new(),
    })
}

pub fn counts(connection: &Connection) -> Result<Vec<(WebhookState, u64)>> {
    let mut statement =
        connection.prepare_cached("SELECT count(*) FROM (SELECT 1 FROM webhook WHERE state = ? LIMIT ?)")?;
    COUNTED_STATES
        .into_iter()
        .map(|state| {
            let count: i64 = statement.query_row((state.code(), COUNTED), |row| row.get(0))?;
            Ok((state, u64::try_from(count).unwrap_or(0)))
        })
        .collect()
}
