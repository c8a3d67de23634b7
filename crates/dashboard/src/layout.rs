//! The frame of every page: navigation, notices and error pages.

use askama::Template;
use axum::{
    Json,
    extract::{Request, State},
    http::{StatusCode, header},
    middleware::Next,
    response::{Html, IntoResponse, Response},
};
use serde::Deserialize;
use serde_json::json;

use crate::{
    Dashboard, assets,
    error::Failure,
    session::{self, Notice},
    texts::Texts,
    viewer::Viewer,
    visible::visible,
};

/// The content of a page. The frame is added by [`frame`].
#[derive(Clone)]
pub struct Page {
    title: String,
    section: &'static str,
    main: String,
    status: StatusCode,
    has_navigation: bool,
    /// Whether the browser keeps it up to date.
    is_live: bool,
}

impl Page {
    /// Renders content that the browser keeps up to date. `section` is the entry of the navigation that is marked.
    pub fn new(title: impl Into<String>, section: &'static str, main: &impl Template) -> Result<Page, Failure> {
        let page = Page::exact(title, section, main)?;
        Ok(Page { title: visible(page.title), main: visible(page.main), is_live: true, ..page })
    }

    /// Renders a form. Its fields keep every character, also invisible ones, and nothing replaces them while a person
    /// types.
    pub fn exact(title: impl Into<String>, section: &'static str, main: &impl Template) -> Result<Page, Failure> {
        let main = main.render().map_err(Failure::internal)?;
        Ok(Page { title: title.into(), section, main, status: StatusCode::OK, has_navigation: true, is_live: false })
    }

    /// Returns the page as it is now: the browser does not keep it up to date.
    pub fn without_updates(self) -> Page {
        Page { is_live: false, ..self }
    }

    pub fn without_navigation(self) -> Page {
        Page { has_navigation: false, ..self }
    }

    pub fn with_status(self, status: StatusCode) -> Page {
        Page { status, ..self }
    }
}

impl IntoResponse for Page {
    fn into_response(self) -> Response {
        let mut response = Response::default();
        response.extensions_mut().insert(self);
        response
    }
}

/// A failure that the layout has to show.
#[derive(Clone)]
struct Failed(StatusCode, String);

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let mut response = Response::default();
        response.extensions_mut().insert(Failed(self.status, self.message));
        response
    }
}

/// Puts the content that a handler returned into the frame of its viewer.
pub async fn frame(State(_): State<Dashboard>, viewer: Viewer, request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    if let Some(page) = response.extensions_mut().remove::<Page>() {
        return complete(&viewer, page).await;
    }
    match response.extensions_mut().remove::<Failed>() {
        Some(Failed(status, message)) => error_response(&viewer, Failure::new(status, message)).await,
        None => response,
    }
}

#[derive(Template)]
#[template(path = "error.html")]
struct ErrorPage<'a> {
    t: &'static Texts,
    base: &'a str,
    title: &'a str,
    status: u16,
    message: &'a str,
}

async fn error_response(viewer: &Viewer, failure: Failure) -> Response {
    if failure.needs_login() && !viewer.is_fragment() {
        let query =
            url::form_urlencoded::Serializer::new(String::new()).append_pair("next", viewer.location()).finish();
        return session::redirect(viewer, &format!("/login?{query}"), None);
    }
    let t = viewer.texts();
    let title = if failure.status == StatusCode::NOT_FOUND { t.not_found } else { t.something_is_wrong };
    let page = ErrorPage { t, base: viewer.base(), title, status: failure.status.as_u16(), message: &failure.message };
    match Page::new(title, "", &page) {
        Ok(page) => complete(viewer, page.with_status(failure.status)).await,
        Err(_) => (failure.status, failure.message).into_response(),
    }
}

async fn complete(viewer: &Viewer, page: Page) -> Response {
    let navigation = match page.has_navigation {
        true => Navigation::of(viewer, page.section).await,
        false => Navigation::default(),
    };
    if viewer.is_fragment() {
        let navigation = navigation.render().unwrap_or_default();
        return (page.status, Json(json!({"main": page.main, "navigation": navigation}))).into_response();
    }
    let status = page.status;
    let document = Document { viewer, page: &page, navigation: &navigation, t: viewer.texts() };
    match document.render() {
        Ok(html) => {
            let mut response = (status, Html(html)).into_response();
            response.headers_mut().insert(header::VARY, header::HeaderValue::from_static("accept-language, cookie"));
            if viewer.notice().is_some() {
                session::forget_notice(viewer, &mut response);
            }
            response
        }
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

#[derive(Template)]
#[template(path = "document.html")]
struct Document<'a> {
    viewer: &'a Viewer,
    page: &'a Page,
    navigation: &'a Navigation,
    t: &'static Texts,
}

impl Document<'_> {
    fn style(&self) -> String {
        format!("{}{}", self.viewer.base(), assets::STYLE.path())
    }

    fn script(&self) -> String {
        format!("{}{}", self.viewer.base(), assets::SCRIPT.path())
    }

    fn icon(&self) -> String {
        format!("{}{}", self.viewer.base(), assets::ICON.path())
    }

    fn notice(&self) -> Option<&Notice> {
        self.viewer.notice()
    }
}

/// The list of pages, with the number of entries of each.
#[derive(Template, Default)]
#[template(path = "navigation.html")]
struct Navigation {
    groups: Vec<Vec<Entry>>,
}

struct Entry {
    link: String,
    text: &'static str,
    is_current: bool,
    count: Option<String>,
    /// Whether a person must act.
    is_urgent: bool,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Counts {
    queues: QueueCounts,
    jobs: Total,
    schedules: Total,
    workers: Total,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct QueueCounts {
    dlq: u64,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Total {
    total: u64,
}

impl Navigation {
    async fn of(viewer: &Viewer, section: &str) -> Navigation {
        let (counts, tasks, approvals, queues) = tokio::join!(
            viewer.get::<Counts>("/api/v1/metrics/overview"),
            viewer.get::<Total>("/api/v1/tasks?limit=1&status=running"),
            viewer.get::<Total>("/api/v1/tasks?limit=1&approval=true"),
            viewer.get::<Total>("/api/v1/queues?limit=1"),
        );
        let (t, formats) = (viewer.texts(), viewer.formats());
        let counts = counts.ok();
        let entry = |path: &str, text, count: Option<u64>, is_urgent: bool| Entry {
            link: format!("{}{path}", viewer.base()),
            text,
            is_current: path == section,
            is_urgent: is_urgent && count.is_some_and(|count| count > 0),
            count: count.map(|count| formats.count(count)),
        };
        let of = |pick: fn(&Counts) -> u64| counts.as_ref().map(pick);
        let total = |total: Result<Total, Failure>| total.ok().map(|total| total.total);
        Navigation {
            groups: vec![
                vec![
                    entry("/", t.overview, None, false),
                    entry("/jobs", t.jobs, of(|counts| counts.jobs.total), false),
                    entry("/queues", t.queues, total(queues), false),
                    entry("/schedules", t.schedules, of(|counts| counts.schedules.total), false),
                    entry("/dead-letters", t.dead_letters, of(|counts| counts.queues.dlq), true),
                ],
                vec![
                    entry("/tasks", t.tasks, total(tasks), false),
                    entry("/approvals", t.approvals, total(approvals), true),
                    entry("/machines", t.machines, None, false),
                ],
                vec![
                    entry("/workers", t.workers, of(|counts| counts.workers.total), false),
                    entry("/limits", t.limits, None, false),
                    entry("/events", t.events, None, false),
                    entry("/webhooks", t.webhooks, None, false),
                    entry("/trace", t.trace, None, false),
                ],
                vec![
                    entry("/audit", t.audit, None, false),
                    entry("/keys", t.keys, None, false),
                    entry("/about", t.about, None, false),
                ],
            ],
        }
    }
}
