//! Actions on every job that a filter matches: first a page that says how many and which, then the action.

use askama::Template;
use axum::{
    extract::{Path, RawQuery},
    response::Response,
};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::jobs::{FILTERS, active_filters, parameters};
use crate::{
    action::show_result,
    error::Failure,
    layout::Page,
    markup::job_state,
    query::Pairs,
    table::{Cell, Row, Table, escaped, extra_column, text_column},
    texts::Texts,
    viewer::Viewer,
};

/// Returns the filter of a bulk action, as its body has it.
fn bulk_filter(wanted: &Pairs) -> Value {
    let mut filter = Map::new();
    for name in ["q"].into_iter().chain(FILTERS) {
        let values: Vec<&str> = wanted.all(name).collect();
        match values.as_slice() {
            [] => {}
            [value] => drop(filter.insert(name.to_owned(), json!(value))),
            values => drop(filter.insert(name.to_owned(), json!(values))),
        }
    }
    Value::Object(filter)
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct DryRun {
    matched: u64,
    matched_is_exact: bool,
    examples: Vec<Example>,
}

#[derive(Deserialize)]
struct Example {
    id: String,
    #[serde(rename = "type")]
    kind: String,
    queue: String,
    status: String,
    error: Option<String>,
}

#[derive(Template)]
#[template(path = "bulk.html")]
struct BulkPage {
    t: &'static Texts,
    list_title: &'static str,
    question: String,
    /// What the filter asks for.
    filters: Vec<(&'static str, String)>,
    /// Where the confirmation is sent.
    action: String,
    back: String,
    examples: String,
    has_matches: bool,
    is_exact: bool,
    is_retry: bool,
}

/// What a bulk action applies to.
#[derive(Clone, Copy)]
enum Target {
    Jobs,
    DeadLetters,
}

impl Target {
    /// Returns the page that lists it.
    fn list(self) -> &'static str {
        match self {
            Target::Jobs => "/jobs",
            Target::DeadLetters => "/dead-letters",
        }
    }

    fn title(self, t: &'static Texts) -> &'static str {
        match self {
            Target::Jobs => t.jobs,
            Target::DeadLetters => t.dead_letters,
        }
    }

    fn verb(self, t: &'static Texts, action: &str) -> Result<&'static str, Failure> {
        match (self, action) {
            (Target::DeadLetters, "cancel") => Err(Failure::not_found(t.no_such_action)),
            _ => verb(t, action),
        }
    }

    /// Counts the matching jobs, or acts on them.
    async fn call(self, viewer: &Viewer, action: &str, wanted: &Pairs, is_dry_run: bool) -> Result<Value, Failure> {
        let body = json!({"filter": bulk_filter(wanted), "dryRun": is_dry_run});
        let path = match self {
            Target::Jobs => format!("/api/v1/jobs/bulk/{action}"),
            Target::DeadLetters => format!("/api/v1/dead-letter/bulk/{action}"),
        };
        viewer.post_json(&path, &body).await
    }
}

/// Shows how many jobs an action would change, and which, before it does.
async fn confirm(viewer: &Viewer, target: Target, action: &str, query: &Pairs) -> Result<Page, Failure> {
    let t = viewer.texts();
    let verb = target.verb(t, action)?;
    let wanted = parameters(query);
    let answer = target.call(viewer, action, &wanted, true).await?;
    let dry_run: DryRun = serde_json::from_value(answer).map_err(Failure::internal)?;
    let list = format!("{}{}", viewer.base(), target.list());
    let count = viewer.formats().count(dry_run.matched);
    let page = BulkPage {
        t,
        list_title: target.title(t),
        question: match target {
            Target::Jobs => format!("{verb}: {}", t.jobs_count(count, dry_run.matched)),
            Target::DeadLetters => format!("{verb}: {}", t.dead_letters_count(count, dry_run.matched)),
        },
        filters: active_filters(t, &wanted),
        action: query.link(&format!("{list}/bulk/{action}")),
        back: query.link(&list),
        examples: examples(viewer, &dry_run.examples).render().map_err(Failure::internal)?,
        has_matches: dry_run.matched > 0,
        is_exact: dry_run.matched_is_exact,
        is_retry: action == "retry",
    };
    Page::new(page.question.clone(), target.list(), &page)
}

async fn run(viewer: &Viewer, target: Target, action: &str, query: &Pairs) -> Result<Response, Failure> {
    let t = viewer.texts();
    target.verb(t, action)?;
    let result = target.call(viewer, action, &parameters(query), false).await;
    let done = result.as_ref().ok().and_then(|answer| answer["done"].as_u64()).unwrap_or(0);
    let count = viewer.formats().count(done);
    let (back, words) = match target {
        Target::Jobs => (query.without("page").link("/jobs"), t.changed_jobs_count(count, done)),
        // The action has removed the whole group, so a list with its filter would be empty.
        Target::DeadLetters => ("/dead-letters".to_owned(), t.changed_jobs_count(count, done)),
    };
    show_result(viewer, &back, result, &words)
}

pub async fn confirm_jobs(
    viewer: Viewer,
    Path(action): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<Page, Failure> {
    confirm(&viewer, Target::Jobs, &action, &Pairs::parse(query.as_deref())).await
}

pub async fn run_jobs(
    viewer: Viewer,
    Path(action): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<Response, Failure> {
    run(&viewer, Target::Jobs, &action, &Pairs::parse(query.as_deref())).await
}

pub async fn confirm_dead_letters(
    viewer: Viewer,
    Path(action): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<Page, Failure> {
    confirm(&viewer, Target::DeadLetters, &action, &Pairs::parse(query.as_deref())).await
}

pub async fn run_dead_letters(
    viewer: Viewer,
    Path(action): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<Response, Failure> {
    run(&viewer, Target::DeadLetters, &action, &Pairs::parse(query.as_deref())).await
}

pub fn verb(t: &'static Texts, action: &str) -> Result<&'static str, Failure> {
    match action {
        "retry" => Ok(t.retry_verb),
        "cancel" => Ok(t.cancel_verb),
        "delete" => Ok(t.delete_verb),
        _ => Err(Failure::not_found(t.no_such_action)),
    }
}

fn examples(viewer: &Viewer, examples: &[Example]) -> Table {
    let t = viewer.texts();
    let row = |job: &Example| Row {
        key: job.id.clone(),
        cells: vec![
            Cell::link(&format!("{}/jobs/{}", viewer.base(), job.id), &job.kind)
                .note(&escaped(job.error.as_deref().unwrap_or_default())),
            Cell::markup(job_state(t, &job.status)),
            Cell::text(&job.queue).extra(),
            Cell::text(job.error.as_deref().unwrap_or_default()).long().extra(),
        ],
    };
    Table {
        columns: vec![text_column(t.kind), text_column(t.state), extra_column(t.queue), extra_column(t.error)],
        rows: examples.iter().map(row).collect(),
        empty: escaped(t.no_job_matches),
        select_label: None,
    }
}
