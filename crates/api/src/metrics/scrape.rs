//! The samples of one scrape, and their text.

use std::{
    collections::{HashMap, VecDeque},
    fmt,
    sync::atomic::{AtomicI64, AtomicU64},
};

use faena_engine::measure::{Exemplar, Histogram};
use faena_store::{HISTORY_BOUNDS_MS, RunTrace};
use prometheus_client::{
    encoding::{EncodeMetric, MetricEncoder, NoLabelSet, text::encode},
    metrics::{
        MetricType,
        counter::{ConstCounter, Counter},
        family::Family,
        gauge::Gauge,
    },
    registry::Registry,
};

use super::table::{METRICS, Metric};

type Labels = Vec<(&'static str, String)>;

/// Metrics of one scrape.
#[derive(Default)]
pub struct Scrape {
    registry: Registry,
    /// The exemplars of the buckets of each histogram, in the order in which the buckets are written.
    exemplars: HashMap<&'static str, VecDeque<Option<Exemplar>>>,
}

impl Scrape {
    /// Adds a gauge. A sample consists of the label values, in the order of `metric.labels`, and the number.
    ///
    /// A metric without labels has exactly one sample.
    pub fn gauge<const N: usize>(&mut self, metric: &Metric, samples: impl IntoIterator<Item = ([String; N], i64)>) {
        let family = Family::<Labels, Gauge<i64, AtomicI64>>::default();
        for (values, number) in samples {
            if N == 0 {
                let gauge = Gauge::<i64, AtomicI64>::default();
                gauge.set(number);
                return self.registry.register(metric.name, metric.help, gauge);
            }
            family.get_or_create(&labels(metric, values)).set(number);
        }
        self.registry.register(metric.name, metric.help, family);
    }

    /// Adds a gauge without labels whose value is not a whole number.
    pub fn decimal(&mut self, metric: &Metric, number: f64) {
        let gauge = Gauge::<f64, AtomicU64>::default();
        gauge.set(number);
        self.registry.register(metric.name, metric.help, gauge);
    }

    /// Adds a counter. Its samples have the same form as those of a gauge; equal labels are added up.
    pub fn counter<const N: usize>(&mut self, metric: &Metric, samples: impl IntoIterator<Item = ([String; N], u64)>) {
        let family = Family::<Labels, Counter>::default();
        for (values, number) in samples {
            if N == 0 {
                return self.registry.register(metric.name, metric.help, ConstCounter::new(number));
            }
            family.get_or_create(&labels(metric, values)).inc_by(number);
        }
        self.registry.register(metric.name, metric.help, family);
    }

    /// Adds a histogram of times.
    pub fn histogram<const N: usize>(
        &mut self,
        metric: &Metric,
        samples: impl IntoIterator<Item = ([String; N], Histogram)>,
    ) {
        let samples: Vec<(Labels, Histogram)> =
            samples.into_iter().map(|(values, histogram)| (labels(metric, values), histogram)).collect();
        let exemplars = samples
            .iter()
            .flat_map(|(_, histogram)| (0..histogram.counts.len()).map(|bucket| histogram.exemplar(bucket).cloned()));
        self.exemplars.insert(metric.name, exemplars.collect());
        self.registry.register(metric.name, metric.help, Times(samples));
    }

    /// Returns the samples as OpenMetrics, with exemplars.
    pub fn open_metrics(mut self) -> String {
        let encoded = self.encoded();
        let mut text = String::with_capacity(encoded.len());
        for line in encoded.lines() {
            text.push_str(line);
            // The library writes exemplars only for histograms that it fills itself, so they are added to its text here.
            let exemplars = line.split_once("_bucket{").and_then(|(name, _)| self.exemplars.get_mut(name));
            if let Some(exemplar) = exemplars.and_then(VecDeque::pop_front).flatten() {
                text.push_str(&exemplar_text(&exemplar));
            }
            text.push('\n');
        }
        text
    }

    /// Returns the samples in the older text format, in which the name of a counter ends with `_total` in its header too.
    pub fn plain_text(self) -> String {
        let encoded = self.encoded();
        let mut text = String::with_capacity(encoded.len() + 64 * METRICS.len());
        for line in encoded.lines().filter(|line| *line != "# EOF") {
            let mut words = line.splitn(4, ' ');
            let header = match (words.next(), words.next(), words.next(), words.next()) {
                (Some("#"), Some(word), Some(name), Some(rest)) => Some((word, name, rest)),
                _ => None,
            };
            let metric = header.and_then(|(_, name, _)| METRICS.iter().find(|metric| metric.name == name));
            match (header, metric) {
                (Some((word, _, rest)), Some(metric)) => {
                    text.push_str(&format!("# {word} {} {rest}\n", metric.exposed_name()));
                }
                _ => {
                    text.push_str(line);
                    text.push('\n');
                }
            }
        }
        text
    }

    fn encoded(&self) -> String {
        let mut text = String::new();
        encode(&mut text, &self.registry).expect("writing to a String cannot fail");
        text
    }
}

fn labels<const N: usize>(metric: &Metric, values: [String; N]) -> Labels {
    debug_assert_eq!(metric.labels.len(), N, "{}", metric.name);
    metric.labels.iter().copied().zip(values).collect()
}

/// Histograms of times in seconds, by labels.
#[derive(Debug)]
struct Times(Vec<(Labels, Histogram)>);

impl EncodeMetric for Times {
    fn encode(&self, mut encoder: MetricEncoder) -> Result<(), fmt::Error> {
        for (labels, histogram) in &self.0 {
            let bounds = HISTORY_BOUNDS_MS.iter().map(|ms| *ms as f64 / 1_000.0).chain([f64::INFINITY]);
            let buckets: Vec<(f64, u64)> = bounds.zip(histogram.counts).collect();
            let (sum, count) = (histogram.sum_ms as f64 / 1_000.0, histogram.counts.iter().sum());
            if labels.is_empty() {
                encoder.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)?;
            } else {
                encoder.encode_family(labels)?.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)?;
            }
        }
        Ok(())
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

fn exemplar_text(exemplar: &Exemplar) -> String {
    let (name, id) = match &exemplar.trace {
        RunTrace::Trace(id) => ("trace_id", id),
        RunTrace::Correlation(id) => ("correlation_id", id),
    };
    let id = id.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    let at = exemplar.at.as_ms() as f64 / 1_000.0;
    format!(" # {{{name}=\"{id}\"}} {:?} {at:.3}", exemplar.ms as f64 / 1_000.0)
}
