//! `/metrics/overview`, `/queues`, `/workers`, `/jobs` and `/schedules` below `/api/v1`: metrics of the whole cluster as JSON.
//!
//! A caller that is restricted to queues gets the metrics of its queues.

use std::collections::{BTreeMap, HashSet};

use axum::{
    Json,
    extract::{RawQuery, State},
};
use faena_domain::{JobState, Timestamp, WorkerState};
use faena_store::{
    COUNT_LIMIT, Counts, HistoryMeasure, HistoryPeriod, HistoryQuery, InFlightCount, JobTotal, Lane, LaneId,
    ScheduleCounts, ScheduleFilter, SchedulePage, Tally,
};
use faena_wire::metrics::{
    JobMetrics, MetricsOverview, QueueMetrics, RecentJobs, ScheduleMetrics, TaskMetrics, UnservedType, WorkerMetrics,
};

use crate::{
    Api, ApiResult, access,
    metrics::jobs_by_state,
    request::{UNKNOWN_PARAMETER, read_query},
};

/// Maximum number of types without a worker that a response contains.
const MAX_UNSERVED_TYPES: usize = 100;

pub async fn overview(State(api): State<Api>, RawQuery(query): RawQuery) -> ApiResult<Json<MetricsOverview>> {
    reject_parameters(query.as_deref())?;
    let (now, figures) = (Timestamp::now(), Figures::read(&api).await?);
    let is_restricted = access::queues()?.is_some();
    Ok(Json(MetricsOverview {
        queues: figures.queues(),
        workers: if is_restricted { None } else { Some(figures.workers(&api).await?) },
        jobs: figures.jobs(&api, now).await?,
        schedules: schedule_metrics(&api).await?,
        tasks: if is_restricted { None } else { Some(task_metrics(&api).await?) },
        uptime: u64::try_from(now.ms_since(api.engine.started_at) / 1_000).unwrap_or(0),
    }))
}

pub async fn queues(State(api): State<Api>, RawQuery(query): RawQuery) -> ApiResult<Json<QueueMetrics>> {
    reject_parameters(query.as_deref())?;
    Ok(Json(Figures::read(&api).await?.queues()))
}

pub async fn workers(State(api): State<Api>, RawQuery(query): RawQuery) -> ApiResult<Json<WorkerMetrics>> {
    reject_parameters(query.as_deref())?;
    Ok(Json(Figures::read(&api).await?.workers(&api).await?))
}

pub async fn jobs(State(api): State<Api>, RawQuery(query): RawQuery) -> ApiResult<Json<JobMetrics>> {
    reject_parameters(query.as_deref())?;
    Ok(Json(Figures::read(&api).await?.jobs(&api, Timestamp::now()).await?))
}

pub async fn schedules(State(api): State<Api>, RawQuery(query): RawQuery) -> ApiResult<Json<ScheduleMetrics>> {
    reject_parameters(query.as_deref())?;
    Ok(Json(schedule_metrics(&api).await?))
}

fn reject_parameters(query: Option<&str>) -> ApiResult<()> {
    read_query(query, &[], |_, _| Err(UNKNOWN_PARAMETER.into()))
}

/// Counters of the lanes that the caller may see.
struct Figures {
    counts: Counts,
    in_flight: Vec<InFlightCount>,
    lanes: Vec<Lane>,
}

impl Figures {
    async fn read(api: &Api) -> ApiResult<Figures> {
        let store = &api.engine.store;
        let lanes = store.lanes().await?.into_iter().filter(|lane| access::includes_queue(&lane.queue)).collect();
        Ok(Figures { counts: store.counts().await?, in_flight: store.in_flight_counts().await?, lanes })
    }

    fn count(&self, tally: Tally) -> u64 {
        let all = self.lanes.iter().filter_map(|lane| self.counts.by_lane.get(&(lane.id, tally)));
        positive(all.sum())
    }

    fn so_far(&self, total: JobTotal) -> u64 {
        positive(self.lanes.iter().map(|lane| self.counts.so_far(lane.id, total)).sum())
    }

    fn queues(&self) -> QueueMetrics {
        QueueMetrics {
            priority: self.count(Tally::Queued),
            delayed: self.count(Tally::Pending) + self.count(Tally::Retrying),
            processing: self.count(Tally::InFlight),
            dlq: self.count(Tally::Failed),
        }
    }

    async fn workers(&self, api: &Api) -> ApiResult<WorkerMetrics> {
        let by_state = api.engine.store.worker_counts().await?;
        let count = |states: &[WorkerState]| states.iter().filter_map(|state| by_state.get(state)).sum();
        Ok(WorkerMetrics {
            total: count(&WorkerState::ALL),
            active: count(&[WorkerState::Busy, WorkerState::Draining]),
            idle: count(&[WorkerState::Ready]),
            stopped: count(&[WorkerState::Terminating, WorkerState::Terminated]),
            total_processed: self.so_far(JobTotal::Completed),
            total_failed: self.so_far(JobTotal::RunFailed),
        })
    }

    async fn jobs(&self, api: &Api, now: Timestamp) -> ApiResult<JobMetrics> {
        let lanes: HashSet<LaneId> = self.lanes.iter().map(|lane| lane.id).collect();
        let by_state = jobs_by_state(&self.counts, &self.in_flight, |lane| lanes.contains(&lane));
        let by_status: BTreeMap<JobState, u64> =
            by_state.into_iter().map(|(state, count)| (state, positive(count))).collect();
        Ok(JobMetrics {
            total: by_status.values().sum(),
            by_status,
            last24h: recent_jobs(api, now).await?,
            without_worker: self.without_worker(api).await?,
        })
    }

    /// Returns the types with queued jobs that no live worker on any node can run.
    async fn without_worker(&self, api: &Api) -> ApiResult<Vec<UnservedType>> {
        let queued = |lane: &Lane| positive(self.counts.by_lane.get(&(lane.id, Tally::Queued)).copied().unwrap_or(0));
        let lanes: Vec<(&Lane, u64)> =
            self.lanes.iter().map(|lane| (lane, queued(lane))).filter(|(_, n)| *n > 0).collect();
        if lanes.is_empty() {
            return Ok(Vec::new());
        }
        let capabilities = api.engine.store.worker_capabilities().await?;
        let mut jobs: BTreeMap<(&str, &str), u64> = BTreeMap::new();
        for (lane, queued) in lanes {
            if !capabilities.iter().any(|worker| worker.covers(&lane.queue, &lane.kind)) {
                *jobs.entry((&lane.kind, &lane.queue)).or_default() += queued;
            }
        }
        let unserved = |((kind, queue), jobs): ((&str, &str), u64)| UnservedType {
            kind: kind.to_owned(),
            queue: queue.to_owned(),
            jobs,
        };
        let mut types: Vec<UnservedType> = jobs.into_iter().map(unserved).collect();
        types.sort_by_key(|unserved| std::cmp::Reverse(unserved.jobs));
        types.truncate(MAX_UNSERVED_TYPES);
        Ok(types)
    }
}

fn positive(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

/// Returns what happened in the current hour and the 23 hours before it.
async fn recent_jobs(api: &Api, now: Timestamp) -> ApiResult<RecentJobs> {
    let period = HistoryPeriod::Hour;
    let from = period.start(now).plus_ms(-23 * period.ms());
    let query = HistoryQuery { period, from, until: now.plus_ms(1), queues: access::queues()?, by_queue: false };
    let mut recent = RecentJobs::default();
    for entry in api.engine.store.history_list(query).await? {
        let count = match entry.measure {
            HistoryMeasure::Total(JobTotal::Created) => &mut recent.created,
            HistoryMeasure::Total(JobTotal::Completed) => &mut recent.completed,
            HistoryMeasure::Total(JobTotal::Failed) => &mut recent.failed,
            _ => continue,
        };
        *count += positive(entry.n);
    }
    Ok(recent)
}

async fn schedule_metrics(api: &Api) -> ApiResult<ScheduleMetrics> {
    let ScheduleCounts { active, inactive, runs, .. } = if access::queues()?.is_some() {
        visible_schedules(api).await?
    } else {
        api.engine.store.schedule_counts().await?
    };
    Ok(ScheduleMetrics { total: active + inactive, enabled: active, disabled: inactive, total_runs: runs })
}

async fn task_metrics(api: &Api) -> ApiResult<TaskMetrics> {
    let store = &api.engine.store;
    let (by_status, figures) = (store.task_counts().await?, store.task_figures().await?);
    Ok(TaskMetrics {
        total: by_status.values().sum(),
        by_status,
        approvals_waiting: figures.approvals,
        oldest_approval_at: figures.oldest_approval_at,
        oldest_in_state_at: figures.states.iter().map(|state| state.since).min(),
        oldest_queued_at: figures.queued.iter().map(|queued| queued.since).min(),
        next_timer_at: figures.next_at,
        deadlines_missed: store.task_measures().deadlines_missed,
    })
}

/// Counts the schedules of the caller's queues. Reads at most `COUNT_LIMIT` schedules.
async fn visible_schedules(api: &Api) -> ApiResult<ScheduleCounts> {
    let page = SchedulePage { offset: 0, limit: COUNT_LIMIT };
    let (all, _) = api.engine.store.schedule_list(ScheduleFilter::default(), page).await?;
    let mut counts = ScheduleCounts::default();
    for schedule in all.iter().filter(|schedule| access::includes_queue(&schedule.spec.job.queue)) {
        if schedule.is_active {
            counts.active += 1
        } else {
            counts.inactive += 1
        }
        counts.runs += schedule.runs;
    }
    Ok(counts)
}
