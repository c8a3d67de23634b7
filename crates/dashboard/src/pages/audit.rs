//! The audit log: who changed what, when.

use axum::extract::RawQuery;
use faena_domain::Timestamp;
use serde::Deserialize;
use serde_json::Value;

use super::{ListPage, pager};
use crate::{
    error::Failure,
    layout::Page,
    query::Pairs,
    table::{Cell, Row, Table, escaped, extra_column, extra_number_column, text_column},
    viewer::Viewer,
};

const LIMIT: u64 = 50;

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

pub async fn list(viewer: Viewer, RawQuery(query): RawQuery) -> Result<Page, Failure> {
    let query = Pairs::parse(query.as_deref());
    let wanted = query.only(&["actor", "action", "target", "page"]).with("limit", &LIMIT.to_string());
    let list: AuditList = viewer.get(&wanted.link("/api/v1/audit")).await?;
    let (t, formats) = (viewer.texts(), viewer.formats());
    let row = |entry: &Entry| Row {
        key: entry.sequence.to_string(),
        cells: vec![
            Cell::markup(formats.relative(entry.at)),
            Cell::text(&entry.actor),
            Cell::text(&entry.action).with("main").note(&escaped(&entry.target)),
            Cell::text(&entry.target).extra(),
            Cell::number(&formats.count(entry.count)).extra(),
            Cell::text(&entry.details.to_string()).long().extra(),
        ],
    };
    let table = Table {
        columns: vec![
            text_column(t.time),
            text_column(t.actor),
            text_column(t.action),
            extra_column(t.target),
            extra_number_column(t.count),
            extra_column(t.details),
        ],
        rows: list.entries.iter().map(row).collect(),
        empty: escaped(t.no_audit),
        select_label: None,
    };
    let mut page = ListPage::new(&viewer, t.audit, table);
    page.pager = Some(pager(&viewer, "/audit", &query, list.total, list.entries.len(), LIMIT));
    page.page("/audit")
}
