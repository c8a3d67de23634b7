//! The reports that the server has not acknowledged yet.
//!
//! A report stays here from its creation until its acknowledgement, so that it can be sent again over the next connection. The
//! server counts a repeated report once; a report that is not kept would be lost with its connection.

use std::collections::HashMap;

use tokio_tungstenite::tungstenite::Utf8Bytes;

use crate::{
    JobId, RunNumber,
    frames::{ReportKind, RunKey},
};

/// A report, and the `W` that waits for its acknowledgement.
pub(crate) struct Report<W> {
    pub run: RunNumber,
    pub kind: ReportKind,
    pub waiter: Option<W>,
    frame: Utf8Bytes,
    sequence: u64,
}

/// Reports without an acknowledgement. Bounded by the concurrency of the worker and the steps its handlers wait for.
pub(crate) struct PendingReports<W> {
    /// By job and not by run, because an acknowledgement may leave out the run. A job nearly always has one report.
    by_job: HashMap<JobId, Vec<Report<W>>>,
    next_sequence: u64,
}

impl<W> PendingReports<W> {
    pub fn new() -> PendingReports<W> {
        PendingReports { by_job: HashMap::new(), next_sequence: 0 }
    }

    pub fn add(&mut self, key: RunKey, kind: ReportKind, frame: Utf8Bytes, waiter: Option<W>) {
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        self.by_job.entry(key.job).or_default().push(Report { run: key.run, kind, waiter, frame, sequence });
    }

    /// Removes the oldest report that this acknowledgement matches.
    ///
    /// The server acknowledges the steps of one job in the order they were sent, because the frame does not name the step.
    pub fn acknowledge(&mut self, job: JobId, run: Option<RunNumber>, kind: Option<ReportKind>) -> Option<Report<W>> {
        let reports = self.by_job.get_mut(&job)?;
        let matches =
            |report: &Report<W>| run.is_none_or(|run| run == report.run) && kind.is_none_or(|kind| kind == report.kind);
        let report = reports.iter().position(matches).map(|index| reports.remove(index));
        if reports.is_empty() {
            self.by_job.remove(&job);
        }
        report
    }

    /// Removes the steps of a run that is released. Its last report stays.
    pub fn remove_steps(&mut self, key: RunKey) {
        if let Some(reports) = self.by_job.get_mut(&key.job) {
            reports.retain(|report| report.run != key.run || report.kind.ends_the_run());
            if reports.is_empty() {
                self.by_job.remove(&key.job);
            }
        }
    }

    /// Returns the frames to send again, in the order they were created.
    pub fn frames(&self) -> Vec<Utf8Bytes> {
        let mut reports: Vec<&Report<W>> = self.by_job.values().flatten().collect();
        reports.sort_unstable_by_key(|report| report.sequence);
        reports.into_iter().map(|report| report.frame.clone()).collect()
    }

    /// Returns the finished runs whose end is not acknowledged: the server still counts them as running here.
    pub fn finished_runs(&self) -> impl Iterator<Item = RunKey> + '_ {
        self.by_job.iter().flat_map(|(job, reports)| {
            let last = reports.iter().filter(|report| report.kind.ends_the_run());
            last.map(|report| RunKey { job: *job, run: report.run })
        })
    }

    pub fn contains_end_of(&self, key: RunKey) -> bool {
        let reports = self.by_job.get(&key.job);
        reports.is_some_and(|list| list.iter().any(|report| report.run == key.run && report.kind.ends_the_run()))
    }

    pub fn is_empty(&self) -> bool {
        self.by_job.is_empty()
    }

    pub fn len(&self) -> usize {
        self.by_job.values().map(Vec::len).sum()
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    fn key(run: i64) -> RunKey {
        RunKey { job: Uuid::now_v7().into(), run: run.into() }
    }

    fn frames(reports: &PendingReports<()>) -> Vec<String> {
        reports.frames().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn reports_without_an_acknowledgement_are_sent_again_in_order() {
        let mut reports = PendingReports::<()>::new();
        let (a, b) = (key(1), key(2));
        reports.add(a, ReportKind::Step, "a1".into(), None);
        reports.add(b, ReportKind::Complete, "b".into(), None);
        reports.add(a, ReportKind::Step, "a2".into(), None);
        reports.add(a, ReportKind::Fail, "a3".into(), None);
        assert_eq!(frames(&reports), ["a1", "b", "a2", "a3"]);
        assert!(reports.acknowledge(a.job, Some(a.run), Some(ReportKind::Step)).is_some());
        assert!(reports.acknowledge(b.job, None, None).is_some(), "run and kind may be left out");
        assert_eq!(frames(&reports), ["a2", "a3"]);
        assert_eq!(reports.len(), 2);
    }

    #[test]
    fn an_acknowledgement_removes_one_report_and_a_second_one_nothing() {
        let mut reports = PendingReports::<()>::new();
        let a = key(7);
        reports.add(a, ReportKind::Complete, "a".into(), None);
        let mut acknowledge = |run: i64, kind| reports.acknowledge(a.job, Some(run.into()), Some(kind)).is_some();
        assert!(!acknowledge(6, ReportKind::Complete), "of another run");
        assert!(!acknowledge(7, ReportKind::Fail), "of another report");
        assert!(!acknowledge(7, ReportKind::Unknown), "of a report that a newer server knows");
        assert!(acknowledge(7, ReportKind::Complete));
        assert!(!acknowledge(7, ReportKind::Complete));
        assert!(reports.is_empty());
    }

    #[test]
    fn a_run_whose_end_is_not_acknowledged_still_counts() {
        let mut reports = PendingReports::<()>::new();
        let (a, b) = (key(1), key(2));
        reports.add(a, ReportKind::Complete, "a".into(), None);
        reports.add(b, ReportKind::Step, "b".into(), None);
        assert_eq!(reports.finished_runs().collect::<Vec<_>>(), [a]);
        assert!(reports.contains_end_of(a) && !reports.contains_end_of(b));
    }

    #[test]
    fn the_steps_of_a_released_run_are_removed_and_its_end_is_kept() {
        let mut reports = PendingReports::<()>::new();
        let a = key(1);
        reports.add(a, ReportKind::Step, "step".into(), None);
        reports.add(a, ReportKind::Release, "release".into(), None);
        reports.remove_steps(a);
        assert_eq!(frames(&reports), ["release"]);
    }
}
