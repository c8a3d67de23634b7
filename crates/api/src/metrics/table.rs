//! Every metric with its type, scope, help text and labels. The reference page is generated from this table.

use MetricKind::{Counter, Gauge, Histogram};
use MetricScope::{Cluster, Node};

/// Type of a metric.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MetricKind {
    Counter,
    Gauge,
    /// A histogram of times, in seconds.
    Histogram,
}

impl MetricKind {
    pub fn as_str(self) -> &'static str {
        match self {
            Counter => "counter",
            Gauge => "gauge",
            Histogram => "histogram",
        }
    }
}

/// What a metric describes. In both scopes, the sum over all nodes is the right total.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MetricScope {
    /// The node that is scraped.
    Node,
    /// The whole database. One node at a time exports it.
    Cluster,
}

impl MetricScope {
    pub fn as_str(self) -> &'static str {
        match self {
            Node => "node",
            Cluster => "cluster",
        }
    }
}

/// A metric. `name` is without the suffix `_total`, which the exposition format adds to a counter.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    pub name: &'static str,
    pub kind: MetricKind,
    pub scope: MetricScope,
    pub help: &'static str,
    pub labels: &'static [&'static str],
}

impl Metric {
    const fn new(
        name: &'static str,
        kind: MetricKind,
        scope: MetricScope,
        labels: &'static [&'static str],
        help: &'static str,
    ) -> Metric {
        Metric { name, kind, scope, help, labels }
    }

    /// Returns the name as Prometheus sees it.
    pub fn exposed_name(&self) -> String {
        match self.kind {
            Counter => format!("{}_total", self.name),
            Gauge | Histogram => self.name.to_owned(),
        }
    }
}

/// Defines a constant for each metric, and a list of all of them.
macro_rules! metrics {
    ($($constant:ident = $name:literal, $kind:ident, $scope:ident, [$($label:literal),*], $help:literal;)+) => {
        $(pub const $constant: Metric = Metric::new($name, $kind, $scope, &[$($label),*], $help);)+

        /// All metrics, grouped by subject.
        pub const METRICS: &[Metric] = &[$($constant),+];
    };
}

metrics! {
    JOBS_CREATED = "jobs_created", Counter, Cluster, [], "Jobs that were submitted";
    JOBS_COMPLETED = "jobs_completed", Counter, Cluster, [], "Jobs that completed";
    JOBS_FAILED = "jobs_failed", Counter, Cluster, [], "Jobs that failed permanently and were dead-lettered";
    JOBS_TIMED_OUT = "jobs_timed_out", Counter, Cluster, [],
        "Runs that did not start in time or ran too long, and jobs that expired";
    JOB_STATE_DURATION = "job_state_duration", Histogram, Node, ["state"],
        "Seconds that jobs spent in a state, measured when their run ends; RETRYING is the planned delay";
    JOBS_IN_STATE = "jobs_in_state", Gauge, Cluster, ["state"], "Jobs by state";
    LANES = "faena_lanes", Gauge, Cluster, [], "Combinations of queue, type and priority that exist";
    LANES_MAX = "faena_lanes_max", Gauge, Cluster, [], "Combinations of queue, type and priority that may exist";
    DEAD_JOBS = "faena_dead_jobs", Gauge, Cluster, [], "Dead-lettered jobs";
    JOB_WAIT_SECONDS = "faena_job_wait_seconds", Histogram, Node, ["queue"],
        "Seconds between becoming ready and starting, of runs that ended at this node";
    JOB_RUN_SECONDS = "faena_job_run_seconds", Histogram, Node, ["queue"],
        "Seconds between start and end, of runs that ended at this node";
    JOB_RUNS = "faena_job_runs", Counter, Node, ["outcome"], "Runs that ended at this node, by outcome";
    THROUGHPUT = "faena_throughput_jobs_per_second", Gauge, Cluster, [],
        "Runs that ended per second, over about the last minute";
    ERROR_RATIO = "faena_error_ratio", Gauge, Cluster, [],
        "Fraction of the runs that failed, from 0 to 1, over about the last minute";
    QUEUE_DEPTH = "faena_queue_depth", Gauge, Cluster, ["queue", "priority"], "Jobs that are ready to run";
    QUEUE_OLDEST_SECONDS = "faena_queue_oldest_seconds", Gauge, Cluster, ["queue"],
        "Time for which the oldest ready job of a queue has been ready";
    QUEUE_PAUSED = "faena_queue_paused", Gauge, Cluster, ["queue"], "1 while the queue is paused, otherwise 0";
    QUEUE_JOBS = "faena_queue_jobs", Counter, Cluster, ["queue", "event"], "What happened to the jobs of a queue";
    WORKERS_CREATED = "workers_created", Counter, Node, [],
        "Registrations of workers at this node, including the built-in worker";
    WORKERS_TERMINATED = "workers_terminated", Counter, Node, [],
        "Workers that left this node or that this node declared lost";
    WORKER_STATE_DURATION = "worker_state_duration", Histogram, Node, ["state"],
        "Seconds that workers of this node spent in a state, measured when they leave it";
    WORKERS_IN_STATE = "workers_in_state", Gauge, Cluster, ["state"],
        "Workers by state, including built-in workers; TERMINATED ones are counted while they are kept";
    WORKER_SLOTS = "faena_worker_slots", Gauge, Node, [], "Jobs that the workers of this node can run concurrently";
    WORKER_SLOTS_BUSY = "faena_worker_slots_busy", Gauge, Node, [], "Slots of the workers of this node that have a job";
    WORKER_UTILIZATION = "faena_worker_utilization_ratio", Gauge, Node, [],
        "Fraction of the slots of this node that have a job, from 0 to 1";
    WORKER_JOBS_IN_FLIGHT = "faena_worker_jobs_in_flight", Gauge, Node, ["worker_id"],
        "Jobs in flight at each worker of this node";
    CIRCUIT_BREAKER_STATE = "circuit_breaker_state", Gauge, Node, ["worker_id"],
        "Circuit breaker of each worker of this node: 0 closed, 1 open, 2 half open";
    DISPATCH_FAILURES = "dispatch_failures", Counter, Node, [],
        "Jobs assigned by this node that the worker did not receive or did not start in time";
    GUARDIAN_ACTIONS = "faena_guardian_actions", Counter, Node, ["check"], "Actions of this node's guardian, by check";
    STALE_REPORTS = "faena_stale_reports", Counter, Node, [],
        "Reports of workers that this node rejected because the run had ended";
    EVENTS_PUBLISHED = "events_published", Counter, Node, [], "Events of this node that a sink confirmed";
    EVENTS_FAILED = "events_failed", Counter, Node, [],
        "Events that this node passed to a sink and that the sink did not confirm, counted once per attempt";
    EVENT_PUBLISH_DURATION = "event_publish_duration", Histogram, Node, [], "Seconds per call to a sink";
    OUTBOX_QUEUE_SIZE = "outbox_queue_size", Gauge, Cluster, [],
        "Events that wait for a sink, counted up to 1000000 per sink";
    DLQ_SIZE = "dlq_size", Gauge, Cluster, [],
        "Events that a sink rejected and that are neither replayed nor resolved";
    OUTBOX_PENDING = "faena_outbox_pending", Gauge, Cluster, ["sink"],
        "Events waiting for a sink, counted up to 1000000";
    OUTBOX_OLDEST_SECONDS = "faena_outbox_oldest_seconds", Gauge, Cluster, ["sink"],
        "Age of the oldest event that waits for a sink";
    OUTBOX_DEAD = "faena_outbox_dead", Gauge, Cluster, ["sink"],
        "Events that a sink rejected and that are neither replayed nor resolved, by sink";
    OUTBOX_SENT = "faena_outbox_sent", Counter, Cluster, ["sink"], "Events that a sink confirmed";
    OUTBOX_SINK_UP = "faena_outbox_sink_up", Gauge, Cluster, ["sink"], "1 while a sink works, 0 while it is down";
    WEBHOOKS_IN_STATE = "faena_webhooks_in_state", Gauge, Cluster, ["state"],
        "Undelivered webhooks by state, each counted up to 100000";
    WEBHOOK_BREAKER_STATE = "faena_webhook_breaker_state", Gauge, Node, ["host"],
        "Circuit breaker of each failing host: 1 open, 2 half open";
    WEBHOOK_ATTEMPTS = "faena_webhook_attempts", Counter, Node, ["outcome"],
        "Webhook attempts of this node: delivered, failed, or late because their lease had ended";
    SCHEDULES = "faena_schedules", Gauge, Cluster, ["state"], "Schedules, active and inactive";
    SCHEDULE_OVERDUE_SECONDS = "faena_schedule_overdue_seconds", Gauge, Cluster, [],
        "Time since the oldest due time that no node has processed, 0 if there is none";
    SCHEDULE_TICKS = "faena_schedule_ticks", Counter, Node, ["outcome"],
        "Due times that this node processed, by outcome";
    SCHEDULE_LATE_SECONDS = "faena_schedule_late_seconds", Gauge, Node, [],
        "How late this node processed its latest due time";
    TASKS = "faena_tasks", Gauge, Cluster, ["machine", "state"], "Tasks that have not ended, by machine and state";
    TASK_OLDEST_SECONDS = "faena_task_oldest_seconds", Gauge, Cluster, ["machine", "state"],
        "Time for which the oldest task of a state has been in that state";
    TASKS_QUEUED = "faena_tasks_queued", Gauge, Cluster, ["machine"],
        "Tasks that are queued because their machine runs as many tasks as its limit allows";
    TASK_QUEUE_OLDEST_SECONDS = "faena_task_queue_oldest_seconds", Gauge, Cluster, ["machine"],
        "Time for which the first queued task of a machine has waited";
    TASK_APPROVALS = "faena_task_approvals_waiting", Gauge, Cluster, [], "Tasks that wait for a decision";
    TASK_APPROVAL_OLDEST_SECONDS = "faena_task_approval_oldest_seconds", Gauge, Cluster, [],
        "Longest time for which a task has been waiting for a decision, 0 if none waits";
    TASK_OVERDUE_SECONDS = "faena_task_overdue_seconds", Gauge, Cluster, [],
        "Time since the oldest due timer of a task that no node has fired, 0 if there is none";
    TASK_EVENTS = "faena_task_events", Counter, Node, ["outcome"],
        "Events and commands that this node applied to tasks, by outcome";
    TASK_DEADLINES_MISSED = "faena_task_deadlines_missed", Counter, Node, [],
        "Deadlines of tasks that this node found missed: silence, no progress or total time";
    TASK_COMMIT_SECONDS = "faena_task_commit_seconds", Histogram, Node, [],
        "Seconds between accepting events of tasks at this node and their commit";
    SOURCE_ROWS = "faena_source_rows", Counter, Node, ["source", "outcome"],
        "Rows of outbox sources that this node processed";
    SOURCE_UP = "faena_source_up", Gauge, Node, ["source"], "1 while a source of this node works, 0 while it is down";
    SOURCE_PENDING = "faena_source_pending", Gauge, Node, ["source"],
        "Rows waiting in a source that this node relays, counted up to 100000";
    SOURCE_OLDEST_SECONDS = "faena_source_oldest_seconds", Gauge, Node, ["source"],
        "Age of the oldest row waiting in a source that this node relays";
    INBOX_MESSAGES = "faena_inbox_messages", Counter, Node, ["inbox", "outcome"],
        "Messages of inboxes that this node processed";
    INBOX_UP = "faena_inbox_up", Gauge, Node, ["inbox"], "1 while an inbox of this node works, 0 while it is down";
    INBOX_PENDING = "faena_inbox_pending", Gauge, Node, ["inbox"],
        "Messages that this node has received and that wait for the job database";
    INBOX_OLDEST_SECONDS = "faena_inbox_oldest_seconds", Gauge, Node, ["inbox"],
        "Time for which messages of an inbox have been waiting for the job database";
    REQUESTS_REJECTED = "faena_requests_rejected", Counter, Node, ["reason"],
        "Requests that this node rejected before or while they were received: key_rate, address_rate, authentication, origin, content, memory or streams";
    TRACE_SPANS_EXPORTED = "faena_trace_spans_exported", Counter, Node, [],
        "Spans of this node that the collector accepted";
    TRACE_SPANS_DROPPED = "faena_trace_spans_dropped", Counter, Node, [],
        "Spans of this node that were lost because too many waited or the collector rejected them";
    LOOP_LATE = "faena_loop_late", Gauge, Node, ["loop"],
        "1 while a loop of this node has had no successful round for more than a minute beyond its period, otherwise 0";
    LOOP_LAST_BEAT_SECONDS = "faena_loop_last_beat_seconds", Gauge, Node, ["loop"],
        "Time since the last successful round of a loop of this node";
    LOOP_FAILURES = "faena_loop_failures", Counter, Node, ["loop"], "Rounds of a loop of this node that failed";
    DATABASE_UP = "faena_database_up", Gauge, Node, [], "1 if the database responded during this scrape, otherwise 0";
    DATABASE_PING_SECONDS = "faena_database_ping_seconds", Gauge, Node, [],
        "Time that the database took to respond during this scrape";
    QUEUE_REDIS_UP = "faena_queue_redis_up", Gauge, Node, [],
        "1 if the queue in Redis is connected, otherwise 0; absent if the database dispatches";
    QUEUE_REDIS_ROUND_TRIP = "faena_queue_redis_round_trip_seconds", Histogram, Node, [],
        "Time of the round trips to the queue in Redis";
    QUEUE_REDIS_DRIFT = "faena_queue_redis_drift", Gauge, Node, [],
        "Entries that the last comparison with the database had to add to or remove from the queue in Redis";
    QUEUE_REDIS_REPAIRED = "faena_queue_redis_repaired", Counter, Node, [],
        "Entries that comparisons with the database had to add to or remove from the queue in Redis";
    QUEUE_REDIS_FILLS = "faena_queue_redis_fills", Counter, Node, [],
        "Times that the queue in Redis was empty and was filled from the database";
    QUEUE_REDIS_STALE = "faena_queue_redis_stale", Counter, Node, [],
        "Jobs taken from the queue in Redis that were not ready in the database";
    QUEUE_REDIS_FALLBACK = "faena_queue_redis_fallback_claims", Counter, Node, [],
        "Claims that the database dispatched because Redis was not available";
    CLUSTER_EXPORTER = "faena_cluster_exporter", Gauge, Node, [],
        "1 on the node that exports the metrics of scope cluster, otherwise 0";
    TLS_CERTIFICATE_EXPIRY = "faena_tls_certificate_expiry_timestamp_seconds", Gauge, Node, [],
        "Unix time at which the TLS certificate of this node expires; absent without TLS";
    START_TIME_SECONDS = "faena_start_time_seconds", Gauge, Node, [], "Unix time of the start of this node";
    BUILD_INFO = "faena_build_info", Gauge, Node, ["version", "database"],
        "Always 1; the labels are the version and the kind of database";
}
