//! The list of jobs: search, filters, selection and bulk actions.

use std::collections::BTreeMap;

use askama::Template;
use axum::{
    extract::{Path, RawQuery},
    response::Response,
};
use faena_domain::Timestamp;
use serde::Deserialize;

use super::{ListPage, bulk, empty_list_hint, filters::Chip, pager, search::parse_search};
use crate::{
    error::Failure,
    form::Fields,
    format::Formats,
    layout::Page,
    markup::{Markup, bar, job_state},
    query::Pairs,
    session::{self, Notice},
    table::{Cell, Row, StateAndFact, Table, escaped, extra_column, extra_number_column, number_column, text_column},
    texts::Texts,
    viewer::Viewer,
};

const LIMIT: u64 = 50;
/// Parameters of this page that the API knows too, besides the search.
pub const FILTERS: [&str; 14] = [
    "status",
    "priority",
    "type",
    "name",
    "queue",
    "tag",
    "error",
    "payload",
    "reason",
    "workerId",
    "scheduleId",
    "correlationId",
    "createdAfter",
    "createdBefore",
];
/// States in the order in which the page offers them as filters.
const STATES: [&str; 9] =
    ["FAILED", "RETRYING", "PROCESSING", "ASSIGNED", "SCHEDULED", "QUEUED", "PENDING", "COMPLETED", "CANCELLED"];

const UNFINISHED: [&str; 6] = ["RETRYING", "PROCESSING", "ASSIGNED", "SCHEDULED", "QUEUED", "PENDING"];
const FINISHED: [&str; 3] = ["COMPLETED", "FAILED", "CANCELLED"];

#[derive(Deserialize)]
pub struct JobList {
    pub jobs: Vec<Job>,
    pub total: u64,
}

/// What lists show of a job.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Job {
    pub id: String,
    pub name: String,
    #[serde(rename = "type")]
    pub kind: String,
    pub queue: String,
    pub status: String,
    #[serde(default)]
    pub attempt: u64,
    pub max_retries: u64,
    pub created_at: Timestamp,
    pub error: Option<String>,
    pub progress: Option<Progress>,
    pub scheduled_at: Option<Timestamp>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Progress {
    pub percentage: Option<f64>,
    pub message: Option<String>,
    pub phase: Option<String>,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct Counts {
    by_status: BTreeMap<String, u64>,
}

pub async fn list(viewer: Viewer, RawQuery(query): RawQuery) -> Result<Page, Failure> {
    let query = Pairs::parse(query.as_deref());
    let wanted = parameters(&query);
    let list_path = list_path(&query, &wanted);
    let (list, counts) = tokio::join!(viewer.get::<JobList>(&list_path), viewer.get::<Counts>("/api/v1/metrics/jobs"),);
    let list = list?;
    let t = viewer.texts();
    let mut page = ListPage::new(&viewer, t.jobs, table(&viewer, &list.jobs, !wanted.is_empty()));
    page.tools = Markup::of(&Search {
        t,
        base: viewer.base(),
        text: query.get("q").unwrap_or_default(),
        sort: query.get("sort"),
        order: query.get("order"),
    });
    page.filters = Markup::of(&Filters {
        chips: chips(&viewer, &query, &counts.unwrap_or_default()),
        sorts: sorts(&viewer, &query),
        active_filters: active_filters(t, &wanted),
        clear: format!("{}/jobs", viewer.base()),
        t,
    });
    page.new_rows_label = Some(t.new_rows);
    page.pager = Some(pager(&viewer, "/jobs", &query, list.total, list.jobs.len(), LIMIT));
    page.actions = Markup::of(&Actions {
        t,
        base: viewer.base(),
        back: query.link("/jobs"),
        has_filter: !wanted.is_empty(),
        can_retry: can_apply(&wanted, &["FAILED", "CANCELLED", "RETRYING"]),
        can_cancel: can_apply(&wanted, &UNFINISHED),
        can_delete: can_apply(&wanted, &FINISHED),
        retry: query.without("page").link(&format!("{}/jobs/bulk/retry", viewer.base())),
        cancel: query.without("page").link(&format!("{}/jobs/bulk/cancel", viewer.base())),
        delete: query.without("page").link(&format!("{}/jobs/bulk/delete", viewer.base())),
        total: viewer.formats().count(list.total),
        has_matches: list.total > 0,
    });
    page.below = Markup::of(&Keys { t });
    page.page("/jobs")
}

/// Returns whether an action that needs one of these states may apply to the jobs of a list.
fn can_apply(wanted: &Pairs, states: &[&str]) -> bool {
    let mut shown = wanted.all("status").peekable();
    shown.peek().is_none() || shown.any(|state| states.contains(&state))
}

/// Returns the parameters for the API: the filters in the address, and those of the search text.
pub fn parameters(query: &Pairs) -> Pairs {
    let mut wanted = parse_search(query.get("q").unwrap_or_default());
    for name in FILTERS {
        for value in query.all(name) {
            wanted.add(name, value);
        }
    }
    wanted
}

fn list_path(query: &Pairs, wanted: &Pairs) -> String {
    let mut wanted = wanted.clone();
    wanted.add("limit", &LIMIT.to_string());
    for name in ["page", "sort", "order"] {
        if let Some(value) = query.get(name) {
            wanted.add(name, value);
        }
    }
    wanted.link("/api/v1/jobs")
}

/// Returns the table of jobs, for this page and for others.
pub fn table(viewer: &Viewer, jobs: &[Job], is_filtered: bool) -> Table {
    let t = viewer.texts();
    let body = r#"'{"name": "sleep", "payload": {"ms": 2000}}'"#;
    let command = format!("curl -X POST {}/api/v1/jobs -d {body}", viewer.server_url());
    Table {
        columns: vec![
            text_column(t.kind),
            extra_column(t.state),
            extra_column(t.queue),
            extra_number_column(t.attempt),
            extra_column(t.error_or_progress),
            number_column(t.age),
        ],
        rows: jobs.iter().map(|job| row(viewer, job)).collect(),
        empty: if is_filtered { escaped(t.no_job_matches) } else { empty_list_hint(t.no_jobs, &command) },
        select_label: Some(t.select),
    }
}

fn row(viewer: &Viewer, job: &Job) -> Row {
    let (t, formats) = (viewer.texts(), viewer.formats());
    let name = if job.name == job.kind { job.kind.clone() } else { format!("{} · {}", job.kind, job.name) };
    let (state, fact) = (job_state(t, &job.status), last_fact(t, formats, job));
    let note = Markup::of(&StateAndFact { state: &state, fact: fact.content() });
    Row {
        key: job.id.clone(),
        cells: vec![
            Cell::link(&format!("{}/jobs/{}", viewer.base(), job.id), &name).note(&note),
            Cell::markup(state).extra(),
            Cell::text(&job.queue).extra(),
            Cell::number(&format!("{} / {}", job.attempt, job.max_retries + 1)).extra(),
            fact.long().extra(),
            Cell::markup(formats.age(job.created_at)).right(),
        ],
    }
}

/// Returns the most useful fact about a job: its progress, its error, or when it starts.
fn last_fact(t: &Texts, formats: Formats, job: &Job) -> Cell {
    match (job.status.as_str(), &job.progress, &job.error, job.scheduled_at) {
        ("PROCESSING", Some(progress), _, _) => Cell::markup(progress_bar(formats, progress)),
        // The error belongs to an attempt that is over, and another one has begun or is about to.
        ("QUEUED" | "SCHEDULED" | "ASSIGNED" | "PROCESSING", _, Some(error), _) => {
            Cell::text(&format!("{} {error}", t.last_error))
        }
        (_, _, Some(error), _) => Cell::text(error),
        ("PENDING", _, _, Some(at)) => Cell::markup(formats.relative(at)),
        ("QUEUED", ..) => Cell::text(t.ready_to_run),
        _ => Cell::text(""),
    }
}

#[derive(Template)]
#[template(ext = "html", source = "{{ bar }}{{ text }}")]
struct ProgressText<'a> {
    bar: Markup,
    text: &'a str,
}

/// Returns progress as a bar with its number.
pub fn progress_bar(formats: Formats, progress: &Progress) -> Markup {
    let message = progress.message.as_deref().or(progress.phase.as_deref()).unwrap_or_default();
    match progress.percentage {
        Some(percentage) => {
            let label = format!("{} %", formats.decimal(percentage));
            let text = if message.is_empty() { label.clone() } else { format!("{label} {message}") };
            Markup::of(&ProgressText { bar: bar(&[("running", percentage)], 100.0, &label), text: &text })
        }
        None => escaped(message),
    }
}

#[derive(Template)]
#[template(path = "job_search.html")]
struct Search<'a> {
    t: &'static Texts,
    base: &'a str,
    text: &'a str,
    /// How the list is sorted, which a new search keeps.
    sort: Option<&'a str>,
    order: Option<&'a str>,
}

/// A way to sort the list.
struct SortLink {
    link: String,
    text: &'static str,
    is_current: bool,
}

fn sorts(viewer: &Viewer, query: &Pairs) -> Vec<SortLink> {
    let t = viewer.texts();
    let current = (query.get("sort").unwrap_or("created"), query.get("order").unwrap_or("desc"));
    let ways = [
        (t.sort_newest, ("created", "desc")),
        (t.sort_oldest, ("created", "asc")),
        (t.sort_changed, ("updated", "desc")),
        (t.sort_priority, ("priority", "desc")),
        (t.sort_scheduled, ("scheduled", "asc")),
    ];
    let rest = query.without("page").without("sort").without("order");
    let link = |(text, (sort, order)): (&'static str, (&str, &str))| SortLink {
        link: rest.with("sort", sort).with("order", order).link(&format!("{}/jobs", viewer.base())),
        text,
        is_current: current == (sort, order),
    };
    ways.into_iter().map(link).collect()
}

#[derive(Template)]
#[template(path = "job_filters.html")]
struct Filters {
    t: &'static Texts,
    chips: Vec<Chip>,
    sorts: Vec<SortLink>,
    active_filters: Vec<(&'static str, String)>,
    clear: String,
}

fn chips(viewer: &Viewer, query: &Pairs, counts: &Counts) -> Vec<Chip> {
    let (t, formats) = (viewer.texts(), viewer.formats());
    let chosen: Vec<&str> = query.all("status").collect();
    let chip = |state: &&str| {
        let count = counts.by_status.get(*state).copied().unwrap_or(0);
        let is_current = chosen.contains(state);
        // A state without jobs is left out, unless it is the filter.
        if count == 0 && !is_current {
            return None;
        }
        let rest = query.without("page");
        let link = if is_current { rest.without("status") } else { rest.with("status", state) };
        let word = format!("{} {}", t.job_state(state), formats.count(count));
        let badge = crate::markup::badge(crate::markup::StateStyle::of(state), &word);
        Some(Chip { link: link.link(&format!("{}/jobs", viewer.base())), badge, is_current })
    };
    STATES.iter().filter_map(chip).collect()
}

/// Returns the filters of the list, so that the viewer sees how the search text was parsed.
pub fn active_filters(t: &'static Texts, wanted: &Pairs) -> Vec<(&'static str, String)> {
    let word = |name: &str, value: &str| match name {
        "status" => t.job_state(value).to_owned(),
        "priority" => t.priority_word(value).to_owned(),
        _ => value.to_owned(),
    };
    let names = ["q"].into_iter().chain(FILTERS);
    names.flat_map(|name| wanted.all(name).map(move |value| (t.filter_word(name), word(name, value)))).collect()
}

#[derive(Template)]
#[template(path = "job_actions.html")]
struct Actions<'a> {
    t: &'static Texts,
    base: &'a str,
    /// This list, to which an action on selected jobs returns.
    back: String,
    has_filter: bool,
    can_retry: bool,
    can_cancel: bool,
    can_delete: bool,
    retry: String,
    cancel: String,
    delete: String,
    total: String,
    has_matches: bool,
}

#[derive(Template)]
#[template(path = "job_keys.html")]
struct Keys {
    t: &'static Texts,
}

/// Applies an action to the selected jobs one by one, and says how many jobs it has changed.
pub async fn act_on_selected(
    viewer: Viewer,
    Path(action): Path<String>,
    Fields(fields): Fields,
) -> Result<Response, Failure> {
    let t = viewer.texts();
    bulk::verb(t, &action)?;
    let ids: Vec<&str> = fields.iter().filter(|(name, _)| name == "id").map(|(_, id)| id.as_str()).take(100).collect();
    let back = fields.iter().find(|(name, _)| name == "back").map_or("/jobs", |(_, back)| back.as_str());
    let (mut done, mut problem) = (0, None);
    for id in ids {
        let path = format!("/api/v1/jobs/{}", crate::query::segment(id));
        let result = match action.as_str() {
            "delete" => viewer.delete(&path).await,
            _ => viewer.post(&format!("{path}/{action}")).await,
        };
        match result {
            Ok(_) => done += 1,
            Err(failure) if failure.needs_login() => return Err(failure),
            Err(failure) => problem = Some(failure.message),
        }
    }
    let words = t.changed_jobs_count(viewer.formats().count(done), done);
    let text = problem.map_or(words.clone(), |problem| format!("{words}; {problem}"));
    Ok(session::redirect(&viewer, back, Some(Notice { is_error: done == 0, text })))
}
