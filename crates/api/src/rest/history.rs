//! `GET /metrics/history` below `/api/v1`: what happened to jobs per minute, hour or day.

use std::collections::BTreeMap;

use axum::{
    Json,
    extract::{RawQuery, State},
};
use faena_domain::{FieldError, Priority, Timestamp};
use faena_store::{HISTORY_BOUNDS_MS, HistoryEntry, HistoryMeasure, HistoryPeriod, HistoryQuery, JobTotal};
use faena_wire::metrics::{HistoryView, MetricsHistory, Percentiles};

use super::list::parse_time;
use crate::{
    Api, ApiResult, access,
    request::{UNKNOWN_PARAMETER, check, read_query},
};

/// Maximum number of periods in one response, without and with `byQueue`.
const MAX_PERIODS: i64 = 1_000;
const MAX_PERIODS_BY_QUEUE: i64 = 60;
/// Number of periods to list if `from` is absent: hours or days, and minutes.
const DEFAULT_PERIODS: i64 = 30;
const DEFAULT_MINUTES: i64 = 60;

/// Parameters of the request.
#[derive(Default)]
struct Parameters {
    period: Option<HistoryPeriod>,
    from: Option<Timestamp>,
    until: Option<Timestamp>,
    queue: Option<String>,
    by_queue: bool,
}

/// Lists minutes, hours or days, oldest first. Without `byQueue`, a period in which nothing happened is listed with zeros.
pub async fn list(State(api): State<Api>, RawQuery(query): RawQuery) -> ApiResult<Json<MetricsHistory>> {
    let parameters = parse(query.as_deref())?;
    let period = parameters.period.unwrap_or(HistoryPeriod::Hour);
    let until = parameters.until.unwrap_or_else(|| Timestamp::now().plus_ms(1));
    let periods = if period == HistoryPeriod::Minute { DEFAULT_MINUTES } else { DEFAULT_PERIODS };
    let from = parameters.from.unwrap_or_else(|| until.plus_ms(-(periods - 1) * period.ms()));
    let from = period.start(from);
    let count = (until.ms_since(from) + period.ms() - 1).div_euclid(period.ms());
    check_range(count, if parameters.by_queue { MAX_PERIODS_BY_QUEUE } else { MAX_PERIODS })?;
    let by_queue = parameters.by_queue;
    let queues = match (parameters.queue, access::queues()?) {
        (Some(queue), _) => {
            access::require_queue(&queue)?;
            Some(vec![queue])
        }
        (None, visible) => visible,
    };
    let entries = api.engine.store.history_list(HistoryQuery { period, from, until, queues, by_queue }).await?;
    let mut periods: BTreeMap<(Timestamp, Option<String>), Sums> = BTreeMap::new();
    if !by_queue {
        periods.extend((0..count).map(|n| ((from.plus_ms(n * period.ms()), None), Sums::default())));
    }
    for entry in entries {
        let queue = by_queue.then(|| entry.queue.clone());
        periods.entry((entry.starts_at, queue)).or_default().add(&entry);
    }
    let history = periods.into_iter().map(|((date, queue), sums)| sums.view(date, queue)).collect();
    let period = match period {
        HistoryPeriod::Minute => "minute",
        HistoryPeriod::Hour => "hour",
        HistoryPeriod::Day => "day",
    };
    Ok(Json(MetricsHistory { period: period.into(), from, until, history }))
}

fn parse(query: Option<&str>) -> ApiResult<Parameters> {
    let mut parameters = Parameters::default();
    read_query(query, &[], |name, value| {
        match name {
            "period" => {
                parameters.period = Some(match value.as_str() {
                    "minute" => HistoryPeriod::Minute,
                    "hour" => HistoryPeriod::Hour,
                    "day" => HistoryPeriod::Day,
                    _ => return Err("must be minute, hour or day".into()),
                });
            }
            "from" => parameters.from = Some(parse_time(&value)?),
            "until" => parameters.until = Some(parse_time(&value)?),
            "queue" => parameters.queue = Some(value),
            "byQueue" => parameters.by_queue = value.parse().map_err(|_| "must be true or false")?,
            _ => return Err(UNKNOWN_PARAMETER.into()),
        }
        Ok(())
    })?;
    Ok(parameters)
}

fn check_range(count: i64, most: i64) -> ApiResult<()> {
    let message = match count {
        ..=0 => "must be before until".to_owned(),
        count if count <= most => return Ok(()),
        _ => format!("must be at most {most} periods before until, is {count}; use a later time or a longer period"),
    };
    check(vec![FieldError::new("from", message)])
}

/// Numbers of one period.
#[derive(Default)]
struct Sums {
    totals: BTreeMap<JobTotal, u64>,
    completed_by_priority: BTreeMap<Priority, u64>,
    wait: Times,
    run: Times,
}

/// Measured times, by bucket.
#[derive(Default)]
struct Times {
    counts: [u64; HISTORY_BOUNDS_MS.len() + 1],
    sum_ms: u64,
}

impl Sums {
    fn add(&mut self, entry: &HistoryEntry) {
        let n = entry.n.unsigned_abs();
        let bucket = usize::try_from(entry.bucket).unwrap_or(0);
        match entry.measure {
            HistoryMeasure::Total(total) => {
                *self.totals.entry(total).or_default() += n;
                let priority = Priority::ALL.into_iter().find(|priority| priority.rank() == entry.bucket);
                if let (JobTotal::Completed, Some(priority)) = (total, priority) {
                    *self.completed_by_priority.entry(priority).or_default() += n;
                }
            }
            HistoryMeasure::Wait => self.wait.add(bucket, n),
            HistoryMeasure::WaitMs => self.wait.sum_ms += n,
            HistoryMeasure::Run => self.run.add(bucket, n),
            HistoryMeasure::RunMs => self.run.sum_ms += n,
        }
    }

    fn view(self, date: Timestamp, queue: Option<String>) -> HistoryView {
        let total = |total| self.totals.get(&total).copied().unwrap_or(0);
        HistoryView {
            date,
            queue,
            total_created: total(JobTotal::Created),
            total_completed: total(JobTotal::Completed),
            total_failed: total(JobTotal::Failed),
            total_cancelled: total(JobTotal::Cancelled),
            total_timed_out: total(JobTotal::TimedOut),
            failed_runs: total(JobTotal::RunFailed),
            avg_processing_time: self.run.average(),
            avg_wait_time: self.wait.average(),
            processing_time: self.run.percentiles(),
            wait_time: self.wait.percentiles(),
            completed_by_priority: self.completed_by_priority,
        }
    }
}

impl Times {
    fn add(&mut self, bucket: usize, n: u64) {
        if let Some(count) = self.counts.get_mut(bucket) {
            *count += n;
        }
    }

    fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    fn average(&self) -> Option<f64> {
        let count = self.count();
        (count > 0).then(|| rounded(self.sum_ms as f64 / count as f64))
    }

    fn percentiles(&self) -> Percentiles {
        Percentiles { p50: self.percentile(0.5), p95: self.percentile(0.95), p99: self.percentile(0.99) }
    }

    /// Estimates a percentile as Prometheus does: times are spread evenly within their bucket. A percentile above
    /// the last bound is returned as that bound.
    fn percentile(&self, part: f64) -> Option<f64> {
        let count = self.count();
        if count == 0 {
            return None;
        }
        let rank = part * count as f64;
        let (mut below, mut lower) = (0.0, 0.0);
        for (bound, n) in HISTORY_BOUNDS_MS.iter().zip(self.counts) {
            let (bound, n) = (*bound as f64, n as f64);
            if n > 0.0 && below + n >= rank {
                return Some(rounded(lower + (bound - lower) * (rank - below) / n));
            }
            (below, lower) = (below + n, bound);
        }
        Some(lower)
    }
}

/// Rounds to a tenth of a millisecond.
fn rounded(ms: f64) -> f64 {
    (ms * 10.0).round() / 10.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(counts: &[(usize, u64)]) -> Times {
        let mut times = Times::default();
        counts.iter().for_each(|(bucket, n)| times.add(*bucket, *n));
        times
    }

    #[test]
    fn percentiles_are_interpolated_between_the_bounds() {
        assert_eq!(times(&[]).percentiles(), Percentiles::default());
        // 100 times between 50 and 100 ms.
        let even = times(&[(6, 100)]).percentiles();
        assert_eq!(even, Percentiles { p50: Some(75.0), p95: Some(97.5), p99: Some(99.5) });
        let mixed = times(&[(0, 50), (9, 50)]).percentiles();
        assert_eq!(mixed, Percentiles { p50: Some(1.0), p95: Some(950.0), p99: Some(990.0) });
        assert_eq!(times(&[(18, 1)]).percentile(0.5), Some(7_200_000.0), "above the last bound");
    }
}
