//! Shows payloads, results and data of jobs and tasks: as JSON, or the reason why they are hidden.

use askama::Template;
use serde_json::Value;

use crate::{markup::Markup, texts::Texts, visible::visible_json};

/// The fields of an answer that the viewer's key may not see.
pub type Hidden = Vec<String>;

#[derive(Template)]
#[template(
    ext = "html",
    source = r#"{% if let Some(text) = text %}<pre id="{{ id }}" tabindex="0">{{ text }}</pre>{% else %}<p class="empty">{{ t.payload_is_hidden }}</p>{% endif %}"#
)]
struct Content<'a> {
    t: &'static Texts,
    id: &'a str,
    text: Option<String>,
}

/// Returns the content of a field, or an explanation if it is hidden. `id` is the name of the field.
pub fn content(t: &'static Texts, hidden: &Hidden, id: &str, value: &Value) -> Markup {
    let is_hidden = hidden.iter().any(|name| name == id);
    Markup::of(&Content { t, id, text: (!is_hidden).then(|| pretty(value)) })
}

/// Returns indented JSON.
pub fn pretty(value: &Value) -> String {
    visible_json(serde_json::to_string_pretty(value).unwrap_or_default())
}
