//! Progress of a job, from the reports of its worker and from finished steps. A value that neither contains stays
//! absent.
//!
//! The last progress of a job is kept in every later state, until its next run reports something.

use faena_domain::Progress;

/// The stored steps of a job.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Steps {
    pub completed: u32,
    /// The number of steps, as the latest step reported it.
    pub total: Option<u32>,
}

/// Returns the stored form.
pub fn stored(progress: &Progress) -> String {
    serde_json::to_string(progress).expect("progress is JSON")
}

pub fn parse(text: Option<&str>) -> Option<Progress> {
    text.and_then(|text| serde_json::from_str(text).ok())
}

/// Returns the text for the log.
pub fn describe(progress: &Progress) -> String {
    progress.message.clone().or_else(|| progress.percentage.map(|p| format!("{p:.0} %"))).unwrap_or_default()
}

impl Steps {
    /// Returns the progress after a finished step. `total`: as this step reported it; `before`: the progress so far.
    pub fn after_step(self, name: &str, total: Option<u32>, before: Option<Progress>) -> Progress {
        let before = before.unwrap_or_default();
        let total = total.or(before.total_steps).or(self.total);
        Progress {
            current_step: Some(name.to_owned()),
            completed_steps: Some(self.completed),
            total_steps: total,
            percentage: total.and_then(|total| Progress::percentage_of(self.completed, total)).or(before.percentage),
            ..before
        }
    }

    /// Completes the reported progress with the steps.
    pub fn complete(self, reported: &Progress) -> Progress {
        let mut progress = reported.clone();
        if self.completed > 0 {
            progress.completed_steps = progress.completed_steps.or(Some(self.completed));
            progress.total_steps = progress.total_steps.or(self.total);
        }
        progress
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_moves_the_progress_and_keeps_what_was_reported() {
        let reported = Progress { phase: Some("load".into()), percentage: Some(7.0), ..Progress::default() };
        let first = Steps { completed: 1, total: None }.after_step("a", None, Some(reported));
        assert_eq!((first.percentage, first.total_steps), (Some(7.0), None), "the number of steps is unknown");
        let second = Steps { completed: 2, total: Some(4) }.after_step("b", Some(4), Some(first));
        assert_eq!((second.percentage, second.current_step.as_deref()), (Some(50.0), Some("b")));
        assert_eq!(second.phase.as_deref(), Some("load"));
        let third = Steps { completed: 3, total: Some(4) }.after_step("c", None, Some(second));
        assert_eq!((third.completed_steps, third.total_steps, third.percentage), (Some(3), Some(4), Some(75.0)));
    }

    #[test]
    fn reported_progress_wins_over_counted_progress() {
        let reported = Progress { total_steps: Some(9), ..Progress::default() };
        let shown = Steps { completed: 2, total: Some(4) }.complete(&reported);
        assert_eq!((shown.completed_steps, shown.total_steps, shown.percentage), (Some(2), Some(9), None));
        assert_eq!(Steps::default().complete(&reported), reported);
    }

    #[test]
    fn the_log_shows_the_message_or_the_rounded_percentage() {
        let mut progress = Progress { percentage: Some(33.333_333), ..Progress::default() };
        assert_eq!(describe(&progress), "33 %");
        progress.message = Some("a third".into());
        assert_eq!(describe(&progress), "a third");
    }
}
