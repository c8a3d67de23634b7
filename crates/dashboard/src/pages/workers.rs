//! Workers: state, slots, what they can run, and draining them.

use askama::Template;
use axum::{
    extract::{Path, RawQuery},
    response::Response,
};
use faena_domain::Timestamp;
use serde::Deserialize;

use super::{
    ListPage, empty_list_hint,
    jobs::{self, JobList},
    pager,
    queues::queue_link,
};
use crate::{
    action::show_result,
    error::Failure,
    layout::Page,
    markup::{Markup, StateStyle, badge},
    query::{Pairs, segment},
    table::{Cell, Row, Table, escaped, extra_column, extra_number_column, number_column, text_column},
    texts::Texts,
    viewer::Viewer,
};

const LIMIT: u64 = 50;

#[derive(Deserialize)]
struct WorkerList {
    workers: Vec<Worker>,
    total: u64,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Worker {
    id: String,
    name: Option<String>,
    version: Option<String>,
    kind: String,
    state: String,
    reason: Option<String>,
    capabilities: Vec<String>,
    queues: Vec<String>,
    concurrency: u64,
    #[serde(default)]
    in_flight: u64,
    registered_at: Timestamp,
    last_seen_at: Option<Timestamp>,
    completed: u64,
    failed: u64,
    breaker: Option<String>,
    #[serde(default)]
    history: Vec<Change>,
}

#[derive(Deserialize)]
struct Change {
    at: Timestamp,
    state: String,
    #[serde(default)]
    reason: Option<String>,
}

impl Worker {
    fn is_live(&self) -> bool {
        !matches!(self.state.as_str(), "Terminated" | "Terminating")
    }

    /// Returns the name that people see.
    fn title(&self) -> &str {
        self.name.as_deref().unwrap_or(&self.id)
    }

    /// Returns how many of its slots are in use, and how many it has. The built-in worker also claims jobs for slots that
    /// become free.
    fn slots(&self) -> String {
        match self.is_live() {
            true => format!("{} / {}", self.in_flight.min(self.concurrency), self.concurrency),
            false => self.concurrency.to_string(),
        }
    }
}

pub async fn list(viewer: Viewer, RawQuery(query): RawQuery) -> Result<Page, Failure> {
    let query = Pairs::parse(query.as_deref());
    let wanted = query.only(&["state", "page"]).with("limit", &LIMIT.to_string());
    let list: WorkerList = viewer.get(&wanted.link("/api/v1/workers")).await?;
    let t = viewer.texts();
    let table = Table {
        columns: vec![
            text_column(t.worker),
            text_column(t.state),
            number_column(t.slots_title),
            extra_column(t.version),
            extra_column(t.can_run),
            extra_column(t.breaker),
            extra_number_column(t.completed_title),
            extra_number_column(t.failed_title),
            extra_number_column(t.last_seen),
        ],
        rows: list.workers.iter().map(|worker| row(&viewer, worker)).collect(),
        empty: empty_list_hint(t.no_workers, "faena worker --type shout -- tr a-z A-Z"),
        select_label: None,
    };
    let mut page = ListPage::new(&viewer, t.workers, table);
    page.pager = Some(pager(&viewer, "/workers", &query, list.total, list.workers.len(), LIMIT));
    page.page("/workers")
}

fn row(viewer: &Viewer, worker: &Worker) -> Row {
    let (t, formats) = (viewer.texts(), viewer.formats());
    let seen = worker.last_seen_at.filter(|_| worker.is_live());
    Row {
        key: worker.id.clone(),
        cells: vec![
            Cell::link(&format!("{}/workers/{}", viewer.base(), worker.id), worker.title()),
            Cell::markup(badge(StateStyle::of(&worker.state), t.word(&worker.state))),
            Cell::number(&worker.slots()),
            Cell::text(worker.version.as_deref().unwrap_or_default()).extra(),
            Cell::text(&worker.capabilities.join(", ")).long().extra(),
            Cell::text(t.word(worker.breaker.as_deref().unwrap_or_default())).extra(),
            Cell::number(&formats.count(worker.completed)).extra(),
            Cell::number(&formats.count(worker.failed)).extra(),
            Cell::markup(seen.map_or_else(Markup::default, |at| formats.relative(at))).right().extra(),
        ],
    }
}

#[derive(Template)]
#[template(path = "worker.html")]
struct WorkerPage<'a> {
    t: &'static Texts,
    base: &'a str,
    worker: &'a Worker,
    badge: Markup,
    jobs: String,
    details: Vec<(&'static str, Markup)>,
    history: Vec<(Markup, Markup, String)>,
    is_live: bool,
    is_draining: bool,
}

#[derive(Template)]
#[template(ext = "html", source = "{% for link in links %}{% if !loop.first %}, {% endif %}{{ link }}{% endfor %}")]
struct QueueLinks {
    links: Vec<Markup>,
}

pub async fn show(viewer: Viewer, Path(id): Path<String>) -> Result<Page, Failure> {
    let id = segment(&id);
    let worker: Worker = viewer.get(&format!("/api/v1/workers/{id}")).await?;
    let jobs_path = format!("/api/v1/jobs?workerId={id}&limit=30");
    let jobs: Result<JobList, Failure> = viewer.get(&jobs_path).await;
    let jobs = jobs.map(|list| list.jobs).unwrap_or_default();
    // Beside the details there is no room for the queue and the attempt of each job.
    let mut table = jobs::table(&viewer, &jobs, true).without_column(3).without_column(2);
    table.select_label = None;
    let (t, formats) = (viewer.texts(), viewer.formats());
    let change = |change: &Change| {
        let state = badge(StateStyle::of(&change.state), t.word(&change.state));
        (formats.moment(change.at), state, change.reason.clone().unwrap_or_default())
    };
    let page = WorkerPage {
        t,
        base: viewer.base(),
        badge: badge(StateStyle::of(&worker.state), t.word(&worker.state)),
        jobs: table.render().map_err(Failure::internal)?,
        details: vec![
            (t.id, escaped(&worker.id)),
            (t.kind_of_worker, escaped(t.word(&worker.kind))),
            (t.version, escaped(worker.version.as_deref().unwrap_or("–"))),
            (t.slots_title, escaped(&worker.slots())),
            (t.can_run, escaped(&worker.capabilities.join(", "))),
            (
                t.queues,
                match worker.queues.is_empty() {
                    true => escaped(t.all_of_them),
                    false => Markup::of(&QueueLinks {
                        links: worker.queues.iter().map(|name| queue_link(&viewer, name)).collect(),
                    }),
                },
            ),
            (t.breaker, escaped(t.word(worker.breaker.as_deref().unwrap_or("–")))),
            (t.registered, formats.relative(worker.registered_at)),
            (t.reason, escaped(worker.reason.as_deref().unwrap_or("–"))),
        ],
        history: worker.history.iter().rev().take(50).map(change).collect(),
        is_live: worker.is_live(),
        is_draining: worker.state == "Draining",
        worker: &worker,
    };
    Page::new(worker.title().to_owned(), "/workers", &page)
}

pub async fn act(viewer: Viewer, Path((id, action)): Path<(String, String)>) -> Result<Response, Failure> {
    let (t, id) = (viewer.texts(), segment(&id));
    let path = format!("/api/v1/workers/{id}/drain");
    let (result, done) = match action.as_str() {
        "drain" => (viewer.post(&path).await, t.worker_drains),
        "resume" => (viewer.delete(&path).await, t.worker_resumed),
        _ => return Err(Failure::not_found(t.no_such_action)),
    };
    show_result(&viewer, &format!("/workers/{id}"), result, done)
}
