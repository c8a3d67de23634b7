//! Announces job changes inside this process. A subscriber that falls behind reads the store instead.

use faena_domain::{Event, EventKind, JobId, JobState, Progress, Run, Timestamp};
use tokio::sync::broadcast;

const CAPACITY: usize = 1_024;

#[derive(Clone)]
pub struct Bus(broadcast::Sender<Event>);

impl Default for Bus {
    fn default() -> Self {
        Bus(broadcast::channel(CAPACITY).0)
    }
}

impl Bus {
    pub fn subscribe(&self) -> broadcast::Receiver<Event> {
        self.0.subscribe()
    }

    /// Announces that a job is in a new state. Costs nothing without subscribers.
    pub(crate) fn changed(&self, job_id: JobId, status: JobState, run: Option<Run>, at: Timestamp) {
        if self.0.receiver_count() > 0 {
            let _ = self.0.send(Event { kind: EventKind::of_state(status), job_id, at, status, run, progress: None });
        }
    }

    /// Announces that a running job reported progress.
    pub(crate) fn progress(&self, job_id: JobId, run: Run, progress: Progress, at: Timestamp) {
        if self.0.receiver_count() > 0 {
            let _ = self.0.send(Event {
                kind: EventKind::JobProgress,
                job_id,
                at,
                status: JobState::Processing,
                run: Some(run),
                progress: Some(progress),
            });
        }
    }
}
