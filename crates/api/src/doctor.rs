//! The checks of `faena doctor`, started by an operator through the API.
//!
//! They read the whole database, so they run in the background, one at a time, and at most once a minute.

use std::{
    pin::Pin,
    sync::Arc,
    time::{Duration, Instant},
};

use faena_domain::Timestamp;
use faena_wire::{DoctorFinding, DoctorReport};
use parking_lot::Mutex;

/// Minimum time between two checks.
const MIN_INTERVAL: Duration = Duration::from_secs(60);

/// Result of a check: the number of jobs it has read, and the findings.
pub type Checked = Result<(u64, Vec<DoctorFinding>), String>;

type Checking = Pin<Box<dyn Future<Output = Checked> + Send>>;
type Check = dyn Fn() -> Checking + Send + Sync;

/// The checks of this node and the last report.
#[derive(Clone)]
pub struct Doctor {
    check: Arc<Check>,
    last: Arc<Mutex<Last>>,
}

#[derive(Default)]
struct Last {
    report: DoctorReport,
    ended: Option<Instant>,
}

impl Default for Doctor {
    /// Returns checks that find nothing.
    fn default() -> Doctor {
        Doctor::new(|| async { Ok((0, Vec::new())) })
    }
}

impl Doctor {
    pub fn new<F: Future<Output = Checked> + Send + 'static>(check: impl Fn() -> F + Send + Sync + 'static) -> Doctor {
        let check = move || -> Checking { Box::pin(check()) };
        Doctor { check: Arc::new(check), last: Arc::default() }
    }

    /// Returns the last report.
    pub fn report(&self) -> DoctorReport {
        self.last.lock().report.clone()
    }

    /// Starts a check, unless one is running or has just ended. Returns the last report.
    pub fn start(&self) -> DoctorReport {
        let mut last = self.last.lock();
        if last.report.is_running || last.ended.is_some_and(|ended| ended.elapsed() < MIN_INTERVAL) {
            return last.report.clone();
        }
        last.report.is_running = true;
        let report = last.report.clone();
        drop(last);
        let doctor = self.clone();
        tokio::spawn(async move { doctor.run().await });
        report
    }

    async fn run(&self) {
        let began = Instant::now();
        // The check runs in its own task, so that a check that panics does not count as running forever.
        let checked = tokio::spawn((self.check)()).await.unwrap_or_else(|error| Err(error.to_string()));
        let took_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let report = DoctorReport {
            is_running: false,
            checked_at: Some(Timestamp::now()),
            took_ms: Some(took_ms),
            ..DoctorReport::default()
        };
        let report = match checked {
            Ok((jobs, findings)) => DoctorReport { jobs: Some(jobs), findings, ..report },
            Err(error) => DoctorReport { error: Some(error), ..report },
        };
        *self.last.lock() = Last { report, ended: Some(Instant::now()) };
    }
}
