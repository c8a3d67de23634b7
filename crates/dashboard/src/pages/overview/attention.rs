//! What needs attention now.

use super::{super::queues::queue_path, Data, Oldest};
use crate::{
    format::Formats,
    markup::{Markup, StateStyle, icon},
    query::Pairs,
    table::escaped,
    texts::Texts,
};

/// Types without a worker that are listed by name. Further ones are one entry, because a caller can submit any number of types.
const MAX_UNSERVED_TYPES: usize = 3;

/// Something that needs attention.
pub struct Attention {
    pub icon: Markup,
    pub link: String,
    pub what: String,
    pub detail: Markup,
}

/// Lists what needs attention now, each with a link to the page on which a person can resolve it.
pub fn attention(t: &Texts, formats: Formats, base: &str, data: &Data) -> Vec<Attention> {
    let mut found = Vec::new();
    let mut add = |style, path: &str, what: String, detail: Markup| {
        found.push(Attention { icon: icon(style), link: format!("{base}{path}"), what, detail });
    };
    if data.dead.total > 0 {
        let most = data.dead.by_type.iter().max_by_key(|entry| entry.count);
        let detail = most.map(|most| format!("{} × {}", formats.count(most.count), most.job_type)).unwrap_or_default();
        add(
            StateStyle::Failed,
            "/dead-letters",
            t.dead_letters_count(formats.count(data.dead.total), data.dead.total),
            escaped(&detail),
        );
    }
    if data.approvals.total > 0 {
        let oldest = data.approvals.tasks.iter().map(|task| task.updated_at).min();
        let age = oldest.map(|at| Markup::of(&Oldest { word: t.oldest, age: formats.age(at) }));
        let what = t.approvals_count(formats.count(data.approvals.total), data.approvals.total);
        add(StateStyle::Waiting, "/approvals", what, age.unwrap_or_default());
    }
    for sink in data.sinks.iter().filter(|sink| sink.down_since.is_some()) {
        let detail = t.waiting_events_count(formats.count(sink.pending), sink.pending);
        add(StateStyle::Problem, "/events", format!("{} {}", t.sink_down, t.quoted(&sink.name)), escaped(&detail));
    }
    let unserved_types = &data.overview.jobs.without_worker;
    for unserved in unserved_types.iter().take(MAX_UNSERVED_TYPES) {
        let jobs = t.jobs_count(formats.count(unserved.jobs), unserved.jobs);
        let mut filter = Pairs::default();
        for (name, value) in [("status", "QUEUED"), ("type", &unserved.kind), ("queue", &unserved.queue)] {
            filter.add(name, value);
        }
        add(
            StateStyle::Problem,
            &filter.link("/jobs"),
            format!("{} {}", t.no_worker_for, t.quoted(&unserved.kind)),
            escaped(&format!("{jobs} {}", t.waiting_word)),
        );
    }
    if let Some(more) = unserved_types.get(MAX_UNSERVED_TYPES..).filter(|more| !more.is_empty()) {
        let jobs: u64 = more.iter().map(|unserved| unserved.jobs).sum();
        add(
            StateStyle::Problem,
            "/jobs?status=QUEUED",
            format!("{} {}", t.no_worker_for, t.more_types_count(formats.count(more.len() as u64), more.len() as u64)),
            escaped(&format!("{} {}", t.jobs_count(formats.count(jobs), jobs), t.waiting_word)),
        );
    }
    for worker in data.workers.iter().filter(|worker| worker.breaker.as_deref() == Some("open")) {
        add(
            StateStyle::Problem,
            &format!("/workers/{}", worker.id),
            format!("{} {}", t.breaker_open, t.quoted(worker.name.as_deref().unwrap_or(&worker.id))),
            Markup::default(),
        );
    }
    for late in data.schedules.iter().filter(|schedule| schedule.is_late(formats.now)) {
        add(
            StateStyle::Warning,
            &format!("/schedules/{}", late.id),
            format!("{} {}", t.schedule_late, t.quoted(&late.name)),
            Markup::default(),
        );
    }
    for stopped in data.ready.checks.loops.iter().filter(|health| health.status != "healthy") {
        let detail = escaped(t.word(&stopped.status));
        add(StateStyle::Problem, "/about", format!("{} {}", t.loop_not_healthy, t.quoted(&stopped.name)), detail);
    }
    for queue in data.queues.iter().filter(|queue| queue.paused.is_some()) {
        let detail =
            format!("{} {}", t.jobs_count(formats.count(queue.depth.total), queue.depth.total), t.waiting_word);
        add(
            StateStyle::Paused,
            &queue_path(&queue.name),
            format!("{} {}", t.queue_paused, t.quoted(&queue.name)),
            escaped(&detail),
        );
    }
    found
}
