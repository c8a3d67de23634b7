//! Settings of queues and limits, and the token bucket behind rate limits.

use std::{collections::BTreeMap, fmt};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{ClaimOrder, FieldError, Timestamp, parse_duration};

/// Jobs or tasks that a limit applies to.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Scope {
    System,
    Queue(String),
    Type(String),
    /// A `concurrencyKey`; with a trailing `*`, every key with this prefix, each with a limit of its own.
    Key(String),
    /// Running tasks of a machine.
    Machine(String),
}

impl Scope {
    /// Returns the number of the scope's kind and its name, as the database stores them.
    pub fn parts(&self) -> (i16, &str) {
        match self {
            Scope::System => (0, ""),
            Scope::Queue(name) => (1, name),
            Scope::Type(name) => (2, name),
            Scope::Key(name) => (3, name),
            Scope::Machine(name) => (4, name),
        }
    }

    pub fn from_parts(scope: i16, name: String) -> Option<Scope> {
        match scope {
            0 => Some(Scope::System),
            1 => Some(Scope::Queue(name)),
            2 => Some(Scope::Type(name)),
            3 => Some(Scope::Key(name)),
            4 => Some(Scope::Machine(name)),
            _ => None,
        }
    }

    /// Returns `system`, `queue`, `type`, `key` or `machine`.
    pub fn kind(&self) -> &'static str {
        match self {
            Scope::System => "system",
            Scope::Queue(_) => "queue",
            Scope::Type(_) => "type",
            Scope::Key(_) => "key",
            Scope::Machine(_) => "machine",
        }
    }
}

/// Writes `the whole system`, `queue mail` or `concurrencyKey tenant-7`, for messages.
impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scope::System => f.write_str("the whole system"),
            Scope::Queue(name) => write!(f, "queue {name}"),
            Scope::Type(name) => write!(f, "type {name}"),
            Scope::Key(name) => write!(f, "concurrencyKey {name}"),
            Scope::Machine(name) => write!(f, "machine {name}"),
        }
    }
}

/// Rate limit as a token bucket: at most `count` starts in a burst, and `count` more in each period.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Rate {
    pub count: u32,
    pub period_ms: u64,
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let starts = if self.count == 1 { "start" } else { "starts" };
        let units = [(86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1_000, "s")];
        let unit = units.into_iter().find(|(ms, _)| self.period_ms > 0 && self.period_ms.is_multiple_of(*ms));
        let (ms, unit) = unit.unwrap_or((1, "ms"));
        write!(f, "{} {starts} per {} {unit}", self.count, self.period_ms / ms)
    }
}

/// State of a token bucket: the tokens that were left at the time `at`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Bucket {
    pub tokens: f64,
    pub at: Timestamp,
}

/// Upper bound of the rounding error of many refills.
const ROUNDING_ERROR: f64 = 1e-6;

impl Rate {
    /// Parses a count and a period: `100/1m`.
    pub fn parse(text: &str) -> Option<Rate> {
        let (count, period) = text.split_once('/')?;
        let period_ms = u64::try_from(parse_duration(period)?.as_millis()).ok()?;
        Some(Rate { count: count.trim().parse().ok()?, period_ms })
    }

    /// Returns a full bucket.
    pub fn full(&self, now: Timestamp) -> Bucket {
        Bucket { tokens: f64::from(self.count), at: now }
    }

    /// Returns the bucket at `now`. A clock that goes back neither adds nor removes tokens.
    pub fn refilled(&self, bucket: Option<Bucket>, now: Timestamp) -> Bucket {
        let Some(bucket) = bucket else { return self.full(now) };
        let passed_ms = now.ms_since(bucket.at).max(0);
        let gained = f64::from(self.count) * passed_ms as f64 / self.period_ms.max(1) as f64;
        Bucket { tokens: (bucket.tokens + gained).min(f64::from(self.count)), at: bucket.at.max(now) }
    }

    /// Returns when `bucket` will have at least one whole token.
    pub fn next_at(&self, bucket: Bucket) -> Timestamp {
        let missing = (1.0 - ROUNDING_ERROR - bucket.tokens).max(0.0);
        let ms = (missing * self.period_ms as f64 / f64::from(self.count.max(1))).ceil();
        bucket.at.plus_ms(ms as i64)
    }
}

impl Bucket {
    /// Returns the number of jobs that may start now.
    ///
    /// A number slightly below an integer counts as that integer, because the sum of many refills is not exact.
    pub fn available(&self) -> usize {
        (self.tokens + ROUNDING_ERROR).floor().max(0.0) as usize
    }

    /// Removes `taken` tokens.
    pub fn without(self, taken: usize) -> Bucket {
        Bucket { tokens: (self.tokens - taken as f64).max(0.0), at: self.at }
    }
}

/// A concurrency limit, a rate limit, or both.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Limit {
    /// Largest number of jobs in flight, or of running tasks.
    pub concurrency: Option<u32>,
    pub rate: Option<Rate>,
}

pub const MAX_CONCURRENCY: u64 = 1_000_000;
pub const MAX_RATE: u64 = 10_000_000;
pub const MAX_PERIOD_MS: u64 = 31 * 24 * 3_600_000;

impl Limit {
    pub fn is_none(&self) -> bool {
        self.concurrency.is_none() && self.rate.is_none()
    }

    /// Adds an error for every invalid field.
    pub fn check(&self, errors: &mut Vec<FieldError>) {
        let mut range = |path: &str, value: u64, max: u64, hint: &str| {
            if !(1..=max).contains(&value) {
                errors.push(FieldError::new(path, format!("must be between 1 and {max}, got {value}{hint}")));
            }
        };
        if let Some(n) = self.concurrency {
            let hint = if n == 0 { "; to stop a queue, pause it" } else { "" };
            range("concurrency", u64::from(n), MAX_CONCURRENCY, hint);
        }
        if let Some(rate) = self.rate {
            range("rate.count", u64::from(rate.count), MAX_RATE, "");
            range("rate.periodMs", rate.period_ms, MAX_PERIOD_MS, "");
        }
    }
}

/// Order among the concurrency keys of a queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Fairness {
    /// The job that has waited longest is claimed first, regardless of its key.
    #[default]
    None,
    /// Round robin over the keys, however many jobs each has. Jobs without a key share one turn.
    Key,
}

/// Pause of a queue: since when, by whom and why.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Pause {
    pub at: Timestamp,
    pub by: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Settings of one queue. `None` stands for the default.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct QueueRule {
    pub strict: Option<bool>,
    pub fairness: Option<Fairness>,
    pub paused: Option<Pause>,
}

/// Settings of all queues and limits.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Rules {
    /// Limits of jobs.
    pub limits: BTreeMap<Scope, Limit>,
    pub queues: BTreeMap<String, QueueRule>,
    /// Limits of running tasks, by machine. Kept separately, because claims of jobs need not read them.
    pub machines: BTreeMap<String, u32>,
}

impl Rules {
    pub fn claim_order(&self, queue: &str) -> ClaimOrder {
        match self.queues.get(queue).and_then(|rule| rule.strict) {
            Some(true) => ClaimOrder::Strict,
            _ => ClaimOrder::Aging,
        }
    }

    pub fn fairness(&self, queue: &str) -> Fairness {
        self.queues.get(queue).and_then(|rule| rule.fairness).unwrap_or_default()
    }

    pub fn pause(&self, queue: &str) -> Option<&Pause> {
        self.queues.get(queue)?.paused.as_ref()
    }

    /// Returns the limits that apply to every job of this queue and type: of the system, the queue and the type.
    pub fn lane_limits(&self, queue: &str, kind: &str) -> Vec<(Scope, Limit)> {
        if self.limits.is_empty() {
            return Vec::new();
        }
        [Scope::System, Scope::Queue(queue.into()), Scope::Type(kind.into())]
            .into_iter()
            .filter_map(|scope| self.limits.get(&scope).map(|limit| (scope, *limit)))
            .collect()
    }

    /// Returns the limit of one key: its own, or that of the longest matching prefix.
    pub fn key_limit(&self, key: &str) -> Option<Limit> {
        if let Some(limit) = self.limits.get(&Scope::Key(key.into())) {
            return Some(*limit);
        }
        self.limits
            .iter()
            .filter_map(|(scope, limit)| match scope {
                Scope::Key(name) => {
                    name.strip_suffix('*').filter(|prefix| key.starts_with(prefix)).map(|prefix| (prefix.len(), limit))
                }
                _ => None,
            })
            .max_by_key(|(length, _)| *length)
            .map(|(_, limit)| *limit)
    }

    /// Returns whether a concurrency limit applies to this queue and type, so that a finished job may allow another to
    /// start.
    pub fn has_concurrency_limit(&self, queue: &str, kind: &str) -> bool {
        self.lane_limits(queue, kind).iter().any(|(_, limit)| limit.concurrency.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: i64) -> Timestamp {
        Timestamp::from_ms(ms)
    }

    #[test]
    fn a_bucket_allows_a_burst_of_its_count_and_refills_continuously() {
        let rate = Rate { count: 10, period_ms: 1_000 };
        let full = rate.refilled(None, at(0));
        assert_eq!(full.available(), 10);
        let empty = full.without(10);
        assert_eq!(rate.next_at(empty), at(100));
        assert_eq!(rate.refilled(Some(empty), at(99)).available(), 0);
        assert_eq!(rate.refilled(Some(empty), at(100)).available(), 1);
        assert_eq!(rate.refilled(Some(empty), at(60_000)).available(), 10, "never more than its count");
    }

    #[test]
    fn a_rate_is_shown_with_the_largest_unit_that_divides_its_period() {
        let shown = |count, period_ms| Rate { count, period_ms }.to_string();
        assert_eq!(shown(30, 10_000), "30 starts per 10 s");
        assert_eq!(shown(1, 1_500), "1 start per 1500 ms");
        assert_eq!(shown(100, 60_000), "100 starts per 1 min");
        assert_eq!(shown(5, 3_600_000), "5 starts per 1 h");
        assert_eq!(shown(5, 2 * 86_400_000), "5 starts per 2 d");
    }

    #[test]
    fn a_rate_is_parsed_from_a_count_and_a_period() {
        assert_eq!(Rate::parse("100/1m"), Some(Rate { count: 100, period_ms: 60_000 }));
        assert_eq!(Rate::parse("5 / 500ms"), Some(Rate { count: 5, period_ms: 500 }));
        for wrong in ["", "100", "100/m", "/1m", "-1/1m", "1/1", "1/1w", "1/99999999999999999999d"] {
            assert_eq!(Rate::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn many_small_refills_add_up_exactly() {
        let rate = Rate { count: 3, period_ms: 1_000 };
        let mut bucket = rate.full(at(0)).without(3);
        let mut started = 0;
        for ms in 1..=10_000 {
            bucket = rate.refilled(Some(bucket), at(ms));
            let whole = bucket.available();
            bucket = bucket.without(whole);
            started += whole;
        }
        assert_eq!(started, 30);
    }

    #[test]
    fn a_clock_that_goes_back_adds_no_tokens() {
        let rate = Rate { count: 1, period_ms: 1_000 };
        let bucket = rate.full(at(5_000)).without(1);
        let back = rate.refilled(Some(bucket), at(1_000));
        assert_eq!((back.available(), back.at), (0, at(5_000)));
        assert_eq!(rate.refilled(Some(back), at(6_000)).available(), 1);
    }

    #[test]
    fn the_limit_of_a_key_takes_precedence_over_that_of_the_longest_prefix() {
        let limit = |n| Limit { concurrency: Some(n), rate: None };
        let mut rules = Rules::default();
        for (name, n) in [("*", 1), ("tenant-*", 2), ("tenant-7", 3)] {
            rules.limits.insert(Scope::Key(name.into()), limit(n));
        }
        let of = |key: &str| rules.key_limit(key).and_then(|limit| limit.concurrency);
        assert_eq!((of("x"), of("tenant-8"), of("tenant-7")), (Some(1), Some(2), Some(3)));
        assert_eq!(Rules::default().key_limit("x"), None);
    }

    #[test]
    fn a_limit_of_zero_or_beyond_the_maximum_is_rejected() {
        let paths = |limit: Limit| {
            let mut errors = Vec::new();
            limit.check(&mut errors);
            errors.into_iter().map(|error| error.path).collect::<Vec<_>>()
        };
        assert_eq!(paths(Limit { concurrency: Some(0), rate: None }), ["concurrency"]);
        assert_eq!(paths(Limit { concurrency: Some(2_000_000), rate: None }), ["concurrency"]);
        let rate = |count, period_ms| Limit { concurrency: None, rate: Some(Rate { count, period_ms }) };
        assert_eq!(paths(rate(0, 0)), ["rate.count", "rate.periodMs"]);
        assert!(paths(rate(100, 60_000)).is_empty());
    }
}
