//! The page of one queue: what waits and runs in it, how fast it is, and its settings.

use askama::Template;
use axum::extract::Path;
use serde::Deserialize;

use super::{
    history::{Chart, History, Period, Throughput},
    jobs::{self, Job},
    limits::{Limit, LimitList},
    overview::{Figure, Oldest},
    queues::{Queue, Rate},
};
use crate::{
    charts,
    error::Failure,
    format::Formats,
    layout::Page,
    markup::{Markup, StateStyle, badge, bar},
    query::{Pairs, segment},
    table::{Cell, Row, Table, escaped, number_column, text_column},
    texts::Texts,
    viewer::Viewer,
};

/// Maximum number of jobs in each of the two lists.
const JOBS: usize = 10;

#[derive(Deserialize, Default)]
#[serde(default)]
struct JobList {
    jobs: Vec<Job>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Total {
    total: u64,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Overview {
    uptime: i64,
}

/// Everything that the page shows. Parts that the viewer may not see are empty.
struct Data {
    queue: Queue,
    minutes: History,
    hours: History,
    /// Seconds since this server started.
    uptime: i64,
    running: Vec<Job>,
    ready: Vec<Job>,
    dead: u64,
    limits: Vec<Limit>,
}

impl Data {
    async fn read(viewer: &Viewer, name: &str) -> Result<Data, Failure> {
        let queue: Queue = viewer.get(&format!("/api/v1/queues/{}", segment(name))).await?;
        let of_queue = |pairs: &[(&str, &str)], path: &str| {
            let mut query = Pairs::default().with("queue", name);
            pairs.iter().for_each(|(name, value)| query.add(name, value));
            query.link(path)
        };
        let (minutes, hours) = (
            of_queue(&[("period", "minute")], "/api/v1/metrics/history"),
            of_queue(&[("period", "hour")], "/api/v1/metrics/history"),
        );
        let states = [("status", "PROCESSING"), ("status", "ASSIGNED"), ("status", "SCHEDULED")];
        let running = of_queue(&states, "/api/v1/jobs");
        let dead = of_queue(&[("limit", "1")], "/api/v1/dead-letter");
        let (minutes, hours, running, ready, dead, limits, overview) = tokio::join!(
            viewer.get::<History>(&minutes),
            viewer.get::<History>(&hours),
            viewer.get::<JobList>(&running),
            next_ready(viewer, &queue),
            viewer.get::<Total>(&dead),
            viewer.get::<LimitList>("/api/v1/limits?limit=100"),
            viewer.get::<Overview>("/api/v1/metrics/overview"),
        );
        let mut running = running.unwrap_or_default().jobs;
        running.truncate(JOBS);
        Ok(Data {
            minutes: minutes.unwrap_or_default(),
            hours: hours.unwrap_or_default(),
            uptime: overview.unwrap_or_default().uptime,
            running,
            ready,
            dead: dead.unwrap_or_default().total,
            limits: limits.unwrap_or_default().limits,
            queue,
        })
    }
}

/// Returns the ready jobs with the highest priorities, the oldest first. Requests a list for each priority, because a
/// list sorted by priority has the newest jobs first.
async fn next_ready(viewer: &Viewer, queue: &Queue) -> Vec<Job> {
    let mut found = Vec::new();
    for (priority, _) in queue.depth.by_priority().into_iter().filter(|(_, count)| *count > 0) {
        let mut query = Pairs::default().with("queue", &queue.name);
        let wanted = (JOBS - found.len()).to_string();
        let sorted = [("sort", "created"), ("order", "asc"), ("limit", &wanted)];
        for (name, value) in [("status", "QUEUED"), ("priority", priority)].into_iter().chain(sorted) {
            query.add(name, value);
        }
        found.extend(viewer.get::<JobList>(&query.link("/api/v1/jobs")).await.unwrap_or_default().jobs);
        if found.len() >= JOBS {
            break;
        }
    }
    found
}

#[derive(Template)]
#[template(path = "queue.html")]
struct QueuePage<'a> {
    t: &'static Texts,
    base: &'a str,
    queue: &'a Queue,
    badge: Markup,
    /// Since when, by whom and why it is paused.
    pause: Markup,
    figures: Vec<Figure>,
    minutes: Chart,
    hours: Chart,
    running: Table,
    ready: Table,
    by_priority: Table,
    limits: Table,
    concurrency: String,
    rate: String,
    is_fair: bool,
    jobs: String,
    dead_letters: String,
}

#[derive(Template)]
#[template(
    ext = "html",
    source = "{{ t.paused_since }} {{ at }}{% if !by.is_empty() %}, {{ t.by }} {{ by }}{% endif %}{% if let Some(reason) = reason %}: {{ reason }}{% endif %}"
)]
struct PauseText<'a> {
    t: &'static Texts,
    at: Markup,
    by: &'a str,
    reason: Option<&'a str>,
}

pub async fn show(viewer: Viewer, Path(name): Path<String>) -> Result<Page, Failure> {
    page(&viewer, &name).await
}

/// Returns the page of the queue with this name.
pub async fn page(viewer: &Viewer, name: &str) -> Result<Page, Failure> {
    let data = Data::read(viewer, name).await?;
    let (t, formats, queue) = (viewer.texts(), viewer.formats(), &data.queue);
    let link = |path: &str| Pairs::default().with("queue", name).link(&format!("{}{path}", viewer.base()));
    let pause = queue.paused.as_ref().map(|pause| {
        let (at, reason) = (formats.moment(pause.at), pause.reason.as_deref());
        Markup::of(&PauseText { t, at, by: &pause.by, reason })
    });
    let page = QueuePage {
        t,
        base: viewer.base(),
        badge: if pause.is_some() { badge(StateStyle::Paused, t.paused) } else { Markup::default() },
        pause: pause.unwrap_or_default(),
        figures: figures(t, formats, &data, &link("/dead-letters")),
        minutes: Chart::of(t, formats, &data.minutes.history, charts::Period::Minute),
        hours: Chart::of(t, formats, &data.hours.history, charts::Period::Hour),
        running: job_table(viewer, &data.running, t.nothing_runs),
        ready: job_table(viewer, &data.ready, t.nothing_queued_here),
        by_priority: by_priority(t, formats, queue),
        limits: limits(viewer, &data),
        concurrency: queue.concurrency.map(|limit| limit.to_string()).unwrap_or_default(),
        rate: queue.rate.as_ref().map(Rate::text).unwrap_or_default(),
        is_fair: queue.fairness != "none",
        jobs: link("/jobs"),
        dead_letters: link("/dead-letters"),
        queue,
    };
    Page::new(name, "/queues", &page)
}

fn figures(t: &'static Texts, formats: Formats, data: &Data, dead_letters: &str) -> Vec<Figure> {
    let Queue { depth, pending, retrying, running, oldest, concurrency, .. } = &data.queue;
    let oldest = match oldest {
        Some(at) => Markup::of(&Oldest { word: t.oldest, age: formats.age(*at) }),
        None => escaped(t.nothing_queued),
    };
    let hour = |pick: fn(&Period) -> u64| data.minutes.history.iter().map(pick).sum::<u64>();
    let (completed, failed) = (hour(|minute| minute.total_completed), hour(|minute| minute.total_failed));
    let throughput = Throughput::of(&data.minutes.history, data.uptime * 1_000, formats.now);
    let (per_minute, averaged) = Throughput::words(throughput.as_ref(), t, formats);
    let figure = |label, value: String, detail: Markup| Figure { label, path: None, value, detail };
    let limit = concurrency.map_or_else(|| t.unlimited.to_owned(), |limit| format!("{} {limit}", t.of));
    vec![
        figure(t.ready, formats.count(depth.total), oldest),
        figure(t.running, formats.count(*running), escaped(&limit)),
        figure(
            t.scheduled_jobs,
            formats.count(pending + retrying),
            escaped(&format!("{} {}", formats.count(*retrying), t.retrying)),
        ),
        figure(
            t.finished_per_minute,
            per_minute,
            escaped(&format!("{averaged}; {} {}", formats.count(completed + failed), t.in_the_last_hour)),
        ),
        Figure {
            label: t.dead_letters,
            path: Some(dead_letters.to_owned()),
            value: formats.count(data.dead),
            detail: escaped(&format!("{} {}", formats.count(failed), t.in_the_last_hour)),
        },
    ]
}

/// Returns a table of jobs without the column for the queue and without checkboxes.
fn job_table(viewer: &Viewer, jobs: &[Job], empty: &str) -> Table {
    let mut table = jobs::table(viewer, jobs, true).without_column(2);
    table.select_label = None;
    table.empty = escaped(empty);
    table
}

fn by_priority(t: &'static Texts, formats: Formats, queue: &Queue) -> Table {
    let whole = queue.depth.total.max(1) as f64;
    let row = |((priority, count), class): ((&'static str, u64), &'static str)| {
        let (word, count) = (t.priority_word(priority), (formats.count(count), count as f64));
        let bar = bar(&[(class, count.1)], whole, &format!("{word} {}", count.0));
        Row { key: priority.to_owned(), cells: vec![Cell::text(word), Cell::markup(bar), Cell::number(&count.0)] }
    };
    let counts = queue.depth.by_priority().into_iter().zip(["p1", "p2", "p3", "p4"]);
    Table {
        columns: vec![text_column(t.priority_title), text_column(t.share), number_column(t.ready_title)],
        rows: counts.map(row).collect(),
        empty: Markup::default(),
        select_label: None,
    }
}

/// Returns the limits of the system, of the queue, and of the types whose jobs the page lists.
fn limits(viewer: &Viewer, data: &Data) -> Table {
    let (t, formats) = (viewer.texts(), viewer.formats());
    let listed = |kind: &str| data.running.iter().chain(&data.ready).any(|job| job.kind == kind);
    let applies = |limit: &&Limit| match limit.scope.as_str() {
        "system" => true,
        "queue" => limit.name() == data.queue.name,
        "type" => listed(limit.name()),
        _ => false,
    };
    let row = |limit: &Limit| {
        let scope = t.word(&limit.scope);
        let name = if limit.scope == "type" { format!("{scope} {}", limit.name()) } else { scope.to_owned() };
        let form = Pairs::default().with("scope", &limit.scope).with("name", limit.name());
        let link = format!("{}#limit", form.link(&format!("{}/limits", viewer.base())));
        let rate = limit.rate.as_ref().map(|rate| rate.words(t));
        let concurrency = limit.concurrency.map(|most| {
            let used = limit.in_flight.map(|used| format!("{} {} ", formats.count(used), t.of)).unwrap_or_default();
            format!("{used}{}", formats.count(most))
        });
        let parts: Vec<String> = concurrency.into_iter().chain(rate).collect();
        Row {
            key: format!("{}:{}", limit.scope, limit.name()),
            cells: vec![Cell::link(&link, &name), Cell::number(&parts.join(", "))],
        }
    };
    Table {
        columns: vec![text_column(t.scope), number_column(t.limit_title)],
        rows: data.limits.iter().filter(applies).map(row).collect(),
        empty: escaped(t.no_limits),
        select_label: None,
    }
}
