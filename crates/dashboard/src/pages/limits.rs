//! Limits of the system, of queues, types, keys and machines, and how to change them.

use askama::Template;
use axum::{extract::RawQuery, response::Response};
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
    query::Pairs,
    table::{Cell, Row, Table, escaped, extra_column, extra_number_column, number_column, text_column},
    texts::Texts,
    viewer::Viewer,
};

#[derive(Deserialize, Default)]
pub struct LimitList {
    pub limits: Vec<Limit>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Limit {
    pub scope: String,
    name: Option<String>,
    pub concurrency: Option<u64>,
    pub rate: Option<Rate>,
    #[serde(default)]
    pub in_flight: Option<u64>,
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
    fields: Fields,
}

/// The button that removes a limit.
#[derive(Template)]
#[template(
    ext = "html",
    source = r#"<form method="post" action="{{ base }}/limits/reset"><input type="hidden" name="scope" value="{{ limit.scope }}"><input type="hidden" name="name" value="{{ limit.name() }}"><button class="btn danger" data-confirm="{{ t.remove_limit_question }} {{ t.word(limit.scope) }} {{ limit.name() }}?">{{ t.remove }}</button></form>"#
)]
struct RemoveButton<'a> {
    t: &'static Texts,
    base: &'a str,
    limit: &'a Limit,
}

impl Limit {
    pub fn name(&self) -> &str {
        self.name.as_deref().unwrap_or_default()
    }
}

/// Lists the limits. `scope` and `name` in the address choose the limit that the form shows.
pub async fn list(viewer: Viewer, RawQuery(query): RawQuery) -> Result<Page, Failure> {
    let query = Pairs::parse(query.as_deref());
    let list: LimitList = viewer.get("/api/v1/limits?limit=100").await?;
    let t = viewer.texts();
    let table = Table {
        columns: vec![
            extra_column(t.scope),
            text_column(t.name),
            number_column(t.concurrency),
            extra_number_column(t.in_use),
            extra_number_column(t.rate),
            extra_column(t.source),
            extra_number_column(t.reached),
            number_column(t.actions),
        ],
        rows: list.limits.iter().map(|limit| row(&viewer, limit)).collect(),
        empty: escaped(t.no_limits),
        select_label: None,
    };
    let mut page = ListPage::new(&viewer, t.limits, table);
    let scopes = ["queue", "type", "key", "machine", "system"].map(|scope| (scope, t.word(scope)));
    let fields = fields(&list.limits, query.get("scope").unwrap_or_default(), query.get("name").unwrap_or_default());
    page.below = Markup::of(&LimitForm { t, base: viewer.base(), scopes, fields });
    page.page("/limits")
}

/// Returns what the form shows of a limit.
fn fields(limits: &[Limit], scope: &str, name: &str) -> Fields {
    let limit = limits.iter().find(|limit| limit.scope == scope && limit.name() == name);
    Fields {
        scope: scope.to_owned(),
        name: name.to_owned(),
        concurrency: limit.and_then(|limit| limit.concurrency).map(|number| number.to_string()).unwrap_or_default(),
        rate: limit.and_then(|limit| limit.rate.as_ref()).map(Rate::text).unwrap_or_default(),
    }
}

fn row(viewer: &Viewer, limit: &Limit) -> Row {
    let (t, formats, base) = (viewer.texts(), viewer.formats(), viewer.base());
    let count = |number: Option<u64>| number.map(|number| formats.count(number)).unwrap_or_default();
    let rate = limit.rate.as_ref().map(|rate| rate.words(t)).unwrap_or_default();
    let scope = t.word(&limit.scope);
    let note = if rate.is_empty() { scope.to_owned() } else { format!("{scope}, {rate}") };
    let reached = limit.reached_at.map_or_else(Markup::default, |at| formats.relative(at));
    let mut form = Pairs::default();
    form.add("scope", &limit.scope);
    form.add("name", limit.name());
    // A limit of the configuration or of a machine cannot be removed here.
    let remove = match limit.origin.as_str() {
        "api" => Markup::of(&RemoveButton { t, base, limit }),
        _ => Markup::default(),
    };
    Row {
        key: format!("{}:{}", limit.scope, limit.name()),
        cells: vec![
            Cell::text(scope).extra(),
            Cell::link(
                &format!("{}#limit", form.link(&format!("{base}/limits"))),
                limit.name.as_deref().unwrap_or("–"),
            )
            .note(&escaped(&note)),
            Cell::number(&count(limit.concurrency)),
            Cell::number(&count(limit.in_flight)).extra(),
            Cell::number(&rate).extra(),
            Cell::text(&source(t, limit)).extra(),
            Cell::markup(reached).right().extra(),
            Cell::markup(remove).right(),
        ],
    }
}

/// Returns where a limit comes from, and who set it if a person or a program did.
fn source(t: &Texts, limit: &Limit) -> String {
    match limit.origin.as_str() {
        "config" => t.word("config").to_owned(),
        origin => format!("{} ({})", t.word(origin), t.word(&limit.changed_by)),
    }
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub struct Fields {
    scope: String,
    name: String,
    concurrency: String,
    rate: String,
}

impl Fields {
    /// Returns the body of a call about this limit.
    fn body(&self) -> Map<String, Value> {
        let mut body = Map::new();
        body.insert("scope".into(), json!(self.scope));
        if !self.name.trim().is_empty() {
            body.insert("name".into(), json!(self.name.trim()));
        }
        body
    }
}

/// Sets both parts of a limit. An empty field means that there is no such limit.
pub async fn change(viewer: Viewer, Form(fields): Form<Fields>) -> Result<Response, Failure> {
    let t = viewer.texts();
    let mut body = fields.body();
    let concurrency = match fields.concurrency.trim() {
        "" => Value::Null,
        text => json!(text.parse::<u64>().map_err(|_| Failure::bad_request(t.must_be_a_number))?),
    };
    let rate = Some(fields.rate.trim()).filter(|rate| !rate.is_empty());
    body.insert("concurrency".into(), concurrency);
    body.insert("rate".into(), json!(rate));
    let result = viewer.patch("/api/v1/limits", &Value::Object(body)).await;
    show_result(&viewer, "/limits", result, t.saved)
}

/// Removes a limit that was set at run time.
pub async fn reset(viewer: Viewer, Form(fields): Form<Fields>) -> Result<Response, Failure> {
    let result = viewer.post_json("/api/v1/limits/reset", &Value::Object(fields.body())).await;
    show_result(&viewer, "/limits", result, viewer.texts().limit_was_removed)
}
