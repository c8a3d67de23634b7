//! Webhooks with their attempts, and their redelivery.

use askama::Template;
use axum::{
    extract::{Path, RawQuery},
    response::Response,
};
use faena_domain::Timestamp;
use serde::Deserialize;
use serde_json::Value;

use super::{ListPage, pager};
use crate::{
    action::show_result,
    content::{Hidden, content},
    error::Failure,
    format::short_id,
    layout::Page,
    markup::{Markup, StateStyle, badge},
    query::{Pairs, segment},
    table::{Cell, Row, Table, anchor, escaped, extra_column, extra_number_column, number_column, text_column},
    texts::Texts,
    viewer::Viewer,
};

const LIMIT: u64 = 50;

#[derive(Deserialize, Default)]
pub struct WebhookList {
    pub webhooks: Vec<Webhook>,
    total: u64,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Webhook {
    pub id: String,
    #[serde(default)]
    job_id: Option<String>,
    pub url: String,
    pub event: String,
    pub state: String,
    pub attempts: u64,
    pub created_at: Timestamp,
    due_at: Option<Timestamp>,
    #[serde(default)]
    delay_reason: Option<String>,
    #[serde(default)]
    body: Value,
    #[serde(default)]
    history: Vec<Attempt>,
    #[serde(default)]
    hidden: Hidden,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Attempt {
    number: u64,
    at: Timestamp,
    status: Option<u16>,
    error: Option<String>,
    answer: Option<String>,
    took_ms: i64,
}

pub async fn list(viewer: Viewer, RawQuery(query): RawQuery) -> Result<Page, Failure> {
    let query = Pairs::parse(query.as_deref());
    let wanted = query.only(&["state", "jobId", "host", "page"]).with("limit", &LIMIT.to_string());
    let list: WebhookList = viewer.get(&wanted.link("/api/v1/webhooks")).await?;
    let (t, formats) = (viewer.texts(), viewer.formats());
    let row = |webhook: &Webhook| Row {
        key: webhook.id.clone(),
        cells: vec![
            Cell::link(&format!("{}/webhooks/{}", viewer.base(), webhook.id), &webhook.url),
            Cell::markup(badge(StateStyle::of(&webhook.state), t.word(&webhook.state))),
            Cell::number(&webhook.attempts.to_string()).extra(),
            Cell::text(webhook.delay_reason.as_deref().unwrap_or_default()).long().extra(),
            Cell::markup(webhook.due_at.map_or_else(Markup::default, |at| formats.relative(at))).extra(),
            Cell::markup(formats.age(webhook.created_at)).right(),
        ],
    };
    let table = Table {
        columns: vec![
            text_column(t.receiver),
            text_column(t.state),
            extra_number_column(t.attempts),
            extra_column(t.reason),
            extra_column(t.next_attempt),
            number_column(t.age),
        ],
        rows: list.webhooks.iter().map(row).collect(),
        empty: escaped(t.no_webhooks),
        select_label: None,
    };
    let mut page = ListPage::new(&viewer, t.webhooks, table);
    page.pager = Some(pager(&viewer, "/webhooks", &query, list.total, list.webhooks.len(), LIMIT));
    page.page("/webhooks")
}

#[derive(Template)]
#[template(path = "webhook.html")]
struct WebhookPage<'a> {
    t: &'static Texts,
    base: &'a str,
    webhook: &'a Webhook,
    badge: Markup,
    attempts: String,
    job: Option<Markup>,
    body: Markup,
}

pub async fn show(viewer: Viewer, Path(id): Path<String>) -> Result<Page, Failure> {
    let webhook: Webhook = viewer.get(&format!("/api/v1/webhooks/{}", segment(&id))).await?;
    let t = viewer.texts();
    let job = webhook.job_id.as_ref().map(|id| anchor(&format!("{}/jobs/{id}", viewer.base()), &short_id(id)));
    let page = WebhookPage {
        t,
        base: viewer.base(),
        badge: badge(StateStyle::of(&webhook.state), t.word(&webhook.state)),
        attempts: attempts(&viewer, &webhook.history).render().map_err(Failure::internal)?,
        job,
        body: content(t, &webhook.hidden, "body", &webhook.body),
        webhook: &webhook,
    };
    Page::new(t.webhook, "/webhooks", &page)
}

fn attempts(viewer: &Viewer, attempts: &[Attempt]) -> Table {
    let (t, formats) = (viewer.texts(), viewer.formats());
    let row = |attempt: &Attempt| {
        let is_accepted = attempt.status.is_some_and(|status| (200..300).contains(&status));
        let style = if is_accepted { StateStyle::Completed } else { StateStyle::Failed };
        let status = attempt.status.map_or_else(|| t.no_answer.to_owned(), |status| status.to_string());
        Row {
            key: attempt.number.to_string(),
            cells: vec![
                Cell::number(&attempt.number.to_string()),
                Cell::markup(formats.moment(attempt.at)).extra(),
                Cell::markup(badge(style, &status)),
                Cell::number(&formats.duration(attempt.took_ms)).extra(),
                Cell::text(attempt.error.as_deref().or(attempt.answer.as_deref()).unwrap_or_default()).long(),
            ],
        }
    };
    Table {
        columns: vec![
            number_column(t.attempt),
            extra_column(t.time),
            text_column(t.answer),
            extra_number_column(t.duration),
            text_column(t.details),
        ],
        rows: attempts.iter().map(row).collect(),
        empty: escaped(t.not_sent_yet),
        select_label: None,
    }
}

pub async fn redeliver(viewer: Viewer, Path(id): Path<String>) -> Result<Response, Failure> {
    let id = segment(&id);
    let result = viewer.post(&format!("/api/v1/webhooks/{id}/redeliver")).await;
    show_result(&viewer, &format!("/webhooks/{id}"), result, viewer.texts().webhook_is_redelivered)
}
