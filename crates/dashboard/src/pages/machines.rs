//! Machines with their versions, and a drawing of each.

use std::collections::BTreeMap;

use askama::Template;
use axum::extract::{Path, RawQuery};
use faena_domain::Timestamp;
use serde::Deserialize;
use serde_json::Value;

use super::{ListPage, drawing, empty_list_hint};
use crate::{
    content::pretty,
    error::Failure,
    layout::Page,
    markup::Markup,
    query::{Pairs, segment},
    table::{Cell, Row, Table, extra_column, number_column, text_column},
    texts::Texts,
    viewer::Viewer,
};

#[derive(Deserialize)]
struct MachineList {
    machines: Vec<Machine>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Machine {
    name: String,
    version: u64,
    hash: String,
    created_at: Timestamp,
    created_by: String,
    #[serde(default)]
    tasks: BTreeMap<String, u64>,
}

pub async fn list(viewer: Viewer) -> Result<Page, Failure> {
    let list: MachineList = viewer.get("/api/v1/machines").await?;
    let t = viewer.texts();
    let page = ListPage::new(&viewer, t.machines, table(&viewer, &list.machines));
    page.page("/machines")
}

fn table(viewer: &Viewer, machines: &[Machine]) -> Table {
    let (t, formats) = (viewer.texts(), viewer.formats());
    let row = |machine: &Machine| {
        let tasks: Vec<String> =
            machine.tasks.iter().map(|(status, count)| t.tasks_with_status(*count, status)).collect();
        let link = format!("{}/machines/{}?version={}", viewer.base(), segment(&machine.name), machine.version);
        Row {
            key: format!("{}:{}", machine.name, machine.version),
            cells: vec![
                Cell::link(&link, &machine.name),
                Cell::number(&machine.version.to_string()),
                Cell::text(&tasks.join(", ")).extra(),
                Cell::text(&machine.created_by).extra(),
                Cell::text(&machine.hash.chars().take(12).collect::<String>()).extra(),
                Cell::markup(formats.relative(machine.created_at)).right(),
            ],
        }
    };
    Table {
        columns: vec![
            text_column(t.machine),
            number_column(t.version),
            extra_column(t.tasks),
            extra_column(t.registered_by),
            extra_column("SHA-256"),
            number_column(t.registered),
        ],
        rows: machines.iter().map(row).collect(),
        empty: empty_list_hint(t.no_machines, "faena machines register machine.yaml"),
        select_label: None,
    }
}

#[derive(Deserialize)]
struct Detail {
    name: String,
    version: u64,
    versions: Vec<u64>,
    definition: Value,
}

#[derive(Template)]
#[template(path = "machine.html")]
struct MachinePage<'a> {
    t: &'static Texts,
    base: &'a str,
    machine: &'a Detail,
    versions: Vec<(u64, String)>,
    drawing: Markup,
    definition: String,
}

pub async fn show(viewer: Viewer, Path(name): Path<String>, RawQuery(query): RawQuery) -> Result<Page, Failure> {
    let query = Pairs::parse(query.as_deref());
    let machine: Detail =
        viewer.get(&query.only(&["version"]).link(&format!("/api/v1/machines/{}", segment(&name)))).await?;
    let link = |version: &u64| {
        let link = format!("{}/machines/{}?version={version}", viewer.base(), segment(&name));
        (*version, link)
    };
    let page = MachinePage {
        t: viewer.texts(),
        base: viewer.base(),
        versions: machine.versions.iter().map(link).collect(),
        drawing: drawing::draw(&machine.definition, &[]).unwrap_or_default(),
        definition: pretty(&machine.definition),
        machine: &machine,
    };
    Page::new(machine.name.clone(), "/machines", &page)
}
