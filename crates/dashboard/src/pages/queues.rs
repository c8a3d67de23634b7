//! Queues: depth, age, rate and settings, and how to pause and change them.

use askama::Template;
use axum::{extract::Path, response::Response};
use faena_domain::Timestamp;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{ListPage, empty_list_hint};
use crate::{
    action::show_result,
    error::Failure,
    form::Form,
    format::Formats,
    layout::Page,
    markup::{Markup, StateStyle, badge, bar},
    query::segment,
    table::{Cell, Column, Row, Table, extra_column, extra_number_column, number_column, text_column},
    texts::Texts,
    viewer::Viewer,
};

#[derive(Deserialize, Default)]
pub struct QueueList {
    pub queues: Vec<Queue>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Queue {
    pub name: String,
    pub depth: Depth,
    pub pending: u64,
    pub retrying: u64,
    pub running: u64,
    pub oldest: Option<Timestamp>,
    pub rate_per_minute: Option<f64>,
    pub concurrency: Option<u64>,
    pub rate: Option<Rate>,
    pub strict: bool,
    pub fairness: String,
    pub paused: Option<Value>,
}

#[derive(Deserialize)]
pub struct Depth {
    #[serde(rename = "CRITICAL")]
    pub critical: u64,
    #[serde(rename = "HIGH")]
    pub high: u64,
    #[serde(rename = "NORMAL")]
    pub normal: u64,
    #[serde(rename = "LOW")]
    pub low: u64,
    pub total: u64,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Rate {
    #[serde(alias = "starts", alias = "limit")]
    pub count: u64,
    #[serde(alias = "period")]
    pub period_ms: u64,
}

impl Rate {
    /// Says how many jobs may start in which time: `5 per second`, `100 per 5 s`.
    pub fn words(&self, t: &Texts) -> String {
        let period = match self.period_ms {
            1_000 => t.second.to_owned(),
            60_000 => t.minute.to_owned(),
            3_600_000 => t.hour.to_owned(),
            86_400_000 => t.day.to_owned(),
            ms => Formats { language: t.language(), now: Timestamp::from_ms(0), is_live: false }.duration(ms as i64),
        };
        format!("{} {} {period}", self.count, t.per)
    }
}

/// Returns the table of queues, for its own page and for the overview.
pub fn queue_table(viewer: &Viewer, queues: &[&Queue]) -> Table {
    let t = viewer.texts();
    let deepest = queues.iter().map(|queue| queue.depth.total).max().unwrap_or(0);
    Table {
        columns: vec![
            text_column(t.queue),
            number_column(t.ready_title),
            extra_column(t.by_priority),
            number_column(t.oldest_title),
            Column { title: t.scheduled_jobs, class: "num hide2" },
            extra_number_column(t.running),
            extra_number_column(t.per_minute),
            Column { title: t.settings, class: "hide2" },
        ],
        rows: queues.iter().map(|queue| row(viewer, queue, deepest)).collect(),
        empty: empty_list_hint(
            t.no_queues,
            &format!(r#"curl -X POST {}/api/v1/jobs -d '{{"name": "noop"}}'"#, viewer.server_url()),
        ),
        select_label: None,
    }
}

fn row(viewer: &Viewer, queue: &Queue, deepest: u64) -> Row {
    let (t, formats) = (viewer.texts(), viewer.formats());
    let Depth { critical, high, normal, low, total } = queue.depth;
    let parts = [("p1", critical as f64), ("p2", high as f64), ("p3", normal as f64), ("p4", low as f64)];
    let counts = [("CRITICAL", critical), ("HIGH", high), ("NORMAL", normal), ("LOW", low)];
    let label = counts.map(|(priority, count)| format!("{} {count}", t.priority_word(priority))).join(", ");
    let later = format!("{}: {}, {}: {}", t.scheduled_jobs, queue.pending, t.retrying, queue.retrying);
    let oldest = queue.oldest.map_or_else(Markup::default, |at| formats.age(at));
    let rate = queue.rate_per_minute.map_or_else(String::new, |rate| formats.decimal(rate));
    let link = format!("{}/jobs?queue={}", viewer.base(), segment(&queue.name));
    let settings = settings(t, queue);
    Row {
        key: queue.name.clone(),
        cells: vec![
            Cell::link(&link, &queue.name).note(&settings),
            Cell::number(&formats.count(total)),
            Cell::markup(bar(&parts, deepest.max(1) as f64, &label)).extra(),
            Cell::markup(oldest).right(),
            Cell::number(&formats.count(queue.pending + queue.retrying)).with("hide2").titled(&later),
            Cell::number(&formats.count(queue.running)).extra(),
            Cell::number(&rate).extra(),
            Cell::markup(settings).with("hide2"),
        ],
    }
}

/// Returns the settings of a queue that differ from the default, or that it is paused.
fn settings(t: &Texts, queue: &Queue) -> Markup {
    if queue.paused.is_some() {
        return badge(StateStyle::Paused, t.paused);
    }
    let mut parts = Vec::new();
    if let Some(limit) = queue.concurrency {
        let at_limit = queue.running >= limit && queue.depth.total > 0;
        parts.push(format!("{} {limit}", if at_limit { t.at_its_limit } else { t.limit }));
    }
    if let Some(rate) = &queue.rate {
        parts.push(rate.words(t));
    }
    if queue.strict {
        parts.push(t.strict.to_owned());
    }
    if queue.fairness != "none" {
        parts.push(t.fair.to_owned());
    }
    crate::table::escaped(&parts.join(", "))
}

/// The form of one queue.
struct QueueForm {
    name: String,
    path: String,
    is_paused: bool,
    concurrency: String,
    is_strict: bool,
    pending: u64,
    retrying: u64,
}

#[derive(Template)]
#[template(path = "queue_forms.html")]
struct QueueForms<'a> {
    t: &'static Texts,
    base: &'a str,
    queues: Vec<QueueForm>,
}

pub async fn list(viewer: Viewer) -> Result<Page, Failure> {
    let list: QueueList = viewer.get("/api/v1/queues?limit=100").await?;
    let t = viewer.texts();
    let queues: Vec<&Queue> = list.queues.iter().collect();
    let forms = queues.iter().map(|queue| QueueForm {
        name: queue.name.clone(),
        path: segment(&queue.name),
        is_paused: queue.paused.is_some(),
        concurrency: queue.concurrency.map(|limit| limit.to_string()).unwrap_or_default(),
        is_strict: queue.strict,
        pending: queue.pending,
        retrying: queue.retrying,
    });
    let forms = QueueForms { t, base: viewer.base(), queues: forms.collect() };
    let mut page = ListPage::new(&viewer, t.queues, queue_table(&viewer, &queues));
    page.below = Markup::of(&forms);
    page.page("/queues")
}

pub async fn act(viewer: Viewer, Path((name, action)): Path<(String, String)>) -> Result<Response, Failure> {
    let t = viewer.texts();
    let done = match action.as_str() {
        "pause" => t.queue_was_paused,
        "resume" => t.queue_was_resumed,
        _ => return Err(Failure::not_found(t.no_such_action)),
    };
    let result = viewer.post(&format!("/api/v1/queues/{}/{action}", segment(&name))).await;
    show_result(&viewer, "/queues", result, &format!("{name}: {done}"))
}

#[derive(Deserialize)]
pub struct Change {
    #[serde(default)]
    concurrency: String,
    strict: Option<String>,
}

pub async fn change(viewer: Viewer, Path(name): Path<String>, Form(form): Form<Change>) -> Result<Response, Failure> {
    let t = viewer.texts();
    let mut body = Map::new();
    let concurrency = match form.concurrency.trim() {
        "" => Value::Null,
        text => json!(text.parse::<u64>().map_err(|_| Failure::bad_request(t.must_be_a_number))?),
    };
    body.insert("concurrency".into(), concurrency);
    body.insert("strict".into(), json!(form.strict.is_some()));
    let result = viewer.patch(&format!("/api/v1/queues/{}", segment(&name)), &Value::Object(body)).await;
    show_result(&viewer, "/queues", result, &format!("{name}: {}", t.saved))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::texts::Language;

    #[test]
    fn a_rate_is_written_in_words() {
        let words = |count, period_ms, language: Language| Rate { count, period_ms }.words(language.texts());
        assert_eq!(words(5, 1_000, Language::English), "5 per second");
        assert_eq!(words(100, 5_000, Language::English), "100 per 5 s");
        assert_eq!(words(60, 60_000, Language::Spanish), "60 por minuto");
        assert_eq!(words(3, 90_000, Language::Spanish), "3 por 1 min 30 s");
    }
}
