//! Webhooks with their attempts, and their redelivery.

use askama::Template;
use axum::{
    extract::{Path, RawQuery},
    response::Response,
};
use faena_domain::Timestamp;
use serde::Deserialize;
use serde_json::Value;

use super::{
    ListPage,
    filters::{Chip, ListFilters},
    pager,
};
use crate::{
    action::show_result,
    content::{Hidden, content},
    error::Failure,
    format::short_id,
    layout::Page,
    markup::{Markup, StateStyle, badge},
    prose::prose,
    query::{Pairs, segment},
    table::{
        Cell, Row, StateAndFact, Table, anchor, escaped, extra_column, extra_number_column, number_column, text_column,
    },
    texts::{Language, Texts},
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

impl Webhook {
    fn circuit_open_until(&self) -> Option<Timestamp> {
        let (_, until) = self.delay_reason.as_deref()?.split_once(CIRCUIT_OPEN)?;
        let until: jiff::Timestamp = until.parse().ok()?;
        Some(Timestamp::from_ms(until.as_millisecond()))
    }

    /// Returns its state as a badge.
    pub fn badge(&self, t: &Texts) -> Markup {
        badge(StateStyle::of(&self.state), t.word(&self.state))
    }
}

pub async fn list(viewer: Viewer, RawQuery(query): RawQuery) -> Result<Page, Failure> {
    let query = Pairs::parse(query.as_deref());
    let wanted = query.only(&["state", "jobId", "host", "page"]).with("limit", &LIMIT.to_string());
    let list: WebhookList = viewer.get(&wanted.link("/api/v1/webhooks")).await?;
    let (t, formats) = (viewer.texts(), viewer.formats());
    let details = futures_util::future::join_all(list.webhooks.iter().map(|webhook| details(&viewer, webhook))).await;
    let row = |(webhook, details): (&Webhook, &Option<Webhook>)| {
        let webhook = details.as_ref().unwrap_or(webhook);
        let reason = why_not_delivered(t, webhook);
        let (state, fact) = (webhook.badge(t), prose(&viewer, &reason, &[]));
        let note = Markup::of(&StateAndFact { state: &state, fact: &fact });
        Row {
            key: webhook.id.clone(),
            cells: vec![
                Cell::link(&format!("{}/webhooks/{}", viewer.base(), webhook.id), &webhook.url).note(&note),
                Cell::markup(state).extra(),
                Cell::number(&webhook.attempts.to_string()).extra(),
                Cell::markup(fact).titled(&reason).long().extra(),
                Cell::markup(next_attempt(&viewer, webhook)).extra(),
                Cell::markup(formats.age(webhook.created_at)).right(),
            ],
        }
    };
    let table = Table {
        columns: vec![
            text_column(t.receiver),
            extra_column(t.state),
            extra_number_column(t.attempts),
            extra_column(t.reason),
            extra_column(t.next_attempt),
            number_column(t.age),
        ],
        rows: list.webhooks.iter().zip(&details).map(row).collect(),
        empty: escaped(t.no_webhooks),
        select_label: None,
    };
    let mut page = ListPage::new(&viewer, t.webhooks, table);
    page.filters =
        Markup::of(&ListFilters { t, chips: chips(&viewer, &query), active_filters: Vec::new(), clear: String::new() });
    page.pager = Some(pager(&viewer, "/webhooks", &query, list.total, list.webhooks.len(), LIMIT));
    page.page("/webhooks")
}

/// States, those that need attention first.
const STATES: [&str; 4] = ["FAILED", "WAITING", "SENDING", "DELIVERED"];

fn chips(viewer: &Viewer, query: &Pairs) -> Vec<Chip> {
    let chip = |state: &str| {
        let is_current = query.get("state") == Some(state);
        let rest = query.without("page").without("state");
        let link = if is_current { rest } else { rest.with("state", state) };
        let badge = badge(StateStyle::of(state), viewer.texts().word(state));
        Chip { link: link.link(&format!("{}/webhooks", viewer.base())), badge, is_current }
    };
    STATES.into_iter().map(chip).collect()
}

/// Reads a webhook again if it is not delivered, because the list of the API does not contain its attempts.
async fn details(viewer: &Viewer, webhook: &Webhook) -> Option<Webhook> {
    if webhook.state == "DELIVERED" {
        return None;
    }
    viewer.get(&format!("/api/v1/webhooks/{}", segment(&webhook.id))).await.ok()
}

/// Returns why a webhook is not delivered: how the last attempt ended, and why it is not sent although it is due.
fn why_not_delivered(t: &Texts, webhook: &Webhook) -> String {
    if webhook.state == "DELIVERED" {
        return String::new();
    }
    let last = webhook.history.last().map(|attempt| match (&attempt.error, attempt.status) {
        (Some(error), _) => error.clone(),
        (None, Some(status)) => format!("HTTP {status}"),
        (None, None) => t.no_answer.to_owned(),
    });
    let parts = [last, webhook.delay_reason.as_deref().map(|reason| delay_text(t, reason))];
    parts.into_iter().flatten().collect::<Vec<_>>().join("; ")
}

/// Returns when a waiting webhook is sent. Empty in other states: while a webhook is being sent, `due_at` is the latest
/// end of that attempt.
fn next_attempt(viewer: &Viewer, webhook: &Webhook) -> Markup {
    // Until its receiver's circuit closes, a webhook that is due is not sent.
    let due = webhook.circuit_open_until().or(webhook.due_at);
    match due.filter(|_| webhook.state == "WAITING") {
        Some(at) if at <= viewer.now() => escaped(viewer.texts().due_now),
        Some(at) => viewer.formats().relative(at),
        None => Markup::default(),
    }
}

const CIRCUIT_OPEN: &str = " keeps failing; its circuit is open until ";

/// Returns why a webhook is not sent now: `host keeps failing; its circuit is open until …`.
fn delay_text(t: &Texts, reason: &str) -> String {
    match (t.language(), reason.split_once(CIRCUIT_OPEN)) {
        (Language::Spanish, Some((host, until))) => {
            format!("{host} sigue fallando; su circuito está abierto hasta las {until}")
        }
        _ => reason.to_owned(),
    }
}

#[derive(Template)]
#[template(path = "webhook.html")]
struct WebhookPage<'a> {
    t: &'static Texts,
    base: &'a str,
    webhook: &'a Webhook,
    badge: Markup,
    style: &'static str,
    /// Why it is not delivered.
    why: Markup,
    next_attempt: Markup,
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
        badge: webhook.badge(t),
        why: prose(&viewer, &why_not_delivered(t, &webhook), &[]),
        style: StateStyle::of(&webhook.state).class(),
        next_attempt: next_attempt(&viewer, &webhook),
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
