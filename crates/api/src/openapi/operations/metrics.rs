//! Operations below `/api/v1/metrics`.

use faena_domain::parse::schema::{boolean, one_of, time, with_default};
use faena_wire::metrics::{JobMetrics, MetricsHistory, MetricsOverview, QueueMetrics, ScheduleMetrics, WorkerMetrics};

use crate::openapi::{
    operation::{Operation, Tag},
    requests::filter_text,
};

fn operation(id: &'static str, summary: &'static str) -> Operation {
    Operation::new(Tag::Metrics, id, summary).error(400, "A parameter is unknown or not valid.")
}

pub fn overview() -> Operation {
    operation("getMetricsOverview", "Show metrics of queues, workers, jobs and schedules")
        .ok::<MetricsOverview>("The metrics of the whole cluster.")
}

pub fn queues() -> Operation {
    operation("getQueueMetrics", "Count jobs that have not finished").ok::<QueueMetrics>("The figures.")
}

pub fn workers() -> Operation {
    operation("getWorkerMetrics", "Count workers and their runs").ok::<WorkerMetrics>("The figures.")
}

pub fn jobs() -> Operation {
    operation("getJobMetrics", "Count jobs by state").ok::<JobMetrics>("The figures.")
}

pub fn schedules() -> Operation {
    operation("getScheduleMetrics", "Count schedules and their jobs").ok::<ScheduleMetrics>("The figures.")
}

pub fn history() -> Operation {
    operation("getMetricsHistory", "Show what happened to jobs per minute, hour or day")
        .about("The history outlives the jobs. At most 1000 entries, 60 periods with `byQueue`. Minutes are kept for two hours and have no measured times.")
        .query("period", with_default(one_of(["minute", "hour", "day"]), "hour"), "Length of an entry.")
        .query("from", time(), "Start of the first entry. Default: 30 periods before `until`, or 60 minutes.")
        .query("until", time(), "End of the last entry. Now if it is absent.")
        .query("queue", filter_text(), "Only this queue.")
        .query("byQueue", with_default(boolean(), false), "One entry per queue, only where something happened.")
        .ok::<MetricsHistory>("The periods, oldest first.")
}
