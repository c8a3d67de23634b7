//! Limits on what is stored about one job, and what is dropped beyond them.
//!
//! A job keeps its first and its newest log entries. The entries between them are dropped, a tenth of the limit at a time, and the first
//! entry after the gap says how many. Steps are results that the next run needs, so none is dropped: further ones are rejected.

use faena_domain::{LogEntry, LogEvent, Run, Timestamp};

/// Limits on what is stored about one job.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StoredJobLimits {
    /// Log entries that workers and callers add. The entries of each run are not counted.
    pub log_entries: usize,
    pub log_bytes: usize,
    pub steps: usize,
    /// Names and results of all steps together.
    pub step_bytes: usize,
}

impl Default for StoredJobLimits {
    fn default() -> Self {
        StoredJobLimits { log_entries: 1_000, log_bytes: 1 << 20, steps: 1_000, step_bytes: 4 << 20 }
    }
}

/// Maximum number of log entries that the view of a job contains: the newest ones.
pub const SHOWN_ENTRIES: usize = 200;

/// Number of runs that ended without finishing their job and that are kept: the newest ones. Retries are bounded by
/// `maxRetries`, but a worker may release a job, and a caller may retry it, as often as they like.
pub const KEPT_ATTEMPTS: i64 = 100;

impl StoredJobLimits {
    /// Returns whether a log of this size must be trimmed.
    pub fn is_exceeded_by(&self, entries: i64, bytes: i64) -> bool {
        exceeds(entries, self.log_entries) || exceeds(bytes, self.log_bytes)
    }

    /// Returns which entries to delete from a log that is too large: from the first to the last of these positions.
    pub fn plan_trim(&self, sizes: &[i64]) -> Option<(usize, usize)> {
        let (max, max_bytes) = (self.log_entries / 10 * 9, self.log_bytes / 10 * 9);
        let mut kept = sizes.len();
        let mut bytes: usize = sizes.iter().map(|size| usize::try_from(*size).unwrap_or(0)).sum();
        let mut head_bytes = 0;
        let head = sizes
            .iter()
            .take((self.log_entries / 10).min(sizes.len().saturating_sub(1)))
            .take_while(|size| {
                head_bytes += usize::try_from(**size).unwrap_or(0);
                head_bytes <= self.log_bytes / 10
            })
            .count();
        let mut end = head;
        while (kept > max.max(1) || bytes > max_bytes) && end + 1 < sizes.len() {
            bytes = bytes.saturating_sub(usize::try_from(sizes[end]).unwrap_or(0));
            kept -= 1;
            end += 1;
        }
        (end > head).then(|| (head, end - 1))
    }

    /// Returns why another step of `new_bytes` is rejected, if the job has `count` others of `bytes`.
    pub fn step_rejection(&self, count: i64, bytes: i64, new_bytes: usize) -> Option<String> {
        if exceeds(count + 1, self.steps) {
            return Some(format!("the job has {count} steps, and at most {} are kept; report fewer steps", self.steps));
        }
        let total = bytes.saturating_add(i64::try_from(new_bytes).unwrap_or(i64::MAX));
        exceeds(total, self.step_bytes).then(|| {
            format!(
                "the steps of the job would take {total} bytes, and at most {} are kept; store large results elsewhere and report their location",
                self.step_bytes
            )
        })
    }
}

fn exceeds(value: i64, limit: usize) -> bool {
    usize::try_from(value).is_ok_and(|value| value > limit)
}

/// A row of `job_log`.
pub struct MessageRow {
    pub run: Option<Run>,
    pub log: String,
    pub dropped: i64,
}

impl MessageRow {
    /// Appends its entries to `log`, after one that says what was dropped before them.
    pub fn read(&self, log: &mut Vec<LogEntry>) {
        let at = log.len();
        LogEntry::read_chunk(&self.log, self.run, log);
        if self.dropped > 0
            && let Some(first) = log.get(at)
        {
            let entry = LogEntry {
                timestamp: first.timestamp,
                event: LogEvent::Dropped,
                details: format!(
                    "{} entries were dropped here; a job keeps its first and its newest entries",
                    self.dropped
                ),
                run: first.run,
            };
            log.insert(at, entry);
        }
    }
}

/// The row of a job in `stale_report`.
pub struct StaleRow {
    pub run: Run,
    pub at: Timestamp,
    pub count: i64,
    pub text: String,
}

impl StaleRow {
    /// Returns one entry for all rejected reports.
    pub fn entry(self) -> LogEntry {
        let details = match self.count {
            1 => self.text,
            count => format!("{count} reports were rejected, the last one: {}", self.text),
        };
        LogEntry { timestamp: self.at, event: LogEvent::StaleReport, details, run: Some(self.run) }
    }
}

/// A position in the log of a job: all entries before `at` were read, and `read` entries with the time `at`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogCursor {
    pub at: Timestamp,
    pub read: usize,
}

impl LogCursor {
    /// Reads the text that its `Display` writes.
    pub fn parse(text: &str) -> Option<LogCursor> {
        let (at, read) = text.split_once('-')?;
        Some(LogCursor { at: Timestamp::from_ms(at.parse().ok()?), read: read.parse().ok()? })
    }
}

impl std::fmt::Display for LogCursor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.at.as_ms(), self.read)
    }
}

/// Part of the log of a job, oldest first.
#[derive(Clone, PartialEq, Debug)]
pub struct LogPage {
    pub entries: Vec<LogEntry>,
    /// Where the next page starts, if there is one.
    pub next: Option<LogCursor>,
}

impl LogPage {
    /// Returns up to `limit` entries of a whole log after a position.
    pub fn of(log: Vec<LogEntry>, after: Option<LogCursor>, limit: usize) -> LogPage {
        let start = after.map_or(0, |cursor| {
            let earlier = log.partition_point(|entry| entry.timestamp < cursor.at);
            let same = log[earlier..].iter().take_while(|entry| entry.timestamp == cursor.at).count();
            earlier + same.min(cursor.read)
        });
        let end = start.saturating_add(limit).min(log.len());
        let next = (end > start && end < log.len()).then(|| {
            let at = log[end - 1].timestamp;
            LogCursor { at, read: log[..end].iter().rev().take_while(|entry| entry.timestamp == at).count() }
        });
        let entries = log.into_iter().skip(start).take(limit).collect();
        LogPage { entries, next }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: StoredJobLimits = StoredJobLimits { log_entries: 20, log_bytes: 2_000, steps: 2, step_bytes: 100 };

    #[test]
    fn a_full_log_loses_a_tenth_of_its_limit_behind_its_first_entries() {
        assert!(LIMITS.is_exceeded_by(21, 0) && LIMITS.is_exceeded_by(1, 2_001) && !LIMITS.is_exceeded_by(20, 2_000));
        assert_eq!(LIMITS.plan_trim(&[10; 21]), Some((2, 4)), "two stay at the front, 18 in all");
        assert_eq!(LIMITS.plan_trim(&[10; 18]), None);
        assert_eq!(LIMITS.plan_trim(&[300; 7]), Some((0, 0)), "an entry at the front may be too large to stay");
        assert_eq!(LIMITS.plan_trim(&[5_000]), None, "the newest entry stays, whatever its size");
    }

    #[test]
    fn steps_are_rejected_by_number_and_by_size() {
        assert_eq!(LIMITS.step_rejection(1, 50, 50), None);
        assert!(LIMITS.step_rejection(2, 0, 1).is_some_and(|reason| reason.contains("at most 2 are kept")));
        assert!(LIMITS.step_rejection(0, 60, 41).is_some_and(|reason| reason.contains("101 bytes")));
    }

    #[test]
    fn pages_of_a_log_meet_without_gap_or_overlap() {
        let entry = |ms: i64| LogEntry {
            timestamp: Timestamp::from_ms(ms),
            event: LogEvent::Message,
            details: String::new(),
            run: None,
        };
        let log: Vec<LogEntry> = [1, 2, 2, 2, 2, 3, 4].map(entry).to_vec();
        let (mut read, mut after, mut pages) = (Vec::new(), None, 0);
        loop {
            let page = LogPage::of(log.clone(), after, 2);
            read.extend(page.entries);
            pages += 1;
            let Some(next) = page.next else { break };
            after = LogCursor::parse(&next.to_string());
        }
        assert_eq!((read, pages), (log, 4));
        assert_eq!(LogCursor::parse("x-1"), None);
    }
}
