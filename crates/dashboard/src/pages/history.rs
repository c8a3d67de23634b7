//! What happened to jobs per minute and hour: charts, rates and times.

use faena_domain::Timestamp;
use serde::Deserialize;

use crate::{
    charts::{self, Point},
    format::Formats,
    markup::Markup,
    texts::Texts,
};

/// Time over which the throughput is averaged.
const AVERAGED_MS: i64 = 5 * 60_000;
/// Shortest time that gives a meaningful average.
const MIN_AVERAGED_MS: i64 = 10_000;

#[derive(Deserialize, Default)]
#[serde(default)]
pub struct History {
    pub history: Vec<Period>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Period {
    pub date: Timestamp,
    #[serde(default)]
    pub total_created: u64,
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
    /// Whether nothing has finished, including the current period.
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

/// How many jobs finish per minute, on average.
pub struct Throughput {
    pub per_minute: f64,
    pub averaged_ms: i64,
}

impl Throughput {
    /// Averages the last five minutes that have ended, or those since the history began. Returns `None` if it began too
    /// recently.
    ///
    /// The history began with the first minute in which something happened, or with the start of the server if that was
    /// earlier: the minutes before are zeros because nothing was counted.
    pub fn of(minutes: &[Period], uptime_ms: i64, now: Timestamp) -> Option<Throughput> {
        let ended = || minutes.iter().filter(|minute| has_ended(minute, charts::Period::Minute, now));
        let is_active = |minute: &&Period| minute.total_created + minute.total_completed + minute.total_failed > 0;
        let started = now.plus_ms(-uptime_ms);
        // The minute in which the server started begins before it.
        let earlier = minutes.iter().find(is_active).filter(|first| has_ended(first, charts::Period::Minute, started));
        let began = earlier.map_or(started, |first| first.date);
        let end = ended().next_back()?.date.plus_ms(charts::Period::Minute.ms());
        let from = end.plus_ms(-AVERAGED_MS);
        let averaged_ms = end.ms_since(began.max(from));
        let finished = ended().filter(|minute| minute.date >= from);
        let finished: u64 = finished.map(|minute| minute.total_completed + minute.total_failed).sum();
        let per_minute = finished as f64 * 60_000.0 / averaged_ms as f64;
        (averaged_ms >= MIN_AVERAGED_MS).then_some(Throughput { per_minute, averaged_ms })
    }

    /// Returns the throughput, and the time over which it is averaged.
    pub fn words(throughput: Option<&Throughput>, t: &Texts, formats: Formats) -> (String, String) {
        match throughput {
            Some(Throughput { per_minute, averaged_ms }) => {
                let averaged = formats.duration(averaged_ms / 1_000 * 1_000);
                (formats.decimal(*per_minute), format!("{} {averaged}", t.average_of))
            }
            None => ("–".to_owned(), t.not_measured_yet.to_owned()),
        }
    }
}

/// Returns the percentiles of the current hour, or of the one before while there are none.
pub fn percentiles(hours: &[Period], pick: fn(&Period) -> Percentiles) -> Percentiles {
    hours.iter().rev().take(2).map(pick).find(|times| times.p95.is_some()).unwrap_or_default()
}

pub fn time(formats: Formats, ms: Option<f64>) -> String {
    ms.map_or("–".to_owned(), |ms| formats.duration(ms as i64))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const MINUTE: i64 = 60_000;
    /// The 20th second of a minute.
    const NOW: Timestamp = Timestamp::from_ms(1_000 * MINUTE + 20_000);

    /// Returns an hour of history. `finished` has the number of each of the last minutes, the current one last.
    fn history(finished: &[u64]) -> Vec<Period> {
        let period = |ago: i64| {
            let index = finished.len().checked_sub(1 + usize::try_from(ago).expect("a minute"));
            let count = index.map_or(0, |index| finished[index]);
            let times = json!({});
            let date = Timestamp::from_ms((1_000 - ago) * MINUTE);
            let period = json!({
                "date": date, "totalCompleted": count, "totalFailed": 0, "failedRuns": 0, "waitTime": times,
                "processingTime": times,
            });
            serde_json::from_value(period).expect("a period")
        };
        (0..60).rev().map(period).collect()
    }

    fn shown(finished: &[u64], uptime_s: i64) -> Option<(f64, i64)> {
        let throughput = Throughput::of(&history(finished), uptime_s * 1_000, NOW)?;
        Some((throughput.per_minute, throughput.averaged_ms / 1_000))
    }

    #[test]
    fn the_throughput_of_a_young_server_is_averaged_over_its_age() {
        assert_eq!(shown(&[30, 30, 30, 30, 30, 7], 3_600), Some((30.0, 300)));
        // It started 30 seconds into a minute, 110 seconds ago.
        assert_eq!(shown(&[15, 30, 7], 110), Some((30.0, 90)));
        assert_eq!(shown(&[10, 7], 50), Some((20.0, 30)));
        assert_eq!((shown(&[7], 20), shown(&[1, 7], 25)), (None, None), "too recent");
    }

    #[test]
    fn a_quiet_time_counts_and_so_does_what_happened_before_a_restart() {
        assert_eq!(shown(&[30, 7], 3_600), Some((6.0, 300)), "the server was idle before");
        assert_eq!(shown(&[30, 30, 30, 30, 30, 30, 7], 25), Some((30.0, 300)), "a restart forgets nothing");
        assert_eq!(shown(&[], 3_600), Some((0.0, 300)));
        assert!(Throughput::of(&[], 3_600_000, NOW).is_none(), "the viewer may not see the history");
    }
}
