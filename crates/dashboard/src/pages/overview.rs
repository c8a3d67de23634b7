//! The first page: what needs a person, how things are going, and where.

use std::collections::BTreeMap;

use askama::Template;
use faena_domain::Timestamp;
use serde::Deserialize;

use super::{
    queues::{Queue, QueueList, queue_table},
    schedules::{Schedule, ScheduleList},
};
use crate::{
    charts,
    error::Failure,
    format::Formats,
    layout::Page,
    markup::{Look, Markup, icon},
    texts::Texts,
    viewer::Viewer,
};

/// Queues that the overview lists.
const QUEUES: usize = 8;
const SCHEDULES: usize = 6;

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct Overview {
    jobs: Jobs,
    workers: Workers,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct Jobs {
    by_status: BTreeMap<String, u64>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Workers {
    total: u64,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct History {
    history: Vec<Period>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Period {
    date: Timestamp,
    total_completed: u64,
    total_failed: u64,
    failed_runs: u64,
    wait_time: Percentiles,
    processing_time: Percentiles,
}

#[derive(Deserialize)]
struct Percentiles {
    p95: Option<f64>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct WorkerList {
    workers: Vec<Worker>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Worker {
    name: String,
    state: String,
    concurrency: u64,
    breaker: Option<String>,
    id: String,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Ready {
    status: String,
    checks: Checks,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Checks {
    database: Database,
    loops: Vec<LoopHealth>,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct Database {
    engine: String,
    latency_ms: f64,
}

#[derive(Deserialize)]
struct LoopHealth {
    name: String,
    status: String,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct DeadLetters {
    total: u64,
    #[serde(rename = "byType")]
    by_type: Vec<TypeCount>,
}

#[derive(Deserialize)]
struct TypeCount {
    #[serde(rename = "jobType")]
    job_type: String,
    count: u64,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Outbox {
    sinks: Vec<Sink>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sink {
    name: String,
    #[serde(default)]
    down_since: Option<Timestamp>,
    #[serde(default)]
    pending: u64,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Tasks {
    total: u64,
    tasks: Vec<TaskAge>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct TaskAge {
    updated_at: Timestamp,
}

/// Everything that the page shows. Parts that the viewer may not see are empty.
struct Data {
    overview: Overview,
    history: Vec<Period>,
    queues: Vec<Queue>,
    schedules: Vec<Schedule>,
    workers: Vec<Worker>,
    ready: Ready,
    dead: DeadLetters,
    sinks: Vec<Sink>,
    approvals: Tasks,
}

impl Data {
    async fn read(viewer: &Viewer) -> Result<Data, Failure> {
        // Without this the page has nothing to show; the other parts may be closed to the viewer.
        let overview = viewer.get("/api/v1/metrics/overview").await?;
        let (history, queues, schedules, workers, ready, dead, outbox, approvals) = tokio::join!(
            viewer.get::<History>("/api/v1/metrics/history?period=hour"),
            viewer.get::<QueueList>("/api/v1/queues?limit=100"),
            viewer.get::<ScheduleList>("/api/v1/schedules?limit=100"),
            viewer.get::<WorkerList>("/api/v1/workers?limit=100"),
            viewer.get::<Ready>("/health/ready"),
            viewer.get::<DeadLetters>("/api/v1/dead-letter/stats"),
            viewer.get::<Outbox>("/api/v1/outbox?limit=100"),
            viewer.get::<Tasks>("/api/v1/tasks?limit=100&approval=true"),
        );
        Ok(Data {
            overview,
            history: history.unwrap_or_default().history,
            queues: queues.unwrap_or_default().queues,
            schedules: schedules.unwrap_or_default().schedules,
            workers: workers.unwrap_or_default().workers,
            ready: ready.unwrap_or_default(),
            dead: dead.unwrap_or_default(),
            sinks: outbox.unwrap_or_default().sinks,
            approvals: approvals.unwrap_or_default(),
        })
    }

    fn jobs(&self, states: &[&str]) -> u64 {
        states.iter().filter_map(|state| self.overview.jobs.by_status.get(*state)).sum()
    }
}

/// Something that needs a person.
struct Attention {
    icon: Markup,
    link: String,
    what: String,
    detail: String,
}

/// One figure with what it is of.
struct Figure {
    label: &'static str,
    value: String,
    detail: String,
}

struct NextRun {
    at: Markup,
    link: String,
    name: String,
    rule: String,
}

#[derive(Template)]
#[template(path = "overview.html")]
struct OverviewPage<'a> {
    t: &'static Texts,
    base: &'a str,
    attention: Vec<Attention>,
    figures: Vec<Figure>,
    chart: Markup,
    narrow_chart: Markup,
    chart_text: String,
    queues: String,
    queue_count: usize,
    next_runs: Vec<NextRun>,
    system: Vec<(&'static str, String)>,
}

pub async fn show(viewer: Viewer) -> Result<Page, Failure> {
    let data = Data::read(&viewer).await?;
    let (t, formats) = (viewer.texts(), viewer.formats());
    let mut busiest: Vec<&Queue> = data.queues.iter().collect();
    busiest.sort_by_key(|queue| std::cmp::Reverse((queue.depth.total, queue.running)));
    busiest.truncate(QUEUES);
    let page = OverviewPage {
        t,
        base: viewer.base(),
        attention: attention(&viewer, &data),
        figures: figures(t, formats, &data),
        chart: chart(t, &data.history, charts::WIDE),
        narrow_chart: chart(t, &data.history, charts::NARROW),
        chart_text: chart_text(t, formats, &data.history),
        queues: queue_table(&viewer, &busiest).render().map_err(Failure::internal)?,
        queue_count: data.queues.len(),
        next_runs: next_runs(&viewer, &data.schedules),
        system: system(t, formats, &data),
    };
    Page::new(t.overview, "/", &page)
}

/// Lists what needs a person now, each with a link to the page that resolves it.
fn attention(viewer: &Viewer, data: &Data) -> Vec<Attention> {
    let (t, formats, base) = (viewer.texts(), viewer.formats(), viewer.base());
    let mut found = Vec::new();
    let mut add = |look, path: &str, what: String, detail: String| {
        found.push(Attention { icon: icon(look), link: format!("{base}{path}"), what, detail });
    };
    if data.dead.total > 0 {
        let most = data.dead.by_type.iter().max_by_key(|entry| entry.count);
        let detail = most.map(|most| format!("{} × {}", formats.count(most.count), most.job_type)).unwrap_or_default();
        add(
            Look::Failed,
            "/dead-letters",
            t.dead_letters_count(formats.count(data.dead.total), data.dead.total),
            detail,
        );
    }
    if data.approvals.total > 0 {
        let oldest = data.approvals.tasks.iter().map(|task| task.updated_at).min();
        let age = oldest.map(|at| format!("{} {}", t.oldest, formats.duration(viewer.now().ms_since(at))));
        let what = t.approvals_count(formats.count(data.approvals.total), data.approvals.total);
        add(Look::Waiting, "/approvals", what, age.unwrap_or_default());
    }
    for sink in data.sinks.iter().filter(|sink| sink.down_since.is_some()) {
        let detail = format!("{} {}", formats.count(sink.pending), t.events_waiting);
        add(Look::Failed, "/events", format!("{} “{}”", t.sink_down, sink.name), detail);
    }
    for worker in data.workers.iter().filter(|worker| worker.breaker.as_deref() == Some("open")) {
        add(
            Look::Failed,
            &format!("/workers/{}", worker.id),
            format!("{} “{}”", t.breaker_open, worker.name),
            String::new(),
        );
    }
    for late in data.schedules.iter().filter(|schedule| schedule.is_late(viewer.now())) {
        add(
            Look::Retrying,
            &format!("/schedules/{}", late.id),
            format!("{} “{}”", t.schedule_late, late.name),
            String::new(),
        );
    }
    for stopped in data.ready.checks.loops.iter().filter(|health| health.status != "healthy") {
        add(Look::Failed, "/about", format!("{} “{}”", t.loop_not_healthy, stopped.name), stopped.status.clone());
    }
    for queue in data.queues.iter().filter(|queue| queue.paused.is_some()) {
        let detail =
            format!("{} {}", t.jobs_count(formats.count(queue.depth.total), queue.depth.total), t.waiting_word);
        add(Look::Retrying, "/queues", format!("{} “{}”", t.queue_paused, queue.name), detail);
    }
    found
}

fn figures(t: &'static Texts, formats: Formats, data: &Data) -> Vec<Figure> {
    let waiting = data.jobs(&["QUEUED", "PENDING", "RETRYING"]);
    let oldest = data.queues.iter().filter_map(|queue| queue.waiting_ms).max();
    let live = |worker: &&Worker| !matches!(worker.state.as_str(), "Terminated" | "Terminating");
    let slots: u64 = data.workers.iter().filter(live).map(|worker| worker.concurrency).sum();
    let per_minute: f64 = data.queues.iter().filter_map(|queue| queue.rate_per_minute).sum();
    let last: Vec<&Period> = data.history.iter().rev().take(2).collect();
    let (completed, failed) =
        last.iter().fold((0, 0), |(ok, bad), period| (ok + period.total_completed, bad + period.total_failed));
    let share = if completed + failed > 0 { failed as f64 * 100.0 / (completed + failed) as f64 } else { 0.0 };
    let time = |pick: fn(&Period) -> Option<f64>| {
        let found = last.iter().find_map(|period| pick(period));
        found.map_or("–".to_owned(), |ms| formats.duration(ms as i64))
    };
    let retried: u64 = last.iter().map(|period| period.failed_runs).sum();
    vec![
        Figure {
            label: t.waiting,
            value: formats.count(waiting),
            detail: oldest
                .map_or(t.nothing_queued.to_owned(), |ms| format!("{} {}", t.oldest, formats.duration(ms as i64))),
        },
        Figure {
            label: t.running,
            value: formats.count(data.jobs(&["SCHEDULED", "ASSIGNED", "PROCESSING"])),
            detail: format!("{} {} {}", t.of, formats.count(slots), t.slots),
        },
        Figure {
            label: t.finished_per_minute,
            value: formats.decimal(per_minute),
            detail: format!("{} {}", formats.count(completed), t.completed_recently),
        },
        Figure {
            label: t.failed_recently,
            value: format!("{} %", formats.decimal(share)),
            detail: format!(
                "{} {} {}, {} {}",
                formats.count(failed),
                t.of,
                formats.count(completed + failed),
                formats.count(retried),
                t.failed_runs
            ),
        },
        Figure {
            label: t.wait_p95,
            value: time(|period| period.wait_time.p95),
            detail: format!("{} {}", t.run_time, time(|period| period.processing_time.p95)),
        },
    ]
}

fn chart(t: &Texts, history: &[Period], size: charts::Size) -> Markup {
    let labels = history.iter().map(|period| period.date.to_string().get(11..16).unwrap_or_default().to_owned());
    let values = |pick: fn(&Period) -> u64| history.iter().map(|period| pick(period) as f32).collect();
    charts::finished(
        labels.collect(),
        values(|period| period.total_completed),
        values(|period| period.total_failed),
        [t.completed, t.failed],
        size,
    )
}

/// Returns the chart in words, for those who cannot see it.
fn chart_text(t: &Texts, formats: Formats, history: &[Period]) -> String {
    let sum = |pick: fn(&Period) -> u64| history.iter().map(pick).sum::<u64>();
    let (completed, failed) = (sum(|period| period.total_completed), sum(|period| period.total_failed));
    format!("{}: {}, {}: {}", t.completed, formats.count(completed), t.failed, formats.count(failed))
}

fn next_runs(viewer: &Viewer, schedules: &[Schedule]) -> Vec<NextRun> {
    let mut due: Vec<(Timestamp, &Schedule)> =
        schedules.iter().filter_map(|schedule| Some((schedule.next_run_at?, schedule))).collect();
    due.sort_by_key(|(at, _)| *at);
    let formats = viewer.formats();
    let entry = |(at, schedule): (Timestamp, &Schedule)| NextRun {
        at: formats.relative(at),
        link: format!("{}/schedules/{}", viewer.base(), schedule.id),
        name: schedule.name.clone(),
        rule: schedule.rule(),
    };
    due.into_iter().take(SCHEDULES).map(entry).collect()
}

fn system(t: &'static Texts, formats: Formats, data: &Data) -> Vec<(&'static str, String)> {
    let Checks { database, loops } = &data.ready.checks;
    let healthy = loops.iter().filter(|health| health.status == "healthy").count();
    let engine = if database.engine == "postgres" { "PostgreSQL" } else { "SQLite" };
    // A latency that changes all the time would make an unchanged page look changed.
    let latency = if formats.is_live || database.latency_ms < 10.0 {
        String::new()
    } else {
        format!(", {:.0} ms", database.latency_ms)
    };
    vec![
        (t.health, t.word(&data.ready.status).to_owned()),
        (t.database, format!("{engine}{latency}")),
        (t.loops, format!("{healthy} {} {}", t.of, loops.len())),
        (t.workers, formats.count(data.overview.workers.total)),
        (t.version, env!("CARGO_PKG_VERSION").to_owned()),
    ]
}
