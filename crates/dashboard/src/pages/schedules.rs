//! Schedules: when they run next, what happened at each due time, and the actions on them.

use askama::Template;
use axum::{
    extract::{Path, RawQuery},
    response::Response,
};
use faena_domain::{
    Timestamp,
    schedule::{RunNote, Timing},
};
use serde::Deserialize;
use serde_json::Value;

use super::{ListPage, empty_list_hint, pager, queues::queue_link};
use crate::{
    action::show_result,
    content::{Hidden, content},
    details::schedule_reason,
    error::Failure,
    format::Formats,
    layout::Page,
    markup::{Markup, StateStyle, badge},
    query::{Pairs, segment},
    table::{Cell, Row, Table, escaped, extra_column, extra_number_column, number_column, text_column},
    texts::{Language, Texts},
    viewer::Viewer,
};

const LIMIT: u64 = 50;
/// How long after its due time a schedule that has not fired counts as late.
const LATE_MS: i64 = 60_000;

#[derive(Deserialize, Default)]
#[serde(default)]
pub struct ScheduleList {
    pub schedules: Vec<Schedule>,
    pub total: u64,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Schedule {
    pub id: String,
    pub name: String,
    pub cron_expression: Option<String>,
    pub interval_ms: Option<u64>,
    pub timezone: String,
    #[serde(default)]
    pub except: Vec<String>,
    #[serde(default)]
    pub explanation: Option<String>,
    pub job_name: String,
    pub job_payload: Value,
    #[serde(default)]
    pub hidden: Hidden,
    pub queue: String,
    pub description: Option<String>,
    pub start_at: Option<Timestamp>,
    pub end_at: Option<Timestamp>,
    pub dst_gap: Option<String>,
    pub dst_overlap: Option<String>,
    #[serde(default)]
    pub jitter_ms: u64,
    pub max_runs: Option<u64>,
    pub misfire: String,
    pub misfire_grace_ms: Option<u64>,
    pub catch_up_limit: Option<u64>,
    pub overlap: String,
    pub is_active: bool,
    pub next_run_at: Option<Timestamp>,
    pub last_run_at: Option<Timestamp>,
    /// Why it has ended.
    pub finished: Option<String>,
    pub run_count: u64,
}

impl Schedule {
    /// Returns the cron expression, or the interval in words.
    pub fn rule(&self, t: &Texts, formats: Formats) -> String {
        match (&self.cron_expression, self.interval_ms) {
            (Some(cron), _) => cron.clone(),
            (None, Some(ms)) => format!("{} {}", t.every, formats.duration(ms as i64)),
            (None, None) => String::new(),
        }
    }

    /// Describes the cron expression. Empty for an interval, which needs no description.
    fn described(&self, viewer: &Viewer) -> String {
        let timing = Timing {
            cron_expression: self.cron_expression.clone(),
            timezone: self.timezone.clone(),
            except: self.except.clone(),
            ..Timing::default()
        };
        match (self.interval_ms, &self.explanation) {
            (None, Some(text)) => explained(viewer, &timing, text),
            _ => String::new(),
        }
    }

    pub fn is_late(&self, now: Timestamp) -> bool {
        self.is_active && self.next_run_at.is_some_and(|at| now.ms_since(at) > LATE_MS)
    }
}

/// Describes a timing in the viewer's language. `english` is what the API says about it.
pub fn explained(viewer: &Viewer, timing: &Timing, english: &str) -> String {
    let in_spanish = || timing.compile(viewer.now()).ok().map(|compiled| compiled.explain_in_spanish());
    match viewer.language() {
        Language::English => None,
        // A stored timing may be invalid by now; the API says why.
        Language::Spanish => in_spanish(),
    }
    .unwrap_or_else(|| english.to_owned())
}

pub async fn list(viewer: Viewer, RawQuery(query): RawQuery) -> Result<Page, Failure> {
    let query = Pairs::parse(query.as_deref());
    let wanted = query.only(&["page", "q", "isActive"]).with("limit", &LIMIT.to_string());
    let list: ScheduleList = viewer.get(&wanted.link("/api/v1/schedules")).await?;
    let t = viewer.texts();
    let table = Table {
        columns: vec![
            text_column(t.name),
            extra_column(t.state),
            extra_column(t.rule),
            extra_column(t.explanation),
            number_column(t.next_run),
            extra_number_column(t.last_run),
        ],
        rows: list.schedules.iter().map(|schedule| row(&viewer, schedule)).collect(),
        empty: empty_list_hint(
            t.no_schedules,
            "faena schedules create nightly --cron '0 2 * * *' --timezone Europe/Madrid --job noop",
        ),
        select_label: None,
    };
    let mut page = ListPage::new(&viewer, t.schedules, table);
    page.tools = Markup::of(&NewButton { link: format!("{}/schedules/new", viewer.base()), text: t.new_schedule });
    page.pager = Some(pager(&viewer, "/schedules", &query, list.total, list.schedules.len(), LIMIT));
    page.page("/schedules")
}

#[derive(Template)]
#[template(ext = "html", source = r#"<a class="btn" href="{{ link }}">{{ text }}</a>"#)]
struct NewButton {
    link: String,
    text: &'static str,
}

fn state(t: &Texts, schedule: &Schedule) -> Markup {
    match (schedule.is_active, schedule.next_run_at) {
        (true, Some(_)) => badge(StateStyle::On, t.active),
        (true, None) => badge(StateStyle::Off, t.schedule_has_ended),
        (false, _) => badge(StateStyle::Off, t.disabled),
    }
}

fn row(viewer: &Viewer, schedule: &Schedule) -> Row {
    let (t, formats) = (viewer.texts(), viewer.formats());
    let time = |at: Option<Timestamp>| at.map_or_else(Markup::default, |at| formats.relative(at));
    Row {
        key: schedule.id.clone(),
        cells: vec![
            Cell::link(&format!("{}/schedules/{}", viewer.base(), schedule.id), &schedule.name)
                .note(&state(t, schedule)),
            Cell::markup(state(t, schedule)).extra(),
            Cell::text(&schedule.rule(t, formats)).extra(),
            Cell::text(&schedule.described(viewer)).long().extra(),
            Cell::markup(time(schedule.next_run_at)).right(),
            Cell::markup(time(schedule.last_run_at)).right().extra(),
        ],
    }
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
pub struct Preview {
    pub next_runs: Vec<NextRun>,
    pub explanation: Option<String>,
}

#[derive(Deserialize)]
pub struct NextRun {
    at: Timestamp,
    pub local: String,
    #[serde(default)]
    notes: Vec<RunNote>,
}

impl NextRun {
    /// Says what daylight saving does to the run.
    pub fn note(&self, t: &Texts) -> String {
        self.notes.iter().map(|note| t.run_note(note)).collect::<Vec<_>>().join("; ")
    }
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Ticks {
    ticks: Vec<Tick>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Tick {
    #[serde(alias = "due")]
    due_at: Timestamp,
    #[serde(alias = "what")]
    outcome: String,
    #[serde(default)]
    job_id: Option<String>,
    #[serde(default)]
    reason: Option<String>,
}

/// A due time on the axis, with its position in percent.
struct AxisMark {
    x: f64,
    label: String,
}

#[derive(Template)]
#[template(path = "schedule.html")]
struct SchedulePage<'a> {
    t: &'static Texts,
    base: &'a str,
    schedule: &'a Schedule,
    state: Markup,
    explanation: Markup,
    axis: Vec<AxisMark>,
    next_runs: Vec<(Markup, String, String)>,
    ticks: String,
    details: Vec<(&'static str, Markup)>,
    payload: Markup,
}

pub async fn show(viewer: Viewer, Path(id): Path<String>) -> Result<Page, Failure> {
    let path = format!("/api/v1/schedules/{}", segment(&id));
    let schedule: Schedule = viewer.get(&path).await?;
    let (preview_path, ticks_path) = (format!("{path}/preview?count=12"), format!("{path}/ticks?limit=30"));
    let (preview, ticks) = tokio::join!(viewer.get::<Preview>(&preview_path), viewer.get::<Ticks>(&ticks_path));
    let (preview, ticks) = (preview.unwrap_or_default(), ticks.unwrap_or_default());
    let (t, formats) = (viewer.texts(), viewer.formats());
    let run = |run: &NextRun| (formats.until(run.at), local_time(&run.local), run.note(t));
    let page = SchedulePage {
        t,
        base: viewer.base(),
        state: state(t, &schedule),
        explanation: match schedule.interval_ms {
            Some(_) => escaped(&schedule.rule(t, formats)),
            None => escaped(&schedule.described(&viewer)),
        },
        axis: axis(&preview.next_runs),
        next_runs: preview.next_runs.iter().map(run).collect(),
        ticks: tick_table(&viewer, &ticks.ticks).render().map_err(Failure::internal)?,
        details: details(&viewer, &schedule),
        payload: content(t, &schedule.hidden, "jobPayload", &schedule.job_payload),
        schedule: &schedule,
    };
    Page::new(schedule.name.clone(), "/schedules", &page)
}

/// Lists the settings of a schedule. Those that have no effect on it are left out.
fn details(viewer: &Viewer, schedule: &Schedule) -> Vec<(&'static str, Markup)> {
    let (t, formats) = (viewer.texts(), viewer.formats());
    let time = |at: Option<Timestamp>| at.map_or_else(|| escaped("–"), |at| formats.relative(at));
    let word = |value: &Option<String>| value.as_deref().map(|value| escaped(t.word(value)));
    let duration = |ms: u64| escaped(&formats.duration(ms as i64));
    let except = (!schedule.except.is_empty()).then(|| escaped(&schedule.except.join("; ")));
    let is_cron = schedule.cron_expression.is_some();
    let catches_up = schedule.misfire == "catch_up";
    let runs = match schedule.max_runs {
        Some(max) => format!("{} / {}", formats.count(schedule.run_count), formats.count(max)),
        None => formats.count(schedule.run_count),
    };
    let all = [
        (t.description, schedule.description.as_deref().map(escaped)),
        (t.rule, Some(escaped(&schedule.rule(t, formats)))),
        (t.time_zone, Some(escaped(&schedule.timezone))),
        (t.start_at, schedule.start_at.filter(|at| *at > viewer.now()).map(|at| formats.moment(at))),
        (t.end_at, schedule.end_at.map(|at| formats.moment(at))),
        (t.excluded, except),
        (t.dst_gap, word(&schedule.dst_gap).filter(|_| is_cron)),
        (t.dst_overlap, word(&schedule.dst_overlap).filter(|_| is_cron)),
        (t.job, Some(escaped(&schedule.job_name))),
        (t.queue, Some(queue_link(viewer, &schedule.queue))),
        (t.next_run, Some(time(schedule.next_run_at))),
        (t.schedule_has_ended, schedule.finished.as_deref().map(|reason| schedule_reason(viewer, reason))),
        (t.last_run, Some(time(schedule.last_run_at))),
        (t.runs, Some(escaped(&runs))),
        (t.misfire, Some(escaped(t.word(&schedule.misfire)))),
        (t.misfire_grace, schedule.misfire_grace_ms.map(duration)),
        (t.catch_up_limit, schedule.catch_up_limit.filter(|_| catches_up).map(|limit| escaped(&formats.count(limit)))),
        (t.overlap, Some(escaped(t.word(&schedule.overlap)))),
        (t.jitter, Some(schedule.jitter_ms).filter(|ms| *ms > 0).map(duration)),
    ];
    all.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
}

/// Formats a time with its offset: `2026-11-18 02:30 +01:00`.
pub fn local_time(text: &str) -> String {
    match (text.get(..10), text.get(11..16), text.get(16..19), text.get(text.len().saturating_sub(6)..)) {
        (Some(day), Some(time), Some(seconds), Some(offset)) => {
            let seconds = if seconds == ":00" { "" } else { seconds };
            format!("{day} {time}{seconds} {offset}")
        }
        _ => text.to_owned(),
    }
}

/// Places the next due times on one axis.
fn axis(runs: &[NextRun]) -> Vec<AxisMark> {
    let (Some(first), Some(last)) = (runs.first(), runs.last()) else { return Vec::new() };
    let span = last.at.ms_since(first.at).max(1) as f64;
    let place = |at: Timestamp| 1.0 + (at.ms_since(first.at) as f64 / span * 980.0).round() / 10.0;
    runs.iter().map(|run| AxisMark { x: place(run.at), label: run.local.clone() }).collect()
}

fn tick_table(viewer: &Viewer, ticks: &[Tick]) -> Table {
    let (t, formats) = (viewer.texts(), viewer.formats());
    let row = |tick: &Tick| {
        let job = match &tick.job_id {
            Some(id) => Cell::link(&format!("{}/jobs/{id}", viewer.base()), &crate::format::short_id(id)),
            None => Cell::markup(schedule_reason(viewer, tick.reason.as_deref().unwrap_or_default())),
        };
        let state = badge(StateStyle::of(&tick.outcome), t.word(&tick.outcome));
        Row {
            key: tick.due_at.to_string(),
            cells: vec![Cell::markup(formats.moment(tick.due_at)).note(&state), Cell::markup(state).extra(), job],
        }
    };
    Table {
        columns: vec![text_column(t.due), extra_column(t.outcome), text_column(t.job)],
        rows: ticks.iter().map(row).collect(),
        empty: escaped(t.not_fired_yet),
        select_label: None,
    }
}

pub async fn act(viewer: Viewer, Path((id, action)): Path<(String, String)>) -> Result<Response, Failure> {
    let (t, id) = (viewer.texts(), segment(&id));
    let path = format!("/api/v1/schedules/{id}");
    let (result, done, page) = match action.as_str() {
        "trigger" => {
            (viewer.post(&format!("{path}/trigger")).await, t.schedule_was_triggered, format!("/schedules/{id}"))
        }
        "enable" => (viewer.post(&format!("{path}/enable")).await, t.schedule_was_enabled, format!("/schedules/{id}")),
        "disable" => {
            (viewer.post(&format!("{path}/disable")).await, t.schedule_was_disabled, format!("/schedules/{id}"))
        }
        "delete" => (viewer.delete(&path).await, t.schedule_was_deleted, "/schedules".to_owned()),
        _ => return Err(Failure::not_found(t.no_such_action)),
    };
    show_result(&viewer, &page, result, done)
}
