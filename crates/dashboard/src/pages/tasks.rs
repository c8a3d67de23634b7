//! Tasks, and those of them that wait for a decision.

use std::collections::BTreeMap;

use axum::extract::RawQuery;
use faena_domain::Timestamp;
use serde::Deserialize;

use super::{
    ListPage, empty_list_hint,
    filters::{Chip, ListFilters},
    pager,
};
use crate::{
    error::Failure,
    layout::Page,
    markup::{Markup, StateStyle, badge},
    query::Pairs,
    table::{Cell, Row, Table, escaped, extra_column, extra_number_column, number_column, text_column},
    texts::Texts,
    viewer::Viewer,
};

const LIMIT: u64 = 50;

#[derive(Deserialize)]
struct TaskList {
    tasks: Vec<Task>,
    total: u64,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Task {
    id: String,
    machine: String,
    version: u64,
    title: Option<String>,
    status: String,
    state: String,
    created_at: Timestamp,
    updated_at: Timestamp,
    #[serde(default)]
    due_at: Option<Timestamp>,
    #[serde(default)]
    approval: Option<serde_json::Value>,
}

pub async fn list(viewer: Viewer, RawQuery(query): RawQuery) -> Result<Page, Failure> {
    let title = viewer.texts().tasks;
    show_list(viewer, Pairs::parse(query.as_deref()), title, "/tasks").await
}

/// Lists the tasks that wait for a decision.
pub async fn approvals(viewer: Viewer, RawQuery(query): RawQuery) -> Result<Page, Failure> {
    let title = viewer.texts().approvals;
    show_list(viewer, Pairs::parse(query.as_deref()).with("approval", "true"), title, "/approvals").await
}

async fn show_list(viewer: Viewer, query: Pairs, title: &str, section: &'static str) -> Result<Page, Failure> {
    let wanted = query
        .only(&["machine", "state", "status", "tag", "correlationId", "approval", "page"])
        .with("limit", &LIMIT.to_string());
    let list: TaskList = viewer.get(&wanted.link("/api/v1/tasks")).await?;
    let is_approvals = section == "/approvals";
    // A task that waits for a decision is running.
    let chips = if is_approvals { Vec::new() } else { chips(&viewer, &query).await };
    let clear = query.only(&["status"]).link(&format!("{}{section}", viewer.base()));
    let active_filters = active_filters(viewer.texts(), &query);
    let mut page = ListPage::new(&viewer, title, table(&viewer, &list.tasks, is_approvals));
    page.filters = Markup::of(&ListFilters { t: viewer.texts(), chips, active_filters, clear });
    page.pager = Some(pager(&viewer, section, &query.without("approval"), list.total, list.tasks.len(), LIMIT));
    page.page(section)
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Counts {
    by_status: BTreeMap<String, u64>,
}

#[derive(Deserialize)]
struct Overview {
    tasks: Counts,
}

/// Statuses, those that need attention first.
const STATUSES: [&str; 6] = ["failed", "paused", "running", "queued", "completed", "cancelled"];

/// Returns the statuses with the number of tasks in the whole system. A status without tasks is left out, unless it is the
/// filter.
async fn chips(viewer: &Viewer, query: &Pairs) -> Vec<Chip> {
    let (t, formats) = (viewer.texts(), viewer.formats());
    let Ok(Overview { tasks }) = viewer.get("/api/v1/metrics/overview").await else { return Vec::new() };
    let chip = |status: &str| {
        let count = tasks.by_status.get(status).copied().unwrap_or(0);
        let is_current = query.get("status") == Some(status);
        let rest = query.without("page").without("status");
        let link = if is_current { rest } else { rest.with("status", status) };
        let badge = badge(style(status, false), &format!("{} {}", t.task_status(status), formats.count(count)));
        (count > 0 || is_current).then(|| Chip {
            link: link.link(&format!("{}/tasks", viewer.base())),
            badge,
            is_current,
        })
    };
    STATUSES.into_iter().filter_map(chip).collect()
}

fn active_filters(t: &'static Texts, query: &Pairs) -> Vec<(&'static str, String)> {
    let names = [("machine", t.machine), ("state", t.state), ("tag", t.tag), ("correlationId", t.correlation_id)];
    names.into_iter().filter_map(|(name, word)| Some((word, query.get(name)?.to_owned()))).collect()
}

/// Returns the style of a task with this status.
pub fn style(status: &str, waits_for_approval: bool) -> StateStyle {
    if waits_for_approval { StateStyle::Waiting } else { StateStyle::of(status) }
}

/// Returns a badge with the last part of the state's name, in the style of the task's status. A task that has not
/// started is in no state, so its badge shows the status.
pub fn state(t: &Texts, status: &str, state: &str, waits_for_approval: bool) -> Markup {
    let name = state.rsplit('.').next().unwrap_or(state);
    badge(style(status, waits_for_approval), if name.is_empty() { t.task_status(status) } else { name })
}

fn table(viewer: &Viewer, tasks: &[Task], is_approvals: bool) -> Table {
    let (t, formats) = (viewer.texts(), viewer.formats());
    let row = |task: &Task| Row {
        key: task.id.clone(),
        cells: vec![
            Cell::link(
                &format!("{}/tasks/{}", viewer.base(), task.id),
                &task.title.clone().unwrap_or_else(|| crate::format::short_id(&task.id)),
            )
            .note(&state(t, &task.status, &task.state, is_approvals || task.approval.is_some())),
            Cell::markup(state(t, &task.status, &task.state, is_approvals || task.approval.is_some())).extra(),
            Cell::text(&format!("{} v{}", task.machine, task.version)).extra(),
            Cell::markup(task.due_at.map_or_else(Markup::default, |at| formats.relative(at))).extra(),
            Cell::markup(formats.relative(task.updated_at)).right().extra(),
            Cell::markup(formats.age(task.created_at)).right(),
        ],
    };
    let command = "faena tasks create order-saga --data '{\"order\": 7}'";
    Table {
        columns: vec![
            text_column(t.task),
            extra_column(t.state),
            extra_column(t.machine),
            extra_column(t.next_timer),
            extra_number_column(t.changed),
            number_column(t.age),
        ],
        rows: tasks.iter().map(row).collect(),
        empty: if is_approvals { escaped(t.no_approvals) } else { empty_list_hint(t.no_tasks, command) },
        select_label: None,
    }
}
