//! Metrics of the whole database.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use faena_domain::{JobState, Rules, Timestamp, WebhookState, WorkerState};
use faena_engine::throughput::Overall;
use faena_store::{
    Counts, InFlightCount, JobTotal, Lane, LaneId, LaneUsage, ScheduleCounts, SinkView, StoreError, Tally, TaskFigures,
    TasksInState, named_queues,
};

use super::{MAX_QUEUES, MAX_TASK_STATES, scrape::Scrape, signed, table};
use crate::Api;

pub struct ClusterFigures {
    now: Timestamp,
    counts: Counts,
    in_flight: Vec<InFlightCount>,
    lanes: Vec<Lane>,
    lane_usage: LaneUsage,
    ready_since: Vec<(LaneId, Timestamp)>,
    rules: Arc<Rules>,
    workers: BTreeMap<WorkerState, u64>,
    webhooks: Vec<(WebhookState, u64)>,
    schedules: ScheduleCounts,
    sinks: Vec<SinkView>,
    tasks: TaskFigures,
    throughput: Option<Overall>,
}

impl ClusterFigures {
    pub async fn read(api: &Api, now: Timestamp) -> Result<ClusterFigures, StoreError> {
        let store = &api.engine.store;
        let counts = store.counts().await?;
        api.engine.throughput.add(&counts, now);
        Ok(ClusterFigures {
            now,
            counts,
            in_flight: store.in_flight_counts().await?,
            lanes: store.lanes().await?,
            lane_usage: store.lane_usage().await?,
            ready_since: store.ready_since().await?,
            rules: store.rules(),
            workers: store.worker_counts().await?,
            webhooks: store.webhook_counts().await?.into_iter().collect(),
            schedules: store.schedule_counts().await?,
            sinks: store.outbox_sinks(now).await?,
            tasks: store.task_figures().await?,
            throughput: api.engine.throughput.overall(now),
        })
    }

    pub fn add(&self, scrape: &mut Scrape) {
        self.jobs(scrape);
        self.queues(scrape);
        let workers = WorkerState::ALL
            .map(|state| ([state.as_str().to_owned()], self.workers.get(&state).copied().map_or(0, signed)));
        scrape.gauge(&table::WORKERS_IN_STATE, workers);
        let webhooks = self.webhooks.iter().map(|(state, count)| ([state.as_str().to_owned()], signed(*count)));
        scrape.gauge(&table::WEBHOOKS_IN_STATE, webhooks);
        let schedules = [("active", self.schedules.active), ("inactive", self.schedules.inactive)];
        scrape.gauge(&table::SCHEDULES, schedules.map(|(state, count)| ([state.to_owned()], signed(count))));
        let overdue = self.schedules.next_at.map_or(0, |at| self.now.ms_since(at).max(0));
        scrape.decimal(&table::SCHEDULE_OVERDUE_SECONDS, overdue as f64 / 1_000.0);
        self.outbox(scrape);
        self.tasks(scrape);
        if let Some(throughput) = self.throughput {
            scrape.decimal(&table::THROUGHPUT, throughput.per_second);
            scrape.decimal(&table::ERROR_RATIO, throughput.error_ratio);
        }
    }

    fn jobs(&self, scrape: &mut Scrape) {
        for (metric, total) in [
            (&table::JOBS_CREATED, JobTotal::Created),
            (&table::JOBS_COMPLETED, JobTotal::Completed),
            (&table::JOBS_FAILED, JobTotal::Failed),
            (&table::JOBS_TIMED_OUT, JobTotal::TimedOut),
        ] {
            let sum: i64 = self.counts.lanes().map(|lane| self.counts.so_far(lane, total)).sum();
            scrape.counter(metric, [([], u64::try_from(sum).unwrap_or(0))]);
        }
        let states = jobs_by_state(&self.counts, &self.in_flight, |_| true);
        scrape.gauge(&table::JOBS_IN_STATE, states.into_iter().map(|(state, count)| ([state.to_string()], count)));
        scrape.gauge(&table::LANES, [([], signed(self.lane_usage.used as u64))]);
        scrape.gauge(&table::LANES_MAX, [([], signed(self.lane_usage.max as u64))]);
        scrape.gauge(&table::DEAD_JOBS, [([], self.counts.total(Tally::Failed))]);
    }

    fn queues(&self, scrape: &mut Scrape) {
        let names = named_queues(&self.lanes, MAX_QUEUES);
        let mut depth: BTreeMap<[String; 2], i64> = BTreeMap::new();
        let mut events: BTreeMap<[String; 2], u64> = BTreeMap::new();
        for lane in &self.lanes {
            let queue = names[&lane.id];
            let queued = self.counts.by_lane.get(&(lane.id, Tally::Queued)).copied().unwrap_or(0);
            *depth.entry([queue.to_owned(), lane.priority.as_str().to_owned()]).or_default() += queued;
            for total in JobTotal::ALL {
                let so_far = u64::try_from(self.counts.so_far(lane.id, total)).unwrap_or(0);
                *events.entry([queue.to_owned(), total.as_str().to_owned()]).or_default() += so_far;
            }
        }
        scrape.gauge(&table::QUEUE_DEPTH, depth);
        scrape.counter(&table::QUEUE_JOBS, events);
        let mut oldest: BTreeMap<[String; 1], i64> = names.values().map(|queue| ([(*queue).to_owned()], 0)).collect();
        for (lane, since) in &self.ready_since {
            let Some(queue) = names.get(lane) else { continue };
            let known = oldest.entry([(*queue).to_owned()]).or_default();
            *known = (*known).max(self.now.ms_since(*since) / 1_000);
        }
        scrape.gauge(&table::QUEUE_OLDEST_SECONDS, oldest);
        scrape.gauge(&table::QUEUE_PAUSED, self.paused(&names));
    }

    /// Returns whether each queue is paused. A queue that has had no job is listed while it is paused.
    fn paused(&self, names: &HashMap<LaneId, &str>) -> BTreeMap<[String; 1], i64> {
        let is_paused = |queue: &str| self.rules.queues.get(queue).is_some_and(|rule| rule.paused.is_some());
        let mut paused: BTreeMap<[String; 1], i64> = BTreeMap::new();
        for lane in &self.lanes {
            let known = paused.entry([names[&lane.id].to_owned()]).or_default();
            *known = (*known).max(i64::from(is_paused(&lane.queue)));
        }
        for queue in self.rules.queues.keys().filter(|queue| is_paused(queue)) {
            if !self.lanes.iter().any(|lane| lane.queue == *queue) && paused.len() < MAX_QUEUES {
                paused.insert([queue.clone()], 1);
            }
        }
        paused
    }

    fn outbox(&self, scrape: &mut Scrape) {
        let sinks = &self.sinks;
        scrape.gauge(&table::OUTBOX_QUEUE_SIZE, [([], sinks.iter().map(|sink| signed(sink.pending)).sum())]);
        scrape.gauge(&table::DLQ_SIZE, [([], sinks.iter().map(|sink| signed(sink.dead)).sum())]);
        scrape.gauge(&table::OUTBOX_PENDING, sinks.iter().map(|sink| ([sink.name.clone()], signed(sink.pending))));
        let oldest = sinks.iter().map(|sink| {
            let waiting_ms = sink.oldest_pending_at.map_or(0, |at| self.now.ms_since(at));
            ([sink.name.clone()], waiting_ms.max(0) / 1_000)
        });
        scrape.gauge(&table::OUTBOX_OLDEST_SECONDS, oldest);
        scrape.gauge(&table::OUTBOX_DEAD, sinks.iter().map(|sink| ([sink.name.clone()], signed(sink.dead))));
        scrape.counter(&table::OUTBOX_SENT, sinks.iter().map(|sink| ([sink.name.clone()], sink.sent)));
        let up = sinks.iter().map(|sink| ([sink.name.clone()], i64::from(sink.down_since.is_none())));
        scrape.gauge(&table::OUTBOX_SINK_UP, up);
    }
}

impl ClusterFigures {
    fn tasks(&self, scrape: &mut Scrape) {
        let waiting = |since: Option<Timestamp>| since.map_or(0, |at| self.now.ms_since(at).max(0));
        let (mut tasks, mut oldest) = (BTreeMap::new(), BTreeMap::new());
        for (labels, figures) in named_states(&self.tasks.states) {
            *tasks.entry(labels.clone()).or_default() += signed(figures.tasks);
            let longest: &mut i64 = oldest.entry(labels).or_default();
            *longest = (*longest).max(waiting(Some(figures.since)) / 1_000);
        }
        scrape.gauge(&table::TASKS, tasks);
        scrape.gauge(&table::TASK_OLDEST_SECONDS, oldest);
        let queued = self.tasks.queued.iter().take(MAX_TASK_STATES);
        scrape.gauge(&table::TASKS_QUEUED, queued.clone().map(|one| ([one.machine.clone()], signed(one.tasks))));
        let oldest = queued.map(|one| ([one.machine.clone()], waiting(Some(one.since)) / 1_000));
        scrape.gauge(&table::TASK_QUEUE_OLDEST_SECONDS, oldest);
        scrape.gauge(&table::TASK_APPROVALS, [([], signed(self.tasks.approvals))]);
        let approval = waiting(self.tasks.oldest_approval_at) / 1_000;
        scrape.gauge(&table::TASK_APPROVAL_OLDEST_SECONDS, [([], approval)]);
        scrape.decimal(&table::TASK_OVERDUE_SECONDS, waiting(self.tasks.next_at) as f64 / 1_000.0);
    }
}

/// Returns the labels of each state. The states with the most tasks have their names, all others share the label `other`.
fn named_states(states: &[TasksInState]) -> impl Iterator<Item = ([String; 2], &TasksInState)> {
    let mut states: Vec<&TasksInState> = states.iter().collect();
    states.sort_by(|a, b| b.tasks.cmp(&a.tasks).then_with(|| (&a.machine, &a.state).cmp(&(&b.machine, &b.state))));
    states.into_iter().enumerate().map(|(position, figures)| {
        let labels = match position < MAX_TASK_STATES {
            true => [figures.machine.clone(), figures.state.clone()],
            false => ["other".to_owned(), "other".to_owned()],
        };
        (labels, figures)
    })
}

/// Counts the jobs of some lanes by state.
///
/// The counters have one number for all jobs in flight. Those that are neither `SCHEDULED` nor `PROCESSING` are `ASSIGNED`.
pub fn jobs_by_state(
    counts: &Counts,
    in_flight: &[InFlightCount],
    includes: impl Fn(LaneId) -> bool,
) -> Vec<(JobState, i64)> {
    let tally = |wanted: Tally| -> i64 {
        let all = counts.by_lane.iter().filter(|((lane, tally), _)| *tally == wanted && includes(*lane));
        all.map(|(_, n)| *n).sum()
    };
    let state = |wanted: JobState| -> i64 {
        in_flight.iter().filter(|count| count.state == wanted && includes(count.lane)).map(|count| count.count).sum()
    };
    let in_flight = tally(Tally::InFlight);
    // The two are read one after the other, so a job that started meanwhile must not be counted twice.
    let processing = state(JobState::Processing).min(in_flight);
    let scheduled = state(JobState::Scheduled).min(in_flight - processing);
    JobState::ALL
        .into_iter()
        .map(|state| {
            let count = match state {
                JobState::Processing => processing,
                JobState::Scheduled => scheduled,
                JobState::Assigned => in_flight - processing - scheduled,
                other => tally(Tally::of(other)),
            };
            (state, count)
        })
        .collect()
}
