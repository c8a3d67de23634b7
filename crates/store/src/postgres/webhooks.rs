//! Webhooks: notifications about finished jobs and about approvals of tasks.

use std::{borrow::Cow, collections::HashMap};

use async_trait::async_trait;
use deadpool_postgres::Object;
use faena_domain::{
    JobId, JobOptions, LogLine, NodeId, Timestamp, WebhookAttempt, WebhookId, WebhookState, WebhookSubject, WebhookView,
};
use tokio_postgres::{Row, types::ToSql};
use uuid::Uuid;

use super::{Postgres, Shared, audit, end::storable, job_log::trim_logs};
use crate::{
    COUNT_LIMIT, Delivery, Result, Retention, Signal, StoredJobLimits, WebhookFilter, WebhookNext, WebhookResult,
    WebhookStore, WebhookTakeRequest, WebhookTaken,
    jobs::state_of_code,
    sql::sql,
    webhooks::{
        AfterLoss, COUNTED, COUNTED_STATES, Ended, KEPT_ATTEMPTS, LOST, NewWebhook, lost_line, raw, redeliver_audit,
        state_of, unsettled,
    },
};

#[async_trait]
impl WebhookStore for Postgres {
    async fn webhook_take(&self, request: WebhookTakeRequest, now: Timestamp) -> Result<WebhookTaken> {
        self.shared.retrying(|| take(&self.shared, &request, now)).await
    }

    async fn webhook_settle(&self, results: Vec<WebhookResult>, now: Timestamp) -> Result<Vec<bool>> {
        self.shared.retrying(|| settle(&self.shared, &results, now)).await
    }

    async fn webhook_redeliver(&self, id: WebhookId, by: &str, now: Timestamp) -> Result<Option<WebhookSubject>> {
        self.shared.retrying(|| redeliver(&self.shared, id, by, now)).await
    }

    async fn webhook_get(&self, id: WebhookId) -> Result<Option<WebhookView>> {
        self.shared.retrying(|| get(&self.shared, id)).await
    }

    async fn webhook_list(
        &self,
        filter: WebhookFilter,
        after: Option<WebhookId>,
        limit: usize,
    ) -> Result<Vec<WebhookView>> {
        self.shared.retrying(|| list(&self.shared, &filter, after, limit)).await
    }

    async fn webhook_total(&self, filter: WebhookFilter) -> Result<u64> {
        self.shared.retrying(|| total(&self.shared, &filter)).await
    }

    async fn webhook_counts(&self) -> Result<Vec<(WebhookState, u64)>> {
        self.shared.retrying(|| counts(&self.shared)).await
    }
}

/// Writes the webhooks of finished jobs. Their rows in `done` or `ended` must exist.
pub async fn create(client: &Object, jobs: Vec<(Uuid, JobOptions)>) -> Result<()> {
    let ids: Vec<Uuid> = jobs.iter().map(|(id, _)| *id).collect();
    let rows = client
        .query(
            sql!(
                "SELECT j.id, l.type, e.state, e.finished_at, e.result, e.error, j.correlation
             FROM faena.job j JOIN faena.lane l ON l.id = j.lane CROSS JOIN LATERAL (
                 SELECT {COMPLETED}::int2 AS state, finished_at, result, NULL AS error FROM faena.done d
                 WHERE d.lane = j.lane AND d.id = j.id
                 UNION ALL
                 SELECT state, finished_at, NULL, error FROM faena.ended x
                 WHERE x.lane = j.lane AND x.state IN ({FAILED}, {CANCELLED}) AND x.id = j.id
                 LIMIT 1) e
             WHERE j.id = ANY($1)"
            ),
            &[&ids],
        )
        .await?;
    let mut options: HashMap<Uuid, JobOptions> = jobs.into_iter().collect();
    let mut webhooks = Vec::with_capacity(rows.len());
    for row in &rows {
        let id: Uuid = row.get(0);
        let Some(mut options) = options.remove(&id) else { continue };
        let Some(url) = options.webhook_url.take() else { continue };
        let ended = Ended {
            id: JobId(id),
            kind: row.get(1),
            state: state_of_code(row.get(2)),
            finished_at: Timestamp::from_ms(row.get(3)),
            result: row.get(4),
            error: row.get(5),
            correlation: row.get(6),
        };
        webhooks.push(NewWebhook::new(ended, url, &options)?);
    }
    put(client, &webhooks).await
}

/// Writes webhooks that are due now.
pub async fn put(client: &Object, webhooks: &[NewWebhook]) -> Result<()> {
    let ids: Vec<Uuid> = webhooks.iter().map(|webhook| webhook.id.0).collect();
    let subjects: Vec<Uuid> = webhooks.iter().map(|webhook| webhook.subject.id()).collect();
    let events: Vec<&str> = webhooks.iter().map(|webhook| webhook.event.as_str()).collect();
    let correlations: Vec<Cow<str>> = webhooks.iter().map(|webhook| storable(&webhook.correlation)).collect();
    let traces: Vec<Option<&str>> = webhooks.iter().map(|webhook| webhook.traceparent.as_deref()).collect();
    let urls: Vec<Cow<str>> = webhooks.iter().map(|webhook| storable(&webhook.url)).collect();
    let hosts: Vec<Cow<str>> = webhooks.iter().map(|webhook| storable(&webhook.host)).collect();
    let bodies: Vec<&str> = webhooks.iter().map(|webhook| webhook.body.as_str()).collect();
    let times: Vec<i64> = webhooks.iter().map(|webhook| webhook.created_at.as_ms()).collect();
    client
        .execute(
            sql!("INSERT INTO faena.webhook (id, subject, event, correlation, traceparent, url, host, body, created_at, state, due_at)
             SELECT id, subject, event, correlation, traceparent, url, host, body, at, {WEBHOOK_WAITING}, at
             FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::int8[], $9::text[])
                 AS w(id, subject, correlation, traceparent, url, host, body, at, event)"),
            &[&ids, &subjects, &correlations, &traces, &urls, &hosts, &bodies, &times, &events],
        )
        .await?;
    Ok(())
}

/// A webhook that is due.
struct DueWebhook {
    delivery: Delivery,
    state: WebhookState,
    lost: u32,
    due_at: i64,
}

pub async fn take(shared: &Shared, request: &WebhookTakeRequest, now: Timestamp) -> Result<WebhookTaken> {
    let client = shared.begin().await?;
    let result = take_in(&client, &shared.options.job_limits, request, now).await;
    client.end(result).await
}

async fn take_in(
    client: &Object,
    limits: &StoredJobLimits,
    request: &WebhookTakeRequest,
    now: Timestamp,
) -> Result<WebhookTaken> {
    // Only index lookups; a planner that knows nothing about a fresh table would read it whole.
    client.batch_execute("SET LOCAL enable_seqscan = off; SET LOCAL enable_hashjoin = off").await?;
    let mut taken = WebhookTaken::default();
    for mut due_webhook in due(client, request, now).await? {
        if due_webhook.state == WebhookState::Sending
            && !record_lost_attempt(client, limits, &mut due_webhook, request.allowed, now).await?
        {
            continue;
        }
        due_webhook.delivery.number += 1;
        due_webhook.delivery.attempt += 1;
        put_taken(client, &due_webhook, request.node, now.plus_ms(request.lease_ms)).await?;
        taken.deliveries.push(due_webhook.delivery);
    }
    taken.next_at = next_at(client, now).await?;
    Ok(taken)
}

/// Reads the hosts with waiting webhooks. Reads one index entry per host, however many webhooks wait for it.
const HOSTS: &str = "WITH RECURSIVE hosts AS (
         (SELECT host FROM faena.webhook WHERE due_at IS NOT NULL ORDER BY host LIMIT 1)
         UNION ALL
         SELECT (SELECT w.host FROM faena.webhook w WHERE w.due_at IS NOT NULL AND w.host > hosts.host
                 ORDER BY w.host LIMIT 1) FROM hosts WHERE hosts.host IS NOT NULL)";

/// Locks due webhooks. Nodes can do this concurrently: each skips the rows that another node has locked.
async fn due(client: &Object, request: &WebhookTakeRequest, now: Timestamp) -> Result<Vec<DueWebhook>> {
    let number = |size: usize| i64::try_from(size).unwrap_or(i64::MAX);
    let (hosts, host_capacities): (Vec<&str>, Vec<i64>) =
        request.host_capacities.iter().map(|(host, room)| (host.as_str(), number(*room))).unzip();
    let statement = client
        .prepare_cached(&format!(
            "{HOSTS}
             SELECT w.id, w.subject, w.correlation, w.traceparent, w.url, w.body, w.attempts, w.spent, w.state, w.lost,
                    w.due_at, w.host, w.event
             FROM hosts LEFT JOIN unnest($2::text[], $3::int8[]) AS r(host, room) ON r.host = hosts.host
             CROSS JOIN LATERAL (
                 SELECT * FROM faena.webhook WHERE host = hosts.host AND due_at <= $1
                 ORDER BY due_at, id LIMIT coalesce(r.room, $4) FOR UPDATE SKIP LOCKED) w
             WHERE hosts.host IS NOT NULL ORDER BY w.due_at, w.id LIMIT $5"
        ))
        .await?;
    let rows = client
        .query(&statement, &[&now.as_ms(), &hosts, &host_capacities, &number(request.per_host), &number(request.limit)])
        .await?;
    rows.iter()
        .map(|row| {
            let (attempts, spent) = (count(row, 6), count(row, 7));
            let event: String = row.get(12);
            let delivery = Delivery {
                id: WebhookId(row.get(0)),
                subject: WebhookSubject::of(&event, row.get(1)),
                event,
                correlation_id: row.get(2),
                traceparent: row.get(3),
                url: row.get(4),
                host: row.get(11),
                body: row.get(5),
                number: attempts,
                attempt: attempts.saturating_sub(spent),
            };
            Ok(DueWebhook { delivery, state: state_of(row.get(8))?, lost: count(row, 9), due_at: row.get(10) })
        })
        .collect()
}

fn count(row: &Row, column: usize) -> u32 {
    u32::try_from(row.get::<_, i32>(column)).unwrap_or(0)
}

fn stored(number: u32) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

/// Records that the previous attempt had no outcome. Returns `false` if that was the last allowed one.
async fn record_lost_attempt(
    client: &Object,
    limits: &StoredJobLimits,
    due_webhook: &mut DueWebhook,
    allowed: u32,
    now: Timestamp,
) -> Result<bool> {
    let delivery = &due_webhook.delivery;
    due_webhook.lost += 1;
    client
        .execute(
            "INSERT INTO faena.webhook_attempt (webhook, number, at, took_ms, error) VALUES ($1, $2, $3, 0, $4)
             ON CONFLICT DO NOTHING",
            &[&delivery.id.0, &stored(delivery.number), &due_webhook.due_at, &LOST],
        )
        .await?;
    if AfterLoss::of(delivery.attempt, due_webhook.lost, allowed) == AfterLoss::SendAgain {
        return Ok(true);
    }
    client
        .execute(
            sql!("UPDATE faena.webhook SET state = {WEBHOOK_FAILED}, due_at = NULL, node = NULL, settled_at = $1, lost = $2 WHERE id = $3"),
            &[&now.as_ms(), &stored(due_webhook.lost), &delivery.id.0],
        )
        .await?;
    add_log_entries(client, limits, vec![(delivery.subject.id(), lost_line(&delivery.url, now))]).await?;
    Ok(false)
}

async fn put_taken(client: &Object, due_webhook: &DueWebhook, node: NodeId, until: Timestamp) -> Result<()> {
    let statement = client
        .prepare_cached(
            sql!("UPDATE faena.webhook SET state = {WEBHOOK_SENDING}, attempts = $1, lost = $2, due_at = $3, node = $4 WHERE id = $5"),
        )
        .await?;
    client
        .execute(
            &statement,
            &[
                &stored(due_webhook.delivery.number),
                &stored(due_webhook.lost),
                &until.as_ms(),
                &node.0,
                &due_webhook.delivery.id.0,
            ],
        )
        .await?;
    Ok(())
}

async fn next_at(client: &Object, now: Timestamp) -> Result<Option<Timestamp>> {
    let statement = client
        .prepare_cached(&format!(
            "{HOSTS} SELECT min((SELECT w.due_at FROM faena.webhook w WHERE w.host = hosts.host AND w.due_at > $1
                                 ORDER BY w.due_at LIMIT 1))
             FROM hosts WHERE hosts.host IS NOT NULL"
        ))
        .await?;
    let next: Option<i64> = client.query_one(&statement, &[&now.as_ms()]).await?.get(0);
    Ok(next.map(Timestamp::from_ms))
}

pub async fn settle(shared: &Shared, results: &[WebhookResult], now: Timestamp) -> Result<Vec<bool>> {
    let client = shared.begin().await?;
    let result = settle_in(&client, &shared.options.job_limits, results, now).await;
    let settled = client.end(result).await?;
    let again =
        |(result, settled): (&WebhookResult, &bool)| *settled && matches!(result.next, WebhookNext::Again { .. });
    if results.iter().zip(&settled).any(again) {
        shared.signal([Signal::Webhook]);
    }
    Ok(settled)
}

async fn settle_in(
    client: &Object,
    limits: &StoredJobLimits,
    results: &[WebhookResult],
    now: Timestamp,
) -> Result<Vec<bool>> {
    let mut answers = Vec::with_capacity(results.len());
    let mut entries = Vec::new();
    for result in results {
        let row = settle_one(client, result, now).await?;
        answers.push(row.is_some());
        entries.extend(row.map(|(subject, url)| (subject, result.log_line(&url))));
    }
    add_log_entries(client, limits, entries).await?;
    Ok(answers)
}

async fn settle_one(client: &Object, result: &WebhookResult, now: Timestamp) -> Result<Option<(Uuid, String)>> {
    let settled_at = (result.next.state() != WebhookState::Waiting).then_some(now.as_ms());
    let statement = client
        .prepare_cached(sql!(
            "WITH settled AS (
                 UPDATE faena.webhook SET state = $1, due_at = $2, settled_at = $3, node = NULL
                 WHERE id = $4 AND attempts = $5 AND state = {WEBHOOK_SENDING} RETURNING id, subject, url),
             attempt AS (
                 INSERT INTO faena.webhook_attempt (webhook, number, at, took_ms, status, error, answer)
                 SELECT id, $5, $6, $7, $8, $9, $10 FROM settled)
             SELECT subject, url FROM settled"
        ))
        .await?;
    let row = client
        .query_opt(
            &statement,
            &[
                &result.next.state().code(),
                &result.next.due_at_ms(),
                &settled_at,
                &result.id.0,
                &stored(result.number),
                &result.at.as_ms(),
                &i64::try_from(result.took_ms).unwrap_or(i64::MAX),
                &result.status.map(i32::from),
                &result.error.as_deref().map(storable),
                &result.answer.as_deref().map(storable),
            ],
        )
        .await?;
    if row.is_some() && result.number > KEPT_ATTEMPTS {
        client
            .execute(
                "DELETE FROM faena.webhook_attempt WHERE webhook = $1 AND number <= $2",
                &[&result.id.0, &stored(result.number - KEPT_ATTEMPTS)],
            )
            .await?;
    }
    Ok(row.map(|row| (row.get(0), row.get(1))))
}

/// Adds log entries of those jobs that still exist: a job may be deleted before its webhook is delivered, and a webhook
/// about a task has no job.
async fn add_log_entries(client: &Object, limits: &StoredJobLimits, entries: Vec<(Uuid, LogLine)>) -> Result<()> {
    if entries.is_empty() {
        return Ok(());
    }
    let (jobs, logs): (Vec<Uuid>, Vec<String>) =
        entries.into_iter().map(|(job, entry)| (job, LogLine::chunk(&[entry]))).unzip();
    // Locks the jobs, so that none of them is deleted now and leaves its log entry behind.
    client
        .execute(
            "WITH jobs AS (SELECT id FROM faena.job WHERE id = ANY($1) FOR KEY SHARE)
             INSERT INTO faena.job_log (id, log) SELECT n.id, n.log FROM unnest($1::uuid[], $2::text[]) AS n(id, log)
             WHERE n.id IN (SELECT id FROM jobs)",
            &[&jobs, &logs],
        )
        .await?;
    trim_logs(client, limits, &jobs).await
}

/// Makes the webhooks that a dead node was sending due again, because that node will report no outcome.
pub async fn release_abandoned(shared: &Shared, now: Timestamp) -> Result<()> {
    let client = shared.client().await?;
    let released = client
        .execute(
            sql!(
                "UPDATE faena.webhook w SET due_at = $1 WHERE state = {WEBHOOK_SENDING} AND due_at > $1
                 AND NOT EXISTS (SELECT FROM faena.node n WHERE n.id = w.node)"
            ),
            &[&now.as_ms()],
        )
        .await?;
    client.return_to_pool(Ok(()))?;
    if released > 0 {
        shared.signal([Signal::Webhook]);
    }
    Ok(())
}

pub async fn redeliver(shared: &Shared, id: WebhookId, by: &str, now: Timestamp) -> Result<Option<WebhookSubject>> {
    let client = shared.begin().await?;
    let result = redeliver_in(&client, id, by, now).await;
    let subject = client.end(result).await?;
    if subject.is_some() {
        shared.signal([Signal::Webhook]);
    }
    Ok(subject)
}

async fn redeliver_in(client: &Object, id: WebhookId, by: &str, now: Timestamp) -> Result<Option<WebhookSubject>> {
    let row = client
        .query_opt("SELECT subject, url, state, event FROM faena.webhook WHERE id = $1 FOR UPDATE", &[&id.0])
        .await?;
    let Some(row) = row else { return Ok(None) };
    let (subject, url, was): (_, String, _) =
        (WebhookSubject::of(row.get(3), row.get(0)), row.get(1), state_of(row.get(2))?);
    if !was.is_terminal() {
        return Err(unsettled(id, was));
    }
    client
        .execute(
            sql!("UPDATE faena.webhook SET state = {WEBHOOK_WAITING}, due_at = $1, settled_at = NULL, spent = attempts, lost = 0 WHERE id = $2"),
            &[&now.as_ms(), &id.0],
        )
        .await?;
    audit::add(client, &redeliver_audit(id, subject, &url, was, by), now).await?;
    Ok(Some(subject))
}

/// Deletes the webhooks of deleted jobs or tasks, except those that are still to be delivered.
pub async fn remove(client: &Object, subjects: &[Uuid]) -> Result<()> {
    client
        .execute(
            "WITH deleted AS (DELETE FROM faena.webhook WHERE subject = ANY($1) AND settled_at IS NOT NULL RETURNING id)
             DELETE FROM faena.webhook_attempt WHERE webhook IN (SELECT id FROM deleted)",
            &[&subjects],
        )
        .await?;
    Ok(())
}

/// Deletes webhooks that were settled longer ago than any finished job is kept, unless their task still exists.
pub async fn prune(client: &Object, retention: &Retention, limit: usize, now: Timestamp) -> Result<()> {
    let cutoff = now.plus_ms(-retention.longest_ms()).as_ms();
    client
        .execute(
            "WITH deleted AS (
                 DELETE FROM faena.webhook WHERE id IN (
                     SELECT id FROM faena.webhook w WHERE settled_at < $1
                         AND NOT EXISTS (SELECT FROM faena.task t WHERE t.id = w.subject) ORDER BY settled_at LIMIT $2
                     FOR UPDATE SKIP LOCKED) RETURNING id)
             DELETE FROM faena.webhook_attempt WHERE webhook IN (SELECT id FROM deleted)",
            &[&cutoff, &i64::try_from(limit).unwrap_or(i64::MAX)],
        )
        .await?;
    Ok(())
}

const COLUMNS: &str = "id, subject, event, correlation, url, state, created_at, due_at, settled_at, attempts";

pub async fn get(shared: &Shared, id: WebhookId) -> Result<Option<WebhookView>> {
    let client = shared.client().await?;
    let view = get_in(&client, id).await;
    client.return_to_pool(view)
}

async fn get_in(client: &Object, id: WebhookId) -> Result<Option<WebhookView>> {
    let sql = format!("SELECT {COLUMNS}, body FROM faena.webhook WHERE id = $1");
    let Some(row) = client.query_opt(&sql, &[&id.0]).await? else { return Ok(None) };
    let mut view = view(&row);
    view.body = Some(raw(row.get(10))?);
    let rows = client
        .query(
            "SELECT number, at, took_ms, status, error, answer FROM faena.webhook_attempt WHERE webhook = $1 ORDER BY number",
            &[&id.0],
        )
        .await?;
    view.history = rows
        .iter()
        .map(|row| WebhookAttempt {
            number: count(row, 0),
            at: Timestamp::from_ms(row.get(1)),
            took_ms: u64::try_from(row.get::<_, i64>(2)).unwrap_or(0),
            status: row.get::<_, Option<i32>>(3).and_then(|status| u16::try_from(status).ok()),
            error: row.get(4),
            answer: row.get(5),
        })
        .collect();
    Ok(Some(view))
}

pub async fn list(
    shared: &Shared,
    filter: &WebhookFilter,
    after: Option<WebhookId>,
    limit: usize,
) -> Result<Vec<WebhookView>> {
    let client = shared.client().await?;
    let views = list_in(&client, filter, after, limit).await;
    client.return_to_pool(views)
}

async fn list_in(
    client: &Object,
    filter: &WebhookFilter,
    after: Option<WebhookId>,
    limit: usize,
) -> Result<Vec<WebhookView>> {
    let (condition, parameters) = condition(filter, after);
    let sql = format!("SELECT {COLUMNS} FROM faena.webhook WHERE {condition} ORDER BY id DESC LIMIT {limit}");
    Ok(client.query(&sql, &borrowed(&parameters)).await?.iter().map(view).collect())
}

async fn total(shared: &Shared, filter: &WebhookFilter) -> Result<u64> {
    let (condition, parameters) = condition(filter, None);
    let sql = format!("SELECT count(*) FROM (SELECT 1 FROM faena.webhook WHERE {condition} LIMIT {COUNT_LIMIT}) x");
    let client = shared.client().await?;
    let row = client.query_one(&sql, &borrowed(&parameters)).await.map_err(Into::into);
    Ok(client.return_to_pool(row)?.get::<_, i64>(0).unsigned_abs())
}

type Parameters = Vec<Box<dyn ToSql + Sync + Send>>;

fn borrowed(parameters: &Parameters) -> Vec<&(dyn ToSql + Sync)> {
    parameters.iter().map(|parameter| parameter.as_ref() as &(dyn ToSql + Sync)).collect()
}

/// Returns the condition for matching webhooks whose id is below `after`, and its parameters.
fn condition(filter: &WebhookFilter, after: Option<WebhookId>) -> (String, Parameters) {
    let mut sql = "id < $1".to_owned();
    let mut parameters: Parameters = vec![Box::new(after.map_or(Uuid::max(), |id| id.0))];
    let mut add = |column: &str, value: Box<dyn ToSql + Sync + Send>| {
        parameters.push(value);
        sql.push_str(&format!(" AND {column} = ${}", parameters.len()));
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

fn view(row: &Row) -> WebhookView {
    let at = |column: usize| row.get::<_, Option<i64>>(column).map(Timestamp::from_ms);
    let event: String = row.get(2);
    let subject = WebhookSubject::of(&event, row.get(1));
    WebhookView {
        id: WebhookId(row.get(0)),
        event,
        job_id: subject.job(),
        task_id: subject.task(),
        correlation_id: row.get(3),
        url: row.get(4),
        state: WebhookState::from_code(row.get(5)).unwrap_or(WebhookState::Failed),
        created_at: Timestamp::from_ms(row.get(6)),
        due_at: at(7),
        settled_at: at(8),
        delay_reason: None,
        attempts: count(row, 9),
        body: None,
        history: Vec::new(),
    }
}

pub async fn counts(shared: &Shared) -> Result<Vec<(WebhookState, u64)>> {
    let client = shared.client().await?;
    let counts = counts_in(&client).await;
    client.return_to_pool(counts)
}

async fn counts_in(client: &Object) -> Result<Vec<(WebhookState, u64)>> {
    let mut counts = Vec::new();
    for state in COUNTED_STATES {
        let row = client
            .query_one(
                "SELECT count(*) FROM (SELECT 1 FROM faena.webhook WHERE state = $1 LIMIT $2) w",
                &[&state.code(), &COUNTED],
            )
            .await?;
        counts.push((state, u64::try_from(row.get::<_, i64>(0)).unwrap_or(0)));
    }
    Ok(counts)
}
