//! What happened to jobs per minute and hour: charts, rates and times.

use faena_domain::Timestamp;
use serde::Deserialize;

use crate::{
    charts::{self, Point},
    format::Formats,
    markup::Markup,
    texts::Texts,
};

/// Minutes that the throughput is the average of. The texts say so too.
const AVERAGED_MINUTES: usize = 5;

#[derive(Deserialize, Default)]
#[serde(default)]
pub struct History {
    pub history: Vec<Period>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Period {
    pub date: Timestamp,
    pub total_completed: u64,
    pub total_failed: u64,
    pub failed_runs: u64,
    pub wait_time: Percentiles,
    pub processing_time: Percentiles,
}

#[derive(Deserialize, Clone, Copy, Default)]
#[serde(default)]
pub struct Percentiles {
    pub p50: Option<f64>,
    pub p95: Option<f64>,
    pub p99: Option<f64>,
}

/// A chart, and the same as text for screen readers.
pub struct Chart {
    pub drawing: Markup,
    pub text: String,
    /// Whether nothing has finished, also in the current period.
    pub is_empty: bool,
    /// Whether nothing had finished when the current period began.
    pub is_flat: bool,
}

impl Chart {
    /// Draws the periods that have ended. The current one would look like a drop.
    pub fn of(t: &Texts, formats: Formats, periods: &[Period], length: charts::Period) -> Chart {
        let ended = periods.iter().filter(|period| has_ended(period, length, formats.now));
        let points: Vec<Point> = ended
            .map(|period| Point { at: period.date, completed: period.total_completed, failed: period.total_failed })
            .collect();
        let sum = |pick: fn(&Period) -> u64| periods.iter().map(pick).sum::<u64>();
        let (completed, failed) = (sum(|period| period.total_completed), sum(|period| period.total_failed));
        Chart {
            drawing: charts::finished(formats, &points, length),
            text: format!("{}: {}, {}: {}", t.completed, formats.count(completed), t.failed, formats.count(failed)),
            is_empty: completed + failed == 0,
            is_flat: points.iter().all(|point| point.completed + point.failed == 0),
        }
    }
}

pub fn has_ended(period: &Period, length: charts::Period, now: Timestamp) -> bool {
    period.date.plus_ms(length.ms()) <= now
}

/// Returns how many jobs finish per minute: the average of the last minutes that have ended.
pub fn finished_per_minute(minutes: &[Period], now: Timestamp) -> f64 {
    let ended = minutes.iter().rev().filter(|minute| has_ended(minute, charts::Period::Minute, now));
    let finished = ended.take(AVERAGED_MINUTES).map(|minute| minute.total_completed + minute.total_failed);
    finished.sum::<u64>() as f64 / AVERAGED_MINUTES as f64
}

/// Returns the percentiles of the current hour, or of the one before while there are none.
pub fn percentiles(hours: &[Period], pick: fn(&Period) -> Percentiles) -> Percentiles {
    hours.iter().rev().take(2).map(pick).find(|times| times.p95.is_some()).unwrap_or_default()
}

pub fn time(formats: Formats, ms: Option<f64>) -> String {
    ms.map_or("–".to_owned(), |ms| formats.duration(ms as i64))
}
