//! The audit log: who changed what, when.

use askama::Template;
use axum::extract::RawQuery;
use faena_domain::Timestamp;
use serde::Deserialize;
use serde_json::Value;

use super::{ListPage, pager};
use crate::{
    error::Failure,
    format::short_id,
    layout::Page,
    markup::Markup,
    query::{Pairs, segment},
    table::{Cell, Row, Table, anchor, escaped, extra_column, extra_number_column, text_column},
    viewer::Viewer,
};

const LIMIT: u64 = 50;
const ID_CHARS: usize = 36;

#[derive(Deserialize)]
struct AuditList {
    entries: Vec<Entry>,
    total: u64,
}

#[derive(Deserialize)]
struct Entry {
    sequence: u64,
    at: Timestamp,
    actor: String,
    action: String,
    target: String,
    details: Value,
    count: u64,
}

/// The zone of the times, which the script replaces with that of the browser.
#[derive(Template)]
#[template(ext = "html", source = r#"<span class="muted small" data-zone>UTC</span>"#)]
struct Zone {}

/// The actor and the target of an entry, in the second line of a narrow table.
#[derive(Template)]
#[template(ext = "html", source = "{{ actor }}: {{ target }}")]
struct ActorAndTarget<'a> {
    actor: &'a str,
    target: &'a Markup,
}

/// Returns what was changed, with a link to its page if it has one.
fn target(viewer: &Viewer, entry: &Entry) -> Markup {
    let (kind, action) = entry.action.split_once('.').unwrap_or_default();
    // An action on many jobs has a filter as its target, and what was deleted has no page.
    let has_page = action != "delete" && entry.target.len() == ID_CHARS;
    let path = match kind {
        "job" | "schedule" | "task" | "worker" | "webhook" if has_page => {
            format!("/{kind}s/{}", segment(&entry.target))
        }
        _ => return escaped(&entry.target),
    };
    anchor(&format!("{}{path}", viewer.base()), &short_id(&entry.target))
}

pub async fn list(viewer: Viewer, RawQuery(query): RawQuery) -> Result<Page, Failure> {
    let query = Pairs::parse(query.as_deref());
    let wanted = query.only(&["actor", "action", "target", "page"]).with("limit", &LIMIT.to_string());
    let list: AuditList = viewer.get(&wanted.link("/api/v1/audit")).await?;
    let (t, formats) = (viewer.texts(), viewer.formats());
    let row = |entry: &Entry| Row {
        key: entry.sequence.to_string(),
        cells: vec![
            Cell::markup(formats.moment(entry.at)),
            Cell::text(&entry.action)
                .with("main")
                .note(&Markup::of(&ActorAndTarget { actor: &entry.actor, target: &target(&viewer, entry) })),
            Cell::text(&entry.actor).extra(),
            Cell::markup(target(&viewer, entry)).titled(&entry.target).with("main").extra(),
            Cell::number(&formats.count(entry.count)).extra(),
            Cell::text(&entry.details.to_string()).long().extra(),
        ],
    };
    let table = Table {
        columns: vec![
            text_column(t.time),
            text_column(t.action),
            extra_column(t.actor),
            extra_column(t.target),
            extra_number_column(t.count),
            extra_column(t.details),
        ],
        rows: list.entries.iter().map(row).collect(),
        empty: escaped(t.no_audit),
        select_label: None,
    };
    let mut page = ListPage::new(&viewer, t.audit, table);
    page.tools = Markup::of(&Zone {});
    page.pager = Some(pager(&viewer, "/audit", &query, list.total, list.entries.len(), LIMIT));
    page.page("/audit")
}
