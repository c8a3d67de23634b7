//! Dead letters, grouped by type and error, so that all jobs with one cause can be handled together.

use std::collections::BTreeMap;

use askama::Template;
use axum::extract::RawQuery;
use faena_domain::Timestamp;
use serde::Deserialize;

use super::{ListPage, jobs::Job, pager};
use crate::{
    error::Failure,
    layout::Page,
    markup::Markup,
    query::Pairs,
    table::{Cell, Row, Table, escaped, extra_column, extra_number_column, number_column, text_column},
    texts::Texts,
    viewer::Viewer,
};

const LIMIT: u64 = 50;
/// Number of dead letters that are read to build the groups.
const SAMPLE: u64 = 100;
/// Errors with the same first characters are grouped.
const ERROR_CHARS: usize = 120;

#[derive(Deserialize)]
struct DeadLetters {
    data: Vec<DeadLetter>,
    total: u64,
}

#[derive(Deserialize)]
struct DeadLetter {
    #[serde(flatten)]
    job: Job,
    #[serde(rename = "failedAt")]
    failed_at: Timestamp,
}

struct Group {
    kind: String,
    error: String,
    count: String,
    newest: Markup,
    list: String,
    retry: String,
    delete: String,
    /// Whether a filter can select the group: no filter selects jobs without an error.
    has_filter: bool,
}

#[derive(Template)]
#[template(path = "dead_groups.html")]
struct Groups {
    t: &'static Texts,
    groups: Vec<Group>,
    is_sample: bool,
}

pub async fn list(viewer: Viewer, RawQuery(query): RawQuery) -> Result<Page, Failure> {
    let query = Pairs::parse(query.as_deref());
    let wanted = query.only(&["type", "queue", "error", "q", "page"]).with("limit", &LIMIT.to_string());
    let (list_path, sample_path) = (wanted.link("/api/v1/dead-letter"), format!("/api/v1/dead-letter?limit={SAMPLE}"));
    let (list, sample) = tokio::join!(viewer.get::<DeadLetters>(&list_path), viewer.get::<DeadLetters>(&sample_path));
    let list = list?;
    let t = viewer.texts();
    let mut page = ListPage::new(&viewer, t.dead_letters, table(&viewer, &list.data));
    if let Ok(sample) = sample {
        let is_sample = sample.total > SAMPLE;
        page.above = Markup::of(&Groups { t, groups: groups(&viewer, &sample.data), is_sample });
    }
    page.pager = Some(pager(&viewer, "/dead-letters", &query, list.total, list.data.len(), LIMIT));
    page.page("/dead-letters")
}

fn groups(viewer: &Viewer, letters: &[DeadLetter]) -> Vec<Group> {
    let mut found: BTreeMap<(String, String), (u64, Timestamp)> = BTreeMap::new();
    for letter in letters {
        let error = letter.job.error.as_deref().unwrap_or_default();
        let error: String = error.lines().next().unwrap_or_default().chars().take(ERROR_CHARS).collect();
        let entry = found.entry((letter.job.kind.clone(), error)).or_insert((0, letter.failed_at));
        *entry = (entry.0 + 1, entry.1.max(letter.failed_at));
    }
    let formats = viewer.formats();
    let group = |((kind, error), (count, newest)): ((String, String), (u64, Timestamp))| {
        let mut filter = Pairs::default();
        filter.add("type", &kind);
        filter.add("error", &error);
        let action = |action: &str| filter.link(&format!("{}/dead-letters/bulk/{action}", viewer.base()));
        (
            count,
            Group {
                count: formats.count(count),
                newest: formats.relative(newest),
                retry: action("retry"),
                delete: action("delete"),
                list: filter.with("status", "FAILED").link(&format!("{}/jobs", viewer.base())),
                has_filter: !error.is_empty(),
                kind,
                error,
            },
        )
    };
    let mut groups: Vec<(u64, Group)> = found.into_iter().map(group).collect();
    groups.sort_by_key(|(count, _)| std::cmp::Reverse(*count));
    groups.into_iter().map(|(_, group)| group).collect()
}

fn table(viewer: &Viewer, letters: &[DeadLetter]) -> Table {
    let (t, formats) = (viewer.texts(), viewer.formats());
    let row = |DeadLetter { job, failed_at }: &DeadLetter| Row {
        key: job.id.clone(),
        cells: vec![
            Cell::link(&format!("{}/jobs/{}", viewer.base(), job.id), &job.name)
                .note(&escaped(job.error.as_deref().unwrap_or_default())),
            Cell::text(&job.queue).extra(),
            Cell::text(job.error.as_deref().unwrap_or_default()).long().extra(),
            Cell::number(&job.attempt.to_string()).extra(),
            Cell::markup(formats.relative(*failed_at)).right(),
        ],
    };
    Table {
        columns: vec![
            text_column(t.job),
            extra_column(t.queue),
            extra_column(t.error),
            extra_number_column(t.attempts),
            number_column(t.failed_at),
        ],
        rows: letters.iter().map(row).collect(),
        empty: escaped(t.no_dead_letters),
        select_label: None,
    }
}
