//! Tells whoever watches, in this process, what happens to jobs. What was missed is read from the store.

use faena_domain::{Event, EventKind, JobId, JobState, Progress, Run, Timestamp};
use tokio::sync::broadcast;

#[derive(Clone)]
pub struct Bus(broadcast::Sender<Event>);

impl Default for Bus {
    fn default() -> Self {
        Bus(broadcast::channel(1_024).0)
    }
}

impl Bus {
    pub fn subscribe(&self) -> broadcast::Receiver<Event> {
        self.0.subscribe()
    }

    /// Nobody watching costs nothing.
    pub fn changed(&self, job_id: JobId, status: JobState, run: Option<Run>, at: Timestamp) {
        if self.0.receiver_count() > 0 {
            let _ = self.0.send(Event { kind: EventKind::of_state(status), job_id, at, status, run, progress: None });
        }
    }

    pub fn progress(&self, job_id: JobId, run: Run, progress: Progress, at: Timestamp) {
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
