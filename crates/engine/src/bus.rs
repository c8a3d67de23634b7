//! Tells whoever watches, in this process, what happens to jobs, workers and schedules. What was missed is read from the store.

use faena_domain::{
    Event, EventKind, JobId, JobState, Progress, Run, ScheduleEvent, Timestamp, WorkerEvent, WorkerState,
    schedule::TickRow,
};
use tokio::sync::broadcast;

#[derive(Clone)]
pub struct Bus(broadcast::Sender<Event>, broadcast::Sender<WorkerEvent>, broadcast::Sender<ScheduleEvent>);

impl Default for Bus {
    fn default() -> Self {
        Bus(broadcast::channel(1_024).0, broadcast::channel(1_024).0, broadcast::channel(1_024).0)
    }
}

impl Bus {
    pub fn subscribe(&self) -> broadcast::Receiver<Event> {
        self.0.subscribe()
    }

    pub fn subscribe_to_workers(&self) -> broadcast::Receiver<WorkerEvent> {
        self.1.subscribe()
    }

    pub fn subscribe_to_schedules(&self) -> broadcast::Receiver<ScheduleEvent> {
        self.2.subscribe()
    }

    pub fn ticks(&self, ticks: &[TickRow]) {
        if self.2.receiver_count() > 0 {
            for tick in ticks {
                let _ = self.2.send(ScheduleEvent::new(tick.clone()));
            }
        }
    }

    pub fn worker(&self, key: &str, state: WorkerState, reason: Option<&str>, at: Timestamp) {
        if self.1.receiver_count() > 0 {
            let _ = self.1.send(WorkerEvent::new(key, state, reason, at));
        }
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
