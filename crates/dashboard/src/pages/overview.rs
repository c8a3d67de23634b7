//! The overview page: what needs attention, key figures, charts, queues, the next schedules and the state of the
//! system.

mod attention;

use std::collections::BTreeMap;

use askama::Template;
use faena_domain::Timestamp;
use serde::Deserialize;

use attention::{Attention, attention};

use super::{
    history::{Chart, History, Percentiles, Period, Throughput, percentiles, time},
    queues::{Queue, QueueList, queue_table},
    schedules::{Schedule, ScheduleList},
};
use crate::{
    charts, error::Failure, format::Formats, layout::Page, markup::Markup, table::escaped, texts::Texts, viewer::Viewer,
};

/// Maximum number of queues and schedules that the overview lists.
const QUEUES: usize = 8;
const SCHEDULES: usize = 6;

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct Overview {
    /// Seconds since this server started.
    uptime: i64,
    jobs: Jobs,
    workers: Workers,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct Jobs {
    by_status: BTreeMap<String, u64>,
    without_worker: Vec<UnservedType>,
}

/// Queued jobs of a type that no worker can run.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct UnservedType {
    #[serde(rename = "type")]
    kind: String,
    queue: String,
    jobs: u64,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Workers {
    total: u64,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct WorkerList {
    workers: Vec<Worker>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Worker {
    name: Option<String>,
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
#[derive(Default)]
struct Data {
    overview: Overview,
    minutes: Vec<Period>,
    hours: Vec<Period>,
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
        // Without the overview the page has nothing to show. The viewer may not be allowed to see the other parts.
        let overview = viewer.get("/api/v1/metrics/overview").await?;
        let (minutes, hours, queues, schedules, workers, ready, dead, outbox, approvals) = tokio::join!(
            viewer.get::<History>("/api/v1/metrics/history?period=minute"),
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
            minutes: minutes.unwrap_or_default().history,
            hours: hours.unwrap_or_default().history,
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

/// A figure with its label.
pub struct Figure {
    pub label: &'static str,
    /// The page that shows what it counts.
    pub path: Option<String>,
    pub value: String,
    pub detail: Markup,
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
    minutes: Chart,
    hours: Chart,
    queues: String,
    queue_count: usize,
    next_runs: Vec<NextRun>,
    /// What was measured, and its 50th, 95th and 99th percentiles.
    times: Vec<(&'static str, [String; 3])>,
    system: Vec<(&'static str, String)>,
}

#[derive(Template)]
#[template(ext = "html", source = "{{ word }} {{ age }}")]
pub struct Oldest {
    pub word: &'static str,
    pub age: Markup,
}

#[derive(Template)]
#[template(
    ext = "html",
    source = "{{ oldest }}{% if let Some(paused) = paused %}, {{ paused }}{% endif %}{% if let Some(scheduled) = scheduled %}, {{ scheduled }}{% endif %}"
)]
struct ReadyDetail {
    oldest: Markup,
    /// Jobs that no worker can take, because their queues are paused.
    paused: Option<String>,
    scheduled: Option<String>,
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
        attention: attention(t, formats, viewer.base(), &data),
        figures: figures(t, formats, &data),
        minutes: Chart::of(t, formats, &data.minutes, charts::Period::Minute),
        hours: Chart::of(t, formats, &data.hours, charts::Period::Hour),
        queues: queue_table(&viewer, &busiest).render().map_err(Failure::internal)?,
        queue_count: data.queues.len(),
        next_runs: next_runs(&viewer, &data.schedules),
        times: times(t, formats, &data.hours),
        system: system(t, formats, &data),
    };
    Page::new(t.overview, "/", &page)
}

fn figures(t: &'static Texts, formats: Formats, data: &Data) -> Vec<Figure> {
    let scheduled = data.jobs(&["PENDING", "RETRYING"]);
    let paused = data.queues.iter().filter(|queue| queue.paused.is_some()).map(|queue| queue.depth.total).sum::<u64>();
    let oldest = data.queues.iter().filter_map(|queue| queue.oldest).min();
    let oldest = match oldest {
        Some(at) => Markup::of(&Oldest { word: t.oldest, age: formats.age(at) }),
        None => escaped(t.nothing_queued),
    };
    let live = |worker: &&Worker| !matches!(worker.state.as_str(), "Terminated" | "Terminating");
    let slots: u64 = data.workers.iter().filter(live).map(|worker| worker.concurrency).sum();
    let hour = |pick: fn(&Period) -> u64| data.minutes.iter().map(pick).sum::<u64>();
    let (completed, failed) = (hour(|minute| minute.total_completed), hour(|minute| minute.total_failed));
    let retried = hour(|minute| minute.failed_runs);
    let share = if completed + failed > 0 { failed as f64 * 100.0 / (completed + failed) as f64 } else { 0.0 };
    let throughput = Throughput::of(&data.minutes, data.overview.uptime * 1_000, formats.now);
    let (per_minute, averaged) = Throughput::words(throughput.as_ref(), t, formats);
    let (wait, run) =
        (percentiles(&data.hours, |hour| hour.wait_time), percentiles(&data.hours, |hour| hour.processing_time));
    vec![
        Figure {
            label: t.ready,
            path: Some("/jobs?status=QUEUED&sort=created&order=asc".into()),
            value: formats.count(data.jobs(&["QUEUED"])),
            detail: Markup::of(&ReadyDetail {
                oldest,
                paused: (paused > 0).then(|| t.in_paused_queues(&formats.count(paused))),
                scheduled: (scheduled > 0).then(|| t.scheduled_count(formats.count(scheduled), scheduled)),
            }),
        },
        Figure {
            label: t.running,
            path: Some("/jobs?status=PROCESSING".into()),
            value: formats.count(data.jobs(&["SCHEDULED", "ASSIGNED", "PROCESSING"])),
            detail: escaped(&format!("{} {}", t.of, t.slots_count(formats.count(slots), slots))),
        },
        Figure {
            label: t.finished_per_minute,
            path: None,
            value: per_minute,
            detail: escaped(&format!("{averaged}; {} {}", formats.count(completed + failed), t.in_the_last_hour)),
        },
        Figure {
            label: t.failed_recently,
            path: Some("/dead-letters".into()),
            value: format!("{} %", formats.decimal(share)),
            detail: escaped(&format!(
                "{} {} {}, {}",
                formats.count(failed),
                t.of,
                formats.count(completed + failed),
                t.failed_runs_count(formats.count(retried), retried)
            )),
        },
        Figure {
            label: t.wait_p95,
            path: None,
            value: time(formats, wait.p95),
            detail: escaped(&format!("{} {}", t.run_time, time(formats, run.p95))),
        },
    ]
}

fn next_runs(viewer: &Viewer, schedules: &[Schedule]) -> Vec<NextRun> {
    let mut due: Vec<(Timestamp, &Schedule)> =
        schedules.iter().filter_map(|schedule| Some((schedule.next_run_at?, schedule))).collect();
    due.sort_by_key(|(at, _)| *at);
    let formats = viewer.formats();
    let entry = |(at, schedule): (Timestamp, &Schedule)| NextRun {
        at: formats.until(at),
        link: format!("{}/schedules/{}", viewer.base(), schedule.id),
        name: schedule.name.clone(),
        rule: schedule.rule(viewer.texts(), formats),
    };
    due.into_iter().take(SCHEDULES).map(entry).collect()
}

fn times(t: &'static Texts, formats: Formats, hours: &[Period]) -> Vec<(&'static str, [String; 3])> {
    let row = |name, Percentiles { p50, p95, p99 }: Percentiles| (name, [p50, p95, p99].map(|ms| time(formats, ms)));
    vec![
        row(t.wait, percentiles(hours, |hour| hour.wait_time)),
        row(t.run, percentiles(hours, |hour| hour.processing_time)),
    ]
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

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::texts::Language;

    const NOW: Timestamp = Timestamp::from_ms(1_000_000_000);

    fn parsed<T: serde::de::DeserializeOwned>(value: Value) -> T {
        serde_json::from_value(value).expect("an answer of the API")
    }

    fn schedule(next_run_at: Timestamp) -> Schedule {
        parsed(json!({
            "id": "s1", "name": "nightly", "timezone": "UTC", "jobName": "noop", "jobPayload": {}, "queue": "q",
            "misfire": "skip", "overlap": "allow", "isActive": true, "nextRunAt": next_run_at, "runCount": 0,
        }))
    }

    /// Returns the data of pages with one problem each, and the link and a part of the text that the page must show.
    fn problems() -> Vec<(Data, &'static str, &'static str)> {
        let mut ready = Ready::default();
        ready.checks.loops =
            parsed(json!([{"name": "promoter", "status": "healthy"}, {"name": "guardian", "status": "unhealthy"}]));
        let depth = json!({"CRITICAL": 0, "HIGH": 0, "NORMAL": 3, "LOW": 0, "total": 3});
        let queue = json!({
            "name": "mail", "depth": depth, "pending": 0, "retrying": 0, "running": 0, "strict": false, "fairness": "none",
            "paused": {"at": NOW},
        });
        let worker = json!({"id": "w1", "name": "billing-2", "state": "Ready", "concurrency": 1, "breaker": "open"});
        let well = json!({"id": "w2", "name": "billing-3", "state": "Ready", "concurrency": 1, "breaker": "closed"});
        let unserved = json!([{"type": "fax", "queue": "paper", "jobs": 2}]);
        let overview = parsed(json!({"jobs": {"withoutWorker": unserved}}));
        let dead = json!({"total": 2, "byType": [{"jobType": "invoice.send", "count": 2}]});
        let sinks = json!([{"name": "bus", "downSince": NOW, "pending": 7}, {"name": "log", "pending": 0}]);
        let late = vec![schedule(NOW.plus_ms(-120_000)), schedule(NOW.plus_ms(60_000)), schedule(NOW.plus_ms(-1_000))];
        vec![
            (Data { dead: parsed(dead), ..Data::default() }, "/faena/dead-letters", "2 × invoice.send"),
            (
                Data { approvals: parsed(json!({"total": 1, "tasks": [{"updatedAt": NOW}]})), ..Data::default() },
                "/faena/approvals",
                "0 ms",
            ),
            (Data { sinks: parsed(sinks), ..Data::default() }, "/faena/events", "bus"),
            (Data { workers: parsed(json!([worker, well])), ..Data::default() }, "/faena/workers/w1", "billing-2"),
            (Data { schedules: late, ..Data::default() }, "/faena/schedules/s1", "nightly"),
            (Data { ready, ..Data::default() }, "/faena/about", "guardian"),
            (Data { overview, ..Data::default() }, "/faena/jobs?status=QUEUED&type=fax&queue=paper", "fax"),
            (Data { queues: vec![parsed(queue)], ..Data::default() }, "/faena/queues/mail", "mail"),
        ]
    }

    #[test]
    fn everything_that_needs_attention_is_listed_once_with_a_link() {
        for language in [Language::English, Language::Spanish] {
            let formats = Formats { language, now: NOW, is_live: false };
            for (data, link, text) in problems() {
                let found = attention(language.texts(), formats, "/faena", &data);
                assert_eq!(found.len(), 1, "{link}");
                assert_eq!(found[0].link, link);
                let words = format!("{} {}", found[0].what, found[0].detail);
                assert!(words.contains(text), "{words}");
                assert!(!words.contains('“') || language == Language::English, "{words}");
            }
            assert!(attention(language.texts(), formats, "", &Data::default()).is_empty());
        }
    }

    #[test]
    fn many_types_without_a_worker_do_not_fill_the_page() {
        let types: Vec<Value> = (0..100).map(|n| json!({"type": format!("t{n}"), "queue": "q", "jobs": 2})).collect();
        let data = Data { overview: parsed(json!({"jobs": {"withoutWorker": types}})), ..Data::default() };
        let formats = Formats { language: Language::English, now: NOW, is_live: false };
        let found = attention(Language::English.texts(), formats, "", &data);
        assert_eq!(found.len(), 4);
        assert_eq!(found[3].what, "No worker runs 97 more types");
        assert_eq!(found[3].detail.to_string(), "194 jobs waiting");
    }

    #[test]
    fn ready_jobs_of_paused_queues_are_named() {
        let queue = |ready: u64, paused: Value| -> Queue {
            let depth = json!({"CRITICAL": 0, "HIGH": 0, "NORMAL": ready, "LOW": 0, "total": ready});
            parsed(json!({
                "name": "mail", "depth": depth, "pending": 0, "retrying": 0, "running": 0, "strict": false,
                "fairness": "none", "paused": paused,
            }))
        };
        let detail = |language: Language, queues: Vec<Queue>| {
            let data = Data { queues, ..Data::default() };
            let formats = Formats { language, now: NOW, is_live: false };
            figures(language.texts(), formats, &data)[0].detail.to_string()
        };
        let queues = || vec![queue(3, json!({"at": NOW})), queue(4, Value::Null), queue(1200, json!({"at": NOW}))];
        assert_eq!(detail(Language::English, queues()), "nothing queued, 1,203 of these in paused queues");
        assert_eq!(detail(Language::Spanish, queues()), "nada en cola, 1203 de ellos en colas en pausa");
        assert_eq!(detail(Language::English, vec![queue(4, Value::Null)]), "nothing queued");
    }

    fn times_of(hours: &[Period]) -> Vec<(&'static str, [String; 3])> {
        times(Language::English.texts(), Formats { language: Language::English, now: NOW, is_live: false }, hours)
    }

    #[test]
    fn the_figures_of_the_last_hour_come_from_its_minutes() {
        let times = json!({"p50": null, "p95": null, "p99": null});
        let minute = |minutes_ago: i64, completed: u64, failed: u64| -> Period {
            parsed(json!({
                "date": NOW.plus_ms(-minutes_ago * 60_000), "totalCompleted": completed, "totalFailed": failed, "failedRuns": failed + 1,
                "waitTime": times, "processingTime": times,
            }))
        };
        let hour: Period = parsed(json!({
            "date": NOW, "totalCompleted": 900, "totalFailed": 900, "failedRuns": 0,
            "waitTime": {"p95": 1900.0}, "processingTime": {"p95": 840.0},
        }));
        let overview = parsed(json!({"uptime": 3600}));
        let minutes = vec![minute(1, 30, 1), minute(0, 68, 1)];
        let data = Data { overview, minutes, hours: vec![hour], ..Data::default() };
        let formats = Formats { language: Language::English, now: NOW, is_live: false };
        let figures = figures(Language::English.texts(), formats, &data);
        let shown: Vec<(&str, String)> =
            figures.iter().map(|figure| (figure.value.as_str(), figure.detail.to_string())).collect();
        // The minutes that have ended count for the average.
        assert_eq!(shown[2], ("6.2", "average of 5 min; 100 in the last hour".into()));
        assert_eq!(shown[3], ("2 %", "2 of 100, 4 failed runs".into()));
        assert_eq!(shown[4], ("1.9 s", "run 840 ms".into()));
        let [wait, run] = [0, 1].map(|row| times_of(&data.hours)[row].1.clone());
        assert_eq!((wait, run), (["–", "1.9 s", "–"].map(String::from), ["–", "840 ms", "–"].map(String::from)));
        let chart = |minutes: &[Period]| Chart::of(Language::English.texts(), formats, minutes, charts::Period::Minute);
        assert!(chart(&[minute(1, 0, 0)]).is_empty);
        let chart = chart(&data.minutes);
        assert_eq!((chart.is_empty, chart.text.as_str()), (false, "completed: 98, failed: 2"));
        let current = [minute(0, 5, 0)];
        let chart = Chart::of(Language::English.texts(), formats, &current, charts::Period::Minute);
        assert_eq!((chart.is_empty, chart.is_flat), (false, true), "the current minute is not drawn");
    }
}
