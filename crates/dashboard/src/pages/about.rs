//! The about page: version and health of this server, and the heartbeats of its loops.

use askama::Template;
use faena_domain::Timestamp;
use serde::Deserialize;
use serde_json::Value;

use crate::{
    error::Failure,
    layout::Page,
    markup::{Look, Markup, badge},
    table::{Cell, Row, Table, escaped, extra_column, extra_number_column, number_column, text_column},
    texts::Texts,
    viewer::Viewer,
};

#[derive(Deserialize, Default)]
#[serde(default)]
struct Ready {
    status: String,
    checks: Checks,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Checks {
    database: Value,
    loops: Vec<LoopHealth>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct LoopHealth {
    name: String,
    status: String,
    last_beat_at: Option<Timestamp>,
    #[serde(default)]
    handled: u64,
}

#[derive(Template)]
#[template(path = "about.html")]
struct AboutPage<'a> {
    t: &'static Texts,
    base: &'a str,
    health: Markup,
    version: &'static str,
    database: String,
    loops: String,
    configuration: Option<String>,
}

pub async fn show(viewer: Viewer) -> Result<Page, Failure> {
    let ready: Ready = viewer.get("/health/ready").await?;
    let (t, formats) = (viewer.texts(), viewer.formats());
    let row = |health: &LoopHealth| Row {
        key: health.name.clone(),
        cells: vec![
            Cell::text(&health.name),
            Cell::markup(badge(Look::of(&health.status), t.word(&health.status))),
            Cell::number(&formats.count(health.handled)).extra(),
            Cell::markup(health.last_beat_at.map_or_else(Markup::default, |at| formats.relative(at))).right(),
        ],
    };
    let loops = Table {
        columns: vec![
            text_column(t.loop_title),
            text_column(t.state),
            extra_number_column(t.handled),
            number_column(t.last_beat),
        ],
        rows: ready.checks.loops.iter().map(row).collect(),
        empty: escaped(t.no_loops),
        select_label: None,
    };
    let configuration = match viewer.configuration().await {
        Some(rows) => Some(configuration_table(t, rows).render().map_err(Failure::internal)?),
        None => None,
    };
    let engine = ready.checks.database["engine"].as_str().unwrap_or_default();
    let page = AboutPage {
        t,
        base: viewer.base(),
        health: badge(Look::of(&ready.status), t.word(&ready.status)),
        version: env!("CARGO_PKG_VERSION"),
        database: if engine == "postgres" { "PostgreSQL".into() } else { "SQLite".into() },
        loops: loops.render().map_err(Failure::internal)?,
        configuration,
    };
    Page::new(t.about, "/about", &page)
}

fn configuration_table(t: &Texts, rows: &[(String, String, String)]) -> Table {
    let row = |(key, value, source): &(String, String, String)| Row {
        key: key.clone(),
        cells: vec![Cell::text(key).with("main"), Cell::text(value).long(), Cell::text(source).extra()],
    };
    Table {
        columns: vec![text_column(t.key_title), text_column(t.value), extra_column(t.source)],
        rows: rows.iter().map(row).collect(),
        ..Table::default()
    }
}
