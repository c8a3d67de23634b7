//! The list of queues with depth, age, rate and settings, and the actions on a queue.

use axum::{extract::RawQuery, response::Response};
use faena_domain::Timestamp;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{ListPage, empty_list_hint, queue};
use crate::{
    action::show_result,
    error::Failure,
    form::Form,
    format::Formats,
    layout::Page,
    markup::{Markup, StateStyle, badge, bar},
    query::{Pairs, segment},
    table::{Cell, Column, Row, Table, anchor, extra_column, extra_number_column, number_column, text_column},
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
    pub paused: Option<Pause>,
}

#[derive(Deserialize)]
pub struct Pause {
    pub at: Timestamp,
    #[serde(default)]
    pub by: String,
    #[serde(default)]
    pub reason: Option<String>,
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

impl Depth {
    /// Returns the number of ready jobs of each priority, the highest first.
    pub fn by_priority(&self) -> [(&'static str, u64); 4] {
        [("CRITICAL", self.critical), ("HIGH", self.high), ("NORMAL", self.normal), ("LOW", self.low)]
    }
}

impl Rate {
    /// Writes a rate as the API reads it: `100/1m`.
    pub fn text(&self) -> String {
        match self.period_ms {
            ms if ms % 60_000 == 0 => format!("{}/{}m", self.count, ms / 60_000),
            ms if ms % 1_000 == 0 => format!("{}/{}s", self.count, ms / 1_000),
            ms => format!("{}/{ms}ms", self.count),
        }
    }

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
    let label =
        queue.depth.by_priority().map(|(priority, count)| format!("{} {count}", t.priority_word(priority))).join(", ");
    let scheduled = format!("{}: {}, {}: {}", t.scheduled_jobs, queue.pending, t.retrying, queue.retrying);
    let oldest = queue.oldest.map_or_else(Markup::default, |at| formats.age(at));
    let rate = queue.rate_per_minute.map_or_else(String::new, |rate| formats.decimal(rate));
    let link = format!("{}{}", viewer.base(), queue_path(&queue.name));
    let settings = settings(t, queue);
    Row {
        key: queue.name.clone(),
        cells: vec![
            Cell::link(&link, &queue.name).note(&settings),
            Cell::number(&formats.count(total)),
            Cell::markup(bar(&parts, deepest.max(1) as f64, &label)).extra(),
            Cell::markup(oldest).right(),
            Cell::number(&formats.count(queue.pending + queue.retrying)).with("hide2").titled(&scheduled),
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

/// Returns the path of a queue's page. The names `.` and `..` are parameters, because browsers resolve such segments,
/// even if they are escaped.
pub fn queue_path(name: &str) -> String {
    match name {
        "." | ".." => Pairs::default().with("name", name).link("/queues"),
        name => format!("/queues/{}", segment(name)),
    }
}

/// Returns a link to a queue's page.
pub fn queue_link(viewer: &Viewer, name: &str) -> Markup {
    anchor(&format!("{}{}", viewer.base(), queue_path(name)), name)
}

/// Lists the queues, or shows the one that the parameter `name` names.
pub async fn list(viewer: Viewer, RawQuery(query): RawQuery) -> Result<Page, Failure> {
    if let Some(name) = Pairs::parse(query.as_deref()).get("name") {
        return queue::page(&viewer, name).await;
    }
    let list: QueueList = viewer.get("/api/v1/queues?limit=100").await?;
    let queues: Vec<&Queue> = list.queues.iter().collect();
    ListPage::new(&viewer, viewer.texts().queues, queue_table(&viewer, &queues)).page("/queues")
}

/// The form of a queue. The name is a field, because not every name can be a segment of an address.
#[derive(Deserialize)]
pub struct Change {
    name: String,
    /// `pause`, `resume` or `save`.
    action: String,
    #[serde(default)]
    concurrency: String,
    #[serde(default)]
    rate: String,
    strict: Option<String>,
    #[serde(default)]
    fairness: String,
}

pub async fn act(viewer: Viewer, Form(form): Form<Change>) -> Result<Response, Failure> {
    let t = viewer.texts();
    let path = format!("/api/v1/queues/{}", segment(&form.name));
    let (result, done) = match form.action.as_str() {
        "pause" => (viewer.post(&format!("{path}/pause")).await, t.queue_was_paused),
        "resume" => (viewer.post(&format!("{path}/resume")).await, t.queue_was_resumed),
        "save" => (save(&viewer, &path, &form).await, t.saved),
        _ => return Err(Failure::not_found(t.no_such_action)),
    };
    show_result(&viewer, &queue_path(&form.name), result, &format!("{}: {done}", form.name))
}

/// Sends only the settings that differ from the current ones, so that the configuration still decides about the others.
async fn save(viewer: &Viewer, path: &str, form: &Change) -> Result<Value, Failure> {
    let queue: Queue = viewer.get(path).await?;
    let mut body = Map::new();
    let concurrency = match form.concurrency.trim() {
        "" => None,
        text => Some(text.parse::<u64>().map_err(|_| Failure::bad_request(viewer.texts().must_be_a_number))?),
    };
    if concurrency != queue.concurrency {
        body.insert("concurrency".into(), json!(concurrency));
    }
    let rate = form.rate.trim();
    if rate != queue.rate.as_ref().map(Rate::text).unwrap_or_default() {
        body.insert("rate".into(), json!(Some(rate).filter(|rate| !rate.is_empty())));
    }
    if form.strict.is_some() != queue.strict {
        body.insert("strict".into(), json!(form.strict.is_some()));
    }
    if !form.fairness.is_empty() && form.fairness != queue.fairness {
        body.insert("fairness".into(), json!(form.fairness));
    }
    match body.is_empty() {
        true => Ok(Value::Null),
        false => viewer.patch(path, &Value::Object(body)).await,
    }
}

#[cfg(test)]
mod tests {
    use faena_domain::Rate as ApiRate;

    use super::*;
    use crate::texts::Language;

    #[test]
    fn every_name_has_an_address_that_browsers_do_not_resolve() {
        for (name, path) in [
            ("mail", "/queues/mail"),
            ("a/b c", "/queues/a%2Fb%20c"),
            ("..", "/queues?name=.."),
            (".", "/queues?name=."),
            ("...", "/queues/..."),
            ("../x", "/queues/..%2Fx"),
            ("ñ<b>", "/queues/%C3%B1%3Cb%3E"),
        ] {
            assert_eq!(queue_path(name), path);
        }
    }

    #[test]
    fn the_form_shows_a_rate_as_the_api_reads_it() {
        for (count, period_ms, text) in [(100, 60_000, "100/1m"), (5, 90_000, "5/90s"), (1, 250, "1/250ms")] {
            assert_eq!(Rate { count, period_ms }.text(), text);
            let parsed = ApiRate::parse(text).expect("a rate");
            assert_eq!((u64::from(parsed.count), parsed.period_ms), (count, period_ms));
        }
    }

    #[test]
    fn a_rate_is_written_in_words() {
        let words = |count, period_ms, language: Language| Rate { count, period_ms }.words(language.texts());
        assert_eq!(words(5, 1_000, Language::English), "5 per second");
        assert_eq!(words(100, 5_000, Language::English), "100 per 5 s");
        assert_eq!(words(60, 60_000, Language::Spanish), "60 por minuto");
        assert_eq!(words(3, 90_000, Language::Spanish), "3 por 1 min 30 s");
    }
}
