//! API keys: who has one, and creating, rotating and revoking them. A new key is shown once.

use askama::Template;
use axum::{
    extract::Path,
    response::{IntoResponse, Response},
};
use faena_domain::Timestamp;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{ListPage, empty_list_hint};
use crate::{
    action::show_result,
    error::Failure,
    form::Fields,
    layout::Page,
    markup::{Markup, StateStyle, badge},
    query::segment,
    table::{Cell, Row, Table, escaped, extra_column, number_column, text_column},
    texts::Texts,
    viewer::Viewer,
};

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct KeyList {
    api_keys: Vec<Key>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Key {
    id: String,
    name: String,
    scopes: Vec<String>,
    queues: Option<Vec<String>>,
    #[serde(default)]
    without_payloads: bool,
    expires_at: Option<Timestamp>,
    last_used_at: Option<Timestamp>,
    revoked_at: Option<Timestamp>,
}

#[derive(Template)]
#[template(path = "key_form.html")]
struct KeyForm<'a> {
    t: &'static Texts,
    base: &'a str,
    keys: Vec<(String, String)>,
    /// Each scope and what it permits.
    scopes: [(&'static str, &'static str); 4],
    /// A new key, shown once.
    created: Option<String>,
    error: Option<String>,
}

/// The first key of a server. From now on the viewer needs a key too.
#[derive(Template)]
#[template(path = "first_key.html")]
struct FirstKey<'a> {
    t: &'static Texts,
    base: &'a str,
    key: &'a str,
}

pub async fn list(viewer: Viewer) -> Result<Page, Failure> {
    show(&viewer, None, None).await
}

async fn show(viewer: &Viewer, created: Option<String>, error: Option<String>) -> Result<Page, Failure> {
    let list: KeyList = viewer.get("/api/v1/api-keys?limit=100").await?;
    let t = viewer.texts();
    let live = list.api_keys.iter().filter(|key| key.revoked_at.is_none());
    let keys = live.map(|key| (segment(&key.id), key.name.clone())).collect();
    let mut page = ListPage::new(viewer, t.keys, table(viewer, &list.api_keys));
    let scopes =
        [("read", t.scope_read), ("write", t.scope_write), ("worker", t.scope_worker), ("admin", t.scope_admin)];
    page.below = Markup::of(&KeyForm { t, base: viewer.base(), keys, scopes, created, error });
    page.page("/keys")
}

fn state(viewer: &Viewer, key: &Key) -> Markup {
    let t = viewer.texts();
    match (key.revoked_at, key.expires_at) {
        (Some(_), _) => badge(StateStyle::Off, t.revoked),
        (None, Some(at)) if at <= viewer.now() => badge(StateStyle::Warning, t.expired),
        _ => badge(StateStyle::On, t.active),
    }
}

/// Returns the scopes of a key, and a note if payloads are hidden from it.
fn scopes(t: &Texts, key: &Key) -> String {
    let hidden = key.without_payloads.then_some(t.payloads_hidden);
    key.scopes.iter().map(String::as_str).chain(hidden).collect::<Vec<_>>().join(", ")
}

fn table(viewer: &Viewer, keys: &[Key]) -> Table {
    let (t, formats) = (viewer.texts(), viewer.formats());
    let time = |at: Option<Timestamp>| at.map_or_else(Markup::default, |at| formats.relative(at));
    let row = |key: &Key| Row {
        key: key.id.clone(),
        cells: vec![
            Cell::text(&key.name).with("main").note(&escaped(&scopes(t, key))),
            Cell::markup(state(viewer, key)),
            Cell::text(&scopes(t, key)).extra(),
            Cell::text(&key.queues.as_ref().map(|queues| queues.join(", ")).unwrap_or_default()).extra(),
            Cell::markup(time(key.expires_at)).extra(),
            Cell::markup(time(key.last_used_at)).right(),
        ],
    };
    Table {
        columns: vec![
            text_column(t.name),
            text_column(t.state),
            extra_column(t.scopes),
            extra_column(t.queues),
            extra_column(t.expires),
            number_column(t.last_used),
        ],
        rows: keys.iter().map(row).collect(),
        empty: empty_list_hint(t.no_keys, "faena keys create ops --scopes admin"),
        select_label: None,
    }
}

/// Creates a key from the fields `name`, `queues`, `expiresAt` and `withoutPayloads` and the ticked `scope`s.
pub async fn create(viewer: Viewer, Fields(fields): Fields) -> Result<Response, Failure> {
    let field = |name: &str| fields.iter().find(|(found, _)| found == name).map_or("", |(_, value)| value.trim());
    let scopes: Vec<&str> =
        fields.iter().filter(|(name, _)| name == "scope").map(|(_, scope)| scope.as_str()).collect();
    let mut body = Map::new();
    body.insert("name".into(), json!(field("name")));
    body.insert("scopes".into(), json!(scopes));
    let queues: Vec<&str> = field("queues").split(',').map(str::trim).filter(|queue| !queue.is_empty()).collect();
    if !queues.is_empty() {
        body.insert("queues".into(), json!(queues));
    }
    if !field("expiresAt").is_empty() {
        body.insert("expiresAt".into(), json!(field("expiresAt")));
    }
    if !field("withoutPayloads").is_empty() {
        body.insert("withoutPayloads".into(), json!(true));
    }
    answer(&viewer, viewer.post_json("/api/v1/api-keys", &Value::Object(body)).await).await
}

/// Shows the secret of a new or rotated key, which is never shown again.
async fn answer(viewer: &Viewer, result: Result<Value, Failure>) -> Result<Response, Failure> {
    match result {
        Ok(created) => {
            let key = created["key"].as_str().unwrap_or_default();
            let page = match show(viewer, Some(key.to_owned()), None).await {
                Err(failure) if failure.needs_login() => {
                    let t = viewer.texts();
                    Page::new(t.keys, "/keys", &FirstKey { t, base: viewer.base(), key })
                }
                page => page,
            };
            Ok(page?.without_updates().into_response())
        }
        Err(failure) if failure.needs_login() => Err(failure),
        Err(failure) => {
            let page = show(viewer, None, Some(failure.message)).await?;
            Ok(page.with_status(failure.status).into_response())
        }
    }
}

pub async fn act(viewer: Viewer, Path((id, action)): Path<(String, String)>) -> Result<Response, Failure> {
    let (t, path) = (viewer.texts(), format!("/api/v1/api-keys/{}", segment(&id)));
    match action.as_str() {
        "rotate" => answer(&viewer, viewer.post(&format!("{path}/rotate")).await).await,
        "revoke" => show_result(&viewer, "/keys", viewer.delete(&path).await, t.key_was_revoked),
        _ => Err(Failure::not_found(t.no_such_action)),
    }
}
