//! The pages and their routes. The routes are in the order of the navigation.

mod about;
mod audit;
mod bulk;
mod dead_letters;
mod drawing;
mod events;
mod filters;
mod history;
mod job;
mod job_form;
mod job_graph;
mod job_related;
mod jobs;
mod keys;
mod limits;
mod machines;
mod overview;
mod queue;
mod queues;
mod schedule_form;
mod schedules;
mod search;
mod task;
mod tasks;
mod timeline;
mod trace;
mod webhooks;
mod workers;

use askama::Template;
use axum::{
    Router,
    http::{Method, StatusCode},
    routing::{get, post},
};

use crate::{
    Dashboard,
    error::Failure,
    layout::Page,
    markup::Markup,
    table::{Pager, Table},
    texts::Texts,
    viewer::Viewer,
};

pub fn routes() -> Router<Dashboard> {
    Router::new()
        .route("/", get(overview::show))
        .route("/jobs", get(jobs::list))
        .route("/jobs/new", get(job_form::show).post(job_form::submit))
        .route("/jobs/bulk/{action}", get(bulk::confirm_jobs).post(bulk::run_jobs))
        .route("/jobs/selected/{action}", post(jobs::act_on_selected))
        .route("/jobs/{id}", get(job::show))
        .route("/jobs/{id}/edit", get(job_form::show_edit).post(job_form::save_edit))
        .route("/jobs/{id}/{action}", post(job::act))
        .route("/queues", get(queues::list).post(queues::act))
        .route("/queues/{name}", get(queue::show))
        .route("/limits", get(limits::list).post(limits::change))
        .route("/limits/reset", post(limits::reset))
        .route("/schedules", get(schedules::list))
        .route("/schedules/new", get(schedule_form::show_new).post(schedule_form::create))
        .route("/schedules/explain", get(schedule_form::explain))
        .route("/schedules/{id}", get(schedules::show))
        .route("/schedules/{id}/edit", get(schedule_form::show_edit).post(schedule_form::save_edit))
        .route("/schedules/{id}/{action}", post(schedules::act))
        .route("/dead-letters", get(dead_letters::list))
        .route("/dead-letters/bulk/{action}", get(bulk::confirm_dead_letters).post(bulk::run_dead_letters))
        .route("/tasks", get(tasks::list))
        .route("/approvals", get(tasks::approvals))
        .route("/tasks/{id}", get(task::show))
        .route("/tasks/{id}/{action}", post(task::act))
        .route("/machines", get(machines::list))
        .route("/machines/{name}", get(machines::show))
        .route("/workers", get(workers::list))
        .route("/workers/{id}", get(workers::show))
        .route("/workers/{id}/{action}", post(workers::act))
        .route("/events", get(events::show))
        .route("/events/dead/{id}/{action}", post(events::act))
        .route("/webhooks", get(webhooks::list))
        .route("/webhooks/{id}", get(webhooks::show))
        .route("/webhooks/{id}/redeliver", post(webhooks::redeliver))
        .route("/trace", get(trace::show))
        .route("/audit", get(audit::list))
        .route("/keys", get(keys::list).post(keys::create))
        .route("/keys/{id}/{action}", post(keys::act))
        .route("/about", get(about::show))
        .route("/about/check", post(about::check))
        .method_not_allowed_fallback(wrong_method)
}

/// Answers a request with a wrong method, such as a GET request for a path to which only forms post.
async fn wrong_method(viewer: Viewer, method: Method) -> Failure {
    let status = if method == Method::GET { StatusCode::NOT_FOUND } else { StatusCode::METHOD_NOT_ALLOWED };
    Failure::new(status, viewer.texts().no_such_page.to_owned())
}

/// A page that is one table.
#[derive(Template)]
#[template(path = "list.html")]
pub struct ListPage<'a> {
    pub t: &'static Texts,
    pub title: &'a str,
    /// Beside the title: buttons or a search.
    pub tools: Markup,
    /// Above the panel of the table.
    pub above: Markup,
    /// In the panel, above the table: filters.
    pub filters: Markup,
    /// In the panel, above the table: actions on its rows.
    pub actions: Markup,
    pub table: Table,
    /// Label of the line that announces new rows and shows them when the viewer clicks it. `None`: new rows appear immediately.
    pub new_rows_label: Option<&'static str>,
    pub pager: Option<Pager>,
    /// Below the table: forms.
    pub below: Markup,
}

impl<'a> ListPage<'a> {
    pub fn new(viewer: &Viewer, title: &'a str, table: Table) -> ListPage<'a> {
        let none = Markup::default;
        ListPage {
            t: viewer.texts(),
            title,
            tools: none(),
            above: none(),
            filters: none(),
            actions: none(),
            new_rows_label: None,
            table,
            pager: None,
            below: none(),
        }
    }

    pub fn page(self, section: &'static str) -> Result<Page, Failure> {
        let title = self.title.to_owned();
        Page::new(title, section, &self)
    }
}

/// Content of an empty list.
#[derive(Template)]
#[template(ext = "html", source = r#"<p>{{ sentence }}</p><pre class="boxed">{{ command }}</pre>"#)]
struct EmptyListHint<'a> {
    sentence: &'a str,
    command: &'a str,
}

/// Returns what an empty list shows: a sentence about its entries, and the command that creates the first one.
pub fn empty_list_hint(sentence: &str, command: &str) -> Markup {
    Markup::of(&EmptyListHint { sentence, command })
}

/// Returns the links to the pages before and after this one.
pub fn pager(viewer: &Viewer, path: &str, query: &crate::query::Pairs, total: u64, shown: usize, limit: u64) -> Pager {
    let page: u64 = query.get("page").and_then(|page| page.parse().ok()).unwrap_or(1).max(1);
    let link = |page: u64| query.with("page", &page.to_string()).link(&format!("{}{path}", viewer.base()));
    let first = (page - 1) * limit + 1;
    let (t, formats) = (viewer.texts(), viewer.formats());
    let last = first + shown as u64 - u64::from(shown > 0);
    let summary = match shown {
        0 => format!("0 {} {}", t.of, formats.count(total)),
        _ => format!("{}–{} {} {}", formats.count(first), formats.count(last), t.of, formats.count(total)),
    };
    Pager {
        t,
        summary,
        previous: (page > 1).then(|| link(page - 1)),
        next: (page * limit < total).then(|| link(page + 1)),
    }
}
