//! Every metric with its type, help text and labels. The reference page is generated from this table.

/// Type of a metric.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MetricKind {
    Counter,
    Gauge,
}

impl MetricKind {
    pub fn as_str(self) -> &'static str {
        match self {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
        }
    }
}

/// A metric. `name` is without the suffix `_total`, which the exposition format adds to a counter.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    pub name: &'static str,
    pub kind: MetricKind,
    pub help: &'static str,
    pub labels: &'static [&'static str],
}

impl Metric {
    const fn counter(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Metric {
        Metric { name, kind: MetricKind::Counter, help, labels }
    }

    const fn gauge(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Metric {
        Metric { name, kind: MetricKind::Gauge, help, labels }
    }

    /// Returns the name as Prometheus sees it.
    pub fn exposed_name(&self) -> String {
        match self.kind {
            MetricKind::Counter => format!("{}_total", self.name),
            MetricKind::Gauge => self.name.to_owned(),
        }
    }
}

pub const JOBS_IN_STATE: Metric = Metric::gauge(
    "jobs_in_state",
    &["state"],
    "Jobs by state; IN_FLIGHT counts SCHEDULED, ASSIGNED and PROCESSING together",
);
pub const DLQ_SIZE: Metric = Metric::gauge("dlq_size", &[], "Dead-lettered jobs");
pub const QUEUE_DEPTH: Metric =
    Metric::gauge("queue_depth", &["queue", "priority"], "Jobs that are ready to run, by queue and priority");
pub const QUEUE_PAUSED: Metric = Metric::gauge("queue_paused", &["queue"], "1 while the queue is paused, otherwise 0");
pub const WORKERS_IN_STATE: Metric =
    Metric::gauge("workers_in_state", &["state"], "Workers connected to this node, by state");
pub const WORKER_JOBS_IN_FLIGHT: Metric =
    Metric::gauge("worker_jobs_in_flight", &["worker_id"], "Jobs in flight at each worker of this node");
pub const CIRCUIT_BREAKER_STATE: Metric = Metric::gauge(
    "circuit_breaker_state",
    &["worker_id"],
    "Circuit breaker of each worker of this node: 0 closed, 1 open, 2 half open",
);
pub const DISPATCH_FAILURES: Metric = Metric::counter(
    "dispatch_failures",
    &[],
    "Jobs assigned by this node that the worker did not receive or did not start in time",
);
pub const GUARDIAN_ACTIONS: Metric =
    Metric::counter("guardian_actions", &["check"], "Actions of this node's guardian, by check");
pub const STALE_REPORTS: Metric =
    Metric::counter("stale_reports", &[], "Reports of workers that this node rejected because the run was over");
pub const WEBHOOKS_IN_STATE: Metric =
    Metric::gauge("webhooks_in_state", &["state"], "Undelivered webhooks by state, each counted up to 100000");
pub const WEBHOOK_BREAKER_STATE: Metric =
    Metric::gauge("webhook_breaker_state", &["host"], "Circuit breaker of each failing host: 1 open, 2 half open");
pub const WEBHOOK_ATTEMPTS_DELIVERED: Metric =
    Metric::counter("webhook_attempts_delivered", &[], "Webhook attempts of this node that were delivered");
pub const WEBHOOK_ATTEMPTS_FAILED: Metric =
    Metric::counter("webhook_attempts_failed", &[], "Webhook attempts of this node that failed");
pub const WEBHOOK_ATTEMPTS_LATE: Metric = Metric::counter(
    "webhook_attempts_late",
    &[],
    "Webhook attempts of this node whose outcome arrived after their lease had ended",
);
pub const SCHEDULES: Metric = Metric::gauge("faena_schedules", &["state"], "Schedules, active and inactive");
pub const SCHEDULE_TICKS: Metric =
    Metric::counter("faena_schedule_ticks", &["outcome"], "Due times that this node processed, by outcome");
pub const SCHEDULE_LATE_SECONDS: Metric = Metric::gauge(
    "faena_schedule_late_seconds",
    &[],
    "Delay between the latest due time that this node processed and the processing",
);
pub const OUTBOX_PENDING: Metric =
    Metric::gauge("faena_outbox_pending", &["sink"], "Events waiting for a sink, counted up to 1000000");
pub const OUTBOX_OLDEST_SECONDS: Metric =
    Metric::gauge("faena_outbox_oldest_seconds", &["sink"], "Age of the oldest event that waits for a sink");
pub const OUTBOX_DEAD: Metric = Metric::gauge(
    "faena_outbox_dead",
    &["sink"],
    "Events that a sink rejected and that are neither replayed nor resolved",
);
pub const OUTBOX_SENT: Metric = Metric::counter("faena_outbox_sent", &["sink"], "Events that a sink confirmed");
pub const OUTBOX_SINK_UP: Metric =
    Metric::gauge("faena_outbox_sink_up", &["sink"], "1 while a sink works, 0 while it is down");
pub const SOURCE_ROWS: Metric =
    Metric::counter("faena_source_rows", &["source", "outcome"], "Rows of outbox sources that this node processed");
pub const INBOX_MESSAGES: Metric =
    Metric::counter("faena_inbox_messages", &["inbox", "outcome"], "Messages of inboxes that this node processed");

/// All metrics, grouped by what they are about.
pub const METRICS: &[Metric] = &[
    JOBS_IN_STATE,
    DLQ_SIZE,
    QUEUE_DEPTH,
    QUEUE_PAUSED,
    WORKERS_IN_STATE,
    WORKER_JOBS_IN_FLIGHT,
    CIRCUIT_BREAKER_STATE,
    DISPATCH_FAILURES,
    GUARDIAN_ACTIONS,
    STALE_REPORTS,
    WEBHOOKS_IN_STATE,
    WEBHOOK_BREAKER_STATE,
    WEBHOOK_ATTEMPTS_DELIVERED,
    WEBHOOK_ATTEMPTS_FAILED,
    WEBHOOK_ATTEMPTS_LATE,
    SCHEDULES,
    SCHEDULE_TICKS,
    SCHEDULE_LATE_SECONDS,
    OUTBOX_PENDING,
    OUTBOX_OLDEST_SECONDS,
    OUTBOX_DEAD,
    OUTBOX_SENT,
    OUTBOX_SINK_UP,
    SOURCE_ROWS,
    INBOX_MESSAGES,
];
