//! The about page: version and health of this server, the nodes, what the checks have found, and the heartbeats of the loops.

use askama::Template;
use axum::response::Response;
use faena_domain::Timestamp;
use serde::Deserialize;
use serde_json::Value;

use crate::{
    action::show_result,
    error::Failure,
    findings::kind,
    layout::Page,
    markup::{Markup, StateStyle, badge},
    reasons::english,
    table::{Cell, Row, Table, escaped, extra_column, extra_number_column, number_column, text_column},
    texts::{Language, Texts},
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

#[derive(Deserialize, Default)]
#[serde(default)]
struct NodeList {
    nodes: Vec<Node>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Node {
    id: String,
    name: String,
    version: String,
    started_at: Timestamp,
    last_seen_at: Timestamp,
    is_this: bool,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct DoctorReport {
    is_running: bool,
    checked_at: Option<Timestamp>,
    error: Option<String>,
    findings: Vec<Finding>,
}

#[derive(Deserialize)]
struct Finding {
    code: String,
    severity: String,
    text: String,
    advice: String,
}

/// What the checks have found.
struct ChecksPanel {
    is_running: bool,
    checked: Option<Markup>,
    error: Option<String>,
    findings: String,
}

#[derive(Template)]
#[template(path = "about.html")]
struct AboutPage<'a> {
    t: &'static Texts,
    base: &'a str,
    health: Markup,
    version: &'static str,
    database: String,
    nodes: String,
    /// `None`: the viewer may not see them.
    checks: Option<ChecksPanel>,
    loops: String,
    configuration: Option<String>,
}

pub async fn show(viewer: Viewer) -> Result<Page, Failure> {
    let ready: Ready = viewer.get("/health/ready").await?;
    // A key that is restricted to queues sees no nodes.
    let nodes = viewer.get::<NodeList>("/api/v1/nodes").await.unwrap_or_default();
    let checks = match viewer.get::<DoctorReport>("/api/v1/doctor").await {
        Ok(report) => Some(checks_panel(&viewer, report)?),
        Err(_) => None,
    };
    let configuration = match viewer.configuration().await {
        Some(rows) => Some(configuration_table(viewer.texts(), rows).render().map_err(Failure::internal)?),
        None => None,
    };
    let t = viewer.texts();
    let engine = ready.checks.database["engine"].as_str().unwrap_or_default();
    let page = AboutPage {
        t,
        base: viewer.base(),
        health: badge(StateStyle::of(&ready.status), t.word(&ready.status)),
        version: env!("CARGO_PKG_VERSION"),
        database: if engine == "postgres" { "PostgreSQL".into() } else { "SQLite".into() },
        nodes: node_table(&viewer, &nodes.nodes).render().map_err(Failure::internal)?,
        checks,
        loops: loop_table(&viewer, &ready.checks.loops).render().map_err(Failure::internal)?,
        configuration,
    };
    Page::new(t.about, "/about", &page)
}

/// Starts the checks.
pub async fn check(viewer: Viewer) -> Result<Response, Failure> {
    show_result(&viewer, "/about", viewer.post("/api/v1/doctor").await, viewer.texts().checks_started)
}

fn node_table(viewer: &Viewer, nodes: &[Node]) -> Table {
    let (t, formats) = (viewer.texts(), viewer.formats());
    let row = |node: &Node| {
        let name = if node.is_this { format!("{} ({})", node.name, t.this_node) } else { node.name.clone() };
        Row {
            key: node.id.clone(),
            cells: vec![
                Cell::text(&name).with("main"),
                Cell::text(&node.id).extra(),
                Cell::text(&node.version),
                Cell::markup(formats.relative(node.started_at)).extra(),
                Cell::markup(formats.relative(node.last_seen_at)).right(),
            ],
        }
    };
    Table {
        columns: vec![
            text_column(t.node),
            extra_column(t.id),
            text_column(t.version),
            extra_column(t.started_at),
            number_column(t.last_beat),
        ],
        rows: nodes.iter().map(row).collect(),
        ..Table::default()
    }
}

fn checks_panel(viewer: &Viewer, report: DoctorReport) -> Result<ChecksPanel, Failure> {
    let t = viewer.texts();
    let row = |finding: &Finding| {
        let (text, advice) = finding_texts(viewer, finding);
        Row {
            key: finding.code.clone(),
            cells: vec![
                Cell::markup(badge(severity_style(&finding.severity), t.word(&finding.severity))),
                Cell::text(&finding.code).extra(),
                Cell::markup(text).with("wrap").note(&advice),
                Cell::markup(advice).with("wrap").extra(),
            ],
        }
    };
    let table = Table {
        columns: vec![text_column(t.state), extra_column(t.code), text_column(t.finding), extra_column(t.advice)],
        rows: report.findings.iter().map(row).collect(),
        empty: escaped(t.nothing_found),
        select_label: None,
    };
    Ok(ChecksPanel {
        is_running: report.is_running,
        checked: report.checked_at.map(|at| viewer.formats().relative(at)),
        error: report.error,
        findings: table.render().map_err(Failure::internal)?,
    })
}

#[derive(Template)]
#[template(ext = "html", source = "{{ meaning }}: {{ text }}")]
struct Translated {
    meaning: &'static str,
    text: Markup,
}

/// Returns what was found and what to do about it. In Spanish, the text of the API follows with its details.
fn finding_texts(viewer: &Viewer, finding: &Finding) -> (Markup, Markup) {
    let text = english(viewer, &finding.text, &[]);
    match (viewer.language(), kind(&finding.code)) {
        (Language::Spanish, Some(kind)) => {
            (Markup::of(&Translated { meaning: kind.meaning, text }), escaped(kind.advice))
        }
        _ => (text, english(viewer, &finding.advice, &[])),
    }
}

fn severity_style(severity: &str) -> StateStyle {
    if severity == "error" { StateStyle::Problem } else { StateStyle::Warning }
}

fn loop_table(viewer: &Viewer, loops: &[LoopHealth]) -> Table {
    let (t, formats) = (viewer.texts(), viewer.formats());
    let row = |health: &LoopHealth| Row {
        key: health.name.clone(),
        cells: vec![
            Cell::text(&health.name),
            Cell::markup(badge(StateStyle::of(&health.status), t.word(&health.status))),
            Cell::number(&formats.count(health.handled)).extra(),
            Cell::markup(health.last_beat_at.map_or_else(Markup::default, |at| formats.relative(at))).right(),
        ],
    };
    Table {
        columns: vec![
            text_column(t.loop_title),
            text_column(t.state),
            extra_number_column(t.handled),
            number_column(t.last_beat),
        ],
        rows: loops.iter().map(row).collect(),
        empty: escaped(t.no_loops),
        select_label: None,
    }
}

/// Returns where a value comes from: a word, a variable, an option, or a line of a file.
fn source_text(t: &Texts, source: &str) -> String {
    match source.rsplit_once(", line ") {
        Some((file, line)) => format!("{file}, {} {line}", t.line),
        None => t.word(source).to_owned(),
    }
}

fn configuration_table(t: &Texts, rows: &[(String, String, String)]) -> Table {
    let row = |(key, value, source): &(String, String, String)| Row {
        key: key.clone(),
        cells: vec![
            Cell::text(key).with("main").note(&escaped(value)),
            Cell::text(value).long().extra(),
            Cell::text(&source_text(t, source)).extra(),
        ],
    };
    Table {
        columns: vec![text_column(t.key_title), extra_column(t.value), extra_column(t.source)],
        rows: rows.iter().map(row).collect(),
        ..Table::default()
    }
}
