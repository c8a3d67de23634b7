//! Limits of the system, of queues, types, keys and machines, and how to change them.

use askama::Template;
use axum::response::Response;
use faena_domain::Timestamp;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{ListPage, queues::Rate};
use crate::{
    action::show_result,
    error::Failure,
    form::Form,
    layout::Page,
    markup::Markup,
    table::{Cell, Row, Table, escaped, extra_column, extra_number_column, number_column, text_column},
    texts::Texts,
    viewer::Viewer,
};

#[derive(Deserialize)]
struct LimitList {
    limits: Vec<Limit>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Limit {
    scope: String,
    name: Option<String>,
    concurrency: Option<u64>,
    rate: Option<Rate>,
    #[serde(default)]
    in_flight: Option<u64>,
    origin: String,
    changed_by: String,
    reached_at: Option<Timestamp>,
}

#[derive(Template)]
#[template(path = "limit_form.html")]
struct LimitForm<'a> {
    t: &'static Texts,
    base: &'a str,
    /// Each scope and the word for it.
    scopes: [(&'static str, &'static str); 5],
}

pub async fn list(viewer: Viewer) -> Result<Page, Failure> {
    let list: LimitList = viewer.get("/api/v1/limits?limit=100").await?;
    let t = viewer.texts();
    let table = Table {
        columns: vec![
            text_column(t.scope),
            text_column(t.name),
            number_column(t.concurrency),
            extra_number_column(t.in_use),
            extra_number_column(t.rate),
            extra_column(t.source),
            extra_number_column(t.reached),
        ],
        rows: list.limits.iter().map(|limit| row(&viewer, limit)).collect(),
        empty: escaped(t.no_limits),
        select_label: None,
    };
    let mut page = ListPage::new(&viewer, t.limits, table);
    let scopes = ["queue", "type", "key", "machine", "system"].map(|scope| (scope, t.word(scope)));
    page.below = Markup::of(&LimitForm { t, base: viewer.base(), scopes });
    page.page("/limits")
}

fn row(viewer: &Viewer, limit: &Limit) -> Row {
    let (t, formats) = (viewer.texts(), viewer.formats());
    let count = |number: Option<u64>| number.map(|number| formats.count(number)).unwrap_or_default();
    let rate = limit.rate.as_ref().map(|rate| format!("{} / {} s", rate.count, rate.period_ms / 1_000));
    let reached = limit.reached_at.map_or_else(Markup::default, |at| formats.relative(at));
    Row {
        key: format!("{}:{}", limit.scope, limit.name.as_deref().unwrap_or_default()),
        cells: vec![
            Cell::text(t.word(&limit.scope)),
            Cell::text(limit.name.as_deref().unwrap_or("–")).with("main"),
            Cell::number(&count(limit.concurrency)),
            Cell::number(&count(limit.in_flight)).extra(),
            Cell::number(&rate.unwrap_or_default()).extra(),
            Cell::text(&format!("{} ({})", t.word(&limit.origin), t.word(&limit.changed_by))).extra(),
            Cell::markup(reached).right().extra(),
        ],
    }
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub struct Fields {
    scope: String,
    name: String,
    concurrency: String,
}

pub async fn change(viewer: Viewer, Form(fields): Form<Fields>) -> Result<Response, Failure> {
    let t = viewer.texts();
    let mut body = Map::new();
    body.insert("scope".into(), json!(fields.scope));
    if !fields.name.trim().is_empty() {
        body.insert("name".into(), json!(fields.name.trim()));
    }
    let concurrency = match fields.concurrency.trim() {
        "" => Value::Null,
        text => json!(text.parse::<u64>().map_err(|_| Failure::bad_request(t.must_be_a_number))?),
    };
    body.insert("concurrency".into(), concurrency);
    let result = viewer.patch("/api/v1/limits", &Value::Object(body)).await;
    show_result(&viewer, "/limits", result, t.saved)
}
