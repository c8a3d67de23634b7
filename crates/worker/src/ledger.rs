//! Which reports the server has not acknowledged yet.
//!
//! A report stands here from the moment it is made until its acknowledgement, so that it can be sent again on the next
//! connection. The server counts a repeated report once; a report that stood nowhere would be lost with its connection.

use std::collections::HashMap;

use faena_domain::{JobId, Run};
use tokio_tungstenite::tungstenite::Utf8Bytes;

/// One run of one job.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Key {
    pub job: JobId,
    pub run: Run,
}

/// What a report is about. The names are those of the frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Of {
    Step,
    Complete,
    Fail,
    Release,
}

impl Of {
    pub fn as_str(self) -> &'static str {
        match self {
            Of::Step => "step",
            Of::Complete => "complete",
            Of::Fail => "fail",
            Of::Release => "release",
        }
    }

    pub fn ends_the_run(self) -> bool {
        self != Of::Step
    }
}

/// A report, and `W`: whoever waits for its acknowledgement.
pub(crate) struct Report<W> {
    pub run: Run,
    pub of: Of,
    pub waiter: Option<W>,
    text: Utf8Bytes,
    number: u64,
}

/// As many reports as there are jobs in hand, and steps that handlers wait for: bounded by the worker's concurrency.
pub(crate) struct Ledger<W> {
    /// By job and not by run, because an acknowledgement may leave the run out. Nearly always one report.
    by_job: HashMap<JobId, Vec<Report<W>>>,
    next_number: u64,
}

impl<W> Ledger<W> {
    pub fn new() -> Ledger<W> {
        Ledger { by_job: HashMap::new(), next_number: 0 }
    }

    pub fn add(&mut self, key: Key, of: Of, text: Utf8Bytes, waiter: Option<W>) {
        let number = self.next_number;
        self.next_number += 1;
        self.by_job.entry(key.job).or_default().push(Report { run: key.run, of, waiter, text, number });
    }

    /// Takes out the oldest report that this acknowledgement fits. Steps of one job are acknowledged in the order they were
    /// sent, as the frame does not name the step.
    pub fn settle(&mut self, job: JobId, run: Option<Run>, of: Option<&str>) -> Option<Report<W>> {
        let reports = self.by_job.get_mut(&job)?;
        let fits = |report: &Report<W>| {
            run.is_none_or(|run| run == report.run) && of.is_none_or(|of| of == report.of.as_str())
        };
        let report = reports.iter().position(fits).map(|index| reports.remove(index));
        if reports.is_empty() {
            self.by_job.remove(&job);
        }
        report
    }

    /// Takes out everything about one run that does not end it: its steps are of no use any more.
    pub fn drop_steps(&mut self, key: Key) {
        if let Some(reports) = self.by_job.get_mut(&key.job) {
            reports.retain(|report| report.run != key.run || report.of.ends_the_run());
            if reports.is_empty() {
                self.by_job.remove(&key.job);
            }
        }
    }

    /// Everything that must be sent again, in the order it was made.
    pub fn unsettled(&self) -> Vec<Utf8Bytes> {
        let mut reports: Vec<&Report<W>> = self.by_job.values().flatten().collect();
        reports.sort_unstable_by_key(|report| report.number);
        reports.into_iter().map(|report| report.text.clone()).collect()
    }

    /// The runs whose end was told and not acknowledged: they are still in this worker's hands.
    pub fn ended(&self) -> impl Iterator<Item = Key> + '_ {
        self.by_job.iter().flat_map(|(job, reports)| {
            let ends = reports.iter().filter(|report| report.of.ends_the_run());
            ends.map(|report| Key { job: *job, run: report.run })
        })
    }

    pub fn has_end_of(&self, key: Key) -> bool {
        let reports = self.by_job.get(&key.job);
        reports.is_some_and(|list| list.iter().any(|report| report.run == key.run && report.of.ends_the_run()))
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
    use super::*;

    fn key(run: Run) -> Key {
        Key { job: JobId::new(), run }
    }

    fn texts(ledger: &Ledger<()>) -> Vec<String> {
        ledger.unsettled().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn what_is_not_acknowledged_is_sent_again_in_order() {
        let mut ledger = Ledger::<()>::new();
        let (a, b) = (key(1), key(2));
        ledger.add(a, Of::Step, "a1".into(), None);
        ledger.add(b, Of::Complete, "b".into(), None);
        ledger.add(a, Of::Step, "a2".into(), None);
        ledger.add(a, Of::Fail, "a3".into(), None);
        assert_eq!(texts(&ledger), ["a1", "b", "a2", "a3"]);
        assert!(ledger.settle(a.job, Some(1), Some("step")).is_some());
        assert!(ledger.settle(b.job, None, None).is_some(), "an acknowledgement without run and name is taken");
        assert_eq!(texts(&ledger), ["a2", "a3"]);
        assert_eq!(ledger.len(), 2);
    }

    #[test]
    fn an_acknowledgement_settles_one_report_and_a_second_one_none() {
        let mut ledger = Ledger::<()>::new();
        let a = key(7);
        ledger.add(a, Of::Complete, "a".into(), None);
        assert!(ledger.settle(a.job, Some(6), Some("complete")).is_none(), "of another run");
        assert!(ledger.settle(a.job, Some(7), Some("fail")).is_none(), "of another report");
        assert!(ledger.settle(a.job, Some(7), Some("complete")).is_some());
        assert!(ledger.settle(a.job, Some(7), Some("complete")).is_none());
        assert!(ledger.is_empty());
    }

    #[test]
    fn a_run_whose_end_was_not_acknowledged_is_still_held() {
        let mut ledger = Ledger::<()>::new();
        let (a, b) = (key(1), key(2));
        ledger.add(a, Of::Complete, "a".into(), None);
        ledger.add(b, Of::Step, "b".into(), None);
        assert_eq!(ledger.ended().collect::<Vec<_>>(), [a]);
        assert!(ledger.has_end_of(a) && !ledger.has_end_of(b));
    }

    #[test]
    fn steps_of_a_run_that_is_given_back_are_forgotten_and_its_end_is_not() {
        let mut ledger = Ledger::<()>::new();
        let a = key(1);
        ledger.add(a, Of::Step, "step".into(), None);
        ledger.add(a, Of::Release, "release".into(), None);
        ledger.drop_steps(a);
        assert_eq!(texts(&ledger), ["release"]);
    }
}
